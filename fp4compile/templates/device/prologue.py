"""What a quantiser reads: a tile of a tensor in memory or, with a prologue, of the result of pointwise operations.

The kernels read their tiles by `read_tile`, `read_column_tile` or `read_register_tile`, which load them. In the copy of
a kernel that `prologue_source.with_prologue` makes, these names mean printed device functions. The others here are what
printed functions call: they load the tile of an operand as pairs of float32 tuples, mask the words of a result, and
store what others need.

The forms of a tile have these arguments in common. batch, rows, cols: the matrix of the batch, and the size of each.
row (a vector) or row0, col0: where the tile lies in its matrix. cols_left: columns from there on. All others are those
of the form's load. ptr: where the load begins in the first operand. Other operands lie contiguous, or their rows have a
distance that is printed in the place of cols (slices of the columns of wider tensors).
"""

import triton
import triton.language as tl

from fp4compile.templates.device.column_tile import load_column_tile, store_column_tile, unpack_column_tile
from fp4compile.templates.device.elements import float_bits
from fp4compile.templates.device.memory import FIRST_AXIS_FASTEST, load_tile, load_words, store_tile
from fp4compile.templates.device.prefetch import prefetch
from fp4compile.templates.device.register_tile import (
    DEPTH,
    load_register_tile,
    split_words,
    store_register_tile,
    tile_index,
)

# ---------------------------------------------------------------- tiles of a tensor in memory


