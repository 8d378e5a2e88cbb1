"""Every instruction that computes a thread's result from its operands, against a statement in exact arithmetic.

The statements are about Python's integers: bits, or signed numbers where the type is signed. They do not use NumPy, nor
anything of the simulator. (One file of more than 450 lines, because one test asks whether every form has a statement.)
"""

from bisect import bisect_left
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial
from math import ceil, copysign, cos, floor, inf, isfinite, isnan, log2, nan, sin, tanh

import numpy as np
import pytest

from ptxsim.forms import known_forms
from ptxsim.state import PARAMETERS
from tests.helpers import exact_floats
from tests.helpers.exact_floats import BF16, F16, F32, F64, Format
from tests.helpers.hard_operands import FLOATS, bits_of, factors_and_terms, floats, operand, operands
from tests.helpers.one_instruction import execute, register

LANES = 256
INTEGERS = [f"{sign}{bits}" for bits in (16, 32, 64) for sign in "su"]

# By opcode: the types of the result and the operands, and the result's bits from the operands' numbers.
CHECKS: dict[str, tuple[list[str], Callable[..., int | bool]]] = {}


def check(signature: str, *opcodes: str):
    """Say what forms with these types do. "count" is a u32 that is mostly small."""

    def add(function):
        for opcode in opcodes:
            assert opcode not in CHECKS
            CHECKS[opcode] = (signature.split(), function)
        return function

    return add


def signed(value: int, bits: int) -> int:
    return value - 2**bits if value >> bits - 1 & 1 else value


# ---------------------------------------------------------------- integers


def quotient(a: int, b: int) -> int:
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a if b == 0 else a - b * quotient(a, b)


for _kind in INTEGERS:
    _two, _bits = f"{_kind} {_kind} {_kind}", bits_of(_kind)
    check(_two, f"add.{_kind}")(lambda a, b: a + b)
    check(_two, f"sub.{_kind}")(lambda a, b: a - b)
    check(_two, f"mul.lo.{_kind}")(lambda a, b: a * b)
    check(f"{_two} {_kind}", f"mad.lo.{_kind}")(lambda a, b, c: a * b + c)
    check(_two, f"min.{_kind}")(min)
    check(_two, f"max.{_kind}")(max)
    check(_two, f"div.{_kind}")(quotient)
    check(_two, f"rem.{_kind}")(remainder)
    if _kind[0] == "s":
        check(f"{_kind} {_kind}", f"neg.{_kind}")(lambda a: -a)
        check(f"{_kind} {_kind} count", f"shr.{_kind}")(lambda a, n: a >> n)
    else:
        check(f"{_kind} {_kind} count", f"shr.{_kind}", f"shr.b{_bits}")(lambda a, n: a >> n)
        check(f"{_kind} {_kind} count", f"shl.b{_bits}")(lambda a, n: a << min(n, 64))
    if _bits < 64:
        _wide = f"{_kind[0]}{2 * _bits}"
        check(f"{_wide} {_kind} {_kind}", f"mul.wide.{_kind}")(lambda a, b: a * b)
        check(f"{_wide} {_kind} {_kind} {_wide}", f"mad.wide.{_kind}")(lambda a, b, c: a * b + c)
        check(_two, f"mul.hi.{_kind}")(lambda a, b, bits=_bits: a * b >> bits)

for _kind in ("pred", "b16", "b32", "b64"):
    check(f"{_kind} {_kind} {_kind}", f"and.{_kind}")(lambda a, b: a & b)
    check(f"{_kind} {_kind} {_kind}", f"or.{_kind}")(lambda a, b: a | b)
    check(f"{_kind} {_kind} {_kind}", f"xor.{_kind}")(lambda a, b: a ^ b)
    check(f"{_kind} {_kind}", f"not.{_kind}")(lambda a: ~a)


check("s32 s32 s32", "max.relu.s32")(lambda a, b: max(a, b, 0))
check("s32 s32 s32", "min.relu.s32")(lambda a, b: max(min(a, b), 0))


@check("b32 b32 b32", "add.s16x2")
def _(a, b):
    return (a + b & 0xFFFF) | ((a >> 16) + (b >> 16) & 0xFFFF) << 16


check("b32 b32 b32 count", "shf.l.wrap.b32")(lambda a, b, n: (b << 32 | a) << n % 32 >> 32)
check("b32 b32 b32 count", "shf.r.wrap.b32")(lambda a, b, n: (b << 32 | a) >> n % 32)


