"""Moves, selections and comparisons.

Source: PTX ISA, "mov", "selp", "setp", "cvta"; confidence high. An address in global memory is the same number as a
generic address.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

from ptxsim.forms import Elementwise, Step, UnknownForm, elementwise, expect, form, pair, same, select
from ptxsim.numbers import bf16_values, f16_values, interleaved
from ptxsim.parse import Instruction, Operand, Program, Vector
from ptxsim.state import PARAMETERS

for _kind in ("pred", "u16", "u32", "u64", "f32"):
    elementwise(f"{_kind} {_kind}", f"mov.{_kind}")(same)

elementwise("u64 u64", "cvta.global.u64", "cvta.to.global.u64")(same)


@elementwise("u64 u64", "cvta.param.u64")
def _address_of_parameter(offsets: np.ndarray) -> np.ndarray:
    return offsets + np.uint64(PARAMETERS)


@form("mov.b16", "mov.b32", "mov.b64")
def _move(instruction: Instruction, program: Program) -> Step:
    """The step of `mov`, which also packs parts of a vector into a register, the first one lowest, or unpacks them."""
    expect(instruction, 2)
    kind = instruction.opcode.split(".")[1]
    into, source = instruction.operands
    if isinstance(source, Vector):
        return _pack(into, source.parts, kind)
    if isinstance(into, Vector):
        return _unpack(into.parts, source, kind)
    return Elementwise([(into, kind)], [(source, kind)], same)


def _part(kind: str, count: int) -> str:
    """The type of each of `count` parts of a type."""
    bits = int(kind[1:]) // count
    if count not in (2, 4) or bits < 8:
        raise UnknownForm(f"{count} parts of {kind}")
    return f"b{bits}"


def _pack(into: Operand, parts: tuple[Operand, ...], kind: str) -> Step:
    part = _part(kind, len(parts))
    return Elementwise([(into, kind)], [(each, part) for each in parts], _packed(np.dtype(f"u{int(kind[1:]) // 8}")))


@cache
def _packed(whole: np.dtype) -> Callable:
    return lambda *values: interleaved(*values).view(whole)[..., 0]


def _unpack(parts: tuple[Operand, ...], source: Operand, kind: str) -> Step:
    part = _part(kind, len(parts))
    return Elementwise([(each, part) for each in parts], [(source, kind)], _parts(np.dtype(f"u{int(part[1:]) // 8}")))


@cache
def _parts(part: np.dtype) -> Callable:
    return lambda values: np.ascontiguousarray(values.reshape(-1, 1).view(part).T)


for _kind in ("b16", "b32", "b64", "f32"):
    elementwise(f"{_kind} {_kind} {_kind} pred", f"selp.{_kind}")(select)


# ---------------------------------------------------------------- comparisons

_Comparison = Callable[[np.ndarray, np.ndarray], np.ndarray]
_COMPARISONS: dict[str, _Comparison] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
# Floats: if an operand is NaN, "ne" is false, and comparisons that end in "u" are true.
_COMPARISONS_OF_FLOATS: dict[str, _Comparison] = {
    **_COMPARISONS,
    "ne": lambda a, b: (a < b) | (a > b),
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}  # fmt: skip


def _and(compare: _Comparison) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    return lambda a, b, also: compare(a, b) & also


for _bits in (16, 32, 64):
    for _name in ("eq", "ne"):
        elementwise(f"pred b{_bits} b{_bits}", f"setp.{_name}.b{_bits}")(_COMPARISONS[_name])
    for _kind in (f"s{_bits}", f"u{_bits}"):
        for _name, _compare in _COMPARISONS.items():
            elementwise(f"pred {_kind} {_kind}", f"setp.{_name}.{_kind}")(_compare)

for _kind in ("s32", "u32"):
    for _name, _compare in _COMPARISONS.items():
        elementwise(f"pred {_kind} {_kind} pred", f"setp.{_name}.and.{_kind}")(_and(_compare))

for _name, _compare in _COMPARISONS_OF_FLOATS.items():
    elementwise("pred f32 f32", f"setp.{_name}.f32")(_compare)
    elementwise("pred f64 f64", f"setp.{_name}.f64")(_compare)
    for _kind, _values in (("f16", f16_values), ("bf16", bf16_values)):
        elementwise(f"pred {_kind} {_kind}", f"setp.{_name}.{_kind}")(
            lambda a, b, compare=_compare, values=_values: compare(values(a), values(b)))  # fmt: skip


@form(*(f"setp.{name}.{kind}" for name in _COMPARISONS_OF_FLOATS for kind in ("f16x2", "bf16x2")))
def _compare_halves(instruction: Instruction, program: Program) -> Step:
    """The step of a comparison of pairs of floats, with a result for the low halves and one for the high halves."""
    expect(instruction, 3)
    _, name, kind = instruction.opcode.split(".")
    values, compare = f16_values if kind == "f16x2" else bf16_values, _COMPARISONS_OF_FLOATS[name]

    def halves(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(compare(*(values((each >> shift).astype(np.uint16)) for each in (a, b))) for shift in (0, 16))

    results, *operands = instruction.operands
    return Elementwise([(each, "pred") for each in pair(results)], [(each, kind) for each in operands], halves)
