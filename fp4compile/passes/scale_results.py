"""Move a multiplication by a power of two from an operand of a matmul to its result, where the result is smaller.

Entry: `scale_results(graph)`, on a forward or backward graph after the partitioner.

An adapter multiplies its output by a number, such as 2. So its backward pass multiplies the gradient of the layer's
output by that number, and stores a tensor of the gradient's size, for two matmuls with small results: the gradients of
the adapter's second matrix and of that matrix's input. For a Llama-3-8B with adapters on all linear layers that is 336
MiB a block and 4096 tokens, of which 224 MiB are in memory at the peak of a training step.

A power of two only changes exponents. The bits of the results are the same, unless a number overflows or is too small
to be normal: below 2^-126 in magnitude.
"""

import math

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.ops.nodes import RESHAPES, new_node, readers
from fp4compile.passes.lib.operations import same_shape

aten = torch.ops.aten
_VIEWS = (*RESHAPES, aten.permute.default, aten.t.default, aten.transpose.int)
_DTYPES = (torch.bfloat16, torch.float32)  # with exponents of eight bits
_MOST_BITS = 32  # the largest change of an exponent


def scale_results(graph: Graph) -> int:
    """Move multiplications behind matmuls; returns the number of multiplications."""
    count = 0
    for scaled in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        products = _readers(scaled) if _by_power_of_two(scaled) else []
        if products and all(_is_smaller_product(product, scaled) for product in products):
            _scale(products, scaled)
            count += 1
    return count


def _by_power_of_two(node: Node) -> bool:
    x, factor = node.args
    if not isinstance(x, Node) or not isinstance(factor, int | float) or factor == 0:
        return False
    fraction, exponent = math.frexp(abs(factor))
    value, source = node.meta["val"], x.meta["val"]
    exact = fraction == 0.5 and abs(exponent - 1) <= _MOST_BITS and value.dtype == source.dtype in _DTYPES
    return exact and same_shape(value.shape, source.shape) and same_shape(value.stride(), source.stride())


def _readers(node: Node) -> list[Node]:
    """The nodes that read a node or a view of it; a matmul of a node with itself, twice."""
    found = readers(node, _VIEWS)
    return [user for user, value in found for _ in range(max(sum(arg is value for arg in user.args), 1))]


def _is_smaller_product(reader: Node, scaled: Node) -> bool:
    product = reader.target is aten.mm.default
    return product and statically_true(reader.meta["val"].numel() < scaled.meta["val"].numel())


def _scale(products: list[Node], scaled: Node) -> None:
    """Let the matmuls read the node that is multiplied, and multiply their results."""
    x, factor = scaled.args
    scaled.replace_all_uses_with(x)
    scaled.graph.erase_node(scaled)
    for product in products:
        with product.graph.inserting_after(product):
            result = new_node(product.graph, aten.mul.Tensor, (product, factor), product.meta)
        product.replace_all_uses_with(result, lambda user, result=result: user is not result)
