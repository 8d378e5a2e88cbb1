"""FP8 blocks in the simulator of their PTX: `gemm_float8_sm90`, which is written in Gluon, and the kernels of
SM100 that multiply them as MXFP8, where their scales are powers of two."""

from dataclasses import replace

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.grouping import Groups
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm import float8_sm90
from fp4compile.templates.multiply import multiply, multiply_together
from fp4compile.templates.problem import problem_of
from fp4compile.templates.quantize.lay_out import lay_out_as_mx
from ptxsim.run import Schedule
from tests.helpers.by_hand import assert_rounds_to

ROWS, WIDTH, OFFSETS = 400, 304, (3, 3, 303, 390)  # an empty group, and rows of no group
_HOPPER = ["write_table", "gemm_float8_sm90"]
ON_HOPPER = (90, "float8_1x128", "float8_128x128", _HOPPER)
ROW_SCALES = (90, "float8_rowwise", "float8_rowwise", _HOPPER)
TENSOR_SCALES = (90, "float8_tensor", "float8_tensor", _HOPPER)
POWERS, SQUARES = "e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"
AS_MX = (100, POWERS, SQUARES, ["lay_out_scales", "lay_out_scales", "gemm_block_scaled_sm100"])


def quantised(x, name, dim=-1, offs=None, each_matrix=False):
    data, scales, outer = torch.ops.fp4compile.quantize(x, name, [dim], offs=offs, each_matrix=each_matrix)
    fmt = formats.get(name)
    return Operand(data, scales if fmt.scale else None, outer if fmt.outer else None, fmt)


def values(x, group=0):
    """The values of an operand; where groups have scales of their own, those of a group are right."""
    found = reference.dequantize_blocks(x.data, x.scales, x.format).double()
    if x.outer is None:
        return found
    of_all = not x.outer.dim() or x.outer.shape[:-1] == found.shape[:-1]
    return found * (x.outer if of_all else x.outer[group]).double()


def check(got, left, right, dtype, bias=0.0):
    """got is the product, rounded once, and NaN where that is NaN.

    Before, float32 rounds the sums of 32 elements, their scaling, the sum of parts, and the bias.
    """
    exact, size = left @ right + bias, left.abs() @ right.abs() + abs(bias)
    roundings = left.shape[1] // 32 + 6
    finite = exact.isfinite()
    assert torch.equal(got.isnan(), ~finite)
    assert_rounds_to(got.double()[finite], exact[finite], dtype, roundings * 2.0**-24 * size[finite])


@pytest.mark.parametrize(
    ("sm", "rows_format", "squares", "kernels"), [ON_HOPPER, ROW_SCALES, TENSOR_SCALES, AS_MX],
    ids=["90", "90-rows", "90-tensor", "100"],
)  # fmt: skip
@pytest.mark.parametrize("along", ["rows", "contraction"])
def test_groups(along, sm, rows_format, squares, kernels):
    """One group's NaN reach no other one, though tiles and stages reach into the next one; the results are right."""
    torch.manual_seed(0)
    offs, x, y = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(ROWS, WIDTH), torch.randn(ROWS, 130)
    x[OFFSETS[2] : OFFSETS[3]] = y[OFFSETS[2] : OFFSETS[3]] = float("nan")
    if along == "rows":
        a = quantised(x, rows_format, offs=offs)
        b = quantised(torch.randn(len(OFFSETS), 136, WIDTH) * torch.rand(136, 1), squares, each_matrix=True)
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    else:
        a, b = (quantised(each, rows_format, -2, offs) for each in (x[:, :136], y * torch.rand(130)))
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs, rows=ROWS)
    target = Target(sm, multiprocessors=3)
    kernel = float8_sm90.NAME if sm == 90 else None  # torch's library would multiply groups of rows with row scales
    simulator = LaunchSimulator(target, Schedule(1))
    with simulator.running():
        got = multiply(given, choose(problem_of(given, target), preferred=kernel))
    assert [launch.kernel.__name__ for launch in simulator.launches] == kernels
    for i, (start, end) in enumerate(zip((0, *OFFSETS), OFFSETS, strict=False)):
        if along == "rows":
            check(got[start:end], values(a, i)[start:end], values(b, i)[i].T, torch.bfloat16)
        else:
            first = int(Groups.of(offs, ROWS).padded_starts[i])
            part = slice(first, first + end - start)
            check(got[i], values(a, i)[:, part], values(b, i)[:, part].T, torch.bfloat16)
    assert got.isnan().any() and got.isfinite().any()
    assert along == "contraction" or not got[OFFSETS[-1] :].any()