def extract(a: int, start: int, count: int, bits: int, with_sign: bool) -> int:
    """Bit by bit, as the ISA writes it."""
    start, count = start & 255, count & 255
    sign = a >> min(start + count - 1, bits - 1) & 1 if with_sign and count else 0
    found = (a >> start + i & 1 if i < count and start + i < bits else sign for i in range(bits))
    return sum(bit << i for i, bit in enumerate(found))


def insert(a: int, b: int, start: int, count: int, bits: int) -> int:
    for i in range(min(count & 255, max(bits - (start & 255), 0))):
        at = 1 << i + (start & 255)
        b = b | at if a >> i & 1 else b & ~at
    return b


for _bits in (32, 64):
    _types = f"b{_bits} b{_bits} count count"
    check(_types, f"bfe.u{_bits}")(lambda a, i, n, bits=_bits: extract(a, i, n, bits, False))
    check(_types, f"bfe.s{_bits}")(lambda a, i, n, bits=_bits: extract(a, i, n, bits, True))
    check(f"u32 b{_bits}", f"popc.b{_bits}")(int.bit_count)
    check(f"b{_bits} {_types}", f"bfi.b{_bits}")(lambda a, b, i, n, bits=_bits: insert(a, b, i, n, bits))


@check("b32 b32 b32 b32", "prmt.b32")
def permute(a, b, selector):
    source, result = a | b << 32, 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source >> 8 * (nibble & 7) & 255
        result |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return result


# ---------------------------------------------------------------- moves and comparisons

for _kind in ("pred", "u16", "u32", "u64", "b16", "b32", "b64", "f32"):
    check(f"{_kind} {_kind}", f"mov.{_kind}")(lambda a: a)
    if _kind[0] in "bf":
        check(f"{_kind} {_kind} {_kind} pred", f"selp.{_kind}")(lambda a, b, first: a if first else b)
check("u64 u64", "cvta.global.u64", "cvta.to.global.u64")(lambda a: a)
check("u64 u64", "cvta.param.u64")(lambda offset: offset + PARAMETERS)

COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
for _name, _holds in COMPARISONS.items():
    for _kind in INTEGERS:
        check(f"pred {_kind} {_kind}", f"setp.{_name}.{_kind}")(_holds)
    for _kind in ("s32", "u32"):
        check(f"pred {_kind} {_kind} pred", f"setp.{_name}.and.{_kind}")(
            lambda a, b, c, holds=_holds: holds(a, b) and c)  # fmt: skip
    for _kind in ("b16", "b32", "b64"):
        if _name in ("eq", "ne"):
            check(f"pred {_kind} {_kind}", f"setp.{_name}.{_kind}")(_holds)

    def compare_floats(a, b, holds=_holds, unordered=False, form=F32):
        x, y = form.decode(a), form.decode(b)
        return unordered if isnan(x) or isnan(y) else holds(x, y)

    for _kind in FLOATS:
        check(f"pred {_kind} {_kind}", f"setp.{_name}.{_kind}")(partial(compare_floats, form=FLOATS[_kind]))
        check(f"pred {_kind} {_kind}", f"setp.{_name}u.{_kind}")(
            partial(compare_floats, form=FLOATS[_kind], unordered=True))  # fmt: skip
for _kind, _form in FLOATS.items():

    def is_unordered(a, b, form=_form):
        return isnan(form.decode(a)) or isnan(form.decode(b))

    check(f"pred {_kind} {_kind}", f"setp.nan.{_kind}")(is_unordered)
    check(f"pred {_kind} {_kind}", f"setp.num.{_kind}")(lambda a, b, f=is_unordered: not f(a, b))


# ---------------------------------------------------------------- floats


def pairs(function, bits):
    """A function of bits, for both halves of words of twice the width."""

    def of_pairs(*words):
        low, high = ([word >> at & 2**bits - 1 for word in words] for at in (0, bits))
        return function(*low) | function(*high) << bits

    return of_pairs


def flushed(bits: int) -> int:
    return bits if bits & 0x7F800000 else bits & 0x80000000


def flushing(function):
    return lambda *values: flushed(function(*map(flushed, values)))


def saturated(bits: int) -> int:
    value = F32.decode(bits)
    return F32.encode(min(value, 1.0)) if value > 0 else 0


def add(form):
    return lambda a, b: exact_floats.add(form, a, b)


