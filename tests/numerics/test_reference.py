"""The reference against scalar loops over the written contract, and literal bytes; see also test_reference_torchao."""

import math
from bisect import bisect_left

import numpy as np
import pytest
import torch

from fp4compile import reference
from fp4compile.formats import NAMED, BlockFormat, get
from fp4compile.functional import quantize
from tests.helpers.codes import as_bytes, codes_of
from tests.helpers.hard_inputs import DTYPES, FINITE, NAMES, TINY_AMAXES, TINY_OUTERS, hard_input, of_amax

F32 = np.float32
FLT_MAX = F32(np.finfo(F32).max)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
MODES = ("floor", "ceil", "even", "rceil")
MX_ELEMENTS = {"e4m3": (448.0, 8, 3), "e5m2": (57344.0, 15, 2), "e2m1": (6.0, 2, 1)}  # max, emax, mbits
UNNAMED = [
    BlockFormat("e2m1", (1, 16), "e4m3", None, "te"),
    BlockFormat("e2m1", (16, 16), "e4m3", None, "te"),
    *(BlockFormat(e, (1, 32), "e8m0", None, mode) for e in ("e5m2", "e2m1") for mode in ("floor", "ceil", "even")),
    *(BlockFormat(e, (32, 32), "e8m0", None, "floor") for e in MX_ELEMENTS),
]
EVERY_FORMAT = [*NAMED.values(), *(fmt for fmt in UNNAMED if fmt.name == fmt.spec)]


