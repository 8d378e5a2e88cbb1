"""Models compiled by the backend for a GPU that need not be there, on fake CUDA tensors and without code generation."""

import importlib
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph
from torch._subclasses import FakeTensorMode
from triton.runtime import driver

import fp4compile
from fp4compile.hardware import Target
from fp4compile.passes import hoist
from fp4compile.report.report import Report
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import NoGpu

DEVICE = "cuda:0"


@dataclass
class Compiled:
    """What became of a model: the backend's report, that of `explain`, the last graph of each compilation, launches."""

    report: Report
    explained: Report
    graphs: list[torch.fx.GraphModule]
    launches: list


@contextmanager
def pretended(monkeypatch, sm):
    """While this lasts, tensors are fake, and CUDA devices are of a compute capability; yields the launches."""
    monkeypatch.setattr(driver, "_active", NoGpu(sm))
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, torch.no_grad(), enable_python_dispatcher(), dry_run(Target(sm)) as launches:
        yield launches


def compiled_for(monkeypatch, model, x, recipe, launches):
    """Compile model(x) by the backend as far as Inductor's code generation, and explain it."""
    graphs = []

    def inner_compile(gm, example_inputs, **kwargs):
        config.post_grad_custom_post_pass(gm.graph)
        graphs.append(gm)
        outputs = [node.meta["val"] for node in gm.graph.find_nodes(op="output")[0].args[0]]
        return make_boxed_func(lambda *args: outputs)

    monkeypatch.setattr(importlib.import_module("fp4compile.dynamo_backend"), "compile_fx_inner", inner_compile)
    # Inductor would trace patterns of its own on the GPU.
    monkeypatch.setattr(joint_graph, "lazy_init", lambda *args: None)
    # A fake weight has no contents to quantise, nor an address to know it by.
    monkeypatch.setattr(hoist, "packed_weight", lambda *args: (None,) * 3)
    monkeypatch.setattr(hoist, "packed_pair", lambda *args: (None,) * 2)
    monkeypatch.setattr(hoist, "joined_parts", lambda first, second: [torch.empty(0, dtype=torch.uint8) for _ in first])
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe)
    torch.compile(model, backend=backend, fullgraph=True)(x)
    collected = list(launches)
    return Compiled(backend.report, fp4compile.explain(model, x, recipe=recipe), graphs, collected)
