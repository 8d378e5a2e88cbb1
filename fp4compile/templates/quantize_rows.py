"""Quantise along the contiguous dimension: blocks of a row, and rows with their own outer scale.

A program writes codes and block scales, or at once what they stand for (`encode_and_store`).

A program's tile is ROWS x BLOCKS blocks. Its load has an axis of its own for `PIECES` runs of 16 bytes that touch, the
axis that Triton spreads over lanes last: so a thread owns whole blocks where that saves work (an E4M3 scale is dear)
and as many bytes of output as one wide store takes.
"""

import triton
import triton.language as tl

from fp4compile import _compat
from fp4compile.templates.block_scales import block_scale, encode_scale, float8_outer, outer_from_amax, outer_scales
from fp4compile.templates.codec import (
    encode_pair,
    encode_run,
    infinity_to_nan,
    round_pair,
    rounding_scale,
    unpack,
    word_amax,
)
from fp4compile.templates.dependent import arrived
from fp4compile.templates.stochastic import beside, philox

FIRST_AXIS_FASTEST = tl.constexpr(_compat.FIRST_AXIS_FASTEST)


@triton.jit
def load_index(index, AXIS: tl.constexpr):
    """An index vector along one of the three outer axes of a four-axis load: axis 2 goes to lanes first, 0 last."""
    axis: tl.constexpr = 2 - AXIS if FIRST_AXIS_FASTEST else AXIS
    if axis == 0:
        return index[:, None, None, None]
    elif axis == 1:
        return index[None, :, None, None]
    else:
        return index[None, None, :, None]


@triton.jit
def loaded(words):
    """What was loaded, its axes in the order of `load_index`."""
    return tl.permute(words, (2, 1, 0, 3)) if FIRST_AXIS_FASTEST else words


