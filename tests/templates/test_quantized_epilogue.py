"""Products that quantise their results: the kernel in Triton's interpreter, and its machine code for SM100.

As in test_gemm_kernels.py, the interpreter runs in the process of that file. tests/ptxsim/test_quantized_results.py
runs the compiled kernel.
"""

import re
from dataclasses import replace

import pytest
import torch

from fp4compile import hardware
from fp4compile.check.machine_code import compile_launch
from fp4compile.check.products import MatmulCase
from fp4compile.formats import formats, reference
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.operand import Arguments
from fp4compile.hardware import Target
from fp4compile.templates import choose
from fp4compile.templates.gemm import cost
from fp4compile.templates.multiply import multiply, results
from fp4compile.templates.problem import problem_of
from tests.helpers.kernels import INTERPRETING, assert_same_bits, quantized

BF16 = torch.bfloat16


interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")


@pytest.fixture
def served(monkeypatch):
    """The kernel alone, on the GPU that the interpreter stands for."""
    always = dict.fromkeys(("serves", "quantizes", "finds_amax"), lambda p: True)
    monkeypatch.setattr(choose, "REGISTRY", (replace(choose.named("block_scaled_sm100"), **always),))


def check(value, *arguments):
    """Codes and scales of the kernel are those of the value."""
    x = Arguments.of(*arguments)
    expected = reference.quantize(value, x.spec.result, x.result_outer, "swizzled")
    assert_same_bits([*results(x), None], [*expected[:2], None])


@interpreted
def test_codes_of_batches(served):
    """Each matrix has its own swizzled scales. Beyond the last column, where blocks end, the steps do not give 0."""
    fmt = formats.get("mxfp8")
    a, b = quantized(torch.randn(2, 5, 64), fmt, "swizzled"), quantized(torch.randn(2, 40, 64), fmt, "swizzled")
    steps, bias = ["relu product", "add s0 30.0"], torch.randn(40)
    value = multiply(Arguments.of(a, b, bias, BF16, Epilogue.parse(steps, BF16, BF16)))
    epilogue = Epilogue.parse([*steps, "quantize mxfp8"], BF16, BF16)
    check(value, a, b, bias, BF16, epilogue)


@interpreted
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_codes_of_a_pair(name, served):
    """Each product has rows of B, global scales and a bias of its own; there are two tiles of columns."""
    fmt, x, w, bias = formats.get(name), torch.randn(5, 64), torch.randn(512, 64), torch.randn(512)
    a, b = quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled")
    if fmt.outer:
        b = replace(b, outer=torch.rand(512, 1) + 0.5)
    product, pair = multiply(Arguments.of(a, b, bias, BF16)).chunk(2, -1)
    value = (product.float().relu() * pair.float()).bfloat16()
    epilogue = Epilogue.parse(["relu product", "mul s0 pair", "quantize mxfp8"], BF16, BF16)
    check(value, a, b, bias, BF16, epilogue)


@interpreted
def test_an_amax_of_tiles_partly_filled(served, monkeypatch):
    """Columns that do not exist have larger values, in parts of their own; several tiles have one program."""
    monkeypatch.setattr(hardware, "_MULTIPROCESSORS", hardware._MULTIPROCESSORS | {90: 1})
    fmt = formats.get("mxfp8")
    a, b = (quantized(torch.rand(rows, 64), fmt, "swizzled") for rows in (5, 416))
    product = multiply(Arguments.of(a, b, None, BF16))
    epilogue = Epilogue.parse(["sub product 30.0", "amax"], BF16, BF16)
    got, maxima = results(Arguments.of(a, b, None, BF16, epilogue))
    assert torch.equal(got, product - 30) and maxima.max() == got.abs().max() < 30 and maxima.count_nonzero() == 1


def compiled(product):
    """A product's kernel, compiled, and its instructions for 16 elements of a thread."""
    _, (launched,) = product.launches(100)
    code = compile_launch(launched, 100)
    elements = launched.constants["BM"] * launched.constants["BN"] / (32 * launched.num_warps)
    return code, len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code.sass.text, re.M)) * 16 / elements


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_machine_code():
    """No spills, whole words of scales, codes by TMA, four stages, and the instructions that the cost model counts."""
    name = "nvfp4_one_level"
    (_, before), (code, after) = compiled(MatmulCase(name, name)), compiled(MatmulCase(name, name, result=name))
    assert code.resources.problems == [] and code.resources.registers <= 168 and set(code.sass.widths("STG")) == {8}
    assert code.launched.num_stages == 4 and code.launched.constants["TMA_STORE"]
    assert 0.85 < (after - before) / cost.QUANTIZE_INSTRUCTIONS["e4m3"] < 1.05


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_machine_code_of_an_amax():
    """No spills, results by TMA, maxima by words, and the instructions that the cost model counts."""
    gated = MatmulCase("nvfp4", "nvfp4", epilogue="gated")
    (_, before), (code, after) = compiled(gated), compiled(replace(gated, result="amax"))
    assert code.resources.problems == [] and code.resources.registers <= 168 and set(code.sass.widths("STG")) == {4}
    assert code.launched.constants["TMA_STORE"]
    assert 0.85 < (after - before) / cost.AMAX_INSTRUCTIONS < 1.05


@pytest.mark.skipif(INTERPRETING, reason="chooses for GPUs")
def test_operands_take_shared_memory_and_registers():
    """Float32 operands leave room for three stages; beside a pair, eight bytes an element would spill."""
    product = MatmulCase("nvfp4", "nvfp4", epilogue="gated", result="nvfp4")
    pair = replace(product, epilogue="pair")
    stages = {}
    for dtype in (BF16, torch.float32):
        gate = torch.empty(product.m, product.n, dtype=dtype, device="meta")
        problem = problem_of(replace(product.arguments(), auxiliaries=[gate]), Target(100))
        stages[dtype] = choose.choose(problem).config.stages
    assert stages == {BF16: 4, torch.float32: 3}
    problem = problem_of(pair.arguments(), Target(100))
    assert choose.choose(problem).config.stages == 4
    with pytest.raises(ValueError, match="no kernel of compute capability 100 quantises the result"):
        choose.choose(replace(problem, operand_bytes=8))


@pytest.mark.skipif(INTERPRETING, reason="chooses for GPUs")
def test_other_gpus_have_no_such_kernel():
    """The registry on Hopper and SM120 stays what it was."""
    for sm in (90, 120):
        assert MatmulCase("mxfp8", "mxfp8", result="mxfp8").served(Target(sm)) == (None, [])
    problem = problem_of(MatmulCase("mxfp8", "mxfp8", result="mxfp8").arguments(), Target(90))
    with pytest.raises(ValueError, match="epilogue: no kernel of compute capability 90 quantises the result"):
        choose.choose(problem)
