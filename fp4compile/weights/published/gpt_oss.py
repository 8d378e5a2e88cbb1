"""gpt-oss' checkpoints: experts in MXFP4, all other tensors in 16 bits.

The checkpoints have no format of activations; a recipe may set one.
"""

import torch

from fp4compile.analysis.module_names import packed_name
from fp4compile.formats import formats
from fp4compile.recipe import Recipe, named
from fp4compile.weights.published.shards import Contents
from fp4compile.weights.scale_checks import check_block_scales

MXFP4 = "mxfp4"  # the quant_method of these checkpoints
_BLOCKS, _SCALES = "_blocks", "_scales"


def has_mxfp4_experts(tensors: dict[str, torch.Tensor]) -> bool:
    """Whether a checkpoint has experts in gpt-oss' MXFP4 form, by the names of its tensors."""
    return any(name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in tensors for name in tensors)


def read_mxfp4_experts(tensors: dict[str, torch.Tensor], recipe: Recipe | None) -> Contents:
    """Read experts: `*_blocks`, uint8 [E, N, K / 32, 16], two codes a byte, and `*_scales`, E8M0 bytes [E, N, K / 32].

    The model's parameter is [E, K, N]. All other tensors are unchanged.
    """
    contents = Contents(tensors=dict(tensors))
    for name in tensors:
        if not name.endswith(_BLOCKS):
            continue
        weight = name.removesuffix(_BLOCKS)
        if weight + _SCALES not in tensors:
            raise ValueError(f"tensor {weight + _SCALES!r} is missing")
        blocks, scales = contents.tensors.pop(name), contents.tensors.pop(weight + _SCALES)
        _check_mxfp4(weight, blocks, scales)
        rule = None if recipe is None else recipe.rule_for(weight)
        if recipe is None or (rule is not None and rule.action == "skip"):
            activation = None
        else:
            activation = (recipe if rule is None or rule.action == "quantize" else named(rule.action)).fprop_x
        if activation is not None:
            fmt = formats.get(activation)
            if fmt.square or not formats.compatible(fmt, formats.get("mxfp4")):
                raise ValueError(f"recipe: its activations in {activation} cannot be multiplied with weights in mxfp4")
        experts, outer, count, _ = blocks.shape
        packed = packed_name(weight)
        contents.tensors[f"{packed}.weight_data"] = blocks.reshape(experts, outer, 16 * count)
        contents.tensors[f"{packed}.weight_scales"] = scales.view(torch.float8_e8m0fnu)
        contents.experts[weight] = {
            "weight": "mxfp4", "activation": activation, "activation_outer": None,
            "in_features": 32 * count, "out_features": outer, "experts": experts, "in_first": True,
        }  # fmt: skip
    return contents


def written_experts(weight: str, data: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """The inverse of `read_mxfp4_experts` for the parameter `weight`: its tensors by name.

    data: [E, N, K / 2]. scales: [E, N, K / 32].
    """
    return {weight + _BLOCKS: data.view(*scales.shape, 16), weight + _SCALES: scales.view(torch.uint8)}


def _check_mxfp4(weight: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    fits = blocks.dtype == torch.uint8 and blocks.dim() == 4 and blocks.shape[-1] == 16
    if not fits:
        raise ValueError(f"tensor {weight + _BLOCKS!r}: expected uint8 of shape (experts, out, blocks, 16), got "
                         f"{blocks.dtype} of shape {tuple(blocks.shape)}")  # fmt: skip
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"tensor {weight + _SCALES!r}: expected uint8 of shape {tuple(blocks.shape[:-1])}, got "
                         f"{scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip
    check_block_scales(weight + _SCALES, scales.view(torch.float8_e8m0fnu))
