"""Backends by name, in the registries of other tools.

Dynamo: `backend="fp4compile_<recipe>"`, or `backend="fp4compile"` for the recipe that the environment variable
FP4COMPILE_RECIPE names. `fp4compile_autoload` gives accelerate, and with it HuggingFace's `Trainer`, the same names.
"""

import atexit
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import GraphModule

import fp4compile_autoload
from fp4compile import _compat
from fp4compile.dynamo_backend import Backend, backend
from fp4compile.passes.manager import switched_off_passes
from fp4compile.recipe import DEFAULT, ENVIRONMENT, Recipe, recipes
from fp4compile.report.report import Report
from fp4compile.weights.integration import check_version

log = logging.getLogger("fp4compile")

# The functions that represent backends in Dynamo's registry.
_named: dict[Backend, Callable] = {}


def named_reports() -> list[Report]:
    """The report of every backend that this process has used by name or passed to `torch.compile`, each once."""
    given = (getattr(backend, "report", None) for backend in (*_named, *_compat.handed_to_dynamo()))
    return list({id(report): report for report in given if isinstance(report, Report)}.values())


def is_backend(given: Any) -> bool:
    """Whether a `backend` argument of `torch.compile` is this package's, as an object or by its name."""
    return isinstance(given, Backend) or (isinstance(given, str) and given in fp4compile_autoload.backends())


def register_with_accelerate() -> None:
    """Make accelerate, and HuggingFace's `Trainer`, accept this package's backends by name.

    Importing torch or this package does so too, see `fp4compile_autoload`.

    Raises ImportError where accelerate is not installed.
    """
    importlib.import_module("accelerate.utils")
    fp4compile_autoload.watch()


def register_with_transformers() -> None:
    """Make `from_pretrained` of transformers read packed models that `save_pretrained` wrote.

    Importing torch or this package does so too, see `fp4compile_autoload`. `save_pretrained` of a packed model needs no
    call.

    Raises ImportError where transformers is not installed, or is older than `weights.integration.SAVES`.
    """
    check_version()
    from fp4compile.weights.transformers import register

    register()


def warn_at_exit() -> None:
    """Warn of backends that quantised nothing, and of rules without effect: only the end shows these."""
    if hasattr(sys, "last_value"):  # the program ends with an exception, which is more informative
        return
    for report in named_reports():
        if not (report.quantised or report.lost) or report.unmatched_rules():
            log.warning("fp4compile %s", report.summary())


atexit.register(warn_at_exit)


def _by_name(name: str | Recipe) -> Any:
    """A function that calls the backend, and has its `report` and `reset`.

    Dynamo's registry sets attributes on its entries, which a frozen `Backend` forbids.
    """
    chosen = backend(name)
    if chosen in _named:
        return _named[chosen]

    def compile_named(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        now = switched_off_passes()
        if now != chosen.disabled_passes:
            raise RuntimeError(
                f"the passes switched off were {sorted(chosen.disabled_passes)} when backend={chosen.__name__!r} was "
                f"first used, and are {sorted(now)} now: one process has one backend of a name; pass "
                "fp4compile.backend(...) instead"
            )
        return chosen(gm, example_inputs, **kwargs)

    compile_named.__name__ = chosen.__name__
    compile_named.chosen = chosen  # type: ignore[attr-defined]
    compile_named.report = chosen.report  # type: ignore[attr-defined]
    compile_named.reset = chosen.reset  # type: ignore[attr-defined]
    _named[chosen] = compile_named
    return compile_named


class _FromEnvironment:
    """`backend="fp4compile"`: the recipe that FP4COMPILE_RECIPE names when the backend's name is first used.

    Dynamo caches the backend of a name, so this name means one recipe in a process. If the variable has changed since,
    compiling raises RuntimeError, and no graph of the first recipe is reused by another `torch.compile` call.
    """

    def __init__(self) -> None:
        self.value = os.environ.get(ENVIRONMENT) or None
        self.compile = _by_name(backend().recipe)
        self.chosen: Backend = self.compile.chosen
        self.__name__, self.report, self.reset = self.compile.__name__, self.compile.report, self.compile.reset

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        now = os.environ.get(ENVIRONMENT) or None
        if now != self.value:
            raise RuntimeError(
                f"{ENVIRONMENT} was {self.value!r} when backend='fp4compile' was first used, and is {now!r} now: one "
                f"process has one recipe of that name; pass fp4compile.backend({now or DEFAULT!r}) instead"
            )
        return self.compile(gm, example_inputs, **kwargs)

    def __eq__(self, other: object) -> bool:
        # Dynamo compares backends before it reuses a graph of one `torch.compile` call for another call.
        return self is other and (os.environ.get(ENVIRONMENT) or None) == self.value

    __hash__ = object.__hash__


def __getattr__(name: str) -> Callable:
    """The objects that the `torch_dynamo_backends` entry points name: `default`, and one for each named recipe."""
    if name == "default":
        return _FromEnvironment()
    if name in recipes():
        return _by_name(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
