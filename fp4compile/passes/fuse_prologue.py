"""Fuse the pointwise operations before a quantiser into its kernel: `quantize` becomes `quantize_prologue`.

Entry: `fuse_prologue(graph)`, on a forward, backward or inference graph after the partitioner. It runs after
`merge_quantize` and `fake_quantize`, which make the quantisers what they are, and after `fuse_epilogue`: a product that
can write the result of an activation itself saves more than a quantiser that computes it, so that goes first.

From the tensor that is quantised, the pass goes back through reshapes that keep the rows, casts, and the operations of
`passes.pointwise`, up to tensors that are in memory whether or not the quantiser reads them (`_Chain._in_memory`), to
columns ([M, 1]: statistics of a norm, which Inductor's reduction writes), and to rows ([K]: weights, biases). Values in
between may have other users, which Inductor then computes for itself. The tensor itself must have none.

The pass fuses where the model of `templates.quantize.prologue_cost` says that it pays. Inductor keeps what the pass
does not know, and everything where Inductor is told to round otherwise than by default.
"""

import operator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from fp4compile import _compat, formats
from fp4compile._compat import statically_true
from fp4compile.passes.graph import (
    CAST,
    FAKE_QUANTIZE,
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_PROLOGUE,
    RESHAPES,
    SCALED_MM,
    new_node,
    quantise_of,
    scaled_mm_of,
)
from fp4compile.passes.pointwise import STORED, contiguous, fits_float32, float_value, operation_of, same_shape
from fp4compile.pointwise import Step
from fp4compile.prologue import OPERANDS, Prologue
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize.dispatch import takes_prologue
from fp4compile.templates.quantize.prologue_cost import Work, pays

aten = torch.ops.aten

_OPS = {QUANTIZE: "quantize", QUANTIZE_BOTH: "quantize_both", FAKE_QUANTIZE: "fake_quantize"}
# What `quantize_prologue` takes besides.
_OPTIONS = {"outer", "layout", "seed", "hadamard"}
# A longer chain is no activation and no norm; and each step is an instruction of every tile at least.
MOST_STEPS = 32


def fuse_prologue(graph: Graph) -> int:
    """Fuse what precedes the quantisers of CUDA tensors into their kernels; returns how many got a prologue."""
    if not _compat.pointwise_by_default():
        return 0
    fused = 0
    for node in _before_writes(graph):
        if node.target in _OPS and node.args[0].meta["val"].device.type == "cuda":
            chain = _Chain(node)
            if chain.fuses():
                _fuse(graph, chain)
                fused += 1
    return fused


def _before_writes(graph: Graph) -> list[Node]:
    """The nodes up to the first that writes over memory: a fused quantiser reads later what the operations read."""
    nodes = []
    for node in graph.nodes:
        if _writes(node):
            break
        nodes.append(node)
    return nodes


def _writes(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, HigherOrderOperator) and "functional" not in node.target.name()


