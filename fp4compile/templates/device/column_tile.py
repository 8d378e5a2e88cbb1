"""Column tiles: tiles for operations down the columns, in which each thread holds whole blocks of its columns.

The tile has ROW_TILES blocks of BLOCK rows. It is a tuple of BLOCK tensors [ROW_TILES, WORDS]: tensor i has row i of
every block, as words (a word is a pair of columns). So operations down a block of a column (maxima, the Hadamard
transform, packing) combine tensors of the tuple, and stay in the registers of a thread.
"""

import triton
import triton.language as tl

from fp4compile.formats import reference
from fp4compile.templates.device.elements import magnitude_bits, max_words, unpack
from fp4compile.templates.device.memory import load_words

HADAMARD_SIGNS = tl.constexpr(reference.HADAMARD_SIGNS)


@triton.jit
def load_column_tile(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a tile whose rows begin at row0 and `ptr`: a tuple of BLOCK tensors [ROW_TILES, WORDS].

    Zero beyond `rows` rows and `cols` elements. ALIGN: as in `load_words`. WHOLE: the whole tile exists, so nothing
    needs a mask.
    """
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    word = tl.arange(0, WORDS)[None, :]
    x_row = tl.full((), 0, tl.int64) + x_row  # Triton passes a stride of 1 as a constant
    tile = ()
    if ALIGN > 0:
        # `load_words` with a pointer that advances row by row.
        word_type: tl.constexpr = tl.int32 if dtype.primitive_bitwidth == 16 else tl.int64
        stride = x_row // (2 * ALIGN) * ALIGN
        word_ptr = ptr.to(tl.pointer_type(word_type), bitcast=True) + row * stride + word
        inside = word // ALIGN < cols // 2 // ALIGN
        for i in tl.static_range(BLOCK):
            if WHOLE:
                tile = tile + (tl.load(word_ptr),)
            else:
                tile = tile + (tl.load(word_ptr, mask=(row < rows - i) & inside, other=0),)
            word_ptr += stride
    else:
        for i in tl.static_range(BLOCK):
            tile = tile + (load_words(ptr + (row + i) * x_row, word, cols, row < rows - i, dtype, ALIGN),)
    return tile


@triton.jit
def unpack_column_tile(tile, dtype: tl.constexpr):
    """A tuple of rows of words -> (a tuple of rows of even columns, a tuple of rows of odd columns), in float32."""
    first = ()
    second = ()
    for i in tl.static_range(len(tile)):
        even, odd = unpack(tile[i], dtype)
        first = first + (even,)
        second = second + (odd,)
    return first, second


@triton.jit
def transform_column_tile(tile, dtype: tl.constexpr):
    """Unpack and Hadamard-transform a tile: (even columns, odd columns, amax bits of even blocks, of odd blocks)."""
    first, second = unpack_column_tile(tile, dtype)
    first = hadamard(first)
    second = hadamard(second)
    return first, second, values_amax(first), values_amax(second)


@triton.jit
def hadamard(values):
    """`reference.hadamard` along a tuple of 16 float32 tensors.

    The quarters are written as fused multiply-adds, so that the compiler does not fuse them into the sums: that would
    save a rounding, and change bits, where a quarter is not exact.
    """
    quarters = ()
    for i in tl.static_range(16):
        quarters = quarters + (tl.fma(values[i], -0.25 if (HADAMARD_SIGNS >> i) & 1 else 0.25, 0.0),)
    return _butterflies(_butterflies(_butterflies(_butterflies(quarters, 1), 2), 4), 8)


@triton.jit
def _butterflies(values, DISTANCE: tl.constexpr):
    """Sums and differences of the pairs at a distance DISTANCE among 16 values: one stage of the transform."""
    out = ()
    for i in tl.static_range(16):
        if i & DISTANCE:
            out = out + (values[i & ~DISTANCE] - values[i],)
        else:
            out = out + (values[i] + values[i | DISTANCE],)
    return out


@triton.jit
def values_amax(values):
    """Bits (int32) of the largest magnitudes along a tuple of float32 tensors, NaN above infinity."""
    amax = tl.abs(values[0])
    for i in tl.static_range(1, len(values)):
        amax = tl.maximum(amax, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
    return magnitude_bits(amax)


@triton.jit
def column_tile_amax(tile, ISA: tl.constexpr, dtype: tl.constexpr):
    """(amax bits of the even columns, amax bits of the odd columns), one for each block: [ROW_TILES, WORDS] each."""
    if ISA == 0 or dtype == tl.float32:
        first, second = unpack_column_tile(tile, dtype)
        return values_amax(first), values_amax(second)
    else:
        words = tile[0]
        for i in tl.static_range(1, len(tile)):
            words = max_words(words, tile[i], dtype)
        first, second = unpack(words, dtype)
        return magnitude_bits(first), magnitude_bits(second)
