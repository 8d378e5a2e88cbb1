"""Device functions for elements: reading, rounding, packing into codes, and decoding.

Elements are processed in pairs of neighbours of a row. A pair is loaded as one word (int32 of two 16-bit elements,
int64 of two float32), unpacked to two float32 tensors, and encoded to one unit (uint8 of two E2M1 codes, uint16 of two
FP8 codes). So packing codes needs neither a split nor a reshape.

`ISA` selects the form of an operation. All forms give the same bits, except where stated:
    0    portable: integer and float32 arithmetic only. Triton's interpreter runs it (the interpreter's casts to FP8 and
         bf16 are wrong where rounding carries), and GPUs before SM89 need it.
    90   instructions that convert to FP8, maxima of packed 16-bit numbers, E2M1 codes made in inline PTX
    100  instructions that convert to E2M1 and E8M0; stochastic rounding to E2M1 is equal in distribution, not in bits
    120  the instructions of 100 without the stochastic conversion

Inductor always launches kernels with fused multiply-adds allowed. They change no bit here: products that are added are
exact, or the fused form is written out.

One file, because rounding and decoding of an element are inverse to each other, and are read together.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.packed_encoding import encode_packed_pairs, encode_packed_run

INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.constexpr_function
def mantissa_bits(element):
    return {"e2m1": 1, "e4m3": 3, "e5m2": 2}[element]


# ---------------------------------------------------------------- words


@triton.jit
def unpack(word, dtype: tl.constexpr):
    """Words of two `dtype` elements -> (first, second) in float32."""
    if dtype == tl.float32:
        return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:  # a bfloat16 is the upper half of a float32
        return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
    else:
        first = word.to(tl.int16).to(tl.float16, bitcast=True)
        second = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def float_bits(value, dtype: tl.constexpr, ISA: tl.constexpr):
    """float32 rounded to `dtype`, ties to even -> the bits, in the low end of an int32."""
    if dtype == tl.float32:
        return value.to(tl.int32, bitcast=True)
    elif dtype == tl.bfloat16 and ISA == 0:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(value == value, rounded, 0x7FC0) & 0xFFFF
    else:
        return value.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def pack(first, second, dtype: tl.constexpr, ISA: tl.constexpr):
    """The inverse of `unpack`: two float32 tensors, rounded to `dtype`, as words."""
    if dtype == tl.float32:
        low = float_bits(first, dtype, ISA).to(tl.int64) & 0xFFFFFFFF
        return low | (float_bits(second, dtype, ISA).to(tl.int64) << 32)
    elif ISA == 0:
        return float_bits(first, dtype, ISA) | (float_bits(second, dtype, ISA) << 16)
    else:  # ptxas makes two slow conversions of `float_bits`
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == tl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;",
            "=r,f,f", [first, second], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def magnitude_bits(value):
    """float32 -> its absolute value as int32 bits: ordered like the value, NaN above infinity."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _max_bf16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _max_f16x2(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def max_words(a, b, dtype: tl.constexpr):
    """The larger magnitude in each half of two words of 16-bit elements; the signs of the result are arbitrary."""
    if dtype == tl.bfloat16:
        return _max_bf16x2(a, b)
    else:
        return _max_f16x2(a, b)


@triton.jit
def reduce_words(word, axis: tl.constexpr, dtype: tl.constexpr):
    """The largest magnitude along `axis` in each half of words of 16-bit elements; the signs are arbitrary."""
    if dtype == tl.bfloat16:
        return tl.reduce(word, axis, _max_bf16x2)
    else:
        return tl.reduce(word, axis, _max_f16x2)


@triton.jit
def word_amax(word, axis: tl.constexpr, ISA: tl.constexpr, dtype: tl.constexpr):
    """The largest magnitude of all elements of the words along `axis`: float32 bits (int32), NaN above infinity."""
    if ISA == 0 or dtype == tl.float32:
        first, second = unpack(word, dtype)
        return tl.max(tl.maximum(magnitude_bits(first), magnitude_bits(second)), axis)
    else:
        first, second = unpack(reduce_words(word, axis, dtype), dtype)
        return tl.maximum(magnitude_bits(first), magnitude_bits(second))


