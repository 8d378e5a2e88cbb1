"""`choose`: which kernel serves a product, what a graph may do with it, and that nothing else decides."""

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from expecttest import TestCase
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp4compile
from fp4compile import _compat
from fp4compile.formats import formats
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.templates import choose as module
from fp4compile.templates.choose import REGISTRY, candidates, choose, named
from fp4compile.templates.gemm import cost
from fp4compile.templates.gemm.heuristics import BlockScaledConfig
from fp4compile.templates.launch import dry_run
from fp4compile.templates.problem import Problem
from tests.helpers.absent_gpu import symbolic
from tests.helpers.choices import configured, only, without

BF16 = torch.bfloat16
TWO_CTAS = ("block_scaled_two_ctas_sm100",) if _compat.two_cta_products() else ()


def operand_spec(name, swizzled=False):
    if name is None:
        return OperandSpec(None, BF16)
    fmt = formats.get(name)
    return OperandSpec(fmt, fmt.data_dtype, swizzled and fmt.swizzles, fmt.outer or "none")


def problem(a, b, m, sm, n=8192, k=4096, out_dtype=BF16, **options):
    spec = ProductSpec(operand_spec(a, sm >= 100), operand_spec(b, sm >= 100), out_dtype)
    return Problem(spec, m, n, k, Target(sm), **options)


@pytest.mark.parametrize(("a", "b", "m", "sm", "kernel", "tier"), [
    (None, "nvfp4", 1, 90, "streaming", "emulated"), (None, "nvfp4", 3, 90, "streaming", "emulated"),
    (None, "nvfp4", 40, 90, "wgmma_sm90", "emulated"), (None, "nvfp4", 40, 80, "dequant_tiles", "emulated"),
    (None, "nvfp4", 65, 90, "wgmma_sm90", "emulated"), ("nvfp4", "nvfp4", 8192, 90, "wgmma_sm90", "emulated"),
    (None, "nvfp4", 2**16, 90, "wgmma_sm90", "emulated"), (None, "mxfp4", 512, 90, "wgmma_sm90", "emulated"),
    (None, "mxfp4", 8, 80, "streaming", "emulated"), (None, "nvfp4", 8, 86, "dequant_tiles", "emulated"),
    ("mxfp8", "mxfp8", 8, 90, "dequant_tiles", "emulated"),
    ("float8_rowwise", "float8_rowwise", 9, 90, "float8_tiles", "native"),
    ("float8_rowwise", "float8_tensor", 64, 90, "float8_tiles", "native"),
    ("float8_rowwise", "float8_rowwise", 65, 90, "library_row_scaled", "native"),
    ("float8_tensor", "float8_tensor", 9, 90, "library_row_scaled", "native"),
    ("float8_rowwise", "float8_rowwise", 8, 90, "streaming_fp8", "emulated"),
    ("float8_tensor", "float8_tensor", 8, 90, "library_row_scaled", "native"),
    ("float8_rowwise", "float8_rowwise", 8, 89, "library_row_scaled", "native"),
    ("float8_1x128", "float8_128x128", 1, 90, "streaming_fp8", "emulated"),
    ("float8_1x128", "float8_128x128", 9, 90, "float8_tiles", "native"),
    ("float8_1x128", "float8_128x128", 65, 90, "library_float8_blocks", "native"),
    (None, "float8_128x128", 8, 89, "streaming_fp8", "emulated"),
    (None, "float8_rowwise", 8, 120, "streaming_fp8", "emulated"),
    (None, "float8_rowwise", 9, 90, "float8_weight_tiles", "emulated"),
    (None, "float8_128x128", 64, 90, "float8_weight_tiles", "emulated"),
    (None, "float8_128x128", 256, 90, "float8_weight_tiles", "emulated"),
    (None, "float8_128x128", 257, 90, "dequant_operand", "emulated"),
    (None, "float8_128x128", 9, 89, "dequant_tiles", "emulated"),
    (None, "float8_rowwise", 1, 86, "dequant_tiles", "emulated"),
    ("float8_rowwise", "float8_rowwise", 7, 86, "dequant_tiles", "emulated"),
    ("nvfp4", "nvfp4", 512, 100, "library_block_scaled", "native"), (None, "nvfp4", 1, 100, "streaming", "emulated"),
    ("nvfp4_rowwise", "nvfp4_rowwise", 512, 100, "block_scaled_sm100", "native"),
    ("nvfp4_one_level", "nvfp4_one_level", 512, 100, "library_block_scaled", "native"),
    ("nvfp4", "nvfp4", 64, 100, "skinny_block_scaled_sm100", "native"),
    ("mxfp4", "mxfp4", 1, 103, "skinny_block_scaled_sm100", "native"),
    ("nvfp4", "nvfp4", 65, 100, "library_block_scaled", "native"),
    ("nvfp4", "nvfp4", 64, 120, "block_scaled_sm100", "native"),
    ("mxfp8", "mxfp8", 512, 103, "library_block_scaled", "native"),
    ("mxfp8", "mxfp4", 512, 100, "block_scaled_sm100", "native"),
    ("mxfp8", "mxfp4", 512, 120, "block_scaled_sm100", "native"),
    ("nvfp4", "nvfp4", 512, 120, "block_scaled_sm100", "native"),
    ("nvfp4", "nvfp4", 512, 0, "dequant_tiles", "emulated"),
])  # fmt: skip
def test_kernel_and_tier(a, b, m, sm, kernel, tier):
    choice = choose(problem(a, b, m, sm))
    assert (choice.kernel, choice.tier) == (kernel, tier)
    assert choice.config == named(kernel).configure(problem(a, b, m, sm))


