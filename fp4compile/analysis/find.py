"""Find the matmuls of a joint (or inference) graph and the role of each. Never changes the graph.

Entry: `find(graph, inputs)`. A role is proven from the operands, never from positions, equal shapes or sequence
    numbers:

    fprop   activation x weight. A weight is a parameter, possibly cast or viewed, and nothing else.
    wgrad   gradient x activation. The result is a part of the gradient of a layer's parameter, and this layer
            multiplies the activation.
    dgrad   gradient x weight. The weight belongs to a layer and is contracted along its other dimension. That layer's
            wgrad multiplies the same gradient; a frozen layer's weight and autograd node must match.
    attention   activation x activation, batched or not

A weight may be one matrix or one for each expert, multiplied by `aten._grouped_mm` or `aten.bmm`. A gradient is a value
that depends on a tangent. Every other operator that multiplies matrices is listed with `Gemm.unsupported`.
"""

import math
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, GraphModule, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.gathers import gathered_parameters, is_gather, parameter_of
from fp4compile.analysis.gemm import Gemm, GemmOperand, Input, Shard
from fp4compile.analysis.gradients import input_index, is_inner_gradient, parts_of_gradients, tangent_dependent
from fp4compile.analysis.matmuls import Matmul, Side, is_grouped, matmul_of, packed_expert, why_not_packed, why_unread
from fp4compile.analysis.module_names import clean_name, module_name, parameter_name
from fp4compile.analysis.selection import feeds_selection
from fp4compile.analysis.views import NodeView, is_cast, root_of, source_of, swaps_last_two, view_of
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.ops.nodes import contracted, is_expert_weights, is_gathered, scaled_mm_of
from fp4compile.ops.quantize import DEQUANTIZE, GATHERED_WEIGHT

aten = torch.ops.aten

# Operators that multiply matrices and are never rewritten, with the reason that the report gives.
_LEFT_ALONE = {
    aten.addmm.default: "matmul with an added term that is no bias (addmm)",
    aten.addbmm.default: "batched matmul with an added term (addbmm)",
    aten.baddbmm.default: "batched matmul with an added term (baddbmm)",
    aten._int_mm.default: "integer matmul",
    aten.convolution.default: "convolution",
    aten.convolution_backward.default: "convolution",
    aten._scaled_mm.default: "already a scaled matmul",
}
_FUSED_ATTENTION = "fused attention: its matmuls lie inside one kernel"
_FUSED_LAYER = "torch's fast path of a transformer layer: its matmuls lie inside one operator"
# The operators that `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call instead of their own code.
_FAST_PATHS = (aten._transformer_encoder_layer_fwd.default, aten._native_multi_head_attention.default)
_BATCHED_WEIGHT = "batched matmul with a parameter"
_GROUPED = "grouped matmul without a parameter"
_PACKED_GRADIENT = "gradient x packed weight: the weight is dequantised"
_COMPUTED_WEIGHT = "its weight is computed from parameters and is none itself"
_PACKED_WEIGHT = "weight of a packed layer, multiplied without calling the layer: it is dequantised"
_INNER_GRADIENT = "part of a gradient that is taken inside of the graph (torch.func.grad)"
_BOTH_ORIENTATIONS = (
    "its weight is multiplied in both orientations and nothing is a gradient here: it may be one (torch.func.grad)"
)
# Other operators are recognised by name: grouped_mm_fallback, int4_matmul, fused_linear, _trilinear (of nn.Bilinear).
_PRODUCT_NAME = re.compile(r"(^|_)(mm|bmm|addmm|matmul|gemm|linear|trilinear)(_|$)")


def find(graph: Graph, inputs: tuple[Input, ...]) -> list[Gemm]:
    """Every matmul of the graph, in graph order. inputs: one entry for each argument of the compiled function."""
    buffers = {node for node in graph.find_nodes(op="placeholder") if _is_buffer(node, inputs)}
    scan = _Scan(weights_of(graph, inputs), tangent_dependent(graph), parts_of_gradients(graph), buffers)
    gemms, cuts = scan.gemms(graph), sharded_parameters_of(graph, inputs)
    whole = {layer.gemm.node: _whole(layer, cuts[layer.root]) for layer in scan.layers if layer.root in cuts}
    return [replace(gemm, layer=whole[gemm.forward]) if gemm.forward in whole else gemm for gemm in gemms]


