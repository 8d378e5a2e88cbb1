"""Products of the kernels held to float64, within the error of a float32 sum."""

from dataclasses import replace

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat
from tests.helpers.kernels import on_device

# Kernels whose sums of a block are not in float32.
ON_FLOAT8_UNITS = ("float8_tiles", "float8_sm90", "library_float8_blocks", "library_row_scaled")


def name(value):
    """The name of a format or a dtype, for a test's id."""
    return value.name if isinstance(value, BlockFormat) else str(value).removeprefix("torch.")


def values(x, k):
    """An operand without its global scale, in float64."""
    if x.format is None:
        return x.data.double()
    return reference.dequantize_blocks(x.data, x.scales, x.format)[..., :k].double()


def magnitudes(x):
    """The operand with the magnitudes of its FP8 codes; others, which FP8 matrix units do not multiply, unchanged."""
    if x.data.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return x
    return replace(x, data=(x.data.view(torch.uint8) & 0x7F).view(x.data.dtype))


def units_error(left, right):
    """What the FP8 matrix units may be off by: each cuts 32 products and a sum 13 bits below the largest.

    The largest is a product or the sum of the block so far, which is at most the sum of magnitudes.
    """
    found, size = 0.0, 0.0
    for step in range(0, left.shape[1], 32):
        a, b = left[:, step : step + 32].abs(), right[step : step + 32].abs()
        largest = torch.cat([a.new_zeros(0, b.shape[1]),
                             *((a[i : i + 64, :, None] * b).amax(1) for i in range(0, len(a), 64))])  # fmt: skip
        size = (0.0 if step % 128 == 0 else size) + a @ b
        found = found + 2.0**-13 * (32 * largest + size)
    return found


def check(a, b, k, bias=None, out_dtype=torch.float32):
    """The kernels' product of two operands against float64."""
    from fp4compile.formats.operand import Arguments
    from fp4compile.templates.choose import choose
    from fp4compile.templates.multiply import call_of
    from tests.helpers.multiplied import scaled_mm

    given = *map(on_device, (a, b, bias)), out_dtype
    problem = call_of(Arguments.of(*given)).problem
    kernel = choose(problem).kernel
    left, right = values(a, k), values(b, k)
    if kernel == "dequant_operand" and problem.scales_sums:  # weights as those of a dequantised model
        right = right.bfloat16().double()
    outer = reference._outer_product(a.outer, b.outer)  # float32, as the contract has it: it may underflow
    outer = 1.0 if outer is None else outer.double()
    expected = left @ right.mT * outer
    sums = left.abs() @ right.abs().mT
    bound = sums * outer * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + expected.abs() * 2.0**-23
    bound = bound + expected.abs() * torch.finfo(out_dtype).eps
    if kernel in ON_FLOAT8_UNITS:
        bound = bound + units_error(left, right.mT) * outer
    got = scaled_mm(*given)
    assert (got.shape, got.dtype) == (expected.shape, out_dtype)
    got = got.cpu().double()
    limit = torch.finfo(out_dtype).max
    inside = (torch.maximum(sums, sums * outer) < 2.0**127) & (expected.abs() < limit)
    assert (got[inside] - expected[inside]).abs().le(bound[inside]).all()
    assert not got[~expected.isfinite()].isfinite().any()
    return got
