"""The order of a persistent grid's tiles, of one matmul or of a group of matmuls with the same A.

The tiles of a group are numbered consecutively: the first matmul's tiles, then the second's, then the third's.
Program p computes the tiles p, p + grid, p + 2 * grid, and so on. It loads the next tile's operands while it multiplies
the present ones, also across matmuls, so that copies are always pending.
"""

import triton
import triton.language as tl


@triton.jit
def group_tiles(n, n_1, n_2, TILE_ROWS: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """Number of tiles up to the end of the first, the second and the last matmul: (tiles, tiles_1, total).

    n, n_1, n_2: rows of each B. TILE_ROWS: rows of B in a tile. GROUP_SIZE: number of matmuls, at most 3.
    """
    tiles = tl.cdiv(n, TILE_ROWS)
    tiles_1 = tiles
    if GROUP_SIZE > 1:
        tiles_1 = tiles + tl.cdiv(n_1, TILE_ROWS)
    total = tiles_1
    if GROUP_SIZE > 2:
        total = tiles_1 + tl.cdiv(n_2, TILE_ROWS)
    return tiles, tiles_1, total


@triton.jit
def of_matmul(tile, tiles, tiles_1, first, second, third, GROUP_SIZE: tl.constexpr):
    """`first`, `second` or `third`, tuples of equal length: those of the matmul that a tile belongs to, by selects.

    tiles, tiles_1: see `group_tiles`. Branches fail: while torch analyses what a kernel writes, sizes are constants,
    and Triton forbids to change constants in a branch. A pointer for stores must not be among the tuples, nor a number
    that such a pointer depends on beside a pointer: torch counts all arguments of this call as written then.
    """
    if GROUP_SIZE == 1:
        return first
    else:
        found = ()
        for i in tl.static_range(len(first)):
            other = second[i] if GROUP_SIZE == 2 else tl.where(tile >= tiles_1, third[i], second[i])
            found = found + (tl.where(tile >= tiles, other, first[i]),)
        return found


@triton.jit
def next_step(tile, step, steps):
    """(tile, step) that follow step `step` of a tile with `steps` steps: in this tile or the program's next one."""
    last = step + 1 == steps
    return tl.where(last, tile + tl.num_programs(0), tile), tl.where(last, 0, step + 1)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile number -> (row tile, column tile).

    GROUP_M row tiles follow each other, so that the L2 cache holds their operands.
    """
    group = tile // (GROUP_M * tiles_n)
    in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile = tile % (GROUP_M * tiles_n)
    return group * GROUP_M + tile % in_group, tile // in_group
