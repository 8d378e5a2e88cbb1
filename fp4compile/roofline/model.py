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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div, scale_layout
from fp4compile.formats.quantize_spec import holds_values
from fp4compile.hardware import GPUS, Gpu, named
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.named_recipes import OPERANDS
from fp4compile.roofline.product_steps import Chosen, kernel_of, memory_pass, plain_step, product_steps, tiles_of
from fp4compile.roofline.sizes import Experts, Sizes
from fp4compile.roofline.time_terms import BF16, BOTH_WAYS, COLUMN, ROWS, Prediction, Step, Use, quantise_step, stored
from fp4compile.templates.choose import choose
from fp4compile.templates.problem import OperandType, Problem

__all__ = ["GPUS", "Experts", "Gpu", "Prediction", "Step", "Use", "predict"]

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
    sizes = tuple(_size(name, value) for name, value in (("m", m), ("n", n), ("k", k)))
    numbers = tuple(_size("like", value) for value in like) or sizes
    if len(numbers) != 3 or any(isinstance(size, sympy.Expr) for size in numbers):
        raise ValueError(f"like={like}: expected the (m, n, k) that choose the kernels; a symbol chooses none")
    if experts is not None and not isinstance(experts, Experts):
        experts = Experts(experts)
    products = PRODUCTS if train else ("fprop",)
    packed = not train and chosen.weight_cache != "off"
    return _layer(_uses_of(chosen), named(gpu), sizes, numbers, products, packed, experts)


