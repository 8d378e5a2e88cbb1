"""Graph nodes of the ops, read as specs with nodes for tensors, and new nodes; functions of graphs for passes."""

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from fp4compile.formats import formats
from fp4compile.formats.grouping import grouping_of
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import QuantizeSpec
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_RESULTS
from fp4compile.ops.quantize import DEQUANTIZE, GATHERED_WEIGHT, QUANTIZE
from fp4compile.templates.choose import Choice, choose
from fp4compile.templates.gemm import indexed
from fp4compile.templates.launch import on_gpu, target_of
from fp4compile.templates.problem import Problem, problem_of

aten = torch.ops.aten
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
A, B = 0, 3  # places of the operands among the arguments of a matmul node
CAST = torch.ops.prims.convert_element_type.default


def new_node(graph: Graph, target: Callable, args: tuple, meta: dict, **kwargs: Any) -> Node:
    """A new call node at the graph's insertion point. meta: the metadata to copy, except for the value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    node.meta["val"] = fake_value(node)
    return node


def replace_results(node: Node, results: Sequence[Node]) -> None:
    """Replace the results of a node that has several by other nodes, one for each result, and erase the node."""
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)
    node.graph.erase_node(node)


def is_pointwise(node: Node) -> bool:
    """Whether torch tags a node's operator as pointwise, which Inductor fuses with its neighbours."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def reached(start: Node, following: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """A node and all nodes reachable from it, each once. following: returns the successors of a node."""
    waiting, seen = [start], {start}
    while waiting:
        node = waiting.pop()
        yield node
        for each in following(node):
            if each not in seen:
                seen.add(each)
                waiting.append(each)


def readers(node: Node, views: Collection[Callable]) -> Iterator[tuple[Node, Node]]:
    """(a node that reads the value and is no view, the view or node that it reads). views: operators of views."""
    for value in reached(node, lambda each: [user for user in each.users if user.target in views]):
        yield from ((user, value) for user in value.users if user.target not in views)


def fake_value(node: Node) -> Any:
    """The node's value, computed by the fake implementation of its operator."""
    args, kwargs = torch.fx.map_arg(node.args, value_of), torch.fx.map_arg(node.kwargs, value_of)
    if node.target is operator.getitem:
        return args[0][args[1]]
    fake = next((a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)), None)
    mode = getattr(fake, "fake_mode", None) or torch._guards.detect_fake_mode()
    with mode:
        return node.target(*args, **kwargs)


