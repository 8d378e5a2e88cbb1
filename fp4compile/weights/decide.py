"""Decide by recipe which weights of a model are packed, and give the reasons for all others."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from fp4compile.analysis.module_names import Named, module_name, named_tensors, walk
from fp4compile.analysis.plan import NOT_CALIBRATED, Layer, Model, of_layer
from fp4compile.formats import formats
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.rules import unmatched
from fp4compile.report.report import Row
from fp4compile.weights.buffers import LayerFormat, PackedWeight
from fp4compile.weights.experts import Place, check_contracted, places_of
from fp4compile.weights.experts import obstacle as experts_obstacle
from fp4compile.weights.linear import IN_ATTENTION, is_linear, obstacle, sizes
from fp4compile.weights.replacements import Weight

TRAINED = "it is trained: it requires a gradient, and others do not; requires_grad_(False) before pack_ packs it"
UNKNOWN_DIMENSION = "nothing says which dimension is contracted: name it in pack_(contracted=...)"


# The weight that `pack_` packs, or None; and its row in the report, if it has one.
Decided = tuple[Weight | None, Row | None]


def decisions(
    model: nn.Module, recipe: str | dict | Recipe | Path | None, contracted: Mapping[str, int] | None = None
) -> list[Decided]:
    """The decision about each weight of a model, which may be on the meta device. Warns and raises as `pack_`."""
    chosen = resolve(recipe)
    places = _places(model)
    experts = places_of(model, is_linear, check_contracted({} if contracted is None else contracted))
    choice = _Choice(model, chosen, places, experts)
    _warn_of_rules(choice, places)
    _warn_of_trained(choice, places, experts)
    linears = (_of_linear(choice, names) for names in places)
    return [*linears, *_of_attentions(model), *(_of_experts(choice, place) for place in experts)]


# The format, or the reason that a weight is not packed; and a note on a packed weight's difference from the recipe.
_Found = tuple[LayerFormat | str, str | None]


def _places(model: nn.Module) -> list[list[str]]:
    """The names of each linear layer: one for each attribute that holds the layer."""
    found: dict[int, list[str]] = {id(module): [] for module in model.modules() if is_linear(module)}
    if is_linear(model):
        found[id(model)].append("")
    for path, parent in model.named_modules():
        for child, module in parent._modules.items():
            if id(module) in found:
                found[id(module)].append(f"{path}.{child}" if path else child)
    return list(found.values())


class _Choice:
    """Decides by recipe about each linear layer and each weight of experts of a model.

    around: the facts about the whole model. linears: the names of the linear layers that hold each parameter, and
    elsewhere: how many other modules do, by the parameter's id.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, places: list[list[str]], experts: list[Place]):
        self.model, self.recipe = model, recipe
        modules = {named.path: (named, module) for named, module in walk(model)}
        self.named = {path: named for path, (named, _) in modules.items()}
        self.named |= {named.path: named for named, _ in named_tensors(model)}
        parameters = [named.name for named, _ in named_tensors(model)]
        parameters += [named.name for named, module in modules.values() if isinstance(module, PackedWeight)]
        layers = {names[0]: self.layer(names[0], sizes(model.get_submodule(names[0]))) for names in places}
        layers |= {one.names[0]: self.layer(one.names[0], one.sizes, experts=True) for one in experts}
        layers |= {path: self.layer(path, (packed.in_features, packed.out_features), experts=packed.experts is not None)
                   for path, packed in model.named_modules() if isinstance(packed, PackedWeight)}  # fmt: skip
        self.around = Model.of(recipe, parameters, [layers[name] for name in _in_order(model) if name in layers])
        # By id, because references to modules or parameters would keep the weights alive.
        self.linears: dict[int, list[str]] = {}
        for names in places:
            for parameter in model.get_submodule(names[0]).parameters(recurse=False):
                self.linears.setdefault(id(parameter), []).append(names[0])
        others = (module for module in model.modules() if not is_linear(module))
        self.elsewhere = Counter(id(parameter) for module in others for parameter in module._parameters.values())
        weights = [model.get_submodule(names[0])._parameters.get("weight") for names in places]
        weights = [weight for weight in weights if id(weight) not in self.elsewhere]  # an embedding's may be frozen
        weights += [one.parameter for one in experts if one.in_first is not None]
        frozen = (weight is not None and weight.is_floating_point() and not weight.requires_grad for weight in weights)
        # Whether a part of the model is trained, so that requires_grad is set on purpose.
        self.adapted = any(named.part for named in self.named.values())
        self.in_part = self.adapted or any(frozen)

    def layer(self, name: str, sizes: tuple[int, int], tied: bool = False, *, experts: bool = False) -> Layer:
        """The properties of a linear layer or a parameter of experts that rules and defaults read. name: its path."""
        inner, outer = sizes
        # The unknown number of tokens counts as large enough.
        own = self.named[name].name
        return Layer(module_name(own) if experts else own, (self.recipe.min_m, outer, inner), tied, experts=experts)

    def trained(self, name: str, weight: torch.Tensor | None) -> str | None:
        """The reason that a weight is not packed: it is trained, or an adapter's; None if it is neither."""
        if self.named[name].part is not None:
            return self.named[name].part
        return TRAINED if self.in_part and weight is not None and weight.requires_grad else None

    def layer_format(self, names: list[str], linear: nn.Module) -> _Found:
        """The format of a packed layer, or the reason that a layer is not packed; and a note for the report."""
        reason = self.trained(names[0], linear._parameters.get("weight")) or obstacle(linear)
        if reason is not None:
            return reason, None
        tied = [name for name in self.linears[id(linear.weight)] if name != names[0]]
        if tied:
            return f"its weight is that of {tied[0]!r} too", None
        tied_elsewhere = id(linear.weight) in self.elsewhere
        return self._format([self.layer(name, sizes(linear), tied_elsewhere) for name in names], names)

    def experts_format(self, one: Place) -> _Found:
        """The format of packed experts, or the reason that they are not packed; and a note for the report."""
        if one.in_first is None:
            return UNKNOWN_DIMENSION, None
        reason = self.trained(one.names[0], one.parameter) or experts_obstacle(one)
        if reason is not None:
            return reason, None
        key = id(one.parameter)
        if self.elsewhere[key] + len(self.linears.get(key, ())) > 1:
            return "another module has the same parameter", None
        names = one.names
        found, note = self._format([self.layer(name, one.sizes, experts=True) for name in names], names)
        if isinstance(found, LayerFormat) and found.activation and formats.get(found.activation).square:
            return f"format {found.activation} has square blocks, and groups may have any number of rows", None
        return found, note

    def _format(self, layers: list[Layer], names: Sequence[str]) -> _Found:
        """The recipe's format or reason for one layer, and a note. layers: an entry for each of the layer's names."""
        layer_recipe, reason = self._decide(layers, names)
        if layer_recipe is None or reason is not None:
            return str(reason), None  # without a recipe there is always a reason
        if layer_recipe.fprop_w is None:
            return f"recipe {layer_recipe.name} leaves weights in high precision", None
        rule = self.recipe.scale_rule(layer_recipe.fprop_w)
        if layer_recipe.activation_scale == "dynamic":
            return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x, scale_rule=rule), None
        outer = next((scale for layer in layers if (scale := self.recipe.static_scale(layer.name)) is not None), None)
        note = NOT_CALIBRATED if outer is None else None
        return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x, outer, rule), note

    def _decide(self, layers: list[Layer], names: Sequence[str]) -> tuple[Recipe | None, str | None]:
        """The layer's recipe, or None, and the reason that it is not packed, or None, as the backend decides."""
        decisions = [of_layer(layer, self.recipe, self.around) for layer in layers]
        if any(decision != decisions[0] for decision in decisions):
            return None, f"the recipe treats it differently under its names {', '.join(names)}"
        return decisions[0]


