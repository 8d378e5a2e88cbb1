"""The interface of a pass, and the runner of passes: it switches, times, counts and dumps them."""

import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.fx import Graph

from fp4compile.report.report import PassRun

# A function of the graph and the pass's other arguments, which changes the graph in place and returns the number of
# matches. Its name is the pass's name in the report, in dumps and in `fp4compile.config.disabled_passes`.
Pass = Callable[..., int]

_dump_number = itertools.count()


def run_passes(
    passes: Iterable[Pass], graph: Graph, *arguments: object, disabled: Collection[str] = ()
) -> dict[str, PassRun]:
    """Run the passes in order on one graph; returns the matches and the time of each pass that ran.

    arguments: passed to every pass after the graph. disabled: names of the passes to leave out.
    """
    runs: dict[str, PassRun] = {}
    for one in passes:
        if one.__name__ not in disabled:
            with _dumped(graph, one.__name__):
                start = time.perf_counter()
                matches = one(graph, *arguments)
                runs[one.__name__] = PassRun(matches, time.perf_counter() - start)
    return runs


def summary(runs: dict[str, PassRun]) -> str:
    """The runs as one line for the log."""
    return ", ".join(f"{name} {run.matches} in {1e3 * run.seconds:.1f} ms" for name, run in runs.items())


@contextmanager
def _dumped(graph: Graph, name: str):
    """Write the graph before and after a pass to the directory FP4COMPILE_DUMP, if that is set."""
    directory = os.environ.get("FP4COMPILE_DUMP")
    if not directory:
        yield
        return
    stem = f"{os.getpid()}_{next(_dump_number):03d}_{name}"
    _write(graph, Path(directory) / f"{stem}_before.py")
    try:
        yield
    finally:
        _write(graph, Path(directory) / f"{stem}_after.py")


def _write(graph: Graph, path: Path) -> None:
    owner = graph.owning_module
    text = torch.fx.GraphModule(owner or {}, graph).print_readable(print_output=False)
    graph.owning_module = owner  # making a module of the graph had changed it
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
