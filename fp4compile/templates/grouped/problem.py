"""What the products of all groups are, tensors apart, and the same with tensors, as kernels take them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference
from fp4compile.formats.groups import check_offs, padded_rows
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.templates.gemm.call import KernelOperand, kernel_operand
from fp4compile.templates.gemm.problem import (
    OperandType,
    block_of,
    check_devices,
    check_formats,
    checked_operand,
    compute_of,
)
from fp4compile.templates.view import span, within


@dataclass(frozen=True)
class GroupedProblem:
    """A product for each group: [rows, k] x [groups, n, k] -> [rows, n] or, along_k, [m, k] x [n, k] -> [groups, m, n].

    rows: in all groups and beyond; may be symbolic. m: rows of the result of one product, and of all of them where the
    groups are rows. k: along_k that of all groups, as quantised operands have it, padded. *_padded: along_k, whether
    the operand's groups are padded: quantised ones are, and plain ones that hold values of such.
    """

    a: OperandType
    b: OperandType
    rows: int
    m: int
    n: int
    k: int
    groups: int
    along_k: bool
    out_dtype: torch.dtype
    target: Target
    a_padded: bool = True
    b_padded: bool = True

    @property
    def block(self) -> int:
        return block_of(self.a, self.b)

    @property
    def compute(self) -> str:
        return compute_of(self.a, self.b)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of operands that are dequantised in memory: 16 bits."""
        return torch.float16 if self.compute == "fp16" else torch.bfloat16

    @property
    def shape(self) -> tuple:
        """Of the result."""
        return (self.groups, self.m, self.n) if self.along_k else (self.rows, self.n)

    @property
    def empty(self) -> bool:
        """Whether the result has no element."""
        return statically_true(self.m * self.n == 0)


@dataclass(frozen=True, eq=False)
class GroupedCall:
    """The products of all groups as they are launched. offs: int32 [groups], contiguous.

    Raises RuntimeError where a kernel of the problem's sizes would leave the storage of a tensor.
    """

    problem: GroupedProblem
    a: KernelOperand
    b: KernelOperand
    offs: torch.Tensor

    def __post_init__(self) -> None:
        p = self.problem
        self.a.check(1, p.m if p.along_k else p.rows)
        self.b.check(1 if p.along_k else p.groups, p.n)
        within(self.offs, span((p.groups,), (1,)))

    def empty(self) -> torch.Tensor:
        """Memory for the result."""
        return self.a.data.new_empty(self.problem.shape, dtype=self.problem.out_dtype)


@dataclass(frozen=True)
class GroupedCandidate:
    """A kernel that computes the products of all groups in one launch; fields as of `gemm.candidate.Candidate`.

    dequantizes: whether it writes quantised operands to memory in 16 bits first.
    """

    name: str
    tier: str
    serves: Callable[[GroupedProblem], bool]
    configure: Callable[[GroupedProblem], Any]
    run: Callable[[GroupedCall, Any], torch.Tensor]
    configurations: Callable[[GroupedProblem], tuple] | None = None
    dequantizes: bool = False

    def to_time(self, problem: GroupedProblem) -> tuple:
        """The configurations between which only time can decide; at least one."""
        return (self.configure(problem),) if self.configurations is None else self.configurations(problem)


def problem_of(
    a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype, target: Target
) -> GroupedProblem:
    """The problem of the arguments of `scaled_grouped_mm`, which may be fake tensors. Reads no data, makes no tensor.

    Raises ValueError or TypeError, naming the argument, for operands, scales, offsets or a dtype that do not fit.
    """
    check_formats(a, b, out_dtype)
    if a.data.dim() != 2 or b.data.dim() not in (2, 3):
        raise ValueError(f"a, b: expected [M, K] and [G, N, K], or [P, W] and [Q, W]; got shapes {tuple(a.data.shape)} "
                         f"and {tuple(b.data.shape)}")  # fmt: skip
    along_k = b.data.dim() == 2
    check_offs(offs, None if along_k else b.data.shape[0])
    check_devices(a, b, offs=offs)
    groups, m, n = offs.shape[0], a.data.shape[0], b.data.shape[-2]
    padded = padded_rows(rows, groups)
    a_outer = (groups, m, 1) if along_k else (m, 1)
    a_type, _, _, a_k = checked_operand("a", a, ((), (groups,), a_outer), None if along_k else padded)
    b_type, _, _, b_k = checked_operand("b", b, ((), (groups,), (groups, n, 1)))
    # There are always more padded rows than rows. Where groups are rows, nothing is padded along K.
    a_padded, b_padded = (
        not along_k or x.format is not None or statically_true(k == padded) for x, k in ((a, a_k), (b, b_k))
    )
    if along_k:
        for name, x, k, is_padded in (("a", a, a_k, a_padded), ("b", b, b_k, b_padded)):
            expected = padded if is_padded else rows
            if k != expected:
                raise ValueError(f"{name}: expected rows of {expected} elements for {rows} rows of {groups} groups, "
                                 f"got shape {tuple(x.data.shape)}")  # fmt: skip
            if x.format is not None and x.format.square:
                raise ValueError(f"{name}: groups of rows have no square blocks, got format {x.format.name}")
        k = padded
    else:
        if m != rows:
            raise ValueError(f"rows: expected the {m} rows of a, got {rows}")
        if a.format is not None and a.format.square:
            raise ValueError(f"a: groups of rows have no square blocks, got format {a.format.name}")
        k = reference.contraction(a_k, a.format, b_k, b.format)
    return GroupedProblem(a_type, b_type, rows, m, n, k, groups, along_k, out_dtype, target, a_padded, b_padded)


def call_of(
    a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype, target: Target
) -> GroupedCall:
    """The call of these arguments. Raises what `problem_of` raises."""
    p = problem_of(a, b, offs, rows, out_dtype, target)
    return GroupedCall(p, kernel_operand(a, p.a), kernel_operand(b, p.b), offs.contiguous())