@triton.jit
def column_amax(even, odd, ISA: tl.constexpr, dtype: tl.constexpr):
    """(amax bits of the words' first elements, amax bits of their second elements), over both tensors, axes 0 and 2.

    The axes are reduced one by one. Triton 3.6 reduces wrongly along an axis whose lanes or warps are not neighbours,
    and reshaping several axes into one would make such an axis.
    """
    if ISA == 0 or dtype == tl.float32:
        even_first, even_second = unpack(even, dtype)
        odd_first, odd_second = unpack(odd, dtype)
        first = tl.maximum(magnitude_bits(even_first), magnitude_bits(odd_first))
        second = tl.maximum(magnitude_bits(even_second), magnitude_bits(odd_second))
        return tl.max(tl.max(first, 0), 1), tl.max(tl.max(second, 0), 1)
    else:
        words = max_words(even, odd, dtype)
        first, second = unpack(reduce_words(reduce_words(words, 0, dtype), 1, dtype), dtype)
        return magnitude_bits(first), magnitude_bits(second)


# ---------------------------------------------------------------- elements


@triton.jit
def _e2m1_code(y, negative):
    """float32 y -> E2M1 code (int32), saturating, ties to the even code; NaN gives 7.

    E2M1 has the step 1/2 up to 2, the step 1 up to 4 and the step 2 up to 6. Adding 2^23 to a float32 rounds it to an
    integer, ties to even, which the low bits then hold. Each of the three sums rounds to one of the steps, and its low
    bits are the code if that step applies. The sums of the other steps are larger, so the least sum is taken.
    """
    m = tl.minimum(tl.abs(y), 6.0)
    fine = m * 2.0 + 8388608.0
    middle = m + 8388610.0
    coarse = m * 0.5 + 8388612.0
    code = tl.minimum(tl.minimum(fine, middle), coarse).to(tl.int32, bitcast=True) & 7
    return tl.where(negative, code | 8, code)


@triton.jit
def _e2m1_stochastic_code(y, negative, noise):
    """`reference.e2m1_encode_stochastic`: float32 y -> E2M1 code (int32), rounded by 16 bits of `noise` (int32)."""
    m = tl.minimum(tl.abs(y), 6.0)
    subnormal = m < 1.0
    bits = tl.where(subnormal, m + 1.0, m).to(tl.int32, bitcast=True) + (noise << 6) + 32
    code = (bits >> 22) - tl.where(subnormal, 254, 252)
    return tl.where(y == y, tl.where(negative, code | 8, code), 7)


def join_ptx(target: str, low: str, high: str) -> str:
    """PTX that joins two 16-bit registers into a 32-bit one.

    `mov.b32 target, {low, high}` would be shorter, but ptxas 12.8 and 12.9 compile it wrongly after FP8 conversions:
    where two of these are provably equal (both of zeros, say), the upper half stays undefined.
    """
    return (
        f"{{ .reg .b32 upper; cvt.u32.u16 {target}, {low}; cvt.u32.u16 upper, {high}; shl.b32 upper, upper, 16;"
        f" or.b32 {target}, {target}, upper; }}"
    )


