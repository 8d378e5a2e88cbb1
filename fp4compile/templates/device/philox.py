"""The random bits of stochastic rounding: `reference.philox` on the GPU.

One call of Philox gives four words, and a word rounds two elements. So the thread that holds a run of eight elements
makes the words of that run.
"""

import triton
import triton.language as tl

from fp4compile import reference

ROUNDS = tl.constexpr(reference.PHILOX_ROUNDS)


@triton.jit
def philox(index, seed, STREAM: tl.constexpr):
    """The four random words (uint32) of each counter `index` (int64), for the key `seed` (int64 scalar)."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = tl.full(index.shape, STREAM, tl.uint32)
    c3 = tl.full(index.shape, 0, tl.uint32)
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        # The products are 64 bits wide: one instruction gives both halves.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def match_layout(index, words):
    """index, spread over the threads as `words` is, so that each random word is made by the thread that uses it.

    Triton gives a tensor the layout of the tensors that it is computed from. So `words` takes part in the computation:
    what is added is always 0, because `words | 1` is never 0, but only LLVM sees that.
    """
    return index + ((words | 1) == 0)
