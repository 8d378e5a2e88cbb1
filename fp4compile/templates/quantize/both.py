"""Quantise along rows and columns from one read: 16-bit inputs, rounded to nearest, with block scales only.

A thread holds a register tile of 16 rows (`device.register_tile`). Rows and columns are encoded in turns of a few rows,
so that elements are unpacked once for both. The registers suffice for four programs per multiprocessor. Each direction
may have dequantised values instead of codes (`device.values`).
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from fp4compile.formats.formats import BlockFormat
from fp4compile.templates.device.apply_prologue import read_register_tile
from fp4compile.templates.device.block_scales import block_scale, scale_bits
from fp4compile.templates.device.column_tile import unpack_column_tile
from fp4compile.templates.device.elements import encode_run, magnitude_bits, unpack
from fp4compile.templates.device.memory import load_index, restore_axes, store_scales, store_units, tile_of
from fp4compile.templates.device.register_tile import (
    DEPTH,
    amaxes_of_two_rows,
    block_amaxes_along_row,
    block_amaxes_down_column,
    join_to_int64,
    repeat_along_row,
    repeat_down_column,
    stack_tensors,
    word_amaxes,
    zero_after_barrier,
)
from fp4compile.templates.device.values import scale_of_run, takes_values, values_of_run
from fp4compile.templates.launch import Launch, LaunchConfig
from fp4compile.templates.quantize.column import store_column_values
from fp4compile.templates.quantize.outputs import (
    Outer,
    Output,
    column_aligns,
    format_constants,
    store_aligns,
    tile_grid,
    whole_tiles,
)
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.writes import of_scales, writes


@dataclass(frozen=True)
class BothConfig(LaunchConfig):
    """`quantize_both`: tiles of row_tiles * DEPTH rows by 2 * col_tiles * words columns."""

    num_warps: int
    row_tiles: int
    col_tiles: int
    words: int


def both_config(element: str, more: bool) -> BothConfig:
    """The configuration of `quantize_both`.

    more: whether elements are computed, or rows of dequantised values stored: both take more registers, and small
    programs fit better.
    """
    if element == "e2m1" or more:
        return BothConfig(num_warps=4, row_tiles=8, col_tiles=16, words=4)
    return BothConfig(num_warps=8, row_tiles=8, col_tiles=32, words=4)


def serves(source: Source, fmt: BlockFormat, outer: Outer, *, seeded: bool, transform: bool) -> bool:
    """Whether the kernel quantises this source in both directions."""
    narrow = outer.mode == "none" and source.tensor.dtype.itemsize == 2
    return narrow and not seeded and not transform and not source.groups


def both_launch(source: Source, fmt: BlockFormat, layout: str, rows: Output, columns: Output) -> Launch:
    """The launch of `quantize_both`. rows, columns: the outputs to fill for x and for x transposed."""
    config = both_config(fmt.element, source.prologue is not None or rows.data.tensor.is_floating_point())
    height, width = config.row_tiles * DEPTH.value, 2 * config.col_tiles * config.words
    constants = {
        **format_constants(fmt), "SWIZZLED": layout == "swizzled",
        "WHOLE": whole_tiles(source, height, width, layout), "ALIGN": source.align, **store_aligns(source.cols, fmt),
        **column_aligns(source, fmt), "PROLOGUE": source.prologue_text,
        "ISA": source.target.isa, **config.constants,
    }  # fmt: skip
    arguments = source.view, *rows.pointers, *columns.pointers, *source.args, *source.operand_args
    grid = tile_grid(source, height, width, layout)
    return Launch(quantize_both, grid, arguments, constants, config.num_warps)


@triton.jit
def scales_of_pairs(
    pairs, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr
):
    """Tuple of pairs of amaxes -> (integers with the bits of both scales of each pair, factors, twice as many)."""
    all_bits = ()
    factors = ()
    for i in tl.static_range(len(pairs)):
        if len(pairs[i]) == 2:
            first, second = pairs[i]
        else:
            first, second = unpack(pairs[i][0], dtype)
            first = magnitude_bits(first)
            second = magnitude_bits(second)
        bits0, factor0 = block_scale(first, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
        bits1, factor1 = block_scale(second, 1.0, 1.0, False, ELEMENT, SCALE, CONTRACT, ISA)
        all_bits = all_bits + (pair_of_scales(bits0, bits1, SCALE),)
        factors = factors + (factor0, factor1)
    return all_bits, factors


@triton.jit
def pair_of_scales(first, second, SCALE: tl.constexpr):
    """The bits of two scales (int32) in one integer of twice their size."""
    if scale_bits(SCALE) == 32:
        return (first.to(tl.int64) & 0xFFFFFFFF) | (second.to(tl.int64) << 32)
    else:
        return (first | (second << 8)).to(tl.int16)


@triton.jit
def encode_row(tile, START: tl.constexpr, COUNT: tl.constexpr, factor, dtype: tl.constexpr, ELEMENT: tl.constexpr,
               ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT neighbouring words of a row, as a tuple of int32 tensors."""
    words: tl.constexpr = 4 if ELEMENT == "e2m1" else 2
    runs = ()
    for i in tl.static_range(START, START + COUNT, words):
        run = ()
        for j in tl.static_range(words):
            run = run + unpack(tile[i + j], dtype)
        runs = runs + (encode_run(run, factor, (), ELEMENT, ISA),)
    return runs


