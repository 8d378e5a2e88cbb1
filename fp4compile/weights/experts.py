"""Packed experts: a parameter of three dimensions, one matrix for each expert, stored quantised in its module.

`insert` gives the module a subclass with a property, which returns the dequantised weights, instead of the parameter:
the module's code runs unchanged. In a graph, the property is one op, `dequantize`, and matmuls of it read the codes.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from fp4compile.analysis.module_names import packed_name, parameter_name
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.weights.buffers import STATE_HOOKS, LayerFormat, PackedWeight

# The parameters of experts whose order of dimensions transformers reads from `is_transposed`.
_DECLARED = ("gate_up_proj", "up_proj", "down_proj")
# Whether they are [experts, in, out], for classes that do not declare it; by name, so transformers may be missing.
_KNOWN = {("transformers.models.llama4.modeling_llama4", "Llama4TextExperts"): True}
# The attribute of a class created here that holds its origin: the class without packed parameters, their names, and
# the names of all parameters of its first module, in order.
_MADE_OF = "_fp4compile_made_of"


class PackedExperts(PackedWeight):
    """Block-scaled, frozen weights of experts; see `PackedWeight` for the buffers.

    A call returns the dequantised weights in the original parameter's shape, in `weight_dtype`. adapted: the sum of the
    weights and an adapter's update while the adapter's layer runs; otherwise None.
    """

    adapted: torch.Tensor | None = None

    def forward(self) -> torch.Tensor:
        """The contiguous weights, dequantised at each call; `DequantizedWeight` describes writes to them."""
        return self.read() if self.adapted is None else self.adapted


def states_of(packed: Mapping[str, PackedWeight]) -> tuple[dict[str, dict], dict[str, dict]]:
    """The descriptions of packed layers by name, and of packed experts by the names of their parameters."""
    experts = {parameter_name(name): one.description for name, one in packed.items() if isinstance(one, PackedExperts)}
    layers = {name: one.description for name, one in packed.items() if not isinstance(one, PackedExperts)}
    return layers, experts


# ---------------------------------------------------------------- the module around them


@dataclass(frozen=True)
class Place:
    """A parameter of three dimensions that may be weights of experts: `child` of a module, by its full names.

    in_first: whether it is [experts, in, out], and not [experts, out, in]; None where that is unknown.
    """

    module: nn.Module
    child: str
    names: tuple[str, ...]
    in_first: bool | None = None

    @property
    def parameter(self) -> nn.Parameter:
        return self.module._parameters[self.child]

    @property
    def sizes(self) -> tuple[int, int]:
        """(in features, out features); in is assumed to come last if `in_first` is None."""
        _, rows, columns = self.parameter.shape
        return (rows, columns) if self.in_first else (columns, rows)

    def empty(self, layer_format: LayerFormat) -> "PackedExperts":
        """Packed experts without weights yet."""
        experts, dtype = self.parameter.shape[0], self.parameter.dtype
        return PackedExperts(experts, *self.sizes, layer_format, dtype, bool(self.in_first))


def insert(place: Place, packed: PackedExperts) -> None:
    """Replace a parameter by packed experts."""
    module, child = place.module, place.child
    packed.train(module.training)
    fresh: Any = type(module), (), tuple(module._parameters)
    base, children, order = getattr(type(module), _MADE_OF, fresh)
    del module._parameters[child]
    module.add_module(packed_name(child), packed)
    module.__class__ = _class_of(base, tuple(sorted({*children, child}, key=(*order, child).index)), order)


def remove(module: nn.Module, child: str, requires_grad: bool) -> None:
    """The inverse of `insert`: a parameter with the dequantised values replaces packed experts."""
    packed: Any = module._modules.pop(packed_name(child))
    base, children, order = getattr(type(module), _MADE_OF)
    left = tuple(one for one in children if one != child)
    module.__class__ = _class_of(base, left, order) if left else base
    module.register_parameter(child, nn.Parameter(packed.dequantised(), requires_grad))


@functools.cache
def _class_of(base: Any, children: tuple[str, ...], order: tuple[str, ...]) -> Any:
    """A subclass of a module's class in which packed experts replace the parameters `children`."""
    members: dict[str, Any] = {child: _packed_property(child) for child in children}
    members |= {_MADE_OF: (base, children, order), "__reduce_ex__": _reduce, "named_parameters": _named_parameters}
    members["__setattr__"] = _set_attribute
    members |= {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), members)


