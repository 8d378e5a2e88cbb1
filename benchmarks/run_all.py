"""All benchmarks of the GPU that is there in one go: one JSON file, and one page with a plot made of it.

    python -m benchmarks.run_all [--only ceilings linear ...]   # measures; writes results/all_GPU.json, .md and .png
    python -m benchmarks.run_all --publish results/all_h200.json  # its parts into the files that docs/measured.md is of
    python -m benchmarks.run_all --check                        # exits with 1 where pages and JSON files disagree

Each benchmark runs in a process of its own, one after the other. One that fails is named with its error, and the
others run all the same; the exit status is then 1. Stop other work on the machine first.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, roofline, tables
from fp4compile import gpus

# The copies and products that the others are read beside come first.
BENCHMARKS = ("ceilings", "quantize", "linear", "mlp_block", "llama_decode", "minilm", "compile_time")
_TIMEOUT = 3600  # seconds of one benchmark


def measure(names: list[str]) -> dict[str, Any]:
    """What the benchmarks of these names write, under their names; {"error": ...} for one that fails."""
    found: dict[str, Any] = {}
    for name in names:
        print(f"== {name}", flush=True)
        found[name] = _run(name)
    made = {"environment": common.environment("cuda"), "benchmarks": found}
    gpu = gpus.present()
    if gpu is not None and all("rows" in found.get(name, {}) for name in ("linear", "quantize")):
        rows = roofline.compared(found["linear"], found["quantize"], gpu.name)
        made["roofline"] = {"summary": roofline.summary(rows), "rows": rows}
    return made


def _run(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(out)]
        try:
            done = subprocess.run(command, cwd=tables.ROOT, stderr=subprocess.PIPE, text=True, timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            return {"error": f"did not end within {_TIMEOUT} seconds"}
        if done.returncode != 0 or not out.exists():
            said = done.stderr.strip().splitlines()
            return {"error": f"status {done.returncode}: {said[-1] if said else 'nothing was said'}"}
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
        lines += [f"Failed: {found['error']}", ""] if "error" in found else _table(found["rows"])
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

    What a file has beyond what the benchmark writes (earlier runs, other machines) stays.
    """
    content, gpu = json.loads(path.read_text(encoding="utf-8")), path.stem.removeprefix("all_")
    changed = []
    for name, found in content["benchmarks"].items():
        own = folder / f"{name}_{gpu}.json"
        if "error" not in found and own.exists():
            own.write_text(json.dumps(json.loads(own.read_text()) | found, indent=1) + "\n", encoding="utf-8")
            changed.append(own)
    return changed


def check(folder: Path) -> int:
    """Exit status: 1 where a page of a run, or a table or prediction of docs/measured.md, is not that of its files."""
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
    parser.add_argument("--check", action="store_true", help="measure nothing, compare pages with files")
    parser.add_argument("--publish", type=Path, metavar="FILE", help="measure nothing, use the parts of an earlier run")
    args = parser.parse_args(arguments)
    if args.check:
        return check(tables.RESULTS)
    if args.publish is not None:
        if not args.publish.exists():
            parser.error(f"--publish: there is no file {str(args.publish)!r}")
        print("changed:", ", ".join(path.name for path in publish(args.publish, tables.RESULTS)) or "nothing")
        return max(roofline.main([]), tables.main([]))
    if not torch.cuda.is_available():
        parser.error("there is no GPU to measure on")
    content = measure(args.only)
    print(write(content, tables.RESULTS))
    return int(any("error" in found for found in content["benchmarks"].values()))


if __name__ == "__main__":
    sys.exit(main())
