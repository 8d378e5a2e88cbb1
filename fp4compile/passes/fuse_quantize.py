"""Let a product's kernel quantise its result, which then is the operand of the next product.

Entry: `fuse_quantize(graph)`, on a forward, backward or inference graph after the partitioner, before `fuse_epilogue`.

`linear -> activation -> linear` writes the activation in 16 bits, and a quantiser reads it again. On SM100 the kernel
of the first product has the rows of its tiles in registers: its epilogue computes the activation, and stores codes and
block scales (`scaled_mm_quantized`). The bits are the same: the product is rounded to its dtype, then the result.

The product may be two that share their activations, gate and up, in one matrix: its result is cut in two halves of
columns, of which the operations make one value. Each tile of the kernel has columns of both.

The pass fuses where a quantiser of rows is the only reader of a value that an epilogue can compute
(`fuse_epilogue.Region`), where the format's block scales depend on a block alone or on a static outer scale, and where
`choose.quantized` expects a gain. Elsewhere the log says why not.
"""

import logging
import operator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from fp4compile import _compat
from fp4compile.analysis.graph import RESHAPES, Quantise, ScaledMM, new_node, quantise_of, scaled_mm_of
from fp4compile.formats.epilogue import PAIR, PRODUCT, serves_quantize
from fp4compile.formats.epilogue import QUANTIZE as QUANTIZE_STEP
from fp4compile.formats.quantize_spec import ROWS
from fp4compile.ops.matmul import SCALED_MM, SCALED_MM_QUANTIZED
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fuse_epilogue import Region
from fp4compile.passes.notes import name_operations
from fp4compile.passes.pointwise import same_shape
from fp4compile.passes.slices import cuts_columns, slice_of
from fp4compile.templates.choose import quantized

aten = torch.ops.aten
log = logging.getLogger("fp4compile")


def fuse_quantize(graph: Graph) -> int:
    """Fuse quantisers into the products of CUDA tensors that they follow; returns how many."""
    if not _compat.pointwise_by_default():
        return 0
    fused = 0
    for node in graph.find_nodes(op="call_function", target=SCALED_MM):
        product = scaled_mm_of(node)
        if product.epilogue is not None or product.plain or not product.on_gpu or not _may_quantize(product):
            continue
        found = _part(Region(node)) or _part(PairRegion(node))
        if found is None:
            continue
        region, last = found
        quantise = quantise_of(_only_quantiser(last))
        choice = quantized(product.problem, quantise.spec.format, pair=isinstance(region, PairRegion))
        if isinstance(choice, str):
            log.info("%s: its result is quantised by another kernel: %s", node, choice)
            continue
        _fuse(graph, region, last, quantise)
        fused += 1
    return fused


def _may_quantize(product: ScaledMM) -> bool:
    """Whether a GPU may have a kernel that quantises its results."""
    return product.problem.target.block_scaled_matrix_units


@dataclass
class PairRegion(Region):
    """The operations that follow the two halves of a product's columns. halves: slices, and the halves' names."""

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


def _part(region: Region) -> tuple[Region, Node] | None:
    """A region and the last node of the part that a kernel can compute and quantise; None where there is none."""
    if not region.products:
        return None
    last = next((each for each in _ends(region) if region.ends_at(each)), None)
    if last is None or (isinstance(region, PairRegion) and not region.epilogue(last).pair):
        return None
    return region, last


def _ends(region: Region) -> list[Node]:
    """The values of a region, the last one first, that nothing but one quantiser reads, which an epilogue replaces."""
    nodes = sorted([region.product, *region.operations, *region.renamed], reverse=True)
    return [node for node in nodes if node.target not in RESHAPES and _replaceable(node, region)]


def _replaceable(last: Node, region: Region) -> bool:
    node = _only_quantiser(last)
    if node is None or not same_shape(node.args[0].meta["val"].shape, region.shape):
        return False
    quantise = quantise_of(node)
    spec = quantise.spec
    plain = spec.dims == (ROWS,) and spec.swizzled and spec.scale_rule == "amax" and spec.prologue is None
    apart = spec.values or spec.ragged or spec.each_matrix or spec.hadamard or spec.seeded
    scaled = serves_quantize(spec.format) and spec.static == (spec.format.outer is not None)
    computed_outer = any(user.args[1] == 2 and user.users for user in node.users if user.target is operator.getitem)
    return plain and not apart and scaled and not computed_outer


def _only_quantiser(last: Node) -> Node | None:
    """The quantiser that alone reads a value, through reshapes; None where there is none, or another reader."""
    waiting, found = [last], set()
    while waiting:
        for user in waiting.pop().users:
            if user.target in RESHAPES:
                waiting.append(user)
            else:
                found.add(user)
    (node, *others) = found or (None,)
    return node if not others and node is not None and node.target is QUANTIZE else None


def _fuse(graph: Graph, region: Region, last: Node, quantise: Quantise) -> None:
    """Replace a quantiser by a product with an epilogue, and erase the nodes between the two."""
    product, epilogue, operands = region.product, region.epilogue(last), list(region.operands(last))
    steps = [*epilogue.strings(), f"{QUANTIZE_STEP} {quantise.format}"]
    with graph.inserting_before(quantise.node):
        outer = {} if quantise.outer is None else {"outer": quantise.outer}
        fused = new_node(graph, SCALED_MM_QUANTIZED, (*product.args[:10], operands, steps, epilogue.dtype),
                         product.meta, **outer)  # fmt: skip
    inside = region.leading_to(last)
    name_operations(fused, (node for node in region.operations if node in inside), QUANTIZE_STEP)
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
