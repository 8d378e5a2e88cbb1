"""Device functions for block scales, global or row scales and the factors that encode elements.

Inputs are amaxes as bits of float32 magnitudes (int32). Results are scales as bits in an int32: a byte, or all 32.
`ISA`: see `elements`.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.elements import INFINITY_BITS, fp8_code, fp8_value, mantissa_bits
from fp4compile.templates.device.quick_scales import SIXTH, in_quick_range, quick_e4m3_scale

FLT_MAX = tl.constexpr(3.4028234663852886e38)
NVFP4_MAX = tl.constexpr(2688.0)  # 6 * 448


@triton.constexpr_function
def reciprocal_max(element):
    """1 / `largest_element`, rounded to float32."""
    return {"e2m1": 0.1666666716337204, "e4m3": 0.002232142956927419, "e5m2": 1.743861685099546e-05}[element]


@triton.constexpr_function
def largest_element(element):
    """The largest number of an element type, such as 6 for "e2m1"."""
    return {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0}[element]


@triton.constexpr_function
def emax(element):
    """The exponent of the largest power of two among the numbers of an element type."""
    return {"e2m1": 2, "e4m3": 8, "e5m2": 15}[element]


@triton.constexpr_function
def scale_bits(scale):
    """The number of bits of a block scale; 0 without one."""
    return {"none": 0, "e8m0": 8, "e4m3": 8, "float32": 32}[scale]


@triton.jit
def _at_most(value, limit: tl.constexpr):
    """The minimum of value and limit; NaN stays NaN."""
    return tl.minimum(value, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reciprocal(value, ISA: tl.constexpr):
    """1 / value, correctly rounded."""
    if ISA == 0:
        return tl.div_rn(1.0, value)
    else:
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def encode_scale(decode, ISA: tl.constexpr):
    """Decode factor -> encode factor: the reciprocal, but at most FLT_MAX (as in `reference`)."""
    return _at_most(reciprocal(decode, ISA), FLT_MAX)


@triton.jit
def reciprocal_e4m3(value, ISA: tl.constexpr):
    """1 / value, correctly rounded, of a normal E4M3 number.

    Such a number has four significant bits, so one Newton step from the hardware's estimate is exact enough.
    """
    if ISA == 0:
        return tl.div_rn(1.0, value)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, r; fma.rn.f32 e, e, $1, 0f3F800000;"
            " fma.rn.f32 $0, r, e, r; }",
            "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _sixth(value, ISA: tl.constexpr):
    """value / 6, correctly rounded where the result is a normal number: a quotient, corrected by its remainder."""
    if ISA == 0:
        return tl.div_rn(value, 6.0)
    else:
        quotient = value * SIXTH
        return tl.fma(tl.fma(quotient, -6.0, value), SIXTH, quotient)


@triton.jit
def e4m3_round(value, ISA: tl.constexpr):
    """float32 >= 0, rounded to E4M3 and saturated -> (byte as int32, value in float32); NaN gives 0x7F and NaN."""
    if ISA == 0:
        byte = fp8_code(value, "e4m3")
        return byte, fp8_value(byte, "e4m3")
    else:
        code = value.to(tl.float8e4nv)
        return code.to(tl.uint8, bitcast=True).to(tl.int32), code.to(tl.float32)


@triton.jit
def decode_scale(byte, SCALE: tl.constexpr, ISA: tl.constexpr):
    """The loaded bits of block scales -> float32."""
    code = byte.to(tl.int32)
    if SCALE == "float32":
        return code.to(tl.float32, bitcast=True)
    elif SCALE == "e4m3":
        return fp8_value(code, "e4m3")
    else:
        value = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
        return tl.where(code == 255, float("nan"), value)


@triton.jit
def outer_from_amax(amax_bits, contract: tl.constexpr, ISA: tl.constexpr):
    """Bits of the amax of a tensor or a row -> its global or row scale, as (encode, decode) factors in float32."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if contract == "torchao":
        decode = tl.div_rn(amax, NVFP4_MAX)
        decode = tl.where(decode == 0.0, 1.0, decode)
        encode = encode_scale(decode, ISA)
    else:
        encode = _at_most(tl.div_rn(NVFP4_MAX, amax), FLT_MAX)
        encode = tl.where((amax == 0.0) | (encode == 0.0), 1.0, encode)
        decode = reciprocal(encode, ISA)
    return encode, decode


