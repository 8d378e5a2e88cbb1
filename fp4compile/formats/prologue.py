"""The prologue of a quantiser as data: the pointwise operations whose result is quantised.

A `Prologue` is a list of steps (`formats.steps`). Their tensors are operands, by their numbers: `aux0` has an element
for each element of the result, `row1` one for each column, `col2` one for each row. The first operand is `aux0`, and
the result has its shape. The op `quantize_prologue` carries the steps as strings.

A step may reduce rows ("mean s0"): its result has one element for each row, and so have steps of nothing but such
results. `Prologue.after_statistics` takes these apart from what follows.

Results of steps that something else needs are stored besides, each rounded to a dtype of its own. Later steps compute
with what was not rounded, as they do where Inductor computes them in one kernel.

A prologue may have several results, each of which is quantised: those of the steps that `several` names. A step that
more than one result needs is computed for each.

`apply` is the reference. `templates.device.prologue_source` prints the same steps as Triton device functions.
"""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fp4compile.formats.steps import REDUCTIONS, Step, evaluate, operand_kinds, parse, with_silu

# Tensors that a prologue reads, at most: each is an argument of every launch of the kernels. Those of the result's size
# take registers.
OPERANDS = 6
# Results of steps that it stores, at most; arguments as well.
STORED = 3
KINDS = "aux|row|col"


