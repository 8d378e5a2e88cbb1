"""Names of what enters a Dynamo graph: those that rules decide by, and full ones for the report.

Entry: `record(gm, example_inputs, root)`. Rules decide by the name that Dynamo's source of a parameter gives, because
Dynamo lets equal modules share one graph: the name below the module whose `forward` was captured. The full name is
found by identity: a module on the call stack that holds the very tensor which enters the graph knows its name.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel

from fp4compile.passes.find import clean_name, module_name
from fp4compile.passes.gemm import Input
from fp4compile.report import Row, is_below

_ROOT = re.compile(r"([LG])\['([^']+)'\]")
_STEP = re.compile(r"\.(_modules|_parameters|_buffers)\['([^']+)'\]|\.(\w+)|\['([^']+)'\]|\[(\d+)\]")
# What Python and functools.partial put between a function and the objects that it brings along.
_CARRIERS = re.compile(r"__\w+__|cell_contents|args|keywords|func")


@dataclass(frozen=True)
class Names:
    """What is known of a graph's inputs.

    inputs, names: by position; an input that a module holds has a name, a parameter or not. modules: the full name of
    each layer whose name in the graph is a shorter one. prefix: what stands before every name of the graph in the full
    names; "" where that is not known. root: the outermost module that was being called, if any.
    """

    inputs: tuple[Input, ...]
    names: tuple[str | None, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    root: torch.nn.Module | None = None

    def entered_by(self, values: Sequence[Any], root: torch.nn.Module | None = None) -> "Names":
        """The full names where Dynamo runs the same graph for another part of the model. values: the graph's inputs."""
        return _in_model(self.inputs, self.names, values, root)

    def in_full(self, rows: list[Row]) -> list[Row]:
        """The rows under the full names of their layers; `Row.name` keeps the name that rules see."""
        return [self._in_full(row) for row in rows]

    def _in_full(self, row: Row) -> Row:
        full = self.modules.get(row.module, (self.prefix + row.module).removesuffix("."))
        return row if full == row.module else replace(row, module=full, name=row.module)


@dataclass(frozen=True)
class _Place:
    """Where Dynamo found an input. root: the expression of the object below which `path` is a chain of modules."""

    root: str
    path: str
    label: str
    always: bool
    parameter: bool


def record(gm: GraphModule, example_inputs: Sequence[Any], root: torch.nn.Module | None = None) -> Names:
    """Which inputs of a Dynamo graph are parameters, and their names. root: the model; None looks for it on the stack.

    Call it where the backend is called: the user's call is still on the stack then.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [_example(node, value) for node, value in zip(nodes, example_inputs, strict=True)]
    places = [_place(node, value) for node, value in zip(nodes, values, strict=True)]
    names = _names(places)
    inputs = tuple(
        Input(name if place is not None and place.parameter else None)
        for name, place in zip(names, places, strict=True)
    )
    return _in_model(inputs, tuple(names), values, root)


def _in_model(
    inputs: tuple[Input, ...], names: tuple[str | None, ...], values: Sequence[Any], root: torch.nn.Module | None
) -> Names:
    """With the names by which the model knows the tensors that enter the graph."""
    named = [(name, value) for name, value in zip(names, values, strict=True)
             if name is not None and isinstance(value, torch.Tensor)]  # fmt: skip
    stack = [] if root is None else [_unwrapped(root)]
    stack.extend(_modules_on_stack())
    full: dict[str, str] = {}
    owner = None
    for module in stack:
        if len(full) == len(named):
            break
        known = _tensors_of(module)
        for name, value in named:
            if name not in full and id(value) in known:
                full[name] = _best_alias(known[id(value)], name)
                owner = owner or module
    prefixes = {path.removesuffix(name) for name, path in full.items() if is_below(name, path)}
    if not full and stack:  # no tensor to know the module by: where the call stands is where the graph belongs
        prefixes = {_path_of(stack[-1], stack)}
    modules = {module_name(name): module_name(path) for name, path in full.items() if name != path}
    prefix = prefixes.pop() if len(prefixes) == 1 else ""
    return Names(inputs, names, modules, prefix, owner or next(iter(stack), None))


def _best_alias(paths: list[str], name: str) -> str:
    """Of the names of a shared tensor, the one by which this graph reached it."""
    return next((path for path in paths if is_below(name, path)), paths[0])


def _tensors_of(module: torch.nn.Module) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for listing in (module.named_parameters, module.named_buffers):
        for path, value in listing(remove_duplicate=False):
            found.setdefault(id(value), []).append(clean_name(path))
    return found


def _path_of(inner: torch.nn.Module, stack: list[torch.nn.Module]) -> str:
    for module in stack:
        for path, part in module.named_modules():
            if part is inner:
                path = clean_name(path)
                return f"{path}." if path else ""
    return ""


# ---------------------------------------------------------------- the call stack


def _modules_on_stack() -> list[torch.nn.Module]:
    """The modules whose methods are running, the outermost first, each once."""
    found: dict[int, torch.nn.Module] = {}
    frame = sys._getframe()
    while frame is not None:
        module = _self_of(frame)
        if isinstance(module, torch.nn.Module):
            module = _unwrapped(module)
            found[id(module)] = found.pop(id(module), module)  # its outermost call counts
        frame = frame.f_back
    return list(found.values())[::-1]


def _self_of(frame) -> Any:
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    values = frame.f_locals
    found = values.get("self")
    # Up to Python 3.12 this is a copy that the frame keeps: a training loop's tensors would live as long as the loop.
    if isinstance(values, dict):
        values.clear()
    return found


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside torch.compile's and DDP's wrappers."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(module, torch._dynamo.OptimizedModule):
            module = module._orig_mod
        else:
            return module


# ---------------------------------------------------------------- Dynamo's sources


def _example(node: Node, value: Any) -> Any:
    """The tensor that the user's model holds; `value` may be a stand-in for it."""
    example = getattr(node.meta.get("grapharg"), "example", None)
    return value if example is None else example


