"""A cost model of a matmul and its epilogue on SM100, by the library and by a kernel of this package.

Nothing here was timed on SM100. The model is arithmetic on published rates and on the assumptions below, each with its
source. It decides where an epilogue runs: in a Triton kernel, which multiplies more slowly than the library, or in a
pointwise kernel after the library's matmul, whose result is then stored and read again. Replace the numbers by
measurements of `benchmarks` on a B200.
"""

from dataclasses import replace

from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.product_spec import OperandSpec
from fp4compile.hardware import OF_CAPABILITY, Gpu
from fp4compile.templates.gemm.heuristics import (
    BlockScaledConfig,
    SkinnyBlockScaledConfig,
    TwoCtaConfig,
    row_tile_count,
)
from fp4compile.templates.problem import Problem

# FLOP/s of FP4 by the instruction that Triton emits, on B300 too. B300 has its higher rate with an instruction of its
# own (96 elements of K), which `tl.dot_scaled` does not emit.
FP4_TRITON = OF_CAPABILITY[100].fp4
# The L2 cache: its bytes, and bytes for a clock and multiprocessor, taken from the model of the tiles below.
L2_BYTES, L2_WIDTH = 126 * 2**20, 64
# The largest share of the peak rate that a tile of 128x256 can reach, and the rows of A and B that are loaded for each
# 128x128 of its results. A step is loaded from the L2 cache at 64 bytes per clock, and passes through shared memory at
# 128 bytes per clock, in the clocks of its matrix instructions. The share of other tiles is scaled by the rows they
# load. A model of the clocks gives 45 %, 64 % and 93 % for 128x128, 128x256 and 256x256 over two multiprocessors; this
# rule gives 48 %, 64 % and 96 %.
TILE_SHARE, TILE_ROWS = 0.64, 192
# Tiles of the library, by the rows and columns of one multiprocessor. Two multiprocessors share a tile; each loads half
# of B.
LIBRARY_TILES = ((128, 256), (128, 128), (128, 64))
# The fraction of its tile's share that any kernel is assumed to reach: the fraction of cuBLAS with 256x256 over two
# multiprocessors, published at 5.4 PFLOP/s for NVFP4 with M = N = K = 8192 on a B200. For 128x256 that gives 3.6
# PFLOP/s, 67 % of cuBLAS; a kernel of that tile which is scheduled by hand is published at 86 %
# (triton-lang/triton#9697). Triton's own schedule for the kernel here is not expected to reach that.
REACHED = 5.4 / (9 * 0.96)
MEMORY_SHARE = 0.9  # of the published bytes/s: device copies on the H200 reach 4.28 of 4.8 TB/s
LAUNCH = 1.5e-6  # seconds of one more kernel in a CUDA graph, half the time of a pair on the H200
# Seconds in which a program of `block_scaled_sm100` makes its five descriptors, before anything else: assumed, for
# 386 instructions of one warp, which Triton 3.9 generates, and five writes to memory that the warp waits for. It is
# counted against the kernel for few rows, which makes none; what the library's kernels do before their first tile is
# not known.
DESCRIPTORS = 1e-6
OUTER_SCALES = (
    2  # launches before a two-level matmul: torch multiplies the global scales and, in torch 2.11, copies them
)
# Instructions of a thread for 16 elements that a quantising epilogue has more than one that stores bf16, by the type of
# block scales: counted in the machine code of Triton 3.9 for sm_100a (`check-sm100`). A multiprocessor issues four
# instructions of a warp in a clock, of which an epilogue's eight warps are assumed to fill this share.
QUANTIZE_INSTRUCTIONS = {"e4m3": 89, "e8m0": 64}
ISSUED = 0.7
# Instructions of a thread for 16 elements that it takes to find the amax of a result, counted in the same way: without
# groups, and with groups of rows, whose amaxes each tile raises.
AMAX_INSTRUCTIONS, GROUP_AMAX_INSTRUCTIONS = 32, 49
CLOCK = 1.85e9
ANY_ROWS = (128, 1024, 8192)  # rows of A that represent a symbolic number of rows


def fusing_pays(p: Problem, config: BlockScaledConfig | SkinnyBlockScaledConfig) -> bool:
    """Whether the Triton kernel with an epilogue beats the library's matmul and a pointwise kernel.

    p: a problem that the library serves. config: configuration of the kernel with the epilogue. Tensors that the
    epilogue reads, and the result, are not counted: both ways read and write them. For a symbolic number of rows, the
    kernel must win for each of `ANY_ROWS`. False where another size is symbolic.
    """
    if not all(isinstance(size, int) for size in (p.n, p.k, p.batches)):
        return False
    each = [p] if isinstance(p.m, int) else [replace(p, m=m) for m in ANY_ROWS]
    return all(kernel_seconds(one, config) < library_seconds(one) + pointwise_seconds(one) for one in each)


