"""Grouped block-scaled GEMM: the products of `gemm.block_scaled_sm100` for all groups in one launch (SM100).

Groups are rows of A and of the result, or lie along the contraction (see `reference_grouped.scaled_grouped_mm`). Either
way operands are whole matrices to the Tensor Memory Accelerator: a tile of codes begins at any row, and swizzled scales
of a group begin at a whole tile of 128 rows, or of 128 columns. So four descriptors serve all groups.

Only the device knows the offsets. Every program finds the groups of its tiles from the offsets before its first tile
(`device.group_tiles`); the host launches a program for each multiprocessor, or fewer. Nothing is stored by TMA: a TMA
store for whole tiles beside a masked store for the others would take the shared memory of a stage.

Rows: a tile takes 128 rows of A from a row of its group on. Rows beyond the group's end belong to other groups; they
are multiplied as well and not stored. Every tile has equally many steps, so that Triton itself makes one loop of all
steps of a program. Rows that belong to no group follow the last group. The kernel clears them, because they are few or
none: zeros in the whole result would be as many bytes as the product stores.

An epilogue of rows is that of `gemm.block_scaled_sm100`, for one product or for two. For two, the matrix of each group
has the rows of gate and, below them, the rows of up; or all matrices of up follow all matrices of gate. It may quantise
the result for the next grouped product. A tile of 128 rows of a group is a tile of the scales of that group, too,
because swizzled scales of groups are padded to 128 rows. So a tile stores its scales whole: zeros where the group has
ended. Tiles of scales behind the last group are cleared; codes of rows of no group are not written. Where each group
has a dynamic outer scale, a tile cannot quantise. It stores the result and raises the amax of its group, from which the
quantiser of the next launch makes the outer scale.

Contraction: a step has 128 columns, which belong to one group, because groups are padded to 128. So a tile has as many
steps as its group needs. A tile of an empty group has a single step, of arbitrary columns, and is cleared. A program
walks the steps of all its tiles in one loop, so that copies run ahead across tiles and groups. Triton's `flatten` makes
such a loop only of inner loops of one length. For Triton to specialise its warps, the loop must look like Triton's own:
- The first branch computes all values that change from tile to tile, the second one only the result. The partitions
  that issue copies and products run the first branch alone.
- Neither branch has a reduction, and the second one clears the sums, or Triton 3.6 fails.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import compatible
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
    rescale,
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
    of_group,
    store_entry,
    store_row_tiles,
    tiles_of_program,
)
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.device.quantized_epilogue import (
    amax_of_part,
    finds_amax,
    joined_columns,
    quantized_part,
    quantizes,
    raise_maximum,
    result_of,
    store_scale_tiles,
    unit_type,
)
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import BlockScaledConfig, block_scaled_configs, row_tile_count, tma_copies
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two

_ANY_SIZE = 2**14  # stands for a symbolic size in the choice of a configuration


@triton.jit
def gemm_grouped_block_scaled_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, out_ptr, out_scales_ptr, out_outer_ptr,
    epilogue_0_ptr, epilogue_1_ptr, offs_ptr, table_ptr,
    groups, rows, m, n, out_cols, a_per_row, b_per_row, steps, row_tiles_a, row_tiles_b, col_tiles,
    a_outer_each, b_outer_each, pair_outer,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, PAIR: tl.constexpr, EPILOGUE: tl.constexpr,
    ALONG_K: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_SUMS: tl.constexpr, EVEN_BLOCKS: tl.constexpr,
    ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out = a x b^T, rescaled: out [m, n] of b [groups, n, K], or [groups, m, n] where ALONG_K.

    The grid is persistent: program p takes the tiles p, p + grid, p + 2 * grid, and so on.

    An epilogue that quantises stores codes of its result to out, and swizzled block scales to out_scales. out_outer:
    its static outer scale. One that finds amaxes raises the int32 [groups] at out_scales, which are 0, to the bits of
    the groups' largest magnitudes. PAIR: there are two products, and a tile has BN / 2 columns of both. 1: b
    [groups, 2 n, K], the matrix of a group is two matrices, one below the other. 2: b [2 groups, n, K], the groups'
    matrices of the second product come last.

    offs: int32 [groups]. rows: how many rows the offsets cut. m: rows of a, n: rows of each matrix of b. out_cols:
    units of two codes, or results, in a row of out; ALIGN divides it. *_per_row: bytes of codes in a row. steps: of BK
    elements along K, where groups are rows. row_tiles_*: tiles of 128 rows of the scales of a (and of codes in out),
    and of each matrix in b; col_tiles: of 4 columns. *_outer_each: how many outer scales each group has of its own; 0
    where all groups share them. pair_outer: from a group's outer scales of the first product to those of the second.
    table: memory for int32 [tiles, 4], where tiles is the largest possible number of tiles.
    ALONG_K: groups lie along the contraction. GROUPS: groups, rounded up to a power of two. BM, and BK where ALONG_K:
    128, as groups are padded. PARTS, TMA, TWO_SUMS, EVEN_BLOCKS: as in `gemm_block_scaled_sm100`.
    """
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: tl.constexpr = BK // BLOCK
    part_cols: tl.constexpr = BN // PARTS
    matrices: tl.constexpr = 2 if PAIR else 1
    tile_cols: tl.constexpr = BN // matrices
    below: tl.constexpr = PAIR == 1
    count = 2 * groups if below else matrices  # matrices of a source, each of b_rows rows
    b_rows = n if below or ALONG_K else groups * n
    b_tiles = row_tiles_b if below or ALONG_K else groups * row_tiles_b
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
    starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0), rows)
    ends = ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), rows)
    padded = tl.cdiv(ends - starts, 128)  # tiles of 128 rows of each group; of 128 columns where ALONG_K
    padded_ends = tl.cumsum(padded, 0)
    tiles_n = tl.cdiv(n, tile_cols)
    if not ALONG_K:
        tiles_m = last_of(padded_ends)
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
                b = load_codes(b_source, b_row, step * b_bytes, b_rows, b_per_row, tile_cols, b_bytes, TMA, True,
                               matrices, matrix)  # fmt: skip
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
                part = epilogue(part, at, col, (row < end) & (col < n), n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE,
                                ISA, pair, a_row.to(tl.int64) * n + col0)  # fmt: skip
                if quantizes(EPILOGUE):
                    if not EVEN_BLOCKS:
                        part = tl.where(col < n, part, 0.0)
                    part, scale = quantized_part(part, encode, decode, EPILOGUE, ISA)
                    first = col0 // block + tl.arange(0, part_cols // block)[None, :]
                    scales = scales + (tl.where((row < end) & (first < blocks), scale, 0),)
                    col0 = col0 // 2
                else:
                    if finds_amax(EPILOGUE):
                        amax = tl.maximum(amax, tl.where(col0 < n, amax_of_part(part, EPILOGUE, ISA), 0))
                    part = stored(part, out_ptr, ISA)
                col = tl.arange(0, part.shape[1])[None, :]
                at = tl.arange(0, BM)[:, None] * out_cols + col
                tl.store(out_ptr + (a_row.to(tl.int64) * out_cols + col0) + at, part,
                         mask=(row < end) & (col0 + col < out_cols))  # fmt: skip
            if quantizes(EPILOGUE):
                store_scale_tiles(out_scales_ptr, joined_columns(scales), tile_m * 0, tile_m, tile_n, m, blocks)
            if finds_amax(EPILOGUE):
                raise_maximum(maxima_ptr + group, tl.where(row < end, amax, 0))
    else:
        tiles_m = tl.cdiv(m, BM)
        tiles = tiles_m * tiles_n  # of a group
        mine = tiles_of_program(groups * tiles)
        total = 0  # steps
        at_once: tl.constexpr = max(4096 // GROUPS, 1)  # tiles whose groups are found at once
        for first in range(0, mine, at_once):
            i = first + tl.arange(0, at_once)
            tile = tl.program_id(0) + tl.minimum(i, mine - 1) * tl.num_programs(0)
            group = tile // tiles
            ends_k = of_group(padded_ends, group)
            starts_k = ends_k - of_group(padded, group)
            store_entry(table_ptr, tile, group, starts_k, ends_k)
            total += tl.sum(tl.where(i < mine, tl.maximum(ends_k - starts_k, 1), 0), 0)
        tl.debug_barrier()  # the table of steps is complete

        tile = tl.program_id(0) - tl.num_programs(0)
        tile_m, tile_n, group = 0, 0, 0
        step, last_step, empty = 0, 0, False
        acc = tl.zeros((BM, BN), tl.float32)
        for _ in tl.range(0, total, warp_specialize=WARP_SPECIALIZE, disallow_acc_multi_buffer=not TWO_SUMS):
            if step == last_step:  # a tile begins
                tile += tl.num_programs(0)
                group, step, last_step = load_entry(table_ptr, tile)
                empty = step == last_step
                last_step = tl.maximum(last_step, step + 1)
                tile_m, tile_n = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)

            a = load_codes(a_source, tile_m * BM, step * a_bytes, m, a_per_row, BM, a_bytes, TMA, True)
            b = load_codes(b_source, tile_n * BN, step * b_bytes, n, b_per_row, BN, b_bytes, TMA, True)
            col_tile = step * (scale_cols // 4)
            a_scale = load_scales(a_scales, tile_m, col_tile, row_tiles_a, col_tiles, BM, scale_cols, TMA)
            b_scale = load_scales(b_scales, tile_n * (BN // 128), col_tile, row_tiles_b, col_tiles, BN, scale_cols, TMA)
            acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK)

            step += 1
            if step == last_step:  # a tile ends
                row = (tile_m * BM + tl.arange(0, BM))[:, None]
                out_row = tl.cast(group, tl.int64) * m
                parts = column_parts(acc, PARTS)
                for i in tl.static_range(PARTS):
                    col = (tile_n * BN + i * part_cols + tl.arange(0, part_cols))[None, :]
                    part = rescale(tl.where(empty, 0.0, parts[i]), row, col, m, n, 0,
                                   a_outer_ptr + group * a_outer_each, b_outer_ptr + group * b_outer_each, out_ptr,
                                   rescale_mode(A_OUTER), rescale_mode(B_OUTER), False, False)  # fmt: skip
                    tl.store(out_ptr + (out_row + row) * out_cols + col, stored(part, out_ptr, ISA),
                             mask=(row < m) & (col < out_cols))  # fmt: skip
                acc = tl.zeros((BM, BN), tl.float32)


def _serves(p: Problem) -> bool:
    """Two block-scaled operands with swizzled scales, on SM100, whose rows TMA copies."""
    if not p.ragged or p.target.isa != 100 or not (p.a.swizzled and p.b.swizzled):
        return False
    # A descriptor of a matrix without columns would not be valid.
    return (
        compatible(p.a.format, p.b.format)
        and statically_true(p.padded_k > 0)
        and tma_copies(*((x.format, p.row_bytes(x)) for x in (p.a, p.b)))
    )


def sm100_config(p: Problem) -> BlockScaledConfig:
    """The configuration with the least traffic from the L2 cache; see `heuristics.block_scaled_config`."""
    m, n = (size if isinstance(size, int) else _ANY_SIZE for size in (p.m, p.n))

    def rows_read(config: BlockScaledConfig) -> int:
        """Rows of operands that the busiest multiprocessor reads, if the last tile of a group is half full."""
        tiles = row_tile_count(p, m, config.bm) * ceil_div(n, config.bn)
        return ceil_div(tiles, p.target.multiprocessors) * (config.bm + config.bn)

    return min(sm100_configs(p), key=rows_read)


def sm100_configs(p: Problem) -> tuple[BlockScaledConfig, ...]:
    """Every configuration that is worth timing.

    A step is 128 bytes of the wider operand's codes, and 128 columns where groups lie along K: no step has columns of
    two groups. Results whose rows are not whole 16 bytes are stored one by one, which takes more registers. An epilogue
    that quantises has the configurations that it has without groups.
    """
    if p.spec.result is not None or p.spec.amax:
        return block_scaled_configs(p)
    itemsize = p.spec.out_dtype.itemsize
    narrow = not statically_true(p.n * itemsize % 16 == 0)
    packed = p.a.format.packed and p.b.format.packed
    step = 256 if packed and not p.along_k else 128
    row_bytes = (step // 2 if packed else step) + step // p.block
    found = []
    for bn, parts, most, two_sums in ((256, 8, 8, False), (128, 4, 10, True)):
        parts = 4 * parts if narrow else parts
        other = TILE_ROWS * bn // parts * itemsize + 2048  # a part of the result, and barriers
        stages = min(most * 128 // step, (p.target.shared_memory - other) // (row_bytes * (TILE_ROWS + bn)))
        found.append(BlockScaledConfig(TILE_ROWS, bn, step, stages, parts, two_sums=two_sums))
    return tuple(found)


def _quantizes(p: Problem) -> bool:
    """Where groups are rows, as without groups: see `block_scaled_sm100`."""
    few = p.operand_bytes <= 4 and not statically_true(p.n >= 2**24)
    return p.by_rows and few and (not p.spec.pair or statically_true(p.n % 128 == 0))


def _finds_amax(p: Problem) -> bool:
    """Only where columns are whole parts, of 32: no part has columns that do not count."""
    return _quantizes(p) and statically_true(p.n % 32 == 0)


def _run(call: Call, config: BlockScaledConfig) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The products of all groups in one launch, or their codes and swizzled block scales, or results and amaxes."""
    p, (out, scales) = call.problem, call.empty_results()
    row_tiles = ceil_div(p.m, TILE_ROWS)
    tiles = p.groups * row_tiles if p.along_k else row_tiles + p.groups
    tiles = tiles * ceil_div(p.n, config.bn // (2 if p.spec.pair else 1))
    table = call.offs.new_empty((tiles, 4))
    a_outer, b_outer, _ = call.rescale_pointers(out)
    stored_cols = (
        p.n if p.spec.result is None else ceil_div(p.n, p.spec.result.block_cols) * p.spec.result.block_cols // 2
    )
    # Outer scales of a group of a, and of a matrix of b, where each row has one.
    a_each, b_each = {"group": 1, "row": p.m if p.along_k else 0}, {"group": 1, "row": p.b_rows}
    each = b_each.get(p.b.outer, 0)
    to_pair = p.groups * each if p.two_weights else p.n if p.b.outer == "row" else 0
    launch(
        gemm_grouped_block_scaled_sm100, torch.sym_min(tiles, p.target.multiprocessors),
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, out, scales,
        out if call.result_outer is None else call.result_outer, *call.epilogue_pointers(out), call.offs, table,
        p.groups, p.rows, p.m, p.n, stored_cols, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.padded_k, config.bk),
        row_tiles if p.along_k else padded_rows(p.rows, p.groups) // TILE_ROWS, ceil_div(p.n, TILE_ROWS),
        ceil_div(ceil_div(p.padded_k, p.block), 4), a_each.get(p.a.outer, 0), each, to_pair,
        num_warps=config.num_warps, num_stages=config.stages,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.block, A_OUTER=p.a.outer,
        B_OUTER=p.b.outer, PAIR=int(p.spec.pair) + int(p.two_weights), EPILOGUE=call.epilogue_text,
        ALONG_K=int(p.along_k), GROUPS=triton.next_power_of_2(p.groups),
        EVEN_BLOCKS=int(call.even_blocks), ALIGN=power_of_two(stored_cols, 16), **config.constants, ISA=p.target.isa,
    )  # fmt: skip
    return out if out is scales else (out, scales)


CANDIDATE = Candidate(
    "grouped_block_scaled_sm100", "native", _serves, sm100_config, _run, sm100_configs,
    takes_epilogue=lambda p: p.spec.result is not None or p.spec.amax, quantizes=_quantizes, finds_amax=_finds_amax,
)  # fmt: skip