def _in_order(model: nn.Module) -> Iterator[str]:
    """The names of modules and parameters, approximately in execution order."""
    for path, module in model.named_modules(remove_duplicate=False):
        yield path
        # A scripted module has another kind of dictionary, which only gives pairs.
        yield from (f"{path}.{child}".removeprefix(".") for child, _ in module._parameters.items())


def _of_linear(choice: _Choice, names: list[str]) -> Decided:
    linear = choice.model.get_submodule(names[0])
    found, note = choice.layer_format(names, linear)
    weight = linear._parameters.get("weight")  # `linear.weight` would compute a parametrised weight
    dtype = None if weight is None else weight.dtype
    row = _row_of(choice.named[names[0]], sizes(linear), dtype, found, note)
    return Weight(tuple(names), found) if isinstance(found, LayerFormat) else None, row


def _of_attentions(model: nn.Module) -> Iterator[Decided]:
    """Rows for the input projections of `nn.MultiheadAttention`: parameters that it multiplies itself."""
    seen: set[int] = set()
    for named, module in walk(model):
        if not isinstance(module, nn.MultiheadAttention) or id(module) in seen:
            continue
        seen.add(id(module))
        for child, weight in module._parameters.items():
            if weight is not None and child.endswith("proj_weight"):
                outer, inner = weight.shape
                yield None, _row_of(named.child(child), (inner, outer), weight.dtype, IN_ATTENTION, None)


