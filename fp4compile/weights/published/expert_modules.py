"""Combine a checkpoint's separate experts into the parameters [experts, out, in] of a model.

Experts are stacked, and each expert's layers (gate and up) are concatenated along the out features. Each expert has
one global scale; where those of an expert's layers differ, they become row scales. All experts have one static scale of
the activations, the largest of theirs, so that no further value saturates.
"""

import re
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils import parametrize

from fp4compile.analysis.module_names import packed_name
from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.ops.quantize import DEQUANTIZE
from fp4compile.weights.buffers import BUFFERS, PackedWeight
from fp4compile.weights.experts import places_of
from fp4compile.weights.linear import is_linear, sizes
from fp4compile.weights.published.conventions import DIFFERENT_SCALES
from fp4compile.weights.published.expert_names import Experts, ModelTensor, PublishedNames, expert_of
from fp4compile.weights.published.shards import Checkpoint, Contents
from fp4compile.weights.sharing import is_byte_float


def without_unused(model: nn.Module, checkpoint: Checkpoint, names: PublishedNames) -> Checkpoint:
    """A checkpoint without the tensors that a model's class leaves out, such as layers that predict further tokens.

    Warns of them. Their formats need not be known.
    """
    present = set(model.state_dict())
    left = [name for name in checkpoint.tensors if _is_unused(name, present, names)]
    if not left:
        return checkpoint
    warnings.warn(f"some tensors of the checkpoint, such as {left[0]!r}, are not used: the class of the model leaves "
                  "them out", stacklevel=4)  # fmt: skip
    kept = checkpoint.tensors.keys() - set(left)
    return replace(checkpoint, tensors={name: one for name, one in checkpoint.tensors.items() if name in kept})


def _is_unused(name: str, present: set[str], names: PublishedNames) -> bool:
    """Whether a class leaves out a tensor, or the weight of the layer that it is part of, and the model has neither."""
    layer, _, own = name.rpartition(".")
    both = {name} if own == "bias" else {name, f"{layer}.weight"}
    return any(map(names.is_unused, both)) and present.isdisjoint(names.target(one).name for one in both)


def in_model(model: nn.Module, contents: Contents, names: PublishedNames) -> Contents:
    """The contents of a checkpoint under the names of a model, with its experts combined.

    Removes tensors from `contents` as they are used, to free them. Warns where the activation scales of experts differ,
    and of scales of a KV cache, which are skipped. Raises ValueError, naming the tensor or the layer, for what does not
    fit the model or other layers of an expert. Layers of a class that multiplies otherwise than `nn.Linear` are
    dequantised, with a warning.
    """
    _leave_scales(model, contents, names)
    modules = dict(model.named_modules(remove_duplicate=False))
    dequantised = _dequantise(modules, contents, names)
    targets = {name: _target(name, contents, names) for name in contents.tensors}
    found = Contents(experts=dict(contents.experts), dequantised=dequantised)
    for layer, state in contents.layers.items():
        target = names.layer(layer)
        if not target.leaves:
            module = modules.get(target.name)
            linear = module is not None and is_linear(module)
            found.layers[target.name] = _fitted(contents, layer, sizes(module)[0]) if linear else state
    known = set(model.state_dict()) | {f"{layer}.{buffer}" for layer in found.layers for buffer in BUFFERS}
    # A tensor that the model does not have keeps its name for the error message below.
    renamed = {name: target.name if target.name in known else name
               for name, target in targets.items() if not target.leaves}  # fmt: skip
    _rename(contents, renamed, found)
    scales = [_put_together(model, experts, contents, found) for experts in _experts(targets)]
    _turn(model, found)
    _check_codes(model, modules, found.tensors)
    unknown = next(iter(contents.tensors), None)
    if unknown is not None:
        raise ValueError(f"the model has no {unknown.rpartition('.')[0]!r}")
    if any(len(one) > 1 for one in scales):
        warnings.warn(DIFFERENT_SCALES, stacklevel=4)
    return found


