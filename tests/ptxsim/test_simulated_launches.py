"""Launches of this package in the simulator of their PTX: a kernel of each kind, at the smallest shapes with all paths.

`python -m fp4compile check-sm100 --simulate` runs every launch of the gate's table.
"""

import json
from dataclasses import replace

import pytest
import torch

from fp4compile.check import simulation
from fp4compile.check.products import MatmulCase, differences, exact_arguments, reduced
from fp4compile.check.quantisers import (
    BF16,
    CONFIGURATIONS,
    GROUPED_CONFIGURATIONS,
    PROLOGUE_CONFIGURATIONS,
    quantized,
    quantized_after_steps,
)
from fp4compile.check.simulation import multiplied
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.cli.main import main
from fp4compile.hardware import Target
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.heuristics import block_scaled_configs
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from ptxsim.fault import Fault
from ptxsim.kernel_launch import UNWRITTEN
from ptxsim.run import Schedule


def on(sm=100):
    return LaunchSimulator(Target(sm), Schedule(1))


def entry(table, label, format):
    (found,) = (one for one in table if (one.label, one.format) == (label, format))
    return found


@pytest.mark.parametrize(("label", "format"), [
    ("rows", "nvfp4"), ("scaled rows", "nvfp4_rowwise"), ("stochastic rows", "nvfp4_te"), ("columns", "mxfp4"),
    ("square", "nvfp4_16x16"),
])  # fmt: skip
def test_quantisers(label, format):
    assert quantized(entry(CONFIGURATIONS, label, format), (130, 80), on()) == []


@pytest.mark.parametrize(("sm", "stochastic"), [(103, True), (90, False)])
def test_other_gpus(sm, stochastic):
    """Compute capability 9.0 has none of the conversions, and rounds by the portable form."""
    simulator = on(sm)
    assert quantized(entry(CONFIGURATIONS, "stochastic rows", "nvfp4_te"), (130, 80), simulator) == []
    assert any(opcode.startswith("cvt.rs") for opcode in simulator.tally.opcodes) == stochastic


def test_more_shared_memory_than_the_gpu_has():
    """Five stages, of 54 KB each; a GPU launches no such program."""
    x = exact_arguments(MatmulCase("nvfp4", "nvfp4", 128, 256, 256))
    choice = choose(problem_of(x, Target(100)), "block_scaled_sm100")
    with on().running(), pytest.raises(Fault, match="gemm_block_scaled_sm100: a program takes [0-9]+ bytes of shared"):
        multiply(x, replace(choice, config=replace(choice.config, bn=256, stages=5)))


def test_a_product_of_one_step():
    """By specialised warps; Triton takes an argument of 1 for a constant, and makes other code."""
    x = exact_arguments(case := MatmulCase("mxfp8", "mxfp8", 104, 64, 96, epilogue="bias"))
    choice = choose(problem_of(x, Target(100)), "block_scaled_sm100")
    assert choice.config.warp_specialize and differences(case, x, choice, on()) == []


def test_groups_and_steps():
    """Groups without rows, and rows of no group; a norm whose statistics are computed on the chip."""
    assert quantized(entry(GROUPED_CONFIGURATIONS, "grouped rows", "nvfp4"), (130, 80), on()) == []
    norm = replace(entry(PROLOGUE_CONFIGURATIONS, "a norm", "mxfp8"), shape=(8192, 1024))
    assert quantized_after_steps(norm, simulation.WHOLE, on()) == []


PRODUCTS = {
    "dense": MatmulCase("nvfp4", "nvfp4", epilogue="bias"),
    "rows of codes that are no multiples of 16 bytes": MatmulCase("nvfp4", "nvfp4", k=8192 - 16),
    "few rows, sums in parts": MatmulCase("mxfp8", "mxfp8", 16),
    "groups": MatmulCase("nvfp4", "nvfp4", 8192, 2048, 4096, groups=64),
    "dequantised": MatmulCase(None, "nvfp4", 16),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name):
    """On a GPU with two multiprocessors, so that programs walk over several tiles; sums in parts need more of them."""
    product = PRODUCTS[name]
    small = replace(reduced(product), k=min(reduced(product).k, 768 - product.k % 32))
    simulator = LaunchSimulator(Target(100, 0 if name.startswith("few") else 2), Schedule(1))
    assert multiplied(product, small, simulator) == []
    assert simulator.tally.instructions


