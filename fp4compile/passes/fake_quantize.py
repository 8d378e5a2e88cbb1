"""Quantise and dequantise in one kernel, where only products read it: `quantize` becomes `fake_quantize`.

Entry: `fake_quantize(graph)`, on a forward, backward or inference graph after the partitioner. It runs after equal
quantises became one, and before epilogue and horizontal fusion, which then see the operands that this pass leaves.

A GPU without FP4 matrix units multiplies 16-bit numbers. Most of its products first dequantise A in memory, each for
itself (`Choice.dequantizes_a`). The codes and block scales need not be written where nothing else reads them; the
backward pass reads them where they are saved for it. The products then get a plain A, with the outer scale that A had:
the same numbers, and the same kernels. Products that dequantise codes in registers are left alone, because they read
fewer bytes of codes than of 16-bit numbers.

Products of experts with many tokens dequantise A and B in memory. There both become values: tokens and gradients along
either dimension, and weights that are quantised in the graph. A quantise of both dimensions may keep its codes along
one of them: those of an activation that are saved for the weight gradient.
"""

import operator

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.graph import (
    FAKE_QUANTIZE,
    FAKE_QUANTIZE_GROUPED,
    FAKE_QUANTIZE_GROUPED_BOTH,
    QUANTIZE,
    QUANTIZE_GROUPED,
    QUANTIZE_GROUPED_BOTH,
    SCALED_GROUPED_MM,
    SCALED_MM,
    Quantise,
    grouped_problem,
    new_node,
    quantise_of,
    scaled_mm_of,
)
from fp4compile.formats import formats
from fp4compile.ops import dense as ops
from fp4compile.ops import grouped as ops_grouped
from fp4compile.templates.grouped.choose import choose
from fp4compile.templates.launch import on_gpu


def fake_quantize(graph: Graph) -> int:
    """Replace quantises on CUDA tensors that only such products read; returns how many."""
    count = 0
    for node in graph.find_nodes(op="call_function", target=QUANTIZE):
        quantise = quantise_of(node)
        readers = _readers(node)
        if readers and _expandable(quantise) and all(_multiplies(reader, node) for reader in readers):
            _replace(quantise, readers)
            count += 1
    return count + _fake_quantize_experts(graph)


def _expandable(quantise: Quantise) -> bool:
    """Whether `fake_quantize` does what the node does, and its kernel reads the tensor as it lies."""
    x = quantise.source.meta["val"]
    plain = quantise.layout == "linear" and quantise.seed is None and not quantise.hadamard
    plain = plain and quantise.scale_rule == "amax"
    along_rows = quantise.dim == -1 and statically_true(x.stride(-1) == 1)
    return on_gpu(x) and plain and along_rows and ops.fake_quantizable(formats.get(quantise.format))


def _readers(quantise: Node, data: int = 0) -> list[Node]:
    """Who reads the codes or the block scales, outputs `data` and the next one, each once."""
    outputs = [output for output in quantise.users if output.args[1] in (data, data + 1)]
    return list(dict.fromkeys(user for output in outputs for user in output.users))


def _multiplies(reader: Node, quantise: Node) -> bool:
    """Whether a reader is a product that dequantises the codes in memory first, as its A and nothing else."""
    if reader.target is not SCALED_MM:
        return False
    places = [(place, arg.args[1]) for place, arg in enumerate(reader.args) if _comes_from(arg, quantise)]
    if places not in ([(0, 0), (1, 1)], [(0, 0), (1, 1), (2, 2)]):
        return False
    product = scaled_mm_of(reader)
    return None not in (product.a.format, product.b.format) and product.choice().dequantizes_a


def _comes_from(arg, quantise: Node) -> bool:
    return isinstance(arg, Node) and arg.target is operator.getitem and arg.args[0] is quantise


def _replace(quantise: Quantise, readers: list[Node]) -> None:
    """Let the products read the values, and all others the outer scale."""
    node = quantise.node
    options = {} if quantise.outer is None else {"outer": quantise.outer}
    with node.graph.inserting_before(node):
        expanded = new_node(node.graph, FAKE_QUANTIZE, (quantise.source, quantise.format), node.meta, **options)
        values, outer = (new_node(node.graph, operator.getitem, (expanded, i), node.meta) for i in range(2))
    for product in readers:
        product.args = (values, None, product.args[2], None, *product.args[4:])
    for output in list(node.users):
        output.replace_all_uses_with(outer)  # codes and block scales have no more uses
        node.graph.erase_node(output)
    node.graph.erase_node(node)
    if not outer.users:
        node.graph.erase_node(outer)


