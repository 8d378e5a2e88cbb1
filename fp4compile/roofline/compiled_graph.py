"""Predicted times of a captured graph on a GPU, local or not: the sum over the launches of the compiled graph.

Entry: `predict_graph(module, inputs, rows, recipe, gpu)`; only `explain` calls it, never a compilation. The graph is
compiled twice up to Inductor's scheduler: unchanged, and with this package's passes, which decide for that GPU. In
training, Inductor's partitioner first splits it into a forward and a backward graph. `roofline.graph_steps` then lists
the launches. A launch that several matmuls need, such as the quantiser of the input of Q, K and V, is charged to them
in equal parts. Launches that no matmul needs, such as norms and activations, are the `rest`.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fp4compile import _compat
from fp4compile.analysis import flops
from fp4compile.analysis.gemm import Input
from fp4compile.analysis.node_kinds import kind_of
from fp4compile.hardware import Gpu
from fp4compile.ops.nodes import PRODUCTS, reached
from fp4compile.ops.quantize import DEQUANTIZE, LAY_OUT_SCALES, QUANTIZE
from fp4compile.passes.hoist import Hoisted, hoist
from fp4compile.passes.lib.base import run_passes
from fp4compile.passes.lib.notes import name_product, product_of
from fp4compile.passes.manager import JOINT, analyse, fuse, switched_off_passes
from fp4compile.recipe import Recipe
from fp4compile.report.report import GraphLaunches, Row, Seconds
from fp4compile.roofline.graph_steps import steps_of
from fp4compile.roofline.matmul_steps import named_results
from fp4compile.roofline.time_terms import LAUNCH, TimedStep
from fp4compile.templates.launch import dry_run

# The launches of a graph: each with its step, and the matmuls that need it, by node names of the captured graph.
_Launches = list[tuple[TimedStep, tuple[str, ...]]]


def predict_graph(
    module: GraphModule, inputs: tuple[Input, ...], rows: list[Row], recipe: Recipe, gpu: Gpu,
    forward_outputs: int | None = None,
) -> tuple[list[Row], Seconds, GraphLaunches]:  # fmt: skip
    """(the rows of a captured graph with predicted times, the predicted times of the rest, all planned launches).

    The graph is not changed.

    forward_outputs: how many outputs of a joint graph the forward pass returns; None for an inference graph.
    """
    names = {row.node for row in rows}
    for node in module.graph.nodes:
        if node.name in names:
            name_product(node)

    with dry_run(gpu.target), _compat.lazy_graph_modules():
        unchanged = module if forward_outputs is None else _copy(module)  # the partitioner changes a joint graph
        before = _launches(_split(unchanged, forward_outputs), gpu)
        parts = _planned(_copy(module), inputs, recipe, gpu, forward_outputs)
        operations: dict[str, str] = {}
        for graph in parts.graphs:
            operations |= fuse(graph, switched_off_passes())[1]
        after = _launches(parts, gpu)
    plain, planned = map(_by_product, (before, after))
    modules = {row.node or "": row.module for row in rows}
    rows = [replace(row, fused=operations.get(row.node or "")) for row in rows]
    timed = [_timed(row, plain.get(row.node, []), planned.get(row.node, []), modules) for row in rows]
    rest = (sum(step.seconds for step, by in launches if not by) for launches in (before, after))
    count, seconds = (sum(getattr(step, name) for step, _ in after) for name in ("launches", "seconds"))
    return timed, Seconds(*rest), GraphLaunches(int(count), seconds, LAUNCH * count)


def _timed(row: Row, plain: _Launches, planned: _Launches, modules: dict[str, str]) -> Row:
    """A row with the predicted times of its matmul; unchanged for a matmul of unknown size.

    Of two equal matmuls, one is computed; the other has no launches.
    """
    if row.flops is None:
        return row
    shared = [(step, by) for step, by in planned if {modules[name] for name in by} != {row.module}]
    before, after, others = (sum(step.seconds / len(by) for step, by in each) for each in (plain, planned, shared))
    names = dict.fromkeys((step.name, by) for step, by in planned)
    launches = "; ".join(f"{name} / {len(by)}" if len(by) > 1 else name for name, by in names)
    return replace(row, plain_seconds=before, seconds=after, shared_seconds=others, launches=launches)


def _copy(module: GraphModule) -> GraphModule:
    """A copy of the graph, whose nodes have the names and the metadata of its nodes."""
    graph = Graph()
    values, output = graph.graph_copy(module.graph, {}, return_output_node=True)
    graph.output(values).meta = copy.copy(output.meta)
    return GraphModule(module, graph)


@dataclass(frozen=True)
class _Parts:
    """The graphs that a captured graph is split into.

    saved: the inputs of the backward graph, by the positions of the forward graph's outputs that they are.
    """

    graphs: list[Graph]
    saved: dict[int, Node] = field(default_factory=dict)


def _split(module: GraphModule, forward_outputs: int | None) -> _Parts:
    """Split a joint graph as Inductor does."""
    if forward_outputs is None:
        return _Parts([module.graph])
    parts = min_cut_rematerialization_partition(module, (), compiler="inductor", num_fwd_outputs=forward_outputs)
    forward, backward = (part.graph for part in parts)
    inputs = {node.name: node for node in backward.find_nodes(op="placeholder")}
    saved = {place: inputs[value.name] for place, value in enumerate(_outputs(forward))
             if isinstance(value, Node) and value.name in inputs}  # fmt: skip
    return _Parts([forward, backward], saved)


def _outputs(graph: Graph) -> list:
    return pytree.tree_leaves(graph.output_node().args, is_leaf=lambda leaf: leaf is None)


def _planned(
    module: GraphModule, inputs: tuple[Input, ...], recipe: Recipe, gpu: Gpu, forward_outputs: int | None
) -> _Parts:  # fmt: skip
    """The graphs after all passes except lowering, as in the backend."""
    disabled = switched_off_passes()
    run_passes(JOINT, module.graph, analyse(module.graph, recipe, inputs, gpu), disabled=disabled)
    parts = _split(module, forward_outputs)
    if forward_outputs is None and recipe.weight_cache != "off":
        static = range(len(inputs))  # of the inputs, only tensors of packed layers matter
        run_passes([hoist], parts.graphs[0], inputs, Hoisted(), static, disabled=disabled)
    return parts


def _launches(parts: _Parts, gpu: Gpu) -> _Launches:
    return [(step, tuple(_products(node, parts))) for graph in parts.graphs for node, step in steps_of(graph, gpu)]


def _by_product(launches: _Launches) -> dict[str | None, _Launches]:
    """The launches that each matmul needs."""
    found: dict[str | None, _Launches] = {}
    for step, by in launches:
        for name in by:
            found.setdefault(name, []).append((step, by))
    return found


def _products(node: Node, parts: _Parts) -> list[str]:
    """The names of the matmuls that a node is launched for; none for Inductor's kernels and other operators."""
    if kind_of(node) != "other":
        return []
    if node.target in (QUANTIZE, LAY_OUT_SCALES, DEQUANTIZE):
        return sorted(set(_readers(node, parts)))
    if node.target not in PRODUCTS and not flops.count(node):
        return []
    return list(dict.fromkeys(name for name in map(product_of, named_results(node)) if name is not None))


def _readers(quantise: Node, parts: _Parts) -> Iterator[str]:
    """The matmuls that read a quantiser's results, in its graph or in the next one."""

    def following(node: Node) -> Iterator[Node]:
        for user in node.users:
            if user.op == "output":
                places = (place for place, value in enumerate(_outputs(user.graph)) if value is node)
                yield from (parts.saved[place] for place in places if place in parts.saved)
            elif user.target is not QUANTIZE:
                yield user

    def within(node: Node) -> Iterator[Node]:  # through views, and copies of global scales
        return following(node) if node is quantise or kind_of(node) != "other" else iter(())

    for node in reached(quantise, within):
        if node is not quantise and kind_of(node) == "other":
            yield from _products(node, parts)
