"""Read the configurations of ModelOpt and compressed-tensors, which may hold anything: every value is checked."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from reprlib import repr as short  # a value may be nested so deeply that `repr` fails
from typing import Any

from fp4compile.formats import formats
from fp4compile.formats.formats import unknown_name
from fp4compile.weights.published.expert_names import expert_of
from fp4compile.weights.published.name_patterns import name_pattern


@dataclass(frozen=True)
class Scheme:
    """How a layer of a checkpoint is quantised: its formats, and whether the activation's outer scale is stored."""

    weight: str
    activation: str | None
    static: bool = False


Schemes = Callable[[str], Scheme]  # by a layer's name; raises ValueError where a configuration has no scheme for it

_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


def member(holder: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The value of a key; `default` where it is absent or null. Raises ValueError for a value of another type."""
    value = holder.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ValueError(f"{key}: expected {_JSON_NAMES[kind]}, got {type(value).__name__}")
    return value


# ---------------------------------------------------------------- ModelOpt

MODELOPT_SCHEMES = {
    "NVFP4": Scheme("nvfp4", "nvfp4", static=True),
    "W4A16_NVFP4": Scheme("nvfp4", None),
    "MXFP8": Scheme("mxfp8", "mxfp8"),
    "MXFP4": Scheme("mxfp4", "mxfp4"),
}


def modelopt_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of layers by ModelOpt's configuration. Raises ValueError for values of other types."""
    mixed = member(config, "quant_algo", str, "").upper() == "MIXED_PRECISION"
    layers = member(config, "quantized_layers", dict, {})

    def scheme_of(layer: str) -> Scheme:
        if not mixed:
            return _modelopt_scheme(layer, config)
        place = expert_of(layer)
        name = layer if layer in layers or place is None else place[0]  # experts may share one entry
        entry = member(layers, name, dict)
        if entry is None:
            raise ValueError(f"layer {layer!r} is quantised, and quantized_layers does not tell how")
        return _modelopt_scheme(layer, entry)

    return scheme_of


def _modelopt_scheme(layer: str, entry: dict[str, Any]) -> Scheme:
    algorithm = member(entry, "quant_algo", str, "").upper()
    if algorithm in ("", "NONE"):
        raise ValueError(f"layer {layer!r} is quantised, and the configuration has no quant_algo that tells how; "
                         f"allowed are {', '.join([*MODELOPT_SCHEMES, 'MIXED_PRECISION'])}")  # fmt: skip
    if algorithm not in MODELOPT_SCHEMES:
        raise ValueError(unknown_name("quant_algo", algorithm, [*MODELOPT_SCHEMES, "MIXED_PRECISION"]))
    scheme = MODELOPT_SCHEMES[algorithm]
    size, expected = entry.get("group_size"), formats.get(scheme.weight).block_cols
    if size is not None and size != expected:
        raise ValueError(f"group_size: expected {expected} for {scheme.weight}, got {short(size)}")
    return scheme


# ---------------------------------------------------------------- compressed-tensors

# (bits, elements of a group) -> format
_COMPRESSED_FORMATS = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}


@dataclass(frozen=True)
class _Target:
    """A target of a configuration group; the matching one of lowest rank counts.

    rank: 0 for a layer's name, 1 for a regular expression, 2 for a class. scheme: raises ValueError for unknown
    formats.
    """

    rank: int
    means: Callable[[str], bool]
    scheme: Callable[[], Scheme]


def compressed_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of layers by compressed-tensors' configuration.

    Raises ValueError for values of other types, and for regular expressions that `name_pattern` refuses.
    """
    targets: list[_Target] = []
    groups = member(config, "config_groups", dict, {})
    for name in groups:
        group = member(groups, name, dict, {})
        try:
            scheme = cache(lambda group=group: _compressed_scheme(group))
            targets += [_target(one, scheme) for one in member(group, "targets", list, [])]
        except ValueError as error:
            raise ValueError(f"config_groups: {name!r}: {error}") from error

    def scheme_of(layer: str) -> Scheme:
        found = [target for target in targets if target.means(layer)]
        best = min((target.rank for target in found), default=None)
        schemes = {target.scheme() for target in found if target.rank == best}
        if not schemes:
            raise ValueError(f"layer {layer!r} is quantised, and no group of config_groups has it as a target")
        if len(schemes) > 1:
            raise ValueError(f"layer {layer!r} is a target of several groups of config_groups, which differ")
        return schemes.pop()

    return scheme_of


def _target(target: Any, scheme: Callable[[], Scheme]) -> _Target:
    if not isinstance(target, str):
        raise ValueError(f"targets: expected strings, got {short(target)}")
    if target.startswith("re:"):
        return _Target(1, name_pattern(target.removeprefix("re:")), scheme)
    if target == "Linear":
        return _Target(2, lambda layer: True, scheme)
    return _Target(0, lambda layer: layer == target, scheme)


def _compressed_scheme(group: dict[str, Any]) -> Scheme:
    weight, activation = (_compressed_format(member(group, key, dict)) for key in ("weights", "input_activations"))
    if weight is None:
        raise ValueError("a group of config_groups has no weights")
    static = activation is not None and formats.get(activation).outer is not None
    return Scheme(weight, activation, static)


def _compressed_format(arguments: dict[str, Any] | None) -> str | None:
    if arguments is None:
        return None
    key = arguments.get("num_bits"), arguments.get("group_size")
    found = next((name for known, name in _COMPRESSED_FORMATS.items() if known == key), None)
    if found is None or arguments.get("type") != "float" or arguments.get("symmetric") is False:
        allowed = ", ".join(f"{bits} bits in groups of {size}" for bits, size in _COMPRESSED_FORMATS)
        raise ValueError(f"config_groups: expected symmetric floats of {allowed}; got {short(arguments)}")
    return found
