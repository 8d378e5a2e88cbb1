"""The amax of a tensor or of its columns, as float32 bits: the first of the two reads of a dynamic outer scale."""

import triton
import triton.language as tl

from fp4compile.templates.device.column_tile import (
    column_tile_amax,
    hadamard,
    load_column_tile,
    unpack_column_tile,
    values_amax,
)
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.elements import magnitude_bits, reduce_words, unpack, word_amax
from fp4compile.templates.device.memory import load_tile, tile_of
from fp4compile.templates.quantize.both import max_of_rows, stacked


@triton.jit
def tensor_amax(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    FLAT: tl.constexpr, PARTIAL: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32 at amax_ptr (0 before) to the bits of x's largest magnitude; a NaN lies above infinity.

    PARTIAL: store the largest of each program, [programs]. Programs beyond the tensor store 0. LAUNCH_DEPENDENTS: the next kernel
    may start early, see `device.dependent_launch`.
    """
    if LAUNCH_DEPENDENTS:
        x_ptr = launch_dependents(x_ptr)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_tiles = tl.cdiv(cols, BLOCKS * BLOCK).to(tl.int32)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, col_tiles, ROWS, FLAT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col0 = col_tile.to(tl.int64) * (BLOCKS * BLOCK)
    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + col0
    left = tl.minimum(cols - col0, BLOCKS * BLOCK).to(tl.int32)
    words = load_tile(ptr, left, row < rows, dtype, ROWS, BLOCKS, BLOCK, 1, ALIGN)
    bits = tl.max(tl.max(word_amax(words, 2, ISA, dtype), 1), 0)
    if PARTIAL:
        tl.store(amax_ptr + tl.program_id(0), bits)
    else:
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@triton.jit
def columns_amax(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    PLAIN: tl.constexpr, ROWS: tl.constexpr, TRANSFORM: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr as `tensor_amax` does, x being transformed down its columns (TRANSFORM).

    EACH: one for each column, [batch, cols], or (ROWS) for each row of x as it is and for each column, [batch, rows +
    cols]; otherwise one of all. PLAIN: before them, the amax of x as it is. (One pointer, because Inductor does not
    order two that a kernel writes in one tensor.)
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, tl.cdiv(cols, col_count), row_count, False)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    left = tl.minimum(cols - col0, col_count)
    tile = load_column_tile(ptr, row0, rows, left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN)
    if PLAIN or not TRANSFORM:
        plain_first, plain_second = column_tile_amax(tile, ISA, dtype)
    if PLAIN:
        tl.atomic_max(amax_ptr, tl.max(tl.max(tl.maximum(plain_first, plain_second), 1), 0), sem="relaxed")
    if TRANSFORM:
        first, second = unpack_column_tile(tile, dtype)
        first_amax = values_amax(hadamard(first))
        second_amax = values_amax(hadamard(second))
    else:
        first_amax = plain_first
        second_amax = plain_second
    column_amax_ptr = amax_ptr + 1 if PLAIN else amax_ptr
    if EACH:
        column = tl.arange(0, col_count)
        bits = tl.reshape(tl.join(tl.max(first_amax, 0), tl.max(second_amax, 0)), (col_count,))
        if ROWS:
            rows_amax_ptr = column_amax_ptr + batch.to(tl.int64) * (rows + cols)
            raise_rows(rows_amax_ptr, tile, row0, rows, dtype, ISA)
            column_amax_ptr = rows_amax_ptr + rows
        else:
            column_amax_ptr += batch.to(tl.int64) * cols
        at = column_amax_ptr + col0 + column
        tl.atomic_max(at, bits, mask=column < left, sem="relaxed")
    else:
        tl.atomic_max(column_amax_ptr, tl.max(tl.max(tl.maximum(first_amax, second_amax), 1), 0), sem="relaxed")


@triton.jit
def raise_rows(amax_ptr, tile, row0, rows, dtype: tl.constexpr, ISA: tl.constexpr):
    """Raise the int32s of the rows to the bits of their largest magnitudes in a tile of words."""
    bits = ()
    for i in tl.static_range(0, len(tile), 2):
        if ISA == 0 or dtype == tl.float32:
            bits = bits + (word_amax(tile[i], 1, ISA, dtype)[:, None],)
            bits = bits + (word_amax(tile[i + 1], 1, ISA, dtype)[:, None],)
        else:  # both rows in one word
            (words,) = max_of_rows((tile[i],), (tile[i + 1],), dtype)
            first, second = unpack(reduce_words(words, 1, dtype), dtype)
            bits = bits + (magnitude_bits(first)[:, None], magnitude_bits(second)[:, None])
    count: tl.constexpr = tile[0].shape[0] * len(tile)
    row = row0 + tl.arange(0, count)
    tl.atomic_max(amax_ptr + row, tl.reshape(stacked(bits), (count,)), mask=row < rows, sem="relaxed")
