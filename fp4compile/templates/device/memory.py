"""Loads and stores of tiles: words (pairs of floats), units (several codes in one integer), block scales.

The order in which Triton spreads the axes of a load over the lanes of a warp depends on its version (see
`_compat.first_axis_fastest`). `load_index` and `restore_axes` hide that.
"""

import triton
import triton.language as tl

from fp4compile import _compat

FIRST_AXIS_FASTEST = tl.constexpr(_compat.first_axis_fastest())


@triton.jit
def load_index(index, AXIS: tl.constexpr):
    """An index vector as an axis of a load of four axes. Lanes go to AXIS 2 first and to AXIS 0 last.

    The fourth axis is the vector that one lane loads.
    """
    axis: tl.constexpr = 2 - AXIS if FIRST_AXIS_FASTEST else AXIS
    if axis == 0:
        return index[:, None, None, None]
    elif axis == 1:
        return index[None, :, None, None]
    else:
        return index[None, None, :, None]


@triton.jit
def restore_axes(words):
    """A tensor loaded through `load_index`, with its axes in the order in which callers number them."""
    return tl.permute(words, (2, 1, 0, 3)) if FIRST_AXIS_FASTEST else words


@triton.jit
def swizzle(row, col, tiles_per_row):
    """The offset of scale byte (row, col) in the swizzled layout (see `layouts`). tiles_per_row: tiles in a row."""
    tile = (row // 128) * tiles_per_row + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


@triton.jit
def load_words(ptr, word, cols, row_mask, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Words number `word` of the row at `ptr`; zero beyond `cols` elements and without row_mask.

    A word is a pair of `dtype` elements: int32 for 16-bit elements, int64 for float32. ALIGN: number of words that
    divides a row's length and its address, at most 16 bytes; 0 where one word does not (an odd length or address).
    """
    bits: tl.constexpr = dtype.primitive_bitwidth
    word_type: tl.constexpr = tl.int32 if bits == 16 else tl.int64
    if ALIGN > 0:
        # Whole vectors are compared, so that the compiler finds one mask for each of them.
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
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr = False,
):  # fmt: skip
    """The words of a tile, [ROWS, BLOCKS, BLOCK / 2], whose rows begin at the pointers `ptr` [ROWS].

    VECTORS: the number of neighbouring runs of 16 bytes per thread. ALIGN: as in `load_words`. WHOLE: the whole tile
    exists, so nothing needs a mask.
    """
    vector: tl.constexpr = 128 // (2 * dtype.primitive_bitwidth)  # words in 16 bytes
    groups: tl.constexpr = BLOCKS * BLOCK // (2 * VECTORS * vector)
    vector_index = load_index(tl.arange(0, VECTORS), 0)
    group = load_index(tl.arange(0, groups), 2)
    word = (group * VECTORS + vector_index) * vector + tl.arange(0, vector)[None, None, None, :]
    if WHOLE:
        word_type: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 16 else tl.int64
        words = tl.load(load_index(ptr, 1).to(tl.pointer_type(word_type), bitcast=True) + word)
    else:
        words = load_words(load_index(ptr, 1), word, cols, load_index(row_mask, 1), dtype, ALIGN)
    words = restore_axes(words)
    return tl.reshape(tl.permute(words, (1, 2, 0, 3)), (ROWS, BLOCKS, BLOCK // 2))


@triton.jit
def store_tile(
    ptr, words, cols, row_mask, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Store words where `load_tile` would load them, by the same threads; words outside of the tensor are dropped."""
    vector: tl.constexpr = 128 // (2 * dtype.primitive_bitwidth)
    groups: tl.constexpr = BLOCKS * BLOCK // (2 * VECTORS * vector)
    vector_index = load_index(tl.arange(0, VECTORS), 0)
    group = load_index(tl.arange(0, groups), 2)
    word = (group * VECTORS + vector_index) * vector + tl.arange(0, vector)[None, None, None, :]
    words = tl.permute(tl.reshape(words, (ROWS, groups, VECTORS, vector)), (2, 0, 1, 3))
    store_words(load_index(ptr, 1), restore_axes(words), word, cols, load_index(row_mask, 1), dtype, ALIGN)


@triton.jit
def store_words(ptr, words, word, cols, row_mask, dtype: tl.constexpr, ALIGN: tl.constexpr):
    """Store words number `word` of the row at `ptr`, where `load_words` would load them."""
    if ALIGN > 0:
        mask = row_mask & (word // ALIGN < cols // 2 // ALIGN)
        tl.store(ptr.to(tl.pointer_type(words.dtype), bitcast=True) + word, words, mask=mask)
    else:
        bits: tl.constexpr = dtype.primitive_bitwidth
        half: tl.constexpr = tl.int16 if bits == 16 else tl.int32
        ptr = ptr.to(tl.pointer_type(half), bitcast=True) + 2 * word
        tl.store(ptr, words.to(half), mask=row_mask & (2 * word < cols))
        tl.store(ptr + 1, (words >> bits).to(half), mask=row_mask & (2 * word + 1 < cols))


@triton.jit
def tiles_along(size, TILE: tl.constexpr, UNSIGNED: tl.constexpr):
    """The number of tiles of TILE that cover `size` (never negative). UNSIGNED: as in `multiple`."""
    if UNSIGNED and not is_wide(size):
        return ((tl.cast(size, tl.uint32) + (TILE - 1)) // TILE).to(tl.int32)
    else:
        return tl.cdiv(size, TILE)


@triton.jit
def multiple(size, FACTOR: tl.constexpr, UNSIGNED: tl.constexpr):
    """`size` (never negative), a multiple of FACTOR, in a form from which the compiler derives the width of stores.

    UNSIGNED: use instructions for unsigned numbers of 32 bits, which are fewer, unless the size has 64.
    """
    if UNSIGNED and not is_wide(size):
        return (tl.cast(size, tl.uint32) // FACTOR * FACTOR).to(tl.int32)
    else:
        return size // FACTOR * FACTOR


@triton.constexpr_function
def is_wide(size):
    """Whether a size, an int or an integer tensor, has more than 32 bits."""
    return size >= 2**31 if isinstance(size, int) else size.dtype.primitive_bitwidth > 32


@triton.jit
def store_units(data_ptr, units, row, unit0, per_row, row_mask, ALIGN: tl.constexpr, WHOLE: tl.constexpr = False,
                UNSIGNED: tl.constexpr = False):  # fmt: skip
    """Store units [ROWS, n] into a matrix with `per_row` units a row: at its rows `row` [ROWS], from unit0 on.

    Nothing is written beyond the end of a row or where row_mask is False. ALIGN: units that divide a row, at most 16.
    WHOLE: all rows and units exist, so no mask is needed. UNSIGNED: as in `multiple`.
    """
    unit = tl.arange(0, units.shape[1])[None, :]
    per_row = multiple(per_row, ALIGN, UNSIGNED)
    units_left = tl.minimum(per_row - unit0, units.shape[1]).to(tl.int32)
    mask = None if WHOLE else row_mask[:, None] & (unit // ALIGN < units_left // ALIGN)
    ptr = data_ptr.to(tl.pointer_type(units.dtype), bitcast=True) + unit0
    tl.store(ptr + row.to(tl.int64)[:, None] * per_row + unit, units, mask=mask)


@triton.jit
def _store_swizzled_scales(scales_ptr, byte, batch, row, block, inside, rows, blocks, WHOLE: tl.constexpr):
    """`store_scales` of the swizzled layout by unsigned numbers of tiles: 64 bits only for addresses.

    row: [ROWS, 1], block: [1, n]. inside: mask of the bytes that are not padding.
    """
    row = row.to(tl.uint32)
    block = block.to(tl.uint32)
    row_tiles = (tl.cast(rows, tl.uint32) + 127) // 128
    tiles = (tl.cast(blocks, tl.uint32) + 3) // 4
    tile = row // 128 * tiles + block // 4
    matrix = scales_ptr + batch.to(tl.int64) * row_tiles * tiles * 512
    ptr = matrix + tile.to(tl.int64) * 512 + (row % 32 * 16 + row % 128 // 32 * 4 + block % 4)
    if not WHOLE:
        byte = tl.where(inside, byte, 0)
    padded = None if WHOLE else (row // 128 < row_tiles) & (block // 4 < tiles)
    tl.store(ptr, byte.to(tl.uint8), mask=padded)


@triton.jit
def store_scales(scales_ptr, byte, batch, row, block0, rows, blocks, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
                 WHOLE: tl.constexpr = False, UNSIGNED: tl.constexpr = False):  # fmt: skip
    """Store the bits of scales [ROWS, n] of one matrix of a batch: at its rows `row` [ROWS], from block0 on.

    scales_ptr: to bytes or, for float32 scales, to int32. rows, blocks: the shape of the matrix of scales. SWIZZLED:
    they are bytes, and their padding within this tile is filled with zeros. ALIGN: blocks that divide a
    row of scales, at most 16. WHOLE: all of the tile's scales exist, so no mask is needed. UNSIGNED: as in `multiple`.
    """
    count: tl.constexpr = byte.shape[1]
    align: tl.constexpr = ALIGN if ALIGN < count else count
    block = tl.arange(0, count)[None, :]
    if not UNSIGNED:
        row = row.to(tl.int64)
    row = row[:, None]
    blocks = multiple(blocks, align, UNSIGNED)
    inside = (row < rows) & (block // align < tl.minimum(blocks - block0, count).to(tl.int32) // align)
    if SWIZZLED and UNSIGNED:
        _store_swizzled_scales(scales_ptr, byte, batch, row, block0 + block, inside, rows, blocks, WHOLE)
    elif SWIZZLED:
        tiles = tl.cdiv(blocks, 4)
        block = block0 + block
        matrix = scales_ptr + batch.to(tl.int64) * tl.cdiv(rows, 128) * tiles * 512
        padded = (row < tl.cdiv(rows, 128) * 128) & (block // 4 < tiles)
        tl.store(matrix + swizzle(row, block, tiles), tl.where(inside, byte, 0).to(tl.uint8), mask=padded)
    else:
        at = (batch.to(tl.int64) * rows + row) * blocks + block0 + block
        tl.store(scales_ptr + at, byte.to(scales_ptr.dtype.element_ty), mask=None if WHOLE else inside)


@triton.jit
def tile_of(program, rows, col_tiles, ROWS: tl.constexpr, FLAT: tl.constexpr, UNSIGNED: tl.constexpr,
            BATCHED: tl.constexpr = True):  # fmt: skip
    """Program number -> (matrix of the batch, row tile, column tile), the column tile fastest.

    FLAT: there is one row, so all tiles are column tiles. UNSIGNED: use two unsigned divisions, half the instructions
    of three signed ones in most kernels for SM100. BATCHED: there may be several matrices. With a single one, one
    division is enough, and the compiler drops the matrix number from addresses.
    """
    if FLAT:
        return program * 0, program * 0, program
    elif UNSIGNED:
        col_tiles = tl.maximum(col_tiles, 1).to(tl.uint32)
        program = program.to(tl.uint32)
        row_of_tiles = program // col_tiles
        col_tile = (program - row_of_tiles * col_tiles).to(tl.int32)
        if not BATCHED:
            return col_tile * 0, row_of_tiles.to(tl.int32), col_tile
        else:
            row_tiles = tl.maximum(tl.cdiv(rows, ROWS), 1).to(tl.uint32)
            batch = row_of_tiles // row_tiles
            row_tile = row_of_tiles - batch * row_tiles
            return batch.to(tl.int32), row_tile.to(tl.int32), col_tile
    else:
        row_tiles = tl.maximum(tl.cdiv(rows, ROWS), 1)  # an empty tensor also has a program, which divides by this
        col_tiles = tl.maximum(col_tiles, 1)
        return program // (row_tiles * col_tiles), program // col_tiles % row_tiles, program % col_tiles
