"""Packed models in safetensors files: `save_packed` and `load_packed`.

A file holds the state of a model, equal tensors of one memory once. Its metadata are the descriptions of packed layers
and the fields of `sharing.Sharing`. Files of version 0.1 have only `aliases`, which were found by address and shape.
"""

import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile.analysis.module_names import check_module
from fp4compile.formats.formats import integer_dtype
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.atomic_file import write_atomically
from fp4compile.report.names import unwrapped
from fp4compile.weights.buffers import (
    BUFFERS,
    PackedWeight,
    buffer_shapes,
    is_extra_state,
    packed_in,
    tensors_of,
    tensors_to_write,
)
from fp4compile.weights.experts import states_of
from fp4compile.weights.integration import published_names, save_as_packed
from fp4compile.weights.linear import leave_fast_paths
from fp4compile.weights.published.conventions import CONFIG, HF_QUANT_CONFIG, read_published
from fp4compile.weights.published.expert_modules import in_model, without_unused
from fp4compile.weights.published.shards import (
    INDEX,
    Checkpoint,
    naming,
    parse_json,
    read_checkpoint,
    read_metadata,
    read_tensors,
    write_tensors,
)
from fp4compile.weights.replacements import METHOD, Weight, check_states, weights_of
from fp4compile.weights.scale_checks import check_buffers, check_model
from fp4compile.weights.sharing import (
    Sharing,
    arrange,
    check_shared,
    is_byte_float,
    repeats,
    restored,
    same_bits,
    share,
    sharing_of,
)

States = tuple[dict[str, dict], dict[str, dict]]  # of packed layers, and of packed experts, by name

_METADATA = "fp4compile"  # the key of `save_packed`'s entry in a file's metadata


# ---------------------------------------------------------------- saving


def save_packed(model: nn.Module, path: str | PathLike) -> None:
    """Write the state of a model with packed layers to a safetensors file: parameters and persistent buffers.

    Equal tensors of one memory are written once; a module's other extra state is not written, with a warning. An
    existing file stays until the new one is complete. Temporary files of an earlier, killed process are removed.

    Raises TypeError if `model` is no module; ValueError if it has no packed layer, tensors that are sharded or on the
    meta device, or a packed weight that was not finite; OSError where the file cannot be written.
    """
    model = unwrapped(model)
    packed, state = packed_in(model), tensors_to_write(model)
    layers, experts = states_of(packed)
    state |= _shared_scales(packed, state)
    for key in model.state_dict():
        name = key.rpartition(".")[0]
        if is_extra_state(key) and name not in packed:
            warnings.warn(f"{path}: the extra state of {name!r} is not written", stacklevel=2)
    check_model(packed, state)
    tensors, sharing = arrange(state)
    metadata = {_METADATA: json.dumps({"layers": layers, "experts": experts, **vars(sharing)})}
    if sharing.aliases.keys() == set(sharing.tied):  # other loaders restore only the model's tied tensors
        metadata["format"] = "pt"  # which they require
    write_atomically(path, lambda file: write_tensors(tensors, file, metadata))


