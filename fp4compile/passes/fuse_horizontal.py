"""Horizontal fusion: matmuls of one A become one launch, and their nodes one `scaled_mm_results`.

Entry: `fuse_horizontal(graph)`, on a forward, backward or inference graph after the partitioner. It runs after epilogue
fusion, because a matmul in a horizontal group has no epilogue, and before `inplace`: a node can be moved only as long
as nothing overwrites memory.

The pass is for the few rows of a decode step, where separate launches of Q, K and V take longer than reading their
weights. `Choice.group` says which matmuls can share a launch. The fused node replaces the first matmul. The other
matmuls' operands besides A (weights, scales, bias) are moved before it if they are computed later. They must not depend
on a matmul of the horizontal group.
"""

import operator

from torch.fx import Graph, Node

from fp4compile.analysis.views import value_key
from fp4compile.formats.grouping import Grouping
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import new_node, new_several, scaled_mm_of
from fp4compile.templates.gemm.candidate import MOST_IN_GROUP


def fuse_horizontal(graph: Graph) -> int:
    """Replace matmuls of one A by one node; returns the number of horizontal groups."""
    alike: dict[tuple, list[Node]] = {}
    changes = 0  # no node is moved past a node that changes a tensor or draws random numbers
    for node in graph.nodes:
        if node.target is SCALED_MM:
            key = _key(node)
            if key is not None:
                alike.setdefault((changes, *key), []).append(node)
        changes += node.op == "call_function" and node.is_impure()
    return sum(map(_fuse_alike, alike.values()))


def _key(node: Node) -> tuple | None:
    """A key that is equal for matmuls that can share a launch; None for a matmul that cannot share one."""
    product = scaled_mm_of(node)
    dense = product.spec.grouping in (Grouping.DENSE, Grouping.BATCHED)
    if not (dense and product.alone) or not product.on_gpu or product.b.format is None:
        return None
    choice = product.choice
    if choice.group is None:
        return None
    of_a = map(value_key, product.a.tensors)
    return *of_a, product.a.format, product.spec.out_dtype, choice.kernel, choice.group


def _fuse_alike(products: list[Node]) -> int:
    """Replace matmuls of one `_key`, as many as a launch takes; returns the number of horizontal groups."""
    groups = 0
    while products:
        first, *others = sorted(products)  # moves for earlier horizontal groups may have changed the order
        group, left = [first], []
        for product in others:
            fits = len(group) < MOST_IN_GROUP and _gather(product, group)
            (group if fits else left).append(product)
        products = left
        if len(group) > 1:
            _replace(group)
            groups += 1
    return groups


def _gather(product: Node, group: list[Node]) -> bool:
    """Move a matmul's operands besides A before the horizontal group's first matmul; returns whether it can."""
    first = group[0]
    late: set[Node] = set()
    own = scaled_mm_of(product)
    waiting = [*own.b.tensors, own.bias]
    while waiting:
        node = waiting.pop()
        if node is None or node < first or node in late:
            continue
        if node in group:
            return False
        late.add(node)
        waiting += node.all_input_nodes
    for node in sorted(late):
        first.prepend(node)
    return True


def _replace(products: list[Node]) -> None:
    first = products[0]
    with first.graph.inserting_before(first):
        together = new_several(first.graph, list(map(scaled_mm_of, products)), first.meta)
        outputs = [
            new_node(first.graph, operator.getitem, (together, i), product.meta) for i, product in enumerate(products)
        ]
    for product, output in zip(products, outputs, strict=True):
        product.replace_all_uses_with(output)
        product.graph.erase_node(product)
