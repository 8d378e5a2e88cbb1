"""GEMM of nine and more rows of 16-bit A times FP4 weights B, on the warpgroup matrix units (`wgmma`) of SM90.

B arrives as in `gemm_skinny`: each warp copies the codes and scales of its own 16 or 32 rows, 128 elements along K a
step, into STAGES buffers in shared memory, and dequantises them in registers. B is the first operand of `wgmma`, which
registers may hold, and the kernel computes the transposed result.

A program has a tile of up to 256 rows of A. Separate copies for each warp would read A from the cache too often. So the
warps of a program share A, the second operand of `wgmma`, in shared memory. A has its own pipeline: one stage is
STEPS_PER_STAGE steps of all rows of the tile, in the order of `swizzle_a_sm90` in global memory, so that one lane
starts two bulk copies per step. A stage is copied to a buffer that all warps have released; warps wait for each other
only there. While the matrix units multiply some of a step's elements of B, the warps dequantise the next elements.

With many rows of A the matrix units are the bound. A multiprocessor multiplies 64 rows of B, 256 rows of A and 16
elements of K in 128 clocks, and two warpgroups take turns: each has 256 clocks in which to dequantise the next 16
elements of its 64 rows, for which its four warps, on four schedulers, have about 30 instructions each.

The kernel starts before `swizzle_a_sm90` is done (`device.dependent_launch`), and starts its copies of B meanwhile.

Groups of rows: a program finds the group of its tile from the offsets on the device, and multiplies rows of A of this
group with rows of the group's packed matrix. The grid is large enough for all sizes of groups. A program without a tile
exits at once.

The kernel is written one lane at a time, in inline PTX ordered by tokens: see `async_copy`. It needs more shared memory
than inline PTX may declare, so Triton reserves it: see `shared_memory`.
"""

import itertools

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.apply_epilogue import (
    auxiliary_of,
    factor_of_rows,
    prefetch_operands,
    rescale_mode,
    rescale_values,
)
from fp4compile.templates.device.async_copy import (
    AWAIT_VALUE,
    BARRIER,
    COMMIT,
    WARP_BARRIER,
    do_ptx,
    keep,
    select_ptx,
    wait_ptx,
)
from fp4compile.templates.device.dependent_launch import launch_dependents, wait
from fp4compile.templates.device.elements import pack, unpack
from fp4compile.templates.device.fp4_weights import (
    SCALE_REGISTERS,
    STEP_BYTES,
    copy_weights,
    read_weights,
    scale_registers,
    scaled_word,
    sums_factor,
    type_of_scales,
    weight_sources,
)
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.lane_rows import bytes_of, load_rows, store_rows
from fp4compile.templates.device.pointwise import compute, kind_of, operate, part_of, tensor_count
from fp4compile.templates.device.shared_memory import MEMORY, reserve
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_operand import MOST_GROUPS
from fp4compile.templates.gemm.split_k import reduce_split_k
from fp4compile.templates.gemm.streaming import streams
from fp4compile.templates.gemm.swizzled_a_sm90 import SwizzledA
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig, wgmma_config
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import writes

_KIND = {"fp16": "f16x2", "bf16": "bf16x2"}
# How many stages before its use the copy of a stage of A starts.
_A_AHEAD = tl.constexpr(2)

# The `wgmma` descriptor of a matrix in shared memory, without its address, which the lowest bits take: lines of 128
# bytes with the 128-byte swizzle (16-byte units exchanged by the line's number), groups of eight lines 1024 bytes on.
_DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


