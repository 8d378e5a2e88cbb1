"""The CPU suite under every version of torch that is supported, each in an environment of its own: `make versions`.

    python3 -m benchmarks.versions [--only 2.14.1 2.15.0] [--environments FOLDER] [-- ARGUMENTS OF PYTEST]

Makes the environments that are not there yet (some GB each where pip brings builds for CUDA; these run on CPUs too),
runs the tests that need no GPU in each, and prints a table. Where Triton is not the pinned version, tests marked
`pinned_triton` are left out. Ends with 1 where a test or an environment fails. What was found goes into
benchmarks/results/versions.json and, from there, into the README. A part of the suite, which arguments choose, never
takes the place of a result of the whole suite. Needs Python and make, and nothing else.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "versions.json"
README = ROOT / "README.md"
# Of torch, and the Triton that its builds for CUDA bring. Builds for CPUs bring none.
VERSIONS = {"2.11.0": "3.6.0", "2.13.0": "3.9.0", "2.14.1": "3.8.0", "2.15.0": "3.9.0"}
# The Makefile's, and the marker of tests that hold for the code of this Triton (pyproject.toml).
PINNED_TRITON, OF_PINNED_TRITON = VERSIONS["2.13.0"], "pinned_triton"
WHOLE = "all"
_MARKED = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)
_INSTALLED = "from importlib.metadata import version; print(version('torch'), version('triton'))"


def run(torch: str, environments: str, arguments: list[str]) -> dict[str, Any]:
    """What the tests of one version gave; "failed" is None where they did not run to their end."""
    folder = ROOT / "build" / "versions"
    folder.mkdir(parents=True, exist_ok=True)
    found, constraints = folder / f"{torch}.xml", folder / "constraints.txt"
    found.unlink(missing_ok=True)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    constraints.write_text("".join(line for line in pins if not line.startswith("torch==")), encoding="utf-8")
    left_out = "" if VERSIONS[torch] == PINNED_TRITON else OF_PINNED_TRITON
    marked = f"not gpu and not {left_out}" if left_out else "not gpu"
    options = ["-m", marked, f"--junitxml={found.relative_to(ROOT)}", *arguments]
    settings = {
        "VENV": f"{environments}/{torch}", "TORCH": torch, "TRITON": VERSIONS[torch], "PYTHON": sys.executable,
        "CONSTRAINTS": constraints.relative_to(ROOT), "PYTEST": shlex.join(options).replace("$", "$$"),
    }  # fmt: skip
    # Without the settings of the make that runs this. Pins of torch in pip's own configuration do not hold here.
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    command = ["make", "--no-print-directory", "suite", *(f"{name}={value}" for name, value in settings.items())]
    status = subprocess.run(
        command, cwd=ROOT, env=inherited | {"PIP_CONSTRAINT": str(settings["CONSTRAINTS"])}
    ).returncode  # fmt: skip
    tests = {"tests": shlex.join(arguments) or WHOLE, "left_out": left_out}
    result = {"torch": torch, "triton": VERSIONS[torch]} | tests | counted(found)
    if status and not result["failed"]:
        result["failed"] = None
    if result["passed"]:
        python = ROOT / str(settings["VENV"]) / "bin" / "python"
        installed = subprocess.run([python, "-c", _INSTALLED], cwd=ROOT, capture_output=True, text=True, check=True)
        result["torch"], result["triton"] = installed.stdout.split()
    return result | {"date": datetime.date.today().isoformat()}


def counted(file: Path) -> dict[str, int | None]:
    """How many tests passed, failed and were skipped, of the XML file that pytest wrote; None where it wrote none."""
    if not file.exists():
        return {"passed": None, "failed": None, "skipped": None}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        kinds = {part.tag for part in case}
        counts["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts


def good(result: dict[str, Any]) -> bool:
    return result["failed"] == 0 and bool(result["passed"])


def table(results: list[dict[str, Any]]) -> str:
    names = ("torch", "triton", "tests", "left_out", "passed", "failed", "skipped", "date")
    rows = [names, *(tuple("?" if one[name] is None else str(one[name]) for name in names) for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def merged(stored: list[dict[str, Any]], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of every version that was tried, the newest of each; of a part only where the whole is not there."""
    kept = {one["torch"].partition("+")[0]: one for one in stored}
    for one in results:
        version = one["torch"].partition("+")[0]
        if one["tests"] == WHOLE or kept.get(version, one)["tests"] != WHOLE:
            kept[version] = one
    return [kept[version] for version in sorted(kept, key=lambda text: [int(part) for part in text.split(".")])]


def sentence(results: list[dict[str, Any]]) -> str:
    """What the README says of the results."""
    tried = []
    for one in results:
        notes = [f"Triton {one['triton']}" if not tried else one["triton"]]
        notes += [] if one["tests"] == WHOLE else [f"`{one['tests']}` alone"]
        failing = {None: "not run to its end", 1: "1 test fails"}.get(one["failed"], f"{one['failed']} tests fail")
        notes += [] if good(one) else [failing]
        tried.append(f"{one['torch'].partition('+')[0]} ({'; '.join(notes)})")
    said = f"Tried on CPUs by `make versions`: torch {', '.join(tried)}."
    if any(one["left_out"] for one in results):
        said += f" Tests of the code that Triton compiles ran under Triton {PINNED_TRITON} alone."
    return textwrap.fill(said, 120)


def published(readme: str, results: list[dict[str, Any]]) -> str:
    """The README with the sentence of the results in its place."""
    return _MARKED.sub(lambda found: f"{found[1]}{sentence(results)}\n{found[2]}", readme)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VERSIONS, default=list(VERSIONS), help="these versions of torch")
    parser.add_argument("--environments", default=".venv-versions", help="folder of the environments")
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --: files, folders, options")
    args = parser.parse_args(arguments)
    results = []
    for torch in args.only:
        print(f"torch {torch}", flush=True)
        results.append(run(torch, args.environments, args.pytest))
    stored = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else []
    content = merged(stored, results)
    OUT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    README.write_text(published(README.read_text(encoding="utf-8"), content), encoding="utf-8")
    print(table(results))
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
