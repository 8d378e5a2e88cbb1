"""All benchmarks of the local GPU, one after the other, each into the file NAME_GPU.json that the pages are made of.

    python -m benchmarks.run_all [--only ceilings linear ...] [--out FOLDER]
    python -m benchmarks.run_all --quick --out FOLDER    # asks every benchmark for less (QUICK): all run, in minutes
    python -m benchmarks.run_all --check                 # exits with 1 where pages and JSON files disagree

Each benchmark runs in a process of its own. One that fails is named with its error, and the others run all the same;
the exit status is then 1. Stop other work on the machine first. `benchmarks.tables` and `benchmarks.roofline` then make
pages and predictions anew.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import roofline, tables

# The copies and products that the others are read beside come first, those that compile models last.
BENCHMARKS = ("ceilings", "quantize", "linear", "float8_linear", "grouped_mm", "gpt_oss_layer", "packing",
              "producers", "mlp_block", "minilm", "llama_decode", "compile_time")  # fmt: skip
QUICK: dict[str, tuple[str, ...]] = {
    "ceilings": ("--replays", "3"),
    "quantize": ("--only", "rows", "both"),
    "linear": ("--rows", "1", "16", "--replays", "3"),
    "float8_linear": ("--rows", "8", "--shapes", "6144x4096", "--replays", "3"),
    "grouped_mm": ("--parts", "decode", "tokens", "--models", "DeepSeek-V3", "--recipes", "nvfp4", "float8_rowwise",
                   "--replays", "3"),
    "gpt_oss_layer": ("--tokens", "1", "64", "--replays", "3"),
    "packing": ("--layers", "2"),
    "producers": ("--parts", "both"),
    "mlp_block": ("--recipes", "nvfp4", "--repeats", "3"),
    "minilm": ("--recipes", "nvfp4"),
    "llama_decode": ("--layers", "2", "--prompt", "256", "--tokens", "16"),
    "compile_time": ("--runs", "1", "--recipes", "nvfp4"),
}  # fmt: skip
_TIMEOUT, _QUICK_TIMEOUT = 3600, 120  # seconds of one benchmark


def measure(names: Sequence[str], folder: Path, quick: bool) -> dict[str, dict[str, Any]]:
    """What the benchmarks of these names write, under their names; {"error": ...} for one that fails.

    It is in the folder's files NAME_GPU.json after each.
    """
    found = {}
    for name in names:
        print(f"== {name}", flush=True)
        found[name] = _run(name, quick)
        print(found[name]["error"] if "error" in found[name] else write(found[name], _path(folder, name)), flush=True)
    return found


def _path(folder: Path, name: str) -> Path:
    device = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return folder / f"{name}_{re.sub(r'[^a-z0-9]+', '_', device).strip('_')}.json"


def _run(name: str, quick: bool) -> dict[str, Any]:
    seconds = _QUICK_TIMEOUT if quick else _TIMEOUT
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out), *(QUICK.get(name, ()) * quick)]
        # A session of its own, so that its children end with it: compilers, and processes of `compile_time`.
        with subprocess.Popen(
            command, cwd=tables.ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as process:
            try:
                _, said = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return {"error": f"did not end within {seconds} seconds"}
        if process.returncode != 0 or not out.exists():
            print(said, file=sys.stderr)
            lines = said.strip().splitlines()
            return {"error": f"status {process.returncode}: {lines[-1] if lines else 'nothing was said'}"}
        return json.loads(out.read_text(encoding="utf-8"))


def write(found: dict[str, Any], path: Path) -> Path:
    """Write what a benchmark found; returns where.

    What the file has beyond that (earlier runs, other machines) stays. Where it has other columns, which another
    benchmark or an earlier state of this one made, a file NAME.new.json beside it is written instead.
    """
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if any(_columns(stored.get(part)) not in (None, _columns(found[part])) for part in found):
        path, stored = path.with_suffix(".new.json"), {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored | found, indent=1) + "\n", encoding="utf-8")
    return path


def _columns(part: Any) -> list[str] | None:
    """Of a part that is rows."""
    return list(part[0]) if isinstance(part, list) and part else None


def main(arguments: list[str] | None = None) -> int:
    """Measure or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="these alone")
    parser.add_argument("--quick", action="store_true", help="ask each for less, in minutes; not for publishing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=tables.RESULTS, help="write the files there")
    parser.add_argument("--check", action="store_true", help="measure nothing, compare pages with files")
    args = parser.parse_args(arguments)
    if args.check:
        return max(tables.main(["--check"]), roofline.main(["--check"]))
    if args.quick and args.out == tables.RESULTS:
        parser.error("--quick: what it measures is not for publishing; name another folder with --out")
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    found = measure(args.only, args.out, args.quick)
    return int(any("error" in each for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
