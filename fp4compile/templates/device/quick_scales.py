"""E4M3 block scales with a global or row scale, without divisions: for SM100.

An IEEE division takes a dozen instructions and a test for over- and underflow. Here a quotient is a product with the
reciprocal, corrected by its exact remainder. It has the same bits if nothing over- or underflows, which
`in_quick_range` tests on the global or row scale. The plain forms are in `block_scales`.
"""

import struct

import triton
import triton.language as tl

SIXTH = tl.constexpr(0.1666666716337204)  # 1/6 in float32


def float32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def quotient_ptx(into: str, dividend: str, divisor: str, reciprocal: str) -> str:
    """PTX: into = dividend / divisor, given the divisor's reciprocal: a product, corrected by its exact remainder.

    It is correctly rounded in two cases, if nothing under- or overflows. One: any float32 numbers and the correctly
    rounded reciprocal (checked for all divisors, with the dividends whose quotients lie nearest to a tie). Two: an E4M3
    divisor and a reciprocal wrong by at most one in the last bit (checked for all mantissas).
    """
    return (
        f" mul.rn.f32 {into}, {dividend}, {reciprocal}; neg.f32 r, {into}; fma.rn.f32 r, r, {divisor}, {dividend};"
        f" fma.rn.f32 {into}, r, {reciprocal}, {into};"
    )


def sixth_ptx(into: str, value: str, times: float = 1.0) -> str:
    """PTX: into = value * times / 6, correctly rounded (checked for all mantissas): 1/6 as a sum of two constants.

    An infinite value gives NaN. times: a power of two.
    """
    high = struct.unpack("<f", struct.pack("<f", times / 6))[0]
    return (
        f" mul.rn.f32 {into}, {value}, 0f{float32_bits(times / 6 - high):08X};"
        f" fma.rn.f32 {into}, {value}, 0f{float32_bits(high):08X}, {into};"
    )


def _scales_ptx(scale: str, factor: str) -> str:
    """PTX: two block amaxes $4, $5 -> their E4M3 bytes in $0, $1, factors in $2, $3. $6, $8: global or row scales.

    scale: PTX that makes the scale s of the amax @a. factor: PTX that makes the factor @f of the rounded scale s.
    """
    return (
        "{ .reg .f32 r, s, y, a, b; .reg .b32 h; .reg .b16 p, low, high;"
        + scale.replace("@a", "$4") + " mov.f32 a, s;" + scale.replace("@a", "$5") + " mov.f32 b, s;"
        + " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.u32.u16 $0, p; shr.u32 $1, $0, 8; and.b32 $0, $0, 255;"
        " cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {low, high}, h; cvt.f32.f16 s, low;" + factor.replace("@f", "$2")
        + " cvt.f32.f16 s, high;" + factor.replace("@f", "$3") + " }"
    )  # fmt: skip


# The scale of an infinite amax is NaN (`sixth_ptx`); the scale of an amax above 512 decode scales is 448 anyway.
_TORCHAO_SCALES = tl.constexpr(
    _scales_ptx(
        sixth_ptx("s", "@a") + " mul.rn.f32 y, $8, 0f44000000; min.NaN.f32 y, s, y;"
        + quotient_ptx("s", "y", "$8", "$6") + " max.NaN.f32 s, s, 0f3C800000;",
        " rcp.approx.ftz.f32 y, s;" + quotient_ptx("@f", "$6", "s", "y"),
    )
)  # fmt: skip
# Infinity times 0 is NaN. A scale of 0 has the factor FLT_MAX: twice the FLT_MAX / 2 that the minimum leaves.
_TE_SCALES = tl.constexpr(
    _scales_ptx(
        " mul.rn.f32 s, @a, $6; fma.rn.f32 s, @a, 0f00000000, s;",
        " mul.rn.f32 s, s, $8; rcp.approx.ftz.f32 y, s; min.NaN.f32 y, y, 0f7EFFFFFF; neg.f32 r, y;"
        " fma.rn.f32 r, r, s, 0f3F800000; fma.rn.f32 @f, y, r, y;",
    )
)


@triton.jit
def in_quick_range(decode):
    """Whether a global or row scale (float32) needs no divisions: no relevant product over- or underflows."""
    return (decode > 2.0**-60) & (decode < 2.0**60)


@triton.jit
def quick_e4m3_scale(amax, encode, decode, contract: tl.constexpr):
    """`block_scales.e4m3_scale` for global or row scales that are `in_quick_range`. amax: float32."""
    if contract == "torchao":
        return tl.inline_asm_elementwise(
            _TORCHAO_SCALES, "=&r,=&r,=&f,=&f,f,f,f,f,f,f", [amax, encode, decode], dtype=(tl.int32, tl.float32),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _TE_SCALES, "=&r,=&r,=&f,=&f,f,f,f,f,f,f", [amax, encode * SIXTH, decode], dtype=(tl.int32, tl.float32),
            is_pure=True, pack=2,
        )  # fmt: skip
