"""A matmul's operands and other arguments, as ops pass them to the reference and the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.product_spec import OperandSpec, ProductSpec, formats_of, parse
from fp4compile.formats.quantize_spec import QuantizeSpec


@dataclass(frozen=True, eq=False)  # tensors have no truth value: comparing fields would raise
class Operand:
    """A matrix with the contraction dimension last: A is [..., M, K], B is [..., N, K].

    data: codes of `format`; bfloat16, float16 or float32 values where the format is None (a plain operand).
    scales: block scales, linear or swizzled (see `layouts`); None where the format has none.
    outer: float32 global scale [] or row scales [..., rows, 1], which decode; None means 1. A plain operand can have
        them as well. B of two stacked matrices may have a global scale for each, [2].
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    outer: torch.Tensor | None = None
    format: BlockFormat | None = None

    @property
    def k(self) -> Any:
        """The number of elements of a row, including the padding of its last block; may be symbolic."""
        width = self.data.shape[-1]
        return 2 * width if self.format is not None and self.format.packed else width

    @property
    def tensors(self) -> tuple:
        """The operand's three arguments of an op: data, scales and outer."""
        return self.data, self.scales, self.outer

    @property
    def spec(self) -> OperandSpec:
        """The operand without its sizes; the tensors may be fake."""
        return OperandSpec(self.format, *_kind(*self.tensors))

    @property
    def scaled(self) -> bool:
        """Whether the format has block scales."""
        return self.format is not None and self.format.scale is not None

    @property
    def swizzled(self) -> bool:
        """Whether the block scales are swizzled, as one flat run of bytes for each matrix."""
        return self.scaled and self.scales is not None and self.scales.dim() == self.data.dim() - 1


def _kind(data: torch.Tensor, scales: torch.Tensor | None, outer: torch.Tensor | None) -> tuple:
    """The fields dtype, swizzled and outer of an `OperandSpec`."""
    swizzled = scales is not None and scales.dim() == data.dim() - 1
    return data.dtype, swizzled, "none" if outer is None else {0: "tensor", 1: "group"}.get(outer.dim(), "row")


def _layout(x: torch.Tensor) -> tuple:
    return x.shape, x.stride(), x.dtype, x.storage_offset(), x.untyped_storage().nbytes(), x.device


def taken(b: Operand, index: torch.Tensor) -> Operand:
    """A copy of the matrices b[index] of B [E, N, K], for an int index [S]."""

    def each(x: torch.Tensor) -> torch.Tensor:
        return as_integers(x)[index].view(x.dtype) if x.dim() else x

    scales, outer = (None if x is None else each(x) for x in (b.scales, b.outer))
    return Operand(each(b.data), scales, outer, b.format)


