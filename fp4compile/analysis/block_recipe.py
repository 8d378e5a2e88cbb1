"""The recipe for a block that is compiled by itself, made from a recipe that uses full names of the model.

Dynamo lets equal blocks share a graph, whose names begin below the block; blocks with different recipes have separate
graphs.
"""

from glob import escape
from pathlib import Path

from torch import nn

from fp4compile.analysis.module_names import block_of, check_module, module_name, named_tensors, parameter_name, walk
from fp4compile.analysis.plan import Model
from fp4compile.recipe import Recipe, Rule, resolve


def block_recipe(recipe: str | dict | Recipe | Path | None, model: nn.Module, block: nn.Module) -> Recipe:
    """The recipe for a block that is compiled by itself, with the decisions of `recipe` for the block in the model.

    recipe: as for `fp4compile.backend`; its rules, skipped blocks and static scales use names in `model`. In the result
        they use names below the block, and no block is skipped by its number.
    block: a module of `model`.

    for block in model.layers:
        block.compile(backend=fp4compile.backend(fp4compile.block_recipe(recipe, model, block)))

    Raises TypeError if `model` or `block` is not a module, ValueError if the model does not contain the block, and the
    errors of `backend` for a bad recipe.
    """
    check_module(model)
    check_module(block, "block")
    chosen = resolve(recipe)
    path = next((named.name for named, module in walk(model) if module is block), None)
    if path is None:
        raise ValueError(f"block: expected a module of the model, got a {type(block).__name__} that is no part of it")
    full = {name: f"{path}.{name}".strip(".") for name in _layers(block)}
    skipped = _is_skipped(chosen, model, path)
    decided = {name: chosen.rule_for(full[name]) for name in full}
    rules = [
        Rule(escape(name) or "*", "skip" if rule is None else rule.action)  # "" is the block itself: a layer
        for name, rule in decided.items()
        if rule is not None or skipped
    ]
    scales = {name: scale for name in full if (scale := chosen.static_scale(full[name])) is not None}
    if chosen.activation_scale != "static" and not any(rule.takes_static_scale for rule in rules):
        scales = {}  # a recipe refuses scales that it never uses
    return chosen.replace(
        rules=rules, static_scales=scales, skip_first_blocks=0, skip_last_blocks=0, num_blocks=None
    )  # fmt: skip


def _is_skipped(recipe: Recipe, model: nn.Module, path: str) -> bool:
    """Whether the recipe skips a block by its number."""
    place = block_of(path)
    if place is None:
        return False
    container, index = place
    counts = Model.of(recipe, [named.name for named, _ in named_tensors(model)], []).blocks
    return index < recipe.skip_first_blocks or index >= counts.get(container, index + 1) - recipe.skip_last_blocks


def _layers(block: nn.Module) -> list[str]:
    """The names of possible layers below a block, packed ones too, in the order of the modules."""
    found = [module_name(named.name) for named, tensor in named_tensors(block) if tensor.dim() in (2, 3)]
    packed = [parameter_name(named.name) for named, module in walk(block) if "weight_data" in module._buffers]
    return list(dict.fromkeys([*found, *packed]))
