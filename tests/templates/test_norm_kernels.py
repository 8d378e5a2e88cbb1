"""Quantisers that find the statistics of rows themselves: the kernels against the reference, bit for bit.

A sum depends on its order, and these kernels have their own (`device.row_prologue`). So the statistics that a kernel
stores are held to a float64 sum within the rounding of float32, and all else to the reference of the steps after those
very statistics, to the last bit. Where every sum is exact, no statistic is taken from the kernel.

As in test_quantize_kernels.py: on a GPU, and in Triton's interpreter in a process of its own.
"""

import pytest
import torch

from fp4compile import _compat
from fp4compile.formats import formats
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.launch import dry_run
from fp4compile.templates.quantize import row_on_chip
from tests.helpers.hard_inputs import NAMES, NON_FINITE, hard_input
from tests.helpers.kernels import INTERPRETING, gpu, spilled_bytes
from tests.helpers.norms import (
    BF16,
    CENTRED,
    GEMMA,
    LAYER,
    MAXIMUM,
    RESIDUAL,
    RMS,
    SUM,
    assert_same_bits,
    check,
    operands_of,
    run,
)

FORMATS = ("nvfp4_one_level", "nvfp4", "nvfp4_rowwise", "mxfp8", "float8_rowwise")
STEPS = {"rms": RMS, "gemma": GEMMA, "residual": RESIDUAL, "sum": SUM, "layer": LAYER, "maximum": MAXIMUM}


@gpu
@pytest.mark.parametrize("format", FORMATS)
def test_hard_inputs(format):
    """NaN, infinities, zeros and ties, in the statistics and in what follows."""
    block = formats.get(format).block_cols if formats.get(format).block else 16
    check(RMS, torch.cat([hard_input(name, (1, 96), BF16, block) for name in NAMES]), format)
    check(LAYER, torch.cat([hard_input(name, (1, 96), BF16, block) for name in NON_FINITE]), format)


@gpu
@pytest.mark.parametrize("name", STEPS)
def test_steps_and_shapes(name):
    """Rows that fill a tile and others; of any length; several matrices."""
    steps = STEPS[name]
    odd, even, whole, batch = (torch.randn(shape).bfloat16() for shape in ((3, 41), (3, 72), (2, 512), (2, 3, 48)))
    check(steps, even, "nvfp4_rowwise")
    check(steps, odd, "nvfp4")
    check(steps, odd, "mxfp8")
    check(steps, whole, "float8_rowwise")
    check(steps, batch.half(), "nvfp4")


@gpu
def test_swizzled_scales():
    """Of several matrices, whose padding the programs beyond their rows fill."""
    check(LAYER, torch.randn(2, 3, 48).bfloat16(), "mxfp8", layout="swizzled")
    check(LAYER, torch.randn(3, 48).half(), "nvfp4_rowwise", layout="swizzled")


@gpu
def test_exact_sums():
    """Of small integers, whose sums are exact in any order: nothing is taken from the kernels."""
    first = torch.randint(-8, 9, (5, 128)).bfloat16()
    for format in FORMATS:
        for tensor in (first, first[:, :64] - 9.0):
            stored = ["s0 float32", "s3 bfloat16"]
            expected = QUANTIZE(tensor, format, prologue=CENTRED, stored=stored)
            assert_same_bits(run([tensor], CENTRED, format, stored), expected)


@gpu
def test_programs_beyond_the_rows(monkeypatch):
    """They have an amax of 0, though of zeros the steps make more than of these rows, and write it."""
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: torch.full(shape, 2**30 + 2**29, **options))
    first, steps = torch.randint(-9, -6, (3, 512)).bfloat16(), ["mean aux0", "mul s0 0.5", "add aux0 8.0", "add s2 s1"]
    assert_same_bits(run([first], steps, "nvfp4"), QUANTIZE(first, "nvfp4", prologue=steps))


