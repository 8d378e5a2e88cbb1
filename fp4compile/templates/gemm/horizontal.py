"""Matmuls of one A in one launch, by the kernels for few rows of A."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import MOST_IN_GROUP
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem


def in_common(p: Problem) -> tuple:
    """A key that matmuls of one A must share, besides A, to be one launch."""
    return p.b, p.spec.bias, p.spec.out_dtype


def of_all(calls: Sequence[Call]) -> Problem:
    """The problem of a launch that computes all of the calls: one B with the rows of all B."""
    return replace(calls[0].problem, n=sum(call.problem.n for call in calls))


def launch_group(
    kernel,
    calls: Sequence[Call],
    config: Any,
    tile_rows: int,
    step: int,
    *more: Any,
    a_codes: bool = False,
    **constants: Any,
) -> list[torch.Tensor]:
    """Launch a kernel on up to MOST_IN_GROUP matmuls of one A, which is dequantised first where it is quantised.

    tile_rows: rows of B in a tile. step: elements of a warp's step along K. more: the kernel's further arguments.
    a_codes: whether the kernel reads A's codes instead.
    Returns [1, m, n] of each call.
    """
    call, p = calls[0], calls[0].problem
    a = call.a.data if a_codes else dequantized(call.a, p.m, p.k, torch.float16, p.target, call.a.data)
    outs = [each.empty() for each in calls]
    pointers = [pointer for each, out in zip(calls, outs, strict=True) for pointer in pointers_of(each, out)]
    unused = MOST_IN_GROUP - len(calls)
    sizes = [each.problem.n for each in calls]
    even = all(statically_true(n % tile_rows == 0) for n in sizes) and statically_true(p.k % (step * config.warps) == 0)
    launch(
        kernel, torch.sym_min(sum(ceil_div(n, tile_rows) for n in sizes), config.grid),
        a, a if call.a.outer is None else call.a.outer, *pointers, *[call.b.data] * 5 * unused,
        p.m, *sizes, *[1] * unused, p.k // 32, *more, num_warps=config.warps, GROUP_SIZE=len(calls),
        A_OUTER=p.a.outer, B_OUTER=p.b.outer, BIAS=int(call.bias is not None),
        B_SCALES=p.b.scales_text, EVEN=int(even),
        COMPUTE=p.compute, ISA=p.target.isa, **config.constants, **constants,
    )  # fmt: skip
    return outs


def pointers_of(call: Call, out: torch.Tensor) -> tuple:
    """The arguments of one matmul; absent scales and an absent bias are pointers to codes, never read."""
    unused = call.b.data
    outer, bias = (unused if x is None else x for x in (call.b.outer, call.bias))
    return call.b.data, unused if call.b.scales is None else call.b.scales, outer, bias, out
