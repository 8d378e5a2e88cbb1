"""`QuantizedShard`: a rank's shard of a weight, of which FSDP2 gathers codes.

It holds the shard in high precision, and computes as a plain tensor does: optimisers, checkpoints and norms of
gradients work unchanged. Only FSDP2's hooks return codes.
"""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from fp4compile.distributed import compiled
from fp4compile.distributed.arrival import Arrival, Finish, Gathering
from fp4compile.distributed.codes import Direction, magnitudes_of
from fp4compile.distributed.fsdp import Sharded
from fp4compile.distributed.whole import GatheredFormat

aten = torch.ops.aten
# Operators by which FSDP2, DTensor, `nn.Module.to` and asynchronous checkpoints derive a shard from a shard. The last
# copy the values into what `new_empty` returns by its attributes. Results of other operators are plain.
_STILL_SHARDS = frozenset((
    aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor,
    aten.split.Tensor, aten._to_copy.default, aten._pin_memory.default, aten.clone.default, aten.empty_like.default,
    aten.new_empty.default, aten.new_zeros.default,
))  # fmt: skip


class Member:
    """A sharded weight that FSDP2 gathers as codes.

    others: the weights that FSDP2 gathers in the same all-gather. arrival: the memory that the gathered codes arrive
    in, which later gathers use again; None before the first one.
    """

    def __init__(self, sharded: Sharded, form: GatheredFormat, others: "Together"):
        self.sharded, self.form, self.others = sharded, form, others
        self.arrival: Arrival | None = None
        others.members.append(self)

    def __deepcopy__(self, memo: dict) -> "Member":
        return self  # Dynamo copies the objects to which a shard refers

    @property
    def gathering(self) -> Gathering:
        """The gather of this weight that is due now.

        It has the codes along the rows, along the columns, or both: those that matmuls read before the next gather.
        """
        sharded = self.sharded
        if self.arrival is None:  # a cast of the model may have changed the dtype
            form = replace(self.form, dtype=sharded.dtype)
            with torch.inference_mode(False):  # the first gather may be for evaluation, later ones for training
                self.arrival = Arrival(form, sharded.device, sharded.ranks)
        return self.arrival.gathering(rows=sharded.for_forward or self.form.recompute, columns=sharded.for_backward)


# Shards of weights of one form, stacked: [weights, rows, K], and the gathering of the first weight.
_Stacks = list[tuple[list["Member"], torch.Tensor, Gathering]]
# Largest magnitudes over all ranks, by the first weight of a stack and by the kind of scale, "tensor" or "row".
_Magnitudes = dict[tuple["Member", str | None], torch.Tensor]


class Together:
    """The weights that are gathered together, quantised together, and finished together.

    FSDP2 calls the hook of each weight of a module in turn. The first call quantises all weights: one launch casts all
    shards, one collective reduces the magnitudes of which scales are made, and one call quantises all weights of one
    size. Each weight's codes are taken once, so that no codes of another step are used. After the gather, FSDP2 calls
    another hook of each weight in turn, and the last call finishes all.

    A gather for a backward pass uses the magnitudes that its forward pass has reduced: the weights are the same.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._waiting: dict[Member, list[torch.Tensor]] = {}
        self._known: _Magnitudes = {}
        self._alike: list[list[Member]] = []
        self._finish: dict[tuple[Gathering, ...], Finish] = {}
        self._arrived: dict[Member, Gathering] = {}

    def take(self, member: Member, shard: torch.Tensor) -> list[torch.Tensor]:
        """The bytes of a weight that this rank sends. shard: its rows, on the device of the whole weight."""
        if member not in self._waiting:
            shards = {one: shard if one is member else plain(one.sharded.local) for one in self.members}
            self._waiting = self._encoded(self._stacked(shards), member.sharded)
        return self._waiting.pop(member)

    def arrived(self, member: Member, gathering: Gathering) -> None:
        """Finish all weights once the last of them has been gathered. gathering: the member's."""
        self._arrived[member] = gathering
        if member is self.members[-1]:
            key = tuple(self._arrived.values())
            if key not in self._finish:
                self._finish[key] = Finish(key)
            self._finish[key]()

    def _stacked(self, shards: dict[Member, torch.Tensor]) -> _Stacks:
        """The shards by form, in the dtype of the whole weights."""
        if not self._alike:
            alike: dict[GatheredFormat, list[Member]] = {}
            for member in self.members:
                alike.setdefault(member.gathering.arrival.form, []).append(member)
            self._alike = list(alike.values())
        stacks, to = [], []
        for members in self._alike:
            first = members[0]
            gathering = first.gathering
            shape, dtype = (len(members), *shards[first].shape), gathering.arrival.form.dtype
            stack = torch.empty(shape, dtype=dtype, device=first.sharded.device)
            stacks.append((members, stack, gathering))
            to += stack.unbind()
        torch._foreach_copy_(to, [shards[member] for members in self._alike for member in members])
        return stacks

    def _encoded(self, stacks: _Stacks, asking: Sharded) -> dict[Member, list[torch.Tensor]]:
        """The bytes of each weight's codes and scales. asking: one of the weights."""
        known = self._known if asking.in_backward else {}
        self._known = known | _reduced(stacks, known, asking.process_group)
        tensors = []
        for members, stack, gathering in stacks:
            kinds = [direction.scale_over_ranks for direction in gathering.sent]
            tensors += [stack, *(self._known[members[0], kind] for kind in kinds if kind)]
        parts = iter(compiled.run(encode, tuple(gathering.sent for *_, gathering in stacks), tensors))
        found: dict[Member, list[torch.Tensor]] = {}
        for members, _, gathering in stacks:
            of_members = zip(*(next(parts).unbind() for _ in gathering.arriving), strict=True)
            found |= zip(members, map(list, of_members), strict=True)
        return found


