"""Read the matmuls of a graph: their operands, the tensors that these view, and the dimension of groups.

Entry: `matmul_of(node, parameters, gradients)`. `find` decides each matmul's role. Two grouped operators are supported;
the library that defines the second one need not be installed:

    aten._grouped_mm(a, b, offs, bias) -> matmul
    transformers::grouped_mm_fallback(input, weight, offs) -> input x weight, groups of rows, in any dtype
    transformers::grouped_mm_fallback_backward(input, weight, offs, grad_output)
        -> (grad_output x weight^T, input^T x grad_output): two matmuls, each of them a result of one node
"""

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.analysis.views import NodeView, source_of, value_key, view_of
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.ops.nodes import is_expert_weights, is_gathered

aten = torch.ops.aten
# By the operands' dimensions.
_GROUPS = {(2, 3): Grouping.RAGGED_ROWS, (2, 2): Grouping.RAGGED_CONTRACTION, (3, 3): Grouping.DENSE}
# The arguments, which are all tensors, and the number of results, by operator name.
_FALLBACKS = {
    "transformers::grouped_mm_fallback": (("input", "weight", "offs"), 1),
    "transformers::grouped_mm_fallback_backward": (("input", "weight", "offs", "grad_output"), 2),
}


@dataclass(frozen=True)
class Side:
    """An operand in the graph: `node`, with the last two dimensions exchanged where `swapped`.

    root: the placeholder of the parameter that all elements come from, or the node of packed experts; else None.
    index: the node of the indices where the operand gathers matrices from a batch; `node` and `view` are the whole
    batch's.
    """

    node: Node
    view: NodeView
    root: Node | None
    is_gradient: bool
    index: Node | None = None
    swapped: bool = False


@dataclass(frozen=True)
class Matmul:
    """A matmul in the graph; see `Gemm`. dims: of one matrix of the batch."""

    node: Node
    a: Side
    b: Side
    batch: int | torch.SymInt
    dims: tuple
    bias: Node | None = None
    groups: Grouping = Grouping.DENSE
    offs: Node | None = None
    swapped: bool = False

    @property
    def weight(self) -> Side | None:
        """The operand that comes from a parameter; A if both do, None if neither does."""
        return next((side for side in (self.a, self.b) if side.root is not None), None)

    @property
    def other(self) -> Side:
        return self.b if self.weight is self.a else self.a

    @property
    def matrix(self) -> NodeView | None:
        """The weight, where one matrix serves the whole batch: `scaled_mm` repeats B along a batch, never A."""
        one = self.weight is not None and self.offs is None and self.index is None
        found = self.weight.view.matrix() if one else None
        return found if self.weight is self.b or statically_true(self.batch == 1) else None

    @property
    def matrices(self) -> NodeView | None:
        """The weight, where each group or each matrix of the batch has its own; None where it does not."""
        if self.weight is None or self.groups is Grouping.RAGGED_CONTRACTION or self.matrix is not None:
            return None
        view = self.weight.view
        if self.offs is not None and self.weight is self.a:
            return None
        return view if len(view.size) == 3 and not view.repeats else None

    @property
    def weight_view(self) -> NodeView | None:
        """`matrix` or `matrices`."""
        return self.matrices if self.matrix is None else self.matrix

    @property
    def grouping(self) -> tuple:
        """A key that is equal for the matmuls of one layer, forward and backward; () where the layer has one matrix."""
        if self.offs is not None:
            return ("offs", value_key(self.offs))
        if self.index is not None:
            return ("gather", value_key(self.index))
        one = statically_true(self.batch == 1) if self.weight is None else self.matrices is None
        return () if one else ("batch",)

    @property
    def index(self) -> Node | None:
        """The node of the indices by which the batch gathers matrices of the weight; None where it does not."""
        return None if self.weight is None else self.weight.index

    @property
    def sizes(self) -> tuple:
        """(m, n, k); the batch is counted among m, except where A is the weight or there is none."""
        m, n, k = self.dims
        return (self.batch * m if self.weight is self.b and self.weight_view is not None else m, n, k)


