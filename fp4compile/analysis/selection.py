"""Find layers that choose among alternatives, like routers: a top-k, sort, softmax or argmax reads all outputs."""

import operator

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.analysis.views import is_cast, source_of
from fp4compile.ops.nodes import is_pointwise, reached

aten = torch.ops.aten

_SELECTIONS = {aten.topk.default, aten.sort.default, aten.sort.stable, aten._softmax.default, aten._log_softmax.default,
               aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim}  # fmt: skip
# A layer with more outputs computes features or logits. Published models have at most a few hundred experts.
_MOST_CHOICES = 1024


def feeds_selection(product: Node, dim: int) -> bool:
    """Whether one of `_SELECTIONS` reduces all outputs (`dim`) of a layer, after elementwise operations at most."""
    value = product.meta["val"]
    choices = value.shape[dim]
    if not isinstance(choices, int) or choices > _MOST_CHOICES:
        return False
    results = reached(product, lambda node: [user for user in node.users if _elementwise(user, value.numel())])
    return any(_selects(user, choices) for node in results for user in node.users)


def _selects(node: Node, choices: int) -> bool:
    """Whether a node is one of `_SELECTIONS` over a dimension of `choices` elements."""
    if node.target is aten.amax.default:  # a decomposed softmax: exp(x - amax(x))
        dims = node.args[1] if len(node.args) > 1 else []
        over = [node.args[0].meta["val"].shape[d] for d in dims]
        less = [user for user in node.users if user.target is aten.sub.Tensor and user.args[1] is node]
        return over == [choices] and any(user.target is aten.exp.default for each in less for user in each.users)
    if node.target not in _SELECTIONS:
        return False
    if node.target in (aten.max.dim, aten.min.dim) and not any(_is_index(user) for user in node.users):
        return False  # the largest value alone selects nothing
    value = node.args[0].meta["val"]
    # topk takes (x, k, dim=-1), the others (x, dim); sort.stable takes dim by name.
    at = 2 if node.target is aten.topk.default else 1
    whole = None if node.target in (aten.argmax.default, aten.argmin.default) else -1
    dim = node.kwargs.get("dim", node.args[at] if len(node.args) > at else whole)
    return value.dim() > 0 and dim is not None and value.shape[dim] == choices


def _is_index(node: Node) -> bool:
    """Whether a node is the indices of a maximum, which not only the maximum's own backward reads."""
    indices = node.target is operator.getitem and node.args[1] == 1
    return indices and any(user.meta.get("partitioner_tag") != "is_backward" for user in node.users)


def _elementwise(node: Node, count: int | torch.SymInt) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not statically_true(value.numel() == count):
        return False
    return is_pointwise(node) or is_cast(node) or source_of(node) is not None