@triton.jit
def swizzle(row, col, tiles_per_row):
    """Offset of the scale byte (row, col) in the swizzled layout; see `layouts`."""
    tile = (row // 128) * tiles_per_row + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


@triton.jit
def load_words(ptr, word, cols, row_mask, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Words (pairs of `dtype` elements) at ptr + word, zero beyond `cols` elements and where row_mask is false.

    ALIGN: words that divide a row's length and its address, at most 16 bytes of them; 0 where a word itself may be
    cut (an odd length) or lie at an odd address.
    """
    bits: tl.constexpr = dtype.primitive_bitwidth
    word_type: tl.constexpr = tl.int32 if bits == 16 else tl.int64
    if ALIGN > 0:
        # Compared in whole vectors, so that the compiler sees one mask for each.
        mask = row_mask & (word // ALIGN < cols // 2 // ALIGN)
        return tl.load(ptr.to(tl.pointer_type(word_type), bitcast=True) + word, mask=mask, other=0)
    else:
        half: tl.constexpr = tl.int16 if bits == 16 else tl.int32
        ptr = ptr.to(tl.pointer_type(half), bitcast=True)
        first = tl.load(ptr + 2 * word, mask=row_mask & (2 * word < cols), other=0).to(word_type)
        second = tl.load(ptr + (2 * word + 1), mask=row_mask & (2 * word + 1 < cols), other=0).to(word_type)
        return (first & ((1 << bits) - 1)) | (second << bits)


@triton.jit
def load_tile(
    ptr, cols, row_mask, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The words of a tile, [ROWS, BLOCKS, BLOCK / 2], from the row addresses `ptr` [ROWS]."""
    vector: tl.constexpr = 128 // (2 * dtype.primitive_bitwidth)  # words in 16 bytes
    groups: tl.constexpr = BLOCKS * BLOCK // (2 * PIECES * vector)
    piece = load_index(tl.arange(0, PIECES), 0)
    group = load_index(tl.arange(0, groups), 2)
    word = (group * PIECES + piece) * vector + tl.arange(0, vector)[None, None, None, :]
    words = loaded(load_words(load_index(ptr, 1), word, cols, load_index(row_mask, 1), dtype, ALIGN))
    return tl.reshape(tl.permute(words, (1, 2, 0, 3)), (ROWS, BLOCKS, BLOCK // 2))


@triton.jit
def store_units(data_ptr, units, row, unit0, per_row, row_mask, ALIGN: tl.constexpr):
    """Store units [ROWS, n] at the rows `row` [ROWS], from unit0 on, of a matrix with `per_row` units a row.

    ALIGN: units that divide a row, at most 16.
    """
    unit = tl.arange(0, units.shape[1])[None, :]
    per_row = per_row // ALIGN * ALIGN  # the same; the compiler sees how wide it may store
    left = tl.minimum(per_row - unit0, units.shape[1]).to(tl.int32)
    mask = row_mask[:, None] & (unit // ALIGN < left // ALIGN)
    ptr = data_ptr.to(tl.pointer_type(units.dtype), bitcast=True) + unit0
    tl.store(ptr + row.to(tl.int64)[:, None] * per_row + unit, units, mask=mask)


@triton.jit
def store_scales(scales_ptr, byte, batch, row, block0, rows, blocks, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr):
    """Store scale bytes [ROWS, n] of the rows `row` [ROWS], from block0 on, of one matrix of a batch.

    ALIGN: blocks that divide a row of scales, at most 16.
    """
    count: tl.constexpr = byte.shape[1]
    align: tl.constexpr = ALIGN if ALIGN < count else count
    block = tl.arange(0, count)[None, :]
    row = row.to(tl.int64)[:, None]
    blocks = blocks // align * align  # the same; the compiler sees how wide it may store
    inside = (row < rows) & (block // align < tl.minimum(blocks - block0, count).to(tl.int32) // align)
    if SWIZZLED:
        tiles = tl.cdiv(blocks, 4)
        block = block0 + block
        matrix = scales_ptr + batch.to(tl.int64) * tl.cdiv(rows, 128) * tiles * 512
        padded = (row < tl.cdiv(rows, 128) * 128) & (block // 4 < tiles)
        tl.store(matrix + swizzle(row, block, tiles), tl.where(inside, byte, 0).to(tl.uint8), mask=padded)
    else:
        at = (batch.to(tl.int64) * rows + row) * blocks + block0 + block
        tl.store(scales_ptr + at, byte.to(tl.uint8), mask=inside)


@triton.jit
def tile_of(program, rows, col_tiles, ROWS: tl.constexpr, FLAT: tl.constexpr):
    """Program number -> (matrix of the batch, row tile, column tile), the column tile fastest. FLAT: one row."""
    if FLAT:
        return program * 0, program * 0, program
    else:
        row_tiles = tl.maximum(tl.cdiv(rows, ROWS), 1)  # the one program of an empty tensor divides by them
        col_tiles = tl.maximum(col_tiles, 1)
        return program // (row_tiles * col_tiles), program // col_tiles % row_tiles, program % col_tiles


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
    noise = philox(beside(run, word0), tl.load(seed_ptr), STREAM)
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
    FLAT: tl.constexpr, SWIZZLED: tl.constexpr, DEPENDENT: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of blocks along the row. x: [batch, rows, cols] with strides x_batch, x_row and 1, in elements.

    data_ptr: bytes for codes, or fp16, see `encode_and_store`. FLAT: x is one row, perhaps of more than 2^31 elements.
    OUTER: as in `outer_scales`; or "row": decode factors of the rows at outer_ptr. DEPENDENT: the kernel of the amax
    may not be done yet, see `dependent`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 4 * BLOCK) * 4 * BLOCK if SWIZZLED else cols
    program = tl.program_id(0)
    if OUTER == "amax":
        # The tail of the tensor is what the amax kernel has left in the cache.
        program = tl.num_programs(0) - 1 - program
    batch, row_tile, col_tile = tile_of(program, padded_rows, tl.cdiv(padded_cols, BLOCKS * BLOCK), ROWS, FLAT)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    block0 = (col_tile.to(tl.int64) if FLAT else col_tile) * BLOCKS
    x_row_ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + block0 * BLOCK
    left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)
    words = load_tile(x_row_ptr, left, row < rows, dtype, ROWS, BLOCKS, BLOCK, PIECES, ALIGN)

    if DEPENDENT:
        amax_ptr = arrived(amax_ptr)
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
