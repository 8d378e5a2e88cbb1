"""Products of FP4 and FP8 weights in the simulator of their PTX, which is inline and needs a GPU otherwise."""

import math
from dataclasses import replace

import pytest
import torch

from fp4compile.check.products import MatmulCase, _from_reference, exact_arguments, exact_operand
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.layouts import ceil_div, swizzled_numel, to_swizzled
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.skinny import SkinnyConfig
from fp4compile.templates.gemm.wgmma_launches_sm90 import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from fp4compile.templates.multiply import multiply, multiply_together
from fp4compile.templates.problem import problem_of
from ptxsim.run import Schedule
from tests.helpers import choices, fp8_operands
from tests.helpers.by_hand import assert_rounds_to


# Activations, rows, columns and K of the product, its epilogue; rows of a tile, warps, parts of a warp, stages, steps a
# stage, split, tiles walked together, buffers of A.
@pytest.mark.parametrize(("a", "shape", "epilogue", "form"), [
    # Three tiles of A, the last one short; two warpgroups share A; more stages of A than buffers, K in two parts.
    (None, (70, 256, 1408), "bias", (32, 8, 2, 2, 1, 2)),
    # Rows of B and steps of A that end early; codes as activations; single columns are stored.
    ("nvfp4", (20, 119, 448), "bias", (16, 4, 1, 3, 2, 1)),
    # Two tiles of columns. An operand of the epilogue comes to the L2 cache first, and nothing beyond its end.
    (None, (100, 136, 64), "gated", (72, 4, 1, 2, 1, 1, 8, 3)),
    # 48 rows, of which swizzled A has 64.
    (None, (45, 128, 1280), "bias", (48, 8, 1, 2, 2, 4)),
], ids=["two parts", "ragged", "operand", "48 rows"])  # fmt: skip
def test_tiles_of_wgmma(a, shape, epilogue, form, monkeypatch):
    def config(problem):
        return with_shared_memory(WgmmaConfig(*form), problem, needed_bytes)

    choices.configured(monkeypatch, "wgmma_sm90", config)
    x = exact_arguments(MatmulCase(a, "nvfp4", *shape, epilogue=epilogue))
    simulator = LaunchSimulator(Target(90), Schedule(1))
    with simulator.running():
        got = multiply(x, choose(problem_of(x, simulator.target), "wgmma_sm90"))
    swizzle = "swizzle_a_sm90" if a is None else "swizzle_codes_sm90"
    assert {swizzle, "gemm_wgmma_sm90"} <= {launch.kernel.__name__ for launch in simulator.launches}
    assert _from_reference(got, x, exact=True) == []


SCALES = (0, 1, 126, 127, 128, 200, 252, 255)  # bytes of E8M0: up to 1 (127) a weight's scale takes no detour


