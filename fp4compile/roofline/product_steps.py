"""The steps of one matmul: dequantising operands in memory, the GEMM kernel, and the rescale."""

from dataclasses import replace

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping
from fp4compile.hardware import Gpu
from fp4compile.roofline.layer_sizes import Sizes
from fp4compile.roofline.time_terms import (
    BF16,
    FLOAT32,
    KERNELS,
    LIBRARY,
    OUTER_SCALES,
    KernelShares,
    TimedStep,
    stored,
)
from fp4compile.templates.choose import Choice
from fp4compile.templates.gemm.candidate import OF_FLOAT8_BLOCKS
from fp4compile.templates.problem import Problem


def gemm_name(dtype: torch.dtype) -> str:
    """The name of the step of an unquantised matmul."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return f"{names.get(dtype, str(dtype).removeprefix('torch.'))} GEMM"


def plain_step(sizes: Sizes, gpu: Gpu) -> TimedStep:
    """The matmul of two 16-bit operands by torch."""
    by_offsets = sizes.grouping in (Grouping.RAGGED_ROWS, Grouping.RAGGED_CONTRACTION)
    read = BF16 * sum(sizes.lines_read) * sizes.contraction
    kernel = LIBRARY["grouped" if by_offsets else "dense"]
    return _multiply(gemm_name(torch.bfloat16), sizes, kernel, read, gpu.bf16 * gpu.bf16_share, gpu)


def product_steps(sizes: Sizes, choice: Choice, problem: Problem, gpu: Gpu, more: float = 0) -> list[TimedStep]:
    """The steps of a matmul with a quantised operand, from codes to the result.

    more: bytes that the last kernel moves besides its operands and a result of 16 bits, such as an epilogue's operands.
    """
    converts = choice.kernel.endswith(OF_FLOAT8_BLOCKS)
    choice, formats = replace(choice, kernel=kernel_of(choice, problem)), (problem.a.format, problem.b.format)
    native, found = choice.tier == "native", []
    if converts:
        found.append(memory_pass("convert block scales", 0, gpu, launches=2))
    operands: float = 0
    for place, (fmt, lines, read) in enumerate(zip(formats, sizes.lines, sizes.lines_read, strict=True)):
        plain = BF16 * read * sizes.contraction
        if fmt is None:
            operands += plain
        elif _dequantised(place, choice):
            whole = stored(fmt, lines, sizes.contraction, native) + BF16 * lines * sizes.contraction
            found.append(memory_pass(f"dequantise {'AB'[place]}", whole, gpu))
            operands += plain
        else:
            operands += stored(fmt, read, sizes.contraction, native)
    shares = KERNELS.get(choice.kernel, LIBRARY["dense"])
    rate, rescaled = _rate(formats, choice, gpu, shares.matrix), _rescaled_apart(sizes, choice, problem)
    operands += (FLOAT32 - BF16) * sizes.result if rescaled else more  # the library writes float32 sums
    found.append(_multiply(choice.kernel, sizes, shares, operands, rate, gpu, _tiles_of(choice, gpu)))
    if choice.kernel == "library_block_scaled" and "tensor" in (problem.a.outer, problem.b.outer):
        found.append(memory_pass("multiply global scales", 0, gpu, launches=OUTER_SCALES))
    if rescaled:
        found.append(memory_pass("rescale", (FLOAT32 + BF16) * sizes.result + more, gpu))
    return found


def memory_pass(name: str, moved: float, gpu: Gpu, launches: int = 1) -> TimedStep:
    """A step whose kernels only move memory."""
    return TimedStep(name, 0, moved, gpu.bf16, gpu.copy_rate, launches * gpu.launch, launches=launches)


def kernel_of(choice: Choice, problem: Problem) -> str:
    """The kernel's name in `time_terms.KERNELS`, which has separate entries for groups."""
    name = choice.kernel.removesuffix(OF_FLOAT8_BLOCKS)
    if name == "streaming":
        name = "gemv" if statically_true(problem.m <= 2) else "skinny"
    return name if not problem.ragged or name.startswith("grouped_") else f"grouped_{name}"


def _tiles_of(choice: Choice, gpu: Gpu) -> tuple[tuple[int, int], int] | None:
    """The tile of the result that a program of a grouped kernel computes, and how many programs run at once.

    None for a kernel whose launch is not modelled.
    """
    config = choice.config
    if choice.kernel == "grouped_skinny":
        return (config.rows, 16 * config.tiles), config.grid
    if choice.kernel == "grouped_wgmma_sm90":
        return (config.rows, 16 * config.parts * config.warps), gpu.multiprocessors
    if choice.kernel == "grouped_dequant_tiles":  # programs of small tiles share a multiprocessor
        return (config.bm, config.bn), gpu.multiprocessors * max(128 * 128 // (config.bm * config.bn), 1)
    return None


def _dequantised(place: int, choice: Choice) -> bool:
    """Whether a pass before the matmul dequantises an operand: any operand, or only A where experts stay packed."""
    packed = choice.kernel in ("grouped_skinny", "grouped_wgmma_sm90") and place == 0
    return packed or choice.kernel in ("dequant_operand", "grouped_dequant_operand")


def _rescaled_apart(sizes: Sizes, choice: Choice, problem: Problem) -> bool:
    """Whether a separate pass applies the global or row scales, because a library matmul has no argument for them."""
    scaled = (problem.a.outer, problem.b.outer) != ("none", "none")
    by_library = choice.kernel == "dequant_operand" and sizes.grouping is Grouping.DENSE
    return choice.kernel == "library_rescaled" or (by_library and scaled)


def _multiply(
    name: str, sizes: Sizes, kernel: KernelShares, operands: float, rate: float, gpu: Gpu, tiles: tuple | None = None
) -> TimedStep:  # fmt: skip
    """The step that multiplies. tiles: see `_tiles_of`; by default the kernel's tile, and as many as the GPU runs."""
    tile, at_once = tiles or (kernel.tile, gpu.multiprocessors // kernel.cluster)
    overhead = gpu.product_launch * kernel.launch + kernel.launches * gpu.launch
    between = kernel.turn * sizes.turns(tile, at_once) if kernel.turn and tile else 0.0
    return TimedStep(name, sizes.flops(tile, at_once), operands + BF16 * sizes.result, rate,
                gpu.copy_rate * kernel.memory, overhead, between, 1 + kernel.launches)  # fmt: skip


def _rate(formats: tuple[BlockFormat | None, ...], choice: Choice, gpu: Gpu, own: float | None) -> float:
    """FLOP/s of the matmul: the codes' matrix units' rate in the native tier, bf16's in the emulated tier.

    own: the kernel's share of it, if it is known.
    """
    peak, share = gpu.bf16, gpu.bf16_share
    if choice.tier == "native" and None not in formats:
        fp4 = all(fmt is not None and fmt.packed for fmt in formats)
        native, reached = (gpu.fp4, gpu.fp4_share) if fp4 else (gpu.fp8, gpu.fp8_share)
        if native is None:
            raise ValueError(f"gpu: {gpu.name} has no rate of {'FP4' if fp4 else 'FP8'} products, and "
                             f"{choice.kernel} multiplies such operands there")  # fmt: skip
        peak, share = native, reached
    return peak * (share if own is None else min(own, share))
