"""All benchmarks of the GPU that is there in one go: one JSON file, and one page with a plot made of it.

    python -m benchmarks.run_all [--quick] [--only ceilings linear ...] [--out FOLDER]   # all_GPU.json, .md and .png
    python -m benchmarks.run_all --publish results/all_h200.json  # its parts into the files that the pages are made of
    python -m benchmarks.run_all --check                        # exits with 1 where pages and JSON files disagree

Each benchmark runs in a process of its own, one after the other. One that fails is named with its error, and the
others run all the same; the exit status is then 1. The files are written after each, so that a run that is stopped
leaves what it has. --quick asks every benchmark for less (QUICK): it shows that all run, in minutes, and is not for
publishing. Stop other work on the machine first.
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

from benchmarks import common, roofline, tables
from fp4compile import hardware

# The copies and products that the others are read beside come first, those that compile models last.
BENCHMARKS = ("ceilings", "quantize", "linear", "grouped_mm", "scale_sweep", "packing", "producers", "mlp_block",
              "llama_block", "minilm", "llama_decode", "compile_time")  # fmt: skip
QUICK: dict[str, tuple[str, ...]] = {
    "ceilings": ("--replays", "3"),
    "quantize": ("--only", "rows", "both"),
    "linear": ("--rows", "1", "16", "--replays", "3"),
    "grouped_mm": ("--parts", "decode", "tokens", "--models", "DeepSeek-V3", "--recipes", "nvfp4", "float8_rowwise",
                   "--replays", "3"),
    "packing": ("--layers", "2"),
    "producers": ("--parts", "both"),
    "mlp_block": ("--recipes", "nvfp4", "--repeats", "3"),
    "llama_block": ("--seconds", "20"),
    "minilm": ("--recipes", "nvfp4"),
    "llama_decode": ("--layers", "2", "--prompt", "256", "--tokens", "16"),
    "compile_time": ("--runs", "1", "--recipes", "nvfp4"),
}  # fmt: skip
_TIMEOUT, _QUICK_TIMEOUT = 3600, 120  # seconds of one benchmark


def measure(names: Sequence[str], folder: Path, quick: bool) -> dict[str, Any]:
    """What the benchmarks of these names write, under their names; {"error": ...} for one that fails. All that there is
    is in the folder's files after each."""
    content: dict[str, Any] = {"environment": common.environment("cuda"), "quick": quick, "benchmarks": {}}
    for name in names:
        print(f"== {name}", flush=True)
        content["benchmarks"][name] = _run(name, quick)
        print(write(content | _predicted(content["benchmarks"]), folder), flush=True)
    return content


def _predicted(found: dict[str, Any]) -> dict[str, Any]:
    """The comparison with predictions, on a GPU that these know, of the benchmarks that ran."""
    gpu = hardware.present()
    files = {name: found[name] for name in roofline.FILES if "error" not in found.get(name, {"error": ""})}
    if gpu is None or not files:
        return {}
    rows = roofline.compared(files, gpu)
    return {"roofline": {"summary": roofline.summary(rows), "rows": rows}}


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


