"""E2M1 rounding by inline PTX against the reference, exhaustively.

The text of the PTX is played in NumPy (`helpers.ptx_player`). On a GPU (`-m gpu`) it runs.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from fp4compile.formats import formats, reference
from fp4compile.templates.device import block_scales, elements
from tests.helpers.inline_ptx import play
from tests.helpers.quantisers import quantize, quantize_both

EVERY = (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


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


def assert_as_each_alone(x, fmt):
    both = quantize_both(x, fmt)
    for one, other in zip(both, (quantize(x, fmt), quantize(x.mT, fmt)), strict=True):
        for a, b in zip(one[:2], other[:2], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("format", ["nvfp4_one_level", "mxfp4"])
def test_every_amax_and_every_element(format):
    """Blocks with every bfloat16 as their largest magnitude; every product of a bfloat16 with the factor of a scale."""
    fmt = formats.get(format)
    n = fmt.block_cols
    every = torch.arange(2**16, device="cuda").to(torch.int16).view(torch.bfloat16).view(256, 256)
    spread = every.repeat_interleave(n, 0).repeat_interleave(n, 1)
    shares = torch.linspace(-1, 1, n * n, device="cuda").view(n, n).repeat(256, 256).bfloat16()
    assert_as_each_alone(spread * shares, fmt)
    for scale in torch.arange(8, 16, device="cuda") / 8:
        x = torch.where(every.abs() <= 6 * scale, every, 0)
        x = torch.cat([x.roll((i, i), (0, 1)) for i in range(3)])  # no element is overwritten everywhere
        x[::n] = x[:, ::n] = 6 * scale  # in every block along rows and columns
        assert_as_each_alone(x, fmt)
