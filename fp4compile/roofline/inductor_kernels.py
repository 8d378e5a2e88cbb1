"""Inductor's kernels of a graph: pointwise operations and reductions, with each kernel's bytes.

A rule replaces Inductor's scheduler, which needs a GPU. A result is stored if a matmul, a quantiser or the graph's
caller reads it, if a reduction computes it, or if its expression has many loads, as sums of a residual stream have.
Every reader recomputes other results. One kernel computes stored results of equally many elements that depend on the
same matmuls and read or write the same memory; a sum over columns is a kernel of its own. A kernel reads each tensor
once, and writes the results that are read outside of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch.fx import Graph, Node

from fp4compile.analysis import node_kinds as kinds
from fp4compile.analysis.node_kinds import INDUCTORS, base_of, kind_of, nbytes, numel

aten = torch.ops.aten

# Inductor's limits of loads in an expression that several others read, and in any (`torch._inductor.config`).
REUSED_LOADS, MOST_LOADS = 4, 8
# The operators that read some rows of their first argument.
_GATHERING = {"embedding", "index", "gather", "index_select"}


@dataclass
class Fused:
    """A kernel of Inductor.

    stores: the nodes whose results it computes. moved: bytes that it reads and writes. launches: 2 for a sum over
    columns, whose partial sums another kernel adds.
    """

    stores: list[Node]
    moved: int
    launches: int = 1


@dataclass
class _Expressions:
    """Properties of the graph's nodes read so far.

    loads: of each expression, the bytes by the memory that it reads. stored: the expressions whose results are stored.
    sums: those of them that are sums over columns. level: number of matmuls or sums before a node. elements: number of
    elements of an expression's kernel.
    """

    loads: dict[Node, dict[Node, int]] = field(default_factory=dict)
    stored: dict[Node, None] = field(default_factory=dict)
    sums: dict[Node, None] = field(default_factory=dict)
    level: dict[Node, int] = field(default_factory=dict)
    elements: dict[Node, int] = field(default_factory=dict)

    def read(self, node: Node) -> None:
        """Add a node of the graph; nodes are added in their order."""
        kind = kind_of(node)
        if kind == "view":
            return
        if kind not in INDUCTORS:
            before = self._level_after(map(base_of, node.all_input_nodes))
            self.level[node] = before + (kind == "other")
            return
        loads: dict[Node, int] = {}
        for argument, size in _arguments(node):
            base = base_of(argument)
            inner = self.loads[base] if base in self.loads and base not in self.stored else {base: size}
            for each, of_it in inner.items():
                loads[each] = _read_of(each, loads.get(each, 0) + of_it, of_it)
        self.loads[node] = loads
        self.level[node] = self._level_after(loads)
        sources = [each.meta["val"] for each in node.all_input_nodes] if kind == "reduction" else []
        same = (each for each in loads if self.level.get(each) == self.level[node])
        self.elements[node] = max(
            *map(numel, (*kinds.tensors_of(node), *sources)), *(self.elements.get(each, 0) for each in same), 0
        )
        if kind == "reduction" or _leaves(node) or self._has_many_loads(node):
            self.stored[node] = None
        if kind == "reduction" and not _along(node):
            self.sums[node] = None

    def _has_many_loads(self, node: Node) -> bool:
        """Whether Inductor stores an expression for its loads; it would otherwise recompute all residual sums."""
        several = len(list(kinds.readers(node))) > 1
        return len(self.loads[node]) > (REUSED_LOADS if several else MOST_LOADS)

    def _level_after(self, memory: Iterator[Node] | dict[Node, int]) -> int:
        """The level of an expression that reads some memory."""
        return max((self.level.get(each, 0) + (each in self.sums) for each in memory), default=0)


def kernels(graph: Graph) -> list[Fused]:
    """Inductor's kernels of a graph, in order."""
    known = _Expressions()
    for node in graph.nodes:
        known.read(node)
    kernel_of: dict[tuple[Node, int, int], list[Node]] = {}
    for node in known.stored:
        if node not in known.sums:
            near = {id(kernel): kernel for place in _places(node, known) if (kernel := kernel_of.get(place))}
            kernel = [*chain(*near.values()), node]
            kernel_of |= dict.fromkeys(chain(*(_places(each, known) for each in kernel)), kernel)
    found = {id(kernel): kernel for kernel in kernel_of.values()}
    loaded_by: dict[Node, set[Node]] = {}
    for node in known.stored:
        for memory in known.loads[node]:
            loaded_by.setdefault(memory, set()).add(node)
    return [_fused(each, known, loaded_by) for each in (*found.values(), *([one] for one in known.sums))]


def _places(node: Node, known: _Expressions) -> list[tuple[Node, int, int]]:
    """The memory that a stored expression reads and writes, each with the level and elements that a kernel shares."""
    return [(memory, known.level[node], known.elements[node]) for memory in (*known.loads[node], node)]


def _fused(nodes: list[Node], known: _Expressions, loaded_by: dict[Node, set[Node]]) -> Fused:
    inside = set(nodes)
    reads: dict[Node, int] = {}
    for memory, size in chain(*(known.loads[node].items() for node in nodes)):
        if memory not in inside:
            reads[memory] = _read_of(memory, reads.get(memory, 0) + size, size)
    written = sum(nbytes(node) for node in nodes if _leaves(node) or loaded_by.get(node, set()) - inside)
    return Fused(nodes, sum(reads.values()) + written, 1 + (nodes[0] in known.sums))


def _leaves(node: Node) -> bool:
    """Whether a reader of a result is not Inductor's kernel, or the result is written to the caller's memory."""
    return node.target is aten.copy_.default or any(kind_of(each) not in INDUCTORS for each in kinds.readers(node))


def _read_of(memory: Node, bytes_together: int, largest: int) -> int:
    """Bytes that several loads read of one memory: at most all of it, or the largest repeating load."""
    return min(bytes_together, max(nbytes(memory), largest))


def _along(node: Node) -> bool:
    """Whether a reduction is over the last dimension."""
    rank = node.all_input_nodes[0].meta["val"].dim()
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None:
        return True
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return not dims or rank - 1 in {dim % max(rank, 1) for dim in dims if isinstance(dim, int)}


def _arguments(node: Node) -> Iterator[tuple[Node, int]]:
    """The nodes that a node reads, with the bytes of each."""
    result = max(map(numel, kinds.tensors_of(node)))
    overwritten = node.args[0] if node.target is aten.copy_.default else None
    for place, argument in enumerate(each for each in node.all_input_nodes if each is not overwritten):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        count = min(numel(value), nbytes(base_of(argument)) // value.element_size() or numel(value))
        if place == 0 and kinds.name_of(node) in _GATHERING:
            count = min(count, result)
        yield argument, count * value.element_size()
