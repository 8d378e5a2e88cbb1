"""Give the shards of a tensor the outer scales of the whole tensor, under tensor parallelism.

Entry: `group_amax(graph, inputs)`, on a joint or inference graph after `rewrite`. A format with one outer scale for a
tensor, or for each row, makes it of the largest magnitude. Where each rank has a shard, or a part of each row, each
would make another scale, and the result would not have the bits of the unsharded model. So the ranks reduce their
largest magnitudes to one (an all-reduce of one number, or of one for each row), make the outer scale of it, and
quantise with that scale. The scale of a tensor holds along every dimension; rows that are whole keep their own.

**What is a shard.** Only what the graph proves:

- A parameter that is a DTensor with the placement `Shard`. The numbers of all sharded parameters of a graph are
  reduced together, before anything else runs.
- An operand of a product with a parameter that is sharded along the contraction, if the results of all ranks are
  summed: sum(A_r @ B_r) is the product of all A_r side by side with all B_r one below the other. So the input of a
  layer under `RowwiseParallel` is a shard, and the output gradient of a layer under `ColwiseParallel` whose input needs
  a gradient.
- The same value elsewhere in the graph, as an operand of a weight gradient.

A tensor that every rank has whole, such as a gathered activation, has the whole tensor's outer scale already.

**Every rank calls the same collectives.** So whether one is inserted must not depend on what may differ between ranks.
Shards of unequal sizes are left alone: sizes decide whether a product is quantised at all (`min_n`, `min_k`).

The outer scale has the bits of the quantiser's own: `reference.outer_of` and `reference_scales.outer_of` divide in
float32 with one rounding. Here the division is in float64, and is then rounded to float32, because compiled divisions
in float32 may have an error. These quotients are never so close to the middle between two float32 numbers that the
roundings in float64 decide.

A weight gradient's operands may be Hadamard-transformed along the tokens, of which each rank has whole groups of its
features. Their outer scales are made of transformed elements, so those have a largest magnitude of their own
(`hadamard_amax`), which is reduced.

Quantisers of contract te, and of float8_rowwise, multiply by an encode factor, of which the outer scale is the inverse.
They get the magnitude itself, because an inverse of the inverse has another last bit in one of nine cases. So do all
that have a scale for each row.
"""

import itertools
import math
import operator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true
from fp4compile.analysis.find import sharded_parameters_of
from fp4compile.analysis.gemm import Input, Shard
from fp4compile.analysis.graph import CAST, Quantise, new_node, quantise_of
from fp4compile.analysis.views import NodeView, source_of, view_of
from fp4compile.formats import formats
from fp4compile.formats.reference import NVFP4_MAX
from fp4compile.formats.reference_scales import FOUR_OVER_SIX_MAX
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.quantize import HADAMARD_AMAX, QUANTIZE
from fp4compile.passes.lib.base import Pass
from fp4compile.passes.lib.notes import name_move
from fp4compile.passes.magnitudes import bits_of, largest_of_ranks, magnitude_of

aten = torch.ops.aten

# By name, because torch may be built without distributed.
_SUMS = ("_c10d_functional.all_reduce.default", "_c10d_functional.reduce_scatter_tensor.default")
# Besides views and casts: operators of partial results whose sum over the ranks is the sum of the results.
_LINEAR = (aten.add.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.cat.default, operator.getitem)


def group_amax(graph: Graph, inputs: tuple[Input, ...]) -> int:
    """Let quantisers of shards share the outer scale of the whole tensor; returns the number of quantisers."""
    found = _Shards(sharded_parameters_of(graph, inputs))
    makers = [one for one in map(quantise_of, graph.find_nodes(op="call_function", target=QUANTIZE)) if _makes(one)]
    for one in makers:
        found.see_parameter(one)
    for one in makers:
        found.see_product(one)
    chosen = [(one, found.groups[_shared(one)]) for one in makers if _shared(one) in found.groups]
    fitting = []
    for one, groups in chosen:
        reason = found.left.get(_shared(one)) or _unfit(one)
        ranks = " x ".join(str(found.ranks[group]) for group in groups)
        text = f"outer scale of {ranks} ranks" if reason is None else f"outer scale of a shard: {reason}"
        name_move(one.node, one.x, text)
        fitting += [(one, groups)] * (reason is None)
    outers = _Outers(graph)
    outers.reduce_parameters(fitting)
    for one, groups in fitting:
        outers.give(one, groups)
    return len(fitting)


