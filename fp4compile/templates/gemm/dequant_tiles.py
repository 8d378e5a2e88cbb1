"""Dequant GEMM: the product of any two operands, dequantised in registers, on 16-bit matrix units, summed in float32.

A program computes a tile of the transposed product [BN, BM]: B is the first operand of the matrix instruction, A the
second. So few rows of A fill the narrow side of the instruction, and B goes from its codes straight to registers, in
which the first operand may lie.
WARPS > 1 cuts K among the warps of a program: as a batch of products, whose sums are added at the end. SPLIT > 1 cuts K
among programs (split-K): `split_k_reduction` then adds their partial sums, in a fixed order.
"""

import torch
import triton
import triton.language as tl

from fp4compile.layouts import ceil_div
from fp4compile.templates.device.dependent_launch import wait
from fp4compile.templates.device.dequantize import TINY, dequantize, load_scales, load_units, repeat_scales, shift_of
from fp4compile.templates.device.epilogue import epilogue, rescale, store_rounded
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import DequantTilesConfig, dequant_tiles_config
from fp4compile.templates.launch import launch


@triton.jit
def _dot(b, a, acc, COMPUTE: tl.constexpr):
    """acc + b @ a^T, over the last axis of both; the first axis is a batch if there are three."""
    a = tl.trans(a) if len(b.shape) == 2 else tl.permute(a, (0, 2, 1))
    if COMPUTE == "fp32":
        return tl.dot(b, a, acc, input_precision="ieee")
    else:
        return tl.dot(b, a, acc)


