"""Tensors of a model's state that are equal and share memory: a file holds them once, and loading shares them again."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Sharing:
    """The tensors of a state that share memory: names to names of equal tensors, and those that are one object."""

    aliases: dict[str, str] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- saving


def arrange(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Sharing]:
    """The tensors of a state to write, by name, and the sharing of memory by the state's other tensors."""
    tensors: dict[str, torch.Tensor] = {}
    sharing = Sharing()
    first: dict[tuple, str] = {}
    written: set[tuple] = set()
    for name, tensor in state.items():
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        place = (*storage, *geometry) if tensor.numel() else (id(tensor),)
        if place in first:
            sharing.aliases[name] = first[place]
            if tensor is state[first[place]]:
                sharing.tied.append(name)
            continue
        first[place] = name
        plain = storable(tensor.detach()).contiguous()
        # safetensors refuses tensors that share memory.
        tensors[name] = plain.clone() if storage in written and tensor.numel() else plain
        written.add(storage)
    return tensors, sharing


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a file's dtype: scales and FP8 codes as bytes, because not every reader supports their dtypes."""
    return tensor.view(torch.uint8) if is_byte_float(tensor.dtype) else tensor


def is_byte_float(dtype: torch.dtype) -> bool:
    """Whether a dtype is a floating-point dtype of one byte."""
    return dtype.itemsize == 1 and dtype.is_floating_point


# ---------------------------------------------------------------- loading


def sharing_of(content: dict[str, Any]) -> Sharing:
    """The sharing in a file's metadata; version 0.1 has only `aliases`. Raises ValueError for anything else."""
    aliases: Any = content.get("aliases")
    tied = content.get("tied", [])
    names = isinstance(aliases, dict) and all(isinstance(source, str) for source in aliases.values())
    if not names or not isinstance(tied, list) or not all(isinstance(name, str) and name in aliases for name in tied):
        raise ValueError("expected aliases, and among them those that are tied, by name")
    return Sharing(aliases, tied)


def restored(tensors: dict[str, torch.Tensor], sharing: Sharing) -> dict[str, torch.Tensor]:
    """All tensors of a state by name. Raises ValueError if a tensor shares memory with a missing tensor."""
    for name, source in sharing.aliases.items():
        if source not in tensors:
            raise ValueError(f"tensor {source!r}, which {name!r} shares, is missing")
    return tensors | {name: tensors[source] for name, source in sharing.aliases.items()}


def check_shared(stored: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if tensors `kept` by the model share memory, and the file has different values for them."""
    groups: dict[int, list[str]] = {}
    for name, tensor in kept.items():
        if tensor.numel() and not repeats(tensor):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in groups.values():
        first = kept[names[0]]
        if all(kept[name] is first and stored[name] is stored[names[0]] for name in names):
            continue
        memory = torch.empty(first.untyped_storage().nbytes(), dtype=torch.uint8, device="cpu")
        views = {name: _view_of(memory, kept[name]) for name in names}
        for name in names:
            views[name].copy_(stored[name])
        for name in names:
            if not same_bits(views[name], stored[name]):
                others = ", ".join(repr(other) for other in names if other != name)
                raise ValueError(f"{name!r} shares memory with {others} in the model, not in the file")


def _view_of(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A view of bytes in memory, with the dtype, shape, strides and offset of a tensor."""
    size = tensor.dtype.itemsize
    values = memory[: memory.numel() // size * size].view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bytes, in row-major order; NaNs count by their bits."""
    return a is b or torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))


def repeats(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor have one address, as after `expand`."""
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def share(model: nn.Module, sharing: Sharing) -> None:
    """Make tensors share memory as they did when the file was written, if their dtypes and devices agree."""
    for name, source in sharing.aliases.items():
        holder, child = _holder(model, name)
        place, at = _holder(model, source)
        mine, other = holder[child], place[at]
        if (mine.dtype, mine.device) != (other.dtype, other.device):
            continue
        if name in sharing.tied and isinstance(mine, nn.Parameter) == isinstance(other, nn.Parameter):
            holder[child] = other
        elif mine.untyped_storage()._cdata != other.untyped_storage()._cdata:
            mine.data = other.data


def _holder(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The dictionary of a module that holds a parameter or buffer, and its name in that dictionary."""
    path, _, child = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if child in module._parameters else module._buffers), child
