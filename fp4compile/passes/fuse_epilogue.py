"""Fuse the pointwise operations after a matmul into its kernel, as the epilogue of `scaled_mm`.

Entry: `fuse_epilogue(graph)`, on a forward, backward or inference graph after the partitioner, before it is lowered.

From a matmul on, the pass follows its users through reshapes, casts and the operations of `lib.operations`, as long as
an epilogue can read every other tensor among the arguments (`Region._operand_kind`). It fuses the longest part of these
that ends in one value. Nothing else may use the matmul or a value in between; a value that is saved for the backward
pass, for example, ends the part.

The pass fuses where that saves a pass over memory. The kernel that will serve the matmul must have an epilogue, the
result must not be wider than the matmul would have been, and every operand must be in memory anyhow. Inductor keeps all
other operations, and all operations where Inductor's rounding options differ from their defaults. It also keeps those
whose result it stores swizzled for the next matmul (`lib.arranged_operands`): an epilogue stores plain rows, which
another launch would have to copy.
"""

import heapq
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch.fx import Graph, Node

from fp4compile import _compat
from fp4compile.formats.epilogue import AUXILIARIES, PRODUCT, Epilogue
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.formats.steps import Step
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import CAST, RESHAPES, new_node, reached, scaled_mm_of
from fp4compile.passes.lib.arranged_operands import written_arranged
from fp4compile.passes.lib.operations import STORED, contiguous, fits_float32, operation_of, same_shape

aten = torch.ops.aten


def fuse_epilogue(graph: Graph) -> int:
    """Fuse the operations that follow matmuls of CUDA tensors into their kernels; returns how many got an epilogue."""
    if not _compat.pointwise_by_default():
        return 0
    fused = 0
    for node in graph.find_nodes(op="call_function", target=SCALED_MM):
        product = scaled_mm_of(node)
        groups = product.spec.grouping not in (Grouping.DENSE, Grouping.BATCHED)
        known = product.alone and product.on_gpu and not product.spec.plain and not groups
        if known and product.choice.takes_epilogue:
            region = Region(node)
            last = region.end()
            if last is not None and not written_arranged(last):
                _fuse(graph, region, last)
                fused += 1
    return fused


