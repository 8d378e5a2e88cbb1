"""`export_packed`: write a packed model in the file layout of ModelOpt, compressed-tensors, DeepSeek or gpt-oss."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile.analysis.module_names import name_in_state, parameter_name, walk
from fp4compile.formats import formats
from fp4compile.formats.formats import unknown_name
from fp4compile.formats.layouts import ceil_div
from fp4compile.report.names import unwrapped
from fp4compile.weights.buffers import SHARDED, PackedWeight, packed_in, tensors_to_write
from fp4compile.weights.experts import PackedExperts
from fp4compile.weights.fused_groups import fused_groups, lost_by_one_scale
from fp4compile.weights.integration import published_names
from fp4compile.weights.published.conventions import (
    CONFIG,
    HF_QUANT_CONFIG,
    LAYOUTS,
    Layout,
    inverted,
    is_nvfp4,
)
from fp4compile.weights.published.expert_modules import parts_of
from fp4compile.weights.published.expert_names import PublishedNames
from fp4compile.weights.published.gpt_oss import MXFP4, written_experts
from fp4compile.weights.published.quantization_config import MODELOPT_SCHEMES, MX_BLOCKS, POWERS_OF_TWO, Scheme
from fp4compile.weights.published.shards import Checkpoint, write_checkpoint
from fp4compile.weights.scale_checks import check_model
from fp4compile.weights.sharing import arrange


def export_packed(
    model: nn.Module, path: str | PathLike, layout: str = "modelopt", *, max_shard_size: int = 5 * 2**30
) -> None:
    """Write a model with packed layers or experts to a directory, in the checkpoint layout of another library.

    path: a directory; it is created if there is none.
    layout: "modelopt" or "compressed-tensors", which take NVFP4 with static activation scales or weights only, MXFP8,
        MXFP4 and FP8 with global or row scales, different ones in different layers. Both take weights alone in FP8
        blocks of 128; compressed-tensors also such blocks of weights and activations, dynamic global scales, and
        weights alone in MXFP8, MXFP4 and FP8. "fp8": DeepSeek's and transformers', which takes FP8 in blocks of 128 or
        with global scales, or MXFP8 weights in blocks of 32x32, one scheme in all layers. "mxfp8": MiniMax-M3's, which
        takes MXFP8 weights and activations. "mxfp4": gpt-oss', which takes experts in MXFP4 that the model stores as
        [experts, in, out]. Its files have no format of activations.
    max_shard_size: in bytes. A larger model is written in several files with an index.

    The directory gets the tensors, hf_quant_config.json (ModelOpt), and config.json with a quantization_config. Codes
    and scales are written unchanged; compressed-tensors' divisors are exact for bf16 and fp16 weights. Packed experts
    are written one by one, except in "mxfp4". All tensors have the names of published checkpoints where transformers
    has a mapping for the model.

    Raises TypeError if `model` is no module; ValueError for an unknown layout, for a model without packed layers, for
    one inside of a wrapper or with adapters, whose names checkpoints do not have, for experts without known names, for
    formats that the layout does not have, for activations without the static scale that it stores, for packed weights
    that were not finite, for tensors that are sharded or on the meta device, for a bad max_shard_size, and for a
    directory that has safetensors files; OSError where it cannot be written. The next attempt removes any files of an
    aborted one.
    """
    if layout not in (*LAYOUTS, MXFP4):
        raise ValueError(unknown_name("layout", layout, (*LAYOUTS, MXFP4)))
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise ValueError(f"max_shard_size: expected a positive number of bytes, got {max_shard_size!r}")
    model = unwrapped(model)
    packed, names, state = packed_in(model), published_names(model), tensors_to_write(model)
    _check_names(model)
    check_model(packed, state)
    tensors = _plain(packed, names, state)
    matrices = (name for name, tensor in tensors.items() if name.endswith(".weight") and tensor.dim() == 2)
    left = sorted(name.removesuffix(".weight") for name in matrices)
    if layout == MXFP4:
        tensors |= _mxfp4_experts(packed, names, state)
        configs: dict[str, dict[str, Any]] = {CONFIG: {"quant_method": MXFP4, "modules_to_not_convert": left}}
    else:
        layers = _layers(packed, LAYOUTS[layout], names, state)
        _warn_of_groups(layers, LAYOUTS[layout])
        for name, layer in layers.items():
            tensors |= {f"{name}.{suffix}": tensor for suffix, tensor in layer.tensors.items()}
        configs = _CONFIGURATIONS[layout]({name: layer.scheme for name, layer in layers.items()}, left)
    configs[CONFIG] = _described(model) | {"quantization_config": configs[CONFIG]}
    write_checkpoint(Path(path), Checkpoint(Path(path), tensors, configs), max_shard_size)


def _described(model: Any) -> dict[str, Any]:
    """The configuration of a transformers model as its `save_pretrained` writes it; of another model, {}.

    A model may have been cast, or made from a configuration alone, since its configuration was read. Engines take the
    dtype of activations and the class of the model from it.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    described: dict[str, Any] = config.to_dict()
    if hasattr(model, "save_pretrained") and isinstance(getattr(model, "dtype", None), torch.dtype):
        described |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    return described


