"""Quantise along the contiguous dimension: blocks of a row, and rows with their own outer scale.

A program writes codes and block scales, or at once what they stand for (`encode_and_store`).

A program's tile is ROWS x BLOCKS blocks. Its load has an axis of its own for `PIECES` runs of 16 bytes that touch, the
axis that Triton spreads over lanes last: so a thread owns whole blocks where that saves work (an E4M3 scale is dear)
and as many bytes of output as one wide store takes.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import (
    block_scale,
    encode_scale,
    float8_outer,
    outer_from_amax,
    outer_scales,
)
from fp4compile.templates.device.dependent_launch import wait
from fp4compile.templates.device.elements import (
    encode_pair,
    encode_run,
    infinity_to_nan,
    round_pair,
    rounding_scale,
    unpack,
    word_amax,
)
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tile_of
from fp4compile.templates.device.philox import in_layout_of, philox


@triton.jit
def encode_seeded(
    words, factor, block, seed_ptr, dtype: tl.constexpr, ELEMENT: tl.constexpr, STREAM: tl.constexpr, ISA: tl.constexpr
):
    """Codes of words [ROWS, BLOCKS, BLOCK / 2], stochastically rounded, 8 an int32: [ROWS, BLOCKS * BLOCK / 8].

    factor, block (number of the block, int64): [ROWS, BLOCKS].
    """
    runs: tl.constexpr = words.shape[2] // 4
    shape: tl.constexpr = (words.shape[0], words.shape[1], runs)
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], runs, 2, 2)))
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    values = unpack(word0, dtype) + unpack(word1, dtype) + unpack(word2, dtype) + unpack(word3, dtype)
    run = block[:, :, None] * runs + tl.arange(0, runs)[None, None, :]
    noise = philox(in_layout_of(run, word0), tl.load(seed_ptr), STREAM)
    codes = encode_run(values, tl.broadcast_to(factor[:, :, None], shape), noise, ELEMENT, ISA)
    return tl.reshape(codes, (words.shape[0], words.shape[1] * runs))


@triton.jit
def encode_and_store(
    words, amax, encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, block0, rows, cols,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    HAS_OUTER: tl.constexpr, STATIC: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, SWIZZLED: tl.constexpr,
    UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Write the codes and the scales of a tile's words [ROWS, BLOCKS, BLOCK / 2], whose block amaxes are known.

    Where data_ptr points to fp16, write the codes' values times the block scales (E4M3) there, and nothing else.
    STATIC: the outer scale was given, so that an infinity is not in it.
    """
    half: tl.constexpr = BLOCK // 2
    expanded: tl.constexpr = data_ptr.dtype.element_ty == tl.float16
    byte, factor = block_scale(amax, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    per_row = tl.cdiv(cols, 2) if SCALE == "none" else tl.cdiv(cols, BLOCK) * half
    matrix_row = batch.to(tl.int64) * rows + row
    if SEEDED:
        block = matrix_row[:, None] * tl.cdiv(cols, BLOCK) + (block0 + tl.arange(0, words.shape[1]))[None, :]
        units = encode_seeded(words, factor, block, seed_ptr, dtype, ELEMENT, STREAM, ISA)
        store_units(data_ptr, units, matrix_row, block0 * (half // 4), per_row // 4, row < rows, UNIT_ALIGN // 4)
    else:
        first, second = unpack(words, dtype)
        if SCALE == "none" and STATIC:  # no scale shows an infinity, and saturation would hide it
            first = infinity_to_nan(first)
            second = infinity_to_nan(second)
        factor = tl.broadcast_to(factor[:, :, None], words.shape)
        if expanded:
            scale = rounding_scale(byte, ISA)
            units = round_pair(first, second, factor, tl.broadcast_to(scale[:, :, None], words.shape), ISA)
        else:
            units = encode_pair(first, second, factor, ELEMENT, ISA)
        units = tl.reshape(units, (words.shape[0], words.shape[1] * half))
        store_units(data_ptr, units, matrix_row, block0 * half, per_row, row < rows, UNIT_ALIGN)
    if SCALE != "none" and not expanded:
        store_scales(scales_ptr, byte, batch, row, block0, rows, tl.cdiv(cols, BLOCK), SWIZZLED, SCALE_ALIGN)


@triton.jit
def quantize_rows(
    x_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SEEDED: tl.constexpr, STREAM: tl.constexpr, OUTER: tl.constexpr, MAXIMA: tl.constexpr,
    FLAT: tl.constexpr, SWIZZLED: tl.constexpr, PDL: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of blocks along the row. x: [batch, rows, cols] with strides x_batch, x_row and 1, in elements.

    data_ptr: bytes for codes, or fp16, see `encode_and_store`. FLAT: x is one row, perhaps of more than 2^31 elements.
    OUTER: as in `outer_scales`; or "row": decode factors of the rows at outer_ptr. PDL: the kernel of the amax
    may not be done yet, see `device.dependent_launch`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 4 * BLOCK) * 4 * BLOCK if SWIZZLED else cols
    program = tl.program_id(0)
    if OUTER == "amax":
        # The epilogue of the tensor is what the amax kernel has left in the cache.
        program = tl.num_programs(0) - 1 - program
    batch, row_tile, col_tile = tile_of(program, padded_rows, tl.cdiv(padded_cols, BLOCKS * BLOCK), ROWS, FLAT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    block0 = (col_tile.to(tl.int64) if FLAT else col_tile) * BLOCKS
    x_row_ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + block0 * BLOCK
    left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)
    words = load_tile(x_row_ptr, left, row < rows, dtype, ROWS, BLOCKS, BLOCK, PIECES, ALIGN)

    if PDL:
        amax_ptr = wait(amax_ptr)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, MAXIMA, CONTRACT, ISA)
    if OUTER == "row":
        decode = tl.load(outer_ptr + batch * rows + row, mask=row < rows, other=1.0)[:, None]
        encode = encode_scale(decode, ISA)
    encode_and_store(words, word_amax(words, 2, ISA, dtype), encode, decode, data_ptr, scales_ptr,
                     seed_ptr, batch, row, block0, rows, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK,
                     OUTER != "none", True, SEEDED, STREAM, SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA)  # fmt: skip


@triton.jit
def quantize_scaled_rows(
    x_ptr, data_ptr, scales_ptr, outer_ptr, seed_ptr, rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SEEDED: tl.constexpr, STREAM: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, ON_CHIP: tl.constexpr, PARTS: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Whole rows, each with its own outer scale, stored at outer_ptr.

    data_ptr: bytes for codes, or fp16, see `encode_and_store`.
    ON_CHIP: the tile holds whole rows, which are read once. Otherwise the program walks its rows twice. PARTS > 1, on
    chip: so many programs share a row; each finds its amax and writes one part.
    SCALE "none": float8_rowwise, which has no block scales; BLOCK is then only a unit of work.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    batch, row_tile, part = tile_of(tl.program_id(0), padded_rows, PARTS, ROWS, False)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    x_row_ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row

    if ON_CHIP:
        words = load_tile(x_row_ptr, cols, row < rows, dtype, ROWS, BLOCKS, BLOCK, PIECES, ALIGN)
        amax = word_amax(words, 2, ISA, dtype)
        rows_amax = tl.max(amax, 1)
        part_blocks: tl.constexpr = BLOCKS // PARTS
        block0 = part * part_blocks
        if PARTS > 1:
            left = tl.minimum(cols - block0 * BLOCK, part_blocks * BLOCK)
            words = load_tile(x_row_ptr + block0 * BLOCK, left, row < rows, dtype, ROWS, part_blocks, BLOCK, PIECES,
                              ALIGN)  # fmt: skip
            amax = word_amax(words, 2, ISA, dtype)
    else:
        # Tiles up to the end of the padding of swizzled scales.
        width: tl.constexpr = BLOCKS * BLOCK
        tiles = tl.cdiv(tl.cdiv(cols, 4 * BLOCK) * 4 * BLOCK, width)
        rows_amax = tl.zeros((ROWS,), tl.int32)
        for tile in range(tiles):
            words = load_tile(x_row_ptr + tile * width, tl.minimum(cols - tile * width, width), row < rows, dtype,
                              ROWS, BLOCKS, BLOCK, PIECES, ALIGN)  # fmt: skip
            rows_amax = tl.maximum(rows_amax, tl.max(word_amax(words, 2, ISA, dtype), 1))

    if SCALE == "none":
        encode, decode = float8_outer(rows_amax, ISA)
    else:
        encode, decode = outer_from_amax(rows_amax, CONTRACT, ISA)
    tl.store(outer_ptr + batch.to(tl.int64) * rows + row, decode, mask=row < rows)

    encode = encode[:, None]
    decode = decode[:, None]
    if ON_CHIP:
        encode_and_store(words, amax, encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, block0, rows, cols,
                         dtype, ELEMENT, SCALE, CONTRACT, BLOCK, True, False, SEEDED, STREAM,
                         SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA)  # fmt: skip
    else:
        for tile in range(tiles):
            words = load_tile(x_row_ptr + tile * width, tl.minimum(cols - tile * width, width), row < rows, dtype,
                              ROWS, BLOCKS, BLOCK, PIECES, ALIGN)  # fmt: skip
            encode_and_store(words, word_amax(words, 2, ISA, dtype), encode, decode,
                             data_ptr, scales_ptr, seed_ptr, batch, row, tile * BLOCKS, rows, cols,
                             dtype, ELEMENT, SCALE, CONTRACT, BLOCK, True, False, SEEDED, STREAM,
                             SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA)  # fmt: skip
