"""The GPU run itself: what it runs, what it remembers, how it ends; with tests and programs that need no GPU."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.gpu_run import __main__ as command
from tests.gpu_run import devices, runner
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


def test_tests_are_collected_once_and_long_ones_come_first(suite):
    """By the time of the test itself, or of its file; then the programs."""
    root, write, folder = suite
    write("a", "pass", cases=3)
    write("b", "pass", cases=1)
    seconds = {"test_b.py": 9, "test_a.py": 1, "test_a.py::test_one[1]": 99}
    expected = ["test_a.py::test_one[1]", "test_b.py::test_one[0]", "test_a.py::test_one[0]", "test_a.py::test_one[2]"]
    assert runner.collected(root, folder, [], seconds) == expected
    (root / "test_b.py").unlink()
    programs = [f"tests/gpu_run/random_programs.py::test_program[{seed}]" for seed in (7, 8)]
    assert runner.collected(root, folder, (7, 8), seconds) == expected + programs


def ran(root):
    """The cases that ran since the last look."""
    path = root / "log"
    found = sorted(path.read_text().split()) if path.exists() else []
    path.unlink(missing_ok=True)
    return found


@pytest.mark.slow
def test_what_failed_runs_again_and_what_passed_does_not(suite, capfd):
    """A process that ends, as one whose GPU is lost, costs one test. Tests that are no more have not passed."""
    root, write, folder = suite
    write("a", 'pytest.xfail("known")')
    write("b", 'raise ValueError("the bug")')
    write("c", "os._exit(3)")
    folder.mkdir()
    ids = [f"test_{name}.py::test_one[{case}]" for name in "abc" for case in range(4)]
    row = runner.run(root, folder, [*ids, "test_c.py::test_one[9]"], 2, 60.0)
    assert row["outcome"] == "failed" and row["passed"] == 10 and row["not begun"] == 1
    assert sorted(row["failed"]) == ["test_b.py::test_one[2]", "test_c.py::test_one[2]"]
    assert ran(root) == sorted(f"{name}{case}" for name in "abc" for case in range(4))
    printed = capfd.readouterr().out
    assert "the bug" in printed and not runner.has_passed(folder, ids)

    write("b", "pass")
    write("c", 'pytest.skip("needs two")')
    row = runner.run(root, folder, ids, 2, 60.0)
    assert (row["outcome"], row["passed"], row["skipped"]) == ("passed", 1, 1) and ran(root) == ["b2", "c2"]
    assert runner.has_passed(folder, ids) and runner.run(root, folder, ids, 2, 60.0) == {"outcome": "passed before"}
    found = runner.result(folder, ids, {})
    counts, first = found["tests"], found["calls"][0]
    assert counts["skipped for"] == {"Skipped: needs two": 1} and first["outcome"] == "failed"
    assert [counts[name] for name in ("all", "passed", "skipped", "failed", "not run")] == [12, 11, 1, 0, 0]
    assert found["seconds_of_a_test"].keys() == {"test_a.py", "test_b.py", "test_c.py"}


def test_a_stuck_command_is_ended_with_all_it_started(tmp_path):
    code = (
        'import subprocess, time; child = subprocess.Popen(["sleep", "100"])\n'
        'open("child", "w").write(str(child.pid)); time.sleep(100)\n'
    )
    start = time.monotonic()
    assert runner.ended((sys.executable, "-c", code), tmp_path, 1.5) is None and time.monotonic() - start < 10
    assert not is_running(int((tmp_path / "child").read_text()))
    assert runner.ended((sys.executable, "-c", "raise SystemExit(3)"), tmp_path, 60) == 3


def test_a_command_ends_with_the_process_that_is_told_to_stop(tmp_path):
    """As by `timeout`: a suite that ran on would share the GPU and the records with the next call."""
    child = "import os, pathlib, time; pathlib.Path('child').write_text(f'{os.getpid()}.'); time.sleep(60)"
    code = f"""
import sys
from pathlib import Path
from tests.gpu_run.runner import ended
ended((sys.executable, "-c", {child!r}), Path({str(tmp_path)!r}), 60)
"""
    parent, file = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT), tmp_path / "child"
    while not (file.exists() and file.read_text().endswith(".")):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.terminate()
    assert parent.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text().rstrip(".")), 0)


def is_running(pid):
    """A process that is only waited for by nobody does not count."""
    for _ in range(50):
        path = Path(f"/proc/{pid}/stat")
        if not path.exists() or path.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize("status, outcomes, expected", [
    (None, {"a": "passed", "b": "started"}, "stopped at its limit"), (1, dict.fromkeys("abc", "passed"), "failed"),
    (0, {"a": "passed"}, "failed"), (0, dict.fromkeys("abc", "skipped"), "passed"),
])  # fmt: skip
def test_status_and_records_must_both_be_good(status, outcomes, expected, tmp_path, monkeypatch):
    """A record that was cut, where its process was ended, is none."""

    def ends(*_):
        lines = [json.dumps({"id": name, "outcome": outcome, "seconds": 1}) for name, outcome in outcomes.items()]
        (tmp_path / "records.jsonl").write_text("\n".join([*lines, '{"id": "c", "outc']))
        return status

    monkeypatch.setattr(runner, "ended", ends)
    row = runner.run(tmp_path, tmp_path, "abc", 1, 60.0)
    assert row["outcome"] == expected and row["not begun"] == 3 - len(outcomes)
    assert row["under way"] == ["b"] * (status is None)
    assert json.loads((tmp_path / "wanted.json").read_text()) == ["a", "b", "c"]


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
