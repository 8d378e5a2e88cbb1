"""Look at a model's graphs without compiling them: `explain` reports, `observe` watches activations.

Both capture with Dynamo and AOTAutograd under Inductor's decompositions, so that they see the graphs that the
backend will see, and then run those graphs as they are.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._guards import CompileContext
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp4compile import names
from fp4compile.passes.find import Input, find
from fp4compile.passes.manager import analyse, describe
from fp4compile.passes.plan import Decision, plan
from fp4compile.recipe import Recipe, resolve, unmatched_rules
from fp4compile.report import NOTHING_CAPTURED, Report, Row

# Takes a captured graph and the names of its inputs, returns what shall run in its place.
GraphRunner = Callable[[GraphModule, names.Names], Callable]


def explain(model: Callable, *args: Any, recipe: str | dict | Recipe | None = None, **kwargs: Any) -> Report:
    """Run model(*args, **kwargs) once, uncompiled, and print and return what the recipe would do to its products.

    With gradients enabled (and something to train) the backward products are reported too.
    recipe: as for `fp4compile.backend`. Raises what `backend` raises for a bad recipe, ValueError if Dynamo captures
    no graph of the model.
    """
    chosen = resolve(recipe)
    report = Report(chosen.name, graphs=0)
    made: dict[int, list[Row]] = {}
    shown: list[tuple] = []

    def look(module: GraphModule, known: names.Names) -> Callable:
        rows = describe(module.graph, known.inputs, analyse(module.graph, chosen, known.inputs))
        report.graphs += 1
        report.add(known.in_full(rows), {"find": len(rows)}, CompileContext.current_trace_id())
        made.setdefault(id(known), []).extend(rows)
        shown.append((id(known), known.modules, known.prefix))
        return module.forward

    def enter(known: names.Names, now: names.Names) -> None:
        entry = (id(known), now.modules, now.prefix)
        if entry not in shown:  # Dynamo runs a graph that it has, for another part of the model
            shown.append(entry)
            report.add(now.in_full(made.get(id(known), [])), {})

    with torch.random.fork_rng():
        run_captured(model, look, enter)(*args, **kwargs)
    if report.graphs == 0:
        raise ValueError(f"model: no graph of it was captured. {NOTHING_CAPTURED}")
    print(report)
    for rule in unmatched_rules(chosen, {row.name or row.module for row in report.rows}):
        warnings.warn(f"rule {rule.pattern!r} of recipe {chosen.name!r} decides for no layer", stacklevel=2)
    return report


def observe(model: Callable, recipe: Recipe, see: Callable[[Decision, torch.Tensor], None]) -> Callable:
    """The model as a function that calls `see` with every fprop that reads a static scale, and its activation.

    recipe: with static activation scales. What it leaves alone is not seen.
    """

    def watch(module: GraphModule, known: names.Names) -> Callable:
        return _Watcher(module, _with_static_scale(module.graph, recipe, known.inputs), see).run

    return run_captured(model, watch)


def _with_static_scale(graph: torch.fx.Graph, recipe: Recipe, inputs: tuple[Input, ...]) -> list[Decision]:
    gemms = find(graph, inputs)
    # With a scale for everyone, whoever is quantised and has none needs none.
    scales = {gemm.module: 1.0 for gemm in gemms if gemm.product == "fprop"}
    decisions = plan(gemms, recipe.replace(static_scales=scales), inputs)
    return [d for d in decisions if any(t is not None and t.outer is not None for t in (d.left, d.right))]


class _Watcher(torch.fx.Interpreter):
    def __init__(self, module: GraphModule, decisions: list[Decision], see):
        super().__init__(module)
        self.watched: dict[torch.fx.Node, list[Decision]] = {}
        for decision in decisions:
            gemm = decision.gemm
            activation = gemm.left if gemm.left.role == "fprop_x" else gemm.right
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
    """The model, with every captured joint or inference graph handed to `runner` and run as that says.

    enter: called at each run of a graph, with the names of its inputs when it was captured and those of this run.
    Where the model or a part of it is compiled already, its original is captured.
    """
    model = model._orig_mod if isinstance(model, OptimizedModule) else model
    root = model if isinstance(model, torch.nn.Module) else None

    def capturing_backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        known = names.record(gm, example_inputs, root)

        def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any):
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
    """Let the modules that are compiled already run uncompiled."""
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
    """AOTAutograd's calling convention: one list, emptied by the callee."""

    def call(args: list) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True
    return call