def page(content: dict[str, Any], name: str) -> str:
    """The Markdown page of a run. name: of its files, without the ending."""
    environment = content["environment"]
    lines = [f"# All benchmarks: {environment['device']}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in environment.items()), ""]
    lines += [f"Made of {name}.json by `python -m benchmarks.run_all`; do not edit.", ""]
    if "roofline" in content:
        lines += ["## Predicted and measured", ""]
        lines += [f"![predicted over measured]({name}.png)", ""] if content["plot"] else []
        lines += _table(content["roofline"]["summary"])
    for benchmark, found in content["benchmarks"].items():
        lines += [f"## {benchmark}", ""]
        if "error" in found:
            lines += [f"Failed: {found['error']}", ""]
        for part in (part for part in found.values() if isinstance(part, list)):
            lines += _table(part)
    return "\n".join(lines)


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Markdown of plain rows, whose keys are the header; longer values (lists) are left out."""
    if not rows:
        return ["No rows.", ""]
    keys = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    cells = [[_cell(row.get(key)) for key in keys] for row in rows]
    rule = ["---", *["--:"] * (len(keys) - 1)]
    return ["| " + " | ".join(line) + " |" for line in (keys, rule, *cells)] + [""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def write(content: dict[str, Any], folder: Path) -> Path:
    """Write the JSON file, the page and, where matplotlib is installed, the plot; returns the JSON file's path."""
    name = "all_" + re.sub(r"\W+", "_", content["environment"]["device"].lower().removeprefix("nvidia ")).strip("_")
    path = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    content = content | {"plot": "roofline" in content and _plotted(content["roofline"]["rows"], path)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(content, name), encoding="utf-8")
    return path


def _plotted(rows: list[dict[str, Any]], path: Path) -> bool:
    """Make the plot, if matplotlib is installed."""
    try:
        roofline.plot(rows, path.with_suffix(".png"))
    except ImportError:
        print("matplotlib is not installed: the page has no plot", file=sys.stderr)
        return False
    return True


def publish(path: Path, folder: Path) -> list[Path]:
    """Put the parts of a run into the files NAME_GPU.json of the folder, and return these.

    What a file has beyond what the benchmark writes (earlier runs, other machines) stays. A file with other columns,
    which another benchmark or an earlier state of this one made, is left alone.

    Raises ValueError for a quick run.
    """
    content, gpu = json.loads(path.read_text(encoding="utf-8")), path.stem.removeprefix("all_")
    if content["quick"]:
        raise ValueError(f"{path.name} is of a run with --quick, which is not for publishing")
    changed = []
    for name, found in content["benchmarks"].items():
        own = folder / f"{name}_{gpu}.json"
        why = "it failed" if "error" in found else None if own.exists() else f"there is no {own.name}"
        stored = {} if why else json.loads(own.read_text(encoding="utf-8"))
        if any(_columns(stored.get(part)) not in (None, _columns(found[part])) for part in found):
            why = f"{own.name} has other columns"
        if why is None:
            own.write_text(json.dumps(stored | found, indent=1) + "\n", encoding="utf-8")
            changed.append(own)
        else:
            print(f"{name} is not published: {why}", file=sys.stderr)
    return changed


def _columns(part: Any) -> list[str] | None:
    """Of a part that is rows."""
    return list(part[0]) if isinstance(part, list) and part else None


def check(folder: Path) -> int:
    """Exit status: 1 where a page of a run, a page of measured results, or a prediction, is not that of its files."""
    status = max(tables.main(["--check"]), roofline.main(["--check"]))
    for path in sorted(folder.glob("all_*.json")):
        made = page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        stored = path.with_suffix(".md")
        if not stored.exists() or stored.read_text(encoding="utf-8") != made:
            print(f"{stored.name} is out of date: run python -m benchmarks.run_all", file=sys.stderr)
            status = 1
    return status


def main(arguments: list[str] | None = None) -> int:
    """Measure, publish or check; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="these alone")
    parser.add_argument("--quick", action="store_true", help="ask each for less, in minutes; not for publishing")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=tables.RESULTS, help="write the files there")
    parser.add_argument("--check", action="store_true", help="measure nothing, compare pages with files")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="measure nothing, use the parts of an earlier run")
    args = parser.parse_args(arguments)
    if args.check:
        return check(tables.RESULTS)
    if args.publish is not None:
        if not args.publish.exists():
            parser.error(f"--publish: there is no file {str(args.publish)!r}")
        try:
            changed = publish(args.publish, tables.RESULTS)
        except ValueError as error:
            parser.error(f"--publish: {error}")
        print("changed:", ", ".join(path.name for path in changed) or "nothing")
        return max(roofline.main([]), tables.main([]))
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    content = measure(args.only, args.out, args.quick)
    return int(any("error" in found for found in content["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
