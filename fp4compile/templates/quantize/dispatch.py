"""Quantise CUDA tensors: which kernel, on which view of the tensor.

`quantize`, `quantize_both`, `fake_quantize` and `dequantize` allocate their outputs and launch kernels. They run
eagerly and under tracing, on concrete and on symbolic sizes. All bits are those of `reference`.

Each kernel stands in a file of its own (row, column, both, square, amax, dequantize), with the function that launches
it; `heuristics` has the tile sizes and `views` what the launches share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.prologue import OPERANDS, STORED, Prologue
from fp4compile.templates.quantize import both
from fp4compile.templates.quantize.column import launch_columns, outers_of
from fp4compile.templates.quantize.dequantize import dequantize
from fp4compile.templates.quantize.row import launch_rows, launch_scaled_rows
from fp4compile.templates.quantize.row_on_chip import (
    after_first_launch,
    in_one_launch,
    launch_reduced_rows,
    with_statistics,
)
from fp4compile.templates.quantize.square import launch_squares
from fp4compile.templates.quantize.views import (
    Matrices,
    Outer,
    code_pairs,
    empty_outputs,
    empty_values,
    lies_transposed,
    matrices,
    results_of,
    typed_outputs,
)

__all__ = ["Reading", "dequantize", "fake_quantize", "quantize", "quantize_both", "takes_prologue", "takes_several"]

# data, block scales and outer scale, as `reference.quantize` returns them
Quantized = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Reading:
    """How a quantiser reads x: as it lies in memory, or with a prologue, whose first operand x is.

    operands: of the prologue, without the first; see `Matrices`. down_columns: which direction is quantised.
    stored: tensors to fill with what the prologue stores, contiguous. first: the first operand as it lies in memory.
    Where the prologue has several results, x stands for a batch of these: [results, rows, cols] of it.
    """

    prologue: Prologue | None = None
    operands: tuple[torch.Tensor, ...] = ()
    down_columns: bool = False
    stored: tuple[torch.Tensor, ...] = ()
    first: torch.Tensor | None = None

    def matrices(self, x: torch.Tensor) -> Matrices:
        if self.prologue is not None and self.prologue.several:
            return results_of(self.first, self.prologue, self.operands, self.stored)
        return matrices(x, self.prologue, self.operands, self.stored)

    @property
    def seeds(self) -> tuple:
        """The shape of a seed."""
        return (len(self.prologue.several),) if self.prologue is not None and self.prologue.several else ()


def takes_prologue(fmt: BlockFormat, prologue: Prologue, dtypes: Sequence[torch.dtype], by_columns: bool) -> bool:
    """Whether the kernels of a format read the result of a prologue.

    dtypes: of its operands. by_columns: whether the kernel quantises down the columns, too or alone.

    Those of rows compute pairs of elements of any width, the others of 16 bits. Square blocks are read by a kernel that
    knows no prologue. A thread of the kernels of columns holds whole blocks, and its registers suffice for less
    (`_fits_columns`). Kernels of rows alone find statistics, of elements of 16 bits.
    """
    tensors = [dtypes[i] for i, kind in prologue.kinds.items() if kind == "aux"]
    stored = [prologue.step_kinds[i] for i, _ in prologue.stored]
    if len(prologue.stored) > STORED or "row" in stored or ("col" in stored and not prologue.reductions):
        return False
    if prologue.reductions and (by_columns or not _finds_statistics(prologue, dtypes)):
        return False
    if fmt.square or len(dtypes) > OPERANDS or len(tensors) > 3:
        return False
    if by_columns and not _fits_columns(fmt, prologue, len(tensors)):
        return False
    if by_columns and any(dtype.itemsize != 2 for dtype in (*tensors, *(dtype for _, dtype in prologue.stored))):
        return False
    # The kernels take the dtype of the first operand for that of what they quantise, or for one that holds it.
    return dtypes[0] in (prologue.dtype, torch.float32)


def takes_several(fmt: BlockFormat, op: str, layout: str, shape: Sequence) -> bool:
    """Whether the kernels write several results of a prologue, of that shape, at once.

    op, layout: as in the op `quantize_prologue`. A result is one matrix, for the kernels see the results as a batch.
    What belongs to one lies in a tensor of all: wherever it begins, products may expect that 16 bytes are aligned.
    """
    if len(shape) != 2:
        return False
    rows, cols = shape
    directions = [(rows, cols), (cols, rows)] if op == "quantize_both" else [(rows, cols)]
    if op == "fake_quantize":
        sizes = [rows * code_pairs(cols, fmt) * 2 * fmt.values_dtype.itemsize]
    else:
        sizes = [n * code_pairs(k, fmt) * (1 if fmt.packed else 2) for n, k in directions]
        if fmt.scale is not None and layout == "linear":  # tiles of swizzled scales are of 512 bytes
            sizes += [n * ceil_div(k, fmt.block_cols) for n, k in directions]
    sizes += [n * 4 for n, _ in directions if fmt.outer == "row"]
    return all(statically_true(size % 16 == 0) for size in sizes)


def _finds_statistics(prologue: Prologue, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether kernels can find the statistics of a prologue, and others do the rest. dtypes: of the operands."""
    rest, read = prologue.after_statistics()
    found = {*prologue.stored, *((i, torch.float32) for i in prologue.statistics)}
    reads_first = prologue.step_kinds[-1] == "aux" and 0 in read
    whole = [dtypes[i] for i, kind in prologue.kinds.items() if kind == "aux"]
    whole += [dtype for i, dtype in prologue.stored if prologue.step_kinds[i] == "aux"]
    narrow = dtypes[0] == prologue.dtype and all(dtype.itemsize == 2 for dtype in whole)
    return narrow and reads_first and len(rest.kinds) <= OPERANDS and len(found) <= STORED


