"""Quantisers with a prologue: the kernels against the reference of the steps, then of the quantiser, bit for bit.

As in test_quantize_kernels.py: on a GPU, and in Triton's interpreter in a process of its own.
"""

import pytest
import torch

from fp4compile import formats, ops_prologue
from fp4compile.prologue import Prologue
from tests.helpers.hard_inputs import NAMES, NON_FINITE, hard_input
from tests.helpers.kernels import DEVICE, gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

# Steps without functions that two libraries compute differently.
RESIDUAL = ["add aux0 aux1"]
NORM = ["sub aux0 col1", "mul s0 col2", "mul s1 row3", "add s2 row4"]
SHIFT = ["relu aux0", "square s0", "add s1 1.0"]  # not 0 of 0
WEIGHT = ["add row1 1.0", "mul aux0 s0"]


def operands_of(steps, first, row_dtype=BF16):
    """Operands for the steps, of which `first` is one."""
    kinds = Prologue.parse(steps, BF16).kinds
    generator = torch.Generator().manual_seed(7)
    *lead, cols = first.shape
    shapes = {"aux": (*lead, cols), "row": (cols,), "col": (*lead, 1)}
    dtypes = {"aux": first.dtype, "row": row_dtype, "col": F32}
    return [first] + [
        torch.randn(shapes[kinds[i]], generator=generator).to(dtypes[kinds[i]]) for i in range(1, len(kinds))
    ]


def check(steps, first, op, format, dim=-1, row_dtype=BF16, **options):
    """The kernels' bits against the op's on the CPU, which is the reference."""
    operands = operands_of(steps, first, row_dtype)
    arguments = (steps, first.dtype, op, format, dim)
    expected = torch.ops.fp4compile.quantize_prologue(operands, *arguments, **options)
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    got = ops_prologue.quantize_prologue_cuda([x.to(DEVICE) for x in operands], *arguments, **moved)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = one.reshape(-1).cpu(), other.reshape(-1)
        if one.dtype in (F32, F16):  # NaNs are equal whatever their payload
            one, other = one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise"])
def test_hard_inputs(format):
    """Rows: NaN, infinities, zeros and ties on their way through the steps."""
    fmt = formats.get(format)
    block = fmt.block_cols if fmt.block else 16
    finite = torch.cat([hard_input(name, (1, 80), BF16, block) for name in NAMES if name not in NON_FINITE])
    check(["mul aux0 1.0"], finite, "quantize", format)
    rest = torch.cat([hard_input(name, (2, 80), BF16, block) for name in NON_FINITE])
    check(RESIDUAL, rest, "quantize", format)
    check(NORM, hard_input("randn", (3, 80), BF16, block), "quantize", format)
