"""The products of a few rows of activations and several NVFP4 weights, in one launch.

A decode step multiplies a few tokens by the weights of Q, K and V, or of gate and up. Each is a small launch, which
takes about as long to start, and to get its loads under way, as to read its weights. Together they are one launch of
`gemv` (of one token) or `gemm_skinny`, whose programs go on from one weight to the next.

The product of a weight has the bits that it has alone, unless, of several tokens, alone it would be cut among another
number of warps, or into sums of other parts (see `decode_config`): then its float32 sums are added in another order.
"""

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import BlockFormat
from fp4compile.templates.gemm.dispatch import decode, scaled_mm, streamed
from fp4compile.templates.gemm.problem import Problem, problem_of
from fp4compile.templates.gemm.skinny import MOST_IN_GROUP


def products(
    a, a_scales, a_outer, a_fmt: BlockFormat | None, members: list[tuple], b_fmt: BlockFormat, out_dtype
) -> list[torch.Tensor]:
    """`scaled_mm` of the same A and several B, in one launch where that is possible.

    members: (b, b_scales, b_outer, bias) of each. Raises what `scaled_mm` raises.
    """
    arguments = [(a, a_scales, a_outer, a_fmt, *b, b_fmt, bias, out_dtype) for *b, bias in members]
    problems = [problem_of(*each) for each in arguments]
    if not 1 < len(problems) <= MOST_IN_GROUP or len(set(map(common, problems))) > 1 or common(problems[0]) is None:
        return [scaled_mm(*each) for each in arguments]
    return [out.view(p.shape) for p, out in zip(problems, decode(problems), strict=True)]


def common(p: Problem) -> tuple | None:
    """What the products of a launch have in common beside A; None where this one cannot be part of one."""
    if not streamed(p) or statically_true(p.m * p.n == 0):
        return None
    bias = None if p.bias is None else p.bias.dtype
    return p.right.fmt, p.right.swizzled, p.right.outer_kind, bias, p.out_dtype
