"""Grouped skinny GEMM: a few rows of 16-bit A for each matrix of NVFP4 weights, which are streamed (`gemm.skinny`).

A decode step reads the weights of the experts that have tokens, once. Every program first writes a table of the row
tiles, each of up to ROWS rows of one group: all programs write the same values, so that each may read its own. Then it
walks tiles of 16 or 32 rows of B for all row tiles, in one pipeline. Experts without tokens have no entry, and their
weights are not read.

Offsets assign matrices to groups of rows, or an index assigns a matrix to each few rows. The pipeline consists of the
functions of `gemm_skinny`, which get the operands of one entry.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.templates.device.async_copy import AWAIT_VALUE, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.epilogue import rescale, rescale_mode, store_rounded
from fp4compile.templates.device.group_tiles import clear_rows, ends_of, last_of, load_entry, store_entry
from fp4compile.templates.device.nvfp4_weights import STEP_BYTES, read_weights
from fp4compile.templates.device.persistent_grid import next_step
from fp4compile.templates.device.shared_memory import sum_of_warps_ptx
from fp4compile.templates.device.skinny_product import multiply_step, store_sums
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.heuristics import SKINNY_ROWS, SkinnyConfig, grouped_skinny_config
from fp4compile.templates.gemm.skinny_pipeline import copy_step, interleave_a, read_a, shared_buffer_ptx, stage_bytes
from fp4compile.templates.gemm.streaming import streams
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem


@triton.jit
def gemm_skinny_grouped(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, offs_ptr, out_ptr, table_ptr,
    rows, n, k_vectors, count, matrices, b_scales_batch, a_outer_each, b_outer_each,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    COMPUTE: tl.constexpr, COUNT: tl.constexpr, INDEXED: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, CHAINS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """out [rows, n] = a [rows, K] x the transposed matrices of b [matrices, n, K], rescaled.

    a: bf16 or fp16; the other operands and constants as in `gemm_skinny`. offs: int32 [count], the offsets of groups,
    one a matrix; or (INDEXED) the numbers of the matrices for rows // count rows each, at most ROWS; negative numbers
    count from the end. COUNT: count, rounded up to a power of two. b_scales_batch: bytes of scales of a matrix.
    *_outer_each: how many outer scales each group has of its own; 0 where all groups share them.
    table: memory for int32 [tiles, 4], where tiles is the largest possible number of row tiles.
    """
    g = tl.arange(0, COUNT)
    numbers = tl.load(offs_ptr + g, mask=g < count, other=0).to(tl.int32)
    if INDEXED:
        numbers = tl.where(numbers < 0, numbers + matrices, numbers)
        matrix = tl.minimum(tl.maximum(numbers, 0), matrices - 1)  # numbers out of range are clamped
        starts = g * (rows // count)
        ends = tl.where(g < count, starts + rows // count, starts)
    else:
        matrix = g
        starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= count), other=0), rows)
        ends = ends_of(numbers, rows)
        clear_rows(out_ptr, last_of(ends), rows, n, 4, 256)
    tiles_m = tl.cdiv(ends - starts, ROWS)
    first_tile = tl.cumsum(tiles_m, 0) - tiles_m
    for i in range(0, tl.max(tiles_m, 0)):
        store_entry(table_ptr, first_tile + i, matrix, starts + i * ROWS, ends, i < tiles_m)
    tl.debug_barrier()  # the table is complete

    buffer_bytes: tl.constexpr = stage_bytes(TILES, ROWS)
    stage: tl.constexpr = WARPS * buffer_bytes
    sums_size: tl.constexpr = 16 * TILES * ROWS * 4  # of a warp; one of two sets is read while the other fills
    size: tl.constexpr = STAGES * stage + WARPS * 2 * sums_size
    tl.static_assert(size <= 48 * 1024)  # what inline PTX may declare
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(k_vectors, 4 * WARPS)
    tiles_n = tl.cdiv(n, 16 * TILES)
    total = tl.sum(tiles_m, 0) * tiles_n
    memory = do_ptx(shared_buffer_ptx(size), "r", (lane,))
    first_buffer = memory + lane // 32 * buffer_bytes
    first_sums = memory + STAGES * stage
    token = lane
    next_tile = tl.program_id(0)
    step_of_next = 0
    next_n, next_group, next_row0, next_m = _part_of(next_tile, table_ptr, tiles_n, total, ROWS)
    for early in tl.static_range(STAGES):
        token = _copy_step(first_buffer + early * stage, next_n, step_of_next, next_tile < total, next_group, next_row0,
                           next_m, token, lane, a_ptr, b_ptr, b_scales_ptr, n, k_vectors, tiles_n, b_scales_batch,
                           B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN)  # fmt: skip
        next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
        if step_of_next == 0:
            next_n, next_group, next_row0, next_m = _part_of(next_tile, table_ptr, tiles_n, total, ROWS)

    buffer = first_buffer
    sums_at = first_sums
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile_n, group, row0, m = _part_of(tile, table_ptr, tiles_n, total, ROWS)
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
                    token = _copy_step(buffer, next_n, step_of_next, next_tile < total, next_group, next_row0, next_m,
                                       token, lane, a_ptr, b_ptr, b_scales_ptr, n, k_vectors, tiles_n, b_scales_batch,
                                       B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN)  # fmt: skip
                    next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
                    if step_of_next == 0:
                        next_n, next_group, next_row0, next_m = _part_of(next_tile, table_ptr, tiles_n, total, ROWS)
                if part == 0:
                    x = interleave_a(x)
                sums = sums + multiply_step(w, x, c[4 * part : 4 * part + 4], COMPUTE, CHAINS)
            c = sums
            buffer = tl.where(buffer == first_buffer + (STAGES - 1) * stage, first_buffer, buffer + stage)
        token = store_sums(sums_at + lane // 32 * sums_size, c, token, lane, TILES, ROWS)
        a_outer = a_outer_ptr + (row0 if A_OUTER == "row" else group * a_outer_each)
        b_outer = b_outer_ptr + group.to(tl.int64) * b_outer_each
        token = _store_results(sums_at, tile_n, token, lane, row0, m, n, a_outer, b_outer, out_ptr,
                               A_OUTER, B_OUTER, COMPUTE, WARPS, TILES, ROWS, ISA)  # fmt: skip
        sums_at = tl.where(sums_at == first_sums, first_sums + WARPS * sums_size, first_sums)


@triton.jit
def _part_of(tile, table_ptr, tiles_n, total, ROWS: tl.constexpr):
    """(tile of rows of B, group, first row, number of rows) of a tile; past the last tile, of an arbitrary one."""
    tile = tl.maximum(tl.minimum(tile, total - 1), 0)
    group, row0, end = load_entry(table_ptr, tile // tiles_n)
    return tile % tiles_n, group, row0, tl.minimum(end - row0, ROWS)


@triton.jit
def _copy_step(
    buffer, tile_n, step, wanted, group, row0, m, token, lane, a_ptr, b_ptr, b_scales_ptr, n, k_vectors, tiles_n,
    b_scales_batch,
    B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """`copy_step` for the results of `_part_of`. wanted: whether to copy at all."""
    a_ptr += row0.to(tl.int64) * k_vectors * 32
    b_ptr += group.to(tl.int64) * n * k_vectors * 16
    b_scales_ptr += group.to(tl.int64) * b_scales_batch
    return copy_step(buffer, tile_n, step, token, lane, a_ptr, b_ptr, b_scales_ptr, b_ptr, b_scales_ptr, b_ptr,
                     b_scales_ptr, m, n, n, n, k_vectors, tiles_n, tiles_n, tl.where(wanted, tiles_n, 0),
                     B_SQUARE, B_SWIZZLED, WARPS, TILES, ROWS, EVEN, 1)  # fmt: skip


@triton.jit
def _store_results(
    sums_at, tile_n, token, lane, row0, m, n, a_outer_ptr, b_outer_ptr, out_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a tile, rescale and store them. Returns a token."""
    count: tl.constexpr = 16 * TILES * ROWS
    for first in tl.static_range(0, count, 32 * WARPS):
        place = first + lane
        at_m = place % ROWS
        at_n = tile_n * (16 * TILES) + place // ROWS
        acc = tl.inline_asm_elementwise(
            sum_of_warps_ptx(WARPS, count * 4), "=&f,r,r", (sums_at + place % count * 4, token), dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip
        token = do_ptx(AWAIT_VALUE, "f,r", (acc, token))  # the sums are read before the next barrier
        acc = acc * (2.0**14 if COMPUTE == "fp16" else 2.0**7)  # see `dequantize_word`, `scale_registers`
        acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, out_ptr, rescale_mode(A_OUTER),
                      rescale_mode(B_OUTER), 0, 0)  # fmt: skip
        inside = (at_m < m) & (at_n < n) & (place < count)
        store_rounded(out_ptr, (row0 + at_m).to(tl.int64) * n + at_n, acc, inside, ISA)
    return token


