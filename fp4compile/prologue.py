"""The prologue of a quantiser as data: the pointwise operations whose result is quantised.

A `Prologue` is a list of steps (`pointwise`). Their tensors are operands, by their numbers: `aux0` has an element for
each element of the result, `row1` one for each column, `col2` one for each row. The first operand is `aux0`, and the
result has its shape. The op `quantize_prologue` carries the steps as strings.

`apply` is the reference. `templates.device.prologue` prints the same steps as Triton device functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp4compile.pointwise import Step, evaluate, operand_kinds, parse

# Tensors that a prologue reads, at most: each is an argument of every launch of the kernels. Those of the result's size
# take registers.
OPERANDS = 5
KINDS = "aux|row|col"


@dataclass(frozen=True)
class Prologue:
    """The steps before a quantiser, in order; the result of the last one is quantised.

    dtype: what that result is rounded to first, as if it had been stored.
    """

    steps: tuple[Step, ...]
    dtype: torch.dtype

    @classmethod
    def parse(cls, steps: Sequence[str], dtype: torch.dtype) -> "Prologue":
        """The prologue of the strings that the op carries. Raises ValueError for what is none."""
        found = cls(parse(steps, "prologue", rf"(?:{KINDS})\d+"), dtype)
        if not found.steps or found.kinds.get(0) != "aux" or sorted(found.kinds) != list(range(len(found.kinds))):
            raise ValueError(
                f"prologue: expected steps that read aux0 and operands 1, 2, ... without a gap, got {steps}"
            )
        return found

    def strings(self) -> list[str]:
        """The steps as the op carries them; `parse` reads them."""
        return list(map(str, self.steps))

    @cached_property
    def kinds(self) -> dict[int, str]:
        """How each operand is read, by its number: "aux", "row" or "col"."""
        return operand_kinds(self.steps, KINDS)

    def shape_of(self, number: int, shape: Sequence) -> tuple:
        """The shape of an operand of a result of that shape [..., M, N], as broadcasting has it."""
        kind = self.kinds[number]
        return tuple(shape) if kind == "aux" else (shape[-1],) if kind == "row" else (*shape[:-1], 1)


def apply(prologue: Prologue, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference: the steps in float32, rounded to `prologue.dtype` at the end.

    operands: aux0 [..., M, N], and others of as many elements as `Prologue.shape_of` says.
    """
    shape = operands[0].shape
    values = {
        f"{kind}{i}": operands[i].reshape(prologue.shape_of(i, shape)).float() for i, kind in prologue.kinds.items()
    }
    return evaluate(prologue.steps, values).to(prologue.dtype).broadcast_to(shape)
