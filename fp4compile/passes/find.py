"""Find the matrix products of a joint (or inference) graph and say what each is for. Never mutates.

Entry: `find(graph, inputs)`. A product is told by its operands' roots, never by its place in the graph:

    fprop   activation x weight
    dgrad   gradient x weight
    wgrad   gradient x activation, of the same autograd node (`seq_nr`) or the same activation as an fprop
    attention   activation x activation, batched or not

A gradient is what depends on a tangent. A weight is what comes from a parameter through views and casts alone.
Whatever else multiplies matrices is listed too, with the reason why it is left alone (`Gemm.unsupported`).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fp4compile import formats

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = {prims.convert_element_type.default, aten._to_copy.default}
# One input, same storage or part of it: what a root is traced through.
_VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.alias.default,
    aten.detach.default, aten.slice.Tensor, aten.select.int, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.clone.default,
}  # fmt: skip

# What multiplies matrices and is not rewritten, with the reason that the report gives.
_LEFT_ALONE = {
    aten.addbmm.default: "batched product with an added term (addbmm)",
    aten.baddbmm.default: "batched product with an added term (baddbmm)",
    aten._int_mm.default: "integer product",
    aten.convolution.default: "convolution",
    aten.convolution_backward.default: "convolution",
    aten._scaled_mm.default: "already a scaled product",
    aten._grouped_mm.default: "grouped product",
}
_FUSED_ATTENTION = "fused attention: its products lie inside one kernel"
# Operators of other libraries that multiply matrices, by their names: grouped_mm_fallback, int4_matmul, fused_linear.
_PRODUCT_NAME = re.compile(r"(^|_)(mm|bmm|addmm|matmul|gemm|linear)(_|$)")


@dataclass(frozen=True)
class Input:
    """What the backend knows of a graph input: the fully qualified name of a parameter, None for anything else."""

    parameter: str | None = None


@dataclass(frozen=True)
class Operand:
    """One side of a product, as the matrix that is quantised.

    source: the node with transpositions (and, for a whole parameter, casts) taken off; the operand is `source`, or
        its last two dimensions swapped where `transposed`.
    role: the field of the recipe that gives its format, e.g. "fprop_x"; None where no product was recognised.
    parameter: fully qualified name of the parameter it comes from, if it is a weight.
    """

    source: Node
    transposed: bool
    role: str | None = None
    parameter: str | None = None


@dataclass(frozen=True)
class Gemm:
    """A matrix product out = left @ right (+ bias): [..., m, k] x [..., k, n].

    product: "fprop", "dgrad", "wgrad", "attention", or "other" where `unsupported` says why it is left alone.
    module: fully qualified name of the layer (of its parameter where that is not called `weight`).
    layer: (tokens, out features, in features) of the layer; (m, n, k) where there is none.
    forward: the fprop node that a backward product belongs to; its own node otherwise.
    packed: formats of the operands of a product that was quantised before it was captured (`fp4compile.pack_`).
    """

    node: Node
    product: str
    module: str
    left: Operand | None = None
    right: Operand | None = None
    bias: Node | None = None
    beta: float = 1
    alpha: float = 1
    dims: tuple = ()
    layer: tuple = ()
    forward: Node | None = None
    tied_to_embedding: bool = False
    unsupported: str | None = None
    packed: tuple[str | None, str] | None = None

    @property
    def flops(self):
        """2 * m * n * k over the batch; 0 where the dimensions are unknown."""
        return 2 * self.node.meta["val"].numel() * self.dims[2] if self.dims else 0


def find(graph: Graph, inputs: tuple[Input, ...]) -> list[Gemm]:
    """Every matrix product of the graph, in graph order; `inputs` by position in the compiled function's arguments."""
    scan = _Scan(parameters_of(graph, inputs), _gradients(graph))
    forward = [g for g in scan.products(graph) if g.product == "fprop" and g.packed is None]
    scan.forward = {g.node.meta.get("seq_nr"): g for g in forward}
    scan.by_activation = {g.left.source: g for g in forward}
    scan.by_parameter = {g.right.parameter: g for g in reversed(forward)}
    return list(scan.products(graph))


