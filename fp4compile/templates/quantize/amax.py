"""The amax (largest magnitude) of a tensor, of its rows or of its columns, as the bits of a float32.

A dynamic outer scale takes two reads of the tensor; this file has the first one. Bits of magnitudes are ordered as the
magnitudes are, with NaN above infinity, so that integer maxima (and integer atomics) find the amax.
"""

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.column_tile import column_tile_amax, load_column_tile, transform_column_tile
from fp4compile.templates.device.dependent_launch import launch_dependents
from fp4compile.templates.device.elements import magnitude_bits, reduce_words, unpack, word_amax
from fp4compile.templates.device.memory import tile_of
from fp4compile.templates.device.prologue import read_tile
from fp4compile.templates.device.register_tile import amaxes_of_two_rows, stack_tensors
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.heuristics import (
    PARTIAL_MAXIMA_ELEMENTS,
    AmaxConfig,
    amax_config,
    amax_of_rows_config,
    column_amax_config,
)
from fp4compile.templates.quantize.outputs import Outer, whole_tiles
from fp4compile.templates.quantize.source import Source
from fp4compile.templates.view import View


def outer_of(source: Source, fmt: BlockFormat, static: torch.Tensor | None, each_matrix: bool = False) -> Outer:
    """The outer scales along rows or square blocks: static, none, or made from the amax of the tensor, or from
    the rows' amaxes if they are given (`source.amax_bits`).

    static: float32 [] or [..., R, 1]; None: not static. each_matrix: make one outer scale for each matrix of the batch.
    """
    if static is not None:
        return static_outer(source.batch * source.rows, static)
    if fmt.outer is None:
        return Outer("none")
    if fmt.outer == "row":
        lanes = source.batch * source.rows
        return Outer(
            "row amax", View.flat(source.tensor.new_empty(lanes, dtype=torch.float32), lanes), source.amax_bits
        )
    if each_matrix and source.amax_bits is not None:
        return outer_of_matrices(source, source.amax_bits, ())
    if each_matrix:
        return outer_of_matrices(source, *amax_of_matrices(source))
    amax, launches = amax_of_tensor(source)
    return Outer("amax", View.flat(source.tensor.new_empty(1, dtype=torch.float32), 1), amax, launches)


def static_outer(lanes, static: torch.Tensor) -> Outer:
    """A static outer scale: one for the tensor, [], or one for each row of codes, [..., 1]."""
    if static.dim() == 0:
        return Outer("tensor", View.flat(static, 1))
    return Outer("row", View.flat(static.contiguous(), lanes))


def outer_of_matrices(source: Source, amax: View, launches: tuple[Launch, ...]) -> Outer:
    """Outer scales to be made from the amax bits of each matrix, int32 [batch]."""
    scale = source.tensor.new_empty(source.batch, dtype=torch.float32)
    return Outer("matrix amax", View.flat(scale, source.batch), amax, launches)


def amax_of_tensor(source: Source) -> tuple[View, tuple[Launch, ...]]:
    """(float32 bits of the tensor's amax, 0 if it is empty: int32 [], or [n] partial maxima for a small tensor; the
    launches that find them, none if `source.amax_bits` is set)."""
    if source.amax_bits is not None:
        return source.amax_bits, ()
    flat = source.flat()
    source = flat or source
    # The kernel that reads partial maxima has their number as a constant, so the size must not be symbolic.
    small = flat is not None and isinstance(source.cols, int) and source.cols <= PARTIAL_MAXIMA_ELEMENTS
    config = amax_config(source.cols if small else None)
    if source.prologue is not None and flat is None:
        config = amax_of_rows_config(source.cols)
    grid = _amax_grid(source, config)
    device = source.tensor.device
    if small:
        grid = 1 << (max(grid, 1) - 1).bit_length()
        bits = torch.empty(grid, dtype=torch.int32, device=device)
    else:
        bits = torch.zeros((), dtype=torch.int32, device=device)
    found = View.flat(bits, grid if small else 1)
    constants = {
        "FLAT": flat is not None, "PARTIAL": small, "MATRICES": 0,
        "LAUNCH_DEPENDENTS": small and source.target.dependent_launch, "ALIGN": source.align,
        "PROLOGUE": source.prologue_text, "ISA": source.target.isa, **config.constants,
    }  # fmt: skip
    arguments = source.view, found, *source.read_args
    return found, (Launch(tensor_amax, grid, arguments, constants, config.num_warps),)


