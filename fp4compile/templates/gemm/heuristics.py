"""Launch configurations of the GEMM kernels, by sizes: the tiles, warps, stages and grids that were best on an H200.

One typed configuration for each kernel. Figures come from benchmarks/launches.py and from decoding with Llama-3-8B;
nothing was timed on another GPU.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import TILE_ROWS, ceil_div
from fp4compile.formats.product_spec import ProductSpec
from fp4compile.hardware import Target
from fp4compile.templates.device.shared_memory import reserved
from fp4compile.templates.launch import LaunchConfig
from fp4compile.templates.problem import Problem

SKINNY_ROWS = 8  # rows of A up to which `skinny` serves
WGMMA_ROWS = 8192  # rows of A up to which `wgmma_sm90` serves: the most that were timed
SKINNY_BLOCK_SCALED_ROWS = 64  # rows of A up to which `skinny_block_scaled_sm100` serves
# Rows of A from which on the library's product of dequantised operands is faster than `dequant_tiles`. On an H200 with
# N = K = 8192, 128 rows take 90 us by the library and 146 us (codes) to 191 us (plain A) in one kernel, 2048 rows 410
# us and 870 us. `wgmma_sm90` is faster than both up to WGMMA_ROWS rows: 128 rows take 35 us on an H100, and 116 us by
# the library; 8192 rows 1646 us and 1764 us.
LIBRARY_ROWS = 65


@dataclass(frozen=True)
class GemvConfig(LaunchConfig):
    """How `gemv` is launched.

    warps: warps of a program. steps: steps of a warp along K. rows: rows of A that the kernel computes, 1 or 2.
    shared: bytes of shared memory to reserve for a program. grid: the most programs; fewer tiles need fewer.
    """

    host = ("grid",)
    warps: int
    steps: int
    rows: int
    shared: int
    grid: int


def gemv_config(p: Problem, width: int, needed_bytes: Callable[[int, int, int], int]) -> GemvConfig | None:
    """The configuration; None for more than two rows of A, or for rows that shared memory cannot hold.

    width: elements of a warp's step along K. needed_bytes: bytes of shared memory, by warps, steps and rows.
    """
    rows = 1 if statically_true(p.m == 1) else 2
    warps = 8 if statically_true(p.k <= 16 * 8 * width) else 16
    steps = ceil_div(p.k, width * warps)
    # A lane holds its warp's whole part of a row in registers before shared memory, which bounds the steps.
    if not statically_true(p.m <= 2) or not statically_true(steps <= 16):
        return None
    size = needed_bytes(warps, steps, rows)
    fit = [each for each in (2, 3) if each * warps <= 24 and reserved(size, each, p.target)]
    if not fit and not reserved(size, 1, p.target):
        return None
    # Two or three programs share a multiprocessor, whichever number leaves fewer idle in the last round of tiles.
    each = fit[0] if fit else 1
    if fit and isinstance(p.n, int):
        each = min(fit, key=lambda each: each * ceil_div(ceil_div(p.n, 16), each * p.target.multiprocessors))
    return GemvConfig(warps, steps, rows, reserved(size, each, p.target), each * p.target.multiprocessors)


@dataclass(frozen=True)
class SkinnyConfig(LaunchConfig):
    """How `skinny` is launched.

    rows: rows of A that the kernel computes. tiles: tiles of 16 rows of B that a program computes at a time. warps:
    warps of a program. stages: pipeline stages. chains: independent accumulators of a warp. grid: the most programs.
    """

    host = ("grid",)
    rows: int
    tiles: int
    warps: int
    stages: int
    chains: int
    grid: int


def skinny_config(p: Problem) -> SkinnyConfig:
    """The configuration, tuned for the shapes of Llama-3. Every one fits into 48 KB of shared memory.

    With six programs for each multiprocessor some programs take two tiles, and no last few programs run alone. Two
    chains pay where few warps share a multiprocessor.
    """
    rows = next((rows for rows in (2, 4) if statically_true(p.m <= rows)), 8)
    tiles, warps, stages = 2, 4, 2
    if statically_true(p.n >= 8192):
        if rows <= 4 and statically_true(p.n < 16384):
            stages = 3
    elif rows == 8:
        tiles = 1
    elif statically_true(p.n <= 2048) or statically_true(p.k > 8192):
        tiles, warps = 1, 8
    else:
        tiles, stages = 1, 4
    return SkinnyConfig(rows, tiles, warps, stages, 1 if rows == 8 else 2, 6 * p.target.multiprocessors)


@dataclass(frozen=True)
class WgmmaConfig(LaunchConfig):
    """How `wgmma_sm90` is launched.

    rows: rows of A in a tile of the result, padded to 16, 32, 64, 72, 80, 96, 128, 160, 192, 224 or 256. warps: warps
    of a program. parts: how often a warp has 16 rows of B, 1 or 2. stages: pipeline stages of a warp's weights.
    steps_per_stage: steps of a pipeline stage of A. split_k: parts of K, whose sums another kernel adds. group_m: tiles
    of A that are walked together, so that the L2 cache serves them. buffers: stages of A in shared memory. narrow,
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
        """Programs. groups: of rows of A; as many programs as any sizes of these groups, and rows of no group, need."""
        return tiles_of_rows(m, self.rows, groups) * ceil_div(n, 16 * self.parts * self.warps) * self.split_k


