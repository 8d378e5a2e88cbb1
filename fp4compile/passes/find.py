"""Find the matrix products of a joint (or inference) graph and say what each is for. Never mutates.

Entry: `find(graph, inputs)`. A role is proven by what the operands are, never by a product's place in the graph, by
shapes that agree or by sequence numbers:

    fprop   activation x weight. A weight comes from a parameter by moving and casting its elements alone.
    wgrad   gradient x activation. The result is a part of the gradient output of a layer's parameter (times the
            layer's alpha), and the activation is the one that this layer multiplies.
    dgrad   gradient x weight. The weight is the one of a layer, its other dimension contracted, and the gradient is
            the one of that layer's wgrad. A layer without wgrad (a frozen one) also shares its autograd node.
    attention   activation x activation, batched or not

A gradient is what depends on a tangent. `views.py` tells which values are the same. Whatever else multiplies matrices
is listed too, with the reason why it is left alone (`Gemm.unsupported`).
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, GraphModule, Node

from fp4compile import formats
from fp4compile._compat import statically_true
from fp4compile.passes.gradients import Part, input_index, parts_of_gradients, tangent_dependent
from fp4compile.passes.selection import feeds_selection
from fp4compile.passes.views import View, is_cast, source_of, swaps_last_two, view_of

aten = torch.ops.aten

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
_BATCHED_WEIGHT = "batched product with a parameter"
_COMPUTED_WEIGHT = "its weight is computed from parameters and is none itself"
_BOTH_ORIENTATIONS = (
    "its weight is multiplied in both orientations and nothing is a gradient here: it may be one (torch.func.grad)"
)
# Operators of other libraries that multiply matrices, by their names: grouped_mm_fallback, int4_matmul, fused_linear.
_PRODUCT_NAME = re.compile(r"(^|_)(mm|bmm|addmm|matmul|gemm|linear)(_|$)")


@dataclass(frozen=True)
class Input:
    """What the backend knows of a graph input: the fully qualified name of a parameter, None for anything else."""

    parameter: str | None = None


@dataclass(frozen=True)
class Operand:
    """One side of a product, as the matrix that is quantised.

    source: the node with transpositions taken off (of a weight, with all that moves or casts no element otherwise);
        the operand is `source`, or its last two dimensions swapped where `transposed`.
    repeated: `source` has a leading dimension along which it is one matrix again and again; the operand is that matrix.
    role: the field of the recipe that gives its format, e.g. "fprop_x"; None where no product was recognised.
    parameter: fully qualified name of the parameter it comes from, if it is a weight.
    """

    source: Node
    transposed: bool
    role: str | None = None
    parameter: str | None = None
    repeated: bool = False


@dataclass(frozen=True)
class Gemm:
    """A matrix product out = left @ right (+ bias): [..., m, k] x [..., k, n].

    product: "fprop", "dgrad", "wgrad", "attention", or "other" where `unsupported` says why it is left alone.
    module: fully qualified name of the layer (of its parameter where that is not called `weight`).
    layer: (tokens, out features, in features) of the layer; (m, n, k) where there is none.
    forward: the fprop node that a backward product belongs to; its own node otherwise.
    tied_to_embedding: the layer's weight is an embedding's table. selects: a top-k or a softmax is taken of the layer's
        outputs, as a router takes it.
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
    selects: bool = False
    unsupported: str | None = None
    packed: tuple[str | None, str] | None = None

    @property
    def flops(self):
        """2 * m * n * k over the batch; 0 where the dimensions are unknown."""
        return 2 * self.node.meta["val"].numel() * self.dims[2] if self.dims else 0


def find(graph: Graph, inputs: tuple[Input, ...]) -> list[Gemm]:
    """Every matrix product of the graph, in graph order; `inputs` by position in the compiled function's arguments."""
    return _Scan(parameters_of(graph, inputs), tangent_dependent(graph), parts_of_gradients(graph)).gemms(graph)


