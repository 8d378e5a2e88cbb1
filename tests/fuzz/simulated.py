"""What the fuzzers of single launches share, which run in the simulator of PTX."""

import random
import time
from collections import Counter
from collections.abc import Callable

import torch

from fp4compile.check.simulator import LaunchSimulator
from fp4compile.hardware import Target
from fp4compile.templates.launch import Launch
from ptxsim import Fault, Schedule

CAPABILITIES = (80, 89, 90, 90, 90, 90, 100, 100, 103, 120)


def target_and_schedule(rng: random.Random) -> tuple[Target, Schedule]:
    """A GPU, and an order of its warps and copies."""
    target = Target(rng.choice(CAPABILITIES), rng.choice((2, 132)))
    return target, Schedule(rng.randint(0, 99), failing_waits=rng.random() < 0.3)


class WatchingSimulator(LaunchSimulator):
    """A simulator that raises Fault where a kernel writes a tensor that it does not declare (`templates.writes`)."""

    def take(self, launch: Launch) -> None:
        tensors = {name: x for name, x in launch.args.items() if isinstance(x, torch.Tensor)}
        declared = getattr(launch.kernel, "written", lambda arguments: tensors.keys())(launch.args | launch.constants)
        # An argument that a launch does not use may be a tensor that the kernel writes under its own name.
        written = {tensors[name].untyped_storage().data_ptr() for name in declared}
        others = {name: x for name, x in tensors.items() if x.untyped_storage().data_ptr() not in written}
        before = {name: _bytes(x).clone() for name, x in others.items()}
        super().take(launch)
        changed = [name for name, x in others.items() if not torch.equal(_bytes(x), before[name])]
        if changed:
            raise Fault(f"{launch.kernel.__name__} writes {', '.join(changed)}, and does not say so")


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory of a tensor."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


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
