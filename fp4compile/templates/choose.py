"""Choose the kernel of a matmul. No other file does.

`choose(problem)` returns the first candidate of `REGISTRY` that serves the problem. The passes that plan, fuse and
lower, `autotune` and `multiply` all read the `Choice`. A new kernel is a `Candidate` in a file of its own, and a line
here.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import Epilogue
from fp4compile.templates.gemm import (
    block_scaled_sm100,
    block_scaled_two_ctas_sm100,
    cost,
    dequant_operand,
    dequant_tiles,
    float8_blocks_as_mx,
    float8_sm90,
    float8_tiles,
    library,
    skinny_block_scaled_sm100,
    streaming,
    wgmma_sm90,
)
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_operand import LIBRARY_ROWS, least_rows_in_memory
from fp4compile.templates.problem import Problem

# In order of rank: a library before a kernel for its problems, a kernel for few rows before a kernel for many.
_BLOCK_SCALED = (
    skinny_block_scaled_sm100.CANDIDATE,
    block_scaled_sm100.GROUPED,
    library.BLOCK_SCALED,
    block_scaled_sm100.CANDIDATE,
    block_scaled_two_ctas_sm100.CANDIDATE,  # serves a subset of the kernels of one CTA: chosen only by timing
)
REGISTRY: tuple[Candidate, ...] = (
    *_BLOCK_SCALED,
    *map(float8_blocks_as_mx.as_mx, _BLOCK_SCALED),
    streaming.FLOAT8,
    float8_tiles.CANDIDATE,
    float8_tiles.WEIGHTS,
    library.FLOAT8_BLOCKS,
    library.ROW_SCALED,
    library.RESCALED,
    float8_sm90.CANDIDATE,
    streaming.CANDIDATE,
    wgmma_sm90.CANDIDATE,
    dequant_operand.CANDIDATE,
    dequant_tiles.CANDIDATE,
)
_ROWS = (1, LIBRARY_ROWS - 1, LIBRARY_ROWS)  # numbers of rows of A that represent a symbolic number


@dataclass(frozen=True)
class Choice:
    """The kernel for a problem, and its properties.

    kernel: the candidate's name; "by rows" where a symbolic number of rows decides it at run time. tier: "native" or
    "emulated". config: the launch configuration, None where there is nothing to configure. takes_epilogue: whether a
    kernel would apply an epilogue of this problem: this kernel, or another one that is expected to be faster than this
    kernel and a separate pointwise kernel (see `cost`).
    dequantizes_a, dequantizes_b: whether the operand, if it is quantised, is written to memory in 16 bits first; for
    "by rows": whether that is so for every number of rows.
    stores: whether the kernel writes the result; False where the graph rescales the library's result. group: a key that
    matmuls of one A must share to be one launch; None where the kernel computes one matmul.
    traceable: whether a graph can hold the launches. If not, as for "by rows", the op stays in the graph.
    """

    kernel: str
    tier: str
    config: Any = None
    takes_epilogue: bool = False
    dequantizes_a: bool = False
    dequantizes_b: bool = False
    stores: bool = True
    group: tuple | None = None
    traceable: bool = True


def choose(problem: Problem, preferred: str | None = None) -> Choice:
    """The kernel for a problem. Choices for concrete sizes are cached.

    preferred: a name of `candidates(problem)`, which is then chosen if it serves the problem. Raises ValueError for
    another name.
    """
    decide = _decided if problem.static else _decide
    return decide(problem, preferred, REGISTRY)


def _decide(problem: Problem, preferred: str | None, registry: tuple[Candidate, ...]) -> Choice:
    found = _first(problem, registry) if preferred is None else named(preferred)
    if not found.takes(problem):
        found = _first(problem, registry)
    by_rows = [] if found.any_rows else _by_rows(problem, registry)
    if by_rows:
        return Choice("by rows", found.tier, dequantizes_a=all(each.dequantizes_a for each in by_rows),
                      dequantizes_b=all(each.dequantizes_b for each in by_rows), traceable=False)  # fmt: skip
    # No candidate serves a problem only because of its epilogue: if this one still serves it, it is still the first.
    fused = problem if problem.spec.epilogue or problem.along_k else problem.with_epilogue()
    with_epilogue = found if found.takes(fused) else _first(fused, registry)
    takes_epilogue = with_epilogue.takes_epilogue(fused)
    if takes_epilogue and with_epilogue is not found:
        takes_epilogue = found.tier == with_epilogue.tier and cost.fusing_pays(problem, with_epilogue.configure(fused))
    config = found.configure(problem)
    return Choice(
        found.name, found.tier, config, takes_epilogue=takes_epilogue, dequantizes_a=found.dequantizes_a,
        dequantizes_b=found.dequantizes_b, stores=found is not library.RESCALED,
        group=None if found.group_with is None or problem.empty else found.group_with(problem),
        traceable=found.traceable(problem, config),
    )  # fmt: skip


_decided = lru_cache(maxsize=4096)(_decide)


def quantized(problem: Problem, epilogue: Epilogue, products: int = 1) -> Choice | str:
    """The choice for a matmul whose epilogue quantises its result or finds its amax, or the reason why none should.

    problem: the matmul without an epilogue. products: 2 where the epilogue computes one result from two such problems;
    an epilogue that reads a pair otherwise reads the halves of the problem's columns.
    """
    columns = problem.n // 2 if epilogue.pair and products == 1 else problem.n
    fused = replace(problem.with_epilogue(epilogue), n=columns)
    if not any(candidate.takes(fused) for candidate in REGISTRY):
        does = "finds the amax of" if epilogue.amax else "quantises"
        return f"no kernel of compute capability {problem.target.sm} {does} its result"
    choice, alone = choose(fused), choose(problem)
    if not cost.quantizing_pays(fused, choice.config, problem, alone.config, products):
        return f"{alone.kernel} and a quantiser are expected to be faster"
    return choice


def candidates(problem: Problem) -> tuple[str, ...]:
    """Names of the candidates that compute a problem on the matrix units without dequantising, best rank first.

    If there are several, timing decides; see `passes.lib.autotune`.
    """
    return tuple(each.name for each in REGISTRY if each.tier == "native" and each.takes(problem))


def to_time(problem: Problem) -> list[Choice]:
    """The choices that `max-autotune` times: every configuration of every name in `candidates`, best rank first."""
    found = []
    for name in candidates(problem):
        choice = choose(problem, preferred=name)
        if choice.takes_epilogue or not problem.spec.epilogue:
            found += [replace(choice, config=each) for each in named(name).to_time(problem)]
    return found


def named(name: str) -> Candidate:
    """The candidate of this name. Raises ValueError for an unknown name."""
    for candidate in REGISTRY:
        if candidate.name == name:
            return candidate
    raise ValueError(f"kernel: {name!r} is none of {', '.join(each.name for each in REGISTRY)}")


def _first(problem: Problem, registry: tuple[Candidate, ...]) -> Candidate:
    found = next((candidate for candidate in registry if candidate.takes(problem)), None)
    if found is None:
        does = "finds the amax of" if problem.spec.amax else "quantises"
        raise ValueError(f"epilogue: no kernel of compute capability {problem.target.sm} {does} the result")
    return found


def _by_rows(problem: Problem, registry: tuple[Candidate, ...]) -> list[Candidate]:
    """The kernels for representative numbers of rows; empty if one kernel serves all allowed numbers.

    With groups, these are few and many rows. Without groups, a number that is known to be below LIBRARY_ROWS leaves one
    kernel, and so does one that is not below it.
    """
    if not problem.ragged:
        if statically_true(problem.m < LIBRARY_ROWS) or statically_true(problem.m >= LIBRARY_ROWS):
            return []
        return [_first(replace(problem, m=rows), registry) for rows in _ROWS]
    if isinstance(problem.rows, int):
        return []
    dimension = "k" if problem.along_k else "m"
    each = [_first(replace(problem, **{dimension: rows}), registry) for rows in (1, least_rows_in_memory(problem))]
    return each if each[0] is not each[1] else []
