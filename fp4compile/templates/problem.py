"""A matmul without its tensors: its spec, sizes and GPU, the only input of `choose`.

A `Problem` is frozen. Its sizes may be symbolic; with concrete sizes it can be a key of a dictionary. `formats.checks`
has checked the arguments before.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.grouping import Grouping, padded_rows
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.hardware import Target

_COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Problem:
    """A matmul [batches, m, k] x [batches or 1, n, k] -> [batches, m, n], or the matmuls of groups.

    spec: all but the sizes. b_batched: whether each matrix of A has its own B.
    With ragged groups, `groups` of them share the rows, [m, k] x [groups, n, k] -> [m, n], or the contraction,
    [m, k] x [n, k] -> [groups, m, n].
    two_weights: with groups and an epilogue of two matmuls, whether B is [2 groups, n, k]: all groups' matrices of the
    first matmul, then all of the second matmul. Without it, the rows of B are two matrices [n, k].
    operand_bytes: for an epilogue that quantises or finds the amax, bytes that it reads of other tensors of the
    result's size, for each element.
    *_padded: with groups along the contraction, whether the operand's groups are padded: in quantised operands and in
    plain operands of dequantised values they are.
    """

    spec: ProductSpec
    m: int
    n: int
    k: int
    target: Target
    batches: int = 1
    b_batched: bool = False
    groups: int = 1
    a_padded: bool = True
    b_padded: bool = True
    operand_bytes: int = 0
    two_weights: bool = False

    @property
    def a(self) -> OperandSpec:
        return self.spec.a

    @property
    def b(self) -> OperandSpec:
        return self.spec.b

    @property
    def ragged(self) -> bool:
        """Whether groups of arbitrary sizes share a dimension."""
        return self.by_rows or self.along_k

    @property
    def by_rows(self) -> bool:
        """Whether groups of rows have a matrix of B each."""
        return self.spec.grouping is Grouping.RAGGED_ROWS

    def with_epilogue(self, epilogue: Epilogue | None = None) -> "Problem":
        """The problem with an epilogue; None for one that stores the matmul's result unchanged."""
        stored = Epilogue((), self.spec.out_dtype, self.spec.out_dtype) if epilogue is None else epilogue
        return replace(self, spec=replace(self.spec, epilogue=stored))

    @property
    def static(self) -> bool:
        """Whether no size is symbolic."""
        return all(isinstance(size, int) for size in (self.m, self.n, self.k, self.batches, self.groups))

    @property
    def along_k(self) -> bool:
        """Whether groups lie along the contraction."""
        return self.spec.grouping is Grouping.RAGGED_CONTRACTION

    @property
    def rows(self) -> int:
        """With groups: the number of rows that the offsets cut, rows of no group included."""
        return self.k if self.along_k else self.m

    @property
    def padded_k(self) -> int:
        """Elements of an operand's row over all groups, with the padding of each group."""
        return padded_rows(self.k, self.groups) if self.along_k else self.k

    @property
    def b_matrices(self) -> int:
        if self.by_rows:
            return 2 * self.groups if self.two_weights else self.groups
        return self.batches if self.b_batched else 1

    @property
    def outer_of_each_matrix(self) -> bool:
        """Whether the two stacked matrices of B have separate global scales."""
        return self.spec.pair and not self.ragged and self.b.outer == "group"

    @property
    def b_rows(self) -> Any:
        """Rows of a matrix of B in memory."""
        return 2 * self.n if self.spec.pair and not self.two_weights else self.n

    @property
    def shape(self) -> tuple:
        """The shape of the result."""
        if not self.ragged:
            return self.batches, self.m, self.n
        return (self.groups, self.m, self.n) if self.along_k else (self.m, self.n)

    @property
    def empty(self) -> bool:
        """Whether the result has no element."""
        return statically_true(self.m * self.n * self.batches == 0)

    @property
    def block(self) -> int:
        """Elements of the longer block of both operands; 32, a unit of work, without block scales."""
        block = max((x.format.block_cols for x in (self.a, self.b) if x.format is not None), default=1)
        return block if block > 1 else 32

    @cached_property
    def compute(self) -> str:
        """The type that holds every value of both operands: "bf16", "fp16" or "fp32"; see `device.dequantized_tile`."""
        plain = [x.dtype for x in (self.a, self.b) if x.format is None]
        if "e8m0" in (self.a.scale, self.b.scale):
            return "fp32" if any(dtype != torch.bfloat16 for dtype in plain) else "bf16"
        if len(set(plain)) > 1:
            return "fp32"
        return _COMPUTE[plain[0]] if plain else "fp16"

    @property
    def scales_sums(self) -> bool:
        """Whether block scales are applied to the sums of blocks, because no 16 bits hold an element times a scale."""
        return any(x.format is not None and not x.format.exact for x in (self.a, self.b))

    @property
    def compute_dtype(self) -> torch.dtype:
        """The 16-bit dtype of operands that are dequantised in memory."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16

    def row_bytes(self, x: OperandSpec) -> int:
        """Bytes of a row of an operand's data, padding included."""
        if x.format is None:
            return self.padded_k * x.dtype.itemsize
        elements = ceil_div(self.padded_k, x.format.block_cols) * x.format.block_cols
        return elements // 2 if x.format.packed else elements


def problem_of(x: Arguments, target: Target) -> Problem:
    """The problem of a matmul's arguments, which may be fake tensors. It reads no data and makes no tensor."""
    spec = x.spec
    *a_batch, m, _ = x.a.data.shape
    n = x.b.data.shape[-2]
    if spec.pair and not x.two_weights:
        n = n // 2
    if x.offs is not None:
        groups = x.offs.shape[0]
        if spec.grouping is Grouping.RAGGED_ROWS:
            return Problem(spec, m, n, _k(x), target, groups=groups, operand_bytes=_operand_bytes(x),
                           two_weights=x.two_weights)  # fmt: skip
        padded = padded_rows(x.rows, groups)
        # There are always more padded rows than rows.
        a_padded, b_padded = (each.format is not None or statically_true(each.k == padded) for each in (x.a, x.b))
        return Problem(spec, m, n, x.rows, target, groups=groups, a_padded=a_padded, b_padded=b_padded)
    batches: Any = 1
    for size in a_batch:
        batches = batches * size
    shared = bool(a_batch) and spec.grouping is Grouping.DENSE
    linear_rows = not (x.a.swizzled or (x.a.format is not None and x.a.format.square))
    if shared and (linear_rows or statically_true(batches == 1)):  # one matmul of all rows
        batches, m = 1, batches * m
    return Problem(spec, m, n, _k(x), target, batches, not shared, operand_bytes=_operand_bytes(x))


def _operand_bytes(x: Arguments) -> int:
    epilogue = x.spec.epilogue
    if epilogue is None or x.spec.results == 1:
        return 0
    return sum(x.auxiliaries[i].dtype.itemsize for i, kind in epilogue.kinds.items() if kind == "aux")


def _k(x: Arguments) -> Any:
    """The contraction length: the length of the shorter operand. The rest of the longer one is padding, zeros."""
    return min(x.a.k, x.b.k)