@dataclass(frozen=True)
class Quantise:
    """The arguments of a `quantize` node, by the names of the op's arguments, with nodes instead of tensors.

    node: None for a quantiser that is no node yet. dims: counted from the end, so negative. dtype: dtype of the
    prologue's result; None without a prologue.
    """

    node: Node | None
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
        """The spec of the quantiser, which has no tensors."""
        steps = Prologue.parse(self.prologue, self.dtype, self.stored) if self.prologue else None
        return QuantizeSpec(
            formats.get(self.format), self.dims, self.layout, self.hadamard, self.scale_rule, self.values,
            grouping_of(self.offs, self.each_matrix), self.outer is not None, self.seed is not None, steps,
        )  # fmt: skip

    @property
    def grouped(self) -> bool:
        """Whether the quantiser is for experts: for groups of rows, or for matrices with separate global scales."""
        return self.offs is not None or self.each_matrix

    def new(self, graph: Graph, meta: dict) -> Node:
        """A new node with these arguments at the graph's insertion point. meta: as in `new_node`."""
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
    """The arguments of a matmul node, with nodes instead of tensors and instead of a symbolic `rows`.

    Its problem and its choice are computed at the first call and then cached.
    """

    node: Node | None = None

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.a.data.meta["val"])

    @property
    def alone(self) -> bool:
        """Whether the matmul has no epilogue, so that one can be fused into it."""
        return self.node.target is SCALED_MM and self.spec.epilogue is None

    def values(self) -> Arguments:
        """The arguments with their (fake) tensors."""
        a, b = _known(self.a), _known(self.b)
        more = map(value_of, (self.result_outer, self.offs, self.rows, self.index))
        return Arguments(self.spec, a, b, value_of(self.bias), list(map(value_of, self.auxiliaries)), *more)

    @cached_property
    def problem(self) -> Problem:
        """The problem by which `choose` picks the kernel; sizes may be symbolic."""
        return problem_of(self.values(), target_of(self.a.data.meta["val"].device))

    @cached_property
    def choice(self) -> Choice | None:
        """The kernel chosen for the node's problem; None where torch computes the matmul (`plain`)."""
        return None if self.spec.plain else choose(self.problem)

    @property
    def reads_by_index(self) -> bool:
        """Whether the chosen kernel reads gathered matrices through the index."""
        x = self.values()
        return indexed.serves(x.a, x.b, x.index, x.spec.out_dtype, target_of(x.a.data.device))

    def but(self, **changes: Any) -> "ScaledMM":
        """The matmul with another operand, whose tensors are nodes, or with another epilogue."""
        operands = {name: x for name, x in changes.items() if isinstance(x, Operand)}
        spec = self.values().but(**changes | {name: _known(x) for name, x in operands.items()}).spec
        return replace(self, spec=spec, **operands)

    def new(self, graph: Graph, meta: dict, **changes: Any) -> Node:
        """A new node of the matmul with changed fields at the graph's insertion point. meta: as in `new_node`."""
        product = replace(self, **changes)
        args, options = product.call
        if product.spec.results == 1:
            return new_node(graph, SCALED_MM, args, meta, **options)
        return new_several(graph, [product], meta)


def new_several(graph: Graph, products: Sequence[ScaledMM], meta: dict) -> Node:
    """A new node of `scaled_mm_results` for one matmul, or for several of the same A."""
    (a, a_scales, a_outer, *_, spec), options = products[0].call
    several = [[getattr(x.b, name) for x in products] for name in ("data", "scales", "outer")]
    biases = _present([x.bias for x in products])
    options = {**options, "bias": biases} if biases else options
    b, scales, outer = map(_present, several)
    return new_node(graph, SCALED_MM_RESULTS, (a, a_scales, a_outer, b, scales, outer, spec), meta, **options)


def _present(nodes: list) -> list:
    """The nodes; an empty list, which the op reads as None for each matmul, if all are None."""
    return [] if all(node is None for node in nodes) else nodes


def product_of(source: Operand, weight: Operand, out_dtype: torch.dtype, **fields: Any) -> ScaledMM:
    """A matmul of operands whose tensors are nodes. fields: as of `Arguments.of`, nodes instead of tensors."""
    values = {name: value_of(each) for name, each in fields.items()}
    spec = Arguments.of(_known(source), _known(weight), out_dtype=out_dtype, **values).spec
    fields.pop("fast_accumulation", None)
    return ScaledMM(spec=spec, a=source, b=weight, **fields)


def _known(x: Operand) -> Operand:
    """The operand with the (fake) tensors of its nodes instead of the nodes."""
    return Operand(*map(value_of, x.tensors), x.format)


PRODUCTS = (SCALED_MM, SCALED_MM_RESULTS)


def is_product(node: Node) -> bool:
    """Whether a node is a matmul of one A and one B, with any epilogue."""
    return node.target is SCALED_MM or (node.target is SCALED_MM_RESULTS and len(node.args[3]) == 1)


def scaled_mm_of(node: Node) -> ScaledMM:
    """The matmul of a node for which `is_product` holds; the same object until the node's arguments change."""
    known = getattr(node, "_fp4compile_product", None)
    if known is None or known[0] is not node.args or known[1] is not node.kwargs:
        known = node.args, node.kwargs, _read(node)
        node._fp4compile_product = known
    return known[2]


