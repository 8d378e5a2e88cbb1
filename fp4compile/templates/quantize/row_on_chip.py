"""Quantise whole rows that a program holds: with row scales, or the result of a prologue with reductions (a norm).

A program reads a row once, keeps it on the chip, finds the statistics, and quantises the result; so a norm and its
quantiser are one launch and one read. A dynamic global scale of the whole tensor needs the amax of all rows first, and
rows that are too long for the chip are read twice. In these cases `row_statistics` finds the statistics (and the amax).
The remaining prologue reads the statistics as operands and has no reductions. `quantize_whole_rows` quantises its
result if rows fill a tile; otherwise the kernels of other prologues do.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.apply_prologue import read_tile
from fp4compile.templates.device.block_scales import encode_scale, outer_scales, outers_of_amax
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.memory import tile_of
from fp4compile.templates.device.row_prologue import has_reductions, read_row
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.amax import MAX_PARTIAL_MAXIMA, outer_of
from fp4compile.templates.quantize.outputs import Outer, Output, format_constants, padded_scale_shape, store_aligns
from fp4compile.templates.quantize.row import RowConfig, encode_and_store, seed_pointer
from fp4compile.templates.quantize.source import Source, matrices_view, one_matrix
from fp4compile.templates.view import View
from fp4compile.templates.writes import of_outer, of_scales, of_stored, writes

# The longest row, in elements, that one program holds in its registers.
MAX_ROW_ON_CHIP = 32768
# The longest row, in elements, that one program holds in float32 while it finds statistics: for longer rows ptxas
# spills registers.
MAX_REDUCED_ROW_ON_CHIP = 16384


@dataclass(frozen=True)
class WholeRowConfig(RowConfig):
    """`quantize_whole_rows` and `row_statistics`: a program holds a row. parts: programs of a row."""

    host = ("num_warps", "parts")
    parts: int = 1


def scaled_row_config(
    element: str, block: int, rows: int, cols: int, isa: int = 0, prologue: bool = False
) -> WholeRowConfig:  # fmt: skip
    """The configuration for rows of up to MAX_ROW_ON_CHIP elements with row scales.

    isa: see `Target`. If Hopper computes the elements (`prologue`), a thread loads two runs of 16 bytes at a time: a
    gate before E2M1 codes took 87 us with two runs and 91 us with four; before dequantised values 103 and 109 us.
    Before E4M3 codes a gate took 85 us with 16 elements per thread, and 89 us with 32.
    """
    vectors = 4 if element == "e2m1" else 2
    width = max(2048, 1 << (max(cols, 1) - 1).bit_length())
    elements_per_thread = 64 if element == "e2m1" or width > 8192 else 32
    if prologue and 90 <= isa < 100:
        vectors = 2
        elements_per_thread = 16 if element != "e2m1" and width <= 8192 else 64
    parts = 1
    if element == "e2m1" and isinstance(rows, int) and rows <= 128:
        # There are fewer rows than multiprocessors, so latency decides: several programs quantise one row.
        vectors, elements_per_thread = 2, 16
        while parts * rows <= 64 and width // parts > 4096:
            parts *= 2
        elements_per_thread = max(elements_per_thread, width // parts // 512)
    return WholeRowConfig(
        num_warps=width // parts // (32 * elements_per_thread), rows=1, blocks=width // block, vectors=vectors,
        parts=parts,
    )  # fmt: skip


def reduced_row_config(element: str, block: int, rows: int, cols: int, outer: bool = False) -> WholeRowConfig:
    """The configuration for rows whose statistics a kernel finds itself.

    rows, cols: rows of all matrices, and columns; rows may be symbolic, and columns fit on the chip. A thread has 32
    elements or, if there are fewer rows than multiprocessors and latency decides, 16. outer: whether a kernel of E2M1
    codes makes a global or row scale. Each thread repeats that work, so a thread then has 64 elements.
    """
    width = max(512, 1 << (max(cols, 1) - 1).bit_length())
    few = isinstance(rows, int) and rows <= 128
    elements = 16 if few or width < 1024 else 64 if outer and element == "e2m1" and width >= 2048 else 32
    elements = max(elements, width // 512)  # at most 16 warps
    vectors = 4 if element == "e2m1" and elements >= 32 else 2
    return WholeRowConfig(num_warps=width // (32 * elements), rows=1, blocks=width // block, vectors=vectors)


def fits_on_chip(cols: int) -> bool:
    """Whether a program holds a row of `cols` elements (may be symbolic) on the chip while it finds statistics."""
    return isinstance(cols, int) and cols <= MAX_REDUCED_ROW_ON_CHIP


def whole_rows_launch(
    source: Source,
    fmt: BlockFormat,
    output: Output,
    static: torch.Tensor | None,
    layout: str,
    seed: torch.Tensor | None,
    stream: int,
) -> tuple[Outer, Launch]:
    """The global or row scales, and the launch for whole rows: of a norm, or with row scales to be computed.

    Of a norm it requires `in_one_launch` or `after_first_launch`. static: a static global scale, or static row scales.
    If it is None and the format has either, the kernel makes the global scale of `source.amax_bits`, or else the row
    scales.
    """
    norm = source.amax_bits is not None or (source.prologue is not None and bool(source.prologue.reductions))
    lanes = source.batch * source.rows
    if norm:
        config = _config(source, fmt, outer=fmt.outer is not None)
    else:
        config = scaled_row_config(
            fmt.element, format_constants(fmt)["BLOCK"], lanes, source.cols, source.target.isa,
            source.prologue is not None,
        )  # fmt: skip
    rows, _ = padded_scale_shape(source.rows, 0, layout)
    if static is None and fmt.outer is not None and source.amax_bits is None:
        outer = Outer("find", View.flat(source.tensor.new_empty(lanes, dtype=torch.float32), lanes))
    else:
        outer = outer_of(source, fmt, static)
    constants = {
        **format_constants(fmt), "SEEDED": seed is not None, "STREAM": stream, **outer.constants,
        "BATCHED": not norm or not statically_true(source.batch == 1), "PARTS": config.parts,
        "SWIZZLED": layout == "swizzled", "ALIGN": source.align, **store_aligns(source.cols, fmt),
        **_common(source, fmt, config, norm),
    }  # fmt: skip
    arguments = (
        source.view, *output.pointers, *outer.pointers(output.data), seed_pointer(seed, output.data),
        *source.read_args,
    )  # fmt: skip
    grid = source.batch * ceil_div(rows, config.rows) * config.parts
    return outer, Launch(quantize_whole_rows, grid, arguments, constants, config.num_warps)


def finds_row_scales(source: Source, fmt: BlockFormat, static: torch.Tensor | None) -> bool:
    """Whether `whole_rows_launch` computes row scales: there are no groups, and rows fit on the chip."""
    if fmt.outer != "row" or static is not None or source.amax_bits is not None or source.groups:
        return False
    return isinstance(source.cols, int) and source.cols <= MAX_ROW_ON_CHIP


def after_first_launch(source: Source, fmt: BlockFormat) -> bool:
    """Whether `reduced_rows_launch` can follow `with_statistics`: an amax was found, and rows fill a tile."""
    if source.prologue is None or source.amax_bits is None:
        return False
    return _fills(source, fmt, _config(source, fmt, outer=True))


def in_one_launch(source: Source, fmt: BlockFormat, static: torch.Tensor | None) -> bool:
    """Whether `reduced_rows_launch` suffices by itself: no scale needs the amax of several rows."""
    return static is not None or fmt.outer != "tensor" or statically_true(source.batch * source.rows == 1)


def with_statistics(source: Source, fmt: BlockFormat, static: torch.Tensor | None) -> tuple[Source, Launch]:
    """The source without its reductions, and the launch that finds the statistics, and the amax for a global scale.

    The launch also stores the stored results of the prologue, and the new source may read them.
    """
    prologue = source.prologue
    finding, found = _finding(source)
    amax, partial = None, False
    if static is None and fmt.outer == "tensor":
        amax, partial = _empty_amax(source)
    launch = _statistics_launch(finding, fmt, amax or found[0], AMAX=amax is not None, PARTIAL=partial)
    if prologue.stores_result:  # the next kernel reads it instead of computing it again
        view = matrices_view(source.stored_result.tensor)
        return replace(source, view=view, prologue=None, operands=(), stored=(), amax_bits=amax), launch
    rest, read = prologue.after_statistics(stored=True)
    views = (source.view, *source.operands, *source.stored)
    first, *others = (views[i] for i in read)
    view = matrices_view(first.tensor) if read[0] else source.view
    operands = (*others, *found)
    return replace(source, view=view, prologue=rest, operands=operands, stored=(), amax_bits=amax), launch


def _finding(source: Source) -> tuple[Source, tuple[View, ...]]:
    """The source as one matrix, for a kernel that also stores the statistics, and views of the statistics, float32
    [batch * rows] each."""
    prologue, lanes = source.prologue, source.batch * source.rows
    stored = dict(zip(prologue.stored, source.stored, strict=True))
    statistics = [(i, torch.float32) for i in prologue.statistics]
    for what in statistics:
        if what not in stored:
            stored[what] = View.flat(source.tensor.new_empty(lanes, dtype=torch.float32), lanes)
    finding = replace(
        source, view=one_matrix(source.tensor), stored=tuple(stored.values()),
        prologue=replace(prologue, stored=tuple(stored)),
    )  # fmt: skip
    return finding, tuple(stored[what] for what in statistics)


def _empty_amax(source: Source) -> tuple[View, bool]:
    """Int32 memory for the bits of the tensor's amax, and whether it is for partial maxima, one per row."""
    rows, device = source.batch * source.rows, source.tensor.device
    if isinstance(rows, int) and 0 < rows <= MAX_PARTIAL_MAXIMA:
        count = 1 << (rows - 1).bit_length()
        return View.flat(torch.empty(count, dtype=torch.int32, device=device), count), True
    return View.flat(torch.zeros((), dtype=torch.int32, device=device), 1), False


