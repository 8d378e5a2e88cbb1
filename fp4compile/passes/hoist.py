"""Take the quantising of weights out of inference graphs, and of frozen weights out of training graphs.

A graph would quantise its parameters again at each call, although most of them rarely change. `hoisting` wraps
Inductor's `inner_compile`. Every quantise that depends on one such parameter and nothing else leaves the graph, and its
results become additional static inputs. The compiled function is called with the packed weights from `weights.cache`.

Graphs that are compiled under torch.distributed stay as they are: FSDP refills a parameter's storage without a change
of its version counter.
"""

import logging
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp4compile.analysis.find import parameters_of
from fp4compile.analysis.gemm import Input
from fp4compile.analysis.graph import quantise_of
from fp4compile.analysis.views import view_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.base import Pass, run_passes, summary
from fp4compile.report.report import PassRun
from fp4compile.weights.cache import Form, Piece, changes_are_seen, form, packed_weight

log = logging.getLogger("fp4compile")


@dataclass(frozen=True)
class Recipient:
    """The replacement of a quantise that left the graph.

    index: position of the parameter among the graph's inputs. name: the parameter's name. form: its packed form.
    """

    index: int
    name: str
    form: Form


@dataclass(frozen=True)
class Hoisted:
    """What `hoist` takes out of one graph.

    recipients: one for each quantise. examples: fake values of the new inputs, in order: data, scales and outer scale.
    """

    recipients: list[Recipient] = field(default_factory=list)
    examples: list[torch.Tensor] = field(default_factory=list)


def hoisting(
    inner_compile: Callable,
    inputs: tuple[Input, ...],
    cache: str = "on",
    *,
    sink: Callable[[dict[str, PassRun]], None] = lambda runs: None,
    disabled: Collection[str] = (),
) -> Callable:
    """An `inner_compile` that takes the quantising of lasting weights out of graphs, see above.

    inputs: one entry for each argument of the compiled function. cache: the recipe's `weight_cache`; "off" leaves all
    graphs as they are, "check" compares the weights' contents at each call. sink: takes the pass's run for each
    graph with such weights. disabled: names of the passes that are switched off.
    """
    if cache == "off" or HOIST.name in disabled:
        return inner_compile

    def compile_hoisted(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        lasting = inputs
        if not kwargs.get("is_inference"):
            # A weight that an optimiser changes at every step is quantised in the graph of the step.
            lasting = tuple(one if one.frozen else Input() for one in inputs)
        if not any(one.parameter for one in lasting) or not changes_are_seen():
            return inner_compile(gm, example_inputs, **kwargs)
        hoisted = Hoisted()
        runs = run_passes([HOIST], gm.graph, lasting, hoisted)
        gm.recompile()
        log.info("graph with lasting weights: %s", summary(runs))
        sink(runs)
        if not hoisted.recipients:
            return inner_compile(gm, example_inputs, **kwargs)
        count = len(example_inputs)
        # Packed weights stay at their addresses from call to call, as parameters do.
        static = [*(kwargs.get("static_input_idxs") or ()), *range(count, count + len(hoisted.examples))]
        values = [*example_inputs, *hoisted.examples]
        compiled = inner_compile(gm, values, **{**kwargs, "static_input_idxs": static})
        return _with_packed(compiled, hoisted.recipients, cache == "check")

    return compile_hoisted


def hoist(graph: Graph, inputs: tuple[Input, ...], hoisted: Hoisted) -> int:
    """Replace every quantise of a parameter, or of a view or a cast of one, by new placeholders after the inputs.

    hoisted: filled with the quantises that leave the graph. Returns their number.
    """
    placeholders = graph.find_nodes(op="placeholder")
    parameters = parameters_of(graph, inputs)
    last = placeholders[-1] if placeholders else None
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        quantise = quantise_of(node)
        root, (dim, *others) = view_of(quantise.x).root, quantise.dims
        hoistable = not others and not node.kwargs.keys() - {"layout", "scale_rule", "each_matrix"}
        if root not in parameters or not hoistable or not _fixed(quantise.x):
            continue
        packed_as = form(
            quantise.format, dim, piece=_piece(quantise.x), grouped=quantise.each_matrix, layout=quantise.layout,
            scale_rule=quantise.scale_rule,
        )  # fmt: skip
        hoisted.recipients.append(Recipient(placeholders.index(root), parameters[root], packed_as))
        for index, value in enumerate(node.meta["val"]):
            with graph.inserting_after(last):
                last = graph.placeholder(f"packed_{len(hoisted.examples)}")
            last.meta["val"] = value
            hoisted.examples.append(value)
            _redirect(node, index, last)
        graph.erase_node(node)
    return len(hoisted.recipients)


HOIST = Pass("hoist", hoist)


def _fixed(source: Node) -> bool:
    """Whether a view of a parameter has no symbolic size, stride or offset."""
    view = view_of(source)
    return all(isinstance(size, int) for size in (*view.size, *view.stride, view.offset))


def _piece(source: Node) -> Piece | None:
    """A node as a piece of its parameter; None if the node is the parameter itself."""
    view = view_of(source)
    return None if view.root is source else Piece(view.size, view.stride, view.offset, view.casts)


def _redirect(quantize: Node, index: int, replacement: Node) -> None:
    """Let the users of one result of a quantise read the replacement."""
    for user in list(quantize.users):
        if user.target is operator.getitem and user.args[1] == index:
            user.replace_all_uses_with(replacement)
            user.graph.erase_node(user)


def _with_packed(compiled: Callable, recipients: list[Recipient], check: bool) -> Callable:
    """The compiled function, called with the packed weights after its own arguments."""
    wanted = [(r.index, r.form, r.name if check else None) for r in recipients]

    def call(args: list) -> Any:
        values = [*args]
        for index, packed_as, name in wanted:
            values += packed_weight(args[index], packed_as, name)
        args.clear()
        return compiled(values)

    call._boxed_call = True
    return call
