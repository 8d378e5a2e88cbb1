"""cvt: conversions between types.

Source: PTX ISA, "cvt"; confidence high. Of two numbers that are packed, the first operand is the upper one. An integer
is cut to the narrower type, or extended by the sign of its own type.
"""

from collections.abc import Callable

import numpy as np

from ptxsim import numbers
from ptxsim.forms import Elementwise, Step, UnknownForm, elementwise, expect, form, same, type_of
from ptxsim.numbers import F32, F64, U8, canonical, halves, interleaved, joined
from ptxsim.parse import Instruction, Program, Vector

_Convert = Callable[[np.ndarray], np.ndarray]
_INTEGERS = tuple(f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "su")


for _into in _INTEGERS:
    for _from in _INTEGERS:
        if _into != _from:
            elementwise(f"{_into} {_from}", f"cvt.{_into}.{_from}")(same)


# ---------------------------------------------------------------- between floats of 16, 32 and 64 bits

elementwise("f32 bf16", "cvt.f32.bf16")(numbers.bf16_values)
elementwise("bf16 f32", "cvt.rn.bf16.f32")(numbers.to_bf16)
elementwise("f16 f32", "cvt.rn.f16.f32")(numbers.to_f16)


@elementwise("f32 f16", "cvt.f32.f16")
def _f32_of_f16(bits: np.ndarray) -> np.ndarray:
    return canonical(numbers.f16_values(bits))


@elementwise("bf16 f16", "cvt.rn.bf16.f16", "cvt.bf16.f16")
def _bf16_of_f16(bits: np.ndarray) -> np.ndarray:
    return numbers.to_bf16(numbers.f16_values(bits))


for _from in _INTEGERS:
    elementwise(f"f32 {_from}", f"cvt.rn.f32.{_from}")(lambda x: x.astype(F32))
    elementwise(f"f64 {_from}", f"cvt.rn.f64.{_from}")(lambda x: x.astype(F64))
    if _from[1:] != "64":  # else two roundings
        elementwise(f"f16 {_from}", f"cvt.rn.f16.{_from}")(lambda x: numbers.to_f16(x.astype(F64)))
        elementwise(f"bf16 {_from}", f"cvt.rn.bf16.{_from}")(lambda x: numbers.to_bf16(x.astype(F64)))

_ROUNDINGS: tuple[tuple[str, np.ufunc], ...] = (
    ("rni", np.rint),
    ("rzi", np.trunc),
    ("rmi", np.floor),
    ("rpi", np.ceil),
)


def _integers_of(source: str, decode: _Convert) -> None:
    """Register conversions of a float type to integers; a NaN becomes 0, or 2**63 where 64 bits are."""
    for name, rounded in _ROUNDINGS:
        for flush in ("", ".ftz") if source == "f32" else ("",):
            for into in _INTEGERS:
                bits = int(into[1:])
                into_dtype = type_of(into)[1]
                nan = 0 if bits < 64 and source != "f64" else (-1 if into[0] == "s" else 1) << bits - 1

                def convert(
                    values: np.ndarray, rounded: np.ufunc = rounded, dtype: np.dtype = into_dtype, nan: int = nan,
                    flushed: bool = bool(flush),
                ) -> np.ndarray:  # fmt: skip
                    numbers_of = decode(values)
                    return numbers.rounded_integer(
                        numbers.flush(numbers_of) if flushed else numbers_of, rounded, dtype, nan
                    )

                elementwise(f"{into} {source}", f"cvt.{name}{flush}.{into}.{source}")(convert)


for _source, _decode in (("f16", numbers.f16_values), ("bf16", numbers.bf16_values), ("f32", same), ("f64", same)):
    _integers_of(_source, _decode)

for _name, _round in _ROUNDINGS:

    @elementwise("f32 f32", f"cvt.{_name}.f32.f32")
    def _whole_number(values: np.ndarray, rounded: np.ufunc = _round) -> np.ndarray:
        return canonical(rounded(values))

    @elementwise("f32 f32", f"cvt.{_name}.ftz.f32.f32")
    def _flushed_whole_number(values: np.ndarray, rounded: np.ufunc = _round) -> np.ndarray:
        return canonical(rounded(numbers.flush(values)))

    elementwise("f64 f64", f"cvt.{_name}.f64.f64")(_round)


@elementwise("f64 f16", "cvt.f64.f16")
def _f64_of_f16(bits: np.ndarray) -> np.ndarray:
    return numbers.f16_values(bits).astype(F64)


elementwise("f16 f64", "cvt.rn.f16.f64")(numbers.to_f16)
elementwise("bf16 f64", "cvt.rn.bf16.f64")(numbers.to_bf16)