def parameters_of(graph: Graph, inputs: tuple[Input, ...]) -> dict[Node, str]:
    """The placeholders that are parameters, and their fully qualified names."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        index = _input_index(node)
        if index is not None and index < len(inputs) and inputs[index].parameter is not None:
            found[node] = inputs[index].parameter
    return found


def _input_index(placeholder: Node) -> int | None:
    """Position among the compiled function's arguments, from AOTAutograd's input descriptor."""
    desc = placeholder.meta.get("desc")
    while desc is not None and not hasattr(desc, "idx"):
        desc = getattr(desc, "base", None)
    return None if desc is None or "Tangent" in type(desc).__name__ else desc.idx


def _gradients(graph: Graph) -> set[Node]:
    """The nodes that depend on a tangent."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                found.add(node)
        elif any(arg in found for arg in node.all_input_nodes):
            found.add(node)
    return found


@dataclass
class _Scan:
    parameters: dict[Node, str]
    gradients: set[Node]
    forward: dict[int, Gemm] = field(default_factory=dict)
    by_activation: dict[Node, Gemm] = field(default_factory=dict)
    by_parameter: dict[str, Gemm] = field(default_factory=dict)

    def products(self, graph: Graph) -> Iterator[Gemm]:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is aten.mm.default:
                yield self._product(node, *node.args)
            elif node.target is aten.addmm.default:
                bias, left, right = node.args
                beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
                yield self._product(node, left, right, bias=bias, beta=beta, alpha=alpha)
            elif node.target is aten.bmm.default:
                yield self._batched(node, *node.args)
            elif node.target is torch.ops.fp4compile.scaled_mm.default:
                yield _packed(node)
            else:
                why = _unsupported(node.target)
                if why is not None:
                    yield Gemm(node, "other", _module_of(node), unsupported=why)

    def _product(self, node: Node, left: Node, right: Node, **extra) -> Gemm:
        (m, k), n = left.meta["val"].shape, right.meta["val"].shape[-1]
        a, b = self._operand(left), self._operand(right)
        common = {"dims": (m, n, k), "layer": (m, n, k), **extra}
        if node not in self.gradients:
            return self._forward(node, a, b, common)
        return self._backward(node, a, b, common)

    def _forward(self, node: Node, a: Operand, b: Operand, common: dict) -> Gemm:
        if b.parameter is not None and a.parameter is None:
            return Gemm(
                node, "fprop", module_name(b.parameter), _as(a, "fprop_x"), _as(b, "fprop_w"), forward=node,
                tied_to_embedding=self._feeds_embedding(b), **common,
            )  # fmt: skip
        if a.parameter is not None and b.parameter is None:
            # W @ x: the weight keeps its role on the left, and the tokens are the columns.
            common["layer"] = (common["dims"][1], common["dims"][0], common["dims"][2])
            return Gemm(
                node, "fprop", module_name(a.parameter), _as(a, "fprop_w"), _as(b, "fprop_x"), forward=node, **common
            )
        if a.parameter is not None:
            return Gemm(node, "other", _module_of(node), unsupported="both operands are parameters", **common)
        return self._attention(node, a, b, common)

    def _attention(self, node: Node, a: Operand, b: Operand, common: dict) -> Gemm:
        a, b = _as(a, "attention_a"), _as(b, "attention_b")
        return Gemm(node, "attention", _module_of(node), a, b, forward=node, **common)

    def _backward(self, node: Node, a: Operand, b: Operand, common: dict) -> Gemm:
        a_grad, b_grad = a.source in self.gradients, b.source in self.gradients
        if a_grad == b_grad:
            return Gemm(node, "other", _module_of(node), unsupported="gradient x gradient", **common)
        other = b if a_grad else a
        product = "dgrad" if other.parameter is not None else "wgrad"
        origin = self._origin(node, other)
        if origin is None:
            why = "gradient of a product that is no layer"
            return Gemm(node, "other", _module_of(node), unsupported=why, **common)
        plain = "dgrad_w" if product == "dgrad" else "wgrad_x"
        roles = (f"{product}_dy", plain) if a_grad else (plain, f"{product}_dy")
        common |= {"layer": origin.layer, "tied_to_embedding": origin.tied_to_embedding, "forward": origin.node}
        return Gemm(node, product, origin.module, _as(a, roles[0]), _as(b, roles[1]), **common)

    def _origin(self, node: Node, other: Operand) -> Gemm | None:
        """The fprop whose gradient this is: by autograd sequence number, else by the operand that is no gradient."""
        by_number = self.forward.get(node.meta.get("seq_nr"))
        if by_number is not None:
            return by_number
        return self.by_activation.get(other.source) or self.by_parameter.get(other.parameter)

    def _batched(self, node: Node, left: Node, right: Node) -> Gemm:
        (batch, m, k), n = left.meta["val"].shape, right.meta["val"].shape[-1]
        a, b = self._operand(left), self._operand(_without_broadcast(right))
        common = {"dims": (m, n, k), "layer": (m, n, k)}
        if b.parameter is not None and b.source.meta["val"].dim() == 2 and node not in self.gradients:
            # A linear on a strided input: matmul repeats the weight instead of flattening the input.
            rows = batch * m
            return self._forward(node, a, b, {"dims": (rows, n, k), "layer": (rows, n, k)})
        if a.parameter is not None or b.parameter is not None:
            return Gemm(node, "other", _module_of(node), unsupported="batched product with a parameter", **common)
        if node in self.gradients:
            why = "gradient of a product that is no layer"
            return Gemm(node, "other", _module_of(node), unsupported=why, **common)
        return self._attention(node, a, b, common)

    def _operand(self, node: Node) -> Operand:
        source, transposed = node, False
        while True:
            step = source.args[0] if source.args else None
            if _swaps_last_two(source):
                transposed = not transposed
            elif not (source.target in _CASTS and self._is_parameter(step)):
                break
            source = step
        return Operand(source, transposed, parameter=self._root_parameter(source))

    def _is_parameter(self, node: Node) -> bool:
        """Whether the node is a whole parameter under nothing but swaps of its dimensions and casts."""
        while node not in self.parameters:
            if not (_swaps_last_two(node) or node.target in _CASTS):
                return False
            node = node.args[0]
        return True

    def _root_parameter(self, node: Node) -> str | None:
        while node not in self.parameters:
            if node.target not in _VIEWS and node.target not in _CASTS:
                return None
            node = node.args[0]
        return self.parameters[node]

    def _feeds_embedding(self, weight: Operand) -> bool:
        return any(user.target is aten.embedding.default for user in weight.source.users)


