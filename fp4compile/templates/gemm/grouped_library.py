"""Grouped products of quantised operands by a library: CUTLASS, through two ops of torch.

`_scaled_grouped_mm`: row scales on Hopper (GroupedBlas.cpp, ScaledGroupMM.cu, GroupMMCommon.cuh). E4M3, A [M, K] by
rows and B [G, K, N] by columns, rows of whole 16 bytes, one float32 scale a row of A and a column of B, results in
bfloat16, fewer than 1024 groups. Its meta implementation checks the rest.

`_scaled_grouped_mm_v2`: block scales on SM100, by MSLK's kernels, in builds of torch that have them.
`tests/helpers/grouped_library_checks.py` has their requirements. For groups of rows they read the quantisers' layout.
Nothing was run on SM100. So in the registry `library.BLOCK_SCALED` ranks behind a kernel that serves all of these
problems: the library is chosen only where `max-autotune` has timed it on the GPU.

Both ops take offsets without a bound and leave rows of no group uninitialised. So they get the bounded offsets of
`group_ends`, and rows of no group are cleared afterwards.

Groups along the contraction stay with the kernels of this package. On Hopper the library stops the GPU with an
assertion at an empty group. On SM100 it leaves the result of an empty group uninitialised, and it reads scales with
each group swizzled as a matrix of its own, all of its tiles in succession. The quantisers swizzle all groups as one
matrix, in which a row of tiles goes on through all groups: equal only up to 128 rows of A and of B.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, SwizzleType

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.formats.layouts import TILE_COLS, ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.templates.device.group_tiles import clear_rows, ends_of, last_of
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import LIBRARY, opaque
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem

_MOST_GROUPS = 1023
# The block-scaled library starts with one program that has a thread for each group. Registers suffice for 256 threads.
_MOST_GROUPS_BLOCK_SCALED = 256


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


# ---------------------------------------------------------------- row scales


def serves_row_scaled(p: Problem) -> bool:
    """`float8_rowwise` on Hopper, rows in groups, to bfloat16."""
    formats = all(x.element == "e4m3" and x.scale == "none" and x.outer == "row" for x in (p.a, p.b))
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.k % 16 == 0)
    return p.target.sm == 90 and formats and aligned and _rows_to_bfloat16(p) and p.groups <= _MOST_GROUPS


def _rows_to_bfloat16(p: Problem) -> bool:
    filled = all(statically_true(size > 0) for size in (p.rows, p.n, p.k))
    return p.by_rows and p.spec.out_dtype == torch.bfloat16 and filled


def run_row_scaled(call: Call, config: None) -> torch.Tensor:
    """The products of all groups, by the library, between two launches."""
    p, ends = call.problem, _launch_group_ends(call)
    if _compat.times_products():  # Inductor would time templates of its own for an op that it can lower
        return _clear(_by_op(call, ends), ends, p)
    return _clear(
        row_scaled(_operand(call.a), _operand(call.b), ends, p.spec.out_dtype, p.spec.fast_accumulation), ends, p
    )


def row_scaled(
    a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype, fast_accumulation: bool = False
) -> torch.Tensor:
    """The products of all groups of `float8_rowwise` operands, A [M, K] by rows in groups and B [G, N, K] -> [M, N].

    fast_accumulation: whether the sums may have fewer bits than float32.
    """
    return torch._scaled_grouped_mm(
        a.data, b.data.transpose(-2, -1), a.outer.view(-1), b.outer.view(b.data.shape[:2]), ends,
        out_dtype=out_dtype, use_fast_accum=fast_accumulation,
    )  # fmt: skip


# ---------------------------------------------------------------- block scales

_NVFP4, _MXFP8 = ("e2m1", "e4m3"), ("e4m3", "e8m0")
_OUTERS = {_NVFP4: {"none", "tensor", "group"}, _MXFP8: {"none"}}


def serves_block_scaled(p: Problem) -> bool:
    """Two NVFP4 or two MXFP8 (E4M3) operands with swizzled scales, rows in groups, to bfloat16, on SM100.

    An outer scale must be one for the whole tensor, or one a group. The library reads square blocks as rows of blocks.
    Compute capability 10.3 is left out: torch's grouped kernel of row scales was reported to trap there, which ends the
    process's use of the GPU (pytorch/pytorch#187095), and there is no report on the kernels of block scales.
    """
    kind = p.a.element, p.a.scale
    if p.target.sm != 100 or kind not in _OUTERS or kind != (p.b.element, p.b.scale):
        return False
    outer = {p.a.outer, p.b.outer} <= _OUTERS[kind] and p.a.swizzled and p.b.swizzled
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.row_bytes(p.a) % 16 == 0)
    groups = p.groups <= _MOST_GROUPS_BLOCK_SCALED
    return outer and aligned and groups and _rows_to_bfloat16(p) and _compat.built_with_mslk()


def run_block_scaled(call: Call, config: None) -> torch.Tensor:
    """The products of all groups, by the op around the library, between two launches."""
    ends = _launch_group_ends(call)
    return _clear(_by_op(call, ends), ends, call.problem)


def _by_op(call: Call, ends: torch.Tensor) -> torch.Tensor:
    spec = call.problem.spec
    x = Arguments.of(_operand(call.a), _operand(call.b), None, spec.out_dtype, offs=ends,
                     fast_accumulation=spec.fast_accumulation)  # fmt: skip
    return opaque(x, LIBRARY)[0]


def product(
    a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype, fast_accumulation: bool
) -> torch.Tensor:
    """The products of all groups of operands in `float8_rowwise`, or with block scales, by the library."""
    if a.format.scale is None:
        return row_scaled(a, b, ends, out_dtype, fast_accumulation)
    return block_scaled(a, b, ends, out_dtype)


def _operand(x: KernelOperand) -> Operand:
    fmt = x.type.format
    scales = None if x.scales is None else x.scales.view(fmt.scale_dtype)
    return Operand(x.data.view(fmt.data_dtype), scales, x.outer, fmt)


def block_scaled(a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """The products of all groups, A [M, K] by rows in groups and B [G, N, K], with swizzled scales -> [M, N].

    ends: int32 [G] from `group_ends`; rows after the last group are left uninitialised. torch takes one outer scale a
    group, for both operands or for neither, and multiplies the two on the device.
    """
    fmt, groups = a.format, b.data.shape[0]
    codes = torch.float4_e2m1fn_x2 if fmt.packed else fmt.data_dtype
    blocks = a.data.shape[1] * (2 if fmt.packed else 1) // fmt.block_cols
    a_scales, b_scales = a.scales.view(-1, ceil_div(blocks, TILE_COLS) * TILE_COLS), b.scales.view(groups, -1)
    recipe, swizzle = [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]
    left, right = [a_scales], [b_scales]
    if fmt.scale == "e4m3":
        recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        swizzle = [*swizzle, SwizzleType.NO_SWIZZLE]
        left, right = ([scales, _one_a_group(x, groups)] for scales, x in ((a_scales, a), (b_scales, b)))
    return F.scaled_grouped_mm(
        a.data.view(codes), b.data.view(codes).transpose(-2, -1), left, recipe, right, recipe, swizzle, swizzle, None,
        ends, out_dtype,
    )  # fmt: skip


def _one_a_group(x: Operand, groups: int) -> torch.Tensor:
    """Outer scales float32 [groups]: torch up to 2.13 reads that many even if it gets a single one."""
    if x.outer is None:
        return x.data.new_ones(groups, dtype=torch.float32)
    return x.outer.expand(groups).contiguous()
