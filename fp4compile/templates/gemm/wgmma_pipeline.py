"""The pipelines of `gemm_wgmma_sm90`: copies of A and B to shared memory, and the barriers of A.

See `wgmma_sm90` for what is copied, and when.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.async_copy import COMMIT, do_ptx
from fp4compile.templates.device.nvfp4_weights import STEP_BYTES, copy_weights

A_AHEAD = tl.constexpr(2)  # how many stages before its use the copy of a stage of A starts

# Each buffer of A has two barriers (mbarrier), at which each warp arrives once a phase. "Full": its copies of the stage
# have arrived. "Empty", 8 bytes on, used with three buffers: it has released the stage. A barrier counts its phases,
# and a wait returns when the phase of a given parity is complete. A new barrier behaves as if a phase of parity 1 were
# complete, so the first wait for an empty buffer returns at once.
# All lanes of a warp take the same branch; `bra.uni` says so, and lets ptxas use the warp's uniform registers.
# Inputs: the buffer's barriers, the parity, a token.
WAIT_FULL = tl.constexpr(
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra.uni WAIT; mov.b32 $0, 0; }"
)
# Inputs: the buffer's barriers, whether this lane arrives for its warp, a token.
_ARRIVE_EMPTY = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1 + 8]; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def barriers_ptx(warps, buffers):
    """PTX that initialises the barriers. Inputs: their address, whether this lane initialises them, a token."""
    made = " ".join(f"mbarrier.init.shared::cta.b64 [$1 + {8 * i}], {warps};" for i in range(2 * buffers))
    return (
        f"{{ .reg .pred p; setp.eq.b32 p, $2, 0; @p bra NO; {made} fence.mbarrier_init.release.cluster;"
        " NO: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.constexpr_function
def _passes(rows, warps):
    """How often the lanes of a program, eight a line, copy lines of a matrix [rows, 64] of A."""
    return -(-rows // (4 * warps))


@triton.constexpr_function
def _copy_a_stage_ptx(rows, warps, steps, even, waits):
    """PTX that starts a lane's copies of a stage of A: one unit of some of its lines.

    even: all matrices of every stage exist. waits: the buffer may be in use, so "empty" is awaited.
    Inputs: the buffer's barriers, the parity to wait for, whether to copy at all, the lane's first destination, the
    stage's elements of the tile's first row, the lane's first line, how many matrices of the stage exist; for each pass
    how many units beyond that row's elements the lane's source is; a token. Matrices that do not exist become zeros.
    """
    lines = 4 * warps
    text = ["{ .reg .pred p, r; .reg .b64 s; .reg .b32 c; mov.b32 $0, 0; setp.eq.b32 p, $3, 0; @p bra.uni NO;"]
    if waits:
        text.append("WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1 + 8], $2; @!p bra.uni WAIT;")
    for i in range(_passes(rows, warps)):
        ragged = rows < (i + 1) * lines
        if ragged:
            text.append(f"setp.lt.s32 r, $6, {rows - i * lines};")
        text.append(f"mad.wide.s32 s, ${8 + i}, 16, $5;")
        for matrix in range(2 * steps):
            if not even:
                text.append(f"setp.gt.s32 p, $7, {matrix}; selp.b32 c, 16, 0, p;")
            text.append(
                f"{'@r ' if ragged else ''}cp.async.cg.shared.global{'.L2::128B' if even else ''}"
                f" [$4 + {matrix * rows * 128 + i * lines * 128}], [s + {matrix * 128}], 16{'' if even else ', c'};"
            )
    return " ".join(text) + " NO: }"


@triton.constexpr_function
def _copy_a_operands(passes):
    return ",".join(["r,r,r,r,l,r,r"] + ["r"] * (passes + 1))


@triton.constexpr_function
def under_way(stages, steps, step):
    """How many groups of a warp's copies may be under way when it multiplies step `step` of a stage of A.

    These are the groups behind its step of B, and behind its stage of A, which was awaited at the stage's first step.
    Groups are counted in the order in which the kernel commits them, from its start on.
    """
    ahead, found = A_AHEAD.value * steps, []
    for stage in range(stages + 2):
        now, groups = stage * steps + step, []
        for earlier in range(-max(stages, ahead), now):
            groups += [("b", earlier + stages)] * (earlier + stages >= 0)
            groups += [("a", (earlier + ahead) // steps)] * (earlier % steps == 0 and earlier + ahead >= 0)
        needed = [("b", now)] + [("a", stage)] * (step == 0)
        found.append(len(groups) - 1 - max(map(groups.index, needed)))
    return min(found)


@triton.constexpr_function
def arrive_full_ptx(groups):
    """PTX that waits until at most `groups` groups of the warp's copies are under way, and arrives at "full".

    `cp.async` writes by the generic proxy, `wgmma` reads by the asynchronous one: the fence orders the two.
    Inputs: the buffer's barriers, whether this lane arrives for its warp, a token.
    """
    return (
        f"{{ .reg .pred p; setp.ne.b32 p, $2, 0; cp.async.wait_group {groups}; fence.proxy.async.shared::cta;"
        " bar.warp.sync 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }"
    )


@triton.jit
def buffer_of(stage, BUFFERS: tl.constexpr):
    """The buffer of the program's stage of A, and the parity of the number of stages that used it before."""
    return stage % BUFFERS, stage // BUFFERS % 2


