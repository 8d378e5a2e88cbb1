"""The outputs of a quantise kernel (codes or dequantised values, and scales) and its constexpr arguments."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat, integer_dtype
from fp4compile.formats.layouts import TILE_COLS, TILE_ROWS, ceil_div, swizzled_numel
from fp4compile.templates.launch import Launch
from fp4compile.templates.quantize.source import Source, power_of_two
from fp4compile.templates.view import View


@dataclass(frozen=True, eq=False)
class Output:
    """The tensors that a kernel fills along one dimension of a tensor.

    data: uint8 for codes, or 16-bit floats for dequantised values (codes times block scales). scales: the bits of the
        block scales, integers; None for dequantised values, and if the format has none. length: elements of a row of
        codes, without padding.
    """

    data: View
    scales: View | None
    length: int
    format: BlockFormat

    @property
    def pointers(self) -> tuple[View, View]:
        """The kernel's pointers to data and scales; an unused pointer is that to data."""
        return self.data, self.scales or self.data

    def typed(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Codes (or dequantised values) and scales in their dtypes; without block scales, rows have no padding."""
        data, fmt = self.data.tensor, self.format
        if data.is_floating_point():
            return data, None
        data = data.view(fmt.data_dtype)
        if fmt.block is None and not statically_true(data.shape[-1] == self.length):
            data = data[..., : self.length].contiguous()
        return data, None if self.scales is None else self.scales.tensor.view(fmt.scale_dtype)


def empty_output(
    source: Source, shape: Sequence, fmt: BlockFormat, layout: str, *, columns: bool = False, values: bool = False
) -> Output:
    """Uninitialised memory for the results along one dimension.

    shape: [..., lanes, length] of the tensor that is quantised along its last dimension. columns: whether that is the
    source transposed; the kernel for columns stores 16 bytes at a time, so rows of codes are padded to 16 bytes.
    Raises RuntimeError if the kernel, whose sizes are those of the source, would write beyond this memory.
    """
    *batch, lanes, length = shape
    read_lanes, read_length = (source.cols, source.padded_rows) if columns else (source.rows, source.cols)
    all_lanes = source.batch * read_lanes
    if values:
        data = source.tensor.new_empty((*batch, lanes, 2 * code_pairs(length, fmt)), dtype=fmt.values_dtype)
        return Output(View.flat(data, all_lanes * 2 * code_pairs(read_length, fmt)), None, length, fmt)
    data = source.tensor.new_empty((*batch, lanes, _row_bytes(length, fmt, columns)), dtype=torch.uint8)
    codes = View.flat(data, all_lanes * _row_bytes(read_length, fmt, columns))
    if fmt.scale is None:
        return Output(codes, None, length, fmt)
    if layout == "swizzled" and source.groups and not columns:
        lanes = read_lanes = source.padded_rows
    shape = (*batch, *_scales_of_matrix(lanes, length, fmt, layout))
    scales = source.tensor.new_empty(shape, dtype=integer_dtype(fmt.scale_dtype))
    written = source.batch * math.prod(_scales_of_matrix(read_lanes, read_length, fmt, layout))
    return Output(codes, View.flat(scales, written), length, fmt)


def code_pairs(cols, fmt: BlockFormat):
    """The number of pairs of codes in a row of `cols` elements, padding included."""
    return ceil_div(cols, 2) if fmt.block is None else ceil_div(cols, fmt.block_cols) * (fmt.block_cols // 2)


def _row_bytes(length, fmt: BlockFormat, columns: bool):
    """The number of bytes of a row of codes."""
    if fmt.block is None:
        return ceil_div(length, 16 if columns else 2) * (16 if columns else 2)
    return code_pairs(length, fmt) * (1 if fmt.packed else 2)


def _scales_of_matrix(lanes, length, fmt: BlockFormat, layout: str) -> tuple:
    """The shape of the block scales of one matrix."""
    blocks = ceil_div(length, fmt.block_cols)
    return (swizzled_numel(lanes, blocks),) if layout == "swizzled" else (ceil_div(lanes, fmt.block[0]), blocks)


@dataclass(frozen=True, eq=False)
class Outer:
    """The global or row scales of a launch, in the arguments of kernels (`device.block_scales.outer_scales`).

    mode: the kernels' constexpr OUTER. scale: float32 decode factors, static or to be written; None without scales.
    amax: the float32 bits (int32) of which the scales are made; None if no amax is read.
    launches: the launches that find the amax.
    """

    mode: str
    scale: View | None = None
    amax: View | None = None
    launches: tuple[Launch, ...] = ()

    @property
    def computed(self) -> bool:
        """Whether an earlier kernel reads the tensor to find the amax."""
        return self.mode in ("amax", "row amax", "matrix amax")

    @property
    def constants(self) -> dict:
        """The constants OUTER and PARTIAL_MAXIMA, the number of partial maxima of the amax."""
        return {"OUTER": self.mode, "PARTIAL_MAXIMA": self.amax.tensor.numel() if self.mode == "amax" else 1}

    def pointers(self, unused: View) -> tuple[View, View]:
        """The pointers of the scale and of the amax; `unused` for each that is absent."""
        return self.scale or unused, self.amax or unused

    @property
    def result(self) -> torch.Tensor | None:
        """The scale in the shape that callers expect.

        A computed global scale has the shape [1] in kernels: Inductor would use another launch to fill an empty tensor
        without dimensions.
        """
        if self.scale is None:
            return None
        return self.scale.tensor.view(()) if self.mode == "amax" else self.scale.tensor


def padded_scale_shape(rows, blocks, layout: str):
    """The numbers of rows and block columns whose scales a kernel writes, including padding of swizzled scales."""
    if layout == "swizzled":
        return ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(blocks, TILE_COLS) * TILE_COLS
    return rows, blocks


def row_tiles(source: Source, rows, height: int):
    """The number of tiles of `height` rows that cover the rows of each matrix, or any groups of the source's rows."""
    return source.rows // height + source.groups if source.groups else source.batch * ceil_div(rows, height)


def tile_grid(source: Source, height: int, width: int, layout: str):
    """The number of programs whose height x width tiles cover each matrix and its swizzled scales' padding."""
    rows, cols = [ceil_div(n, 128) * 128 if layout == "swizzled" else n for n in (source.rows, source.cols)]
    # Even without rows, scales of the columns are written.
    return row_tiles(source, torch.sym_max(rows, 1), height) * ceil_div(cols, width)


def whole_tiles(source: Source, height: int, width: int, layout: str) -> bool:
    """Whether the tiles of `tile_grid` statically divide each matrix, and its rows are aligned."""
    if layout == "swizzled":
        height, width = max(height, 128), max(width, 128)
    divides = statically_true(source.rows % height == 0) and statically_true(source.cols % width == 0)
    return divides and source.align > 0


def format_constants(fmt: BlockFormat) -> dict:
    """The constexpr arguments for a format. Without block scales, BLOCK is only a unit of work."""
    return {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale or "none",
        "CONTRACT": fmt.contract,
        "BLOCK": fmt.block_cols if fmt.block else 32,
    }


def store_aligns(cols, fmt: BlockFormat, prefix: str = "") -> dict:
    """The constexpr arguments for the width of stores: powers of two that divide a row of code pairs, and of scales."""
    return {
        prefix + "UNIT_ALIGN": power_of_two(code_pairs(cols, fmt), 16),
        prefix + "SCALE_ALIGN": power_of_two(ceil_div(cols, fmt.block_cols), 16),
    }


def column_aligns(source: Source, fmt: BlockFormat) -> dict:
    """`store_aligns` of x transposed, for kernels that store 8 bytes of codes at a time."""
    if source.groups:
        return {"COLUMN_UNIT_ALIGN": 2, "COLUMN_SCALE_ALIGN": TILE_ROWS // format_constants(fmt)["BLOCK"]}
    aligns = store_aligns(source.rows, fmt, "COLUMN_")
    aligns["COLUMN_UNIT_ALIGN"] = 2 if fmt.block is None else power_of_two(code_pairs(source.rows, fmt) // 8, 2)
    return aligns
