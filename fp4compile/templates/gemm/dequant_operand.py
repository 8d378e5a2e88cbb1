"""Dequantise operands to 16 bits in memory, without global or row scales, and multiply them: for many rows.

Without groups the library multiplies. Groups share a Triton kernel: torch's `_grouped_mm` rounds its sums before global
or row scales could be applied, takes only bfloat16, and before compute capability 9.0 reads the offsets on the host.

Each tile of an operand is read by a whole row or column of result tiles. `dequant_tiles` dequantises it each time; here
it is read in 16 bits. That does not pay where only one or two row tiles read the matrix of a group. An operand of
dequantised values with a global or row scale (`passes.fake_quantize`) is read directly. The scales are applied to the
sums in float32, before rounding.

The grid of groups is persistent. Groups are found on the device, as in `dequant_tiles`. Descriptors of the Tensor
Memory Accelerator cover whole matrices, so two serve all groups:
- Groups of rows: a tile of A has 128 rows from a row of its group on. Rows beyond the group's end are multiplied and
  not stored. Rows of no group form tiles, too, which are filled with zeros.
- Groups along K: quantised groups are padded to 128 columns with zeros, so that no step has columns of two groups.

If an MX block has values that bfloat16 does not hold (a flag on the device), `dequant_tiles` computes again.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats import float32_sums
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.templates.device.apply_epilogue import column_parts, rescale, rescale_mode, store_rounded
from fp4compile.templates.device.dequantized_tile import INTERPRETING
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane, rows_of_group, total_tiles
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm import dequant_tiles
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.dequantized import dequantized
from fp4compile.templates.gemm.split_k import reduce_split_k
from fp4compile.templates.launch import LaunchConfig, launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two
from fp4compile.templates.writes import writes

# Rows of A from which on this is faster than `dequant_tiles`. On an H200 with N = K = 8192, 128 rows take 90 us by the
# library and 146 us (codes) to 191 us (plain A) in one kernel, 2048 rows 410 us and 870 us. `wgmma_sm90` is faster than
# both: 128 rows take 35 us on an H100, and 116 us by the library; 8192 rows 1646 us and 1764 us.
LIBRARY_ROWS = 65
# The ends of groups stay in registers beside the sums; the ends of 1024 groups would not fit.
MOST_GROUPS = 512
# Average number of row tiles of 128 per group up to which each tile dequantises the matrix of its group. Groups of
# unequal sizes have half a tile more each. Microseconds on an H200 for dequantisation in the main loop and in memory,
# for DeepSeek-V3, Llama-4 and Qwen3-30B-A3B: with 64 tokens an expert 137 and 178, 530 and 900, 202 and 353; with 128
# tokens 246 and 185, 968 and 943, 373 and 405; with 256 tokens 358 and 266, 1587 and 1120, 623 and 499
# (benchmarks/results/grouped_mm_h200.json).
TILES_IN_REGISTERS = 1
# Rows of a group along K, on average, from which on operands are dequantised in memory (`LIBRARY_ROWS`): a whole row or
# column of result tiles reads an operand, however few rows a group has.
MANY_ROWS = 65


@dataclass(frozen=True)
class GroupedDotConfig(LaunchConfig):
    """The launch configuration of `gemm_grouped`.

    bm, bn: the tile of the result. bk: elements of a step along K, which divide 128. stages: pipeline stages. parts:
    parts of a tile's columns that are stored one by one. num_warps: warps of a program. group_m: row tiles that are
    scheduled together, so that they share the L2 cache.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    parts: int
    num_warps: int
    group_m: int = 8


def least_rows_in_memory(p: Problem) -> int:
    """The number of rows of all groups from which on operands are dequantised in memory."""
    return MANY_ROWS * p.groups if p.along_k else TILES_IN_REGISTERS * TILE_ROWS * p.groups + 1


def grouped_dot_config(p: Problem) -> GroupedDotConfig:
    """128 x 256 tiles where shared memory holds their stages, else 128 x 128.

    A multiprocessor of Hopper computes 2048 products of 16-bit numbers per clock. A step of a 128 x 256 tile takes 1024
    clocks and reads 48 KB, 48 bytes a clock; a step of a 128 x 128 tile takes 512 clocks and reads 32 KB.
    """
    if p.target.shared_memory < 200 * 1024:
        return GroupedDotConfig(128, 128, 32, stages=3, parts=4, num_warps=8)
    return GroupedDotConfig(128, 256, 64, stages=4, parts=8, num_warps=8)


