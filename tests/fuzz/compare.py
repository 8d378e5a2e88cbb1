"""Run a program as compiled and as its oracle says, and compare: which products, which numbers.

Two ways of compiling: `captured` (Dynamo, AOTAutograd and this package's passes, the graphs then run as they are by
the reference ops) and `inductor` (the whole backend).

Numbers mostly agree in every bit: values on a grid make the sums of most products exact. Where they do not, rounding in
another order may be the cause, and quantisation may make a step of it, on a grid with its ties most of all. So a
difference is a finding only where it is there with normally distributed values of two drawings too, and exceeds what
the oracle itself shows under noise of the size of such rounding.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import fp4compile
from fp4compile.passes import quantize_before_index
from fp4compile.passes.manager import JointPasses, LowerPasses, switched_off_passes
from fp4compile.report import names
from fp4compile.report.report import Row
from tests.fuzz.oracle import ANY_NAME, Oracle, key_of
from tests.fuzz.programs import Program

# What a product may differ by: float32 sums in another order; one rounding to bfloat16 more or less, where code
# generation keeps more bits between operators than the operators alone do.
_NOISE = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-10}
_MARGIN = {torch.float32: 4, torch.bfloat16: 2}
_SHAKES = 5
_HALVINGS = 8
_DRAWS = ("grid", "normal", "normal2")


@dataclass(frozen=True)
class Finding:
    """What is wrong with a program: `kind` is "crash", "products" or "numbers"; `text` says it."""

    program: Program
    kind: str
    text: str
    rows: tuple[Row, ...] = ()

    def __str__(self) -> str:
        rows = "\n".join(
            f"  {row.module or '(top)'} {row.product} {row.m}x{row.n}x{row.k} {row.left} {row.right} {row.reason or ''}"
            for row in self.rows
        )
        program = self.program
        mode = f"train={program.train} dynamic={program.dynamic}"
        kinds = ", ".join(step.kind for step in program.steps)
        return (
            f"seed {program.seed}: {self.kind} ({kinds})\n{self.text}\n{mode} inputs={program.inputs}\n"
            f"{_recipe(program)}\n{program.source()}\nreport:\n{rows}"
        )


def _recipe(program: Program) -> str:
    fields = {k: v for k, v in program.recipe.to_dict().items() if v not in (None, [], {})}
    return f"recipe {fields}"


@dataclass
class Fuzzer:
    """device: "cpu" or "cuda". inductor: with code generation. dtype: of the programs' values.

    exact: how many programs agreed in every bit; run: how many ran. moved: in how many the pass quantize_before_index
    matched.
    """

    device: str = "cpu"
    inductor: bool = False
    dtype: torch.dtype = torch.float32
    exact: int = 0
    run: int = 0
    moved: int = 0

    def counted(self) -> str:
        return f"{self.exact} equal in every bit, {self.moved} with rows quantised before a move"

    def check(self, program: Program) -> Finding | None:
        """The first thing that is wrong with a program, or None."""
        torch._dynamo.reset()
        rows: list[Row] = []
        self.run += 1
        try:
            return self._check(program, rows)
        except Exception as error:  # whatever the program meets: it is one that runs uncompiled
            return Finding(program, "crash", f"{type(error).__name__}: {str(error)[:2000]}", tuple(rows))

    def _check(self, program: Program, rows: list[Row]) -> Finding | None:
        module, oracle, outside = program.load()
        modules = torch.nn.ModuleList([module, *outside]).to(self.device, self.dtype)
        matched: Counter = Counter()
        compiled = self._compile(module, program, rows, matched)
        wrong = None
        for attempt, draw in enumerate(_DRAWS):
            inputs = [
                fill(modules, program, draw, self.device, self.dtype, shape_rows) for shape_rows in row_counts(program)
            ]
            if draw != "grid":  # there equal bits count, of infinities, too
                halve_until_finite(module, program, inputs, modules)
            wrong = None
            for number, values in enumerate(inputs):
                got = results_of(compiled, program, values, modules)
                by_graph = list(rows)
                q = Oracle(program.recipe, by_graph, program.dynamic)
                expected = results_of(partial(oracle, q, module), program, values, modules)
                if attempt == number == 0:
                    self.moved += matched["quantize_before_index"] > 0
                    finding = _products(program, q, by_graph)
                    if finding is not None:
                        return finding
                wrong = wrong or self._difference(
                    program, oracle, module, modules, values, by_graph, got, expected, exactly=draw == "grid"
                )
            if wrong is None:
                self.exact += attempt == 0
                return None
        return Finding(program, "numbers", wrong, tuple(rows))

    def _difference(self, program, oracle, module, modules, values, rows, got, expected, exactly=False) -> str | None:
        """What differs by more than rounding; with `exactly`, by anything."""
        if all(_same(a, b) for a, b in zip(got, expected, strict=True)):
            return None
        if exactly:
            return "not the same in every bit"
        noise = _NOISE[self.dtype]
        # Several, and the most that one of them does: where the largest element of a tensor is rounded otherwise, all
        # its scales are others.
        oracles = [Oracle(program.recipe, rows, program.dynamic, noise, seed) for seed in range(_SHAKES)]
        shaken = [results_of(partial(oracle, q, module), program, values, modules) for q in oracles]
        names = [*program.outputs(), *_gradient_names(program, modules)] if program.train else program.outputs()
        for name, a, b, *others in zip(names, got, expected, *shaken, strict=False):
            a, b = _zero_for_none(a, b)
            if a is None:
                continue
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{name}: {a.dtype} {tuple(a.shape)} where the oracle has {b.dtype} {tuple(b.shape)}"
            moved = max(_distance(*_zero_for_none(other, b)) for other in others)
            error, allowed = _distance(a, b), _MARGIN[self.dtype] * moved + 4 * noise
            # Where the noise makes a NaN of the oracle's values, equal ones are right, and no others.
            if error and not error <= allowed:
                worst = (a.float() - b.float()).abs().max().item()
                return f"{name}: relative error {error:.3g}, allowed {allowed:.3g}; largest difference {worst:.4g}"
        return None

    def _compile(self, module: torch.nn.Module, program: Program, rows: list[Row], matched: Counter) -> Callable:
        options = {"fullgraph": True, "dynamic": program.dynamic}
        if self.inductor:
            backend = fp4compile.backend(program.recipe)
            compiled = torch.compile(module, backend=backend, **options)

            def call(*args):
                results = compiled(*args)
                rows[:] = backend.report.rows
                matched.update(backend.report.counts)
                return results

            return call
        return torch.compile(module, backend=captured(program, rows, _moving_all, matched=matched), **options)


@contextmanager
def _moving_all() -> Iterator[None]:
    """Rows are quantised before every move that allows it, also where Inductor would be slower, or has no code."""
    with (
        mock.patch.object(quantize_before_index, "_inductor_moves", lambda quantise: True),
        mock.patch.object(quantize_before_index, "_in_memory", lambda node: True),
    ):
        yield


def captured(
    program: Program,
    rows: list[Row],
    around: Callable = nullcontext,
    without: frozenset[str] = frozenset(),
    run: Callable = lambda module: module.forward,
    matched: Counter | None = None,
) -> Callable:
    """A Dynamo backend: the passes of `fp4compile` on the graphs that Inductor would give them, nothing generated.

    around: makes the context in which the passes run. without: names of passes that do not. run: what calls a graph.
    matched: takes how often each pass matched after the partitioner.
    """

    def compile_graph(gm: torch.fx.GraphModule, example_inputs) -> Callable:
        inputs = names.record(gm, example_inputs).inputs
        joint_passes = JointPasses(program.recipe, inputs, lambda found, runs: rows.extend(found))
        counts = Counter() if matched is None else matched
        disabled = switched_off_passes() | without
        lower_passes = LowerPasses(partial(_count, counts), disabled=disabled)

        def lowered(module: torch.fx.GraphModule, _) -> Callable:
            with around():
                lower_passes(module.graph)
            module.recompile()
            return _boxed(run(module))

        def rewritten(module: torch.fx.GraphModule) -> None:
            with around():
                joint_passes(module.graph)
            module.recompile()

        def partition(joint, joint_inputs, **options):
            rewritten(joint)
            return min_cut_rematerialization_partition(joint, joint_inputs, **options)

        def inference(module: torch.fx.GraphModule, _) -> Callable:
            rewritten(module)
            return lowered(module, _)

        return aot_autograd(
            fw_compiler=lowered, bw_compiler=lowered, inference_compiler=inference, partition_fn=partition,
            decompositions=select_decomp_table(),
        )(gm, example_inputs)  # fmt: skip

    return compile_graph


def _count(counts: Counter, saved, prologues, runs) -> None:
    """Count the matches of the passes on one graph: what `LowerPasses` tells."""
    counts.update({name: run.matches for name, run in runs.items()})


def _boxed(function: Callable) -> Callable:
    def call(args: list):
        values = list(args)
        args.clear()
        return function(*values)

    call._boxed_call = True
    return call


# ---------------------------------------------------------------- data


def row_counts(program: Program) -> list[int | None]:
    """How many rows to call the program with; None for those of its inputs."""
    return [None, program.inputs[0][1][0] + 8] if program.dynamic else [None]


def fill(modules, program: Program, draw: str, device: str, dtype: torch.dtype, rows: int | None) -> list[torch.Tensor]:
    """New values for all parameters; returns the inputs, and behind them what every result's gradient is drawn from."""
    generator = torch.Generator().manual_seed(program.seed * 3 + len(draw))
    with torch.no_grad():
        for name, parameter in modules.named_parameters():
            value = _values(parameter.shape, draw, generator, 16)
            if "fine" in name:  # more bits than the types that it is cast to have
                value += _values(parameter.shape, draw, generator, 2**15)
            parameter.copy_(value)
    inputs = []
    for _, shape, gradient in program.inputs:
        shape = shape if rows is None else (rows, *shape[1:])
        value = _values(shape, draw, generator, 2).to(device, dtype)
        inputs.append(value.requires_grad_(gradient and program.train))
    return inputs


