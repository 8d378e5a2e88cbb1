"""Which tensors of a model's state share memory: written once to a file, and shared again when it is read."""

from dataclasses import dataclass, field
from os import PathLike

import torch
from torch import nn


@dataclass(frozen=True)
class Sharing:
    """Which tensors of a state share memory.

    aliases: name -> the name of a tensor with the same elements. tied: of these, those that are the same object.
    views: name -> (the name of a contiguous tensor, shape, strides, offset in it), in elements.
    """

    aliases: dict[str, str] = field(default_factory=dict)
    tied: list[str] = field(default_factory=list)
    views: dict[str, tuple] = field(default_factory=dict)


# ---------------------------------------------------------------- saving


def arrange(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Sharing]:
    """(tensors to write, which others share their memory)."""
    tensors: dict[str, torch.Tensor] = {}
    sharing = Sharing()
    first: dict[tuple, str] = {}
    written: dict[tuple, list[str]] = {}
    # The largest of a memory first: the others may be views of it.
    for name, tensor in sorted(state.items(), key=lambda entry: -entry[1].numel()):
        storage = (tensor.device, tensor.untyped_storage().data_ptr())
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        place = (*storage, *geometry) if tensor.numel() else (id(tensor),)
        if place in first:
            sharing.aliases[name] = first[place]
            if tensor is state[first[place]]:
                sharing.tied.append(name)
            continue
        first[place] = name
        others = written.setdefault(storage, [])
        base = next((other for other in others if _covers(state[other], tensor)), None)
        if base is not None:
            offset = tensor.storage_offset() - state[base].storage_offset()
            sharing.views[name] = (base, tuple(tensor.shape), tensor.stride(), offset)
            continue
        plain = storable(tensor.detach()).contiguous()
        tensors[name] = plain.clone() if others and tensor.numel() else plain  # safetensors takes no shared memory
        others.append(name)
    return tensors, sharing


def _covers(base: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor of the same storage is a view of `base`."""
    if not (tensor.numel() and base.is_contiguous() and base.dtype == tensor.dtype):
        return False
    start = tensor.storage_offset() - base.storage_offset()
    end = start + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return start >= 0 and end <= base.numel()


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Scales and FP8 codes as bytes: not every reader knows their types."""
    return tensor.view(torch.uint8) if is_byte_float(tensor.dtype) else tensor


def is_byte_float(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype.is_floating_point


# ---------------------------------------------------------------- loading


def check_shared(path: str | PathLike, stored: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    """Raise where tensors share memory in the model and the file has different values for it."""
    groups: dict[int, list[str]] = {}
    for name, tensor in kept.items():
        if tensor.numel() and not repeats(tensor):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in groups.values():
        first = kept[names[0]]
        if all(kept[name] is first and stored[name] is stored[names[0]] for name in names):
            continue
        memory = torch.empty(first.untyped_storage().nbytes(), dtype=torch.uint8)
        views = {name: _view_of(memory, kept[name]) for name in names}
        for name in names:
            views[name].copy_(stored[name])
        for name in names:
            if not same_bits(views[name], stored[name]):
                others = ", ".join(repr(other) for other in names if other != name)
                raise ValueError(f"{path}: {name!r} shares memory with {others} in the model, not in the file")


def _view_of(memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.dtype.itemsize
    values = memory[: memory.numel() // size * size].view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (a, b)))


def repeats(tensor: torch.Tensor) -> bool:
    """Whether elements share a place, as after `expand`."""
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def share(model: nn.Module, sharing: Sharing) -> None:
    """Make one again what was one when the file was written, where dtypes and devices are the same."""
    for name, (source, shape, strides, offset) in sharing.views.items():
        mine, other = _tensor(model, name), _tensor(model, source)
        alike = (mine.dtype, mine.device) == (other.dtype, other.device)
        if alike and other.is_contiguous() and not _same_memory(mine, other):
            mine.data = other.data.as_strided(shape, strides, other.storage_offset() + offset)
    for name, source in sharing.aliases.items():
        holder, child = _holder(model, name)
        mine, other = holder[child], _tensor(model, source)
        if (mine.dtype, mine.device) != (other.dtype, other.device):
            continue
        if name in sharing.tied and isinstance(mine, nn.Parameter) == isinstance(other, nn.Parameter):
            holder[child] = other
        elif not _same_memory(mine, other):
            mine.data = other.data


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _tensor(model: nn.Module, name: str) -> torch.Tensor:
    holder, child = _holder(model, name)
    return holder[child]


def _holder(model: nn.Module, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """The dictionary of a module that holds a parameter or buffer, and its name there."""
    path, _, child = name.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if child in module._parameters else module._buffers), child