def amax_of_matrices(source: Source) -> tuple[View, tuple[Launch, ...]]:
    """(float32 bits of the amax of each matrix, int32 [batch]; the launch that finds them)."""
    if statically_true(source.row_stride == source.cols):
        source = source.each_as_row()
    config = amax_config(None)
    found = View.flat(torch.zeros(source.batch, dtype=torch.int32, device=source.tensor.device), source.batch)
    constants = {
        "FLAT": False, "PARTIAL": False, "MATRICES": 1, "LAUNCH_DEPENDENTS": False, "ALIGN": source.align,
        "PROLOGUE": source.prologue_text, "ISA": source.target.isa, **config.constants,
    }  # fmt: skip
    arguments = source.view, found, *source.read_args
    return found, (Launch(tensor_amax, _amax_grid(source, config), arguments, constants, config.num_warps),)


def _amax_grid(source: Source, config: AmaxConfig):
    return source.batch * ceil_div(source.rows, config.rows) * ceil_div(source.cols, config.blocks * config.block)


def amax_of_columns(
    source: Source, *, rows: str | None, transform: bool, each: bool, each_matrix: bool = False
) -> tuple[View, Launch]:
    """(float32 bits of amaxes of the columns, int32, with the Hadamard transform down the columns if `transform`; the
    launch that finds them).

    each: an amax for each column, [batch * cols]; otherwise one amax of all columns, [1], or (each_matrix) one for the
    columns of each matrix, [batch].
    rows: further amaxes to find, of the tensor without the transform. "all": the tensor's amax, which comes first, [1 +
    ...]; with each_matrix, each matrix's amax before the amax of its columns, [batch * 2].
    "each" (only with `each`): an amax for each row; every matrix has its rows before its columns, [batch * (rows +
    cols)].
    """
    lanes = source.cols + (source.rows if rows == "each" else 0)
    plain = int(rows == "all")
    count = source.batch * (1 + plain) if each_matrix else (source.batch * lanes if each else 1) + plain
    found = View.flat(torch.zeros(count, dtype=torch.int32, device=source.tensor.device), count)
    config, isa = column_amax_config(), source.target.isa
    height, width = config.row_tiles * config.block, 2 * config.words
    constants = {
        "PLAIN": plain == 1, "ROWS": rows == "each", "TRANSFORM": transform, "EACH": each, "MATRICES": each_matrix,
        "ALIGN": source.align, "WHOLE": isa >= 100 and whole_tiles(source, height, width, "linear"), "ISA": isa,
        **config.constants,
    }  # fmt: skip
    grid = source.batch * ceil_div(source.rows, height) * ceil_div(source.cols, width)
    return found, Launch(columns_amax, grid, (source.view, found, *source.args), constants, config.num_warps)


