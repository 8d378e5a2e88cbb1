"""GEMM of nine and more rows of 16-bit A times NVFP4 weights B, on the warpgroup matrix units (`wgmma`) of SM90.

B arrives as in `gemm_skinny`: each warp copies the codes and scales of its own 16 or 32 rows, 128 elements along K a
step, into STAGES buffers in shared memory, and dequantises them in registers. B is the first operand of `wgmma`, the
one that may lie in registers, and the kernel computes the transposed product.

A program has a tile of up to 256 rows of A. A would be read from the cache too often if each warp had a copy of its
own. So the warps of a program share A, the second operand of `wgmma`, which it reads from shared memory, in matrices
[ROWS, 64]: 64 elements along K of all rows of the tile, a line of 128 bytes each, in their natural order. In line r
16-byte unit u lies at u ^ (r % 8): the 128-byte swizzle. A has a pipeline of its own: one stage is STEPS_PER_STAGE
steps, 2 * STEPS_PER_STAGE matrices. Each warp copies a share of every stage, two stages ahead. Warps wait for each
other where they need a stage, which all of them have copied. A warp that arrives there has multiplied the stage that is
two before. So with four buffers each warp then starts to copy to that stage's buffer. Three buffers, where shared
memory has no room for four, hold one stage less: a copy starts after the first product of the stage, as soon as all
warps have released the stage before. While the matrix units multiply some of a step's elements of B, the warps
dequantise the next elements.

A warp's copies of A and of B are groups that complete in one order. In each step a warp commits its copies of the step
of B that is STAGES ahead, and then, in the first step of a stage, its copies of A's stage that is two ahead. What a
step waits for follows from that order (`under_way`). With stages of one step, the wait for A covers every step of B
that was started before A's stage: then more than two STAGES start copies earlier, but allow them no more time.

With many rows of A the matrix units are the bound. A multiprocessor multiplies 64 rows of B, 256 rows of A and 16
elements of K in 128 clocks, and two warpgroups take turns: each has 256 clocks in which to dequantise the next 16
elements of its 64 rows. Each of its four warps, on four schedulers, needs about 44 instructions for that, of which five
copy A. With few rows the weights' way from memory is the bound, but the schedulers are nearly as busy.

The gradient of a layer's input contracts the rows of the weights (B_TRANSPOSED): the same product, with columns of B in
the place of rows. The warps copy the same bytes, 16 rows each, and a step of eight warps is 128 rows of B. But a warp
multiplies 16 columns of all these rows, which it reads from the buffers of all warps (`device.nvfp4_columns`). So the
barrier of a stage of A is the barrier of the step of B as well: behind it all copies have arrived, and all warps have
read the step before.

The kernel is written one lane at a time, in inline PTX ordered by tokens: see `async_copy`. It needs more shared memory
than inline PTX may declare, and has Triton reserve it: see `shared_memory`.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.async_copy import (
    AWAIT_VALUE,
    BARRIER,
    WARP_BARRIER,
    do_ptx,
    select_ptx,
    wait_ptx,
)
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.elements import pack
from fp4compile.templates.device.epilogue import epilogue, rescale, rescale_mode, store_rounded
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane
from fp4compile.templates.device.nvfp4_columns import column_of, dequantize_columns, read_transposed_weights
from fp4compile.templates.device.nvfp4_weights import (
    STEP_BYTES,
    dequantize_word,
    interleave_rows,
    read_natural_weights,
    scale_pair,
)
from fp4compile.templates.device.shared_memory import MEMORY, reserve
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequant_tiles import reduce_split_k
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.heuristics import (
    LIBRARY_ROWS,
    WGMMA_ROWS,
    WgmmaConfig,
    wgmma_config,
    wgmma_transposed_config,
)
from fp4compile.templates.gemm.streaming import streams
from fp4compile.templates.gemm.wgmma_pipeline import (
    A_AHEAD,
    WAIT_FULL,
    arrive_full_ptx,
    barriers_ptx,
    buffer_of,
    copy_a_stage,
    copy_b_step,
    release_a_stage,
    sources_of_a,
    under_way,
)
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem

_KIND = {"fp16": "f16x2", "bf16": "bf16x2"}
_TOGETHER = tl.constexpr(16)  # sums of a lane that are stored together

# The `wgmma` descriptor of a matrix in shared memory, without its address, which the lowest bits take: lines of 128
# bytes with the 128-byte swizzle (16-byte units exchanged by the line's number), groups of eight lines 1024 bytes on.
_DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


def _words_ptx(compute: str, words: range) -> list[str]:
    """PTX that dequantises words of codes to r{block}_0 to 3 of the two blocks of 16 elements of each word.

    Registers 0 and 2 are of the upper row, 1 and 3 of the lower row, as `wgmma` takes them.
    """
    kind, quad = _KIND[compute], "0x1C1F, 0xFFFFFFFF"
    text = []
    for word in words:
        text.append(interleave_rows(f"w{word}", f"w{4 + word}", "c0", "c1"))
        text += [f"shfl.sync.idx.b32 {x}, {of_lane}, {word}, {quad};" for x, of_lane in (("s", "sq"), ("t", "tq"))]
        text.append("mov.b32 {s0, s1}, s; mov.b32 {t0, t1}, t;")
        for half in range(2):
            r = f"r{2 * word + half}_"
            text += [f".reg .b32 {r}<4>;", dequantize_word(kind, f"c{half}", r)]
            text += [f"mov.b32 {x}, {{{x}{half}, {x}{half}}};" for x in "st"]
            for j in range(4):
                product = f"{r}{j}, {r}{j}, {'st'[j % 2]}"
                text.append(f"mul.rn.f16x2 {product};" if kind == "f16x2" else f"fma.rn.bf16x2 {product}, z;")
    return text


def _multiply_ptx(compute: str, rows: int, group: int, transposed: bool) -> str:
    """PTX that adds the product of 64 rows of B (of a warpgroup) and `rows` rows of A over 128 elements to the sums.

    Outputs: a lane's sums; a token. Inputs: the outputs of `read_natural_weights`, or (transposed: of columns of B) of
    `read_transposed_weights`; the low half of A's descriptor; a token; the sums so far.
    group: words of codes that one group of `wgmma` multiplies, 2 or 4. The last group still runs at the end of this
    text, and its registers must not be written meanwhile. With four words it uses all registers, so the next step must
    be another copy of this text, to which ptxas gives other registers.
    """
    kind, sums = _KIND[compute], rows // 2
    text = ["{ .reg .b32 u, v, z, s, t, sq, tq, at, hi, c<2>, w<8>, x<4>; .reg .b16 h, k, s<2>, t<2>; .reg .f32 f, g;"]
    text.append(f".reg .b64 d; .reg .pred p; mov.b32 z, 0x80008000; mov.b32 hi, {_DESCRIPTOR >> 32};")
    text.append(f"mov.b32 ${sums}, 0; setp.eq.b32 p, 0, 0;")
    text += [f"mov.b32 w{i}, ${sums + 1 + i};" for i in range(8)]
    scales = [f"x{i}" for i in range(4)] if transposed else ["sq", "tq"]
    text += [f"mov.b32 {x}, ${sums + 9 + i};" for i, x in enumerate(scales)]
    if not transposed:
        text += [scale_pair(kind, "sq"), scale_pair(kind, "tq")]
    held = "{" + ", ".join(f"${i}" for i in range(sums)) + "}"
    for first in range(0, 4, group):
        words = range(first, first + group)
        text += [dequantize_columns(kind, pair) for pair in words] if transposed else _words_ptx(compute, words)
        text.append("wgmma.fence.sync.aligned;")
        for block in range(2 * first, 2 * (first + group)):
            # One `wgmma` takes 16 elements of a line. A line (128 bytes) has 64; the next 64 are in the next matrix.
            offset = block // 4 * (rows * 128 // 16) + block % 4 * (32 // 16)
            registers = ", ".join(f"r{block}_{j}" for j in range(4))
            text.append(
                f"add.u32 at, ${sums + 9 + len(scales)}, {offset}; mov.b64 d, {{at, hi}};"
                f" wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.{kind[:-2]}.{kind[:-2]} {held}, {{{registers}}}, d,"
                " p, 1, 1, 0;"
            )
        text.append("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 1;")
    return " ".join(text) + " }"


_MULTIPLY_WGMMA = tl.constexpr({
    (compute, rows, group, transposed): _multiply_ptx(compute, rows, group, transposed)
    for compute in _KIND for rows in (16, 32, 64, 72, 80, 96, 128, 160, 192, 224, 256)
    for group, transposed in ((2, False), (4, False), (2, True))
})  # fmt: skip


@triton.constexpr_function
def _multiply_operands(sums, words):
    return ",".join(["=f"] * sums + ["=&r"] + ["r"] * (words + 2) + [str(i) for i in range(sums)])


@triton.constexpr_function
def _wait_wgmma_operands(sums):
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)])


def needed_bytes(rows: int, warps: int, parts: int, stages: int, steps: int, buffers: int) -> int:
    """Shared memory of a program: buffers of A (each a multiple of 1024 bytes), buffers of B, and barriers of A."""
    return buffers * (steps * rows * 256 + 16) + warps * parts * stages * STEP_BYTES.value


@triton.jit
def _multiply(
    w, c, a_at, token, COMPUTE: tl.constexpr, ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """(A lane's sums c plus the products of a step, token). w: see `_multiply_ptx`. a_at: A in shared."""
    group: tl.constexpr = 4 if ROWS == 16 and STEPS_PER_STAGE > 1 else 2  # as many as registers allow
    text: tl.constexpr = select_ptx(_MULTIPLY_WGMMA, COMPUTE, ROWS, group, TRANSPOSED)
    found = tl.inline_asm_elementwise(
        text, _multiply_operands(ROWS // 2, len(w)), w + ((a_at & 0x3FFFF) >> 4 | 1 << 16, token) + c,
        dtype=(tl.float32,) * (ROWS // 2) + (tl.int32,), is_pure=True, pack=1,
    )  # fmt: skip
    return found[: ROWS // 2], found[ROWS // 2]


@triton.jit
def _wait_wgmma(c, COUNT: tl.constexpr):
    """The sums, once all products have been added."""
    return tl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _wait_wgmma_operands(COUNT), c, dtype=(tl.float32,) * COUNT, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _result_of(lane, i: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr, B_TRANSPOSED: tl.constexpr):
    """(Row, column) that a lane's i-th sum belongs to, counted from the first row of A and of B of its warp.

    COUNT: sums of a part. Sums i and i + 2 of four are neighbours in a row of out. B_TRANSPOSED: columns are counted
    from the program's first column.
    """
    row = lane % 4 * 2 + i % COUNT // 4 * 8 + i % 2
    if B_TRANSPOSED:
        column = column_of(lane, i, COUNT, PARTS)
    else:
        column = i // COUNT * 16 + lane % 32 // 4 * 2 + i % 4 // 2
    return row, column


@triton.jit
def _tile_of(program, tiles_m, tiles, GROUP_M: tl.constexpr):
    """(Tile of A, tile of B) of a program: GROUP_M tiles of A with all tiles of B, then the next ones."""
    tiles_n = tiles // tiles_m
    group = program // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    place = program % (GROUP_M * tiles_n)
    return group * GROUP_M + place % in_group, place // in_group


@triton.jit
def _tile_of_group(
    before, offs, m, program, tiles_n, ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """(group, the row after its last, first row of A, tile of B) of a program. before, offs: see `device.groups`.

    All tiles of a group come before those of the next one, in the order of `_tile_of`. Group GROUPS has the rows of no
    group. A program past the last tile gets a first row that is not before the group's end.
    """
    group, start, end, first = group_of_tile(before, offs, m, program // tiles_n, ROWS, GROUPS)
    tiles_m = tl.cdiv(end - start, ROWS)
    place = (first - start) // ROWS * tiles_n + program % tiles_n
    tile_m, tile_n = _tile_of(place, tl.maximum(tiles_m, 1), tl.maximum(tiles_m, 1) * tiles_n, GROUP_M)
    return group, end, tl.where(first < end, start + tile_m * ROWS, first), tile_n


@triton.jit
def gemm_wgmma_sm90(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr, offs_ptr,
    m, n, k_vectors, splits, b_scales_each,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, STEPS_PER_STAGE: tl.constexpr, BUFFERS: tl.constexpr,
    GROUP_M: tl.constexpr, PARTIAL: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, SHARED: tl.constexpr,
    GROUPS: tl.constexpr, B_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias, through the epilogue; or (PARTIAL) partial sums.

    a: bf16 or fp16. b: K / 2 bytes of codes a row. k_vectors: K / 32, even.
    splits: into how many parts K is cut (split-K). PARTIAL: out is [splits, m, n], the raw float32 sums of each part;
    the kernel that adds them may start early (see `device.dependent_launch`).
    WARPS: of a program, a multiple of 4; the launch must have as many. Each has PARTS times 16 rows of b. ROWS: rows of
    a of a program, a key of `_MULTIPLY_WGMMA`. STAGES: steps of B of a warp that are on their way. STEPS_PER_STAGE:
    steps of a stage of A. BUFFERS: stages of A in shared memory, at least three; see above.
    GROUP_M: tiles of A that are walked together, for the L2 cache. EVEN: no program has a row of b, and no stage of A a
    step, past the end. SHARED: bytes of shared memory to reserve (`reserved`), at least for `needed_bytes`.
    GROUPS: 0, or the number of groups of rows of a, which end at offs, int32. Then b is [GROUPS, n, K]: each group has
    a matrix of its own, with b_scales_each bytes of scales. There is no split-K, no bias and no epilogue. An outer
    scale may be the group's. Rows of no group become zeros.
    B_TRANSPOSED: b is [K, n] in memory, n / 2 bytes of codes a row; out = a x b. n: a multiple of 64. WARPS: eight.
    STEPS_PER_STAGE: one. STAGES: buffers of B of a warp, of which one is read while the others are filled.
    """
    reserve(a_ptr, out_ptr, k_vectors, SHARED)
    if PARTIAL:
        a_ptr = launch_dependents(a_ptr)
    lane = tl.arange(0, 32 * WARPS)
    split = tl.program_id(0) % splits
    all_stages = tl.cdiv(k_vectors, 4 * STEPS_PER_STAGE)
    group = 0
    end = m  # the row of a after the last one of the product, or of the group
    if GROUPS == 0:
        tile_m, tile_n = _tile_of(tl.program_id(0) // splits, tl.cdiv(m, ROWS), tl.num_programs(0) // splits, GROUP_M)
        first_m = tile_m * ROWS
    else:
        offs_before = ()
        offs = ()
        for i in tl.static_range(per_lane(GROUPS)):
            number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
            offs_before = offs_before + (tl.load(offs_ptr + number, mask=exists, other=0),)
            number, exists = of_lanes(i, GROUPS)
            offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
        group, end, first_m, tile_n = _tile_of_group(
            offs_before, offs, m, tl.program_id(0), tl.cdiv(n, 16 * PARTS * WARPS), ROWS, GROUPS, GROUP_M
        )  # fmt: skip
        if first_m >= end:  # there are fewer tiles than programs
            return
        all_stages = tl.where(group < GROUPS, all_stages, 0)
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
    if B_TRANSPOSED:
        row = tile_n * (WARPS * 16 * PARTS)  # the first column of the program
    # A warp that contracts rows of B reads from the buffers of all warps, which have those of a step side by side.
    b_apart: tl.constexpr = (WARPS if B_TRANSPOSED else 1) * b_step_bytes  # from a warp's buffer to its next one
    b_ahead: tl.constexpr = STAGES - 1 if B_TRANSPOSED else STAGES
    first_buffer = b_buffers + lane // 32 * (b_step_bytes if B_TRANSPOSED else STAGES * b_step_bytes)  # of the warp
    barriers = b_buffers + WARPS * STAGES * b_step_bytes
    token = do_ptx(barriers_ptx(WARPS, BUFFERS), "r,r,r", (barriers, (lane == 0).to(tl.int32), lane))
    token = do_ptx(BARRIER, "r", (token,))
    a_ptr += (first_m.to(tl.int64) * k_vectors + start * (4 * STEPS_PER_STAGE)) * 32
    matrices = k_vectors // 2 - start * (2 * STEPS_PER_STAGE)
    sources = sources_of_a(lane // 8, lane % 8, end - 1 - first_m, k_vectors * 4, ROWS, WARPS)
    ahead: tl.constexpr = max(b_ahead, A_AHEAD * STEPS_PER_STAGE)
    for early in tl.static_range(-ahead, 0):  # as in the loop over the steps
        if early + b_ahead >= 0:
            token = copy_b_step(first_buffer + (early + b_ahead) * b_apart, step + (early + b_ahead), stop, token,
                                 lane, row, b_ptr, b_scales_ptr, n, k_vectors, B_SQUARE, B_SWIZZLED, PARTS,
                                 EVEN, B_TRANSPOSED)  # fmt: skip
        if early % STEPS_PER_STAGE == 0 and early + A_AHEAD * STEPS_PER_STAGE >= 0:
            token = copy_a_stage(a_ptr, sources, early // STEPS_PER_STAGE + A_AHEAD, stages, matrices, a_buffers,
                                  barriers, token, lane, ROWS, WARPS, STEPS_PER_STAGE, BUFFERS, EVEN)  # fmt: skip
    if rescale_mode(B_OUTER) == "tensor" and not PARTIAL:
        token = do_ptx(AWAIT_VALUE, "f,r", (tl.load(b_outer_ptr), token))  # brings it to the cache for the end

    count: tl.constexpr = ROWS // 2
    zero = tl.zeros((32 * WARPS,), tl.float32)
    c = ()
    for _ in tl.static_range(PARTS * count):
        c = c + (zero,)
    buffer = first_buffer
    for stage in tl.range(0, stages):
        a_buffer, parity = buffer_of(stage, BUFFERS)
        for i in tl.static_range(STEPS_PER_STAGE):
            if i == 0:
                arrives = (barriers + a_buffer * 16, (lane % 32 == 0).to(tl.int32), token)
                token = do_ptx(arrive_full_ptx(under_way(b_ahead, STEPS_PER_STAGE, i)), "r,r,r", arrives)
            else:
                token = do_ptx(wait_ptx(under_way(b_ahead, STEPS_PER_STAGE, i)), "r", (token,))
            a_at = a_buffers + (a_buffer * a_stage_bytes + i * (ROWS * 256))
            if B_TRANSPOSED:  # all warps have copied this step, and have read the one before, whose buffer is free
                token = do_ptx(WAIT_FULL, "r,r,r", (barriers + a_buffer * 16, parity, token))
                before = tl.where(buffer == first_buffer, buffer + b_ahead * b_apart, buffer - b_apart)
                token = copy_b_step(before, step + b_ahead, stop, token, lane, row, b_ptr, b_scales_ptr, n, k_vectors,
                                    B_SQUARE, B_SWIZZLED, PARTS, EVEN, True)  # fmt: skip
            sums = ()
            for part in tl.static_range(PARTS):
                if B_TRANSPOSED:
                    w, token = read_transposed_weights(buffer, part, token, lane, PARTS)
                else:
                    w, token = read_natural_weights(buffer, part, token, lane)
                # Every lane has read its operands, so the buffer can be filled again.
                if part == PARTS - 1 and not B_TRANSPOSED:
                    token = do_ptx(WARP_BARRIER, "r", (token,))
                    token = copy_b_step(buffer, step + STAGES, stop, token, lane, row, b_ptr, b_scales_ptr, n,
                                        k_vectors, B_SQUARE, B_SWIZZLED, PARTS, EVEN)  # fmt: skip
                if i == 0 and part == 0 and not B_TRANSPOSED:
                    token = do_ptx(WAIT_FULL, "r,r,r", (barriers + a_buffer * 16, parity, token))
                if i == 0 and part == PARTS - 1 and BUFFERS >= A_AHEAD + 2:  # the stage two before is multiplied
                    token = copy_a_stage(a_ptr, sources, stage + A_AHEAD, stages, matrices, a_buffers, barriers,
                                         token, lane, ROWS, WARPS, STEPS_PER_STAGE, BUFFERS, EVEN)  # fmt: skip
                added, token = _multiply(w, c[part * count : part * count + count], a_at, token, COMPUTE, ROWS,
                                         STEPS_PER_STAGE, B_TRANSPOSED)  # fmt: skip
                sums = sums + added
            c = sums
            if i == 0 and BUFFERS < A_AHEAD + 2:  # `_multiply` has waited for products that read the stage before
                token = release_a_stage(stage - 1, barriers, token, lane, BUFFERS)
                token = copy_a_stage(a_ptr, sources, stage + A_AHEAD, stages, matrices, a_buffers, barriers, token,
                                      lane, ROWS, WARPS, STEPS_PER_STAGE, BUFFERS, EVEN)  # fmt: skip
            buffer = tl.where(buffer == first_buffer + (STAGES - 1) * b_apart, first_buffer, buffer + b_apart)
            step += 1
    c = _wait_wgmma(c, PARTS * count)

    first = first_m.to(tl.int64) * n + row
    out_ptr += split.to(tl.int64) * m * n
    # The compiler moves no load across a store. So the loads of some sums come before the stores of the sums before,
    # but not the loads of all sums before all stores: they would take too many registers.
    values = ()
    for start in tl.static_range(0, PARTS * count + _TOGETHER, _TOGETHER):
        previous = values
        values = ()
        for i in tl.static_range(start, min(start + _TOGETHER, PARTS * count)):
            of_m, of_n = _result_of(lane, i, count, PARTS, B_TRANSPOSED)
            at_m = first_m + of_m
            at_n = row + of_n
            acc = c[i] * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `scale_registers`
            if not PARTIAL:
                acc = rescale(acc, at_m, at_n, end, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, rescale_mode(A_OUTER),
                              rescale_mode(B_OUTER), BIAS, 0)  # fmt: skip
                if GROUPS > 0:
                    acc = tl.where(group < GROUPS, acc, 0.0)
                inside = (at_m < end) & (at_n < n)
                acc = epilogue(acc, first + of_m * n + of_n, at_n, inside, n, epilogue_0_ptr, epilogue_1_ptr,
                               EPILOGUE, ISA)  # fmt: skip
            values = values + (acc,)
        for i in tl.static_range(len(previous)):
            of_m, of_n = _result_of(lane, start - _TOGETHER + i, count, PARTS, B_TRANSPOSED)
            inside = first_m + of_m < end
            if not EVEN:
                store_rounded(out_ptr, first + of_m * n + of_n, previous[i], inside & (row + of_n < n), ISA)
            elif i % 4 < 2:
                word = pack(previous[i], previous[i + 2], out_ptr.dtype.element_ty, ISA)
                words_ptr = out_ptr.to(tl.pointer_type(word.dtype), bitcast=True)
                tl.store(words_ptr + (first + of_m * n + of_n) // 2, word, mask=inside)


def _serves(p: Problem) -> bool:
    return statically_true(p.m <= WGMMA_ROWS) and 90 <= p.target.sm < 100 and streams(p)


def _serves_transposed(p: Problem) -> bool:
    """The rows of B are whole units of the copies, as those of A are, and `streams` sees to these."""
    rows = statically_true(p.m >= LIBRARY_ROWS)
    return rows and statically_true(p.n % 64 == 0) and statically_true(p.n > 0) and _serves(p)


def _run(call: Call, config: WgmmaConfig) -> torch.Tensor:
    p, split_k = call.problem, config.split_k
    a = dequantized(call.a, p.m, p.k, p.compute_dtype, p.target, call.a.data)
    out = call.empty() if split_k == 1 else call.empty_sums(split_k)
    first = call if split_k == 1 else call.without_epilogue()
    a_outer, b_outer, bias = call.rescale_pointers(out)
    even = statically_true(p.n % (16 * config.parts * config.warps) == 0 and p.k % (128 * config.steps_per_stage) == 0)
    launch(
        gemm_wgmma_sm90, config.grid(p.m, p.n),
        a, a_outer, call.b.data, call.b.scales, b_outer, bias, out, *first.epilogue_pointers(out), out,
        p.m, p.n, p.k // 32, split_k, 0, A_OUTER=p.a.outer, B_OUTER=p.b.outer,
        BIAS=int(call.bias is not None), EPILOGUE=first.epilogue_text, PARTIAL=int(split_k > 1),
        B_SQUARE=int(p.b.format.square), B_SWIZZLED=int(p.b.swizzled), COMPUTE=p.compute, EVEN=int(even),
        ISA=p.target.isa, num_warps=config.warps, GROUPS=0, B_TRANSPOSED=int(p.b_transposed), **config.constants,
    )  # fmt: skip
    return out if split_k == 1 else reduce_split_k(call, out, split_k, pdl=True)


CANDIDATE = Candidate(
    "wgmma_sm90", "emulated", _serves, lambda p: wgmma_config(p, needed_bytes), _run,
    takes_epilogue=lambda p: True, dequantizes_a=True,
)  # fmt: skip
TRANSPOSED = Candidate(
    "wgmma_transposed_sm90", "emulated", _serves_transposed, lambda p: wgmma_transposed_config(p, needed_bytes), _run,
    takes_epilogue=lambda p: True, b_transposed=True,
)  # fmt: skip
