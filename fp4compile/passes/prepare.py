"""Make the copy of A that a kernel reads, in a layout of its own, once for all products of that A.

Entry: `prepare(graph)`, which `lower` calls. `Candidate.prepared_with` names the layout. Q, K and V, or gate and up,
read one A: without this, each of their launches would be preceded by one that makes the copy anew.

The copy is shared only by products whose B are inputs of the graph, such as packed weights. A kernel that is launched
early (`templates.device.dependent_launch`) reads B at once. The launch before it, which makes the copy, has B among its
arguments, so that Inductor moves no kernel that writes B between the two; a shared copy has one B for all products.
"""

from collections.abc import Hashable, Iterator

import torch
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, Node

from fp4compile.analysis.graph import ScaledMM, scaled_mm_of
from fp4compile.analysis.views import value_key, view_of
from fp4compile.formats.operand import Arguments
from fp4compile.ops.matmul import SCALED_MM, operand
from fp4compile.passes.autotune import fastest
from fp4compile.templates.choose import named
from fp4compile.templates.multiply import prepare_a

_OPERANDS = (0, 1, 2, 4, 5, 6)  # arguments of a product: data, scales and outer scale of A, and of B


def prepare(graph: Graph) -> dict[Node, Node]:
    """Insert the launches that make shared copies of A; returns each product's copy of its A, where it shares one."""
    found: dict[Node, Node] = {}
    for products in _alike(graph):
        with graph.inserting_before(products[0]):
            found |= dict.fromkeys(products, _copy_of_a(products[0]))
    return found


def _alike(graph: Graph) -> Iterator[list[Node]]:
    """The products of one A, at least two, that read one layout of it, in the order of the graph."""
    alike: dict[Hashable, list[Node]] = {}
    changes = 0  # no product shares a copy that was made before a node that changes a tensor
    for node in graph.nodes:
        if node.target is SCALED_MM:
            key = _key(scaled_mm_of(node))
            if key is not None:
                alike.setdefault((changes, *key), []).append(node)
        changes += node.op == "call_function" and node.is_impure()
    return (products for products in alike.values() if len(products) > 1)


def _key(product: ScaledMM) -> tuple | None:
    """A key that is equal for products that can share a copy of A; None for a product that cannot share one."""
    choice = fastest(product) if product.on_gpu else None
    if choice is None or not (choice.settled and choice.traceable):
        return None
    candidate, problem = named(choice.kernel), product.problem()
    of_b = [view_of(part).root.op for part in (product.b.data, product.b.scales, product.b.outer) if part is not None]
    if candidate.prepared_with is None or not {"placeholder", "get_attr"}.issuperset(of_b):
        return None
    a = product.a
    of_a = [None if part is None else value_key(part) for part in (a.data, a.scales, a.outer)]
    layout = candidate.prepared_with(problem, choice.config)
    return *of_a, a.format, candidate.name, problem.compute_dtype, str(layout)


def _copy_of_a(node: Node) -> Node:
    """Insert, where the graph inserts nodes now, the launch that makes the copy of A for a product node."""
    choice, out_dtype = fastest(scaled_mm_of(node)), node.args[9]
    operands = [node.args[i] for i in _OPERANDS if node.args[i] is not None]

    def launched(*tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip((i for i in _OPERANDS if node.args[i] is not None), tensors, strict=True))
        a, b = (operand(*(given.get(first + i) for i in range(3)), node.args[first + 3]) for first in (0, 4))
        return prepare_a(Arguments(a, b, None, out_dtype), choice)

    trace = fwd_only(torch.func.functionalize(launched), [each.meta["val"] for each in operands])
    return node.graph.graph_copy(
        trace.graph, dict(zip(trace.graph.find_nodes(op="placeholder"), operands, strict=True))
    )