def _packed(node: Node) -> Gemm:
    a, _, _, a_format, b, _, _, b_format, *_ = node.args
    *_, m, n = node.meta["val"].shape
    k = a.meta["val"].shape[-1]
    if a_format is not None and formats.get(a_format).packed:
        k = 2 * k
    return Gemm(node, "fprop", _module_of(node), dims=(m, n, k), forward=node, packed=(a_format, b_format))


def _unsupported(target: Callable) -> str | None:
    """Why an operator that multiplies matrices is left alone; None for one that does not."""
    if target in _LEFT_ALONE:
        return _LEFT_ALONE[target]
    name = getattr(target, "__name__", "").partition(".")[0]
    if "scaled_dot_product" in name or name == "flex_attention":
        return _FUSED_ATTENTION
    return f"operator {target}" if _PRODUCT_NAME.search(name) else None


def _as(operand: Operand, role: str) -> Operand:
    return Operand(operand.source, operand.transposed, role, operand.parameter)


def _without_broadcast(node: Node) -> Node:
    """The matrix that `expand` repeats along a batch dimension, or the node itself."""
    matrix = node
    while matrix.target in (aten.view.default, aten.expand.default, aten.unsqueeze.default):
        matrix = matrix.args[0]
        if matrix.meta["val"].shape == node.meta["val"].shape[-2:]:
            return matrix
    return node


def _swaps_last_two(node: Node) -> bool:
    if node.target is aten.t.default:
        return node.meta["val"].dim() == 2
    if node.target is aten.transpose.int:
        rank = node.meta["val"].dim()
        return {d % rank for d in node.args[1:3]} == {rank - 2, rank - 1}
    if node.target is aten.permute.default:
        dims = [d % len(node.args[1]) for d in node.args[1]]
        last = len(dims) - 1
        return last > 0 and dims == [*range(last - 1), last, last - 1]
    return False


def module_name(parameter: str) -> str:
    """The layer that a parameter belongs to: its name without `.weight`."""
    return parameter.removesuffix(".weight") if parameter != "weight" else ""


def _module_of(node: Node) -> str:
    """The module that a node was traced in, from its (or its forward node's) module stack; "" at the top."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return clean_name(path)


def clean_name(path: str) -> str:
    """A module path without the root variable and the names that wrappers insert."""
    _, bracket, rest = path.rpartition("']")
    path = rest.lstrip(".") if bracket else path
    wrappers = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in path.split(".") if part not in wrappers)
