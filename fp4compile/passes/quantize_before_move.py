"""Quantise rows before they are moved, so that codes and scales are moved instead of 16-bit numbers.

Entry: `quantize_before_move(graph)`, on a forward, backward or inference graph after the partitioner. It runs after
`merge_quantize`, because square blocks that are read in both directions are moved once, and twice: before
`fake_quantize`, which would make 16-bit numbers of codes that a collective could move; and after it, for the 16-bit
numbers that experts read.

Tokens are gathered for their experts, looked up in a table, concatenated, or collected from other processes, and then
quantised. A row whose scales are its own has the same codes wherever it is. So `quantize(move(x))` is
`move(quantize(x))`, bit for bit, applied to codes, block scales and outer scales of rows one by one. Moves are handled
from the last to the first, so the quantiser goes to the start of a chain of moves. What lies in between keeps the rows
(`moves`). Offsets of groups are dropped: a row has the same codes in every group, and the codes of rows of no group are
arbitrary. Scales are moved in the linear layout; `lay_out_scales` swizzles them behind the move.

An outer scale of the whole tensor depends on all moved rows, and has the bits of the quantiser behind the move only if
it is made of their largest magnitude. Processes that gather reduce theirs before they quantise, as one number. In a
device, the rows' magnitudes are moved like the rows, and the largest of them is taken: an index may leave rows out.

Blocks that reach over rows, square or along the columns, are quantised before a gather of whole blocks, and nowhere
else (`whole_blocks`).

A quantiser stays behind the move where its results depend on more than that, and where anything other than quantisers
reads the moved rows, because then both would be moved; `_reason` names the reasons, and the report has them.

A move inside a device has to pay (`_local_reason`), unless it moves what a collective brought. A collective always
does: a network is slower than memory, and the process quantises its own rows, not all rows of the group. What is
decided about a collective depends on nothing that may differ between the processes, such as numbers of rows, because
all have to call the same collectives.
"""

import functools
import math
import operator
from dataclasses import dataclass, field, replace

import torch
from torch.fx import Graph, Node

from fp4compile._compat import statically_true, without_fake_tensors
from fp4compile.analysis.graph import CAST, Quantise, new_node, quantise_of
from fp4compile.analysis.node_kinds import INDUCTORS, base_of, kind_of, readers
from fp4compile.formats import formats
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.passes.fake_quantize import may_return_values
from fp4compile.passes.lib.notes import name_move
from fp4compile.passes.magnitudes import bits_of, largest_of_ranks, magnitude_of
from fp4compile.passes.merge_quantize import share
from fp4compile.passes.moves import (
    Move,
    is_local_move,
    is_masked,
    is_size,
    move_of,
    readers_of,
    replayed,
    rows_before,
    share_equal,
)
from fp4compile.passes.whole_blocks import as_matrix, misfit, reaches_over_rows, results, sent, sent_bytes, sent_places
from fp4compile.templates.launch import on_gpu, target_of

aten = torch.ops.aten

# Bytes that a GPU moves in the time of one more launch: 1.4 us (`hardware.Gpu.launch`) at about 3 TB/s.
LAUNCH_BYTES = 4 * 2**20


def quantize_before_move(graph: Graph) -> int:
    """Move codes and scales where quantisers alone read the moved rows; returns the number of moves."""
    count, known = 0, set(graph.nodes)
    for node in reversed(list(graph.nodes)):
        move = move_of(node)
        users = [] if move is None else [each for each in readers_of(node) if not is_size(each, node)]
        quantisers = [quantise_of(each) for each in users if each.target is QUANTIZE]
        if not quantisers:
            continue
        reason = "its rows are read elsewhere, too" if len(quantisers) < len(users) else _reason(move, quantisers)
        text = f"quantised before {move.name}" if reason is None else f"quantised after {move.name}: {reason}"
        for each in quantisers:
            name_move(each.node, node, text)
        if reason is None:
            _Moving(graph, move).replace(quantisers)
            count += 1
    if count:
        # The tensor may be quantised already, for those who read it where it was; or be moved twice.
        made = set(share_equal([node for node in graph.nodes if node not in known]))
        share(graph)
        share_equal([node for node in graph.nodes if node in made])
    return count


