"""Patches of a tile: what one thread holds of it, and the maxima along their rows and down their columns.

A patch has DEPTH rows of WORDS words (pairs of columns), each word a tensor [ROW_TILES, COL_TILES] of its own: so whatever
combines words of a patch stays in registers by construction, along rows as down columns.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.elements import magnitude_bits, max_words, reduce_words, unpack
from fp4compile.templates.device.memory import FIRST_AXIS_FASTEST, load_words

DEPTH = tl.constexpr(16)


@triton.jit
def tile_index(index, AXIS: tl.constexpr):
    """An index vector of tile (0) or groups (1), along the axis of a load that gives lanes to the groups first."""
    axis: tl.constexpr = 1 - AXIS if FIRST_AXIS_FASTEST else AXIS
    return index[:, None, None] if axis == 0 else index[None, :, None]


@triton.jit
def split_last(words):
    return tl.split(tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2] // 2, 2)))


@triton.jit
def split_words(words):
    """[ROW_TILES, COL_TILES, n] -> n tensors [ROW_TILES, COL_TILES], in order."""
    count: tl.constexpr = words.shape[2]
    parts = (words,)
    for _ in tl.static_range(log2(count)):
        halves = ()
        for i in tl.static_range(len(parts)):
            halves = halves + split_last(parts[i])
        parts = halves
    return in_order(parts)


@triton.jit
def in_order(parts):
    """The parts of repeated splits, which come with the bits of their numbers reversed."""
    count: tl.constexpr = len(parts)
    ordered = ()
    for i in tl.static_range(count):
        part = parts[reversed_bits(i, count)]
        ordered = ordered + (tl.reshape(part, (part.shape[0], part.shape[1])),)
    return ordered


@triton.constexpr_function
def log2(count):
    return count.bit_length() - 1


@triton.constexpr_function
def reversed_bits(number, count):
    bits = (count - 1).bit_length()
    return sum((number >> i & 1) << (bits - 1 - i) for i in range(bits))


@triton.jit
def stacked(tensors):
    """n tensors [a, b] -> [a, b, n]."""
    count: tl.constexpr = len(tensors)
    for level in tl.static_range(log2(count)):
        joined = ()
        for i in tl.static_range(count >> (level + 1)):
            joined = joined + (tl.join(tensors[i], tensors[i + (count >> (level + 1))]),)
        tensors = joined
    return tl.reshape(tensors[0], (tensors[0].shape[0], tensors[0].shape[1], count))


@triton.jit
def load_register_tile(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of the rows from row0 on, each from `ptr` on; zero beyond `rows` rows and `cols` elements.

    WHOLE: nothing lies beyond them.

    The word j of row i of the register_tile is number i * WORDS + j.
    """
    row = tile_index(row0 + tl.arange(0, ROW_TILES) * DEPTH, 0)
    word = tile_index(tl.arange(0, COL_TILES) * WORDS, 1) + tl.arange(0, WORDS)[None, None, :]
    x_row = tl.full((), 0, tl.int64) + x_row  # a plain number where it is 1
    register_tile = ()
    if ALIGN > 0:
        stride = x_row // (2 * ALIGN) * ALIGN  # the same in words; the compiler sees how wide it may load
        word_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * stride + word
        inside = word // ALIGN < cols // 2 // ALIGN
        loads = ()
        for i in tl.static_range(DEPTH):
            if WHOLE:
                loads = loads + (tl.load(word_ptr),)
            else:
                loads = loads + (tl.load(word_ptr, mask=(row < rows - i) & inside, other=0),)
            word_ptr += stride
    else:
        loads = ()
        for i in tl.static_range(DEPTH):
            loads = loads + (load_words(ptr + (row + i) * x_row, word, cols, row < rows - i, dtype, ALIGN),)
    for i in tl.static_range(DEPTH):
        register_tile = register_tile + split_words(tl.permute(loads[i], (1, 0, 2)) if FIRST_AXIS_FASTEST else loads[i])
    return register_tile


