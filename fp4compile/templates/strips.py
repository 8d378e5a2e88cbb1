"""A tile read for work down its columns: strips of BLOCK rows, whose rows are tensors of their own.

The rows of a strip are a tuple of BLOCK tensors [STRIPS, WORDS] of words, so that a thread holds whole blocks of its
columns: what runs down a column (maxima, the Hadamard transform, packing) stays in its registers by construction.
"""

import triton
import triton.language as tl

from fp4compile import reference
from fp4compile.templates.codec import magnitude_bits, max_words, unpack
from fp4compile.templates.quantize_rows import load_words

HADAMARD_SIGNS = tl.constexpr(reference.HADAMARD_SIGNS)


@triton.jit
def load_strips(
    ptr, row0, rows, cols, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, STRIPS: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """The words of the rows from row0 on, each from `ptr` on; zero beyond `rows` rows and `cols` elements."""
    row = row0 + tl.arange(0, STRIPS)[:, None] * BLOCK
    word = tl.arange(0, WORDS)[None, :]
    stride = tl.full((), 0, tl.int64) + x_row  # a plain number where it is 1
    strip_ptr = ptr + row.to(tl.int64) * x_row
    strips = ()
    for i in tl.static_range(BLOCK):
        row_ptr = strip_ptr + i * stride
        strips = strips + (load_words(row_ptr, word, cols, row + i < rows, dtype, ALIGN),)
    return strips


@triton.jit
def unpack_strips(strips, dtype: tl.constexpr):
    """Rows of words -> rows of the even and rows of the odd columns, in float32."""
    first = ()
    second = ()
    for i in tl.static_range(len(strips)):
        even, odd = unpack(strips[i], dtype)
        first = first + (even,)
        second = second + (odd,)
    return first, second


@triton.jit
def hadamard(values):
    """`reference.hadamard` of 16 float32 tensors: along the tuple."""
    signed = ()
    for i in tl.static_range(16):
        if (HADAMARD_SIGNS >> i) & 1:
            signed = signed + (-values[i],)
        else:
            signed = signed + (values[i],)
    values = _butterflies(_butterflies(_butterflies(_butterflies(signed, 1), 2), 4), 8)
    scaled = ()
    for i in tl.static_range(16):
        scaled = scaled + (values[i] * 0.25,)
    return scaled


@triton.jit
def _butterflies(values, DISTANCE: tl.constexpr):
    out = ()
    for i in tl.static_range(16):
        if i & DISTANCE:
            out = out + (values[i - DISTANCE] - values[i],)
        else:
            out = out + (values[i] + values[i + DISTANCE],)
    return out


@triton.jit
def values_amax(values):
    """Bits of the largest magnitudes along a tuple of float32 tensors; a NaN lies above infinity."""
    amax = tl.abs(values[0])
    for i in tl.static_range(1, len(values)):
        amax = tl.maximum(amax, tl.abs(values[i]), propagate_nan=tl.PropagateNan.ALL)
    return magnitude_bits(amax)


@triton.jit
def strips_amax(strips, ISA: tl.constexpr, dtype: tl.constexpr):
    """Bits of the largest magnitudes of the even and of the odd columns, along a tuple of words."""
    if ISA == 0 or dtype == tl.float32:
        first, second = unpack_strips(strips, dtype)
        return values_amax(first), values_amax(second)
    else:
        words = strips[0]
        for i in tl.static_range(1, len(strips)):
            words = max_words(words, strips[i], dtype)
        first, second = unpack(words, dtype)
        return magnitude_bits(first), magnitude_bits(second)
