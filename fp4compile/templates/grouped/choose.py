"""Which kernel computes the products of groups: the only place that decides it."""

from dataclasses import replace

from fp4compile.groups import padded_rows
from fp4compile.templates.grouped import block_scaled_sm100, dequant_operand, dequant_tiles, library, skinny
from fp4compile.templates.grouped.heuristics import MANY_ROWS
from fp4compile.templates.grouped.problem import GroupedCandidate, GroupedProblem

# In order of rank.
REGISTRY: tuple[GroupedCandidate, ...] = (
    block_scaled_sm100.CANDIDATE,
    library.CANDIDATE,
    skinny.CANDIDATE,
    dequant_operand.CANDIDATE,
    dequant_tiles.CANDIDATE,
)


def choose(problem: GroupedProblem) -> GroupedCandidate:
    """The first kernel of the registry that serves a problem."""
    return next(candidate for candidate in REGISTRY if candidate.serves(problem))


def settled(problem: GroupedProblem) -> bool:
    """Whether it is the same kernel for every number of rows that the problem allows."""
    if isinstance(problem.rows, int):
        return True
    return len({choose(_with_rows(problem, rows)).name for rows in (1, MANY_ROWS * problem.groups)}) == 1


def _with_rows(p: GroupedProblem, rows: int) -> GroupedProblem:
    return replace(p, rows=rows, k=padded_rows(rows, p.groups)) if p.along_k else replace(p, rows=rows, m=rows)
