"""The parts of a GPU run: which tests, or which programs of the fuzzer, and the command that runs what is left of them.

A test is known by pytest's id, a program by `program SEED`. Long tests start first, so that at the end of a part no
process waits for one of them. Whatever runs a part appends a line of JSON to a file of
records for each of these: {"id", "outcome", "seconds"}, so that a part that is stopped loses nothing.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Seconds of one core that a test takes, by the folder it is in, until a run has measured its file. Guesses: most of
# the time is compilation, of one kernel or of a model.
GUESSES = {"end_to_end": 8.0, "passes": 4.0}
OTHER_GUESS = 1.5
FUZZER = ("--device", "cuda", "--inductor", "--large", "--no-shrink", "--stop", "25")


@dataclass(frozen=True)
class Part:
    """ids: of the tests or programs. fuzz: whether these are programs."""

    ids: tuple[str, ...]
    fuzz: bool = False

    def command(self, jobs: int, folder: Path) -> list[str]:
        """The command that runs those of the ids that `folder / "wanted.json"` lists, in that order, and adds to its
        records."""
        if self.fuzz:
            wanted = [seed_of(name) for name in self.ids]
            return [sys.executable, "-m", "tests.fuzz", *FUZZER, "--seed", str(wanted[0]), "--count", str(len(wanted)),
                    "--jobs", str(jobs), "--records", str(folder / "records.jsonl")]  # fmt: skip
        return [sys.executable, "-m", "pytest", "-qq", "--tb=short", "--no-summary", "-p", "no:cacheprovider",
                "-p", "tests.gpu_run.record", "--gpu-run", str(folder), "-m", "gpu", "-n", str(jobs),
                "--dist", "load", "--maxschedchunk", "1", "--max-worker-restart", str(4 * jobs),
                *self.files()]  # fmt: skip

    def files(self) -> list[str]:
        return list(dict.fromkeys(name.partition("::")[0] for name in self.ids))

    def text(self) -> str:
        """What the part is, in some words."""
        if self.fuzz:
            return f"programs {seed_of(self.ids[0])} to {seed_of(self.ids[-1])}"
        return f"{len(self.ids)} tests of {len(self.files())} files"


def program(seed: int) -> str:
    """The name of a program in records."""
    return f"program {seed}"


def seed_of(name: str) -> int:
    return int(name.removeprefix("program "))


def split_tests(ids: Iterable[str], count: int, seconds: Mapping[str, float]) -> list[Part]:
    """The tests in `count` parts that take about equally long, in each the longest first; fewer parts of fewer tests.

    seconds: of a test, by its id; or of one test of a file, by the file's path. What is in neither is guessed.
    """
    cost = {name: _seconds_of(name, seconds) for name in sorted(ids)}  # tests of a file share kernels
    parts: list[list[str]] = [[] for _ in range(count)]
    before, total = 0.0, sum(cost.values())
    for name, own in cost.items():
        parts[min(int((before + own / 2) * count / total), count - 1)].append(name)
        before += own
    return [Part(tuple(sorted(part, key=lambda name: -cost[name]))) for part in parts if part]


def _seconds_of(name: str, seconds: Mapping[str, float]) -> float:
    path = name.partition("::")[0]
    if name in seconds or path in seconds:
        return max(seconds.get(name, seconds.get(path)), 0.01)
    return GUESSES.get(Path(path).parent.name, OTHER_GUESS)


def split_programs(seed: int, count: int, size: int) -> list[Part]:
    """`count` programs from a seed on, at most `size` in a part."""
    seeds = range(seed, seed + count)
    return [Part(tuple(map(program, seeds[i : i + size])), fuzz=True) for i in range(0, count, size)]


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each id. A line that a killed process has cut is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[entry["id"]] = entry
    return found


def is_done(entry: Mapping[str, Any] | None) -> bool:
    """Whether a record says that a test or program need not run again."""
    return entry is not None and entry["outcome"] in ("passed", "skipped")


def to_data(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"fuzz": part.fuzz, "ids": list(part.ids)} for part in parts]


def from_data(data: Sequence[Mapping[str, Any]]) -> list[Part]:
    return [Part(tuple(entry["ids"]), entry["fuzz"]) for entry in data]
