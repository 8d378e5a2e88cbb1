"""The product kernels that take any formats, against the reference, within the error of a float32 sum.

On a GPU (`-m gpu`) at larger sizes; without one in Triton's interpreter, which has to be chosen before Triton is
imported: `test_in_the_interpreter` runs this file again in a process of its own.
"""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch._inductor import config as inductor_config

from fp4compile import hardware
from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat, compatible
from fp4compile.formats.operand import Operand
from tests.helpers import in_interpreter
from tests.helpers.check_products import check, name, values
from tests.helpers.choices import configured, only
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import (
    INTERPRETING,
    OLD_TRITON,
    by_library,
    for_gpus,
    gpu,
    on_device,
    quantized,
)

if INTERPRETING or torch.cuda.is_available():
    from fp4compile.formats.product_spec import OperandSpec, ProductSpec
    from fp4compile.hardware import Target
    from fp4compile.templates import choose
    from fp4compile.templates.gemm.heuristics import BlockScaledConfig, block_scaled_configs
    from fp4compile.templates.problem import Problem
    from tests.helpers.multiplied import scaled_mm

MORE = [BlockFormat("e2m1", (32, 32), "e8m0", None, "rceil"), BlockFormat("e2m1", (16, 16), "e4m3", None, "te")]
# A product depends on a format's contract in nothing.
FORMATS = list(
    {(fmt.element, fmt.block, fmt.scale, fmt.outer): fmt for fmt in (*formats.NAMED.values(), *MORE)}.values()
)
PAIRS = [(a, b) for a, b in itertools.product(FORMATS, FORMATS) if compatible(a, b)]
HARD_FORMATS = ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp8_floor", "mxfp8_e5m2", "mxfp4", "float8_rowwise")
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


M, N, K = (5, 18, 72) if INTERPRETING else (70, 200, 528)


@gpu
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=name)
def test_pairs_of_formats(a, b):
    """Every pair that goes together, so every pair of outer granularities; both layouts, bias or none."""
    x, w = torch.randn(M, K), torch.randn(N, K)
    check(quantized(x, a), quantized(w, b, "swizzled"), K, torch.randn(N).bfloat16())
    check(quantized(x, a, "swizzled"), quantized(w, b), K, out_dtype=torch.bfloat16)


# How one operand is read does not depend on the other: in the interpreter, each format beside one dtype.
BESIDE_PLAIN = [
    (fmt, dtype)
    for i, fmt in enumerate(FORMATS)
    for dtype in ([PLAIN[i % len(PLAIN)]] if INTERPRETING else PLAIN)
]  # fmt: skip


@gpu
@pytest.mark.parametrize(("fmt", "dtype"), BESIDE_PLAIN, ids=name)
def test_one_plain_operand(fmt, dtype):
    """Weight-only, and quantised activations with plain weights; lengths of every alignment."""
    for k in (K, K + 5, 31):
        x, w = torch.randn(M, k), torch.randn(N, k)
        check(quantized(x, dtype), quantized(w, fmt), k, torch.randn(N))
    for outer in (torch.tensor(0.37), torch.rand(M, 1)):  # of A that was quantised and dequantised
        check(Operand(x.to(dtype), outer=outer), quantized(w, fmt), k)
    check(quantized(x, fmt, "swizzled"), quantized(w, dtype), k, out_dtype=torch.float16)


@gpu
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs(hard):
    for fmt in map(formats.get, HARD_FORMATS):
        block = fmt.block_cols if fmt.block else 16
        x = hard_input(hard, (16, 96), torch.float32, block)
        w = hard_input(hard if hard != "huge" else "tiny", (16, 96), torch.float32, block)
        check(quantized(x, fmt), quantized(torch.randn(16, 96), fmt), 96)
        check(quantized(torch.randn(20, 96), torch.bfloat16), quantized(x, fmt), 96)
        check(quantized(x, fmt), quantized(w, fmt), 96)


