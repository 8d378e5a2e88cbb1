"""Which layers choose: those whose outputs go into a top-k or a softmax over all of them, as a router's do."""

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.passes.views import is_cast, source_of

aten = torch.ops.aten

_SELECTIONS = {aten.topk.default, aten.sort.default, aten.sort.stable, aten._softmax.default, aten._log_softmax.default}
# More outputs than that are features or a vocabulary, not experts; published models have up to a few hundred.
_MOST_CHOICES = 1024


def feeds_selection(product: Node, dim: int) -> bool:
    """Whether a top-k, a sort or a softmax is taken over all outputs of a layer, element by element operations between.

    product: the layer's product. dim: its dimension of out features.
    """
    value = product.meta["val"]
    choices = value.shape[dim]
    if not isinstance(choices, int) or choices > _MOST_CHOICES:
        return False
    seen, waiting = {product}, [product]
    while waiting:
        for user in waiting.pop().users:
            if _selects(user, choices):
                return True
            if user not in seen and _elementwise(user, value.numel()):
                seen.add(user)
                waiting.append(user)
    return False


def _selects(node: Node, choices: int) -> bool:
    if node.target is aten.amax.default:  # a softmax, decomposed: exp(x - amax(x))
        dims = node.args[1] if len(node.args) > 1 else []
        over = [node.args[0].meta["val"].shape[d] for d in dims]
        return over == [choices] and any(
            user.target is aten.sub.Tensor and user.args[1] is node and _exponentiated(user) for user in node.users
        )
    if node.target not in _SELECTIONS:
        return False
    value = node.args[0].meta["val"]
    # (x, k, dim=-1) of a top-k, (x, dim) of the others; sort.stable names its dimension.
    at = 2 if node.target is aten.topk.default else 1
    dim = node.kwargs.get("dim", node.args[at] if len(node.args) > at else -1)
    return value.dim() > 0 and value.shape[dim] == choices


def _exponentiated(node: Node) -> bool:
    return any(user.target is aten.exp.default for user in node.users)


def _elementwise(node: Node, count: int | torch.SymInt) -> bool:
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not statically_true(value.numel() == count):
        return False
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return pointwise or is_cast(node) or source_of(node) is not None
