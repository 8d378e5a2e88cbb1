"""E2M1 codes and E4M3 scales for Hopper, two in one instruction where that is exact.

Made for `quantize_both`. The plain forms are in `elements`; `packed_rounding` says where these may stand in for them.
"""

import struct

import triton
import triton.language as tl


def _codes_ptx(steps: list[str], signed: bool) -> str:
    """Eight E2M1 codes of four pairs -> $0.

    steps[i] makes, of the pair i in fp16, h: the magnitudes rounded, with the code in the upper byte, shifted by 1, or
    a NaN for the code 7; and y: the products, for their signs, unless h has them (`signed`). The first two pairs go to
    the lower halves of the four bytes, the other two to the upper halves.
    """
    select = "0xE4"  # the first operand where the mask, the third one, has ones, elsewhere the second
    each_sign = "0xFDB9"  # in all bits of its byte
    low = f"prmt.b32 low, {'h0, h1' if signed else 'y0, y1'}, {each_sign};"
    high = "mov.b32 high, odd;" if signed else f"prmt.b32 high, y2, y3, {each_sign};"
    return (
        "{ .reg .f32 a, b, p, q, v<8>; .reg .b32 t, m, n, y<4>, h<4>, even, odd, low, high; "
        + "".join(step.replace("@y", f"y{i}").replace("@h", f"h{i}") for i, step in enumerate(steps))
        + f"prmt.b32 even, h0, h1, 0x7531; prmt.b32 odd, h2, h3, 0x7531; {low} {high}"
        f" shr.u32 even, even, 1; shl.b32 odd, odd, 3; lop3.b32 even, even, odd, 0x07070707, {select};"
        f" lop3.b32 odd, high, low, 0x80808080, {select}; lop3.b32 $0, even, odd, 0x77777777, {select}; }}"
    )


def _in_fp16_ptx(first: str, second: str, factor: str) -> str:
    """A step of `_codes_ptx`: two float32 values times a factor that carries 2^-14, rounded as products in fp16.

    As in `codec._e2m1_gather_ptx`, in fp16: 2^9 p in place of 2^22 p. Rounding twice, first to fp16, is harmless where
    `packed_rounding` allows it. There is no clamp: what is not finite ends as a NaN, all else rounds to 6 at most.
    """
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {factor}, 0f00000000;"
        " cvt.rn.f16x2.f32 @y, b, a; abs.f16x2 m, @y; mov.b32 t, 0x05000500; max.f16x2 n, m, t;"
        " mov.b32 t, 0xE000E000; fma.rn.f16x2 @h, n, t, m; mov.b32 t, 0x60006000; fma.rn.f16x2 @h, n, t, @h; "
    )


def _in_float32_ptx(first: str, second: str, factor: str) -> str:
    """A step of `_codes_ptx` for every product: rounded in float32, scaled and clamped in fp16."""
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {factor}, 0f00000000;"
        " cvt.rn.f16x2.f32 @y, b, a;"
        # p has the sign that y has not, so that 2^22 p + y does not leave the exponent of 2^22 p.
        " mov.b32 p, 0fBFA00000; max.xorsign.abs.f32 q, b, p; max.xorsign.abs.f32 p, a, p;"
        " fma.rn.f32 a, p, 0f4A800000, a; fma.rn.f32 a, p, 0fCA800000, a;"
        " fma.rn.f32 b, q, 0f4A800000, b; fma.rn.f32 b, q, 0fCA800000, b;"
        " cvt.rn.f16x2.f32 @h, b, a; mov.b32 t, 0x04000400; mul.rn.f16x2 @h, @h, t; abs.f16x2 @h, @h;"
        " mov.b32 t, 0x0E000E00; min.f16x2 @h, @h, t; "
    )


