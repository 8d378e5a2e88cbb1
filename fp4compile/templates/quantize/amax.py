"""The amax (largest magnitude) of a tensor, of its rows or of its columns, as the bits of a float32.

A dynamic global scale takes two reads of the tensor; this file has the first one. Bits of magnitudes have the order of
the magnitudes, with NaN above infinity, so that integer maxima (and integer atomics) find the amax.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_prologue import read_tile
from fp4compile.templates.device.column_tile import column_tile_amax, load_column_tile, transform_column_tile
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.elements import magnitude_bits, reduce_words, unpack, word_amax
from fp4compile.templates.device.groups import of_lanes, per_lane, tile_of_group
from fp4compile.templates.device.memory import tile_of, tiles_along
from fp4compile.templates.device.register_tile import amaxes_of_two_rows, stack_tensors
from fp4compile.templates.launch import Launch, LaunchConfig
from fp4compile.templates.quantize.outputs import Outer, row_tiles, whole_tiles
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View
from fp4compile.templates.writes import of_stored, writes

# The most elements of a flat tensor whose amax is left as partial maxima, one per program. A program stores its maximum
# without an atomic, so that nothing has to be set to 0 first.
PARTIAL_MAXIMA_ELEMENTS = 2**21
# The most partial maxima of one tensor. Every program of the quantise kernel reads all of them.
MAX_PARTIAL_MAXIMA = 128


@dataclass(frozen=True)
class AmaxConfig(LaunchConfig):
    """`tensor_amax`: tiles of rows x blocks of `block` elements."""

    num_warps: int
    rows: int
    blocks: int
    block: int


@dataclass(frozen=True)
class ColumnAmaxConfig(LaunchConfig):
    """`columns_amax`: tiles of row_tiles * block rows by 2 * words columns."""

    num_warps: int
    block: int
    row_tiles: int
    words: int


# Tiles of 16 rows: many tiles for a group of many rows, and few rows beyond the end of a small group.
AMAX_OF_GROUPS = AmaxConfig(num_warps=8, rows=16, blocks=32, block=32)
COLUMN_AMAX = ColumnAmaxConfig(num_warps=4, block=16, row_tiles=8, words=64)


def amax_config(elements: int | None) -> AmaxConfig:
    """The configuration for a flat tensor with partial maxima. elements: its size; None: with a single maximum."""
    if elements is None:
        return AmaxConfig(num_warps=8, rows=1, blocks=512, block=32)
    width = max(2048, 1 << (-(-elements // MAX_PARTIAL_MAXIMA) - 1).bit_length())
    return AmaxConfig(num_warps=4, rows=1, blocks=width // 32, block=32)


def amax_of_rows_config(cols: int) -> AmaxConfig:
    """The configuration for separate rows of `cols` elements (may be symbolic), whose tiles exceed a row little."""
    config = amax_config(None)
    whole = 1 << (-(-cols // config.block) - 1).bit_length() if isinstance(cols, int) and cols else config.blocks
    blocks = min(whole, config.blocks)
    return replace(config, rows=config.blocks // blocks, blocks=blocks)


def outer_of(source: Source, fmt: BlockFormat, static: torch.Tensor | None, each_matrix: bool = False) -> Outer:
    """The global or row scales along rows or square blocks: static, none, or made of amaxes of the tensor, of each
    matrix or group, or of each row, which launches find if `source.amax_bits` has none.

    static: float32 [] or [..., R, 1]; None: not static. each_matrix: make a global scale for each matrix of the batch.
    """
    if static is not None:
        return static_outer(source.batch * source.rows, static)
    if fmt.outer is None:
        return Outer("none")
    given = None if source.amax_bits is None else (source.amax_bits, ())
    if fmt.outer == "row":
        return _made(source, "row amax", source.batch * source.rows, *(given or amax_of_each(source, "row")))
    if each_matrix or source.groups:
        return _made(source, "matrix amax", source.groups or source.batch, *(given or amax_of_each(source, "matrix")))
    return _made(source, "amax", 1, *(given or amax_of_tensor(source)))


def static_outer(lanes, static: torch.Tensor) -> Outer:
    """A static global scale, [], or static row scales, [..., 1]."""
    if static.dim() == 0:
        return Outer("tensor", View.flat(static, 1))
    return Outer("row", View.flat(static.contiguous(), lanes))


def outers_of(
    source: Source, fmt: BlockFormat, static: torch.Tensor | None, *, with_rows: bool, transform: bool,
    each_matrix: bool = False,
) -> tuple[Outer, Outer]:  # fmt: skip
    """The global or row scales along the rows and down the columns; dynamic ones may depend on the direction.

    The second Outer has the launches that find all amaxes. Without with_rows, both are the same object. static,
    each_matrix: see `outer_of`. In formats with row scales, each row, or each column of a matrix or group, has one.
    """
    if static is not None and static.dim():
        both = static_outer(source.batch * source.cols, static)
        return both, both
    each, lanes = fmt.outer == "row", (source.groups or source.batch) * source.cols
    if static is None and each and source.amax_bits is not None:
        both = _made(source, "row amax", lanes, source.amax_bits)
        return both, both
    if static is not None or not each and (not transform or fmt.outer is None or source.amax_bits is not None):
        both = outer_of(source, fmt, static, each_matrix)
        return both, both
    amax, launches = amax_of_columns(source, rows=with_rows, transform=transform, each=each, each_matrix=each_matrix)
    if each:
        down = _made(source, "row amax", lanes, amax, launches)
        return _made(source, "row amax", source.batch * source.rows, amax) if with_rows else down, down
    mode = "matrix amax" if source.groups or each_matrix else "amax"
    count = source.groups or (source.batch if each_matrix else 1)
    if not with_rows:
        both = _made(source, mode, count, amax, launches)
        return both, both
    first, last = (View.flat(amax.tensor.narrow(0, i * count, count), count) for i in (0, 1))
    return _made(source, mode, count, first), _made(source, mode, count, last, launches)


def _made(source: Source, mode: str, count, amax: View, launches: tuple[Launch, ...] = ()) -> Outer:
    """`count` global or row scales that the quantise kernel makes of amax bits."""
    return Outer(mode, View.flat(source.tensor.new_empty(count, dtype=torch.float32), count), amax, launches)


def _zeros(source: Source, count) -> View:
    return View.flat(torch.zeros(count, dtype=torch.int32, device=source.tensor.device), count)


def amax_of_tensor(source: Source) -> tuple[View, tuple[Launch, ...]]:
    """The float32 bits of the tensor's amax, 0 if it is empty: int32 [1], or [n] partial maxima for a small tensor; and
    the launch that finds them."""
    flat = source.flat()
    source = flat or source
    # The kernel that reads partial maxima has their number as a constant, so the size must not be symbolic.
    small = flat is not None and isinstance(source.cols, int) and source.cols <= PARTIAL_MAXIMA_ELEMENTS
    config = amax_config(source.cols if small else None)
    if source.prologue is not None and flat is None:
        config = amax_of_rows_config(source.cols)
    grid = _amax_grid(source, config)
    if small:
        grid = 1 << (max(grid, 1) - 1).bit_length()
        found = View.flat(torch.empty(grid, dtype=torch.int32, device=source.tensor.device), grid)
    else:
        found = View.flat(torch.zeros((), dtype=torch.int32, device=source.tensor.device), 1)
    return found, (_amax_launch(source, found, grid, config, FLAT=flat is not None, PARTIAL=small),)


def amax_of_each(source: Source, of: str) -> tuple[View, tuple[Launch, ...]]:
    """The float32 bits of the amax of each matrix or group (`of` "matrix"), int32 [batch] or [G], 0 for an empty one,
    or of each row ("row"), [batch * rows]; and the launch that finds them."""
    found = _zeros(source, source.batch * source.rows if of == "row" else source.groups or source.batch)
    if of == "matrix" and not source.groups and statically_true(source.row_stride == source.cols):
        source = source.each_as_row()
    config = AMAX_OF_GROUPS if source.groups else amax_config(None)
    return found, (_amax_launch(source, found, _amax_grid(source, config), config, OF=of),)


def _amax_launch(source: Source, found: View, grid, config: AmaxConfig, **constants) -> Launch:
    small = constants.get("PARTIAL", False)
    constants = {
        "GROUPS": source.groups, "FLAT": False, "PARTIAL": False, "OF": "tensor", **constants,
        "LAUNCH_DEPENDENTS": small and source.target.dependent_launch, "ALIGN": source.align,
        "PROLOGUE": source.prologue_text, "ISA": source.target.isa, **config.constants,
    }  # fmt: skip
    return Launch(tensor_amax, grid, (source.view, source.offs, found, *source.read_args), constants, config.num_warps)


def _amax_grid(source: Source, config: AmaxConfig):
    return row_tiles(source, source.rows, config.rows) * ceil_div(source.cols, config.blocks * config.block)


def amax_of_columns(
    source: Source, *, rows: bool, transform: bool, each: bool, each_matrix: bool = False
) -> tuple[View, tuple[Launch, ...]]:
    """The float32 bits of amaxes of the columns, int32, after the Hadamard transform down the columns if `transform`;
    and the launch that finds them.

    each: an amax for each column, [batch * cols]; otherwise one amax of all columns, [1], or (each_matrix) one for the
    columns of each matrix, [batch]. With groups there is one for each column of a group, [G * cols], or for each group,
    [G].
    rows: also amaxes of the tensor without the transform. With `each`, every matrix has its rows' amaxes before its
    columns', [batch * rows + ...]; otherwise the amax of the tensor or of each group comes first, [1 + 1] or [G + G].
    """
    groups = source.groups or source.batch
    per_tensor = (groups if source.groups or each_matrix else 1) * (1 + rows)
    count = groups * source.cols + (source.batch * source.rows if rows else 0) if each else per_tensor
    found = _zeros(source, count)
    config, isa = COLUMN_AMAX, source.target.isa
    height, width = config.row_tiles * config.block, 2 * config.words
    whole = isa >= 100 and not source.groups and whole_tiles(source, height, width, "linear")
    constants = {
        "GROUPS": source.groups, "PLAIN": rows and not each, "ALONG_ROWS": rows and each, "TRANSFORM": transform,
        "EACH": each, "MATRICES": each_matrix, "ALIGN": source.align, "WHOLE": whole, "ISA": isa, **config.constants,
    }  # fmt: skip
    grid = row_tiles(source, source.rows, height) * ceil_div(source.cols, width)
    launch = Launch(columns_amax, grid, (source.view, source.offs, found, *source.args), constants, config.num_warps)
    return found, (launch,)


@writes("amax_ptr", **of_stored())
@triton.jit
def tensor_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    GROUPS: tl.constexpr, FLAT: tl.constexpr, PARTIAL: tl.constexpr, OF: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, initially 0, to the bits of amaxes. x: [batch, rows, cols].

    OF: the parts with an amax: "tensor"; "matrix", each matrix [batch] or each of GROUPS groups of rows; "row", each
    row. PARTIAL: instead, each program stores the amax of its own tile, [grid]; programs beyond the tensor store 0.
    FLAT: x is one row. GROUPS, offs_ptr: as in `quantize_rows`. LAUNCH_DEPENDENTS: the next kernel may start early, see
    `device.dependent_launch`.
    """
    if LAUNCH_DEPENDENTS:
        x_ptr = launch_dependents(x_ptr)
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    if GROUPS > 0:
        col_tiles = tiles_along(cols, BLOCKS * BLOCK, ISA >= 100)
        group, end, row_tile, row0, col_tile = tile_of_group(offs, rows, col_tiles, ROWS, GROUPS)
        if group >= GROUPS:
            return
        batch = row_tile * 0
    else:
        col_tiles = (tl.full((), 0, tl.int32) + tl.cdiv(cols, BLOCKS * BLOCK)).to(tl.int32)  # 1 column is a constant
        batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, col_tiles, ROWS, FLAT, ISA >= 100)
        group = batch
        row0 = row_tile * ROWS
        end = rows
    row = row0 + tl.arange(0, ROWS)
    col0 = col_tile.to(tl.int64) * (BLOCKS * BLOCK)
    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + col0
    cols_left = tl.minimum(cols - col0, BLOCKS * BLOCK).to(tl.int32)
    words = read_tile(ptr, operands, batch, row, end, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, 1, ALIGN,
                      False, ISA, True, PROLOGUE)  # fmt: skip
    bits = tl.max(word_amax(words, 2, ISA, dtype), 1)
    if OF == "row":
        tl.atomic_max(amax_ptr + batch.to(tl.int64) * rows + row, bits, mask=row < end, sem="relaxed")
    elif PARTIAL:
        tl.store(amax_ptr + tl.program_id(0), tl.max(bits, 0))
    else:
        if OF == "matrix":
            amax_ptr += group
        tl.atomic_max(amax_ptr, tl.max(bits, 0), sem="relaxed")


