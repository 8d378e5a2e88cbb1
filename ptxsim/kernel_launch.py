"""Run compiled kernels of Triton in the simulator: place their tensors, execute the PTX, read the results.

    simulator = Simulator()
    simulator.launch(triton.compile(...), [x, y, 1000], grid=8)  # x, y: tensors of the CPU

A launch is executed synchronously, so later operations of the host read its results.
"""

import operator
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ptxsim.global_memory import GlobalMemory
from ptxsim.parse import Parameter, parse
from ptxsim.run import LOCKSTEP, Kernel, Schedule, Tally, run
from ptxsim.tensor_maps import HostMap

Grid = int | tuple[int, int, int]  # the number of programs of a launch, or their numbers in x, y and z


@dataclass
class Simulator:
    """A GPU that executes PTX on the CPU, and totals of its launches.

    schedule: of all launches. executed: for the PTX of each kernel, the indices of the instructions that a thread
    executed. unwritten: for tensors' storages (by address) that were not written completely, whether each byte was;
    filled within `watching`.
    """

    device: ClassVar[str] = "cpu"  # of the launches' tensors
    schedule: Schedule = LOCKSTEP
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    executed: dict[str, set[int]] = field(default_factory=dict)
    unwritten: dict[int, np.ndarray] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which contents of new `torch.empty` count as unwritten: a kernel that reads them is a fault."""
        with _Unwritten(self):
            yield

    def launch(self, kernel: Any, values: Sequence[Any], grid: Grid) -> None:
        """Execute a kernel that `triton.compile` returned for a GPU with CUDA.

        values: its arguments in order, tensors of the CPU and numbers, without those that are constants of the
        compilation.

        Raises Fault for a defect of the kernel, UnknownForm for an unknown instruction.
        """
        self.execute(Compiled.of(kernel), values, grid)

    def execute(self, compiled: "Compiled", values: Sequence[Any], grid: Grid) -> None:
        """`launch` of a kernel that `Compiled.of` has parsed; several launches share the parsed kernel."""
        started = time.perf_counter()
        memory = GlobalMemory()
        placed: dict[int, tuple[int, np.ndarray]] = {}
        parameters = compiled.kernel.program.parameters
        arguments = [self._argument(*each, memory, placed) for each in zip(values, parameters, strict=False)]
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        if len(parameters) > len(arguments):  # Triton adds global scratch memory, and that of a profiler
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

    def _argument(
        self, value: Any, parameter: Parameter, memory: GlobalMemory, placed: dict[int, tuple[int, np.ndarray]]
    ) -> int:
        """The parameter for an argument. A tensor's storage is copied to global memory at the first use."""
        if isinstance(value, Apart):
            rows = value.tensor.view(torch.uint8).numpy()
            homes = [memory.allocate(row.nbytes, row) for row in rows]
            placed |= {row.ctypes.data: each for row, each in zip(rows, zip(homes, rows, strict=True), strict=True)}
            return memory.apart(homes, rows.shape[1], value.stride)
        if isinstance(value, HostMap):
            return value.bits(self._argument(value.tensor, parameter, memory, placed))
        if not isinstance(value, torch.Tensor):
            return _bits(value, parameter)
        content = _bytes(value)
        key = value.untyped_storage().data_ptr()
        if key not in placed:
            address = memory.allocate(len(content), content, key % 16)  # aligned as the tensor is
            if key in self.unwritten:
                memory.set_written(address, self.unwritten[key])
            placed[key] = address, content
        return placed[key][0] + value.storage_offset() * value.element_size()

    def _keep(self, key: int, written: np.ndarray) -> None:
        if written.all():
            self.unwritten.pop(key, None)
        else:
            self.unwritten[key] = written


def _bits(value: Any, parameter: Parameter) -> int:
    """The bits of a number as a parameter. Raises TypeError for a float that the kernel does not take as one."""
    if parameter.is_float:
        return int.from_bytes(struct.pack("<f" if parameter.nbytes == 4 else "<d", value), "little")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"the argument for {parameter.name}: {value!r}, and the parameter is no float of 32 or 64 "
                        "bits") from None  # fmt: skip


@dataclass(frozen=True)
class Apart:
    """A matrix as an argument of a kernel, whose rows lie `stride` bytes apart, as rows of huge tensors do.

    It tries offsets that do not fit into 32 bits. tensor: contiguous, of the CPU. stride: a multiple of 16.
    """

    tensor: torch.Tensor
    stride: int

    def __post_init__(self) -> None:
        if self.tensor.dim() != 2 or not self.tensor.is_contiguous():
            raise ValueError(f"tensor: of shape {tuple(self.tensor.shape)}, and not a contiguous matrix")
        if self.stride % 16 or self.stride < self.tensor.stride(0) * self.tensor.element_size():
            raise ValueError(f"stride: {self.stride} bytes, no multiple of 16 or less than a row")

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def data_ptr(self) -> int:
        """An address that Triton takes for aligned."""
        return 0


UNWRITTEN = 0xEE  # every byte of new memory


class _Unwritten(TorchDispatchMode):
    """Records the tensors that `torch.empty` and similar functions create, and PyTorch's later writes to them."""

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
                _bytes(result)[:] = UNWRITTEN  # the memory may still contain the right values of an earlier tensor
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

    ptx: the text of `kernel`. shared: bytes of dynamic shared memory of a program. scratch_bytes, scratch_align: size
    and alignment of a program's global memory.
    """

    ptx: str = field(repr=False)
    kernel: Kernel
    shared: int
    scratch_bytes: int
    scratch_align: int

    @classmethod
    def of(cls, kernel: Any) -> "Compiled":
        """The parsed code and the resources of a kernel that `triton.compile` returned."""
        ptx, metadata = kernel.asm["ptx"], kernel.metadata
        return cls(ptx, Kernel.of(parse(ptx)), metadata.shared, metadata.global_scratch_size or 0,
                   metadata.global_scratch_align or 1)  # fmt: skip

    def scratch(self, memory: GlobalMemory, grid: int) -> int:
        """The address of the memory that Triton would allocate for a launch; 0 for none."""
        if not self.scratch_bytes:
            return 0
        nbytes = -(-self.scratch_bytes // self.scratch_align) * self.scratch_align
        return memory.allocate(nbytes * grid * self.kernel.program.cluster)


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor's storage, which share its memory."""
    with _disable_current_modes():  # `set_` writes nothing
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
