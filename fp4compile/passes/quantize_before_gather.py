"""Quantise rows before a collective gathers them, so that codes and scales are gathered instead of 16-bit numbers.

Entry: `quantize_before_gather(graph)`, on a forward, backward or inference graph after the partitioner, before
`fake_quantize`, which would replace the codes by 16-bit numbers. It changes gathers of activations under sequence
parallelism, and of other tensors whose rows are quantised separately (`lib.row_moves`).

A gather of codes has a second collective for the scales, so it has to save bytes on a link that is known to be slow.
The decision depends on nothing that may differ between ranks, such as numbers of rows, because all ranks have to call
the same collectives.
"""

from torch.fx import Graph, Node

from fp4compile.analysis.gathers import is_gather
from fp4compile.hardware import gathers_through_host
from fp4compile.ops.nodes import Quantise
from fp4compile.passes.lib.row_moves import Move, has_rows, moved_bytes, quantize_before, row_bytes
from fp4compile.templates.launch import on_gpu


def quantize_before_gather(graph: Graph) -> int:
    """Gather codes and scales where quantisers alone read the gathered rows; returns the number of gathers."""
    return quantize_before(graph, _gather_of, _unpaid)


def _gather_of(node: Node) -> Move | None:
    """A node that waits for gathered rows; None for any other node."""
    start = node.args[0] if is_gather(node) else None
    return Move(node, start) if start is not None and len(start.users) == 1 and has_rows(start.args[0]) else None


def _unpaid(move: Move, quantisers: list[Quantise]) -> str | None:
    """The reason that a gather of codes costs more than it saves; None if it saves.

    Two GPUs that gathered activations through the host's memory, at about 20 GB/s, gained 14 % (MXFP8) and 22 %
    (one-level NVFP4) of a forward pass. Over NVLink, MXFP8 lost 40 %.
    """
    if sum(map(moved_bytes, quantisers)) >= row_bytes(move.rows):
        return "codes and scales are no fewer bytes"
    if on_gpu(move.rows.meta["val"]) and not gathers_through_host():
        return "the link between the GPUs is not known to be slow"
    return None
