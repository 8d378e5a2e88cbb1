"""`GatheredWeight`: the whole weight that a module has between FSDP2's gather and its reshard, as codes.

In a graph it is one op, `gathered_weight`, whose products the backend recognises. Where anything else reads it, it is
the dequantised weight. Its gradient is a plain tensor of its dtype.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fp4compile.distributed.codes import Direction, Parts, Place
from fp4compile.ops.quantize import GATHERED_WEIGHT

aten = torch.ops.aten
# Operators by which FSDP2 and autograd make another tensor object of a parameter: it has the same codes.
_SAME = (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default)
_NAMES = ("rows", "row_scales", "row_outer", "columns", "column_scales", "column_outer")


@dataclass(frozen=True)
class Form:
    """What a gathered weight is: the directions of its codes and its dtype.

    recompute: whether the codes along the rows are gathered for the backward pass too.
    """

    rows: Direction
    columns: Direction
    dtype: torch.dtype
    recompute: bool

    @property
    def transposable(self) -> bool:
        """Whether the codes of one direction are the other's: in square blocks of one format."""
        return self.rows.format == self.columns.format and self.rows.block_format.square

    def sent(self, wanted: tuple[Direction, ...]) -> tuple[Direction, ...]:
        """The directions that ranks send where the products want some."""
        return wanted[:1] if self.transposable else wanted


