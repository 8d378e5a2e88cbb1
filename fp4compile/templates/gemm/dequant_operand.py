"""Dequantise a matrix to 16-bit floating point without its outer scale, for the library's matrix product."""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.layouts import ceil_div
from fp4compile.targets import Target
from fp4compile.templates.device.block_scales import decode_scale
from fp4compile.templates.device.dequantize import load_scales, load_units, repeat_scales
from fp4compile.templates.device.elements import decode_pair, float_bits
from fp4compile.templates.gemm import dequant_tiles
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import (
    LIBRARY_ROWS,
    DequantOperandConfig,
    dequant_operand_config,
    dequant_tiles_config,
)
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.launch import launch


@triton.jit
def dequant_operand(
    data_ptr, scales_ptr, out_ptr, inexact_ptr, rows, blocks, per_row, tiles,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SQUARE: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x UNITS units of out [rows, 2 * per_row], bf16 or fp16; a row has `tiles` tiles.

    data: codes [rows, per_row units]; `device.dequantize` says what a unit is. blocks: of BLOCK elements in a row.
    If a value may be inexact in bf16 (MX blocks with scales near 2^-127), the kernel sets the int32 at inexact_ptr.
    """
    program = tl.program_id(0)
    row = program // tiles * ROWS + tl.arange(0, ROWS)[:, None]
    unit = program % tiles * UNITS + tl.arange(0, UNITS)[None, :]
    units = load_units(data_ptr, row, unit, rows, per_row, per_row, ELEMENT, ALIGN)
    first, second = decode_pair(units, ELEMENT, ISA)
    if SCALE != "none":
        half: tl.constexpr = BLOCK // 2
        block = program % tiles * (UNITS // half) + tl.arange(0, UNITS // half)[None, :]
        byte = load_scales(scales_ptr, row, block, rows, blocks, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
        scale = repeat_scales(decode_scale(byte, SCALE, ISA), half)
        first = first * scale
        second = second * scale
        if SCALE == "e8m0":
            # Values below 2^-100 may lose their last places. Which ones do is not worth finding out.
            smallest = tl.minimum(_nonzero(first), _nonzero(second))
            if tl.min(tl.reshape(smallest, (ROWS * UNITS,)), 0) < 2.0**-100:
                tl.store(inexact_ptr, 1)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    word = float_bits(first, dtype, ISA) | (float_bits(second, dtype, ISA) << 16)
    at = row.to(tl.int64) * per_row + unit
    mask = (row < rows) if ALIGN == -1 else (row < rows) & (unit < per_row)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + at, word, mask=mask)


@triton.jit
def _nonzero(value):
    """The magnitude of each value, or 1 where the value is zero."""
    return tl.where(value == 0.0, 1.0, tl.abs(value))


def dequantized(x: KernelOperand, rows, k, dtype: torch.dtype, target: Target, inexact: torch.Tensor) -> torch.Tensor:
    """An operand [rows, k] in dtype, without its outer scale; a plain operand as it is.

    inexact: int32 [] that is set where dtype cannot hold a value; for formats that it holds, never written.
    """
    data, fmt = x.data.view(rows, -1), x.type.format
    if fmt is None:
        return data
    tiles = ceil_div(x.units_per_row, 2048)
    out = data.new_empty((rows, 2 * x.units_per_row), dtype=dtype)
    block = fmt.block_cols if fmt.block else 32
    launch(dequant_operand, rows * tiles, data, out if x.scales is None else x.scales, out, inexact, rows,
           ceil_div(x.k, block), x.units_per_row, tiles, num_warps=4, BLOCK=block, ROWS=1, UNITS=2048,
           ISA=target.isa, **x.reading(2048))  # fmt: skip
    return out.narrow(1, 0, k)


def _serves(p: Problem) -> bool:
    """Large matrices whose values 16 bits hold: of these the library's product is faster than `dequant_tiles`."""
    large = statically_true(p.m >= LIBRARY_ROWS) and statically_true(p.n >= 512)
    return p.target.sm > 0 and p.compute != "fp32" and p.batches == 1 and large


def _checked(p: Problem) -> bool:
    """Whether values may be too small for bfloat16: the kernel then notes it, and `dequant_tiles` computes again."""
    return "e8m0" in (p.a.scale, p.b.scale)


def _direct(p: Problem) -> bool:
    """Whether the library writes the result itself: nothing is left to rescale or to add."""
    dtype = p.compute_dtype
    return (p.a.outer, p.b.outer, p.out_dtype) == ("none", "none", dtype) and p.bias in (None, dtype)


def _configure(p: Problem) -> DequantOperandConfig:
    return dequant_operand_config(p, _direct(p))


def _run(call: Call, config: DequantOperandConfig) -> torch.Tensor:
    """The smaller operand is dequantised whole, the other one part by part where memory asks for it.

    If a value was too small for bfloat16, which is known on the device alone, the tiles are computed once more.
    """
    p = call.problem
    checked, direct, dtype = _checked(p), _direct(p), p.compute_dtype
    inexact = call.a.data.new_zeros((), dtype=torch.int32) if checked else call.a.data  # or never read
    first, rows = (call.a, p.m) if config.by_columns else (call.b, p.n)
    whole = dequantized(first, rows, p.k, dtype, p.target, inexact)

    def part(call: Call, out: torch.Tensor | None = None) -> torch.Tensor:
        """[m, n] of A and B, one of which is there in 16 bits; into `out` if it is given."""
        x, rows = (call.b, call.problem.n) if config.by_columns else (call.a, call.problem.m)
        other = dequantized(x, rows, p.k, dtype, p.target, inexact)
        a, b = (whole, other.t()) if config.by_columns else (other, whole.t())
        with torch.autocast("cuda", enabled=False):  # it would cast fp16 operands to bf16
            if not direct:
                return dequant_tiles.reduce_split_k(call, torch.mm(a, b, out_dtype=torch.float32), 1, out)
            if call.bias is None:
                return torch.mm(a, b, out=out)
            return torch.addmm(call.bias, a, b, out=out)

    if config.lines is None:
        out = part(call)
    else:
        out = call.empty().view(p.m, p.n)
        for start, size in _parts(p.n if config.by_columns else p.m, config.lines):
            cut = call.columns(start, size) if config.by_columns else call.rows(start, size)
            part(cut, out.narrow(int(config.by_columns), start, size))
    return dequant_tiles.run(call, dequant_tiles_config(p), out, wanted=inexact) if checked else out


def _parts(count: int, most: int) -> list[tuple[int, int]]:
    """Starts and sizes of parts of about `most` lines, alike: a small last part would cost what a large one does."""
    size = 128 * ceil_div(count, 128 * max(round(count / most), 1))
    return [(start, min(size, count - start)) for start in range(0, count, size)]


CANDIDATE = Candidate(
    "dequant_operand", "emulated", _serves, _configure, _run,
    # The library cannot apply an epilogue, and one that is applied must not be applied to the tiles once more.
    takes_epilogue=lambda p: not _direct(p) and not _checked(p),
    traceable=lambda config: config.lines is None, dequantizes_a=True,
)  # fmt: skip
