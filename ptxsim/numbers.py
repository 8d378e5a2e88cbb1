"""The rounding of numbers by a GPU's instructions, for NumPy arrays of any shape.

Floats of 16 bits are passed as uint16 bits, narrower ones as uint8 codes. NaN results of float32 and narrower are the
one NaN that the PTX ISA calls canonical (0x7FFFFFFF, 0x7FFF); the ISA leaves the bits of a float32 NaN open, and
GPUs write these. Functions that return new numbers from float32 or float64 expect NumPy's warnings to be off.

Sources: PTX ISA, "Floating point instructions", "cvt", "prmt", "lop3"; confidence high unless a docstring says less.
"""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from math import inf, isfinite
from typing import Any

import numpy as np
import torch

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64
NAN = np.array(0x7FFFFFFF, U32).view(F32)
_SMALLEST = F32(2**-126)  # the smallest normal float32

# ---------------------------------------------------------------- values of narrow floats


def _values(exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """The float32 numbers of all codes of a float format, as if its largest exponent had no infinity and no NaN."""
    code = np.arange(2 ** (1 + exponent_bits + mantissa_bits))
    exponent = code >> mantissa_bits & 2**exponent_bits - 1
    mantissa = code & 2**mantissa_bits - 1
    significand = np.where(exponent == 0, mantissa, mantissa + 2**mantissa_bits)
    scale = 2.0 ** (np.maximum(exponent, 1) - (2 ** (exponent_bits - 1) - 1) - mantissa_bits)
    return np.where(code < len(code) // 2, 1, -1).astype(F32) * (significand * scale).astype(F32)


E2M1 = _values(2, 1)
E2M3 = _values(2, 3)
E3M2 = _values(3, 2)
E4M3 = _values(4, 3)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _values(5, 2)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
UE8M0 = np.append(2.0 ** (np.arange(255) - 127.0), np.nan).astype(F32)


def f16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of fp16 -> float32."""
    return bits.view(F16).astype(F32)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """uint16 bits of bf16 -> float32."""
    return (bits.astype(U32) << 16).view(F32)


# ---------------------------------------------------------------- rounding to narrow floats


def _rounding_index(values: np.ndarray) -> np.ndarray:
    """float32 -> 14 bits that determine the rounding to an 8-bit float or a narrower one.

    They are the sign, the exponent, four bits of the mantissa, and whether any lower bit is set: enough to detect a
    tie of a format that has three bits of mantissa or fewer.
    """
    bits = values.view(U32)
    return bits >> 18 | ((bits & 0x3FFFF) != 0)


def _rounding_table(values: np.ndarray, nan: int) -> np.ndarray:
    """For each index of `_rounding_index`, the nearest code of a format; ties to the even code, saturated."""
    with np.errstate(invalid="ignore"):
        numbers = (np.arange(2**14, dtype=U32) << 18).view(F32).astype(F64)
    magnitudes = values[: len(values) // 2].astype(F64)
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    limits = np.append((magnitudes[1:] + magnitudes[:-1]) / 2, np.inf)
    code = np.minimum(np.searchsorted(limits, np.abs(numbers)), len(magnitudes) - 1)
    code += (limits[code] == np.abs(numbers)) & (code % 2 == 1) & (code < len(magnitudes) - 1)
    return np.where(np.isnan(numbers), nan, code + np.signbit(numbers) * (len(values) // 2)).astype(U8)


_TO_E2M1 = _rounding_table(E2M1, 7)
_TO_E4M3 = _rounding_table(E4M3, 0x7F)
_TO_E5M2 = _rounding_table(E5M2, 0x7F)


def e2m1(values: np.ndarray) -> np.ndarray:
    """E2M1 codes of float32 as cvt.rn.satfinite makes them: ties to even, -0 keeps its sign, NaN gives 7."""
    return _TO_E2M1.take(_rounding_index(values))


def e4m3(values: np.ndarray) -> np.ndarray:
    """E4M3 codes of float32 as cvt.rn.satfinite makes them: ties to even, saturated; NaN gives 0x7F."""
    return _TO_E4M3.take(_rounding_index(values))


def e5m2(values: np.ndarray) -> np.ndarray:
    """E5M2 codes of float32 as cvt.rn.satfinite makes them: ties to even, saturated; NaN gives 0x7F."""
    return _TO_E5M2.take(_rounding_index(values))


def e2m1_stochastic(values: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """E2M1 codes of float32 as cvt.rs.satfinite makes them of eight bits of noise for each.

    A magnitude is rounded up if its fraction of a step, cut to eight bits, plus the noise reach a step. NaN gives 7.
    Confidence: medium; by the ISA, the noise is added to the mantissa, but it leaves open how many bits are kept.
    """
    bits = values.view(U32)
    magnitude = np.minimum(bits & 0x7FFFFFFF, 0x40C00000)  # 6.0
    # The code and its fraction, in 256ths. From 1.0 on they are bits of the float.
    below_one = (np.minimum(magnitude.view(F32), F32(1)) * 512).astype(U32)
    steps = np.where(magnitude < 0x3F800000, below_one, (magnitude >> 14) - (126 << 9))
    code = steps + noise >> 8 | bits >> 28 & 8
    return np.where(np.isnan(values), U32(7), code).astype(U8)


def ue8m0(values: np.ndarray) -> np.ndarray:
    """UE8M0 codes of float32 as cvt.rp.satfinite makes them: the next power of two, at most 2^127; NaN gives 255.

    2^-127 and less give 0. Negative numbers give 255; confidence: low, but no kernel converts one.
    """
    bits = values.view(U32)
    code = np.where(bits > 0x400000, np.minimum(bits + 0x7FFFFF >> 23, 254), 0)
    return np.where(bits > 0x7F800000, 255, code).astype(U8)


def to_f16(values: np.ndarray) -> np.ndarray:
    """float32 or float64 -> uint16 bits of fp16, to nearest even."""
    return _with_nan(values.astype(F16).view(U16), values)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 or float64 -> uint16 bits of bf16, to nearest even, rounded once."""
    if values.dtype == F64:
        values = round_to_odd(values)
    bits = values.view(U32)
    return _with_nan((bits + (bits >> 16 & 1) + 0x7FFF >> 16).astype(U16), values)


def _with_nan(bits: Any, values: np.ndarray) -> np.ndarray:
    """Bits of 16-bit floats, changed in place to the canonical NaN where `values` are NaN."""
    bits = np.asarray(bits)
    np.copyto(bits, U16(0x7FFF), where=values != values)
    return bits


def round_to_odd(values: np.ndarray) -> np.ndarray:
    """float64 -> float32: if inexact, the neighbour with an odd last bit, so that rounding again is right."""
    near = values.astype(F32)
    bits = near.view(np.int32)
    error = values - near
    away = (error > 0) == (values > 0)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(near)
    return np.where(inexact, bits + np.where(away, np.int32(1), np.int32(-1)), bits).view(F32)


# ---------------------------------------------------------------- float32


def canonical(values: Any) -> np.ndarray:
    """float32, changed in place to the canonical NaN for every NaN."""
    values = np.asarray(values)
    np.copyto(values, NAN, where=values != values)
    return values


def flush(values: np.ndarray) -> np.ndarray:
    """float32 with zeros of the same sign for subnormal numbers: .ftz."""
    return values * (np.abs(values) >= _SMALLEST)


def saturate(values: np.ndarray) -> np.ndarray:
    """float32 clamped to [0, 1]; NaN gives +0: .sat."""
    return np.fmin(np.fmax(values, F32(0)), F32(1)) + F32(0)  # the sum makes +0 of -0


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, as float64 rounded to odd, so that rounding to float32 or narrower is right."""
    product = np.multiply(a, b, dtype=F64)  # exact: float64 holds the product of any two float32
    total = product + c
    # The rounding error of the sum in float64 (Knuth). If it is not 0, the last bit is made odd.
    back = total - product
    lost = (product - (total - back)) + (c - back)
    bits = total.view(np.int64)
    away = (lost > 0) == (total > 0)
    inexact = (lost != 0) & np.isfinite(lost) & (bits & 1 == 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(F64)


def multiply_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * b of uint16 bits of bf16, rounded once."""
    # The product has 16 bits. float32 holds it exactly, or it is subnormal and too small to be near a half of bf16.
    return to_bf16(bf16_values(a) * bf16_values(b))


def fma_bf16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of uint16 bits of bf16, rounded once."""
    a, b, c = bf16_values(a), bf16_values(b), bf16_values(c)
    product = np.multiply(a, b, dtype=F64)
    total = product + c
    near = total.astype(F32)
    # Rounding twice differs only where float32 has a number halfway between two bf16, but not the sum.
    halfway = (near.view(U32) & 0xFFFF) == 0x8000
    halfway &= (near != total) | (total - product != c) | (total - c != product)
    return to_bf16(fused(a, b, c) if halfway.any() else near)


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once to the nearest float32."""
    total = np.multiply(a, b, dtype=F64) + c
    rounded = np.asarray(total.astype(F32))
    # Rounding twice differs only where float64 has a number halfway between two float32. Subnormal numbers have
    # other halves, and are always done again.
    halfway = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    halfway |= (rounded.view(U32) & 0x7FFFFFFF) - U32(1) < 0x7FFFFF
    if halfway.any():
        again = (np.broadcast_to(each, rounded.shape)[halfway] for each in (a, b, c))
        rounded[halfway] = fused(*again).astype(F32)
    return canonical(rounded)


def fma32_down(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once towards minus infinity; a zero that two numbers cancel to is -0."""
    exact = fused(a, b, c)
    near = exact.astype(F32)
    bits = near.view(np.int32)
    lower = np.where(near > exact, np.where(bits < 0, bits + 1, bits - 1), bits).view(F32)
    negative_zero = (exact == 0) & (np.signbit(np.multiply(a, b, dtype=F64)) | np.signbit(c))
    return canonical(np.where(negative_zero, F32(-0.0), lower))


def fma32_to_zero(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32, rounded once towards zero."""
    exact = fused(a, b, c)
    near = exact.astype(F32)
    return canonical((near.view(U32) - (np.abs(near) > np.abs(exact)).astype(U32)).view(F32))


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float64, rounded once, number by number."""
    return np.asarray(_fma64(a, b, c), F64)


def _fma64_of(a: float, b: float, c: float) -> float:
    if not (isfinite(a) and isfinite(b) and isfinite(c)) or 0.0 in (a, b):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if abs(a * b) > 0 else 0.0
    try:
        return float(exact)
    except OverflowError:
        return inf if exact > 0 else -inf


_fma64 = np.frompyfunc(_fma64_of, 3, 1)


def rounded_integer(values: np.ndarray, rounded: Callable, dtype: np.dtype, nan: int) -> np.ndarray:
    """Integers of floats, rounded by a function and saturated. nan: what NaN becomes."""
    whole, info = rounded(values.astype(F64)), np.iinfo(dtype)
    high, low = whole >= float(info.max), whole <= float(info.min)
    inside = np.where(high | low | (whole != whole), 0.0, whole).astype(dtype)
    ends = [np.array(each, dtype) for each in (info.max, info.min, nan)]
    return np.where(high, ends[0], np.where(low, ends[1], np.where(whole != whole, ends[2], inside)))


def ex2(values: np.ndarray) -> np.ndarray:
    """Powers of two of float32, rounded from float64. ex2.approx of a GPU may be off by 2 units of the last place."""
    return canonical(np.exp2(values.astype(F64)).astype(F32))


def rcp(values: np.ndarray) -> np.ndarray:
    """Reciprocals of float32, rounded to nearest. rcp.approx of a GPU may be off by 1 unit of the last place."""
    return canonical(F32(1) / values)


def sqrt(values: np.ndarray) -> np.ndarray:
    """Square roots of floats, rounded to nearest. sqrt.approx of a GPU may be off by a unit of the last place."""
    return canonical(np.sqrt(values))


def by_float64(function: np.ufunc) -> Callable[[np.ndarray], np.ndarray]:
    """A function of float32, rounded from float64. Approximations of a GPU have errors of up to 2^-11 of the result."""
    return lambda values: canonical(function(values.astype(F64)).astype(F32))


def rsqrt(values: np.ndarray) -> np.ndarray:
    """1 / sqrt of float32, rounded from float64. rsqrt.approx of a GPU may be off by 2^-22.9 of the result."""
    return canonical((1 / np.sqrt(values.astype(F64))).astype(F32))


def div_approx(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """div.approx.f32, here rounded to float32. A GPU may be off by 2 units of the last place.

    By the ISA, divisors between 2^126 and 2^128 give zero for finite numbers and NaN for infinite ones; the ISA leaves
    the sign of this zero open; here it is the sign of a quotient.
    """
    large = (np.abs(b) > F32(2**126)) & np.isfinite(b)
    return canonical(np.where(large, a * np.copysign(F32(0), b), a / b))


# ---------------------------------------------------------------- bits


def halves(words: np.ndarray) -> np.ndarray:
    """Unsigned integers -> [..., 2] of half the width, the lower one first; without dimensions: [1, 2]."""
    return words.reshape(-1, 1).view(f"u{words.itemsize // 2}")


def interleaved(*parts: np.ndarray) -> np.ndarray:
    """Arrays of one dtype -> one of them, [..., number of arrays]."""
    values = np.empty((*np.broadcast_shapes(*(part.shape for part in parts)), len(parts)), parts[0].dtype)
    for i, part in enumerate(parts):
        values[..., i] = part
    return values


def joined(parts: np.ndarray) -> np.ndarray:
    """Numbers [n, 2] -> unsigned integers [n] of twice the width, the first number in the lower half."""
    return parts.view(f"u{2 * parts.itemsize}")[..., 0]


@cache
def _byte_moves(selector: int) -> tuple[tuple[int, bool, int, int], ...]:
    """(operand, whether a sign is spread, shift to the right, mask of the result) of each byte that prmt selects."""
    masks: dict[tuple[int, bool, int], int] = {}
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = nibble & 3
        move = (nibble >> 2 & 1, True, 8 * byte + 7) if nibble & 8 else (nibble >> 2 & 1, False, 8 * (byte - i))
        masks[move] = masks.get(move, 0) | 255 << 8 * i
    return tuple((*move, mask) for move, mask in masks.items())


def prmt(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """prmt.b32: bytes of the uint32 a and b; the top bit of a nibble selects the byte's sign for all its bits."""
    result: Any = None
    for operand, spread, shift, mask in _byte_moves(selector & 0xFFFF):
        source = (a, b)[operand]
        if spread:
            part = (source >> shift & 1) * U32(mask)
        else:
            part = (source >> shift if shift >= 0 else source << -shift) & U32(mask)
        result = part if result is None else result | part
    return result


def prmt_by_thread(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """prmt.b32 with a selector for each thread."""
    source = a.astype(U64) | b.astype(U64) << U64(32)
    result: Any = U32(0)
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = (source >> (8 * (nibble & 7)) & U64(255)).astype(U32)
        result = result | np.where(nibble & 8, (byte >> 7) * U32(255), byte) << 8 * i
    return result


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> Any:
    """lop3.b32: each bit of the result is the bit of `table` that the bits of a, b and c number."""
    return _logic(table & 0xFF, (a, b, c))


def _logic(table: int, operands: tuple[np.ndarray, ...]) -> Any:
    """Compute f(x, ...) as f(0, ...) ^ (x & (f(0, ...) ^ f(1, ...))), whose parts have tables half as long."""
    if not operands:
        return U32(0xFFFFFFFF if table else 0)
    first, *others = operands
    rest = tuple(others)
    every = 2**2 ** len(rest) - 1
    low, difference = table & every, (table ^ table >> 2 ** len(rest)) & every
    if difference == 0:
        return _logic(low, rest)
    changed = first if difference == every else first & _logic(difference, rest)
    return changed if low == 0 else changed ^ _logic(low, rest)


def matrix_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """float64 a [..., m, k] times b [..., n, k] transposed, by torch: the machine sets its number of threads to one."""
    return (torch.from_numpy(a) @ torch.from_numpy(b).mT).numpy()