@pytest.mark.parametrize(("n", "k", "a", "kernel"), [
    (32, 448, None, "streaming"), (17, 512, None, "streaming"), (17, 448, None, "dequant_tiles"),
    (32, 448, "mxfp4", "dequant_tiles"),
])  # fmt: skip
def test_experts_of_mxfp4_are_streamed_where_their_scales_begin_at_words(n, k, a, kernel):
    """Matrices of 17 rows with 14 scales each are no whole words. Quantised activations are not streamed."""
    spec = ProductSpec(operand_spec(a, False), operand_spec("mxfp4", False), BF16, Grouping.RAGGED_ROWS)
    assert choose(Problem(spec, 3, n, k, Target(90), groups=4)).kernel == kernel


@pytest.mark.parametrize(("groups", "each", "k", "kernel"), [
    (512, 4, 1024, "streaming"), (512, 5, 1024, "wgmma_sm90"), (513, 8, 512, "streaming"),
    (512, 0.5, 960, "streaming"), (512, 1, 960, "wgmma_sm90"),
    (33, 8, 1024, "streaming"), (33, 9, 1024, "wgmma_sm90"), (34, 8, 1024, "wgmma_sm90"), (33, 2, 960, "wgmma_sm90"),
])  # fmt: skip
def test_experts_are_streamed_up_to_some_tokens_each(groups, each, k, kernel):
    """Four on average, or fewer than one where K is short; eight where `wgmma_sm90` does not take so many experts, or
    has two programs for each of 132 multiprocessors: 33 experts of 512 rows."""
    spec = ProductSpec(operand_spec(None, False), operand_spec("nvfp4", False), BF16, Grouping.RAGGED_ROWS)
    assert choose(Problem(spec, int(groups * each), 512, k, Target(90), groups=groups)).kernel == kernel


POWERS, SQUARES = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"


