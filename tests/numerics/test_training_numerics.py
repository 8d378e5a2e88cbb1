"""Stochastic rounding and the Hadamard transform of the reference, against their formulas."""

import math

import pytest
import torch

from fp4compile import quantize, scaled_mm
from fp4compile.formats import formats, reference
from tests.helpers.hard_inputs import hard_input

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def seed(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.int64)


# ---------------------------------------------------------------- random bits


def philox_by_hand(key: tuple[int, int], counter: list[int], rounds: int) -> list[int]:
    c, (k0, k1) = counter, key
    for _ in range(rounds):
        p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 % 2**32, (p0 >> 32) ^ c[3] ^ k1, p0 % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c


def test_philox_by_hand_is_philox():
    """Known answers of Random123 for Philox 4x32 with 7 and 10 rounds, all-zero counter and key."""
    assert philox_by_hand((0, 0), [0] * 4, 7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    assert philox_by_hand((0, 0), [0] * 4, 10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF0])
def test_philox(value):
    words = reference.philox(seed(value), 1, 11).tolist()
    key = value % 2**32, (value >> 32) % 2**32
    expected = [word for i in range(3) for word in philox_by_hand(key, [i, 0, 1, 0], 7)]
    assert words == expected[:11]


def test_noise_takes_each_half_of_a_word():
    words = reference.philox(seed(5), 0, 12)
    noise = reference.rounding_noise(seed(5), 0, (3, 8))
    assert torch.equal(noise[..., 0::2].flatten().long(), words % 2**16)
    assert torch.equal(noise[..., 1::2].flatten().long(), words >> 16)


# ---------------------------------------------------------------- stochastic rounding


def test_rounds_to_a_neighbour_and_keeps_what_is_on_the_grid():
    values = torch.cat([torch.linspace(0, 6, 4001), torch.tensor([1e-30, 0.49999997, 0.99999994, 5.9999995])])
    for noise in (0, 1, 2**15, 2**16 - 1):
        codes = reference.e2m1_encode_stochastic(values, values < 0, torch.full(values.shape, noise, dtype=torch.int32))
        got = GRID[codes.long()]
        step = torch.where(values < 2, 0.5, torch.where(values < 4, 1.0, 2.0))
        low = (values / step).floor() * step
        assert ((got == low) | (got == low + step)).all()
        assert torch.equal(got[values == low], values[values == low])
    on_grid = torch.tensor([-6.0, -0.5, 0.0, 6.0])
    codes = reference.e2m1_encode_stochastic(on_grid, on_grid < 0, torch.full((4,), 65535, dtype=torch.int32))
    assert codes.tolist() == [15, 9, 0, 7]


def test_the_chance_of_rounding_up_is_exact_to_2_to_the_minus_16():
    every = torch.arange(2**16, dtype=torch.int32)
    for value in (0.0, 1e-6, 0.1, 0.25, 0.75, 0.9999, 1.3, 1.75, 2.2, 2.999, 3.5, 4.1, 5.0, 5.99, 6.0):
        y = torch.full((2**16,), value)
        mean = GRID.double()[reference.e2m1_encode_stochastic(y, y < 0, every).long()].mean().item()
        step = 0.5 if value < 2 else 1.0 if value < 4 else 2.0
        assert abs(mean - torch.tensor(value).item()) <= step * 2**-17 + 1e-7


