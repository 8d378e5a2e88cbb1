"""A matmul of a captured graph as data: what `find` returns, and what `plan` and `rewrite` read.

In out = A @ B the operand A is [..., m, k] and B is [..., k, n]. `GemmOperand.role` distinguishes activation and
weight.
"""

from dataclasses import dataclass

from torch.fx import Node

from fp4compile.formats.grouping import Grouping


@dataclass(frozen=True)
class Shard:
    """A process group's cut of a DTensor parameter along `dim`, whose size is `whole` in the whole parameter."""

    dim: int
    whole: int
    group: str
    ranks: int


@dataclass(frozen=True)
class Input:
    """A graph input.

    parameter: the fully qualified name of a parameter, below the block where a block is compiled by itself; else None.
    in_block: whether the parameter lies in a numbered block of the model. frozen: whether it needs no gradient.
    adapter: whether a library of adapters, such as peft, added it to a layer. buffer: whether it is a module's buffer.
    head: whether its layer was captured by itself, and has the name of an output head in the model.
    """

    parameter: str | None = None
    in_block: bool = False
    frozen: bool = False
    shards: tuple[Shard, ...] = ()
    adapter: bool = False
    buffer: bool = False
    head: bool = False


@dataclass(frozen=True)
class GemmOperand:
    """One operand of a matmul, as the matrix that is quantised.

    source: the node that holds the elements, before transpositions, and for a weight before other views and casts too.
    transposed: whether the operand is `source` with its last two dimensions swapped.
    role: the recipe's field of the operand's format, e.g. "fprop_x". parameter: the name of a weight's parameter.
    repeated: whether one matrix repeats along `source`'s leading dimension, and the operand is that matrix.
    packed: whether `source` is dequantised packed experts or a `gathered_weight`. expert: which of its matrices; None:
    all.
    argument: the node that the matmul reads, and whether the operand is that with its last two dimensions swapped.
    """

    source: Node
    transposed: bool
    role: str | None = None
    parameter: str | None = None
    repeated: bool = False
    packed: bool = False
    expert: int | None = None
    argument: tuple[Node, bool] | None = None


@dataclass(frozen=True)
class Gemm:
    """A matmul out = A @ B + bias, with A [..., m, k], B [..., k, n] and bias [n].

    product: "fprop", "dgrad", "wgrad", "attention", or "other" where `unsupported` says why it is not quantised.
    module: fully qualified name of the layer, or of its parameter where that is not called `weight`.
    a, b: None where `unsupported` or `packed` is set.
    dims: (m, n, k); a batch is counted among m where B is one matrix. Empty where unknown.
    layer: (tokens, out features, in features) of the whole layer; (m, n, k) where there is no layer.
    forward: the fprop node that a dgrad or a wgrad belongs to; the own node otherwise.
    tied_to_embedding: whether the weight is also an embedding's. selects: whether a router's choice reads the outputs.
    groups: how experts form one node: ragged where `offs` cuts a dimension; batched where both operands are batches;
        gathered where `index` says which matrix each one multiplies.
    swapped: whether the node's value is the transpose of the result.
    packed: the formats of A and B of a matmul that `fp4compile.pack_` quantised before.
    """

    node: Node
    product: str
    module: str
    a: GemmOperand | None = None
    b: GemmOperand | None = None
    bias: Node | None = None
    dims: tuple = ()
    layer: tuple = ()
    forward: Node | None = None
    tied_to_embedding: bool = False
    selects: bool = False
    groups: Grouping = Grouping.DENSE
    offs: Node | None = None
    index: Node | None = None
    swapped: bool = False
    unsupported: str | None = None
    packed: tuple[str | None, str] | None = None

    @property
    def packed_weight(self) -> GemmOperand | None:
        """The operand that is a weight whose codes exist already (`GemmOperand.packed`); None if neither is."""
        return next((side for side in (self.a, self.b) if side is not None and side.packed), None)
