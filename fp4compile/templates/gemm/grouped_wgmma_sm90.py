"""Grouped GEMM of nine and more rows of 16-bit A for each matrix of NVFP4 weights, on SM90 (`gemm.wgmma_sm90`).

The kernels are `swizzle_a_sm90` and `gemm_wgmma_sm90`. A program of the latter finds the group of its tile from the
offsets on the device, and multiplies rows of A of this group with rows of the group's matrix. The matrices are read
as they are packed: they are neither dequantised in memory nor arranged anew. The launches have as many programs as any
sizes of groups need. A program without a tile ends at once.
"""

import torch

from fp4compile._compat import statically_true
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_operand import MOST_GROUPS
from fp4compile.templates.gemm.grouped_skinny import streams_experts
from fp4compile.templates.gemm.heuristics import WgmmaConfig, grouped_wgmma_config
from fp4compile.templates.gemm.swizzled_a_sm90 import SwizzledA
from fp4compile.templates.gemm.wgmma_sm90 import gemm_wgmma_sm90, needed_bytes
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem


def _serves(p: Problem) -> bool:
    return 90 <= p.target.sm < 100 and p.groups <= MOST_GROUPS and streams_experts(p)


def _run(call: Call, config: WgmmaConfig) -> torch.Tensor:
    p = call.problem
    arrangement = SwizzledA.of(p, config)
    a = arrangement.of_call(call)
    out = call.empty()
    a_outer, b_outer, unused = call.rescale_pointers(out)
    even = statically_true(p.n % (16 * config.parts * config.warps) == 0 and p.k % (128 * config.steps_per_stage) == 0)
    launch(
        gemm_wgmma_sm90, config.grid(p.m, p.n, p.groups),
        a, a_outer, call.b.data, call.b.scales, b_outer, unused, out, unused, unused, call.offs,
        p.m, arrangement.rows, p.n, p.k // 32, 1, call.b.scale_bytes, A_OUTER=p.a.outer, B_OUTER=p.b.outer,
        BIAS=0, EPILOGUE="", PARTIAL=0, B_SQUARE=int(p.b.format.square), B_SWIZZLED=int(p.b.swizzled),
        COMPUTE=p.compute, EVEN=int(even), PDL=p.target.dependent_launch, ISA=p.target.isa, GROUPS=p.groups,
        num_warps=config.warps, **config.constants,
    )  # fmt: skip
    return out


CANDIDATE = Candidate(
    "grouped_wgmma_sm90", "emulated", _serves, lambda p: grouped_wgmma_config(p, needed_bytes), _run,
    dequantizes_a=True, arrangement=SwizzledA.of,
)  # fmt: skip
