"""The layouts of FP4 and FP8 checkpoints of other libraries, and their conversion to packed layers.

They differ in names, in the configuration, and in the direction of NVFP4's global scale (nvidia-modelopt 0.47,
compressed-tensors 0.20):

    ModelOpt             multiplies: weight_scale_2 = amax / 2688. value = code * block scale * weight_scale_2
    compressed-tensors   divides: weight_global_scale = 2688 / amax. value = code * block scale / weight_global_scale

Float32 scales of FP8 weights always multiply, also those that DeepSeek's checkpoints call weight_scale_inv. Files may
hold them in 16 bits or as E8M0, which float32 holds exactly. Experts in one tensor `experts.gate_up_proj` have the
names of a layer's tensors behind its name: gate_up_proj_weight_scale, or gate_up_proj_scale_inv in DeepSeek's layout.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp4compile.analysis.module_names import packed_name
from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.reference import E4M3_MAX, NVFP4_MAX
from fp4compile.recipe import Recipe
from fp4compile.weights.buffers import LayerFormat
from fp4compile.weights.published.expert_names import expert_of
from fp4compile.weights.published.gpt_oss import MXFP4, has_mxfp4_experts, read_mxfp4_experts
from fp4compile.weights.published.quantization_config import (
    Scheme,
    Schemes,
    compressed_schemes,
    float8_schemes,
    member,
    modelopt_schemes,
    mxfp8_schemes,
)
from fp4compile.weights.published.shards import Checkpoint, Contents, naming
from fp4compile.weights.scale_checks import TINY, check_block_scales, check_outer, check_powers_of_two
from fp4compile.weights.sharing import is_byte_float

# A scale whose amax reaches these values is assumed to be the reciprocal. No weight is as large as 2688, where NVFP4's
# global scale is 1. An activation is below the largest fp16.
_LARGEST = {"weight": NVFP4_MAX, "activation": 65504.0}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)  # of float32 scales in files
DIFFERENT_SCALES = "the static activation scales of the experts of a layer differ; the largest is used for all"
HF_QUANT_CONFIG, CONFIG = "hf_quant_config.json", "config.json"


@dataclass(frozen=True)
class Layout:
    """The names and conventions by which a library stores a packed layer.

    scales: name of the block scales, or of an FP8 weight's global or row scales. codes: of FP4 weights.
    outer, activation_outer: of NVFP4's global scales, which are divisors if `divides`. float8_activation: of the static
    scale of FP8 activations. schemes: maps a configuration to its schemes; it raises ValueError for unknown settings.
    pairs: the dtype of FP4 codes in files, two in a byte.
    """

    name: str
    scales: str
    codes: str
    outer: str
    activation_outer: str
    divides: bool
    float8_activation: str
    schemes: Callable[[dict[str, Any]], Schemes]
    pairs: torch.dtype = torch.uint8

    def tensor_names(self, scheme: Scheme) -> dict[str, str]:
        """The names of the tensors of a packed layer's buffers and, as "activation_outer", of the static scale."""
        fmt = formats.get(scheme.weight)
        named = {"weight_data": self.codes if fmt.packed else "weight"}
        named["weight_scales" if fmt.scale else "weight_outer"] = self.scales
        if fmt.scale and fmt.outer:
            named["weight_outer"] = self.outer
        if scheme.static:
            named["activation_outer"] = self.activation_outer if is_nvfp4(fmt) else self.float8_activation
        return named


def is_nvfp4(fmt: BlockFormat) -> bool:
    """Whether a format has NVFP4's E4M3 block scales and a global scale."""
    return fmt.scale == "e4m3"


MODELOPT = Layout(
    "modelopt", "weight_scale", "weight", "weight_scale_2", "input_scale", False, "input_scale", modelopt_schemes,
)  # fmt: skip
COMPRESSED_TENSORS = Layout(
    "compressed-tensors", "weight_scale", "weight_packed", "weight_global_scale", "input_global_scale", True,
    "input_scale", compressed_schemes,
)  # fmt: skip
FP8 = Layout("fp8", "weight_scale_inv", "weight", "", "", False, "activation_scale", float8_schemes, torch.int8)
MXFP8 = replace(FP8, name="mxfp8", schemes=mxfp8_schemes)
# Other names in checkpoints of the same configuration: AutoFP8's, which vLLM reads, too, DeepSeek-V4's, and Mistral's.
_OTHER_NAMES: tuple[dict[str, Any], ...] = (
    {"scales": "weight_scale", "float8_activation": "input_scale"}, {"scales": "scale"}, {"scales": "qscale_weight"},
)  # fmt: skip
# DeepSeek's and MiniMax' layers of a mixed checkpoint, left as they were published.
_AS_PUBLISHED_IN_MODELOPT = replace(MODELOPT, scales="weight_scale_inv")
LAYOUTS = {layout.name: layout for layout in (MODELOPT, COMPRESSED_TENSORS, FP8, MXFP8)}  # by quant_method


