"""The input of a quantiser: a tile of a tensor in memory or, with a prologue, of the result of pointwise operations.

A kernel takes a `prologue.Prologue` as a constexpr string, PROLOGUE (`text`), whose steps `device.pointwise`
interprets; "" is no prologue. It reads its tiles by `read_tile` or `read_register_tile`. With a prologue, these load
the tile of each operand as a pair of float32 tuples (even columns, odd columns), compute the steps, and return the
results, rounded to the tensor's dtype, as words. So a kernel uses the same words with and without a prologue.

Outside of the tensor the words are 0, even if the steps compute other numbers from zeros. A read with STORES writes the
stored results of the prologue: a kernel that reads a tile twice sets STORES once.

The functions for tiles have these arguments in common. batch: the matrix of the batch. rows, cols: the size of each
matrix. row (a vector) or row0, col0: the tile's place in its matrix. cols_left: columns from col0 on. All others are
arguments of the load. ptr: the tile's address in the first operand. operands: pointers to the other operands, then to
the stored results. The other operands are contiguous, or the text has the stride of their rows (slices of the columns
of wider tensors).
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fp4compile.formats.prologue import OPERANDS, Prologue
from fp4compile.formats.steps import Step
from fp4compile.templates.device.column_tile import unpack_column_tile
from fp4compile.templates.device.elements import pack, unpack
from fp4compile.templates.device.memory import (
    load_tile,
    store_tile,
)
from fp4compile.templates.device.pointwise import compute, kind_of, part_of, tensor_count, written
from fp4compile.templates.device.register_tile import (
    DEPTH,
    load_register_tile,
    split_last,
)

# Index in `operands` of the first pointer to a stored result.
STORED_FROM = tl.constexpr(OPERANDS - 1)

# ---------------------------------------------------------------- text


@cache
def text(prologue: Prologue, dtypes: tuple[torch.dtype, ...], row_strides: tuple[tuple[int, int], ...] = ()) -> str:
    """The constexpr PROLOGUE of kernels: "aux0 aux1/2048 row2 | add 0 1; mul.pairs 3 2 | 4 3".

    After the slash is a row stride. The last part has the positions of the result and of the stored results.

    dtypes: dtypes of the operands. row_strides: (number of an operand, elements from one of its rows to the next), for
    operands whose rows are not contiguous.
    """
    prologue, strides = prologue.shortened(), dict(row_strides)
    names = [f"{kind}{i}" for i, kind in sorted(prologue.kinds.items())]
    narrow = {name for name, dtype in zip(names, dtypes, strict=True) if dtype.itemsize == 2}
    steps, numbers, (result, dtype) = list(prologue.steps), prologue.computed, prologue.result
    if dtypes[0] != dtype:  # kernels then read the result in the first operand's dtype, which holds it
        numbers, result = [*numbers, len(steps)], len(steps)
        steps.append(Step(str(dtype).removeprefix("torch."), (f"s{prologue.result[0]}",)))
    lines, places = written(steps, numbers, names, narrow)
    operands = (f"{name}/{strides[i]}" if i in strides else name for i, name in enumerate(names))
    kept = (places[f"s{number}"] for number in (result, *(number for number, _ in prologue.stored)))
    return " | ".join((" ".join(operands), lines, " ".join(map(str, kept))))


@triton.constexpr_function
def has_row_stride(PROLOGUE, number):
    """Whether the text has a row stride for an operand."""
    return "/" in part_of(PROLOGUE, 0).split()[number]


@triton.constexpr_function
def row_stride_of(PROLOGUE, number):
    """The row stride of an operand, in elements."""
    return int(part_of(PROLOGUE, 0).split()[number].split("/")[1])


@triton.constexpr_function
def result_of(PROLOGUE):
    """The position of the value that is quantised."""
    return int(part_of(PROLOGUE, 2).split()[0])


@triton.constexpr_function
def stored_count(PROLOGUE):
    return len(part_of(PROLOGUE, 2).split()) - 1


@triton.constexpr_function
def stored_of(PROLOGUE, number):
    """The position of stored result `number`."""
    return int(part_of(PROLOGUE, 2).split()[1 + number])


# ---------------------------------------------------------------- tiles


@triton.jit
def read_tile(
    ptr, operands, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ISA: tl.constexpr, STORES: tl.constexpr, PROLOGUE: tl.constexpr,
):  # fmt: skip
    """The words of a tile as `load_tile` returns them, through the prologue."""
    words = load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)
    if PROLOGUE == "":
        return words
    else:
        evens, odds = unpack(words, dtype)
        evens = (evens,)
        odds = (odds,)
        for i in tl.static_range(1, tensor_count(PROLOGUE)):
            even, odd = operand_tile(
                kind_of(PROLOGUE, i), operands[i - 1], batch, row, rows, col0,
                row_stride_of(PROLOGUE, i) if has_row_stride(PROLOGUE, i) else cols,
                cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE,
            )  # fmt: skip
            evens = evens + even
            odds = odds + odd
        evens = compute(evens, PROLOGUE, ISA)
        odds = compute(odds, PROLOGUE, ISA)
        words = pack(evens[result_of(PROLOGUE)], odds[result_of(PROLOGUE)], dtype, ISA)
        if STORES:
            for i in tl.static_range(stored_count(PROLOGUE)):
                ptr = operands[STORED_FROM + i]
                stored = pack(evens[stored_of(PROLOGUE, i)], odds[stored_of(PROLOGUE, i)], ptr.dtype.element_ty, ISA)
                to_tile(ptr, stored, batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                        ALIGN)  # fmt: skip
        return inside_tile(words, row < rows, cols_left, ALIGN, WHOLE)


@triton.jit
def read_register_tile(
    ptr, operands, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr, PROLOGUE: tl.constexpr,
):  # fmt: skip
    """The words of register tiles, through the prologue: DEPTH * WORDS tensors [ROW_TILES, COL_TILES].

    All operands are of the tensor's size (`quantize.prologues`).
    Tensor i * WORDS + j has word j of row i of register tiles.
    """
    words = load_register_tile(ptr, row0, rows, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)
    if PROLOGUE == "":
        return split_last(words)
    else:
        values = (unpacked_rows(words, dtype),)
        for i in tl.static_range(1, tensor_count(PROLOGUE)):
            stride = row_stride_of(PROLOGUE, i) if has_row_stride(PROLOGUE, i) else cols
            values = values + (_operand_rows(operand_ptr(operands[i - 1], batch, rows, col0, stride), row0, rows,
                                             cols_left, stride, operands[i - 1].dtype.element_ty, ROW_TILES,
                                             COL_TILES, WORDS, ALIGN, WHOLE),)  # fmt: skip
        words = compute_rows(values, dtype, PROLOGUE, ISA)
        return inside_register_tile(words, row0, rows, cols_left, COL_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def _operand_rows(
    ptr, row0, rows, cols_left, row_stride, dtype: tl.constexpr, ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr,
    WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`unpacked_rows` of an operand's register tiles."""
    words = load_register_tile(ptr, row0, rows, cols_left, row_stride, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)
    return unpacked_rows(words, dtype)


