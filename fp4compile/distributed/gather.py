"""`gather_quantized_`: make FSDP2 gather a model's sharded weights as codes."""

from pathlib import Path

import torch
from torch import nn

from fp4compile.analysis.module_names import check_module, module_name, named_tensors, walk
from fp4compile.analysis.plan import Layer, Model, of_layer
from fp4compile.distributed.codes import Direction
from fp4compile.distributed.fsdp import Sharded, sharded_parameters
from fp4compile.distributed.link import nvlink_connects
from fp4compile.distributed.shard import Member, QuantizedShard, Together
from fp4compile.distributed.whole import GatheredFormat
from fp4compile.formats.quantize_spec import COLUMNS, FLOAT_DTYPES, ROWS
from fp4compile.recipe import Recipe, agreement, resolve
from fp4compile.report.report import Report, Row
from fp4compile.weights.scale_layout import layout_on


def gather_quantized_(
    model: nn.Module,
    recipe: str | dict | Recipe | Path | None = None,
    *,
    recompute: bool = False,
    over_nvlink: bool = False,
) -> Report:
    """Make FSDP2 gather the codes of the weights that a recipe quantises, instead of 16-bit or 32-bit numbers.

    Call it after `torch.distributed.fsdp.fully_shard`, before the first forward pass, and compile the blocks with a
    backend of the same recipe. Each rank quantises its rows; a forward pass gathers codes along the rows, a backward
    pass codes along the columns. Gradients, optimisers and checkpoints do not change.

    recipe: as for `fp4compile.backend`. Its rules match the full names of layers in `model`.
    recompute: whether the backward pass computes forward matmuls again, as activation checkpointing does. Its gathers
        then contain the codes in both directions.
    over_nvlink: whether to gather codes between GPUs of one host that NVLink connects, too. There the bytes saved are
        worth less than the host's time for gathers of codes (benchmarks/results/sharded_step.md).

    Weights of linear layers (`nn.Linear`) whose forward matmul and input gradient the recipe quantises are gathered as
    codes. All others are gathered unquantised, for a reason in the report.

    Returns a report of the weights: the forward matmul and the input gradient of each layer.

    Raises TypeError if `model` is no module or `recompute` or `over_nvlink` no bool, ValueError for a model without
    parameters that FSDP2 shards and for a second call, RuntimeError after the first forward pass and if another rank
    passes another recipe, `recompute` or `over_nvlink`, and the errors of `backend` for a bad recipe.
    """
    check_module(model)
    options = {"recompute": recompute, "over_nvlink": over_nvlink}
    for name, value in options.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}: expected a bool, got {type(value).__name__}")
    chosen, parameters = resolve(recipe), list(sharded_parameters(model))
    if not parameters:
        raise ValueError("model: FSDP2 shards none of its parameters; call torch.distributed.fsdp.fully_shard first")
    if any(isinstance(one.local, QuantizedShard) for one in parameters):
        raise ValueError("model: its weights are gathered quantised already")
    if any(one.gathered_before for one in parameters):
        raise RuntimeError("model: its parameters were gathered; call gather_quantized_ before the first forward pass")
    groups_of_ranks = {one.process_group.group_name: one.process_group for one in parameters}
    settings = agreement.settings_of(chosen, {f"gather_quantized_({name})": value for name, value in options.items()})
    agreement.publish_to(groups_of_ranks.values(), settings).compare()
    on_gpu = any(one.device.type == "cuda" for one in parameters)
    fast = {name for name, group in groups_of_ranks.items() if on_gpu and not over_nvlink and nvlink_connects(group)}
    layers = _layers(model, parameters, chosen)
    names = [named.name for named, _ in named_tensors(model)]
    around = Model.of(chosen, names, [layer for layer, _ in layers])
    report = Report(chosen.name)
    groups: dict[int, Together] = {}
    for layer, one in layers:
        found = _form(layer, one, chosen, around, recompute, one.process_group.group_name in fast)
        report.add(_rows(layer, one, found, chosen), {})
        if isinstance(found[0], GatheredFormat):
            # FSDP2 copies offloaded shards from the host to the device one at a time.
            together = groups.setdefault(id(one if one.offloaded else one.group), Together())
            _attach(Member(one, found[0], together))
    return report