# ---------------------------------------------------------------- reading


def read_published(checkpoint: Checkpoint, recipe: Recipe | None = None) -> Contents:
    """The contents of a checkpoint in one of the layouts, or gpt-oss'. recipe: only for gpt-oss, see `load_packed`.

    Raises ValueError, naming the tensor or the configuration, for an unknown layout or algorithm, for tensors that do
    not fit, for scales that no finite weight has or that look like reciprocals, and for a recipe that does not fit.
    """
    if has_mxfp4_experts(checkpoint.tensors):
        with naming(checkpoint.path):
            return read_mxfp4_experts(checkpoint.tensors, recipe)
    layout, file, config = _recognised(checkpoint)
    if recipe is not None:
        raise ValueError(f"recipe: a checkpoint of {layout.name} says itself how its layers multiply; expected None")
    tensors = dict(checkpoint.tensors)
    packed = {
        name.rpartition(".")[0]
        for name, tensor in tensors.items()
        if name.endswith((".weight_scale", ".weight_scale_inv", ".weight_packed"))
        or (name.endswith(".weight") and (tensor.dtype in (torch.uint8, torch.int8) or is_byte_float(tensor.dtype)))
    }
    in_fp4 = {name.rpartition(".")[0] for name, tensor in tensors.items()
              if name.endswith((".weight_packed", ".weight_scale_2")) or tensor.dtype == torch.int8}  # fmt: skip
    with naming(checkpoint.folder / file):
        scheme_of = layout.schemes(config).of
        schemes = {layer: scheme_of(layer, layer in in_fp4) for layer in sorted(packed)}
        fused = {name: scheme_of(name, False) for name in sorted(tensors)
                 if _fused_name(layout, name, layout.scales) in tensors and not name.endswith(".weight")}  # fmt: skip
    with naming(checkpoint.path):
        _match_activation_scales(layout, schemes, tensors, fused=False)
        _match_activation_scales(layout, fused, tensors, fused=True)
        layers = {
            layer: _take(_of_layer(layout, scheme, layer, tensors), scheme, layer, tensors)
            for layer, scheme in schemes.items()
        }
        experts = {name: _take_fused(layout, scheme, name, tensors) for name, scheme in fused.items()}
    return Contents(layers, experts, tensors)


def declared_formats(folder: Path, configs: dict[str, dict[str, Any]]) -> list[str]:
    """Texts with the formats of a checkpoint, by its configurations alone; none if it is not quantised.

    folder: for messages. A text may be the reason that `load_packed` refuses the checkpoint.
    """
    described = _holder(configs).get("quantization_config")
    if described is None and HF_QUANT_CONFIG not in configs:
        return []
    if isinstance(described, dict) and described.get("quant_method") == MXFP4:
        return ["mxfp4 weights of experts, others as they come"]
    try:
        layout, file, config = _recognised(Checkpoint(folder, {}, configs))
        with naming(folder / file):
            return [str(scheme) for scheme in dict.fromkeys(layout.schemes(config).declared())]
    except ValueError as error:
        return [f"not known to load_packed: {error}"]


