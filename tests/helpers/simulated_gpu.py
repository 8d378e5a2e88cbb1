"""Compiled models on a GPU that is not there: Inductor's wrapper runs, and its launches run in the simulator.

    with simulated(monkeypatch, 100) as gpu:
        y = torch.compile(model, backend=fp4compile.backend("nvfp4"))(x)  # tensors of the CPU

Dynamo, AOTAutograd and the caller see a model of the CPU. Before the first of this package's passes each graph is moved
to the GPU: its values are on "cuda:0" from there on. So the passes, the partitioner and Inductor compile it for a GPU,
and the wrapper that Inductor generates is called with tensors of the CPU:

- its kernels, this package's and Inductor's own, are compiled ahead of time and executed by `Simulator`;
- products of libraries are checked as cuBLASLt checks them (`library_checks`), and computed by the reference;
- other operations are PyTorch's own on the CPU.

Inductor would time several configurations of its own kernels; the first one is taken.
"""

import ctypes
import importlib
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch._inductor.codecache
import torch._inductor.compile_fx
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.fx_passes import joint_graph
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import get_constexprs
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._triton import has_triton
from triton import knobs

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.ops.define import KERNELS
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.passes import hoist
from ptxsim import Compiled, Fault, Simulator
from tests.helpers.absent_gpu import pretend
from tests.helpers.arguments import opaque
from tests.helpers.library_checks import FLOAT4, V1, V2, check, named

GPU = torch.device("cuda:0")
# What the package's ops do on a GPU.
ON_GPU = {**KERNELS, SCALED_MM_OPAQUE: opaque}
CACHE = knobs.cache.dir
LIBRARY = {V1: V1, V2: V2, torch.ops.aten._scaled_mm.out: V1, torch.ops.aten._scaled_mm_v2.out: V2}


@contextmanager
def simulated(monkeypatch, sm):
    """While this lasts, `torch.compile` compiles for compute capability `sm`. Yields the `Gpu` that runs the code."""
    gpu = Gpu(LaunchSimulator(Target(sm)))
    with monkeypatch.context() as patch:
        pretend(patch, sm)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, lambda index: 0)
        for name in ("set_device", "get_rng_state", "set_rng_state"):
            patch.setattr(torch.cuda, name, lambda *args: torch.empty(0))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        # PyTorch built for CUDA would ask the driver for the current stream.
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.accelerator, "is_available", lambda: False)
        patch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", _empty_strided)
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(joint_graph, "lazy_init", lambda *args: None)  # traces patterns of Inductor's on the GPU
        folder = joint_graph.UniformValueConstantFolder
        for name in ("run", "_add_peephole_patterns"):
            patch.setattr(folder, name, _on_cpu(getattr(folder, name)))
        patch.setattr(AsyncCompile, "triton", lambda self, name, source, *rest, **more: gpu.kernel(name, source))
        patch.setattr(importlib.import_module("fp4compile.dynamo_backend"), "compile_fx_inner", gpu.compile_inner)
        for name in ("packed_weight", "packed_pair"):
            patch.setattr(hoist, name, gpu.during(getattr(hoist, name)))
        settings = {"joint_custom_pre_pass": MoveToGpu(), "force_disable_caches": True, "compile_threads": 1,
                    "use_static_cuda_launcher": False}  # fmt: skip
        has_triton.cache_clear()  # torch may have asked before
        with config.patch(settings), _device_guard():
            yield gpu
    has_triton.cache_clear()


