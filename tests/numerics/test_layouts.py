"""The swizzled layout of block scales: where each scale lies, padding, and the way back."""

import pytest
import torch

from fp4compile.formats.layouts import ceil_div, from_swizzled, swizzled_numel, to_swizzled

SHAPES = [(1, 1), (1, 5), (7, 3), (32, 4), (128, 4), (129, 4), (128, 5), (200, 9), (300, 17)]


def scales_of(*shape, dtype=torch.uint8):
    """Bytes 1 to 251 in order: none is zero, and bytes a row or a tile apart differ (251 is prime)."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 251 + 1).to(torch.uint8).view(dtype).reshape(shape)


def swizzled_by_the_formula(scales):
    """The byte formula written out: where (r, c) lies."""
    rows, cols = scales.shape
    tiles_across = -(-cols // 4)
    out = torch.zeros(-(-rows // 128) * tiles_across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile = (r // 128) * tiles_across + c // 4
            row, col = r % 128, c % 4
            out[tile * 512 + (row % 32) * 16 + (row // 32) * 4 + col] = scales[r, c]
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_to_swizzled_places_each_byte_by_the_formula_and_pads_with_zeros(shape):
    scales = scales_of(*shape)
    swizzled = to_swizzled(scales)
    assert swizzled.shape == (swizzled_numel(*shape),)
    assert torch.equal(swizzled, swizzled_by_the_formula(scales))
    assert (swizzled == 0).sum() == swizzled_numel(*shape) - scales.numel()


def test_literal_positions():
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    scales[0, 1], scales[1, 0], scales[32, 0], scales[0, 4], scales[128, 0], scales[255, 7] = range(1, 7)
    swizzled = to_swizzled(scales)
    where = {byte: (swizzled == byte).nonzero().item() for byte in range(1, 7)}
    assert where == {1: 1, 2: 16, 3: 4, 4: 512, 5: 1024, 6: 2047}


@pytest.mark.parametrize("shape", SHAPES)
def test_to_swizzled_equals_torchao(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scales = scales_of(*shape)
    assert torch.equal(to_swizzled(scales), utils.to_blocked(scales).flatten())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 130, 5), (3, 1, 1), (0, 4), (4, 0), (0, 128, 4), (2, 0, 3)])
def test_from_swizzled_is_the_inverse(shape, dtype):
    scales = scales_of(*shape, dtype=dtype)
    swizzled = to_swizzled(scales)
    back = from_swizzled(swizzled, *shape[-2:])
    assert (swizzled.dtype, back.dtype, back.shape) == (dtype, dtype, scales.shape)
    assert swizzled.is_contiguous() and back.is_contiguous()
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_each_matrix_of_a_batch_is_swizzled_alone():
    scales = scales_of(2, 3, 130, 5)
    swizzled = to_swizzled(scales)
    assert swizzled.shape == (2, 3, swizzled_numel(130, 5))
    for i in range(2):
        for j in range(3):
            assert torch.equal(swizzled[i, j], swizzled_by_the_formula(scales[i, j]))


def test_non_contiguous_scales():
    scales = scales_of(9, 140).t()
    assert torch.equal(to_swizzled(scales), swizzled_by_the_formula(scales))


@pytest.mark.parametrize("numel", [0, 511, 513, 1024, 12])
def test_a_wrong_length_is_refused(numel):
    with pytest.raises(ValueError, match=f"3x4 .*512 bytes, got {numel}"):
        from_swizzled(torch.zeros(numel, dtype=torch.uint8), 3, 4)


def test_sizes():
    assert [ceil_div(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    shapes = [(1, 1), (128, 4), (129, 4), (128, 5), (0, 4), (4, 0)]
    assert [swizzled_numel(*shape) for shape in shapes] == [512, 512, 1024, 1024, 0, 0]
