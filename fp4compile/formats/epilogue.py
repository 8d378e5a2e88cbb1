"""The epilogue of a product as data: the pointwise operations between the product and what is stored.

An `Epilogue` is a list of steps (`formats.steps`). Their tensors are the product and auxiliary tensors (`aux0`: an
element for each element of the product; `row1`: an element for each column). The op `scaled_mm` carries the steps as
strings.

`apply` is the reference. `templates.device.epilogue` computes the same steps in kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp4compile.formats.steps import Step, evaluate, operand_kinds, parse

# Tensors that an epilogue reads, at most: each is an argument of every launch of the kernels, and takes registers.
AUXILIARIES = 2
PRODUCT = "product"


@dataclass(frozen=True)
class Epilogue:
    """The steps after a product, in order; the result of the last one is stored.

    product_dtype: what the product is rounded to before the first step, as if it had been stored.
    dtype: the dtype of the result.
    """

    steps: tuple[Step, ...]
    product_dtype: torch.dtype
    dtype: torch.dtype

    @classmethod
    def parse(cls, steps: Sequence[str], product_dtype: torch.dtype, dtype: torch.dtype) -> "Epilogue":
        """Read an epilogue from the strings that the op carries. Raises ValueError for a string that is no step."""
        return cls(parse(steps, "epilogue", r"product|(?:aux|row)\d+"), product_dtype, dtype)

    def strings(self) -> list[str]:
        """The steps as the op carries them; `parse` reads them."""
        return list(map(str, self.steps))

    @cached_property
    def kinds(self) -> dict[int, str]:
        """How each auxiliary tensor is read, by its number: "aux" or "row"."""
        return operand_kinds(self.steps, "aux|row")


def apply(product: torch.Tensor, epilogue: Epilogue, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference: the steps on a product [..., M, N] in float32, rounded to `epilogue.dtype` at the end.

    operands: the auxiliary tensors, of the product's size ("aux") or of N elements ("row").
    """
    values: dict[str, torch.Tensor] = {PRODUCT: product.to(epilogue.product_dtype).float()}
    for i, kind in epilogue.kinds.items():
        shape = product.shape if kind == "aux" else product.shape[-1:]
        values[f"{kind}{i}"] = operands[i].reshape(shape).float()
    result = evaluate(epilogue.steps, values)[-1] if epilogue.steps else values[PRODUCT]
    return result.to(epilogue.dtype)
