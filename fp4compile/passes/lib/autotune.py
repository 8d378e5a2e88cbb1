"""Under `mode="max-autotune"`, choose the kernel of a matmul and its configuration by timing.

Entry: `fastest(product)`, for a matmul node that is about to be lowered. Every candidate that multiplies on the matrix
units without dequantising runs in each of its configurations, on tensors like the matmul's own, and the fastest is
taken. Equal problems are timed once in a process. Without that mode, or where no candidate could be timed, rank
decides. Group sizes are unknown at compile time, so groups are timed with equal sizes.

The candidates are timed in turns, because the GPU's clock falls under load. Each time is the replay of a CUDA graph: it
excludes the host's time, and a call of cuBLASLt counts with all its kernels. The calls of a graph use copies of the
operands that together exceed the L2 cache, since a model's weights come from memory.

A graph that was compiled with this mode goes into Inductor's cache on disk like any other. Its key has the mode, the
name of the GPU and the versions of torch and Triton (`FxGraphHashDetails`), and the source of this package
(`LowerPasses.uuid`), so that the choice is reused only under the conditions of its timing.
"""

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fp4compile import _compat
from fp4compile.formats.formats import as_integers
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.nodes import ScaledMM
from fp4compile.templates.choose import Choice, to_time
from fp4compile.templates.multiply import results

log = logging.getLogger("fp4compile")

REPLAYS = 20  # of each CUDA graph; the median counts
FEWEST_CALLS, MOST_CALLS = 4, 16  # of a CUDA graph
_winners: dict[tuple, Choice | None] = {}


def fastest(product: ScaledMM) -> Choice | None:
    """The choice for a matmul: the fastest where there are several to time; None where no kernel is chosen."""
    timed = _compat.times_products() and torch.cuda.is_available()
    if product.spec.plain or not timed or not product.problem.static or product.problem.empty:
        return product.choice
    choices = to_time(product.problem)
    if len(choices) < 2:
        return product.choice
    values = product.values()
    of_operands = values.a.data, values.a.scales, values.b.data, values.b.scales
    key = product.problem, *map(_layout, (*of_operands, *values.auxiliaries))
    if key not in _winners:
        _winners[key] = _fastest(values, choices)
    return _winners[key] or product.choice


def _fastest(product: Arguments, choices: list[Choice]) -> Choice | None:
    """The fastest of the choices; None where nothing could be timed."""
    try:
        with unset_fake_temporarily(), torch.no_grad():
            copies = _copies(product)
            times = _times([[partial(results, copy, choice=choice) for copy in copies] for choice in choices])
    except torch.OutOfMemoryError as error:
        log.info("not timed: %s", error)
        return None
    for choice, time in zip(choices, times, strict=True):
        log.info("matmul %s x %s: %s, %s: %s us", tuple(product.a.data.shape), tuple(product.b.data.shape),
                 choice.kernel, choice.config, time)  # fmt: skip
    best = min(range(len(choices)), key=times.__getitem__)
    return choices[best] if times[best] < float("inf") else None


def _layout(value: torch.Tensor | None) -> tuple:
    return () if value is None else (value.device, value.dtype, tuple(value.shape), tuple(value.stride()))


def _copies(x: Arguments) -> list[Arguments]:
    """One copy of the arguments for each call of a CUDA graph."""
    return [_copy(x) for _ in range(_calls(x.a, x.b))]


def _copy(x: Arguments) -> Arguments:
    """Real tensors with the arguments' sizes and dtypes. Sizes of groups differ by at most one row."""
    offs = None
    if x.offs is not None:
        groups = x.offs.shape[0]
        rows = x.a.data.shape[0] if x.rows is None else x.rows
        ends = [(g + 1) * rows // groups for g in range(groups)]
        offs = torch.tensor(ends, dtype=torch.int32, device=x.offs.device)
    return replace(x, a=_operand_like(x.a), b=_operand_like(x.b), bias=_like(x.bias), offs=offs,
                   auxiliaries=list(map(_like, x.auxiliaries)), result_outer=_like(x.result_outer))  # fmt: skip


def _calls(a: Operand, b: Operand) -> int:
    """The number of calls in a CUDA graph."""
    size = sum(x.numel() * x.element_size() for x in (a.data, a.scales, b.data, b.scales) if x is not None)
    cache = torch.cuda.get_device_properties(a.data.device).L2_cache_size
    return min(max(2 * cache // size, FEWEST_CALLS), MOST_CALLS)


def _operand_like(x: Operand) -> Operand:
    """An operand with the shapes and dtypes of `x`: any codes or random numbers, block scales of 1."""
    scales = None if x.scales is None else _empty_like(x.scales)
    if scales is not None:
        bits_of_one = {torch.float8_e4m3fn: 0x38, torch.float8_e8m0fnu: 127, torch.float32: 0x3F800000}
        as_integers(scales).fill_(bits_of_one[scales.dtype])
    return Operand(_like(x.data), scales, _like(x.outer), x.format)


def _like(value: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of random contents with the layout and dtype of `value`, to be timed: codes without NaN, or numbers."""
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


def _times(sequences: list[list[Callable[[], Any]]]) -> list[float]:
    """Microseconds a call, for each sequence of calls; infinite for a sequence that fails on this machine."""
    graphs = [_captured(calls) for calls in sequences]
    rounds = [[replay_time(graph) for graph in graphs] for _ in range(REPLAYS)]
    return [statistics.median(times) / len(calls) for *times, calls in zip(*rounds, sequences, strict=True)]


def _captured(calls: list[Callable[[], Any]]) -> Any:
    """A CUDA graph of the calls; None where one fails.

    A kernel can need more registers or shared memory than the GPU has, or not compile in this version of Triton; the
    library can refuse its arguments. Every call first runs once on the capture's stream, which compiles the kernels and
    allocates the library's workspace.
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
    except _compat.launch_errors() as error:
        log.info("not timed: %s: %s", type(error).__name__, error)
        return None
    graph.replay()
    return graph


def replay_time(graph: Any) -> float:
    """Microseconds of a CUDA graph's replay; infinite where there is no graph."""
    if graph is None:
        return float("inf")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)
