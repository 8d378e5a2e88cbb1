"""Quantise grouped rows along their elements, where the result depends on the groups.

It depends on them with an outer scale for each group, and with swizzled scales: each group's rows are padded to tiles
of 128 rows of scales. Tile t of 128 padded rows has the scales of tile row t of the swizzled layout; the padding is
zero.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_COLS, TILE_ROWS, ceil_div, swizzled_numel
from fp4compile.templates.device.block_scales import make_outer_scales, outer_scales
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.memory import store_scales, tiles_along
from fp4compile.templates.device.prologue import read_tile
from fp4compile.templates.device.values import takes_values
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.heuristics import ragged_row_config
from fp4compile.templates.quantize.outputs import Outer, Output, empty_output, format_constants, store_aligns
from fp4compile.templates.quantize.row import encode_and_store_codes, seed_pointer
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View


def ragged_rows_launch(
    source: Source, offs: View, fmt: BlockFormat, output: Output, outer: Outer, layout: str, seed: torch.Tensor | None
) -> Launch:
    """The launch of `quantize_grouped_rows`, to follow `outer.launches`."""
    groups = offs.sizes[0]
    constants = format_constants(fmt)
    block, swizzled = constants["BLOCK"], layout == "swizzled"
    config = ragged_row_config(fmt.element, block, source.rows, groups, swizzled)
    blocks = ceil_div(source.cols, block)
    if swizzled:
        tiles, blocks = padded_rows(source.rows, groups) // TILE_ROWS, ceil_div(blocks, TILE_COLS) * TILE_COLS
    else:
        tiles = source.rows // config.rows + groups
    isa, width = source.target.isa, max(config.blocks * block, TILE_ROWS)
    # Where each row has an outer scale of its own, scales without masks would take half as many registers again.
    whole = outer.mode != "each amax" and statically_true(source.cols % width == 0)
    constants |= {
        "GROUPS": groups, "SEEDED": seed is not None, "OUTER": outer.mode, "SWIZZLED": swizzled,
        "ALIGN": source.align, **store_aligns(source.cols, fmt), "PROLOGUE": source.prologue_text,
        "WHOLE_COLS": isa >= 100 and whole, "ISA": isa, **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, offs, *output.pointers, *outer.pointers(output.data), seed_pointer(seed, output.data),
        source.rows, source.cols, source.row_stride, *source.operand_args,
    )  # fmt: skip
    grid = tiles * ceil_div(blocks, config.blocks)
    return Launch(quantize_grouped_rows, grid, arguments, constants, config.num_warps)


def empty_rows(source: Source, groups: int, fmt: BlockFormat, layout: str, values: bool) -> Output:
    """Uninitialised memory for the results along rows of groups; swizzled scales have padded rows."""
    shape = source.rows, source.cols
    plain = empty_output(source, shape, fmt, "linear", values=values)
    if layout == "linear" or plain.scales is None:
        return plain
    count = swizzled_numel(padded_rows(source.rows, groups), ceil_div(source.cols, fmt.block_cols))
    scales = source.tensor.new_empty((count,), dtype=torch.uint8)
    return replace(plain, scales=View.flat(scales, count))


@triton.jit
def store_group_outers(amax_ptr, outer_ptr, tile, col_tile, OUTER: tl.constexpr, GROUPS: tl.constexpr,
                       SCALE: tl.constexpr, CONTRACT: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """OUTER "group amax": tile t stores the outer scale of group t, even if it is empty. There are enough tiles."""
    if OUTER == "group amax":  # noqa: SIM102 (the constexpr condition stays alone)
        if (tile < GROUPS) & (col_tile == 0):
            make_outer_scales(amax_ptr + tile, outer_ptr, tile, True, True, SCALE, CONTRACT, ISA)


@triton.jit
def quantize_row_tile(
    words, data_ptr, outer_ptr, amax_ptr, seed_ptr, col_tile, group, row0, end, cols, dtype: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, SEEDED: tl.constexpr,
    OUTER: tl.constexpr, UNIT_ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store the codes of a tile of `quantize_grouped_rows`, from row0 to `end` of a group. Returns its scale bytes."""
    row = row0 + tl.arange(0, words.shape[0])
    block0 = col_tile * words.shape[1]
    if OUTER == "group amax":
        encode, decode = make_outer_scales(amax_ptr + group, outer_ptr, 0, True, False, SCALE, CONTRACT, ISA)
    elif OUTER == "each amax":
        encode, decode = make_outer_scales(amax_ptr + row, outer_ptr, row, row < end, col_tile == 0, SCALE, CONTRACT,
                                           ISA)  # fmt: skip
        encode = encode[:, None]
        decode = decode[:, None]
    else:
        encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, 1, CONTRACT, ISA)
    # Only `end` bounds the rows: groups lie in data as they lie in x.
    return encode_and_store_codes(words, word_amax(words, 2, ISA, dtype), encode, decode, data_ptr, seed_ptr,
                                  group * 0, row, block0, end, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK,
                                  OUTER != "none", OUTER == "tensor", SEEDED, 0, UNIT_ALIGN, ISA)  # fmt: skip


