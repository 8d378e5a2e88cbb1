"""The epilogue of a matmul as data: the pointwise operations between the float32 sums and the store.

An `Epilogue` is a list of steps (`formats.steps`). Their tensors are `product`, the matmul's result, and auxiliary
tensors (`aux0`: an element for each element of the result; `row1`: an element for each column). A `ProductSpec` carries
the steps as strings. "quantize" and the name of a format may follow them: the kernel then stores codes and block scales
of the rows of the result, as the next matmul reads them. Or "amax" follows them: the kernel stores the result and finds
its largest magnitude, of which the dynamic global scale of the next matmul's operand is made. With either end, steps
may read `pair` as well: then B has two matrices, stacked; `product` is A times the first one, and `pair` A times the
second one.

`apply` is the reference. `templates.device.apply_epilogue` computes the same steps in kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.formats.steps import Step, evaluate, operand_kinds, parse

# Tensors that an epilogue reads, at most: each is an argument of every launch of the kernels, and takes registers.
AUXILIARIES = 2
PRODUCT, PAIR = "product", "pair"
QUANTIZE, AMAX = "quantize", "amax"
# The number of partial maxima of an amax, at most: one for each program, and there is a program for a multiprocessor.
PARTIAL_MAXIMA = 256


@dataclass(frozen=True)
class Epilogue:
    """The steps after a matmul, in order; the result of the last one is stored.

    product_dtype: the dtype to which the float32 sums are rounded before the first step, as if they had been stored.
    dtype: the dtype of the result.
    quantize: the spec by which the result, rounded to `dtype`, is quantised; None stores the rounded result.
    amax: whether the kernel also finds the largest magnitude of the rounded result.
    """

    steps: tuple[Step, ...]
    product_dtype: torch.dtype
    dtype: torch.dtype
    quantize: QuantizeSpec | None = None
    amax: bool = False

    @classmethod
    def parse(cls, steps: Sequence[str], product_dtype: torch.dtype, dtype: torch.dtype) -> "Epilogue":
        """Read an epilogue from the strings that the op carries.

        Raises ValueError for a string that is no step, and for a format that `serves_quantize` refuses.
        """
        spec, amax = None, list(steps[-1:]) == [AMAX]
        if amax:
            steps = steps[:-1]
        elif steps and steps[-1].startswith(QUANTIZE):
            *steps, last = steps
            spec = _spec(last)
        found = cls(parse(steps, "epilogue", r"product|pair|(?:aux|row)\d+"), product_dtype, dtype, spec, amax)
        if found.pair and spec is None and not amax:
            raise ValueError(f"epilogue: {PAIR!r} goes with a last step {QUANTIZE!r} or {AMAX!r}, got "
                             f"{found.strings()}")  # fmt: skip
        return found

    def strings(self) -> list[str]:
        """The steps and the end as strings; `parse` reads them."""
        return [*self.step_strings(), *filter(None, [self.end])]

    def step_strings(self) -> list[str]:
        """The pointwise steps as strings."""
        return [*map(str, self.steps)]

    @property
    def end(self) -> str | None:
        """The string that follows the steps: "amax", "quantize mxfp8" or None."""
        if self.quantize is not None:
            return f"{QUANTIZE} {self.quantize.format.name}"
        return AMAX if self.amax else None

    def ended(self, end: str) -> "Epilogue":
        """The epilogue with another end."""
        return Epilogue.parse([*self.step_strings(), end], self.product_dtype, self.dtype)

    @cached_property
    def pair(self) -> bool:
        """Whether the epilogue reads two matmuls."""
        return any(PAIR in step.arguments for step in self.steps)

    @cached_property
    def kinds(self) -> dict[int, str]:
        """The kind of each auxiliary tensor, by its number: "aux" or "row"."""
        return operand_kinds(self.steps, "aux|row")


def serves_quantize(fmt: BlockFormat) -> bool:
    """Whether an epilogue can quantise to a format: one-byte scales of blocks of a row, and no row scales."""
    return fmt.swizzles and not fmt.square and fmt.outer != "row"


def _spec(text: str) -> QuantizeSpec:
    """The spec of a last step such as "quantize mxfp8". A global scale, where the format has one, is static."""
    word, _, name = text.partition(" ")
    fmt = formats.get(name) if word == QUANTIZE else None
    if fmt is None or not serves_quantize(fmt):
        raise ValueError(f"epilogue step {text!r}: expected {QUANTIZE!r} and a format with scales of blocks in a row, "
                         "and without row scales")  # fmt: skip
    return QuantizeSpec(fmt, layout="swizzled", static=fmt.outer is not None)


def apply(product: torch.Tensor, epilogue: Epilogue, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference: compute the steps in float32 and round the last result to `epilogue.dtype`, [..., M, N].

    product: the result of the matmul, [..., M, N]; [..., M, 2 N] for an epilogue that reads `pair`.
    operands: the auxiliary tensors, of the result's size ("aux") or of N elements ("row"). The caller does what
    `quantize` and `amax` require.
    """
    values: dict[str, torch.Tensor] = {PRODUCT: product.to(epilogue.product_dtype).float()}
    if epilogue.pair:
        values[PRODUCT], values[PAIR] = values[PRODUCT].chunk(2, -1)
        product = values[PRODUCT]
    for i, kind in epilogue.kinds.items():
        shape = product.shape if kind == "aux" else product.shape[-1:]
        values[f"{kind}{i}"] = operands[i].reshape(shape).float()
    result = evaluate(epilogue.steps, values)[-1] if epilogue.steps else values[PRODUCT]
    return result.to(epilogue.dtype)
