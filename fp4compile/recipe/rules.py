"""Layer rules: a recipe's decisions about layers whose name matches a glob."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

from fp4compile.formats.formats import unknown_name
from fp4compile.recipe.named_recipes import FIELDS

_ACTIONS = ("skip", "quantize")


@dataclass(frozen=True)
class Rule:
    """The decision about layers whose fully qualified module name matches a glob.

    pattern: the glob, matched case-sensitively against the whole name; "*" matches dots too.
    action: "skip" leaves the layer unquantised. "quantize" quantises it, even where the recipe's defaults would not.
        The name of a named recipe gives the layer that recipe's formats.

    Raises TypeError for a field that is no string, ValueError for an empty or padded pattern and an unknown action.
    """

    pattern: str
    action: str

    def __post_init__(self) -> None:
        for name in ("pattern", "action"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"rules: {name} must be a string, got {type(getattr(self, name)).__name__}")
        if not self.pattern or self.pattern != self.pattern.strip():
            raise ValueError(f"rules: pattern {self.pattern!r} is empty or has spaces around it, so no name matches it")
        if self.action not in (*_ACTIONS, *FIELDS):
            raise ValueError(unknown_name("rule action", self.action, (*_ACTIONS, *FIELDS)))

    def matches(self, module: str) -> bool:
        """Whether the name of a layer matches the pattern."""
        return fnmatchcase(module, self.pattern)

    @property
    def takes_static_scale(self) -> bool:
        """Whether the action names a recipe whose activation scales are static."""
        return FIELDS.get(self.action, {}).get("activation_scale") == "static"


@runtime_checkable
class Ranking(Protocol):
    """Layers ordered by the cost of quantising them: a `fp4compile.Sensitivity`."""

    recipe: str

    def worst(
        self, *, sqnr_db: float | None = None, share: float | None = None, fallback: "Ranking | None" = None
    ) -> tuple[str, ...]:
        """The names of the worst layers, by one of two budgets. fallback: the layers under another recipe."""


def unmatched(rules: Iterable[Rule], names: Iterable[str]) -> tuple[Rule, ...]:
    """The unused rules: they match none of the names, or only names that earlier rules match."""
    left = dict.fromkeys(names)
    idle = []
    for rule in rules:
        matched = [name for name in left if rule.matches(name)]
        if not matched:
            idle.append(rule)
        for name in matched:
            del left[name]
    return tuple(idle)


def rule_of(entry: Any) -> Rule:
    """The rule of an entry of `Recipe.rules`. Raises ValueError for other keys, TypeError for anything else."""
    if isinstance(entry, Rule):
        return entry
    if isinstance(entry, dict):
        if set(entry) != {"pattern", "action"}:
            raise ValueError(f"rules: a rule has a pattern and an action, got {entry}")
        return Rule(**entry)
    if isinstance(entry, tuple | list) and len(entry) == 2:
        return Rule(*entry)
    raise TypeError(f"rules: expected a Rule, a dict or a (pattern, action) pair, got {entry!r}")
