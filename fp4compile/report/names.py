"""Names of a Dynamo graph's inputs: one for the recipe's rules, and a full name for the report.

Entry: `record(gm, example_inputs, root)`.

Rules match the name below the module whose `forward` was captured, which comes from Dynamo's source of the parameter.
It cannot be the full name, because Dynamo lets equal modules of a model share one graph.

The full name is found by identity: a module on the call stack holds the input tensor under that name.
"""

import ast
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from fp4compile.analysis.gemm import Input, Shard
from fp4compile.analysis.module_names import (
    ADAPTER,
    REBOUND,
    Named,
    block_of,
    clean_name,
    module_name,
    named_tensors,
    walk,
)
from fp4compile.analysis.plan import named_as_head
from fp4compile.report.report import Row, is_below

_ROOT = re.compile(r"([LG])\['([^']+)'\]")
# Dynamo's spelling of the same step in a module whose forward sets attributes of the module.
_DICT_STEP = re.compile(r"\.__dict__\['(_modules|_parameters|_buffers)'\]")
_KEY = r"""('(?:[^'\\]|\\.)+'|"(?:[^"\\]|\\.)+")"""  # as `repr` writes it
_STEP = re.compile(rf"\.(_modules|_parameters|_buffers)\[{_KEY}\]|\.(\w+)|\[{_KEY}\]|\[(\d+)\]")
# Attributes through which Python and functools.partial hold the objects of a function.
_CARRIERS = re.compile(r"__\w+__|cell_contents|args|keywords|func")


@dataclass(frozen=True)
class Names:
    """The names of a graph's inputs and modules.

    inputs: the inputs by position, with the names of parameters.
    names: by position, the name of each input that a module holds, parameter or not; None for other inputs.
    modules: the full name of each layer whose name in the graph is shorter.
    prefix: the prefix that turns names in the graph into full names; "" where it is unknown.
    root: the outermost module that was being called; None where there is none.
    partial: whether the root holds matrices that are no inputs of the graph.
    """

    inputs: tuple[Input, ...]
    names: tuple[str | None, ...] = ()
    modules: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    root: torch.nn.Module | None = None
    partial: bool = False

    def entered_by(self, values: Sequence[Any], root: torch.nn.Module | None = None) -> "Names":
        """These names, with full names for the part of the model that runs the graph now.

        values: the graph's inputs in this run. root: the model; None searches the call stack.
        """
        inside = [(name, value) for name, value in zip(self.names, values, strict=True)
                  if name is not None and isinstance(value, torch.Tensor)]  # fmt: skip
        stack = _stack(root)
        full: dict[str, str] = {}
        adapters: set[str] = set()
        owner = None
        for module in stack:
            if len(full) == len(inside):
                break
            known = _tensors_of(module)
            for name, value in inside:
                if name not in full and id(value) in known:
                    found = known[id(value)]  # of a shared tensor several; one may end in the graph's name for it
                    named = next((one for one in found if is_below(name, one.name)), found[0])
                    full[name] = named.name
                    adapters |= {name} if named.part == ADAPTER else set()
                    owner = owner or module
        prefixes = {path.removesuffix(name) for name, path in full.items() if is_below(name, path)}
        if not full and stack:  # no tensor identifies the module: take the innermost one that is being called
            prefixes = {_path_of(stack[-1], stack)}
        inputs = tuple(
            entry
            if entry.parameter is None
            else replace(
                entry,
                in_block=block_of(full.get(entry.parameter, "")) is not None,
                adapter=entry.parameter in adapters,
                head=not module_name(entry.parameter) and _is_head(module_name(full.get(entry.parameter, ""))),
            )
            for entry in self.inputs
        )
        modules = {module_name(name): module_name(path) for name, path in full.items() if name != path}
        prefix = prefixes.pop() if len(prefixes) == 1 else ""
        return Names(inputs, self.names, modules, prefix, owner or next(iter(stack), None))

    def in_full(self, rows: list[Row]) -> list[Row]:
        """The rows with the full names of their layers as `module`; `Row.name` keeps the name that rules match."""
        named = [(row, self.full(row.module)) for row in rows]
        return [row if full == row.module else replace(row, module=full, name=row.module) for row, full in named]

    def full(self, module: str) -> str:
        """The full name of a layer. module: the name that rules match."""
        return self.modules.get(module, (self.prefix + module).removesuffix("."))


