"""Pointwise operations as data: the steps of an `epilogue.Epilogue` and of a `prologue.Prologue`.

A step names an operation and its arguments: the result of an earlier step (`s0`), a tensor by a name that the epilogue
or prologue defines (`aux0`, `row1`), or a number. Ops carry each step as a string: "mul s0 aux0".

`evaluate` is the reference. `templates.device.pointwise` computes the same steps in kernels.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

Argument = str | float

# Pointwise operations on float32 tensors. `templates.device.pointwise` has the same names.
OPERATIONS: dict[str, Callable] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
    "relu": torch.relu,
    "square": lambda x: x * x,
    "cube": lambda x: x * x * x,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "rsqrt": torch.rsqrt,
    "bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "float16": lambda x: x.half().to(x.dtype),
}
# Operations that round to the dtype of their name.
ROUNDINGS = ("bfloat16", "float16")
_ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "variance": 2}  # all others take one argument


@dataclass(frozen=True)
class Step:
    """An operation on earlier results ("s0"), named tensors ("aux0") and numbers."""

    operation: str
    arguments: tuple[Argument, ...]

    def __str__(self) -> str:
        return " ".join((self.operation, *map(str, self.arguments)))

    def renamed(self, names: Mapping[str, str]) -> "Step":
        """The step with its arguments renamed; names: old name -> new name."""
        return Step(self.operation, tuple(names.get(x, x) if isinstance(x, str) else x for x in self.arguments))


# Reductions of rows of float32 tensors, [..., 1]. The second argument of "variance" is the mean of each row.
REDUCTIONS: dict[str, Callable] = {
    "sum": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "variance": lambda x, mean: (x - mean).square().mean(-1, keepdim=True),
    "amax": lambda x: x.amax(-1, keepdim=True),
}


def parse(steps: Sequence[str], whose: str, names: str, *, reducing: bool = False) -> tuple[Step, ...]:
    """Read the steps from the strings that an op carries.

    whose: "epilogue" or "prologue", for messages. names: a regular expression for the names of tensors.
    reducing: whether `REDUCTIONS` are allowed. Raises ValueError for a string that is no step.
    """
    return _parsed(tuple(steps), whose, names, reducing)


@cache
def _parsed(steps: tuple[str, ...], whose: str, names: str, reducing: bool) -> tuple[Step, ...]:
    name = re.compile(rf"s\d+|{names}")
    allowed = (*OPERATIONS, *REDUCTIONS) if reducing else (*OPERATIONS,)
    return tuple(_parse(step, place, f"{whose} step {step!r}", name, allowed) for place, step in enumerate(steps))


def _parse(text: str, place: int, which: str, name: re.Pattern, allowed: Collection[str]) -> Step:
    operation, *words = text.split()
    arguments = tuple(word if name.fullmatch(word) else _number(which, word) for word in words)
    if operation not in allowed or len(arguments) != _ARITY.get(operation, 1):
        raise ValueError(f"{which}: no such operation of {len(arguments)} arguments")
    later = [arg for arg in arguments if isinstance(arg, str) and arg[0] == "s" and int(arg[1:]) >= place]
    if later:
        raise ValueError(f"{which}: {later[0]} is no earlier step")
    return Step(operation, arguments)


def _number(which: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{which}: {word!r} is neither a name nor a number") from None


def operand_kinds(steps: Sequence[Step], kinds: str) -> dict[int, str]:
    """The kind of each tensor, by its number: `row1` adds the entry 1: "row". kinds: "aux|row", for example."""
    names = (name for step in steps for name in step.arguments if isinstance(name, str))
    found = (re.fullmatch(rf"({kinds})(\d+)", name) for name in names)
    return {int(match[2]): match[1] for match in found if match is not None}


def with_silu(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Replace each division in x / (1 + exp(-x)) by the step "silu x"; steps keep their numbers, and some are unused.

    For printing and counting steps only: no op carries "silu", and `evaluate` has no such operation.
    """
    return tuple(Step("silu", step.arguments[:1]) if _ends_silu(steps, step) else step for step in steps)


def _ends_silu(steps: Sequence[Step], step: Step) -> bool:
    """Whether a step is the division in x / (1 + exp(-x))."""

    def result_of(argument: Argument) -> Step | None:
        return steps[int(argument[1:])] if isinstance(argument, str) and argument[0] == "s" else None

    total = result_of(step.arguments[1]) if step.operation == "div" else None
    if total is None or total.operation != "add" or 1.0 not in total.arguments:
        return False
    powers = [found for term in total.arguments if (found := result_of(term)) and found.operation == "exp"]
    return bool(powers) and result_of(powers[0].arguments[0]) == Step("neg", step.arguments[:1])


def evaluate(steps: Sequence[Step], tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The reference: the results of the steps (at least one), in float32. tensors: float32 tensors by their names."""
    values = dict(tensors)
    device = next(iter(values.values())).device
    for i, step in enumerate(steps):
        arguments = [values[name] if isinstance(name, str) else name for name in step.arguments]
        if step.operation in _ARITY:  # two numbers never meet: one argument is a tensor
            arguments = [torch.as_tensor(x, dtype=torch.float32, device=device) for x in arguments]
        values[f"s{i}"] = (OPERATIONS | REDUCTIONS)[step.operation](*arguments)
    return [values[f"s{i}"] for i in range(len(steps))]
