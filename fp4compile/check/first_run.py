"""`check-sm100 --run`: the values of every kernel on this machine's GPU against the reference, then their times.

Made for the first machine with an SM100 GPU, and useful on any CUDA GPU: it runs the kernels for that GPU. The cases
run in a separate process. A case that raises is recorded. A case that leaves the GPU unusable (an illegal address or
instruction), or that does not end, is recorded too, and a new process continues with the next case.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp4compile.check import environment, run_times, run_values
from fp4compile.check.cases import Case, Finding, in_process

_WIDTH = 78


def run(file: Path | None, only: str = "") -> int:
    """Run values and times, and print a line for each case.

    file: the JSON file for all findings, written after each part. only: leave out cases whose names lack this text.
    Returns 1 where a value is wrong or a kernel failed. Raises argparse.ArgumentTypeError without a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("--run: torch sees no CUDA GPU here. Without --run, kernels are compiled for "
                                         "GPUs that need not be there")  # fmt: skip
    content: dict[str, Any] = {"environment": environment.of_gpu()}
    print(", ".join(f"{name} {value}" for name, value in content["environment"].items()))
    failed = 0
    for part, cases in (("values", run_values.cases), ("times", run_times.cases)):
        print(f"\n{part}")
        findings = []
        for finding in in_process(partial(_chosen, cases, only)):
            findings.append(finding)
            failed += finding.failed
            print(line(finding), flush=True)
        content[part] = [finding.to_dict() for finding in findings]
        if file:
            file.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\n{failed} cases failed")
    return 1 if failed else 0


def _chosen(cases: Callable[[], Sequence[Case]], only: str) -> list[Case]:
    return [case for case in cases() if only in case.name]


def line(finding: Finding) -> str:
    """A finding in one line: the name, then its values."""
    if finding.error is not None:
        return f"{finding.name:{_WIDTH}}  FAILED: {finding.error}"
    if finding.values.get("wrong"):
        return f"{finding.name:{_WIDTH}}  WRONG: {finding.values['wrong']}"
    found = (f"{name} {value}" for name, value in finding.values.items() if value)
    return f"{finding.name:{_WIDTH}}  " + (", ".join(found) or "right")