@gpu
def test_scales_beyond_bf16():
    """Blocks of either operand whose values bf16 cannot hold, times the largest ones: nothing is lost."""
    for fmt in map(formats.get, ("mxfp8", "mxfp8_e5m2", "mxfp4")):
        x = torch.randn(16, 64)
        x[:, 32:] *= 2.0**-125
        x[3, :] = 0.0
        w = torch.randn(16, 64)
        w[::2, :32] = 0.0
        w[::2, 32:] *= 2.0**120
        w[1::4] *= 2.0**-124
        check(quantized(x, fmt), quantized(w, fmt), 64)
        check(quantized(w, fmt), quantized(x, fmt), 64)
        check(quantized(w, torch.bfloat16), quantized(x, fmt), 64)
        check(quantized(w, torch.float32), quantized(x, fmt), 64)


@gpu
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("fmt", ["nvfp4_rowwise", "nvfp4_16x16", "mxfp8_32x32", "float8_rowwise"])
def test_batches(fmt, layout):
    """[B, M, K] x [B, N, K], and one weight for every batch."""
    fmt = formats.get(fmt)
    x, w = torch.randn(3, 9, 40), torch.randn(3, 7, 40)
    check(quantized(x, fmt, layout), quantized(w, fmt, layout), 40)
    check(quantized(x, fmt, layout), quantized(w[0], fmt, layout), 40, torch.randn(7))
    check(quantized(x, torch.bfloat16), quantized(w[0], fmt, layout), 40)


@gpu
@pytest.mark.parametrize("k", [40, 192, 256])
def test_split_k(k):
    """Of up to eight rows, in the interpreter: the second part has a step, or one less than the first, or as many."""
    fmt = formats.get("mxfp8_32x32")
    x, w = torch.randn(2, 3, k), torch.randn(2, 7, k)
    check(quantized(x, fmt), quantized(w, fmt), k)
    check(quantized(x[0], torch.bfloat16), quantized(w[0], formats.get("nvfp4")), k)


@gpu
def test_empty():
    fmt = formats.get("nvfp4")
    for m, n, k in ((0, 8, 32), (3, 0, 32), (3, 4, 0)):
        check(quantized(torch.randn(m, k), fmt), quantized(torch.randn(n, k), fmt), k, torch.randn(n))


@gpu
def test_bad_input():
    nvfp4, mxfp8 = formats.get("nvfp4"), formats.get("mxfp8")
    a, b = quantized(torch.randn(4, 64), nvfp4), quantized(torch.randn(8, 64), nvfp4)

    def call(a=a, b=b, bias=None, out_dtype=torch.bfloat16):
        return scaled_mm(a, b, bias, out_dtype)

    with pytest.raises(ValueError, match="cannot be multiplied"):
        call(a=quantized(torch.randn(4, 64), mxfp8))
    with pytest.raises(ValueError, match="contraction dimensions"):
        call(a=quantized(torch.randn(4, 48), nvfp4))
    with pytest.raises(ValueError, match="b_scales: expected"):
        call(b=replace(b, scales=b.scales[:4]))
    with pytest.raises(ValueError, match="a_scales: .* needs block scales"):
        call(a=replace(a, scales=None))
    with pytest.raises(ValueError, match="a_outer: expected"):
        call(a=replace(a, outer=torch.ones(8, 1)))
    with pytest.raises(TypeError, match="b: data of format nvfp4"):
        call(b=replace(b, data=b.data.float()))
    with pytest.raises(ValueError, match="bias: expected"):
        call(bias=torch.randn(4))
    with pytest.raises(ValueError, match="batch dimensions"):
        call(a=quantized(torch.randn(4, 64), nvfp4), b=quantized(torch.randn(2, 8, 64), nvfp4))
    with pytest.raises(ValueError, match="out_dtype"):
        call(out_dtype=torch.float64)


