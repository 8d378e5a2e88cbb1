"""Dequantise a matrix to 16-bit floating point without its outer scale, for the library's matrix product."""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dequantize import load_scales, load_units, repeat_scales
from fp4compile.templates.device.elements import decode_pair, float_bits


@triton.jit
def dequant_operand(
    data_ptr, scales_ptr, out_ptr, inexact_ptr, rows, blocks, per_row, tiles,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x UNITS units of out [rows, 2 * per_row], bf16 or fp16; a row has `tiles` tiles.

    data: codes [rows, per_row units]; `device.dequantize` says what a unit is. blocks: of BLOCK elements in a row.
    If a value may be inexact in bf16 (MX blocks with scales near 2^-127), the kernel sets the int32 at inexact_ptr.
    """
    program = tl.program_id(0)
    row = program // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    unit = program % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    units = load_units(data_ptr, row, unit, rows, per_row, ELEMENT, ALIGN)
    first, second = decode_pair(units, ELEMENT, ISA)
    if SCALE != "none":
        half: tl.constexpr = BLOCK // 2
        block = program % tiles * (UNITS // half) + tl.arange(0, UNITS // half)[None, :]
        byte = load_scales(scales_ptr, row, block, rows, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
        scale = repeat_scales(decode_scale(byte, SCALE, ISA), half)
        first = first * scale
        second = second * scale
        if SCALE == "e8m0":
            # Values below 2^-100 may lose their last places. Which ones do is not worth finding out.
            smallest = tl.minimum(_nonzero(first), _nonzero(second))
            if tl.min(tl.reshape(smallest, (ROWS * UNITS,)), 0) < 2.0**-100:
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
