"""Which entries of `quantisers` and `products` the tests compile; `check-sm100` compiles all."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from fp4compile.check.products import PRODUCTS, MatmulCase, multiplies
from fp4compile.check.quantisers import CONFIGURATIONS, Configuration
from fp4compile.templates.launch import Launch


@cache
def representatives(sm: int) -> tuple[tuple[Configuration, ...], tuple[MatmulCase, ...]]:
    """The configurations and products with a launch that has a trait which no other entry here has, and each first one.

    On SM100, for which the kernels are written, traits are a combination of number formats and epilogue, a way to load
    and store, warps or stages, a dtype and, for quantise kernels, any value of any constant. Other GPUs run the same
    sources: there the traits are each kernel, each kind of element, and each combination of formats in a product; on
    SM103, which has the launches of SM100, each kernel.
    """
    configurations = _with_something_new(CONFIGURATIONS, sm, lambda one: one.launches(sm))
    return configurations, _with_something_new(PRODUCTS, sm, lambda one: one.launches(sm)[1])


_BRANCHES = ("B_BATCHED", "ALONG_K", "TWO_SUMS")
_PATH = ("TMA", "TMA_STORE", "EVEN_K", "SWIZZLED", "FLAT")


def _with_something_new(table: Iterable[Any], sm: int, launches: Callable[[Any], list[Launch]]) -> tuple[Any, ...]:
    """The entries with new traits. The first, plainest entry always stays, because most users run it."""
    chosen, seen = [], set[Any]()
    for entry in table:
        traits = {trait for one in launches(entry) for trait in _traits(one, _end_of(entry), sm)}
        if not traits <= seen:
            chosen.append((entry, traits))
            seen |= traits
    for one in chosen[1:]:  # later ones may have all that it brought
        if one[1] <= {trait for other in chosen if other is not one for trait in other[1]}:
            chosen.remove(one)
    return tuple(entry for entry, _ in chosen)


def _end_of(entry: Any) -> str:
    """What follows a product in its kernel.

    A quantised result is one trait, whatever its format, and one of a pair; so is an amax.
    """
    epilogue = getattr(entry, "epilogue", "")
    if not getattr(entry, "result", ""):
        return epilogue
    if entry.result == "amax":
        return "amax"
    return "quantised pair" if epilogue == "pair" else "quantised"


def _traits(launched: Launch, epilogue: str, sm: int) -> set[tuple]:
    """The traits of a launch that other launches may lack."""
    name, constants = launched.kernel.__name__, launched.constants
    formats = tuple(str(constants.get(key)) for key in ("ELEMENT", "A_ELEMENT", "B_ELEMENT", "SCALE"))
    if sm == 103:
        return {(name,)}
    if sm != 100:
        return {(name,), formats if multiplies(launched) else (constants.get("ELEMENT"),)}
    keys = _BRANCHES if multiplies(launched) else constants
    values = {(name, key, str(constants.get(key))) for key in keys}
    whole = launched.args["n"] % 16 == 0 if "n" in launched.args else None  # else rows of results start anywhere
    path = (name, *(str(constants.get(key)) for key in _PATH), whole)
    dtype = launched.args["x_ptr"].dtype if "x_ptr" in launched.args else None
    return {
        *values, (name, formats), (name, epilogue), path, (name, dtype),
        (name, launched.num_warps, launched.num_stages),
    }  # fmt: skip
