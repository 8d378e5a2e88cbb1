"""The reference against torchao, bit for bit where both follow the same contract."""

import pytest
import torch

from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.functional import quantize
from tests.helpers.codes import as_bytes, codes_of, is_negative_zero
from tests.helpers.hard_inputs import DTYPES, IN_ONE_DTYPE, NAMES, NON_FINITE, hard_input

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}


def torchao_nvfp4(x, p):
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    return module.nvfp4_quantize(x.float(), 16, p)


def torchao_mx(x, element, mode):
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}
    return module.to_mx(x.float(), dtypes[element], 32, config.ScaleCalculationMode(mode))


def block_amax(x, block):
    return x.float().abs().unflatten(-1, (-1, block)).amax(-1)


def differing(x, ours, theirs, block):
    """Blocks with a code that differs; -0.0 does not count in E2M1, where torchao keeps its sign."""
    different = codes_of(ours) != codes_of(theirs.view(ours.dtype))
    if ours.dtype == torch.uint8:
        different &= ~is_negative_zero(x)
    return different.unflatten(-1, (-1, block)).any(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_one_level_equals_torchao(name, dtype):
    x = hard_input(name, (48, 256), dtype)
    q = quantize(x, "nvfp4_one_level")
    scales, data = torchao_nvfp4(x, None)
    amax = block_amax(x, 16)
    assert not ((as_bytes(q.scales) != as_bytes(scales)) & ~amax.isinf()).any()  # torchao: 448 for an infinite block
    assert not (differing(x, q.data, data, 16) & amax.isfinite()).any()
    assert amax.isfinite().sum() == amax.numel() - (name in NON_FINITE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_two_level_equals_torchao(name, dtype):
    x = hard_input(name, (48, 256), dtype)
    p = x.float().abs().amax() / 2688
    if not p > 0:
        return  # torchao: NaN for an all-zero tensor (see test_all_zero_tensor), and for one with a NaN
    q = quantize(x, "nvfp4")
    scales, data = torchao_nvfp4(x, p)
    assert torch.equal(q.outer, p)
    finite = block_amax(x, 16).isfinite()
    assert not ((as_bytes(q.scales) != as_bytes(scales)) & finite).any()
    assert not (differing(x, q.data, data, 16) & finite).any()
    assert finite.sum() == finite.numel() - (name in NON_FINITE)


@pytest.mark.parametrize("outer", [2.0**-7, 0.013, 3.7, 1e-30])
def test_nvfp4_static_outer_equals_torchao(outer):
    """A calibrated scale does not fit the tensor: block scales saturate or underflow."""
    x = hard_input("scaled_rows", (48, 256))
    p = torch.tensor(outer)
    q = quantize(x, "nvfp4", outer=p)
    scales, data = torchao_nvfp4(x, p)
    assert q.outer is p
    assert torch.equal(as_bytes(q.scales), as_bytes(scales)) and torch.equal(q.data, data)


@pytest.mark.parametrize("mode", ["floor", "ceil", "even", "rceil"])
@pytest.mark.parametrize("element", LARGEST)
@pytest.mark.parametrize(("name", "dtype"), IN_ONE_DTYPE, ids=str)
def test_mx_equals_torchao(name, dtype, element, mode):
    x = hard_input(name, (48, 512), dtype, block=32)
    q = quantize(x, BlockFormat(element, (1, 32), "e8m0", None, mode))
    scales, data = torchao_mx(x, element, mode)
    amax = block_amax(x, 32)
    # Where torchao departs from the contract (test_reference has these for themselves): it flushes the smallest scales,
    # counts an infinity as a number, and takes rceil from a rounded logarithm, blind to 1 ulp past the largest element.
    off = amax.isinf() | ((amax > 0) & (amax < 1e-33))
    if mode == "rceil":
        top = LARGEST[element]
        off |= (amax.view(torch.int32) & 0x7FFFFF) == (torch.tensor(top).view(torch.int32) & 0x7FFFFF) + 1
    assert name in ("tiny", "scale_boundary", *NON_FINITE) or not off.any()
    assert off.float().mean() < (1.0 if name == "tiny" else 0.05)
    assert not ((as_bytes(q.scales) != as_bytes(scales)) & ~off).any()
    # Codes under a NaN scale mean nothing.
    assert not (differing(x, q.data, data, 32) & ~off & ~amax.isnan()).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_float8_rowwise_equals_torchao(name, dtype):
    utils = pytest.importorskip("torchao.float8.float8_utils")
    config = pytest.importorskip("torchao.float8.config")
    x = hard_input(name, (48, 200), dtype)
    q = quantize(x, "float8_rowwise")
    scale = utils.tensor_to_scale(
        x, torch.float8_e4m3fn, scaling_granularity=config.ScalingGranularity.AXISWISE, axiswise_dim=-1
    )
    codes = utils.to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
    finite = x.isfinite().all(-1)
    assert finite.sum() == 48 - (name in NON_FINITE)
    assert q.scales is None and q.outer.shape == (48, 1)
    assert torch.equal(as_bytes(q.data)[finite], as_bytes(codes)[finite])
    assert torch.equal(q.outer[finite], (1.0 / scale)[finite])
