"""How the grouped kernels are launched, and from how many rows on operands are dequantised in memory.

What was timed says so; other tiles are those of the dense kernels, as far as they fit.
"""

from dataclasses import dataclass, replace
from typing import Any

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import TILE_ROWS
from fp4compile.templates.gemm.heuristics import (
    SKINNY_ROWS,
    DequantTilesConfig,
    SkinnyConfig,
    dequant_tiles_config,
)
from fp4compile.templates.gemm.problem import Problem
from fp4compile.templates.grouped.problem import GroupedProblem
from fp4compile.templates.quantize.heuristics import ColumnConfig, LaunchConfig, RowConfig, column_config, row_config

# Row tiles of 128 of a group, on average, up to which every tile dequantises the matrix of its group for itself. Groups
# of unlike sizes have half a tile more each. Microseconds on an H200 in the main loop and in memory, of DeepSeek-V3,
# Llama-4 and Qwen3-30B-A3B: with 64 tokens an expert 137 and 178, 530 and 900, 202 and 353; with 128 246 and 185, 968
# and 943, 373 and 405; with 256 358 and 266, 1587 and 1120, 623 and 499 (benchmarks/results/grouped_mm_h200.json).
TILES_IN_REGISTERS = 1
# Rows of a group along K, on average, from which on operands are dequantised in memory (`LIBRARY_ROWS`): these are read
# by as many tiles as the result has beside each other, however few rows a group has.
MANY_ROWS = 65


@dataclass(frozen=True)
class GroupedDotConfig:
    """How `gemm_grouped` is launched.

    bm, bn: the tile of the result. bk: elements of a step along K, which divide 128. stages: pipeline stages. parts: of
    a tile's columns, in which it is stored. num_warps: warps of a program. group_m: row tiles that are walked together,
    so that the L2 cache serves them.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    parts: int
    num_warps: int
    group_m: int = 8

    @property
    def constants(self) -> dict[str, int]:
        return {"BM": self.bm, "BN": self.bn, "BK": self.bk, "GROUP_M": self.group_m, "STAGES": self.stages,
                "PARTS": self.parts}  # fmt: skip


@dataclass(frozen=True)
class GroupedAmaxConfig(LaunchConfig):
    """`grouped_rows_amax`: tiles of rows x blocks of `block` elements."""

    rows: int
    blocks: int
    block: int


def dequantizes_in_memory(p: GroupedProblem) -> bool:
    """Whether groups are known to have so many rows, on average, that operands are dequantised in memory, once."""
    return statically_true(p.rows >= least_rows_in_memory(p))


def least_rows_in_memory(p: GroupedProblem) -> int:
    """Rows of all groups, from which on that is so."""
    return MANY_ROWS * p.groups if p.along_k else TILES_IN_REGISTERS * TILE_ROWS * p.groups + 1


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


def grouped_dot_config(p: GroupedProblem) -> GroupedDotConfig:
    """128 x 256 tiles where shared memory holds their stages, else 128 x 128.

    A multiprocessor of Hopper multiplies 16-bit numbers at 2048 products a clock. A step of a 128 x 256 tile takes
    1024 clocks and reads 48 KB, 48 bytes a clock; one of a 128 x 128 tile takes 512 clocks and reads 32 KB.
    """
    if p.target.shared_memory < 200 * 1024:
        return GroupedDotConfig(128, 128, 32, stages=3, parts=4, num_warps=8)
    return GroupedDotConfig(128, 256, 64, stages=4, parts=8, num_warps=8)


def grouped_skinny_config(p: GroupedProblem, most: Any = SKINNY_ROWS) -> SkinnyConfig:
    """most: rows of one matrix, at most; of groups it is not known, and those with more rows are several tiles.

    A step of a warp has 1152 bytes of B for each 16 rows, and 256 for each row of A that exists. With 16 rows of B and
    up to two of A, A is less than half of B, and there are twice as many tiles; with more, 32 rows of B share them.
    Registers leave room for four programs a multiprocessor. Of these, a single stage each was the fastest on an H200
    (configurations of benchmarks/grouped_mm.py, four tokens an expert, against two stages): DeepSeek-V3 29.3 us and
    33.1, Qwen3-30B-A3B 52.1 us and 61.1. Up to four rows of A were not timed.
    """
    most = p.rows if statically_true(p.rows < most) else most
    rows = next((rows for rows in (2, 4) if statically_true(most <= rows)), SKINNY_ROWS)
    if rows == 2 or statically_true(p.rows <= 2 * p.groups):
        tiles, stages = 1, 3
    else:
        tiles, stages = 2, 1 if rows == SKINNY_ROWS else 2
    return SkinnyConfig(rows, tiles, 4, stages, 1 if rows == SKINNY_ROWS else 2, 4 * p.target.multiprocessors)


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
