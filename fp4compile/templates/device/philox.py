"""The random bits of stochastic rounding: `reference.philox` on the GPU.

One call of Philox gives four words, and a word rounds two elements. So one call is for a run of eight elements; the
run's number in the tensor is the counter, and the thread that holds the run computes its words.

The stochastic conversion of SM100 takes a word for four elements, eight bits for each. So on SM100 one call is for two
neighbouring runs, and the number of the pair of runs is the counter: no bit is used for two elements.
"""

import triton
import triton.language as tl

from fp4compile.formats import reference

ROUNDS = tl.constexpr(reference.PHILOX_ROUNDS)


def _philox_ptx() -> str:
    """PTX: the four words of the counter ($4, $5, $8, 0) for the key ($6, $7) -> $0-$3."""
    round_ptx = (
        " mul.wide.u32 p, c0, 0xD2511F53; mul.wide.u32 q, c2, 0xCD9E8D57; mov.b64 {p0, p1}, p; mov.b64 {q0, q1}, q;"
        " lop3.b32 c0, q1, c1, k0, 0x96; mov.b32 c1, q0; lop3.b32 c2, p1, c3, k1, 0x96; mov.b32 c3, p0;"
        " add.u32 k0, k0, 0x9E3779B9; add.u32 k1, k1, 0xBB67AE85;"
    )
    return (
        "{ .reg .b64 p, q; .reg .b32 p0, p1, q0, q1, c0, c1, c2, c3, k0, k1; mov.b32 c0, $4; mov.b32 c1, $5;"
        " mov.b32 k0, $6; mov.b32 k1, $7; mov.b32 c2, $8; mov.b32 c3, 0;"
        + round_ptx * reference.PHILOX_ROUNDS
        + " mov.b32 $0, c0; mov.b32 $1, c1; mov.b32 $2, c2; mov.b32 $3, c3; }"
    )


_PHILOX = tl.constexpr(_philox_ptx())


@triton.jit
def philox(index, seed, STREAM: tl.constexpr, ISA: tl.constexpr):
    """The four random words (uint32) of each counter `index` (int64), for the key `seed` (int64 scalar)."""
    if ISA >= 100:
        return tl.inline_asm_elementwise(
            _PHILOX, "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [index.to(tl.uint32), (index >> 32).to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32), STREAM],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return _portable_philox(index, seed, STREAM)


@triton.jit
def _portable_philox(index, seed, STREAM: tl.constexpr):
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


@triton.constexpr_function
def runs_of_a_call(isa):
    """The number of neighbouring runs of eight elements for which one call of Philox gives words."""
    return 2 if isa == 100 else 1


@triton.jit
def words_of_run(words, RUN: tl.constexpr, ISA: tl.constexpr):
    """The words that round run number RUN of the `runs_of_a_call` runs of a call."""
    if runs_of_a_call(ISA) == 1:
        return words
    else:
        return (words[2 * RUN], words[2 * RUN + 1])


@triton.jit
def match_layout(index, words):
    """index in the layout of `words`, so that the thread that uses a random word computes it.

    Triton gives a tensor the layout of the tensors of which it is computed. So `words` takes part in the computation:
    the summand is always 0, because `words | 1` is never 0, but only LLVM can derive that.
    """
    return index + ((words | 1) == 0)
