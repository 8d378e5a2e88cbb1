"""Run launches of this package in the simulator of PTX (`ptxsim`).

simulator = LaunchSimulator(Target(100))
with simulator.running():
    found = quantize_kernels(x, "nvfp4", [-1], ...)  # tensors of the CPU
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from fp4compile import _compat
from fp4compile.hardware import Target
from fp4compile.templates.launch import Launch, taken_by
from ptxsim import LOCKSTEP, Compiled, Fault, Schedule, Simulator


class LaunchSimulator(Simulator):
    """A simulator of one GPU. target: that GPU. launches: all launches so far, in order."""

    def __init__(self, target: Target, schedule: Schedule = LOCKSTEP) -> None:
        super().__init__(replace(schedule, strict_stores=True))  # none of this package's kernels has such stores
        self.target = target
        self.launches: list[Launch] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the simulator executes this package's launches, as if their tensors were on `target`."""
        with taken_by(self.target, self.take), self.watching():
            yield

    def take(self, launch: Launch) -> None:
        """Execute a launch. Raises Fault for a defect of the kernel, UnknownForm for an unknown instruction."""
        self.launches.append(launch)
        compiled = self.compiled(launch)
        if compiled.shared > self.target.shared_memory:
            raise Fault(f"{launch.kernel.__name__}: a program takes {compiled.shared} bytes of shared memory, of "
                        f"{self.target.shared_memory}")  # fmt: skip
        self.execute(compiled, _passed(launch), max(int(launch.grid), 1))

    def compiled(self, launch: Launch) -> Compiled:
        """The compiled kernel of a launch, compiled once for each specialisation."""
        passed = tuple((name, str(value.dtype) if isinstance(value, torch.Tensor) else _specialised(value))
                       for name, value in launch.args.items())  # fmt: skip
        key = (launch.kernel, self.target.sm, launch.num_warps, launch.num_stages, launch.num_ctas, passed,
               tuple(sorted(launch.constants.items())))  # fmt: skip
        if key not in _known:
            _known[key] = Compiled.of(_compat.compile_ahead(
                launch.kernel, launch.args, launch.constants, launch.num_warps, self.target.sm, launch.num_stages,
                launch.num_ctas))  # fmt: skip
        return _known[key]


_known: dict[Any, Compiled] = {}


def _specialised(value: Any) -> Any:
    """The property of a number or None that a kernel's code depends on; see `_compat.compile_ahead`."""
    if not isinstance(value, int) or value == 1:
        return value
    return (value % 16 == 0, abs(value) < 2**31)


def _passed(launch: Launch) -> list[Any]:
    """The arguments that are parameters of the compiled kernel."""
    return [value for name in launch.kernel.arg_names
            if name not in launch.constants and (value := launch.args.get(name)) is not None
            and not (isinstance(value, int) and value == 1)]  # fmt: skip
