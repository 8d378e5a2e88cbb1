"""Fuse the quantiser of a matmul's result into the GEMM kernel; the codes are the next matmul's operand.

Entry: `fuse_quantize(graph)`, on a forward, backward or inference graph after the partitioner, before `fuse_epilogue`.

In `linear -> activation -> linear` a kernel writes the activation in 16 bits, and a quantiser reads it. On SM100 the
kernel of the first matmul has the rows of its tiles in registers: its epilogue computes the activation, and stores
codes and block scales (`scaled_mm_results`). The bits are the same: the matmul is rounded to its dtype, then the
result.

Two matmuls of the same activations, gate and up, can share the kernel. Their weights are one matrix, and the result is
two halves of columns; or they are two, whose packed codes `hoist` has stacked. The operations compute one value from
both matmuls, and each tile of the kernel has columns of both. Matmuls of groups (experts) are fused alike, with a
quantiser that has the same groups.

The pass fuses where a quantiser of rows is the only reader of a value that an epilogue can compute
(`fuse_epilogue.Region`), where the format's block scales depend on a block alone or on a static global scale, and where
`choose.quantized` expects a gain. Elsewhere the log has the reason.

A dynamic global scale depends on the whole result. So the kernel stores the result in 16 bits, and finds its amax: the
quantiser reads the result once, and no launch reads it before. Then other nodes may read the result as well, except
where each group has a global scale, because the kernel clears the rows of no group.
"""

import logging
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fp4compile import _compat
from fp4compile._compat import statically_true
from fp4compile.analysis.views import value_key
from fp4compile.formats.epilogue import AMAX, PAIR, PRODUCT, Epilogue, serves_quantize
from fp4compile.formats.epilogue import QUANTIZE as QUANTIZE_STEP
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Operand
from fp4compile.formats.quantize_spec import ROWS
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import (
    CAST,
    RESHAPES,
    B,
    Quantise,
    ScaledMM,
    new_node,
    quantise_of,
    readers,
    scaled_mm_of,
)
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fuse_epilogue import Region
from fp4compile.passes.lib.notes import joined_weights, name_operations
from fp4compile.passes.lib.operations import same_shape
from fp4compile.passes.lib.slices import cuts_columns, slice_of
from fp4compile.passes.lib.symbolic_sizes import read_sizes_of_operands
from fp4compile.templates.choose import quantized

aten = torch.ops.aten
log = logging.getLogger("fp4compile")


def fuse_quantize(graph: Graph) -> int:
    """Fuse quantisers into the matmuls of CUDA tensors that they follow; returns how many."""
    if not _compat.pointwise_by_default():
        return 0
    read_sizes_of_operands(graph)
    fused: set[Node] = set()  # matmuls, which are no nodes of the graph any more
    count = 0
    for node in graph.find_nodes(op="call_function", target=SCALED_MM):
        if node not in fused and _may_quantize(scaled_mm_of(node)):
            products = _fuse_product(graph, node)
            fused.update(products)
            count += bool(products)
    return count


def _fuse_product(graph: Graph, node: Node) -> tuple[Node, ...]:
    """Fuse the quantiser that follows a matmul; returns the matmuls that became part of its kernel."""
    reasons = []
    for region, last in _parts(node):
        quantisers = _amax_readers(last, region)
        quantise = None if quantisers else quantise_of(_only_quantiser(last))
        kinds = region.operands(last).items()
        read = sum(node.meta["val"].dtype.itemsize for node, kind in kinds if kind == "aux")
        problem, products = replace(scaled_mm_of(node).problem, operand_bytes=read), len(region.roots)
        end = AMAX if quantise is None else f"{QUANTIZE_STEP} {quantise.format}"
        epilogue = region.epilogue(last).ended(end)
        choice = quantized(problem, epilogue, products)
        if not isinstance(choice, str):
            if quantise is None:
                _fuse_amax(graph, region, last, epilogue, quantisers)
            else:
                _fuse(graph, region, last, epilogue, quantise)
            return region.roots
        reasons.append(choice)
    if reasons:
        log.info("%s: its result is quantised by another kernel: %s", node, reasons[-1])
    return ()


def partner_of(product: Node) -> Node | None:
    """The matmul of the same activations and number of columns whose result an operation combines with this one's."""
    own = scaled_mm_of(product)
    for _, arguments in Region(product).operations.values():
        for argument in arguments:
            while isinstance(argument, Node) and argument.target in (*RESHAPES, CAST):
                argument = argument.args[0]
            if isinstance(argument, Node) and argument is not product and argument.target is product.target:
                other = scaled_mm_of(argument)
                alike = _alike(other) == _alike(own) and other.alone and (other.bias, own.bias) == (None, None)
                if alike and same_shape(argument.meta["val"].shape, product.meta["val"].shape):
                    return argument
    return None