# ---------------------------------------------------------------- experts


def _fake_quantize_experts(graph: Graph) -> int:
    """`fake_quantize` of what grouped products read. All is decided before any product has another operand."""
    found = []
    for op, outputs in ((QUANTIZE, (0,)), (QUANTIZE_GROUPED, (0,)), (QUANTIZE_GROUPED_BOTH, (0, 3))):
        for node in graph.find_nodes(op="call_function", target=op):
            expanded = [data for data in outputs if _expandable_in_groups(node) and _only_multiplied(node, data)]
            if expanded:
                found.append((node, expanded))
    for node, expanded in found:
        _replace_grouped(node, expanded)
    return len(found)


def _expandable_in_groups(node: Node) -> bool:
    """Whether there is an op that does what the node does, and 16 bits hold the values."""
    source, offs, name, dim = _arguments(node)
    x, fmt = source.meta["val"], formats.get(name)
    options = {"layout": "linear", "scale_rule": "amax", "seed": None, "outer": None, **node.kwargs}
    plain = (options["layout"], options["scale_rule"]) == ("linear", "amax")
    if node.target is QUANTIZE:  # of matrices, each by itself unless they share an outer scale that is computed
        does = x.dim() == 3 and dim in (-1, -2) and (fmt.outer != "tensor" or options["outer"] is not None)
    else:
        does = node.target is QUANTIZE_GROUPED or offs is not None
    does = does and not (fmt.square and options["seed"] is not None)
    return on_gpu(x) and plain and does and ops_grouped.fake_quantizable(fmt, x.dtype)


def _arguments(node: Node) -> tuple[Node, Node | None, str, int | None]:
    """(x, offs, format, dim) of a quantise; None for offs of matrices, and for dim of both."""
    if node.target is QUANTIZE_GROUPED_BOTH:
        return (*node.args, None)
    quantise = quantise_of(node)
    return quantise.source, *(quantise.groups or (None,)), quantise.format, quantise.dim


def _only_multiplied(node: Node, data: int) -> bool:
    """Whether the readers of codes and block scales, outputs `data` and the next, would dequantise them in memory."""
    readers = _readers(node, data)
    dtype = formats.get(_arguments(node)[2]).values_dtype
    return bool(readers) and all(_dequantizes_in_memory(reader, node, data, dtype) for reader in readers)


def _dequantizes_in_memory(reader: Node, node: Node, data: int, dtype: torch.dtype) -> bool:
    """Whether a reader is a product of quantised groups that first writes A and B, one of them the codes, in dtype."""
    if reader.target is not SCALED_GROUPED_MM or _place(reader, node, data) is None:
        return False
    problem = grouped_problem(reader)
    both = problem.a.format is not None and problem.b.format is not None
    return both and problem.compute_dtype == dtype and choose(problem).dequantizes


def _place(product: Node, node: Node, data: int) -> int | None:
    """Where codes and block scales are the data and scales of one operand, the place of the data; else None."""
    places = [(place, arg.args[1] - data) for place, arg in enumerate(product.args)
              if _comes_from(arg, node) and arg.args[1] in (data, data + 1)]  # fmt: skip
    return next((place for place in (0, 4) if places == [(place, 0), (place + 1, 1)]), None)


def _replace_grouped(node: Node, expanded: list[int]) -> None:
    """Let products read values in the place of the outputs `expanded` and their scales; others read what they read."""
    graph, both = node.graph, node.target is QUANTIZE_GROUPED_BOTH
    kept = {name: value for name, value in node.kwargs.items() if name in ("outer", "seed", "hadamard")}
    with graph.inserting_before(node):
        if both:
            values = "both" if len(expanded) == 2 else "rows" if expanded == [0] else "columns"
            new = new_node(graph, FAKE_QUANTIZE_GROUPED_BOTH, (*node.args, values), node.meta, **kept)
        else:
            new = new_node(graph, FAKE_QUANTIZE_GROUPED, _arguments(node), node.meta, **kept)
        outputs = {i: new_node(graph, operator.getitem, (new, i if both else i // 2), node.meta)
                   for i in (range(6) if both else (0, 2))}  # fmt: skip
    for data in expanded:
        for product in _readers(node, data):
            place = _place(product, node, data)
            operand = (outputs[data], None, product.args[place + 2], None)
            product.args = (*product.args[:place], *operand, *product.args[place + 4 :])
    for output in list(node.users):
        if output.users:
            output.replace_all_uses_with(outputs[output.args[1]])
        graph.erase_node(output)
    graph.erase_node(node)
    for output in outputs.values():
        if not output.users:
            graph.erase_node(output)