def _multiply_ptx(compute: str, scale: str, rows: int, group: int) -> str:
    """PTX that adds the product of 64 rows of B (of a warpgroup) and `rows` rows of A over 128 elements to the sums.

    Outputs: a lane's sums; a token. Inputs: codes of row g (two words of 64 bits), codes of row g + 8; the scale bytes
    of both rows; the low half of A's descriptor; a token; the sums so far.
    group: words of codes that one group of `wgmma` multiplies, 2 or 4. The last group is still running at the end of
    this PTX, and its registers must not be written meanwhile. With four words it uses all registers, so the next step
    must be another copy of this PTX, to which ptxas assigns other registers.
    """
    kind, sums = _KIND[compute], rows // 2
    text = ["{ .reg .b32 e, hi, w<8>; .reg .b64 d; .reg .pred p;", SCALE_REGISTERS]
    text.append(f"mov.b32 hi, {_DESCRIPTOR >> 32}; mov.b32 ${sums}, 0; setp.eq.b32 p, 0, 0;")
    text += [f"mov.b64 {{w{2 * i}, w{2 * i + 1}}}, ${sums + 1 + i};" for i in range(4)]
    text.append(scale_registers(kind, scale, f"${sums + 5}", f"${sums + 6}"))
    held = "{" + ", ".join(f"${i}" for i in range(sums)) + "}"
    for first in range(0, 4, group):
        words = range(first, first + group)
        for word in words:
            text.append(
                f".reg .b32 a{word}_<4>, b{word}_<4>;" + scaled_word(kind, scale, word, f"a{word}_", f"b{word}_")
            )
        text.append("wgmma.fence.sync.aligned;")
        for word, j in itertools.product(words, (0, 2)):
            # One `wgmma` takes 16 elements of a line. A line (128 bytes) has 64; the next 64 are in the next matrix.
            at = word // 2 * (rows * 128 // 16) + (word % 2 * 2 + j // 2) * (32 // 16)
            b_registers = ", ".join(f"{register}{word}_{i}" for i in (j, j + 1) for register in "ab")
            text.append(
                f"add.u32 e, ${sums + 7}, {at}; mov.b64 d, {{e, hi}}; wgmma.mma_async.sync.aligned.m64n{rows}k16.f32"
                f".{kind[:-2]}.{kind[:-2]} {held}, {{{b_registers}}}, d, p, 1, 1, 0;"
            )
        text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;")
    return " ".join(text) + " }"


_MULTIPLY_WGMMA = tl.constexpr({
    (compute, scale, rows, group): _multiply_ptx(compute, scale, rows, group)
    for compute, scale in (("fp16", "e4m3"), ("bf16", "e4m3"), ("bf16", "e8m0"))
    for rows in (16, 32, 48, 64, 72, 80, 96, 128, 160, 192, 224, 256) for group in (2, 4)
})  # fmt: skip


@triton.constexpr_function
def _multiply_operands(sums):
    return ",".join(["=f"] * sums + ["=&r", "l,l,l,l,r,r,r,r"] + [str(i) for i in range(sums)])


@triton.constexpr_function
def _wait_wgmma_operands(sums):
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)])


# Each buffer of A has two barriers (mbarrier). "Full": its stage has arrived. "Empty", 8 bytes on: all warps have
# released it. A barrier counts its phases, and a wait returns when the phase of a given parity is complete. A new
# barrier behaves as if a phase of parity 1 were complete, so the first wait for an empty buffer returns at once.
# All lanes of a warp take the same branch; `bra.uni` says so, and lets ptxas use the warp's uniform registers.
# Inputs: the buffer's barriers, the parity, a token.
_WAIT_FULL = tl.constexpr(
    "{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra.uni WAIT; mov.b32 $0, 0; }"
)
# Inputs: the buffer's barriers, whether this lane arrives for its warp, a token.
_ARRIVE_EMPTY = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1 + 8]; mov.b32 $0, 0; }"
)


@triton.constexpr_function
def _barriers_ptx(warps, buffers):
    """PTX that initialises the barriers. Inputs: their address, whether this lane initialises them, a token."""
    each = "mbarrier.init.shared::cta.b64 [$1 + {}], {};"
    made = " ".join(each.format(8 * i, warps if i % 2 else 1) for i in range(2 * buffers))
    return (
        f"{{ .reg .pred p; setp.eq.b32 p, $2, 0; @p bra NO; {made} fence.mbarrier_init.release.cluster;"
        " NO: bar.warp.sync 0xffffffff; mov.b32 $0, 0; }"
    )


@triton.constexpr_function
def _copy_a_stage_ptx(size, copies):
    """PTX that waits for an empty buffer and starts `copies` copies of A to it, by one elected lane; `size` bytes each.

    Inputs: the buffer's barriers, the parity to wait for, the buffer, the first source, bytes from one source to the
    next, whether this warp copies, a token.
    """
    each = (
        f"@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [b], [a], {size}, [$1];"
        f" add.u32 b, b, {size}; add.s64 a, a, $5;"
    )
    return (
        "{ .reg .pred p; .reg .b32 b; .reg .b64 a; setp.eq.b32 p, $6, 0; @p bra.uni NO; mov.b32 b, $3; mov.b64 a, $4;"
        " WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [$1 + 8], $2; @!p bra.uni WAIT;"
        f" elect.sync _|p, 0xffffffff; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {copies * size};"
        f" {' '.join([each] * copies)} NO: mov.b32 $0, 0; }}"
    )


