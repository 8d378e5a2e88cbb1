"""Random programs as data: a module's text, the text of its oracle, the recipe, and the shapes of the inputs.

`build(seed, style)` draws a program. A step (see `kinds.py`) is a few lines of Python for the module's `forward` and
the lines that say the same to the oracle. Text, so that Dynamo traces what a user would have written, and that a
finding can be read, run alone and shortened.
"""

import itertools
import linecache
import random
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from fp4compile.recipe import Recipe

WIDTHS = (32, 48, 64, 96)
RAGGED_WIDTHS = (32, 40, 57, 64, 72, 96, 130)
ROWS = (1, 5, 16, 24, 32, 33, 48, 64, 80)
DYNAMIC_ROWS = (24, 33, 40, 80)  # no width: sizes that are equal share a symbol, and widths are no symbols


@dataclass(frozen=True)
class Style:
    """What kind of programs to draw.

    large: sizes for a GPU, where kernels of every kind are met. ragged: small sizes that no tile divides. Programs of
    either kind have the steps and activations of models.
    """

    large: bool = False
    ragged: bool = False

    @property
    def as_models(self) -> bool:
        return self.large or self.ragged

    def widths(self) -> tuple[int, ...]:
        return (128, 192, 256, 320, 512, 1024) if self.large else RAGGED_WIDTHS if self.ragged else WIDTHS


@dataclass(frozen=True)
class Step:
    """reads, makes: names of values, with the shapes of those made. code: lines of `forward`; oracle: of the oracle."""

    kind: str
    reads: tuple[str, ...]
    makes: tuple[tuple[str, tuple[int, ...]], ...]
    code: tuple[str, ...]
    oracle: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """inputs: (name, shape, whether it has a gradient). setup: lines of `__init__`; outside: lines before the class.

    train: with gradients, else under no_grad. dynamic: called with a second number of rows, too. style: as built.
    """

    seed: int
    train: bool
    dynamic: bool
    recipe: Recipe
    inputs: tuple[tuple[str, tuple[int, ...], bool], ...]
    outside: tuple[str, ...]
    setup: tuple[str, ...]
    steps: tuple[Step, ...]

    def outputs(self) -> list[str]:
        """What no step reads."""
        read = {name for step in self.steps for name in step.reads}
        made = [name for step in self.steps for name, _ in step.makes]
        return [name for name in made if name not in read] or [self.inputs[0][0]]

    def source(self) -> str:
        """The module's class and the oracle's function."""
        names = ", ".join(name for name, *_ in self.inputs)
        result = f"return ({', '.join(self.outputs())},)"
        return "\n".join([
            *self.outside,
            "class Module(torch.nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in self.setup),
            "",
            f"    def forward(self, {names}):",
            *(f"        {line}" for step in self.steps for line in step.code),
            f"        {result}",
            "",
            f"def oracle(q, self, {names}):",
            *(f"    {line}" for step in self.steps for line in step.oracle),
            f"    {result}",
            "",
        ])  # fmt: skip

    def load(self) -> tuple[torch.nn.Module, object, list[torch.nn.Module]]:
        """(the module, the oracle's function, modules that the first one reaches without owning them)."""
        text, name = self.source(), f"<fuzz program {self.seed}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        space = {"torch": torch, "F": F}
        exec(compile(text, name, "exec"), space)
        return space["Module"](), space["oracle"], [v for v in space.values() if isinstance(v, torch.nn.Module)]

    def without(self, index: int) -> "Program | None":
        """The program without a step, later steps reading an input of it instead; None where none has the shape."""
        step = self.steps[index]
        shapes = {name: shape for name, shape, _ in self.inputs}
        shapes |= {name: shape for other in self.steps for name, shape in other.makes}
        later = self.steps[index + 1 :]
        names = {}
        for name, shape in step.makes:
            alike = [read for read in step.reads if shapes[read] == shape]
            if any(name in other.reads for other in later):
                if not alike:
                    return None
                names[name] = alike[0]
        kept = (*self.steps[:index], *(_renamed(other, names) for other in later))
        return replace(self, steps=kept) if kept else None


def _renamed(step: Step, names: dict[str, str]) -> Step:
    """The step after lines that give values a second name."""
    aliases = tuple(f"{name} = {names[name]}" for name in dict.fromkeys(step.reads) if name in names)
    if not aliases:
        return step
    reads = tuple(names.get(name, name) for name in step.reads)
    return replace(step, reads=reads, code=aliases + step.code, oracle=aliases + step.oracle)


@dataclass(frozen=True)
class Layer:
    """A parameter [out, in] (or [in, out] where `crosswise`) that steps may use again. weight: the expression."""

    name: str
    weight: str
    out: int
    into: int
    crosswise: bool = False


