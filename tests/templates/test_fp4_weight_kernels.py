"""The kernels that stream FP4 weights (gemv, skinny, wgmma): written in inline PTX, so they run on a GPU alone."""

from dataclasses import astuple, replace

import pytest
import torch

from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Operand
from fp4compile.templates.gemm.gemv import GemvConfig
from fp4compile.templates.gemm.skinny import SkinnyConfig
from fp4compile.templates.gemm.wgmma_launches_sm90 import (
    GROUPED_TILES,
    LARGE_TILES,
    SMALL_TILES,
    WgmmaConfig,
    with_shared_memory,
)
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from tests.helpers import choices
from tests.helpers.check_products import check
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import INTERPRETING, gpu, on_device, quantized
from tests.helpers.multiplied import scaled_grouped_mm

pytestmark = pytest.mark.skipif(INTERPRETING, reason="inline PTX")


# Activations, weights, layout of the weights' scales.
OPERANDS = [
    (torch.bfloat16, "nvfp4", "linear"), (torch.float16, "nvfp4_16x16", "swizzled"),
    ("nvfp4_rowwise", "nvfp4", "swizzled"), (torch.bfloat16, "nvfp4_16x16", "linear"),
    (torch.bfloat16, "mxfp4", "linear"), (torch.bfloat16, "mxfp4", "swizzled"),
]  # fmt: skip
operands = pytest.mark.parametrize(("a", "b", "layout"), OPERANDS, ids=str)
# One of each that the pipelines of configurations tell apart: the layout of the scales, and their type.
of_pipelines = pytest.mark.parametrize(("a", "b", "layout"), [OPERANDS[i] for i in (0, 1, 4)], ids=str)


def check_shapes(shapes, a, b, layout, *out_dtype):
    """Products with a bias, of m x n x k."""
    a = a if isinstance(a, torch.dtype) else formats.get(a)
    for m, n, k in shapes:
        x, w = torch.randn(m, k), torch.randn(n, k)
        check(quantized(x, a), quantized(w, formats.get(b), layout), k, torch.randn(n), *out_dtype)


@gpu
@operands
def test_gemv_and_skinny(a, b, layout):
    """Up to eight rows: whole steps of every warp and ragged ends, rows of B that no tile divides."""
    shapes = [(1, 256, 2048), (5, 200, 1088), (8, 96, 8192), (7, 40, 64), (3, 2064, 4096), (2, 2072, 8768),
              (1, 8200, 1088), (8, 8192, 1024), (4, 16392, 512)]  # fmt: skip
    check_shapes(shapes, a, b, layout)


# Rows, tiles, warps, stages, chains, grid.
SKINNY_CONFIGURATIONS = [
    (2, 1, 4, 3, 2, 99), (2, 2, 4, 3, 1, 2), (2, 1, 8, 2, 1, 1), (4, 2, 4, 3, 2, 2), (8, 1, 4, 2, 1, 5),
    (8, 2, 4, 1, 2, 99),
]  # fmt: skip