def subtract(form):
    return lambda a, b: exact_floats.add(form, a, b ^ 1 << form.width - 1)


def multiply(form):
    return lambda a, b: exact_floats.multiply(form, a, b)


def fma(form, down=False):
    return lambda a, b, c: exact_floats.fma(form, a, b, c, down)


for _name, _function in (("add", add), ("sub", subtract), ("mul", multiply)):
    _f32 = _function(F32)
    check("f32 f32 f32", f"{_name}.f32", f"{_name}.rn.f32")(_f32)
    check("f32 f32 f32", f"{_name}.ftz.f32", f"{_name}.rn.ftz.f32")(flushing(_f32))
    check("f32x2 f32x2 f32x2", f"{_name}.f32x2", f"{_name}.rn.f32x2")(pairs(_f32, 32))
    check("f64 f64 f64", f"{_name}.f64", f"{_name}.rn.f64")(_function(F64))


def fma_to_zero(a, b, c):
    """Rounded down; of a negative number, its opposite."""
    x, y, z = map(F32.decode, (a, b, c))
    exact = Fraction(x) * Fraction(y) + Fraction(z) if all(map(isfinite, (x, y, z))) else 0
    if exact == 0:
        return fma(F32)(a, b, c)
    return fma(F32, True)(a, b, c) if exact > 0 else fma(F32, True)(a ^ 2**31, b, c ^ 2**31) ^ 2**31


for _name, _f32 in (("rn", fma(F32)), ("rm", fma(F32, True)), ("rz", fma_to_zero)):
    check("f32 f32 f32 f32", f"fma.{_name}.f32")(_f32)
    check("f32 f32 f32 f32", f"fma.{_name}.ftz.f32")(flushing(_f32))
    check("f32x2 f32x2 f32x2 f32x2", f"fma.{_name}.f32x2")(pairs(_f32, 32))
    check("f32x2 f32x2 f32x2 f32x2", f"fma.{_name}.ftz.f32x2")(pairs(flushing(_f32), 32))
check("f32 f32 f32", "add.rz.f32")(lambda a, b: fma_to_zero(F32.encode(1.0), a, b))
check("f32 f32 f32", "add.rz.ftz.f32")(flushing(lambda a, b: fma_to_zero(F32.encode(1.0), a, b)))
check("f32 f32 f32 f32", "fma.rn.ftz.sat.f32")(lambda *v: saturated(flushing(fma(F32))(*v)))
check("f32 f32 f32", "div.rn.f32", "div.full.f32")(lambda a, b: exact_floats.divide(F32, a, b))
check("f64 f64 f64", "div.rn.f64")(lambda a, b: exact_floats.divide(F64, a, b))


@check("f32 f32 f32", "div.approx.f32")
def divide_approximately(a, b):
    if 2.0**126 < abs(F32.decode(b)) < inf:
        return exact_floats.multiply(F32, a, b & 0x80000000)
    return exact_floats.divide(F32, a, b)


@check("f32 f32", "rcp.rn.f32")
def reciprocal(a):
    return exact_floats.divide(F32, F32.encode(1.0), a)


@check("f32 f32", "ex2.approx.f32")
def power_of_two(a):
    value = F32.decode(a)
    if isnan(value) or value > 200:
        return F32.nan if isnan(value) else F32.infinity
    if value < -200:
        return 0
    with localcontext(prec=40):
        return F32.encode(Fraction(Decimal(2) ** Decimal(value)))


def root(form):
    def of_bits(bits):
        value = form.decode(bits)
        if isnan(value) or value < 0:
            return form.nan
        with localcontext(prec=60):
            return bits if value in (0, inf) else form.encode(Fraction(Decimal(value).sqrt()))

    return of_bits


check("f32 f32", "sqrt.rn.f32", "sqrt.approx.f32")(root(F32))
check("f32 f32", "sqrt.rn.ftz.f32", "sqrt.approx.ftz.f32")(flushing(root(F32)))
check("f64 f64", "sqrt.rn.f64")(root(F64))


def by_math(function, ends):
    """float32 of a function of Python's, rounded from float64. ends: its values at -inf, -0, 0 and inf."""

    def of_bits(bits):
        value = F32.decode(bits)
        if isnan(value):
            return F32.nan
        at_end = dict(zip(("-inf", "-0.0", "0.0", "inf"), ends, strict=True)).get(str(value))
        return F32.encode(at_end if at_end is not None else function(value))

    return of_bits


