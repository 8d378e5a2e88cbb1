"""Quantise down the columns, with an optional Hadamard transform, and along the rows of the same tile.

The tile is read twice: as a column tile and, for the rows, as blocks of a row. The second read comes from the cache.

Groups of rows are quantised down the columns of each group. They lie in the output one after the other, each padded
with zeros to tiles of 128 rows: tile t has the padded rows from 128 * t on, and they are of one group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_ROWS
from fp4compile.templates.device.block_scales import block_scale, encode_scale, make_outer_scales, outer_scales
from fp4compile.templates.device.column_tile import (
    column_tile_amax,
    load_column_tile,
    transform_column_tile,
    unpack_column_tile,
)
from fp4compile.templates.device.elements import encode_run, infinity_to_nan, word_amax
from fp4compile.templates.device.groups import of_lanes, per_lane, tile_of_group
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tile_of, tiles_along
from fp4compile.templates.device.philox import match_layout, philox, runs_of_a_call, words_of_run
from fp4compile.templates.device.register_tile import join_to_int64, stack_tensors
from fp4compile.templates.device.values import takes_values, values_of_units
from fp4compile.templates.launch import Launch, LaunchConfig
from fp4compile.templates.quantize.outputs import (
    Outer,
    Output,
    column_aligns,
    format_constants,
    store_aligns,
    tile_grid,
    whole_tiles,
)
from fp4compile.templates.quantize.row import encode_and_store_codes, seed_pointer, store_group_outers, store_row_scales
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.writes import of, of_outer, of_scales, writes


@dataclass(frozen=True)
class ColumnConfig(LaunchConfig):
    """`quantize_columns`: tiles of row_tiles blocks down the columns by 2 * words columns."""

    num_warps: int
    row_tiles: int
    words: int
    vectors: int


def column_config(element: str, block: int, both: bool) -> ColumnConfig:
    """The configuration of `quantize_columns`. both: whether it also quantises along the rows, or tiles have 128
    rows, to which groups are padded.

    A thread holds whole blocks of its columns. With more words per thread, loads would be 16 bytes wide, but registers
    would suffice for fewer programs: that was slower.
    """
    if element == "e2m1":
        return ColumnConfig(num_warps=4, row_tiles=128 // block, words=32, vectors=4)
    if both or block > 32:
        return ColumnConfig(num_warps=min(4, 256 // block), row_tiles=128 // block, words=64, vectors=2)
    return ColumnConfig(num_warps=8, row_tiles=8, words=64, vectors=2)


def columns_launch(
    source: Source,
    fmt: BlockFormat,
    outers: tuple[Outer, Outer],
    layout: str,
    columns: Output,
    rows: Output | None = None,
    *,
    seed: torch.Tensor | None,
    stream: int,
    transform: bool,
) -> Launch:
    """The launch of `quantize_columns` for columns and, if `rows` is given, rows. outers: see `amax.outers_of`."""
    along, down = outers
    constants = format_constants(fmt)
    config = column_config(fmt.element, constants["BLOCK"], rows is not None or source.groups > 0)
    height, width = config.row_tiles * constants["BLOCK"], 2 * config.words
    isa, data = source.target.isa, columns.data
    if source.groups:
        whole = statically_true(source.cols % max(width, TILE_ROWS) == 0)
    else:
        whole = whole_tiles(source, height, width, layout)
    constants |= {
        "GROUPS": source.groups, "ALONG_ROWS": rows is not None, "TRANSFORM": transform,
        "SEEDED": seed is not None, "STREAM": stream, **along.constants, "SWIZZLED": layout == "swizzled",
        "ALIGN": source.align, **store_aligns(source.cols, fmt), **column_aligns(source, fmt),
        "WHOLE": isa >= 100 and whole, "BATCHED": isa < 100 or not statically_true(source.batch == 1), "ISA": isa,
        **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, source.offs, *(rows or columns).pointers, *along.pointers(data), *columns.pointers,
        *down.pointers(data), seed_pointer(seed, data), *source.args,
    )  # fmt: skip
    return Launch(quantize_columns, tile_grid(source, height, width, layout), arguments, constants, config.num_warps)


@triton.jit
def interleave_columns(first, second):
    """[ROW_TILES, WORDS, n] of the even columns and of the odd columns -> [columns, ROW_TILES * n]."""
    both = tl.permute(tl.join(first, second), (1, 3, 0, 2))
    return tl.reshape(both, (both.shape[0] * 2, both.shape[2] * both.shape[3]))


@triton.jit
def join_runs(runs):
    """n int32 tensors [a, b], n a power of two -> one int64 tensor [a, b, n / 2], two neighbours in each number."""
    pairs = join_to_int64(runs)
    if len(pairs) == 1:
        return pairs[0][:, :, None]
    else:
        return stack_tensors(pairs)


@triton.jit
def take_run(values, START: tl.constexpr, COUNT: tl.constexpr, MASK_INFINITY: tl.constexpr):
    """Elements START to START + COUNT of a tuple of float32 tensors. MASK_INFINITY: replace infinities by NaN."""
    run = ()
    for i in tl.static_range(START, START + COUNT):
        if MASK_INFINITY:
            run = run + (infinity_to_nan(values[i]),)
        else:
            run = run + (values[i],)
    return run


@triton.jit
def encode_column_tile(
    values, factor, seed_ptr, run0,
    ELEMENT: tl.constexpr, MASK_INFINITY: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Codes of one block in each column, 8 bytes an int64: [ROW_TILES, WORDS, n].

    values: the rows of the block, a tuple of float32 tensors [ROW_TILES, WORDS]. run0: the number in the tensor of each
    block's first run of 8 codes (int64), [ROW_TILES, WORDS]; it is the counter of the random words. MASK_INFINITY:
    infinite elements become NaN, because no scale shows them and saturation would hide them.
    """
    count: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    calls: tl.constexpr = runs_of_a_call(ISA)
    runs = ()
    for i in tl.static_range(0, len(values), count):
        run = take_run(values, i, count, MASK_INFINITY)
        noise = ()
        if SEEDED:
            if i // count % calls == 0:
                words = philox(run0 + i // (count * calls), tl.load(seed_ptr), STREAM, ISA)
            noise = words_of_run(words, i // count % calls, ISA)
        runs = runs + (encode_run(run, factor, noise, ELEMENT, ISA),)
    return join_runs(runs)


@triton.jit
def encode_columns(
    tile, first, second, first_factor, second_factor, seed_ptr, even_block, blocks,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr,
    MASK_INFINITY: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(units of the even columns, units of the odd columns) of a tile, [ROW_TILES, WORDS, n] int64.

    tile, first, second: a column tile as words and, unpacked (and transformed), as even and odd columns. *_factor: the
    encode factor of each block. even_block: the number in the output (int64) of the first block of each even column,
    [1, WORDS]; it is the counter of the random words. blocks: blocks of a column.
    """
    # The numbers of the columns' first calls of Philox (for a run of 8 codes, or two): counters of the random words.
    calls: tl.constexpr = BLOCK // (8 * runs_of_a_call(ISA))  # of Philox, for a block
    call0 = match_layout((even_block + tl.arange(0, tile[0].shape[0])[:, None]) * calls, tile[0])
    first_units = encode_column_tile(first, first_factor, seed_ptr, call0, ELEMENT, MASK_INFINITY, SEEDED, STREAM, ISA)
    second_units = encode_column_tile(
        second, second_factor, seed_ptr, call0 + blocks * calls, ELEMENT, MASK_INFINITY, SEEDED, STREAM, ISA
    )
    return first_units, second_units


@triton.jit
def read_columns(tile, TRANSFORM: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr):
    """A column tile -> (even columns, odd columns, amax bits of the even columns' blocks, of the odd columns')."""
    if TRANSFORM:
        return transform_column_tile(tile, dtype)
    else:
        first, second = unpack_column_tile(tile, dtype)
        first_amax, second_amax = column_tile_amax(tile, ISA, dtype)
        return first, second, first_amax, second_amax


@triton.jit
def even_and_odd(values):
    """Numbers of the columns of a tile, [columns] -> (even columns' numbers, odd columns' numbers), [1, WORDS] each."""
    return tl.split(tl.reshape(values, (1, values.shape[0] // 2, 2)))


@triton.jit
def scale_and_encode_columns(
    tile, first, second, first_amax, second_amax, encode, decode, seed_ptr, even_column, block0, blocks,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    HAS_OUTER: tl.constexpr, MASK_INFINITY: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """(codes as int64 units [columns, n], scale bytes of the even columns' and of the odd columns' blocks) of a tile.

    first, second, *_amax: results of `read_columns`. encode, decode: global or row scales, each a pair for the even and
    the odd columns. even_column: the number in the output (int64) of each even column, [1, WORDS]. block0: the number
    of the tile's first block in its columns. blocks: blocks of a column.
    """
    first_byte, first_factor = block_scale(first_amax, encode[0], decode[0], HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    second_byte, second_factor = block_scale(
        second_amax, encode[1], decode[1], HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA
    )
    first_units, second_units = encode_columns(
        tile, first, second, first_factor, second_factor, seed_ptr, even_column * blocks + block0, blocks,
        dtype, ELEMENT, SCALE, BLOCK, MASK_INFINITY, SEEDED, STREAM, ISA,
    )  # fmt: skip
    return interleave_columns(first_units, second_units), first_byte, second_byte


@triton.jit
def store_column_values(
    columns_ptr, units, bytes, column, block0, blocks, mask, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store results of `scale_and_encode_columns` as 16-bit dequantised values: at columns `column`, from block0 on.

    Lanes exchange codes, not dequantised values: codes are a quarter or half of the bytes.
    """
    words = values_of_units(units, bytes, ELEMENT, SCALE, columns_ptr.dtype.element_ty, ISA)
    store_units(columns_ptr, words, column, block0 * (BLOCK // 2), blocks * (BLOCK // 2), mask, 8)


@triton.jit
def store_columns(
    columns_ptr, scales_ptr, units, bytes, batch, column, column_row, block0, cols, blocks, per_column,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, SWIZZLED: tl.constexpr, UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, WHOLE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store a tile's codes and scales, or dequantised values, at columns `column` of a matrix, from block0 on.

    units, bytes: codes as int64 units [columns, n], and scale bytes [columns, blocks of the tile]. column_row: the
    numbers of the columns among those of all matrices (int64). per_column: units of a column.
    """
    per_block: tl.constexpr = units.shape[1] // bytes.shape[1]
    if takes_values(columns_ptr.dtype):
        store_column_values(columns_ptr, units, bytes, column_row, block0, blocks, column < cols, ELEMENT, SCALE, BLOCK,
                            ISA)  # fmt: skip
    else:
        store_units(columns_ptr, units, column_row, block0 * per_block, per_column, column < cols, UNIT_ALIGN,
                    WHOLE, ISA >= 100)  # fmt: skip
    if SCALE != "none" and not takes_values(columns_ptr.dtype):
        store_scales(scales_ptr, bytes, batch, column, block0, cols, blocks, SWIZZLED, SCALE_ALIGN, WHOLE,
                     ISA >= 100)  # fmt: skip


@triton.jit
def clear_codes(units, rows, bits: tl.constexpr):
    """Clear the codes from number `rows` of each column on, in units [columns, n]. bits: bits of a code.

    If a global or row scale is not finite, the zeros beyond a group have nonzero codes.
    """
    kept = tl.maximum(rows * bits - 64 * tl.arange(0, units.shape[1]), 0)
    mask = tl.where(kept >= 64, -1, (tl.full(kept.shape, 1, tl.int64) << tl.minimum(kept, 63).to(tl.int64)) - 1)
    return units & mask[None, :]


def _of_column_outer(arguments: Mapping[str, Any]) -> bool:
    """Whether `quantize_columns` makes global or row scales of the columns, and not of the rows for both."""
    both = arguments["ALONG_ROWS"] and not arguments["TRANSFORM"]
    once = arguments["GROUPS"] > 0 if arguments["OUTER"] == "matrix amax" else arguments["ISA"] >= 100
    return of_outer(arguments) and (arguments["OUTER"] == "row amax" or not (both and once))


@writes(
    "columns_ptr", data_ptr=of("ALONG_ROWS"), scales_ptr=of_scales(where=of("ALONG_ROWS")),
    column_scales_ptr=of_scales("columns_ptr"), column_outer_ptr=_of_column_outer,
    outer_ptr=lambda arguments: arguments["ALONG_ROWS"] and of_outer(arguments),
)  # fmt: skip
@triton.jit
def quantize_columns(
    x_ptr, offs_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr,
    columns_ptr, column_scales_ptr, column_outer_ptr, column_amax_ptr, seed_ptr,
    rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr,
    ALONG_ROWS: tl.constexpr, TRANSFORM: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr,
    OUTER: tl.constexpr, PARTIAL_MAXIMA: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, COLUMN_UNIT_ALIGN: tl.constexpr,
    SCALE_ALIGN: tl.constexpr, COLUMN_SCALE_ALIGN: tl.constexpr, WHOLE: tl.constexpr, BATCHED: tl.constexpr,
    ROW_TILES: tl.constexpr, WORDS: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROW_TILES * BLOCK rows by 2 * WORDS columns. x: [batch, rows, cols], strides x_batch, x_row, 1.

    Codes and scales of x transposed go to columns_ptr and column_scales_ptr; dequantised values instead of codes, if
    columns_ptr points to 16-bit floats. ALONG_ROWS: codes and scales of x go to data_ptr and scales_ptr; their random
    bits are stream 0. STREAM: stream of the columns' random bits.
    OUTER, PARTIAL_MAXIMA: as in `outer_scales`, or one of three further modes. OUTER "row": a decode factor for each
    column is read at column_outer_ptr. OUTER "row amax": each column's decode factor is made of the bits at
    column_amax_ptr, [batch, cols], and stored at column_outer_ptr; with ALONG_ROWS the bits of rows and columns are
    [batch, rows + cols], and the decode factors of the rows are stored at outer_ptr. OUTER "matrix amax": each matrix
    (or group) has an amax at column_amax_ptr, and its decode factor is stored at column_outer_ptr; with ALONG_ROWS (for
    groups) amax_ptr and outer_ptr are those of the rows.
    GROUPS, offs_ptr: as in `quantize_rows`; ROW_TILES * BLOCK is then 128, and results are of padded rows. With "row
    amax", each column of each group has its own scale.
    WHOLE: tiles divide each matrix, so that nothing needs a mask; for groups, they divide the columns, and only rows
    need one. BATCHED: there may be several matrices. WHOLE is True, or BATCHED False, only on SM100: there, masks are a
    tenth of the instructions, and the number of the matrix is a twentieth.
    """
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    has_outer: tl.constexpr = OUTER != "none"
    # An int64 holds 16 codes of four bits, or 8 of eight.
    bits: tl.constexpr = 4 if ELEMENT == "e2m1" else 8
    per_block: tl.constexpr = BLOCK * bits // 64
    whole: tl.constexpr = WHOLE and GROUPS == 0
    row_scales: tl.constexpr = ALONG_ROWS and SCALE != "none" and not takes_values(data_ptr.dtype)

    # Swizzled scales have padding below and beside the scales of the tensor. The tiles cover it.
    unsigned: tl.constexpr = ISA >= 100
    padded_rows = tiles_along(rows, 128, unsigned) * 128 if SWIZZLED else rows
    padded_cols = tiles_along(cols, 128, unsigned) * 128 if SWIZZLED else cols
    col_tiles = tiles_along(padded_cols, col_count, unsigned)
    if GROUPS > 0:
        group, end, row_tile, row0, col_tile = tile_of_group(offs, rows, col_tiles, row_count, GROUPS)
        batch = row_tile * 0
        blocks = (rows // 128 + GROUPS) * (128 // BLOCK)
        first_tile: tl.constexpr = False  # `store_group_outers` stores the scales instead
    else:
        batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False, unsigned,
                                            BATCHED)  # fmt: skip
        group = batch
        row0 = row_tile * row_count
        end = rows
        first_tile = (row_tile == 0) & (col_tile == 0)
    col0 = col_tile * col_count
    if GROUPS > 0:
        block0 = row_tile * ROW_TILES
        column = col0 + tl.arange(0, col_count)
        per_column = blocks * per_block
        if TRANSFORM or not ALONG_ROWS:  # else rows and columns share global or row scales
            store_group_outers(column_amax_ptr, column_outer_ptr, row_tile, col_tile, OUTER, GROUPS, ELEMENT, SCALE,
                               CONTRACT, ISA)  # fmt: skip
        if ALONG_ROWS:
            store_group_outers(amax_ptr, outer_ptr, row_tile, col_tile, OUTER, GROUPS, ELEMENT, SCALE, CONTRACT, ISA)
        if OUTER == "row amax":
            if ALONG_ROWS:  # amaxes of all rows come before those of the columns
                column_amax_ptr += rows
            if row_tile < GROUPS:  # tile t stores the global or row scales of the columns of group t
                at = row_tile.to(tl.int64) * cols + column
                make_outer_scales(
                    column_amax_ptr + at, column_outer_ptr, at, column < cols, True, ELEMENT, SCALE, CONTRACT, ISA
                )
        if group >= GROUPS:
            # If groups are equal, half of the programs have no group. Their zeros need no exchange of lanes.
            store_columns(
                columns_ptr, column_scales_ptr, tl.zeros((col_count, ROW_TILES * per_block), tl.int64),
                tl.zeros((col_count, ROW_TILES), tl.int32), batch, column, batch.to(tl.int64) * cols + column, block0,
                cols, blocks, per_column,
                ELEMENT, SCALE, BLOCK, SWIZZLED, COLUMN_UNIT_ALIGN, COLUMN_SCALE_ALIGN, WHOLE, ISA,
            )  # fmt: skip
            if row_scales and SWIZZLED:
                row_bytes = tl.zeros((row_count, col_count // BLOCK), tl.int32)
                row = row0 + tl.arange(0, row_count)
                store_row_scales(scales_ptr, row_bytes, batch, row_tile, row, col0 // BLOCK, row0, cols, BLOCK, True,
                                 SCALE_ALIGN, WHOLE, True, ISA)  # fmt: skip
            return
    cols_left = tl.minimum(cols - col0, col_count)
    tile_ptr = x_ptr + batch.to(tl.int64) * x_batch + col0

    if ALONG_ROWS:
        row = row0 + tl.arange(0, row_count)
        words = load_tile(tile_ptr + row.to(tl.int64) * x_row, cols_left, row < end, dtype,
                          row_count, col_count // BLOCK, BLOCK, VECTORS, ALIGN, whole)  # fmt: skip
        if OUTER == "row amax":
            encode, decode = make_outer_scales(amax_ptr + batch.to(tl.int64) * (rows + cols) + row, outer_ptr,
                                        batch.to(tl.int64) * rows + row, row < end, col_tile == 0,
                                        ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
            encode = encode[:, None]
            decode = decode[:, None]
        elif OUTER == "matrix amax":
            encode, decode = make_outer_scales(amax_ptr + group, outer_ptr, group, True, first_tile,
                                               ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
        else:
            encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, ELEMENT, SCALE, CONTRACT, ISA)
        row_bytes = encode_and_store_codes(
            words, word_amax(words, 2, ISA, dtype), encode, decode, data_ptr, seed_ptr, batch, row, col0 // BLOCK, end,
            cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK, has_outer, OUTER != "row amax", SEEDED, 0, UNIT_ALIGN, ISA,
            whole,
        )  # fmt: skip
        if row_scales and GROUPS == 0:
            store_row_scales(scales_ptr, row_bytes, batch, row_tile, row, col0 // BLOCK, end, cols, BLOCK, SWIZZLED,
                             SCALE_ALIGN, WHOLE, False, ISA)  # fmt: skip

    tile = load_column_tile(tile_ptr, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, whole)
    first, second, first_amax, second_amax = read_columns(tile, TRANSFORM, dtype, ISA)

    column = col0 + tl.arange(0, col_count)
    if GROUPS == 0:
        blocks = tiles_along(rows, BLOCK, unsigned)
        per_column = tiles_along(rows, 16, unsigned) * 2 if SCALE == "none" else blocks * per_block
    block0 = row_tile * ROW_TILES
    if OUTER == "row" or OUTER == "row amax":
        at = group.to(tl.int64) * cols + column
        if OUTER == "row":
            decode = tl.load(column_outer_ptr + at, mask=column < cols, other=1.0)
            encode = encode_scale(decode, ISA)
        else:
            if GROUPS > 0:
                column_amax_ptr += group.to(tl.int64) * cols
            elif ALONG_ROWS:
                column_amax_ptr += batch.to(tl.int64) * (rows + cols) + rows
            else:
                column_amax_ptr += batch.to(tl.int64) * cols
            first_row: tl.constexpr = GROUPS == 0
            encode, decode = make_outer_scales(column_amax_ptr + column, column_outer_ptr, at, column < cols,
                                               first_row and row_tile == 0, ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
        encodes = even_and_odd(encode)
        decodes = even_and_odd(decode)
    else:
        if OUTER == "matrix amax":
            encode, decode = make_outer_scales(column_amax_ptr + group, column_outer_ptr, group, True, first_tile,
                                               ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
        elif ISA < 100 or not ALONG_ROWS or TRANSFORM:  # else rows and columns share one global or row scale
            encode, decode = outer_scales(
                OUTER, column_outer_ptr, column_amax_ptr, PARTIAL_MAXIMA, ELEMENT, SCALE, CONTRACT, ISA
            )
        encodes = (encode, encode)
        decodes = (decode, decode)

    even_column = batch.to(tl.int64) * cols + col0 + 2 * tl.arange(0, WORDS)[None, :]
    units, first_byte, second_byte = scale_and_encode_columns(
        tile, first, second, first_amax, second_amax, encodes, decodes, seed_ptr, even_column, block0, blocks,
        dtype, ELEMENT, SCALE, CONTRACT, BLOCK, has_outer,
        SCALE == "none" and (OUTER == "row" or OUTER == "tensor"), SEEDED, STREAM, ISA,
    )  # fmt: skip
    column_row = batch.to(tl.int64) * cols + column
    bytes = interleave_columns(first_byte[:, :, None], second_byte[:, :, None])
    if GROUPS > 0:
        rows_left = end - row0
        if rows_left < row_count:
            units = clear_codes(units, rows_left if SCALE == "none" else tl.cdiv(rows_left, BLOCK) * BLOCK, bits)
        bytes = tl.where((tl.arange(0, ROW_TILES) * BLOCK < rows_left)[None, :], bytes, 0)
    store_columns(
        columns_ptr, column_scales_ptr, units, bytes, batch, column, column_row, block0, cols, blocks, per_column,
        ELEMENT, SCALE, BLOCK, SWIZZLED, COLUMN_UNIT_ALIGN, COLUMN_SCALE_ALIGN, WHOLE, ISA,
    )  # fmt: skip
    if row_scales and GROUPS > 0:  # so late, because they then take fewer registers
        store_row_scales(scales_ptr, row_bytes, batch, row_tile, row, col0 // BLOCK, end, cols, BLOCK, SWIZZLED,
                         SCALE_ALIGN, WHOLE, True, ISA)  # fmt: skip