# ---------------------------------------------------------------- which quantisers go before a move


def _reason(move: Move, quantisers: list[Quantise]) -> str | None:
    """Why quantisers, the only readers of the moved rows, stay behind the move; None where they go before it."""
    for each in quantisers:
        reason = _of_more_than_a_row(each, move)
        if reason is not None:
            return reason
    row = _row_bytes(move.node)
    if move.is_collective:
        fewer = sum(map(_moved_bytes, quantisers)) < row
        return None if fewer else "codes and scales are no fewer bytes"
    if _is_behind_collective(move, quantisers) and all(map(_inductor_moves, quantisers)):
        return None
    return _local_reason(move, quantisers, row)


def _is_behind_collective(move: Move, quantisers: list[Quantise]) -> bool:
    """Whether quantisers that go before a move inside a device may then go before a collective that brought the rows.

    So for exchanged tokens that are sorted by expert: bytes on the wire cost more than what the move does.
    """
    for source in map(rows_before, move.sources):
        before = move_of(source)
        if before is None or {each for each in readers_of(source) if not is_size(each, source)} != {move.node}:
            continue
        if _reason(before, quantisers) is None if before.is_collective else _is_behind_collective(before, quantisers):
            return True
    return False


def _is_brought(move: Move) -> bool:
    """Whether a collective brought some of the rows."""
    before = [found for source in move.sources if (found := move_of(rows_before(source))) is not None]
    return any(each.is_collective or _is_brought(each) for each in before)


def _of_more_than_a_row(quantise: Quantise, move: Move) -> str | None:
    """On what else than its own row, or than all moved rows' largest magnitude, a row of codes and scales depends.

    Where blocks reach over rows: on what else than the rows of one process, or than that magnitude.
    """
    reason = misfit(quantise, move) if reaches_over_rows(quantise) else None
    if reason is not None:
        return reason
    if quantise.seed is not None:
        return "elements are rounded stochastically"
    if quantise.scale_rule != "amax" or quantise.prologue or quantise.each_matrix:
        return "it is no quantiser of activations alone"
    made = [each for each in (quantise.outer, quantise.amax) if each is not None]
    if any(each.meta["val"].dim() for each in made):
        return "each row has a given scale"
    if not all(each < move.start or (each.op != "placeholder" and not each.all_input_nodes) for each in made):
        return "its outer scale is computed behind the move"
    if not _makes_outer(quantise):
        return None
    if quantise.offs is not None:
        return "each group has an outer scale of its own"
    if quantise.hadamard:
        return "its outer scale is made of transformed rows"
    if is_masked(quantise.x):
        return "its outer scale is made of rows that are masked behind the move"
    if move.is_exchange:
        return "its outer scale is made of the rows that arrive"
    if not move.is_collective and _is_brought(move):
        return "its outer scale is made of some of the rows that arrive"  # on one process of none, maybe
    if not all(statically_true(_rows(each) > 0) for each in (move.node, *move.sources)):
        return "there may be no rows to make its outer scale of"
    return None


def _makes_outer(quantise: Quantise) -> bool:
    """Whether the quantiser makes an outer scale of all of its rows."""
    return formats.get(quantise.format).outer == "tensor" and quantise.outer is None and quantise.amax is None


def _local_reason(move: Move, quantisers: list[Quantise], row: int) -> str | None:
    """Why a move inside a device does not pay; None if it does. row: bytes of a moved row.

    No more rows may be quantised than before, so a few rows of a large table are not worth quantising the table. Sizes
    have to be known. The bytes that are saved have to be worth the launches that are added. Where `fake_quantize` would
    make the codes 16-bit numbers, it does so first. Nothing is saved where Inductor computes the rows while it moves
    them.
    """
    before, after = _rows(move.node), [_rows(source) for source in move.sources]
    if not all(isinstance(rows, int) for rows in (before, *after)):
        return "the numbers of rows are not known"
    if sum(after) > before:
        return "more rows would be quantised"
    if any(map(may_return_values, quantisers)):
        return "its products read 16-bit numbers"
    if not all(map(_inductor_moves, quantisers)):
        return "Inductor has no kernels with the dtype of its scales"
    if not all(map(_in_memory, move.sources)):
        return "the rows are computed while they are moved"
    saved = 2 * before * row + sum(_saved(each, before, sum(after), row) for each in quantisers)
    launches = sum(_added_launches(each, len(move.sources)) for each in quantisers) - 1
    pays = saved >= launches * (LAUNCH_BYTES if on_gpu(move.node.meta["val"]) else 0)
    return None if pays else "the launches cost more than the bytes"


