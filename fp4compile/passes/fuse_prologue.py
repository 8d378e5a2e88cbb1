"""Fuse the pointwise operations before a quantiser into its kernel, as the prologue of `quantize`.

Entry: `fuse_prologue(graph)`, on a forward, backward or inference graph after the partitioner. It runs after
`merge_quantize` and `fake_quantize`, which give the quantisers their final form, and after `fuse_epilogue`: an
activation in a matmul's epilogue saves more than in a quantiser's prologue.

From the quantised tensor, the pass follows inputs through reshapes that keep the rows, casts, and the operations of
`lib.operations`, to tensors that are in memory (`_given`), to columns ([M, 1]: statistics of a norm), and to rows ([K]:
weights, biases). Either Inductor's reduction writes the statistics, or the chain includes the reductions of
`lib.operations`, and the fused kernel computes the statistics itself.

The tensor and the values in between may have other readers. A reader that Inductor compiles into its own kernel
recomputes such a value. Other readers need the value materialised (`_Chain._needed`): the fused kernel stores it for
them, or the chain ends at the value, which Inductor writes and the fused kernel reads. The best chain is taken.

The pass fuses where the model of `templates.quantize.prologue_cost` says that it pays. Inductor keeps all other
operations, and all operations where Inductor's rounding options differ from their defaults.
"""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Graph, Node

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.prologue import OPERANDS, Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.formats.steps import REDUCTIONS, Step
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import CAST, RESHAPES, Quantise, is_pointwise, new_node, quantise_of, reached, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.lib.notes import name_operations
from fp4compile.passes.lib.operations import (
    STORED,
    contiguous,
    fits_float32,
    float_value,
    operation_of,
    reduction_of,
    same_shape,
)
from fp4compile.passes.lib.slices import cuts_columns, erase_unread, in_shape, memory_of, slice_of
from fp4compile.passes.lib.symbolic_sizes import read_sizes_of_operands
from fp4compile.templates.launch import on_gpu, target_of
from fp4compile.templates.quantize.amax import PARTIAL_MAXIMA_ELEMENTS
from fp4compile.templates.quantize.prologue_cost import gain, reads_amax
from fp4compile.templates.quantize.prologues import takes_prologue

aten = torch.ops.aten

# The operators, besides pointwise ones, for which Inductor generates kernels.
_REDUCTIONS = (
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
    aten.var.correction, aten.var_mean.correction, aten.any.dim, aten.any.default,
)  # fmt: skip
# A longer chain is neither an activation nor a norm, and each step costs at least one instruction in every tile.
MOST_STEPS = 32


def fuse_prologue(graph: Graph) -> int:
    """Fuse operations before quantisers of CUDA tensors into their kernels; returns how many got a prologue."""
    if not _compat.pointwise_by_default():
        return 0
    read_sizes_of_operands(graph)
    fused = 0
    # Not behind a node that overwrites memory: a fused quantiser reads the operations' inputs later.
    for node in list(itertools.takewhile(lambda node: not _writes(node), graph.nodes)):
        if node.target is QUANTIZE and _may_have_prologue(quantise_of(node)):
            variants = itertools.product((False, True), repeat=3)
            chain = max((_Chain(node, *variant) for variant in variants), key=lambda chain: chain.gain)
            if chain.gain > 0:
                _fuse(graph, chain)
                fused += 1
    return fused


def _may_have_prologue(quantise: Quantise) -> bool:
    """Whether a quantiser reads activations or gradients on a GPU, and has no prologue."""
    weight = quantise.each_matrix or quantise.scale_rule != "amax"
    given = quantise.amax is not None  # something else has read the tensor
    return not (weight or given or quantise.prologue) and on_gpu(quantise.x.meta["val"])


def _writes(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, HigherOrderOperator) and "functional" not in node.target.name()


