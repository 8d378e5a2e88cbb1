"""`pack_`: store the weights of a model packed, in place of its parameters. `packed.files` writes and reads the result.

The backend keeps packed weights beside the parameters (`weight_cache`). `pack_` removes the parameters, so that a model
needs less memory. A packed layer computes what the compiled layer would compute, with the same bits, both eagerly and
compiled.
"""

import warnings
from pathlib import Path

from torch import nn

from fp4compile.packed.linear import LayerFormat, PackedLinear, is_linear, leave_fast_paths, obstacle, sizes
from fp4compile.passes.find import clean_name, module_name
from fp4compile.passes.plan import NOT_CALIBRATED, Layer, Model, of_layer
from fp4compile.recipe import Recipe, resolve, unmatched_rules
from fp4compile.report import Report, Row


def pack_(model: nn.Module, recipe: str | dict | Recipe | Path | None = None) -> Report:
    """Replace the linear layers that a recipe quantises by packed ones, in place, and free each weight on the way.

    recipe: as for `fp4compile.backend`; what it says of the forward product decides.

    Linear layers are modules of type `nn.Linear`, and the Conv1D of transformers. A layer that has several names in the
    model is packed once. Left alone, with a reason in the report, are layers of a subclass, parametrised layers, layers
    with other hooks than forward hooks, and layers whose weight another linear layer has too. A weight that an
    embedding has too stays with the embedding.

    Packed layers are for inference. They keep the forward hooks and the attributes of the layers. For a model that runs
    under autocast, call `pack_` under autocast, so that the weights are cast before they are quantised, as in a run.

    Returns a report of what was packed, and of why the rest was not. Warns of rules that decide about no layer.

    Raises TypeError for what is no module, ValueError for a model that is itself a linear layer, and what `backend`
    raises for a bad recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = resolve(recipe)
    places = _places(model)
    _warn_of_rules(model, chosen, places)
    report = Report(chosen.name)
    choice = _Choice(model, chosen, places)
    for names in places:  # names, because a list of the modules would keep the weights alive
        linear = model.get_submodule(names[0])
        layer_format = choice.layer_format(names, linear)
        note = None
        if isinstance(layer_format, LayerFormat):
            note = choice.note(names, linear)
            packed = PackedLinear.pack(linear, layer_format, chosen.scale_rule(layer_format.weight))
            for name in names:
                replace(model, name, packed)
        report.add([_row(names[0], linear, layer_format, chosen, note)], {})
        del linear
    leave_fast_paths(model)
    return report


def _places(model: nn.Module) -> list[list[str]]:
    """The names of each linear layer: one name for every attribute of a module that holds the layer."""
    found: dict[int, list[str]] = {id(module): [] for module in model.modules() if is_linear(module)}
    if is_linear(model):
        found[id(model)].append("")
    for path, parent in model.named_modules():
        for child, module in parent._modules.items():
            if id(module) in found:
                found[id(module)].append(f"{path}.{child}" if path else child)
    return list(found.values())


class _Choice:
    """Decides what a recipe makes of each linear layer of a model.

    around: what the recipe must know of the whole model. linears: the names of the linear layers that hold each
    parameter, by the parameter's id. elsewhere: the ids of the parameters that other modules hold.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, places: list[list[str]]):
        self.recipe = recipe
        parameters = [clean_name(name) for name, _ in model.named_parameters()]
        layers = [_layer(names[0], model.get_submodule(names[0]), recipe) for names in places]
        self.around = Model.of(recipe, parameters, layers)
        # By id, because references to modules or parameters would keep the weights alive.
        self.linears: dict[int, list[str]] = {}
        for names in places:
            for parameter in model.get_submodule(names[0]).parameters(recurse=False):
                self.linears.setdefault(id(parameter), []).append(names[0])
        others = (module for module in model.modules() if not is_linear(module))
        self.elsewhere = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}

    def layer_format(self, names: list[str], linear: nn.Module) -> LayerFormat | str:
        """The format that a layer is packed in, or the reason why it is left alone."""
        reason = obstacle(linear)
        if reason is not None:
            return reason
        tied = [name for name in self.linears[id(linear.weight)] if name != names[0]]
        if tied:
            return f"its weight is that of {tied[0]!r} too"
        layer_recipe, reason = self._decide(names, linear)
        if layer_recipe is None or reason is not None:
            return str(reason)  # without a recipe there is always a reason
        if layer_recipe.fprop_w is None:
            return f"recipe {layer_recipe.name} leaves weights in high precision"
        if layer_recipe.activation_scale == "dynamic":
            return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x)
        return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x, self._outer(names))

    def note(self, names: list[str], linear: nn.Module) -> str | None:
        """In what a packed layer differs from what the recipe says; None where it does not."""
        layer_recipe, _ = self._decide(names, linear)
        static = layer_recipe is not None and layer_recipe.activation_scale == "static"
        return NOT_CALIBRATED if static and self._outer(names) is None else None

    def _outer(self, names: list[str]) -> float | None:
        return next((scale for name in names if (scale := self.recipe.static_scale(clean_name(name)))), None)

    def _decide(self, names: list[str], linear: nn.Module) -> tuple[Recipe | None, str | None]:
        """(the layer's recipe or None, why it is left alone or None), decided as the backend decides."""
        tied = id(linear.weight) in self.elsewhere
        decisions = [of_layer(_layer(name, linear, self.recipe, tied), self.recipe, self.around) for name in names]
        if any(decision != decisions[0] for decision in decisions):
            return None, f"the recipe treats it differently under its names {', '.join(names)}"
        return decisions[0]


def _layer(name: str, linear: nn.Module, recipe: Recipe, tied: bool = False) -> Layer:
    inner, outer = sizes(linear)
    # The number of tokens is unknown here, and counts as large enough.
    return Layer(module_name(clean_name(f"{name}.weight")), (recipe.min_m, outer, inner), tied)


def _row(name: str, linear: nn.Module, packed: LayerFormat | str, recipe: Recipe, note: str | None = None) -> Row:
    inner, outer = sizes(linear)
    rule = None
    if isinstance(packed, str):
        weight = linear._parameters.get("weight")  # `linear.weight` would compute a parametrised weight
        left, right, reason = None, None if weight is None else str(weight.dtype).removeprefix("torch."), packed
    else:
        left, right, reason = packed.activation, packed.weight, None
        rule = recipe.scale_rule(packed.weight)
    return Row(
        name, "fprop", None, outer, inner, left=left, right=right, tier=None, reason=reason, flops=None,
        weight_scales=None if rule == "amax" else rule, note=note,
    )  # fmt: skip


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the submodule of that name. Raises ValueError for "", the model itself."""
    parent, _, child = name.rpartition(".")
    if not name:
        raise ValueError("model: a single linear layer cannot be replaced in place; put it into a module")
    setattr(model.get_submodule(parent), child, module)


def _warn_of_rules(model: nn.Module, recipe: Recipe, places: list[list[str]]) -> None:
    # To the backend, parameters of other modules (such as experts) are layers too, and one recipe may serve both.
    matrices = (name for name, parameter in model.named_parameters() if parameter.dim() > 1)
    names = [*(name for group in places for name in group), *map(module_name, matrices)]
    for rule in unmatched_rules(recipe, map(clean_name, names)):
        known = f"decides for no layer of the model (such as {names[0]!r})" if names else "and the model has no layer"
        warnings.warn(f"recipe {recipe.name!r}: rule {rule.pattern!r} {known}", stacklevel=3)
