"""The block-scaled kernel for few rows of A: values in Triton's interpreter, machine code and launches for SM100.

In Triton's interpreter in the process of test_gemm_kernels.py.
"""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fp4compile import _compat
from fp4compile.check.sass import disassemble
from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.skinny_block_scaled_sm100 import CANDIDATE
from fp4compile.templates.launch import dry_run
from fp4compile.templates.multiply import multiply_together
from fp4compile.templates.problem import Problem
from tests.helpers import choices
from tests.helpers.check_products import check
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import INTERPRETING, NEW_PTXAS, quantized
from tests.helpers.multiplied import scaled_mm

KERNEL = "gemm_skinny_block_scaled_sm100"
BF16 = torch.bfloat16
interpreted = pytest.mark.skipif(not INTERPRETING, reason="the interpreter stands in for an SM100 GPU")
compiled = pytest.mark.skipif(INTERPRETING, reason="compiles, or asks for launches")

PAIRS = [("nvfp4", "nvfp4"), ("nvfp4_one_level", "nvfp4"), ("nvfp4_rowwise", "nvfp4_16x16"),
         ("nvfp4_te", "nvfp4_rowwise"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8_32x32"), ("mxfp8", "mxfp4"),
         ("mxfp4", "mxfp8"), ("mxfp8_e5m2", "mxfp8")]  # fmt: skip


def whole(monkeypatch, *parts):
    """Let this kernel serve everything; with as many parts of K as are given, or as its configuration says."""
    choices.only(monkeypatch, CANDIDATE.name)
    if parts:
        (split_k,) = parts
        choices.configured(monkeypatch, CANDIDATE.name, lambda p: replace(CANDIDATE.configure(p), split_k=split_k))


@interpreted
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_formats(a, b, monkeypatch):
    """Formats and global scales: K in parts and whole, ragged in every size, with and without a bias."""
    a, b = formats.get(a), formats.get(b)
    whole(monkeypatch)
    for m, n, k in ((5, 130, 600), (64, 60, 288)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), k, torch.randn(n))
    whole(monkeypatch, 1)
    for m, n, k, out_dtype in ((17, 140, 320, torch.float32), (33, 7, 32, BF16)):
        x, w = torch.randn(m, k), torch.randn(n, k)
        check(quantized(x, a, "swizzled"), quantized(w, b, "swizzled"), k, torch.randn(n), out_dtype)


