"""Products of FP8 weights by Triton's kernel, on FP8 and on 16-bit matrix units, in the simulator."""

from dataclasses import replace

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats.operand import Arguments
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from ptxsim.run import Schedule
from tests.helpers import fp8_operands
from tests.helpers.by_hand import assert_rounds_to

# Rows, columns and K of the product, the formats of A and B, the dtype of the result, parts of K, the GPU.
CASES = [
    (9, 200, 384, "float8_1x128", "float8_128x128", torch.float32, 1, 90),  # a tile of columns that ends early
    (16, 136, 640, "float8_1x128", "float8_1x128", torch.bfloat16, 1, 90),
    (20, 264, 1152, "float8_1x128", "float8_128x128", torch.bfloat16, 2, 90),  # nine blocks in two parts
    (32, 72, 1408, "float8_1x128", "float8_1x128", torch.float32, 2, 90),
    (40, 72, 400, "float8_rowwise", "float8_rowwise", torch.float16, 1, 90),  # a step that ends early
    (64, 140, 2064, "float8_rowwise", "float8_tensor", torch.float32, 4, 90),
    (33, 300, 1024, "float8_1x128", "float8_128x128", torch.float32, 2, 90),  # columns of three squares
    (7, 140, 512, "float8_1x128", "float8_128x128", torch.float32, 2, 89),
    (140, 200, 384, "float8_1x128", "float8_128x128", torch.bfloat16, 1, 89),  # two row tiles
    (150, 136, 640, "float8_1x128", "float8_1x128", torch.float32, 1, 120),
    (9, 200, 384, torch.bfloat16, "float8_128x128", torch.float32, 1, 90),
    (20, 136, 680, torch.float16, "float8_1x128", torch.float16, 2, 90),  # a block that ends early
    (33, 140, 400, torch.bfloat16, "float8_rowwise", torch.bfloat16, 1, 90),
    (64, 264, 1152, torch.bfloat16, "float8_tensor", torch.float32, 2, 90),
    (150, 136, 500, torch.bfloat16, "float8_128x128", torch.bfloat16, 2, 90),  # rows of no whole 16 bytes
    (10, 40, 37, torch.bfloat16, "float8_1x128", torch.float32, 1, 90),
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_products(case, seed):
    """All codes of E4M3; scales of very different sizes; NaN of a row of A or of a column stay there; a bias.

    Products of 16-bit operands are exact in float32, in which their sums are rounded as those of FP8.
    """
    m, n, k, a_format, b_format, dtype, split, sm = case
    generator = torch.Generator().manual_seed(m)
    a, b = (fp8_operands.operand(*each, generator) for each in ((m, k, a_format), (n, k, b_format)))
    bias = torch.randn(n, generator=generator)
    if a.format is None:
        a.data[m - 1] = torch.nan
    else:
        a.data.view(torch.uint8)[m - 1] = 0x7F
    b.data.view(torch.uint8)[n - 1, k - 1] = 0xFF
    given, target = Arguments.of(a, b, bias, dtype), Target(sm, multiprocessors=2)
    choice = choose(problem_of(given, target))
    assert choice.kernel == ("float8_tiles" if a.format is not None else "float8_weight_tiles")
    simulator = LaunchSimulator(target, Schedule(seed))
    with simulator.running():
        got = multiply(given, replace(choice, config=replace(choice.config, split=split)))
    names = [launch.kernel.__name__ for launch in simulator.launches]
    assert names == ["gemm_float8_tiles", *["split_k_reduction"] * (split > 1)]
    left, right = (fp8_operands.values(x)[:-1, :k] for x in (a, b))
    exact, size = left @ right.T + bias[:-1].double(), left.abs() @ right.abs().T + bias[:-1].abs().double()
    # Float32 rounds four sums of 32 elements in a block, or eight of 16; once for each block scale, each sum of a block
    # and of a part; once for each row scale, and the bias. Without block scales it rounds more sums, whose errors stay
    # below this bound, too.
    sums, scales = (4 if a.format is not None else 8), sum(x.scales is not None for x in (a, b))
    parts = -(-k // (128 * split)) + split - 1
    roundings = sums + scales + parts + sum(x.outer is not None for x in (a, b)) + 1
    assert_rounds_to(got[:-1, :-1].double(), exact, dtype, roundings * 2.0**-24 * size)
    assert got[:, n - 1].isnan().all() and got[m - 1].isnan().all()
