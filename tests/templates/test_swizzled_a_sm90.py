"""Swizzled A bit for bit, and how the product that reads it brings it to shared memory.

The kernels are inline PTX: they run on a GPU, and in the simulator.
"""

import re
from contextlib import nullcontext

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.gemm.swizzled_a_sm90 import SwizzledA
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig
from fp4compile.templates.multiply import call_of
from tests.helpers.kernels import launches, quantized


def swizzled_a_of(x: torch.Tensor, rows: int, matrices: int) -> torch.Tensor:
    """[matrices, rows, 64] of x [m, k], as the docstring of the kernel's module says it."""
    padded = x.new_zeros(rows, matrices * 64)
    padded[: x.shape[0], : x.shape[1]] = x
    # The axes: rows, matrices, blocks, halves, quarters, elements of a quarter.
    blocks = padded.view(rows, matrices, 4, 2, 2, 4)
    units = blocks.permute(1, 0, 3, 5, 2, 4).reshape(matrices, rows, 8, 8)
    swizzled = torch.empty_like(units)
    for row in range(rows):
        for unit in range(8):
            swizzled[:, row, unit ^ row % 8] = units[:, row, unit]
    return swizzled.view(matrices, rows, 64)


def shape_of(m: int, k: int, rows: int, steps: int) -> tuple[int, int, int]:
    """Rows are whole programs of the launch; lines of the last tile end in memory."""
    lines = 16 if m <= 16 else 32
    padded, last = -(-m // lines) * lines, -(-m // rows) * rows
    return 2 * steps * -(-k // (128 * steps)) + -(-max(last - padded, 0) // padded), padded, 64


PLACES = ["simulated", pytest.param("cuda", marks=pytest.mark.gpu)]


def check(a, rows: int, steps: int, place: str):
    """Swizzled A of an operand, in memory in which every bit was set before."""
    x = a.data if a.format is None else reference.dequantize_blocks(a.data, a.scales, a.format).half()
    b = quantized(torch.randn(16, x.shape[1]), formats.get("nvfp4"))
    a, b = (Operand(*(part if part is None or place == "simulated" else part.to(place) for part in parts), each.format)
            for each in (a, b) for parts in [(each.data, each.scales, each.outer)])  # fmt: skip
    with LaunchSimulator(Target(90)).running() if place == "simulated" else nullcontext():
        call = call_of(Arguments.of(a, b, None, torch.float32), Target(90) if place == "simulated" else None)
        config = WgmmaConfig(rows, warps=8, parts=1, stages=2, steps_per_stage=steps)
        arrangement = SwizzledA.of(call.problem, config)
        got = arrangement.of_call(call).cpu()
    matrices, lines, _ = shape_of(*x.shape, rows, steps)
    expected = swizzled_a_of(x, lines, matrices)
    if a.format is None:
        by_operations = arrangement.by_operations(a.data.cpu())
        assert torch.equal(by_operations.view(torch.int16), expected.view(torch.int16))
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    nans = expected.isnan()
    assert torch.equal(got.isnan(), nans)
    assert torch.equal(got.view(torch.int16)[~nans], expected.view(torch.int16)[~nans])


SHAPES = [(16, 16, 256, 2), (9, 16, 320, 2), (17, 32, 64, 2), (64, 64, 192, 1), (50, 64, 576, 2), (80, 72, 320, 1),
          (200, 96, 128, 1)]  # fmt: skip


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("m", "rows", "k", "steps"), SHAPES)
@pytest.mark.parametrize("a", [torch.bfloat16, torch.float16, "nvfp4", "nvfp4_rowwise", "nvfp4_16x16"], ids=str)
def test_swizzled_a(a, m, rows, k, steps, place):
    """Whole stages and ragged ones, missing rows; both layouts of scales, a block that is not a number."""
    x = torch.randn(m, k)
    if isinstance(a, torch.dtype):
        check(quantized(x, a), rows, steps, place)
        return
    x[m // 2, 16:32] = torch.nan
    for layout in ("linear", "swizzled"):
        check(quantized(x, formats.get(a), layout), rows, steps, place)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("place", PLACES)
def test_swizzled_a_of_every_16_bits(place):
    """A plain A keeps its bits; negative zeros, infinities and subnormal numbers are among them."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(64, 1024)
    for dtype in (torch.bfloat16, torch.float16):
        check(Operand(bits.view(dtype)), 64, 2, place)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("place", PLACES)
def test_swizzled_a_of_every_code_and_scale(place):
    """Products of codes and scales are exact in fp16, the smallest ones too. Nothing but NaN differs in its bits."""
    fmt = formats.get("nvfp4")
    codes = torch.arange(8, dtype=torch.uint8)
    codes = (codes | (15 - codes) << 4).repeat(256 * 8).view(64, 256)  # each block of 16 has all 16 codes
    scales = torch.arange(256, dtype=torch.uint8).repeat(8).view(64, 32)
    check(Operand(codes.view(fmt.data_dtype), scales.view(fmt.scale_dtype), torch.ones(()), fmt), 64, 2, place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_by_number(dtype, place):
    """Negative numbers count from the end; rows of numbers out of range are NaN, and rows beyond A are zeros."""
    x, numbers = torch.randn(40, 320).bfloat16(), torch.arange(50, dtype=dtype) * 7 % 40
    numbers[10:14] = torch.tensor([-1, -40, 39, 0])
    wanted = x[numbers.long()]
    numbers[20:23], wanted[20:23] = torch.tensor([40, -41, 2**30]), torch.nan
    b = quantized(torch.randn(16, 320), formats.get("nvfp4"))
    device = "cpu" if place == "simulated" else place
    b = Operand(*(part.to(device) for part in (b.data, b.scales, b.outer)), b.format)
    with LaunchSimulator(Target(90)).running() if place == "simulated" else nullcontext():
        a = Operand(torch.empty(50, 320, dtype=torch.bfloat16, device=device))
        call = call_of(Arguments.of(a, b, None, torch.float32), Target(90) if place == "simulated" else None)
        arrangement = SwizzledA.of(call.problem, WgmmaConfig(64, warps=8, parts=1, stages=2, steps_per_stage=1))
        got = arrangement.of_call(call, (x.to(device), numbers.to(device))).cpu()
    expected = swizzled_a_of(wanted, *arrangement.shape[1::-1])
    # Every element of a row that is not there is NaN, in matrices beyond A as well.
    rows = expected.isnan().any(-1).any(0)
    assert rows.nonzero().flatten().tolist() == [20, 21, 22]
    assert torch.equal(got[:, ~rows].view(torch.int16), expected[:, ~rows].view(torch.int16))
    assert got[:, rows].isnan().all()


@pytest.mark.parametrize(("m", "rows"), [(9, 16), (17, 32), (64, 64), (300, 160)])
@pytest.mark.parametrize("a", [torch.bfloat16, "nvfp4"], ids=str)
def test_launches(a, m, rows):
    """The product is launched early, after the kernel that swizzles A, which has B as an argument."""
    swizzle, product, *_ = launches(90, a, "nvfp4", m)
    name = "swizzle_codes_sm90" if a == "nvfp4" else "swizzle_a_sm90"
    assert [swizzle.kernel.__name__, product.kernel.__name__] == [name, "gemm_wgmma_sm90"]
    assert swizzle.constants["LAUNCH_DEPENDENTS"] and product.constants["PDL"]
    assert swizzle.args["swizzled_a_ptr"] is product.args["swizzled_a_ptr"]
    for name in ("b_ptr", "b_scales_ptr"):
        assert swizzle.args[name] is product.args[name]
    steps = product.constants["STEPS_PER_STAGE"]
    shape = shape_of(m, 4096, rows, steps)
    assert tuple(swizzle.args["swizzled_a_ptr"].shape) == shape
    assert swizzle.grid * 16 == -(-shape[0] // 4) * shape[1]


@pytest.mark.parametrize(("n", "m"), [(1024, 9), (8192, 512)])
def test_b_is_on_its_way_before_swizzled_a_is_awaited(n, m):
    """Only B is read before, and nothing is written; afterwards two copies a step bring each stage of A."""
    from fp4compile import _compat
    from fp4compile.check.sass import disassemble

    swizzle, product, *_ = launches(90, torch.bfloat16, "nvfp4", m, n=n)
    swizzles, multiplies = (
        _compat.compile_ahead(one.kernel, one.args, one.constants, one.num_warps, 90).asm for one in (swizzle, product)
    )
    sass = disassemble(swizzles["cubin"]).text
    assert sass.index("PREEXIT") < sass.index("LDG")
    before, after = disassemble(multiplies["cubin"]).text.split("ACQBULK")
    before = before[
        before.rindex("SYNCS.EXCH") :
    ]  # from where the barriers are made; before that is what reserves shared memory
    assert "LDGSTS" in before and not re.search(r"UBLKCP|\bLDG\b|\bSTG\b", before)
    steps, rows = product.constants["STEPS_PER_STAGE"], product.constants["ROWS"]
    assert after.count("UBLKCP") == 3 * 2 * steps  # two stages at first, then one a stage
    expected = re.findall(r"arrive\.expect_tx\S* _, \[\S+\], (\d+)", multiplies["ptx"])
    assert expected == [str(steps * rows * 256)] * 3
    copied = re.findall(r"cp\.async\.bulk\S*\s+\[\S+\], \[\S+\], (\d+)", multiplies["ptx"])
    assert copied == [str(rows * 128)] * (3 * 2 * steps)
