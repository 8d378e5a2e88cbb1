"""The rounding of `templates.device.packed_rounding` against the reference, exhaustively.

The text of the inline PTX is played in NumPy (`helpers.inline_ptx`): every bfloat16 times every factor that a block
scale can make. On a GPU (`-m gpu`) it runs.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.formats import formats, reference
from fp4compile.templates.device import block_scales, elements, packed_rounding, quick_scales
from tests.helpers.inline_ptx import play
from tests.helpers.quantisers import quantize, quantize_both

EVERY = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)
E4M3_SCALES = range(8, 128)  # from 2^-6 on, where the contract clamps; the last one is NaN


def played(values, factors, ptx):
    """The codes [n, 8] that a row's or a column's assembly makes of bf16 bits [n, 8] and factors [n] (of each)."""
    if len(factors) == 1:
        words = [values[:, 2 * i] | values[:, 2 * i + 1] << 16 for i in range(4)]
    else:
        words = [values[:, i] | values[:, 4 + i] << 16 for i in range(4)]
    return unpacked(*play(ptx, 1, [*words, *factors]))


def unpacked(codes):
    """uint32 [n] of eight codes -> [n, 8]."""
    return codes[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15


def row_codes(x, factor, ptx):
    """The codes of bfloat16 numbers x (as float32), in rows of eight, times one factor."""
    values = np.pad(x.view(np.uint32) >> 16, (0, -len(x) % 8)).reshape(-1, 8)
    return played(values, [np.full(len(values), factor, np.float32)], ptx.value).ravel()[: len(x)]


def step_codes(x, factor, step, signed=False):
    """The codes of any float32 numbers x times one factor, made by a step of `_codes_ptx`."""
    pairs = [step(f"${1 + i}", f"${1 + j}", "$9") for i, j in ((0, 2), (4, 6), (1, 3), (5, 7))]
    values = np.pad(x, (0, -len(x) % 8)).reshape(-1, 8)
    (codes,) = play(packed_rounding._codes_ptx(pairs, signed), 1, [*values.T, np.full(len(values), factor, np.float32)])
    return unpacked(codes).ravel()[: len(x)]


def expected_codes(x, factor):
    negative = torch.from_numpy((x < 0) & ~np.isnan(factor))
    return reference.e2m1_encode(torch.from_numpy(x * factor), negative).numpy()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("error", [-(2.0**-22), 0, 2.0**-22])
def test_products_with_reciprocals_of_e4m3_scales(error):
    """error: of the reciprocal, which is an approximation; all that a scale can belong to is clamped before."""
    for byte in E4M3_SCALES:
        scale = torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()[0]
        # Of an infinite or NaN element the scale is NaN.
        x = EVERY if byte >= 126 else EVERY[np.abs(EVERY) < 7 * scale]
        if byte >> 3 not in (1, 8, 15):  # other exponents have the same products; far below a tie one of them will do
            x = x[np.abs(x) >= scale / 64]
        clamped = np.copysign(np.fmin(np.abs(x), np.float32(2688)), x)
        above = packed_rounding._PACKED_SCALE_ABOVE if byte & 7 == 7 else packed_rounding.PACKED_SCALE
        approximate = np.float32((1 + error) / np.float64(scale))
        packed = row_codes(clamped, approximate * np.float32(above.value), packed_rounding._ROW)
        finite = ~np.isnan(x) if byte == 126 else np.full(x.shape, True)
        np.testing.assert_array_equal(packed[finite], expected_codes(x, np.float32(1) / scale)[finite])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_with_powers_of_two():
    for byte in range(256):
        factor = np.float32(2.0 ** (127 - byte) if byte < 254 else 2.0**-127 if byte == 254 else 2.0**-128)
        x = EVERY if byte == 255 else EVERY[np.abs(EVERY) < 7 / factor]
        if byte not in (0, 1, 64, 127, 191, 253, 254, 255):  # as above
            x = x[np.abs(x) >= 2.0**-6 / factor]
        packed = row_codes(x, factor * np.float32(packed_rounding.PACKED_SCALE.value), packed_rounding._ROW)
        np.testing.assert_array_equal(packed, expected_codes(x, factor))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_with_any_factor():
    """Next to every tie and every power of two, tiny, huge, not finite; as they are, and times factors."""
    around = np.concatenate([np.arange(0.25, 8, 0.25), 2.0 ** np.arange(-40.0, 40)]).astype(np.float32)
    near = (around.view(np.int32)[:, None] + np.arange(-64, 65)).astype(np.int32).view(np.float32).ravel()
    some = np.random.default_rng(0).integers(0, 2**31, 2**20, dtype=np.int32).view(np.float32)
    x = np.concatenate([near, some, np.float32([0, 6, 7, 1e30, 3e38, np.inf, np.nan])])
    x = np.concatenate([x, -x])
    for factor in np.float32([1, 1 / 3, 1.7e-30, 1e38, np.inf, 1.4e-45, np.nan]):
        found = step_codes(x, factor, packed_rounding._in_float32_ptx)
        np.testing.assert_array_equal(found, expected_codes(x, factor))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bounded_products():
    """The step sees nothing but the product: those next to ties and powers of two, many others, and their factors."""
    around = np.concatenate([np.arange(0.25, 7, 0.25), 2.0 ** np.arange(-40.0, 3)]).astype(np.float32)
    near = (around.view(np.int32)[:, None] + np.arange(-64, 65)).astype(np.int32).view(np.float32).ravel()
    others = np.arange(np.float32(2.0**-4).view(np.int32), np.float32(7).view(np.int32), 61, np.int32).view(np.float32)
    x = np.concatenate([near, others, np.float32([0, 1e-45, 1e-39])])
    x = np.concatenate([x, -x])
    x = x[np.abs(x) < 7]
    scale = np.float32(packed_rounding.PACKED_SCALE.value)

    def assert_right(x, factor):
        found = step_codes(x, factor * scale, packed_rounding._bounded_ptx, signed=True)
        np.testing.assert_array_equal(found, expected_codes(x, factor))

    for factor in np.float32([1, 0.999, 1 / 3, 2.0**-48, np.nan]):
        assert_right(x, factor)
    for power in (59, -59):
        assert_right(x * np.float32(2.0**power), np.float32(2.0**-power))


def test_bounded_products_lie_below_the_next_tie():
    """Elements up to a block's amax, or to `packed_clamp_limit` if its scale saturates; amaxes round as the worst."""
    quotients = np.exp2(np.linspace(-7, np.log2(465), 2**20)).astype(np.float32)
    scales = torch.from_numpy(np.clip(quotients, 2.0**-6, 448)).to(torch.float8_e4m3fn).float().numpy()
    assert (6 * np.minimum(quotients, 448 * (1 + 2.0**-20)) / scales).max() < 6.4
    decode = (np.arange(2**23, 2**24, 5, dtype=np.int64) * 2.0**-23).astype(np.float32)
    limit = ((decode * np.float32(2688)).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    products = limit * ((np.float32(1) / decode) / np.float32(448))
    assert products.min() > 5.9 and products.max() < 6.1
    assert (limit * np.float32(1 / 6) / decode).min() > 432  # of an amax that is clamped, the scale is 448


def quotient(dividend, divisor, reciprocal):
    """`quotient_ptx`."""
    operands = [np.broadcast_to(operand, np.broadcast(dividend, divisor).shape) for operand in (dividend, divisor)]
    (found,) = play(".reg .b32 r;" + quick_scales.quotient_ptx("$0", "$1", "$2", "$3"), 1, [*operands, reciprocal])
    return found.view(np.float32)


def test_quotients():
    """Sixths of all bfloat16 mantissas; those divided by outer scales, and these by the mantissas of E4M3."""
    amax = np.arange(128, 256, dtype=np.float32)
    for power in (0, 14):
        sixth = 2.0**power / 6
        high = np.float32(sixth)
        low = (amax * np.float32(sixth - float(high))).astype(np.float64)
        sixths = (amax * np.float64(high) + low).astype(np.float32)
        np.testing.assert_array_equal(sixths, (amax * 2.0**power / 6).astype(np.float32))
    some = np.random.default_rng(0).integers(2**23, 2**24, 2**16)
    # 32 / (2^24 - 1) is so close to the middle of two numbers that rounding twice misses it.
    numbers = np.concatenate([some, np.arange(2**23, 2**23 + 999), np.arange(2**24 - 999, 2**24 - 1)])
    mantissas = (numbers * 2.0**-23).astype(np.float32)
    inverse = (1 / mantissas.astype(np.float64)).astype(np.float32)
    for dividend in sixths:
        exact = (dividend / mantissas.astype(np.float64)).astype(np.float32)
        np.testing.assert_array_equal(quotient(dividend, mantissas, inverse), exact)
    for divisor in np.arange(8, 16, dtype=np.float32):
        exact = (mantissas.astype(np.float64) / divisor).astype(np.float32)
        for places in (-1, 0, 1):  # of the approximate reciprocal
            reciprocal = ((np.float32(1) / divisor).view(np.int32) + np.int32(places)).view(np.float32)
            reciprocals = np.full(mantissas.shape, reciprocal)
            np.testing.assert_array_equal(quotient(mantissas, divisor, reciprocals), exact)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_assembly_of_every_product():
    """Its text, played: any bits, and numbers near the ties, by factors of any size."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**16, (50000, 8), dtype=np.uint32)
    factors = np.exp2(rng.uniform(-40, 40, len(values))).astype(np.float32)
    factors[:50], factors[50:100] = np.nan, np.inf
    values[::2] = (rng.integers(0, 2, (25000, 8)) << 15) | rng.integers(124 << 7, 130 << 7, (25000, 8))
    factors[::2] = np.exp2(rng.uniform(-1, 1, 25000))
    check_played(values, [factors], [factors], packed_rounding._ROW_BF16)
    both = [factors, factors[::-1].copy()]
    check_played(values, both, both, packed_rounding._COLUMNS_BF16)
    check_words(values, factors, factors, packed_rounding._WORDS_FLOAT32)


def check_words(values, packed, factors, ptx):
    """Of words that do not share a factor: each of the four in a text is one of another row of `values`."""
    rng = np.random.default_rng(3)
    rows = np.stack([rng.permutation(len(values)) for _ in range(4)], 1)
    chosen = np.stack([values[rows[:, i], 2 * i : 2 * i + 2] for i in range(4)], 1).reshape(len(values), 8)
    words = [chosen[:, 2 * i] | chosen[:, 2 * i + 1] << 16 for i in range(4)]
    got = unpacked(*play(ptx.value, 1, [*words, *packed[rows].T]))
    expected = expected_codes((chosen << 16).view(np.float32).ravel(), np.repeat(factors[rows], 2, 1).ravel())
    np.testing.assert_array_equal(got, expected.reshape(chosen.shape))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_assembly_in_fp16():
    """Half of the values lie on ties."""
    rng = np.random.default_rng(0)
    bytes = rng.integers(8, 127, 50000).astype(np.uint8)
    scales = torch.from_numpy(bytes).view(torch.float8_e4m3fn).float().numpy()
    above = np.where(bytes & 7 == 7, packed_rounding._PACKED_SCALE_ABOVE.value, packed_rounding.PACKED_SCALE.value)
    factors = np.float32(1) / scales
    packed = (factors * above.astype(np.float32)).astype(np.float32)
    ties = rng.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (50000, 8)) * rng.choice([-1, 1], (50000, 8))
    shares = np.where(rng.random((50000, 8)) < 0.5, ties, rng.uniform(-6.4, 6.4, (50000, 8)))
    other = rng.permutation(50000)
    for order, ptx in (([slice(None)], packed_rounding._ROW), ([slice(None), other], packed_rounding._COLUMNS)):
        each = np.repeat(np.stack([scales[i] for i in order], 1), 8 // len(order), 1)
        values = torch.from_numpy(shares * each).bfloat16().view(torch.uint16).numpy().astype(np.uint32)
        check_played(values, [packed[i] for i in order], [factors[i] for i in order], ptx)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_assembly_of_words_with_a_factor_each():
    """A thread may have words of several blocks; half of the values lie on ties."""
    rng = np.random.default_rng(0)
    bytes = rng.integers(8, 128, (50000, 4)).astype(np.uint8)
    scales = torch.from_numpy(bytes).view(torch.float8_e4m3fn).float().numpy()
    factors = np.float32(1) / scales
    fifteenths = factors.view(np.uint32) & np.uint32(0x7FFFFF) == packed_rounding._MANTISSA_OF_FIFTEENTHS.value
    np.testing.assert_array_equal(fifteenths, (bytes & 7 == 7) & (bytes != 127))  # NaN has no mantissa that matters
    above = np.where(fifteenths, packed_rounding._PACKED_SCALE_ABOVE.value, packed_rounding.PACKED_SCALE.value)
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (50000, 8)) * rng.choice([-1, 1], (50000, 8))
    shares = np.where(rng.random((50000, 8)) < 0.5, ties, rng.uniform(-6.4, 6.4, (50000, 8)))
    each = np.repeat(np.nan_to_num(scales, nan=1.0), 2, 1)
    values = torch.from_numpy(shares * each).bfloat16().view(torch.uint16).numpy().astype(np.uint32)
    words = [values[:, 2 * i] | values[:, 2 * i + 1] << 16 for i in range(4)]
    packed = (factors * above.astype(np.float32)).astype(np.float32)
    got = unpacked(*play(packed_rounding._WORDS.value, 1, [*words, *packed.T]))
    expected = expected_codes((values << 16).view(np.float32).ravel(), np.repeat(factors, 2, 1).ravel())
    np.testing.assert_array_equal(got, expected.reshape(values.shape))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_assembly_of_bounded_products():
    """Half of the values lie next to ties; zeros of both signs, and factors of blocks that are not finite."""
    rng = np.random.default_rng(0)
    factors = np.exp2(rng.uniform(-40, 40, 50000)).astype(np.float32)
    factors[:50] = np.nan
    packed = factors * np.float32(packed_rounding.PACKED_SCALE.value)
    ties = rng.choice([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], (50000, 8)) * rng.choice([-1, 1], (50000, 8))
    shares = np.where(rng.random((50000, 8)) < 0.5, ties, rng.uniform(-6.4, 6.4, (50000, 8)))
    other = rng.permutation(50000)
    bounded = (packed_rounding._ROW_BOUNDED, packed_rounding._COLUMNS_BOUNDED)
    for order, ptx in zip(([slice(None)], [slice(None), other]), bounded, strict=True):
        each = np.repeat(np.stack([factors[i] for i in order], 1), 8 // len(order), 1)
        values = torch.from_numpy(shares / np.where(np.isnan(each), 1, each).astype(np.float64))
        values = values.bfloat16().view(torch.uint16).numpy().astype(np.uint32)
        check_played(values, [packed[i] for i in order], [factors[i] for i in order], ptx)
        if len(order) == 1:
            check_words(values, packed, factors, packed_rounding._WORDS_BOUNDED)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_assembly_of_expanded_pairs():
    """Every bfloat16 as a product, any float32, the numbers next to the ties; every scale of either sort."""
    rng = np.random.default_rng(0)
    ties = np.float32([0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, np.inf]).view(np.int32)
    near = (ties[:, None] + np.arange(-9, 10)).astype(np.uint32).ravel()
    any_bits = rng.integers(0, 2**32, 2**17, dtype=np.uint32)
    products = np.concatenate([EVERY.view(np.uint32), near, near | np.uint32(1 << 31), any_bits]).view(np.float32)
    first, second = products, rng.permutation(products)
    bytes = torch.from_numpy(rng.integers(0, 128, len(products)).astype(np.uint8))
    halves = bytes.view(torch.float8_e4m3fn).half()
    twice = halves.view(torch.uint16).numpy().astype(np.uint32) * np.uint32(0x10001)
    (words,) = play(elements._E2M1_ROUND.value, 1, [first, second, twice])
    for got, y in ((words & 0xFFFF, first), (words >> 16, second)):
        got = torch.from_numpy(got.astype(np.int32)).short().view(torch.float16)
        y = torch.from_numpy(y.copy())
        codes = reference.e2m1_encode(y, y.signbit() & ~y.isnan())  # a product has its element's sign, or is NaN
        expected = reference.e2m1_decode(codes) * halves.float()
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(*(v.nan_to_num(nan=0).view(torch.int16) for v in (got, expected.half())))


def check_played(values, packed, factors, ptx):
    each = np.repeat(np.stack(factors, 1), 8 // len(factors), 1)
    expected = expected_codes((values << 16).view(np.float32).ravel(), each.ravel()).reshape(values.shape)
    np.testing.assert_array_equal(played(values, packed, ptx.value), expected)


def test_a_sixth_of_a_bfloat16_rounds_like_the_quotient():
    amax = torch.arange(0, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    codes = [
        torch.clamp(scale, 2.0**-6, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        for scale in (amax / 6, amax * block_scales.SIXTH.value)
    ]
    assert torch.equal(*codes)


@triton.jit
def reciprocals(x_ptr, out_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, block_scales.reciprocal_e4m3(tl.load(x_ptr + i), 90))


@pytest.mark.gpu
def test_reciprocals_of_all_e4m3_scales():
    """An estimate and one step, against the division of IEEE: all positive numbers of the format, and its NaN."""
    scales = torch.arange(1, 129, dtype=torch.uint8, device="cuda").clamp(max=127).view(torch.float8_e4m3fn).float()
    found = torch.empty_like(scales)
    reciprocals[(1,)](scales, found, COUNT=128)
    expected = 1.0 / scales.cpu()
    assert torch.equal(found.cpu().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def assert_as_each_alone(x, fmt, outer=None):
    both = quantize_both(x, fmt, outer)
    for one, other in zip(both, (quantize(x, fmt, outer), quantize(x.mT, fmt, outer)), strict=True):
        for a, b in zip(one[:2], other[:2], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp4", "nvfp4"])
def test_every_amax_and_every_element(format):
    """Blocks with every bfloat16 as their largest magnitude; every product of a bfloat16 with the factor of a scale."""
    fmt = formats.get(format)
    n = fmt.block_cols
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16).view(256, 256)
    spread = every.repeat_interleave(n, 0).repeat_interleave(n, 1)
    shares = torch.linspace(-1, 1, n * n, device="cuda").view(n, n).repeat(256, 256).bfloat16()
    outers = [torch.tensor(p, device="cuda") for p in (1.0, 0.37, 3.3e-5, 2.0**61, 2.0**-61, 1e-42, 3e38)]
    for outer in outers if fmt.outer else [None]:
        assert_as_each_alone(spread * shares, fmt, outer)
        for scale in torch.arange(8, 16, device="cuda") / 8:
            x = torch.where(every.abs() <= 6 * scale, every, 0)
            x = torch.cat([x.roll((i, i), (0, 1)) for i in range(3)])  # no element is overwritten everywhere
            x[::n] = x[:, ::n] = 6 * scale  # in every block along rows and columns
            assert_as_each_alone(x, fmt, outer)
