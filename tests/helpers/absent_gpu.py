"""Graphs for a GPU that need not be there, on fake CUDA tensors, and the launches that they are lowered to."""

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.source import ConstantSource
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import FakeTensorMode, fake_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fp4compile import hardware
from fp4compile.analysis.find import Input, find
from fp4compile.analysis.plan import plan
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM_OPAQUE
from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.lower import lower
from fp4compile.passes.rewrite import rewrite
from fp4compile.recipe import Recipe, named
from fp4compile.templates import launch
from fp4compile.templates.launch import dry_run

RECIPES = {"mixed": ("mxfp8", {"fprop_w": "mxfp4"}), "e5m2": ("mxfp8", {"fprop_x": "mxfp8_e5m2"}),
           "swept": ("nvfp4", {"weight_scales": "mse"})}  # fmt: skip


def recipe_of(name):
    if isinstance(name, Recipe):
        return name
    base, changes = RECIPES.get(name, (name, {}))
    return named(base).replace(**changes)


def rewritten_by(recipe, graph, inputs):
    """The decisions by which a graph, whose placeholders are these inputs, is rewritten."""
    for index, placeholder in enumerate(graph.find_nodes(op="placeholder")):
        placeholder.meta["desc"] = SimpleNamespace(idx=index)  # as AOTAutograd has it
    decisions = plan(find(graph, inputs), recipe_of(recipe), inputs)
    rewrite(graph, decisions)
    return decisions


def symbolic(shape_env, hint):
    """A size of which nothing is known but that it may be `hint`."""
    symbol = shape_env.create_symbol(hint, ConstantSource("s"), DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=hint)


# What the library computes, and how it is called here.
LIBRARY = (torch.ops.aten._scaled_mm.default, SCALED_MM_OPAQUE)


def launched_on(sm, recipe, shape=(256, 512, 1024), function=lambda x, w: x @ w.t(), dtype=torch.bfloat16):
    """(tier, launches) of a linear layer whose graph is lowered for a GPU that need not be there.

    shape: (m, n, k) of the product. A launch is (kernel's name, whether its scales are swizzled). Products that the
    library computes are no launches: they stand at the end as ("_scaled_mm", None) or ("library", None).
    """
    m, n, k = shape
    inputs = (Input(), Input("weight"))
    with FakeTensorMode(), dry_run(Target(sm)) as launches:
        x, w = (torch.empty(rows, k, device="cuda", dtype=dtype) for rows in (m, n))
        graph = make_fx(function)(x, w).graph
        decisions = rewritten_by(recipe, graph, inputs)
        lower(graph)
    nodes = [node for node in graph.nodes if node.target in LIBRARY]
    calls = [(node.args[-1] if node.target is SCALED_MM_OPAQUE else "_scaled_mm", None) for node in nodes]
    return decisions[0].tier, [(one.kernel.__name__, one.constants.get("SWIZZLED")) for one in launches] + calls


def install(monkeypatch, gpus):
    """Let torch find GPUs, each (major, minor, multiprocessors), as far as their properties go, with a fast link."""
    found = [SimpleNamespace(major=major, minor=minor, multi_processor_count=count) for major, minor, count in gpus]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(hardware, "_reads_other_memory", lambda count: True)
    monkeypatch.setattr(launch, "_known_targets", {})


class NoGpu:
    """A Triton driver that knows its target and nothing else."""

    def __init__(self, sm):
        self.sm = sm

    def get_current_target(self):
        return GPUTarget("cuda", self.sm, 32)


def pretend(monkeypatch, sm):
    """Let Triton, Inductor and this package find a GPU, as far as generating code asks."""
    monkeypatch.setattr(driver, "_active", NoGpu(sm))
    monkeypatch.setattr(launch, "cuda_target", lambda index: Target(sm))
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


ANY = object()  # a symbolic size


@dataclass
class Result:
    """A graph after `fuse_epilogue`: how many epilogues were fused, and the launches it was lowered to."""

    graph: torch.fx.Graph
    fused: int
    launches: list
    mode: FakeTensorMode


def fused_graph(
    function, *shapes, recipe="nvfp4", dtype=torch.bfloat16, dtypes=(), sm=100, then=None, paper=dry_run, fuse=True
):
    """The graph of a function on fake CUDA tensors: decomposed as Inductor does it, quantised, with fused epilogues.

    Arguments of the function whose names begin with `w` or `v` are weights. shapes: one an argument; `ANY` is a
    symbolic size. then: a pass that runs last. paper: the context that stands in for the GPU. fuse: whether to fuse.
    """
    names = function.__code__.co_varnames
    dtypes = [*dtypes, *[dtype] * (len(shapes) - len(dtypes))]
    inputs = [Input("weight" if names[i][0] in "wv" else None) for i in range(len(shapes))]
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, paper(Target(sm)) as launches:
        size = symbolic(mode.shape_env, 4)
        shapes = [[size if entry is ANY else entry for entry in shape] for shape in shapes]
        values = [torch.empty(shape, device="cuda", dtype=t) for shape, t in zip(shapes, dtypes, strict=True)]
        with enable_python_dispatcher():  # symbolic sizes
            graph = make_fx(function, decomposition_table=select_decomp_table())(*values).graph
        rewritten_by(recipe, graph, inputs)
        fused = fuse_epilogue(graph) if fuse else 0
        graph.lint()
        if then is not None:
            then(graph)
    return Result(graph, fused, launches, mode)
