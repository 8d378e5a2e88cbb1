"""Gathers of whole blocks: quantisers whose blocks reach over rows, in the processes that have some of the rows.

Blocks reach over rows where they are square, and along the columns. Where each process has whole blocks of rows, the
blocks of the gathered rows are blocks of one process, with the same codes and scales. A result along the columns has a
row for each column of the tensor, of which each process makes a part: behind the gather, the parts are put side by
side. Square blocks are the same numbers in both directions: where both are read, the codes along the rows are gathered,
and transposed.

`misfit` says why a quantiser stays behind the gather, `sent` what a process quantises, `sent_bytes` how much that is,
and `results` makes nodes of what the gathers of `sent` bring.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch.fx import Graph, Node

from fp4compile.analysis.graph import Quantise, new_node
from fp4compile.formats import formats
from fp4compile.formats.quantize_spec import COLUMNS, ROWS
from fp4compile.formats.square import scales_of_rows, transposed_codes, transposed_scales
from fp4compile.ops.quantize import LAY_OUT_SCALES
from fp4compile.passes.lib.traced import traced
from fp4compile.passes.moves import Move, runs_of_a_rank


def reaches_over_rows(quantise: Quantise) -> bool:
    """Whether a quantiser has blocks of several rows, or scales that are made of several rows."""
    return quantise.dims != (ROWS,) or formats.get(quantise.format).square


def misfit(quantise: Quantise, move: Move) -> str | None:
    """Why processes cannot quantise their rows for a quantiser whose blocks reach over rows; None where they can."""
    fmt, columns = formats.get(quantise.format), COLUMNS in quantise.dims
    if not move.is_collective or move.is_exchange:
        return "columns are quantised" if columns else "blocks are square"
    if quantise.offs is not None:
        return "columns of groups are quantised"
    if quantise.hadamard:
        return "columns are transformed"
    if fmt.outer == "row":
        return "the scale of a column is made of the rows of all ranks"
    if quantise.values:
        return "its products read 16-bit numbers"
    runs = runs_of_a_rank(quantise.x, move)
    if runs is None or quantise.x.meta["val"].dim() != 2:
        return "its rows are put in another order, or masked, behind the move"
    rows = _matrix_size(move.sources[0])[0]
    if not isinstance(rows, int) or not isinstance(runs, int):
        return "the numbers of rows are not known"
    if rows // runs % fmt.block_cols:
        return f"the {rows // runs} rows of a rank cut blocks of {fmt.block_cols} rows"
    return None


def sent(quantise: Quantise) -> Quantise:
    """The quantiser of the rows of one process, but for its argument x."""
    return replace(quantise, dims=(ROWS,) if _is_transposed(quantise) else quantise.dims, layout="linear")


def _is_transposed(quantise: Quantise) -> bool:
    """Whether codes along the columns are made behind the gather, of the codes along the rows.

    Not where something reads the outer scale of the columns, an empty tensor because they share the rows'.
    """
    square = formats.get(quantise.format).square and quantise.spec.both
    return square and not any(user.args[1] == 5 for user in quantise.node.users)


def sent_places(quantise: Quantise) -> list[int]:
    """The places of codes and block scales among the results of `sent`."""
    return [3 * i + part for i in range(len(sent(quantise).dims)) for part in (0, 1)]


def sent_bytes(quantise: Quantise) -> float:
    """Bytes of codes and block scales for each row of the tensor."""
    fmt, spec = formats.get(quantise.format), sent(quantise).spec
    block = torch.empty(fmt.block_cols, quantise.x.meta["val"].shape[-1], device="meta")
    total = 0
    for dim in spec.dims:
        codes, scales, _ = map(math.prod, spec.shapes(block, 0, dim))
        total += codes * fmt.data_dtype.itemsize + scales * fmt.scale_dtype.itemsize
    return total / fmt.block_cols


def as_matrix(graph: Graph, source: Node) -> Node:
    """A tensor's rows as a matrix."""
    size = _matrix_size(source)
    same = source.meta["val"].dim() == 2
    return source if same else new_node(graph, torch.ops.aten.reshape.default, (source, [*size]), source.meta)


def results(graph: Graph, reader: Quantise, move: Move, gathered: dict[int, Node]) -> dict[int, Node]:
    """The results of a quantiser behind a gather, by their places, as bytes where they are FP8 numbers.

    gathered: what arrives of each of `sent_places`, one process after the other.
    """
    fmt, made = formats.get(reader.format), {}
    ranks, runs, size = move.start.args[1], runs_of_a_rank(reader.x, move), _matrix_size(reader.x)
    for place, node in gathered.items():
        along_rows = sent(reader).dims[place // 3] == ROWS
        in_order = _rows_in_order if along_rows else _side_by_side
        as_they_are = along_rows and runs == 1
        made[place] = node if as_they_are else traced(graph, partial(in_order, ranks=ranks, runs=runs), [node])
    if _is_transposed(reader):
        codes = partial(transposed_codes, fmt=fmt, cols=size[1])
        made[3] = traced(graph, lambda data: codes(data).contiguous(), [made[0]])
        made[4] = traced(graph, transposed_scales, [made[1]])
    for i, dim in enumerate(reader.dims if reader.spec.swizzled else ()):
        scales = made[3 * i + 1]
        if fmt.square:
            each_row = partial(scales_of_rows, fmt=fmt, rows=size[0] if dim == ROWS else size[1])
            scales = traced(graph, each_row, [scales])
        made[3 * i + 1] = new_node(graph, LAY_OUT_SCALES, (scales, None), reader.node.meta)
    return made


def _matrix_size(node: Node) -> tuple:
    """Rows and columns of a tensor whose dimensions but the last count as rows."""
    *rows, columns = node.meta["val"].shape
    return math.prod(rows), columns


def _rows_in_order(gathered: torch.Tensor, ranks: int, runs: int) -> torch.Tensor:
    """Rows of `ranks` processes, one process after the other: the first run of each comes first, then the second."""
    rows, columns = gathered.shape
    each = rows // (ranks * runs)
    return gathered.reshape(ranks, runs, each, columns).transpose(0, 1).reshape(rows, columns)


def _side_by_side(gathered: torch.Tensor, ranks: int, runs: int) -> torch.Tensor:
    """[ranks * columns, part] of `ranks` processes -> [columns, ranks * part], in the order of `_rows_in_order`."""
    columns, part = gathered.shape[0] // ranks, gathered.shape[1]
    pieces = gathered.reshape(ranks, columns, runs, part // runs).permute(1, 2, 0, 3)
    return pieces.reshape(columns, ranks * part).contiguous()  # a part of one column is no copy yet