def _alike(x: ScaledMM) -> tuple:
    """A key that is equal for matmuls of the same activations and groups, in the same formats."""
    spec = x.spec
    return (*map(value_key, x.a.tensors), value_key(x.offs), x.a.format, x.b.format, spec.grouping, spec.out_dtype)


def _may_quantize(product: ScaledMM) -> bool:
    """Whether the GPU may have a kernel that quantises the matmul's result."""
    groups = product.spec.grouping in (Grouping.RAGGED_CONTRACTION, Grouping.GATHERED)
    known = product.alone and product.on_gpu and not product.spec.plain and not groups
    return known and product.problem.target.block_scaled_matrix_units


@dataclass
class OneProduct(Region):
    """The operations that follow one matmul. pair: whether they compute one value from two matmuls."""

    pair: ClassVar[bool] = False

    @property
    def operand(self) -> tuple[Node | None, ...]:
        """Data, scales and global or row scale of B."""
        return scaled_mm_of(self.product).b.tensors


@dataclass
class TwoProducts(OneProduct):
    """The operations that follow two matmuls of the same activations.

    partner: the second matmul. joined: data, scales and global scales of both weights, stacked.
    """

    pair: ClassVar[bool] = True
    partner: Node = field(kw_only=True)
    joined: tuple[Node | None, ...] = field(kw_only=True)

    @property
    def roots(self) -> tuple[Node, ...]:
        return self.product, self.partner

    @property
    def products(self) -> dict[Node, str]:
        return {self.product: PRODUCT, self.partner: PAIR}

    @property
    def operand(self) -> tuple[Node | None, ...]:
        return self.joined


