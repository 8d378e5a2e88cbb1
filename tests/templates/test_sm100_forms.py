"""The forms that quantise kernels have on SM100, against the reference, without such a GPU.

The text of the inline PTX is played in NumPy (`helpers.inline_ptx`).
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.formats import reference
from fp4compile.templates.device import elements, packed_encoding, philox, pointwise, quick_scales
from ptxsim.numbers import e2m1_stochastic
from tests.helpers.inline_ptx import play

EVERY = np.arange(2**16, dtype=np.uint32) << 16  # the bits of every bfloat16 number, as float32

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def unpacked(codes):
    """uint32 [n] -> the codes of each, [n, 8]."""
    return codes[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)


def e2m1_codes(x, factor):
    negative = torch.from_numpy((x < 0) & ~np.isnan(factor))
    return reference.e2m1_encode(torch.from_numpy(x * factor), negative).numpy()


def some_floats():
    """Every bfloat16, float32 numbers next to the ties, and any bits: float32 [n]."""
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]).view(np.int32)
    near = (ties[:, None] + np.arange(-32, 32)).astype(np.uint32).ravel()
    any_bits = np.random.default_rng(0).integers(0, 2**32, 2**14, dtype=np.uint32)
    return np.concatenate([EVERY, near, near | np.uint32(1 << 31), any_bits]).view(np.float32)


FACTORS = np.float32([1, 1 / 3, 1.7e-30, 1e38, 1.4e-45, 3.4e38, np.inf, np.nan])


def test_packed_products():
    """In each form the product, its rounding, its sign and its place."""
    x = some_floats()
    assert len(x) % 8 == 0
    rng = np.random.default_rng(1)
    for factor in FACTORS:
        expected = e2m1_codes(x, factor)
        same = np.full(len(x) // 8, factor, np.float32)
        values = x.reshape(-1, 8)
        (row,) = play(packed_encoding._PACKED_RUN.value, 1, [*values.T, same])
        np.testing.assert_array_equal(unpacked(row), expected.reshape(-1, 8))
        # Pairs: operand i of the first elements and of the second ones, each with a factor of its own.
        others = rng.permutation(FACTORS).repeat(len(same) // len(FACTORS) + 1)[: len(same)]
        factors = np.stack([same, others, same, others], 1)
        (pairs,) = play(packed_encoding._PACKED_PAIRS.value, 1, [*values[:, 0::2].T, *values[:, 1::2].T, *factors.T])
        np.testing.assert_array_equal(unpacked(pairs), e2m1_codes(values, factors.repeat(2, 1)))


def test_values_of_e2m1_codes():
    """Every byte of two codes, at each of a register's four places: the values of the first and of the second codes."""
    byte = np.arange(256, dtype=np.uint32)
    bytes_ = np.stack([byte, byte[::-1], np.roll(byte, 1), np.roll(byte, 100)])
    word = np.bitwise_or.reduce([each << np.uint32(8 * i) for i, each in enumerate(bytes_)])
    got = np.stack(play(elements._E2M1_VALUES.value, 8, [word])).view(np.float32).reshape(2, 4, 256)
    codes = np.stack([bytes_ & 15, bytes_ >> 4]).astype(np.uint8)
    expected = reference.e2m1_decode(torch.from_numpy(codes)).numpy()
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(expected))


def test_a_word_rounds_four_elements():
    """Element k of four takes byte k of the word: no bit serves two elements."""
    rng = np.random.default_rng(0)
    values = rng.uniform(-7, 7, (8192, 8)).astype(np.float32)
    words = rng.integers(0, 2**32, (8192, 2), dtype=np.uint32)
    noise = np.ascontiguousarray(words).view(np.uint8).astype(np.uint32)
    factors = np.float32([0.9, 1.1]).repeat(4096)
    (row,) = play(packed_encoding._PACKED_RUN_STOCHASTIC.value, 1, [*values.T, factors, *words.T])
    np.testing.assert_array_equal(unpacked(row), e2m1_stochastic(values * factors[:, None], noise))


def test_products_of_pairs():
    """Of any numbers, two of each operand at a time."""
    x = some_floats()
    y = np.random.default_rng(2).permutation(x)
    first, second = play(pointwise._MUL_PAIRS.value, 2, [x[::2], x[1::2], y[::2], y[1::2]])
    np.testing.assert_array_equal(np.stack([first, second], 1).ravel().view(np.float32), x * y)


DECODES = np.float32([1, 0.37, 3.3e-5, 2688, 1e4, 2.0**-59, 1.99 * 2.0**-60, 1.99 * 2.0**59, 1 / 3, 1 - 2.0**-24])


