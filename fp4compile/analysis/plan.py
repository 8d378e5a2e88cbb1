"""Decide by recipe how each matmul is quantised, and give a reason for each matmul that is not quantised.

Entry: `plan(gemms, recipe, inputs)`. Reads the graph through the `Gemm`s and never changes it.
"""

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from fp4compile._compat import statically_true
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input
from fp4compile.analysis.gradients import tangent_dependent
from fp4compile.analysis.module_names import block_of, module_name
from fp4compile.analysis.views import view_of
from fp4compile.formats import formats
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.layouts import scale_layout
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.hardware import Gpu, Target
from fp4compile.ops.nodes import expert_weights_of, gathered_weight_of, is_gathered, scaled_mm_of
from fp4compile.recipe import Recipe, named
from fp4compile.recipe.named_recipes import OF_FORWARD
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import on_gpu, target_of
from fp4compile.templates.problem import Problem

NOT_CALIBRATED = "dynamic activation scale: fp4compile.calibrate recorded none"
NO_POWERS_OF_TWO = (
    "emulated: matrix units of this GPU multiply FP8 blocks whose scales are powers of two; contract te_pow2 makes them"
)
BEFORE_CAST = "weight quantised before its cast: FSDP2 gathered codes of the parameter's dtype"

# Names of output heads in models.
_HEADS = (
    "lm_head", "embed_out", "unembed", "output_projection", "proj_out", "classifier", "score", "head", "decoder"
)  # fmt: skip
# Checkpoint policies under which the backward pass recomputes a node.
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
# Beginnings of the reasons that speak of one layer's kind or place, and not of what follows in the model.
OF_ONE_LAYER = ("rule ", "output head", "LoRA adapter", "adapter", "router: ", "block ", "convolution")
_ROUTERS = ("router", "gating", "shared_expert_gate")
_DEVICES = ("cpu", "cuda")
_EXPERTS = re.compile(r"(?:^|(.*)\.)experts(?:\.|$)")


@dataclass(frozen=True)
class Treatment:
    """The quantisation of an operand; see `QuantizeSpec`.

    outer: the static global scale, a number or a node; None computes it where the format has one.
    stochastic: whether elements are rounded stochastically. layout: of the block scales.
    """

    format: str
    outer: float | Node | None = None
    stochastic: bool = False
    hadamard: bool = False
    layout: str = "linear"
    scale_rule: str = "amax"

    @property
    def per_group(self) -> bool:
        """Whether each expert has its own global scale: a dynamic scale, of a format with a global scale."""
        return self.outer is None and formats.get(self.format).outer == "tensor"


@dataclass(frozen=True)
class Decision:
    """The decision about a matmul: `reason` why it is not quantised, or `a` and `b`, how its operands are quantised.

    tier: "reference", "emulated" or "native". note: how the decision differs from the recipe.
    weight_scales: how the weight's block scales are chosen, if not by "amax".
    dequantised: whether a matmul that is not quantised reads its operand as the forward matmul has it, dequantised; `a`
        or `b` is then the forward matmul's treatment of this operand.
    fast_accumulation: whether FP8 matrix units may keep the sums in fewer bits than float32 has.
    """

    gemm: Gemm
    reason: str | None = None
    a: Treatment | None = None
    b: Treatment | None = None
    tier: str | None = None
    note: str | None = None
    weight_scales: str | None = None
    fast_accumulation: bool = False
    dequantised: bool = False


# The report's text for weights whose block scales are not chosen by the recipe's rule.
TRAINED = "amax (training)"
NO_BATCHES = "no batches"


