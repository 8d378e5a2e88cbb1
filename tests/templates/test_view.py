"""Views of tensors that launches read and write: what leaves a tensor's storage is an error before anything runs."""

import math

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.hardware import Target
from fp4compile.templates.quantize.launches import plan
from fp4compile.templates.quantize.source import source_of
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
    source = source_of(first, Target(90), prologue, (), (written,))
    assert source.view.sizes == (8, 6, 32) and source.view.strides == (600, 100, 1)
    after = source.once_read()
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
    first, prologue = torch.empty(4, 32, dtype=BF16), Prologue.parse(steps, BF16, stored)
    with pytest.raises(RuntimeError, match="a launch would address"):
        source_of(first, Target(90), prologue, (operand, row, column), (written,))


@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp8", "nvfp4_rowwise"])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
def test_a_launch_writes_within_its_outputs(format, layout, monkeypatch):
    """A byte fewer for codes or scales, or a global scale fewer, and no launch is made."""
    fmt, x, new_empty = formats.get(format), torch.empty(5, 80, dtype=BF16), torch.Tensor.new_empty
    for short in (None, 0, 1, *([2] if fmt.outer else [])):
        made = []

        def allocated(self, shape, short=short, made=made, **options):
            made.append(shape)
            elements = shape if isinstance(shape, int) else math.prod(shape)
            return new_empty(self, elements - (len(made) - 1 == short), **options)

        monkeypatch.setattr(torch.Tensor, "new_empty", allocated)
        if short is None:
            assert len(plan(QuantizeSpec(fmt, layout=layout), x, Target(90)).launches) == 1
            assert len(made) == (3 if fmt.outer else 2)
        else:
            with pytest.raises(RuntimeError, match="a launch would address"):
                plan(QuantizeSpec(fmt, layout=layout), x, Target(90))


def test_outer_scales_that_are_given_are_as_many_as_rows():
    x, spec = torch.empty(5, 80, dtype=BF16), QuantizeSpec(formats.get("nvfp4_rowwise"), static=True)
    assert len(plan(spec, x, Target(90), outer=torch.empty(5, 1)).launches) == 1
    with pytest.raises(RuntimeError, match="a launch would address"):
        plan(spec, x, Target(90), outer=torch.empty(4, 1))