@pytest.mark.parametrize(("a", "b", "m", "sm", "kernel"), [
    (POWERS, SQUARES, 512, 100, "library_block_scaled_of_float8_blocks"),
    (POWERS, SQUARES, 16, 103, "skinny_block_scaled_sm100_of_float8_blocks"),
    (POWERS, POWERS, 512, 120, "block_scaled_sm100_of_float8_blocks"),
    ("e5m2:1x128:float32:-:te_pow2", SQUARES, 512, 100, "block_scaled_sm100_of_float8_blocks"),
    (POWERS, SQUARES, 512, 90, "library_float8_blocks"), (POWERS, SQUARES, 512, 86, "dequant_tiles"),
    ("float8_1x128", "float8_128x128", 512, 100, "dequant_tiles"),
    (POWERS, "float8_128x128", 512, 100, "dequant_tiles"), (None, SQUARES, 512, 100, "dequant_operand"),
])  # fmt: skip
def test_blocks_whose_scales_are_powers_of_two_are_mx(a, b, m, sm, kernel):
    """On matrix units that read MX operands, by the kernel and the configuration of the same codes as MXFP8."""
    found = choose(problem(a, b, m, sm))
    assert found.kernel == kernel
    if sm < 100 or not kernel.endswith("_of_float8_blocks"):
        assert not any(name.endswith("_of_float8_blocks") for name in candidates(problem(a, b, m, sm)))
        return
    mx = problem("mxfp8_e5m2" if a.startswith("e5m2") else "mxfp8", "mxfp8", m, sm)
    same = choose(mx)
    assert found == dataclasses.replace(same, kernel=f"{same.kernel}_of_float8_blocks", group=found.group)
    assert candidates(problem(a, b, m, sm)) == tuple(f"{name}_of_float8_blocks" for name in candidates(mx))
    fused = choose(problem(a, b, m, sm, n=1024, k=512).with_epilogue())
    assert fused.takes_epilogue and not fused.kernel.startswith("library")


@pytest.mark.parametrize(("a", "b", "m", "out_dtype", "kernel"), [
    (None, "float8_128x128", 65, BF16, "dequant_operand"), (None, "float8_128x128", 64, BF16, "dequant_tiles"),
    (None, "float8_1x128", 512, BF16, "dequant_operand"), (None, "float8_128x128", 512, torch.float32, "dequant_tiles"),
    ("float8_1x128", "float8_128x128", 512, BF16, "dequant_tiles"),
])  # fmt: skip
def test_weights_beside_bf16_are_rounded_for_many_rows(a, b, m, out_dtype, kernel):
    """Float32 block scales; where the activations are quantised, or the result is in float32, sums are scaled."""
    assert choose(problem(a, b, m, 80, out_dtype=out_dtype)).kernel == kernel


def test_an_epilogue_is_not_the_librarys():
    """Where the library computes the product, a kernel computes it with an epilogue; that of few rows has none."""
    mx = problem("mxfp8", "mxfp8", 512, 100, n=1024, k=512)
    assert choose(mx).takes_epilogue and choose(mx).kernel == "library_block_scaled"
    fused = choose(mx.with_epilogue())
    assert fused.takes_epilogue and fused.kernel == "block_scaled_sm100"
    taken = {m: choose(problem(None, "nvfp4", m, 90)).takes_epilogue for m in (1, 8, 9, 64, 65)}
    assert taken == {1: False, 8: False, 9: True, 64: True, 65: True}
    # The tiles may be computed again, whoever has written the result before.
    for out_dtype in (BF16, torch.float32):
        emulated = problem("mxfp8", "mxfp8", 512, 90, out_dtype=out_dtype)
        assert choose(emulated).kernel == "dequant_operand" and not choose(emulated).takes_epilogue
    assert not choose(problem("float8_rowwise", "float8_rowwise", 512, 90)).takes_epilogue


@pytest.mark.parametrize(("kernel", "n", "k", "parts"), [
    # 128 programs fill an H200, each of 16 rows of B where they are few; a part of K has at least one step of 4 x 64
    # pairs.
    ("dequant_tiles", 2048, 4096, 1), ("dequant_tiles", 2032, 4096, 2), ("dequant_tiles", 2032, 1024, 2),
    ("dequant_tiles", 2032, 1008, 1), ("dequant_tiles", 1024, 4096, 2), ("dequant_tiles", 1008, 4096, 4),
    ("dequant_tiles", 1008, 2048, 4), ("dequant_tiles", 1008, 2032, 2), ("dequant_tiles", 256, 2**16, 8),
    # 132 multiprocessors take seven programs of 64 rows of B each; a part of K has at least 512 elements.
    ("wgmma_sm90", 4096, 4096, 4), ("wgmma_sm90", 4096, 2048, 4), ("wgmma_sm90", 4096, 2032, 2),
    ("wgmma_sm90", 4096, 1024, 2), ("wgmma_sm90", 4096, 1008, 1), ("wgmma_sm90", 14784, 4096, 4),
    ("wgmma_sm90", 14800, 4096, 2), ("wgmma_sm90", 29568, 4096, 2), ("wgmma_sm90", 29584, 4096, 1),
    # 148 multiprocessors of a B200: a program for each, of 128 rows of B, or one for each step of 256 elements.
    ("skinny_block_scaled_sm100", 4096, 4096, 5), ("skinny_block_scaled_sm100", 4096, 1280, 5),
    ("skinny_block_scaled_sm100", 4096, 1024, 4), ("skinny_block_scaled_sm100", 148 * 128, 4096, 1),
    ("skinny_block_scaled_sm100", 74 * 128, 4096, 2),
])  # fmt: skip
def test_k_is_split_until_the_gpu_is_full(kernel, n, k, parts):
    sm, a = (100, "nvfp4") if kernel.endswith("sm100") else (90, None)
    assert named(kernel).configure(problem(a, "nvfp4", 16, sm, n=n, k=k)).split_k == parts


