"""Launch configurations of `wgmma_sm90`: the fastest tiles and grids on an H100 and an H200, by sizes."""

from collections.abc import Callable
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


def _tile(p: Problem) -> WgmmaConfig:
    """The tile up to 64 rows of A: a program of eight warps for each multiprocessor, or one program of 16 warps.

    16 warps read A less often, which pays where A has many rows and B is large. Small weights, and large weights with
    few rows of A, need many small programs. Partial sums cost another launch, so one program per multiprocessor is
    enough, unless K is very long. An epilogue takes registers, which 16 warps do not have.
    """
    rows = 16 if statically_true(p.m <= 16) else 32 if statically_true(p.m <= 32) else 64
    few = WgmmaConfig(rows, warps=8, parts=1, stages=3, steps_per_stage=2)
    if statically_true(p.n <= 2048):
        few = replace(few, warps=4, steps_per_stage=1)
    elif rows == 16 and statically_true(p.n >= 16384) and statically_true(p.k >= 2048):
        return replace(few, warps=4, stages=2, split_k=2)
    many = WgmmaConfig(rows, warps=16, parts=1, stages=2, steps_per_stage=2)
    config = many if rows == 64 and statically_true(p.n * p.k > 2**26) else few
    programs, split_k = config.grid(rows, p.n), 1
    # The exception for long K was timed before dequantisation ran beside wgmma, and not since.
    room = p.target.multiprocessors * (2 if rows == 16 and statically_true(p.k > 16384) else 1)
    # A part has at least 512 elements of K.
    while split_k < 8 and statically_true(2 * programs * split_k <= room) and statically_true(p.k >= 1024 * split_k):
        split_k *= 2
    return replace(few if p.spec.epilogue and split_k == 1 else config, split_k=split_k)


# Tiles of more than 64 rows of A, by eight warps: rows, parts, stages, buffers, and the microseconds of a step of 128
# elements along K on an H100. The times were fitted to 484 timed launches (80 to 8192 rows, the shapes 8192x8192,
# 28672x8192 and 4096x14336), together with the next two lines, to 5 %; 72, 160 and 224 rows lie between. They choose
# the fastest of the timed tiles in all cases except three, which lose up to 3 %. More rows of A need fewer bytes from
# shared memory for each matrix instruction: with 256 rows the matrix units are busy for 95 % of a program's time. Two
# parts make tiles of twice the size, which pays where one part would leave half of the last round of programs empty.
# Against bf16, 8192x8192, microseconds on an H200 (benchmarks/results/many_rows_h200.json): 65 rows 38.5 and 27.8, 128
# rows 41.8 and 34.8, 256 rows 54.7 and 56.8, 512 rows 93.7 and 91.5, 1024 rows 178.6 and 179.0, 2048 rows 360.0 and
# 377.2.
_LARGE_TILES = (
    (72, 1, 3, 4, 0.61), (80, 1, 3, 4, 0.66), (96, 1, 4, 4, 0.72), (128, 1, 4, 4, 0.83), (160, 1, 4, 4, 0.95),
    (192, 1, 2, 4, 1.09), (224, 1, 3, 3, 1.26), (256, 1, 2, 3, 1.44), (96, 2, 3, 4, 1.33), (128, 2, 3, 4, 1.565),
)  # fmt: skip
_ROUND = 2.0  # microseconds of a round of programs without its steps
_SUMS, _SUMS_PER_MILLION = 4.3, 2.1  # microseconds of the launch that adds partial sums, and of a million of them


def _large_tile(p: Problem) -> WgmmaConfig:
    """The tile of more than 64 rows of A, and the parts of K, that take the least time; see `_LARGE_TILES`."""
    # Two parts do not leave enough registers for an epilogue, and 256 rows only one whose loads are not masked.
    most = 224 if p.spec.epilogue and not statically_true(p.n % 128 == 0) else 256
    tiles = [(WgmmaConfig(rows, 8, parts, stages, 1, buffers=buffers), step)
             for rows, parts, stages, buffers, step in _LARGE_TILES
             if rows <= most and (parts == 1 or not p.spec.epilogue)]  # fmt: skip
    if not p.static:
        return tiles[3][0]
    # A part of K has at least 512 elements.
    each = [(replace(tile, split_k=split_k), step) for tile, step in tiles for split_k in (1, 2, 4, 8)
            if split_k == 1 or p.k >= 512 * split_k]  # fmt: skip

    def microseconds(config: WgmmaConfig, step: float) -> float:
        rounds = ceil_div(config.grid(p.m, p.n), p.target.multiprocessors)
        split_k = config.split_k
        sums = 0.0 if split_k == 1 else _SUMS + _SUMS_PER_MILLION * split_k * p.m * p.n / 1e6
        return rounds * (_ROUND + ceil_div(p.k, 128 * split_k) * step) + sums

    return min(each, key=lambda config: microseconds(*config))[0]


