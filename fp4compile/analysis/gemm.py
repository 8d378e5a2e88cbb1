"""A matrix product of a captured graph as data: what `find` returns, and what `plan` and `rewrite` read.

In a product out = A @ B the operand A is [..., m, k] and B is [..., k, n], as in `aten.mm`. In an fprop A is the
activation and B the weight, unless the model multiplies the weight from the left; `Operand.role` tells which is which.
"""

from dataclasses import dataclass

from torch.fx import Node


@dataclass(frozen=True)
class Shard:
    """How a process group cuts a parameter that is a DTensor.

    dim: the dimension that is cut. whole: its size in the whole parameter. group, ranks: the name and the size of the
    process group whose ranks have the parts.
    """

    dim: int
    whole: int
    group: str
    ranks: int


@dataclass(frozen=True)
class Input:
    """A graph input.

    parameter: the fully qualified name of a parameter; None for anything else.
    in_block: whether the parameter lies in a numbered block of the model. It may, although `parameter` has no number:
        where a block is compiled by itself, names begin below the block.
    frozen: whether the input needs no gradient, so that no step of an optimiser changes it.
    shards: how the parameter is cut, if this rank has a shard of it.
    adapter: whether a library of adapters added the parameter to a layer.
    """

    parameter: str | None = None
    in_block: bool = False
    frozen: bool = False
    shards: tuple[Shard, ...] = ()
    adapter: bool = False


@dataclass(frozen=True)
class Operand:
    """One operand of a product, as the matrix that is quantised.

    source: the node that holds the operand's elements, before any transpositions. A weight's source also precedes
        every other view and every cast that leaves the matrix as it is.
    transposed: whether the operand is `source` with its last two dimensions swapped.
    role: the field of the recipe that names the operand's format, e.g. "fprop_x"; None where no role was recognised.
    parameter: fully qualified name of the parameter that a weight comes from; None for activations and gradients.
    repeated: whether `source` has a leading dimension along which the same matrix repeats; the operand is that matrix.
    packed: whether `source` is a node of `expert_weights` or `gathered_weight`, whose codes are the operand. expert:
        which of the matrices of experts; None for all.
    """

    source: Node
    transposed: bool
    role: str | None = None
    parameter: str | None = None
    repeated: bool = False
    packed: bool = False
    expert: int | None = None


@dataclass(frozen=True)
class Gemm:
    """A matrix product out = alpha * (A @ B) + beta * bias, with A [..., m, k] and B [..., k, n].

    node: the product's node in the graph.
    product: "fprop", "dgrad", "wgrad", "attention", or "other" where `unsupported` says why it is left alone.
    module: fully qualified name of the layer, or of its parameter where the parameter is not called `weight`.
    a, b: the operands; None where `unsupported` or `packed` is set.
    bias, beta, alpha: the added term and the factors of `aten.addmm`; no bias for other products.
    dims: (m, n, k); the batch is counted among m where B is one matrix. Empty where the sizes are unknown.
    layer: (tokens, out features, in features) of the layer, of the whole one where this rank has a shard of its weight;
        (m, n, k) where there is no layer.
    forward: the fprop node that a dgrad or a wgrad belongs to; the product's own node otherwise.
    tied_to_embedding: whether the layer's weight is also the table of an embedding.
    selects: whether a top-k, a sort or a softmax is taken of the layer's outputs, as a router does.
    groups: how the experts' products form one node: "rows" where `offs` cuts the rows of A into one part for each
        matrix of B; "contraction" where `offs` cuts the contraction; "batch" where both operands are batches; "gather"
        where `index` says which matrix of the weight each matrix of a batch multiplies; None for one product.
    offs: the node of the offsets (see `groups`) or None. index: the node of an int tensor [batch] or None.
    swapped: whether the node's value is the transpose of the product.
    unsupported: why the product is left alone whatever the recipe says; None where the recipe decides.
    packed: the formats of A and B of a product that was quantised before the graph was captured
        (`fp4compile.pack_`); None for any other product.
    """

    node: Node
    product: str
    module: str
    a: Operand | None = None
    b: Operand | None = None
    bias: Node | None = None
    beta: float = 1
    alpha: float = 1
    dims: tuple = ()
    layer: tuple = ()
    forward: Node | None = None
    tied_to_embedding: bool = False
    selects: bool = False
    groups: str | None = None
    offs: Node | None = None
    index: Node | None = None
    swapped: bool = False
    unsupported: str | None = None
    packed: tuple[str | None, str] | None = None

    @property
    def packed_weight(self) -> Operand | None:
        """The operand whose codes are there, see `Operand.packed`; None where none is."""
        return next((side for side in (self.a, self.b) if side is not None and side.packed), None)
