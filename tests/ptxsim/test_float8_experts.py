"""FP8 blocks in the simulator of their PTX: `gemm_float8_blocks_sm90`, which is written in Gluon, and the kernels of
SM100 that multiply them as MXFP8, where their scales are powers of two."""

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.multiply import multiply, multiply_together
from fp4compile.templates.quantize.lay_out import lay_out_as_mx
from ptxsim.run import Schedule
from tests.helpers.by_hand import assert_rounds_to

ROWS, WIDTH, OFFSETS = 400, 300, (3, 3, 303, 390)  # an empty group, and rows of no group
ON_HOPPER = (90, "float8_1x128", "float8_128x128", ["write_table", "gemm_float8_blocks_sm90"])
POWERS, SQUARES = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"
AS_MX = (100, POWERS, SQUARES, ["lay_out_scales", "lay_out_scales", "gemm_block_scaled_sm100"])


def quantised(x, name, dim=-1, offs=None, each_matrix=False):
    data, scales, _ = torch.ops.fp4compile.quantize(x, name, [dim], offs=offs, each_matrix=each_matrix)
    return Operand(data, scales, None, formats.get(name))


def values(x):
    return reference.dequantize_blocks(x.data, x.scales, x.format).double()


def check(got, left, right, dtype, bias=0.0):
    """got is the product, rounded once, and NaN where that is NaN.

    Before, float32 rounds the sums of 32 elements, their scaling, the sum of parts, and the bias.
    """
    exact, size = left @ right + bias, left.abs() @ right.abs() + abs(bias)
    roundings = left.shape[1] // 32 + 6
    finite = exact.isfinite()
    assert torch.equal(got.isnan(), ~finite)
    assert_rounds_to(got.double()[finite], exact[finite], dtype, roundings * 2.0**-24 * size[finite])


@pytest.mark.parametrize(("sm", "rows_format", "squares", "kernels"), [ON_HOPPER, AS_MX], ids=["90", "100"])
@pytest.mark.parametrize("along", ["rows", "contraction"])
def test_groups(along, sm, rows_format, squares, kernels):
    """One group's NaN reach no other one, though tiles and stages reach into the next one; the results are right."""
    torch.manual_seed(0)
    offs, x, y = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(ROWS, WIDTH), torch.randn(ROWS, 130)
    x[OFFSETS[2] : OFFSETS[3]] = y[OFFSETS[2] : OFFSETS[3]] = float("nan")
    if along == "rows":
        a = quantised(x, rows_format)
        b = quantised(torch.randn(len(OFFSETS), 136, WIDTH), squares, each_matrix=True)
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    else:
        a, b = (quantised(each, rows_format, -2, offs) for each in (x[:, :136], y))
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs, rows=ROWS)
    simulator = LaunchSimulator(Target(sm, multiprocessors=3), Schedule(1))
    with simulator.running():
        got = multiply(given)
    assert [launch.kernel.__name__ for launch in simulator.launches] == kernels
    left, right = values(a), values(b)
    for i, (start, end) in enumerate(zip((0, *OFFSETS), OFFSETS, strict=False)):
        if along == "rows":
            check(got[start:end], left[start:end], right[i].T, torch.bfloat16)
        else:
            first = int(Groups.of(offs, ROWS).padded_starts[i])
            part = slice(first, first + end - start)
            check(got[i], left[:, part], right[:, part].T, torch.bfloat16)
    assert got.isnan().any() and got.isfinite().any()
    assert along == "contraction" or not got[OFFSETS[-1] :].any()


@pytest.mark.parametrize(("rows", "kernels"), [
    (70, AS_MX[-1]), (5, ["lay_out_scales"] * 2 + ["gemm_skinny_block_scaled_sm100", "split_k_reduction"]),
])  # fmt: skip
def test_dense_as_mx(rows, kernels):
    """A gradient in E5M2 times weights, of sizes that fill no block and no tile, with a bias."""
    torch.manual_seed(rows)
    x = torch.randn(rows, WIDTH) * torch.exp2(torch.randint(-9, 9, (rows, 1)))
    a = quantised(x, POWERS.replace("e4m3", "e5m2"))
    b, bias = quantised(torch.randn(136, WIDTH), SQUARES), torch.randn(136)
    simulator = LaunchSimulator(Target(100), Schedule(1))
    with simulator.running():
        got = multiply(Arguments.of(a, b, bias, torch.float32))
    assert [launch.kernel.__name__ for launch in simulator.launches] == kernels
    check(got, values(a), values(b).T, torch.float32, bias)


def test_matmuls_of_one_a_in_one_launch():
    """Its scales are converted once."""
    torch.manual_seed(0)
    a = quantised(torch.randn(5, WIDTH), POWERS)
    several = [quantised(torch.randn(rows, WIDTH), SQUARES) for rows in (136, 72)]
    members = [Arguments.of(a, b, None, torch.float32) for b in several]
    simulator = LaunchSimulator(Target(100), Schedule(1))
    with simulator.running():
        together = multiply_together(members)
    assert [launch.kernel.__name__ for launch in simulator.launches] == [
        *["lay_out_scales"] * 3, "gemm_skinny_block_scaled_sm100", *["split_k_reduction"] * 2
    ]  # fmt: skip
    for got, one in zip(together, members, strict=True):
        check(got, values(one.a), values(one.b).T, torch.float32)


def e8m0(scales):
    """The bytes of float32 powers of two, by their exponents; NaN of what is no power of two from 2^-127 to 2^127."""
    mantissa, exponent = scales.double().frexp()
    fits = (mantissa == 0.5) & (exponent >= -126) & (exponent <= 128)
    return torch.where(scales == 0, 0, torch.where(fits, exponent + 126, 255)).to(torch.uint8)


@pytest.mark.parametrize(("block", "lead", "rows", "ends"), [
    ((1, 128), (), 300, None), ((1, 64), (2,), 130, None), ((32, 32), (), 70, None), ((128, 128), (3,), 257, None),
    ((1, 128), (), 300, OFFSETS), ((1, 128), (), 300, (-4, 9, 3, 900)),
])  # fmt: skip
def test_scales_become_bytes(block, lead, rows, ends):
    """Every power of two that a quantiser makes, 0, NaN, infinity, and numbers that are no power of two or negative."""
    fmt = formats.get(f"e4m3:{block[0]}x{block[1]}:float32:-:te_pow2")
    exponents = torch.arange(-127, 128).float()
    others = torch.tensor([0.0, float("nan"), float("inf"), 3.0, -2.0, 2.0**-128, 2.0**-126 * 1.5])
    some = torch.cat((torch.exp2(exponents.double()).float(), others))
    blocks = -(-len(some) // 128) + 2
    count = (*lead, -(-rows // block[0]), blocks)
    scales = some[torch.arange(torch.Size(count).numel()) * 7 % len(some)].view(count)
    offs = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    with LaunchSimulator(Target(100), Schedule(1)).running():
        got = lay_out_as_mx(scales.view(torch.int32), fmt, rows, offs)
    each = e8m0(scales).repeat_interleave(block[1] // 32, -1).repeat_interleave(block[0], -2)[..., :rows, :]
    assert torch.equal(got, reference_grouped.lay_out_rows(each.contiguous(), offs))
