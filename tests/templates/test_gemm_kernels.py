"""The kernels of the scaled product against the reference, within the error of a float32 sum.

On a GPU (`-m gpu`) at larger sizes; without one in Triton's interpreter, which has to be chosen before Triton is
imported: `test_in_the_interpreter` runs this file again in a process of its own.
"""

import itertools
import re

import pytest
import torch

from fp4compile import formats, reference
from fp4compile.formats import BlockFormat, compatible
from fp4compile.layouts import ceil_div
from tests.helpers import in_interpreter
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import (
    DEVICE,
    INTERPRETING,
    OLD_TRITON,
    compile_ahead,
    for_gpus,
    gpu,
    kernels_only,
    launches,
    part_by_part,
    quantized,
    spilled_bytes,
)

if INTERPRETING or torch.cuda.is_available():
    from fp4compile.templates.gemm import dispatch as kernels
    from fp4compile.templates.gemm import problem

MORE = [BlockFormat("e2m1", (32, 32), "e8m0", None, "rceil"), BlockFormat("e2m1", (16, 16), "e4m3", None, "te")]
FORMATS = [*map(formats.get, formats.NAMED), *MORE]
PAIRS = [(a, b) for a, b in itertools.product(FORMATS, FORMATS) if compatible(a, b)]
HARD_FORMATS = ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp8_floor", "mxfp8_e5m2", "mxfp4", "float8_rowwise")
PLAIN = (torch.bfloat16, torch.float16, torch.float32)


def values(data, scales, outer, fmt, k):
    """Without the outer scale, in float64."""
    return data.double() if fmt is None else reference.dequantize_blocks(data, scales, fmt)[..., :k].double()


def check(a, b, k, bias=None, out_dtype=torch.float32):
    """The kernels' product of two operands (as `quantized` gives them) against float64."""
    left, right = values(*a, k), values(*b, k)
    outer = reference._outer_product(a[2], b[2])  # float32, as the contract has it: it may underflow
    outer = 1.0 if outer is None else outer.double()
    expected = left @ right.mT * outer
    sums = left.abs() @ right.abs().mT
    bound = sums * outer * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + expected.abs() * 2.0**-23
    bound = bound + expected.abs() * torch.finfo(out_dtype).eps

    def there(tensor):
        return tensor.to(DEVICE) if isinstance(tensor, torch.Tensor) else tensor

    got = kernels.scaled_mm(*map(there, a), *map(there, b), there(bias), out_dtype)
    assert (got.shape, got.dtype) == (expected.shape, out_dtype)
    got = got.cpu().double()
    limit = torch.finfo(out_dtype).max
    inside = (torch.maximum(sums, sums * outer) < 2.0**127) & (expected.abs() < limit)
    assert (got[inside] - expected[inside]).abs().le(bound[inside]).all()
    assert not got[~expected.isfinite()].isfinite().any()
    return got


M, N, K = (5, 18, 72) if INTERPRETING else (70, 200, 528)


def name(value):
    return value.name if isinstance(value, BlockFormat) else str(value).removeprefix("torch.")


@gpu
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=name)
def test_pairs_of_formats(a, b):
    """Every pair that goes together, so every pair of outer granularities; both layouts, bias or none."""
    x, w = torch.randn(M, K), torch.randn(N, K)
    check(quantized(x, a), quantized(w, b, "swizzled"), K, torch.randn(N).bfloat16())
    check(quantized(x, a, "swizzled"), quantized(w, b), K, out_dtype=torch.bfloat16)


