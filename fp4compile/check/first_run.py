"""`check-sm100 --run`: compare the results of every kernel on the local GPU with the reference, then time the kernels.

Written for the first machine with an SM100 GPU, but runs on any CUDA GPU, with the kernels for that GPU. In addition to
the simulator's checks, every kernel that may be chosen for a matmul computes it, also with hard operands and in larger
sizes. The cases run in a separate process. A case that raises is recorded. A case that leaves the GPU unusable (an
illegal address or instruction), or that does not end, is recorded too, and a new process continues with the next case.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fp4compile.check import environment, run_times
from fp4compile.check.cases import Case, Finding, in_process
from fp4compile.check.comparison import ENDS, GROUP_ROWS, Here, finite, not_finite
from fp4compile.check.products import PRODUCTS, Made, MatmulCase, by_every_kernel, reduced
from fp4compile.check.quantisers import MORE_CONFIGURATIONS, Check, checks
from fp4compile.formats import formats

_WIDTH = 78
# Whole tiles; then partly filled tiles in rows, columns and blocks.
WHOLE, RAGGED = (256, 1024), (130, 1000)
PAIRS = (
    *((name, name) for name in ("nvfp4", "nvfp4_one_level", "nvfp4_te", "mxfp8", "mxfp4")),
    ("nvfp4_rowwise", "nvfp4_te"), ("nvfp4_te", "nvfp4_16x16"), ("mxfp8", "mxfp8_32x32"), ("mxfp8_e5m2", "mxfp8"),
    ("mxfp8", "mxfp4"), (None, "nvfp4"), (None, "mxfp8"),
)  # fmt: skip
# M, N, K: whole tiles; ragged tiles; rows of results, or of codes, that are no multiples of 16 bytes; few tokens.
SHAPES = (
    (512, 1024, 2048), (300, 520, 1040), (130, 257, 544), (200, 384, 528), (1, 512, 1024), (8, 512, 1024),
    (16, 528, 1040), (33, 520, 2048), (64, 1024, 4096),
)  # fmt: skip
EPILOGUE_SHAPES = ((300, 520, 1040), (16, 512, 1024))
OF_EXPERTS = tuple(name for name, fmt in formats.NAMED.items() if not fmt.square)  # formats


def run(file: Path | None, only: str = "") -> int:
    """Run values and times, and print a line for each case.

    file: the JSON file for all findings, written after each part. only: leave out cases whose names lack this text.
    Returns 1 where a value is wrong or a kernel failed. Raises argparse.ArgumentTypeError without a CUDA GPU.
    """
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("--run: torch sees no CUDA GPU here. Without --run, kernels are compiled for "
                                         "GPUs, local or not")  # fmt: skip
    content: dict[str, Any] = {"environment": environment.of_gpu()}
    print(", ".join(f"{name} {value}" for name, value in content["environment"].items()))
    failed = 0
    for part, cases in (("values", value_cases), ("times", run_times.cases)):
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


# ---------------------------------------------------------------- the cases of values


def value_cases() -> list[Case]:
    """Every case, in an order that finds simple faults first."""
    found = [
        Case(f"{name}{', ragged' * i}", partial(checked, check))
        for name, each in checks(WHOLE, RAGGED, more=MORE_CONFIGURATIONS) for i, check in enumerate(each)
    ]  # fmt: skip
    for a, b in PAIRS:
        hard = [MatmulCase(a, b, *shape) for shape in SHAPES] + [MatmulCase(a, b, 70, 136, 256, batches=3)]
        hard += [MatmulCase(a, b, *shape, epilogue=kind) for shape in EPILOGUE_SHAPES for kind in ("bias", "gated")]
        found += [_product("product", one, finite) for one in hard]
        found.append(_product("not finite, product", hard[0], not_finite))
    exact = [replace(reduced(one), kernel="") for one in PRODUCTS]  # by every kernel, so without a fixed one
    for name in OF_EXPERTS:
        exact.append(MatmulCase(name, name, GROUP_ROWS, 520, 1040, groups=len(ENDS)))
        exact.append(MatmulCase(name, name, 520, 1040, GROUP_ROWS, groups=len(ENDS), along_k=True))
    return found + [_product("exact product", one) for one in dict.fromkeys(exact)]


def _product(what: str, product: MatmulCase, made: Made | None = None) -> Case:
    return Case(f"{what} {product.formats}, {product.label}", partial(by_every_kernel, product, Here(), made))


def checked(check: Check) -> dict[str, Any]:
    """The findings of a check on this GPU."""
    return {"wrong": check(Here())}