def _whole(layer: "_Layer", cuts: tuple[Shard, ...]) -> tuple:
    """(tokens, out features, in features) of the unsharded layer, of which this rank has a shard."""
    sizes, shape = list(layer.gemm.layer), layer.root.meta["val"].shape
    for cut in cuts:
        for place, dim in ((1, -2), (2, -1)):
            same_dim = layer.weight.stride[dim] == math.prod(shape[cut.dim + 1 :])
            if same_dim and statically_true(sizes[place] == shape[cut.dim]):
                sizes[place] = cut.whole
    return tuple(sizes)


def parameters_of(graph: Graph, inputs: tuple[Input, ...]) -> dict[Node, str]:
    """The placeholders that are parameters, with their fully qualified names."""
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        index = input_index(node)
        if index is not None and index < len(inputs) and inputs[index].parameter is not None:
            found[node] = inputs[index].parameter
    return found


def sharded_parameters_of(graph: Graph, inputs: tuple[Input, ...]) -> dict[Node, tuple[Shard, ...]]:
    """The placeholders of shards of parameters, with each parameter's shards."""
    cuts = {node: inputs[input_index(node)].shards for node in parameters_of(graph, inputs)}
    return {node: cut for node, cut in cuts.items() if cut and isinstance(node.meta["val"], torch.Tensor)}


def weights_of(graph: Graph, inputs: tuple[Input, ...]) -> dict[Node, str]:
    """The parameters, packed experts and gathered weights of a graph, with the names of the parameters."""
    parameters = parameters_of(graph, inputs)
    packed = filter(is_expert_weights, graph.find_nodes(op="call_function", target=DEQUANTIZE))
    gathered = graph.find_nodes(op="call_function", target=GATHERED_WEIGHT)
    known = {node: parameters[_input_of(node)] for node in gathered if _input_of(node) in parameters}
    rows = gathered_parameters(graph, sharded_parameters_of(graph, inputs))
    known |= {node: parameters[placeholder] for node, placeholder in rows.items()}
    return parameters | {node: parameter_name(_module_of(node)) for node in packed} | known


def _is_buffer(placeholder: Node, inputs: tuple[Input, ...]) -> bool:
    index = input_index(placeholder)
    return index is not None and index < len(inputs) and inputs[index].buffer


def _input_of(root: Node) -> Node:
    """The placeholder of a weight's parameter; for a gathered weight, the placeholder of its codes or of its rows."""
    if is_gather(root):
        return parameter_of(root) or root
    return root_of(root.args[0] if is_gathered(root) else root)


@dataclass(frozen=True)
class _Layer:
    """A forward matmul with a weight.

    root: placeholder of the weight's parameter, or the node that gathered it. weight: its view as [..., out, in].
    activation: key of the activation's elements in the order of tokens. gradients: keys of the output gradients that
    the layer's wgrads multiply, filled in as these are found.
    """

    gemm: Gemm
    root: Node
    weight: NodeView
    grouping: tuple
    activation: tuple
    gradients: set[tuple] = field(default_factory=set)