for _name, _function in (
    ("lg2", by_math(lambda x: log2(x) if x > 0 else nan, (nan, -inf, -inf, inf))),
    ("sin", by_math(sin, (nan, -0.0, 0.0, nan))), ("cos", by_math(cos, (nan, 1.0, 1.0, nan))),
):  # fmt: skip
    check("f32 f32", f"{_name}.approx.f32")(_function)
    check("f32 f32", f"{_name}.approx.ftz.f32")(flushing(_function))
check("f32 f32", "tanh.approx.f32")(by_math(tanh, (-1.0, -0.0, 0.0, 1.0)))


@check("f32 f32", "rsqrt.approx.f32")
def reciprocal_root(a):
    value = F32.decode(a)
    if value == 0:
        return F32.encode(copysign(inf, value))
    if isnan(value) or value < 0:
        return F32.nan
    with localcontext(prec=40):
        return 0 if value == inf else F32.encode(Fraction(1 / Decimal(value).sqrt()))


check("f32 f32", "rsqrt.approx.ftz.f32")(flushing(reciprocal_root))


@check("f64 f64 f64 f64", "fma.rn.f64")
def fma_f64(a, b, c):
    x, y, z = map(F64.decode, (a, b, c))
    if not (isfinite(x) and isfinite(y) and isfinite(z)):
        return F64.encode(x * y + z)
    minus = (copysign(1, x) != copysign(1, y)) and copysign(1, z) < 0
    return F64.encode(Fraction(x) * Fraction(y) + Fraction(z), negative_zero=minus)


def wide(bits: int) -> int:
    """A bf16 number as float32."""
    return bits << 16


check("f32 bf16 f32", "add.f32.bf16", "add.rn.f32.bf16")(lambda a, b: add(F32)(wide(a), b))
check("f32 bf16 bf16 f32", "fma.rn.f32.bf16")(lambda a, b, c: fma(F32)(wide(a), wide(b), c))
for _kind, _name in ((kind, name) for kind in ("f16", "bf16") for name in ("add", "sub")):
    _function, _pair = (add if _name == "add" else subtract)(FLOATS[_kind]), f"{_kind}x2"
    check(f"{_kind} {_kind} {_kind}", f"{_name}.{_kind}", f"{_name}.rn.{_kind}")(_function)
    check(f"{_pair} {_pair} {_pair}", f"{_name}.{_pair}", f"{_name}.rn.{_pair}")(pairs(_function, 16))

check("f32 f32", "ex2.approx.ftz.f32")(flushing(power_of_two))
check("f32 f32", "rcp.approx.ftz.f32")(flushing(reciprocal))

for _kind in ("f16", "bf16"):
    _form, _pair = FLOATS[_kind], f"{_kind}x2"
    check(f"{_kind} {_kind} {_kind}", f"mul.{_kind}", f"mul.rn.{_kind}")(multiply(_form))
    check(f"{_kind} {_kind} {_kind} {_kind}", f"fma.rn.{_kind}")(fma(_form))
    check(f"{_pair} {_pair} {_pair}", f"mul.{_pair}", f"mul.rn.{_pair}")(pairs(multiply(_form), 16))
    check(f"{_pair} {_pair} {_pair} {_pair}", f"fma.rn.{_pair}")(pairs(fma(_form), 16))


def extreme(form: Format, larger: bool, nan: bool):
    """max or min. nan: whether one NaN gives NaN."""

    def of_bits(a, b):
        x, y = form.decode(a), form.decode(b)
        if isnan(x) or isnan(y):
            return form.nan if nan or (isnan(x) and isnan(y)) else b if isnan(x) else a
        ordered = sorted((a, b), key=lambda bits: (form.decode(bits), copysign(1, form.decode(bits))))
        return ordered[larger]

    return of_bits


def signed_extreme(form: Format, larger: bool, nan: bool):
    """max or min of the magnitudes, with the product of the signs."""
    sign = 1 << form.width - 1

    def of_bits(a, b):
        found = extreme(form, larger, nan)(a & ~sign, b & ~sign)
        return found if found == form.nan else found | (a ^ b) & sign

    return of_bits


