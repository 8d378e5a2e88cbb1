"""Process groups of tests: a rank that waits in vain raises after two minutes, not after torch's half an hour."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from os import PathLike
from pathlib import Path

import torch.distributed as dist

from tests.helpers import quiet_compiler

# Of one rendezvous or collective. The other rank may still import torch, or compile, on a busy machine.
PATIENCE = timedelta(seconds=120)


def begin(store: str | PathLike, rank: int, ranks: int = 2, communication: str = "gloo") -> None:
    """Begin the default process group. store: the file at which the ranks meet."""
    dist.init_process_group(
        communication, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=PATIENCE
    )  # fmt: skip


def end() -> None:
    """End the default process group, if there is one, in the process of a test.

    A thread of gloo may still hold tensors of the last collective. The group's destructor waits for that thread without
    releasing Python's lock, which the thread needs to free a tensor. Collecting garbage leaves the thread the time.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def alone():
    """The default process group of one rank."""
    hook = sys.excepthook  # each beginning of a group puts another one before it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def run_ranks(
    work: Callable[..., None], arguments: Sequence[object], folder: Path, ranks: int = 2, method: str = "forkserver",
    patience: float = 300,
) -> tuple[list[int | None], str]:  # fmt: skip
    """Call `work(rank, *arguments)` in a process for each rank, until all have ended, one has failed, or `patience`
    seconds have passed.

    work: a function of a module. folder: for what the ranks print. method: of multiprocessing. By "forkserver" the
    ranks of all tests are forked from one process, which has imported the module that was asked for first: imports
    take seconds. Ranks that use GPUs need "spawn".
    Returns their statuses, negative ones of ranks that had to be killed, and what they printed.
    """
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([work.__module__, "tests.helpers.hashed_sources"])
    said = [folder / f"said{rank}" for rank in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(path, dict(os.environ), work, rank, *arguments))
        for rank, path in enumerate(said)
    ]
    end = time.monotonic() + patience
    try:
        for process in processes:
            process.start()
        # Where one has failed, the others wait for it in vain.
        while any(process.exitcode is None for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return [process.exitcode for process in processes], "".join(path.read_text() for path in said)


def _rank(said: Path, environment: dict[str, str], work: Callable[..., None], *arguments: object) -> None:
    """Call `work` with what the test's environment is now, which is not what the forking process began with."""
    for number in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    quiet_compiler.leave_out_diagnostics()
    work(*arguments)
