"""E8M0 scales and MX tensors of the reference against exact arithmetic and literal bytes.

`test_reference_torchao` compares with torchao; here are the places too where torchao is off the contract.
"""

import math

import pytest
import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.functional import quantize
from tests.helpers.codes import as_bytes, codes_of
from tests.helpers.hard_inputs import hard_input
from tests.helpers.number_formats import E2M1, E4M3, E5M2, F32, MODES, MX_ELEMENTS, around, nearest_even


def e8m0_by_the_contract(amax: float, element: str, mode: str) -> int:
    """The scale byte of a finite block amax, from exact logarithms."""
    top, emax, mbits = MX_ELEMENTS[element]
    if mode == "rceil":
        amax = float(F32(amax) * (F32(1) / F32(top)))
    if amax == 0:
        return 0
    significand, exponent = math.frexp(amax)  # amax = significand * 2^exponent, significand in [0.5, 1)
    log2 = exponent - 1
    if mode == "ceil" or mode == "rceil":
        log2 += significand > 0.5
    if mode == "even":  # rounding to mbits + 1 significant bits, half away from zero, reaches the next power of two
        log2 += significand >= 1 - 0.5 ** (mbits + 2)
    return min(max(log2 - (0 if mode == "rceil" else emax), -127), 128) + 127


def amax_samples(top: float) -> torch.Tensor:
    exponents = torch.arange(-126, 128).double()
    significands = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375, 1.25]).double()
    points = (significands[:, None] * torch.exp2(exponents)).flatten().float()
    x = around(points.tolist(), 2)
    subnormal = torch.tensor([0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF], dtype=torch.int32).view(torch.float32)
    # The product with 1 / top is subnormal, at and around half the smallest normal number.
    edge = around([top * 2.0**-127, top * 2.0**-126], 8)
    x = torch.cat((x, subnormal, edge, torch.tensor([3.4028234663852886e38])))
    return x[x.isfinite()].abs()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_e8m0_scale_of_every_boundary(element, mode):
    amax = amax_samples(MX_ELEMENTS[element][0])
    expected = [e8m0_by_the_contract(v, element, mode) for v in amax.tolist()]
    assert reference.e8m0_scale(amax, element, mode).tolist() == expected


def test_e8m0_scale_literals():
    def scales(values, element, mode):
        return reference.e8m0_scale(torch.tensor(values), element, mode).tolist()

    past448 = torch.tensor(448.0).nextafter(torch.tensor(449.0)).item()
    assert scales([448.0, past448, 449.0, 224.0, 1.0, 0.0], "e4m3", "rceil") == [127, 128, 128, 126, 119, 0]
    assert scales([256.0, 448.0, 511.0, 512.0, 0.0], "e4m3", "floor") == [127, 127, 127, 128, 0]
    assert scales([256.0, 257.0, 512.0, 0.0], "e4m3", "ceil") == [127, 128, 128, 0]
    assert scales([495.0, 496.0, 512.0], "e4m3", "even") == [127, 128, 128]
    assert scales([4.0, 6.0, 7.0, 8.0], "e2m1", "even") == [127, 127, 128, 128]
    assert scales([6.0, 6.1, 3.0, 12.0], "e2m1", "rceil") == [127, 128, 126, 128]
    assert scales([57344.0, 57345.0], "e5m2", "rceil") == [127, 128]
    for mode in MODES:
        assert scales([math.inf, math.nan], "e4m3", mode) == [255, 255]


def test_e8m0_decode_of_every_byte():
    decoded = reference.e8m0_decode(torch.arange(256).to(torch.uint8))
    assert decoded[:255].double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert decoded[255].isnan()


def mx_by_the_contract(x: torch.Tensor, element: str, mode: str) -> tuple[list, list]:
    """Scale bytes and codes of [R, 32 n] finite float32, exactly."""
    grid = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}[element]
    sign = 8 if element == "e2m1" else 128
    scales, codes = [], []
    for block in x.reshape(-1, 32).tolist():
        byte = e8m0_by_the_contract(max(map(abs, block)), element, mode)
        scales.append(byte)
        for v in block:
            y = float(F32(v) * F32(2.0 ** (127 - byte)))  # powers of two: the product is exact, or below any code
            negative = v < 0 if element == "e2m1" else math.copysign(1, v) < 0
            codes.append(nearest_even(abs(y), grid) + sign * negative)
    return scales, codes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
@pytest.mark.parametrize("name", ["tiny", "scale_boundary", "huge", "zeros", "signed_zeros", "ties_fp8"])
def test_mx_follows_the_contract(name, element, mode):
    x = hard_input(name, (6, 256), block=32)
    if name == "scale_boundary":  # 1 ulp past the largest element times a power of two
        top = MX_ELEMENTS[element][0] * torch.exp2(torch.arange(-24, 24).float())
        x[:, ::32] = top.nextafter(torch.tensor(math.inf)).view(6, 8)
    q = quantize(x, BlockFormat(element, (1, 32), "e8m0", None, mode))
    scales, codes = mx_by_the_contract(x, element, mode)
    assert as_bytes(q.scales).flatten().tolist() == scales
    assert codes_of(q.data).flatten().tolist() == codes


def test_mx_literals():
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([448.0, -1.0, 17.0, -(2.0**-10), -0.0])
    q = quantize(x, "mxfp8")
    assert as_bytes(q.scales).tolist() == [[127]]
    assert as_bytes(q.data)[0, :6].tolist() == [0x7E, 0xB8, 0x58, 0x80, 0x80, 0x00]
    q = quantize(x * 2.0**-140, "mxfp8")  # the scale stops at 2^-127: 448 * 2^-13 = 1.75 * 2^-5, 17 * 2^-13 > 2^-9
    assert as_bytes(q.scales).tolist() == [[0]]
    assert as_bytes(q.data)[0, :3].tolist() == [0x16, 0x80, 0x01]
    x[0, 0] = 6.0
    q = quantize(x.clamp(-6, 6), "mxfp4")
    assert as_bytes(q.scales).tolist() == [[127]]
    assert q.data[0, :3].tolist() == [0xA7, 0x87, 0x00]


def test_mx_non_finite_literals():
    x = torch.ones(3, 32)
    x[0, 3], x[1, 3], x[2, 3] = math.inf, -math.inf, math.nan
    for name, codes in (("mxfp8", [0x7E, 0xFE, 0x7F]), ("mxfp8_e5m2", [0x7B, 0xFB, 0x7F]), ("mxfp4", [7, 15, 7])):
        q = quantize(x, name)
        assert as_bytes(q.scales).tolist() == [[255]] * 3
        assert codes_of(q.data)[:, 3].tolist() == codes
        assert (codes_of(q.data)[:, 4:] == 0).all()  # 2^-128


@pytest.mark.parametrize(("name", "first"), [("mxfp8", 63488), ("mxfp8_e5m2", 61440), ("mxfp4", 57344)])
def test_the_largest_float16_numbers_are_infinite_when_they_are_dequantised_to_float16(name, first):
    """From `first` on the nearest element times its scale is 65536, which float16 lacks; bf16 and float32 have it."""
    for value in (first, 65504):
        q = quantize(torch.tensor([[value]]).half(), name)
        assert q.dequantize(torch.float16).item() == math.inf
        assert q.dequantize(torch.float32).item() == q.dequantize(torch.bfloat16).item() == 65536
    assert quantize(torch.tensor([[first - 32.0]]).half(), name).dequantize(torch.float16).isfinite()
