"""Quantise in square blocks, along the rows, down the columns or both; and down the columns in long blocks.

In square blocks, both directions have equal codes, transposed. A long block has more rows than a thread of
`quantize_columns` has registers for.

A tile of x is read as words (two neighbours of a row), even rows and odd rows by separate loads. Each load has the axes
[DEPTH, ROW_TILES, LANES, WORDS]: a row tile is one block high, and each of the LANES threads that share its rows holds
DEPTH pairs of neighbouring rows. So a thread holds squares of 2x2 neighbours. A pair along the row is the two halves of
a word; a pair down the column is the same half of two words. The amax of a block is reduced over registers, lanes and
warps; only finished codes are transposed.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fp4compile.formats.formats import BlockFormat
from fp4compile.templates.device.block_scales import block_scale, make_outer_scales, outer_scales
from fp4compile.templates.device.elements import column_amax, encode_pair, unpack
from fp4compile.templates.device.memory import load_index, load_words, restore_axes, store_scales, store_units, tile_of
from fp4compile.templates.device.values import takes_values, values_of_units
from fp4compile.templates.launch import Launch, LaunchConfig
from fp4compile.templates.quantize.outputs import Outer, Output, format_constants, store_aligns, tile_grid
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.writes import of, of_outer, of_scales, writes

LONG = 64


def serves(source: Source, fmt: BlockFormat) -> bool:
    """Whether the kernel quantises this source down its columns."""
    return fmt.square or (fmt.block_cols >= LONG and not source.groups)


@dataclass(frozen=True)
class SquareConfig(LaunchConfig):
    """`quantize_squares`: tiles of row_tiles blocks by 2 * words columns. lanes: threads that share a block's rows."""

    num_warps: int
    row_tiles: int
    lanes: int
    words: int