def _of_experts(choice: _Choice, place: Place) -> Decided:
    found, note = choice.experts_format(place)
    matrices = place.parameter.shape[0]
    if place.in_first is None and matrices == 1:  # a table of positions, for example, and no experts
        return None, None
    row = _row_of(choice.named[place.names[0]], place.sizes, place.parameter.dtype, found, note, matrices)
    return Weight(place.names, found, place) if isinstance(found, LayerFormat) else None, row


def _row_of(
    named: Named, sizes: tuple[int, int], dtype: torch.dtype | None, packed: LayerFormat | str, note: str | None,
    matrices: int = 1,
) -> Row:  # fmt: skip
    """The report's row of a linear layer or of a parameter of experts."""
    inner, outer = sizes
    path, own = module_name(named.path), module_name(named.name)
    rule = None
    if isinstance(packed, str):
        left, right, reason = None, None if dtype is None else str(dtype).removeprefix("torch."), packed
    else:
        left, right, reason = packed.activation, packed.weight, None
        rule = packed.scale_rule
    return Row(
        path, "fprop", None, outer, inner, left=left, right=right, tier=None, reason=reason, flops=None,
        weight_scales=None if rule == "amax" else rule, note=note, name=None if own == path else own,
        weight=None if isinstance(packed, str) else formats.get(packed.weight).nbytes(outer, inner, matrices),
        weight_plain=None if dtype is None else matrices * outer * inner * dtype.itemsize,
    )  # fmt: skip


def _warn_of_rules(choice: _Choice, places: list[list[str]]) -> None:
    # For the backend, parameters of other modules (such as experts) are layers, too, and both may use one recipe.
    matrices = (named.name for named, parameter in named_tensors(choice.model) if parameter.dim() > 1)
    names = [*(choice.named[name].name for group in places for name in group), *map(module_name, matrices)]
    for rule in unmatched(choice.recipe.rules, names):
        known = f"decides for no layer of the model (such as {names[0]!r})" if names else "and the model has no layer"
        warnings.warn(f"recipe {choice.recipe.name!r}: rule {rule.pattern!r} {known}", stacklevel=4)


def _warn_of_trained(choice: _Choice, places: list[list[str]], experts: list[Place]) -> None:
    weights = [(names[0], choice.model.get_submodule(names[0])._parameters.get("weight")) for names in places]
    weights += [(one.names[0], one.parameter) for one in experts]
    trained = [name for name, weight in weights if choice.trained(name, weight) == TRAINED]
    if trained:
        why = "the model has adapters" if choice.adapted else "others are frozen"
        warnings.warn(
            f"{len(trained)} weights require a gradient, such as that of {trained[0]!r}, and {why}: they count as "
            "trained and are not packed; call requires_grad_(False) before pack_ on those that are not",
            stacklevel=4,
        )