GROUP_AMAX = Pass("group_amax", group_amax)


def _makes(quantise: Quantise) -> bool:
    """Whether a quantiser makes one outer scale of its whole tensor, or one of each row."""
    return formats.get(quantise.format).outer is not None and quantise.outer is None and not quantise.grouped


def _unfit(quantise: Quantise) -> str | None:
    """Why a quantiser makes its outer scale itself although it quantises a shard."""
    if quantise.hadamard and _of_rows(quantise):
        return "it is made of transformed elements"
    if _of_rows(quantise) and quantise.scale_rule != "amax":
        return "its block scales are searched for"
    value = quantise.x.meta["val"]
    if not statically_true((value.shape[quantise.dims[0]] if _of_rows(quantise) else value.numel()) > 0):
        return "there may be no elements to make it of"
    return None


def _takes_amax(quantise: Quantise) -> bool:
    """Whether a quantiser is given the magnitudes, and not an outer scale that is a quotient of the magnitude."""
    te = quantise.scale_rule == "amax" and formats.get(quantise.format).contract == "te"
    return te or _of_rows(quantise)


def _of_rows(quantise: Quantise) -> bool:
    """Whether each row has an outer scale: the elements along the quantised dimension."""
    return formats.get(quantise.format).outer == "row"


def _shared(quantise: Quantise) -> tuple:
    """A key of what the outer scales are made of: of the elements, or of the elements in rows along one dimension."""
    return view_of(quantise.x).elements, quantise.dims if _of_rows(quantise) else None


def _made_of(quantise: Quantise) -> tuple:
    """A key of the magnitudes of which the outer scales are made: `_shared`, and along which dimension it is
    transformed."""
    return *_shared(quantise), quantise.dims if quantise.hadamard else None


# ---------------------------------------------------------------- which tensors are shards


@dataclass
class _Shards:
    """What a graph proves about the shards that its quantisers read.

    parameters: how each sharded parameter is cut. groups: names of the process groups whose ranks have the shards of
    one tensor, by `_shared`. ranks: the number of ranks of each of these groups. left: why a tensor's
    shards are left alone, by `_shared`.
    """

    parameters: dict[Node, tuple[Shard, ...]]
    groups: dict[tuple, tuple[str, ...]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    left: dict[tuple, str] = field(default_factory=dict)

    def see_parameter(self, quantise: Quantise) -> None:
        """Note the groups of a quantiser that reads a sharded parameter."""
        view = view_of(quantise.x)
        cuts = self._across(quantise) if _of_rows(quantise) else self.parameters.get(view.root, ())
        for cut in cuts:
            self._note(_shared(quantise), cut)
        if cuts and not _is_whole(view):
            self.left[_shared(quantise)] = "a part of the parameter is multiplied"

    def see_product(self, quantise: Quantise) -> None:
        """Note the groups of the other operand where a quantiser's parameter is cut along the contraction."""
        cuts = self._across(quantise)
        for product in _products(quantise.node) if cuts else ():
            for other in _other_operands(product, quantise.node):
                # Rows that are cut are rows of a shard, of which others may make one scale.
                for key, cut in itertools.product({_shared(other), (_shared(other)[0], None)}, cuts):
                    self._note(key, cut)
                    if cut.group not in _summed(product):
                        self.left[key] = "no sum over the ranks of what it is multiplied to is in the graph"

    def _across(self, quantise: Quantise) -> list[Shard]:
        """How a quantiser's parameter is cut along the quantised dimension."""
        root = view_of(quantise.x).root
        return [cut for cut in self.parameters.get(root, ()) if cut.dim == _along(quantise)]

    def _note(self, key: tuple, cut: Shard) -> None:
        self.groups[key] = tuple(dict.fromkeys([*self.groups.get(key, ()), cut.group]))
        self.ranks[cut.group] = cut.ranks
        if cut.whole % cut.ranks:
            self.left[key] = f"{cut.whole} elements do not divide evenly among {cut.ranks} ranks"


def _is_whole(view: NodeView) -> bool:
    """Whether a view has each element of its root once."""
    return not view.repeats and statically_true(math.prod(view.size) == view.root.meta["val"].numel())


def _along(quantise: Quantise) -> int | None:
    """The dimension of a parameter that a quantiser of a view of it quantises; None where it is none of them."""
    view = view_of(quantise.x)
    shape = view.root.meta["val"].shape
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]  # as `view_of` counts elements
    step = view.stride[quantise.dims[0]]
    return steps.index(step) if step in steps else None


