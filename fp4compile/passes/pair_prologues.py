"""Two quantisers that compute what they quantise of the same tensors become one: `quantize_prologue` with two results.

Entry: `pair_prologues(graph)`, on a forward, backward or inference graph after the partitioner, right after
`fuse_prologue`. Both gradients of a gate are computed of its inputs and of the gradient of its output. As two kernels,
each reads these from memory; as one, the second result finds them in the cache.

The two must be asked for the same, but for their seeds, and read a tensor of the whole size in common. Their node
stands where the first one stood. What the second one reads must be there, or be a view or a cast that can be moved
there. The model of `templates.quantize.prologue_cost` must not expect one launch to take longer than two.
"""

import operator

import torch
from torch.fx import Graph, Node

from fp4compile.analysis.graph import CAST, QUANTIZE_PROLOGUE, RESHAPES, new_node
from fp4compile.formats.prologue import Prologue, together
from fp4compile.passes.fused import name_results
from fp4compile.passes.quantisers import work_of
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize.dispatch import takes_prologue, takes_several
from fp4compile.templates.quantize.prologue_cost import fused_time

aten = torch.ops.aten
# What may be moved to an earlier place: it takes no time, or as much there.
_MOVABLE = (CAST, *RESHAPES, aten.select.int, operator.getitem)


def pair_prologues(graph: Graph) -> int:
    """Make one node of two quantisers with a prologue, where that pays; returns how many pairs there are."""
    alike: dict[tuple, list[Node]] = {}
    changes = pairs = 0  # nothing is moved past what changes a tensor or draws random numbers
    for node in list(graph.nodes):
        if node.target is QUANTIZE_PROLOGUE:
            before = alike.setdefault((changes, *_key(node)), [])
            partner = next((one for one in before if _pair(graph, one, node)), None)
            if partner is None:
                before.append(node)
            else:
                before.remove(partner)
                pairs += 1
        changes += node.op == "call_function" and node.is_impure()
    return pairs


def _key(node: Node) -> tuple:
    """Equal for nodes that are asked for the same, of tensors of the same shape and place."""
    operands, _, *rest = node.args
    first = operands[0].meta["val"]
    options = {name: value for name, value in node.kwargs.items() if name not in ("seed", "stored")}
    seeded = node.kwargs.get("seed") is not None
    return first.device, first.dtype, str(first.shape), str(rest), str(sorted(options.items())), seeded


def _pair(graph: Graph, one: Node, other: Node) -> bool:
    """Put a node with both results in the place of the first one, if that is possible and pays."""
    both = [_prologue(node) for node in (one, other)]
    if any(each.several or each.reductions for each in both) or one.kwargs.get("outer") is not None:
        return False
    operands: dict[tuple[Node, str], int] = {}
    numbers = [
        [operands.setdefault((node, each.kinds[i]), len(operands)) for i, node in enumerate(user.args[0])]
        for each, user in zip(both, (one, other), strict=True)
    ]
    common = {number for number in numbers[0] if number in numbers[1]}
    if not any(kind == "aux" for (_, kind), number in operands.items() if number in common):
        return False
    paired, places = together(both, numbers)
    if len(set(paired.results)) < 2:  # they are the same
        return False
    work = work_of(one)
    first = one.args[0][0].meta["val"]
    dtypes = [node.meta["val"].dtype for node, _ in operands]
    layout = one.kwargs.get("layout", "linear")
    if not takes_prologue(work.fmt, paired, dtypes, work.by_columns):
        return False
    if not takes_several(work.fmt, work.op, layout, first.shape):
        return False
    sm = target_of(first.device).sm
    apart = sum(
        fused_time(each, [node.meta["val"].dtype for node in user.args[0]], work, sm)
        for each, user in zip(both, (one, other), strict=True)
    )
    if fused_time(paired, dtypes, work, sm) > apart or not _gather(other, one):
        return False
    _replace(graph, (one, other), paired, places, [node for node, _ in operands])
    return True


def _prologue(node: Node) -> Prologue:
    stored, results = (node.kwargs.get(name) or () for name in ("stored", "results"))
    return Prologue.parse(node.args[1], node.args[2], stored, results)


def _gather(node: Node, place: Node) -> bool:
    """Move what a node needs before another node; returns whether that is possible."""
    late: set[Node] = set()
    waiting = list(node.all_input_nodes)
    while waiting:
        needed = waiting.pop()
        if needed < place or needed in late:
            continue
        if needed.target not in _MOVABLE:
            return False
        late.add(needed)
        waiting += needed.all_input_nodes
    for needed in sorted(late):
        place.prepend(needed)
    return True


def _replace(
    graph: Graph, quantisers: tuple[Node, Node], paired: Prologue, places: list[list[int]], operands: list[Node]
) -> None:
    """Put one node in the place of two. places: what the number of each step of each is in `paired`."""
    first = quantisers[0]
    stored = [_prologue(node).stored for node in quantisers]
    own = len(first.meta["val"]) - len(stored[0])
    options = {name: value for name, value in first.kwargs.items() if name not in ("seed", "stored")}
    if paired.stored:
        options["stored"] = paired.stored_strings()
    with graph.inserting_before(first):
        if first.kwargs.get("seed") is not None:
            options["seed"] = _seeds(graph, [node.kwargs["seed"] for node in quantisers])
        arguments = (operands, paired.strings(), *first.args[2:])
        node = new_node(graph, QUANTIZE_PROLOGUE, arguments, first.meta, **options, results=list(paired.results))
    name_results(node, quantisers)
    for which, quantise in enumerate(quantisers):
        for user in list(quantise.users):
            number = user.args[1]
            if number < own:
                place = which * own + number
            else:
                step, dtype = stored[which][number - own]
                place = 2 * own + paired.stored.index((places[which][step], dtype))
            user.args = (node, place)
    for quantise in quantisers:
        graph.erase_node(quantise)


def _seeds(graph: Graph, seeds: list[Node]) -> Node:
    """Two seeds as one tensor: where a step has drawn them one after the other, as they lie."""
    one, other = seeds
    drawn, dim, index = one.args if one.target is aten.select.int else (None, None, None)
    if drawn is not None and other.target is aten.select.int and other.args == (drawn, dim, index + 1):
        return new_node(graph, aten.slice.Tensor, (drawn, 0, index, index + 2), one.meta)
    rows = [new_node(graph, aten.unsqueeze.default, (seed, 0), seed.meta) for seed in seeds]
    return new_node(graph, aten.cat.default, (rows,), one.meta)
