"""What benchmarks of several ranks share: one process a GPU, rows as they come, and bytes on the wire."""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.profiler import ProfilerActivity, profile

from benchmarks import common

# What a rank of a ring sends, of the bytes of its input, where there are n ranks.
_SENT: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
}
_BYTES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "int": 4, "long int": 8, "unsigned char": 1, "signed char": 1}

Measure = Callable[[str, argparse.Namespace], dict | None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that benchmarks of training steps on several ranks have."""
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 2))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="narrow layers, to try the script")


def run(args: argparse.Namespace, measure: Measure, settings: tuple[str, ...]) -> None:
    """Measure all cases on each rank; the first one publishes them.

    measure: returns the figures of a case, among them "ms"; None for a case that is left out. settings: names of the
    arguments that are written beside the figures.
    """
    with tempfile.TemporaryDirectory() as folder:
        of_a_rank = (args, measure, settings, Path(folder) / "store")
        torch.multiprocessing.spawn(_of_a_rank, of_a_rank, nprocs=args.ranks)


def _of_a_rank(
    rank: int, args: argparse.Namespace, measure: Measure, settings: tuple[str, ...], store: Path
) -> None:  # fmt: skip
    on_gpu = args.device.startswith("cuda")
    if on_gpu:
        args.device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    communication = "nccl" if on_gpu else "gloo"
    dist.init_process_group(communication, init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    told = {name: getattr(args, name) for name in ("ranks", "repeats", "tiny", *settings)}
    told["peer to peer"] = os.environ.get("NCCL_P2P_DISABLE") != "1"
    rows: list[dict] = []
    for case in args.cases:
        torch._dynamo.reset()
        gc.collect()
        row = measure(case, args)
        if row is None:
            continue
        rows.append({"case": case, "of the first": row["ms"] / rows[0]["ms"] if rows else 1.0, **row})
        if not rank:
            print(rows[-1], file=sys.stderr, flush=True)
            common.write(args, told, {"rows": rows})
    if not rank:
        common.publish(args, told, rows)
    dist.destroy_process_group()


def median_time(step: Callable[[], object], args: argparse.Namespace) -> float:
    """The median milliseconds of a step that all ranks run."""
    return statistics.median(times_of(step, args))


def times_of(step: Callable[[], object], args: argparse.Namespace) -> list[float]:
    """The milliseconds of a step that all ranks run, of each repeat."""
    times = []
    for _ in range(args.repeats):
        dist.barrier()
        times.append(common.step_time(step, args.device))
    return times


def collectives_of(step: Callable[[], object], device: str) -> dict[str, tuple[int, float]]:
    """How often a compiled step calls each collective, and the bytes that this rank sends by it in a ring."""
    with tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            step()
            common.synchronize(device)
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    found: dict[str, tuple[int, float]] = {}
    for name, size in _calls(events):
        count, sent = found.get(name, (0, 0.0))
        found[name] = count + 1, sent + size * _SENT[name](dist.get_world_size())
    return found


def _calls(events: list[dict]) -> Iterator[tuple[str, int]]:
    """(name, bytes of the input) of each functional collective in a trace."""
    ends: dict[tuple[int, str], float] = {}
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        room, _, name = event.get("name", "").partition("::")
        name = name.removesuffix("_out").removesuffix("_")  # as Inductor calls them
        if room == "_c10d_functional" and name in _SENT:
            call = event["tid"], name
            if event["ts"] >= ends.get(call, 0):  # otherwise a dispatch inside of the last call
                ends[call] = event["ts"] + event["dur"]
                numel = torch.Size(event["args"]["Input Dims"][0]).numel()
                yield name, numel * _BYTES[event["args"]["Input type"][0]]