def _products(quantise: Node) -> list[Node]:
    """The products that read the codes of a quantiser."""
    codes = [each for each in quantise.users if each.args[1] == 0]
    return list(dict.fromkeys(user for each in codes for user in each.users if user.target is SCALED_MM))


def _other_operands(product: Node, quantise: Node) -> list[Quantise]:
    """The quantisers, which make an outer scale, of a product's other operand: none or one."""
    read = (arg for arg in (product.args[0], product.args[4]) if arg.target is operator.getitem)
    others = {code.args[0] for code in read if code.args[0].target is QUANTIZE} - {quantise}
    return [other for other in map(quantise_of, others) if _makes(other)]


def _summed(product: Node) -> set[str]:
    """The process groups over whose ranks a product's results are summed before anything else is computed of them."""
    found: set[str | None] = set()
    waiting, seen = [product], {product}
    for node in waiting:
        for user in node.users:
            if str(user.target) in _SUMS and user.args[1] == "sum":
                found.add(user.args[-1])
            elif user.target in _LINEAR or source_of(user) is node:
                waiting += [user] * (user not in seen)
                seen.add(user)
            else:
                found.add(None)
    return {group for group in found if group is not None} if len(found) == 1 else set()


# ---------------------------------------------------------------- the new nodes


@dataclass
class _Outers:
    """Makes the outer scales of whole tensors.

    amaxes: the largest magnitudes of whole tensors, in the shape of the outer scales, by `_made_of`. outers: outer
    scales, by `_made_of` and the rule of the block scales.
    """

    graph: Graph
    amaxes: dict[tuple, Node] = field(default_factory=dict)
    outers: dict[tuple, Node] = field(default_factory=dict)

    def reduce_parameters(self, chosen: list[tuple[Quantise, tuple[str, ...]]]) -> None:
        """Reduce the magnitudes of parameters at the start of the graph, in one collective for each group."""
        graph, first = self.graph, next(node for node in self.graph.nodes if node.op != "placeholder")
        of_groups: dict[tuple[str, ...], dict[tuple, Quantise]] = {}
        for one, groups in chosen:
            if view_of(one.x).root.op == "placeholder" and not one.hadamard:
                of_groups.setdefault(groups, {}).setdefault(_made_of(one), one)
        for groups, members in of_groups.items():
            meta = _meta(next(iter(members.values())))
            with graph.inserting_before(first):
                bits = [self._of_parameter(one, meta) for one in members.values()]
                joined = bits[0] if len(bits) == 1 else new_node(graph, aten.cat.default, (bits,), meta)
                found, begin = self._over(groups, joined, meta), 0
                for each, (key, one) in zip(bits, members.items(), strict=True):
                    end = begin + each.meta["val"].shape[0]
                    part = new_node(graph, aten.slice.Tensor, (found, 0, begin, end), meta)
                    shape = [*one.node.meta["val"][2].shape]
                    self.amaxes[key] = magnitude_of(
                        graph, new_node(graph, aten.reshape.default, (part, shape), meta), meta
                    )
                    begin = end

    def give(self, quantise: Quantise, groups: tuple[str, ...]) -> None:
        """Let a quantiser take the whole tensor's largest magnitude, or the outer scale that is made of it."""
        graph, node = self.graph, quantise.node
        with graph.inserting_before(node):
            amax = self._amax(quantise, groups)
            if _takes_amax(quantise):
                new = replace(quantise, amax=amax).new(graph, node.meta)
            else:
                outer = self._outer(quantise, amax)
                new = replace(quantise, outer=outer).new(graph, node.meta)
                for user in list(node.users):
                    if user.args[1] == 2:
                        user.replace_all_uses_with(outer)
                        graph.erase_node(user)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _amax(self, quantise: Quantise, groups: tuple[str, ...]) -> Node:
        """The largest magnitudes of the whole tensor, float32 in the shape of the outer scale."""
        key = _made_of(quantise)
        if key not in self.amaxes:
            meta, x = _meta(quantise), quantise.x
            if _of_rows(quantise):
                bits = self._bits(x, (), meta, quantise.dims[0])
                if quantise.dims != (-1,):
                    bits = new_node(self.graph, aten.transpose.int, (bits, -1, quantise.dims[0]), meta)
                found = self._over(groups, bits, meta)
            else:
                bits = self._bits_of_transform(quantise, meta) if quantise.hadamard else self._bits(x, (), meta)
                bits = new_node(self.graph, aten.reshape.default, (bits, [1]), meta)
                found = new_node(self.graph, aten.reshape.default, (self._over(groups, bits, meta), []), meta)
            self.amaxes[key] = magnitude_of(self.graph, found, meta)
        return self.amaxes[key]

    def _of_parameter(self, quantise: Quantise, meta: dict) -> Node:
        """The bits of the largest magnitudes of the parameter that a quantiser reads, int32 [n]."""
        view = view_of(quantise.x)
        bits = self._bits(view.root, view.casts, meta, _along(quantise) if _of_rows(quantise) else None)
        return new_node(self.graph, aten.reshape.default, (bits, [-1]), meta)

    def _outer(self, quantise: Quantise, amax: Node) -> Node:
        """amax / the largest number of the format; 1 instead of 0."""
        key = _made_of(quantise), quantise.scale_rule
        if key not in self.outers:
            largest = 6.0 * FOUR_OVER_SIX_MAX if quantise.scale_rule == "four_over_six" else NVFP4_MAX
            meta = _meta(quantise)
            wide = new_node(self.graph, CAST, (amax, torch.float64), meta)
            quotient = new_node(self.graph, aten.div.Tensor, (wide, largest), meta)
            quotient = new_node(self.graph, CAST, (quotient, torch.float32), meta)
            is_zero = new_node(self.graph, aten.eq.Scalar, (quotient, 0), meta)
            self.outers[key] = new_node(self.graph, aten.where.ScalarSelf, (is_zero, 1.0, quotient), meta)
        return self.outers[key]

    def _bits(self, x: Node, casts: tuple[torch.dtype, ...], meta: dict, along: int | None = None) -> Node:
        """The bits of a tensor's largest magnitude, or of each row's along a dimension, which is then of size 1.

        casts: of the elements, which keep the order of magnitudes.
        """
        magnitudes = new_node(self.graph, aten.abs.default, (x,), meta)
        found = new_node(self.graph, aten.amax.default, (magnitudes, *(() if along is None else ([along], True))), meta)
        for dtype in (*casts, torch.float32):
            found = new_node(self.graph, CAST, (found, dtype), meta)
        return bits_of(self.graph, found, meta)

    def _bits_of_transform(self, quantise: Quantise, meta: dict) -> Node:
        """The bits of the largest magnitude of a tensor's Hadamard transform."""
        found = new_node(self.graph, HADAMARD_AMAX, (quantise.x, quantise.dims[0]), meta)
        return bits_of(self.graph, found, meta)

    def _over(self, groups: tuple[str, ...], bits: Node, meta: dict) -> Node:
        """The largest of each number over the ranks of the groups."""
        for group in groups:
            bits = largest_of_ranks(self.graph, bits, group, meta)
        return bits


def _meta(quantise: Quantise) -> dict:
    """Metadata of nodes that make an outer scale: it is made once, in the forward graph where that reads it."""
    return {name: value for name, value in quantise.node.meta.items() if name not in ("recompute", "partitioner_tag")}
