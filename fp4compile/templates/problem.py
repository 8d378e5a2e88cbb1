"""A product without its tensors: sizes, formats, scale layouts, epilogue and GPU, which is all that `choose` reads.

A `Problem` is frozen. Its sizes may be symbolic; with concrete sizes it can be a key of a dictionary. `formats.checks`
has checked the arguments before.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.groups import padded_rows
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target

_COMPUTE = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class OperandType:
    """The properties of an operand, apart from sizes, that a kernel is specialised for.

    format: None for a plain operand. dtype: dtype of the data. swizzled: whether the scales are swizzled. outer: the
    granularity of the outer scale: "none", "tensor", "row" or, in grouped products and for B of two matrices, "group".
    """

    format: BlockFormat | None
    dtype: torch.dtype
    swizzled: bool = False
    outer: str = "none"

    @property
    def element(self) -> str:
        return "plain" if self.format is None else self.format.element

    @property
    def scale(self) -> str:
        return "none" if self.format is None or self.format.scale is None else self.format.scale

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit, which is two elements."""
        if self.format is None:
            return 2 * self.dtype.itemsize
        return 1 if self.format.packed else 2


@dataclass(frozen=True)
class Problem:
    """A product [batches, m, k] x [batches or 1, n, k] -> [batches, m, n], or the products of groups.

    b_batched: whether each matrix of A has its own B. bias: its dtype, None without one. epilogue: whether pointwise
    operations follow in the same kernel; out_dtype is what the product is rounded to before them. result: the format to
    which that kernel quantises the rows of the result; None where it stores the result in 16 or 32 bits. pair: whether
    the rows of B are two matrices [n, k], and the epilogue makes one result [m, n] of both products. two_weights: with
    groups, whether B is [2 groups, n, k]: all groups' matrices of the first product, then all of the second product.
    amax: whether the kernel finds the amax of the result as well. operand_bytes: for each element of a result that is
    quantised or whose amax is found, bytes that the epilogue reads of other tensors of the result's size.

    ragged: None where all products have the same sizes; else the dimension that groups of any sizes share:
        "rows": [m, k] x [groups, n, k] -> [m, n], the matrix of B by the row's group;
        "contraction": [m, k] x [n, k] -> [groups, m, n], of each group's part of k.
    fast_accumulation: whether FP8 matrix units may keep the sums in fewer bits than float32 has.
    *_padded: with groups along the contraction, whether the operand's groups are padded: in quantised operands and in
    plain operands of dequantised values they are.
    """

    a: OperandType
    b: OperandType
    m: int
    n: int
    k: int
    out_dtype: torch.dtype
    target: Target
    bias: torch.dtype | None = None
    batches: int = 1
    b_batched: bool = False
    epilogue: bool = False
    ragged: str | None = None
    groups: int = 1
    a_padded: bool = True
    b_padded: bool = True
    fast_accumulation: bool = False
    result: BlockFormat | None = None
    pair: bool = False
    operand_bytes: int = 0
    amax: bool = False
    two_weights: bool = False

    @property
    def static(self) -> bool:
        """Whether no size is symbolic."""
        return all(isinstance(size, int) for size in (self.m, self.n, self.k, self.batches, self.groups))

    @property
    def along_k(self) -> bool:
        """Whether groups lie along the contraction."""
        return self.ragged == "contraction"

    @property
    def rows(self) -> int:
        """With groups: how many rows the offsets cut, rows of no group included."""
        return self.k if self.along_k else self.m

    @property
    def padded_k(self) -> int:
        """Elements of an operand's row over all groups, with the padding of each group."""
        return padded_rows(self.k, self.groups) if self.along_k else self.k

    @property
    def b_matrices(self) -> int:
        if self.ragged == "rows":
            return 2 * self.groups if self.two_weights else self.groups
        return self.batches if self.b_batched else 1

    @property
    def outer_of_each_matrix(self) -> bool:
        """Whether the two matrices of B, one below the other, have an outer scale each."""
        return self.pair and self.ragged is None and self.b.outer == "group"

    @property
    def b_rows(self) -> Any:
        """Rows of a matrix of B in memory."""
        return 2 * self.n if self.pair and not self.two_weights else self.n

    @property
    def shape(self) -> tuple:
        """The shape of the result."""
        if self.ragged is None:
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
        """The type that holds every value of both operands: "bf16", "fp16" or "fp32"; see `device.dequantize`."""
        plain = [x.dtype for x in (self.a, self.b) if x.format is None]
        if "e8m0" in (self.a.scale, self.b.scale):
            return "fp32" if any(dtype != torch.bfloat16 for dtype in plain) else "bf16"
        if len(set(plain)) > 1:
            return "fp32"
        return _COMPUTE[plain[0]] if plain else "fp16"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The 16-bit dtype of operands that are dequantised in memory."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16

    def row_bytes(self, x: OperandType) -> int:
        """Bytes of a row of an operand's data, padding included."""
        if x.format is None:
            return self.padded_k * x.dtype.itemsize
        elements = ceil_div(self.padded_k, x.format.block_cols) * x.format.block_cols
        return elements // 2 if x.format.packed else elements