@dataclass(frozen=True, eq=False)
class Arguments:
    """A matmul with its tensors.

    bias: [N]. auxiliaries: the tensors that the steps of the epilogue read.
    result_outer: the static global scale of a result that the epilogue quantises, float32 []; None where the result's
        format has no global scale.
    offs, rows: with ragged groups, the ends of the groups and the number of rows (`formats.grouping`); rows None stands
        for the number of rows of A.
    index: int [S], with gathered matrices: A [S, M, K] is multiplied by b[index], where B is [E, N, K].
    """

    spec: ProductSpec
    a: Operand
    b: Operand
    bias: torch.Tensor | None = None
    auxiliaries: Sequence[torch.Tensor] = ()
    result_outer: torch.Tensor | None = None
    offs: torch.Tensor | None = None
    rows: Any = None
    index: torch.Tensor | None = None

    @classmethod
    def of(
        cls, a: Operand, b: Operand, bias: torch.Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
        epilogue: Epilogue | None = None, auxiliaries: Sequence[torch.Tensor] = (),
        result_outer: torch.Tensor | None = None, offs: torch.Tensor | None = None, rows: Any = None, *,
        index: torch.Tensor | None = None, fast_accumulation: bool = False,
    ) -> "Arguments":  # fmt: skip
        """The matmul of two operands; its grouping follows from the tensors. Raises the errors of `ProductSpec`."""
        if offs is not None:
            grouping = Grouping.RAGGED_ROWS if b.data.dim() == 3 else Grouping.RAGGED_CONTRACTION
        elif index is not None:
            grouping = Grouping.GATHERED
        else:
            grouping = Grouping.BATCHED if b.data.dim() > 2 else Grouping.DENSE
        spec = ProductSpec(a.spec, b.spec, out_dtype, grouping, epilogue, None if bias is None else bias.dtype,
                           fast_accumulation)  # fmt: skip
        return cls(spec, a, b, bias, auxiliaries, result_outer, offs, rows, index)

    @classmethod
    def of_call(
        cls, a: torch.Tensor, a_scales: torch.Tensor | None, a_outer: torch.Tensor | None,
        b: torch.Tensor, b_scales: torch.Tensor | None, b_outer: torch.Tensor | None, spec: str, *,
        bias: torch.Tensor | None = None, operands: Sequence[torch.Tensor] | None = None,
        outer: torch.Tensor | None = None, offs: torch.Tensor | None = None, rows: Any = None,
        index: torch.Tensor | None = None,
    ) -> "Arguments":  # fmt: skip
        """The matmul of an op's arguments: its tensors, and `str(spec)`.

        Raises ValueError for a text that is no spec, and if offsets or an index are missing or superfluous.
        """
        left, right = formats_of(spec)
        found = parse(spec, _kind(a, a_scales, a_outer), _kind(b, b_scales, b_outer), b.dim() > 2,
                      None if bias is None else bias.dtype)  # fmt: skip
        ragged = found.grouping in (Grouping.RAGGED_ROWS, Grouping.RAGGED_CONTRACTION)
        for name, given, wanted in (("offs", offs, ragged), ("index", index, found.grouping is Grouping.GATHERED)):
            if (given is not None) != wanted:
                raise ValueError(f"{name}: a product of spec {spec!r} {'needs' if wanted else 'takes no'} {name}")
        return cls(found, Operand(a, a_scales, a_outer, left), Operand(b, b_scales, b_outer, right), bias,
                   operands or (), outer, offs, rows, index)  # fmt: skip

    @property
    def call(self) -> tuple[tuple, dict[str, Any]]:
        """The positional arguments and the given keyword arguments of an op that computes the matmul."""
        named = {"bias": self.bias, "operands": list(self.auxiliaries) or None, "outer": self.result_outer,
                 "offs": self.offs, "rows": self.rows, "index": self.index}  # fmt: skip
        given = {name: value for name, value in named.items() if value is not None}
        return (*self.a.tensors, *self.b.tensors, str(self.spec)), given

    @property
    def layout(self) -> tuple:
        """What checks and the choice of a kernel depend on: the spec, and all of each tensor but its elements.

        Hashable where no size is symbolic.
        """
        tensors = (*self.a.tensors, *self.b.tensors, self.bias, self.result_outer, self.offs, self.index,
                   *self.auxiliaries)  # fmt: skip
        return self.spec, self.rows, *[None if x is None else _layout(x) for x in tensors]

    def but(self, **changes: Any) -> "Arguments":
        """The matmul with some arguments of `of` replaced: tensors, dtype or epilogue."""
        spec = self.spec
        fields = {"a": self.a, "b": self.b, "bias": self.bias, "out_dtype": spec.out_dtype, "epilogue": spec.epilogue,
                  "auxiliaries": self.auxiliaries, "result_outer": self.result_outer, "offs": self.offs,
                  "rows": self.rows, "index": self.index, "fast_accumulation": spec.fast_accumulation}  # fmt: skip
        return Arguments.of(**fields | changes)

    @property
    def two_weights(self) -> bool:
        """Whether B of an epilogue of two matmuls has a matrix for each matmul and group, [2 G, N, K].

        The matrices of the first matmul come first. Else B has the rows of both, [G, 2 N, K] or [2 N, K].
        """
        if not self.spec.pair or self.offs is None:
            return False
        return bool(self.b.data.shape[0] == 2 * self.offs.shape[0])

    @property
    def result_spec(self) -> QuantizeSpec | None:
        """The spec by which the result is quantised, group by group with ragged groups; None for a stored result."""
        spec = None if self.spec.epilogue is None else self.spec.epilogue.quantize
        return spec if spec is None or self.offs is None else replace(spec, grouping=Grouping.RAGGED_ROWS)