def _fits_columns(fmt: BlockFormat, prologue: Prologue, tensors: int) -> bool:
    """Whether the registers of the kernels of columns suffice.

    In other cases ptxas spills for SM100. (For SM90, three tensors spill 8 to 40 bytes in kernels of 8-bit codes.)
    tensors: how many operands of the tensor's size there are.
    """
    computed = {step.operation for step in prologue.steps}
    if tensors == 3 and (fmt.scale is None or prologue.stored):
        return False
    return "erf" not in computed and not (tensors > 1 and prologue.stored and "exp" in computed)


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    *,
    seed: torch.Tensor | None = None,
    stream: int = 0,
    transform: bool = False,
    each_matrix: bool = False,
    values: bool = False,
    reading: Reading | None = None,
) -> Quantized:
    """Quantise along the last dimension: `reference.quantize` on the GPU, bit for bit; same arguments and results.

    On SM100, stochastic rounding is the hardware's: equal in distribution only. A transposed view (its last dimension
    but one is contiguous) is read as it lies. The transform needs such a view, and copies x where it is none.

    each_matrix: x is [B, R, C], and a dynamic outer scale of a tensor is one of each matrix, [B].
    values: write what codes and block scales stand for, in 16 bits (`reference.values_of`), and no block scales. Not
    for stochastic rounding of square blocks.
    reading: with a prologue (`takes_prologue`), whose first operand x is a view of.
    """
    if (fmt.square and seed is not None) or _empty(x):  # no recipe asks for the first
        found = reference.quantize(x, fmt, outer, layout, seed=seed, stream=stream, transform=transform)
        return (reference.values_of(*found[:2], fmt), None, found[2]) if values else found
    if x.dim() == 1:
        row = quantize(x.unsqueeze(0), fmt, outer, layout, seed=seed, stream=stream, transform=transform)
        return reference.drop_row(row, layout)
    down_columns = transform or (lies_transposed(x) if reading is None else reading.down_columns)
    reading = reading or Reading()
    data, scales = (empty_values(x, fmt), None) if values else empty_outputs(x, fmt, layout, down_columns)
    if fmt.square:
        source = matrices(x.transpose(-2, -1) if down_columns else x)
        outputs = {"columns" if down_columns else "rows": (data, scales)}
        outer = launch_squares(source, fmt, outer, layout, **outputs, each_matrix=each_matrix)
    elif down_columns:
        source = reading.matrices(x.transpose(-2, -1))
        outers = outers_of(source, fmt, outer, with_rows=False, transform=transform, each_matrix=each_matrix)
        source = source.after(outers[1])
        launch_columns(source, fmt, outers, layout, (data, scales), seed=seed, stream=stream, transform=transform)
        outer = _shaped(outers[1], x)
    else:
        outer = _quantize_rows(x, reading, fmt, data, scales, outer, layout, seed, stream, each_matrix)
    if values:
        return data, None, outer
    return (*typed_outputs(data, scales, x.shape[-1], fmt), outer)


