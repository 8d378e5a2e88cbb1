"""E2M1 codes from products in fp16, two in one instruction: for Hopper, where this is exact.

Made for `quantize_both`. The float32 forms are in `codec`; `packed_rounding` says where this one may stand in for them.
"""

import triton
import triton.language as tl


def _packed_round_ptx(i: int, word: str, even_factor: str, odd_factor: str) -> str:
    """Two bf16 elements of a word times factors -> y{i}, the products in fp16, and h{i}, their magnitudes rounded.

    As in `codec._e2m1_gather_ptx`, in fp16: 2^9 p in place of 2^22 p. The factors carry 2^-14, so that the upper byte
    of a rounded magnitude is its code, shifted by 1. Rounding twice, first to fp16, is harmless where
    `packed_rounding` allows it.
    """
    return (
        f"shl.b32 t, {word}, 16; mov.b32 a, t; and.b32 t, {word}, 0xFFFF0000; mov.b32 b, t;"
        f" fma.rn.f32 a, a, {even_factor}, 0f00000000; fma.rn.f32 b, b, {odd_factor}, 0f00000000;"
        f" cvt.rn.f16x2.f32 y{i}, b, a; abs.f16x2 m, y{i}; min.f16x2 m, m, six; max.f16x2 p, m, least;"
        f" fma.rn.f16x2 h{i}, p, minus, m; fma.rn.f16x2 h{i}, p, plus, h{i}; "
    )


_PACKED_CONSTANTS = (
    " mov.b32 six, 0x0E000E00; mov.b32 least, 0x05000500; mov.b32 minus, 0xE000E000; mov.b32 plus, 0x60006000; "
)


def _signed_bytes_ptx(into: str, i: int, j: int) -> str:
    """Codes shifted by 1, with their signs: bytes of the even elements of words i and j, then of the odd ones."""
    return (
        f"prmt.b32 {into}, h{i}, h{j}, 0x7351; prmt.b32 t, y{i}, y{j}, 0xFBD9;"
        f" lop3.b32 {into}, {into}, t, 0x10101010, 0xF8; "
    )


def _packed_row_ptx() -> str:
    """Four words $1-$4 of a row times the factor $5 -> eight codes."""
    rounds = "".join(_packed_round_ptx(i, f"${1 + i}", "$5", "$5") for i in range(4))
    return (
        "{ .reg .f32 a, b; .reg .b32 t, m, p, six, least, minus, plus, y<4>, h<4>, low, high, even, odd;"
        + _PACKED_CONSTANTS
        + rounds
        + _signed_bytes_ptx("low", 0, 1)
        + _signed_bytes_ptx("high", 2, 3)
        + "prmt.b32 even, low, high, 0x5410; prmt.b32 odd, low, high, 0x7632;"
        " shr.u32 even, even, 1; mad.lo.u32 $0, odd, 8, even; }"
    )


def _packed_columns_ptx() -> str:
    """Eight words $2-$9 of neighbouring rows, times the factors $10, $11 -> eight codes of each of two columns."""
    rounds = "".join(_packed_round_ptx(i, f"${2 + i}", "$10", "$11") for i in range(8))
    merges = "".join(
        _signed_bytes_ptx("low", i, i + 2)
        + _signed_bytes_ptx("high", i + 1, i + 3)
        + f"shr.u32 low, low, 1; mad.lo.u32 rows{i // 4}, high, 8, low; "
        for i in (0, 4)
    )
    return (
        "{ .reg .f32 a, b; .reg .b32 t, m, p, six, least, minus, plus, y<8>, h<8>, low, high, rows<2>;"
        + _PACKED_CONSTANTS
        + rounds
        + merges
        + "prmt.b32 $0, rows0, rows1, 0x5410; prmt.b32 $1, rows0, rows1, 0x7632; }"
    )


_PACKED_ROW = tl.constexpr(_packed_row_ptx())
_PACKED_COLUMNS = tl.constexpr(_packed_columns_ptx())
_PACKED_SCALE = tl.constexpr(2.0**-14)
_PACKED_SCALE_ABOVE = tl.constexpr(2.0**-14 * (1 + 2.0**-11))


