"""All ranks of a process group run one graph together in one process: collectives take what every rank has there."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed._functional_collectives  # shapes of the collectives
from torch._subclasses import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional


def traced(function: Callable, values: Sequence[torch.Tensor]) -> Graph:
    """The graph of a function of tensors like `values`."""
    with FakeTensorMode():
        graph_module = make_fx(function)(*(torch.empty(t.shape, dtype=t.dtype) for t in values))
    graph_module.graph.eliminate_dead_code()
    return graph_module.graph


def run(graph: Graph, values: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The results of each rank. values: the arguments of each rank."""
    env: dict = {}

    def on(rank, args):
        return torch.fx.map_arg(args, lambda node: env[node][rank])

    left = iter(zip(*values, strict=True))
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(left)
            continue
        each = [on(rank, (node.args, node.kwargs)) for rank in range(len(values))]
        if node.op == "output":
            return [torch.utils._pytree.tree_leaves(args) for args, _ in each]
        collective = _COLLECTIVES.get(node.target)
        if collective is None:
            env[node] = [node.target(*args, **kwargs) for args, kwargs in each]
        else:
            env[node] = collective(*zip(*(args for args, _ in each), strict=True))
    raise AssertionError("the graph has no output")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same layout and bits."""
    layouts = ((each.dtype, each.shape, each.stride()) for each in (one, other))
    return len(set(layouts)) == 1 and torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (one, other)))


def _gathered(tensors, *_):
    return [torch.cat(tensors)] * len(tensors)


# By operator: from each argument of every rank to every rank's result.
_COLLECTIVES: dict = {
    c10d.all_gather_into_tensor.default: _gathered,
    c10d.wait_tensor.default: lambda tensors: list(tensors),
}
