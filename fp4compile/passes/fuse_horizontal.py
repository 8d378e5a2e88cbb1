"""Let products that share their activations be one launch: `scaled_mm` nodes become one `scaled_mm_horizontal`.

Entry: `fuse_horizontal(graph)`, on a forward, backward or inference graph after the partitioner, when products that take a
epilogue have theirs, and before memory is written over: as long as nothing is, a node can be moved.

It is for the few rows of a decode step, where launching Q, K and V one after the other takes longer than reading their
weights. The products' own kernel says which ones can be launched together (`templates.scaled_mm_horizontal.common`).
They are put where the first one stands; what the others have of their own (weights, scales, bias) and is computed later
is moved before it, which must not depend on a product of the launch.
"""

import operator

from torch.fx import Graph, Node

from fp4compile.passes.graph import SCALED_MM, SCALED_MM_HORIZONTAL, new_node, scaled_mm_of
from fp4compile.passes.views import value_key
from fp4compile.templates.gemm.streaming import MOST_IN_GROUP

_OWN = (4, 5, 6, 8)  # arguments of a product that the others do not share: B, its scales, its outer scale, the bias


def fuse_horizontal(graph: Graph) -> int:
    """Replace products of the same activations by one node; returns how many nodes there are for several products."""
    alike: dict[tuple, list[Node]] = {}
    changes = 0  # nothing is moved past what changes a tensor or draws random numbers
    for node in graph.nodes:
        if node.target is SCALED_MM:
            key = _key(node)
            if key is not None:
                alike.setdefault((changes, *key), []).append(node)
        changes += node.op == "call_function" and node.is_impure()
    return sum(map(_merge, alike.values()))


def _key(node: Node) -> tuple | None:
    """Equal for products that can be one launch; None for a product that cannot be part of one."""
    product = scaled_mm_of(node)
    if not product.on_gpu or product.b.format is None:
        return None
    choice = product.choice()
    if choice.group is None:
        return None
    a = product.a
    of_a = [None if part is None else value_key(part) for part in (a.data, a.scales, a.outer)]
    return *of_a, a.format, product.out_dtype, choice.kernel, choice.group


def _merge(products: list[Node]) -> int:
    """Replace products that are alike, as many at a time as a launch can have."""
    merged = 0
    while products:
        first, *others = sorted(products)  # what was moved for others may have changed the order
        members, left = [first], []
        for product in others:
            fits = len(members) < MOST_IN_GROUP and _gather(product, members)
            (members if fits else left).append(product)
        products = left
        if len(members) > 1:
            _replace(members)
            merged += 1
    return merged


def _gather(product: Node, members: list[Node]) -> bool:
    """Move what a product needs beside A before the first of the members; returns whether that is possible."""
    first = members[0]
    late: set[Node] = set()
    waiting = [product.args[i] for i in _OWN]
    while waiting:
        node = waiting.pop()
        if node is None or node < first or node in late:
            continue
        if node in members:
            return False
        late.add(node)
        waiting += node.all_input_nodes
    for node in sorted(late):
        first.prepend(node)
    return True


def _replace(products: list[Node]) -> None:
    first = products[0]
    own = [[product.args[i] for product in products] for i in _OWN]
    b, b_scales, b_outer, bias = ([] if each[0] is None else each for each in own)
    a = first.args[:4]
    with first.graph.inserting_before(first):
        together = new_node(
            first.graph,
            SCALED_MM_HORIZONTAL,
            (*a, b, b_scales, b_outer, first.args[7], bias, first.args[9]),
            first.meta,
        )
        outputs = [
            new_node(first.graph, operator.getitem, (together, i), product.meta) for i, product in enumerate(products)
        ]
    for product, output in zip(products, outputs, strict=True):
        product.replace_all_uses_with(output)
        product.graph.erase_node(product)