for _name in ("min", "max"):
    check("f64 f64 f64", f"{_name}.f64")(extreme(F64, _name == "max", False))
    for _nan in ("", ".NaN"):
        for _middle, _function in (("", extreme), (".xorsign.abs", signed_extreme)):
            _opcode = f"{_name}{_nan}{_middle}"
            check("f32 f32 f32", f"{_opcode}.f32")(_function(F32, _name == "max", bool(_nan)))
            for _kind in ("f16", "bf16"):
                _narrow = _function(FLOATS[_kind], _name == "max", bool(_nan))
                check(f"{_kind}x2 {_kind}x2 {_kind}x2", f"{_opcode}.{_kind}x2")(pairs(_narrow, 16))
                if not _middle:
                    check(f"{_kind} {_kind} {_kind}", f"{_opcode}.{_kind}")(_narrow)

check("f32 f32", "abs.f32")(lambda a: a & 2**31 - 1)
check("f32 f32", "abs.ftz.f32")(lambda a: flushed(a & 2**31 - 1))
check("f32 f32", "neg.f32")(lambda a: a ^ 2**31)
for _kind in ("f16", "bf16"):
    check(f"{_kind}x2 {_kind}x2", f"abs.{_kind}x2")(pairs(lambda a: a & 2**15 - 1, 16))
    check(f"{_kind}x2 {_kind}x2", f"neg.{_kind}x2")(pairs(lambda a: a ^ 2**15, 16))
    check(f"{_kind} {_kind}", f"abs.{_kind}")(lambda a: a & 2**15 - 1)
    check(f"{_kind} {_kind}", f"neg.{_kind}")(lambda a: a ^ 2**15)
check("f64 f64", "abs.f64")(lambda a: a & 2**63 - 1)
check("f64 f64", "neg.f64")(lambda a: a ^ 2**63)


# ---------------------------------------------------------------- conversions

for _into in [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "su"]:
    for _from in [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "su"]:
        if _into != _from:
            check(f"{_into} {_from}", f"cvt.{_into}.{_from}")(lambda a: a)


def converted(into: Format, source: Format):
    return lambda a: into.encode(source.decode(a))


ALL_INTEGERS = [f"{sign}{bits}" for bits in (8, 16, 32, 64) for sign in "su"]
for _from in ALL_INTEGERS:
    for _kind, _form in FLOATS.items():
        if _kind in ("f32", "f64") or bits_of(_from) < 64:
            check(f"{_kind} {_from}", f"cvt.rn.{_kind}.{_from}")(lambda a, form=_form: form.encode(Fraction(a)))


def whole(rounded, into: str, source: str):
    """An integer of a float; saturated. NaN: 0, or of 64 bits the largest power of two."""
    bits, form = bits_of(into), FLOATS[source]
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if into[0] == "s" else (0, 2**bits - 1)

    def of_bits(given):
        value = form.decode(given)
        if isnan(value):
            return 2 ** (bits - 1) if bits == 64 or source == "f64" else 0
        return (high if value > 0 else low) if abs(value) == inf else max(min(rounded(value), high), low)

    return of_bits


def whole_float(rounded, form):
    def of_bits(bits):
        value = form.decode(bits)
        return form.encode(copysign(rounded(value), value) if abs(value) < inf else value)

    return of_bits


for _name, _rounded in (("rni", round), ("rzi", int), ("rmi", floor), ("rpi", ceil)):  # all are exact, ties to even
    for _from in FLOATS:
        for _into in ALL_INTEGERS:
            _function = whole(_rounded, _into, _from)
            check(f"{_into} {_from}", f"cvt.{_name}.{_into}.{_from}")(_function)
            if _from == "f32":
                check(f"{_into} f32", f"cvt.{_name}.ftz.{_into}.f32")(lambda a, f=_function: f(flushed(a)))
    _function = whole_float(_rounded, F32)
    check("f32 f32", f"cvt.{_name}.f32.f32")(_function)
    check("f32 f32", f"cvt.{_name}.ftz.f32.f32")(lambda a, f=_function: f(flushed(a)))
    check("f64 f64", f"cvt.{_name}.f64.f64")(whole_float(_rounded, F64))