@gpu
@pytest.mark.parametrize("dtype", PLAIN, ids=name)
@pytest.mark.parametrize("fmt", FORMATS, ids=name)
def test_one_plain_operand(fmt, dtype):
    """Weight-only, and quantised activations with plain weights; lengths of every alignment."""
    for k in (K, K + 5, 31):
        x, w = torch.randn(M, k), torch.randn(N, k)
        check(quantized(x, dtype), quantized(w, fmt), k, torch.randn(N))
    for outer in (torch.tensor(0.37), torch.rand(M, 1)):  # of activations that were quantised and expanded
        check((x.to(dtype), None, outer, None), quantized(w, fmt), k)
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
def test_empty():
    fmt = formats.get("nvfp4")
    for m, n, k in ((0, 8, 32), (3, 0, 32), (3, 4, 0)):
        check(quantized(torch.randn(m, k), fmt), quantized(torch.randn(n, k), fmt), k, torch.randn(n))


@gpu
def test_bad_input():
    nvfp4, mxfp8 = formats.get("nvfp4"), formats.get("mxfp8")
    a, b = quantized(torch.randn(4, 64), nvfp4), quantized(torch.randn(8, 64), nvfp4)

    def call(a=a, b=b, bias=None, out_dtype=torch.bfloat16):
        return kernels.scaled_mm(*a, *b, bias, out_dtype)

    with pytest.raises(ValueError, match="cannot be multiplied"):
        call(a=quantized(torch.randn(4, 64), mxfp8))
    with pytest.raises(ValueError, match="contraction dimensions"):
        call(a=quantized(torch.randn(4, 48), nvfp4))
    with pytest.raises(ValueError, match="b_scales: expected"):
        call(b=(b[0], b[1][:4], *b[2:]))
    with pytest.raises(ValueError, match="a_scales: .* needs block scales"):
        call(a=(a[0], None, *a[2:]))
    with pytest.raises(ValueError, match="a_outer: expected"):
        call(a=(*a[:2], torch.ones(8, 1), nvfp4))
    with pytest.raises(TypeError, match="b: data of format nvfp4"):
        call(b=(b[0].float(), *b[1:]))
    with pytest.raises(ValueError, match="bias: expected"):
        call(bias=torch.randn(4))
    with pytest.raises(ValueError, match="batch dimensions"):
        call(a=quantized(torch.randn(4, 64), nvfp4), b=quantized(torch.randn(2, 8, 64), nvfp4))
    with pytest.raises(ValueError, match="out_dtype"):
        call(out_dtype=torch.float64)


NATIVE = [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4_16x16"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8_32x32"),
          ("mxfp8", "mxfp4"), ("mxfp8_e5m2", "mxfp8")]  # fmt: skip


@pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
@pytest.mark.parametrize(("a", "b"), NATIVE)
def test_native_form(a, b, monkeypatch):
    """Indexing, swizzled scales of several tiles, padding, batches and epilogue of the block-scaled kernel."""
    a, b = formats.get(a), formats.get(b)
    monkeypatch.setattr(kernels, "native", lambda *operands: True)
    for m, n, k in ((140, 60, 300), (3, 130, 32)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), k, torch.randn(n))
    x, w = torch.randn(2, 5, 64), torch.randn(2, 6, 64)
    check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), 64, out_dtype=torch.bfloat16)
    check(quantized(x, a, "swizzled"), quantized(w[0], b, "swizzled"), 64)


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("a", "b", "m", "instruction"), [
    (torch.bfloat16, "nvfp4", 1, "mma.sync.aligned.m16n8k16.row.col.f32.bf16"),
    ("nvfp4", "nvfp4", 8, "mma.sync.aligned.m16n8k16.row.col.f32.f16"),
    ("nvfp4", "nvfp4", 16, "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16"),
    (torch.bfloat16, "nvfp4_16x16", 17, "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16"),
    (torch.bfloat16, "nvfp4", 64, "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16"),
    ("mxfp8", "mxfp8", 16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16"),
    (torch.bfloat16, "mxfp8", 64, "wgmma.mma_async"),
    ("mxfp8", "mxfp8", 300, "wgmma.mma_async"),
], ids=str)  # fmt: skip
def test_emulated_form_compiles_ahead(a, b, m, instruction):
    """On Hopper the sums are made by the matrix units, and nothing spills."""
    compiled = compile_ahead(90, a, b, m)
    assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 232448
    assert spilled_bytes(compiled.asm["cubin"]) == 0


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize("m", [9, 32, 64])
def test_shared_memory_is_reserved(m):
    """What the inline PTX takes is what Triton allocates for a loop that is never run."""
    from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes

    (_, found, *_) = launches(90, torch.bfloat16, "nvfp4", m)
    needed = needed_bytes(*map(found.constants.get, ("ROWS", "WARPS", "STAGES", "STEPS_PER_STAGE")))
    assert compile_ahead(90, torch.bfloat16, "nvfp4", m).metadata.shared == found.constants["SHARED"] >= needed + 1023


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("n", "m"), [(512, 16), (4096, 16), (33792, 16), (4096, 32), (512, 64), (4096, 64)])
def test_registers_of_running_wgmma_are_left_alone(n, m):
    """Weights that are multiplied lie in other registers than those that are expanded meanwhile."""
    from fp4compile.cli.check_sm100 import _disassemble

    sass, _ = _disassemble(compile_ahead(90, torch.bfloat16, "nvfp4", m, n).asm["cubin"])
    used = re.findall(r"HGMMA\.64x\d+x16\S* R\d+, R(\d+), .*?(gsb0)?\s*;", sass)
    groups = [set()]
    for register, last in used:
        groups[-1].add(register)
        groups += [set()] if last else []
    assert not groups.pop() and len(groups) > 1
    assert all(not one & other for one, other in zip(groups, groups[1:] + groups[:1], strict=True))


