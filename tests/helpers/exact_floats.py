"""Floats of any format in exact arithmetic: what rounding means, in Python's integers and fractions."""

from dataclasses import dataclass
from fractions import Fraction
from math import copysign, inf, isfinite, isinf, isnan, ldexp, nan


@dataclass(frozen=True)
class Format:
    """A binary float with infinities and NaN, of these numbers of bits."""

    exponent: int
    mantissa: int

    @property
    def width(self) -> int:
        return 1 + self.exponent + self.mantissa

    @property
    def infinity(self) -> int:
        return (2**self.exponent - 1) << self.mantissa

    @property
    def nan(self) -> int:
        """The bits of the NaN that instructions give: all but the sign."""
        return 2 ** (self.width - 1) - 1

    def decode(self, bits: int) -> float:
        """The value; a Python float has every number of these formats."""
        sign, magnitude = (-1.0, 1.0)[bits >> self.width - 1 == 0], bits & self.nan
        if magnitude >= self.infinity:
            return sign * inf if magnitude == self.infinity else nan
        field, rest = divmod(magnitude, 2**self.mantissa)
        significand = rest + (2**self.mantissa if field else 0)
        return sign * ldexp(significand, max(field, 1) - self._bias - self.mantissa)

    def encode(self, value: Fraction | float, down: bool = False, negative_zero: bool = False) -> int:
        """The bits of a number, rounded to nearest even, or towards minus infinity.

        negative_zero: what zero a Fraction 0 is.
        """
        sign = 2 ** (self.width - 1)
        if isinstance(value, float):
            if isnan(value):
                return self.nan
            if isinf(value):
                return self.infinity | sign * (value < 0)
            negative_zero = copysign(1, value) < 0
            value = Fraction(value)
        if value == 0:
            return sign * negative_zero
        negative, above, below = value.numerator < 0, abs(value.numerator), value.denominator
        exponent = max(_floor_log2(above, below), 1 - self._bias)
        shift = self.mantissa - exponent  # the number is a multiple of 2^-shift, and a rest
        above, below = (above << shift, below) if shift > 0 else (above, below << -shift)
        steps, rest = divmod(above, below)
        if down:
            steps += negative and rest > 0
        else:
            steps += 2 * rest > below or (2 * rest == below and steps % 2 == 1)
        # 2^mantissa steps or more add the 1 that the field of the exponent lacks here.
        bits = steps + (exponent - 1 + self._bias << self.mantissa)
        if bits >= self.infinity:
            bits = self.infinity - (down and not negative)
        return bits | sign * negative

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1


def _floor_log2(above: int, below: int) -> int:
    found = above.bit_length() - below.bit_length()
    reached = above >= below << found if found >= 0 else above << -found >= below
    return found if reached else found - 1


F16, BF16, F32, F64 = Format(5, 10), Format(8, 7), Format(8, 23), Format(11, 52)


def fma(form: Format, a: int, b: int, c: int, down: bool = False) -> int:
    """Bits of a * b + c, rounded once. Not for F64, because the sign of a zero is taken from Python's product."""
    x, y, z = map(form.decode, (a, b, c))
    if not (isfinite(x) and isfinite(y) and isfinite(z)):
        return form.encode(x * y + z)
    minus = [copysign(1, number) < 0 for number in (x * y, z)]
    return form.encode(Fraction(x) * Fraction(y) + Fraction(z), down, any(minus) if down else all(minus))


def add(form: Format, a: int, b: int) -> int:
    x, y = form.decode(a), form.decode(b)
    if not (isfinite(x) and isfinite(y)):
        return form.encode(x + y)
    return form.encode(Fraction(x) + Fraction(y), negative_zero=copysign(1, x) < 0 and copysign(1, y) < 0)


def multiply(form: Format, a: int, b: int) -> int:
    x, y = form.decode(a), form.decode(b)
    if not (isfinite(x) and isfinite(y)):
        return form.encode(x * y)
    return form.encode(Fraction(x) * Fraction(y), negative_zero=copysign(1, x) != copysign(1, y))


def divide(form: Format, a: int, b: int) -> int:
    x, y = form.decode(a), form.decode(b)
    negative = copysign(1, x) != copysign(1, y)
    if isnan(x) or isnan(y) or (x == 0 and y == 0) or (isinf(x) and isinf(y)):
        return form.nan
    if isinf(x) or y == 0:
        return form.encode(-inf if negative else inf)
    return form.encode(Fraction(0) if isinf(y) else Fraction(x) / Fraction(y), negative_zero=negative)
