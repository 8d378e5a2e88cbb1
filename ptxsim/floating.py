"""Instructions on floats.

Source: PTX ISA, "Floating point instructions" and "Half precision floating point instructions"; confidence high,
except for the results of approximations on a GPU: here the exact result is rounded. `add`, `sub` and `mul` without a
rounding are not contracted: ptxas contracts no more than Triton allows, and Triton writes the fma itself.
"""

from collections.abc import Callable

import numpy as np

from ptxsim import numbers
from ptxsim.forms import Elementwise, Step, elementwise, expect, form
from ptxsim.numbers import F32, U16, U32, U64, canonical, flush, halves, joined
from ptxsim.parse import Instruction, Program

_Function = Callable[..., np.ndarray]


def _pairs(function: _Function) -> _Function:
    """Convert a function of float32 to one of pairs in 64 bits."""

    def of_pairs(*words: np.ndarray) -> np.ndarray:
        return joined(function(*[halves(each).view(F32) for each in words]))

    return of_pairs


def _flushed(function: _Function) -> _Function:
    """Convert a function of float32 to one with .ftz: subnormal operands and results are zeros."""

    def flushing(*values: np.ndarray) -> np.ndarray:
        return flush(function(*map(flush, values)))

    return flushing


# ---------------------------------------------------------------- float32 and pairs


def _add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a + b)


def _subtract(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a - b)


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a * b)


for _name, _function in (("add", _add), ("sub", _subtract), ("mul", _multiply)):
    for _rounding in ("", ".rn"):
        _opcode = f"{_name}{_rounding}"
        elementwise("f32 f32 f32", f"{_opcode}.f32")(_function)
        elementwise("f32 f32 f32", f"{_opcode}.ftz.f32")(_flushed(_function))
        elementwise("f32x2 f32x2 f32x2", f"{_opcode}.f32x2")(_pairs(_function))

_FMA: tuple[tuple[str, _Function], ...] = (
    ("rn", numbers.fma32), ("rm", numbers.fma32_down), ("rz", numbers.fma32_to_zero),
)  # fmt: skip
for _rounding, _function in _FMA:
    elementwise("f32 f32 f32 f32", f"fma.{_rounding}.f32")(_function)
    elementwise("f32 f32 f32 f32", f"fma.{_rounding}.ftz.f32")(_flushed(_function))
    elementwise("f32x2 f32x2 f32x2 f32x2", f"fma.{_rounding}.f32x2")(_pairs(_function))
    elementwise("f32x2 f32x2 f32x2 f32x2", f"fma.{_rounding}.ftz.f32x2")(_pairs(_flushed(_function)))


