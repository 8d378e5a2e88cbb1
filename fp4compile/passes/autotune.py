"""Under `mode="max-autotune"`, let time decide which kernel computes a product, and in which configuration.

Entry: `fastest(product)`, for a `scaled_mm` or `scaled_mm_epilogue` node that is about to be lowered. Every candidate
that computes all of the product on the matrix units as it is runs in each of its configurations, on tensors like the
product's own, and the fastest is taken. Equal problems are timed once in a process. Without that mode, or where no
candidate could be timed, the choice is that of rank.

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
from torch._inductor import config
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fp4compile import _compat
from fp4compile.operand import Operand
from fp4compile.passes.graph import ScaledMM
from fp4compile.templates.gemm.choose import Choice, candidates, choose, named
from fp4compile.templates.gemm.dispatch import scaled_mm
from fp4compile.templates.gemm.problem import Problem

log = logging.getLogger("fp4compile")

REPLAYS = 20  # of each CUDA graph; the median counts
FEWEST_CALLS, MOST_CALLS = 4, 16  # of a CUDA graph
_winners: dict[tuple, Choice] = {}

Call = Callable[[], torch.Tensor]


def fastest(product: ScaledMM) -> Choice | None:
    """The choice for a product: the fastest where there are several to time; None for two plain operands."""
    if product.plain:
        return None
    problem = product.problem()
    if not (config.max_autotune or config.max_autotune_gemm) or not torch.cuda.is_available() or not _static(problem):
        return choose(problem)
    choices = _choices(problem)
    if len(choices) < 2:
        return choose(problem)
    key = _key(product, problem)
    if key not in _winners:
        _winners[key] = _fastest(product, problem, choices)
    return _winners[key]


def _choices(problem: Problem) -> list[Choice]:
    """Every candidate in every configuration between which time decides."""
    found = []
    for name in candidates(problem):
        choice = choose(problem, preferred=name)
        if choice.takes_epilogue or not problem.epilogue:
            found += [replace(choice, config=each) for each in named(name).to_time(problem)]
    return found


def _fastest(product: ScaledMM, problem: Problem, choices: list[Choice]) -> Choice:
    try:
        with unset_fake_temporarily(), torch.no_grad():
            copies = _copies(product, problem)
            times = _times([[partial(scaled_mm, *copy, choice=choice) for copy in copies] for choice in choices])
    except torch.OutOfMemoryError as error:
        log.info("not timed: %s", error)
        return choose(problem)
    for choice, time in zip(choices, times, strict=True):
        log.info("product %s x %s: %s, %s: %s us", *_shapes(product), choice.kernel, choice.config, time)
    best = min(range(len(choices)), key=times.__getitem__)
    return choices[best] if times[best] < float("inf") else choose(problem)


def _static(problem: Problem) -> bool:
    return all(isinstance(size, int) for size in (problem.m, problem.n, problem.k, problem.batches))


def _key(product: ScaledMM, problem: Problem) -> tuple:
    """Equal for products that take the same time."""
    a, b, _ = product.values()
    layouts = [_layout(x) for x in (a.data, a.scales, b.data, b.scales)]
    return problem, product.epilogue, *layouts, *map(_layout, product.auxiliary_values())


def _layout(value: torch.Tensor | None) -> tuple:
    return () if value is None else (value.device, value.dtype, tuple(value.shape), tuple(value.stride()))


def _shapes(product: ScaledMM) -> tuple:
    a, b, _ = product.values()
    return tuple(a.data.shape), tuple(b.data.shape)


def _copies(product: ScaledMM, problem: Problem) -> list[tuple]:
    """The arguments of `scaled_mm` up to the choice, on real tensors, as often as a CUDA graph has calls."""
    a, b, bias = product.values()
    size = sum(x.numel() * x.element_size() for x in (a.data, a.scales, b.data, b.scales) if x is not None)
    cache = torch.cuda.get_device_properties(a.data.device).L2_cache_size
    return [
        (*(Operand(*map(_like, (x.data, x.scales, x.outer)), x.format) for x in (a, b)), _like(bias),
         problem.out_dtype, product.epilogue, [_like(x) for x in product.auxiliary_values()])
        for _ in range(min(max(2 * cache // size, FEWEST_CALLS), MOST_CALLS))
    ]  # fmt: skip


def _like(value: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of that size and kind: any codes, scales of 1, or random numbers."""
    if value is None:
        return None
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) and value.dim() == 1:  # swizzled scales
        made.view(torch.uint8).fill_(0x38 if value.dtype == torch.float8_e4m3fn else 127)
    elif value.dtype.itemsize == 1:
        made.view(torch.uint8).random_(0, 127)  # no NaN of any format
    else:
        made.normal_()
    return made


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
