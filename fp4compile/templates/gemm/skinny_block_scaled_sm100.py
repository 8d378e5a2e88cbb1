"""Skinny block-scaled GEMM: up to 64 rows of A times block-scaled weights B, on the matrix units of SM100.

With few rows of A, reading B bounds the time, so every multiprocessor must read a part of it. `block_scaled_sm100` has
a program for each 128 x 256 of the result: 16 programs for a weight of 4096 rows. This kernel differs:

- The operands are swapped: B is the first operand of the instruction, the one with 128 rows, and A the second.
- K is split into enough parts for a program on each multiprocessor. `split_k_reduction` adds their float32 sums, then
  applies global or row scales, bias and epilogue, also of a single part: every matmul of docs/models.md has several. It
  may start early (`device.dependent_launch`).
- Matmuls of one A are one launch (Q, K and V; gate and up), so that small weights do not run alone.

A is padded to 128 rows; the padding is never read. The instruction could take 16, 32 or 64 rows, and Triton compiles
that. But Triton copies scales straight to tensor memory (`tcgen05.cp`) only in tiles of 128 rows, as they are stored;
scales of fewer rows go through registers, and every step then waits for its matmul. The padding of A costs shared
memory and its bandwidth (see `heuristics.skinny_block_scaled_config`), and no reads.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scaled_tile import (
    code_source,
    codes_in,
    load_codes,
    load_scales,
    multiply,
    scale_source,
)
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.persistent_grid import group_tiles, of_matmul
from fp4compile.templates.gemm import library
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import MOST_IN_GROUP, Candidate
from fp4compile.templates.gemm.heuristics import (
    SKINNY_BLOCK_SCALED_ROWS,
    SkinnyBlockScaledConfig,
    skinny_block_scaled_config,
)
from fp4compile.templates.gemm.horizontal import in_common
from fp4compile.templates.gemm.split_k import reduce_split_k
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import of_several, writes

_TILE = tl.constexpr(128)  # rows of B, and of A with its padding


@triton.jit
def first_half(x):
    """The first half of a matrix's columns. A lane has whole rows of sums, so it only drops registers."""
    first, _ = tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return first


