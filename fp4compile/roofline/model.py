"""Predicted times of linear layers: a recipe's expected gain on a GPU that need not be present.

Entry: `predict(recipe, gpu, m, n, k)`. A layer multiplies activations [M, K] with a weight [N, K]. It is a list of
steps of one or more kernels. A step takes

    launches * seconds of a launch + turns * seconds of a turn
        + max(FLOPs / rate of the matrix units, bytes / rate of the memory)

FLOPs count whole tiles where a kernel has one tile for all shapes (`roofline.sizes.Sizes.flops`). The recipe determines
which operands are quantised and how; `templates.choose` names the kernel of each product. The model counts how often an
operand is read, the codes and scales that are written, the dequantised copies of the emulated tier, and the pass after
a product whose rescale is not fused. Bytes are counted once for each kernel that moves them; the L2 cache between
kernels is not modelled. Sizes may be sympy symbols. `hardware` and `roofline.time_terms` have the rates and shares.

Nothing here is a measurement. docs/roofline.md has the errors of the predictions on an H200.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div, scale_layout
from fp4compile.formats.quantize_spec import holds_values
from fp4compile.hardware import GPUS, Gpu, named
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.named_recipes import OPERANDS
from fp4compile.roofline.sizes import Experts, Sizes
from fp4compile.roofline.time_terms import (
    BF16,
    BOTH_WAYS,
    COLUMN,
    FLOAT32,
    KERNELS,
    LIBRARY,
    OUTER_SCALES,
    ROWS,
    Kernel,
    Prediction,
    Step,
    Use,
    quantise_step,
    stored,
)
from fp4compile.templates.choose import Choice, choose
from fp4compile.templates.problem import OperandType, Problem

__all__ = ["GPUS", "Experts", "Gpu", "Prediction", "Step", "Use", "layer", "predict", "product"]

PRODUCTS = ("fprop", "dgrad", "wgrad")


def predict(
    recipe: str | dict | Recipe, gpu: str | Gpu, m: Any, n: Any, k: Any, *, train: bool = False, like: tuple = (),
    experts: int | Experts | None = None,
) -> Prediction:  # fmt: skip
    """Times of a linear layer: activations [m, k], a weight [n, k], bf16 without a bias.

    recipe: as for `fp4compile.backend`; its rules and limits are ignored. gpu: a name of `GPUS`, or a `Gpu`.
    m, n, k: positive whole numbers, or sympy symbols (assume positive integers). train: fprop, dgrad and wgrad, all
        operands quantised in each step; otherwise fprop alone, with a weight that is packed once (not with
        `weight_cache="off"`). like: (m, n, k) that choose the kernels instead; needed where a size is a symbol.
    experts: the number of experts of a weight [experts, n, k]; offsets cut the m rows of all experts into groups. An
        `Experts` describes another grouping. None is one matrix.

    Raises ValueError for an unknown GPU or recipe, and for sizes that are not positive whole numbers.
    """
    chosen = resolve(recipe)
    products = PRODUCTS if train else ("fprop",)
    packed = not train and chosen.weight_cache != "off"
    return layer(uses_of(chosen), gpu, m, n, k, products=products, packed=packed, like=like, experts=experts)


def uses_of(recipe: Recipe) -> dict[str, Use | None]:
    """How a recipe quantises the operands of linear layers, by role."""
    uses: dict[str, Use | None] = {}
    for product in PRODUCTS:
        for role in OPERANDS[product]:
            name = getattr(recipe, role)
            uses[role] = None if name is None else Use(
                formats.get(name),
                static=role == "fprop_x" and recipe.activation_scale == "static",
                stochastic=role.endswith("_dy") and product in recipe.stochastic_rounding,
                hadamard=product in recipe.hadamard,
            )  # fmt: skip
    return uses


def layer(
    uses: Mapping[str, Use | None], gpu: str | Gpu, m: Any, n: Any, k: Any, *,
    products: Sequence[str] = ("fprop",), packed: bool = True, like: tuple = (),
    experts: int | Experts | None = None,
) -> Prediction:  # fmt: skip
    """Times of a linear layer whose operands are quantised as `uses` says, by role; a missing role is not quantised.

    products: the layer's products that run. packed: whether the weight of fprop is quantised beforehand. See `predict`
    for the other arguments.
    """
    sizes = tuple(_size(name, value) for name, value in (("m", m), ("n", n), ("k", k)))
    numbers = tuple(_size("like", value) for value in like) or sizes
    if len(numbers) != 3 or any(isinstance(size, sympy.Expr) for size in numbers):
        raise ValueError(f"like={like}: expected the (m, n, k) that choose the kernels; a symbol chooses none")
    frozen = tuple(sorted(((role, use) for role, use in uses.items() if use is not None), key=lambda pair: pair[0]))
    if experts is not None and not isinstance(experts, Experts):
        experts = Experts(experts)
    return _layer(frozen, named(gpu), sizes, numbers, tuple(products), packed, experts)


def product(gpu: str | Gpu, flops: int, dims: tuple[int, int, int] | None = None) -> Step:
    """The step of a 16-bit product outside linear layers. flops: its FLOPs; dims: (m, n, k), None where unknown."""
    on, moved = named(gpu), 0
    if dims is not None and all(dims):
        m, n, k = dims
        moved = flops // (2 * m * n * k) * BF16 * (m * k + n * k + m * n)
    return Step("product", "other", flops, moved, on.bf16 * on.bf16_share, on.copy_rate, on.product_launch)


@functools.lru_cache(maxsize=4096)
def _layer(
    uses: tuple[tuple[str, Use], ...], gpu: Gpu, sizes: tuple, like: tuple, products: tuple[str, ...], packed: bool,
    experts: Experts | None,
) -> Prediction:  # fmt: skip
    """`layer` with hashable arguments, cached: a deep model has equal layers many times."""
    plain, steps = [], []
    own, chosen_by = ({name: Sizes.of(name, m, n, k, experts) for name in products} for m, n, k in (sizes, like))
    chosen = {name: _chosen_for(name, dict(uses), gpu, chosen_by[name]) for name in products}
    values = frozenset(role for name in products for role in _values(name, dict(uses), chosen[name], packed))
    for name in products:
        maker = _Product(name, dict(uses), gpu, products, packed, values, own[name])
        plain.extend(maker.plain())
        steps.extend(maker.steps(chosen[name]))
    return Prediction(tuple(plain), tuple(steps))


def _chosen_for(name: str, uses: Mapping[str, Use], gpu: Gpu, sizes: Sizes) -> "_Chosen | None":
    """The kernel of a product; None where no operand is quantised."""
    a, b = (uses.get(role) for role in OPERANDS[name])
    return None if a is None and b is None else _chosen(a, b, gpu, sizes)


def _values(name: str, uses: Mapping[str, Use], chosen: "_Chosen | None", packed: bool) -> list[str]:
    """Roles of experts' operands that quantisers write as 16-bit dequantised values; see `passes.fake_quantize`.

    Excludes operands whose codes are stored: packed weights, and activations for the weight gradient.
    """
    if chosen is None or chosen.values is None:
        return []
    kept = ("wgrad_x", "fprop_w") if packed else ("wgrad_x",)
    return [role for role in OPERANDS[name]
            if role not in kept and holds_values(uses[role].format, torch.bfloat16)
            and uses[role].format.values_dtype == chosen.values]  # fmt: skip


# A role of wgrad -> the role of an earlier product that quantises the same tensor in the other direction.
_OTHER_DIRECTION = {"wgrad_x": "fprop_x", "wgrad_dy": "dgrad_dy"}


@dataclass(frozen=True)
class _Chosen:
    """The kernel of a product: its name and tier.

    fake_quantizes: whether its A may be quantised and dequantised by one kernel. outer: for both operands, what shares
    an outer scale. values: the dtype to which two quantised operands of groups are dequantised in memory; None where
    they are not. tiles: the tile of the result that a program computes, and how many programs run at once; None where
    these are equal for all shapes.
    """

    kernel: str
    tier: str
    fake_quantizes: bool
    outer: tuple[str, str]
    values: torch.dtype | None = None
    tiles: tuple[tuple[int, int], int] | None = None

    @property
    def shares(self) -> Kernel:
        """The shares that the kernel reaches."""
        return KERNELS.get(self.kernel, LIBRARY["dense"])


@dataclass(frozen=True)
class _Product:
    """One product of a layer. uses, products, packed: see `layer`. values: the `_values` of all products."""

    name: str
    uses: dict[str, Use]
    gpu: Gpu
    products: tuple[str, ...]
    packed: bool
    values: frozenset[str]
    sizes: Sizes

    def plain(self) -> list[Step]:
        """The steps in bf16. Matrices that are gathered by an index are copied first."""
        experts, (a, b) = self.sizes.experts, self.sizes.lines_read
        by_offsets = experts is not None and experts.grouping == "rows"
        kernel = LIBRARY["grouped" if by_offsets else "dense"]
        found, length = [], self.sizes.contraction
        if experts is not None and experts.grouping == "gather" and self.name != "wgrad":
            found.append(self._pass("copy matrices", 2 * BF16 * b * length))
        rate = self.gpu.bf16 * self.gpu.bf16_share
        return [*found, self._multiply(kernel, BF16 * (a + b) * length, rate, "bf16 product")]

    def steps(self, chosen: _Chosen | None) -> list[Step]:
        """The steps under the recipe: quantising, dequantising, the product, the rescale after it."""
        if chosen is None:
            return self.plain()
        roles = OPERANDS[self.name]
        a, b = (self.uses.get(role) for role in roles)
        native, length = chosen.tier == "native", self.sizes.contraction
        fake = self._fake_quantised(roles[0], a, b, chosen)
        found, operands = [], 0
        for role, use, lines, read in zip(roles, (a, b), self.sizes.lines, self.sizes.lines_read, strict=True):
            plain = BF16 * read * length
            if use is None:
                operands += plain
                continue
            in_16_bits = (fake and role == roles[0]) or role in self.values
            found += self._quantise(role, use, lines, native, in_16_bits)
            if self._dequantised(role, chosen) and not in_16_bits:
                whole = stored(use.format, lines, length, native) + BF16 * lines * length
                found.append(self._pass(f"dequantise {role}", whole))
                in_16_bits = True
            operands += plain if in_16_bits else stored(use.format, read, length, native)
        rate = self._rate(a, b, chosen)
        found.append(self._multiply(chosen.shares, operands, rate, chosen.kernel, chosen.tiles))
        if chosen.kernel == "library_block_scaled" and "tensor" in chosen.outer:
            found.append(self._pass("multiply outer scales", 0, launches=OUTER_SCALES))
        if self._rescaled_apart(chosen):  # float32 sums are written, read and written in 16 bits
            found.append(self._pass("rescale", (2 * FLOAT32 + BF16) * self.sizes.result))
        return found

    def _dequantised(self, role: str, chosen: _Chosen) -> bool:
        """Whether a pass before the product dequantises the operand: any operand, or A where experts are streamed."""
        streamed = chosen.kernel == "grouped_skinny" and role == OPERANDS[self.name][0]
        return streamed or chosen.kernel in ("dequant_operand", "grouped_dequant_operand")

    def _rescaled_apart(self, chosen: _Chosen) -> bool:
        """Whether a separate pass applies the outer scales, because a library product has no argument for them."""
        by_library = chosen.kernel == "dequant_operand" and self.sizes.experts is None
        return chosen.kernel == "library_rescaled" or (by_library and chosen.outer != ("none", "none"))

    def _fake_quantised(self, role: str, a: Use | None, b: Use | None, chosen: _Chosen) -> bool:
        """Whether A is quantised and dequantised by one kernel; see `passes.fake_quantize`."""
        if a is None or b is None or not chosen.fake_quantizes or role.startswith("wgrad"):
            return False
        plain = a.format.scale == "e4m3" and not (a.format.square or a.stochastic or a.hadamard)
        return plain and not self._merged(role, a)

    def _merged(self, role: str, use: Use) -> bool:
        """Whether one kernel quantises the operand in both directions: for this product, and a later or earlier one."""
        pairs = _OTHER_DIRECTION | {first: later for later, first in _OTHER_DIRECTION.items()}
        other = pairs.get(role)
        return other is not None and other.split("_")[0] in self.products and use.merges_with(self.uses.get(other))

    def _quantise(self, role: str, use: Use, lines: Any, native: bool, in_16_bits: bool) -> list[Step]:
        """The steps that quantise an operand of `lines` lines; none where an earlier product's kernel quantised it."""
        if role == "fprop_w" and self.packed:
            return []
        merged, length = self._merged(role, use), self.sizes.contraction
        if merged and role in _OTHER_DIRECTION:
            return []
        hadamard = use.hadamard
        written = BF16 * lines * length if in_16_bits else stored(use.format, lines, length, native)
        if merged:
            later = {first: later for later, first in _OTHER_DIRECTION.items()}[role]
            hadamard = self.uses[later].hadamard
            written += BF16 * lines * length if later in self.values else stored(use.format, length, lines, native)
        along = BOTH_WAYS if merged else ROWS if role in ("fprop_x", "fprop_w", "dgrad_dy") else COLUMN
        made = quantise_step(role, self.name, use, hadamard, lines * length, written, along, self.gpu)
        experts = self.sizes.experts
        each = experts is not None and experts.grouping != "gather"
        if each and use.format.outer == "tensor" and not use.static:
            made = replace(made, overhead=made.overhead + self.gpu.launch)  # one launch zeroes the experts' amaxes
        return [made]

    def _multiply(self, kernel: Kernel, operands: Any, rate: float, name: str, tiles: tuple | None = None) -> Step:
        """The step of the product. tiles: see `_Chosen`; by default the kernel's tile, and as many as the GPU runs."""
        tile, at_once = tiles or (kernel.tile, self.gpu.multiprocessors // kernel.cluster)
        flops = self.sizes.flops(tile, at_once)
        overhead = self.gpu.product_launch * kernel.launch + kernel.launches * self.gpu.launch
        between: Any = 0.0
        if kernel.turn and tile:
            between = kernel.turn * self.sizes.turns(tile, at_once)
        return Step(name, self.name, flops, operands + BF16 * self.sizes.result, rate,
                    self.gpu.copy_rate * kernel.memory, overhead, between)  # fmt: skip

    def _rate(self, a: Use | None, b: Use | None, chosen: _Chosen) -> float:
        """FLOP/s of the product: the codes' matrix units' rate in the native tier, bf16's in the emulated tier."""
        peak, share = self.gpu.bf16, self.gpu.bf16_share
        if chosen.tier == "native" and a is not None and b is not None:
            fp4 = a.format.packed and b.format.packed
            native, reached = (self.gpu.fp4, self.gpu.fp4_share) if fp4 else (self.gpu.fp8, self.gpu.fp8_share)
            if native is None:
                raise ValueError(f"gpu: {self.gpu.name} has no rate of {'FP4' if fp4 else 'FP8'} products, and "
                                 f"{chosen.kernel} multiplies such operands there")  # fmt: skip
            peak, share = native, reached
        return peak * (share if chosen.shares.matrix is None else min(chosen.shares.matrix, share))

    def _pass(self, name: str, moved: Any, launches: int = 1) -> Step:
        """A step whose kernels only move memory."""
        return Step(name, self.name, 0, moved, self.gpu.bf16, self.gpu.copy_rate, launches * self.gpu.launch)


@functools.lru_cache(maxsize=4096)
def _chosen(a: Use | None, b: Use | None, gpu: Gpu, sizes: Sizes) -> _Chosen:
    """The kernel for a product; with swizzled scales if the kernel is then a native one, as in `analysis.plan`."""
    for native in (True, False):
        chosen = _with_layout(a, b, gpu, sizes, native)
        if chosen.tier == "native":
            break
    return chosen


def _with_layout(a: Use | None, b: Use | None, gpu: Gpu, sizes: Sizes, native: bool) -> _Chosen:
    experts = sizes.experts
    by_offsets = experts is not None and experts.grouping == "rows"
    types = _operand_type(a, native, by_offsets), _operand_type(b, native, by_offsets)
    outer = types[0].outer, types[1].outer
    if experts is not None and experts.grouping != "batch":
        problem = Problem(*types, sizes.rows, sizes.columns, sizes.contraction, torch.bfloat16, gpu.target,
                          ragged="contraction" if sizes.along_k else "rows", groups=sizes.count)  # fmt: skip
        choice = choose(problem)
        if by_offsets or choice.kernel == "grouped_skinny":  # grouped_skinny also takes matrices by index
            in_memory = choice.dequantizes_a and choice.dequantizes_b and None not in (a, b)
            values = problem.compute_dtype if in_memory else None
            return _Chosen(choice.kernel, choice.tier, False, outer, values, _tiles(choice, gpu))
    rows, contraction = sizes.rows, sizes.contraction
    if experts is not None:
        rows, contraction = (rows, ceil_div(contraction, sizes.count)) if sizes.along_k else (
            ceil_div(rows, sizes.count), contraction)  # fmt: skip
    choice = choose(Problem(*types, rows, sizes.columns, contraction, torch.bfloat16, gpu.target, None, sizes.count,
                            experts is not None))  # fmt: skip
    return _Chosen(choice.kernel, choice.tier, choice.dequantizes_a and experts is None, outer)


def _tiles(choice: Choice, gpu: Gpu) -> tuple[tuple[int, int], int] | None:
    """`_Chosen.tiles` of a grouped kernel; None for a kernel whose launch is not modelled."""
    config = choice.config
    if choice.kernel == "grouped_skinny":
        return (config.rows, 16 * config.tiles), config.grid
    if choice.kernel == "grouped_dequant_tiles":  # programs of small tiles share a multiprocessor
        return (config.bm, config.bn), gpu.multiprocessors * max(128 * 128 // (config.bm * config.bn), 1)
    return None


def _operand_type(use: Use | None, native: bool, by_offsets: bool) -> OperandType:
    if use is None:
        return OperandType(None, torch.bfloat16)
    fmt = use.format
    outer = "group" if by_offsets and fmt.outer == "tensor" and not use.static else fmt.outer or "none"
    return OperandType(fmt, fmt.data_dtype, scale_layout(fmt, native=native) == "swizzled", outer)


def _size(name: str, value: Any) -> Any:
    """A size as an int or a sympy expression of symbols. Raises ValueError for an invalid size."""
    if isinstance(value, sympy.Expr) and value.free_symbols:
        return value
    whole = isinstance(value, int | sympy.Integer) and not isinstance(value, bool)
    if not whole or value <= 0:
        raise ValueError(f"{name}={value!r}: expected a positive whole number, or a sympy symbol")
    return int(value)
