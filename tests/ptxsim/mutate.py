"""Does the simulator find faults? Plant them one by one in kernels, and see which it finds.

    python -m tests.ptxsim.mutate [--only TEXT] [--sample N] [--processes N] [--json FILE]

Faults are edits of compiled PTX (`ptx_edits`) and of Triton source (`source_edits`), in the kernels of `subjects`. An
edit counts as found if a schedule of warps, copies and matrix units gives a fault or wrong values. The last line has
the share of the edits found, without those that change nothing. Why an edit is not found is written by hand into the
table of the last run (`RESULTS`: "equivalent" if it changes nothing, else "why"), and the next run keeps it.
"""

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fp4compile.check import environment
from ptxsim.fault import Fault
from ptxsim.run import Schedule
from tests.ptxsim.checks import check_of, without_statement
from tests.ptxsim.ptx_edits import Edit, edits
from tests.ptxsim.source_edits import SOURCE_EDITS, SourceEdit, line_of
from tests.ptxsim.source_edits import tried as run_planted
from tests.ptxsim.subjects import SUBJECTS, Subject

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "simulated_mutations.json"
SCHEDULES = range(3)
_MOST = 10**7  # warp instructions of a launch of an unknown kernel; no subject has a tenth of it
Entry = dict[str, Any]


def outcome(subject: Subject, most: int, edited: tuple[str, str] | None = None) -> Entry:
    """What is wrong ("found", in a line) under the first "schedule" that shows it; neither for nothing.

    "error" is there instead where the simulator itself fails. most: warp instructions of a launch that ends. edited: a
    kernel's name and its PTX.
    """
    for seed in SCHEDULES:
        try:
            wrong = subject.check(subject.simulator(Schedule(seed, most=most), edited))
        except Fault as fault:
            wrong = [f"fault: {fault}"]
        except Exception as error:  # the simulator or Triton fails, which finds nothing
            return {"error": f"{type(error).__name__}: {error}"[:300]}
        if wrong:
            return {"found": " ".join(wrong[0].split())[:1500], "schedule": seed}
    return {}


@cache
def planted(index: int) -> tuple[int, list[tuple[str, str, Edit]]]:
    """(the most instructions of a launch, (kernel, PTX, edit) of all edits of statements that run) of a subject."""
    subject = SUBJECTS[index]
    simulator = subject.simulator(Schedule())
    wrong = subject.check(simulator)
    if wrong:
        raise ValueError(f"{subject.name} is wrong without an edit: {wrong}")
    found = [(kernel, ptx, edit) for kernel, ptx in simulator.code.items()
             for edit in edits(ptx, simulator.executed[ptx], subject.most)]  # fmt: skip
    return 3 * simulator.tally.instructions, found


def tried(task: tuple[int, int]) -> Entry:
    """The entry of an edit of PTX, by the subject's index and its own."""
    subject, (most, found) = SUBJECTS[task[0]], planted(task[0])
    kernel, ptx, edit = found[task[1]]
    entry = {"subject": subject.name, "kernel": kernel, "kind": edit.kind, "edit": edit.name,
             "line": edit.changes[0].line, "statement": edit.statement[:120]}  # fmt: skip
    return judged(entry | outcome(subject, most, (kernel, edit.applied(ptx))))


def tried_source(edit: SourceEdit) -> Entry:
    """The entry of an edit of Triton source."""
    entry = {"subject": edit.subject, "kernel": edit.path, "edit": edit.name, "line": line_of(edit)}
    return judged(entry | run_planted(edit))


def judged(entry: Entry) -> Entry:
    """An entry with the check that found the edit ("by"), or with why it is not found ("equivalent" or "why")."""
    if "found" in entry:
        return entry | {"found": without_statement(entry["found"]), "by": check_of(entry["found"])}
    return entry | explained().get(place_of(entry), {})


def place_of(entry: Entry) -> tuple[str, str, str]:
    return entry["subject"], entry["kernel"], entry["edit"]


@cache
def explained() -> dict[tuple[str, str, str], Entry]:
    """The reason of each edit that the last run did not find."""
    content = json.loads(RESULTS.read_text())
    entries = [entry for kind in ("ptx", "source") for entry in content[kind]]
    return {place_of(entry): {key: entry[key]} for entry in entries for key in ("equivalent", "why") if key in entry}


def wanted(only: str) -> list[tuple[int, int]]:
    """The edits of PTX whose names contain a text, by the subject's index and their own."""
    return [(i, j) for i, subject in enumerate(SUBJECTS) if subject.name.startswith(only.split(":")[0])
            for j, (kernel, _, edit) in enumerate(planted(i)[1])
            if only in f"{subject.name}: {kernel}: {edit.name}"]  # fmt: skip


def line(entry: Entry) -> str:
    """An edit in a line."""
    found = (
        f"{entry['found'][:90]} (schedule {entry['schedule']})"
        if "found" in entry
        else f"NOT FOUND {entry.get('error', '')}"
    )
    why = f" ({entry.get('equivalent') or entry.get('why') or ''})"
    return f"{entry['subject']}: {entry['kernel']}: {entry['edit']}: {found}{why.removesuffix(' ()')}"


def share(entries: Sequence[Entry]) -> str:
    """How many edits were found."""
    counted = [entry for entry in entries if "equivalent" not in entry]
    found = sum("found" in entry for entry in counted)
    return (f"found {found} of {len(counted)} ({found / max(len(counted), 1):.1%}); "
            f"{len(entries) - len(counted)} more change nothing")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="edits whose line contains this: SUBJECT: KERNEL: ..."
    )
    parser.add_argument("--sample", type=int, metavar="N", help="of the edits of PTX so many, always the same ones")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="at the same time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--subject", metavar="NAME", help="print what is wrong with a subject as it is, and end")
    chosen = parser.parse_args(arguments)
    if chosen.subject:
        (subject,) = (each for each in SUBJECTS if each.name == chosen.subject)
        print(json.dumps(outcome(subject, _MOST)))
        return 0
    started, found = time.perf_counter(), {"ptx": [], "source": []}
    sources = [edit for edit in SOURCE_EDITS if chosen.only in f"{edit.subject}: {edit.path}: {edit.name}"]
    tasks = wanted(chosen.only)
    if chosen.sample is not None:
        tasks = sorted(random.Random(0).sample(tasks, min(chosen.sample, len(tasks))))
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for kind, entries in (("ptx", pool.imap(tried, tasks)),
                              ("source", pool.imap(tried_source, sources))):  # fmt: skip
            for entry in entries:
                found[kind].append(entry)
                print(line(entry), flush=True)
    for kind, entries in found.items():
        print(f"edits of {kind}: {share(entries)}")
    print(f"{time.perf_counter() - started:.0f} seconds")
    if chosen.json:
        content = {"environment": environment.of_compiler(), "schedules": len(SCHEDULES), **found}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
