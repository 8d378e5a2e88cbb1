"""Random calls of the quantisers: `python -m tests.fuzz --quantisers`, in the simulator of PTX.

The seed draws an entry of `check.quantisers`, the size and the dtype of the tensor, the layout of the scales, whether
the global scale is given, the GPU, and the order of warps and copies. Codes and scales must be the reference's, bit for
bit. Sizes are mostly those that no tile or block divides.
"""

import random
from dataclasses import replace

import torch

from fp4compile.check.quantisers import (
    ALL_CONFIGURATIONS,
    MORE_CONFIGURATIONS,
    SIZE,
    Configuration,
    quantized,
    quantized_after_steps,
)
from fp4compile.hardware import Target
from ptxsim import Schedule
from tests.fuzz.simulated import WatchingSimulator, target_and_schedule

CONFIGURATIONS = tuple(one for one in (*ALL_CONFIGURATIONS, *MORE_CONFIGURATIONS) if one.shape[1] <= SIZE)
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)


def drawn(seed: int) -> tuple[Configuration, tuple[int, int], Target, Schedule]:
    """The call of a seed, the tensor's rows and columns, the GPU and the order of its warps."""
    rng = random.Random(seed)
    one = rng.choice(CONFIGURATIONS)
    rows = rng.choice((1, 2, rng.randint(3, 40), rng.randint(41, 300), 128 * rng.randint(1, 2)))
    cols = rng.choice((1, 2, 8, 16, 32, 128)) * rng.randint(1, 40)
    target, schedule = target_and_schedule(rng)
    if not (one.steps or one.values):
        one = replace(one, dtype=rng.choice(DTYPES))
    if one.block_format.block is not None and not (one.values or one.steps or one.lays_out):
        one = replace(one, layout=rng.choice(("linear", "swizzled")))
    if one.block_format.outer == "tensor" and rng.random() < 0.3 and not (one.steps or one.groups or one.hadamard):
        one = replace(one, static=True)
    return one, (rows, min(cols, 2500, max(256, 2**16 // rows))), target, schedule


def wrong_with(seed: int) -> tuple[list[str], str, list[str]]:
    """What is wrong with the call of a seed, its description, and the kernels that computed it."""
    one, shape, target, schedule = drawn(seed)
    simulator = WatchingSimulator(target, schedule)
    try:
        wrong = (quantized_after_steps if one.steps else quantized)(one, shape, simulator)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    kernels = sorted({launch.kernel.__name__ for launch in simulator.launches})
    what = f"{seed}: {one.label}, {one.format}, {shape}, {one.dtype}, {one.layout}, on {target.sm}"
    return wrong, what, kernels