def halve_until_finite(module, program: Program, inputs: list[list[torch.Tensor]], modules) -> None:
    """Halve parameters and inputs until the program without quantising overflows nowhere.

    Behind an overflow, any rounding decides between infinity and NaN.
    """
    for _ in range(_HALVINGS):
        results = [each for values in inputs for each in results_of(module, program, values, modules)]
        if all(each is None or each.isfinite().all() for each in results):
            return
        with torch.no_grad():
            for value in (*modules.parameters(), *(each for values in inputs for each in values)):
                value.mul_(0.5)


def _values(shape, draw: str, generator: torch.Generator, unit: int) -> torch.Tensor:
    """On a grid, where sums of products round nowhere (or seldom); or normally distributed, where ties are rare."""
    if draw == "grid":
        return torch.randint(-4, 5, shape, generator=generator).float() / unit
    return torch.randn(shape, generator=generator) * 2 / unit


def results_of(function: Callable, program: Program, inputs: list[torch.Tensor], modules) -> list[torch.Tensor | None]:
    """Outputs, and the gradients of inputs and parameters."""
    if not program.train:
        with torch.no_grad():
            return list(function(*inputs))
    outputs = list(function(*inputs))
    generator = torch.Generator().manual_seed(program.seed)
    with_gradient = [out for out in outputs if out.requires_grad]
    tangents = [torch.randint(-4, 5, out.shape, generator=generator).to(out) / 2 for out in with_gradient]
    leaves = [x for x in inputs if x.requires_grad] + [p for p in modules.parameters() if p.requires_grad]
    if not with_gradient or not leaves:
        return [out.detach() for out in outputs]
    gradients = torch.autograd.grad(with_gradient, leaves, tangents, allow_unused=True)
    return [out.detach() for out in outputs] + list(gradients)


