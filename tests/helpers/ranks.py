"""Start a script as the ranks of a group of processes, and wait for them."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_ranks(script: str, count: int, output: Path, *arguments: str, seconds: int = 600, **environment: str) -> None:
    """Run `python SCRIPT RANK ARGUMENTS...` once for each rank; fails with what they said if one of them fails.

    output: a path beside which each rank's words are kept. environment: variables besides those that are set.
    """
    ranks, said = [], [Path(f"{output}.{rank}") for rank in range(count)]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    for rank in range(count):
        with said[rank].open("w") as file:
            command = [sys.executable, script, str(rank), *arguments]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=file))
    try:
        end = time.monotonic() + seconds
        ended = [None] * count
        # Where one has failed, the others wait for it in vain.
        while None in ended and not any(ended) and time.monotonic() < end:
            time.sleep(0.1)
            ended = [process.poll() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert ended == [0] * count, "".join(path.read_text() for path in said)