def encode(sent: Sequence[tuple[Direction, ...]], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The codes that ranks send of several stacks of shards: the parts of all directions, see `Direction.encode`.

    sent: the directions of each stack. tensors: for each stack its shards, then the magnitudes of the directions whose
    scales depend on all ranks.
    """
    left, found = iter(tensors), []
    for directions in sent:
        stack = next(left)
        for direction in directions:
            found += direction.encode(stack, next(left) if direction.scale_over_ranks else None)
    return found


def _reduced(stacks: _Stacks, known: _Magnitudes, group: dist.ProcessGroup) -> _Magnitudes:
    """Reduce the magnitudes over all ranks of which scales are made, except for those in `known`.

    They are reduced as integers, which have the order of magnitudes, with NaN (without its sign) above all: libraries
    of collectives may ignore NaN among floats.
    """
    needed: dict[tuple[Member, str | None], tuple[Direction, torch.Tensor]] = {}
    for members, stack, gathering in stacks:
        for direction in gathering.sent:
            key = members[0], direction.scale_over_ranks
            if direction.scale_over_ranks and key not in known:
                needed.setdefault(key, (direction, stack))
    if not needed:
        return {}
    found = magnitudes_of(list(needed.values()))
    together = torch.cat([each.view(-1) for each in found]).view(torch.int32)
    dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
    pieces = together.view(torch.float32).split([each.numel() for each in found])
    return {key: piece.view_as(each) for key, each, piece in zip(needed, found, pieces, strict=True)}


class QuantizedShard(torch.Tensor):
    """A shard of a weight in high precision, with FSDP2's hooks. member: the weight."""

    member: Member
    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, member: Member) -> "QuantizedShard":
        with torch.inference_mode(values.is_inference()):  # a view is an inference tensor if its base is
            made = torch.Tensor._make_wrapper_subclass(
                cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
                dtype=values.dtype, device=values.device,
                pin_memory=values.device.type == "cpu" and values.is_pinned(),
            )  # fmt: skip
        made.values, made.member = values, member
        return made

    def _like(self, values: torch.Tensor) -> "QuantizedShard":
        return QuantizedShard(values, self.member)

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
        return ["values"], (self.member,)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: tuple, outer_size: Any, outer_stride: Any
    ) -> "QuantizedShard":
        return QuantizedShard(inner["values"], *context)

    def _stable_hash_for_caching(self) -> str:
        """The key of AOTAutograd's cache: a graph that computes with shards depends on no hook."""
        return repr((self.shape, self.stride(), self.dtype, self.device, self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the shard as a plain tensor, so that checkpoints can be read without this package."""
        return self.values.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        """A plain tensor: copies, such as those in state dicts, are not gathered."""
        return copy.deepcopy(self.values, memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"QuantizedShard({self.values!r})"

    # ------------------------------------------------------------ FSDP2's hooks

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[list[torch.Tensor], Gathering]:  # fmt: skip
        """The bytes that this rank sends, and the gather."""
        member = self.member
        gathering = member.gathering
        member.sharded.gather_into(gathering.arriving, gathering.beside)
        sent = member.others.take(member, self.values)
        if member.sharded.ranks == 1:
            gathering.write(sent)
        return sent, gathering

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[torch.Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:  # fmt: skip
        """The whole weight and its memory at the first gather; later None, and `out` is filled."""
        gathering, weight = metadata, out
        if weight is None:
            weight = gathering.arrival.weight()
            gathering.allocate()
        weight.without_rows = gathering.arrival.form.rows not in gathering.wanted
        self.member.others.arrived(self.member, gathering)
        return None if out is not None else (weight, tuple(gathering.beside))


# FSDP2 reads the signature at every gather of every weight, which takes as long as the rest of its own work.
QuantizedShard.fsdp_pre_all_gather.__signature__ = inspect.signature(QuantizedShard.fsdp_pre_all_gather)  # type: ignore


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A shard as a plain tensor with the same memory."""
    return tensor.values if isinstance(tensor, QuantizedShard) else tensor
