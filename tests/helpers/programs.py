"""Python programs in a process each, which start at once: a server has imported torch and this package, and forks.

Both imports take seconds, longer than most programs. The first program of a process of tests starts the server, which
ends with that process. Triton's interpreter is chosen before Triton is imported: its programs have another server.
Imports ask for a GPU, which no forked process can then use: where there is one, each program imports for itself.

A program sees its own arguments, folder, variables and output, and ends with what is registered for the end.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
INTERPRET = "TRITON_INTERPRET"


class Ended(NamedTuple):
    """status: the exit status, negative for a signal. printed: the output. said: the error output."""

    status: int
    printed: str
    said: str


# ---------------------------------------------------------------- in the process of the tests


@functools.cache
def _server(interpreter: str) -> subprocess.Popen:
    import torch  # not in the server, see above

    # Hashes of strings differ from the hashes in the process of the tests: no program's result may depend on them.
    variables = {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "17", "OMP_NUM_THREADS": "1", INTERPRET: interpreter}
    environment, pipe = {**os.environ, **variables}, subprocess.PIPE
    command = [sys.executable, __file__, *["import"] * (not torch.cuda.is_available())]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, text=True)


class Program:
    """A program that runs.

    command: what follows `python`: a script, -m and a module, or -c and code; then its arguments. folder: for its
    output. cwd: where it runs. environment: variables beside the present ones.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
        self._server, self._status = _server(variables.get(INTERPRET, "0")), None
        self._number = self._ask("start", command, str(folder), str(cwd), variables)
        self._files = [folder / f"{name}{self._number}" for name in ("printed", "said")]

    def _ask(self, *question) -> int | None:
        print(json.dumps(question), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the server of programs has ended: see the error output"
        return json.loads(answer)

    def poll(self) -> int | None:
        """The exit status, None before the end."""
        if self._status is None:
            self._status = self._ask("poll", self._number)
        return self._status

    def ended(self, timeout: float = 300) -> Ended:
        """Wait for the end. A program that takes longer than that many seconds is killed."""
        end = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        self.kill()
        assert self._status is not None
        return Ended(self._status, *(file.read_text() for file in self._files))

    def kill(self) -> None:
        """End the program if it runs."""
        if self.poll() is None:
            self._status = self._ask("kill", self._number)


# ---------------------------------------------------------------- in the server


def serve() -> None:
    """Answer questions, a line each, until there are no more; then end all programs."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    if sys.argv[1:]:
        import_all()
    running: set[int] = set()
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        print(json.dumps(VERBS[verb](running, *arguments)), file=answers, flush=True)
    for number in running:
        os.kill(number, signal.SIGKILL)


def import_all() -> None:
    """What most programs import. Nothing is compiled: torch would remember that there is no GPU, which some pretend."""
    import pytest  # noqa: F401

    import fp4compile.cli.main  # noqa: F401
    from tests.helpers import hashed_sources, quiet_compiler  # noqa: F401

    quiet_compiler.leave_out_keys_and_times()


def start(running: set[int], command: list[str], folder: str, cwd: str, variables: dict[str, str]) -> int:
    number = os.fork()
    if number == 0:
        os._exit(in_child(command, folder, cwd, variables))
    running.add(number)
    return number


def poll(running: set[int], number: int, options: int = os.WNOHANG) -> int | None:
    ended, status = os.waitpid(number, options)
    if not ended:
        return None
    running.remove(number)
    return os.waitstatus_to_exitcode(status)


def kill(running: set[int], number: int) -> int | None:
    os.kill(number, signal.SIGKILL)
    return poll(running, number, options=0)


VERBS = {"start": start, "poll": poll, "kill": kill}


def in_child(command: list[str], folder: str, cwd: str, variables: dict[str, str]) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for descriptor, name in ((1, "printed"), (2, "said")):
        os.dup2(os.open(Path(folder) / f"{name}{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    return run_to_its_end(command)


def run_to_its_end(command: list[str]) -> int:
    """Run a program and what is registered for its end; returns its status.

    What Python would do after that takes a second: it takes all modules apart.
    """
    status = 0
    try:
        run(command)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def run(command: list[str]) -> None:
    """As Python itself does."""
    first, *rest = command
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = command, str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve()
    os._exit(0)  # Python would take all modules apart first
