"""Inductor's `compile_fx` as far as the backend needs it, without code generation: the captured graphs run as they are.

`install(monkeypatch)` puts it in the place of the real one, and returns the configurations that it was called with.
"""

import importlib
from contextlib import nullcontext

from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table

from fp4compile.report.explain import _boxed


def install(monkeypatch, running=nullcontext, deciding=nullcontext, hoisting=False) -> list[dict]:
    """The list grows by one configuration, all of Inductor's settings by name, a compilation.

    running, deciding: make the contexts in which a captured graph runs, and in which this package's passes run.
    hoisting: whether packed weights are kept; otherwise every graph quantises its weights at every call.
    """
    seen: list[dict] = []
    backend = importlib.import_module("fp4compile.backend")

    def compile_fx(gm, example_inputs, inner_compile=None, config_patches=None):
        with config.patch(config_patches):
            seen.append(config.get_config_copy())
        return _compile(gm, example_inputs, config_patches, running, deciding, inner_compile if hoisting else None)

    monkeypatch.setattr(backend, "compile_fx", compile_fx)
    if hoisting:
        # The compilation of a graph from which weights were taken is `_compile`'s own, which it passes on.
        monkeypatch.setattr(backend, "compile_fx_inner", lambda gm, inputs, *, finish, **kwargs: finish(gm, inputs))
    return seen


def _compile(gm, example_inputs, patches, running, deciding, inner_compile=None):
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

        return _boxed(run)

    def compile_inner(module, inputs, is_inference=False):
        if inner_compile is None:
            return finish(module, inputs)
        return inner_compile(module, inputs, is_inference=is_inference, finish=finish)

    def infer(module, inputs):
        with deciding():
            rewrite(module.graph)
        return compile_inner(module, inputs, is_inference=True)

    compiler = aot_autograd(
        fw_compiler=compile_inner, bw_compiler=compile_inner, inference_compiler=infer, partition_fn=partition,
        decompositions=select_decomp_table(),
    )  # fmt: skip
    return compiler(gm, example_inputs)
