"""Dequant GEMM: the product of any two operands, dequantised in registers, on 16-bit matrix units, summed in float32.

A program computes a tile of the transposed product [BN, BM]: B is the first operand of the matrix instruction, A the
second. So few rows of A fill the narrow side of the instruction, and B goes from its codes straight to registers, in
which the first operand may lie.
WARPS > 1 cuts K among the warps of a program, as a batch of products whose sums are added at the end. SPLIT > 1 cuts K
among programs (split-K): `split_k_reduction` then adds their partial sums, in a fixed order.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.dependent_launch import wait
from fp4compile.templates.device.dequant_product import multiply_dequantized
from fp4compile.templates.device.dequantize import bytes_per_unit
from fp4compile.templates.device.epilogue import epilogue, rescale, store_rounded
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import DequantTilesConfig, dequant_tiles_config
from fp4compile.templates.launch import launch


@triton.jit
def gemm_dequant_tiles(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, wanted_ptr,
    m, n, units, blocks, a_per_row, b_per_row, a_scales_batch, b_scales_batch,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_OUTER: tl.constexpr, A_ALIGN: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_OUTER: tl.constexpr, B_ALIGN: tl.constexpr, B_BATCHED: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, EPILOGUE: tl.constexpr, COMPUTE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, GUARD: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out [batch, m, n], or (SPLIT > 1) of the partial sums [SPLIT, batch, m, n] in float32.

    a, b: [batch, m, K] and [batch or 1, n, K]. K has `units` units (see `device.dequantize`) and `blocks` blocks of
    BLOCK elements. a_per_row, b_per_row: row strides in units (plain: elements). *_scales_batch: bytes of scales of one
    matrix. *_ALIGN: see `load_units`.
    UNITS: units along K of a warp's step. GROUP_M: row tiles that are walked together, for the L2 cache.
    GUARD: do nothing unless the int32 at wanted_ptr is set.
    """
    if GUARD:  # noqa: SIM102 (the pointer is read only then)
        if tl.load(wanted_ptr) == 0:
            return
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, BN)
    program = tl.program_id(0)
    split = program % SPLIT
    program = program // SPLIT
    batch = program // (tiles_m * tiles_n)
    program = program % (tiles_m * tiles_n)
    group = program // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + (program % (GROUP_M * tiles_n)) % in_group
    tile_n = (program % (GROUP_M * tiles_n)) // in_group
    row_m = tile_m * BM + tl.arange(0, BM)
    row_n = tile_n * BN + tl.arange(0, BN)

    a_ptr += batch.to(tl.int64) * m * a_per_row * bytes_per_unit(A_ELEMENT)
    a_scales_ptr += batch.to(tl.int64) * a_scales_batch
    if B_BATCHED:
        b_ptr += batch.to(tl.int64) * n * b_per_row * bytes_per_unit(B_ELEMENT)
        b_scales_ptr += batch.to(tl.int64) * b_scales_batch
    steps = tl.cdiv(units, UNITS * WARPS)
    per_split = tl.cdiv(steps, SPLIT)
    start = split * per_split
    stop = tl.minimum(start + per_split, steps)

    acc = multiply_dequantized(
        a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, row_m, row_n, m, n, start, stop,
        a_per_row, a_per_row, b_per_row, b_per_row, blocks, blocks, blocks,
        A_ELEMENT, A_SCALE, A_SQUARE, A_SWIZZLED, A_ALIGN, B_ELEMENT, B_SCALE, B_SQUARE, B_SWIZZLED, B_ALIGN,
        BLOCK, COMPUTE, UNITS, WARPS, STAGES, False, ISA,
    )  # fmt: skip
    row = row_m[:, None]
    col = row_n[None, :]
    mask = (row < m) & (col < n)
    at = (batch.to(tl.int64) * m + row) * n + col
    if SPLIT > 1:
        matrices = tl.num_programs(0) // (SPLIT * tiles_m * tiles_n)
        tl.store(out_ptr + split.to(tl.int64) * matrices * m * n + at, acc, mask=mask)
    else:
        acc = rescale(acc, row, col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr,
                      A_OUTER, B_OUTER, BIAS, B_BATCHED)  # fmt: skip
        acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA)
        store_rounded(out_ptr, at, acc, mask, ISA)


