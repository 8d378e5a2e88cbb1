"""Recipes: which operand of which product takes which format, and which layers are left alone.

A `Recipe` is frozen and hashable; contradictions raise when it is built. `recipe_io.py` reads recipes from TOML, the
environment and command lines.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from fp4compile import formats
from fp4compile.formats import unknown_name

PRODUCTS = ("fprop", "dgrad", "wgrad", "attention")
_OPERANDS = {
    "fprop": ("fprop_x", "fprop_w"),
    "dgrad": ("dgrad_dy", "dgrad_w"),
    "wgrad": ("wgrad_dy", "wgrad_x"),
    "attention": ("attention_a", "attention_b"),
}
_ACTIONS = ("skip", "quantize")
# Smallest normal and largest float32: kernels take scales in float32, and the inverse of a smaller one overflows.
_SCALE_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
_WEIGHT_CACHES = ("on", "off", "check")


@dataclass(frozen=True)
class Rule:
    """What to do with the layers whose fully qualified module name matches a glob.

    action: "skip", "quantize" (also where the recipe's defaults would leave the layer alone), or the name of a
    recipe whose formats the layer takes.
    """

    pattern: str
    action: str

    def __post_init__(self):
        for name in ("pattern", "action"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"rules: {name} must be a string, got {type(getattr(self, name)).__name__}")
        if not self.pattern or self.pattern != self.pattern.strip():
            raise ValueError(f"rules: pattern {self.pattern!r} is empty or has spaces around it, so no name matches it")
        if self.action not in (*_ACTIONS, *_NAMED):
            raise ValueError(unknown_name("rule action", self.action, (*_ACTIONS, *_NAMED)))

    def matches(self, module: str) -> bool:
        return fnmatchcase(module, self.pattern)


@dataclass(frozen=True)
class Recipe:
    """The user's decisions about precision.

    fprop_x ... attention_b: format name of each operand (`formats.NAMED`, a spec string or a `BlockFormat`); None,
        or "none" where a file cannot say None, keeps it in high precision. A product with no format at all is left
        alone.
    rules: ordered; the first whose glob matches the layer's name decides. `unmatched_rules` tells those that never do.
    min_m, min_n, min_k: smallest tokens, out features and in features of a layer worth quantising.
    skip_first_blocks, skip_last_blocks: transformer blocks left alone at either end. num_blocks: how many there
        are, for models whose graphs are broken into parts that do not show it.
    skip_lm_head: leave output heads alone: layers called so (lm_head, classifier, proj_out and the like), those whose
        weight is an embedding's, and the layer that comes last and is the widest.
    activation_scale: "dynamic", or "static": the outer scale of fprop_x is read from static_scales.
    static_scales: (module name, decode factor) pairs, as `fp4compile.calibrate` measures them; the factors positive
        normal float32 numbers. Only where activation_scale, or the recipe of a rule, is "static".
    hadamard: ("wgrad",) applies the random Hadamard transform to both operands of wgrad, along the tokens.
    stochastic_rounding: of "dgrad" and "wgrad", those whose gradient operand is rounded stochastically.
    weight_cache: of inference. "on": packed weights are kept until a change of the parameter is seen. "off": weights
        are quantised at every call. "check": as "on", and RuntimeError is raised where a parameter's contents changed
        unseen; it reads every weight at every call, and is slow.
    """

    name: str = "custom"
    fprop_x: str | None = None
    fprop_w: str | None = None
    dgrad_dy: str | None = None
    dgrad_w: str | None = None
    wgrad_dy: str | None = None
    wgrad_x: str | None = None
    attention_a: str | None = None
    attention_b: str | None = None
    rules: tuple[Rule, ...] = ()
    min_m: int = 1
    min_n: int = 32
    min_k: int = 32
    skip_first_blocks: int = 0
    skip_last_blocks: int = 0
    num_blocks: int | None = None
    skip_lm_head: bool = True
    activation_scale: str = "dynamic"
    static_scales: tuple[tuple[str, float], ...] = ()
    hadamard: tuple[str, ...] = ()
    stochastic_rounding: tuple[str, ...] = ()
    weight_cache: str = "on"

    def __post_init__(self):
        self._normalise()
        self._check_types()
        for product in PRODUCTS:
            self._check_product(product)
        self._check_static()
        self._check_training()
        if self.weight_cache not in _WEIGHT_CACHES:
            allowed = ", ".join(map(repr, _WEIGHT_CACHES))
            raise ValueError(f"weight_cache={self.weight_cache!r}: allowed are {allowed}")

    def _normalise(self) -> None:
        """Every spelling of a value becomes the one that compares, hashes and is written to JSON."""
        normal = {role: _format_name(role, getattr(self, role)) for role in _ROLES}
        normal["rules"] = tuple(_rule(entry) for entry in _sequence("rules", self.rules))
        normal["static_scales"] = _scales(self.static_scales)
        for name in ("hadamard", "stochastic_rounding"):
            normal[name] = _products(name, getattr(self, name))
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for name, kind in (("name", str), ("activation_scale", str), ("weight_cache", str), ("skip_lm_head", bool)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise TypeError(f"{name}: expected a {kind.__name__}, got {type(value).__name__}")
        if not self.name.strip():
            raise ValueError(f"name={self.name!r}: must not be empty")
        for name in ("min_m", "min_n", "min_k", "skip_first_blocks", "skip_last_blocks", "num_blocks"):
            value = getattr(self, name)
            if value is None and name == "num_blocks":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
            if value < 0:
                raise ValueError(f"{name}={value}: must not be negative")
        if self.num_blocks == 0:
            raise ValueError("num_blocks=0: must be at least 1, or None where the graph shows how many there are")

    def _check_product(self, product: str) -> None:
        left, right = (None if name is None else formats.get(name) for name in self.operands(product))
        if left is not None and right is not None:
            if not formats.compatible(left, right):
                raise ValueError(
                    f"{product}: formats {left.name} and {right.name} cannot be multiplied: "
                    "scale types or block lengths differ"
                )
        elif any(fmt is not None and fmt.scale is None for fmt in (left, right)):
            raise ValueError(f"{product}: float8_rowwise needs both operands in that format")

    def _check_static(self) -> None:
        if self.activation_scale not in ("dynamic", "static"):
            raise ValueError(f"activation_scale={self.activation_scale!r}: allowed are 'dynamic', 'static'")
        if self.activation_scale == "static":
            fmt = None if self.fprop_x is None else formats.get(self.fprop_x)
            if fmt is None or fmt.outer != "tensor":
                raise ValueError(
                    f"activation_scale='static' needs an fprop_x whose outer scale is one a tensor, got {self.fprop_x}"
                )
        elif self.static_scales and not any(_is_static(rule) for rule in self.rules):
            raise ValueError(
                "static_scales are given and never used: activation_scale is 'dynamic', and no rule names a recipe "
                "whose scale is 'static'"
            )

    def _check_training(self) -> None:
        for name, allowed in (("hadamard", ("wgrad",)), ("stochastic_rounding", ("dgrad", "wgrad"))):
            for product in getattr(self, name):
                if product not in allowed:
                    raise ValueError(f"{name}: {unknown_name('product', product, allowed)}")
        for product in self.stochastic_rounding:
            role = f"{product}_dy"
            fmt = getattr(self, role)
            if fmt is None or not formats.get(fmt).packed:
                raise ValueError(f"stochastic_rounding of {product}: {role} must be an FP4 format, got {fmt}")
        for role in ("wgrad_dy", "wgrad_x") if self.hadamard else ():
            fmt = getattr(self, role)
            if fmt is None or formats.get(fmt).scale != "e4m3" or formats.get(fmt).square:
                raise ValueError(f"hadamard of wgrad: {role} must be an NVFP4 format with blocks of 1x16, got {fmt}")

    def operands(self, product: str) -> tuple[str | None, str | None]:
        """Format names of a product's left and right operand, as the recipe's fields name them."""
        first, second = _OPERANDS[product]
        return getattr(self, first), getattr(self, second)

    def quantizes(self, product: str) -> bool:
        """Whether any operand of the product has a format."""
        return any(fmt is not None for fmt in self.operands(product))

    def rule_for(self, module: str) -> Rule | None:
        """The first rule whose glob matches the module name."""
        return next((rule for rule in self.rules if rule.matches(module)), None)

    def static_scale(self, module: str) -> float | None:
        """The decode factor of the activation that enters a layer; None where none was measured."""
        return dict(self.static_scales).get(module)

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the recipe's content; the same in every process."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives an equal recipe back."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["rules"] = [dataclasses.asdict(rule) for rule in self.rules]
        plain["static_scales"] = dict(self.static_scales)
        plain["hadamard"], plain["stochastic_rounding"] = list(self.hadamard), list(self.stochastic_rounding)
        return plain

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Recipe":
        """From fields as `to_dict` gives them; a key "recipe" names the recipe that they override.

        Raises ValueError for an unknown field or recipe, TypeError for what is no dict.
        """
        if not isinstance(fields, dict):
            raise TypeError(f"recipe: expected a dict of fields, got {type(fields).__name__}")
        fields = dict(fields)
        base = fields.pop("recipe", None)
        return (cls() if base is None else named(base)).replace(**fields)

    @classmethod
    def from_toml(cls, path) -> "Recipe":
        """See `recipe_io.from_toml`."""
        from fp4compile import recipe_io

        return recipe_io.from_toml(path)

    @classmethod
    def from_env(cls) -> "Recipe | None":
        """See `recipe_io.from_env`."""
        from fp4compile import recipe_io

        return recipe_io.from_env()

    @classmethod
    def from_args(cls, args) -> "Recipe | None":
        """See `recipe_io.from_args`."""
        from fp4compile import recipe_io

        return recipe_io.from_args(args)

    def replace(self, **overrides: Any) -> "Recipe":
        """A copy with fields replaced. Raises ValueError for a field that does not exist."""
        allowed = [field.name for field in dataclasses.fields(self)]
        for name in overrides:
            if name not in allowed:
                raise ValueError(unknown_name("recipe field", name, allowed))
        return dataclasses.replace(self, **overrides)


_ROLES = tuple(role for pair in _OPERANDS.values() for role in pair)


def _format_name(role: str, value: Any) -> str | None:
    if value is None or value == "none":
        return None
    try:
        return formats.get(value).name
    except (TypeError, ValueError) as error:
        raise type(error)(f"{role}: {error}") from None


def _sequence(field: str, value: Any) -> list | tuple:
    # A string is a sequence of letters to Python, and a dict one of keys: both are mistakes here.
    if not isinstance(value, list | tuple):
        raise TypeError(f"{field}: expected a list or a tuple, got {type(value).__name__}")
    return value


def _products(field: str, value: Any) -> tuple[str, ...]:
    """The products of a training switch, each once, in alphabetical order."""
    products = _sequence(field, value)
    for product in products:
        if not isinstance(product, str):
            raise TypeError(f"{field}: expected names of products, got {product!r}")
    return tuple(sorted(set(products)))


def _is_static(rule: Rule) -> bool:
    return _NAMED.get(rule.action, {}).get("activation_scale") == "static"


def _scales(value: Any) -> tuple[tuple[str, float], ...]:
    scales: dict[str, float] = {}
    smallest, largest = _SCALE_RANGE
    for pair in value.items() if isinstance(value, dict) else _sequence("static_scales", value):
        match pair:
            case [str(module), float() | int() as scale] if not isinstance(scale, bool):
                pass
            case _:
                raise TypeError(f"static_scales: expected pairs of a module name and a float, got {pair!r}")
        if module in scales:
            raise ValueError(f"static_scales: {module!r} is there twice")
        if not smallest <= scale <= largest:
            raise ValueError(
                f"static_scales: {module!r} has {scale}; a decode factor is positive and finite, and a normal "
                f"float32 number: from {smallest:.6g} to {largest:.6g}"
            )
        scales[module] = float(scale)
    return tuple(sorted(scales.items()))


def _rule(entry: Any) -> Rule:
    if isinstance(entry, Rule):
        return entry
    if isinstance(entry, dict):
        if set(entry) != {"pattern", "action"}:
            raise ValueError(f"rules: a rule has a pattern and an action, got {entry}")
        return Rule(**entry)
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return Rule(*entry)
    raise TypeError(f"rules: expected a Rule, a dict or a (pattern, action) pair, got {entry!r}")


def unmatched_rules(recipe: Recipe, names: Iterable[str]) -> tuple[Rule, ...]:
    """The rules of a recipe that decide for none of the layers: no name matches, or an earlier rule takes all that do.

    names: fully qualified names of a whole model's layers, as reports have them. A rule may be idle in one of a
    model's graphs and decide in another, so the names of all of them belong here.
    """
    left = list(names)
    idle = []
    for rule in recipe.rules:
        remaining = [name for name in left if not rule.matches(name)]
        if len(remaining) == len(left):
            idle.append(rule)
        left = remaining
    return tuple(idle)


def _all(x: str, w: str | None = None) -> dict[str, Any]:
    """x for activations and gradients, w (x where not given) for weights."""
    return dict.fromkeys(_ROLES[:6], x) | dict.fromkeys(("fprop_w", "dgrad_w"), w or x)


# One-level scales have nothing to lift small gradients into range, static scales are measured on activations alone,
# and weight-only keeps activations as they are: these three quantise the forward product only.
_NAMED: dict[str, dict[str, Any]] = {
    "nvfp4": _all("nvfp4"),
    "nvfp4_one_level": {"fprop_x": "nvfp4_one_level", "fprop_w": "nvfp4_one_level"},
    "nvfp4_static": {"fprop_x": "nvfp4", "fprop_w": "nvfp4", "activation_scale": "static"},
    "nvfp4_rowwise": _all("nvfp4_te") | {"fprop_x": "nvfp4_rowwise"},
    "nvfp4_weight_only": {"fprop_w": "nvfp4"},
    "nvfp4_train": _all("nvfp4_te", w="nvfp4_16x16")
    | {"hadamard": ("wgrad",), "stochastic_rounding": ("dgrad", "wgrad")},
    "mxfp8": _all("mxfp8"),
    "mxfp8_floor": _all("mxfp8_floor"),
    "mxfp8_32x32": _all("mxfp8", w="mxfp8_32x32"),
    "mxfp4": _all("mxfp4"),
    "float8_rowwise": _all("float8_rowwise"),
}


def recipes() -> tuple[str, ...]:
    """The names of the named recipes."""
    return tuple(_NAMED)


def named(name: str) -> Recipe:
    """The recipe of a name. Raises ValueError for an unknown one, with the nearest match."""
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name, got {type(name).__name__}")
    if name not in _NAMED:
        raise ValueError(unknown_name("recipe", name, _NAMED))
    return Recipe(name=name, **_NAMED[name])
