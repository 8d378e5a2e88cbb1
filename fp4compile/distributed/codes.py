"""The codes of a sharded weight as bytes that ranks exchange: what a rank sends, and the whole weight's tensors.

A weight [N, K] is sharded along N. `Direction` is one direction of its codes: along the rows for the forward product,
along the columns for the product of the input gradient. A rank quantises its rows alone; in both directions the codes
are the bits that the whole weight would have, because no block reaches into another rank's rows. A scale that depends
on all rows is made of the largest magnitudes over the group: they are appended to the rank's rows for quantising, and
cut off again. So the quantiser itself makes the scale, as it does for a whole weight.
"""

import functools
from dataclasses import dataclass
from functools import cached_property

import torch

from fp4compile.formats import formats, reference
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.quantize_spec import COLUMNS, ROWS, QuantizeSpec
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights.scale_layout import laid_out

Parts = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
_ALIGNMENT = 16  # bytes: FSDP2 lays all parameters of a module into one buffer


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
    def depends_on_all_rows(self) -> bool:
        """Whether a scale is made of elements of several ranks."""
        outer = self.block_format.outer
        return outer == "tensor" or (outer == "row" and self.dim == COLUMNS)

    def misfit(self, ranks: int) -> str | None:
        """Why ranks cannot quantise their rows alone; None where they can."""
        n = self.size[0]
        if n % ranks:
            return f"its {n} rows do not divide evenly among {ranks} ranks"
        fmt, rows = self.block_format, n // ranks
        block = fmt.block_cols if self.dim == COLUMNS else fmt.block[0] if fmt.block else 1
        return f"the {rows} rows of a rank cut blocks of {block} rows ({self.format})" if rows % block else None

    @property
    def count_of_magnitudes(self) -> int:
        """How many numbers `magnitudes` returns."""
        return self.size[1] if self.block_format.outer == "row" else 1

    def magnitudes(self, shard: torch.Tensor) -> torch.Tensor:
        """The largest magnitudes of a rank's rows that a scale depends on: [1], or one for each column."""
        each = self.block_format.outer == "row"
        return torch.linalg.vector_norm(shard, torch.inf, dim=0 if each else None).view(-1)

    def shapes(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
        """Shape and dtype of the codes, linear block scales and outer scale of some rows; None for a missing part."""
        return _shapes(self, rows)

    def parts(self, device: torch.device) -> Parts:
        """Empty tensors for the codes, block scales and outer scale of the whole weight."""
        made = [
            None if part is None else torch.empty(part[0], dtype=part[1], device=device)
            for part in self.shapes(self.size[0])
        ]
        data, scales, outer = made
        assert data is not None
        if scales is not None and self.layout == "swizzled":
            lanes = self.size[0] if self.dim == ROWS else self.size[1]
            scales = scales.new_empty(swizzled_numel(lanes, scales.shape[-1]))
        return data, scales, outer

    # ------------------------------------------------------------ what a rank sends

    def bytes_of(self, ranks: int) -> list[int]:
        """The bytes of codes, block scales and outer scale that a rank sends; 0 for a missing part."""
        found = []
        for part in self.shapes(self.size[0] // ranks):
            shape, dtype = part or ((0,), torch.uint8)
            found.append(torch.Size(shape).numel() * dtype.itemsize)
        return found

    def encode(self, shard: torch.Tensor, magnitudes: torch.Tensor | None) -> list[torch.Tensor]:
        """The bytes of a rank's rows.

        magnitudes: the largest magnitudes over all ranks, see `magnitudes`; None where no scale depends on them.
        """
        rows, fmt = shard.shape[0], self.block_format
        if magnitudes is not None:
            below = shard.new_zeros(max(fmt.block_cols, fmt.block[0] if fmt.block else 1), shard.shape[1])
            below[0, : magnitudes.numel()] = magnitudes
            shard = torch.cat((shard, below))
        found = QUANTIZE(shard, self.format, [self.dim])
        kept = [
            part if part is None else _cut(tensor, part[0])
            for tensor, part in zip(found, self.shapes(rows), strict=True)
        ]
        return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in kept if tensor is not None]

    # ------------------------------------------------------------ what arrives

    def decode(self, gathered: torch.Tensor, into: Parts) -> None:
        """Write the whole weight's codes and scales. gathered: uint8 [ranks, bytes], as `encode` orders them."""
        ranks = gathered.shape[0]
        data, scales, outer = self.shapes(self.size[0] // ranks)
        codes, of_scales, of_outer = gathered.split(self.bytes_of(ranks), 1)
        for whole, part, sent in ((into[0], data, codes), (into[1], scales, of_scales)):
            if whole is not None and part is not None:
                self._join(sent, part[0], whole)
        if into[2] is not None and self.depends_on_all_rows:
            into[2].view(-1).view(torch.uint8).copy_(of_outer[0])  # all ranks sent the same
        elif into[2] is not None and outer is not None:
            self._join(of_outer, outer[0], into[2])

    def transpose(self, codes: Parts, into: Parts) -> None:
        """Write this direction's codes, made of the other direction's: in square blocks, they are the same numbers.

        codes: along the rows. into: along the columns.
        """
        fmt, (n, k) = self.block_format, self.size
        data, scales, outer = codes
        assert data is not None and scales is not None and into[1] is not None
        if fmt.packed:
            into[0].copy_(reference.pack(reference.unpack(data)[:, :k].t()))
        else:
            into[0].view(torch.uint8).copy_(data.view(torch.uint8)[:, :k].t())
        blocks = (ceil_div(n, fmt.block_cols), ceil_div(k, fmt.block_cols))
        turned = laid_out(scales, fmt, n, blocks, "linear").view(torch.uint8).t().contiguous().view(scales.dtype)
        into[1].copy_(laid_out(turned, fmt, k, blocks[::-1], self.layout))
        if outer is not None and into[2] is not None:
            into[2].copy_(outer)

    def _join(self, gathered: torch.Tensor, shape: tuple[int, ...], whole: torch.Tensor) -> None:
        """Write one part of the whole weight. gathered: its bytes [ranks, bytes]. shape: of a rank's part."""
        pieces = gathered.unflatten(1, (shape[0], shape[1] * whole.element_size()))
        joined = pieces.flatten(0, 1) if self.dim == ROWS else pieces.transpose(0, 1).flatten(1)
        if whole.dim() == 2:
            whole.view(torch.uint8).copy_(joined)
            return
        lanes = self.size[0] if self.dim == ROWS else self.size[1]
        linear = joined.contiguous().view(whole.dtype)
        whole.copy_(laid_out(linear, self.block_format, lanes, tuple(linear.shape), "swizzled"))


@functools.cache  # for FSDP2's host thread, which asks at every gather
def _shapes(direction: Direction, rows: int) -> list[tuple[tuple[int, ...], torch.dtype] | None]:
    fmt = direction.block_format
    spec = QuantizeSpec(fmt, (direction.dim,))
    data, scales, outer = spec.shapes(torch.empty(rows, direction.size[1], device="meta"), 0, direction.dim)
    return [
        (data, fmt.data_dtype),
        (scales, fmt.scale_dtype) if fmt.scale else None,
        (outer, torch.float32) if fmt.outer else None,
    ]


def _cut(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The part of a tensor that begins at its first element and has this shape."""
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def packed_bytes(parts: list[torch.Tensor]) -> torch.Tensor:
    """Bytes one after the other, filled up so that what follows them in a buffer is aligned."""
    size = sum(part.numel() for part in parts)
    filling = parts[0].new_zeros(-size % _ALIGNMENT)
    return torch.cat((*parts, filling))


def invalidate(parts: Parts) -> None:
    """Make every product of these codes NaN: their scales, or the scale of the rows, become NaN."""
    _, scales, outer = parts
    for tensor in (scales, outer):
        if tensor is not None:
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
