"""Launching a kernel: at once, as a node of a graph that is being traced, or not at all (`dry_run`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fp4compile import _compat
from fp4compile.targets import Target


@dataclass(frozen=True)
class Launched:
    """A kernel launch that `dry_run` has collected.

    kernel: the Triton function. args: its arguments by name. constants: its constexpr arguments by name. num_warps: of
    a program. grid: the number of programs, an int or a symbolic one.
    """

    kernel: Any
    args: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    grid: int | torch.SymInt


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


def target_of(device: torch.device) -> Target:
    """The target of a CUDA device; within `dry_run` its target, and Triton's interpreter where Triton interprets."""
    collecting = _collecting.get()
    if collecting is not None:
        return collecting[0]
    return Target(0) if _compat.interpreting() else _cuda_target(device.index)


@cache
def _cuda_target(index: int | None) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    return Target(10 * major + minor)


def launch(kernel: Any, grid: int | torch.SymInt, *args: Any, num_warps: int, **constants: Any) -> None:
    """Launch a Triton kernel.

    grid: how many programs run; one where it is 0, because no grid is empty. A program beyond the tensors writes
        nothing.
    args: the kernel's first arguments, by position. num_warps: of a program. constants: its constexpr arguments.

    A kernel whose constant PDL is set is launched as `device.dependent_launch` says.
    """
    collecting = _collecting.get()
    if collecting is not None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        collecting[1].append(Launched(kernel, named, constants, num_warps, grid))
        return
    grid = max(grid, 1) if isinstance(grid, int) else torch.sym_max(grid, 1)
    options: dict[str, Any] = {"num_warps": num_warps}
    if _compat.tracing():
        kernel = _compat.traceable(kernel)
    elif constants.get("PDL"):
        options["launch_pdl"] = True
    kernel[(grid,)](*args, **constants, **options)