def matmul_of(node: Node, parameters: Collection[Node], gradients: Collection[Node]) -> Matmul | None:
    """The matmul of a node; None for any other node, for an unsupported grouped matmul and an addmm without a bias."""
    if node.op != "call_function":
        return None
    found = _grouped_operands(node)
    if found is None and node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        return None
    (left, swap_a), (right, swap_b), offs, groups, swapped = found or (
        (node.args[-2], False), (node.args[-1], False), None, Grouping.DENSE, False
    )  # fmt: skip
    *batch, m, k = _shape(left, swap_a)
    bias = node.args[0] if node.target is aten.addmm.default else None
    if bias is not None and not _is_bias(bias, node):
        return None
    a, b = (_side(*one, parameters, gradients) for one in ((left, swap_a), (right, swap_b)))
    dims = (m, _shape(right, swap_b)[-1], k)
    return Matmul(node, a, b, batch[0] if batch else 1, dims, bias, groups, offs, swapped)


def _is_bias(term: Node, addmm: Node) -> bool:
    """Whether an addmm adds one element to each column of its product, neither of them multiplied by a number."""
    value, columns = term.meta["val"], addmm.meta["val"].shape[-1]
    scaled = any(addmm.kwargs.get(name, 1) != 1 for name in ("beta", "alpha"))
    return not scaled and value.dim() == 1 and statically_true(value.shape[0] == columns)


def _shape(node: Node, swapped: bool) -> tuple:
    *batch, rows, columns = node.meta["val"].shape
    return (*batch, columns, rows) if swapped else (*batch, rows, columns)


def _side(node: Node, swapped: bool, parameters: Collection[Node], gradients: Collection[Node]) -> Side:
    view = view_of(node)
    view = view.swapped() if swapped else view
    gathered = _gathered(view, parameters)
    if gathered is not None:
        return gathered
    root = view.root
    while root is not None and root not in parameters:
        source = source_of(root)  # not None where the root is a reshape that no strides express
        root = None if source is None else view_of(source).root
    return Side(node, view, root, node in gradients, swapped=swapped)


def _gathered(view: NodeView, parameters: Collection[Node]) -> Side | None:
    """The operand w[index], or its transpose, of a parameter w of matrices."""
    gather = view.root
    if gather.target is not aten.index.Tensor or len(gather.args[1]) != 1:
        return None
    source, (index,) = gather.args
    whole, taken = view_of(source), view_of(gather)
    integers = index is not None and index.meta["val"].dtype in (torch.int32, torch.int64)
    if whole.root not in parameters or len(whole.size) != 3 or not integers or index.meta["val"].dim() != 1:
        return None
    if view.key == taken.key:
        return Side(source, whole, whole.root, False, index)
    return Side(source, whole.swapped(), whole.root, False, index) if view.key == taken.swapped().key else None


# ---------------------------------------------------------------- weights of packed experts


def why_not_packed(product: Matmul) -> str | None:
    """The reason that a matmul cannot read its packed weights' codes; None if it can, or for a parameter."""
    gathered = is_gathered(product.weight.root)
    if not gathered and not is_expert_weights(product.weight.root):
        return None
    view = _as_stored(product)
    if gathered:
        if view.key == _all(view).key and all(dtype in FLOAT_DTYPES for dtype in view.casts):
            return None
        return "a part of a weight that was gathered quantised, or its transpose: it is dequantised"
    if not all(dtype in FLOAT_DTYPES for dtype in view.casts):
        return "packed weights that are cast to another dtype than of floats: they are dequantised"
    if view.key in (_all(view).key, _one(view).key) and view.offset % _elements(view) == 0:
        return None
    if view.swapped().key in (_all(view).key, _one(view).key):
        return "packed weights that are contracted along another dimension than they are packed: they are dequantised"
    return "a part of packed weights: they are dequantised"


