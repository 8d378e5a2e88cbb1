"""Process groups of tests: a rank that waits in vain raises after two minutes, not after torch's half an hour."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from os import PathLike
from pathlib import Path

import torch.distributed as dist

# Of one rendezvous or collective. The other rank may still import torch, or compile, on a busy machine.
PATIENCE = timedelta(seconds=120)
ROOT = Path(__file__).parents[2]


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


def run_ranks(
    command: Callable[[int], list[str]], folder: Path, ranks: int = 2, patience: float = 300
) -> tuple[list[int | None], str]:
    """Run Python once for each rank, until all have ended, one has failed, or `patience` seconds have passed.

    command: a rank's arguments of Python. folder: for what the ranks print.
    Returns their statuses, None of a rank that had to be killed, and what they printed.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes, said = [], [folder / f"said{rank}" for rank in range(ranks)]
    for rank in range(ranks):
        with said[rank].open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command(rank)], cwd=ROOT, env=environment, stdout=file, stderr=file
                )  # fmt: skip
            )
    end, statuses = time.monotonic() + patience, [None] * ranks
    try:
        # Where one has failed, the others wait for it in vain.
        while None in statuses and not any(statuses) and time.monotonic() < end:
            time.sleep(0.1)
            statuses = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return statuses, "".join(path.read_text() for path in said)
