"""The bounds of machine code, as data. A kernel that misses a bound fails the check.

Every kernel must have no access of local memory (spilled registers), and at least one program must fit a
multiprocessor. From SM100 on, the bounds in this file also apply. On Hopper, times were measured instead.

Bounds on required instructions and on overlap apply under every version of the compiler. Bounds on the number of
instructions come from the code of the compiler version `COMPILER`. Other versions generate slightly more or fewer
instructions, so under them these bounds are only shown, and no kernel fails by them.
"""

from dataclasses import dataclass

import triton

from fp4compile.formats import formats
from fp4compile.hardware import Target

COMPILER = "3.9.0"  # the version of Triton, with its ptxas, from whose code INSTRUCTION_LINES and SWEEP_LINES were set


@dataclass(frozen=True)
class ProductLine:
    """The bounds of a matmul's code. Numbers of instructions are the fewest allowed.

    instruction: the matrix instruction, a regular expression of PTX; {kind} stands for the formats' instruction kind.
    scale_copies: `tcgen05.cp`, which copies scales to tensor memory without registers. tma_loads: loads of whole tiles
    by the TMA unit. asynchronous_loads: TMA loads and `cp.async`. matrix_loads: `ldmatrix`, from shared memory to the
    registers of `mma.sync`. overlapped: whether loads and matmuls of the main loop must run at the same time
    (`ptx.Ptx.overlap`). store_bytes: the fewest bytes of a store of the result, if its rows are multiples of so many
    bytes (Triton uses no smaller divisor); a TMA store meets every bound.
    """

    instruction: str
    scale_copies: int = 0
    tma_loads: int = 0
    asynchronous_loads: int = 0
    matrix_loads: int = 0
    overlapped: bool = False
    store_bytes: int = 0


_TCGEN05 = r"tcgen05\.mma\S*kind::{kind}\.block_scale"
PRODUCT_LINES = {
    # Many tokens; rows of codes are multiples of 16 bytes.
    "block-scaled": ProductLine(_TCGEN05, 1, tma_loads=1, asynchronous_loads=1, overlapped=True, store_bytes=16),
    # The same, with stores of words besides the result: the positions of tiles of groups, four scales of a row where
    # the result is quantised, or a maximum. TMA stores codes and results.
    "block-scaled, words": ProductLine(_TCGEN05, 1, tma_loads=1, asynchronous_loads=1, overlapped=True, store_bytes=4),
    # TMA reads only rows that are multiples of 16 bytes. Up to 64 tokens, each weight is read at most once.
    "block-scaled, by pointers": ProductLine(_TCGEN05, 1, asynchronous_loads=1, overlapped=True, store_bytes=16),
    # SM120 has neither tensor memory nor tcgen05: operands and scales pass through registers.
    "block-scaled, sm_120": ProductLine(
        r"mma\.sync\S*kind::{kind}\.block_scale",
        asynchronous_loads=1,
        matrix_loads=1,
        overlapped=True,
        store_bytes=16,
    ),  # fmt: skip
    "block-scaled, sm_120, words": ProductLine(
        r"mma\.sync\S*kind::{kind}\.block_scale",
        tma_loads=1,
        asynchronous_loads=1,
        matrix_loads=1,
        overlapped=True,
        store_bytes=4,
    ),  # fmt: skip
    # Weights are dequantised for 16-bit matmuls: kernels for decoding, and the emulated tier.
    "dequantised": ProductLine(r"(mma\.sync\.aligned\.m16n8k16|wgmma\.mma_async|tcgen05\.mma)\S*"),
    # Launches that add partial sums, or dequantise an operand for a library.
    "beside a product": ProductLine(r""),
}


def product_line(tier: str, tiles: bool, sm: int, multiplies: bool = True, words: bool = False) -> str:
    """The name of a launch's entry in `PRODUCT_LINES`.

    tier: the kernel's tier. tiles: whether TMA can load the operands. multiplies: whether the launch computes the
    matmul itself, and not a step before or after it. words: whether the kernel stores words besides the result.
    """
    if not multiplies:
        return "beside a product"
    if tier != "native":
        return "dequantised"
    if sm >= 120:
        return "block-scaled, sm_120, words" if words else "block-scaled, sm_120"
    if words:
        return "block-scaled, words"
    return "block-scaled" if tiles else "block-scaled, by pointers"


def instruction_kind(a: str | None, b: str, sm: int) -> str:
    """The kind of block-scaled matrix instruction for operands of two formats; "" where one of them is plain."""
    if a is None:
        return ""
    first, second = formats.get(a), formats.get(b)
    if not (first.packed and second.packed):
        return "mxf8f6f4"
    return "mxf4nvf4" if first.scale == "e4m3" or sm >= 120 else "mxf4"