class _Scan:
    """One search of a graph. computed: the nodes that are computed from parameters, buffers and constants alone."""

    def __init__(
        self, parameters: dict[Node, str], gradients: set[Node], parts: dict[Node, set[int]], buffers: Collection[Node]
    ):
        self.parameters, self.gradients, self.parts, self.buffers = parameters, gradients, parts, buffers
        self.layers: list[_Layer] = []
        self.computed: set[Node] = set()

    def gemms(self, graph: Graph) -> list[Gemm]:
        self.computed = _computed_from(self.parameters, self.buffers, graph)
        products = [p for node in graph.nodes if (p := matmul_of(node, self.parameters, self.gradients)) is not None]
        backward = [product for product in products if product.node in self.gradients]
        found = {p.node: self._forward(p) for p in products if p.node not in self.gradients}
        if not self.gradients:
            found |= self._in_both_orientations()
        # The wgrads come first, because they show which gradient belongs to a layer's output.
        found |= {p.node: self._wgrad(p) for p in backward if p.weight is None}
        found |= {p.node: self._dgrad(p) for p in backward if p.weight is not None}
        return [gemm for node in graph.nodes for gemm in ([found[node]] if node in found else self._others(node))]

    # ------------------------------------------------------------ other operators

    def _others(self, node: Node) -> Iterator[Gemm]:
        """The matmuls of a node that multiplies matrices and that `matmul_of` does not read."""
        if node.op != "call_function":
            return
        if is_grouped(node.target):
            if (why := why_unread(node)) is not None:
                yield Gemm(node, "other", _module_of(node), unsupported=why)
            return
        if node.target is torch.ops.fp4compile.scaled_mm.default:
            yield self._packed(node)
            return
        why = _unsupported(node.target)
        if why is not None:
            yield Gemm(node, "other", _module_of(node), unsupported=why)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            yield from self._nested(node)

    def _packed(self, node: Node) -> Gemm:
        """The matmul of a `scaled_mm` that the captured graph already had; outside of a backward pass, a layer."""
        x = scaled_mm_of(node)
        *_, m, n = node.meta["val"].shape
        dims = m, n, contracted(node)
        names = tuple(None if each.format is None else each.format.name for each in (x.a, x.b))
        layer = () if node in self.gradients else dims
        return Gemm(node, "fprop", _module_of(node), dims=dims, layer=layer, forward=node, packed=names)

    def _nested(self, node: Node) -> Iterator[Gemm]:
        """The matmuls in the branches and bodies of `cond`, `while_loop` and the like. None is quantised."""
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
            why = f"inside {node.target.__name__}: matmuls of nested regions are not quantised"
            buffers = [i for i, o in zip(inner, outer, strict=False) if o in self.buffers]
            for gemm in _Scan(parameters, set(), {}, buffers).gemms(body.graph):
                yield replace(gemm, product="other", unsupported=gemm.unsupported or why)

    # ------------------------------------------------------------ forward

    def _forward(self, product: Matmul) -> Gemm:
        a, b = product.a, product.b
        if is_inner_gradient(product.node):
            return _left_alone(product, _INNER_GRADIENT)
        if a.root is not None and b.root is not None:
            return _left_alone(product, "both operands are parameters")
        if a.root is None and b.root is None:
            computed = [side.view.root for side in (a, b) if side.node in self.computed]
            if computed:
                packed = any(root.target is DEQUANTIZE for root in computed)
                return _left_alone(product, _PACKED_WEIGHT if packed else _COMPUTED_WEIGHT)
            if product.offs is not None:
                return _left_alone(product, _GROUPED)
            return self._gemm(product, "attention", _module_of(product.node), ("attention_a", "attention_b"))
        weight = product.weight_view
        if weight is None:
            return _left_alone(product, _BATCHED_WEIGHT)
        m, n, k = product.dims
        weight_is_b = product.weight is b
        root = product.weight.root
        why = why_not_packed(product)
        stored = root.meta["val"].dtype
        codes = stored.itemsize == 1 or not (stored.is_floating_point or stored.is_complex)  # of another library
        if why is None and codes and product.node.meta["val"].dtype in FLOAT_DTYPES:
            why = f"its weight is stored as {str(stored).removeprefix('torch.')}: it is quantised already"
        if why is not None:
            return replace(_left_alone(product, why), module=module_name(self.parameters[root]))
        roles = ("fprop_x", "fprop_w") if weight_is_b else ("fprop_w", "fprop_x")
        out_features = -1 if weight_is_b != product.swapped else -2
        gemm = self._gemm(
            product, "fprop", module_name(self.parameters[root]), roles,
            # In W @ x the tokens are the columns.
            layer=(product.batch * m, n, k) if weight_is_b else (product.batch * n, m, k),
            tied_to_embedding=_feeds_embedding(root), selects=feeds_selection(product.node, out_features),
        )  # fmt: skip
        if gemm.packed_weight is not None and not is_gathered(root):
            return gemm  # packed experts have no gradients and one orientation
        activation = product.other.view
        if weight_is_b:
            weight = weight.swapped()
        else:
            activation = activation.swapped()
        self.layers.append(_Layer(gemm, root, weight, product.grouping, activation.elements))
        return gemm

    def _in_both_orientations(self) -> dict[Node, Gemm]:
        """Unsupported Gemms for layers whose weight has both orientations: one may be a gradient."""
        keys = {layer.weight.key for layer in self.layers}
        return {
            layer.gemm.node: replace(layer.gemm, product="other", unsupported=_BOTH_ORIENTATIONS)
            for layer in self.layers
            if layer.weight.swapped().key in keys
        }

    # ------------------------------------------------------------ backward

    def _wgrad(self, product: Matmul) -> Gemm:
        """Gradient x activation."""
        a, b = product.a, product.b
        if any(side.view.root.target is DEQUANTIZE for side in (a, b)):
            return _left_alone(product, _PACKED_GRADIENT)
        if a.is_gradient and b.is_gradient:
            return _left_alone(product, "gradient x gradient")
        # Both dY^T @ X and X^T @ dY may be the gradient of a weight or of the weight's transpose.
        m, n, tokens = product.dims
        tokens = product.batch * tokens
        gradient, activation = (a.view.swapped(), b.view) if a.is_gradient else (b.view, a.view.swapped())
        sizes = (tokens, m, n) if a.is_gradient else (tokens, n, m)
        layers = [
            layer for layer in self.layers
            if input_index(_input_of(layer.root)) in self.parts.get(product.node, ())
            and layer.activation == activation.elements
            and layer.grouping == product.grouping
            and _same_sizes(layer.gemm.layer, sizes)
        ]  # fmt: skip
        if not layers and not statically_true(product.batch == 1):
            return _left_alone(product, "batched matmul of a gradient")
        if not layers:
            return _left_alone(product, "gradient x activation that is not the weight gradient of a layer")
        # Several layers match if they are pieces of one parameter with the same input, or one layer applied twice.
        # The autograd node distinguishes them.
        layers = [layer for layer in layers if _same_autograd_node(layer.gemm.node, product.node)] or layers
        for layer in layers:
            layer.gradients.add(gradient.elements)
        return self._gradient(product, "wgrad", layers[0].gemm, ("wgrad_dy", "wgrad_x"))

    def _dgrad(self, product: Matmul) -> Gemm:
        """Gradient x weight."""
        weight, gradient = product.weight_view, product.other.view
        if is_expert_weights(product.weight.root):
            return _left_alone(product, _PACKED_GRADIENT)
        if weight is None:
            return _left_alone(product, _BATCHED_WEIGHT)
        m, n, k = product.dims
        sizes = (product.batch * m, k, n)
        if product.weight is product.a:
            weight, gradient, sizes = weight.swapped(), gradient.swapped(), (product.batch * n, k, m)
        for layer in self.layers:
            same = layer.weight.key == weight.key and layer.grouping == product.grouping
            if same and _same_sizes(layer.gemm.layer, sizes):
                # A frozen layer has no wgrad to compare the gradient with. Its autograd node must agree instead.
                same_node = _same_autograd_node(layer.gemm.node, product.node)
                if gradient.elements in layer.gradients or (not layer.gradients and same_node):
                    return self._gradient(product, "dgrad", layer.gemm, ("dgrad_dy", "dgrad_w"))
        return _left_alone(product, "gradient x parameter that is not the input gradient of a layer")

    def _gradient(self, product: Matmul, kind: str, origin: Gemm, roles: tuple[str, str]) -> Gemm:
        return self._gemm(
            product, kind, origin.module, roles if product.a.is_gradient else roles[::-1], layer=origin.layer,
            tied_to_embedding=origin.tied_to_embedding, selects=origin.selects, forward=origin.node,
        )  # fmt: skip

    def _gemm(self, product: Matmul, kind: str, module: str, roles: tuple[str, str], **more) -> Gemm:
        a, b = (
            replace(self._operand(side, role, product), argument=(side.node, side.swapped))
            for side, role in zip((product.a, product.b), roles, strict=True)
        )
        more = {"layer": product.dims, "forward": product.node, **more}
        groups, dims = product.groups, product.sizes
        if product.offs is None and product.grouping and kind != "attention":
            groups = Grouping.BATCHED if product.index is None else Grouping.GATHERED
        if groups is Grouping.GATHERED and product.weight is product.a:  # computed as x @ W^T
            m, n, k = product.dims
            dims = (product.batch * n, m, k)
        return Gemm(product.node, kind, module, a, b, dims=dims, groups=groups, offs=product.offs, index=product.index,
                    swapped=product.swapped, bias=product.bias, **more)  # fmt: skip

    def _operand(self, side: Side, role: str, product: Matmul) -> GemmOperand:
        if side.root is None:
            return _untransposed(side, role)
        name = self.parameters[side.root]
        if side is product.weight and is_gathered(side.root):
            return GemmOperand(side.root, side is product.b, role, name, packed=True)
        if side is product.weight and is_expert_weights(side.root):
            return GemmOperand(side.root, side is product.b, role, name, packed=True, expert=packed_expert(product))
        if side is product.a and len(side.view.size) > 2 and product.matrices is None:
            return _untransposed(side, role, name)  # scaled_mm repeats B along a batch, not A
        return _of_weight(side, product.weight_view, role, name)


