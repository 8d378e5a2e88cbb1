"""Skinny GEMM: up to eight rows of 16-bit A times NVFP4 weights B, at the speed at which B can be read.

It serves problems that `gemv` does not: three to eight rows, or rows of A too long for shared memory.

A decode step reads every weight once and does little else, so memory bounds its speed as long as enough bytes are on
their way. Loads into registers keep too few bytes on their way: ptxas waits for the newest load wherever one is used,
so only one step is prefetched. Here each warp has STAGES buffers of its own in shared memory, and asynchronous copies
fill them with the operands of its next steps. No warp waits for another one before the sums are added. The grid is
persistent (`persistent_grid`): a program that is done with a tile goes on with its next tile, also of the next product
of the group, and the pipeline does not run dry in between.

A step of a warp is 128 elements along K of 16 or 32 rows of B, and of the rows of A. With 32 rows of B, A is read from
shared memory once for all of them, and more of B is on its way. With 16 rows there are twice as many tiles, which a
small B needs. `skinny_pipeline` has the copies and the reads, `device.skinny_product` the arithmetic; this file has the
kernel.

The kernel is written one lane at a time, in inline PTX ordered by tokens: see `async_copy`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.templates.device.async_copy import AWAIT_VALUE, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.epilogue import rescale, store_rounded
from fp4compile.templates.device.nvfp4_weights import STEP_BYTES, read_weights
from fp4compile.templates.device.persistent_grid import group_tiles, next_step
from fp4compile.templates.device.shared_memory import sum_of_warps_ptx
from fp4compile.templates.device.skinny_product import multiply_step, store_sums
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import SKINNY_ROWS, SkinnyConfig, skinny_config
from fp4compile.templates.gemm.skinny_pipeline import copy_step, interleave_a, read_a, shared_buffer_ptx, stage_bytes
from fp4compile.templates.gemm.streaming import in_common, launch_group, streams
from fp4compile.templates.problem import Problem


@triton.jit
def gemm_skinny(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, k_vectors,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, CHAINS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias; for a group, also the products with b_1 and b_2.

    a: bf16 or fp16, m <= ROWS. b: K / 2 bytes of codes a row. k_vectors: K / 32, even. out: any floating-point type.
    GROUP_SIZE: products of the launch, 1 to 3; out_1 is [m, n_1], out_2 [m, n_2]. Pointers of absent products are
    never read.
    WARPS: of a program; the launch must have as many. They share a tile's steps along K. TILES: 1 or 2, a tile has
    16 * TILES rows of b. ROWS: 2, 4 or 8. STAGES: steps of a warp that are on their way. CHAINS: see
    `skinny_product`. EVEN: no tile has a row, and no step an element, past the end.
    """
    buffer_bytes: tl.constexpr = stage_bytes(TILES, ROWS)
    stage: tl.constexpr = WARPS * buffer_bytes
    sums_size: tl.constexpr = 16 * TILES * ROWS * 4  # of a warp; one of two sets is read while the other fills
    size: tl.constexpr = STAGES * stage + WARPS * 2 * sums_size
    tl.static_assert(size <= 48 * 1024)  # what inline PTX may declare
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(k_vectors, 4 * WARPS)
    tiles, tiles_1, total = group_tiles(n, n_1, n_2, 16 * TILES, GROUP_SIZE)
    memory = do_ptx(shared_buffer_ptx(size), "r", (lane,))
    first_buffer = memory + lane // 32 * buffer_bytes
    first_sums = memory + STAGES * stage
    token = lane
    next_tile = tl.program_id(0)
    step_of_next = 0
    for early in tl.static_range(STAGES):
        token = copy_step(first_buffer + early * stage, next_tile, step_of_next, token, lane, a_ptr, b_ptr,
                          b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, m, n, n_1, n_2, k_vectors,
                          tiles, tiles_1, total, B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN,
                          GROUP_SIZE)  # fmt: skip
        next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
    if B_OUTER == "tensor":
        token = do_ptx(AWAIT_VALUE, "f,r", (tl.load(b_outer_ptr), token))  # brings it to the cache for the end

    buffer = first_buffer
    sums_at = first_sums
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        c = ()
        for _ in tl.static_range(4 * TILES):
            c = c + (tl.zeros((32 * WARPS,), tl.float32),)
        for _ in tl.range(steps):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            x, token = read_a(buffer + TILES * STEP_BYTES, token, lane, m)
            sums = ()
            for part in tl.static_range(TILES):
                w, token = read_weights(buffer, part, token, lane)
                if part == TILES - 1:  # every lane has read its operands, so the buffer can be filled again
                    token = do_ptx(WARP_BARRIER, "r", (token,))
                    token = copy_step(buffer, next_tile, step_of_next, token, lane, a_ptr, b_ptr, b_scales_ptr,
                                      b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr, m, n, n_1, n_2, k_vectors,
                                      tiles, tiles_1, total, B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN,
                                      GROUP_SIZE)  # fmt: skip
                    next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
                if part == 0:
                    x = interleave_a(x)
                sums = sums + multiply_step(w, x, c[4 * part : 4 * part + 4], COMPUTE, CHAINS)
            c = sums
            buffer = tl.where(buffer == first_buffer + (STAGES - 1) * stage, first_buffer, buffer + stage)
        token = store_sums(sums_at + lane // 32 * sums_size, c, token, lane, TILES, ROWS)
        token = _store_results(sums_at, tile, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr,
                               bias_ptr, out_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr,
                               out_2_ptr, A_OUTER, B_OUTER, BIAS, COMPUTE, WARPS, TILES, ROWS, ISA,
                               GROUP_SIZE)  # fmt: skip
        sums_at = tl.where(sums_at == first_sums, first_sums + WARPS * sums_size, first_sums)


@triton.jit
def _store_results(
    sums_at, tile, token, lane, m, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a tile, rescale and store them. Returns a token.

    Selects find the product that the tile belongs to. Branches fail: while torch analyses what a kernel writes, sizes
    are constants, and Triton forbids to change constants in a branch. A function that returns the pointers fails too:
    torch counts a pointer that a function returns as written.
    """
    if GROUP_SIZE > 2:
        in_third = tile >= tiles_1
        tiles = tl.where(in_third, tiles_1, tiles)
        b_outer_1_ptr = tl.where(in_third, b_outer_2_ptr, b_outer_1_ptr)
        bias_1_ptr = tl.where(in_third, bias_2_ptr, bias_1_ptr)
        out_1_ptr = tl.where(in_third, out_2_ptr, out_1_ptr)
        n_1 = tl.where(in_third, n_2, n_1)
    if GROUP_SIZE > 1:
        not_in_first = tile >= tiles
        tile = tl.where(not_in_first, tile - tiles, tile)
        b_outer_ptr = tl.where(not_in_first, b_outer_1_ptr, b_outer_ptr)
        bias_ptr = tl.where(not_in_first, bias_1_ptr, bias_ptr)
        out_ptr = tl.where(not_in_first, out_1_ptr, out_ptr)
        n = tl.where(not_in_first, n_1, n)
    count: tl.constexpr = 16 * TILES * ROWS
    for first in tl.static_range(0, count, 32 * WARPS):
        place = first + lane
        at_m = place % ROWS
        at_n = tile * (16 * TILES) + place // ROWS
        acc = tl.inline_asm_elementwise(
            sum_of_warps_ptx(WARPS, count * 4), "=&f,r,r", (sums_at + place % count * 4, token), dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
        token = do_ptx(AWAIT_VALUE, "f,r", (acc, token))  # the sums are read before the next barrier
        acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `scale_registers`
        acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, 0)
        inside = (at_m < m) & (at_n < n) & (place < count)
        store_rounded(out_ptr, at_m.to(tl.int64) * n + at_n, acc, inside, ISA)
    return token


def _serves(p: Problem) -> bool:
    return not p.ragged and statically_true(p.m <= SKINNY_ROWS) and p.target.isa > 0 and streams(p)


def _run_group(calls: Sequence[Call], config: SkinnyConfig) -> list[torch.Tensor]:
    return launch_group(gemm_skinny, calls, config, 16 * config.tiles, 128)


CANDIDATE = Candidate(
    "skinny", "emulated", _serves, skinny_config, lambda call, config: _run_group([call], config)[0],
    dequantizes_a=True, group_with=in_common, run_group=_run_group,
)  # fmt: skip
