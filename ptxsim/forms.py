"""The table of instruction forms, and functions that read and write their operands.

Every form is registered by its full opcode. `decode` raises `UnknownForm` for an opcode that is not in the table and
for operands of another kind than the form has, so nothing is guessed.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ptxsim.fragment import Fragment
from ptxsim.parse import (
    Address,
    Immediate,
    Instruction,
    Operand,
    Pair,
    Program,
    Register,
    Special,
    Symbol,
    Unused,
    Vector,
    operand_registers,
)  # fmt: skip
from ptxsim.state import register_dtype

# Executes an instruction for a fragment. Returns None if the whole fragment continues with the next instruction, else
# the fragment that continues, without warps that branched, ended or wait.
Step = Callable[[Fragment], Fragment | None]
Builder = Callable[[Instruction, Program], Step]
Typed = tuple[Operand, str]  # an operand and its type
Read = Callable[[Fragment], Any]
Write = Callable[[Fragment, Any], None]


class UnknownForm(ValueError):
    """An instruction that the simulator does not support; the message names its line."""


_FORMS: dict[str, Builder] = {}
_MOVED: dict[str, tuple[int, ...]] = {}


def form(*opcodes: str, moved: tuple[int, ...] = ()) -> Callable[[Builder], Builder]:
    """Register a function that makes the step of an instruction with one of these opcodes.

    moved: the indices of the operands whose values may be undefined, because the step records where they go.
    """

    def register(builder: Builder) -> Builder:
        for opcode in opcodes:
            if opcode in _FORMS:
                raise ValueError(f"the form {opcode} is registered twice")
            _FORMS[opcode], _MOVED[opcode] = builder, moved
        return builder

    return register


def known_forms() -> frozenset[str]:
    """The opcodes that the simulator supports."""
    return frozenset(_FORMS)


_READ_FIRST = ("brx.idx", "tcgen05.dealloc")  # the instructions whose first operand is no result


def registers_used(one: Instruction, step: Step) -> frozenset[str]:
    """The registers of an instruction, without its guard, whose values must not be undefined."""
    if isinstance(step, Elementwise):
        return frozenset()
    used = [operand for i, operand in enumerate(one.operands) if i not in _MOVED[one.opcode]
            and (i or isinstance(operand, Address) or one.opcode.startswith(_READ_FIRST))]  # fmt: skip
    return frozenset(each.name for each in operand_registers(replace(one, operands=tuple(used), guard=None)))


def decode(program: Program) -> list[Step]:
    """The steps of a program's instructions. Raises UnknownForm, naming the first line of every unknown form."""
    steps: list[Step] = []
    unknown: dict[str, str] = {}  # of each opcode, what is unknown
    for one in program.instructions:
        try:
            if one.opcode not in _FORMS:
                raise UnknownForm(f"the form {one.opcode} is unknown")
            steps.append(_FORMS[one.opcode](one, program))
        except UnknownForm as error:
            unknown.setdefault(one.opcode, f"{one}: {error}")
    if unknown:
        raise UnknownForm("\n".join(unknown.values()))
    return steps


# ---------------------------------------------------------------- types

