"""Move quantisers of weights out of inference graphs, and of frozen weights out of training graphs.

A graph would quantise its parameters again at each call, although most of them rarely change. `hoisting` wraps
Inductor's `inner_compile`. Every quantise that depends on such a parameter alone is removed from the graph, and its
results become additional static inputs. The compiled function is called with the packed weights from `weights.cache`.

Two weights from whose matmuls a kernel computes one result, gate and up, are stacked. That holds for packed layers as
well, whose tensors are already inputs of the graph.

Graphs that are compiled under torch.distributed are not changed, except in inference under the recipe's
`weight_cache="always"`: FSDP refills a parameter's storage without a change of its version counter. Graphs that torch
stores in a file are not changed: packed weights are passed by a function of this process.
"""

import functools
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from fp4compile._compat import stores_graphs
from fp4compile.analysis.find import parameters_of
from fp4compile.analysis.gemm import Input
from fp4compile.analysis.views import view_of
from fp4compile.formats.epilogue import AMAX, Epilogue, serves_quantize
from fp4compile.formats.grouping import Grouping
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import ScaledMM, quantise_of, replace_results, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fuse_quantize import partner_of
from fp4compile.passes.lib.base import run_passes, summary
from fp4compile.passes.lib.equal_quantises import share
from fp4compile.passes.lib.notes import note_joined
from fp4compile.report.report import PassRun
from fp4compile.templates.choose import Choice, quantized
from fp4compile.weights.cache import Form, Piece, form, joined_parts, packed_pair, packed_weight
from fp4compile.weights.writes import changes_are_seen, in_group

log = logging.getLogger("fp4compile")


# The replacement of a quantise that was removed from the graph: the parameter's position among the graph's inputs, and
# its packed form.
Recipient = tuple[int, Form]


@dataclass(frozen=True)
class Hoisted:
    """The quantises that `hoist` removes from one graph.

    recipients: one for each quantise. pairs: two recipients whose codes are also stacked. packed: two packed weights
    that are stacked: for data, scales and any global scales, the positions of both weights' tensors among the graph's
    inputs, and the dtype in which the graph views them. examples: fake values of the new inputs, in order: data, scales
    and global or row scale of each recipient, then data, scales and any global scales of each pair and of each two
    packed weights. promised: whether the user promises to call `refresh` after undetected writes, see `Form`.
    """

    recipients: list[Recipient] = field(default_factory=list)
    pairs: list[tuple[Recipient, Recipient]] = field(default_factory=list)
    packed: list[tuple[tuple[int, int, torch.dtype], ...]] = field(default_factory=list)
    examples: list[torch.Tensor] = field(default_factory=list)
    promised: bool = False


