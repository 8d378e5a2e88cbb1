"""Quantise grouped rows down the columns of each group, with an optional Hadamard transform, and along their elements.

The groups lie in the output one after the other, each padded with zeros to tiles of 128 rows: tile t has the padded
rows from 128 * t on, and they are of one group.
"""

import math

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div, swizzled_numel
from fp4compile.templates.device.block_scales import make_outer_scales, outer_scales
from fp4compile.templates.device.column_tile import load_column_tile
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tiles_along
from fp4compile.templates.device.values import takes_values
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.column import (
    even_and_odd,
    interleave_columns,
    read_columns,
    scale_and_encode_columns,
    store_column_values,
)
from fp4compile.templates.quantize.heuristics import ragged_column_config
from fp4compile.templates.quantize.outputs import Outer, Output, format_constants, store_aligns
from fp4compile.templates.quantize.ragged_rows import quantize_row_tile, store_group_outers, store_row_scales
from fp4compile.templates.quantize.row import seed_pointer
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View


def ragged_columns_launch(
    source: Source,
    offs: View,
    fmt: BlockFormat,
    outers: tuple[Outer, Outer],
    layout: str,
    columns: Output,
    rows: Output | None = None,
    *,
    seed: torch.Tensor | None,
    transform: bool,
) -> Launch:
    """The launch of the kernel for columns and, if `rows` is given, rows. outers: see `ragged_amax.outers_of`."""
    groups, (along, down) = offs.sizes[0], outers
    constants = format_constants(fmt)
    config = ragged_column_config(fmt.element, constants["BLOCK"])
    padded = padded_rows(source.rows, groups)
    cols = ceil_div(source.cols, TILE_ROWS) * TILE_ROWS if layout == "swizzled" else source.cols
    data, isa = columns.data, source.target.isa
    whole = statically_true(source.cols % max(2 * config.words, TILE_ROWS) == 0)
    constants |= {
        "GROUPS": groups, "ALONG_ROWS": rows is not None, "TRANSFORM": transform, "SEEDED": seed is not None,
        "OUTER": down.mode, "SWIZZLED": layout == "swizzled", "ALIGN": source.align,
        **store_aligns(source.cols, fmt), "WHOLE_COLS": isa >= 100 and whole, "ISA": isa, **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, offs, *(rows or columns).pointers, *along.pointers(data), *columns.pointers,
        *down.pointers(data), seed_pointer(seed, data), source.rows, source.cols, padded, source.row_stride,
    )  # fmt: skip
    grid = padded // TILE_ROWS * ceil_div(cols, 2 * config.words)
    return Launch(quantize_grouped_columns, grid, arguments, constants, config.num_warps)


def empty_columns(source: Source, groups: int, fmt: BlockFormat, layout: str, values: bool) -> Output:
    """Uninitialised memory for the results down the columns of padded groups; swizzled scales are flat."""
    rows = padded_rows(source.rows, groups)
    if values:
        data = source.tensor.new_empty((source.cols, rows), dtype=fmt.values_dtype)
        return Output(View.flat(data, source.cols * rows), None, rows, fmt)
    row_bytes = rows // 2 if fmt.packed else rows
    data = source.tensor.new_empty((source.cols, row_bytes), dtype=torch.uint8)
    codes = View.flat(data, source.cols * row_bytes)
    if fmt.scale is None:
        return Output(codes, None, rows, fmt)
    blocks = rows // fmt.block_cols
    shape = (swizzled_numel(source.cols, blocks),) if layout == "swizzled" else (source.cols, blocks)
    scales = source.tensor.new_empty(shape, dtype=torch.uint8)
    return Output(codes, View.flat(scales, math.prod(shape)), rows, fmt)