def quantizing_pays(
    p: Problem,
    config: BlockScaledConfig,
    alone: Problem,
    alone_config: BlockScaledConfig | SkinnyBlockScaledConfig | None,
    products: int = 1,
) -> bool:
    """Whether a kernel that quantises its result in the epilogue, or finds its amax, beats matmuls and a quantiser.

    p, config: the problem with the epilogue, and its kernel's configuration. alone, alone_config: a matmul without
    an epilogue, and its kernel's configuration, None where the library serves it. products: how many such matmuls the
    kernel replaces. Codes, which both ways write, and operands of an epilogue or a prologue are not counted. Symbolic
    sizes: as in `fusing_pays`.
    """
    if not all(isinstance(size, int) for size in (p.n, p.k, p.batches)):
        return False
    more = DESCRIPTORS if isinstance(alone_config, SkinnyBlockScaledConfig) else 0.0
    for m in [p.m] if isinstance(p.m, int) else ANY_ROWS:
        fused = replace(p, m=m)
        separate = separate_seconds(replace(alone, m=m), alone_config, products, amax=p.spec.amax)
        together = quantizing_seconds(fused, config) + more
        if p.spec.amax:
            together += pointwise_seconds(fused)  # the quantiser reads the result
        if together >= separate:
            return False
    return True


def separate_seconds(
    p: Problem, config: BlockScaledConfig | SkinnyBlockScaledConfig | None, products: int, amax: bool = False
) -> float:
    """Seconds of matmuls of one problem, each by itself, and of the quantiser that reads their results.

    config: None where the library serves them. amax: whether another launch reads the results before, for their amax.
    """
    if config is None:
        seconds = library_seconds(p)
    elif isinstance(config, SkinnyBlockScaledConfig):
        seconds = skinny_seconds(p, config)
    else:
        seconds = kernel_seconds(p, config)
    both = replace(p, n=products * p.n)
    more = products - 1 + amax
    seconds = products * seconds + more * LAUNCH + pointwise_seconds(both)
    return seconds + (_pass_seconds(both) if amax else 0.0)


def skinny_seconds(p: Problem, config: SkinnyBlockScaledConfig) -> float:
    """Seconds of the kernel for few rows, and of the split-K reduction.

    Operands arrive at the rate of memory, or at the L2 rate of the multiprocessors that have a program. The float32
    partial sums stay in the L2 cache.
    """
    programs, l2 = ceil_div(p.n, config.bn) * p.batches * config.split_k, _l2(p)
    taken = l2 * min(programs, p.target.multiprocessors) / p.target.multiprocessors
    seconds = _operand_seconds(p) * max(_memory(p) / taken, 1.0)
    return seconds + LAUNCH + 2 * 4 * config.split_k * p.batches * p.m * p.n / l2


