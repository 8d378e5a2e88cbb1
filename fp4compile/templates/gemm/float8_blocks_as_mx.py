"""FP8 blocks whose scales are powers of two, by the block-scaled kernels and the library's MXFP8 matmul (SM100 and up).

The matrix units multiply FP8 codes with one E8M0 scale for 32 elements of a row. A float32 scale of 1x128 elements that
is a power of two is four equal E8M0 scales, and a scale of 128x128 elements the same for 128 rows: each product of
codes and scales is the same number. So no kernel is new. One launch for each operand writes its scales as swizzled E8M0
bytes (`quantize.lay_out`), a 32nd of the bytes of the codes; then the kernel of an MXFP8 matmul multiplies the codes as
they are stored. None of this was timed. Matmuls of the same A convert its scales again, unless they are one launch.

A scale of NaN, which a block with a NaN or infinity has, becomes E8M0's NaN. A scale that is no power of two, which no
quantiser of this contract makes, becomes NaN as well.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import OF_FLOAT8_BLOCKS, Candidate
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.lay_out import lay_out_as_mx


def as_mx(candidate: Candidate) -> Candidate:
    """The candidate that converts the scales of FP8 blocks, and then runs another one for MX operands."""

    def of_mx(rule: Callable[[Problem], bool]) -> Callable[[Problem], bool]:
        return lambda p: (mx := _mx_problem(p)) is not None and rule(mx)

    def run_group(calls: Sequence[Call], config: Any) -> list[torch.Tensor]:
        first, *others = calls
        converted = _mx_call(first)
        return candidate.run_group([converted, *(_mx_call(each, converted.a) for each in others)], config)

    of_group, to_time = candidate.group_with, candidate.configurations
    return Candidate(
        candidate.name + OF_FLOAT8_BLOCKS, candidate.tier, of_mx(candidate.serves),
        configure=lambda p: candidate.configure(_mx_problem(p)),
        run=lambda call, config: candidate.run(_mx_call(call), config),
        configurations=None if to_time is None else lambda p: to_time(_mx_problem(p)),
        takes_epilogue=of_mx(candidate.takes_epilogue), quantizes=of_mx(candidate.quantizes),
        finds_amax=of_mx(candidate.finds_amax), traceable=lambda p, config: candidate.traceable(_mx_problem(p), config),
        any_rows=candidate.any_rows, group_with=None if of_group is None else lambda p: of_group(_mx_problem(p)),
        run_group=None if candidate.run_group is None else run_group,
    )  # fmt: skip


def _mx_problem(p: Problem) -> Problem | None:
    """The matmul of the same codes as MX operands; None where an operand has no such scales."""
    a, b = (_mx_spec(x) for x in (p.a, p.b))
    return None if a is None or b is None else replace(p, spec=replace(p.spec, a=a, b=b))


def _mx_spec(x: OperandSpec) -> OperandSpec | None:
    mx = None if x.format is None else x.format.as_mx
    return None if mx is None else replace(x, format=mx, swizzled=True)


def _mx_call(call: Call, a: KernelOperand | None = None) -> Call:
    """The call with converted scales. a: A, if it is converted already."""
    p = _mx_problem(call.problem)
    if a is None:
        a = _mx_operand(call.a, p.a, p.m, p.batches, call.offs if p.by_rows else None)
    return replace(call, problem=p, a=a, b=_mx_operand(call.b, p.b, p.b_rows, p.b_matrices, stacked=p.by_rows))


def _mx_operand(
    x: KernelOperand, type: OperandSpec, rows: Any, matrices: Any, offs: torch.Tensor | None = None,
    stacked: bool = False,
) -> KernelOperand:  # fmt: skip
    """The operand with E8M0 scales [bytes], or [matrices, bytes] for several matrices or if `stacked`."""
    lead = (matrices,) if stacked or not statically_true(matrices == 1) else ()
    fmt = x.type.format
    scales = x.scales.view(*lead, ceil_div(rows, fmt.block[0]), x.scales.shape[-1])
    return replace(x, type=type, scales=lay_out_as_mx(scales, fmt, rows, offs), rows=rows)
