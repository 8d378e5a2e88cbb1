"""Products of NVFP4 weights on SM90 in the simulator of their PTX: `gemm_wgmma_sm90`, whose inline PTX needs a GPU."""

import pytest

from fp4compile.check.product_table import Product
from fp4compile.check.run_simulated import _differences, exact_arguments
from fp4compile.check.simulate.launch import Simulator
from fp4compile.check.simulate.run import Schedule
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.heuristics import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from tests.helpers import choices


# Activations, rows, columns and K of the product; rows of a tile, warps, parts of a warp, stages, steps a stage, split.
@pytest.mark.parametrize(("a", "shape", "form"), [
    # Three tiles of A, the last one short; two warpgroups share A; more stages of A than buffers, K in two parts.
    (None, (70, 256, 1408), (32, 8, 2, 2, 1, 2)),
    # Rows of B and steps of A that end early; codes as activations; single columns are stored.
    ("nvfp4", (20, 119, 448), (16, 4, 1, 3, 2, 1)),
], ids=["two parts", "ragged"])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_tiles_of_wgmma(a, shape, form, seed, monkeypatch):
    def config(problem):
        return with_shared_memory(WgmmaConfig(*form), problem, needed_bytes)

    choices.configured(monkeypatch, "wgmma_sm90", config)
    x = exact_arguments(Product(a, "nvfp4", *shape, epilogue="bias"))
    simulator = Simulator(Target(90), Schedule(seed))
    with simulator.running():
        got = multiply(x, choose(problem_of(x, simulator.target), "wgmma_sm90"))
    assert {"swizzle_a_sm90", "gemm_wgmma_sm90"} <= {launch.kernel.__name__ for launch in simulator.launches}
    assert _differences(got, x) == []
