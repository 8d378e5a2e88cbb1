"""The product of a few dozen rows of 16-bit activations and NVFP4 weights, on SM90.

Weights come as in `scaled_mm_decode`: each warp keeps 16 rows of them on their way into a ring of its own, 128 elements
a step, and expands them in registers, which are the left operand of `wgmma`. So many activations are read from the
cache more often than they may be, unless the warps of a program share them. They lie in shared memory, the right
operand, by phases of PER steps: that which is computed, the next one, and the one before, which may still be read.
Once a phase all warps meet. While the matrix units multiply some of the weights, the next ones are expanded.

Of its 128 elements a lane holds those that `scaled_mm_decode` gives it, in pairs of j and j + 4 of every eight. The
activations are put into that order when they are written to shared memory: once for all of the program's weights.

This, too, is written for one lane at a time, and the PTX is pure, its order kept by tokens. Shared memory is more than
inline PTX may declare, so it is Triton's: `_reserve`.
"""

import itertools

import triton
import triton.language as tl

from fp4compile.templates.dependent import release
from fp4compile.templates.scaled_mm_decode import expand_word, scale_registers
from fp4compile.templates.scaled_mm_decode_ring import (
    COMMIT,
    MEET,
    SYNC_WARP,
    do_ptx,
    start_weights,
    take_weights,
    wait_ptx,
)
from fp4compile.templates.scaled_mm_tiles import rescale, store_rounded
from fp4compile.templates.tail import tail

_KIND = {"fp16": "f16x2", "bf16": "bf16x2"}
_SLOT = tl.constexpr(1152)  # bytes of 16 rows of a warp's step in its ring: codes and scales
_TILE = tl.constexpr(4096)  # bytes that Triton's pipeline takes for one tile of `_reserve`

# A matrix in shared memory: lines of 128 bytes, whose 16-byte units are exchanged by the line's number (the swizzle of
# 128 bytes), groups of eight lines 1024 bytes apart. The lowest bits are for its address.
_DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


def _words_ptx(compute: str, words: range) -> list[str]:
    """Words of eight codes of two rows -> scaled registers, a{word}_0 to 3 of the upper row, b... of the lower one."""
    kind = _KIND[compute]
    text = []
    for word in words:
        a, b = f"a{word}_", f"b{word}_"
        text += [f".reg .b32 {a}<4>, {b}<4>;", expand_word(kind, f"w{word}", a), expand_word(kind, f"w{4 + word}", b)]
        for j in range(4):
            for register, scale in ((a, "s"), (b, "t")):
                product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
    return text


def _multiply_ptx(compute: str, rows: int) -> str:
    """64 rows of weights times `rows` rows of activations, over 128 elements, added to the warpgroup's sums.

    Operands: a lane's sums and a token out; codes of row g (two words of 64 bits), of row g + 8; the scale bytes of
    both; the low half of the activations' descriptor; a token; the sums. The last words are still being multiplied when
    this is done: with few activations all of them, else half, as the registers allow.
    """
    kind, sums = _KIND[compute], rows // 2
    group = 4 if rows == 16 else 2
    text = ["{ .reg .b32 u, v, z, e, hi, w<8>, s<2>, t<2>; .reg .b16 h, k; .reg .f32 f, g; .reg .b64 d; .reg .pred p;"]
    text.append(f"mov.b32 z, 0x80008000; mov.b32 hi, {_DESCRIPTOR >> 32}; mov.b32 ${sums}, 0; setp.eq.b32 p, 0, 0;")
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${sums + 1 + i};" for i in range(4)]
    text += [scale_registers(kind, f"${sums + 5}", "s"), scale_registers(kind, f"${sums + 6}", "t")]
    held = "{" + ", ".join(f"${i}" for i in range(sums)) + "}"
    for first in range(0, 4, group):
        words = range(first, first + group)
        text += [*_words_ptx(compute, words), "wgmma.fence.sync.aligned;"]
        for word, j in itertools.product(words, (0, 2)):
            # A line of 128 bytes has 64 elements, which are four times 16; the next 64 are in the next matrix.
            at = word // 2 * (rows * 128 // 16) + (word % 2 * 2 + j // 2) * (32 // 16)
            left = ", ".join(f"{register}{word}_{i}" for i in (j, j + 1) for register in "ab")
            text.append(
                f"add.u32 e, ${sums + 7}, {at}; mov.b64 d, {{e, hi}}; wgmma.mma_async.sync.aligned.m64n{rows}k16.f32"
                f".{kind[:-2]}.{kind[:-2]} {held}, {{{left}}}, d, p, 1, 1, 0;"
            )
        text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;")
    return " ".join(text) + " }"


_PTX = tl.constexpr({(compute, rows): _multiply_ptx(compute, rows) for compute in _KIND for rows in (16, 32, 64)})


@triton.constexpr_function
def _chosen(texts, compute, rows):
    return texts[compute, rows]


@triton.constexpr_function
def _multiply_operands(sums):
    return ",".join(["=f"] * sums + ["=&r", "l,l,l,l,r,r,r,r"] + [str(i) for i in range(sums)])


