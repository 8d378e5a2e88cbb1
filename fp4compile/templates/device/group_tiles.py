"""The group of each tile of a grouped matmul, found from the offsets in memory (`formats.grouping` defines them).

A program loads the offsets once, as vectors with one element per group, and finds the group of a tile by comparing the
tile's number with all elements. It does so for all of its tiles before the first one, and writes a table to memory. In
a loop with specialised warps, each partition then reads the next tile by three loads. (A search would be a reduction,
which Triton 3.6 does not support in partitions.)
"""

import triton
import triton.language as tl

from fp4compile.templates.device.groups import larger
from fp4compile.templates.device.persistent_grid import grouped_tile


@triton.jit
def ends_of(offs, rows):
    """The row after the last one of each group, int32 [GROUPS].

    offs: int32 [GROUPS], 0 beyond the last group; with the offsets shifted by one group (0 for group 0), the function
    returns first rows. rows: number of rows.
    """
    return tl.associative_scan(tl.minimum(tl.maximum(offs, 0), rows), 0, larger)


@triton.jit
def of_group(values, group):
    """The elements of a vector [GROUPS] of integers at indices [COUNT]; 0 for an index out of range."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0])[None, :] == group[:, None], values[None, :], 0), 1)


@triton.jit
def last_of(ends):
    """The last element of a nondecreasing vector without negative elements."""
    return tl.max(ends, 0)


@triton.jit
def tiles_of_program(tiles):
    """The number of tiles among the first `tiles` that a program of a persistent grid computes."""
    return (tiles - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)


@triton.jit
def store_entry(table_ptr, tile, group, first, end, wanted=None):
    """Store entries (group, first, end) of tiles, int32 [COUNT] each, in the table int32 [tiles, 4] of `load_entry`.

    wanted: mask of the tiles to store; None stores all.
    """
    at = table_ptr + tile * 4
    tl.store(at, group, mask=wanted)
    tl.store(at + 1, first, mask=wanted)
    tl.store(at + 2, end, mask=wanted)


@triton.jit
def store_row_tiles(table_ptr, starts, ends, padded, padded_ends, tiles_n, GROUP_M: tl.constexpr, BM: tl.constexpr,
                    GROUPS: tl.constexpr):  # fmt: skip
    """Store the entries of all tiles of this program, where groups are rows: (group, first row, row after the last).

    starts, ends: first rows of groups, and rows after their last ones. padded: tiles of BM rows of each group, and
    padded_ends: of all groups up to it. tiles_n: tiles of columns. GROUP_M: see `grouped_tile`.
    """
    tiles_m = last_of(padded_ends)
    before = starts - (padded_ends - padded) * BM  # rows of the groups before, without their padding
    mine = tiles_of_program(tiles_m * tiles_n)
    count: tl.constexpr = max(4096 // GROUPS, 1)  # tiles whose groups are found at once
    for first in range(0, mine, count):
        i = first + tl.arange(0, count)
        tile = tl.program_id(0) + tl.minimum(i, mine - 1) * tl.num_programs(0)
        tile_m, _ = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        group = tl.sum((padded_ends[None, :] <= tile_m[:, None]).to(tl.int32), 1)
        store_entry(table_ptr, tile, group, of_group(before, group) + tile_m * BM, of_group(ends, group))


@triton.jit
def load_entry(table_ptr, tile):
    """(group, first, end) of a tile. This program must have stored the entry and then passed a barrier."""
    at = table_ptr + tile * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def clear_rows(out_ptr, start, m, n, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Store zeros in the rows from `start` on of out [m, n]; all programs share the work."""
    zeros = tl.zeros((ROWS, COLS), out_ptr.dtype.element_ty)
    for row0 in range(start + tl.program_id(0) * ROWS, m, tl.num_programs(0) * ROWS):
        row = (row0 + tl.arange(0, ROWS))[:, None]
        for col0 in range(0, n, COLS):
            col = (col0 + tl.arange(0, COLS))[None, :]
            tl.store(out_ptr + row.to(tl.int64) * n + col, zeros, mask=(row < m) & (col < n))


@triton.jit
def clear_scale_tiles(scales_ptr, start, end, words, WORDS: tl.constexpr):
    """Store zeros in the rows of tiles from `start` to `end` of swizzled scales; all programs share the work.

    words: int32 of a row of tiles, WORDS of which a program stores at a time.
    """
    ptr = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + tl.cast(start, tl.int64) * words
    count = (end - start) * words
    for first in range(tl.program_id(0) * WORDS, count, tl.num_programs(0) * WORDS):
        at = first + tl.arange(0, WORDS)
        tl.store(ptr + at, tl.zeros((WORDS,), tl.int32), mask=at < count)