def _recognised(checkpoint: Checkpoint) -> tuple[Layout, str, dict[str, Any]]:
    """The layout, the configuration's file name, and the part of the configuration about quantisation."""
    with naming(checkpoint.folder / HF_QUANT_CONFIG):
        modelopt = member(checkpoint.configs.get(HF_QUANT_CONFIG, {}), "quantization", dict, {})
    with naming(checkpoint.folder / CONFIG):
        holder = _holder(checkpoint.configs)
        config = member(holder, "quantization_config", dict, {})
        layout = LAYOUTS.get(member(config, "quant_method", str, ""))
        mixed = layout in (FP8, MXFP8) and config.get("moe_quant_algo") is not None  # the other file lacks FP8 layers
        if modelopt and not mixed:  # only the other file tells which activations are quantised
            return MODELOPT, HF_QUANT_CONFIG, {"config_groups": config.get("config_groups"), **modelopt}
    if layout is None and any(name.endswith(".weight_data") for name in checkpoint.tensors):
        raise ValueError(
            f"{checkpoint.path}: holds the state dict of a packed model. If fp4compile.save_packed wrote it, pass the "
            "file's path; if another library saved it, call pack_ with the same recipe, then load_state_dict"
        )
    if layout is None:
        raise ValueError(
            f"{checkpoint.path}: was not written by fp4compile.save_packed, and neither {HF_QUANT_CONFIG} nor the "
            f"quantization_config of {CONFIG} beside it names a layout; known are {', '.join(LAYOUTS)}"
        )
    # DeepSeek-V4's has the dtype of its experts beside the part about quantisation.
    return layout, CONFIG, {"expert_dtype": holder.get("expert_dtype"), **config}


