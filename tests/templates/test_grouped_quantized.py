"""Products of groups that quantise their results: the kernel in Triton's interpreter, and its machine code for SM100.

In the interpreter in the process of test_grouped_kernels.py. tests/ptxsim/test_quantized_results.py runs the compiled
kernel.
"""

import re
from dataclasses import replace

import pytest
import torch

from fp4compile import hardware
from fp4compile.check.machine_code import compile_launch, product_row
from fp4compile.check.products import MatmulCase
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.quantize import quantize_kernels
from fp4compile.templates import choose
from fp4compile.templates.gemm import cost
from fp4compile.templates.multiply import multiply, results
from fp4compile.templates.problem import problem_of
from tests.helpers.arguments import call, of_groups
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
    always = dict.fromkeys(("serves", "quantizes", "finds_amax"), lambda p: True)
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
    groups, fmt = Groups.of(arguments.offs, len(value)), arguments.spec.result
    offs, b = arguments.offs, arguments.b
    arguments = replace(arguments, offs=embedded(offs), b=replace(b, data=embedded(b.data), scales=embedded(b.scales)))
    with poisoned_outputs():
        data, scales = map(as_bytes, results(arguments))
    expected = reference_grouped.quantize_rows(value, groups, fmt, arguments.result_outer, "swizzled", None)
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
    check(Arguments.of(a, b, None, BF16, epilogue, [value.float()], outer, offs), value)


@interpreted
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize(("name", "outer"), [("mxfp8", None), ("nvfp4", "group"), ("nvfp4", "tensor"),
                                             ("nvfp4", "row"), ("nvfp4_rowwise", "group")])  # fmt: skip
def test_codes_of_a_pair(name, outer, weights, served, monkeypatch):
    """Gate and up, each in two tiles of columns: in one matrix for each group, or in two. Programs take several tiles.

    Two weights have a global scale for each matrix.
    """
    monkeypatch.setitem(hardware._MULTIPROCESSORS, 90, 3)  # which the interpreter counts as having
    offs = torch.tensor([0, 3, 133, 133, 140], dtype=torch.int32)
    matrices, rows = 5 * weights, 512 // weights
    a, b = operands(torch.randn(145, 64), torch.randn(matrices, rows, 64), offs, name)
    if outer is not None:
        shape = {"tensor": (), "group": (matrices,), "row": (matrices, rows, 1)}[outer]
        b = replace(b, outer=torch.rand(shape) + 0.5)
    each = [b] if weights == 1 else reference_grouped.halves(b)
    product, pair = torch.cat([multiply(of_groups(a, one, offs, 145, BF16)) for one in each], -1).chunk(2, -1)
    value = (product.float().relu() * pair.float()).bfloat16()
    epilogue = Epilogue.parse(["relu product", "mul s0 pair", "quantize mxfp8"], BF16, BF16)
    check(Arguments.of(a, b, None, BF16, epilogue, offs=offs), value)


@interpreted
@pytest.mark.parametrize("offs", [(0, 0, 300), (140, 20, 1000), (-300, 0, 7)], ids=str)
def test_offsets(offs, served):
    """Everything in one group, offsets that decrease, that exceed the rows and that are negative."""
    offs = torch.tensor(offs, dtype=torch.int32)
    a, b = operands(torch.randn(300, 32), torch.randn(3, 32, 32), offs, "mxfp8")
    value = multiply(of_groups(a, b, offs, 300, BF16)).relu()
    check(
        Arguments.of(a, b, None, BF16, Epilogue.parse(["relu product", "quantize mxfp8"], BF16, BF16), offs=offs), value
    )


@interpreted
@pytest.mark.parametrize("layout", ["swizzled", "linear"])
@pytest.mark.parametrize("ends", ENDS)
def test_amaxes(ends, layout, served):
    """The amax of each group, from which the quantiser's kernel makes its global scale; one group has NaN.

    Rows of no group have larger values, but are stored as zeros.
    """
    sizes, left = ENDS[ends]
    rows, offs = sum(sizes) + left, torch.tensor(sizes).cumsum(0).to(torch.int32)
    value = torch.randn(rows, 160).bfloat16() * 10.0 ** torch.arange(rows).unsqueeze(-1).div(40, rounding_mode="floor")
    value = value.bfloat16()
    if ends == "ragged":
        value[-left - 1, -1] = torch.nan
    a, b = operands(torch.randn(rows, 64), torch.randn(len(sizes), 160, 64), offs, "mxfp8")
    epilogue = Epilogue.parse(["mul product 0.0", "add s0 aux0", "amax"], BF16, BF16)
    with poisoned_outputs():
        got, maxima = results(Arguments.of(a, b, None, BF16, epilogue, [value.float()], None, embedded(offs)))
    expected, largest = reference_grouped.with_maxima(value, offs)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num()) and (got[sum(sizes) :] == 0).all()
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(maxima.isnan(), largest.isnan())
    assert torch.equal(maxima.nan_to_num(), largest.nan_to_num()) and maxima.isnan().sum() == (ends == "ragged")
    maxima = maxima.nan_to_num(1e4)
    data, scales, outer = quantize_kernels(got, "nvfp4", offs=offs, layout=layout, amax=2 * maxima)
    fmt, of_group = formats.get("nvfp4"), Groups.of(offs, rows).of_rows < len(sizes)
    found = reference_grouped.quantize_rows(got, Groups.of(offs, rows), fmt, None, layout, None, 2 * maxima)
    assert torch.equal(as_bytes(data)[of_group], as_bytes(found[0])[of_group])
    of_rows = of_group if layout == "linear" else slice(None)
    assert torch.equal(as_bytes(scales)[of_rows], as_bytes(found[1])[of_rows])
    assert torch.equal(outer, found[2]) and torch.equal(outer, reference.outer_of(2 * maxima, fmt))


