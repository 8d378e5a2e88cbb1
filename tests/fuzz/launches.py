"""Random programs whose ops are launched: `python -m tests.fuzz --launches`, in Triton's interpreter on a CPU.

The passes decide as for a GPU that is not there (compute capability 9.0 or 10.0), so that graphs hold prologues,
epilogues, fused products and swizzled scales. The graphs then run op by op. Every op is computed by its reference,
whose result the next op reads, and once more by the kernels that a GPU would launch. Operands lie in buffers of NaN,
and outputs are poisoned before kernels write them: what is read or left out shows. Quantisers must have the reference's
bits, products its values up to the order of float32 sums. A launch that differs from an earlier one by its operands'
values alone is left out; where several kernels can serve a product, one of them is drawn. Where rows are quantised
before they are moved, the program is compiled once more with the quantisers behind the moves: all bits are the same.

A program's `Setting`, drawn by its seed, makes small tensors meet what only large ones do: amaxes of many programs,
rows that do not fit on the chip, programs that take several tiles, chains of operations that would not pay.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest import mock

import torch
from torch.fx import GraphModule, Interpreter

from fp4compile import hardware
from fp4compile._compat import statically_true
from fp4compile.hardware import Target
from fp4compile.ops.define import KERNELS
from fp4compile.passes import fuse_prologue, quantize_before_index
from fp4compile.templates import choose
from fp4compile.templates.gemm import cost, dequant_operand
from fp4compile.templates.launch import dry_run
from fp4compile.templates.problem import Problem
from fp4compile.templates.quantize import amax, prologue_cost, row_on_chip
from tests.fuzz.check_launches import Launched, difference, kernels_of
from tests.fuzz.compare import Finding, captured, fill, results_of, row_counts
from tests.fuzz.programs import Program
from tests.helpers.foreign import same_bits


@dataclass(frozen=True)
class Setting:
    """sm: compute capability that the passes decide for. dtype: of the program's values.

    fuse_all: whether every chain before a quantiser is fused that can be, and every move follows the quantiser that
    can, not only those that pay. multiprocessors: what kernels count on. partial_maxima: elements of the largest tensor
    whose amax is partial maxima. on_chip: elements of the longest row that a program holds. quantize_results: whether
    every product quantises its result that can. in_memory: columns of the smallest product whose operands are
    dequantised in memory, where the GPU multiplies 16-bit numbers; None where large products alone are such.
    """

    sm: int
    dtype: torch.dtype
    fuse_all: bool
    multiprocessors: int
    partial_maxima: int
    on_chip: int
    quantize_results: bool
    in_memory: int | None

    @classmethod
    def of(cls, seed: int) -> "Setting":
        rng = random.Random(seed * 7919 + 1)
        sm = rng.choice((90, 100))
        return cls(
            sm=sm,
            dtype=rng.choice((torch.bfloat16,) * 6 + (torch.float16, torch.float32)),
            fuse_all=rng.random() < 0.6,
            multiprocessors=rng.choice((3, 132)),
            partial_maxima=rng.choice((0, amax.PARTIAL_MAXIMA_ELEMENTS)),
            on_chip=rng.choice((32, row_on_chip.MAX_ROW_ON_CHIP)),
            quantize_results=rng.random() < 0.5,
            in_memory=rng.choice((None, 1, 48)) if sm == 90 else None,
        )

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """The context in which passes run: every tensor lies on a GPU of that compute capability."""
        with ExitStack() as stack:
            stack.enter_context(dry_run(Target(self.sm)))
            stack.enter_context(self._limits())
            if self.fuse_all:
                since = dict.fromkeys(prologue_cost.SINCE, 0)
                stack.enter_context(mock.patch.object(prologue_cost, "SINCE", since))
                stack.enter_context(mock.patch.object(fuse_prologue, "gain", _any_gain))
                stack.enter_context(mock.patch.object(quantize_before_index, "LAUNCH_BYTES", 0))
                stack.enter_context(mock.patch.object(quantize_before_index, "_in_memory", lambda node: True))
            if self.quantize_results:
                # The kernel for few rows, as programs have them, does not quantise its result.
                others = tuple(each for each in choose.REGISTRY if each.name != "skinny_block_scaled_sm100")
                stack.enter_context(mock.patch.object(choose, "REGISTRY", others))
                stack.enter_context(mock.patch.object(cost, "quantizing_pays", lambda *args: True))
            if self.in_memory is not None:
                first = replace(dequant_operand.CANDIDATE, serves=partial(_of_columns, self.in_memory))
                stack.enter_context(mock.patch.object(choose, "REGISTRY", (first, *choose.REGISTRY)))
            yield

    @contextmanager
    def launching(self) -> Iterator[None]:
        """The context in which kernels run."""
        known = hardware._MULTIPROCESSORS | {90: self.multiprocessors}  # those of an H200 are the interpreter's
        with mock.patch.object(hardware, "_MULTIPROCESSORS", known), self._limits():
            yield

    @contextmanager
    def _limits(self) -> Iterator[None]:
        with (
            mock.patch.object(amax, "PARTIAL_MAXIMA_ELEMENTS", self.partial_maxima),
            mock.patch.object(fuse_prologue, "PARTIAL_MAXIMA_ELEMENTS", self.partial_maxima),
            mock.patch.object(row_on_chip, "MAX_ROW_ON_CHIP", self.on_chip),
            mock.patch.object(prologue_cost, "MAX_ROW_ON_CHIP", self.on_chip),
        ):
            yield


# Most of the time would go to these, which have tests of their own: one of so many is launched.
_ONE_OF = {("quantize", ""): 10, ("scaled_mm", "dequant_tiles"): 10, ("scaled_mm epilogue", "dequant_tiles"): 4}


def _of_columns(least: int, problem: Problem) -> bool:
    """Whether `dequant_operand` can compute a product of at least so many columns."""
    single = not problem.ragged and problem.batches == 1
    return single and problem.compute != "fp32" and statically_true(problem.n >= least)


def _any_gain(spec, *args) -> float:
    """More for what stores results and has more steps: the chains that the model of costs takes least often."""
    return 1.0 + len(spec.prologue.stored) + len(spec.prologue.steps) / 100


@dataclass
class LaunchFuzzer:
    """run: how many programs ran. exact: how many without a finding. moved: in how many rows were quantised before a
    move. launched: how many ops of each kind kernels computed. met: signatures of these."""

    run: int = 0
    moved: int = 0
    exact: int = 0
    launched: Counter = field(default_factory=Counter)
    met: set = field(default_factory=set)

    def counted(self) -> str:
        kinds = ", ".join(f"{count} {kernel}" for kernel, count in sorted(self.launched.items()))
        return f"{kinds}, {self.moved} with rows quantised before a move"

    def check(self, program: Program) -> Finding | None:
        """The first thing that is wrong with a program, or None."""
        self.run += 1
        torch._dynamo.reset()
        setting, wrong = Setting.of(program.seed), []
        program = replace(program, recipe=_more(program))
        try:
            self._run(program, setting, wrong)
        except Exception as error:  # whatever the program meets
            return Finding(program, "crash", f"{setting}\n{type(error).__name__}: {str(error)[:2000]}")
        self.exact += not wrong
        return Finding(program, "launch", f"{setting}\n{wrong[0]}") if wrong else None

    def _run(self, program: Program, setting: Setting, wrong: list[str]) -> None:
        module, _, outside = program.load()
        modules = torch.nn.ModuleList([module, *outside]).to(setting.dtype)

        def run(graph: GraphModule) -> Callable:
            return lambda *args: _Launching(graph, setting, wrong, self).run(*args)

        def results(without: frozenset[str], run: Callable) -> list:
            torch._dynamo.reset()
            matched.clear()
            backend = captured(program, [], setting.deciding, without | {"inplace", "lower"}, run, matched)
            compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=program.dynamic)
            found = []
            for rows in row_counts(program):
                torch.manual_seed(program.seed)  # for seeds of stochastic rounding
                inputs = fill(modules, program, "normal", "cpu", setting.dtype, rows)
                found += results_of(compiled, program, inputs, modules)
            return found

        def plain(*without: str) -> list:
            return results(frozenset(without), lambda graph: graph.forward)

        def equal(found: list, expected: list) -> bool:
            return all(one is other or same_bits(one, other) for one, other in zip(found, expected, strict=True))

        matched: Counter = Counter()
        moved = results(frozenset(), run)
        if matched["quantize_before_index"]:
            self.moved += 1
            # A quantiser before a move may compute what precedes it without rounding in between (docs/report.md).
            if not equal(moved, plain("quantize_before_index")) and not equal(
                plain("fuse_prologue"), plain("fuse_prologue", "quantize_before_index")
            ):
                wrong.append("rows quantised before a move have other bits")


def _more(program: Program):
    """The program's recipe, for some seeds with stochastic rounding or scales of least error, which need no oracle."""
    rng, recipe = random.Random(program.seed * 31 + 7), program.recipe
    known = ("nvfp4", "nvfp4_te", "nvfp4_one_level", "mxfp4")
    stochastic = tuple(name for name in ("dgrad", "wgrad") if getattr(recipe, f"{name}_dy") in known)
    if stochastic and rng.random() < 0.5:
        recipe = recipe.replace(stochastic_rounding=stochastic)
    if recipe.fprop_w in ("nvfp4", "nvfp4_one_level") and rng.random() < 0.1:
        recipe = recipe.replace(weight_scales="mse")
    return recipe


class _Launching(Interpreter):
    """Runs a graph; every op of this package that the pass `lower` knows is launched besides."""

    def __init__(self, module: GraphModule, setting: Setting, wrong: list[str], fuzzer: LaunchFuzzer):
        super().__init__(module)
        self.setting, self.wrong, self.fuzzer = setting, wrong, fuzzer

    def call_function(self, target, args, kwargs):
        expected = super().call_function(target, args, kwargs)
        if target in KERNELS and not self.wrong:
            self._launch(Launched(target, args, kwargs, expected))
        return expected

    def _launch(self, launched: Launched) -> None:
        setting, met = self.setting, self.fuzzer.met
        signature = setting.multiprocessors, setting.partial_maxima, setting.on_chip, launched.signature
        if signature in met:
            return
        met.add(signature)
        kernels = kernels_of(launched)
        kernel = kernels[len(met) % len(kernels)] if kernels else None
        if kernel is None or len(met) % _ONE_OF.get((launched.kind, kernel), 1):
            return
        with setting.launching():
            found = difference(launched, kernel)
        self.fuzzer.launched[f"{launched.kind} {kernel}".strip()] += 1
        if found is not None:
            self.wrong.append(f"{launched.kind} {kernel}: {found}")
