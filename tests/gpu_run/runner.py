"""Runs the parts of a GPU run one after the other, each within a limit, and remembers what has passed.

All that is remembered of a tree lies in one folder: `plan.json` (the parts, and with what settings they were made),
`records.jsonl` (what became of each test and program), `parts.jsonl` (a line a part that ran) and `wanted.json` (ids
that the part under way is to run).
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_run.parts import Part, from_data, is_done, read_records, to_data

SHORTEST = 45.0  # seconds: a part with less than that ahead is not begun
LONG = 30.0  # seconds from which on the time of a test is kept under its own name


@dataclass(frozen=True)
class Run:
    """root: where commands run. folder: of what is remembered. jobs: processes of a part. limit: seconds of a part."""

    root: Path
    folder: Path
    jobs: int
    limit: float

    def records(self) -> dict[str, dict[str, Any]]:
        return read_records(self.folder / "records.jsonl")


def planned(run: Run, settings: Mapping[str, Any], make: Callable[[], Sequence[Part]]) -> list[Part]:
    """The parts of the first call for these settings, so that numbers mean the same in later calls."""
    path = run.folder / "plan.json"
    if path.exists():
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan["settings"] == dict(settings):
            return from_data(plan["parts"])
    parts = list(make())
    run.folder.mkdir(parents=True, exist_ok=True)
    write(path, {"settings": dict(settings), "parts": to_data(parts)})
    return parts


def has_passed(run: Run, part: Part) -> bool:
    """Whether each of a part's tests or programs has passed, or was skipped."""
    records = run.records()
    return all(is_done(records.get(name)) for name in part.ids)


def run_parts(
    run: Run, parts: Sequence[Part], numbers: Sequence[int], budget: float, environment: Mapping[str, Any],
    after: Callable[[], None] = lambda: None,
) -> bool:  # fmt: skip
    """Run those of the parts that have not passed, until the budget of seconds is used up. A line of JSON a part.

    environment: is part of that line. after: is called when a part has ended. Returns whether all of them have passed.
    """
    end = time.monotonic() + budget
    passed = []
    for number in numbers:
        part, left = parts[number], end - time.monotonic()
        if has_passed(run, part):
            row = {"part": number, "what": part.text(), "outcome": "passed before"}
        elif left < min(SHORTEST, run.limit):
            row = {"part": number, "what": part.text(), "outcome": "left for another call"}
        else:
            row = {"part": number, **run_part(run, part, min(run.limit, left)), "on": dict(environment)}
            with (run.folder / "parts.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        passed.append(row["outcome"] in ("passed", "passed before"))
        print("\n" + json.dumps(row), flush=True)
        after()
    return all(passed)


def run_part(run: Run, part: Part, limit: float) -> dict[str, Any]:
    """Run what is left of a part, and end it at the limit. Returns its row."""
    before = run.records()
    wanted = [name for name in part.ids if not is_done(before.get(name))]
    write(run.folder / "wanted.json", wanted)
    print(f"\n--- {part.text()}, {len(wanted)} to run, at most {limit:.0f} s", flush=True)
    started, at = time.monotonic(), int(time.time())
    status = _run(part.command(run.jobs, run.folder), run.root, limit)
    known = run.records()
    found = {name: known[name] for name in wanted if name in known and known[name] != before.get(name)}
    outcomes = Counter(entry["outcome"] for entry in found.values())
    without = [name for name in wanted if name not in found or found[name]["outcome"] == "started"]
    good = status == 0 and not without and not outcomes["failed"]
    row = {
        "what": part.text(),
        "outcome": "passed" if good else "stopped at its limit" if status is None else "failed",
        "seconds": round(time.monotonic() - started, 1),
        "at": at,
        "ran": len(wanted),
        "passed": outcomes["passed"],
        "skipped": outcomes["skipped"],
        "failed": [name for name, entry in found.items() if entry["outcome"] == "failed"],
        "without an outcome": len(without),
    }
    under_way = [name for name in without if name in found]
    return row | ({"under way": under_way} if under_way else {}) | ({} if status in (0, None) else {"status": status})


def _run(command: Sequence[str], root: Path, limit: float) -> int | None:
    """The status of a command; None where it was ended, with all that it had started, at the limit."""
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:  # also where this process is told to stop
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def result(run: Run, parts: Sequence[Part], identity: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the whole run: for benchmarks/results."""
    records = run.records()
    rows = [json.loads(line) for line in _lines(run.folder / "parts.jsonl")]
    return {
        **identity,
        "tests": _counts(records, [name for part in parts if not part.fuzz for name in part.ids]),
        "programs": _counts(records, [name for part in parts if part.fuzz for name in part.ids]),
        "parts": rows,
        "seconds_of_a_test": seconds_of_tests(records),
    }


def _counts(records: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    outcomes = Counter(records[name]["outcome"] if name in records else "not run" for name in names)
    return {
        "all": len(names), "passed": outcomes["passed"], "skipped": outcomes["skipped"], "failed": outcomes["failed"],
        "not run": outcomes["not run"] + outcomes["started"],
        "skipped for": dict(Counter(records[name].get("text", "") for name in names
                                    if name in records and records[name]["outcome"] == "skipped")),
        "seconds": round(sum(records[name]["seconds"] for name in names if name in records)),
    }  # fmt: skip


def seconds_of_tests(records: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a core that a test of each file takes, in the mean, and that each long test takes.

    By them the next run is split and ordered.
    """
    times, long = defaultdict(list), {}
    for name, entry in records.items():
        if "::" in name and entry["outcome"] == "passed":
            times[name.partition("::")[0]].append(entry["seconds"])
            if entry["seconds"] >= LONG:
                long[name] = entry["seconds"]
    means = {path: round(sum(seconds) / len(seconds), 2) for path, seconds in times.items()}
    return dict(sorted((means | long).items()))


def write(path: Path, content: Any) -> None:
    """JSON, by a file that is renamed: whoever reads the path finds all of it, or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
