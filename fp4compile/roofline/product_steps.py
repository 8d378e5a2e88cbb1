"""The steps of one product: operands that are dequantised in memory, the kernel that multiplies, the rescale after it.

`roofline.model` makes them for a layer of given sizes, `roofline.graph_steps` for a product node of a graph.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fp4compile._compat import statically_true
from fp4compile.formats.formats import BlockFormat
from fp4compile.hardware import Gpu
from fp4compile.roofline.layer_sizes import Sizes
from fp4compile.roofline.time_terms import BF16, FLOAT32, KERNELS, LIBRARY, OUTER_SCALES, Kernel, TimedStep, stored
from fp4compile.templates.choose import Choice
from fp4compile.templates.problem import Problem


@dataclass(frozen=True)
class Chosen:
    """The kernel of a product: its name and tier.

    fake_quantizes: whether its A may be quantised and dequantised by one kernel. outer: for both operands, what shares
    an outer scale. values: for both operands, of groups or of the library's product of MX operands, the dtype to which
    they are dequantised in memory; None where they are not, or where one of the two is not quantised. tiles: the tile
    of the result that a program computes, and how many programs run at once; None where these are equal for all shapes.
    """

    kernel: str
    tier: str
    outer: tuple[str, str]
    fake_quantizes: bool = False
    values: tuple[torch.dtype | None, torch.dtype | None] = (None, None)
    tiles: tuple[tuple[int, int], int] | None = None

    @classmethod
    def of(cls, choice: Choice, problem: Problem, gpu: Gpu, **fields: Any) -> "Chosen":
        """The kernel that a `Choice` names, with the tiles of its launch. fields: `fake_quantizes`, `values`."""
        kernel, outer = _kernel_of(choice, problem), (problem.a.outer, problem.b.outer)
        return cls(kernel, choice.tier, outer=outer, tiles=_tiles_of(kernel, choice.config, gpu), **fields)

    @property
    def shares(self) -> Kernel:
        """The shares that the kernel reaches."""
        return KERNELS.get(self.kernel, LIBRARY["dense"])


def gemm_name(dtype: torch.dtype) -> str:
    """The name of the step of an unquantised matmul."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return f"{names.get(dtype, str(dtype).removeprefix('torch.'))} GEMM"


def plain_step(name: str, sizes: Sizes, gpu: Gpu) -> TimedStep:
    """The product of two 16-bit operands by torch. name: of the product."""
    by_offsets = sizes.experts is not None and sizes.experts.grouping == "rows"
    read = BF16 * sum(sizes.lines_read) * sizes.contraction
    return _multiply(gemm_name(torch.bfloat16), name, sizes, LIBRARY["grouped" if by_offsets else "dense"], read,
                     gpu.bf16 * gpu.bf16_share, gpu, None)  # fmt: skip


def product_steps(
    name: str, sizes: Sizes, formats: tuple[BlockFormat | None, BlockFormat | None], chosen: Chosen, gpu: Gpu, *,
    names: tuple[str, str] = ("A", "B"), more: float = 0,
) -> list[TimedStep]:  # fmt: skip
    """The steps of a product of which an operand is quantised, from codes to the result.

    name: of the product. formats: of both operands as they lie in memory, None for 16 bits. names: of the operands.
    more: bytes that the last kernel moves besides its operands and a result of 16 bits, such as an epilogue's operands.
    """
    native, found = chosen.tier == "native", []
    operands: float = 0
    for place, (fmt, lines, read) in enumerate(zip(formats, sizes.lines, sizes.lines_read, strict=True)):
        plain = BF16 * read * sizes.contraction
        if fmt is None:
            operands += plain
        elif _dequantised(place, chosen):
            whole = stored(fmt, lines, sizes.contraction, native) + BF16 * lines * sizes.contraction
            found.append(memory_pass(f"dequantise {names[place]}", name, whole, gpu))
            operands += plain
        else:
            operands += stored(fmt, read, sizes.contraction, native)
    rate, rescaled = _rate(formats, chosen, gpu), _rescaled_apart(sizes, chosen)
    operands += (FLOAT32 - BF16) * sizes.result if rescaled else more  # the library writes float32 sums
    found.append(_multiply(chosen.kernel, name, sizes, chosen.shares, operands, rate, gpu, chosen.tiles))
    if chosen.kernel == "library_block_scaled" and "tensor" in chosen.outer:
        found.append(memory_pass("multiply outer scales", name, 0, gpu, launches=OUTER_SCALES))
    if rescaled:
        found.append(memory_pass("rescale", name, (FLOAT32 + BF16) * sizes.result + more, gpu))
    return found