@contextmanager
def _device_guard():
    """While this lasts, PyTorch built for CPUs sets "the current CUDA device" by doing nothing, as it does for "meta".

    PyTorch built for CUDA does so by itself where there is no GPU (`c10::impl::ensureCUDADeviceGuardSet`).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * _DEVICE_TYPES).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


_CUDA, _META, _DEVICE_TYPES = 1, 14, 15  # c10::DeviceType


def _empty_strided(size, stride, dtype):
    return torch.empty_strided(size, stride, dtype=dtype)


@dataclass(frozen=True, eq=False)
class MoveToGpu(CustomGraphPass):
    """Let all values of a graph be on the GPU."""

    def __call__(self, graph):
        for node in graph.nodes:
            for value in pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, FakeTensor):
                    value.fake_device = GPU  # in place: values that share memory go on sharing it
            node.args, node.kwargs = pytree.tree_map(_moved, (node.args, node.kwargs))

    def uuid(self):
        return "MoveToGpu"


def _moved(argument):
    return GPU if argument == torch.device("cpu") else argument


class _Constants(TorchDispatchMode):
    """Tensors that Inductor would make on the GPU are made on the CPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **_on_host(kwargs or {}))


def _on_host(kwargs):
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") == GPU else kwargs


def _on_cpu(function):
    def run(*args):
        with _Constants():
            return function(*args)

    return run


