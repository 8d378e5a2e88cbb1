"""The amaxes from which dynamic outer scales of groups are made, as float32 bits (see `templates.quantize.amax`).

A format with an outer scale of the tensor gets one for each group of rows. A format with an outer scale of each row
gets one for each row or, down the columns, one for each column of each group.
"""

import math

import torch
import triton
import triton.language as tl

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.column_tile import column_tile_amax, load_column_tile, transform_column_tile
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.memory import load_tile, tiles_along
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.amax import raise_row_amaxes
from fp4compile.templates.quantize.heuristics import column_amax_config, ragged_amax_config
from fp4compile.templates.quantize.outputs import Outer
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View


def outer_of_rows(source: Source, offs: View, fmt: BlockFormat, static: torch.Tensor | None) -> Outer:
    """The outer scales along the elements of rows: static (float32 []), none, or computed for each group or row.

    They are made of the source's largest magnitudes, which a launch finds where they are not given.
    """
    if static is not None:
        return Outer("tensor", View.flat(static, 1))
    if fmt.outer is None:
        return Outer("none")
    if source.amax_bits is not None:
        return _made(source, source.amax_bits, offs.sizes, ())
    each = fmt.outer == "row"
    amax, launch = amax_of_rows(source, offs, each=each)
    return _made(source, amax, (source.rows, 1) if each else offs.sizes, (launch,))


def outers_of(
    source: Source, offs: View, fmt: BlockFormat, static: torch.Tensor | None, *, with_rows: bool, transform: bool
) -> tuple[Outer, Outer]:
    """The outer scales along the elements of rows, and down the columns of groups: one for each group or column.

    The first Outer is unused unless with_rows. The second Outer has the launches that find all amaxes.
    transform: whether the Hadamard transform is applied down the columns of groups.
    """
    each, groups = fmt.outer == "row", offs.sizes[0]
    if static is not None or not (each or (transform and fmt.outer is not None)):
        both = outer_of_rows(source, offs, fmt, static)
        return both, both
    bits, launch = amax_of_columns(source, offs, each=each, transform=transform, with_rows=with_rows)
    count, lead = groups * (source.cols if each else 1), source.rows if each else groups
    first = lead if with_rows else 0
    down = _made(
        source, _part(bits, first, count), (groups, source.cols, 1) if each else (groups,), (launch,)
    )  # fmt: skip
    if not with_rows:
        return down, down
    return _made(source, _part(bits, 0, lead), (source.rows, 1) if each else (groups,), ()), down


def _part(bits: View, start, count) -> View:
    return View.flat(bits.tensor.narrow(0, start, count), count)


def _made(source: Source, amax: View, shape: tuple, launches: tuple[Launch, ...]) -> Outer:
    """Outer scales to be made from amax bits: one for each group, [G], or for each row or column."""
    mode = "group amax" if len(shape) == 1 else "each amax"
    scale = source.tensor.new_empty(shape, dtype=torch.float32)
    return Outer(mode, View.flat(scale, math.prod(shape)), amax, launches)


def amax_of_rows(source: Source, offs: View, *, each: bool) -> tuple[View, Launch]:
    """(amaxes of the groups, int32 [G], 0 for an empty group, or (each) of the rows of groups, [M]; their launch)."""
    groups = offs.sizes[0]
    count = source.rows if each else groups
    found = View.flat(torch.zeros(count, dtype=torch.int32, device=source.tensor.device), count)
    config = ragged_amax_config()
    constants = {
        "GROUPS": groups, "EACH": each, "ALIGN": source.align, "ISA": source.target.isa, **config.constants
    }  # fmt: skip
    grid = (source.rows // config.rows + groups) * ceil_div(source.cols, config.blocks * config.block)
    arguments = source.view, offs, found, source.rows, source.cols, source.row_stride
    return found, Launch(grouped_rows_amax, grid, arguments, constants, config.num_warps)


def amax_of_columns(source: Source, offs: View, *, each: bool, transform: bool, with_rows: bool) -> tuple[View, Launch]:
    """(amaxes of the groups' columns, with the Hadamard transform down the columns if `transform`; their launch).

    int32 [G], 0 for an empty group; or (each) one for each column, [G * cols]. with_rows: the amaxes of `amax_of_rows`
    come first, [G + G], or (each) [M + G * cols].
    """
    groups = offs.sizes[0]
    count = groups * (source.cols if each else 1) + ((source.rows if each else groups) if with_rows else 0)
    found = View.flat(torch.zeros(count, dtype=torch.int32, device=source.tensor.device), count)
    config = column_amax_config()
    constants = {
        "GROUPS": groups, "EACH": each, "ALONG_ROWS": with_rows, "TRANSFORM": transform, "ALIGN": source.align,
        "BLOCK": config.block, "ROW_TILES": TILE_ROWS // config.block, "WORDS": config.words,
        "ISA": source.target.isa,
    }  # fmt: skip
    grid = (source.rows // TILE_ROWS + groups) * ceil_div(source.cols, 2 * config.words)
    arguments = source.view, offs, found, source.rows, source.cols, source.row_stride
    return found, Launch(grouped_columns_amax, grid, arguments, constants, config.num_warps)


@triton.jit
def grouped_rows_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_row,
    GROUPS: tl.constexpr, EACH: tl.constexpr, ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, initially 0, to the amax of each group or (EACH) of each row of a group.

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
    col_tiles = tl.maximum(tiles_along(cols, BLOCKS * BLOCK, ISA >= 100), 1)
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
    GROUPS: tl.constexpr, EACH: tl.constexpr, ALONG_ROWS: tl.constexpr, TRANSFORM: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, initially 0, to the amax of each group or (EACH) of each of its columns.

    x, offs: as in `grouped_rows_amax`. TRANSFORM: apply the Hadamard transform to the columns first. ALONG_ROWS: the
    amaxes of `grouped_rows_amax` come before. (One pointer for all: see `quantize.amax.columns_amax`.)
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    col_count: tl.constexpr = 2 * WORDS
    col_tiles = tl.maximum(tiles_along(cols, col_count, ISA >= 100), 1)
    col0 = tl.program_id(0) % col_tiles * col_count
    group, start, end, row0 = group_of_tile(
        before, offs, rows, tl.program_id(0) // col_tiles, ROW_TILES * BLOCK, GROUPS
    )
    if group < GROUPS:
        cols_left = tl.minimum(cols - col0, col_count)
        tile = load_column_tile(x_ptr + col0, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, False)
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