@dataclass
class _Chain:
    """The operations that compute the tensor that a node quantises.

    inward: whether the chain continues beyond values that other nodes need materialised, which the kernel then stores.
    reduces: whether the chain continues beyond statistics of rows.
    keeps: whether the amax kernel stores the result for the quantising kernel, though no other node needs it.
    operations: name and arguments (nodes and numbers) of each operation, inputs before users. operands: the tensors
    that operations read, and how: "aux", "row" or "col". Reshapes and casts are skipped. entered: operations visited.
    """

    quantise: Node
    inward: bool
    reduces: bool
    keeps: bool = False
    operations: dict[Node, tuple[str, tuple]] = field(default_factory=dict)
    operands: dict[Node, str] = field(default_factory=dict)
    entered: int = 0

    @property
    def source(self) -> Node:
        return self.quantise.args[0]

    @property
    def value(self) -> torch.Tensor:
        return self.source.meta["val"]

    @cached_property
    def gain(self) -> float:
        """The expected gain of fusing; 0 where it does not pay or is not possible."""
        if self.value.dim() < 2 or not contiguous(self.value):
            return 0.0
        if not self._take(self.source, "aux") or not self.operations or len(self.operands) > OPERANDS:
            return 0.0
        first = self._first()
        if first is None or not (same_shape(first.meta["val"].shape, self.value.shape) or self.shape()):
            return 0.0
        if not self._served():
            return 0.0
        prologue, asked = self.prologue(), quantise_of(self.quantise)
        if prologue.stored and asked.offs is not None:  # rows of no group are not written
            return 0.0
        spec, cols = replace(asked.spec, prologue=prologue), self.value.shape[-1]
        if self.keeps and not self._worth_keeping(spec):
            return 0.0
        first, *others = self.ordered()
        if prologue.reductions and any(slice_of(node) for node in others):  # kernels of norms take one stride
            return 0.0
        dtypes = [node.meta["val"].dtype for node in (first, *others)]
        if not takes_prologue(spec, dtypes, cols):
            return 0.0
        return gain(spec, dtypes, cols, target_of(self.value.device).sm, self._shared())

    def _take(self, node: Node, kind: str) -> bool:
        """Add a node and the nodes that compute it, read as `kind` ("aux", "row" or "col"); returns whether it can."""
        node = _renamed(node)
        if node in self.operations or self.operands.get(node) == kind:
            return True
        value = float_value(node)
        if value is None or value.device != self.value.device or node in self.operands:
            return False
        step = None if self._ends_at(node, kind) else _operation(node, kind)
        if step is None:
            self.operands[node] = kind
            if kind != "aux":
                return contiguous(value)
            return (contiguous(value) or slice_of(node) is not None) and self._in_memory(memory_of(node))
        self.entered += 1
        if self.entered > MOST_STEPS:
            return False
        for argument in step[1]:
            if isinstance(argument, Node):
                how = _kind(argument, value.shape, kind, self.value.shape[-1] if step[0] in REDUCTIONS else None)
                if how is None or not self._take(argument, how):
                    return False
        self.operations[node] = step
        return True

    def _ends_at(self, node: Node, kind: str) -> bool:
        """Whether the chain reads a tensor instead of computing it."""
        if kind == "col" and not self.reduces:
            return True
        return _given(node) or (node is not _renamed(self.source) and not self.inward and self._needed(node))

    def _in_memory(self, node: Node) -> bool:
        """Whether a tensor is materialised, or needed by another node, even if the quantiser does not read it."""
        return _given(node) or self._needed(node)

    def _needed(self, node: Node) -> bool:
        """Whether another node needs the value in memory, in any shape and dtype."""
        return any(self._needs_memory(user) for _, user in _readers(node))

    def _needs_memory(self, user: Node) -> bool:
        """Whether a reader is outside Inductor's kernels, of pointwise operators and reductions, or needs the results.

        Inductor materialises the values of such a reader, or computes them twice from other tensors.
        """
        if user is self.quantise:
            return False
        if self._is_later(user):
            return True
        if cuts_columns(user):
            return any(map(self._needs_memory, user.users))
        return not (is_pointwise(user) or user.target in _REDUCTIONS)

    def _is_later(self, user: Node) -> bool:
        """Whether a node needs the quantiser's results. Nodes behind it, of all later layers, are not read."""
        if user.op == "output" or user < self.quantise:
            return False
        before = reached(self.quantise, lambda node: [each for each in node.users if each <= user])
        return any(node is user for node in before)

    def _worth_keeping(self, spec: QuantizeSpec) -> bool:
        """Whether a second kernel reads the tensor; for a small tensor it would start before the first kernel ends."""
        numel = self.value.numel()
        return reads_amax(spec, self.value.shape[-1]) and not (
            isinstance(numel, int) and numel <= PARTIAL_MAXIMA_ELEMENTS
        )

    def _first(self) -> Node | None:
        """The operand with the result's shape, and with its dtype or else float32; None if there is none."""
        found = {n.meta["val"].dtype: n for n, kind in reversed(self.operands.items()) if kind == "aux"}
        return found.get(self.value.dtype, found.get(torch.float32))

    def ordered(self) -> dict[Node, str]:
        """The operands in the op's order."""
        return {self._first(): "aux", **self.operands}

    def shape(self) -> object | None:
        """The shape of the result as an argument of a reshape; None if the graph has no nodes for it."""
        if all(isinstance(size, int) for size in self.value.shape):
            return list(self.value.shape)
        return self.source.args[1] if self.source.target in RESHAPES else None

    def prologue(self) -> Prologue:
        """The operations as a prologue; operands are numbered in the order of `ordered`."""
        names = {node: f"{kind}{i}" for i, (node, kind) in enumerate(self.ordered().items())}
        names |= {node: f"s{i}" for i, node in enumerate(self.operations)}
        steps = (
            Step(name, tuple(x if isinstance(x, float) else names[_renamed(x)] for x in arguments))
            for name, arguments in self.operations.values()
        )
        numbers = {node: i for i, node in enumerate(self.operations)}
        stored = {(numbers[node], dtype): None for node, dtype in self.stored}
        if self.keeps:
            stored[len(numbers) - 1, self.value.dtype] = None
        found = Prologue(tuple(steps), self.value.dtype, tuple(stored))
        return found.as_walked() if _compat.walks_rows(self.value.shape[-1]) else found

    @cached_property
    def stored(self) -> dict[tuple[Node, torch.dtype], dict[Node, list[Node]]]:
        """(operation, dtype) of each stored result -> the nodes that hold this result -> the users that can read it.

        A user cannot read the stored result if the kernel needs the user's own result.
        """
        found: dict[tuple[Node, torch.dtype], dict[Node, list[Node]]] = {}
        for node in self.operations:
            for alias, user in _readers(node):
                key = node, alias.meta["val"].dtype
                if user not in self.inside and self._needs_memory(user):
                    found.setdefault(key, {})[alias] = []
            for alias, user in _readers(node):
                key = node, alias.meta["val"].dtype
                if user not in self.inside and alias in found.get(key, ()) and not self._feeds(user):
                    found[key][alias].append(user)
        return found

    def _served(self) -> bool:
        """Whether all nodes that need a materialised result can read the stored one, and come after the kernel."""
        needed = set(self._inputs)
        for alias, readers in self.aliases.items():
            shape = self.shape_of(alias)
            if shape is None or not contiguous(alias.meta["val"]):
                return False
            if any(
                user not in readers and user not in self.inside and self._needs_memory(user) for user in alias.users
            ):
                return False
            needed.update(size for size in shape if isinstance(size, Node))
        return all(node < self.place for node in needed)

    @property
    def aliases(self) -> dict[Node, list[Node]]:
        """The users of each node that can read a stored result instead of the node."""
        return {alias: readers for aliases in self.stored.values() for alias, readers in aliases.items()}

    @property
    def place(self) -> Node:
        """The first node that reads the kernel's results."""
        return min([self.quantise, *(user for readers in self.aliases.values() for user in readers)])

    @cached_property
    def _inputs(self) -> set[Node]:
        """The nodes that the kernel needs."""
        shape = self.shape() or ()
        given = (*self.quantise.args[1:], *self.quantise.kwargs.values(), *shape)
        return {*self.operands, *(node for node in given if isinstance(node, Node))}

    def _feeds(self, node: Node) -> bool:
        """Whether the kernel needs the result of a node."""
        last = max(self._inputs)
        return any(each in self._inputs for each in reached(node, lambda each: each.users if each < last else ()))

    def shape_of(self, alias: Node) -> tuple | list | None:
        """The shape of a stored result as an argument of a reshape, () if it needs none; None if there are no nodes."""
        shape = alias.meta["val"].shape
        if same_shape(shape, self.value.shape) or same_shape(shape, (*self.value.shape[:-1], 1)):
            return ()
        if all(isinstance(size, int) for size in shape):
            return list(shape)
        return alias.args[1] if alias.target in RESHAPES else None

    def _shared(self) -> bool:
        """Whether Inductor's kernels also read the fused kernel's operands: for statistics, or for other readers."""
        if any(kind != "row" and not _given(node) for node, kind in self.operands.items()):
            return True
        served = {(alias, user) for alias, users in self.aliases.items() for user in users}
        return any(
            user not in self.inside and (alias, user) not in served
            for node in self.operations for alias, user in _readers(node)
        )  # fmt: skip

    @cached_property
    def inside(self) -> set[Node]:
        """The quantiser and the operations that lead to it, without the operands."""

        def needed(node: Node) -> list[Node]:
            inputs = [self.source] if node is self.quantise else node.all_input_nodes
            return [each for each in inputs if each not in self.operands]

        return set(reached(self.quantise, needed))


