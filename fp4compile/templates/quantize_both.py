"""Quantise along the rows and down the columns from one read: 16-bit inputs, no outer scale, rounded to nearest.

A thread holds a patch of DEPTH rows by WORDS words (pairs of columns), each word a tensor [STRIPS, GROUPS] of its own:
so whatever combines words of a patch (maxima, packing) stays in registers by construction, along rows as down columns.
"""

import triton
import triton.language as tl

from fp4compile.templates.codec import (
    block_scale,
    encode_run,
    magnitude_bits,
    max_words,
    reduce_words,
    unpack,
)
from fp4compile.templates.packed_rounding import (
    encode_packed_columns,
    encode_packed_row,
    packed_e4m3_scales,
    packed_factor,
    packed_rounding,
)
from fp4compile.templates.quantize_rows import FIRST_AXIS_FASTEST, load_words, store_scales, store_units, tile_of

DEPTH = tl.constexpr(16)


@triton.jit
def tile_index(index, AXIS: tl.constexpr):
    """An index vector of strips (0) or groups (1), along the axis of a load that gives lanes to the groups first."""
    axis: tl.constexpr = 1 - AXIS if FIRST_AXIS_FASTEST else AXIS
    return index[:, None, None] if axis == 0 else index[None, :, None]


@triton.jit
def split_last(words):
    return tl.split(tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2] // 2, 2)))


