"""Quantise along the rows and down the columns from one read: 16-bit inputs, rounded to nearest.

The only outer scale is that of a bf16 tensor, contract "torchao"; with others ptxas spills (see `quantize_columns`).

A thread holds a patch of the tile (`register_tile`). Rows and columns take turns, some rows at a time, so that what one
unpacks serves the other, and no more than the registers of four programs on a multiprocessor are needed.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import block_scale, outer_scales
from fp4compile.templates.device.elements import encode_run, magnitude_bits, unpack
from fp4compile.templates.device.memory import store_scales, store_units, tile_of
from fp4compile.templates.device.packed_rounding import (
    LEAST_AMAX,
    MOST,
    PACKED_SCALE,
    clamp_packed,
    encode_packed_columns,
    encode_packed_row,
    most_packed,
    ordinary,
    packed_e4m3_scales,
    packed_outer_scales,
    packed_rounding,
)
from fp4compile.templates.device.register_tile import (
    DEPTH,
    gate,
    halves_of,
    load_register_tile,
    max_along_row,
    max_down_column,
    max_of,
    max_of_rows,
    repeat_along_row,
    repeat_down_column,
    stacked,
)


@triton.jit
def each_scale(
    amaxes, encode, decode, HAS_OUTER: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    CONTRACT: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(both bytes of a pair of amaxes in an int32, the factor of each), as `block_scale`."""
    if len(amaxes) == 2:
        first, second = amaxes
    else:
        first, second = unpack(amaxes[0], dtype)
        first = magnitude_bits(first)
        second = magnitude_bits(second)
    byte0, factor0 = block_scale(first, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    byte1, factor1 = block_scale(second, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    return byte0 | (byte1 << 8), factor0, factor1


@triton.jit
def pair_scales(
    amaxes, most, encode, decode, HAS_OUTER: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    CONTRACT: tl.constexpr, ROUNDING: tl.constexpr, CLAMP: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Scales of both amaxes of a pair: their bytes in an int16, and the factors as the encoding wants them."""
    if ROUNDING == "fp16" and SCALE == "e4m3":
        bytes, factor0, factor1 = packed_e4m3_scales(amaxes[0])
    elif ROUNDING == "bounded":
        bytes, factor0, factor1 = packed_outer_scales(amaxes[0], most, encode, decode, ROUNDING, CLAMP)
    elif HAS_OUTER and ISA >= 100:
        if ordinary(decode):
            bytes, factor0, factor1 = packed_outer_scales(amaxes[0], most, encode, decode, ROUNDING, CLAMP)
        else:
            bytes, factor0, factor1 = each_scale(amaxes, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, dtype,
                                                 ISA)  # fmt: skip
    else:
        bytes, factor0, factor1 = each_scale(amaxes, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, dtype, ISA)
        if ROUNDING == "fp16":
            factor0 *= PACKED_SCALE
            factor1 *= PACKED_SCALE
    return bytes.to(tl.int16), factor0, factor1


@triton.jit
def scales_of(
    pairs, most, encode, decode, HAS_OUTER: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    CONTRACT: tl.constexpr, ROUNDING: tl.constexpr, CLAMP: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """`pair_scales` of each: a tuple of bytes, and one of twice as many factors."""
    every = ()
    factors = ()
    for i in tl.static_range(len(pairs)):
        bytes, factor0, factor1 = pair_scales(pairs[i], most, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT,
                                              ROUNDING, CLAMP, dtype, ISA)  # fmt: skip
        every = every + (bytes,)
        factors = factors + (factor0, factor1)
    return every, factors


@triton.jit
def long_units(runs):
    """An even number of int32 tensors -> half as many int64 tensors."""
    units = ()
    for i in tl.static_range(0, len(runs), 2):
        units = units + ((runs[i].to(tl.int64) & 0xFFFFFFFF) | (runs[i + 1].to(tl.int64) << 32),)
    return units


@triton.jit
def rows_of(register_tile, most, START: tl.constexpr, COUNT: tl.constexpr, CLAMP: tl.constexpr):
    """Some of the words, clamped if asked (`clamp_packed`)."""
    words = ()
    for i in tl.static_range(START, START + COUNT):
        if CLAMP:
            words = words + (clamp_packed(register_tile[i], most),)
        else:
            words = words + (register_tile[i],)
    return words


@triton.jit
def encode_row(register_tile, START: tl.constexpr, COUNT: tl.constexpr, factor, dtype: tl.constexpr, ELEMENT: tl.constexpr,
               ROUNDING: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT words side by side, as int32 tensors."""
    words: tl.constexpr = 4 if ELEMENT == "e2m1" else 2
    runs = ()
    for i in tl.static_range(START, START + COUNT, words):
        if ROUNDING != "":
            run = (register_tile[i], register_tile[i + 1], register_tile[i + 2], register_tile[i + 3])
            runs = runs + (encode_packed_row(run, factor, ROUNDING, dtype),)
        else:
            values = unpack(register_tile[i], dtype)
            for j in tl.static_range(1, words):
                values = values + unpack(register_tile[i + j], dtype)
            runs = runs + (encode_run(values, factor, (), ELEMENT, ISA),)
    return runs


@triton.jit
def encode_columns(register_tile, ROW: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, factors,
                   dtype: tl.constexpr, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT rows of the two columns of a word: an int32 each, or one of both (COUNT 4, E2M1)."""
    if ROUNDING != "":
        words = ()
        for i in tl.static_range(ROW, ROW + COUNT):
            words = words + (register_tile[i * WORDS + WORD],)
        return (encode_packed_columns(words, factors[2 * WORD], factors[2 * WORD + 1], ROUNDING, dtype),)
    else:
        first = ()
        second = ()
        for i in tl.static_range(ROW, ROW + COUNT):
            one, other = unpack(register_tile[i * WORDS + WORD], dtype)
            first = first + (one,)
            second = second + (other,)
        return (
            encode_run(first, factors[2 * WORD], (), ELEMENT, ISA),
            encode_run(second, factors[2 * WORD + 1], (), ELEMENT, ISA),
        )


@triton.jit
def join_quarters(quarters, WORDS: tl.constexpr):
    """Codes of four rows of both columns of a word, all words of the rows -> runs of eight rows, one a column."""
    runs = ()
    for i in tl.static_range(0, len(quarters), 2 * WORDS):
        for j in tl.static_range(i, i + WORDS):
            runs = runs + halves_of(quarters[j], quarters[j + WORDS])
    return runs


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
def encode_turn(
    register_tile, row_amaxes, column_factors, most, encode, decode, row_ptr, row, rows, group, per_row,
    ROW: tl.constexpr, dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr,
    COL_TILES_PER_BLOCK: tl.constexpr, HAS_OUTER: tl.constexpr, ROUNDING: tl.constexpr, CLAMP: tl.constexpr,
    WHOLE: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Rows of the register_tile from ROW on, for every pair of which there are amaxes; stores their codes.

    Returns (scales of the pairs, codes of the columns).
    """
    turn: tl.constexpr = 2 * len(row_amaxes)
    bytes, factors = scales_of(row_amaxes, most, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ROUNDING, CLAMP,
                               dtype, ISA)  # fmt: skip
    words = rows_of(register_tile, most, ROW * WORDS, turn * WORDS, CLAMP)
    column_runs = ()
    for j in tl.static_range(WORDS):
        column_runs = column_runs + encode_columns(words, 0, j, WORDS, turn, column_factors, dtype, ELEMENT, ROUNDING,
                                                   ISA)  # fmt: skip
    for k in tl.static_range(turn):
        factor = repeat_along_row(factors[k], COL_TILES_PER_BLOCK)
        codes = encode_row(words, k * WORDS, WORDS, factor, dtype, ELEMENT, ROUNDING, ISA)
        store_row(row_ptr, codes, row < rows - (ROW + k), group, per_row, WHOLE)
        row_ptr += per_row
    return bytes, column_runs


@triton.jit
def encode_tile(
    register_tile, least, most, encode, decode, data_ptr, scales_ptr, columns_ptr, column_scales_ptr,
    batch, row_tile, col_tile, rows, cols, dtype: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, HAS_OUTER: tl.constexpr,
    ROUNDING: tl.constexpr, CLAMP: tl.constexpr, SWIZZLED: tl.constexpr, WHOLE: tl.constexpr,
    COLUMN_UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Scales and codes of a tile's register_tile."""
    row_count: tl.constexpr = ROW_TILES * DEPTH
    col_count: tl.constexpr = 2 * COL_TILES * WORDS
    groups_a_block: tl.constexpr = BLOCK // (2 * WORDS)
    strips_a_block: tl.constexpr = BLOCK // DEPTH
    row0 = row_tile * row_count
    col0 = col_tile * col_count

    column_amaxes = ()
    for j in tl.static_range(WORDS):
        amaxes = max_of(register_tile, least, j, DEPTH, WORDS, ISA, dtype)
        column_amaxes = column_amaxes + (max_down_column(amaxes, strips_a_block, dtype),)
    if ROUNDING == "bounded":
        if ordinary(decode):
            column_bytes, factors = scales_of(column_amaxes, most, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT,
                                              ROUNDING, CLAMP, dtype, ISA)  # fmt: skip
        else:
            column_bytes, factors = scales_of(column_amaxes, most, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT,
                                              "float32", False, dtype, ISA)  # fmt: skip
    else:
        column_bytes, factors = scales_of(column_amaxes, most, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT,
                                          ROUNDING, CLAMP, dtype, ISA)  # fmt: skip
    column_factors = ()
    for j in tl.static_range(2 * WORDS):
        column_factors = column_factors + (repeat_down_column(factors[j], strips_a_block),)

    strip0 = row_tile * (ROW_TILES // strips_a_block)
    pairs = tl.reshape(tl.permute(stacked(column_bytes), (1, 2, 0)), (col_count // 2, ROW_TILES // strips_a_block))
    store_pairs(column_scales_ptr, pairs, batch, col0, strip0, cols, tl.cdiv(rows, BLOCK), SWIZZLED,
                COLUMN_SCALE_ALIGN)  # fmt: skip

    # An int32 holds 8 codes of four bits, or 4 of eight.
    run: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    turn: tl.constexpr = 8 if ELEMENT == "e2m1" and ROUNDING == "" else 4
    row_runs: tl.constexpr = 2 * WORDS // run
    per_row = tl.cdiv(cols, BLOCK) * (groups_a_block * tl.cdiv(row_runs, 2))
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * DEPTH
    group = col0 // (2 * WORDS) + tl.arange(0, COL_TILES)[None, :]
    row_ptr = row_pointer(data_ptr, batch * rows + row, group, per_row, row_runs)
    row_bytes = ()
    column_runs = ()
    for i in tl.static_range(0, DEPTH, turn):
        row_amaxes = ()
        for k in tl.static_range(i, i + turn, 2):
            amaxes = max_of_rows(max_of(register_tile, least, k * WORDS, WORDS, 1, ISA, dtype),
                                 max_of(register_tile, least, (k + 1) * WORDS, WORDS, 1, ISA, dtype), dtype)  # fmt: skip
            row_amaxes = row_amaxes + (max_along_row(amaxes, groups_a_block, dtype),)
        if ROUNDING == "bounded":
            # Each turn has this branch: one around all of them takes 200 registers.
            if ordinary(decode):
                bytes, runs = encode_turn(
                    register_tile, row_amaxes, column_factors, most, encode, decode, row_ptr, row, rows, group, per_row, i,
                    dtype, ELEMENT, SCALE, CONTRACT, groups_a_block, HAS_OUTER, ROUNDING, CLAMP, WHOLE, WORDS, ISA,
                )  # fmt: skip
            else:
                bytes, runs = encode_turn(
                    register_tile, row_amaxes, column_factors, most, encode, decode, row_ptr, row, rows, group, per_row, i,
                    dtype, ELEMENT, SCALE, CONTRACT, groups_a_block, HAS_OUTER, "float32", False, WHOLE, WORDS, ISA,
                )  # fmt: skip
        else:
            bytes, runs = encode_turn(
                register_tile, row_amaxes, column_factors, most, encode, decode, row_ptr, row, rows, group, per_row, i,
                dtype, ELEMENT, SCALE, CONTRACT, groups_a_block, HAS_OUTER, ROUNDING, CLAMP, WHOLE, WORDS, ISA,
            )  # fmt: skip
        row_bytes = row_bytes + bytes
        column_runs = column_runs + runs
        for _ in tl.static_range(turn):
            row_ptr += per_row
    if ROUNDING != "":
        column_runs = join_quarters(column_runs, WORDS)

    # An int64 holds 16 codes of four bits, or 8 of eight.
    per_block: tl.constexpr = BLOCK // (2 * run)
    column = col0 + tl.arange(0, col_count)
    store_columns(columns_ptr, column_runs, batch * cols + column, strip0 * per_block,
                  tl.cdiv(rows, BLOCK) * per_block, column < cols, 2 * WORDS, COLUMN_UNIT_ALIGN)  # fmt: skip
    pairs = tl.reshape(tl.permute(stacked(row_bytes), (0, 2, 1)), (row_count // 2, col_count // BLOCK))
    store_pairs(scales_ptr, pairs, batch, row0, col0 // BLOCK, rows, tl.cdiv(cols, BLOCK), SWIZZLED, SCALE_ALIGN)


@triton.jit
def quantize_both(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, outer_ptr, amax_ptr, rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    OUTER: tl.constexpr, MAXIMA: tl.constexpr, SWIZZLED: tl.constexpr, WHOLE: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROW_TILES * DEPTH rows by 2 * COL_TILES * WORDS columns; x: [batch, rows, cols], strides x_batch, x_row, 1.

    Codes and scales of x go to data_ptr, scales_ptr; those of x transposed to columns_ptr, column_scales_ptr.
    OUTER: as in `outer_scales`, one of both. WHOLE: tiles divide each matrix, and nothing needs a mask.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * DEPTH
    col_count: tl.constexpr = 2 * COL_TILES * WORDS
    rounding: tl.constexpr = packed_rounding(ELEMENT, SCALE, CONTRACT, OUTER, dtype, ISA)

    # Swizzled scales have padding below and beside those of the tensor; the tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    program = tl.program_id(0)
    if OUTER == "amax":
        # The epilogue of the tensor is what the amax kernel has left in the cache.
        program = tl.num_programs(0) - 1 - program
    batch, row_tile, col_tile = tile_of(program, padded_rows, col_tiles, row_count, False)
    batch = batch.to(tl.int64)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    left = tl.minimum(cols - col0, col_count)
    register_tile = load_register_tile(x_ptr + batch * x_batch + col0, row0, rows, left, x_row, dtype, ROW_TILES, COL_TILES, WORDS,
                           ALIGN, WHOLE)  # fmt: skip
    least = gate(register_tile[0], LEAST_AMAX if rounding == "fp16" and SCALE == "e4m3" else 0, ISA)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, MAXIMA, CONTRACT, ISA)
    clamp: tl.constexpr = rounding == "fp16" and SCALE == "e4m3" or rounding == "bounded" and OUTER == "tensor"
    most = MOST if OUTER == "none" else most_packed(decode)
    encode_tile(register_tile, least, most, encode, decode, data_ptr, scales_ptr, columns_ptr, column_scales_ptr,
                batch, row_tile, col_tile, rows, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK, OUTER != "none",
                rounding, clamp, SWIZZLED, WHOLE, COLUMN_UNIT_ALIGN, SCALE_ALIGN, COLUMN_SCALE_ALIGN,
                ROW_TILES, COL_TILES, WORDS, ISA)  # fmt: skip


@triton.jit
def store_columns(columns_ptr, runs, row, unit0, per_row, row_mask, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """Store the int32 runs [ROW_TILES, COL_TILES] of a tile's columns, COLUMNS in a group, whose first runs come first."""
    n: tl.constexpr = len(runs) // (2 * COLUMNS)
    units = ()
    for j in tl.static_range(COLUMNS):
        for k in tl.static_range(n):
            units = units + long_units((runs[2 * k * COLUMNS + j], runs[(2 * k + 1) * COLUMNS + j]))
    both = stacked(units)
    row_tiles: tl.constexpr = both.shape[0]
    groups: tl.constexpr = both.shape[1]
    both = tl.permute(tl.reshape(both, (row_tiles, groups, COLUMNS, n)), (1, 2, 0, 3))
    store_units(columns_ptr, tl.reshape(both, (groups * COLUMNS, row_tiles * n)), row, unit0, per_row, row_mask, ALIGN)
