"""The prologue of a quantiser as data: the pointwise operations whose result is quantised.

A `Prologue` is a list of steps (`formats.steps`). Their tensors are operands, by their numbers: `aux0` has an element
for each element of the result, `row1` one for each column, `col2` one for each row. The first operand is `aux0`, and
the result has its shape. The op `quantize` carries the steps as strings.

A step may reduce rows ("mean s0"): its result, and the result of a step that reads only such results, has one element
for each row. `Prologue.after_statistics` separates these statistics from the steps that follow.

The kernel also stores results of steps that other nodes of the graph read, each rounded to its own dtype. Later steps
use the unrounded result, as in a kernel of Inductor that computes all of them.

`apply` is the reference. `templates.device.apply_prologue` computes the same steps in kernels.
"""

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fp4compile.formats.steps import REDUCTIONS, Step, evaluate, operand_kinds, parse, with_silu

# Tensors that a prologue reads, at most: each is an argument of every launch of the kernels, and takes registers if it
# has the result's size.
OPERANDS = 6
# Results of steps that a prologue stores, at most: each is also an argument of every launch.
STORED = 3
KINDS = "aux|row|col"


@dataclass(frozen=True)
class Prologue:
    """The steps before a quantiser, in order; the result of the last one is quantised.

    dtype: the dtype to which that result is rounded first, as if it had been stored.
    stored: (number of a step, dtype) of each result that is stored, rounded to the dtype. Such a result has the shape
        of the last one, or one element for each row.
    """

    steps: tuple[Step, ...]
    dtype: torch.dtype
    stored: tuple[tuple[int, torch.dtype], ...] = ()

    @classmethod
    def parse(cls, steps: Sequence[str], dtype: torch.dtype, stored: Sequence[str] = ()) -> "Prologue":
        """Read a prologue from the strings that the op carries. Raises ValueError for invalid strings."""
        parsed = parse(steps, "prologue", rf"(?:{KINDS})\d+", reducing=True)
        found = cls(parsed, dtype, tuple(map(_stored, stored)))
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
        return found

    def strings(self) -> list[str]:
        """The steps as the op carries them; `parse` reads them."""
        return list(map(str, self.steps))

    def stored_strings(self) -> list[str]:
        """`stored` as the op carries it: "s3 bfloat16"."""
        return [f"s{number} {str(dtype).removeprefix('torch.')}" for number, dtype in self.stored]

    @property
    def result(self) -> tuple[int, torch.dtype]:
        """The quantised result in the form of an entry of `stored`: its step's number, and its dtype."""
        return len(self.steps) - 1, self.dtype

    @property
    def stores_result(self) -> bool:
        """Whether the kernel also stores the result before quantisation, so that a later kernel can read it."""
        return self.result in self.stored

    @cached_property
    def kinds(self) -> dict[int, str]:
        """The kind of each operand, by its number: "aux", "row" or "col"."""
        return operand_kinds(self.steps, KINDS)

    @cached_property
    def step_kinds(self) -> list[str]:
        """The kind of each step's result: "aux", "row" or "col", as in `kinds`."""
        found: list[str] = []
        for step in self.steps:
            kinds = {self.kind_of(name, found) for name in step.arguments if isinstance(name, str)}
            found.append("col" if step.operation in REDUCTIONS else kinds.pop() if len(kinds) == 1 else "aux")
        return found

    @staticmethod
    def kind_of(name: str, step_kinds: Sequence[str]) -> str:
        """The kind of the step or operand of this name."""
        return step_kinds[int(name[1:])] if name[0] == "s" else name.rstrip("0123456789")

    @cached_property
    def reductions(self) -> tuple[int, ...]:
        """Numbers of the steps that reduce rows."""
        return tuple(i for i, step in enumerate(self.steps) if step.operation in REDUCTIONS)

    @cached_property
    def levels(self) -> list[int]:
        """For each step, the length of the longest chain of reductions up to its result, itself included."""
        found: list[int] = []
        for step in self.steps:
            below = max((found[int(x[1:])] for x in step.arguments if isinstance(x, str) and x[0] == "s"), default=0)
            found.append(below + (step.operation in REDUCTIONS))
        return found

    def needed(
        self, roots: Iterable[int], among: Container[str] = KINDS.split("|"), given: Container[int] = ()
    ) -> list[int]:
        """Numbers of the steps that `roots` depend on, roots included, in order.

        among: the kinds of steps to return and to follow. given: steps that are computed already, neither returned nor
        followed.
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
        """Numbers of the steps with one result per row that steps of `_after` read."""
        names = {x for i in self._after for x in self.steps[i].arguments if isinstance(x, str) and x[0] == "s"}
        return tuple(sorted(i for i in map(int, (name[1:] for name in names)) if self.step_kinds[i] == "col"))

    @cached_property
    def _after(self) -> list[int]:
        """Numbers of the steps that are computed after the statistics."""
        whole = [i for i, _ in self.stored if self.step_kinds[i] == "aux"]
        return self.needed([len(self.steps) - 1, *whole], ("aux", "row"))

    def shortened(self) -> "Prologue":
        """The prologue with `formats.steps.with_silu` applied, for printing and counting its steps."""
        return replace(self, steps=with_silu(self.steps))

    @property
    def computed(self) -> list[int]:
        """Numbers of the steps that the quantised result and the stored results depend on."""
        return self.needed((len(self.steps) - 1, *(number for number, _ in self.stored)))

    def after_statistics(self, stored: bool = False) -> tuple["Prologue", tuple[int, ...]]:
        """The prologue that follows the statistics, and the numbers of the operands that it still reads.

        The operands of the new prologue are the operands of these numbers, in order, then the statistics. It stores the
        results that have the shape of the last one.
        stored: whether those results are in memory already. A step that rounds a result as it was stored then becomes
        an operand, before the others. Its number is the count of this prologue's operands plus its position in
        `stored`.
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
        """The number of each step that rounds a result as it is stored -> the result's position in `stored`."""
        places = {f"{str(dtype).removeprefix('torch.')} s{i}": place for place, (i, dtype) in enumerate(self.stored)}
        return {i: places[str(step)] for i, step in enumerate(self.steps) if str(step) in places}

    def as_walked(self) -> "Prologue":
        """Add a rounding step where Inductor's later loop over rows reads a result that its first loop has stored.

        Reductions read the unrounded result, in the loop that stores it; steps after them read the stored one. No step
        is added for a result that is stored in another dtype than `dtype` or in several dtypes, nor where both a
        reduction and later steps depend on the result through a step in between: Inductor computes that step in both
        loops.
        """
        numbers = [i for i, _ in self.stored]
        readers = {i: self._read_in_a_loop_after(i) for i, dtype in self.stored
                   if dtype == self.dtype and dtype.itemsize == 2 and numbers.count(i) == 1}  # fmt: skip
        steps: list[Step] = []
        places: dict[str, str] = {}  # name of a result in the new steps; with " again": name of the rounded result
        for i, step in enumerate(self.steps):
            late = {f"s{j}": places[f"s{j} again"] for j, found in readers.items() if i in found}
            steps.append(step.renamed(places | late))
            places[f"s{i}"] = f"s{len(steps) - 1}"
            if readers.get(i):
                places[f"s{i} again"] = f"s{len(steps)}"
                steps.append(Step(str(self.dtype).removeprefix("torch."), (places[f"s{i}"],)))
        return Prologue(tuple(steps), self.dtype, tuple((int(places[f"s{i}"][1:]), dtype) for i, dtype in self.stored))

    def _read_in_a_loop_after(self, number: int) -> set[int]:
        """Numbers of the steps that read the result of step `number` in a later loop than Inductor's first over rows.

        Empty where a later loop also reads another step of the first loop that depends on this result.
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
        """The shape of operand `number` where the result has `shape` [..., M, N]; it broadcasts to `shape`."""
        return _shape(self.kinds[number], shape)

    def empty_stored(self, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Uninitialised tensors for the stored results. first: the first operand."""
        return tuple(first.new_empty(_shape(self.step_kinds[number], first.shape), dtype=dtype)
                     for number, dtype in self.stored)  # fmt: skip


def _shape(kind: str, shape: Sequence) -> tuple:
    return tuple(shape) if kind == "aux" else (shape[-1],) if kind == "row" else (*shape[:-1], 1)


def _stored(text: str) -> tuple[int, torch.dtype]:
    match = re.fullmatch(r"s(\d+) (bfloat16|float16|float32)", text)
    if match is None:
        raise ValueError(f"stored: expected a step and a floating-point dtype, as 's3 bfloat16', got {text!r}")
    return int(match[1]), getattr(torch, match[2])


def apply(prologue: Prologue, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The reference: compute all steps in float32; return the result rounded to `prologue.dtype`, and stored results.

    operands: aux0 [..., M, N], and others of as many elements as `Prologue.shape_of` returns.
    """
    shape = operands[0].shape
    values = {
        f"{kind}{i}": operands[i].reshape(prologue.shape_of(i, shape)).float() for i, kind in prologue.kinds.items()
    }
    results = evaluate(prologue.steps, values)
    stored = [
        results[number].to(dtype, copy=True, memory_format=torch.contiguous_format) for number, dtype in prologue.stored
    ]
    return results[-1].to(prologue.dtype).broadcast_to(shape), stored