def quantize_both(
    x: torch.Tensor,
    fmt: BlockFormat,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    *,
    seed: torch.Tensor | None = None,
    transform: bool = False,
    each_matrix: bool = False,
    reading: Reading | None = None,
) -> tuple[Quantized, Quantized]:
    """x [..., R, C] quantised along C and, transposed, along R, from one read.

    seed: int64 [], for stochastic rounding: stream 0 along C and stream 1 along R. transform: the Hadamard transform,
    along R only. each_matrix, reading: see `quantize`; the first of square blocks only.

    Returns (data, scales, outer scale) of x and of x transposed.
    """
    transposed = x.transpose(-2, -1)
    if (fmt.square and seed is not None) or _empty(x):
        along_cols = reference.quantize(x, fmt, outer, layout, seed=seed)
        down_rows = reference.quantize(transposed, fmt, outer, layout, seed=seed, stream=1, transform=transform)
        return along_cols, down_rows
    rows, columns = empty_outputs(x, fmt, layout), empty_outputs(transposed, fmt, layout, down_columns=True)
    source = (reading or Reading()).matrices(x)
    if fmt.square:
        outer = column_outer = launch_squares(
            source, fmt, outer, layout, rows=rows, columns=columns, each_matrix=each_matrix
        )
    else:
        outers = outers_of(source, fmt, outer, with_rows=True, transform=transform)
        source = source.after(outers[1])
        if both.serves(source, fmt, outers[0], seeded=seed is not None, transform=transform):
            both.launch_both(source, fmt, outers[0], layout, rows, columns)
        else:
            launch_columns(source, fmt, outers, layout, columns, rows, seed=seed, stream=1, transform=transform)
        outer, column_outer = _shaped(outers[0], x), _shaped(outers[1], transposed)
    return (*typed_outputs(*rows, x.shape[-1], fmt), outer), (*typed_outputs(*columns, x.shape[-2], fmt), column_outer)


def fake_quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None, *, reading: Reading | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference.fake_quantize` on the GPU, bit for bit; same arguments and results.

    Neither codes nor block scales reach memory. x is copied first if its last dimension is not contiguous.
    reading: see `quantize`.
    """
    if _empty(x):
        return reference.fake_quantize(x, fmt, outer)
    values = empty_values(x, fmt)
    return values, _quantize_rows(x, reading or Reading(), fmt, values, None, outer)


def _empty(x: torch.Tensor) -> bool:
    """Whether there is nothing to quantise: no grid is empty, and a program for no matrix would read and write one."""
    return statically_true(x.numel() == 0)


def _quantize_rows(
    x: torch.Tensor,
    reading: Reading,
    fmt: BlockFormat,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None,
    layout: str = "linear",
    seed: torch.Tensor | None = None,
    stream: int = 0,
    each_matrix: bool = False,
) -> torch.Tensor | None:
    """Fill data and scales along the rows; returns the outer scale."""
    source = reading.matrices(x)
    if source.prologue is not None and source.prologue.reductions:
        if in_one_launch(source, fmt, outer):
            found = launch_reduced_rows(source, fmt, data, scales, outer, layout, seed, stream)
            if outer is not None or found is None:
                return found
            return found.view(()) if fmt.outer == "tensor" else found.view(*x.shape[:-1], 1)
        source = with_statistics(source, fmt, outer)
        if after_first_launch(source, fmt):
            return launch_reduced_rows(source, fmt, data, scales, outer, layout, seed, stream)
    if fmt.outer == "row" and outer is None:
        outer = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        launch_scaled_rows(source, fmt, data, scales, outer, layout, seed, stream)
        return outer
    return launch_rows(source, fmt, data, scales, outer, layout, seed, stream, each_matrix)


def _shaped(outer: Outer, x: torch.Tensor) -> torch.Tensor | None:
    """Outer scales of the rows of x, of any shape, as [..., R, 1]; None or those of tensors as they are."""
    found = outer.result
    per_tensor = found is None or found.dim() == 0 or outer.mode == "matrix amax"
    return found if per_tensor else found.view(*x.shape[:-1], 1)
