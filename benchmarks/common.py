"""What every benchmark shares: a description of the machine, JSON out, a table."""

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton

STEPS = 5  # in one measurement of `step_time`


def environment(device: str) -> dict[str, Any]:
    """Where and with what a measurement was made."""
    on_gpu = device.startswith("cuda")
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--out", type=Path, help="write the results there as JSON")
    return made


def publish(args: argparse.Namespace, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table; with --out, write them with settings and environment."""
    publish_parts(args, settings, {"rows": rows})


def publish_parts(args: argparse.Namespace, settings: dict[str, Any], parts: dict[str, list[dict[str, Any]]]) -> None:
    """`publish` of several tables, each under its name."""
    print(", ".join(f"{name} {value}" for name, value in environment(args.device).items()))
    print("\n\n".join(table(rows) for rows in parts.values() if rows))
    write(args, settings, parts)


def write(args: argparse.Namespace, settings: dict[str, Any], parts: dict[str, list[dict[str, Any]]]) -> None:
    """With --out, write tables with settings and environment."""
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"environment": environment(args.device), "settings": settings, **parts}
        args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def graph_time(calls: Sequence[Callable[[], object]], replays: int) -> float:
    """Microseconds a call: the median replay of a CUDA graph of the calls."""
    return graph_times([calls], replays)[0]


def graph_times(sequences: Iterable[Sequence[Callable[[], object]]], replays: int) -> list[float]:
    """`graph_time` of several sequences of calls, replayed in turns: the card's clock falls under heavy load."""
    graphs = [(_captured(calls), len(calls)) for calls in sequences]
    for graph, _ in graphs:
        graph.replay()
    rounds = [[_replay(graph) / count for graph, count in graphs] for _ in range(replays)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def step_time(step: Callable[[], object], device: str) -> float:
    """Milliseconds of a step. Nothing waits between steps, so that the CPU is ahead of the GPU, as in training."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()
    begin.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / STEPS


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall-clock time of the work, the device's included."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def on_device(event) -> bool:
    """Whether an event of the profiler is a kernel, a copy or a fill, and no annotation of several."""
    of_host = getattr(event, "is_user_annotation", False) or event.name.startswith(("##", "Torch-Compiled"))
    return event.device_type == torch.autograd.DeviceType.CUDA and not of_host


def device_events(call: Callable[[], object], calls: int = 1) -> list[Any]:
    """What the device did in so many calls, by the profiler."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    return list(filter(on_device, profile.events()))


def kernels_of(step: Callable[[], object], device: str, steps: int = 1) -> dict[str, tuple[float, int]]:
    """Microseconds and launches of each kernel in a step, the mean of so many steps; nothing on a CPU."""
    found: dict[str, list[float]] = {}
    for event in device_events(step, steps) if device.startswith("cuda") else ():
        found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: (sum(times) / steps, len(times) // steps) for name, times in found.items()}


def random(*shape: int) -> torch.Tensor:
    """A bf16 tensor on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def table(rows: list[dict[str, Any]]) -> str:
    """Columns from the keys of the first row; the first to the left, the others to the right."""
    cells = [list(rows[0]), *([_cell(row[key]) for key in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join((line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:]))) for line in cells]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4f}" if isinstance(value, float) else str(value)
