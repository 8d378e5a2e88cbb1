"""Read the matrix products of a graph: their operands, the tensors behind these views, and the product's groups.

Entry: `product_of(node, parameters, gradients)`. `find` decides each product's role.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.analysis.grouped_products import Factor, Factors, factors_of
from fp4compile.analysis.views import View, source_of, value_key, view_of
from fp4compile.formats.quantize_spec import FLOAT_DTYPES
from fp4compile.ops.quantize import EXPERT_WEIGHTS, GATHERED_WEIGHT

aten = torch.ops.aten


@dataclass(frozen=True)
class Side:
    """An operand as the graph has it.

    swapped: whether the operand is `node` with the last two dimensions exchanged. view: the operand's view.
    root: the placeholder of the parameter that all its elements come from, or the node of packed experts; None if they
        come from anything else.
    index: the node of the indices where the operand gathers matrices from a batch; `node` and `view` then belong to
        the whole batch. None for any other operand.
    """

    node: Node
    view: View
    root: Node | None
    is_gradient: bool
    index: Node | None = None
    swapped: bool = False


@dataclass(frozen=True)
class Product:
    """A product as the graph has it. dims: (m, n, k) of one matrix of the batch. terms: bias, beta and alpha.

    groups: where the groups of a grouped product lie, "rows" or "contraction"; None for any other product. offs: the
    node of the groups' offsets. swapped: whether the node's value is the transpose of the product.
    """

    node: Node
    a: Side
    b: Side
    batch: int | torch.SymInt
    dims: tuple
    terms: dict = field(default_factory=dict)
    groups: str | None = None
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
    def matrix(self) -> View | None:
        """The weight, where one matrix serves the whole batch; None where it does not.

        A weight on side A qualifies only where the batch is 1: `scaled_mm` repeats B along a batch, never A.
        """
        one = self.weight is not None and self.groups is None and self.index is None
        found = self.weight.view.matrix() if one else None
        return found if self.weight is self.b or statically_true(self.batch == 1) else None

    @property
    def matrices(self) -> View | None:
        """The weight, where each group or each matrix of the batch has its own; None where it does not."""
        if self.weight is None or self.groups == "contraction" or self.matrix is not None:
            return None
        view = self.weight.view
        if self.groups is not None and self.weight is self.a:
            return None
        return view if len(view.size) == 3 and not view.repeats else None

    @property
    def weight_view(self) -> View | None:
        """`matrix` or `matrices`."""
        return self.matrices if self.matrix is None else self.matrix

    @property
    def grouping(self) -> tuple:
        """Equal for the products of one layer, forward and backward; () where the layer has one matrix."""
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


def product_of(node: Node, parameters: Collection[Node], gradients: Collection[Node]) -> Product | None:
    """The product of a node; None for a node that is no product, or a grouped product that cannot be read."""
    if node.op != "call_function":
        return None
    grouped = factors_of(node)
    if grouped is not None:
        return _read(node, grouped, parameters, gradients)
    if node.target not in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        return None
    terms = {}
    if node.target is aten.addmm.default:
        terms = {"bias": node.args[0], **{name: node.kwargs.get(name, 1) for name in ("beta", "alpha")}}
    a, b = map(Factor, node.args[-2:])
    return _read(node, Factors(a, b), parameters, gradients, terms)


def _read(
    node: Node, found: Factors, parameters: Collection[Node], gradients: Collection[Node], terms: dict | None = None
) -> Product:
    *batch, m, k = found.a.shape
    n = found.b.shape[-1]
    a, b = (_side(factor, parameters, gradients) for factor in (found.a, found.b))
    return Product(
        node, a, b, batch[0] if batch else 1, (m, n, k), terms or {}, found.groups, found.offs, found.swapped
    )


def _side(factor: Factor, parameters: Collection[Node], gradients: Collection[Node]) -> Side:
    node, view = factor.node, view_of(factor.node)
    view = view.swapped() if factor.swapped else view
    gathered = _gathered(view, parameters)
    if gathered is not None:
        return gathered
    root = view.root
    while root is not None and root not in parameters:
        source = source_of(root)  # not None where the root is a reshape that no strides express
        root = None if source is None else view_of(source).root
    return Side(node, view, root, node in gradients, swapped=factor.swapped)


def _gathered(view: View, parameters: Collection[Node]) -> Side | None:
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


def why_not_packed(product: Product) -> str | None:
    """Why a product of packed weights cannot read their codes; None where it can, or where its weight is a parameter.

    A product of all matrices or of one can read codes if it contracts the dimension along which they are quantised.
    """
    if product.weight.root.target is GATHERED_WEIGHT:
        return _why_not_gathered(_as_stored(product))
    if product.weight.root.target is not EXPERT_WEIGHTS:
        return None
    view = _as_stored(product)
    if not all(dtype in FLOAT_DTYPES for dtype in view.casts):
        return "packed weights that are cast to another dtype than of floats: they are dequantised"
    if view.key in (_all(view).key, _one(view).key) and view.offset % _elements(view) == 0:
        return None
    if view.swapped().key in (_all(view).key, _one(view).key):
        return "packed weights that are contracted along another dimension than they are packed: they are dequantised"
    return "a part of packed weights: they are dequantised"


def _why_not_gathered(view: View) -> str | None:
    """Why a forward product cannot read the codes of a gathered weight. view: the weight as [N, K]."""
    if view.key == _all(view).key and all(dtype in FLOAT_DTYPES for dtype in view.casts):
        return None
    return "a part of a weight that was gathered quantised, or its transpose: it is dequantised"


def packed_expert(product: Product) -> int | None:
    """Which matrix of packed experts a product multiplies; None for all. `why_not_packed` must return None for it."""
    view = _as_stored(product)
    return view.offset // _elements(view) if len(view.size) == 2 else None


def _as_stored(product: Product) -> View:
    """The weight of a product as [..., N, K]."""
    return product.weight_view.swapped() if product.weight is product.b else product.weight_view


def _all(view: View) -> View:
    """All elements of a view's root, with the view's casts."""
    return replace(view_of(view.root), casts=view.casts)


def _one(view: View) -> View:
    """The matrix of the root that begins at a view's offset."""
    whole = _all(view)
    return replace(whole, size=whole.size[1:], stride=whole.stride[1:], offset=view.offset)


def _elements(view: View) -> int:
    """The elements of one matrix of the root."""
    _, rows, columns = view.root.meta["val"].shape
    return max(rows * columns, 1)
