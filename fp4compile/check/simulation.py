"""`check-sm100 --simulate`: execute the PTX of the launches of `check-sm100` at small shapes in the simulator.

The simulator finds wrong values, accesses outside of tensors, missing waits and fences, deadlocks and results that
depend on the schedule (`ptxsim`). It finds no faults of ptxas and no times.

Quantisers must return the reference's codes and scales bit for bit; stochastic rounding is compared with the reference
that rounds by eight random bits an element, as SM100 does. Matmuls have operands for which every sum is exact in
float32, so they must equal the reference in every bit, too; with an approximate function in the epilogue, the result
must be within its error. Every case runs under several schedules of warps, copies and matrix units.
"""

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from fp4compile.check import environment
from fp4compile.check.cases import Case, Finding, find
from fp4compile.check.first_run import line
from fp4compile.check.products import PRODUCTS, MatmulCase, differences, exact_arguments, reduced
from fp4compile.check.quantisers import ALL_CONFIGURATIONS, SIZE, Check, checks
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.hardware import Target
from fp4compile.templates.choose import choose
from fp4compile.templates.launch import Launch
from fp4compile.templates.problem import problem_of
from ptxsim.run import Schedule

# Whole tiles, as in the table, whose launches have the same constants; then partly filled tiles, blocks and words.
WHOLE, RAGGED = (256, 512), (130, 400)


def run(file: Path | None, only: str, sms: Sequence[int], schedules: int) -> int:
    """Run every case on every compute capability, one process for each core, and print a line for each case.

    file: the JSON file for all findings. only: leave out cases whose names lack this text. schedules: how many orders
    of warps, copies and matrix units each launch runs in. Returns 1 where a value is wrong or a kernel has a defect.
    """
    started = time.perf_counter()
    wanted = [(sm, index, schedules) for sm in sms
              for index, case in enumerate(cases(sm, schedules)) if only in case.name]  # fmt: skip
    findings: list[dict[str, Any]] = []
    ran: dict[int, set[str]] = {sm: set() for sm in sms}
    failed = 0
    for sm, finding in _each(wanted):
        ran[sm] |= set(finding.values.pop("launches", ()))
        findings.append({"sm": sm, **finding.to_dict()})
        failed += finding.failed
        print(f"{sm}  {line(finding)}", flush=True)
    coverage = {}
    for sm in [] if only else sms:
        table = table_keys(sm)
        coverage[sm] = {"launches": len(table), "simulated": len(table.keys() & ran[sm]),
                        "not simulated": sorted({table[key] for key in table.keys() - ran[sm]})}  # fmt: skip
        print(f"\n{sm}: {coverage[sm]['simulated']} of the {len(table)} launches of the table ran with the same "
              "constants; not", coverage[sm]["not simulated"])  # fmt: skip
    print(f"\n{failed} of {len(findings)} cases failed, {time.perf_counter() - started:.0f} seconds")
    if file:
        content = {"environment": environment.of_compiler(), "schedules": schedules, "coverage": coverage,
                   "seconds": round(time.perf_counter() - started), "cases": findings}  # fmt: skip
        file.write_text(json.dumps(content, indent=1) + "\n")
    return 1 if failed else 0


def _each(wanted: list[tuple[int, int, int]]) -> Iterator[tuple[int, Finding]]:
    """The findings in order: of one case from this process, of several from a process for each core."""
    if len(wanted) < 2:
        yield from map(_run, wanted)
        return
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), maxtasksperchild=40) as pool:
        yield from pool.imap(_run, wanted)


def _run(task: tuple[int, int, int]) -> tuple[int, Finding]:
    sm, index, schedules = task
    return sm, find(cases(sm, schedules)[index])


# ---------------------------------------------------------------- the cases


# A way to run a case: its check, and the number of multiprocessors, 0 for as many as the GPU has.
Variant: TypeAlias = tuple[Check, int]


