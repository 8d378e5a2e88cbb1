"""Products with a pointwise epilogue: the kernels against the same operations after the kernels without one.

As in test_gemm_kernels.py: on a GPU, and in Triton's interpreter in the process of that file.
"""

import re

import pytest
import torch
import torch.nn.functional as F
import triton
from triton.backends.nvidia.compiler import CUDABackend

from fp4compile import _compat
from fp4compile.check.sass import disassemble
from fp4compile.formats import formats
from fp4compile.formats.epilogue import AUXILIARIES, Epilogue
from fp4compile.formats.operand import Operand
from fp4compile.ops.matmul import SCALED_MM, scaled_mm_kernels
from fp4compile.templates.device.apply_epilogue import text
from tests.helpers.absent_gpu import fused_graph
from tests.helpers.choices import only
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import (
    DEVICE,
    INTERPRETING,
    NEW_PTXAS,
    by_library,
    for_gpus,
    gpu,
    launches,
    on_device,
    quantized,
    spilled_bytes,
    written_alone,
)

if INTERPRETING or torch.cuda.is_available():
    from tests.helpers.multiplied import scaled_mm

# Steps, and the same in PyTorch.
EPILOGUES = {
    "relu": (["relu product"], F.relu),
    "silu and gate": (["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"],
                      lambda y, gate: F.silu(y) * gate),
    "gelu, scale, residual": (["mul product 0.5", "mul product 0.7071067811865476", "erf s1", "add s2 1.0", "mul s0 s3",
                               "mul s4 row0", "add s5 aux1"], lambda y, scale, x: F.gelu(y) * scale + x),
    "gelu by tanh": (["mul product 0.5", "cube product", "mul s1 0.044715", "add product s2",
                      "mul s3 0.7978845608028654", "tanh s4", "add s5 1.0", "mul s0 s6"],
                     lambda y: F.gelu(y, approximate="tanh")),
    "two matrices": (["sub aux0 product", "sigmoid s0", "square s1", "sub s2 aux1", "mul s3 -2.5"],
                     lambda y, a, b: ((torch.sigmoid(a - y)) ** 2 - b) * -2.5),
}  # fmt: skip
EXACT = ("relu",)  # no function that two libraries compute differently


def epilogue_of(name, product_dtype, dtype):
    return Epilogue.parse(EPILOGUES[name][0], product_dtype, dtype)


def auxiliaries_of(name, shape, dtype, device=DEVICE):
    """Random tensors for an epilogue of a product of that shape."""
    kinds = epilogue_of(name, dtype, dtype).kinds
    return [torch.randn(shape if kinds[i] == "aux" else shape[-1:], dtype=dtype, device=device) for i in sorted(kinds)]


def check(name, a, b, bias=None, product_dtype=torch.bfloat16, dtype=torch.bfloat16, operand_dtype=torch.bfloat16):
    """A product with an epilogue against the one without, and the epilogue in float32."""
    there = [on_device(value) for value in (a, b, bias)]
    product = scaled_mm(*there, product_dtype)
    auxiliaries = auxiliaries_of(name, product.shape, operand_dtype)
    got = scaled_mm(*there, product_dtype, epilogue_of(name, product_dtype, dtype), auxiliaries).cpu()
    values = [t.cpu().float() for t in (product, *auxiliaries)]
    expected = EPILOGUES[name][1](*values).to(dtype)
    assert (got.shape, got.dtype) == (expected.shape, dtype)
    got, expected = got.float(), expected.float()
    assert torch.equal(got.isnan(), expected.isnan())
    if name in EXACT:
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
        return
    size = torch.stack(torch.broadcast_tensors(*(1 + value.abs() for value in values))).prod(0)
    far = (got - expected).abs() > expected.abs() * torch.finfo(dtype).eps + size * 2.0**-18
    assert not (far & expected.isfinite()).any()
    assert not got[expected.isinf()].isfinite().any()


M, N, K = (20, 18, 72) if INTERPRETING else (40, 200, 528)


@gpu
@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4"), ("mxfp8", "mxfp4"), (torch.bfloat16, "nvfp4_16x16")], ids=str)
def test_epilogues(a, b, name):
    """Dequant tiles and, with fewer rows, split-K; dtypes of product, operands and result."""
    a, b = a if isinstance(a, torch.dtype) else formats.get(a), formats.get(b)
    x, w, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
    check(name, quantized(x, a), quantized(w, b), bias)
    check(name, quantized(x, a), quantized(w, b), None, torch.float32, torch.float16, torch.float32)
    check(name, quantized(x[:5], a), quantized(w, b), bias, torch.float16, torch.float32, torch.float16)


@gpu
@pytest.mark.parametrize("name", ["relu", "silu and gate"])
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs(hard, name):
    for fmt in map(formats.get, ("nvfp4_rowwise", "mxfp8")):
        x = hard_input(hard, (16, 104), torch.float32, fmt.block_cols)
        check(name, quantized(x, fmt), quantized(torch.randn(16, 104), fmt), torch.randn(16))


