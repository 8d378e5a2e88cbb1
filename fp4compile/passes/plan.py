"""Decide by recipe what each product becomes: `Gemm` x `Recipe` x names -> `Decision` with a reason. Never mutates."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4compile import formats
from fp4compile.ops import FLOAT_DTYPES
from fp4compile.passes.find import Gemm, Input
from fp4compile.recipe import Recipe, named

_LM_HEADS = ("lm_head", "embed_out", "unembed", "output_projection")
_DEVICES = ("cpu", "cuda")
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Treatment:
    """How an operand is quantised. format: its name. outer: static decode factor, None computes it.

    stochastic: rounded stochastically. hadamard: transformed along the contraction first. layout: of the block scales.
    """

    format: str
    outer: float | None = None
    stochastic: bool = False
    hadamard: bool = False
    layout: str = "linear"


@dataclass(frozen=True)
class Decision:
    """What happens to a product. reason: why it is left alone; None where it is quantised.

    left, right: what happens to the operands; None keeps that operand in high precision.
    tier: who computes it, "reference", "emulated" or "native".
    """

    gemm: Gemm
    reason: str | None = None
    left: Treatment | None = None
    right: Treatment | None = None
    tier: str | None = None


def plan(gemms: list[Gemm], recipe: Recipe, inputs: tuple[Input, ...]) -> list[Decision]:
    """One decision for each product, in the same order.

    Warns where the recipe skips blocks by number and the graph's parameters have no numbers in their names.
    """
    names = [entry.parameter for entry in inputs if entry.parameter]
    blocks = count_blocks(recipe, names)
    if names and not blocks and (recipe.skip_first_blocks or recipe.skip_last_blocks):
        warnings.warn(
            f"recipe {recipe.name!r} leaves blocks alone by their number, and no name in this graph has one "
            f"(such as {names[0]!r}): where blocks are compiled one by one, compile only those to be quantised",
            stacklevel=2,
        )
    return [_decide(gemm, recipe, blocks) for gemm in gemms]


def _decide(gemm: Gemm, recipe: Recipe, blocks: dict[str, int]) -> Decision:
    if gemm.packed is not None:
        left, right = (None if fmt is None else Treatment(fmt) for fmt in gemm.packed)
        return Decision(gemm, left=left, right=right, tier=_tier(gemm, left, right))
    reason = gemm.unsupported or _unfit(gemm)
    if reason is not None:
        return Decision(gemm, reason)
    layer_recipe, reason = of_layer(Layer(gemm.module, gemm.layer, gemm.tied_to_embedding), recipe, blocks)
    if layer_recipe is None or not layer_recipe.quantizes(gemm.product):
        return Decision(gemm, reason if layer_recipe is None else _left_by_recipe(gemm, layer_recipe))
    return Decision(gemm, reason) if reason else _quantised(gemm, layer_recipe, recipe)


@dataclass(frozen=True)
class Layer:
    """What rules and limits ask of a layer: its name, (tokens, out features, in features), and whether its weight is
    an embedding's too."""

    name: str
    dims: tuple
    tied_to_embedding: bool = False


def of_layer(layer: Layer, recipe: Recipe, blocks: dict[str, int]) -> tuple[Recipe | None, str | None]:
    """(the recipe of a layer, why it is left alone all the same); no recipe where a rule skips the layer."""
    rule = recipe.rule_for(layer.name)
    if rule is None:  # a rule that names a layer outranks the defaults for its place in the model
        return recipe, _excluded_place(layer, recipe, blocks) or _too_small(layer, recipe)
    if rule.action == "skip":
        return None, f"rule {rule.pattern!r}"
    return recipe if rule.action == "quantize" else named(rule.action), _too_small(layer, recipe)


