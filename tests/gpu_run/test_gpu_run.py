"""The GPU run itself: how it is split, what it remembers, how it ends; with tests and programs that need no GPU."""

import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fuzz import pool
from tests.gpu_run import devices
from tests.gpu_run.parts import Part, program, read_records, split_programs, split_tests
from tests.gpu_run.runner import Run, has_passed, planned, result, run_parts

ROOT = Path(__file__).parents[2]
SUITE = """
import os, pytest
from pathlib import Path

@pytest.mark.gpu
@pytest.mark.parametrize("case", range({cases}))
def test_one(case):
    with open({log!r}, "a") as file:
        file.write(f"{name}{{case}}\\n")
    if case == 2:
        {body}

def test_of_no_gpu():
    raise AssertionError
"""


# ---------------------------------------------------------------- parts


def ids(files):
    return [f"tests/{path}::test[{i}]" for path, count in files.items() for i in range(count)]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_test_is_in_one_part(count):
    found = ids({"templates/test_a.py": 90, "end_to_end/test_b.py": 40, "passes/test_c.py": 1})
    parts = split_tests(found[::-1], count, {})
    assert sorted(name for part in parts for name in part.ids) == sorted(found)
    assert len(parts) == count


def test_parts_take_equally_long():
    """By what was measured of a file, a guess where nothing was; a large file is cut."""
    seconds = {"tests/templates/test_a.py": 0.1, "tests/end_to_end/test_b.py": 10}
    found = ids({"templates/test_a.py": 1000, "end_to_end/test_b.py": 30, "passes/test_c.py": 25})
    cost = {"tests/passes/test_c.py": 4} | seconds
    times = [sum(cost[name.partition("::")[0]] for name in part.ids) for part in split_tests(found, 4, seconds)]
    assert max(times) <= sum(times) / 4 + 10


def test_long_tests_come_first():
    """By the time of the test itself, where it was kept."""
    seconds = {
        "tests/templates/test_a.py": 0.5,
        "tests/end_to_end/test_b.py": 10,
        "tests/templates/test_a.py::test[1]": 99,
    }
    [part] = split_tests(ids({"end_to_end/test_b.py": 2, "templates/test_a.py": 2}), 1, seconds)
    assert [name.removeprefix("tests/") for name in part.ids] == [
        "templates/test_a.py::test[1]", "end_to_end/test_b.py::test[0]", "end_to_end/test_b.py::test[1]",
        "templates/test_a.py::test[0]",
    ]  # fmt: skip


def test_every_program_is_in_one_part():
    parts = split_programs(7, 25, 10)
    assert [name for part in parts for name in part.ids] == [program(seed) for seed in range(7, 32)]
    command = parts[2].command(16, Path("state"))
    assert command[command.index("--seed") + 1] == "27" and command[command.index("--count") + 1] == "5"


# ---------------------------------------------------------------- pytest


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Two files of tests whose third case does as it is told; returns the run, and what writes a file."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(name, body, cases=4):
        text = SUITE.format(name=name, body=body, cases=cases, log=str(tmp_path / "log"))
        (tmp_path / f"test_{name}.py").write_text(text)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # of a file that was written in the same second

    return Run(tmp_path, tmp_path / "state", jobs=2, limit=60.0), write


