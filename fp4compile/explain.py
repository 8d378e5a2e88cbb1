"""Look at a model's graphs without compiling them: `explain` reports on products, `observe` watches activations.

Both capture the graphs with Dynamo and AOTAutograd under Inductor's decompositions, so that they see the graphs that
the backend will see. Then they run the captured graphs unchanged.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp4compile import gpus, names
from fp4compile.gpus import Gpu
from fp4compile.passes.find import find
from fp4compile.passes.gain import predicted
from fp4compile.passes.gemm import Input
from fp4compile.passes.manager import analyse, describe
from fp4compile.passes.plan import Decision, plan
from fp4compile.recipe import Recipe, resolve, unmatched_rules
from fp4compile.report import NOTHING_CAPTURED, Report, Row

# A function of a captured graph and the names of its inputs; it returns the function that runs in the graph's place.
GraphRunner = Callable[[GraphModule, names.Names], Callable]


def explain(
    model: Callable, *args: Any, recipe: str | dict | Recipe | Path | None = None, gpu: str | Gpu | None = None,
    all: bool = False, **kwargs: Any,
) -> Report:  # fmt: skip
    """Run model(*args, **kwargs) once, uncompiled; print and return what a recipe would do to its matrix products.

    Where gradients are enabled and something requires them, the report has the products of the backward pass too.
    Gives a warning for each rule of the recipe that decides for no layer.

    A model on the meta device takes no memory and computes nothing: tensors there stand for those on the GPU of `gpu`.

    model: a module or another callable, compiled or not. recipe: as for `fp4compile.backend`.
    gpu: for which times are predicted, a name of `roofline.GPUS` or a `roofline.Gpu`; by default the GPU that is there,
        if it is one of these, and none else. all: whether to print one line for each product, and not equal layers
        together.

    Raises what `backend` raises for a bad recipe, and ValueError for an unknown GPU and if Dynamo captures no graph of
    the model.
    """
    chosen = resolve(recipe)
    target = gpus.present() if gpu is None else gpus.named(gpu)
    report = Report(chosen.name, graphs=0, gpu=None if target is None else target.name)
    made: dict[int, list[Row]] = {}
    shown: list[tuple] = []

    def look(module: GraphModule, known: names.Names) -> Callable:
        times = None if target is None else partial(predicted, recipe=chosen, gpu=target)
        rows = describe(module.graph, known.inputs, analyse(module.graph, chosen, known.inputs, target), times)
        report.graphs = (report.graphs or 0) + 1
        report.add(known.in_full(rows), {"find": len(rows)}, CompileContext.current_trace_id())
        made.setdefault(id(known), []).extend(rows)
        shown.append((id(known), known.modules, known.prefix))
        return module.forward

    def enter(known: names.Names, now: names.Names) -> None:
        entry = (id(known), now.modules, now.prefix)
        if entry not in shown:  # Dynamo runs the graph of one part of the model for another part too
            shown.append(entry)
            report.add(now.in_full(made.get(id(known), [])), {})

    with torch.random.fork_rng():
        run_captured(model, look, enter)(*args, **kwargs)
    if report.graphs == 0:
        raise ValueError(f"model: no graph of it was captured. {NOTHING_CAPTURED}")
    print(report.table(all=all))
    for rule in unmatched_rules(chosen, {row.name or row.module for row in report.rows}):
        warnings.warn(f"rule {rule.pattern!r} of recipe {chosen.name!r} decides for no layer", stacklevel=2)
    return report


def observe(model: Callable, recipe: Recipe, see: Callable[[Decision, torch.Tensor], None]) -> Callable:
    """The model, as a function that shows the activations of its layers.

    see: called with the decision about each forward product that reads a static scale, and with the product's
        activation. Layers that the recipe leaves alone are not shown.
    recipe: one with static activation scales.
    """

    def watch(module: GraphModule, known: names.Names) -> Callable:
        return _Watcher(module, _with_static_scale(module.graph, recipe, known.inputs), see).run

    return run_captured(model, watch)


def _with_static_scale(graph: torch.fx.Graph, recipe: Recipe, inputs: tuple[Input, ...]) -> list[Decision]:
    gemms = find(graph, inputs)
    # Every layer is given a scale here: a layer that is then quantised without one does not read a static scale.
    scales = {gemm.module: 1.0 for gemm in gemms if gemm.product == "fprop"}
    decisions = plan(gemms, recipe.replace(static_scales=scales), inputs)
    return [d for d in decisions if any(t is not None and t.outer is not None for t in (d.a, d.b))]


class _Watcher(torch.fx.Interpreter):
    """Runs a graph, and calls `see` with each of the decisions and the activation of its product."""

    def __init__(self, module: GraphModule, decisions: list[Decision], see: Callable[[Decision, torch.Tensor], None]):
        super().__init__(module)
        self.watched: dict[torch.fx.Node, list[Decision]] = {}
        for decision in decisions:
            operands = (decision.gemm.a, decision.gemm.b)
            activation = next(one for one in operands if one is not None and one.role == "fprop_x")
            self.watched.setdefault(activation.source, []).append(decision)
        self.see = see

    def run_node(self, node: torch.fx.Node) -> Any:
        value = super().run_node(node)
        for decision in self.watched.get(node, ()):
            self.see(decision, value)
        return value


def run_captured(
    model: Callable, runner: GraphRunner, enter: Callable[[names.Names, names.Names], None] | None = None
) -> Callable:
    """The model, as a function that captures its joint and inference graphs and runs each as `runner` says.

    runner: called once with each graph. What it returns runs in the place of an inference graph; a joint graph is
        partitioned and then run as it is.
    enter: called at each run of a graph, with the names of its inputs when it was captured and those of this run.

    Where the model or a part of it is compiled already, the uncompiled original is captured.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    root = model if isinstance(model, torch.nn.Module) else None

    def capturing_backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        known = names.record(gm, example_inputs, root)

        def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
            runner(joint, known)
            kwargs.pop("static_lifetime_input_indices", None)
            return default_partition(joint, joint_inputs, **kwargs)

        compiler = aot_autograd(
            fw_compiler=lambda module, _: _boxed(module.forward),
            bw_compiler=lambda module, _: _boxed(module.forward),
            inference_compiler=lambda module, _: _boxed(runner(module, known)),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        compiled = compiler(gm, example_inputs)
        if enter is None:
            return compiled

        def run(*values: Any) -> Any:
            enter(known, known.entered_by(values, root))
            return compiled(*values)

        return run

    captured = torch.compile(model, backend=capturing_backend)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _as_written(root):
            return captured(*args, **kwargs)

    return run


@contextmanager
def _as_written(model: torch.nn.Module | None) -> Iterator[None]:
    """While this lasts, the modules inside the model that are compiled already run uncompiled."""
    changed: list[tuple[dict, str, Any]] = []
    for part in () if model is None else model.modules():
        attributes = vars(part)
        if isinstance(part, OptimizedModule):
            changed.append((attributes, "forward", attributes["forward"]))
            attributes["forward"] = part._orig_mod.__call__
        elif part._compiled_call_impl is not None:
            changed.append((attributes, "_compiled_call_impl", part._compiled_call_impl))
            attributes["_compiled_call_impl"] = None
    try:
        yield
    finally:
        for attributes, name, value in changed:
            attributes[name] = value


def _boxed(function: Callable) -> Callable:
    """A function under AOTAutograd's calling convention: it takes one list of arguments, and empties the list."""

    def call(args: list) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
