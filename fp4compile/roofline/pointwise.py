"""Inductor's kernels of a graph: pointwise operations and reductions, with the bytes that each kernel moves.

A model of Inductor's scheduler, which needs a GPU to be asked itself. A result is stored where something else than
Inductor's kernels reads it (a product, a quantiser, the graph's caller), where it is a reduction's, and where it has
many loads. Anything else is computed by each of its readers. Stored results become one kernel where they read or
write the same memory, run over the same elements, and wait for the same products. A kernel reads each tensor once, and
writes what is read outside of it.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fp4compile.analysis import flops

aten = torch.ops.aten

# Inductor's limits of loads in an expression that several others read, and in any (`torch._inductor.config`).
REUSED_LOADS, MOST_LOADS = 4, 8
_REDUCTIONS = {
    "sum", "mean", "amax", "amin", "var", "var_mean", "any", "all", "argmax", "argmin", "prod", "max", "min",
    "logsumexp", "_softmax", "_log_softmax",
}  # fmt: skip
# Operators that Inductor computes with those around them, and that torch does not tag as pointwise.
_FUSED = {
    "convert_element_type", "_to_copy", "clone", "copy", "copy_", "where", "cat", "embedding", "index", "gather",
    "index_select", "constant_pad_nd", "slice_scatter", "select_scatter", "full", "full_like", "iota", "scalar_tensor",
    "arange", "flip", "tril", "triu", "inductor_random", "_fused_rms_norm", "native_layer_norm",
}  # fmt: skip
# The operators among these that take some rows of their first argument.
_GATHERING = {"embedding", "index", "gather", "index_select"}
_WRITING_IN_PLACE = {"index_put", "index_put_", "scatter", "index_copy"}
_FREE = {"empty", "empty_strided", "new_empty", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}


def nbytes(node: Node) -> int:
    """Bytes of a node's tensors, of all of them if it has several; unknown sizes count as nothing."""
    return sum(numel(value) * value.element_size() for value in _tensors(node))


def _tensors(node: Node) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return [value for value in leaves if isinstance(value, torch.Tensor)]


def numel(value: torch.Tensor) -> int:
    """Elements of a tensor in the captured call; 0 where a size depends on the data."""
    count = 1
    for size in value.shape:
        count *= flops.hint(size) or 0
    return count


def kind_of(node: Node) -> str:
    """What a node is to Inductor: "view", "fused", "reduction", "memory" (nothing runs), or "other"."""
    if node.op != "call_function":
        return "memory"
    name = _name(node.target)
    if name in _FREE or not _tensors(node):
        return "memory"
    if node.target is operator.getitem:  # results of an operator that is not Inductor's are tensors of their own
        return "memory" if kind_of(node.args[0]) == "other" else "view"
    if getattr(node.target, "is_view", False) or name in ("_unsafe_view", "reshape"):
        return "view"
    if name == "clone" and _same_layout(node):
        return "view"
    if name == "copy_" and _name(base_of(node.args[1]).target) in _WRITING_IN_PLACE:
        return "memory"  # what is copied back was written in place
    if name in _REDUCTIONS:
        return "reduction"
    if name in _FUSED or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return "fused"
    return "other"


def base_of(node: Node) -> Node:
    """The node whose memory a view shows; the node itself if it is none."""
    while kind_of(node) == "view":
        node = node.args[0]
    return node


def readers(node: Node) -> list[Node]:
    """The nodes that read a node's value, through views too."""
    found, waiting = [], list(node.users)
    while waiting:
        user = waiting.pop()
        if kind_of(user) == "view":
            waiting += user.users
        else:
            found.append(user)
    return found


@dataclass
class Fused:
    """A kernel of Inductor's.

    stores: the nodes whose results it computes. moved: bytes that it reads and writes. launches: 2 for a sum over
    columns, of which several programs compute parts, and another kernel adds these up.
    """

    stores: list[Node]
    moved: int
    launches: int = 1


def kernels(graph: Graph) -> list[Fused]:
    """Inductor's kernels of a graph, in order."""
    return _Scheduler(graph).kernels()


@dataclass(frozen=True)
class _Space:
    """What a kernel runs over: `rows` results, each of a reduction of `columns` elements; 1 for pointwise operations.

    along: whether the reduced elements lie beside each other. kept: whether the result is one element of each row.
    """

    rows: int
    columns: int
    along: bool = True
    kept: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    def together_with(self, other: "_Space") -> "_Space | None":
        """What a kernel of both runs over; None where there is none."""
        if self.columns > 1 and other.columns > 1:
            return self if (self.rows, self.columns, self.along) == (other.rows, other.columns, other.along) else None
        reduced, plain = (self, other) if self.columns > 1 else (other, self)
        if reduced.columns > 1 and not reduced.along:  # several programs add up parts of a column
            return None
        if reduced.columns > 1:
            return reduced if plain.rows in (reduced.rows, reduced.elements) else None
        if self.rows == other.rows:
            return self
        small, large = sorted((self, other), key=lambda space: space.rows)
        return large if small.kept and large.rows % small.rows == 0 else None


