"""Under `mode="max-autotune"`, let time decide which kernel computes a product.

Entry: `fastest(product)`, for a `scaled_mm` node that is about to be lowered. Where several candidates compute all of
the product on the matrix units as it is, each does, on tensors like the product's own, and the fastest one is taken.
Equal problems are timed once in a process. Without that mode the choice is that of rank, untimed.
"""

import logging
from collections.abc import Callable

import torch
import triton
from torch._inductor import config
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fp4compile.operand import Operand
from fp4compile.passes.graph import ScaledMM
from fp4compile.templates.gemm.choose import Choice, candidates, choose
from fp4compile.templates.gemm.dispatch import scaled_mm
from fp4compile.templates.gemm.problem import Problem

log = logging.getLogger("fp4compile")
_winners: dict[tuple, str] = {}


def fastest(product: ScaledMM) -> Choice | None:
    """The choice for a product: the fastest candidate where there are several to time; None for two plain operands."""
    if product.plain:
        return None
    problem = product.problem()
    if not (config.max_autotune or config.max_autotune_gemm) or not torch.cuda.is_available() or not _static(problem):
        return choose(problem)
    names = candidates(problem)
    if len(names) < 2:
        return choose(problem)
    a, b, bias = product.values()
    key = problem, *(_layout(x) for x in (a.data, a.scales, b.data, b.scales))
    if key not in _winners:
        times = {name: _time(_call(a, b, bias, problem, name=name)) for name in names}
        _winners[key] = min(times, key=times.get)
        log.info("product %s x %s: %s", tuple(a.data.shape), tuple(b.data.shape), times)
    return choose(problem, preferred=_winners[key])


def _static(problem: Problem) -> bool:
    return all(isinstance(size, int) for size in (problem.m, problem.n, problem.k, problem.batches))


def _layout(value: torch.Tensor | None) -> tuple:
    return () if value is None else (value.device, tuple(value.shape), tuple(value.stride()))


def _call(a: Operand, b: Operand, bias, problem: Problem, *, name: str) -> Callable[[], torch.Tensor]:
    """A call of the product by one candidate, on real tensors."""
    with unset_fake_temporarily():
        operands = [Operand(*map(_like, (x.data, x.scales, x.outer)), x.format) for x in (a, b)]
        made_bias = _like(bias)
    choice = choose(problem, preferred=name)

    def call():
        with unset_fake_temporarily(), torch.no_grad():
            return scaled_mm(*operands, made_bias, problem.out_dtype, choice=choice)

    return call


def _like(value: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor of that size and kind: any codes, scales of 1, or random numbers."""
    if value is None:
        return None
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    if value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu) and value.dim() == 1:  # swizzled scales
        made.view(torch.uint8).fill_(0x38 if value.dtype == torch.float8_e4m3fn else 127)
    elif value.dtype.itemsize == 1:
        made.view(torch.uint8).random_(0, 127)  # no NaN of any format
    else:
        made.normal_()
    return made


def _time(call: Callable[[], torch.Tensor]) -> float:
    """Milliseconds of a call; infinite of one that this machine cannot make."""
    try:
        return triton.testing.do_bench(call, return_mode="median")
    except RuntimeError as error:
        log.info("not timed: %s", error)
        return float("inf")
