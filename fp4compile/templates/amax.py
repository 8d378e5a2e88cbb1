"""The amax of a tensor, as float32 bits: the first of the two reads of a dynamic two-level format."""

import triton
import triton.language as tl

from fp4compile.templates.codec import word_amax
from fp4compile.templates.quantize_rows import load_tile, tile_of


@triton.jit
def tensor_amax(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    FLAT: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32 at amax_ptr (0 before) to the bits of x's largest magnitude; a NaN lies above infinity."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_tiles = tl.cdiv(cols, BLOCKS * BLOCK).to(tl.int32)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, col_tiles, ROWS, FLAT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col0 = col_tile.to(tl.int64) * (BLOCKS * BLOCK)
    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + col0
    left = tl.minimum(cols - col0, BLOCKS * BLOCK).to(tl.int32)
    words = load_tile(ptr, left, row < rows, dtype, ROWS, BLOCKS, BLOCK, 1, ALIGN)
    bits = tl.max(tl.max(word_amax(words, 2, ISA, dtype), 1), 0)
    tl.atomic_max(amax_ptr, bits, sem="relaxed")