@dataclass(frozen=True)
class _Origin:
    """Dynamo's source of an input.

    root: the expression of an object. path: the own name of the input below that object, through modules; real: this
    name with the segments of wrappers.
    label: the name of the variable that holds the object. always: whether the input's name has the label even if there
    is only one root. parameter: whether the input is a parameter.
    """

    root: str
    path: str
    label: str
    always: bool
    parameter: bool
    real: str = ""


def record(gm: GraphModule, example_inputs: Sequence[Any], root: torch.nn.Module | None = None) -> Names:
    """The parameters among the inputs of a Dynamo graph, and the inputs' names.

    root: the model; None searches the call stack, which has the user's call of the model while Dynamo calls the
    backend.
    """
    nodes = gm.graph.find_nodes(op="placeholder")
    values = [_example(node, value) for node, value in zip(nodes, example_inputs, strict=True)]
    places = [_place(node, value) for node, value in zip(nodes, values, strict=True)]
    names = _names(_by_real_modules(places, values, _stack(root)))
    inputs = tuple(
        Input(
            name if place is not None and place.parameter else None,
            frozen=not getattr(value, "requires_grad", False),
            shards=_shards(value),
            buffer=place is not None and not place.parameter,
        )
        for name, place, value in zip(names, places, values, strict=True)
    )
    known = Names(inputs, tuple(names)).entered_by(values, root)
    return replace(known, partial=_holds_others(known.root, values))


def _holds_others(module: torch.nn.Module | None, values: Sequence[Any]) -> bool:
    """Whether a module holds matrices, as parameters or buffers, that are not among the values."""
    if module is None:
        return False
    read = set(map(id, values))
    others = (tensor for _, tensor in named_tensors(module, buffers=True) if id(tensor) not in read)
    return any(is_lazy(tensor) or tensor.dim() > 1 for tensor in others)


def _shards(value: Any) -> tuple[Shard, ...]:
    """The shards of a DTensor. Placements of other kinds than `Shard` are ignored."""
    placements, mesh = getattr(value, "placements", ()), getattr(value, "device_mesh", None)
    if (
        mesh is None
        or mesh.get_coordinate() is None
        or not all(each.is_shard() or each.is_replicate() for each in placements)
    ):
        return ()
    groups = ((each, mesh.get_group(i)) for i, each in enumerate(placements) if each.is_shard())
    return tuple(
        Shard(each.dim % value.dim(), value.shape[each.dim], group.group_name, group.size()) for each, group in groups
    )


def _by_real_modules(
    places: Sequence[_Origin | None], values: Sequence[Any], stack: list[torch.nn.Module]
) -> list[_Origin | None]:
    """The places, with own names by the classes of the real modules, not by the text alone."""
    found = list(places)
    left = {i for i, place in enumerate(found) if place is not None and place.real}
    for module in stack:
        known = _tensors_of(module) if left else {}
        for i in list(left):
            place = found[i]
            for named in known.get(id(values[i]), ()):
                if place is not None and is_below(place.real, named.path):
                    found[i] = replace(place, path=named.below(place.real))
                    left.discard(i)
                    break
    return found


def _is_head(layer: str) -> bool:
    """Whether a layer is an output head by its name in the model."""
    return block_of(layer) is None and named_as_head(layer)


def _tensors_of(module: torch.nn.Module) -> dict[int, list[Named]]:
    """The names of a module's parameters and buffers, by the tensor's id."""
    found: dict[int, list[Named]] = {}
    for named, value in named_tensors(module, buffers=True):
        found.setdefault(id(value), []).append(named)
    return found


def _path_of(inner: torch.nn.Module, stack: list[torch.nn.Module]) -> str:
    """The name of a module in the outermost module that has it, followed by a dot; "" for the outermost itself."""
    for module in stack:
        for named, part in walk(module):
            if part is inner:
                return f"{named.name}." if named.name else ""
    return ""


# ---------------------------------------------------------------- the call stack


def _stack(root: torch.nn.Module | None) -> list[torch.nn.Module]:
    """The modules that may hold a graph's inputs: the model, if it is known, and the modules being called."""
    return [*([] if root is None else [unwrapped(root)]), *_modules_on_stack()]


def _modules_on_stack() -> list[torch.nn.Module]:
    """The modules whose methods are running, each once, the outermost first."""
    found: dict[int, torch.nn.Module] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        module = _self_of(frame)
        if isinstance(module, torch.nn.Module):
            module = unwrapped(module)
            found[id(module)] = found.pop(id(module), module)  # moved to the end: the position of its outermost call
        frame = frame.f_back
    return list(found.values())[::-1]


