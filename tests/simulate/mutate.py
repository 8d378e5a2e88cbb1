"""Does the simulator find faults? Plant them one by one in kernels, and see which it finds.

    python -m tests.simulate.mutate [--only TEXT] [--json FILE] [--list]

Faults are edits of compiled PTX (`ptx_edits`) and of Triton source (`source_edits`), in the kernels of `subjects`. An
edit counts as found if a schedule of warps, copies and matrix units gives a fault or wrong values. The last line has
the share of the edits found, without those that change nothing (`equivalent_edits` says why).
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from fp4compile.check import environment
from fp4compile.check.simulate.fault import Fault
from fp4compile.check.simulate.run import Schedule
from fp4compile.hardware import Target
from tests.simulate.equivalent_edits import reason
from tests.simulate.ptx_edits import Edit, edits
from tests.simulate.subjects import SM, SUBJECTS, Planted, Subject

SCHEDULES = range(3)
_PROCESSES = 2


def outcome(subject: Subject, schedule: Schedule, edited: tuple[str, str] | None = None) -> str | None:
    """What is wrong under a schedule, in one line; None for nothing. edited: a kernel's name and its PTX."""
    simulator = Planted(Target(SM), schedule, programs=subject.programs, edited=edited)
    try:
        wrong = subject.check(simulator)
    except Fault as fault:
        return f"fault: {str(fault).splitlines()[0]}"
    except Exception as error:  # the simulator itself fails
        return f"{type(error).__name__}: {error}"
    return wrong[0] if wrong else None


@cache
def planted(index: int) -> tuple[Schedule, list[tuple[str, str, Edit]]]:
    """(a schedule with a bound on instructions, (kernel, PTX, edit) of all edits) of a subject."""
    subject = SUBJECTS[index]
    simulator = Planted(Target(SM), programs=subject.programs)
    wrong = subject.check(simulator)
    if wrong:
        raise ValueError(f"{subject.name} is wrong without an edit: {wrong}")
    found = [(kernel, ptx, edit) for kernel, ptx in simulator.code.items() for edit in edits(ptx)]
    return Schedule(most=3 * simulator.tally.instructions), found


def tried(task: tuple[int, int]) -> dict[str, Any]:
    """The outcome of an edit, by the subject's index and its own."""
    subject = SUBJECTS[task[0]]
    bounded, found = planted(task[0])
    kernel, ptx, edit = found[task[1]]
    text = edit.applied(ptx)
    for seed in SCHEDULES:
        what = outcome(subject, Schedule(seed, most=bounded.most), (kernel, text))
        if what is not None:
            break
    entry = {"subject": subject.name, "kernel": kernel, "edit": edit.name, "statement": edit.statement}
    if what is not None:
        entry |= {"found": what[:300], "schedule": seed}
    why = reason(subject.name, kernel, edit.name)
    return entry | ({} if why is None else {"equivalent": why})


def all_of(only: str) -> list[tuple[int, int]]:
    """The edits whose names contain a text, by the subject's index and their own."""
    return [(i, j) for i, subject in enumerate(SUBJECTS) if only.split(":")[0] in subject.name or not only
            for j, (kernel, _, edit) in enumerate(planted(i)[1])
            if only in f"{subject.name}: {kernel}: {edit.name}"]  # fmt: skip


def line(entry: dict[str, Any]) -> str:
    found = f"{entry['found'][:90]} (schedule {entry['schedule']})" if "found" in entry else "NOT FOUND"
    if "equivalent" in entry:
        found += f" (changes nothing: {entry['equivalent']})"
    return f"{entry['subject']}: {entry['kernel']}: {entry['edit']}: {found}"


def share(entries: Iterable[dict[str, Any]]) -> tuple[int, int, int]:
    """(edits found, edits that change something, edits that change nothing)."""
    counted = [entry for entry in entries if "equivalent" not in entry]
    return sum("found" in entry for entry in counted), len(counted), len(list(entries)) - len(counted)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="edits whose line contains this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    chosen = parser.parse_args(arguments)
    started, entries = time.perf_counter(), []
    with multiprocessing.get_context("spawn").Pool(_PROCESSES) as pool:
        for entry in pool.imap(tried, all_of(chosen.only)):
            entries.append(entry)
            print(line(entry), flush=True)
    found, counted, equivalent = share(entries)
    print(f"found {found} of {counted} edits that change something, and {equivalent} change nothing; "
          f"{time.perf_counter() - started:.0f} seconds")  # fmt: skip
    if chosen.json:
        content = {"environment": environment.of_compiler(), "schedules": len(SCHEDULES), "edits": entries}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
