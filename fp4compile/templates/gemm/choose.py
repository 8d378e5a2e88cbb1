"""Which kernel serves a product: the only place that decides it.

`choose(problem)` asks the candidates of `REGISTRY` in the order of their rank; the first that serves the problem is
chosen. The passes that plan, fuse and lower, `autotune` and the dispatch all read the `Choice`. A new kernel is a
`Candidate` in a file of its own, and a line here.
"""

from dataclasses import dataclass, replace
from typing import Any

from fp4compile._compat import statically_true
from fp4compile.templates.gemm import (
    block_scaled_sm100,
    cost,
    dequant_operand,
    dequant_tiles,
    gemv,
    library,
    skinny,
    skinny_block_scaled_sm100,
    wgmma_sm90,
)
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import LIBRARY_ROWS, WGMMA_ROWS
from fp4compile.templates.gemm.problem import Problem

# In order of rank: the library before a kernel that computes the same, a kernel for few rows before one for many.
REGISTRY: tuple[Candidate, ...] = (
    skinny_block_scaled_sm100.CANDIDATE,
    library.BLOCK_SCALED,
    block_scaled_sm100.CANDIDATE,
    library.ROW_SCALED,
    library.RESCALED,
    gemv.CANDIDATE,
    skinny.CANDIDATE,
    wgmma_sm90.CANDIDATE,
    dequant_operand.CANDIDATE,
    dequant_tiles.CANDIDATE,
)
# Numbers of rows of A that stand for all others where the number is symbolic: each is served by another kernel.
_REPRESENTATIVE_ROWS = (1, WGMMA_ROWS, LIBRARY_ROWS)


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a problem.

    kernel: the candidate's name; "by rows" where the number of rows is symbolic and decides it when the graph runs.
    tier: "native" or "emulated". config: the launch configuration, None where there is nothing to configure.
    takes_epilogue: whether a kernel applies the problem's epilogue or, of a problem without one, would apply it: the
    kernel that serves the problem anyhow or another one, if that is expected to be faster than this kernel and a
    pointwise kernel after it (see `cost`).
    takes_prologue: whether the kernel can compute A from what A is made of. No kernel does.
    dequantizes_a: whether a quantised A is written to memory in 16 bits first; "by rows": for every number of rows.
    stores: whether a kernel writes the result; not where the graph rescales what the library has written.
    group: what products of one A must have in common to be computed in one launch; None where they cannot be.
    settled: whether it is this kernel for every number of rows that the problem allows.
    traceable: whether a graph can hold the launches. If not, or if not settled, the op stays in the graph.
    """

    kernel: str
    tier: str
    config: Any = None
    takes_epilogue: bool = False
    takes_prologue: bool = False
    dequantizes_a: bool = False
    stores: bool = True
    group: tuple | None = None
    settled: bool = True
    traceable: bool = True


def choose(problem: Problem, preferred: str | None = None) -> Choice:
    """The kernel for a problem.

    preferred: a name of `candidates(problem)`, which is then chosen if it serves the problem. Raises ValueError for
    another name.
    """
    found = _candidate(problem, preferred)
    if not found.any_rows and not _rows_known(problem):
        each = [_candidate(replace(problem, m=m), None) for m in _REPRESENTATIVE_ROWS]
        dequantizes = all(candidate.dequantizes_a for candidate in each)
        return Choice("by rows", found.tier, dequantizes_a=dequantizes, settled=False, traceable=False)
    # An epilogue never makes a candidate serve a problem: if this one still does, it is still the first.
    fused = problem if problem.epilogue else replace(problem, epilogue=True)
    with_epilogue = found if found.serves(fused) else _candidate(fused, None)
    takes_epilogue = with_epilogue.takes_epilogue(fused)
    if takes_epilogue and with_epilogue is not found:
        takes_epilogue = cost.fusing_pays(problem, with_epilogue.configure(fused))
    config = found.configure(problem)
    return Choice(
        found.name, found.tier, config, takes_epilogue=takes_epilogue, dequantizes_a=found.dequantizes_a,
        stores=found is not library.RESCALED,
        group=None if found.group_with is None or problem.empty else found.group_with(problem),
        traceable=found.traceable(config),
    )  # fmt: skip


def candidates(problem: Problem) -> tuple[str, ...]:
    """The names of those that compute all of a problem on the matrix units as it is, best rank first.

    Where there are several, which one is faster is not known before both are timed; see `passes.autotune`.
    """
    return tuple(each.name for each in REGISTRY if each.tier == "native" and each.serves(problem))


def named(name: str) -> Candidate:
    """The candidate of a name. Raises ValueError for another name."""
    for candidate in REGISTRY:
        if candidate.name == name:
            return candidate
    raise ValueError(f"kernel: {name!r} is none of {', '.join(each.name for each in REGISTRY)}")


def _candidate(problem: Problem, preferred: str | None) -> Candidate:
    if preferred is not None and named(preferred).serves(problem):
        return named(preferred)
    return next(candidate for candidate in REGISTRY if candidate.serves(problem))


def _rows_known(problem: Problem) -> bool:
    """Whether the number of rows is known to be small, or known to be large: kernels for the two differ."""
    return statically_true(problem.m < LIBRARY_ROWS) or statically_true(problem.m >= LIBRARY_ROWS)