def fp8_grid(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """Finite non-negative values by byte, from the definition of the format."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for byte in range(128):
        e, m = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if exponent_bits == 5 and e == 31 or exponent_bits == 4 and byte == 127:
            break  # infinities and NaN
        fraction = m / 2**mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))
    return values


E4M3, E5M2 = fp8_grid(4, 3), fp8_grid(5, 2)


def nearest_even(value: float, grid) -> int:
    """Index of the nearest number of an ascending grid, ties to the even index, saturating. Exact in float64."""
    high = bisect_left(grid, value)
    if high == 0 or high == len(grid):
        return min(high, len(grid) - 1)
    below, above = value - grid[high - 1], grid[high] - value
    return high if above < below or (above == below and high % 2 == 0) else high - 1


def around(points, ulps: int = 40) -> torch.Tensor:
    """Every float32 within some ulps of positive points, both signs."""
    bits = torch.tensor(points, dtype=torch.float32).view(torch.int32)
    near = (bits[:, None] + torch.arange(-ulps, ulps + 1)).to(torch.int32).flatten().view(torch.float32)
    return torch.cat((near, -near))


def every_bf16() -> torch.Tensor:
    """Every finite bfloat16, as float32."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    return x[x.isfinite()]


# ---------------------------------------------------------------- elements


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


def test_e2m1_rounds_by_the_thresholds_of_the_contract():
    ties = torch.tensor(E2M1_THRESHOLDS)
    below, above = ties.nextafter(torch.tensor(0.0)), ties.nextafter(torch.tensor(9.0))
    never = torch.zeros(7, dtype=torch.bool)
    assert reference.e2m1_encode(below, never).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert reference.e2m1_encode(ties, never).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert reference.e2m1_encode(above, never).tolist() == [1, 2, 3, 4, 5, 6, 7]


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


# ---------------------------------------------------------------- E8M0 scales


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


# ---------------------------------------------------------------- MX where torchao is off the contract


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


# ---------------------------------------------------------------- contract te


@np.errstate(all="ignore")
def te_by_the_contract(x: np.ndarray, outer: str | None, block: tuple[int, int], static: float | None = None):
    """Codes [R][K], scale bytes {(block row, block): byte}, dequantised values: a scalar loop over the formulas.

    static: a given decode factor, in place of 1 / senc.
    """
    rows, cols = x.shape

    def encode_scale(values):
        amax = max((abs(v) for v in values.flatten()), default=F32(0))
        if np.isnan(values).any():
            return F32(np.nan)
        senc = min(F32(2688) / amax, FLT_MAX) if amax != 0 else F32(1)
        return F32(1) if senc == 0 else senc

    whole = encode_scale(x) if outer == "tensor" else F32(1)
    codes = np.zeros((rows, cols), dtype=int)
    values = np.zeros((rows, cols), dtype=F32)
    scales = {}
    for r in range(0, rows, block[0]):
        senc = encode_scale(x[r]) if outer == "row" else whole
        dec = F32(1) / senc
        if static is not None:
            senc, dec = min(F32(1) / F32(static), FLT_MAX), F32(static)
        for c in range(0, cols, block[1]):
            tile = x[r : r + block[0], c : c + block[1]]
            finite = np.isfinite(tile).all()
            byte = 0x7F
            if finite and not np.isnan(senc):
                bamax = max(abs(v) for v in tile.flatten())
                scale = min(bamax * (senc * (F32(1) / F32(6))), FLT_MAX)
                byte = nearest_even(float(min(scale, F32(448))), E4M3)
            scales[r // block[0], c // block[1]] = byte
            s = F32(E4M3[byte]) if byte != 0x7F else F32(np.nan)
            factor = min(F32(1) / (s * dec), FLT_MAX) if byte != 0x7F else F32(np.nan)
            for i in range(r, r + tile.shape[0]):
                for j in range(c, c + tile.shape[1]):
                    y = x[i, j] * factor
                    code = (
                        7
                        if np.isnan(y)
                        else sum(abs(y) > t if n % 2 == 0 else abs(y) >= t for n, t in enumerate(E2M1_THRESHOLDS))
                    )
                    negative = x[i, j] < 0 and not np.isnan(y)
                    codes[i, j] = code + 8 * negative
                    values[i, j] = F32(-E2M1[code] if negative else E2M1[code]) * s * dec
    return codes, scales, values


TE_GRANULARITIES = {
    "none": BlockFormat("e2m1", (1, 16), "e4m3", None, "te"),
    "tensor": get("nvfp4_te"),
    "row": get("nvfp4_rowwise"),
    "16x16": get("nvfp4_16x16"),
    "16x16, none": BlockFormat("e2m1", (16, 16), "e4m3", None, "te"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("granularity", TE_GRANULARITIES)
def test_te_follows_the_contract(granularity, name, dtype):
    fmt = TE_GRANULARITIES[granularity]
    x = hard_input(name, (19, 40), dtype)  # neither is a multiple of the block
    q = quantize(x, fmt)
    codes, scales, values = te_by_the_contract(x.float().numpy(), fmt.outer, fmt.block)
    got = as_bytes(q.scales)
    assert {(r, c): got[r, c].item() for r in range(got.shape[0]) for c in range(got.shape[1])} == scales
    assert codes_of(q.data)[:, :40].tolist() == codes.tolist()
    np.testing.assert_array_equal(q.dequantize().numpy(), values)


def test_te_literals():
    """Worked out by hand. Blocks of 16, given by their first elements; the rest is zero."""
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([6.0, 2.5, -0.25, -5.0])
    x[0, 16:19] = torch.tensor([0.75, 0.3125, -0.1])
    x[1, :3] = torch.tensor([3.0, -0.125, 0.0])

    def bytes_of(fmt):
        q = quantize(x, fmt)
        return as_bytes(q.scales).tolist(), q.data[:, :2].tolist(), q.data[0, 8:10].tolist(), q.outer

    # No outer scale: s = amax / 6 = 1, 0.125, 0.5 (0x38, 0x20, 0x30), nothing left to scale in an empty block.
    scales, first, second, outer = bytes_of(TE_GRANULARITIES["none"])
    assert scales == [[0x38, 0x20], [0x30, 0x00]]
    assert first == [[0x47, 0xE8], [0x87, 0x00]]  # 6 2.5 -.25 -5; 6 -.25
    assert second == [0x47, 0x0A]  # 6 2.5 -.8
    assert outer is None
    # A tensor: senc = 2688 / 6 = 448, so s is 448 times as large (0x7E = 448, 0x66 = 56, 0x76 = 224).
    scales, first, second, outer = bytes_of(TE_GRANULARITIES["tensor"])
    assert scales == [[0x7E, 0x66], [0x76, 0x00]]
    assert first == [[0x47, 0xE8], [0x87, 0x00]] and second == [0x47, 0x0A]
    assert outer.item() == F32(1) / F32(448)
    # A row: the second row's senc is 896, its scale the largest.
    scales, first, second, outer = bytes_of(TE_GRANULARITIES["row"])
    assert scales == [[0x7E, 0x66], [0x7E, 0x00]]
    assert first == [[0x47, 0xE8], [0x87, 0x00]] and second == [0x47, 0x0A]
    assert outer.flatten().tolist() == [F32(1) / F32(448), F32(1) / F32(896)]
    # 16x16: both rows share 448 and 56. The second row is 3 -.125: codes 5 and 8.
    scales, first, second, outer = bytes_of(TE_GRANULARITIES["16x16"])
    assert scales == [[0x7E, 0x66]]
    assert first == [[0x47, 0xE8], [0x85, 0x00]] and second == [0x47, 0x0A]
    assert outer.item() == F32(1) / F32(448)


def test_te_block_scale_underflow_gives_zeros():
    """No lower clamp: s is 0, every non-zero element saturates, and the represented value is 0."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 0.001, -0.001
    q = quantize(x, "nvfp4_te")
    assert as_bytes(q.scales).tolist() == [[0x7E, 0x00]]
    assert q.data[0, 8:10].tolist() == [0xF7, 0x00]
    assert q.dequantize()[0, 16:].count_nonzero() == 0


@pytest.mark.parametrize("static", [1 / 512, 0.013, 1e-5])
@pytest.mark.parametrize("granularity", ["tensor", "row", "16x16"])
def test_te_static_outer(granularity, static):
    fmt = TE_GRANULARITIES[granularity]
    x = hard_input("scaled_rows", (19, 40))
    outer = torch.full((19, 1) if fmt.outer == "row" else (), static)
    q = quantize(x, fmt, outer=outer)
    codes, scales, values = te_by_the_contract(x.numpy(), fmt.outer, fmt.block, static)
    assert as_bytes(q.scales).flatten().tolist() == list(scales.values())
    assert codes_of(q.data)[:, :40].tolist() == codes.tolist()
    np.testing.assert_array_equal(q.dequantize().numpy(), values)


# ---------------------------------------------------------------- factors at the end of float32's range


@np.errstate(all="ignore")
def torchao_by_the_contract(x: np.ndarray, static: float | None):
    """As `te_by_the_contract`, for contract torchao with a finite outer scale of the tensor."""
    p = abs(x).max() / F32(2688) if static is None else F32(static)
    p = F32(1) if p == 0 else p
    encode = min(F32(1) / p, FLT_MAX)
    codes, scales = np.zeros(x.shape, dtype=int), {}
    values = np.zeros(x.shape, dtype=F32)
    for r, row in enumerate(x):
        for c in range(0, len(row), 16):
            block = row[c : c + 16]
            scale = max(abs(block).max() / F32(6) / p, F32(2.0**-6))
            scales[r, c // 16] = byte = nearest_even(float(min(scale, F32(448))), E4M3)
            s = F32(E4M3[byte])
            factor = min(encode / s, FLT_MAX)
            for i, element in enumerate(block, c):
                code = nearest_even(float(abs(element) * factor), E2M1)
                codes[r, i] = code + 8 * (element < 0)
                values[r, i] = F32(-E2M1[code] if element < 0 else E2M1[code]) * s * p
    return codes, scales, values


@pytest.mark.parametrize("amax", TINY_AMAXES)
@pytest.mark.parametrize("format", ["nvfp4", *TE_GRANULARITIES])
def test_tiny_tensors_and_outer_scales(format, amax):
    """Factors are capped; zeros and padding have the code 0, and every value is finite."""
    fmt = TE_GRANULARITIES.get(format) or get(format)
    x = of_amax(amax, (18 if fmt.square else 5, 40))
    for static in (None, *(TINY_OUTERS if fmt.outer and amax in (1e-40, 1e-30) else ())):
        outer = None if static is None else torch.full((len(x), 1) if fmt.outer == "row" else (), static)
        q = quantize(x, fmt, outer=outer)
        if format == "nvfp4":
            codes, scales, values = torchao_by_the_contract(x.numpy(), static)
        else:
            codes, scales, values = te_by_the_contract(x.numpy(), fmt.outer, fmt.block, static)
        assert as_bytes(q.scales).flatten().tolist() == list(scales.values())
        assert codes_of(q.data)[:, :40].tolist() == codes.tolist()
        np.testing.assert_array_equal(q.dequantize().numpy(), values)
        assert not codes_of(q.data)[:, :40][x == 0].any() and not codes_of(q.data)[:, 40:].any()
        assert q.dequantize().isfinite().all()


@pytest.mark.parametrize("static", TINY_OUTERS)
def test_a_tiny_outer_scale_of_float8_rowwise(static):
    x = of_amax(1e-40, (6, 40))
    q = quantize(x, "float8_rowwise", outer=torch.full((6, 1), static))
    assert not codes_of(q.data)[x == 0].bitwise_and(0x7F).any()
    largest = min(1 / torch.tensor(static), torch.tensor(float(FLT_MAX)))
    assert torch.equal(q.data, (x * largest).clamp(-448, 448).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", ["nvfp4", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16", "float8_rowwise"])
def test_tiny_tensors_hide_no_nan(format, value):
    fmt = get(format)
    x = of_amax(1e-40, (18, 40))
    x[3, 20] = value
    for static in (None, *TINY_OUTERS):
        outer = None if static is None else torch.full((18, 1) if fmt.outer == "row" else (), static)
        assert not quantize(x, fmt, outer=outer).dequantize()[3, 20].isfinite()


# ---------------------------------------------------------------- the Hadamard transform


def exact_hadamard(x: torch.Tensor) -> torch.Tensor:
    """diag(signs) H16 / 4 times groups of 16, in float64."""
    signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
    matrix = [[s * (-1) ** (i & j).bit_count() for j in range(16)] for i, s in enumerate(signs)]
    return (x.double().unflatten(-1, (-1, 16)) @ torch.tensor(matrix).double()).flatten(-2) * 0.25


@pytest.mark.parametrize("largest", [1e37, 2.1e37, 2.2e37, 8e37, 8.5e37])
def test_the_hadamard_transform_overflows_only_where_the_result_does(largest):
    """Of 16 values one result may be four times as large as they are, and the sum without the quarter 16 times."""
    rows = exact_hadamard(torch.eye(16)).sign().mT[[0, 5, 15]] * torch.tensor(largest)
    one = torch.zeros(1, 16)
    one[0, 7] = 4 * largest
    x = torch.cat((rows, one)).float()
    got, expected = reference.hadamard(x), exact_hadamard(x)
    assert expected.abs().max() > 3.9 * largest
    assert torch.equal(got, expected.float())  # sums of powers of two times one number are exact
    q = quantize(x, "nvfp4_te")
    assert q.dequantize().isfinite().all()


def test_the_quarter_of_the_hadamard_transform_is_rounded_first():
    """2^-149 has no quarter. 3 * 2^-149 rounds to 2^-149; taken last, the quarter of sixteen would be 12 * 2^-149."""
    signs = exact_hadamard(torch.eye(16)).sign().mT[0].float()
    least = torch.tensor(1, dtype=torch.int32).view(torch.float32)
    assert not reference.hadamard(signs * least).any()
    assert reference.hadamard(signs * (3 * least))[0] == 16 * least
    assert reference.hadamard(signs * (4 * least))[0] == 16 * least


# ---------------------------------------------------------------- properties of every format


@pytest.mark.parametrize(
    "fmt", [get("nvfp4"), get("nvfp4_one_level"), *TE_GRANULARITIES.values(), get("mxfp4")], ids=str
)
def test_negative_zero_has_code_zero_and_negative_underflow_keeps_its_sign(fmt):
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 2], x[0, 16] = 6.0, -0.0, -1e-6, -0.0
    assert codes_of(quantize(x, fmt).data)[0, [0, 1, 2, 16]].tolist() == [7, 0, 8, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda f: f.name)
def test_all_zero_tensor(fmt, dtype):
    q = quantize(hard_input("zeros", (33, 70), dtype), fmt)
    assert torch.equal(q.dequantize(), torch.zeros(33, 70))
    assert codes_of(q.data).count_nonzero() == 0
    if fmt.name == "nvfp4":
        assert q.outer.item() == 1.0
        assert (as_bytes(q.scales) == 0x08).all()  # 2^-6


def test_an_outer_scale_that_underflows_makes_no_nan():
    x = torch.zeros(2, 32)
    x[0, 0] = 1e-44
    assert torch.equal(quantize(x, "nvfp4").dequantize(), torch.zeros(2, 32))


def spoilt_region(fmt, shape, row, col):
    """Where a value at (row, col) has its block: rows and columns that its scale spoils."""
    if fmt.block is None:
        return slice(row, row + 1), slice(None)
    rows, cols = fmt.block
    return slice(row // rows * rows, (row // rows + 1) * rows), slice(col // cols * cols, (col // cols + 1) * cols)


@pytest.mark.parametrize("layout", ["linear", "swizzled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda f: f.name)
def test_non_finite_blocks_are_visible(fmt, dtype, layout):
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        for row, col in ((0, 0), (34, 17), (40, 70)):  # the last one in a partial block
            x = hard_input("randn", (41, 71), dtype)
            x[row, col] = value
            values = quantize(x, fmt, layout=layout).dequantize()
            assert not values[spoilt_region(fmt, x.shape, row, col)].isfinite().any()
            if fmt.outer is None:
                assert values.isfinite().sum() == x.numel() - values[spoilt_region(fmt, x.shape, row, col)].numel()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.outer], ids=lambda f: f.name)
def test_non_finite_is_visible_under_a_static_outer_scale(fmt, value):
    x = hard_input("randn", (4, 64))
    x[2, 20] = value
    outer = torch.full((4, 1) if fmt.outer == "row" else (), 0.01)
    values = quantize(x, fmt, outer=outer).dequantize()
    assert not values[2, 20].isfinite()
    assert values[: 2 if not fmt.square else 0].isfinite().all()


@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.scale == "e4m3"], ids=lambda f: f.name)
def test_the_nan_scale_of_nvfp4_is_0x7f_with_codes_7(fmt):
    for value in (math.nan, -math.nan, math.inf, -math.inf):
        x = -torch.ones(16, 16)
        x[3, 3] = value
        q = quantize(x, fmt)
        row = 0 if fmt.square else 3
        assert as_bytes(q.scales)[row].tolist() == [0x7F]
        assert (codes_of(q.data)[3] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.square], ids=lambda f: f.name)
def test_square_blocks_quantise_the_transpose_alike(fmt, name, dtype):
    x = hard_input(name, (37, 70), dtype)
    q, qt = quantize(x, fmt), quantize(x.t(), fmt)
    assert torch.equal(as_bytes(q.scales), as_bytes(qt.scales).t())
    assert torch.equal(codes_of(q.data)[:, :70], codes_of(qt.data)[:, :37].t())
    assert q.outer is None or torch.equal(q.outer, qt.outer) or q.outer.isnan()


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.square], ids=lambda f: f.name)
def test_square_swizzled_scales_are_written_to_each_row(fmt, name):
    """One scale a tile in the linear layout; one a row where the matrix instruction reads them."""
    x = hard_input(name, (37, 70))
    tile = fmt.block[0]
    compact = quantize(x, fmt)
    assert compact.scales.shape == (-(-37 // tile), -(-70 // tile))
    swizzled = as_bytes(quantize(x, fmt, layout="swizzled").scales)
    assert swizzled.shape == (128 * (8 if tile == 16 else 4),)
    for row in (0, tile - 1, tile, 36):
        for col in range(-(-70 // tile)):
            where = col // 4 * 512 + row % 32 * 16 + row // 32 * 4 + col % 4
            assert swizzled[where] == as_bytes(compact.scales)[row // tile, col]


def test_every_nvfp4_value_is_a_bf16_number():
    codes = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn)
    values = reference.dequantize(reference.pack(codes), scales, None, get("nvfp4"), 16, torch.float32)
    assert torch.equal(values.bfloat16().float(), values)
    expected = [[s * v for v in (*E2M1, *(-v for v in E2M1))] for s in E4M3]
    assert values.tolist() == expected


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.scale], ids=lambda f: f.name)
def test_values_are_close_to_the_input(fmt, name):
    """A check of the whole way that shares nothing with the bitwise ones: half a step of the element, at most."""
    x = hard_input(name, (40, 128), block=fmt.block_cols)
    if name in ("tiny", "huge", "scaled_rows") and fmt.scale == "e4m3":
        return  # beyond the range of E4M3 scales
    if name == "tiny" or (name == "huge" and fmt.contract in ("floor", "even", "ceil")):
        return  # beyond the range of E8M0 scales; the largest values saturate
    rows, cols = fmt.block
    tiles = torch.nn.functional.pad(x.abs(), (0, 0, 0, -40 % rows)).unflatten(-1, (-1, cols)).unflatten(0, (-1, rows))
    amax = tiles.amax((1, 3), keepdim=True).expand_as(tiles).flatten(0, 1).flatten(1)[:40]
    step = {"e2m1": 1 / 5, "e4m3": 32 / 448, "e5m2": 8192 / 57344}[fmt.element]
    if fmt.contract == "floor" or fmt.contract == "even":
        step *= 2  # saturation
    if fmt.scale == "e4m3":
        step += 0.09  # the block scale is itself rounded
        if fmt.contract == "torchao" or fmt.outer:
            amax = amax.clamp(min=x.abs().max() / 2688 if fmt.outer else 2.0**-6 * 6)
        else:
            amax = amax.clamp(min=2.0**-7 * 6)
        if fmt.outer is None:
            x = x.clamp(-2688, 2688)
    largest = torch.finfo(torch.float32).max  # the largest of "huge" round up to 2^128
    error = (quantize(x, fmt).dequantize().clamp(-largest, largest) - x).abs()
    assert (error <= amax * step).all()


# ---------------------------------------------------------------- the same bits on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=lambda f: f.name)
def test_cuda_computes_the_bits_of_the_cpu(fmt, dtype):
    for name in NAMES:
        x = hard_input(name, (48, 256), dtype, block=fmt.block_cols)
        for layout in ("linear", "swizzled"):
            here = reference.quantize(x, fmt, layout=layout)
            there = reference.quantize(x.cuda(), fmt, layout=layout)
            for cpu, cuda in zip(here, there, strict=True):
                if cpu is not None and cpu.dtype == torch.float32:
                    torch.testing.assert_close(cuda.cpu(), cpu, rtol=0, atol=0, equal_nan=True)
                elif cpu is not None:
                    assert torch.equal(as_bytes(cuda).cpu(), as_bytes(cpu)), (name, layout)
        values = reference.dequantize(*there, fmt, 256, torch.float32)
        expected = reference.dequantize(*here, fmt, 256, torch.float32)
        torch.testing.assert_close(values.cpu(), expected, rtol=0, atol=0, equal_nan=True)
