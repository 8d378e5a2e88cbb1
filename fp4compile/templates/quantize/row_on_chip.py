"""Quantise what a prologue with reductions makes of rows: the end of a norm, whose statistics are found here.

A program has a row on the chip. It reads it once, finds the statistics, and quantises the result; so a norm and its
quantiser are one launch and one read. A dynamic outer scale of the whole tensor needs the amax of all rows first, and
rows that are too long for the chip are read twice. There `row_statistics` finds the statistics (and the amax). What
follows them has the statistics among its operands, and no reductions. The same kernel quantises it where rows fill its
tile, else the kernels of other prologues.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.prologue import Prologue
from fp4compile.templates.device.block_scales import encode_scale, float8_outer, outer_from_amax, outer_scales
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.memory import tile_of
from fp4compile.templates.device.prologue import prefetch_operands
from fp4compile.templates.device.row_prologue import read_row, walk_row, with_row_prologue
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.amax import outer_of
from fp4compile.templates.quantize.heuristics import (
    MAX_PARTIAL_MAXIMA,
    ReducedRowConfig,
    fits_on_chip,
    reduced_row_config,
)
from fp4compile.templates.quantize.row import encode_and_store
from fp4compile.templates.quantize.views import (
    Matrices,
    Outer,
    as_matrices,
    check_outputs,
    format_constants,
    one_matrix,
    or_placeholder,
    padded_scale_shape,
    store_aligns,
)


def launch_reduced_rows(
    source: Matrices,
    fmt: BlockFormat,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None,
    layout: str = "linear",
    seed: torch.Tensor | None = None,
    stream: int = 0,
) -> torch.Tensor | None:
    """Quantise whole rows, if `in_one_launch` or `after_first_launch`; returns the outer scale.

    data, scales: as for `row.launch_rows`. outer: the outer scale that is given, of the tensor or of each row. Without
    it the kernel makes that of the tensor, if its amax is there; or it finds the decode factor of each row, if the
    format has any: float32 [batch, rows, 1].
    """
    work = "all" if source.prologue.reductions else "codes"
    config = _config(source, fmt, work, outer=fmt.outer is not None)
    rows, _ = padded_scale_shape(source.rows, 0, layout)
    if outer is None and fmt.outer is not None and source.amax_bits is None:
        outers = Outer(source.tensor.new_empty((source.batch, source.rows, 1), dtype=torch.float32), None, "find")
    else:
        outers = outer_of(source, fmt, outer)
    check_outputs(source, fmt, layout, (data, scales), outers)
    launch(
        with_row_prologue(quantize_reduced_rows, source.prologue, config.pieces),
        source.batch * ceil_div(rows, config.rows), source.tensor, data, or_placeholder(scales, data),
        *outers.arguments(data), or_placeholder(seed, data), *source.read_args, **format_constants(fmt),
        SEEDED=seed is not None, STREAM=stream, **outers.constants,
        BATCHED=not statically_true(source.batch == 1), SWIZZLED=layout == "swizzled", ALIGN=source.align,
        AHEAD=0 if outers.computed else source.programs_ahead, **store_aligns(source.cols, fmt),
        **_common(source, fmt, config),
    )  # fmt: skip
    return outers.result


def after_first_launch(source: Matrices, fmt: BlockFormat) -> bool:
    """Whether `launch_reduced_rows` quantises what `with_statistics` returns: an amax was found, rows fill a tile."""
    if source.prologue is None or source.amax_bits is None:
        return False
    config = _config(source, fmt, "codes", outer=True)
    return source.cols == config.pieces * config.blocks * format_constants(fmt)["BLOCK"]


def in_one_launch(source: Matrices, fmt: BlockFormat, outer: torch.Tensor | None) -> bool:
    """Whether `launch_reduced_rows` serves: rows fit on the chip, and no scale needs the amax of several of them."""
    one_row = statically_true(source.batch * source.rows == 1)
    return fits_on_chip(source.cols) and (outer is not None or fmt.outer != "tensor" or one_row)


def with_statistics(source: Matrices, fmt: BlockFormat, outer: torch.Tensor | None) -> Matrices:
    """The source without its reductions: the statistics are found, and the amax if an outer scale is made from it.

    What the prologue stores is stored, and may be read again; of rows that do not fit on the chip only what has one
    element a row.
    """
    on_chip, prologue = fits_on_chip(source.cols), source.prologue
    finding, found = _finding(source, whole=on_chip)
    if not on_chip:
        _launch_statistics(walked_statistics, finding, fmt, ON_CHIP=False)
        whole = [tensor for tensor, (i, _) in zip(source.stored, prologue.stored, strict=True)
                 if prologue.step_kinds[i] == "aux"]  # fmt: skip
        rest, read = prologue.after_statistics()
        return _reading(replace(source, stored=tuple(whole)), rest, read, found)
    amax, partial = None, False
    if outer is None and fmt.outer == "tensor":
        amax, partial = _empty_amax(source)
    _launch_statistics(row_statistics, finding, fmt, or_placeholder(amax, found[0]), AMAX=amax is not None,
                       PARTIAL=partial)  # fmt: skip
    if prologue.stores_result:  # then it is read, and not computed again
        view = as_matrices(source.stored_result)
        return replace(source, view=view, prologue=None, operands=(), stored=(), amax_bits=amax)
    rest, read = prologue.after_statistics(stored=True)
    return replace(_reading(source, rest, read, found), stored=(), amax_bits=amax)


def _reading(source: Matrices, rest: Prologue, read: tuple[int, ...], found: tuple[torch.Tensor, ...]) -> Matrices:
    """The source by what follows the statistics `found`; rest, read: of `Prologue.after_statistics`."""
    tensors = (source.tensor, *source.operands, *source.stored)
    first, *others = (tensors[i] for i in read)
    view = as_matrices(first) if read[0] else source.view
    return replace(source, view=view, prologue=rest, operands=(*others, *found))


def _finding(source: Matrices, whole: bool) -> tuple[Matrices, tuple[torch.Tensor, ...]]:
    """(the source, as one matrix, for a kernel that stores the statistics too; these, float32 [batch, rows, 1] each).

    whole: whether that kernel stores what has the shape of the whole as well.
    """
    prologue, kinds = source.prologue, source.prologue.step_kinds
    stored = {what: tensor for what, tensor in zip(prologue.stored, source.stored, strict=True)
              if whole or kinds[what[0]] == "col"}  # fmt: skip
    statistics = [(i, torch.float32) for i in prologue.statistics]
    for what in statistics:
        if what not in stored:
            stored[what] = source.tensor.new_empty((source.batch, source.rows, 1), dtype=torch.float32)
    finding = replace(
        source, view=one_matrix(source.tensor), stored=tuple(stored.values()),
        prologue=replace(prologue, stored=tuple(stored)),
    )  # fmt: skip
    return finding, tuple(stored[what] for what in statistics)


def _empty_amax(source: Matrices) -> tuple[torch.Tensor, bool]:
    """(int32 to be filled with the bits of the amax, whether with those of each row), as `amax.tensor_amax_bits`."""
    rows, device = source.batch * source.rows, source.tensor.device
    if isinstance(rows, int) and 0 < rows <= MAX_PARTIAL_MAXIMA:
        return torch.empty(1 << (rows - 1).bit_length(), dtype=torch.int32, device=device), True
    return torch.zeros((), dtype=torch.int32, device=device), False


def _launch_statistics(kernel, source: Matrices, fmt: BlockFormat, *amax: torch.Tensor, **constants) -> None:
    """source: one matrix."""
    config, block = _config(source, fmt, "statistics"), format_constants(fmt)["BLOCK"]
    programs = amax[0].numel() if constants.get("PARTIAL") else ceil_div(source.rows, config.rows)
    launch(
        with_row_prologue(kernel, source.prologue, config.pieces), programs, source.tensor, *amax, *source.read_args,
        BLOCK=block, **constants, ALIGN=source.align, **_common(source, fmt, config),
    )  # fmt: skip


def _config(source: Matrices, fmt: BlockFormat, work: str, outer: bool = False) -> ReducedRowConfig:
    """work, outer: see `reduced_row_config`."""
    block = format_constants(fmt)["BLOCK"]
    # A variance keeps all elements for a second sum, and registers do not suffice for many of them.
    several = not any(step.operation == "variance" for step in source.prologue.steps)
    isa = target_of(source.tensor.device).isa
    return reduced_row_config(fmt.element, block, source.batch * source.rows, source.cols, isa, outer, several, work)


def _common(source: Matrices, fmt: BlockFormat, config: ReducedRowConfig) -> dict:
    """The constants that all of these kernels take, and warps."""
    width = config.pieces * config.blocks * format_constants(fmt)["BLOCK"]
    # Programs beyond whole rows read the last row: there must be one.
    whole = source.align > 0 and statically_true(source.cols == width) and statically_true(source.rows > 0)
    return {"WHOLE": whole, **config.constants, "ISA": target_of(source.tensor.device).isa,
            "num_warps": config.num_warps}  # fmt: skip


@triton.jit
def quantize_reduced_rows(
    x_ptr, data_ptr, scales_ptr, outer_ptr, amax_ptr, seed_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SEEDED: tl.constexpr, STREAM: tl.constexpr, OUTER: tl.constexpr, PARTIAL_MAXIMA: tl.constexpr,
    BATCHED: tl.constexpr, SWIZZLED: tl.constexpr, AHEAD: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, PIECES: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Whole rows of what a prologue with reductions makes of x and its operands, or one without after it.

    data_ptr: bytes for codes, or fp16 (see `row.encode_and_store`). OUTER, PARTIAL_MAXIMA: as in `outer_scales`; or
    OUTER "row": outer_ptr has a decode factor of each row; or "find": outer_ptr takes that of each row.
    BATCHED: there may be several matrices. AHEAD: as in `quantize_rows`. WHOLE: rows are as long as the tile is wide.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    program = tl.program_id(0)
    if OUTER == "amax":  # the first kernel has left the last rows in the cache
        program = tl.num_programs(0) - 1 - program
    if BATCHED:
        batch, row_tile, _ = tile_of(program, padded_rows, 1, ROWS, False, ISA >= 100)
    else:
        batch = program * 0
        row_tile = program
    row = row_tile * ROWS + tl.arange(0, ROWS)
    x_batch_ptr = x_ptr + batch.to(tl.int64) * x_batch
    from_row = row
    if AHEAD > 0:
        from_row += prefetch_operands(x_ptr, operands, program + AHEAD, cols, rows)
    words = read_row(x_batch_ptr, x_row, operands, batch, from_row, rows, cols, dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                     ALIGN, WHOLE, ISA)  # fmt: skip
    amaxes = ()
    for i in tl.static_range(PIECES):
        amaxes = amaxes + (word_amax(words[i], 2, ISA, dtype),)
    encode, decode = outer_scales(OUTER, outer_ptr, amax_ptr, PARTIAL_MAXIMA, CONTRACT, ISA)
    if OUTER == "find" or OUTER == "row":
        outer_row_ptr = outer_ptr + batch.to(tl.int64) * rows + row
        if OUTER == "row":
            decode = tl.load(outer_row_ptr, mask=row < rows, other=1.0)
            encode = encode_scale(decode, ISA)
        else:
            amax = amaxes[0]
            for i in tl.static_range(1, PIECES):
                amax = tl.maximum(amax, amaxes[i])
            if SCALE == "none":
                encode, decode = float8_outer(tl.max(amax, 1), ISA)
            else:
                encode, decode = outer_from_amax(tl.max(amax, 1), CONTRACT, ISA)
            tl.store(outer_row_ptr, decode, mask=row < rows)
        if ISA >= 100 and ROWS == 1:  # an outer scale of the whole tile, see `e4m3_scale`
            encode = tl.max(encode, 0)
            decode = tl.max(decode, 0)
        else:
            encode = encode[:, None]
            decode = decode[:, None]
    for i in tl.static_range(PIECES):
        encode_and_store(words[i], amaxes[i], encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, i * BLOCKS,
                         rows, cols, dtype, ELEMENT, SCALE, CONTRACT, BLOCK, OUTER != "none",
                         OUTER == "tensor" or OUTER == "row", SEEDED, STREAM, SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA,
                         PACKED=True)  # fmt: skip


@triton.jit
def row_statistics(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    AMAX: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, PIECES: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Store what a prologue with reductions stores of whole rows, each read once.

    AMAX: raise the int32 at amax_ptr, which is 0 before, to the bits of the result's amax or (PARTIAL) store those of
    each program's own rows, [grid]; programs without rows store 0. WHOLE: as in `quantize_reduced_rows`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = read_row(x_ptr, x_row, operands, tl.program_id(0) * 0, row, rows, cols, dtype, ROWS,
                     BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE, ISA)  # fmt: skip
    if AMAX:
        amax = word_amax(words[0], 2, ISA, dtype)
        for i in tl.static_range(1, PIECES):
            amax = tl.maximum(amax, word_amax(words[i], 2, ISA, dtype))
        bits = tl.max(tl.where(row < rows, tl.max(amax, 1), 0), 0)
        if PARTIAL:
            tl.store(amax_ptr + tl.program_id(0), bits)
        else:
            tl.atomic_max(amax_ptr, bits, sem="relaxed")


@triton.jit
def walked_statistics(
    x_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr, ON_CHIP: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, PIECES: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Store what a prologue with reductions stores of rows that are walked. ON_CHIP: False."""
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    walk_row(x_ptr, x_row, operands, tl.program_id(0) * 0, row, rows, cols, x_ptr.dtype.element_ty,
             ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE, ISA)  # fmt: skip
