"""Quantise grouped rows along the rows of each group, after the Hadamard transform if asked.

The groups lie in the output one after the other, each padded with zeros to tiles of 128 rows: tile t has the padded
rows from 128 * t on, and they are of one group.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats import BlockFormat
from fp4compile.groups import padded_rows
from fp4compile.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.block_scales import block_scale, make_outer_scales, outer_scales
from fp4compile.templates.device.column_tile import (
    column_tile_amax,
    load_column_tile,
    transform_column_tile,
    unpack_column_tile,
)
from fp4compile.templates.device.groups import group_of_tile, lanes_of
from fp4compile.templates.device.memory import store_scales, store_units
from fp4compile.templates.grouped.amax import columns_amax_bits, rows_amax_bits
from fp4compile.templates.grouped.heuristics import grouped_column_config
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.column import encode_columns, interleave_columns
from fp4compile.templates.quantize.views import Matrices, Outer, format_constants, or_placeholder


def launch_grouped_columns(
    source: Matrices,
    offs: torch.Tensor,
    fmt: BlockFormat,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None,
    layout: str,
    seed: torch.Tensor | None,
    transform: bool,
) -> torch.Tensor | None:
    """Launch the kernel, after that of the amaxes if there are any; returns the outer scale.

    data [cols, bytes], scales (linear [cols, blocks], or flat): uint8 to fill. outer: float32 [], or None.
    """
    groups = offs.shape[0]
    outers = _outers_of(source, offs, fmt, outer, transform)
    constants = format_constants(fmt)
    block = constants["BLOCK"]
    config = grouped_column_config(fmt.element, block)
    padded = padded_rows(source.rows, groups)
    cols = ceil_div(source.cols, TILE_ROWS) * TILE_ROWS if layout == "swizzled" else source.cols
    launch(
        quantize_grouped_columns, padded // TILE_ROWS * ceil_div(cols, 2 * config.words),
        source.tensor, offs, data, or_placeholder(scales, data), *outers.arguments(data), or_placeholder(seed, data),
        source.rows, source.cols, padded, source.row_stride, **constants, GROUPS=groups, TRANSFORM=transform,
        SEEDED=seed is not None, OUTER=outers.mode, SWIZZLED=layout == "swizzled", ALIGN=source.align,
        ROW_TILES=config.row_tiles, WORDS=config.words, ISA=target_of(offs.device).isa, num_warps=config.num_warps,
    )  # fmt: skip
    return outers.scale


def _outers_of(
    source: Matrices, offs: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None, transform: bool
) -> Outer:
    if outer is not None:
        return Outer(outer, outer, "tensor")
    if fmt.outer is None:
        return Outer(None, None, "none")
    each, groups = fmt.outer == "row", offs.shape[0]
    if each or transform:
        amax = columns_amax_bits(source, offs, each=each, transform=transform)
    else:
        amax = rows_amax_bits(source, offs, each=False)
    shape = (groups, source.cols, 1) if each else (groups,)
    scale = source.tensor.new_empty(shape, dtype=torch.float32)
    return Outer(scale, amax, "column amax" if each else "group amax")


@triton.jit
def quantize_grouped_columns(
    x_ptr, offs_ptr, columns_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, padded_rows, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    TRANSFORM: tl.constexpr, SEEDED: tl.constexpr, OUTER: tl.constexpr, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
    ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of 128 padded rows (ROW_TILES blocks) of one group by 2 * WORDS columns.

    x: [rows, cols], strides x_row and 1. offs: int32 [GROUPS]. Codes [cols, padded_rows] go to columns_ptr. Random bits
    are stream 1. OUTER "none", "tensor": as in `outer_scales`. "group amax", "column amax": made from the bits at
    amax_ptr, of each group [GROUPS] or of each of its columns [GROUPS, cols], and stored at outer_ptr.
    """
    lane = tl.arange(0, lanes_of(GROUPS))
    before = tl.load(offs_ptr + lane - 1, mask=(lane > 0) & (lane <= GROUPS), other=0)
    offs = tl.load(offs_ptr + lane, mask=lane < GROUPS, other=2147483647)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    has_outer: tl.constexpr = OUTER != "none"
    col_tiles = tl.maximum(tl.cdiv(tl.cdiv(cols, 128) * 128 if SWIZZLED else cols, col_count), 1)
    tile_index = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    group, start, end, row0 = group_of_tile(before, offs, rows, tile_index, row_count, GROUPS)
    end = tl.where(group < GROUPS, end, 0)
    last = tl.minimum(group, GROUPS - 1)
    col0 = col_tile * col_count
    cols_left = tl.minimum(cols - col0, col_count)
    column = col0 + tl.arange(0, col_count)
    tile = load_column_tile(x_ptr + col0, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN,
                            False)  # fmt: skip
    if TRANSFORM:
        first, second, first_amax, second_amax = transform_column_tile(tile, dtype, ISA)
    else:
        first, second = unpack_column_tile(tile, dtype)
        first_amax, second_amax = column_tile_amax(tile, ISA, dtype)

    # There are at least as many tiles as groups: tile t stores the outer scales of group t, also of an empty one.
    if OUTER == "column amax":
        mask = column < cols
        if tile_index < GROUPS:
            at = tile_index.to(tl.int64) * cols + column
            make_outer_scales(amax_ptr + at, outer_ptr, at, mask, True, SCALE, CONTRACT, ISA)
        at = last.to(tl.int64) * cols + column
        encode, decode = make_outer_scales(amax_ptr + at, outer_ptr, at, mask, False, SCALE, CONTRACT, ISA)
        first_encode, second_encode = tl.split(tl.reshape(encode, (1, WORDS, 2)))
        first_decode, second_decode = tl.split(tl.reshape(decode, (1, WORDS, 2)))
    else:
        if OUTER == "group amax":
            if (tile_index < GROUPS) & (col_tile == 0):
                make_outer_scales(amax_ptr + tile_index, outer_ptr, tile_index, True, True, SCALE, CONTRACT, ISA)
            first_encode, first_decode = make_outer_scales(amax_ptr + last, outer_ptr, 0, True, False, SCALE, CONTRACT,
                                                           ISA)  # fmt: skip
        else:
            first_encode, first_decode = outer_scales(OUTER, outer_ptr, amax_ptr, 1, CONTRACT, ISA)
        second_encode = first_encode
        second_decode = first_decode
    first_byte, first_factor = block_scale(
        first_amax, first_encode, first_decode, has_outer, ELEMENT, SCALE, CONTRACT, ISA
    )
    second_byte, second_factor = block_scale(
        second_amax, second_encode, second_decode, has_outer, ELEMENT, SCALE, CONTRACT, ISA
    )

    blocks = padded_rows // BLOCK
    block0 = tile_index * ROW_TILES
    even_column = col0.to(tl.int64) + 2 * tl.arange(0, WORDS)[None, :]
    first_units, second_units = encode_columns(
        tile, first, second, first_factor, second_factor, seed_ptr, even_column * blocks + block0, blocks,
        dtype, ELEMENT, SCALE, BLOCK, TRANSFORM, SCALE == "none" and OUTER == "tensor", SEEDED, 1, ISA,
    )  # fmt: skip
    units = interleave_columns(first_units, second_units)
    # An int64 holds 16 codes of four bits, or 8 of eight. Nothing is left of blocks that begin beyond the group: an
    # outer scale that is not finite makes codes of zeros. Without block scales, each row counts as a block.
    bits: tl.constexpr = 4 if ELEMENT == "e2m1" else 8
    rows_left = end - row0
    rows_left = rows_left if SCALE == "none" else tl.cdiv(rows_left, BLOCK) * BLOCK
    kept = tl.maximum(rows_left * bits - 64 * tl.arange(0, units.shape[1]), 0)
    mask = tl.where(kept >= 64, -1, (tl.full(kept.shape, 1, tl.int64) << tl.minimum(kept, 63).to(tl.int64)) - 1)
    per_block: tl.constexpr = BLOCK * bits // 64
    store_units(columns_ptr, units & mask[None, :], column, block0 * per_block, blocks * per_block, column < cols, 2)
    if SCALE != "none":
        bytes = interleave_columns(first_byte[:, :, None], second_byte[:, :, None])
        inside = row0 + tl.arange(0, ROW_TILES) * BLOCK < end
        store_scales(scales_ptr, tl.where(inside[None, :], bytes, 0), tile_index * 0, column, block0, cols, blocks,
                     SWIZZLED, 128 // BLOCK)  # fmt: skip
