"""What passes share: the ops as graphs name them, new nodes, and what a quantise or a product node is asked for."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

import fp4compile.ops.grouped  # noqa: F401  defines some of the ops below
import fp4compile.ops.grouped_prologue  # noqa: F401  as above
import fp4compile.ops.prologue  # noqa: F401  as above
from fp4compile.analysis.views import value_key
from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.operand import Operand
from fp4compile.ops.dense import operand  # (the module defines the ops below)
from fp4compile.templates.gemm.choose import Choice, choose
from fp4compile.templates.gemm.problem import Problem, problem_of
from fp4compile.templates.grouped import indexed
from fp4compile.templates.grouped.problem import GroupedProblem
from fp4compile.templates.grouped.problem import problem_of as grouped_problem_of
from fp4compile.templates.launch import on_gpu, target_of

aten = torch.ops.aten
QUANTIZE = torch.ops.fp4compile.quantize.default
QUANTIZE_BOTH = torch.ops.fp4compile.quantize_both.default
FAKE_QUANTIZE = torch.ops.fp4compile.fake_quantize.default
QUANTIZE_PROLOGUE = torch.ops.fp4compile.quantize_prologue.default
SCALED_MM = torch.ops.fp4compile.scaled_mm.default
SCALED_MM_EPILOGUE = torch.ops.fp4compile.scaled_mm_epilogue.default
SCALED_MM_HORIZONTAL = torch.ops.fp4compile.scaled_mm_horizontal.default
QUANTIZE_GROUPED = torch.ops.fp4compile.quantize_grouped.default
QUANTIZE_GROUPED_BOTH = torch.ops.fp4compile.quantize_grouped_both.default
FAKE_QUANTIZE_GROUPED = torch.ops.fp4compile.fake_quantize_grouped.default
FAKE_QUANTIZE_GROUPED_BOTH = torch.ops.fp4compile.fake_quantize_grouped_both.default
QUANTIZE_GROUPED_PROLOGUE = torch.ops.fp4compile.quantize_grouped_prologue.default
SCALED_GROUPED_MM = torch.ops.fp4compile.scaled_grouped_mm.default
SCALED_MM_GATHERED = torch.ops.fp4compile.scaled_mm_gathered.default
EXPERT_WEIGHTS = torch.ops.fp4compile.expert_weights.default
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
CAST = torch.ops.prims.convert_element_type.default


def new_node(graph: Graph, target: Callable, args: tuple, meta: dict, **kwargs: Any) -> Node:
    """A call, inserted where the graph stands, with the metadata of the node that it serves and a value of its own."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    node.meta["val"] = fake_value(node)
    return node


def fake_value(node: Node) -> Any:
    """What the node yields, by the fake implementation of its operator."""

    def value(arg):
        return arg.meta["val"] if isinstance(arg, Node) else arg

    args, kwargs = torch.fx.map_arg(node.args, value), torch.fx.map_arg(node.kwargs, value)
    if node.target is operator.getitem:
        return args[0][args[1]]
    fake = next((a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)), None)
    mode = getattr(fake, "fake_mode", None) or torch._guards.detect_fake_mode()
    with mode:
        return node.target(*args, **kwargs)


@dataclass(frozen=True)
class Quantise:
    """A quantise node, its arguments by name; dim: from the end. groups: (offs,) of a grouped one, else ()."""

    node: Node
    source: Node
    groups: tuple[Node | None, ...]
    format: str
    dim: int
    outer: Node | None
    layout: str
    seed: Node | None
    hadamard: bool
    scale_rule: str

    @property
    def along_rows(self) -> bool:
        return self.dim == -1 and not self.hadamard and self._of_a_pair

    @property
    def along_columns(self) -> bool:
        return self.dim == -2 and not (self.hadamard and self.outer is not None) and self._of_a_pair

    @property
    def _of_a_pair(self) -> bool:
        """Whether `quantize_both` may serve it."""
        return not self.given_each and self.scale_rule == "amax"

    @property
    def given_each(self) -> bool:
        """Whether an outer scale is given for each row: rows and columns then have nothing in common."""
        return self.outer is not None and formats.get(self.format).outer == "row"

    @property
    def key(self) -> tuple:
        """What a pair has in common."""
        groups = tuple(None if offs is None else value_key(offs) for offs in self.groups)
        return value_key(self.source), self.format, self.outer, self.layout, self.seed, self.scale_rule, groups


