"""The wrapper that Inductor generates for a GPU that is not there."""

from types import SimpleNamespace

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.debug import DebugContext
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp4compile.passes.lower import lower
from fp4compile.passes.tails import fuse_tails
from fp4compile.targets import Target
from fp4compile.templates import launch


class NoGpu:
    """A Triton driver that knows its target and nothing else."""

    def __init__(self, sm):
        self.sm = sm

    def get_current_target(self):
        return GPUTarget("cuda", self.sm, 32)


def pretend(monkeypatch, sm):
    """Let Triton, Inductor and this package find a GPU, as far as generating code asks."""
    monkeypatch.setattr(driver, "_active", NoGpu(sm))
    monkeypatch.setattr(launch, "_cuda_target", lambda index: Target(sm))
    limits = {"multi_processor_count": 132, "major": sm // 10, "regs_per_multiprocessor": 65536, "warp_size": 32,
              "max_threads_per_multi_processor": 2048}  # fmt: skip
    hints = DeviceProperties(type="cuda", index=0, cc=sm, **limits)
    monkeypatch.setattr(DeviceProperties, "create", lambda device: hints)
    properties = SimpleNamespace(minor=0, name="none", total_memory=2**36, gcnArchName="", **limits)
    monkeypatch.setattr(CudaInterface.Worker, "get_device_properties", lambda *device: properties)
    monkeypatch.setattr(CudaInterface, "get_compute_capability", lambda *device: sm)
    monkeypatch.setattr(fake_tensor, "init_gpu_context", lambda device: None, raising=False)
    for name, value in (("is_available", True), ("device_count", 1), ("current_device", 0),
                        ("get_device_capability", (sm // 10, 0)), ("get_device_properties", properties)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)


def wrapper_of(graph_module, mode):
    """The text for a post-grad graph on fake CUDA tensors, with tails and lowered."""
    inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    graph_module.recompile()
    passes = {"post_grad_custom_post_pass": lambda graph: (fuse_tails(graph), lower(graph))}
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), config.patch(compile_threads=1, **passes):
        post_grad_passes(graph_module, is_inference=True)
        graph_module.recompile()
        lowering = GraphLowering(graph_module, example_inputs=inputs, shape_env=mode.shape_env, is_inference=True)
        with V.set_graph_handler(lowering), mode:
            lowering.run(*inputs)
            code = lowering.codegen()[0]
    return getattr(code, "value", code)
