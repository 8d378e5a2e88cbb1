"""Find a recipe's rules that match no layer's name, when the first graph of a model is compiled.

One graph may be a part of the model, so its matmuls do not show that a rule is unused. A rule that matches no layer's
name of the whole model is unused in every graph.
"""

import re
from collections.abc import Iterator

from torch import nn

from fp4compile.analysis.module_names import block_of, module_name, named_tensors, parameter_name
from fp4compile.recipe.rules import Rule
from fp4compile.report.names import Names


def without_layer(rules: tuple[Rule, ...], known: Names) -> tuple[Rule, ...] | None:
    """The rules that match no name which a graph may have for a layer of the model.

    known: the names of a graph of the model. Returns None where they do not show how graphs name layers: without
    parameters, and where a parameter is named after a variable.
    """
    if known.root is None:
        return None
    names = {name[start:] for name in _layers(known.root) for start in _starts(name)}
    parameters = [entry.parameter for entry in known.inputs if entry.parameter is not None]
    if not parameters or not names.issuperset(map(module_name, parameters)):
        return None
    return tuple(rule for rule in rules if rule.pattern not in names and not any(map(rule.matches, names)))


def out_of_reach(rules: tuple[Rule, ...], known: Names) -> tuple[Rule, ...]:
    """The rules that decide about no matmul because a block is compiled by itself and they match full names alone.

    known: the names of a graph. The graph of a block "layers.3" has the names below it, as "mlp.up": a rule "mlp*"
    matches them, a rule "layers.*" does not, in this block and in the others of its list. Without a numbered block
    above the graph's names, no rule is out of reach.
    """
    place = block_of(known.prefix.rstrip("."))
    if known.root is None or place is None:
        return ()
    blocks = re.compile(re.escape(place[0]) + r"\.\d+\." if place[0] else r"\d+\.")
    reached: set[str] = set()
    above: set[str] = set()
    for name in _layers(known.root):
        number = blocks.match(name)
        for start in _starts(name):
            (above if number and start < number.end() else reached).add(name[start:])
    return tuple(rule for rule in rules if any(map(rule.matches, above)) and not any(map(rule.matches, reached)))


def _layers(model: nn.Module) -> Iterator[str]:
    """The full names of the modules and parameters that may be layers, packed ones too."""
    for named, tensor in named_tensors(model, buffers=True):
        if isinstance(tensor, nn.Parameter):
            yield module_name(named.name)
        else:
            yield parameter_name(named.name.rpartition(".")[0])


def _starts(name: str) -> Iterator[int]:
    """The positions in a layer's path at which names start in graphs of each enclosing module compiled by itself."""
    yield 0
    yield from (place + 1 for place, letter in enumerate(name) if letter == ".")
