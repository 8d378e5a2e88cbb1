"""The Dynamo backend: `torch.compile(model, backend=fp4compile.backend(recipe))`.

It records what only Dynamo knows (which inputs are parameters, and their names), puts one pass manager into each of
two slots of Inductor (joint graph, post-grad) and hands the graph to `compile_fx`. By name:
`backend="fp4compile_<recipe>"`, or `backend="fp4compile"` for the recipe that FP4COMPILE_RECIPE names.
"""

import logging
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.fx import GraphModule

from fp4compile import report_cache
from fp4compile.passes.find import Input, clean_name
from fp4compile.passes.hoist import hoisting
from fp4compile.passes.manager import JointPasses, LowerPasses
from fp4compile.passes.saved import Saved
from fp4compile.recipe import Recipe, recipes
from fp4compile.recipe_io import resolve
from fp4compile.report import Report, Row
from fp4compile.weight_cache import marking

log = logging.getLogger("fp4compile")
_JOINT_SLOT, _LOWER_SLOT = "joint_custom_pre_pass", "post_grad_custom_post_pass"


@dataclass(frozen=True)
class Backend:
    """A backend for `torch.compile`. Two of equal recipe and strictness are equal, so that Dynamo reuses graphs.

    report: the rows of every graph compiled so far.
    """

    recipe: Recipe
    strict: bool = False
    report: Report = field(default=None, compare=False, repr=False)  # type: ignore[assignment]

    def __post_init__(self):
        if self.report is None:
            object.__setattr__(self, "report", Report(self.recipe.name))

    @property
    def __name__(self) -> str:
        # A name of Dynamo's registry: compiling for any other, Dynamo leaves weak references on the parameters, which
        # forbid `torch.utils.swap_tensors`.
        return f"fp4compile_{self.recipe.name}" if self.recipe.name in recipes() else "fp4compile"

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> Callable:
        """Compile a Dynamo graph. mode and options mean what they mean for Inductor.

        Raises RuntimeError under strict=True if no product was quantised, in this graph or one before it.
        """
        inputs = record_inputs(gm, example_inputs)
        patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
        before_joint, before_lowering = (
            as_passes(patches.get(slot, getattr(inductor_config, slot))) for slot in (_JOINT_SLOT, _LOWER_SLOT)
        )
        outcome: list[tuple[list[Row], dict[str, int]]] = []
        kept: list[Saved] = []
        passes = JointPasses(self.recipe, inputs, lambda rows, counts: outcome.append((rows, counts)), before_joint)
        key = report_cache.key(gm, example_inputs, passes.uuid())
        patches |= {_JOINT_SLOT: passes, _LOWER_SLOT: LowerPasses(kept.extend, before_lowering)}
        inner_compile = hoisting(compile_fx_inner, inputs, self.recipe.weight_cache)
        compiled = compile_fx(gm, example_inputs, inner_compile, config_patches=patches)
        if _trains(example_inputs):
            compiled = marking(compiled, [i for i, entry in enumerate(inputs) if entry.parameter is not None])
        if outcome:
            outcome = [(_with_saved(rows, kept), counts) for rows, counts in outcome]
            report_cache.store(key, outcome)
        else:  # the compiled graph came from a cache, and the passes did not run
            outcome = report_cache.load(key)
        for rows, counts in outcome:
            self.report.add(rows, counts)
        if not self.report.quantised:
            self._nothing_matched(bool(outcome))
        return compiled

    def reset(self) -> None:
        """Called by `torch.compiler.reset()`: frees the CUDA graphs, as Inductor's own backend does."""
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()

    def _nothing_matched(self, known: bool) -> None:
        if not known:
            return
        reasons = self.report.reasons()
        listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.items()) or "no matrix product found"
        message = f"fp4compile recipe {self.recipe.name!r} quantised nothing: {listed}"
        if self.strict:
            raise RuntimeError(message)
        if not self.report.warned:
            self.report.warned = True
            warnings.warn(message, stacklevel=2)


def backend(recipe: str | dict | Recipe | None = None, *, strict: bool = False, **overrides: Any) -> Backend:
    """The backend of a recipe, for `torch.compile(model, backend=...)`.

    recipe: a name (see `recipes()`), a dict, a `Recipe`, or the path of a TOML file; None takes the environment
        variable FP4COMPILE_RECIPE, or "nvfp4".
    strict: raise RuntimeError where nothing was quantised, instead of one warning.
    overrides: fields of the recipe to replace.

    Raises ValueError or TypeError for an unknown recipe or field, or a contradictory recipe.
    """
    if not isinstance(strict, bool):
        raise TypeError(f"strict: expected a bool, got {type(strict).__name__}")
    return Backend(resolve(recipe, **overrides), strict)


def record_inputs(gm: GraphModule, example_inputs: Sequence[Any]) -> tuple[Input, ...]:
    """Which graph inputs are parameters, and their fully qualified names, by position."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return tuple(
        Input(_parameter_name(node, value)) for node, value in zip(placeholders, example_inputs, strict=True)
    )


def _trains(example_inputs: Sequence[Any]) -> bool:
    """Whether the graph will have a backward. Dynamo guards all that this depends on."""
    return torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in example_inputs
    )


def _parameter_name(node: torch.fx.Node, value: Any) -> str | None:
    argument = node.meta.get("grapharg")
    source = getattr(argument, "source", None)
    path = getattr(source, "name", None)
    path = path() if callable(path) else path
    by_source = _name_from_source(path) if path else None
    if by_source is not None:
        return by_source
    return node.name if isinstance(value, torch.nn.Parameter) else None


def _with_saved(rows: list[Row], kept: list[Saved]) -> list[Row]:
    """The rows of a graph, those of wgrad with what its forward keeps for them."""
    by_module = {entry.module: entry for entry in kept}
    done = []
    for row in rows:
        entry = by_module.pop(row.module, None) if row.product == "wgrad" else None
        done.append(row if entry is None else replace(row, saved=entry.packed, saved_plain=entry.plain))
    return done


_ATTRIBUTE = re.compile(r"\.(_modules|_parameters)\['([^']+)'\]")


def _name_from_source(path: str) -> str | None:
    """"layers.0.weight" of "L['self']._modules['layers']._modules['0']._parameters['weight']", else None."""
    steps = _ATTRIBUTE.findall(path)
    if not steps or steps[-1][0] != "_parameters":
        return None
    return clean_name(".".join(name for _, name in steps))


def as_passes(slot: Any) -> tuple:
    """The contents of a pass slot: nothing, a callable, or (from torch 2.13 on) a sequence of them."""
    if slot is None:
        return ()
    return tuple(slot) if isinstance(slot, list | tuple) else (slot,)


_named: dict[Backend, Callable] = {}


def named_reports() -> list[Report]:
    """The reports of the backends that were used by name in this process."""
    return [used.report for used in _named if used.report.rows]


def _by_name(name: str) -> Callable:
    """A function, because Dynamo's registry sets attributes on what it registers. `.report` is its backend's."""
    chosen = backend(None if name == "default" else name)
    if chosen in _named:
        return _named[chosen]

    def compile_named(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        return chosen(gm, example_inputs, **kwargs)

    compile_named.__name__ = chosen.__name__
    compile_named.report, compile_named.reset = chosen.report, chosen.reset
    _named[chosen] = compile_named
    return compile_named


def __getattr__(name: str) -> Callable:
    """The backends that the `torch_dynamo_backends` entry points name: `default` and every named recipe."""
    if name == "default" or name in recipes():
        return _by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
