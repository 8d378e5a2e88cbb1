"""`make gpu`: every test that needs a GPU, and random programs, in one run of pytest, which a limit ends.

Failures are printed as they come, and at the end a line of JSON. A later call runs what has not passed on these files
yet, also what the limit has ended. What it ran on, and what became of it, is in benchmarks/results/gpu_suite.json.
Where the run was on a copy without git, `--stamp` in the checkout adds the commit, if the files are the same.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import torch

from tests.gpu_run.devices import FOR_WORKERS
from tests.gpu_run.runner import collected, has_passed, result, run, write
from tests.gpu_run.tree import commit, environment, tree_hash

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "gpu_suite.json"


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if all has passed, 1 if not, 2 where there is no GPU."""
    options = _parser().parse_args(arguments)
    if options.stamp:
        return stamp(options.out)
    if not torch.cuda.is_available():
        print("make gpu: expected a CUDA GPU, found none", file=sys.stderr)
        return 2
    tree = tree_hash(ROOT)
    folder = options.state / tree[:16]
    _share()
    known = json.loads(RESULT.read_text(encoding="utf-8")).get("seconds_of_a_test", {}) if RESULT.exists() else {}
    seeds = range(options.seed, options.seed + options.programs)
    ids = collected(ROOT, folder, seeds, known)
    row = run(ROOT, folder, ids, options.jobs, options.limit)
    settings = {"programs": options.programs, "seed": options.seed}
    identity = {"tree": tree, "commit": commit(ROOT), "environment": environment(), "settings": settings}
    write(options.out, result(folder, ids, identity))
    print("\n" + json.dumps({"tree": tree, **row}), flush=True)
    return 0 if has_passed(folder, ids) else 1


def stamp(path: Path) -> int:
    """Write the commit into a result whose files are those of this checkout; returns 1 where they are not."""
    content, here, known = json.loads(path.read_text(encoding="utf-8")), tree_hash(ROOT), commit(ROOT)
    if content["tree"] != here or known is None:
        print(f"{path}: of the files {content['tree'][:16]}; here are {here[:16]}, commit {known}", file=sys.stderr)
        return 1
    write(path, {"tree": here, "commit": known, **{k: v for k, v in content.items() if k not in ("tree", "commit")}})
    return 0


def _share() -> None:
    """What every process inherits: one cache of kernels on disk, which knows them by content; a core."""
    for name, value in FOR_WORKERS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "fp4compile_gpu_run_triton"))
    os.environ.setdefault("GPU_RUN_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--limit", type=float, default=560, help="seconds; the rest is for another call (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (%(default)s)")
    parser.add_argument("--programs", type=int, default=500, help="random programs (%(default)s)")
    parser.add_argument("--seed", type=int, default=880000, help="of the first program (%(default)s)")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "gpu_run", help="what is remembered of runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="the result (%(default)s)")
    parser.add_argument("--stamp", action="store_true", help="add the commit to a result from a copy without git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
