"""Inductor's `compile_fx` as far as the backend needs it, without code generation: the captured graphs run as they are.

`install(monkeypatch)` puts it in the place of the real one, and returns the configurations that it was called with.
"""

import importlib
from contextlib import nullcontext

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table


def install(monkeypatch, running=nullcontext, deciding=nullcontext) -> list[dict]:
    """The list grows by one configuration, all of Inductor's settings by name, a compilation.

    running, deciding: make the contexts in which a captured graph runs, and in which this package's passes run.
    """
    seen: list[dict] = []

    def compile_fx(gm, example_inputs, inner_compile=None, config_patches=None):
        with config.patch(config_patches):
            seen.append(config.get_config_copy())
        return _compile(gm, example_inputs, config_patches, running, deciding)

    monkeypatch.setattr(importlib.import_module("fp4compile.dynamo_backend"), "compile_fx", compile_fx)
    return seen


def _compile(gm, example_inputs, patches, running, deciding):
    if not patches.get("use_joint_graph_passes", True):
        return gm.forward
    rewrite, lower = patches["joint_custom_pre_pass"], patches["post_grad_custom_post_pass"]

    def partition(joint, joint_inputs, **kwargs):
        with deciding():
            rewrite(joint.graph)
        joint.recompile()
        return min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **kwargs)

    def finish(module, _):
        with deciding():
            lower(module.graph)
        module.recompile()

        def run(*args):
            with running():
                return module.forward(*args)

        return make_boxed_func(run)

    def infer(module, inputs):
        with deciding():
            rewrite(module.graph)
        return finish(module, inputs)

    compiler = aot_autograd(
        fw_compiler=finish, bw_compiler=finish, inference_compiler=infer, partition_fn=partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    return compiler(gm, example_inputs)