@triton.jit
def split_words(words):
    """[STRIPS, GROUPS, n] -> n tensors [STRIPS, GROUPS], in order."""
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
def load_patches(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    STRIPS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The words of the rows from row0 on, each from `ptr` on; zero beyond `rows` rows and `cols` elements.

    The word j of row i of the patches is number i * WORDS + j.
    """
    row = tile_index(row0 + tl.arange(0, STRIPS) * DEPTH, 0)
    word = tile_index(tl.arange(0, GROUPS) * WORDS, 1) + tl.arange(0, WORDS)[None, None, :]
    x_row = tl.full((), 0, tl.int64) + x_row  # a plain number where it is 1
    patches = ()
    if ALIGN > 0:
        stride = x_row // (2 * ALIGN) * ALIGN  # the same in words; the compiler sees how wide it may load
        word_ptr = ptr.to(tl.pointer_type(tl.int32), bitcast=True) + row * stride + word
        inside = word // ALIGN < cols // 2 // ALIGN
        loads = ()
        for i in tl.static_range(DEPTH):
            loads = loads + (tl.load(word_ptr, mask=(row < rows - i) & inside, other=0),)
            word_ptr += stride
    else:
        loads = ()
        for i in tl.static_range(DEPTH):
            loads = loads + (load_words(ptr + (row + i) * x_row, word, cols, row < rows - i, dtype, ALIGN),)
    for i in tl.static_range(DEPTH):
        patches = patches + split_words(tl.permute(loads[i], (1, 0, 2)) if FIRST_AXIS_FASTEST else loads[i])
    return patches


@triton.jit
def max_of(patches, START: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, ISA: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """Largest magnitudes of both halves of COUNT words from START on, STEP apart: a pair of amaxes.

    A pair is a word whose signs mean nothing or, in the portable form, two tensors of bits.
    """
    if ISA == 0:
        first, second = unpack(patches[START], dtype)
        first = magnitude_bits(first)
        second = magnitude_bits(second)
        for i in tl.static_range(1, COUNT):
            one, other = unpack(patches[START + i * STEP], dtype)
            first = tl.maximum(first, magnitude_bits(one))
            second = tl.maximum(second, magnitude_bits(other))
        return (first, second)
    else:
        words = patches[START]
        for i in tl.static_range(1, COUNT):
            words = max_words(words, patches[START + i * STEP], dtype)
        return (words,)


@triton.jit
def max_of_rows(one, other, dtype: tl.constexpr):
    """Pairs of amaxes of two rows -> the pair of their amaxes."""
    if len(one) == 2:
        return (tl.maximum(one[0], one[1]), tl.maximum(other[0], other[1]))
    else:
        low = (one[0] & 0xFFFF) | (other[0] << 16)
        high = ((one[0] >> 16) & 0xFFFF) | (other[0] & -65536)
        return (max_words(low, high, dtype),)


@triton.jit
def reduce_pair(amaxes, SHAPE: tl.constexpr, AXIS: tl.constexpr, dtype: tl.constexpr):
    if len(amaxes) == 2:
        return tl.max(tl.reshape(amaxes[0], SHAPE), AXIS), tl.max(tl.reshape(amaxes[1], SHAPE), AXIS)
    else:
        return (reduce_words(tl.reshape(amaxes[0], SHAPE), AXIS, dtype),)


@triton.jit
def max_along_row(amaxes, GROUPS_A_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """[STRIPS, GROUPS] -> [STRIPS, blocks]."""
    strips: tl.constexpr = amaxes[0].shape[0]
    groups: tl.constexpr = amaxes[0].shape[1]
    return reduce_pair(amaxes, (strips, groups // GROUPS_A_BLOCK, GROUPS_A_BLOCK), 2, dtype)


@triton.jit
def max_down_column(amaxes, STRIPS_A_BLOCK: tl.constexpr, dtype: tl.constexpr):
    """[STRIPS, GROUPS] -> [blocks, GROUPS]."""
    if STRIPS_A_BLOCK == 1:
        return amaxes
    else:
        strips: tl.constexpr = amaxes[0].shape[0]
        groups: tl.constexpr = amaxes[0].shape[1]
        return reduce_pair(amaxes, (strips // STRIPS_A_BLOCK, STRIPS_A_BLOCK, groups), 1, dtype)


@triton.jit
def pair_scales(
    amaxes, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, PACKED: tl.constexpr,
    dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(scale byte, factor) of both amaxes of a pair, four tensors; the factor as the encoding wants it."""
    if PACKED and SCALE == "e4m3":
        return packed_e4m3_scales(amaxes[0])
    else:
        if len(amaxes) == 2:
            first, second = amaxes
        else:
            first, second = unpack(amaxes[0], dtype)
            first = magnitude_bits(first)
            second = magnitude_bits(second)
        byte0, factor0 = block_scale(first, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
        byte1, factor1 = block_scale(second, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
        if PACKED:
            factor0 = packed_factor(factor0, byte0, SCALE)
            factor1 = packed_factor(factor1, byte1, SCALE)
        return byte0, factor0, byte1, factor1


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
def long_units(runs):
    """An even number of int32 tensors -> half as many int64 tensors."""
    units = ()
    for i in tl.static_range(0, len(runs), 2):
        units = units + ((runs[i].to(tl.int64) & 0xFFFFFFFF) | (runs[i + 1].to(tl.int64) << 32),)
    return units


@triton.jit
def encode_row(patches, START: tl.constexpr, COUNT: tl.constexpr, factor, dtype: tl.constexpr, ELEMENT: tl.constexpr,
               PACKED: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT words side by side, as int32 tensors."""
    words: tl.constexpr = 4 if ELEMENT == "e2m1" else 2
    runs = ()
    for i in tl.static_range(START, START + COUNT, words):
        if PACKED:
            runs = runs + (encode_packed_row(patches[i], patches[i + 1], patches[i + 2], patches[i + 3], factor),)
        else:
            values = unpack(patches[i], dtype)
            for j in tl.static_range(1, words):
                values = values + unpack(patches[i + j], dtype)
            runs = runs + (encode_run(values, factor, (), ELEMENT, ISA),)
    return runs


@triton.jit
def encode_columns(patches, ROW: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, factors,
                   dtype: tl.constexpr, ELEMENT: tl.constexpr, PACKED: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT rows of the two columns of a word: an int32 each."""
    if PACKED:
        words = ()
        for i in tl.static_range(ROW, ROW + COUNT):
            words = words + (patches[i * WORDS + WORD],)
        return encode_packed_columns(words, factors[2 * WORD], factors[2 * WORD + 1])
    else:
        first = ()
        second = ()
        for i in tl.static_range(ROW, ROW + COUNT):
            one, other = unpack(patches[i * WORDS + WORD], dtype)
            first = first + (one,)
            second = second + (other,)
        return (
            encode_run(first, factors[2 * WORD], (), ELEMENT, ISA),
            encode_run(second, factors[2 * WORD + 1], (), ELEMENT, ISA),
        )


@triton.jit
def store_row(data_ptr, runs, row, rows, group, per_row):
    """Store the int32 runs of the groups `group`; per_row: units in a row, of 8 bytes each if there are 2 runs."""
    units = runs if len(runs) == 1 else long_units(runs)
    ptr = data_ptr.to(tl.pointer_type(units[0].dtype), bitcast=True)
    if len(units) == 1:
        tl.store(ptr + (row * per_row + group), units[0], mask=rows & (group < per_row))
    else:
        unit = group[:, :, None] * len(units) + tl.arange(0, len(units))[None, None, :]
        tl.store(ptr + (row[:, :, None] * per_row + unit), stacked(units), mask=rows[:, :, None] & (unit < per_row))


@triton.jit
def quantize_both(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    STRIPS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of STRIPS * DEPTH rows by 2 * GROUPS * WORDS columns; x: [batch, rows, cols], strides x_batch, x_row, 1.

    Codes and scales of x go to data_ptr, scales_ptr; those of x transposed to columns_ptr, column_scales_ptr.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = STRIPS * DEPTH
    col_count: tl.constexpr = 2 * GROUPS * WORDS
    packed: tl.constexpr = packed_rounding(ELEMENT, SCALE, CONTRACT, dtype, ISA)
    groups_a_block: tl.constexpr = BLOCK // (2 * WORDS)
    strips_a_block: tl.constexpr = BLOCK // DEPTH

    # Swizzled scales have padding below and beside those of the tensor; the tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False)
    batch = batch.to(tl.int64)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    left = tl.minimum(cols - col0, col_count)
    patches = load_patches(x_ptr + batch * x_batch + col0, row0, rows, left, x_row, dtype, STRIPS, GROUPS, WORDS, ALIGN)
    tl.debug_barrier()  # ptxas would begin with the arithmetic, and issue the last loads when it is half done

    column_bytes = ()
    column_factors = ()
    for j in tl.static_range(WORDS):
        amaxes = max_of(patches, j, DEPTH, WORDS, ISA, dtype)
        amaxes = max_down_column(amaxes, strips_a_block, dtype)
        scales = pair_scales(amaxes, ELEMENT, SCALE, CONTRACT, packed, dtype, ISA)
        for k in tl.static_range(2):
            column_bytes = column_bytes + (scales[2 * k].to(tl.uint8),)
            column_factors = column_factors + (repeat_down_column(scales[2 * k + 1], strips_a_block),)
    row_bytes = ()
    row_factors = ()
    for i in tl.static_range(0, DEPTH, 2):
        amaxes = max_of_rows(max_of(patches, i * WORDS, WORDS, 1, ISA, dtype),
                             max_of(patches, (i + 1) * WORDS, WORDS, 1, ISA, dtype), dtype)  # fmt: skip
        amaxes = max_along_row(amaxes, groups_a_block, dtype)
        scales = pair_scales(amaxes, ELEMENT, SCALE, CONTRACT, packed, dtype, ISA)
        for k in tl.static_range(2):
            row_bytes = row_bytes + (scales[2 * k].to(tl.uint8),)
            row_factors = row_factors + (repeat_along_row(scales[2 * k + 1], groups_a_block),)

    # An int32 holds 8 codes of four bits, or 4 of eight. Rows and columns take turns, so that what one unpacks serves
    # the other.
    run: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    per_row = tl.cdiv(cols, BLOCK) * (groups_a_block * tl.cdiv(2 * WORDS // run, 2))
    row = row0 + tl.arange(0, STRIPS)[:, None] * DEPTH
    group = col0 // (2 * WORDS) + tl.arange(0, GROUPS)[None, :]
    column_runs = ()
    for i in tl.static_range(0, DEPTH, run):
        for j in tl.static_range(WORDS):
            column_runs = column_runs + encode_columns(patches, i, j, WORDS, run, column_factors, dtype, ELEMENT,
                                                       packed, ISA)  # fmt: skip
        for k in tl.static_range(i, i + run):
            codes = encode_row(patches, k * WORDS, WORDS, row_factors[k], dtype, ELEMENT, packed, ISA)
            store_row(data_ptr, codes, batch * rows + row + k, row < rows - k, group, per_row)

    strip0 = row_tile * (STRIPS // strips_a_block)
    # An int64 holds 16 codes of four bits, or 8 of eight.
    per_block: tl.constexpr = BLOCK // (2 * run)
    column = col0 + tl.arange(0, col_count)
    store_columns(columns_ptr, column_runs, batch * cols + column, strip0 * per_block,
                  tl.cdiv(rows, BLOCK) * per_block, column < cols, 2 * WORDS, COLUMN_UNIT_ALIGN)  # fmt: skip
    bytes = tl.reshape(tl.permute(stacked(column_bytes), (1, 2, 0)), (col_count, STRIPS // strips_a_block))
    store_scales(column_scales_ptr, bytes, batch, column, strip0, cols, tl.cdiv(rows, BLOCK), SWIZZLED,
                 COLUMN_SCALE_ALIGN)  # fmt: skip
    bytes = tl.reshape(tl.permute(stacked(row_bytes), (0, 2, 1)), (row_count, col_count // BLOCK))
    store_scales(scales_ptr, bytes, batch, row0 + tl.arange(0, row_count), col0 // BLOCK, rows, tl.cdiv(cols, BLOCK),
                 SWIZZLED, SCALE_ALIGN)  # fmt: skip


@triton.jit
def store_columns(columns_ptr, runs, row, unit0, per_row, row_mask, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """Store the int32 runs [STRIPS, GROUPS] of a tile's columns, COLUMNS in a group, whose first runs come first."""
    n: tl.constexpr = len(runs) // (2 * COLUMNS)
    units = ()
    for j in tl.static_range(COLUMNS):
        for k in tl.static_range(n):
            units = units + long_units((runs[2 * k * COLUMNS + j], runs[(2 * k + 1) * COLUMNS + j]))
    both = stacked(units)
    strips: tl.constexpr = both.shape[0]
    groups: tl.constexpr = both.shape[1]
    both = tl.permute(tl.reshape(both, (strips, groups, COLUMNS, n)), (1, 2, 0, 3))
    store_units(columns_ptr, tl.reshape(both, (groups * COLUMNS, strips * n)), row, unit0, per_row, row_mask, ALIGN)
