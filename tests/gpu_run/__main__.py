"""`make gpu`: every test that needs a GPU, and random programs, in parts that each end within minutes.

Part 0 is the tests; the others are 500 programs of the fuzzer each. A part prints failures as they come, and a line of
JSON when it has ended. A later call runs what has not passed on these files yet: tests and programs that passed are not
run again, also those of a part that was stopped at its limit. What it ran on, and what became of it, is in
benchmarks/results/gpu_suite.json. Where the run was on a copy without git, `--stamp` in the checkout adds the commit,
if the files are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu_run.devices import FOR_WORKERS
from tests.gpu_run.records import program
from tests.gpu_run.runner import PYTEST, Part, has_passed, result, run_parts, write
from tests.gpu_run.tree import commit, environment, tree_hash

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu_suite.json"
IN_A_PART = 500  # programs
FUZZER = ("--device", "cuda", "--inductor", "--large", "--no-shrink", "--stop", "25")


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all the parts have passed, 1 if not, 2 where there is no GPU."""
    options = _parser().parse_args(arguments)
    if options.stamp:
        return stamp(options.out)
    if not torch.cuda.is_available():
        print("make gpu: expected a CUDA GPU, found none", file=sys.stderr)
        return 2
    tree = tree_hash(ROOT)
    folder = options.state / tree[:16]
    _share()
    parts = [of_tests(ROOT, folder, options.jobs), *of_programs(options.seed, options.programs, options.jobs, folder)]
    numbers = range(len(parts)) if options.parts is None else options.parts
    if not all(0 <= number < len(parts) for number in numbers):
        _parser().error(f"--parts: expected numbers from 0 to {len(parts) - 1}, got {list(numbers)}")
    settings = {"programs": options.programs, "seed": options.seed}
    identity = {"tree": tree, "commit": commit(ROOT), "environment": environment(), "settings": settings}

    def publish() -> None:
        write(options.out, result(folder, parts, identity))

    passed = run_parts(ROOT, folder, parts, numbers, options.limit, options.budget, publish)
    done = sum(has_passed(folder, part) for part in parts)
    print(json.dumps({"tree": tree, "parts": len(parts), "passed": done}), flush=True)
    return 0 if passed else 1


def stamp(path: Path) -> int:
    """Write the commit into a result whose files are those of this checkout; returns 1 where they are not."""
    content, here, known = json.loads(path.read_text(encoding="utf-8")), tree_hash(ROOT), commit(ROOT)
    if content["tree"] != here or known is None:
        print(f"{path}: of the files {content['tree'][:16]}; here are {here[:16]}, commit {known}", file=sys.stderr)
        return 1
    write(path, {"tree": here, "commit": known, **{k: v for k, v in content.items() if k not in ("tree", "commit")}})
    return 0


def of_tests(root: Path, folder: Path, jobs: int) -> Part:
    """The tests that need a GPU, the longest first, by the seconds that the last result measured.

    The first call on these files collects them. What was not measured counts as 2 seconds.
    """
    path = folder / "collected.json"
    if not path.exists():
        command = [*PYTEST, "-qq", "--collect-only", "-m", "gpu", "--gpu-run", str(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if done.returncode or not path.exists():
            raise RuntimeError(f"pytest could not collect the tests:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    seconds = json.loads(RESULT.read_text(encoding="utf-8")).get("seconds_of_a_test", {}) if RESULT.exists() else {}
    ids = sorted(json.loads(path.read_text(encoding="utf-8")),
                 key=lambda name: -seconds.get(name, seconds.get(name.partition("::")[0], 2.0)))  # fmt: skip
    return Part.of_tests(ids, folder, jobs)


def of_programs(seed: int, count: int, jobs: int, folder: Path) -> list[Part]:
    """`count` programs of the fuzzer from a seed on, at most 500 in a part."""
    parts = []
    for first in range(seed, seed + count, IN_A_PART):
        seeds = range(first, min(first + IN_A_PART, seed + count))
        command = (sys.executable, "-m", "tests.fuzz", *FUZZER, "--seed", str(first), "--count", str(len(seeds)),
                   "--jobs", str(jobs), "--records", str(folder / "records.jsonl"))  # fmt: skip
        parts.append(Part(f"programs {first} to {seeds[-1]}", tuple(map(program, seeds)), command))
    return parts


def _share() -> None:
    """What every process of every part inherits: one cache of kernels on disk, which knows them by content; a core."""
    for name, value in FOR_WORKERS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fp4compile_gpu_run_triton"))
    os.environ.setdefault("GPU_RUN_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--parts", type=int, nargs="+", metavar="N", help="which parts to run (all)")
    parser.add_argument("--limit", type=float, default=560, help="seconds of a part (%(default)s)")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds of the call; the rest is for another call")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    parser.add_argument("--programs", type=int, default=500, help="random programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=880000, help="of the first program (%(default)s)")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_run", help="what is remembered of runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result (%(default)s)")
    parser.add_argument("--stamp", action="store_true", help="add the commit to a result from a copy without git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
