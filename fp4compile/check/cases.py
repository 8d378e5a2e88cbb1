"""Cases that may crash the GPU: they run in a separate process, which returns their findings."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fp4compile import _compat
from fp4compile.hardware import Target
from fp4compile.templates.launch import target_of

# Seconds for one case: the first one imports torch, a slow one compiles several kernels.
PATIENCE = 180.0


@dataclass(frozen=True)
class Case:
    """One check to run. run: returns the findings, as plain values for JSON.

    A non-empty value of the key "wrong" is a failure.
    """

    name: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Finding:
    """The result of a case. error: the exception that it raised, or how it ended the process; None for neither."""

    name: str
    values: dict[str, Any]
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.values.get("wrong"))

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.values, **({} if self.error is None else {"error": self.error})}


def in_process(cases: Callable[[], Sequence[Case]], patience: float = PATIENCE) -> Iterator[Finding]:
    """The findings of all cases, which run in another process; a new process is started where it ends too early.

    cases: a module-level function that returns equal cases in every process. patience: seconds for one case.
    """
    context = multiprocessing.get_context("spawn")  # a CUDA context does not survive a fork
    names, done = [case.name for case in cases()], 0
    while done < len(names):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(cases, done, theirs), daemon=True)
        process.start()
        theirs.close()
        usable = True
        while usable and done < len(names):
            try:
                if ours.poll(patience):
                    finding, usable = ours.recv()
                else:
                    finding, usable = Finding(names[done], {}, f"did not end within {patience:.0f} seconds"), False
            except (EOFError, OSError):
                process.join()
                finding, usable = Finding(names[done], {}, f"ended the process with status {process.exitcode}"), False
            yield finding
            done += 1
        process.kill()
        process.join()


def _work(cases: Callable[[], Sequence[Case]], first: int, connection: Any) -> None:
    """Run the cases from `first` on; send each finding, and whether the GPU can still be used."""
    for case in cases()[first:]:
        finding = find(case)
        usable = _usable()
        if not usable and finding.error is None:
            finding = Finding(case.name, finding.values, "left the GPU unusable")
        connection.send((finding, usable))
        if not usable:
            return


def find(case: Case) -> Finding:
    """Run a case in this process; returns its finding."""
    try:
        return Finding(case.name, case.run())
    except Exception as error:
        said = str(error).strip().splitlines()
        return Finding(case.name, {}, f"{type(error).__name__}: {said[0] if said else ''}"[:300])


def _usable() -> bool:
    if not torch.cuda.is_available():
        return True
    with contextlib.suppress(Exception):
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item() == 1)
    return False


class Machine(Protocol):
    """What runs kernels: `Here` or `LaunchSimulator`. device: of their tensors. running: lasts while they run."""

    @property
    def target(self) -> Target: ...

    @property
    def device(self) -> str: ...

    def running(self) -> contextlib.AbstractContextManager[None]: ...


class Here:
    """The GPU of this machine, or Triton's interpreter."""

    @property
    def target(self) -> Target:
        return target_of(torch.device(self.device))

    @property
    def device(self) -> str:
        return "cpu" if _compat.interpreting() else "cuda"

    def running(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()
