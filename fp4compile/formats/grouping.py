"""Grouped matrices: `Grouping`, the kinds of grouping; `Groups`, the rows of each group of a tensor.

offs: int32 [G], on the device of the rows; group g is the rows offs[g-1] to offs[g] (group 0: from row 0). Rows from
offs[-1] on belong to no group. An offset that decreases counts as equal to the largest before it, and an offset beyond
the last row counts as the number of rows. The host never reads the offsets' values.

Where groups lie along the contraction (wgrad), each is padded to whole tiles of 128 rows, so that no block of codes and
no tile of swizzled scales has rows of two groups. Padded rows are numbered group by group, from group 0 on. Their
number suffices for any sizes of the groups.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from fp4compile.formats.layouts import TILE_ROWS, ceil_div


def padded_rows(rows: Any, groups: int) -> Any:
    """The number of padded rows that suffices for any cut of `rows` rows into groups; rows may be symbolic."""
    return TILE_ROWS * (rows // TILE_ROWS + groups)


class Grouping(StrEnum):
    """The parts that a matmul or a quantiser computes separately.

    DENSE: one matrix; A may have batch dimensions that share one B.
    BATCHED: matrices of equal sizes; a matmul has one A and one B for each.
    RAGGED_ROWS: groups of the rows of one matrix; a matmul multiplies each group by its own B.
    RAGGED_CONTRACTION: groups of rows along the contraction of a matmul, which has one result for each group.
    GATHERED: as BATCHED, where an index names the B of each A.
    """

    DENSE = "dense"
    BATCHED = "batched"
    RAGGED_ROWS = "ragged rows"
    RAGGED_CONTRACTION = "ragged contraction"
    GATHERED = "gathered"


def grouping_of(offs: Any, each_matrix: bool) -> Grouping:
    """The grouping of a quantiser. offs: None without groups of rows.

    Raises ValueError for both, because offsets cut the rows of one matrix.
    """
    if offs is not None and each_matrix:
        raise ValueError("each_matrix: goes without offs, which cut the rows of one matrix")
    return Grouping.RAGGED_ROWS if offs is not None else Grouping.BATCHED if each_matrix else Grouping.DENSE


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of `rows` rows as tensors on the device of the offsets, int64 [G] each.

    starts, ends: the first row of each group, and the row after its last row. padded_starts: its first padded row.
    """

    rows: int
    starts: torch.Tensor
    ends: torch.Tensor
    padded_starts: torch.Tensor

    @classmethod
    def of(cls, offs: torch.Tensor, rows: int) -> "Groups":
        ends = offs.long().clamp(0, rows).cummax(0).values
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        padded = ceil_div(ends - starts, TILE_ROWS) * TILE_ROWS
        return cls(rows, starts, ends, padded.cumsum(0) - padded)

    @property
    def count(self) -> int:
        return self.ends.shape[0]

    @property
    def of_rows(self) -> torch.Tensor:
        """The group of each row, int64 [rows]; `count` for a row that belongs to no group."""
        row = torch.arange(self.rows, device=self.ends.device)
        return torch.searchsorted(self.ends, row, right=True)

    def of_padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The group and the row of x of each padded row, int64 [padded_rows] each; the row is `rows` for padding."""
        slot = torch.arange(padded_rows(self.rows, self.count), device=self.ends.device)
        group = torch.searchsorted(self.padded_starts, slot, right=True) - 1  # of groups with one start, the last
        row = self.starts[group] + slot - self.padded_starts[group]
        return group, torch.where(row < self.ends[group], row, self.rows)


def check_offs(offs: torch.Tensor, groups: int | None = None) -> None:
    """Raise TypeError for offsets that are not int32, ValueError for a wrong shape. groups: how many there must be."""
    if offs.dtype != torch.int32:
        raise TypeError(f"offs: expected int32, got {offs.dtype}")
    if offs.dim() != 1 or offs.shape[0] == 0 or (groups is not None and offs.shape[0] != groups):
        wanted = "one dimension and at least one element" if groups is None else f"shape ({groups},), one a matrix"
        raise ValueError(f"offs: expected {wanted}, got shape {tuple(offs.shape)}")
