"""Compiled products that quantise their results, in the simulator: codes and scales of the reference, bit for bit."""

from dataclasses import replace

import pytest
import torch

from fp4compile.check.comparison import BF16, same_bits
from fp4compile.check.products import MatmulCase, amax_differences, exact_arguments
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats, reference
from fp4compile.formats.epilogue import AMAX, Epilogue
from fp4compile.hardware import Target
from fp4compile.templates.multiply import results
from ptxsim.run import Schedule
from tests.helpers.hard_inputs import stacked
from tests.ptxsim.quantised_results import differences


def test_a_result_of_two_products():
    """Gate and up, in one matrix B: each tile has columns of both. Sums and their products are exact."""
    product = MatmulCase("mxfp8", "mxfp8", 144, 256, 256, epilogue="pair", result="mxfp8")
    assert differences(product, LaunchSimulator(Target(100, 2), Schedule(1))) == []


# Operands, format of the result, columns, epilogue, weights; sizes of groups, and rows of no group.
@pytest.mark.parametrize(("operands", "result", "columns", "epilogue", "weights", "sizes", "left"), [
    (("mxfp8", "mxfp8"), "mxfp8", 256, "pair", 1, (0, 3, 137, 0, 1, 9), 10),
    (("nvfp4", "nvfp4"), "nvfp4_one_level", 128, "pair", 2, (128, 256, 128), 0),
    (("nvfp4_rowwise", "nvfp4_te"), "nvfp4", 264, "gated", 1, (0, 0, 130), 5),
    (("nvfp4", "nvfp4"), AMAX, 128, "pair", 1, (0, 3, 137, 0, 1, 9), 10),
], ids=["ragged", "whole", "empty", "ragged amax"])  # fmt: skip
def test_results_of_groups(operands, result, columns, epilogue, weights, sizes, left):
    """On two multiprocessors programs take several tiles. Static global scales; partly filled blocks and words."""
    product = MatmulCase(
        *operands, sum(sizes) + left, columns, 384, epilogue, weights, groups=len(sizes), result=result
    )
    simulator = LaunchSimulator(Target(100, 2), Schedule(1))
    assert differences(product, simulator, sizes) == []
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["gemm_block_scaled_sm100"]


def test_an_amax():
    """Of two products whose global scales lie apart; then of NaN in the last row of a tile that is partly filled."""
    x = exact_arguments(MatmulCase("nvfp4", "nvfp4", 144, 256, 256, epilogue="pair", result="amax"))
    outers = torch.zeros(8)[::4]
    outers.copy_(torch.tensor([0.5, 4.0]))
    x = x.but(b=replace(x.b, outer=outers), epilogue=Epilogue.parse(["mul product pair", "amax"], BF16, BF16))
    simulator = LaunchSimulator(Target(100, 2), Schedule(1))
    with simulator.running():
        assert amax_differences(x) == []
    steps, value = ["mul product 0.0", "add s0 aux0", "amax"], torch.zeros(144, 128, dtype=BF16)
    value[-1, -1] = torch.nan
    x = exact_arguments(MatmulCase("nvfp4", "nvfp4", 144, 128, 256, result="amax"))
    with simulator.running():
        _, maxima = results(x.but(epilogue=Epilogue.parse(steps, BF16, BF16), auxiliaries=[value]))
    assert maxima.isnan().sum() == 1 and maxima.nan_to_num().amax() == 0


@pytest.mark.parametrize(("name", "rows", "columns", "multiprocessors"), [
    ("nvfp4_one_level", 3, 272, 2), ("nvfp4", 3, 136, 0), ("mxfp8", 10, 256, 2), ("mxfp4", 3, 144, 0),
])  # fmt: skip
def test_hard_inputs(name, rows, columns, multiprocessors):
    """Both widths of tiles, partly filled and whole, with partly filled blocks; rows of codes of 8 and of 16 bytes."""
    fmt = formats.get(name)
    value = stacked((rows, columns), BF16, fmt.block_cols)
    x = exact_arguments(MatmulCase(name, name, len(value), columns, 256))
    steps = ["mul product 0.0", "add s0 1.0", "mul s1 aux0", f"quantize {name}"]
    outer = torch.tensor(0.01) if fmt.outer else None
    x = x.but(epilogue=Epilogue.parse(steps, BF16, BF16), auxiliaries=[value], result_outer=outer)
    simulator = LaunchSimulator(Target(100, multiprocessors), Schedule(1))
    with simulator.running():
        got = results(x)
    expected = reference.quantize(value, fmt, outer, "swizzled")
    assert same_bits([*got, torch.empty(0)], [*expected[:2], torch.empty(0)]) == []
    assert [launch.kernel.__name__ for launch in simulator.launches] == ["gemm_block_scaled_sm100"]
