"""Notes on nodes, from which the report collects the fusions of a matmul after the joint graph.

`rewrite` notes a matmul's name on every node that replaces the matmul (`name_product`), and on every quantise whose
result a wgrad reads (`mark`). `fuse_prologue` notes the operations' names on the quantiser, `fuse_quantize` on the
matmul that quantises its result (`name_operations`). `row_moves` notes moves of a quantiser's rows on the matmuls that
read them (`name_move`). `hoist` notes the weights that it has stacked (`note_joined`). `fused(graph)` lists the
operations that are fused into the quantisers of a matmul or, with "quantize" at the end, into the GEMM kernel, and the
moves that they precede or follow. `saved(graph)` lists the packed activations that the partitioner saves for the
backward: the marked quantises among a forward graph's outputs.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fp4compile.analysis.node_kinds import nbytes
from fp4compile.ops.matmul import SCALED_MM_RESULTS
from fp4compile.ops.nodes import RESHAPES, reached
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE

_JOINED = "fp4compile_joined"
_PRODUCT, _OPERATIONS, _SAVED_FOR = "fp4compile_product", "fp4compile_operations", "fp4compile_saved_for"
_MOVES = "fp4compile_moves"


def name_product(product: Node) -> None:
    """Note a matmul's name in the joint graph in its metadata, which its replacements inherit."""
    product.meta[_PRODUCT] = product.name


def product_of(node: Node) -> str | None:
    """The name in the joint graph of the matmul that a node computes, or helps to compute; None for other nodes."""
    return node.meta.get(_PRODUCT)


def note_joined(first: Node, second: Node, joined: tuple[Node, ...]) -> None:
    """Note on the codes of a weight the graph inputs that have these codes stacked on those of a second weight.

    joined: data and scales of both and, in a format with a global scale, the global scales of both.
    """
    first.meta[_JOINED] = (second.name, *(node.name for node in joined))


def joined_weights(first: Node, second: Node) -> tuple[Node | None, ...] | None:
    """Data, scales and global scales of two stacked weights, by the nodes of their codes.

    None where they are not stacked; None in place of global scales in a format without them.
    """
    noted = first.meta.get(_JOINED)
    if noted is None or noted[0] != second.name:
        return None
    inputs = {node.name: node for node in first.graph.find_nodes(op="placeholder")}
    found = [inputs.get(name) for name in noted[1:]]
    return None if None in found else (*found, *[None] * (3 - len(found)))


def name_operations(node: Node, operations: Iterable[Node], *more: str) -> None:
    """Note the user's operations that a quantiser or a matmul computes, each once, then `more` names."""
    node.meta[_OPERATIONS] = ", ".join([*dict.fromkeys(map(_name, operations)), *more])


def _name(operation: Node) -> str:
    """The user's name of an operation: "rms_norm" for a part of `aten._fused_rms_norm.default`."""
    target = operation.meta.get("original_aten", operation.target)
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return packet.__name__.removeprefix("_fused").strip("_")


def name_move(quantise: Node, moved: Node, text: str) -> None:
    """Note on the matmuls that read a quantiser's results whether its rows are quantised before or after a move.

    moved: the moved rows. A later text about them replaces an earlier one.
    """

    def readers(node: Node) -> list[Node]:
        return [] if _is_product(node) else [user for user in node.users if user.target is not QUANTIZE]

    for product in filter(_is_product, reached(quantise, readers)):
        product.meta[_MOVES] = {**product.meta.get(_MOVES, {}), moved.name: text}


def _is_product(node: Node) -> bool:
    """Whether a node computes a matmul that has a name."""
    ours = getattr(node.target, "namespace", "") == "fp4compile"
    return ours and _PRODUCT in node.meta and node.target not in (QUANTIZE, LAY_OUT_SCALES)


def fused(graph: Graph) -> dict[str, str]:
    """The fused operations, such as "silu, mul", by the names of the matmuls that read the quantiser's results.

    "silu, mul, quantize" for a matmul that computes them itself, "silu, mul, amax" for one that finds the largest
    magnitude for the next quantiser. Moves of the quantiser's rows follow, such as
    "quantised before index".
    """
    found: dict[str, dict[str, None]] = {}
    for product in graph.find_nodes(op="call_function", target=SCALED_MM_RESULTS):
        if _OPERATIONS not in product.meta:
            continue
        found.setdefault(product.meta.get(_PRODUCT, product.name), {})[product.meta[_OPERATIONS]] = None
    for quantise in graph.find_nodes(op="call_function", target=QUANTIZE):
        operations, waiting = quantise.meta.get(_OPERATIONS), list(quantise.users)
        for node in waiting if operations is not None else ():
            for user in node.users:
                if user.target is operator.getitem or user.target in RESHAPES:
                    waiting.append(user)
                elif _is_product(user):
                    found.setdefault(user.meta[_PRODUCT], {})[operations] = None
    for node in filter(_is_product, graph.nodes):
        for text in node.meta.get(_MOVES, {}).values():
            found.setdefault(node.meta[_PRODUCT], {})[text] = None
    return {product: "; ".join(operations) for product, operations in found.items()}


@dataclass(frozen=True)
class Saved:
    """A packed activation that is saved for the backward.

    wgrad: name, in the joint graph, of the wgrad node that reads it. packed: its size in bytes, scales included.
    plain: the size in bytes of the activation in its own dtype.
    """

    wgrad: str
    packed: int
    plain: int


def mark(quantise: Node, wgrad: str) -> None:
    """Note on a quantise the name of the wgrad that reads it, or of the first wgrad where layers share their input."""
    quantise.meta.setdefault(_SAVED_FOR, wgrad)


def saved(graph: Graph) -> list[Saved]:
    """The packed activations among the outputs of a forward graph. Sizes that vary count as in the captured call."""
    sizes: dict[Node, int] = {}
    for node in torch.utils._pytree.tree_leaves(graph.output_node().args):
        if isinstance(node, Node) and node.target is operator.getitem and _SAVED_FOR in node.args[0].meta:
            quantise = node.args[0]
            sizes[quantise] = sizes.get(quantise, 0) + nbytes(node)
    found = [Saved(node.meta[_SAVED_FOR], size, nbytes(node.args[0])) for node, size in sizes.items()]
    return [entry for entry in found if entry.packed and entry.plain]
