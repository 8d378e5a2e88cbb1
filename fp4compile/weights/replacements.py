"""Replace weights of a model by packed ones, made of them or read from a file, and packed ones by weights again."""

from dataclasses import dataclass, fields, replace
from reprlib import repr as short  # a value may be nested so deeply that `repr` fails
from typing import Any

import torch
from torch import nn

from fp4compile.analysis.module_names import packed_name, parameter_name
from fp4compile.formats import formats
from fp4compile.weights.buffers import LayerFormat, PackedWeight, present_rule
from fp4compile.weights.experts import PackedExperts, Place, insert, places_of, remove
from fp4compile.weights.experts import obstacle as experts_obstacle
from fp4compile.weights.linear import PackedLayer, is_linear, obstacle, sizes, unpacked_layer

METHOD = "fp4compile"  # the quant_method in the config.json of a packed transformers model


@dataclass(frozen=True)
class Weight:
    """The names of a weight that is packed, or that packed tensors of a file replace: no reference, so it can be freed.

    names: of a linear layer in the model, or of a parameter of experts, whose place is `experts`.
    """

    names: tuple[str, ...]
    layer_format: LayerFormat
    experts: Place | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameter in the model."""
        return self.names if self.experts else tuple(f"{name}.weight" for name in self.names)

    @property
    def packed_names(self) -> tuple[str, ...]:
        """The names of the packed module in the model."""
        return tuple(map(packed_name, self.names)) if self.experts else self.names

    def slot(self, model: nn.Module) -> tuple[nn.Module, str]:
        """The module that holds the parameter, and the parameter's name in it."""
        if self.experts is not None:
            return self.experts.module, self.experts.child
        return model.get_submodule(self.names[0]), "weight"

    def parameter(self, model: nn.Module) -> nn.Parameter:
        """The model's weight in high precision."""
        module, child = self.slot(model)
        return module._parameters[child]

    def empty(self, model: nn.Module) -> PackedLayer | PackedExperts:
        """The packed form of the weight, without its values."""
        if self.experts is None:
            return PackedLayer.in_place_of(model.get_submodule(self.names[0]), self.layer_format)
        return self.experts.empty(self.layer_format)

    def put(self, model: nn.Module, packed: nn.Module) -> None:
        """Replace the weight in `model` by `packed`."""
        if self.experts is not None:
            insert(self.experts, packed)
            return
        for name in self.names:
            parent, _, child = name.rpartition(".")
            if not name:
                raise ValueError("model: a single linear layer cannot be replaced in place; put it into a module")
            setattr(model.get_submodule(parent), child, packed)

    def pack(self, model: nn.Module, amax: torch.Tensor | None = None) -> None:
        """Replace the weight in `model` by its packed form. Each expert's weights are quantised separately.

        amax: float32 [], of which the global scale is made; None computes the weight's.
        """
        packed = self.empty(model)
        packed.store(self.parameter(model), amax)
        self.put(model, packed)


def weights_of(model: nn.Module, layers: dict[str, dict], weights: dict[str, dict]) -> list[Weight]:
    """The weights of `model` that a file's packed layers and experts replace. Raises ValueError if they do not fit."""
    return [*_linear_places(model, layers), *_expert_places(model, weights)]


def unpacked(module: nn.Module, requires_grad: bool) -> nn.Module:
    """A module in which parameters with the dequantised values replace all packed weights.

    A packed layer itself is not changed, and another one is returned.
    """
    if isinstance(module, PackedWeight):
        return unpacked_layer(module, requires_grad)
    made: dict[int, nn.Module] = {}  # a layer with several names remains one layer
    for holder in list(module.modules()):
        for child, packed in list(holder._modules.items()):
            if isinstance(packed, PackedExperts):
                remove(holder, parameter_name(child), requires_grad)
            elif isinstance(packed, PackedWeight):
                holder._modules[child] = made.setdefault(id(packed), unpacked_layer(packed, requires_grad))
    return module


# ---------------------------------------------------------------- states

_FORMAT = {field.name for field in fields(LayerFormat)}
_LAYER_STATE = _FORMAT | {"in_features", "out_features"}
_EXPERTS_STATE = _LAYER_STATE | {"experts", "in_first"}


