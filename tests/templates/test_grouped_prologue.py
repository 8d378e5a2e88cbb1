"""Quantisers of groups with a prologue: the kernels against the reference of the steps, then of the groups, to the bit.

In Triton's interpreter in the process of test_grouped_kernels.py.
"""

from unittest import mock

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.groups import Groups
from fp4compile.formats.prologue import Prologue
from fp4compile.ops import grouped_prologue as ops_grouped_prologue
from tests.helpers.hard_inputs import hard_input
from tests.helpers.kernels import DEVICE, gpu

BF16 = torch.bfloat16
# Empty groups, small ones, one of two tiles of 128 rows; 4 rows of no group.
SIZES = (0, 3, 130, 0, 1, 6)
ROWS = sum(SIZES) + 4
# Steps of functions that all libraries compute alike; not 0 of zeros, as padding has them.
GATE = ["relu aux0", "add s0 1.0", "mul s1 aux1"]
GRADIENT = ["mul aux0 aux1", "relu aux2", "sub 1.0 s1", "mul s0 s2"]
ROUTED = ["add aux0 1.0", "mul s0 col1", "mul s1 row2"]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """What is allocated holds ones in every bit, so that a byte that no kernel wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


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


def check(steps, op, format, *arguments, cols=40, sliced=True, **options):
    """The kernels' bits against the op's on the CPU, which is the reference; rows of no group mean nothing."""
    fmt, offs = formats.get(format), torch.tensor(SIZES).cumsum(0).to(torch.int32)
    operands = operands_of(steps, cols, sliced, fmt.block_cols if fmt.block else 16)
    given = op, format, *arguments
    expected = torch.ops.fp4compile.quantize_grouped_prologue(operands, steps, BF16, offs, *given, **options)
    moved = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    with mock.patch.object(ops_grouped_prologue, "apply", None):  # by kernels
        got = ops_grouped_prologue.quantize_grouped_prologue_cuda(
            list(map(on_device, operands)), steps, BF16, offs.to(DEVICE), *given, **moved
        )
    in_groups = Groups.of(offs, ROWS).of_rows < len(SIZES)
    for one, other in zip(got, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one = one.cpu()
        if one.dim() == 2 and len(one) == ROWS:
            one, other = one[in_groups], other[in_groups]
        if one.dtype.itemsize > 1:  # NaNs are equal whatever their payload
            one, other = one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8"])
def test_formats(format):
    """Along the rows, where groups matter and where they do not; along the rows of groups; along both."""
    check(GATE, "quantize_grouped", format, layout="swizzled")
    check(ROUTED, "quantize_grouped", format, -2)
    check(GATE, "quantize_grouped_both", format, cols=72 if format == "nvfp4" else 40, layout="swizzled")


@gpu
@pytest.mark.parametrize(("cols", "sliced"), [(41, True), (72, False)])
def test_operands(cols, sliced):
    """Of any width, contiguous and as slices; three tensors, a factor for each row, one for each column."""
    check(GRADIENT, "quantize_grouped", "nvfp4", cols=cols, sliced=sliced)
    check(GATE, "quantize_grouped_both", "mxfp8", cols=cols, sliced=sliced)
    check(ROUTED, "quantize_grouped_both", "nvfp4", cols=cols)


@gpu
def test_training_and_values():
    """The Hadamard transform and random bits, a given outer scale, and values in the place of codes."""
    check(GATE, "quantize_grouped_both", "nvfp4_te", hadamard=True)
    check(GATE, "quantize_grouped", "nvfp4", layout="swizzled", outer=torch.tensor(0.25))
    check(GATE, "fake_quantize_grouped", "nvfp4")
    check(GATE, "fake_quantize_grouped", "mxfp8", -2)
    check(ROUTED, "fake_quantize_grouped_both", "nvfp4", -1, "columns")
    if DEVICE == "cpu":  # on SM100 random bits are the hardware's
        check(GATE, "quantize_grouped_both", "nvfp4_te", seed=torch.tensor(5), hadamard=True)


@gpu
def test_what_no_kernel_reads():
    """By PyTorch, then quantised: float32, statistics, three tensors down the columns, long functions in both ways."""
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    for steps, dtype, *given in (
        (GATE, torch.float32, "quantize_grouped", "mxfp8", -2),
        (["mean aux0", "sub aux0 s0"], BF16, "quantize_grouped", "mxfp8", -2),
        (GRADIENT, BF16, "quantize_grouped", "mxfp8", -2),
        (["sigmoid aux0", "mul s0 0.0"], BF16, "quantize_grouped_both", "mxfp8"),
    ):
        operands = [x.to(dtype) for x in operands_of(steps, 40, False)]
        expected = torch.ops.fp4compile.quantize_grouped_prologue(operands, steps, BF16, offs, *given)
        with mock.patch.object(ops_grouped_prologue, "apply", wraps=ops_grouped_prologue.apply) as applied:
            got = by_kernels(operands, steps, BF16, offs, *given)
        assert applied.called
        first = 3 if given[0].endswith("both") else 0  # columns, of which all rows are in groups
        for one, other in zip(got[first : first + 2], expected[first : first + 2], strict=True):
            assert torch.equal(one.cpu().view(torch.uint8), other.view(torch.uint8))


def by_kernels(operands, steps, dtype, offs, *arguments):
    operands, offs = [x.to(DEVICE) for x in operands], offs.to(DEVICE)
    return ops_grouped_prologue.quantize_grouped_prologue_cuda(operands, steps, dtype, offs, *arguments)


@pytest.mark.parametrize(("changes", "error", "said"), [
    ({"op": "quantize"}, ValueError, "op: expected one of quantize_grouped"),
    ({"op": "quantize_grouped_both", "dim": -2}, ValueError, "dim: quantize_grouped_both takes none"),
    ({"values": "rows"}, ValueError, "values: quantize_grouped takes none"),
    ({"op": "fake_quantize_grouped", "layout": "swizzled"}, ValueError, "layout: fake_quantize_grouped takes none"),
    ({"offs": torch.tensor([4])}, TypeError, "offs: expected int32"),
    ({"dtype": torch.int32}, ValueError, "dtype: expected one of"),
    ({"operands": [torch.zeros(4, 32)] * 2}, ValueError, "operands: expected 1"),
    ({"format": "nvfp4_16x16"}, ValueError, "format: nvfp4_16x16 has square blocks"),
])  # fmt: skip
def test_bad_input(changes, error, said):
    given = {"operands": [torch.zeros(4, 32)], "prologue": ["relu aux0"], "dtype": BF16,
             "offs": torch.tensor([4], dtype=torch.int32), "op": "quantize_grouped", "format": "mxfp8"}  # fmt: skip
    with pytest.raises(error, match=said):
        torch.ops.fp4compile.quantize_grouped_prologue(**{**given, **changes})
