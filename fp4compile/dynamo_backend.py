"""The Dynamo backend: `torch.compile(model, backend=fp4compile.backend(recipe))`.

The backend records the graph inputs that are parameters, and their names, which only Dynamo has. It puts one pass
manager into each of two pass slots of Inductor (joint graph and post-grad graph), and calls `compile_fx` on the graph.

`registration` registers the backends by name.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._guards import CompileContext
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from fp4compile import _compat, _inductor_patches, hardware
from fp4compile.analysis.plan import OF_ONE_LAYER
from fp4compile.passes.hoist import hoisting
from fp4compile.passes.lib.notes import Saved, saved
from fp4compile.passes.manager import JointPasses, LowerPasses, source_digest, switched_off_passes
from fp4compile.recipe import Recipe, Rule, agreement, recipes, resolve
from fp4compile.report import names, stored_rows
from fp4compile.report.report import PassRun, Report, Row
from fp4compile.report.rule_names import out_of_reach, without_layer
from fp4compile.report.stored_rows import Outcome
from fp4compile.weights.writes import marking, watch

_JOINT_SLOT, _LOWER_SLOT = "joint_custom_pre_pass", "post_grad_custom_post_pass"


@dataclass(eq=False)
class _Shared:
    """State of all equal backends. They share it because Dynamo lets one backend run the graphs of an equal one.

    quantised: the models of which a matmul was quantised. warned: the models for which the backend warned that no
    matmul was quantised. For a compiled function without a model, both hold its backend's `_Identity`.
    rules_checked: the models whose layers' names were compared with the recipe's rules.
    """

    report: Report
    quantised: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    warned: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    rules_checked: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


_shared: WeakValueDictionary[tuple[Recipe, bool, frozenset[str]], _Shared] = WeakValueDictionary()


@dataclass(eq=False)
class _Compilation:
    """Collects what the passes report while one Dynamo graph is compiled.

    rows: None until the joint passes have run. They do not run where the compiled graph comes from a cache.
    saved: packed activations that forward graphs save for their wgrads, by the names of the wgrads. fused: the
    prologues of quantisers, by the names of their matmuls. runs: the matches and times of each pass so far.
    lowered: whether the post-grad passes have run. They do not run where Inductor's cache has the graph after the
    joint passes.
    late: called with `fused` and `runs` of a backward graph that is compiled later, when it first runs; None before.
    """

    rows: list[Row] | None = None
    saved: dict[str, Saved] = field(default_factory=dict)
    fused: dict[str, str] = field(default_factory=dict)
    runs: dict[str, PassRun] = field(default_factory=dict)
    lowered: bool = False
    late: Callable[[dict[str, str], dict[str, PassRun]], None] | None = None

    def joint(self, rows: list[Row], runs: dict[str, PassRun]) -> None:
        """Record the joint passes' results on a graph."""
        self.rows = [*(self.rows or ()), *rows]
        self.ran(runs)

    def post_grad(self, saved: list[Saved], fused: dict[str, str], runs: dict[str, PassRun]) -> None:
        """Record the post-grad passes' results on a graph."""
        self.lowered = True
        self.keep(saved)
        self.fused |= fused
        self.ran(runs, fused)

    def keep(self, found: list[Saved]) -> None:
        """Record the packed activations that a graph saves."""
        self.saved |= {entry.wgrad: entry for entry in found}

    def noting(self, inner_compile: Callable) -> Callable:
        """An `inner_compile` that records what a graph saves, for graphs that Inductor's cache has, too."""

        def compile_noted(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
            self.keep(saved(gm.graph))
            return inner_compile(gm, example_inputs, **kwargs)

        return compile_noted

    def ran(self, runs: dict[str, PassRun], fused: dict[str, str] | None = None) -> None:
        """Add the matches and times of passes."""
        for name, run in runs.items():
            before = self.runs.get(name, PassRun(0, 0.0))
            self.runs[name] = PassRun(before.matches + run.matches, before.seconds + run.seconds)
        if self.late is not None:
            self.late(fused or {}, runs)

    @property
    def outcome(self) -> Outcome:
        """The results of the passes on the graph so far."""
        return Outcome(_completed(self.rows or [], self.saved, self.fused), _matches(self.runs))


def _matches(runs: dict[str, PassRun]) -> dict[str, int]:
    return {name: run.matches for name, run in runs.items()}


def _seconds(runs: dict[str, PassRun]) -> dict[str, float]:
    return {name: run.seconds for name, run in runs.items()}


class _Identity:
    """Identifies one backend object among equal ones."""


@dataclass(frozen=True)
class Backend:
    """A backend for `torch.compile`.

    Backends of equal fields are equal, so that Dynamo reuses their graphs. Until `torch.compiler.reset()`, equal
    backends have one report in common.

    recipe: the formats and the quantised layers. strict: raise RuntimeError where nothing was quantised, where a rule
    matches no layer of the model, or where Dynamo's limit of recompilations leaves a function uncompiled, instead of a
    warning.
    disabled_passes: the passes that `fp4compile.config` switches off when the backend is made.
    """

    recipe: Recipe
    strict: bool = False
    disabled_passes: frozenset[str] = field(default_factory=switched_off_passes)
    _own: _Shared = field(default=None, init=False, compare=False, repr=False)  # type: ignore[assignment]
    _identity: _Identity = field(default_factory=_Identity, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        _watch_dynamo()
        watch()
        report = Report(self.recipe.name, graphs=0, rules=self.recipe.rules)
        object.__setattr__(self, "_own", self._join(_Shared(report)))

    def _join(self, shared: _Shared) -> _Shared:
        """The state that equal backends share; `shared` becomes that state where no equal backend is alive."""
        return _shared.setdefault((self.recipe, self.strict, self.disabled_passes), shared)

    @property
    def report(self) -> Report:
        """The report on every graph that this backend and equal ones have compiled so far."""
        return self._own.report

    @property
    def __name__(self) -> str:
        # A name of Dynamo's registry, even where the recipe is the user's own.
        return f"fp4compile_{self.recipe.name}" if self.recipe.name in recipes() else "fp4compile"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable:
        """Compile a Dynamo graph; Dynamo calls this.

        mode, options: arguments of `torch.compile`, as for Inductor.

        Raises RuntimeError where another rank of a process group compiles with other settings; under strict=True also
        if no matmul was quantised, in this graph or an earlier one of the model, and if a rule matches no layer of the
        model.
        """
        _compat.reset_with_dynamo(self)
        known = names.record(gm, example_inputs)
        self._check_rules(known)
        config_patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
        before_joint, before_lowering = (
            as_passes(config_patches.get(slot, getattr(inductor_config, slot))) for slot in (_JOINT_SLOT, _LOWER_SLOT)
        )
        prevented = _prevented(gm, mode, config_patches)
        ranks = agreement.publish(gm, example_inputs, self._settings(prevented))
        if prevented is not None:
            self._record(known, Outcome([], {}), prevented)
            compiled = compile_fx(gm, example_inputs, config_patches=config_patches)
            ranks.compare()
            return compiled
        told = _Compilation()
        passes = JointPasses(self.recipe, known.inputs, told.joint, before_joint, self.disabled_passes)
        lowering = LowerPasses(told.post_grad, before_lowering, self.disabled_passes)
        config_patches |= {_JOINT_SLOT: passes, _LOWER_SLOT: lowering}
        key = stored_rows.key(gm, example_inputs, passes.uuid(), config_patches)
        noted = told.noting(compile_fx_inner)
        inner_compile = hoisting(
            noted, known.inputs, self.recipe.weight_cache, sink=told.ran, disabled=self.disabled_passes
        )
        compiled = compile_fx(gm, example_inputs, inner_compile, config_patches=config_patches)
        ranks.compare()
        if _trains(example_inputs):
            trained = [i for i, entry in enumerate(known.inputs) if entry.parameter is not None and not entry.frozen]
            compiled = marking(compiled, trained)
        if told.rows is not None and not told.lowered and (before := stored_rows.load(key, missing=None)):
            self._record(known, before, seconds=_seconds(told.runs))
        elif told.rows is not None:
            stored_rows.store(key, told.outcome)
            self._record(known, told.outcome, seconds=_seconds(told.runs))
            reports = [shared.report for shared in {self._own, self._join(self._own)}]

            rows = known.in_full(told.outcome.rows)

            def late(fused: dict[str, str], runs: dict[str, PassRun]) -> None:
                stored_rows.store(key, told.outcome)
                for report in reports:
                    report.add([], _matches(runs), seconds=_seconds(runs))
                    report.complete(rows, fused)

            told.late = late
        else:  # the compiled graph came from a cache, and the passes did not run
            self._record(known, stored_rows.load(key))
        return compiled

    def _settings(self, prevented: str | None) -> dict[str, str]:
        """The settings in which the ranks of a process group must agree."""
        others: dict[str, object] = {
            "switched off passes": sorted(self.disabled_passes),
            "source of fp4compile": source_digest(),
        }
        if "quantize_before_gather" not in self.disabled_passes:  # it gathers codes over a slow link
            others["gathers go through the host's memory"] = hardware.gathers_through_host()
        return agreement.settings_of(self.recipe, {**others, "nothing is quantised because": prevented})

    def __reduce__(self) -> tuple:
        return Backend, (self.recipe, self.strict, self.disabled_passes)

    def reset(self) -> None:
        """Free the CUDA graphs, as Inductor's own backend does; `torch.compiler.reset()` calls this.

        Dynamo then has no graphs of this backend, so equal backends made from now on have another report.
        """
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()
        self.report.forget_compilations()
        _shared.pop((self.recipe, self.strict, self.disabled_passes), None)

    def _record(
        self,
        known: names.Names,
        outcome: Outcome | None,
        why: str | None = None,
        seconds: dict[str, float] | None = None,
    ) -> None:
        """Add one graph to the report, and warn (or raise) if nothing of its model is quantised yet.

        A graph that lacks matrices of its model, and in which nothing but rules and the kinds and places of its layers
        is against quantising, decides nothing: other graphs follow. Nor does a graph without a matmul, such as of a
        loss or of an optimiser's step, after a model of which a matmul was quantised.

        outcome: None where the rows are lost. why: the reason that no pass ran. seconds: of each pass.
        """
        model = self._identity if known.root is None else known.root
        rows = [] if outcome is None else outcome.rows
        for shared in {self._own, self._join(self._own)}:
            shared.report.graphs = (shared.report.graphs or 0) + 1
            shared.report.lost += outcome is None
            if outcome is not None:
                trace = CompileContext.current_trace_id()
                shared.report.add(known.in_full(rows), outcome.counts, trace, seconds=seconds)
            if outcome is None or any(row.quantised for row in rows):
                shared.quantised[model] = True
        # Rules may skip a whole block that has its own recipe, and a graph break may follow layers without a matmul.
        reasons = [row.reason or "" for row in rows]
        by_rules = rows and all(reason.startswith("rule ") for reason in reasons)
        of_one_layer = all(reason.startswith(OF_ONE_LAYER) for reason in reasons)
        undecided = (of_one_layer and known.partial) or (by_rules and known.prefix)
        undecided = undecided or (not rows and self._own.quantised)
        if why is not None or (model not in self._own.quantised and not undecided):
            self._complain(f" quantised nothing: {why or _reasons(rows)}", model in self._own.warned)
            self._own.warned[model] = True

    def _left_uncompiled(self, function: str, limit: str, differs: str | None) -> None:
        """Record, and warn or raise, that one of Dynamo's limits leaves a function uncompiled from now on.

        differs: the guard of the last compilation that failed; None where it is unknown.
        """
        told = function in self._own.report.uncompiled
        for shared in {self._own, self._join(self._own)}:
            shared.report.uncompiled[function] = limit
        self._complain(
            f": Dynamo has compiled {function} as often as "
            f"torch._dynamo.config.{limit}={getattr(torch._dynamo.config, limit, None)} allows; inputs that fit none "
            "of these compilations run uncompiled from now on: packed layers stay quantised, nothing else is. "
            f"{_way_out(differs)}", told,
        )  # fmt: skip

    def _check_rules(self, known: names.Names) -> None:
        """Warn or raise, once for each model, if rules match no layer of the whole model.

        The report lists rules that match a layer and still decide about no matmul, because only all graphs show these.
        """
        if not self.recipe.rules or known.root is None or known.root in self._own.rules_checked:
            return
        idle = without_layer(self.recipe.rules, known)
        if idle is None:
            return
        if idle:
            self._complain(f": no layer of the model ({type(known.root).__name__}) matches the rule {_patterns(idle)}")
        if above := out_of_reach(self.recipe.rules, known):
            self._complain(
                f": {known.prefix.rstrip('.')!r} is compiled by itself, names in its graph begin below it, and the "
                f"rule {_patterns(above)} matches full names alone: compile each block with the recipe "
                "fp4compile.block_recipe(recipe, model, block)"
            )
        self._own.rules_checked[known.root] = True

    def _complain(self, message: str, known: bool = False) -> None:
        """Raise RuntimeError if the backend is strict; else warn, unless the user knows. message: after the recipe."""
        message = f"fp4compile recipe {self.recipe.name!r}{message}"
        if self.strict:
            raise RuntimeError(message)
        if not known:
            warnings.warn(message, stacklevel=4)


def _patterns(rules: tuple[Rule, ...]) -> str:
    return ", ".join(repr(rule.pattern) for rule in rules)


def _way_out(differs: str | None) -> str:
    """Advice against a limit of recompilations. differs: the guard that failed, if it is known."""
    if differs is None:
        return "Raise the limit, or, where only sizes differ, compile with dynamic=True"
    if "BACKEND_MATCH" in differs:
        return "Other recipes compiled it before: call torch.compiler.reset() between recipes, or raise the limit"
    sizes = "mismatch at index" in differs or ".size()" in differs
    cure = "Compile with dynamic=True, or raise the limit" if sizes else "Raise the limit"
    return f"The last compilation does not fit because of: {differs[:300]}. {cure}"


def backend(recipe: str | dict | Recipe | Path | None = None, *, strict: bool = False, **overrides: Any) -> Backend:
    """The backend of a recipe, for `torch.compile(model, backend=...)`.

    recipe: a name (see `recipes()`), a dict of fields, a `Recipe`, or the path of a TOML or JSON file. None takes the
        recipe that the environment variable FP4COMPILE_RECIPE names, or "nvfp4" where it is not set; the log of
        "fp4compile" names it, at level INFO.
    strict: raise RuntimeError, instead of giving one warning, where nothing of a model was quantised, where a rule of
        the recipe matches no layer of a model, and where a limit of Dynamo's leaves a function uncompiled.
    overrides: fields of the recipe to replace.

    Raises ValueError or TypeError for an unknown recipe or field, a contradictory recipe, a `strict` that is no bool,
    or an unknown pass in `fp4compile.config.disabled_passes` or FP4COMPILE_DISABLE_PASSES; OSError for a file that does
    not exist.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected a bool, got {type(strict).__name__}")
    return Backend(resolve(recipe, **overrides), strict)


def _prevented(gm: GraphModule, mode: str | None, config_patches: dict[str, Any]) -> str | None:
    """The reason that Inductor's settings prevent quantising a graph; None if they do not."""
    if not config_patches.get("use_joint_graph_passes", getattr(inductor_config, "use_joint_graph_passes", True)):
        switch = f"mode={mode!r}" if mode == "lite" else "use_joint_graph_passes=False"
        return f"{switch} switches off those passes of Inductor that quantise"
    if inductor_config.freezing and next(gm.parameters(), None) is not None:
        return "torch._inductor.config.freezing makes parameters constants, and no operand is a parameter then"
    return None


def _trains(example_inputs: Sequence[Any]) -> bool:
    """Whether the graph will have a backward pass. Dynamo guards everything that the answer depends on."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    )


def _completed(rows: list[Row], kept: dict[str, Saved], fused: dict[str, str]) -> list[Row]:
    """The rows of a graph with fused operations; wgrad rows also with the bytes that the forward saves for them."""
    rows = [replace(row, fused=fused.get(row.node or "")) for row in rows]
    found = ((row, kept.get(row.node or "")) for row in rows)
    return [row if entry is None else replace(row, saved=entry.packed, saved_plain=entry.plain)
            for row, entry in found]  # fmt: skip


def _reasons(rows: list[Row]) -> str:
    reasons = Report("", rows).reasons()
    return "; ".join(f"{count} x {reason}" for reason, count in reasons.items()) or "no matmul found"


def as_passes(slot: Any) -> tuple:
    """The contents of a pass slot: nothing, a callable, or (from torch 2.13 on) a sequence of them."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, list | tuple) else (slot,)


def _backend_of(given: Any) -> Backend | None:
    """The backend passed to `torch.compile`, as an object or by name; None where it is not this package's."""
    chosen = getattr(given, "chosen", given)
    return chosen if isinstance(chosen, Backend) else None


@functools.cache
def _watch_dynamo() -> None:
    """Make Dynamo treat this package's backends as its own, and report functions left uncompiled to them.

    It also makes Inductor's checks for infinities accept codes and scales.
    """

    def ours(given: Any) -> bool:
        return _backend_of(given) is not None

    def told(given: Any, code: CodeType, limit: str, differs: str | None) -> None:
        left, place = _backend_of(given), f"({Path(code.co_filename).name}:{code.co_firstlineno})"
        if left is not None:
            left._left_uncompiled(f"{code.co_qualname} {place}", limit, differs)

    _inductor_patches.forget_parameters_after_compiling(ours)
    _inductor_patches.watch_recompile_limits(told)
    _inductor_patches.assert_finite_formats()