@triton.jit
def read_tile(
    ptr, operands, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of a tile, as `load_tile`."""
    return load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)


@triton.jit
def read_column_tile(
    ptr, operands, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of a column tile, as `load_column_tile`."""
    return load_column_tile(ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def read_register_tile(
    ptr, operands, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of register tiles, as `load_register_tile`."""
    return load_register_tile(ptr, row0, rows, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def prefetch_operands(ptr, operands, number, width, spans):
    """`prefetch` a span of each operand of the tensor's size. All lie contiguous."""
    return prefetch(ptr, number, width, spans)


@triton.jit
def seed_of(seed_ptr, batch):
    """(where the seed of a matrix is, the matrix by whose place in the tensor random words are drawn)."""
    return seed_ptr, batch


@triton.jit
def tile_of_one(program, col_tiles, FLAT: tl.constexpr):
    """(row tile, column tile) of a program of one matrix, as `tile_of`."""
    if FLAT:
        return program * 0, program
    else:
        col_tiles = tl.maximum(col_tiles, 1).to(tl.uint32)
        row_tile = program.to(tl.uint32) // col_tiles
        return row_tile.to(tl.int32), (program.to(tl.uint32) - row_tile * col_tiles).to(tl.int32)


# ---------------------------------------------------------------- operands: (even columns, odd columns), float32 tuples


@triton.constexpr_function
def vectors_of(vectors, dtype, own):
    """How many runs of 16 bytes of an operand hold the elements of `vectors` runs of the first: one thread's."""
    return max(1, vectors * own.primitive_bitwidth // dtype.primitive_bitwidth)


@triton.jit
def operand_ptr(ptr, batch, rows, col0, cols):
    """Where the columns from col0 on of a matrix of a batch begin, all of whose rows lie `cols` elements apart."""
    return ptr + (batch.to(tl.int64) * rows * cols + col0)


@triton.jit
def aux_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
    vectors: tl.constexpr = vectors_of(VECTORS, dtype, own)
    words = load_tile(row_ptr, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN, WHOLE)
    return unpack_column_tile((words,), own)


@triton.jit
def row_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = ptr + col0 + row * 0
    words = load_tile(row_ptr, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)
    return unpack_column_tile((words,), own)


@triton.jit
def col_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    value = tl.load(ptr + batch.to(tl.int64) * rows + row, mask=row < rows, other=0.0).to(tl.float32)[:, None, None]
    return (value,), (value,)


@triton.jit
def aux_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    tile = load_column_tile(ptr, row0, rows, cols_left, cols, own, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)
    return unpack_column_tile(tile, own)


@triton.jit
def row_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    words = load_words(ptr + col0, tl.arange(0, WORDS)[None, :], cols_left, True, own, ALIGN)
    tile = ()
    for _ in tl.static_range(BLOCK):
        tile = tile + (words,)
    return unpack_column_tile(tile, own)


@triton.jit
def col_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    return column_operands(ptr + batch.to(tl.int64) * rows, row, rows, BLOCK, 1)


@triton.jit
def aux_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    tile = load_register_tile(ptr, row0, rows, cols_left, cols, own, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)
    return unpack_column_tile(tile, own)


@triton.jit
def row_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    word = tile_index(tl.arange(0, COL_TILES) * WORDS, 1) + tl.arange(0, WORDS)[None, None, :]
    words = load_words(ptr + col0, word, cols_left, True, own, ALIGN)
    words = split_words(tl.permute(words, (1, 0, 2)) if FIRST_AXIS_FASTEST else words)
    tile = ()
    for _ in tl.static_range(DEPTH):
        tile = tile + words
    return unpack_column_tile(tile, own)


@triton.jit
def col_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * DEPTH
    return column_operands(ptr + batch.to(tl.int64) * rows, row, rows, DEPTH, WORDS)


@triton.jit
def column_operands(ptr, row, rows, COUNT: tl.constexpr, TIMES: tl.constexpr):
    """An element each of the COUNT rows from `row` on, TIMES times, for the even and for the odd columns."""
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(ptr + row + i, mask=row < rows - i, other=0.0).to(tl.float32)
        for _ in tl.static_range(TIMES):
            values = values + (value,)
    return values, values


# ---------------------------------------------------------------- results


@triton.jit
def to_tile(
    ptr, words, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
    vectors: tl.constexpr = vectors_of(VECTORS, dtype, own)
    store_tile(row_ptr, words[0], cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN, WHOLE)


@triton.jit
def to_column_tile(
    ptr, words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    store_column_tile(ptr, words, row0, rows, cols_left, cols, own, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def to_register_tile(
    ptr, words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    store_register_tile(ptr, words, row0, rows, cols_left, cols, own, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def inside_tile(
    words, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a tile, those outside of the tensor as 0."""
    half: tl.constexpr = BLOCK // 2
    word = tl.arange(0, BLOCKS)[None, :, None] * half + tl.arange(0, half)[None, None, :]
    return words_inside(words[0], word, cols_left, (row < rows)[:, None, None], ALIGN, WHOLE)


@triton.jit
def inside_column_tile(
    words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a column tile, those outside of the tensor as 0."""
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    word = tl.arange(0, WORDS)[None, :]
    tile = ()
    for i in tl.static_range(BLOCK):
        tile = tile + (words_inside(words[i], word, cols_left, row < rows - i, ALIGN, WHOLE),)
    return tile


@triton.jit
def inside_register_tile(
    words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of register tiles, those outside of the tensor as 0."""
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * DEPTH
    word = tl.arange(0, COL_TILES)[None, :] * WORDS
    tile = ()
    for i in tl.static_range(DEPTH):
        for j in tl.static_range(WORDS):
            tile = tile + (words_inside(words[i * WORDS + j], word + j, cols_left, row < rows - i, ALIGN, WHOLE),)
    return tile


@triton.jit
def rounded(value, dtype: tl.constexpr, ISA: tl.constexpr):
    """float32 rounded to a `dtype` of 16 bits, in float32."""
    bits = float_bits(value, dtype, ISA)
    if dtype == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_inside(words, word, cols, row_mask, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    """Words of two elements, number `word` of their rows: 0 beyond `cols` elements and without row_mask."""
    if WHOLE:
        return words
    elif ALIGN > 0:
        return tl.where(row_mask & (word // ALIGN < cols // 2 // ALIGN), words, 0)
    else:
        half: tl.constexpr = words.dtype.primitive_bitwidth // 2
        last = tl.where(row_mask & (2 * word < cols), words & ((1 << half) - 1), 0)
        return tl.where(row_mask & (2 * word + 1 < cols), words, last)
