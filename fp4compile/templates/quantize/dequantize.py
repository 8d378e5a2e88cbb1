"""Dequantise: codes times block scales times global or row scales, for both scale layouts and every format."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.elements import decode_pair, pack
from fp4compile.templates.device.memory import swizzle, tile_of
from fp4compile.templates.launch import LaunchConfig, launch, target_of
from fp4compile.templates.quantize.outputs import code_pairs, format_constants
from fp4compile.templates.quantize.source import power_of_two
from fp4compile.templates.writes import writes


@dataclass(frozen=True)
class DequantizeConfig(LaunchConfig):
    """`dequantize_rows`: tiles of rows x blocks."""

    num_warps: int
    rows: int
    blocks: int


def dequantize_config(block: int) -> DequantizeConfig:
    return DequantizeConfig(num_warps=4, rows=1, blocks=(4096 if block == 16 else 2048) // block)


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None,
    fmt: BlockFormat,
    cols,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The represented values [..., cols] in dtype: `reference.dequantize` on the GPU, bit for bit."""
    lead = data.shape[:-1]
    out = data.new_empty((*lead, cols), dtype=dtype)
    if statically_true(out.numel() == 0):  # a grid cannot be empty, and its program would write
        return out
    *batch, rows = lead or (1,)
    constants = format_constants(fmt)
    del constants["CONTRACT"]
    block = constants["BLOCK"]
    blocks = ceil_div(cols, block)
    swizzled = scales is not None and not (
        scales.dim() == data.dim() and (lead or statically_true(scales.numel() == blocks))
    )
    mode = "none" if outer is None else "tensor" if outer.dim() == 0 else "row"
    codes = data.contiguous().view(torch.uint8)
    if fmt.block is None and not statically_true(cols % 2 == 0):
        codes = torch.nn.functional.pad(codes, (0, 1))  # the kernel reads pairs
    scale_bits = codes if scales is None else as_integers(scales.contiguous())
    config = dequantize_config(block)
    isa, matrices = target_of(data.device).isa, math.prod(batch)
    grid = matrices * ceil_div(rows, config.rows) * ceil_div(blocks, config.blocks)
    launch(
        dequantize_rows, grid, codes, scale_bits, out if outer is None else outer, out, rows, cols,
        **constants, SQUARE=fmt.square, OUTER=mode, SWIZZLED=swizzled, ALIGN=power_of_two(cols, 8) // 2,
        UNIT_ALIGN=power_of_two(code_pairs(cols, fmt), 16), ISA=isa,
        BATCHED=isa < 100 or not statically_true(matrices == 1),
        num_warps=config.num_warps, **config.constants,
    )  # fmt: skip
    return out


@writes("out_ptr")
@triton.jit
def dequantize_rows(
    data_ptr, scales_ptr, outer_ptr, out_ptr, rows, cols,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr,
    OUTER: tl.constexpr, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr,
    BATCHED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x BLOCKS blocks of a batch of [rows, cols] matrices. out: contiguous [batch, rows, cols].

    SQUARE: linear scales of square blocks, one for BLOCK rows. OUTER: "none", "tensor" (a global scale) or "row" (row
    scales). ALIGN: pairs of elements that divide a row of out; 0 if the length of a row is odd. UNIT_ALIGN: pairs of
    codes that divide a row of codes. BATCHED: there may be several matrices; False only on SM100.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    bits: tl.constexpr = dtype.primitive_bitwidth
    half: tl.constexpr = BLOCK // 2
    count: tl.constexpr = BLOCKS * half
    unit_type: tl.constexpr = tl.uint8 if ELEMENT == "e2m1" else tl.uint16
    blocks = tl.cdiv(cols, BLOCK)
    batch, row_tile, col_tile = tile_of(
        tl.program_id(0), rows, tl.cdiv(blocks, BLOCKS).to(tl.int32), ROWS, False, ISA >= 100, BATCHED
    )
    row = (row_tile * ROWS + tl.arange(0, ROWS))[:, None]
    row_mask = row < rows
    flat_row = batch.to(tl.int64) * rows + row
    block0 = col_tile.to(tl.int64) * BLOCKS
    unit = tl.arange(0, count)[None, :]

    per_row = tl.cdiv(cols, 2) if SCALE == "none" else blocks * half
    per_row = per_row // UNIT_ALIGN * UNIT_ALIGN  # unchanged, but the compiler derives the width of loads from it
    cols_left = tl.minimum(per_row - block0 * half, count).to(tl.int32)
    data_row_ptr = data_ptr.to(tl.pointer_type(unit_type), bitcast=True) + flat_row * per_row + block0 * half
    units = tl.load(data_row_ptr + unit, mask=row_mask & (unit // UNIT_ALIGN < cols_left // UNIT_ALIGN), other=0)
    first, second = decode_pair(units, ELEMENT, ISA)

    if SCALE != "none":
        block = block0 + tl.arange(0, BLOCKS)[None, :]
        if SWIZZLED:
            tiles = tl.cdiv(blocks, 4)
            at = batch.to(tl.int64) * tl.cdiv(rows, 128) * tiles * 512 + swizzle(row.to(tl.int64), block, tiles)
        elif SQUARE:
            at = (batch.to(tl.int64) * tl.cdiv(rows, BLOCK) + row // BLOCK) * blocks + block
        else:
            at = flat_row * blocks + block
        byte = tl.load(scales_ptr + at, mask=row_mask & (block < blocks), other=0)
        scale = decode_scale(byte, SCALE, ISA)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (ROWS, BLOCKS, half)), (ROWS, count))
        first = first * scale
        second = second * scale
    if OUTER != "none":
        if OUTER == "tensor":
            outer = tl.load(outer_ptr)
        else:
            outer = tl.load(outer_ptr + flat_row, mask=row_mask, other=1.0)
        first = first * outer
        second = second * outer

    out_row_ptr = out_ptr + flat_row * cols + block0 * BLOCK
    cols_left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)
    if ALIGN > 0:
        word_type: tl.constexpr = tl.int32 if bits == 16 else tl.int64
        mask = row_mask & (unit // ALIGN < cols_left // 2 // ALIGN)
        ptr = out_row_ptr.to(tl.pointer_type(word_type), bitcast=True) + unit
        tl.store(ptr, pack(first, second, dtype, ISA), mask=mask)
    else:
        half_type: tl.constexpr = tl.int16 if bits == 16 else tl.int32
        word = pack(first, second, dtype, ISA)
        ptr = out_row_ptr.to(tl.pointer_type(half_type), bitcast=True) + 2 * unit
        tl.store(ptr, word.to(half_type), mask=row_mask & (2 * unit < cols_left))
        tl.store(ptr + 1, (word >> bits).to(half_type), mask=row_mask & (2 * unit + 1 < cols_left))
