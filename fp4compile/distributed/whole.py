"""`GatheredWeight`: a module's whole weight, as codes, between FSDP2's gather and its reshard.

In a graph it is one op, `gathered_weight`, whose matmuls the backend recognises. For any other reader, it is the
dequantised weight. Its gradient is a plain tensor of its dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fp4compile.distributed.codes import Direction
from fp4compile.ops.quantize import GATHERED_WEIGHT

aten = torch.ops.aten
# Operators by which FSDP2 and autograd derive another tensor object from a parameter, with the same codes.
_SAME = (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default)
NAMES = ("rows", "row_scales", "row_outer", "columns", "column_scales", "column_outer")


@dataclass(frozen=True)
class GatheredFormat:
    """The directions of a gathered weight's codes, and its dtype.

    recompute: whether the codes along the rows are also gathered for the backward pass.
    """

    rows: Direction
    columns: Direction
    dtype: torch.dtype
    recompute: bool

    def sent(self, wanted: tuple[Direction, ...]) -> tuple[Direction, ...]:
        """The directions that ranks send if matmuls read those in `wanted`.

        Codes of square blocks in one direction are made of those in the other one.
        """
        square = self.rows.format == self.columns.format and self.rows.block_format.square
        return wanted[:1] if square else wanted


class GatheredWeight(torch.Tensor):
    """A weight [N, K] as codes along its rows and along its columns; see `GatheredFormat`.

    without_rows: whether the last gather was only of the codes along the columns.
    """

    form: GatheredFormat
    without_rows: bool
    _rows: torch.Tensor
    row_scales: torch.Tensor | None
    row_outer: torch.Tensor | None
    columns: torch.Tensor
    column_scales: torch.Tensor | None
    column_outer: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, form: GatheredFormat, parts: dict[str, torch.Tensor], without_rows: bool = False
    ) -> "GatheredWeight":
        rows = parts["rows"]
        with torch.inference_mode(rows.is_inference()):  # a view is an inference tensor if its base is
            made = torch.Tensor._make_wrapper_subclass(
                cls, form.rows.size, dtype=form.dtype, device=rows.device, requires_grad=False
            )  # fmt: skip
        made.form, made.without_rows = form, without_rows
        made._rows = rows
        for name in NAMES[1:]:
            setattr(made, name, parts.get(name))
        return made

    @property
    def rows(self) -> torch.Tensor:
        """The codes along the rows. Raises RuntimeError if they were not gathered."""
        if self.without_rows:
            raise RuntimeError(
                "a forward matmul is computed again in the backward pass, as by activation checkpointing, for which "
                "the weight's codes are not gathered; call gather_quantized_(..., recompute=True)"
            )
        return self._rows

    def parts(self) -> dict[str, torch.Tensor]:
        """All tensors that hold codes and scales, by name."""
        found = {"rows": self._rows} | {name: getattr(self, name) for name in NAMES[1:]}
        return {name: part for name, part in found.items() if part is not None}

    def dequantised(self) -> torch.Tensor:
        """The dequantised values of the codes along the rows."""
        form = self.form
        return GATHERED_WEIGHT(
            self.rows, self.row_scales, self.row_outer, form.rows.format,
            self.columns, self.column_scales, self.column_outer, form.columns.format,
            form.rows.size[1], form.dtype, form.recompute,
        )  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], GatheredFormat]:
        return list(self.parts()), self.form

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], form: GatheredFormat, outer_size: Any, outer_stride: Any
    ) -> "GatheredWeight":
        return GatheredWeight(form, inner)

    def _stable_hash_for_caching(self) -> str:
        """The part of AOTAutograd's cache key besides the tensors."""
        return repr((self.form, self.device, self.requires_grad))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _SAME and isinstance(first, cls) and _same_shape(func, args):
            return cls(first.form, first.parts(), first.without_rows)
        if func is aten.zeros_like.default and isinstance(first, cls):
            return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=first.device)
        if func._schema.is_mutable and isinstance(first, cls):
            raise RuntimeError("weight: it was gathered as codes, to which nobody writes; write to its shards")
        args, kwargs = tree_map_only(cls, cls.dequantised, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        form = self.form
        formats = f"{form.rows.format}, {form.columns.format}"
        return f"GatheredWeight({formats}, size={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _same_shape(func: Any, args: tuple) -> bool:
    """Whether one of `_SAME` returns its argument's shape."""
    if len(args) < 2:
        return True
    same = list(args[1]) == list(args[0].shape)
    if func is aten.view.default:
        return same
    offset = args[3] if len(args) > 3 else 0
    return same and list(args[2]) == list(args[0].stride()) and not offset