@elementwise("f64 f32", "cvt.f64.f32")
def _f64_of_f32(values: np.ndarray) -> np.ndarray:
    return values.astype(F64)


@elementwise("f32 f64", "cvt.rn.f32.f64")
def _f32_of_f64(values: np.ndarray) -> np.ndarray:
    return canonical(values.astype(F32))


@elementwise("f32 f32", "cvt.ftz.sat.f32.f32")
def _saturated(values: np.ndarray) -> np.ndarray:
    return numbers.flush(numbers.saturate(values))


@elementwise("bf16x2 f32 f32", "cvt.rn.bf16x2.f32")
def _bf16_pair(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return joined(numbers.to_bf16(interleaved(lower, upper)))


@elementwise("f16x2 f32 f32", "cvt.rn.f16x2.f32")
def _f16_pair(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return joined(numbers.to_f16(interleaved(lower, upper)))


# ---------------------------------------------------------------- to and from narrow floats

for _format, _encode in (("e4m3x2", numbers.e4m3), ("e5m2x2", numbers.e5m2)):

    @elementwise("b16 f32 f32", f"cvt.rn.satfinite.{_format}.f32")
    def _fp8_pair(upper: np.ndarray, lower: np.ndarray, encode: _Convert = _encode) -> np.ndarray:
        return joined(encode(interleaved(lower, upper)))

    for _source, _decode in (("f16x2", numbers.f16_values), ("bf16x2", numbers.bf16_values)):

        @elementwise(f"b16 {_source}", f"cvt.rn.satfinite.{_format}.{_source}")
        def _fp8_of_pair(words: np.ndarray, encode: _Convert = _encode, decode: _Convert = _decode) -> np.ndarray:
            return joined(encode(decode(halves(words))))


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """E2M1 codes [..., 2] -> bytes."""
    return codes[..., 0] | codes[..., 1] << 4


@elementwise("b8 f32 f32", "cvt.rn.satfinite.e2m1x2.f32")
def _e2m1_pair(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return _nibbles(numbers.e2m1(interleaved(lower, upper)))


@elementwise("b8 bf16x2", "cvt.rn.satfinite.e2m1x2.bf16x2")
def _e2m1_of_pair(words: np.ndarray) -> np.ndarray:
    return _nibbles(numbers.e2m1(numbers.bf16_values(halves(words))))


@elementwise("b16 f32 f32", "cvt.rp.satfinite.ue8m0x2.f32")
def _ue8m0_pair(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    return joined(numbers.ue8m0(interleaved(lower, upper)))


for _into, _encode in (("f16x2", numbers.to_f16), ("bf16x2", numbers.to_bf16)):
    for _format, _table in (("e4m3x2", _encode(numbers.E4M3)), ("e5m2x2", _encode(numbers.E5M2))):

        @elementwise(f"{_into} b16", f"cvt.rn.{_into}.{_format}")
        def _16_bits_of_fp8(codes: np.ndarray, table: np.ndarray = _table) -> np.ndarray:
            return joined(table.take(halves(codes)))

    _table = _encode(numbers.E2M1)

    @elementwise(f"{_into} b8", f"cvt.rn.{_into}.e2m1x2")
    def _16_bits_of_e2m1(codes: np.ndarray, table: np.ndarray = _table) -> np.ndarray:
        return joined(table.take(np.stack([codes & 15, codes >> 4], -1)))


@form("cvt.rs.satfinite.e2m1x4.f32")
def _stochastic(instruction: Instruction, program: Program) -> Step:
    """The step of a stochastic conversion. The last of four numbers is the lowest, and uses the lowest random byte.

    Confidence in the assignment of bytes: medium. (PTX ISA, figure of the random bits of .e2m1x4.)
    """
    expect(instruction, 3)
    into, vector, random = instruction.operands
    if not isinstance(vector, Vector) or len(vector.parts) != 4:
        raise UnknownForm(f"not a vector of four: {vector}")
    return Elementwise([(into, "b16")], [(random, "b32"), *((each, "f32") for each in vector.parts)], _four_e2m1)


def _four_e2m1(word: np.ndarray, *numbers_of_thread: np.ndarray) -> np.ndarray:
    """The codes of four numbers, the lowest code's last, with a random byte of the word for each."""
    noise = np.broadcast_to(word, np.shape(numbers_of_thread[0])).copy().reshape(-1, 1).view(U8)
    codes = numbers.e2m1_stochastic(interleaved(*reversed(numbers_of_thread)), noise)
    return joined(_nibbles(codes.reshape(-1, 2, 2)))
