"""Grouped GEMM of 16-bit operands that are dequantised in memory once, as in `gemm.dequant_operand`; for many rows.

An operand of dequantised values with an outer scale (`passes.fake_quantize`) is read as it is.

A tile of an operand is multiplied as often as the result has tiles beside it. `grouped_dequant_tiles` dequantises it
each time; this kernel reads it in 16 bits. If a single row tile, or hardly more, reads the matrix of a group, that does
not pay. Outer scales are applied to the sums in float32, before they are rounded.

The grid is persistent. Groups are found on the device, as in `grouped_dequant_tiles`. Operands are whole matrices to
the Tensor Memory Accelerator, so that two descriptors serve all groups:
- Groups of rows: a tile of A has 128 rows from a row of its group on. Rows beyond the group's end are multiplied as
  well and not stored. Rows of no group form tiles, too, which are filled with zeros.
- Groups along K: quantised groups are padded to 128 columns with zeros, so that no step has columns of two groups.

If an MX block has values that bf16 does not hold (a flag on the device), `grouped_dequant_tiles` computes again.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.templates.device.dequantize import INTERPRETING
from fp4compile.templates.device.epilogue import column_parts, rescale, rescale_mode, store_rounded
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane, rows_of_group, total_tiles
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm import grouped_dequant_tiles
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.heuristics import (
    GroupedDotConfig,
    dequantizes_in_memory,
    grouped_dot_config,
    grouped_tiles_config,
)
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two

# The ends of groups stay in registers beside the sums; the ends of 1024 groups would not fit.
MOST_GROUPS = 512


@triton.jit
def gemm_grouped(
    a_ptr, a_outer_ptr, b_ptr, b_outer_ptr, offs_ptr, out_ptr, rows, m, n, k, a_row, b_row,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, GROUPS: tl.constexpr, ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [rows, n] or (ALONG_K) [GROUPS, m, n]: program p takes tiles p, p + grid, and so on.

    a, b: bf16 or fp16, [m, k] and [GROUPS * n, k], or [m, k] and [n, k], with row strides a_row and b_row.
    offs: int32 [GROUPS]. *_OUTER: as in `gemm_dequant_tiles_grouped`. PARTS: parts of a tile's columns that are stored
    one by one. ALIGN: divides n. TMA: 1; the launch allocates memory for descriptors.
    """
    before = ()
    offs = ()
    for i in tl.static_range(per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        before = before + (tl.load(offs_ptr + number, mask=exists, other=0),)
        number, exists = of_lanes(i, GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    n = n // ALIGN * ALIGN  # changes nothing, but shows the compiler how wide it may store
    b_rows = n if ALONG_K else GROUPS * n
    a_source = tl.make_tensor_descriptor(a_ptr, [m, k], [a_row, 1], [BM, BK])
    b_source = tl.make_tensor_descriptor(b_ptr, [b_rows, k], [b_row, 1], [BN, BK])
    tiles_n = tl.cdiv(n, BN)
    if ALONG_K:
        tiles_m = tl.cdiv(m, BM)
        tiles = GROUPS * tiles_m * tiles_n
    else:
        tiles_m = total_tiles(before, offs, rows, BM)
        tiles = tiles_m * tiles_n

    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not ALONG_K):
        if ALONG_K:
            group = tile // (tiles_m * tiles_n)
            tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
            first, end, padded_tile = rows_of_group(before, offs, rows, group, 128, GROUPS)
            steps = tl.cdiv(end - first, 128) * (128 // BK)
            k0 = padded_tile * 128
            row0 = tile_m * BM
            end = m
            matrix = group
            b_row0 = tile_n * BN
        else:
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            group, _, end, row0 = group_of_tile(before, offs, rows, tile_m, BM, GROUPS)
            steps = tl.cdiv(k, BK)
            k0 = 0
            matrix = tl.minimum(group, GROUPS - 1)
            b_row0 = matrix * n + tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            a = a_source.load([row0, k0 + step * BK])
            b = b_source.load([b_row0, k0 + step * BK])
            if INTERPRETING:  # the interpreter has no bf16 product, and float32 holds the same values
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, tl.trans(b), acc)

        out_row0 = matrix.to(tl.int64) * m if ALONG_K else tl.cast(0, tl.int64)
        a_outer = a_outer_ptr
        b_outer = b_outer_ptr
        if A_OUTER == "group":
            a_outer += matrix
        elif A_OUTER == "row":
            a_outer += out_row0
        if B_OUTER == "group":
            b_outer += matrix
        elif B_OUTER == "row":
            b_outer += matrix.to(tl.int64) * n
        row = (row0 + tl.arange(0, BM))[:, None]
        part_cols: tl.constexpr = BN // PARTS
        parts = column_parts(acc, PARTS)
        for i in tl.static_range(PARTS):
            col = (tile_n * BN + i * part_cols + tl.arange(0, part_cols))[None, :]
            part = rescale(parts[i], row, col, end, n, 0, a_outer, b_outer, out_ptr, rescale_mode(A_OUTER),
                           rescale_mode(B_OUTER), 0, 0)  # fmt: skip
            part = tl.where(group < GROUPS, part, 0.0)
            store_rounded(out_ptr, (out_row0 + row) * n + col, part, (row < end) & (col < n), ISA)


def computes(p: Problem) -> bool:
    """Whether 16 bits hold the operands' values, and TMA copies their rows, which must be whole 16 bytes.

    Groups along K must be padded, as groups of quantised operands are.
    """
    linear = _linear(p.a, p.m) and _linear(p.b, p.n)
    whole = statically_true(p.padded_k % 8 == 0) and statically_true(p.padded_k > 0)
    return p.compute != "fp32" and linear and whole and p.a_padded and p.b_padded


def _serves(p: Problem) -> bool:
    """Groups of many rows (`dequantizes_in_memory`), and not too many groups; GPUs from Ampere to Hopper."""
    few = p.ragged and p.groups <= MOST_GROUPS
    return 80 <= p.target.sm < 100 and few and dequantizes_in_memory(p) and computes(p)


def _linear(x: OperandSpec, rows) -> bool:
    """Whether the block scales of an operand's matrices, each of `rows` rows, lie like the scales of one matrix."""
    square = x.format is not None and x.format.square
    return not x.swizzled and (not square or statically_true(rows % x.format.block[0] == 0))


def run(call: Call, config: GroupedDotConfig) -> torch.Tensor:
    """Dequantise both operands, then the products of all groups in one launch."""
    p, out = call.problem, call.empty()
    checked = "e8m0" in (p.a.scale, p.b.scale)
    inexact = call.offs.new_zeros(()) if checked else call.offs  # or never read
    b_rows = p.n if p.along_k else p.groups * p.n
    ends = call.offs if checked and not p.along_k else None
    a = dequantized(call.a, p.m, p.padded_k, p.compute_dtype, p.target, inexact, ends)
    b = dequantized(call.b, b_rows, p.padded_k, p.compute_dtype, p.target, inexact)
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))  # `out` is never read
    tiles_m = p.groups * ceil_div(p.m, config.bm) if p.along_k else p.rows // config.bm + p.groups + 1
    launch(
        gemm_grouped, torch.sym_min(tiles_m * ceil_div(p.n, config.bn), p.target.multiprocessors),
        a, a_outer, b, b_outer, call.offs, out, p.rows, p.m, p.n, p.padded_k, a.stride(0), b.stride(0),
        num_warps=config.num_warps, A_OUTER=p.a.outer, B_OUTER=p.b.outer, GROUPS=p.groups, ALONG_K=p.along_k,
        ALIGN=power_of_two(p.n, 16), TMA=1, ISA=p.target.isa, **config.constants,
    )  # fmt: skip
    if checked:
        grouped_dequant_tiles.run(call, grouped_tiles_config(p), out, wanted=inexact)
    return out


CANDIDATE = Candidate(
    "grouped_dequant_operand", "emulated", _serves, grouped_dot_config, run, dequantizes_a=True, dequantizes_b=True
)
