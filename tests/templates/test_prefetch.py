"""Prefetching by the kernels of rows that compute a prologue: which launches do, what the code has, that bits stay."""

import pytest
import torch

from fp4compile import _compat
from fp4compile.check.launches import GATE, RMS_NORM, after_steps
from fp4compile.check.sass import disassemble
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import dispatch, heuristics
from tests.helpers.kernels import spilled_bytes
from tests.helpers.norms import RESIDUAL

BF16 = torch.bfloat16


def launches(steps, format, sm=90, shape=(300, 512), stored=()):
    x = torch.empty(shape, dtype=BF16, device="meta")
    with dry_run(Target(sm)) as found:
        after_steps(x, formats.get(format), "linear", steps, stored)
    return found


@pytest.mark.parametrize(("steps", "format", "tensors"), [
    (GATE, "nvfp4_one_level", 2), (GATE, "nvfp4_rowwise", 2), (RMS_NORM, "nvfp4_one_level", 1),
    (RMS_NORM, "float8_rowwise", 1),
])  # fmt: skip
def test_each_tensor_is_prefetched_by_one_instruction(steps, format, tensors):
    """On Hopper, where that was timed; what has one element a column or a row stays in the cache anyway."""
    for sm, count in ((90, tensors), (100, 0)):
        (launch,) = launches(steps, format, sm, shape=(2048, 4096))
        compiled = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, sm)
        assert disassemble(compiled.asm["cubin"]).text.count("UBLKPF") == count
        assert sm == 100 or spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.parametrize("size", ["rows", "cols"])
@pytest.mark.parametrize(("steps", "format"), [(GATE, "nvfp4_one_level"), (GATE, "nvfp4_rowwise"), (RMS_NORM, "mxfp8")])
def test_sizes_may_have_64_bits(steps, format, size):
    """As Inductor passes symbolic ones."""
    (launch,) = launches(steps, format, shape=(2048, 4096))
    arguments = {**launch.args, size: 2**33}
    compiled = _compat.compile_ahead(launch.kernel, arguments, launch.constants, launch.num_warps, 90)
    assert "cp.async.bulk.prefetch.L2" in compiled.asm["ptx"]


def test_programs_ahead_are_counted_by_multiprocessors():
    (few,), (many,) = (launches(RMS_NORM, "mxfp8", target) for target in (90, 100))
    assert (few.constants["AHEAD"], many.constants["AHEAD"]) == (4 * 132, 0)
    with dry_run(Target(90, 114)) as found:
        after_steps(torch.empty(300, 512, dtype=BF16, device="meta"), formats.get("mxfp8"), "linear", RMS_NORM)
    assert found[0].constants["AHEAD"] == 4 * 114


@pytest.mark.parametrize(("steps", "format", "stored"), [
    (RMS_NORM, "nvfp4", ()),  # both kernels: the second one finds in the cache what the first one read last
    (GATE, "nvfp4", ()), (GATE, "mxfp8", ()), (RESIDUAL, "nvfp4_one_level", ("s0 bfloat16",)),
])  # fmt: skip
def test_what_gains_nothing_prefetches_nothing(steps, format, stored):
    assert not any(launch.constants.get("AHEAD") for launch in launches(steps, format, stored=stored))


def test_only_contiguous_operands_of_one_matrix_are_prefetched():
    """A span of one number is the same elements of each operand, and 16 bytes are copied at a time."""

    def ahead(first, *others, steps=GATE):
        with dry_run(Target(90)) as found:
            reading = dispatch.Reading(Prologue.parse(steps, BF16), others)
            dispatch.quantize(first, formats.get("nvfp4_rowwise"), reading=reading)
        (launch,) = found
        return launch.constants["AHEAD"]

    def empty(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device="meta")

    assert ahead(empty(300, 512), empty(300, 512)) and ahead(empty(2, 150, 512), empty(2, 150, 512)) == 0
    gate, up = empty(300, 1024).chunk(2, -1)
    assert ahead(gate, up) == 0 and ahead(empty(300, 512), up) == 0
    assert ahead(empty(300, 516), empty(300, 516)) == 0  # rows of 1032 bytes
    assert ahead(empty(301 * 512)[4:516].view(1, 512), empty(1, 512)) == 0  # begins at 8 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
@pytest.mark.parametrize("steps", [GATE, RMS_NORM], ids=["gate", "norm"])
@pytest.mark.parametrize("shape", [(2, 8192), (601, 4096), (601, 5120)], ids=str)
def test_bits_are_those_without(steps, format, shape, monkeypatch):
    """Of rows before and after the last one that is prefetched, and with fewer rows than programs ahead."""
    x, other = (torch.randn(shape, device="cuda").to(BF16) for _ in range(2))
    x[0, 3], x[-1, 5] = float("inf"), float("nan")
    reading = dispatch.Reading(Prologue.parse(steps, BF16), (other if steps is GATE else other[0],))
    found = []
    for ahead in (heuristics.PROGRAMS_AHEAD[90], 0):
        monkeypatch.setitem(heuristics.PROGRAMS_AHEAD, 90, ahead)
        found.append(dispatch.quantize(x, formats.get(format), reading=reading))
    for one, plain in zip(*found, strict=True):
        assert one is plain or torch.equal(one.view(torch.uint8), plain.view(torch.uint8))
