"""Blocks of a tile of words -> scale bytes and codes, for quantisers of rows and epilogues that quantise."""

import triton
import triton.language as tl

from fp4compile.templates.device.block_scales import block_scale
from fp4compile.templates.device.elements import encode_pair, infinity_to_nan, round_pair, rounding_scale, unpack


@triton.jit
def scale_and_encode(
    words, amax, encode, decode, HAS_OUTER: tl.constexpr, ELEMENT: tl.constexpr, SCALE: tl.constexpr,
    CONTRACT: tl.constexpr, STATIC: tl.constexpr, VALUES: tl.constexpr, dtype: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """(scale bytes of blocks, a pair of codes or dequantised values for each word [ROWS, BLOCKS * BLOCK / 2]).

    VALUES: for elements with E4M3 scales, return dequantised values. All others: as in `encode_and_store_codes`.
    """
    byte, factor = block_scale(amax, encode, decode, HAS_OUTER, ELEMENT, SCALE, CONTRACT, ISA)
    factor = tl.broadcast_to(factor[:, :, None], words.shape)
    first, second = unpack(words, dtype)
    if SCALE == "none" and STATIC:  # saturation would hide an infinity, and no scale is infinite
        first = infinity_to_nan(first)
        second = infinity_to_nan(second)
    if VALUES and SCALE == "e4m3":
        scale = rounding_scale(byte, ISA)
        units = round_pair(first, second, factor, tl.broadcast_to(scale[:, :, None], words.shape), ISA)
    else:
        units = encode_pair(first, second, factor, ELEMENT, ISA)
    return byte, tl.reshape(units, (words.shape[0], words.shape[1] * words.shape[2]))
