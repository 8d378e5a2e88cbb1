"""Packed experts: a parameter of three dimensions, one matrix for each expert, stored quantised in a module that stays.

`pack_parameter` gives the module another class: a subclass of its own that has a property in the parameter's place. The
property reads as the dequantised weights, so the module's code runs unchanged. In a graph these are one op,
`expert_weights`. The backend recognises the products of it and multiplies the codes; any other use is of dequantised
weights, which is right everywhere.

Along which dimension the weights are contracted no shape can tell. `in_first` says where that is known from.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fp4compile.analysis.module_names import packed_name
from fp4compile.ops.dense import FLOAT_DTYPES
from fp4compile.weights.buffers import LayerFormat, PackedWeight

# The weights that the functions of transformers read of experts with `is_transposed`.
_DECLARED = ("gate_up_proj", "up_proj", "down_proj")
# Classes of transformers, by name so that it need not be installed, that do not declare it: whether in comes first.
_KNOWN = {("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): True}
# Where a class made here holds what it was made of: the class without packed parameters, and their names.
_MADE_OF = "_fp4compile_made_of"
# Hooks that may read or write the parameter in a state dict. All others run on as they are: the module stays.
_REFUSED_HOOKS = (
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class PackedExperts(PackedWeight):
    """The weights of experts for inference, block-scaled; buffers as of `PackedWeight`.

    Calling it gives the weights as they were before they were packed: [experts, out, in], or [experts, in, out] where
    `in_first` is set, in `weight_dtype`.
    """

    def forward(self) -> torch.Tensor:
        """The weights, dequantised anew at each call, contiguous.

        In eager mode it is an inference tensor, so that writing to it, which would not change the weights, raises.
        """
        if torch.compiler.is_compiling():
            return self._dequantised()
        with torch.inference_mode():
            return self._dequantised()

    def _dequantised(self) -> torch.Tensor:
        dtype = self.weight_dtype if self.weight_dtype in FLOAT_DTYPES else torch.float32
        weights = torch.ops.fp4compile.expert_weights(
            self.weight_data, self.weight_scales, self.weight_outer, self.layer_format.weight, self.in_features, dtype,
            self.layer_format.activation, self.layer_format.activation_outer,
        ).to(self.weight_dtype)  # fmt: skip
        return weights.transpose(1, 2).contiguous() if self.in_first else weights

    def get_extra_state(self) -> dict[str, Any]:
        """The format and sizes, which state dicts and files of `save_packed` hold."""
        return super().get_extra_state() | {"experts": self.experts, "in_first": self.in_first}

    def extra_repr(self) -> str:
        activation = self.layer_format.activation or "as it comes"
        return (f"{self.experts} experts, {self.in_features}, {self.out_features}, weight={self.layer_format.weight}, "
                f"activation={activation}")  # fmt: skip


# ---------------------------------------------------------------- the module around them


@dataclass(frozen=True)
class Place:
    """A parameter of experts. module: that has it; child: its name there; names: its full names in the model."""

    module: nn.Module
    child: str
    names: tuple[str, ...]

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.child]


def pack_parameter(place: Place, layer_format: LayerFormat, in_first: bool, scale_rule: str = "amax") -> None:
    """Replace a parameter by its packed form. The weights of each expert are quantised alone.

    scale_rule: how their block scales are chosen, see `reference_scales`.
    """
    packed = empty(tuple(place.parameter.shape), layer_format, in_first, place.parameter.dtype)
    packed.store(place.parameter, scale_rule)
    insert(place, packed)


def empty(shape: tuple[int, ...], layer_format: LayerFormat, in_first: bool, dtype: torch.dtype) -> PackedExperts:
    """Packed experts that still lack their weight. shape: of the parameter."""
    experts, rows, columns = shape
    inner, outer = (rows, columns) if in_first else (columns, rows)
    return PackedExperts(experts, inner, outer, layer_format, dtype, in_first)


def insert(place: Place, packed: PackedExperts) -> None:
    """Put packed experts in the place of a parameter."""
    module, child = place.module, place.child
    packed.train(module.training)
    del module._parameters[child]
    module.add_module(packed_name(child), packed)
    made_of: tuple[Any, tuple[str, ...]] = getattr(type(module), _MADE_OF, (type(module), ()))
    base, children = made_of
    module.__class__ = _class_of(base, tuple(sorted({*children, child})))


@functools.cache
def _class_of(base: Any, children: tuple[str, ...]) -> Any:
    """A subclass of a module's class in which packed experts take the place of the parameters `children`."""
    members: dict[str, Any] = {child: property(_getter(child), _setter(child)) for child in children}
    members |= {_MADE_OF: (base, children), "__reduce_ex__": _reduce}
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), members)