def cases(sm: int, schedules: int) -> list[Case]:
    """Every case on a GPU of compute capability `sm`: so many schedules, which take turns with the case's variants.

    Under every second schedule `mbarrier.try_wait` sometimes returns false too early, as hardware's may.
    """
    found = [(name, [(check, 0) for check in each]) for name, each in checks(WHOLE, RAGGED)]
    # A kernel that must compute a matmul may not serve this GPU. No kernel of SM120 quantises its result.
    products = [one for one in PRODUCTS if not (one.kernel or sm >= 120) or one.launches(sm)[1]]
    found += [(f"product {one.label} {one.formats}", product_variants(one)) for one in products]
    return [Case(name, partial(_on_schedules, sm, range(schedules), variants)) for name, variants in found]


def _on_schedules(sm: int, seeds: Sequence[int], variants: Sequence[Variant]) -> dict[str, Any]:
    """The errors under each schedule, and the instructions that the launches executed."""
    wrong: list[str] = []
    kernels: dict[str, None] = {}
    launches: set[str] = set()
    instructions, seconds, notes = 0, 0.0, Counter[str]()
    for seed in seeds:
        check, multiprocessors = variants[seed % len(variants)]
        schedule = Schedule(seed, failing_waits=seed % 2 == 1)
        simulator = LaunchSimulator(Target(sm, multiprocessors), schedule)
        wrong += [f"schedule {seed}: {what}" for what in check(simulator)]
        kernels |= dict.fromkeys(launch.kernel.__name__ for launch in simulator.launches)
        launches |= set(map(launch_key, simulator.launches))
        instructions += simulator.tally.instructions
        notes += simulator.tally.notes
        seconds += simulator.seconds
    return {
        "kernels": ", ".join(kernels),
        "schedules": len(seeds),
        "warp instructions": instructions,
        "seconds": round(seconds, 2),
        "launches": sorted(launches),
        "notes": dict(notes),
        "wrong": wrong,
    }


def launch_key(launch: Launch) -> str:
    """A key of a launch's code, without the divisibility of sizes and the number of groups."""
    groups = {"GROUPS": bool(launch.constants.get("GROUPS"))}
    constants = sorted((name, str(value)) for name, value in (launch.constants | groups).items())
    return f"{launch.kernel.__name__} {launch.num_warps} {launch.num_stages} {constants}"


def table_keys(sm: int) -> dict[str, str]:
    """By key of each launch of the table: the kernel and the first entry that has it."""
    found: dict[str, str] = {}
    entries = [(one.launches(sm), f"{one.label} {one.format}") for one in ALL_CONFIGURATIONS]
    entries += [(one.launches(sm)[1], f"{one.label} {one.formats}") for one in PRODUCTS]
    for launches, name in entries:
        for launch in launches:
            found.setdefault(launch_key(launch), f"{launch.kernel.__name__} of {name}")
    return found


def product_variants(product: MatmulCase) -> list[Variant]:
    """Two ways to run a matmul.

    On two multiprocessors, a launch has the tiles of the table, and programs compute several of them. On all, it has
    tiles for few rows and columns. The tiles of the split-K kernel for few rows depend on the rows alone.
    """
    small = reduced(product)
    if product.a is not None and product.m <= 64 and product.n <= SIZE:
        return [(partial(multiplied, product, small), 0)]
    as_in_table = replace(small, n=256, k=product.k) if product.a is None and product.m <= 8 else small
    return [(partial(multiplied, product, as_in_table), 2), (partial(multiplied, product, small), 0)]


def multiplied(product: MatmulCase, small: MatmulCase, simulator: LaunchSimulator) -> list[str]:
    """Differences between the kernel that the table names for a matmul and the reference.

    small: the same matmul in the sizes that are multiplied here.
    """
    served, _ = product.served(Target(simulator.target.sm))
    if served is None:
        return [f"no kernel on compute capability {simulator.target.sm}"]
    x, before = exact_arguments(small), len(simulator.launches)
    wrong = differences(small, x, choose(problem_of(x, simulator.target), served.kernel), simulator)
    if len(simulator.launches) == before:
        return [f"no kernel of {served.kernel} for {small.label}"]
    return wrong
