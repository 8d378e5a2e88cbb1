"""The epilogue of a product as data: the pointwise operations between the product and what is stored.

An `Epilogue` is a list of steps. A step names an operation and its arguments: the product, the result of an earlier
step, an auxiliary tensor (`aux0`: an element for each element of the product; `row1`: an element for each column), or
a number. The op `scaled_mm_epilogue` carries the steps as strings, one a step: "mul s0 aux0".

`apply` is the reference. `templates.device.epilogue` prints the same steps as a Triton device function.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

# Tensors that an epilogue reads, at most: each is an argument of every launch of the kernels, and takes registers.
AUXILIARIES = 2
PRODUCT = "product"
# An argument: the product, s<i> for the result of step i, aux<i> or row<i> for auxiliary tensor i, or a number.
Argument = str | float
_NAME = re.compile(r"product|(?:s|aux|row)\d+")

# Every operation, on float32 tensors. `templates.device.epilogue` has the same names.
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
}
_ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2}  # all others take one argument


@dataclass(frozen=True)
class Step:
    """One operation of an epilogue; see the module's docstring for its arguments."""

    operation: str
    arguments: tuple[Argument, ...]

    def __str__(self) -> str:
        return " ".join((self.operation, *map(str, self.arguments)))


@dataclass(frozen=True)
class Epilogue:
    """The steps after a product, in order; the result of the last one is stored.

    product_dtype: what the product is rounded to before the first step, as if it had been stored.
    dtype: of the result.
    """

    steps: tuple[Step, ...]
    product_dtype: torch.dtype
    dtype: torch.dtype

    @classmethod
    def parse(cls, steps: Sequence[str], product_dtype: torch.dtype, dtype: torch.dtype) -> "Epilogue":
        """The epilogue of the strings that the op carries. Raises ValueError for a step that is none."""
        return cls(_parsed(tuple(steps)), product_dtype, dtype)

    def strings(self) -> list[str]:
        """The steps as the op carries them; `parse` reads them."""
        return list(map(str, self.steps))

    @cached_property
    def kinds(self) -> dict[int, str]:
        """How each auxiliary tensor is read, by its number: "aux" or "row"."""
        names = (name for step in self.steps for name in step.arguments if isinstance(name, str))
        found = (re.fullmatch(r"(aux|row)(\d+)", name) for name in names)
        return {int(match[2]): match[1] for match in found if match is not None}


@cache
def _parsed(steps: tuple[str, ...]) -> tuple[Step, ...]:
    return tuple(_parse(step, place) for place, step in enumerate(steps))


def _parse(text: str, place: int) -> Step:
    operation, *words = text.split()
    arguments = tuple(word if _NAME.fullmatch(word) else _number(text, word) for word in words)
    if operation not in OPERATIONS or len(arguments) != _ARITY.get(operation, 1):
        raise ValueError(f"epilogue step {text!r}: no such operation of {len(arguments)} arguments")
    later = [name for name in arguments if isinstance(name, str) and name[0] == "s" and int(name[1:]) >= place]
    if later:
        raise ValueError(f"epilogue step {text!r}: {later[0]} is no earlier step")
    return Step(operation, arguments)


def _number(step: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"epilogue step {step!r}: {word!r} is neither a name nor a number") from None


def apply(product: torch.Tensor, epilogue: Epilogue, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference: the steps on a product [..., M, N] in float32, rounded to `epilogue.dtype` at the end.

    operands: the auxiliary tensors, of the product's size ("aux") or of N elements ("row").
    """
    values: dict[str, torch.Tensor] = {PRODUCT: product.to(epilogue.product_dtype).float()}
    for i, kind in epilogue.kinds.items():
        shape = product.shape if kind == "aux" else product.shape[-1:]
        values[f"{kind}{i}"] = operands[i].reshape(shape).float()
    result = values[PRODUCT]
    for i, step in enumerate(epilogue.steps):
        arguments = [values[name] if isinstance(name, str) else name for name in step.arguments]
        if step.operation in _ARITY:  # two numbers never meet: one argument is a tensor
            arguments = [torch.as_tensor(x, dtype=torch.float32, device=product.device) for x in arguments]
        result = values[f"s{i}"] = OPERATIONS[step.operation](*arguments)
    return result.to(epilogue.dtype)
