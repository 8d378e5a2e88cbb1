"""Dequantised values that a quantiser stores instead of codes: 16 bits, without the global or row scale.

`formats.BlockFormat.values_dtype` explains why 16 bits hold them. Instructions, not bandwidth, bound the quantisers. So
E2M1 elements with E4M3 scales, and E4M3 elements with E8M0 scales, become floats by moving bits, and are multiplied two
at a time: three instructions per element.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dequantized_tile import repeat_scales
from fp4compile.templates.device.elements import decode_pair, pack, rounding_scale


@triton.constexpr_function
def takes_values(ptr_dtype):
    """Whether a quantiser stores dequantised values: its data pointer is to 16-bit floats instead of bytes."""
    return ptr_dtype.element_ty.primitive_bitwidth == 16


@triton.constexpr_function
def quick(element, scale, isa):
    """Whether this file has PTX for the codes of a format."""
    return isa > 0 and (element, scale) in (("e2m1", "e4m3"), ("e4m3", "e8m0"))


def _e2m1_ptx(scales: int) -> str:
    """PTX: eight E2M1 codes in $4, scales from $5 on -> four words of two float16 values in $0 to $3.

    With its magnitude at bit 9 and its sign at bit 15, a code is a float16 2^14 times too small.
    """
    both = "lop3.b32 {0}, {0}, {1}, 0x0E0E0E0E, 0xE4; and.b32 {0}, {0}, 0x8E8E8E8E;"  # the shifted magnitude, the sign
    spread = "shr.b32 u, $4, 3; " + both.format("u", "$4")  # the second code of each byte
    spread += " shl.b32 t, $4, 4; shr.b32 v, t, 3; " + both.format("v", "t")
    words = "".join(
        f" prmt.b32 t, v, u, 0x{4 + i}{i}{i}{i}; and.b32 t, t, 0xFF00FF00; mul.rn.f16x2 t, t, m;"
        f" mul.rn.f16x2 ${i}, t, ${5 + i % scales};"
        for i in range(4)
    )
    return "{ .reg .b32 t, u, v, m; mov.b32 m, 0x74007400; " + spread + words + " }"


def _e4m3_ptx(scales: int) -> str:
    """PTX: four E4M3 codes in $2, scales from $3 on -> two words of two bfloat16 values in $0 and $1.

    With its magnitude at bit 4 and its sign at bit 15, a code is a bfloat16 2^120 times too small. (A NaN code does not
    become NaN, but its block has the scale NaN.)
    """
    words = "".join(
        f" prmt.b32 t, $2, 0, 0x{2 * i + 1}4{2 * i}4; shr.b32 u, t, 4; and.b32 u, u, 0x07F007F0;"
        f" lop3.b32 t, t, 0x80008000, u, 0xEA; fma.rn.bf16x2 t, t, m, z; fma.rn.bf16x2 ${i}, t, ${3 + i % scales}, z;"
        for i in range(2)
    )
    return "{ .reg .b32 t, u, m, z; mov.b32 m, 0x7B807B80; mov.b32 z, 0x80008000;" + words + " }"


_E2M1, _E2M1_BYTES = tl.constexpr(_e2m1_ptx(1)), tl.constexpr(_e2m1_ptx(4))
_E4M3, _E4M3_PAIRS = tl.constexpr(_e4m3_ptx(1)), tl.constexpr(_e4m3_ptx(2))


@triton.jit
def values_of_units(units, byte, ELEMENT: tl.constexpr, SCALE: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr):
    """Units [rows, n] of two or more codes and scale bytes [rows, blocks] -> words [rows, m] of two 16-bit values."""
    if quick(ELEMENT, SCALE, ISA):
        units = halves(units)
        scale = rounding_scale(byte, ISA) if SCALE == "e4m3" else _bf16_scale(byte)
        scale = repeat_scales(scale, units.shape[1] // byte.shape[1])
        return _quick_values(units, scale, ELEMENT)
    else:
        pairs = split_units(units, 8 if ELEMENT == "e2m1" else 16)
        first, second = decode_pair(pairs, ELEMENT, ISA)
        scale = repeat_scales(decode_scale(byte, SCALE, ISA), pairs.shape[1] // byte.shape[1])
        return pack(first * scale, second * scale, dtype, ISA)


@triton.jit
def _bf16_scale(byte):
    """E8M0 scale bytes (int32) -> words with the scale twice as bf16."""
    bits = tl.where(byte == 0, 0x40, tl.where(byte == 255, 0x7FC0, byte << 7))
    return bits | (bits << 16)


@triton.jit
def _quick_values(units, scale, ELEMENT: tl.constexpr):
    """int32 units, or units of two codes, times the scale of each unit -> words."""
    if units.dtype != tl.int32:
        if ELEMENT == "e2m1":
            return tl.inline_asm_elementwise(
                _E2M1_BYTES, "=&r,=&r,=&r,=&r,r,r,r,r,r", [units, scale], dtype=tl.int32, is_pure=True, pack=4
            )
        else:
            return tl.inline_asm_elementwise(
                _E4M3_PAIRS, "=&r,=&r,r,r,r", [units, scale], dtype=tl.int32, is_pure=True, pack=2
            )
    else:
        words = _quick_words(units, scale, ELEMENT)
        if ELEMENT == "e2m1":
            pairs = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
        else:
            pairs = tl.join(words[0], words[1])
        return tl.reshape(pairs, (units.shape[0], units.shape[1] * len(words)))


@triton.jit
def _quick_words(codes, scale, ELEMENT: tl.constexpr):
    """int32 codes times the scale of each int32 -> a tuple of words of two 16-bit values, in order."""
    if ELEMENT == "e2m1":
        return tl.inline_asm_elementwise(
            _E2M1, "=&r,=&r,=&r,=&r,r,r", [codes, scale], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _E4M3, "=&r,=&r,r,r", [codes, scale], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )


@triton.jit
def scale_of_run(byte, ELEMENT: tl.constexpr, SCALE: tl.constexpr, ISA: tl.constexpr):
    """Scale bytes (int32) -> the scale that `values_of_run` takes."""
    if quick(ELEMENT, SCALE, ISA):
        return rounding_scale(byte, ISA) if SCALE == "e4m3" else _bf16_scale(byte)
    else:
        return decode_scale(byte, SCALE, ISA)


@triton.jit
def values_of_run(codes, scale, ELEMENT: tl.constexpr, SCALE: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr):
    """int32 codes of neighbours, and their `scale_of_run` -> a tuple of words of two 16-bit values, in order."""
    if quick(ELEMENT, SCALE, ISA):
        return _quick_words(codes, scale, ELEMENT)
    else:
        bits: tl.constexpr = 8 if ELEMENT == "e2m1" else 16  # of a pair
        unit: tl.constexpr = tl.uint8 if ELEMENT == "e2m1" else tl.uint16
        words = ()
        for i in tl.static_range(32 // bits):
            first, second = decode_pair((codes >> (bits * i)).to(unit), ELEMENT, ISA)
            words = words + (pack(first * scale, second * scale, dtype, ISA),)
        return words


@triton.jit
def halves(units):
    """int64 units [rows, n] -> int32 units [rows, 2 * n]; other units are returned unchanged.

    It is a broadcast, before which Triton moves units to the lanes that store their dequantised values.
    """
    if units.dtype == tl.int64:
        low = units.to(tl.int32)[:, :, None]
        high = (units >> 32).to(tl.int32)[:, :, None]
        both = tl.where((tl.arange(0, 2) == 0)[None, None, :], low, high)
        return tl.reshape(both, (units.shape[0], units.shape[1] * 2))
    else:
        return units


@triton.jit
def split_units(units, BITS: tl.constexpr):
    """Integers [rows, n] -> their runs of BITS bits, uint8 or uint16, lowest first."""
    count: tl.constexpr = units.dtype.primitive_bitwidth // BITS
    part_type: tl.constexpr = tl.uint8 if BITS == 8 else tl.uint16
    if count == 1:
        return units.to(part_type)
    else:
        shift = (BITS * tl.arange(0, count)).to(units.dtype)
        parts = (units[:, :, None] >> shift[None, None, :]).to(part_type)
        return tl.reshape(parts, (units.shape[0], units.shape[1] * count))
