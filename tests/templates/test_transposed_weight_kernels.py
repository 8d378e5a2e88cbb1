"""Gradients times packed NVFP4 weights, whose rows are contracted: the kernel for Hopper, and the pass over memory."""

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.templates.gemm.heuristics import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from tests.helpers import choices
from tests.helpers.check_products import check
from tests.helpers.hard_inputs import FINITE, NON_FINITE, hard_input
from tests.helpers.kernels import INTERPRETING, gpu, quantized

pytestmark = pytest.mark.skipif(INTERPRETING, reason="inline PTX")


def check_shapes(shapes, dtype, b, layout, *out_dtype):
    """Products of m x n x k."""
    for m, n, k in shapes:
        x, w = torch.randn(m, k), torch.randn(k, n)
        check(quantized(x, dtype), quantized(w, formats.get(b), layout), k, None, *out_dtype, b_transposed=True)


@gpu
@pytest.mark.parametrize(("dtype", "b", "layout"), [
    (torch.bfloat16, "nvfp4", "linear"), (torch.float16, "nvfp4_16x16", "linear"),
    (torch.bfloat16, "nvfp4_one_level", "swizzled"), (torch.float16, "nvfp4", "swizzled"),
], ids=str)  # fmt: skip
def test_transposed(dtype, b, layout):
    """Sizes that only the fallback takes; one tile of A and several; K in parts; ragged tiles and steps."""
    check_shapes([(1, 64, 64), (64, 256, 512), (130, 80, 208)], dtype, b, layout)
    check_shapes([(65, 512, 2048), (130, 1600, 1088), (300, 1024, 4096), (1100, 2112, 192)], dtype, b, layout)
    check_shapes([(257, 4096, 1024), (257, 320, 1024)], dtype, b, layout, dtype)


# Rows of a tile, warps, parts of a warp, buffers of B, steps per stage, parts of K; tiles walked together, and buffers
# of A.
CONFIGURATIONS = [
    (72, 8, 1, 3, 1, 1), (80, 8, 1, 4, 1, 2), (96, 8, 2, 3, 1, 2), (128, 8, 1, 3, 1, 8), (160, 8, 1, 3, 1, 1),
    (192, 8, 1, 3, 1, 1), (224, 8, 1, 3, 1, 1, 8, 3), (256, 8, 1, 3, 1, 1, 8, 3), (96, 8, 2, 4, 1, 1, 8, 3),
]  # fmt: skip


@gpu
@pytest.mark.parametrize("form", CONFIGURATIONS, ids=str)
def test_configurations(form, monkeypatch):
    """Each configuration, with fewer steps than buffers, and with so many that every buffer is used again."""

    def config(problem):
        return with_shared_memory(WgmmaConfig(*form), problem, needed_bytes)

    choices.configured(monkeypatch, "wgmma_transposed_sm90", config)
    shapes = [
        (form[0], 512, 16384),
        (form[0] - 3, 1344, 8768),
        *((form[0], 320, 128 * count) for count in range(1, 10)),
    ]
    check_shapes(shapes, torch.bfloat16, "nvfp4", "linear")


@gpu
@pytest.mark.parametrize("hard", [*FINITE, *NON_FINITE])
def test_hard_inputs(hard):
    """The outer scale may underflow, and so may sums; NaN and infinity reach their own rows and columns."""
    fmt = formats.get("nvfp4")
    x = hard_input(hard, (70, 192), torch.float32, 16)
    w = hard_input(hard if hard != "huge" else "tiny", (192, 64), torch.float32, 16)
    for a, b in ((x, torch.randn(192, 64)), (torch.randn(70, 192), w), (x, w)):
        check(quantized(a, torch.bfloat16), quantized(b, fmt), 192, b_transposed=True)
