"""`explain`: a report on a captured, uncompiled model, with predicted times if a GPU is named."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import OptimizedModule
from torch._guards import CompileContext
from torch.fx import GraphModule

from fp4compile import _compat, hardware
from fp4compile.analysis.module_names import module_of
from fp4compile.capture import run_captured
from fp4compile.hardware import Gpu
from fp4compile.passes.manager import analyse, describe
from fp4compile.recipe import Recipe, resolve
from fp4compile.report import names
from fp4compile.report.report import NOTHING_CAPTURED, Report, Row, Seconds
from fp4compile.roofline.compiled_graph import predict_graph
from fp4compile.uncaptured import Uncaptured


def explain(
    model: Callable, *args: Any, recipe: str | dict | Recipe | Path | None = None, gpu: str | Gpu | None = None,
    all: bool = False, **kwargs: Any,
) -> Report:  # fmt: skip
    """Run model(*args, **kwargs) once, uncompiled; print and return the report of a recipe on its matmuls.

    Where gradients are enabled and a tensor requires them, the report has the matmuls of the backward pass too. Warns
    of each rule of the recipe that decides about no layer.

    A model on the meta device takes no memory and computes nothing: its tensors represent tensors on the GPU `gpu`. The
    key-value cache of a transformers model is off there, unless the call passes `use_cache=True`.

    model: a module or another callable, compiled or not.
    args, kwargs: the arguments of its call.
    recipe: as for `fp4compile.backend`.
    gpu: the GPU for which times are predicted, a name of `roofline.GPUS` or a `roofline.Gpu`; by default the GPU of
        this machine, if it is in `roofline.GPUS`.
    all: whether to print one line for each matmul instead of equal layers together.

    Raises the errors of `backend` for a bad recipe, ValueError for an unknown GPU and if Dynamo captures no graph of
    the model, and TypeError for a `gpu` of another type and a model that cannot be called.
    """
    chosen = resolve(recipe)
    target = hardware.present() if gpu is None else hardware.named(gpu)
    report = Report(chosen.name, graphs=0, gpu=None if target is None else target.name, rules=chosen.rules)
    made: dict[int, tuple[list[Row], Seconds | None]] = {}
    shown: list[tuple] = []
    cuda_graphs = _compat.cuda_graphs(_compat.compiled_with(model) if isinstance(model, OptimizedModule) else {})

    def look(module: GraphModule, known: names.Names, forward_outputs: int | None) -> Callable:
        rows = describe(module.graph, known.inputs, analyse(module.graph, chosen, known.inputs, target))
        rest = launches = None
        if target is not None:
            rows, rest, launches = predict_graph(module, known.inputs, rows, chosen, target, forward_outputs)
        report.graphs = (report.graphs or 0) + 1
        report.add(
            known.in_full(rows), {"find": len(rows)}, CompileContext.current_trace_id(), rest=rest,
            launches=None if cuda_graphs else launches,
        )  # fmt: skip
        made.setdefault(id(known), ([], rest))[0].extend(rows)
        shown.append((id(known), known.modules, known.prefix))
        return module.forward

    def enter(known: names.Names, now: names.Names) -> None:
        entry = (id(known), now.modules, now.prefix)
        if entry not in shown:  # Dynamo may run one part's graph for another part of the model
            shown.append(entry)
            rows, rest = made.get(id(known), ([], None))
            report.add(now.in_full(rows), {}, rest=rest)

    uncaptured = Uncaptured()
    with torch.random.fork_rng(), _without_cache_on_meta(model), uncaptured:
        run_captured(model, look, enter, running=uncaptured.ignored)(*args, **kwargs)
    root = module_of(model._orig_mod if isinstance(model, OptimizedModule) else model)
    report.outside = [] if root is None else uncaptured.layers(root)
    if report.graphs == 0:
        raise ValueError(f"model: no graph of it was captured. {NOTHING_CAPTURED}")
    print(report.table(all=all))
    for rule in report.unmatched_rules():
        warnings.warn(f"rule {rule.pattern!r} of recipe {chosen.name!r} decides for no layer", stacklevel=2)
    return report


@contextmanager
def _without_cache_on_meta(model: Any) -> Iterator[None]:
    """A context in which `use_cache` is False in transformers' configurations of a model on the meta device.

    Their cache starts as an empty tensor that the graph creates, which Dynamo does not support on the meta device.
    """
    parts = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    on_meta = any(
        parameter.is_meta for part in parts for parameter in part._parameters.values() if parameter is not None
    )
    configs: Iterator[Any] = (getattr(part, "config", None) for part in (parts if on_meta else ()))
    changed = {id(one): one for one in configs if getattr(one, "use_cache", None) is True}
    for config in changed.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in changed.values():
            config.use_cache = True