def parts_of(experts: Experts, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each layer of experts, and a copy of its part of a tensor [experts, out, ...] or [experts]."""
    for expert, one in enumerate(tensor):
        layers = experts.layers(expert)
        rows = one.chunk(len(layers)) if one.dim() else [one] * len(layers)
        yield from ((layer, part.clone()) for layer, part in zip(layers, rows, strict=True))


_BY_ROWS = {"float8_tensor": "float8_rowwise", "nvfp4": "nvfp4_rowwise"}  # formats with a global and with row scales
# Names of the scales by which attention quantises queries, keys, values, probabilities or their cache.
_ATTENTION_SCALES = re.compile(
    r"""
    (.*[._])? ( (q|k|v|p|kv|qkv|prob|softmax|attn|k_cache|v_cache|kv_cache)_(scale|scale_2|scaling_factor|zero_point|zp)
              | [kv]_proj\.output_scale | [qkv]_bmm_quantizer\._?(amax|scale|bias_value) | [kv]_proj\.[kv]_bias )""",
    re.VERBOSE,
)


def _leave_scales(model: nn.Module, contents: Contents, names: PublishedNames) -> None:
    """Skip, with a warning, scales of a KV cache that a model does not have."""
    present = set(model.state_dict())
    scales = [name for name in contents.tensors
              if _ATTENTION_SCALES.fullmatch(name) and names.target(name).name not in present]  # fmt: skip
    for name in scales:
        del contents.tensors[name]
    if scales:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in scales}))
        warnings.warn(f"the KV cache is not quantised; {len(scales)} of its scales ({kinds}), such as {scales[0]!r}, "
                      "are not used", stacklevel=5)  # fmt: skip


def _dequantise(modules: dict[str, nn.Module], contents: Contents, names: PublishedNames) -> list[str]:
    """Replace packed layers for which a model has an `nn.Embedding`, or a subclass of `nn.Linear`, by their weights.

    Returns their names in the model. A packed layer has no forward of the subclass, such as DeepSeek-V4's product by
    groups.
    """
    found, kinds = [], set()
    for layer, state in list(contents.layers.items()):
        target = names.layer(layer)
        module = modules.get(target.name)
        if target.leaves or not isinstance(module, nn.Embedding | nn.Linear) or isinstance(module, PackedWeight):
            continue
        if type(module) is nn.Linear or parametrize.is_parametrized(module):
            continue
        stored, own = (state["out_features"], state["in_features"]), tuple(module.weight.shape)
        if own != stored:
            raise ValueError(f"layer {target.name!r}: the file has a weight of shape {stored}, the model of {own}")
        buffers = {buffer: contents.tensors.pop(f"{layer}.{buffer}", None) for buffer in BUFFERS}
        del contents.layers[layer]
        data, scales, outer = (buffers[one] for one in ("weight_data", "weight_scales", "weight_outer"))
        contents.tensors[f"{layer}.weight"] = DEQUANTIZE(
            data, scales, outer, state["weight"], state["in_features"], module.weight.dtype
        )
        found.append(target.name)
        kinds.add(type(module).__name__)
    if found:
        warnings.warn(f"{len(found)} quantised layers, such as {found[0]!r}, are read in high precision: the model has "
                      f"them as {', '.join(sorted(kinds))}, which computes in its own way", stacklevel=5)  # fmt: skip
    return found


def _turn(model: nn.Module, found: Contents) -> None:
    """Transpose experts of which only the model tells that it has them as [experts, in, out]."""
    places = {name: place for place in places_of(model, is_linear) for name in place.names}
    for name, state in found.experts.items():
        if state["in_first"] is not None:
            continue
        state["in_first"] = name in places and bool(places[name].in_first)
        if state["in_first"]:
            codes = f"{packed_name(name)}.weight_data"
            found.tensors[codes] = found.tensors[codes].mT.contiguous()
            state |= {"in_features": state["out_features"], "out_features": state["in_features"]}


def _check_codes(model: nn.Module, modules: dict[str, nn.Module], tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for codes that are in no packed layer: transformers would cast them, without their scales."""
    own = model.state_dict()
    for name, tensor in tensors.items():
        holder, _, child = name.rpartition(".")
        codes = tensor.dtype in (torch.uint8, torch.int8) or is_byte_float(tensor.dtype)
        if not codes or child in BUFFERS or holder not in modules:
            continue
        if name not in own or own[name].dtype.itemsize > 1:
            raise ValueError(f"tensor {name!r} is {tensor.dtype}: codes of a weight in a layout that is not known here")


def _target(name: str, contents: Contents, names: PublishedNames) -> ModelTensor:
    """The place of a tensor in the model; a packed layer's buffers have the place of its weight."""
    layer, _, buffer = name.rpartition(".")
    if layer not in contents.layers or buffer not in BUFFERS:
        return names.target(name)
    target = names.layer(layer)
    return target if target.leaves else ModelTensor(f"{target.name}.{buffer}")


def _rename(contents: Contents, renamed: dict[str, str], found: Contents) -> None:
    """Move tensors from `contents` to `found`, under their new names."""
    for name, target in renamed.items():
        if target in found.tensors:
            twins = [one for one in renamed if renamed[one] == target]
            raise ValueError(f"tensors {twins[0]!r} and {twins[1]!r} are both {target!r} of the model")
        found.tensors[target] = contents.tensors.pop(name)


def _experts(targets: dict[str, ModelTensor]) -> list[Experts]:
    """The parameters of experts of which a checkpoint has parts, each once."""
    found: dict[Experts, None] = {}
    for name, target in targets.items():
        place = expert_of(name.rpartition(".")[0])
        if target.leaves and place is not None:
            found[Experts(target.name, place[0], target.leaves)] = None
    return list(found)


def _put_together(model: nn.Module, experts: Experts, contents: Contents, found: Contents) -> set[float | None]:
    """Move the layers of experts from `contents` to `found` as one parameter; returns their activation scales."""
    if experts.name in found.tensors:
        raise ValueError(f"the experts {experts.prefix!r} and another tensor are both {experts.name!r} of the model")
    count, outer, inner = _shape(model, experts)
    layers = [experts.layers(expert) for expert in range(count)]
    flat = [layer for one in layers for layer in one]
    contents.layers.update({layer: _fitted(contents, layer, inner) for layer in flat if layer in contents.layers})
    _check(experts, flat, (outer // len(experts.leaves), inner), contents)
    _by_rows(layers, contents)
    states = [contents.layers[layer] for layer in flat if layer in contents.layers]
    if not states:
        found.tensors[experts.name] = _stacked(contents, layers, "weight")
        return set()
    for buffer in BUFFERS:
        if f"{flat[0]}.{buffer}" in contents.tensors:
            one_each = buffer == "weight_outer" and contents.tensors[f"{flat[0]}.{buffer}"].dim() == 0
            join = _one_each if one_each else _stacked
            found.tensors[f"{packed_name(experts.name)}.{buffer}"] = join(contents, layers, buffer)
    outers = {state["activation_outer"] for state in states}
    found.experts[experts.name] = states[0] | {
        "activation_outer": max(outers - {None}, default=None), "out_features": outer, "experts": count,
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


def _check(experts: Experts, layers: list[str], shape: tuple[int, int], contents: Contents) -> None:
    """Raise ValueError if a layer of experts is missing, or has another shape or format than the first layer."""
    for layer in layers:
        if layer not in contents.layers and f"{layer}.weight" not in contents.tensors:
            raise ValueError(f"tensor '{layer}.weight' is missing")
        if (found := _sizes(contents, layer)) != shape:
            raise ValueError(f"layer {layer!r}: the file has out and in features {found}, as a part of "
                             f"{experts.name!r} the model has {shape}")  # fmt: skip
        state = contents.layers.get(layer)
        block = None if state is None else formats.get(state["weight"]).block
        if block is not None and len(experts.leaves) > 1 and shape[0] % block[0]:
            raise ValueError(f"layer {layer!r}: its {shape[0]} rows are no whole blocks of {block[0]}; as a part of "
                             f"{experts.name!r} they would have to be")  # fmt: skip
        first, fmt = _format(contents, layers[0]), _format(contents, layer)
        if first != fmt:
            raise ValueError(f"layers {layers[0]!r} and {layer!r} are {first} and {fmt}; as parts of {experts.name!r} "
                             "they must have the same format")  # fmt: skip


def _by_rows(layers: list[list[str]], contents: Contents) -> None:
    """Replace global scales by equal row scales if the layers of an expert have different ones."""
    flat = [layer for one in layers for layer in one if layer in contents.layers]
    by_rows = _BY_ROWS.get(contents.layers[flat[0]]["weight"]) if flat else None
    scales = {layer: contents.tensors[f"{layer}.weight_outer"] for layer in flat if by_rows is not None}
    if by_rows is None or all(torch.equal(scales[layer], scales[one[0]]) for one in layers for layer in one):
        return
    for layer in flat:
        contents.layers[layer] |= {"weight": by_rows}
        rows = contents.layers[layer]["out_features"]
        contents.tensors[f"{layer}.weight_outer"] = scales[layer].expand(rows, 1).contiguous()


def _fitted(contents: Contents, layer: str, inner: int) -> dict:
    """A packed layer's state with the model's in features, if the file pads them with zeros.

    A row in FP4 has whole bytes; other libraries, and earlier versions of this one, write whole blocks.
    """
    state = contents.layers[layer]
    fmt, stored = formats.get(state["weight"]), state["in_features"]
    if inner >= stored or ceil_div(inner, fmt.block_cols) != ceil_div(stored, fmt.block_cols):
        return state
    codes = contents.tensors[f"{layer}.weight_data"].view(torch.uint8)
    split = fmt.packed and inner % 2 == 1 and bool((codes[:, inner // 2] >> 4).any())
    padded = not split and not codes[:, ceil_div(inner, 2) if fmt.packed else inner :].any()
    return state | {"in_features": inner} if padded else state


def _sizes(contents: Contents, layer: str) -> tuple[int, ...]:
    """(out features, in features) of a layer, packed or not."""
    state = contents.layers.get(layer)
    if state is None:
        return tuple(contents.tensors[f"{layer}.weight"].shape)
    return state["out_features"], state["in_features"]


def _format(contents: Contents, layer: str) -> str:
    """The formats of a layer as a text, for comparisons and messages."""
    state = contents.layers.get(layer)
    if state is None:
        return f"{contents.tensors[f'{layer}.weight'].dtype}"
    return f"{state['weight']} with activations in {state['activation']}"


def _stacked(contents: Contents, layers: list[list[str]], tensor: str) -> torch.Tensor:
    """A tensor of all experts' layers, concatenated for each expert and stacked: [experts, out, ...]."""
    parts = [contents.tensors.pop(f"{layer}.{tensor}") for one in layers for layer in one]
    dtype = parts[0].dtype
    # As bytes, because not every operator takes one-byte floating-point dtypes.
    stored = torch.uint8 if is_byte_float(dtype) else dtype
    return torch.cat([part.view(stored) for part in parts]).unflatten(0, (len(layers), -1)).view(dtype)


def _one_each(contents: Contents, layers: list[list[str]], tensor: str) -> torch.Tensor:
    """A tensor [] that is equal in all layers of an expert, stacked: [experts]."""
    scales = [[contents.tensors.pop(f"{layer}.{tensor}") for layer in one] for one in layers]
    return torch.stack([one[0] for one in scales])