def needed_bytes(rows: int, warps: int, parts: int, stages: int, steps: int, buffers: int) -> int:
    """Shared memory of a program: buffers of A (each a multiple of 1024 bytes), buffers of B, and barriers of A."""
    return buffers * (steps * rows * 256 + 16) + warps * parts * stages * STEP_BYTES.value


@triton.jit
def _next_buffer(buffer, parity, BUFFERS: tl.constexpr):
    """The buffer of the next stage of A, and the parity of the number of stages that used it before."""
    last = buffer == BUFFERS - 1
    return tl.where(last, 0, buffer + 1), tl.where(last, parity ^ 1, parity)


@triton.jit
def _copy_a_stage(
    source, matrix_bytes, wanted, buffer, parity, buffers, barriers, token, lane,
    ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr,
):  # fmt: skip
    """Start to copy a stage of A, if it is wanted, as soon as its buffer is empty. Returns a token.

    source: the stage's first matrix of swizzled A; a line of ROWS is copied from each of two matrices a step.
    buffer, parity: of the stage, as for `_next_buffer`.
    """
    size: tl.constexpr = ROWS * 128
    copies: tl.constexpr = 2 * STEPS_PER_STAGE
    places = (barriers + buffer * 16, parity ^ 1, buffers + buffer * (copies * size), source, matrix_bytes)
    wanted = ((lane < 32) & wanted).to(tl.int32)  # by the first warp
    return do_ptx(_copy_a_stage_ptx(size, copies), "r,r,r,l,l,r,r", places + (wanted, token))


@triton.jit
def _release_a_stage(buffer, wanted, barriers, token, lane):
    """Release a buffer of A for this warp, if wanted. Returns a token."""
    arrives = ((lane % 32 == 0) & wanted).to(tl.int32)
    return do_ptx(_ARRIVE_EMPTY, "r,r,r", (barriers + buffer * 16, arrives, token))


@triton.jit
def _copy_b_step(
    buffer, step, sources, token, lane, k_vectors, B_SCALES: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr
):
    """Start to copy a warp's step of B into a buffer, and commit the copies as one group. Returns a token.

    sources: from `weight_sources`, of each part. Past the last step nothing is copied, but an empty group is committed,
    so that `wait_ptx` counts right.
    """
    for part in tl.static_range(PARTS):
        token = copy_weights(buffer + part * STEP_BYTES, step, sources[part], token, lane, k_vectors, B_SCALES, EVEN,
                             True)  # fmt: skip
    return do_ptx(COMMIT, "r", (token,))


