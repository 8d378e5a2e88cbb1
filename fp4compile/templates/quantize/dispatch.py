"""Quantise CUDA tensors: which kernel, on what view of the tensor, with what launch.

`quantize`, `quantize_both` and `fake_quantize` allocate their outputs and launch kernels; they run eagerly and
under tracing, on concrete and on symbolic sizes. All bits are those of `reference`.
"""

import math
from dataclasses import dataclass

import torch

from fp4compile import reference
from fp4compile._compat import statically_true, tracing
from fp4compile.formats import BlockFormat
from fp4compile.layouts import ceil_div, swizzled_numel
from fp4compile.targets import (
    MOST_ELEMENTS_IN_PARTIAL_MAXIMA,
    amax_launch,
    both_launch,
    columns_amax_launch,
    columns_launch,
    dequantize_launch,
    rows_launch,
    scaled_rows_launch,
    squares_launch,
)
from fp4compile.templates.device.register_tile import DEPTH
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.amax import columns_amax, tensor_amax
from fp4compile.templates.quantize.both import quantize_both as quantize_both_kernel
from fp4compile.templates.quantize.column import quantize_columns
from fp4compile.templates.quantize.dequantize import dequantize_rows
from fp4compile.templates.quantize.row import quantize_rows, quantize_scaled_rows
from fp4compile.templates.quantize.square import quantize_squares


