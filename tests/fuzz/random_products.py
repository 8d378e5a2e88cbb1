"""Random products by every kernel that serves them: `python -m tests.fuzz --products`, in the simulator of PTX.

The seed draws formats, sizes, the bias, groups along rows or along K, epilogues, quantised results, several weights,
the GPU, the launch configuration among those that `max-autotune` times, and the order of warps and copies. All sums are
exact, so that each kernel must have the bits of the reference; an epilogue with an approximate function is held to its
bound. Sizes are mostly those that no tile or block divides.
"""

import random
from dataclasses import replace

from fp4compile.check.comparison import ENDS, GROUP_ROWS
from fp4compile.check.products import MatmulCase, differences, exact_arguments
from fp4compile.formats import formats
from fp4compile.formats.epilogue import AMAX
from fp4compile.formats.layouts import ceil_div
from fp4compile.hardware import Target
from fp4compile.templates.choose import Choice, candidates, choose, to_time
from fp4compile.templates.gemm import dequant_operand
from fp4compile.templates.problem import Problem, problem_of
from ptxsim import Schedule
from tests.fuzz.simulated import WatchingSimulator, target_and_schedule

FAMILIES = (
    ("nvfp4", "nvfp4_one_level", "nvfp4_te", "nvfp4_rowwise", "nvfp4_16x16"),
    ("mxfp8", "mxfp8_e5m2", "mxfp8_32x32", "mxfp4"),
    ("float8_rowwise", "float8_tensor"),
    ("float8_1x128", "float8_128x128"),
    ("e4m3:1x128:float32:-:te_pow2", "e4m3:128x128:float32:-:te_pow2"),
)


NATIVE = ("nvfp4", "nvfp4_one_level", "nvfp4_te", "mxfp8", "mxfp4")
RESULTS = (("gated", ""), ("", "nvfp4_one_level"), ("gated", "mxfp8"), ("pair", "nvfp4"), ("pair", "mxfp4"),
           ("pair", AMAX), ("gated", AMAX), ("bias", "mxfp8"))  # fmt: skip


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
    target, schedule = target_and_schedule(rng)
    squares = any(name is not None and formats.get(name).square for name in (a, b))
    kind = rng.random()
    if kind < 0.15 and (a is None or not formats.get(a).square):
        case = replace(case, m=GROUP_ROWS, n=min(n, 200), k=min(k, 600), epilogue="", groups=len(ENDS))
    elif kind < 0.2 and not squares:
        case = replace(case, m=min(m, 150), n=min(n, 200), k=GROUP_ROWS, epilogue="", groups=len(ENDS), along_k=True)
    elif kind < 0.25:
        case = replace(case, weights=rng.choice((2, 3)), epilogue="")
    elif kind < 0.3:
        case = replace(case, batches=rng.choice((2, 3)), m=min(m, 100), epilogue="")
    elif kind < 0.5:
        case, target = _with_result(case, rng), Target(rng.choice((100, 103)), target.multiprocessors)
    return case, target, schedule


def _with_result(case: MatmulCase, rng: random.Random) -> MatmulCase:
    """A product on SM100 whose epilogue computes more than a bias, and may quantise its result or find the amax."""
    name, (epilogue, result) = rng.choice(NATIVE), rng.choice(RESULTS)
    n = ceil_div(case.n, 128) * 128 if epilogue == "pair" else ceil_div(case.n, 32) * 32
    case = replace(case, a=name, b=name, n=n, epilogue=epilogue, result=result)
    if rng.random() < 0.3 and epilogue != "bias" and result:
        case = replace(case, m=GROUP_ROWS, n=min(n, 256), k=min(case.k, 600), groups=len(ENDS),
                       weights=2 if epilogue == "pair" and rng.random() < 0.5 else 1)  # fmt: skip
    return case


def chosen(case: MatmulCase, problem: Problem, rng: random.Random) -> list[Choice]:
    """The kernels of this package that a compiled graph may call for a product, each with one configuration.

    These are the default and those that are timed. The simulator runs no library, and none multiplies what
    `dequant_operand` has written.
    """
    if case.result and not candidates(problem):
        return []
    found = [choose(problem)]
    if case.weights == 1 or case.groups:
        found += [choose(problem, name) for name in candidates(problem)] + to_time(problem)
    rng.shuffle(found)
    library = ("library", dequant_operand.CANDIDATE.name)
    found = [choice for choice in found if not choice.kernel.startswith(library)]
    found = [choice for choice in found if choice.takes_epilogue or not problem.spec.epilogue]
    return list({choice.kernel: choice for choice in found}.values())


def wrong_with(seed: int) -> tuple[list[str], str, list[str]]:
    """What is wrong with the product of a seed, its description, and the kernels that computed it."""
    case, target, schedule = drawn(seed)
    x = exact_arguments(case)
    wrong, kernels = [], []
    for choice in chosen(case, problem_of(x, target), random.Random(seed)):
        simulator = WatchingSimulator(target, schedule)
        try:
            found = differences(case, x, choice, simulator)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong += [f"{choice.kernel}, {choice.config}: {what}" for what in found]
        kernels.append(choice.kernel)
    what = f"{seed}: {case.formats} {case.label} on {target.sm}, {target.multiprocessors} multiprocessors"
    return wrong, what, kernels