def plan(
    gemms: list[Gemm], recipe: Recipe, inputs: tuple[Input, ...], meta: Gpu | None = None
) -> list[Decision]:  # fmt: skip
    """One decision for each matmul, in the same order.

    meta: the GPU that tensors on the meta device represent; None leaves their matmuls unquantised. Warns where the
    recipe skips blocks by number and the graph's parameters have no numbers in their names.
    """
    names = [entry.parameter for entry in inputs if entry.parameter]
    in_blocks = frozenset(module_name(entry.parameter) for entry in inputs if entry.parameter and entry.in_block)
    adapters = frozenset(module_name(entry.parameter) for entry in inputs if entry.parameter and entry.adapter)
    heads = frozenset(module_name(entry.parameter) for entry in inputs if entry.parameter and entry.head)
    packed = (gemm.module for gemm in gemms if gemm.packed is not None or _EXPERTS.search(gemm.module))
    names += filter(None, packed)  # packed weights are no parameters
    layers = [_layer(gemm) for gemm in gemms if gemm.product == "fprop" and gemm.layer]
    model = replace(Model.of(recipe, names, layers, in_blocks), adapters=adapters, heads=heads)
    if names and not model.blocks and (recipe.skip_first_blocks or recipe.skip_last_blocks):
        warnings.warn(
            f"recipe {recipe.name!r} skips blocks by their number, and no name in this graph has one "
            f"(such as {names[0]!r}): where blocks are compiled one by one, compile each with the recipe "
            "fp4compile.block_recipe(recipe, model, block)",
            stacklevel=2,
        )
    graphs = {gemm.node.graph for gemm in gemms}  # the captured graph, or the bodies of regions in it
    training = recipe.weight_scales != "amax" and any(map(tangent_dependent, graphs))
    target = None if meta is None else meta.target
    decisions = [_explained(_decide(gemm, recipe, model, target, training), target) for gemm in gemms]
    forward = {one.gemm.node: one for one in decisions if one.gemm.product == "fprop"}
    decisions = [_as_forward(one, forward[one.gemm.forward]) if one.dequantised else one for one in decisions]
    return _with_layers_reasons(decisions)


def _as_forward(one: Decision, forward: Decision) -> Decision:
    """The decision about a matmul of a gradient, with the treatment that its other operand has in the forward matmul.

    Where the forward matmul is not quantised, or the operand cannot be replaced, it is unquantised for that reason.
    """
    gemm = one.gemm
    reason = forward.reason or (None if gemm.index is None else "gathered matrices are not dequantised for gradients")
    if reason is not None:
        return replace(one, reason=reason, dequantised=False)
    treatments = {forward.gemm.a.role: forward.a, forward.gemm.b.role: forward.b}
    (side, operand, role), = ((side, x, OF_FORWARD[x.role]) for side, x in (("a", gemm.a), ("b", gemm.b))
                              if x.role in OF_FORWARD)  # fmt: skip
    treatment = treatments[role]
    reason = f"{one.reason}, with the forward pass's operand dequantised"
    if operand.packed:  # gathered codes, which the graph itself dequantises
        return replace(one, reason=reason)
    if gemm.offs is not None and role == "fprop_x":  # swizzled scales of groups are padded; no kernel dequantises them
        treatment = replace(treatment, layout="linear")
    return replace(one, reason=reason, **{side: treatment})


def _with_layers_reasons(decisions: list[Decision]) -> list[Decision]:
    """The decisions, with the layer's reason for gradients of unproven role whose layer the recipe excludes."""
    forward: dict[str, set[str | None]] = {}
    for one in decisions:
        if one.gemm.product == "fprop" and one.gemm.module:
            forward.setdefault(one.gemm.module, set()).add(one.reason)
    excluded = {module: reasons.pop() for module, reasons in forward.items() if len(reasons) == 1}
    return [
        replace(one, reason=excluded.get(one.gemm.module) or one.reason)
        if one.gemm.unsupported is not None and one.gemm.unsupported.startswith("gradient x ")
        else one
        for one in decisions
    ]