def _getter(child: str) -> Callable[[nn.Module], torch.Tensor]:
    name = packed_name(child)
    return lambda module: module._modules[name]()


def _setter(child: str) -> Callable[[nn.Module, Any], None]:
    def refuse(module: nn.Module, value: Any) -> None:
        raise AttributeError(f"{child}: packed weights cannot be assigned; assign them before packing")

    return refuse


def _reduce(module: Any, protocol: Any) -> tuple:
    """For copies and pickles: the class is made anew, because no module has it as an attribute."""
    return _without_state, getattr(type(module), _MADE_OF), module.__getstate__()


def _without_state(base: Any, children: tuple[str, ...]) -> nn.Module:
    kind = _class_of(base, children)
    return kind.__new__(kind)


# ---------------------------------------------------------------- what can be packed


def places_of(model: nn.Module, is_layer: Callable[[nn.Module], bool]) -> list[Place]:
    """The parameters of three dimensions in modules that are neither torch's own nor layers (`is_layer`)."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        torch_own = type(module).__module__.startswith("torch.nn.") and not parametrize.is_parametrized(module)
        if not is_layer(module) and not torch_own:
            names.setdefault(id(module), []).append(path)
            modules[id(module)] = module
    return [
        Place(module, child, tuple(f"{path}.{child}".removeprefix(".") for path in names[key]))
        for key, module in modules.items()
        for child, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == 3
    ]


def in_first(place: Place, contracted: Mapping[str, int]) -> bool | None:
    """Whether the weights are [experts, in, out], and not [experts, out, in]; None where nothing tells.

    contracted: patterns of parameters' names, and the dimension that is contracted, -2 (in first) or -1; the first
    that matches decides. Without a match the module's attribute `is_transposed` does, by which the experts of
    transformers say how they store their weights, or its class, where that is known (`_KNOWN`).
    """
    for pattern, dim in contracted.items():
        if any(fnmatchcase(name, pattern) for name in place.names):
            return dim == -2
    kind = type(place.module)
    known = _KNOWN.get((kind.__module__, kind.__qualname__))
    declared = getattr(place.module, "is_transposed", known) if place.child in _DECLARED else None
    return declared if isinstance(declared, bool) else None


def check_contracted(contracted: Any) -> dict[str, int]:
    """The argument `contracted` of `pack_`. Raises TypeError or ValueError where it is not what `in_first` takes."""
    if not isinstance(contracted, Mapping):
        raise TypeError(
            f"contracted: expected a dict of patterns of parameters' names, got {type(contracted).__name__}"
        )
    for pattern, dim in contracted.items():
        if dim not in (-1, -2):
            raise ValueError(f"contracted: expected -1 or -2 for {pattern!r}, got {dim!r}")
    return dict(contracted)


def obstacle(place: Place) -> str | None:
    """Why packed weights could not stand in the parameter's place; None where they could."""
    module, parameter = place.module, place.parameter
    if isinstance(module, torch.jit.ScriptModule):
        return "its module is scripted"
    if parametrize.is_parametrized(module):
        return f"its module is parametrised: {', '.join(module.parametrizations)}"
    if type(parameter) is not nn.Parameter:  # a DTensor, or another library's packed weight
        return f"it is a {type(parameter).__name__}"
    if parameter.dtype not in FLOAT_DTYPES:
        return f"dtype {str(parameter.dtype).removeprefix('torch.')}"
    if any(getattr(module, name) for name in _REFUSED_HOOKS):
        return "its module has a state-dict hook"
    if hasattr(module, packed_name(place.child)):
        return f"its module has an attribute {packed_name(place.child)!r}"
    return None
