"""The kinds of steps that programs are made of. Each function adds one to the draft, or nothing where none fits.

Between products stand operators whose decompositions are exact: sums, products, relu, negation, views. Large programs,
whose products round anyhow, have norms and other activations too.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.programs import Draft


@dataclass(frozen=True)
class Kind:
    """add: adds a step. weight: how often it is drawn; large, ragged: how often in programs of these styles."""

    add: Callable[[Draft], None]
    weight: float
    large: float
    ragged: float

    def drawn(self, draft: Draft) -> float:
        return self.large if draft.style.large else self.ragged if draft.style.ragged else self.weight


KINDS: dict[str, Kind] = {}


def kind(weight: float, large: float | None = None, ragged: float | None = None):
    """Registers the function as a kind of step. Ragged programs draw it as often as large ones, unless told."""
    large = weight if large is None else large

    def register(function):
        KINDS[function.__name__] = Kind(function, weight, large, large if ragged is None else ragged)
        return function

    return register


def draw_step(draft: Draft, only: tuple[str, ...] = ()) -> None:
    """Add a step of a random kind, of those that `only` names if it names any."""
    names = [name for name in KINDS if not only or name in only]
    weights = [KINDS[name].drawn(draft) for name in names]
    count = len(draft.steps)
    for _ in range(20):  # a kind that finds nothing to work on adds nothing
        KINDS[draft.rng.choices(names, weights)[0]].add(draft)
        if len(draft.steps) > count:
            return


def result(d: Draft, x: str, width: int) -> tuple[str, dict]:
    """The name of a result with x's leading dimensions, and its shape."""
    name = d.name("h")
    return name, {name: (*d.shape(x)[:-1], width)}


def applied(layer: str, x: str) -> tuple[str, str]:
    """How the module calls a Linear, and how the oracle does."""
    return f"self.{layer}({x})", f"q.linear('{layer}', {x}, self.{layer}.weight, self.{layer}.bias)"