def tiles_of_rows(m, rows: int, groups=0):
    """The most tiles of `rows` rows that m rows of A need.

    groups: of rows, each of which begins a new tile, at its first row or up to 7 rows before it.
    """
    return (m + (groups + 1) * (rows - 1) + groups * 7) // rows


def wgmma_config(p: Problem, needed_bytes: Callable[..., int]) -> WgmmaConfig:
    """The configuration, tuned for the shapes of Llama-3. needed_bytes: as for `with_shared_memory`."""
    tile = _wgmma_tile(p) if statically_true(p.m <= 64) else _wgmma_large_tile(p)
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


def _wgmma_tile(p: Problem) -> WgmmaConfig:
    """The tile up to 64 rows of A: a program of eight warps for each multiprocessor, or one program of 16 warps.

    16 warps read A less often, which pays where A has many rows and B is large. Small weights need many small
    programs, and so do large weights with few rows of A. Partial sums cost another launch, so one program for each
    multiprocessor is enough, unless K is very long. An epilogue takes registers, which 16 warps do not have.
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
# 28672x8192 and 4096x14336), together with the next two lines, to 5 %; 72, 160 and 224 rows lie between. By them the
# fastest of the timed tiles is chosen in all cases but three, which lose up to 3 %. The more rows of A, the fewer bytes
# go through shared memory for a product: with 256 rows the matrix units are busy for 95 % of a program's time. Two
# parts make tiles of twice the size, which pays where one part would leave half of the last round of programs empty.
# Against bf16, 8192x8192, microseconds on an H200 (benchmarks/results/many_rows_h200.json): 65 rows 38.5 and 27.8, 128
# rows 41.8 and 34.8, 256 rows 54.7 and 56.8, 512 rows 93.7 and 91.5, 1024 rows 178.6 and 179.0, 2048 rows 360.0 and
# 377.2.
_LARGE_TILES = (
    (72, 1, 3, 4, 0.61), (80, 1, 3, 4, 0.66), (96, 1, 4, 4, 0.72), (128, 1, 4, 4, 0.83), (160, 1, 4, 4, 0.95),
    (192, 1, 2, 4, 1.09), (224, 1, 3, 3, 1.26), (256, 1, 2, 3, 1.44), (96, 2, 3, 4, 1.33), (128, 2, 3, 4, 1.565),
)  # fmt: skip
_ROUND = 2.0  # microseconds of a round of programs beside its steps
_SUMS, _SUMS_PER_MILLION = 4.3, 2.1  # microseconds of the launch that adds partial sums, and of a million of them


def _wgmma_large_tile(p: Problem) -> WgmmaConfig:
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


@dataclass(frozen=True)
class DequantTilesConfig(LaunchConfig):
    """How `dequant_tiles` is launched.

    bm, bn: the tile of the result. units, warps: a step along K has `warps` shares of `units` units (element pairs).
    stages: pipeline stages. num_warps: warps of a program. split_k: parts of K, whose sums another kernel adds.
    group_m: row tiles that are walked together, so that the L2 cache serves them.
    """

    host = ("num_warps", "split_k")
    bm: int
    bn: int
    units: int
    warps: int
    stages: int
    num_warps: int
    split_k: int = 1
    group_m: int = 8

    @property
    def step(self) -> int:
        """Units of a step along K."""
        return self.units * self.warps

    @property
    def constants(self) -> dict[str, int]:
        return {**super().constants, "SPLIT": self.split_k}


# By A (plain 16-bit or packed codes) and its rows: columns of B, units and warps of a step, stages, num_warps, and
# how often programs fill the GPU (`_full`) before K is no longer split.
_FEW_ROWS = {
    ("plain", 8): (32, 128, 4, 3, 4, 1), ("packed", 8): (32, 128, 4, 4, 4, 1),
    ("plain", 16): (32, 64, 4, 4, 4, 1), ("packed", 16): (32, 128, 2, 5, 2, 1),
    ("plain", 32): (64, 32, 4, 5, 4, 1), ("packed", 32): (64, 64, 4, 5, 4, 1),
    ("plain", 64): (128, 32, 1, 4, 8, 2), ("packed", 64): (64, 64, 1, 4, 4, 4),
}  # fmt: skip


def _full(target: Target) -> int:
    """Programs that count as filling the GPU once.

    The number of rows of weights is a power of two, so on an H200 128 programs count as filling 132 multiprocessors. On
    a B200 that would leave 20 of 148 idle.
    """
    return target.multiprocessors if target.sm >= 100 else target.multiprocessors * 32 // 33


def dequant_tiles_config(p: Problem) -> DequantTilesConfig:
    """The configuration, by the number of rows of A, the compute type, and the GPU's shared memory."""
    if p.target.sm == 0:
        if statically_true(p.m <= 8):  # so that the interpreter runs a split K as well
            return DequantTilesConfig(8, 16, 16, 2, 2, 4, split_k=2)
        return DequantTilesConfig(16, 16, 32, 1, 2, 4)
    if p.compute == "fp32":
        return DequantTilesConfig(32, 32, 16, 1, 2, 4)
    small = p.target.sm < 80 or p.target.sm in (86, 89, 120, 121)  # about 100 KB of shared memory
    if statically_true(p.m <= 64):
        return _few_rows(p, budget=90_000 if small else 216_000)
    return DequantTilesConfig(64, 128, 32, 1, 2, 8) if small else DequantTilesConfig(128, 128, 32, 1, 3, 8)


