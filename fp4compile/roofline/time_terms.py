"""The terms of predicted times: steps, the shares that kernels reach, and the host's part.

`KERNELS`, `LIBRARY` and the names below them are the only definitions of kernels' shares and launches, as `hardware` is
for a GPU's shares and launches. A step takes

    launches * seconds of a launch + turns * seconds of a turn
        + max(FLOPs / rate of the matrix units, bytes / rate of the memory)

Bytes are counted once for each kernel that moves them; the L2 cache between kernels is not modelled.

Predicted times are those of the GPU, as under CUDA graphs. Without CUDA graphs the host issues each launch from the
code that Inductor generates, and the GPU waits for the host where that takes longer than the kernels.
"""

from dataclasses import dataclass

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.quantize_spec import ROWS, QuantizeSpec
from fp4compile.hardware import Gpu

BF16, FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True)
class KernelShares:
    """The shares and times of a GEMM kernel.

    memory: share of a copy's bytes/s. matrix: share of the peak FLOP/s; None takes the library's share on the GPU.
    launch: seconds of its launch and pipeline, as a multiple of a library matmul's seconds.
    tile: rows and columns of the result that a multiprocessor computes at once. Such a kernel
        multiplies whole tiles, and as many in each turn as fit on the GPU. None: tiles follow the shape, and nothing is
        rounded up.
    turn: seconds between two tiles of a program, in which it neither multiplies nor loads: sums are added up, scaled
        and stored, and the next tile's matrices are looked up. 0 where another tile hides them.
    launches: the number of launches besides the multiplying one.
    """

    memory: float = 1.0
    matrix: float | None = None
    launch: float = 1.0
    tile: tuple[int, int] | None = None
    turn: float = 0.0
    launches: int = 0


# Kernels by the name that `choose` returns. The emulated kernels were fitted to half of
# benchmarks/results/linear_h200.json, one entry for all shapes of a kernel, and `library_row_scaled` to half of
# ceilings_h200.json there: it has the GPU's FP8 share, and torch's tiles (RowwiseScaledMM.cu has 128 x 128, and
# 64 x 128 where all of these run at once, which takes as long). `dequant_tiles` is fitted to the figures in
# templates/gemm/dequant_operand.py; the share of the matrix units of `wgmma_sm90` is from many_rows_h200.json (512 to
# 2048 rows). Triton's kernels for SM100 have the share of the matrix units of the model in templates/gemm/cost.py.
# Other kernels have the library's share.
TRITON_SM100 = 0.4
KERNELS = {
    "gemv": KernelShares(memory=0.92, launch=0.6),
    "skinny": KernelShares(memory=0.72, launch=0.7),
    "wgmma_sm90": KernelShares(memory=0.7, matrix=0.73, launch=1.15),
    "dequant_tiles": KernelShares(memory=0.5, matrix=0.32, launch=1.3),
    "block_scaled_sm100": KernelShares(matrix=TRITON_SM100),
    "skinny_block_scaled_sm100": KernelShares(matrix=TRITON_SM100),
    "library_row_scaled": KernelShares(memory=0.66, launch=0.75, tile=(128, 128)),
    # Kernels of experts: fitted to DeepSeek-V3 and Llama-4 in benchmarks/results/grouped_mm_h200.json, with the
    # kernels' own tiles. "grouped_dequant_operand" is assumed to reach the shares of torch's bf16 kernel (`LIBRARY`).
    # Many small groups have many turns for their FLOPs. "grouped_float8_sm90", with the tiles of its launch, is fitted
    # to 11 times of `float8_rowwise` on an H200, of 8 to 128 experts and 64 to 131072 rows: 6 % off on average, at most
    # 17 %. "grouped_skinny" and "grouped_dequant_tiles" have the tiles of their launches: warps' sums are added up
    # through shared memory. Programs of "grouped_skinny" first search the offsets for their tiles. "grouped_wgmma_sm90"
    # is fitted to 58 times of packed experts on an H100, of equal and of drawn sizes, which differ by up to 47 % for
    # one number of tokens: 15 % off on average.
    "grouped_float8_sm90": KernelShares(memory=0.9, turn=1.5e-6, launches=1),
    "grouped_skinny": KernelShares(memory=0.87, launch=1.8, turn=2.1e-6),
    "grouped_wgmma_sm90": KernelShares(memory=0.8, matrix=0.7, launch=1.15, turn=2.5e-6),
    "grouped_dequant_tiles": KernelShares(memory=0.5, matrix=0.3, launch=1.3, turn=9.3e-6),
    "grouped_dequant_operand": KernelShares(memory=0.66, tile=(128, 256)),
    "grouped_block_scaled_sm100": KernelShares(matrix=TRITON_SM100, tile=(128, 128)),
}
# torch's bf16 matmuls. The grouped matmul (GroupMM.cu), streaming the weights of a decode step, reaches a smaller
# share of the memory's rate than the dense matmul. A launch before it writes the arguments of each group.
LIBRARY = {"dense": KernelShares(), "grouped": KernelShares(memory=0.66, tile=(128, 128), launches=1)}
# The share of the bf16 FLOP/s that fused attention reaches, forward and backward: fitted to one time, the prefill of a
# Llama-3-8B block under `float8_rowwise` in benchmarks/results/producers_h200.json, and assumed for other GPUs.
ATTENTION = 0.42
# Kernels by which torch multiplies the global scales of the library's two-level matmul; see templates/gemm/cost.py.
OUTER_SCALES = 2
# Seconds of the host for one launch without CUDA graphs. Measured on an H200 (torch 2.11): the host's time to issue a
# step of four Llama-3-8B layers of 8192 tokens, forward and backward. With CUDA graphs it was 3.6 ms in bf16 and 3.7 ms
# in `float8_rowwise`. Without them, bf16 took 6 ms for 266 launches, torchao's FP8 11 ms for 506 (row-scaled) and 20 ms
# for 516 (tensor-scaled), and `float8_rowwise` 22 ms for 522: 9, 15, 32 and 35 us more for each launch, if torchao's
# steps also take 3.7 ms with CUDA graphs. A low figure of these is taken, so that advice seldom errs. `mxfp8` and
# `nvfp4_train` (57 ms for 1114 launches, 122 ms for 1607) are left out: the second took as long as the GPU, so the host
# waited for it, and the first may have.
LAUNCH = 15e-6


