"""Packed models in safetensors files: `save_packed` and `load_packed`.

A file holds the state of a model; memory that several tensors share is in it once. The metadata of the file say how the
packed layers multiply, and which tensors of the model share memory: see `sharing.Sharing`, whose fields they hold.
Files of version 0.1 have `aliases` alone, which they found by address and shape.
"""

import json
import os
import secrets
import warnings
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile.packed.buffers import BUFFERS, LayerFormat, buffer_shapes
from fp4compile.packed.linear import PackedLinear, is_linear, leave_fast_paths, obstacle, sizes
from fp4compile.packed.pack import replace
from fp4compile.packed.scales import layout_of
from fp4compile.packed.sharing import Sharing, arrange, check_shared, is_byte_float, repeats, same_bits, share

_METADATA = "fp4compile"
_EXTRA_STATE = "_extra_state"


# ---------------------------------------------------------------- saving


def save_packed(model: nn.Module, path: str | PathLike) -> None:
    """Write the state of a model with packed layers to a safetensors file.

    Parameters and persistent buffers are written, and memory that several of them share is written once. A warning says
    where a module has extra state of another kind, which is not written. A file that exists at `path` stays until the
    new one is complete.

    Raises TypeError for what is no module, ValueError if the model has no packed layer or has tensors on the meta
    device, OSError where the file cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    modules = list(model.named_modules(remove_duplicate=False))
    layers = {name: module.get_extra_state() for name, module in modules if isinstance(module, PackedLinear)}
    if not layers:
        raise ValueError("model: has no packed layer; call fp4compile.pack_ first")
    state = _tensors(model)
    state |= _shared_scales(modules, state)
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(f"model: {name!r} is on the meta device and has no values to write")
    for key in model.state_dict():
        name = key.rpartition(".")[0]
        if _is_extra_state(key) and name not in layers:
            warnings.warn(f"{path}: the extra state of {name!r} is not written", stacklevel=2)
    tensors, sharing = arrange(state)
    _write(tensors, path, json.dumps({"layers": layers, **vars(sharing)}))


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model by name: the objects, not detached copies."""
    state = model.state_dict(keep_vars=True)
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not _is_extra_state(key)}