@dataclass(eq=False)
class Gpu:
    """What compiled models took. launches: (kind, name) in order, of what the wrapper called; see `counted`."""

    simulator: LaunchSimulator
    launches: list[tuple[str, str]] = field(default_factory=list)

    def counted(self):
        """How often each kernel, library call or operation ran, by kind: "package", "Inductor", "library", "PyTorch".

        Launches of weights that an inference graph finds quantised count as launches of the package.
        """
        found = {kind: Counter() for kind in ("package", "Inductor", "library", "PyTorch")}
        for kind, name in [*(("package", one.kernel.__name__) for one in self.simulator.launches), *self.launches]:
            found[kind][name] += 1
        return found

    def compile_inner(self, gm, example_inputs, **kwargs):
        """`compile_fx_inner` of a graph that `MoveToGpu` has moved."""
        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        compiled = self.during(torch._inductor.compile_fx.compile_fx_inner(gm, values, **kwargs))
        compiled._boxed_call = True
        return compiled

    def during(self, function):
        """A function whose launches and operations run on this GPU."""

        def run(*args, **kwargs):
            with self.simulator.running(), _Operations(self):
                return function(*args, **kwargs)

        return run

    def execute(self, kind, compiled, values, grid):
        """Execute a launch of this package or of Inductor, which may copy what nothing wrote.

        Inductor does that where one tensor of `torch.empty` is two results of a kernel.
        """
        try:
            self.simulator.execute(compiled, values, grid)
        except Fault as fault:  # before tensors have changed
            if kind == "package" or "that nothing wrote" not in str(fault):
                raise
            self._execute_on_unwritten(compiled, values, grid)

    def _execute_on_unwritten(self, compiled, values, grid):
        """Execute a launch that reads memory which nothing wrote: what it makes from such bytes is unwritten, too.

        Two executions begin with other bytes in that memory, and end with other bytes in what depends on them.
        """
        simulator, contents = self.simulator, {}
        for value in values:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                contents[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        before = {key: content.copy() for key, content in contents.items()}
        written = {key: simulator.unwritten.pop(key, True) for key in contents}
        ends = []
        for fill, executing in ((0x55, Simulator(simulator.schedule)), (0xAA, simulator)):
            for key, content in contents.items():
                content[:] = np.where(written[key], before[key], fill)
            executing.execute(compiled, values, grid)
            ends.append({key: content.copy() for key, content in contents.items()})
        for key in contents:
            same = ends[0][key] == ends[1][key]
            if not same.all():
                simulator.unwritten[key] = same

    def kernel(self, name, source):
        """What stands for a kernel in the wrapper."""
        return Kernel(self, name, source)


class Kernel:
    """A kernel of a wrapper, compiled for the GPU that is not there."""

    def __init__(self, gpu, name, source):
        self.gpu, self.name = gpu, name
        self.kind = "Inductor" if name.startswith("triton_") else "package"
        tuner = getattr(PyCodeCache.load(source), name)
        # Triton's own folder: Inductor gives each graph an empty one, and many have the same kernels.
        with mock.patch.dict(os.environ, TRITON_CACHE_DIR=CACHE):
            result = tuner._precompile_config(tuner.configs[0])
        self.compiled = Compiled.of(result.kernel)
        function, signature = tuner.fn, result.compile_meta["signature"]
        passed, parameters, _ = result._get_arg_lists(function.arg_names, get_constexprs(function))
        values = [each for name, each in zip(function.arg_names, passed, strict=True)
                  if signature.get(name, "constexpr") != "constexpr"]  # fmt: skip
        scope = {"runner": self._launch, "grid_meta": result.config.kwargs}
        self.launcher = result._gen_launcher_code(scope, parameters, ["grid_0", "grid_1", "grid_2", *values])

    def run(self, *args, stream):
        """The call in the wrapper."""
        self.launcher(*args, stream=stream)

    def _launch(self, x, y, z, *values):
        self.gpu.launches.append((self.kind, self.name))
        with _disable_current_modes():  # the simulator multiplies by torch
            self.gpu.execute(self.kind, self.compiled, values, (x, y, z))


class _Operations(TorchDispatchMode):
    """Ops of this package run their kernels, and products of libraries the reference."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = _on_host(kwargs or {})
        if func in ON_GPU:
            with self:
                return ON_GPU[func](*args, **kwargs)
        if func in LIBRARY:
            self.gpu.launches.append(("library", func._opname))
            given = named(LIBRARY[func], args, {name: value for name, value in kwargs.items() if name != "out"})
            check(LIBRARY[func], given, self.gpu.simulator.target.sm)
            result = library_product(LIBRARY[func], given)
            return kwargs["out"].copy_(result) if "out" in kwargs else result
        if not (func.is_view or "empty" in func._opname):
            self.gpu.launches.append(("PyTorch", func._opname))
        if func in (torch.ops.aten.mm.dtype, torch.ops.aten.mm.dtype_out):  # which CPUs lack
            a, b, dtype = args
            result = a.to(dtype) @ b.to(dtype)
            return kwargs["out"].copy_(result) if "out" in kwargs else result
        return func(*args, **kwargs)


def _product_of_blocks(given, a_scales, b_scales):
    """The product of FP8 codes with scales [rows, blocks] of A, and of B's rows or squares; some may be padding."""
    a, b = given["self"], given["mat2"].t()
    fmt = formats.get("float8_1x128" if len(b_scales) == len(b) else "float8_128x128")
    blocks = a_scales.shape[1]
    left = Operand(a, a_scales.contiguous(), None, formats.get("float8_1x128"))
    right = Operand(b, b_scales[:, :blocks].contiguous(), None, fmt)
    return reference.scaled_mm(left, right, given["bias"], given["out_dtype"])


def library_product(op, given):
    """What cuBLASLt computes: alpha * (A B) + bias with float32 sums, and one rounding."""
    a, b = given["self"], given["mat2"]
    scales = [given["scale_a"], given["scale_b"]]
    if op is V2 and len(scales[0]) == 1:  # of 128 elements: a row of B's is not a row of the codes, as in v1
        square = scales[1][0].shape[0] != b.shape[1]
        return _product_of_blocks(given, scales[0][0], scales[1][0].t() if square else scales[1][0])
    if op is V1 and scales[0].dtype == torch.float32 and scales[0].numel() > a.shape[0]:
        return _product_of_blocks(given, scales[0], scales[1].t())
    if op is V1 and scales[0].dtype == torch.float32:  # of rows
        fmt = formats.get("float8_rowwise")
        left, right = (
            Operand(data, None, outer.reshape(-1, 1), fmt) for data, outer in zip((a, b.t()), scales, strict=True)
        )
        return reference.scaled_mm(left, right, given["bias"], given["out_dtype"])
    if op is V1:  # no global scales
        scales = [(each, None) for each in scales]
    fmt = formats.get("nvfp4" if a.dtype == FLOAT4 else "mxfp8")
    left, right = (
        Operand(data.view(fmt.data_dtype), block.view(fmt.scale_dtype).view(-1), outer, fmt)
        for data, (block, outer) in zip((a, b.t()), scales, strict=True)
    )
    return reference.scaled_mm(left, right, given["bias"], given["out_dtype"])