def _explained(decision: Decision, meta: Target | None) -> Decision:
    """The decision, with the reason why FP8 blocks are emulated on matrix units that take other scales."""
    if decision.tier != "emulated" or decision.a is None or decision.b is None:
        return decision
    both = [formats.get(each.format) for each in (decision.a, decision.b)]
    float32 = all(fmt.scale == "float32" for fmt in both) and any(fmt.as_mx is None for fmt in both)
    if not float32 or not _target(decision.gemm, meta).block_scaled_matrix_units:
        return decision
    return replace(decision, note="; ".join(filter(None, (decision.note, NO_POWERS_OF_TWO))))


def _decide(gemm: Gemm, recipe: Recipe, model: "Model", meta: Target | None, training: bool) -> Decision:
    if gemm.packed is not None:
        a, b = (None if fmt is None else Treatment(fmt) for fmt in gemm.packed)
        product = scaled_mm_of(gemm.node)
        tier = product.choice.tier if product.on_gpu else "reference"
        return Decision(gemm, a=a, b=b, tier=tier, note=_overruled(gemm, recipe, a, b))
    reason = gemm.unsupported or _unfit(gemm, meta)
    if reason is not None:
        return Decision(gemm, reason)
    weight = gemm.packed_weight
    if weight is not None and not is_gathered(weight.source):
        return _of_packed_experts(gemm, weight, recipe, meta)
    layer_recipe, reason = of_layer(_layer(gemm), recipe, model)
    dequantised = False
    if layer_recipe is not None and not layer_recipe.quantizes(gemm.product):
        reason, dequantised = _left_by_recipe(gemm, layer_recipe), layer_recipe.reads_forward(gemm.product)
    quantised = layer_recipe is not None and reason is None
    decision = Decision(gemm, reason, dequantised=dequantised)
    if quantised:
        decision = _quantised(gemm, layer_recipe, recipe, meta, training)
    if weight is not None and decision.reason is not None:
        found = gathered_weight_of(weight.source).operand_for(str(weight.role)).format.name
        return replace(decision, reason=f"{decision.reason}; its weight was gathered in {found}")
    return decision


@dataclass(frozen=True)
class Layer:
    """The properties of a layer that the recipe's rules, limits and defaults depend on; see `Gemm`.

    dims: (tokens, out features, in features). experts: whether the weight is one matrix for each expert.
    """

    name: str
    dims: tuple
    tied_to_embedding: bool = False
    selects: bool = False
    experts: bool = False


@dataclass(frozen=True)
class Model:
    """The properties of a model that the recipe's defaults depend on.

    blocks: the number of blocks of each numbered list. with_experts: the modules that have experts. widest_last: the
    last layer, if it is also the widest. in_blocks: layers of a block whose names in the graph begin below it.
    adapters: layers that a library of adapters added. heads: layers without a name in the graph that are heads by their
    names in the model.
    """

    blocks: dict[str, int] = field(default_factory=dict)
    with_experts: frozenset[str] = frozenset()
    widest_last: str | None = None
    in_blocks: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    heads: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, recipe: Recipe, names: Iterable[str], layers: Sequence[Layer], in_blocks: frozenset[str] = frozenset()
    ) -> "Model":  # fmt: skip
        """A model's properties. names: of all parameters or modules. layers: in execution order, if known."""
        names = list(names)
        experts = (match for match in map(_EXPERTS.search, names) if match is not None)
        return cls(
            _count_blocks(recipe, names), frozenset(match.group(1) or "" for match in experts), _widest_last(layers),
            in_blocks,
        )  # fmt: skip


def of_layer(layer: Layer, recipe: Recipe, model: Model) -> tuple[Recipe | None, str | None]:
    """(the recipe for a layer, None where a rule skips it; why the layer is not quantised, or None)."""
    rule = recipe.rule_for(layer.name)
    if rule is None:  # a rule outranks the defaults for positions in the model
        return recipe, _excluded_place(layer, recipe, model) or _too_small(layer, recipe)
    if rule.action == "skip":
        return None, f"rule {rule.pattern!r}"
    return recipe if rule.action == "quantize" else named(rule.action), _too_small(layer, recipe)