OVER_NVLINK = (
    "over NVLink a gather of codes costs the host more time than it saves on the link; "
    "gather_quantized_(..., over_nvlink=True) gathers codes"
)
# The form of the gathered codes, or the reason against codes; the layer's recipe, None if a rule skips the layer.
_Found = tuple[GatheredFormat | str, Recipe | None]


def _layers(model: nn.Module, parameters: list[Sharded], recipe: Recipe) -> list[tuple[Layer, Sharded]]:
    """The sharded weights of linear layers and of experts."""
    names = {module: named.name for named, module in reversed(list(walk(model)))}  # the first of several names
    found = []
    for one in parameters:
        (module, child), *others = one.modules
        experts = len(one.size) == 3
        if experts or (isinstance(module, nn.Linear) and child == "weight"):
            name = f"{names[module]}.{child}".removeprefix(".")
            n, k = one.size[-2:]
            # The unknown number of tokens counts as large enough.
            tied = any(isinstance(other, nn.Embedding) for other, _ in others)
            found.append((Layer(module_name(name), (recipe.min_m, n, k), tied, experts=experts), one))
    return found


def _form(layer: Layer, one: Sharded, recipe: Recipe, around: Model, recompute: bool, fast: bool) -> _Found:
    """The form of a weight's gathered codes, or the reason that it is gathered unquantised; and its recipe.

    fast: whether the link is too fast for a gain.
    """
    chosen, reason = of_layer(layer, recipe, around)
    reason = reason or (None if chosen is None else _left_by_recipe(chosen)) or _obstacle(layer, one)
    if chosen is None or reason is not None:
        return str(reason), chosen
    form = _form_by(chosen, one, recompute)
    reason = form.rows.misfit(one.ranks) or form.columns.misfit(one.ranks) or (OVER_NVLINK if fast else None)
    return reason or form, chosen


def _left_by_recipe(recipe: Recipe) -> str | None:
    for product in ("fprop", "dgrad"):
        if recipe.operands(product)[1] is None:
            return f"recipe {recipe.name} leaves its weight in high precision in {product}"
    return None


def _obstacle(layer: Layer, one: Sharded) -> str | None:
    """The reason that no recipe can gather a weight as codes; None if the recipe decides."""
    if layer.experts:
        return "weights of experts are gathered in high precision"
    if len(one.modules) > 1:
        return "another module has the same parameter"
    if one.dtype not in FLOAT_DTYPES:
        return f"dtype {str(one.dtype).removeprefix('torch.')}"
    if one.device.type not in ("cpu", "cuda"):
        return f"device {one.device.type}"
    return one.obstacle()


def _form_by(recipe: Recipe, one: Sharded, recompute: bool) -> GatheredFormat:
    n, k = one.size
    # Whether a GPU's matrix units read swizzled scales depends on the formats of both operands.
    by_rows = layout_on(one.device, recipe.fprop_x, str(recipe.fprop_w), n, k)
    by_columns = layout_on(one.device, recipe.dgrad_dy, str(recipe.dgrad_w), k, n)
    rows = Direction(str(recipe.fprop_w), ROWS, (n, k), by_rows)
    columns = Direction(str(recipe.dgrad_w), COLUMNS, (n, k), by_columns)
    return GatheredFormat(rows, columns, one.dtype, recompute)


def _attach(member: Member) -> None:
    """Replace a parameter's shard by one with FSDP2's hooks, also after each `load_state_dict(assign=True)`."""
    one = member.sharded

    def wrap(*_: object) -> None:
        local = one.local
        if not isinstance(local, QuantizedShard):
            one.replace_local(QuantizedShard(local, member))

    with torch.no_grad():
        wrap()
    module, _ = one.modules[0]
    module.register_load_state_dict_post_hook(wrap)


def _rows(layer: Layer, one: Sharded, found: _Found, recipe: Recipe) -> list[Row]:
    form, chosen = found
    _, n, k = layer.dims
    if isinstance(form, str) or chosen is None:
        dtype = str(one.dtype).removeprefix("torch.")
        return [Row(layer.name, "fprop", None, n, k, None, dtype, tier=None, reason=str(form), flops=None)]
    return [
        Row(layer.name, "fprop", None, n, k, chosen.fprop_x, form.rows.format, tier=None, reason=None, flops=None),
        Row(layer.name, "dgrad", None, k, n, chosen.dgrad_dy, form.columns.format, tier=None, reason=None, flops=None),
    ]
