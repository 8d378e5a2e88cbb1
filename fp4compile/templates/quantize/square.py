"""Quantise in square blocks: along rows, columns or both, whose codes are the same.

A tile of x is read as words (pairs of neighbours in a row), its even and its odd rows apart: [DEPTH, ROW_TILES, LANES,
words], where a strip is BLOCK rows, a lane DEPTH neighbouring pairs of rows. So a thread holds 2x2 neighbours: pairs
along the row are a word's two halves, pairs down the column the same half of two words. The maximum over a column's
block runs over a thread's registers and the lanes of its warp; only the finished codes are transposed.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import block_scale, outer_scales
from fp4compile.templates.device.elements import column_amax, encode_pair, unpack
from fp4compile.templates.device.memory import load_index, load_words, loaded, store_scales, store_units, tile_of


@triton.jit
def interleave_rows(even, odd):
    """Even and odd rows of a tile, [DEPTH, ROW_TILES, LANES, n] each -> [rows, n]."""
    both = tl.permute(tl.join(even, odd), (1, 2, 0, 4, 3))
    return tl.reshape(both, (both.shape[0] * both.shape[1] * both.shape[2] * 2, both.shape[4]))


@triton.jit
def interleave_columns(first, second):
    """Units of the even and the odd columns of a tile, [DEPTH, ROW_TILES, LANES, words] each -> [columns, units]."""
    both = tl.permute(tl.join(first, second), (3, 4, 1, 2, 0))
    return tl.reshape(both, (both.shape[0] * 2, both.shape[2] * both.shape[3] * both.shape[4]))


@triton.jit
def transpose_e2m1(even, odd):
    """Units of the even and of the odd rows -> units of the even and of the odd columns: the codes change places."""
    return (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)


@triton.jit
def repeat_rows(values, TIMES: tl.constexpr):
    """[a, b] -> [a * TIMES, b], every row TIMES times."""
    shape: tl.constexpr = (values.shape[0], TIMES, values.shape[1])
    return tl.reshape(tl.broadcast_to(values[:, None, :], shape), (values.shape[0] * TIMES, values.shape[1]))


@triton.jit
def repeat_last(values, TIMES: tl.constexpr):
    """[a, b, c, d] -> [a, b, c, d * TIMES], every value TIMES times."""
    a: tl.constexpr = values.shape[0]
    b: tl.constexpr = values.shape[1]
    c: tl.constexpr = values.shape[2]
    d: tl.constexpr = values.shape[3]
    return tl.reshape(tl.broadcast_to(values[:, :, :, :, None], (a, b, c, d, TIMES)), (a, b, c, d * TIMES))


@triton.jit
def store_square_scales(
    scales_ptr, byte, batch, row_block0, block0, rows, cols,
    BLOCK: tl.constexpr, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Store the scales of square blocks [n, m]: compact, or one for each row where the matrix units read them."""
    blocks = tl.cdiv(cols, BLOCK)
    if SWIZZLED:
        row = row_block0 * BLOCK + tl.arange(0, byte.shape[0] * BLOCK)
        store_scales(scales_ptr, repeat_rows(byte, BLOCK), batch, row, block0, rows, blocks, True, ALIGN)
    else:
        row = row_block0 + tl.arange(0, byte.shape[0])
        store_scales(scales_ptr, byte, batch, row, block0, tl.cdiv(rows, BLOCK), blocks, False, ALIGN)


@triton.jit
def quantize_squares(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, outer_ptr, amax_ptr,
    rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr,
    OUTER: tl.constexpr, MAXIMA: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROW_TILES * BLOCK rows by 2 * WORDS columns; x: [batch, rows, cols] with strides x_batch, x_row and 1.

    ALONG_ROWS: codes and scales of x at data_ptr, scales_ptr. ALONG_COLUMNS: those of x transposed, at columns_ptr,
    column_scales_ptr. OUTER: as in `outer_scales`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    half: tl.constexpr = BLOCK // 2
    depth: tl.constexpr = half // LANES
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS

    # Swizzled scales have padding below and beside those of the tensor; the tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False)
    row0 = row_tile * row_count
    col0 = col_tile * col_count

    strip = load_index(tl.arange(0, ROW_TILES), 1)
    lane = load_index(tl.arange(0, LANES), 2)
    even_row = row0 + strip * BLOCK + (lane * depth + load_index(tl.arange(0, depth), 0)) * 2
    odd_row = even_row + 1
    word = tl.arange(0, WORDS)[None, None, None, :]
    left = tl.minimum(cols - col0, col_count)
    x_tile_ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    even = loaded(load_words(x_tile_ptr + even_row.to(tl.int64) * x_row, word, left, even_row < rows, dtype, ALIGN))
    odd = loaded(load_words(x_tile_ptr + odd_row.to(tl.int64) * x_row, word, left, odd_row < rows, dtype, ALIGN))
    even_first, even_second = unpack(even, dtype)
    odd_first, odd_second = unpack(odd, dtype)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, MAXIMA, CONTRACT, ISA)

    first_amax, second_amax = column_amax(even, odd, ISA, dtype)
    amax = tl.max(tl.reshape(tl.maximum(first_amax, second_amax), (ROW_TILES, WORDS // half, half)), 2)
    byte, factor = block_scale(amax, encode, decode, OUTER != "none", ELEMENT, SCALE, CONTRACT, ISA)
    factor = tl.broadcast_to(repeat_last(factor[None, :, None, :], half), even.shape)
    even_units = encode_pair(even_first, even_second, factor, ELEMENT, ISA)
    odd_units = encode_pair(odd_first, odd_second, factor, ELEMENT, ISA)

    if ALONG_ROWS:
        row = row0 + tl.arange(0, row_count)
        store_units(data_ptr, interleave_rows(even_units, odd_units), batch.to(tl.int64) * rows + row,
                    col0 // 2, tl.cdiv(cols, BLOCK) * half, row < rows, UNIT_ALIGN)  # fmt: skip
        store_square_scales(scales_ptr, byte, batch, row_tile * ROW_TILES, col0 // BLOCK, rows, cols,
                            BLOCK, SWIZZLED, SCALE_ALIGN)  # fmt: skip
    if ALONG_COLUMNS:
        if ELEMENT == "e2m1":
            first_units, second_units = transpose_e2m1(even_units, odd_units)
        else:  # cheap to encode again (and ptxas 12.8 crashes on the bytes changing places)
            first_units = encode_pair(even_first, odd_first, factor, ELEMENT, ISA)
            second_units = encode_pair(even_second, odd_second, factor, ELEMENT, ISA)
        column = col0 + tl.arange(0, col_count)
        store_units(columns_ptr, interleave_columns(first_units, second_units), batch.to(tl.int64) * cols + column,
                    row_tile * (ROW_TILES * half), tl.cdiv(rows, BLOCK) * half, column < cols,
                    COLUMN_UNIT_ALIGN)  # fmt: skip
        store_square_scales(column_scales_ptr, tl.trans(byte), batch, col0 // BLOCK, row_tile * ROW_TILES, cols, rows,
                            BLOCK, SWIZZLED, COLUMN_SCALE_ALIGN)  # fmt: skip
