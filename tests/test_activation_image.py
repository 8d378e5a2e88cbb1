"""The image of the activations, bit for bit.

As in test_scaled_mm_kernels.py: the kernel on a GPU, and in Triton's interpreter in a process of its own.
"""

import in_interpreter
import pytest
import torch
from test_scaled_mm_kernels import DEVICE, INTERPRETING, gpu, quantized

from fp4compile import formats, reference

if INTERPRETING or torch.cuda.is_available():
    from fp4compile.templates import scaled_mm as kernels
    from fp4compile.templates.problem import problem_of


def image_of(x: torch.Tensor, rows: int, matrices: int) -> torch.Tensor:
    """[matrices, rows, 64] of x [m, k], as the module's text says it."""
    padded = x.new_zeros(rows, matrices * 64)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.view(rows, matrices, 4, 2, 2, 4)  # of a row: matrices, blocks, halves, quarters, elements
    units = blocks.permute(1, 0, 3, 5, 2, 4).reshape(matrices, rows, 8, 8)
    image = torch.empty_like(units)
    for row in range(rows):
        for unit in range(8):
            image[:, row, unit ^ row % 8] = units[:, row, unit]
    return image.view(matrices, rows, 64)


def check(a, rows: int, steps: int):
    """The image of an operand, as `quantized` gives it, in memory in which every bit was set."""
    x = a[0] if a[3] is None else reference.expand(*a[:2], a[3]).half()
    b = quantized(torch.randn(16, x.shape[1]), formats.get("nvfp4"))
    there = [t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in (*a, *b, None)]
    got = kernels._image(problem_of(*there, torch.float32), rows, steps).cpu()
    phases = -(-x.shape[1] // (128 * steps))
    expected = image_of(x, rows, 2 * steps * phases)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    nans = expected.isnan()
    assert torch.equal(got.isnan(), nans)
    assert torch.equal(got.view(torch.int16)[~nans], expected.view(torch.int16)[~nans])


@pytest.fixture
def poisoned_memory():
    torch.use_deterministic_algorithms(True, warn_only=True)  # what is allocated has every bit set
    yield
    torch.use_deterministic_algorithms(False)


SHAPES = [(16, 16, 256, 2), (9, 16, 320, 2), (32, 32, 128, 1), (17, 32, 64, 2), (64, 64, 192, 1), (50, 64, 576, 2)]


@gpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("m", "rows", "k", "steps"), SHAPES)
@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16, "nvfp4", "nvfp4_rowwise", "nvfp4_16x16"], ids=str)
def test_image(a, m, rows, k, steps):
    """Whole phases and ragged ones, missing rows; both layouts of scales, a block that is not a number."""
    x = torch.randn(m, k)
    if isinstance(a, torch.dtype):
        check(quantized(x, a), rows, steps)
        return
    x[m // 2, 16:32] = torch.nan
    for layout in ("linear", "swizzled"):
        check(quantized(x, formats.get(a), layout), rows, steps)


@gpu
@pytest.mark.usefixtures("poisoned_memory")
def test_image_of_every_16_bits():
    """Plain activations keep their bits; negative zeros, infinities and what is not normal among them."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(64, 1024)
    for dtype in (torch.bfloat16, torch.float16):
        check((bits.view(dtype), None, None, None), 64, 2)


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)
