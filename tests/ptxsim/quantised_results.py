"""Products whose kernels quantise relu(product) or relu(gate) * up, or find its amax, beside the reference.

Every step is exact.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fp4compile.check.comparison import BF16, same_bits
from fp4compile.check.products import MatmulCase, exact_arguments
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats.epilogue import AMAX, Epilogue
from fp4compile.templates.choose import choose
from fp4compile.templates.multiply import results
from fp4compile.templates.problem import problem_of
from tests.helpers.arguments import call

# Of columns that are not there, the first makes 1: they must not count.
STEPS = {
    "": ["relu product", "add s0 1.0"],
    "gated": ["relu product", "mul s0 aux0"],
    "pair": ["relu product", "mul s0 pair"],
}


def differences(product: MatmulCase, simulator: LaunchSimulator, sizes: Sequence[int] | None = None) -> list[str]:
    """What is wrong with codes and scales, or with a result and its amax or the amaxes of groups, by product.kernel.

    sizes: of groups; None takes `values.ENDS`. Outer scales of groups differ so much that block scales of the last
    groups are the least ones. Outer scales of gate and up differ, and do not lie side by side.
    """
    x = exact_arguments(product)
    if x.a.outer is not None and x.a.outer.dim() == 1:
        x = replace(x, a=replace(x.a, outer=x.a.outer * 2.0 ** (-3 * torch.arange(len(x.a.outer)))))
    if x.offs is None and x.b.outer is not None and x.b.outer.dim() == 1:
        x = replace(x, b=replace(x.b, outer=torch.tensor([0.5, 0, 0, 4.0])[::3]))
    steps = [*STEPS[product.epilogue], AMAX if product.result == AMAX else f"quantize {product.result}"]
    x = x.but(epilogue=Epilogue.parse(steps, BF16, BF16))
    if sizes is not None:
        x = replace(x, offs=torch.tensor(sizes).cumsum(0).to(torch.int32))
    with simulator.running():
        found = results(x, choose(problem_of(x, simulator.target), product.kernel or None))
    expected = call(x)
    if product.result == AMAX:
        if x.offs is None:  # which of the maxima is the largest depends on the device
            found, expected = ([one[0], one[1].amax()] for one in (found, expected))
        return same_bits([*found, torch.empty(0)], [*expected, torch.empty(0)])
    data, scales = found
    end = None if x.offs is None else int(x.offs[-1])  # codes of rows of no group mean nothing
    assert [one.shape for one in (data, scales)] == [one.shape for one in expected]
    return same_bits([data[:end], scales, torch.empty(0)], [expected[0][:end], expected[1], torch.empty(0)])
