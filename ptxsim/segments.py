"""Runs of elementwise instructions, compiled to Python functions that call NumPy.

Steps read each register from the register file and write it back. A compiled run holds registers in variables, and
writes back those that other instructions use. Its instructions depend on each other only by their values, so calls of
the same function that need no result of each other become one call for all of them, on joined arrays. Where a fragment
has many threads, joining costs more than it saves, and a second function without it serves.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ptxsim.forms import Elementwise, Step, constant, same, type_of
from ptxsim.fragment import Fragment
from ptxsim.parse import Immediate, Instruction, Operand, Program, Register, Special, Symbol, operand_registers
from ptxsim.state import register_dtype

_INTERPRETED = 4  # executions of a run before it is compiled
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
    _compiled: dict[bool, Any] = field(default_factory=dict)

    @property
    def steps(self) -> Sequence[Elementwise]:
        return self.uses.steps[self.first : self.end]  # type: ignore[return-value]

    @property
    def instructions(self) -> Sequence[Instruction]:
        return self.uses.program.instructions[self.first : self.end]

    @property
    def is_worthwhile(self) -> bool:
        """Whether it has been executed often enough to be compiled."""
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
        if joins not in self._compiled:
            self._compiled[joins] = _Source(self, _JOINED if joins else 0).function()
        for name, values in self._compiled[joins](fragment, fragment.machine.registers, executed):
            fragment.put(name, values)


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


# ---------------------------------------------------------------- the source of a compiled run


@dataclass(eq=False)
class _Value:
    """Values of all threads of a fragment. names: of the variables that hold them, by dtype."""

    names: dict[np.dtype, str] = field(default_factory=dict)

    @property
    def first(self) -> tuple[np.dtype, str]:
        return next(iter(self.names.items()))


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


class _Source:
    """The text of the function of a segment. joined: the most threads of fragments whose calls are joined."""

    def __init__(self, segment: Segment, joined: int) -> None:
        self.segment, self.joined = segment, joined
        self.lines: list[str] = []
        self.globals: dict[str, Any] = {"asarray": np.asarray, "where": np.where, "full": np.full,
                                        "concatenate": np.concatenate}  # fmt: skip
        self._names: dict[Any, str] = {}
        self._count = 0
        self.loaded: dict[_Value, Register | Special | Symbol] = {}  # values from before the segment
        self.current: dict[str, _Value] = {}  # of each register
        self.rewritten = segment.kept & set().union(*map(_results, segment.steps))

    def function(self) -> Any:
        """The compiled function: (fragment, register file, executed) -> (register, values) to be written back."""
        calls = self._calls()
        for group in self._scheduled(calls):
            self._emit(group)
        back = ", ".join(f"({name!r}, {self._as(self.current[name], None)})" for name in sorted(self.rewritten))
        always = self.segment.always
        body = [f"if {min(always)} not in E: E.update({self._global(always)})"] if always else []
        body += ["T = F.threads", "n = len(F.active)", *self.lines, f"return ({back}{',' if back else ''})"]
        exec("def run(F, R, E):\n" + "\n".join(f" {line}" for line in body), self.globals)
        return self.globals["run"]

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

    # ------------------------------------------------------------ lines

    def _emit(self, group: list[_Call]) -> None:
        most = max(_LONGEST // max(self.joined, 1), 2)
        if len(group) > most and self.joined:
            for start in range(0, len(group), most):
                self._emit(group[start : start + most])
        elif len(group) == 1:
            self._emit_call(group[0])
        else:
            self._emit_joined(group)

    def _emit_call(self, call: _Call) -> None:
        step = call.step
        arguments = [self._argument(operand, kind, value)
                     for (operand, kind), value in zip(step.operands, call.given, strict=True)]  # fmt: skip
        text = f"{self._global(step.function)}({', '.join(arguments)})"
        if len(step.into) > 1:
            found = self._variable(text)
            texts = [f"{found}[{i}]" for i in range(len(step.into))]
        else:
            texts = [text]
        guard = self._guard(call)
        for (operand, kind), each, value, before in zip(step.into, texts, call.results, call.before, strict=True):
            self._result(operand, kind, each, value, any(call.given), _is_exact(step))
            if guard and isinstance(operand, Register):
                assert before is not None
                new, old = self._as(value, None), self._as(before, register_dtype(operand.bits))
                value.names = {register_dtype(operand.bits): self._variable(f"where({guard}, {new}, {old})")}

    def _guard(self, call: _Call) -> str:
        """The variable of a predicate; the line that records that a thread executes the instruction."""
        guard = call.one.guard
        if guard is None:
            return ""
        assert call.guard is not None
        name = self._as(call.guard, _BOOL)
        name = self._variable(f"~{name}") if guard.negated else name
        self.lines.append(f"if {call.index} not in E and (F.active & {name}).any(): E.add({call.index})")
        return name

    def _emit_joined(self, group: list[_Call]) -> None:
        step, arguments = group[0].step, []
        for i, (operand, kind) in enumerate(step.operands):
            if group[0].given[i] is None:
                arguments.append(self._argument(operand, kind, None))
            else:
                each = [self._argument(call.step.operands[i][0], kind, call.given[i]) for call in group]
                arguments.append(f"concatenate(({', '.join(each)}))")
        found = self._variable(f"{self._global(step.function)}({', '.join(arguments)})")
        for i, (operand, kind) in enumerate(step.into):
            every = _Value()
            self._result(operand, kind, f"{found}[{i}]" if len(step.into) > 1 else found, every, True, False)
            dtype, name = every.first
            rows = [self._new() for _ in group]
            self.lines.append(f"{', '.join(rows)} = {name}.reshape({len(group)}, n)")
            for call, row in zip(group, rows, strict=True):
                call.results[i].names = {dtype: row}

    def _result(self, operand: Operand, kind: str, text: str, value: _Value, varies: bool, is_exact: bool) -> None:
        """Assign results to a variable of a value. varies: whether they have an entry for each thread."""
        bits, dtype = type_of(kind)
        if not is_exact:
            text = f"asarray({text}, {self._global(dtype)})"
        if not varies:
            text = f"full(n, {text})"
        name = self._variable(text)
        stored = register_dtype(operand.bits) if isinstance(operand, Register) else None
        if isinstance(operand, Register) and operand.bits != bits:
            wide = np.dtype(f"i{operand.bits // 8}") if dtype.kind == "i" else stored
            name, dtype = self._variable(f"{name}.astype({self._global(wide)})"), wide  # type: ignore[assignment]
        value.names = {dtype: name}
        if stored is not None and dtype != stored:
            self._as(value, stored)

    def _argument(self, operand: Operand, kind: str, value: _Value | None) -> str:
        bits, dtype = type_of(kind)
        if isinstance(operand, Immediate):
            return self._global(constant(operand.bits, kind))
        assert value is not None
        if isinstance(operand, Special | Symbol):
            stored = np.dtype(f"u{bits // 8}")
            if stored not in value.names:
                source = self._as(value, np.dtype(np.uint64))
                value.names[stored] = self._variable(f"{source}.astype({self._global(stored)})")
            return self._as(value, dtype)
        assert isinstance(operand, Register)
        if operand.negated:
            return f"~{self._as(value, _BOOL)}"
        if bits == operand.bits:
            return self._as(value, dtype)
        narrow = np.dtype(f"u{bits // 8}")
        text = f"{self._as(value, register_dtype(operand.bits))}.astype({self._global(narrow)})"
        return text if narrow == dtype else f"{text}.view({self._global(dtype)})"

    def _as(self, value: _Value, dtype: np.dtype | None) -> str:
        """The variable that holds values as a dtype of the same width; None for that of the register file."""
        if not value.names:
            operand = self.loaded[value]
            if isinstance(operand, Register):
                copied = ".copy()" if operand.name in self.rewritten else ""
                value.names[register_dtype(operand.bits)] = self._variable(f"R[{operand.name!r}][T]{copied}")
            else:
                value.names[np.dtype(np.uint64)] = self._variable(f"F.machine.special({operand.name!r}, T)")
        first, name = value.first
        if dtype is None:
            dtype = first if first == _BOOL else np.dtype(f"u{first.itemsize}")
        if dtype not in value.names:
            value.names[dtype] = self._variable(f"{name}.view({self._global(dtype)})")
        return value.names[dtype]

    def _variable(self, text: str) -> str:
        name = self._new()
        self.lines.append(f"{name} = {text}")
        return name

    def _new(self) -> str:
        self._count += 1
        return f"v{self._count}"

    def _global(self, thing: Any) -> str:
        """The name of an object in the function's globals."""
        key = thing if isinstance(thing, np.dtype) else id(thing)
        if key not in self._names:
            self._names[key] = f"g{len(self._names)}"
            self.globals[self._names[key]] = thing
        return self._names[key]


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