def test_unbiased_over_seeds():
    """The mean of 10,000 roundings is the input within 4 standard errors: inside the grid, at its ends, at 0.

    20 roundings with each of 500 seeds: as rows of a tensor, whose random words have different counters.
    """
    # One block of 16 of amax 6: its scale is 1 at one level, so that the values are what is rounded.
    on_grid, between = [0.0, -0.0, 6.0, -6.0, 4.0, 2.0], [5.999, -5.2, 3.3, -2.6, 1.9, -1.1, 0.7, 0.3, -0.01, 0.0005]
    x = torch.tensor(on_grid + between)
    one_level = formats.BlockFormat("e2m1", (1, 16), "e4m3", None, "te")
    total, square = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    rows = x.repeat(20, 1)
    for step in range(500):
        values = quantize(rows, one_level, seed=seed(step)).dequantize().double()
        total += values.sum(0)
        square += (values**2).sum(0)
    mean = total / 10_000
    error = ((square / 10_000 - mean**2).clamp(min=0) / 10_000).sqrt()
    assert ((mean - x.double()).abs() <= 4 * error + 1e-12).all()
    assert torch.equal(mean[:6], x.double()[:6]) and (error[:6] == 0).all() and (error[6:] > 0).all()


@pytest.mark.parametrize("format", ["nvfp4_te", "nvfp4", "nvfp4_16x16", "mxfp4", "nvfp4_rowwise"])
@pytest.mark.parametrize("name", ["randn", "scaled_rows", "zero_blocks", "one_nan", "one_neg_inf"])
def test_scales_do_not_depend_on_the_rounding(format, name):
    x = hard_input(name, (48, 64))
    nearest, stochastic = quantize(x, format), quantize(x, format, seed=seed(1))
    assert torch.equal(nearest.scales.view(torch.uint8), stochastic.scales.view(torch.uint8))
    a, b = nearest.dequantize(), stochastic.dequantize()
    assert torch.equal(a.isnan(), b.isnan())
    # A neighbour of the scaled value at most one step of the grid away: 2 of its 6.
    codes = [reference.unpack(q.data) for q in (nearest, stochastic)]
    assert ((codes[0] & 7).int() - (codes[1] & 7).int()).abs().max() <= 1


def test_the_seed_decides():
    x = torch.randn(32, 64)
    first = quantize(x, "nvfp4_te", seed=seed(1)).data
    assert torch.equal(first, quantize(x, "nvfp4_te", seed=seed(1)).data)
    assert not torch.equal(first, quantize(x, "nvfp4_te", seed=seed(2)).data)


def test_the_two_directions_of_one_tensor_round_apart():
    """A symmetric matrix in square blocks has the same codes both ways, but for the random bits."""
    x = torch.randn(64, 64)
    x = x + x.t()
    assert torch.equal(quantize(x, "nvfp4_16x16").data, quantize(x, "nvfp4_16x16", dim=0).data)
    assert not torch.equal(
        quantize(x, "nvfp4_16x16", seed=seed(1)).data, quantize(x, "nvfp4_16x16", dim=0, seed=seed(1)).data
    )


# ---------------------------------------------------------------- the Hadamard transform


