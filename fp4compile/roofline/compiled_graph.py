"""Predicted times of a captured graph on a GPU that need not be there: what the backend would make of it, summed up.

Entry: `predict_graph(module, inputs, rows, recipe, gpu)`; only `explain` calls it, never a compilation. The graph is
compiled twice as far as Inductor's scheduler: as it is, and with this package's passes, which decide as for that GPU.
In training, Inductor's partitioner first splits it into a forward and a backward graph. `roofline.graph_steps` then
lists what is launched. A launch that several products need, such as the quantiser of the input of Q, K and V, is
charged to them in equal parts. Time that no product needs, of norms, activations and the like, is the `rest`.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from fp4compile import _compat
from fp4compile.analysis import flops
from fp4compile.analysis.gemm import Input
from fp4compile.analysis.graph import reached
from fp4compile.analysis.node_kinds import kind_of
from fp4compile.hardware import Gpu
from fp4compile.passes.hoist import HOIST, Hoisted
from fp4compile.passes.lib.base import run_passes
from fp4compile.passes.lib.notes import name_product, product_of
from fp4compile.passes.manager import JOINT, analyse, fuse, switched_off_passes
from fp4compile.recipe import Recipe
from fp4compile.report.report import GraphLaunches, Row, Seconds
from fp4compile.roofline.graph_steps import steps_of
from fp4compile.roofline.matmul_nodes import is_matmul, is_quantiser, lays_out_scales, named_results
from fp4compile.roofline.time_terms import LAUNCH
from fp4compile.templates.launch import dry_run


@dataclass
class _Time:
    """The predicted seconds of a product. parts: of each launch, its name, and the products that need it."""

    seconds: float = 0.0
    parts: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, seconds: float, needed_by: tuple[str, ...]) -> None:
        """Add the product's part of a launch."""
        self.seconds += seconds / len(needed_by)
        self.parts[name, needed_by] += seconds / len(needed_by)


@dataclass(frozen=True)
class _Times:
    """The predicted seconds of a graph: of each product, by its node's name in the captured graph, and of all else.

    launches: the number of launches. seconds: all predicted seconds together.
    """

    products: dict[str, _Time]
    rest: float
    launches: int
    seconds: float


def predict_graph(
    module: GraphModule, inputs: tuple[Input, ...], rows: list[Row], recipe: Recipe, gpu: Gpu,
    forward_outputs: int | None = None,
) -> tuple[list[Row], Seconds, GraphLaunches]:  # fmt: skip
    """(the rows of a captured graph with predicted times, the predicted times of all else, all planned launches).

    The graph stays as it is.

    forward_outputs: how many outputs of a joint graph the forward pass returns; None for an inference graph.
    """
    names = {row.node for row in rows}
    for node in module.graph.nodes:
        if node.name in names:
            name_product(node)

    with dry_run(gpu.target), _compat.lazy_graph_modules():
        unchanged = module if forward_outputs is None else _copy(module)  # the partitioner changes a joint graph
        plain = _times(_split(unchanged, forward_outputs), gpu)
        parts = _planned(_copy(module), inputs, recipe, gpu, forward_outputs)
        operations: dict[str, str] = {}
        for graph in parts.graphs:
            operations |= fuse(graph, switched_off_passes())[1]
        planned = _times(parts, gpu)
    modules = {row.node or "": row.module for row in rows}
    rows = [replace(row, fused=operations.get(row.node or "")) for row in rows]
    timed = [_timed(row, plain.products, planned.products, modules) for row in rows]
    launches = GraphLaunches(planned.launches, planned.seconds, LAUNCH * planned.launches)
    return timed, Seconds(plain.rest, planned.rest), launches


def _timed(row: Row, plain: dict[str, _Time], planned: dict[str, _Time], modules: dict[str, str]) -> Row:
    """A row with the predicted times of its product; unchanged for a product of unknown size.

    Nothing is launched for a product that is computed once for two equal ones.
    """
    if row.flops is None:
        return row
    before, after = (times.get(row.node or "", _Time()) for times in (plain, planned))
    shared = sum(seconds for (_, by), seconds in after.parts.items() if {modules[name] for name in by} != {row.module})
    launches = "; ".join(f"{name} / {len(by)}" if len(by) > 1 else name for name, by in after.parts)
    return replace(row, plain_seconds=before.seconds, seconds=after.seconds, shared_seconds=shared, launches=launches)


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
    """The graphs after all passes before those that lower, as the backend makes them."""
    disabled = switched_off_passes()
    run_passes(JOINT, module.graph, analyse(module.graph, recipe, inputs, gpu), disabled=disabled)
    parts = _split(module, forward_outputs)
    if forward_outputs is None and recipe.weight_cache != "off":
        static = range(len(inputs))  # of the inputs, only the tensors of packed layers count
        run_passes([HOIST], parts.graphs[0], inputs, Hoisted(), static, disabled=disabled)
    return parts


def _times(parts: _Parts, gpu: Gpu) -> _Times:
    products: dict[str, _Time] = defaultdict(_Time)
    rest = 0.0
    launched = [each for graph in parts.graphs for each in steps_of(graph, gpu)]
    for each in launched:
        needed_by = tuple(_products(each.node, parts))
        for product in needed_by:
            products[product].add(each.step.name, each.step.seconds, needed_by)
        if not needed_by:
            rest += each.step.seconds
    steps = [each.step for each in launched]
    return _Times(dict(products), rest, sum(step.launches for step in steps), sum(step.seconds for step in steps))


def _products(node: Node, parts: _Parts) -> list[str]:
    """The names of the products that a node is launched for; none for Inductor's kernels and other operators."""
    if kind_of(node) != "other":
        return []
    if is_quantiser(node) or lays_out_scales(node):
        return sorted(set(_readers(node, parts)))
    if not is_matmul(node) and not flops.count(node):
        return []
    return list(dict.fromkeys(name for name in map(product_of, named_results(node)) if name is not None))


def _readers(quantise: Node, parts: _Parts) -> Iterator[str]:
    """The products that read a quantiser's results, in its graph or in the next one."""

    def following(node: Node) -> Iterator[Node]:
        for user in node.users:
            if user.op == "output":
                places = (place for place, value in enumerate(_outputs(user.graph)) if value is node)
                yield from (parts.saved[place] for place in places if place in parts.saved)
            elif not is_quantiser(user):
                yield user

    def within(node: Node) -> Iterator[Node]:  # through views, and copies of outer scales
        return following(node) if node is quantise or kind_of(node) != "other" else iter(())

    for node in reached(quantise, within):
        if node is not quantise and kind_of(node) == "other":
            yield from _products(node, parts)