OF_SM120 = {
    "dense": MatmulCase("nvfp4", "nvfp4"),
    "FP4 as FP8": MatmulCase("mxfp8", "mxfp4"),
    "groups": MatmulCase("mxfp4", "mxfp4", 8192, 2048, 4096, groups=64),
}


@pytest.mark.parametrize(("name", "sm"), [("dense", 121), ("FP4 as FP8", 120), ("groups", 120)])
def test_products_of_warps(name, sm):
    """Block-scaled `mma.sync`; no tensor memory. The code for both GPUs differs in the name of the GPU alone."""
    product = OF_SM120[name]
    simulator = LaunchSimulator(Target(sm, 2), Schedule(1, failing_waits=True))
    assert multiplied(product, replace(reduced(product), k=768), simulator) == []
    assert simulator.launches[0].kernel.__name__ == "gemm_block_scaled_sm100"
    assert any("block_scale" in opcode and opcode.startswith("mma.sync") for opcode in simulator.tally.opcodes)
    assert not any(opcode.startswith("tcgen05") for opcode in simulator.tally.opcodes)


def test_four_warps_of_sm120():
    """The configuration that only timing chooses."""
    small = replace(reduced(MatmulCase("nvfp4", "nvfp4")), k=768)
    x, simulator = exact_arguments(small), LaunchSimulator(Target(120, 2), Schedule(1))
    problem = problem_of(x, simulator.target)
    _, four = block_scaled_configs(problem)
    assert differences(small, x, replace(choose(problem), config=four), simulator) == []
    assert simulator.launches[0].num_warps == 4


# ---------------------------------------------------------------- what the launches are given


def test_unwritten_memory_is_known():
    """Results of `torch.empty` hold nothing until a kernel or PyTorch writes them; the kernel writes all of them."""
    simulator = on()
    with simulator.running():
        data, *_ = quantize_kernels(torch.randn(4, 64).to(BF16), "mxfp8", [-1])
        assert data.untyped_storage().data_ptr() not in simulator.unwritten
        x = torch.empty(4, 64, dtype=BF16)
        assert (x.view(torch.uint8) == UNWRITTEN).all()  # what an earlier tensor left there is gone
        assert x.untyped_storage().data_ptr() in simulator.unwritten
        with pytest.raises(Fault, match="reads global memory that nothing wrote"):
            quantize_kernels(x, "mxfp8", [-1])
        x.zero_()
        quantize_kernels(x, "mxfp8", [-1])


def test_slices_are_read_where_they_lie():
    """A launch gets the address of a slice's first element, and finds nothing beyond the storage."""
    x = torch.randn(6, 128).to(BF16)
    half = x[:, 64:]
    with on().running():
        found = quantize_kernels(half, "mxfp8", [-1])
    for one, other in zip(found, QUANTIZE(half, "mxfp8", [-1]), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


# ---------------------------------------------------------------- the command


def test_the_command(tmp_path, capsys):
    file = tmp_path / "found.json"
    only = "quantise rows, mxfp4"
    assert main(["check-sm100", "--simulate", "--only", only, "--schedules", "1", "--json", str(file)]) == 0
    assert only in capsys.readouterr().out
    content = json.loads(file.read_text())
    (case,) = content["cases"]
    assert (case["wrong"], case["kernels"], case["sm"]) == ([], "quantize_rows", 100)


def test_every_launch_of_the_table_has_a_key():
    keys = simulation.table_keys(100)
    one = simulation.launch_key(entry(CONFIGURATIONS, "rows", "mxfp8").launches(100)[0])
    assert keys[one] == "quantize_rows of rows mxfp8"
    simulator = on()
    assert quantized(entry(CONFIGURATIONS, "rows", "mxfp8"), simulation.WHOLE, simulator) == []
    assert one in set(map(simulation.launch_key, simulator.launches))


def test_a_product_that_runs_no_kernel_is_wrong():
    """Six programs of the tile's columns: nothing is left to cut K for, and the kernel of few rows refuses."""
    product = MatmulCase("nvfp4", "nvfp4", 16)
    small = replace(product, n=816, k=2560)
    (what,) = multiplied(product, small, LaunchSimulator(Target(100, 6)))
    assert what.startswith("no kernel of skinny_block_scaled_sm100")