# ---------------------------------------------------------------- machine code


EXPERTS = MatmulCase("nvfp4_one_level", "nvfp4_one_level", 8192, 2048, 4096, groups=64, result="nvfp4_one_level")


def instructions(product):
    _, (launched,) = product.launches(100)
    code = compile_launch(launched, 100)
    elements = launched.constants["BM"] * launched.constants["BN"]
    count = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code.sass.text, re.M))
    return count / (elements / 16 / (32 * launched.num_warps)), code


@compiles
def test_machine_code():
    """Scales of operands by `tcgen05.cp`, operands by TMA, copies beside products, no spills; codes 16 bytes at once.

    The epilogue has no more instructions than without groups, which the cost model counts: it stores fewer parts than
    one that stores bf16, while without groups TMA stores both.
    """
    per_16, code = instructions(EXPERTS)
    launched = code.launched
    row = product_row(EXPERTS, "native", launched, 100)
    assert row.line == "block-scaled, words" and not row.problems and row.resources.registers <= 168
    assert (row.tma_loads, row.waits, launched.num_stages) == (4, 2, 4)
    stores = code.sass.widths("STG")
    assert set(stores) == {4, 8, 16}  # entries of the table; scales; codes and, before them, zeros
    codes = launched.constants["BM"] * launched.constants["BN"] // 2
    assert stores.count(16) >= codes // (16 * 32 * launched.num_warps)
    stored, _ = instructions(replace(EXPERTS, result=""))
    assert 74 <= per_16 - stored <= cost.QUANTIZE_INSTRUCTIONS["e4m3"]


@compiles
def test_machine_code_of_amaxes():
    """No spills; results 16 bytes at once, one atomic operation a tile, the instructions that the cost model counts."""
    product = replace(EXPERTS, a="nvfp4", b="nvfp4", epilogue="pair", weights=2, result="amax")
    _, code = instructions(product)
    launched = code.launched
    row = product_row(product, "native", launched, 100)
    assert not row.problems and row.resources.registers <= 168 and launched.num_stages == 4
    results = launched.constants["BM"] * launched.constants["BN"] // 2  # of a pair, in two bytes each
    assert code.sass.widths("STG").count(16) >= 2 * results // (16 * 32 * launched.num_warps)
    assert len(re.findall(r"\b(?:RED|ATOM)G\.E\.MAX\.S32\b", code.sass.text)) == 1
    alone = replace(product, epilogue="", weights=1)
    more = instructions(alone)[0] - instructions(replace(alone, result=""))[0]
    assert more == cost.GROUP_AMAX_INSTRUCTIONS


@compiles
def test_what_it_serves():
    """One product or whole halves, of groups that are rows; on SM100 alone."""

    def served(sm=100, **changes):
        product = replace(EXPERTS, m=512, n=256, k=256, **changes)
        problem = problem_of(product.arguments(), Target(sm))
        return [each.name for each in choose.REGISTRY if each.takes(problem)]

    assert served() == served(103) == served(epilogue="pair") == ["grouped_block_scaled_sm100"]
    assert served(90) == served(120) == []
    problem = problem_of(replace(EXPERTS, n=2080, epilogue="gated").arguments(), Target(100))
    (kernel,) = (each for each in choose.REGISTRY if each.takes(problem))
    pair = problem.with_epilogue(Epilogue.parse(["mul product pair", problem.spec.epilogue.end], BF16, BF16))
    assert not kernel.takes(pair) and not kernel.takes(replace(problem, operand_bytes=8))


@compiles
@pytest.mark.parametrize("result", [EXPERTS.result, "amax"])
def test_arguments_that_do_not_fit(result):
    """Groups along the contraction, a bias, and offsets of other groups are refused by name."""
    arguments = replace(EXPERTS, result=result).arguments()

    def message(**changes):
        with pytest.raises((ValueError, TypeError)) as error:
            call(replace(arguments, **changes))
        return str(error.value)

    along_k = replace(EXPERTS, along_k=True, result="").arguments()
    assert message(a=along_k.a, b=along_k.b, offs=along_k.offs).startswith(
        "a, b: with ragged rows, expected [M, K] and [G, N, K]; got shapes"
    )
    bias = torch.empty(2048, dtype=BF16, device="meta")
    assert message(bias=bias) == "bias: products of groups have none, got one with ragged rows"
    assert message(offs=arguments.offs[:3]) == "offs: expected shape (64,), one a matrix, got shape (3,)"
    assert "expected int32" in message(offs=arguments.offs.long())
