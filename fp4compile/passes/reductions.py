"""Read reductions of rows from graphs: over the last dimension, which stays as one element."""

import operator

import torch
from torch.fx import Node

aten = torch.ops.aten

_REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean", aten.amax.default: "amax"}


def reduction_of(node: Node) -> tuple[str, tuple[Node, ...]] | None:
    """(name, arguments) of a reduction of `formats.steps.REDUCTIONS` over the last dimension; None for anything else.

    Returns None for a variance whose mean is not in the graph: kernels compute the variance from the mean.
    """
    if node.target is operator.getitem and node.args[0].target is aten.var_mean.correction:
        both, place = node.args
        x, *dims = both.args
        if not _over_rows(x, *dims, **both.kwargs) or both.kwargs.get("correction") != 0:
            return None
        if place == 1:
            return "mean", (x,)
        mean = next((user for user in both.users if user.args[1] == 1), None)
        return None if mean is None else ("variance", (x, mean))
    name = _REDUCTIONS.get(node.target)
    if name is None or not _over_rows(*node.args, **node.kwargs):
        return None
    return name, (node.args[0],)


def _over_rows(x: Node, dim=(), keepdim: bool = False, *, dtype: torch.dtype | None = None, correction=None) -> bool:
    """Whether a reduction with these arguments reduces rows, in its default dtype."""
    value = x.meta["val"]
    last = isinstance(dim, list | tuple) and len(dim) == 1 and dim[0] in (-1, value.dim() - 1)
    return last and keepdim and dtype in (None, value.dtype) and value.dtype.is_floating_point
