"""Which layers and parameters of a model a file's packed weights replace, checked before the model is changed."""

from dataclasses import dataclass, fields
from reprlib import repr as short  # a value may be nested so deeply that `repr` fails
from typing import Any

import torch
from torch import nn

from fp4compile.formats import formats
from fp4compile.weights import experts
from fp4compile.weights.buffers import LayerFormat, PackedWeight
from fp4compile.weights.linear import PackedLinear, is_linear, obstacle, replace, sizes


@dataclass(frozen=True)
class LinearPlace:
    """A linear layer that a packed one will replace.

    names: every name of the layer in the model; the file has the packed buffers under these names.
    """

    names: list[str]
    linear: nn.Module
    layer_format: LayerFormat

    @property
    def replaced(self) -> set[str]:
        """The names of the tensors that are removed."""
        return {f"{name}.weight" for name in self.names}

    @property
    def weight(self) -> torch.Tensor:
        return self.linear.weight

    @property
    def holder(self) -> object:
        """An object that is identical for places that may share one packed layer."""
        return self.linear

    def like(self) -> PackedWeight:
        """A packed layer of these sizes, used only for its buffers' shapes and dtypes."""
        return PackedLinear(*sizes(self.linear), self.layer_format, None)

    def empty(self) -> PackedWeight:
        """The packed layer that will replace the layer, still without its weight."""
        return PackedLinear.in_place_of(self.linear, self.layer_format)

    def put(self, model: nn.Module, packed: PackedWeight) -> None:
        """Replace the layer in `model` by `packed`."""
        replace(model, self.names[0], packed)


@dataclass(frozen=True)
class ExpertsPlace:
    """A parameter of experts that packed experts will replace. See `LinearPlace` for the members."""

    place: experts.Place
    layer_format: LayerFormat
    in_first: bool

    @property
    def names(self) -> list[str]:
        return [experts.packed_name(name) for name in self.place.names]

    @property
    def replaced(self) -> set[str]:
        return set(self.place.names)

    @property
    def weight(self) -> torch.Tensor:
        return self.place.parameter

    @property
    def holder(self) -> object:
        return self.place

    def like(self) -> PackedWeight:
        return self.empty()

    def empty(self) -> experts.PackedExperts:
        shape = tuple(self.weight.shape)
        return experts.empty(shape, self.layer_format, self.in_first, self.weight.dtype)

    def put(self, model: nn.Module, packed: PackedWeight) -> None:
        experts.insert(self.place, packed)


Place = LinearPlace | ExpertsPlace
METHOD = "fp4compile"  # the quant_method in the config.json of a packed transformers model, which has the states


def places_of(model: nn.Module, layers: dict[str, dict], weights: dict[str, dict]) -> list[Place]:
    """The layers and parameters of `model` that a file's packed layers and packed experts replace.

    layers, weights: the states of packed layers and of packed experts, by name. Raises ValueError for an invalid state,
    and for a state that does not fit the model.
    """
    return [*_linear_places(model, layers), *_expert_places(model, weights)]


# ---------------------------------------------------------------- states

_FORMAT = {field.name for field in fields(LayerFormat)}
_LAYER_STATE = _FORMAT | {"in_features", "out_features"}
_EXPERTS_STATE = _LAYER_STATE | {"experts", "in_first"}


def check_states(layers: Any, weights: Any) -> None:
    """Raise ValueError where values from a file are no dictionaries of states of packed layers and packed experts."""
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
    """The format in a packed layer's state. Raises ValueError, which has the layer's name, where it is none."""
    try:
        # Files of version 0.1 and other libraries' checkpoints have no rule.
        rule = state.get("scale_rule", "amax")
        return LayerFormat(state["weight"], state["activation"], state["activation_outer"], rule)
    except (ValueError, TypeError) as error:
        raise ValueError(f"layer {name!r}: {error}") from error


# ---------------------------------------------------------------- linear layers


def _linear_places(model: nn.Module, layers: dict[str, dict]) -> list[LinearPlace]:
    for name, state in layers.items():
        _check_layer(model, name, state)
    names: dict[tuple, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if is_linear(module):
            names.setdefault(_slot(model, name), []).append(name)
    places: dict[tuple, LinearPlace] = {}
    for name, state in layers.items():
        layer_format, slot = _format_of(name, state), _slot(model, name)
        place = places.setdefault(slot, LinearPlace(names[slot], model.get_submodule(name), layer_format))
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


def _expert_places(model: nn.Module, weights: dict[str, dict]) -> list[ExpertsPlace]:
    known = {name: place for place in experts.places_of(model, is_linear) for name in place.names}
    places: dict[tuple, ExpertsPlace] = {}
    for name, state in weights.items():
        if name not in known:
            raise ValueError(f"the model has no parameter of experts {name!r}")
        place, layer_format = known[name], _format_of(name, state)
        _check_experts(place, name, state)
        one = ExpertsPlace(place, layer_format, state["in_first"])
        if places.setdefault(place.names, one) != one:
            raise ValueError(f"{name!r}: in the model it is {place.names[0]!r} too, whose format is another")
    return list(places.values())


def _check_experts(place: experts.Place, name: str, state: dict[str, Any]) -> None:
    reason = experts.obstacle(place)
    if reason is not None:
        raise ValueError(f"{name!r}: expected a parameter of experts to replace, the model's cannot be: {reason}")
    declared = experts.in_first(place, {})
    if declared is not None and declared != state["in_first"]:
        file, here = ("[experts, in, out]" if first else "[experts, out, in]" for first in (not declared, declared))
        raise ValueError(f"{name!r}: in the file it is {file}, in the model {here}")
    if state["activation"] is not None and formats.get(state["activation"]).square:
        raise ValueError(
            f"{name!r}: format {state['activation']} has square blocks, in which experts have no activations"
        )
    inner, outer = state["in_features"], state["out_features"]
    shape = (state["experts"], *((inner, outer) if state["in_first"] else (outer, inner)))
    if tuple(place.parameter.shape) != shape:
        raise ValueError(f"{name!r}: the file has shape {shape}, the model {tuple(place.parameter.shape)}")
