"""Launches of kernels as data: run eagerly, traced into a graph, or passed to a function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from fp4compile import _compat
from fp4compile.hardware import Target
from fp4compile.templates.view import View

DEFAULT_STAGES = 3  # Triton's own


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of a Triton kernel, as data.

    kernel: the Triton function. grid: the number of programs, an int or a SymInt. For 0 one program runs, because a
        grid cannot be empty; it is out of bounds and writes nothing.
    arguments: the kernel's first arguments, by position: a `View` or a tensor for a pointer, numbers, None.
    constants: its constexpr arguments by name. num_warps: warps of a program. num_stages: stages of Triton's software
        pipeline, for kernels whose loops do not set it. num_ctas: CTAs of a program, which form a cluster.

    A kernel whose constant PDL is set starts early (`device.dependent_launch`). A kernel whose constant TMA is set,
    or that is written in Gluon, makes descriptors in memory that Triton allocates at the launch.
    """

    kernel: Any
    grid: int | torch.SymInt
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = DEFAULT_STAGES
    num_ctas: int = 1

    @property
    def args(self) -> dict[str, Any]:
        """The arguments by name, with tensors in place of views."""
        return dict(zip(self.kernel.arg_names, self._values, strict=False))

    @property
    def _values(self) -> list[Any]:
        return [each.tensor if isinstance(each, View) else each for each in self.arguments]

    def run(self) -> None:
        """Launch the kernel, eagerly or as a node of the traced graph; within `taken_by`, pass it on."""
        taking = _taking.get()
        if taking is not None:
            taking[1](self)
            return
        grid = max(self.grid, 1) if isinstance(self.grid, int) else torch.sym_max(self.grid, 1)
        kernel, values = self.kernel, self._values
        options: dict[str, Any] = {"num_warps": self.num_warps}
        if self.num_stages != DEFAULT_STAGES:
            options["num_stages"] = self.num_stages
        if self.num_ctas != 1:
            options["num_ctas"] = self.num_ctas
        if _compat.tracing():
            kernel = torch.library.wrap_triton(kernel)  # traces the launch as a node that Inductor supports
            kernel[(grid,)](*values, **self.constants, **options)
            return
        if self.constants.get("PDL"):
            options["launch_pdl"] = True
        descriptors = self.constants.get("TMA") or _compat.in_gluon(kernel)
        with _compat.scratch_memory(values[0].device) if descriptors else nullcontext():
            _run(kernel, grid, values, self.constants, options)


@dataclass(frozen=True)
class LaunchConfig:
    """A launch configuration. Fields have the names of the kernel's constexpr arguments in lower case.

    host: names of the fields that are not arguments of the kernel.
    """

    host: ClassVar[tuple[str, ...]] = ("num_warps",)

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constexpr arguments by name."""
        return {each.name.upper(): int(getattr(self, each.name)) for each in fields(self) if each.name not in self.host}


# Kernels that were launched, as Triton compiled them, with their constexpr arguments: by all that they depend on.
_compiled: dict[tuple, tuple[Any, tuple, Any]] = {}
_MOST_COMPILED = 4096


def _run(kernel: Any, grid: int, values: list[Any], constants: dict[str, Any], options: dict[str, Any]) -> None:
    """Launch a kernel; from the second time on, without Triton's own search for what it has compiled.

    The search takes 40 to 130 us on the host of an H200, for 10 and 30 arguments, and a training step of experts in FP8
    has twelve such launches. Triton distinguishes dtypes, addresses that are multiples of 16 bytes, and of numbers 1,
    multiples of 16 and long ones; here every number has an entry of its own.
    """
    if _compat.interpreting():
        kernel[(grid,)](*values, **constants, **options)
        return
    key = (id(kernel), torch.cuda.current_device(), *map(_specialised, values), *constants.items(), *options.items())
    found = _compiled.get(key)
    if found is not None:
        compiled, constexprs, _ = found
        compiled[(grid, 1, 1)](*values, *constexprs)
        return
    compiled = kernel[(grid,)](*values, **constants, **options)
    if len(_compiled) >= _MOST_COMPILED:
        _compiled.clear()
    constexprs = tuple(constants[name] for name in kernel.arg_names[len(values) :])
    _compiled[key] = compiled, constexprs, kernel  # which stays, so that no other one gets its id


def _specialised(value: Any) -> Any:
    """What a compiled kernel depends on of an argument."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return value if type(value) is int else (type(value), value)


_known_targets: dict[int, Target] = {}  # by the GPU's index
# The target of all tensors, and the function that takes launches in place of a GPU.
_taking: ContextVar[tuple[Target, Callable[[Launch], None]] | None] = ContextVar("taking", default=None)


@contextmanager
def taken_by(target: Target, take: Callable[[Launch], None]) -> Iterator[None]:
    """A context in which `take` gets each launch instead of a GPU, as if every tensor were on `target`."""
    token = _taking.set((target, take))
    try:
        yield
    finally:
        _taking.reset(token)


@contextmanager
def dry_run(target: Target) -> Iterator[list[Launch]]:
    """A context that collects launches instead of running them, as if every tensor were on `target`.

    Tensors may be meta tensors. Yields the list that the launches are appended to.
    """
    launches: list[Launch] = []
    with taken_by(target, launches.append):
        yield launches


def on_gpu(x: torch.Tensor) -> bool:
    """Whether kernels are launched for a tensor: it lies on a GPU, or the call is within `taken_by`."""
    return x.device.type == "cuda" or _taking.get() is not None


def target_of(device: torch.device) -> Target:
    """The target of a CUDA device. Within `taken_by`, its target; under Triton's interpreter, Target(0)."""
    taking = _taking.get()
    if taking is not None:
        return taking[0]
    if _compat.interpreting():
        return Target(0)
    return cuda_target(torch.cuda.current_device() if device.index is None else device.index)


def cuda_target(index: int) -> Target:
    """The target of the GPU of this index, with its compute capability and number of multiprocessors."""
    if index not in _known_targets:
        found = torch.cuda.get_device_properties(index)
        _known_targets[index] = Target(10 * found.major + found.minor, found.multi_processor_count)
    return _known_targets[index]


def launch(
    kernel: Any,
    grid: int | torch.SymInt,
    *arguments: Any,
    num_warps: int,
    num_stages: int = DEFAULT_STAGES,
    **constants: Any,
) -> None:
    """Make a `Launch` and run it."""
    Launch(kernel, grid, arguments, constants, num_warps, num_stages).run()
