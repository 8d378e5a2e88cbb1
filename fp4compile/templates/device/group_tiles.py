"""Which tile of a grouped product belongs to which group, from the offsets in memory (`formats.groups` defines them).

A program loads the offsets once, as vectors with one element a group, and finds the group of a tile by comparing the
tile's number with all elements. It does so for all of its tiles before the first one, and writes a table to memory. In
a loop with specialised warps, each partition then reads the next tile by three loads. (A search there would be a
reduction, which partitions of Triton 3.6 cannot have.)
"""

import triton
import triton.language as tl

from fp4compile.templates.device.groups import larger


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
    """How many of the first `tiles` tiles a program of a persistent grid takes."""
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
