"""The rows of each group, found on the device from the offsets: see `fp4compile.formats.grouping`.

A program loads all offsets at once, and works on one group: tiles of rows are counted group by group, so that no tile
has rows of two groups. The rows beyond the last group are numbered as a further group, number GROUPS.

Each warp finds the group separately, so that no program waits at a barrier: vectors have 32 elements, one per lane, and
a lane has `per_lane` neighbouring groups, each in its own vector. So a warp scans and reduces each quantity once for
any number of groups.

Kernels load the offsets in their own bodies (`of_lanes`) and pass them to these functions: a tuple `offs` with the
offsets of the preceding lane's groups, then those of each lane's own groups. If a called function loaded them, torch
would count the pointer as written, because addresses depend on the loaded offsets, and a graph would copy the offsets.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def per_lane(groups):
    """The number of groups of each lane of a warp."""
    return (groups + 31) // 32


@triton.jit
def of_lanes(i: tl.constexpr, GROUPS: tl.constexpr):
    """(number, whether it exists) of each lane's group i, int32 [32]. i counts from its first group, also downwards."""
    group = tl.arange(0, 32) * per_lane(GROUPS) + i
    return group, (group >= 0) & (group < GROUPS)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _zeros(numbers):
    """Zeros like `numbers`, also in Gluon, whose tensors have layouts, which `tl.zeros_like` does not support."""
    return numbers * 0


@triton.jit
def ends_of_lanes(offs, rows, TILE: tl.constexpr, ALIGN: tl.constexpr = 1):
    """(row after the last, tile after the last) of each group of a lane, in tuples; each group begins a new tile.

    offs: int32 [32] each, 0 where there is no group. rows: number of rows, in groups and beyond. TILE:
    rows of a tile. ALIGN: a group's first tile begins at a multiple of ALIGN, at the group's first row or before it.
    Lanes beyond the last group repeat the last group's numbers.
    """
    rows = tl.cast(rows, tl.int32)
    # An offset that decreases counts as equal to the largest before it, or to 0 for the first.
    count: tl.constexpr = len(offs) // 2  # groups of a lane
    end = offs[0]
    for i in tl.static_range(1, count):
        end = tl.maximum(end, offs[i])
    end = tl.associative_scan(tl.minimum(end, rows), 0, larger)
    tile = _zeros(end)
    ends = ()
    tiles = ()
    for i in tl.static_range(count):
        start = end
        end = tl.maximum(start, tl.minimum(offs[count + i], rows))
        before_start = tl.where(end > start, start % ALIGN, 0)
        tile += tl.cdiv((end - start + before_start).to(tl.uint32), TILE).to(tl.int32)
        ends = ends + (end,)
        tiles = tiles + (tile,)
    before_lane = tl.cumsum(tile, 0) - tile
    after = ()
    for i in tl.static_range(len(tiles)):
        after = after + (before_lane + tiles[i],)
    return ends, after


@triton.jit
def total_tiles(offs, rows, TILE: tl.constexpr):
    """The number of tiles of TILE rows, including the tiles of rows of no group."""
    ends, after = ends_of_lanes(offs, rows, TILE)
    return tl.max(after[len(after) - 1], 0) + tl.cdiv(rows - tl.max(ends[len(ends) - 1], 0), TILE)


@triton.jit
def group_of_tile(offs, rows, tile, TILE: tl.constexpr, GROUPS: tl.constexpr, ALIGN: tl.constexpr = 1):
    """(group, the group's first row, the row after its last, the tile's first row) of a tile of TILE rows.

    Each group begins a new tile, at a multiple of ALIGN: see `ends_of_lanes`. A tile past all rows also belongs to
    group GROUPS, and begins at its end or later.
    """
    ends, after = ends_of_lanes(offs, rows, TILE, ALIGN)
    group = _zeros(ends[0])
    start = _zeros(ends[0])
    # Rows that would pad the groups before to whole tiles. The number grows with the group.
    padding = _zeros(ends[0])
    end = _zeros(ends[0]) + rows
    for i in tl.static_range(len(ends)):
        passed = after[i] <= tile
        group += passed.to(tl.int32)
        start = tl.where(passed, ends[i], start)
        padding = tl.where(passed, after[i] * TILE - ends[i] // ALIGN * ALIGN, padding)
        end = tl.minimum(end, tl.where(passed, rows, ends[i]))
    group = tl.minimum(tl.sum(group, 0), GROUPS)
    return group, tl.max(start, 0), tl.min(end, 0), tile * TILE - tl.max(padding, 0)


@triton.jit
def tile_of_group(offs, rows, col_tiles, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """(group, the row after its last, tile, the tile's first row, column tile) of a program, the column tile fastest.

    See `group_of_tile`. col_tiles: the number of column tiles.
    """
    col_tiles = tl.maximum(col_tiles, 1)
    tile = tl.program_id(0) // col_tiles
    group, _, end, row0 = group_of_tile(offs, rows, tile, TILE, GROUPS)
    return group, end, tile, row0, tl.program_id(0) % col_tiles


@triton.jit
def rows_of_group(offs, rows, group, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """(first row, row after the last, first tile) of a group, where each group is padded to tiles of TILE rows."""
    ends, after = ends_of_lanes(offs, rows, TILE)
    start = _zeros(ends[0])
    end = _zeros(ends[0]) + rows
    tile = _zeros(ends[0])
    for i in tl.static_range(len(ends)):
        number, _ = of_lanes(i, GROUPS)
        passed = number < group
        start = tl.where(passed, ends[i], start)
        tile = tl.where(passed, after[i], tile)
        end = tl.minimum(end, tl.where(passed, rows, ends[i]))
    return tl.max(start, 0), tl.min(end, 0), tl.max(tile, 0)