def ran(run):
    """The cases that ran since the last look."""
    path = run.root / "log"
    found = sorted(path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def rows(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def call(run, parts, capfd, **more):
    """(whether all passed, the lines of JSON, all that was printed) of one call of the run."""
    good = run_parts(run, parts, range(len(parts)), more.pop("budget", 1e9), {"device": "none"}, **more)
    printed = capfd.readouterr().out
    return good, rows(printed), printed


@pytest.mark.slow
def test_what_failed_runs_again_and_what_passed_does_not(suite, capfd):
    run, write = suite
    write("a", "pass")
    write("b", 'raise ValueError("the bug")')
    parts = [Part(tuple(f"test_{name}.py::test_one[{case}]" for case in range(4))) for name in "ab"]
    good, (first, second), printed = call(run, parts, capfd)
    assert not good and ran(run) == sorted(f"{name}{case}" for name in "ab" for case in range(4))
    assert first["outcome"] == "passed" and first["passed"] == 4 and first["on"] == {"device": "none"}
    assert second["outcome"] == "failed" and second["failed"] == ["test_b.py::test_one[2]"] and second["passed"] == 3
    assert "the bug" in printed[: printed.index('"outcome": "failed"')]  # as it came

    write("b", 'pytest.skip("needs two")')
    good, (first, second), _ = call(run, parts, capfd)
    assert good and ran(run) == ["b2"]
    assert (first["outcome"], second["outcome"], second["skipped"]) == ("passed before", "passed", 1)
    assert all(has_passed(run, part) for part in parts)
    counts = result(run, parts, {})["tests"]
    assert counts["skipped for"] == {"Skipped: needs two": 1}
    assert {name: counts[name] for name in ("all", "passed", "skipped", "failed", "not run")} == {
        "all": 8, "passed": 7, "skipped": 1, "failed": 0, "not run": 0}  # fmt: skip


@pytest.mark.slow
def test_a_failure_that_is_expected_passes(suite, capfd):
    run, write = suite
    write("a", 'pytest.xfail("known")')
    good, (row,), _ = call(run, [Part(("test_a.py::test_one[1]", "test_a.py::test_one[2]"))], capfd)
    assert good and row["passed"] == 2 and ran(run) == ["a1", "a2"]


@pytest.mark.slow
def test_a_process_that_ends_costs_one_test(suite, capfd):
    """As one does whose GPU is lost; and tests that are no more are not taken for passed."""
    run, write = suite
    write("a", "os._exit(3)")
    part = Part(tuple(f"test_a.py::test_one[{case}]" for case in (0, 1, 2, 3, 9)))
    good, (row,), _ = call(run, [part], capfd)
    assert not good and row["outcome"] == "failed"
    assert row["failed"] == ["test_a.py::test_one[2]"] and row["passed"] == 3 and row["without an outcome"] == 1


# ---------------------------------------------------------------- the clock


@dataclass(frozen=True)
class Script:
    """A part that is a piece of Python, which knows its folder as `sys.argv[1]`."""

    ids: tuple[str, ...]
    code: str
    fuzz: bool = False

    def command(self, jobs, folder):
        return [sys.executable, "-c", self.code, str(folder)]

    def text(self):
        return "a script"


RECORD = 'import json, sys; file = open(sys.argv[1] + "/records.jsonl", "a")\n' + (
    "def record(name, outcome): print(json.dumps(dict(id=name, outcome=outcome, seconds=1)), file=file, flush=True)\n"
)


def test_a_stuck_part_is_ended_with_all_it_started(tmp_path, capfd):
    code = RECORD + (
        'record("a", "passed"); record("b", "started")\n'
        'import subprocess, time; child = subprocess.Popen(["sleep", "100"])\n'
        'open(sys.argv[1] + "/child", "w").write(str(child.pid)); time.sleep(100)\n'
    )
    run = Run(tmp_path, tmp_path, jobs=1, limit=1.5)
    start = time.monotonic()
    good, (row, next_one), _ = call(
        run, [Script(("a", "b", "c"), code), Script(("d",), RECORD + 'record("d", "passed")')], capfd
    )
    assert not good and time.monotonic() - start < 10
    assert row["outcome"] == "stopped at its limit" and row["passed"] == 1
    assert row["under way"] == ["b"] and row["without an outcome"] == 2
    assert next_one["outcome"] == "passed"
    child = int((tmp_path / "child").read_text())
    assert not is_running(child)
    assert json.loads((tmp_path / "wanted.json").read_text()) == ["d"]


def is_running(pid):
    """A process that is only waited for by nobody does not count."""
    for _ in range(50):
        path = Path(f"/proc/{pid}/stat")
        if not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True


def test_a_budget_leaves_parts_for_another_call(tmp_path, capfd):
    run, ended = Run(tmp_path, tmp_path, jobs=1, limit=60.0), []
    parts = [Script((name,), RECORD + f'record("{name}", "passed")') for name in "ab"]
    good, found, _ = call(run, parts, capfd, budget=10, after=lambda: ended.append(1))
    assert not good and [row["outcome"] for row in found] == ["left for another call"] * 2
    good, found, _ = call(run, parts, capfd, after=lambda: ended.append(1))
    assert good and [row["outcome"] for row in found] == ["passed"] * 2 and len(ended) == 4


def test_status_and_records_must_both_be_good(tmp_path, capfd):
    run = Run(tmp_path, tmp_path, jobs=1, limit=60.0)
    parts = [Script(("a",), RECORD + 'record("a", "passed"); sys.exit(1)'), Script(("b",), "")]
    good, found, _ = call(run, parts, capfd)
    assert not good and [row["outcome"] for row in found] == ["failed"] * 2


def test_parts_keep_their_numbers(tmp_path):
    run, parts = Run(tmp_path, tmp_path / "new", 1, 1.0), split_programs(0, 4, 2)
    assert planned(run, {"seed": 0}, lambda: parts) == parts
    assert planned(run, {"seed": 0}, lambda: pytest.fail("split again")) == parts
    assert planned(run, {"seed": 4}, lambda: parts[:1]) == parts[:1]


def test_a_record_that_was_cut_is_passed_over(tmp_path):
    (tmp_path / "records").write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "outc')
    assert list(read_records(tmp_path / "records")) == ["a"]


# ---------------------------------------------------------------- what it ran on


def test_a_copy_has_the_hash_of_the_checkout(tmp_path):
    from tests.gpu_run.tree import commit, tree_hash

    for name in ("one", "two"):
        (tmp_path / name / "fp4compile").mkdir(parents=True)
        (tmp_path / name / "tests" / "__pycache__").mkdir(parents=True)
        (tmp_path / name / "fp4compile" / "a.py").write_text("a")
        (tmp_path / name / "pyproject.toml").write_text("p")
    (tmp_path / "two" / "tests" / "__pycache__" / "a.pyc").write_text("compiled")
    (tmp_path / "two" / "README.md").write_text("no source")
    assert tree_hash(tmp_path / "one") == tree_hash(tmp_path / "two")
    assert commit(tmp_path / "two") is None
    (tmp_path / "two" / "tests" / "a.py").write_text("a")
    assert tree_hash(tmp_path / "one") != tree_hash(tmp_path / "two")


def test_a_commit_is_added_where_the_files_are_the_same(tmp_path, monkeypatch, capsys):
    from tests.gpu_run import __main__ as command

    path = tmp_path / "result.json"
    monkeypatch.setattr(command, "tree_hash", lambda root: "same")
    monkeypatch.setattr(command, "commit", lambda root: "c0ffee")
    for tree, status, expected in (("same", 0, "c0ffee"), ("other", 1, None)):
        path.write_text(json.dumps({"tree": tree, "commit": None, "tests": 3}))
        assert command.main(["--stamp", "--out", str(path)]) == status
        assert json.loads(path.read_text()) == {"tree": tree, "commit": expected, "tests": 3}
    assert "of the files other" in capsys.readouterr().err


def test_without_a_gpu_nothing_passes(monkeypatch, tmp_path, capsys):
    """Skipped tests would."""
    import torch

    from tests.gpu_run.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--state", str(tmp_path)]) == 2
    assert "found none" in capsys.readouterr().err


@pytest.mark.parametrize("known, expected", [("0,1", ["0,1", "1,0", "0,1"]), ("0", [None] * 3), ("", [None] * 3)])
def test_processes_share_gpus(monkeypatch, known, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("GPU_RUN_DEVICES", known)
    assert [devices.rotated(worker).get("CUDA_VISIBLE_DEVICES") for worker in range(3)] == expected


# ---------------------------------------------------------------- programs


def pretend(pipe, options):
    """A process of the fuzzer whose seed 3 ends it, whose seed 5 hangs, and whose seed 7 loses the GPU."""
    while True:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        if seed == 3:
            os._exit(9)
        if seed == 5:
            time.sleep(100)
        time.sleep(0.01)
        finding = "numbers: wrong" if seed == 7 else None
        pipe.send((pool.Outcome(seed, finding, f"seed {seed}", 0.01, True), seed != 7))
        if seed == 7:
            os._exit(0)


@pytest.mark.slow
def test_every_program_has_one_outcome():
    found = list(pool.outcomes_of(range(12), SimpleNamespace(), 2, serve=pretend, stuck=4.0))
    assert sorted(outcome.seed for outcome in found) == list(range(12))
    wrong = {outcome.seed: outcome.finding for outcome in found if outcome.finding is not None}
    assert sorted(wrong) == [3, 5, 7]
    assert wrong[3] == "crash: the process ended with status 9"
    assert wrong[5] == "crash: stuck: no outcome after 4 s" and wrong[7] == "numbers: wrong"


def test_programs_are_recorded_and_not_run_again(tmp_path, monkeypatch, capsys):
    asked = []

    def outcomes(seeds, options, jobs):
        asked.append((list(seeds), jobs))
        yield from (pool.Outcome(seed, "numbers: x" if seed == 2 else None, "all of it", 1.0, True) for seed in seeds)

    monkeypatch.setattr(pool, "outcomes_of", outcomes)
    options = SimpleNamespace(records=tmp_path / "r.jsonl", seed=0, count=4, jobs=8, stop=99, json=False)
    assert pool.fuzz(options) == 1
    assert "all of it" in capsys.readouterr().out
    assert pool.fuzz(options) == 1
    assert asked == [([0, 1, 2, 3], 4), ([2], 1)]
