"""Dequantise a tile of an operand for the matrix units: elements times block scales, exactly.

A tile is loaded as units. A unit is two neighbours along K: a byte of E2M1 codes, two bytes of FP8 codes, or one word
of a plain operand. The result is two tensors, one with the first and one with the second element of each unit. The
matmul multiplies first with first and second with second elements, so nothing needs to be interleaved. Index tensors
have two axes (row, K), or three if K is cut among warps.

COMPUTE is the type that the matrix units read: "fp16" (NVFP4, FP8, plain fp16), "bf16" (MX, plain bf16), or "fp32".
16 bits cannot hold an element times a float32 scale; the caller multiplies the sums of a block by such scales.
COMPUTE holds every dequantised value times 2^-`shift_of` exactly, except in MX blocks with scales below
2^(TINY - 127). Such a block becomes zeros; with TINY_ONLY, `dequantize` returns only these blocks, times 2^TINY.
"""

import triton
import triton.language as tl

from fp4compile import _compat
from fp4compile.templates.device.block_scales import decode_scale, scale_bits
from fp4compile.templates.device.elements import e2m1_value, fp8_pair, unpack
from fp4compile.templates.device.memory import load_words, swizzle

TINY = tl.constexpr(32)


@triton.constexpr_function
def shift_of(ELEMENT, SCALE, COMPUTE):
    """Log2 of the divisor in `dequantize`: E2M1 codes become 16-bit floats just by shifts, with another bias."""
    if ELEMENT != "e2m1" or SCALE != "e4m3" or COMPUTE == "fp32":
        return 0
    return 14 if COMPUTE == "fp16" else 7


INTERPRETING = tl.constexpr(_compat.interpreting())


@triton.constexpr_function
def compute_dtype(COMPUTE, interpreting):
    """The Triton type of COMPUTE. Triton's interpreter has no bf16 matmul and takes float32 instead."""
    if COMPUTE == "fp16":
        return tl.float16
    return tl.float32 if COMPUTE == "fp32" or interpreting else tl.bfloat16


# PTX for four bytes of two codes each. Outputs: the first elements ($0, $1) and the second ones ($2, $3), two in a
# register. Inputs: the codes ($4), 16-bit scales of both registers ($5, $6). With its magnitude at bit 9 and its sign
# at bit 15 of an fp16, a code is its number times 2^-14; with its magnitude at bit 6 of a bf16, it is times 2^-126.
# One select joins the signs and the shifted magnitudes of the second codes of four bytes (fp16) or of both codes of two
# bytes (bf16).
_SELECT = "0xE4"  # lop3: bits of the first operand where the third is set, else bits of the second


def _dequantize_e2m1_f16_ptx():
    steps = []
    for second, source in ((1, "$4"), (0, "v")):
        select = f"lop3.b32 u, u, {source}, 0x0E0E0E0E, {_SELECT};"
        steps.append(f"shr.u32 u, {source}, 3; {select} and.b32 u, u, 0x8E8E8E8E;")
        for i, spread in enumerate(("0x1404", "0x3424")):
            out = f"${2 * second + i}"
            steps.append(f"prmt.b32 {out}, u, 0, {spread}; mul.rn.f16x2 {out}, {out}, ${5 + i};")
    return "{ .reg .b32 u, v; shl.b32 v, $4, 4; " + " ".join(steps) + " }"


def _dequantize_e2m1_bf16_ptx():
    steps = []
    for i, spread in enumerate(("0x1100", "0x3322")):
        steps.append(
            f"prmt.b32 u, $4, 0, {spread}; shl.b32 v, u, 2; lop3.b32 u, v, u, 0x01DC01DC, {_SELECT};"
            f" and.b32 ${2 + i}, u, 0x81C081C0; shl.b32 u, u, 4; and.b32 ${i}, u, 0x81C081C0;"
            f" fma.rn.bf16x2 ${i}, ${i}, ${5 + i}, z; fma.rn.bf16x2 ${2 + i}, ${2 + i}, ${5 + i}, z;"
        )
    return "{ .reg .b32 u, v, z; mov.b32 z, 0x80008000; " + " ".join(steps) + " }"


_E2M1_F16 = tl.constexpr(_dequantize_e2m1_f16_ptx())
_E2M1_BF16 = tl.constexpr(_dequantize_e2m1_bf16_ptx())


@triton.jit
def dequantize_e2m1(units, scale, COMPUTE: tl.constexpr):
    """(First, second) elements of uint8 units times scales in the compute type, times 2^-14 (fp16) or 2^-126 (bf16)."""
    dtype: tl.constexpr = compute_dtype(COMPUTE, INTERPRETING)
    first, second = tl.inline_asm_elementwise(
        _E2M1_F16 if COMPUTE == "fp16" else _E2M1_BF16,
        "=&r,=&r,=&r,=&r,r,r,r", [units, scale], dtype=(tl.int16, tl.int16), is_pure=True, pack=4,
    )  # fmt: skip
    return first.to(dtype, bitcast=True), second.to(dtype, bitcast=True)


@triton.jit
def repeat_scales(scale, TIMES: tl.constexpr):
    """[..., blocks] -> [..., blocks * TIMES], each scale repeated TIMES times."""
    if len(scale.shape) == 2:
        wide: tl.constexpr = (scale.shape[0], scale.shape[1], TIMES)
        return tl.reshape(tl.broadcast_to(scale[:, :, None], wide), (wide[0], wide[1] * TIMES))
    else:
        deep: tl.constexpr = (scale.shape[0], scale.shape[1], scale.shape[2], TIMES)
        return tl.reshape(tl.broadcast_to(scale[:, :, :, None], deep), (deep[0], deep[1], deep[2] * TIMES))