def _place(node: Node, value: Any) -> _Place | None:
    """Where an input comes from; None for what is neither a parameter nor held by a module."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    text = getattr(source, "name", None)
    text = text() if callable(text) else text
    is_parameter = isinstance(value, torch.nn.Parameter)
    place = _parsed(text, _is_free(source), is_parameter) if text else None
    if place is None and is_parameter:
        return _Place(node.name, node.name, "", False, True)
    return place


def _is_free(source: Any) -> bool:
    """Whether a source starts at a variable that the function closes over."""
    while getattr(source, "base", None) is not None:
        source = source.base
    return bool(getattr(source, "is_derefed_cell_contents", False))


def _parsed(text: str, free: bool, is_parameter: bool) -> _Place | None:
    """ "layers.0.weight" below "L['self']", of "L['self']._modules['layers']._modules['0']._parameters['weight']"."""
    start = _ROOT.match(text)
    steps = list(_STEP.finditer(text, start.end())) if start else []
    if start is None or "".join(step.group() for step in steps) != text[start.end() :]:
        return None
    first = next((i for i, step in enumerate(steps) if step.group(1)), len(steps))
    kinds = [step.group(1) for step in steps[first:]]
    if kinds and kinds[-1] == "_parameters":
        is_parameter = True
    elif steps and steps[-1].group(3) == "_local_tensor" and "_parameters" in kinds:  # a shard of a DTensor
        steps, is_parameter = steps[:-1], True
    elif not is_parameter and (not kinds or kinds[-1] != "_buffers"):
        return None
    variable = start.group(2)
    # `fn` is what Dynamo's own wrapper calls torch's modules and other callables that it is given.
    free = (free or start.group(1) == "G") and variable != "fn" and not variable.startswith("__import_")
    inner = [_name(step) for step in steps[:first] if not _CARRIERS.fullmatch(_name(step))]
    passed = variable == "args" or (steps[0].group(3) in ("args", "keywords") if steps else False)
    below = clean_name(".".join(_name(step) for step in steps[first:]))
    root = text[: steps[first].start()] if first < len(steps) else text
    attribute = bool(inner) and steps[0].group(3) is not None and not free and not passed  # of `self`, say
    label = ".".join(inner if attribute else ["args" if passed else variable, *inner])
    if not below:
        return _Place(root, label, "", False, True)
    # A layer that a function closes over, or one in a list, has no name but that of its place. A model that it closes
    # over, alone or as an attribute of something, or takes as an argument, is left unnamed.
    listed = any(step.group(4) or step.group(5) for step in steps[:first])
    always = not passed and (listed or ((free or bool(inner)) and below in ("weight", "bias")))
    return _Place(root, below, label, always, is_parameter)


def _name(step: re.Match) -> str:
    return step.group(2) or step.group(3) or step.group(4) or step.group(5)


def _names(places: Sequence[_Place | None]) -> list[str | None]:
    """The names that rules see. Two roots with a name in common are told apart by the names of their variables."""
    ambiguous = {root for roots in _roots([place and place.path for place in places], places).values()
                 if len(roots) > 1 for root in roots}  # fmt: skip
    names = [None if place is None else _prefixed(place, ambiguous) for place in places]
    roots = _roots(names, places)  # still the same for two variables of one name: a function's and its module's
    return [
        name if place is None or len(roots[name]) == 1 else f"{name}#{roots[name].index(place.root)}"
        for name, place in zip(names, places, strict=True)
    ]


def _roots(names: list[str | None], places: Sequence[_Place | None]) -> dict[str, list[str]]:
    """The roots that have each name, in order."""
    found: dict[str, list[str]] = {}
    for name, place in zip(names, places, strict=True):
        if place is not None and place.root not in found.setdefault(name, []):
            found[name].append(place.root)
    return found


def _prefixed(place: _Place, ambiguous: set[str]) -> str:
    if place.label and (place.always or place.root in ambiguous):
        return f"{place.label}.{place.path}"
    return place.path
