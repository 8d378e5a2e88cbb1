"""Runs of elementwise instructions, planned as lists of calls of NumPy's functions.

Steps read each register from the register file and write it back. A plan holds registers in slots, and writes back
those that other instructions use. Its instructions depend on each other only by their values, so calls of
the same function that need no result of each other become one call for all of them, on joined arrays. Where a fragment
has many threads, joining costs more than it saves, and a second plan without it serves. (Python code made from the plan
would run faster, but to compile it takes as long as 80 executions save.)
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem, itemgetter
from typing import Any

import numpy as np

from ptxsim.forms import Elementwise, Step, constant, same, type_of
from ptxsim.fragment import Fragment
from ptxsim.parse import Immediate, Instruction, Operand, Program, Register, Special, Symbol, operand_registers
from ptxsim.state import Registers, register_dtype

_INTERPRETED = 4  # executions of a run before it is planned
_JOINED = 1024  # the most threads of a fragment whose calls are joined
_LONGEST = 1 << 14  # entries of joined arrays
_BOOL = np.dtype(bool)
_COMPARISONS = frozenset((np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal))


@dataclass(eq=False)
class Segment:
    """A run of elementwise instructions of a basic block.

    first, end: indices of the first one, and behind the last one. executions: how many fragments have executed it.
    """

    uses: "_Uses"
    first: int
    end: int
    executions: int = 0
    _plans: dict[bool, "_Plan"] = field(default_factory=dict)

    @property
    def steps(self) -> Sequence[Elementwise]:
        return self.uses.steps[self.first : self.end]  # type: ignore[return-value]

    @property
    def instructions(self) -> Sequence[Instruction]:
        return self.uses.program.instructions[self.first : self.end]

    @property
    def is_worthwhile(self) -> bool:
        """Whether it has been executed often enough to be planned."""
        return self.executions > _INTERPRETED

    @cached_property
    def names(self) -> frozenset[str]:
        """All of its registers."""
        return frozenset().union(*self.uses.names[self.first : self.end])

    @property
    def kept(self) -> frozenset[str]:
        """The registers that it has to write back, because other instructions have them, or itself the next time."""
        places, before = self.uses.places
        return frozenset(name for name in self.names if len(places[name]) > 1 or name in before)

    @property
    def always(self) -> frozenset[int]:
        """The indices of instructions without a guard."""
        return frozenset(self.first + i for i, one in enumerate(self.instructions) if one.guard is None)

    def run(self, fragment: Fragment, executed: set[int]) -> None:
        """Execute all instructions. executed: the indices of those that a thread executed, to be completed."""
        joins = len(fragment.active) <= _JOINED
        if joins not in self._plans:
            self._plans[joins] = _Plan(self, _JOINED if joins else 0)
        self._plans[joins].run(fragment, executed)


def segments_of(program: Program, steps: Sequence[Step]) -> list[Segment | None]:
    """For each instruction, the run of two or more that begins there, or None."""
    found: list[Segment | None] = [None] * len(steps)
    uses, start = _Uses(program, steps, found), 0
    for index in range(len(steps) + 1):
        if index == len(steps) or not isinstance(steps[index], Elementwise) or index in program.leaders:
            if index - start > 1:
                found[start] = Segment(uses, start, index)
            start = index if index < len(steps) and isinstance(steps[index], Elementwise) else index + 1
    return found


@dataclass(eq=False)
class _Uses:
    """Which instructions of a program have which registers. segments: as of `segments_of`."""

    program: Program
    steps: Sequence[Step]
    segments: Sequence[Segment | None]

    @cached_property
    def names(self) -> list[set[str]]:
        """The registers of each instruction, those included that its text does not name."""
        found = []
        for one, step in zip(self.program.instructions, self.steps, strict=True):
            named = {each.name for each in operand_registers(one)}
            found.append(named | _results(step) | _operands(one, step) if isinstance(step, Elementwise) else named)
        return found

    @cached_property
    def places(self) -> tuple[dict[str, set[int]], set[str]]:
        """(of each register, the runs and single instructions with it; registers that a run may read first)."""
        run_at = {index: run.first for run in self.segments if run is not None for index in range(run.first, run.end)}
        places: dict[str, set[int]] = defaultdict(set)
        before: set[str] = set()
        for index, (one, step) in enumerate(zip(self.program.instructions, self.steps, strict=True)):
            place = run_at.get(index, ~index)
            writes = isinstance(step, Elementwise) and one.guard is None
            into = _results(step) - _operands(one, step) if writes else set()  # type: ignore[arg-type]
            for name in self.names[index]:
                if place not in places[name] and name not in into:
                    before.add(name)
                places[name].add(place)
        return places, before


def _results(step: Elementwise) -> set[str]:
    return {operand.name for operand, _ in step.into if isinstance(operand, Register)}


def _operands(one: Instruction, step: Elementwise) -> set[str]:
    return {each.name for each in (*(operand for operand, _ in step.operands), one.guard) if isinstance(each, Register)}


# ---------------------------------------------------------------- plans


@dataclass(eq=False)
class _Value:
    """Values of all threads of a fragment. slots: those that hold them, by dtype."""

    slots: dict[np.dtype, int] = field(default_factory=dict)

    @property
    def first(self) -> tuple[np.dtype, int]:
        return next(iter(self.slots.items()))


@dataclass(eq=False)
class _Call:
    """An elementwise instruction with its values.

    given: of the operands; None for constants. guard: the value of its predicate. before: of its results' registers,
    where threads do not execute it. results: the values that it makes.
    """

    index: int
    one: Instruction
    step: Elementwise
    given: list[_Value | None]
    guard: _Value | None
    before: list[_Value | None]
    results: list[_Value]

    @property
    def needs(self) -> list[_Value]:
        return [each for each in (*self.given, self.guard, *self.before) if each is not None]

    @property
    def joinable(self) -> bool:
        """Whether a call of the same function may be made for several instructions: not worth it for a ufunc."""
        return self.guard is None and not isinstance(self.step.function, np.ufunc) and any(self.given)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for instructions that one call may serve."""
        constants = tuple(operand if value is None else None
                          for (operand, _), value in zip(self.step.operands, self.given, strict=True))  # fmt: skip
        bits = tuple(operand.bits for operand, _ in self.step.operands if isinstance(operand, Register))
        into = tuple((getattr(operand, "bits", 0), kind) for operand, kind in self.step.into)
        return self.step.function, tuple(kind for _, kind in self.step.operands), constants, bits, into