@pytest.mark.parametrize(("m", "n", "k", "tile"), [
    # One round of 132 multiprocessors: 128 programs, of as many rows of A as that takes, or of a part of K.
    (65, 8192, 8192, (72, 1, 2)), (128, 8192, 8192, (128, 1, 2)), (256, 8192, 8192, (256, 1, 2)),
    (384, 8192, 8192, (192, 1, 1)), (512, 8192, 8192, (256, 1, 1)), (128, 4096, 14336, (128, 1, 4)),
    # 224 tiles of one part would be two rounds; 112 of two parts are one.
    (128, 28672, 8192, (128, 2, 1)), (640, 8192, 8192, (160, 1, 1)), (2048, 28672, 8192, (256, 1, 1)),
])  # fmt: skip
def test_tiles_of_many_rows_fill_rounds_of_programs(m, n, k, tile):
    config = choose(problem(None, "nvfp4", m, 90, n=n, k=k)).config
    assert (config.rows, config.parts, config.split_k) == tile
    problems = (problem(None, "nvfp4", m, 90, n=columns, k=k) for columns in (n, n + 8))
    with_epilogue = [choose(each.with_epilogue()).config for each in problems]
    assert {config.parts for config in with_epilogue} == {1} and with_epilogue[1].rows <= 224
    assert with_epilogue[0].rows == config.rows or config.parts == 2


def test_any_number_of_rows_is_settled_where_one_kernel_serves():
    """Of NVFP4 weights on Hopper: up to 64, and more rows."""
    rows = ShapeEnv().create_unbacked_symint
    for least, most, kernel in ((1, 64, "wgmma_sm90"), (65, 9000, "wgmma_sm90"), (1, 100, "by rows")):
        m = rows()
        torch._check(m >= least)
        torch._check(m <= most)
        assert choose(problem(None, "nvfp4", m, 90)).kernel == kernel


def test_groups():
    """Products of few rows of one A, if their weights are alike."""
    one, other = problem(None, "nvfp4", 1, 90), problem(None, "nvfp4", 1, 90, n=1024)
    assert choose(one).group == choose(other).group is not None
    assert choose(problem(None, "nvfp4_rowwise", 1, 90)).group != choose(one).group
    assert choose(problem(None, "nvfp4", 9, 90)).group is None
    assert choose(problem(None, "nvfp4", 1, 90, n=0)).group is None


def test_preferred():
    mx = problem("mxfp8", "mxfp8", 512, 100)
    assert candidates(mx) == ("library_block_scaled", "block_scaled_sm100", *TWO_CTAS)
    assert choose(mx, "block_scaled_sm100").kernel == "block_scaled_sm100"
    assert candidates(problem("nvfp4", "nvfp4", 512, 100)) == candidates(mx)
    assert candidates(problem("nvfp4_rowwise", "nvfp4", 512, 100)) == ("block_scaled_sm100", *TWO_CTAS)
    with pytest.raises(
        ValueError, match="kernel: 'cutlass' is none of skinny_block_scaled_sm100, grouped_block_scaled_sm100, "
    ):
        choose(mx, "cutlass")