@triton.jit
def unpacked_rows(words, dtype: tl.constexpr):
    """Words [a, b, DEPTH * n] of DEPTH rows of register tiles -> DEPTH tensors [a, b, n, 2] in float32."""
    even, odd = unpack(words, dtype)
    shape: tl.constexpr = (words.shape[0], words.shape[1], DEPTH, words.shape[2] // DEPTH, 2)
    return split_last(tl.permute(tl.reshape(tl.join(even, odd), shape), (0, 1, 3, 4, 2)))


@triton.jit
def compute_rows(values, dtype: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr):
    """Operands of register tiles -> for each row, the words of the result.

    values: for each operand, a tuple of rows in float32, with an axis of two columns last. A thread has one element of
    each column, so both columns are computed at once, by instructions that compute two elements. Row by row, because
    the whole tile at once would take 40 registers more.
    """
    words = ()
    for i in tl.static_range(DEPTH):
        row = ()
        for j in tl.static_range(len(values)):
            row = row + (values[j][i],)
        row = compute(row, PROLOGUE, ISA)
        even, odd = tl.split(row[result_of(PROLOGUE)])
        words = words + (pack(even, odd, dtype, ISA),)
    return words


# ---------------------------------------------------------------- operands
#
# A value of a tile is (even columns, odd columns), tuples in float32.


@triton.constexpr_function
def vectors_of(vectors, dtype, own):
    """The number of 16-byte runs of an operand of dtype `own` with the elements of `vectors` runs of the first one."""
    return max(1, vectors * own.primitive_bitwidth // dtype.primitive_bitwidth)


@triton.jit
def operand_ptr(ptr, batch, rows, col0, cols):
    """Pointer to column col0 of a matrix of a batch with a row stride of `cols` elements."""
    return ptr + (batch.to(tl.int64) * rows * cols + col0)


@triton.jit
def operand_tile(
    KIND: tl.constexpr, ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    if KIND == "col":
        value = tl.load(ptr + batch.to(tl.int64) * rows + row, mask=row < rows, other=0.0).to(tl.float32)[:, None, None]
        return (value,), (value,)
    else:
        vectors: tl.constexpr = vectors_of(VECTORS, dtype, own) if KIND == "aux" else VECTORS
        if KIND == "aux":
            row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
        else:
            row_ptr = ptr + col0 + row * 0
        words = load_tile(row_ptr, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN, WHOLE)
        return unpack_column_tile((words,), own)


# ---------------------------------------------------------------- results


@triton.jit
def to_tile(
    ptr, words, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
    vectors: tl.constexpr = vectors_of(VECTORS, dtype, own)
    store_tile(row_ptr, words, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN)


@triton.jit
def inside_tile(words, row_mask, cols_left, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    """The words of a tile [ROWS, BLOCKS, BLOCK / 2]; words outside of the tensor become 0. row_mask: [ROWS]."""
    half: tl.constexpr = words.shape[2]
    word = tl.arange(0, words.shape[1])[None, :, None] * half + tl.arange(0, half)[None, None, :]
    return words_inside(words, word, cols_left, row_mask[:, None, None], ALIGN, WHOLE)


@triton.jit
def inside_register_tile(
    tile, row0, rows, cols_left, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr
):
    """Split DEPTH rows of words into tensors [ROW_TILES, COL_TILES]; words outside of the tensor become 0."""
    row = row0 + tl.arange(0, tile[0].shape[0])[:, None, None] * DEPTH
    word = tl.arange(0, COL_TILES)[None, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    words = ()
    for i in tl.static_range(DEPTH):
        words = words + split_last(words_inside(tile[i], word, cols_left, row < rows - i, ALIGN, WHOLE))
    return words


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
