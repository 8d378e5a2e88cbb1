"""Scale layouts: the places of block scales in memory.

`linear`: [..., rows, blocks], in the order of the blocks in the matrix.
`swizzled`: the order in which the block-scaled matrix instructions read (cuBLAS calls it "1D block scaling factors
layout"). Rows are padded to 128 and block columns to 4, with zero bytes. This matrix is cut into tiles of 128 x 4, 512
bytes each, row-major over the tiles. Inside a tile the byte of (r, c) is at (r % 32) * 16 + (r // 32) * 4 + c. Each
matrix of a batch is one flat run of bytes.
"""

from typing import Any

import torch
import torch.nn.functional as F

from fp4compile.formats.formats import BlockFormat, as_integers

LAYOUTS = ("linear", "swizzled")
TILE_ROWS, TILE_COLS = 128, 4


def scale_layout(format: BlockFormat, *, native: bool) -> str:
    """The layout of an operand's block scales: "swizzled" for a native matmul, otherwise "linear".

    native: whether block-scaled matrix units compute the matmul; they read the scales themselves. A format without
    block scales of one byte is "linear".

    All code that stores scales follows this rule. An operand in a graph is native if its matmul is native
    (`analysis.plan`). A weight in `weights.cache` has the layout that its graph requests. The weight of a packed layer
    is native if the layer's matmuls are native on the weight's device (`weights.scale_layout`). In files its scales are
    linear, because files are for every device.
    """
    return "swizzled" if native and format.swizzles else "linear"


def ceil_div(n: Any, d: int) -> Any:
    """n / d rounded up; n may be symbolic."""
    return (n + d - 1) // d


def swizzled_numel(rows: Any, cols: Any) -> Any:
    """Bytes of the swizzled scales of a [rows, cols] scale matrix, padding included; rows and cols may be symbolic."""
    return ceil_div(rows, TILE_ROWS) * TILE_ROWS * ceil_div(cols, TILE_COLS) * TILE_COLS


def to_swizzled(scales: torch.Tensor) -> torch.Tensor:
    """[..., rows, cols] one-byte scales -> [..., swizzled_numel(rows, cols)], padding bytes zero."""
    *batch, rows, cols = scales.shape
    tiles_r, tiles_c = ceil_div(rows, TILE_ROWS), ceil_div(cols, TILE_COLS)
    pad = (0, tiles_c * TILE_COLS - cols, 0, tiles_r * TILE_ROWS - rows)
    padded = F.pad(as_integers(scales), pad)
    tiles = padded.reshape(*batch, tiles_r, TILE_ROWS // 32, 32, tiles_c, TILE_COLS)
    n = len(batch)
    tiles = tiles.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4)  # tile row, tile column, r % 32, r // 32, c
    return tiles.reshape(*batch, swizzled_numel(rows, cols)).view(scales.dtype)


def from_swizzled(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[..., swizzled_numel(rows, cols)] -> [..., rows, cols], the inverse of `to_swizzled`.

    Raises ValueError if the length does not fit rows and cols.
    """
    *batch, numel = swizzled.shape
    if numel != swizzled_numel(rows, cols):
        raise ValueError(
            f"swizzled scales of a {rows}x{cols} scale matrix take {swizzled_numel(rows, cols)} bytes, got {numel}"
        )
    tiles_r, tiles_c = ceil_div(rows, TILE_ROWS), ceil_div(cols, TILE_COLS)
    tiles = as_integers(swizzled).reshape(*batch, tiles_r, tiles_c, 32, TILE_ROWS // 32, TILE_COLS)
    n = len(batch)
    padded = tiles.permute(*range(n), n, n + 3, n + 2, n + 1, n + 4)
    padded = padded.reshape(*batch, tiles_r * TILE_ROWS, tiles_c * TILE_COLS)
    return padded[..., :rows, :cols].contiguous().view(swizzled.dtype)