def _check_names(model: nn.Module) -> None:
    """Raise ValueError if a wrapper or an adapter adds to the name of a packed layer."""
    for named, module in walk(model):
        if isinstance(module, PackedWeight) and name_in_state(named.path) != named.name:
            raise ValueError(f"model: {named.path!r} has a name that no checkpoint has: merge adapters "
                             "(merge_and_unload), or pass the model inside of its wrapper")  # fmt: skip


@dataclass(frozen=True)
class _ExportedLayer:
    """A linear layer to write. scheme: its formats. tensors: its tensors by the last part of their names."""

    scheme: Scheme
    tensors: dict[str, torch.Tensor]


def _layers(
    packed: dict[str, PackedWeight], layout: Layout, names: PublishedNames, state: dict[str, torch.Tensor]
) -> dict[str, _ExportedLayer]:
    """The layers to write, by name: packed layers, and the layers of each expert.

    A layer with two names is written under both: readers look for each name, and files hold no tensor twice.
    """
    found: dict[str, _ExportedLayer] = {}
    written: set[int] = set()
    for name, module in packed.items():
        if module.in_first:
            raise ValueError(f"model: {name!r} has its weight as [in, out], which these layouts do not hold")
        scheme = _scheme(name, module, layout.name)
        for buffer, suffix in layout.tensor_names(scheme).items():
            for layer, part in _parts(module, name, names, _buffer(module, name, buffer, state)):
                stored = _stored(layout, scheme, buffer, part, module.in_features)
                stored = stored.clone() if id(module) in written else stored
                found.setdefault(layer, _ExportedLayer(scheme, {})).tensors[suffix] = stored
        written.add(id(module))
    return found