@triton.jit
def quantize_grouped_columns(
    x_ptr, offs_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr,
    columns_ptr, column_scales_ptr, column_outer_ptr, column_amax_ptr, seed_ptr, rows, cols, padded_rows, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    ALONG_ROWS: tl.constexpr, TRANSFORM: tl.constexpr, SEEDED: tl.constexpr, OUTER: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    WHOLE_COLS: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of 128 padded rows (ROW_TILES blocks) of one group by 2 * WORDS columns.

    x: [rows, cols], strides x_row and 1. offs: int32 [GROUPS]. Codes [cols, padded_rows] go to columns_ptr or, if
    columns_ptr points to 16-bit floats, dequantised values. Random bits are stream 1.
    OUTER "none", "tensor": as in `outer_scales`. "group amax", "each amax": outer scales are made from the bits at
    column_amax_ptr, of each group [GROUPS] or of each column of a group [GROUPS, cols], and stored at column_outer_ptr.
    ALONG_ROWS: the tile is also quantised as in `quantize_grouped_rows`, whose pointers come first. WHOLE_COLS: tiles
    divide the columns, so that stores down the columns, and stores of scales, need no masks. Only for SM100.
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    unsigned: tl.constexpr = ISA >= 100
    padded_cols = tiles_along(cols, 128, unsigned) * 128 if SWIZZLED else cols
    col_tiles = tl.maximum(tiles_along(padded_cols, col_count, unsigned), 1)
    tile_index = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    group, start, end, row0 = group_of_tile(before, offs, rows, tile_index, row_count, GROUPS)
    col0 = col_tile * col_count
    column = col0 + tl.arange(0, col_count)
    if TRANSFORM or not ALONG_ROWS:  # else rows and columns share outer scales, which are written through one pointer
        store_group_outers(column_amax_ptr, column_outer_ptr, tile_index, col_tile, OUTER, GROUPS, SCALE, CONTRACT, ISA)
    if ALONG_ROWS:
        store_group_outers(amax_ptr, outer_ptr, tile_index, col_tile, OUTER, GROUPS, SCALE, CONTRACT, ISA)
    if OUTER == "each amax":  # noqa: SIM102 (the constexpr condition stays alone)
        if tile_index < GROUPS:  # tile t stores the outer scales of group t, like `store_group_outers`
            at = tile_index.to(tl.int64) * cols + column
            make_outer_scales(column_amax_ptr + at, column_outer_ptr, at, column < cols, True, SCALE, CONTRACT, ISA)

    # An int64 holds 16 codes of four bits, or 8 of eight.
    bits: tl.constexpr = 4 if ELEMENT == "e2m1" else 8
    per_block: tl.constexpr = BLOCK * bits // 64
    blocks = padded_rows // BLOCK
    block0 = tile_index * ROW_TILES
    units = tl.zeros((col_count, ROW_TILES * per_block), tl.int64)
    byte = tl.zeros((col_count, ROW_TILES), tl.int32)
    row_byte = tl.zeros((row_count, col_count // BLOCK), tl.int32)
    # Half of the programs have no group where groups are equal. Zeros of their own need no exchange of lanes. (Without
    # block scales, ptxas would take 40 registers more in this form.)
    leaves: tl.constexpr = ISA >= 100 and SCALE != "none"
    if leaves and group >= GROUPS:
        store_tile(columns_ptr, column_scales_ptr, data_ptr, scales_ptr, units, byte, row_byte, column, block0,
                   tile_index, col_tile, row0, end, False, cols, blocks, ELEMENT, SCALE, BLOCK, ALONG_ROWS, SWIZZLED,
                   SCALE_ALIGN, WHOLE_COLS, ISA)  # fmt: skip
        return
    if leaves or group < GROUPS:
        cols_left = tl.minimum(cols - col0, col_count)
        if ALONG_ROWS:
            row = row0 + tl.arange(0, row_count)
            words = load_tile(x_ptr + row.to(tl.int64) * x_row + col0, cols_left, row < end, dtype, row_count,
                              col_count // BLOCK, BLOCK, VECTORS, ALIGN)  # fmt: skip
            row_byte = quantize_row_tile(
                words, data_ptr, outer_ptr, amax_ptr, seed_ptr, col_tile, group, row0, end, cols, dtype,
                ELEMENT, SCALE, CONTRACT, BLOCK, SEEDED, OUTER, UNIT_ALIGN, ISA,
            )  # fmt: skip
        tile = load_column_tile(x_ptr + col0, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, False)
        first, second, first_amax, second_amax = read_columns(tile, TRANSFORM, dtype, ISA)
        encodes, decodes = outers_of_columns(column_outer_ptr, column_amax_ptr, group, column, cols, OUTER, SCALE,
                                             CONTRACT, ISA)  # fmt: skip
        even_column = col0.to(tl.int64) + 2 * tl.arange(0, WORDS)[None, :]
        units, first_byte, second_byte = scale_and_encode_columns(
            tile, first, second, first_amax, second_amax, encodes, decodes, seed_ptr, even_column, block0, blocks,
            dtype, ELEMENT, SCALE, CONTRACT, BLOCK, OUTER != "none", TRANSFORM, SCALE == "none" and OUTER == "tensor",
            SEEDED, 1, ISA,
        )  # fmt: skip
        rows_left = end - row0
        if rows_left < row_count:
            units = clear_codes(units, rows_left if SCALE == "none" else tl.cdiv(rows_left, BLOCK) * BLOCK, bits)
        if SCALE != "none":
            byte = interleave_columns(first_byte[:, :, None], second_byte[:, :, None])
            byte = tl.where((tl.arange(0, ROW_TILES) * BLOCK < rows_left)[None, :], byte, 0)
    store_tile(columns_ptr, column_scales_ptr, data_ptr, scales_ptr, units, byte, row_byte, column, block0,
               tile_index, col_tile, row0, end, leaves or group < GROUPS, cols, blocks, ELEMENT, SCALE, BLOCK,
               ALONG_ROWS, SWIZZLED, SCALE_ALIGN, WHOLE_COLS, ISA)  # fmt: skip


@triton.jit
def store_tile(
    columns_ptr, column_scales_ptr, data_ptr, scales_ptr, units, byte, row_byte, column, block0, tile_index, col_tile,
    row0, end, exists, cols, blocks, ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    ALONG_ROWS: tl.constexpr, SWIZZLED: tl.constexpr, SCALE_ALIGN: tl.constexpr, WHOLE_COLS: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Store a tile's codes (or values) and scales down the columns and, with ALONG_ROWS, the scales of its rows.

    units, byte, row_byte: from `scale_and_encode_columns` and `quantize_row_tile`. block0: the tile's first block in
    each of the columns `column`, which have `blocks` blocks. exists: whether the tile has rows, of row0 to `end`.
    """
    unsigned: tl.constexpr = ISA >= 100
    per_block: tl.constexpr = units.shape[1] // byte.shape[1]
    if takes_values(columns_ptr.dtype):
        store_column_values(columns_ptr, units, byte, column, block0, blocks, column < cols, ELEMENT, SCALE, BLOCK, ISA)
    else:
        store_units(columns_ptr, units, column, block0 * per_block, blocks * per_block, column < cols, 2,
                    WHOLE_COLS, unsigned)  # fmt: skip
    if SCALE != "none":
        if not takes_values(columns_ptr.dtype):
            store_scales(column_scales_ptr, byte, tile_index * 0, column, block0, cols, blocks, SWIZZLED, 128 // BLOCK,
                         WHOLE_COLS, unsigned)  # fmt: skip
        if ALONG_ROWS and not takes_values(data_ptr.dtype):
            row_end = tl.where(exists, end, 0)
            store_row_scales(scales_ptr, row_byte, tile_index, col_tile, row0, row_end, cols, BLOCK, SWIZZLED,
                             SCALE_ALIGN, WHOLE_COLS, ISA)  # fmt: skip


@triton.jit
def outers_of_columns(outer_ptr, amax_ptr, group, column, cols, OUTER: tl.constexpr, SCALE: tl.constexpr,
                      CONTRACT: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """The outer scales of a group's columns: (encode, decode), each a pair for the even and the odd columns."""
    if OUTER == "each amax":
        at = group.to(tl.int64) * cols + column
        encode, decode = make_outer_scales(amax_ptr + at, outer_ptr, at, column < cols, False, SCALE, CONTRACT, ISA)
        return even_and_odd(encode), even_and_odd(decode)
    else:
        if OUTER == "group amax":
            encode, decode = make_outer_scales(amax_ptr + group, outer_ptr, 0, True, False, SCALE, CONTRACT, ISA)
        else:
            encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, 1, CONTRACT, ISA)
        return (encode, encode), (decode, decode)


@triton.jit
def clear_codes(units, rows, bits: tl.constexpr):
    """Clear the codes from number `rows` of each column on, in units [columns, n]. bits: bits of a code.

    With an outer scale that is not finite, the zeros beyond a group have nonzero codes.
    """
    kept = tl.maximum(rows * bits - 64 * tl.arange(0, units.shape[1]), 0)
    mask = tl.where(kept >= 64, -1, (tl.full(kept.shape, 1, tl.int64) << tl.minimum(kept, 63).to(tl.int64)) - 1)
    return units & mask[None, :]
