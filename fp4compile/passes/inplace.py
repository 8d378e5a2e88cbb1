"""Reuse the buffer of a matmul's output for the last elementwise result computed from it.

Entry: `inplace(graph)`, on a forward or backward graph after the partitioner, before it is lowered.

In the backward of a gated MLP one pointwise kernel computes two gradients from one matmul. Inductor reuses an operand's
buffer for a result only if nothing else reads that operand, not even the same kernel. So it would allocate memory for
one of the two gradients while all operands are still alive, at the memory peak of a training step. This pass copies
that gradient into the matmul's buffer. Inductor fuses the copy into the kernel, which reads each element before it
overwrites it.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.fx import Graph, Node

from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import CAST, RESHAPES, is_pointwise, new_node, reached
from fp4compile.templates.launch import on_gpu

aten = torch.ops.aten
_PRODUCTS = (SCALED_MM, aten.mm.default, aten.addmm.default)


def inplace(graph: Graph) -> int:
    """Reuse the buffer of each matmul from which several results are computed; returns the number of matmuls."""
    count = 0
    for product in [node for node in graph.nodes if node.target in _PRODUCTS]:
        consumers = _Consumers(_reshaped(product))
        last = consumers.last() if _contiguous_on_gpu(product) else None
        if last is not None:
            consumers.write_over(last)
            count += 1
    return count


def _reshaped(product: Node) -> Node:
    """The matmul in the shape in which all its users read it."""
    while len(product.users) == 1 and next(iter(product.users)).target in RESHAPES:
        product = next(iter(product.users))
    return product


def _contiguous_on_gpu(product: Node) -> bool:
    """Whether the matmul is a contiguous CUDA tensor without symbolic sizes."""
    value = product.meta["val"]
    known = all(isinstance(size, int) for size in value.shape)
    return on_gpu(value) and known and value.is_contiguous()


@dataclass(frozen=True)
class _Consumers:
    """The pointwise operations that depend on a matmul and have its shape. Inductor computes them in one kernel.

    results: the materialised operations, which other nodes read, in graph order, as far as `last` has read the graph.
    """

    product: Node
    results: list[Node] = field(default_factory=list)

    def operations(self) -> Iterator[Node]:
        """The operations in graph order; none if anything other than a pointwise operation reads the matmul."""
        waiting = sorted(self.product.users)
        if not all(map(self._pointwise, waiting)):
            return
        seen = set(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            yield node
            for user in node.users:
                if user not in seen and self._pointwise(user):
                    seen.add(user)
                    heapq.heappush(waiting, user)

    def last(self) -> Node | None:
        """The result that takes the matmul's buffer; None if no result qualifies, or if there is only one.

        The nodes that results are computed from must be movable before the copy: those behind the first result that
        may take the buffer are pointwise operations or reshapes. The rest of the graph is not read once a later result
        reads another node there, as behind a residual sum, on which all later layers depend.
        """
        candidates: list[Node] = []
        for node in self.operations():
            if all(map(self._pointwise, node.users)):
                continue
            self.results.append(node)
            if self._may_take_buffer(node):
                candidates.append(node)
            if candidates and not all(map(self._computed, self._late(candidates[0]))):
                return None
        if len(self.results) == 1:
            return None
        return next((each for each in candidates if not self._has_own_operand(each)), None)

    def write_over(self, last: Node) -> None:
        """Copy `last` into the matmul's memory, and let its other users read it there.

        First move the nodes after `last` that results are computed from to directly behind it, before the copy.
        """
        order = [last, *self._late(last)]
        for before, node in pairwise(order):
            before.append(node)
        value = self.product.meta["val"]
        with last.graph.inserting_after(order[-1]):
            # Inductor would treat a copy into the tensor itself as another name of `last`. It does write a copy into a
            # view of the tensor.
            memory = new_node(
                last.graph, aten.as_strided.default, (self.product, [*value.shape], [*value.stride()]), last.meta
            )
        with last.graph.inserting_after(memory):
            written = new_node(last.graph, aten.copy_.default, (memory, last), last.meta)
        last.replace_all_uses_with(written, lambda user: not self._pointwise(user) and user is not written)

    def _may_take_buffer(self, result: Node) -> bool:
        """Whether a result has the matmul's dtype, and not already another matmul's buffer."""
        copied = any(user.target is aten.copy_.default for user in result.users)
        return not copied and result.meta["val"].dtype == self.product.meta["val"].dtype

    def _late(self, last: Node) -> list[Node]:
        """The nodes after `last` that any result is computed from, the results included, in graph order."""

        def late(nodes: Iterable[Node]) -> list[Node]:
            return [node for node in nodes if node > last]

        found = {node for result in late(self.results) for node in reached(result, lambda n: late(self._read_by(n)))}
        return sorted(found)

    def _has_own_operand(self, result: Node) -> bool:
        """Whether a result alone reads some operand, whose buffer Inductor would give it.

        A matmul or a reduction from which any result is computed may read that operand, too: it has ended by then.
        """
        if self._serves(result, but=result):
            return False

        def alone(node: Node) -> list[Node]:
            return [operand for operand in self._read_by(node) if not self._serves(operand, but=result)]

        own = dict.fromkeys(reached(result, alone))

        def ended(user: Node) -> bool:
            return user in own or (not self._computed(user) and self._serves(user))

        return any(self._as_large(operand) and all(map(ended, operand.users)) for operand in own)

    def _serves(self, node: Node, but: Node | None = None) -> bool:
        """Whether any result is computed from a node. but: a result that does not count."""
        end = self.results[-1]

        def following(each: Node) -> list[Node]:
            return [user for user in each.users if self._computed(user) and user <= end]

        return any(each is not but and each in self.results for each in reached(node, following))

    def _pointwise(self, node: Node) -> bool:
        value = node.meta.get("val")
        if node.op != "call_function" or node.target is aten.copy_.default or not isinstance(value, torch.Tensor):
            return False
        operation = node.target is CAST or is_pointwise(node)
        return operation and value.shape == self.product.meta["val"].shape

    def _computed(self, node: Node) -> bool:
        return self._pointwise(node) or node.target in RESHAPES

    def _read_by(self, node: Node) -> list[Node]:
        """The operands of a pointwise operation or a reshape; none for other nodes."""
        return node.all_input_nodes if self._computed(node) else []

    def _as_large(self, operand: Node) -> bool:
        """Whether an operand is in memory, and has as many elements as the matmul, of the same dtype."""
        value, whole = operand.meta.get("val"), self.product.meta["val"]
        alike = isinstance(value, torch.Tensor) and (value.numel(), value.dtype) == (whole.numel(), whole.dtype)
        return alike and not self._computed(operand)
