"""Under `mode="max-autotune"`, let time decide which kernel computes a product, and in which configuration.

Entry: `fastest(product)`, for a `scaled_mm` or `scaled_mm_epilogue` node that is about to be lowered, and
`fastest_grouped(node)` for a `scaled_grouped_mm` node. Every candidate that computes all of the product on the matrix
units as it is runs in each of its configurations, on tensors like the product's own, and the fastest is taken. Equal
problems are timed once in a process. Without that mode, or where no candidate could be timed, the choice is that of
rank. What sizes groups will have is not known: they are timed with equal ones.

What is timed is the replay of CUDA graphs, in turns, because the GPU's clock falls under load: so the host's time is no
part of it, and a call of cuBLASLt counts with all its kernels. The calls of a graph have copies of the operands, more
than the L2 cache holds, since a model's weights come from memory.

A graph that was compiled with this mode goes into Inductor's cache on disk like any other. Its key has the mode, the
name of the GPU and the versions of torch and Triton (`FxGraphHashDetails`), and the source of this package
(`LowerPasses.uuid`), so that the choice is used again only where it would have been timed under the same conditions.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Node

from fp4compile import _compat
from fp4compile.analysis.graph import ScaledMM, grouped_problem, grouped_values
from fp4compile.formats.operand import Operand
from fp4compile.templates.gemm.choose import Choice, candidates, choose, named
from fp4compile.templates.gemm.dispatch import scaled_mm
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.grouped.choose import GroupedChoice, to_time
from fp4compile.templates.grouped.dispatch import scaled_grouped_mm

log = logging.getLogger("fp4compile")

REPLAYS = 20  # of each CUDA graph; the median counts
FEWEST_CALLS, MOST_CALLS = 4, 16  # of a CUDA graph
_winners: dict[tuple, Choice | GroupedChoice | None] = {}

Call = Callable[[], torch.Tensor]


def fastest(product: ScaledMM) -> Choice | None:
    """The choice for a product: the fastest where there are several to time; None for two plain operands."""
    if product.plain:
        return None
    problem = product.problem()
    found = None
    if _asked_for() and _static(problem.m, problem.n, problem.k, problem.batches):
        a, b, _ = product.values()
        others = product.epilogue, *map(_layout, product.auxiliary_values())
        found = _winner(problem, a, b, others, _choices(problem), scaled_mm, lambda: _copies(product, problem))
    return found or choose(problem)


def fastest_grouped(node: Node) -> GroupedChoice | None:
    """The fastest for a product of groups; None where there are not several to time: rank decides."""
    problem = grouped_problem(node)
    if not _asked_for() or not _static(problem.rows, problem.m, problem.n, problem.k) or problem.empty:
        return None
    a, b, others = grouped_values(node)
    return _winner(problem, a, b, (), to_time(problem), scaled_grouped_mm, lambda: _grouped_copies(a, b, *others))


def _asked_for() -> bool:
    return _compat.times_products() and torch.cuda.is_available()


def _choices(problem: Problem) -> list[Choice]:
    """Every candidate in every configuration between which time decides."""
    found = []
    for name in candidates(problem):
        choice = choose(problem, preferred=name)
        if choice.takes_epilogue or not problem.epilogue:
            found += [replace(choice, config=each) for each in named(name).to_time(problem)]
    return found


def _winner(
    problem: Any, a: Operand, b: Operand, others: tuple, choices: list, product: Callable, copies: Callable[[], list]
) -> Any:
    """The fastest of the choices, timed once for problems that take the same time; None where nothing was timed.

    others: hashable, what such problems have in common beside operands of the same layout. product: is called with the
    arguments that `copies` makes and a choice.
    """
    if len(choices) < 2:
        return None
    key = problem, *others, *map(_layout, (a.data, a.scales, b.data, b.scales))
    if key not in _winners:
        _winners[key] = _fastest(f"{tuple(a.data.shape)} x {tuple(b.data.shape)}", choices, product, copies)
    return _winners[key]


def _fastest(shapes: str, choices: list, product: Callable, copies: Callable[[], list]) -> Any:
    try:
        with unset_fake_temporarily(), torch.no_grad():
            made = copies()
            times = _times([[partial(product, *copy, choice=choice) for copy in made] for choice in choices])
    except torch.OutOfMemoryError as error:
        log.info("not timed: %s", error)
        return None
    for choice, time in zip(choices, times, strict=True):
        log.info("product %s: %s, %s: %s us", shapes, choice.kernel, choice.config, time)
    best = min(range(len(choices)), key=times.__getitem__)
    return choices[best] if times[best] < float("inf") else None


def _static(*sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _layout(value: torch.Tensor | None) -> tuple:
    return () if value is None else (value.device, value.dtype, tuple(value.shape), tuple(value.stride()))


def _copies(product: ScaledMM, problem: Problem) -> list[tuple]:
    """The arguments of `scaled_mm` up to the choice, on real tensors, as often as a CUDA graph has calls."""
    a, b, bias = product.values()
    return [
        (_operand_like(a), _operand_like(b), _like(bias), problem.out_dtype, product.epilogue,
         [_like(x) for x in product.auxiliary_values()])
        for _ in range(_calls(a, b))
    ]  # fmt: skip


def _grouped_copies(a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype) -> list[tuple]:
    """The same of `scaled_grouped_mm`. The groups are as large as each other, within a row."""
    groups = offs.shape[0]
    even = torch.tensor([(g + 1) * rows // groups for g in range(groups)], dtype=torch.int32, device=offs.device)
    return [(_operand_like(a), _operand_like(b), even, rows, out_dtype) for _ in range(_calls(a, b))]


def _calls(a: Operand, b: Operand) -> int:
    """How many calls a CUDA graph has."""
    size = sum(x.numel() * x.element_size() for x in (a.data, a.scales, b.data, b.scales) if x is not None)
    cache = torch.cuda.get_device_properties(a.data.device).L2_cache_size
    return min(max(2 * cache // size, FEWEST_CALLS), MOST_CALLS)


def _operand_like(x: Operand) -> Operand:
    """An operand of that size and kind: any codes or random numbers, block scales of 1."""
    scales = None if x.scales is None else _empty_like(x.scales)
    if scales is not None:
        scales.view(torch.uint8).fill_(0x38 if scales.dtype == torch.float8_e4m3fn else 127)
    return Operand(_like(x.data), scales, _like(x.outer), x.format)


def _like(value: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of that size and kind: any codes, or random numbers."""
    if value is None:
        return None
    made = _empty_like(value)
    if value.dtype.itemsize == 1:
        made.view(torch.uint8).random_(0, 127)  # no NaN of any format
    else:
        made.normal_()
    return made


def _empty_like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _times(sequences: list[list[Call]]) -> list[float]:
    """Microseconds a call of each sequence of calls; infinite of one that this machine cannot make."""
    graphs = [_captured(calls) for calls in sequences]
    rounds = [[_replay(graph) for graph in graphs] for _ in range(REPLAYS)]
    return [statistics.median(times) / len(calls) for *times, calls in zip(*rounds, sequences, strict=True)]


def _captured(calls: list[Call]) -> Any:
    """A CUDA graph of the calls; None where one fails.

    A kernel can need more registers or shared memory than there are, or not compile in this version of Triton; the
    library can refuse what torch passes on to it. Every call runs once before, on the stream of the capture: kernels
    are compiled and the library's workspace is allocated then.
    """
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for call in calls:
                call()
    except _compat.LAUNCH_ERRORS as error:
        log.info("not timed: %s: %s", type(error).__name__, error)
        return None
    graph.replay()
    return graph


def _replay(graph: Any) -> float:
    """Microseconds of a replay."""
    if graph is None:
        return float("inf")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
