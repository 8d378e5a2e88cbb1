"""Runs pytest on what has not passed, within a limit, and remembers what has.

All that is remembered of a tree lies in one folder: `collected.json` (ids of the tests), `records.jsonl` (a line for
each test as it ends, the last one of an id counts), `calls.jsonl` (a line a call) and `wanted.json` (ids to run).
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

LONG = 30.0  # seconds from which on the time of a test is kept under its own name
UNKNOWN = 2.0  # seconds that a test which was not measured counts as
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.gpu_run.record", "-qq", "-m", "gpu")
PROGRAMS = "tests/gpu_run/random_programs.py"


def collected(root: Path, folder: Path, seeds: Iterable[int], seconds: Mapping[str, float]) -> list[str]:
    """The ids of the tests that need a GPU, the longest first, and of the programs of these seeds.

    The first call on a tree collects the tests. seconds: of a test, or in the mean of a file's tests.
    """
    path = folder / "collected.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [*PYTEST, "--collect-only", "--gpu-run", str(folder)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise RuntimeError(f"pytest could not collect the tests:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    tests = json.loads(path.read_text(encoding="utf-8"))
    tests.sort(key=lambda name: -seconds.get(name, seconds.get(_file(name), UNKNOWN)))
    return [*tests, *(f"{PROGRAMS}::test_program[{seed}]" for seed in seeds)]


def run(root: Path, folder: Path, ids: Sequence[str], jobs: int, limit: float) -> dict[str, Any]:
    """Run those of the tests that have not passed, in this order, in so many processes. Returns what became of them.

    root: where pytest runs. folder: of what is remembered. limit: seconds.
    """
    before = read_records(folder)
    wanted = [name for name in ids if not _is_done(before.get(name))]
    if not wanted:
        return {"outcome": "passed before"}
    write(folder / "wanted.json", wanted)
    print(f"{len(wanted)} tests and programs to run, at most {limit:.0f} s", flush=True)
    started, at = time.monotonic(), int(time.time())
    files = dict.fromkeys(map(_file, wanted))
    command = (*PYTEST, "--tb=short", "--no-summary", "--gpu-run", str(folder), "-n", str(jobs), "--dist", "load",
               "--maxschedchunk", "1", "--max-worker-restart", str(4 * jobs), *files)  # fmt: skip
    status = ended(command, root, limit)
    known = read_records(folder)
    found = {name: known[name] for name in wanted if name in known and known[name] != before.get(name)}
    outcomes = Counter(entry["outcome"] for entry in found.values())
    good = status == 0 and outcomes["passed"] + outcomes["skipped"] == len(wanted)
    row = {
        "outcome": "passed" if good else "stopped at its limit" if status is None else "failed",
        "seconds": round(time.monotonic() - started, 1), "at": at, "ran": len(wanted),
        "passed": outcomes["passed"], "skipped": outcomes["skipped"],
        "failed": [name for name, entry in found.items() if entry["outcome"] == "failed"],
        "under way": [name for name, entry in found.items() if entry["outcome"] == "started"],
        "not begun": len(wanted) - len(found), "status": status,
    }  # fmt: skip
    with (folder / "calls.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    return row


def ended(command: Sequence[str], root: Path, limit: float) -> int | None:
    """The status of a command; None where it was ended, with all that it had started, at the limit.

    Where this process is told to stop, the command ends too; it would run on beside the next call.
    """
    process = subprocess.Popen(command, cwd=root, start_new_session=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        signal.signal(signal.SIGTERM, before)


def _file(name: str) -> str:
    return name.partition("::")[0]


# ---------------------------------------------------------------- records


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """The last record of each id. A line that a killed process has cut is passed over."""
    path, found = folder / "records.jsonl", {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            entry = json.loads(line)
            found[entry["id"]] = entry
    return found


def _is_done(entry: Mapping[str, Any] | None) -> bool:
    return entry is not None and entry["outcome"] in ("passed", "skipped")


def has_passed(folder: Path, ids: Sequence[str]) -> bool:
    """Whether each of the tests has passed, or was skipped."""
    records = read_records(folder)
    return all(_is_done(records.get(name)) for name in ids)


def result(folder: Path, ids: Sequence[str], identity: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the whole run: for benchmarks/results."""
    records, calls = read_records(folder), folder / "calls.jsonl"
    return {
        **identity,
        "tests": _counts(records, [name for name in ids if _file(name) != PROGRAMS]),
        "programs": _counts(records, [name for name in ids if _file(name) == PROGRAMS]),
        "calls": [json.loads(line) for line in calls.read_text("utf-8").splitlines()] if calls.exists() else [],
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
        if entry["outcome"] == "passed" and _file(name) != PROGRAMS:
            times[_file(name)].append(entry["seconds"])
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
