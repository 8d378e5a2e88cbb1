"""Random programs in several processes. Each lives long, keeps what it has compiled, and takes the next seed when free.

A process that ends or is stuck is replaced, and the program that it had is a finding.
"""

import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.gpu_run.devices import FOR_WORKERS, rotated, settle_inductor, still_usable
from tests.gpu_run.records import is_done, program, read_records

STUCK = 200.0  # seconds after which a program counts as stuck; most take ten


@dataclass(frozen=True)
class Outcome:
    """Of one program. finding: its kind and text, or None; shown: all that is printed of it; exact: in every bit."""

    seed: int
    finding: str | None
    shown: str
    seconds: float
    exact: bool


@dataclass
class Worker:
    """A process, the end of its pipe, and the seed that it has with the time since when."""

    process: Any
    pipe: Connection
    seed: int | None = None
    since: float = 0.0


def fuzz(options: Any) -> int:
    """`python -m tests.fuzz` with its options in `options.jobs` processes; returns 1 if there was a finding."""
    known = read_records(options.records) if options.records else {}
    seeds = [
        seed for seed in range(options.seed, options.seed + options.count) if not is_done(known.get(program(seed)))
    ]
    start, run, exact, found, used = time.perf_counter(), 0, 0, 0, 0.0
    outcomes = outcomes_of(seeds, options, min(options.jobs, len(seeds)))
    try:
        for outcome in outcomes:
            run, exact, found = run + 1, exact + outcome.exact, found + (outcome.finding is not None)
            used += outcome.seconds
            _tell(outcome, options)
            if found >= options.stop:
                break
    finally:
        outcomes.close()
    if not options.json:
        seconds = time.perf_counter() - start
        print(f"{run} runs in {seconds:.0f} s ({used / max(run, 1):.1f} s each in {options.jobs} processes), "
              f"{exact} equal in every bit, {found} findings", flush=True)  # fmt: skip
    return 1 if found else 0


def _tell(outcome: Outcome, options: Any) -> None:
    if options.json:
        print(json.dumps({"seed": outcome.seed, "finding": outcome.finding}), flush=True)
    elif outcome.finding is not None:
        print("=" * 100, outcome.shown, sep="\n", flush=True)
    if options.records:
        entry = {"id": program(outcome.seed), "outcome": "passed" if outcome.finding is None else "failed",
                 "seconds": round(outcome.seconds, 2), "at": int(time.time()), "exact": outcome.exact}  # fmt: skip
        if outcome.finding is not None:
            entry["text"] = outcome.finding[:300]
        with Path(options.records).open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def outcomes_of(
    seeds: Iterable[int], options: Any, jobs: int, serve: Callable[[Connection, Any], None] | None = None,
    stuck: float = STUCK,
) -> Iterator[Outcome]:  # fmt: skip
    """The outcomes of the programs, as they come. serve: what a process runs."""
    left = list(reversed(list(seeds)))
    workers = [_start(number, options, serve or _serve) for number in range(jobs)]
    try:
        for worker in workers:
            _next(worker, left)
        while any(worker.seed is not None for worker in workers):
            busy = {worker.pipe: number for number, worker in enumerate(workers) if worker.seed is not None}
            heard = wait(list(busy), timeout=min(1.0, stuck))
            for pipe in heard:
                outcome, alive = _heard(workers[busy[pipe]])
                if not alive:
                    workers[busy[pipe]] = _start(busy[pipe], options, serve or _serve)
                _next(workers[busy[pipe]], left)
                yield outcome
            for number, worker in enumerate(workers):
                if worker.seed is not None and time.monotonic() - worker.since > stuck:
                    outcome = _lost(worker, f"stuck: no outcome after {stuck:.0f} s")
                    workers[number] = _start(number, options, serve or _serve)
                    _next(workers[number], left)
                    yield outcome
    finally:
        for worker in workers:
            worker.pipe.close()  # a free process ends then
        for worker in workers:
            worker.process.join(0 if worker.seed is not None else 10)
            worker.process.kill()
            worker.process.join()


def _start(number: int, options: Any, serve: Callable[[Connection, Any], None]) -> Worker:
    """A new process, which sees the GPUs in an order of its own."""
    context = multiprocessing.get_context("spawn")
    kept = dict(os.environ)
    for name, value in FOR_WORKERS.items():
        os.environ.setdefault(name, value)
    os.environ.update(rotated(number))
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    os.environ.clear()
    os.environ.update(kept)
    return Worker(process, ours)


def _next(worker: Worker, left: list[int]) -> None:
    """Give the process another seed, if one is left."""
    worker.seed = left.pop() if left else None
    worker.since = time.monotonic()
    if worker.seed is not None:
        worker.pipe.send(worker.seed)


def _heard(worker: Worker) -> tuple[Outcome, bool]:
    """The outcome that a process has sent, and whether the process goes on."""
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join(5)
        return _lost(worker, f"the process ended with status {worker.process.exitcode}"), False


def _lost(worker: Worker, text: str) -> Outcome:
    worker.process.kill()
    seconds = time.monotonic() - worker.since
    return Outcome(worker.seed, f"crash: {text}", f"seed {worker.seed}: crash\n{text}", seconds, False)


def _serve(pipe: Connection, options: Any) -> None:
    """A process: check the programs whose seeds come, until the GPU cannot be used any more."""
    warnings.simplefilter("ignore")  # of programs whose recipe leaves all alone, and of Dynamo
    from tests.fuzz.__main__ import check_one, fuzzer_of

    if options.device == "cuda":
        settle_inductor()
    fuzzer, alive = fuzzer_of(options), True
    while alive:
        try:
            seed = pipe.recv()
        except EOFError:
            return
        start, before = time.perf_counter(), fuzzer.exact
        finding, shown = check_one(fuzzer, seed, options)
        alive = finding is None or still_usable()
        text = None if finding is None else f"{finding.kind}: {finding.text}"
        pipe.send((Outcome(seed, text, shown, time.perf_counter() - start, fuzzer.exact > before), alive))
    sys.stdout.flush()
    os._exit(0)