def packed_expert(product: Matmul) -> int | None:
    """The index of the packed expert that a matmul multiplies; None for all. Requires that `why_not_packed` is None."""
    view = _as_stored(product)
    return view.offset // _elements(view) if len(view.size) == 2 else None


def _as_stored(product: Matmul) -> NodeView:
    """The weight of a matmul as [..., N, K]."""
    return product.weight_view.swapped() if product.weight is product.b else product.weight_view


def _all(view: NodeView) -> NodeView:
    """All elements of a view's root, with the view's casts."""
    return replace(view_of(view.root), casts=view.casts)


def _one(view: NodeView) -> NodeView:
    """The one of the root's stacked matrices (one an expert) at whose first element a view begins."""
    whole = _all(view)
    return replace(whole, size=whole.size[1:], stride=whole.stride[1:], offset=view.offset)


def _elements(view: NodeView) -> int:
    """The elements of one matrix of the root."""
    _, rows, columns = view.root.meta["val"].shape
    return max(rows * columns, 1)


# ---------------------------------------------------------------- grouped operators


def is_grouped(target: Callable) -> bool:
    """Whether an operator is a grouped matmul with a known signature."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    signature = tuple(argument.name for argument in schema.arguments), len(schema.returns)
    return target is aten._grouped_mm.default or _FALLBACKS.get(schema.name) == signature


def computed_by(node: Node) -> Node:
    """The node of the operator that computes a value: the node itself, or the multi-output node of a `getitem`."""
    return node.args[0] if node.target is operator.getitem else node


def why_unread(node: Node) -> str | None:
    """The reason that the matmuls of a grouped operator are not supported; None if they are."""
    if node.target is not aten._grouped_mm.default:
        return _why_fallback_unread(node)
    _, _, offs, bias = _arguments(node)
    if bias is not None:  # torch has the argument, and raises an error where it is given
        return "grouped matmul with a bias"
    return None if offs is None else _why_offsets_unread(offs)


def _grouped_operands(node: Node) -> tuple | None:
    """(A, B, offsets, grouping, whether the node is the result's transpose) of a grouped matmul's node.

    A and B are (node, whether the last two dimensions are exchanged). None for any other node, and where `why_unread`
    returns a reason. Where groups are columns, W @ x is read as (x^T @ W^T)^T.
    """
    made = computed_by(node)
    if not is_grouped(made.target) or why_unread(made):
        return None
    if made.target is aten._grouped_mm.default:
        a, b, offs, _ = _arguments(made)
        ranks = (a.meta["val"].dim(), b.meta["val"].dim())
        if ranks == (3, 2):  # groups are columns of b, which are rows of its transpose
            return (b, True), (a, True), offs, Grouping.RAGGED_ROWS, True
        return (a, False), (b, False), offs, _GROUPS[ranks], False
    x, weight, offs, *gradient = made.args
    if not gradient:
        return (x, False), (weight, False), offs, Grouping.RAGGED_ROWS, False
    if made is node:
        return None  # both gradients; each is a matmul of its own
    if node.args[1] == 0:
        return (gradient[0], False), (weight, True), offs, Grouping.RAGGED_ROWS, False
    return (x, True), (gradient[0], False), offs, Grouping.RAGGED_CONTRACTION, False


def _why_fallback_unread(node: Node) -> str | None:
    x, weight, offs, *gradient = (arg.meta["val"] for arg in node.args)
    if len({each.dtype for each in (x, weight, *gradient)}) > 1:
        return "grouped matmul of operands of different dtypes"
    return _why_offsets_unread(node.args[2])


def _why_offsets_unread(offs: Node) -> str | None:
    dtype = offs.meta["val"].dtype
    return None if dtype == torch.int32 else f"grouped matmul with offsets of {dtype}"


def _arguments(node: Node) -> tuple[Node, Node, Node | None, Node | None]:
    """(a, b, offsets, bias) of a node of `aten._grouped_mm`."""
    a, b, *rest = node.args
    offs, bias = (rest[i] if len(rest) > i else node.kwargs.get(name) for i, name in enumerate(("offs", "bias")))
    return a, b, offs, bias
