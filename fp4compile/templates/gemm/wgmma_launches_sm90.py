"""Launch configurations of `wgmma_sm90`: the fastest tiles and grids on an H100 and an H200, by sizes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fp4compile._compat import statically_true
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.launch import LaunchConfig
from fp4compile.templates.problem import Problem


@dataclass(frozen=True)
class WgmmaConfig(LaunchConfig):
    """The launch configuration of `wgmma_sm90`.

    rows: rows of A in a tile of the result, padded to 16, 32, 48, 64, 72, 80, 96, 128, 160, 192, 224 or 256. warps: of
    a program. parts: 1 or 2, for 16 or 32 rows of B per warp. stages: pipeline stages of a warp's weights.
    steps_per_stage: steps of a pipeline stage of A. split_k: parts of K, whose sums another kernel adds. group_m: tiles
    of A that are scheduled together, so that they share the L2 cache. buffers: stages of A in shared memory. narrow,
    narrowest: rows of a tile whose group ends within so many, which takes less time; 0 for no such tile. shared: bytes
    of shared memory to reserve for a program; 0 until `with_shared_memory` has set it.
    """

    host = ("split_k",)
    rows: int
    warps: int
    parts: int
    stages: int
    steps_per_stage: int
    split_k: int = 1
    group_m: int = 8
    buffers: int = 4
    narrow: int = 0
    narrowest: int = 0
    shared: int = 0

    def grid(self, m, n, groups=0):
        """The number of programs. groups: of rows of A; enough for all sizes, and for rows of no group."""
        return tiles_of_rows(m, self.rows, groups) * ceil_div(n, 16 * self.parts * self.warps) * self.split_k


def tiles_of_rows(m, rows: int, groups=0):
    """The most tiles of `rows` rows that m rows of A need.

    groups: of rows, each of which begins a new tile, at its first row or up to 7 rows before it.
    """
    return (m + (groups + 1) * (rows - 1) + groups * 7) // rows


def wgmma_config(p: Problem, needed_bytes: Callable[..., int]) -> WgmmaConfig:
    """The configuration, tuned for the shapes of Llama-3. needed_bytes: as for `with_shared_memory`."""
    if p.ragged:
        return with_shared_memory(_tile_of_groups(p), p, needed_bytes)
    tile = _tile(p) if statically_true(p.m <= 64) else _large_tile(p)
    return with_shared_memory(tile, p, needed_bytes)


def with_shared_memory(config: WgmmaConfig, p: Problem, needed_bytes: Callable[..., int]):
    """The configuration with enough shared memory reserved to spread programs evenly over the multiprocessors.

    needed_bytes: bytes of shared memory of a program, by rows, warps, parts, stages, steps per stage and buffers.
    Raises StopIteration where not even one program fits.
    """
    size = needed_bytes(config.rows, config.warps, config.parts, config.stages, config.steps_per_stage, config.buffers)
    grid = config.grid(p.m, p.n, p.groups if p.ragged else 0)
    each = ceil_div(grid, p.target.multiprocessors) if isinstance(grid, int) else 1
    fitting = (reserved(size, fewer, p.target) for fewer in range(each, 0, -1))
    return replace(config, shared=next(filter(None, fitting)))


@dataclass(frozen=True)
class _Timed:
    """A launch configuration, and what it takes on an H200.

    at_once: programs that share a multiprocessor. turn: microseconds of a round of so many programs without its steps.
    alone, each: microseconds of a step of 128 elements along K, of a program by itself and for each program of several.
    """

    config: WgmmaConfig
    at_once: int
    turn: float
    alone: float
    each: float

    def microseconds(self, p: Problem, m: int, split_k: int, sums: tuple[float, float]) -> float:
        """The time of a matmul with m rows of A. sums: microseconds of the launch that adds parts, and of a million."""
        programs = ceil_div(self.config.grid(m, p.n) * split_k, p.target.multiprocessors)
        stages = ceil_div(ceil_div(p.k, 128 * self.config.steps_per_stage), split_k)
        rounds, left = divmod(programs, self.at_once)
        total = sums[0] + sums[1] * split_k * m * p.n / 1e6 if split_k > 1 else 0.0
        for count in [self.at_once] * rounds + [left] * (left > 0):
            total += self.turn + stages * self.config.steps_per_stage * max(self.alone, count * self.each)
        return total


def _fastest(p: Problem, m: int, tiles: Iterable[_Timed], sums: tuple[float, float]) -> WgmmaConfig:
    """The tile and the parts of K that take the least time.

    A part has at least 512 elements. 16 warps have no registers for an epilogue; that of parts is in the launch that
    adds them.
    """
    each = [(tile, split_k) for tile in tiles for split_k in (1, 2, 4, 8)
            if (p.k >= 512 * split_k if split_k > 1 else tile.config.warps < 16 or not p.spec.epilogue)]  # fmt: skip
    best, split_k = min(each, key=lambda one: one[0].microseconds(p, m, one[1], sums))
    return replace(best.config, split_k=split_k)


# Tiles of 17 to 64 rows of A: rows, warps, stages, steps of a stage of A; and as for `_Timed`. Least squares of 1230
# timed launches (22 shapes of 1024 to 28672 columns and 2048 to 28672 elements along K, 20 to 64 rows; off by 5 % on
# average), then changed by up to 20 % to choose best. The chosen launches take 0.5 % more time than the fastest timed
# ones, 11 % in the worst case (5120 x 13824). 16 warps read A less often.
SMALL_TILES = tuple(
    _Timed(WgmmaConfig(rows, warps, 1, stages, steps), *times)
    for rows, warps, stages, steps, *times in (
        (32, 4, 2, 2, 2, 1.254, 0.453, 0.290), (32, 4, 3, 1, 8, 1.777, 0.386, 0.262),
        (32, 8, 2, 2, 4, 1.359, 0.542, 0.434), (48, 4, 2, 2, 2, 1.198, 0.459, 0.328),
        (48, 4, 3, 1, 8, 1.992, 0.458, 0.293), (48, 8, 2, 2, 2, 1.476, 0.483, 0.569),
        (48, 16, 2, 2, 2, 2.265, 0.943, 0.986), (64, 4, 2, 2, 2, 1.638, 0.460, 0.374),
        (64, 8, 2, 2, 2, 1.483, 0.471, 0.525), (64, 8, 3, 1, 8, 1.695, 0.633, 0.541),
        (64, 16, 2, 2, 2, 1.611, 0.909, 0.868),
    )
)  # fmt: skip


def _tile(p: Problem) -> WgmmaConfig:
    """The tile up to 64 rows of A, and the parts of K.

    Up to 16 rows the tile is the same for all sizes: several programs of four warps share a multiprocessor. On an H200
    it is within 4 % of the fastest of 16 launches for 19 of 22 shapes; 8192 x 28672 takes 56 us with four parts of K
    and 49 with eight, 7168 x 2048 and 12288 x 4096 up to 8 % less time with two.
    """
    rows = next(rows for rows in (16, 32, 48, 64) if statically_true(p.m <= rows))
    if rows > 16:
        if not (isinstance(p.n, int) and isinstance(p.k, int)):
            return WgmmaConfig(rows, warps=8, parts=1, stages=2, steps_per_stage=2)
        return _fastest(p, rows, (each for each in SMALL_TILES if each.config.rows == rows), (1.0, 2.2))
    config = WgmmaConfig(rows, warps=4, parts=1, stages=2, steps_per_stage=2)
    # Programs of a multiprocessor, and parts of K: 2560 x 9728 takes 11.6 us with eight parts, 13.0 with four.
    room, most = (1, 8) if statically_true(p.n <= 2048) else (7, 8 if statically_true(p.n <= 3072) else 4)
    programs, split_k, room = config.grid(rows, p.n), 1, room * p.target.multiprocessors
    while split_k < most and statically_true(2 * programs * split_k <= room) and statically_true(p.k >= 1024 * split_k):
        split_k *= 2
    return replace(config, split_k=split_k)


# Tiles of more than 64 rows of A, by eight warps: rows, parts, stages, buffers, and the microseconds of a step of 128
# elements along K on an H200. The times were fitted, with those of a round and of the sums, to 2592 timed launches (96
# to 2048 rows, six shapes of Llama-3), off by 3 % on average. The times of 96 and 128 rows were then raised by up to
# 4 %, so that the choices are best; the times of 72 and 80 rows were fitted to three launches. The chosen tiles take
# 0.5 % more time than the fastest of 27 timed tiles, 4 % in the worst case. More rows of A need fewer bytes from shared
# memory for each matrix instruction: with 256 rows the matrix units are busy for 95 % of a program's time. Two parts
# make tiles of twice the size, which pays where one part would leave half of the last round of programs empty.
LARGE_TILES = tuple(
    _Timed(WgmmaConfig(rows, 8, parts, stages, 1, buffers=buffers), 1, 1.37, step, step)
    for rows, parts, stages, buffers, step in (
        (72, 1, 3, 3, 0.62), (80, 1, 3, 3, 0.63), (96, 1, 3, 3, 0.642), (128, 1, 2, 4, 0.832), (160, 1, 2, 4, 0.888),
        (192, 1, 2, 4, 1.024), (224, 1, 3, 3, 1.187), (256, 1, 2, 3, 1.352), (128, 2, 3, 4, 1.473),
    )
)  # fmt: skip


def _large_tile(p: Problem) -> WgmmaConfig:
    """The tile of more than 64 rows of A, and the parts of K, that take the least time; see `LARGE_TILES`."""
    # Two parts do not leave enough registers for an epilogue, and 256 rows only one whose loads are not masked.
    most = 224 if p.spec.epilogue and not statically_true(p.n % 128 == 0) else 256
    tiles = [each for each in LARGE_TILES
             if each.config.rows <= most and (each.config.parts == 1 or not p.spec.epilogue)]  # fmt: skip
    return _fastest(p, p.m, tiles, (2.7, 1.7)) if p.static else tiles[3].config


# Tiles of groups of rows: warps; steps of a stage of A; the microseconds of a round of programs without its steps; rows
# of the whole tile and of narrower ones, and the microseconds of a step of 128 elements along K. They have two stages
# of a step, and three buffers: with more, fewer programs share a multiprocessor. With two steps a stage each step has
# its own buffer of B, and a warp has a fifth fewer instructions a step; larger tiles have no room for it. Least squares
# of 56 to 144 launches each on an H200, with `swizzle_a_sm90`, off by 3 to 6 % on average, then changed to choose best:
# NVFP4 and MXFP4 experts of gpt-oss-20b and Qwen3-30B, 2 to 256 rows a group. Up to 32 rows a group the chosen tiles
# take 1 % more time than the fastest of nine timed tiles, 7 % in the worst case.
GROUPED_TILES = tuple(
    (WgmmaConfig(max(steps), warps, 1, 2, a_steps, 1, 8, 3, *sorted(steps, reverse=True)[1:]), turn, steps)
    for warps, a_steps, turn, steps in (
        (4, 1, 0.30, {16: 0.217}), (4, 2, 0.30, {16: 0.210}), (8, 2, 0.75, {32: 0.444, 16: 0.420}),
        (8, 1, 1.00, {64: 0.580, 48: 0.580, 32: 0.489}), (8, 1, 0.90, {96: 0.758, 48: 0.594, 32: 0.507}),
        (8, 1, 2.70, {160: 1.049, 96: 0.783, 48: 0.514}), (8, 1, 2.76, {224: 1.392, 96: 0.789, 48: 0.610}),
        (8, 1, 2.74, {256: 1.588, 128: 0.920, 64: 0.669}),
    )
)  # fmt: skip
_NORMAL = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)  # numbers of a normal distribution, equally likely


def _tile_of_groups(p: Problem) -> WgmmaConfig:
    """The tile that takes the least time by `GROUPED_TILES`.

    Sizes of groups are unknown. A third of the estimate is for equal sizes, a third for tokens that choose their groups
    at random, and a third for sizes between 0 and twice the average.
    """
    if not p.static:
        return GROUPED_TILES[-1][0]
    each = p.m / p.groups  # rows of a group
    # A group's first tile begins up to 7 rows before it.
    chance = [each + 3.5 + each**0.5 * normal for normal in _NORMAL]
    between = [3.5 + each * (2 * i + 1) / 8 for i in range(8)]
    sizes = [each] * 8 + chance + between

    def microseconds(config: WgmmaConfig, turn: float, steps: dict[int, float]) -> float:
        along_k = ceil_div(p.k, 128 * config.steps_per_stage) * config.steps_per_stage

        def of_group(rows: float) -> float:
            whole, left = divmod(rows, config.rows)
            last = next(time for width, time in sorted(steps.items()) if left <= width)
            return whole * (turn + along_k * steps[config.rows]) + (turn + along_k * last) * (left > 0)

        programs = p.groups * ceil_div(p.n, 16 * config.parts * config.warps) / p.target.multiprocessors
        return max(programs, 1.0) * sum(map(of_group, sizes)) / len(sizes)

    return min(GROUPED_TILES, key=lambda tile: microseconds(*tile))[0]
