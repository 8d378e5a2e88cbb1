"""Let one of several results that Inductor computes from a product be written over the product.

Entry: `inplace(graph)`, on a forward or backward graph after the partitioner, before it is lowered.

In the backward of a gated MLP one kernel makes two gradients from the one that a product leaves behind. Inductor writes
a result over an operand only if nothing else reads that operand, not even in the same kernel: so one of the two would
get memory of its own while all operands are still there, which is where the step's memory peaks. Here that result is
copied into the product's memory, and Inductor makes the copy part of the kernel, where every element is read before it
is written.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.fx import Graph, Node

from fp4compile.passes.graph import CAST, RESHAPES, SCALED_MM, SCALED_MM_EPILOGUE, new_node

aten = torch.ops.aten
_PRODUCTS = (SCALED_MM, SCALED_MM_EPILOGUE, aten.mm.default, aten.addmm.default)


def inplace(graph: Graph) -> int:
    """Write a result over each product from which several are computed; returns how many were."""
    count = 0
    for product in [node for node in graph.nodes if node.target in _PRODUCTS]:
        family = _Family(_reshaped(product))
        last = family.last() if _on_gpu(product) else None
        if last is not None and family.gather(last):
            family.write_over(last)
            count += 1
    return count


def _reshaped(product: Node) -> Node:
    """The product in the shape in which alone it is read."""
    while len(product.users) == 1 and next(iter(product.users)).target in RESHAPES:
        product = next(iter(product.users))
    return product


def _on_gpu(product: Node) -> bool:
    """Whether the product is one piece of a GPU's memory, of a size that is known."""
    value = product.meta["val"]
    known = all(isinstance(size, int) for size in value.shape)
    return value.device.type == "cuda" and known and value.is_contiguous()


@dataclass(frozen=True)
class _Family:
    """The pointwise operations on a product, all of its size: Inductor computes them in one kernel."""

    product: Node

    @cached_property
    def members(self) -> dict[Node, None]:
        """In the order of the graph; none where something else reads the product."""
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
        """What others read, and so will be in memory: what is computed for each, with the operands in memory."""
        read = [node for node in self.members if any(user not in self.members for user in node.users)]
        return {node: self._ancestors(node) for node in read}

    @cached_property
    def computed(self) -> set[Node]:
        return set().union(*self.results.values())

    def last(self) -> Node | None:
        """The result to be written over the product: one of its type that has no operand for itself alone, which
        Inductor could write it over. None where there is none, or where it would be the only result."""
        dtype = self.product.meta["val"].dtype
        for node in self.results if len(self.results) > 1 else ():
            others = set().union(*(self.results[other] for other in self.results if other is not node))
            own = [operand for operand in self.results[node] - others if self._ends_here(operand)]
            if node.meta["val"].dtype == dtype and not own:
                return node
        return None

    def gather(self, last: Node) -> bool:
        """Move all that is computed up to `last`, which then can be written last; returns whether that is possible."""
        place = {node: number for number, node in enumerate(last.graph.nodes)}
        late = sorted((node for node in self.computed if place[node] > place[last]), key=place.__getitem__)
        if not all(self._computed(node) for node in late):
            return False
        for before, node in zip((last, *late), late, strict=False):
            before.append(node)
        return True

    def write_over(self, last: Node) -> None:
        """Let those who read `last` read it from the product's memory."""
        place = {node: number for number, node in enumerate(last.graph.nodes)}
        value = self.product.meta["val"]
        with last.graph.inserting_after(max(self.computed, key=place.__getitem__)):
            # For Inductor a copy into the tensor itself would be another name of `last`; into a view of it, it writes.
            memory = new_node(
                last.graph, aten.as_strided.default, (self.product, [*value.shape], [*value.stride()]), last.meta
            )
        with last.graph.inserting_after(memory):
            written = new_node(last.graph, aten.copy_.default, (memory, last), last.meta)
        last.replace_all_uses_with(written, lambda user: user not in self.members and user is not written)

    def _pointwise(self, node: Node) -> bool:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            return False
        operation = node.target is CAST or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return operation and value.shape == self.product.meta["val"].shape

    def _computed(self, node: Node) -> bool:
        return self._pointwise(node) or node.target in RESHAPES

    def _ancestors(self, node: Node) -> set[Node]:
        """A node, all from which it is computed by pointwise operations and reshapes, and the operands in memory."""
        found: set[Node] = set()
        waiting = [node]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting.extend(node.all_input_nodes if self._computed(node) else ())
        return found

    def _ends_here(self, operand: Node) -> bool:
        """Whether an operand of the product's size is in memory for this kernel alone."""
        value, whole = operand.meta.get("val"), self.product.meta["val"]
        alike = isinstance(value, torch.Tensor) and (value.numel(), value.dtype) == (whole.numel(), whole.dtype)
        return alike and not self._computed(operand) and all(user in self.computed for user in operand.users)