@dataclass
class PairRegion(OneProduct):
    """The operations that follow the two halves of a matmul's columns. halves: slices, and the halves' names."""

    pair: ClassVar[bool] = True
    halves: dict[Node, str] = field(default_factory=dict)

    @property
    def products(self) -> dict[Node, str]:
        return self.halves

    @property
    def shape(self) -> torch.Size:
        *rows, columns = self.value.shape
        return torch.Size((*rows, columns // 2))

    def _take(self, node: Node) -> bool:
        if cuts_columns(node):
            if node.target is aten.slice.Tensor or node.target is operator.getitem:
                found, columns = slice_of(node), self.value.shape[-1]
                place = None if found is None or found.source is not self.product else (2 * found.start, 2 * found.stop)
                if place not in ((0, columns), (columns, 2 * columns)):
                    return False
                self.halves[node] = PAIR if found.start else PRODUCT
            self.renamed[node] = node.args[0]
            return True
        return super()._take(node)


def _parts(product: Node) -> Iterator[tuple[OneProduct, Node]]:
    """(region, last node) of the operations that a kernel can compute and quantise, largest saving first."""
    regions: list[OneProduct] = [PairRegion(product), OneProduct(product)]
    partner = partner_of(product)
    joined = None if partner is None else joined_weights(product.args[B], partner.args[B])
    if partner is not None and joined is not None:
        regions.insert(0, TwoProducts(product, partner=partner, joined=joined))
    for region in regions:
        last = next((each for each in _ends(region) if region.ends_at(each)), None) if region.products else None
        if last is not None and region.epilogue(last).pair == region.pair:
            yield region, last


def _ends(region: Region) -> list[Node]:
    """The values of a region, the last one first, at which an epilogue can end.

    Only one quantiser reads it, which the epilogue replaces; or there are quantisers that need its amax.
    """
    nodes = sorted([*region.roots, *region.operations, *region.renamed], reverse=True)
    nodes = [node for node in nodes if node.target not in RESHAPES]
    return [
        node for node in nodes
        if _replaceable(node, region) or (_amax_readers(node, region) and _shape_of(node, region))
    ]  # fmt: skip


def _shape_of(last: Node, region: Region) -> list | None:
    """The shape of a value that a kernel stores, as an argument of a reshape; None where it has other columns."""
    *lead, columns = last.meta["val"].shape
    if not statically_true(columns == region.shape[-1]):
        return None
    if same_shape(lead, region.shape[:-1]):
        return [*lead, columns]
    reshapes = (node for node in region.renamed if node.target in RESHAPES)
    return next(([*node.args[1][:-1], columns] for node in reshapes if same_shape(lead, node.meta["val"].shape[:-1])),
                None)  # fmt: skip


def _amax_readers(last: Node, region: Region) -> list[Node]:
    """The quantisers that read a value, through reshapes, and compute a global scale from its amax.

    After a matmul of groups, they compute a global scale for each group. The list is then empty where any other node
    reads the value.
    """
    groups = value_key(scaled_mm_of(region.product).offs)
    reading = list(readers(last, RESHAPES))
    users = dict.fromkeys(user for user, _ in reading)
    found = [node for node in users if node.target is QUANTIZE and _takes_amax(quantise_of(node), groups)]
    alone = len(found) == len(users) and all(same_shape(each.meta["val"].shape, region.shape) for _, each in reading)
    return found if groups is None or alone else []


def _takes_amax(quantise: Quantise, groups: tuple | None) -> bool:
    spec = quantise.spec
    known = spec.static or quantise.amax is not None or spec.prologue is not None
    apart = spec.each_matrix or spec.hadamard or spec.scale_rule != "amax" or (spec.ragged and spec.dims != (ROWS,))
    return spec.format.outer == "tensor" and not known and not apart and value_key(quantise.offs) == groups


def _replaceable(last: Node, region: Region) -> bool:
    node = _only_quantiser(last)
    if node is None or not same_shape(node.args[0].meta["val"].shape, region.shape):
        return False
    quantise = quantise_of(node)
    spec = quantise.spec
    plain = spec.dims == (ROWS,) and spec.swizzled and spec.scale_rule == "amax" and spec.prologue is None
    apart = spec.values or spec.each_matrix or spec.hadamard or spec.seeded
    apart = apart or value_key(quantise.offs) != value_key(scaled_mm_of(region.product).offs)
    scaled = serves_quantize(spec.format) and spec.static == (spec.format.outer is not None)
    computed_outer = any(user.args[1] == 2 and user.users for user in node.users if user.target is operator.getitem)
    return plain and not apart and scaled and not computed_outer


def _only_quantiser(last: Node) -> Node | None:
    """The quantiser that alone reads a value, through reshapes; None where there is none, or another reader."""
    node, *others = {user for user, _ in readers(last, RESHAPES)} or (None,)
    return node if not others and node is not None and node.target is QUANTIZE else None


def _fused_product(graph: Graph, region: OneProduct, last: Node, epilogue: Epilogue, outer: Node | None = None) -> Node:
    """A new matmul with the epilogue that leads to `last`. outer: the static global scale of its codes."""
    node, product = region.product, scaled_mm_of(region.product)
    weight = Operand(*region.operand, product.b.format)
    fused = replace(
        product.but(b=weight, epilogue=epilogue), auxiliaries=list(region.operands(last)), result_outer=outer
    )
    made = fused.new(graph, node.meta)
    inside = region.leading_to(last)
    name_operations(made, (node for node in region.operations if node in inside), epilogue.end.split()[0])
    return made


def _fuse_amax(graph: Graph, region: OneProduct, last: Node, epilogue: Epilogue, quantisers: list[Node]) -> None:
    """Replace `last` by a matmul that finds the amax, which the quantisers read; erase the nodes that led to `last`."""
    inside, shape = region.leading_to(last), _shape_of(last, region)
    with graph.inserting_before(last):
        fused = _fused_product(graph, region, last, epilogue)
        result, amax = (new_node(graph, operator.getitem, (fused, i), last.meta) for i in range(2))
        if not same_shape(result.meta["val"].shape, last.meta["val"].shape):
            result = new_node(graph, aten.reshape.default, (result, shape), last.meta)
    last.replace_all_uses_with(result)
    for node in quantisers:
        with graph.inserting_before(node):
            new = replace(quantise_of(node), amax=amax).new(graph, node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    for node in sorted(inside, reverse=True):
        graph.erase_node(node)


def _fuse(graph: Graph, region: OneProduct, last: Node, epilogue: Epilogue, quantise: Quantise) -> None:
    """Replace a quantiser by a matmul with an epilogue, and erase the nodes between the two."""
    with graph.inserting_before(quantise.node):
        fused = _fused_product(graph, region, last, epilogue, quantise.outer)
    inside = region.leading_to(last)
    for user in list(quantise.node.users):
        if user.args[1] == 2:
            graph.erase_node(user)
    quantise.node.replace_all_uses_with(fused)
    between, waiting = {quantise.node}, [quantise.x]
    while waiting and waiting[-1] not in inside:
        between.add(waiting[-1])
        waiting.append(waiting.pop().args[0])
    for node in sorted({*between, *inside}, reverse=True):
        graph.erase_node(node)
