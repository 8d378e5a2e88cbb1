"""Products that a library computes of the operands as they are quantised (cuBLASLt, by `aten._scaled_mm`)."""

import torch

from fp4compile._compat import statically_true
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.problem import Problem


def _serves_block_scaled(p: Problem) -> bool:
    """Two NVFP4 or two MXFP8 (E4M3) operands with swizzled scales on SM100, rows of whole 16 bytes, no outer scale.

    A bias must be of the result's type, which then has 16 bits. The library has no outer scale: its `scale_result` is
    for FP8 results alone, and the call that has a factor (`aten._scaled_mm_v2`) does not compile with swizzled scales.
    Two-level operands would need the sums in float32 and another pass over them, which costs more than the library can
    win. An epilogue would be such a pass, too. Both are part of `block_scaled_sm100`. None of this was timed on SM100.
    """
    formats = {(x.element, x.scale) for x in (p.a, p.b)} <= {("e2m1", "e4m3"), ("e4m3", "e8m0")}
    swizzled = p.a.swizzled and p.b.swizzled and (p.a.outer, p.b.outer) == ("none", "none")
    bias = p.bias is None or (p.bias == p.out_dtype and p.out_dtype != torch.float32)
    filled = all(statically_true(size > 0) for size in (p.m, p.n, p.k))
    here = 100 <= p.target.sm < 120 and p.batches == 1 and not p.epilogue
    if not (here and formats and swizzled and bias and filled and _block_scaled_units(p)):
        return False
    return statically_true(p.n % 16 == 0) and statically_true(p.row_bytes(p.a) % 16 == 0)


def _block_scaled_units(p: Problem) -> bool:
    return p.target.block_scaled_matrix_units and p.a.format is not None and p.b.format is not None


def _run_block_scaled(call: Call, config: None) -> torch.Tensor:
    p = call.problem
    codes = torch.float4_e2m1fn_x2 if p.a.format.packed else torch.float8_e4m3fn
    a, b = (x.data.view(rows, x.data.shape[-1]).view(codes) for x, rows in ((call.a, p.m), (call.b, p.n)))
    a_scales, b_scales = (x.scales.view(x.type.format.scale_dtype) for x in (call.a, call.b))
    return torch._scaled_mm(a, b.t(), a_scales, b_scales, call.bias, out_dtype=p.out_dtype)


def _serves_row_scaled(p: Problem) -> bool:
    """Two `float8_rowwise` operands with their outer scales, on GPUs with FP8 matrix units, to bfloat16."""
    formats = p.a.format, p.b.format
    if None in formats or any(fmt.scale is not None for fmt in formats):
        return False
    outer = (p.a.outer, p.b.outer) == ("row", "row")
    types = p.out_dtype == torch.bfloat16 and (p.bias is None or p.bias == p.out_dtype)
    aligned = statically_true(p.n % 16 == 0) and statically_true(p.k % 16 == 0)
    filled = statically_true(p.n > 0) and statically_true(p.k > 0)
    return p.target.float8_matrix_units and outer and types and aligned and filled and p.batches == 1


def _run_row_scaled(call: Call, config: None) -> torch.Tensor:
    p = call.problem
    a, b = (x.data.view(rows, p.k).view(torch.float8_e4m3fn) for x, rows in ((call.a, p.m), (call.b, p.n)))
    a_outer, b_outer = call.a.outer.view(p.m, 1), call.b.outer.view(1, p.n)
    return torch._scaled_mm(a, b.t(), a_outer, b_outer, call.bias, out_dtype=p.out_dtype, use_fast_accum=False)


def _nothing_to_configure(p: Problem) -> None:
    return None


BLOCK_SCALED = Candidate(
    "library_block_scaled", "native", _serves_block_scaled, _nothing_to_configure, _run_block_scaled, any_rows=True
)
ROW_SCALED = Candidate(
    "library_row_scaled", "native", _serves_row_scaled, _nothing_to_configure, _run_row_scaled, any_rows=True
)
