"""Matmuls with B by index: few tokens, with an expert for each.

[S, M, K] x [E, N, K][index] -> [S, M, N]. The kernel of `skinny` reads the matrices through the index, without a
gathered copy. If two tokens have one expert, the L2 cache serves the second.
"""

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Operand
from fp4compile.formats.product_spec import ProductSpec
from fp4compile.hardware import Target
from fp4compile.templates.gemm.call import kernel_operand
from fp4compile.templates.gemm.skinny import SKINNY_ROWS, experts_config, multiply_experts
from fp4compile.templates.gemm.streaming import executes, streams
from fp4compile.templates.launch import target_of
from fp4compile.templates.problem import Problem

_MOST = 1024  # indices that a program reads


def serves(a: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype, target: Target) -> bool:
    """Whether `multiply_indexed` computes this matmul."""
    few = statically_true(index.shape[0] <= _MOST) and statically_true(a.data.shape[1] <= SKINNY_ROWS)
    linear = a.scales is None or a.scales.dim() == 3
    filled = statically_true(a.data.numel() > 0) and statically_true(b.data.shape[1] > 0)
    integers = index.dtype in (torch.int32, torch.int64) and isinstance(index.shape[0], int)
    if not (few and linear and filled and integers):
        return False
    p = _problem(_flat(a), b, out_dtype, target)
    return executes(p) and streams(p)


def multiply_indexed(a: Operand, b: Operand, index: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The matmul of A [S, M, K] and B[index], where B is [E, N, K] and index an int [S].

    Negative indices count from the last matrix. An index out of range is clamped, because the host does not read
    indices. `formats.checks.check` has checked the arguments.
    """
    flat = _flat(a)
    p = _problem(flat, b, out_dtype, target_of(a.data.device))
    operands = kernel_operand(flat, p.a), kernel_operand(b, p.b)
    config = experts_config(p, a.data.shape[1])
    out = multiply_experts(p, config, *operands, index.contiguous(), indexed=True)
    return out.view(*a.data.shape[:2], p.n)


def _flat(a: Operand) -> Operand:
    """A as one matrix, with its block scales and row scales flattened too."""
    outer = a.outer.flatten(0, 1) if a.outer is not None and a.outer.dim() == 3 else a.outer
    return Operand(a.data.flatten(0, 1), None if a.scales is None else a.scales.flatten(0, 1), outer, a.format)


def _problem(flat: Operand, b: Operand, out_dtype: torch.dtype, target: Target) -> Problem:
    matrices, n, _ = b.data.shape
    spec = ProductSpec(flat.spec, b.spec, out_dtype, Grouping.RAGGED_ROWS)
    return Problem(spec, flat.data.shape[0], n, flat.k, target, groups=matrices)
