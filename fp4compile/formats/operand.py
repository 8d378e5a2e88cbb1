"""A product's operands and its other arguments, as the ops pass them to the reference and the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.quantize_spec import QuantizeSpec


@dataclass(frozen=True, eq=False)  # tensors have no truth value: comparing fields would raise
class Operand:
    """A matrix with the contraction dimension last: A is [..., M, K], B is [..., N, K].

    data: codes of `format`; bfloat16, float16 or float32 values where the format is None (a plain operand).
    scales: block scales, linear or swizzled (see `layouts`); None where the format has none.
    outer: float32 decode factor, [] or [..., rows, 1]; None means 1. A plain operand can have one as well. B of two
        matrices, one below the other, may have one for each, [2].
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    format: BlockFormat | None = None

    @property
    def k(self) -> Any:
        """Elements of a row, with the padding of its last block; may be symbolic."""
        width = self.data.shape[-1]
        return 2 * width if self.format is not None and self.format.packed else width

    @property
    def in_schema(self) -> tuple:
        """The four arguments by which ops take the operand."""
        return self.data, self.scales, self.outer, None if self.format is None else self.format.name

    @property
    def scaled(self) -> bool:
        """Whether the format has block scales."""
        return self.format is not None and self.format.scale is not None

    @property
    def swizzled(self) -> bool:
        """Whether the block scales are swizzled: then they are one flat run for each matrix."""
        return self.scaled and self.scales is not None and self.scales.dim() == self.data.dim() - 1


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a product op is called with.

    bias: [N]. epilogue: what follows the product; auxiliaries: the tensors that its pointwise steps read.
    offs, rows: in a grouped product, where the groups end and how many rows there are (see `groups`); rows None stands
        for the rows of A, which the groups are then.
    result_outer: the static outer scale of a result that the epilogue quantises, float32 []; None where the result's
        format has no outer scale.
    fast_accumulation: whether FP8 matrix units may keep the sums in fewer bits than float32 has.
    """

    a: Operand
    b: Operand
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    epilogue: Epilogue | None = None
    auxiliaries: Sequence[torch.Tensor] = ()
    result_outer: torch.Tensor | None = None
    offs: torch.Tensor | None = None
    rows: Any = None
    fast_accumulation: bool = False

    @property
    def plain(self) -> bool:
        """Whether torch computes the product: neither operand is quantised, and there are no groups."""
        return self.a.format is None and self.b.format is None and self.offs is None

    @property
    def two_weights(self) -> bool:
        """Whether an epilogue of two products has a matrix of B for each product and group: [2 G, N, K].

        The matrices of the first product come first. Else B has the rows of both, [G, 2 N, K] or [2 N, K].
        """
        if self.epilogue is None or not self.epilogue.pair or self.offs is None:
            return False
        return bool(self.b.data.shape[0] == 2 * self.offs.shape[0])

    @property
    def result_spec(self) -> QuantizeSpec | None:
        """How the result is quantised, group by group where there are groups; None where it is not."""
        spec = None if self.epilogue is None else self.epilogue.quantize
        return spec if spec is None or self.offs is None else replace(spec, ragged=True)