@gpu
def test_batches():
    fmt = formats.get("mxfp8")
    x, w = torch.randn(3, 9, 40), torch.randn(3, 7, 40)
    check("gelu, scale, residual", quantized(x, fmt), quantized(w, fmt))
    check("gelu, scale, residual", quantized(x, fmt), quantized(w[0], fmt))


# What follows a linear layer's product p. The fused graph must give what float32 arithmetic makes of the product.
CHAINS = {
    "gate": lambda p, x, w, same, row: F.silu(p(x, w)) * same,
    "activation and residual": lambda p, x, w, same, row: same + F.gelu(p(x, w)),
    "rows and numbers": lambda p, x, w, same, row: same - p(x, w) * row / 3.0,
    "another shape": lambda p, x, w, same, row: F.relu(p(x, w).view(4, 5, 32)).square() + same.view(4, 5, 32),
}


@pytest.mark.skipif(not INTERPRETING, reason="runs the graph on the CPU, and its kernels in the interpreter")
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("chain", CHAINS)
def test_fused_graphs(chain, recipe):
    shapes = ((20, 64), (32, 64), (20, 32), (32,))
    values = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]

    def function(x, w, same, row):
        return CHAINS[chain](F.linear, x, w, same, row)

    result = fused_graph(function, *shapes, recipe=recipe, sm=90)
    assert result.fused == 1
    got = OnTheCpu(torch.fx.GraphModule({}, result.graph)).run(*values)
    product = fused_graph(lambda x, w: F.linear(x, w), *shapes[:2], recipe=recipe, sm=90)
    plain = OnTheCpu(torch.fx.GraphModule({}, product.graph)).run(*values[:2])
    floats = [value.float() for value in values]
    expected = CHAINS[chain](lambda x, w: plain.float(), *floats).bfloat16()
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert ((got.float() - expected.float()).abs() <= 2.0**-8 * expected.float().abs()).all()  # erf and exp


class OnTheCpu(torch.fx.Interpreter):
    """Runs a graph with the kernels that it would be lowered to on a GPU."""

    def call_function(self, target, args, kwargs):
        return super().call_function(scaled_mm_kernels if target is SCALED_MM else target, args, kwargs)


@gpu
@pytest.mark.parametrize("name", ["gelu, scale, residual", "two matrices"])
def test_sums_of_the_library(name, monkeypatch):
    m, n, k = by_library(monkeypatch)
    x, w = torch.randn(m, k), torch.randn(n, k)
    check(name, quantized(x, formats.get("nvfp4")), quantized(w, formats.get("nvfp4")), torch.randn(n))


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
@pytest.mark.parametrize("name", EPILOGUES)
def test_block_scaled_gemm(name, monkeypatch):
    only(monkeypatch, "block_scaled_sm100")
    for a, b in (("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")):
        a, b = formats.get(a), formats.get(b)
        x, w = torch.randn(140, 96), torch.randn(130, 96)
        check(name, quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), torch.randn(130))
        x, w = torch.randn(2, 5, 64), torch.randn(2, 6, 64)
        check(name, quantized(x, a, "swizzled"), quantized(w, b, "swizzled"))


@gpu
@for_gpus
@pytest.mark.parametrize("name", EPILOGUES)
def test_library_product(name):
    """The library multiplies large matrices; the kernel that rescales its sums has the epilogue."""
    fmt = formats.get("nvfp4")
    check(name, quantized(torch.randn(300, 1024), fmt), quantized(torch.randn(777, 1024), fmt), torch.randn(777))


@gpu
def test_bad_epilogues():
    fmt = formats.get("mxfp8")
    a, b = quantized(torch.randn(M, 64), fmt), quantized(torch.randn(8, 64), fmt)
    a, b = on_device(a), on_device(b)
    plain = Operand(torch.randn(M, 64, device=DEVICE))

    def call(*auxiliaries, steps=("add product aux0",), dtype=torch.bfloat16, a=a, b=b):
        scaled_mm(a, b, None, torch.bfloat16, Epilogue.parse(steps, torch.bfloat16, dtype), auxiliaries)

    with pytest.raises(ValueError, match="epilogue: expected floating-point operands of the product's size or of 8"):
        call(torch.randn(M, 7, device=DEVICE))
    with pytest.raises(ValueError, match="epilogue: expected floating-point operands"):
        call(torch.ones(8, dtype=torch.int32, device=DEVICE), steps=("add product row0",))
    with pytest.raises(ValueError, match="epilogue: at most 2 operands, got 3"):
        call(*torch.randn(AUXILIARIES + 1, 8, device=DEVICE))
    with pytest.raises(ValueError, match="epilogue: dtype torch.float64"):
        call(steps=("relu product",), dtype=torch.float64)
    with pytest.raises(ValueError, match="epilogue: the product of two plain operands"):
        call(a=plain, b=plain)


