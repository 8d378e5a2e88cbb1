"""Quantise along the contiguous dimension: blocks of a row.

A program quantises a tile of ROWS x BLOCKS blocks. It writes codes and block scales or, to fake-quantise, their
dequantised values (`encode_and_store`).

Groups of rows: a tile has rows of one group. In swizzled scales, each group's rows are padded to tiles of 128 rows of
scales: tile t of 128 padded rows has the scales of tile row t, and the padding is zero.

The load of a tile has a separate axis for VECTORS neighbouring runs of 16 bytes. Triton spreads this axis over lanes
last, so one thread loads all of them. It then owns whole blocks where that saves work (the arithmetic of an E4M3 scale
is expensive), and as many bytes of codes as one wide store takes.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.templates.device.apply_prologue import read_tile
from fp4compile.templates.device.block_codes import scale_and_encode
from fp4compile.templates.device.block_scales import (
    block_scale,
    encode_scale,
    make_outer_scales,
    outer_scales,
)
from fp4compile.templates.device.dependent_launch import wait
from fp4compile.templates.device.elements import encode_run, unpack, word_amax
from fp4compile.templates.device.groups import of_lanes, per_lane, tile_of_group
from fp4compile.templates.device.memory import store_scales, store_units, tile_of, tiles_along
from fp4compile.templates.device.philox import match_layout, philox, runs_of_a_call
from fp4compile.templates.device.values import takes_values, values_of_units
from fp4compile.templates.launch import Launch, LaunchConfig
from fp4compile.templates.quantize.outputs import (
    Outer,
    Output,
    format_constants,
    padded_scale_shape,
    row_tiles,
    store_aligns,
    whole_tiles,
)
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View
from fp4compile.templates.writes import of_outer, of_scales, of_stored, writes

# The launch configurations were measured on an H200 at 8192 x 8192 bf16 (benchmarks/quantize.py).


@dataclass(frozen=True)
class RowConfig(LaunchConfig):
    """`quantize_rows`: tiles of rows x blocks; a thread loads `vectors` neighbouring runs of 16 bytes."""

    num_warps: int
    rows: int
    blocks: int
    vectors: int


def row_config(element: str, block: int, elements: int | None, isa: int = 0, prologue: bool = False) -> RowConfig:
    """The configuration of `quantize_rows`. elements: length of a tensor of one row (may be symbolic), else None.

    A thread writes 16 bytes of codes at a time. In a small tensor it writes fewer, so that there are more threads. If
    Hopper computes the elements (`prologue`), it writes 8 bytes: a gate takes 85 us with 8 bytes, and 95 us with 16.
    isa: see `Target`.
    """
    vectors = 4 if element == "e2m1" else 2
    if elements is None:
        return RowConfig(num_warps=4, rows=128, blocks=max(64 // block, 1), vectors=vectors)
    if element == "e2m1":
        small = isinstance(elements, int) and elements <= 2**16
        if prologue and 90 <= isa < 100 and not small:
            return RowConfig(num_warps=4, rows=1, blocks=2048 // block, vectors=2)
        return RowConfig(num_warps=4, rows=1, blocks=(512 if small else 4096) // block, vectors=1 if small else vectors)
    return RowConfig(num_warps=4, rows=1, blocks=2048 // block, vectors=vectors)


def row_config_of_groups(element: str, block: int, rows, groups: int, padded: bool) -> RowConfig:
    """The configuration for grouped rows. padded: whether each group is padded to tiles of 128 rows.

    rows: rows of all groups; a symbolic number counts as large. If groups have few rows, a tile has 16 longer rows.
    """
    config = row_config(element, block, None)
    if padded or not statically_true(rows <= 32 * groups):
        return config
    return replace(config, rows=config.rows // 8, blocks=config.blocks * 8)


def rows_launch(
    source: Source,
    fmt: BlockFormat,
    output: Output,
    outer: Outer,
    layout: str,
    seed: torch.Tensor | None,
    stream: int,
) -> Launch:
    """The launch of `quantize_rows`, to follow `outer.launches`."""
    stores, source = source.stored, source.once_read() if outer.computed else source
    constants = format_constants(fmt)
    block = constants["BLOCK"]
    one_outer = outer.mode not in ("row", "row amax", "matrix amax") and not source.groups
    whole_blocks = statically_true(source.cols % block == 0)
    flat = source.flat() if layout == "linear" and one_outer and whole_blocks else None
    # A small tensor has partial maxima (one dimension). For a large one, the time of a launch does not matter.
    # No early start if the first kernel stores results: the second one may read them before it waits.
    small = outer.mode == "amax" and outer.amax.tensor.dim() == 1 and source.amax_bits is None
    dependent = small and source.target.dependent_launch and not stores
    source = flat or source
    computed = source.prologue is not None
    if source.groups:
        config = row_config_of_groups(fmt.element, block, source.rows, source.groups, layout == "swizzled")
    else:
        config = row_config(fmt.element, block, None if flat is None else source.cols, source.target.isa, computed)
    rows, blocks = padded_scale_shape(source.rows, ceil_div(source.cols, block), layout)
    isa = source.target.isa
    # Without masks, a kernel with random words would need more than 64 registers, and ptxas would spill some. And for
    # compute capability 12.0, ptxas 12.8 would lose block scales of float32. If rows of groups have row scales, block
    # scales without masks would take half as many registers again.
    if source.groups:
        width = max(config.blocks * block, TILE_ROWS)
        whole = layout == "swizzled" and outer.mode != "row amax" and statically_true(source.cols % width == 0)
    else:
        whole = seed is None and whole_tiles(source, config.rows, config.blocks * block, layout)
    constants |= {
        "GROUPS": source.groups, "SEEDED": seed is not None, "STREAM": stream, **outer.constants,
        "FLAT": flat is not None, "SWIZZLED": layout == "swizzled", "PDL": dependent, "ALIGN": source.align,
        "WHOLE": isa == 100 and whole, "BATCHED": isa < 100 or not statically_true(source.batch == 1),
        **store_aligns(source.cols, fmt), "PROLOGUE": source.prologue_text, "ISA": isa, **config.constants,
    }  # fmt: skip
    arguments = (
        source.view, source.offs, *output.pointers, *outer.pointers(output.data), seed_pointer(seed, output.data),
        *source.read_args,
    )  # fmt: skip
    grid = row_tiles(source, rows, config.rows) * ceil_div(blocks, config.blocks)
    return Launch(quantize_rows, grid, arguments, constants, config.num_warps)


def seed_pointer(seed: torch.Tensor | None, unused: View) -> View:
    """The pointer of the seed, int64 []; `unused` without one."""
    return unused if seed is None else View.flat(seed, 1)


@triton.jit
def encode_seeded(
    words, factor, block, seed_ptr, dtype: tl.constexpr, ELEMENT: tl.constexpr, STREAM: tl.constexpr, ISA: tl.constexpr
):
    """Words [ROWS, BLOCKS, BLOCK / 2] -> stochastically rounded E2M1 codes, 8 an int32: [ROWS, BLOCKS * BLOCK / 8].

    factor: encode factors of the blocks, [ROWS, BLOCKS]. block: their numbers in the tensor (int64), [ROWS, BLOCKS].
    """
    runs: tl.constexpr = words.shape[2] // 4
    shape: tl.constexpr = (words.shape[0], words.shape[1], runs)
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], runs, 2, 2)))
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    values = unpack(word0, dtype) + unpack(word1, dtype) + unpack(word2, dtype) + unpack(word3, dtype)
    calls: tl.constexpr = runs // runs_of_a_call(ISA)
    call = block[:, :, None] * calls + tl.arange(0, calls)[None, None, :]
    if runs_of_a_call(ISA) == 1:
        noise = philox(match_layout(call, word0), tl.load(seed_ptr), STREAM, ISA)
    else:
        first, _ = tl.split(tl.reshape(word0, (words.shape[0], words.shape[1], calls, 2)))
        word0, word1, word2, word3 = philox(match_layout(call, first), tl.load(seed_ptr), STREAM, ISA)
        noise = (tl.reshape(tl.join(word0, word2), shape), tl.reshape(tl.join(word1, word3), shape))
    codes = encode_run(values, tl.broadcast_to(factor[:, :, None], shape), noise, ELEMENT, ISA)
    return tl.reshape(codes, (words.shape[0], words.shape[1] * runs))


@triton.jit
def encode_and_store(
    words, amax, encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, block0, rows, cols,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    HAS_OUTER: tl.constexpr, STATIC: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, SWIZZLED: tl.constexpr,
    UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, ISA: tl.constexpr, WHOLE: tl.constexpr = False, row_tile=0,
    GROUPED: tl.constexpr = False,
):  # fmt: skip
    """Write the codes and the scales of a tile's words [ROWS, BLOCKS, BLOCK / 2]; see `encode_and_store_codes`.

    GROUPED: the tile is number `row_tile` of a group that ends before row `rows`; see `store_row_scales`.
    """
    byte = encode_and_store_codes(words, amax, encode, decode, data_ptr, seed_ptr, batch, row, block0, rows, cols,
                                  dtype, ELEMENT, SCALE, CONTRACT, BLOCK, HAS_OUTER, STATIC, SEEDED, STREAM,
                                  UNIT_ALIGN, ISA, WHOLE and not GROUPED)  # fmt: skip
    if SCALE != "none" and not takes_values(data_ptr.dtype):
        store_row_scales(scales_ptr, byte, batch, row_tile, row, block0, rows, cols, BLOCK, SWIZZLED, SCALE_ALIGN,
                         WHOLE, GROUPED, ISA)  # fmt: skip


@triton.jit
def store_row_scales(
    scales_ptr, byte, batch, row_tile, row, block0, rows, cols, BLOCK: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr, GROUPED: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store the scale bytes of a tile's rows (int32). GROUPED: swizzled scales are stored in their tile's padded rows,
    zeros from row `rows` on, and WHOLE means that tiles divide the columns, so that only rows need masks."""
    unsigned: tl.constexpr = ISA >= 100
    blocks = tiles_along(cols, BLOCK, unsigned)
    if GROUPED and SWIZZLED:
        count: tl.constexpr = byte.shape[0]
        byte = tl.where((row < rows)[:, None], byte, 0)
        place = row_tile * count + tl.arange(0, count)
        store_scales(scales_ptr, byte, batch, place, block0, (row_tile + 1) * count, blocks, True, ALIGN, WHOLE,
                     unsigned)  # fmt: skip
    else:
        store_scales(scales_ptr, byte, batch, row, block0, rows, blocks, SWIZZLED, ALIGN, WHOLE and not GROUPED,
                     unsigned)  # fmt: skip