def contracted(node: Node) -> Any:
    """The K of a `scaled_mm` node, without the padding of A's last block where a quantiser made it; may be symbolic."""
    codes = node.args[0]
    if codes.target is operator.getitem and codes.args[0].target is QUANTIZE:
        return quantise_of(codes.args[0]).x.meta["val"].shape[-1]
    return scaled_mm_of(node).values().a.k


def products_of(node: Node) -> list[ScaledMM]:
    """The matmuls of a node whose target is in `PRODUCTS`; several of one A after horizontal fusion."""
    if is_product(node):
        return [scaled_mm_of(node)]
    a, a_scales, a_outer, *several, spec = node.args
    members = len(several[0])
    biases = node.kwargs.get("bias") or [None] * members
    each = zip(*(given or [None] * members for given in several), biases, strict=True)
    return [_product(node, (a, a_scales, a_outer, *b, spec), {"bias": bias}) for *b, bias in each]


def _read(node: Node) -> ScaledMM:
    if node.target is SCALED_MM:
        return _product(node, node.args, node.kwargs)
    *a, b, scales, outer, spec = node.args
    options = dict(node.kwargs)
    options["bias"] = next(iter(options.pop("bias", None) or ()), None)
    return _product(node, (*a, *(next(iter(each), None) for each in (b, scales, outer)), spec), options)


def _product(node: Node, args: Sequence, options: dict[str, Any]) -> ScaledMM:
    """The matmul of an op's arguments whose tensors are nodes, parsed by `Arguments.of_call`."""
    values = {name: value_of(each) for name, each in options.items() if name != "operands"}
    read = Arguments.of_call(*map(value_of, args), **values)
    a, b = (Operand(*args[i : i + 3], fmt) for i, fmt in ((0, read.a.format), (3, read.b.format)))
    names = {"operands": "auxiliaries", "outer": "result_outer"}
    fields = {names.get(name, name): each for name, each in options.items() if each is not None}
    return ScaledMM(spec=read.spec, a=a, b=b, node=node, **fields)


def value_of(arg: Any) -> Any:
    """The (fake) value of a node; any other argument is returned unchanged."""
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _operand(data: Any, scales: Any, outer: Any, fmt: str) -> Operand:
    return Operand(data, scales, outer, formats.get(fmt))


@dataclass(frozen=True)
class ExpertWeights:
    """The arguments of a `dequantize` node of packed experts. weights: of nodes. activation: its format, or None."""

    weights: Operand
    activation: str | None
    activation_outer: Node | None

    @property
    def layout(self) -> str:
        """The layout of the block scales: "linear", or "swizzled" with one run of scales for each matrix."""
        scales = self.weights.scales
        return "swizzled" if scales is not None and scales.meta["val"].dim() == 2 else "linear"


def is_expert_weights(node: Node) -> bool:
    """Whether a node is the dequantised weights of packed experts, whose codes a matmul may read."""
    return node.target is DEQUANTIZE and len(node.args) > 6


def expert_weights_of(node: Node) -> ExpertWeights:
    """The arguments of a node for which `is_expert_weights` holds."""
    *codes, _, _, activation, outer = (*node.args, None)[:8]
    return ExpertWeights(_operand(*codes), None if activation == "plain" else activation, outer)


@dataclass(frozen=True)
class GatheredCodes:
    """The arguments of a `gathered_weight` node. rows, columns: operands of nodes, quantised along each.

    recompute: whether the codes along the rows also exist in the backward pass.
    """

    rows: Operand
    columns: Operand
    recompute: bool

    def operand_for(self, role: str) -> Operand:
        """The weight as an operand of a matmul: quantised along the columns for "dgrad_w", else along the rows."""
        return self.columns if role == "dgrad_w" else self.rows


def is_gathered(node: Node) -> bool:
    """Whether a node is a weight that FSDP2 gathered as codes."""
    return node.target is GATHERED_WEIGHT


def gathered_weight_of(node: Node) -> GatheredCodes:
    """The arguments of a `gathered_weight` node."""
    *codes, _, _, recompute = node.args
    return GatheredCodes(_operand(*codes[:4]), _operand(*codes[4:]), recompute)
