"""Programs in a process each, of one start: a process imports torch and this package, which takes seconds, and forks.

python tests/helpers/programs.py FILE   # FILE: JSON, what `ended` writes

A program sees its own arguments and error output, and ends with what is registered for the end.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """status: the exit status. said: the error output."""

    status: int
    said: str


def ended(commands: list[list[str]], folder: Path) -> list[Ended]:
    """Run programs one after the other. commands: what follows `python`: a script, or -m and a module; arguments."""
    (folder / "commands.json").write_text(json.dumps(commands))
    subprocess.run(
        [sys.executable, __file__, "commands.json"], cwd=folder, check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    statuses = json.loads((folder / "statuses.json").read_text())
    return [Ended(status, (folder / f"said{number}").read_text()) for number, status in enumerate(statuses)]


def main(file: str) -> None:
    import torch._inductor.compile_fx  # noqa: F401

    import fp4compile.cli.main  # noqa: F401

    statuses = []
    for number, command in enumerate(json.loads(Path(file).read_text())):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(f"said{number}", os.O_WRONLY | os.O_CREAT), 2)
            os._exit(run_to_its_end(command))
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    Path("statuses.json").write_text(json.dumps(statuses))


def run_to_its_end(command: list[str]) -> int:
    """Run a program and what is registered for its end; returns its status.

    What Python would do after that takes a second: it takes all modules apart.
    """
    status = 0
    try:
        run(command)
    except SystemExit as end:
        status = end.code or 0
    except Exception:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def run(command: list[str]) -> None:
    """As Python itself does."""
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
