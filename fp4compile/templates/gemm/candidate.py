"""`Candidate`: the entry of a GEMM kernel in the registry of `choose`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4compile.formats.operand import Arguments
from fp4compile.templates.gemm.call import Call
from fp4compile.templates.gemm.swizzled_a_sm90 import SwizzledA
from fp4compile.templates.problem import Problem

# Kernels of the op `scaled_mm_opaque`.
LIBRARY, TWO_CTAS, FLOAT8 = "library", "2-CTA", "FP8"
OF_FLOAT8_BLOCKS = "_of_float8_blocks"  # the end of the names that `float8_blocks_as_mx` gives to candidates
MOST_IN_GROUP = 3  # matmuls of one A in a launch, at most: the kernels have pointers for three


def opaque(x: Arguments, kernel: str) -> list[torch.Tensor]:
    """The op `scaled_mm_opaque`, which `ops.matmul` defines; it calls `multiply.opaque`."""
    args, options = x.call
    return torch.ops.fp4compile.scaled_mm_opaque(*args, kernel, **options)


def _never(problem: Problem) -> bool:
    return False


def _always(problem: Problem, config: Any) -> bool:
    return True


@dataclass(frozen=True, eq=False)  # compared and hashed by identity
class Candidate:
    """A kernel, or a library call, that computes matmuls.

    name: its name in the report, the log and `Choice`.
    tier: "native" where the matrix units read the operands as they are quantised, else "emulated".
    serves: whether it computes a problem, if no candidate of a better rank does.
    configure: the launch configuration for a problem, a `LaunchConfig`; None where there is nothing to
        configure. run: launches a call with that configuration and returns the result, of the problem's shape.
    configurations: the configurations that `max-autotune` times: the result of `configure` and others, or none where
        the kernel is not expected to pay; None where there is no other. takes_epilogue: whether it can apply an
        epilogue before it stores. quantizes: whether that epilogue can end in codes; `run` then returns codes and block
        scales. finds_amax: whether it can find the amax of the stored result; `run` then returns the result and partial
        maxima.
    traceable: whether a graph can hold the launches of a problem and its configuration.
    any_rows: whether it serves the problem for every number of rows of A, if it serves it for one.
    dequantizes_a, dequantizes_b: whether it writes the operand, if it is quantised, to memory in 16 bits first.
    arrangement: for a kernel that first writes A to memory in another order: this order, as `swizzled_a_sm90.SwizzledA`
        describes it, for a problem and its configuration. None for other kernels.
    group_with, run_group: for a kernel that computes several matmuls of one A in one launch: a key that these matmuls
    must share besides A, and the launch of all of them. None for other kernels.
    """

    name: str
    tier: str
    serves: Callable[[Problem], bool]
    configure: Callable[[Problem], Any]
    run: Callable[[Call, Any], Any]
    configurations: Callable[[Problem], tuple] | None = None
    takes_epilogue: Callable[[Problem], bool] = _never
    quantizes: Callable[[Problem], bool] = _never
    finds_amax: Callable[[Problem], bool] = _never
    traceable: Callable[[Problem, Any], bool] = _always
    any_rows: bool = False
    dequantizes_a: bool = False
    dequantizes_b: bool = False
    arrangement: Callable[[Problem, Any], SwizzledA] | None = None
    group_with: Callable[[Problem], tuple] | None = None
    run_group: Callable[[Sequence[Call], Any], list[torch.Tensor]] | None = None

    def takes(self, problem: Problem) -> bool:
        """Whether it serves a problem, stores the result in its format, and finds its amax if that is requested."""
        amax = not problem.spec.amax or self.finds_amax(problem)
        return amax and (problem.spec.result is None or self.quantizes(problem)) and self.serves(problem)

    def to_time(self, problem: Problem) -> tuple:
        """The configurations to time."""
        return (self.configure(problem),) if self.configurations is None else self.configurations(problem)