@triton.jit
def _multiply(
    w, c, a_at, token, COMPUTE: tl.constexpr, B_SCALES: tl.constexpr, ROWS: tl.constexpr, TOGETHER: tl.constexpr
):
    """(A lane's sums c plus the products of a step, token). w: B, from `read_weights`. a_at: A in shared memory.

    TOGETHER: words of codes of B that one group of `wgmma` multiplies, 2 or 4.
    """
    text: tl.constexpr = select_ptx(_MULTIPLY_WGMMA, COMPUTE, type_of_scales(B_SCALES), ROWS, TOGETHER)
    found = tl.inline_asm_elementwise(
        text, _multiply_operands(ROWS // 2), w + ((a_at & 0x3FFFF) >> 4 | 1 << 16, token) + c,
        dtype=(tl.float32,) * (ROWS // 2) + (tl.int32,), is_pure=True, pack=1,
    )  # fmt: skip
    return found[: ROWS // 2], found[ROWS // 2]


@triton.jit
def _wait_wgmma(c, COUNT: tl.constexpr):
    """The sums, once all matrix instructions are complete."""
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _wait_wgmma_operands(COUNT), c, dtype=(tl.float32,) * COUNT, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.constexpr_function
def _words_together(rows, whole, EPILOGUE):
    """The number of words, each two of a lane's sums, that are stored together: as many as registers allow."""
    if rows < 256:
        return 8
    operands = max(1, tensor_count(EPILOGUE) - 1) if EPILOGUE else 1
    return max(2, 8 // operands // (1 if whole else 2))


@triton.jit
def _two_columns(ptr, col, n, WANTED: tl.constexpr):
    """Elements `col` and `col + 1` of a vector [n], in float32; zeros if they are not WANTED."""
    if not WANTED:
        return tl.zeros_like(col).to(tl.float32), tl.zeros_like(col).to(tl.float32)
    else:
        first = tl.load(ptr + col, mask=col < n, other=0.0).to(tl.float32)
        return first, tl.load(ptr + col + 1, mask=col + 1 < n, other=0.0).to(tl.float32)


@triton.jit
def _load_operands(
    row, col, end, n, token, a_outer_ptr, epilogue_0_ptr, epilogue_1_ptr,
    A_OUTER: tl.constexpr, EPILOGUE: tl.constexpr, WORDS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(Row scales of A, the epilogue's operands, a token) for WORDS words of a lane from (row, col) on.

    The row scales are bits of float32, of each word's row. An operand of the result's size is a tuple of words, one
    that all rows share a tuple of its values at the two columns.
    """
    a_outer = ()
    if A_OUTER == "row":
        a_outer, token = load_rows(a_outer_ptr + row, tl.cast(4, tl.int64), end - row, n, token, 4, WORDS, True)
    operands = ()
    if EPILOGUE != "":
        ptrs = (epilogue_0_ptr, epilogue_1_ptr)
        for i in tl.static_range(1, tensor_count(EPILOGUE)):
            ptr = ptrs[auxiliary_of(EPILOGUE, i)]
            if kind_of(EPILOGUE, i) == "aux":
                words, token = load_rows(
                    ptr + row.to(tl.int64) * n + col, tl.cast(n, tl.int64) * bytes_of(ptr), end - row, n - col, token,
                    2 * bytes_of(ptr), WORDS, WHOLE,
                )  # fmt: skip
                operands = operands + (words,)
            else:
                operands = operands + (_two_columns(ptr, col, n, True),)
    return a_outer, operands, token


@triton.jit
def _operands_of_word(operands, j: tl.constexpr, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE: tl.constexpr):
    """The values at the two elements of word j of each of the operands that `_load_operands` returns."""
    ptrs = (epilogue_0_ptr, epilogue_1_ptr)
    values = ()
    for i in tl.static_range(len(operands)):
        if kind_of(EPILOGUE, i + 1) == "aux":
            values = values + (unpack(operands[i][j], ptrs[auxiliary_of(EPILOGUE, i + 1)].dtype.element_ty),)
        else:
            values = values + (operands[i],)
    return values


@triton.jit
def _of_row(factor, a_outer, j: tl.constexpr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr):
    """The factor of word j: the one that all rows share, times the row scale of A, if it has any."""
    if A_OUTER != "row":
        return factor
    else:
        of_row = a_outer[j].to(tl.float32, bitcast=True)
        return of_row * factor if B_OUTER == "tensor" else of_row


@triton.jit
def _through_epilogue(acc, operands, side: tl.constexpr, EPILOGUE: tl.constexpr, ISA: tl.constexpr):
    """The epilogue's result for rescaled sums, one element of a word each. side: which element."""
    if EPILOGUE == "":
        return acc
    else:
        values = (operate(part_of(EPILOGUE, 2), acc, acc, ISA),)
        for i in tl.static_range(len(operands)):
            values = values + (operands[i][side],)
        values = compute(values, EPILOGUE, ISA)
        return values[len(values) - 1]


@triton.jit
def _store_results(
    c, token, kept, row, first, col, end, n, k_vectors, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr,
    epilogue_1_ptr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Rescale a lane's sums c, take them through the epilogue, and store them. Where not `kept`, the sums count as 0.

    row, col: the first row and column of the lane; the columns of each next part are 16 on. first: the first row to
    store, less than 8 rows after the tile's first one, or before it. end: the row after the last one. Of a part's sums
    i and i + 2 of four are neighbours in a row, and make a word of `device.lane_rows`.
    """
    count: tl.constexpr = ROWS // 4  # words of a part
    together: tl.constexpr = _words_together(ROWS, WHOLE, EPILOGUE)
    pieces: tl.constexpr = (count + together - 1) // together  # of a part
    size: tl.constexpr = bytes_of(out_ptr)
    factor = factor_of_rows(row, end, 0, a_outer_ptr, b_outer_ptr, "none" if A_OUTER == "row" else A_OUTER, B_OUTER)
    # The compiler moves no load across a store. So the operands of some words are loaded before the words before them
    # are stored, but not all operands before all stores: they would take too many registers.
    words = ()
    for i in tl.static_range(PARTS * pieces + 1):
        previous = words
        words = ()
        if i < PARTS * pieces:
            a_outer, operands, token = _load_operands(
                row + i % pieces * together // 2 * 8, col + i // pieces * 16, end, n, token, a_outer_ptr,
                epilogue_0_ptr, epilogue_1_ptr, A_OUTER, EPILOGUE, min(together, count - i % pieces * together), WHOLE,
            )  # fmt: skip
            b_outer = _two_columns(b_outer_ptr, col + i // pieces * 16, n, B_OUTER == "row")
            bias = _two_columns(bias_ptr, col + i // pieces * 16, n, BIAS)
            for j in tl.static_range(min(together, count - i % pieces * together)):
                of_word = _operands_of_word(operands, j, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE)
                results = ()
                for side in tl.static_range(2):
                    acc = c[2 * (i // pieces * count + i % pieces * together + j // 2 * 2) + j % 2 + 2 * side]
                    acc = acc * sums_factor(COMPUTE, B_SCALES)
                    acc = rescale_values(acc, _of_row(factor, a_outer, j, A_OUTER, B_OUTER), b_outer[side], bias[side],
                                         A_OUTER, B_OUTER, BIAS)  # fmt: skip
                    results = results + (_through_epilogue(tl.where(kept, acc, 0.0), of_word, side, EPILOGUE, ISA),)
                words = words + (pack(results[0], results[1], out_ptr.dtype.element_ty, ISA),)
        if i > 0:
            at_row = row + (i - 1) % pieces * together // 2 * 8
            at_col = col + (i - 1) // pieces * 16
            token = store_rows(
                out_ptr + at_row.to(tl.int64) * n + at_col, previous, tl.cast(n, tl.int64) * size, first - at_row,
                end - at_row, n - at_col, token, 2 * size, WHOLE,
            )  # fmt: skip
    keep(token, out_ptr, k_vectors)


@triton.jit
def _tile_of(program, tiles_m, tiles, GROUP_M: tl.constexpr):
    """(Tile of A, tile of B) of a program: GROUP_M tiles of A with all tiles of B, then the next GROUP_M."""
    tiles_n = tiles // tiles_m
    group = program // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = program % (GROUP_M * tiles_n)
    return group * GROUP_M + place % in_group, place // in_group


@triton.jit
def _tile_of_group(
    offs, m, program, tiles_n, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """(group, its first row, its end, first row of A, tile of B) of a program. offs: see `device.groups`.

    All tiles of a group come before the next group's tiles, in the order of `_tile_of`. The first one begins at a
    multiple of 8 rows. Group GROUPS has the rows of no group. A program past the last tile gets a first row that is not
    before the group's end.
    """
    group, start, end, first = group_of_tile(offs, m, program // tiles_n, ROWS, GROUPS, 8)
    aligned = start // 8 * 8
    tiles_m = tl.maximum(tl.cdiv(end - aligned, ROWS), 1)
    place = (first - aligned) // ROWS * tiles_n + program % tiles_n
    tile_m, tile_n = _tile_of(place, tiles_m, tiles_m * tiles_n, GROUP_M)
    return group, start, end, tl.where(first < end, aligned + tile_m * ROWS, first), tile_n


@triton.jit
def _multiply_tile(
    swizzled_a_ptr, lines, token, lane, kept, place, steps, sources, memory, n, k_vectors, pointers,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr,
    EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr, BUFFERS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of ROWS rows of a, and store the result. The first steps of B are in flight.

    swizzled_a: the tile's first line. kept: see `_store_results`. place: the tile's first row, the first row of its
    group and the row after the group's last; the number of the tile of B, and a warp's first row of b. steps: the first
    one, and the stages of A that they are. sources: see `_copy_b_step`. memory: see `gemm_wgmma_sm90`. pointers: the
    kernel's pointers but A and B, in order.
    """
    first_m, first_of_group, end, tile_n, row = place
    step, stages = steps
    a_buffers, first_buffer, barriers = memory
    a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr = pointers
    a_stage_bytes: tl.constexpr = STEPS_PER_STAGE * ROWS * 256
    b_step_bytes: tl.constexpr = PARTS * STEP_BYTES
    # As many words as registers allow; tiles of groups have several programs on a multiprocessor.
    together: tl.constexpr = 4 if ROWS == 16 and STEPS_PER_STAGE > 1 and not GROUPED else 2
    matrix_bytes = tl.cast(lines, tl.int64) * 128
    source = swizzled_a_ptr.to(tl.pointer_type(tl.int8), bitcast=True)
    for early in tl.static_range(_A_AHEAD):
        token = _copy_a_stage(source, matrix_bytes, early < stages, early, 0, a_buffers, barriers, token, lane, ROWS,
                              STEPS_PER_STAGE)  # fmt: skip
        source += matrix_bytes * (2 * STEPS_PER_STAGE)
    token = prefetch_operands(token, lane, first_m, tile_n * (16 * PARTS * WARPS), end, n, epilogue_0_ptr,
                              epilogue_1_ptr, EPILOGUE, ROWS, 16 * PARTS * WARPS, 32 * WARPS)  # fmt: skip
    count: tl.constexpr = ROWS // 2
    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = ()
    for _ in tl.static_range(PARTS * count):
        c = c + (zero,)
    buffer = first_buffer
    a_buffer, parity, previous, ahead, ahead_parity = 0, 0, 0, _A_AHEAD.value, 0
    for stage in tl.range(0, stages):
        token = do_ptx(_WAIT_FULL, "r,r,r", (barriers + a_buffer * 16, parity, token))
        for i in tl.static_range(STEPS_PER_STAGE):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            w = ()
            for part in tl.static_range(PARTS):
                of_part, token = read_weights(buffer, part, token, lane, k_vectors, B_SCALES, EVEN, True)
                w = w + of_part
            # Every lane has read its operands, so the buffer can be filled again.
            token = do_ptx(WARP_BARRIER, "r", (token,))
            token = _copy_b_step(buffer, step + STAGES, sources, token, lane, k_vectors, B_SCALES, PARTS, EVEN)
            a_at = a_buffers + (a_buffer * a_stage_bytes + i * (ROWS * 256))
            sums = ()
            for part in tl.static_range(PARTS):
                added, token = _multiply(w[6 * part : 6 * part + 6], c[part * count : part * count + count], a_at,
                                         token, COMPUTE, B_SCALES, ROWS, together)  # fmt: skip
                sums = sums + added
            c = sums
            if i == 0:  # `_multiply` has waited for all earlier matrix instructions, which read the previous stage
                token = _release_a_stage(previous, stage > 0, barriers, token, lane)
                token = _copy_a_stage(source, matrix_bytes, stage + _A_AHEAD < stages, ahead, ahead_parity, a_buffers,
                                      barriers, token, lane, ROWS, STEPS_PER_STAGE)  # fmt: skip
            if STEPS_PER_STAGE % STAGES == 0:  # then each copy of the loop's body has its own buffer
                buffer = first_buffer + (i + 1) % STAGES * b_step_bytes
            else:
                buffer = tl.where(buffer == first_buffer + (STAGES - 1) * b_step_bytes, first_buffer,
                                  buffer + b_step_bytes)  # fmt: skip
            step += 1
        previous = a_buffer
        a_buffer, parity = _next_buffer(a_buffer, parity, BUFFERS)
        ahead, ahead_parity = _next_buffer(ahead, ahead_parity, BUFFERS)
        source += matrix_bytes * (2 * STEPS_PER_STAGE)
    c = _wait_wgmma(c, PARTS * count)

    _store_results(c, token, kept, first_m + lane % 4 * 2, first_of_group, row + lane % 32 // 4 * 2, end, n, k_vectors,
                   a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr, A_OUTER, B_OUTER,
                   B_SCALES, BIAS, EPILOGUE, COMPUTE, PARTS, ROWS, EVEN, ISA)  # fmt: skip


@writes("out_ptr")
@triton.jit
def gemm_wgmma_sm90(
    swizzled_a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr,
    offs_ptr, m, lines, n, k_vectors, splits, b_scales_each,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr, BUFFERS: tl.constexpr,
    GROUP_M: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr, ISA: tl.constexpr,
    SHARED: tl.constexpr, GROUPS: tl.constexpr, NARROW: tl.constexpr, NARROWEST: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias, through the epilogue; or (PARTIAL) partial sums.

    swizzled_a: [matrices, lines, 64] from `swizzle_a_sm90`, in whole stages. b: K / 2 bytes of codes a row. k_vectors:
    K / 32, even.
    splits: the number of parts of K (split-K). PARTIAL: out is [splits, m, n], the raw float32 sums of each part;
    the kernel that adds them may start early. PDL: this kernel itself starts early (see `device.dependent_launch`).
    WARPS: of a program, a multiple of 4; the launch must have as many. Each has PARTS times 16 rows of b. ROWS: rows of
    a of a program, a key of `_MULTIPLY_WGMMA`. STAGES: steps of B of a warp that are in flight. STEPS_PER_STAGE:
    steps of a stage of A. BUFFERS: stages of A in shared memory, at least three. With more than three, a copy goes to
    the buffer of the stage two before the one that is multiplied, which other warps have most likely released.
    GROUP_M: tiles of A that are scheduled together, for the L2 cache. EVEN: no program has a row of b, and no stage of
    A a step, past the end. SHARED: bytes of shared memory to reserve (`reserved`), at least for `needed_bytes`.
    GROUPS: 0, or the number of groups of rows of a, which end at offs, int32. Then b is [GROUPS, n, K]: each group has
    a matrix of its own, with b_scales_each bytes of scales. There is no split-K, no bias and no epilogue. A global
    scale may be the group's. Rows of no group become zeros.
    NARROW, NARROWEST: 0, or the rows of a tile whose group ends within so many, which takes less time; they descend
    from ROWS.
    """
    reserve(swizzled_a_ptr, out_ptr, k_vectors, SHARED)
    if PARTIAL:
        swizzled_a_ptr = launch_dependents(swizzled_a_ptr)
    lane = tl.arange(0, 32 * WARPS)
    split = tl.program_id(0) % splits
    all_stages = tl.cdiv(k_vectors, 4 * STEPS_PER_STAGE)
    group = 0
    first_of_group = 0
    end = m  # the row of a after the last one of the result, or of the group
    if GROUPS == 0:
        tile_m, tile_n = _tile_of(tl.program_id(0) // splits, tl.cdiv(m, ROWS), tl.num_programs(0) // splits, GROUP_M)
        first_m = tile_m * ROWS
    else:
        offs = ()
        for i in tl.static_range(2 * per_lane(GROUPS)):
            number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
            offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
        group, first_of_group, end, first_m, tile_n = _tile_of_group(
            offs, m, tl.program_id(0), tl.cdiv(n, 16 * PARTS * WARPS), ROWS, GROUPS, GROUP_M
        )  # fmt: skip
        if first_m >= end:  # there are fewer tiles than programs
            return
        all_stages = tl.where(group < GROUPS, all_stages, 0)  # rows of no group are not multiplied
        matrix = tl.minimum(group, GROUPS - 1).to(tl.int64)
        b_ptr += matrix * n * k_vectors * 16
        b_scales_ptr += matrix * b_scales_each
        a_outer_ptr += matrix if A_OUTER == "group" else 0
        b_outer_ptr += matrix if B_OUTER == "group" else matrix * n if B_OUTER == "row" else 0
    row = (tile_n * WARPS + lane // 32) * (16 * PARTS)
    start = split * tl.cdiv(all_stages, splits)
    stages = tl.minimum(tl.cdiv(all_stages, splits), all_stages - start)  # of A, of this program
    step = start * STEPS_PER_STAGE
    stop = (start + stages) * STEPS_PER_STAGE

    a_stage_bytes: tl.constexpr = STEPS_PER_STAGE * ROWS * 256
    b_step_bytes: tl.constexpr = PARTS * STEP_BYTES
    a_buffers = do_ptx(MEMORY, "r", (lane,))
    b_buffers = a_buffers + BUFFERS * a_stage_bytes
    first_buffer = b_buffers + lane // 32 * (STAGES * b_step_bytes)  # of the warp
    barriers = b_buffers + WARPS * STAGES * b_step_bytes
    token = do_ptx(_barriers_ptx(WARPS, BUFFERS), "r,r,r", (barriers, (lane == 0).to(tl.int32), lane))
    sources = ()
    for part in tl.static_range(PARTS):
        of_part = weight_sources(lane, row + part * 16, 0, stop, b_ptr, b_scales_ptr, n, k_vectors, B_SCALES, EVEN,
                                 True)  # fmt: skip
        sources = sources + (of_part,)
    for early in tl.static_range(STAGES):
        token = _copy_b_step(first_buffer + early * b_step_bytes, step + early, sources, token, lane, k_vectors,
                             B_SCALES, PARTS, EVEN)  # fmt: skip
    token = do_ptx(BARRIER, "r", (token,))
    if PDL:  # up to here only B is read, and nothing is written
        swizzled_a_ptr = wait(swizzled_a_ptr)
        a_outer_ptr = wait(a_outer_ptr)
        b_outer_ptr = wait(b_outer_ptr)
        bias_ptr = wait(bias_ptr)
        out_ptr = wait(out_ptr)
        epilogue_0_ptr = wait(epilogue_0_ptr)
        epilogue_1_ptr = wait(epilogue_1_ptr)
    if rescale_mode(B_OUTER) == "tensor" and not PARTIAL:
        token = do_ptx(AWAIT_VALUE, "f,r", (tl.load(b_outer_ptr), token))  # brings it to the cache for the end
    swizzled_a_ptr += (tl.cast(start * (2 * STEPS_PER_STAGE), tl.int64) * lines + first_m) * 64
    out_ptr += split.to(tl.int64) * m * n
    kept = True if GROUPS == 0 else group < GROUPS
    a_outer: tl.constexpr = "none" if PARTIAL else rescale_mode(A_OUTER)
    b_outer: tl.constexpr = "none" if PARTIAL else rescale_mode(B_OUTER)
    bias: tl.constexpr = 0 if PARTIAL else BIAS
    operations: tl.constexpr = "" if PARTIAL else EPILOGUE
    place = (first_m, first_of_group, end, tile_n, row)
    steps = (step, stages)
    memory = (a_buffers, first_buffer, barriers)
    pointers = (a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr)
    if NARROWEST > 0:  # noqa: SIM102, in one condition Triton would compile a tile of 0 rows
        if end - first_m <= NARROWEST:
            _multiply_tile(
                swizzled_a_ptr, lines, token, lane, kept, place, steps, sources, memory, n, k_vectors, pointers,
                a_outer, b_outer, B_SCALES, bias, operations, COMPUTE, WARPS, PARTS, STAGES, NARROWEST,
                STEPS_PER_STAGE, BUFFERS, EVEN, ISA, GROUPS > 0,
            )  # fmt: skip
            return
    if NARROW > 0:  # noqa: SIM102
        if end - first_m <= NARROW:
            _multiply_tile(
                swizzled_a_ptr, lines, token, lane, kept, place, steps, sources, memory, n, k_vectors, pointers,
                a_outer, b_outer, B_SCALES, bias, operations, COMPUTE, WARPS, PARTS, STAGES, NARROW,
                STEPS_PER_STAGE, BUFFERS, EVEN, ISA, GROUPS > 0,
            )  # fmt: skip
            return
    _multiply_tile(
        swizzled_a_ptr, lines, token, lane, kept, place, steps, sources, memory, n, k_vectors, pointers,
        a_outer, b_outer, B_SCALES, bias, operations, COMPUTE, WARPS, PARTS, STAGES, ROWS,
        STEPS_PER_STAGE, BUFFERS, EVEN, ISA, GROUPS > 0,
    )  # fmt: skip


def _serves(p: Problem) -> bool:
    """Whether the kernel serves the problem; ends of groups must fit in registers (`dequant_operand.MOST_GROUPS`)."""
    return 90 <= p.target.sm < 100 and streams(p) and (not p.ragged or p.groups <= MOST_GROUPS)


def _run(call: Call, config: WgmmaConfig) -> torch.Tensor:
    p, split_k, groups = call.problem, config.split_k, call.problem.groups if call.problem.ragged else 0
    arrangement = SwizzledA.of(p, config)
    a = arrangement.of_call(call)
    out = call.empty() if split_k == 1 else call.empty_sums(split_k)
    first = call if split_k == 1 else call.without_epilogue()
    a_outer, b_outer, bias = call.rescale_pointers(out)
    even = statically_true(p.n % (16 * config.parts * config.warps) == 0 and p.k % (128 * config.steps_per_stage) == 0)
    launch(
        gemm_wgmma_sm90, config.grid(p.m, p.n, groups),
        a, a_outer, call.b.data, call.b.scales, b_outer, bias, out, *first.epilogue_pointers(out),
        out if call.offs is None else call.offs,
        p.m, arrangement.rows, p.n, p.k // 32, split_k, call.b.scale_count if groups else 0,
        A_OUTER=p.a.outer, B_OUTER=p.b.outer,
        BIAS=int(call.bias is not None), EPILOGUE=first.epilogue_text, PARTIAL=int(split_k > 1),
        B_SCALES=p.b.scales_text, COMPUTE=p.compute, EVEN=int(even),
        PDL=p.target.dependent_launch, ISA=p.target.isa, GROUPS=groups, num_warps=config.warps, **config.constants,
    )  # fmt: skip
    return out if split_k == 1 else reduce_split_k(call, out, split_k, pdl=True)


CANDIDATE = Candidate(
    "wgmma_sm90", "emulated", _serves, lambda p: wgmma_config(p, needed_bytes), _run,
    takes_epilogue=lambda p: not p.ragged, dequantizes_a=True, arrangement=SwizzledA.of,
)  # fmt: skip
