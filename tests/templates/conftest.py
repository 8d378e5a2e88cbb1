"""Every kernel is compiled ahead of time, and disassembled, once in a process, however many tests look at its code."""

import functools

import pytest
import torch

from fp4compile import _compat
from fp4compile.check import machine_code
from tests.helpers.kernels import INTERPRETING
from tests.helpers.quantisers import make_tiles_tall

_compile_ahead, _compiled = _compat.compile_ahead, {}


def _signature(value):
    """What the code depends on in an argument."""
    if value is None or isinstance(value, torch.Tensor):
        return None if value is None else value.dtype
    return value == 1, value % 16 == 0, abs(value) < 2**31


def compile_once(kernel, args, constants, num_warps, sm, num_stages=3, num_ctas=1):
    """`_compat.compile_ahead`, the same for launches of one kernel, signature and GPU."""
    arguments = tuple((name, _signature(value)) for name, value in args.items())
    key = (kernel.cache_key, kernel.__name__, arguments, tuple(constants.items()), num_warps, sm, num_stages, num_ctas)
    if key not in _compiled:
        _compiled[key] = _compile_ahead(kernel, args, constants, num_warps, sm, num_stages, num_ctas)
    return _compiled[key]


disassemble_once = functools.lru_cache(64)(machine_code.disassemble)  # tests of one file follow each other


@pytest.fixture(autouse=True)
def kernels_compiled_once(monkeypatch):
    monkeypatch.setattr(_compat, "compile_ahead", compile_once)
    monkeypatch.setattr(machine_code, "disassemble", disassemble_once)


@pytest.fixture
def tall_tiles(monkeypatch):
    """In the interpreter, 16 rows a program; `test_shapes` of each file does small shapes by one."""
    if INTERPRETING:
        make_tiles_tall(monkeypatch)


@pytest.fixture
def poisoned_memory():
    """What is allocated holds ones in every bit, so that a byte that no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
