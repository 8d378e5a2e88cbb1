"""Which rows belong to which group, found on the device from the offsets: see `fp4compile.groups`.

A program loads all offsets at once, and works on one group: tiles of rows are counted group by group, so that no tile
has rows of two groups. The rows beyond the last group are numbered as a further group, number GROUPS.

Kernels load the offsets in their own bodies, and these functions take what was loaded: `offs` and, one lane on, the
offsets `before`. Where an address depends on what a called function has loaded through a pointer, torch counts that
pointer as written, and a graph would copy the offsets.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def lanes_of(groups):
    """How many lanes hold the groups and the rows of no group."""
    return 1 << groups.bit_length()


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def bounds_of(before, offs, rows, GROUPS: tl.constexpr):
    """(first row, row after the last) of each group and, as group GROUPS, of the rows of no group: int32, all lanes.

    Later lanes have no rows. offs: int32 [lanes_of(GROUPS)], of the groups and then the largest int32; before: 0, then
    the offsets of the groups, then anything. rows: how many there are, in groups and beyond.
    """
    group = tl.arange(0, lanes_of(GROUPS))
    rows = tl.cast(rows, tl.int32)
    # Offsets that decrease count as equal to the largest before them, of which the first is 0.
    starts = tl.associative_scan(tl.minimum(before, rows), 0, larger)
    starts = tl.where(group > GROUPS, rows, starts)
    return starts, tl.maximum(starts, tl.minimum(offs, rows))


@triton.jit
def lane(values, index):
    """The value of one lane, as a scalar."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def group_of_tile(before, offs, rows, tile, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """(group, its first row, the row after its last, the first row of the tile) of a tile of TILE rows.

    Each group begins a tile. Tiles beyond those of all rows are of group GROUPS, or have a larger number and no row.
    """
    starts, ends = bounds_of(before, offs, rows, GROUPS)
    tiles = tl.cdiv(ends - starts, TILE)
    after = tl.cumsum(tiles, 0)
    group = tl.sum((after <= tile).to(tl.int32), 0)
    start = lane(starts, group)
    return group, start, lane(ends, group), start + (tile - lane(after - tiles, group)) * TILE


@triton.jit
def rows_of_group(before, offs, rows, group, TILE: tl.constexpr, GROUPS: tl.constexpr):
    """(its first row, the row after its last, its first tile where each group is padded to tiles of TILE rows)."""
    starts, ends = bounds_of(before, offs, rows, GROUPS)
    tiles = tl.cdiv(ends - starts, TILE)
    return lane(starts, group), lane(ends, group), lane(tl.cumsum(tiles, 0) - tiles, group)