@elementwise("f32 f32 f32", "add.rz.f32")
def _add_to_zero(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numbers.fma32_to_zero(np.array(1, F32), a, b)


elementwise("f32 f32 f32", "add.rz.ftz.f32")(_flushed(_add_to_zero))


@elementwise("f32 f32 f32 f32", "fma.rn.ftz.sat.f32")
def _fma_saturated(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return numbers.saturate(_flushed(numbers.fma32)(a, b, c))


@elementwise("f32 f32 f32", "div.rn.f32", "div.full.f32")
def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(a / b)


elementwise("f32 f32", "rcp.rn.f32")(numbers.rcp)
elementwise("f32 f32", "sqrt.rn.f32")(numbers.sqrt)
elementwise("f32 f32", "sqrt.rn.ftz.f32")(_flushed(numbers.sqrt))
elementwise("f32 f32", "rcp.approx.ftz.f32")(_flushed(numbers.rcp))
_APPROXIMATIONS: tuple[tuple[str, _Function], ...] = (
    ("ex2", numbers.ex2), ("rsqrt", numbers.rsqrt), ("sqrt", numbers.sqrt), ("lg2", numbers.by_float64(np.log2)),
    ("sin", numbers.by_float64(np.sin)), ("cos", numbers.by_float64(np.cos)),
)  # fmt: skip
for _name, _function in _APPROXIMATIONS:
    elementwise("f32 f32", f"{_name}.approx.f32")(_function)
    elementwise("f32 f32", f"{_name}.approx.ftz.f32")(_flushed(_function))
elementwise("f32 f32", "tanh.approx.f32")(numbers.by_float64(np.tanh))
elementwise("f32 f32 f32", "div.approx.f32")(numbers.div_approx)


# ---------------------------------------------------------------- float32 with operands in bf16


@elementwise("f32 bf16 f32", "add.f32.bf16", "add.rn.f32.bf16")
def _add_wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return canonical(numbers.bf16_values(a) + b)


@elementwise("f32 bf16 bf16 f32", "fma.rn.f32.bf16")
def _fma_wide(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return numbers.fma32(numbers.bf16_values(a), numbers.bf16_values(b), c)


# ---------------------------------------------------------------- float64: its NaN is NumPy's

elementwise("f64 f64 f64", "add.f64", "add.rn.f64")(np.add)
elementwise("f64 f64 f64", "sub.f64", "sub.rn.f64")(np.subtract)
elementwise("f64 f64 f64", "mul.f64", "mul.rn.f64")(np.multiply)
elementwise("f64 f64 f64", "div.rn.f64")(np.divide)
elementwise("f64 f64", "sqrt.rn.f64")(np.sqrt)
elementwise("f64 f64 f64 f64", "fma.rn.f64")(numbers.fma64)


# ---------------------------------------------------------------- pairs of 16-bit floats, and single ones


def _multiply_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of halves, as uint16 bits. float32 holds the product exactly."""
    return numbers.to_f16(numbers.f16_values(a) * numbers.f16_values(b))


def _fma_f16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return numbers.to_f16(numbers.fused(*map(numbers.f16_values, (a, b, c))))


def _halves(function: _Function) -> _Function:
    """Convert a function of uint16 bits to one of pairs in 32 bits."""

    def of_pairs(*words: np.ndarray) -> np.ndarray:
        return joined(function(*map(halves, words)))

    return of_pairs


def _add_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of bfloat16 numbers, as uint16 bits. Rounding to 24 bits first changes no sum of numbers with 8 bits."""
    return numbers.to_bf16(numbers.bf16_values(a) + numbers.bf16_values(b))


def _subtract_bf16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _add_bf16(a, b ^ U16(0x8000))


def _add_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of halves, as uint16 bits. float64 holds it exactly."""
    return numbers.to_f16(numbers.f16_values(a).astype(np.float64) + numbers.f16_values(b))


def _subtract_f16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return _add_f16(a, b ^ U16(0x8000))


for _kind, _name, _function in (
    ("bf16", "add", _add_bf16), ("bf16", "sub", _subtract_bf16),
    ("f16", "add", _add_f16), ("f16", "sub", _subtract_f16),
):  # fmt: skip
    elementwise(f"{_kind} {_kind} {_kind}", f"{_name}.{_kind}", f"{_name}.rn.{_kind}")(_function)
    _pair = f"{_kind}x2"
    elementwise(f"{_pair} {_pair} {_pair}", f"{_name}.{_pair}", f"{_name}.rn.{_pair}")(_halves(_function))

for _kind, _product, _fma in (
    ("f16", _multiply_f16, _fma_f16), ("bf16", numbers.multiply_bf16, numbers.fma_bf16),
):  # fmt: skip
    _pair = f"{_kind}x2"
    elementwise(f"{_kind} {_kind} {_kind}", f"mul.{_kind}", f"mul.rn.{_kind}")(_product)
    elementwise(f"{_pair} {_pair} {_pair}", f"mul.{_pair}", f"mul.rn.{_pair}")(_halves(_product))
    elementwise(f"{_kind} {_kind} {_kind} {_kind}", f"fma.rn.{_kind}")(_fma)
    elementwise(f"{_pair} {_pair} {_pair} {_pair}", f"fma.rn.{_pair}")(_halves(_fma))


# ---------------------------------------------------------------- signs, minima and maxima

for _opcode, _kind, _ufunc, _mask in (
    ("abs.f32", "b32", np.bitwise_and, U32(0x7FFFFFFF)), ("neg.f32", "b32", np.bitwise_xor, U32(0x80000000)),
    ("abs.f16x2", "b32", np.bitwise_and, U32(0x7FFF7FFF)), ("neg.f16x2", "b32", np.bitwise_xor, U32(0x80008000)),
    ("abs.bf16x2", "b32", np.bitwise_and, U32(0x7FFF7FFF)), ("neg.bf16x2", "b32", np.bitwise_xor, U32(0x80008000)),
    ("abs.bf16", "b16", np.bitwise_and, U16(0x7FFF)), ("neg.bf16", "b16", np.bitwise_xor, U16(0x8000)),
    ("abs.f16", "b16", np.bitwise_and, U16(0x7FFF)), ("neg.f16", "b16", np.bitwise_xor, U16(0x8000)),
    ("abs.f64", "b64", np.bitwise_and, U64(2**63 - 1)), ("neg.f64", "b64", np.bitwise_xor, U64(2**63)),
):  # fmt: skip

    @elementwise(f"{_kind} {_kind}", _opcode)
    def _sign(bits: np.ndarray, ufunc: np.ufunc = _ufunc, mask: np.unsignedinteger = _mask) -> np.ndarray:
        return ufunc(bits, mask)


@elementwise("b32 b32", "abs.ftz.f32")
def _flushed_magnitude(bits: np.ndarray) -> np.ndarray:
    magnitude = bits & U32(0x7FFFFFFF)
    return np.where(magnitude < 0x00800000, U32(0), magnitude)


def extreme_of(select: np.ufunc, join: np.ufunc, unsigned: type, canonical_nan: np.ndarray, nan: bool) -> _Function:
    """The minimum or maximum of floats, where -0 < +0.

    select: np.minimum or np.maximum. Of two zeros it may return either, so it is called in both orders. join: of their
    bits, "or" keeps the minus. nan: whether one NaN gives NaN. (For a signalling NaN, fmin and fmax return either.)
    """

    def extreme(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        one = select(a, b)
        result = np.asarray(join(one.view(unsigned), select(b, a).view(unsigned))).view(one.dtype)
        invalid = one != one
        if invalid.any():
            if not nan:
                result = np.where(invalid, np.where(a != a, b, a), result)
                invalid = result != result
            result = np.where(invalid, canonical_nan, result)
        return result

    return extreme


def _reduced(extreme: _Function, magnitudes: bool) -> _Function:
    """A function of float32 [rows, n] that returns the minimum or maximum of each row; n is a power of two."""

    def reduced(values: np.ndarray) -> np.ndarray:
        values = np.abs(values) if magnitudes else values
        while values.shape[1] > 1:
            values = extreme(*np.split(values, 2, 1))
        return values[:, 0]

    return reduced


REDUCTIONS = {  # of float32, by the last words of `redux.sync` and `tcgen05.ld.red`
    f"{name}{magnitude}{nan}.f32": _reduced(extreme_of(select, join, U32, numbers.NAN, bool(nan)), bool(magnitude))
    for name, select, join in (("min", np.minimum, np.bitwise_or), ("max", np.maximum, np.bitwise_and))
    for magnitude in ("", ".abs") for nan in ("", ".NaN")
}  # fmt: skip


def _of_two_or_three(opcode: str, function: _Function) -> None:
    """Register a minimum or maximum of two float32 numbers, or of three (PTX ISA 8.8)."""

    @form(opcode)
    def build(instruction: Instruction, program: Program) -> Step:
        expect(instruction, 3, 4)
        into, *operands = [(each, "f32") for each in instruction.operands]
        return Elementwise([into], operands, function if len(operands) == 2 else of_three)

    def of_three(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return function(function(a, b), c)


def _of_f16(function: _Function) -> _Function:
    return lambda a, b: numbers.to_f16(function(numbers.f16_values(a), numbers.f16_values(b)))


def _of_bf16(function: _Function) -> _Function:
    return lambda a, b: numbers.to_bf16(function(numbers.bf16_values(a), numbers.bf16_values(b)))


for _name, _join, _select in (("min", np.bitwise_or, np.minimum), ("max", np.bitwise_and, np.maximum)):
    elementwise("f64 f64 f64", f"{_name}.f64")(extreme_of(_select, _join, np.uint64, np.array(np.nan), False))
    for _suffix in ("", ".NaN"):
        _opcode, _function = f"{_name}{_suffix}", extreme_of(_select, _join, U32, numbers.NAN, bool(_suffix))
        _of_two_or_three(f"{_opcode}.f32", _function)
        for _kind, _narrow in (("f16", _of_f16(_function)), ("bf16", _of_bf16(_function))):
            elementwise(f"{_kind} {_kind} {_kind}", f"{_opcode}.{_kind}")(_narrow)
            elementwise(f"{_kind}x2 {_kind}x2 {_kind}x2", f"{_opcode}.{_kind}x2")(_halves(_narrow))


def _signed_extreme(select: np.ufunc, infinity: int, nan: bool) -> _Function:
    """A function of the bits of floats: the smaller or larger magnitude, with the product of the signs (.xorsign.abs).

    select: np.minimum or np.maximum; NaN has larger bits than infinity. nan: whether one NaN gives NaN.
    """
    sign = infinity.bit_length()  # the position of the sign
    magnitude, canonical_nan = 2**sign - 1, 2**sign - 1

    def extreme(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        one, other = a & magnitude, b & magnitude
        found, largest = select(one, other), np.maximum(one, other)
        if nan:
            invalid = largest > infinity
        else:
            smallest = np.minimum(one, other)
            found = np.where(largest > infinity, smallest, found)
            invalid = smallest > infinity
        result = np.asarray((a ^ b) & (magnitude + 1) | found)
        np.copyto(result, result.dtype.type(canonical_nan), where=invalid)
        return result

    return extreme


for _name, _select in (("min", np.minimum), ("max", np.maximum)):
    for _suffix in ("", ".NaN"):
        _opcode = f"{_name}{_suffix}.xorsign.abs"
        elementwise("b32 b32 b32", f"{_opcode}.f32")(_signed_extreme(_select, 0x7F800000, bool(_suffix)))
        elementwise("b32 b32 b32", f"{_opcode}.f16x2")(_halves(_signed_extreme(_select, 0x7C00, bool(_suffix))))
        elementwise("b32 b32 b32", f"{_opcode}.bf16x2")(_halves(_signed_extreme(_select, 0x7F80, bool(_suffix))))
