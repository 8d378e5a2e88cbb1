"""Dequantise operands to 16-bit floating point without their outer scales, for the library's matrix product."""

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.gemm import dequant_tiles
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.heuristics import (
    LIBRARY_ROWS,
    DequantOperandConfig,
    dequant_operand_config,
    dequant_tiles_config,
)
from fp4compile.templates.problem import Problem

# Parts of a product whose launches go into a graph. An op that launches them itself takes the CPU about 65 us for each
# launch, so that a training step of Llama-3-8B layers waited for the CPU.
MOST_TRACED = 16


def _serves(p: Problem) -> bool:
    """Large matrices whose values 16 bits hold: for them the library's product is faster than `dequant_tiles`."""
    large = statically_true(p.m >= LIBRARY_ROWS) and statically_true(p.n >= 512)
    single = not p.ragged and p.batches == 1
    return p.target.sm > 0 and single and large and p.compute != "fp32"


def _checked(p: Problem) -> bool:
    """Whether values may be too small for bfloat16: a kernel then sets a flag, and `dequant_tiles` computes again."""
    return "e8m0" in (p.a.scale, p.b.scale)


def _direct(p: Problem) -> bool:
    """Whether the library writes the result itself: no rescale follows, and addmm adds the bias."""
    dtype = p.compute_dtype
    return (p.a.outer, p.b.outer, p.spec.out_dtype) == ("none", "none", dtype) and p.spec.bias in (None, dtype)


def _configure(p: Problem) -> DequantOperandConfig:
    return dequant_operand_config(p, _direct(p))


def _run(call: Call, config: DequantOperandConfig) -> torch.Tensor:
    """Dequantise the smaller operand whole, the other one in parts if memory requires it, and multiply.

    If a value was too small for bfloat16 (a flag on the device), `dequant_tiles` computes the product once more.
    """
    p = call.problem
    checked, direct, dtype = _checked(p), _direct(p), p.compute_dtype
    inexact = call.a.data.new_zeros((), dtype=torch.int32) if checked else call.a.data  # or never read
    first, rows = (call.a, p.m) if config.by_columns else (call.b, p.n)
    whole = dequantized(first, rows, p.k, dtype, p.target, inexact)

    def part(call: Call, out: torch.Tensor | None = None, start: int = 0) -> torch.Tensor:
        """The product of `whole` and the other operand; written to `out`, from line `start` on, if it is given."""
        x, rows = (call.b, call.problem.n) if config.by_columns else (call.a, call.problem.m)
        other = dequantized(x, rows, p.k, dtype, p.target, inexact)
        a, b = (whole, other.t()) if config.by_columns else (other, whole.t())
        with torch.autocast("cuda", enabled=False):  # it would cast fp16 operands to bf16
            if not direct:
                first = start * (1 if config.by_columns else p.n)
                return dequant_tiles.reduce_split_k(call, torch.mm(a, b, out_dtype=torch.float32), 1, out, first)
            lines = None if out is None else out.narrow(int(config.by_columns), start, rows)
            if call.bias is None:
                return torch.mm(a, b, out=lines)
            return torch.addmm(call.bias, a, b, out=lines)

    if config.lines is None:
        out = part(call)
    else:
        out = call.empty().view(p.m, p.n)
        for start, size in _parts(p.n if config.by_columns else p.m, config.lines):
            part(call.columns(start, size) if config.by_columns else call.rows(start, size), out, start)
    return dequant_tiles.run(call, dequant_tiles_config(p), out, wanted=inexact) if checked else out


def _traceable(p: Problem, config: DequantOperandConfig) -> bool:
    """Whether a graph can hold the launches: they are few, and all sizes are known.

    The library cannot write a part of a matrix in a graph; where a kernel rescales the parts, that kernel writes them.
    """
    if config.lines is None:
        return True
    few = p.static and len(_parts(p.n if config.by_columns else p.m, config.lines)) <= MOST_TRACED
    return few and not _direct(p)


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of equal parts of about `most` lines: a small last part would cost as much as a large one."""
    size = 128 * ceil_div(count, 128 * max(round(count / most), 1))
    return [(start, min(size, count - start)) for start in range(0, count, size)]


CANDIDATE = Candidate(
    "dequant_operand", "emulated", _serves, _configure, _run,
    # The library cannot apply an epilogue, and tiles that are computed again must not apply it twice.
    takes_epilogue=lambda p: not _direct(p) and not _checked(p),
    traceable=_traceable, dequantizes_a=True, dequantizes_b=True,
)  # fmt: skip
