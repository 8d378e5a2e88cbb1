"""How the grouped kernels are launched. Nothing was timed: tiles are those of the dense kernels, as far as they fit."""

from dataclasses import dataclass, replace

from fp4compile._compat import statically_true
from fp4compile.layouts import TILE_ROWS
from fp4compile.templates.gemm.heuristics import DequantTilesConfig, dequant_tiles_config
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.grouped.problem import GroupedProblem
from fp4compile.templates.quantize.heuristics import ColumnConfig, LaunchConfig, RowConfig, column_config, row_config


@dataclass(frozen=True)
class GroupedAmaxConfig(LaunchConfig):
    """`grouped_rows_amax`: tiles of rows x blocks of `block` elements."""

    rows: int
    blocks: int
    block: int


def grouped_row_config(element: str, block: int, rows, groups: int, padded: bool) -> RowConfig:
    """padded: whether each group is padded to tiles of 128 rows. rows: in all groups; a symbolic number counts as many.

    Where a group has few rows, a tile has 16, which are longer.
    """
    config = row_config(element, block, None)
    if padded or not statically_true(rows <= 32 * groups):
        return config
    return replace(config, rows=config.rows // 8, blocks=config.blocks * 8)


def grouped_column_config(element: str, block: int) -> ColumnConfig:
    """Tiles of 128 rows, as groups are padded: those of the kernel that quantises rows as well."""
    config = column_config(element, block, both=True)
    return replace(config, row_tiles=TILE_ROWS // block)


def grouped_amax_config() -> GroupedAmaxConfig:
    """Tiles of 16 rows: many of a group of many rows, and not much beyond the end of a group of few."""
    return GroupedAmaxConfig(num_warps=8, rows=16, blocks=32, block=32)


def grouped_tiles_config(p: GroupedProblem) -> DequantTilesConfig:
    """The tile of a dense product with as many rows as a group has on average, and as many tiles as all groups have.

    A symbolic number of rows counts as many.
    """
    m = p.m if p.along_k else p.rows // p.groups
    k = p.rows // p.groups if p.along_k else p.k
    dense = Problem(p.a, p.b, m, p.n * p.groups, k, p.out_dtype, p.target)
    config = replace(dequant_tiles_config(dense), split_k=1)
    if config.warps > 1 and "e8m0" in (p.a.scale, p.b.scale):
        # The second loop, of blocks with small scales, takes registers, too: they suffice for fewer shares of K.
        shares = config.warps // 2 if config.bm <= 16 else 1
        config = replace(config, warps=shares, units=min(config.units, 64) if config.bm == 8 else 32)
    return config