def quick_scales_of(amaxes, decode, contract, error):
    """(scale bytes, factors) that the assembly makes of any amaxes."""
    encode = np.float32(1) / decode
    if contract == "te":
        encode *= np.float32(quick_scales.SIXTH.value)
    pairs = amaxes.reshape(-1, 2)
    operands = [np.full(len(pairs), value, np.float32) for value in (encode, encode, decode, decode)]
    ptx = quick_scales._TORCHAO_SCALES if contract == "torchao" else quick_scales._TE_SCALES
    *bytes, first, second = play(ptx.value, 4, [*pairs.T, *operands], error)
    return np.stack(bytes, 1).ravel(), np.stack([first, second], 1).ravel().view(np.float32)


@pytest.mark.parametrize(("contract", "error"), [("torchao", -1), ("torchao", 0), ("torchao", 1), ("te", 0)])
def test_scales_without_divisions(contract, error):
    """Of every bfloat16 amax, and of many float32 ones near the limits of the scale; error: of rcp.approx.

    (The estimate of the contract "te" is not off here: with one Newton step it is what ptxas makes of the correctly
    rounded reciprocal.)
    """
    rng = np.random.default_rng(0)
    decodes = np.concatenate([DECODES, np.exp2(rng.uniform(-60, 60, 20)).astype(np.float32)])
    for decode in decodes:
        near = (decode * np.exp2(rng.uniform(-14, 13, 2**15))).astype(np.float32)
        amaxes = np.concatenate([EVERY[: 2**15].view(np.float32), near])
        bytes, factors = quick_scales_of(amaxes, decode, contract, error)
        if contract == "torchao":
            scales, expected = reference._torchao_scales(torch.from_numpy(amaxes), torch.tensor(decode))
        else:
            encode = 1 / torch.tensor(decode)
            scales, expected = reference._te_scales(torch.from_numpy(amaxes), encode, torch.tensor(decode))
        np.testing.assert_array_equal(bytes, scales.view(torch.uint8).numpy())
        np.testing.assert_array_equal(factors, expected.numpy())


def quotient(dividend, divisor, reciprocal):
    """`quotient_ptx`. (Played exactly but for its very last sum, which is rounded twice.)"""
    ptx = ".reg .b32 r;" + quick_scales.quotient_ptx("$0", "$1", "$2", "$3")
    (found,) = play(ptx, 1, [dividend, divisor, reciprocal])
    return found.view(np.float32)


def test_quotients_by_the_mantissas_of_e4m3():
    """Of many mantissas, by an approximate reciprocal that is off by one place."""
    some = np.random.default_rng(0).integers(2**23, 2**24, 2**16)
    # 32 / (2^24 - 1) is so close to the middle of two numbers that rounding twice misses it.
    numbers = np.concatenate([some, np.arange(2**23, 2**23 + 999), np.arange(2**24 - 999, 2**24 - 1)])
    mantissas = (numbers * 2.0**-23).astype(np.float32)
    for divisor in np.arange(8, 16, dtype=np.float32):
        divisors, exact = np.full_like(mantissas, divisor), (mantissas.astype(np.float64) / divisor).astype(np.float32)
        for places in (-1, 0, 1):
            reciprocals = ((1 / divisors).view(np.int32) + np.int32(places)).view(np.float32)
            np.testing.assert_array_equal(quotient(mantissas, divisors, reciprocals), exact)


def test_quotients_of_any_numbers():
    """Dividends a of 24 bits whose quotients lie nearest to the middle of two float32 numbers: the worst ones.

    For odd divisors b (even ones have fewer): 2^24 a, or 2^25 a where a < b, is e more than an odd multiple of b.
    """
    some = np.random.default_rng(0).integers(2**22, 2**23, 2**13) * 2 + 1
    hard = []
    for b in np.concatenate([some, np.arange(2**24 - 255, 2**24, 2), np.arange(2**23 + 1, 2**23 + 256, 2)]).tolist():
        for shift in (24, 25):
            inverse = pow(2**shift, -1, b)
            for e in (-3, -2, -1, 1, 2, 3):
                a = e * inverse % b
                a += b * (a < 2**23)
                if 2**23 <= a < 2**24 and (shift == 24) == (a >= b):
                    hard.append((a, b))
    assert len(hard) > 10_000
    dividends, divisors = np.array(hard, dtype=np.float64).T
    exact = (dividends / divisors).astype(np.float32)  # no quotient lies so near that float64 would miss it
    dividends, divisors = dividends.astype(np.float32), divisors.astype(np.float32)
    np.testing.assert_array_equal(quotient(dividends, divisors, (1 / divisors).astype(np.float32)), exact)


