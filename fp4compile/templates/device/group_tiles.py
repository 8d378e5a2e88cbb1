"""Which tile of a grouped product belongs to which group, from the offsets in memory: see `groups` for what they mean.

Offsets are loaded once, as vectors with an element a group, and stay in registers. A tile's group is found by comparing
its number with all of them: a few instructions of a warp, and no load. `warp_specialize` gives each partition that
needs them its own vectors, so that the warps which issue copies wait for no others.
"""

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _ends_before(offs_ptr, g, groups, rows):
    """The row after the last one of the groups up to g - 1, int32 [GROUPS]; g: int32 [GROUPS]."""
    offs = tl.load(offs_ptr + g - 1, mask=(g > 0) & (g <= groups), other=0)
    return tl.associative_scan(tl.minimum(tl.maximum(offs, 0), rows), 0, _larger)


@triton.jit
def group_bounds(offs_ptr, groups, rows, GROUPS: tl.constexpr):
    """(starts, ends), int32 [GROUPS]: the first row of each group, and the row after its last.

    offs_ptr: int32 [groups]. rows: how many there are. GROUPS: a power of two; the groups beyond `groups` are empty.
    """
    g = tl.arange(0, GROUPS)
    return _ends_before(offs_ptr, g, groups, rows), _ends_before(offs_ptr, g + 1, groups, rows)


@triton.jit
def at_index(values, index):
    """The element of a vector of integers at an index."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def last_of(ends):
    """The last element of a vector that nowhere decreases and is not negative."""
    return tl.max(ends, 0)


@triton.jit
def tiles_of_program(tiles):
    """How many of the first `tiles` tiles a program of a persistent grid takes."""
    return (tiles - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)