@triton.jit
def store_row_scales(scales_ptr, byte, tile, col_tile, row0, end, cols, BLOCK: tl.constexpr, SWIZZLED: tl.constexpr,
                     ALIGN: tl.constexpr, WHOLE_COLS: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """Store the scale bytes of a tile. SWIZZLED: fill the tile's padding with zeros. ALIGN: see `store_scales`.

    WHOLE_COLS: tiles divide the columns, so that only rows need masks.
    """
    unsigned: tl.constexpr = ISA >= 100
    count: tl.constexpr = byte.shape[0]
    row = row0 + tl.arange(0, count)
    block0 = col_tile * byte.shape[1]
    blocks = tiles_along(cols, BLOCK, unsigned)
    if SWIZZLED:
        byte = tl.where((row < end)[:, None], byte, 0)
        place = tile * count + tl.arange(0, count)
        store_scales(scales_ptr, byte, tile * 0, place, block0, (tile + 1) * count, blocks, True, ALIGN,
                     WHOLE_COLS, unsigned)  # fmt: skip
    else:
        store_scales(scales_ptr, byte, tile * 0, row, block0, end, blocks, False, ALIGN, False, unsigned)


@triton.jit
def quantize_grouped_rows(
    x_ptr, offs_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    SEEDED: tl.constexpr, OUTER: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, WHOLE_COLS: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x BLOCKS blocks of one group. x: [rows, cols], strides x_row and 1. offs: int32 [GROUPS].

    data_ptr: bytes for codes, or 16-bit floats (see `encode_and_store_codes`).
    OUTER "none", "tensor": as in `outer_scales`. "group amax", "each amax": outer scales are made from the bits at
    amax_ptr, of each group or row, and stored at outer_ptr. SWIZZLED (ROWS is 128): tiles beyond the last group fill
    their scales with zeros. WHOLE_COLS: as in `quantize_grouped_columns`.
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    unsigned: tl.constexpr = ISA >= 100
    padded_cols = tiles_along(cols, 4 * BLOCK, unsigned) * 4 * BLOCK if SWIZZLED else cols
    col_tiles = tl.maximum(tiles_along(padded_cols, BLOCKS * BLOCK, unsigned), 1)
    tile = tl.program_id(0) // col_tiles
    col_tile = tl.program_id(0) % col_tiles
    group, start, end, row0 = group_of_tile(before, offs, rows, tile, ROWS, GROUPS)
    store_group_outers(amax_ptr, outer_ptr, tile, col_tile, OUTER, GROUPS, SCALE, CONTRACT, ISA)
    if group >= GROUPS:
        if SWIZZLED:
            byte = tl.zeros((ROWS, BLOCKS), tl.int32)
            store_row_scales(scales_ptr, byte, tile, col_tile, row0, row0, cols, BLOCK, True, SCALE_ALIGN,
                             WHOLE_COLS, ISA)  # fmt: skip
        return
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr)
    row = row0 + tl.arange(0, ROWS)
    col0 = col_tile * (BLOCKS * BLOCK)
    cols_left = tl.minimum(cols - col0, BLOCKS * BLOCK)
    words = read_tile(x_ptr + row.to(tl.int64) * x_row + col0, operands, tile * 0, row, end, col0, cols, cols_left,
                      dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, False, ISA, False, PROLOGUE)  # fmt: skip
    byte = quantize_row_tile(
        words, data_ptr, outer_ptr, amax_ptr, seed_ptr, col_tile, group, row0, end, cols, dtype,
        ELEMENT, SCALE, CONTRACT, BLOCK, SEEDED, OUTER, UNIT_ALIGN, ISA,
    )  # fmt: skip
    if not takes_values(data_ptr.dtype):
        store_row_scales(scales_ptr, byte, tile, col_tile, row0, end, cols, BLOCK, SWIZZLED, SCALE_ALIGN,
                         WHOLE_COLS, ISA)  # fmt: skip
