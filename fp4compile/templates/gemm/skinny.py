"""Skinny GEMM: up to eight rows of A times NVFP4, MXFP4 or FP8 weights B, bound by reading B. A has 16 bits or FP8.

Without groups it serves problems that `gemv` does not: three to eight rows, or rows of A too long for shared memory.

A decode step mostly reads every weight once, so memory bounds its speed if enough bytes are in flight. Loads into
registers keep too few bytes in flight: ptxas waits for the newest load wherever one is used, so only one step is
prefetched. Here each warp has STAGES buffers of its own in shared memory, and asynchronous copies fill them with the
operands of its next steps. No warp waits for another one before the sums are added. The grid is persistent
(`persistent_grid`): a program continues with its next tile, also of the next matmul of the group, without draining the
pipeline.

A step of a warp is 128 elements along K of 16 or 32 rows of B, and of the rows of A. With 32 rows of B, A is read from
shared memory once for all of them, and more of B is in flight. With 16 rows there are twice as many tiles, which a
small B needs. `skinny_pipeline` has the copies and the reads, `device.skinny_product` the arithmetic; this file has the
kernel.

Experts: each matrix of B has a few rows of A, by offsets, or by an index that assigns a matrix to each few rows. A
decode step reads the weights of the experts that have tokens, once. Every program first writes a table of the row
tiles, each of up to ROWS rows of one matrix: all programs write the same values, so each may read the table that it
wrote. Then it iterates over tiles of 16 or 32 rows of B for all row tiles, in one pipeline. Experts without tokens have
no entry, and their weights are not read.

The kernel is written one lane at a time, in inline PTX ordered by tokens: see `async_copy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_epilogue import rescale, rescale_mode, store_rounded
from fp4compile.templates.device.async_copy import AWAIT_VALUE, WARP_BARRIER, do_ptx, wait_ptx
from fp4compile.templates.device.fp4_weights import read_weights, sums_factor
from fp4compile.templates.device.fp8_weights import is_fp8, multiply_fp8, read_a_codes, read_fp8
from fp4compile.templates.device.group_tiles import clear_rows, ends_of, last_of, load_entry, store_entry
from fp4compile.templates.device.persistent_grid import group_tiles, next_step, of_matmul
from fp4compile.templates.device.shared_memory import sum_of_warps_ptx
from fp4compile.templates.device.skinny_product import multiply_step, store_sums
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.horizontal import launch_group
from fp4compile.templates.gemm.skinny_pipeline import (
    copy_step,
    interleave_a,
    read_a,
    shared_buffer_ptx,
    stage_bytes,
    step_bytes,
    tile_sources,
)
from fp4compile.templates.launch import LaunchConfig, launch
from fp4compile.templates.problem import OperandSpec, Problem
from fp4compile.templates.writes import of_several, writes

SKINNY_ROWS = 8  # rows of A up to which `skinny` serves


@dataclass(frozen=True)
class SkinnyConfig(LaunchConfig):
    """The launch configuration of `skinny`.

    rows: rows of A that the kernel computes. tiles: tiles of 16 rows of B that a program computes at once. warps:
    warps of a program. stages: pipeline stages. chains: independent accumulators of a warp. grid: the most programs.
    """

    host = ("grid",)
    rows: int
    tiles: int
    warps: int
    stages: int
    chains: int
    grid: int


def skinny_config(p: Problem) -> SkinnyConfig:
    """The configuration, tuned for the shapes of Llama-3. Every one fits into 48 KB of shared memory.

    With six programs per multiprocessor some programs compute two tiles, so no last few programs run alone. Two chains
    pay where few warps share a multiprocessor.
    """
    rows = next((rows for rows in (2, 4) if statically_true(p.m <= rows)), 8)
    tiles, warps, stages = 2, 4, 2
    if statically_true(p.n >= 8192):
        if rows <= 4 and statically_true(p.n < 16384):
            stages = 3
    elif rows == 8:
        tiles = 1
    elif statically_true(p.n <= 2048) or statically_true(p.k > 8192):
        tiles, warps = 1, 8
    else:
        tiles, stages = 1, 4
    return SkinnyConfig(rows, tiles, warps, stages, 1 if rows == 8 else 2, 6 * p.target.multiprocessors)


def fp8_config(p: Problem) -> SkinnyConfig:
    """The configuration for FP8 weights, whose steps have twice the bytes of FP4 weights'.

    On an H200 it is within 5 % of the fastest of up to nine configurations for Llama-3's shapes. 8192 x 8192 takes 19
    to 20 us with one row (bf16 35), 4096 x 14336 with eight rows 17 to 20 (bf16 33): three stages of 16 rows of B, for
    which eight rows of A have room as codes only; fewer where there are many tiles.
    """
    rows = next((rows for rows in (2, 4) if statically_true(p.m <= rows)), 8)
    many = statically_true(p.n >= 8192)
    tiles = 2 if many and rows <= 4 else 1
    stages = 2 if many or (rows == 8 and p.a.format is None) else 3
    return SkinnyConfig(rows, tiles, 4, stages, 2, 5 * p.target.multiprocessors)


def experts_config(p: Problem, most: Any = SKINNY_ROWS) -> SkinnyConfig:
    """The configuration. most: rows of A for one matrix, at most; a group with more rows is several tiles.

    A step of a warp has 1152 bytes of B for each 16 rows, and 256 bytes for each existing row of A, which 32 rows of B
    share. Registers leave room for four programs a multiprocessor. A single stage each was the fastest on an H200, from
    one token for each of two experts to eight tokens an expert: gpt-oss' 5760 x 2880 in MXFP4 takes 43 us with 16
    tokens, and 47 with two stages; with 64 tokens 98 and 113. Qwen3-30B's 1536 x 2048 with 128 tokens takes 52 and 66.
    """
    most = p.rows if statically_true(p.rows < most) else most
    rows = next((rows for rows in (2, 4) if statically_true(most <= rows)), SKINNY_ROWS)
    return SkinnyConfig(rows, 2, 4, 1, 1 if rows == SKINNY_ROWS else 2, 4 * p.target.multiprocessors)


@writes("out_ptr", **of_several(), table_ptr=lambda arguments: arguments["COUNT"] > 0)
@triton.jit
def gemm_skinny(
    a_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr,
    b_2_ptr, b_scales_2_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    m, n, n_1, n_2, k_vectors, offs_ptr, table_ptr, count, matrices, b_scales_batch, a_outer_each, b_outer_each,
    a_scales_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr,
    BIAS: tl.constexpr, COMPUTE: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, TILES: tl.constexpr,
    ROWS: tl.constexpr, CHAINS: tl.constexpr, EVEN: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
    COUNT: tl.constexpr, INDEXED: tl.constexpr, A_CODES: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a [m, K] x b [n, K]^T, rescaled, plus a bias; for a group, also the matmuls with b_1 and b_2.

    a: bf16 or fp16, m <= ROWS. b: codes, K / 2 bytes a row, or FP8 (`fp8_weights`), K bytes. k_vectors: K / 32, even.
    out: any floating-point type. A_CODES: with FP8 weights, whether a is FP8 codes. a_scales: their float32 scales, of
    128 elements each, [m, K / 128]; None without.
    GROUP_SIZE: matmuls of the launch, 1 to 3; out_1 is [m, n_1], out_2 [m, n_2]. Pointers of absent matmuls are
    never read.
    WARPS: of a program; the launch must have as many. They share a tile's steps along K. TILES: 1 or 2, a tile has
    16 * TILES rows of b. ROWS: 2, 4 or 8. STAGES: steps of a warp that are in flight. CHAINS: see `skinny_product`.
    EVEN: no tile has a row, and no step an element, past the end.

    COUNT: 0; or, for experts, count rounded up to a power of two. Then b is [matrices, n, K], each with b_scales_batch
    bytes of scales, and m any number. offs: int32 [count], the offsets of groups, one a matrix; or (INDEXED) the
    numbers of the matrices for m // count rows each, at most ROWS; negative numbers count from the end. *_outer_each:
    the number of global or row scales of each group; 0 where all groups share them. table: memory for int32 [tiles, 4],
    where tiles is the largest possible number of row tiles.
    """
    if COUNT > 0:
        g = tl.arange(0, COUNT)
        numbers = tl.load(offs_ptr + g, mask=g < count, other=0).to(tl.int32)
        if INDEXED:
            numbers = tl.where(numbers < 0, numbers + matrices, numbers)
            matrix = tl.minimum(tl.maximum(numbers, 0), matrices - 1)  # numbers out of range are clamped
            starts = g * (m // count)
            ends = tl.where(g < count, starts + m // count, starts)
        else:
            matrix = g
            starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= count), other=0), m)
            ends = ends_of(numbers, m)
            clear_rows(out_ptr, last_of(ends), m, n, 4, 256)
        tiles_m = tl.cdiv(ends - starts, ROWS)
        first_tile = tl.cumsum(tiles_m, 0) - tiles_m
        for i in range(0, tl.max(tiles_m, 0)):
            store_entry(table_ptr, first_tile + i, matrix, starts + i * ROWS, ends, i < tiles_m)
        tl.debug_barrier()  # the table is complete
        tiles = tl.cdiv(n, 16 * TILES)
        tiles_1 = tiles
        total = tl.sum(tiles_m, 0) * tiles
    else:
        tiles, tiles_1, total = group_tiles(n, n_1, n_2, 16 * TILES, GROUP_SIZE)

    buffer_bytes: tl.constexpr = stage_bytes(TILES, ROWS, B_SCALES, A_CODES)
    part_bytes: tl.constexpr = step_bytes(B_SCALES)
    stage: tl.constexpr = WARPS * buffer_bytes
    sums_size: tl.constexpr = 16 * TILES * ROWS * 4  # of a warp; one of two sets is read while the other fills
    size: tl.constexpr = STAGES * stage + WARPS * 2 * sums_size
    tl.static_assert(size <= 48 * 1024)  # what inline PTX may declare
    lane = tl.arange(0, 32 * WARPS)
    steps = tl.cdiv(k_vectors, 4 * WARPS)
    memory = do_ptx(shared_buffer_ptx(size), "r", (lane,))
    first_buffer = memory + lane // 32 * buffer_bytes
    first_sums = memory + STAGES * stage
    pointers = (a_ptr, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr)
    sizes = (n, n_1, n_2, k_vectors, steps, tiles, tiles_1, total, b_scales_batch)
    token = lane
    next_tile = tl.program_id(0)
    step_of_next = 0
    # Without experts the table is passed to no function: torch would count it as written.
    if COUNT > 0:
        sources = _sources(next_tile, 0, _part_of(next_tile, table_ptr, tiles, total, ROWS), lane, pointers, sizes,
                           B_SCALES, WARPS, TILES, EVEN, GROUP_SIZE, COUNT)  # fmt: skip
    for early in tl.static_range(STAGES):
        if COUNT == 0:
            sources = _sources(next_tile, step_of_next, (next_tile, 0, 0, m), lane, pointers, sizes, B_SCALES, WARPS,
                               TILES, EVEN, GROUP_SIZE, COUNT)  # fmt: skip
        token = copy_step(first_buffer + early * stage, step_of_next if COUNT > 0 else 0, sources, token, lane,
                          a_scales_ptr, k_vectors, B_SCALES, WARPS, TILES, ROWS, EVEN, A_CODES)  # fmt: skip
        next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
        if COUNT > 0:  # noqa: SIM102, in one condition Triton would compile the branch without experts
            if step_of_next == 0:
                sources = _sources(next_tile, 0, _part_of(next_tile, table_ptr, tiles, total, ROWS), lane, pointers,
                                   sizes, B_SCALES, WARPS, TILES, EVEN, GROUP_SIZE, COUNT)  # fmt: skip
    if B_OUTER == "tensor" and COUNT == 0:
        token = do_ptx(AWAIT_VALUE, "f,r", (tl.load(b_outer_ptr), token))  # brings it to the cache for the end

    buffer = first_buffer
    sums_at = first_sums
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        tile_n, group, row0, rows = tile, 0, 0, m
        if COUNT > 0:
            tile_n, group, row0, rows = _part_of(tile, table_ptr, tiles, total, ROWS)
        c = ()
        for _ in tl.static_range(4 * TILES):
            c = c + (tl.zeros((32 * WARPS,), tl.float32),)
        for _ in tl.range(steps):
            token = do_ptx(wait_ptx(STAGES - 1), "r", (token,))
            if A_CODES:
                x, token = read_a_codes(buffer + TILES * part_bytes, token, lane, rows)
            else:
                x, token = read_a(buffer + TILES * part_bytes, token, lane, rows)
            sums = ()
            for part in tl.static_range(TILES):
                if is_fp8(B_SCALES):
                    w, token = read_fp8(buffer + part * part_bytes, buffer, token, lane, B_SCALES,
                                        a_scales_ptr is not None)  # fmt: skip
                else:
                    w, token = read_weights(buffer, part, token, lane, k_vectors, B_SCALES, EVEN)
                if part == TILES - 1:  # every lane has read its operands, so the buffer can be filled again
                    token = do_ptx(WARP_BARRIER, "r", (token,))
                    if COUNT == 0:
                        sources = _sources(next_tile, step_of_next, (next_tile, 0, 0, m), lane, pointers, sizes,
                                           B_SCALES, WARPS, TILES, EVEN, GROUP_SIZE, COUNT)  # fmt: skip
                    token = copy_step(buffer, step_of_next if COUNT > 0 else 0, sources, token, lane, a_scales_ptr,
                                      k_vectors, B_SCALES, WARPS, TILES, ROWS, EVEN, A_CODES)  # fmt: skip
                    next_tile, step_of_next = next_step(next_tile, step_of_next, steps)
                    if COUNT > 0:  # noqa: SIM102, as above
                        if step_of_next == 0:
                            sources = _sources(next_tile, 0, _part_of(next_tile, table_ptr, tiles, total, ROWS), lane,
                                               pointers, sizes, B_SCALES, WARPS, TILES, EVEN, GROUP_SIZE,
                                               COUNT)  # fmt: skip
                own = c[4 * part : 4 * part + 4]
                if is_fp8(B_SCALES):
                    sums = sums + multiply_fp8(w, x, own, COMPUTE)
                else:
                    if part == 0:
                        x = interleave_a(x)
                    sums = sums + multiply_step(w, x, own, COMPUTE, B_SCALES, CHAINS)
            c = sums
            buffer = tl.where(buffer == first_buffer + (STAGES - 1) * stage, first_buffer, buffer + stage)
        token = store_sums(sums_at + lane // 32 * sums_size, c, token, lane, TILES, ROWS)
        a_outer = a_outer_ptr
        b_outer = b_outer_ptr
        if COUNT > 0:
            a_outer += row0 if A_OUTER == "row" else group * a_outer_each
            b_outer += group.to(tl.int64) * b_outer_each
        token = _store_results(sums_at, tile_n, row0, rows, token, lane, n, n_1, n_2, tiles, tiles_1, a_outer, b_outer,
                               bias_ptr, out_ptr, b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr,
                               out_2_ptr, A_OUTER, B_OUTER, B_SCALES, BIAS, COMPUTE, WARPS, TILES, ROWS, ISA,
                               GROUP_SIZE)  # fmt: skip
        sums_at = tl.where(sums_at == first_sums, first_sums + WARPS * sums_size, first_sums)


@triton.jit
def _part_of(tile, table_ptr, tiles_n, total, ROWS: tl.constexpr):
    """(tile of rows of B, group, first row, number of rows) of a tile; past the last tile, of an arbitrary one."""
    tile = tl.maximum(tl.minimum(tile, total - 1), 0)
    group, row0, end = load_entry(table_ptr, tile // tiles_n)
    return tile % tiles_n, group, row0, tl.minimum(end - row0, ROWS)


@triton.jit
def _sources(
    tile, first, part, lane, pointers, sizes, B_SCALES: tl.constexpr, WARPS: tl.constexpr, TILES: tl.constexpr,
    EVEN: tl.constexpr, GROUP_SIZE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """`tile_sources` from step `first` of a tile on. part: from `_part_of`.

    An expert's tile finds its sources once, since they take 100 instructions. Without experts they take few, and each
    step finds its own, without a branch: the compiler orders all instructions of a step.
    """
    tile_n, group, row0, rows = part
    a_ptr, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr, b_scales_2_ptr = pointers
    n, n_1, n_2, k_vectors, steps, tiles, tiles_1, total, b_scales_batch = sizes
    if COUNT > 0:
        a_ptr += row0.to(tl.int64) * k_vectors * 32
        b_ptr += group.to(tl.int64) * n * k_vectors * 16
        b_scales_ptr += group.to(tl.int64) * b_scales_batch
        total = tl.where(tile < total, tiles, 0)
    return tile_sources(tile_n, first, lane, a_ptr, b_ptr, b_scales_ptr, b_1_ptr, b_scales_1_ptr, b_2_ptr,
                        b_scales_2_ptr, rows, n, n_1, n_2, k_vectors, steps, tiles, tiles_1, total, B_SCALES, WARPS,
                        TILES, EVEN, GROUP_SIZE)  # fmt: skip


@triton.jit
def _store_results(
    sums_at, tile, row0, m, token, lane, n, n_1, n_2, tiles, tiles_1, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr,
    b_outer_1_ptr, bias_1_ptr, out_1_ptr, b_outer_2_ptr, bias_2_ptr, out_2_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, B_SCALES: tl.constexpr, BIAS: tl.constexpr,
    COMPUTE: tl.constexpr, WARPS: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr, ISA: tl.constexpr, GROUP_SIZE: tl.constexpr,
):  # fmt: skip
    """Add up the warps' sums of a tile of m rows from row0 on, rescale and store them. Returns a token."""
    b_outer_ptr, bias_ptr = of_matmul(tile, tiles, tiles_1, (b_outer_ptr, bias_ptr), (b_outer_1_ptr, bias_1_ptr),
                                      (b_outer_2_ptr, bias_2_ptr), GROUP_SIZE)  # fmt: skip
    if GROUP_SIZE > 2:
        out_1_ptr = tl.where(tile >= tiles_1, out_2_ptr, out_1_ptr)
    if GROUP_SIZE > 1:
        out_ptr = tl.where(tile >= tiles, out_1_ptr, out_ptr)
    before, n = of_matmul(tile, tiles, tiles_1, (0, n), (tiles, n_1), (tiles_1, n_2), GROUP_SIZE)
    tile -= before
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
        if not is_fp8(B_SCALES):
            acc = acc * sums_factor(COMPUTE, B_SCALES)
        acc = rescale(acc, at_m, at_n, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, rescale_mode(A_OUTER),
                      rescale_mode(B_OUTER), BIAS, 0)  # fmt: skip
        inside = (at_m < m) & (at_n < n) & (place < count)
        store_rounded(out_ptr, (row0 + at_m).to(tl.int64) * n + at_n, acc, inside, ISA)
    return token


def multiply_group(calls: Sequence[Call], config: SkinnyConfig) -> list[torch.Tensor]:
    """[1, m, n] of each of up to three matmuls of one A, in one launch."""
    a = calls[0].a
    codes = calls[0].problem.b.element == "e4m3" and a.type.format is not None
    # No offsets and no table: torch would count a dummy tensor as written, and Inductor would copy it.
    return launch_group(gemm_skinny, calls, config, 16 * config.tiles, 128, None, None, 0, 0, 0, 0, 0,
                        a.scales if codes else None, a_codes=codes, COUNT=0, INDEXED=0, A_CODES=int(codes))  # fmt: skip


def multiply_experts(
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
        gemm_skinny, torch.sym_min(tiles_m * ceil_div(p.n, tile), config.grid),
        x, a_outer, b.data, b.scales, b_outer, b.data, out, *[b.data] * 10,
        p.rows, p.n, 1, 1, p.k // 32, numbers, table, count, p.groups, b.scale_count, _outers_each(p.a, 0),
        _outers_each(p.b, p.n), None, num_warps=config.warps, A_OUTER=p.a.outer, B_OUTER=p.b.outer, BIAS=0,
        B_SCALES=p.b.scales_text, COMPUTE=p.compute, GROUP_SIZE=1,
        COUNT=triton.next_power_of_2(count), INDEXED=int(indexed), A_CODES=0, EVEN=int(even), ISA=p.target.isa,
        **config.constants,
    )  # fmt: skip
    return out


def _outers_each(x: OperandSpec, rows) -> int:
    """The number of global or row scales of a group. rows: the number of row scales."""
    return {"group": 1, "row": rows}.get(x.outer, 0)