def square_config(element: str, block: int) -> SquareConfig:
    """The configuration for an element and a block. Lanes that share a block repeat the arithmetic of its scale."""
    if block >= LONG:
        return SquareConfig(num_warps=4, row_tiles=128 // block, lanes=4, words=64)
    if element == "e2m1":
        return SquareConfig(num_warps=4, row_tiles=4, lanes=2, words=64)
    return SquareConfig(num_warps=4, row_tiles=4, lanes=4, words=32)


def squares_launch(
    source: Source, fmt: BlockFormat, outer: Outer, layout: str, rows: Output | None, columns: Output | None
) -> Launch:
    """The launch of `quantize_squares`. rows, columns: the outputs to fill for x and x transposed, one or both."""
    constants = format_constants(fmt)
    config = square_config(fmt.element, constants["BLOCK"])
    height, width = config.row_tiles * constants["BLOCK"], 2 * config.words
    wanted = rows or columns
    constants |= {
        "SQUARE": fmt.square, "ALONG_ROWS": rows is not None, "ALONG_COLUMNS": columns is not None, **outer.constants,
        "SWIZZLED": layout == "swizzled", "ALIGN": source.align, **store_aligns(source.cols, fmt),
        **store_aligns(source.rows, fmt, "COLUMN_"), "ISA": source.target.isa, **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, *(rows or wanted).pointers, *(columns or wanted).pointers, *outer.pointers(wanted.data),
        *source.args,
    )  # fmt: skip
    return Launch(quantize_squares, tile_grid(source, height, width, layout), arguments, constants, config.num_warps)


@triton.jit
def interleave_rows(even, odd):
    """Units of the even and the odd rows of a tile, [DEPTH, ROW_TILES, LANES, n] each -> [rows, n]."""
    both = tl.permute(tl.join(even, odd), (1, 2, 0, 4, 3))
    return tl.reshape(both, (both.shape[0] * both.shape[1] * both.shape[2] * 2, both.shape[4]))


@triton.jit
def interleave_columns(first, second):
    """Units of the even and the odd columns of a tile, [DEPTH, ROW_TILES, LANES, words] each -> [columns, units]."""
    both = tl.permute(tl.join(first, second), (3, 4, 1, 2, 0))
    return tl.reshape(both, (both.shape[0] * 2, both.shape[2] * both.shape[3] * both.shape[4]))


@triton.jit
def transpose_e2m1(even, odd):
    """Code pairs (uint8) of the even and the odd rows -> code pairs of the even and the odd columns.

    The second code of the even row and the first code of the odd row are exchanged.
    """
    return (even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)


@triton.jit
def repeat_rows(values, TIMES: tl.constexpr):
    """[a, b] -> [a * TIMES, b]: each row repeated TIMES times."""
    shape: tl.constexpr = (values.shape[0], TIMES, values.shape[1])
    return tl.reshape(tl.broadcast_to(values[:, None, :], shape), (values.shape[0] * TIMES, values.shape[1]))


@triton.jit
def repeat_last(values, TIMES: tl.constexpr):
    """[a, b, c, d] -> [a, b, c, d * TIMES]: each value repeated TIMES times."""
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
    """Store the scales of n x m square blocks: one per block in the linear layout, one per row in the swizzled layout.

    The matrix units read the swizzled layout, and need a scale for every row.
    """
    blocks = tl.cdiv(cols, BLOCK)
    if SWIZZLED:
        row = row_block0 * BLOCK + tl.arange(0, byte.shape[0] * BLOCK)
        store_scales(scales_ptr, repeat_rows(byte, BLOCK), batch, row, block0, rows, blocks, True, ALIGN)
    else:
        row = row_block0 + tl.arange(0, byte.shape[0])
        store_scales(scales_ptr, byte, batch, row, block0, tl.cdiv(rows, BLOCK), blocks, False, ALIGN)


@triton.jit
def store_long_columns(
    columns_ptr, scales_ptr, even, odd, batch, row0, col0, rows, cols, dtype: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Encode and store the columns of a tile in blocks of BLOCK rows. even, odd: the words of even and of odd rows."""
    even_first, even_second = unpack(even, dtype)
    odd_first, odd_second = unpack(odd, dtype)
    first_amax, second_amax = column_amax(even, odd, ISA, dtype)
    first_bits, first_factor = block_scale(first_amax, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
    second_bits, second_factor = block_scale(second_amax, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
    first_factor = tl.broadcast_to(first_factor[None, :, None, :], even.shape)
    second_factor = tl.broadcast_to(second_factor[None, :, None, :], even.shape)
    first_units = encode_pair(even_first, odd_first, first_factor, ELEMENT, ISA)
    second_units = encode_pair(even_second, odd_second, second_factor, ELEMENT, ISA)
    units = interleave_columns(first_units, second_units)
    bits = tl.trans(tl.reshape(tl.join(first_bits, second_bits), (first_bits.shape[0], units.shape[0])))
    column = col0 + tl.arange(0, units.shape[0])
    blocks = tl.cdiv(rows, BLOCK)
    store_units(columns_ptr, units, batch.to(tl.int64) * cols + column, row0 // 2, blocks * (BLOCK // 2),
                column < cols, UNIT_ALIGN)  # fmt: skip
    store_scales(scales_ptr, bits, batch, column, row0 // BLOCK, cols, blocks, False, SCALE_ALIGN)


@writes(
    data_ptr=of("ALONG_ROWS"), scales_ptr=of_scales(where=of("ALONG_ROWS")), columns_ptr=of("ALONG_COLUMNS"),
    column_scales_ptr=of_scales("columns_ptr", of("ALONG_COLUMNS")), outer_ptr=of_outer,
)  # fmt: skip
@triton.jit
def quantize_squares(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, outer_ptr, amax_ptr,
    rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SQUARE: tl.constexpr, ALONG_ROWS: tl.constexpr, ALONG_COLUMNS: tl.constexpr,
    OUTER: tl.constexpr, PARTIAL_MAXIMA: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, LANES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROW_TILES * BLOCK rows by 2 * WORDS columns. x: [batch, rows, cols], strides x_batch, x_row, 1.

    SQUARE: blocks are BLOCK x BLOCK; else they are BLOCK x 1, with linear scales and no global or row scale, only in
    the direction ALONG_COLUMNS.
    ALONG_ROWS: write codes and scales of x to data_ptr and scales_ptr. ALONG_COLUMNS: write codes and scales of x
    transposed to columns_ptr and column_scales_ptr. OUTER, PARTIAL_MAXIMA: as in `outer_scales`; or OUTER "matrix
    amax", as in `quantize_rows`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    half: tl.constexpr = BLOCK // 2
    depth: tl.constexpr = half // LANES
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS

    # Swizzled scales have padding below and beside the scales of the tensor. The tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False, ISA >= 100)
    row0 = row_tile * row_count
    col0 = col_tile * col_count

    row_tile_index = load_index(tl.arange(0, ROW_TILES), 1)
    lane = load_index(tl.arange(0, LANES), 2)
    even_row = row0 + row_tile_index * BLOCK + (lane * depth + load_index(tl.arange(0, depth), 0)) * 2
    odd_row = even_row + 1
    word = tl.arange(0, WORDS)[None, None, None, :]
    cols_left = tl.minimum(cols - col0, col_count)
    x_tile_ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    even = load_words(x_tile_ptr + even_row.to(tl.int64) * x_row, word, cols_left, even_row < rows, dtype, ALIGN)
    odd = load_words(x_tile_ptr + odd_row.to(tl.int64) * x_row, word, cols_left, odd_row < rows, dtype, ALIGN)
    even = restore_axes(even)
    odd = restore_axes(odd)
    even_first, even_second = unpack(even, dtype)
    odd_first, odd_second = unpack(odd, dtype)
    if not SQUARE:
        store_long_columns(columns_ptr, column_scales_ptr, even, odd, batch, row0, col0, rows, cols, dtype,
                           ELEMENT, SCALE, CONTRACT, BLOCK, COLUMN_UNIT_ALIGN, COLUMN_SCALE_ALIGN, ISA)  # fmt: skip
        return
    if OUTER == "matrix amax":
        encode, decode = make_outer_scales(amax_ptr + batch, outer_ptr, batch, True, (row_tile == 0) & (col_tile == 0),
                                           ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
    else:
        encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, ELEMENT, SCALE, CONTRACT, ISA)

    first_amax, second_amax = column_amax(even, odd, ISA, dtype)
    amax = tl.max(tl.reshape(tl.maximum(first_amax, second_amax), (ROW_TILES, WORDS // half, half)), 2)
    byte, factor = block_scale(amax, encode, decode, OUTER != "none", ELEMENT, SCALE, CONTRACT, ISA)
    factor = tl.broadcast_to(repeat_last(factor[None, :, None, :], half), even.shape)
    even_units = encode_pair(even_first, even_second, factor, ELEMENT, ISA)
    odd_units = encode_pair(odd_first, odd_second, factor, ELEMENT, ISA)

    if ALONG_ROWS:
        row = row0 + tl.arange(0, row_count)
        units = interleave_rows(even_units, odd_units)
        if takes_values(data_ptr.dtype):
            units = values_of_units(units, repeat_rows(byte, BLOCK), ELEMENT, SCALE, data_ptr.dtype.element_ty, ISA)
        store_units(data_ptr, units, batch.to(tl.int64) * rows + row, col0 // 2, tl.cdiv(cols, BLOCK) * half,
                    row < rows, UNIT_ALIGN)  # fmt: skip
    if ALONG_ROWS and not takes_values(data_ptr.dtype):
        store_square_scales(scales_ptr, byte, batch, row_tile * ROW_TILES, col0 // BLOCK, rows, cols,
                            BLOCK, SWIZZLED, SCALE_ALIGN)  # fmt: skip
    if ALONG_COLUMNS:
        if ELEMENT == "e2m1":
            first_units, second_units = transpose_e2m1(even_units, odd_units)
        else:  # encoding again is cheap, and ptxas 12.8 crashes on exchanged bytes
            first_units = encode_pair(even_first, odd_first, factor, ELEMENT, ISA)
            second_units = encode_pair(even_second, odd_second, factor, ELEMENT, ISA)
        column = col0 + tl.arange(0, col_count)
        units = interleave_columns(first_units, second_units)
        if takes_values(columns_ptr.dtype):
            scales = repeat_rows(tl.trans(byte), BLOCK)
            units = values_of_units(units, scales, ELEMENT, SCALE, columns_ptr.dtype.element_ty, ISA)
        store_units(columns_ptr, units, batch.to(tl.int64) * cols + column, row_tile * (ROW_TILES * half),
                    tl.cdiv(rows, BLOCK) * half, column < cols, COLUMN_UNIT_ALIGN)  # fmt: skip
    if ALONG_COLUMNS and not takes_values(columns_ptr.dtype):
        store_square_scales(column_scales_ptr, tl.trans(byte), batch, col0 // BLOCK, row_tile * ROW_TILES, cols, rows,
                            BLOCK, SWIZZLED, COLUMN_SCALE_ALIGN)  # fmt: skip