def _layer(gemm: Gemm) -> Layer:
    return Layer(gemm.module, gemm.layer, gemm.tied_to_embedding, gemm.selects, gemm.groups is not Grouping.DENSE)


def _quantised(gemm: Gemm, layer_recipe: Recipe, recipe: Recipe, meta: Target | None, training: bool) -> Decision:
    chosen, weight_scales, note = {}, None, None
    for side, operand in (("a", gemm.a), ("b", gemm.b)):
        fmt, outer = getattr(layer_recipe, operand.role), None
        if operand.role == "fprop_x" and layer_recipe.activation_scale == "static":
            outer = recipe.static_scale(gemm.module)
            note = NOT_CALIBRATED if outer is None else None
        if operand.packed and (reason := _misfit(gemm, operand, layer_recipe)) is not None:
            return Decision(gemm, reason)
        if operand.packed and view_of(gemm.node.args[-2:][side == "b"]).casts:
            note = note or BEFORE_CAST
        if fmt is not None and formats.get(fmt).square and _is_batch(operand):
            # F.linear flattens the batch to one matrix, in which square blocks would cross two matrices.
            return Decision(gemm, f"format {fmt} has square blocks, and the operand is a batch of matrices")
        if fmt is not None and formats.get(fmt).square and gemm.offs is not None and not operand.role.endswith("_w"):
            return Decision(gemm, f"format {fmt} has square blocks, and groups may have any number of rows")
        if fmt is not None:
            stochastic = operand.role.endswith("_dy") and gemm.product in layer_recipe.stochastic_rounding
            rule = recipe.scale_rule(fmt) if operand.role == "fprop_w" else "amax"
            if rule != "amax":
                rule, weight_scales = ("amax", TRAINED) if training or operand.packed else (rule, rule)
            if operand.role == "fprop_w" and recipe.needs_batches and weight_scales != TRAINED:
                weight_scales = f"{rule} ({NO_BATCHES})"
            hadamard = gemm.product in layer_recipe.hadamard
            chosen[side] = Treatment(fmt, outer, stochastic, hadamard, scale_rule=rule)
    a, b = chosen.get("a"), chosen.get("b")
    if gemm.packed_weight is not None:  # a gathered weight has its layout already
        scales = gathered_weight_of(gemm.packed_weight.source).operand_for(str(gemm.packed_weight.role)).scales
        swizzled = scales is not None and scales.meta["val"].dim() == 1  # one flat run of bytes
    else:
        swizzled = _tier(gemm, *_swizzled(a, b), meta) == "native"
    if swizzled:
        a, b = _swizzled(a, b)
    return Decision(gemm, a=a, b=b, tier=_tier(gemm, a, b, meta), weight_scales=weight_scales, note=note,
                    fast_accumulation=gemm.product in layer_recipe.fast_accumulation)  # fmt: skip


def _misfit(gemm: Gemm, weight: GemmOperand, recipe: Recipe) -> str | None:
    """The reason that a matmul cannot read a gathered weight's codes; None if it can.

    Raises RuntimeError for a forward matmul that the backward pass recomputes without the codes.
    """
    gathered = gathered_weight_of(weight.source)
    fmt = getattr(recipe, str(weight.role))
    if fmt != gathered.operand_for(str(weight.role)).format.name:
        return f"recipe {recipe.name} says {fmt or 'high precision'}"
    if gemm.product == "fprop" and not gathered.recompute and gemm.node.meta.get("recompute") in _RECOMPUTED:
        raise RuntimeError(
            f"{weight.parameter}: activation checkpointing recomputes the forward matmul in the backward pass, "
            "for which the weight's codes are not gathered; call gather_quantized_(..., recompute=True)"
        )
    return None