def _e2m1_gather_ptx() -> str:
    """PTX: eight float32 values -> eight E2M1 codes in $0. $1-$4: the even elements of a row, $5-$8: odd elements.

    Made for Hopper, where minima, shifts and logic run at half the rate of multiply-adds.

    Rounding: let m = min(|y|, 6) and p = max(m, 5/4). Then (m - 2^22 p) + 2^22 p is m rounded to one bit of mantissa,
    in steps of 1/2 below 2, ties to even (checked for every float32). The reason: 2^22 p - m has the exponent of 2^22 p
    (also where p is a power of two, except for numbers that round to p either way), so the last bit of the difference
    is the step of E2M1.
    Code: scaled by 2^-6, the results are E4M3 numbers whose bits are the codes, shifted by 2.
    Signs: a funnel shift collects the top four bits of each value, and a mask keeps the sign of the four.
    """
    steps = []
    for i in reversed(range(8)):
        value = f"${1 + i // 2 + 4 * (i % 2)}"
        steps.append(
            f"abs.f32 m, {value}; mul.rn.f32 m, m, 0f3C800000; min.f32 m, m, 0f3DC00000; max.f32 p, m, 0f3CA00000;"
            f" fma.rn.f32 h{i}, p, 0fCA800000, m; fma.rn.f32 h{i}, p, 0f4A800000, h{i};"
            f" mov.b32 top, {value}; shf.l.wrap.b32 signs, top, signs, 4;"
        )
    convert = " ".join(f"cvt.rn.satfinite.e4m3x2.f32 c{i}, h{i + 2}, h{i};" for i in (0, 1, 4, 5))
    return (
        "{ .reg .f32 m, p, h<8>; .reg .b16 c<6>; .reg .b32 top, even, odd, signs; mov.b32 signs, 0; "
        + " ".join(steps)
        + convert
        + f"{join_ptx('even', 'c0', 'c4')} {join_ptx('odd', 'c1', 'c5')} shr.u32 even, even, 2;"
        " mad.lo.u32 even, odd, 4, even; and.b32 signs, signs, 0x88888888; or.b32 $0, even, signs; }"
    )


def _e2m1_stochastic_ptx() -> str:
    """PTX: eight float32 values -> eight E2M1 codes in $0, rounded stochastically. $1-$8: as in `_e2m1_gather_ptx`.

    $9-$12: a random word for each pair of elements. Its low half is for the even element.

    m = min(|y|, 6) * 2^-126 is a float32 whose top bits are the code; values below 1 are subnormal in both formats.
    After a shift by 2 the code lies in the top byte. Two bytes of noise, and half a unit of noise as in the reference,
    are added to the bytes below it.
    """
    steps = []
    for i in range(8):
        value, word = f"${1 + i // 2 + 4 * (i % 2)}", f"${9 + i // 2}"
        steps.append(
            f"prmt.b32 noise, {word}, 0x80, {'0x7324' if i % 2 else '0x7104'};"
            f" abs.f32 m, {value}; mul.rn.f32 m, m, 0f00800000; min.f32 m, m, 0f01C00000; mov.b32 bits, m;"
            f" mad.lo.u32 s{i}, bits, 4, noise;"
        )
    signs = " ".join(
        f"mov.b32 bits, ${1 + i // 2 + 4 * (i % 2)}; shf.l.wrap.b32 signs, bits, signs, 4;" for i in reversed(range(8))
    )
    top_bytes = " ".join(
        f"prmt.b32 {into}, s{i}, s{i + 2}, 0x0073; prmt.b32 noise, s{i + 4}, s{i + 6}, 0x7300;"
        f" prmt.b32 {into}, {into}, noise, 0x7610;"
        for i, into in enumerate(("even", "odd"))
    )
    return (
        "{ .reg .f32 m; .reg .b32 noise, bits, s<8>, signs, even, odd; mov.b32 signs, 0; "
        + " ".join(steps)
        + f" {signs} {top_bytes} mad.lo.u32 even, odd, 16, even; and.b32 signs, signs, 0x88888888;"
        " or.b32 $0, even, signs; }"
    )