def sylvester(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h


def test_hadamard_is_the_formula():
    """x.view(-1, 16) @ (diag(s) H16 / 4), exactly where no sum rounds."""
    x = torch.randint(-100, 100, (5, 48)).float()
    matrix = torch.diag(torch.tensor(SIGNS, dtype=torch.float64)) @ sylvester(16) * 0.25
    expected = (x.double().view(-1, 16) @ matrix).view(5, 48)
    assert torch.equal(reference.hadamard(x).double(), expected)
    real = torch.randn(7, 64)
    torch.testing.assert_close(
        reference.hadamard(real).double(), (real.double().view(-1, 16) @ matrix).view(7, 64), rtol=1e-5, atol=1e-6
    )


def exact_hadamard(x: torch.Tensor) -> torch.Tensor:
    """diag(signs) H16 / 4 times groups of 16, in float64."""
    matrix = [[s * (-1) ** (i & j).bit_count() for j in range(16)] for i, s in enumerate(SIGNS)]
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


def test_hadamard_cancels_in_a_product_and_pads():
    a, b = torch.randint(-8, 8, (3, 21)).float(), torch.randint(-8, 8, (4, 21)).float()
    left, right = reference.hadamard(a), reference.hadamard(b)
    assert left.shape == (3, 32)
    assert torch.equal(left @ right.t(), a @ b.t())


@pytest.mark.parametrize("dim", [-1, 0])
def test_quantising_with_hadamard_is_quantising_the_transform(dim):
    x = hard_input("outliers", (40, 72), torch.bfloat16)
    got = quantize(x, "nvfp4_te", dim=dim, hadamard=True)
    expected = quantize(reference.hadamard(x.movedim(dim, -1)), "nvfp4_te")
    assert torch.equal(got.data, expected.data)
    assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    assert torch.equal(got.outer, expected.outer) and got.shape == expected.shape


def test_products_of_transformed_operands():
    """Outliers in single tokens: with the transform the product of 4-bit operands comes out nearer."""
    gen = torch.Generator().manual_seed(0)
    dy, x = torch.randn(256, 64, generator=gen), torch.randn(256, 96, generator=gen)
    dy[::16] *= 30
    exact = dy.t() @ x

    def error(hadamard: bool) -> float:
        a, b = (quantize(t, "nvfp4_te", dim=0, hadamard=hadamard) for t in (dy, x))
        return ((scaled_mm(a, b, out_dtype=torch.float32) - exact).norm() / exact.norm()).item()

    assert error(True) < 0.2 and math.isfinite(error(False))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_visible(bad):
    x = torch.randn(4, 64)
    x[2, 17] = bad
    values = quantize(x, "nvfp4_te", hadamard=True, outer=torch.tensor(0.01)).dequantize()
    assert values[2, 16:32].isnan().all() and values.isnan().sum() == 16


# ---------------------------------------------------------------- bad input


X = torch.randn(4, 32)


@pytest.mark.parametrize(
    "error, message, call",
    [
        (ValueError, "seed: stochastic rounding is defined for E2M1", lambda: quantize(X, "mxfp8", seed=seed(0))),
        (ValueError, "seed: expected int64 of shape", lambda: quantize(X, "nvfp4", seed=torch.zeros(1).long())),
        (ValueError, "seed: expected int64", lambda: quantize(X, "nvfp4", seed=torch.tensor(1.0))),
        (TypeError, "seed: expected an int64 torch.Tensor", lambda: quantize(X, "nvfp4", seed=7)),
        (ValueError, "hadamard: the transform goes with NVFP4", lambda: quantize(X, "mxfp4", hadamard=True)),
        (ValueError, "hadamard: the transform goes with NVFP4", lambda: quantize(X, "nvfp4_16x16", hadamard=True)),
        (
            ValueError,
            "outer: with hadamard",
            lambda: torch.ops.fp4compile.quantize(X, "nvfp4", [-1, -2], outer=torch.ones(()), hadamard=True),
        ),
    ],
)
def test_bad_input(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_where_the_bits_of_transformer_engine_end():
    """TE's reference rounds the transform of a bf16 tensor to bf16. Here it stays float32, with the same error."""
    gen = torch.Generator().manual_seed(0)
    codes = apart = 0
    own = other = 0.0
    for rows in range(37, 49):
        x = torch.randn(rows, 256, generator=gen).bfloat16()
        transform = reference.hadamard(x.float())
        here, there = quantize(x, "nvfp4_te", hadamard=True), quantize(transform.bfloat16(), "nvfp4_te")
        both = [reference.unpack(each.data) for each in (here, there)]
        codes, apart = codes + both[0].numel(), apart + int((both[0] != both[1]).sum())
        own += (here.dequantize() - transform).double().square().sum()
        other += (there.dequantize() - transform).double().square().sum()
        exact = x.float()  # where the input is float32, so is TE's transform
        same = quantize(exact, "nvfp4_te", hadamard=True), quantize(transform, "nvfp4_te")
        assert torch.equal(same[0].data, same[1].data) and torch.equal(same[0].outer, same[1].outer)
    # 1205 of 130,560 codes, and 9e-5 of the error, as counted; sums of the transform may be in another order elsewhere.
    assert abs(apart / codes - 0.00923) < 1e-4 and abs(own / other - 1) < 2e-4
