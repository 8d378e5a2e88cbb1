"""Which kernel computes the products of groups: the only place that decides it."""

from fp4compile.templates.grouped import block_scaled_sm100, dequant_tiles
from fp4compile.templates.grouped.problem import GroupedCandidate, GroupedProblem

REGISTRY: tuple[GroupedCandidate, ...] = (block_scaled_sm100.CANDIDATE, dequant_tiles.CANDIDATE)  # in order of rank


def choose(problem: GroupedProblem) -> GroupedCandidate:
    """The first kernel of the registry that serves a problem."""
    return next(candidate for candidate in REGISTRY if candidate.serves(problem))