@gpu
@of_pipelines
@pytest.mark.parametrize("form", SKINNY_CONFIGURATIONS, ids=str)
def test_configurations_of_skinny(form, a, b, layout, monkeypatch):
    """Each configuration, with whole steps and ragged ends, also where `skinny_config` gives another one."""
    choices.configured(monkeypatch, "streaming", SkinnyConfig(*form))
    rows = form[0]
    shapes = [(rows, 256, 2048), ((rows + 1) // 2, 201, 1088), (rows, 17, 64), (rows, 96, 7616)]
    check_shapes(shapes, a, b, layout)


# Rows, warps, grid.
GEMV_CONFIGURATIONS = [(1, 4, 99), (2, 8, 1), (1, 8, 2), (2, 4, 2), (1, 16, 1), (2, 16, 99)]


@gpu
@of_pipelines
@pytest.mark.parametrize("form", GEMV_CONFIGURATIONS, ids=str)
def test_configurations_of_gemv(form, a, b, layout, monkeypatch):
    """Each configuration, with whole steps and ragged ends, and more tiles of a program than are added at once."""
    rows, warps, grid = form

    def config(problem):
        shared = problem.target.shared_memory // 4096 * 4096
        return GemvConfig(warps, ceil_div(problem.k, 256 * warps), rows, shared, grid)

    choices.configured(monkeypatch, "streaming", config)
    # Linear rows of MXFP4's scales begin at words, of 128 elements: see `gemv_config`.
    short, long = (128, 7552) if (b, layout) == ("mxfp4", "linear") else (64, 7616)
    check_shapes([(rows, 256, 8192), (rows, 17, short), (1, 1096, long)], a, b, layout)


@gpu
@operands
def test_wgmma(a, b, layout):
    """Nine to 64 rows: one part of K and several, the last of them short or empty, ragged stages and programs."""
    shapes = [(16, 512, 4096), (16, 1024, 16384), (9, 205, 1088), (17, 784, 2112), (32, 40, 64), (48, 200, 8768),
              (64, 256, 2048)]  # fmt: skip
    check_shapes(shapes, a, b, layout)
    check_shapes([(33, 33792, 64)], a, b, layout, torch.bfloat16)  # in one part


@gpu
@operands
def test_wgmma_with_many_rows(a, b, layout):
    """One tile of A and several, the last of them short; K in one part and in several; ragged columns and stages."""
    shapes = [(65, 512, 2048), (130, 1544, 1088), (300, 1024, 4096), (1100, 2056, 192)]
    check_shapes(shapes, a, b, layout)


# Every tile of a dense matmul. Those that share a multiprocessor, or have few rows, are chosen with parts of K.
WGMMA_CONFIGURATIONS = [
    WgmmaConfig(16, 4, 1, 2, 2, 4),
    *(replace(tile.config, split_k=1 + (tile.config.rows < 128)) for tile in (*SMALL_TILES, *LARGE_TILES)),
]


def of_config(config):
    """The name of a test of a configuration."""
    return config and "-".join(map(str, astuple(config)))


def configured(config, monkeypatch):
    """Let `wgmma_sm90` have this configuration for every problem."""
    choices.configured(monkeypatch, "wgmma_sm90", lambda problem: with_shared_memory(config, problem, needed_bytes))


@gpu
@pytest.mark.parametrize(("a", "b"), [(torch.bfloat16, "nvfp4"), ("nvfp4_rowwise", "nvfp4"), (torch.bfloat16, "mxfp4")],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("config", WGMMA_CONFIGURATIONS, ids=of_config)
def test_configurations_of_wgmma(config, a, b, monkeypatch):
    """Each configuration, with fewer stages of A than buffers, and with so many that every buffer is used again."""
    configured(config, monkeypatch)
    rows, width = config.rows, 128 * config.steps_per_stage
    shapes = [(rows, 512, 16384), (rows - 3, 1288, 8768), *((rows, 264, width * count) for count in range(1, 10))]
    check_shapes(shapes, a, b, "linear")


@gpu
@of_pipelines
@pytest.mark.parametrize("config", [None, *(tile for tile, *_ in GROUPED_TILES)], ids=of_config)
def test_groups_of_wgmma(config, a, b, layout, monkeypatch):
    """Groups of random sizes, some empty; NaN in rows of no group, and in one group that keeps it to itself."""
    if config is not None:
        configured(config, monkeypatch)
    fmt, generator = formats.get(b), torch.Generator().manual_seed(0)
    for groups, each, n, k in ((1, 40, 512, 1024), (5, 65, 200, 448), (40, 100, 256, 192), (8, 257, 1032, 2112)):
        sizes = (torch.rand(groups, generator=generator) * 2.4 * each - 0.2 * each).clamp(0).int()
        sizes[-1] = 10 * groups  # so many rows that no other kernel serves
        offs, rows = sizes.cumsum(0).to(torch.int32), int(sizes.sum()) + 9
        x, w = torch.randn(rows, k), torch.randn(groups, n, k)
        x[-9:] = x[int(offs[-1]) - 1] = torch.nan
        right = Operand(*reference_grouped.quantize_matrices(w, fmt, -1, None, layout, None, False), fmt)
        left = Operand(x.to(a)) if isinstance(a, torch.dtype) else Operand(*reference_grouped.quantize_rows(
            x, Groups.of(offs, rows), formats.get(a), None, "linear", None), formats.get(a))  # fmt: skip
        expected = reference_grouped.scaled_grouped_mm(left, right, offs, rows, torch.float32)
        got = scaled_grouped_mm(on_device(left), on_device(right), on_device(offs), rows, torch.float32).cpu()
        assert torch.equal(got.isnan(), expected.isnan()) and expected.isnan().any() and expected[-1].eq(0).all()
        got, expected = got.nan_to_num(0.0), expected.nan_to_num(0.0)
        assert ((got - expected).abs() <= 2.0**-18 * expected.abs().amax()).all()


@gpu
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs(hard):
    for m in (1, 7, 16, 50):
        for fmt in map(formats.get, ("nvfp4", "nvfp4_rowwise")):
            x = hard_input(hard, (64, 192), torch.float32, 16)
            w = hard_input(hard if hard != "huge" else "tiny", (64, 192), torch.float32, 16)
            check(quantized(x[:m], fmt), quantized(torch.randn(64, 192), fmt), 192)
            check(quantized(torch.randn(m, 192), torch.bfloat16), quantized(x, fmt), 192)
            check(quantized(x[:m], fmt), quantized(w, fmt), 192)
        check(quantized(torch.randn(m, 192), torch.bfloat16), quantized(x, formats.get("mxfp4")), 192)
