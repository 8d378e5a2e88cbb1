"""A pytest plugin: runs the tests that a GPU run wants, records each as it ends, and prints failures as they come.

`--gpu-run FOLDER`: ids of the tests to run are in FOLDER/wanted.json in their order, all where there is no such file;
records go to FOLDER/records.jsonl, and with `--collect-only` the ids to FOLDER/collected.json. On several GPUs the
processes of pytest-xdist begin their lists of GPUs with different ones.
"""

import json
import os
import time
from pathlib import Path

import pytest

from tests.gpu_run.devices import rotated, settle_inductor, still_usable

PHASES = ("setup", "call", "teardown")
RANK = {"passed": 0, "skipped": 1, "failed": 2}

# Before torch is imported, by the tests' conftest.
if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.update(rotated(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))))


def pytest_addoption(parser):
    parser.addoption("--gpu-run", type=Path, required=True, help="folder of wanted.json and records.jsonl")


def pytest_configure(config):
    settle_inductor()
    if not hasattr(config, "workerinput"):  # the process that hears of all tests
        config.pluginmanager.register(Recorder(config))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    path = config.getoption("--gpu-run") / "wanted.json"
    if not path.exists():
        return
    places = {name: i for i, name in enumerate(json.loads(path.read_text(encoding="utf-8")))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in places])
    items[:] = sorted((item for item in items if item.nodeid in places), key=lambda item: places[item.nodeid])


def pytest_collection_finish(session):
    if session.config.option.collectonly:
        path = session.config.getoption("--gpu-run") / "collected.json"
        path.write_text(json.dumps([item.nodeid for item in session.items]), encoding="utf-8")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """After an error on the GPU every call of this process fails: it ends, and another one takes what is left."""
    report = yield
    if report.failed and "PYTEST_XDIST_WORKER" in os.environ and not still_usable():
        os.write(2, f"\nthe GPU cannot be used any more after {item.nodeid}:\n{report.longreprtext}\n".encode())
        os._exit(1)
    return report


def _rank(report):
    """A failure that was expected is none."""
    return 0 if report.skipped and hasattr(report, "wasxfail") else RANK[report.outcome]


def _reason(report):
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-300:]


class Recorder:
    """Writes records. A test is `started` until its last phase has ended."""

    def __init__(self, config):
        self.config = config
        self.path = config.getoption("--gpu-run") / "records.jsonl"
        self.reports = {}

    def pytest_runtest_logstart(self, nodeid):
        self._write(nodeid, "started", 0.0)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._print(report)
        seen = self.reports.setdefault(report.nodeid, [])
        seen.append(report)
        if report.when == PHASES[-1] or report.when not in PHASES:  # not in: pytest-xdist, of a process that ended
            worst = max(seen, key=_rank)
            more = {"text": _reason(worst)} if _rank(worst) else {}
            outcome = tuple(RANK)[_rank(worst)]
            self._write(report.nodeid, outcome, sum(each.duration for each in seen), **more)
            del self.reports[report.nodeid]

    def _print(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        terminal.ensure_newline()
        text = report.longreprtext
        text = text if len(text) <= 6000 else f"{text[:2000]}\n[...]\n{text[-4000:]}"
        terminal.write_line(f"{'=' * 100}\nFAILED {report.nodeid} ({report.when})\n{text}")
        terminal.flush()

    def _write(self, nodeid, outcome, seconds, **more):
        entry = {"id": nodeid, "outcome": outcome, "seconds": round(seconds, 2), "at": int(time.time()), **more}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
