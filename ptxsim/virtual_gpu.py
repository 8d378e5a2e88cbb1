"""A GPU that is not there: Triton compiles its launches ahead of time for it, and the simulator executes them.

    with ptxsim.gpu("sm_100a") as gpu:
        kernel[grid](x, y, x.numel(), BLOCK=128)  # x, y: tensors of the CPU

Triton's own launch path does the work: it specialises arguments, applies heuristics and compiles. Only its driver is
replaced, and its backend ends at PTX, so that no assembler runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from ptxsim.kernel_launch import Apart, Compiled, Simulator
from ptxsim.parse import parse
from ptxsim.run import LOCKSTEP, Kernel, Schedule
from ptxsim.tensor_maps import HostMap

# An architecture's compute capability and multiprocessors, and the most bytes of shared memory of a program.
ARCHITECTURES = {
    "sm_90a": (90, 132, 232448),
    "sm_100a": (100, 148, 232448),
    "sm_103a": (103, 148, 232448),
    "sm_120a": (120, 188, 101376),
}


@contextmanager
def gpu(arch: str, schedule: Schedule = LOCKSTEP) -> Iterator[Simulator]:
    """A context in which `kernel[grid](...)` of Triton and Gluon is executed in the simulator, on tensors of the CPU.

    arch: a key of `ARCHITECTURES`. schedule: the order of all launches. Gives the simulator, whose `tally` counts what
    was executed.
    `triton.autotune` takes the first configuration that its pruning leaves. Contents of a `torch.empty` of this
    context count as unwritten until PyTorch or a kernel writes them.

    Raises ValueError for an unknown architecture, or if kernels are interpreted (TRITON_INTERPRET). A launch raises
    Fault for a defect of the kernel, UnknownForm for unknown instructions, and TypeError, naming the argument, for one
    that no kernel takes or for a tensor that is not on the CPU.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}, and not one of {', '.join(ARCHITECTURES)}")
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set, so that kernels are not compiled")
    simulator = Simulator(schedule)
    config, nvidia = triton.runtime.driver, backends["nvidia"]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(config, "_active", _Driver(arch, simulator)))
        stack.enter_context(mock.patch.dict(backends, nvidia=Backend(_UpToPtx, nvidia.driver)))
        stack.enter_context(mock.patch.object(Autotuner, "run", _first_configuration(Autotuner.run, simulator)))
        stack.enter_context(mock.patch.object(JITFunction, "run", _checked(JITFunction.run)))
        stack.enter_context(simulator.watching())
        yield simulator


# ---------------------------------------------------------------- what Triton calls


class _UpToPtx(CUDABackend):
    """The compiler for NVIDIA's GPUs without its last stage: the code that is loaded is PTX."""

    def __init__(self, target: GPUTarget) -> None:
        super().__init__(target)
        self.binary_ext = "ptx"

    def add_stages(self, stages: dict, options: Any, language: Any) -> None:
        super().add_stages(stages, options, language)
        del stages["cubin"]

    def hash(self) -> str:
        return f"ptxsim-{super().hash()}"


class _Driver(DriverBase):
    """The driver of a GPU that is not there, and in `utils` what Triton takes from NVIDIA's."""

    def __init__(self, arch: str, simulator: Simulator) -> None:
        super().__init__()
        self.arch, self.simulator, self.utils, self.launcher_cls = arch, simulator, self, _Launcher

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURES[self.arch][0], 32)

    def get_current_device(self) -> str:
        """The key by which kernels keep their compiled code."""
        return f"ptxsim {self.arch}"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: Any) -> Mapping[str, int]:
        _, multiprocessors, shared = ARCHITECTURES[self.arch]
        return {
            "multiprocessor_count": multiprocessors,
            "max_shared_mem": shared,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(self, name: str, ptx: bytes, shared: int, device: str) -> tuple[None, "_Loaded", int, int, int]:
        """(no module, the function, its registers, its spilled registers, the most threads of a program)."""
        return None, _Loaded(ptx.decode()), 0, 0, 1024

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("the simulator measures no times")


@dataclass
class _Loaded:
    """A kernel's PTX. It is decoded at the first launch: Triton forgets what `load_binary` raises."""

    ptx: str

    @cached_property
    def kernel(self) -> Kernel:
        return Kernel.of(parse(self.ptx))


class _Launcher:
    """Launches one compiled kernel. signature: the types of its arguments. descriptors: of its tensor maps in order."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.signature = tuple(source.signature.values())
        self.metadata = metadata
        self.descriptors = getattr(metadata, "tensordesc_meta", None)

    def __call__(self, x: int, y: int, z: int, stream: int, function: _Loaded, *rest: Any) -> None:
        _packed, _launch_metadata, _enter_hook, _exit_hook, *arguments = rest
        simulator: Simulator = triton.runtime.driver.active.simulator
        metadata = self.metadata
        compiled = Compiled(function.ptx, function.kernel, metadata.shared, metadata.global_scratch_size or 0,
                            metadata.global_scratch_align or 1)  # fmt: skip
        maps = iter(self.descriptors or ())
        values = [value for each in zip(self.signature, arguments, strict=True) for value in _passed(*each, maps)]
        if x * y * z:
            simulator.execute(compiled, values, (x, y, z))


def _passed(kind: Any, value: Any, maps: Iterator[Mapping[str, Any]]) -> Iterator[Any]:
    """The parameters that an argument becomes. kind: its type in Triton's signature, a tuple of them for a tuple."""
    if isinstance(kind, tuple):
        for each in zip(kind, value, strict=True):
            yield from _passed(*each, maps)
    elif kind == "constexpr":
        return
    elif kind.startswith("tensordesc"):
        host_map = HostMap.of(value.base, value.shape, value.strides, next(maps), value.padding == "nan")
        yield from (host_map, *value.shape, *value.strides)
    else:
        yield getattr(value, "base", value)  # a tensor whose type was reinterpreted has it as its base


# ---------------------------------------------------------------- around Triton's functions


def _first_configuration(run: Callable, simulator: Simulator) -> Callable:
    """`Autotuner.run` that takes the first configuration, and notes it, without measurements."""

    def first(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        every = tuner.configs
        tuner.configs = tuner.prune_configs(kwargs)[:1]
        if len(every) > 1:
            simulator.tally.notes[
                f"launches of the first of {len(every)} configurations of {tuner.base_fn.__name__}"
            ] += 1
        try:
            return run(tuner, *args, **kwargs)
        finally:
            tuner.configs = every

    return first


def _checked(run: Callable) -> Callable:
    """`JITFunction.run` that names an argument which no kernel takes."""

    def checked(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in (dict(zip(kernel.arg_names, args, strict=False)) | kwargs).items():
            if name in kernel.arg_names and not kernel.params[kernel.arg_names.index(name)].is_constexpr:
                _check(name, value)
        return run(kernel, *args, **kwargs)

    return checked


_PLAIN: tuple[type, ...] = (bool, int, float, type(None), Apart)


def _check(name: str, value: Any) -> None:
    """Raise TypeError, naming an argument, for a value that no kernel takes or a tensor that is not on the CPU."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            _check(name, each)
        return
    base = getattr(value, "base", value) if not isinstance(value, torch.Tensor) else value
    if isinstance(base, torch.Tensor):
        if base.device.type != "cpu":
            raise TypeError(f"argument {name}: a tensor on {base.device}, and the simulator takes tensors of the CPU")
    elif not isinstance(value, _PLAIN) and not hasattr(value, "type") and not callable(value):
        raise TypeError(f"argument {name}: {type(value).__name__} is no type of argument that a kernel takes")
