"""Dequant GEMM: the matmul of any two operands, dequantised in registers, on 16-bit matrix units, summed in float32.

It serves all remaining problems: few rows of A and of groups, batches, plain float32 operands, and MX blocks whose
values bfloat16 does not represent. A program computes a tile of the transposed result [BN, BM]: B is the first operand
of the matrix instruction, A the second. So few rows of A fill the narrow side of the instruction, and codes of B are
dequantised directly to registers, which may hold the first operand. WARPS > 1 splits K among the warps of a program, as
a batch of matmuls whose sums are added at the end. SPLIT > 1 splits K among programs (`split_k`).

Groups of rows: the grid is large enough for all offsets; a program finds the group of its tile from the offsets, and
exits beyond the last tile. Rows of no group form tiles, too, which are filled with zeros. Groups along K: a program
computes a tile of the matmul of one group, from its run of K.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.product_spec import OperandSpec, ProductSpec
from fp4compile.hardware import Target
from fp4compile.templates.device.apply_epilogue import epilogue, rescale, rescale_mode, store_rounded
from fp4compile.templates.device.block_scales import decode_scale, scale_bits
from fp4compile.templates.device.dequantized_tile import (
    TINY,
    bytes_per_unit,
    dequantize,
    load_scales,
    load_units,
    repeat_scales,
    shift_of,
)
from fp4compile.templates.device.groups import group_of_tile, of_lanes, per_lane, rows_of_group
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.split_k import reduce_split_k
from fp4compile.templates.launch import LaunchConfig, launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import writes


@dataclass(frozen=True)
class DequantTilesConfig(LaunchConfig):
    """The launch configuration of `dequant_tiles`.

    bm, bn: the tile of the result. units, warps: a step along K has `warps` shares of `units` units (element pairs).
    stages: pipeline stages. num_warps: warps of a program. split_k: parts of K, whose partial sums another kernel adds.
    group_m: row tiles that are scheduled together, so that they share the L2 cache.
    """

    host = ("num_warps", "split_k")
    bm: int
    bn: int
    units: int
    warps: int
    stages: int
    num_warps: int
    split_k: int = 1
    group_m: int = 8

    @property
    def step(self) -> int:
        """Units of a step along K."""
        return self.units * self.warps

    @property
    def constants(self) -> dict[str, int]:
        return {**super().constants, "SPLIT": self.split_k}


# By A (plain 16-bit or packed codes) and its rows: columns of B, units and warps of a step, stages, num_warps, and
# how often programs fill the GPU (`_full`) before K is no longer split.
_FEW_ROWS = {
    ("plain", 8): (32, 128, 4, 3, 4, 1), ("packed", 8): (32, 128, 4, 4, 4, 1),
    ("plain", 16): (32, 64, 4, 4, 4, 1), ("packed", 16): (32, 128, 2, 5, 2, 1),
    ("plain", 32): (64, 32, 4, 5, 4, 1), ("packed", 32): (64, 64, 4, 5, 4, 1),
    ("plain", 64): (128, 32, 1, 4, 8, 2), ("packed", 64): (64, 64, 1, 4, 4, 4),
}  # fmt: skip


def _full(target: Target) -> int:
    """Programs that count as filling the GPU once.

    Weights mostly have a power of two rows, so on an H200 128 programs count as filling 132 multiprocessors. On a B200
    that would leave 20 of 148 idle.
    """
    return target.multiprocessors if target.sm >= 100 else target.multiprocessors * 32 // 33


def _dense_config(p: Problem) -> DequantTilesConfig:
    """The configuration, by the number of rows of A, the compute type, and the GPU's shared memory."""
    if p.target.sm == 0:
        if statically_true(p.m <= 8):  # so that the interpreter runs a split K as well
            return DequantTilesConfig(8, 16, 16, 2, 2, 4, split_k=2)
        return DequantTilesConfig(16, 16, 32, 1, 2, 4)
    if p.compute == "fp32":
        return DequantTilesConfig(32, 32, 16, 1, 2, 4)
    small = p.target.sm < 80 or p.target.sm in (86, 89, 120, 121)  # about 100 KB of shared memory
    if statically_true(p.m <= 64):
        return _few_rows(p, budget=90_000 if small else 216_000)
    return DequantTilesConfig(64, 128, 32, 1, 2, 8) if small else DequantTilesConfig(128, 128, 32, 1, 3, 8)