def _mxfp4_experts(
    packed: dict[str, PackedWeight], names: PublishedNames, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of packed experts in gpt-oss' layout."""
    found: dict[str, torch.Tensor] = {}
    for name, module in packed.items():
        weight = names.source(parameter_name(name)) if isinstance(module, PackedExperts) and module.in_first else None
        if not isinstance(weight, str) or module.layer_format.weight != "mxfp4" or module.in_features % 32:
            raise ValueError(f"model: layout 'mxfp4' holds experts [experts, in, out] with weights in mxfp4, of a "
                             f"multiple of 32 in features; got {name!r}, {module}")  # fmt: skip
        found |= written_experts(weight, *(_buffer(module, name, part, state) for part in SHARDED))
    return found


def _warn_of_groups(layers: dict[str, _ExportedLayer], layout: Layout) -> None:
    """Warn where NVFP4 layers that engines multiply as one weight have different global scales."""
    nvfp4 = {name: layer for name, layer in layers.items() if layout.outer in layer.tensors}
    lost = []
    for group in fused_groups(nvfp4):
        scales = {name: nvfp4[name].tensors[layout.outer].item() for name in group}
        lost.append(lost_by_one_scale({name: 1 / one if layout.divides else one for name, one in scales.items()}))
    found = [one for one in lost if one is not None]
    if found:
        name, sqnr = min(found, key=lambda one: one[1])
        warnings.warn(
            f"{len(found)} groups of layers (q, k and v; gate and up) have different global scales. An engine that "
            f"multiplies a group as one weight takes the largest: the SQNR of {name!r} falls to {sqnr:.1f} dB at most. "
            "pack_(shared_scales=True) gives a group one scale",
            stacklevel=3,
        )


def _parts(
    module: PackedWeight, name: str, names: PublishedNames, tensor: torch.Tensor
) -> Iterable[tuple[str, torch.Tensor]]:
    """The names of a packed weight's layers in the checkpoint, each with its part of one of the weight's tensors."""
    if not isinstance(module, PackedExperts):
        return [(str(names.source(f"{name}.weight")).removesuffix(".weight"), tensor)]
    experts = names.source(parameter_name(name))
    if isinstance(experts, str):
        raise ValueError(f"model: {name!r} has packed experts, whose names in checkpoints are not known")
    fmt, rows = formats.get(module.layer_format.weight), module.out_features // len(experts.leaves)
    if fmt.block is not None and len(experts.leaves) > 1 and rows % fmt.block[0]:
        raise ValueError(f"model: {parameter_name(name)!r} is packed in {fmt.name}, and its parts {experts.leaves} in "
                         f"files have {rows} rows each, no whole blocks of {fmt.block[0]}: a block spans both parts. "
                         "Pack it in another format, or skip it by a rule")  # fmt: skip
    return parts_of(experts, tensor)


def _scheme(name: str, layer: PackedWeight, layout: str) -> Scheme:
    """The quantisation scheme of a packed layer in a layout."""
    fmt = layer.layer_format
    static = fmt.activation_outer is not None
    scheme = Scheme(fmt.weight, fmt.activation, static)
    allowed = _allowed(layout)
    if scheme not in allowed and replace(scheme, static=True) in allowed:
        raise ValueError(f"layer {name!r}: {layout} stores a static scale of its {fmt.activation} activation, and it "
                         "is dynamic: pack under a recipe of fp4compile.calibrate")  # fmt: skip
    if scheme not in allowed:
        pairs = dict.fromkeys(f"{one.weight} with activations {one.activation or 'as they come'}" for one in allowed)
        raise ValueError(f"layer {name!r}: {layout} has no weights in {fmt.weight} with activations "
                         f"{fmt.activation or 'as they come'}; allowed are {', '.join(pairs)}")  # fmt: skip
    return scheme


def _allowed(layout: str) -> list[Scheme]:
    """The schemes that a layout holds."""
    if layout == "fp8":
        return [Scheme("float8_128x128", "float8_1x128"), POWERS_OF_TWO, Scheme("float8_tensor", "float8_tensor"),
                Scheme("float8_tensor", "float8_tensor", static=True), Scheme("mxfp8_32x32", "mxfp8")]  # fmt: skip
    if layout == "mxfp8":
        return [Scheme("mxfp8", "mxfp8")]
    allowed = list(MODELOPT_SCHEMES.values())
    if layout == "compressed-tensors":
        allowed += [Scheme("float8_128x128", "float8_1x128"), Scheme("float8_tensor", "float8_tensor")]
        allowed += [Scheme(weight, None) for weight in ("mxfp8", "mxfp4", "float8_tensor", "float8_rowwise")]
    return allowed


def _plain(
    packed: dict[str, PackedWeight], names: PublishedNames, state: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The unpacked tensors to write; only the first of several tensors with the same memory."""
    buffers = {f"{name}.{buffer}" for name, layer in packed.items() for buffer in layer._buffers}
    plain = {name: tensor for name, tensor in state.items() if name not in buffers}
    kept, _ = arrange(plain)
    written: dict[str, torch.Tensor] = {}
    for name in (name for name in state if name in kept):
        source = names.source(name)
        if isinstance(source, str):
            written[source] = kept[name]
        else:
            written |= {f"{layer}.weight": part for layer, part in parts_of(source, kept[name])}
    return written


def _buffer(layer: PackedWeight, name: str, buffer: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """A buffer of a packed weight, or the static global scale of its activation, repeated for each expert."""
    if buffer != "activation_outer":
        return state[f"{name}.{buffer}"].detach().cpu().contiguous()
    outer = torch.tensor(layer.layer_format.activation_outer, dtype=torch.float32, device="cpu")
    return outer if layer.experts is None else outer.expand(layer.experts)


def _stored(layout: Layout, scheme: Scheme, buffer: str, tensor: torch.Tensor, in_features: int) -> torch.Tensor:
    """A buffer of a packed layer as a checkpoint of this layout stores it: codes without padding."""
    fmt = formats.get(scheme.weight)
    if buffer.endswith("_outer"):
        divides = layout.divides and is_nvfp4(fmt)
        tensor = inverted(tensor, divisor=False) if divides else tensor.clone()
        if tensor.dim() == 2:  # row scales
            return tensor.flatten() if layout.name == "modelopt" else tensor
        return tensor.reshape(1) if layout.divides else tensor
    if buffer == "weight_data":
        return tensor[:, : ceil_div(in_features, 2) if fmt.packed else in_features].contiguous().view(fmt.data_dtype)
    # Files hold E8M0 scales as bytes. In DeepSeek's layout, transformers 5.10.1 would take such bytes for numbers.
    return tensor if fmt.scale == "e8m0" and layout.name != "fp8" else tensor.view(fmt.scale_dtype)


# ---------------------------------------------------------------- configurations


def _modelopt(schemes: dict[str, Scheme], left: list[str]) -> dict[str, dict[str, Any]]:
    """The configurations that ModelOpt writes. schemes: of the packed layers. left: other layers with a matrix."""
    names = {scheme: name for name, scheme in MODELOPT_SCHEMES.items()}
    entries = {
        layer: {"quant_algo": names[scheme]} | ({} if (block := formats.get(scheme.weight).block) is None else
                                                {"group_size": block[1]})
        for layer, scheme in schemes.items()
    }  # fmt: skip
    first, *others = entries.values()
    mixed = any(other != first for other in others)
    what: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "quantized_layers": entries} if mixed else first
    producer = {"name": "fp4compile", "version": version("fp4compile")}
    quantization = {**what, "kv_cache_quant_algo": None, "exclude_modules": left}
    return {
        HF_QUANT_CONFIG: {"producer": producer, "quantization": quantization},
        CONFIG: {**what, "ignore": left, "producer": producer, "quant_method": "modelopt"},
    }


def _compressed_tensors(schemes: dict[str, Scheme], left: list[str]) -> dict[str, dict[str, Any]]:
    """The configuration that compressed-tensors writes. See `_modelopt` for the arguments."""
    targets: dict[Scheme, list[str]] = {}
    for layer, scheme in schemes.items():
        targets.setdefault(scheme, []).append(layer)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(targets) == 1 else layers,
            "weights": _arguments(scheme.weight, False),
            "input_activations": _arguments(scheme.activation, _dynamic(scheme)),
            "output_activations": None,
            "format": _format(scheme.weight),
        }
        for i, (scheme, layers) in enumerate(targets.items())
    }
    names = {group["format"] for group in groups.values()}
    config = {
        "config_groups": groups,
        "format": names.pop() if len(names) == 1 else "mixed-precision",
        "ignore": left,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return {CONFIG: config}


def _dynamic(scheme: Scheme) -> bool | str:
    """The value of `dynamic` by which compressed-tensors describes the scales of activations."""
    if not scheme.static:
        return True
    return "local" if is_nvfp4(formats.get(scheme.weight)) else False


def _format(weight: str) -> str:
    fmt = formats.get(weight)
    return f"{weight}-pack-quantized" if fmt.packed else "mxfp8-quantized" if fmt.scale == "e8m0" else "float-quantized"


def _arguments(fmt: str | None, dynamic: bool | str) -> dict[str, Any] | None:
    """compressed-tensors' description of a format. dynamic: False, True, or "local" with a static global scale."""
    if fmt is None:
        return None
    found = formats.get(fmt)
    arguments = {"num_bits": 4 if found.packed else 8, "type": "float", "symmetric": True, "dynamic": dynamic}
    if fmt == "float8_128x128":
        return arguments | {"strategy": "block", "block_structure": [128, 128]}
    if found.block is None:
        strategy = "tensor" if found.outer == "tensor" else "channel" if dynamic is False else "token"
        return arguments | {"strategy": strategy}
    arguments |= {"group_size": found.block_cols, "strategy": "tensor_group" if is_nvfp4(found) else "group"}
    if found.scale_dtype == torch.float32:
        return arguments
    return arguments | {"scale_dtype": "torch.float8_e4m3fn" if is_nvfp4(found) else "torch.uint8"}


def _float8(schemes: dict[str, Scheme], left: list[str], method: str = "fp8") -> dict[str, dict[str, Any]]:
    """The configuration of quant_method "fp8" or "mxfp8", which have one scheme. See `_modelopt` for the arguments."""
    first, *others = dict.fromkeys(schemes.values())
    if others:
        raise ValueError(f"model: layout {method!r} holds layers of one scheme; got {first} and {others[0]}")
    block = [128, 128] if formats.get(first.weight).square else None
    config = {
        "quant_method": method, "fmt": "e4m3", "activation_scheme": "static" if first.static else "dynamic",
        "weight_block_size": MX_BLOCKS.get(first.weight, block), "modules_to_not_convert": left,
    }  # fmt: skip
    return {CONFIG: config | ({"scale_fmt": "ue8m0"} if first == POWERS_OF_TWO or first.weight in MX_BLOCKS else {})}


_CONFIGURATIONS: dict[str, Callable[[dict[str, Scheme], list[str]], dict[str, dict[str, Any]]]] = {
    "modelopt": _modelopt, "compressed-tensors": _compressed_tensors, "fp8": _float8,
    "mxfp8": partial(_float8, method="mxfp8"),
}  # fmt: skip