def _packed_property(child: str) -> property:
    name = packed_name(child)
    return property(lambda module: module._modules[name]())


def _set_attribute(module: Any, name: str, value: Any) -> None:
    """`__setattr__` that refuses packed weights: torch registers an `nn.Parameter` without reading properties."""
    base, children, _ = getattr(type(module), _MADE_OF)
    if name in children:
        raise AttributeError(f"{name}: packed weights cannot be assigned; assign {name}.data, or before packing")
    base.__setattr__(module, name, value)


_LISTED = ContextVar("_LISTED", default=False)


@contextmanager
def listed() -> Iterator[None]:
    """A context in which a module with packed experts lists them among its parameters, so that peft finds them."""
    token = _LISTED.set(True)
    try:
        yield
    finally:
        _LISTED.reset(token)


def _named_parameters(module: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    base, children, _ = getattr(type(module), _MADE_OF)
    yield from base.named_parameters(module, *args, **kwargs)
    if _LISTED.get():
        yield from ((child, getattr(module, child)) for child in children)


def _reduce(module: Any, protocol: Any) -> tuple:
    """`__reduce_ex__` for copies and pickles, which create the class again."""
    return _without_state, getattr(type(module), _MADE_OF), module.__getstate__()


def _without_state(base: Any, children: tuple[str, ...], order: tuple[str, ...] = ()) -> nn.Module:
    # Older pickles have no order. Children that are packed later follow the packed ones.
    kind = _class_of(base, children, order or children)
    return kind.__new__(kind)


# ---------------------------------------------------------------- what can be packed


def places_of(
    model: nn.Module, is_layer: Callable[[nn.Module], bool], contracted: Mapping[str, int] | None = None
) -> list[Place]:
    """The parameters of three dimensions in modules that are neither torch's own nor layers (`is_layer`).

    contracted: by patterns of names, the dimension that is contracted: -2 (in first) or -1. Without a match the
    module's `is_transposed` decides, which experts of transformers set, or else `_KNOWN`.
    """
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        torch_own = type(module).__module__.startswith("torch.nn.") and not parametrize.is_parametrized(module)
        if not is_layer(module) and not torch_own:
            names.setdefault(id(module), []).append(path)
            modules[id(module)] = module
    found = []
    for key, module in modules.items():
        for child, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 3:
                full = tuple(f"{path}.{child}".removeprefix(".") for path in names[key])
                found.append(Place(module, child, full, _in_first(module, child, full, contracted or {})))
    return found


def _in_first(module: nn.Module, child: str, names: tuple[str, ...], contracted: Mapping[str, int]) -> bool | None:
    for pattern, dim in contracted.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return dim == -2
    kind = type(module)
    known = _KNOWN.get((kind.__module__, kind.__qualname__))
    declared = getattr(module, "is_transposed", known) if child in _DECLARED else None
    return declared if isinstance(declared, bool) else None


def check_contracted(contracted: Any) -> dict[str, int]:
    """A valid argument `contracted` of `pack_` as a dict. Raises TypeError or ValueError for anything else."""
    if not isinstance(contracted, Mapping):
        raise TypeError(
            f"contracted: expected a dict of patterns of parameters' names, got {type(contracted).__name__}"
        )
    for pattern, dim in contracted.items():
        if dim not in (-1, -2):
            raise ValueError(f"contracted: expected -1 or -2 for {pattern!r}, got {dim!r}")
    return dict(contracted)


def obstacle(place: Place) -> str | None:
    """The reason that packed weights cannot replace the parameter; None if they can."""
    module, parameter = place.module, place.parameter
    if isinstance(module, torch.jit.ScriptModule):
        return "its module is scripted"
    if parametrize.is_parametrized(module):
        return f"its module is parametrised: {', '.join(module.parametrizations)}"
    if type(parameter) is not nn.Parameter:  # a DTensor, or another library's packed weight
        return f"it is a {type(parameter).__name__}"
    if parameter.dtype not in FLOAT_DTYPES:
        return f"dtype {str(parameter.dtype).removeprefix('torch.')}"
    if any(getattr(module, name) for name in STATE_HOOKS):
        return "its module has a state-dict hook"
    if hasattr(module, packed_name(place.child)):
        return f"its module has an attribute {packed_name(place.child)!r}"
    return None
