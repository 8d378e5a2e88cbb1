"""Launch configurations of the block-scaled kernels of SM100, which `cost` compares; none was timed.

Launch tables of other kernels are beside the kernels.
"""

from dataclasses import dataclass, replace
from typing import Any

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div
from fp4compile.templates.launch import LaunchConfig
from fp4compile.templates.problem import Problem

SKINNY_BLOCK_SCALED_ROWS = 64  # rows of A up to which `skinny_block_scaled_sm100` serves


@dataclass(frozen=True)
class BlockScaledConfig(LaunchConfig):
    """The launch configuration of `block_scaled_sm100`.

    bm, bn: the tile of the result. bk: elements of a step along K. stages: pipeline stages. parts: parts of a tile's
    columns that the epilogue processes one by one. tma: whether TMA copies operands; else threads load them by
    pointers.
    warp_specialize: whether some warps issue copies, some matmuls, and some apply the epilogue. two_sums: whether
    tensor memory holds the sums of two tiles. num_warps: warps of a program; with specialised warps, warps of the
    epilogue alone. group_m: row tiles that are scheduled together, so that they share the L2 cache.
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
    """The configuration of `block_scaled_configs` with the least traffic; see `with_least_traffic`."""
    return with_least_traffic(p, block_scaled_configs(p))


def with_least_traffic(p: Problem, configs: tuple[BlockScaledConfig, ...]) -> BlockScaledConfig:
    """The configuration with the least traffic from the L2 cache, which bounds the kernel; nothing was timed.

    A multiprocessor reads 64 bytes per clock from the L2 cache and computes 16,384 products of NVFP4 per clock. So a
    step of a 128 x 256 tile takes 864 clocks to read and 512 to multiply. A matmul takes about as long as reading bm +
    bn rows for each tile that one multiprocessor computes. A large number represents a symbolic size.
    """
    m, n, batches = (size if isinstance(size, int) else 2**14 for size in (p.m, p.n, p.batches))
    sized = replace(p, batches=batches)

    def rows_read(config: BlockScaledConfig) -> int:
        """Rows of operands that the busiest multiprocessor reads."""
        tiles = row_tile_count(sized, m, config.bm) * ceil_div(n, config.bn)
        return ceil_div(tiles, p.target.multiprocessors) * (config.bm + config.bn)

    return min(configs, key=rows_read)


def row_tile_count(p: Problem, m: Any, bm: int) -> Any:
    """The number of tiles of bm rows for m rows of A; with groups, if each group's last tile is half full."""
    if p.by_rows:
        return m // bm + ceil_div(p.groups, 2)
    return ceil_div(m, bm) * (p.groups if p.along_k else p.batches)


def tma_copies(*operands: tuple[BlockFormat, int]) -> bool:
    """Whether TMA copies the rows of codes of both operands, each (format, bytes of a row).

    Rows must be multiples of 16 bytes. For FP4 with FP8 operands, TMA expands each FP4 code to a byte (16U4_ALIGN16B);
    rows of such FP4 codes must be multiples of 128 codes (CUDA driver API, cuTensorMapEncodeTiled).
    """
    spread = len({fmt.packed for fmt, _ in operands}) > 1
    return all(statically_true(size % (64 if spread and fmt.packed else 16) == 0) for fmt, size in operands)


def block_scaled_configs(p: Problem) -> tuple[BlockScaledConfig, ...]:
    """Every configuration that is worth timing, for `autotune`.

    A step is 128 bytes of the wider operand's codes: a row of shared memory as TMA lays it out. Tensor memory has 512
    columns. The sums of a tile of 256 columns take half of the 512, scales some of the other half.
    """
    # A descriptor of a matrix without columns would not be valid.
    rows = ((p.a.format, p.row_bytes(p.a)), (p.b.format, p.row_bytes(p.b)))
    tma = statically_true(p.k > 0) and tma_copies(*rows)
    step = 256 if p.a.format.packed and p.b.format.packed else 128
    if p.target.sm >= 120:
        return _sm120_configs(step, tma)
    if not tma:
        return (BlockScaledConfig(128, 128, step, stages=3, parts=2, tma=False, warp_specialize=False),)
    wide = BlockScaledConfig(128, 256, step, stages=4, parts=8)
    narrow = BlockScaledConfig(128, 128, step, stages=5, parts=4, two_sums=True)
    if p.spec.result is not None:  # half of a part's columns lie in one thread: whole blocks of 16 or 32
        wide, narrow = replace(wide, parts=4), replace(narrow, parts=2)
    if p.spec.pair:  # 128 columns of both matmuls
        return (replace(wide, stages=_stages(p, wide)),)
    return _with_parts(p, replace(wide, stages=_stages(p, wide))), _with_parts(p, narrow)


