"""Which operations are fused into the quantiser of a product, for the report.

`rewrite` notes the product's name on every node that replaces the product (`name_product`). `fuse_prologue` notes the
operations' names on the quantiser (`name_operations`). `fused(graph)` combines both.
"""

import operator
from collections.abc import Iterable

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fp4compile.analysis.graph import RESHAPES
from fp4compile.ops.quantize import QUANTIZE

_PRODUCT, _OPERATIONS = "fp4compile_product", "fp4compile_operations"


def name_product(product: Node) -> None:
    """Note a product's name in the joint graph in its metadata, which its replacements inherit."""
    product.meta[_PRODUCT] = product.name


def product_of(node: Node) -> str | None:
    """The name in the joint graph of the product that a node computes, or helps to compute; None for other nodes."""
    return node.meta.get(_PRODUCT)


def name_operations(quantise: Node, operations: Iterable[Node]) -> None:
    """Note the user's operations that a prologue computes, each once, on its quantiser."""
    quantise.meta[_OPERATIONS] = ", ".join(dict.fromkeys(map(_name, operations)))


def _name(operation: Node) -> str:
    """The user's name of an operation: "rms_norm" for a part of `aten._fused_rms_norm.default`."""
    target = operation.meta.get("original_aten", operation.target)
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return packet.__name__.removeprefix("_fused").strip("_")


def fused(graph: Graph) -> dict[str, str]:
    """The fused operations, such as "silu, mul", by the names of the products that read the quantiser's results."""
    found: dict[str, dict[str, None]] = {}
    for quantise in graph.find_nodes(op="call_function", target=QUANTIZE):
        operations, waiting = quantise.meta.get(_OPERATIONS), list(quantise.users)
        for node in waiting if operations is not None else ():
            for user in node.users:
                if user.target is operator.getitem or user.target in RESHAPES:
                    waiting.append(user)
                elif _PRODUCT in user.meta and getattr(user.target, "namespace", "") == "fp4compile":
                    found.setdefault(user.meta[_PRODUCT], {})[operations] = None
    return {product: "; ".join(operations) for product, operations in found.items()}
