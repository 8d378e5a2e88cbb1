"""Models whose weights are stored packed: `pack_` in place; `packed_files` writes and reads them.

The backend keeps packed weights beside the parameters; `pack_` puts them in the parameters' place, so that the memory
goes down too. A packed layer computes what the compiled layer would, with the same bits, eagerly and compiled. A weight
that autocast would cast is packed as it is cast if `pack_` runs under autocast, too.
"""

import warnings

from torch import nn

from fp4compile.packed.linear import LayerFormat, PackedLinear, is_linear, leave_fast_paths, obstacle, sizes
from fp4compile.passes.find import clean_name, module_name
from fp4compile.passes.plan import Layer, Model, of_layer
from fp4compile.recipe import Recipe, resolve, unmatched_rules
from fp4compile.report import Report, Row


def pack_(model: nn.Module, recipe: str | dict | Recipe | None = None) -> Report:
    """Replace the linear layers that a recipe quantises by packed ones, in place, freeing each weight as it goes.

    recipe: as for `fp4compile.backend`; of it, the forward product counts. Packed are modules of type `nn.Linear` and
        the Conv1D of transformers, each one once, whatever number of names it has. Left alone, with a reason in the
        report, are layers of a subclass, parametrised ones, those with hooks other than forward hooks, and those whose
        weight another linear layer has too. A weight that an embedding shares stays with the embedding.

    Packed layers are for inference; forward hooks and attributes of a layer go over to its packed one. For a model that
    runs under autocast, call it under autocast: the weights are then cast before they are quantised, as there.

    Returns a report of what was packed and why the rest was not. Warns of rules that match no layer. Raises TypeError
    for what is no module, ValueError for a model that is itself a linear layer, and what `backend` raises for a bad
    recipe.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    chosen = resolve(recipe)
    places = _places(model)
    _warn_of_rules(model, chosen, places)
    report = Report(chosen.name)
    choice = _Choice(model, chosen, places)
    for names in places:  # a list of the modules would keep their weights
        linear = model.get_submodule(names[0])
        layer_format = choice.layer_format(names, linear)
        if isinstance(layer_format, LayerFormat):
            packed = PackedLinear.pack(linear, layer_format)
            for name in names:
                replace(model, name, packed)
        report.add([_row(names[0], linear, layer_format)], {})
        del linear
    leave_fast_paths(model)
    return report


def _places(model: nn.Module) -> list[list[str]]:
    """The names of each linear layer: one for every place where a module of the model holds it."""
    found: dict[int, list[str]] = {id(module): [] for module in model.modules() if is_linear(module)}
    if is_linear(model):
        found[id(model)].append("")
    for path, parent in model.named_modules():
        for child, module in parent._modules.items():
            if id(module) in found:
                found[id(module)].append(f"{path}.{child}" if path else child)
    return list(found.values())


class _Choice:
    """What a recipe makes of each linear layer of a model."""

    def __init__(self, model: nn.Module, recipe: Recipe, places: list[list[str]]):
        self.recipe = recipe
        parameters = [clean_name(name) for name, _ in model.named_parameters()]
        layers = [_layer(names[0], model.get_submodule(names[0]), recipe) for names in places]
        self.around = Model.of(recipe, parameters, layers)
        # By id: modules and parameters kept here would keep the weights.
        self.linears: dict[int, list[str]] = {}
        for names in places:
            for parameter in model.get_submodule(names[0]).parameters(recurse=False):
                self.linears.setdefault(id(parameter), []).append(names[0])
        others = (module for module in model.modules() if not is_linear(module))
        self.elsewhere = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}

    def layer_format(self, names: list[str], linear: nn.Module) -> LayerFormat | str:
        """The format that a layer is packed in, or why it is not."""
        reason = obstacle(linear)
        if reason is not None:
            return reason
        tied = [name for name in self.linears[id(linear.weight)] if name != names[0]]
        if tied:
            return f"its weight is that of {tied[0]!r} too"
        layer_recipe, reason = self._decide(names, linear)
        if reason is not None:
            return reason
        if layer_recipe.fprop_w is None:
            return f"recipe {layer_recipe.name} leaves weights in high precision"
        if layer_recipe.activation_scale == "dynamic":
            return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x)
        outer = next((scale for name in names if (scale := self.recipe.static_scale(clean_name(name)))), None)
        if outer is None:
            return "no calibrated activation scale: run fp4compile.calibrate"
        return LayerFormat(layer_recipe.fprop_w, layer_recipe.fprop_x, outer)

    def _decide(self, names: list[str], linear: nn.Module) -> tuple[Recipe | None, str | None]:
        """(the layer's recipe, why it is left alone all the same), as the backend decides."""
        tied = id(linear.weight) in self.elsewhere
        decisions = [of_layer(_layer(name, linear, self.recipe, tied), self.recipe, self.around) for name in names]
        if any(decision != decisions[0] for decision in decisions):
            return None, f"the recipe treats it differently under its names {', '.join(names)}"
        return decisions[0]


def _layer(name: str, linear: nn.Module, recipe: Recipe, tied: bool = False) -> Layer:
    inner, outer = sizes(linear)
    # The number of tokens is unknown here and counts as enough.
    return Layer(module_name(clean_name(f"{name}.weight")), (recipe.min_m, outer, inner), tied)


def _row(name: str, linear: nn.Module, packed: LayerFormat | str) -> Row:
    inner, outer = sizes(linear)
    dims = {"m": None, "n": outer, "k": inner, "flops": None}
    if isinstance(packed, str):
        weight = linear._parameters.get("weight")  # reading a parametrised one computes it
        right = None if weight is None else str(weight.dtype).removeprefix("torch.")
        return Row(name, "fprop", left=None, right=right, tier=None, reason=packed, **dims)
    return Row(name, "fprop", left=packed.activation, right=packed.weight, tier=None, reason=None, **dims)


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the submodule of that name."""
    parent, _, child = name.rpartition(".")
    if not name:
        raise ValueError("model: a single linear layer cannot be replaced in place; put it into a module")
    setattr(model.get_submodule(parent), child, module)


def _warn_of_rules(model: nn.Module, recipe: Recipe, places: list[list[str]]) -> None:
    # Parameters of other modules, as of experts, are layers to the backend, and a recipe may serve both.
    matrices = (name for name, parameter in model.named_parameters() if parameter.dim() > 1)
    names = [*(name for group in places for name in group), *map(module_name, matrices)]
    for rule in unmatched_rules(recipe, map(clean_name, names)):
        known = f"decides for no layer of the model (such as {names[0]!r})" if names else "and the model has no layer"
        warnings.warn(f"recipe {recipe.name!r}: rule {rule.pattern!r} {known}", stacklevel=3)