@pytest.mark.skipif(INTERPRETING, reason="compiles")
def test_weights_are_expanded_while_wgmma_runs():
    """ptxas awaits every group at once where it cannot follow the registers of those that run."""
    from fp4compile.cli.check_sm100 import _disassemble

    sass, _ = _disassemble(compile_ahead(90, torch.bfloat16, "nvfp4", 64).asm["cubin"])
    awaited = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    assert awaited == ["0x1"] * (len(awaited) - 1) + ["0x0"]
    assert len(awaited) > 2


@gpu
@for_gpus
@pytest.mark.parametrize("m", [1, 7, 16, 31, 64, 100, 600])
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4_16x16"), ("nvfp4_rowwise", "nvfp4"), ("mxfp8", "mxfp4"),
                                      ("mxfp8_e5m2", "mxfp8_32x32"), ("float8_rowwise", "float8_rowwise"),
                                      (torch.bfloat16, "nvfp4"), (torch.float16, "nvfp4"), (torch.bfloat16, "mxfp8"),
                                      (torch.float16, "mxfp4"), (torch.float32, "nvfp4")], ids=str)  # fmt: skip
def test_large(a, b, m):
    """Every kernel: decode, split sums, tiles, the library's product; shapes that no tile divides, too."""
    a = a if isinstance(a, torch.dtype) else formats.get(a)
    b = formats.get(b)
    for n, k in ((1024, 4096), (4096, 2048), (777, 1008)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        for layout in ("linear", "swizzled"):
            check(quantized(x, a, layout), quantized(w, b, layout), k, torch.randn(n))


@kernels_only
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "mxfp8_32x32", "float8_rowwise"])
def test_parts_of_an_operand(name, layout):
    """Some rows of a quantised matrix are an operand of their own, and mean the same."""
    fmt = formats.get(name)
    if fmt.block is None and layout == "swizzled":
        return
    whole = problem.operand_of("a", *quantized(torch.randn(300, 96), fmt, layout))
    expected = _dequantized(whole)
    for start, rows in ((0, 128), (128, 128), (256, 44)):
        part = whole.part(start, rows)
        assert torch.equal(_dequantized(part), expected[start : start + rows])


def _dequantized(operand):
    fmt = operand.fmt
    scales = None if operand.scales is None else operand.scales.view(fmt.scale_dtype)
    return reference.dequantize(operand.data.view(fmt.data_dtype), scales, operand.outer, fmt, operand.k, torch.float32)