@writes("out_ptr", **of_several())
@triton.jit
def gemm_skinny_block_scaled_sm100(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, out_ptr,
    b_1_ptr, b_scales_1_ptr, out_1_ptr, b_2_ptr, b_scales_2_ptr, out_2_ptr,
    batches, m, n, n_1, n_2, a_per_row, b_per_row, steps, col_tiles, split_k,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    B_BATCHED: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, GROUP_SIZE: tl.constexpr,
    EVEN_K: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
):  # fmt: skip
    """128 columns of one part of K of a [batches, m, K] x b [batches or 1, n, K]^T: sums [split_k, batches, m, n].

    GROUP_SIZE: matmuls of one a, 1 to 3; out_1 has n_1 columns, out_2 has n_2. Pointers of absent matmuls are never
    read. Only a single matmul has batches.
    *_per_row: bytes of codes in a row. steps: of BK elements along K. col_tiles: tiles of 128 x 4 in a row of scales.
    ROWS: 16, 32 or 64, at least m. EVEN_K: K is whole steps. LAUNCH_DEPENDENTS: the kernel that adds the parts may
    start.
    """
    if LAUNCH_DEPENDENTS:
        out_ptr = launch_dependents(out_ptr)
    tiles, tiles_1, total = group_tiles(n, n_1, n_2, 128, GROUP_SIZE)
    program = tl.program_id(0)
    split = program % split_k
    tile = program // split_k % total
    batch = (program // split_k // total).to(tl.int64)
    b_ptr, b_scales_ptr = of_matmul(tile, tiles, tiles_1, (b_ptr, b_scales_ptr), (b_1_ptr, b_scales_1_ptr),
                                    (b_2_ptr, b_scales_2_ptr), GROUP_SIZE)  # fmt: skip
    if GROUP_SIZE > 2:
        out_1_ptr = tl.where(tile >= tiles_1, out_2_ptr, out_1_ptr)
    if GROUP_SIZE > 1:
        out_ptr = tl.where(tile >= tiles, out_1_ptr, out_ptr)
    before, n = of_matmul(tile, tiles, tiles_1, (0, n), (tiles, n_1), (tiles_1, n_2), GROUP_SIZE)
    tile -= before
    a_per_row = a_per_row // 8 * 8  # changes nothing, but shows the compiler how wide it may load
    b_per_row = b_per_row // 8 * 8
    a_ptr += batch * m * a_per_row
    b_batch = batch if B_BATCHED else 0
    b_ptr += b_batch * n * b_per_row

    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    blocks: tl.constexpr = BK // BLOCK
    row_tiles = tl.cdiv(n, _TILE)
    a_source = code_source(a_ptr, m, a_per_row, A_ELEMENT, _TILE, a_bytes, False)
    b_source = code_source(b_ptr, n, b_per_row, B_ELEMENT, _TILE, b_bytes, False)
    a_scales = scale_source(a_scales_ptr, batches, col_tiles, SCALE, _TILE, blocks, False)
    b_scales = scale_source(b_scales_ptr, batches * row_tiles, col_tiles, SCALE, _TILE, blocks, False)
    acc = tl.zeros((_TILE, _TILE), tl.float32)
    for step in tl.range(steps * split // split_k, steps * (split + 1) // split_k, num_stages=STAGES):
        col_tile = step * (blocks // 4)
        b = load_codes(b_source, tile * _TILE, step * b_bytes, n, b_per_row, _TILE, b_bytes, False, EVEN_K)
        a = load_codes(a_source, 0, step * a_bytes, m, a_per_row, _TILE, a_bytes, False, EVEN_K)
        b_scale = load_scales(b_scales, b_batch * row_tiles + tile, col_tile, (b_batch + 1) * row_tiles, col_tiles,
                              _TILE, blocks, False)  # fmt: skip
        a_scale = load_scales(a_scales, batch, col_tile, batches, col_tiles, _TILE, blocks, False)
        acc = multiply(b, b_scale, a, a_scale, acc, B_ELEMENT, A_ELEMENT, SCALE, BLOCK, 100)

    acc = first_half(acc)  # 64
    if ROWS < 64:
        acc = first_half(acc)
    if ROWS < 32:
        acc = first_half(acc)
    acc = tl.trans(acc)
    row = tl.arange(0, ROWS)[:, None]
    col = tile * _TILE + tl.arange(0, _TILE)[None, :]
    tl.store(out_ptr + ((split * batches + batch) * m + row) * n + col, acc, mask=(row < m) & (col < n))


def _serves(p: Problem) -> bool:
    """Whether A has at most 64 rows, statically, and both operands are block-scaled with swizzled scales.

    A model compares the alternatives; none was timed on SM100 (B200: 8 TB/s, 148 multiprocessors, 1.85 GHz). Almost all
    bytes are of B, 0.56 per element of NVFP4, so the rate of requests for B decides.

    - The library, which ranks next. A multiprocessor takes at most 64 bytes a clock from the L2 cache, 118 GB/s: 68
      multiprocessors are needed to read at 8 TB/s. A weight of 4096 rows has 32 tiles of 128, which read at less than
      half of that rate unless K is split. Whether the library splits K is not documented. So the library computes
      matmuls that need no split: the columns alone give each multiprocessor a tile, or K is a single step.
    - `gemv` and `skinny`, which dequantise B in registers. At 8 TB/s each scheduler of a multiprocessor has 315 clocks
      for 2304 bytes of B, and issues at most one instruction a clock. By the machine code `gemv` takes 257 to 310
      instructions of a warp for them and `skinny` 455; this kernel takes 170.
    """
    if p.ragged or not 100 <= p.target.sm < 120 or "none" in (p.a.scale, p.b.scale):
        return False
    if not (p.a.swizzled and p.b.swizzled and statically_true(p.m <= SKINNY_BLOCK_SCALED_ROWS)):
        return False
    return skinny_block_scaled_config(p).split_k > 1 or not library.BLOCK_SCALED.serves(p)


def _run_group(calls: Sequence[Call], config: SkinnyBlockScaledConfig) -> list[torch.Tensor]:
    """[batches, m, n] of each call: in one launch, and one more launch for each call that adds its sums."""
    p, split_k, first = calls[0].problem, config.split_k, calls[0]
    each = [call.empty_sums(split_k) for call in calls]
    pointers = [x for call, sums in zip(calls, each, strict=True) for x in (call.b.data, call.b.scales, sums)]
    unused = MOST_IN_GROUP - len(calls)
    sizes = [call.problem.n for call in calls]
    blocks = ceil_div(p.k, p.a.format.block_cols)
    even = statically_true(blocks * p.a.format.block_cols % config.bk == 0)
    launch(
        gemm_skinny_block_scaled_sm100, sum(ceil_div(n, 128) for n in sizes) * p.batches * split_k,
        first.a.data, first.a.scales, *pointers, *[each[0]] * 3 * unused,
        p.batches, p.m, *sizes, *[1] * unused, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.k, config.bk),
        ceil_div(blocks, 4), split_k, num_warps=config.num_warps,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.a.format.block_cols,
        B_BATCHED=int(p.b_batched), GROUP_SIZE=len(calls), EVEN_K=int(even),
        LAUNCH_DEPENDENTS=int(p.target.dependent_launch), **config.constants,
    )  # fmt: skip
    return [reduce_split_k(call, sums, split_k, pdl=p.target.dependent_launch)
            for call, sums in zip(calls, each, strict=True)]  # fmt: skip


def _group_with(p: Problem) -> tuple | None:
    return in_common(p) if p.batches == 1 else None


CANDIDATE = Candidate(
    "skinny_block_scaled_sm100", "native", _serves, skinny_block_scaled_config,
    lambda call, config: _run_group([call], config)[0], takes_epilogue=lambda p: True,
    group_with=_group_with, run_group=_run_group,
)  # fmt: skip