def _statistics_launch(source: Source, fmt: BlockFormat, amax: View, **constants: bool) -> Launch:
    """The launch of `row_statistics`. source: one matrix. amax: memory for the bits of the amax; unused unless AMAX."""
    config, block = _config(source, fmt), format_constants(fmt)["BLOCK"]
    programs = amax.tensor.numel() if constants["PARTIAL"] else ceil_div(source.rows, config.rows)
    constants = {"BLOCK": block, **constants, "ALIGN": source.align, **_common(source, fmt, config, True)}
    return Launch(row_statistics, programs, (source.view, amax, *source.read_args), constants, config.num_warps)


def _config(source: Source, fmt: BlockFormat, outer: bool = False) -> WholeRowConfig:
    """The configuration for a source. outer: see `reduced_row_config`."""
    block = format_constants(fmt)["BLOCK"]
    return reduced_row_config(fmt.element, block, source.batch * source.rows, source.cols, outer)


def _common(source: Source, fmt: BlockFormat, config: WholeRowConfig, norm: bool) -> dict:
    """The constexpr arguments that both kernels of this file have. norm: whether rows are of a norm."""
    # Programs past the last row read the last row: there must be one.
    whole = norm and source.align > 0 and _fills(source, fmt, config) and statically_true(source.rows > 0)
    return {"WHOLE": whole, **config.constants, "PROLOGUE": source.prologue_text, "ISA": source.target.isa}


