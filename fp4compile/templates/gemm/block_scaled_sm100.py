"""Block-scaled GEMM: two block-scaled operands on matrix units that read codes and scales themselves (SM100 and up).

The matrix units read the codes as they are stored, and block scales in the swizzled layout, one for each row and block.
The quantise kernels store scales in this layout, also for square blocks. Outer scales, bias and epilogue are applied to
the float32 sums, as in all kernels of products.

How the operands reach the matrix units of SM100:
- The Tensor Memory Accelerator (TMA) copies tiles of codes and of scales to shared memory, by descriptors that each
  program makes once. Outside of a matrix it fills in zeros.
- Warps are specialised: some issue the copies, some the products, and some apply the epilogue. So copies run ahead by
  as many steps as there are stages, also across tiles.
- `tcgen05.cp` copies scales from shared to tensor memory (see `device.block_scaled_tile`).
- The epilogue takes a part of the columns at a time, so that the sums need few registers. TMA stores the parts from one
  buffer, so each part waits until the one before has left it.
- An epilogue may quantise its result (`device.quantized_epilogue`): TMA stores the parts' codes, and threads store the
  scales of a whole tile. Or it finds the amax of its result, from which the next product's quantiser makes an outer
  scale.

Programs make their descriptors one after the other, before anything else: five take 386 instructions of one warp, and
five writes to memory, each of which the warp waits for. They are no arguments of the kernel: the CPU would take about
10 microseconds to make five at every launch outside of a CUDA graph (docs/sm100_proof.md has the figures). And the
kernel is not launched early (`device.dependent_launch`): descriptors lie in memory that torch may have taken from a
tensor that the kernel before still reads.

TMA needs rows of whole 16 bytes. Rows of NVFP4 with an odd number of blocks are loaded by pointers instead, without
specialised warps.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import PARTIAL_MAXIMA
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scaled_tile import (
    code_source,
    codes_in,
    load_codes,
    load_scales,
    multiply,
    scale_source,
)
from fp4compile.templates.device.block_scales import outer_scales
from fp4compile.templates.device.epilogue import (
    column_parts,
    epilogue,
    factor_of_rows,
    rescale_columns,
    rescale_mode,
    stored,
    stored_ptr,
)
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.device.quantized_epilogue import (
    amax_of_part,
    finds_amax,
    joined_columns,
    quantized_part,
    quantizes,
    result_of,
    store_maximum,
    store_scale_tiles,
    unit_type,
)
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import BlockScaledConfig, block_scaled_config, block_scaled_configs
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem


@triton.jit
def gemm_block_scaled_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, out_scales_ptr,
    out_outer_ptr, epilogue_0_ptr, epilogue_1_ptr,
    b_outer_step, batches, m, n, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr, PAIR: tl.constexpr,
    EPILOGUE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, TMA_STORE: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_BLOCKS: tl.constexpr, MAXIMA: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [batches, m, n] = a [batches, m, K] x b [batches or 1, n, K]^T, rescaled, plus a bias.

    An epilogue that quantises stores codes of its result to out, and swizzled block scales to out_scales. out_outer:
    its static outer scale. An epilogue that finds the amax of its result stores partial maxima to out_scales. PAIR: B
    has two matrices [n, K], one below the other. A tile has BN / 2 columns of both products, and the epilogue makes one
    result of them. B_OUTER "group": each of the two has an outer scale of its own, the second one b_outer_step
    elements behind the first.

    The grid is persistent: program p takes the tiles p, p + grid, p + 2 * grid, and so on.

    *_per_row: bytes of codes in a row. steps: of BK elements along K. row_tiles_*, col_tiles: tiles of 128 x 4 of the
    swizzled scales of one matrix. GROUP_M: row tiles that are walked together, for the L2 cache. PARTS: parts of a
    tile's columns that the epilogue takes one by one. TMA: rows of codes are whole 16 bytes. TMA_STORE: there is a
    single matrix, and rows of out are whole 16 bytes. TWO_SUMS: tensor memory holds the sums of two tiles, so that the
    epilogue of one runs beside the products of the next. EVEN_K: K is whole steps. EVEN_BLOCKS: n is whole blocks of
    the codes that are stored. MAXIMA: how many partial maxima there are.
    """
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: tl.constexpr = BK // BLOCK
    part_cols: tl.constexpr = BN // PARTS
    matrices: tl.constexpr = 2 if PAIR else 1
    tile_cols: tl.constexpr = BN // matrices
    b_batches = batches if B_BATCHED else 1
    a_source = code_source(a_ptr, batches * m, a_per_row, A_ELEMENT, BM, a_bytes, TMA)
    b_source = code_source(b_ptr, b_batches * n, b_per_row, B_ELEMENT, tile_cols, b_bytes, TMA, matrices)
    a_scales = scale_source(a_scales_ptr, batches * row_tiles_a, col_tiles, SCALE, BM, scale_cols, TMA)
    b_scales = scale_source(b_scales_ptr, b_batches * row_tiles_b, col_tiles, SCALE, tile_cols, scale_cols, TMA,
                            matrices)  # fmt: skip
    if quantizes(EPILOGUE):
        block: tl.constexpr = result_of(EPILOGUE, "block")
        blocks = tl.cdiv(n, block)
        out_cols = blocks * (block // 2)  # units of two codes
        out_ptr = out_ptr.to(tl.pointer_type(unit_type(EPILOGUE)), bitcast=True)
        stored_cols: tl.constexpr = part_cols // 2
        encode, decode = outer_scales(result_of(EPILOGUE, "outer"), out_outer_ptr, out_outer_ptr, 1, "", ISA)
    else:
        out_cols = n
        out_ptr = stored_ptr(out_ptr, ISA)
        stored_cols: tl.constexpr = part_cols
    if finds_amax(EPILOGUE):
        amax = tl.zeros((BM, 2), tl.int32)
    if TMA_STORE:
        target = tl.make_tensor_descriptor(out_ptr, [m, out_cols], [out_cols, 1], [BM, stored_cols])

    if TMA:
        tl.assume(steps > 0)  # so that Triton makes no second epilogue, for tiles without steps
    tiles_m = tl.cdiv(m, BM)
    tiles_n = tl.cdiv(n, tile_cols)
    for tile in tl.range(tl.program_id(0), batches * tiles_m * tiles_n, tl.num_programs(0), flatten=WARP_SPECIALIZE,
                         warp_specialize=WARP_SPECIALIZE, disallow_acc_multi_buffer=not TWO_SUMS):  # fmt: skip
        batch = tile // (tiles_m * tiles_n)
        b_batch = batch if B_BATCHED else 0
        tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        a_row = batch * m + tile_m * BM
        b_row = b_batch * n + tile_n * tile_cols
        a_row_tile = batch * row_tiles_a + tile_m * (BM // 128)
        b_row_tile = b_batch * row_tiles_b + tile_n * (tile_cols // 128)
        # Loaded before the steps: they hide the latency, and all parts share the factor.
        row = (tile_m * BM + tl.arange(0, BM))[:, None]
        factor = factor_of_rows(row, m, batch, a_outer_ptr, b_outer_ptr, A_OUTER, rescale_mode(B_OUTER))
        pair_factor = factor
        if B_OUTER == "group":
            pair_factor = factor_of_rows(row, m, batch, a_outer_ptr, b_outer_ptr + b_outer_step, A_OUTER, "tensor")
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            a = load_codes(a_source, a_row, step * a_bytes, (batch + 1) * m, a_per_row, BM, a_bytes, TMA, EVEN_K)
            b = load_codes(b_source, b_row, step * b_bytes, (b_batch + 1) * n, b_per_row, tile_cols, b_bytes, TMA,
                           EVEN_K, matrices)  # fmt: skip
            col_tile = step * (scale_cols // 4)
            a_scale = load_scales(a_scales, a_row_tile, col_tile, (batch + 1) * row_tiles_a, col_tiles,
                                  BM, scale_cols, TMA)  # fmt: skip
            b_scale = load_scales(b_scales, b_row_tile, col_tile, (b_batch + 1) * row_tiles_b, col_tiles,
                                  tile_cols, scale_cols, TMA, matrices)  # fmt: skip
            acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK)

        parts = column_parts(acc, PARTS)
        scales = ()
        for i in tl.static_range(PARTS // matrices):
            col0 = tile_n * tile_cols + i * part_cols
            col = (col0 + tl.arange(0, part_cols))[None, :]
            mask = (row < m) & (col < n)
            first = (batch.to(tl.int64) * m + tile_m * BM) * n + col0
            at = tl.arange(0, BM)[:, None] * n + tl.arange(0, part_cols)[None, :]
            part = rescale_columns(parts[i], factor, col, n, batch, b_outer_ptr, bias_ptr,
                                   A_OUTER, rescale_mode(B_OUTER), BIAS, B_BATCHED)  # fmt: skip
            pair = None
            if PAIR:  # of the second half of the rows of B
                pair = rescale_columns(parts[i + PARTS // 2], pair_factor, col, n, batch, b_outer_ptr + n, bias_ptr + n,
                                       A_OUTER, rescale_mode(B_OUTER), BIAS, B_BATCHED)  # fmt: skip
            part = epilogue(part, at, col, mask, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA, pair, first)
            if quantizes(EPILOGUE):
                if not EVEN_BLOCKS:
                    part = tl.where(col < n, part, 0.0)
                part, scale = quantized_part(part, encode, decode, EPILOGUE, ISA)
                first = col0 // block + tl.arange(0, part_cols // block)[None, :]
                scales = scales + (tl.where((row < m) & (first < blocks), scale, 0),)
                col0 = col0 // 2
                col = (col0 + tl.arange(0, stored_cols))[None, :]
                first = (batch.to(tl.int64) * m + tile_m * BM) * out_cols + col0
                at = tl.arange(0, BM)[:, None] * out_cols + tl.arange(0, stored_cols)[None, :]
                mask = (row < m) & (col < out_cols)
            else:
                if finds_amax(EPILOGUE):
                    found = tl.where(row < m, amax_of_part(part, EPILOGUE, ISA), 0)
                    amax = tl.maximum(amax, tl.where(col0 < n, found, 0))
                part = stored(part, out_ptr, ISA)
            if TMA_STORE:
                target.store([tile_m * BM, col0], part)
            else:
                tl.store(out_ptr + first + at, part, mask=mask)
        if quantizes(EPILOGUE):
            store_scale_tiles(out_scales_ptr, joined_columns(scales), batch, tile_m, tile_n, m, blocks)
    if finds_amax(EPILOGUE):
        store_maximum(out_scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True), amax, MAXIMA)


def _serves(p: Problem) -> bool:
    """Two block-scaled operands with swizzled scales. Triton has no block-scaled product of mixed widths on SM120.

    Offsets within a tile of 128 rows are 32-bit numbers.
    """
    if p.ragged or not p.target.block_scaled_matrix_units or "none" in (p.a.scale, p.b.scale):
        return False
    if statically_true(p.n >= 2**24):
        return False
    mixed = p.a.format.packed != p.b.format.packed
    return p.a.swizzled and p.b.swizzled and not (mixed and p.target.sm >= 120)


def _quantizes(p: Problem) -> bool:
    """Only where rows of a tile lie in one thread, on SM100 and SM103.

    TMA reads tiles of two products. With more than 4 bytes of operands for an element beside them, registers spill.
    """
    whole = p.batches == 1 and statically_true(p.n % 128 == 0) and p.operand_bytes <= 4
    pairs = not p.spec.pair or (whole and block_scaled_config(p).tma)
    return 100 <= p.target.sm < 120 and pairs


def _finds_amax(p: Problem) -> bool:
    """Only where columns are whole parts, of 32: no part has columns that do not count."""
    return _quantizes(p) and statically_true(p.n % 32 == 0)


def _run(call: Call, config: BlockScaledConfig) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    p = call.problem
    blocks = ceil_div(p.k, p.a.format.block_cols)
    even = statically_true(blocks * p.a.format.block_cols % config.bk == 0)
    out, scales = call.empty_results()
    whole_rows = p.batches == 1 and statically_true(out.shape[-1] * out.element_size() % 16 == 0)
    a_outer, b_outer, bias = call.rescale_pointers(out)
    outer_step = call.b.outer.stride(0) if p.b.outer == "group" else 1
    tiles = ceil_div(p.m, config.bm) * ceil_div(p.n, config.bn // (2 if p.spec.pair else 1)) * p.batches
    launch(
        gemm_block_scaled_sm100, torch.sym_min(tiles, min(p.target.multiprocessors, PARTIAL_MAXIMA)),
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, bias, out, scales,
        out if call.result_outer is None else call.result_outer, *call.epilogue_pointers(out), outer_step,
        p.batches, p.m, p.n,
        p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.k, config.bk), ceil_div(p.m, 128), ceil_div(p.n, 128),
        ceil_div(blocks, 4),
        num_warps=config.num_warps, num_stages=config.stages,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.a.format.block_cols,
        PAIR=int(p.spec.pair), EVEN_K=int(even), EVEN_BLOCKS=int(call.even_blocks),
        TMA_STORE=int(whole_rows and config.tma),
        MAXIMA=PARTIAL_MAXIMA,
        **config.constants,
        **call.rescale_constants, EPILOGUE=call.epilogue_text,
        ISA=p.target.isa,
    )  # fmt: skip
    return out if out is scales else (out, scales)


CANDIDATE = Candidate(
    "block_scaled_sm100", "native", _serves, block_scaled_config, _run, block_scaled_configs,
    takes_epilogue=lambda p: True, quantizes=_quantizes, finds_amax=_finds_amax, any_rows=True,
)  # fmt: skip
