"""What the fuzzers of single launches share, which run in the simulator of PTX."""

import random
import time
from collections import Counter
from collections.abc import Callable

from fp4compile.hardware import Target
from ptxsim import Schedule

CAPABILITIES = (80, 89, 90, 90, 90, 90, 100, 100, 103, 120)


def target_and_schedule(rng: random.Random) -> tuple[Target, Schedule]:
    """A GPU, and an order of its warps and copies."""
    target = Target(rng.choice(CAPABILITIES), rng.choice((2, 132)))
    return target, Schedule(rng.randint(0, 99), failing_waits=rng.random() < 0.3)


def search(wrong_with: Callable[[int], tuple[list[str], str, list[str]]], first: int, count: int) -> int:
    """Print what is wrong with the calls of so many seeds; returns how many are wrong.

    wrong_with: of a seed, what is wrong, the description of its call, and the kernels that computed it.
    """
    start, found, ran = time.perf_counter(), 0, Counter[str]()
    for seed in range(first, first + count):
        wrong, what, kernels = wrong_with(seed)
        ran.update(kernels)
        found += bool(wrong)
        if wrong:
            print("=" * 100, what, *wrong, sep="\n", flush=True)
    kernels = ", ".join(f"{times} {name}" for name, times in ran.most_common())
    print(f"{count} calls in {time.perf_counter() - start:.0f} s, {kernels}, {found} wrong")
    return found