@dataclass
class Draft:
    """A program in the making: what steps draw from and add to."""

    seed: int
    style: Style
    train: bool
    dynamic: bool
    rng: random.Random
    inputs: list = field(default_factory=list)
    outside: list = field(default_factory=list)
    setup: list = field(default_factory=list)
    steps: list = field(default_factory=list)
    shapes: dict = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    numbers: itertools.count = field(default_factory=itertools.count)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def name(self, letter: str) -> str:
        return f"{letter}{next(self.numbers)}"

    def width(self, multiple: int = 1) -> int:
        return self.rng.choice([w for w in self.style.widths() if w % multiple == 0])

    def pick(self, rank: int | None = None, width: int | None = None) -> str | None:
        """A value, mostly a recent one; None where no value has that rank or width."""
        names = [name for name, shape in self.shapes.items()
                 if (rank is None or len(shape) == rank) and (width is None or shape[-1] == width)]  # fmt: skip
        if not names:
            return None
        return self.rng.choice(names[-2:] if self.chance(0.6) else names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def linear(self, into: int, out: int, bias: bool | None = None, letter: str = "l", frozen: bool = False) -> str:
        """The name of a new torch.nn.Linear."""
        name = self.name(letter)
        bias = self.chance(0.5) if bias is None else bias
        self.setup.append(f"self.{name} = torch.nn.Linear({into}, {out}, bias={bias})")
        if frozen:
            self.setup.append(f"self.{name}.requires_grad_(False)")
        self.layers.append(Layer(name, f"self.{name}.weight", out, into))
        return name

    def parameter(self, *shape: int, letter: str = "w") -> str:
        """The name of a new parameter of the module itself."""
        name = self.name(letter)
        self.setup.append(f"self.{name} = torch.nn.Parameter(torch.empty{shape})")
        return name

    def step(self, kind: str, reads, makes, code, oracle=None) -> None:
        """A step; without lines for the oracle it is the same for both."""
        oracle = code if oracle is None else oracle
        makes = tuple(makes.items())
        self.steps.append(Step(kind, tuple(reads), makes, tuple(code), tuple(oracle)))
        self.shapes |= dict(makes)


def build(seed: int, style: Style = Style(), only: tuple[str, ...] = ()) -> Program:  # noqa: B008 (frozen)
    """The program of a seed. only: kinds of steps to draw from, all where empty."""
    from tests.fuzz import layers, models, weights  # noqa: F401 (they register the kinds of steps)
    from tests.fuzz.kinds import draw_step

    rng = random.Random(seed)
    train = rng.random() < 0.75
    draft = Draft(seed, style, train, dynamic=rng.random() < 0.06, rng=rng)
    _draw_inputs(draft)
    for _ in range(rng.randint(1, 5)):
        draw_step(draft, only)
    return Program(
        seed, train, draft.dynamic, draw_recipe(draft), tuple(draft.inputs),
        tuple(draft.outside), tuple(draft.setup), tuple(draft.steps),
    )  # fmt: skip


def _draw_inputs(draft: Draft) -> None:
    rng, width = draft.rng, draft.width()
    least = 2 if draft.dynamic else 1  # a single row is no symbol
    rows = rng.randint(least, 300) if draft.style.large else rng.choice(DYNAMIC_ROWS if draft.dynamic else ROWS)
    draft.inputs.append(("x", (rows, width), draft.chance(0.7)))
    if not draft.dynamic and draft.chance(0.4):
        batch = width if width <= 32 and draft.chance(0.5) else rng.choice((2, 3, 4))
        shape = (batch, rng.choice((1, 3, 16, 24)), width)
        draft.inputs[0:1] = [("x", shape, draft.inputs[0][2])]
    if draft.chance(0.3):
        draft.inputs.append(("z", draft.inputs[0][1], draft.chance(0.5)))
    draft.shapes |= {name: shape for name, shape, _ in draft.inputs}


# ---------------------------------------------------------------- recipes

_NVFP4 = ("nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16")
_MX = ("mxfp8", "mxfp8_floor", "mxfp8_ceil", "mxfp8_even", "mxfp8_e5m2", "mxfp8_32x32", "mxfp4")
_FLOAT8 = ("float8_rowwise", "float8_tensor")
_FLOAT8_BLOCKS = ("float8_1x128", "float8_128x128")
_PRODUCTS = {
    "fprop": ("fprop_x", "fprop_w"), "dgrad": ("dgrad_dy", "dgrad_w"), "wgrad": ("wgrad_dy", "wgrad_x"),
    "attention": ("attention_a", "attention_b"),
}  # fmt: skip
_SHARES = {"fprop": 0.9, "dgrad": 0.8, "wgrad": 0.8, "attention": 0.25}
_RULES = ("skip", "quantize", "mxfp8", "mxfp4", "nvfp4", "nvfp4_one_level", "nvfp4_rowwise", "nvfp4_weight_only",
          "mxfp8_32x32", "float8_rowwise", "float8_tensor", "float8_block")  # fmt: skip


def draw_recipe(draft: Draft) -> Recipe:
    """Formats of each product apart, a rule for some layers. Never stochastic rounding: results must repeat."""
    rng = draft.rng
    fields: dict = {"name": "fuzz", "skip_lm_head": False}
    for product, roles in _PRODUCTS.items():
        if rng.random() < _SHARES[product]:
            fields |= dict(zip(roles, _formats(rng), strict=True))
    if rng.random() < 0.3:
        fields |= {"min_n": rng.choice((8, 64)), "min_k": rng.choice((8, 64)), "min_m": rng.choice((1, 16))}
    names = list(dict.fromkeys(layer.name for layer in draft.layers))
    fields["rules"] = tuple((name, rng.choice(_RULES)) for name in names if rng.random() < 0.3)
    if fields.get("wgrad_x") in _NVFP4[:4] and fields.get("wgrad_dy") in _NVFP4[:4] and rng.random() < 0.6:
        fields["hadamard"] = ("wgrad",)
    if fields.get("fprop_x") in ("nvfp4", "nvfp4_te") and names and rng.random() < 0.6:
        fields["activation_scale"] = "static"
        known = [name for name in names if rng.random() < 0.8]
        fields["static_scales"] = tuple((name, rng.choice((0.001, 0.002, 0.01))) for name in known)
    return Recipe(**fields)


def _formats(rng: random.Random) -> tuple[str | None, str | None]:
    family = rng.choice((_NVFP4, _NVFP4, _MX, _MX, _FLOAT8, _FLOAT8_BLOCKS))
    pair = [rng.choice(family), rng.choice(family)]
    if rng.random() < 0.15:
        pair[rng.randrange(2)] = None
    return tuple(pair)