def _of_packed_experts(gemm: Gemm, weight: GemmOperand, recipe: Recipe, meta: Target | None) -> Decision:
    """The decision for packed weights; the recipe that packed them also chose the activation's format."""
    packed = expert_weights_of(weight.source)
    of_weight = Treatment(packed.weights.format.name, layout=packed.layout)
    of_activation = None
    if packed.activation is not None:
        of_activation = Treatment(packed.activation, packed.activation_outer, layout=packed.layout)
    a, b = (of_weight, of_activation) if weight is gemm.a else (of_activation, of_weight)
    return Decision(gemm, a=a, b=b, tier=_tier(gemm, a, b, meta), note=_overruled(gemm, recipe, a, b))


def _overruled(gemm: Gemm, recipe: Recipe, a: Treatment | None, b: Treatment | None) -> str | None:
    """A note about the rule for a packed layer, if the rule would skip it or give it other formats; None otherwise."""
    rule = recipe.rule_for(gemm.module)
    if rule is None or rule.action == "quantize":
        return None
    chosen = None if rule.action == "skip" else named(rule.action)
    wanted = set() if chosen is None else {chosen.fprop_x, chosen.fprop_w} - {None}
    if wanted == {one.format for one in (a, b) if one is not None}:
        return None
    return f"rule {rule.pattern!r} has no effect: pack_ has fixed the formats"


def _is_batch(operand: GemmOperand) -> bool:
    """Whether an operand is a batch of activations or gradients that are all multiplied by one weight."""
    lead = operand.source.meta["val"].shape[:-2]
    return operand.role in ("fprop_x", "dgrad_dy") and not all(statically_true(size == 1) for size in lead)


def _swizzled(*treatments: Treatment | None) -> list[Treatment | None]:
    """The treatments with block scales in the layout that SM100's matrix units read."""
    return [None if t is None else replace(t, layout=scale_layout(formats.get(t.format), native=True))
            for t in treatments]  # fmt: skip


def _tier(gemm: Gemm, a: Treatment | None, b: Treatment | None, meta: Target | None) -> str:
    """The tier that computes the matmul: "reference" on a CPU, else the tier of the kernel that `choose` names."""
    out = gemm.node.meta["val"]
    if out.device.type == "cpu" and not on_gpu(out):
        return "reference"
    target = _target(gemm, meta)
    left, right = (_operand_spec(*pair, gemm.offs is not None) for pair in ((gemm.a, a), (gemm.b, b)))
    (m, n, k), grouping = gemm.dims, gemm.groups
    batches, groups = 1, 1 if gemm.offs is None else gemm.offs.meta["val"].shape[0]
    if grouping in (Grouping.BATCHED, Grouping.GATHERED):  # each matrix of A has its own B
        (batches, m, n), grouping = out.shape, Grouping.BATCHED
        if gemm.index is not None and gemm.a.parameter is not None:  # computed as x @ W^T
            left, right, m, n = right, left, n, m
    spec = ProductSpec(left, right, out.dtype, grouping)
    return choose(Problem(spec, m, n, k, target, batches, grouping is Grouping.BATCHED, groups)).tier


def _target(gemm: Gemm, meta: Target | None) -> Target:
    """The GPU of a matmul that is not on a CPU. meta: see `plan`."""
    out = gemm.node.meta["val"]
    return target_of(out.device) if meta is None or on_gpu(out) else meta


def _operand_spec(operand: GemmOperand, treatment: Treatment | None, grouped: bool = False) -> OperandSpec:
    if treatment is None:
        return OperandSpec(None, operand.source.meta["val"].dtype)
    fmt = formats.get(treatment.format)
    outer = "group" if grouped and treatment.per_group else fmt.outer or "none"
    return OperandSpec(fmt, fmt.data_dtype, treatment.layout == "swizzled", outer)