@dataclass
class Region:
    """The operations that follow a matmul, in graph order, up to the first user that no epilogue can compute.

    renamed: reshapes and casts, which change no value.
    """

    product: Node
    operations: dict[Node, tuple[str, tuple]] = field(default_factory=dict)  # name, arguments: nodes and numbers
    renamed: dict[Node, Node] = field(default_factory=dict)  # reshapes and casts, and what they reshape or cast

    def __post_init__(self):
        waiting = [user for node in self.roots for user in node.users]
        heapq.heapify(waiting)
        while waiting:
            node = heapq.heappop(waiting)
            if node in self:
                continue
            if not self._take(node):
                break  # no part can end later: this user, which is outside, reads the region as well (`ends_at`)
            for user in node.users:
                heapq.heappush(waiting, user)

    @property
    def roots(self) -> tuple[Node, ...]:
        """The matmuls whose users begin the region."""
        return (self.product,)

    @property
    def products(self) -> dict[Node, str]:
        """The matmuls' nodes, each with the name by which the text of an epilogue refers to its result."""
        return {self.product: PRODUCT}

    @property
    def shape(self) -> torch.Size:
        """The shape of a matmul."""
        return self.value.shape

    def __contains__(self, node: Node) -> bool:
        return node in self.roots or node in self.operations or node in self.renamed

    @cached_property
    def value(self) -> torch.Tensor:
        return self.product.meta["val"]

    def _take(self, node: Node) -> bool:
        """Add a user of the region to the region if an epilogue can compute it."""
        value = node.meta.get("val")
        if node.op != "call_function" or node.kwargs or not isinstance(value, torch.Tensor):
            return False
        if value.dtype not in FLOAT_DTYPES:
            return False
        if node.target in RESHAPES or node.target is CAST:
            self.renamed[node] = node.args[0]
            return True
        step = operation_of(node)
        if step is None or not all(self._fits(argument, value.shape) for argument in step[1]):
            return False
        self.operations[node] = step
        return True

    def _fits(self, argument: Node | float, shape: torch.Size) -> bool:
        if isinstance(argument, float):
            return fits_float32(argument)
        if argument in self:
            return same_shape(argument.meta["val"].shape, shape)
        return self._operand_kind(argument, shape) is not None

    def _operand_kind(self, node: Node, shape: torch.Size) -> str | None:
        """The kind of operand of an epilogue that a tensor outside of the region is; None if it cannot be one."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in FLOAT_DTYPES:
            return None
        if value.device != self.value.device or not contiguous(value):
            return None
        if same_shape(value.shape, shape):
            return "aux"
        row = (*[1] * (value.dim() - 1), self.shape[-1])
        return "row" if 0 < value.dim() <= len(shape) and same_shape(value.shape, row) else None

    def end(self) -> Node | None:
        """The last node that is the only value used outside of its part of the region; None without any."""
        for last in sorted([*self.operations, *self.renamed], reverse=True):
            if last.target not in RESHAPES and self.ends_at(last):
                return last
        return None

    def ends_at(self, last: Node) -> bool:
        """Whether an epilogue can end at a node of the region or at the matmul, and saves memory that way."""
        inside = self.leading_to(last)
        if any(user not in inside for node in inside if node is not last for user in node.users):
            return False
        if last.meta["val"].dtype.itemsize > self.value.dtype.itemsize:
            return False
        operands = self.operands(last)
        return len(operands) <= AUXILIARIES and all(_in_memory(node, inside) for node in operands)

    def leading_to(self, last: Node) -> set[Node]:
        """The part of the region that `last` depends on, with the matmul."""
        return set(reached(last, lambda node: [each for each in self._arguments(node) if each in self]))

    def _arguments(self, node: Node) -> list[Node]:
        if node in self.renamed:
            return [self.renamed[node]]
        return [argument for argument in self.operations.get(node, ("", ()))[1] if isinstance(argument, Node)]

    def operands(self, last: Node) -> dict[Node, str]:
        """The tensors from outside the region that `last` depends on, and how an epilogue reads each."""
        inside = self.leading_to(last)
        return {
            argument: self._operand_kind(argument, node.meta["val"].shape)
            for node in self.operations if node in inside
            for argument in self._arguments(node) if argument not in self
        }  # fmt: skip

    def epilogue(self, last: Node) -> Epilogue:
        """The operations that lead to `last`; auxiliary tensors are numbered in the order of `operands`."""
        inside, kinds = self.leading_to(last), self.operands(last)
        taken = [node for node in self.operations if node in inside]
        names = {**self.products, **{node: f"s{i}" for i, node in enumerate(taken)}}
        names |= {node: f"{kind}{i}" for i, (node, kind) in enumerate(kinds.items())}

        def argument(value: Node | float) -> str | float:
            while value in self.renamed and value not in names:
                value = self.renamed[value]
            return value if isinstance(value, float) else names[value]

        chosen = (self.operations[node] for node in taken)
        steps = tuple(Step(name, tuple(map(argument, arguments))) for name, arguments in chosen)
        return Epilogue(steps, self.value.dtype, last.meta["val"].dtype)


def _in_memory(node: Node, inside: set[Node]) -> bool:
    """Whether a tensor is written to memory even if no epilogue reads it.

    An operation's result is not written if Inductor would compute it only in the epilogue's kernel: fusing the epilogue
    would then cost a pass over memory instead of saving one.
    """
    path = [node]
    while path[-1].target in RESHAPES:
        path.append(path[-1].args[0])
    source = path[-1]
    if source.op in ("placeholder", "get_attr") or source.target in STORED:
        return True
    return any(user not in inside and user not in path for step in path for user in step.users)


def _fuse(graph: Graph, region: Region, last: Node) -> None:
    """Replace `last` by a matmul with an epilogue, and erase the nodes that led to `last`."""
    operands, epilogue = list(region.operands(last)), region.epilogue(last)
    inside, product, value = region.leading_to(last), region.product, last.meta["val"]
    with graph.inserting_before(last):
        known = scaled_mm_of(product)
        spec = replace(known.spec, epilogue=epilogue)
        fused = known.new(graph, product.meta, spec=spec, auxiliaries=operands)
        if not same_shape(region.value.shape, value.shape):
            shape = next(
                n.args[1] for n in inside if n.target in RESHAPES and same_shape(n.meta["val"].shape, value.shape)
            )
            fused = new_node(graph, aten.reshape.default, (fused, shape), last.meta)
    last.replace_all_uses_with(fused)
    for node in sorted(inside, reverse=True):
        graph.erase_node(node)