def memory_pass(name: str, product: str, moved: float, gpu: Gpu, launches: int = 1) -> TimedStep:
    """A step whose kernels only move memory."""
    return TimedStep(name, product, 0, moved, gpu.bf16, gpu.copy_rate, launches * gpu.launch, launches=launches)


def _kernel_of(choice: Choice, problem: Problem) -> str:
    """The kernel's name in `time_terms.KERNELS`, which has those of groups by themselves."""
    name = choice.kernel
    if name == "streaming":
        name = "gemv" if statically_true(problem.m <= 2) else "skinny"
    return name if problem.ragged is None or name.startswith("grouped_") else f"grouped_{name}"


def _tiles_of(kernel: str, config: Any, gpu: Gpu) -> tuple[tuple[int, int], int] | None:
    """`Chosen.tiles` of a grouped kernel; None for a kernel whose launch is not modelled."""
    if kernel == "grouped_skinny":
        return (config.rows, 16 * config.tiles), config.grid
    if kernel == "grouped_wgmma_sm90":
        return (config.rows, 16 * config.parts * config.warps), gpu.multiprocessors
    if kernel == "grouped_dequant_tiles":  # programs of small tiles share a multiprocessor
        return (config.bm, config.bn), gpu.multiprocessors * max(128 * 128 // (config.bm * config.bn), 1)
    return None


def _dequantised(place: int, chosen: Chosen) -> bool:
    """Whether a pass before the product dequantises an operand: any operand, or A where experts stay packed."""
    packed = chosen.kernel in ("grouped_skinny", "grouped_wgmma_sm90") and place == 0
    return packed or chosen.kernel in ("dequant_operand", "grouped_dequant_operand")


def _rescaled_apart(sizes: Sizes, chosen: Chosen) -> bool:
    """Whether a separate pass applies the outer scales, because a library product has no argument for them."""
    by_library = chosen.kernel == "dequant_operand" and sizes.experts is None
    return chosen.kernel == "library_rescaled" or (by_library and chosen.outer != ("none", "none"))


def _multiply(
    name: str, product: str, sizes: Sizes, kernel: Kernel, operands: float, rate: float, gpu: Gpu, tiles: tuple | None
) -> TimedStep:  # fmt: skip
    """The step that multiplies. tiles: see `Chosen`; by default the kernel's tile, and as many as the GPU runs."""
    tile, at_once = tiles or (kernel.tile, gpu.multiprocessors // kernel.cluster)
    overhead = gpu.product_launch * kernel.launch + kernel.launches * gpu.launch
    between = 0.0
    if kernel.turn and tile:
        between = kernel.turn * sizes.turns(tile, at_once)
    return TimedStep(name, product, sizes.flops(tile, at_once), operands + BF16 * sizes.result, rate,
                gpu.copy_rate * kernel.memory, overhead, between, 1 + kernel.launches)  # fmt: skip


def _rate(formats: tuple[BlockFormat | None, BlockFormat | None], chosen: Chosen, gpu: Gpu) -> float:
    """FLOP/s of the product: the codes' matrix units' rate in the native tier, bf16's in the emulated tier."""
    peak, share = gpu.bf16, gpu.bf16_share
    if chosen.tier == "native" and None not in formats:
        fp4 = all(fmt is not None and fmt.packed for fmt in formats)
        native, reached = (gpu.fp4, gpu.fp4_share) if fp4 else (gpu.fp8, gpu.fp8_share)
        if native is None:
            raise ValueError(f"gpu: {gpu.name} has no rate of {'FP4' if fp4 else 'FP8'} products, and "
                             f"{chosen.kernel} multiplies such operands there")  # fmt: skip
        peak, share = native, reached
    return peak * (share if chosen.shares.matrix is None else min(chosen.shares.matrix, share))