@triton.jit
def encode_columns(tile, ROW: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr, COUNT: tl.constexpr, factors,
                   dtype: tl.constexpr, ELEMENT: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Codes of COUNT rows in both columns of a word, as an int32 tensor for each column."""
    words = ()
    for i in tl.static_range(ROW, ROW + COUNT):
        words = words + (tile[i * WORDS + WORD],)
    first, second = unpack_column_tile(words, dtype)
    one = encode_run(first, factors[2 * WORD], (), ELEMENT, ISA)
    return one, encode_run(second, factors[2 * WORD + 1], (), ELEMENT, ISA)


@triton.jit
def store_rows(
    destination, runs, ROW: tl.constexpr, COUNT: tl.constexpr, ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Store the codes (or values) of rows ROW to ROW + COUNT of each register tile, by one store.

    destination: (pointer to units, number of the matrix's first row, first row and unit of the tile, rows of the
    matrix, units in a row). A unit is a thread's int32 of a row, or an int64 of two. runs: the int32 tensors of the
    rows, [ROW_TILES, COL_TILES], those of a row in order. WHOLE: nothing needs a mask.
    """
    ptr, first, row0, unit0, rows, per_row = destination
    if len(runs) == COUNT:
        units = runs
    else:
        units = join_to_int64(runs)
    own: tl.constexpr = len(units) // COUNT  # a thread's units of a row
    units = tl.reshape(stack_tensors(units), (ROW_TILES, COL_TILES, COUNT, own))
    units = restore_axes(tl.permute(units, (2, 0, 1, 3)))
    row = load_index(row0 + tl.arange(0, ROW_TILES) * DEPTH, 1)
    step = load_index(tl.arange(0, COUNT), 0)
    unit = load_index(unit0 + tl.arange(0, COL_TILES) * own, 2) + tl.arange(0, own)[None, None, None, :]
    ptr += (first + row + ROW) * per_row + unit + step.to(tl.int64) * per_row
    # Threads store their own registers: without this, neighbouring columns would be moved to one thread first.
    ptr = tl.max_contiguous(ptr, [1, 1, 1, own])
    if WHOLE:
        tl.store(ptr, units)
    else:
        tl.store(ptr, units, mask=(row < rows - ROW - step) & (unit < per_row))


@triton.jit
def store_pairs(scales_ptr, pairs, batch, row0, block0, rows, blocks, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr):
    """`store_scales` from row0 on for a `pair_of_scales` [pairs, n] of each two neighbouring rows.

    Swizzled scales take one store: on SM100, whose matmuls read them, the kernel then has 3 to 10 % fewer instructions.
    Linear scales take two stores: with one, the registers of an SM90 multiprocessor do not suffice for four programs.
    """
    if SWIZZLED:
        row = row0 + tl.arange(0, 2 * pairs.shape[0])
        store_scales(scales_ptr, split_pairs(pairs), batch, row, block0, rows, blocks, SWIZZLED, ALIGN)
    else:
        row = row0 + 2 * tl.arange(0, pairs.shape[0])
        store_scales(scales_ptr, pairs, batch, row, block0, rows, blocks, SWIZZLED, ALIGN)
        half: tl.constexpr = pairs.dtype.primitive_bitwidth // 2
        store_scales(scales_ptr, pairs >> half, batch, row + 1, block0, rows, blocks, SWIZZLED, ALIGN)


@triton.jit
def encode_turn(
    tile, row_amaxes, column_factors, destination,
    ROW: tl.constexpr, dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr,
    COL_TILES_PER_BLOCK: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, stored: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Encode a turn, each thread's rows from ROW on, two for each pair of `row_amaxes`, and store the rows.

    destination: as in `store_rows`. stored: the dtype at the destination, uint8 for codes or 16-bit floats for
    dequantised values. Returns (scales of the pairs of rows, codes of the columns from `encode_columns`).
    """
    turn: tl.constexpr = 2 * len(row_amaxes)
    scale_pairs, factors = scales_of_pairs(row_amaxes, ELEMENT, SCALE, CONTRACT, dtype, ISA)
    column_runs = ()
    for j in tl.static_range(WORDS):
        column_runs = column_runs + encode_columns(tile, ROW, j, WORDS, turn, column_factors, dtype, ELEMENT,
                                                   ISA)  # fmt: skip
    stored_runs = ()
    for k in tl.static_range(turn):
        factor = repeat_along_row(factors[k], COL_TILES_PER_BLOCK)
        runs = encode_row(tile, (ROW + k) * WORDS, WORDS, factor, dtype, ELEMENT, ISA)
        if stored.primitive_bitwidth == 16:
            byte = (scale_pairs[k // 2].to(tl.int32) >> (8 * (k % 2))) & 255
            scale = repeat_along_row(scale_of_run(byte, ELEMENT, SCALE, ISA), COL_TILES_PER_BLOCK)
            values = ()
            for j in tl.static_range(len(runs)):
                values = values + values_of_run(runs[j], scale, ELEMENT, SCALE, stored, ISA)
            runs = values
        stored_runs = stored_runs + runs
    store_rows(destination, stored_runs, ROW, turn, tile[0].shape[0], tile[0].shape[1], WHOLE)
    return scale_pairs, column_runs


@writes("data_ptr", "columns_ptr", scales_ptr=of_scales(), column_scales_ptr=of_scales("columns_ptr"))
@triton.jit
def quantize_both(
    x_ptr, data_ptr, scales_ptr, columns_ptr, column_scales_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr, WHOLE: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROW_TILES * DEPTH rows by 2 * COL_TILES * WORDS columns.

    x: [batch, rows, cols], strides x_batch, x_row, 1. Codes and scales of x go to data_ptr and scales_ptr, codes and
    scales of x.T to columns_ptr and column_scales_ptr; dequantised values, if data_ptr or columns_ptr points to 16-bit
    floats. WHOLE: tiles divide each matrix, so no mask is needed.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * DEPTH
    col_count: tl.constexpr = 2 * COL_TILES * WORDS
    col_tiles_per_block: tl.constexpr = BLOCK // (2 * WORDS)
    row_tiles_per_block: tl.constexpr = BLOCK // DEPTH
    # Swizzled scales have padding below and beside the scales of the tensor. The tiles cover it.
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 128) * 128 if SWIZZLED else cols
    col_tiles = tl.cdiv(padded_cols, col_count)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False, False)
    batch = batch.to(tl.int64)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    cols_left = tl.minimum(cols - col0, col_count)
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr)
    tile = read_register_tile(x_ptr + batch * x_batch + col0, operands, batch, row0, rows, col0, cols, cols_left, x_row,
                              dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE, ISA, PROLOGUE)  # fmt: skip
    initial = zero_after_barrier(tile[0], ISA)

    column_amaxes = ()
    for j in tl.static_range(WORDS):
        amaxes = word_amaxes(tile, initial, j, DEPTH, WORDS, ISA, dtype)
        column_amaxes = column_amaxes + (block_amaxes_down_column(amaxes, row_tiles_per_block, dtype),)
    column_scales, factors = scales_of_pairs(column_amaxes, ELEMENT, SCALE, CONTRACT, dtype, ISA)
    column_factors = ()
    for j in tl.static_range(2 * WORDS):
        column_factors = column_factors + (repeat_down_column(factors[j], row_tiles_per_block),)

    row_block0 = row_tile * (ROW_TILES // row_tiles_per_block)
    pairs = tl.reshape(
        tl.permute(stack_tensors(column_scales), (1, 2, 0)), (col_count // 2, ROW_TILES // row_tiles_per_block)
    )
    if not takes_values(columns_ptr.dtype):
        store_pairs(column_scales_ptr, pairs, batch, col0, row_block0, cols, tl.cdiv(rows, BLOCK), SWIZZLED,
                    COLUMN_SCALE_ALIGN)  # fmt: skip

    # An int32 holds 8 codes of four bits, or 4 of eight.
    run: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    stored: tl.constexpr = data_ptr.dtype.element_ty
    row_runs: tl.constexpr = WORDS if takes_values(data_ptr.dtype) else 2 * WORDS // run
    own: tl.constexpr = (row_runs + 1) // 2
    unit_type: tl.constexpr = tl.int32 if row_runs == 1 else tl.int64
    per_row = tl.cdiv(cols, BLOCK) * (col_tiles_per_block * own)
    unit0 = col0 // (2 * WORDS) * own
    units_ptr = data_ptr.to(tl.pointer_type(unit_type), bitcast=True)
    destination = (units_ptr, batch * rows, row0, unit0, rows, per_row)
    row_scales = ()
    column_runs = ()
    for i in tl.static_range(0, DEPTH, run):
        row_amaxes = ()
        for k in tl.static_range(i, i + run, 2):
            one = word_amaxes(tile, initial, k * WORDS, WORDS, 1, ISA, dtype)
            other = word_amaxes(tile, initial, (k + 1) * WORDS, WORDS, 1, ISA, dtype)
            amaxes = amaxes_of_two_rows(one, other, dtype)
            row_amaxes = row_amaxes + (block_amaxes_along_row(amaxes, col_tiles_per_block, dtype),)
        scale_pairs, runs = encode_turn(
            tile, row_amaxes, column_factors, destination, i, dtype, ELEMENT, SCALE, CONTRACT, col_tiles_per_block,
            WHOLE, WORDS, stored, ISA,
        )  # fmt: skip
        row_scales = row_scales + scale_pairs
        column_runs = column_runs + runs

    # An int64 holds 16 codes of four bits, or 8 of eight.
    per_block: tl.constexpr = BLOCK // (2 * run)
    column = col0 + tl.arange(0, col_count)
    units = column_units(column_runs, 2 * WORDS)
    blocks = tl.cdiv(rows, BLOCK)
    if takes_values(columns_ptr.dtype):
        store_column_values(columns_ptr, units, split_pairs(pairs), batch * cols + column, row_block0, blocks,
                            column < cols, ELEMENT, SCALE, BLOCK, ISA)  # fmt: skip
    else:
        store_units(columns_ptr, units, batch * cols + column, row_block0 * per_block, blocks * per_block,
                    column < cols, COLUMN_UNIT_ALIGN)  # fmt: skip
    if not takes_values(data_ptr.dtype):
        pairs = tl.reshape(tl.permute(stack_tensors(row_scales), (0, 2, 1)), (row_count // 2, col_count // BLOCK))
        store_pairs(scales_ptr, pairs, batch, row0, col0 // BLOCK, rows, tl.cdiv(cols, BLOCK), SWIZZLED, SCALE_ALIGN)


@triton.jit
def split_pairs(pairs):
    """A `pair_of_scales` [n, blocks] of each two neighbouring rows -> the bits as int32 [2 * n, blocks]."""
    half: tl.constexpr = pairs.dtype.primitive_bitwidth // 2
    bits: tl.constexpr = tl.uint8 if half == 8 else tl.int32
    both = tl.permute(tl.join(pairs.to(bits), (pairs >> half).to(bits)), (0, 2, 1))
    return tl.reshape(both, (2 * pairs.shape[0], pairs.shape[1])).to(tl.int32)


@triton.jit
def column_units(runs, COLUMNS: tl.constexpr):
    """A tile's codes of columns as int64 units [columns, n].

    runs: int32 [ROW_TILES, COL_TILES], a thread's COLUMNS columns fastest.
    """
    n: tl.constexpr = len(runs) // (2 * COLUMNS)
    units = ()
    for j in tl.static_range(COLUMNS):
        for k in tl.static_range(n):
            units = units + join_to_int64((runs[2 * k * COLUMNS + j], runs[(2 * k + 1) * COLUMNS + j]))
    both = stack_tensors(units)
    row_tiles: tl.constexpr = both.shape[0]
    groups: tl.constexpr = both.shape[1]
    both = tl.permute(tl.reshape(both, (row_tiles, groups, COLUMNS, n)), (1, 2, 0, 3))
    return tl.reshape(both, (groups * COLUMNS, row_tiles * n))
