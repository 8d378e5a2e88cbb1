"""Quantise down the columns, with an optional Hadamard transform, and along the rows of the same tile.

The tile is read twice: as a column tile and, for the rows, as blocks of a row. The second read comes from the cache.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.templates.device.block_scales import block_scale, encode_scale, make_outer_scales, outer_scales
from fp4compile.templates.device.column_tile import (
    column_tile_amax,
    load_column_tile,
    transform_column_tile,
    unpack_column_tile,
)
from fp4compile.templates.device.elements import encode_run, encode_runs, infinity_to_nan, word_amax
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tile_of, tiles_along
from fp4compile.templates.device.packed_encoding import encode_exact_runs, exact_in_bf16
from fp4compile.templates.device.philox import match_layout, philox, runs_of_a_call, words_of_run
from fp4compile.templates.device.values import takes_values, values_of_units
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.amax import amax_of_columns, outer_of, outer_of_matrices, static_outer
from fp4compile.templates.quantize.heuristics import column_config
from fp4compile.templates.quantize.outputs import (
    Outer,
    Output,
    column_aligns,
    format_constants,
    store_aligns,
    tile_grid,
    whole_tiles,
)
from fp4compile.templates.quantize.row import encode_and_store, seed_pointer
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View


def outers_of(
    source: Source, fmt: BlockFormat, static: torch.Tensor | None, *, with_rows: bool, transform: bool,
    each_matrix: bool = False,
) -> tuple[Outer, Outer]:  # fmt: skip
    """The outer scales along the rows and down the columns; dynamic ones may depend on the direction.

    The second Outer has the launches that find all amaxes. static, each_matrix: see `outer_of`. With an outer scale for
    each row or column, the mode is "row amax" and the shapes are [batch * rows] (no tensor unless with_rows) and
    [batch * cols].
    """

    def empty(count) -> View:
        return View.flat(source.tensor.new_empty(count, dtype=torch.float32), count)

    if static is not None and static.dim():
        both = static_outer(source.batch * source.cols, static)
        return both, both
    if static is None and fmt.outer == "row" and source.amax_bits is not None:
        both = Outer("row amax", empty(source.batch * source.cols), source.amax_bits)
        return both, both
    if static is None and fmt.outer == "row":
        rows = "each" if with_rows else None
        amax, launch = amax_of_columns(source, rows=rows, transform=transform, each=True)
        along = empty(source.batch * source.rows) if with_rows else None
        return (
            Outer("row amax", along, amax),
            Outer("row amax", empty(source.batch * source.cols), amax, (launch,)),
        )
    if static is None and fmt.outer == "tensor" and transform and source.amax_bits is None:
        rows = "all" if with_rows else None
        amax, launch = amax_of_columns(source, rows=rows, transform=True, each=False, each_matrix=each_matrix)
        if each_matrix:  # with rows, the amaxes of rows and columns are pairs
            return outer_of_matrices(source, amax, ()), outer_of_matrices(source, amax, (launch,))
        if not with_rows:
            both = Outer("amax", empty(1), amax, (launch,))
            return both, both
        first, last = (View.flat(amax.tensor.narrow(0, i, 1), 1) for i in (0, 1))
        return Outer("amax", empty(1), first), Outer("amax", empty(1), last, (launch,))
    both = outer_of(source, fmt, static, each_matrix)
    return both, both


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
    """The launch of the kernel for columns and, if `rows` is given, rows. outers: see `outers_of`."""
    along, down = outers
    constants = format_constants(fmt)
    config = column_config(fmt.element, constants["BLOCK"], rows is not None)
    height, width = config.row_tiles * constants["BLOCK"], 2 * config.words
    isa, data = source.target.isa, columns.data
    constants |= {
        "ALONG_ROWS": rows is not None, "TRANSFORM": transform, "SEEDED": seed is not None, "STREAM": stream,
        **along.constants, "SWIZZLED": layout == "swizzled", "ALIGN": source.align, **store_aligns(source.cols, fmt),
        **column_aligns(source.rows, fmt), "WHOLE": isa >= 100 and whole_tiles(source, height, width, layout),
        "BATCHED": isa < 100 or not statically_true(source.batch == 1), "ISA": isa, **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, *(rows or columns).pointers, *along.pointers(data), *columns.pointers, *down.pointers(data),
        seed_pointer(seed, data), *source.args,
    )  # fmt: skip
    return Launch(quantize_columns, tile_grid(source, height, width, layout), arguments, constants, config.num_warps)


@triton.jit
def interleave_columns(first, second):
    """[ROW_TILES, WORDS, n] of the even columns and of the odd columns -> [columns, ROW_TILES * n]."""
    both = tl.permute(tl.join(first, second), (1, 3, 0, 2))
    return tl.reshape(both, (both.shape[0] * 2, both.shape[2] * both.shape[3]))


@triton.jit
def join_runs(runs):
    """2, 4 or 8 int32 tensors [a, b] -> one int64 tensor [a, b, n / 2], two neighbouring runs in each number."""
    pairs = ()
    for i in tl.static_range(0, len(runs), 2):
        low = runs[i].to(tl.int64) & 0xFFFFFFFF
        pairs = pairs + (low | (runs[i + 1].to(tl.int64) << 32),)
    if len(pairs) == 1:
        return pairs[0][:, :, None]
    elif len(pairs) == 2:
        return tl.join(pairs[0], pairs[1])
    else:
        joined = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
        return tl.reshape(joined, (joined.shape[0], joined.shape[1], 4))


@triton.jit
def take_run(values, START: tl.constexpr, COUNT: tl.constexpr, MASK_INFINITY: tl.constexpr):
    """COUNT of the float32 tensors, from number START on. MASK_INFINITY: replace infinities by NaN."""
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
def encode_two_columns(
    first, second, first_factor, second_factor, seed_ptr, first_call, second_call,
    ELEMENT: tl.constexpr, MASK_INFINITY: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """`encode_column_tile` for the even and the odd columns at once: for SM100, which computes with pairs.

    first_call, second_call: the counters of the random words of each block's first elements.
    """
    count: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    runs: tl.constexpr = runs_of_a_call(ISA)
    first_units = ()
    second_units = ()
    for i in tl.static_range(0, len(first), count):
        first_noise = ()
        second_noise = ()
        if SEEDED:
            if i // count % runs == 0:
                first_words = philox(first_call + i // (count * runs), tl.load(seed_ptr), STREAM, ISA)
                second_words = philox(second_call + i // (count * runs), tl.load(seed_ptr), STREAM, ISA)
            first_noise = words_of_run(first_words, i // count % runs, ISA)
            second_noise = words_of_run(second_words, i // count % runs, ISA)
        one, other = encode_runs(
            take_run(first, i, count, MASK_INFINITY), take_run(second, i, count, MASK_INFINITY),
            first_factor, second_factor, first_noise, second_noise, ELEMENT, ISA,
        )  # fmt: skip
        first_units = first_units + (one,)
        second_units = second_units + (other,)
    return join_runs(first_units), join_runs(second_units)


@triton.jit
def encode_exact_column_tile(tile, first_factor, second_factor, ELEMENT: tl.constexpr):
    """`encode_two_columns` for a column tile of bf16 words whose products are `exact_in_bf16`."""
    count: tl.constexpr = 8 if ELEMENT == "e2m1" else 4
    first_units = ()
    second_units = ()
    for i in tl.static_range(0, len(tile), count):
        words = ()
        for j in tl.static_range(i, i + count):
            words = words + (tile[j],)
        one, other = encode_exact_runs(words, first_factor, second_factor, ELEMENT)
        first_units = first_units + (one,)
        second_units = second_units + (other,)
    return join_runs(first_units), join_runs(second_units)


@triton.jit
def encode_columns(
    tile, first, second, first_factor, second_factor, seed_ptr, even_block, blocks,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, TRANSFORM: tl.constexpr,
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
    if not SEEDED and exact_in_bf16(SCALE, dtype, ISA):
        first_units, second_units = encode_exact_column_tile(tile, first_factor, second_factor, ELEMENT)
    elif ISA >= 100 and TRANSFORM:
        first_units, second_units = encode_two_columns(
            first, second, first_factor, second_factor, seed_ptr, call0, call0 + blocks * calls,
            ELEMENT, MASK_INFINITY, SEEDED, STREAM, ISA,
        )  # fmt: skip
    else:
        first_units = encode_column_tile(
            first, first_factor, seed_ptr, call0, ELEMENT, MASK_INFINITY, SEEDED, STREAM, ISA
        )
        second_units = encode_column_tile(
            second, second_factor, seed_ptr, call0 + blocks * calls, ELEMENT, MASK_INFINITY, SEEDED, STREAM, ISA
        )
    return first_units, second_units


@triton.jit
def read_columns(tile, TRANSFORM: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr):
    """A column tile -> (even columns, odd columns, amax bits of their blocks, for even and for odd columns)."""
    if TRANSFORM:
        return transform_column_tile(tile, dtype, ISA)
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
    HAS_OUTER: tl.constexpr, TRANSFORM: tl.constexpr, MASK_INFINITY: tl.constexpr, SEEDED: tl.constexpr,
    STREAM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(codes as int64 units [columns, n], scale bytes of the even columns' and of the odd columns' blocks) of a tile.

    first, second, *_amax: results of `read_columns`. encode, decode: outer scales, each a pair for the even and the odd
    columns. even_column: the number in the output (int64) of each even column, [1, WORDS]. block0: the number of the
    tile's first block in its columns. blocks: blocks of a column.
    """
    first_byte, first_factor = block_scale(first_amax, encode[0], decode[0], HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    second_byte, second_factor = block_scale(
        second_amax, encode[1], decode[1], HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA
    )
    first_units, second_units = encode_columns(
        tile, first, second, first_factor, second_factor, seed_ptr, even_column * blocks + block0, blocks,
        dtype, ELEMENT, SCALE, BLOCK, TRANSFORM, MASK_INFINITY, SEEDED, STREAM, ISA,
    )  # fmt: skip
    return interleave_columns(first_units, second_units), first_byte, second_byte


@triton.jit
def store_column_values(
    columns_ptr, units, bytes, column, block0, blocks, mask, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store results of `scale_and_encode_columns` as 16-bit dequantised values: at columns `column`, from block0 on.

    Lanes exchange codes, not values: codes are a quarter or half of the bytes.
    """
    words = values_of_units(units, bytes, ELEMENT, SCALE, columns_ptr.dtype.element_ty, ISA)
    store_units(columns_ptr, words, column, block0 * (BLOCK // 2), blocks * (BLOCK // 2), mask, 8)


@triton.jit
def quantize_columns(
    x_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr,
    columns_ptr, column_scales_ptr, column_outer_ptr, column_amax_ptr, seed_ptr,
    rows, cols, x_batch, x_row,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
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
    column is read at column_outer_ptr. OUTER "row amax": each column's decode factor is made from the bits at
    column_amax_ptr, [batch, cols], and stored at column_outer_ptr; with ALONG_ROWS the bits of rows and columns are
    [batch, rows + cols], and the decode factors of the rows are stored at outer_ptr. OUTER "matrix amax": each matrix
    has an amax at column_amax_ptr, and its decode factor is stored at column_outer_ptr; with ALONG_ROWS and TRANSFORM
    each matrix has two amaxes, of the rows and then of the columns, and the decode factor of the rows is stored at
    outer_ptr. WHOLE: tiles divide each matrix, so that nothing needs a mask. BATCHED: there may be several matrices.
    Only on SM100 is WHOLE ever True or BATCHED ever False: there, masks are a tenth of the instructions, and the number
    of the matrix is a twentieth.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    has_outer: tl.constexpr = OUTER != "none"
    amaxes: tl.constexpr = 2 if ALONG_ROWS and TRANSFORM else 1  # of a matrix

    # Swizzled scales have padding below and beside the scales of the tensor. The tiles cover it.
    unsigned: tl.constexpr = ISA >= 100
    padded_rows = tiles_along(rows, 128, unsigned) * 128 if SWIZZLED else rows
    padded_cols = tiles_along(cols, 128, unsigned) * 128 if SWIZZLED else cols
    col_tiles = tiles_along(padded_cols, col_count, unsigned)
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, col_tiles, row_count, False, unsigned,
                                        BATCHED)  # fmt: skip
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    cols_left = tl.minimum(cols - col0, col_count)
    tile_ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    first_tile = (row_tile == 0) & (col_tile == 0)

    if ALONG_ROWS:
        row = row0 + tl.arange(0, row_count)
        words = load_tile(tile_ptr + row.to(tl.int64) * x_row, cols_left, row < rows, dtype,
                          row_count, col_count // BLOCK, BLOCK, VECTORS, ALIGN, WHOLE)  # fmt: skip
        if OUTER == "row amax":
            encode, decode = make_outer_scales(amax_ptr + batch.to(tl.int64) * (rows + cols) + row, outer_ptr,
                                        batch.to(tl.int64) * rows + row, row < rows, col_tile == 0,
                                        SCALE, CONTRACT, ISA)  # fmt: skip
            encode = encode[:, None]
            decode = decode[:, None]
        elif OUTER == "matrix amax":
            encode, decode = make_outer_scales(amax_ptr + batch * amaxes, outer_ptr, batch, True, first_tile,
                                               SCALE, CONTRACT, ISA)  # fmt: skip
        else:
            encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, CONTRACT, ISA)
        encode_and_store(words, word_amax(words, 2, ISA, dtype), encode, decode, data_ptr, scales_ptr, seed_ptr,
                         batch, row, col0 // BLOCK, rows, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK, has_outer,
                         OUTER != "row amax", SEEDED, 0, SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA, False,
                         WHOLE)  # fmt: skip

    tile = load_column_tile(tile_ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)
    first, second, first_amax, second_amax = read_columns(tile, TRANSFORM, dtype, ISA)

    column = col0 + tl.arange(0, col_count)
    if OUTER == "row" or OUTER == "row amax":
        at = batch.to(tl.int64) * cols + column
        if OUTER == "row":
            decode = tl.load(column_outer_ptr + at, mask=column < cols, other=1.0)
            encode = encode_scale(decode, ISA)
        else:
            if ALONG_ROWS:
                column_amax_ptr += batch.to(tl.int64) * (rows + cols) + rows
            else:
                column_amax_ptr += batch.to(tl.int64) * cols
            encode, decode = make_outer_scales(column_amax_ptr + column, column_outer_ptr, at, column < cols,
                                               row_tile == 0, SCALE, CONTRACT, ISA)  # fmt: skip
        encodes = even_and_odd(encode)
        decodes = even_and_odd(decode)
    else:
        if OUTER == "matrix amax":
            encode, decode = make_outer_scales(
                column_amax_ptr + (batch * amaxes + (amaxes - 1)), column_outer_ptr, batch, True, first_tile,
                SCALE, CONTRACT, ISA,
            )  # fmt: skip
        elif ISA < 100 or not ALONG_ROWS or TRANSFORM:  # else rows and columns share one outer scale
            encode, decode = outer_scales(OUTER, column_outer_ptr, column_amax_ptr, PARTIAL_MAXIMA, CONTRACT, ISA)
        encodes = (encode, encode)
        decodes = (decode, decode)

    blocks = tiles_along(rows, BLOCK, unsigned)
    block0 = row_tile * ROW_TILES
    even_column = batch.to(tl.int64) * cols + col0 + 2 * tl.arange(0, WORDS)[None, :]
    units, first_byte, second_byte = scale_and_encode_columns(
        tile, first, second, first_amax, second_amax, encodes, decodes, seed_ptr, even_column, block0, blocks,
        dtype, ELEMENT, SCALE, CONTRACT, BLOCK, has_outer, TRANSFORM, SCALE == "none" and OUTER == "row", SEEDED,
        STREAM, ISA,
    )  # fmt: skip
    # An int64 holds 16 codes of four bits, or 8 of eight.
    per_block: tl.constexpr = BLOCK // 16 if ELEMENT == "e2m1" else BLOCK // 8
    per_column = tiles_along(rows, 16, unsigned) * 2 if SCALE == "none" else blocks * per_block
    column_row = batch.to(tl.int64) * cols + column
    if SCALE != "none":
        bytes = interleave_columns(first_byte[:, :, None], second_byte[:, :, None])
    if takes_values(columns_ptr.dtype):
        store_column_values(columns_ptr, units, bytes, column_row, block0, blocks, column < cols, ELEMENT, SCALE, BLOCK,
                            ISA)  # fmt: skip
    else:
        store_units(columns_ptr, units, column_row, block0 * per_block, per_column, column < cols, COLUMN_UNIT_ALIGN,
                    WHOLE, ISA >= 100)  # fmt: skip
    if SCALE != "none" and not takes_values(columns_ptr.dtype):
        store_scales(column_scales_ptr, bytes, batch, column, block0, cols, blocks, SWIZZLED, COLUMN_SCALE_ALIGN, WHOLE,
                     ISA >= 100)  # fmt: skip