# The most thread instructions per 16 elements on SM100, by kernel, configuration and format. Without an entry, and on
# other GPUs, the bound is the budget of the kernel's bytes (`resources.instruction_budget`).
INSTRUCTION_LINES: dict[tuple[str, str, str], float] = {
    # Below the budget, which leaves room for latency. These kernels must not get worse.
    ("quantize_rows", "rows", "nvfp4"): 102,
    ("quantize_columns", "scaled columns", "nvfp4_rowwise"): 172,
    ("quantize_columns", "transformed columns", "nvfp4_te"): 177,
    ("quantize_columns", "both", "nvfp4_te"): 204,
    ("dequantize_rows", "dequantize", "nvfp4"): 165,
    ("dequantize_rows", "dequantize", "mxfp8"): 215,
    # A program finds its group first, as the programs of the experts below do.
    ("lay_out_scales", "lay out, groups", "mxfp8"): 9,
    # Above the budget: instructions, not bytes, limit this kernel. It rounds stochastically in two directions, by eight
    # calls of Philox in each thread, and transforms one of them: a third of its instructions.
    ("quantize_columns", "both, transform, seed", "nvfp4_te"): 335,
    # With a prologue. Its steps take two kernels above the budget of their bytes. No kernel must get worse.
    ("quantize_rows", "rows of a gate", "nvfp4_one_level"): 271,
    ("quantize_rows", "rows of halves", "nvfp4_one_level"): 270,
    ("quantize_rows", "rows of halves", "mxfp8"): 289,
    ("quantize_both", "both of halves", "mxfp8"): 390,
    ("quantize_rows", "rows of experts' halves", "nvfp4_one_level"): 342,
    ("quantize_rows", "rows of experts' halves", "mxfp8"): 364,
    ("quantize_rows", "rows of experts' halves, given", "nvfp4"): 350,
    ("quantize_rows", "rows of a norm", "nvfp4"): 157,
    # Norms with their statistics, which add float32 squares, sums, products and weights. All but the last two
    # are within the budget.
    ("quantize_whole_rows", "a norm", "nvfp4_rowwise"): 171,
    ("quantize_whole_rows", "a norm", "nvfp4"): 163,
    ("row_statistics", "a norm", "nvfp4"): 116,
    ("quantize_whole_rows", "a layer norm", "nvfp4_rowwise"): 254,
    # A tile of 8192 elements, of which three eighths are beyond the row.
    ("quantize_whole_rows", "a norm of 5120", "nvfp4_one_level"): 359,
    # Experts: 64 groups of 128 rows ("few": of 8). A program finds its group first, in about 100 instructions, and
    # loads with masks. The launch has enough programs for any group sizes: half of them have no row, and clear the
    # padding.
    ("tensor_amax", "grouped rows, few", "nvfp4"): 203,
    ("quantize_rows", "grouped rows, few", "nvfp4"): 293,
    ("quantize_rows", "grouped rows", "nvfp4_rowwise"): 176,
    ("quantize_columns", "grouped columns", "nvfp4"): 215,
    ("quantize_columns", "grouped columns", "nvfp4_rowwise"): 246,
    ("quantize_columns", "grouped columns", "mxfp4"): 205,
    ("quantize_columns", "grouped columns, transform", "nvfp4_te"): 264,
    ("quantize_columns", "grouped both", "nvfp4"): 317,
    ("quantize_columns", "grouped both", "nvfp4_rowwise"): 361,
    ("quantize_columns", "grouped both", "mxfp4"): 290,
    ("quantize_columns", "grouped both, transform, seed", "nvfp4_te"): 435,
}


# Arithmetic, not bytes, limits the scale sweep on every GPU: a dozen scales at eight instructions for each element
# (SM100: seven), and one division for each element. It must not get worse.
SWEEP_LINES = {"sweep_scales": {100: 1850, 120: 2350}}


def judges_figures() -> bool:
    """Whether the compiler is `COMPILER`, whose code set the bounds on numbers of instructions."""
    return triton.__version__ == COMPILER


def instruction_line(kernel: str, configuration: str, format: str, sm: int, budget: float) -> float:
    """The most thread instructions for 16 elements that a launch may have. budget: the budget of its bytes."""
    if kernel in SWEEP_LINES:
        return SWEEP_LINES[kernel].get(Target(sm).isa, budget)
    return INSTRUCTION_LINES.get((kernel, configuration, format), budget) if Target(sm).isa == 100 else budget