def _renamed(node: Node) -> Node:
    """The node behind reshapes that keep the rows, and behind casts."""
    while node.target in (CAST, *RESHAPES):
        before, after = float_value(node.args[0]), float_value(node)
        if before is None or after is None or not before.dim() or not after.dim():
            break
        if not statically_true(before.shape[-1] == after.shape[-1]):
            break
        node = node.args[0]
    return node


def _given(node: Node) -> bool:
    """Whether a tensor is a graph input or the materialised result of a kernel that is not Inductor's."""
    node = memory_of(node)
    if node.op in ("placeholder", "get_attr"):
        return True
    if node.target is operator.getitem:
        return getattr(node.args[0].target, "namespace", "") == "fp4compile"
    if node.target is SCALED_MM:
        product = scaled_mm_of(node)
        return product.index is not None or product.choice is None or product.choice.stores
    return node.target in STORED


def _readers(node: Node) -> Iterator[tuple[Node, Node]]:
    """(alias, user) for each user of an alias, without the aliases themselves.

    Aliases are the node, and the reshapes and casts of it that `_renamed` maps to it.
    """
    aliases = [node]
    for each in aliases:
        aliases += [user for user in each.users if user.target in (CAST, *RESHAPES) and _renamed(user) is node]
    return ((alias, user) for alias in aliases for user in alias.users if user not in aliases)