def operand_type(x: Operand) -> OperandType:
    """The type of an operand, whose tensors may be fake."""
    outer = "none" if x.outer is None else {0: "tensor", 1: "group"}.get(x.outer.dim(), "row")
    return OperandType(x.format, x.data.dtype, x.swizzled, outer)


def problem_of(x: Arguments, target: Target) -> Problem:
    """The problem of a product's arguments, which may be fake tensors. It reads no data and makes no tensor."""
    a, b = operand_type(x.a), operand_type(x.b)
    *a_batch, m, _ = x.a.data.shape
    *b_batch, n, _ = x.b.data.shape
    pair = x.epilogue is not None and x.epilogue.pair
    if pair and not x.two_weights:
        n = n // 2
    if x.offs is not None:
        groups = x.offs.shape[0]
        if b_batch:
            return Problem(a, b, m, n, _k(x), x.out_dtype, target, ragged="rows", groups=groups,
                           epilogue=x.epilogue is not None, fast_accumulation=x.fast_accumulation,
                           result=_result_format(x), pair=pair, operand_bytes=_operand_bytes(x),
                           two_weights=x.two_weights,
                           amax=x.epilogue is not None and x.epilogue.amax)  # fmt: skip
        padded = padded_rows(x.rows, groups)
        # There are always more padded rows than rows.
        a_padded, b_padded = (each.format is not None or statically_true(each.k == padded) for each in (x.a, x.b))
        return Problem(a, b, m, n, x.rows, x.out_dtype, target, ragged="contraction", groups=groups,
                       a_padded=a_padded, b_padded=b_padded, fast_accumulation=x.fast_accumulation)  # fmt: skip
    batches: Any = 1
    for size in a_batch:
        batches = batches * size
    shared = bool(a_batch) and not b_batch
    linear_rows = not (a.swizzled or (a.format is not None and a.format.square))
    if shared and (linear_rows or statically_true(batches == 1)):  # one product of all rows
        batches, m = 1, batches * m
    return Problem(a, b, m, n, _k(x), x.out_dtype, target, None if x.bias is None else x.bias.dtype, batches,
                   not shared, x.epilogue is not None, fast_accumulation=x.fast_accumulation,
                   result=_result_format(x), pair=pair, operand_bytes=_operand_bytes(x),
                   amax=x.epilogue is not None and x.epilogue.amax)  # fmt: skip


def _operand_bytes(x: Arguments) -> int:
    if x.epilogue is None or (x.epilogue.quantize is None and not x.epilogue.amax):
        return 0
    return sum(x.auxiliaries[i].dtype.itemsize for i, kind in x.epilogue.kinds.items() if kind == "aux")


def _result_format(x: Arguments) -> BlockFormat | None:
    return None if x.epilogue is None or x.epilogue.quantize is None else x.epilogue.quantize.format


def _k(x: Arguments) -> Any:
    """The contraction length: the length of the shorter operand. The rest of the longer one is padding, zeros."""
    return min(x.a.k, x.b.k)
