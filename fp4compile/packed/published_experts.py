"""Experts that a checkpoint holds one by one, put together as the parameters of a model.

A parameter is [experts, out, in]: the experts are stacked, and the layers of each (gate and up) follow one another
along the out features. Codes and block scales stay as they are. Of two other scales packed experts have fewer:

- The outer scale of the weights is one an expert. Its layers must have the same, as those that ModelOpt exports have.
- The static scale of the activations is one for all experts. It is the largest of theirs, by which nothing saturates
  that did not before.
"""

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fp4compile.packed.buffers import BUFFERS
from fp4compile.packed.checkpoint import Contents
from fp4compile.packed.published_names import Experts, PublishedNames, Target, expert_of
from fp4compile.packed.sharing import is_byte_float
from fp4compile.passes.find import packed_name


def in_model(model: nn.Module, contents: Contents, names: PublishedNames) -> Contents:
    """The contents of a checkpoint under the names of a model, with its experts put together.

    Takes tensors out of `contents` on the way, to free each. Experts that are not quantised become the parameter that
    the model has. Warns where the activation scales of experts differ.

    Raises ValueError, naming the tensor or the layer, where one of an expert is missing, has another shape than in the
    model or another format than the others, where the outer scales of an expert's layers differ, where the model has no
    such parameter, and where two tensors are the same one of the model.
    """
    targets = {name: _target(name, contents, names) for name in contents.tensors}
    states = {layer: names.layer(layer) for layer in contents.layers}
    found = Contents(experts=dict(contents.experts))
    found.layers.update((t.name, contents.layers[layer]) for layer, t in states.items() if not t.leaves)
    sources: dict[str, str] = {}
    for name, target in targets.items():
        if not target.leaves:
            first = sources.setdefault(target.name, name)
            if first != name:
                raise ValueError(f"tensors {first!r} and {name!r} are both {target.name!r} of the model")
            found.tensors[target.name] = contents.tensors.pop(name)
    outers: list[set[float | None]] = []
    for experts in _experts(targets):
        if experts.name in sources:
            raise ValueError(f"tensor {sources[experts.name]!r} and the experts {experts.prefix!r} are both "
                             f"{experts.name!r} of the model")  # fmt: skip
        outers.append(_put_together(model, experts, contents, found))
    unknown = next(iter(contents.tensors), None)
    if unknown is not None:
        raise ValueError(f"the model has no {unknown.rpartition('.')[0]!r}")
    if any(len(scales) > 1 for scales in outers):
        warnings.warn("the static activation scales of the experts of a layer differ; the largest is used for all",
                      stacklevel=4)  # fmt: skip
    return found


