"""Quantise along the rows and down the columns from one read: 16-bit inputs, at most one outer scale, rounded to nearest.

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
    outer_scales,
    reduce_words,
    unpack,
)
from fp4compile.templates.packed_rounding import (
    LEAST_AMAX,
    PACKED_SCALE,
    clamp_packed,
    encode_packed_columns,
    encode_packed_row,
    packed_e4m3_scales,
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
    STRIPS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of the rows from row0 on, each from `ptr` on; zero beyond `rows` rows and `cols` elements.

    WHOLE: nothing lies beyond them.

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
        patches = patches + split_words(tl.permute(loads[i], (1, 0, 2)) if FIRST_AXIS_FASTEST else loads[i])
    return patches


@triton.jit
def gate(word, VALUE: tl.constexpr, ISA: tl.constexpr):
    """VALUE, like `word`, after a barrier that what needs it cannot pass.

    ptxas would begin with the arithmetic, and issue the last loads when it is half done. Loads stay before a barrier,
    arithmetic stays behind it only if it needs what the barrier gives.
    """
    if ISA == 0:
        return tl.full(word.shape, VALUE, tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, 0, 0; bar.red.or.pred p, 0, p; selp.b32 $0, -1, $2, p; }",
            "=r,r,r", [word, VALUE], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def max_of(patches, least, START: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr, ISA: tl.constexpr,
           dtype: tl.constexpr):  # fmt: skip
    """Largest magnitudes of both halves of COUNT words from START on, STEP apart, and of `least`: a pair of amaxes.

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
        words = least
        for i in tl.static_range(COUNT):
            words = max_words(words, patches[START + i * STEP], dtype)
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
    amaxes, encode, decode, HAS_OUTER: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    CONTRACT: tl.constexpr, ROUNDING: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Scales of both amaxes of a pair: their bytes in an int16, and the factors as the encoding wants them."""
    if ROUNDING == "fp16" and SCALE == "e4m3":
        bytes, factor0, factor1 = packed_e4m3_scales(amaxes[0])
    else:
        if len(amaxes) == 2:
            first, second = amaxes
        else:
            first, second = unpack(amaxes[0], dtype)
            first = magnitude_bits(first)
            second = magnitude_bits(second)
        byte0, factor0 = block_scale(first, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
        byte1, factor1 = block_scale(second, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
        bytes = byte0 | (byte1 << 8)
        if ROUNDING == "fp16":
            factor0 *= PACKED_SCALE
            factor1 *= PACKED_SCALE
    return bytes.to(tl.int16), factor0, factor1


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
def rows_of(patches, START: tl.constexpr, COUNT: tl.constexpr, CLAMP: tl.constexpr):
    """Some of the words, clamped if asked (`clamp_packed`)."""
    words = ()
    for i in tl.static_range(START, START + COUNT):
        if CLAMP:
            words = words + (clamp_packed(patches[i]),)
        else:
            words = words + (patches[i],)
    return words


@triton.jit
def encode_row(patches, START: tl.constexpr, COUNT: tl.constexpr, factor, dtype: tl.constexpr, ELEMENT: tl.constexpr,
               ROUNDING: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT words side by side, as int32 tensors."""
    words: tl.constexpr = 4 if ELEMENT == "e2m1" else 2
    runs = ()
    for i in tl.static_range(START, START + COUNT, words):
        if ROUNDING != "":
            run = (patches[i], patches[i + 1], patches[i + 2], patches[i + 3])
            runs = runs + (encode_packed_row(run, factor, ROUNDING, dtype),)
        else:
            values = unpack(patches[i], dtype)
            for j in tl.static_range(1, words):
                values = values + unpack(patches[i + j], dtype)
            runs = runs + (encode_run(values, factor, (), ELEMENT, ISA),)
    return runs


