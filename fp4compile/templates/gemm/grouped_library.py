"""Grouped matmuls of quantised operands by a library: CUTLASS, through torch's `_scaled_grouped_mm`.

It takes row scales on Hopper (GroupedBlas.cpp, ScaledGroupMM.cu, GroupMMCommon.cuh): E4M3, A [M, K] by rows and B [G,
K, N] by columns, rows of a multiple of 16 bytes, one float32 scale per row of A and column of B, results in bfloat16,
fewer than 1024 groups. Its meta implementation checks the rest.

It does not check offsets and leaves rows of no group uninitialised. So it gets the bounded offsets of `group_ends`, and
rows of no group are cleared afterwards. The kernels of this package compute groups along the contraction: an empty
group triggers a device assertion in the library.
"""

import torch
import triton
import triton.language as tl

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates.device.group_tiles import clear_rows, ends_of, last_of
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import LIBRARY, opaque
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem

_MOST_GROUPS = 1023


@triton.jit
def group_ends(offs_ptr, ends_ptr, groups, rows, GROUPS: tl.constexpr):
    """Store the row after the last one of each group to ends: nondecreasing offsets from 0 to rows. One program."""
    g = tl.arange(0, GROUPS)
    ends = ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), rows)
    tl.store(ends_ptr + g, ends, mask=g < groups)


@triton.jit
def clear_ungrouped_rows(out_ptr, ends_ptr, groups, rows, n, GROUPS: tl.constexpr):
    """Store zeros in the rows of out [rows, n] after the last group. ends: from `group_ends`."""
    g = tl.arange(0, GROUPS)
    end = last_of(tl.load(ends_ptr + g, mask=g < groups, other=0))
    clear_rows(out_ptr, end, rows, n, 4, 512)


def _launch_group_ends(call: Call) -> torch.Tensor:
    p, ends = call.problem, torch.empty_like(call.offs)
    launch(group_ends, 1, call.offs, ends, p.groups, p.rows, num_warps=1, GROUPS=triton.next_power_of_2(p.groups))
    return ends


def _clear(out: torch.Tensor, ends: torch.Tensor, p: Problem) -> torch.Tensor:
    """out, with zeros in the rows of no group."""
    launch(clear_ungrouped_rows, p.target.multiprocessors, out, ends, p.groups, p.rows, p.n, num_warps=4,
           GROUPS=triton.next_power_of_2(p.groups))  # fmt: skip
    return out


def serves_row_scaled(p: Problem) -> bool:
    """Whether the problem is `float8_rowwise` on Hopper, with groups of rows, to bfloat16."""
    formats = all(x.element == "e4m3" and x.scale == "none" and x.outer == "row" for x in (p.a, p.b))
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.k % 16 == 0)
    filled = all(statically_true(size > 0) for size in (p.rows, p.n, p.k))
    groups = p.by_rows and p.spec.out_dtype == torch.bfloat16 and p.groups <= _MOST_GROUPS
    return p.target.sm == 90 and formats and aligned and filled and groups


def run_row_scaled(call: Call, config: None) -> torch.Tensor:
    """The matmuls of all groups, by the library, between two launches."""
    spec, ends = call.problem.spec, _launch_group_ends(call)
    a, b = _operand(call.a), _operand(call.b)
    if _compat.times_products():  # Inductor would time its own templates for an op that it can lower
        x = Arguments.of(a, b, None, spec.out_dtype, offs=ends, fast_accumulation=spec.fast_accumulation)
        return _clear(opaque(x, LIBRARY)[0], ends, call.problem)
    return _clear(row_scaled(a, b, ends, spec.out_dtype, spec.fast_accumulation), ends, call.problem)


def row_scaled(
    a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """The matmuls of all groups of `float8_rowwise` operands, A [M, K] by rows in groups and B [G, N, K] -> [M, N].

    fast_accumulation: whether the sums may have fewer bits than float32.
    """
    return torch._scaled_grouped_mm(
        a.data, b.data.transpose(-2, -1), a.outer.view(-1), b.outer.view(b.data.shape[:2]), ends,
        out_dtype=out_dtype, use_fast_accum=fast_accumulation,
    )  # fmt: skip


def _operand(x: KernelOperand) -> Operand:
    return Operand(x.data.view(x.type.format.data_dtype), None, x.outer, x.type.format)