@triton.jit
def split_k_reduction(
    sums_ptr, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr, batches, m, n, out_row,
    first, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
    EPILOGUE: tl.constexpr, SPLIT: tl.constexpr, COLS: tl.constexpr, ISA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the sum over the first axis of float32 sums [SPLIT, batches, m, n], rescaled, through the epilogue.

    A program computes COLS columns of one row. out_row: elements from one row of out, and of the epilogue's operands,
    to the next. first: elements before out's first one, where out is a part of what out_ptr points to. PDL: the kernel
    that makes the sums starts this one early (see `device.dependent_launch`).
    """
    tiles = tl.cdiv(n, COLS)
    program = tl.program_id(0)
    flat_row = program // tiles
    batch = flat_row // m
    row = flat_row % m
    col = (program % tiles) * COLS + tl.arange(0, COLS)
    mask = col < tl.where(flat_row < batches * m, n, 0)
    at = flat_row.to(tl.int64) * n + col
    stride = tl.cast(batches, tl.int64) * m * n
    acc = tl.zeros((COLS,), tl.float32)
    if PDL:
        sums_ptr = wait(sums_ptr)
    for split in tl.static_range(SPLIT):
        acc += tl.load(sums_ptr + split * stride + at, mask=mask, other=0.0)
    acc = rescale(acc, row, col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, B_BATCHED)
    at = flat_row.to(tl.int64) * out_row + col
    acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA)
    store_rounded(out_ptr + first, at, acc, mask, ISA)


def run(
    call: Call, config: DequantTilesConfig, out: torch.Tensor | None = None, wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """The product in one kernel, in two if K is split; written to `out`, and only if the int32 at `wanted` is set."""
    p = call.problem
    if out is None:
        out = call.empty() if config.split_k == 1 else call.empty_sums(config.split_k)
    a_outer, b_outer, bias = call.rescale_pointers(out)
    a_scales, b_scales = (out if x.scales is None else x.scales for x in (call.a, call.b))  # `out` is never read
    first = call if config.split_k == 1 else call.without_epilogue()
    launch(
        gemm_dequant_tiles,
        ceil_div(p.m, config.bm) * ceil_div(p.n, config.bn) * p.batches * config.split_k,
        call.a.data, a_scales, a_outer, call.b.data, b_scales, b_outer, bias, out,
        *first.epilogue_pointers(out), out if wanted is None else wanted,
        p.m, p.n, ceil_div(p.k, 2), ceil_div(p.k, p.block), call.a.units_per_row, call.b.units_per_row,
        call.a.scale_bytes, call.b.scale_bytes, num_warps=config.num_warps,
        **{**call.a.constants("A", config.step), **call.b.constants("B", config.step), **call.rescale_constants},
        EPILOGUE=first.epilogue_text,
        **config.constants, BLOCK=p.block, COMPUTE=p.compute, GUARD=int(wanted is not None), ISA=p.target.isa,
    )  # fmt: skip
    return out if config.split_k == 1 else reduce_split_k(call, out, config.split_k)


def reduce_split_k(
    call: Call, sums: torch.Tensor, split_k: int, out: torch.Tensor | None = None, first: int = 0, pdl: bool = False
) -> torch.Tensor:
    """[batches, m, n] from float32 sums [split_k, batches, m, n], with rescale, bias and epilogue.

    out: a contiguous matrix whose elements from `first` on get the result, in rows of its own length; None makes one.
    The whole matrix is passed to the kernel: in a graph, each launch on a view of it would be followed by a copy.
    pdl: whether the kernel that makes the sums lets this one start early; see `device.dependent_launch`.
    """
    p, cols = call.problem, 512
    out = call.empty() if out is None else out
    launch(split_k_reduction, p.batches * p.m * ceil_div(p.n, cols), sums,
           *call.rescale_pointers(out), out, *call.epilogue_pointers(out), p.batches, p.m, p.n, out.shape[-1], first,
           num_warps=4, SPLIT=split_k, COLS=cols, ISA=p.target.isa, PDL=int(pdl), EPILOGUE=call.epilogue_text,
           **call.rescale_constants)  # fmt: skip
    return out


CANDIDATE = Candidate(
    "dequant_tiles",
    "emulated",
    lambda p: not p.ragged,
    dequant_tiles_config,
    run,
    takes_epilogue=lambda p: True,
)
