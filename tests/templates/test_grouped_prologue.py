"""Quantisers of groups with a prologue: the kernels against the reference of the steps, then of the groups, to the bit.

In Triton's interpreter in the process of test_grouped_kernels.py.
"""

from unittest import mock

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.grouping import Groups
from fp4compile.formats.prologue import Prologue
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.quantize import launches
from tests.helpers.hard_inputs import hard_input
from tests.helpers.kernels import DEVICE, assert_same_bits, gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")
BF16 = torch.bfloat16
# Empty groups, small ones, one of two tiles of 128 rows; 4 rows of no group.
SIZES = (0, 3, 130, 0, 1, 6)
ROWS = sum(SIZES) + 4
# Steps of functions that all libraries compute alike; not 0 of zeros, as padding has them.
GATE = ["relu aux0", "add s0 1.0", "mul s1 aux1"]
GRADIENT = ["mul aux0 aux1", "relu aux2", "sub 1.0 s1", "mul s0 s2"]
ROUTED = ["add aux0 1.0", "mul s0 col1", "mul s1 row2"]


def operands_of(steps, cols, sliced, block=16):
    """For the steps: hard inputs in the groups, NaN in rows of no group. sliced: the tensors are slices of one."""
    kinds = [kind for _, kind in sorted(Prologue.parse(steps, BF16).kinds.items())]
    generator = torch.Generator().manual_seed(3)
    wide = torch.randn(ROWS, kinds.count("aux") * cols, generator=generator).bfloat16()
    parts = [
        hard_input(name, (size, cols), BF16, block)
        for name, size in zip(("randn", "one_nan", "scaled_rows", "randn", "outliers", "ties_fp4"), SIZES, strict=True)
    ]
    wide[: sum(SIZES), :cols] = torch.cat(parts)
    wide[sum(SIZES) :] = torch.nan
    tensors = iter(wide.split(cols, -1) if sliced else [each.contiguous() for each in wide.split(cols, -1)])
    shapes = {"row": (cols,), "col": (ROWS, 1)}
    return [next(tensors) if kind == "aux" else torch.randn(shapes[kind], generator=generator) for kind in kinds]


def on_device(x):
    """x there, a slice as a slice."""
    whole = x if x._base is None else x._base
    return whole.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def check(steps, format, cols=40, sliced=True, **options):
    """The kernels' bits against the op's on the CPU, which is the reference; rows of no group mean nothing."""
    fmt, offs = formats.get(format), torch.tensor(SIZES).cumsum(0).to(torch.int32)
    operands = operands_of(steps, cols, sliced, fmt.block_cols if fmt.block else 16)
    first, *others = operands
    expected = QUANTIZE(first, format, offs=offs, operands=others, prologue=steps, **options)
    with mock.patch.object(launches, "apply", None):  # by kernels
        got = by_kernels(operands, steps, offs, format, **options)
    in_groups = Groups.of(offs, ROWS).of_rows < len(SIZES)
    assert_same_bits(got, expected, in_groups)


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp4", "mxfp8"])
def test_formats(format):
    """Where groups matter, for swizzled scales, and where they do not."""
    check(GATE, format, layout="swizzled")
    check(ROUTED, format)


@gpu
@pytest.mark.parametrize(("cols", "sliced"), [(41, True), (72, False)])
def test_operands(cols, sliced):
    """Of any width, contiguous and as slices; three tensors, a factor for each row, one for each column."""
    for layout in ("linear", "swizzled"):
        check(GRADIENT, "nvfp4_one_level", cols, sliced, layout=layout)
        check(GATE, "mxfp8", cols, sliced, layout=layout)
        check(ROUTED, "mxfp4", cols, layout=layout)


@gpu
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_rowwise", "float8_rowwise"])
def test_an_outer_scale_that_is_given(format):
    for layout in ("linear", "swizzled"):
        check(GATE, format, layout=layout, outer=torch.tensor(0.25))


@gpu
@pytest.mark.parametrize("format", ["nvfp4_rowwise", "float8_rowwise"])
def test_an_outer_scale_of_each_row(format):
    """Such rows depend on nothing beside them, the groups included, where block scales are linear."""
    check(GATE, format)
    check(ROUTED, format, 41)


@gpu
def test_what_no_kernel_reads():
    """By PyTorch, then quantised: float32, statistics, and before an amax of groups, or of rows in padded groups."""
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    for steps, dtype, format, layout in (
        (GATE, torch.float32, "mxfp8", "linear"), (["mean aux0", "sub aux0 s0"], BF16, "mxfp8", "linear"),
        (GATE, BF16, "nvfp4", "linear"), (GATE, BF16, "nvfp4_rowwise", "swizzled"),
    ):  # fmt: skip
        operands = [x.to(dtype) for x in operands_of(steps, 40, False)]
        first, *others = operands
        expected = QUANTIZE(first, format, offs=offs, operands=others, prologue=steps, dtype=BF16, layout=layout)
        with mock.patch.object(launches, "apply", wraps=launches.apply) as applied:
            got = by_kernels(operands, steps, offs, format, layout=layout)
        assert applied.called
        for one, other in zip(got[:2], expected[:2], strict=True):
            rows = sum(SIZES) if one.dim() == 2 else None  # swizzled scales are those of groups
            one, other = (each[:rows].cpu().view(torch.uint8) for each in (one, other))
            assert torch.equal(one, other)


def by_kernels(operands, steps, offs, format, **options):
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    first, *others = map(on_device, operands)
    return quantize_kernels(first, format, offs=offs.to(DEVICE), operands=others, prologue=steps, dtype=BF16, **moved)


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"offs": torch.tensor([4])}, TypeError, "offs: expected int32"),
    ({"dtype": torch.int32}, ValueError, "dtype: expected one of"),
    ({"operands": [torch.zeros(4, 32)]}, ValueError, "operands: expected 0 besides x"),
    ({"format": "nvfp4_16x16"}, ValueError, "format: nvfp4_16x16 has square blocks"),
    ({"stored": ["s0 bfloat16"]}, ValueError, "stored: rows of groups store nothing"),
])  # fmt: skip
def test_bad_input(changes, error, said):
    given = {"prologue": ["relu aux0"], "dtype": BF16, "offs": torch.tensor([4], dtype=torch.int32), "format": "mxfp8"}
    with pytest.raises(error, match=said):
        QUANTIZE(torch.zeros(4, 32), **{**given, **changes})
