"""Run launches of this package in the simulator: compile them, place their tensors, execute the PTX, read the results.

    simulator = Simulator(Target(100))
    with simulator.running():
        found = quantize_kernels(x, "nvfp4", [-1], ...)  # tensors of the CPU

Every launch is executed at once, so later operations of the host see its results.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fp4compile import _compat
from fp4compile.check.simulate.memory import GlobalMemory
from fp4compile.check.simulate.parse import parse
from fp4compile.check.simulate.run import LOCKSTEP, Kernel, Schedule, Tally, run
from fp4compile.hardware import Target
from fp4compile.templates.launch import Launch, taken_by


@dataclass
class Simulator:
    """What the launches of a block took. schedule: of all launches. launches: all of them, in order.

    executed: for the PTX of each kernel, the indices of the instructions that a thread executed.
    unwritten: for tensors' storages (by their address) that nothing wrote whole, which of their bytes hold a value.
    """

    device: ClassVar[str] = "cpu"  # of the launches' tensors
    target: Target
    schedule: Schedule = LOCKSTEP
    launches: list[Launch] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    executed: dict[str, set[int]] = field(default_factory=dict)
    unwritten: dict[int, np.ndarray] = field(default_factory=dict)

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this lasts, every launch of this package is executed here, as if its tensors were on `target`."""
        with taken_by(self.target, self.launch), _Unwritten(self):
            yield

    def launch(self, launch: Launch) -> None:
        """Execute a launch. Raises Fault for a defect of the kernel, UnknownForm for an unknown instruction."""
        self.launches.append(launch)
        self.execute(self.compiled(launch), _passed(launch), max(int(launch.grid), 1))

    def execute(self, compiled: "Compiled", values: Sequence[Any], grid: int | tuple[int, int, int]) -> None:
        """Execute a compiled kernel. values: its parameters in order, tensors and numbers. grid: see `run.run`."""
        started = time.perf_counter()
        memory = GlobalMemory()
        placed: dict[int, tuple[int, np.ndarray]] = {}
        arguments = [self._argument(value, memory, placed) for value in values]
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        arguments += [compiled.scratch(memory, x * y * z), 0]
        tally = run(compiled.kernel, memory, arguments, (x * compiled.kernel.program.cluster, y, z), compiled.shared,
                    self.schedule)  # fmt: skip
        for key, (address, content) in placed.items():
            content[:] = memory.read(address, len(content))
            self._keep(key, memory.written_at(address, len(content)))
        self.tally.instructions += tally.instructions
        self.tally.opcodes += tally.opcodes
        self.tally.notes += tally.notes
        self.executed.setdefault(compiled.ptx, set()).update(tally.executed)
        self.seconds += time.perf_counter() - started

    def compiled(self, launch: Launch) -> "Compiled":
        """The compiled kernel of a launch."""
        return _compiled(launch, self.target.sm)

    def _argument(self, value: Any, memory: GlobalMemory, placed: dict[int, tuple[int, np.ndarray]]) -> int:
        """A parameter. A tensor's storage is copied to global memory at the first use."""
        if not isinstance(value, torch.Tensor):
            return int(value)
        content = _bytes(value)
        key = value.untyped_storage().data_ptr()
        if key not in placed:
            address = memory.allocate(len(content), content)
            if key in self.unwritten:
                memory.set_written(address, self.unwritten[key])
            placed[key] = address, content
        return placed[key][0] + value.storage_offset() * value.element_size()

    def _keep(self, key: int, written: np.ndarray) -> None:
        if written.all():
            self.unwritten.pop(key, None)
        else:
            self.unwritten[key] = written


UNWRITTEN = 0xEE  # every byte of new memory


class _Unwritten(TorchDispatchMode):
    """Notes which tensors `torch.empty` and its kin make, and which of them PyTorch writes afterwards."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__()
        self.simulator = simulator

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        unwritten = self.simulator.unwritten
        if func.overloadpacket in _EMPTIES:
            storage = result.untyped_storage()
            if storage.nbytes():
                unwritten[storage.data_ptr()] = np.zeros(storage.nbytes(), bool)
                _bytes(result)[:] = UNWRITTEN  # an earlier tensor may have left the right values there
            return result
        if func._schema.is_mutable:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            for one in func._schema.arguments:
                value = given.get(one.name)
                if one.alias_info is not None and one.alias_info.is_write and isinstance(value, torch.Tensor):
                    unwritten.pop(value.untyped_storage().data_ptr(), None)
        elif isinstance(result, torch.Tensor):
            key = result.untyped_storage().data_ptr()
            given_keys = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            if key not in given_keys:  # a new tensor, maybe in memory that was used before
                unwritten.pop(key, None)
        return result


_EMPTIES = {torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.new_empty,
            torch.ops.aten.new_empty_strided, torch.ops.aten.empty_like}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    ptx: the text that `kernel` was parsed from. shared: bytes of dynamic shared memory of a program. scratch_bytes,
    scratch_align: a program's global memory, and what its address is a multiple of.
    """

    ptx: str = field(repr=False)
    kernel: Kernel
    shared: int
    scratch_bytes: int
    scratch_align: int

    def scratch(self, memory: GlobalMemory, grid: int) -> int:
        """The address of the memory that Triton would allocate for a launch; 0 for none."""
        if not self.scratch_bytes:
            return 0
        nbytes = -(-self.scratch_bytes // self.scratch_align) * self.scratch_align
        return memory.allocate(nbytes * grid * self.kernel.program.cluster)


_known: dict[Any, Compiled] = {}


def _compiled(launch: Launch, sm: int) -> Compiled:
    """The kernel of a launch, compiled once for each specialisation."""
    passed = tuple((name, str(value.dtype) if isinstance(value, torch.Tensor) else _specialised(value))
                   for name, value in launch.args.items())  # fmt: skip
    key = (launch.kernel, sm, launch.num_warps, launch.num_stages, launch.num_ctas, passed,
           tuple(sorted(launch.constants.items())))  # fmt: skip
    if key not in _known:
        made = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, sm,
                                     launch.num_stages, launch.num_ctas)  # fmt: skip
        _known[key] = compiled_of(made.asm["ptx"], made.metadata)
    return _known[key]


def compiled_of(ptx: str, metadata: Any) -> Compiled:
    """What the simulator needs of a kernel's PTX and of Triton's metadata."""
    return Compiled(ptx, Kernel.of(parse(ptx)), metadata.shared, metadata.global_scratch_size or 0,
                    metadata.global_scratch_align or 1)  # fmt: skip


def _specialised(value: Any) -> Any:
    """What the code of a kernel depends on, of a number or None; see `_compat.compile_ahead`."""
    if not isinstance(value, int) or value == 1:
        return value
    return (value % 16 == 0, abs(value) < 2**31)


def _passed(launch: Launch) -> list[Any]:
    """The arguments that are parameters of the compiled kernel."""
    return [value for name in launch.kernel.arg_names
            if name not in launch.constants and (value := launch.args.get(name)) is not None
            and not (isinstance(value, int) and value == 1)]  # fmt: skip


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor's storage, which share its memory."""
    with _disable_current_modes():  # `set_` writes nothing
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
