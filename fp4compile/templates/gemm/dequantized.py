"""Dequantise an operand to 16 bits in memory, without its global or row scale, before a matmul."""

import torch
import triton
import triton.language as tl

from fp4compile.formats.layouts import ceil_div
from fp4compile.hardware import Target
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dequantized_tile import load_scales, load_units, repeat_scales
from fp4compile.templates.device.elements import decode_pair, float_bits
from fp4compile.templates.gemm.call import KernelOperand
from fp4compile.templates.launch import launch
from fp4compile.templates.writes import writes


@writes("out_ptr", inexact_ptr=lambda arguments: arguments["SCALE"] == "e8m0")
@triton.jit
def dequant_operand(
    data_ptr, scales_ptr, out_ptr, inexact_ptr, offs_ptr, rows, blocks, per_row, tiles,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    GROUPS: tl.constexpr, ALIGN: tl.constexpr, UNITS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """UNITS units of a row of out [rows, 2 * per_row], bf16 or fp16; a row has `tiles` tiles of UNITS units.

    data: codes [rows, per_row units]; `dequantized_tile` defines units. blocks: blocks of BLOCK elements in a row.
    If a value may be inexact in bf16 (MX blocks with scales near 2^-127), the kernel sets the int32 at inexact_ptr.
    GROUPS: 0, or the number of groups of rows, which end at offs, int32. Rows of no group are not tested for inexact
    values, because their codes are uninitialised.
    """
    program = tl.program_id(0)
    row = program // tiles + tl.zeros((1, 1), tl.int32)
    unit = program % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    units = load_units(data_ptr, row, unit, rows, per_row, per_row, ELEMENT, ALIGN)
    first, second = decode_pair(units, ELEMENT, ISA)
    if SCALE != "none":
        half: tl.constexpr = BLOCK // 2
        block = program % tiles * (UNITS // half) + tl.arange(0, UNITS // half)[None, :]
        byte = load_scales(scales_ptr, row, block, rows, blocks, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
        scale = repeat_scales(decode_scale(byte, SCALE, ISA), half)
        first = first * scale
        second = second * scale
        if SCALE == "e8m0":
            # Values below 2^-100 may lose their last bits. A more exact test would not pay.
            smallest = tl.minimum(_nonzero(first), _nonzero(second))
            if tl.min(tl.reshape(smallest, (UNITS,)), 0) < 2.0**-100:
                last = rows
                if GROUPS > 0:
                    group = tl.arange(0, triton.next_power_of_2(GROUPS))
                    last = tl.max(tl.load(offs_ptr + group, mask=group < GROUPS, other=0), 0)
                if program // tiles < last:
                    tl.store(inexact_ptr, 1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    word = float_bits(first, dtype, ISA) | (float_bits(second, dtype, ISA) << 16)
    at = row.to(tl.int64) * per_row + unit
    mask = (row < rows) if ALIGN == -1 else (row < rows) & (unit < per_row)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, word, mask=mask)


@triton.jit
def _nonzero(value):
    """The magnitude of each value, or 1 where the value is zero."""
    return tl.where(value == 0.0, 1.0, tl.abs(value))


def dequantized(
    x: KernelOperand, rows, k, dtype: torch.dtype, target: Target, inexact: torch.Tensor,
    offs: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """An operand [rows, k] in dtype, without its global or row scale; a plain operand is returned unchanged.

    inexact: int32 [] that is set if dtype cannot hold a value; only MX formats write it. offs: int32, where groups of
    rows end; then only rows of groups are tested.
    """
    data, fmt = x.data.view(rows, -1), x.type.format
    if fmt is None:
        return data
    tiles = ceil_div(x.units_per_row, 2048)
    out = data.new_empty((rows, 2 * x.units_per_row), dtype=dtype)
    block = fmt.block_cols if fmt.block else 32
    launch(dequant_operand, rows * tiles, data, out if x.scales is None else x.scales, out, inexact,
           inexact if offs is None else offs, rows, ceil_div(x.k, block), x.units_per_row, tiles, num_warps=4,
           BLOCK=block, GROUPS=0 if offs is None else offs.shape[0], UNITS=2048, ISA=target.isa,
           **x.reading(2048))  # fmt: skip
    return out.narrow(1, 0, k)