@dataclass(frozen=True)
class Matrices:
    """A tensor as a batch of matrices whose rows are contiguous; strides in elements."""

    tensor: torch.Tensor
    batch: int
    rows: int
    cols: int
    batch_stride: int
    row_stride: int

    @property
    def args(self):
        return self.rows, self.cols, self.batch_stride, self.row_stride

    @property
    def numel(self):
        return self.batch * self.rows * self.cols

    def flat(self) -> "Matrices | None":
        """The same elements as one row, if they lie so."""
        one_matrix = statically_true(self.batch == 1) or statically_true(self.batch_stride == self.rows * self.cols)
        one_row = statically_true(self.rows == 1) or statically_true(self.row_stride == self.cols)
        if not (one_matrix and one_row):
            return None
        return Matrices(self.tensor, 1, 1, self.numel, 0, 0)

    @property
    def align(self) -> int:
        """Words (element pairs) that divide a row's length and every row's address; 0 if not even one does."""
        size = self.tensor.element_size()
        divisor = power_of_two(self.cols, 16 // size)
        if not statically_true(self.rows == 1):
            divisor = power_of_two(self.row_stride, divisor)
        divisor = power_of_two(self.batch_stride, divisor)
        return power_of_two(_address(self.tensor) // size, divisor) // 2


def matrices(x: torch.Tensor) -> Matrices:
    """x with its last dimension contiguous, as matrices; copied only where its strides leave no other way."""
    if not (statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)):
        x = x.contiguous()
    while x.dim() < 3:
        x = x.unsqueeze(0)
    if x.dim() > 3:
        x = x.flatten(0, -3)
    return Matrices(x, *x.shape, 0 if statically_true(x.shape[0] == 1) else x.stride(0), x.stride(1))


def power_of_two(n, limit: int) -> int:
    """The largest power of two up to `limit` that is known to divide n."""
    while limit > 1 and not statically_true(n % limit == 0):
        limit //= 2
    return limit


def _address(x: torch.Tensor):
    """Where x begins, as far as it is known: traced tensors lie in storage that the allocator has aligned."""
    return x.storage_offset() * x.element_size() if tracing() else x.data_ptr()


def quantize(
    x: torch.Tensor,
    fmt: BlockFormat,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    *,
    seed: torch.Tensor | None = None,
    stream: int = 0,
    transform: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Quantise along the last dimension: `reference.quantize` on the GPU, bit for bit; same arguments and results.

    (On SM100, stochastic rounding is the hardware's, equal in distribution only.) A transposed view (its second but
    last dimension contiguous) is read as it lies; a transform wants one, and copies x where it is none.
    """
    if fmt.square and seed is not None:  # no recipe asks for it
        return reference.quantize(x, fmt, outer, layout, seed=seed, stream=stream)
    if x.dim() == 1:
        row = quantize(x.unsqueeze(0), fmt, outer, layout, seed=seed, stream=stream, transform=transform)
        return reference.drop_row(row, layout)
    down = transform or _lies_transposed(x)
    data, scales = _empty(x, fmt, layout, down)
    if fmt.square:
        source = matrices(x.transpose(-2, -1) if down else x)
        outer = _squares(source, fmt, outer, layout, **{"columns" if down else "rows": (data, scales)})
    elif down:
        source = matrices(x.transpose(-2, -1))
        _, outer = _columns(source, fmt, outer, layout, (data, scales), seed=seed, stream=stream, transform=transform)
        outer = _each(outer, x)
    elif fmt.outer == "row" and outer is None:
        outer = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        _scaled_rows(matrices(x), fmt, data, scales, outer, layout, seed, stream)
    else:
        outer = _rows(matrices(x), fmt, data, scales, outer, layout, seed, stream)
    return (*_typed(data, scales, x.shape[-1], fmt), outer)


def quantize_both(
    x: torch.Tensor,
    fmt: BlockFormat,
    outer: torch.Tensor | None = None,
    layout: str = "linear",
    *,
    seed: torch.Tensor | None = None,
    transform: bool = False,
) -> tuple[tuple, tuple]:
    """x [..., R, C] quantised along C and, transposed, along R, from one read.

    seed: stochastic rounding, stream 0 along C and stream 1 along R. transform: the Hadamard transform along R.

    Returns (data, scales, outer scale) of x and of x transposed.
    """
    transposed = x.transpose(-2, -1)
    if fmt.square and seed is not None:
        rows = reference.quantize(x, fmt, outer, layout, seed=seed)
        return rows, reference.quantize(transposed, fmt, outer, layout, seed=seed, stream=1)
    rows, columns = _empty(x, fmt, layout), _empty(transposed, fmt, layout, down=True)
    if fmt.square:
        outer = column_outer = _squares(matrices(x), fmt, outer, layout, rows=rows, columns=columns)
    else:
        outer, column_outer = _columns(
            matrices(x), fmt, outer, layout, columns, rows, seed=seed, stream=1, transform=transform
        )
        outer, column_outer = _each(outer, x), _each(column_outer, transposed)
    return (*_typed(*rows, x.shape[-1], fmt), outer), (*_typed(*columns, x.shape[-2], fmt), column_outer)


def fake_quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`reference.fake_quantize` on the GPU, bit for bit; same arguments and results.

    Neither codes nor block scales are written. What does not lie along its last dimension is copied before.
    """
    values = x.new_empty((*x.shape[:-1], 2 * _units(x.shape[-1], fmt)), dtype=torch.float16)
    if fmt.outer == "row" and outer is None:
        outer = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        _scaled_rows(matrices(x), fmt, values, None, outer)
    else:
        outer = _rows(matrices(x), fmt, values, None, outer)
    return values, outer


def _each(outer: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """The outer scales of the rows of x, if they are such, in the shape that callers know."""
    return outer if outer is None or outer.dim() == 0 else outer.view(*x.shape[:-1], 1)


def _lies_transposed(x: torch.Tensor) -> bool:
    along_last = statically_true(x.stride(-1) == 1) or statically_true(x.shape[-1] == 1)
    return not along_last and statically_true(x.stride(-2) == 1)


def _empty(
    x: torch.Tensor, fmt: BlockFormat, layout: str, down: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Bytes for the codes and the scales of x; `down`: for the kernel of columns, which stores 16 bytes at a time."""
    *batch, rows, cols = x.shape
    if fmt.block is None:
        row_bytes = ceil_div(cols, 16 if down else 2) * (16 if down else 2)
    else:
        row_bytes = _units(cols, fmt) * (1 if fmt.packed else 2)
    data = x.new_empty((*batch, rows, row_bytes), dtype=torch.uint8)
    if fmt.scale is None:
        return data, None
    blocks = ceil_div(cols, fmt.block_cols)
    matrix = (swizzled_numel(rows, blocks),) if layout == "swizzled" else (ceil_div(rows, fmt.block[0]), blocks)
    return data, x.new_empty((*batch, *matrix), dtype=torch.uint8)


def _units(cols, fmt: BlockFormat):
    """Code pairs in a row."""
    return ceil_div(cols, 2) if fmt.block is None else ceil_div(cols, fmt.block_cols) * (fmt.block_cols // 2)


def _typed(data: torch.Tensor, scales: torch.Tensor | None, cols, fmt: BlockFormat):
    """The bytes as codes and scales; a row without blocks loses the bytes that fill its last store."""
    data = data.view(fmt.data_dtype)
    if fmt.block is None and not statically_true(data.shape[-1] == cols):
        data = data[..., :cols].contiguous()
    return data, None if scales is None else scales.view(fmt.scale_dtype)


def outer_of(source: Matrices, fmt: BlockFormat, outer: torch.Tensor | None):
    """(outer scale, bits of the amax it is made from, OUTER of the kernels); absent ones stand in for each other."""
    if outer is not None:
        return outer, outer, "tensor" if outer.dim() == 0 else "row"
    if fmt.outer is None:
        return None, None, "none"
    bits = tensor_amax_bits(source)
    return source.tensor.new_empty(1, dtype=torch.float32), bits, "amax"


def _scalar(outer: torch.Tensor | None, mode: str) -> torch.Tensor | None:
    """The outer scale as callers know it. One that is made has one element: Inductor would fill a tensor of no
    dimensions by a launch of its own."""
    return outer.view(()) if mode == "amax" else outer


def tensor_amax_bits(source: Matrices) -> torch.Tensor:
    """The float32 bits of the largest magnitude: int32 [] or, for a small tensor, [n] partial ones; 0 of nothing."""
    flat = source.flat()
    source = flat or source
    # Partial maxima are counted in the code of the kernel that reads them.
    small = flat is not None and isinstance(source.cols, int) and source.cols <= MOST_ELEMENTS_IN_PARTIAL_MAXIMA
    config = amax_launch(source.cols if small else None)
    width = config.kwargs["BLOCKS"] * config.kwargs["BLOCK"]
    programs = source.batch * ceil_div(source.rows, config.kwargs["ROWS"]) * ceil_div(source.cols, width)
    device = source.tensor.device
    if small:
        programs = 1 << (max(programs, 1) - 1).bit_length()
        bits = torch.empty(programs, dtype=torch.int32, device=device)
    else:
        bits = torch.zeros((), dtype=torch.int32, device=device)
    target = target_of(device)
    launch(
        tensor_amax, programs, source.tensor, bits, *source.args, FLAT=flat is not None, PARTIAL=small,
        LAUNCH_DEPENDENTS=small and target.dependent_launch, ALIGN=source.align, ISA=target.isa, num_warps=config.num_warps,
        **config.kwargs,
    )  # fmt: skip
    return bits


def columns_amax_bits(source: Matrices, plain: str | None, transform: bool, each: bool) -> torch.Tensor:
    """Bits of the amax of the values transformed down the columns, int32 [1], or for each column [batch * cols].

    plain: those of the values as they are, too. "all": one, before the others; "rows": for each row, which with the
    columns' ones makes [batch * (rows + cols)].
    """
    lanes = source.cols + (source.rows if plain == "rows" else 0)
    count = (source.batch * lanes if each else 1) + int(plain == "all")
    bits = torch.zeros(count, dtype=torch.int32, device=source.tensor.device)
    config = columns_amax_launch()
    height, width = config.kwargs["ROW_TILES"] * config.kwargs["BLOCK"], 2 * config.kwargs["WORDS"]
    programs = source.batch * ceil_div(source.rows, height) * ceil_div(source.cols, width)
    launch(
        columns_amax, programs, source.tensor, bits, *source.args,
        PLAIN=plain == "all", ROWS=plain == "rows", TRANSFORM=transform, EACH=each, ALIGN=source.align,
        ISA=target_of(source.tensor.device).isa, num_warps=config.num_warps, **config.kwargs,
    )  # fmt: skip
    return bits


def _maxima(amax: torch.Tensor | None, mode: str) -> int:
    """Partial maxima that an amax consists of."""
    return amax.numel() if mode == "amax" else 1


def _scale_grid(rows, blocks, layout: str):
    """Rows and block columns whose scale bytes the kernel writes, padding included."""
    if layout == "swizzled":
        return ceil_div(rows, 128) * 128, ceil_div(blocks, 4) * 4
    return rows, blocks


def format_constants(fmt: BlockFormat) -> dict:
    return {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale or "none",
        "CONTRACT": fmt.contract,
        "BLOCK": fmt.block_cols if fmt.block else 32,
    }


def store_aligns(cols, fmt: BlockFormat, prefix: str = "") -> dict:
    """How wide the rows of codes and of scales let stores be."""
    return {
        prefix + "UNIT_ALIGN": power_of_two(_units(cols, fmt), 16),
        prefix + "SCALE_ALIGN": power_of_two(ceil_div(cols, fmt.block_cols), 16),
    }


def _rows(source: Matrices, fmt: BlockFormat, data, scales, outer, layout: str = "linear", seed=None, stream: int = 0):
    """Launch the row kernel; returns the outer scale. data: bytes for codes, or fp16 for what they stand for."""
    outer, amax, mode = outer_of(source, fmt, outer)
    constants = format_constants(fmt)
    block = constants["BLOCK"]
    flat = source.flat() if layout == "linear" and mode != "row" and statically_true(source.cols % block == 0) else None
    source = flat or source
    config = rows_launch(fmt.element, block, None if flat is None else source.cols)
    rows, blocks = _scale_grid(source.rows, ceil_div(source.cols, block), layout)
    programs = source.batch * ceil_div(rows, config.kwargs["ROWS"]) * ceil_div(blocks, config.kwargs["BLOCKS"])
    target = target_of(source.tensor.device)
    # Small tensors' maxima are partial ones. Of a large one, the launch is nothing.
    dependent = mode == "amax" and amax.dim() == 1 and target.dependent_launch
    launch(
        quantize_rows, programs, source.tensor, data, _or(scales, data), _or(outer, data),
        _or(amax, data), _or(seed, data), *source.args, **constants, SEEDED=seed is not None, STREAM=stream,
        OUTER=mode, MAXIMA=_maxima(amax, mode), FLAT=flat is not None,
        SWIZZLED=layout == "swizzled", PDL=dependent, ALIGN=source.align, **store_aligns(source.cols, fmt),
        ISA=target.isa, num_warps=config.num_warps, **config.kwargs,
    )  # fmt: skip
    return _scalar(outer, mode)


def _tiles(source: Matrices, height: int, width: int, layout: str):
    """Programs of a kernel whose tiles cover swizzled scales down the columns and along the rows."""
    rows, cols = [ceil_div(n, 128) * 128 if layout == "swizzled" else n for n in (source.rows, source.cols)]
    # A column of nothing has an outer scale of its own.
    return source.batch * torch.sym_max(ceil_div(rows, height), 1) * ceil_div(cols, width)


def _squares(source: Matrices, fmt: BlockFormat, outer, layout: str, rows=None, columns=None) -> torch.Tensor | None:
    """Launch the kernel of square blocks for the (data, scales) that are given; returns the outer scale."""
    outer, amax, mode = outer_of(source, fmt, outer)
    constants = format_constants(fmt)
    config = squares_launch(fmt.element)
    programs = _tiles(source, config.kwargs["ROW_TILES"] * constants["BLOCK"], 2 * config.kwargs["WORDS"], layout)
    some = rows or columns
    launch(
        quantize_squares, programs, source.tensor, *(rows or some), *(columns or some),
        _or(outer, some[0]), _or(amax, some[0]), *source.args, **constants, ALONG_ROWS=rows is not None,
        ALONG_COLUMNS=columns is not None, OUTER=mode, MAXIMA=_maxima(amax, mode), SWIZZLED=layout == "swizzled",
        ALIGN=source.align, **store_aligns(source.cols, fmt), **store_aligns(source.rows, fmt, "COLUMN_"),
        ISA=target_of(source.tensor.device).isa, num_warps=config.num_warps, **config.kwargs,
    )  # fmt: skip
    return _scalar(outer, mode)


def _columns(
    source: Matrices, fmt: BlockFormat, outer, layout: str, columns, rows=None,
    *, seed: torch.Tensor | None, stream: int, transform: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Launch the kernel of columns, and of rows if they are given as well: (data, scales) of each.

    Returns the outer scales of the rows and of the columns; where each has its own, [batch * rows], [batch * cols].
    """
    x = source.tensor
    if outer is None and fmt.outer == "row":
        amax = column_amax = columns_amax_bits(source, "rows" if rows else None, transform, each=True)
        column_outer = x.new_empty(source.batch * source.cols, dtype=torch.float32)
        outer = x.new_empty(source.batch * source.rows, dtype=torch.float32) if rows else None
        mode = "row amax"
    elif outer is None and fmt.outer == "tensor" and transform:
        amax = column_amax = columns_amax_bits(source, "all" if rows else None, True, each=False)
        if rows:
            amax, column_amax = amax.narrow(0, 0, 1), amax.narrow(0, 1, 1)
        outer, column_outer = (x.new_empty(1, dtype=torch.float32) for _ in range(2))
        mode = "amax"
    else:
        outer, amax, mode = outer_of(source, fmt, outer)
        column_outer, column_amax = outer, amax
    constants = format_constants(fmt)
    quick_outer = mode in ("tensor", "amax") and fmt.contract == "torchao" and x.dtype == torch.bfloat16
    one_read = quick_outer or (mode == "none" and x.element_size() == 2)
    if rows is not None and one_read and seed is None and not transform:
        _both(source, fmt, layout, rows, columns, outer, amax, mode)
        return _scalar(outer, mode), _scalar(outer, mode)
    config = columns_launch(fmt.element, constants["BLOCK"], rows is not None)
    programs = _tiles(source, config.kwargs["ROW_TILES"] * constants["BLOCK"], 2 * config.kwargs["WORDS"], layout)
    data, scales = columns
    aligns = store_aligns(source.rows, fmt, "COLUMN_")
    aligns["COLUMN_UNIT_ALIGN"] = 2 if fmt.block is None else power_of_two(_units(source.rows, fmt) // 8, 2)
    row_data, row_scales = rows or columns
    launch(
        quantize_columns, programs, x, row_data, _or(row_scales, data), _or(outer, data), _or(amax, data),
        data, _or(scales, data), _or(column_outer, data), _or(column_amax, data), _or(seed, data), *source.args,
        **constants, ALONG_ROWS=rows is not None, TRANSFORM=transform, SEEDED=seed is not None, STREAM=stream,
        OUTER=mode, MAXIMA=_maxima(amax, mode), SWIZZLED=layout == "swizzled", ALIGN=source.align,
        **store_aligns(source.cols, fmt), **aligns, ISA=target_of(x.device).isa, num_warps=config.num_warps,
        **config.kwargs,
    )  # fmt: skip
    return _scalar(outer, mode), _scalar(column_outer, mode)


def _both(source: Matrices, fmt: BlockFormat, layout: str, rows, columns, outer, amax, mode: str) -> None:
    """Launch the kernel of rows and columns from one read: (data, scales) of each."""
    isa = target_of(source.tensor.device).isa
    config = both_launch(fmt.element)
    height, width = config.kwargs["ROW_TILES"] * DEPTH.value, 2 * config.kwargs["COL_TILES"] * config.kwargs["WORDS"]
    aligns = store_aligns(source.rows, fmt, "COLUMN_")
    aligns["COLUMN_UNIT_ALIGN"] = power_of_two(_units(source.rows, fmt) // 8, 2)
    whole = (
        statically_true(source.rows % height == 0) and statically_true(source.cols % width == 0) and source.align > 0
    )
    launch(
        quantize_both_kernel, _tiles(source, height, width, layout), source.tensor, *rows, *columns,
        _or(outer, rows[0]), _or(amax, rows[0]), *source.args, **format_constants(fmt), OUTER=mode,
        MAXIMA=_maxima(amax, mode), SWIZZLED=layout == "swizzled", WHOLE=whole, ALIGN=source.align,
        **store_aligns(source.cols, fmt), **aligns, ISA=isa, num_warps=config.num_warps,
        **config.kwargs,
    )  # fmt: skip


def _scaled_rows(
    source: Matrices, fmt: BlockFormat, data, scales, outer, layout: str = "linear", seed=None, stream: int = 0
) -> None:
    """Launch the kernel of rows with their own outer scale. data: as for `_rows`."""
    constants = format_constants(fmt)
    config = scaled_rows_launch(fmt.element, constants["BLOCK"], source.batch * source.rows, source.cols)
    rows, _ = _scale_grid(source.rows, 0, layout)
    programs = source.batch * ceil_div(rows, config.kwargs["ROWS"]) * config.kwargs["PARTS"]
    launch(
        quantize_scaled_rows, programs, source.tensor, data, _or(scales, data), outer, _or(seed, data), *source.args,
        **constants, SEEDED=seed is not None, STREAM=stream, SWIZZLED=layout == "swizzled", ALIGN=source.align,
        **store_aligns(source.cols, fmt), ISA=target_of(source.tensor.device).isa,
        num_warps=config.num_warps, **config.kwargs,
    )  # fmt: skip


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor | None,
    outer: torch.Tensor | None,
    fmt: BlockFormat,
    cols,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The represented values [..., cols] in dtype: `reference.dequantize` on the GPU, bit for bit."""
    lead = data.shape[:-1]
    out = data.new_empty((*lead, cols), dtype=dtype)
    *batch, rows = lead or (1,)
    constants = format_constants(fmt)
    del constants["CONTRACT"]
    block = constants["BLOCK"]
    blocks = ceil_div(cols, block)
    swizzled = scales is not None and not (
        scales.dim() == data.dim() and (lead or statically_true(scales.numel() == blocks))
    )
    mode = "none" if outer is None else "tensor" if outer.dim() == 0 else "row"
    codes = data.contiguous().view(torch.uint8)
    if fmt.block is None and not statically_true(cols % 2 == 0):
        codes = torch.nn.functional.pad(codes, (0, 1))  # the kernel reads pairs
    scale_bytes = codes if scales is None else scales.contiguous().view(torch.uint8)
    config = dequantize_launch(block)
    programs = math.prod(batch) * ceil_div(rows, config.kwargs["ROWS"]) * ceil_div(blocks, config.kwargs["BLOCKS"])
    launch(
        dequantize_rows, programs, codes, scale_bytes, _or(outer, out), out, rows, cols,
        **constants, SQUARE=fmt.square, OUTER=mode, SWIZZLED=swizzled, ALIGN=power_of_two(cols, 8) // 2,
        UNIT_ALIGN=power_of_two(_units(cols, fmt), 16), ISA=target_of(data.device).isa,
        num_warps=config.num_warps, **config.kwargs,
    )  # fmt: skip
    return out


def _or(tensor: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel takes a tensor for every pointer, also for those that its constants leave unused."""
    return stand_in if tensor is None else tensor
