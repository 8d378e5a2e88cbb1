"""`Recipe`: the user's decisions about precision, frozen and hashable; contradictory ones raise."""

import dataclasses
import functools
import hashlib
import html
import json
import logging
import os
from argparse import Namespace
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from fp4compile.formats import formats
from fp4compile.formats.formats import unknown_name
from fp4compile.recipe import sources
from fp4compile.recipe.named_recipes import FIELDS, FORWARD, OF_FORWARD, OPERANDS, PRODUCTS, ROLES
from fp4compile.recipe.rules import Ranking, Rule, rule_of

log = logging.getLogger("fp4compile")

# Smallest normal and largest float32: kernels take scales in float32, and the inverse of a smaller one overflows.
_SCALE_RANGE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
_SHOWN = 8  # entries of a tuple that are shown; longer ones, such as the static scales of a model, are counted
_WEIGHT_CACHES = ("on", "off", "always")
_WEIGHT_METHODS = ("nearest", "gptq")
# The fields that name matmuls, and the matmuls that each may name.
_SWITCHES = {
    "hadamard": ("wgrad",), "stochastic_rounding": ("dgrad", "wgrad"), "fast_accumulation": ("fprop", "dgrad", "wgrad")
}  # fmt: skip
_PLAIN_FIELDS = (
    ("name", str), ("activation_scale", str), ("weight_cache", str), ("weight_scales", str),
    ("weight_method", str), ("skip_lm_head", bool),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class Recipe:
    """The user's decisions about precision.

    name: shown in reports and messages; it has no effect on results.
    fprop_x, fprop_w: formats of the activation and the weight in the forward matmul.
    dgrad_dy, dgrad_w: formats of the output gradient and the weight in the matmul for the input gradient.
    wgrad_dy, wgrad_x: formats of the output gradient and the activation in the matmul for the weight gradient.
    attention_a, attention_b: formats of the operands of matmuls without a parameter, in the order of the matmul.
        A format is a name of `formats.NAMED`, a spec string or a `BlockFormat`. None keeps the operand in high
        precision; files write it "none". A matmul without any format is not quantised.
        dgrad_w and wgrad_x may be "forward", beside a gradient in high precision: the operand as the forward matmul has
        it, quantised and then dequantised.
    rules: the first rule whose glob matches a layer's name decides about the layer. Each is a `Rule`, a (pattern,
        action) pair or a dict of the two.
    min_m, min_n, min_k: a layer with fewer tokens, out features or in features than these is not quantised.
    skip_first_blocks, skip_last_blocks: how many transformer blocks are not quantised at either end of the model.
    num_blocks: how many blocks the model has; needed for models whose broken graphs do not show the number.
    skip_lm_head: whether output heads are not quantised. Heads are layers named lm_head, classifier, proj_out and the
        like, and a last layer that is wider than all others, unless they lie in a numbered block; and layers whose
        weight is an embedding's.
    activation_scale: "dynamic" computes the global scale of fprop_x; "static" reads it from static_scales.
    static_scales: (layer's name, global scale of its activation) pairs or a dict, as `fp4compile.calibrate` measures
        them: positive normal float32 numbers, by which codes are multiplied. Allowed only where activation_scale, or
        that of a recipe that a rule names, is "static".
    hadamard: ("wgrad",) applies the random Hadamard transform to both operands of wgrad, along the tokens.
    stochastic_rounding: the matmuls among "dgrad" and "wgrad" whose gradient operand is rounded stochastically.
    fast_accumulation: the matmuls, in float8_rowwise or float8_tensor, whose sums FP8 matrix units may keep in fewer
        bits than float32 has. On Hopper that is faster and less exact; elsewhere, and in packed layers, it changes
        nothing.
    weight_cache: for inference. "on" keeps packed weights until a change of the parameter is detected; in a process
        group of torch.distributed, whose writes cannot be detected, it quantises weights at every call. "always" keeps
        them there too, if you call `fp4compile.refresh` after such writes. "off" quantises weights at every call.
    weight_scales: how the NVFP4 block scales of fprop_w are chosen in inference. "amax": from each block's largest
        element; "mse": of least squared error, for MXFP4 weights too. Graphs that compute gradients take "amax".
    weight_method: how weights become codes in `pack_`. "nearest": each element is rounded; "gptq": each column makes up
        for the rounding errors of those before it, by the batches of `pack_`. Others are rounded to nearest.

    Raises ValueError for an unknown format, matmul or choice, for a number out of range, and for fields that
    contradict each other; TypeError for a field of another type.
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
    fast_accumulation: tuple[str, ...] = ()
    weight_cache: str = "on"
    weight_scales: str = "amax"
    weight_method: str = "nearest"

    def __post_init__(self) -> None:
        self._normalise()
        self._check_types()
        for product in PRODUCTS:
            self._check_product(product)
        self._check_static()
        self._check_training()
        self._check_weight_scales()
        if self.weight_cache not in _WEIGHT_CACHES:
            allowed = ", ".join(map(repr, _WEIGHT_CACHES))
            raise ValueError(f"weight_cache={self.weight_cache!r}: allowed are {allowed}")
        if self.weight_method not in _WEIGHT_METHODS:
            raise ValueError(f"weight_method: {unknown_name('method', self.weight_method, _WEIGHT_METHODS)}")

    def _normalise(self) -> None:
        """Replace each field's value by its canonical form, which is compared, hashed and written to JSON."""
        normal: dict[str, Any] = {role: _format_name(role, getattr(self, role)) for role in ROLES}
        normal["rules"] = tuple(rule_of(entry) for entry in _sequence("rules", self.rules))
        normal["static_scales"] = _scales(self.static_scales)
        for name in _SWITCHES:
            normal[name] = _products(name, getattr(self, name))
        for name, value in normal.items():
            object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for name, kind in _PLAIN_FIELDS:
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
        if self.reads_forward(product):
            gradient, operand = OPERANDS[product]
            if getattr(self, OF_FORWARD[operand]) is None:
                raise ValueError(f"{operand}='forward': {OF_FORWARD[operand]} has no format; None is the same operand")
            if getattr(self, gradient) is not None:
                raise ValueError(
                    f"{operand}='forward': {gradient} stays in high precision, got {getattr(self, gradient)}"
                )
        left, right = (None if name is None else formats.get(name) for name in self.operands(product))
        if left is not None and right is not None and not formats.compatible(left, right):
            raise ValueError(
                f"{product}: formats {left.name} and {right.name} cannot be multiplied: "
                "scale types or block lengths differ"
            )

    def _check_static(self) -> None:
        if self.activation_scale not in ("dynamic", "static"):
            raise ValueError(f"activation_scale={self.activation_scale!r}: allowed are 'dynamic', 'static'")
        if self.activation_scale == "static":
            fmt = None if self.fprop_x is None else formats.get(self.fprop_x)
            if fmt is None or fmt.outer != "tensor":
                raise ValueError(
                    f"activation_scale='static' needs an fprop_x with a global scale of the tensor, got {self.fprop_x}"
                )
        elif self.static_scales and not any(rule.takes_static_scale for rule in self.rules):
            raise ValueError(
                "static_scales are given and never used: activation_scale is 'dynamic', and no rule names a recipe "
                "whose scale is 'static'"
            )

    def _check_training(self) -> None:
        for name, allowed in _SWITCHES.items():
            for product in getattr(self, name):
                if product not in allowed:
                    raise ValueError(f"{name}: {unknown_name('product', product, allowed)}")
        for product in self.stochastic_rounding:
            role = f"{product}_dy"
            fmt = getattr(self, role)
            if fmt is None or not formats.get(fmt).packed:
                raise ValueError(f"stochastic_rounding of {product}: {role} must be an FP4 format, got {fmt}")
        for product in self.fast_accumulation:
            if any(fmt is None or formats.get(fmt).scale is not None for fmt in self.operands(product)):
                raise ValueError(f"fast_accumulation of {product}: both operands must be float8_rowwise, got "
                                 f"{' and '.join(map(str, self.operands(product)))}")  # fmt: skip
        for role, fmt in zip(OPERANDS["wgrad"], self.operands("wgrad"), strict=True) if self.hadamard else ():
            if fmt is None or formats.get(fmt).scale != "e4m3" or formats.get(fmt).square:
                raise ValueError(f"hadamard of wgrad: {role} must be an NVFP4 format with blocks of 1x16, got {fmt}")

    def _check_weight_scales(self) -> None:
        weights = [self.fprop_w, *(FIELDS.get(rule.action, {}).get("fprop_w") for rule in self.rules)]
        known = [None if weight is None else formats.get(weight) for weight in weights]
        formats.check_scale_rule("weight_scales", self.weight_scales, known)
        if self.weight_method == "gptq" and not any(known):
            raise ValueError("weight_method='gptq': needs an fprop_w, or a rule whose recipe has one")

    def scale_rule(self, weight: str | None) -> str:
        """The rule for block scales of a weight in this format: `weight_scales`, or "amax" if that cannot apply."""
        rule = self.weight_scales
        return rule if weight is not None and formats.takes_scale_rule(formats.get(weight), rule) else "amax"

    @property
    def needs_batches(self) -> bool:
        """Whether packing weights needs batches."""
        return self.weight_method == "gptq"

    def operands(self, product: str) -> tuple[str | None, str | None]:
        """The format names of a matmul's operands, in the order of the recipe's fields; None: high precision."""
        first, second = (None if fmt == FORWARD else fmt for fmt in (getattr(self, role) for role in OPERANDS[product]))
        return first, second

    def reads_forward(self, product: str) -> bool:
        """Whether a gradient's matmul reads the weight or the activation as the forward matmul has it, dequantised."""
        return any(getattr(self, role) == FORWARD for role in OPERANDS[product])

    def quantizes(self, product: str) -> bool:
        """Whether any operand of the matmul has a format."""
        return any(fmt is not None for fmt in self.operands(product))

    def rule_for(self, module: str) -> Rule | None:
        """The first rule that matches the name of a layer; None where none does."""
        return next((rule for rule in self.rules if rule.matches(module)), None)

    def static_scale(self, module: str) -> float | None:
        """The static global scale of a layer's activation; None where `static_scales` has none."""
        return dict(self.static_scales).get(module)

    def __repr__(self) -> str:
        return f"Recipe({', '.join(f'{name}={value}' for name, value in self._changed().items())})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><td>{html.escape(name)}</td><td><code>{html.escape(value)}</code></td></tr>"
            for name, value in self._changed().items()
        )
        return f"<table>{cells}</table>"

    def _changed(self) -> dict[str, str]:
        """The name, and the fields that differ from their defaults, as texts. Long tuples are counted."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: f"<{len(value)} entries>" if isinstance(value, tuple) and len(value) > _SHOWN else repr(value)
            for field, value in values.items() if field.name == "name" or value != field.default
        }  # fmt: skip

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the recipe's content, equal in every process."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary for JSON, from which `from_dict` makes an equal recipe."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain["rules"] = [dataclasses.asdict(rule) for rule in self.rules]
        plain["static_scales"] = dict(self.static_scales)
        return plain | {name: list(plain[name]) for name in _SWITCHES}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Recipe":
        """The recipe with fields as from `to_dict`; a key "recipe" names the recipe whose fields they override.

        Raises ValueError for an unknown field or recipe, TypeError if `fields` is no dict or "recipe" no string, and
        the errors of `Recipe`.
        """
        if not isinstance(fields, dict):
            raise TypeError(f"recipe: expected a dict of fields, got {type(fields).__name__}")
        fields = dict(fields)
        base = fields.pop("recipe", None)
        return (cls() if base is None else named(base)).replace(**fields)

    @classmethod
    def from_toml(cls, path: str | Path) -> "Recipe":
        """The recipe of a TOML file: its table [fp4compile], or the whole file; fields as in `from_dict`.

        Raises ValueError for a file that is not TOML, that has no recipe in it, that has recipe fields outside of the
        table (except `name`), or that `save` wrote and that is truncated; the errors of `from_dict`, prefixed by the
        path; OSError for a file that cannot be read.
        """
        fields = sources.read_toml(path, _field_names())
        with sources.errors_name(f"{path}: "):
            return cls.from_dict(fields)

    @classmethod
    def from_json(cls, path: str | Path) -> "Recipe":
        """The recipe of a JSON file: an object of fields as in `from_dict`. Raises as `from_toml`."""
        try:
            fields = json.loads(Path(path).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        with sources.errors_name(f"{path}: "):
            return cls.from_dict(fields)

    def save(self, path: str | Path) -> None:
        """Write all fields to a .toml or .json file that every function that takes a recipe reads.

        Readers refuse a truncated file; a failed write leaves an existing file unchanged. Raises ValueError for another
        file ending, OSError where the file cannot be written.
        """
        sources.write(path, self.to_dict())

    @classmethod
    def from_env(cls) -> "Recipe | None":
        """The recipe of FP4COMPILE_RECIPE, a name or the path of a .toml or .json file; None if it is unset or empty.

        Raises the errors of `resolve`, prefixed by the variable and its value.
        """
        value = os.environ.get(sources.ENVIRONMENT)
        if not value:
            return None
        with sources.errors_name(f"{sources.ENVIRONMENT}={value}: "):
            return resolve(value)

    @classmethod
    def from_args(cls, args: Namespace) -> "Recipe | None":
        """The recipe of parsed --fp4compile-* options; None where neither they nor FP4COMPILE_RECIPE name one.

        args: the result of a parser with the options of `fp4compile.add_arguments`.

        Raises TypeError for other arguments; ValueError for an unknown recipe or field, for a malformed FIELD=VALUE,
        for a field that is set twice, and for options without a recipe; the errors of `resolve`.
        """
        overrides = sources.overrides_of(args)
        base = cls.from_env() if args.fp4compile_recipe is None else resolve(args.fp4compile_recipe)
        if base is None:
            if overrides or args.fp4compile_skip:
                raise ValueError(f"--fp4compile options without --fp4compile-recipe or {sources.ENVIRONMENT}")
            return None
        chosen = base.replace(**overrides)
        # The command line's skipped layers outrank the recipe's own rules, and the rules of --fp4compile-set.
        skips = tuple(Rule(glob, "skip") for glob in args.fp4compile_skip)
        return chosen.replace(rules=(*skips, *chosen.rules)) if skips else chosen

    def replace(self, **overrides: Any) -> "Recipe":
        """A copy with fields replaced. Raises ValueError for an unknown field, and the errors of `Recipe`."""
        allowed = _field_names()
        for name in overrides:
            if name not in allowed:
                raise ValueError(unknown_name("recipe field", name, allowed))
        return dataclasses.replace(self, **overrides)

    def with_budget(
        self,
        report: Ranking,
        *,
        sqnr_db: float | None = None,
        bf16_share: float | None = None,
        fallback: str | Ranking | None = None,
    ) -> "Recipe":
        """A copy with one rule for each of the worst layers of a report, before all other rules.

        report: the result of `fp4compile.sensitivity` under this recipe.
        sqnr_db: choose as few layers as possible, so that the model's output keeps at least so many decibels.
        bf16_share: choose, from the worst on, layers with at most this share (0 to 1) of the weights' elements.
        fallback: the named recipe, such as "mxfp8", whose formats these layers take; None leaves them unquantised. With
            sqnr_db, the result of `fp4compile.sensitivity` under that recipe, whose errors count too.

        Raises ValueError unless exactly one budget is set, for a share out of range, for an unknown fallback or its
        name beside sqnr_db, and where so many decibels cannot be kept; TypeError for another report.
        """
        if not isinstance(report, Ranking):
            raise TypeError(f"report: expected a fp4compile.Sensitivity, got {type(report).__name__}")
        measured, name = (fallback, fallback.recipe) if isinstance(fallback, Ranking) else (None, fallback)
        if sqnr_db is not None and name is not None and measured is None:
            raise ValueError(
                f"fallback={fallback!r}: its own error counts in sqnr_db; pass what was measured under it, "
                f"fallback=fp4compile.sensitivity(model, batches, {fallback!r})"
            )
        layers = report.worst(sqnr_db=sqnr_db, share=bf16_share, fallback=measured)
        if name is not None and name not in FIELDS:
            raise ValueError(unknown_name("fallback", name, FIELDS))
        worst = (Rule(escape(layer), name or "skip") for layer in layers)
        return self.replace(rules=(*worst, *self.rules))


def _format_name(role: str, value: Any) -> str | None:
    """The registered name or the spec string of a format; None for high precision; "forward" where it is allowed."""
    if value is None or value == "none":
        return None
    if value == FORWARD and role in OF_FORWARD:
        return FORWARD
    try:
        return formats.get(value).name
    except (TypeError, ValueError) as error:
        raise type(error)(f"{role}: {error}") from None


def _sequence(field: str, value: Any) -> list | tuple:
    # Python iterates over a string's letters and a dict's keys. Both are mistakes here.
    if not isinstance(value, list | tuple):
        raise TypeError(f"{field}: expected a list or a tuple, got {type(value).__name__}")
    return value


def _products(field: str, value: Any) -> tuple[str, ...]:
    """The matmuls of a training switch, each once, in alphabetical order."""
    products = _sequence(field, value)
    for product in products:
        if not isinstance(product, str):
            raise TypeError(f"{field}: expected names of products, got {product!r}")
    return tuple(sorted(set(products)))


def _scales(value: Any) -> tuple[tuple[str, float], ...]:
    """The pairs of `static_scales`, in alphabetical order."""
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


def recipes() -> tuple[str, ...]:
    """The names of the named recipes, which every function that takes a recipe accepts."""
    return tuple(FIELDS)


def named(name: str) -> Recipe:
    """The recipe of a name. Raises ValueError, with the nearest match, for an unknown name, TypeError for no string."""
    if not isinstance(name, str):
        raise TypeError(f"recipe: expected a name, got {type(name).__name__}")
    if name not in FIELDS:
        raise ValueError(unknown_name("recipe", name, FIELDS))
    return Recipe(name=name, **FIELDS[name])


def resolve(recipe: str | dict | Recipe | Path | None = None, **overrides: Any) -> Recipe:
    """The recipe that the user means.

    recipe: a `Recipe`, a dict (see `Recipe.from_dict`), a name, or the path of a .toml or .json file. None takes the
        environment variable FP4COMPILE_RECIPE (a name or a path), or "nvfp4", and logs it at level INFO.
    overrides: fields to replace.

    Raises ValueError for an unknown name or field, TypeError for anything else, OSError for a file that does not exist.
    """
    if recipe is None:
        given = Recipe.from_env()
        chosen = given or named(sources.DEFAULT)
        source = "the default" if given is None else f"from {sources.ENVIRONMENT}"
        log.info("no recipe was named: recipe %r, %s", chosen.name, source)
    elif isinstance(recipe, Recipe):
        chosen = recipe
    elif isinstance(recipe, dict):
        chosen = Recipe.from_dict(recipe)
    elif isinstance(recipe, Path | str) and Path(recipe).suffix == ".json":
        chosen = Recipe.from_json(recipe)
    elif isinstance(recipe, Path) or (isinstance(recipe, str) and recipe.endswith(".toml")):
        chosen = Recipe.from_toml(recipe)
    elif isinstance(recipe, str):
        chosen = named(recipe)
    else:
        raise TypeError(f"recipe: expected a name, a dict, a path or a Recipe, got {type(recipe).__name__}")
    return chosen.replace(**overrides) if overrides else chosen


def _field_names() -> list[str]:
    return [field.name for field in dataclasses.fields(Recipe)]
