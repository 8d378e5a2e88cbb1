"""`QuantizedShard`: a rank's shard of a weight, of which FSDP2 gathers codes.

It holds the shard in high precision, and computes as the shard does: an optimiser, a checkpoint or a norm of gradients
sees no difference. Only FSDP2's hooks know of codes.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from fp4compile.distributed.codes import Direction, packed_bytes
from fp4compile.distributed.fsdp import Sharded
from fp4compile.distributed.whole import Form, GatheredWeight

aten = torch.ops.aten
# Operators by which FSDP2, DTensor and `nn.Module.to` make another shard of a shard. Results of others are plain.
_STILL_SHARDS = frozenset((
    aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor,
    aten.split.Tensor, aten._to_copy.default, aten._pin_memory.default, aten.clone.default, aten.empty_like.default,
    aten.new_zeros.default,
))  # fmt: skip


class Magnitudes:
    """The largest magnitudes over all ranks that scales are made of, for the weights that are gathered together.

    FSDP2 asks the weights of a module for their codes one after the other. The first one that asks reduces the
    magnitudes of all in one collective; each takes its own once, so that none meets magnitudes of another step.
    """

    def __init__(self) -> None:
        self.members: list[tuple[Sharded, Form]] = []
        self._waiting: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: dict) -> "Magnitudes":
        return self  # Dynamo copies what a shard refers to

    def take(self, sharded: Sharded, form: Form, group: dist.ProcessGroup) -> dict[Direction, torch.Tensor]:
        """The magnitudes of one weight, by the directions that are sent and have a scale that depends on all rows."""
        directions = _over_ranks(sharded, form)
        if not directions:
            return {}
        if id(sharded) not in self._waiting:
            self._reduce(group)
        found = self._waiting.pop(id(sharded))
        return dict(zip(directions, found.split([one.count_of_magnitudes for one in directions]), strict=True))

    def _reduce(self, group: dist.ProcessGroup) -> None:
        found = {}
        for sharded, form in self.members:
            directions = _over_ranks(sharded, form)
            if directions:
                shard = plain(sharded.local).to(sharded.dtype)
                each = [direction.magnitudes(shard).float() for direction in directions]
                found[id(sharded)] = torch.cat(each).to(sharded.device)
        together = torch.cat(list(found.values()))
        dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
        self._waiting = dict(zip(found, together.split([one.numel() for one in found.values()]), strict=True))


def _over_ranks(sharded: Sharded, form: Form) -> list[Direction]:
    """The directions that a gather sends now and that have a scale that depends on the rows of all ranks."""
    return [direction for direction in form.sent(_wanted(sharded, form)) if direction.depends_on_all_rows]


def _wanted(sharded: Sharded, form: Form) -> tuple[Direction, ...]:
    """The directions of the codes that products will read before the weight is gathered again."""
    forward = sharded.for_forward or form.recompute
    return tuple(one for one, is_wanted in ((form.rows, forward), (form.columns, sharded.for_backward)) if is_wanted)


class QuantizedShard(torch.Tensor):
    """A shard of a weight in high precision, with FSDP2's hooks. form: what is gathered of it."""

    form: Form
    sharded: Sharded
    magnitudes: Magnitudes
    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, form: Form, sharded: Sharded, magnitudes: Magnitudes) -> "QuantizedShard":
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=values.device, pin_memory=values.device.type == "cpu" and values.is_pinned(),
        )  # fmt: skip
        made.values, made.form, made.sharded, made.magnitudes = values, form, sharded, magnitudes
        return made

    def _like(self, values: torch.Tensor) -> "QuantizedShard":
        return QuantizedShard(values, self.form, self.sharded, self.magnitudes)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        shards: list[QuantizedShard] = []

        def unwrapped(shard: QuantizedShard) -> torch.Tensor:
            shards.append(shard)
            return shard.values

        inner, named = tree_map_only(cls, unwrapped, (args, kwargs or {}))
        found = func(*inner, **named)
        if func._schema.is_mutable and args and isinstance(args[0], cls) and found is inner[0]:
            return args[0]
        return tree_map_only(torch.Tensor, shards[0]._like, found) if func in _STILL_SHARDS else found

    def __tensor_flatten__(self) -> tuple[list[str], tuple]:
        return ["values"], (self.form, self.sharded, self.magnitudes)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "QuantizedShard":
        return QuantizedShard(inner["values"], *context)

    def _stable_hash_for_caching(self) -> str:
        """What AOTAutograd's cache distinguishes: a graph that computes with shards depends on no hook."""
        return repr((self.shape, self.stride(), self.dtype, self.device, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """In a file, the shard is a plain tensor: checkpoints are read without this package."""
        return self.values.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """A copy, such as one of a state dict, is a plain tensor: FSDP2 gathers no copies."""
        return copy.deepcopy(self.values, memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedShard({self.values!r})"

    # ------------------------------------------------------------ FSDP2's hooks

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], tuple[Direction, ...]]:  # fmt: skip
        """The bytes that this rank sends, and the directions of the codes that are wanted."""
        wanted = _wanted(self.sharded, self.form)
        group = mesh.get_group()
        magnitudes = self.magnitudes.take(self.sharded, self.form, group)
        shard = self.values.to(self.sharded.dtype)
        sent = packed_bytes([part for one in self.form.sent(wanted) for part in one.encode(shard, magnitudes.get(one))])
        self.sharded.fit_buffers(sent.numel() * group.size())
        return (sent,), wanted

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:  # fmt: skip
        """The whole weight and its tensors at the first gather, later None: `out` is filled then."""
        (arrived,) = all_gather_outputs
        weight = out
        if weight is None:  # a cast of the model may have changed the dtype
            weight = GatheredWeight.empty(replace(self.form, dtype=self.sharded.dtype), arrived.device)
        weight.write(arrived.view(self.sharded.ranks, -1), metadata)
        arrived.untyped_storage().resize_(0)  # FSDP2 allocates the buffer again for the next gather
        return (weight, tuple(weight.parts().values())) if out is None else None


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a shard as a plain tensor."""
    return tensor.values if isinstance(tensor, QuantizedShard) else tensor
