"""Quantise what a prologue with reductions makes of rows: the end of a norm, whose statistics are found here.

A program has a row on the chip. It reads it once, finds the statistics, and quantises the result; so a norm and its
quantiser are one launch and one read. A dynamic outer scale of the whole tensor needs the amax of all rows first, and
rows that are too long for the chip are read twice. There `row_statistics` finds the statistics (and the amax), and the
kernels of other prologues do the rest, with the statistics among their operands.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from fp4compile._compat import statically_true
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div
from fp4compile.templates.device.block_scales import encode_scale, float8_outer, outer_from_amax, outer_scales
from fp4compile.templates.device.elements import word_amax
from fp4compile.templates.device.memory import tile_of
from fp4compile.templates.device.row_prologue import read_row, walk_row, with_row_prologue
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.heuristics import (
    MAX_PARTIAL_MAXIMA,
    ReducedRowConfig,
    fits_on_chip,
    reduced_row_config,
)
from fp4compile.templates.quantize.row import encode_and_store
from fp4compile.templates.quantize.views import (
    Matrices,
    format_constants,
    or_placeholder,
    padded_scale_shape,
    row_stride,
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
    """Quantise rows in one launch, if `in_one_launch`; returns the outer scale.

    data, scales: as for `row.launch_rows`. outer: the outer scale that is given, of the tensor or of each row. Without
    it the kernel finds the decode factor of each row, if the format has any: float32 [batch, rows, 1].
    """
    config = _config(source, fmt)
    rows, _ = padded_scale_shape(source.rows, 0, layout)
    mode = "none" if fmt.outer is None else "find"
    if outer is not None:
        mode = "tensor" if outer.dim() == 0 else "row"
    elif mode == "find":
        outer = source.tensor.new_empty((source.batch, source.rows, 1), dtype=torch.float32)
    launch(
        with_row_prologue(quantize_reduced_rows, source.prologue), source.batch * ceil_div(rows, config.rows),
        source.tensor, data, or_placeholder(scales, data), or_placeholder(outer, data), or_placeholder(seed, data),
        *source.read_args, **format_constants(fmt), SEEDED=seed is not None, STREAM=stream, OUTER=mode,
        SWIZZLED=layout == "swizzled", ALIGN=source.align, **store_aligns(source.cols, fmt),
        **_common(source, fmt, config),
    )  # fmt: skip
    return outer


def in_one_launch(source: Matrices, fmt: BlockFormat, outer: torch.Tensor | None) -> bool:
    """Whether `launch_reduced_rows` serves: rows fit on the chip, and no scale needs the amax of several of them."""
    one_row = statically_true(source.batch * source.rows == 1)
    return fits_on_chip(source.cols) and (outer is not None or fmt.outer != "tensor" or one_row)


def with_statistics(source: Matrices, fmt: BlockFormat, outer: torch.Tensor | None) -> Matrices:
    """The source without its reductions: the statistics are found, and the amax if an outer scale is made from it.

    What the prologue stores is stored; of rows that do not fit on the chip only what has one element a row.
    """
    on_chip, prologue = fits_on_chip(source.cols), source.prologue
    rest, read = prologue.after_statistics()
    finding, found = _finding(source, whole=on_chip)
    operands = (source.tensor, *source.operands)
    after = replace(source, prologue=rest, operands=(*(operands[i] for i in read[1:]), *found))
    if not on_chip:
        _launch_statistics(walked_statistics, finding, fmt, ON_CHIP=False)
        whole = [tensor for tensor, (i, _) in zip(source.stored, prologue.stored, strict=True)
                 if prologue.step_kinds[i] == "aux"]  # fmt: skip
        return replace(after, stored=tuple(whole))
    amax, partial = None, False
    if outer is None and fmt.outer == "tensor":
        amax, partial = _empty_amax(source)
    _launch_statistics(row_statistics, finding, fmt, or_placeholder(amax, found[0]), AMAX=amax is not None,
                       PARTIAL=partial)  # fmt: skip
    if prologue.stores_result:  # then it is read, and not computed again
        tensor = source.stored[prologue.stored.index(prologue.result)]
        return replace(source, tensor=tensor, prologue=None, operands=(), stored=(), amax_bits=amax)
    return replace(after, prologue=replace(rest, stored=()), stored=(), amax_bits=amax)


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
        source, batch=1, rows=source.batch * source.rows, batch_stride=0, row_stride=row_stride(source.tensor),
        stored=tuple(stored.values()), prologue=replace(prologue, stored=tuple(stored)),
    )  # fmt: skip
    return finding, tuple(stored[what] for what in statistics)


def _empty_amax(source: Matrices) -> tuple[torch.Tensor, bool]:
    """(int32 to be filled with the bits of the amax, whether with those of each row), as `amax.tensor_amax_bits`."""
    rows, device = source.batch * source.rows, source.tensor.device
    if isinstance(rows, int) and rows <= MAX_PARTIAL_MAXIMA:
        return torch.empty(1 << (max(rows, 1) - 1).bit_length(), dtype=torch.int32, device=device), True
    return torch.zeros((), dtype=torch.int32, device=device), False


def _launch_statistics(kernel, source: Matrices, fmt: BlockFormat, *amax: torch.Tensor, **constants) -> None:
    """source: one matrix."""
    config, block = _config(source, fmt), format_constants(fmt)["BLOCK"]
    programs = amax[0].numel() if constants.get("PARTIAL") else ceil_div(source.rows, config.rows)
    launch(
        with_row_prologue(kernel, source.prologue), programs, source.tensor, *amax, *source.read_args, BLOCK=block,
        **constants, ALIGN=source.align, **_common(source, fmt, config),
    )  # fmt: skip


def _config(source: Matrices, fmt: BlockFormat) -> ReducedRowConfig:
    block = format_constants(fmt)["BLOCK"]
    return reduced_row_config(fmt.element, block, source.batch * source.rows, source.cols)


def _common(source: Matrices, fmt: BlockFormat, config: ReducedRowConfig) -> dict:
    """The constants that all of these kernels take, and warps."""
    width = config.blocks * format_constants(fmt)["BLOCK"]
    return {"WHOLE": source.align > 0 and statically_true(source.cols == width), **config.constants,
            "ISA": target_of(source.tensor.device).isa, "num_warps": config.num_warps}  # fmt: skip


@triton.jit
def quantize_reduced_rows(
    x_ptr, data_ptr, scales_ptr, outer_ptr, seed_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, CONTRACT: tl.constexpr, BLOCK: tl.constexpr,
    SEEDED: tl.constexpr, STREAM: tl.constexpr, OUTER: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Whole rows of what a prologue with reductions makes of x and its operands.

    data_ptr: bytes for codes, or fp16 (see `row.encode_and_store`). OUTER: "none"; "tensor" or "row": outer_ptr has a
    decode factor of all rows, or one of each; "find": outer_ptr takes that of each row. WHOLE: rows are as long as the
    tile is wide.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    batch, row_tile, _ = tile_of(tl.program_id(0), padded_rows, 1, ROWS, False, ISA >= 100)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    x_row_ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row
    words = read_row(x_row_ptr, operands, batch, row, rows, cols, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE,
                     ISA)  # fmt: skip
    amax = word_amax(words, 2, ISA, dtype)
    encode, decode = outer_scales(OUTER, outer_ptr, outer_ptr, 1, CONTRACT, ISA)
    if OUTER == "find" or OUTER == "row":
        outer_row_ptr = outer_ptr + batch.to(tl.int64) * rows + row
        if OUTER == "row":
            decode = tl.load(outer_row_ptr, mask=row < rows, other=1.0)
            encode = encode_scale(decode, ISA)
        else:
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
    encode_and_store(words, amax, encode, decode, data_ptr, scales_ptr, seed_ptr, batch, row, 0, rows, cols,
                     dtype, ELEMENT, SCALE, CONTRACT, BLOCK, OUTER != "none", OUTER != "find", SEEDED, STREAM,
                     SWIZZLED, UNIT_ALIGN, SCALE_ALIGN, ISA)  # fmt: skip


@triton.jit
def row_statistics(
    x_ptr, amax_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    AMAX: tl.constexpr, PARTIAL: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store what a prologue with reductions stores of whole rows, each read once.

    AMAX: raise the int32 at amax_ptr, which is 0 before, to the bits of the result's amax or (PARTIAL) store those of
    each program's own rows, [grid]; programs without rows store 0. WHOLE: as in `quantize_reduced_rows`.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    words = read_row(x_ptr + row.to(tl.int64) * x_row, operands, tl.program_id(0) * 0, row, rows, cols, dtype, ROWS,
                     BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE, ISA)  # fmt: skip
    if AMAX:
        bits = tl.max(tl.where(row < rows, tl.max(word_amax(words, 2, ISA, dtype), 1), 0), 0)
        if PARTIAL:
            tl.store(amax_ptr + tl.program_id(0), bits)
        else:
            tl.atomic_max(amax_ptr, bits, sem="relaxed")


@triton.jit
def walked_statistics(
    x_ptr, rows, cols, x_batch, x_row,
    operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr, stored_1_ptr, stored_2_ptr, stored_3_ptr,
    ALIGN: tl.constexpr, WHOLE: tl.constexpr, ON_CHIP: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store what a prologue with reductions stores of rows that are walked. ON_CHIP: False."""
    operands = (operand_1_ptr, operand_2_ptr, operand_3_ptr, operand_4_ptr, operand_5_ptr,
                stored_1_ptr, stored_2_ptr, stored_3_ptr)  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    walk_row(x_ptr + row.to(tl.int64) * x_row, operands, tl.program_id(0) * 0, row, rows, cols, x_ptr.dtype.element_ty,
             ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE, ISA)  # fmt: skip