@triton.jit
def sources_of_a(line, unit, last, row_units, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """For each pass of a lane over the lines of A: how many units its source is beyond the tile's first row.

    Beyond the last row of A, which is row `last` of the tile, lines are copies of it: nothing reads their sums.
    """
    found = ()
    for i in tl.static_range(_passes(ROWS, WARPS)):
        found = found + (tl.minimum(line + i * (4 * WARPS), last) * row_units + unit,)
    return found


@triton.jit
def copy_a_stage(
    a_ptr, sources, stage, stages, matrices, buffers, barriers, token, lane,
    ROWS: tl.constexpr, WARPS: tl.constexpr, STEPS: tl.constexpr, BUFFERS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Start to copy this warp's share of the program's stage of A, if it exists.

    a_ptr: the program's first element in the tile's first row. sources: from `sources_of_a`. stages, matrices: how
    many the program has. The copies are committed as one group, which is empty past the last stage. Returns a token.
    """
    buffer, parity = buffer_of(stage, BUFFERS)
    line = lane // 8
    into = buffers + buffer * (STEPS * ROWS * 256) + line * 128 + (lane % 8 ^ line % 8) * 16
    wanted = (stage < stages).to(tl.int32)
    places = (barriers + buffer * 16, parity ^ 1, wanted, into, a_ptr + stage * (STEPS * 128), line)
    values = places + (matrices - stage * (2 * STEPS),) + sources + (token,)
    operands: tl.constexpr = _copy_a_operands(_passes(ROWS, WARPS))
    token = do_ptx(_copy_a_stage_ptx(ROWS, WARPS, STEPS, EVEN, BUFFERS < A_AHEAD + 2), operands, values)
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def release_a_stage(stage, barriers, token, lane, BUFFERS: tl.constexpr):
    """Release the program's stage of A, if it exists, for this warp. Returns a token."""
    buffer, _ = buffer_of(stage, BUFFERS)
    arrives = ((lane % 32 == 0) & (stage >= 0)).to(tl.int32)
    return do_ptx(_ARRIVE_EMPTY, "r,r,r", (barriers + buffer * 16, arrives, token))


@triton.jit
def copy_b_step(
    buffer, step, stop, token, lane, row, b_ptr, b_scales_ptr, n, k_vectors,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    B_TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """Start to copy a warp's step of B into a buffer, and commit the copies as one group. Returns a token.

    Past the last step nothing is copied, but an empty group is committed, so that `wait_ptx` counts right.
    B_TRANSPOSED: B is [K, n] in memory, and `row` is the first column of the program. A step is 128 rows of B, 16 for
    each of eight warps, and PARTS times 128 columns.
    """
    for part in tl.static_range(PARTS):
        if B_TRANSPOSED:
            token = copy_weights(buffer + part * STEP_BYTES, row // 128 + part, step < stop, token, lane,
                                 step * 128 + lane // 32 * 16, b_ptr, b_scales_ptr, k_vectors * 32, n // 32, B_SQUARE,
                                 B_SWIZZLED, EVEN, False, True)  # fmt: skip
        else:
            token = copy_weights(buffer + part * STEP_BYTES, step, step < stop, token, lane, row + part * 16, b_ptr,
                                 b_scales_ptr, n, k_vectors, B_SQUARE, B_SWIZZLED, EVEN, True)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))
