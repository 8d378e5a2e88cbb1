"""Register tiles: one thread's part of a program's tile, and the maxima along its rows and down its columns.

A thread holds DEPTH rows of WORDS words (a word is a pair of columns). The program's tile is loaded as one tensor, and
split into a tuple of DEPTH * WORDS tensors [ROW_TILES, COL_TILES]: one tensor for each position in a register tile,
with an element for each thread. So operations on words of one register tile stay in registers, along rows as well as
down columns.

Compile time: for each load and store, Triton's coalescing pass follows all operations of the kernel from all
operations of the kernel. So all rows of a tile are one load, if their alignment allows it.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.elements import magnitude_bits, max_words, reduce_words, unpack
from fp4compile.templates.device.memory import (
    FIRST_AXIS_FASTEST,
    load_index,
    load_words,
    restore_axes,
)

DEPTH = tl.constexpr(16)


@triton.jit
def tile_index(index, AXIS: tl.constexpr):
    """An index vector over row tiles (AXIS 0) or column tiles (1), for a load whose lanes go to column tiles first.

    The axis of a load to which lanes go first depends on the version of Triton.
    """
    axis: tl.constexpr = 1 - AXIS if FIRST_AXIS_FASTEST else AXIS
    return index[:, None, None] if axis == 0 else index[None, :, None]


@triton.jit
def split_last(tensor):
    """[..., n], n a power of two -> n tensors [...], in order."""
    count: tl.constexpr = tensor.shape[len(tensor.shape) - 1]
    parts = (tl.reshape(tensor, halved(tensor.shape)),)
    for _ in tl.static_range(log2(count)):
        halves = ()
        for i in tl.static_range(len(parts)):
            halves = halves + tl.split(parts[i])
        parts = halves
    ordered = ()  # after the splits, part i is at i with its bits reversed
    for i in tl.static_range(count):
        ordered = ordered + (parts[reversed_bits(i, count)],)
    return ordered


@triton.constexpr_function
def halved(shape):
    """The shape [..., n] as [..., 2, 2, ..., 2]."""
    return [*shape[:-1], *[2] * log2(shape[-1])]


@triton.constexpr_function
def log2(count):
    return int(count).bit_length() - 1


@triton.constexpr_function
def reversed_bits(number, count):
    bits = (count - 1).bit_length()
    return sum((number >> i & 1) << (bits - 1 - i) for i in range(bits))


@triton.jit
def stack_tensors(tensors):
    """n tensors [...], n a power of two -> [..., n]."""
    count: tl.constexpr = len(tensors)
    shape: tl.constexpr = stacked(tensors[0].shape, count)
    for level in tl.static_range(log2(count)):
        joined = ()
        for i in tl.static_range(count >> (level + 1)):
            joined = joined + (tl.join(tensors[i], tensors[i + (count >> (level + 1))]),)
        tensors = joined
    return tl.reshape(tensors[0], shape)


@triton.constexpr_function
def stacked(shape, count):
    return [*shape, count]


@triton.jit
def load_register_tile(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a tile whose rows begin at row0 and `ptr`; zero beyond `rows` rows and `cols` elements.

    Returns a tensor [ROW_TILES, COL_TILES, DEPTH * WORDS]: number i * WORDS + j of the last axis is word j of row i of
    register tiles. WHOLE: the whole tile exists, so nothing needs a mask. ALIGN: as in `load_words`.
    """
    x_row = tl.full((), 0, tl.int64) + x_row  # Triton passes a stride of 1 as a constant
    if ALIGN > 0:
        row = load_index(row0 + tl.arange(0, ROW_TILES) * DEPTH, 1)
        step = load_index(tl.arange(0, DEPTH), 0)
        word = load_index(tl.arange(0, COL_TILES) * WORDS, 2) + tl.arange(0, WORDS)[None, None, None, :]
        # The stride in words, in a form from which the compiler derives the width of loads.
        stride = x_row // (2 * ALIGN) * ALIGN
        word_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * stride + word + step * stride
        if WHOLE:
            words = tl.load(word_ptr)
        else:
            words = tl.load(word_ptr, mask=(row < rows - step) & (word // ALIGN < cols // 2 // ALIGN), other=0)
        words = tl.permute(restore_axes(words), (1, 2, 0, 3))
    else:
        # Row by row: all rows at once would take 40 registers more.
        row = tile_index(row0 + tl.arange(0, ROW_TILES) * DEPTH, 0)
        word = tile_index(tl.arange(0, COL_TILES) * WORDS, 1) + tl.arange(0, WORDS)[None, None, :]
        loads = ()
        for i in tl.static_range(DEPTH):
            words = load_words(ptr + (row + i) * x_row, word, cols, row < rows - i, dtype, ALIGN)
            loads = loads + (tl.permute(words, (1, 0, 2)) if FIRST_AXIS_FASTEST else words,)
        words = tl.permute(stack_tensors(loads), (0, 1, 3, 2))
    return tl.reshape(words, (ROW_TILES, COL_TILES, DEPTH * WORDS))


@triton.jit
def zero_after_barrier(word, ISA: tl.constexpr):
    """Zeros (int32) in the shape of `word`, from a barrier of the program: arithmetic on them follows the barrier.

    Without the barrier ptxas begins with the arithmetic, and issues the last loads when the arithmetic is half done. It
    never moves loads past a barrier; arithmetic follows one only if it reads a result of the barrier. (The PTX is
    declared pure, because Inductor assumes that PTX with side effects writes all arguments of the kernel.)
    """
    if ISA == 0:
        return tl.full(word.shape, 0, tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, 0, 0; bar.red.or.pred p, 0, p; selp.b32 $0, -1, $2, p; }",
            "=r,r,r", [word, 0], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def word_amaxes(tile, initial, START: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, ISA: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """The largest magnitudes in COUNT words of a tile: START, START + STEP, and so on.

    A word has two 16-bit elements of `dtype`, and each half has an amax of its own. Returns a tuple of one word of both
    amaxes, whose signs are arbitrary, or, in the interpreter's form (ISA 0), of two tensors of float32 bits. initial:
    a further word that counts; the interpreter's form ignores it.
    """
    if ISA == 0:
        first, second = unpack(tile[START], dtype)
        first = magnitude_bits(first)
        second = magnitude_bits(second)
        for i in tl.static_range(1, COUNT):
            one, other = unpack(tile[START + i * STEP], dtype)
            first = tl.maximum(first, magnitude_bits(one))
            second = tl.maximum(second, magnitude_bits(other))
        return (first, second)
    else:
        words = initial
        for i in tl.static_range(COUNT):
            words = max_words(words, tile[START + i * STEP], dtype)
        return (words,)


@triton.jit
def amaxes_of_two_rows(one, other, dtype: tl.constexpr):
    """Pairs of amaxes of two rows (each pair: even columns, odd columns) -> a pair: amax of one row, of the other."""
    if len(one) == 2:
        return (tl.maximum(one[0], one[1]), tl.maximum(other[0], other[1]))
    else:
        low, high = join_halves(one[0], other[0])
        return (max_words(low, high, dtype),)


@triton.jit
def reduce_pair(amaxes, SHAPE: tl.constexpr, AXIS: tl.constexpr, dtype: tl.constexpr):
    """Maxima along AXIS of a pair of amaxes, reshaped to SHAPE: a pair."""
    if len(amaxes) == 2:
        return tl.max(tl.reshape(amaxes[0], SHAPE), AXIS), tl.max(tl.reshape(amaxes[1], SHAPE), AXIS)
    else:
        return (reduce_words(tl.reshape(amaxes[0], SHAPE), AXIS, dtype),)


@triton.jit
def block_amaxes_along_row(amaxes, COL_TILES_PER_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """A pair of amaxes [ROW_TILES, COL_TILES] -> a pair of amaxes of whole blocks, [ROW_TILES, blocks]."""
    row_tiles: tl.constexpr = amaxes[0].shape[0]
    col_tiles: tl.constexpr = amaxes[0].shape[1]
    return reduce_pair(amaxes, (row_tiles, col_tiles // COL_TILES_PER_BLOCK, COL_TILES_PER_BLOCK), 2, dtype)


@triton.jit
def block_amaxes_down_column(amaxes, ROW_TILES_PER_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """A pair of amaxes [ROW_TILES, COL_TILES] -> a pair of amaxes of whole blocks, [blocks, COL_TILES]."""
    if ROW_TILES_PER_BLOCK == 1:
        return amaxes
    else:
        row_tiles: tl.constexpr = amaxes[0].shape[0]
        col_tiles: tl.constexpr = amaxes[0].shape[1]
        return reduce_pair(amaxes, (row_tiles // ROW_TILES_PER_BLOCK, ROW_TILES_PER_BLOCK, col_tiles), 1, dtype)


@triton.jit
def repeat_along_row(values, TIMES: tl.constexpr):
    """[a, b] -> [a, b * TIMES]: each value repeated TIMES times."""
    shape: tl.constexpr = (values.shape[0], values.shape[1], TIMES)
    return tl.reshape(tl.broadcast_to(values[:, :, None], shape), (values.shape[0], values.shape[1] * TIMES))


@triton.jit
def repeat_down_column(values, TIMES: tl.constexpr):
    """[a, b] -> [a * TIMES, b]: each row repeated TIMES times."""
    if TIMES == 1:
        return values
    else:
        shape: tl.constexpr = (values.shape[0], TIMES, values.shape[1])
        return tl.reshape(tl.broadcast_to(values[:, None, :], shape), (values.shape[0] * TIMES, values.shape[1]))


@triton.jit
def join_to_int64(runs):
    """An even number of int32 tensors -> half as many int64 tensors, each made of two neighbours."""
    units = ()
    for i in tl.static_range(0, len(runs), 2):
        units = units + ((runs[i].to(tl.int64) & 0xFFFFFFFF) | (runs[i + 1].to(tl.int64) << 32),)
    return units


@triton.jit
def join_halves(one, other):
    """Two words -> (the word of their lower halves, the word of their upper halves)."""
    return (one & 0xFFFF) | (other << 16), ((one >> 16) & 0xFFFF) | (other & -65536)