@writes("amax_ptr")
@triton.jit
def columns_amax(
    x_ptr, offs_ptr, amax_ptr, rows, cols, x_batch, x_row,
    GROUPS: tl.constexpr, PLAIN: tl.constexpr, ALONG_ROWS: tl.constexpr, TRANSFORM: tl.constexpr, EACH: tl.constexpr,
    MATRICES: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, initially 0, to the bits of the amaxes of x's columns.

    TRANSFORM: apply the Hadamard transform to the columns first. EACH: an amax for each column, [batch, cols];
    otherwise one amax of all columns or (MATRICES) of the columns of each matrix, [batch]. ALONG_ROWS (with EACH): also
    each row's amax, without the transform, [batch, rows + cols]. PLAIN: the amax of x without the transform comes
    first. GROUPS, offs_ptr: as in `quantize_rows`; each group has an amax, or two amaxes, or one for each column: [G],
    [G + G] or [G, cols], the last after the amaxes of all rows. (All results have one pointer, because Inductor does
    not order the writes of a kernel to one tensor through two pointers.) WHOLE: as in `quantize_columns`.
    """
    offs = ()
    for i in tl.static_range(2 * per_lane(GROUPS)):
        number, exists = of_lanes(i - per_lane(GROUPS), GROUPS)
        offs = offs + (tl.load(offs_ptr + number, mask=exists, other=0),)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    if GROUPS > 0:
        col_tiles = tiles_along(cols, col_count, ISA >= 100)
        group, end, row_tile, row0, col_tile = tile_of_group(offs, rows, col_tiles, row_count, GROUPS)
        if group >= GROUPS:
            return
        batch = row_tile * 0
    else:
        batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, tl.cdiv(cols, col_count), row_count, False,
                                            ISA >= 100)  # fmt: skip
        group = batch
        row0 = row_tile * row_count
        end = rows
    col0 = col_tile * col_count
    ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    cols_left = tl.minimum(cols - col0, col_count)
    tile = load_column_tile(ptr, row0, end, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)
    if MATRICES or (GROUPS > 0 and not EACH):
        amax_ptr += group
    if PLAIN or not TRANSFORM:
        plain_first, plain_second = column_tile_amax(tile, ISA, dtype)
    if PLAIN:
        raise_to_largest(amax_ptr, plain_first, plain_second)
        amax_ptr += max(GROUPS, 1)
    if TRANSFORM:
        _, _, first_amax, second_amax = transform_column_tile(tile, dtype)
    else:
        first_amax = plain_first
        second_amax = plain_second
    if EACH:
        column = tl.arange(0, col_count)
        bits = tl.reshape(tl.join(tl.max(first_amax, 0), tl.max(second_amax, 0)), (col_count,))
        if ALONG_ROWS:
            amax_ptr += batch.to(tl.int64) * (rows + cols)
            raise_row_amaxes(amax_ptr, tile, row0, end, dtype, ISA)
            amax_ptr += rows
        if GROUPS > 0 or not ALONG_ROWS:
            amax_ptr += group.to(tl.int64) * cols
        tl.atomic_max(amax_ptr + col0 + column, bits, mask=column < cols_left, sem="relaxed")
    else:
        raise_to_largest(amax_ptr, first_amax, second_amax)


@triton.jit
def raise_to_largest(amax_ptr, first, second):
    """Raise the int32 at amax_ptr to the largest of two matrices of amax bits."""
    tl.atomic_max(amax_ptr, tl.max(tl.max(tl.maximum(first, second), 1), 0), sem="relaxed")


@triton.jit
def raise_row_amaxes(amax_ptr, tile, row0, rows, dtype: tl.constexpr, ISA: tl.constexpr):
    """Raise the int32s at amax_ptr, one per row of the tensor, to the bits of the rows' amaxes in a column tile."""
    bits = ()
    for i in tl.static_range(0, len(tile), 2):
        if ISA == 0 or dtype == tl.float32:
            bits = bits + (word_amax(tile[i], 1, ISA, dtype)[:, None],)
            bits = bits + (word_amax(tile[i + 1], 1, ISA, dtype)[:, None],)
        else:  # one word holds the amaxes of both rows
            (words,) = amaxes_of_two_rows((tile[i],), (tile[i + 1],), dtype)
            first, second = unpack(reduce_words(words, 1, dtype), dtype)
            bits = bits + (magnitude_bits(first)[:, None], magnitude_bits(second)[:, None])
    count: tl.constexpr = tile[0].shape[0] * len(tile)
    row = row0 + tl.arange(0, count)
    tl.atomic_max(amax_ptr + row, tl.reshape(stack_tensors(bits), (count,)), mask=row < rows, sem="relaxed")
