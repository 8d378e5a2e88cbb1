"""Look at a model's graphs without compiling them: `explain` reports, `observe` watches activations.

Both capture with Dynamo and AOTAutograd under Inductor's decompositions, so that they see the graphs that the
backend will see, and then run those graphs as they are.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule

from fp4compile.backend import record_inputs
from fp4compile.passes.find import Input
from fp4compile.passes.manager import analyse, describe
from fp4compile.passes.plan import Decision
from fp4compile.recipe import Recipe, unmatched_rules
from fp4compile.recipe_io import resolve
from fp4compile.report import Report

# Takes a captured graph and its inputs, returns what shall run in its place.
GraphRunner = Callable[[GraphModule, tuple[Input, ...]], Callable]


def explain(model: Callable, *args: Any, recipe: str | dict | Recipe | None = None, **kwargs: Any) -> Report:
    """Run model(*args, **kwargs) once, uncompiled, and print and return what the recipe would do to its products.

    With gradients enabled (and something to train) the backward products are reported too.
    recipe: as for `fp4compile.backend`. Raises what `backend` raises for a bad recipe.
    """
    chosen = resolve(recipe)
    report = Report(chosen.name)

    def look(module: GraphModule, inputs: tuple[Input, ...]) -> Callable:
        rows = [describe(decision) for decision in analyse(module.graph, chosen, inputs)]
        report.add(rows, {"find": len(rows)})
        return module.forward

    with torch.random.fork_rng():
        run_captured(model, look)(*args, **kwargs)
    print(report)
    for rule in unmatched_rules(chosen, {row.module for row in report.rows}):
        warnings.warn(f"rule {rule.pattern!r} of recipe {chosen.name!r} decides for no layer", stacklevel=2)
    return report


def observe(model: Callable, recipe: Recipe, see: Callable[[Decision, torch.Tensor], None]) -> Callable:
    """The model as a function that calls `see` with every quantised fprop and the activation that enters it."""

    def watch(module: GraphModule, inputs: tuple[Input, ...]) -> Callable:
        products = [d for d in analyse(module.graph, recipe, inputs) if d.gemm.product == "fprop"]
        return _Watcher(module, [d for d in products if d.gemm.packed is None], see).run

    return run_captured(model, watch)


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


def run_captured(model: Callable, runner: GraphRunner) -> Callable:
    """The model, with every captured joint or inference graph handed to `runner` and run as that says."""

    def capturing_backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        inputs = record_inputs(gm, example_inputs)

        def partition(joint: GraphModule, joint_inputs: Any, **kwargs: Any):
            runner(joint, inputs)
            kwargs.pop("static_lifetime_input_indices", None)
            return default_partition(joint, joint_inputs, **kwargs)

        compiler = aot_autograd(
            fw_compiler=lambda module, _: _boxed(module.forward),
            bw_compiler=lambda module, _: _boxed(module.forward),
            inference_compiler=lambda module, _: _boxed(runner(module, inputs)),
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        return compiler(gm, example_inputs)

    return torch.compile(model, backend=capturing_backend)


def _boxed(function: Callable) -> Callable:
    """AOTAutograd's calling convention: one list, emptied by the callee."""

    def call(args: list) -> Any:
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True
    return call
