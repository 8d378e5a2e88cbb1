"""Instructions on integers.

Source: PTX ISA, "Integer arithmetic instructions" and "Logic and shift instructions"; confidence high. It leaves the
result of a division by zero open; here the quotient has all bits set, and the remainder is the dividend.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ptxsim import numbers
from ptxsim.forms import Elementwise, Step, elementwise, expect, form, immediate
from ptxsim.parse import Immediate, Instruction, Program, Register
from ptxsim.state import CARRY

_WIDTHS = (16, 32, 64)
_CARRY = Register(CARRY, 1)
_INTEGERS = tuple(f"{sign}{bits}" for bits in _WIDTHS for sign in "su")


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b towards zero. fmod has the sign of a, so that a - fmod(a, b) is divided exactly."""
    return np.where(b == 0, ~np.zeros_like(a), np.floor_divide(a - np.fmod(a, b), b))


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(b == 0, a, np.fmod(a, b))


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Any:
    return a * b + c


for _kind in _INTEGERS:
    _two, _three = f"{_kind} {_kind} {_kind}", f"{_kind} {_kind} {_kind} {_kind}"
    elementwise(_two, f"add.{_kind}")(np.add)
    elementwise(_two, f"sub.{_kind}")(np.subtract)
    elementwise(_two, f"mul.lo.{_kind}")(np.multiply)
    elementwise(_three, f"mad.lo.{_kind}")(_multiply_add)
    elementwise(_two, f"min.{_kind}")(np.minimum)
    elementwise(_two, f"max.{_kind}")(np.maximum)
    elementwise(_two, f"div.{_kind}")(_quotient)
    elementwise(_two, f"rem.{_kind}")(_remainder)

for _kind in ("s16", "s32", "s64"):
    elementwise(f"{_kind} {_kind}", f"neg.{_kind}")(np.negative)


for _name, _select in (("min", np.minimum), ("max", np.maximum)):
    elementwise("s32 s32 s32", f"{_name}.relu.s32")(lambda a, b, select=_select: np.maximum(select(a, b), 0))


for _kind, _wide in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
    # The factors are widened first, because NumPy's product has their width.
    _dtype = np.dtype(f"{'i' if _wide[0] == 's' else 'u'}{int(_wide[1:]) // 8}")

    def _wide_product(a: np.ndarray, b: np.ndarray, dtype: np.dtype = _dtype) -> np.ndarray:
        return np.multiply(a, b, dtype=dtype)

    def _wide_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray, dtype: np.dtype = _dtype) -> np.ndarray:
        return np.multiply(a, b, dtype=dtype) + c

    def _high_product(a: np.ndarray, b: np.ndarray, dtype: np.dtype = _dtype) -> np.ndarray:
        return np.multiply(a, b, dtype=dtype) >> 4 * dtype.itemsize

    elementwise(f"{_wide} {_kind} {_kind}", f"mul.wide.{_kind}")(_wide_product)
    elementwise(f"{_wide} {_kind} {_kind} {_wide}", f"mad.wide.{_kind}")(_wide_multiply_add)
    elementwise(f"{_kind} {_kind} {_kind}", f"mul.hi.{_kind}")(_high_product)


@form("mad.lo.cc.u32")
def _multiply_add_carry_out(instruction: Instruction, program: Program) -> Step:
    """The step that adds c to the low halves of the products, and keeps the carry of the sum."""
    expect(instruction, 4)
    into, *operands = instruction.operands

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = a * b + c
        return total, total < c

    return Elementwise([(into, "u32"), (_CARRY, "pred")], [(each, "u32") for each in operands], compute)


@form("madc.hi.u32")
def _multiply_add_carry_in(instruction: Instruction, program: Program) -> Step:
    """The step that adds c and the carry to the high halves of the products."""
    expect(instruction, 4)
    into, *operands = instruction.operands

    def compute(a: np.ndarray, b: np.ndarray, c: np.ndarray, carry: np.ndarray) -> np.ndarray:
        high = (np.multiply(a, b, dtype=np.uint64) >> 32).astype(np.uint32)
        return high + c + carry

    return Elementwise([(into, "u32")], [*((each, "u32") for each in operands), (_CARRY, "pred")], compute)