def _gradient_names(program: Program, modules) -> list[str]:
    names = [f"gradient of {name}" for name, _, gradient in program.inputs if gradient]
    return names + [f"gradient of {name}" for name, p in modules.named_parameters() if p.requires_grad]


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        a, b = _zero_for_none(a, b)
        return a is b or _equal(a, b)
    return a.dtype == b.dtype and a.shape == b.shape and _equal(a, b)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _zero_for_none(a, b):
    """No gradient and a gradient of zeros are the same."""
    if a is None and b is not None:
        a = torch.zeros_like(b)
    if b is None and a is not None:
        b = torch.zeros_like(a)
    return a, b


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference, relative to that of b; equal infinities and NaN differ by nothing."""
    equal = (a == b) | (a.isnan() & b.isnan())
    a, b = a.double(), b.double()
    difference, scale = torch.where(equal, 0, a - b).norm(), torch.where(b.isfinite(), b, 0).norm()
    return (difference / scale.clamp(min=1e-30)).item()


# ---------------------------------------------------------------- products


def _products(program: Program, q: Oracle, rows: list[Row]) -> Finding | None:
    """The report's quantised products against the oracle's."""
    reported, expected = Counter(key_of(row, program.dynamic) for row in rows if row.quantised), Counter(q.products)
    _match_any_name(reported, expected)
    missing, extra = expected - reported, reported - expected
    if not missing and not extra:
        return None
    lines = [f"  {'not quantised' if sign else 'quantised, and should not be'}: {count} x {key}"
             for sign, found in ((True, missing), (False, extra)) for key, count in found.items()]  # fmt: skip
    return Finding(program, "products", "\n".join(lines), tuple(rows))


def _match_any_name(reported: Counter, expected: Counter) -> None:
    """Give layers without a place in the model the names that the report has for them, each its own."""
    known = {key[0] for key in expected} | {""}
    for layer in {key[0] for key in expected if key[0].startswith(ANY_NAME)}:
        own = {key: count for key, count in expected.items() if key[0] == layer}
        for name in {key[0] for key in reported} - known:
            named = {(name, *key[1:]): count for key, count in own.items()}
            if all(reported[key] == count for key, count in named.items()):
                for key in own:
                    del expected[key]
                expected.update(named)
                known.add(name)
                break