check("f64 f16", "cvt.f64.f16")(converted(F64, F16))
check("f16 f64", "cvt.rn.f16.f64")(converted(F16, F64))
check("bf16 f64", "cvt.rn.bf16.f64")(converted(BF16, F64))
check("f32 bf16", "cvt.f32.bf16")(lambda a: a << 16)
check("f32 f16", "cvt.f32.f16")(converted(F32, F16))
check("bf16 f16", "cvt.rn.bf16.f16", "cvt.bf16.f16")(converted(BF16, F16))
check("bf16 f32", "cvt.rn.bf16.f32")(converted(BF16, F32))
check("f16 f32", "cvt.rn.f16.f32")(converted(F16, F32))
check("f64 f32", "cvt.f64.f32")(converted(F64, F32))
check("f32 f64", "cvt.rn.f32.f64")(converted(F32, F64))
check("f32 f32", "cvt.ftz.sat.f32.f32")(lambda a: flushed(saturated(a)))
check("bf16x2 f32 f32", "cvt.rn.bf16x2.f32")(lambda a, b: converted(BF16, F32)(a) << 16 | converted(BF16, F32)(b))
check("f16x2 f32 f32", "cvt.rn.f16x2.f32")(lambda a, b: converted(F16, F32)(a) << 16 | converted(F16, F32)(b))


def narrow_values(exponent: int, mantissa: int, count: int) -> list[Fraction]:
    """What the codes 0, 1, ... of a narrow float mean."""
    step = Fraction(2) ** (2 - 2 ** (exponent - 1) - mantissa)
    fields = [divmod(code, 2**mantissa) for code in range(count)]
    return [(rest + 2**mantissa * (field > 0)) * step * 2 ** max(field - 1, 0) for field, rest in fields]


# By name: the bits of a code, the numbers of the positive codes, and the code of NaN.
NARROW = {
    "e2m1x2": (4, narrow_values(2, 1, 8), 7),
    "e4m3x2": (8, narrow_values(4, 3, 127), 0x7F),
    "e5m2x2": (8, narrow_values(5, 2, 124), 0x7F),
}


def narrowed(name: str, value: float) -> int:
    """The nearest code, the even one of two; saturated."""
    bits, values, nan = NARROW[name]
    if isnan(value):
        return nan
    magnitude = values[-1] if abs(value) > values[-1] else Fraction(abs(value))
    above = bisect_left(values, magnitude)
    code = min({max(above - 1, 0), above}, key=lambda code: (abs(values[code] - magnitude), code % 2))
    return code | (copysign(1, value) < 0) << bits - 1


def widened(name: str, form: Format, code: int) -> int:
    """The bits as fp16 or bf16."""
    bits, values, _ = NARROW[name]
    sign, magnitude = divmod(code, 2 ** (bits - 1))
    if magnitude >= len(values):
        return form.infinity | sign << 15 if (name, magnitude) == ("e5m2x2", 124) else form.nan
    return form.encode(values[magnitude]) | sign << 15


for _name, (_bits, _, _) in NARROW.items():

    def of_two(a, b, name=_name, bits=_bits):
        return narrowed(name, F32.decode(a)) << bits | narrowed(name, F32.decode(b))

    check(f"b{2 * _bits} f32 f32", f"cvt.rn.satfinite.{_name}.f32")(of_two)
    for _kind in ("bf16", "f16") if _bits == 8 else ("bf16",):

        def of_pair(word, name=_name, bits=_bits, form=FLOATS[_kind]):
            return narrowed(name, form.decode(word >> 16)) << bits | narrowed(name, form.decode(word & 0xFFFF))

        check(f"b{2 * _bits} {_kind}x2", f"cvt.rn.satfinite.{_name}.{_kind}x2")(of_pair)
    for _kind in ("bf16", "f16"):

        def both(word, name=_name, bits=_bits, form=FLOATS[_kind]):
            return widened(name, form, word >> bits) << 16 | widened(name, form, word & 2**bits - 1)

        check(f"{_kind}x2 b{2 * _bits}", f"cvt.rn.{_kind}x2.{_name}")(both)


@check("b16 f32 f32", "cvt.rp.satfinite.ue8m0x2.f32")
def powers_of_two(a, b):
    def code(bits):
        value = F32.decode(bits)
        if isnan(value) or copysign(1, value) < 0:
            return 255
        return next((i for i in range(255) if value <= 2.0 ** (i - 127)), 254)

    return code(a) << 8 | code(b)


# ---------------------------------------------------------------- tests

OTHERS = {  # what other test files check, by the first word: memory, control flow, barriers, copies, products, warps
    "ld", "st", "red", "atom", "bra", "brx", "ret", "exit", "bar", "barrier", "mbarrier", "fence", "griddepcontrol",
    "setmaxnreg", "cp", "tensormap", "tcgen05", "mma", "wgmma", "ldmatrix", "stmatrix", "mapa", "shfl", "redux",
    "elect", "vote", "createpolicy", "prefetch", "call", "trap",
}  # fmt: skip
OWN_TEST = {
    "cvta.param.u64",
    "cvta.to.global.u64",
    "lop3.b32",
    "cvt.rs.satfinite.e2m1x4.f32",
    "mad.lo.cc.u32",
    "madc.hi.u32",
}
COMPARED_HALVES = {f"{opcode}x2" for opcode in CHECKS if opcode.startswith("setp.") and opcode.endswith("f16")}