def _holder(configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The part of the configuration with `quantization_config`: `text_config` where only it has one, else the whole."""
    config = configs.get(CONFIG, {})
    text = config.get("text_config")
    return text if isinstance(text, dict) and "quantization_config" not in config else config


def _match_activation_scales(
    layout: Layout, schemes: dict[str, Scheme], tensors: dict[str, torch.Tensor], fused: bool
) -> None:
    """Make the schemes of layers (fused: of experts in one tensor) those of a file's static scales of activations.

    Published checkpoints call layers W4A16_NVFP4 that were calibrated as NVFP4. They lack all scales, or those of
    experts that no token of the calibration reached. Warns of scales that are not used or missing.
    """
    names = {}
    for layer, scheme in schemes.items():
        own = layout if fused else _of_layer(layout, scheme, layer, tensors)
        suffix = own.tensor_names(replace(scheme, static=True))["activation_outer"]
        names[layer] = _fused_name(own, layer, suffix) if fused else f"{layer}.{suffix}"
    static = [layer for layer, scheme in schemes.items() if scheme.static]
    unused = [name for layer, name in names.items()
              if not schemes[layer].static and tensors.pop(name, None) is not None]  # fmt: skip
    missing = [layer for layer in static if names[layer] not in tensors]
    if len(missing) < len(static):  # a layer alone may have lost its scale
        missing = [layer for layer in missing if expert_of(layer) is not None]
    schemes |= {layer: replace(schemes[layer], static=False) for layer in missing}
    if unused:
        warnings.warn(f"{len(unused)} scales of activations, such as {unused[0]!r}, are not used: by the configuration "
                      "these layers have no static ones", stacklevel=5)  # fmt: skip
    if missing:
        warnings.warn(f"{len(missing)} static scales of activations, such as {names[missing[0]]!r}, are missing: they "
                      "are computed at each call, and experts take the largest of their layer's others",
                      stacklevel=5)  # fmt: skip


def _of_layer(layout: Layout, scheme: Scheme, layer: str, tensors: dict[str, torch.Tensor]) -> Layout:
    """The layout of one layer. FP8 scales have several names, and the name in the file tells the layout."""
    others: tuple[Layout, ...] = ()
    if layout in (FP8, MXFP8):
        if is_nvfp4(formats.get(scheme.weight)):
            return MODELOPT
        others = tuple(replace(layout, **names) for names in _OTHER_NAMES)
    elif layout is MODELOPT and scheme.weight in ("float8_128x128", "mxfp8"):
        others = (_AS_PUBLISHED_IN_MODELOPT,)
    return next((one for one in (layout, *others) if f"{layer}.{one.scales}" in tensors), layout)


def _take(layout: Layout, scheme: Scheme, layer: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rename the tensors of a layer to the buffers of a packed layer; returns the packed layer's state."""
    named = {buffer: f"{layer}.{suffix}" for buffer, suffix in layout.tensor_names(scheme).items()}
    for name in named.values():
        if name not in tensors:
            raise ValueError(f"tensor {name!r} is missing")
    found = {buffer: tensors.pop(name) for buffer, name in named.items()}
    fmt = formats.get(scheme.weight)
    if fmt.packed and found["weight_data"].dtype == layout.pairs:
        found["weight_data"] = found["weight_data"].view(torch.uint8)
    rows, columns = _check_matrix(fmt, named, found)
    found["weight_data"] = _in_whole_blocks(scheme, found["weight_data"])
    for kind in ("weight", "activation"):
        buffer = f"{kind}_outer"
        if buffer not in found:
            continue
        if not is_nvfp4(fmt):
            shape = (rows, 1) if kind == "weight" and fmt.outer == "row" else ()
            found[buffer] = _float32(named[buffer], found[buffer], shape)
            check_outer(named[buffer], found[buffer], TINY)
            if kind == "weight":
                _check_float8(named[buffer], found[buffer])
            continue
        outer = found[buffer] = _decoding(layout, named[buffer], found[buffer])
        zeros = kind == "weight" and outer == 1 and not found["weight_data"].any()  # zeros always have scale 1
        if outer * NVFP4_MAX >= _LARGEST[kind] and not zeros:
            raise ValueError(_reciprocal(layout, named[buffer], outer))
    static = found.pop("activation_outer", None)
    state = LayerFormat(scheme.weight, scheme.activation, None if static is None else static.item())
    tensors |= {f"{layer}.{buffer}": tensor for buffer, tensor in found.items()}
    return vars(state) | {"in_features": columns, "out_features": rows}


def _take_fused(layout: Layout, scheme: Scheme, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Rename the tensors of experts in one tensor to those of packed experts; returns their state.

    The codes are [experts, out, in]; or [experts, in, out], as ModelOpt writes Llama 4's, where the block scales tell,
    and without block scales the model: `in_first` is None then.
    """
    own = {f"{name}.{suffix}": _fused_name(layout, name, suffix) for suffix in layout.tensor_names(scheme).values()}
    for full in own.values():
        if full not in tensors:
            raise ValueError(f"tensor {full!r} is missing")
    whole = {alone: tensors.pop(full) for alone, full in own.items()}
    data, scales, block = whole[f"{name}.weight"], whole[f"{name}.{layout.scales}"], formats.get(scheme.weight).block
    if data.dim() != 3 or not len(data) or (block is not None and (scales.dim() != 3 or len(data) != len(scales))):
        raise ValueError(f"tensor {name!r}: expected experts of three dimensions and scales for each, got shapes "
                         f"{tuple(data.shape)} and {tuple(scales.shape)}")  # fmt: skip
    in_first = None if block is None else data.shape[2] == scales.shape[2]
    if in_first:
        whole |= {key: one.mT.contiguous() for key, one in whole.items() if one.dim() == 3}
    parts = [{key: one[i] if one.dim() and len(one) == len(data) else one for key, one in whole.items()}
             for i in range(len(data))]  # fmt: skip
    states = [_take(layout, scheme, name, part) for part in parts]
    for buffer in parts[0]:
        stacked = [as_integers(part[buffer]) for part in parts]
        packed = f"{packed_name(name)}.{buffer.rpartition('.')[2]}"
        tensors[packed] = torch.stack(stacked).view(parts[0][buffer].dtype)
    outers = {state["activation_outer"] for state in states}
    if len(outers) > 1:
        warnings.warn(DIFFERENT_SCALES, stacklevel=5)
    return states[0] | {"activation_outer": max(outers) if scheme.static else None, "experts": len(parts),
                        "in_first": in_first}  # fmt: skip


def _fused_name(layout: Layout, name: str, suffix: str) -> str:
    """The name of a tensor of experts in one tensor: `gate_up_proj_scale_inv`, or ModelOpt's `..._weight_scale`."""
    if suffix == "weight":
        return name
    return f"{name}_{suffix.removeprefix('weight_') if layout in (FP8, MXFP8) else suffix}"


def _check_matrix(fmt: BlockFormat, named: dict[str, str], found: dict[str, torch.Tensor]) -> tuple[int, int]:
    """Check a weight's codes and block scales, and view them in the format's dtypes; returns (rows, columns)."""
    data = found["weight_data"] = _viewed(fmt.data_dtype, named["weight_data"], found["weight_data"])
    rows, columns = data.shape[0], data.shape[1] * (2 if fmt.packed else 1)
    if fmt.block is None:
        return rows, columns
    name, scales = named["weight_scales"], found["weight_scales"]
    expected = ceil_div(rows, fmt.block[0]), ceil_div(columns, fmt.block_cols)
    if fmt.scale_dtype == torch.float32:
        scales = _float32(name, scales, expected)
    scales = found["weight_scales"] = _viewed(fmt.scale_dtype, name, scales)
    if tuple(scales.shape) != expected:
        block = f"{fmt.block_cols} elements" if fmt.block[0] == 1 else f"{fmt.block[0]}x{fmt.block_cols} elements"
        raise ValueError(f"tensor {name!r}: expected shape {expected}, one scale for {block} of "
                         f"{named['weight_data']!r} {(rows, columns)}; got {tuple(scales.shape)}")  # fmt: skip
    check_block_scales(name, scales)
    if fmt.scale_dtype == torch.float32:
        _check_float8(name, scales)
    if fmt.contract == "te_pow2":
        check_powers_of_two(name, scales)
    return rows, columns


def _viewed(dtype: torch.dtype, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """View a matrix, which files may hold as bytes, in a dtype. Raises ValueError for another dtype or shape."""
    if tensor.dtype == torch.uint8 and is_byte_float(dtype):
        tensor = tensor.view(dtype)
    if tensor.dtype != dtype or tensor.dim() != 2:
        raise ValueError(f"tensor {name!r}: expected {dtype} of two dimensions, got {tensor.dtype} of shape "
                         f"{tuple(tensor.shape)}")  # fmt: skip
    return tensor


def _float32(name: str, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The float32 scales of an FP8 weight or activation in a shape; files may lack or add dimensions of size one."""
    if stored.dtype not in _FLOATS or [n for n in stored.shape if n > 1] != [n for n in shape if n > 1]:
        raise ValueError(f"tensor {name!r}: expected float32 or 16-bit scales of shape {shape}, got {stored.dtype} of "
                         f"shape {tuple(stored.shape)}")  # fmt: skip
    return stored.float().reshape(shape)


def _in_whole_blocks(scheme: Scheme, data: torch.Tensor) -> torch.Tensor:
    """Codes [rows, columns], padded with zeros to whole blocks, as in buffers."""
    fmt = formats.get(scheme.weight)
    block = fmt.block_cols // (2 if fmt.packed else 1)
    missing = -data.shape[1] % block
    return torch.nn.functional.pad(data.view(torch.uint8), (0, missing)).view(data.dtype) if missing else data


def _decoding(layout: Layout, name: str, stored: torch.Tensor) -> torch.Tensor:
    """The global scale as the factor that decodes, float32 []."""
    if stored.dtype != torch.float32 or stored.numel() != 1:
        raise ValueError(f"tensor {name!r}: expected one float32, got {stored.dtype} of shape {tuple(stored.shape)}")
    stored = stored.reshape(())
    check_outer(name, stored, TINY)
    return inverted(stored, divisor=True) if layout.divides else stored


def _check_float8(name: str, scales: torch.Tensor) -> None:
    """Raise ValueError for scales of an FP8 weight that look like the reciprocals of the factors that decode."""
    amax = scales.max() * E4M3_MAX if scales.numel() else torch.zeros(())
    if amax >= _LARGEST["weight"]:
        raise ValueError(f"tensor {name!r}: has {scales.max().item():g}, which would be the scale of an amax of "
                         f"{amax.item():g}; it looks like the reciprocal of a scale")  # fmt: skip


def _reciprocal(layout: Layout, name: str, outer: torch.Tensor) -> str:
    """The error message for a global scale that looks like the reciprocal of the factor that decodes."""
    kinds = ("multiplier amax / 2688", "divisor 2688 / amax")
    stored = 1 / outer if layout.divides else outer
    return (f"tensor {name!r}: {stored.item():g}, as the {kinds[layout.divides]} of {layout.name}, would be of an amax "
            f"of {outer.item() * NVFP4_MAX:g}; it looks like a {kinds[not layout.divides]}")  # fmt: skip


# ---------------------------------------------------------------- multipliers and divisors


def inverted(given: torch.Tensor, *, divisor: bool) -> torch.Tensor:
    """The multiplier amax / 2688 of a divisor 2688 / amax, or (divisor=False) the reverse; float32 [].

    It is exact where amax is a 16-bit number, as for weights in bf16 and fp16, else the rounded reciprocal.
    """
    # PyTorch divides a number by a tensor through the reciprocal: two roundings.
    largest = torch.tensor(NVFP4_MAX, device=given.device)
    amax = largest / given if divisor else given * largest
    for dtype in (torch.bfloat16, torch.float16):
        near = amax.to(dtype).float()
        multiplies, divides = near / largest, largest / near
        if torch.equal(divides if divisor else multiplies, given):
            return multiplies if divisor else divides
    return torch.ones_like(given) / given
