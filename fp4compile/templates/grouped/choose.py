"""Which kernel computes the products of groups: the only place that decides it."""

from dataclasses import dataclass, replace
from typing import Any

from fp4compile.formats.groups import padded_rows
from fp4compile.templates.grouped import block_scaled_sm100, dequant_operand, dequant_tiles, library, skinny
from fp4compile.templates.grouped.heuristics import least_rows_in_memory
from fp4compile.templates.grouped.problem import GroupedCandidate, GroupedProblem

# In order of rank.
REGISTRY: tuple[GroupedCandidate, ...] = (
    block_scaled_sm100.CANDIDATE,
    library.BLOCK_SCALED,  # serves nothing that the one before does not: chosen where it was timed, see `autotune`
    library.ROW_SCALED,
    skinny.CANDIDATE,
    dequant_operand.CANDIDATE,
    dequant_tiles.CANDIDATE,
)


@dataclass(frozen=True)
class GroupedChoice:
    """A kernel, by its candidate's name, and its launch configuration: what `max-autotune` found to be the fastest."""

    kernel: str
    config: Any


def choose(problem: GroupedProblem) -> GroupedCandidate:
    """The first kernel of the registry that serves a problem."""
    return next(candidate for candidate in REGISTRY if candidate.serves(problem))


def to_time(problem: GroupedProblem) -> list[GroupedChoice]:
    """Every kernel in every configuration between which only time can decide: those on the matrix units, best rank
    first."""
    native = (each for each in REGISTRY if each.tier == "native" and each.serves(problem))
    return [GroupedChoice(each.name, config) for each in native for config in each.to_time(problem)]


def named(name: str) -> GroupedCandidate:
    """The candidate of a name. Raises ValueError for another name."""
    for candidate in REGISTRY:
        if candidate.name == name:
            return candidate
    raise ValueError(f"kernel: {name!r} is none of {', '.join(each.name for each in REGISTRY)}")


def settled(problem: GroupedProblem) -> bool:
    """Whether it is the same kernel for every number of rows that the problem allows."""
    if isinstance(problem.rows, int):
        return True
    return len({choose(_with_rows(problem, rows)).name for rows in (1, least_rows_in_memory(problem))}) == 1


def _with_rows(p: GroupedProblem, rows: int) -> GroupedProblem:
    return replace(p, rows=rows, k=padded_rows(rows, p.groups)) if p.along_k else replace(p, rows=rows, m=rows)