def _uses_of(recipe: Recipe) -> tuple[tuple[str, Use], ...]:
    """(role, how a recipe quantises it) of each operand of linear layers that it quantises."""
    roles = ((product, role) for product in PRODUCTS for role in OPERANDS[product])
    return tuple(
        (role, Use(
            formats.get(name),
            static=role == "fprop_x" and recipe.activation_scale == "static",
            stochastic=role.endswith("_dy") and product in recipe.stochastic_rounding,
            hadamard=product in recipe.hadamard,
        ))
        for product, role in roles if (name := getattr(recipe, role)) is not None
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _layer(
    uses: tuple[tuple[str, Use], ...], gpu: Gpu, sizes: tuple, like: tuple, products: tuple[str, ...], packed: bool,
    experts: Experts | None,
) -> Prediction:  # fmt: skip
    """`predict` with hashable arguments, cached: benchmarks compare many recipes and sizes.

    uses: as of `_uses_of`. like: the (m, n, k) that choose the kernels. products: the layer's products that run.
    packed: whether the weight of fprop is quantised beforehand.
    """
    plain, steps = [], []
    used = dict(uses)
    own, chosen_by = ({name: Sizes.of(name, m, n, k, experts) for name in products} for m, n, k in (sizes, like))
    operands = {name: [used.get(role) for role in OPERANDS[name]] for name in products}
    # Without a quantised operand, no kernel of this package multiplies.
    chosen = {name: _chosen(a, b, gpu, chosen_by[name]) if a or b else None for name, (a, b) in operands.items()}
    values = frozenset(role for name in products for role in _values(name, used, chosen[name], packed))
    for name in products:
        maker = _Product(name, used, gpu, products, packed, values, own[name])
        plain.extend(maker.plain())
        steps.extend(maker.steps(chosen[name]))
    return Prediction(tuple(plain), tuple(steps))


def _values(name: str, uses: Mapping[str, Use], chosen: "Chosen | None", packed: bool) -> list[str]:
    """Roles of operands, but for an NVFP4 layer's A, that quantisers write as values; see `passes.fake_quantize`.

    Excludes operands whose codes are stored: packed weights, and activations for the weight gradient.
    """
    if chosen is None:
        return []
    kept = ("wgrad_x", "fprop_w") if packed else ("wgrad_x",)
    return [role for role, dtype in zip(OPERANDS[name], chosen.values, strict=True)
            if dtype is not None and role not in kept and holds_values(uses[role].format, torch.bfloat16)
            and uses[role].format.values_dtype == dtype]  # fmt: skip


# A role of wgrad -> the role of an earlier product that quantises the same tensor in the other direction.
_OTHER_DIRECTION = {"wgrad_x": "fprop_x", "wgrad_dy": "dgrad_dy"}


@dataclass(frozen=True)
class _Product:
    """One product of a layer. uses, products, packed: see `_layer`. values: the `_values` of all products."""

    name: str
    uses: dict[str, Use]
    gpu: Gpu
    products: tuple[str, ...]
    packed: bool
    values: frozenset[str]
    sizes: Sizes

    def plain(self) -> list[Step]:
        """The steps in bf16. Matrices that are gathered by an index are copied first."""
        experts, copied = self.sizes.experts, []
        if experts is not None and experts.grouping == "gather" and self.name != "wgrad":
            moved = 2 * BF16 * self.sizes.lines_read[1] * self.sizes.contraction
            copied = [memory_pass("copy matrices", self.name, moved, self.gpu)]
        return [*copied, plain_step(self.name, self.sizes, self.gpu)]

    def steps(self, chosen: Chosen | None) -> list[Step]:
        """The steps under the recipe: quantising, dequantising, the product, the rescale after it."""
        if chosen is None:
            return self.plain()
        roles = OPERANDS[self.name]
        a, b = (self.uses.get(role) for role in roles)
        fake = self._fake_quantised(roles[0], a, b, chosen)
        found: list[Step] = []
        codes: list[BlockFormat | None] = []
        for role, use, lines in zip(roles, (a, b), self.sizes.lines, strict=True):
            in_16_bits = (fake and role == roles[0]) or role in self.values
            codes.append(None if use is None or in_16_bits else use.format)
            if use is not None:
                found += self._quantise(role, use, lines, chosen.tier == "native", in_16_bits)
        return [*found, *product_steps(self.name, self.sizes, (codes[0], codes[1]), chosen, self.gpu, names=roles)]

    def _fake_quantised(self, role: str, a: Use | None, b: Use | None, chosen: Chosen) -> bool:
        """Whether A is quantised and dequantised by one kernel; see `passes.fake_quantize`."""
        if a is None or b is None or not chosen.fake_quantizes or role.startswith("wgrad"):
            return False
        plain = a.format.scale == "e4m3" and not (a.format.square or a.stochastic)
        return plain and not self._merged(role, a)

    def _merged(self, role: str, use: Use) -> bool:
        """Whether one kernel quantises an operand in two directions: for this product and for another one."""
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


@functools.lru_cache(maxsize=4096)
def _chosen(a: Use | None, b: Use | None, gpu: Gpu, sizes: Sizes) -> Chosen:
    """The kernel for a product; with swizzled scales if the kernel is then a native one, as in `analysis.plan`."""
    for native in (True, False):
        chosen = _with_layout(a, b, gpu, sizes, native)
        if chosen.tier == "native":
            break
    return chosen


def _with_layout(a: Use | None, b: Use | None, gpu: Gpu, sizes: Sizes, native: bool) -> Chosen:
    experts = sizes.experts
    by_offsets = experts is not None and experts.grouping == "rows"
    types = _operand_type(a, native, by_offsets), _operand_type(b, native, by_offsets)
    outer = types[0].outer, types[1].outer
    if experts is not None and experts.grouping != "batch":
        problem = Problem(*types, sizes.rows, sizes.columns, sizes.contraction, torch.bfloat16, gpu.target,
                          ragged="contraction" if sizes.along_k else "rows", groups=sizes.count)  # fmt: skip
        choice = choose(problem)
        kernel = kernel_of(choice, problem)
        if by_offsets or kernel == "grouped_skinny":  # which also takes matrices by index
            dtype = problem.compute_dtype if by_offsets and None not in (a, b) else None
            values = dtype if choice.dequantizes_a else None, dtype if choice.dequantizes_b else None
            return Chosen(kernel, choice.tier, False, outer, values, tiles_of(kernel, choice.config, gpu))
    rows, contraction = sizes.rows, sizes.contraction
    if experts is not None:
        rows, contraction = (rows, ceil_div(contraction, sizes.count)) if sizes.along_k else (
            ceil_div(rows, sizes.count), contraction)  # fmt: skip
    problem = Problem(*types, rows, sizes.columns, contraction, torch.bfloat16, gpu.target, None, sizes.count,
                      experts is not None)  # fmt: skip
    choice = choose(problem)
    alone = experts is None
    of_values = alone and choice.dequantizes_a and choice.dequantizes_b and [x.scale for x in types] == ["e8m0"] * 2
    held = torch.bfloat16 if of_values else None
    return Chosen(kernel_of(choice, problem), choice.tier, choice.dequantizes_a and alone, outer, (held, held))


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
