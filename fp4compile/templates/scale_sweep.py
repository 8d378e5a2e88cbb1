"""Block scales of weights by least error, and the codes that they give: `reference_scales` on the GPU, bit for bit.

A program is one warp. Each of its threads holds one row of 16 elements in registers, a whole block or a sixteenth of a
square one, and reads it once. All threads try one scale at a time, each the scale that its own block has come to, until
no block has a scale left that can win (`reference_scales` says which those are). In a block of 16 that takes a dozen
steps of eight instructions an element.

Where a Hessian weighs the errors, all scales are tried. A program has the blocks of 32 rows below each other, which may
share a Hessian; each thread keeps its half of that in registers, with the signs of the elements in it.
"""

import torch
import triton
import triton.language as tl

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.block_scales import e4m3_round, encode_scale, reciprocal_e4m3
from fp4compile.templates.device.elements import INFINITY_BITS, encode_pair, fp8_value, unpack, word_amax
from fp4compile.templates.device.memory import load_tile, store_scales, store_units, tile_of
from fp4compile.templates.device.quick_scales import SIXTH
from fp4compile.templates.launch import launch, target_of
from fp4compile.templates.quantize.amax import matrices_amax_bits, tensor_amax_bits
from fp4compile.templates.quantize.square import store_square_scales
from fp4compile.templates.quantize.views import (
    Matrices,
    check_outputs,
    empty_outputs,
    matrices,
    padded_scale_shape,
    store_aligns,
    typed_outputs,
)

U_MAX = tl.constexpr(reference_scales.U_MAX)
CANDIDATES = tl.constexpr(reference_scales.CANDIDATES)
SUBNORMALS = tl.constexpr(reference_scales.SUBNORMALS)
LAST_WITH_DOUBLE = tl.constexpr(reference_scales.LAST_WITH_DOUBLE)
E4M3_MIN = tl.constexpr(reference_scales.E4M3_MIN)
MOST_SCALES = tl.constexpr(reference_scales.MOST_SCALES)
LANES = 32  # blocks, or rows of square blocks, of a program


def quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None, layout: str, rule: str, each_matrix: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`reference_scales.quantize` on the GPU, bit for bit.

    x: of any strides; copied where its last dimension is not contiguous. each_matrix: x is [B, R, C], and an outer
    scale that is made here is one of each matrix, [B].
    """
    if x.dim() == 1:
        row = quantize(x.unsqueeze(0), fmt, outer, layout, rule)
        return reference.drop_row(row, layout)
    data, scales = empty_outputs(x, fmt, layout)
    outer = _launch(matrices(x), fmt, data, scales, outer, layout, rule, each_matrix)
    data, scales = typed_outputs(data, scales, x.shape[-1], fmt)
    return data, scales, outer


def best_scales(x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor, rule: str) -> torch.Tensor:
    """The linear E4M3 block scales [..., R / block rows, C / 16] of x [..., R, C], without codes.

    outer: float32 [], or [B] for each matrix of x [B, R, C].
    """
    _, scales = empty_outputs(x, fmt, "linear")
    _launch(matrices(x), fmt, None, scales, outer, "linear", rule, outer.dim() == 1)
    return scales.view(fmt.scale_dtype)


def best_weighted_scales(x: torch.Tensor, outer: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """`reference_scales.best_weighted_scales` on the GPU, bit for bit. x: [R, C] or [B, R, C]. outer: [] or [B]."""
    source, blocks = matrices(x), ceil_div(x.shape[-1], 16)
    scales = torch.empty((*x.shape[:-1], blocks), dtype=torch.uint8, device=x.device)
    launch(
        sweep_weighted_scales, source.batch * ceil_div(source.rows, LANES) * blocks, source.tensor,
        reference_scales.lower_triangle(hessian), scales, outer, *source.args,
        EACH_MATRIX=outer.dim() == 1, EACH_BLOCK=hessian.dim() > 3, ROWS=LANES, ISA=target_of(x.device).isa,
        num_warps=1,
    )  # fmt: skip
    return scales.view(torch.float8_e4m3fn)


def _launch(
    source: Matrices, fmt: BlockFormat, data: torch.Tensor | None, scales: torch.Tensor, outer: torch.Tensor | None,
    layout: str, rule: str, each_matrix: bool,
) -> torch.Tensor | None:  # fmt: skip
    """Fill codes (if any) and scales; returns the outer scale."""
    made = outer is None and fmt.outer is not None
    if made:
        bits = matrices_amax_bits(source) if each_matrix else tensor_amax_bits(source).amax()
        outer = reference_scales.outer_of(bits.view(torch.float32), rule)
    factor = torch.ones((), device=source.tensor.device) if outer is None else outer
    block_rows = fmt.block[0]
    rows, blocks = padded_scale_shape(source.rows, ceil_div(source.cols, 16), layout)
    check_outputs(source, fmt, layout, None if data is None else (data, scales))
    tile_blocks = LANES // block_rows
    launch(
        sweep_scales, source.batch * ceil_div(rows, block_rows) * ceil_div(blocks, tile_blocks), source.tensor,
        scales if data is None else data, scales, factor, *source.args, RULE=rule, CODES=data is not None,
        EACH_MATRIX=factor.dim() == 1, SWIZZLED=layout == "swizzled", ALIGN=source.align,
        **store_aligns(source.cols, fmt), DOUBLE_WINS=reference_scales.DOUBLE_WINS[16 * block_rows],
        ROWS=block_rows, BLOCKS=tile_blocks, VECTORS=source.tensor.element_size(),
        ISA=target_of(source.tensor.device).isa, num_warps=1,
    )  # fmt: skip
    return outer


@triton.jit
def rounded_e2m1(y, ISA: tl.constexpr):
    """float32 from 0 to 6, rounded to E2M1, in float32; `elements._e2m1_gather_ptx` explains the second form."""
    if ISA == 0:
        fine = (y * 2.0 + 8388608.0 - 8388608.0) * 0.5
        middle = y + 8388608.0 - 8388608.0
        coarse = (y * 0.5 + 8388608.0 - 8388608.0) * 2.0
        return tl.where(y < 2.0, fine, tl.where(y < 4.0, middle, coarse))
    else:
        p = tl.maximum(y, 1.25)
        return tl.fma(p, 4194304.0, tl.fma(p, -4194304.0, y))


@triton.jit
def rest_of(u, scale, inverse, ISA: tl.constexpr):
    """u - q * scale of elements, where q is u * inverse rounded to E2M1."""
    return u - rounded_e2m1(tl.minimum(u * inverse, 6.0), ISA) * scale


@triton.jit
def product(a, b):
    """a * b, rounded. No compiler can fuse it into a sum: it is a fused operation already."""
    return tl.fma(a, b, 0.0)


@triton.jit
def squared_rest(u, scale, inverse, ISA: tl.constexpr):
    """(u - q * scale)^2 of elements; arguments as of `rest_of`."""
    rest = rest_of(u, scale, inverse, ISA)
    return product(rest, rest)


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
    """The squared error of blocks by a scale each, [1, BLOCKS]: `reference_scales.block_error`.

    first, second: the even and the odd elements of each row, [ROWS, BLOCKS, 8], of blocks that are ROWS high.
    """
    inverse = reciprocal_e4m3(scale, ISA)[:, :, None]
    scale = scale[:, :, None]
    squares = squared_rest(first, scale, inverse, ISA) + squared_rest(second, scale, inverse, ISA)
    of_rows = sum_neighbours(squares)
    if of_rows.shape[0] == 1:
        return of_rows
    else:
        columns = tl.trans(of_rows)
        return sum_neighbours(columns[None, :, :])


@triton.jit
def scale_value(byte):
    """Positive finite E4M3 bytes (int32) -> float32: `elements.fp8_value` without what only other bytes need."""
    return (byte << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def nearest_scale(scale, ISA: tl.constexpr):
    """float32 -> (the byte of the nearest positive E4M3 number, its value)."""
    return e4m3_round(tl.maximum(scale, E4M3_MIN), ISA)


@triton.jit
def four_or_six(first, second, top, ISA: tl.constexpr):
    """`reference_scales._four_or_six`; arguments as of `least_error`."""
    six, six_scale = nearest_scale(tl.div_rn(top, 6.0), ISA)
    four, four_scale = nearest_scale(top * 0.25, ISA)
    smaller = block_error(first, second, four_scale, ISA) < block_error(first, second, six_scale, ISA)
    return tl.where(smaller, four, six)


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


@triton.jit
def sweep_scales(
    x_ptr, data_ptr, scales_ptr, outer_ptr, rows, cols, x_batch, x_row,
    RULE: tl.constexpr, CODES: tl.constexpr, EACH_MATRIX: tl.constexpr, SWIZZLED: tl.constexpr,
    ALIGN: tl.constexpr, UNIT_ALIGN: tl.constexpr, SCALE_ALIGN: tl.constexpr, DOUBLE_WINS: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, VECTORS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store the scales of BLOCKS blocks that are ROWS high, side by side. x: [batch, rows, cols], as `quantize_rows`.

    CODES: store the codes too. outer_ptr: the outer scale or (EACH_MATRIX) that of each matrix.
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
    if RULE == "mse":
        byte = least_error(u_first, u_second, top, DOUBLE_WINS, ISA)
    else:
        byte = four_or_six(u_first, u_second, top, ISA)
    byte = tl.where(finite, byte, 0x7F)

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


# ---------------------------------------------------------------- errors that a Hessian weighs


@triton.jit
def load_lower(ptr, mask, elements):
    """The lower triangle L of `reference_scales`, row by row, as a tuple of 136 tensors.

    ptr, mask: of triangles as `reference_scales.lower_triangle` gives them. elements: the 16 elements of each block.
    The signs of two elements are moved into the entry by which they are multiplied: rounding is the same for both.
    """
    entries = ()
    for i in tl.static_range(0, 136, 2):  # pairs, because Triton needs long for kernels with many loads
        pair = tl.load(ptr.to(tl.pointer_type(tl.int64), bitcast=True) + i // 2, mask=mask, other=0)
        entries = entries + unpack(pair, tl.float32)
    lower = ()
    for i in tl.static_range(16):
        for j in tl.static_range(i + 1):
            entry = entries[i * (i + 1) // 2 + j]
            if j < i:
                entry = tl.where((elements[i] < 0) != (elements[j] < 0), -entry, entry)
            lower = lower + (entry,)
    return lower


@triton.jit
def weighted_error(u, lower, scale, inverse, ISA: tl.constexpr):
    """The weighted errors of magnitudes u, a tuple of 16 tensors, by a scale each. lower: as `load_lower` gives it."""
    rests = ()
    terms = ()
    for i in tl.static_range(16):
        rests = rests + (rest_of(u[i], scale, inverse, ISA),)
        weighted = product(lower[i * (i + 1) // 2], rests[0])
        for j in tl.static_range(1, i + 1):
            weighted = weighted + product(lower[i * (i + 1) // 2 + j], rests[j])
        terms = terms + (product(weighted, rests[i]),)
    return sum_of(terms)


@triton.jit
def sum_of(terms):
    """The pairwise sum of a tuple of tensors, neighbours first."""
    if len(terms) == 1:
        return terms[0]
    else:
        sums = ()
        for i in tl.static_range(0, len(terms), 2):
            sums = sums + (terms[i] + terms[i + 1],)
        return sum_of(sums)


@triton.jit
def sweep_weighted_scales(
    x_ptr, lower_ptr, scales_ptr, outer_ptr, rows, cols, x_batch, x_row,
    EACH_MATRIX: tl.constexpr, EACH_BLOCK: tl.constexpr, ROWS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store the scale bytes of ROWS blocks below each other. x, EACH_MATRIX: as in `sweep_scales`.

    lower_ptr: [cols / 16, 136] or (EACH_BLOCK) [batch, rows, cols / 16, 136].
    """
    blocks = tl.cdiv(cols, 16)
    block = tl.program_id(0) % blocks
    row_tiles = tl.cdiv(rows, ROWS)
    batch = tl.program_id(0) // blocks // row_tiles
    row = tl.program_id(0) // blocks % row_tiles * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = (batch.to(tl.int64) * rows + row) * blocks + block
    factor = encode_scale(tl.load(outer_ptr + batch) if EACH_MATRIX else tl.load(outer_ptr), ISA)

    ptr = x_ptr + batch.to(tl.int64) * x_batch + row.to(tl.int64) * x_row + block * 16
    cols_left = tl.where(inside, cols - block * 16, 0)
    elements = ()
    u = ()
    finite = inside
    for i in tl.static_range(16):
        element = tl.load(ptr + i, mask=i < cols_left, other=0.0).to(tl.float32)
        magnitude = tl.abs(element) * factor
        finite = finite & (tl.abs(element) < float("inf")) & (magnitude == magnitude)
        elements = elements + (element,)
        u = u + (tl.minimum(magnitude, U_MAX),)
    lower = load_lower(lower_ptr + (place if EACH_BLOCK else place * 0 + block) * 136, inside, elements)

    best = tl.full((ROWS,), float("inf"), tl.float32)
    winner = tl.full((ROWS,), 0x7F, tl.int32)
    for i in range(CANDIDATES):
        byte = tl.full((ROWS,), 1, tl.int32) + i
        scale = scale_value(byte)
        error = weighted_error(u, lower, scale, reciprocal_e4m3(scale, ISA), ISA)
        winner = tl.where(error < best, byte, winner)
        best = tl.where(error < best, error, best)
    tl.store(scales_ptr + place, tl.where(finite, winner, 0x7F).to(tl.uint8), mask=inside)
