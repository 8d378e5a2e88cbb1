"""Launching a kernel: eagerly, as a node of a graph, or only on paper."""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from fp4compile import _compat
from fp4compile.targets import Target


@dataclass(frozen=True)
class Launched:
    """A kernel launch as it was asked for: arguments and constants by name."""

    kernel: object
    args: dict
    constants: dict
    num_warps: int
    programs: object  # an int, or a symbolic one


_paper: ContextVar[tuple[Target, list[Launched]] | None] = ContextVar("paper", default=None)


@contextmanager
def dry_run(target: Target):
    """Collect launches instead of running them, as if every tensor were on `target`; tensors may be meta tensors."""
    launches: list[Launched] = []
    token = _paper.set((target, launches))
    try:
        yield launches
    finally:
        _paper.reset(token)


def target_of(device: torch.device) -> Target:
    """The target of a device; the interpreter's where Triton interprets."""
    paper = _paper.get()
    if paper is not None:
        return paper[0]
    return Target(0) if _compat.interpreting() else _cuda_target(device.index)


@cache
def _cuda_target(index: int | None) -> Target:
    major, minor = torch.cuda.get_device_capability(index)
    return Target(10 * major + minor)


def launch(kernel, programs, *args, num_warps: int, **constants) -> None:
    """Launch `programs` programs of a Triton kernel; at least one, which beyond the tensors writes nothing.

    A kernel with the constant PDL set is launched as `device.dependent_launch` says.
    """
    paper = _paper.get()
    if paper is not None:
        named = dict(zip(kernel.arg_names, args, strict=False))
        paper[1].append(Launched(kernel, named, constants, num_warps, programs))
        return
    programs = max(programs, 1) if isinstance(programs, int) else torch.sym_max(programs, 1)
    options = {"num_warps": num_warps}
    if _compat.tracing():
        kernel = _compat.traceable(kernel)
    elif constants.get("PDL"):
        options["launch_pdl"] = True
    kernel[(programs,)](*args, **constants, **options)
