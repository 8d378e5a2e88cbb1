"""How nodes of this package's ops are read for predictions: the only file of this room that depends on the ops."""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch.fx import Node

from fp4compile.analysis import flops
from fp4compile.analysis.graph import reads_by_index, scaled_mm_of
from fp4compile.analysis.node_kinds import nbytes, numel
from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Target
from fp4compile.ops.matmul import (
    SCALED_GROUPED_MM,
    SCALED_MM,
    SCALED_MM_AMAX,
    SCALED_MM_GATHERED,
    SCALED_MM_HORIZONTAL,
    SCALED_MM_QUANTIZED,
)
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.roofline.layer_sizes import Experts, Sizes
from fp4compile.roofline.time_terms import BF16, stored
from fp4compile.templates.problem import Problem, operand_type, problem_of

_QUANTIZING = (SCALED_MM_QUANTIZED, SCALED_MM_AMAX)
_MATMULS = (SCALED_MM, *_QUANTIZING, SCALED_GROUPED_MM, SCALED_MM_GATHERED, SCALED_MM_HORIZONTAL)


@dataclass(frozen=True)
class Matmul:
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
    """Whether a node is a matmul of this package's."""
    return node.target in _MATMULS


def is_quantiser(node: Node) -> bool:
    """Whether a node quantises."""
    return node.target is QUANTIZE


def lays_out_scales(node: Node) -> bool:
    """Whether a node takes the block scales of a quantiser to another layout."""
    return node.target is LAY_OUT_SCALES


def named_results(node: Node) -> Iterator[Node]:
    """The nodes whose notes name the matmuls that a node computes.

    The results of a matmul that quantises are noted as operands of the next one.
    """
    if node.target is not SCALED_MM_HORIZONTAL:
        yield node
    if node.target not in _QUANTIZING:
        yield from (user for user in node.users if user.target is operator.getitem)


def matmul_of(node: Node, target: Target) -> Matmul:
    """What a matmul node multiplies."""
    if node.target is SCALED_MM_GATHERED:
        return _gathered(node, target)
    if node.target is SCALED_MM_HORIZONTAL:
        return _horizontal(node, target)
    product = scaled_mm_of(node)
    sizes = _sizes(product.values())
    if product.plain:
        return Matmul(sizes, None)
    problem, quantises = product.problem, node.target in _QUANTIZING
    more = nbytes(node) - BF16 * (sizes.result if quantises else numel(node.meta["val"]))
    more += sum(map(nbytes, product.auxiliaries))
    cleared = 4 * size(problem.groups) if node.target is SCALED_MM_AMAX and product.offs is not None else 0
    return Matmul(sizes, _at_captured_sizes(problem), (product.a.format, product.b.format), more, cleared=cleared)


def size(value: Any) -> int:
    """A size at the captured call; 0 where it depends on the data."""
    return flops.hint(value) or 0


def _at_captured_sizes(problem: Problem) -> Problem:
    m, n, k = map(size, (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, batches=size(problem.batches), groups=size(problem.groups))


def _sizes(x: Arguments) -> Sizes:
    a, b = _shape(x.a), _shape(x.b)
    if x.offs is not None:
        count, along_k = Experts(size(x.offs.shape[0])), len(b) == 2
        columns = 2 * b[-2] if x.two_weights else b[-2]
        return Sizes(a[-2], columns, size(x.rows) if along_k else a[-1], count, along_k=along_k)
    return Sizes(prod(a[:-1]), b[-2], a[-1], Experts(prod(b[:-2]), "batch") if len(b) > 2 else None)


def _shape(x: Operand) -> tuple[int, ...]:
    """The shape in elements."""
    return *map(size, x.data.shape[:-1]), size(x.k)


def _operand(data: Any, scales: Any, outer: Any, name: str | None) -> Operand:
    """The operand of these arguments of a node, with (fake) tensors."""
    data, scales, outer = (each.meta["val"] if isinstance(each, Node) else each for each in (data, scales, outer))
    return Operand(data, scales, outer, None if name is None else formats.get(name))


def _gathered(node: Node, target: Target) -> Matmul:
    """Few tokens, each with a matrix of its own, which a kernel reads through the index or takes from a copy."""
    a, b = _operand(*node.args[:4]), _operand(*node.args[4:8])
    count, rows, length = _shape(a)
    columns, types = _shape(b)[-2], (operand_type(a), operand_type(b))
    sizes = Sizes(count * rows, columns, length, Experts(count, "gather"))
    dtype: Any = node.args[9]
    if reads_by_index(node):
        problem = Problem(*types, sizes.rows, columns, length, dtype, target, ragged="rows", groups=count)
        return Matmul(sizes, problem, (a.format, b.format))
    problem = Problem(*types, rows, columns, length, dtype, target, None, count, True)
    copied = 2 * stored(b.format, count * columns, length, b.swizzled) if b.format else 0
    return Matmul(sizes, problem, (a.format, b.format), copied=copied)


def _horizontal(node: Node, target: Target) -> Matmul:
    """Products of one A in one launch: as one product of all their columns."""
    weights, scales, outers, name, _, dtype = node.args[4:]
    a, b = _operand(*node.args[:4]), _operand(weights[0], _first(scales), _first(outers), name)
    problem = problem_of(Arguments(a, b, None, dtype), target)
    columns = sum(size(weight.meta["val"].shape[-2]) for weight in weights)
    sizes = Sizes(prod(_shape(a)[:-1]), columns, _shape(a)[-1])
    return Matmul(sizes, _at_captured_sizes(problem), (a.format, b.format))


def _first(values: Any) -> Any:
    """The first of a list; None of an empty one."""
    return values[0] if values else None
