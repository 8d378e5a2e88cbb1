"""Few rows of A times streamed NVFP4, MXFP4 or FP8 weights, by `gemv` or `skinny`; FP4 weights also for experts.

`gemv` has one or two rows. One row of 4096 elements and more takes it 8 to 18 % less time than the best launch of
`skinny` with two rows, of which one is empty (H200: 4096 x 4096 5.2 and 5.7 us, 14336 x 4096 12.7 and 14.9 us).

On SM90 `wgmma_sm90` takes experts with more than four tokens on average, since `skinny` computes a second tile of a
matrix from nine tokens on. Where K is below 1024, `wgmma_sm90` takes experts with one token or more on average: the
warps of `skinny` share K, and have a step or two each. MXFP4 on an H200, `skinny` and `wgmma_sm90`: gpt-oss' 5760 x
2880, two tokens 98 and 101 us, four 107 and 111, eight 149 and 114; Qwen3-30B's 1536 x 2048, two 71 and 68, four 82 and
77, eight 112 and 80, and its 2048 x 768, one 43 and 36, two 55 and 44, four 64 and 49. NVFP4, gpt-oss: two 97 and 116,
four 107 and 124. Where `wgmma_sm90` has at most two programs a multiprocessor, it does not fill the GPU, and `skinny`
takes experts with up to eight tokens on average: 8 experts of 2048 x 7168, eight tokens each, 28 and 53 us.
"""

from collections.abc import Sequence

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.gemm import gemv, skinny
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_operand import MOST_GROUPS
from fp4compile.templates.gemm.horizontal import in_common
from fp4compile.templates.problem import Problem


def streams(p: Problem) -> bool:
    """Whether `device.fp4_weights` can read FP4 codes of B, 16 bits represent A, and groups are rows."""
    weights = p.b.element == "e2m1" and p.compute != "fp32" and (p.b.scale == "e4m3" or _reads_mxfp4(p))
    whole = statically_true(p.k % 64 == 0) and statically_true(p.k > 0) and p.batches == 1
    return weights and whole and (not p.ragged or (p.by_rows and not p.a.swizzled))


def _reads_mxfp4(p: Problem) -> bool:
    """Whether A is plain, and the scales of each matrix of B begin at a word, in rows of their own."""
    words = p.b.swizzled or not p.ragged or statically_true(p.n * (p.k // 32) % 4 == 0)
    return p.a.format is None and p.b.scales_text in ("e8m0", "e8m0 swizzled") and words


def executes(p: Problem) -> bool:
    """Whether the GPU has the instructions: of compute capability 8.9 for E4M3 scales, of 8.0 for E8M0 scales."""
    return p.target.sm >= (80 if p.b.scale == "e8m0" else 89)


def _serves_fp8(p: Problem) -> bool:
    """Whether `device.fp8_weights` can read FP8 codes of B, and A is in 16 bits, or (on Hopper) FP8 codes; few rows.

    Block scales are those of 128 elements along K. torch's matmuls of FP8 codes take as long for one row as bf16's
    (H200, 8192 x 8192: row scales 43 us, blocks 36, bf16 36); with scales of whole tensors 21, which the library keeps.
    """
    a, b = p.a, p.b
    if b.element != "e4m3" or p.ragged or p.batches != 1 or p.compute == "fp32" or p.target.sm < 89:
        return False
    weights = b.scale == "none" or (b.scale == "float32" and b.format.block in ((1, 128), (128, 128)))
    if a.format is not None:
        codes = a.element == "e4m3" and p.target.sm == 90
        blocks = a.scale == "float32" and a.format.block == (1, 128)
        if not (codes and (blocks or (a.scale == "none" and "row" in (a.outer, b.outer)))):
            return False
    unit = 64 if (a.scale, b.scale) == ("none", "none") else 128
    whole = statically_true(p.k % unit == 0) and statically_true(p.k > 0)
    return weights and whole and statically_true(p.m <= skinny.SKINNY_ROWS)


def _serves(p: Problem) -> bool:
    rows = _most_rows_of_experts(p) if p.ragged else skinny.SKINNY_ROWS
    return executes(p) and streams(p) and statically_true(p.m <= rows)


def _most_rows_of_experts(p: Problem) -> int:
    """The rows of all groups up to which `skinny` serves the groups; `wgmma_sm90` serves more on SM90."""
    if not 90 <= p.target.sm < 100 or p.groups > MOST_GROUPS:
        return skinny.SKINNY_ROWS * p.groups
    if not statically_true(p.k >= 1024):
        return p.groups - 1
    programs = p.groups * ceil_div(p.n, 64)  # of `wgmma_sm90`, if each group has one tile of few rows
    return p.groups * (skinny.SKINNY_ROWS if statically_true(programs <= 2 * p.target.multiprocessors) else 4)


def _configure(p: Problem) -> gemv.GemvConfig | skinny.SkinnyConfig:
    if p.ragged:
        return skinny.experts_config(p)
    return gemv.gemv_config(p) or skinny.skinny_config(p)


def _run_group(calls: Sequence[Call], config: gemv.GemvConfig | skinny.SkinnyConfig) -> list[torch.Tensor]:
    return (gemv if isinstance(config, gemv.GemvConfig) else skinny).multiply_group(calls, config)


def _run(call: Call, config: gemv.GemvConfig | skinny.SkinnyConfig) -> torch.Tensor:
    if not call.problem.ragged:
        return _run_group([call], config)[0]
    return skinny.multiply_experts(call.problem, config, call.a, call.b, call.offs, indexed=False)


CANDIDATE = Candidate(
    "streaming", "emulated", _serves, _configure, _run, dequantizes_a=True,
    group_with=lambda p: in_common(p) if not p.ragged else None, run_group=_run_group,
)  # fmt: skip
FLOAT8 = Candidate(
    "streaming_fp8", "emulated", _serves_fp8, skinny.fp8_config,
    lambda call, config: skinny.multiply_group([call], config)[0],
    group_with=in_common, run_group=skinny.multiply_group,
)  # fmt: skip
