"""Read the operators that multiply expert groups: which tensors they multiply, and along which dimension groups lie.

Two are supported; the library that defines the second one is not imported:

    aten._grouped_mm(a, b, offs, bias) -> product
    transformers::grouped_mm_fallback(input, weight, offs) -> input x weight, groups of rows, in any dtype
    transformers::grouped_mm_fallback_backward(input, weight, offs, grad_output)
        -> (grad_output x weight^T, input^T x grad_output): two products, each of them a result of one node

Entry: `is_grouped(target)`, then `why_unread(node)`; `factors_of(node)` reads the node of one product.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

aten = torch.ops.aten
_GROUPS = {(2, 3): "rows", (2, 2): "contraction", (3, 3): None}  # by the operands' dimensions
# The arguments, which are all tensors, and the number of results, by operator name.
_FALLBACKS = {
    "transformers::grouped_mm_fallback": (("input", "weight", "offs"), 1),
    "transformers::grouped_mm_fallback_backward": (("input", "weight", "offs", "grad_output"), 2),
}


@dataclass(frozen=True)
class Factor:
    """An operand of a product: the value of `node`, with the last two dimensions exchanged where `swapped`."""

    node: Node
    swapped: bool = False

    @property
    def shape(self) -> tuple:
        *batch, rows, columns = self.node.meta["val"].shape
        return (*batch, columns, rows) if self.swapped else (*batch, rows, columns)


@dataclass(frozen=True)
class Factors:
    """A product a @ b.

    groups: where groups lie, "rows" or "contraction"; groups and offs are None without groups.
    swapped: whether the graph has the product's transpose. Where groups are columns, W @ x is read as (x^T @ W^T)^T.
    """

    a: Factor
    b: Factor
    offs: Node | None = None
    groups: str | None = None
    swapped: bool = False


def is_grouped(target: Callable) -> bool:
    """Whether an operator is a grouped matmul with a known signature."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    signature = tuple(argument.name for argument in schema.arguments), len(schema.returns)
    return target is aten._grouped_mm.default or _FALLBACKS.get(schema.name) == signature


def computed_by(node: Node) -> Node:
    """The node of the operator that computes a value: the node itself, or the multi-output node of a `getitem`."""
    return node.args[0] if node.target is operator.getitem else node


def why_unread(node: Node) -> str | None:
    """Why the products of a grouped operator are not read; None where they are."""
    if node.target is not aten._grouped_mm.default:
        return _why_fallback_unread(node)
    _, _, offs, bias = _arguments(node)
    if bias is not None:  # torch has the argument, and raises an error where it is given
        return "grouped matmul with a bias"
    return None if offs is None else _why_offsets_unread(offs)


def factors_of(node: Node) -> Factors | None:
    """The grouped product of a node; None for any other node, and where `why_unread` returns a reason."""
    made = computed_by(node)
    if not is_grouped(made.target) or why_unread(made):
        return None
    if made.target is aten._grouped_mm.default:
        a, b, offs, _ = _arguments(made)
        ranks = (a.meta["val"].dim(), b.meta["val"].dim())
        if ranks == (3, 2):  # groups are columns of b, which are rows of its transpose
            return Factors(Factor(b, swapped=True), Factor(a, swapped=True), offs, "rows", swapped=True)
        return Factors(Factor(a), Factor(b), offs, _GROUPS[ranks])
    x, weight, offs, *gradient = made.args
    if not gradient:
        return Factors(Factor(x), Factor(weight), offs, "rows")
    if made is node:
        return None  # both gradients; each is a product of its own
    if node.args[1] == 0:
        return Factors(Factor(gradient[0]), Factor(weight, swapped=True), offs, "rows")
    return Factors(Factor(x, swapped=True), Factor(gradient[0]), offs, "contraction")


def _why_fallback_unread(node: Node) -> str | None:
    x, weight, offs, *gradient = (arg.meta["val"] for arg in node.args)
    if len({each.dtype for each in (x, weight, *gradient)}) > 1:
        return "grouped matmul of operands of different dtypes"
    return _why_offsets_unread(node.args[2])


def _why_offsets_unread(offs: Node) -> str | None:
    dtype = offs.meta["val"].dtype
    return None if dtype == torch.int32 else f"grouped matmul with offsets of {dtype}"


def _arguments(node: Node) -> tuple[Node, Node, Node | None, Node | None]:
    """(a, b, offsets, bias) of a node of `aten._grouped_mm`."""
    a, b, *rest = node.args
    offs, bias = (rest[i] if len(rest) > i else node.kwargs.get(name) for i, name in enumerate(("offs", "bias")))
    return a, b, offs, bias
