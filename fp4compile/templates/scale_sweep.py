"""Block scales of weights by least error, and their codes: `reference_scales` on the GPU, bit for bit.

A program is one warp. Each thread reads one row of 16 elements once and holds it in registers: a whole block, or a
sixteenth of a square block. All threads try one scale at a time, each the next scale of its own block, until no block
has a candidate left (see `reference_scales`). A block of 16 takes a dozen steps of eight instructions an element.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scales import encode_scale, reciprocal_e4m3
from fp4compile.templates.device.elements import (
    INFINITY_BITS,
    encode_pair,
    fp8_value,
    rounded_e2m1,
    unpack,
    word_amax,
)
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tile_of
from fp4compile.templates.device.quick_scales import SIXTH
from fp4compile.templates.launch import Launch, target_of
from fp4compile.templates.quantize.amax import amax_of_each, amax_of_tensor
from fp4compile.templates.quantize.outputs import Output, empty_output, padded_scale_shape, store_aligns
from fp4compile.templates.quantize.source import Source, source_of
from fp4compile.templates.quantize.squares import store_square_scales
from fp4compile.templates.view import View
from fp4compile.templates.writes import of, writes

U_MAX = tl.constexpr(reference_scales.U_MAX)
CANDIDATES = tl.constexpr(reference_scales.CANDIDATES)
SUBNORMALS = tl.constexpr(reference_scales.SUBNORMALS)
LAST_WITH_DOUBLE = tl.constexpr(reference_scales.LAST_WITH_DOUBLE)
MOST_SCALES = tl.constexpr(reference_scales.MOST_SCALES)
LANES = 32  # blocks, or rows of square blocks, of a program


def quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None, layout: str, each_matrix: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`reference_scales.quantize` on the GPU, bit for bit.

    x: any strides; copied where its last dimension is not contiguous. each_matrix: x is [B, R, C], and a computed
    global scale has one element per matrix, [B].
    """
    if x.dim() == 1:
        row = quantize(x.unsqueeze(0), fmt, outer, layout)
        return reference.drop_row(row)
    source = source_of(x, target_of(x.device))
    output = empty_output(source, x.shape, fmt, layout)
    outer = _sweep(source, output, outer, layout, each_matrix)
    return *output.typed(), outer


def best_scales(x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor) -> torch.Tensor:
    """The linear E4M3 block scales [..., R / block rows, C / 16] of x [..., R, C], without codes.

    outer: float32 [], or [B] for each matrix of x [B, R, C].
    """
    source = source_of(x, target_of(x.device))
    output = empty_output(source, x.shape, fmt, "linear")
    _sweep(source, output, outer, "linear", outer.dim() == 1, codes=False)
    return output.typed()[1]


def _sweep(
    source: Source, output: Output, outer: torch.Tensor | None, layout: str, each_matrix: bool, codes: bool = True
) -> torch.Tensor | None:
    """Fill the scales, and the codes if `codes`; return the global scale."""
    fmt = output.format
    if outer is None and fmt.outer is not None:
        amax, launches = amax_of_each(source, "matrix") if each_matrix else amax_of_tensor(source)
        for launch in launches:
            launch.run()
        bits = amax.tensor if each_matrix else amax.tensor.amax()
        outer = reference_scales.outer_of(bits.view(torch.float32))
    factor = torch.ones((), device=source.tensor.device) if outer is None else outer
    each = factor.dim() == 1
    block_rows = fmt.block[0]
    rows, blocks = padded_scale_shape(source.rows, ceil_div(source.cols, 16), layout)
    tile_blocks = LANES // block_rows
    constants = {
        "CODES": codes, "EACH_MATRIX": each, "SWIZZLED": layout == "swizzled", "ALIGN": source.align,
        **store_aligns(source.cols, fmt),
        "DOUBLE_WINS": reference_scales.DOUBLE_WINS[16 * block_rows], "ROWS": block_rows, "BLOCKS": tile_blocks,
        "VECTORS": source.tensor.element_size(), "ISA": source.target.isa,
    }  # fmt: skip
    arguments = source.view, *output.pointers, View.flat(factor, source.batch if each else 1), *source.args
    grid = source.batch * ceil_div(rows, block_rows) * ceil_div(blocks, tile_blocks)
    Launch(sweep_scales, grid, arguments, constants, num_warps=1).run()
    return outer


@triton.jit
def squared_rest(u, scale, inverse, ISA: tl.constexpr):
    """(u - q * scale)^2 of elements, where q is u * inverse rounded to E2M1."""
    rest = u - rounded_e2m1(tl.minimum(u * inverse, 6.0), ISA) * scale
    return tl.fma(rest, rest, 0.0)  # no compiler can fuse this square into a sum: it is a fused operation already


