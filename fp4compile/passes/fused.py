"""Which operations the quantiser of a product computes first, for the report.

`rewrite` names the product on every node that takes the product's place (`name_product`), and `fuse_prologue` the
operations on the quantiser (`name_operations`). `fused(graph)` puts the two together.
"""

import operator
from collections.abc import Iterable, Sequence

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fp4compile.analysis.graph import QUANTIZE_GROUPED_PROLOGUE, QUANTIZE_PROLOGUE, RESHAPES

_PRODUCT, _OPERATIONS = "fp4compile_product", "fp4compile_operations"


def name_product(product: Node) -> None:
    """Note on a product its name in the joint graph; nodes that take its metadata have it too."""
    product.meta[_PRODUCT] = product.name


def name_operations(quantise: Node, operations: Iterable[Node]) -> None:
    """Note on a quantiser with a prologue what it computes, each once: operations as the user's program has them."""
    quantise.meta[_OPERATIONS] = ", ".join(dict.fromkeys(map(_name, operations)))


def name_results(quantise: Node, apart: Sequence[Node]) -> None:
    """Note on a quantiser with several results what it computes for each, as nodes with one result have it."""
    quantise.meta[_OPERATIONS] = tuple(node.meta[_OPERATIONS] for node in apart)


def _operations(quantise: Node, number: int) -> str:
    """What a quantiser computes for one of its outputs."""
    named = quantise.meta[_OPERATIONS]
    if isinstance(named, str):
        return named
    own = (len(quantise.meta["val"]) - len(quantise.kwargs.get("stored") or ())) // len(named)
    return named[min(number // own, len(named) - 1)]


def _name(operation: Node) -> str:
    """ "rms_norm" for an operation that comes of `aten._fused_rms_norm.default`."""
    target = operation.meta.get("original_aten", operation.target)
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return packet.__name__.removeprefix("_fused").strip("_")


def fused(graph: Graph) -> dict[str, str]:
    """Operations such as "silu, mul", by the names of the products that read the quantiser's results."""
    found: dict[str, dict[str, None]] = {}
    ops = QUANTIZE_PROLOGUE, QUANTIZE_GROUPED_PROLOGUE
    for quantise in (node for op in ops for node in graph.find_nodes(op="call_function", target=op)):
        waiting = [(output, _operations(quantise, output.args[1])) for output in quantise.users]
        for node, operations in waiting:
            for user in node.users:
                if user.target is operator.getitem or user.target in RESHAPES:
                    waiting.append((user, operations))
                elif _PRODUCT in user.meta and getattr(user.target, "namespace", "") == "fp4compile":
                    found.setdefault(user.meta[_PRODUCT], {})[operations] = None
    return {product: "; ".join(operations) for product, operations in found.items()}
