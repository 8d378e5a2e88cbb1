"""Equal quantises of one value, of which a graph needs one."""

from dataclasses import fields

from torch.fx import Graph, Node

from fp4compile.analysis.views import value_key
from fp4compile.ops.nodes import Quantise, quantise_of
from fp4compile.ops.quantize import QUANTIZE


def share(graph: Graph) -> None:
    """Replace equal quantises of one value by the first of them."""
    first: dict[tuple, Node] = {}
    for found in quantises_of(graph):
        node = found.node
        kept = first.setdefault(key_of(found), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def key_of(found: Quantise, *apart: str) -> tuple:
    """A key that is equal for quantises of one value that differ at most in the arguments named by `apart`."""
    values = {"x": value_key(found.x), "offs": value_key(found.offs)}
    names = [each.name for each in fields(found) if each.name not in ("node", *apart)]
    return tuple(values.get(name, getattr(found, name)) for name in names)


def quantises_of(graph: Graph) -> list[Quantise]:
    """Every quantise of a graph, in order."""
    return [quantise_of(node) for node in graph.find_nodes(op="call_function", target=QUANTIZE)]