@triton.jit
def sum_neighbours(x):
    """[a, b, n] -> [a, b]: pairwise sums, neighbours first."""
    a: tl.constexpr = x.shape[0]
    b: tl.constexpr = x.shape[1]
    n: tl.constexpr = x.shape[2]
    if n == 1:
        return tl.reshape(x, (a, b))
    else:
        first, second = tl.split(tl.reshape(x, (a, b, n // 2, 2)))
        return sum_neighbours(first + second)


@triton.jit
def block_error(first, second, scale, ISA: tl.constexpr):
    """`reference_scales.block_error`: the errors [1, BLOCKS] of blocks with scales [1, BLOCKS].

    first, second: the even and the odd elements of each row, [ROWS, BLOCKS, 8], of blocks that are ROWS high.
    """
    inverse = reciprocal_e4m3(scale, ISA)[:, :, None]
    scale = scale[:, :, None]
    errors = squared_rest(first, scale, inverse, ISA) + squared_rest(second, scale, inverse, ISA)
    of_rows = sum_neighbours(errors)
    if of_rows.shape[0] == 1:
        return of_rows
    else:
        columns = tl.trans(of_rows)
        return sum_neighbours(columns[None, :, :])


@triton.jit
def scale_value(byte):
    """`elements.fp8_value` for positive finite E4M3 bytes (int32) -> float32."""
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def least_error(first, second, top, DOUBLE_WINS: tl.constexpr, ISA: tl.constexpr):
    """`reference_scales._least_error`: the bytes (int32, [1, BLOCKS]) of blocks.

    first, second: as in `block_error`. top: the largest element of each block, [1, BLOCKS].
    """
    above = ((top * SIXTH).to(tl.int32, bitcast=True) >> 20) - 8 * 120 + 1
    byte = tl.minimum(tl.maximum(above + 7, SUBNORMALS), CANDIDATES)
    scale = scale_value(byte)
    winner = byte
    best = top * 0.0 + float("inf")
    active = byte > 0
    # Not a `while`: Triton 3.6 fails on one whose values are tensors.
    for _ in range(MOST_SCALES):
        if tl.max(tl.max(active.to(tl.int32), 1), 0) > 0:
            error = block_error(first, second, scale, ISA)
            better = active & (error <= best)
            best = tl.where(better, error, best)
            winner = tl.where(better, byte, winner)
            byte = tl.maximum(byte - 1, 0)
            scale = scale_value(byte)
            excess = tl.maximum(top - 6.0 * scale, 0.0)  # the product is exact, so fusing it changes no bit
            double_loses = (top < DOUBLE_WINS * scale) | (scale > LAST_WITH_DOUBLE)
            active = active & (byte > 0) & (excess * excess <= best) & double_loses
    return winner


@writes("scales_ptr", data_ptr=of("CODES"))
@triton.jit
def sweep_scales(
    x_ptr, data_ptr, scales_ptr, outer_ptr, rows, cols, x_batch, x_row,
    CODES: tl.constexpr, EACH_MATRIX: tl.constexpr, SWIZZLED: tl.constexpr, ALIGN: tl.constexpr,
    UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, DOUBLE_WINS: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store the scales of BLOCKS neighbouring blocks that are ROWS high. x: [batch, rows, cols], as in `quantize_rows`.

    CODES: store the codes too. outer_ptr: the global scale or (EACH_MATRIX) one global scale for each matrix.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    padded_rows = tl.cdiv(rows, 128) * 128 if SWIZZLED else rows
    padded_cols = tl.cdiv(cols, 64) * 64 if SWIZZLED else cols
    batch, row_tile, col_tile = tile_of(tl.program_id(0), padded_rows, tl.cdiv(padded_cols, BLOCKS * 16), ROWS, False,
                                        ISA >= 100)  # fmt: skip
    row = row_tile * ROWS + tl.arange(0, ROWS)
    block0 = col_tile * BLOCKS
    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + block0 * 16
    cols_left = tl.minimum(cols - block0 * 16, BLOCKS * 16)
    words = load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, 16, VECTORS, ALIGN)
    outer = tl.load(outer_ptr + batch) if EACH_MATRIX else tl.load(outer_ptr)
    factor = encode_scale(outer, ISA)

    largest = tl.max(word_amax(words, 2, ISA, dtype), 0, keep_dims=True)
    top = largest.to(tl.float32, bitcast=True) * factor
    finite = (largest < INFINITY_BITS) & (top == top)
    top = tl.minimum(top, U_MAX)
    first, second = unpack(words, dtype)
    u_first = tl.minimum(tl.abs(first) * factor, U_MAX)
    u_second = tl.minimum(tl.abs(second) * factor, U_MAX)
    byte = tl.where(finite, least_error(u_first, u_second, top, DOUBLE_WINS, ISA), 0x7F)

    if CODES:
        step = (fp8_value(byte, "e4m3") * outer)[:, :, None]
        one = tl.full(words.shape, 1.0, tl.float32)
        units = encode_pair(tl.div_rn(first, step), tl.div_rn(second, step), one, "e2m1", ISA)
        store_units(data_ptr, tl.reshape(units, (ROWS, BLOCKS * 8)), batch.to(tl.int64) * rows + row, block0 * 8,
                    tl.cdiv(cols, 16) * 8, row < rows, UNIT_ALIGN)  # fmt: skip
    if ROWS == 1:
        store_scales(scales_ptr, byte, batch, row, block0, rows, tl.cdiv(cols, 16), SWIZZLED, SCALE_ALIGN)
    else:
        store_square_scales(scales_ptr, byte, batch, row_tile, block0, rows, cols, ROWS, SWIZZLED, SCALE_ALIGN)