def _e2m1_round_ptx() -> str:
    """PTX: two float32 products $1, $2 -> their E2M1 values in fp16, times the fp16 number that $3 holds twice.

    It rounds as `_e2m1_gather_ptx` does, without making codes. p and the product y have opposite signs, so that
    2^22 p + y keeps the exponent of 2^22 p (checked for every float32). Infinities and NaNs become 6. The result has
    the sign of y, also where y rounds to 0.
    """
    return (
        "{ .reg .f32 p, q, a, b; .reg .b32 y, h, t; cvt.rn.f16x2.f32 y, $2, $1; mov.b32 p, 0fBFA00000;"
        " max.xorsign.abs.f32 q, $2, p; max.xorsign.abs.f32 p, $1, p;"
        " fma.rn.f32 a, p, 0f4A800000, $1; fma.rn.f32 a, p, 0fCA800000, a;"
        " fma.rn.f32 b, q, 0f4A800000, $2; fma.rn.f32 b, q, 0fCA800000, b;"
        " cvt.rn.f16x2.f32 h, b, a; abs.f16x2 h, h; mov.b32 t, 0x46004600; min.f16x2 h, h, t;"
        " mov.b32 t, 0x7FFF7FFF; lop3.b32 h, h, y, t, 0xE4; mul.rn.f16x2 $0, h, $3; }"
    )


_E2M1_GATHER = tl.constexpr(_e2m1_gather_ptx())
_E2M1_ROUND = tl.constexpr(_e2m1_round_ptx())
_E2M1_STOCHASTIC = tl.constexpr(_e2m1_stochastic_ptx())
_E4M3_CONVERT = tl.constexpr(
    "{ .reg .b16 p, q; cvt.rn.satfinite.e4m3x2.f32 p, $3, $1; cvt.rn.satfinite.e4m3x2.f32 q, $4, $2; "
    f"{join_ptx('$0', 'p', 'q')} }}"
)
_E5M2_CONVERT = tl.constexpr(
    "{ .reg .b16 p, q; cvt.rn.satfinite.e5m2x2.f32 p, $3, $1; cvt.rn.satfinite.e5m2x2.f32 q, $4, $2; "
    f"{join_ptx('$0', 'p', 'q')} }}"
)


@triton.jit
def fp8_code(y, element: tl.constexpr):
    """float32 -> E4M3 or E5M2 code (int32), saturating, ties to even; NaN gives 0x7F."""
    mantissa: tl.constexpr = mantissa_bits(element)
    bias: tl.constexpr = 7 if element == "e4m3" else 15
    largest: tl.constexpr = 448.0 if element == "e4m3" else 57344.0
    shift: tl.constexpr = 23 - mantissa
    bits = y.to(tl.int32, bitcast=True)
    m = tl.minimum(tl.abs(y), largest)  # a NaN is replaced at the end
    m_bits = m.to(tl.int32, bitcast=True)
    # A normal result: round the mantissa of the float32; a carry goes into the exponent. A subnormal result: add a
    # power of two whose last bit is the subnormal step, which rounds to that step.
    normal = ((m_bits + (1 << (shift - 1)) - 1 + ((m_bits >> shift) & 1)) >> shift) - ((127 - bias) << mantissa)
    round_at: tl.constexpr = 2.0 ** (24 - bias - mantissa)
    subnormal = (m + round_at).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(m < 2.0 ** (1 - bias), subnormal, normal)
    return tl.where(y == y, code | ((bits >> 24) & 0x80), 0x7F)


