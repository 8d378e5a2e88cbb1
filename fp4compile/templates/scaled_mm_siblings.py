"""The products of a few rows of activations and several NVFP4 weights, in one launch.

A decode step multiplies a few tokens by the weights of Q, K and V, or of gate and up. Each is a small launch, which
takes about as long to start, and to get its loads under way, as to read its weights. Together they are one launch of as
many programs, each of which does for its weight what a program of `scaled_mm_decode` does.

The product of a weight has the bits that it has alone, unless alone it would be cut among another number of warps, or
into sums of other parts (see `decode_config`): then its float32 sums are added in another order.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import known
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem, problem_of
from fp4compile.templates.scaled_mm import decode_constants, expanded, scaled_mm, streamed
from fp4compile.templates.scaled_mm_decode import decode_rows

MEMBERS = 3  # of a launch, at most


@triton.jit
def scaled_mm_siblings(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, chunks,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    X: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr,
    MEMBERS: tl.constexpr,
):  # fmt: skip
    """`scaled_mm_decode` of MEMBERS (two or three) weights: the programs of the first one, then those of the next.

    Arguments that are there for a third weight are not read where there are two.
    """
    program = tl.program_id(0)
    start = tl.cdiv(n, 16 * TILES)
    later = program >= start
    # Selects, not branches: where torch finds out what a kernel writes, a size is a constant, which none may change.
    if MEMBERS > 2:
        last = program >= start + tl.cdiv(n_1, 16 * TILES)
        start = tl.where(last, start + tl.cdiv(n_1, 16 * TILES), start)
        b_1_ptr = tl.where(last, b_2_ptr, b_1_ptr)
        b_scales_1_ptr = tl.where(last, b_scales_2_ptr, b_scales_1_ptr)
        b_outer_1_ptr = tl.where(last, b_outer_2_ptr, b_outer_1_ptr)
        bias_1_ptr = tl.where(last, bias_2_ptr, bias_1_ptr)
        out_1_ptr = tl.where(last, out_2_ptr, out_1_ptr)
        n_1 = tl.where(last, n_2, n_1)
    decode_rows(
        tl.where(later, program - start, program) * (16 * TILES), a_ptr, a_outer_ptr,
        tl.where(later, b_1_ptr, b_ptr), tl.where(later, b_scales_1_ptr, b_scales_ptr),
        tl.where(later, b_outer_1_ptr, b_outer_ptr), tl.where(later, bias_1_ptr, bias_ptr),
        tl.where(later, out_1_ptr, out_ptr), m, tl.where(later, n_1, n), chunks,
        A_OUTER, B_OUTER, B_SQUARE, B_SWIZZLED, BIAS, COMPUTE, WARPS, STAGES, TILES, X, ROWS, STEPS, EVEN, ISA,
    )  # fmt: skip


def products(
    a, a_scales, a_outer, a_fmt: BlockFormat | None, members: list[tuple], b_fmt: BlockFormat, out_dtype
) -> list[torch.Tensor]:
    """`scaled_mm` of the same A and several B, in one launch where that is possible.

    members: (b, b_scales, b_outer, bias) of each. Raises what `scaled_mm` raises.
    """
    arguments = [(a, a_scales, a_outer, a_fmt, *b, b_fmt, bias, out_dtype) for *b, bias in members]
    problems = [problem_of(*each) for each in arguments]
    if not 1 < len(problems) <= MEMBERS or len(set(map(common, problems))) > 1 or common(problems[0]) is None:
        return [scaled_mm(*each) for each in arguments]
    return [out.view(p.shape) for p, out in zip(problems, _launch(problems), strict=True)]


def common(p: Problem) -> tuple | None:
    """What the products of a launch have in common beside A; None where this one cannot be part of one."""
    if not streamed(p) or known(p.m * p.n == 0):
        return None
    bias = None if p.bias is None else p.bias.dtype
    return p.right.fmt, p.right.swizzled, p.right.outer_kind, bias, p.out_dtype


def _launch(problems: list[Problem]) -> list[torch.Tensor]:
    first = problems[0]
    outs = [p.empty() for p in problems]
    a = expanded(first.left, first.left.data, first, torch.float16)
    pointers = [member for p, out in zip(problems, outs, strict=True) for member in _pointers(p, out)]
    unused = [first.right.data] * 5 * (MEMBERS - len(problems))
    sizes = [p.n for p in problems] + [1] * (MEMBERS - len(problems))
    a_outer = a if first.left.outer is None else first.left.outer
    constants = decode_constants(*problems)
    programs = sum(ceil_div(p.n, 16 * constants["TILES"]) for p in problems)
    launch(scaled_mm_siblings, programs, a, a_outer, *pointers, *unused, first.m, *sizes, first.k // 32,
           MEMBERS=len(problems), **constants)  # fmt: skip
    return outs


def _pointers(p: Problem, out: torch.Tensor) -> tuple:
    """One member's arguments of the kernel; for what it has not, something that is not read."""
    unused = p.right.data
    outer, bias = (unused if x is None else x for x in (p.right.outer, p.bias))
    return p.right.data, p.right.scales, outer, bias, out