@triton.jit
def tensor_amax(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    FLAT: tl.constexpr, PARTIAL: tl.constexpr, MATRICES: tl.constexpr, LAUNCH_DEPENDENTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32 at amax_ptr, initially 0, to the bits of x's amax. x: [batch, rows, cols].

    PARTIAL: instead, each program stores the amax of its own tile, [grid]. Programs beyond the tensor store 0.
    FLAT: x is one row. MATRICES: each matrix has an amax of its own, [batch]. LAUNCH_DEPENDENTS: the next kernel may
    start early, see `device.dependent_launch`.
    """
    if LAUNCH_DEPENDENTS:
        x_ptr = launch_dependents(x_ptr)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    col_tiles = (tl.full((), 0, tl.int32) + tl.cdiv(cols, BLOCKS * BLOCK)).to(tl.int32)  # 1 column is a constant
    batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, col_tiles, ROWS, FLAT, ISA >= 100)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    col0 = col_tile.to(tl.int64) * (BLOCKS * BLOCK)
    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + col0
    cols_left = tl.minimum(cols - col0, BLOCKS * BLOCK).to(tl.int32)
    words = read_tile(ptr, operands, batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, 1, ALIGN,
                      False, ISA, True, PROLOGUE)  # fmt: skip
    bits = tl.max(tl.max(word_amax(words, 2, ISA, dtype), 1), 0)
    if PARTIAL:
        tl.store(amax_ptr + tl.program_id(0), bits)
    else:
        if MATRICES:
            amax_ptr += batch
        tl.atomic_max(amax_ptr, bits, sem="relaxed")


@triton.jit
def columns_amax(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    PLAIN: tl.constexpr, ROWS: tl.constexpr, TRANSFORM: tl.constexpr, EACH: tl.constexpr, MATRICES: tl.constexpr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Raise the int32s at amax_ptr, initially 0, to the bits of the amaxes of x's columns.

    TRANSFORM: apply the Hadamard transform to the columns first. EACH: an amax for each column, [batch, cols];
    otherwise one amax of all columns or (MATRICES) of the columns of each matrix, [batch]. ROWS (with EACH): each row's
    amax as well, without the transform, [batch, rows + cols]. PLAIN: the amax of x (or of each matrix) without the
    transform comes before the others.
    (All results have one pointer, because Inductor does not order the writes of a kernel to one tensor through two
    pointers.) WHOLE: as in `quantize_columns`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row_count: tl.constexpr = ROW_TILES * BLOCK
    col_count: tl.constexpr = 2 * WORDS
    batch, row_tile, col_tile = tile_of(tl.program_id(0), rows, tl.cdiv(cols, col_count), row_count, False, ISA >= 100)
    row0 = row_tile * row_count
    col0 = col_tile * col_count
    ptr = x_ptr + batch.to(tl.int64) * x_batch + col0
    cols_left = tl.minimum(cols - col0, col_count)
    tile = load_column_tile(ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)
    if MATRICES:
        amax_ptr += batch * 2 if PLAIN else batch
    if PLAIN or not TRANSFORM:
        plain_first, plain_second = column_tile_amax(tile, ISA, dtype)
    if PLAIN:
        tl.atomic_max(amax_ptr, tl.max(tl.max(tl.maximum(plain_first, plain_second), 1), 0), sem="relaxed")
    if TRANSFORM:
        _, _, first_amax, second_amax = transform_column_tile(tile, dtype, ISA)
    else:
        first_amax = plain_first
        second_amax = plain_second
    column_amax_ptr = amax_ptr + 1 if PLAIN else amax_ptr
    if EACH:
        column = tl.arange(0, col_count)
        bits = tl.reshape(tl.join(tl.max(first_amax, 0), tl.max(second_amax, 0)), (col_count,))
        if ROWS:
            rows_amax_ptr = column_amax_ptr + batch.to(tl.int64) * (rows + cols)
            raise_row_amaxes(rows_amax_ptr, tile, row0, rows, dtype, ISA)
            column_amax_ptr = rows_amax_ptr + rows
        else:
            column_amax_ptr += batch.to(tl.int64) * cols
        at = column_amax_ptr + col0 + column
        tl.atomic_max(at, bits, mask=column < cols_left, sem="relaxed")
    else:
        tl.atomic_max(column_amax_ptr, tl.max(tl.max(tl.maximum(first_amax, second_amax), 1), 0), sem="relaxed")


@triton.jit
def raise_row_amaxes(amax_ptr, tile, row0, rows, dtype: tl.constexpr, ISA: tl.constexpr):
    """Raise the int32s at amax_ptr, one a row of the tensor, to the bits of the rows' amaxes in a column tile."""
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
