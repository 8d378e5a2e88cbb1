"""The product of a few dozen rows of 16-bit activations and NVFP4 weights, on SM90.

Weights come as in `gemm_skinny`: each warp keeps 16 rows of them on their way into a ring of its own, 128 elements
a step, and expands them in registers, which are the left operand of `wgmma`. So many activations are read from the
cache more often than they may be, unless the warps of a program share them. They lie in shared memory, the right
operand, by phases of STEPS_PER_STAGE steps, as `swizzle_a_sm90` has arranged them: one lane copies a phase at once, into the
buffer that all warps are done with, and no warp waits for another one before that. While the matrix units multiply some
of the weights, the next ones are expanded.

The kernel starts before `swizzle_a_sm90` is done (see `device.dependent_launch`): the first weights are on their way by then.

This, too, is written for one lane at a time, and the PTX is pure, its order kept by tokens. Shared memory is more than
inline PTX may declare, so it is Triton's: see `shared_memory`.
"""

import itertools

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.async_copy import BARRIER, COMMIT, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.dependent_launch import launch_dependents, wait
from fp4compile.templates.device.epilogue import epilogue, rescale, store_rounded
from fp4compile.templates.device.nvfp4_weights import copy_weights, dequantize_word, read_weights, scale_registers
from fp4compile.templates.device.shared_memory import MEMORY, reserve
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_tiles import reduce_split_k
from fp4compile.templates.gemm.heuristics import WGMMA_ROWS, WgmmaConfig, wgmma_config
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.gemm.streaming import streams
from fp4compile.templates.gemm.swizzled_a_sm90 import swizzled_a
from fp4compile.templates.launch import launch

_KIND = {"fp16": "f16x2", "bf16": "bf16x2"}
_SLOT = tl.constexpr(1152)  # bytes of 16 rows of a warp's step in its ring: codes and scales
_BUFFERS = tl.constexpr(4)  # phases of activations in shared memory, a power of two
_AHEAD = tl.constexpr(2)  # phases that their copy starts before they are multiplied: at most two less than buffers

# A matrix in shared memory: lines of 128 bytes, whose 16-byte units are exchanged by the line's number (the swizzle of
# 128 bytes), groups of eight lines 1024 bytes apart. The lowest bits are for its address.
_DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


def _words_ptx(compute: str, words: range) -> list[str]:
    """Words of eight codes of two rows -> scaled registers, a{word}_0 to 3 of the upper row, b... of the lower one."""
    kind = _KIND[compute]
    text = []
    for word in words:
        a, b = f"a{word}_", f"b{word}_"
        text += [
            f".reg .b32 {a}<4>, {b}<4>;",
            dequantize_word(kind, f"w{word}", a),
            dequantize_word(kind, f"w{4 + word}", b),
        ]
        for j in range(4):
            for register, scale in ((a, "s"), (b, "t")):
                product = f"{register}{j}, {register}{j}, {scale}{word // 2}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
    return text


def _multiply_ptx(compute: str, rows: int, group: int) -> str:
    """64 rows of weights times `rows` rows of activations, over 128 elements, added to the warpgroup's sums.

    Operands: a lane's sums and a token out; codes of row g (two words of 64 bits), of row g + 8; the scale bytes of
    both; the low half of the activations' descriptor; a token; the sums.
    group: words that are multiplied at once, 2 or 4. The last ones still are when this is done. Their registers must
    not be written meanwhile: four words only where the next 128 elements are another copy of this.
    """
    kind, sums = _KIND[compute], rows // 2
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


_PTX = tl.constexpr({
    (compute, rows, group): _multiply_ptx(compute, rows, group)
    for compute in _KIND for rows in (16, 32, 64) for group in (2, 4)
})  # fmt: skip


@triton.constexpr_function
def _chosen(texts, *key):
    return texts[key]


@triton.constexpr_function
def _multiply_operands(sums):
    return ",".join(["=f"] * sums + ["=&r", "l,l,l,l,r,r,r,r"] + [str(i) for i in range(sums)])


@triton.constexpr_function
def _settle_operands(sums):
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)])