def _bounded_ptx(first: str, second: str, factor: str) -> str:
    """A signed step of `_codes_ptx` for products that round to 6 at most, or are NaN; the factor carries 2^-14.

    As `_in_float32_ptx`, but p has the sign of y, and a 2^-24th part less is subtracted than was added. That leaves p/4
    beside the rounded product: less than its step, so that the code is the same, and never 0, so that what rounds to 0
    keeps its sign. Just below 2 and 4 the sum may leave the exponent of 2^22 p, and be rounded to a step less: p/4
    makes up for it. (Checked for every float32 up to 7.)
    """
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {factor}, 0f00000000;"
        " mov.b32 p, 0f38A00000; max.xorsign.abs.f32 q, b, p; max.xorsign.abs.f32 p, a, p;"
        " fma.rn.f32 a, p, 0f4A800000, a; fma.rn.f32 a, p, 0fCA7FFFFF, a;"
        " fma.rn.f32 b, q, 0f4A800000, b; fma.rn.f32 b, q, 0fCA7FFFFF, b; cvt.rn.f16x2.f32 @h, b, a; "
    )


def _unpack_ptx(word: str, i: int, j: int, dtype: str) -> str:
    """A word of two elements -> the float32 values v{i}, v{j}."""
    if dtype == "bf16":
        return f"shl.b32 t, {word}, 16; mov.b32 v{i}, t; and.b32 t, {word}, 0xFFFF0000; mov.b32 v{j}, t; "
    return f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, {word}; cvt.f32.f16 v{i}, low; cvt.f32.f16 v{j}, high; }} "


def _row_ptx(step, dtype: str, signed: bool = False) -> str:
    """Four words $1-$4 of a row times the factor $5 -> eight codes."""
    unpacked = "".join(_unpack_ptx(f"${1 + i}", 2 * i, 2 * i + 1, dtype) for i in range(4))
    pairs = [step(f"v{i}", f"v{j}", "$5") for i, j in ((0, 2), (4, 6), (1, 3), (5, 7))]
    return _codes_ptx([unpacked + pairs[0], *pairs[1:]], signed)


def _columns_ptx(step, dtype: str, signed: bool = False) -> str:
    """Words $1-$4 of neighbouring rows, times the factors $5, $6 -> four codes of either column."""
    unpacked = "".join(_unpack_ptx(f"${1 + i}", i, 4 + i, dtype) for i in range(4))
    pairs = [step(f"v{i}", f"v{i + 2}", "$6" if i >= 4 else "$5") for i in (0, 4, 1, 5)]
    return _codes_ptx([unpacked + pairs[0], *pairs[1:]], signed)


_ROW = tl.constexpr(_row_ptx(_in_fp16_ptx, "bf16"))
_ROW_BOUNDED = tl.constexpr(_row_ptx(_bounded_ptx, "bf16", signed=True))
_ROW_BF16 = tl.constexpr(_row_ptx(_in_float32_ptx, "bf16"))
_ROW_FP16 = tl.constexpr(_row_ptx(_in_float32_ptx, "fp16"))
_COLUMNS = tl.constexpr(_columns_ptx(_in_fp16_ptx, "bf16"))
_COLUMNS_BOUNDED = tl.constexpr(_columns_ptx(_bounded_ptx, "bf16", signed=True))
_COLUMNS_BF16 = tl.constexpr(_columns_ptx(_in_float32_ptx, "bf16"))
_COLUMNS_FP16 = tl.constexpr(_columns_ptx(_in_float32_ptx, "fp16"))


def float32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


MOST = tl.constexpr(0x45284528)  # 6 * 448 twice: beyond it, only saturated E4M3 scales are
LEAST_AMAX = tl.constexpr(0x3DC03DC0)  # 6 * 2^-6 twice: its E4M3 scale is the smallest of the contract
PACKED_SCALE = tl.constexpr(2.0**-14)
_PACKED_SCALE_ABOVE = tl.constexpr(2.0**-14 * (1 + 0.90625 * 2.0**-11))


@triton.constexpr_function
def packed_rounding(element, scale, contract, outer, dtype, isa):
    """How E2M1 codes are rounded (`encode_packed_row`, `encode_packed_columns`); "" if not here.

    "float32" does every product. "bounded" does those of the contract "torchao" with an `ordinary` outer scale: block
    scales from 2^-6 on leave none above 6.4, unless they saturate. "fp16" is for products that do not lie so close to
    a tie that fp16 cannot tell: of bf16 elements with powers of two and with reciprocals of E4M3 numbers, not with
    those times an outer scale (tests/test_packed_rounding.py). Scales of the contract "floor" leave products up to 8.
    """
    if element != "e2m1" or not 90 <= isa < 100:
        return ""
    quick = contract != "floor" if scale == "e8m0" else contract == "torchao"
    if dtype != tl.bfloat16 or not quick:
        return "float32"
    return "fp16" if outer == "none" else "bounded"