def quantise_of(node: Node) -> Quantise:
    """What a node of `quantize` or `quantize_grouped` is asked for."""
    source, *groups, fmt, dim = arguments_of_quantise(node)
    rank = source.meta["val"].dim()
    kwargs: dict[str, Any] = {"outer": None, "layout": "linear", "seed": None, "hadamard": False,
                              "scale_rule": "amax", **node.kwargs}  # fmt: skip
    return Quantise(node, source, tuple(groups), fmt, dim if dim < 0 else dim - rank, **kwargs)


def arguments_of_quantise(node: Node) -> tuple:
    """The positional arguments of a quantise node, the last of them its dimension, which the node may leave out."""
    count = 4 if node.target is QUANTIZE_GROUPED else 3
    return node.args if len(node.args) == count else (*node.args, -1)


@dataclass(frozen=True)
class ScaledMM:
    """What a `scaled_mm` or `scaled_mm_epilogue` node is asked for. Its operands hold nodes in the place of tensors.

    epilogue: None without one; auxiliaries: what it reads.
    """

    node: Node
    a: Operand
    b: Operand
    bias: Node | None
    out_dtype: torch.dtype
    epilogue: Epilogue | None = None
    auxiliaries: tuple[Node, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return on_gpu(self.a.data.meta["val"])

    @property
    def plain(self) -> bool:
        """Whether neither operand is quantised: the product is then the library's, and there is nothing to choose."""
        return self.a.format is None and self.b.format is None

    def values(self) -> tuple[Operand, Operand, torch.Tensor | None]:
        """A, B and bias with their (fake) tensors."""
        a, b = (Operand(*map(_value, (x.data, x.scales, x.outer)), x.format) for x in (self.a, self.b))
        return a, b, _value(self.bias)

    def auxiliary_values(self) -> list[torch.Tensor]:
        """The (fake) tensors that the epilogue reads."""
        return list(map(_value, self.auxiliaries))

    def problem(self) -> Problem:
        """What the kernel is chosen by; sizes may be symbolic."""
        a, b, bias = self.values()
        return problem_of(a, b, bias, self.out_dtype, target_of(a.data.device), self.epilogue is not None)

    def choice(self) -> Choice | None:
        """The kernel that will serve the node, as far as that is known now; None for two plain operands."""
        return None if self.plain else choose(self.problem())


def scaled_mm_of(node: Node) -> ScaledMM:
    """The arguments of a `scaled_mm` node or of a `scaled_mm_epilogue` node."""
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, *rest = node.args
    operands = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    if not rest:
        return ScaledMM(node, *operands, bias, out_dtype)
    auxiliaries, steps, dtype = rest
    return ScaledMM(node, *operands, bias, out_dtype, Epilogue.parse(steps, out_dtype, dtype), tuple(auxiliaries))


def grouped_problem(node: Node) -> GroupedProblem:
    """What the kernel of a `scaled_grouped_mm` node is chosen by; sizes may be symbolic."""
    a, b, (offs, rows, out_dtype) = grouped_values(node)
    return grouped_problem_of(a, b, offs, rows, out_dtype, target_of(offs.device))


def reads_by_index(node: Node) -> bool:
    """Whether a kernel serves a `scaled_mm_gathered` node that reads the matrices through the index."""
    a, b, (index, out_dtype) = grouped_values(node)
    return indexed.serves(a, b, index, out_dtype, target_of(index.device))


def grouped_values(node: Node) -> tuple[Operand, Operand, list]:
    """A and B of a product of experts, with their (fake) tensors, and its other arguments."""
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in node.args]
    return operand(*values[:4]), operand(*values[4:8]), values[8:]


def _value(node: Node | None):
    return None if node is None else node.meta["val"]


@dataclass(frozen=True)
class ExpertWeights:
    """What an `expert_weights` node holds, and how its products are to be computed. weights: nodes for tensors."""

    weights: Operand
    activation: str | None
    activation_outer: float | None

    @property
    def layout(self) -> str:
        """How the block scales lie, "linear" or "swizzled": then they are one run for each matrix."""
        scales = self.weights.scales
        return "swizzled" if scales is not None and scales.meta["val"].dim() == 2 else "linear"


def expert_weights_of(node: Node) -> ExpertWeights:
    """The arguments of an `expert_weights` node. Those that have their default value may be missing."""
    data, scales, outer, fmt, _, _, *how = node.args
    return ExpertWeights(operand(data, scales, outer, fmt), *(*how, None, None)[:2])
