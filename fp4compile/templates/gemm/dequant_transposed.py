"""Dequantise weights whose rows are contracted, for the library's product: where no kernel multiplies their codes."""

import torch

from fp4compile.templates.gemm import dequant_tiles
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.quantize.dequantize import dequantize


def _run(call: Call, config: None) -> torch.Tensor:
    """Write the weights [k, n] without their outer scale, which 16 bits hold, multiply, and rescale the sums."""
    p, b = call.problem, call.b
    weights = dequantize(b.data, b.scales, None, b.type.format, p.n, p.compute_dtype)
    with torch.autocast("cuda", enabled=False):
        sums = torch.mm(call.a.data.view(p.m, p.k), weights, out_dtype=torch.float32)
    return dequant_tiles.reduce_split_k(call, sums, 1)


CANDIDATE = Candidate(
    "dequant_transposed", "emulated", lambda p: True, lambda p: None, _run, takes_epilogue=lambda p: True,
    dequantizes_b=True, b_transposed=True,
)  # fmt: skip