def parameters_of(graph: Graph, inputs: tuple[Input, ...]) -> dict[Node, str]:
    """The placeholders that are parameters, and their fully qualified names."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        index = input_index(node)
        if index is not None and index < len(inputs) and inputs[index].parameter is not None:
            found[node] = inputs[index].parameter
    return found


@dataclass(frozen=True)
class _Side:
    """An operand as it stands in the graph. root: the parameter (its placeholder) that its elements come from; None for
    anything else."""

    node: Node
    view: View
    root: Node | None
    is_gradient: bool


@dataclass(frozen=True)
class _Product:
    """A product as it stands in the graph. dims: (m, n, k) of one matrix of the batch. terms: bias, beta and alpha."""

    node: Node
    a: _Side
    b: _Side
    batch: int | torch.SymInt
    dims: tuple
    terms: dict = field(default_factory=dict)

    @property
    def weight(self) -> _Side | None:
        """The side that comes from a parameter; of two, the left one."""
        return next((side for side in (self.a, self.b) if side.root is not None), None)

    @property
    def other(self) -> _Side:
        return self.b if self.weight is self.a else self.a

    @property
    def of_one_weight(self) -> bool:
        """Whether the weight is one matrix for the whole batch, on a side where that can be said."""
        return self.weight.view.matrix() is not None and (self.weight is self.b or statically_true(self.batch == 1))

    @property
    def rows(self):
        """Rows of the left operand, over the whole batch."""
        return self.batch * self.dims[0]

    @property
    def sizes(self) -> tuple:
        """(m, n, k), the batch counted among the rows where the right operand is one matrix."""
        m, n, k = self.dims
        return (self.rows if self.weight is self.b and self.of_one_weight else m, n, k)


@dataclass(frozen=True)
class _Layer:
    """A forward product with a weight.

    weight: as [out, in]. activation: key of its elements, token by token. gradients: keys of the gradients of its
    output, token by token, that its weight gradients multiply.
    """

    gemm: Gemm
    root: Node
    weight: View
    activation: tuple
    gradients: set[tuple] = field(default_factory=set)


class _Scan:
    def __init__(self, parameters: dict[Node, str], gradients: set[Node], parts: dict[Node, set[Part]]):
        self.parameters, self.gradients, self.parts = parameters, gradients, parts
        self.layers: list[_Layer] = []
        self.computed: set[Node] = set()

    def gemms(self, graph: Graph) -> list[Gemm]:
        self.computed = _computed_from(self.parameters, graph)
        products = [product for node in graph.nodes if (product := self._product(node)) is not None]
        backward = [product for product in products if product.node in self.gradients]
        found = {p.node: self._forward(p) for p in products if p.node not in self.gradients}
        if not self.gradients:
            found |= self._in_both_orientations()
        # A layer's weight gradients first: they tell which gradient is the one of its output.
        found |= {p.node: self._wgrad(p) for p in backward if p.weight is None}
        found |= {p.node: self._dgrad(p) for p in backward if p.weight is not None}
        return [gemm for node in graph.nodes for gemm in ([found[node]] if node in found else self._others(node))]

    # ------------------------------------------------------------ reading the graph

    def _product(self, node: Node) -> _Product | None:
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
            return None
        terms = {}
        if node.target is aten.addmm.default:
            terms = {"bias": node.args[0], **{name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}}
        left, right = node.args[-2:]
        *batch, m, k = left.meta["val"].shape
        n = right.meta["val"].shape[-1]
        return _Product(node, self._side(left), self._side(right), batch[0] if batch else 1, (m, n, k), terms)

    def _side(self, node: Node) -> _Side:
        view = view_of(node)
        root = view.root
        while root is not None and root not in self.parameters:
            source = source_of(root)  # there is one where no strides express a reshape
            root = None if source is None else view_of(source).root
        return _Side(node, view, root, node in self.gradients)

    def _others(self, node: Node) -> Iterator[Gemm]:
        """What is no plain product but multiplies matrices."""
        if node.op != "call_function":
            return
        if node.target is torch.ops.fp4compile.scaled_mm.default:
            yield _packed(node)
            return
        why = _unsupported(node.target)
        if why is not None:
            yield Gemm(node, "other", _module_of(node), unsupported=why)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            yield from self._nested(node)

    def _nested(self, node: Node) -> Iterator[Gemm]:
        """The products in the branches and bodies of `cond`, `while_loop` and the like: named, and left alone."""
        operands = [arg for arg in torch.utils._pytree.tree_leaves(node.args) if isinstance(arg, Node)]
        regions = [arg for arg in operands if arg.op == "get_attr"]
        operands = [arg for arg in operands if arg.op != "get_attr"]
        for region in regions:
            body = getattr(node.graph.owning_module, region.target, None)
            if not isinstance(body, GraphModule):
                continue
            inner = body.graph.find_nodes(op="placeholder")
            outer = operands[max(len(operands) - len(inner), 0) :]
            parameters = {i: self.parameters[o] for i, o in zip(inner, outer, strict=False) if o in self.parameters}
            why = f"inside {node.target.__name__}: products of nested regions are left alone"
            for gemm in _Scan(parameters, set(), {}).gemms(body.graph):
                yield replace(gemm, product="other", unsupported=gemm.unsupported or why)

    # ------------------------------------------------------------ forward

    def _forward(self, product: _Product) -> Gemm:
        a, b = product.a, product.b
        if a.root is not None and b.root is not None:
            return _left_alone(product, "both operands are parameters")
        if a.root is None and b.root is None:
            if a.node in self.computed or b.node in self.computed:
                return _left_alone(product, _COMPUTED_WEIGHT)
            return self._gemm(product, "attention", _module_of(product.node), ("attention_a", "attention_b"))
        if not product.of_one_weight:
            return _left_alone(product, _BATCHED_WEIGHT)
        m, n, k = product.dims
        on_right = product.weight is b
        root = product.weight.root
        roles = ("fprop_x", "fprop_w") if on_right else ("fprop_w", "fprop_x")
        gemm = self._gemm(
            product, "fprop", module_name(self.parameters[root]), roles,
            layer=(product.rows, n, k) if on_right else (n, m, k),  # of W @ x, the tokens are the columns
            tied_to_embedding=_feeds_embedding(root), selects=feeds_selection(product.node, -1 if on_right else -2),
        )  # fmt: skip
        weight = product.weight.view.matrix()
        activation = product.other.view
        if on_right:
            weight = weight.swapped()
        else:
            activation = activation.swapped()
        self.layers.append(_Layer(gemm, root, weight, activation.elements))
        return gemm

    def _in_both_orientations(self) -> dict[Node, Gemm]:
        """Without tangents nothing tells an input gradient from a layer, but that it contracts the other dimension."""
        keys = {layer.weight.key for layer in self.layers}
        return {
            layer.gemm.node: replace(layer.gemm, product="other", unsupported=_BOTH_ORIENTATIONS)
            for layer in self.layers
            if layer.weight.swapped().key in keys
        }

    # ------------------------------------------------------------ backward

    def _wgrad(self, product: _Product) -> Gemm:
        """Gradient x activation."""
        a, b = product.a, product.b
        if a.is_gradient and b.is_gradient:
            return _left_alone(product, "gradient x gradient")
        if not statically_true(product.batch == 1):
            return _left_alone(product, "batched product of a gradient")
        # dY^T @ X, or X^T @ dY: either is the gradient of a weight, or of its transpose.
        m, n, tokens = product.dims
        gradient, activation = (a.view.swapped(), b.view) if a.is_gradient else (b.view, a.view.swapped())
        sizes = (tokens, m, n) if a.is_gradient else (tokens, n, m)
        layers = [
            layer for layer in self.layers
            if (input_index(layer.root), layer.gemm.alpha) in self.parts.get(product.node, ())
            and layer.activation == activation.elements
            and _same_sizes(layer.gemm.layer, sizes)
        ]  # fmt: skip
        if not layers:
            return _left_alone(product, "gradient x activation that is not the weight gradient of a layer")
        # Several are pieces of one parameter with one input, or one layer applied again, which the node tells apart.
        layers = [layer for layer in layers if _same_autograd_node(layer.gemm.node, product.node)] or layers
        for layer in layers:
            layer.gradients.add(gradient.elements)
        return self._gradient(product, "wgrad", layers[0].gemm, ("wgrad_dy", "wgrad_x"))

    def _dgrad(self, product: _Product) -> Gemm:
        """Gradient x weight."""
        if not product.of_one_weight:
            return _left_alone(product, _BATCHED_WEIGHT)
        m, n, k = product.dims
        weight, gradient = product.weight.view.matrix(), product.other.view
        sizes = (product.rows, k, n)
        if product.weight is product.a:
            weight, gradient, sizes = weight.swapped(), gradient.swapped(), (n, k, m)
        for layer in self.layers:
            if layer.weight.key == weight.key and _same_sizes(layer.gemm.layer, sizes):
                # A frozen layer has no weight gradient to compare with: its autograd node confirms the weight.
                same_node = _same_autograd_node(layer.gemm.node, product.node)
                if gradient.elements in layer.gradients or (not layer.gradients and same_node):
                    return self._gradient(product, "dgrad", layer.gemm, ("dgrad_dy", "dgrad_w"))
        return _left_alone(product, "gradient x parameter that is not the input gradient of a layer")

    def _gradient(self, product: _Product, kind: str, origin: Gemm, roles: tuple[str, str]) -> Gemm:
        return self._gemm(
            product, kind, origin.module, roles if product.a.is_gradient else roles[::-1], layer=origin.layer,
            tied_to_embedding=origin.tied_to_embedding, selects=origin.selects, forward=origin.node,
        )  # fmt: skip

    def _gemm(self, product: _Product, kind: str, module: str, roles: tuple[str, str], **more) -> Gemm:
        left, right = (
            self._operand(side, role, product) for side, role in zip((product.a, product.b), roles, strict=True)
        )
        more = {"layer": product.dims, "forward": product.node, **more}
        return Gemm(product.node, kind, module, left, right, dims=product.sizes, **product.terms, **more)

    def _operand(self, side: _Side, role: str, product: _Product) -> Operand:
        if side.root is None:
            return _untransposed(side.node, role)
        name = self.parameters[side.root]
        if side is product.a and side.view.is_batched:  # scaled_mm repeats B along a batch, not A
            return _untransposed(side.node, role, name)
        return _of_weight(side, role, name)


def _computed_from(parameters: dict[Node, str], graph: Graph) -> set[Node]:
    """The parameters, and what depends on them and on nothing else but constants."""
    found, constants = set(parameters), set()
    for node in graph.nodes:
        if node.op != "placeholder" and all(arg in found or arg in constants for arg in node.all_input_nodes):
            (found if any(arg in found for arg in node.all_input_nodes) else constants).add(node)
    return found


def _left_alone(product: _Product, why: str) -> Gemm:
    layer = product.sizes
    return Gemm(product.node, "other", _module_of(product.node), dims=layer, layer=layer, unsupported=why)


def _same_autograd_node(forward: Node, backward: Node) -> bool:
    """By sequence number: a hint, for what is proven otherwise but for one of several."""
    number = backward.meta.get("seq_nr")
    return number is not None and forward.meta.get("seq_nr") == number


def _same_sizes(sizes: tuple, others: tuple) -> bool:
    return all(statically_true(size == other) for size, other in zip(sizes, others, strict=True))


def _untransposed(node: Node, role: str, parameter: str | None = None) -> Operand:
    transposed = False
    while swaps_last_two(node):
        node, transposed = node.args[0], not transposed
    return Operand(node, transposed, role, parameter)


def _of_weight(side: _Side, role: str, parameter: str) -> Operand:
    """The matrix of a weight, from the node nearest to the parameter that holds the same elements in two dimensions."""
    matrix = side.view.matrix()
    found = None
    node: Node | None = side.node
    while node is not None:
        view = view_of(node)
        if view.key in (matrix.key, matrix.swapped().key):
            found = Operand(node, view.key != matrix.key, role, parameter)
        node = source_of(node)
    return found or replace(_untransposed(side.node, role, parameter), repeated=True)


def _feeds_embedding(root: Node) -> bool:
    """Whether the parameter is the table of an embedding, as it is or cast."""
    users = [user for node in (root, *filter(is_cast, root.users)) for user in node.users]
    return any(user.target is aten.embedding.default for user in users)


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