@dataclass
class _Chain:
    """What the tensor that a node quantises is made of.

    operations: name and arguments (nodes and numbers) of each, after those that it needs. operands: what these read,
    and how: "aux", "row" or "col". Reshapes and casts are looked through. entered: operations that were looked at.
    """

    quantise: Node
    operations: dict[Node, tuple[str, tuple]] = field(default_factory=dict)
    operands: dict[Node, str] = field(default_factory=dict)
    entered: int = 0

    @property
    def source(self) -> Node:
        return self.quantise.args[0]

    @property
    def value(self) -> torch.Tensor:
        return self.source.meta["val"]

    def fuses(self) -> bool:
        """Whether all operations are known, nothing but the quantiser reads their result, and a prologue pays."""
        if not _OPTIONS.issuperset(self.quantise.kwargs):
            return False
        if self.value.dim() < 2 or not contiguous(self.value) or not self._alone():
            return False
        if not self._take(self.source, "aux") or not self.operations or len(self.operands) > OPERANDS:
            return False
        first = self._first()
        if first is None or not (same_shape(first.meta["val"].shape, self.value.shape) or self.shape()):
            return False
        prologue, work = self.prologue(), self._work()
        dtypes = [node.meta["val"].dtype for node in self.ordered()]
        if not takes_prologue(work.fmt, prologue, dtypes, work.by_columns):
            return False
        return pays(prologue, dtypes, work, target_of(self.value.device).sm)

    def _alone(self) -> bool:
        """Whether the quantiser alone reads its tensor, by any shape."""
        node, user = self.source, self.quantise
        while list(node.users) == [user]:
            if node.target not in RESHAPES:
                return True
            node, user = node.args[0], node
        return False

    def _take(self, node: Node, kind: str) -> bool:
        """Add a node and what it is made of; kind: how it is read, and so which elements it has."""
        node = _renamed(node)
        if node in self.operations or self.operands.get(node) == kind:
            return True
        value = float_value(node)
        if value is None or value.device != self.value.device or node in self.operands:
            return False
        step = None if kind == "col" or self._in_memory(node) else _operation(node)
        if step is None:
            self.operands[node] = kind
            return contiguous(value) and (kind != "aux" or self._in_memory(node))
        self.entered += 1
        if self.entered > MOST_STEPS:
            return False
        for argument in step[1]:
            if isinstance(argument, Node):
                how = _kind(argument, value.shape, kind)
                if how is None or not self._take(argument, how):
                    return False
        self.operations[node] = step
        return True

    def _in_memory(self, node: Node) -> bool:
        """Whether a tensor is written to memory, or might as well be, though the quantiser does not read it.

        So it is if it is given, returned, or the result of a kernel that is not Inductor's; or if something reads it
        that needs the quantiser's results: Inductor keeps it so long, or computes it twice from other tensors.
        """
        if node.op in ("placeholder", "get_attr"):
            return True
        if node.target is operator.getitem:
            return getattr(node.args[0].target, "namespace", "") == "fp4compile"
        if node.target is SCALED_MM:
            choice = scaled_mm_of(node).choice()
            return choice is None or choice.stores
        if node.target in STORED:
            return True
        readers, waiting = set(), [node]
        while waiting:
            for user in waiting.pop().users:
                readers.add(user)
                if user.target in RESHAPES:
                    waiting.append(user)
        return any(user.op == "output" or user in self._later for user in readers)

    @cached_property
    def _later(self) -> set[Node]:
        """The nodes that need the quantiser's results."""
        found: set[Node] = set()
        waiting = [self.quantise]
        while waiting:
            for user in waiting.pop().users:
                if user.op != "output" and user not in found:
                    found.add(user)
                    waiting.append(user)
        return found

    def _first(self) -> Node | None:
        """The operand that has the shape and the dtype of the result."""
        found = (n for n, kind in self.operands.items() if kind == "aux" and n.meta["val"].dtype == self.value.dtype)
        return next(found, None)

    def ordered(self) -> dict[Node, str]:
        """The operands in their order in the op."""
        return {self._first(): "aux", **self.operands}

    def shape(self) -> object | None:
        """The shape of the result as an argument of a reshape; None if the graph has no nodes for it."""
        if all(isinstance(size, int) for size in self.value.shape):
            return list(self.value.shape)
        return self.source.args[1] if self.source.target in RESHAPES else None

    def prologue(self) -> Prologue:
        """The operations; operands are numbered as `ordered` has them."""
        names = {node: f"{kind}{i}" for i, (node, kind) in enumerate(self.ordered().items())}
        names |= {node: f"s{i}" for i, node in enumerate(self.operations)}
        steps = (
            Step(name, tuple(x if isinstance(x, float) else names[_renamed(x)] for x in arguments))
            for name, arguments in self.operations.values()
        )
        return Prologue(tuple(steps), self.value.dtype)

    def inside(self) -> set[Node]:
        """The quantiser and what leads to it, without the operands."""
        found, waiting = set(), [self.quantise]
        while waiting:
            node = waiting.pop()
            if node not in found and node not in self.operands:
                found.add(node)
                waiting += node.all_input_nodes if node is not self.quantise else [self.source]
        return found

    def _work(self) -> Work:
        given = {"outer": None, "seed": None, "hadamard": False, **self.quantise.kwargs}
        columns = self.quantise.target is QUANTIZE and quantise_of(self.quantise).dim != -1
        return Work(
            _OPS[self.quantise.target], formats.get(self.quantise.args[1]), columns, given["outer"] is not None,
            given["hadamard"], given["seed"] is not None, self.value.shape[-1],
        )  # fmt: skip


def _renamed(node: Node) -> Node:
    """What a node has by another shape, with the same rows, or by another dtype."""
    while node.target in (CAST, *RESHAPES):
        before, after = float_value(node.args[0]), float_value(node)
        if before is None or after is None or not before.dim() or not after.dim():
            break
        if not statically_true(before.shape[-1] == after.shape[-1]):
            break
        node = node.args[0]
    return node


def _operation(node: Node) -> tuple[str, tuple] | None:
    """`operation_of` a node that a prologue computes as Inductor does."""
    step = None if node.kwargs else operation_of(node)
    if step is None or not all(fits_float32(number) for number in step[1] if isinstance(number, float)):
        return None
    return step


def _kind(argument: Node, shape: torch.Size, kind: str) -> str | None:
    """How an argument of an operation is read whose result has that shape and is read by `kind`; None if it cannot."""
    value = float_value(argument)
    if value is None or not 0 < value.dim() <= len(shape):
        return None
    if same_shape(value.shape, shape):
        return kind
    if kind == "aux" and same_shape(value.shape, (*shape[:-1], 1)):
        return "col"
    row = (*[1] * (value.dim() - 1), shape[-1])
    return "row" if same_shape(value.shape, row) else None


def _fuse(graph: Graph, chain: _Chain) -> None:
    """Put a quantiser with a prologue in the place of one, and take away what nothing needs any more."""
    quantise, prologue = chain.quantise, chain.prologue()
    first, *others = chain.ordered()
    with graph.inserting_before(quantise):
        if not same_shape(first.meta["val"].shape, chain.value.shape):
            first = new_node(graph, aten.reshape.default, (first, chain.shape()), first.meta)
        _, *rest = quantise.args
        arguments = ([first, *others], prologue.strings(), prologue.dtype, _OPS[quantise.target], *rest)
        fused = new_node(graph, QUANTIZE_PROLOGUE, arguments, quantise.meta, **quantise.kwargs)
    quantise.replace_all_uses_with(fused)
    for node in sorted(chain.inside(), reverse=True):
        if not node.users:
            graph.erase_node(node)