@triton.jit
def _load(
    ptr, scales_ptr, row, unit, block, rows, per_row, blocks,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, SQUARE: tl.constexpr, BLOCK: tl.constexpr,
    SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """(Units, scale bytes) of a tile of one operand; bytes of 0 for an operand without block scales."""
    units = load_units(ptr, row, unit, rows, per_row, ELEMENT, ALIGN)
    byte = 0
    if SCALE != "none":
        byte = load_scales(scales_ptr, row, block, rows, blocks, SCALE, SQUARE, BLOCK, SWIZZLED, ALIGN)
    return units, byte


@triton.jit
def _any_tiny(units, byte, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """Whether the tile has a block that `dequantize` takes for zero, but that is not zero."""
    if SCALE == "e8m0":
        found = (repeat_scales(byte.to(tl.int32), BLOCK // 2) < TINY) & (units != 0)
        return tl.max(tl.reshape(found.to(tl.int32), (found.numel,)), 0) > 0
    else:
        return False


@triton.jit
def gemm_dequant_tiles(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr,
    epilogue_0_ptr, epilogue_1_ptr, wanted_ptr,
    m, n, units, blocks, a_per_row, b_per_row, a_scales_batch, b_scales_batch,
    A_ELEMENT: tl.constexpr, A_SCALE: tl.constexpr, A_SQUARE: tl.constexpr, A_SWIZZLED: tl.constexpr,
    A_OUTER: tl.constexpr, A_ALIGN: tl.constexpr,
    B_ELEMENT: tl.constexpr, B_SCALE: tl.constexpr, B_SQUARE: tl.constexpr, B_SWIZZLED: tl.constexpr,
    B_OUTER: tl.constexpr, B_ALIGN: tl.constexpr, B_BATCHED: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, COMPUTE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr, STAGES: tl.constexpr, GUARD: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile [BM, BN] of out [batch, m, n], or (SPLIT > 1) of the partial sums [SPLIT, batch, m, n] in float32.

    a, b: [batch, m, K] and [batch or 1, n, K]. K has `units` units (see `device.dequantize`) and `blocks` blocks of
    BLOCK elements; rows lie a_per_row and b_per_row units apart (plain: elements). *_scales_batch: bytes of scales of
    one matrix. *_ALIGN: see `load_units`.
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
    half: tl.constexpr = BLOCK // 2
    steps = tl.cdiv(units, UNITS * WARPS)
    per_split = tl.cdiv(steps, SPLIT)
    start = split * per_split
    stop = tl.minimum(start + per_split, steps)

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

    # The main loop takes blocks with scales below 2^(TINY - 127) for zero. It keeps the smallest scales that it has
    # seen; if there were such blocks, a second loop adds their products.
    a_watch: tl.constexpr = COMPUTE != "fp32" and A_SCALE == "e8m0"
    b_watch: tl.constexpr = COMPUTE != "fp32" and B_SCALE == "e8m0"
    smallest_a = tl.full(((1,) if not a_watch else block_shape(WARPS, BM, UNITS // half)), 255, tl.int32)
    smallest_b = tl.full(((1,) if not b_watch else block_shape(WARPS, BN, UNITS // half)), 255, tl.int32)
    a_type: tl.constexpr = a_ptr.dtype.element_ty
    b_type: tl.constexpr = b_ptr.dtype.element_ty
    for step in tl.range(start, stop, num_stages=STAGES):
        at = step * step_units + unit
        block_at = step * step_blocks + block
        b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_per_row, blocks,
                                B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
        a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_per_row, blocks,
                                A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
        b_first, b_second = dequantize(b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, False, ISA)
        a_first, a_second = dequantize(a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, False, ISA)
        acc = _dot(b_first, a_first, acc, COMPUTE)
        acc = _dot(b_second, a_second, acc, COMPUTE)
        if a_watch:
            smallest_a = tl.minimum(smallest_a, a_byte.to(tl.int32))
        if b_watch:
            smallest_b = tl.minimum(smallest_b, b_byte.to(tl.int32))

    if a_watch or b_watch:
        smallest = tl.minimum(tl.min(tl.reshape(smallest_a, (smallest_a.numel,)), 0),
                              tl.min(tl.reshape(smallest_b, (smallest_b.numel,)), 0))  # fmt: skip
        if smallest < TINY:
            tiny = tl.zeros_like(acc)
            for step in tl.range(start, stop, num_stages=1):
                at = step * step_units + unit
                block_at = step * step_blocks + block
                b_units, b_byte = _load(b_ptr, b_scales_ptr, n_row, at, block_at, n, b_per_row, blocks,
                                        B_ELEMENT, B_SCALE, B_SQUARE, BLOCK, B_SWIZZLED, B_ALIGN)  # fmt: skip
                a_units, a_byte = _load(a_ptr, a_scales_ptr, m_row, at, block_at, m, a_per_row, blocks,
                                        A_ELEMENT, A_SCALE, A_SQUARE, BLOCK, A_SWIZZLED, A_ALIGN)  # fmt: skip
                if _any_tiny(a_units, a_byte, A_SCALE, BLOCK):
                    b_first, b_second = dequantize(
                        b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, False, ISA
                    )
                    a_first, a_second = dequantize(
                        a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, True, ISA
                    )
                    tiny = _dot(b_second, a_second, _dot(b_first, a_first, tiny, COMPUTE), COMPUTE)
                if _any_tiny(b_units, b_byte, B_SCALE, BLOCK):
                    b_first, b_second = dequantize(
                        b_units, b_byte, b_type, B_ELEMENT, B_SCALE, BLOCK, COMPUTE, True, ISA
                    )
                    a_first, a_second = dequantize(
                        a_units, a_byte, a_type, A_ELEMENT, A_SCALE, BLOCK, COMPUTE, False, ISA
                    )
                    tiny = _dot(b_second, a_second, _dot(b_first, a_first, tiny, COMPUTE), COMPUTE)
            # Products of two such blocks are left out: they lie below the smallest float32.
            acc = acc + tiny * 2.0**-TINY.value

    if WARPS > 1:
        acc = tl.sum(acc, 0)
    shift: tl.constexpr = shift_of(A_ELEMENT, A_SCALE, COMPUTE) + shift_of(B_ELEMENT, B_SCALE, COMPUTE)
    acc = tl.trans(acc * 2.0**shift)
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
        acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, ISA)
        store_rounded(out_ptr, at, acc, mask, ISA)


@triton.constexpr_function
def bytes_per_unit(ELEMENT):
    """Pointer elements in one of `per_row`: bytes of a unit of codes; 1 of a plain operand, counted in elements."""
    return 2 if ELEMENT in ("e4m3", "e5m2") else 1


@triton.constexpr_function
def block_shape(warps, rows, blocks):
    """Shape of a tile's block scales."""
    return (rows, blocks) if warps == 1 else (warps, rows, blocks)


@triton.jit
def split_k_reduction(
    sums_ptr, a_outer_ptr, b_outer_ptr, bias_ptr, out_ptr, epilogue_0_ptr, epilogue_1_ptr, batches, m, n, out_row,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
    SPLIT: tl.constexpr, COLS: tl.constexpr, ISA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out: the sum over the first axis of float32 sums [SPLIT, batches, m, n], rescaled, through the epilogue.

    A program computes COLS columns of one row. out_row: elements from one row of out, and of the epilogue's operands,
    to the next. PDL: the kernel that makes the sums starts this one early (see `device.dependent_launch`).
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
    acc = epilogue(acc, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, ISA)
    store_rounded(out_ptr, at, acc, mask, ISA)


def run(
    call: Call, config: DequantTilesConfig, out: torch.Tensor | None = None, wanted: torch.Tensor | None = None
) -> torch.Tensor:
    """The product in one kernel, in two where K is split; into `out`, and only if the int32 at `wanted` is set."""
    p = call.problem
    if out is None:
        out = call.empty() if config.split_k == 1 else call.empty_sums(config.split_k)
    a_outer, b_outer, bias = call.rescale_pointers(out)
    a_scales, b_scales = (out if x.scales is None else x.scales for x in (call.a, call.b))  # `out` is never read
    first = call if config.split_k == 1 else call.without_epilogue()
    launch(
        first.with_epilogue(gemm_dequant_tiles),
        ceil_div(p.m, config.bm) * ceil_div(p.n, config.bn) * p.batches * config.split_k,
        call.a.data, a_scales, a_outer, call.b.data, b_scales, b_outer, bias, out,
        *first.epilogue_pointers(out), out if wanted is None else wanted,
        p.m, p.n, ceil_div(p.k, 2), ceil_div(p.k, p.block), call.a.units_per_row, call.b.units_per_row,
        call.a.scale_bytes, call.b.scale_bytes, num_warps=config.num_warps,
        **{**call.a.constants("A", config.step), **call.b.constants("B", config.step), **call.rescale_constants},
        **config.constants, BLOCK=p.block, COMPUTE=p.compute, GUARD=int(wanted is not None), ISA=p.target.isa,
    )  # fmt: skip
    return out if config.split_k == 1 else reduce_split_k(call, out, config.split_k)


def reduce_split_k(
    call: Call, sums: torch.Tensor, split_k: int, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """[batches, m, n] from float32 sums [split_k, batches, m, n], with rescale, bias and epilogue; in `out` if given.

    pdl: whether the kernel that makes the sums lets this one start early; see `device.dependent_launch`.
    """
    p, cols = call.problem, 512
    out_row = p.n if out is None else out.stride(0)
    out = call.empty() if out is None else out
    launch(call.with_epilogue(split_k_reduction), p.batches * p.m * ceil_div(p.n, cols), sums,
           *call.rescale_pointers(out), out, *call.epilogue_pointers(out), p.batches, p.m, p.n, out_row, num_warps=4,
           SPLIT=split_k, COLS=cols, ISA=p.target.isa, PDL=int(pdl), **call.rescale_constants)  # fmt: skip
    return out


CANDIDATE = Candidate(
    "dequant_tiles", "emulated", lambda p: True, dequant_tiles_config, run, takes_epilogue=lambda p: True
)
