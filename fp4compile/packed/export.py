"""`export_packed`: write a packed model as ModelOpt or compressed-tensors would, for the programs that read those."""

from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile import formats
from fp4compile.formats import unknown_name
from fp4compile.packed.buffers import PackedWeight
from fp4compile.packed.checkpoint import Checkpoint, write_checkpoint
from fp4compile.packed.linear import PackedLinear, is_linear
from fp4compile.packed.published import (
    CONFIG,
    HF_QUANT_CONFIG,
    LAYOUTS,
    MODELOPT_SCHEMES,
    Layout,
    Scheme,
    divisor_of,
)
from fp4compile.packed.sharing import arrange

_BITS = {"nvfp4": 4, "mxfp4": 4, "mxfp8": 8}


def export_packed(
    model: nn.Module, path: str | PathLike, layout: str = "modelopt", *, max_shard_size: int = 5 * 2**30
) -> None:
    """Write a model with packed linear layers to a directory, as another library lays such checkpoints out.

    layout: "modelopt" (NVFP4 with static activation scales or weights only, MXFP8, MXFP4) or "compressed-tensors" (the
        same formats).
    path: a directory; it is made where there is none.
    max_shard_size: in bytes. A larger model is written in several files with an index.

    Written are the tensors, hf_quant_config.json (ModelOpt), and config.json: the model's `config`, if it has one as
    those of transformers do, with a quantization_config. Codes and scales are written as they are. compressed-tensors
    stores outer scales as divisors: those of weights in bf16 or fp16 are exact, so that `load_packed` gives the same
    bits; others may differ in the last bit.

    Raises TypeError for what is no module; ValueError for a model without packed layers, for packed experts, for
    formats that the layout does not have, for NVFP4 activations without a static scale, for tensors on the meta device,
    for a max_shard_size that is no positive integer, and for a directory that has safetensors files; OSError where it
    cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if layout not in LAYOUTS:
        raise ValueError(unknown_name("layout", layout, LAYOUTS))
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int) or max_shard_size < 1:
        raise ValueError(f"max_shard_size: expected a positive number of bytes, got {max_shard_size!r}")
    chosen, layers = LAYOUTS[layout], _layers(model)
    schemes = {name: _scheme(name, layer, layout) for name, layer in layers.items()}
    tensors = _tensors(model, chosen, layers, schemes)
    left = [name for name, module in model.named_modules() if is_linear(module)]
    configs = (_modelopt if layout == "modelopt" else _compressed_tensors)(schemes, left)
    own: Any = getattr(model, "config", None)
    described = own.to_dict() if hasattr(own, "to_dict") else {}
    configs[CONFIG] = described | {"quantization_config": configs[CONFIG]}
    write_checkpoint(Path(path), Checkpoint(Path(path), tensors, configs), max_shard_size)


def _layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed layers by every name that the model has for them."""
    named = model.named_modules(remove_duplicate=False)
    packed = {name: module for name, module in named if isinstance(module, PackedWeight)}
    if not packed:
        raise ValueError("model: has no packed layer; call fp4compile.pack_ first")
    for name, module in packed.items():
        if not isinstance(module, PackedLinear):
            raise ValueError(f"model: {name!r} has packed experts, which these layouts do not hold")
        if module.in_first:
            raise ValueError(f"model: {name!r} is a Conv1D, which these layouts do not hold")
    return packed


def _scheme(name: str, layer: PackedLinear, layout: str) -> Scheme:
    """How a layout says what a packed layer is."""
    fmt = layer.layer_format
    static = fmt.activation_outer is not None
    scheme = Scheme(fmt.weight, fmt.activation, static)
    allowed = list(MODELOPT_SCHEMES.values())
    if layout == "compressed-tensors":
        allowed += [Scheme("mxfp8", None), Scheme("mxfp4", None)]
    if scheme == Scheme("nvfp4", "nvfp4"):
        raise ValueError(f"layer {name!r}: {layout} stores a static scale of its NVFP4 activation, and it is dynamic: "
                         "pack under a recipe of fp4compile.calibrate")  # fmt: skip
    if scheme not in allowed:
        pairs = ", ".join(f"{one.weight} with activations {one.activation or 'as they come'}" for one in allowed)
        raise ValueError(f"layer {name!r}: {layout} has no weights in {fmt.weight} with activations "
                         f"{fmt.activation or 'as they come'}; allowed are {pairs}")  # fmt: skip
    return scheme


