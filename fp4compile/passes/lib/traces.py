"""Traces of functions of nodes' values: one for all calls that have the same one.

A model has hundreds of nodes that a pass replaces by traced operations or launches, and few that differ.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._inductor.pattern_matcher import fwd_only
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fp4compile.templates.quantize.source import power_of_two

# Kernels load at most 16 bytes at once, so at most 16 elements.
_MOST_ALIGNED = 16


@dataclass(frozen=True)
class Traces:
    """The traces made in one graph, by key. Keys are equal where a function and the `signature` of its nodes are."""

    made: dict[Hashable, GraphModule] = field(default_factory=dict)

    def of(self, key: Hashable, function: Callable, values: list) -> GraphModule:
        """The trace of a function. The values of its nodes are new at each call, for a copy of the trace."""
        if key not in self.made:
            self.made[key] = fwd_only(function, values)
        else:  # every copy has tensors of its own: two nodes whose values share memory would count as aliases
            mode = _mode(values)
            FakeTensorProp(self.made[key], mode=mode).propagate_dont_convert_inputs(*values)
        return self.made[key]

    def add(self, graph: Graph, key: Hashable, function: Callable, nodes: Sequence[Node]) -> Any:
        """The results of a function of nodes' values, as nodes that are added to the graph at its insertion point.

        key: equal for functions that are traced alike for nodes of one signature.
        """
        values = [node.meta["val"] for node in nodes]
        with _mode(values):
            module = self.of((key, signature(nodes)), function, values)
        inputs = dict(zip(module.graph.find_nodes(op="placeholder"), nodes, strict=True))
        return graph.graph_copy(module.graph, inputs)


def _mode(values: list) -> torch._subclasses.FakeTensorMode:
    return next(value.fake_mode for value in values if isinstance(value, torch.Tensor))


def signature(arguments: Sequence) -> tuple:
    """A key that is equal for arguments whose nodes have equal metadata and equal aliasing, and that are else equal."""
    first: dict[Node, int] = {}
    return tuple((first.setdefault(value, i), *_seen(value.meta["val"])) if isinstance(value, Node) else value
                 for i, value in enumerate(arguments))  # fmt: skip


def _seen(value: torch.Tensor | torch.SymInt) -> tuple:
    """A key of what an implementation can read of an argument during tracing; expressions for symbolic numbers.

    The place in a storage counts by its alignment alone: each layer's seed is one element of the seeds of all layers.
    """
    if not isinstance(value, torch.Tensor):
        return (str(value),)
    numbers = (*value.shape, *value.stride(), power_of_two(value.storage_offset(), _MOST_ALIGNED))
    return value.device, value.dtype, value.dim(), tuple(map(str, numbers))