def _shared_scales(packed: dict[str, PackedWeight], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The linear scales in `state` of layers with swizzled buffers; layers that share a buffer share one tensor."""
    made: dict[tuple, torch.Tensor] = {}
    swizzled = (
        (f"{name}.weight_scales".removeprefix("."), one)
        for name, one in packed.items()
        if one.scale_layout == "swizzled"
    )
    return {name: made.setdefault(_place(layer), state[name]) for name, layer in swizzled if name in state}


def _place(layer: PackedWeight) -> tuple:
    """A key that is equal for layers whose block scales have the same memory, shape and dtype."""
    scales = layer.weight_scales
    return scales.untyped_storage()._cdata, scales.storage_offset(), buffer_shapes(layer)["weight_scales"]


# ---------------------------------------------------------------- loading


def load_packed(
    model: nn.Module,
    path: str | PathLike,
    device: str | torch.device | None = None,
    *,
    recipe: str | dict | Recipe | Path | None = None,
) -> None:
    """Replace layers of an unpacked model by packed layers of a file, and fill its other tensors, in place.

    model: a model with the architecture of the saved model.
    path: a file of `save_packed`; a directory that `save_pretrained` of a packed transformers model wrote; or a
        checkpoint, as a directory or as a file beside its configuration: of ModelOpt or compressed-tensors in NVFP4,
        MXFP8, MXFP4 or FP8, of quant_method "fp8" or "mxfp8" (DeepSeek, Qwen, MiniMax), or with experts in MXFP4 as
        gpt-oss was published. See `docs/experts.md` for experts.
    device: the device for parameters and buffers on the meta device; None: the CPU. All other tensors stay in place.
    recipe: only for gpt-oss' files, which have no format of activations: the recipe's fprop_x, an MX format, quantises
        them in the layers that its rules do not skip. None leaves activations unquantised.

    Tensors that shared memory when the file was written share it again. Everything is checked before the model is
    changed.

    Raises TypeError if `model` is no module or `device` of another type; OSError for a file that cannot be read;
    ValueError for a device that is not there or is the meta device, for a file that is broken or of no known kind, for
    scales that no finite weight has, for layers, experts or tensors that do not fit the model, for buffers on the meta
    device that the file lacks, and for a recipe that does not fit.
    """
    check_module(model)
    model, target = unwrapped(model), _device(device)
    with torch.inference_mode(False):  # a tensor that inference mode makes takes no part in training
        states, stored, sharing = _contents(model, path, recipe)
        with naming(path):
            packed = weights_of(model, *states)
        replaced = {name for weight in packed for name in weight.parameters}
        kept = {name: tensor for name, tensor in tensors_of(model).items() if name not in replaced}
        _add_tied(stored, kept)
        _check_meta(model, replaced | kept.keys())
        with naming(path):
            expected = _expected(model, kept, packed)
            _check_tensors(stored, expected)
            _check_sharing(sharing, expected)
            check_buffers(_buffers(packed, stored))
            _check_twins(stored, packed)
            check_shared(stored, kept)
        _insert(model, packed, stored, target)
        _materialise(model, stored, target)
        for name, tensor in kept.items():
            if not tensor.is_meta:
                _fill(tensor, stored[name])
        if sharing is not None:
            share(model, sharing)
        _lay_out_scales(model)  # at the end, because files hold linear scales
        leave_fast_paths(model)
        save_as_packed(model)


def _contents(
    model: nn.Module, path: str | PathLike, recipe: str | dict | Recipe | Path | None
) -> tuple[States, dict[str, torch.Tensor], Sharing | None]:
    """States, tensors by name and sharing of a file of `save_packed` or of another library's checkpoint."""
    place = Path(path)
    if place.name == INDEX:
        raise ValueError(f"{place}: expected a checkpoint's directory, got the index in it")
    if place.is_dir() or _METADATA not in read_metadata(place):
        checkpoint = read_checkpoint(place, (CONFIG, HF_QUANT_CONFIG))
        if (states := _saved_by_transformers(checkpoint)) is not None:
            if recipe is not None:
                raise ValueError(
                    "recipe: what save_pretrained wrote says itself how its layers multiply; expected None"
                )
            return states, checkpoint.tensors, None
        chosen = None if recipe is None else resolve(recipe)
        names = published_names(model)
        contents = read_published(without_unused(model, checkpoint, names), chosen)
        with naming(path):
            contents = in_model(model, contents, names)
        return (contents.layers, contents.experts), contents.tensors, None
    if recipe is not None:
        raise ValueError("recipe: a file of save_packed says itself how its layers multiply; expected None")
    return _read(place)


def _saved_by_transformers(checkpoint: Checkpoint) -> States | None:
    """The states in a directory that `save_pretrained` wrote for a packed model; None for another checkpoint."""
    described = checkpoint.configs.get(CONFIG, {}).get("quantization_config")
    if not isinstance(described, dict) or described.get("quant_method") != METHOD:
        return None
    states: Any = described.get("layers"), described.get("experts")
    with naming(checkpoint.folder / CONFIG):
        check_states(*states)
    return states


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


def _read(path: Path) -> tuple[States, dict[str, torch.Tensor], Sharing | None]:
    """States, tensors by name and sharing of a file of `save_packed`; sharing is None for a file of version 0.1."""
    metadata, tensors = read_metadata(path)[_METADATA], read_tensors(path)
    with naming(path):
        try:
            content = parse_json(metadata)
            if not isinstance(content, dict):
                raise ValueError(f"expected an object, got {type(content).__name__}")
            states: Any = content.get("layers"), content.get("experts", {})  # files of version 0.1 lack experts
            check_states(*states)
            sharing = sharing_of(content)
        except ValueError as error:
            raise ValueError(f"its metadata is not what fp4compile.save_packed writes: {error}") from error
        return states, restored(tensors, sharing), sharing if "tied" in content else None


# ---------------------------------------------------------------- checks before the model is changed


def _expected(model: nn.Module, kept: dict[str, torch.Tensor], packed: list[Weight]) -> dict[str, tuple]:
    """The shape and dtype of every tensor that the packed model will have, by name."""
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in kept.items()}
    for weight in packed:
        shapes = buffer_shapes(weight.empty(model))
        expected |= {f"{name}.{buffer}": shape for name in weight.packed_names for buffer, shape in shapes.items()}
    return expected


