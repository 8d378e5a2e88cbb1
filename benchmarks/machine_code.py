"""What `check-sm100` finds of the kernels, under several versions of Triton. Needs no GPU.

    python -m benchmarks.machine_code --python .venv/bin/python ../triton-3.6/bin/python

Each interpreter compiles the kernels of this checkout with its own Triton. What is found goes into
benchmarks/results/machine_code.json. Kernels below their line are results too: they do not fail this script.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "machine_code.json"
GPUS = (100, 103, 120)


def found_by(python: str) -> dict[str, Any]:
    """What the gate finds with the Triton of one interpreter: environment, and tables of products and of quantisers."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [python, "-m", "fp4compile", "check-sm100", "--sm", *map(str, GPUS), "--json", str(file)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        if not file.exists():
            raise RuntimeError(f"{python}: check-sm100 wrote nothing and ended with status {done.returncode}")
        content = json.loads(file.read_text(encoding="utf-8"))
    return {"environment": content["environment"]} | {name: table(content[name]) for name in ("products", "quantizers")}


def table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows as lists, under the names of their columns. A kernel that did not compile lacks some."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "rows": [[_short(row.get(name)) for name in columns] for row in rows]}


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def dumps(content: dict[str, Any], indent: str = "") -> str:
    """JSON with one row of a table in a line."""
    inner = indent + " "
    if isinstance(content, dict):
        items = [f"{inner}{json.dumps(name)}: {dumps(value, inner)}" for name, value in content.items()]
        return "{\n" + ",\n".join(items) + "\n" + indent + "}"
    if isinstance(content, list) and content and isinstance(content[0], (list, dict)):
        return "[\n" + ",\n".join(inner + (json.dumps(each) if isinstance(each, list) else dumps(each, inner))
                                  for each in content) + "\n" + indent + "]"  # fmt: skip
    return json.dumps(content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters, each with a Triton")
    parser.add_argument("--commit", help="of the kernels; the one that is checked out, where not given")
    args = parser.parse_args()
    commit = args.commit or subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()  # fmt: skip
    content = {"commit": commit, "runs": [found_by(python) for python in args.python]}
    OUT.write_text(dumps(content) + "\n", encoding="utf-8")
    for run in content["runs"]:
        for name in ("products", "quantizers"):
            problems = [row[run[name]["columns"].index("problems")] for row in run[name]["rows"]]
            print(f"Triton {run['environment']['triton']}, {name}: {sum(map(bool, problems))} of {len(problems)} "
                  "launches are below their line")  # fmt: skip


if __name__ == "__main__":
    main()
