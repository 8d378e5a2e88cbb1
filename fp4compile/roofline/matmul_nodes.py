"""Read nodes of this package's matmuls for predictions."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.fx import Node

from fp4compile.analysis import flops
from fp4compile.analysis.node_kinds import nbytes, numel
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.nodes import PRODUCTS, ScaledMM, is_product, products_of, scaled_mm_of
from fp4compile.roofline.layer_sizes import Sizes
from fp4compile.roofline.time_terms import BF16, stored
from fp4compile.templates.problem import Problem


@dataclass(frozen=True)
class TimedMatmul:
    """A matmul node at the sizes of the captured call.

    problem: None where torch multiplies. more: bytes moved besides the operands and a result of 16 bits. copied: bytes
    of matrices that are copied before. cleared: bytes that are zeroed before.
    """

    sizes: Sizes
    problem: Problem | None
    more: int = 0
    copied: float = 0
    cleared: int = 0


def named_results(node: Node) -> Iterator[Node]:
    """The nodes whose notes name the matmuls that a node computes.

    The results of a matmul that quantises are noted as operands of the next one.
    """
    alone = is_product(node)
    if alone or node.target not in PRODUCTS:  # torch's matmuls too
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
    return TimedMatmul(sizes, _at_captured_sizes(problem), more, cleared=cleared)


def size(value: Any) -> int:
    """A size at the captured call; 0 where it depends on the data."""
    return flops.hint(value) or 0


def _at_captured_sizes(problem: Problem) -> Problem:
    m, n, k = map(size, (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, batches=size(problem.batches), groups=size(problem.groups))


def _sizes(x: Arguments) -> Sizes:
    a, b = _shape(x.a), _shape(x.b)
    if x.offs is not None:
        columns, contraction = 2 * b[-2] if x.two_weights else b[-2], size(x.rows) if len(b) == 2 else a[-1]
        return Sizes(a[-2], columns, contraction, x.spec.grouping, size(x.offs.shape[0]))
    return Sizes(prod(a[:-1]), b[-2], a[-1], x.spec.grouping, prod(b[:-2]))


def _shape(x: Operand) -> tuple[int, ...]:
    """The shape in elements."""
    return *map(size, x.data.shape[:-1]), size(x.k)


def _gathered(product: ScaledMM) -> TimedMatmul:
    """Few tokens, each with its own matrix, which a kernel reads through the index or from a copy."""
    x, target = product.values(), product.problem.target
    count, rows, length = _shape(x.a)
    columns = _shape(x.b)[-2]
    sizes = Sizes(count * rows, columns, length, Grouping.GATHERED, count)
    if product.reads_by_index:
        spec = replace(x.spec, grouping=Grouping.RAGGED_ROWS)
        return TimedMatmul(sizes, Problem(spec, sizes.rows, columns, length, target, groups=count))
    problem = Problem(replace(x.spec, grouping=Grouping.BATCHED), rows, columns, length, target, count, True)
    copied = 2 * stored(x.b.format, count * columns, length, x.b.swizzled) if x.b.format else 0
    return TimedMatmul(sizes, problem, copied=copied)


def _horizontal(node: Node) -> TimedMatmul:
    """Matmuls of one A in one launch, as one matmul of all their columns."""
    products = products_of(node)
    a, columns = products[0].values().a, sum(_shape(each.values().b)[-2] for each in products)
    sizes = Sizes(prod(_shape(a)[:-1]), columns, _shape(a)[-1])
    return TimedMatmul(sizes, _at_captured_sizes(products[0].problem))
