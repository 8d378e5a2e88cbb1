"""Compiled models on a B200 that is not there: Inductor's wrapper runs, its launches in the simulator of their PTX.

    python -m benchmarks.simulated_models [--only TEXT ...] [--out FILE]

An MLP and a Llama block (`tests/helpers/compiled_models.py`), inference and one training step, are compiled for compute
capability 10.0, run, and compared with the reference. This takes ten minutes of a CPU. Exits with 1 where a difference
is larger than its bound, or a run fails.

launches: of this package's kernels, of Inductor's own kernels, calls of cuBLASLt (by the reference), and operations
that PyTorch computes by itself. They include those that quantise the weights of an inference graph.
"""

import re
import sys
import warnings
from collections import Counter
from typing import Any

from benchmarks import common
from tests.helpers.compiled_models import CASES, Case, Compared, compared


def main(arguments: list[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose names have all of these")
    args = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="(dynamo_pgo|TRITON_DEFAULT_FP_FUSION)")
    rows = []
    for case in CASES:
        if all(text in str(case) for text in args.only):
            rows.append(row_of(case))
            print(f"{case}: {rows[-1].get('error') or rows[-1]['largest difference']}", file=sys.stderr, flush=True)
    common.publish(args, {"sm": 100}, rows)
    return int(any("error" in row or row["largest difference"] > row["bound"] for row in rows))


def row_of(case: Case) -> dict[str, Any]:
    """What the files hold of a case."""
    names = {"model": case.model, "recipe": case.recipe, "run": case.run, "dtype": str(case.dtype).split(".")[1]}
    try:
        found = compared(case)
    except Exception as error:  # noqa: BLE001 (a fault of a kernel, or whatever a compilation raises: the others run)
        return names | {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return names | figures(found)


def figures(found: Compared) -> dict[str, Any]:
    """The figures of a run."""
    worst = found.largest
    kernels = Counter[str]()
    for kind in ("package", "Inductor", "library"):
        for name, count in found.launches[kind].items():
            kernels[kind_of(name)] += count
    return {
        **{f"{kind} launches": found.launches[kind].total() for kind in ("package", "Inductor", "library")},
        "PyTorch operations": found.launches["PyTorch"].total(), "kernels": dict(kernels),
        "PyTorch": dict(found.launches["PyTorch"]), "warp instructions": found.instructions,
        "CPU seconds": round(found.seconds, 1), "tensors": len(found.differences), "largest difference": worst.found,
        "bound": worst.bound, "of": worst.name,
    }  # fmt: skip


def kind_of(name: str) -> str:
    """The name of a kernel; of one of Inductor's, only whether it is pointwise or how it reduces."""
    return re.sub(r"^(triton_(?:poi|red|per))_.*", r"\1", name)


if __name__ == "__main__":
    sys.exit(main())
