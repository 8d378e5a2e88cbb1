"""Read the quantisation configurations of published checkpoints, which may hold anything: every value is checked."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from reprlib import repr as short  # a value may be nested so deeply that `repr` fails
from typing import Any

from fp4compile.formats import formats
from fp4compile.formats.formats import unknown_name
from fp4compile.weights.published.expert_names import expert_of
from fp4compile.weights.published.name_patterns import name_pattern


@dataclass(frozen=True)
class Scheme:
    """The formats of a checkpoint's layer, and whether the checkpoint has a static scale of the activation."""

    weight: str
    activation: str | None
    static: bool = False

    def __str__(self) -> str:
        if self.activation is None:
            return f"{self.weight} weights, activations as they come"
        return f"{self.weight} weights, {self.activation} activations" + " with a static scale" * self.static


@dataclass(frozen=True)
class Schemes:
    """The schemes of a configuration.

    of: by a layer's name, and whether the file's names or dtypes say that its codes are FP4; ValueError without one.
    declared: all that it names.
    """

    of: Callable[[str, bool], Scheme]
    declared: Callable[[], list[Scheme]]


_JSON_NAMES: dict[type, str] = {dict: "an object", list: "a list", str: "a string"}


def member(holder: dict[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """The value of a key; `default` where it is absent or null. Raises ValueError for a value of another type."""
    value = holder.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise ValueError(f"{key}: expected {_JSON_NAMES[kind]}, got {type(value).__name__}")
    return value


def _one_of(holder: dict[str, Any], key: str, *allowed: str) -> str:
    """The value of a key, one of `allowed`; the first of these where it is absent. Raises ValueError for another."""
    value = member(holder, key, str, allowed[0])
    if value not in allowed:
        raise ValueError(f"{key}: expected {' or '.join(map(repr, allowed))}, got {short(value)}")
    return value


# ---------------------------------------------------------------- ModelOpt

MODELOPT_SCHEMES = {
    "NVFP4": Scheme("nvfp4", "nvfp4", static=True),
    "W4A16_NVFP4": Scheme("nvfp4", None),
    "MXFP8": Scheme("mxfp8", "mxfp8"),
    "MXFP4": Scheme("mxfp4", "mxfp4"),
    "FP8": Scheme("float8_tensor", "float8_tensor", static=True),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("float8_rowwise", "float8_rowwise"),
    "FP8_PB_WO": Scheme("float8_128x128", None),
}
# TensorRT-LLM's name of DeepSeek's FP8, which NVIDIA's mixed checkpoints have for layers that they did not quantise.
_READ_SCHEMES = MODELOPT_SCHEMES | {"FP8_BLOCK_SCALES": Scheme("float8_128x128", "float8_1x128")}


def modelopt_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of layers by ModelOpt's configuration. Raises ValueError for values of other types."""
    mixed = member(config, "quant_algo", str, "").upper() == "MIXED_PRECISION"
    layers = member(config, "quantized_layers", dict, {})

    groups = member(config, "config_groups", dict, {})
    weights_alone = bool(groups) and not any(member(groups, name, dict, {}).get("input_activations") for name in groups)
    dynamic = _one_of(config, "activation_scheme", "static", "dynamic") == "dynamic"

    def scheme_of(layer: str, packed: bool) -> Scheme:
        if not mixed:
            scheme = _modelopt_scheme(layer, config)
            # Published checkpoints call themselves "NVFP4" although no group of theirs quantises activations.
            scheme = replace(scheme, activation=None) if scheme.static and weights_alone else scheme
            return replace(scheme, static=scheme.static and not (weights_alone or dynamic))
        place = expert_of(layer)
        holder = layer.rpartition(".")[0] if place is None else place[0]  # experts may share its entry
        entry = member(layers, layer if layer in layers else holder, dict)
        if entry is None:
            raise ValueError(f"layer {layer!r} is quantised, and quantized_layers does not tell how")
        return _modelopt_scheme(layer, entry)

    return Schemes(scheme_of, lambda: [scheme_of(layer, False) for layer in layers or [""]])


def _modelopt_scheme(layer: str, entry: dict[str, Any]) -> Scheme:
    algorithm = member(entry, "quant_algo", str, "").upper()
    if algorithm in ("", "NONE"):
        raise ValueError(f"layer {layer!r} is quantised, and the configuration has no quant_algo that tells how; "
                         f"allowed are {', '.join([*_READ_SCHEMES, 'MIXED_PRECISION'])}")  # fmt: skip
    if algorithm not in _READ_SCHEMES:
        raise ValueError(unknown_name("quant_algo", algorithm, [*_READ_SCHEMES, "MIXED_PRECISION"]))
    scheme = _READ_SCHEMES[algorithm]
    fmt = formats.get(scheme.weight)
    size, expected = entry.get("group_size"), fmt.block_cols
    if size is not None and fmt.block is not None and size != expected:
        raise ValueError(f"group_size: expected {expected} for {scheme.weight}, got {short(size)}")
    return scheme


# ---------------------------------------------------------------- compressed-tensors

# (bits, strategy, elements of a group) -> format; "group" also stands for "tensor_group".
_COMPRESSED_FORMATS = {
    (4, "group", 16): "nvfp4", (4, "group", 32): "mxfp4", (8, "group", 32): "mxfp8",
    (8, "group", 128): "float8_1x128", (8, "block", None): "float8_128x128",
    (8, "channel", None): "float8_rowwise", (8, "token", None): "float8_rowwise", (8, "tensor", None): "float8_tensor",
}  # fmt: skip


@dataclass(frozen=True)
class _Target:
    """A target of a configuration group: a layer's name, a regular expression or a class (by rank).

    The matching one of lowest rank counts. scheme: raises ValueError for unknown formats.
    """

    rank: int
    means: Callable[[str], bool]
    scheme: Callable[[], Scheme]


def compressed_schemes(config: dict[str, Any]) -> Schemes:
    """The schemes of compressed-tensors' configuration.

    Raises ValueError for other values, refused patterns and transforms of activations.
    """
    _check_transforms(member(config, "transform_config", dict, {}))
    targets: list[_Target] = []
    groups = member(config, "config_groups", dict, {})
    for name in groups:
        group = member(groups, name, dict, {})
        try:
            scheme = cache(lambda group=group: _compressed_scheme(group))
            targets += [_target(one, scheme) for one in member(group, "targets", list, [])]
        except ValueError as error:
            raise ValueError(f"config_groups: {name!r}: {error}") from error

    def scheme_of(layer: str, packed: bool) -> Scheme:
        found = [target for target in targets if target.means(layer)]
        best = min((target.rank for target in found), default=None)
        schemes = {target.scheme() for target in found if target.rank == best}
        if not schemes:
            raise ValueError(f"layer {layer!r} is quantised, and no group of config_groups has it as a target")
        if len(schemes) > 1:  # published groups overlap: the codes decide
            schemes = {scheme for scheme in schemes if formats.get(scheme.weight).packed == packed}
        if len(schemes) != 1:
            raise ValueError(f"layer {layer!r} is a target of several groups of config_groups, which differ")
        return schemes.pop()

    return Schemes(scheme_of, lambda: [_compressed_scheme(member(groups, name, dict, {})) for name in groups])


def _check_transforms(config: dict[str, Any]) -> None:
    """Raise ValueError for transforms of activations (QuIP, SpinQuant). Codes have transforms of weights in them."""
    schemes = member(config, "config_groups", dict, {})
    for name in schemes:
        for one in member(member(schemes, name, dict, {}), "apply", list, []):
            location = one.get("location") if isinstance(one, dict) else one
            if location not in ("weight_input", "weight_output"):
                raise ValueError(
                    f"transform_config: {name!r} transforms activations (location {short(location)}) when the model "
                    "runs, which is not known here; expected transforms of weights alone"
                )


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
    static = activation is not None and _is_static(formats.get(activation), group["input_activations"])
    return Scheme(weight, activation, static)


def _is_static(fmt: formats.BlockFormat, arguments: dict[str, Any]) -> bool:
    """Whether a file holds a scale of the activations: NVFP4's global scale always, FP8's if it is not dynamic."""
    return fmt.outer == "tensor" and (fmt.scale is not None or not arguments.get("dynamic"))


def _compressed_format(arguments: dict[str, Any] | None) -> str | None:
    if arguments is None:
        return None
    size, strategy = arguments.get("group_size"), arguments.get("strategy")
    if strategy is None:  # compressed-tensors' defaults
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = "group" if strategy == "tensor_group" else strategy
    key = arguments.get("num_bits"), strategy, size if strategy == "group" else None
    found = next((name for known, name in _COMPRESSED_FORMATS.items() if known == key), None)
    if strategy == "block" and arguments.get("block_structure") not in ([128, 128], "128x128"):
        found = None
    if found is None or arguments.get("type") != "float" or arguments.get("symmetric") is False:
        allowed = ", ".join(f"{bits} bits by {strategy}" + (f" of {size}" if size else "")
                            for bits, strategy, size in _COMPRESSED_FORMATS)  # fmt: skip
        raise ValueError(f"config_groups: expected symmetric floats of {allowed}, blocks of [128, 128]; got "
                         f"{short(arguments)}")  # fmt: skip
    return found


# ---------------------------------------------------------------- DeepSeek's, Qwen's and transformers' FP8


# DeepSeek-V3.1's: scales of weights and activations are rounded up to powers of two.
POWERS_OF_TWO = Scheme("e4m3:128x128:float32:-:te_pow2", "e4m3:1x128:float32:-:te_pow2")
# Blocks with E8M0 scales are MX: of quant_method "mxfp8" (MiniMax-M3), and DeepSeek-V4.1's.
MX_BLOCKS = {"mxfp8": [1, 32], "mxfp8_32x32": [32, 32]}
# Experts by `moe_quant_algo`. DeepSeek-V4's are MXFP4; its own code has a scale for 128 elements of activations, and
# four in its place lose less. NVIDIA's versions of it, and of MiniMax-M3, have NVFP4 in ModelOpt's layout.
_FP4_EXPERTS = {"MXFP4": Scheme("mxfp4", "mxfp8"), "NVFP4": MODELOPT_SCHEMES["NVFP4"]}


def float8_schemes(config: dict[str, Any]) -> Schemes:
    """The scheme of quant_method "fp8", and that of layers in FP4 beside it. Raises ValueError for other values."""
    block = member(config, "weight_block_size", list)
    mx = next((Scheme(name, "mxfp8") for name, known in MX_BLOCKS.items() if block == known), None)
    if block not in (None, [128, 128]) and mx is None:
        raise ValueError(f"weight_block_size: expected [128, 128], [1, 32], [32, 32] or null, got {short(block)}")
    static = _one_of(config, "activation_scheme", "dynamic", *["static"] * (block is None)) == "static"
    _one_of(config, "fmt", "e4m3")
    scale_fmt = _one_of(config, "scale_fmt", "float", "ue8m0")
    if mx is not None and scale_fmt != "ue8m0":
        raise ValueError(f"scale_fmt: expected 'ue8m0', got {scale_fmt!r}, for weight_block_size {block}")
    fp4 = _one_of(config, "expert_dtype", "fp8", "fp4") == "fp4" or config.get("moe_quant_algo") is not None
    experts = _FP4_EXPERTS[_one_of(config, "moe_quant_algo", *_FP4_EXPERTS)]
    if mx is not None:
        found = mx
    elif block is None:
        found = Scheme("float8_tensor", "float8_tensor", static)
    else:
        found = POWERS_OF_TWO if scale_fmt == "ue8m0" else Scheme("float8_128x128", "float8_1x128")
    others = [experts] if fp4 else []
    return Schemes(lambda layer, packed: others[0] if packed and others else found, lambda: [found, *others])


def mxfp8_schemes(config: dict[str, Any]) -> Schemes:
    """The scheme of quant_method "mxfp8", whose configuration may leave out its blocks and scales."""
    given = {key: value for key, value in config.items() if value is not None}
    return float8_schemes({"weight_block_size": MX_BLOCKS["mxfp8"], "scale_fmt": "ue8m0"} | given)
