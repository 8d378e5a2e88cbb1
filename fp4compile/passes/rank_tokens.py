"""Choose experts, sort their tokens and count these by comparing all pairs, in kernels that Inductor fuses.

Models choose each token's experts by a top-k of scores, sort the numbers of the chosen experts, and count how many
tokens each expert has. On an H200, with 16 tokens and 32 experts of gpt-oss, ATen's top-k takes 9.3 us in two kernels,
its histogram and the sum of the counts 3.3 us in three; the matmuls take 160 us. To compare all pairs takes 2.5 us and
1.3 us. Inductor sorts up to 512 numbers in a kernel of its own (256 numbers: 7.4 us, by comparing 3.3), and leaves more
to ATen's radix sort (1024: 33 and 3.8 us; 4096: 40 and 18; 8192: 77 and 49).

The values, and the ends of groups, are the same. The order of equal scores is that of a stable sort: one of those that
a top-k may return, and the chosen experts are those of ATen on a GPU. Sorted numbers are in the order of a stable sort,
one of those that an unstable sort may return, and the one that ATen's radix sort returns on a GPU.

A training step may compute an order twice, in its forward and in its backward graph, and this pass might find only one
of the two. So in training it replaces only what ATen orders in the same way.

Entry: `rank_tokens(graph)`, on a forward, backward or inference graph after the partitioner.
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from fp4compile.analysis.gradients import in_training_step
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import reached, replace_results, scaled_mm_of
from fp4compile.passes.lib.traces import Traces
from fp4compile.templates.launch import on_gpu

aten = torch.ops.aten
_SORTS = (aten.sort.default, aten.sort.stable)
# What comparing all pairs takes less time for, on an H200. LEAST: numbers that Inductor does not sort itself.
FEWEST, LEAST, MOST = 64, 513, 8192  # numbers that are sorted
MOST_COUNTED = 16384  # numbers whose groups' ends are counted
MOST_SCORES, MOST_PAIRS = 256, 2**22  # scores of a token; pairs of scores, of all tokens


def rank_tokens(graph: Graph) -> int:
    """Replace top-ks, sorts and counts that a matmul's groups or matrices depend on; returns how many.

    Deterministic algorithms keep ATen's: there, storing at computed places sorts them.
    """
    if torch.are_deterministic_algorithms_enabled():
        return 0
    products = map(scaled_mm_of, graph.find_nodes(op="call_function", target=SCALED_MM))
    routes = dict.fromkeys(node for each in products for node in (each.offs, each.index) if isinstance(node, Node))
    found: set[Node] = set()  # each part of the graph is walked once: the layers of a model follow each other
    for route in routes:
        found.update(reached(route, lambda each: [node for node in each.all_input_nodes if node not in found]))
    above = [node for node in graph.nodes if node in found]
    traces, trained = Traces(), in_training_step(graph)
    # Ends of groups are counted before their numbers are sorted: then nothing waits for the sort.
    ends = {node: numbers for node in above if (numbers := _counted(node)) is not None}
    for node, numbers in ends.items():
        _count_ends(node, numbers, traces)
    above = [node for node in above if not node._erased]
    sorts = [node for node in above if _is_sort(node, LEAST if trained else FEWEST)]
    for node in sorts:
        _sort(node, traces)
    choices = [node for node in above if not trained and _is_top_k(node)]
    for node in choices:
        _choose(node, traces)
    return len(ends) + len(sorts) + len(choices)


def _erase(node: Node) -> None:
    """Erase a node that nothing reads, and what only it has read."""
    if node.op != "call_function" or node.users or node._erased or node.is_impure():
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase(source)


# ---------------------------------------------------------------- ends of groups


def _count_ends(node: Node, numbers: Node, traces: Traces) -> None:
    groups, own, out = node.args[0].args[1], numbers.meta["val"].dtype, node.meta["val"].dtype
    key, function = ("ends", groups, own, out), lambda each: ends_by_counting(each.to(own), groups).to(out)
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(traces.add(node.graph, key, function, [_before_sort(numbers)]))
    _erase(node)


def ends_by_counting(numbers: torch.Tensor, groups: int) -> torch.Tensor:
    """How many of the numbers [n] of groups 0 to `groups` - 1 are at most each group's, int32 [groups].

    Numbers of no group are not counted.
    """
    group = torch.arange(groups, device=numbers.device).unsqueeze(1)
    return ((numbers >= 0) & (numbers <= group)).sum(1, dtype=torch.int32)


def _counted(node: Node) -> Node | None:
    """The integers whose histogram has a bin for each from 0 on, and of whose counts the node is the running sum."""
    if node.target is not aten.cumsum.default or node.args[1:] != (0,):
        return None
    counts = node.args[0]
    if counts.target is not aten.histc.default or len(counts.args) != 4:
        return None
    numbers, bins, least, most = counts.args
    value = numbers.meta["val"]
    # With one bin, ATen widens the range.
    if bins < 2 or (least, most) != (0, bins - 1) or value.dim() != 1 or value.is_floating_point() or not on_gpu(value):
        return None
    return numbers if isinstance(value.shape[0], int) and value.shape[0] <= MOST_COUNTED else None


def _before_sort(numbers: Node) -> Node:
    """What has been sorted, and then perhaps cast, to these numbers; or else they."""
    node = numbers
    while node.target is torch.ops.prims.convert_element_type.default:
        node = node.args[0]
    is_sorted = node.target is operator.getitem and node.args[1] == 0 and node.args[0].target in _SORTS
    return node.args[0].args[0] if is_sorted and node.args[0].args[0].meta["val"].dim() == 1 else numbers


# ---------------------------------------------------------------- sorts


def _sort(node: Node, traces: Traces) -> None:
    with node.graph.inserting_before(node):
        *results, places = traces.add(node.graph, "sorted", sort_by_counting, [node.args[0]])
    replace_results(node, results)
    for user in [user for user in results[1].users if _is_inverse(user, results[1])]:
        user.replace_all_uses_with(places)
        _erase(user)


def sort_by_counting(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys [n] in ascending order, the place of each among the keys, and the inverse of these places.

    The result of a stable sort of integers.
    """
    place = torch.arange(keys.shape[0], device=keys.device)
    (key, other), (own, others) = ((each.unsqueeze(1), each.unsqueeze(0)) for each in (keys, place))
    before = ((other < key) | ((other == key) & (others < own))).sum(1)
    order = aten._unsafe_index_put(torch.empty_like(place), [before], place)
    return aten._unsafe_index(keys, [order]), order, before