# Each buffer has two barriers: its phase has come, and (8 bytes on) all warps are done with it. They are awaited by the
# parity of how often that was so before; so what awaits parity 1 of a new barrier goes on. All lanes of a warp find the
# same: a branch that says so leaves ptxas the registers that a warp's lanes share.
_FULL = tl.constexpr(
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra.uni WAIT; mov.b32 $0, 0; }"
)
_DONE = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1 + 8]; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def _barriers_ptx(warps):
    """In: where the barriers are, whether it is this lane that makes them, a token."""
    each = "mbarrier.init.shared::cta.b64 [$1 + {}], {};"
    made = " ".join(each.format(8 * i, warps if i % 2 else 1) for i in range(2 * _BUFFERS.value))
    return (
        f"{{ .reg .pred p; setp.eq.b32 p, $2, 0; @p bra NO; {made} fence.mbarrier_init.release.cluster;"
        " NO: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.constexpr_function
def _bring_ptx(size):
    """In: the buffer's barriers, parity of its last use, where it is, where from, whether this warp copies; a token."""
    return (
        "{ .reg .pred p; setp.eq.b32 p, $5, 0; @p bra.uni NO;"
        " WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1 + 8], $2; @!p bra.uni WAIT;"
        f" elect.sync _|p, 0xffffffff; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {size};"
        " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
        f" [$3], [$4], {size}, [$1]; NO: mov.b32 $0, 0; }}"
    )


def needed_bytes(rows: int, warps: int, stages: int, steps: int) -> int:
    """Shared memory of a program: buffers of whole 1024 bytes, the rings, the barriers."""
    return _BUFFERS.value * (steps * rows * 256 + 16) + warps * stages * _SLOT.value


@triton.jit
def _buffer(turn):
    """Which buffer a program's phase `turn` has, and the parity of how many phases had it before."""
    return turn & _BUFFERS - 1, (turn & _BUFFERS) // _BUFFERS


@triton.jit
def _bring(image_ptr, turn, turns, buffers, barriers, token, lane, SIZE: tl.constexpr):
    """Start to copy the program's phase `turn` of the activations, if there is one, once its buffer is free."""
    buffer, parity = _buffer(turn)
    source = image_ptr.to(tl.pointer_type(tl.int8), bitcast=True) + turn * SIZE
    here = ((lane < 32) & (turn < turns)).to(tl.int32)
    places = (barriers + buffer * 16, parity ^ 1, buffers + buffer * SIZE, source)
    return do_ptx(_bring_ptx(SIZE), "r,r,r,l,r,r", places + (here, token))


@triton.jit
def _leave(turn, barriers, token, lane):
    """The warp is done with the program's phase `turn` of the activations, if there is one."""
    buffer, _ = _buffer(turn)
    here = ((lane % 32 == 0) & (turn >= 0)).to(tl.int32)
    return do_ptx(_DONE, "r,r,r", (barriers + buffer * 16, here, token))


@triton.jit
def _start(
    slot, step, stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start the copies of a warp's step into a slot of the ring; there is a group of them also past the last step."""
    token = copy_weights(slot, step, step < stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
                          B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def _multiply(w, c, at, token, COMPUTE: tl.constexpr, ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr):
    """The sums c, 128 elements further, with the activations in shared memory at `at`; and a token."""
    group: tl.constexpr = 4 if ROWS == 16 and STEPS_PER_STAGE > 1 else 2  # as many as registers allow
    text: tl.constexpr = _chosen(_PTX, COMPUTE, ROWS, group)
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
def gemm_wgmma_sm90(
    image_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr,
    m, n, chunks, splits,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    STEPS_PER_STAGE: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ISA: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """out [m, n] of `swizzle_a_sm90` of a [m, 32 * chunks] (m <= ROWS) and b [n, 16 * chunks] (bytes of codes).

    PARTIAL: partial sums [splits, m, n] in float32, each program's of a part of the contraction dimension; the kernel
    that adds them may start early. PDL: this one does (see `device.dependent_launch`).
    chunks: even. WARPS: of a program and of the launch, a multiple of 4; each has 16 rows of b. ROWS: 16, 32 or 64.
    STAGES: steps of a warp that are on their way. STEPS_PER_STAGE: steps of a phase; the image has whole phases. EVEN: no program
    has a row, and no phase a step, beyond the end. SHARED: bytes of shared memory to reserve, at least for
    `needed_bytes`.
    """
    reserve(image_ptr, out_ptr, chunks, SHARED)
    if PARTIAL:
        image_ptr = launch_dependents(image_ptr)
    lane = tl.arange(0, 32 * WARPS)
    split = tl.program_id(0) % splits
    row = (tl.program_id(0) // splits * WARPS + lane // 32) * 16
    phases = tl.cdiv(chunks, 4 * STEPS_PER_STAGE)
    start = split * tl.cdiv(phases, splits)
    turns = tl.minimum(tl.cdiv(phases, splits), phases - start)
    step = start * STEPS_PER_STAGE
    stop = (start + turns) * STEPS_PER_STAGE

    phase_bytes: tl.constexpr = STEPS_PER_STAGE * ROWS * 256
    buffers = do_ptx(MEMORY, "r", (lane,))
    rings = buffers + _BUFFERS * phase_bytes
    ring = rings + lane // 32 * (STAGES * _SLOT)
    barriers = rings + WARPS * STAGES * _SLOT
    token = do_ptx(_barriers_ptx(WARPS), "r,r,r", (barriers, (lane == 0).to(tl.int32), lane))
    for early in tl.static_range(STAGES):
        token = _start(ring + early * _SLOT, step + early, stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
                       B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
    token = do_ptx(BARRIER, "r", (token,))
    if PDL:  # nothing but weights is read before, and nothing written
        image_ptr = wait(image_ptr)
        a_outer_ptr = wait(a_outer_ptr)
        b_outer_ptr = wait(b_outer_ptr)
        bias_ptr = wait(bias_ptr)
        out_ptr = wait(out_ptr)
        epilogue_0_ptr = wait(epilogue_0_ptr)
        epilogue_1_ptr = wait(epilogue_1_ptr)
    image_ptr += start * (phase_bytes // 2)
    for early in tl.static_range(_AHEAD):
        token = _bring(image_ptr, early, turns, buffers, barriers, token, lane, phase_bytes)
    if B_OUTER == "tensor" and not PARTIAL:
        token = do_ptx("mov.b32 $0, 0;", "f,r", (tl.load(b_outer_ptr), token))  # at the end it then is not waited for

    count: tl.constexpr = ROWS // 2
    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = ()
    for _ in tl.static_range(count):
        c = c + (zero,)
    slot = ring
    for turn in tl.range(0, turns):
        buffer, parity = _buffer(turn)
        token = do_ptx(_FULL, "r,r,r", (barriers + buffer * 16, parity, token))
        for i in tl.static_range(STEPS_PER_STAGE):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            w, token = read_weights(slot, 0, token, lane)
            token = do_ptx(
                WARP_BARRIER, "r", (token,)
            )  # every lane has what it needs of the slot, which is filled again
            token = _start(slot, step + STAGES, stop, token, lane, row, b_ptr, b_scales_ptr, n, chunks,
                           B_SQUARE, B_SWIZZLED, EVEN)  # fmt: skip
            at = buffers + (buffer * phase_bytes + i * (ROWS * 256))
            c, token = _multiply(w, c, at, token, COMPUTE, ROWS, STEPS_PER_STAGE)
            if i == 0:  # only from now on the phase before is not read any more
                token = _leave(turn - 1, barriers, token, lane)
                token = _bring(image_ptr, turn + _AHEAD, turns, buffers, barriers, token, lane, phase_bytes)
            slot = tl.where(slot == ring + (STAGES - 1) * _SLOT, ring, slot + _SLOT)
            step += 1
    c = _settled(c, count)

    values = ()  # all loads first, as none may pass a store
    for i in tl.static_range(count):
        at_m, at_n = _place(row, lane, i)
        acc = c[i] * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `scale_registers`
        if not PARTIAL:
            acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, 0)
            inside = (at_m < m) & (at_n < n)
            acc = epilogue(acc, at_m.to(tl.int64) * n + at_n, at_n, inside, n, epilogue_0_ptr, epilogue_1_ptr, ISA)
        values = values + (acc,)
    for i in tl.static_range(count):
        at_m, at_n = _place(row, lane, i)
        at = (split * m + at_m).to(tl.int64) * n + at_n
        store_rounded(out_ptr, at, values[i], (at_m < m) & (at_n < n), ISA)


def _serves(p: Problem) -> bool:
    return statically_true(p.m <= WGMMA_ROWS) and 90 <= p.target.sm < 100 and streams(p)


def _run(call: Call, config: WgmmaConfig) -> torch.Tensor:
    p, split_k = call.problem, config.split_k
    a = swizzled_a(call, config.rows, config.steps_per_stage)
    out = call.empty() if split_k == 1 else call.empty_sums(split_k)
    first = call if split_k == 1 else call.without_epilogue()
    a_outer, b_outer, bias = call.rescale_pointers(out)
    even = statically_true(p.n % (16 * config.warps) == 0 and p.k % (128 * config.steps_per_stage) == 0)
    launch(
        first.with_epilogue(gemm_wgmma_sm90), config.grid(p.n),
        a, a_outer, call.b.data, call.b.scales, b_outer, bias, out, *first.epilogue_pointers(out),
        p.m, p.n, p.k // 32, split_k, A_OUTER=p.a.outer, B_OUTER=p.b.outer,
        BIAS=int(call.bias is not None), PARTIAL=int(split_k > 1), B_SQUARE=int(p.b.format.square),
        B_SWIZZLED=int(p.b.swizzled), COMPUTE=p.compute, EVEN=int(even), PDL=p.target.dependent_launch,
        ISA=p.target.isa, num_warps=config.warps, **config.constants,
    )  # fmt: skip
    return out if split_k == 1 else reduce_split_k(call, out, split_k, pdl=True)


CANDIDATE = Candidate(
    "wgmma_sm90", "emulated", _serves, lambda p: wgmma_config(p, needed_bytes), _run,
    takes_epilogue=lambda p: True, dequantizes_a=True,
)  # fmt: skip