def _few_rows(p: Problem, budget: int) -> DequantTilesConfig:
    """The configuration for up to 64 rows of A. budget: bytes of shared memory for the tiles that are being loaded."""
    bm = next(rows for rows in (8, 16, 32, 64) if statically_true(p.m <= rows))
    a_bytes, b_bytes = p.a.unit_bytes, p.b.unit_bytes
    bn, units, warps, stages, num_warps, times = _FEW_ROWS["packed" if a_bytes == 1 else "plain", bm]
    full = _full(p.target)
    while bn > 16 and bm < 64 and not statically_true(ceil_div(p.n, bn) >= full):
        bn //= 2
    if b_bytes > 1:  # more registers an element
        units //= 2
    while units > 32 and (stages - 1) * warps * units * (bm * a_bytes + bn * b_bytes) > budget:
        units //= 2
    split_k = 1
    while (
        split_k < 8
        and statically_true(ceil_div(p.n, bn) * split_k < times * full)
        and statically_true(p.k >= 4 * split_k * units * warps)
    ):
        split_k *= 2
    return DequantTilesConfig(bm, bn, units, warps, stages, num_warps, split_k)


@dataclass(frozen=True)
class BlockScaledConfig(LaunchConfig):
    """How `block_scaled_sm100` is launched.

    bm, bn: the tile of the result. bk: elements of a step along K. stages: pipeline stages. parts: parts of a tile's
    columns that the epilogue takes one by one. tma: whether TMA copies operands; else threads load them by pointers.
    warp_specialize: whether some warps issue copies, some products, and some apply the epilogue. two_sums: whether
    tensor memory holds the sums of two tiles. num_warps: warps of a program; with specialised warps, warps of the
    epilogue alone. group_m: row tiles that are walked together, so that the L2 cache serves them.
    """

    host = ("num_warps", "stages")
    bm: int
    bn: int
    bk: int
    stages: int
    parts: int
    tma: bool = True
    warp_specialize: bool = True
    two_sums: bool = False
    num_warps: int = 8
    group_m: int = 8