# For each type: (bits of a value, the dtype in which functions get it).
_TYPES = {
    "pred": (1, np.dtype(bool)),
    **{f"{kind}{bits}": (bits, np.dtype(f"u{bits // 8}")) for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": (bits, np.dtype(f"i{bits // 8}")) for bits in (8, 16, 32, 64)},
    "f32": (32, np.dtype(np.float32)),
    "f64": (64, np.dtype(np.float64)),
    # Floats that NumPy does not have, and pairs of floats, are passed as their bits.
    "f16": (16, np.dtype("u2")), "bf16": (16, np.dtype("u2")),
    "f16x2": (32, np.dtype("u4")), "bf16x2": (32, np.dtype("u4")), "s16x2": (32, np.dtype("u4")),
    "f32x2": (64, np.dtype("u8")),
}  # fmt: skip


def type_of(kind: str) -> tuple[int, np.dtype]:
    """(bits of a value, the dtype in which functions get it) of a type."""
    return _TYPES[kind]


def constant(value: int, kind: str) -> Any:
    """A constant of a type, as an array without dimensions."""
    bits, dtype = _TYPES[kind]
    if kind == "pred":
        return np.array(value != 0)
    return np.array(value % 2**bits, f"u{bits // 8}").view(dtype)


@lru_cache(1 << 15)
def reader(operand: Operand, kind: str) -> Read:
    """A reader of an operand as values of a type: an array with an entry for each thread, or without dimensions.

    A register that is wider than the type gives its low bits. Raises UnknownForm for other operands.
    """
    bits, dtype = _TYPES[kind]
    if isinstance(operand, Immediate):
        value = constant(operand.bits, kind)
        return lambda fragment: value
    if isinstance(operand, Register):
        return _register_reader(operand, bits, dtype)
    if isinstance(operand, (Special, Symbol)):
        name = operand.name
        unsigned = f"u{bits // 8}"
        return lambda fragment: fragment.machine.special(name, fragment.threads).astype(unsigned).view(dtype)
    raise UnknownForm(f"an operand of another kind: {operand}")


def _register_reader(operand: Register, bits: int, dtype: np.dtype) -> Read:
    name = operand.name
    if (bits == 1) != (operand.bits == 1) or bits > operand.bits:
        raise UnknownForm(f"{name} has {operand.bits} bits, and the type {bits}")
    if operand.negated:
        return lambda fragment: ~fragment.get(name)
    if bits == operand.bits:
        if dtype == register_dtype(bits):
            return lambda fragment: fragment.get(name)
        return lambda fragment: fragment.get(name).view(dtype)
    narrow = np.dtype(f"u{bits // 8}")
    return lambda fragment: fragment.get(name).astype(narrow).view(dtype)


@lru_cache(1 << 15)
def writer(operand: Operand, kind: str) -> Write:
    """A writer of values of a type to an operand, for the running threads.

    A register that is wider than the type is extended by the sign of a signed type, and by zeros otherwise.
    Raises UnknownForm for other operands.
    """
    bits, dtype = _TYPES[kind]
    if isinstance(operand, Unused):
        return lambda fragment, values: None
    if not isinstance(operand, Register) or operand.negated:
        raise UnknownForm(f"a result of another kind: {operand}")
    if (bits == 1) != (operand.bits == 1) or bits > operand.bits:
        raise UnknownForm(f"{operand.name} has {operand.bits} bits, and the type {bits}")
    name, stored = operand.name, register_dtype(operand.bits)
    if bits == operand.bits:
        return lambda fragment, values: fragment.put(name, np.asarray(values, dtype).view(stored))
    wide = np.dtype(f"i{operand.bits // 8}") if dtype.kind == "i" else stored
    return lambda fragment, values: fragment.put(name, np.asarray(values, dtype).astype(wide).view(stored))


def elementwise(signature: str, *opcodes: str) -> Callable[[Callable], Callable]:
    """Register a function of arrays as forms that compute each thread's result only from its operands.

    signature: the types of the result and of the operands, "s32 s32 s32". The function gets an array for each operand
    (with an entry for each thread, or without dimensions), in the dtype of `_TYPES`, and returns the results. Integers
    wrap around.
    """
    into, *types = signature.split()

    def register(function: Callable) -> Callable:
        def build(instruction: Instruction, program: Program) -> Step:
            expect(instruction, 1 + len(types))
            result, *operands = instruction.operands
            return Elementwise([(result, into)], zip(operands, types, strict=True), function)

        form(*opcodes)(build)
        return function

    return register


class Elementwise:
    """The step of an instruction whose results of each thread depend only on its operands.

    into, operands: (operand, type) of the results and of the operands. function: of arrays, as of `elementwise`;
    returns a tuple for several results. A run of such steps is compiled (`segments`).
    """

    def __init__(self, into: Iterable[Typed], operands: Iterable[Typed], function: Callable) -> None:
        self.into, self.operands, self.function = tuple(into), tuple(operands), function
        self._writes = [writer(*each) for each in self.into]
        self._reads = [reader(*each) for each in self.operands]

    def __call__(self, fragment: Fragment) -> None:
        given = [read(fragment) for read in self._reads]
        undefined = self._undefined(fragment, given) if fragment.machine.undefined else None
        found = self.function(*given)
        for write, values in zip(self._writes, found if len(self._writes) > 1 else (found,), strict=True):
            write(fragment, values)
        if undefined is not None:
            for operand, _ in self.into:
                fragment.mark(operand, undefined)

    def _undefined(self, fragment: Fragment, given: list[np.ndarray]) -> np.ndarray | None:
        """Whether each thread's results are undefined; None if none are. given: the operands' values."""
        found = fragment.undefined([operand for operand, _ in self.operands])
        if found is None:
            return None
        if self.function is select:
            return np.where(given[2], found[0], found[1]) | found[2]
        if self.function is np.bitwise_and:
            zeros = [~each & (values == 0) for each, values in zip(found, given, strict=True)]
            return np.any(found, 0) & ~np.logical_or(*zeros)
        return np.any(found, 0)


def same(values: np.ndarray) -> np.ndarray:
    """The values unchanged: the write of the result converts integers as required."""
    return values


def select(a: np.ndarray, b: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Each value of `a` where `first` is true, else that of `b`."""
    return np.where(first, a, b)


def expect(instruction: Instruction, *counts: int) -> None:
    """Raise UnknownForm unless the instruction has one of these numbers of operands."""
    if len(instruction.operands) not in counts:
        raise UnknownForm(f"{len(instruction.operands)} operands, and not {counts}")


def immediate(operand: Operand) -> int:
    """The value of a constant. Raises UnknownForm for other operands."""
    if not isinstance(operand, Immediate):
        raise UnknownForm(f"not a constant: {operand}")
    return operand.bits


def address_reader(operand: Operand, bits: int) -> Read:
    """A reader of an address `[base + offset]`, as int64 with an entry for each thread of the fragment."""
    if not isinstance(operand, Address) or operand.coordinates is not None:
        raise UnknownForm(f"not an address: {operand}")
    base, offset = operand.base, operand.offset
    if isinstance(base, Register) and base.bits < bits:
        bits = base.bits
    read = reader(base, f"u{bits}")
    return lambda fragment: fragment.every(read(fragment).astype(np.int64) + offset)


def registers_of(operand: Operand) -> tuple[Operand, ...]:
    """The parts of a vector; a tuple of the operand if it is no vector."""
    return operand.parts if isinstance(operand, Vector) else (operand,)


def pair(operand: Operand) -> tuple[Operand, Operand]:
    """Both parts of `a|b`. Raises UnknownForm for other operands."""
    if not isinstance(operand, Pair):
        raise UnknownForm(f"not a pair: {operand}")
    return operand.first, operand.second
