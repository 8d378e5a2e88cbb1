"""The inner loop of GPTQ: the kernel against PyTorch's loop, bit for bit."""

import pytest
import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats
from fp4compile.hardware import Target
from fp4compile.templates.compensate import compensate
from fp4compile.weights import gptq
from tests.helpers.kernels import DEVICE, INTERPRETING, assert_same_bits, gpu

ROWS = 37  # a part of the last program has no rows


def operands(columns, start=16, whole=48):
    """Two matrices of hard numbers, and a strip of their columns: (strip, follow, steps)."""
    gen = torch.Generator().manual_seed(columns)
    weight = torch.randn(2, whole, ROWS, generator=gen) * 2.0 ** torch.randint(-20, 3, (2, whole, 1), generator=gen)
    weight[0, :, :4] = torch.tensor([0.0, 1e-42, 1e30, torch.nan])
    weight[1, start : start + 16, 5] = torch.arange(16) * 0.25  # ties of E2M1
    follow = torch.randn(2, whole, whole, generator=gen).tril().mT * 0.3  # columns adjacent, as solvers return it
    steps = 2.0 ** torch.randint(-6, 2, (2, 1, ROWS), generator=gen) * 1.37
    steps[1, 0, 4:8] = torch.tensor([0.0, 1.0, torch.nan, 1e-44])
    strip = slice(start, start + columns)
    return weight[:, strip], follow[:, strip, strip], steps


def results(function, columns, name, device="cpu"):
    strip, follow, steps = (one.to(device) for one in operands(columns))
    # As in `gptq`: parts of larger tensors.
    scaled, errors = torch.full((2, 48, ROWS), 7.0, device=device), torch.full((2, 20, ROWS), 7.0, device=device)
    parts = scaled[:, 16 : 16 + columns], errors[:, 2 : 2 + columns]
    function(strip.clone(), follow, steps, formats.get(name), *parts)
    return scaled, errors


def check(columns, name):
    expected = results(gptq.compensate_by_torch, columns, name)
    assert_same_bits(results(compensate, columns, name, DEVICE), expected)


@gpu
@pytest.mark.parametrize(("columns", "name"), [(16, "nvfp4"), (16, "mxfp8"), (5, "nvfp4"), (6, "float8_rowwise")])
def test_a_strip(columns, name):
    check(columns, name)


@gpu
def test_e5m2():
    check(3, "e5m2:1x32:e8m0:-:rceil")


@pytest.mark.skipif(INTERPRETING, reason="compiles for a GPU")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_compiled_for_hopper(name):
    """In the simulator."""
    expected, simulator = results(gptq.compensate_by_torch, 16, name), LaunchSimulator(Target(90))
    with simulator.running():
        assert_same_bits(results(compensate, 16, name), expected)
    (launch,) = simulator.launches
    assert launch.grid == 4 and launch.num_warps == 1


@pytest.mark.skipif(INTERPRETING, reason="compiles for a GPU")
@pytest.mark.parametrize(("name", "rule"), [("nvfp4", "mse"), ("float8_rowwise", "amax")])
def test_inside_gptq(name, rule, monkeypatch):
    """In the simulator: every strip of two weights, the last one shorter."""
    gen = torch.Generator().manual_seed(1)
    x, weight = torch.randn(200, 150, generator=gen).cumsum(1), torch.randn(2, ROWS, 150, generator=gen)
    known = gptq.Moments((x.T @ x).expand(2, -1, -1), [200, 200])

    def in_the_simulator(*arguments):
        with simulator.running():
            compensate(*arguments)

    found, simulator = [], LaunchSimulator(Target(90))
    for inner in (gptq.compensate_by_torch, in_the_simulator):
        monkeypatch.setattr(gptq, "_compensate", inner)
        found.append(gptq.quantize(weight, known, formats.get(name), rule))
    assert len(simulator.launches) == 10
    assert_same_bits(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "float8_rowwise"])
def test_a_large_strip(name):
    """The sizes of a layer, where all programs run at once."""
    gen = torch.Generator().manual_seed(3)
    strip, steps = torch.randn(1, 16, 14336, generator=gen) * 0.02, torch.rand(1, 1, 14336, generator=gen) * 0.01
    follow, found = torch.randn(1, 16, 16, generator=gen).mT * 0.2, []
    for function, device in ((gptq.compensate_by_torch, "cpu"), (compensate, "cuda")):
        given = [one.to(device) for one in (strip.clone(), follow, steps)]
        made = torch.empty_like(given[0]), torch.empty_like(given[0])
        function(*given, formats.get(name), *made)
        found.append(made)
    assert_same_bits(found[1], found[0])