def _self_of(frame: FrameType) -> Any:
    """The `self` of the method that a frame runs; None where the frame runs no method."""
    code = frame.f_code
    if not code.co_argcount or code.co_varnames[0] != "self":
        return None
    values = frame.f_locals
    found = values.get("self")
    # Up to Python 3.12 `f_locals` is a copy that the frame keeps alive, with every tensor in it: empty it.
    if isinstance(values, dict):
        values.clear()
    return found


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
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
    """The tensor that the user's model holds; Dynamo's example input may be a fake tensor instead."""
    example = getattr(node.meta.get("grapharg"), "example", None)
    return value if example is None else example


def _place(node: Node, value: Any) -> _Origin | None:
    """Dynamo's source of an input; None for an input that is not a parameter and that no module holds."""
    # Dynamo drops `grapharg` from graphs that it is going to store (`aot_compile`).
    source = getattr(node.meta.get("grapharg"), "source", getattr(node, "_dynamo_source", None))
    text = getattr(source, "name", None)
    text = text() if callable(text) else text
    is_parameter = isinstance(value, torch.nn.Parameter)
    place = _parsed(text, _is_free(source), is_parameter) if text else None
    if place is None and is_parameter:
        return _Origin(node.name, node.name, "", False, True)
    return place


def _is_free(source: Any) -> bool:
    """Whether a source starts at a variable of the function's closure."""
    while getattr(source, "base", None) is not None:
        source = source.base
    return bool(getattr(source, "is_derefed_cell_contents", False))


def _parsed(text: str, free: bool, is_parameter: bool) -> _Origin | None:
    """The place that a source's text names; None where the text has another form, or names no tensor of a module.

    "L['self']._modules['layers']._modules['0']._parameters['weight']" names "layers.0.weight" below "L['self']".
    """
    text = _DICT_STEP.sub(r".\1", REBOUND.sub("", text))
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
    # Dynamo's own wrapper has the variable `fn` for a module of torch's, or for a callable that is no function.
    free = (free or start.group(1) == "G") and variable != "fn" and not variable.startswith("__import_")
    inner = [_name(step) for step in steps[:first] if not _CARRIERS.fullmatch(_name(step))]
    passed = variable == "args" or (steps[0].group(3) in ("args", "keywords") if steps else False)
    real = ".".join(_name(step) for step in steps[first:])
    below = clean_name(real)
    root = text[: steps[first].start()] if first < len(steps) else text
    attribute = bool(inner) and steps[0].group(3) is not None and not free and not passed  # such as of `self`
    label = ".".join(inner if attribute else ["args" if passed else variable, *inner])
    if not below:
        return _Origin(root, label, "", False, True)
    # A layer in a list, or a single layer in a function's closure, is named only by its variable. A whole model in the
    # closure, and a model that is an argument, needs no such label: its layers have names.
    cells = {i + 1 for i, step in enumerate(steps) if step.group(3) == "__closure__"}  # no lists of the user's
    listed = any((step.group(4) or step.group(5)) and i not in cells for i, step in enumerate(steps[:first]))
    always = not passed and (listed or ((free or bool(inner)) and below in ("weight", "bias")))
    return _Origin(root, below, label, always, is_parameter, real)


def _name(step: re.Match) -> str:
    key = step.group(2) or step.group(4)
    return ast.literal_eval(key) if key else step.group(3) or step.group(5)


def _names(places: Sequence[_Origin | None]) -> list[str | None]:
    """The names that rules match. Inputs with one name below two roots are prefixed by the roots' variables."""
    paths = [None if place is None else place.path for place in places]
    ambiguous = {root for roots in _roots(paths, places).values() if len(roots) > 1 for root in roots}
    names = [None if place is None else _prefixed(place, ambiguous) for place in places]
    roots = _roots(names, places)  # a function's and its module's variables may have the same name
    return [
        name if name is None or place is None or len(roots[name]) == 1 else f"{name}#{roots[name].index(place.root)}"
        for name, place in zip(names, places, strict=True)
    ]


def _roots(names: list[str | None], places: Sequence[_Origin | None]) -> dict[str, list[str]]:
    """The roots below which each name occurs, in the order of the inputs."""
    found: dict[str, list[str]] = {}
    for name, place in zip(names, places, strict=True):
        if name is not None and place is not None and place.root not in found.setdefault(name, []):
            found[name].append(place.root)
    return found


def _prefixed(place: _Origin, ambiguous: set[str]) -> str:
    """The path of a place, after the label where the name has it."""
    if place.label and (place.always or place.root in ambiguous):
        return f"{place.label}.{place.path}"
    return place.path