@triton.jit
def encode_pair(first, second, factor, element: tl.constexpr, ISA: tl.constexpr):
    """first * factor and second * factor, rounded to codes: a uint8 of two E2M1 codes, a uint16 of two FP8 codes."""
    if element == "e2m1":
        if ISA >= 100:
            return encode_packed_pairs(first, second, factor)
        elif ISA == 0:
            a = _e2m1_code(first * factor, (first < 0) & (factor == factor))
            b = _e2m1_code(second * factor, (second < 0) & (factor == factor))
            return (a | (b << 4)).to(tl.uint8)
        else:
            # x * factor + 0 has the sign of the contract: -0.0 gives +0.0, and a negative product that
            # underflows keeps its sign. (The factor is never 0.)
            a = tl.fma(first, factor, 0.0)
            b = tl.fma(second, factor, 0.0)
            return tl.inline_asm_elementwise(
                _E2M1_GATHER, "=r,f,f,f,f,f,f,f,f", [a, b], dtype=tl.uint8, is_pure=True, pack=4
            )
    else:
        a = first * factor
        b = second * factor
        if ISA == 0:
            return (fp8_code(a, element) | (fp8_code(b, element) << 8)).to(tl.uint16)
        else:
            return tl.inline_asm_elementwise(
                _E4M3_CONVERT if element == "e4m3" else _E5M2_CONVERT,
                "=r,f,f,f,f", [a, b], dtype=tl.uint16, is_pure=True, pack=2,
            )  # fmt: skip


@triton.jit
def rounding_scale(byte, ISA: tl.constexpr):
    """E4M3 scale bytes (int32) -> the scales for `round_pair`: float32 or (from ISA 90 on) two equal fp16 in a word."""
    if ISA == 0:
        return fp8_value(byte, "e4m3")
    else:
        value = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return bits | (bits << 16)


@triton.jit
def round_pair(first, second, factor, scale, ISA: tl.constexpr):
    """`encode_pair` to E2M1, decoded and multiplied by the block's scale (`rounding_scale`): words of two fp16."""
    if ISA == 0:
        a = e2m1_value(_e2m1_code(first * factor, (first < 0) & (factor == factor))) * scale
        b = e2m1_value(_e2m1_code(second * factor, (second < 0) & (factor == factor))) * scale
        return pack(a, b, tl.float16, ISA)
    else:
        a = tl.fma(first, factor, 0.0)  # see `encode_pair`
        b = tl.fma(second, factor, 0.0)
        return tl.inline_asm_elementwise(
            _E2M1_ROUND, "=r,f,f,r", [a, b, scale], dtype=tl.int32, is_pure=True, pack=1
        )  # fmt: skip