def block_scaled_config(p: Problem) -> BlockScaledConfig:
    """The configuration with the least traffic from the L2 cache, which bounds the kernel; nothing was timed.

    A multiprocessor reads 64 bytes a clock from the L2 cache and multiplies NVFP4 at 16,384 products a clock. So a step
    of a 128 x 256 tile takes 864 clocks to read and 512 to multiply. A product takes about as long as reading bm + bn
    rows for each tile that one multiprocessor computes.
    """
    return min(block_scaled_configs(p), key=lambda config: _rows_read(p, config))


def row_tile_count(p: Problem, m: Any, bm: int) -> Any:
    """How many tiles of bm rows m rows of A have; with groups of rows, if the last tile of a group is half full."""
    if p.by_rows:
        return m // bm + ceil_div(p.groups, 2)
    return ceil_div(m, bm) * (p.groups if p.along_k else p.batches)


def tma_copies(*operands: tuple[BlockFormat, int]) -> bool:
    """Whether TMA copies the rows of codes of both operands, each (format, bytes of a row).

    Rows must be whole 16 bytes. TMA spreads FP4 codes beside FP8 codes to a byte each (16U4_ALIGN16B); rows of such FP4
    codes must be whole 128 codes (CUDA driver API, cuTensorMapEncodeTiled).
    """
    spread = len({fmt.packed for fmt, _ in operands}) > 1
    return all(statically_true(size % (64 if spread and fmt.packed else 16) == 0) for fmt, size in operands)


def _rows_read(p: Problem, config: BlockScaledConfig) -> int:
    """Rows of operands that the busiest multiprocessor reads. Many rows of A stand for a symbolic number."""
    m, n, batches = (size if isinstance(size, int) else 2**14 for size in (p.m, p.n, p.batches))
    tiles = ceil_div(m, config.bm) * ceil_div(n, config.bn) * batches
    return ceil_div(tiles, p.target.multiprocessors) * (config.bm + config.bn)


def block_scaled_configs(p: Problem) -> tuple[BlockScaledConfig, ...]:
    """Every configuration that is worth timing, for `autotune`.

    A step is 128 bytes of the wider operand's codes: a row of shared memory as TMA lays it out. Tensor memory has 512
    columns. The sums of a tile of 256 columns take half of the 512, scales some of the other half.
    """
    # A descriptor of a matrix without columns would not be valid.
    rows = ((p.a.format, p.row_bytes(p.a)), (p.b.format, p.row_bytes(p.b)))
    tma = statically_true(p.k > 0) and tma_copies(*rows)
    step = 256 if p.a.format.packed and p.b.format.packed else 128
    if p.target.sm >= 120:  # no tensor memory, 99 KB of shared memory
        stages = 4 if step == 256 else 3
        return (BlockScaledConfig(128, 128, 128, stages, parts=4, tma=tma, warp_specialize=False),)
    if not tma:
        return (BlockScaledConfig(128, 128, step, stages=3, parts=2, tma=False, warp_specialize=False),)
    wide = BlockScaledConfig(128, 256, step, stages=4, parts=8)
    narrow = BlockScaledConfig(128, 128, step, stages=5, parts=4, two_sums=True)
    if p.spec.result is not None:  # half of a part's columns lie in one thread: whole blocks of 16 or 32
        wide, narrow = replace(wide, parts=4), replace(narrow, parts=2)
    if p.spec.pair:  # 128 columns of both products
        return (replace(wide, stages=_stages(p, wide)),)
    return _with_parts(p, replace(wide, stages=_stages(p, wide))), _with_parts(p, narrow)


