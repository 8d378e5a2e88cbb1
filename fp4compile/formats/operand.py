"""One operand of a product, as the ops, the reference and the kernels hand it on."""

from dataclasses import dataclass

import torch

from fp4compile.formats.formats import BlockFormat


@dataclass(frozen=True, eq=False)  # tensors have no truth value: comparing fields would raise
class Operand:
    """A matrix with the contraction dimension last: A is [..., M, K], B is [..., N, K].

    data: codes of `format`; bfloat16, float16 or float32 values where the format is None (a plain operand).
    scales: block scales, linear or swizzled (see `layouts`); None where the format has none.
    outer: float32 decode factor, [] or [..., rows, 1]; None means 1. A plain operand can have one as well.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    format: BlockFormat | None = None