def _tensors(
    model: nn.Module, layout: Layout, layers: dict[str, PackedLinear], schemes: dict[str, Scheme]
) -> dict[str, torch.Tensor]:
    """The tensors to write. Of tensors that are the same memory, the first is written."""
    state = {name: t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    for name, tensor in state.items():
        if tensor.is_meta:
            raise ValueError(f"model: {name!r} is on the meta device and has no values to write")
    buffers = {f"{name}.{buffer}" for name, layer in layers.items() for buffer in layer._buffers}
    plain = {name: tensor for name, tensor in state.items() if name not in buffers}
    kept, sharing = arrange(plain)
    kept |= {name: plain[name].detach().clone() for name in sharing.views}
    written = {name: kept[name] for name in state if name in kept}
    for name, scheme in schemes.items():
        for buffer, suffix in layout.tensor_names(scheme).items():
            written[f"{name}.{suffix}"] = _stored(layout, scheme, buffer, state, name, layers[name])
    return written


def _stored(
    layout: Layout, scheme: Scheme, buffer: str, state: dict[str, torch.Tensor], name: str, layer: PackedLinear
) -> torch.Tensor:
    """A tensor of a packed layer as the layout stores it."""
    if buffer == "activation_outer":
        tensor = torch.tensor(layer.layer_format.activation_outer, dtype=torch.float32)
    else:
        tensor = state[f"{name}.{buffer}"].detach().cpu().contiguous()
    if buffer.endswith("_outer"):
        return divisor_of(tensor).reshape(1) if layout.divides else tensor.clone()
    bytes_alone = buffer == "weight_scales" and formats.get(scheme.weight).scale == "e8m0"
    return tensor.view(torch.uint8) if bytes_alone else tensor


# ---------------------------------------------------------------- configurations


def _modelopt(schemes: dict[str, Scheme], left: list[str]) -> dict[str, dict[str, Any]]:
    """The configurations that ModelOpt writes. schemes: of the packed layers. left: the linear layers that are none."""
    names = {scheme: name for name, scheme in MODELOPT_SCHEMES.items()}
    entries = {
        layer: {"quant_algo": names[scheme], "group_size": formats.get(scheme.weight).block_cols}
        for layer, scheme in schemes.items()
    }
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
    """The configuration that compressed-tensors writes; arguments as of `_modelopt`."""
    targets: dict[Scheme, list[str]] = {}
    for layer, scheme in schemes.items():
        targets.setdefault(scheme, []).append(layer)
    groups = {
        f"group_{i}": {
            "targets": ["Linear"] if len(targets) == 1 else layers,
            "weights": _arguments(scheme.weight, False),
            "input_activations": _arguments(scheme.activation, "local" if scheme.static else True),
            "output_activations": None,
            "format": _format_name(scheme),
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


def _arguments(fmt: str | None, dynamic: bool | str) -> dict[str, Any] | None:
    if fmt is None:
        return None
    nvfp4 = formats.get(fmt).scale == "e4m3"
    return {
        "num_bits": _BITS[fmt],
        "type": "float",
        "symmetric": True,
        "group_size": formats.get(fmt).block_cols,
        "strategy": "tensor_group" if nvfp4 else "group",
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if nvfp4 else "torch.uint8",
    }


def _format_name(scheme: Scheme) -> str:
    return "mxfp8-quantized" if scheme.weight == "mxfp8" else f"{scheme.weight}-pack-quantized"
