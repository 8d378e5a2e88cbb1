"""Grouped products that a library computes of the operands as they are quantised: CUTLASS, by `_scaled_grouped_mm`.

What torch asks of the arguments (GroupedBlas.cpp, ScaledGroupMM.cu, GroupMMCommon.cuh): E4M3 on compute capability 9.0,
A [M, K] by rows and B [G, K, N] by columns, rows of whole 16 bytes, one float32 scale a row of A and a column of B,
results in bfloat16, fewer than 1024 groups. Its meta implementation checks the rest.

It takes offsets as they are, without a bound, and leaves rows of no group as the memory was. So it is given those that
`groups` makes of them, and these rows are cleared after it. Groups along the contraction stay with `dequant_operand`:
there the library stops the GPU with an assertion at an empty group.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.group_tiles import clear_rows, ends_of, last_of
from fp4compile.templates.grouped.problem import GroupedCall, GroupedCandidate, GroupedProblem
from fp4compile.templates.launch import launch

_MOST_GROUPS = 1023


@triton.jit
def group_ends(offs_ptr, ends_ptr, groups, rows, GROUPS: tl.constexpr):
    """The row after the last one of each group to ends: offsets that do not decrease, from 0 to rows. One program."""
    g = tl.arange(0, GROUPS)
    ends = ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), rows)
    tl.store(ends_ptr + g, ends, mask=g < groups)


@triton.jit
def clear_ungrouped_rows(out_ptr, ends_ptr, groups, rows, n, GROUPS: tl.constexpr):
    """Zeros in the rows of out [rows, n] after the last group. ends: from `group_ends`."""
    g = tl.arange(0, GROUPS)
    end = last_of(tl.load(ends_ptr + g, mask=g < groups, other=0))
    clear_rows(out_ptr, end, rows, n, 4, 512)


def _serves(p: GroupedProblem) -> bool:
    """`float8_rowwise` on Hopper, rows in groups, to bfloat16."""
    formats = all(x.element == "e4m3" and x.scale == "none" and x.outer == "row" for x in (p.a, p.b))
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.k % 16 == 0)
    filled = statically_true(p.rows > 0) and statically_true(p.k > 0) and p.groups <= _MOST_GROUPS
    return p.target.sm == 90 and formats and not p.along_k and p.out_dtype == torch.bfloat16 and aligned and filled


def run(call: GroupedCall, config: None) -> torch.Tensor:
    """The products of all groups, by the library, between two launches."""
    p, groups = call.problem, triton.next_power_of_2(call.problem.groups)
    ends = torch.empty_like(call.offs)
    launch(group_ends, 1, call.offs, ends, p.groups, p.rows, num_warps=1, GROUPS=groups)
    a, b = (x.data.view(torch.float8_e4m3fn) for x in (call.a, call.b))
    out = torch._scaled_grouped_mm(
        a, b.transpose(-2, -1), call.a.outer.view(p.rows), call.b.outer.view(p.groups, p.n), ends,
        out_dtype=p.out_dtype, use_fast_accum=False,
    )  # fmt: skip
    launch(clear_ungrouped_rows, p.target.multiprocessors, out, ends, p.groups, p.rows, p.n, num_warps=4, GROUPS=groups)
    return out


CANDIDATE = GroupedCandidate("library_row_scaled", "native", _serves, lambda p: None, run)
