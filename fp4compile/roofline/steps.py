"""What predicted times are sums of: steps, how an operand is quantised, and the shares that kernels reach.

`roofline` makes the steps of a layer, of the sizes in `roofline.sizes`. `KERNELS`, `GROUPED` and the names below these
are the only place for shares and launches of kernels, as `hardware` is for those of a GPU.
"""

from dataclasses import dataclass
from typing import Any

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.hardware import Gpu, named
from fp4compile.roofline.sizes import largest

BF16, FLOAT32 = 2, 4  # bytes
ROWS, BOTH_WAYS, COLUMN = "rows", "both", "columns"  # directions of quantising


@dataclass(frozen=True)
class Kernel:
    """What a product's kernel reaches.

    memory: share of a copy's bytes/s. matrix: share of the peak FLOP/s; None takes the library's of the GPU.
    launch: its launch and its pipeline, as a multiple of a library product's.
    tile: rows and columns of the result that a multiprocessor, or a cluster of them, computes at once. Such a kernel
        multiplies whole tiles, and as many in each turn as fit on the GPU. None: tiles follow the shape, and nothing is
        rounded up.
    cluster: multiprocessors that compute a tile together.
    turn: seconds between two tiles of a program, in which it neither multiplies nor loads: sums are added up, scaled
        and stored, and the next tile's matrices are looked up. 0 where this is hidden behind the other tile.
    """

    memory: float = 1.0
    matrix: float | None = None
    launch: float = 1.0
    tile: tuple[int, int] | None = None
    cluster: int = 1
    turn: float = 0.0


# By the name that `choose` gives. `benchmarks/roofline_fit.py` fits the emulated ones to half of
# benchmarks/results/linear_h200.json, one entry for all shapes of a kernel, and `library_row_scaled` to half of
# ceilings_h200.json there: its share is that of the GPU's FP8, and its tiles are torch's (RowwiseScaledMM.cu has
# 128 x 128, and 64 x 128 where all of these run at once, which takes as long). `dequant_tiles` is fitted to the figures
# in templates/gemm/heuristics.py. For those of SM100 that are Triton's, the share of the matrix units is that of the
# model in templates/gemm/cost.py. Others are the library's.
TRITON_SM100 = 0.4
KERNELS = {
    "gemv": Kernel(memory=0.92, launch=0.6),
    "skinny": Kernel(memory=0.72, launch=0.7),
    "wgmma_sm90": Kernel(memory=0.7, launch=1.15),
    "dequant_tiles": Kernel(memory=0.5, matrix=0.32, launch=1.3),
    "block_scaled_sm100": Kernel(matrix=TRITON_SM100),
    "skinny_block_scaled_sm100": Kernel(matrix=TRITON_SM100),
    "library_row_scaled": Kernel(memory=0.66, launch=0.75, tile=(128, 128)),
}
LIBRARY = Kernel()
# Of experts: fitted to the DeepSeek-V3 and the Llama-4 of benchmarks/results/grouped_mm_h200.json, with tiles as the
# kernels have them. "plain" is torch's bf16 kernel (GroupMM.cu): streaming the weights of a decode step, it does not
# reach what the dense product does, and "dequant_operand" is taken not to either. "library_row_scaled" multiplies at
# the FP8 share of the dense product, in clusters of 2 x 2 multiprocessors (ScaledGroupMM.cu), with tiles of 128 x 128
# each; those of few rows, 64 x 128, are taken to last as long. Many small groups have many turns for their FLOPs:
# between two, its epilogue waits for the sums and descriptors are made for the next group. The turns of "skinny" are
# those of its launch, `templates.grouped.heuristics`, as those of "dequant_tiles" are: warps' sums are added up through
# shared memory. Its programs look for their tiles in the offsets first. Kernels that are missing here multiply as they
# do without groups.
GROUPED = {
    "plain": Kernel(memory=0.66, tile=(128, 128)),
    "library_row_scaled": Kernel(memory=0.66, tile=(256, 256), cluster=4, turn=5.4e-6),
    "skinny": Kernel(memory=0.87, launch=1.8, turn=2.1e-6),
    "dequant_tiles": Kernel(memory=0.5, matrix=0.3, launch=1.3, turn=9.3e-6),
    "dequant_operand": Kernel(memory=0.66, tile=(128, 256)),
    "block_scaled_sm100": Kernel(matrix=TRITON_SM100, tile=(128, 128)),
}
# Launches beside the one that multiplies: torch's arguments of each group before it; templates/grouped/library.py has
# one more before and one after.
GROUPED_LAUNCHES = {"plain": 1, "library_row_scaled": 3}
# Kernels by which torch multiplies the outer scales of the library's two-level product; see templates/gemm/cost.py.
OUTER_SCALES = 2


@dataclass(frozen=True)
class Quantisers:
    """Shares of a copy's bytes/s that quantise kernels reach; those that hold for an operand are multiplied.

    columns, both, square: along columns, in both directions, in square blocks. hadamard, stochastic: with these.
    row_amax: a row's outer scale takes a pass over the row inside the kernel: so many launches more.
    """

    columns: float = 0.93
    both: float = 0.82
    square: float = 0.87
    hadamard: float = 0.74
    stochastic: float = 0.92
    row_amax: float = 0.6