@triton.constexpr_function
def _settle_operands(sums):
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)])


# Out: eight activations (two words of 64 bits), zeros where there are none; a token. In: where from; whether there are
# any; a token.
_FETCH = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b64 $0, 0; mov.b64 $1, 0; mov.b32 $2, 0;"
    " @p ld.global.v2.b64 {$0, $1}, [$3]; }"
)
# In: eight activations; where the pair of elements 0 and 4 goes to; a token. The other pairs are 16 bytes on each, as
# lines are swizzled.
_PUT = tl.constexpr(
    "{ .reg .b32 x<4>, y, d; mov.b64 {x0, x1}, $1; mov.b64 {x2, x3}, $2; mov.b32 $0, 0;"
    " prmt.b32 y, x0, x2, 0x5410; st.shared.b32 [$3], y;"
    " prmt.b32 y, x0, x2, 0x7632; xor.b32 d, $3, 16; st.shared.b32 [d], y;"
    " prmt.b32 y, x1, x3, 0x5410; xor.b32 d, $3, 32; st.shared.b32 [d], y;"
    " prmt.b32 y, x1, x3, 0x7632; xor.b32 d, $3, 48; st.shared.b32 [d], y; }"
)
# What was put is there for `wgmma`; of every warp, once they have met, and what they have read may be overwritten.
_PUBLISH = tl.constexpr("fence.proxy.async.shared::cta; mov.b32 $0, 0;")
_MEMORY = tl.constexpr("{ .reg .b32 m; mov.u32 m, global_smem; add.u32 m, m, 1023; and.b32 $0, m, 0xFFFFFC00; }")