def _quantised(gemm: Gemm, layer_recipe: Recipe, recipe: Recipe) -> Decision:
    chosen = {}
    for side, operand in (("left", gemm.left), ("right", gemm.right)):
        fmt, outer = getattr(layer_recipe, operand.role), None
        if operand.role == "fprop_x" and layer_recipe.activation_scale == "static":
            outer = recipe.static_scale(gemm.module)
            if outer is None:
                return Decision(gemm, "no calibrated activation scale: run fp4compile.calibrate")
        if fmt is not None:
            stochastic = operand.role.endswith("_dy") and gemm.product in layer_recipe.stochastic_rounding
            chosen[side] = Treatment(fmt, outer, stochastic, hadamard=gemm.product in layer_recipe.hadamard)
    left, right = (chosen.get(side) for side in ("left", "right"))
    if _tier(gemm, *_swizzled(left, right)) == "native":
        left, right = _swizzled(left, right)
    return Decision(gemm, left=left, right=right, tier=_tier(gemm, left, right))


def _swizzled(*treatments: Treatment | None) -> list[Treatment | None]:
    """With block scales in the layout that the matrix units of SM100 read."""
    return [None if t is None else replace(t, layout="swizzled" if formats.get(t.format).scale else t.layout)
            for t in treatments]  # fmt: skip


def _tier(gemm: Gemm, left: Treatment | None, right: Treatment | None) -> str:
    """Who computes the product. Kernels serve CUDA tensors, the reference all others."""
    out = gemm.node.meta["val"]
    if out.device.type != "cuda":
        return "reference"
    if left is None or right is None:
        return "emulated"
    from fp4compile.templates.scaled_mm import on_matrix_units  # here, so that the CPU needs no Triton

    operands = [(formats.get(t.format), t.layout == "swizzled") for t in (left, right)]
    _, n, k = gemm.dims
    return "native" if on_matrix_units(*operands, n, k, out.dtype, out.device) else "emulated"


def _unfit(gemm: Gemm) -> str | None:
    """What no recipe can change: dtype and device of the operands."""
    for operand in (gemm.left, gemm.right):
        value = operand.source.meta["val"]
        if value.dtype not in FLOAT_DTYPES:
            return f"dtype {str(value.dtype).removeprefix('torch.')}"
        if value.device.type not in _DEVICES:
            return f"device {value.device.type}"
    out = gemm.node.meta["val"].dtype
    return None if out in FLOAT_DTYPES else f"dtype {str(out).removeprefix('torch.')}"


def _left_by_recipe(gemm: Gemm, recipe: Recipe) -> str:
    if gemm.product == "attention":
        return "no operand is a parameter, and the recipe leaves attention in high precision"
    return f"recipe {recipe.name} leaves {gemm.product} in high precision"


def _excluded_place(layer: Layer, recipe: Recipe, blocks: dict[str, int]) -> str | None:
    if recipe.skip_lm_head and _is_lm_head(layer):
        return "LM head"
    place = _block_index(layer.name)
    if place is None:
        return None
    container, index = place
    if index < recipe.skip_first_blocks:
        return f"block {index} is among the first {recipe.skip_first_blocks}"
    if recipe.skip_last_blocks and index >= blocks.get(container, 0) - recipe.skip_last_blocks:
        return f"block {index} is among the last {recipe.skip_last_blocks}"
    return None


def _is_lm_head(layer: Layer) -> bool:
    return layer.tied_to_embedding or layer.name == "output" or layer.name.split(".")[-1] in _LM_HEADS


def _block_index(module: str) -> tuple[str, int] | None:
    """("model.layers", 3) of "model.layers.3.mlp.up_proj"; None outside a numbered list."""
    match = _BLOCK.search(module)
    return None if match is None else (module[: match.start()], int(match.group(1)))


def count_blocks(recipe: Recipe, names: Iterable[str]) -> dict[str, int]:
    """Number of blocks of each numbered list, from the names of parameters or modules."""
    counts: dict[str, int] = {}
    for name in names:
        place = _block_index(name)
        if place is not None:
            container, index = place
            counts[container] = max(counts.get(container, 0), index + 1)
    if recipe.num_blocks is not None:
        counts = dict.fromkeys(counts, recipe.num_blocks)
    return counts


def _too_small(layer: Layer, recipe: Recipe) -> str | None:
    names = (("M", "min_m"), ("N", "min_n"), ("K", "min_k"))
    for size, (letter, limit) in zip(layer.dims, names, strict=True):
        # A symbolic size that may be large enough counts as large enough: no guard is added.
        if statically_known_true(size < getattr(recipe, limit)):
            return f"{letter}={size} is below {limit}={getattr(recipe, limit)}"
    return None
