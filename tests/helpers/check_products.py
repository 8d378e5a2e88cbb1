"""Products of the kernels held to float64, within the error of a float32 sum."""

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat
from tests.helpers.kernels import on_device


def name(value):
    """The name of a format or a dtype, for a test's id."""
    return value.name if isinstance(value, BlockFormat) else str(value).removeprefix("torch.")


def values(x, k):
    """An operand without its global scale, in float64."""
    if x.format is None:
        return x.data.double()
    return reference.dequantize_blocks(x.data, x.scales, x.format)[..., :k].double()


def check(a, b, k, bias=None, out_dtype=torch.float32):
    """The kernels' product of two operands against float64."""
    from tests.helpers.multiplied import scaled_mm

    left, right = values(a, k), values(b, k)
    outer = reference._outer_product(a.outer, b.outer)  # float32, as the contract has it: it may underflow
    outer = 1.0 if outer is None else outer.double()
    expected = left @ right.mT * outer
    sums = left.abs() @ right.abs().mT
    bound = sums * outer * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + expected.abs() * 2.0**-23
    bound = bound + expected.abs() * torch.finfo(out_dtype).eps
    got = scaled_mm(*map(on_device, (a, b, bias)), out_dtype)
    assert (got.shape, got.dtype) == (expected.shape, out_dtype)
    got = got.cpu().double()
    limit = torch.finfo(out_dtype).max
    inside = (torch.maximum(sums, sums * outer) < 2.0**127) & (expected.abs() < limit)
    assert (got[inside] - expected[inside]).abs().le(bound[inside]).all()
    assert not got[~expected.isfinite()].isfinite().any()
    return got
