"""Multiply quantised CUDA tensors by the kernel that `choose` names.

The functions here check their arguments, allocate outputs and launch kernels; they run eagerly and under tracing, on
concrete and on symbolic sizes. Results equal `reference.scaled_mm` and `reference_grouped.scaled_grouped_mm` up to the
order of the float32 sums, with one exception: FP8 matrix units multiply two `float8_rowwise` operands, and their sums
on Hopper are less exact than float32. The host never reads the offsets of groups.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fp4compile.formats import reference
from fp4compile.formats.checks import check, check_amax, check_quantize
from fp4compile.formats.groups import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import Choice, choose, named
from fp4compile.templates.gemm import block_scaled_two_ctas_sm100, grouped_library, library
from fp4compile.templates.gemm.call import Call, kernel_operand
from fp4compile.templates.gemm.candidate import MOST_IN_GROUP
from fp4compile.templates.gemm.horizontal import of_all
from fp4compile.templates.launch import target_of
from fp4compile.templates.problem import problem_of


def multiply(x: Arguments, choice: Choice | None = None, arranged_a: torch.Tensor | None = None) -> torch.Tensor:
    """The product of the arguments on the GPU: [..., M, N] or, with groups, of the shape that `Problem.ragged` gives.

    choice: the kernel; None calls `choose`. arranged_a: see `Call`.
    Raises ValueError or TypeError, naming the argument, for arguments that do not fit, and for an epilogue that the
    kernel does not take.
    """
    if x.plain:
        if x.epilogue is not None:
            raise ValueError("epilogue: the product of two plain operands is the library's, which takes none")
        if x.a.data.dtype != x.b.data.dtype or x.a.data.dtype.itemsize != 2:
            return reference.scaled_mm(x.a, x.b, x.bias, x.out_dtype)
    call = call_of(x)
    return _launched(call if arranged_a is None else replace(call, arranged_a=arranged_a), choice)


def multiply_quantized(x: Arguments, choice: Choice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and swizzled block scales of the rows of the product, which the arguments' epilogue quantises.

    Raises what `multiply` raises, and ValueError where no kernel of the GPU quantises the product.
    """
    check_quantize(x)
    call = call_of(x)
    p, (*lead, rows, _) = call.problem, call.a.data.shape
    if p.empty:
        data, scales = call.empty_codes()
        scales.zero_()  # groups without rows have scales
    else:
        data, scales = _run(call, choice)
    padded = rows if x.offs is None else padded_rows(rows, p.groups)
    of_matrix = swizzled_numel(padded, ceil_div(p.n, p.result.block_cols))
    return (data.view(p.result.data_dtype).view(*lead, rows, data.shape[-1]),
            scales.view(p.result.scale_dtype).view(*lead, of_matrix))  # fmt: skip


def multiply_amax(x: Arguments, choice: Choice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of the arguments, with its epilogue, and float32 magnitudes whose largest is the amax of that result.

    Raises what `multiply` raises, and ValueError where no kernel of the GPU finds the amax.
    """
    check_amax(x)
    call = call_of(x)
    out, maxima = (call.empty(), call.empty_maxima().zero_()) if call.problem.empty else _run(call, choice)
    return out.view(*call.a.data.shape[:-1], call.problem.n), maxima


def results(x: Arguments, choice: Choice | None = None) -> list[torch.Tensor]:
    """What `multiply`, `multiply_quantized` or `multiply_amax` returns, by the end of the arguments' epilogue."""
    if x.epilogue is not None and x.epilogue.amax:
        return [*multiply_amax(x, choice)]
    return [multiply(x, choice)] if x.result_spec is None else [*multiply_quantized(x, choice)]


def _launched(call: Call, choice: Choice | None) -> torch.Tensor:
    p = call.problem
    shape = (*call.a.data.shape[:-1], p.n) if p.ragged is None else p.shape
    if p.empty:
        return call.a.data.new_empty(shape, dtype=call.stored_dtype)
    result = _run(call, choice)
    return result.view(shape) if p.ragged is None else result


def _run(call: Call, choice: Choice | None) -> Any:
    choice = choice or choose(call.problem)
    if call.epilogue is not None and not choice.takes_epilogue:
        raise ValueError("epilogue: the kernel that serves this product takes none")
    return named(choice.kernel).run(call, choice.config)


def call_of(x: Arguments, target: Target | None = None) -> Call:
    """The call for these arguments. target: None stands for the GPU of A. Raises what `checks.check` raises."""
    check(x)
    problem = problem_of(x, target_of(x.a.data.device) if target is None else target)
    return Call(
        problem, kernel_operand(x.a, problem.a),
        kernel_operand(x.b, problem.b, problem.outer_of_each_matrix),
        None if x.bias is None else x.bias.contiguous(), x.epilogue, tuple(each.contiguous() for each in x.auxiliaries),
        None if x.offs is None else x.offs.contiguous(), x.result_outer,
    )  # fmt: skip


def scaled_mm_group(
    a: Operand, members: Sequence[tuple[Operand, torch.Tensor | None]], out_dtype: torch.dtype
) -> list[torch.Tensor]:
    """`multiply` for one A and several (B, bias), in one launch where `Choice.group` allows it.

    A decode step multiplies a few tokens by the weights of Q, K and V, or of gate and up. A separate launch takes about
    as long to start, and to get its loads under way, as to read its weights.

    A product has the same bits as in a launch of its own, unless that launch, with several tokens, would add its sums
    in another order (see `skinny.skinny_config`). Raises what `multiply` raises.
    """
    calls = [call_of(Arguments(a, b, bias, out_dtype)) for b, bias in members]
    choices = [choose(call.problem) for call in calls]
    alike = len({(choice.kernel, choice.group) for choice in choices}) == 1 and choices[0].group is not None
    if not 1 < len(calls) <= MOST_IN_GROUP or not alike:
        return list(map(_launched, calls, choices))
    candidate = named(choices[0].kernel)
    outs = candidate.run_group(calls, candidate.configure(of_all(calls)))
    return [out.view(*a.data.shape[:-1], b.data.shape[-2]) for out, (b, _) in zip(outs, members, strict=True)]


def scaled_mm_two_ctas(x: Arguments) -> list[torch.Tensor]:
    """`results` on pairs of CTAs; else by the chosen kernel."""
    return results(x, choose(problem_of(x, target_of(x.a.data.device)), block_scaled_two_ctas_sm100.NAME))


# The implementations of the ops of the same names.
scaled_mm_library = library.product
scaled_grouped_mm_library = grouped_library.product