def _few_rows(p: Problem, budget: int) -> DequantTilesConfig:
    """The configuration for up to 64 rows of A. budget: bytes of shared memory for the tiles that are being loaded."""
    bm = next(rows for rows in (8, 16, 32, 64) if statically_true(p.m <= rows))
    a_bytes, b_bytes = p.a.unit_bytes, p.b.unit_bytes
    bn, units, warps, stages, num_warps, times = _FEW_ROWS["packed" if a_bytes == 1 else "plain", bm]
    full = _full(p.target)
    while bn > 16 and bm < 64 and not statically_true(ceil_div(p.n, bn) >= full):
        bn //= 2
    if b_bytes > 1:  # more registers per element
        units //= 2
    while units > 32 and (stages - 1) * warps * units * (bm * a_bytes + bn * b_bytes) > budget:
        units //= 2
    split_k = 1
    while (
        split_k < 8
        and statically_true(ceil_div(p.n, bn) * split_k < times * full)
        and statically_true(p.k >= 4 * split_k * units * warps)
    ):
        split_k *= 2
    return DequantTilesConfig(bm, bn, units, warps, stages, num_warps, split_k)


def dequant_tiles_config(p: Problem) -> DequantTilesConfig:
    """The configuration; for groups, that of a dense matmul with their average number of rows and all their tiles.

    A symbolic number of rows counts as large. There are as many stages as shared memory holds.
    """
    config = _config_of_groups(p) if p.ragged else _dense_config(p)
    if p.scales_sums:  # a share of a step is one block
        config = replace(config, units=p.block // 2)
        if 0 < p.target.sm < 90:  # where larger tiles spill registers
            config = replace(config, bm=min(config.bm, 64), bn=min(config.bn, 64), num_warps=min(config.num_warps, 4))
    step = config.bm * _row_bytes(p.a, config.step) + config.bn * _row_bytes(p.b, config.step)
    most = p.target.shared_memory // step + 1  # Triton loads one stage less than it has
    return replace(config, stages=max(2, min(config.stages, most)))


def _row_bytes(x: OperandSpec, units: int) -> int:
    """Bytes of so many units of a row of an operand, with the row's block scales."""
    codes = units * x.unit_bytes
    if x.format is None or x.format.scale is None:
        return codes
    return codes + ceil_div(2 * units, x.format.block_cols) * x.format.scale_dtype.itemsize


def _config_of_groups(p: Problem) -> DequantTilesConfig:
    m, k = (p.m, p.k // p.groups) if p.along_k else (p.m // p.groups, p.k)
    dense = Problem(ProductSpec(p.a, p.b, p.spec.out_dtype), m, p.n * p.groups, k, p.target)
    config = replace(_dense_config(dense), split_k=1)
    if config.warps > 1 and "e8m0" in (p.a.scale, p.b.scale):
        # The second loop, for blocks with small scales, also takes registers, which leaves room for fewer shares of K.
        shares = config.warps // 2 if config.bm <= 16 else 1
        config = replace(config, warps=shares, units=min(config.units, 64) if config.bm == 8 else 32)
    return config


@triton.jit
def _add(
    acc, a_units, a_byte, a_type: tl.constexpr, b_units, b_byte, b_type: tl.constexpr,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr, A_TINY: tl.constexpr, B_TINY: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """acc + b @ a^T over the last axis of both; the first axis is a batch if there are three.

    A_TINY, B_TINY: take only the operand's blocks that `dequantize` otherwise replaces by zeros, times 2^TINY.
    Scales of 32 bits, of the one block that the last axis is, are applied to the products.
    """
    sums = acc
    if scale_bits(A_SCALE) == 32 or scale_bits(B_SCALE) == 32:
        sums = tl.zeros_like(acc)
    b_parts = dequantize(b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, B_TINY, ISA)
    a_parts = dequantize(a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, A_TINY, ISA)
    for i in tl.static_range(2):
        a = tl.trans(a_parts[i]) if len(b_units.shape) == 2 else tl.permute(a_parts[i], (0, 2, 1))
        sums = tl.dot(b_parts[i], a, sums, input_precision="ieee")
    if scale_bits(B_SCALE) == 32:
        sums = sums * decode_scale(b_byte, B_SCALE, ISA)
    if scale_bits(A_SCALE) == 32:
        scale = decode_scale(a_byte, A_SCALE, ISA)
        sums = sums * (tl.trans(scale) if len(scale.shape) == 2 else tl.permute(scale, (0, 2, 1)))
    if scale_bits(A_SCALE) == 32 or scale_bits(B_SCALE) == 32:
        sums = acc + sums
    return sums


@triton.jit
def _load(
    ptr, scales_ptr, row, unit, block, rows, cols, per_row, block_cols, blocks,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """(Units, scale bytes) of a tile of one operand; bytes of 0 for an operand without block scales."""
    units = load_units(ptr, row, unit, rows, cols, per_row, ELEMENT, ALIGN)
    byte = 0
    if SCALE != "none":
        byte = load_scales(scales_ptr, row, block, rows, block_cols, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
    return units, byte


@triton.jit
def _any_tiny(units, byte, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the tile has a nonzero block that `dequantize` replaces by zeros."""
    if SCALE == "e8m0":
        found = (repeat_scales(byte.to(tl.int32), BLOCK // 2) < TINY) & (units != 0)
        return tl.max(tl.reshape(found.to(tl.int32), (found.numel,)), 0) > 0
    else:
        return False


@triton.jit
def _watched(byte, block, used, RAGGED: tl.constexpr):
    """Scale bytes, 255 from block number `used` on if RAGGED."""
    return tl.where(block < used, byte, 255) if RAGGED else byte


@triton.constexpr_function
def _block_shape(warps, rows, blocks):
    """Shape of a tile's block scales."""
    return (rows, blocks) if warps == 1 else (warps, rows, blocks)


@triton.jit
def _multiply(
    a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, row_m, row_n, m, n, start, stop,
    a_cols, a_per_row, b_cols, b_per_row, block_cols, blocks, used_blocks,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_ALIGN: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, COMPUTE: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr,
    RAGGED: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The matmul of the rows row_m [BM] of A [m, K] and row_n [BN] of B [n, K] in float32, [BM, BN], not rescaled.

    It covers the steps `start` to `stop` of K, each of WARPS shares of UNITS units (see `device.dequantized_tile`).
    a_cols, b_cols: units of K (plain: elements); block_cols: blocks of K. a_per_row, b_per_row: stride of rows of
    units (plain: elements). blocks: stride of rows of scales. *_ALIGN: see `load_units`.
    RAGGED: block scales from number used_blocks on belong to no element, and may be zero.
    """
    half: tl.constexpr = BLOCK // 2
    BM: tl.constexpr = row_m.shape[0]
    BN: tl.constexpr = row_n.shape[0]
    if WARPS == 1:
        m_row = row_m[:, None]
        n_row = row_n[:, None]
        unit = tl.arange(0, UNITS)[None, :]
        block = tl.arange(0, UNITS // half)[None, :]
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        warp = tl.arange(0, WARPS)[:, None, None]
        m_row = row_m[None, :, None]
        n_row = row_n[None, :, None]
        unit = warp * UNITS + tl.arange(0, UNITS)[None, None, :]
        block = warp * (UNITS // half) + tl.arange(0, UNITS // half)[None, None, :]
        acc = tl.zeros((WARPS, BN, BM), tl.float32)
    step_units: tl.constexpr = UNITS * WARPS
    step_blocks: tl.constexpr = UNITS * WARPS // half

    # The main loop treats blocks with scales below 2^(TINY - 127) as zeros, and tracks the smallest scales. If there
    # are such blocks, a second loop adds their products.
    a_watch: tl.constexpr = COMPUTE != "fp32" and A_SCALE == "e8m0"
    b_watch: tl.constexpr = COMPUTE != "fp32" and B_SCALE == "e8m0"
    smallest_a = tl.full(((1,) if not a_watch else _block_shape(WARPS, BM, UNITS // half)), 255, tl.int32)
    smallest_b = tl.full(((1,) if not b_watch else _block_shape(WARPS, BN, UNITS // half)), 255, tl.int32)
    a_type: tl.constexpr = a_ptr.dtype.element_ty
    b_type: tl.constexpr = b_ptr.dtype.element_ty
    for step in tl.range(start, stop, num_stages=STAGES):
        at = step * step_units + unit
        block_at = step * step_blocks + block
        b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_cols, b_per_row, block_cols, blocks,
                                B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
        a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_cols, a_per_row, block_cols, blocks,
                                A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
        acc = _add(acc, a_units, a_byte, a_type, b_units, b_byte, b_type, A_ELEMENT, A_SCALE, B_ELEMENT, B_SCALE,
                   BLOCK, COMPUTE, False, False, ISA)  # fmt: skip
        if a_watch:
            smallest_a = tl.minimum(smallest_a, _watched(a_byte.to(tl.int32), block_at, used_blocks, RAGGED))
        if b_watch:
            smallest_b = tl.minimum(smallest_b, _watched(b_byte.to(tl.int32), block_at, used_blocks, RAGGED))

    if a_watch or b_watch:
        smallest = tl.minimum(tl.min(tl.reshape(smallest_a, (smallest_a.numel,)), 0),
                              tl.min(tl.reshape(smallest_b, (smallest_b.numel,)), 0))  # fmt: skip
        if smallest < TINY:
            tiny = tl.zeros_like(acc)
            for step in tl.range(start, stop, num_stages=1):
                at = step * step_units + unit
                block_at = step * step_blocks + block
                b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_cols, b_per_row, block_cols,
                                        blocks, B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
                a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_cols, a_per_row, block_cols,
                                        blocks, A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
                if _any_tiny(a_units, a_byte, A_SCALE, BLOCK):
                    tiny = _add(tiny, a_units, a_byte, a_type, b_units, b_byte, b_type, A_ELEMENT, A_SCALE, B_ELEMENT,
                                B_SCALE, BLOCK, COMPUTE, True, False, ISA)  # fmt: skip
                if _any_tiny(b_units, b_byte, B_SCALE, BLOCK):
                    tiny = _add(tiny, a_units, a_byte, a_type, b_units, b_byte, b_type, A_ELEMENT, A_SCALE, B_ELEMENT,
                                B_SCALE, BLOCK, COMPUTE, False, True, ISA)  # fmt: skip
            # Products of two such blocks are omitted: they are below the smallest float32.
            acc = acc + tiny * 2.0**-TINY.value

    if WARPS > 1:
        acc = tl.sum(acc, 0)
    shift: tl.constexpr = shift_of(A_ELEMENT, A_SCALE, COMPUTE) + shift_of(B_ELEMENT, B_SCALE, COMPUTE)
    return tl.trans(acc * 2.0**shift)


@triton.jit
def _from_column(
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
def _columns_of(length, units, ELEMENT: tl.constexpr, PADDED: tl.constexpr):
    """Units of a group's columns; for a plain operand, elements, with the padding if PADDED."""
    if ELEMENT == "plain":
        return 2 * units if PADDED else length
    else:
        return units


@writes("out_ptr")
@triton.jit
def gemm_dequant_tiles(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, offs_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, wanted_ptr,
    rows, m, n, units, blocks, a_per_row, b_per_row, a_scales_batch, b_scales_batch,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_OUTER: tl.constexpr, A_ALIGN: tl.constexpr, A_PADDED: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_OUTER: tl.constexpr, B_ALIGN: tl.constexpr, B_PADDED: tl.constexpr, B_BATCHED: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr,
    GROUPS: tl.constexpr, ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, GUARD: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out, or (SPLIT > 1) of the partial sums [SPLIT, batch, m, n] in float32.

    GROUPS 0: out [batch, m, n] of a [batch, m, K] and b [batch or 1, n, K]. Else out [rows, n] of a [rows, K] and
    b [GROUPS, n, K], or (ALONG_K) out [GROUPS, m, n] of a [m, K] and b [n, K]; offs: int32 [GROUPS].
    K has `units` units (see `device.dequantized_tile`) and `blocks` blocks of BLOCK elements. a_per_row, b_per_row: row
    strides in units (plain: elements). *_scales_batch: bytes of scales of one matrix. *_OUTER "tensor": one global
    scale; "group": [GROUPS]; "row": one for each row of a or b, or (ALONG_K) for each group's. *_ALIGN: see
    `load_units`. *_PADDED: see `Problem`.
    UNITS: units along K of a warp's step. GROUP_M: row tiles that are scheduled together, for the L2 cache.
    GUARD: do nothing unless the int32 at wanted_ptr is set.
    """
    if GUARD:  # noqa: SIM102 (the pointer is read only then)
        if tl.load(wanted_ptr) == 0:
            return
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    tiles_n = tl.cdiv(n, BN)
    split = tl.program_id(0) % SPLIT
    program = tl.program_id(0) // SPLIT
    block_cols = blocks
    used_blocks = blocks
    a_cols = a_per_row
    b_cols = b_per_row
    steps = tl.cdiv(units, UNITS * WARPS)
    if GROUPS > 0 and not ALONG_K:
        tile_m, tile_n = grouped_tile(program, rows // BM + GROUPS + 1, tiles_n, GROUP_M)
        matrix, first, end, row0 = group_of_tile(offs, rows, tile_m, BM, GROUPS)
        if row0 >= end:
            return
        row0 = row0 - first
        m = end - first
        out_row = first.to(tl.int64)
        exists = matrix < GROUPS
        steps = tl.where(exists, steps, 0)
        if A_SWIZZLED:
            _, _, padded_tile = rows_of_group(offs, rows, matrix, 128, GROUPS)
            a_scales_ptr += padded_tile.to(tl.int64) * tl.cdiv(blocks, 4) * 512
        else:
            a_scales_ptr += out_row * blocks
        matrix = tl.minimum(matrix, GROUPS - 1)
    else:
        tiles_m = tl.cdiv(m, BM)
        matrix = program // (tiles_m * tiles_n)
        tile_m, tile_n = grouped_tile(program % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        row0 = tile_m * BM
        out_row = matrix.to(tl.int64) * m
    if ALONG_K:
        first, end, padded_tile = rows_of_group(offs, rows, matrix, 128, GROUPS)
        # Codes and scales are zero up to whole tiles of 128 rows, so that these bounds are known to be multiples.
        length = end - first
        units = tl.cdiv(length, 128) * 64
        block_cols = tl.cdiv(length, 128) * (128 // BLOCK)
        used_blocks = tl.cdiv(length, BLOCK)
        a_cols = _columns_of(length, units, A_ELEMENT, A_PADDED)
        b_cols = _columns_of(length, units, B_ELEMENT, B_PADDED)
        a_ptr, a_scales_ptr = _from_column(a_ptr, a_scales_ptr, first, padded_tile, A_ELEMENT, A_SWIZZLED, BLOCK,
                                           A_PADDED)  # fmt: skip
        b_ptr, b_scales_ptr = _from_column(b_ptr, b_scales_ptr, first, padded_tile, B_ELEMENT, B_SWIZZLED, BLOCK,
                                           B_PADDED)  # fmt: skip
        steps = tl.cdiv(units, UNITS * WARPS)
    else:
        a_ptr += out_row * a_per_row * bytes_per_unit(A_ELEMENT)
        if GROUPS == 0:
            a_scales_ptr += matrix.to(tl.int64) * a_scales_batch
        if B_BATCHED:
            b_ptr += matrix.to(tl.int64) * n * b_per_row * bytes_per_unit(B_ELEMENT)
            b_scales_ptr += matrix.to(tl.int64) * b_scales_batch

    row = row0 + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    per_split = tl.cdiv(steps, SPLIT)
    start = split * per_split
    acc = _multiply(
        a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, row, col, m, n, start, tl.minimum(start + per_split, steps),
        a_cols, a_per_row, b_cols, b_per_row, block_cols, blocks, used_blocks,
        A_ELEMENT, A_SCALE, A_SQUARE, A_SWIZZLED, A_ALIGN, B_ELEMENT, B_SCALE, B_SQUARE, B_SWIZZLED, B_ALIGN,
        BLOCK, COMPUTE, UNITS, WARPS, STAGES, ALONG_K, ISA,
    )  # fmt: skip
    row = row[:, None]
    col = col[None, :]
    mask = (row < m) & (col < n)
    at = (out_row + row) * n + col
    if SPLIT > 1:
        matrices = tl.num_programs(0) // (SPLIT * tl.cdiv(m, BM) * tiles_n)
        tl.store(out_ptr + split.to(tl.int64) * matrices * m * n + at, acc, mask=mask)
    else:
        # The global or row scales of the tile's matrices, per group.
        if A_OUTER == "group":
            a_outer_ptr += matrix
        elif A_OUTER == "row":
            a_outer_ptr += out_row
        if B_OUTER == "group":
            b_outer_ptr += matrix
        elif B_OUTER == "row" and (B_BATCHED or ALONG_K):
            b_outer_ptr += matrix.to(tl.int64) * n
        acc = rescale(acc, row, col, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, rescale_mode(A_OUTER),
                      rescale_mode(B_OUTER), BIAS, 0)  # fmt: skip
        if GROUPS > 0 and not ALONG_K:
            acc = tl.where(exists, acc, 0.0)  # a global or row scale that is not finite would give NaN
        acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA)
        store_rounded(out_ptr, at, acc, mask, ISA)


def run(
    call: Call, config: DequantTilesConfig, out: torch.Tensor | None = None, wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """The matmul in one kernel, in two if K is split; written to `out`, and only if the int32 at `wanted` is set."""
    p, groups = call.problem, 0 if not call.problem.ragged else call.problem.groups
    if out is None:
        out = call.empty() if config.split_k == 1 else call.empty_sums(config.split_k)
    a_outer, b_outer, bias = call.rescale_pointers(out)
    a_scales, b_scales = (out if x.scales is None else x.scales for x in (call.a, call.b))  # `out` is never read
    first = call if config.split_k == 1 else call.without_epilogue()
    tiles_m = p.rows // config.bm + groups + 1 if p.by_rows else ceil_div(p.m, config.bm)
    constants = {**call.a.constants("A", config.step), **call.b.constants("B", config.step), **call.rescale_constants}
    if groups:  # the bounds of a group of columns are unknown
        constants |= {"A_ALIGN": 0, "B_ALIGN": 0} if p.along_k else {"B_BATCHED": 1}
    launch(
        gemm_dequant_tiles,
        tiles_m * ceil_div(p.n, config.bn) * (groups if p.along_k else p.batches) * config.split_k,
        call.a.data, a_scales, a_outer, call.b.data, b_scales, b_outer, bias, out if call.offs is None else call.offs,
        out, *first.epilogue_pointers(out), out if wanted is None else wanted,
        p.rows, p.m, p.n, ceil_div(p.padded_k, 2), ceil_div(p.padded_k, p.block),
        call.a.units_per_row, call.b.units_per_row, call.a.scale_count, call.b.scale_count, num_warps=config.num_warps,
        **constants, **config.constants, EPILOGUE=first.epilogue_text, BLOCK=p.block, COMPUTE=p.compute, GROUPS=groups,
        ALONG_K=p.along_k, A_PADDED=p.a_padded, B_PADDED=p.b_padded, GUARD=int(wanted is not None), ISA=p.target.isa,
    )  # fmt: skip
    return out if config.split_k == 1 else reduce_split_k(call, out, config.split_k)


CANDIDATE = Candidate(
    "dequant_tiles",
    "emulated",
    lambda p: True,
    dequant_tiles_config,
    run,
    takes_epilogue=lambda p: not p.ragged,
)
