"""The amaxes that dynamic outer scales of groups are made of, as float32 bits (`templates.quantize.amax`).

The outer scale of a tensor is one of each group of rows; that of a row is one of each row or, down the columns, one of
each column of each group.
"""

import torch
import triton
import triton.language as tl

from fp4compile.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.column_tile import column_tile_amax, load_column_tile, transform_column_tile
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.groups import group_of_tile, lanes_of
from fp4compile.templates.device.memory import load_tile
from fp4compile.templates.grouped.heuristics import grouped_amax_config
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.heuristics import column_amax_config
from fp4compile.templates.quantize.views import Matrices


def rows_amax_bits(source: Matrices, offs: torch.Tensor, *, each: bool) -> torch.Tensor:
    """The amax of each group, int32 [G], 0 of an empty one; or (each) of each row in a group, [M]."""
    groups = offs.shape[0]
    bits = torch.zeros(source.rows if each else groups, dtype=torch.int32, device=offs.device)
    config = grouped_amax_config()
    launch(
        grouped_rows_amax,
        (source.rows // config.rows + groups) * ceil_div(source.cols, config.blocks * config.block),
        source.tensor, offs, bits, source.rows, source.cols, source.row_stride, GROUPS=groups, EACH=each,
        ALIGN=source.align, ISA=target_of(offs.device).isa, num_warps=config.num_warps, **config.constants,
    )  # fmt: skip
    return bits


def columns_amax_bits(source: Matrices, offs: torch.Tensor, *, each: bool, transform: bool) -> torch.Tensor:
    """The amax of each group's columns, after the Hadamard transform down the columns of the group if asked.

    int32 [G], 0 of an empty group; or (each) of each column, [G * cols].
    """
    groups = offs.shape[0]
    bits = torch.zeros(groups * (source.cols if each else 1), dtype=torch.int32, device=offs.device)
    config = column_amax_config()
    launch(
        grouped_columns_amax, (source.rows // TILE_ROWS + groups) * ceil_div(source.cols, 2 * config.words),
        source.tensor, offs, bits, source.rows, source.cols, source.row_stride, GROUPS=groups, EACH=each,
        TRANSFORM=transform, ALIGN=source.align, BLOCK=config.block, ROW_TILES=TILE_ROWS // config.block,
        WORDS=config.words, ISA=target_of(offs.device).isa, num_warps=config.num_warps,
    )  # fmt: skip
    return bits


@triton.jit
def grouped_rows_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_row,
    GROUPS: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, which are 0 before, to the amax of each group or (EACH) of each row of a group.

    x: [rows, cols], strides x_row and 1. offs: int32 [GROUPS].
    """
    lane = tl.arange(0, lanes_of(GROUPS))
    before = tl.load(offs_ptr + lane - 1, mask=(lane > 0) & (lane <= GROUPS), other=0)
    offs = tl.load(offs_ptr + lane, mask=lane < GROUPS, other=2147483647)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_tiles = tl.maximum(tl.cdiv(cols, BLOCKS * BLOCK), 1)
    col0 = tl.program_id(0) % col_tiles * (BLOCKS * BLOCK)
    group, start, end, row0 = group_of_tile(before, offs, rows, tl.program_id(0) // col_tiles, ROWS, GROUPS)
    if group < GROUPS:
        row = row0 + tl.arange(0, ROWS)
        cols_left = tl.minimum(cols - col0, BLOCKS * BLOCK)
        words = load_tile(x_ptr + row.to(tl.int64) * x_row + col0, cols_left, row < end, dtype, ROWS, BLOCKS, BLOCK, 1,
                          ALIGN)  # fmt: skip
        bits = tl.max(word_amax(words, 2, ISA, dtype), 1)
        if EACH:
            tl.atomic_max(amax_ptr + row, bits, mask=row < end, sem="relaxed")
        else:
            tl.atomic_max(amax_ptr + group, tl.max(bits, 0), sem="relaxed")


@triton.jit
def grouped_columns_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_row,
    GROUPS: tl.constexpr, EACH: tl.constexpr, TRANSFORM: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, which are 0 before, to the amax of each group or (EACH) of each of its columns.

    x, offs: as in `grouped_rows_amax`. TRANSFORM: of the columns after the Hadamard transform.
    """
    lane = tl.arange(0, lanes_of(GROUPS))
    before = tl.load(offs_ptr + lane - 1, mask=(lane > 0) & (lane <= GROUPS), other=0)
    offs = tl.load(offs_ptr + lane, mask=lane < GROUPS, other=2147483647)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_count: tl.constexpr = 2 * WORDS
    col_tiles = tl.maximum(tl.cdiv(cols, col_count), 1)
    col0 = tl.program_id(0) % col_tiles * col_count
    group, start, end, row0 = group_of_tile(
        before, offs, rows, tl.program_id(0) // col_tiles, ROW_TILES * BLOCK, GROUPS
    )
    if group < GROUPS:
        cols_left = tl.minimum(cols - col0, col_count)
        tile = load_column_tile(x_ptr + col0, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN,
                                False)  # fmt: skip
        if TRANSFORM:
            _, _, first_amax, second_amax = transform_column_tile(tile, dtype, ISA)
        else:
            first_amax, second_amax = column_tile_amax(tile, ISA, dtype)
        if EACH:
            column = col0 + tl.arange(0, col_count)
            bits = tl.reshape(tl.join(tl.max(first_amax, 0), tl.max(second_amax, 0)), (col_count,))
            at = amax_ptr + group.to(tl.int64) * cols + column
            tl.atomic_max(at, bits, mask=column < cols, sem="relaxed")
        else:
            tl.atomic_max(amax_ptr + group, tl.max(tl.max(tl.maximum(first_amax, second_amax), 1), 0), sem="relaxed")
