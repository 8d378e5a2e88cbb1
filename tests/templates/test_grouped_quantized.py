"""Products of groups that quantise their results: the kernel in Triton's interpreter, and its machine code for SM100.

In the interpreter in the process of test_grouped_kernels.py. tests/simulate/test_quantized_results.py runs the compiled
kernel.
"""

from dataclasses import replace

import pytest
import torch

from fp4compile import hardware
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.groups import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates import choose
from fp4compile.templates.multiply import multiply, multiply_quantized
from tests.helpers.arguments import of_groups
from tests.helpers.codes import as_bytes
from tests.helpers.foreign import embedded, poisoned_outputs
from tests.helpers.hard_inputs import stacked
from tests.helpers.kernels import INTERPRETING

BF16 = torch.bfloat16
RESULTS = ("nvfp4_one_level", "nvfp4", "mxfp8", "mxfp4", "mxfp8_e5m2", "nvfp4_te")
interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
compiles = pytest.mark.skipif(INTERPRETING, reason="compiles")


@pytest.fixture
def served(monkeypatch):
    """The kernel alone, on the GPU that the interpreter stands for."""
    always = dict.fromkeys(("serves", "quantizes"), lambda p: True)
    found = replace(choose.named("grouped_block_scaled_sm100"), **always)
    monkeypatch.setattr(choose, "REGISTRY", (found,))
    torch.manual_seed(0)


def operands(x, w, offs, name):
    """Rows of groups and a matrix for each, quantised by the reference to swizzled scales."""
    fmt, groups = formats.get(name), Groups.of(offs, len(x))
    a = reference_grouped.quantize_rows(x, groups, fmt, None, "swizzled", None)
    b = reference_grouped.quantize_matrices(w, fmt, -1, None, "swizzled", None, False)
    return Operand(*a, fmt), Operand(*b, fmt)


def check(arguments, value):
    """Codes and scales of the kernel are those of the value; codes of rows of no group stay what they were."""
    groups, spec = Groups.of(arguments.offs, len(value)), arguments.epilogue.quantize
    offs, b = arguments.offs, arguments.b
    arguments = replace(arguments, offs=embedded(offs), b=replace(b, data=embedded(b.data), scales=embedded(b.scales)))
    with poisoned_outputs():
        data, scales = map(as_bytes, multiply_quantized(arguments))
    expected = reference_grouped.quantize_rows(value, groups, spec.format, arguments.result_outer, "swizzled", None)
    of_group = groups.of_rows < groups.count
    assert torch.equal(data[of_group], as_bytes(expected[0])[of_group])
    assert torch.equal(scales, as_bytes(expected[1]))
    assert (data[~of_group] == 0x7F).all()


# Sizes of groups, and how many rows of no group follow.
ENDS = {
    "ragged": ((0, 3, 130, 0, 1, 29), 7),
    "whole": ((128, 256, 128), 0),
    "empty": ((0, 0, 0), 130),
    "one": ((140,), 0),
}


@interpreted
@pytest.mark.parametrize(("name", "columns", "ends"), [
    *((name, columns, "ragged") for name in RESULTS for columns in (96, 152)),
    *(("mxfp8", 136, ends) for ends in ENDS if ends != "ragged"), ("nvfp4", 48, "whole"),
])  # fmt: skip
def test_codes_of_hard_inputs(name, columns, ends, served):
    """Whole and partly filled blocks and tiles of scales; the result is a matrix of hard inputs.

    It is read as float32, because the interpreter casts subnormal numbers of bfloat16 wrongly.
    """
    sizes, left = ENDS[ends]
    fmt, rows, offs = formats.get(name), sum(sizes) + left, torch.tensor(sizes).cumsum(0).to(torch.int32)
    value = stacked((-(-rows // 8), columns), BF16, fmt.block_cols)[torch.randperm(rows)]
    a, b = operands(torch.randn(rows, 64), torch.randn(len(sizes), columns, 64), offs, "mxfp8")
    steps = ["mul product 0.0", "add s0 1.0", "mul s1 aux0", f"quantize {name}"]
    outer = torch.tensor(0.01) if fmt.outer else None
    epilogue = Epilogue.parse(steps, BF16, BF16)
    check(Arguments(a, b, None, BF16, epilogue, [value.float()], outer, offs), value)


@interpreted
@pytest.mark.parametrize(("name", "outer"), [("mxfp8", None), ("nvfp4", "group"), ("nvfp4", "tensor"),
                                             ("nvfp4", "row"), ("nvfp4_rowwise", "group")])  # fmt: skip
def test_codes_of_a_pair(name, outer, served, monkeypatch):
    """Gate and up of each group lie one below the other, each in two tiles of columns; programs take several tiles."""
    monkeypatch.setitem(hardware._MULTIPROCESSORS, 90, 3)  # which the interpreter counts as having
    offs = torch.tensor([0, 3, 133, 133, 140], dtype=torch.int32)
    a, b = operands(torch.randn(145, 64), torch.randn(5, 512, 64), offs, name)
    if outer is not None:
        shape = {"tensor": (), "group": (5,), "row": (5, 512, 1)}[outer]
        b = replace(b, outer=torch.rand(shape) + 0.5)
    product, pair = multiply(of_groups(a, b, offs, 145, BF16)).chunk(2, -1)
    value = (product.float().relu() * pair.float()).bfloat16()
    epilogue = Epilogue.parse(["relu product", "mul s0 pair", "quantize mxfp8"], BF16, BF16)
    check(Arguments(a, b, None, BF16, epilogue, offs=offs), value)


@interpreted
@pytest.mark.parametrize("offs", [(0, 0, 300), (140, 20, 1000), (-300, 0, 7)], ids=str)
def test_offsets(offs, served):
    """Everything in one group, offsets that decrease, that exceed the rows and that are negative."""
    offs = torch.tensor(offs, dtype=torch.int32)
    a, b = operands(torch.randn(300, 32), torch.randn(3, 32, 32), offs, "mxfp8")
    value = multiply(of_groups(a, b, offs, 300, BF16)).relu()
    check(Arguments(a, b, None, BF16, Epilogue.parse(["relu product", "quantize mxfp8"], BF16, BF16), offs=offs), value)
