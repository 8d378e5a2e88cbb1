"""GEMM of FP8 weights B by a Triton kernel, where no library multiplies, or reads B with too few tiles.

- Compute capability 8.9 and 12.0: FP8 A and B with float32 scales of 128 elements along K, any number of rows.
- 9.0: 9 to 64 rows of A, FP8 with such scales or row scales, or 9 to 256 rows in 16 bits; bound by reading B. `skinny`
  streams B for fewer ones. A library tiles the result alone, and a result of few rows has too few tiles to read B with
  all multiprocessors; here K is split as well (`split_k`).

FP8 matrix units multiply two FP8 operands. Beside A in 16 bits, codes of B become 16 bits in registers, exactly, and
16-bit matrix units multiply them.

A program computes a tile of the transposed result [BN, BM]: B is the first operand of the matrix instruction, whose
other side may be as narrow as A's rows. A step is 128 elements along K, one block of scales. As in `float8_sm90`, FP8
matrix units add the products of a block in fewer bits than float32; the kernel scales these sums and adds them up in
float32.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_epilogue import epilogue, rescale, rescale_mode, store_rounded
from fp4compile.templates.device.block_scaled_tile import loaded_type
from fp4compile.templates.device.dequantized_tile import INTERPRETING, compute_dtype
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm import library
from fp4compile.templates.gemm.call import Call, KernelOperand
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.split_k import reduce_split_k
from fp4compile.templates.launch import LaunchConfig, launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.writes import writes

FEW_ROWS = 64
# Beside A in 16 bits. 256 rows and B of 8192 x 8192 in blocks take 83 microseconds on an H200, 98 if B is dequantised
# in memory for the library (`dequant_operand`); 512 rows 157 and 136.
WEIGHTS_ROWS = 256
_BLOCK = tl.constexpr(128)
_CODES = ("e4m3", "e5m2")


@dataclass(frozen=True)
class Float8TilesConfig(LaunchConfig):
    """The launch configuration of `float8_tiles`.

    bm, bn: the tile of the result. stages: steps that are being loaded or multiplied. split: parts of K. num_warps:
    warps of a program. group_m: row tiles that are scheduled together, so that they share the L2 cache.
    """

    bm: int
    bn: int
    stages: int
    split: int = 1
    num_warps: int = 4
    group_m: int = 8


def _config(p: Problem) -> Float8TilesConfig:
    """The configuration beside FP8 A, tuned on an H200: parts of K are doubled until enough programs read B.

    Few programs of a multiprocessor keep more steps in flight. With 33 to 64 rows and block scales, narrow tiles wait
    for the scaling of the sums. For B of 2048 rows and more (ten shapes) this is within 9 % of the fastest of up to 40
    configurations, mostly within 3 %.
    """
    if not statically_true(p.m <= FEW_ROWS):
        return Float8TilesConfig(128, 128, 3, num_warps=8)  # 96 KB of shared memory
    bm = _tile_rows(p)
    scaled = p.b.scale != "none"
    wide = bm == 64 and scaled
    bn, tenths = (128, 12) if wide else (64, 16) if scaled else (64, 6)
    split = _parts(p, ceil_div(p.n, bn), tenths)
    each = next((x for x in (1, 2, 3) if statically_true(ceil_div(p.n, bn) * split <= x * p.target.multiprocessors)), 4)
    return Float8TilesConfig(bm, bn, 4 if wide else {1: 8, 2: 5, 3: 4, 4: 3}[each], split)


def _weights_config(p: Problem) -> Float8TilesConfig:
    """The configuration beside A in 16 bits, tuned on an H200 with six B of 1024 to 28672 rows.

    Two to four programs of a multiprocessor convert codes while others multiply. With 33 to 64 rows wide tiles read A
    less often, where their programs fill the multiprocessors. Up to 64 rows this is within 10 % of the fastest of 32
    configurations, mostly within 5 %; with more rows mostly within 15 %, and 20 and 27 % in two shapes of row scales.
    """
    bm = _tile_rows(p)
    row_tiles, tenths = (ceil_div(p.m, bm), 14) if bm == 128 else (1, 24)
    narrow = Float8TilesConfig(bm, 64, 3, _parts(p, row_tiles * ceil_div(p.n, 64), tenths))
    if bm != 64:
        return narrow
    stages, tenths = (3, 12) if p.b.scale != "none" else (4, 7)
    tiles, of = ceil_div(p.n, 128), p.target.multiprocessors
    wide = Float8TilesConfig(bm, 128, stages, _parts(p, tiles, tenths))
    programs = tiles * wide.split
    return wide if statically_true(10 * programs >= 8 * of * ceil_div(programs, of)) else narrow


def _tile_rows(p: Problem) -> int:
    """Rows of A of a tile: as few as hold all rows, and at most 128."""
    return next((rows for rows in (16, 32, 64) if statically_true(p.m <= rows)), 128)


def _parts(p: Problem, tiles: int, tenths: int) -> int:
    """Parts of K, at most 8, with which the programs of so many tiles are `tenths` / 10 of the multiprocessors."""
    split = 1
    while (
        split < 8
        and statically_true(10 * tiles * split < tenths * p.target.multiprocessors)
        and statically_true(p.k >= 4 * split * _BLOCK.value)
    ):
        split *= 2
    return split


def _library_is_faster(p: Problem) -> bool:
    """Whether the library serves 33 to 64 rows and has tiles, of 128 rows of B, for 60 to 100 % of the multiprocessors.

    64 rows, 10240 x 8192 and 14336 x 4096, on an H200: it takes 30.9 and 24.3 microseconds, this kernel 38.6 and 26.5.
    """
    tiles, of = ceil_div(p.n, 128), p.target.multiprocessors
    filled = statically_true(10 * tiles >= 6 * of) and statically_true(tiles <= of)
    return filled and statically_true(p.m > 32) and library.FLOAT8_BLOCKS.takes(p)


def _serves(p: Problem) -> bool:
    """Whether FP8 operands have the scales that the module's text names for the GPU. Rows are of whole 16 bytes.

    Two tensor scales stay with the library, which takes them as one factor of its own, and scales that are powers of
    two with `float8_blocks_as_mx`.
    """
    a, b = p.a, p.b
    codes = all(x.element in _CODES for x in (a, b))
    few = p.target.sm == 90 and statically_true(p.m <= FEW_ROWS)
    if not codes or not _plain_product(p):
        return False
    if a.scale == "none":
        scales = few and b.scale == "none" and "row" in (a.outer, b.outer)
    else:
        blocks = a.scale == b.scale == "float32" and a.format.block == (1, 128)
        blocks = blocks and b.format.block in ((1, 128), (128, 128))
        as_mx = p.target.sm >= 100 and blocks and a.format.as_mx is not None and b.format.as_mx is not None
        few = few and not _library_is_faster(p)
        scales = blocks and not as_mx and (few or p.target.sm in (89, 120, 121))
    return scales


def _serves_weights(p: Problem) -> bool:
    """Whether A is in 16 bits, and B is in FP8 with scales of 128 elements along K or of whole rows; on Hopper."""
    b = p.b
    blocks = b.scale == "float32" and b.format.block in ((1, 128), (128, 128))
    few = p.target.sm == 90 and statically_true(p.m <= WEIGHTS_ROWS)
    plain = p.a.format is None and p.compute != "fp32"
    return few and plain and b.element in _CODES and (blocks or b.scale == "none") and _plain_product(p)


def _plain_product(p: Problem) -> bool:
    """Whether a problem is one product whose result is not quantised, with rows of B of whole 16 bytes."""
    one = not p.ragged and p.batches == 1 and p.spec.result is None and not p.spec.amax
    whole = statically_true(p.row_bytes(p.b) % 16 == 0)
    return one and whole and all(statically_true(size > 0) for size in (p.m, p.n, p.k))


@triton.jit
def _elements(ptr, row, step, rows, width, ELEMENT: tl.constexpr):
    """[rows, 128] elements of a step along K; zeros outside of the matrix of `rows` rows of `width` elements."""
    at = step * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    # Cast before the load: the matrix units then read the copy in shared memory, without registers between.
    if ELEMENT != "plain":
        ptr = ptr.to(tl.pointer_type(loaded_type(ELEMENT)), bitcast=True)
    return tl.load(ptr + row.to(tl.int64)[:, None] * width + at, mask=(row[:, None] < rows) & (at < width), other=0.0)


@writes("out_ptr")
@triton.jit
def gemm_float8_tiles(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, m, n, width, a_width,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, COMPUTE: tl.constexpr, SCALES: tl.constexpr, SQUARE: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr, GROUP_M: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """A tile of out [m, n] = a [m, K] x b [n, K]^T, rescaled, or (SPLIT > 1) of float32 sums [SPLIT, m, n].

    a, b: rows of `a_width` and of `width` elements, a multiple of 16: FP8 codes, padded to whole blocks, or ("plain")
    a's elements of COMPUTE, which codes of b become. SCALES: whether blocks of 128 elements along K, of b and of a's
    codes, have float32 scales (as int32 bits), [rows, blocks]; SQUARE: those of b are of 128 rows each, which tiles
    divide.
    """
    split = tl.program_id(0) % SPLIT
    tile_m, tile_n = grouped_tile(tl.program_id(0) // SPLIT, tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP_M)
    row = tile_m * BM + tl.arange(0, BM)
    col = tile_n * BN + tl.arange(0, BN)
    blocks = tl.cdiv(width, _BLOCK)
    part = tl.cdiv(blocks, SPLIT)
    a_scales_ptr = a_scales_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    b_scales_ptr = b_scales_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in tl.range(split * part, tl.minimum(split * part + part, blocks), num_stages=STAGES):
        b = _elements(b_ptr, col, step, n, width, B_ELEMENT)
        a = _elements(a_ptr, row, step, m, a_width, A_ELEMENT)
        if A_ELEMENT == "plain":
            kind: tl.constexpr = compute_dtype(COMPUTE, INTERPRETING)
            # By way of float32: one instruction that makes bf16 of fp16 takes eight times as long as these two.
            b = b if kind == tl.float16 else b.to(tl.float16).to(tl.float32)
            products = tl.dot(b.to(kind), tl.trans(a.to(kind)), input_precision="ieee")
        else:
            products = tl.dot(b, tl.trans(a))
        if SCALES:
            factor = 1.0
            if A_ELEMENT != "plain":
                factor = tl.load(a_scales_ptr + row.to(tl.int64) * blocks + step, mask=row < m, other=0.0)[None, :]
            if SQUARE:
                factor *= tl.load(b_scales_ptr + (tile_n * BN // 128).to(tl.int64) * blocks + step)
                products *= factor
            else:
                of_rows = tl.load(b_scales_ptr + col.to(tl.int64) * blocks + step, mask=col < n, other=0.0)
                products *= of_rows[:, None] * factor
        acc += products
    acc = tl.trans(acc)
    row = row[:, None]
    col = col[None, :]
    mask = (row < m) & (col < n)
    at = row.to(tl.int64) * n + col
    if SPLIT > 1:
        tl.store(out_ptr + split.to(tl.int64) * m * n + at, acc, mask=mask)
    else:
        acc = rescale(acc, row, col, m, n, 0, a_outer_ptr, b_outer_ptr, bias_ptr, rescale_mode(A_OUTER),
                      rescale_mode(B_OUTER), BIAS, 0)  # fmt: skip
        acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA)
        store_rounded(out_ptr, at, acc, mask, ISA)


def _run(call: Call, config: Float8TilesConfig) -> torch.Tensor:
    p = call.problem
    whole, width = config.split == 1, p.row_bytes(p.b)
    out = call.empty() if whole else call.empty_sums(config.split)
    first = call if whole else call.without_epilogue()
    rescaling = call.rescale_constants
    rescaling.pop("B_BATCHED")
    launch(
        gemm_float8_tiles, ceil_div(p.m, config.bm) * ceil_div(p.n, config.bn) * config.split,
        *_pointers(call.a, out), *_pointers(call.b, out), out if call.bias is None else call.bias, out,
        *first.epilogue_pointers(out), p.m, p.n, width, p.k if p.a.format is None else width,
        num_warps=config.num_warps,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, COMPUTE=p.compute, SCALES=int(p.b.scale != "none"),
        SQUARE=int(p.b.format.square), EPILOGUE=first.epilogue_text, ISA=p.target.isa, **rescaling, **config.constants,
    )  # fmt: skip
    return out if whole else reduce_split_k(call, out, config.split)


def _pointers(x: KernelOperand, unused: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.data, unused if x.scales is None else x.scales, unused if x.outer is None else x.outer


CANDIDATE = Candidate("float8_tiles", "native", _serves, _config, _run, takes_epilogue=lambda p: True)
WEIGHTS = replace(
    CANDIDATE, name="float8_weight_tiles", tier="emulated", serves=_serves_weights, configure=_weights_config
)
