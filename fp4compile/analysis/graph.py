"""What passes share: the ops as graphs name them, new nodes, and the arguments of quantise and product nodes."""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4compile.formats import formats
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.ops.matmul import (
    SCALED_GROUPED_MM,
    SCALED_MM_AMAX,
    SCALED_MM_QUANTIZED,
    dense,
    dense_quantized,
    grouped,
    operand,
)
from fp4compile.ops.quantize import GATHERED_WEIGHT, QUANTIZE
from fp4compile.templates.choose import Choice, choose
from fp4compile.templates.gemm import indexed
from fp4compile.templates.launch import on_gpu, target_of
from fp4compile.templates.problem import Problem, problem_of

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
CAST = torch.ops.prims.convert_element_type.default


def new_node(graph: Graph, target: Callable, args: tuple, meta: dict, **kwargs: Any) -> Node:
    """A call node at the graph's insertion point, with the metadata of the node that it serves and its own value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    node.meta["val"] = fake_value(node)
    return node


def replace_results(node: Node, results: Sequence[Node]) -> None:
    """Let the readers of a node with several results read other nodes, one for each result; erases the node."""
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def reached(start: Node, following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """A node and all nodes that are reached from it, each once. following: the nodes that one leads to."""
    waiting, seen = [start], {start}
    while waiting:
        node = waiting.pop()
        yield node
        for each in following(node):
            if each not in seen:
                seen.add(each)
                waiting.append(each)


def fake_value(node: Node) -> Any:
    """The node's value, computed by the fake implementation of its operator."""
    args, kwargs = torch.fx.map_arg(node.args, _value), torch.fx.map_arg(node.kwargs, _value)
    if node.target is operator.getitem:
        return args[0][args[1]]
    fake = next((a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)), None)
    mode = getattr(fake, "fake_mode", None) or torch._guards.detect_fake_mode()
    with mode:
        return node.target(*args, **kwargs)


@dataclass(frozen=True)
class Quantise:
    """The arguments of a `quantize` node, by the names of the op's arguments, with nodes instead of tensors.

    dims: counted from the end, so negative. dtype: dtype of the prologue's result; None without a prologue.
    """

    node: Node
    x: Node
    format: str
    dims: tuple[int, ...] = (-1,)
    offs: Node | None = None
    outer: Node | None = None
    seed: Node | None = None
    layout: str = "linear"
    hadamard: bool = False
    scale_rule: str = "amax"
    each_matrix: bool = False
    values: tuple[int, ...] = ()
    operands: tuple[Node, ...] = ()
    prologue: tuple[str, ...] = ()
    dtype: torch.dtype | None = None
    stored: tuple[str, ...] = ()
    amax: Node | None = None

    @property
    def spec(self) -> QuantizeSpec:
        """What the quantiser does, without its tensors."""
        steps = Prologue.parse(self.prologue, self.dtype, self.stored) if self.prologue else None
        return QuantizeSpec(
            formats.get(self.format), self.dims, self.layout, self.hadamard, self.scale_rule, self.values,
            self.offs is not None, self.each_matrix, self.outer is not None, self.seed is not None, steps,
        )  # fmt: skip

    @property
    def grouped(self) -> bool:
        """Whether the quantiser is for experts: for groups of rows, or for matrices with separate outer scales."""
        return self.offs is not None or self.each_matrix

    def new(self, graph: Graph, meta: dict) -> Node:
        """A new node with these arguments at the graph's insertion point; see `new_node`."""
        given = {name: getattr(self, name) for name in _QUANTISE_OPTIONS}
        options = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given.items()
            if value != getattr(Quantise, name)
        }
        return new_node(graph, QUANTIZE, (self.x, self.format, list(self.dims)), meta, **options)


_QUANTISE_OPTIONS = tuple(Quantise.__dataclass_fields__)[4:]


