"""The image of the activations bit for bit, and how the product that reads it brings it into shared memory.

As in test_scaled_mm_kernels.py: the kernel on a GPU, and in Triton's interpreter in a process of its own.
"""

import re

import pytest
import torch

from fp4compile import formats, reference
from tests.helpers import in_interpreter
from tests.helpers.kernels import DEVICE, INTERPRETING, gpu, launches, quantized

if INTERPRETING or torch.cuda.is_available():
    from fp4compile.templates.gemm import dispatch as kernels
    from fp4compile.templates.gemm.problem import problem_of

compiles = pytest.mark.skipif(INTERPRETING, reason="compiles")


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
    x = a[0] if a[3] is None else reference.dequantize_blocks(*a[:2], a[3]).half()
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


@compiles
@pytest.mark.parametrize(("m", "rows"), [(9, 16), (17, 32), (64, 64)])
@pytest.mark.parametrize("a", [torch.bfloat16, "nvfp4"], ids=str)
def test_launches(a, m, rows):
    """The product is launched early, behind the image, which the weights are an argument of."""
    image, product, *_ = launches(90, a, "nvfp4", m)
    assert [image.kernel.__name__, product.kernel.__name__] == ["swizzle_a_sm90", "gemm_wgmma_sm90"]
    assert image.constants["LAUNCH_DEPENDENTS"] and product.constants["PDL"]
    assert image.args["image_ptr"] is product.args["image_ptr"]
    for name in ("b_ptr", "b_scales_ptr"):
        assert image.args[name] is product.args[name]
    per = product.constants["STEPS_PER_STAGE"]
    assert tuple(image.args["image_ptr"].shape) == (2 * per * -(-4096 // (128 * per)), rows, 64)
    assert image.programs == len(image.args["image_ptr"])


@compiles
@pytest.mark.parametrize("m", [9, 32, 64])
@pytest.mark.parametrize("n", [1024, 8192, 32768])
def test_weights_are_on_their_way_before_the_image_is_awaited(n, m):
    """Nothing else is read before, and nothing written; from then on one copy brings each phase."""
    from fp4compile import _compat
    from fp4compile.cli.check_sm100 import _disassemble

    image, product, *_ = launches(90, torch.bfloat16, "nvfp4", m, None, n)
    arranged, multiplied = (
        _compat.compile_ahead(one.kernel, one.args, one.constants, one.num_warps, 90).asm for one in (image, product)
    )
    sass = _disassemble(arranged["cubin"])[0]
    assert sass.index("PREEXIT") < sass.index("LDG")
    before, after = _disassemble(multiplied["cubin"])[0].split("ACQBULK")
    before = before[before.rindex("SYNCS.EXCH") :]  # the barriers are made; what reserves shared memory stands before
    assert "LDGSTS" in before and not re.search(r"UBLKCP|\bLDG\b|\bSTG\b", before)
    assert after.count("UBLKCP") == 3  # two phases at first, then one a phase

    size = product.constants["STEPS_PER_STAGE"] * product.constants["ROWS"] * 256
    for brought in (r"arrive\.expect_tx\S* _, \[\S+\], (\d+)", r"cp\.async\.bulk\S*\s+\[\S+\], \[\S+\], (\d+)"):
        assert re.findall(brought, multiplied["ptx"]) == [str(size)] * 3
    assert image.args["image_ptr"].numel() * 2 % size == 0


@pytest.mark.skipif(INTERPRETING, reason="is the interpreter")
def test_in_the_interpreter():
    in_interpreter.assert_passes(__file__)