def _fills(source: Source, fmt: BlockFormat, config: RowConfig) -> bool:
    """Whether a row is as long as a tile is wide."""
    return source.cols == config.blocks * format_constants(fmt)["BLOCK"]


@triton.jit
def of_rows(outer, ISA: tl.constexpr):
    """Row scales [ROWS] in the shape for blocks, [ROWS, 1]; on SM100 a scalar for one row, see `e4m3_scale`."""
    return tl.max(outer, 0) if ISA >= 100 and outer.shape[0] == 1 else outer[:, None]


@writes("data_ptr", scales_ptr=of_scales(), outer_ptr=of_outer, **of_stored())
@triton.jit
def quantize_whole_rows(
    x_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SEEDED: tl.constexpr, STREAM: tl.constexpr, OUTER: tl.constexpr, PARTIAL_MAXIMA: tl.constexpr,
    BATCHED: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, PARTS: tl.constexpr,
    PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Quantise whole rows, each read once: of the result of a prologue with reductions, or of the one left after
    `row_statistics`, or with row scales that the kernel computes.

    data_ptr: bytes for codes, or fp16 (see `row.encode_and_store`). OUTER, PARTIAL_MAXIMA: as in `outer_scales`; or
    OUTER "row": outer_ptr has a decode factor for each row; or "find": each row's decode factor is stored at outer_ptr.
    BATCHED: there may be several matrices. WHOLE: rows are as long as the tile is wide, and `read_row` reads them.
    PARTS > 1: PARTS programs share a row. Each finds the amax of the whole row and writes one part of it.
    SCALE "none": float8_rowwise, which has no block scales; BLOCK is then only a unit of work.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    program = tl.program_id(0)
    if OUTER == "amax":  # the first kernel leaves the last rows in the cache
        program = tl.num_programs(0) - 1 - program
    if BATCHED:
        batch, row_tile, part = tile_of(program, padded_rows, PARTS, ROWS, False, ISA >= 100)
    else:
        batch = program * 0
        row_tile = program
        part = program * 0
    row = row_tile * ROWS + tl.arange(0, ROWS)
    x_batch_ptr = x_ptr + batch.to(tl.int64) * x_batch
    x_row_ptr = x_batch_ptr + row.to(tl.int64) * x_row
    if WHOLE or has_reductions(PROLOGUE):
        words = read_row(x_batch_ptr, x_row, operands, batch, row, rows, cols, dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                         ALIGN, WHOLE, PROLOGUE, ISA)  # fmt: skip
    else:
        words = read_tile(x_row_ptr, operands, batch, row, rows, 0, cols, cols, dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                          ALIGN, False, ISA, PARTS == 1, PROLOGUE)  # fmt: skip
    amax = word_amax(words, 2, ISA, dtype)
    rows_amax = tl.max(amax, 1)
    part_blocks: tl.constexpr = BLOCKS // PARTS
    block0 = part * part_blocks
    if PARTS > 1:
        cols_left = tl.minimum(cols - block0 * BLOCK, part_blocks * BLOCK)
        words = read_tile(x_row_ptr + block0 * BLOCK, operands, batch, row, rows, block0 * BLOCK, cols, cols_left,
                          dtype, ROWS, part_blocks, BLOCK, VECTORS, ALIGN, False, ISA, True, PROLOGUE)  # fmt: skip
        amax = word_amax(words, 2, ISA, dtype)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, ELEMENT, SCALE, CONTRACT, ISA)
    if OUTER == "find" or OUTER == "row":
        outer_row_ptr = outer_ptr + batch.to(tl.int64) * rows + row
        if OUTER == "row":
            decode = tl.load(outer_row_ptr, mask=row < rows, other=1.0)
            encode = encode_scale(decode, ISA)
        else:
            encode, decode = outers_of_amax(rows_amax, ELEMENT, SCALE, CONTRACT, ISA)
            tl.store(outer_row_ptr, decode, mask=row < rows)
        encode = of_rows(encode, ISA)
        decode = of_rows(decode, ISA)
    encode_and_store(words, amax, encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, block0, rows, cols, dtype,
                     ELEMENT, SCALE, CONTRACT, BLOCK, OUTER != "none", OUTER == "tensor" or OUTER == "row", SEEDED,
                     STREAM, SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA)  # fmt: skip


@writes(amax_ptr=lambda arguments: arguments["AMAX"], **of_stored())
@triton.jit
def row_statistics(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    AMAX: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, PROLOGUE: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Store the stored results of a prologue with reductions for whole rows, each read once.

    AMAX: raise the int32 at amax_ptr, initially 0, to the bits of the result's amax or (PARTIAL) store the amax bits of
    each program's own rows, [grid]; programs without rows store 0. WHOLE: as in `quantize_whole_rows`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = read_row(x_ptr, x_row, operands, tl.program_id(0) * 0, row, rows, cols, dtype, ROWS,
                     BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE, PROLOGUE, ISA)  # fmt: skip
    if AMAX:
        bits = tl.max(tl.where(row < rows, tl.max(word_amax(words, 2, ISA, dtype), 1), 0), 0)
        if PARTIAL:
            tl.store(amax_ptr + tl.program_id(0), bits)
        else:
            tl.atomic_max(amax_ptr, bits, sem="relaxed")