def _is_sort(node: Node, least: int) -> bool:
    """Whether a node sorts integers, at least so many, in ascending order."""
    if node.target not in _SORTS:
        return False
    keys, options = node.args[0].meta["val"], {**node.kwargs}
    names = ("dim", "descending") if node.target is aten.sort.default else ()
    options |= dict(zip(names, node.args[1:], strict=False))
    ascending = not options.get("descending", False) and len(node.args) <= 1 + len(names)
    if not ascending or keys.dim() != 1 or keys.is_floating_point() or not on_gpu(keys):
        return False
    return _is_unpacked(node) and isinstance(keys.shape[0], int) and least <= keys.shape[0] <= MOST


def _is_inverse(node: Node, order: Node) -> bool:
    """Whether a node stores 0, 1, 2, ... at the places of a sort."""
    if node.target is not aten.index_put.default or node.args[1] != [order] or len(node.args) > 3:
        return False
    into, places = node.args[0].meta["val"], node.args[2]
    if places.target is not torch.ops.prims.iota.default:
        return False
    size, dtype = order.meta["val"].shape, order.meta["val"].dtype
    counted = (places.kwargs["start"], places.kwargs["step"]) == (0, 1)
    return counted and size == into.shape == places.meta["val"].shape and dtype == into.dtype == places.kwargs["dtype"]


# ---------------------------------------------------------------- top-ks


def _choose(node: Node, traces: Traces) -> None:
    count = node.args[1]
    with node.graph.inserting_before(node):
        results: Sequence[Node] = traces.add(
            node.graph, ("largest", count), lambda scores: largest_by_counting(scores, count), [node.args[0]]
        )
    replace_results(node, results)


def largest_by_counting(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest scores [..., n] of each row, in descending order, and their places, int64 [..., count].

    NaN is the largest, as for `torch.topk`. Of equal scores, the first comes first.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    place = torch.arange(rows.shape[1], device=scores.device)
    (score, other), (own, others) = ((each.unsqueeze(-1), each.unsqueeze(-2)) for each in (rows, place))
    nan, other_nan = score.isnan(), other.isnan()
    larger = (other > score) | (other_nan & nan.logical_not())
    equal = (other == score) | (other_nan & nan)
    before = (larger | (equal & (others < own))).sum(-1)
    # The chosen places of all rows lie together, before the others: later kernels read them as a whole.
    row = torch.arange(rows.shape[0], device=scores.device).unsqueeze(1)
    chosen, left = rows.shape[0] * count, rows.shape[1] - count
    at = torch.where(before < count, row * count, chosen + row * left - count) + before
    places = aten._unsafe_index_put(torch.empty_like(at).view(-1), [at], place.expand_as(at))
    order = places.narrow(0, 0, chosen).view(-1, count)
    shape = *scores.shape[:-1], count
    return aten._unsafe_index(rows, [row, order]).view(shape), order.view(shape)


def _is_top_k(node: Node) -> bool:
    """Whether a node finds the largest of few floating-point numbers along the last dimension."""
    if node.target is not aten.topk.default:
        return False
    scores, options = node.args[0].meta["val"], {**node.kwargs}
    options |= dict(zip(("dim", "largest"), node.args[2:], strict=False))
    last = options.get("dim", -1) in (-1, scores.dim() - 1) and options.get("largest", True)
    if not last or scores.dim() == 0 or not scores.is_floating_point() or not on_gpu(scores):
        return False
    static = all(isinstance(size, int) for size in (*scores.shape, node.args[1]))
    few = static and scores.shape[-1] <= MOST_SCORES and scores.numel() * scores.shape[-1] <= MOST_PAIRS
    return few and _is_unpacked(node)


def _is_unpacked(node: Node) -> bool:
    """Whether a node's results are read one by one."""
    return all(user.target is operator.getitem for user in node.users)