NATIVE = [("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4_one_level"), ("nvfp4_rowwise", "nvfp4_16x16"),
          ("nvfp4", "nvfp4_rowwise"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8_32x32"), ("mxfp8", "mxfp4"),
          ("mxfp8_e5m2", "mxfp8")]  # fmt: skip
in_the_interpreter = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")


@in_the_interpreter
@pytest.mark.parametrize(("a", "b"), NATIVE)
def test_block_scaled_gemm(a, b, monkeypatch):
    """Several tiles and scale tiles, ragged sizes, batches; results that TMA stores and others, with and without bias.

    Of these K, NVFP4 has rows of whole 16 bytes with 320, 32 and 64 only.
    """
    a, b = formats.get(a), formats.get(b)
    only(monkeypatch, "block_scaled_sm100")
    for m, n, k, bias, out_dtype in (
        (140, 60, 300, True, torch.float32), (3, 130, 32, False, torch.bfloat16), (130, 264, 320, True, torch.bfloat16),
        (130, 264, 64, False, torch.float32), (9, 7, 16, True, torch.float32),
    ):  # fmt: skip
        x, w = quantized(torch.randn(m, k), a, "swizzled"), quantized(torch.randn(n, k), b, "swizzled")
        check(x, w, k, torch.randn(n) if bias else None, out_dtype)
    for k in (64, 80):
        x, w = torch.randn(2, 5, k), torch.randn(2, 6, k)
        check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), k, out_dtype=torch.bfloat16)
        check(quantized(x, a, "swizzled"), quantized(w[0], b, "swizzled"), k)


@in_the_interpreter
def test_block_scaled_gemm_walks_every_tile(monkeypatch):
    """Programs take several tiles each; rows and columns of tiles that no group divides; every configuration."""
    problem = _nvfp4_problem(1500, 700, 32, Target(100))
    only(monkeypatch, "block_scaled_sm100")
    monkeypatch.setitem(hardware._MULTIPROCESSORS, 90, 3)  # which the interpreter counts as having
    x, w = (quantized(torch.randn(rows, 32), formats.get("nvfp4"), "swizzled") for rows in (1500, 700))
    found = block_scaled_configs(problem)
    assert {(config.bn, config.two_sums) for config in found} == {(256, False), (128, True)}
    for config in found:
        configured(monkeypatch, "block_scaled_sm100", config)
        check(x, w, 32, out_dtype=torch.bfloat16)