@triton.jit
def _reserve(ptr, out_ptr, count, BYTES: tl.constexpr):
    """Shared memory of the program, BYTES of it, by a loop that is never run: its loads would pass through it.

    count: never negative, which the compiler does not know (of one it would: Triton makes it a constant).
    """
    if count < 0:
        at = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
        acc = tl.zeros((16, 16), tl.float32)
        for i in tl.range(0, count, num_stages=BYTES // _TILE + 1):
            x = tl.load(ptr + i * 2048 + at)
            acc = tl.dot(x, tl.trans(x), acc)
        tl.store(out_ptr + tl.arange(0, 16), tl.sum(acc, 1).to(out_ptr.dtype.element_ty))


@triton.constexpr_function
def shared_bytes(rows, warps, stages, steps):
    """What a program needs, in whole tiles of `_reserve`: three phases, the rings, and a start at whole 1024 bytes."""
    return -(-(3 * steps * rows * 256 + warps * stages * 1152 + 1023) // 4096) * 4096


@triton.jit
def _piece(lane, i, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """(step of a phase, row, 16 bytes of the row's 256) of a lane's i-th piece of activations.

    A warp reads 128 contiguous bytes of each of four rows; what it writes goes to different banks.
    """
    rest = lane // 64 + i * (WARPS // 2)
    return rest // (ROWS // 4), rest % (ROWS // 4) * 4 + lane // 8 % 4, lane // 32 % 2 * 8 + lane % 8


@triton.jit
def _fetch(a_ptr, phase, stop, token, lane, m, chunks, ROWS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr):
    """Start to read a phase's activations into registers: those before the phase `stop`; and a token."""
    found = ()
    for i in tl.static_range(ROWS * STEPS // (2 * WARPS)):
        step, row, piece = _piece(lane, i, ROWS, WARPS)
        at = (phase * STEPS + step) * 16 + piece
        source = a_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + (row * (chunks * 4) + at) * 16
        here = (row < m) & (at < chunks * 4) & (phase < stop)
        x, y, token = tl.inline_asm_elementwise(
            _FETCH, "=&l,=&l,=&r,l,r,r", (source, here.to(tl.int32), token),
            dtype=(tl.int64, tl.int64, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
        found = found + (x, y)
    return found, token


@triton.jit
def _put(x, to, token, lane, ROWS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr):
    """Write a phase's activations to shared memory: for each step two matrices of 64 elements of every row."""
    for i in tl.static_range(ROWS * STEPS // (2 * WARPS)):
        step, row, piece = _piece(lane, i, ROWS, WARPS)
        unit = piece % 2 * 4 ^ row % 8
        at = to + step * (ROWS * 256) + piece // 8 * (ROWS * 128) + row * 128 + unit * 16 + piece % 8 // 2 * 4
        token = do_ptx(_PUT, "l,l,r,r", (x[2 * i], x[2 * i + 1], at, token))
    return do_ptx(_PUBLISH, "r", (token,))


@triton.jit
def _start(
    slot, step, stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start the copies of a warp's step into a slot of the ring; there is a group of them also past the last step."""
    token = start_weights(slot, step, step < stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
                          B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def _multiply(w, c, at, token, COMPUTE: tl.constexpr, ROWS: tl.constexpr):
    """The sums c, 128 elements further, with the activations in shared memory at `at`; and a token."""
    text: tl.constexpr = _chosen(_PTX, COMPUTE, ROWS)
    found = tl.inline_asm_elementwise(
        text, _multiply_operands(ROWS // 2), w + ((at & 0x3FFFF) >> 4 | 1 << 16, token) + c,
        dtype=(tl.float32,) * (ROWS // 2) + (tl.int32,), is_pure=True, pack=1,
    )  # fmt: skip
    return found[: ROWS // 2], found[ROWS // 2]


@triton.jit
def _settled(c, COUNT: tl.constexpr):
    """The sums, once the last of them are there."""
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _settle_operands(COUNT), c, dtype=(tl.float32,) * COUNT, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _place(row, lane, i: tl.constexpr):
    """Where a lane's i-th sum belongs: row of the activations, row of the weights."""
    return lane % 4 * 2 + i // 4 * 8 + i % 2, row + lane % 32 // 4 + i % 4 // 2 * 8


@triton.jit
def scaled_mm_wgmma(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, tail_0_ptr, tail_1_ptr,
    m, n, chunks, splits,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    PER: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """out [m, n] of a [m, 32 * chunks] (bf16 or fp16, m <= ROWS) and b [n, 16 * chunks] (bytes of codes).

    PARTIAL: partial sums [splits, m, n] in float32, each program's of a part of the contraction dimension; the kernel
    that adds them may start early (see `dependent`).
    chunks: even. WARPS: of a program and of the launch, a multiple of 4; each has 16 rows of b. ROWS: 16, 32 or 64.
    STAGES: steps of a warp that are on their way. PER: steps of a phase. EVEN: no program has a row, and no phase a
    step, beyond the end.
    """
    _reserve(a_ptr, out_ptr, chunks, shared_bytes(ROWS, WARPS, STAGES, PER))
    tl.static_assert(ROWS * PER % (2 * WARPS) == 0)
    if PARTIAL:
        a_ptr = release(a_ptr)
    lane = tl.arange(0, 32 * WARPS)
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits * WARPS + lane // 32) * 16
    phases = tl.cdiv(chunks, 4 * PER)
    start = split * tl.cdiv(phases, splits)
    stop = tl.minimum(start + tl.cdiv(phases, splits), phases)

    phase_bytes: tl.constexpr = PER * ROWS * 256
    here = do_ptx(_MEMORY, "r", (lane,))
    ring = here + 3 * phase_bytes + lane // 32 * (STAGES * _SLOT)
    token = lane
    for early in tl.static_range(STAGES):
        token = _start(ring + early * _SLOT, start * PER + early, stop * PER, token, lane, row, b_ptr,
                       b_scales_ptr, n, chunks, B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    first, token = _fetch(a_ptr, start, stop, token, lane, m, chunks, ROWS, WARPS, PER)
    x, token = _fetch(a_ptr, start + 1, stop, token, lane, m, chunks, ROWS, WARPS, PER)
    if B_OUTER == "tensor" and not PARTIAL:
        token = do_ptx("mov.b32 $0, 0;", "f,r", (tl.load(b_outer_ptr), token))  # at the end it then is not waited for
    token = _put(first, here, token, lane, ROWS, WARPS, PER)
    token = do_ptx(MEET, "r", (token,))

    count: tl.constexpr = ROWS // 2
    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = ()
    for _ in tl.static_range(count):
        c = c + (zero,)
    slot = ring
    now = here
    for phase in tl.range(start, stop):
        other = tl.where(now == here + 2 * phase_bytes, here, now + phase_bytes)
        token = _put(x, other, token, lane, ROWS, WARPS, PER)
        x, token = _fetch(a_ptr, phase + 2, stop, token, lane, m, chunks, ROWS, WARPS, PER)
        for i in tl.static_range(PER):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            w, token = take_weights(slot, 0, token, lane)
            token = do_ptx(SYNC_WARP, "r", (token,))  # every lane has what it needs of the slot, which is filled again
            token = _start(slot, phase * PER + i + STAGES, stop * PER, token, lane, row, b_ptr,
                           b_scales_ptr, n, chunks, B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
            c, token = _multiply(w, c, now + i * (ROWS * 256), token, COMPUTE, ROWS)
            slot = tl.where(slot == ring + (STAGES - 1) * _SLOT, ring, slot + _SLOT)
        token = do_ptx(MEET, "r", (token,))
        now = other
    c = _settled(c, count)

    values = ()  # all loads first, as none may pass a store
    for i in tl.static_range(count):
        at_m, at_n = _place(row, lane, i)
        acc = c[i] * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `expand_word`, `scale_registers`
        if not PARTIAL:
            acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, 0)
            inside = (at_m < m) & (at_n < n)
            acc = tail(acc, at_m.to(tl.int64) * n + at_n, at_n, inside, n, tail_0_ptr, tail_1_ptr, ISA)
        values = values + (acc,)
    for i in tl.static_range(count):
        at_m, at_n = _place(row, lane, i)
        at = (split * m + at_m).to(tl.int64) * n + at_n
        store_rounded(out_ptr, at, values[i], (at_m < m) & (at_n < n), ISA)