def test_every_form_has_a_check():
    known = {opcode for opcode in known_forms() if opcode.split(".")[0] not in OTHERS}
    assert known == {*CHECKS, *OWN_TEST, *COMPARED_HALVES}


@pytest.mark.parametrize("opcode", CHECKS)
def test_form(opcode):
    """All operands are registers; then each one in turn, and all of them, are constants."""
    (into, *kinds), function = CHECKS[opcode]
    values = operands(opcode, kinds, LANES)
    compare(opcode, into, kinds, values, function, set())
    constant = {i for i, kind in enumerate(kinds) if kind != "pred"}
    for fixed in [*({i} for i in constant), constant]:
        some = [[each[5]] * 32 if i in fixed else each[:32] for i, each in enumerate(values)]
        compare(opcode, into, kinds, some, function, fixed)


def compare(opcode, into, kinds, values, function, fixed):
    """fixed: the operands that are constants of the instruction."""
    names = [register(bits_of(kind), i + 1) for i, kind in enumerate(kinds)]
    texts = [hex(each[0]) if i in fixed else name for i, (name, each) in enumerate(zip(names, values, strict=True))]
    result = register(bits_of(into), 0)
    registers = execute(
        f"{opcode} {', '.join([result, *texts])}",
        {name: np.array(each, np.uint64) for name, each in zip(names, values, strict=True)},
    )
    numbers = [
        [signed(x, bits_of(kind)) if kind[0] == "s" else x for x in each]
        for kind, each in zip(kinds, values, strict=True)
    ]
    inputs = zip(*numbers, strict=True)
    for found, given in zip(registers[result], inputs, strict=True):
        expected = int(function(*given)) % 2 ** bits_of(into)
        if into == "f64" and isnan(F64.decode(expected)):
            assert isnan(F64.decode(int(found)))
        else:
            assert int(found) == expected, (opcode, fixed, [hex(x) for x in given], hex(int(found)), hex(expected))


@pytest.mark.parametrize("opcode", sorted(COMPARED_HALVES))
def test_comparisons_of_halves(opcode):
    """A predicate for the low halves, and one for the high halves, of registers and constants."""
    (_, *kinds), function = CHECKS[opcode.removesuffix("x2")]
    low, high = (operands(opcode + part, kinds, 32) for part in ("low", "high"))
    a, b = (np.array(x, np.uint64) | np.array(y, np.uint64) << np.uint64(16) for x, y in zip(low, high, strict=True))
    for text, second in (("%r2", b), (hex(int(b[5])), np.full_like(b, b[5]))):
        found = execute(f"{opcode} %p1|%p2, %r1, {text}", {"%r1": a, "%r2": b})
        for lane, (x, y) in enumerate(zip(a.tolist(), second.tolist(), strict=True)):
            expected = [function(x >> shift & 0xFFFF, y >> shift & 0xFFFF) for shift in (0, 16)]
            assert [found["%p1"][lane], found["%p2"][lane]] == expected, (hex(x), hex(y))


@pytest.mark.parametrize("opcode", [
    "fma.rn.f32", "fma.rm.f32", "fma.rn.ftz.f32", "fma.rn.f16", "fma.rn.bf16", "mul.bf16", "mul.f16",
])  # fmt: skip
def test_one_hard_thread(opcode):
    """A product or sum that is hard to round once, where other threads do not ask for the slower way."""
    (into, *kinds), function = CHECKS[opcode]
    form = FLOATS[into]
    triples = [*zip(*factors_and_terms(form, 90, np.random.default_rng(3)), strict=True)]
    if into == "f32":  # Halfway between two subnormal numbers, and 5 * 2^-187 above, which float64 does not hold.
        triples += [tuple(form.encode(x) for x in (sign * 15742017 * 2.0**-94, 13454021 * 2.0**-93, sign * 2.0**-130))
                    for sign in (1, -1)]  # fmt: skip
    for triple in triples:
        compare(opcode, into, kinds, [[bits, *[0] * 31] for bits in triple[: len(kinds)]], function, set())