@in_the_interpreter
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs_of_block_scaled_gemm(hard, monkeypatch):
    only(monkeypatch, "block_scaled_sm100")
    for fmt in map(formats.get, ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4")):
        x = quantized(hard_input(hard, (16, 96), torch.float32, fmt.block_cols), fmt, "swizzled")
        check(x, quantized(torch.randn(16, 96), fmt, "swizzled"), 96)


@in_the_interpreter
def test_block_scaled_gemm_without_columns(monkeypatch):
    """Of no K only the bias is left, and no descriptor is made."""
    only(monkeypatch, "block_scaled_sm100")
    assert not any(config.tma for config in block_scaled_configs(_nvfp4_problem(3, 4, 0, Target(100))))
    fmt = formats.get("nvfp4")
    check(
        quantized(torch.randn(3, 0), fmt, "swizzled"), quantized(torch.randn(4, 0), fmt, "swizzled"), 0, torch.randn(4)
    )


def _nvfp4_problem(m, n, k, target):
    fmt = formats.get("nvfp4")
    operand = OperandSpec(fmt, fmt.data_dtype, swizzled=True, outer="tensor")
    return Problem(ProductSpec(operand, operand, torch.bfloat16), m, n, k, target)


@gpu
@for_gpus
@pytest.mark.parametrize(("a", "b"), [("mxfp8", "mxfp8_32x32"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp4")])
def test_block_scaled_gemm_by_tma(a, b, monkeypatch):
    """On Hopper, which has TMA, Triton itself expands MX operands: descriptors, tiles and stores on a real GPU."""
    a, b = formats.get(a), formats.get(b)
    only(monkeypatch, "block_scaled_sm100")
    step = 256 if a.packed and b.packed else 128
    configured(monkeypatch, "block_scaled_sm100",
               BlockScaledConfig(128, 128, step, stages=2, parts=2, warp_specialize=False))  # fmt: skip
    for m, n, k in ((1500, 1032, 416), (130, 264, 4096), (70, 33, 64)):
        x, w = quantized(torch.randn(m, k), a, "swizzled"), quantized(torch.randn(n, k), b, "swizzled")
        check(x, w, k, torch.randn(n))
        check(x, w, k, None, torch.bfloat16)
    x, w = torch.randn(3, 140, 96), torch.randn(3, 136, 96)
    check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), 96, out_dtype=torch.bfloat16)


@gpu
@for_gpus
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_block_scaled_gemm_through_inductor(recipe, mode, monkeypatch):
    """The same through `torch.compile`: Inductor launches a kernel that makes descriptors, also in CUDA graphs."""
    import fp4compile

    torch._dynamo.reset()
    layers = torch.nn.Sequential(torch.nn.Linear(512, 768), torch.nn.SiLU(), torch.nn.Linear(768, 264))
    layers = layers.to("cuda", torch.bfloat16)
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = torch.compile(layers, backend=fp4compile.backend(recipe))(x)
        torch._dynamo.reset()
        step = 128 if recipe == "mxfp8" else 256
        native = replace(
            choose.named("block_scaled_sm100"), serves=lambda p: p.a.swizzled and p.b.swizzled,
            configure=lambda p: BlockScaledConfig(128, 128, step, stages=2, parts=2, warp_specialize=False),
        )  # fmt: skip
        launched = mock.Mock(wraps=native.run)
        native = replace(native, run=launched)
        monkeypatch.setattr(choose, "REGISTRY", (native, *choose.REGISTRY))
        with inductor_config.patch(force_disable_caches=True):
            compiled = torch.compile(layers, backend=fp4compile.backend(recipe), mode=mode)
            for _ in range(4):
                got = compiled(x).clone()
    assert launched.call_count == 2
    assert (got - expected).abs().max() <= 2**-6 * expected.abs().max()


# NVFP4 weights have kernels of their own for few rows, and each pair of formats one for all.
LARGE = [(*pair, m) for pair in (("nvfp4", "nvfp4_16x16"), (torch.bfloat16, "nvfp4")) for m in (1, 7, 16, 64, 100)]
LARGE += [(*pair, m) for m in (1, 2, 4, 8) for pair in (
    (torch.bfloat16, "float8_128x128"), (torch.float16, "float8_1x128"), (torch.bfloat16, "float8_rowwise"),
    ("float8_1x128", "float8_128x128"), ("float8_rowwise", "float8_rowwise"),
)]  # fmt: skip
LARGE += [(*pair, m) for m in (9, 16, 31, 64) for pair in (
    ("float8_1x128", "float8_128x128"), ("float8_1x128", "float8_1x128"), ("float8_rowwise", "float8_tensor"),
    (torch.bfloat16, "float8_128x128"), (torch.float16, "float8_1x128"), (torch.bfloat16, "float8_rowwise"),
)]  # fmt: skip
LARGE += [(*pair, m) for m in (100, 200) for pair in (
    (torch.bfloat16, "float8_128x128"), (torch.float16, "float8_1x128"), (torch.bfloat16, "float8_rowwise"),
)]  # fmt: skip
LARGE += [(a, b, m) for a, b in (
    ("nvfp4", "nvfp4_16x16"), ("nvfp4_rowwise", "nvfp4"), ("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp8_32x32"),
    ("float8_rowwise", "float8_rowwise"), (torch.bfloat16, "nvfp4"), (torch.float16, "nvfp4"),
    (torch.bfloat16, "mxfp8"), (torch.float16, "mxfp4"), (torch.float32, "nvfp4"),
) for m in (3, 31, 600)]  # fmt: skip


@gpu
@for_gpus
@pytest.mark.parametrize(("a", "b", "m"), LARGE, ids=str)
def test_large(a, b, m):
    """Every kernel: gemv, skinny, wgmma, split-K, dequant tiles, the library's; also shapes that no tile divides."""
    a = a if isinstance(a, torch.dtype) else formats.get(a)
    b = formats.get(b)
    for n, k in ((1024, 4096), (4096, 2048), (777, 1008)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        for layout in ("linear", "swizzled"):
            check(quantized(x, a, layout), quantized(w, b, layout), k, torch.randn(n))


@gpu
@for_gpus
@pytest.mark.parametrize(("a", "b"), [
    *((torch.bfloat16, b) for b in ("nvfp4", "mxfp4", "mxfp8", "float8_128x128", "float8_rowwise")),
    (torch.float16, "float8_1x128"), ("nvfp4", "nvfp4"), ("mxfp8", "mxfp8"), ("float8_1x128", "float8_128x128"),
    ("float8_rowwise", "float8_rowwise"),
], ids=str)  # fmt: skip
def test_numbers_of_rows(a, b):
    """Both sides of each number of rows of A at which a launch changes; rows of B fill an H200 by the widest tiles."""
    a = a if isinstance(a, torch.dtype) else formats.get(a)
    weights = quantized(torch.randn(132 * 128, 256), formats.get(b))
    for m in (1, 2, 3, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 100, 129, 256, 257):
        check(quantized(torch.randn(m, 256), a), weights, 256, out_dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4_16x16"), ("nvfp4_rowwise", "nvfp4"), ("nvfp4_16x16", "nvfp4"),
                                      ("nvfp4", "nvfp4_rowwise"), ("mxfp8", "mxfp8_32x32"), (torch.bfloat16, "nvfp4")],
                         ids=str)  # fmt: skip
def test_by_the_library(a, b, layout, monkeypatch):
    """Of operands that are dequantised in memory; the product it stores itself, and sums that are rescaled."""
    m, n, k = by_library(monkeypatch)
    x, w = torch.randn(m, k), torch.randn(n, k)
    x[-3, :32] *= 2.0**-110  # too little for bf16 in MX formats
    x[-3, 32:] = 0.0
    a = quantized(x, a if isinstance(a, torch.dtype) else formats.get(a), layout)
    b = quantized(w, formats.get(b), layout)
    ends = [(None, torch.bfloat16), (torch.randn(n).bfloat16(), torch.bfloat16), (torch.randn(n), torch.float32)]
    if INTERPRETING:  # which is slow: each with one layout of scales
        ends = ends[:1] if layout == "linear" else ends[2:]
    for bias, out_dtype in ends:
        check(a, b, k, bias, out_dtype)


@gpu
@for_gpus
@pytest.mark.parametrize("m", [1, 40, 600])
def test_float8_on_fp8_matrix_units(m):
    """Where the library's FP8 product serves: its sums have fewer bits than float32, so the bound is wider."""
    fmt = formats.get("float8_rowwise")
    x, w, bias = torch.randn(m, 1024), torch.randn(256, 1024), torch.randn(256).bfloat16()
    a, b = quantized(x, fmt), quantized(w, fmt)
    left, right = (values(operand, 1024) * operand.outer.double() for operand in (a, b))
    for bias_or_none in (bias, None):
        got = scaled_mm(*map(on_device, (a, b, bias_or_none)), torch.bfloat16).cpu().double()
        expected = left @ right.T + (0.0 if bias_or_none is None else bias.double())
        bound = (left.abs() @ right.abs().T) * 2.0**-12 + expected.abs() * 2.0**-8
        assert ((got - expected).abs() <= bound).all()


@gpu
@for_gpus
def test_library_repairs_small_scales():
    """Large matrices with blocks that bf16 cannot hold: the tiles are computed again, exactly."""
    fmt = formats.get("mxfp8")
    x, w = torch.randn(1024, 256), torch.randn(512, 256)
    x[5, :32] *= 2.0**-125
    x[5, 32:] = 0.0
    w[7] *= 2.0**100
    check(quantized(x, fmt), quantized(w, fmt), 256)


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
@pytest.mark.skipif(OLD_TRITON, reason="its interpreter has no tl.dot_scaled, and reductions fail on numpy 2.4")
def test_in_the_interpreter():
    others = ("test_epilogue_kernels.py", "test_quantized_epilogue.py", "test_skinny_block_scaled.py")
    in_interpreter.assert_passes(__file__, *others)