def test_the_registry(monkeypatch):
    """Names are unique, and a candidate serves only what it says: taken away, the next one in rank serves."""
    assert len({candidate.name for candidate in REGISTRY}) == len(REGISTRY)
    one = problem(None, "nvfp4", 1, 90)
    with monkeypatch.context() as patch:
        without(patch, "streaming")
        assert choose(one).kernel == "wgmma_sm90"
        configured(patch, "wgmma_sm90", "anything")
        assert choose(one).config == "anything"
    with monkeypatch.context() as patch:
        only(patch, "dequant_tiles")
        assert choose(problem("nvfp4", "nvfp4", 512, 100)).kernel == "dequant_tiles"
    assert module.REGISTRY is REGISTRY


def test_every_product_has_a_kernel():
    """`dequant_tiles` serves all; the block-scaled kernels of SM100 either those of groups or the others."""
    for a, b in itertools.product((None, "nvfp4", "mxfp8", "float8_rowwise", "nvfp4_rowwise"), repeat=2):
        if a is not None and b is not None and not formats.compatible(formats.get(a), formats.get(b)):
            continue
        for sm, m in itertools.product((0, 86, 90, 100, 103, 120), (1, 16, 64, 4096)):
            dense = problem(a, b, m, sm)
            for how in (Grouping.DENSE, Grouping.RAGGED_ROWS, Grouping.RAGGED_CONTRACTION):
                spec = dataclasses.replace(dense.spec, grouping=how)
                one = dataclasses.replace(dense, spec=spec, groups=1 if how is Grouping.DENSE else 4)
                serving = {each.name for each in REGISTRY if each.takes(one)}
                assert "dequant_tiles" in serving
                assert ("grouped_block_scaled_sm100" in serving) <= one.ragged
                assert ("block_scaled_sm100" in serving) <= (not one.ragged)


def test_a_problem_is_decided_once():
    """Equal ones are looked up, unless another kernel is preferred or the registry is another."""
    one = problem("nvfp4", "nvfp4", 77, 100, n=1552)
    found = choose(one)
    assert choose(dataclasses.replace(one)) is found and choose(one, "block_scaled_sm100") is not found
    with pytest.MonkeyPatch.context() as patch:
        without(patch, found.kernel)
        assert choose(one).kernel != found.kernel
    assert choose(one) is found
    rows = any_rows()
    assert choose(problem(None, "nvfp4", rows, 90)).kernel == "by rows"


def test_a_node_keeps_its_problem():
    """Until it has other arguments."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        x, w, other = (graph.placeholder(name) for name in ("x", "w", "other"))
        for node, size in ((x, 16), (w, 48), (other, 80)):
            node.meta["val"] = torch.empty(size, 64, dtype=torch.bfloat16)
        node = graph.call_function(SCALED_MM, (x, None, None, w, None, None, "plain @ plain -> bfloat16"))
        with dry_run(Target(90)):
            product = scaled_mm_of(node)
            assert scaled_mm_of(node) is product and product.problem is product.problem
            w.replace_all_uses_with(other)
            assert product.problem.n == 48 and scaled_mm_of(node).problem.n == 80


def test_nobody_else_asks_a_candidate():
    """`choose` and `multiply` alone import kernels' files; passes import no device code. All others read the Choice."""
    package = Path(fp4compile.__file__).parent
    kernels = {"gemv", "skinny", "horizontal", "streaming", "wgmma_sm90", "dequant_tiles", "dequant_operand", "library",
               "block_scaled_sm100", "cost", "skinny_block_scaled_sm100", "block_scaled_two_ctas_sm100",
               "two_cta_kernel_sm100"}  # fmt: skip
    for path in package.rglob("*.py"):
        if path.parent.name == "gemm" or path.name in ("choose.py", "multiply.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fp4compile.templates.gemm"):
                names = {node.module.rpartition(".")[2], *(alias.name for alias in node.names)}
                assert not names & kernels, (path, names)
            if "passes" in path.parts and isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("fp4compile.templates.device"), path


# ---------------------------------------------------------------- who computes what on SM100

RECIPES = {
    "nvfp4": ("nvfp4", "nvfp4"), "one-level": ("nvfp4_one_level", "nvfp4_one_level"),
    "rowwise": ("nvfp4_rowwise", "nvfp4"), "mxfp8": ("mxfp8", "mxfp8"), "mx 32x32": ("mxfp8", "mxfp8_32x32"),
    "mx 8 x 4": ("mxfp8", "mxfp4"), "mxfp4": ("mxfp4", "mxfp4"), "fp8 row": ("float8_rowwise", "float8_rowwise"),
}  # fmt: skip
# M, N, K: tokens of a decode step and of prompts; the projections of Llama-3-8B; many columns of a short K.
SHAPES = [(64, 4096, 4096), (16, 28672, 8192), (512, 4096, 4096), (8192, 8192, 2048), (8192, 8192, 512),
          (512, 1024, 512), (512, 4096, 1040), (512, 4100, 4096)]  # fmt: skip