def test_text():
    """A value is called by its place, a number is written as a float, and silu is one step."""
    steps = "mul 0 0.5; mul 0 0.7071067811865476; erf 4; add 5 1.0; mul 3 6; mul 7 1; add 8 2"
    gelu = epilogue_of("gelu, scale, residual", torch.bfloat16, torch.bfloat16)
    assert text(gelu) == f"product row0 aux1 | {steps} | bfloat16"
    assert text(Epilogue.parse(["mul product -2.0"], torch.float32, torch.float32)) == "product | mul 0 -2.0 | float32"
    assert text(Epilogue((), torch.float16, torch.float32)) == "product |  | float16"
    gate = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]
    for dtype, silu in ((torch.bfloat16, "silu.narrow"), (torch.float32, "silu")):
        assert text(Epilogue.parse(gate, dtype, dtype)).split(" | ")[:2] == ["product aux0", f"{silu} 0; mul 2 1"]


LARGE = ["gelu, scale, residual", "two matrices"]  # the most values at once, the most loads


def last_launch(sm, a, b, m, name, n=8192):
    """The launch that has the epilogue."""
    auxiliaries = auxiliaries_of(name, (m, n), torch.bfloat16, "meta")
    return launches(sm, a, b, m, epilogue_of(name, torch.bfloat16, torch.bfloat16), auxiliaries, n)[-1]


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("sm", "a", "b", "m", "n", "names"), [
    (90, "nvfp4", "nvfp4", 16, 8192, LARGE[:1]), (90, "mxfp8", "mxfp8", 64, 8192, LARGE[1:]),
    (90, torch.bfloat16, "nvfp4", 40, 32768, LARGE[:1]), (90, "nvfp4", "nvfp4", 512, 8192, LARGE[:1]),
    (100, "nvfp4", "nvfp4", 512, 8192, LARGE[:1]), (100, "mxfp8", "mxfp8", 512, 8192, LARGE[1:]),
    (100, "mxfp8", "mxfp4", 8, 8192, LARGE[:1]),
    *([(120, "nvfp4", "nvfp4", 512, 8192, LARGE[1:]), (120, "mxfp8", "mxfp8", 512, 8192, LARGE[:1])]
      if NEW_PTXAS else []),
], ids=str)  # fmt: skip
def test_compiles_ahead(sm, a, b, m, n, names):
    """With an epilogue, too, nothing spills."""
    for name in names:
        assert_does_not_spill(sm, a, b, m, n, name)


def assert_does_not_spill(sm, a, b, m, n, name):
    one = last_launch(sm, a, b, m, name, n)
    compiled = _compat.compile_ahead(one.kernel, one.args, one.constants, one.num_warps, sm)
    assert spilled_bytes(compiled.asm["cubin"]) == 0
    assert compiled.metadata.shared <= (101376 if sm >= 120 else 232448)


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("kernel", "sm", "format", "m", "n"), [
    ("gemm_dequant_tiles", 90, "mxfp8", 16, 8192), ("gemm_wgmma_sm90", 90, "nvfp4", 40, 32768),
    ("split_k_reduction", 90, "nvfp4", 40, 8192), ("gemm_block_scaled_sm100", 100, "nvfp4", 512, 8192)])  # fmt: skip
def test_inductor_writes_the_epilogue_into_its_wrapper(kernel, sm, format, m, n, tmp_path, monkeypatch):
    """The text that Inductor writes for the kernel stands alone: a file of it compiles to the same code."""
    launch = last_launch(sm, format, format, m, "silu and gate", n)
    written = written_alone(launch.kernel, tmp_path)

    def compiled(function):
        return _compat.compile_ahead(function, launch.args, launch.constants, launch.num_warps, sm)

    own = compiled(launch.kernel)
    # The first stage's text, of which the others make the code: only names of places differ. A cache may have the code.
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    stages = CUDABackend.add_stages
    monkeypatch.setattr(CUDABackend, "add_stages", lambda self, given, *args: (stages(self, given, *args), ends(given)))
    with pytest.raises(FirstStage) as first:
        compiled(getattr(written, kernel))
    assert without_places(str(first.value)) == without_places(own.asm["ttir"])
    assert "MUFU.EX2" in disassemble(own.asm["cubin"]).text


class FirstStage(Exception):
    """The text that the first stage of a compilation made."""


def ends(stages):
    def end(module, metadata):
        raise FirstStage(str(module))

    stages["ttgir"] = end


def without_places(text):
    """Without where in which file it comes from."""
    return re.sub(r" ?loc\((?:[^()]|\([^()]*\))*\)|^#loc.*\n", "", text, flags=re.M)


@pytest.mark.skipif(INTERPRETING, reason="has no cache keys")
def test_equal_epilogues_are_equal_constants():
    """Layers that do the same share a kernel, so that it is written and compiled once; another epilogue is another."""
    one, same, other = (last_launch(90, "nvfp4", "nvfp4", 16, name) for name in ("relu", "relu", "silu and gate"))
    assert one.kernel is same.kernel is other.kernel
    assert one.constants == same.constants and one.constants["EPILOGUE"] != other.constants["EPILOGUE"]
