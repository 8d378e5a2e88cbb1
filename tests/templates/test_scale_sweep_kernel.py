"""The kernel of the scale sweep against the reference, bit for bit; on a GPU, or in Triton's interpreter."""

import os

import pytest
import torch

from fp4compile.formats import formats, reference, reference_scales
from tests.helpers.hard_inputs import DTYPES, NAMES, TINY_AMAXES, hard_input, of_amax

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETING else "cuda"
RULES = ("mse", "four_over_six")

if INTERPRETING or torch.cuda.is_available():
    from fp4compile.templates import scale_sweep as kernels


def gpu(function):
    """Runs on a GPU, or in the interpreter where that has been chosen."""
    return function if INTERPRETING else pytest.mark.gpu(function)


def assert_same_bits(got, expected):
    for one, other in zip(got, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            one, other = (t.cpu().reshape(-1).nan_to_num(7.0) if t.dtype.itemsize == 4 else t.cpu().view(torch.uint8)
                          for t in (one, other))  # fmt: skip
            assert torch.equal(one, other)


def check(x, name, rule, layout="linear", outer=None):
    fmt = formats.get(name)
    expected = reference_scales.quantize(x, fmt, outer, layout, rule)
    on_device = None if outer is None else outer.to(DEVICE)
    assert_same_bits(kernels.quantize(x.to(DEVICE), fmt, on_device, layout, rule), expected)


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_hard_inputs(name):
    shape = (2, 272) if INTERPRETING else (64, 1040)
    for dtype in DTYPES if not INTERPRETING or name == "randn" else DTYPES[NAMES.index(name) % 3 :][:1]:
        for rule in RULES:
            check(hard_input(name, shape, dtype), "nvfp4", rule)
    check(hard_input(name, (20, 40), torch.bfloat16), "nvfp4_16x16", RULES[NAMES.index(name) % 2])


@gpu
def test_layouts_shapes_and_strides():
    x = torch.randn(20, 72)
    check(x[:3, :33], "nvfp4", "mse", "swizzled" if not INTERPRETING else "linear")
    check(x[:, 1:34], "nvfp4_16x16", "mse", "swizzled")
    check(x[:3].t()[:, :2], "nvfp4", "four_over_six")
    check(x[0], "nvfp4", "mse")
    check(x[:2, :48].bfloat16(), "nvfp4_one_level", "mse")
    check(x[:2, :48], "nvfp4_te", "mse", outer=torch.tensor(1e-5))
    for amax in TINY_AMAXES[::3]:
        check(of_amax(amax, (2, 48)), "nvfp4", "mse")


@gpu
def test_each_matrix_has_a_scale_of_its_own():
    x = torch.randn(3, 5, 40) * torch.tensor([1.0, 1e-3, 0.0]).view(3, 1, 1)
    fmt, amax = formats.get("nvfp4"), x.abs().amax((1, 2), keepdim=True)
    for rule in RULES:
        data, scales, outer = reference_scales.quantize(x, fmt, None, "linear", rule, amax)
        got = kernels.quantize(x.to(DEVICE), fmt, None, "linear", rule, each_matrix=True)
        assert_same_bits(got, (data, scales, outer.view(-1)))
    for block in ("nvfp4", "nvfp4_16x16"):
        outer = reference_scales.outer_of(amax, "mse")
        expected = reference_scales.best_scales(reference._blocks(x, formats.get(block)), outer, "mse")
        found = kernels.best_scales(x.to(DEVICE), formats.get(block), outer.view(-1).to(DEVICE), "mse")
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


def check_weighted(x, hessian, amax=None):
    top = x.float().abs().nan_to_num(0.0, posinf=0.0).amax() if amax is None else amax
    outer = reference_scales.outer_of(top, "mse")
    expected = reference_scales.best_weighted_scales(x, outer.view(-1, 1, 1) if outer.dim() else outer, hessian)
    found = kernels.best_weighted_scales(x.to(DEVICE), outer.to(DEVICE), hessian.to(DEVICE))
    assert_same_bits([found], [expected])


def hessians(*shape):
    """Those of random inputs, which are not the identity, and one that is not symmetric."""
    inputs = torch.randn(*shape, 16, 24) * torch.exp2(4 * torch.rand(*shape, 16, 1))
    return inputs @ inputs.mT + 0.1 * torch.randn(*shape, 16, 16)


@gpu
def test_errors_that_a_hessian_weighs():
    # The interpreter takes a second for a program, whatever the number of its rows: here there are two.
    shape = (1, 20) if INTERPRETING else (3, 1036)
    for dtype in DTYPES[:1] if INTERPRETING else DTYPES:
        x = torch.cat([hard_input(name, shape, dtype) for name in NAMES])
        for amax in (6.0,) if INTERPRETING else (1e-3, 6.0, 1e4):
            check_weighted(x, hessians(-(-shape[1] // 16)), torch.tensor(amax))


@gpu
def test_a_hessian_of_each_block_and_matrix():
    rows = 3 if INTERPRETING else 33
    x = torch.randn(2, rows, 13)
    hessian = hessians(2, rows, 1)
    hessian[0, 2, 0, 3, 4] = torch.inf  # no error of this block is a number
    check_weighted(x, hessian, torch.tensor([4.0, torch.nan]))
    if not INTERPRETING:
        check_weighted(x, hessian, torch.tensor([1e-3, 7.0]))
        check_weighted(torch.randn(40, 70).half().t(), hessians(3))


@pytest.mark.gpu
def test_a_large_weight():
    for dtype in DTYPES:
        for name in ("nvfp4", "nvfp4_16x16"):
            for rule in RULES:
                check(torch.randn(1024, 4096).to(dtype), name, rule, "swizzled")
        check_weighted(torch.randn(256, 4096).to(dtype), hessians(256))
