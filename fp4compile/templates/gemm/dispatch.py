"""Multiply quantised CUDA tensors by the kernel that `choose` names.

`scaled_mm` and `scaled_mm_group` allocate their outputs and launch kernels; they run eagerly and under tracing, on
concrete and on symbolic sizes. The product is that of `reference.scaled_mm`, up to the order of the float32 sums; only
that of two `float8_rowwise` operands is left to the FP8 matrix units, whose sums on Hopper are less exact than float32.
"""

from collections.abc import Sequence

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference
from fp4compile.formats.epilogue import AUXILIARIES, Epilogue
from fp4compile.formats.operand import Operand
from fp4compile.formats.reference import FLOATS
from fp4compile.templates.gemm import library
from fp4compile.templates.gemm.call import Call, kernel_operand
from fp4compile.templates.gemm.candidate import MOST_IN_GROUP
from fp4compile.templates.gemm.choose import Choice, choose, named
from fp4compile.templates.gemm.problem import Problem, problem_of
from fp4compile.templates.gemm.streaming import of_all
from fp4compile.templates.launch import target_of


def scaled_mm(
    a: Operand,
    b: Operand,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    epilogue: Epilogue | None = None,
    auxiliaries: Sequence[torch.Tensor] = (),
    choice: Choice | None = None,
) -> torch.Tensor:
    """`reference.scaled_mm` on the GPU: [..., M, K] x [..., N, K] (or [N, K] for every batch) -> [..., M, N].

    epilogue: what happens to the product before it is stored, only where the choice takes an epilogue; auxiliaries:
    the tensors that it reads. choice: what `choose` says of the problem; asked for where it is not given.
    Raises ValueError or TypeError, naming the argument, for operands, scales, a bias or an epilogue that do not fit.
    """
    if a.format is None and b.format is None:
        if epilogue is not None:
            raise ValueError("epilogue: the product of two plain operands is the library's, which takes none")
        return reference.scaled_mm(a, b, bias, out_dtype)
    call = call_of(a, b, bias, out_dtype, epilogue, auxiliaries)
    shape = (*a.data.shape[:-1], b.data.shape[-2])
    if call.problem.empty:
        return a.data.new_empty(shape, dtype=call.stored_dtype)
    choice = choice or choose(call.problem)
    if epilogue is not None and not choice.takes_epilogue:
        raise ValueError("epilogue: the kernel that serves this product takes none")
    return named(choice.kernel).run(call, choice.config).view(shape)


def scaled_mm_group(
    a: Operand, members: Sequence[tuple[Operand, torch.Tensor | None]], out_dtype: torch.dtype
) -> list[torch.Tensor]:
    """`scaled_mm` of one A and several (B, bias), in one launch where `Choice.group` allows it.

    A decode step multiplies a few tokens by the weights of Q, K and V, or of gate and up. A launch for each takes
    about as long to start, and to get its loads under way, as to read its weights.

    A product has the bits that it has alone, unless, of several tokens, alone its sums would be cut into other parts
    (see `heuristics.skinny_config`). Raises what `scaled_mm` raises.
    """
    calls = [call_of(a, b, bias, out_dtype) for b, bias in members]
    choices = [choose(call.problem) for call in calls]
    alike = len({(choice.kernel, choice.group) for choice in choices}) == 1 and choices[0].group is not None
    if not 1 < len(calls) <= MOST_IN_GROUP or not alike:
        return [scaled_mm(a, b, bias, out_dtype) for b, bias in members]
    candidate = named(choices[0].kernel)
    outs = candidate.run_group(calls, candidate.configure(of_all(calls)))
    return [out.view(*a.data.shape[:-1], b.data.shape[-2]) for out, (b, _) in zip(outs, members, strict=True)]


def scaled_mm_library(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """What the op of this name does, which stands for `library.product` in a graph."""
    return library.product(a, b, bias, out_dtype)


def call_of(
    a: Operand, b: Operand, bias, out_dtype, epilogue: Epilogue | None = None, auxiliaries: Sequence[torch.Tensor] = ()
) -> Call:
    """The call of these arguments. Raises ValueError or TypeError where they do not fit."""
    problem = problem_of(a, b, bias, out_dtype, target_of(a.data.device), epilogue is not None)
    if epilogue is not None:
        _check_epilogue(problem, epilogue, auxiliaries, a.data.device)
    return Call(
        problem, kernel_operand(a, problem.a), kernel_operand(b, problem.b),
        None if bias is None else bias.contiguous(), epilogue, tuple(x.contiguous() for x in auxiliaries),
    )  # fmt: skip


def _check_epilogue(p: Problem, epilogue: Epilogue, auxiliaries: Sequence[torch.Tensor], device: torch.device) -> None:
    if len(auxiliaries) > AUXILIARIES:
        raise ValueError(f"epilogue: at most {AUXILIARIES} operands, got {len(auxiliaries)}")
    for i, x in enumerate(auxiliaries):
        row = epilogue.kinds.get(i) == "row"
        fits = statically_true(x.numel() == (p.n if row else p.batches * p.m * p.n))
        if not fits or x.dtype not in FLOATS or x.device != device:
            raise ValueError(f"epilogue: expected floating-point operands of the product's size or of {p.n} elements "
                             f"on {device}, got {x.dtype} of {tuple(x.shape)} on {x.device}")  # fmt: skip
    if epilogue.dtype not in FLOATS:
        raise ValueError(f"epilogue: dtype {epilogue.dtype}; allowed are bfloat16, float16, float32")