@triton.jit
def encode_columns(patches, ROW: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, factors,
                   dtype: tl.constexpr, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT rows of the two columns of a word: an int32 each, or one of both (COUNT 4, E2M1)."""
    if ROUNDING != "":
        words = ()
        for i in tl.static_range(ROW, ROW + COUNT):
            words = words + (patches[i * WORDS + WORD],)
        return (encode_packed_columns(words, factors[2 * WORD], factors[2 * WORD + 1], ROUNDING, dtype),)
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
def join_quarters(quarters, WORDS: tl.constexpr):
    """Codes of four rows of both columns of WORDS words, of all rows -> runs of eight rows, an int32 for each column."""
    runs = ()
    for i in tl.static_range(0, len(quarters), 2 * WORDS):
        for j in tl.static_range(i, i + WORDS):
            runs = runs + halves_of(quarters[j], quarters[j + WORDS])
    return runs


@triton.jit
def halves_of(one, other):
    """Two words -> the words of their lower and of their upper halves."""
    return (one & 0xFFFF) | (other << 16), ((one >> 16) & 0xFFFF) | (other & -65536)


@triton.jit
def row_pointer(data_ptr, row, group, per_row, RUNS: tl.constexpr):
    """Where the codes of the groups `group` go that a thread has in the rows `row`, RUNS int32 runs of them."""
    if RUNS == 1:
        return data_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (row.to(tl.int64) * per_row + group)
    else:
        units: tl.constexpr = RUNS // 2
        unit = group[:, :, None] * units + tl.arange(0, units)[None, None, :]
        return data_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + (row.to(tl.int64)[:, :, None] * per_row + unit)


@triton.jit
def store_row(row_ptr, runs, rows, group, per_row, WHOLE: tl.constexpr):
    """Store the int32 runs of the groups `group`; per_row: units in a row, of 8 bytes each if there are 2 runs."""
    if len(runs) == 1:
        units = runs[0]
        mask = rows & (group < per_row)
    else:
        long: tl.constexpr = len(runs) // 2
        units = stacked(long_units(runs))
        mask = rows[:, :, None] & (group[:, :, None] * long + tl.arange(0, long)[None, None, :] < per_row)
    if WHOLE:
        tl.store(row_ptr, units)
    else:
        tl.store(row_ptr, units, mask=mask)


@triton.jit
def store_pairs(scales_ptr, pairs, batch, row0, block0, rows, blocks, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr):
    """Store the scale bytes of pairs of rows from row0 on, [pairs, n] (int16), as `store_scales`."""
    row = row0 + 2 * tl.arange(0, pairs.shape[0])
    store_scales(scales_ptr, pairs, batch, row, block0, rows, blocks, SWIZZLED, ALIGN)
    store_scales(scales_ptr, pairs >> 8, batch, row + 1, block0, rows, blocks, SWIZZLED, ALIGN)


@triton.jit
def quantize_both(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, outer_ptr, amax_ptr, rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, MAXIMA: tl.constexpr, SWIZZLED: tl.constexpr, WHOLE: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    STRIPS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of STRIPS * DEPTH rows by 2 * GROUPS * WORDS columns; x: [batch, rows, cols], strides x_batch, x_row, 1.

    Codes and scales of x go to data_ptr, scales_ptr; those of x transposed to columns_ptr, column_scales_ptr.
    OUTER: as in `outer_scales`, one of both. WHOLE: tiles divide each matrix, and nothing needs a mask.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = STRIPS * DEPTH
    col_count: tl.constexpr = 2 * GROUPS * WORDS
    rounding: tl.constexpr = packed_rounding(ELEMENT, SCALE, CONTRACT, OUTER, dtype, ISA)
    has_outer: tl.constexpr = OUTER != "none"
    groups_a_block: tl.constexpr = BLOCK // (2 * WORDS)
    strips_a_block: tl.constexpr = BLOCK // DEPTH

    # Swizzled scales have padding below and beside those of the tensor; the tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    program = tl.program_id(0)
    if OUTER == "amax":
        # The tail of the tensor is what the amax kernel has left in the cache.
        program = tl.num_programs(0) - 1 - program
    batch, row_tile, col_tile = tile_of(program, padded_rows, col_tiles, row_count, False)
    batch = batch.to(tl.int64)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    left = tl.minimum(cols - col0, col_count)
    patches = load_patches(x_ptr + batch * x_batch + col0, row0, rows, left, x_row, dtype, STRIPS, GROUPS, WORDS,
                           ALIGN, WHOLE)  # fmt: skip
    least = gate(patches[0], LEAST_AMAX if rounding == "fp16" and SCALE == "e4m3" else 0, ISA)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, MAXIMA, CONTRACT, ISA)
    column_bytes = ()
    column_factors = ()
    for j in tl.static_range(WORDS):
        amaxes = max_of(patches, least, j, DEPTH, WORDS, ISA, dtype)
        amaxes = max_down_column(amaxes, strips_a_block, dtype)
        bytes, factor0, factor1 = pair_scales(amaxes, encode, decode, has_outer, ELEMENT, SCALE, CONTRACT, rounding,
                                              dtype, ISA)  # fmt: skip
        column_bytes = column_bytes + (bytes,)
        column_factors = column_factors + (repeat_down_column(factor0, strips_a_block),
                                           repeat_down_column(factor1, strips_a_block))  # fmt: skip

    strip0 = row_tile * (STRIPS // strips_a_block)
    pairs = tl.reshape(tl.permute(stacked(column_bytes), (1, 2, 0)), (col_count // 2, STRIPS // strips_a_block))
    store_pairs(column_scales_ptr, pairs, batch, col0, strip0, cols, tl.cdiv(rows, BLOCK), SWIZZLED,
                COLUMN_SCALE_ALIGN)  # fmt: skip

    # An int32 holds 8 codes of four bits, or 4 of eight. Rows and columns take turns, so that what one unpacks serves
    # the other.
    run: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    turn: tl.constexpr = 8 if ELEMENT == "e2m1" and rounding == "" else 4
    row_runs: tl.constexpr = 2 * WORDS // run
    per_row = tl.cdiv(cols, BLOCK) * (groups_a_block * tl.cdiv(row_runs, 2))
    row = row0 + tl.arange(0, STRIPS)[:, None] * DEPTH
    group = col0 // (2 * WORDS) + tl.arange(0, GROUPS)[None, :]
    row_ptr = row_pointer(data_ptr, batch * rows + row, group, per_row, row_runs)
    row_bytes = ()
    column_runs = ()
    for i in tl.static_range(0, DEPTH, turn):
        row_factors = ()
        for k in tl.static_range(i, i + turn, 2):
            amaxes = max_of_rows(max_of(patches, least, k * WORDS, WORDS, 1, ISA, dtype),
                                 max_of(patches, least, (k + 1) * WORDS, WORDS, 1, ISA, dtype), dtype)  # fmt: skip
            amaxes = max_along_row(amaxes, groups_a_block, dtype)
            bytes, factor0, factor1 = pair_scales(amaxes, encode, decode, has_outer, ELEMENT, SCALE, CONTRACT,
                                                  rounding, dtype, ISA)  # fmt: skip
            row_bytes = row_bytes + (bytes,)
            row_factors = row_factors + (repeat_along_row(factor0, groups_a_block),
                                         repeat_along_row(factor1, groups_a_block))  # fmt: skip
        words = rows_of(patches, i * WORDS, turn * WORDS, rounding == "fp16" and SCALE == "e4m3")
        for j in tl.static_range(WORDS):
            column_runs = column_runs + encode_columns(words, 0, j, WORDS, turn, column_factors, dtype, ELEMENT,
                                                       rounding, ISA)  # fmt: skip
        for k in tl.static_range(turn):
            codes = encode_row(words, k * WORDS, WORDS, row_factors[k], dtype, ELEMENT, rounding, ISA)
            store_row(row_ptr, codes, row < rows - (i + k), group, per_row, WHOLE)
            row_ptr += per_row
    if rounding != "":
        column_runs = join_quarters(column_runs, WORDS)

    # An int64 holds 16 codes of four bits, or 8 of eight.
    per_block: tl.constexpr = BLOCK // (2 * run)
    column = col0 + tl.arange(0, col_count)
    store_columns(columns_ptr, column_runs, batch * cols + column, strip0 * per_block,
                  tl.cdiv(rows, BLOCK) * per_block, column < cols, 2 * WORDS, COLUMN_UNIT_ALIGN)  # fmt: skip
    pairs = tl.reshape(tl.permute(stacked(row_bytes), (0, 2, 1)), (row_count // 2, col_count // BLOCK))
    store_pairs(scales_ptr, pairs, batch, row0, col0 // BLOCK, rows, tl.cdiv(cols, BLOCK), SWIZZLED, SCALE_ALIGN)


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
