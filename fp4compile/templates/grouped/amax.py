"""The amaxes that dynamic outer scales of groups are made of, as float32 bits (`templates.quantize.amax`).

The outer scale of a tensor is one of each group of rows; that of a row is one of each row or, down the columns, one of
each column of each group.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.column_tile import column_tile_amax, transform_column_tile
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.prologue import read_column_tile, read_tile
from fp4compile.templates.grouped.heuristics import grouped_amax_config
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.amax import raise_row_amaxes
from fp4compile.templates.quantize.heuristics import column_amax_config
from fp4compile.templates.quantize.views import Matrices, Outer


def outer_of_rows(source: Matrices, offs: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None) -> Outer:
    """The outer scales along the elements of rows: the given one (float32 []), none, or those of each group or row."""
    if outer is not None or fmt.outer is None:
        return Outer(outer, outer, "none" if outer is None else "tensor")
    each = fmt.outer == "row"
    return _made(source, rows_amax_bits(source, offs, each=each), (source.rows, 1) if each else offs.shape)


def outers_of(
    source: Matrices, offs: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None, *, with_rows: bool,
    transform: bool,
) -> tuple[Outer, Outer]:  # fmt: skip
    """Those of the rows (of no meaning unless with_rows) and those along the rows of groups: of each group or column.

    transform: the Hadamard transform along the rows of groups.
    """
    each, groups = fmt.outer == "row", offs.shape[0]
    if outer is not None or not (each or (transform and fmt.outer is not None)):
        both = outer_of_rows(source, offs, fmt, outer)
        return both, both
    bits = columns_amax_bits(source, offs, each=each, transform=transform, with_rows=with_rows)
    count = groups * (source.cols if each else 1)
    down = _made(source, bits.narrow(0, bits.shape[0] - count, count), (groups, source.cols, 1) if each else (groups,))
    if not with_rows:
        return down, down
    lead = source.rows if each else groups
    return _made(source, bits.narrow(0, 0, lead), (source.rows, 1) if each else (groups,)), down


def _made(source: Matrices, amax: torch.Tensor, shape: tuple) -> Outer:
    """Outer scales to be made from amax bits: one of each group, [G], or of each row or column."""
    mode = "group amax" if len(shape) == 1 else "each amax"
    return Outer(source.tensor.new_empty(shape, dtype=torch.float32), amax, mode)


def rows_amax_bits(source: Matrices, offs: torch.Tensor, *, each: bool) -> torch.Tensor:
    """The amax of each group, int32 [G], 0 of an empty one; or (each) of each row in a group, [M]."""
    groups = offs.shape[0]
    bits = torch.zeros(source.rows if each else groups, dtype=torch.int32, device=offs.device)
    config = grouped_amax_config()
    launch(
        source.read_by(grouped_rows_amax),
        (source.rows // config.rows + groups) * ceil_div(source.cols, config.blocks * config.block),
        source.tensor, offs, bits, source.rows, source.cols, source.row_stride, *source.operand_args, GROUPS=groups,
        EACH=each, ALIGN=source.align, ISA=target_of(offs.device).isa, num_warps=config.num_warps, **config.constants,
    )  # fmt: skip
    return bits


def columns_amax_bits(
    source: Matrices, offs: torch.Tensor, *, each: bool, transform: bool, with_rows: bool
) -> torch.Tensor:
    """The amax of each group's columns, after the Hadamard transform down the columns of the group if asked.

    int32 [G], 0 of an empty group; or (each) of each column, [G * cols]. with_rows: first come what `rows_amax_bits`
    finds, [G + G], or (each) [M + G * cols].
    """
    groups = offs.shape[0]
    count = groups * (source.cols if each else 1) + ((source.rows if each else groups) if with_rows else 0)
    bits = torch.zeros(count, dtype=torch.int32, device=offs.device)
    config = column_amax_config()
    launch(
        source.read_by(grouped_columns_amax),
        (source.rows // TILE_ROWS + groups) * ceil_div(source.cols, 2 * config.words),
        source.tensor, offs, bits, source.rows, source.cols, source.row_stride, *source.operand_args, GROUPS=groups,
        EACH=each, ALONG_ROWS=with_rows, TRANSFORM=transform, ALIGN=source.align, BLOCK=config.block,
        ROW_TILES=TILE_ROWS // config.block, WORDS=config.words, ISA=target_of(offs.device).isa,
        num_warps=config.num_warps,
    )  # fmt: skip
    return bits


@triton.jit
def grouped_rows_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, which are 0 before, to the amax of each group or (EACH) of each row of a group.

    x: [rows, cols], strides x_row and 1. offs: int32 [GROUPS].
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr)
    col_tiles = tl.maximum(tl.cdiv(cols, BLOCKS * BLOCK), 1)
    col0 = tl.program_id(0) % col_tiles * (BLOCKS * BLOCK)
    group, start, end, row0 = group_of_tile(before, offs, rows, tl.program_id(0) // col_tiles, ROWS, GROUPS)
    if group < GROUPS:
        row = row0 + tl.arange(0, ROWS)
        cols_left = tl.minimum(cols - col0, BLOCKS * BLOCK)
        words = read_tile(x_ptr + row.to(tl.int64) * x_row + col0, operands, group * 0, row, end, col0, cols, cols_left,
                          dtype, ROWS, BLOCKS, BLOCK, 1, ALIGN, False, ISA, False)  # fmt: skip
        bits = tl.max(word_amax(words, 2, ISA, dtype), 1)
        if EACH:
            tl.atomic_max(amax_ptr + row, bits, mask=row < end, sem="relaxed")
        else:
            tl.atomic_max(amax_ptr + group, tl.max(bits, 0), sem="relaxed")


@triton.jit
def grouped_columns_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, ALONG_ROWS: tl.constexpr, TRANSFORM: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, which are 0 before, to the amax of each group or (EACH) of each of its columns.

    x, offs: as in `grouped_rows_amax`. TRANSFORM: of the columns after the Hadamard transform. ALONG_ROWS: before these
    come the amaxes that `grouped_rows_amax` finds. (One pointer for all: see `quantize.amax.columns_amax`.)
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr)
    col_count: tl.constexpr = 2 * WORDS
    col_tiles = tl.maximum(tl.cdiv(cols, col_count), 1)
    col0 = tl.program_id(0) % col_tiles * col_count
    group, start, end, row0 = group_of_tile(
        before, offs, rows, tl.program_id(0) // col_tiles, ROW_TILES * BLOCK, GROUPS
    )
    if group < GROUPS:
        cols_left = tl.minimum(cols - col0, col_count)
        tile = read_column_tile(x_ptr + col0, operands, group * 0, row0, end, col0, cols, cols_left, x_row, dtype,
                                BLOCK, ROW_TILES, WORDS, ALIGN, False, ISA, False)  # fmt: skip
        if ALONG_ROWS:
            if EACH:
                raise_row_amaxes(amax_ptr, tile, row0, end, dtype, ISA)
                amax_ptr += rows
            else:
                raise_to_largest(amax_ptr + group, *column_tile_amax(tile, ISA, dtype))
                amax_ptr += GROUPS
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
            raise_to_largest(amax_ptr + group, first_amax, second_amax)


@triton.jit
def raise_to_largest(amax_ptr, first, second):
    """Raise one int32 to the largest of two matrices of amax bits."""
    tl.atomic_max(amax_ptr, tl.max(tl.max(tl.maximum(first, second), 1), 0), sem="relaxed")