@triton.jit
def encode_run(values, factor, noise, ELEMENT: tl.constexpr, ISA: tl.constexpr):
    """A tuple of 8 (E2M1) or 4 (FP8) float32 tensors, times factor, rounded to codes: an int32 of all codes.

    noise: for stochastic rounding, a tuple of random words (uint32); else an empty tuple. A word rounds two elements
    or, for ISA 100, four.
    """
    if ISA == 0:
        return _portable_run(values, factor, noise, ELEMENT)
    elif ISA >= 100 and ELEMENT == "e2m1" and len(noise) < 4:
        return encode_packed_run(values, factor, noise)
    elif ELEMENT == "e2m1":
        scaled = ()
        for i in tl.static_range(8):  # the even elements, then the odd ones; see `encode_pair`
            scaled = scaled + (tl.fma(values[i // 4 + i % 4 * 2], factor, 0.0),)
        if len(noise) == 0:
            return tl.inline_asm_elementwise(
                _E2M1_GATHER, "=r,f,f,f,f,f,f,f,f", scaled, dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                _E2M1_STOCHASTIC, "=r,f,f,f,f,f,f,f,f,r,r,r,r", scaled + noise, dtype=tl.int32, is_pure=True, pack=1
            )
    else:
        return tl.inline_asm_elementwise(
            _E4M3_CONVERT if ELEMENT == "e4m3" else _E5M2_CONVERT,
            "=r,f,f,f,f", [values[0] * factor, values[2] * factor, values[1] * factor, values[3] * factor],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _portable_run(values, factor, noise, ELEMENT: tl.constexpr):
    """`encode_run` for ISA 0."""
    bits: tl.constexpr = 4 if ELEMENT == "e2m1" else 8
    codes = tl.zeros(values[0].shape, tl.int32)
    for i in tl.static_range(len(values)):
        y = values[i] * factor
        if ELEMENT == "e2m1":
            negative = (values[i] < 0) & (factor == factor)
            if len(noise) == 0:
                code = _e2m1_code(y, negative)
            else:
                code = _e2m1_stochastic_code(y, negative, (noise[i // 2] >> (i % 2 * 16)).to(tl.int32) & 0xFFFF)
        else:
            code = fp8_code(y, ELEMENT)
        codes = codes | (code << (bits * i))
    return codes


@triton.jit
def rounded_e2m1(y, ISA: tl.constexpr):
    """float32 from 0 to 6, rounded to E2M1, in float32; `_e2m1_gather_ptx` explains the second form."""
    if ISA == 0:
        fine = (y * 2.0 + 8388608.0 - 8388608.0) * 0.5
        middle = y + 8388608.0 - 8388608.0
        coarse = (y * 0.5 + 8388608.0 - 8388608.0) * 2.0
        return tl.where(y < 2.0, fine, tl.where(y < 4.0, middle, coarse))
    else:
        p = tl.maximum(y, 1.25)
        return tl.fma(p, 4194304.0, tl.fma(p, -4194304.0, y))


@triton.jit
def e2m1_value(code):
    """E2M1 code (int32, upper bits ignored) -> float32.

    The three low bits become the top of a float32 whose exponent is too small by 126. The product with 2^126 corrects
    that, and is exact.
    """
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def fp8_value(code, element: tl.constexpr):
    """FP8 code (int32, eight bits) -> float32, by a shift and an exact product like `e2m1_value`."""
    shift: tl.constexpr = 23 - mantissa_bits(element)
    magnitude = code & 0x7F
    if element == "e4m3":
        value = (magnitude << shift).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        value = (magnitude << shift).to(tl.float32, bitcast=True) * 5.192296858534828e33
        value = tl.where(magnitude == 0x7C, float("inf"), value)
        value = tl.where(magnitude > 0x7C, float("nan"), value)
    return tl.where(code > 0x7F, -value, value)


@triton.jit
def fp8_pair(units, element: tl.constexpr, ISA: tl.constexpr):
    """uint16 units -> two FP8 values, in fp16 (which holds each of them) or, in the portable form, float32."""
    if ISA == 0:
        codes = units.to(tl.int32)
        return fp8_value(codes & 0xFF, element), fp8_value((codes >> 8) & 0xFF, element)
    else:
        fp8: tl.constexpr = tl.float8e4nv if element == "e4m3" else tl.float8e5
        first = units.to(tl.uint8).to(fp8, bitcast=True)
        second = (units >> 8).to(tl.uint8).to(fp8, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)


# PTX for four bytes ($8) of two E2M1 codes each: the first codes' float32 values $0-$3, the second codes' $4-$7.
_E2M1_VALUES = tl.constexpr(
    "{ .reg .b8 b<4>; .reg .b16 low, high; .reg .b32 h; mov.b32 {b0, b1, b2, b3}, $8;"
    + "".join(
        f" cvt.rn.f16x2.e2m1x2 h, b{i}; mov.b32 {{low, high}}, h; cvt.f32.f16 ${i}, low; cvt.f32.f16 ${i + 4}, high;"
        for i in range(4)
    )
    + " }"
)


@triton.jit
def decode_pair(units, element: tl.constexpr, ISA: tl.constexpr):
    """Units of two codes -> (first, second) in float32."""
    if element == "e2m1" and ISA >= 100 and units.dtype == tl.uint8:
        return tl.inline_asm_elementwise(
            _E2M1_VALUES, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [units], dtype=(tl.float32, tl.float32), is_pure=True,
            pack=4,
        )  # fmt: skip
    elif element == "e2m1":
        codes = units.to(tl.int32)
        return e2m1_value(codes), e2m1_value(codes >> 4)
    else:
        first, second = fp8_pair(units, element, ISA)
        return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def infinity_to_nan(value):
    """float32, with infinities replaced by NaN."""
    return tl.where(magnitude_bits(value) == INFINITY_BITS, float("nan"), value)