def _shared_scales(modules: list[tuple[str, nn.Module]], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The linear scales, in a state, of packed layers that have them swizzled; one tensor where layers share them."""
    made: dict[tuple, torch.Tensor] = {}
    swizzled = (
        (f"{name}.weight_scales".removeprefix("."), module)
        for name, module in modules
        if isinstance(module, PackedLinear) and layout_of(module.weight_scales) == "swizzled"
    )
    return {name: made.setdefault(_place(layer), state[name]) for name, layer in swizzled if name in state}


def _place(layer: PackedLinear) -> tuple:
    """Equal for layers whose block scales are the same memory, read alike."""
    scales = layer.weight_scales
    return scales.untyped_storage()._cdata, scales.storage_offset(), buffer_shapes(layer)["weight_scales"]


def _is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == _EXTRA_STATE


def _write(tensors: dict[str, torch.Tensor], path: str | PathLike, metadata: str) -> None:
    from safetensors.torch import save_file

    target = Path(os.path.realpath(path))  # where path is a link, replace the file that it points to
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        beside.touch()
        mode = beside.stat().st_mode
        save_file(tensors, beside, {_METADATA: metadata})
        beside.chmod(mode)  # safetensors has made it a file that only its owner can read
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


# ---------------------------------------------------------------- loading


def load_packed(model: nn.Module, path: str | PathLike, device: str | torch.device | None = None) -> None:
    """Replace layers and fill tensors of an unpacked model by those of a file, in place.

    model: of the same architecture as the model that was saved.
    path: a file of `save_packed`.
    device: where parameters and buffers go that are on the meta device; None: the CPU. All others stay where they are.

    Tensors that shared memory when the file was written share it again. Everything is checked before the model is
    changed.

    Raises TypeError for what is no module or no device; OSError for a file that cannot be read; ValueError for a file
    that is truncated or was not made by `save_packed`, for layers that the model does not have, whose sizes differ or
    that cannot be packed (see `pack_`), for missing tensors, for tensors that share memory in the model and differ in
    the file, and for buffers on the meta device that the file does not have.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    target = _device(device)
    layers, stored, sharing = _read(path)
    packed = _packed_layers(model, layers)
    replaced = {f"{name}.weight" for place in packed for name in place.names}
    kept = {name: tensor for name, tensor in _tensors(model).items() if name not in replaced}
    _check_meta(model, replaced | kept.keys())
    _check_tensors(path, stored, _expected(kept, packed))
    _check_twins(path, stored, packed)
    check_shared(path, stored, kept)
    _insert(model, packed, stored, target)
    _materialise(model, stored, target)
    for name, tensor in kept.items():
        if not tensor.is_meta:
            _fill(tensor, stored[name])
    if sharing is not None:
        share(model, sharing)
    _lay_out_scales(model)  # at the end, because files describe views of linear scales
    leave_fast_paths(model)


def _device(device: str | torch.device | None) -> torch.device:
    try:
        chosen = torch.device("cpu" if device is None else device)
        torch.empty(0, device=chosen)
    except (TypeError, RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"device: expected one that tensors can be on, got {device!r}: {error}") from None
    if chosen.type == "meta":
        raise ValueError("device: tensors on the meta device have no values; allowed are those that hold tensors")
    return chosen


def _read(path: str | PathLike) -> tuple[dict[str, dict], dict[str, torch.Tensor], Sharing | None]:
    """(state of the packed layers, tensors by name, which of them share memory) of a file.

    The last is None for a file of version 0.1.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = (file.metadata() or {}).get(_METADATA)
            if metadata is None:
                raise ValueError(f"{path}: was not written by fp4compile.save_packed")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    layers, sharing, old = _parse(path, metadata)
    # Views come first, because an alias may be one of a view.
    sources = {name: view[0] for name, view in sharing.views.items()} | sharing.aliases
    for name, source in sources.items():
        if source not in tensors:
            raise ValueError(f"{path}: tensor {source!r}, which {name!r} shares, is missing")
        tensors[name] = tensors[source]
        if name in sharing.views:
            _, shape, strides, offset = sharing.views[name]
            tensors[name] = _strided(path, name, tensors[source], shape, strides, offset)
    return layers, tensors, None if old else sharing


def _strided(path: str | PathLike, name: str, source: torch.Tensor, *geometry: Any) -> torch.Tensor:
    """The view of a tensor with the shape, strides and offset that a file gives."""
    try:
        return source.as_strided(*geometry)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{path}: tensor {name!r} is no view of what it shares: {error}") from error


def _parse(path: str | PathLike, metadata: str) -> tuple[dict[str, dict], Sharing, bool]:
    """(state of the packed layers, which tensors share memory, whether the file is of version 0.1), of metadata."""
    keys = {field.name for field in fields(LayerFormat)} | {"in_features", "out_features"}
    try:
        content = json.loads(metadata)
        layers, aliases, old = content["layers"], content["aliases"], "views" not in content
        sharing = Sharing(aliases) if old else Sharing(aliases, content["tied"], content["views"])
        whole = all(set(state) == keys for state in layers.values()) and isinstance(aliases, dict)
        whole = whole and all(len(view) == 4 for view in sharing.views.values()) and set(sharing.tied) <= set(aliases)
    except (ValueError, TypeError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: its metadata is not what fp4compile.save_packed writes")
    return layers, sharing, old


# ---------------------------------------------------------------- checks before the model is touched


@dataclass(frozen=True)
class _Replacement:
    """A linear layer that a packed one will replace. names: every name that the model has for the layer's place."""

    names: list[str]
    linear: nn.Module
    layer_format: LayerFormat


def _packed_layers(model: nn.Module, layers: dict[str, dict]) -> list[_Replacement]:
    """The layers of the model that packed ones of a file replace. Raises ValueError where a layer does not match."""
    for name, state in layers.items():
        _check_layer(model, name, state)
    names: dict[tuple, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            names.setdefault(_slot(model, name), []).append(name)
    places: dict[tuple, _Replacement] = {}
    for name, state in layers.items():
        layer_format = LayerFormat(state["weight"], state["activation"], state["activation_outer"])
        slot = _slot(model, name)
        place = places.setdefault(slot, _Replacement(names[slot], model.get_submodule(name), layer_format))
        if place.layer_format != layer_format:
            raise ValueError(f"layer {name!r}: in the model it is {place.names[0]!r} too, whose format is another")
    return list(places.values())


def _slot(model: nn.Module, name: str) -> tuple[int, str]:
    """The place that a name means: the id of a module, and the name of an attribute of it."""
    parent, _, child = name.rpartition(".")
    return id(model.get_submodule(parent)), child


def _check_layer(model: nn.Module, name: str, state: dict[str, Any]) -> None:
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no layer {name!r}") from None
    if not is_linear(linear):
        raise ValueError(f"layer {name!r}: expected an nn.Linear to replace, the model has {type(linear).__name__}")
    reason = obstacle(linear)
    if reason is not None:
        raise ValueError(f"layer {name!r}: expected an nn.Linear to replace, the model's cannot be: {reason}")
    stored = (state["in_features"], state["out_features"])
    if sizes(linear) != stored:
        raise ValueError(f"layer {name!r}: the file has in and out features {stored}, the model {sizes(linear)}")


def _expected(kept: dict[str, torch.Tensor], packed: list[_Replacement]) -> dict[str, tuple]:
    """The shape and dtype of every tensor that the packed model will have, by name."""
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()}
    for place in packed:
        inner, outer = sizes(place.linear)
        shapes = buffer_shapes(PackedLinear(inner, outer, place.layer_format, None))
        expected |= {f"{name}.{buffer}": shape for name in place.names for buffer, shape in shapes.items()}
    return expected


def _check_tensors(path: str | PathLike, stored: dict[str, torch.Tensor], expected: dict[str, tuple]) -> None:
    """Raise where tensors of a file are missing, unknown, or of another shape or dtype than expected.

    Tensors of bytes for which a dtype of one byte is expected become tensors of that dtype.
    """
    for name, (shape, dtype) in expected.items():
        if name not in stored:
            raise ValueError(f"{path}: tensor {name!r} is missing")
        if stored[name].dtype == torch.uint8 and is_byte_float(dtype):
            stored[name] = stored[name].view(dtype)
        found = stored[name]
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            raise ValueError(
                f"{path}: tensor {name!r} is {found.dtype} {tuple(found.shape)}, the model needs {dtype} {tuple(shape)}"
            )
    unknown = sorted(name for name in set(stored) - set(expected) if not _is_extra_state(name))
    if unknown:
        raise ValueError(f"{path}: the model has no {unknown[0]!r}")


def _check_twins(path: str | PathLike, stored: dict[str, torch.Tensor], packed: list[_Replacement]) -> None:
    """Raise where the file has different packed weights under several names of one layer of the model."""
    for place in packed:
        for buffer in BUFFERS:
            found = [stored[key] for name in place.names if (key := f"{name}.{buffer}") in stored]
            if not all(same_bits(tensor, found[0]) for tensor in found):
                names = " and ".join(map(repr, place.names))
                raise ValueError(f"{path}: {names} are one layer of the model, the file has different weights for them")


def _check_meta(model: nn.Module, restored: set[str]) -> None:
    """Raise where a tensor of the model is on the meta device, and loading does not give it values."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if tensor.is_meta and name not in restored:
            raise ValueError(f"model: {name!r} is on the meta device, and the file has only parameters and persistent "
                             "buffers: give it values first")  # fmt: skip


# ---------------------------------------------------------------- changing the model


def _insert(
    model: nn.Module, packed: list[_Replacement], stored: dict[str, torch.Tensor], target: torch.device
) -> None:
    """Put the packed layers into the model. Empties the list `packed` on the way, to free each weight."""
    made: dict[tuple, PackedLinear] = {}
    while packed:
        place = packed.pop(0)
        linear, names = place.linear, place.names
        # A layer that the model holds in several places stays one layer if the file has one weight for all of them.
        key = (id(linear), stored[f"{names[0]}.weight_data"].data_ptr())
        if key not in made:
            layer = made[key] = PackedLinear.in_place_of(linear, place.layer_format)
            device = target if linear.weight.is_meta else linear.weight.device
            for buffer in buffer_shapes(layer):
                setattr(layer, buffer, stored[f"{names[0]}.{buffer}"].to(device))
        replace(model, names[0], made[key])
        del place, linear  # frees the weight


def _lay_out_scales(model: nn.Module) -> None:
    """Let the scales of the packed layers lie as their devices multiply them. Layers that share them still do."""
    sharing: dict[tuple, list[PackedLinear]] = {}
    for layer in model.modules():
        if isinstance(layer, PackedLinear) and layer.weight_scales is not None:
            layout = layer.scale_layout_on(layer.weight_scales.device)
            if layout != layout_of(layer.weight_scales):
                sharing.setdefault((layout, *_place(layer)), []).append(layer)
    for (layout, *_), layers in sharing.items():
        scales = layers[0].scales_as(layout, layers[0].weight_scales)
        for layer in layers:
            layer.weight_scales = scales


def _materialise(model: nn.Module, stored: dict[str, torch.Tensor], target: torch.device) -> None:
    """Replace the tensors on the meta device by stored ones; one object in several places stays one object."""
    made: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for tensors in (module._parameters, module._buffers):
            for child, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _made_of(tensor, stored[f"{path}.{child}" if path else child].to(target))
                tensors[child] = made[id(tensor)]


def _made_of(old: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor or parameter with these values, and with what else the old one has."""
    new = nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values
    vars(new).update(vars(old))
    return new


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if repeats(tensor):  # torch refuses to write to such a tensor
        tensor.data = values.to(tensor.device)
        return
    with torch.no_grad():
        tensor.copy_(values)