def check_states(layers: Any, weights: Any) -> None:
    """Raise ValueError if values from a file are no dictionaries of states of packed layers and packed experts."""
    for states, keys in ((layers, _LAYER_STATE), (weights, _EXPERTS_STATE)):
        if not isinstance(states, dict):
            raise ValueError(f"expected the states of layers by name, got {type(states).__name__}")
        for name, state in states.items():
            if not isinstance(state, dict) or {"scale_rule", *state} != keys:
                raise ValueError(f"layer {name!r}: expected a state of {', '.join(sorted(keys))}")
            sizes = [state[key] for key in sorted(keys - _FORMAT - {"in_first"})]
            whole = not any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes)
            if not whole or not isinstance(state.get("in_first", False), bool):
                raise ValueError(f"layer {name!r}: expected sizes that are whole numbers, got {short(state)}")


def _format_of(name: str, state: dict[str, Any]) -> LayerFormat:
    """The format in a packed layer's state. Raises ValueError, which has the layer's name, for an invalid state."""
    try:
        # Files of version 0.1 and other libraries' checkpoints have no rule.
        rule = present_rule(state.get("scale_rule", "amax"))
        return LayerFormat(state["weight"], state["activation"], state["activation_outer"], rule)
    except (ValueError, TypeError) as error:
        raise ValueError(f"layer {name!r}: {error}") from error


# ---------------------------------------------------------------- linear layers


def _linear_places(model: nn.Module, layers: dict[str, dict]) -> list[Weight]:
    for name, state in layers.items():
        _check_layer(model, name, state)
    names: dict[tuple, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            names.setdefault(_slot(model, name), []).append(name)
    places: dict[tuple, Weight] = {}
    for name, state in layers.items():
        layer_format, slot = _format_of(name, state), _slot(model, name)
        place = places.setdefault(slot, Weight(tuple(names[slot]), layer_format))
        if place.layer_format != layer_format:
            raise ValueError(f"layer {name!r}: in the model it is {place.names[0]!r} too, whose format is another")
    return list(places.values())


def _slot(model: nn.Module, name: str) -> tuple[int, str]:
    """(id of the parent module, attribute name) of the submodule `name`."""
    parent, _, child = name.rpartition(".")
    return id(model.get_submodule(parent)), child


def _check_layer(model: nn.Module, name: str, state: dict[str, Any]) -> None:
    try:
        linear = model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the model has no layer {name!r}") from None
    if not is_linear(linear):
        raise ValueError(f"layer {name!r}: expected an nn.Linear to replace, the model has {type(linear).__name__}")
    reason = obstacle(linear)
    if reason is not None:
        raise ValueError(f"layer {name!r}: expected an nn.Linear to replace, the model's cannot be: {reason}")
    stored = (state["in_features"], state["out_features"])
    if sizes(linear) != stored:
        raise ValueError(f"layer {name!r}: the file has in and out features {stored}, the model {sizes(linear)}")


# ---------------------------------------------------------------- experts


def _expert_places(model: nn.Module, weights: dict[str, dict]) -> list[Weight]:
    known = {name: place for place in places_of(model, is_linear) for name in place.names}
    places: dict[tuple, Weight] = {}
    for name, state in weights.items():
        if name not in known:
            raise ValueError(f"the model has no parameter of experts {name!r}")
        place, layer_format = known[name], _format_of(name, state)
        _check_experts(place, name, state)
        one = Weight(place.names, layer_format, replace(place, in_first=state["in_first"]))
        if places.setdefault(place.names, one) != one:
            raise ValueError(f"{name!r}: in the model it is {place.names[0]!r} too, whose format is another")
    return list(places.values())


def _check_experts(place: Place, name: str, state: dict[str, Any]) -> None:
    reason = experts_obstacle(place)
    if reason is not None:
        raise ValueError(f"{name!r}: expected a parameter of experts to replace, the model's cannot be: {reason}")
    if place.in_first is not None and place.in_first != state["in_first"]:
        file, here = (
            "[experts, in, out]" if first else "[experts, out, in]" for first in (not place.in_first, place.in_first)
        )
        raise ValueError(f"{name!r}: in the file it is {file}, in the model {here}")
    if state["activation"] is not None and formats.get(state["activation"]).square:
        raise ValueError(
            f"{name!r}: format {state['activation']} has square blocks, in which experts have no activations"
        )
    inner, outer = state["in_features"], state["out_features"]
    shape = (state["experts"], *((inner, outer) if state["in_first"] else (outer, inner)))
    if tuple(place.parameter.shape) != shape:
        raise ValueError(f"{name!r}: the file has shape {shape}, the model {tuple(place.parameter.shape)}")
