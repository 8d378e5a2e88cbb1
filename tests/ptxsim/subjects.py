"""Kernels that edits are planted in: small cases that use as much of each kernel as a large one would.

GPUs have few multiprocessors, so that programs of persistent kernels take several tiles and buffers and phases go
round. Sizes leave parts of tiles empty in every direction, and a walk over tiles has more rows of tiles than it takes
together.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from fp4compile import _compat
from fp4compile.check.comparison import ENDS
from fp4compile.check.comparison import GROUP_ROWS as ROWS
from fp4compile.check.products import PRODUCTS, TWO_CTAS, MatmulCase
from fp4compile.check.quantisers import (
    CONFIGURATIONS,
    PROLOGUE_CONFIGURATIONS,
    quantized,
    quantized_after_steps,
    quantized_few_rows,
)
from fp4compile.check.simulation import multiplied
from fp4compile.check.simulator import LaunchSimulator
from fp4compile.formats.epilogue import AMAX
from fp4compile.hardware import Target
from fp4compile.templates.launch import Launch
from ptxsim.kernel_launch import Compiled
from ptxsim.parse import parse
from ptxsim.run import Kernel, Schedule
from tests.ptxsim.quantised_results import differences

SM = 100


@dataclass(frozen=True)
class Subject:
    """A case of the simulator.

    check: returns what is wrong. multiprocessors: of the GPU, 0 for as many as it has. most: how many edits of each
    kind are planted in each of its kernels.
    """

    name: str
    check: Callable[[LaunchSimulator], list[str]]
    multiprocessors: int = 0
    most: int = 6

    def simulator(self, schedule: Schedule, edited: tuple[str, str] | None = None) -> "Planted":
        """A simulator for the check; `edited` as of `Planted`."""
        return Planted(Target(SM, self.multiprocessors), schedule, edited)


class Planted(LaunchSimulator):
    """A simulator in which one kernel has other code than Triton gave it.

    code: the texts of all kernels that were launched, by name; of a kernel with several specialisations, the first one.
    edited: the kernel's name and its PTX, or None.
    """

    def __init__(self, target: Target, schedule: Schedule, edited: tuple[str, str] | None) -> None:
        super().__init__(target, schedule)
        self.code: dict[str, str] = {}
        self.edited = edited
        self._kernel: Kernel | None = None

    def compiled(self, launch: Launch) -> Compiled:
        made, name = super().compiled(launch), launch.kernel.__name__
        first = self.code.setdefault(name, made.ptx)
        if self.edited is None or name != self.edited[0] or made.ptx != first:
            return made
        if self._kernel is None:
            self._kernel = Kernel.of(parse(self.edited[1]))
        return replace(made, ptx=self.edited[1], kernel=self._kernel)


def _product(name: str, label: str, multiprocessors: int = 0, *sizes: dict[str, int]) -> Subject:
    """A product of the gate's table, in several sizes that share their code."""
    (of_gate,) = (one for one in PRODUCTS if f"{one.label} {one.formats}" == label)
    smaller = [replace(of_gate, **each) for each in sizes]

    def check(simulator: LaunchSimulator) -> list[str]:
        return [what for each in smaller for what in multiplied(of_gate, each, simulator)]

    return Subject(name, check, multiprocessors)


def _quantised(name: str, label: str, rows: int, columns: int) -> Subject:
    (of_gate,) = (one for one in CONFIGURATIONS if f"{one.label}, {one.format}" == label)

    def check(simulator: LaunchSimulator) -> list[str]:
        return quantized(of_gate, (rows, columns), simulator) + quantized_few_rows(of_gate, simulator)

    return Subject(name, check)


def _after_steps(name: str, label: str, rows: int, columns: int) -> Subject:
    (of_gate,) = (one for one in PROLOGUE_CONFIGURATIONS if f"{one.label}, {one.format}" == label)
    return Subject(name, partial(quantized_after_steps, of_gate, (rows, columns)))