class _Scheduler:
    """What Inductor's scheduler decides about one graph.

    loads: of each expression, the bytes by the memory that it reads. stored: the number of each expression whose result
    is stored, in order. level: how many products or other kernels have to end before a node. space: of each expression.
    """

    def __init__(self, graph: Graph):
        self.loads: dict[Node, dict[Node, int]] = {}
        self.stored: dict[Node, int] = {}
        self.level: dict[Node, int] = {}
        self.space: dict[Node, _Space] = {}
        for node in graph.nodes:
            kind = kind_of(node)
            if kind == "view":
                continue
            if kind not in ("fused", "reduction"):
                before = [self._level_after(base_of(argument), None) for argument in node.all_input_nodes]
                self.level[node] = max(before, default=0) + (kind == "other")
                continue
            loads: dict[Node, int] = {}
            for argument, size in _arguments(node):
                base = base_of(argument)
                inner = self.loads[base] if base in self.loads and base not in self.stored else {base: size}
                for each, of_it in inner.items():
                    loads[each] = min(loads.get(each, 0) + of_it, max(nbytes(each), of_it))
            self.loads[node] = loads
            self.space[node] = space = _space(node)
            self.level[node] = max((self._level_after(each, space) for each in loads), default=0)
            if kind == "reduction" or self._is_stored(node, loads):
                self.stored[node] = len(self.stored)

    def _is_stored(self, node: Node, loads: dict[Node, int]) -> bool:
        by = readers(node)
        if node.target is aten.copy_.default:
            return True
        if any(kind_of(reader) not in ("fused", "reduction") for reader in by):
            return True
        return len(loads) > (REUSED_LOADS if len(by) > 1 else MOST_LOADS)

    def _level_after(self, memory: Node, space: _Space | None) -> int:
        """The level of what reads some memory."""
        before = self.level.get(memory, 0)
        made = self.space.get(memory)
        fits = made is None or (space is not None and made.together_with(space) is not None)
        return before + (not fits)

    def kernels(self) -> list[Fused]:
        """The stored nodes in kernels."""
        group: dict[Node, int] = {}
        members: dict[int, list[Node]] = {}
        spaces: dict[int, _Space] = {}
        readers_of: dict[tuple[Node, int], list[Node]] = {}
        for node, number in self.stored.items():
            group[node], members[number], spaces[number] = number, [node], self.space[node]
            for other in self._near(node, group, readers_of):
                mine = group[node]
                together = None if other == mine else spaces[mine].together_with(spaces[other])
                if together is not None:
                    spaces[other] = together
                    for each in members.pop(mine):
                        group[each] = other
                        members[other].append(each)
            for memory in self.loads[node]:
                readers_of.setdefault((memory, self.level[node]), []).append(node)
        return [self._fused(nodes) for nodes in members.values()]

    def _near(self, node: Node, group: dict[Node, int], readers_of: dict) -> list[int]:
        """The kernels of one level that a stored node may join, those with which it shares most memory first."""
        shared: dict[int, int] = {}
        level = self.level[node]
        for memory, size in self.loads[node].items():
            if memory in group and self.level[memory] == level:
                shared[group[memory]] = shared.get(group[memory], 0) + size
            for at in {group[reader] for reader in readers_of.get((memory, level), ())}:
                shared[at] = shared.get(at, 0) + size
        return sorted(shared, key=lambda each: -shared[each])

    def _fused(self, nodes: list[Node]) -> Fused:
        inside = set(nodes)
        reads: dict[Node, int] = {}
        for node in nodes:
            for memory, size in self.loads[node].items():
                if memory not in inside:
                    reads[memory] = min(reads.get(memory, 0) + size, max(nbytes(memory), size))
        written = sum(nbytes(node) for node in nodes if self._read_outside(node, inside))
        launches = 1 if all(self.space[node].along for node in nodes) else 2
        return Fused(nodes, sum(reads.values()) + written, launches)

    def _read_outside(self, node: Node, inside: set[Node]) -> bool:
        waiting, seen = readers(node), set()
        while waiting:
            reader = waiting.pop()
            if reader in seen:
                continue
            seen.add(reader)
            if reader in inside:
                continue
            if reader not in self.loads or reader in self.stored:
                return True
            waiting += readers(reader)
        return node.target is aten.copy_.default


def _space(node: Node) -> _Space:
    value = _tensors(node)[0]
    if kind_of(node) == "reduction":
        source = node.all_input_nodes[0].meta["val"]
        rows, elements = numel(value), numel(source)
        if _name(node.target).endswith("softmax"):
            rows = elements // (flops.hint(source.shape[-1]) or 1)
        return _Space(rows, max(elements // max(rows, 1), 1), _along(node, source.dim()))
    kept = value.dim() > 0 and flops.hint(value.shape[-1]) == 1
    return _Space(numel(value), 1, kept=kept)


def _along(node: Node, rank: int) -> bool:
    """Whether a reduction is over the last dimension."""
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None:
        return True
    dims = dims if isinstance(dims, list | tuple) else [dims]
    return not dims or rank - 1 in {dim % max(rank, 1) for dim in dims if isinstance(dim, int)}


def _arguments(node: Node) -> Iterator[tuple[Node, int]]:
    """What a node reads, and how many bytes of it."""
    result = max(map(numel, _tensors(node)))
    overwritten = node.args[0] if node.target is aten.copy_.default else None
    for place, argument in enumerate(each for each in node.all_input_nodes if each is not overwritten):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor):
            continue
        count = min(numel(value), nbytes(base_of(argument)) // value.element_size() or numel(value))
        if place == 0 and _name(node.target) in _GATHERING:
            count = min(count, result)
        yield argument, count * value.element_size()


def in_place_bytes(node: Node) -> int | None:
    """Bytes of an operator that writes a few elements of its first argument; None for any other operator."""
    if _name(node.target) not in _WRITING_IN_PLACE:
        return None
    return 2 * sum(nbytes(each) for each in node.all_input_nodes[1:])


def _same_layout(node: Node) -> bool:
    source, value = node.args[0].meta.get("val"), node.meta["val"]
    if not isinstance(source, torch.Tensor):
        return False
    return tuple(map(str, source.stride())) == tuple(map(str, value.stride())) and source.dtype == value.dtype


def _name(target: object) -> str:
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", str(packet))