@triton.jit
def store_group_outers(amax_ptr, outer_ptr, tile, col_tile, OUTER: tl.constexpr, GROUPS: tl.constexpr,
                       ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr,
                       ISA: tl.constexpr):  # fmt: skip
    """OUTER "matrix amax": tile t stores the global scale of group t, even if it is empty. There are enough tiles."""
    if OUTER == "matrix amax":  # noqa: SIM102 (the constexpr condition stays alone)
        if (tile < GROUPS) & (col_tile == 0):
            make_outer_scales(amax_ptr + tile, outer_ptr, tile, True, True, ELEMENT, SCALE, CONTRACT, ISA)


@triton.jit
def encode_and_store_codes(
    words, amax, encode, decode, data_ptr, seed_ptr, batch, row, block0, rows, cols,
    dtype: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    HAS_OUTER: tl.constexpr, STATIC: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr,
    UNIT_ALIGN: tl.constexpr, ISA: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """Write the codes of a tile's words [ROWS, BLOCKS, BLOCK / 2]; return the bytes of its scales.

    amax: bits of the block amaxes. encode, decode: global or row scales. row, block0: the tile's place in its matrix.
    If data_ptr points to 16-bit floats, dequantised values are written instead of codes (`device.values`).
    STATIC: the global or row scale is static, so an infinite element does not make it infinite. WHOLE: the whole tile
    exists, so nothing needs a mask.
    """
    half: tl.constexpr = BLOCK // 2
    fake: tl.constexpr = takes_values(data_ptr.dtype)
    if SEEDED:
        byte, factor = block_scale(amax, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    blocks = tiles_along(cols, BLOCK, ISA >= 100)
    per_row = tiles_along(cols, 2, ISA >= 100) if SCALE == "none" else blocks * half
    matrix_row = batch.to(tl.int64) * rows + row
    per_unit: tl.constexpr = 4 if SEEDED and not fake else 1  # pairs of codes in a unit
    if SEEDED:
        block = matrix_row[:, None] * blocks + (block0 + tl.arange(0, words.shape[1]))[None, :]
        units = encode_seeded(words, factor, block, seed_ptr, dtype, ELEMENT, STREAM, ISA)
    else:
        byte, units = scale_and_encode(words, amax, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, STATIC, fake,
                                       dtype, ISA)  # fmt: skip
    if fake and (SEEDED or SCALE != "e4m3"):  # else units are dequantised values already
        units = values_of_units(units, byte, ELEMENT, SCALE, data_ptr.dtype.element_ty, ISA)
    store_units(data_ptr, units, matrix_row, block0 * (half // per_unit), per_row // per_unit, row < rows,
                UNIT_ALIGN // per_unit, WHOLE, ISA >= 100)  # fmt: skip
    return byte


@writes("data_ptr", scales_ptr=of_scales(), outer_ptr=of_outer, **of_stored())
@triton.jit
def quantize_rows(
    x_ptr, offs_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, SEEDED: tl.constexpr, STREAM: tl.constexpr, OUTER: tl.constexpr, PARTIAL_MAXIMA: tl.constexpr,
    FLAT: tl.constexpr, SWIZZLED: tl.constexpr, PDL: tl.constexpr, WHOLE: tl.constexpr, BATCHED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS x BLOCKS blocks. x: [batch, rows, cols] with strides x_batch, x_row and 1, in elements.

    data_ptr: bytes for codes, or 16-bit floats (see `encode_and_store_codes`). FLAT: x is one row, which may have more
    than 2^31 elements. OUTER, PARTIAL_MAXIMA: as in `outer_scales`; or OUTER "row": outer_ptr has a decode factor for
    each row; or OUTER "matrix amax" or "row amax": amax_ptr has the amax of each matrix (or group) or of each row,
    whose decode factor is stored at outer_ptr.
    GROUPS: the number of groups of rows that the int32 at offs_ptr define, of one matrix; 0 for none. With swizzled
    scales, ROWS is then 128, and tiles beyond the last group fill their scales with zeros.
    PDL: the kernel of the amax may still run when this one starts, see `device.dependent_launch`. WHOLE,
    BATCHED: as in `quantize_columns`.
    """
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    padded_rows = tiles_along(rows, 128, ISA >= 100) * 128 if SWIZZLED else rows
    padded_cols = tiles_along(cols, 4 * BLOCK, ISA >= 100) * 4 * BLOCK if SWIZZLED else cols
    col_tiles = tiles_along(padded_cols, BLOCKS * BLOCK, ISA >= 100)
    if GROUPS > 0:
        group, end, row_tile, row0, col_tile = tile_of_group(offs, rows, col_tiles, ROWS, GROUPS)
        store_group_outers(amax_ptr, outer_ptr, row_tile, col_tile, OUTER, GROUPS, ELEMENT, SCALE, CONTRACT, ISA)
        if group >= GROUPS:
            if SWIZZLED:
                byte = tl.zeros((ROWS, BLOCKS), tl.int32)
                store_row_scales(scales_ptr, byte, row_tile * 0, row_tile, row0 + tl.arange(0, ROWS), col_tile * BLOCKS,
                                 row0, cols, BLOCK, True, SCALE_ALIGN, WHOLE, True, ISA)  # fmt: skip
            return
        batch = row_tile * 0
        first_tile: tl.constexpr = False  # `store_group_outers` has stored the global or row scale
    else:
        program = tl.program_id(0)
        if OUTER == "amax" or OUTER == "matrix amax":
            # The amax kernel leaves the end of the tensor in the cache, so the last tile comes first.
            program = tl.num_programs(0) - 1 - program
        batch, row_tile, col_tile = tile_of(program, padded_rows, col_tiles, ROWS, FLAT, ISA >= 100, BATCHED)
        group = batch
        row0 = row_tile * ROWS
        end = rows
        first_tile = (row_tile == 0) & (col_tile == 0)
    row = row0 + tl.arange(0, ROWS)
    block0 = (col_tile.to(tl.int64) if FLAT else col_tile) * BLOCKS
    cols_left = tl.minimum(cols - block0 * BLOCK, BLOCKS * BLOCK).to(tl.int32)
    col0 = block0 * BLOCK
    x_row_ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + col0
    words = read_tile(x_row_ptr, operands, batch, row, end, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                      ALIGN, WHOLE and GROUPS == 0, ISA, True, PROLOGUE)  # fmt: skip

    if PDL:
        amax_ptr = wait(amax_ptr)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, ELEMENT, SCALE, CONTRACT, ISA)
    if OUTER == "row":
        decode = tl.load(outer_ptr + batch * rows + row, mask=row < rows, other=1.0)[:, None]
        encode = encode_scale(decode, ISA)
    elif OUTER == "row amax":
        at = batch.to(tl.int64) * rows + row
        encode, decode = make_outer_scales(amax_ptr + at, outer_ptr, at, row < end, col_tile == 0,
                                           ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
        encode = encode[:, None]
        decode = decode[:, None]
    elif OUTER == "matrix amax":
        encode, decode = make_outer_scales(amax_ptr + group, outer_ptr, group, True, first_tile,
                                           ELEMENT, SCALE, CONTRACT, ISA)  # fmt: skip
    encode_and_store(words, word_amax(words, 2, ISA, dtype), encode, decode, data_ptr, scales_ptr,
                     seed_ptr, batch, row, block0, end, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK,
                     OUTER != "none", OUTER == "tensor" or OUTER == "row", SEEDED, STREAM, SWIZZLED, UNIT_ALIGN,
                     SCALE_ALIGN, ISA, WHOLE, row_tile, GROUPS > 0)  # fmt: skip
