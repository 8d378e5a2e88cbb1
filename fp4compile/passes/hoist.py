"""Take the quantising of weights out of inference graphs.

An inference graph would quantise its parameters anew at each call, although they rarely change. `hoisting` wraps
Inductor's `inner_compile`: every quantise that depends on nothing but one parameter leaves the graph, its results
become further static inputs, and the compiled function is called with the packed weights that `weight_cache` keeps.

Not under torch.distributed: FSDP fills a parameter's storage anew and keeps its version counter.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.fx import GraphModule, Node

from fp4compile.passes.find import Input, parameters_of
from fp4compile.passes.views import view_of
from fp4compile.weight_cache import QUANTIZE, Form, Piece, form, packed_weight, watch_optimizers


@dataclass(frozen=True)
class Recipient:
    """A quantise that left the graph: of which input, the parameter's name, and what it is packed as."""

    index: int
    name: str
    form: Form


def hoisting(inner_compile: Callable, inputs: tuple[Input, ...], cache: str = "on") -> Callable:
    """An `inner_compile` that takes the quantising of weights out of inference graphs.

    cache: the recipe's `weight_cache`. "off" leaves all graphs as they are, "check" compares contents at each call.
    """
    if cache == "off":
        return inner_compile

    def compile_hoisted(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        if not kwargs.get("is_inference") or _distributed():
            return inner_compile(gm, example_inputs, **kwargs)
        recipients, examples = hoist(gm, inputs)
        if not recipients:
            return inner_compile(gm, example_inputs, **kwargs)
        watch_optimizers()
        count = len(example_inputs)
        # Packed weights stay where they are from call to call, as parameters do.
        static = [*(kwargs.get("static_input_idxs") or ()), *range(count, count + len(examples))]
        compiled = inner_compile(gm, [*example_inputs, *examples], **{**kwargs, "static_input_idxs": static})
        return _with_packed(compiled, recipients, cache == "check")

    return compile_hoisted


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def hoist(gm: GraphModule, inputs: tuple[Input, ...]) -> tuple[list[Recipient], list[torch.Tensor]]:
    """Replace every quantise of a parameter, or of a piece or a cast of one, by new placeholders behind the inputs.

    Returns what was taken out, and example values of the three new inputs (data, scales, outer scale) of each.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    parameters = parameters_of(gm.graph, inputs)
    recipients, examples, last = [], [], placeholders[-1] if placeholders else None
    for node in gm.graph.find_nodes(op="call_function", target=QUANTIZE):
        source, fmt, *dim = node.args
        root = view_of(source).root
        if root not in parameters or node.kwargs.keys() - {"layout"} or not _fixed(source):
            continue
        packed_as = form(fmt, dim[0] if dim else -1, node.kwargs.get("layout", "linear"), _piece(source))
        recipients.append(Recipient(placeholders.index(root), parameters[root], packed_as))
        for index, value in enumerate(node.meta["val"]):
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"packed_{len(examples)}")
            last.meta["val"] = value
            examples.append(value)
            _redirect(node, index, last)
        gm.graph.erase_node(node)
    gm.recompile()
    return recipients, examples


def _fixed(source: Node) -> bool:
    """Whether no size is symbolic."""
    view = view_of(source)
    return all(isinstance(size, int) for size in (*view.size, *view.stride, view.offset))


def _piece(source: Node) -> Piece | None:
    """What of its parameter a node is; None for all of it as it is."""
    view = view_of(source)
    return None if view.root is source else Piece(view.size, view.stride, view.offset, view.casts)


def _redirect(quantize: Node, index: int, replacement: Node) -> None:
    for user in list(quantize.users):
        if user.target is operator.getitem and user.args[1] == index:
            user.replace_all_uses_with(replacement)
            user.graph.erase_node(user)


def _with_packed(compiled: Callable, recipients: list[Recipient], check: bool) -> Callable:
    wanted = [(r.index, r.form, r.name if check else None) for r in recipients]

    def call(args: list) -> Any:
        values = [*args]
        for index, packed_as, name in wanted:
            values += packed_weight(args[index], packed_as, name)
        args.clear()
        return compiled(values)

    call._boxed_call = True
    return call
