"""The op of the scaled product against float64: global scales, formats, batches, bias, plain operands."""

import math

import pytest
import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import NAMED, get
from fp4compile.ops.functional import BlockScaled, quantize, scaled_mm
from tests.helpers.codes import same_bits
from tests.helpers.hard_inputs import DTYPES, FINITE, hard_input

NAMES = tuple(NAMED)
LAYOUTS = ("linear", "swizzled")


def assert_product(out, a: BlockScaled, b: BlockScaled, bias=None):
    """Within float32 summation error, and one rounding to the output type, of the float64 product."""
    left, right = a.dequantize().double(), b.dequantize().double()
    expected = left @ right.mT
    k = left.shape[-1]
    bound = (k + 4) * 2.0**-24 * (left.abs() @ right.abs().mT)
    if bias is not None:
        expected = expected + bias.double()
        bound = bound + 2.0**-23 * expected.abs()
    eps = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[out.dtype]
    error = (out.double() - expected).abs()
    assert (error <= bound * (1 + eps) + eps * expected.abs() + 1e-30).all(), (error - bound).max()


OUTERS = {"none": "nvfp4_one_level", "tensor": "nvfp4", "row": "nvfp4_rowwise"}


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("right", OUTERS)
@pytest.mark.parametrize("left", OUTERS)
def test_scaled_mm_with_every_mix_of_outer_scales(left, right, bias_dtype, out_dtype):
    a = quantize(hard_input("outliers", (19, 70)), OUTERS[left])
    b = quantize(hard_input("randn", (23, 70)), OUTERS[right])
    bias = None if bias_dtype is None else torch.randn(23).to(bias_dtype)
    out = scaled_mm(a, b, bias, out_dtype)
    assert (out.shape, out.dtype) == ((19, 23), out_dtype)
    assert_product(out, a, b, bias)


PAIRS = [(a, b) for a in NAMES for b in NAMES if formats.compatible(NAMED[a], NAMED[b])]


@pytest.mark.parametrize("a_name, b_name", PAIRS)
def test_scaled_mm_of_every_compatible_pair(a_name, b_name):
    a, b = quantize(hard_input("randn", (33, 70)), a_name), quantize(hard_input("zero_blocks", (20, 70)), b_name)
    linear = scaled_mm(a, b, out_dtype=torch.float32)
    assert_product(linear, a, b)
    swizzled = [quantize(q.dequantize(), q.format, outer=q.outer, layout="swizzled") for q in (a, b)]
    plain = [quantize(q.dequantize(), q.format, outer=q.outer) for q in (a, b)]
    assert same_bits(scaled_mm(*swizzled), scaled_mm(*plain))
    assert same_bits(scaled_mm(swizzled[0], plain[1]), scaled_mm(*plain))


@pytest.mark.parametrize("name", FINITE)
def test_scaled_mm_on_hard_inputs(name):
    for fmt in ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4"):
        a, b = quantize(hard_input(name, (20, 64)), fmt), quantize(hard_input("randn", (12, 64)), fmt)
        if name not in ("huge", "tiny"):  # out of float32's range before the global scales, or the product of them
            assert_product(scaled_mm(a, b, out_dtype=torch.float32), a, b)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,)])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_rowwise", "nvfp4_16x16", "mxfp8", "float8_rowwise"])
def test_scaled_mm_batched(name, lead):
    a, b = quantize(torch.randn(*lead, 19, 40), name), quantize(torch.randn(*lead, 21, 40), name)
    bias = torch.randn(21)
    out = scaled_mm(a, b, bias, torch.float32)
    assert out.shape == (*lead, 19, 21)
    assert_product(out, a, b, bias)


@pytest.mark.parametrize("name", ["nvfp4_rowwise", "mxfp8"])
def test_a_right_matrix_of_two_dimensions_serves_a_batch(name):
    """At the level of the ops: what matmul makes of a weight."""
    x, w = quantize(torch.randn(2, 3, 19, 40), name), quantize(torch.randn(21, 40), name)
    operands = x.data, x.scales, x.outer, w.data, w.scales, w.outer
    out = torch.ops.fp4compile.scaled_mm(*operands, f"{name} @ {name} -> float32")
    assert out.shape == (2, 3, 19, 21)
    assert_product(out, x, w)