TILE = BlockScaledConfig(128, 256, 256, 3, 8)  # whatever the heuristics say today
SHORT = {"library_block_scaled": "lib", "block_scaled_sm100": "own", "skinny_block_scaled_sm100": "few",
         "library_rescaled": "rescaled", "library_row_scaled": "row", "dequant_operand": "16 bit",
         "dequant_tiles": "16 bit"}  # fmt: skip


def any_rows():
    return symbolic(ShapeEnv(), 64)


def routed(sm, a, b, m, n, k):
    """Who computes a product, and who one that an epilogue follows: a kernel with it; "-" where it is Inductor's."""
    alone = problem(a, b, m, sm, n=n, k=k)
    found = choose(alone)
    if found.kernel == "by rows":
        return found.kernel
    fused = choose(alone.with_epilogue()).kernel if found.takes_epilogue else None
    return f"{SHORT[found.kernel]}, {'-' if fused is None else SHORT[fused]}"


def table(sm):
    shapes = [*SHAPES, (any_rows(), 4096, 4096), (any_rows(), 8192, 512)]
    lines = [["", *RECIPES]]
    for m, n, k in shapes:
        rows = m if isinstance(m, int) else "any"
        lines.append([f"{rows} x {n} x {k}", *(routed(sm, a, b, m, n, k) for a, b in RECIPES.values())])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines) + "\n"


class TestWhoComputesWhat(TestCase):
    """Shapes by recipes, as `routed` has it. "lib" is cuBLASLt's block-scaled product; "own" and "few" are ours."""

    def routes(self, sm):
        with pytest.MonkeyPatch.context() as patch:
            configured(patch, "block_scaled_sm100", TILE)
            return table(sm)

    def test_on_sm100(self):
        self.assertExpectedInline(
            self.routes(100),
            """\
                    nvfp4     one-level  rowwise   mxfp8     mx 32x32  mx 8 x 4  mxfp4     fp8 row
64 x 4096 x 4096    few, few  few, few   few, few  few, few  few, few  few, few  few, few  row, -
16 x 28672 x 8192   lib, -    lib, -     few, few  lib, -    lib, -    few, few  few, few  row, -
512 x 4096 x 4096   lib, -    lib, -     own, own  lib, -    lib, -    own, own  own, own  row, -
8192 x 8192 x 2048  lib, own  lib, own   own, own  lib, -    lib, -    own, own  own, own  row, -
8192 x 8192 x 512   lib, own  lib, own   own, own  lib, own  lib, own  own, own  own, own  row, -
512 x 1024 x 512    lib, own  lib, own   own, own  lib, own  lib, own  own, own  own, own  row, -
512 x 4096 x 1040   own, own  own, own   own, own  lib, -    lib, -    own, own  own, own  row, -
512 x 4100 x 4096   own, own  own, own   own, own  own, own  own, own  own, own  own, own  16 bit, 16 bit
any x 4096 x 4096   lib, -    lib, -     own, own  lib, -    lib, -    own, own  own, own  row, -
any x 8192 x 512    lib, own  lib, own   own, own  lib, own  lib, own  own, own  own, own  row, -
""",
        )

    def test_on_sm103(self):
        self.assertExpectedInline(
            self.routes(103),
            """\
                    nvfp4     one-level  rowwise   mxfp8     mx 32x32  mx 8 x 4  mxfp4     fp8 row
64 x 4096 x 4096    few, few  few, few   few, few  few, few  few, few  few, few  few, few  rescaled, -
16 x 28672 x 8192   lib, -    lib, -     few, few  lib, -    lib, -    few, few  few, few  rescaled, -
512 x 4096 x 4096   lib, -    lib, -     own, own  lib, -    lib, -    own, own  own, own  rescaled, -
8192 x 8192 x 2048  lib, -    lib, -     own, own  lib, -    lib, -    own, own  own, own  rescaled, -
8192 x 8192 x 512   lib, own  lib, own   own, own  lib, own  lib, own  own, own  own, own  rescaled, -
512 x 1024 x 512    lib, own  lib, own   own, own  lib, -    lib, -    own, own  own, own  rescaled, -
512 x 4096 x 1040   own, own  own, own   own, own  lib, -    lib, -    own, own  own, own  rescaled, -
512 x 4100 x 4096   own, own  own, own   own, own  own, own  own, own  own, own  own, own  16 bit, 16 bit
any x 4096 x 4096   lib, -    lib, -     own, own  lib, -    lib, -    own, own  own, own  rescaled, -
any x 8192 x 512    lib, own  lib, own   own, own  lib, -    lib, -    own, own  own, own  rescaled, -
""",
        )


