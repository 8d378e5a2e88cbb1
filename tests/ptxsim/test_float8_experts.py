"""FP8 blocks on SM90 in the simulator of their PTX: `gemm_float8_blocks_sm90`, which is written in Gluon."""

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.multiply import multiply
from ptxsim.run import Schedule

ROWS, WIDTH, OFFSETS = 400, 300, (3, 3, 303, 390)  # an empty group, and rows of no group


def quantised(x, name, dim=-1, offs=None, each_matrix=False):
    data, scales, _ = torch.ops.fp4compile.quantize(x, name, [dim], offs=offs, each_matrix=each_matrix)
    return Operand(data, scales, None, formats.get(name))


@pytest.mark.parametrize("along", ["rows", "contraction"])
def test_groups(along):
    """One group's NaN reach no other one, though tiles and stages reach into the next one; the results are right."""
    torch.manual_seed(0)
    offs, x, y = torch.tensor(OFFSETS, dtype=torch.int32), torch.randn(ROWS, WIDTH), torch.randn(ROWS, 130)
    x[OFFSETS[2] : OFFSETS[3]] = y[OFFSETS[2] : OFFSETS[3]] = float("nan")
    if along == "rows":
        a = quantised(x, "float8_1x128")
        b = quantised(torch.randn(len(OFFSETS), 136, WIDTH), "float8_128x128", each_matrix=True)
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs)
    else:
        a, b = (quantised(each, "float8_1x128", -2, offs) for each in (x[:, :136], y))
        given = Arguments.of(a, b, None, torch.bfloat16, offs=offs, rows=ROWS)
    simulator = LaunchSimulator(Target(90, multiprocessors=3), Schedule(1))
    with simulator.running():
        got = multiply(given)
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["write_table", "gemm_float8_blocks_sm90"]
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, ROWS, torch.float32)
    assert expected.isnan().any() and expected.isfinite().any()
    torch.testing.assert_close(got.float(), expected, rtol=2**-8, atol=1e-3, equal_nan=True)
