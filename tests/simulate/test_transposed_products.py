"""Gradients times packed NVFP4 weights on SM90 in the simulator: `gemm_wgmma_sm90` with the rows of B contracted."""

import pytest
import torch

from fp4compile.check.run_simulated import _differences, exact
from fp4compile.check.simulate.launch import Simulator
from fp4compile.check.simulate.run import Schedule
from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.gemm.heuristics import WgmmaConfig, with_shared_memory
from fp4compile.templates.gemm.wgmma_sm90 import needed_bytes
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of
from tests.helpers import choices
from tests.helpers.foreign import embedded, poisoned_outputs


def arguments(m, n, k, name, dtype):
    """A [m, k] times B [k, n], whose sums are exact; NaN lies beside A and beside the scales, nothing beside codes."""
    fmt = formats.get(name)
    scales = (ceil_div(k, fmt.block[0]), n // 16) if fmt.square else (swizzled_numel(k, n // 16),)
    meta = ((k, n // 2), torch.uint8), (scales, fmt.scale_dtype), ((), torch.float32)
    b = exact(Operand(*(torch.empty(shape, dtype=each, device="meta") for shape, each in meta), fmt), 1)
    a = exact(Operand(torch.empty(m, k, dtype=torch.bfloat16, device="meta")), 2).data.to(dtype)
    b = Operand(b.data, embedded(b.scales), b.outer, fmt)
    return Arguments(Operand(embedded(a)), b, None, dtype, b_transposed=True)


# Rows, columns and K of the product; format of B; rows of a tile, warps, parts of a warp, buffers of B, steps a stage,
# split, tiles walked together, buffers of A.
@pytest.mark.parametrize(("shape", "b", "dtype", "form"), [
    # The last tile has one row of A and half of its columns, the last step half of its rows; buffers are used again.
    ((73, 192, 448), "nvfp4", torch.bfloat16, (72, 8, 1, 3, 1, 1)),
    # Two parts of a warp share their columns; K in two parts; three buffers of A, which warps release.
    ((65, 192, 1024), "nvfp4_16x16", torch.float16, (72, 8, 2, 3, 1, 2, 8, 3)),
], ids=["ragged", "two parts"])  # fmt: skip
@pytest.mark.parametrize("seed", [0, 1])
def test_tiles_of_transposed_weights(shape, b, dtype, form, seed, monkeypatch):
    def config(problem):
        return with_shared_memory(WgmmaConfig(*form), problem, needed_bytes)

    choices.configured(monkeypatch, "wgmma_transposed_sm90", config)
    x = arguments(*shape, b, dtype)
    simulator = Simulator(Target(90), Schedule(seed))
    with simulator.running(), poisoned_outputs():
        got = multiply(x, choose(problem_of(x, simulator.target)))
    assert simulator.launches[0].kernel.__name__ == "gemm_wgmma_sm90"
    assert _differences(got, x) == []
