"""Grouped block-scaled GEMM: the products of `gemm.block_scaled_sm100` for all groups in one launch (SM100).

Groups are rows of A and of the result, or lie along the contraction (see `reference_grouped.scaled_grouped_mm`). Either
way operands are whole matrices to the Tensor Memory Accelerator: a tile of codes begins at any row, and swizzled scales
of a group begin at a whole tile of 128 rows, or of 128 columns. So four descriptors serve all groups.

- Rows: a tile takes 128 rows of A from a row of its group on. Rows beyond the group's end belong to other groups; they
  are multiplied as well and not stored.
- Contraction: a step has 128 columns, which belong to one group, because groups are padded to 128. So a tile has as
  many steps as its group needs. A tile of an empty group has a single step, of arbitrary columns, and is cleared.

Only the device knows the offsets. Every program finds the groups of its tiles from the offsets before its first tile
(`device.group_tiles`); the host launches a program for each multiprocessor, or fewer.

A program walks the steps of all its tiles in one loop, so that copies run ahead across tiles and groups. Triton's
`flatten` makes such a loop only of inner loops of one length. For Triton to specialise its warps, the loop must look
like Triton's own:
- The first branch computes all values that change from tile to tile, the second one only the result. The partitions
  that issue copies and products run the first branch alone.
- Neither branch has a reduction, and the second one clears the sums, or Triton 3.6 fails.
- Nothing is stored by TMA: a TMA store for whole tiles beside a masked store for the others would take the shared
  memory of a stage.

Rows that belong to no group follow the last group. This kernel clears them, because they are few or none: zeros in the
whole result would be as many bytes as the product stores.
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
from fp4compile.templates.device.epilogue import column_parts, rescale, rescale_mode, stored, stored_ptr
from fp4compile.templates.device.group_tiles import (
    clear_rows,
    ends_of,
    last_of,
    load_entry,
    of_group,
    store_entry,
    store_row_tiles,
    tiles_of_program,
)
from fp4compile.templates.device.persistent_grid import grouped_tile
from fp4compile.templates.gemm import grouped_quantized_sm100
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import BlockScaledConfig, block_scaled_configs, row_tile_count, tma_copies
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two

_ANY_SIZE = 2**14  # stands for a symbolic size in the choice of a configuration


@triton.jit
def gemm_grouped_block_scaled_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, out_ptr, offs_ptr, table_ptr,
    groups, rows, m, n, a_per_row, b_per_row, steps_of_rows, row_tiles_a, row_tiles_b, col_tiles,
    a_outer_each, b_outer_each,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, ALONG_K: tl.constexpr, GROUPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_SUMS: tl.constexpr, ALIGN: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out = a x b^T, rescaled: out [m, n] of b [groups * n, K], or [groups, m, n] where ALONG_K.

    The grid is persistent: program p takes the tiles p, p + grid, p + 2 * grid, and so on.

    offs: int32 [groups]. rows: how many rows the offsets cut. m: rows of a, n: rows of b or, if groups are rows of a,
    of each matrix in b. *_per_row: bytes of codes in a row. steps_of_rows: of BK elements along K, where groups are
    rows. row_tiles_*: tiles of 128 rows of the scales of a, and of b or of each matrix in b; col_tiles: of 4 columns.
    *_outer_each: how many outer scales each group has of its own; 0 where all groups share them.
    table: memory for int32 [tiles, 4], where tiles is the largest possible number of tiles.
    ALONG_K: groups lie along the contraction. GROUPS: groups, rounded up to a power of two. BM, and BK where ALONG_K:
    128, as groups are padded. PARTS, TMA, TWO_SUMS: as in `gemm_block_scaled_sm100`. ALIGN: divides n.
    """
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: tl.constexpr = BK // BLOCK
    part_cols: tl.constexpr = BN // PARTS
    n = n // ALIGN * ALIGN  # changes nothing, but shows the compiler how wide it may store
    matrices = 1 if ALONG_K else groups
    a_source = code_source(a_ptr, m, a_per_row, A_ELEMENT, BM, a_bytes, TMA)
    b_source = code_source(b_ptr, matrices * n, b_per_row, B_ELEMENT, BN, b_bytes, TMA)
    a_scales = scale_source(a_scales_ptr, row_tiles_a, col_tiles, SCALE, BM, scale_cols, TMA)
    b_scales = scale_source(b_scales_ptr, matrices * row_tiles_b, col_tiles, SCALE, BN, scale_cols, TMA)
    out_ptr = stored_ptr(out_ptr, ISA)

    # The kernel itself loads offs: if a function did, torch would count offs as written (see `device.groups`).
    g = tl.arange(0, GROUPS)
    starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0), rows)
    ends = ends_of(tl.load(offs_ptr + g, mask=g < groups, other=0), rows)
    padded = tl.cdiv(ends - starts, 128)  # tiles of 128 rows of each group; of 128 columns where ALONG_K
    padded_ends = tl.cumsum(padded, 0)
    tiles_n = tl.cdiv(n, BN)
    if ALONG_K:
        tiles_m = tl.cdiv(m, BM)
        tiles = tiles_m * tiles_n  # of a group
        mine = tiles_of_program(groups * tiles)
        total = 0  # steps
        count: tl.constexpr = max(4096 // GROUPS, 1)  # tiles whose groups are found at once
        for first in range(0, mine, count):
            i = first + tl.arange(0, count)
            tile = tl.program_id(0) + tl.minimum(i, mine - 1) * tl.num_programs(0)
            group = tile // tiles
            ends_k = of_group(padded_ends, group)
            starts_k = ends_k - of_group(padded, group)
            store_entry(table_ptr, tile, group, starts_k, ends_k)
            total += tl.sum(tl.where(i < mine, tl.maximum(ends_k - starts_k, 1), 0), 0)
    else:
        clear_rows(out_ptr, last_of(ends), m, n, 4, 512)
        tiles_m = last_of(padded_ends)
        store_row_tiles(table_ptr, starts, ends, padded, padded_ends, tiles_n, GROUP_M, BM, GROUPS)
        total = tiles_of_program(tiles_m * tiles_n) * steps_of_rows
    tl.debug_barrier()  # the table is complete

    tile = tl.program_id(0) - tl.num_programs(0)
    tile_m, tile_n, group, a_row, b_row, b_row_tile, end = 0, 0, 0, 0, 0, 0, 0
    step, last_step, empty = 0, 0, False
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, total, warp_specialize=WARP_SPECIALIZE, disallow_acc_multi_buffer=not TWO_SUMS):
        if step == last_step:  # a tile begins
            tile += tl.num_programs(0)
            if ALONG_K:
                group, step, last_step = load_entry(table_ptr, tile)
                empty = step == last_step
                last_step = tl.maximum(last_step, step + 1)
                tile_m, tile_n = grouped_tile(tile % tiles, tiles_m, tiles_n, GROUP_M)
                a_row, end = tile_m * BM, m
                b_row, b_row_tile = tile_n * BN, tile_n * (BN // 128)
            else:
                group, a_row, end = load_entry(table_ptr, tile)
                step, last_step = 0, steps_of_rows
                tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                b_row, b_row_tile = group * n + tile_n * BN, group * row_tiles_b + tile_n * (BN // 128)

        a = load_codes(a_source, a_row, step * a_bytes, m, a_per_row, BM, a_bytes, TMA, True)
        b = load_codes(b_source, b_row, step * b_bytes, n, b_per_row, BN, b_bytes, TMA, True)
        col_tile = step * (scale_cols // 4)
        a_scale = load_scales(a_scales, tile_m, col_tile, row_tiles_a, col_tiles, BM, scale_cols, TMA)
        b_scale = load_scales(b_scales, b_row_tile, col_tile, row_tiles_b, col_tiles, BN, scale_cols, TMA)
        acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK)

        step += 1
        if step == last_step:  # a tile ends
            row = (a_row + tl.arange(0, BM))[:, None]
            matrix = tl.cast(group, tl.int64) * m if ALONG_K else tl.cast(0, tl.int64)
            a_outer = a_outer_ptr + group * a_outer_each
            b_outer = b_outer_ptr + group * b_outer_each
            parts = column_parts(acc, PARTS)
            for i in tl.static_range(PARTS):
                col = (tile_n * BN + i * part_cols + tl.arange(0, part_cols))[None, :]
                part = tl.where(empty, 0.0, parts[i]) if ALONG_K else parts[i]
                part = rescale(part, row, col, m, n, 0, a_outer, b_outer, out_ptr,
                               rescale_mode(A_OUTER), rescale_mode(B_OUTER), False, False)  # fmt: skip
                tl.store(out_ptr + (matrix + row) * n + col, stored(part, out_ptr, ISA), mask=(row < end) & (col < n))
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
    """The products of all groups, in one launch."""
    if call.problem.spec.result is not None or call.problem.spec.amax:
        return grouped_quantized_sm100.run(call, config)
    p, out = call.problem, call.empty()
    row_tiles = ceil_div(p.m, TILE_ROWS)
    tiles = (p.groups * row_tiles if p.along_k else row_tiles + p.groups) * ceil_div(p.n, config.bn)
    table = call.offs.new_empty((tiles, 4))
    a_outer, b_outer = (out if x.outer is None else x.outer for x in (call.a, call.b))  # `out` is never read
    a_rows, b_rows = p.m if p.along_k else 0, p.n  # outer scales of a group where each row has one
    launch(
        gemm_grouped_block_scaled_sm100, torch.sym_min(tiles, p.target.multiprocessors),
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, out, call.offs, table,
        p.groups, p.rows, p.m, p.n, p.row_bytes(p.a), p.row_bytes(p.b), ceil_div(p.padded_k, config.bk),
        row_tiles if p.along_k else padded_rows(p.rows, p.groups) // TILE_ROWS, ceil_div(p.n, TILE_ROWS),
        ceil_div(ceil_div(p.padded_k, p.block), 4),
        {"group": 1, "row": a_rows}.get(p.a.outer, 0), {"group": 1, "row": b_rows}.get(p.b.outer, 0),
        num_warps=config.num_warps, num_stages=config.stages,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.block, A_OUTER=p.a.outer,
        B_OUTER=p.b.outer, ALONG_K=int(p.along_k), GROUPS=triton.next_power_of_2(p.groups),
        ALIGN=power_of_two(p.n, 16), **config.constants, ISA=p.target.isa,
    )  # fmt: skip
    return out


CANDIDATE = Candidate(
    "grouped_block_scaled_sm100", "native", _serves, sm100_config, _run, sm100_configs,
    takes_epilogue=lambda p: p.spec.result is not None or p.spec.amax, quantizes=_quantizes, finds_amax=_finds_amax,
)  # fmt: skip
