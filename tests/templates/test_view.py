"""Views of tensors that launches read and write: what leaves a tensor's storage is an error before anything runs."""

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.hardware import Target
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import views
from fp4compile.templates.quantize.row import launch_rows
from fp4compile.templates.view import View, span, within

BF16 = torch.bfloat16


@pytest.mark.parametrize("sizes, strides, elements", [
    ((3, 5), (8, 1), 21), ((1, 5), (10**9, 1), 5), ((0, 5), (8, 1), 0), ((2, 3, 4), (12, 4, 1), 24), ((7,), (0,), 1),
])  # fmt: skip
def test_span(sizes, strides, elements):
    assert span(sizes, strides) == elements


def test_a_view_ends_where_its_storage_does():
    x = torch.empty(4, 8)
    View(x, (4, 8), (8, 1))
    View(x[1:, 4:], (3, 4), (8, 1))
    for tensor, sizes, strides in ((x, (4, 9), (8, 1)), (x, (4, 8), (9, 1)), (x[1:, 4:], (3, 5), (8, 1))):
        with pytest.raises(RuntimeError, match="would address 3[0-9] elements|would address 21 elements"):
            View(tensor, sizes, strides)
    assert within(x, 32) is x
    with pytest.raises(RuntimeError, match="whose storage has 31 from its first element on"):
        within(x.view(-1)[1:], 32)


def test_what_replaces_a_tensor_has_its_own_strides():
    """The second kernel reads the stored result, which is contiguous, and not the slice that the first one read."""
    prologue = Prologue.parse(["relu aux0"], BF16, ["s0 bfloat16"])
    first, written = torch.empty(2, 4, 6, 100, dtype=BF16)[..., 32:64], torch.empty(2, 4, 6, 32, dtype=BF16)
    source = views.matrices(first, prologue, (), (written,))
    assert source.view.sizes == (8, 6, 32) and source.view.strides == (600, 100, 1)
    after = source.after(views.Outer(None, None, "amax"))
    assert after.prologue is None and after.view.sizes == (8, 6, 32) and after.view.strides == (192, 32, 1)
    assert after.tensor.untyped_storage().data_ptr() == written.untyped_storage().data_ptr()


@pytest.mark.parametrize("which", ["operand", "row", "column", "stored"])
def test_operands_of_a_prologue_end_where_their_storage_does(which):
    steps, stored = ["mul aux0 aux1", "mul s0 row2", "mul s1 col3"], ["s0 bfloat16"]
    sizes = {"operand": 4 * 32, "row": 32, "column": 4, "stored": 4 * 32}
    sizes[which] -= 1
    operand, row, column, written = (torch.empty(sizes[name], dtype=BF16) for name in sizes)
    if which != "operand":
        operand = operand.view(4, 32)
    source = views.matrices(torch.empty(4, 32, dtype=BF16), Prologue.parse(steps, BF16, stored),
                            (operand, row, column), (written,))  # fmt: skip
    with pytest.raises(RuntimeError, match="a launch would address"):
        source.read_args  # noqa: B018


@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp8", "nvfp4_rowwise"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_a_launch_writes_within_its_outputs(format, layout):
    """A byte fewer for codes or scales, or an outer scale fewer, and the launch is refused."""
    fmt, x = formats.get(format), torch.empty(5, 80, dtype=BF16)
    data, scales = views.empty_outputs(x, fmt, layout)
    outer = torch.empty(5, 1) if fmt.outer == "row" else None

    def launched(data, scales, outer):
        with dry_run(Target(90)) as launches:
            launch_rows(views.matrices(x), fmt, data, scales, outer, layout)
        return len(launches)

    assert launched(data, scales, outer) == 1
    for i, tensor in enumerate((data, scales, outer)):
        if tensor is not None:
            changed = [data, scales, outer]
            changed[i] = torch.empty(tensor.numel() - 1, dtype=tensor.dtype)
            with pytest.raises(RuntimeError, match="a launch would address"):
                launched(*changed)
