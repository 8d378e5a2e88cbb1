"""Grouped block-scaled GEMM whose result is the operand of the next grouped product (SM100).

Experts compute `grouped product -> activation -> grouped product`. Here the first product's kernel computes the
activation and stores codes and block scales, group by group, in the layout that the next product reads. Groups are rows
of A and of the result. The kernel has the operands and the tiles of `gemm.grouped_block_scaled_sm100`, and the epilogue
of `gemm.block_scaled_sm100`, for one product or for two. For two, the matrix of each group has the rows of gate and,
below them, the rows of up; or all matrices of up follow all matrices of gate.

A tile of 128 rows of a group is a tile of the scales of that group, too, because swizzled scales of groups are padded
to 128 rows. So a tile stores its scales whole: zeros where the group has ended. Tiles of scales behind the last group
are cleared. Codes are stored by threads, because a tile's last rows may belong to the next group. Codes of rows of no
group are not written.

Where each group has a dynamic outer scale, a tile cannot quantise. It stores the result in 16 or 32 bits and raises the
amax of its group, from which the quantiser of the next launch makes the outer scale. Rows of no group are cleared.

Every tile has equally many steps, so that Triton itself makes one loop of all steps of a program.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
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
from fp4compile.templates.device.group_tiles import (
    clear_rows,
    clear_scale_tiles,
    ends_of,
    last_of,
    load_entry,
    store_row_tiles,
)
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.device.quantized_epilogue import (
    amax_of_part,
    joined_columns,
    quantized_part,
    quantizes,
    raise_maximum,
    result_of,
    store_scale_tiles,
    unit_type,
)
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.heuristics import BlockScaledConfig
from fp4compile.templates.launch import launch
from fp4compile.templates.quantize.source import power_of_two


@triton.jit
def gemm_grouped_quantized_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, out_ptr, out_scales_ptr, out_outer_ptr,
    epilogue_0_ptr, epilogue_1_ptr, offs_ptr, table_ptr,
    groups, m, n, out_cols, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles,
    a_outer_each, b_outer_each, pair_outer,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, PAIR: tl.constexpr, EPILOGUE: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_SUMS: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Codes and swizzled block scales of the epilogue's result [m, n], for b [groups, n, K].

    An epilogue that finds amaxes stores the result itself to out. It raises the int32 [groups] at out_scales, which are
    0, to the bits of the groups' largest magnitudes.

    PAIR: there are two products, and a tile has BN / 2 columns of both. 1: b [groups, 2 n, K], the matrix of a group is
    two matrices, one below the other. 2: b [2 groups, n, K], the groups' matrices of the second product come last.

    The grid is persistent: program p takes the tiles p, p + grid, p + 2 * grid, and so on.

    out_cols: units of two codes, or results, in a row of out; ALIGN divides it. out_outer: the result's static outer
    scale. steps: of BK elements along K. row_tiles_a: tiles of 128 rows of the scales of a, and of codes in out.
    row_tiles_b: of each matrix [n, K]. pair_outer: from a group's outer scales of the first product to its outer scales
    of the second one. All other arguments are as in `gemm_grouped_block_scaled_sm100`, or as in
    `gemm_block_scaled_sm100`.
    """
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: tl.constexpr = BK // BLOCK
    part_cols: tl.constexpr = BN // PARTS
    matrices: tl.constexpr = 2 if PAIR else 1
    tile_cols: tl.constexpr = BN // matrices
    below: tl.constexpr = PAIR == 1
    count = 2 * groups if below else matrices  # matrices of a source, each of b_rows rows
    b_rows = n if below else groups * n
    b_tiles = row_tiles_b if below else groups * row_tiles_b
    a_source = code_source(a_ptr, m, a_per_row, A_ELEMENT, BM, a_bytes, TMA)
    b_source = code_source(b_ptr, b_rows, b_per_row, B_ELEMENT, tile_cols, b_bytes, TMA, matrices, count)
    a_scales = scale_source(a_scales_ptr, row_tiles_a, col_tiles, SCALE, BM, scale_cols, TMA)
    b_scales = scale_source(b_scales_ptr, b_tiles, col_tiles, SCALE, tile_cols, scale_cols, TMA, matrices, count)
    if quantizes(EPILOGUE):
        block: tl.constexpr = result_of(EPILOGUE, "block")
        blocks = tl.cdiv(n, block)
        out_ptr = out_ptr.to(tl.pointer_type(unit_type(EPILOGUE)), bitcast=True)
        encode, decode = outer_scales(result_of(EPILOGUE, "outer"), out_outer_ptr, out_outer_ptr, 1, "", ISA)
    else:
        out_ptr = stored_ptr(out_ptr, ISA)
        maxima_ptr = out_scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    out_cols = out_cols // ALIGN * ALIGN  # changes nothing, but shows the compiler how wide it may store

    # The kernel itself loads offs: if a function did, torch would count offs as written (see `device.groups`).
    g = tl.arange(0, GROUPS)
    starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0), m)
    ends = ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), m)
    padded = tl.cdiv(ends - starts, 128)  # tiles of 128 rows of each group
    padded_ends = tl.cumsum(padded, 0)
    tiles_m = last_of(padded_ends)
    tiles_n = tl.cdiv(n, tile_cols)
    if quantizes(EPILOGUE):
        clear_scale_tiles(out_scales_ptr, tiles_m, row_tiles_a, tl.cdiv(blocks, 4) * 128, 1024)
    else:
        clear_rows(out_ptr, last_of(ends), m, out_cols, 4, 512)
    store_row_tiles(table_ptr, starts, ends, padded, padded_ends, tiles_n, GROUP_M, BM, GROUPS)
    tl.debug_barrier()  # the table is complete

    tl.assume(steps > 0)  # so that Triton makes no second epilogue, for tiles without steps
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=WARP_SPECIALIZE,
                         warp_specialize=WARP_SPECIALIZE, disallow_acc_multi_buffer=not TWO_SUMS):  # fmt: skip
        group, a_row, end = load_entry(table_ptr, tile)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        matrix = 2 * group if below else 0
        b_row = tile_n * tile_cols
        b_row_tile = tile_n * (tile_cols // 128)
        if not below:
            b_row += group * n
            b_row_tile += group * row_tiles_b
        row = (a_row + tl.arange(0, BM))[:, None]
        a_outer = a_outer_ptr + group * a_outer_each
        b_outer = b_outer_ptr + group * b_outer_each
        factor = factor_of_rows(row, m, 0, a_outer, b_outer, rescale_mode(A_OUTER), rescale_mode(B_OUTER))
        pair_factor = factor
        if PAIR == 2 and B_OUTER == "group":
            pair_factor = factor_of_rows(row, m, 0, a_outer, b_outer + pair_outer, rescale_mode(A_OUTER), "tensor")
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(steps):
            a = load_codes(a_source, a_row, step * a_bytes, m, a_per_row, BM, a_bytes, TMA, True)
            b = load_codes(b_source, b_row, step * b_bytes, b_rows, b_per_row, tile_cols, b_bytes, TMA, True, matrices,
                           matrix)  # fmt: skip
            col_tile = step * (scale_cols // 4)
            a_scale = load_scales(a_scales, tile_m, col_tile, row_tiles_a, col_tiles, BM, scale_cols, TMA)
            b_scale = load_scales(b_scales, b_row_tile, col_tile, b_tiles, col_tiles, tile_cols, scale_cols, TMA,
                                  matrices, matrix)  # fmt: skip
            acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK)

        parts = column_parts(acc, PARTS)
        scales = ()
        amax = tl.zeros((BM, 2), tl.int32)
        for i in tl.static_range(PARTS // matrices):
            col0 = tile_n * tile_cols + i * part_cols
            col = (col0 + tl.arange(0, part_cols))[None, :]
            part = rescale_columns(parts[i], factor, col, n, 0, b_outer, b_outer, rescale_mode(A_OUTER),
                                   rescale_mode(B_OUTER), False, False)  # fmt: skip
            pair = None
            if PAIR:
                pair = rescale_columns(parts[i + PARTS // 2], pair_factor, col, n, 0, b_outer + pair_outer, b_outer,
                                       rescale_mode(A_OUTER), rescale_mode(B_OUTER), False, False)  # fmt: skip
            at = tl.arange(0, BM)[:, None] * n + tl.arange(0, part_cols)[None, :]
            part = epilogue(part, at, col, (row < end) & (col < n), n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE, ISA,
                            pair, a_row.to(tl.int64) * n + col0)  # fmt: skip
            if quantizes(EPILOGUE):
                if not EVEN_BLOCKS:
                    part = tl.where(col < n, part, 0.0)
                part, scale = quantized_part(part, encode, decode, EPILOGUE, ISA)
                first = col0 // block + tl.arange(0, part_cols // block)[None, :]
                scales = scales + (tl.where((row < end) & (first < blocks), scale, 0),)
                col0 = col0 // 2
            else:
                amax = tl.maximum(amax, tl.where(col0 < n, amax_of_part(part, EPILOGUE, ISA), 0))
                part = stored(part, out_ptr, ISA)
            col = tl.arange(0, part.shape[1])[None, :]
            at = tl.arange(0, BM)[:, None] * out_cols + col
            tl.store(out_ptr + (a_row.to(tl.int64) * out_cols + col0) + at, part,
                     mask=(row < end) & (col0 + col < out_cols))  # fmt: skip
        if quantizes(EPILOGUE):
            store_scale_tiles(out_scales_ptr, joined_columns(scales), tile_m * 0, tile_m, tile_n, m, blocks)
        else:
            raise_maximum(maxima_ptr + group, tl.where(row < end, amax, 0))


def run(call: Call, config: BlockScaledConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and swizzled block scales of the products of all groups, or results and amaxes, in one launch."""
    p, (out, scales) = call.problem, call.empty_results()
    row_tiles, matrices = ceil_div(p.m, TILE_ROWS), 2 if p.spec.pair else 1
    tiles = (row_tiles + p.groups) * ceil_div(p.n, config.bn // matrices)
    table = call.offs.new_empty((tiles, 4))
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))  # `out` is never read
    stored_cols = (
        p.n if p.spec.result is None else ceil_div(p.n, p.spec.result.block_cols) * p.spec.result.block_cols // 2
    )
    each = {"group": 1, "row": p.b_rows}.get(p.b.outer, 0)  # outer scales of a matrix of b
    to_pair = p.groups * each if p.two_weights else p.n if p.b.outer == "row" else 0
    launch(
        gemm_grouped_quantized_sm100, torch.sym_min(tiles, p.target.multiprocessors),
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, out, scales,
        out if call.result_outer is None else call.result_outer, *call.epilogue_pointers(out), call.offs, table,
        p.groups, p.m, p.n, stored_cols, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.k, config.bk),
        padded_rows(p.m, p.groups) // TILE_ROWS, ceil_div(p.n, TILE_ROWS), ceil_div(ceil_div(p.k, p.block), 4),
        int(p.a.outer == "group"), each, to_pair,
        num_warps=config.num_warps, num_stages=config.stages,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.block, A_OUTER=p.a.outer,
        B_OUTER=p.b.outer, PAIR=int(p.spec.pair) + int(p.two_weights), EPILOGUE=call.epilogue_text,
        GROUPS=triton.next_power_of_2(p.groups),
        EVEN_BLOCKS=int(call.even_blocks), ALIGN=power_of_two(stored_cols, 16),
        **config.constants, ISA=p.target.isa,
    )  # fmt: skip
    return out, scales