_PACKED_E4M3_SCALES = tl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 t, h, zero; .reg .b16 p, low, high; .reg .pred top;"
    # An infinity times 0 is a NaN; it stays one, and shows in the scale.
    " mov.b32 zero, 0; fma.rn.bf16x2 h, $3, zero, $3;"
    " shl.b32 t, h, 16; mov.b32 a, t; and.b32 t, h, 0xFFFF0000; mov.b32 b, t;"
    " abs.f32 a, a; mul.rn.f32 a, a, 0f3E2AAAAB; abs.f32 b, b; mul.rn.f32 b, b, 0f3E2AAAAB;"
    " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.u32.u16 $0, p; cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {low, high}, h;"
    + "".join(
        f" cvt.f32.f16 a, {half}; rcp.approx.ftz.f32 a, a; not.b32 t, h; and.b32 t, t, {mantissa};"
        f" setp.eq.u32 top, t, 0; selp.f32 b, 0f%08X, 0f38800000, top; mul.rn.f32 {factor}, a, b;"
        for half, mantissa, factor in (("low", "0x380", "$1"), ("high", "0x3800000", "$2"))
    )
    % ((float32_bits(_PACKED_SCALE_ABOVE.value),) * 2)
    + " }"
)


@triton.jit
def packed_e4m3_scales(amaxes):
    """Words of two bf16 amaxes (of any sign, not below `LEAST_AMAX`) -> (both bytes in an int32, the factor of each).

    The factors carry 2^-14. The float32 reciprocal of 15 (times a power of two) is so much too large that 5/4, 5/2 and
    5 times 15 come out above the tie; fp16 would not show it without `_PACKED_SCALE_ABOVE`.
    As `block_scales.e4m3_scale`, contract "torchao" without an outer scale: for bf16 a product with 1/6 rounds like the
    quotient. The factors may be an approximate reciprocal's last place off: far less than fp16 shows.
    """
    return tl.inline_asm_elementwise(
        _PACKED_E4M3_SCALES, "=&r,=&f,=f,r", [amaxes], dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1
    )


def _quotient_ptx(into: str, dividend: str, divisor: str, reciprocal: str) -> str:
    """dividend / divisor from a reciprocal: a product, corrected by its exact remainder.

    Correctly rounded (checked for all mantissas) where the dividend is a sixth of a bf16 number, the divisor any
    float32 and the reciprocal rounded; and where the dividend is any float32, the divisor an E4M3 number, and the
    reciprocal at most the last place off. Nothing may under- or overflow.
    """
    return (
        f" mul.rn.f32 {into}, {dividend}, {reciprocal}; neg.f32 r, {into}; fma.rn.f32 r, r, {divisor}, {dividend};"
        f" fma.rn.f32 {into}, r, {reciprocal}, {into};"
    )