def _computed_from(parameters: dict[Node, str], buffers: Collection[Node], graph: Graph) -> set[Node]:
    """The parameters, and the nodes that depend on parameters, and else on buffers and constants alone.

    Buffers that are dequantised are the codes and scales of packed layers: the result is a weight like a parameter.
    """
    found, constants = set(parameters), set(buffers)
    for node in graph.nodes:
        if node.op != "placeholder" and all(arg in found or arg in constants for arg in node.all_input_nodes):
            weight = node.target is DEQUANTIZE or any(arg in found for arg in node.all_input_nodes)
            (found if weight else constants).add(node)
    return found


def _left_alone(product: Matmul, why: str) -> Gemm:
    layer = product.sizes
    return Gemm(product.node, "other", _module_of(product.node), dims=layer, layer=layer, unsupported=why)


def _same_autograd_node(forward: Node, backward: Node) -> bool:
    """Whether both have one sequence number. A hint, used only to choose among layers that are otherwise proven."""
    number = backward.meta.get("seq_nr")
    return number is not None and forward.meta.get("seq_nr") == number


def _same_sizes(sizes: tuple, others: tuple) -> bool:
    return all(statically_true(size == other) for size, other in zip(sizes, others, strict=True))


def _untransposed(side: Side, role: str, parameter: str | None = None) -> GemmOperand:
    node, transposed = side.node, side.swapped
    while swaps_last_two(node):
        node, transposed = node.args[0], not transposed
    return GemmOperand(node, transposed, role, parameter)