@pytest.mark.parametrize("config", [float8_sm90._ONE, float8_sm90._TWO, float8_sm90._THREE], ids=str)
@pytest.mark.parametrize("formats_of", [ON_HOPPER[1:3], ROW_SCALES[1:3]], ids="·".join)
@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_any_number_of_warpgroups(blocks, formats_of, config):
    """The same results of tiles of 64, 128 and 192 rows, of short ones, and of several tiles of a program.

    A stage has two blocks: with three of them, the last one of a tile is zeros.
    """
    torch.manual_seed(0)
    offs, target, width = torch.tensor(OFFSETS, dtype=torch.int32), Target(90, multiprocessors=3), 128 * blocks - 80
    a = quantised(torch.randn(ROWS, width), formats_of[0], offs=offs)
    b = quantised(torch.randn(len(OFFSETS), 136, width) * torch.rand(136, 1), formats_of[1], each_matrix=True)
    given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    choice = choose(problem_of(given, target), preferred=float8_sm90.NAME)
    with LaunchSimulator(target, Schedule(2)).running():
        got = multiply(given, replace(choice, config=config))
    for i, (start, end) in enumerate(zip((0, *OFFSETS), OFFSETS, strict=False)):
        check(got[start:end], values(a, i)[start:end], values(b, i)[i].T, torch.bfloat16)
    assert not got[OFFSETS[-1] :].any()


@pytest.mark.parametrize("formats_of", [ON_HOPPER[1:3], ROW_SCALES[1:3]], ids="·".join)
def test_one_row_and_one_block(formats_of):
    """Triton makes constants of sizes that are 1: the products are the same."""
    torch.manual_seed(0)
    offs, target = torch.tensor([0, 1, 1], dtype=torch.int32), Target(90)
    a = quantised(torch.randn(1, 128), formats_of[0], offs=offs)
    b = quantised(torch.randn(3, 136, 128), formats_of[1], each_matrix=True)
    given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    with LaunchSimulator(target, Schedule(1)).running():
        got = multiply(given, choose(problem_of(given, target), preferred=float8_sm90.NAME))
    check(got, values(a, 1), values(b, 1)[1].T, torch.bfloat16)


def test_many_groups():
    """Several programs write the table of tiles. Sizes from no row to six, of 70 groups, and rows of no group."""
    generator = torch.Generator().manual_seed(0)
    offs = torch.randint(0, 7, (70,), generator=generator).cumsum(0).to(torch.int32)
    rows, target = int(offs[-1]) + 5, Target(90, multiprocessors=4)
    a = quantised(torch.randn(rows, 128, generator=generator), "float8_rowwise", offs=offs)
    b = quantised(torch.randn(70, 24, 128, generator=generator), "float8_rowwise", each_matrix=True)
    given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    simulator = LaunchSimulator(target, Schedule(1))
    with simulator.running():
        got = multiply(given, choose(problem_of(given, target), preferred=float8_sm90.NAME))
    assert simulator.launches[0].grid == 3
    for i, (start, end) in enumerate(zip((0, *offs.tolist()), offs.tolist(), strict=False)):
        check(got[start:end], values(a, i)[start:end], values(b, i)[i].T, torch.bfloat16)
    assert not got[offs[-1] :].any()


@pytest.mark.parametrize(("shape", "names", "dtype", "biased"), [
    ((70, 136, 304), ("float8_rowwise", "float8_rowwise"), torch.float16, True),
    ((200, 130, 144), ("float8_tensor", "float8_rowwise"), torch.float32, True),  # columns that TMA does not store
    ((65, 24, 128), ("float8_rowwise", "float8_tensor"), torch.bfloat16, False),
    ((66, 40, 400), ("float8_1x128", "float8_128x128"), torch.float16, True),
], ids=str)  # fmt: skip
def test_dense_on_hopper(shape, names, dtype, biased):
    """What no library computes: results in other types than bf16, and numbers of columns."""
    torch.manual_seed(0)
    (m, n, k), target = shape, Target(90, multiprocessors=3)
    a, b = (quantised(torch.randn(rows, k) * torch.exp2(torch.randint(-4, 4, (rows, 1))), name)
            for rows, name in zip((m, n), names, strict=True))  # fmt: skip
    bias = torch.randn(n) if biased else None
    simulator = LaunchSimulator(target, Schedule(1))
    with simulator.running():
        got = multiply(Arguments.of(a, b, bias, dtype))
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["gemm_float8_sm90"]
    check(got, values(a), values(b).T, dtype, torch.zeros(n) if bias is None else bias)


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