def _saved(quantise: Quantise, before: int, after: int, row: int) -> int:
    """Bytes that are not read and written for a quantiser before a move. The rows are not moved at all, besides.

    before, after: the rows that it reads now and then. row: bytes of a row.
    """
    codes = _moved_bytes(quantise)
    saved = before * (row - codes) - after * (row + codes)
    if quantise.spec.swizzled:
        saved -= 2 * before * _bytes_of(quantise, 1)
    return saved + (before - after) * row * _makes_outer(quantise)  # which reads the rows once more


def _added_launches(quantise: Quantise, sources: int) -> int:
    """The moves of its results, and a quantiser for each source; the layout of scales; magnitudes of each source's rows
    (the largest of the moved ones is found instead of the largest element)."""
    return len(_parts(quantise)) + sources - 1 + quantise.spec.swizzled + sources * _makes_outer(quantise)


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


def _row_bytes(node: Node) -> int:
    value = node.meta["val"]
    return value.shape[-1] * value.element_size()


def _parts(quantise: Quantise) -> list[int]:
    """The places of the results that are moved: codes, block scales, and outer scales of rows."""
    if reaches_over_rows(quantise):
        return sent_places(quantise)
    fmt = formats.get(quantise.format)
    there = (True, fmt.scale is not None and not quantise.values, fmt.outer == "row" and quantise.outer is None)
    return [place for place, is_there in enumerate(there) if is_there]


def _moved_bytes(quantise: Quantise) -> float:
    """Bytes of the codes and scales of one row."""
    if reaches_over_rows(quantise):
        return sent_bytes(quantise)
    return sum(_bytes_of(quantise, place) for place in _parts(quantise))


