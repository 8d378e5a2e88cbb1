"""What holds for the reference in every format: zeros, signs, NaN, square blocks, closeness, the same bits on a GPU.

The bits of single formats are in test_reference_elements, test_reference_mx, test_reference_nvfp4 and, against torchao,
in test_reference_torchao; stochastic rounding and the Hadamard transform in test_training_numerics.
"""

import math

import pytest
import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import get
from fp4compile.ops.functional import quantize
from tests.helpers.codes import as_bytes, bits, codes_of
from tests.helpers.hard_inputs import DTYPES, FINITE, IN_ONE_DTYPE, NAMES, hard_input
from tests.helpers.number_formats import E2M1, E4M3, EVERY_FORMAT, TE_GRANULARITIES


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


@pytest.mark.parametrize(("layout", "dtype"), list(zip(("linear", "swizzled", "linear"), DTYPES, strict=True)), ids=str)
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


@pytest.mark.parametrize(("name", "dtype"), IN_ONE_DTYPE, ids=str)
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.square], ids=lambda f: f.name)
def test_square_blocks_quantise_the_transpose_alike(fmt, name, dtype):
    x = hard_input(name, (37, 70), dtype)
    q, qt = quantize(x, fmt), quantize(x.t(), fmt)
    assert torch.equal(bits(q.scales), bits(qt.scales).t())
    assert torch.equal(codes_of(q.data)[:, :70], codes_of(qt.data)[:, :37].t())
    assert q.outer is None or torch.equal(q.outer, qt.outer) or q.outer.isnan()


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("fmt", [f for f in EVERY_FORMAT if f.square and f.swizzles], ids=lambda f: f.name)
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