def parts_of(experts: Experts, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The layers of experts, and a copy of what each has of a tensor [experts, out, ...] or [experts].

    The inverse of what `in_model` does with one tensor.
    """
    for expert, one in enumerate(tensor):
        layers = experts.layers(expert)
        rows = one.chunk(len(layers)) if one.dim() else [one] * len(layers)
        yield from ((layer, part.clone()) for layer, part in zip(layers, rows, strict=True))


def _target(name: str, contents: Contents, names: PublishedNames) -> Target:
    """Where a tensor belongs; the buffers of a packed layer where its weight does."""
    layer, _, buffer = name.rpartition(".")
    if layer not in contents.layers or buffer not in BUFFERS:
        return names.target(name)
    target = names.layer(layer)
    return target if target.leaves else Target(f"{target.name}.{buffer}")


def _experts(targets: dict[str, Target]) -> list[Experts]:
    """The parameters of experts of which a checkpoint has parts, each once."""
    found: dict[Experts, None] = {}
    for name, target in targets.items():
        place = expert_of(name.rpartition(".")[0])
        if target.leaves and place is not None:
            found[Experts(target.name, place[0], target.leaves)] = None
    return list(found)


def _put_together(model: nn.Module, experts: Experts, contents: Contents, found: Contents) -> set[float | None]:
    """Move the layers of experts from `contents` to `found`, as one parameter; the scales of their activations."""
    count, outer, inner = _shape(model, experts)
    layers = [experts.layers(expert) for expert in range(count)]
    flat = [layer for one in layers for layer in one]
    states = [contents.layers.get(layer) for layer in flat]
    for layer, state in zip(flat, states, strict=True):
        if state is None and f"{layer}.weight" not in contents.tensors:
            raise ValueError(f"tensor '{layer}.weight' is missing")
    _check_formats(experts, flat, states)
    shapes = [_sizes(contents, layer) for layer in flat]
    expected = (outer // len(experts.leaves), inner)
    for layer, shape in zip(flat, shapes, strict=True):
        if shape != expected:
            raise ValueError(f"layer {layer!r}: the file has out and in features {shape}, as a part of "
                             f"{experts.name!r} the model {expected}")  # fmt: skip
    if states[0] is None:
        found.tensors[experts.name] = _stacked(contents, layers, "weight")
        return set()
    packed = packed_name(experts.name)
    for buffer in BUFFERS:
        if f"{flat[0]}.{buffer}" in contents.tensors:
            join = _one_each if buffer == "weight_outer" else _stacked
            found.tensors[f"{packed}.{buffer}"] = join(contents, layers, buffer)
    outers = {state["activation_outer"] for state in states if state is not None}
    found.experts[experts.name] = states[0] | {
        "activation_outer": None if None in outers else max(outers), "out_features": outer, "experts": count,
        "in_first": False,
    }  # fmt: skip
    return outers


def _shape(model: nn.Module, experts: Experts) -> tuple[int, int, int]:
    """(experts, out features, in features) of a parameter of the model."""
    try:
        shape = tuple(model.get_parameter(experts.name).shape)
    except AttributeError:
        shape = ()
    if len(shape) != 3:
        raise ValueError(f"layer '{experts.layers(0)[0]}': the model has no parameter of experts {experts.name!r}")
    return shape


def _check_formats(experts: Experts, layers: list[str], states: list[dict[str, Any] | None]) -> None:
    """Raise where the layers of a parameter do not all have one format, or none."""
    formats = [state and (state["weight"], state["activation"], state["activation_outer"] is None) for state in states]
    for layer, fmt in zip(layers, formats, strict=True):
        if fmt != formats[0]:
            kinds = " and ".join(
                "not quantised" if one is None else f"{one[0]} x {one[1]}" for one in (formats[0], fmt)
            )
            raise ValueError(f"layers {layers[0]!r} and {layer!r} are {kinds}; as parts of {experts.name!r} they must "
                             "have the same format")  # fmt: skip


def _sizes(contents: Contents, layer: str) -> tuple[int, ...]:
    """(out features, in features) of a layer, packed or not."""
    state = contents.layers.get(layer)
    if state is None:
        return tuple(contents.tensors[f"{layer}.weight"].shape)
    return state["out_features"], state["in_features"]


def _stacked(contents: Contents, layers: list[list[str]], tensor: str) -> torch.Tensor:
    """[experts, out, ...] of a tensor of the layers of each expert."""
    parts = [[contents.tensors.pop(f"{layer}.{tensor}") for layer in one] for one in layers]
    dtype = parts[0][0].dtype
    for one, names in zip(parts, layers, strict=True):
        for part, layer in zip(one, names, strict=True):
            if part.dtype != dtype:
                raise ValueError(f"tensor '{layer}.{tensor}' is {part.dtype}, that of {layers[0][0]!r} is {dtype}")
    # As bytes, because not every operator knows floating-point numbers of one byte.
    stored = torch.uint8 if is_byte_float(dtype) else dtype
    return torch.stack([torch.cat([part.view(stored) for part in one]) for one in parts]).view(dtype)


def _one_each(contents: Contents, layers: list[list[str]], tensor: str) -> torch.Tensor:
    """[experts] of a tensor [] that the layers of an expert have in common."""
    scales = [[contents.tensors.pop(f"{layer}.{tensor}") for layer in one] for one in layers]
    for one, names in zip(scales, layers, strict=True):
        for scale, layer in zip(one, names, strict=True):
            if not torch.equal(scale, one[0]):
                raise ValueError(f"layers {names[0]!r} and {layer!r} have outer scales {one[0].item():g} and "
                                 f"{scale.item():g}; as parts of one weight they must have the same")  # fmt: skip
    return torch.stack([one[0] for one in scales])
