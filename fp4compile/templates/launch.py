"""Launching a kernel: at once, as a node of a graph that is being traced, or not at all (`dry_run`)."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from fp4compile import _compat
from fp4compile.hardware import Target

DEFAULT_STAGES = 3  # Triton's own


@dataclass(frozen=True)
class Launched:
    """A kernel launch that `dry_run` has collected.

    kernel: the Triton function. args: its arguments by name. constants: its constexpr arguments by name. num_warps: of
    a program. grid: the number of programs, an int or a symbolic one. num_stages: of Triton's software pipeline.
    """

    kernel: Any
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    grid: int | torch.SymInt
    num_stages: int = DEFAULT_STAGES


_known_targets: dict[int, Target] = {}  # by the GPU's index
_collecting: ContextVar[tuple[Target, list[Launched]] | None] = ContextVar("collecting", default=None)


@contextmanager
def dry_run(target: Target) -> Iterator[list[Launched]]:
    """While this lasts, collect launches instead of running them, as if every tensor were on `target`.

    Tensors may be meta tensors. Yields the list that the launches are appended to.
    """
    launches: list[Launched] = []
    token = _collecting.set((target, launches))
    try:
        yield launches
    finally:
        _collecting.reset(token)


def on_gpu(x: torch.Tensor) -> bool:
    """Whether a tensor lies on a GPU, for which kernels are launched; within `dry_run` every tensor does."""
    return x.device.type == "cuda" or _collecting.get() is not None


def target_of(device: torch.device) -> Target:
    """The target of a CUDA device; within `dry_run` its target, and Triton's interpreter where Triton interprets."""
    collecting = _collecting.get()
    if collecting is not None:
        return collecting[0]
    if _compat.interpreting():
        return Target(0)
    return cuda_target(torch.cuda.current_device() if device.index is None else device.index)


def cuda_target(index: int) -> Target:
    """The target of a GPU that is there, with as many multiprocessors as it says that it has."""
    if index not in _known_targets:
        found = torch.cuda.get_device_properties(index)
        _known_targets[index] = Target(10 * found.major + found.minor, found.multi_processor_count)
    return _known_targets[index]


def launch(
    kernel: Any,
    grid: int | torch.SymInt,
    *args: Any,
    num_warps: int,
    num_stages: int = DEFAULT_STAGES,
    **constants: Any,
) -> None:
    """Launch a Triton kernel.

    grid: how many programs run; one where it is 0, because no grid is empty. A program beyond the tensors writes
        nothing.
    args: the kernel's first arguments, by position. num_warps: of a program. num_stages: of Triton's software pipeline,
        for kernels whose loops do not say it. constants: its constexpr arguments.

    A kernel whose constant PDL is set is launched as `device.dependent_launch` says. One whose constant TMA is set
    makes descriptors in memory that Triton asks for at the launch.
    """
    collecting = _collecting.get()
    if collecting is not None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        collecting[1].append(Launched(kernel, named, constants, num_warps, grid, num_stages))
        return
    grid = max(grid, 1) if isinstance(grid, int) else torch.sym_max(grid, 1)
    options: dict[str, Any] = {"num_warps": num_warps}
    if num_stages != DEFAULT_STAGES:
        options["num_stages"] = num_stages
    if _compat.tracing():
        kernel = _compat.traceable(kernel)
        kernel[(grid,)](*args, **constants, **options)
        return
    if constants.get("PDL"):
        options["launch_pdl"] = True
    with _compat.scratch_memory(args[0].device) if constants.get("TMA") else nullcontext():
        kernel[(grid,)](*args, **constants, **options)
