"""The codes of a sharded weight as bytes that ranks exchange: the sent bytes, and the memory for the gathered ones.

A weight [N, K] is sharded along N. `Direction` is one direction of its codes: along the rows for the forward matmul,
along the columns for the matmul of the input gradient. A rank quantises only its rows; in both directions the codes
have the bits of the whole weight's, because no block reaches into another rank's rows. A scale that depends on all rows
is made of the largest magnitudes over the group, the argument `amax` of the quantiser.

Shards of weights of one size are quantised together, [weights, rows, K]: before a gather, the number of launches counts
more than their work, because each waits for multiprocessors among the matmuls that run meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.quantize_spec import COLUMNS, ROWS
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights.buffers import Part, parts_of
from fp4compile.weights.scale_layout import laid_out

Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_ALIGNMENT = 16  # bytes: FSDP2 concatenates all parameters of a module in one buffer


@dataclass(frozen=True, eq=False)
class GatheredPart:
    """The memory of a gathered part of a weight: the codes, block scales, or global or row scales of one direction.

    part: of the whole weight. arriving: uint8, the gathered bytes, rank by rank. lies_there: whether `part` is this
    memory, so that nothing has to be copied.
    """

    part: torch.Tensor
    arriving: torch.Tensor
    lies_there: bool

    @property
    def memory(self) -> torch.Tensor:
        """The tensor with all memory of the part."""
        return self.arriving if self.lies_there else self.part


@dataclass(frozen=True)
class Direction:
    """One direction of a weight's codes.

    format: its name. dim: -1 along the rows, -2 along the columns. size: (N, K) of the whole weight. layout: of the
    whole weight's block scales, "linear" or "swizzled".
    """

    format: str
    dim: int
    size: tuple[int, int]
    layout: str = "linear"

    @cached_property
    def block_format(self) -> BlockFormat:
        return formats.get(self.format)

    @property
    def scale_over_ranks(self) -> str | None:
        """The kind of scale that depends on all ranks: "tensor" (a global scale), "row" (row scales) or None."""
        outer = self.block_format.outer
        return None if outer == "row" and self.dim == ROWS else outer

    def next_parts(self, tensors: Iterator[torch.Tensor]) -> Parts:
        """Take codes, block scales and global or row scale from an iterator; None for parts that the format lacks."""
        data, scales, outer = (None if one is None else next(tensors) for one in self.shapes(self.size[0]))
        assert data is not None
        return data, scales, outer

    def misfit(self, ranks: int) -> str | None:
        """The reason that ranks cannot quantise their rows separately; None if they can."""
        n = self.size[0]
        if n % ranks:
            return f"its {n} rows do not divide evenly among {ranks} ranks"
        fmt, rows = self.block_format, n // ranks
        block = fmt.block_cols if self.dim == COLUMNS else fmt.block[0] if fmt.block else 1
        return f"the {rows} rows of a rank cut blocks of {block} rows ({self.format})" if rows % block else None

    def shapes(self, rows: int) -> tuple[Part | None, ...]:
        """Shape and dtype of codes, linear block scales, global or row scales of some rows; None for missing ones."""
        return parts_of(self.format, (rows, self.size[1]), self.dim)

    # ------------------------------------------------------------ sending

    def encode(self, shards: torch.Tensor, magnitudes: torch.Tensor | None) -> list[torch.Tensor]:
        """Quantise weights to codes, block scales and global or row scales, each uint8 [weights, bytes].

        shards: a rank's rows of weights of one size, [weights, rows, K]. magnitudes: the largest ones over all ranks,
        see `magnitudes_of`; None if no scale depends on them.
        """
        fmt = self.block_format
        each = fmt.outer == "tensor"
        amax = magnitudes if magnitudes is None else magnitudes.view(-1) if each else magnitudes.unsqueeze(-1)
        data, scales, outer = QUANTIZE(shards, self.format, [self.dim], each_matrix=each, amax=amax)
        if each:  # padded, to align the next part
            outer = outer.view(-1, 1).repeat(1, _ALIGNMENT // outer.element_size())
        parts = [data, *([scales] if fmt.scale else []), *([outer] if fmt.outer else [])]
        return [part.contiguous().view(torch.uint8).view(len(shards), -1) for part in parts]

    # ------------------------------------------------------------ receiving

    def places(self, device: torch.device, ranks: int) -> list[GatheredPart | None]:
        """Places for the codes, block scales and global or row scale of the whole weight, without memory."""
        sent, whole = self.shapes(self.size[0] // ranks), self.shapes(self.size[0])
        return [
            None if one is None or all_of_it is None else self._place(i, one, all_of_it[0], device, ranks)
            for i, (one, all_of_it) in enumerate(zip(sent, whole, strict=True))
        ]

    def _place(
        self, i: int, sent: Part, shape: tuple[int, ...], device: torch.device, ranks: int
    ) -> GatheredPart:  # fmt: skip
        dtype = sent[1]
        size = torch.Size(sent[0]).numel() * dtype.itemsize
        if i == 2 and not shape:
            size = _ALIGNMENT
        arriving = torch.empty(ranks * size, dtype=torch.uint8, device=device)
        swizzled = i == 1 and self.layout == "swizzled"
        if swizzled:
            lanes = self.size[0] if self.dim == ROWS else self.size[1]
            shape = (swizzled_numel(lanes, shape[-1]),)
        # A global or row scale that depends on all rows is sent by each rank; the first rank's is the whole weight's.
        lies_there = (self.dim == ROWS and not swizzled) or (i == 2 and self.scale_over_ranks is not None)
        part = torch.empty(0 if lies_there else shape, dtype=dtype, device=device)
        if lies_there:
            strides = torch.empty(shape, device="meta").stride()
            part.set_(arriving.untyped_storage(), 0, shape, strides)
        for tensor in (part, arriving):
            tensor.untyped_storage().resize_(0)
        return GatheredPart(part, arriving, lies_there)

    def copies(self, places: list[GatheredPart | None], ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(destination, source) of each copy for parts of the whole weight that are the gathered bytes reordered."""
        found = []
        for i, (place, sent) in enumerate(zip(places, self.shapes(self.size[0] // ranks), strict=True)):
            swizzled = i == 1 and self.layout == "swizzled"
            if place is not None and sent is not None and not place.lies_there and not swizzled:
                lanes = sent[0][0]
                word = _word(place.arriving.numel() // (ranks * lanes))
                pieces = place.arriving.view(word).view(ranks, lanes, -1)
                found.append((place.part.view(word).view(lanes, ranks, -1), pieces.transpose(0, 1)))
        return found

    def swizzled(self, places: list[GatheredPart | None]) -> list[torch.Tensor]:
        """The block scales that `swizzle` writes, and their gathered bytes; an empty list for linear scales."""
        scales = places[1]
        return [] if scales is None or self.layout != "swizzled" else [scales.part, scales.arriving]

    def swizzle(self, whole: torch.Tensor, arriving: torch.Tensor, ranks: int) -> None:
        """Write the whole weight's swizzled block scales. arriving: the gathered bytes, rank by rank."""
        _, sent, _ = self.shapes(self.size[0] // ranks)
        assert sent is not None
        pieces = arriving.view(ranks, sent[0][0], -1)
        joined = pieces.flatten(0, 1) if self.dim == ROWS else pieces.transpose(0, 1).flatten(1)
        lanes = self.size[0] if self.dim == ROWS else self.size[1]
        linear = joined.view(whole.dtype)
        whole.copy_(laid_out(linear, self.block_format, lanes, tuple(linear.shape), "swizzled"))

    def transpose(self, codes: Parts, into: Parts) -> None:
        """Write the codes of this direction from those of the other one: in square blocks, they are the same numbers.

        codes: along the rows. into: along the columns.
        """
        fmt, (n, k) = self.block_format, self.size
        data, scales, outer = codes
        assert data is not None and scales is not None and into[1] is not None
        # 4-bit codes lie two a byte, along the rows and along the columns.
        turned = reference.pack(reference.unpack(data)[:, :k].t()) if fmt.packed else as_integers(data)[:, :k].t()
        into[0].view(torch.uint8).copy_(turned.view(torch.uint8))
        blocks = (ceil_div(n, fmt.block_cols), ceil_div(k, fmt.block_cols))
        of_blocks = as_integers(laid_out(scales, fmt, n, blocks, "linear")).t().contiguous().view(scales.dtype)
        into[1].copy_(laid_out(of_blocks, fmt, k, blocks[::-1], self.layout))
        if outer is not None and into[2] is not None:
            into[2].copy_(outer)


def magnitudes_of(stacks: Sequence[tuple[Direction, torch.Tensor]]) -> list[torch.Tensor]:
    """The largest magnitudes of each weight's rows on this rank, of which scales over all ranks are made.

    stacks: directions with such scales, each with its weights' shards [weights, rows, K]. Returns for each of them
    float32 [weights, 1], or one for each column. One set of launches computes them for all stacks.
    """
    of_weights = [stack for one, stack in stacks if one.block_format.outer == "tensor"]
    shards = [shard for stack in of_weights for shard in stack.unbind()]
    largest = torch.stack(torch._foreach_norm(shards, torch.inf, dtype=torch.float32)) if shards else torch.empty(0)
    found = iter(largest.unsqueeze(1).split([len(stack) for stack in of_weights]))
    return [
        next(found)
        if one.block_format.outer == "tensor"
        else torch.linalg.vector_norm(stack, torch.inf, dim=1, dtype=torch.float32)
        for one, stack in stacks
    ]


def _word(size: int) -> torch.dtype:
    """The widest integer dtype for copies of pieces of `size` bytes: one byte at a time is slow."""
    return next((word for word in (torch.int64, torch.int32, torch.int16) if size % word.itemsize == 0), torch.uint8)