@gpu
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize(("a", "b"), [("nvfp4", "nvfp4_16x16"), ("nvfp4_rowwise", "nvfp4"), ("nvfp4_16x16", "nvfp4"),
                                      ("nvfp4", "nvfp4_rowwise"), ("mxfp8", "mxfp8_32x32"), (torch.bfloat16, "nvfp4")],
                         ids=str)  # fmt: skip
def test_library_part_by_part(a, b, layout, columns, monkeypatch):
    """Parts of the rows of A where B is the smaller one, else parts of the columns of the result."""
    m, n, k = part_by_part(monkeypatch, columns)
    x, w = torch.randn(m, k), torch.randn(n, k)
    x[-3, :32] *= 2.0**-110  # too little for bf16 in MX formats, in the last part
    x[-3, 32:] = 0.0
    a = quantized(x, a if isinstance(a, torch.dtype) else formats.get(a), layout)
    b = quantized(w, formats.get(b), layout)
    ends = [(None, torch.bfloat16), (torch.randn(n).bfloat16(), torch.bfloat16), (torch.randn(n), torch.float32)]
    for bias, out_dtype in ends[::2] if INTERPRETING else ends:  # the interpreter takes seconds for each
        check(a, b, k, bias, out_dtype)


def check_streamed(shapes, a, b, layout, *out_dtype):
    """Products of streamed weights, with a bias, of m x n x k."""
    a = a if isinstance(a, torch.dtype) else formats.get(a)
    for m, n, k in shapes:
        x, w = torch.randn(m, k), torch.randn(n, k)
        check(quantized(x, a), quantized(w, formats.get(b), layout), k, torch.randn(n), *out_dtype)


@gpu
@for_gpus
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("b", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16, "nvfp4_rowwise"], ids=str)
def test_decode(a, b, layout):
    """A few rows and streamed weights: whole steps of every warp and ragged ends, rows that no program divides."""
    shapes = [(1, 256, 2048), (5, 200, 1088), (8, 96, 8192), (7, 40, 64), (3, 2064, 4096), (2, 2072, 8768),
              (1, 8200, 1088), (8, 8192, 1024), (4, 16392, 512)]  # fmt: skip
    check_streamed(shapes, a, b, layout)


# ROWS, TILES, WARPS, STAGES, CHAINS, GRID: see `decode_config`.
FORMS = [(2, 1, 4, 3, 2, 99), (2, 2, 4, 3, 1, 2), (2, 1, 8, 2, 1, 1), (4, 2, 4, 3, 2, 2), (8, 1, 4, 2, 1, 5),
         (8, 2, 4, 1, 2, 99)]  # fmt: skip