@triton.jit
def float8_scale(amax_bits, element: tl.constexpr, contract: tl.constexpr, ISA: tl.constexpr):
    """`reference.float8_scale`: bits of amaxes -> (encode, decode) factors in float32."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if contract == "torchao":
        encode = (largest_element(element) * (1.0 / tl.maximum(amax.to(tl.float64), 1e-12))).to(tl.float32)
    else:
        encode = tl.minimum(tl.div_rn(largest_element(element), amax), FLT_MAX)
        encode = tl.where(amax == 0.0, 1.0, encode)
    if contract == "te_pow2":
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    encode = tl.where(amax_bits > INFINITY_BITS, float("nan"), encode)  # the operations above lose a NaN
    return encode, reciprocal(encode, ISA)


@triton.jit
def e8m0_of_float32(bits):
    """Bits of float32 powers of two -> E8M0 bytes, int32; 255 (NaN) for NaN, and for all that E8M0 cannot represent.

    Exponents are biased alike; 2^-127, a subnormal number, is byte 0. So is 0, the scale of padding, whose codes are 0.
    """
    power = ((bits & 0x7FFFFF) == 0) & (bits >= 0) | (bits == 0x400000)
    return tl.where(power, bits >> 23, 255)


@triton.jit
def e4m3_scale(amax_bits, encode, decode, contract: tl.constexpr, has_outer: tl.constexpr, ISA: tl.constexpr):
    """Bits of block amaxes -> (E4M3 bytes as int32, factors that encode the block's elements).

    On SM100, with a scalar global or row scale that is `in_quick_range`, `quick_e4m3_scale` makes them.
    """
    if ISA < 100 or not has_outer or decode.type.is_block():
        return plain_e4m3_scale(amax_bits, encode, decode, contract, has_outer, ISA)
    else:
        if in_quick_range(decode):
            byte, factor = quick_e4m3_scale(amax_bits.to(tl.float32, bitcast=True), encode, decode, contract)
        else:
            byte, factor = plain_e4m3_scale(amax_bits, encode, decode, contract, has_outer, ISA)
        return byte, factor


@triton.jit
def plain_e4m3_scale(amax_bits, encode, decode, contract: tl.constexpr, has_outer: tl.constexpr, ISA: tl.constexpr):
    """`e4m3_scale` by the contract's own operations."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    if contract == "torchao":
        if has_outer:
            scale = tl.div_rn(tl.div_rn(amax, 6.0), decode)
        else:  # `_sixth` is inexact only for results that the lower clamp replaces
            scale = _sixth(amax, ISA)
        scale = tl.maximum(scale, 0.015625, propagate_nan=tl.PropagateNan.ALL)
    elif has_outer:
        scale = _at_most(amax * (encode * SIXTH), FLT_MAX)
    else:
        scale = amax * SIXTH
    # The scale of a block that is not finite is NaN.
    scale = tl.where(amax_bits < INFINITY_BITS, scale, float("nan"))
    byte, s = e4m3_round(scale, ISA)
    if contract == "torchao":
        factor = _at_most(tl.div_rn(encode, s), FLT_MAX) if has_outer else reciprocal_e4m3(s, ISA)
    else:
        factor = _at_most(reciprocal(s * decode if has_outer else s, ISA), FLT_MAX)
    if has_outer:
        # An infinite global or row scale makes the factor 0, and a product with 0 would lose its sign in `encode_pair`.
        # The smallest float32 as a factor gives the same codes, and keeps the sign.
        factor = tl.where(factor == 0.0, 1.401298464324817e-45, factor)
    return byte, factor


@triton.jit
def _ue8m0_round_up(value):
    """float32 >= 0 -> E8M0 byte (int32) of the next power of two, by SM100's instruction."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 p; cvt.rp.satfinite.ue8m0x2.f32 p, 0f00000000, $1; cvt.u32.u16 $0, p; and.b32 $0, $0, 255; }",
        "=r,f", [value], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e8m0_scale(amax_bits, element: tl.constexpr, mode: tl.constexpr, ISA: tl.constexpr):
    """Bits of block amaxes -> (E8M0 bytes as int32, factors 2^(127 - byte) that encode the block's elements)."""
    if mode == "rceil":
        d = amax_bits.to(tl.float32, bitcast=True) * reciprocal_max(element)
        if ISA >= 100:
            byte = _ue8m0_round_up(d)
        else:
            bits = d.to(tl.int32, bitcast=True)
            # The exponent, plus one where the mantissa is not 0: the addition carries. It makes 255 of infinity and 256
            # of a NaN. Byte 0 stands for 2^-127, which is half of the smallest normal number.
            byte = tl.minimum(((bits.to(tl.uint32) + 0x7FFFFF) >> 23).to(tl.int32), 255)
            byte = tl.where(bits > 0x400000, byte, 0)
            # The byte of a finite amax is at most 253.
            factor = tl.maximum((254 - byte) << 23, 0x200000)
            return byte, factor.to(tl.float32, bitcast=True)
    elif mode == "even":
        byte = tl.maximum(((amax_bits + (1 << (22 - mantissa_bits(element)))) >> 23) - emax(element), 0)
    elif mode == "ceil":
        byte = tl.maximum(((amax_bits + 0x7FFFFF) >> 23) - emax(element), 0)
    else:
        byte = tl.maximum((amax_bits >> 23) - emax(element), 0)
    # The scale of a block that is not finite is NaN.
    byte = tl.where(amax_bits < INFINITY_BITS, byte, 255)
    subnormal = tl.where(byte == 254, 0x400000, 0x200000)
    factor = tl.where(byte < 254, (254 - byte) << 23, subnormal)
    return byte, factor.to(tl.float32, bitcast=True)


@triton.jit
def block_scale(
    amax_bits, encode, decode, has_outer: tl.constexpr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Bits of block amaxes -> (bits of scales as int32, factors that encode the block's elements).

    encode, decode: global or row scales, which broadcast to the amaxes; not used unless has_outer.
    """
    if SCALE == "e8m0":
        return e8m0_scale(amax_bits, ELEMENT, CONTRACT, ISA)
    elif SCALE == "e4m3":
        return e4m3_scale(amax_bits, encode, decode, CONTRACT, has_outer, ISA)
    elif SCALE == "float32":  # the scale of a block that is not finite is NaN
        encode, decode = float8_scale(amax_bits, ELEMENT, CONTRACT, ISA)
        finite = amax_bits < INFINITY_BITS
        return tl.where(finite, decode.to(tl.int32, bitcast=True), 0x7FC00000), tl.where(finite, encode, float("nan"))
    else:  # no block scales: only the global or row scale encodes elements
        return amax_bits, tl.broadcast_to(encode, amax_bits.shape)


@triton.jit
def outer_scales(OUTER: tl.constexpr, outer_ptr, amax_ptr, PARTIAL_MAXIMA: tl.constexpr, ELEMENT: tl.constexpr,
                 SCALE: tl.constexpr, CONTRACT: tl.constexpr, ISA: tl.constexpr):  # fmt: skip
    """The global scale of a tensor, as (encode, decode) factors, scalars in float32.

    OUTER "none": both are 1. "tensor": the decode factor is read at outer_ptr. "amax": it is made of the amax of the
    tensor, and the first program stores it at outer_ptr. amax_ptr points to the bits of PARTIAL_MAXIMA partial maxima
    (int32). Any other OUTER: both are 1, and the caller makes its own scales.
    """
    encode = 1.0
    decode = 1.0
    if OUTER == "tensor":
        decode = tl.load(outer_ptr)
        encode = encode_scale(decode, ISA)
    elif OUTER == "amax":
        if PARTIAL_MAXIMA == 1:
            bits = tl.load(amax_ptr)
        else:
            bits = tl.max(tl.load(amax_ptr + tl.arange(0, PARTIAL_MAXIMA)), 0)
        encode, decode = outers_of_amax(bits, ELEMENT, SCALE, CONTRACT, ISA)
        if tl.program_id(0) == 0:
            tl.store(outer_ptr, decode)
    return encode, decode


@triton.jit
def outers_of_amax(amax_bits, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, ISA: tl.constexpr):
    """Bits of amaxes -> (encode, decode) factors in float32 of formats with or without block scales."""
    if SCALE == "none":
        return float8_scale(amax_bits, ELEMENT, CONTRACT, ISA)
    else:
        return outer_from_amax(amax_bits, CONTRACT, ISA)


@triton.jit
def make_outer_scales(
    amax_ptr, outer_ptr, at, mask, first,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The (encode, decode) factors of some rows or columns, made of their amax bits at the pointers amax_ptr.

    Several programs compute equal scales. The program with `first` stores the decode factors, at outer_ptr + at.
    """
    encode, decode = outers_of_amax(tl.load(amax_ptr, mask=mask, other=0), ELEMENT, SCALE, CONTRACT, ISA)
    if first:
        tl.store(outer_ptr + at, decode, mask=mask)
    return encode, decode
