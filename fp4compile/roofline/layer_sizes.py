"""Sizes of matmuls, also of experts: lines of operands, elements of the result, FLOPs of whole tiles."""

from dataclasses import dataclass

from fp4compile.formats.grouping import Grouping
from fp4compile.formats.layouts import ceil_div


@dataclass(frozen=True)
class Sizes:
    """A matmul [rows, contraction] x [columns, contraction], or the matmuls of all experts.

    `rows` counts the rows of all experts together, and each expert has its own matrix of `columns` rows; with ragged
    contraction, as in wgrad, each has a result of [rows, columns].
    count: matrices of B, or of the result; with gathered matrices, the number of indices, whose matrices are each read
    separately.
    """

    rows: int
    columns: int
    contraction: int
    grouping: Grouping = Grouping.DENSE
    count: int = 1

    @property
    def along_k(self) -> bool:
        """Whether the experts share the contraction."""
        return self.grouping is Grouping.RAGGED_CONTRACTION

    @property
    def lines(self) -> tuple[int, int]:
        """Lines of A and of B along the contraction, all experts together."""
        return self.rows, self.columns if self.along_k else self.count * self.columns

    @property
    def lines_read(self) -> tuple[int, int]:
        """Lines of A and of B that the matmul reads; with fewer rows than experts, each row counts as one expert."""
        if self.along_k:
            return self.lines
        return self.rows, min(self.count, self.rows) * self.columns

    @property
    def result(self) -> int:
        """Elements of the result."""
        return self.rows * self.columns * (self.count if self.along_k else 1)

    def flops(self, tile: tuple[int, int] | None, at_once: int) -> float:
        """FLOPs of whole tiles, `at_once` of them in each turn; without a tile, FLOPs of the matmul."""
        if tile is None:
            return 2 * self.rows * self.columns * self.contraction
        contraction = self.contraction / self.count if self.along_k else self.contraction
        return 2 * tile[0] * tile[1] * contraction * self.turns(tile, at_once) * at_once

    def turns(self, tile: tuple[int, int], at_once: int) -> int:
        """The number of turns for all tiles, with `at_once` tiles in parallel.

        Groups have unknown sizes: as many groups as possible count as non-empty, each with at least one tile, and each
        ends on average in the middle of a tile.
        """
        height, width = tile
        across = ceil_div(self.columns, width)
        if self.along_k:
            tiles = self.count * ceil_div(self.rows, height) * across
        elif self.grouping is Grouping.RAGGED_ROWS:
            groups = min(self.count, self.rows)
            tiles = max(groups, ceil_div(2 * self.rows + groups * height, 2 * height)) * across
        else:
            tiles = self.count * ceil_div(ceil_div(self.rows, self.count), height) * across
        return ceil_div(tiles, at_once)