@pytest.mark.parametrize(("rows", "layout", "sm"), [
    (1, "linear", 80), (1, "swizzled", 90), (2, "swizzled", 80), (2, "linear", 90), (8, "linear", 80),
    (8, "swizzled", 90), (20, "linear", 90), (20, "swizzled", 90),
])  # fmt: skip
def test_every_scale_of_mxfp4(rows, layout, sm):
    """gemv, skinny and wgmma: the smallest and the largest scales, and NaN, which stays in its row of the weights.

    Each row of B has one scale. Large activations meet small scales and the other way round, so sums stay in range. The
    large ones are positive, and so is a row whose scale is NaN: its sum would be infinite if the scale were.
    """
    n, k = 136, 448 if rows > 2 else 512  # 14 scales in a row: every second row begins in the middle of a word
    generator = torch.Generator().manual_seed(rows)
    bytes_of = torch.tensor(SCALES).repeat(n // len(SCALES)).view(n, 1).expand(n, k // 32).to(torch.uint8)
    bytes_of = torch.where((torch.arange(n) == 8)[:, None] & (torch.arange(k // 32) > 3), 255, bytes_of)
    scales = bytes_of.contiguous().view(torch.float8_e8m0fnu)
    scales = to_swizzled(scales) if layout == "swizzled" else scales
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator)
    codes[SCALES.index(255)] = 0x22
    fmt = formats.get("mxfp4")
    b = Operand(codes.view(fmt.data_dtype), scales, None, fmt)
    simulator = LaunchSimulator(Target(sm), Schedule(1))
    of_row = bytes_of[:, -1]  # row 8 is NaN in some blocks
    for power, rows_of_b in ((20, (of_row < 129) | (of_row == 255)), (-30, of_row > 125)):
        x = torch.randint(1 if power > 0 else -3, 4, (rows, k), generator=generator).to(torch.bfloat16) * 2.0**power
        arguments = Arguments.of(Operand(x), b, None, torch.float32)
        with simulator.running():
            got = multiply(arguments, choose(problem_of(arguments, simulator.target)))
        weights = reference.dequantize(codes, bytes_of.view(torch.float8_e8m0fnu), None, fmt, k, torch.float64)
        wanted = (x.double() @ weights.t()).float()
        assert wanted.isnan().any() and not wanted[:, rows_of_b].isinf().any()
        torch.testing.assert_close(got[:, rows_of_b], wanted[:, rows_of_b], rtol=0, atol=0, equal_nan=True)
    assert {launch.kernel.__name__ for launch in simulator.launches} - {"swizzle_a_sm90"} == {
        1: {"gemv"}, 2: {"gemv"}, 8: {"gemm_skinny"}, 20: {"gemm_wgmma_sm90"}
    }[rows]  # fmt: skip


# Rows, columns and K of the product, the formats of A and B, the dtype of the result, the GPU.
FP8_CASES = [
    (1, 64, 256, torch.bfloat16, "float8_rowwise", torch.float32, 89),
    (3, 41, 192, torch.float16, "float8_tensor", torch.float16, 100),  # columns and steps that end early
    (8, 140, 1408, torch.bfloat16, "float8_1x128", torch.float32, 90),  # eleven steps for four warps
    (5, 300, 384, torch.bfloat16, "float8_128x128", torch.bfloat16, 90),  # columns of three squares
    (2, 8200, 256, "float8_rowwise", "float8_rowwise", torch.float32, 90),  # tiles of 32 columns
    (4, 8192, 512, "float8_1x128", "float8_128x128", torch.bfloat16, 90),
    (7, 137, 384, "float8_1x128", "float8_1x128", torch.float32, 90),
    (1, 40, 64, "float8_tensor", "float8_rowwise", torch.bfloat16, 90),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: "-".join(map(str, case)))
def test_streamed_fp8(case, seed):
    """All codes of E4M3; scales of very different sizes; NaN of a row of A or of a column stay there; a bias."""
    m, n, k, a_format, b_format, dtype, sm = case
    generator = torch.Generator().manual_seed(m)
    a, b = (fp8_operands.operand(*each, generator) for each in ((m, k, a_format), (n, k, b_format)))
    bias = torch.randn(n, generator=generator)
    if m > 1:
        codes = a.data if a.format is None else a.data.view(torch.uint8)
        codes[m - 1] = torch.nan if a.format is None else 0x7F
    b.data.view(torch.uint8)[n - 1, k - 1] = 0xFF
    given = Arguments.of(a, b, bias, dtype)
    simulator = LaunchSimulator(Target(sm, multiprocessors=2), Schedule(seed))
    with simulator.running():
        got = multiply(given)
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["gemm_skinny"]
    left, right = fp8_operands.values(a), fp8_operands.values(b)
    exact, size = left @ right.T + bias.double(), left.abs() @ right.abs().T + bias.abs().double()
    exact, size, found = exact[: m - (m > 1), : n - 1], size[: m - (m > 1), : n - 1], got[: m - (m > 1), : n - 1]
    # Sums of 16 products, of 32 in a lane's two sums, of a warp's steps and of the warps, scales, and the bias.
    assert_rounds_to(found.double(), exact, dtype, (k // 16 + 12) * 2.0**-24 * size)
    assert got[:, n - 1].isnan().all() and (m == 1 or got[m - 1].isnan().all())


def test_streamed_fp8_of_one_a():
    """Three weights in one launch, among them two whose columns fill no tile."""
    generator = torch.Generator().manual_seed(0)
    a = fp8_operands.operand(2, 256, "float8_1x128", generator)
    several = [fp8_operands.operand(n, 256, "float8_128x128", generator) for n in (130, 16, 40)]
    simulator = LaunchSimulator(Target(90, multiprocessors=1), Schedule(1))
    with simulator.running():
        results = multiply_together([Arguments.of(a, b, None, torch.float32) for b in several])
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["gemm_skinny"]
    for got, b in zip(results, several, strict=True):
        left, right = fp8_operands.values(a), fp8_operands.values(b)
        exact, size = left @ right.T, left.abs() @ right.abs().T
        assert_rounds_to(got.double(), exact, torch.float32, 28 * 2.0**-24 * size)


# Format of the tokens; sizes of groups, and rows of no group; layout of the scales of the weights, or their format, how
# global scales of tokens and of weights are shared; columns and K; rows of a tile, warps, parts of a warp, stages,
# steps a stage, split, tiles walked together, buffers of A, rows of a narrow tile; or skinny's configuration.
@pytest.mark.parametrize(("tokens", "sizes", "left", "layout", "outer", "shape", "form"), [
    # Two tiles of rows of B, tiles of A that are walked two together, more stages of A than buffers.
    (None, (0, 1, 65, 3, 0), 2, "swizzled", ("row", "group"), (128, 1408), (16, 4, 1, 2, 1, 1, 2)),
    # Rows of B and steps of A that end early; more groups than lanes; scales of 16 x 16 elements; three buffers; narrow
    # tiles of a whole group, of a group's end, and of rows of no group.
    (None, (3, *[0] * 31, 238, 0, 0), 33, "square", ("group", "row"), (136, 448), (72, 4, 1, 3, 1, 1, 8, 3, 32)),
    ("nvfp4", (3, 0, 33, 1), 1, "swizzled", ("row", "group"), (64, 192), (16, 4, 1, 2, 2)),
    (None, (0, 40, 3), 2, "mxfp4", (None, None), (72, 448), (32, 4, 1, 2, 1, 1, 8, 3, 16)),
    # Two steps a stage and two stages of B, so that each step has its own buffer; buffers of A are used again.
    (None, (0, 40, 7, 33), 2, "mxfp4", (None, None), (136, 1088), (32, 8, 1, 2, 2, 1, 8, 3, 16)),
    # One program computes all tiles.
    (None, (0, 9, 1), 2, "mxfp4", (None, None), (72, 1088), SkinnyConfig(8, 1, 4, 2, 1, 1)),
    (None, (5, 0, 9, 1), 2, "swizzled", (None, "group"), (104, 1088), SkinnyConfig(8, 2, 4, 1, 1, 1)),
], ids=["walked", "ragged", "codes", "mxfp4", "mxfp4, two steps", "few rows of mxfp4", "few rows"])  # fmt: skip
def test_groups_of_wgmma(tokens, sizes, left, layout, outer, shape, form, monkeypatch):
    """Bits of the reference. NaN of tokens or weights of one group reach no other; rows of no group are zeros."""
    a, b = operands_of_groups(tokens, len(sizes), sum(sizes) + left, *shape, layout, outer)
    for values, nan in ((a.data, torch.nan),) if tokens is None else ((a.scales.view(torch.uint8), 0x7F),):
        values[: sizes[0]] = values[-left:] = nan
    b.scales.view(torch.uint8)[-1:] = 0xFF  # NaN
    if b.outer is not None:
        b.outer[-1] = torch.nan
    offs = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = Arguments.of(a, b, None, torch.bfloat16, offs=offs, rows=len(a.data))
    few = isinstance(form, SkinnyConfig)
    if few:  # of one program: several write one table, the same values, which the simulator calls a race
        choices.configured(monkeypatch, "streaming", form)
    else:
        choices.configured(monkeypatch, "wgmma_sm90",
                           lambda problem: with_shared_memory(WgmmaConfig(*form), problem, needed_bytes))  # fmt: skip
    simulator = LaunchSimulator(Target(90), Schedule(1))
    with simulator.running():
        got = multiply(x, choose(problem_of(x, simulator.target), "streaming" if few else "wgmma_sm90"))
    groups = [launch.constants.get("GROUPS") for launch in simulator.launches]
    assert groups == ([None] if few else [len(sizes)] * 2)
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, len(a.data), torch.bfloat16)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def operands_of_groups(tokens, groups, rows, n, k, layout, outer):
    """Tokens and weights of which every sum is exact in float32."""
    fmt = formats.get({"square": "nvfp4_16x16", "mxfp4": "mxfp4"}.get(layout, "nvfp4"))
    of_each = {"swizzled": (swizzled_numel(n, k // 16),), "mxfp4": (n, k // 32)}.get(layout, (ceil_div(n, 16), k // 16))
    codes = torch.empty(groups, n, k // 2, dtype=fmt.data_dtype, device="meta")
    a = exact_operand(Operand(torch.empty(rows, k, dtype=torch.bfloat16, device="meta")), 100)
    if tokens is not None:
        of_tokens = formats.get(tokens)
        scales = torch.empty(rows, k // 16, dtype=of_tokens.scale_dtype, device="meta")
        a = exact_operand(
            Operand(torch.empty(rows, k // 2, dtype=of_tokens.data_dtype, device="meta"), scales, None, of_tokens), 100
        )
    b = exact_operand(Operand(codes, torch.empty(groups, *of_each, dtype=fmt.scale_dtype, device="meta"), None, fmt), 0)
    shapes = [{"tensor": (), "group": (groups,), "row": (*x.data.shape[:-1], 1)}.get(of)
              for x, of in zip((a, b), outer, strict=True)]  # fmt: skip
    return [replace(x, outer=None if shape is None else 2.0 ** (torch.arange(math.prod(shape)) % 5 - 2).view(shape))
            for x, shape in zip((a, b), shapes, strict=True)]  # fmt: skip
