"""A tile read for work down its columns: tile of BLOCK rows, whose rows are tensors of their own.

The rows of a strip are a tuple of BLOCK tensors [ROW_TILES, WORDS] of words, so that a thread holds whole blocks of its
columns: what runs down a column (maxima, the Hadamard transform, packing) stays in its registers by construction.
"""

import triton
import triton.language as tl

from fp4compile import reference
from fp4compile.templates.device.elements import magnitude_bits, max_words, unpack
from fp4compile.templates.device.memory import load_words

HADAMARD_SIGNS = tl.constexpr(reference.HADAMARD_SIGNS)


@triton.jit
def load_column_tile(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The words of the rows from row0 on, each from `ptr` on; zero beyond `rows` rows and `cols` elements."""
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    word = tl.arange(0, WORDS)[None, :]
    x_row = tl.full((), 0, tl.int64) + x_row  # a plain number where it is 1
    tile = ()
    if ALIGN > 0:
        # As `load_words`; a pointer walks down the rows.
        word_type: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 16 else tl.int64
        stride = x_row // (2 * ALIGN) * ALIGN
        word_ptr = ptr.to(tl.pointer_type(word_type), bitcast=True) + row * stride + word
        inside = word // ALIGN < cols // 2 // ALIGN
        for i in tl.static_range(BLOCK):
            tile = tile + (tl.load(word_ptr, mask=(row < rows - i) & inside, other=0),)
            word_ptr += stride
    else:
        for i in tl.static_range(BLOCK):
            tile = tile + (load_words(ptr + (row + i) * x_row, word, cols, row < rows - i, dtype, ALIGN),)
    return tile


@triton.jit
def unpack_column_tile(tile, dtype: tl.constexpr):
    """Rows of words -> rows of the even and rows of the odd columns, in float32."""
    first = ()
    second = ()
    for i in tl.static_range(len(tile)):
        even, odd = unpack(tile[i], dtype)
        first = first + (even,)
        second = second + (odd,)
    return first, second


@triton.jit
def hadamard(values):
    """`reference.hadamard` of 16 float32 tensors: along the tuple.

    The fused form keeps the compiler from fusing the quarters into the sums, which would save a rounding where a
    quarter is not exact.
    """
    quarters = ()
    for i in tl.static_range(16):
        quarters = quarters + (tl.fma(values[i], -0.25 if (HADAMARD_SIGNS >> i) & 1 else 0.25, 0.0),)
    return _butterflies(_butterflies(_butterflies(_butterflies(quarters, 1), 2), 4), 8)


@triton.jit
def _butterflies(values, DISTANCE: tl.constexpr):
    """Sums and differences of 16 values that lie DISTANCE apart."""
    out = ()
    for i in tl.static_range(16):
        if i & DISTANCE:
            out = out + (values[i & ~DISTANCE] - values[i],)
        else:
            out = out + (values[i] + values[i | DISTANCE],)
    return out


@triton.jit
def values_amax(values):
    """Bits of the largest magnitudes along a tuple of float32 tensors; a NaN lies above infinity."""
    amax = tl.abs(values[0])
    for i in tl.static_range(1, len(values)):
        amax = tl.maximum(amax, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
    return magnitude_bits(amax)


@triton.jit
def column_tile_amax(tile, ISA: tl.constexpr, dtype: tl.constexpr):
    """Bits of the largest magnitudes of the even and of the odd columns, along a tuple of words."""
    if ISA == 0 or dtype == tl.float32:
        first, second = unpack_column_tile(tile, dtype)
        return values_amax(first), values_amax(second)
    else:
        words = tile[0]
        for i in tl.static_range(1, len(tile)):
            words = max_words(words, tile[i], dtype)
        first, second = unpack(words, dtype)
        return magnitude_bits(first), magnitude_bits(second)