class GatheredWeight(torch.Tensor):
    """A weight [N, K] as codes along its rows and along its columns; see `Form`.

    without_rows: whether the last gather brought the codes along the columns alone.
    """

    form: Form
    without_rows: bool
    _rows: torch.Tensor
    row_scales: torch.Tensor | None
    row_outer: torch.Tensor | None
    columns: torch.Tensor
    column_scales: torch.Tensor | None
    column_outer: torch.Tensor | None

    @staticmethod
    def __new__(cls, form: Form, parts: dict[str, torch.Tensor], without_rows: bool = False) -> "GatheredWeight":
        rows = parts["rows"]
        with torch.inference_mode(rows.is_inference()):  # a view is for training where its base is
            made = torch.Tensor._make_wrapper_subclass(
                cls, form.rows.size, dtype=form.dtype, device=rows.device, requires_grad=False
            )  # fmt: skip
        made.form, made.without_rows = form, without_rows
        made._rows = rows
        for name in _NAMES[1:]:
            setattr(made, name, parts.get(name))
        return made

    @property
    def rows(self) -> torch.Tensor:
        """The codes along the rows. Raises RuntimeError where they were not gathered."""
        if self.without_rows:
            raise RuntimeError(
                "a forward product is computed again in the backward pass, as by activation checkpointing, for which "
                "the weight's codes are not gathered; call gather_quantized_(..., recompute=True)"
            )
        return self._rows

    def along(self, direction: Direction) -> Parts:
        """The codes, block scales and outer scale of one of the form's directions."""
        if direction == self.form.rows:
            return self._rows, self.row_scales, self.row_outer
        return self.columns, self.column_scales, self.column_outer

    def parts(self) -> dict[str, torch.Tensor]:
        """All tensors that hold codes and scales, by name."""
        found = {"rows": self._rows} | {name: getattr(self, name) for name in _NAMES[1:]}
        return {name: part for name, part in found.items() if part is not None}

    def dequantised(self) -> torch.Tensor:
        """The values of the codes along the rows."""
        form = self.form
        return GATHERED_WEIGHT(
            self.rows, self.row_scales, self.row_outer, form.rows.format,
            self.columns, self.column_scales, self.column_outer, form.columns.format,
            form.rows.size[1], form.dtype, form.recompute,
        )  # fmt: skip

    def __tensor_flatten__(self) -> tuple[list[str], Form]:
        return list(self.parts()), self.form

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], form: Form, outer_size: Any, outer_stride: Any
    ) -> "GatheredWeight":
        return GatheredWeight(form, inner)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache distinguishes besides the tensors."""
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


class Arrival:
    """The memory into which a weight's codes are gathered, again and again. ranks: how many send shards.

    stale: a scale of each direction whose codes the last gather did not bring. FSDP2 allocates the memory before a
    gather's bytes are written, and frees it after the products.
    """

    def __init__(self, form: Form, device: torch.device, ranks: int):
        self.form, self.ranks = form, ranks
        self.places = {direction: direction.places(device, ranks) for direction in (form.rows, form.columns)}
        self.stale: list[torch.Tensor] = []
        self._memories: dict[tuple[Direction, ...], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def weight(self) -> GatheredWeight:
        """The weight, whose codes are still to be written."""
        named = zip(_NAMES, (*self.places[self.form.rows], *self.places[self.form.columns]), strict=True)
        return GatheredWeight(self.form, {name: place.part for name, place in named if place is not None})

    def arriving(self, wanted: tuple[Direction, ...]) -> list[torch.Tensor]:
        """Where the bytes arrive that `Direction.encode` makes, where products want codes of some directions."""
        return self._memory(wanted)[0]

    def beside(self, wanted: tuple[Direction, ...]) -> list[torch.Tensor]:
        """The other memory of the weight."""
        return self._memory(wanted)[1]

    def _memory(self, wanted: tuple[Direction, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if wanted not in self._memories:
            arriving = [place.arriving for direction in self.form.sent(wanted) for place in self._of(direction)]
            there = {id(tensor) for tensor in arriving}
            memory = [place.memory for direction in self.places for place in self._of(direction)]
            self._memories[wanted] = arriving, [tensor for tensor in memory if id(tensor) not in there]
        return self._memories[wanted]

    def allocate(self, wanted: tuple[Direction, ...]) -> None:
        """Allocate the other memory, as FSDP2 does from the second gather on."""
        for tensor in self.beside(wanted):
            tensor.untyped_storage().resize_(tensor.nbytes)

    def write(self, sent: list[torch.Tensor], wanted: tuple[Direction, ...]) -> None:
        """Write what one rank alone sends. Of several tensors of one rank, FSDP2 copies the first (torch 2.13)."""
        for memory, tensor in zip(self.arriving(wanted), sent, strict=True):
            memory.untyped_storage().resize_(memory.nbytes)
            memory.copy_(tensor)

    def finish(self, weight: GatheredWeight, wanted: tuple[Direction, ...]) -> None:
        """Write the wanted codes, whose bytes have arrived. Those of another direction are left to `invalidate`."""
        form = self.form
        with writing(list(weight.parts().values())):
            for direction in form.sent(wanted):
                direction.join(self.places[direction], self.ranks)
            if form.columns in wanted and form.columns not in form.sent(wanted):
                form.columns.transpose(weight.along(form.rows), weight.along(form.columns))
        weight.without_rows = form.rows not in wanted
        self.stale = [self._scaling(direction) for direction in (form.rows, form.columns) if direction not in wanted]

    def _scaling(self, direction: Direction) -> torch.Tensor:
        """The outer scale of a direction's codes, or their block scales where they have no outer scale."""
        _, scales, outer = self.places[direction]
        place = outer or scales
        assert place is not None  # every format has one of them
        return place.part

    def _of(self, direction: Direction) -> list[Place]:
        return [place for place in self.places[direction] if place is not None]


def invalidate(arrivals: Iterable[Arrival]) -> None:
    """Make every product NaN of codes that the last gathers did not bring, so that no product takes old ones."""
    stale = [tensor for arrival in arrivals for tensor in arrival.stale]
    if stale:
        with writing(stale):  # in all formats of scales, bytes of ones are NaN
            torch._foreach_clamp_min_([tensor.view(-1).view(torch.uint8) for tensor in stale], 255)


def writing(parts: list[torch.Tensor]) -> AbstractContextManager:
    """A context that writes to a weight's memory: autograd saved it for the backward pass, which reads what is new."""
    counted = tuple(part for part in parts if not part.is_inference())
    return torch.autograd._unsafe_preserve_version_counter(counted)


def _same_shape(func: Any, args: tuple) -> bool:
    """Whether one of `_SAME` returns its argument's shape."""
    if len(args) < 2:
        return True
    same = list(args[1]) == list(args[0].shape)
    if func is aten.view.default:
        return same
    offset = args[3] if len(args) > 3 else 0
    return same and list(args[2]) == list(args[0].stride()) and not offset