def quantizing_seconds(p: Problem, config: BlockScaledConfig | TwoCtaConfig) -> float:
    """Seconds of the kernel that quantises its result, or finds its amax, without the codes or results that it writes.

    Where tensor memory holds the sums of two tiles, a tile's epilogue overlaps with the main loop of the next one. In
    the 2-CTA kernel it does so, too, because registers hold all sums of a tile; the last tile's epilogue overlaps with
    nothing, which matters because the tile is large.
    """
    columns, ctas = 2 * p.n if p.spec.pair else p.n, _ctas(config)
    product, own = replace(p, n=columns), config.bm // ctas  # rows of a multiprocessor
    of_amax = AMAX_INSTRUCTIONS if not p.ragged else GROUP_AMAX_INSTRUCTIONS
    more = of_amax if p.spec.amax else QUANTIZE_INSTRUCTIONS[p.spec.result.scale]
    of_tile = own * config.bn * p.n // columns / 16 * more / (32 * 4 * ISSUED * CLOCK)
    tiles = row_tile_count(p, p.m, config.bm) * ceil_div(columns, config.bn)
    epilogues = ceil_div(tiles, p.target.multiprocessors // ctas) * of_tile
    peak, of_b = _peak(p, FP4_TRITON), config.bn // ctas
    loaded = (min(own, p.m) + of_b) / (own + of_b)  # TMA loads no rows that A does not have
    products = loaded * _tiled_seconds(product, config.bm, config.bn, of_b, peak, ctas)
    if isinstance(config, TwoCtaConfig):
        together = max(products, epilogues) + of_tile
    else:
        together = max(products, epilogues) if config.two_sums else products + epilogues
    return max(together, _operand_seconds(product))


def two_ctas_pay(p: Problem, config: TwoCtaConfig, one: BlockScaledConfig) -> bool:
    """Whether the 2-CTA kernel is faster than the 1-CTA kernel with configuration `one`.

    Both have the same epilogue. Where it quantises the result, or finds its amax, its time counts: a kernel may have to
    wait for it. A symbolic number of rows, and symbolic sizes: as in `fusing_pays`. False where groups fill less than
    half of the tile of a CTA pair on average: the other CTA would be idle.
    """
    if not all(isinstance(size, int) for size in (p.n, p.k, p.batches)):
        return False
    each = [replace(p, m=m) for m in ([p.m] if isinstance(p.m, int) else ANY_ROWS)]
    filled = (not rows.ragged or 2 * rows.m >= config.bm * rows.groups for rows in each)
    seconds = kernel_seconds if p.spec.result is None and not p.spec.amax else quantizing_seconds
    return all(filled) and all(seconds(rows, config) < seconds(rows, one) for rows in each)


def library_seconds(p: Problem) -> float:
    """Seconds of the library's matmul, with the best of its tiles."""
    peak = _peak(p, _gpu(p).fp4)
    launches = OUTER_SCALES if "tensor" in (p.a.outer, p.b.outer) else 0
    tiled = min(_tiled_seconds(p, rows, columns, columns // 2, peak) for rows, columns in LIBRARY_TILES)
    return max(tiled, _memory_seconds(p)) + launches * LAUNCH


def kernel_seconds(p: Problem, config: BlockScaledConfig | SkinnyBlockScaledConfig | TwoCtaConfig) -> float:
    """Seconds of the matmul by a kernel of this package. Each of two CTAs loads half of B."""
    peak, ctas = _peak(p, FP4_TRITON), _ctas(config)
    return max(_tiled_seconds(p, config.bm, config.bn, config.bn // ctas, peak, ctas), _memory_seconds(p))


def _ctas(config: BlockScaledConfig | SkinnyBlockScaledConfig | TwoCtaConfig) -> int:
    """The number of CTAs, each on a multiprocessor, that share a tile."""
    return 2 if isinstance(config, TwoCtaConfig) else 1


def _tiled_seconds(p: Problem, rows: int, columns: int, loaded: int, peak: float, ctas: int = 1) -> float:
    """Seconds of arithmetic, in rounds of one tile for each multiprocessor, which loads `loaded` rows of B for it.

    ctas: how many multiprocessors share a tile, each with a part of its rows.
    """
    tiles = row_tile_count(p, p.m, rows) * ceil_div(p.n, columns)
    own = rows // ctas  # rows of a multiprocessor
    computed = ceil_div(tiles, p.target.multiprocessors // ctas) * p.target.multiprocessors * own * columns
    share = TILE_SHARE * TILE_ROWS / ((own + loaded) * 128 * 128 / (own * columns))
    return 2.0 * computed * p.k / (peak * share * REACHED)


def pointwise_seconds(p: Problem) -> float:
    """Seconds of the pointwise kernel: a launch, a write and a read of the result, in L2 if it fits in half of that."""
    return LAUNCH + 2 * _pass_seconds(p)


def _pass_seconds(p: Problem) -> float:
    """Seconds of one read or write of the result."""
    size = _result_bytes(p)
    return size / (_l2(p) if 2 * size <= L2_BYTES else _memory(p))


def _gpu(p: Problem) -> Gpu:
    """The GPU whose published rates count: a B300 from compute capability 10.3 on, else a B200."""
    return OF_CAPABILITY[103 if p.target.sm >= 103 else 100]


def _memory(p: Problem) -> float:
    """Bytes/s from device memory."""
    return _gpu(p).bandwidth * MEMORY_SHARE


def _l2(p: Problem) -> float:
    """Bytes/s from the L2 cache."""
    return _gpu(p).multiprocessors * L2_WIDTH * CLOCK


def _peak(p: Problem, fp4: float | None) -> float:
    """FLOP/s of the matrix units. fp4: those of FP4."""
    found = fp4 if p.a.format.packed and p.b.format.packed else _gpu(p).fp8
    return found or 0.0  # both GPUs have both


def _memory_seconds(p: Problem) -> float:
    """Seconds of reading the operands and writing the result."""
    return _operand_seconds(p) + _result_bytes(p) / _memory(p)


def _operand_seconds(p: Problem) -> float:
    matrices = min(p.b_matrices, p.m) if p.by_rows else p.b_matrices  # weights of groups without rows stay
    operands = p.batches * p.m * _row_bytes(p, p.a) + matrices * p.n * _row_bytes(p, p.b)
    return operands / _memory(p)


def _row_bytes(p: Problem, x: OperandSpec) -> float:
    """Bytes of a row of an operand, with its block scales."""
    return p.row_bytes(x) + p.k / x.format.block_cols * x.format.scale_dtype.itemsize


def _result_bytes(p: Problem) -> int:
    return p.batches * p.m * p.n * p.spec.out_dtype.itemsize