def _sm120_configs(step: int, tma: bool) -> tuple[BlockScaledConfig, ...]:
    """The configurations for SM120: no tensor memory, 99 KB of shared memory, no specialised warps.

    Triton has a buffer less than stages; two buffers and a part of the result take up to 90 KB. By the compiled code of
    NVFP4, a step of 256 columns has 8 barriers and 0.375 loads of fragments for each matrix instruction, as one of 128
    has, so a tile waits half as often. Four warps load 0.25; two such programs share a multiprocessor, and the epilogue
    of one runs beside the matmuls of the other. With FP8 operands four warps spill registers.
    """
    base = BlockScaledConfig(128, 128, 128, stages=3, parts=4, tma=tma, warp_specialize=False)
    if step == 128:
        return (base,)
    if not tma:
        return (replace(base, stages=4),)
    return replace(base, bk=256), replace(base, num_warps=4, parts=8)


def _stages(p: Problem, config: BlockScaledConfig) -> int:
    """The number of stages, up to `config.stages`, that shared memory holds besides the epilogue's buffers.

    The buffers hold a part of the result and, with pointwise operations, a part of their operand. Where the result is
    quantised, 4 KB are enough for 16-bit operands and the scales, and 8 KB for float32 operands. The part passes in
    float32 where it has an operand whose rows are no multiples of 16 elements.
    """
    elements = config.bm * config.bn // config.parts
    if p.spec.amax:
        buffers = elements * (p.spec.out_dtype.itemsize + p.operand_bytes)
    elif p.spec.result is None:
        buffers = elements * (p.spec.out_dtype.itemsize + (4 if p.spec.epilogue else 0))
    elif p.operand_bytes and not statically_true(p.n % 16 == 0):
        buffers = 4 * elements
    else:
        buffers = elements // (2 if p.spec.result.packed else 1) + max(4096, 2048 * p.operand_bytes)
    return min(config.stages, (p.target.shared_memory - buffers - 2048) // _stage_bytes(p, config))


def _stage_bytes(p: Problem, config: BlockScaledConfig) -> int:
    return (config.bm + config.bn) * (128 + config.bk // p.a.format.block_cols)


def _with_parts(p: Problem, config: BlockScaledConfig) -> BlockScaledConfig:
    """The configuration with as few parts as shared memory holds beside the stages, if TMA stores the result.

    TMA stores all parts from one buffer, so each part waits until the previous one has left it. Parts that threads
    store need no buffer, and parts of an epilogue keep their width, because their operands pass through shared memory
    too.
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
    """The launch configuration of `block_scaled_two_ctas_sm100`.

    bm, bn: the tile of the result that a pair of CTAs computes. bk: elements of a step along K. stages: steps whose
    operands shared memory holds. num_warps: warps of a CTA's epilogue. group_m: row tiles that are scheduled together,
    so that they share the L2 cache.
    """

    host = ("num_warps",)
    bm: int
    bn: int
    bk: int
    stages: int
    num_warps: int = 8
    group_m: int = 8


def two_cta_config(p: Problem) -> TwoCtaConfig:
    """The only configuration: 256x256 is the largest tile of a 2-CTA matrix instruction.

    Five stages and two buffers of 16 KB for the result take up to 222 KB of shared memory; six stages do not fit. Codes
    and their scales take less.
    Tensor memory has 512 columns. The sums of a tile take 256, scales up to 48: there is no room for two tiles' sums.
    """
    step = 256 if p.a.format.packed and p.b.format.packed else 128
    return TwoCtaConfig(256, 256, step, stages=5)


@dataclass(frozen=True)
class SkinnyBlockScaledConfig(LaunchConfig):
    """The launch configuration of `skinny_block_scaled_sm100`.

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

    K is split until there is a program for each multiprocessor, or one for each step: only weights as small as the K or
    V projection alone have fewer programs. Two programs share a multiprocessor, each with two steps in flight: for
    NVFP4 that is 72 KB of B, or 10 MB on a B200. At 8 TB/s, 10 MB arrive in 1.3 us, which is longer than a load takes.

    The padding of A to 128 rows costs shared memory. At 8 TB/s a step's 18 KB of NVFP4 take a multiprocessor 630 clocks
    of 1.85 GHz. Meanwhile it writes 36 KB and the matrix unit reads 36 KB: 576 clocks at 128 bytes each. The matrix
    instructions take 256 clocks.

    A thread copies at least 4 bytes at once, and a step of MXFP8 has 512 bytes of scales, which four warps copy.
    """
    rows = 16 if statically_true(p.m <= 16) else 32 if statically_true(p.m <= 32) else 64
    bk, warps = (256, 8) if p.a.format.packed and p.b.format.packed else (128, 4)
    tiles, steps, split_k = ceil_div(p.n, 128) * p.batches, ceil_div(p.k, bk), 1
    if isinstance(tiles, int) and isinstance(steps, int):
        split_k = max(min(ceil_div(p.target.multiprocessors, max(tiles, 1)), steps), 1)
    return SkinnyBlockScaledConfig(rows, bk, stages=3, num_warps=warps, split_k=split_k)