# The share of a copy's bytes/s that quantise kernels reach: along rows, along columns, in both directions, in square
# blocks; multiplied by those of the Hadamard transform and of stochastic rounding. Fitted to half of
# benchmarks/results/quantize_h200.json.
QUANTISERS = {"rows": 1.0, "columns": 0.93, "both": 0.82, "square": 0.87, "hadamard": 0.74, "stochastic": 0.92}
ROW_AMAX = 0.6  # the pass over a row inside the kernel that computes the row scale, in launches


@dataclass(frozen=True)
class TimedStep:
    """One or more kernels with one purpose.

    name: the purpose. flops: floating-point operations of the matrix units in whole tiles (`KernelShares.tile`). bytes:
    bytes read and written.
    rate, bandwidth: FLOP/s and bytes/s that these kernels are expected to reach. overhead: seconds of the launches.
    between: seconds between the tiles of a program (`KernelShares.turn`). launches: how many kernels are launched.
    """

    name: str
    flops: float
    bytes: float
    rate: float
    bandwidth: float
    overhead: float
    between: float = 0.0
    launches: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.overhead + self.between + max(self.flops / self.rate, self.bytes / self.bandwidth)


def quantiser(spec: QuantizeSpec, moved: float, launches: int, gpu: Gpu) -> TimedStep:
    """The step of a quantiser that moves `moved` bytes in `launches` launches."""
    fmt, along = spec.format, "both" if spec.both else "rows" if spec.dims == (ROWS,) else "columns"
    share = QUANTISERS["square" if fmt.square else along]
    share *= (QUANTISERS["hadamard"] if spec.hadamard else 1.0) * (QUANTISERS["stochastic"] if spec.seeded else 1.0)
    in_kernel = fmt.outer == "row" and along == "rows" and not spec.static
    overhead = (launches + (ROW_AMAX if in_kernel else 0)) * gpu.launch
    name = f"quantise {along}" + ("" if spec.prologue is None else ", fused")
    return TimedStep(name, 0, moved, gpu.bf16, gpu.copy_rate * share, overhead, launches=launches)


def stored(fmt: BlockFormat, lines: int, length: int, native: bool) -> float:
    """Bytes of the codes and scales of `lines` lines of `length` elements; swizzled scales with their padding."""
    blocks = ceil_div(length, fmt.block_cols)
    codes = lines * blocks * fmt.block_cols / (2 if fmt.packed else 1)
    if fmt.scale is None:
        return codes + FLOAT32 * lines * (fmt.outer == "row")
    if native and fmt.swizzles:  # in the swizzled layout, square blocks also have a scale for each row
        return codes + swizzled_numel(lines, blocks)
    return codes + ceil_div(lines, fmt.block[0] if fmt.block else 1) * blocks * fmt.scale_dtype.itemsize