@interpreted
@pytest.mark.parametrize("m", [1, 16, 17, 32, 33, 64])
def test_rows(m, monkeypatch):
    whole(monkeypatch)
    x, w, fmt = torch.randn(m, 528), torch.randn(129, 528), formats.get("nvfp4")
    check(quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled"), 528)


@interpreted
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_of_k(parts, monkeypatch):
    """Parts of unequal length, and more of them than steps: the empty ones add nothing."""
    whole(monkeypatch, parts)
    x, w, fmt = torch.randn(4, 900), torch.randn(20, 900), formats.get("nvfp4")
    check(quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled"), 900, torch.randn(20))


@interpreted
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs(hard, monkeypatch):
    """NaN and Inf as everywhere; K is in two parts."""
    whole(monkeypatch)
    for fmt in map(formats.get, ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4")):
        x = hard_input(hard, (16, 288), torch.float32, fmt.block_cols)
        w = hard_input(hard if hard != "huge" else "tiny", (16, 288), torch.float32, fmt.block_cols)
        check(quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled"), 288)
        check(quantized(torch.randn(20, 288), fmt, "swizzled"), quantized(x, fmt, "swizzled"), 288)


@interpreted
@pytest.mark.parametrize("name", ["nvfp4_one_level", "mxfp4"])
def test_a_nan_stays_in_its_row(name, monkeypatch):
    """Of B, and of A: scales beyond the end of a row are those of others, and are not read."""
    whole(monkeypatch)
    fmt = formats.get(name)
    x, w = torch.randn(9, 288), torch.randn(136, 288)
    x[3], w[128:] = float("nan"), float("nan")
    got = check(quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled"), 288)
    expected = torch.zeros(9, 136, dtype=torch.bool)
    expected[3], expected[:, 128:] = True, True
    assert torch.equal(got.isnan(), expected)


@interpreted
@pytest.mark.parametrize("parts", [1, 2])
def test_batches(parts, monkeypatch):
    """[B, M, K] x [B, N, K], and one weight for every batch."""
    whole(monkeypatch, parts)
    fmt = formats.get("nvfp4_rowwise")
    x, w = torch.randn(3, 5, 300), torch.randn(3, 130, 300)
    check(quantized(x, fmt, "swizzled"), quantized(w, fmt, "swizzled"), 300, out_dtype=BF16)
    check(quantized(x, fmt, "swizzled"), quantized(w[0], fmt, "swizzled"), 300, torch.randn(130))


@interpreted
def test_nothing_to_contract(monkeypatch):
    whole(monkeypatch)
    fmt = formats.get("nvfp4")
    check(quantized(torch.randn(3, 0), fmt, "swizzled"), quantized(torch.randn(4, 0), fmt, "swizzled"), 0,
          torch.randn(4))  # fmt: skip


@interpreted
@pytest.mark.parametrize("parts", [1, 3])
def test_epilogue(parts, monkeypatch):
    """After the sum of the parts, also of a single one."""
    whole(monkeypatch, parts)
    fmt = formats.get("nvfp4")
    a, b = (quantized(torch.randn(rows, 600), fmt, "swizzled") for rows in (9, 136))
    gate, bias = torch.randn(9, 136).bfloat16(), torch.randn(136)
    gated = Epilogue.parse(["relu product", "mul s0 aux0"], BF16, BF16)
    product = scaled_mm(a, b, bias, BF16)
    expected = (F.relu(product.float()) * gate.float()).bfloat16()
    assert torch.equal(scaled_mm(a, b, bias, BF16, gated, [gate]), expected)


@interpreted
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("sizes", [(200, 60), (128, 7, 300)])
def test_groups(sizes, parts, monkeypatch):
    """Products of one A in one launch have the bits that each has alone, with global scales and biases of their own."""
    whole(monkeypatch, parts)
    a = quantized(torch.randn(5, 500), formats.get("nvfp4"), "swizzled")
    members = [(quantized(torch.randn(n, 500) * n, formats.get("nvfp4_rowwise"), "swizzled"), torch.randn(n) * 100)
               for n in sizes]  # fmt: skip
    together = multiply_together([Arguments.of(a, *each, torch.float32) for each in members])
    for (b, bias), got in zip(members, together, strict=True):
        assert torch.equal(got, scaled_mm(a, b, bias, torch.float32))


# ---------------------------------------------------------------- launches


def operand_spec(name, swizzled=True):
    fmt = formats.get(name)
    return OperandSpec(fmt, fmt.data_dtype, swizzled, fmt.outer or "none")


def problem(m, n, k, sm=100, a="nvfp4", b="nvfp4", **options):
    return Problem(ProductSpec(operand_spec(a), operand_spec(b), BF16), m, n, k, Target(sm), **options)


def with_a(problem, *operand, **options):
    """The problem with another A."""
    return replace(problem, spec=replace(problem.spec, a=operand_spec(*operand, **options)))


def operand(name, rows, k):
    """Of meta tensors, with swizzled scales; plain where it has no format."""
    x = torch.empty(rows, k, dtype=BF16, device="meta")
    if name is None:
        return Operand(x)
    data, scales, outer = torch.ops.fp4compile.quantize(x, name, -1, layout="swizzled")
    fmt = formats.get(name)
    return Operand(data, scales, outer if fmt.outer else None, fmt)


def launches(sm, a, b, m, sizes, k):
    """Of products of one A and weights of these sizes; one where there is one."""
    x, weights = operand(a, m, k), [(operand(b, n, k), None) for n in sizes]
    with dry_run(Target(sm)) as found:
        multiply_together([Arguments.of(x, *each, BF16) for each in weights])
    return found


# N of the weights in one launch, K.
LLAMA = {
    "8B q, k, v": ((4096, 1024, 1024), 4096), "8B o": ((4096,), 4096), "8B gate, up": ((14336, 14336), 4096),
    "8B gate": ((14336,), 4096), "8B down": ((4096,), 14336), "70B q, k, v": ((8192, 1024, 1024), 8192),
    "70B o": ((8192,), 8192), "70B gate, up": ((28672, 28672), 8192), "70B gate": ((28672,), 8192),
    "70B down": ((8192,), 28672),
}  # fmt: skip


@compiled
@pytest.mark.parametrize("sm", [100, 103])
@pytest.mark.parametrize("name", LLAMA)
@pytest.mark.parametrize("formats_", [("nvfp4", "nvfp4"), ("nvfp4_rowwise", "nvfp4"), ("mxfp8", "mxfp8"),
                                      ("mxfp4", "mxfp4"), (None, "nvfp4")], ids=str)  # fmt: skip
def test_every_multiprocessor_has_a_program(formats_, name, sm):
    """For Llama-3, 1 to 64 rows: at least as many programs as multiprocessors.

    Two exceptions. The library computes what fills the GPU unsplit. From 9 rows on, 16-bit activations are multiplied
    by one weight at a time: K and V alone have 64 programs, which read 38 KB each and are mostly launch.
    """
    sizes, k = LLAMA[name]
    enough = Target(sm).multiprocessors
    for m in (1, 2, 4, 8, 16, 32, 64):
        products = [one for one in launches(sm, *formats_, m, sizes, k) if one.kernel.__name__.startswith("gem")]
        if formats_[0] is None:
            grids = sorted(one.grid for one in products)
            assert len(grids) == (1 if m <= 8 else len(sizes))
            assert grids[0] >= (64 if len(grids) == 3 else enough) and grids[-1] >= enough
        elif choose(problem(m, sizes[0], k, sm, *formats_)).kernel == "library_block_scaled":
            assert sizes[0] >= 128 * enough and not products
        else:
            assert [one.kernel.__name__ for one in products] == [KERNEL] and products[0].grid >= enough


@compiled
def test_small_weights_have_a_program_for_each_step():
    """Those of K or V alone, which a group would serve."""
    (product, _) = launches(100, "nvfp4", "nvfp4", 16, (1024,), 4096)
    assert product.grid == 8 * 4096 // 256


@compiled
def test_what_it_serves():
    assert choose(problem(64, 4096, 4096)).kernel == CANDIDATE.name
    for other in (problem(65, 4096, 4096), problem(64, 4096, 4096, 90), problem(64, 4096, 4096, 120),
                  with_a(problem(64, 4096, 4096), "nvfp4", swizzled=False)):  # fmt: skip
        assert choose(other).kernel != CANDIDATE.name
    one_level = problem(64, 4096, 4096, a="nvfp4_one_level", b="nvfp4_one_level")
    wide, short = replace(one_level, n=128 * 148), replace(one_level, k=256)
    assert choose(short).kernel == "library_block_scaled"
    assert [choose(p).kernel for p in (one_level, wide)] == [CANDIDATE.name, "library_block_scaled"]
    assert choose(replace(wide, target=Target(103))).kernel == CANDIDATE.name  # has more multiprocessors
    assert choose(wide.with_epilogue()).kernel == CANDIDATE.name and choose(wide).takes_epilogue
    assert choose(with_a(wide, "nvfp4_rowwise")).kernel == CANDIDATE.name
    assert choose(one_level).group is not None and choose(replace(one_level, batches=2)).group is None


# ---------------------------------------------------------------- machine code


_SM103 = pytest.mark.skipif(not NEW_PTXAS, reason="CUDA 12.8")


@compiled
@pytest.mark.parametrize(("a", "b", "m", "sizes", "kind", "sm"), [
    ("nvfp4", "nvfp4", 1, (4096,), "mxf4nvf4", 100), ("nvfp4_rowwise", "nvfp4", 64, (18944,), "mxf4nvf4", 100),
    ("nvfp4", "nvfp4", 16, (4096, 1024, 1024), "mxf4nvf4", 100), ("mxfp4", "mxfp4", 32, (4096,), "mxf4", 100),
    ("mxfp8", "mxfp8", 64, (4096,), "mxf8f6f4", 100), ("mxfp8", "mxfp4", 64, (4096,), "mxf8f6f4", 100),
    pytest.param("nvfp4", "nvfp4", 16, (4096, 1024, 1024), "mxf4nvf4", 103, marks=_SM103),
], ids=str)  # fmt: skip
def test_machine_code(a, b, m, sizes, kind, sm):
    """Scales are copied to tensor memory, codes 16 bytes a thread; products overlap the copies; two programs fit."""
    found = launches(sm, a, b, m, sizes, 4096)
    product = next(one for one in found if one.kernel.__name__ == KERNEL)
    code = _compat.compile_ahead(product.kernel, product.args, product.constants, product.num_warps, sm)
    ptx = code.asm["ptx"]
    assert re.search(rf"tcgen05\.mma\S*kind::{kind}\.block_scale", ptx)
    # Of both operands: in each of two products, one before the loop, a copy for 128 x 4 scales.
    assert len(re.findall(r"tcgen05\.cp", ptx)) == 2 * 2 * (4 if kind == "mxf4nvf4" else 2 if kind == "mxf4" else 1)
    assert len(re.findall(r"mbarrier\.try_wait", ptx)) == 2  # one wait alone: every step waits for its own product
    sass = disassemble(code.asm["cubin"])
    assert not sass.local_accesses and "LDGSTS.E.BYPASS.128" in sass.text
    assert not sass.widths("LDG")  # nothing waits for a load
    assert 2 * (code.metadata.shared + 1024) <= Target(sm).shared_memory + 1024
    assert 2 * code.metadata.tmem_size <= 512
    assert 2 * 32 * product.num_warps * sass.registers <= 65536
    assert set(sass.widths("STG")) == {16}


@compiled
def test_ragged_sizes_do_not_spill():
    """Rows that are not whole 16 bytes, and neither whole steps nor whole tiles."""
    found = launches(100, "nvfp4", "nvfp4", 63, (4095, 77), 4112)
    product = next(one for one in found if one.kernel.__name__ == KERNEL)
    code = _compat.compile_ahead(product.kernel, product.args, product.constants, product.num_warps, 100)
    assert not disassemble(code.asm["cubin"]).local_accesses
    assert "tcgen05.cp" in code.asm["ptx"]