@pytest.mark.parametrize("m, n, k", [(0, 5, 32), (5, 0, 32), (5, 4, 0), (0, 0, 0), (1, 1, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_scaled_mm_of_empty_operands(name, m, n, k):
    a, b = quantize(torch.randn(m, k), name), quantize(torch.randn(n, k), name)
    bias = torch.randn(n)
    out = scaled_mm(a, b, bias, torch.float32)
    assert out.shape == (m, n)
    assert k or torch.equal(out, bias.expand(m, n))


def ones(rows, fmt, outer):
    """[rows, 16] of ones: the block scale times the outer one is exact."""
    q = quantize(torch.ones(rows, 16), "nvfp4_one_level", layout="linear")
    return BlockScaled(q.data, q.scales, outer, get(fmt), (rows, 16))


def test_outer_scales_are_multiplied_first_then_applied_once():
    """Two float32 roundings, (sum) * (outer_a * outer_b): other orders of the same factors give other bits."""
    gen = torch.Generator().manual_seed(0)
    outer_a, outer_b = torch.rand(64, 1, generator=gen), torch.rand(64, 1, generator=gen)
    one = ones(1, "nvfp4", None).dequantize().sum()
    out = scaled_mm(ones(64, "nvfp4_rowwise", outer_a), ones(64, "nvfp4_rowwise", outer_b), out_dtype=torch.float32)
    total = (one / 16) ** 2 * 16
    assert torch.equal(out, total * (outer_a * outer_b.t()))
    assert not torch.equal(out, total * outer_a * outer_b.t())


def test_outer_scales_come_before_the_bias_and_the_cast():
    total = ones(1, "nvfp4", None).dequantize().square().sum()
    big, small = torch.tensor(2.0**18), torch.tensor(2.0**-18)
    # float16 ends at 65504: the product is finite only if both global scales are in before the cast.
    out = scaled_mm(ones(2, "nvfp4", big), ones(2, "nvfp4", big * small * small), out_dtype=torch.float16)
    assert torch.equal(out, total.expand(2, 2).half())
    # The bias is not scaled.
    out = scaled_mm(ones(2, "nvfp4", small), ones(2, "nvfp4", small), torch.tensor([1.0, 3.0]), torch.float32)
    assert torch.equal(out, (total * 2.0**-36 + torch.tensor([1.0, 3.0])).expand(2, 2))
    # 257 is no bfloat16, 258 is: the bias comes before the cast.
    out = scaled_mm(ones(1, "nvfp4", 257 / total), ones(1, "nvfp4", None), torch.ones(1), torch.bfloat16)
    assert out.item() == 258


@pytest.mark.parametrize("k", [64, 50, 16, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_operand_on_either_side(name, k, dtype):
    """Weight-only products: format None, and no padding of the plain operand."""
    x, q = hard_input("randn", (9, k), dtype), quantize(hard_input("outliers", (13, k)), name)
    plain, packed = (x, None, None), (q.data, q.scales, q.outer)
    expected = x.double() @ q.dequantize().double().t()
    bound = (k + 4) * 2.0**-24 * (x.double().abs() @ q.dequantize().double().abs().t())
    left = torch.ops.fp4compile.scaled_mm(*plain, *packed, f"plain @ {name} -> float32")
    right = torch.ops.fp4compile.scaled_mm(*packed, *plain, f"{name} @ plain -> float32")
    assert ((left.double() - expected).abs() <= bound).all()
    assert ((right.double() - expected.t()).abs() <= bound.t()).all()


def test_two_plain_operands():
    x, w, bias = torch.randn(4, 10), torch.randn(5, 10), torch.randn(5)
    out = torch.ops.fp4compile.scaled_mm(x, None, None, w, None, None, "plain @ plain -> float32", bias=bias)
    torch.testing.assert_close(out, x @ w.t() + bias)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", NAMES)
def test_non_finite_input_reaches_the_product(name, value):
    fmt = get(name)
    x, w = hard_input("randn", (40, 64)), hard_input("randn", (8, 64))
    x[35, 3] = value
    for out in (
        scaled_mm(quantize(x, name), quantize(w, name), out_dtype=torch.bfloat16),
        scaled_mm(quantize(w, name), quantize(x, name), out_dtype=torch.bfloat16).t(),
    ):
        assert not out[35].isfinite().any()
        alone = fmt.outer != "tensor" and name != "float8_128x128"  # else rows 0 and 35 share a scale
        assert not alone or out[:32].isfinite().all()
