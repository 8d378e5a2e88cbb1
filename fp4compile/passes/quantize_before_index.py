"""Quantise rows before an index gathers them, so that a row that is gathered several times is quantised once.

Entry: `quantize_before_index(graph)`, on a forward, backward or inference graph after the partitioner, after
`fake_quantize`, whose 16-bit dequantised values are indexed too. A model sorts tokens by expert, each token once for
each of its experts, and then quantises them; instead their codes and scales are sorted (`lib.row_moves`), where that
saves more bytes than the launches cost.
"""

import math

import torch
from torch.fx import Graph, Node

from fp4compile.formats import formats
from fp4compile.ops.nodes import RESHAPES, Quantise, is_pointwise
from fp4compile.passes.lib.row_moves import (
    Move,
    bytes_of,
    has_rows,
    moved_bytes,
    parts_of,
    quantize_before,
    readers_of,
    row_bytes,
)
from fp4compile.templates.launch import on_gpu, target_of

# Bytes that a GPU moves in the time of one more launch: 1.4 us (`hardware.Gpu.launch`) at about 3 TB/s.
LAUNCH_BYTES = 4 * 2**20


def quantize_before_index(graph: Graph) -> int:
    """Index codes and scales where quantisers alone read the indexed rows; returns the number of indexings."""
    return quantize_before(graph, _index_of, _unpaid)


def _index_of(node: Node) -> Move | None:
    """A node that gathers whole rows of a tensor by index; None for any other node."""
    if node.target is not torch.ops.aten.index.Tensor or not has_rows(node.args[0]):
        return None
    return Move(node, node) if len(node.args[1]) < node.args[0].meta["val"].dim() else None


def _unpaid(move: Move, quantisers: list[Quantise]) -> str | None:
    """The reason that an index of codes costs more than it saves; None if it saves.

    No more rows may be quantised than before, so a few rows of a large tensor are not worth quantising all of it. Sizes
    have to be known. Nothing is saved where Inductor computes the rows while it moves them.
    """
    before, after, row = _rows(move.rows), _rows(move.source), row_bytes(move.rows)
    if not isinstance(before, int) or not isinstance(after, int):
        return "the numbers of rows are not known"
    if after > before:
        return "more rows would be quantised"
    if not all(map(_inductor_moves, quantisers)):
        return "Inductor has no kernels with the dtype of its scales"
    if not _in_memory(move.source):
        return "the rows are computed while they are moved"
    saved = 2 * before * row + sum(_saved(each, before, after, row) for each in quantisers)
    launches = sum(len(parts_of(each)) + each.spec.swizzled for each in quantisers) - 1
    pays = saved >= launches * (LAUNCH_BYTES if on_gpu(move.rows.meta["val"]) else 0)
    return None if pays else "the launches cost more than the bytes"


def _saved(quantise: Quantise, before: int, after: int, row: int) -> float:
    """Bytes that a quantiser before a move need not read and write, and bytes of the rows, which are not moved.

    before, after: the rows that the quantiser reads before and after the move. row: bytes of a row.
    """
    codes = moved_bytes(quantise)
    laid_out = 2 * before * bytes_of(quantise, 1) if quantise.spec.swizzled else 0
    return before * (row - codes) - after * (row + codes) - laid_out


def _inductor_moves(quantise: Quantise) -> bool:
    """Whether Inductor writes kernels with the types of the results: C++ has no E8M0, Triton no FP8 for old GPUs."""
    value = quantise.x.meta["val"]
    if quantise.values:
        return True
    if on_gpu(value):
        return target_of(value.device).float8_matrix_units
    return formats.get(quantise.format).scale != "e8m0"


def _rows(node: Node) -> int | torch.SymInt:
    return math.prod(node.meta["val"].shape[:-1])


def _in_memory(node: Node) -> bool:
    """Whether a tensor is in memory anyway, not computed by Inductor's kernel that moves it."""
    while node.target in RESHAPES:
        node = node.args[0]
    return not is_pointwise(node) or len(set(readers_of(node))) > 1
