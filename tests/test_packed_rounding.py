"""The rounding of `templates.packed_rounding` (products rounded to fp16 first) against the reference, exhaustively.

The instructions are played in NumPy: every bfloat16 times every factor that a block scale can make.
"""

import numpy as np
import pytest
import torch

from fp4compile import reference
from fp4compile.templates import codec, packed_rounding

EVERY = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
E4M3_SCALES = range(8, 128)  # from 2^-6 on, where the contract clamps; the last one is NaN


def packed_codes(x, factor):
    """What `_packed_round_ptx` and the gathering of its bytes make of x times a `packed_factor`."""
    product = (x * factor).astype(np.float32)
    # fma(x, factor, 0): -0.0 becomes 0.0, and what underflows keeps its sign.
    product = np.where(product == 0, np.where((x < 0) & ~np.isnan(factor), np.float32(-0.0), np.float32(0)), product)
    y = product.astype(np.float16)
    six, least = np.float16(6 * 2.0**-14), np.float16(1.25 * 2.0**-14)
    m = np.fmin(np.abs(y), six)
    p = np.maximum(m, least)
    h = (p.astype(np.float64) * -512 + m).astype(np.float16)
    h = (p.astype(np.float64) * 512 + h).astype(np.float16).view(np.uint16)
    assert not (h & ~np.uint16(0x0E00)).any()
    return (h >> 9) | (np.signbit(y) & ~np.isnan(y)) * 8


def expected_codes(x, factor):
    negative = torch.from_numpy((x < 0) & ~np.isnan(factor))
    return reference.e2m1_encode(torch.from_numpy(x * factor), negative).numpy()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_with_reciprocals_of_e4m3_scales():
    for byte in E4M3_SCALES:
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()[0]
        factor = np.float32(1) / scale
        above = packed_rounding._PACKED_SCALE_ABOVE if byte & 7 == 7 else packed_rounding._PACKED_SCALE
        packed = packed_codes(EVERY, factor * np.float32(above.value))
        np.testing.assert_array_equal(packed, expected_codes(EVERY, factor))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_with_powers_of_two():
    for byte in range(256):
        factor = np.float32(2.0 ** (127 - byte) if byte < 254 else 2.0**-127 if byte == 254 else 2.0**-128)
        packed = packed_codes(EVERY, factor * np.float32(packed_rounding._PACKED_SCALE.value))
        np.testing.assert_array_equal(packed, expected_codes(EVERY, factor))


def test_a_sixth_of_a_bfloat16_rounds_like_the_quotient():
    amax = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = [
        torch.clamp(scale, 2.0**-6, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        for scale in (amax / 6, amax * codec.SIXTH.value)
    ]
    assert torch.equal(*codes)
