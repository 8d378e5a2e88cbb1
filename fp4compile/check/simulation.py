"""`check-sm100 --simulate`: every launch of the gate's table, executed in the simulator of its PTX on the CPU.

The simulator shows wrong values, accesses outside of tensors, missing waits and fences, deadlocks and results that
depend on the schedule (`fp4compile.check.simulate`). It shows neither faults of ptxas nor times.
"""

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fp4compile.check import environment, run_simulated
from fp4compile.check.cases import Finding, find
from fp4compile.check.first_run import line
from fp4compile.check.run_simulated import table_keys


def run(file: Path | None, only: str, sms: Sequence[int], schedules: int) -> int:
    """Run every case on every compute capability, one process for each core, and print a line for each case.

    file: the JSON file for all findings. only: leave out cases whose names lack this text. schedules: how many orders
    of warps, copies and matrix units each launch runs in. Returns 1 where a value is wrong or a kernel has a defect.
    """
    started = time.perf_counter()
    wanted = [(sm, index, schedules) for sm in sms
              for index, case in enumerate(run_simulated.cases(sm, schedules)) if only in case.name]  # fmt: skip
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
    return sm, find(run_simulated.cases(sm, schedules)[index])