def _of_weight(side: Side, weight: NodeView, role: str, parameter: str) -> GemmOperand:
    """A weight, read from the node nearest to the parameter that has the weight or its transpose."""
    found = None
    node: Node | None = side.node
    while node is not None:
        view = view_of(node)
        if view.key in (weight.key, weight.swapped().key):
            found = GemmOperand(node, view.key != weight.key, role, parameter)
        node = source_of(node)
    return found or replace(_untransposed(side, role, parameter), repeated=True)


def _feeds_embedding(root: Node) -> bool:
    """Whether an embedding looks up the parameter, or a cast of it."""
    users = [user for node in (root, *filter(is_cast, root.users)) for user in node.users]
    return any(user.target is aten.embedding.default for user in users)


def _unsupported(target: Callable) -> str | None:
    """The reason that an operator that multiplies matrices is not quantised; None for any other operator."""
    if target in _LEFT_ALONE:
        return _LEFT_ALONE[target]
    if target in _FAST_PATHS:
        return _FUSED_LAYER
    name = getattr(target, "__name__", "").partition(".")[0]
    if "scaled_dot_product" in name or name == "flex_attention":
        return _FUSED_ATTENTION
    return f"operator {target}" if _PRODUCT_NAME.search(name) else None


def _module_of(node: Node) -> str:
    """The module that a node was traced in (a backward node: its forward node); "" for the outermost module."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return clean_name(path)
