"""NVFP4 of the reference against scalar loops over the written contracts "te" and "torchao", and literal bytes."""

import math

import numpy as np
import pytest
import torch

from fp4compile.formats.formats import get
from fp4compile.ops.functional import quantize
from tests.helpers.codes import as_bytes, codes_of
from tests.helpers.hard_inputs import IN_ONE_DTYPE, TINY_AMAXES, TINY_OUTERS, hard_input, of_amax
from tests.helpers.number_formats import (
    E2M1,
    E2M1_THRESHOLDS,
    E4M3,
    F32,
    FLT_MAX,
    TE_GRANULARITIES,
    nearest_even,
)


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


@pytest.mark.parametrize(("name", "dtype"), IN_ONE_DTYPE, ids=str)
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

    # No global scale: s = amax / 6 = 1, 0.125, 0.5 (0x38, 0x20, 0x30), nothing left to scale in an empty block.
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


@np.errstate(all="ignore")
def torchao_by_the_contract(x: np.ndarray, static: float | None):
    """As `te_by_the_contract`, for contract torchao with a finite global scale of the tensor."""
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
