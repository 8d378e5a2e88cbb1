"""Capture a model's graphs without compiling them.

`run_captured` captures the backend's graphs: with Dynamo and AOTAutograd under Inductor's decompositions. The caller's
`runner` returns the function that runs in place of each graph.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo import OptimizedModule
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import innermost_fn
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp4compile.analysis.gradients import is_nested
from fp4compile.analysis.module_names import module_of
from fp4compile.report import names

aten = torch.ops.aten

# Takes a captured graph, the names of its inputs, and how many of its outputs the forward pass returns (None for a
# graph without gradients); returns the function that runs instead of the graph.
GraphRunner = Callable[[GraphModule, names.Names, int | None], Callable]


def run_captured(
    model: Callable,
    runner: GraphRunner,
    enter: Callable[[names.Names, names.Names], None] | None = None,
    *,
    joint: bool = True,
    running: Callable[[], AbstractContextManager] = nullcontext,
) -> Callable:
    """The model, as a function that captures its graphs and runs the functions that `runner` returns for them.

    runner: called once with each graph. The function that it returns runs instead of an inference graph.
    enter: called at each run of a graph, with the names of its inputs at capture and the names in this run.
    joint: whether `runner` is called with the joint graph in training, which is then partitioned and run unchanged;
    otherwise it is called with the forward graph, and the function that it returns runs instead.
    running: makes the context in which a captured graph runs.

    Where the model or a part of it is compiled already, the uncompiled original is captured. If the model is a module's
    method `generate`, the calls of the module are captured, and the loop around them runs eagerly, because Dynamo
    compiles that loop slowly.

    Raises TypeError for a model that cannot be called.
    """
    if not callable(model):
        raise TypeError(f"model: expected a module or another callable, got {type(model).__name__}")
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    root = module_of(model)

    def capturing_backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        known = names.record(gm, example_inputs, root)
        _fuse_attention(gm)

        def run_forward(module: GraphModule, _: Any) -> Callable:
            return make_boxed_func(module.forward if joint else runner(module, known, None))

        def partition(graph: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            if joint and not is_nested(graph.graph):
                runner(graph, known, kwargs["num_fwd_outputs"])
            kwargs.pop("static_lifetime_input_indices", None)
            return default_partition(graph, joint_inputs, **kwargs)

        compiler = aot_autograd(
            fw_compiler=run_forward,
            bw_compiler=lambda module, _: make_boxed_func(module.forward),
            inference_compiler=lambda module, _: make_boxed_func(runner(module, known, None)),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        compiled = compiler(gm, example_inputs)

        def run(*values: Any) -> Any:
            if enter is not None:
                enter(known, known.entered_by(values, root))
            with running():
                return compiled(*values)

        return run

    called = root if root is not model and getattr(model, "__name__", None) == "generate" else None
    captured = torch.compile(model if called is None else called._call_impl, backend=capturing_backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Beyond Dynamo's limit of recompilations (8), calls run without being captured.
        no_limit = dynamo_config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize)
        calls: list[_Change] = [] if called is None else [(vars(called), "_compiled_call_impl", captured)]
        with _changed([*_as_written(root), *calls]), no_limit:
            return captured(*args, **kwargs) if called is None else model(*args, **kwargs)

    return run


# A change of an attribute: the attributes of an object, the name, and the value for a time.
_Change = tuple[dict[str, Any], str, Any]


def _as_written(model: torch.nn.Module | None) -> list[_Change]:
    """The changes by which the compiled modules inside the model run uncompiled."""
    changes: list[_Change] = []
    for part in [] if model is None else model.modules():
        if isinstance(part, OptimizedModule):
            changes.append((vars(part), "forward", part._orig_mod.__call__))
            continue
        if part._compiled_call_impl is not None:
            changes.append((vars(part), "_compiled_call_impl", None))
        # As after `part.forward = torch.compile(part.forward)`; `torch.compiler.disable` leaves such a mark, too.
        forward = vars(part).get("forward")
        if forward is not None and not hasattr(forward, "_torchdynamo_disable"):
            changes.append((vars(part), "forward", innermost_fn(forward)))
    return changes


@contextmanager
def _changed(changes: list[_Change]) -> Iterator[None]:
    """A context in which attributes have other values."""
    before = [(attributes, name, attributes.get(name)) for attributes, name, _ in changes]
    for attributes, name, value in changes:
        attributes[name] = value
    try:
        yield
    finally:
        for attributes, name, value in before:
            attributes[name] = value


# ---------------------------------------------------------------- attention on the meta device


def _fuse_attention(gm: GraphModule) -> None:
    """Replace attention in a Dynamo graph on meta tensors by the operators of a GPU.

    torch would decompose it into matmuls and a softmax. A GPU runs one kernel, which keeps intermediate results on the
    chip: flash attention, or memory-efficient attention under a mask.
    """
    for node in gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention):
        query = node.args[0] if node.args else node.kwargs["query"]
        value = query.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.is_meta and value.dim() == 4:
            node.target = _attention
    gm.recompile()


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`F.scaled_dot_product_attention` by the operators of a GPU."""
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    bias = attn_mask
    if bias.dtype == torch.bool:
        bias = torch.where(bias, 0.0, float("-inf")).to(query.dtype)
    bias = bias.expand(*query.shape[:3], key.shape[2])
    kept = torch.is_grad_enabled()
    return aten._scaled_dot_product_efficient_attention(query, key, value, bias, kept, dropout_p, False, scale=scale)[0]
