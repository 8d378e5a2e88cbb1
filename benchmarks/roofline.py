"""How far are the predictions of `explain` from times of whole blocks on an H200?

    python -m benchmarks.roofline            # writes "foreseen" of results/roofline_h200.json from the files of BLOCKS
    python -m benchmarks.roofline --check    # exits with 1 where the first of each kind is not what the model says now

Measures nothing. Nothing was fitted to these times but attention's share, to the prefill under `float8_rowwise`. The
"rows" and "summary" of the file are of layers by themselves; the model of their sizes that made them is gone.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import common, llama_block

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "roofline_h200.json"
GPU = "H200"
BLOCKS = ("mlp_block", "producers")


def measured_blocks() -> list[llama_block.Measured]:
    """The times of whole blocks, which `explain` predicts. Every kernel is in both times."""
    files = (json.loads((RESULTS / f"{name}_h200.json").read_text()) for name in BLOCKS)
    return [each for content in files for each in llama_block.times_of(content)]


def foreseen(blocks: list[llama_block.Measured]) -> list[dict[str, Any]]:
    """A row for each time, with the predicted one."""
    return [llama_block.compared(each, GPU) for each in blocks]


def main(arguments: list[str] | None = None) -> int:
    """Write or check the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing, exit with 1 where the file is out of date"
    )
    args = parser.parse_args(arguments)
    stored, blocks = json.loads(FILE.read_text(encoding="utf-8")), measured_blocks()
    if args.check:
        first = {each.what: each for each in reversed(blocks)}
        if all(row in stored["foreseen"] for row in foreseen(list(first.values()))):
            return 0
        print(f"{FILE.name} is out of date: run python -m benchmarks.roofline", file=sys.stderr)
        return 1
    rows = foreseen(blocks)
    FILE.write_text(json.dumps(stored | {"foreseen": rows}, indent=1) + "\n", encoding="utf-8")
    print(common.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