def test_lop3():
    values = np.random.default_rng(0).integers(0, 2**32, (3, 32), dtype=np.uint32)
    inputs = {f"%r{i + 1}": each for i, each in enumerate(values)}
    for table in range(256):
        found = execute(f"lop3.b32 %r0, %r1, %r2, %r3, {table:#x}", inputs)["%r0"]
        for lane in range(0, 32, 8):
            a, b, c = (int(x) for x in values[:, lane])
            bits = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1 for i in range(32))
            assert int(found[lane]) == sum((table >> bit & 1) << i for i, bit in enumerate(bits))
    found = execute("lop3.b32 %r0, %r1, 0xF0F0F0F0, 0xAAAA5555, 0xCA", inputs)["%r0"]  # a ? b : c
    np.testing.assert_array_equal(found, values[0] & 0xF0F0F0F0 | ~values[0] & 0xAAAA5555)


@pytest.mark.parametrize("name", ["min", "max", "min.NaN", "max.NaN"])
def test_three_operands(name):
    opcode = f"{name}.f32"
    random = np.random.default_rng(0)
    values = [operand("f32", LANES, random) for _ in range(3)]
    inputs = {f"%r{i + 1}": np.array(each, np.uint64) for i, each in enumerate(values)}
    found = execute(f"{opcode} %r0, %r1, %r2, %r3", inputs)["%r0"]
    of_two = CHECKS[opcode][1]
    assert [int(x) for x in found] == [of_two(of_two(a, b), c) for a, b, c in zip(*values, strict=True)]


def test_carries():
    """Numbers of 32 bits times numbers of 64 bits, by two instructions."""
    random = np.random.default_rng(0)
    a, b, c, d = (operand("u32", LANES, random) for _ in range(4))
    inputs = {f"%r{i + 1}": np.array(each, np.uint64) for i, each in enumerate((a, b, c, d))}
    low = execute("mad.lo.cc.u32 %r5, %r1, %r2, %r3", inputs)
    high = execute("madc.hi.u32 %r6, %r1, %r2, %r4", low)
    for lane in range(LANES):
        total = a[lane] * b[lane] + c[lane] + (d[lane] << 32)
        assert int(high["%r5"][lane]) + (int(high["%r6"][lane]) << 32) == total % 2**64


def test_constant_selectors_of_prmt():
    values = np.random.default_rng(0).integers(0, 2**32, (2, 32), dtype=np.uint32)
    selectors = [int(x) for x in np.random.default_rng(1).integers(0, 2**16, 500)]
    for selector in [0x1010, 0x5410, 0x7632, 0xBA98, *selectors]:
        found = execute(f"prmt.b32 %r0, %r1, %r2, {selector:#x}", {"%r1": values[0], "%r2": values[1]})["%r0"]
        for lane in (0, 1, 2):
            assert int(found[lane]) == permute(int(values[0][lane]), int(values[1][lane]), selector)


def test_stochastic_rounding_to_e2m1():
    """Of four numbers the last is in the lowest bits, and the lowest byte of the random word is its noise."""
    random = np.random.default_rng(0)
    values = np.array([floats(F32, 4096, random) for _ in range(4)], np.uint32)
    words = random.integers(0, 2**32, 4096, dtype=np.uint32)
    inputs = {"%r5": words, **{f"%r{i + 1}": each for i, each in enumerate(values)}}
    found = execute("cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, %r2, %r3, %r4}, %r5", inputs)["%h0"]
    numbers = NARROW["e2m1x2"][1]
    for lane, result in enumerate(map(int, found)):
        for i in range(4):
            value, noise = F32.decode(int(values[3 - i][lane])), int(words[lane]) >> 8 * i & 255
            code = result >> 4 * i & 15
            if isnan(value):
                assert code == 7
                continue
            magnitude = min(Fraction(min(abs(value), 6.0)), numbers[-1])
            low = max(j for j, number in enumerate(numbers) if number <= magnitude)
            if low < 7:
                part = (magnitude - numbers[low]) / (numbers[low + 1] - numbers[low])
                low += int(part * 256) + noise >= 256
            assert code == low | (copysign(1, value) < 0) << 3
    constant = execute("cvt.rs.satfinite.e2m1x4.f32 %h0, {%r1, 0x3FC00000, 0, 0x40400000}, 0", inputs)["%h0"]
    assert set(constant & 0xFFF) == {0x305}