@dataclass(frozen=True)
class Prologue:
    """The steps before a quantiser, in order; the result of the last one is quantised, or those of `several`.

    dtype: what such a result is rounded to first, as if it had been stored.
    stored: numbers of the steps whose results are stored, and the dtype that each is rounded to. They have the shape of
        the whole result, or one element for each row.
    several: numbers of the steps whose results are quantised, two or more, each by itself; () where the last one is.
    """

    steps: tuple[Step, ...]
    dtype: torch.dtype
    stored: tuple[tuple[int, torch.dtype], ...] = ()
    several: tuple[int, ...] = ()

    @classmethod
    def parse(
        cls, steps: Sequence[str], dtype: torch.dtype, stored: Sequence[str] = (), results: Sequence[int] = ()
    ) -> "Prologue":
        """The prologue of what the op carries. Raises ValueError for what is none."""
        parsed = parse(steps, "prologue", rf"(?:{KINDS})\d+", reducing=True)
        found = cls(parsed, dtype, tuple(map(_stored, stored)), tuple(results))
        if not found.steps or found.kinds.get(0) != "aux" or sorted(found.kinds) != list(range(len(found.kinds))):
            raise ValueError(
                f"prologue: expected steps that read aux0 and operands 1, 2, ... without a gap, got {steps}"
            )
        for (number, _), text in zip(found.stored, stored, strict=True):
            if number >= len(found.steps) or found.step_kinds[number] == "row":
                raise ValueError(
                    f"stored: expected steps whose results have the shape of the whole or one a row, got {text!r}"
                )
        for i in found.reductions:
            kinds = [isinstance(x, str) and found.kind_of(x, found.step_kinds) for x in found.steps[i].arguments]
            if kinds not in (["aux"], ["aux", "col"]):
                raise ValueError(f"prologue: {found.steps[i]}: expected what has the shape of the whole, got {kinds}")
        found._check_several()
        return found

    def _check_several(self) -> None:
        if not self.several:
            return
        if len(set(self.several)) != len(self.several) or len(self.several) < 2:
            raise ValueError(f"results: expected two different steps or more, got {list(self.several)}")
        if self.reductions:
            raise ValueError(f"results: expected none beside steps that reduce rows, got {list(self.several)}")
        for number in self.several:
            if not 0 <= number < len(self.steps) or "aux" not in self.operands_of(number).values():
                raise ValueError(f"results: expected steps whose results have the shape of the whole, got {number}")
        if unneeded := {number for number, _ in self.stored} - {*self.needed(self.several)}:
            raise ValueError(f"stored: expected steps that a result needs, got {sorted(unneeded)}")

    def strings(self) -> list[str]:
        """The steps as the op carries them; `parse` reads them."""
        return list(map(str, self.steps))

    def stored_strings(self) -> list[str]:
        """What is stored, as the op carries it: "s3 bfloat16"."""
        return [f"s{number} {str(dtype).removeprefix('torch.')}" for number, dtype in self.stored]

    @property
    def results(self) -> tuple[int, ...]:
        """Numbers of the steps whose results are quantised."""
        return self.several or (len(self.steps) - 1,)

    @property
    def result(self) -> tuple[int, torch.dtype]:
        """What is quantised, as an entry of `stored`, where there are not several."""
        return len(self.steps) - 1, self.dtype

    @property
    def stores_result(self) -> bool:
        """Whether a later kernel can read what it quantises; of several, each kernel computes them."""
        return not self.several and self.result in self.stored

    def stored_with(self, number: int) -> list[tuple[int, torch.dtype]]:
        """What is stored beside one of several results: what is computed for it, and for no result before it."""
        before = self.needed(self.several[: self.several.index(number)])
        return [each for each in self.stored if each[0] in self.needed([number]) and each[0] not in before]

    def operands_of(self, number: int) -> dict[int, str]:
        """The operands that one of several results needs, as `kinds` has them."""
        return operand_kinds([self.steps[i] for i in self.needed([number])], KINDS)

    @cached_property
    def kinds(self) -> dict[int, str]:
        """How each operand is read, by its number: "aux", "row" or "col"."""
        return operand_kinds(self.steps, KINDS)

    @cached_property
    def step_kinds(self) -> list[str]:
        """What the result of each step has an element for, as `kinds` of operands."""
        found: list[str] = []
        for step in self.steps:
            kinds = {self.kind_of(name, found) for name in step.arguments if isinstance(name, str)}
            found.append("col" if step.operation in REDUCTIONS else kinds.pop() if len(kinds) == 1 else "aux")
        return found

    @staticmethod
    def kind_of(name: str, step_kinds: Sequence[str]) -> str:
        """The kind of a step or an operand by its name."""
        return step_kinds[int(name[1:])] if name[0] == "s" else name.rstrip("0123456789")

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Numbers of the steps that reduce rows."""
        return tuple(i for i, step in enumerate(self.steps) if step.operation in REDUCTIONS)

    @cached_property
    def levels(self) -> list[int]:
        """Of each step, the most reductions, one of the result of another, that its own result depends on."""
        found: list[int] = []
        for step in self.steps:
            below = max((found[int(x[1:])] for x in step.arguments if isinstance(x, str) and x[0] == "s"), default=0)
            found.append(below + (step.operation in REDUCTIONS))
        return found

    def needed(
        self, roots: Iterable[int], among: Container[str] = KINDS.split("|"), given: Container[int] = ()
    ) -> list[int]:
        """Numbers of the steps of these kinds that some steps need, themselves included; in order.

        given: those that are there already.
        """
        found: set[int] = set()
        waiting = list(roots)
        while waiting:
            i = waiting.pop()
            if i not in found and i not in given and self.step_kinds[i] in among:
                found.add(i)
                waiting += [int(x[1:]) for x in self.steps[i].arguments if isinstance(x, str) and x[0] == "s"]
        return sorted(found)

    @cached_property
    def statistics(self) -> tuple[int, ...]:
        """Numbers of the steps with one result a row that the result, and what is stored, need as they are."""
        names = {x for i in self._after for x in self.steps[i].arguments if isinstance(x, str) and x[0] == "s"}
        return tuple(sorted(i for i in map(int, (name[1:] for name in names)) if self.step_kinds[i] == "col"))

    @cached_property
    def _after(self) -> list[int]:
        """Numbers of the steps that are left once the statistics are there."""
        whole = [i for i, _ in self.stored if self.step_kinds[i] == "aux"]
        return self.needed([len(self.steps) - 1, *whole], ("aux", "row"))

    def shortened(self) -> "Prologue":
        """The same results by `formats.steps.with_silu`, for those who print or count the steps that are needed."""
        return replace(self, steps=with_silu(self.steps))

    @property
    def computed(self) -> list[int]:
        """Numbers of the steps that what is quantised and what is stored need."""
        return self.needed((*self.results, *(number for number, _ in self.stored)))

    def after_statistics(self, stored: bool = False) -> tuple["Prologue", tuple[int, ...]]:
        """(what follows the statistics, numbers of the operands that it still reads).

        Its operands are those, in their order, then the statistics. It stores what has the shape of the whole.
        stored: whether that is in memory by then. What a step rounds as it was stored is read there, and comes first
        among the operands. Its numbers follow those of this prologue's operands, in the order of `stored`.
        """
        again = self._stored_roundings() if stored else {}
        after = self.needed([len(self.steps) - 1], ("aux", "row"), again) if stored else self._after
        names = {x for i in after for x in self.steps[i].arguments if isinstance(x, str)}
        read = tuple(i for i, kind in sorted(self.kinds.items()) if f"{kind}{i}" in names)
        read = (*(len(self.kinds) + place for i, place in again.items() if f"s{i}" in names), *read)
        renamed = {f"{self.kinds[i]}{i}": f"{self.kinds[i]}{place}" for place, i in enumerate(read) if i in self.kinds}
        renamed |= {
            f"s{i}": f"aux{read.index(len(self.kinds) + place)}" for i, place in again.items() if f"s{i}" in names
        }
        renamed |= {f"s{i}": f"col{len(read) + place}" for place, i in enumerate(self.statistics)}
        renamed |= {f"s{i}": f"s{place}" for place, i in enumerate(after)}
        steps = tuple(self.steps[i].renamed(renamed) for i in after)
        whole = () if stored else tuple(
            (after.index(i), dtype) for i, dtype in self.stored if self.step_kinds[i] == "aux"
        )  # fmt: skip
        return Prologue(steps, self.dtype, whole), read

    def _stored_roundings(self) -> dict[int, int]:
        """Numbers of the steps that round a result as it is stored -> its place in `stored`."""
        places = {f"{str(dtype).removeprefix('torch.')} s{i}": place for place, (i, dtype) in enumerate(self.stored)}
        return {i: places[str(step)] for i, step in enumerate(self.steps) if str(step) in places}

    def as_walked(self) -> "Prologue":
        """The same with steps that round what a loop reads again that one before has stored.

        Reductions take a result as it is computed, in the loop that stores it; the steps after them take it as it was
        stored. Left alone is what is stored in another dtype than that of the result, or in several, and what both a
        reduction and later steps depend on by a step in between, which Inductor computes in both loops.
        """
        numbers = [i for i, _ in self.stored]
        readers = {i: self._read_in_a_loop_after(i) for i, dtype in self.stored
                   if dtype == self.dtype and dtype.itemsize == 2 and numbers.count(i) == 1}  # fmt: skip
        steps: list[Step] = []
        places: dict[str, str] = {}  # what a result is called in the new steps: by those that come later, and by others
        for i, step in enumerate(self.steps):
            late = {f"s{j}": places[f"s{j} again"] for j, found in readers.items() if i in found}
            steps.append(step.renamed(places | late))
            places[f"s{i}"] = f"s{len(steps) - 1}"
            if readers.get(i):
                places[f"s{i} again"] = f"s{len(steps)}"
                steps.append(Step(str(self.dtype).removeprefix("torch."), (places[f"s{i}"],)))
        return Prologue(tuple(steps), self.dtype, tuple((int(places[f"s{i}"][1:]), dtype) for i, dtype in self.stored))

    def _read_in_a_loop_after(self, number: int) -> set[int]:
        """Numbers of the steps that read what Inductor stores in its first loop over rows, in another loop.

        None where a step of the first loop that depends on it is also read in another.
        """
        if self.levels[number] or self.step_kinds[number] != "aux":
            return set()
        first = {number}
        for i, step in enumerate(self.steps):
            if not self.levels[i] and any(f"s{j}" in step.arguments for j in first):
                first.add(i)
        late = {j: {i for i, step in enumerate(self.steps)
                    if self.levels[i] and step.operation not in REDUCTIONS and f"s{j}" in step.arguments}
                for j in first}  # fmt: skip
        return set() if any(late[j] for j in first - {number}) else late[number]

    def shape_of(self, number: int, shape: Sequence) -> tuple:
        """The shape of an operand of a result of that shape [..., M, N], as broadcasting has it."""
        return _shape(self.kinds[number], shape)

    def stored_shapes(self, shape: Sequence) -> list[tuple]:
        """The shapes of what is stored of a result of that shape."""
        return [_shape(self.step_kinds[number], shape) for number, _ in self.stored]


def _shape(kind: str, shape: Sequence) -> tuple:
    return tuple(shape) if kind == "aux" else (shape[-1],) if kind == "row" else (*shape[:-1], 1)


def _stored(text: str) -> tuple[int, torch.dtype]:
    match = re.fullmatch(r"s(\d+) (bfloat16|float16|float32)", text)
    if match is None:
        raise ValueError(f"stored: expected a step and a floating-point dtype, as 's3 bfloat16', got {text!r}")
    return int(match[1]), getattr(torch, match[2])


def together(prologues: Sequence[Prologue], numbers: Sequence[Sequence[int]]) -> tuple[Prologue, list[list[int]]]:
    """(a prologue with the results of several, which have one each, what the number of each step of each is in it).

    numbers: what the number of each operand of each is in it.
    """
    steps: dict[Step, int] = {}
    places = []
    for prologue, operands in zip(prologues, numbers, strict=True):
        names = {f"{kind}{i}": f"{kind}{operands[i]}" for i, kind in prologue.kinds.items()}
        for i, step in enumerate(prologue.steps):
            renamed = Step(step.operation, tuple(names[x] if isinstance(x, str) else x for x in step.arguments))
            names[f"s{i}"] = f"s{steps.setdefault(renamed, len(steps))}"
        places.append([int(names[f"s{i}"][1:]) for i in range(len(prologue.steps))])
    stored = {(own[i], dtype): None for each, own in zip(prologues, places, strict=True) for i, dtype in each.stored}
    results = tuple(own[-1] for own in places)
    return Prologue(tuple(steps), prologues[0].dtype, tuple(stored), results), places


def apply(prologue: Prologue, operands: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The reference: all steps in float32; the results rounded to `prologue.dtype`, and what is stored besides.

    operands: aux0 [..., M, N], and others of as many elements as `Prologue.shape_of` says.
    """
    shape = operands[0].shape
    values = {
        f"{kind}{i}": operands[i].reshape(prologue.shape_of(i, shape)).float() for i, kind in prologue.kinds.items()
    }
    results = evaluate(prologue.steps, values)
    stored = [
        results[number].to(dtype, copy=True, memory_format=torch.contiguous_format) for number, dtype in prologue.stored
    ]
    return [results[number].to(prologue.dtype).broadcast_to(shape) for number in prologue.results], stored
