"""The GPU run itself: how it is split, what it remembers, how it ends; with tests and programs that need no GPU."""

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu_run import __main__ as command
from tests.gpu_run import devices
from tests.gpu_run.records import program, read_records
from tests.gpu_run.runner import Part, has_passed, result, run_parts
from tests.gpu_run.tree import commit, tree_hash

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


def test_tests_are_collected_once_and_long_ones_come_first(suite, monkeypatch):
    """By the time of the test itself, or of its file."""
    root, write, folder = suite
    write("a", "pass", cases=3)
    write("b", "pass", cases=1)
    seconds = {"test_b.py": 9, "test_a.py": 1, "test_a.py::test_one[1]": 99}
    monkeypatch.setattr(command, "RESULT", root / "result.json")
    (root / "result.json").write_text(json.dumps({"seconds_of_a_test": seconds}))
    expected = ("test_a.py::test_one[1]", "test_b.py::test_one[0]", "test_a.py::test_one[0]", "test_a.py::test_one[2]")
    assert command.of_tests(root, folder, 1).ids == expected
    (root / "test_b.py").unlink()
    assert command.of_tests(root, folder, 1).ids == expected


def test_every_program_is_in_one_part(monkeypatch):
    monkeypatch.setattr(command, "IN_A_PART", 10)
    parts = command.of_programs(7, 25, 16, Path("state"))
    assert [name for part in parts for name in part.ids] == [program(seed) for seed in range(7, 32)]
    last = parts[2].command
    assert last[last.index("--seed") + 1] == "27" and last[last.index("--count") + 1] == "5"


# ---------------------------------------------------------------- pytest


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Files of tests whose third case does as it is told: where they are, what writes one, the folder of records."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs a GPU\n")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def write(name, body, cases=4):
        text = SUITE.format(name=name, body=body, cases=cases, log=str(tmp_path / "log"))
        (tmp_path / f"test_{name}.py").write_text(text)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # of a file that was written in the same second

    return tmp_path, write, tmp_path / "state"


