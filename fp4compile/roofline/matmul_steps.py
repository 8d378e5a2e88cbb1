"""The steps of a matmul: dequantising operands in memory, the GEMM kernel, and the rescale; read from its node.

Sizes count lines of operands, elements of the result and FLOPs of whole tiles, of all experts together.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from fp4compile._compat import statically_true
from fp4compile.analysis import flops
from fp4compile.analysis.node_kinds import nbytes, numel
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.hardware import Gpu
from fp4compile.ops.nodes import PRODUCTS, ScaledMM, is_product, products_of, scaled_mm_of
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
from fp4compile.templates.choose import Choice, choose
from fp4compile.templates.gemm.candidate import OF_FLOAT8_BLOCKS
from fp4compile.templates.problem import Problem


@dataclass(frozen=True)
class Sizes:
    """A matmul [rows, contraction] x [columns, contraction], or the matmuls of all experts.

    `rows` counts the rows of all experts together, and each expert has its own matrix of `columns` rows; with ragged
    contraction, as in wgrad, each has a result of [rows, columns].
    count: matrices of B, or of the result; with gathered matrices, the number of indices, whose matrices are each read
    separately.
    """

    rows: int
    columns: int
    contraction: int
    grouping: Grouping = Grouping.DENSE
    count: int = 1

    @property
    def along_k(self) -> bool:
        """Whether the experts share the contraction."""
        return self.grouping is Grouping.RAGGED_CONTRACTION

    @property
    def lines(self) -> tuple[int, int]:
        """Lines of A and of B along the contraction, all experts together."""
        return self.rows, self.columns if self.along_k else self.count * self.columns

    @property
    def lines_read(self) -> tuple[int, int]:
        """Lines of A and of B that the matmul reads; with fewer rows than experts, each row counts as one expert."""
        if self.along_k:
            return self.lines
        return self.rows, min(self.count, self.rows) * self.columns

    @property
    def result(self) -> int:
        """Elements of the result."""
        return self.rows * self.columns * (self.count if self.along_k else 1)

    def flops(self, tile: tuple[int, int] | None, at_once: int) -> float:
        """The FLOPs that a GPU spends on the matmul.

        tile: (rows, columns) of the kernel's tiles; None counts the matmul's own FLOPs. at_once: how many tiles the GPU
        computes in parallel. The last turn counts as many, even if fewer are left, and a tile at an edge counts whole.
        """
        if tile is None:
            return 2 * self.rows * self.columns * self.contraction
        contraction = self.contraction / self.count if self.along_k else self.contraction
        return 2 * tile[0] * tile[1] * contraction * self.turns(tile, at_once) * at_once

    def turns(self, tile: tuple[int, int], at_once: int) -> int:
        """The number of turns for all tiles, with `at_once` tiles in parallel.

        Groups have unknown sizes: as many groups as possible count as non-empty, each with at least one tile, and each
        ends on average in the middle of a tile.
        """
        height, width = tile
        across = ceil_div(self.columns, width)
        if self.along_k:
            tiles = self.count * ceil_div(self.rows, height) * across
        elif self.grouping is Grouping.RAGGED_ROWS:
            groups = min(self.count, self.rows)
            tiles = max(groups, ceil_div(2 * self.rows + groups * height, 2 * height)) * across
        else:
            tiles = self.count * ceil_div(ceil_div(self.rows, self.count), height) * across
        return ceil_div(tiles, at_once)


# ---------------------------------------------------------------- nodes


def named_results(node: Node) -> Iterator[Node]:
    """The nodes whose notes name the matmuls that a node computes.

    The results of a matmul that quantises are noted as operands of the next one.
    """
    alone = is_product(node)
    if alone or node.target not in PRODUCTS:  # torch's matmuls too
        yield node
    if not alone or scaled_mm_of(node).spec.results == 1:
        yield from (user for user in node.users if user.target is operator.getitem)


def matmul_steps(node: Node, gpu: Gpu) -> list[TimedStep]:
    """The steps of a node of `PRODUCTS` at the sizes of the captured call."""
    if not is_product(node):
        return _horizontal(node, gpu)
    product = scaled_mm_of(node)
    if product.index is not None:
        return _gathered(product, gpu)
    sizes = _sizes(product.values())
    if product.spec.plain:
        return [plain_step(sizes, gpu)]
    more = nbytes(node) - BF16 * (sizes.result if product.spec.results > 1 else numel(node.meta["val"]))
    more += sum(map(nbytes, product.auxiliaries))
    steps = _product_steps(sizes, _at_captured_sizes(product.problem), gpu, more)
    if product.spec.amax and product.offs is not None:  # the kernel raises amaxes that are zero before
        steps.insert(0, memory_pass("clear amaxes", 4 * size(product.problem.groups), gpu))
    return steps


def size(value: Any) -> int:
    """A size at the captured call; 0 where it depends on the data."""
    return flops.hint(value) or 0


def _at_captured_sizes(problem: Problem) -> Problem:
    m, n, k = map(size, (problem.m, problem.n, problem.k))
    return replace(problem, m=m, n=n, k=k, batches=size(problem.batches), groups=size(problem.groups))


def _sizes(x: Arguments) -> Sizes:
    a, b = _shape(x.a), _shape(x.b)
    if x.offs is not None:
        columns, contraction = 2 * b[-2] if x.two_weights else b[-2], size(x.rows) if len(b) == 2 else a[-1]
        return Sizes(a[-2], columns, contraction, x.spec.grouping, size(x.offs.shape[0]))
    return Sizes(prod(a[:-1]), b[-2], a[-1], x.spec.grouping, prod(b[:-2]))


def _shape(x: Operand) -> tuple[int, ...]:
    """The shape in elements."""
    return *map(size, x.data.shape[:-1]), size(x.k)


def _gathered(product: ScaledMM, gpu: Gpu) -> list[TimedStep]:
    """Few tokens, each with its own matrix, which a kernel reads through the index or from a copy."""
    x, target = product.values(), product.problem.target
    count, rows, length = _shape(x.a)
    columns = _shape(x.b)[-2]
    sizes = Sizes(count * rows, columns, length, Grouping.GATHERED, count)
    if product.reads_by_index:
        spec = replace(x.spec, grouping=Grouping.RAGGED_ROWS)
        return _product_steps(sizes, Problem(spec, sizes.rows, columns, length, target, groups=count), gpu)
    problem = Problem(replace(x.spec, grouping=Grouping.BATCHED), rows, columns, length, target, count, True)
    steps = _product_steps(sizes, problem, gpu)
    if x.b.format is None:
        return steps
    copied = 2 * stored(x.b.format, count * columns, length, x.b.swizzled)
    return [memory_pass("copy matrices", copied, gpu), *steps]


def _horizontal(node: Node, gpu: Gpu) -> list[TimedStep]:
    """Matmuls of one A in one launch, as one matmul of all their columns."""
    products = products_of(node)
    a, columns = products[0].values().a, sum(_shape(each.values().b)[-2] for each in products)
    sizes = Sizes(prod(_shape(a)[:-1]), columns, _shape(a)[-1])
    return _product_steps(sizes, _at_captured_sizes(products[0].problem), gpu)


# ---------------------------------------------------------------- steps


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


def _product_steps(sizes: Sizes, problem: Problem, gpu: Gpu, more: float = 0) -> list[TimedStep]:
    """The steps of a matmul with a quantised operand, from codes to the result.

    more: bytes that the last kernel moves besides its operands and a result of 16 bits, such as an epilogue's operands.
    """
    choice = choose(problem)
    converts = choice.kernel.endswith(OF_FLOAT8_BLOCKS)
    choice, formats = replace(choice, kernel=_kernel_of(choice, problem)), (problem.a.format, problem.b.format)
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


def _kernel_of(choice: Choice, problem: Problem) -> str:
    """The kernel's name in `time_terms.KERNELS`, which has separate entries for groups."""
    name = choice.kernel.removesuffix(OF_FLOAT8_BLOCKS)
    if name == "streaming_fp8":
        name = "skinny"
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
    if choice.kernel == "grouped_float8_sm90":
        return (config.bm, config.bn), gpu.multiprocessors
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
    tile, at_once = tiles or (kernel.tile, gpu.multiprocessors)
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
