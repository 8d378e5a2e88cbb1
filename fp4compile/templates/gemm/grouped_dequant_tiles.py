"""Grouped dequant GEMM: the products of all groups in one launch, by the main loop of `gemm.dequant_tiles`.

Groups of rows: a program computes a tile of the rows of one group by columns of its matrix. The grid has as many
programs as any offsets need; a program finds the group of its tile from the offsets, and does nothing beyond the last
tile. Rows of no group form tiles, too, which are filled with zeros.
Groups along K: a program computes a tile of the product of one group, from its run of K.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.dequant_product import multiply_dequantized
from fp4compile.templates.device.dequantize import bytes_per_unit
from fp4compile.templates.device.epilogue import rescale, rescale_mode, store_rounded
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane, rows_of_group
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import DequantTilesConfig, grouped_tiles_config
from fp4compile.templates.launch import launch


@triton.jit
def from_column(
    ptr, scales_ptr, row, padded_tile, ELEMENT: tl.constexpr, SWIZZLED: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Pointers to the first elements and scales of a group along K: its first row or (PADDED) tile of 128 rows."""
    if ELEMENT == "plain":
        return ptr + (padded_tile * 128 if PADDED else row), scales_ptr
    else:
        codes = ptr + padded_tile * (64 * bytes_per_unit(ELEMENT))
        return codes, scales_ptr + padded_tile * (128 // BLOCK // 4 * 512 if SWIZZLED else 128 // BLOCK)


@triton.jit
def columns_of(length, units, ELEMENT: tl.constexpr, PADDED: tl.constexpr):
    """Units of a group's columns; for a plain operand, elements, with the padding if PADDED."""
    if ELEMENT == "plain":
        return 2 * units if PADDED else length
    else:
        return units


@triton.jit
def gemm_dequant_tiles_grouped(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, offs_ptr, out_ptr, wanted_ptr,
    rows, m, n, units, blocks, a_per_row, b_per_row, b_scales_batch,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_OUTER: tl.constexpr, A_ALIGN: tl.constexpr, A_PADDED: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_OUTER: tl.constexpr, B_ALIGN: tl.constexpr, B_PADDED: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr, GROUPS: tl.constexpr, ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, GROUP_M: tl.constexpr,
    STAGES: tl.constexpr, GUARD: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out: [rows, n] or (ALONG_K) [GROUPS, m, n].

    a, b: [rows, K] and [GROUPS, n, K], or [m, W] and [n, W]; offs: int32 [GROUPS]. units, blocks, *_per_row, *_ALIGN:
    as in `gemm_dequant_tiles`, of K or W. b_scales_batch: bytes of scales of one matrix of B. *_OUTER "tensor": one
    outer scale; "group": [GROUPS]; "row": of A [rows], or [GROUPS, m]; of B [GROUPS, n].
    *_PADDED: see `Problem`. GUARD: do nothing unless the int32 at wanted_ptr is set.
    """
    if GUARD:  # noqa: SIM102 (the pointer is read only then)
        if tl.load(wanted_ptr) == 0:
            return
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    program = tl.program_id(0)
    tiles_n = tl.cdiv(n, BN)
    if ALONG_K:
        tiles_m = tl.cdiv(m, BM)
        group = program // (tiles_m * tiles_n)
        tile_m, tile_n = grouped_tile(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        first, end, padded_tile = rows_of_group(before, offs, rows, group, 128, GROUPS)
        # Codes and scales are zero up to whole tiles of 128 rows, so that these bounds are known to be multiples.
        length = end - first
        units = tl.cdiv(length, 128) * 64
        block_cols = tl.cdiv(length, 128) * (128 // BLOCK)
        used_blocks = tl.cdiv(length, BLOCK)
        a_cols = columns_of(length, units, A_ELEMENT, A_PADDED)
        b_cols = columns_of(length, units, B_ELEMENT, B_PADDED)
        a_ptr, a_scales_ptr = from_column(a_ptr, a_scales_ptr, first, padded_tile, A_ELEMENT, A_SWIZZLED, BLOCK,
                                          A_PADDED)  # fmt: skip
        b_ptr, b_scales_ptr = from_column(b_ptr, b_scales_ptr, first, padded_tile, B_ELEMENT, B_SWIZZLED, BLOCK,
                                          B_PADDED)  # fmt: skip
        tile_row = tile_m * BM
        out_row = group.to(tl.int64) * m
        matrix = group
        steps = tl.cdiv(units, UNITS * WARPS)
    else:
        tile_m, tile_n = grouped_tile(program, rows // BM + GROUPS + 1, tiles_n, GROUP_M)
        group, first, end, row0 = group_of_tile(before, offs, rows, tile_m, BM, GROUPS)
        if row0 >= end:
            return
        block_cols = blocks
        used_blocks = blocks
        a_cols = a_per_row
        b_cols = b_per_row
        tile_row = row0 - first
        m = end - first
        out_row = first.to(tl.int64)
        a_ptr += out_row * a_per_row * bytes_per_unit(A_ELEMENT)
        if A_SWIZZLED:
            _, _, padded_tile = rows_of_group(before, offs, rows, group, 128, GROUPS)
            a_scales_ptr += padded_tile.to(tl.int64) * tl.cdiv(blocks, 4) * 512
        else:
            a_scales_ptr += out_row * blocks
        matrix = tl.minimum(group, GROUPS - 1)
        b_ptr += matrix.to(tl.int64) * n * b_per_row * bytes_per_unit(B_ELEMENT)
        b_scales_ptr += matrix.to(tl.int64) * b_scales_batch
        steps = tl.where(group < GROUPS, tl.cdiv(units, UNITS * WARPS), 0)

    row = tile_row + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    acc = multiply_dequantized(
        a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, row, col, m, n, 0, steps,
        a_cols, a_per_row, b_cols, b_per_row, block_cols, blocks, used_blocks,
        A_ELEMENT, A_SCALE, A_SQUARE, A_SWIZZLED, A_ALIGN, B_ELEMENT, B_SCALE, B_SQUARE, B_SWIZZLED, B_ALIGN,
        BLOCK, COMPUTE, UNITS, WARPS, STAGES, ALONG_K, ISA,
    )  # fmt: skip
    if A_OUTER == "group":
        a_outer_ptr += matrix
    elif A_OUTER == "row":
        a_outer_ptr += out_row
    if B_OUTER == "group":
        b_outer_ptr += matrix
    elif B_OUTER == "row":
        b_outer_ptr += matrix.to(tl.int64) * n
    row = row[:, None]
    col = col[None, :]
    acc = rescale(acc, row, col, m, n, 0, a_outer_ptr, b_outer_ptr, out_ptr, rescale_mode(A_OUTER),
                  rescale_mode(B_OUTER), 0, 0)  # fmt: skip
    acc = tl.where(group < GROUPS, acc, 0.0)  # an outer scale that is not finite would give NaN
    store_rounded(out_ptr, (out_row + row) * n + col, acc, (row < m) & (col < n), ISA)


def run(
    call: Call,
    config: DequantTilesConfig,
    out: torch.Tensor | None = None,
    wanted: torch.Tensor | None = None,
) -> torch.Tensor:
    """The products of all groups, in one launch; written to `out`, and only if the int32 at `wanted` is set."""
    p = call.problem
    out = call.empty() if out is None else out
    tiles_m = ceil_div(p.m, config.bm) * p.groups if p.along_k else p.rows // config.bm + p.groups + 1
    a_scales, b_scales = (out if x.scales is None else x.scales for x in (call.a, call.b))  # `out` is never read
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))
    constants = {**call.a.constants("A", config.step), **call.b.constants("B", config.step), **config.constants}
    del constants["SPLIT"]  # K is not split: there are at least as many tiles as groups
    if p.along_k:  # where a group begins and ends is not known
        constants.update(A_ALIGN=0, B_ALIGN=0)
    launch(
        gemm_dequant_tiles_grouped, tiles_m * ceil_div(p.n, config.bn),
        call.a.data, a_scales, a_outer, call.b.data, b_scales, b_outer, call.offs, out,
        out if wanted is None else wanted, p.rows, p.m, p.n, ceil_div(p.padded_k, 2), ceil_div(p.padded_k, p.block),
        call.a.units_per_row, call.b.units_per_row, call.b.scale_bytes, num_warps=config.num_warps,
        **constants, BLOCK=p.block, COMPUTE=p.compute, GROUPS=p.groups, ALONG_K=p.along_k,
        A_PADDED=p.a_padded, B_PADDED=p.b_padded, GUARD=int(wanted is not None), ISA=p.target.isa,
    )  # fmt: skip
    return out


CANDIDATE = Candidate("grouped_dequant_tiles", "emulated", lambda p: p.ragged, grouped_tiles_config, run)