_EVERY = 1000  # edits
_GROUPS = {"groups": len(ENDS)}
_EXPERTS = MatmulCase("nvfp4", "nvfp4", ROWS, 256, 640, epilogue="pair", **_GROUPS)
# Of 960 rows: the first group has some, one ends in the second half of a tile, and there are ten tiles of rows.
_SIZES = (130, 700, 3, 0, 0, 70)
_QUANTISED = MatmulCase("nvfp4", "nvfp4", 400, 280, 672, "gated", result="nvfp4", kernel=TWO_CTAS)


def _experts(result: str, simulator: LaunchSimulator) -> list[str]:
    """What is wrong with one result of two products of experts, in groups of few rows and in larger ones."""
    few = replace(_EXPERTS, result=result)
    return differences(few, simulator) + differences(replace(few, m=6 * ROWS), simulator, _SIZES)


def _gate_and_up(simulator: LaunchSimulator) -> list[str]:
    """What is wrong with the codes and scales, and with the amax, of one result of two products."""
    both = replace(_QUANTISED, n=384, epilogue="pair")
    return differences(both, simulator) + differences(replace(both, result=AMAX), simulator)


_PAIRS = (
    (replace(_product("pairs of CTAs", f"512x8192x8192, gated, by {TWO_CTAS} nvfp4 x nvfp4", 2,
                      {"m": 400, "n": 272, "k": 672}), most=9),
     replace(_product("experts on pairs of CTAs",
                      f"8192x2048x4096, 64 groups, by {TWO_CTAS} nvfp4 x nvfp4", 4,
                      _GROUPS | {"m": 2 * ROWS, "n": 272, "k": 672}), most=9),
     Subject("quantised results of pairs of CTAs", partial(differences, _QUANTISED), 2, most=2),
     Subject("gate and up on pairs of CTAs", _gate_and_up, 2, most=2))
    if _compat.two_cta_products_of_groups() else ()
)  # fmt: skip
SUBJECTS = (
    replace(_product("dense NVFP4", "512x8192x8192 nvfp4 x nvfp4", 2, {"m": 1040, "n": 272, "k": 416}), most=_EVERY),
    _product("dense MXFP8", "512x8192x8192 mxfp8 x mxfp8", 2, {"m": 1040, "n": 272, "k": 224}),
    _product(
        "dense NVFP4 without TMA",
        "512x8192x8176 nvfp4 x nvfp4",
        2,
        {"m": 144, "n": 272, "k": 1520},
        {"m": 1136, "n": 240, "k": 1520},
    ),
    *_PAIRS,
    _product(
        "few rows, split K",
        "16x8192x8192 nvfp4 x nvfp4",
        6,
        {"m": 13, "n": 272, "k": 2560},
        {"m": 5, "n": 560, "k": 2560},
    ),
    _product(
        "groups of rows",
        "8192x2048x4096, 64 groups nvfp4 x nvfp4",
        2,
        _GROUPS | {"m": ROWS, "n": 272, "k": 640},
        _GROUPS | {"m": 5 * ROWS, "n": 384, "k": 640},
    ),
    _product(
        "groups along K",
        "256x512x8192, 64 groups along K nvfp4 x nvfp4",
        2,
        _GROUPS | {"m": 144, "n": 272, "k": ROWS},
        _GROUPS | {"m": 720, "n": 416, "k": ROWS},
    ),
    _product("one row", "1x8192x8192 bf16 x nvfp4", 1, {"n": 824, "k": 5888}, {"n": 24, "k": 5888}),
    _product("dequantised tiles", "64x8192x8192 bf16 x nvfp4", 6, {"n": 272, "k": 1280}, {"n": 560, "k": 2560}),
    replace(
        _product(
            "results that are quantised",
            "512x8192x8192, gated, to nvfp4_one_level nvfp4_one_level x nvfp4_one_level",
            2,
            {"m": 1040, "n": 272, "k": 416},
        ),
        most=2,
    ),
    Subject("results of groups that are quantised", partial(_experts, "nvfp4_one_level"), 2),
    Subject("results of groups whose amaxes are found", partial(_experts, AMAX), 2, most=2),
    _quantised("rows", "rows, nvfp4", 130, 400),
    _quantised("both directions, transform, seed", "both, transform, seed, nvfp4_te", 130, 400),
    _after_steps("a norm", "a norm, nvfp4_rowwise", 130, 400),
)
