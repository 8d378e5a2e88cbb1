"""Convert linear block scales to the swizzled layout.

Of MX and NVFP4, for rows that were moved after they were quantised; of FP8 blocks whose float32 scales are powers of
two, for matrix units that read them as MX (`gemm.float8_blocks_as_mx`).
"""

import math

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_COLS, TILE_ROWS, ceil_div, swizzled_numel
from fp4compile.formats.reference_grouped import lay_out_rows
from fp4compile.templates.device.block_scales import e8m0_of_float32
from fp4compile.templates.device.groups import of_lanes, per_lane, tile_of_group
from fp4compile.templates.device.memory import store_scales, tile_of, tiles_along
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.source import power_of_two
from fp4compile.templates.view import Size
from fp4compile.templates.writes import writes

# Block columns of a program. A program of groups first finds its group, which takes longer than few columns.
_BLOCKS = 32


def lay_out(scales: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """`reference_grouped.lay_out_rows` on the GPU, bit for bit: one launch."""
    rows, blocks = scales.shape[-2:]
    if statically_true(blocks == 0) or (offs is None and statically_true(scales.numel() == 0)):
        return lay_out_rows(scales, offs)  # a grid cannot be empty
    taken = scales.contiguous().view(torch.uint8)
    return _launch(taken, rows, blocks, (1, 1), offs).view(scales.dtype)


def lay_out_as_mx(scales: torch.Tensor, fmt: BlockFormat, rows: Size, offs: torch.Tensor | None) -> torch.Tensor:
    """The swizzled E8M0 scales, as bytes, of the float32 scales of matrices of `rows` rows: one launch.

    scales: their bits, int32 [..., rows / block rows, blocks], contiguous, in a format that has an `as_mx`.
    """
    block_rows, block = fmt.block
    repeat = block // fmt.as_mx.block_cols
    return _launch(scales, rows, scales.shape[-1] * repeat, (block_rows, repeat), offs)


def _launch(
    scales: torch.Tensor, rows: Size, blocks: Size, repeats: tuple[int, int], offs: torch.Tensor | None
) -> torch.Tensor:
    """The bytes [..., numel] of `lay_out_scales` for matrices [rows, blocks]. repeats: see there."""
    batch, groups = scales.shape[:-2], 0 if offs is None else offs.shape[0]
    slots = padded_rows(rows, groups) if groups else rows
    out = scales.new_empty((*batch, swizzled_numel(slots, blocks)), dtype=torch.uint8)
    matrices, isa = math.prod(batch), target_of(scales.device).isa
    grid = matrices * ceil_div(slots, TILE_ROWS) * ceil_div(ceil_div(blocks, TILE_COLS) * TILE_COLS, _BLOCKS)
    launch(
        lay_out_scales, grid, scales, scales if offs is None else offs.contiguous(), out, rows, blocks,
        GROUPS=groups, ALIGN=power_of_two(blocks, 16), BATCHED=isa < 100 or not statically_true(matrices == 1),
        ROWS=TILE_ROWS, BLOCKS=_BLOCKS, REPEAT_ROWS=repeats[0], REPEAT=repeats[1], ISA=isa, num_warps=4,
    )  # fmt: skip
    return out


@writes("out_ptr")
@triton.jit
def lay_out_scales(
    scales_ptr, offs_ptr, out_ptr, rows, blocks,
    GROUPS: tl.constexpr, ALIGN: tl.constexpr, BATCHED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    REPEAT_ROWS: tl.constexpr, REPEAT: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS (128) x BLOCKS block columns of a batch of matrices [rows, blocks] of scale bytes.

    REPEAT_ROWS, REPEAT: the rows, and the columns of blocks, that share a stored scale. A stored scale is a byte, or
    int32, the bits of a float32 power of two that becomes E8M0.

    GROUPS: the number of groups of rows that the int32 at offs_ptr define, of a single matrix; 0 for none. Each begins
    a new tile of the result, and tiles beyond the last group are zero. ALIGN: as in `store_scales`. BATCHED: there may
    be several matrices; False only on SM100.
    """
    unsigned: tl.constexpr = ISA >= 100
    col_tiles = tl.maximum(tiles_along(tiles_along(blocks, 4, unsigned) * 4, BLOCKS, unsigned), 1)
    if GROUPS > 0:
        offs = ()
        for i in tl.static_range(2 * per_lane(GROUPS)):
            number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
            offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
        group, end, tile, row0, col_tile = tile_of_group(offs, rows, col_tiles, ROWS, GROUPS)
        end = tl.where(group < GROUPS, end, row0)
        batch = tile * 0
        padded = (tile + 1) * ROWS
    else:
        batch, tile, col_tile = tile_of(tl.program_id(0), rows, col_tiles, ROWS, False, unsigned, BATCHED)
        row0 = tile * ROWS
        end = rows
        padded = rows
    lane = tl.arange(0, ROWS)
    block = col_tile * BLOCKS + tl.arange(0, BLOCKS)
    row = row0 + lane
    stored = batch.to(tl.int64) * tl.cdiv(rows, REPEAT_ROWS) + row // REPEAT_ROWS
    at = stored[:, None] * (blocks // REPEAT) + (block // REPEAT)[None, :]
    byte = tl.load(scales_ptr + at, mask=(row < end)[:, None] & (block < blocks)[None, :], other=0)
    if scales_ptr.dtype.element_ty == tl.int32:
        byte = e8m0_of_float32(byte)
    store_scales(out_ptr, byte, batch, tile * ROWS + lane, col_tile * BLOCKS, padded, blocks, True, ALIGN, False,
                 unsigned)  # fmt: skip
