"""Read symbolic sizes from the earliest tensors of a graph, so that no pass has to keep a later one for its size."""

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true

aten = torch.ops.aten


def read_sizes_of_operands(graph: Graph) -> None:
    """Let each `sym_size` of a result read an operand of the same size instead, so that it does not need the result."""
    for size in graph.find_nodes(op="call_function", target=aten.sym_size.int):
        source, dim = size.args
        length, found = source.meta["val"].shape[dim], source
        while found is not None:
            size.args = found, dim
            tensors = _tensors_before(found)
            found = next((each for each in tensors if _has_size(each, dim, length)), None)


def _tensors_before(node: Node) -> Iterator[Node]:
    """The tensors from which a node is computed, through nodes with several results."""
    for each in node.all_input_nodes:
        if isinstance(each.meta.get("val"), list | tuple):
            yield from _tensors_before(each)
        elif isinstance(each.meta.get("val"), torch.Tensor):
            yield each


def _has_size(node: Node, dim: int, length: int | torch.SymInt) -> bool:
    shape = node.meta["val"].shape
    return dim < len(shape) and statically_true(shape[dim] == length)