# Tiles of groups of rows: rows, warps, stages, steps a stage, buffers; the microseconds of a round of programs without
# its steps, and of a step of 128 elements along K; rows of narrower tiles, and the microseconds of their steps. Of
# packed experts on an H100: least squares of 30 to 58 timed cases each (9 to 1024 rows a group, of three shapes),
# without `swizzle_a_sm90`, off by 4 to 8 % on average. Up to 96 rows, two or more programs share a multiprocessor, and
# one computes while another starts or ends. 160 rows, 48 as the narrower tile of 64, four warps of 16 rows, and the
# step of 96 rows are from an H200 (experts of gpt-oss, Qwen3-30B and Llama-4). There gpt-oss' 5760 x 2880 takes 148 us
# instead of 160 for 32 rows an expert, 197 instead of 206 for 64 rows, 288 instead of 371 for 128 rows; two parts were
# never the fastest. Other narrower tiles were not timed: a step counts as that of a whole tile of as many rows, here or
# in `_LARGE_TILES`.
GROUPED_TILES = tuple(
    (WgmmaConfig(rows, warps, 1, stages, steps, 1, 8, buffers, *sorted(narrow, reverse=True)), turn, step, narrow)
    for rows, warps, stages, steps, buffers, turn, step, narrow in (
        (16, 4, 2, 2, 4, 0.39, 0.187, {}), (32, 8, 3, 2, 4, 0.94, 0.430, {}),
        (64, 8, 3, 1, 4, 1.33, 0.563, {48: 0.515, 16: 0.374}),
        (80, 8, 3, 1, 4, 1.49, 0.642, {32: 0.430}), (96, 8, 3, 1, 3, 1.57, 0.690, {32: 0.430}),
        (160, 8, 4, 1, 4, 3.6, 0.955, {96: 0.72, 32: 0.43}),
        (192, 8, 2, 1, 4, 4.09, 1.067, {96: 0.72, 32: 0.43}),
        (256, 8, 2, 1, 3, 4.89, 1.389, {128: 0.83, 64: 0.563}),
    )
)  # fmt: skip
_NORMAL = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)  # numbers of a normal distribution, equally likely


def _tile_of_groups(p: Problem) -> WgmmaConfig:
    """The tile that takes the least time by `GROUPED_TILES`.

    Sizes of groups are unknown. A third of the estimate is for equal sizes, a third for tokens that choose their groups
    at random, and a third for sizes between 0 and twice the average. A tile of more than twice the average rows was not
    timed against narrower ones.
    """
    each = p.m / p.groups  # rows of a group
    steps = ceil_div(p.k, 128)
    # A group's first tile begins up to 7 rows before it.
    chance = [each + 3.5 + each**0.5 * normal for normal in _NORMAL]
    between = [3.5 + each * (2 * i + 1) / 8 for i in range(8)]
    sizes = [each] * 8 + chance + between

    def microseconds(config: WgmmaConfig, turn: float, step: float, narrow: dict[int, float]) -> float:
        def of_group(rows: float) -> float:
            whole, left = divmod(rows, config.rows)
            last = next((time for width, time in sorted(narrow.items()) if left <= width), step)
            return whole * (turn + steps * step) + (turn + steps * last) * (left > 0)

        programs = p.groups * ceil_div(p.n, 16 * config.parts * config.warps) / p.target.multiprocessors
        return max(programs, 1.0) * sum(map(of_group, sizes)) / len(sizes)

    tiles = GROUPED_TILES[-1:]  # only read when sizes are concrete
    if p.static:
        tiles = [tile for tile in GROUPED_TILES if tile[0].rows <= max(16, 2 * each)]
    return min(tiles, key=lambda tile: microseconds(*tile))[0]
