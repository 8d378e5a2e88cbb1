"""Multiply quantised CUDA tensors by the kernel that `choose` names.

The functions here check their arguments, allocate outputs and launch kernels; they run eagerly and under tracing, on
concrete and on symbolic sizes. Results equal `reference.scaled_mm` and `reference_grouped.scaled_grouped_mm` up to the
order of the float32 sums, with one exception: FP8 matrix units multiply two FP8 operands, and their sums on Hopper are
less exact than float32. The host never reads the offsets of groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fp4compile import _compat
from fp4compile.formats import reference
from fp4compile.formats.checks import check
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, taken
from fp4compile.hardware import Target
from fp4compile.templates.choose import Choice, choose, named
from fp4compile.templates.gemm import (
    block_scaled_two_ctas_sm100,
    float8_sm90,
    indexed,
    library,
)
from fp4compile.templates.gemm.call import Call, kernel_operand
from fp4compile.templates.gemm.candidate import FLOAT8, LIBRARY, MOST_IN_GROUP, TWO_CTAS
from fp4compile.templates.gemm.horizontal import of_all
from fp4compile.templates.launch import target_of
from fp4compile.templates.problem import Problem, problem_of

# Kernels of `scaled_mm_opaque` that are written in Gluon, and their candidates.
_IN_GLUON = {TWO_CTAS: block_scaled_two_ctas_sm100.NAME, FLOAT8: float8_sm90.NAME}


def multiply(x: Arguments, choice: Choice | None = None, arranged_a: torch.Tensor | None = None) -> torch.Tensor:
    """The matmul of the arguments on the GPU: [..., M, N] or, with groups along the contraction, [G, M, N].

    choice: the kernel; None calls `choose`. arranged_a: see `Call`.
    Raises ValueError or TypeError, naming the argument, for arguments that do not fit, and for an epilogue that the
    kernel does not take.
    """
    spec = x.spec
    if spec.plain:
        if spec.epilogue is not None:
            raise ValueError("epilogue: the product of two plain operands is the library's, which takes none")
        if spec.a.dtype != spec.b.dtype or spec.a.dtype.itemsize != 2:
            return reference.scaled_mm(x.a, x.b, x.bias, spec.out_dtype)
    if x.index is not None:
        return _gathered(x, x.index)
    call = call_of(x)
    return _launched(call if arranged_a is None else replace(call, arranged_a=arranged_a), choice)


def results(x: Arguments, choice: Choice | None = None) -> list[torch.Tensor]:
    """The results of the matmul, depending on its epilogue: one; codes and block scales; or a result and magnitudes.

    Codes and swizzled block scales are of the rows of the result. Of the float32 magnitudes, the largest (with groups,
    that of each group) is the amax of the result.
    Raises what `multiply` raises, and ValueError where no kernel of the GPU quantises the result or finds its amax.
    """
    if x.spec.results == 1:
        return [multiply(x, choice)]
    return _results(call_of(x), choice)


def _results(call: Call, choice: Choice | None) -> list[torch.Tensor]:
    """`results` of a call."""
    if call.problem.spec.results == 1:
        return [_launched(call, choice)]
    p, (*lead, rows, _) = call.problem, call.a.data.shape
    if p.empty:  # groups without rows have scales, or an amax of 0
        first, second = call.empty_results()
        second.zero_()
    else:
        first, second = _run(call, choice)
    if p.spec.result is None:
        return [first.view(*lead, rows, p.n), second]
    padded = padded_rows(rows, p.groups) if p.ragged else rows
    of_matrix = swizzled_numel(padded, ceil_div(p.n, p.spec.result.block_cols))
    return [first.view(p.spec.result.data_dtype).view(*lead, rows, first.shape[-1]),
            second.view(p.spec.result.scale_dtype).view(*lead, of_matrix)]  # fmt: skip


def _gathered(x: Arguments, index: torch.Tensor) -> torch.Tensor:
    """The matmul of A and b[index], by a kernel that reads B through the index, or of a copy of these matrices."""
    check(x)
    if indexed.serves(x.a, x.b, index, x.spec.out_dtype, target_of(x.a.data.device)):
        return indexed.multiply_indexed(x.a, x.b, index, x.spec.out_dtype)
    return multiply(Arguments.of(x.a, taken(x.b, index), None, x.spec.out_dtype))


def _launched(call: Call, choice: Choice | None) -> torch.Tensor:
    p = call.problem
    shape = (*call.a.data.shape[:-1], p.n) if not p.ragged else p.shape
    if p.empty:
        return call.a.data.new_empty(shape, dtype=call.stored_dtype)
    result = _run(call, choice)
    return result.view(shape) if not p.ragged else result


def _run(call: Call, choice: Choice | None) -> Any:
    choice = choice or choose(call.problem)
    if call.epilogue is not None and not choice.takes_epilogue:
        raise ValueError("epilogue: the kernel that serves this matmul takes none")
    return named(choice.kernel).run(call, choice.config)


# The problems of arguments that were checked, by their layout and the GPU.
_problems: dict[tuple, Problem] = {}
_MOST_PROBLEMS = 4096


def call_of(x: Arguments, target: Target | None = None) -> Call:
    """The call for these arguments. target: None takes the GPU of A.

    Arguments are checked once for each layout: in the steps of a training run the host launches the same matmuls again
    and again, and the checks take it as long as the launches. Raises what `checks.check` and `Call.check` raise.
    """
    target = target_of(x.a.data.device) if target is None else target
    if _compat.tracing():  # sizes may be symbolic
        check(x)
        call = _call(x, problem_of(x, target))
        call.check()
        return call
    key = (x.layout, target)
    problem = _problems.get(key)
    if problem is not None:
        return _call(x, problem)
    check(x)
    problem = problem_of(x, target)
    call = _call(x, problem)
    call.check()
    if len(_problems) >= _MOST_PROBLEMS:
        _problems.clear()
    _problems[key] = problem
    return call


def _call(x: Arguments, problem: Problem) -> Call:
    return Call(
        problem, kernel_operand(x.a, problem.a),
        kernel_operand(x.b, problem.b, problem.outer_of_each_matrix),
        None if x.bias is None else x.bias.contiguous(), tuple(each.contiguous() for each in x.auxiliaries),
        None if x.offs is None else x.offs.contiguous(), x.result_outer,
    )  # fmt: skip


def multiply_together(members: Sequence[Arguments]) -> list[torch.Tensor]:
    """`multiply` for matmuls of one A, in one launch where `Choice.group` allows it.

    A decode step multiplies a few tokens by the weights of Q, K and V, or of gate and up. A separate launch takes about
    as long to start, and to issue its first loads, as to read its weights.

    A matmul has the same bits as in a launch of its own, unless that launch, with several tokens, would add its sums
    in another order (see `skinny.skinny_config`). Raises what `multiply` raises.
    """
    calls = list(map(call_of, members))
    choices = [choose(call.problem) for call in calls]
    alike = len({(choice.kernel, choice.group) for choice in choices}) == 1 and choices[0].group is not None
    if not 1 < len(calls) <= MOST_IN_GROUP or not alike:
        return list(map(_launched, calls, choices))
    candidate = named(choices[0].kernel)
    outs = candidate.run_group(calls, candidate.configure(of_all(calls)))
    return [out.view(*x.a.data.shape[:-1], x.b.data.shape[-2]) for out, x in zip(outs, members, strict=True)]


def opaque(x: Arguments, kernel: str) -> list[torch.Tensor]:
    """The results of a matmul by a kernel that is an op in graphs: "library", or one of `_IN_GLUON`.

    Raises ValueError for another name.
    """
    if kernel in _IN_GLUON:
        call = call_of(x)
        return _results(call, choose(call.problem, _IN_GLUON[kernel]))
    if kernel != LIBRARY:
        raise ValueError(f"kernel={kernel!r}: expected {LIBRARY!r} or one of {', '.join(map(repr, _IN_GLUON))}")
    return [library.product(x.a, x.b, x.bias, x.spec.out_dtype, x.spec.fast_accumulation)]