def test_a_sixth_of_any_number():
    """Of all float32 mantissas; and of infinity it is NaN."""
    mantissas = np.arange(2**23, 2**24, dtype=np.int64).astype(np.float32)
    (found,) = play(quick_scales.sixth_ptx("$0", "$1"), 1, [mantissas])
    np.testing.assert_array_equal(found.view(np.float32), mantissas / np.float32(6))
    (found,) = play(quick_scales.sixth_ptx("$0", "$1"), 1, [np.float32([np.inf])])
    assert np.isnan(found.view(np.float32)).all()


@pytest.mark.parametrize("seed", [0, -1, 0x123456789ABCDEF0])
def test_random_words(seed):
    counters = np.concatenate([np.arange(1000), 2**32 + np.arange(1000)]).astype(np.uint64)
    halves = [counters & np.uint64(2**32 - 1), counters >> np.uint64(32)]
    constants = [seed % 2**32, (seed >> 32) % 2**32, 1]  # the key, and the stream
    inputs = [half.astype(np.uint32) for half in halves] + [np.full(2000, c, np.uint32) for c in constants]
    words = np.stack(play(philox._PHILOX.value, 4, inputs), 1)
    expected = reference.philox(torch.tensor(seed), 1, 4000).view(1000, 4).numpy()
    np.testing.assert_array_equal(words[:1000], expected)
    assert not (words[1000:] == words[:1000]).any(1).any()


def test_the_rule_of_sm100_is_unbiased_and_neighbours_round_apart():
    """One call of Philox for sixteen elements: over 40,000 of them means are right, and no two elements go together."""
    calls = 40_000
    words = reference.philox(torch.tensor(11), 1, 4 * calls).numpy().astype(np.uint32)
    noise = words.reshape(calls, 4).view(np.uint8).astype(np.uint32)  # [calls, 16], a byte for each element
    for value in (0.3, 0.5 + 1 / 512, 1.1, 2.7, 5.0):
        values = np.full((calls, 16), value, np.float32)
        step = 0.5 if value < 2 else 1.0 if value < 4 else 2.0
        low = np.floor(value / step) * step
        chance = np.floor((value - low) / step * 256) / 256  # which the instruction has instead of the fraction
        codes = torch.from_numpy(e2m1_stochastic(values, noise).astype(np.uint8))
        ups = (reference.e2m1_decode(codes).double().numpy() - low) / step
        assert set(np.unique(ups)) <= {0.0, 1.0}
        error = np.sqrt(chance * (1 - chance) / calls)
        assert np.abs(ups.mean(0) - chance).max() <= 4.5 * error
        if error:
            correlation = np.corrcoef(ups.T) - np.eye(16)
            assert np.abs(correlation).max() < 5 / np.sqrt(calls)


@triton.jit
def _scales(amax_ptr, encode_ptr, decode_ptr, byte_ptr, factor_ptr, CONTRACT: tl.constexpr, COUNT: tl.constexpr):
    i = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    byte, factor = quick_scales.quick_e4m3_scale(
        tl.load(amax_ptr + i), tl.load(encode_ptr + i), tl.load(decode_ptr + i), CONTRACT
    )
    tl.store(byte_ptr + i, byte)
    tl.store(factor_ptr + i, factor)


@pytest.mark.gpu
@pytest.mark.parametrize("contract", ["torchao", "te"])
def test_scales_without_divisions_on_a_gpu(contract):
    """With the GPU's own estimates (Hopper has all these instructions): of every mantissa of a global scale, of every
    bfloat16 amax. A thread makes two scales at a time, both with the first one's global scale: it is equal for both."""
    gen = torch.Generator().manual_seed(0)
    decode = torch.arange(2**23, 2**24, dtype=torch.int32).float() * 2.0**-23
    decode = torch.cat([decode.repeat_interleave(2), torch.tensor(DECODES).repeat_interleave(2**15), torch.ones(2**15)])
    amax = (6 * decode * torch.exp2(12 * torch.rand(decode.shape, generator=gen) - 8)).float()
    every = torch.from_numpy(EVERY[: 2**15].view(np.float32).copy())
    amax[2**24 :] = every.repeat(len(DECODES) + 1)
    encode = 1 / decode
    byte = torch.empty(decode.shape, dtype=torch.int32, device="cuda")
    factor = torch.empty(decode.shape, device="cuda")
    _scales[(decode.numel() // 1024,)](
        amax.cuda(), encode.cuda(), decode.cuda(), byte, factor, CONTRACT=contract, COUNT=1024
    )
    make = reference._torchao_scales if contract == "torchao" else reference._te_scales
    outers = (decode,) if contract == "torchao" else (encode, decode)
    scales, expected = make(amax, *outers)
    assert torch.equal(byte.cpu().to(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(factor.cpu().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