def _unfit(gemm: Gemm, meta: Target | None) -> str | None:
    """The reason that dtype or device exclude the matmul under every recipe; None if they do not."""
    devices = _DEVICES if meta is None else (*_DEVICES, "meta")
    for operand in (gemm.a, gemm.b):
        value = operand.source.meta["val"]
        if value.dtype not in FLOAT_DTYPES:
            return f"dtype {str(value.dtype).removeprefix('torch.')}"
        if value.device.type not in devices:
            return f"device {value.device.type}"
    out = gemm.node.meta["val"].dtype
    return None if out in FLOAT_DTYPES else f"dtype {str(out).removeprefix('torch.')}"


def _left_by_recipe(gemm: Gemm, recipe: Recipe) -> str:
    if gemm.product == "attention":
        return "no operand is a parameter, and the recipe leaves attention in high precision"
    return f"recipe {recipe.name} leaves {gemm.product} in high precision"


def _excluded_place(layer: Layer, recipe: Recipe, model: Model) -> str | None:
    """The reason that the recipe's defaults skip a layer for its position in the model; None if they do not."""
    if "lora_" in layer.name:  # before the head: it is the last and widest layer of a graph that holds it alone
        return "LoRA adapter"
    if recipe.skip_lm_head and _is_head(layer, model):
        return "output head"
    if layer.name in model.adapters:
        return "adapter"
    if layer.selects or _is_router(layer.name, model):
        return "router: its outputs choose among experts"
    place = block_of(layer.name)
    if place is None:
        return None
    container, index = place
    if index < recipe.skip_first_blocks:
        return f"block {index} is among the first {recipe.skip_first_blocks}"
    if recipe.skip_last_blocks and index >= model.blocks.get(container, 0) - recipe.skip_last_blocks:
        return f"block {index} is among the last {recipe.skip_last_blocks}"
    return None


def _is_head(layer: Layer, model: Model) -> bool:
    if layer.tied_to_embedding or layer.name in model.heads:
        return True
    if layer.name in model.in_blocks or block_of(layer.name) is not None:
        return False  # such as single_transformer_blocks.0.proj_out of Flux: further blocks and the head follow
    return named_as_head(layer.name) or (layer.name == model.widest_last and layer.name != "")


def named_as_head(name: str) -> bool:
    """Whether a layer outside of numbered blocks is an output head by its name."""
    return name == "output" or name.split(".")[-1] in _HEADS


def _is_router(name: str, model: Model) -> bool:
    """Whether a layer's name is a router's. A `gate` is a router beside experts, otherwise half of a gated MLP."""
    parent, _, own = name.rpartition(".")
    return own in _ROUTERS or (own == "gate" and parent in model.with_experts)


def _widest_last(layers: Sequence[Layer]) -> str | None:
    """The last layer's name if that layer is the widest, has no experts and one matmul; else None."""
    if len(layers) < 2 or layers[-1].experts:
        return None
    *others, last = layers
    wider = all(other.name != last.name and statically_true(last.dims[1] > other.dims[1]) for other in others)
    return last.name if wider else None


def _count_blocks(recipe: Recipe, names: Iterable[str]) -> dict[str, int]:
    """The number of blocks of each numbered list; the recipe's number overrides the count."""
    counts: dict[str, int] = {}
    for name in names:
        place = block_of(name)
        if place is not None:
            container, index = place
            counts[container] = max(counts.get(container, 0), index + 1)
    if recipe.num_blocks is not None:
        counts = dict.fromkeys(counts, recipe.num_blocks)
    return counts


def _too_small(layer: Layer, recipe: Recipe) -> str | None:
    """The reason that names the recipe's lower limit that a dimension of the layer misses; None if it misses none."""
    names = (("M", "min_m"), ("N", "min_n"), ("K", "min_k"))
    for size, (letter, limit) in zip(layer.dims, names, strict=True):
        # A symbolic size that may be large enough counts as large enough, so that no guard is needed.
        if statically_true(size < getattr(recipe, limit)):
            return f"{letter}={size} is below {limit}={getattr(recipe, limit)}"
    return None
