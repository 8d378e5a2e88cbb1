"""Read nodes of this package's matmuls for predictions; no other file of `roofline` depends on these ops."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.fx import Node

from fp4compile.analysis import flops
from fp4compile.analysis.node_kinds import nbytes, numel
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.nodes import PRODUCTS, ScaledMM, is_product, products_of, scaled_mm_of
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.roofline.layer_sizes import ExpertGroups, Sizes
from fp4compile.roofline.time_terms import BF16, stored
from fp4compile.templates.problem import Problem


@dataclass(frozen=True)
class TimedMatmul:
    """A matmul node at the sizes of the captured call.

    problem: None where torch multiplies. formats: of A and B; None for 16 bits. more: bytes moved besides the operands
    and a result of 16 bits. copied: bytes of matrices that are copied before. cleared: bytes that are zeroed before.
    """

    sizes: Sizes
    problem: Problem | None
    formats: tuple[BlockFormat | None, BlockFormat | None] = (None, None)
    more: int = 0
    copied: float = 0
    cleared: int = 0


def is_matmul(node: Node) -> bool:
    """Whether a node is a matmul of this package."""
    return node.target in PRODUCTS


def is_quantiser(node: Node) -> bool:
    """Whether a node quantises."""
    return node.target is QUANTIZE


def lays_out_scales(node: Node) -> bool:
    """Whether a node converts a quantiser's block scales to another layout."""
    return node.target is LAY_OUT_SCALES


def named_results(node: Node) -> Iterator[Node]:
    """The nodes whose notes name the matmuls that a node computes.

    The results of a matmul that quantises are noted as operands of the next one.
    """
    alone = is_product(node)
    if alone or not is_matmul(node):  # torch's matmuls too
        yield node
    if not alone or scaled_mm_of(node).spec.results == 1:
        yield from (user for user in node.users if user.target is operator.getitem)


def matmul_of(node: Node) -> TimedMatmul:
    """The sizes, formats and problem of a matmul node."""
    if not is_product(node):
        return _horizontal(node)
    product = scaled_mm_of(node)
    if product.index is not None:
        return _gathered(product)
    sizes = _sizes(product.values())
    if product.spec.plain:
        return TimedMatmul(sizes, None)
    problem = product.problem
    more = nbytes(node) - BF16 * (sizes.result if product.spec.results > 1 else numel(node.meta["val"]))
    more += sum(map(nbytes, product.auxiliaries))
    cleared = 4 * size(problem.groups) if product.spec.amax and product.offs is not None else 0
    return TimedMatmul(sizes, _at_captured_sizes(problem), (product.a.format, product.b.format), more, cleared=cleared)


def size(value: Any) -> int:
    """A size at the captured call; 0 where it depends on the data."""
    return flops.hint(value) or 0


def _at_captured_sizes(problem: Problem) -> Problem:
    m, n, k = map(size, (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, batches=size(problem.batches), groups=size(problem.groups))


def _sizes(x: Arguments) -> Sizes:
    a, b = _shape(x.a), _shape(x.b)
    if x.offs is not None:
        count, along_k = ExpertGroups(size(x.offs.shape[0])), len(b) == 2
        columns = 2 * b[-2] if x.two_weights else b[-2]
        return Sizes(a[-2], columns, size(x.rows) if along_k else a[-1], count, along_k=along_k)
    return Sizes(prod(a[:-1]), b[-2], a[-1], ExpertGroups(prod(b[:-2]), "batch") if len(b) > 2 else None)


def _shape(x: Operand) -> tuple[int, ...]:
    """The shape in elements."""
    return *map(size, x.data.shape[:-1]), size(x.k)


def _gathered(product: ScaledMM) -> TimedMatmul:
    """Few tokens, each with its own matrix, which a kernel reads through the index or from a copy."""
    x, target = product.values(), product.problem.target
    count, rows, length = _shape(x.a)
    columns, formats = _shape(x.b)[-2], (x.a.format, x.b.format)
    sizes = Sizes(count * rows, columns, length, ExpertGroups(count, "gather"))
    if product.reads_by_index:
        spec = replace(x.spec, grouping=Grouping.RAGGED_ROWS)
        return TimedMatmul(sizes, Problem(spec, sizes.rows, columns, length, target, groups=count), formats)
    problem = Problem(replace(x.spec, grouping=Grouping.BATCHED), rows, columns, length, target, count, True)
    copied = 2 * stored(x.b.format, count * columns, length, x.b.swizzled) if x.b.format else 0
    return TimedMatmul(sizes, problem, formats, copied=copied)


def _horizontal(node: Node) -> TimedMatmul:
    """Matmuls of one A in one launch, as one matmul of all their columns."""
    products = products_of(node)
    a, columns = products[0].values().a, sum(_shape(each.values().b)[-2] for each in products)
    sizes = Sizes(prod(_shape(a)[:-1]), columns, _shape(a)[-1])
    return TimedMatmul(sizes, _at_captured_sizes(products[0].problem), (a.format, products[0].b.format))
