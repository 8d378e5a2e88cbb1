"""Products whose rows take their matrices by index: few tokens that each have an expert of their own.

[S, M, K] x [E, N, K][index] -> [S, M, N]. The kernel of few rows for each group reads the matrices where they lie.
Nothing is gathered, and where two tokens have one expert, the L2 cache serves the second.
"""

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.operand import Operand
from fp4compile.hardware import Target
from fp4compile.templates.gemm.call import kernel_operand
from fp4compile.templates.gemm.heuristics import SKINNY_ROWS
from fp4compile.templates.gemm.problem import check_devices, check_formats, checked_operand
from fp4compile.templates.grouped.heuristics import grouped_skinny_config
from fp4compile.templates.grouped.problem import GroupedProblem
from fp4compile.templates.grouped.skinny import launch_skinny, streams_experts
from fp4compile.templates.launch import target_of

_MOST = 1024  # indices that a program looks at


def serves(a: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype, target: Target) -> bool:
    """Whether `scaled_mm_gathered` computes this product. Raises what that raises."""
    few = statically_true(index.shape[0] <= _MOST) and statically_true(a.data.shape[1] <= SKINNY_ROWS)
    linear = a.scales is None or a.scales.dim() == 3
    filled = statically_true(a.data.numel() > 0) and statically_true(b.data.shape[1] > 0)
    integers = index.dtype in (torch.int32, torch.int64) and isinstance(index.shape[0], int)
    if not (target.isa > 0 and few and linear and filled and integers):
        return False
    return streams_experts(_problem(_flat(a), b, index, out_dtype, target))


def scaled_mm_gathered(a: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The product of A [S, M, K] and the matrices of B [E, N, K] that index, an int [S], gives its rows.

    Negative indices count from the last matrix. Others that do not exist count as the nearest that does: their values
    are only known on the device.
    Raises ValueError or TypeError, naming the argument, for operands, scales or devices that do not fit.
    """
    flat = _flat(a)
    p = _problem(flat, b, index, out_dtype, target_of(a.data.device))
    operands = kernel_operand(flat, p.a), kernel_operand(b, p.b)
    config = grouped_skinny_config(p, a.data.shape[1])
    out = launch_skinny(p, config, *operands, index.contiguous(), indexed=True)
    return out.view(*a.data.shape[:2], p.n)


def _flat(a: Operand) -> Operand:
    """A as one matrix: scales, and an outer scale of rows, follow."""
    outer = a.outer.flatten(0, 1) if a.outer is not None and a.outer.dim() == 3 else a.outer
    return Operand(a.data.flatten(0, 1), None if a.scales is None else a.scales.flatten(0, 1), outer, a.format)


def _problem(flat: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype, target: Target) -> GroupedProblem:
    check_formats(flat, b, out_dtype)
    check_devices(flat, b, index=index)
    a_type, _, rows, k = checked_operand("a", flat)
    b_type, (matrices,), n, b_k = checked_operand("b", b)
    if b_k != k:
        raise ValueError(f"a, b: rows of {k} and of {b_k} elements cannot be multiplied")
    return GroupedProblem(a_type, b_type, rows, rows, n, k, matrices, False, out_dtype, target)