def _stages(p: Problem, config: BlockScaledConfig) -> int:
    """As many stages, up to `config.stages`, as shared memory holds beside the epilogue's buffers.

    The buffers hold a part of the result and, with pointwise operations, a part of their operand. Where the result is
    quantised, 4 KB are enough for 16-bit operands and the scales, and 8 KB for float32 operands.
    """
    elements = config.bm * config.bn // config.parts
    if p.spec.amax:
        buffers = elements * (p.spec.out_dtype.itemsize + p.operand_bytes)
    elif p.spec.result is None:
        buffers = elements * (p.spec.out_dtype.itemsize + (4 if p.spec.epilogue else 0))
    else:
        buffers = elements // (2 if p.spec.result.packed else 1) + max(4096, 2048 * p.operand_bytes)
    return min(config.stages, (p.target.shared_memory - buffers - 2048) // _stage_bytes(p, config))


def _stage_bytes(p: Problem, config: BlockScaledConfig) -> int:
    return (config.bm + config.bn) * (128 + config.bk // p.a.format.block_cols)


def _with_parts(p: Problem, config: BlockScaledConfig) -> BlockScaledConfig:
    """The configuration with as few parts as shared memory holds beside the stages, if TMA stores the result.

    TMA stores all parts from one buffer, so each part waits until the one before has left it. Parts that threads store
    need no buffer, and parts of an epilogue keep their width: their operands pass through shared memory too.
    """
    stored_by_tma = statically_true(p.batches == 1) and statically_true(p.n * p.spec.out_dtype.itemsize % 16 == 0)
    if p.spec.epilogue or not stored_by_tma:
        return config
    free = p.target.shared_memory - 2048 - config.stages * _stage_bytes(p, config)
    while config.parts > 1 and 2 * config.bm * config.bn // config.parts * p.spec.out_dtype.itemsize <= free:
        config = replace(config, parts=config.parts // 2)
    return config


@dataclass(frozen=True)
class TwoCtaConfig(LaunchConfig):
    """How `block_scaled_two_ctas_sm100` is launched.

    bm, bn: the tile of the result that a pair of CTAs computes. bk: elements of a step along K. stages: steps whose
    operands shared memory holds. num_warps: warps of a CTA's epilogue. group_m: row tiles that are walked together, so
    that the L2 cache serves them.
    """

    host = ("num_warps",)
    bm: int
    bn: int
    bk: int
    stages: int
    num_warps: int = 8
    group_m: int = 8


def two_cta_config(p: Problem) -> TwoCtaConfig:
    """The one configuration: 256x256 is the largest product of a pair's matrix units.

    Five stages and two buffers of 16 KB for the result take up to 222 KB of shared memory; six stages do not fit. Codes
    and their scales take less.
    Tensor memory has 512 columns. The sums of a tile take 256, scales up to 48: there is no room for two tiles' sums.
    """
    step = 256 if p.a.format.packed and p.b.format.packed else 128
    return TwoCtaConfig(256, 256, step, stages=5)


@dataclass(frozen=True)
class SkinnyBlockScaledConfig(LaunchConfig):
    """How `skinny_block_scaled_sm100` is launched.

    rows: rows of A, padded to 16, 32 or 64. bk: elements of a step along K. stages: pipeline stages. num_warps: warps
    of a program. split_k: parts of K, whose sums another kernel adds.
    """

    host = ("num_warps", "split_k")
    rows: int
    bk: int
    stages: int
    num_warps: int
    split_k: int = 1

    @property
    def bm(self) -> int:
        """Rows of A in a tile, with the padding."""
        return 128

    @property
    def bn(self) -> int:
        """Rows of B in a tile."""
        return 128


def skinny_block_scaled_config(p: Problem) -> SkinnyBlockScaledConfig:
    """The configuration, by arithmetic: nothing was timed on SM100.

    K is cut until there is a program for each multiprocessor, or one for each step: only weights as small as the K or V
    projection alone have fewer programs. Two programs share a multiprocessor, each with two steps on their way: for
    NVFP4 that is 72 KB of B, or 10 MB on a B200. At 8 TB/s, 10 MB arrive in 1.3 us, which is longer than a load takes.

    The padding of A to 128 rows costs shared memory. At 8 TB/s a step's 18 KB of NVFP4 take a multiprocessor 630 clocks
    of 1.85 GHz. Meanwhile it writes 36 KB and the matrix unit reads 36 KB: 576 clocks at 128 bytes each. The products
    take 256 clocks.

    A thread copies at least 4 bytes at once, and a step of MXFP8 has 512 bytes of scales, which four warps copy.
    """
    rows = 16 if statically_true(p.m <= 16) else 32 if statically_true(p.m <= 32) else 64
    bk, warps = (256, 8) if p.a.format.packed and p.b.format.packed else (128, 4)
    tiles, steps, split_k = ceil_div(p.n, 128) * p.batches, ceil_div(p.k, bk), 1
    if isinstance(tiles, int) and isinstance(steps, int):
        split_k = max(min(ceil_div(p.target.multiprocessors, max(tiles, 1)), steps), 1)
    return SkinnyBlockScaledConfig(rows, bk, stages=3, num_warps=warps, split_k=split_k)


# The library's product is computed whole if it needs at most WHOLE_BYTES of memory beside operands, output and the
# operand that is dequantised first, else in parts of about PART_BYTES. Four times as much is allowed if that operand
# has up to FEW_LINES lines, or if the library writes the result itself: a graph cannot hold such parts. A part has at
# least LEAST_LINES rows or columns and LEAST_RESULTS results: smaller parts do not fill the GPU, and take longer to
# launch than to compute. On an H200 with M = N = K = 8192, NVFP4 weights and bf16 activations, four parts take 1481 us
# and the whole 1578 us: dequantised values and sums stay in the cache. With M = 2048, N = 14336, K = 4096, seven parts
# take 421 us and the whole 388 us.
WHOLE_BYTES, FEW_LINES = 2**26, 2048
PART_BYTES, LEAST_LINES, LEAST_RESULTS = 2**24, 2048, 2**22


@dataclass(frozen=True)
class DequantOperandConfig:
    """How `dequant_operand` is launched.

    by_columns: whether A is dequantised whole and B in parts, which are columns of the result; else the reverse. lines:
    rows of the cut operand in a part; None where the product is computed whole.
    """

    by_columns: bool
    lines: int | None


def dequant_operand_config(p: Problem, direct: bool) -> DequantOperandConfig:
    """The configuration. direct: whether the library writes the result itself, so that no float32 sums are needed."""
    by_columns = _dequantized_bytes(p, p.a.format, p.m) < _dequantized_bytes(p, p.b.format, p.n)
    count, others, cut = (p.n, p.m, p.b) if by_columns else (p.m, p.n, p.a)
    line_bytes = (0 if cut.format is None else 2 * p.k) + (0 if direct else 4 * others)
    most = 4 * WHOLE_BYTES if direct or statically_true(others <= FEW_LINES) else WHOLE_BYTES
    if statically_true(count * line_bytes <= most):
        return DequantOperandConfig(by_columns, None)
    if not all(isinstance(size, int) for size in (count, others, line_bytes)):
        return DequantOperandConfig(by_columns, LEAST_LINES)  # only read when sizes are concrete
    return DequantOperandConfig(by_columns, max(PART_BYTES // line_bytes, LEAST_RESULTS // others, LEAST_LINES))


def _dequantized_bytes(p: Problem, fmt, rows):
    """Bytes that an operand takes in 16 bits. A symbolic number of rows counts as few."""
    return 0 if fmt is None else 2 * p.k * (rows if isinstance(rows, int) else LIBRARY_ROWS)


# ---------------------------------------------------------------- groups

# Row tiles of 128 of a group, on average, up to which every tile dequantises the matrix of its group for itself. Groups
# of unlike sizes have half a tile more each. Microseconds on an H200 for dequantisation in the main loop and in memory,
# for DeepSeek-V3, Llama-4 and Qwen3-30B-A3B: with 64 tokens an expert 137 and 178, 530 and 900, 202 and 353; with 128
# tokens 246 and 185, 968 and 943, 373 and 405; with 256 tokens 358 and 266, 1587 and 1120, 623 and 499
# (benchmarks/results/grouped_mm_h200.json).
TILES_IN_REGISTERS = 1
# Rows of a group along K, on average, from which on operands are dequantised in memory (`LIBRARY_ROWS`): as many tiles
# read an operand as the result has tiles beside each other, however few rows a group has.
MANY_ROWS = 65


@dataclass(frozen=True)
class GroupedDotConfig(LaunchConfig):
    """How `gemm_grouped` is launched.

    bm, bn: the tile of the result. bk: elements of a step along K, which divide 128. stages: pipeline stages. parts:
    parts of a tile's columns that are stored one by one. num_warps: warps of a program. group_m: row tiles that are
    walked together, so that the L2 cache serves them.
    """

    bm: int
    bn: int
    bk: int
    stages: int
    parts: int
    num_warps: int
    group_m: int = 8


def dequantizes_in_memory(p: Problem) -> bool:
    """Whether groups are known to have enough rows, on average, to dequantise operands in memory, once."""
    return statically_true(p.rows >= least_rows_in_memory(p))


def least_rows_in_memory(p: Problem) -> int:
    """The number of rows of all groups from which on operands are dequantised in memory."""
    return MANY_ROWS * p.groups if p.along_k else TILES_IN_REGISTERS * TILE_ROWS * p.groups + 1


def grouped_dot_config(p: Problem) -> GroupedDotConfig:
    """128 x 256 tiles where shared memory holds their stages, else 128 x 128.

    A multiprocessor of Hopper multiplies 16-bit numbers at 2048 products a clock. A step of a 128 x 256 tile takes
    1024 clocks and reads 48 KB, 48 bytes a clock; a step of a 128 x 128 tile takes 512 clocks and reads 32 KB.
    """
    if p.target.shared_memory < 200 * 1024:
        return GroupedDotConfig(128, 128, 32, stages=3, parts=4, num_warps=8)
    return GroupedDotConfig(128, 256, 64, stages=4, parts=8, num_warps=8)


def grouped_skinny_config(p: Problem, most: Any = SKINNY_ROWS) -> SkinnyConfig:
    """The configuration. most: rows of A for one matrix, at most; a group with more rows is several tiles.

    A step of a warp has 1152 bytes of B for each 16 rows, and 256 bytes for each row of A that exists. With 16 rows of
    B and up to two of A, A is less than half of B, and there are twice as many tiles; with more rows of A, 32 rows of B
    share them. Registers leave room for four programs a multiprocessor. A single stage each was the fastest on an H200
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


# Tiles of groups of rows: rows, parts, stages, steps a stage, buffers; the microseconds of a round of programs without
# its steps, and of a step of 128 elements along K; rows of narrower tiles, and the microseconds of their steps. By
# `benchmarks.packed_experts` on an H100: least squares of 30 to 58 timed cases each (9 to 1024 rows a group, of three
# shapes), without `swizzle_a_sm90`, off by 4 to 8 % on average. Up to 96 rows, two programs or more share a
# multiprocessor, and one computes while another one starts or ends. Tiles of 72, 128, 160 and 224 rows of one part were
# timed, too: without them the chosen tile is no slower in any case. Narrower tiles were not timed: their steps count as
# steps of whole tiles with as many rows, here or in `_LARGE_TILES`, and of two parts as two of them.
GROUPED_TILES = tuple(
    (WgmmaConfig(rows, 8, parts, stages, steps, 1, 8, buffers, *sorted(narrow, reverse=True)), turn, step, narrow)
    for rows, parts, stages, steps, buffers, turn, step, narrow in (
        (16, 1, 3, 2, 4, 0.78, 0.374, {}), (32, 1, 3, 2, 4, 0.94, 0.430, {}),
        (64, 1, 3, 1, 4, 1.33, 0.563, {16: 0.374}),
        (80, 1, 3, 1, 4, 1.49, 0.642, {32: 0.430}), (96, 1, 3, 1, 3, 1.57, 0.660, {32: 0.430}),
        (128, 2, 3, 1, 4, 4.39, 1.699, {64: 1.13}), (192, 1, 2, 1, 4, 4.09, 1.067, {96: 0.72, 32: 0.43}),
        (256, 1, 2, 1, 3, 4.89, 1.389, {128: 0.83, 64: 0.563}),
    )
)  # fmt: skip
_NORMAL = (-1.53, -0.89, -0.49, -0.16, 0.16, 0.49, 0.89, 1.53)  # numbers of a normal distribution, equally likely


def grouped_wgmma_config(p: Problem, needed_bytes: Callable[..., int]) -> WgmmaConfig:
    """The tile that takes the least time by `GROUPED_TILES`. needed_bytes: see `with_shared_memory`.

    Sizes of groups are not known. A third of the estimate is for equal sizes, a third for tokens that choose their
    groups by chance, and a third for sizes between 0 and twice the average. A tile of more than twice the average rows
    was not timed against narrower ones.
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
    return with_shared_memory(min(tiles, key=lambda tile: microseconds(*tile))[0], p, needed_bytes)


def grouped_tiles_config(p: Problem) -> DequantTilesConfig:
    """The tile of a dense product with a group's average number of rows, and as many tiles as all groups have.

    A symbolic number of rows counts as large.
    """
    m, k = (p.m, p.k // p.groups) if p.along_k else (p.m // p.groups, p.k)
    dense = Problem(ProductSpec(p.a, p.b, p.spec.out_dtype), m, p.n * p.groups, k, p.target)
    config = replace(dequant_tiles_config(dense), split_k=1)
    if config.warps > 1 and "e8m0" in (p.a.scale, p.b.scale):
        # The second loop, for blocks with small scales, takes registers too, which then suffice for fewer shares of K.
        shares = config.warps // 2 if config.bm <= 16 else 1
        config = replace(config, warps=shares, units=min(config.units, 64) if config.bm == 8 else 32)
    return config