def _operation(node: Node, kind: str) -> tuple[str, tuple] | None:
    """`operation_of` or `reduction_of` of a node that a prologue computes as Inductor does; None for other nodes."""
    step = reduction_of(node) if kind == "col" else None
    if step is None and not node.kwargs:
        step = operation_of(node)
    if step is None or not all(fits_float32(number) for number in step[1] if isinstance(number, float)):
        return None
    return step


def _kind(argument: Node, shape: torch.Size, kind: str, reduced: object | None = None) -> str | None:
    """How a prologue would read an operation's argument, by its shape; None if it cannot.

    "aux": as many elements as the result. "row": one for each column, the same in all rows. "col": one for each row.
    shape: of the operation's result. kind: how the result is read, "aux" or "col". reduced: the number of columns of
    the argument if the operation reduces its rows.
    """
    value = float_value(argument)
    if value is None or not 0 < value.dim() <= len(shape):
        return None
    if reduced is not None and same_shape(value.shape, (*shape[:-1], reduced)):
        return "aux"
    if same_shape(value.shape, shape):
        return kind
    if kind == "col":
        return None
    if kind == "aux" and same_shape(value.shape, (*shape[:-1], 1)):
        return "col"
    row = (*[1] * (value.dim() - 1), shape[-1])
    return "row" if same_shape(value.shape, row) else None


def _fuse(graph: Graph, chain: _Chain) -> None:
    """Replace a quantiser by one with a prologue, and erase the nodes that nothing needs any more."""
    quantise, prologue = chain.quantise, chain.prologue()
    operands, shape, replaced = chain.ordered(), chain.shape(), chain.aliases
    with graph.inserting_before(chain.place):
        read = [in_shape(graph, node, chain.value, shape, slices=bool(i)) for i, node in enumerate(operands)]
        first, *others = read
        fused = replace(
            quantise_of(quantise), x=first, operands=tuple(others), prologue=tuple(prologue.strings()),
            dtype=prologue.dtype, stored=tuple(prologue.stored_strings()),
        ).new(graph, quantise.meta)  # fmt: skip
        name_operations(fused, chain.operations)
        own = len(fused.meta["val"]) - len(prologue.stored)
        for number, aliases in enumerate(chain.stored.values(), own):
            result = new_node(graph, operator.getitem, (fused, number), next(iter(aliases)).meta)
            for alias, readers in aliases.items():
                shape = chain.shape_of(alias)
                value = new_node(graph, aten.reshape.default, (result, shape), alias.meta) if shape else result
                for reader in readers:
                    reader.replace_input_with(alias, value)
    quantise.replace_all_uses_with(fused)
    for node in sorted({*chain.inside, *replaced}, reverse=True):
        if not node.users:
            graph.erase_node(node)
    for node in sorted(operands):
        erase_unread(node)
