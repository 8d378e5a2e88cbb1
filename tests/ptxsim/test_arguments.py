"""Numbers as arguments of a kernel."""

import pytest
import torch
import triton
import triton.language as tl

from ptxsim import Simulator

TYPES = {"x": "*fp32", "y": "*fp32", "n": "i32", "scale": "fp32", "shift": "fp64", "BLOCK": "constexpr"}


@triton.jit
def moved(x, y, n, scale, shift, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, scale * tl.load(x + at, at < n) + shift.to(tl.float32), at < n)


@pytest.fixture(scope="module")
def compiled():
    source = triton.compiler.ASTSource(moved, TYPES, {"BLOCK": 128})
    return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 100, 32))


@pytest.mark.parametrize("scale, shift", [(2.5, 0.75), (-4, 3)])
def test_floats_are_passed_as_floats(compiled, scale, shift):
    x, y = torch.arange(200.0), torch.empty(200)
    Simulator().launch(compiled, [x, y, 200, scale, shift], 2)
    assert torch.equal(y, scale * x + shift)


def test_a_float_is_no_integer(compiled):
    with pytest.raises(TypeError, match=r"moved_param_2: 200\.0, and the parameter is no float"):
        Simulator().launch(compiled, [torch.zeros(200), torch.empty(200), 200.0, 1.0, 0.0], 2)