@elementwise("s16x2 s16x2 s16x2", "add.s16x2")
def _add_halves(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return numbers.joined(numbers.halves(a) + numbers.halves(b))


# ---------------------------------------------------------------- logic and shifts

for _kind in ("pred", "b16", "b32", "b64"):
    _two = f"{_kind} {_kind} {_kind}"
    elementwise(_two, f"and.{_kind}")(np.bitwise_and)
    elementwise(_two, f"or.{_kind}")(np.bitwise_or)
    elementwise(_two, f"xor.{_kind}")(np.bitwise_xor)
    elementwise(f"{_kind} {_kind}", f"not.{_kind}")(np.invert)

# A count beyond the width gives zeros, or signs, as NumPy's shifts do. Counts have 32 bits. They are read with the
# signedness of the shifted number, so that NumPy does not widen both; a negative one counts as a large one.
for _bits in _WIDTHS:
    elementwise(f"b{_bits} b{_bits} u32", f"shl.b{_bits}")(np.left_shift)
    elementwise(f"u{_bits} u{_bits} u32", f"shr.u{_bits}", f"shr.b{_bits}")(np.right_shift)
    elementwise(f"s{_bits} s{_bits} s32", f"shr.s{_bits}")(np.right_shift)


@elementwise("b32 b32 b32 u32", "shf.l.wrap.b32")
def _funnel_left(a: np.ndarray, b: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The upper half of b:a shifted to the left; a shift of a by 32 gives zeros."""
    return b << (count & 31) | a >> 32 - (count & 31)


@elementwise("b32 b32 b32 u32", "shf.r.wrap.b32")
def _funnel_right(a: np.ndarray, b: np.ndarray, count: np.ndarray) -> np.ndarray:
    """The lower half of b:a shifted to the right."""
    return a >> (count & 31) | b << 32 - (count & 31)


# ---------------------------------------------------------------- fields of bits

for _kind in ("u32", "u64"):

    @elementwise(f"{_kind} {_kind} u32 u32", f"bfe.{_kind}")
    def _extract(a: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """`count` bits of a from `start` on."""
        one = a.dtype.type(1)
        return a >> (start & 255).astype(a.dtype) & (one << (count & 255).astype(a.dtype)) - one


for _kind in ("s32", "s64"):

    @elementwise(f"{_kind} {_kind} s32 s32", f"bfe.{_kind}")
    def _extract_signed(a: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """`count` bits of a from `start` on, with their sign; beyond the end of a, its sign."""
        dtype = a.dtype.type
        unused = np.maximum(8 * a.dtype.itemsize - (count & 255), 0).astype(dtype)
        return a >> (start & 255).astype(dtype) << unused >> unused


for _kind in ("b32", "b64"):

    @elementwise(f"u32 {_kind}", f"popc.{_kind}")
    def _count_ones(a: np.ndarray) -> np.ndarray:
        return np.bitwise_count(a).astype(np.uint32)

    @elementwise(f"{_kind} {_kind} {_kind} u32 u32", f"bfi.{_kind}")
    def _insert(a: np.ndarray, b: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
        """b with its bits from `start` on replaced by the low `count` bits of a."""
        one, start = a.dtype.type(1), (start & 255).astype(a.dtype)
        mask = (one << (count & 255).astype(a.dtype)) - one << start
        return b & ~mask | a << start & mask


@form("prmt.b32")
def _permute(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 4)
    into, *operands = instruction.operands
    if isinstance(operands[2], Immediate):
        function, operands = _permutation(immediate(operands[2])), operands[:2]
    else:
        function = numbers.prmt_by_thread
    return Elementwise([(into, "b32")], [(each, "b32") for each in operands], function)


@cache
def _permutation(selector: int) -> Callable:
    return lambda a, b: numbers.prmt(a, b, selector)


@form("lop3.b32")
def _logic(instruction: Instruction, program: Program) -> Step:
    expect(instruction, 5)
    into, *operands, table = instruction.operands
    return Elementwise([(into, "b32")], [(each, "b32") for each in operands], _logic_of(immediate(table)))


@cache
def _logic_of(table: int) -> Callable:
    return lambda a, b, c: numbers.lop3(a, b, c, table)