def ran(root):
    """The cases that ran since the last look."""
    path = root / "log"
    found = sorted(path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


def rows(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def call(root, folder, parts, capfd, limit=60.0, budget=1e9, **more):
    """(whether all passed, the lines of JSON, all that was printed) of one call of the run."""
    folder.mkdir(exist_ok=True)
    good = run_parts(root, folder, parts, range(len(parts)), limit, budget, **more)
    printed = capfd.readouterr().out
    return good, rows(printed), printed


@pytest.mark.slow
def test_what_failed_runs_again_and_what_passed_does_not(suite, capfd):
    root, write, folder = suite
    write("a", "pass")
    write("b", 'raise ValueError("the bug")')
    parts = [Part.of_tests([f"test_{name}.py::test_one[{case}]" for case in range(4)], folder, 2) for name in "ab"]
    good, (first, second), printed = call(root, folder, parts, capfd)
    assert not good and ran(root) == sorted(f"{name}{case}" for name in "ab" for case in range(4))
    assert first["outcome"] == "passed" and first["passed"] == 4
    assert second["outcome"] == "failed" and second["failed"] == ["test_b.py::test_one[2]"] and second["passed"] == 3
    assert "the bug" in printed[: printed.index('"outcome": "failed"')]  # as it came

    write("b", 'pytest.skip("needs two")')
    good, (first, second), _ = call(root, folder, parts, capfd)
    assert good and ran(root) == ["b2"]
    assert (first["outcome"], second["outcome"], second["skipped"]) == ("passed before", "passed", 1)
    assert all(has_passed(folder, part) for part in parts)
    counts = result(folder, parts, {})["tests"]
    assert counts["skipped for"] == {"Skipped: needs two": 1}
    assert {name: counts[name] for name in ("all", "passed", "skipped", "failed", "not run")} == {
        "all": 8, "passed": 7, "skipped": 1, "failed": 0, "not run": 0}  # fmt: skip


@pytest.mark.slow
def test_a_failure_that_is_expected_passes(suite, capfd):
    root, write, folder = suite
    write("a", 'pytest.xfail("known")')
    part = Part.of_tests(["test_a.py::test_one[1]", "test_a.py::test_one[2]"], folder, 2)
    good, (row,), _ = call(root, folder, [part], capfd)
    assert good and row["passed"] == 2 and ran(root) == ["a1", "a2"]


@pytest.mark.slow
def test_a_process_that_ends_costs_one_test(suite, capfd):
    """As one does whose GPU is lost; and tests that are no more are not taken for passed."""
    root, write, folder = suite
    write("a", "os._exit(3)")
    part = Part.of_tests([f"test_a.py::test_one[{case}]" for case in (0, 1, 2, 3, 9)], folder, 2)
    good, (row,), _ = call(root, folder, [part], capfd)
    assert not good and row["outcome"] == "failed"
    assert row["failed"] == ["test_a.py::test_one[2]"] and row["passed"] == 3 and row["without an outcome"] == 1


# ---------------------------------------------------------------- the clock


def script(folder, ids, code):
    """A part that is a piece of Python."""
    return Part("a script", tuple(ids), (sys.executable, "-c", code, str(folder)))


RECORD = 'import json, sys; file = open(sys.argv[1] + "/records.jsonl", "a")\n' + (
    "def record(name, outcome): print(json.dumps(dict(id=name, outcome=outcome, seconds=1)), file=file, flush=True)\n"
)


def test_a_stuck_part_is_ended_with_all_it_started(tmp_path, capfd):
    code = RECORD + (
        'record("a", "passed"); record("b", "started")\n'
        'import subprocess, time; child = subprocess.Popen(["sleep", "100"])\n'
        'open(sys.argv[1] + "/child", "w").write(str(child.pid)); time.sleep(100)\n'
    )
    start = time.monotonic()
    parts = [script(tmp_path, "abc", code), script(tmp_path, "d", RECORD + 'record("d", "passed")')]
    good, (row, next_one), _ = call(tmp_path, tmp_path, parts, capfd, limit=1.5)
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
    ended = []
    parts = [script(tmp_path, name, RECORD + f'record("{name}", "passed")') for name in "ab"]
    good, found, _ = call(tmp_path, tmp_path, parts, capfd, budget=10, after=lambda: ended.append(1))
    assert not good and [row["outcome"] for row in found] == ["left for another call"] * 2
    good, found, _ = call(tmp_path, tmp_path, parts, capfd, after=lambda: ended.append(1))
    assert good and [row["outcome"] for row in found] == ["passed"] * 2 and len(ended) == 4


def test_status_and_records_must_both_be_good(tmp_path, capfd):
    parts = [script(tmp_path, "a", RECORD + 'record("a", "passed"); sys.exit(1)'), script(tmp_path, "b", "")]
    good, found, _ = call(tmp_path, tmp_path, parts, capfd)
    assert not good and [row["outcome"] for row in found] == ["failed"] * 2


def test_a_record_that_was_cut_is_passed_over(tmp_path):
    (tmp_path / "records").write_text('{"id": "a", "outcome": "passed"}\n{"id": "b", "outc')
    assert list(read_records(tmp_path / "records")) == ["a"]


# ---------------------------------------------------------------- what it ran on


def test_a_copy_has_the_hash_of_the_checkout(tmp_path):
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
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--state", str(tmp_path)]) == 2
    assert "found none" in capsys.readouterr().err


@pytest.mark.parametrize("known, expected", [("0,1", ["0,1", "1,0", "0,1"]), ("0", [None] * 3), ("", [None] * 3)])
def test_processes_share_gpus(monkeypatch, known, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("GPU_RUN_DEVICES", known)
    assert [devices.rotated(worker).get("CUDA_VISIBLE_DEVICES") for worker in range(3)] == expected