QUANTISERS = Quantisers()  # fitted to half of benchmarks/results/quantize_h200.json


@dataclass(frozen=True)
class Use:
    """How an operand is quantised: its format, and the switches that change what that costs."""

    format: BlockFormat
    static: bool = False
    stochastic: bool = False
    hadamard: bool = False

    def merges_with(self, other: "Use | None") -> bool:
        """Whether one kernel writes both directions of a tensor; see `passes.merge_quantize`."""
        if other is None:
            return False
        return (self.format, self.static, self.stochastic) == (other.format, other.static, other.stochastic)


@dataclass(frozen=True)
class Step:
    """Kernels that do one thing.

    name: what they do. product: what they belong to: "fprop", "dgrad", "wgrad"; "other" beside linear layers.
    flops: floating-point operations of the matrix units, those of whole tiles (`Kernel.tile`); bytes: read and written.
        Numbers, or sympy expressions.
    rate: FLOP/s, and bandwidth: bytes/s, that these kernels are expected to reach. overhead: seconds of the launches.
    between: seconds between the tiles of a program (`Kernel.turn`).
    """

    name: str
    product: str
    flops: Any
    bytes: Any
    rate: float
    bandwidth: float
    overhead: float
    between: Any = 0.0

    @property
    def matrix(self) -> Any:
        """Seconds of the matrix units."""
        return self.flops / self.rate

    @property
    def memory(self) -> Any:
        """Seconds of the memory."""
        return self.bytes / self.bandwidth

    @property
    def seconds(self) -> Any:
        """All of the step."""
        return self.overhead + self.between + largest(self.matrix, self.memory)


@dataclass(frozen=True)
class Prediction:
    """The steps of a layer in bf16 (`plain`), and as a recipe has it (`steps`)."""

    plain: tuple[Step, ...]
    steps: tuple[Step, ...]

    @property
    def plain_seconds(self) -> Any:
        """Seconds of the bf16 layer; a sympy expression where sizes are symbols."""
        return sum(step.seconds for step in self.plain)

    @property
    def seconds(self) -> Any:
        """Seconds of the layer as the recipe has it."""
        return sum(step.seconds for step in self.steps)

    @property
    def gain(self) -> Any:
        """How many times faster than bf16 the layer is; below 1 it is slower."""
        return self.plain_seconds / self.seconds

    @property
    def binds(self) -> str:
        """What takes most of the recipe's time: "matrix", "memory" or "launches". Sizes must be numbers."""
        spent = {"matrix": 0.0, "memory": 0.0, "launches": 0.0}
        for step in self.steps:
            spent["launches"] += step.overhead
            bound = "matrix" if step.matrix > step.memory else "memory"
            spent[bound] += step.between + max(step.matrix, step.memory)
        return max(spent, key=lambda each: spent[each])

    def of_product(self, name: str) -> "Prediction":
        """The steps of one product alone. A kernel that writes two directions counts for the first that needs it."""
        plain, steps = (
            tuple(step for step in each if step.product == name) for each in (self.plain, self.steps)
        )  # fmt: skip
        return Prediction(plain, steps)


def quantise_step(
    role: str, product: str, use: Use, hadamard: bool, numel: Any, written: Any, along: str, gpu: Gpu
) -> Step:
    """Quantising numel elements. An outer scale that is computed takes an amax, which reads the operand once more; that
    of a row, along rows alone, stays inside the kernel."""
    outer, reached = None if use.static else use.format.outer, QUANTISERS
    own_amax = outer == "tensor" or (outer == "row" and along != ROWS)
    reads = 2 if own_amax else 1
    share = {ROWS: 1.0, COLUMN: reached.columns, BOTH_WAYS: reached.both}[along]
    if use.format.square:
        share = reached.square
    share *= (reached.hadamard if hadamard else 1.0) * (reached.stochastic if use.stochastic else 1.0)
    launches = reads + (reached.row_amax if outer == "row" and not own_amax else 0)
    return Step(f"quantise {role}, {along}", product, 0, reads * BF16 * numel + written, gpu.bf16,
                gpu.copy_rate * share, launches * gpu.launch)  # fmt: skip


def quantise_seconds(
    use: Use, rows: Any, columns: Any, gpu: str | Gpu, *, along: str = ROWS, native: bool = False
) -> Any:  # fmt: skip
    """Seconds of quantising a 16-bit matrix [rows, columns] along its "rows", its "columns", or "both" at once."""
    written = 0 if along == COLUMN else stored(use.format, rows, columns, native)
    if along != ROWS:
        written += stored(use.format, columns, rows, native)
    return quantise_step("x", "fprop", use, use.hadamard, rows * columns, written, along, named(gpu)).seconds


def stored(fmt: BlockFormat, lines: Any, length: Any, native: bool) -> Any:
    """Bytes of the codes and scales of `lines` lines of `length` elements; swizzled scales with their padding."""
    blocks = ceil_div(length, fmt.block_cols)
    codes = lines * blocks * fmt.block_cols / (2 if fmt.packed else 1)
    if fmt.scale is None:
        return codes + FLOAT32 * lines
    if native:  # square blocks, too, have a scale a row there
        return codes + swizzled_numel(lines, blocks)
    return codes + ceil_div(lines, fmt.block[0] if fmt.block else 1) * blocks
