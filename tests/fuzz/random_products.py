"""Random products by every kernel that serves them: `python -m tests.fuzz --products`, in the simulator of PTX.

Formats, sizes, the bias, groups, the GPU, the order of warps and copies are drawn by the seed. All sums are exact, so
that each kernel must have the bits of the reference. Sizes are mostly those that no tile or block divides.
"""

import random
import time
from collections import Counter
from dataclasses import replace

from fp4compile.check.comparison import ENDS, GROUP_ROWS
from fp4compile.check.products import MatmulCase, differences, exact_arguments
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats import formats
from fp4compile.hardware import Target
from fp4compile.templates.choose import Choice, candidates, choose
from fp4compile.templates.gemm import dequant_operand
from fp4compile.templates.problem import Problem, problem_of
from ptxsim import Schedule

FAMILIES = (
    ("nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16"),
    ("mxfp8", "mxfp8_e5m2", "mxfp8_32x32", "mxfp4"),
    ("float8_rowwise", "float8_tensor"),
    ("float8_1x128", "float8_128x128"),
    ("e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"),
)
CAPABILITIES = (80, 89, 90, 90, 90, 90, 100, 100, 103, 120)


def drawn(seed: int) -> tuple[MatmulCase, Target, Schedule]:
    """The product of a seed, the GPU and the order of its warps."""
    rng = random.Random(seed)
    family = rng.choice(FAMILIES)
    a, b = rng.choice(family), rng.choice(family)
    a = None if rng.random() < 0.4 or not formats.compatible(formats.get(a), formats.get(b)) else a
    m = rng.choice((1, 2, 8, rng.randint(3, 16), rng.randint(9, 64), rng.randint(65, 300)))
    n, k = rng.choice((8, 64)) * rng.randint(1, 40), rng.choice((1, 8, 16, 64, 64, 128)) * rng.randint(1, 30)
    n = n - rng.randint(0, 7) if rng.random() < 0.2 else n
    case = MatmulCase(a, b, m, min(n, 600), min(k, 2200), epilogue="bias" * (rng.random() < 0.3))
    if rng.random() < 0.2 and (a is None or not formats.get(a).square):
        case = replace(case, m=GROUP_ROWS, n=min(n, 200), k=min(k, 600), epilogue="", groups=len(ENDS))
    schedule = Schedule(rng.randint(0, 99), failing_waits=rng.random() < 0.3)
    return case, Target(rng.choice(CAPABILITIES), rng.choice((2, 132))), schedule


def chosen(problem: Problem) -> list[Choice]:
    """The kernels of this package that a compiled graph may call for a problem: the default, and those that are timed.

    The simulator runs no library, and none multiplies what `dequant_operand` has written.
    """
    found = [choose(problem), *(choose(problem, name) for name in candidates(problem))]
    library = ("library", dequant_operand.CANDIDATE.name)
    return list({choice.kernel: choice for choice in found if not choice.kernel.startswith(library)}.values())


def wrong_with(seed: int) -> tuple[list[str], str, list[str]]:
    """What is wrong with the product of a seed, its description, and the kernels that computed it."""
    case, target, schedule = drawn(seed)
    x = exact_arguments(case)
    wrong, kernels = [], []
    for choice in chosen(problem_of(x, target)):
        simulator = LaunchSimulator(target, schedule)
        try:
            found = differences(case, x, choice, simulator)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong += [f"{choice.kernel}: {what}" for what in found]
        kernels.append(choice.kernel)
    what = f"{seed}: {case.formats} {case.label} on {target.sm}, {target.multiprocessors} multiprocessors"
    return wrong, what, kernels


def search(first: int, count: int) -> int:
    """Print what is wrong with the products of so many seeds; returns how many are wrong."""
    start, found, ran = time.perf_counter(), 0, Counter[str]()
    for seed in range(first, first + count):
        wrong, what, kernels = wrong_with(seed)
        ran.update(kernels)
        found += bool(wrong)
        if wrong:
            print("=" * 100, what, *wrong, sep="\n", flush=True)
    kernels = ", ".join(f"{times} {name}" for name, times in ran.most_common())
    print(f"{count} products in {time.perf_counter() - start:.0f} s, {kernels}, {found} wrong")
    return found