def _outer_scales_ptx(scaled: bool, guarded: bool) -> str:
    """Words $3 of two bf16 amaxes, of any sign -> $0 both E4M3 bytes, $1 and $2 the factors.

    $4, $5: encode and decode scale. scaled: $4 carries 2^-14, $5 2^14, the factors 2^-14. guarded: amaxes may be not
    finite, or larger than $6.
    """
    sixth = 2.0**14 / 6 if scaled else 1 / 6
    high = struct.unpack("<f", struct.pack("<f", sixth))[0]
    # An infinity times 0 is a NaN; it stays one, and shows in the scale.
    guard = "mov.b32 t, 0; fma.rn.bf16x2 h, $3, t, $3; min.NaN.xorsign.abs.bf16x2 h, h, $6;"
    return (
        "{ .reg .f32 a, b, r, s, y; .reg .b32 t, h; .reg .b16 p, low, high; "
        + (guard if guarded else "mov.b32 h, $3;")
        + " shl.b32 t, h, 16; mov.b32 a, t; and.b32 t, h, 0xFFFF0000; mov.b32 b, t; abs.f32 a, a; abs.f32 b, b;"
        + "".join(
            # A sixth, correctly rounded (checked for all mantissas): the constant and what it lacks.
            f" mul.rn.f32 s, {amax}, 0f{float32_bits(sixth - high):08X};"
            f" fma.rn.f32 s, {amax}, 0f{float32_bits(sixth):08X}, s;"
            + _quotient_ptx(amax, "s", "$5", "$4")
            + f" max.NaN.f32 {amax}, {amax}, 0f3C800000;"
            for amax in ("a", "b")
        )
        + " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.u32.u16 $0, p; cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {low, high}, h;"
        + "".join(
            f" cvt.f32.f16 s, {half}; rcp.approx.ftz.f32 y, s;" + _quotient_ptx(factor, "$4", "s", "y")
            for half, factor in (("low", "$1"), ("high", "$2"))
        )
        + " }"
    )


_OUTER_SCALES = tl.constexpr(_outer_scales_ptx(scaled=False, guarded=True))
_OUTER_SCALES_BOUNDED = tl.constexpr(_outer_scales_ptx(scaled=True, guarded=False))
_OUTER_SCALES_CLAMPED = tl.constexpr(_outer_scales_ptx(scaled=True, guarded=True))


@triton.jit
def ordinary(decode):
    """Whether `packed_outer_scales` knows how to divide by the outer scale: nothing that counts over- or underflows."""
    return (decode > 2.0**-60) & (decode < 2.0**60)


@triton.jit
def most_packed(decode):
    """6 * 448 times an outer scale, twice, rounded down to bf16: from there on, scales saturate and codes are 7."""
    bits = (decode * 2688.0).to(tl.int32, bitcast=True)
    return (bits & -65536) | (bits >> 16)


@triton.jit
def packed_outer_scales(amaxes, most, encode, decode, ROUNDING: tl.constexpr, CLAMP: tl.constexpr):
    """Words of two bf16 amaxes (of any sign) -> (both bytes in an int32, the factor of each).

    As `block_scales.e4m3_scale`, contract "torchao", with an `ordinary` outer scale. Factors carry 2^-14 if ROUNDING is
    "bounded"; then no amax is above `most` (`most_packed`) or not finite unless CLAMP says that one may be.
    """
    ptx: tl.constexpr = _OUTER_SCALES_CLAMPED if CLAMP else _OUTER_SCALES_BOUNDED
    if ROUNDING == "bounded":
        encode *= PACKED_SCALE
        decode *= 1 / PACKED_SCALE
    return tl.inline_asm_elementwise(
        ptx if ROUNDING == "bounded" else _OUTER_SCALES, "=&r,=&f,=&f,r,f,f,r", [amaxes, encode, decode, most],
        dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def clamp_packed(word, most):
    """Words of two bf16 elements, clamped to +-`most` (of both halves). No NaN remains."""
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [word, most], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def encode_packed_row(words, factor, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """Four words of two elements side by side, times a factor -> eight E2M1 codes (int32)."""
    exact: tl.constexpr = _ROW_BF16 if dtype == tl.bfloat16 else _ROW_FP16
    ptx: tl.constexpr = _ROW if ROUNDING == "fp16" else _ROW_BOUNDED if ROUNDING == "bounded" else exact
    return tl.inline_asm_elementwise(ptx, "=r,r,r,r,r,f", words + (factor,), dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def encode_packed_columns(words, first_factor, second_factor, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """Four words of neighbouring rows, times factors -> four E2M1 codes of each column, in the halves of an int32."""
    exact: tl.constexpr = _COLUMNS_BF16 if dtype == tl.bfloat16 else _COLUMNS_FP16
    ptx: tl.constexpr = _COLUMNS if ROUNDING == "fp16" else _COLUMNS_BOUNDED if ROUNDING == "bounded" else exact
    return tl.inline_asm_elementwise(
        ptx, "=r,r,r,r,r,f,f", words + (first_factor, second_factor), dtype=tl.int32, is_pure=True, pack=1
    )