def quantise_of(node: Node) -> Quantise:
    """The arguments of a `quantize` node."""
    x, fmt, *rest = node.args
    dim, rank = rest[0] if rest else -1, x.meta["val"].dim()
    dims = tuple(d if d < 0 else d - rank for d in (dim if isinstance(dim, list | tuple) else (dim,)))
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in node.kwargs.items()}
    return Quantise(node, x, fmt, dims, **options)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledMM(Arguments):
    """The arguments of a product node, with nodes instead of tensors and instead of a symbolic `rows`.

    Its problem and its choice are computed at the first call and then kept.
    """

    node: Node

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.a.data.meta["val"])

    def values(self) -> Arguments:
        """The arguments with their (fake) tensors."""
        a, b = (Operand(*map(_value, (x.data, x.scales, x.outer)), x.format) for x in (self.a, self.b))
        return Arguments(a, b, _value(self.bias), self.out_dtype, self.epilogue, list(map(_value, self.auxiliaries)),
                         _value(self.result_outer), _value(self.offs), _value(self.rows))  # fmt: skip

    @cached_property
    def problem(self) -> Problem:
        """The problem by which `choose` picks the kernel; sizes may be symbolic."""
        return problem_of(self.values(), target_of(self.a.data.meta["val"].device))

    @cached_property
    def choice(self) -> Choice | None:
        """The kernel that will serve the node, as far as that is known now; None where no kernel does (`plain`)."""
        return None if self.plain else choose(self.problem)


def scaled_mm_of(node: Node) -> ScaledMM:
    """The arguments of a `scaled_mm`, `scaled_mm_quantized`, `scaled_mm_amax` or `scaled_grouped_mm` node.

    The same object is returned while the arguments stay.
    """
    known = getattr(node, "_fp4compile_product", None)
    if known is None or known[0] is not node.args:
        quantized = dict.fromkeys((SCALED_MM_AMAX, SCALED_MM_QUANTIZED), dense_quantized)
        read = {SCALED_GROUPED_MM: grouped, **quantized}.get(node.target, dense)
        known = node.args, ScaledMM(**vars(read(*node.args, **node.kwargs)), node=node)
        node._fp4compile_product = known
    return known[1]


def reads_by_index(node: Node) -> bool:
    """Whether a kernel that reads the matrices through the index serves a `scaled_mm_gathered` node."""
    values = [_value(arg) for arg in node.args]
    index, out_dtype = values[8:]
    return indexed.serves(operand(*values[:4]), operand(*values[4:8]), index, out_dtype, target_of(index.device))


def _value(arg: Any) -> Any:
    """The (fake) value of a node; any other argument as it is."""
    return arg.meta["val"] if isinstance(arg, Node) else arg


@dataclass(frozen=True)
class ExpertWeights:
    """The arguments of an `expert_weights` node. weights: nodes instead of tensors. activation: its format."""

    weights: Operand
    activation: str | None
    activation_outer: Node | None

    @property
    def layout(self) -> str:
        """The layout of the block scales: "linear", or "swizzled" with one run of scales for each matrix."""
        scales = self.weights.scales
        return "swizzled" if scales is not None and scales.meta["val"].dim() == 2 else "linear"


def expert_weights_of(node: Node) -> ExpertWeights:
    """The arguments of an `expert_weights` node, from which default values may be missing."""
    data, scales, outer, fmt, _, _, *how = node.args
    return ExpertWeights(operand(data, scales, outer, fmt), *(*how, None, None)[:2])


@dataclass(frozen=True)
class GatheredWeight:
    """The arguments of a `gathered_weight` node. rows, columns: the codes of each direction, nodes instead of tensors.

    recompute: whether the codes along the rows are there in the backward pass too.
    """

    rows: Operand
    columns: Operand
    recompute: bool

    def operand_for(self, role: str) -> Operand:
        """The codes that the operand of a product is: along the columns for the role "dgrad_w", else along the rows."""
        return self.columns if role == "dgrad_w" else self.rows


def is_gathered(node: Node) -> bool:
    """Whether a node is a weight that FSDP2 gathered as codes."""
    return node.target is GATHERED_WEIGHT


def gathered_weight_of(node: Node) -> GatheredWeight:
    """The arguments of a `gathered_weight` node."""
    *codes, _, _, recompute = node.args
    return GatheredWeight(operand(*codes[:4]), operand(*codes[4:]), recompute)


def is_swizzled(weight: Operand) -> bool:
    """Whether the block scales of a matrix have the layout that matrix units read: one flat run."""
    return weight.scales is not None and weight.scales.meta["val"].dim() == 1