@gpu
def test_what_is_stored():
    """The residual stream, the norm and statistics, by the kernel that finds these; the next one reads the norm."""
    batch, odd = torch.randn(2, 3, 48).bfloat16(), torch.randn(3, 41).bfloat16()
    for format in FORMATS:
        check(RESIDUAL, batch, format, stored=["s0 bfloat16", "s6 bfloat16"])
        check(SUM, batch, format, stored=["s0 bfloat16"])
    check(SUM, torch.randn(2, 512).bfloat16(), "nvfp4", stored=["s0 bfloat16", "s5 bfloat16"])
    check(RESIDUAL, batch.half(), "nvfp4", stored=["s0 float16", "s4 bfloat16"])
    check(RESIDUAL, odd, "nvfp4", stored=["s6 bfloat16", "s4 bfloat16"])


@gpu
@pytest.mark.parametrize("name", STEPS)
def test_rows_that_lie_apart(name):
    """The first operand is a slice, with NaN beside it. What is stored of it is contiguous, and is read so."""
    around = torch.full((2, 3, 96), torch.nan).bfloat16()
    first = around[..., 16:64]
    first.copy_(torch.randn(2, 3, 48))
    stored = ["s0 bfloat16"] if name in ("residual", "sum") else []
    for operand in (first, first[0]):
        for format in ("nvfp4", "nvfp4_rowwise"):
            check(STEPS[name], operand, format, stored=stored)


@gpu
def test_other_ways_to_quantise():
    """A given global scale, random bits, values in the place of codes."""
    batch = torch.randn(2, 3, 64).bfloat16()
    for format in ("nvfp4", "nvfp4_rowwise"):
        check(RMS, batch, format, values=[-1])
        check(RMS, batch, format, outer=torch.tensor(0.25))
    check(RMS, batch, "nvfp4_rowwise", outer=torch.rand(2, 3, 1) + 0.5)
    if INTERPRETING:  # on SM100 random bits are the hardware's
        check(RMS, batch, "nvfp4_rowwise", seed=torch.tensor(3))
        check(RMS, batch, "nvfp4_te", seed=torch.tensor(3))


@gpu
def test_few_rows_and_many():
    """One row, which has the scale of the tensor; no row; more rows than an amax has partial maxima."""
    for rows, cols in ((1, 32), (0, 32), (3, 1), (1, 1)):
        for format in ("nvfp4", "mxfp8"):
            check(RMS, torch.randn(rows, cols).bfloat16(), format)
    check(RMS, torch.randn(130, 32).bfloat16(), "nvfp4")


@gpu
def test_rows_that_do_not_fit_on_the_chip(monkeypatch):
    """PyTorch computes the norm, and kernels quantise it. Means of 256 integers are exact on every device."""
    monkeypatch.setattr(row_on_chip, "MAX_REDUCED_ROW_ON_CHIP", 128)
    for cols, kernel in ((128, "quantize_whole_rows"), (256, "quantize_rows")):
        first, stored = torch.randint(-8, 9, (5, cols)).bfloat16(), ["s3 bfloat16", "s0 float32"]
        with dry_run(Target(90)) as found:
            run([first], CENTRED, "mxfp8", stored)
        assert [launch.kernel.__name__ for launch in found] == [kernel]
        for format in FORMATS:
            expected = QUANTIZE(first, format, prologue=CENTRED, stored=stored)
            assert_same_bits(run([first], CENTRED, format, stored), expected)


@pytest.mark.skipif(INTERPRETING, reason="compiles")
@pytest.mark.parametrize(("sm", "steps", "format"), [
    (100, RESIDUAL, "nvfp4_one_level"), (100, LAYER, "nvfp4_rowwise"), (100, RMS, "nvfp4"), (90, LAYER, "mxfp8"),
], ids=["100-residual", "100-layer", "100-two-levels", "90-layer"])  # fmt: skip
def test_compiles_ahead(sm, steps, format):
    """Rows of the longest kind that fits on the chip spill no register."""
    length = row_on_chip.MAX_REDUCED_ROW_ON_CHIP
    operands = [torch.empty_like(x, device="meta") for x in operands_of(steps, torch.empty(256, 16, dtype=BF16))]
    operands = [x.new_empty((*x.shape[:-1], length)) for x in operands]
    with dry_run(Target(sm)) as found:
        first, *others = operands
        quantize_kernels(first, format, operands=others, prologue=steps, layout="swizzled")
    launch = found[0]
    compiled = _compat.compile_ahead(launch.kernel, launch.args, launch.constants, launch.num_warps, sm)
    assert spilled_bytes(compiled.asm["cubin"]) == 0