def _loaded(registers: Registers, name: str, threads: slice | np.ndarray) -> np.ndarray:
    return registers[name][threads]


def _special(special: Callable, name: str, threads: slice | np.ndarray) -> np.ndarray:
    return special(name, threads)


def _copied(registers: Registers, name: str, threads: slice | np.ndarray) -> np.ndarray:
    return registers[name][threads].copy()


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def _note(executed: set[int], index: int, active: np.ndarray, guard: np.ndarray) -> None:
    """Record that a thread executes an instruction with a predicate."""
    if index not in executed and (active & guard).any():
        executed.add(index)


_REGISTERS, _THREADS, _COUNT, _SPECIAL, _EXECUTED, _ACTIVE = range(6)  # slots that every plan has


class _Plan:
    """The calls of a segment. joined: the most threads of fragments whose calls are joined; 0 for no joins."""

    def __init__(self, segment: Segment, joined: int) -> None:
        self.segment, self.joined = segment, joined
        self.slots: list[Any] = [None] * 6  # what is in them before a run
        # Of each call: the function, a getter of its arguments from the slots, the dtype of the result or None, a slot.
        self.calls: list[tuple[Callable, Callable, np.dtype | None, int]] = []
        self.loaded: dict[_Value, Register | Special | Symbol] = {}  # values from before the segment
        self.current: dict[str, _Value] = {}  # of each register
        self.rewritten = segment.kept & set().union(*map(_results, segment.steps))
        for group in self._scheduled(self._calls()):
            self._add(group)
        self.always = segment.always
        self.back = [(name, self._as(self.current[name], None)) for name in sorted(self.rewritten)]

    def run(self, fragment: Fragment, executed: set[int]) -> None:
        """Execute the calls and write registers. executed: as of `Segment.run`."""
        slots = self.slots.copy()
        machine = fragment.machine
        slots[:6] = (machine.registers, fragment.threads, len(fragment.active), machine.special, executed,
                     fragment.active)  # fmt: skip
        executed |= self.always
        for function, arguments, dtype, slot in self.calls:
            found = function(*arguments(slots))
            slots[slot] = found if dtype is None else np.asarray(found, dtype)
        for name, slot in self.back:
            fragment.put(name, slots[slot])

    def _calls(self) -> list[_Call]:
        """The instructions with their values. `mov` passes its operand's value on."""
        calls = []
        for i, (one, step) in enumerate(zip(self.segment.instructions, self.segment.steps, strict=True)):
            given = [self._value_of(operand) for operand, _ in step.operands]
            guard = None if one.guard is None else self._value_of(one.guard)
            if guard is None and step.function is same and _is_move(step):
                (operand, _), (into, _) = step.operands[0], step.into[0]
                assert isinstance(into, Register) and given[0] is not None
                self.current[into.name] = given[0]
                continue
            results = [_Value() for _ in step.into]
            before = [None if guard is None else self._value_of(operand) for operand, _ in step.into]
            for (operand, _), value in zip(step.into, results, strict=True):
                if isinstance(operand, Register):
                    self.current[operand.name] = value
            calls.append(_Call(self.segment.first + i, one, step, given, guard, before, results))
        return calls

    def _value_of(self, operand: Operand) -> _Value | None:
        if not isinstance(operand, Register | Special | Symbol):
            return None
        if operand.name not in self.current:
            value = self.current[operand.name] = _Value()
            self.loaded[value] = operand
        return self.current[operand.name]

    def _scheduled(self, calls: list[_Call]) -> Iterator[list[_Call]]:
        """Groups of calls, after the calls whose results they need: single calls first, to join many others."""
        if not self.joined:
            yield from ([call] for call in calls)
            return
        users: dict[_Value, list[_Call]] = defaultdict(list)
        missing: dict[_Call, int] = {}
        made = {value for call in calls for value in call.results}
        for call in calls:
            needs = {each for each in call.needs if each in made}
            missing[call] = len(needs)
            for value in needs:
                users[value].append(call)
        single = [call for call in calls if not missing[call] and not call.joinable]
        waiting: dict[Any, list[_Call]] = {}
        for call in calls:
            if not missing[call] and call.joinable:
                waiting.setdefault(call.kind, []).append(call)
        while single or waiting:
            group = [single.pop()] if single else waiting.pop(max(waiting, key=lambda kind: len(waiting[kind])))
            yield group
            for call in group:
                for value in call.results:
                    for user in users[value]:
                        missing[user] -= 1
                        if not missing[user] and user.joinable:
                            waiting.setdefault(user.kind, []).append(user)
                        elif not missing[user]:
                            single.append(user)

    # ------------------------------------------------------------ calls

    def _add(self, group: list[_Call]) -> None:
        most = _LONGEST // self.joined if self.joined else 1
        if len(group) > most:
            for start in range(0, len(group), most):
                self._add(group[start : start + most])
        elif len(group) == 1:
            self._add_single(group[0])
        else:
            self._add_joined(group)

    def _add_single(self, call: _Call) -> None:
        step, varies = call.step, any(call.given)
        arguments = [self._argument(operand, kind, value)
                     for (operand, kind), value in zip(step.operands, call.given, strict=True)]  # fmt: skip
        found = self._results_of(step, arguments, varies)
        guard = self._guard(call)
        for (operand, kind), slot, value, before in zip(step.into, found, call.results, call.before, strict=True):
            self._set(value, operand, kind, slot)
            if guard is not None and isinstance(operand, Register):
                assert before is not None
                new, old = self._as(value, None), self._as(before, register_dtype(operand.bits))
                value.slots = {register_dtype(operand.bits): self._call(np.where, guard, new, old)}

    def _add_joined(self, group: list[_Call]) -> None:
        step, arguments = group[0].step, []
        for i, (operand, kind) in enumerate(step.operands):
            if group[0].given[i] is None:
                arguments.append(self._argument(operand, kind, None))
            else:
                each = [self._argument(call.step.operands[i][0], kind, call.given[i]) for call in group]
                arguments.append(self._call(_joined, *each))
        for i, found in enumerate(self._results_of(step, arguments, varies=True)):
            operand, kind = step.into[i]
            every = _Value()
            self._set(every, operand, kind, found)
            dtype, slot = every.first
            rows = self._call(np.reshape, slot, self._constant((len(group), -1)))
            for row, call in enumerate(group):
                call.results[i].slots = {dtype: self._call(getitem, rows, self._constant(row))}

    def _results_of(self, step: Elementwise, arguments: list[int], varies: bool) -> list[int]:
        """The slots of a function's results, in their dtypes. varies: whether they have an entry for each thread."""
        dtypes = [type_of(kind)[1] for _, kind in step.into]
        if len(dtypes) > 1:
            whole = self._call(step.function, *arguments)
            found = [self._call(getitem, whole, self._constant(i), dtype=dtype) for i, dtype in enumerate(dtypes)]
        else:
            found = [self._call(step.function, *arguments, dtype=None if _is_exact(step) else dtypes[0])]
        return found if varies else [self._call(np.full, _COUNT, slot) for slot in found]

    def _guard(self, call: _Call) -> int | None:
        """The slot of a predicate."""
        guard = call.one.guard
        if guard is None:
            return None
        assert call.guard is not None
        slot = self._as(call.guard, _BOOL)
        slot = self._call(np.invert, slot) if guard.negated else slot
        self._call(_note, _EXECUTED, self._constant(call.index), _ACTIVE, slot)
        return slot

    def _set(self, value: _Value, operand: Operand, kind: str, slot: int) -> None:
        """Let a value of a type be in a slot; for a wider register, extended."""
        bits, dtype = type_of(kind)
        stored = register_dtype(operand.bits) if isinstance(operand, Register) else dtype
        if isinstance(operand, Register) and operand.bits != bits:
            dtype = np.dtype(f"i{operand.bits // 8}") if dtype.kind == "i" else stored
            slot = self._call(np.ndarray.astype, slot, self._constant(dtype))
        value.slots = {dtype: slot}
        if dtype != stored:
            self._as(value, stored)

    def _argument(self, operand: Operand, kind: str, value: _Value | None) -> int:
        bits, dtype = type_of(kind)
        if isinstance(operand, Immediate):
            return self._constant(constant(operand.bits, kind))
        assert value is not None
        if isinstance(operand, Special | Symbol):
            stored = np.dtype(f"u{bits // 8}")
            if stored not in value.slots:
                source = self._as(value, np.dtype(np.uint64))
                value.slots[stored] = self._call(np.ndarray.astype, source, self._constant(stored))
            return self._as(value, dtype)
        assert isinstance(operand, Register)
        if operand.negated:
            return self._call(np.invert, self._as(value, _BOOL))
        if bits == operand.bits:
            return self._as(value, dtype)
        narrow = np.dtype(f"u{bits // 8}")
        slot = self._as(value, register_dtype(operand.bits))
        slot = self._call(np.ndarray.astype, slot, self._constant(narrow))
        return slot if narrow == dtype else self._call(np.ndarray.view, slot, self._constant(dtype))

    def _as(self, value: _Value, dtype: np.dtype | None) -> int:
        """The slot that holds values as a dtype of the same width; None for that of the register file."""
        if not value.slots:
            operand = self.loaded[value]
            name = self._constant(operand.name)
            if isinstance(operand, Register):
                load = _copied if operand.name in self.rewritten else _loaded
                value.slots[register_dtype(operand.bits)] = self._call(load, _REGISTERS, name, _THREADS)
            else:
                value.slots[np.dtype(np.uint64)] = self._call(_special, _SPECIAL, name, _THREADS)
        first, slot = value.first
        if dtype is None:
            dtype = first if first == _BOOL else np.dtype(f"u{first.itemsize}")
        if dtype not in value.slots:
            value.slots[dtype] = self._call(np.ndarray.view, slot, self._constant(dtype))
        return value.slots[dtype]

    def _call(self, function: Callable, *arguments: int, dtype: np.dtype | None = None) -> int:
        """The slot of the result of a call, after those before it. dtype: of the result; None if it is right anyway."""
        first = arguments[0]
        get = itemgetter(*arguments) if len(arguments) > 1 else itemgetter(slice(first, first + 1))
        self.calls.append((function, get, dtype, self._constant(None)))
        return len(self.slots) - 1

    def _constant(self, thing: Any) -> int:
        """A slot that holds an object from the start."""
        self.slots.append(thing)
        return len(self.slots) - 1


def _is_move(step: Elementwise) -> bool:
    """Whether a step that returns its operand only passes it on: registers of one width, and no predicate negated."""
    (into, kind), (operand, _) = step.into[0], step.operands[0]
    bits, _ = type_of(kind)
    return (isinstance(into, Register) and isinstance(operand, Register) and not operand.negated
            and into.bits == operand.bits == bits and type_of(step.operands[0][1])[0] == bits)  # fmt: skip


def _is_exact(step: Elementwise) -> bool:
    """Whether the function is a ufunc whose results have the result's dtype."""
    if not isinstance(step.function, np.ufunc):
        return False
    given = {type_of(kind)[1] for _, kind in step.operands}
    return step.function in _COMPARISONS or given == {type_of(step.into[0][1])[1]}
