"""Runs the parts of a GPU run one after the other, each within a limit, and remembers what has passed.

All that is remembered of a tree lies in one folder: `collected.json` (ids of the tests), `records.jsonl` (what became
of each test and program), `parts.jsonl` (a line a part that ran) and `wanted.json` (ids that the part under way runs).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_run.records import is_done, read_records

SHORTEST = 45.0  # seconds: a part with less than that ahead is not begun
LONG = 30.0  # seconds from which on the time of a test is kept under its own name
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.gpu_run.record")


@dataclass(frozen=True)
class Part:
    """what: in some words. ids: of the tests or programs. command: runs those of them that have not passed."""

    what: str
    ids: tuple[str, ...]
    command: tuple[str, ...]

    @classmethod
    def of_tests(cls, ids: Sequence[str], folder: Path, jobs: int) -> "Part":
        """Tests that start in this order, in so many processes."""
        files = dict.fromkeys(name.partition("::")[0] for name in ids)
        command = (*PYTEST, "-qq", "--tb=short", "--no-summary", "--gpu-run", str(folder), "-m", "gpu", "-n", str(jobs),
                   "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", str(4 * jobs), *files)  # fmt: skip
        return cls(f"{len(ids)} tests of {len(files)} files", tuple(ids), command)


def has_passed(folder: Path, part: Part) -> bool:
    """Whether each of a part's tests or programs has passed, or was skipped."""
    records = read_records(folder / "records.jsonl")
    return all(is_done(records.get(name)) for name in part.ids)


def run_parts(
    root: Path, folder: Path, parts: Sequence[Part], numbers: Sequence[int], limit: float, budget: float,
    after: Callable[[], None] = lambda: None,
) -> bool:  # fmt: skip
    """Run those of the parts that have not passed, until the budget of seconds is used up. A line of JSON a part.

    root: where commands run. folder: of what is remembered. limit: seconds of a part. after: is called when a part has
    ended. Returns whether all of them have passed.
    """
    end = time.monotonic() + budget
    passed = []
    for number in numbers:
        part, left = parts[number], end - time.monotonic()
        if has_passed(folder, part):
            row = {"part": number, "what": part.what, "outcome": "passed before"}
        elif left < min(SHORTEST, limit):
            row = {"part": number, "what": part.what, "outcome": "left for another call"}
        else:
            row = {"part": number, **run_part(root, folder, part, min(limit, left))}
            with (folder / "parts.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        passed.append(row["outcome"] in ("passed", "passed before"))
        print("\n" + json.dumps(row), flush=True)
        after()
    return all(passed)


def run_part(root: Path, folder: Path, part: Part, limit: float) -> dict[str, Any]:
    """Run what is left of a part, and end it at the limit. Returns its row."""
    before = read_records(folder / "records.jsonl")
    wanted = [name for name in part.ids if not is_done(before.get(name))]
    write(folder / "wanted.json", wanted)
    print(f"\n--- {part.what}, {len(wanted)} to run, at most {limit:.0f} s", flush=True)
    started, at = time.monotonic(), int(time.time())
    status = _run(part.command, root, limit)
    known = read_records(folder / "records.jsonl")
    found = {name: known[name] for name in wanted if name in known and known[name] != before.get(name)}
    outcomes = Counter(entry["outcome"] for entry in found.values())
    without = [name for name in wanted if name not in found or found[name]["outcome"] == "started"]
    good = status == 0 and not without and not outcomes["failed"]
    row = {
        "what": part.what,
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


def result(folder: Path, parts: Sequence[Part], identity: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the whole run: for benchmarks/results."""
    records, rows = read_records(folder / "records.jsonl"), folder / "parts.jsonl"
    ids = [name for part in parts for name in part.ids]
    return {
        **identity,
        "tests": _counts(records, [name for name in ids if "::" in name]),
        "programs": _counts(records, [name for name in ids if "::" not in name]),
        "parts": [json.loads(line) for line in rows.read_text("utf-8").splitlines()] if rows.exists() else [],
        "seconds_of_a_test": _seconds_of_tests(records),
    }


def _counts(records: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    known = [records[name] for name in names if name in records]
    outcomes = Counter(entry["outcome"] for entry in known)
    return {
        "all": len(names), "passed": outcomes["passed"], "skipped": outcomes["skipped"], "failed": outcomes["failed"],
        "not run": len(names) - len(known) + outcomes["started"],
        "skipped for": dict(Counter(entry.get("text", "") for entry in known if entry["outcome"] == "skipped")),
        "seconds": round(sum(entry["seconds"] for entry in known)),
    }  # fmt: skip


def _seconds_of_tests(records: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a core that a test of each file takes, in the mean, and that each long test takes: for the order."""
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