def _bytes_of(quantise: Quantise, place: int) -> int:
    """Bytes of a row of one result of a quantiser; block scales (place 1) count as they are in the linear layout."""
    value = quantise.node.meta["val"][place]
    if place == 1:
        elements = quantise.x.meta["val"].shape[-1]
        return -(-elements // formats.get(quantise.format).block_cols) * value.element_size()
    return value.shape[-1] * value.element_size()


def _in_memory(node: Node) -> bool:
    """Whether a tensor is in memory anyway, and is not computed by the kernel of Inductor's that moves it."""
    base = base_of(node)
    return kind_of(base) not in INDUCTORS or is_local_move(base) or len(set(readers(base))) > 1


# ---------------------------------------------------------------- the new nodes


@dataclass
class _Moving:
    """Puts quantisers before a move. largest: the moved rows' largest magnitude, once a quantiser has asked for it."""

    graph: Graph
    move: Move
    largest: Node | None = field(default=None)

    def replace(self, quantisers: list[Quantise]) -> None:
        """Quantise the sources, move the results, and let the quantisers' users read these; erase the move.

        All collectives start where the one did, and are waited for where that was, so that they overlap with what lies
        in between. The sizes of a reshape may be computed as late as the reader.
        """
        graph, move = self.graph, self.move
        for reader in quantisers:
            if reader.outer is not None and not reader.outer < move.start:
                move.start.prepend(reader.outer)
            with graph.inserting_before(move.start):
                quantised = self._quantised(reader)
                moved = {place: self._started(quantised, place) for place in _parts(reader)}
            if move.is_collective:
                with graph.inserting_before(move.node):
                    wait, meta = move.node.target, move.node.meta
                    moved = {place: new_node(graph, wait, (node,), meta) for place, node in moved.items()}
            for size in [each for each in readers_of(move.node) if is_size(each, move.node)]:
                size.replace_input_with(size.args[0], moved[0])
            with graph.inserting_before(reader.node):
                found = self._results(reader, moved)
                for user in list(reader.node.users):
                    place = user.args[1]
                    if place not in found:  # an empty tensor, or the outer scale, which all sources have
                        found[place] = new_node(graph, operator.getitem, (quantised[0], place), user.meta)
                    user.replace_all_uses_with(found[place])
        _erase(move.node)
        if move.is_collective:
            graph.erase_node(move.start)

    def _quantised(self, reader: Quantise) -> list[Node]:
        """The sources, quantised."""
        amax = reader.amax
        if _makes_outer(reader):
            self.largest = amax = self.largest or self._largest()
        if reaches_over_rows(reader):
            reader, sources = sent(reader), [as_matrix(self.graph, source) for source in self.move.sources]
        else:
            reader, sources = replace(reader, offs=None, layout="linear"), self.move.sources
        return [replace(reader, x=source, amax=amax).new(self.graph, reader.node.meta) for source in sources]

    def _largest(self) -> Node:
        """The largest magnitude of the moved rows, float32 []; NaN where one is NaN."""
        graph, move, meta = self.graph, self.move, self.move.node.meta

        def new(target, *args) -> Node:
            return new_node(graph, target, args, meta)

        magnitudes = [new(aten.abs.default, source) for source in move.sources]
        if not move.is_collective:
            rows = move.new(graph, [new(aten.amax.default, each, [-1], True) for each in magnitudes])
            return new(CAST, new(aten.amax.default, rows), torch.float32)
        largest = new(CAST, new(aten.amax.default, magnitudes[0]), torch.float32)
        bits = new(aten.reshape.default, bits_of(graph, largest, meta), [1])
        found = largest_of_ranks(graph, bits, move.start.args[2], move.start.meta)
        return magnitude_of(graph, new(aten.reshape.default, found, []), meta)

    def _started(self, quantised: list[Node], place: int) -> Node:
        """The start of the move of one result of the quantised sources.

        It is moved as bytes if its elements are bytes: neither torch nor libraries of collectives move all such dtypes.
        """
        graph = self.graph
        tensors = [new_node(graph, operator.getitem, (each, place), each.meta) for each in quantised]
        if _as_bytes(tensors[0].meta["val"].dtype):
            tensors = [new_node(graph, aten.view.dtype, (each, torch.uint8), each.meta) for each in tensors]
        return self.move.new(graph, tensors)

    def _results(self, reader: Quantise, moved: dict[int, Node]) -> dict[int, Node]:
        """Moved results, by their places, in the shapes, the layout and the dtypes that the reader's results have."""
        if reaches_over_rows(reader):
            found = results(self.graph, reader, self.move, moved)
            return {place: self._typed(reader, node, place) for place, node in found.items()}
        return {place: self._typed(reader, self._of_rows(reader, node, place), place) for place, node in moved.items()}

    def _of_rows(self, reader: Quantise, moved: Node, place: int) -> Node:
        """A moved result that has a row for each moved row, in the order of rows and the layout of the reader's."""
        moved = replayed(self.graph, reader.x, self.move.node, moved, lambda: _of_zeros(reader.format, place))
        if place == 1 and reader.spec.swizzled:
            return new_node(self.graph, LAY_OUT_SCALES, (moved, reader.offs), reader.node.meta)
        return moved

    def _typed(self, reader: Quantise, moved: Node, place: int) -> Node:
        """A moved result in the dtype of the reader's."""
        dtype = reader.node.meta["val"][place].dtype
        return new_node(self.graph, aten.view.dtype, (moved, dtype), moved.meta) if _as_bytes(dtype) else moved


@functools.cache
def _of_zeros(format: str, place: int) -> float:
    """The elements of a row of zeros' codes, block scales or outer scale, as numbers or, where they are that, bytes."""
    with without_fake_tensors():
        found = QUANTIZE(torch.zeros(1, formats.get(format).block_cols), format, [-1])[place]
        return (found.view(torch.uint8) if _as_bytes(found.dtype) else found).view(-1)[0].item()


def _as_bytes(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype != torch.uint8


def _erase(node: Node) -> None:
    """Erase a node, and all nodes that read it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