@triton.constexpr_function
def bytes_per_unit(ELEMENT):
    """Pointer elements in a unit of `per_row`: the bytes of a unit of codes; 1 for a plain operand (elements)."""
    return 2 if ELEMENT in ("e4m3", "e5m2") else 1


@triton.jit
def load_units(ptr, row, unit, rows, cols, per_row, ELEMENT: tl.constexpr, ALIGN: tl.constexpr):
    """The units of a tile; zeros outside of the matrix [rows, cols] with row stride per_row (units; plain: elements).

    ALIGN: for a plain operand, as in `load_words`; for codes, -1 if rows are whole tiles, so that only rows are
    checked.
    """
    if ELEMENT == "plain":
        dtype: tl.constexpr = ptr.dtype.element_ty
        # cols counts elements, and may be odd
        return load_words(ptr + row.to(tl.int64) * per_row, unit, cols, row < rows, dtype, ALIGN)
    else:
        unit_type: tl.constexpr = tl.uint8 if ELEMENT == "e2m1" else tl.uint16
        ptr = ptr.to(tl.pointer_type(unit_type), bitcast=True) + row.to(tl.int64) * per_row + unit
        if ALIGN == -1:
            return tl.load(ptr, mask=row < rows, other=0)
        else:
            return tl.load(ptr, mask=(row < rows) & (unit < cols), other=0)


@triton.jit
def load_scales(
    ptr, row, block, rows, cols, blocks, SCALE: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The bits of a tile's scales; outside of the blocks [rows, cols], those of the scale 1 (E8M0) or 0 (others).

    blocks: blocks in a row of scales, at least cols. SQUARE: in the linear layout BLOCK rows share one row of scales.
    ALIGN: see `load_units`.
    """
    if SWIZZLED:
        at = swizzle(row.to(tl.int64), block, tl.cdiv(blocks, 4))
    elif SQUARE:
        at = (row // BLOCK).to(tl.int64) * blocks + block
    else:
        at = row.to(tl.int64) * blocks + block
    outside: tl.constexpr = 127 if SCALE == "e8m0" else 0
    if ALIGN == -1:
        return tl.load(ptr + at, mask=row < rows, other=outside)
    else:
        return tl.load(ptr + at, mask=(row < rows) & (block < cols), other=outside)


@triton.jit
def dequantize(
    units, byte, dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr, TINY_ONLY: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(First, second) elements of units and scale bytes of a tile, in the compute type, times 2^-`shift_of`.

    dtype: dtype of a plain operand. TINY_ONLY: return only the blocks that are zeros otherwise, times 2^TINY, and zeros
    for all others.
    """
    out: tl.constexpr = compute_dtype(COMPUTE, INTERPRETING)
    if ELEMENT == "plain":
        if dtype == out and out != tl.float32:
            first = units.to(tl.int16).to(out, bitcast=True)
            second = (units >> 16).to(tl.int16).to(out, bitcast=True)
        else:
            first, second = unpack(units, dtype)
        if TINY_ONLY:
            first = tl.zeros_like(first)
            second = tl.zeros_like(second)
        return first.to(out), second.to(out)
    elif SCALE == "none" or scale_bits(SCALE) == 32:
        first, second = fp8_pair(units, ELEMENT, ISA)
        return first.to(out), second.to(out)
    elif SCALE == "e4m3":
        shift: tl.constexpr = shift_of(ELEMENT, SCALE, COMPUTE)
        if ISA == 0 or COMPUTE == "fp32":
            scale = repeat_scales(decode_scale(byte, SCALE, ISA) * 2.0**-shift, BLOCK // 2)
            codes = units.to(tl.int32)
            return (e2m1_value(codes) * scale).to(out), (e2m1_value(codes >> 4) * scale).to(out)
        else:
            scale = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            if COMPUTE == "bf16":
                scale = (scale.to(tl.float32) * 2.0 ** (126 - shift)).to(tl.bfloat16)
            return dequantize_e2m1(units, repeat_scales(scale, BLOCK // 2), COMPUTE)
    else:
        code = byte.to(tl.int32)
        if COMPUTE != "fp32":
            tiny = code < TINY
            code = tl.where(tiny, code + TINY, -1) if TINY_ONLY else tl.where(tiny, -1, code)
        scale = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
        scale = tl.where(code == -1, 0.0, tl.where(code == 255, float("nan"), scale))
        if ISA == 0 or COMPUTE == "fp32":
            scale = repeat_scales(scale, BLOCK // 2)
            if ELEMENT == "e2m1":
                codes = units.to(tl.int32)
                first = e2m1_value(codes)
                second = e2m1_value(codes >> 4)
            else:
                first, second = fp8_pair(units, ELEMENT, ISA)
            return (first * scale).to(out), (second * scale).to(out)
        else:
            scale = repeat_scales(scale.to(out), BLOCK // 2)
            if ELEMENT == "e2m1":
                power = tl.full(units.shape, 2.0**126, out)
                first, second = dequantize_e2m1(units, power, COMPUTE)
            else:
                first, second = fp8_pair(units, ELEMENT, ISA)
            return first.to(out) * scale, second.to(out) * scale