@writes("out_ptr")
@triton.jit
def gemm_grouped(
    a_ptr, a_outer_ptr, b_ptr, b_outer_ptr, offs_ptr, out_ptr, rows, m, n, k, a_row, b_row,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, GROUPS: tl.constexpr, ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    PARTS: tl.constexpr, ALIGN: tl.constexpr, TMA: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [rows, n] or (ALONG_K) [GROUPS, m, n]: program p takes tiles p, p + grid, and so on.

    a, b: bf16 or fp16, [m, k] and [GROUPS * n, k], or [m, k] and [n, k], with row strides a_row and b_row.
    offs: int32 [GROUPS]. *_OUTER: as in `gemm_dequant_tiles`. PARTS: parts of a tile's columns that are stored
    one by one. ALIGN: divides n. TMA: 1; the launch allocates memory for descriptors.
    """
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
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
        tiles_m = total_tiles(offs, rows, BM)
        tiles = tiles_m * tiles_n

    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=not ALONG_K):
        if ALONG_K:
            group = tile // (tiles_m * tiles_n)
            tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
            first, end, padded_tile = rows_of_group(offs, rows, group, 128, GROUPS)
            steps = tl.cdiv(end - first, 128) * (128 // BK)
            k0 = padded_tile * 128
            row0 = tile_m * BM
            end = m
            matrix = group
            b_row0 = tile_n * BN
        else:
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            group, _, end, row0 = group_of_tile(offs, rows, tile_m, BM, GROUPS)
            steps = tl.cdiv(k, BK)
            k0 = 0
            matrix = tl.minimum(group, GROUPS - 1)
            b_row0 = matrix * n + tile_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, steps, num_stages=STAGES):
            a = a_source.load([row0, k0 + step * BK])
            b = b_source.load([b_row0, k0 + step * BK])
            if INTERPRETING:  # the interpreter has no bf16 matmul, and float32 represents the same values
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


def _serves(p: Problem) -> bool:
    if p.ragged:
        few = p.groups <= MOST_GROUPS and statically_true(p.rows >= least_rows_in_memory(p))
        return 80 <= p.target.sm < 100 and few and computes_groups(p)
    large = statically_true(p.m >= LIBRARY_ROWS) and statically_true(p.n >= 512)
    return p.target.sm > 0 and p.batches == 1 and large and _in_16_bits(p)


def computes_groups(p: Problem) -> bool:
    """Whether 16 bits represent the operands, and rows are multiples of 16 bytes, which TMA copies.

    Groups along K must be padded, as groups of quantised operands are.
    """
    linear = _linear(p.a, p.m) and _linear(p.b, p.n)
    whole = statically_true(p.padded_k % 8 == 0) and statically_true(p.padded_k > 0)
    return _in_16_bits(p) and linear and whole and p.a_padded and p.b_padded


def _in_16_bits(p: Problem) -> bool:
    """Whether the operands are multiplied in 16 bits, which hold their values.

    Weights with float32 block scales, beside bfloat16 activations and for a result in bfloat16, are rounded to
    bfloat16, as those of a dequantised model are. `dequant_tiles`, which scales sums instead, takes 4524 microseconds
    for 8192 rows and 8192 x 8192 weights on an H200, bf16 1441.
    """
    rounded = p.a.format is None and p.compute == "bf16" and p.spec.out_dtype == torch.bfloat16
    return p.compute != "fp32" and (rounded or not p.scales_sums)


def _linear(x: OperandSpec, rows) -> bool:
    """Whether the block scales of an operand's matrices, each of `rows` rows, have the layout of one matrix."""
    square = x.format is not None and x.format.square
    return not x.swizzled and (not square or statically_true(rows % x.format.block[0] == 0))


def _checked(p: Problem) -> bool:
    """Whether dequantised values may be too small for bfloat16, as those of MX blocks may.

    The kernel that dequantises sets a flag where it meets such values, and `dequant_tiles` then computes the matmul
    again.
    """
    return "e8m0" in (p.a.scale, p.b.scale)


def _direct(p: Problem) -> bool:
    """Whether the library writes the result itself: no rescale follows, and addmm adds the bias."""
    dtype = p.compute_dtype
    return (p.a.outer, p.b.outer, p.spec.out_dtype) == ("none", "none", dtype) and p.spec.bias in (None, dtype)


def _configure(p: Problem) -> GroupedDotConfig | None:
    return None if not p.ragged else grouped_dot_config(p)


def run(call: Call, config: GroupedDotConfig | None) -> torch.Tensor:
    """Dequantise both operands and multiply them; again by `dequant_tiles` if a flag on the device shows lost bits."""
    p = call.problem
    checked, b_rows = _checked(p), p.groups * p.n if p.by_rows else p.n
    inexact = call.a.data.new_zeros((), dtype=torch.int32) if checked else call.a.data  # or never read
    ends = call.offs if checked and p.by_rows else None
    a = dequantized(call.a, p.m, p.padded_k, p.compute_dtype, p.target, inexact, ends)
    b = dequantized(call.b, b_rows, p.padded_k, p.compute_dtype, p.target, inexact)
    out = _by_library(call, a, b) if config is None else _of_groups(call, config, a, b)
    return dequant_tiles.run(call, dequant_tiles.dequant_tiles_config(p), out, wanted=inexact) if checked else out


def _by_library(call: Call, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not _direct(call.problem):
        return reduce_split_k(call, float32_sums.mm(a, b.t()), 1)
    with torch.autocast("cuda", enabled=False):  # autocast would cast fp16 operands to bf16
        return torch.mm(a, b.t()) if call.bias is None else torch.addmm(call.bias, a, b.t())


def _of_groups(call: Call, config: GroupedDotConfig, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    p, out = call.problem, call.empty()
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))  # `out` is never read
    tiles_m = p.groups * ceil_div(p.m, config.bm) if p.along_k else p.rows // config.bm + p.groups + 1
    launch(
        gemm_grouped, torch.sym_min(tiles_m * ceil_div(p.n, config.bn), p.target.multiprocessors),
        a, a_outer, b, b_outer, call.offs, out, p.rows, p.m, p.n, p.padded_k, a.stride(0), b.stride(0),
        num_warps=config.num_warps, A_OUTER=p.a.outer, B_OUTER=p.b.outer, GROUPS=p.groups, ALONG_K=p.along_k,
        ALIGN=power_of_two(p.n, 16), TMA=1, ISA=p.target.isa, **config.constants,
    )  # fmt: skip
    return out


CANDIDATE = Candidate(
    "dequant_operand", "emulated", _serves, _configure, run,
    # The library cannot apply an epilogue, and tiles that are computed again must not apply it twice.
    takes_epilogue=lambda p: not p.ragged and not _direct(p) and not _checked(p),
    dequantizes_a=True, dequantizes_b=True,
)  # fmt: skip
