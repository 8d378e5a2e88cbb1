"""E2M1 codes and E4M3 scales for Hopper by packed instructions, which compute two at a time, where that is exact.

Made for `quantize_both`; the quickest form serves rows of prologues as well. The plain forms are in `elements` and
`block_scales`. The function `packed_rounding` returns the form that gives the same bits.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.quick_scales import float32_bits, quotient_ptx, sixth_ptx


def _codes_ptx(steps: list[str], signed: bool) -> str:
    """PTX: eight E2M1 codes, made in four pairs -> $0.

    steps[i] is the PTX of pair i. It makes two registers of two fp16 numbers. h: the rounded magnitudes, whose upper
    bytes are the codes shifted by 1, or NaN for the code 7. y: the products, for their signs; not made if h has the
    signs (`signed`). The first two pairs go to the lower halves of the four bytes of $0, the others to the upper ones.
    """
    select = "0xE4"  # lop3: the first operand where the third one, the mask, has ones; elsewhere the second
    each_sign = "0xFDB9"  # prmt: the sign of each fp16 number in all bits of a byte
    low = f"prmt.b32 low, {'h0, h1' if signed else 'y0, y1'}, {each_sign};"
    high = "mov.b32 high, odd;" if signed else f"prmt.b32 high, y2, y3, {each_sign};"
    return (
        "{ .reg .f32 a, b, p, q, v<8>; .reg .b32 t, m, n, y<4>, h<4>, even, odd, low, high; "
        + "".join(step.replace("@y", f"y{i}").replace("@h", f"h{i}") for i, step in enumerate(steps))
        + f"prmt.b32 even, h0, h1, 0x7531; prmt.b32 odd, h2, h3, 0x7531; {low} {high}"
        f" shr.u32 even, even, 1; shl.b32 odd, odd, 3; lop3.b32 even, even, odd, 0x07070707, {select};"
        f" lop3.b32 odd, high, low, 0x80808080, {select}; lop3.b32 $0, even, odd, 0x77777777, {select}; }}"
    )


def _in_fp16_ptx(first: str, second: str, factor: str, second_factor: str = "") -> str:
    """A step of `_codes_ptx`: two float32 values times a factor (which carries 2^-14), rounded to E2M1 in fp16.

    It rounds as `elements._e2m1_gather_ptx` does, with 2^9 p instead of 2^22 p. The products are rounded twice, first
    to fp16; where `packed_rounding` returns "fp16", that changes no code. No clamp is needed: products that are not
    finite end as NaN, and all others round to 6 at most.
    """
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {second_factor or factor}, 0f00000000;"
        " cvt.rn.f16x2.f32 @y, b, a; abs.f16x2 m, @y; mov.b32 t, 0x05000500; max.f16x2 n, m, t;"
        " mov.b32 t, 0xE000E000; fma.rn.f16x2 @h, n, t, m; mov.b32 t, 0x60006000; fma.rn.f16x2 @h, n, t, @h; "
    )


def _in_float32_ptx(first: str, second: str, factor: str, second_factor: str = "") -> str:
    """A step of `_codes_ptx` for any product: rounded to E2M1 in float32, then scaled and clamped in fp16."""
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {second_factor or factor}, 0f00000000;"
        " cvt.rn.f16x2.f32 @y, b, a;"
        # p and y have opposite signs, so that 2^22 p + y keeps the exponent of 2^22 p.
        " mov.b32 p, 0fBFA00000; max.xorsign.abs.f32 q, b, p; max.xorsign.abs.f32 p, a, p;"
        " fma.rn.f32 a, p, 0f4A800000, a; fma.rn.f32 a, p, 0fCA800000, a;"
        " fma.rn.f32 b, q, 0f4A800000, b; fma.rn.f32 b, q, 0fCA800000, b;"
        " cvt.rn.f16x2.f32 @h, b, a; mov.b32 t, 0x04000400; mul.rn.f16x2 @h, @h, t; abs.f16x2 @h, @h;"
        " mov.b32 t, 0x0E000E00; min.f16x2 @h, @h, t; "
    )


def _bounded_ptx(first: str, second: str, factor: str, second_factor: str = "") -> str:
    """A signed step of `_codes_ptx`, for products that round to 6 at most or are NaN. The factor carries 2^-14.

    It rounds as `_in_float32_ptx` does, but p has the sign of y, and the subtracted number is smaller by p/4 than the
    added one. So p/4 remains beside the rounded product. p/4 is less than a step of E2M1, so the code does not change;
    and p/4 is never 0, so a product that rounds to 0 keeps its sign. Just below 2 and 4 the sum may have another
    exponent than 2^22 p, and be rounded to one step less: p/4 makes up for it. (Checked for every float32 up to 7.)
    """
    return (
        f"fma.rn.f32 a, {first}, {factor}, 0f00000000; fma.rn.f32 b, {second}, {second_factor or factor}, 0f00000000;"
        " mov.b32 p, 0f38A00000; max.xorsign.abs.f32 q, b, p; max.xorsign.abs.f32 p, a, p;"
        " fma.rn.f32 a, p, 0f4A800000, a; fma.rn.f32 a, p, 0fCA7FFFFF, a;"
        " fma.rn.f32 b, q, 0f4A800000, b; fma.rn.f32 b, q, 0fCA7FFFFF, b; cvt.rn.f16x2.f32 @h, b, a; "
    )


def _unpack_ptx(word: str, i: int, j: int, dtype: str) -> str:
    """PTX: a word of two elements -> the float32 registers v{i} and v{j}."""
    if dtype == "bf16":
        return f"shl.b32 t, {word}, 16; mov.b32 v{i}, t; and.b32 t, {word}, 0xFFFF0000; mov.b32 v{j}, t; "
    return f"{{ .reg .b16 low, high; mov.b32 {{low, high}}, {word}; cvt.f32.f16 v{i}, low; cvt.f32.f16 v{j}, high; }} "


def _row_ptx(step, dtype: str, signed: bool = False) -> str:
    """PTX: four neighbouring words $1-$4 of a row, times the factor $5 -> eight codes in $0."""
    unpacked = "".join(_unpack_ptx(f"${1 + i}", 2 * i, 2 * i + 1, dtype) for i in range(4))
    pairs = [step(f"v{i}", f"v{j}", "$5") for i, j in ((0, 2), (4, 6), (1, 3), (5, 7))]
    return _codes_ptx([unpacked + pairs[0], *pairs[1:]], signed)


def _words_ptx(step, signed: bool = False) -> str:
    """PTX: four words $1-$4 of two bf16 elements, times their factors $5-$8 -> eight codes in $0."""
    unpacked = "".join(_unpack_ptx(f"${1 + i}", 2 * i, 2 * i + 1, "bf16") for i in range(4))
    pairs = [step(f"v{i}", f"v{i + 2}", f"${5 + i // 2}", f"${6 + i // 2}") for i in (0, 4, 1, 5)]
    return _codes_ptx([unpacked + pairs[0], *pairs[1:]], signed)


def _columns_ptx(step, dtype: str, signed: bool = False) -> str:
    """PTX: words $1-$4 of four neighbouring rows, times the factors $5, $6 of their two columns -> eight codes in $0.

    The codes of the first column are the lower half of $0.
    """
    unpacked = "".join(_unpack_ptx(f"${1 + i}", i, 4 + i, dtype) for i in range(4))
    pairs = [step(f"v{i}", f"v{i + 2}", "$6" if i >= 4 else "$5") for i in (0, 4, 1, 5)]
    return _codes_ptx([unpacked + pairs[0], *pairs[1:]], signed)


_ROW = tl.constexpr(_row_ptx(_in_fp16_ptx, "bf16"))
_WORDS = tl.constexpr(_words_ptx(_in_fp16_ptx))
_WORDS_BOUNDED = tl.constexpr(_words_ptx(_bounded_ptx, signed=True))
_WORDS_FLOAT32 = tl.constexpr(_words_ptx(_in_float32_ptx))
_ROW_BOUNDED = tl.constexpr(_row_ptx(_bounded_ptx, "bf16", signed=True))
_ROW_BF16 = tl.constexpr(_row_ptx(_in_float32_ptx, "bf16"))
_ROW_FP16 = tl.constexpr(_row_ptx(_in_float32_ptx, "fp16"))
_COLUMNS = tl.constexpr(_columns_ptx(_in_fp16_ptx, "bf16"))
_COLUMNS_BOUNDED = tl.constexpr(_columns_ptx(_bounded_ptx, "bf16", signed=True))
_COLUMNS_BF16 = tl.constexpr(_columns_ptx(_in_float32_ptx, "bf16"))
_COLUMNS_FP16 = tl.constexpr(_columns_ptx(_in_float32_ptx, "fp16"))


# Two bf16 numbers in a word: 6 * 448, beyond which E4M3 scales saturate; and 6 * 2^-6, whose E4M3 scale is the smallest
# one that the contract "torchao" allows.
CLAMP_LIMIT = tl.constexpr(0x45284528)
MIN_AMAX = tl.constexpr(0x3DC03DC0)
# An additional power of two in the encode factors: the bits of the fp16 products are then E2M1 codes, shifted by 9. The
# second constant is for scales with the largest mantissa (`packed_e4m3_scales`).
PACKED_SCALE = tl.constexpr(2.0**-14)
_PACKED_SCALE_ABOVE = tl.constexpr(2.0**-14 * (1 + 0.90625 * 2.0**-11))
_MANTISSA_OF_FIFTEENTHS = tl.constexpr(float32_bits(1 / 15) & 0x7FFFFF)


@triton.constexpr_function
def packed_rounding(element, scale, contract, outer, dtype, isa):
    """The ROUNDING of `encode_packed_row` and `encode_packed_columns` for a format; "" if they do not serve it.

    "float32" is exact for every product. The other two are quicker, and exact for some products:
    "bounded": products up to 6.4. The contract "torchao" gives such products with an outer scale that is
    `in_packed_range`, because block scales are at least 2^-6; where a scale saturates, elements are clamped first.
    "fp16": products that lie far enough from ties for fp16. These are bf16 elements times powers of two or reciprocals
    of E4M3 numbers, without an outer scale (tests/templates/test_packed_rounding.py).
    Scales of the contract "floor" leave products up to 8, too large for both.
    """
    if element != "e2m1" or not 90 <= isa < 100:
        return ""
    quick = contract != "floor" if scale == "e8m0" else contract == "torchao"
    if dtype != tl.bfloat16 or not quick:
        return "float32"
    return "fp16" if outer == "none" else "bounded"


_PACKED_E4M3_SCALES = tl.constexpr(
    "{ .reg .f32 a, b; .reg .b32 t, h, zero; .reg .b16 p, low, high; .reg .pred top;"
    # Infinity times 0 is NaN, and stays NaN: the scale shows it.
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
    """Words of two bf16 amaxes (of any sign, not below `MIN_AMAX`) -> (both scale bytes in an int32, two factors).

    The scales have the bits of `block_scales.e4m3_scale` for the contract "torchao" without an outer scale. For bf16
    amaxes a product with 1/6 rounds to E4M3 like the quotient.

    The factors carry 2^-14 (PACKED_SCALE). They are reciprocals that may be wrong in the last bit, far less than fp16
    resolves. Scales with the mantissa of 15 are an exception. The float32 reciprocal of 15 is so much too large that
    its products with 5/4, 5/2 and 5 times 15 lie above the tie, but fp16 would round them to the tie. So the factors of
    these scales carry the slightly larger _PACKED_SCALE_ABOVE.
    """
    return tl.inline_asm_elementwise(
        _PACKED_E4M3_SCALES, "=&r,=&f,=f,r", [amaxes], dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1
    )


def _outer_scales_ptx(scaled: bool, guarded: bool) -> str:
    """PTX: a word $3 of two bf16 amaxes (of any sign) -> both E4M3 bytes in $0, the factors in $1 and $2.

    $4, $5: encode and decode outer scale. scaled: $4 carries 2^-14 and $5 carries 2^14, so the factors carry 2^-14.
    guarded: amaxes may be larger than the bf16 number that $6 holds twice, or not finite; otherwise they never are.
    """
    # Infinity times 0 is NaN, and stays NaN: the scale shows it.
    guard = "mov.b32 t, 0; fma.rn.bf16x2 h, $3, t, $3; min.NaN.xorsign.abs.bf16x2 h, h, $6;"
    return (
        "{ .reg .f32 a, b, r, s, y; .reg .b32 t, h; .reg .b16 p, low, high; "
        + (guard if guarded else "mov.b32 h, $3;")
        + " shl.b32 t, h, 16; mov.b32 a, t; and.b32 t, h, 0xFFFF0000; mov.b32 b, t; abs.f32 a, a; abs.f32 b, b;"
        + "".join(
            sixth_ptx("s", amax, 2.0**14 if scaled else 1.0)
            + quotient_ptx(amax, "s", "$5", "$4")
            + f" max.NaN.f32 {amax}, {amax}, 0f3C800000;"
            for amax in ("a", "b")
        )
        + " cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.u32.u16 $0, p; cvt.rn.f16x2.e4m3x2 h, p; mov.b32 {low, high}, h;"
        + "".join(
            f" cvt.f32.f16 s, {half}; rcp.approx.ftz.f32 y, s;" + quotient_ptx(factor, "$4", "s", "y")
            for half, factor in (("low", "$1"), ("high", "$2"))
        )
        + " }"
    )


_OUTER_SCALES = tl.constexpr(_outer_scales_ptx(scaled=False, guarded=True))
_OUTER_SCALES_BOUNDED = tl.constexpr(_outer_scales_ptx(scaled=True, guarded=False))
_OUTER_SCALES_CLAMPED = tl.constexpr(_outer_scales_ptx(scaled=True, guarded=True))


@triton.jit
def in_packed_range(decode):
    """Whether `packed_outer_scales` divides exactly by this outer scale: no relevant product over- or underflows."""
    return (decode > 2.0**-60) & (decode < 2.0**60)


@triton.jit
def packed_clamp_limit(decode):
    """A word with 6 * 448 * decode twice, rounded down to bf16. Above it, block scales saturate and codes are 7."""
    bits = (decode * 2688.0).to(tl.int32, bitcast=True)
    return (bits & -65536) | (bits >> 16)


@triton.jit
def packed_outer_scales(amaxes, limit, encode, decode, ROUNDING: tl.constexpr, CLAMP: tl.constexpr):
    """Words of two bf16 amaxes (of any sign) -> (both scale bytes in an int32, two factors).

    The scales have the bits of `block_scales.e4m3_scale` for the contract "torchao"; the outer scale must be
    `in_packed_range`. If ROUNDING is "bounded", the factors carry 2^-14. CLAMP: an amax may be above `limit`
    (`packed_clamp_limit`) or not finite.
    """
    ptx: tl.constexpr = _OUTER_SCALES_CLAMPED if CLAMP else _OUTER_SCALES_BOUNDED
    if ROUNDING == "bounded":
        encode *= PACKED_SCALE
        decode *= 1 / PACKED_SCALE
    return tl.inline_asm_elementwise(
        ptx if ROUNDING == "bounded" else _OUTER_SCALES, "=&r,=&f,=&f,r,f,f,r", [amaxes, encode, decode, limit],
        dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def clamp_packed(word, limit):
    """Words of two bf16 elements, each clamped to +-`limit`, a word of one bf16 number twice. NaN becomes `limit`."""
    return tl.inline_asm_elementwise(
        "min.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [word, limit], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def encode_packed_row(words, factor, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """A tuple of four neighbouring words of a row, times a factor -> eight E2M1 codes (int32)."""
    exact: tl.constexpr = _ROW_BF16 if dtype == tl.bfloat16 else _ROW_FP16
    ptx: tl.constexpr = _ROW if ROUNDING == "fp16" else _ROW_BOUNDED if ROUNDING == "bounded" else exact
    return tl.inline_asm_elementwise(ptx, "=r,r,r,r,r,f", words + (factor,), dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def encode_packed_words(words, factor, limit, SCALE: tl.constexpr, ROUNDING: tl.constexpr, CLAMP: tl.constexpr):
    """Words of two bf16 elements in blocks, [ROWS, BLOCKS, n] -> a uint8 of two E2M1 codes for each.

    factor: factors of the blocks, [ROWS, BLOCKS], from `block_scales.block_scale`. CLAMP: elements may be beyond
    `limit` and are clamped (`clamp_packed`), unless ROUNDING is "float32".
    """
    if CLAMP and ROUNDING != "float32":
        words = clamp_packed(words, limit)
    if ROUNDING == "fp16" and SCALE == "e4m3":
        # See `packed_e4m3_scales`. This tests the factor, because ptxas 12.8 loses scale bytes that are tested here.
        mantissa = factor.to(tl.int32, bitcast=True) & 0x7FFFFF
        factor *= tl.where(mantissa == _MANTISSA_OF_FIFTEENTHS, _PACKED_SCALE_ABOVE, PACKED_SCALE)
    elif ROUNDING != "float32":
        factor *= PACKED_SCALE
    factor = tl.broadcast_to(factor[:, :, None], words.shape)
    ptx: tl.constexpr = _WORDS if ROUNDING == "fp16" else _WORDS_BOUNDED if ROUNDING == "bounded" else _WORDS_FLOAT32
    return tl.inline_asm_elementwise(
        ptx, "=r,r,r,r,r,f,f,f,f", [words, factor], dtype=tl.uint8, is_pure=True, pack=4
    )  # fmt: skip


@triton.jit
def encode_packed_columns(words, first_factor, second_factor, ROUNDING: tl.constexpr, dtype: tl.constexpr):
    """Words of four neighbouring rows, times their columns' factors -> four E2M1 codes in each half of an int32.

    The lower half has the codes of the first column.
    """
    exact: tl.constexpr = _COLUMNS_BF16 if dtype == tl.bfloat16 else _COLUMNS_FP16
    ptx: tl.constexpr = _COLUMNS if ROUNDING == "fp16" else _COLUMNS_BOUNDED if ROUNDING == "bounded" else exact
    return tl.inline_asm_elementwise(
        ptx, "=r,r,r,r,r,f,f", words + (first_factor, second_factor), dtype=tl.int32, is_pure=True, pack=1
    )