def hoisting(
    inner_compile: Callable,
    inputs: tuple[Input, ...],
    cache: str = "on",
    *,
    sink: Callable[[dict[str, PassRun]], None] = lambda runs: None,
    disabled: Collection[str] = (),
) -> Callable:
    """An `inner_compile` that moves quantisers of unchanging weights out of graphs, see above.

    inputs: one entry for each argument of the compiled function. cache: the recipe's `weight_cache`; "off" changes no
    graph, "always" is the user's promise of `Form`. sink: takes the pass's run for each graph with such weights.
    disabled: names of the passes that are switched off.
    """
    if cache == "off" or "hoist" in disabled or stores_graphs():
        return inner_compile

    def compile_hoisted(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        lasting, inference = inputs, bool(kwargs.get("is_inference"))
        if not inference:
            # A weight that an optimiser changes at every step is quantised in the graph of the step.
            lasting = tuple(one if one.frozen else Input() for one in inputs)
        static = frozenset(kwargs.get("static_input_idxs") or ()) if inference else frozenset()
        # In a process group every step refreshes all weights, frozen ones too.
        hoisted = Hoisted(promised=cache == "always" and inference)
        kept = changes_are_seen() or hoisted.promised
        if not (kept and (static or any(one.parameter for one in lasting))):
            if inference and in_group() and any(_forms(gm.graph, lasting, promised=False)):
                _tell_of_groups()
            return inner_compile(gm, example_inputs, **kwargs)
        runs = run_passes([hoist], gm.graph, lasting, hoisted, static)
        gm.recompile()
        log.info("graph with lasting weights: %s", summary(runs))
        sink(runs)
        if not hoisted.examples:
            return inner_compile(gm, example_inputs, **kwargs)
        count = len(example_inputs)
        # Packed weights stay at their addresses from call to call, as parameters do.
        places = [*(kwargs.get("static_input_idxs") or ()), *range(count, count + len(hoisted.examples))]
        values = [*example_inputs, *hoisted.examples]
        compiled = inner_compile(gm, values, **{**kwargs, "static_input_idxs": places})
        return _with_packed(compiled, hoisted)

    return compile_hoisted


def hoist(graph: Graph, inputs: tuple[Input, ...], hoisted: Hoisted, static: Collection[int] = frozenset()) -> int:
    """Replace every quantise of a parameter, or of a view or a cast of one, by new placeholders after the inputs.

    hoisted: filled with the removed quantises. static: positions of inputs that are the same tensors at every call.
    Returns the number of quantises.
    """
    partners = _partners(graph)
    recipients: dict[Node, Recipient] = {}
    placeholders = graph.find_nodes(op="placeholder")
    last = placeholders[-1] if placeholders else None
    for node, root, packed_as in list(_forms(graph, inputs, hoisted.promised)):
        hoisted.recipients.append((placeholders.index(root), packed_as))
        results = []
        for value in node.meta["val"]:
            last = _new_input(graph, last, value, hoisted)
            results.append(last)
        recipients[results[0]] = hoisted.recipients[-1]
        replace_results(node, results)
    places = {placeholders[place]: place for place in static}
    # Hoisted weights come first, as in `Hoisted.examples`.
    for product, other in sorted(partners, key=lambda two: _input_of(scaled_mm_of(two[0]).b.data) in places):
        last = _join(graph, product, other, recipients, places, last, hoisted)
    return len(hoisted.recipients)


def _forms(graph: Graph, inputs: tuple[Input, ...], promised: bool) -> Iterator[tuple[Node, Node, Form]]:
    """Each quantise of a parameter, or of a view or a cast of one; the parameter; and the form that it packs.

    promised: see `Form`.
    """
    parameters = parameters_of(graph, inputs)
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        quantise = quantise_of(node)
        view, (dim, *others) = view_of(quantise.x), quantise.dims
        hoistable = not others and not node.kwargs.keys() - {"layout", "scale_rule", "each_matrix"}
        known = all(isinstance(size, int) for size in (*view.size, *view.stride, view.offset))
        if view.root not in parameters or not hoistable or not known:
            continue
        piece = None if view.root is quantise.x else Piece(view.size, view.stride, view.offset, view.casts)
        yield node, view.root, form(
            quantise.format, dim, piece=piece, grouped=quantise.each_matrix, layout=quantise.layout,
            scale_rule=quantise.scale_rule, promised=promised,
        )  # fmt: skip


@functools.cache
def _tell_of_groups() -> None:
    """Log, once in a process, that weights are quantised at every call."""
    log.warning(
        "torch.distributed has a process group: inference quantises weights at every call, because collectives write "
        "to them unseen. Under a recipe with weight_cache='always' it quantises them once; then call "
        "fp4compile.refresh(model) after a collective wrote to a weight"
    )


def _partners(graph: Graph) -> list[tuple[Node, Node]]:
    """Pairs of matmuls from which a kernel can compute one result, see `fuse_quantize`."""
    products = list(filter(_may_have_partner, graph.find_nodes(op="call_function", target=SCALED_MM)))
    if products:
        share(graph)  # each packed layer quantises its input separately
    found = []
    for product in products:
        own, other = scaled_mm_of(product), partner_of(product)
        if other is not None and all(map(_joinable, (own, scaled_mm_of(other)))) and _pays(own):
            found.append((product, other))
    return found


def _may_have_partner(product: Node) -> bool:
    own = scaled_mm_of(product)
    known = not own.spec.plain and own.alone and own.on_gpu
    return known and own.spec.grouping in (Grouping.DENSE, Grouping.RAGGED_ROWS) and 100 <= own.problem.target.sm < 120


def _pays(product: ScaledMM) -> bool:
    """Whether a kernel of two such matmuls pays that quantises its result to A's format, or finds the amax for that."""
    fmt = product.a.format
    if not serves_quantize(fmt):
        return False
    dtype = product.spec.out_dtype
    computed = product.a.outer is not None and product.a.outer.target is operator.getitem  # a result of the quantiser
    end = AMAX if fmt.outer == "tensor" and computed else f"quantize {fmt.name}"
    return isinstance(quantized(product.problem, Epilogue.parse(["mul product pair", end], dtype, dtype), 2), Choice)


def _joinable(product: ScaledMM) -> bool:
    """Whether B is quantised in the graph or packed, without row scales, with swizzled block scales.

    Global scales of groups must be a multiple of 16 bytes: those of the other weight follow (`cache.joined_parts`).
    """
    p = product.problem
    known = product.b.data.target is operator.getitem or _input_of(product.b.data).op == "placeholder"
    fits = p.b.outer == "none" or (not p.ragged if p.b.outer == "tensor" else p.b.outer == "group" and p.groups > 3)
    return known and p.b.swizzled and fits


def _input_of(node: Node) -> Node:
    """The graph's input that a node views in another dtype, as packed layers view their bytes; another node itself."""
    return node.args[0] if node.target is torch.ops.aten.view.dtype else node


def _join(
    graph: Graph,
    product: Node,
    other: Node,
    recipients: dict[Node, Recipient],
    places: dict[Node, int],
    last: Node | None,
    hoisted: Hoisted,
) -> Node | None:
    """Add inputs for data, scales and global scales of two stacked weights; returns the last input.

    product, other: the matmuls of the weights. recipients: of the inputs that have the data of hoisted weights.
    places: of the inputs that are tensors of packed layers. last: the last input so far.
    """
    parts = [(one.data, one.scales, one.outer) for one in (scaled_mm_of(product).b, scaled_mm_of(other).b)]
    first, second = ([part for part in each if part is not None] for each in parts)
    if _input_of(first[0]) is _input_of(second[0]):
        return last
    if first[0] in recipients and second[0] in recipients:
        one, two = recipients[first[0]], recipients[second[0]]
        if one[1] is not two[1]:
            return last
        hoisted.pairs.append((one, two))
    elif all(_input_of(part) in places for part in (*first, *second)):
        hoisted.packed.append(tuple((places[_input_of(part)], places[_input_of(match)], part.meta["val"].dtype)
                                    for part, match in zip(first, second, strict=True)))  # fmt: skip
    else:
        return last
    joined = []
    for node in first:
        value = node.meta["val"]
        both = (
            value.new_empty((2 * value.shape[0], *value.shape[1:]))
            if value.dim()
            else value.new_empty_strided((2,), (4,))  # each begins at a multiple of 16 bytes
        )
        last = _new_input(graph, last, both, hoisted)
        joined.append(last)
    note_joined(first[0], second[0], tuple(joined))
    return last


def _new_input(graph: Graph, last: Node, value: torch.Tensor, hoisted: Hoisted) -> Node:
    """A new input of the graph with a fake value, behind the last input."""
    with graph.inserting_after(last):
        node = graph.placeholder(f"packed_{len(hoisted.examples)}")
    node.meta["val"] = value
    hoisted.examples.append(value)
    return node


def _with_packed(compiled: Callable, hoisted: Hoisted) -> Callable:
    """The compiled function, called with the packed weights after its own arguments."""
    pairs = [(one, other, form) for (one, form), (other, _) in hoisted.pairs]

    def call(args: list) -> Any:
        values = [*args]
        joined = [each for one, other, form in pairs for each in packed_pair(args[one], args[other], form)]
        for parts in hoisted.packed:
            first, second, dtypes = zip(*parts, strict=True)
            both = joined_parts(*([args[place] for place in each] for each in (first, second)))
            joined += [
                part if part.dtype == dtype else part.view(dtype) for part, dtype in zip(both, dtypes, strict=True)
            ]
        for index, packed_as in hoisted.recipients:
            values += packed_weight(args[index], packed_as)
        values += joined
        args.clear()
        return compiled(values)

    call._boxed_call = True
    return call