@triton.constexpr_function
def packed_rounding(element, scale, contract, dtype, isa):
    """Whether E2M1 codes may be rounded from products in fp16 (`encode_packed_row`, `encode_packed_columns`).

    Such a product of a bf16 element must not lie so close to a tie that fp16 cannot tell: true of powers of two, and of
    reciprocals of E4M3 numbers, not of those times an outer scale (tests/test_packed_rounding.py).
    """
    exact = scale == "e8m0" or (scale == "e4m3" and contract == "torchao")
    return element == "e2m1" and dtype == tl.bfloat16 and 90 <= isa < 100 and exact


@triton.jit
def packed_factor(factor, byte, SCALE: tl.constexpr):
    """Factors as the packed forms want them, of scale bytes.

    The float32 reciprocal of 15 (times a power of two) is so much too large that 5/4, 5/2 and 5 times 15 come out above
    the tie; fp16 would not show it.
    """
    if SCALE == "e4m3":
        return factor * tl.where((byte & 7) == 7, _PACKED_SCALE_ABOVE, _PACKED_SCALE)
    else:
        return factor * _PACKED_SCALE


_PACKED_E4M3_SCALES = tl.constexpr(
    "{ .reg .f32 a, b, c, d; .reg .b32 t, h; .reg .b16 p, low, high; .reg .pred top;"
    " shl.b32 t, $3, 16; and.b32 t, t, 0x7FFF0000; mov.b32 a, t; and.b32 t, $3, 0x7FFF0000; mov.b32 b, t;"
    # An infinity times 0 is a NaN; it stays one, and shows in the scale.
    + "".join(
        f" mul.rn.f32 {q}, {amax}, 0f3E2AAAAB; fma.rn.f32 {q}, {amax}, 0f00000000, {q};"
        f" max.NaN.f32 {q}, {q}, 0f3C800000;"
        for amax, q in (("a", "c"), ("b", "d"))
    )
    + " cvt.rn.satfinite.e4m3x2.f32 p, d, c; cvt.u32.u16 $0, p; cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {low, high}, h;"
    + "".join(
        f" cvt.f32.f16 a, {half}; rcp.approx.ftz.f32 b, a; neg.f32 c, b; fma.rn.f32 c, c, a, 0f3F800000;"
        f" fma.rn.f32 b, b, c, b; not.b32 t, h; and.b32 t, t, {mantissa}; setp.eq.u32 top, t, 0;"
        f" selp.f32 c, 0f38802000, 0f38800000, top; mul.rn.f32 {factor}, b, c;"
        for half, mantissa, factor in (("low", "0x380", "$1"), ("high", "0x3800000", "$2"))
    )
    + " }"
)


@triton.jit
def packed_e4m3_scales(amaxes):
    """Words of two bf16 amaxes (of any sign) -> (first byte, its `packed_factor`, second byte, its factor).

    As `codec.e4m3_scale`, contract "torchao" without an outer scale: for bf16 a product with 1/6 rounds like the
    quotient.
    """
    bytes, first, second = tl.inline_asm_elementwise(
        _PACKED_E4M3_SCALES, "=r,=f,=f,r", [amaxes], dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1
    )
    return bytes & 0xFF, first, bytes >> 8, second


@triton.jit
def encode_packed_row(word0, word1, word2, word3, factor):
    """Words of two bf16 elements side by side, times a `packed_factor` -> eight E2M1 codes (int32)."""
    return tl.inline_asm_elementwise(
        _PACKED_ROW, "=r,r,r,r,r,f", [word0, word1, word2, word3, factor],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def encode_packed_columns(words, first_factor, second_factor):
    """Eight words of neighbouring rows, times `packed_factor`s -> eight E2M1 codes (int32) of each column."""
    return tl.inline_asm_elementwise(
        _PACKED_COLUMNS, "=r,=r,r,r,r,r,r,r,r,r,f,f",
        words + (first_factor, second_factor),
        dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