def _serves(p: Problem) -> bool:
    return p.target.isa > 0 and p.by_rows and streams(p) and statically_true(p.rows <= SKINNY_ROWS * p.groups)


def launch_skinny(
    p: Problem, config: SkinnyConfig, a: KernelOperand, b: KernelOperand, numbers: torch.Tensor, indexed: bool
) -> torch.Tensor:
    """[rows, n]: rows of A times matrices of B. numbers: offsets of groups or, if indexed, numbers of matrices."""
    x = dequantized(a, p.m, p.k, torch.float16, p.target, a.data)
    out = x.new_empty((p.rows, p.n), dtype=p.spec.out_dtype)
    count = numbers.shape[0]
    tiles_m = count * ceil_div(p.rows, count * config.rows) if indexed else p.rows // config.rows + count
    table = numbers.new_empty((tiles_m, 4), dtype=torch.int32)
    a_outer, b_outer = (out if each.outer is None else each.outer for each in (a, b))  # `out` is never read
    tile = 16 * config.tiles
    even = statically_true(p.n % tile == 0) and statically_true(p.k % (128 * config.warps) == 0)
    launch(
        gemm_skinny_grouped, torch.sym_min(tiles_m * ceil_div(p.n, tile), config.grid),
        x, a_outer, b.data, b.scales, b_outer, numbers, out, table,
        p.rows, p.n, p.k // 32, count, p.groups, b.scale_bytes, _outers_each(p.a, 0), _outers_each(p.b, p.n),
        num_warps=config.warps, A_OUTER=p.a.outer, B_OUTER=p.b.outer, B_SQUARE=int(p.b.format.square),
        B_SWIZZLED=int(p.b.swizzled), COMPUTE=p.compute, COUNT=triton.next_power_of_2(count), INDEXED=int(indexed),
        EVEN=int(even), ISA=p.target.isa, **config.constants,
    )  # fmt: skip
    return out


def _outers_each(x: OperandSpec, rows) -> int:
    """How many outer scales a group has of its own. rows: the number if each row has an outer scale."""
    return {"group": 1, "row": rows}.get(x.outer, 0)


def _run(call: Call, config: SkinnyConfig) -> torch.Tensor:
    return launch_skinny(call.problem, config, call.a, call.b, call.offs, indexed=False)


CANDIDATE = Candidate("grouped_skinny", "emulated", _serves, grouped_skinny_config, _run, dequantizes_a=True)
