"""Block-scaled GEMM: two block-scaled operands on matrix units that read codes and scales themselves (SM100 and up).

The matrix units take the codes as they are stored, and block scales in the swizzled layout, one for each row and block.
The quantise kernels write them like that, also for square blocks. Outer scales, bias and epilogue are applied to the
float32 sums, as in all kernels of products.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.layouts import ceil_div
from fp4compile.templates.device.dequantize import INTERPRETING, dequantize
from fp4compile.templates.device.epilogue import epilogue, rescale, store_rounded
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import BlockScaledConfig, block_scaled_config
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.launch import launch


@triton.constexpr_function
def codes_in(elements, ELEMENT):
    """Bytes of the codes of so many elements."""
    return elements // 2 if ELEMENT == "e2m1" else elements


@triton.jit
def _load_codes(ptr, row, col, rows, per_row, EVEN_K: tl.constexpr):
    """Bytes of codes of a tile; zeros outside of [rows, per_row]. EVEN_K: a row is whole steps of the loop."""
    mask = row < rows
    if not EVEN_K:
        mask = mask & (col < per_row)
    return tl.load(ptr + row.to(tl.int64) * per_row + col, mask=mask, other=0)


@triton.jit
def _load_swizzled(ptr, row_tile, col_tile, row_tiles, col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Scale bytes [ROWS, COLS] of the swizzled layout, by whole tiles of 128 x 4 that are permuted afterwards."""
    r = row_tile + tl.arange(0, ROWS // 128)[:, None, None]
    c = col_tile + tl.arange(0, COLS // 4)[None, :, None]
    byte = tl.arange(0, 512)[None, None, :]
    at = (r.to(tl.int64) * col_tiles + c) * 512 + byte
    tiles = tl.load(ptr + at, mask=(r < row_tiles) & (c < col_tiles), other=0)
    tiles = tl.reshape(tiles, (ROWS // 128, COLS // 4, 32, 4, 4))
    return tl.reshape(tl.permute(tiles, (0, 3, 2, 1, 4)), (ROWS, COLS))


@triton.jit
def _values(units, byte, BLOCK: tl.constexpr):
    """The float32 values [rows, elements] of NVFP4 codes and scales of a tile; for the interpreter."""
    first, second = dequantize(units, byte, tl.float32, "e2m1", "e4m3", BLOCK, "fp32", False, 0)
    return tl.reshape(tl.join(first, second), (units.shape[0], 2 * units.shape[1]))


@triton.jit
def gemm_block_scaled_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, m, n, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    EVEN_K: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out [batch, m, n] = a [batch, m, K] x b [batch or 1, n, K]^T, rescaled, plus a bias.

    *_per_row: bytes of codes in a row. steps: of BK elements along K. row_tiles_*, col_tiles: tiles of 128 x 4 of the
    swizzled scales. GROUP_M: row tiles that are walked together, for the L2 cache. EVEN_K: K is whole steps.
    """
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    program = tl.program_id(0)
    batch = program // (tiles_m * tiles_n)
    program = program % (tiles_m * tiles_n)
    group = program // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (program % (GROUP_M * tiles_n)) % in_group
    tile_n = (program % (GROUP_M * tiles_n)) // in_group
    row = (tile_m * BM + tl.arange(0, BM))[:, None]
    col = (tile_n * BN + tl.arange(0, BN))[:, None]

    batch = batch.to(tl.int64)
    a_ptr += batch * m * a_per_row
    a_scales_ptr += batch * row_tiles_a * col_tiles * 512
    if B_BATCHED:
        b_ptr += batch * n * b_per_row
        b_scales_ptr += batch * row_tiles_b * col_tiles * 512
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    blocks: tl.constexpr = BK // BLOCK
    a_col = tl.arange(0, a_bytes)[None, :]
    b_col = tl.arange(0, b_bytes)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        a = _load_codes(a_ptr, row, step * a_bytes + a_col, m, a_per_row, EVEN_K)
        b = _load_codes(b_ptr, col, step * b_bytes + b_col, n, b_per_row, EVEN_K)
        a_scale = _load_swizzled(a_scales_ptr, tile_m * (BM // 128), step * (blocks // 4), row_tiles_a, col_tiles,
                                 BM, blocks)  # fmt: skip
        b_scale = _load_swizzled(b_scales_ptr, tile_n * (BN // 128), step * (blocks // 4), row_tiles_b, col_tiles,
                                 BN, blocks)  # fmt: skip
        if SCALE == "e4m3" and not INTERPRETING:
            a_scale = a_scale.to(tl.float8e4nv, bitcast=True)
            b_scale = b_scale.to(tl.float8e4nv, bitcast=True)
        if SCALE == "e4m3" and INTERPRETING:  # the interpreter's dot_scaled takes every scale for E8M0
            acc = tl.dot(_values(a, a_scale, BLOCK), tl.trans(_values(b, b_scale, BLOCK)), acc)
        else:
            acc = tl.dot_scaled(a, a_scale, A_ELEMENT, tl.trans(b), b_scale, B_ELEMENT, acc)

    out_col = tl.reshape(col, (1, BN))
    acc = rescale(acc, row, out_col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, B_BATCHED)
    at = (batch * m + row) * n + out_col
    mask = (row < m) & (out_col < n)
    acc = epilogue(acc, at, out_col, mask, n, epilogue_0_ptr, epilogue_1_ptr, ISA)
    store_rounded(out_ptr, at, acc, mask, ISA)


def _serves(p: Problem) -> bool:
    """Two block-scaled operands with swizzled scales. Triton has no block-scaled product of mixed widths on SM120."""
    if not p.target.block_scaled_matrix_units or p.a.format is None or p.b.format is None or p.a.format.scale is None:
        return False
    mixed = p.a.format.packed != p.b.format.packed
    return p.a.swizzled and p.b.swizzled and not (mixed and p.target.sm >= 120)


def _run(call: Call, config: BlockScaledConfig) -> torch.Tensor:
    p = call.problem
    blocks = ceil_div(p.k, p.a.format.block_cols)
    even = statically_true(blocks * p.a.format.block_cols % config.bk == 0)
    out = call.empty()
    a_outer, b_outer, bias = call.rescale_pointers(out)
    launch(
        call.with_epilogue(gemm_block_scaled_sm100), ceil_div(p.m, config.bm) * ceil_div(p.n, config.bn) * p.batches,
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, bias, out,
        *call.epilogue_pointers(out), p.m, p.n, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.k, config.bk),
        ceil_div(p.m, 128), ceil_div(p.n, 128), ceil_div(blocks, 4), num_warps=config.num_warps,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.a.format.block_cols,
        EVEN_K=int(even), **config.constants, **call.rescale_constants, ISA=p.target.isa,
    )  # fmt: skip
    return out


CANDIDATE = Candidate(
    "block_scaled_sm100", "native", _serves, block_scaled_config, _run, takes_epilogue=lambda p: True, any_rows=True
)
