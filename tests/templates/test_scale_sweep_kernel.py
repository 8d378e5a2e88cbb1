"""The kernel of the scale sweep against the reference, bit for bit; on a GPU, or in Triton's interpreter."""

import pytest
import torch

from fp4compile.formats import formats, reference, reference_scales
from fp4compile.templates import scale_sweep as kernels
from tests.helpers.hard_inputs import DTYPES, NAMES, TINY_AMAXES, hard_input, of_amax
from tests.helpers.kernels import DEVICE, INTERPRETING, assert_same_bits, gpu


def check(x, name, layout="linear", outer=None):
    fmt = formats.get(name)
    expected = reference_scales.quantize(x, fmt, outer, layout)
    on_device = None if outer is None else outer.to(DEVICE)
    assert_same_bits(kernels.quantize(x.to(DEVICE), fmt, on_device, layout), expected)


@gpu
@pytest.mark.parametrize("name", NAMES)
def test_hard_inputs(name):
    shape = (2, 272) if INTERPRETING else (64, 1040)
    for dtype in DTYPES if not INTERPRETING or name == "randn" else DTYPES[NAMES.index(name) % 3 :][:1]:
        check(hard_input(name, shape, dtype), "nvfp4")
    check(hard_input(name, (20, 40), torch.bfloat16), "nvfp4_16x16")


@gpu
def test_layouts_shapes_and_strides():
    x = torch.randn(20, 72)
    check(x[:3, :33], "nvfp4", "swizzled" if not INTERPRETING else "linear")
    check(x[:, 1:34], "nvfp4_16x16", "swizzled")
    check(x[:3].t()[:, :2], "nvfp4")
    check(x[0], "nvfp4")
    check(x[:2, :48].bfloat16(), "nvfp4_one_level")
    check(x[:2, :48], "nvfp4_te", outer=torch.tensor(1e-5))
    for amax in TINY_AMAXES[::3]:
        check(of_amax(amax, (2, 48)), "nvfp4")


@gpu
def test_each_matrix_has_a_scale_of_its_own():
    x = torch.randn(3, 5, 40) * torch.tensor([1.0, 1e-3, 0.0]).view(3, 1, 1)
    fmt, amax = formats.get("nvfp4"), x.abs().amax((1, 2), keepdim=True)
    data, scales, outer = reference_scales.quantize(x, fmt, None, "linear", amax)
    got = kernels.quantize(x.to(DEVICE), fmt, None, "linear", each_matrix=True)
    assert_same_bits(got, (data, scales, outer.view(-1)))
    for block in ("nvfp4", "nvfp4_16x16"):
        outer = reference_scales.outer_of(amax)
        expected = reference_scales.best_scales(reference._blocks(x, formats.get(block)), outer)
        found = kernels.best_scales(x.to(DEVICE), formats.get(block), outer.view(-1).to(DEVICE))
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
def test_a_large_weight():
    for dtype in DTYPES:
        for name in ("nvfp4", "nvfp4_16x16"):
            check(torch.randn(1024, 4096).to(dtype), name, "swizzled")