@triton.jit
def gate(word, VALUE: tl.constexpr, ISA: tl.constexpr):
    """VALUE, like `word`, after a barrier that what needs it cannot pass.

    ptxas would begin with the arithmetic, and issue the last loads when it is half done. Loads stay before a barrier,
    arithmetic stays behind it only if it needs what the barrier gives. (Said to be pure: of PTX with side effects
    Inductor believes that it writes all of a kernel's arguments.)
    """
    if ISA == 0:
        return tl.full(word.shape, VALUE, tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, 0, 0; bar.red.or.pred p, 0, p; selp.b32 $0, -1, $2, p; }",
            "=r,r,r", [word, VALUE], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def max_of(register_tile, least, START: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, ISA: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """Largest magnitudes of both halves of COUNT words from START on, STEP apart, and of `least`: a pair of amaxes.

    A pair is a word whose signs mean nothing or, in the portable form, two tensors of bits.
    """
    if ISA == 0:
        first, second = unpack(register_tile[START], dtype)
        first = magnitude_bits(first)
        second = magnitude_bits(second)
        for i in tl.static_range(1, COUNT):
            one, other = unpack(register_tile[START + i * STEP], dtype)
            first = tl.maximum(first, magnitude_bits(one))
            second = tl.maximum(second, magnitude_bits(other))
        return (first, second)
    else:
        words = least
        for i in tl.static_range(COUNT):
            words = max_words(words, register_tile[START + i * STEP], dtype)
        return (words,)


@triton.jit
def max_of_rows(one, other, dtype: tl.constexpr):
    """Pairs of amaxes of two rows -> the pair of their amaxes."""
    if len(one) == 2:
        return (tl.maximum(one[0], one[1]), tl.maximum(other[0], other[1]))
    else:
        low, high = halves_of(one[0], other[0])
        return (max_words(low, high, dtype),)


@triton.jit
def reduce_pair(amaxes, SHAPE: tl.constexpr, AXIS: tl.constexpr, dtype: tl.constexpr):
    if len(amaxes) == 2:
        return tl.max(tl.reshape(amaxes[0], SHAPE), AXIS), tl.max(tl.reshape(amaxes[1], SHAPE), AXIS)
    else:
        return (reduce_words(tl.reshape(amaxes[0], SHAPE), AXIS, dtype),)


@triton.jit
def max_along_row(amaxes, COL_TILES_PER_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """[ROW_TILES, COL_TILES] -> [ROW_TILES, blocks]."""
    row_tiles: tl.constexpr = amaxes[0].shape[0]
    groups: tl.constexpr = amaxes[0].shape[1]
    return reduce_pair(amaxes, (row_tiles, groups // COL_TILES_PER_BLOCK, COL_TILES_PER_BLOCK), 2, dtype)


@triton.jit
def max_down_column(amaxes, ROW_TILES_PER_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """[ROW_TILES, COL_TILES] -> [blocks, COL_TILES]."""
    if ROW_TILES_PER_BLOCK == 1:
        return amaxes
    else:
        row_tiles: tl.constexpr = amaxes[0].shape[0]
        groups: tl.constexpr = amaxes[0].shape[1]
        return reduce_pair(amaxes, (row_tiles // ROW_TILES_PER_BLOCK, ROW_TILES_PER_BLOCK, groups), 1, dtype)


@triton.jit
def repeat_along_row(values, TIMES: tl.constexpr):
    shape: tl.constexpr = (values.shape[0], values.shape[1], TIMES)
    return tl.reshape(tl.broadcast_to(values[:, :, None], shape), (values.shape[0], values.shape[1] * TIMES))


@triton.jit
def repeat_down_column(values, TIMES: tl.constexpr):
    if TIMES == 1:
        return values
    else:
        shape: tl.constexpr = (values.shape[0], TIMES, values.shape[1])
        return tl.reshape(tl.broadcast_to(values[:, None, :], shape), (values.shape[0] * TIMES, values.shape[1]))


@triton.jit
def halves_of(one, other):
    """Two words -> the words of their lower and of their upper halves."""
    return (one & 0xFFFF) | (other << 16), ((one >> 16) & 0xFFFF) | (other & -65536)