def _add_tied(stored: dict[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
    """Add tied tensors (such as embeddings) that the file holds only under another of their names."""
    first: dict[int, str] = {}
    for name, tensor in kept.items():
        if name in stored:
            first.setdefault(id(tensor), name)
    stored |= {name: stored[first[id(t)]] for name, t in kept.items() if name not in stored and id(t) in first}


def _check_tensors(stored: dict[str, torch.Tensor], expected: dict[str, tuple]) -> None:
    """Raise ValueError if tensors of a file are missing, unknown, or of another shape or dtype than expected.

    Bytes, and the integers of block scales, are viewed as the expected dtype if the sizes are equal.
    """
    for name, (shape, dtype) in expected.items():
        if name not in stored:
            raise ValueError(f"tensor {name!r} is missing")
        as_bits = is_byte_float(dtype) or name.endswith(".weight_scales")
        if as_bits and stored[name].dtype == integer_dtype(dtype):
            stored[name] = stored[name].view(dtype)
        found = stored[name]
        if tuple(found.shape) != tuple(shape) or found.dtype != dtype:
            castable = found.dtype.is_floating_point and dtype.is_floating_point and not is_byte_float(dtype)
            hint = f": make the model in {found.dtype}" if castable and found.shape == torch.Size(shape) else ""
            raise ValueError(
                f"tensor {name!r} is {found.dtype} {tuple(found.shape)}, the model needs {dtype} {tuple(shape)}{hint}"
            )
    unknown = sorted(name for name in set(stored) - set(expected) if not is_extra_state(name))
    if unknown:
        raise ValueError(f"the model has no {unknown[0]!r}")


def _check_sharing(sharing: Sharing | None, expected: dict[str, tuple]) -> None:
    """Raise ValueError if a tensor that shares memory in a file is no tensor of the model."""
    aliases = {} if sharing is None else sharing.aliases
    named = {*aliases, *aliases.values()}
    if named - expected.keys():
        raise ValueError(f"the model has no {min(named - expected.keys())!r}")


def _buffers(packed: list[Weight], stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file that are buffers of packed layers, by name."""
    names = (f"{name}.{buffer}" for weight in packed for name in weight.packed_names for buffer in BUFFERS)
    return {name: stored[name] for name in names if name in stored}


def _check_twins(stored: dict[str, torch.Tensor], packed: list[Weight]) -> None:
    """Raise ValueError if the file has different packed weights under the names of one layer of the model."""
    for weight in packed:
        for buffer in BUFFERS:
            found = [stored[key] for name in weight.packed_names if (key := f"{name}.{buffer}") in stored]
            if not all(same_bits(tensor, found[0]) for tensor in found):
                names = " and ".join(map(repr, weight.packed_names))
                raise ValueError(f"{names} are one layer of the model, the file has different weights for them")


def _check_meta(model: nn.Module, restored: set[str]) -> None:
    """Raise ValueError if a tensor of the model is on the meta device, and loading does not fill it."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in tensors:
        if tensor.is_meta and name not in restored:
            raise ValueError(f"model: {name!r} is on the meta device, and the file has only parameters and persistent "
                             "buffers: give it values first")  # fmt: skip


# ---------------------------------------------------------------- changing the model


def _insert(model: nn.Module, packed: list[Weight], stored: dict[str, torch.Tensor], target: torch.device) -> None:
    """Insert the packed layers into the model. Each weight is freed as it is replaced."""
    made: dict[tuple, PackedWeight] = {}
    for weight in packed:
        name = weight.packed_names[0]
        # A layer with several names in the model remains one layer if the file has one weight for all names.
        holder, child = weight.slot(model)
        key = (id(holder), child, stored[f"{name}.weight_data"].data_ptr())
        del holder
        if key not in made:
            layer, old = weight.empty(model), weight.parameter(model)
            device = target if old.is_meta else old.device
            del old
            for buffer in buffer_shapes(layer):
                setattr(layer, buffer, stored[f"{name}.{buffer}"].to(device))
            made[key] = layer
        weight.put(model, made[key])


def _lay_out_scales(model: nn.Module) -> None:
    """Convert the scales of packed layers to their devices' layouts. Layers that share scales still share them."""
    sharing: dict[tuple, list[PackedWeight]] = {}
    for layer in model.modules():
        if isinstance(layer, PackedWeight):
            layer.keep_static_scale()
        if isinstance(layer, PackedWeight) and layer.weight_scales is not None:
            layout = layer.scale_layout_on(layer.weight_scales.device)
            if layout != layer.scale_layout:
                sharing.setdefault((layout, *_place(layer)), []).append(layer)
    for (layout, *_), layers in sharing.items():
        scales = layers[0].scales_as(layout, layers[0].weight_scales)
        for layer in layers:
            layer.weight_scales = scales


def _materialise(model: nn.Module, stored: dict[str, torch.Tensor], target: torch.device) -> None:
    """Replace the tensors on the meta device by stored ones; an object with several names remains one object."""
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
    """A tensor or parameter with `values`, and with the type, requires_grad and attributes of `old`."""
    new = nn.Parameter(values, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else values
    vars(new).update(vars(old))
    return new


def _fill(tensor: torch.Tensor, values: torch.Tensor) -> None:
    if repeats(tensor):  # torch refuses to write to such a tensor
        tensor.data = values.to(tensor.device)
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # only that mode may write to its tensors
        tensor.copy_(values)
