"""E2M1 and FP8 elements of the reference against their definitions: rounding, decoding, packing."""

import math

import pytest
import torch

from fp4compile.formats import reference
from tests.helpers.codes import as_bytes
from tests.helpers.number_formats import E2M1, E2M1_THRESHOLDS, E4M3, E5M2, around, every_bf16, nearest_even


def e2m1_samples() -> torch.Tensor:
    bf16 = every_bf16()
    return torch.cat(
        (around(E2M1_THRESHOLDS), around(E2M1[1:-1]), bf16[bf16.abs() <= 6], torch.tensor([0.0, 6.0, -6.0]))
    )


def test_e2m1_rounds_to_nearest_even():
    y = e2m1_samples()
    expected = [nearest_even(abs(v), E2M1) + 8 * (v < 0) for v in y.tolist()]
    assert set(expected) == set(range(16))
    assert reference.e2m1_encode(y, y < 0).tolist() == expected


def test_e2m1_rounding_by_magic_constants():
    """Adding 2^22, 2^23 + 2 or 2^24 + 8 leaves the code in the low three bits: what kernels use."""
    mag = e2m1_samples().abs()
    magic = torch.where(mag < 2, 2.0**22, torch.where(mag < 4, 2.0**23 + 2, 2.0**24 + 8))
    codes = (mag + magic).view(torch.int32) & 7
    assert torch.equal(codes.to(torch.uint8), reference.e2m1_encode(mag, mag < 0))


def test_e2m1_sign_and_nan():
    y = torch.tensor([0.0, -0.0, 0.1, -0.1, -0.0, math.nan, -math.nan])
    negative = torch.tensor([False, False, False, True, True, False, True])
    assert reference.e2m1_encode(y, negative).tolist() == [0, 0, 0, 8, 8, 7, 7]


def test_e2m1_decode():
    values = reference.e2m1_decode(torch.arange(16, dtype=torch.uint8))
    assert values.dtype == torch.float32
    assert values.tolist() == [*E2M1, *(-v for v in E2M1)]
    assert values[8].signbit()


def test_packing_puts_the_even_element_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert reference.pack(codes).tolist() == [[0x21, 0x0F]]
    assert reference.unpack(reference.pack(codes)).tolist() == codes.tolist()


@pytest.mark.parametrize("shape", [(256,), (4, 64), (2, 0, 4), (0,)])
def test_e2m1_unpack_every_byte(shape):
    data = torch.arange(torch.Size(shape).numel()).to(torch.uint8).reshape(shape)
    values = reference.e2m1_unpack(data)
    grid = [*E2M1, *(-v for v in E2M1)]
    assert values.shape == (*shape[:-1], 2 * shape[-1])
    assert values.flatten().tolist() == [grid[n] for byte in data.flatten().tolist() for n in (byte % 16, byte // 16)]


@pytest.mark.parametrize("dtype, grid", [(torch.float8_e4m3fn, E4M3), (torch.float8_e5m2, E5M2)])
def test_fp8_rounds_to_nearest_even_and_saturates(dtype, grid):
    halves = [(a + b) / 2 for a, b in zip(grid, grid[1:], strict=False)]
    y = torch.cat((around(grid[1:] + halves, 2), every_bf16(), torch.tensor([math.inf, -math.inf])))
    expected = [nearest_even(abs(v), grid) | (math.copysign(1, v) < 0) << 7 for v in y.tolist()]
    assert as_bytes(reference.saturate(y, dtype)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_nan_has_one_code(dtype):
    assert as_bytes(reference.saturate(torch.tensor([math.nan, -math.nan]), dtype)).tolist() == [0x7F, 0x7F]