@gpu
@for_gpus
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("b", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16, "nvfp4_rowwise"], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_of_decode(form, a, b, layout, monkeypatch):
    """Each, with whole steps and ragged ends, also where a launch would be of another form."""
    config = dict(zip(("ROWS", "TILES", "WARPS", "STAGES", "CHAINS", "GRID"), form, strict=True))
    monkeypatch.setattr(kernels, "decode_config", lambda m, n, k: dict(config))
    monkeypatch.setattr(kernels, "few_config", lambda *_: None)
    rows = config["ROWS"]
    shapes = [(rows, 256, 2048), ((rows + 1) // 2, 201, 1088), (rows, 17, 64), (rows, 96, 7616)]
    check_streamed(shapes, a, b, layout)


# ROWS, WARPS, GRID: see `few_config`.
FORMS_OF_FEW = [(1, 4, 99), (2, 8, 1), (1, 8, 2), (2, 4, 2), (1, 16, 1), (2, 16, 99)]


@gpu
@for_gpus
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("b", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("a", [torch.bfloat16, "nvfp4_rowwise"], ids=str)
@pytest.mark.parametrize("form", FORMS_OF_FEW, ids=str)
def test_forms_of_few_rows(form, a, b, layout, monkeypatch):
    """Each, with whole steps and ragged ends, and more tiles of a program than are added at once."""
    rows, warps, programs = form

    def config(m, n, k, target):
        return {"ROWS": rows, "WARPS": warps, "STEPS": ceil_div(k, 256 * warps), "GRID": programs,
                "SHARED": target.shared_memory // 4096 * 4096}  # fmt: skip

    monkeypatch.setattr(kernels, "few_config", config)
    check_streamed([(rows, 256, 8192), (rows, 17, 64), (1, 1096, 7616)], a, b, layout)


@gpu
@for_gpus
@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("b", ["nvfp4", "nvfp4_16x16"])
@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16, "nvfp4_rowwise"], ids=str)
def test_a_few_dozen_rows(a, b, layout):
    """Shared activations: one part and several, the last of them short or empty, phases and programs with ends."""
    shapes = [(16, 512, 4096), (16, 1024, 16384), (9, 205, 1088), (17, 784, 2112), (32, 40, 64), (48, 200, 8768),
              (64, 256, 2048)]  # fmt: skip
    check_streamed(shapes, a, b, layout)
    check_streamed([(33, 33792, 64)], a, b, layout, torch.bfloat16)  # in one part


# Rows, warps, stages, steps of a phase and parts: see `wgmma_config`.
SHARED = [(16, 4, 3, 1, 1), (16, 8, 3, 2, 4), (32, 8, 3, 2, 1), (32, 4, 2, 1, 8), (64, 8, 3, 1, 2), (64, 16, 4, 2, 1)]


@gpu
@for_gpus
@pytest.mark.parametrize("a", [torch.bfloat16, "nvfp4_rowwise"], ids=str)
@pytest.mark.parametrize("form", SHARED, ids=str)
def test_forms_of_shared_activations(form, a, monkeypatch):
    """Each, with fewer phases than there are buffers, and with so many that every buffer is used again and again."""
    rows, warps, stages, per, split = form
    config = {"ROWS": rows, "WARPS": warps, "STAGES": stages, "STEPS_PER_STAGE": per, "SPLIT": split}
    monkeypatch.setattr(kernels, "wgmma_config", lambda *sizes: dict(config))
    shapes = [(rows, 512, 16384), (rows - 3, 1288, 8768), *((rows, 264, 128 * per * turns) for turns in range(1, 10))]
    check_streamed(shapes, a, "nvfp4", "linear")


@gpu
@for_gpus
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs_of_streamed_weights(hard):
    for m in (1, 7, 16, 50):
        for fmt in map(formats.get, ("nvfp4", "nvfp4_rowwise")):
            x = hard_input(hard, (64, 192), torch.float32, 16)
            w = hard_input(hard if hard != "huge" else "tiny", (64, 192), torch.float32, 16)
            check(quantized(x[:m], fmt), quantized(torch.randn(64, 192), fmt), 192)
            check(quantized(torch.randn(m, 192), torch.bfloat16), quantized(x, fmt), 192)
            check(quantized(x[:m], fmt), quantized(w, fmt), 192)


@gpu
@for_gpus
@pytest.mark.parametrize("m", [1, 40, 600])
def test_float8_on_fp8_matrix_units(m):
    """Where the library's FP8 product serves: its sums have fewer bits than float32, so the bound is wider."""
    fmt = formats.get("float8_rowwise")
    x, w, bias = torch.randn(m, 1024), torch.randn(256, 1024), torch.randn(256).bfloat16()
    a, b = quantized(x, fmt), quantized(w, fmt)
    left, right = (values(*operand, 1024) * operand[2].double() for operand in (a, b))
    for bias_or_none in (bias, None):
        there = [t.cuda() if isinstance(t, torch.Tensor) else t for t in (*a, *b, bias_or_none)]
        got = kernels.scaled_mm(*there, torch.bfloat16).cpu().double()
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
    in_interpreter.assert_passes(__file__)