# ---------------------------------------------------------------- the cost model


def test_the_models_figures():
    """What was put in comes out: cuBLAS at 5.4 PFLOP/s, and the share of its peak that a tile can reach."""
    whole = problem("nvfp4_one_level", "nvfp4_one_level", 8192, 100, n=8192, k=8192)
    flops = 2 * 8192**3
    assert flops / cost.library_seconds(whole) == pytest.approx(5.4e15, rel=0.03)
    assert flops / cost.kernel_seconds(whole, TILE) == pytest.approx(0.64 * 0.625 * 9e15, rel=0.03)
    smaller = dataclasses.replace(TILE, bn=128)
    assert cost.kernel_seconds(whole, smaller) == pytest.approx(4 / 3 * cost.kernel_seconds(whole, TILE), rel=0.03)
    mx = problem("mxfp8", "mxfp8", 8192, 100, n=8192, k=8192)
    assert cost.library_seconds(mx) == pytest.approx(2 * cost.library_seconds(whole), rel=0.01)
    assert cost.pointwise_seconds(whole) == pytest.approx(2 * 2 * 8192**2 / 7.2e12 + cost.LAUNCH)


def test_one_row_takes_as_long_as_its_weights():
    """Nothing is computed faster than its operands come from memory."""
    one = problem("mxfp8", "mxfp8", 1, 100, n=2**20, k=128)
    assert cost.library_seconds(one) >= 2**20 * 128 / 7.2e12 and cost.kernel_seconds(one, TILE) >= 2**20 * 128 / 7.2e12


@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_one_level", "mxfp8"])
def test_fusing_pays_up_to_some_k(fmt):
    """The pass over the product that fusing saves does not grow with K; what the library computes faster does."""
    pays = [cost.fusing_pays(problem(fmt, fmt, 8192, 100, n=8192, k=k), TILE) for k in range(128, 16384, 128)]
    last = pays.index(False)
    assert 4 < last < 40 and all(pays[:last]) and not any(pays[last:])


def test_any_number_of_rows_is_every_number():
    """Fused only where it pays for few rows and for many."""
    for k in (256, 1024, 4096):
        each = [cost.fusing_pays(problem("nvfp4", "nvfp4", m, 100, k=k), TILE) for m in cost.ANY_ROWS]
        assert cost.fusing_pays(problem("nvfp4", "nvfp4", any_rows(), 100, k=k), TILE) == all(each)


@pytest.mark.parametrize("sizes", [{"n": 4096}, {"k": 4096}])
def test_other_sizes_that_are_open_are_not_fused(sizes):
    open_size = dict.fromkeys(sizes, 16 * any_rows())
    assert not cost.fusing_pays(problem("nvfp4", "nvfp4", 128, 100, **{"n": 1024, "k": 256, **open_size}), TILE)


def test_where_a_kernel_serves_anyhow_the_epilogue_is_its(monkeypatch):
    """No model is asked where fusing changes no kernel."""
    monkeypatch.setattr(cost, "fusing_pays", lambda *_: pytest.fail("asked"))
    for a, sm in (("mxfp4", 100), ("nvfp4_rowwise", 100), ("nvfp4", 120), ("nvfp4", 90)):
        assert choose(problem(a, a, 40, sm)).takes_epilogue
    for sm in (90, 103):
        assert not choose(problem("float8_rowwise", "float8_rowwise", 72, sm)).takes_epilogue
