"""Reuse the buffer of a matmul's output for the last elementwise result computed from it.

Entry: `inplace(graph)`, on a forward or backward graph after the partitioner, before it is lowered.

In the backward of a gated MLP one pointwise kernel computes two gradients from one matmul. Inductor reuses an operand's
buffer for a result only if nothing else reads that operand, not even the same kernel. So it would allocate memory for
one of the two gradients while all operands are still alive, at the memory peak of a training step. This pass copies
that gradient into the matmul's buffer. Inductor fuses the copy into the kernel, which reads each element before it
overwrites it.
"""

from dataclasses import dataclass
from functools import cached_property

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
        if last is not None and consumers.gather(last):
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
    """The pointwise operations that depend on a matmul and have its shape. Inductor computes them in one kernel."""

    product: Node

    @cached_property
    def operations(self) -> dict[Node, None]:
        """The operations in graph order; none if anything other than a pointwise operation reads the matmul."""
        if not all(self._pointwise(user) for user in self.product.users):
            return {}
        found: dict[Node, None] = {}
        node = self.product.next
        while node.op != "output":
            if self._pointwise(node) and any(arg is self.product or arg in found for arg in node.all_input_nodes):
                found[node] = None
            node = node.next
        return found

    @cached_property
    def results(self) -> dict[Node, set[Node]]:
        """The materialised operations, which other nodes read, with the ancestors of each."""
        read = [node for node in self.operations if any(user not in self.operations for user in node.users)]
        return {node: set(reached(node, self._read_by)) for node in read}

    @cached_property
    def computed(self) -> set[Node]:
        """The nodes that any result is computed from, the results included."""
        return set().union(*self.results.values())

    def last(self) -> Node | None:
        """The result that takes the matmul's buffer; None if no result qualifies, or if there is only one.

        It must have the matmul's dtype, and must not already have another matmul's buffer. It must not be the only
        reader of another operand, because Inductor would give it that operand's buffer.
        """
        dtype = self.product.meta["val"].dtype
        for node in self.results if len(self.results) > 1 else ():
            if any(user.target is aten.copy_.default for user in node.users):
                continue
            others = set().union(*(self.results[other] for other in self.results if other is not node))
            own = [operand for operand in self.results[node] - others if self._ends_here(operand)]
            if node.meta["val"].dtype == dtype and not own:
                return node
        return None

    def gather(self, last: Node) -> bool:
        """Move the computed nodes that come after `last` to directly behind it, so that the copy can follow them all.

        Returns False, and moves nothing, if one of them is neither a pointwise operation nor a reshape.
        """
        place = {node: number for number, node in enumerate(last.graph.nodes)}
        late = sorted((node for node in self.computed if place[node] > place[last]), key=place.__getitem__)
        if not all(self._computed(node) for node in late):
            return False
        for before, node in zip((last, *late), late, strict=False):
            before.append(node)
        return True

    def write_over(self, last: Node) -> None:
        """Copy `last` into the matmul's memory, and let its other users read it there."""
        place = {node: number for number, node in enumerate(last.graph.nodes)}
        value = self.product.meta["val"]
        with last.graph.inserting_after(max(self.computed, key=place.__getitem__)):
            # Inductor would treat a copy into the tensor itself as another name of `last`. It does write a copy into a
            # view of the tensor.
            memory = new_node(
                last.graph, aten.as_strided.default, (self.product, [*value.shape], [*value.stride()]), last.meta
            )
        with last.graph.inserting_after(memory):
            written = new_node(last.graph, aten.copy_.default, (memory, last), last.meta)
        last.replace_all_uses_with(written, lambda user: user not in self.operations and user is not written)

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

    def _ends_here(self, operand: Node) -> bool:
        """Whether an operand is as large as the matmul, is in memory, and only this kernel reads it."""
        value, whole = operand.meta.get("val"), self.product.meta["val"]
        alike = isinstance(value, torch.Tensor) and (value.numel(), value.dtype) == (whole.numel(), whole.dtype)
        return alike and not self._computed(operand) and all(user in self.computed for user in operand.users)
