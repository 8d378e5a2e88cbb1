"""Block-scaled GEMM: two block-scaled operands on matrix units that read codes and scales themselves (SM100 and up).

The matrix units read the codes as they are stored, and block scales in the swizzled layout, one for each row and block.
The quantise kernels store scales in this layout, also for square blocks. Global or row scales, bias and epilogue are
applied to the float32 sums, as in all GEMM kernels.

How the operands reach the matrix units of SM100:
- The Tensor Memory Accelerator (TMA) copies tiles of codes and of scales to shared memory, by descriptors that each
  program makes once. Outside of a matrix it fills in zeros.
- Warps are specialised: some issue the copies, some the matmuls, and some apply the epilogue. So copies run ahead by
  as many steps as there are stages, also across tiles.
- `tcgen05.cp` copies scales from shared to tensor memory (see `device.block_scaled_tile`).
- The epilogue processes a part of the columns at a time, so that the sums need few registers. TMA stores the parts from
  one buffer, so each part waits until the previous one has left it.
- An epilogue may quantise its result (`device.quantized_epilogue`): TMA stores the parts' codes, and threads store the
  scales of a whole tile. Or it finds the amax of its result, from which the next matmul's quantiser computes a global
  scale.

Programs first make their descriptors in sequence: five take 386 instructions of one warp, and five writes to memory,
each of which the warp waits for. They are not arguments of the kernel: the CPU would take about 10 microseconds to make
five at every launch outside of a CUDA graph (docs/sm100_proof.md has the figures). And the kernel does not use
dependent launch (`device.dependent_launch`): descriptors are in memory that may belong to a tensor that the previous
kernel still reads.

TMA needs rows whose bytes are a multiple of 16. Rows of NVFP4 with an odd number of blocks are loaded by pointers
instead, without specialised warps; groups have no such kernel.

Groups are rows of A and of the result, or parts of the contraction (see `reference_grouped.scaled_grouped_mm`). In both
cases the TMA descriptors cover whole matrices: a tile of codes begins at any row, and swizzled scales of a group begin
at a whole tile of 128 rows, or of 128 columns. Every program finds the groups of its tiles from the offsets before its
first tile (`device.group_tiles`). Nothing is stored by TMA: a TMA store for whole tiles beside a masked store for the
others would take the shared memory of a stage.

Groups of rows: a tile reads 128 rows of A from a row of its group on. Rows beyond the group's end belong to other
groups; they are multiplied and not stored. Rows that belong to no group follow the last group. The kernel clears them,
because they are few or none: zeros in the whole result would be as many bytes as the kernel stores. Swizzled scales of
groups are padded to 128 rows. So a tile whose result is quantised stores its scales whole: zeros where the group has
ended. Tiles of scales behind the last group are cleared; codes of rows of no group are not written. Where each group
has a dynamic global scale, a tile raises the amax of its group.

Groups along the contraction: a step has 128 columns, which belong to one group, because groups are padded to 128. So a
tile has as many steps as its group needs. A tile of an empty group has a single step, of arbitrary columns, and is
cleared. A program iterates over the steps of all its tiles in one loop, so that copies run ahead across tiles and
groups. Triton's `flatten` makes such a loop only from inner loops of one length. For Triton to specialise its warps,
the loop must have the form of Triton's own:
- The first branch computes all values that change from tile to tile, the second one only the result. The partitions
  that issue copies and matmuls run the first branch alone.
- Neither branch has a reduction, and the second one clears the sums, or Triton 3.6 fails.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.epilogue import PARTIAL_MAXIMA
from fp4compile.formats.formats import compatible
from fp4compile.formats.grouping import padded_rows
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.apply_epilogue import (
    column_parts,
    epilogue,
    factor_of_rows,
    rescale,
    rescale_columns,
    rescale_mode,
    stored,
    stored_ptr,
)
from fp4compile.templates.device.block_scaled_tile import (
    code_source,
    codes_in,
    load_codes,
    load_scales,
    multiply,
    scale_source,
)
from fp4compile.templates.device.block_scales import outer_scales
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
    store_maximum,
    store_scale_tiles,
    unit_type,
)
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.candidate import Candidate
from fp4compile.templates.gemm.heuristics import (
    BlockScaledConfig,
    block_scaled_config,
    block_scaled_configs,
    tma_copies,
    with_least_traffic,
)
from fp4compile.templates.launch import launch
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize.source import power_of_two
from fp4compile.templates.writes import of, writes


# out_scales_ptr gets the block scales of a quantised result, or the maxima of a result whose amax is found.
@writes("out_ptr", table_ptr=of("GROUPS"), out_scales_ptr=lambda arguments: arguments["EPILOGUE"].count(" | ") == 3)
@triton.jit
def gemm_block_scaled_sm100(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, bias_ptr, out_ptr, out_scales_ptr,
    out_outer_ptr, epilogue_0_ptr, epilogue_1_ptr, offs_ptr, table_ptr,
    batches, rows, m, n, out_cols, a_per_row, b_per_row, k, row_tiles_a, row_tiles_b, col_tiles,
    a_outer_each, b_outer_each, pair_outer,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr, PAIR: tl.constexpr,
    EPILOGUE: tl.constexpr, GROUPS: tl.constexpr, ALONG_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, PARTS: tl.constexpr,
    TMA: tl.constexpr, TMA_STORE: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, TWO_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_BLOCKS: tl.constexpr, ALIGN: tl.constexpr, MAXIMA: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Tiles [BM, BN] of out [batches, m, n] = a [batches, m, K] x b [batches or 1, n, K]^T, rescaled, plus a bias.

    With groups, `batches` counts them: out [m, n] of a [m, K] and b [batches, n, K] or, where ALONG_K, out
    [batches, m, n] of a [m, K] and b [n, K].

    An epilogue that quantises stores codes of its result to out, and swizzled block scales to out_scales. out_outer:
    its static global scale. An epilogue that finds the amax of its result stores partial maxima to out_scales; with
    groups, it raises the int32 [batches] there, which are 0, to the bits of the groups' largest magnitudes. PAIR: there
    are two matmuls, and a tile has BN / 2 columns of both, from which the epilogue computes one result. 1: each matrix
    of b is two stacked matrices [n, K]. 2: b [2 batches, n, K], the groups' matrices of the second matmul come last.
    pair_outer: stride from a global scale of the first matmul to that of the second one.

    The grid is persistent: program p takes the tiles p, p + grid, p + 2 * grid, and so on.

    offs: int32 [batches]. rows: how many rows the offsets cut. out_cols: units of two codes, or results, in a row of
    out; ALIGN divides it. *_per_row: bytes of codes in a row. k: elements along K, whole steps of BK.
    row_tiles_*, col_tiles: tiles of 128 x 4 of the swizzled scales of one matrix; with groups of rows, row_tiles_a of
    all of a. *_outer_each: the number of global or row scales of each group; 0 where all groups share them. table:
    memory for int32 [tiles, 4], where tiles is the largest possible number of tiles.
    GROUPS: 0, or the number of groups, rounded up to a power of two. GROUP_M: row tiles that are scheduled together,
    for the L2 cache. PARTS: parts of a tile's columns that the epilogue processes one by one. TMA: rows of codes are
    multiples of 16 bytes. TMA_STORE: there is a single matrix, and rows of out are multiples of 16 bytes. TWO_SUMS:
    tensor memory holds the sums of two tiles, so that the epilogue of one runs beside the matmuls of the next. EVEN_K:
    K is whole steps.
    EVEN_BLOCKS: n is whole blocks of the codes that are stored. MAXIMA: how many partial maxima there are.
    """
    a_bytes: tl.constexpr = codes_in(BK, A_ELEMENT)
    b_bytes: tl.constexpr = codes_in(BK, B_ELEMENT)
    scale_cols: tl.constexpr = BK // BLOCK
    part_cols: tl.constexpr = BN // PARTS
    matrices: tl.constexpr = 2 if PAIR else 1
    tile_cols: tl.constexpr = BN // matrices
    # The matrices of a's and b's sources, each of *_rows rows: TMA reads two stacked matrices at a time.
    below: tl.constexpr = PAIR == 1 and GROUPS > 0
    count = 2 * batches if below else matrices
    a_batches = 1 if GROUPS > 0 else batches
    b_batches = 1 if below or ALONG_K else batches if B_BATCHED or GROUPS > 0 else 1
    a_source = code_source(a_ptr, a_batches * m, a_per_row, A_ELEMENT, BM, a_bytes, TMA)
    b_source = code_source(b_ptr, b_batches * n, b_per_row, B_ELEMENT, tile_cols, b_bytes, TMA, matrices, count)
    a_scales = scale_source(a_scales_ptr, a_batches * row_tiles_a, col_tiles, SCALE, BM, scale_cols, TMA)
    b_scales = scale_source(b_scales_ptr, b_batches * row_tiles_b, col_tiles, SCALE, tile_cols, scale_cols, TMA,
                            matrices, count)  # fmt: skip
    if quantizes(EPILOGUE):
        block: tl.constexpr = result_of(EPILOGUE, "block")
        blocks = tl.cdiv(n, block)
        out_ptr = out_ptr.to(tl.pointer_type(unit_type(EPILOGUE)), bitcast=True)
        stored_cols: tl.constexpr = part_cols // 2
        encode, decode = outer_scales(result_of(EPILOGUE, "outer"), out_outer_ptr, out_outer_ptr, 1, "", "", "", ISA)
    else:
        out_ptr = stored_ptr(out_ptr, ISA)
        stored_cols: tl.constexpr = part_cols
        maxima_ptr = out_scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    if TMA_STORE:
        target = tl.make_tensor_descriptor(out_ptr, [m, out_cols], [out_cols, 1], [BM, stored_cols])
    else:
        out_cols = out_cols // ALIGN * ALIGN  # changes nothing, but shows the compiler how wide it may store
    tiles_n = tl.cdiv(n, tile_cols)

    if GROUPS > 0:
        # The kernel itself loads offs: if a function did, torch would count offs as written (see `device.groups`).
        g = tl.arange(0, GROUPS)
        starts = ends_of(tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= batches), other=0), rows)
        ends = ends_of(tl.load(offs_ptr + g, mask=g < batches, other=0), rows)
        padded = tl.cdiv(ends - starts, 128)  # tiles of 128 rows of each group; of 128 columns where ALONG_K
        padded_ends = tl.cumsum(padded, 0)
    if not ALONG_K:
        if GROUPS > 0:
            tiles_m = last_of(padded_ends)
            tiles = tiles_m * tiles_n
            if quantizes(EPILOGUE):
                clear_scale_tiles(out_scales_ptr, tiles_m, row_tiles_a, tl.cdiv(blocks, 4) * 128, 1024)
            else:
                clear_rows(out_ptr, last_of(ends), m, out_cols, 4, 512)
            store_row_tiles(table_ptr, starts, ends, padded, padded_ends, tiles_n, GROUP_M, BM, GROUPS)
            tl.debug_barrier()  # the table is complete
        else:
            tiles_m = tl.cdiv(m, BM)
            tiles = batches * tiles_m * tiles_n
        if finds_amax(EPILOGUE) and GROUPS == 0:
            amax = tl.zeros((BM, 2), tl.int32)
        if TMA:
            tl.assume(k > 0)  # so that Triton makes no second epilogue, for tiles without steps
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=WARP_SPECIALIZE,
                             warp_specialize=WARP_SPECIALIZE, disallow_acc_multi_buffer=not TWO_SUMS):  # fmt: skip
            a_outer = a_outer_ptr
            b_outer = b_outer_ptr
            if GROUPS > 0:
                group, a_row, end = load_entry(table_ptr, tile)
                tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
                batch = 0
                a_row_tile = tile_m
                b_batch = 0 if below else group
                matrix = 2 * group if below else 0
                a_outer += group * a_outer_each
                b_outer += group * b_outer_each
            else:
                batch = tile // (tiles_m * tiles_n)
                tile_m, tile_n = grouped_tile(tile % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
                a_row = batch * m + tile_m * BM
                end = (batch + 1) * m
                a_row_tile = batch * row_tiles_a + tile_m * (BM // 128)
                b_batch = batch if B_BATCHED else 0
                matrix = 0
            b_row = b_batch * n + tile_n * tile_cols
            b_row_tile = b_batch * row_tiles_b + tile_n * (tile_cols // 128)
            # Loaded before the steps, which hide the latency; all parts share the factor.
            row = (a_row + tl.arange(0, BM))[:, None]
            factor = factor_of_rows(row, end, 0, a_outer, b_outer, rescale_mode(A_OUTER), rescale_mode(B_OUTER))
            pair_factor = factor
            if PAIR and B_OUTER == "group" and not below:
                pair_factor = factor_of_rows(row, end, 0, a_outer, b_outer + pair_outer, rescale_mode(A_OUTER),
                                             "tensor")  # fmt: skip
            acc = tl.zeros((BM, BN), tl.float32)
            # No argument counts steps: Triton takes an argument of 1 for a constant, and its code for specialised warps
            # and one step ends barriers that copies may still arrive at.
            for k_col in range(0, k, BK):
                step = k_col // BK
                a = load_codes(a_source, a_row, step * a_bytes, end, a_per_row, BM, a_bytes, TMA, EVEN_K)
                b = load_codes(b_source, b_row, step * b_bytes, (b_batch + 1) * n, b_per_row, tile_cols, b_bytes, TMA,
                               EVEN_K, matrices, matrix)  # fmt: skip
                col_tile = step * (scale_cols // 4)
                a_scale = load_scales(a_scales, a_row_tile, col_tile, (batch + 1) * row_tiles_a, col_tiles, BM,
                                      scale_cols, TMA)  # fmt: skip
                b_scale = load_scales(b_scales, b_row_tile, col_tile, (b_batch + 1) * row_tiles_b, col_tiles,
                                      tile_cols, scale_cols, TMA, matrices, matrix)  # fmt: skip
                acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK, ISA)

            parts = column_parts(acc, PARTS)
            scales = ()
            col_of_part = tl.arange(0, stored_cols)[None, :]
            tile_ptr = out_ptr + (a_row.to(tl.int64) * out_cols + tile_n * (stored_cols * (PARTS // matrices)))
            part_ptr = tile_ptr + (tl.arange(0, BM)[:, None] * out_cols + col_of_part)
            if finds_amax(EPILOGUE) and GROUPS > 0:
                amax = tl.zeros((BM, 2), tl.int32)
            for i in tl.static_range(PARTS // matrices):
                col0 = tile_n * tile_cols + i * part_cols
                col = (col0 + tl.arange(0, part_cols))[None, :]
                part = rescale_columns(parts[i], factor, col, n, batch, b_outer, bias_ptr, rescale_mode(A_OUTER),
                                       rescale_mode(B_OUTER), BIAS, B_BATCHED)  # fmt: skip
                pair = None
                if PAIR:  # of the second matrix of B
                    pair_rows = pair_outer if B_OUTER == "row" else 0
                    pair = rescale_columns(parts[i + PARTS // 2], pair_factor, col, n, batch, b_outer + pair_rows,
                                           bias_ptr + n, rescale_mode(A_OUTER), rescale_mode(B_OUTER), BIAS,
                                           B_BATCHED)  # fmt: skip
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
                        found = amax_of_part(part, EPILOGUE, ISA)
                        if GROUPS == 0:
                            found = tl.where(row < end, found, 0)
                        amax = tl.maximum(amax, tl.where(col0 < n, found, 0))
                    part = stored(part, out_ptr, ISA)
                if TMA_STORE:
                    target.store([a_row, col0], part)
                else:
                    tl.store(part_ptr + i * stored_cols, part, mask=(row < end) & (col0 + col_of_part < out_cols))
            if quantizes(EPILOGUE):
                store_scale_tiles(out_scales_ptr, joined_columns(scales), tile_m * 0 + batch, tile_m, tile_n, m, blocks)
            if finds_amax(EPILOGUE) and GROUPS > 0:
                raise_maximum(maxima_ptr + group, tl.where(row < end, amax, 0))
        if finds_amax(EPILOGUE) and GROUPS == 0:
            store_maximum(maxima_ptr, amax, MAXIMA)
    else:
        tiles_m = tl.cdiv(m, BM)
        tiles = tiles_m * tiles_n  # of a group
        mine = tiles_of_program(batches * tiles)
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
            acc = multiply(a, a_scale, b, b_scale, acc, A_ELEMENT, B_ELEMENT, SCALE, BLOCK, ISA)

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
    """Whether both operands are block-scaled with swizzled scales.

    Offsets within a tile of 128 rows are 32-bit numbers.
    """
    if p.ragged or not p.target.block_scaled_matrix_units or "none" in (p.a.scale, p.b.scale):
        return False
    if statically_true(p.n >= 2**24):
        return False
    return p.a.swizzled and p.b.swizzled


def _quantizes(p: Problem) -> bool:
    """Whether the epilogue can quantise: on SM100 and SM103, where a thread holds whole rows of a tile.

    TMA reads tiles of two matmuls. With more than 4 bytes of operands for an element beside them, registers spill.
    """
    whole = p.batches == 1 and statically_true(p.n % 128 == 0) and p.operand_bytes <= 4
    pairs = not p.spec.pair or (whole and block_scaled_config(p).tma)
    return 100 <= p.target.sm < 120 and pairs


def _serves_groups(p: Problem) -> bool:
    """Whether both operands are block-scaled with swizzled scales, and TMA copies their rows.

    On SM120 only groups of rows: without specialised warps, Triton does not overlap the loop over the steps of several
    tiles.
    """
    if not p.ragged or not p.target.block_scaled_matrix_units or not (p.a.swizzled and p.b.swizzled):
        return False
    if p.target.isa == 120 and p.along_k:
        return False
    # A descriptor of a matrix without columns would not be valid.
    return (
        compatible(p.a.format, p.b.format)
        and statically_true(p.padded_k > 0)
        and tma_copies(*((x.format, p.row_bytes(x)) for x in (p.a, p.b)))
    )


def _quantizes_groups(p: Problem) -> bool:
    """Whether the epilogue can quantise: for groups of rows, under the conditions without groups."""
    few = p.target.isa == 100 and p.operand_bytes <= 4 and not statically_true(p.n >= 2**24)
    return p.by_rows and few and (not p.spec.pair or statically_true(p.n % 128 == 0))


def _finds_amax(p: Problem) -> bool:
    """Whether the epilogue can find the amax: n is a multiple of 32, so no part has columns out of bounds."""
    quantizes_result = _quantizes(p) if not p.ragged else _quantizes_groups(p)
    return quantizes_result and statically_true(p.n % 32 == 0)


def sm100_config(p: Problem) -> BlockScaledConfig:
    """The configuration of `sm100_configs` with the least traffic."""
    return with_least_traffic(p, sm100_configs(p))


def sm100_configs(p: Problem) -> tuple[BlockScaledConfig, ...]:
    """Every configuration that is worth timing.

    A step is 128 bytes of the wider operand's codes, and 128 columns where groups lie along K: no step has columns of
    two groups. Results whose rows are not multiples of 16 bytes are stored one by one, which takes more registers. An
    epilogue that quantises has the configurations that it has without groups.
    """
    if p.spec.result is not None or p.spec.amax or p.target.isa == 120:
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


def _run(call: Call, config: BlockScaledConfig) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result, or its codes and swizzled block scales, or the result and maxima, in one launch."""
    p, (out, scales) = call.problem, call.empty_results()
    groups = 0 if not p.ragged else p.groups
    blocks, columns = ceil_div(p.padded_k, p.a.format.block_cols), config.bn // (2 if p.spec.pair else 1)
    even = statically_true(blocks * p.a.format.block_cols % config.bk == 0)
    whole_rows = not groups and p.batches == 1 and statically_true(out.shape[-1] * out.element_size() % 16 == 0)
    a_outer, b_outer, bias = call.rescale_pointers(out)
    stored_cols = (
        p.n if p.spec.result is None else ceil_div(p.n, p.spec.result.block_cols) * p.spec.result.block_cols // 2
    )
    row_tiles, table, a_each, b_each = ceil_div(p.m, TILE_ROWS), out, 0, 0
    most = min(p.target.multiprocessors, PARTIAL_MAXIMA)
    if p.by_rows:
        tiles, row_tiles = row_tiles + groups, padded_rows(p.rows, groups) // TILE_ROWS
    else:
        tiles = ceil_div(p.m, config.bm) * (groups or p.batches)
    tiles = tiles * ceil_div(p.n, columns)
    to_pair = p.n if p.b.outer == "row" else 0
    if groups:
        most, table = p.target.multiprocessors, call.offs.new_empty((tiles, 4))
        # Row scales of a group of a, and of a matrix of b.
        a_each = {"group": 1, "row": p.m if p.along_k else 0}.get(p.a.outer, 0)
        b_each = {"group": 1, "row": p.b_rows}.get(p.b.outer, 0)
        to_pair = groups * b_each if p.two_weights else to_pair
    elif p.b.outer == "group":
        to_pair = call.b.outer.stride(0)
    launch(
        gemm_block_scaled_sm100, torch.sym_min(tiles, most),
        call.a.data, call.a.scales, a_outer, call.b.data, call.b.scales, b_outer, bias, out, scales,
        out if call.result_outer is None else call.result_outer, *call.epilogue_pointers(out),
        out if call.offs is None else call.offs, table,
        groups or p.batches, p.rows, p.m, p.n, stored_cols, p.row_bytes(p.a), p.row_bytes(p.b),
        ceil_div(p.padded_k, config.bk) * config.bk, row_tiles, ceil_div(p.n, TILE_ROWS), ceil_div(blocks, 4),
        a_each, b_each, to_pair, num_warps=config.num_warps, num_stages=config.stages,
        A_ELEMENT=p.a.element, B_ELEMENT=p.b.element, SCALE=p.a.scale, BLOCK=p.a.format.block_cols,
        PAIR=int(p.spec.pair) + int(p.two_weights), GROUPS=triton.next_power_of_2(groups) if groups else 0,
        ALONG_K=int(p.along_k), EVEN_K=int(even or groups > 0), EVEN_BLOCKS=int(call.even_blocks),
        TMA_STORE=int(whole_rows and config.tma), ALIGN=power_of_two(stored_cols, 16), MAXIMA=PARTIAL_MAXIMA,
        **config.constants, **call.rescale_constants, EPILOGUE=call.epilogue_text, ISA=p.target.isa,
    )  # fmt: skip
    return out if out is scales else (out, scales)


CANDIDATE = Candidate(
    "block_scaled_sm100", "native", _serves, block_scaled_config, _run, block_scaled_configs,
    takes_epilogue=lambda p: True, quantizes=_quantizes, finds_amax=_finds_amax, any_rows=True,
)  # fmt: skip
# The same kernel at another rank: no library ranks before it.
GROUPED = Candidate(
    "grouped_block_scaled_sm100", "native", _serves_groups, sm100_config, _run, sm100_configs,
    takes_epilogue=lambda p: p.spec.results > 1, quantizes=_quantizes_groups, finds_amax=_finds_amax,
)  # fmt: skip
