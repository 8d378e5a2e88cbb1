"""Predicted times of linear layers: a recipe's expected gain on a GPU that need not be present.

Entry: `predict(recipe, gpu, m, n, k)`. A layer multiplies activations [M, K] with a weight [N, K]. It is a list of
steps of one or more kernels. A step takes

    launches * seconds of a launch + turns * seconds of a turn
        + max(FLOPs / rate of the matrix units, bytes / rate of the memory)

FLOPs count whole tiles where a kernel has one tile for all shapes (`layer_sizes.Sizes.flops`). The recipe determines
which operands are quantised and how; `templates.choose` names the kernel of each product. The model counts how often an
operand is read, the codes and scales that are written, the dequantised copies of the emulated tier, and the pass after
a product whose rescale is not fused. Bytes are counted once for each kernel that moves them; the L2 cache between
kernels is not modelled. `hardware` and `roofline.time_terms` have the rates and shares.

Nothing here is a measurement. docs/roofline.md has the errors of the predictions on an H200.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.layouts import ceil_div, scale_layout
from fp4compile.formats.quantize_spec import holds_values
from fp4compile.hardware import GPUS, Gpu, named
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.named_recipes import OPERANDS
from fp4compile.roofline.layer_sizes import Experts, Sizes
from fp4compile.roofline.product_steps import Chosen, memory_pass, plain_step, product_steps
from fp4compile.roofline.time_terms import (
    BF16,
    BOTH_WAYS,
    COLUMN,
    ROWS,
    Prediction,
    TimedStep,
    Use,
    quantise_step,
    stored,
)
from fp4compile.templates.choose import choose
from fp4compile.templates.problem import OperandType, Problem

__all__ = ["GPUS", "Experts", "Gpu", "Prediction", "TimedStep", "Use", "predict"]

PRODUCTS = ("fprop", "dgrad", "wgrad")


def predict(
    recipe: str | dict | Recipe, gpu: str | Gpu, m: int, n: int, k: int, *, train: bool = False,
    experts: int | Experts | None = None,
) -> Prediction:  # fmt: skip
    """Times of a linear layer: activations [m, k], a weight [n, k], bf16 without a bias.

    recipe: as for `fp4compile.backend`; its rules and limits are ignored. gpu: a name of `GPUS`, or a `Gpu`.
    m, n, k: positive whole numbers. train: fprop, dgrad and wgrad, all operands quantised in each step; otherwise fprop
        alone, with a weight that is packed once (not with `weight_cache="off"`).
    experts: the number of experts of a weight [experts, n, k]; offsets cut the m rows of all experts into groups. An
        `Experts` describes another grouping. None is one matrix.

    Raises ValueError for an unknown GPU or recipe, and for sizes that are not positive whole numbers.
    """
    chosen = resolve(recipe)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise ValueError(f"{name}={size!r}: expected a positive whole number")
    if experts is not None and not isinstance(experts, Experts):
        experts = Experts(experts)
    products = PRODUCTS if train else ("fprop",)
    packed = not train and chosen.weight_cache != "off"
    return _layer(_uses_of(chosen), named(gpu), (m, n, k), products, packed, experts)


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
    uses: tuple[tuple[str, Use], ...], gpu: Gpu, sizes: tuple[int, int, int], products: tuple[str, ...], packed: bool,
    experts: Experts | None,
) -> Prediction:  # fmt: skip
    """`predict` with hashable arguments, cached: benchmarks compare many recipes and sizes.

    uses: as of `_uses_of`. sizes: (m, n, k). products: the layer's products that run. packed: whether the weight of
    fprop is quantised beforehand.
    """
    plain, steps = [], []
    used = dict(uses)
    own = {name: Sizes.of(name, *sizes, experts) for name in products}
    operands = {name: [used.get(role) for role in OPERANDS[name]] for name in products}
    # Without a quantised operand, no kernel of this package multiplies.
    chosen = {name: _chosen(a, b, gpu, own[name]) if a or b else None for name, (a, b) in operands.items()}
    values = frozenset(role for name in products for role in _values(name, used, chosen[name], packed))
    for name in products:
        maker = _LayerProduct(name, used, gpu, products, packed, values, own[name])
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
class _LayerProduct:
    """One product of a layer. uses, products, packed: see `_layer`. values: the `_values` of all products."""

    name: str
    uses: dict[str, Use]
    gpu: Gpu
    products: tuple[str, ...]
    packed: bool
    values: frozenset[str]
    sizes: Sizes

    def plain(self) -> list[TimedStep]:
        """The steps in bf16. Matrices that are gathered by an index are copied first."""
        experts, copied = self.sizes.experts, []
        if experts is not None and experts.grouping == "gather" and self.name != "wgrad":
            moved = 2 * BF16 * self.sizes.lines_read[1] * self.sizes.contraction
            copied = [memory_pass("copy matrices", self.name, moved, self.gpu)]
        return [*copied, plain_step(self.name, self.sizes, self.gpu)]

    def steps(self, chosen: Chosen | None) -> list[TimedStep]:
        """The steps under the recipe: quantising, dequantising, the product, the rescale after it."""
        if chosen is None:
            return self.plain()
        roles = OPERANDS[self.name]
        a, b = (self.uses.get(role) for role in roles)
        fake = self._fake_quantised(roles[0], a, b, chosen)
        found: list[TimedStep] = []
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

    def _quantise(self, role: str, use: Use, lines: int, native: bool, in_16_bits: bool) -> list[TimedStep]:
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
    rows, contraction = sizes.rows, sizes.contraction
    if experts is not None and experts.grouping != "batch":
        problem = Problem(*types, rows, sizes.columns, contraction, torch.bfloat16, gpu.target,
                          ragged="contraction" if sizes.along_k else "rows", groups=sizes.count)  # fmt: skip
        choice = choose(problem)
        if by_offsets or choice.kernel == "streaming":  # which also takes matrices by index
            dtype = problem.compute_dtype if by_offsets and None not in (a, b) else None
            values = dtype if choice.dequantizes_a else None, dtype if choice.dequantizes_b else None
            return Chosen.of(choice, problem, gpu, values=values)
    if experts is not None and sizes.along_k:
        contraction = ceil_div(contraction, sizes.count)
    elif experts is not None:
        rows = ceil_div(rows, sizes.count)
    problem = Problem(*types, rows, sizes.columns, contraction, torch.bfloat16, gpu.target, None, sizes.count,
                      experts is not None)  # fmt: skip
    choice, alone = choose(problem), experts is None
    of_values = alone and choice.dequantizes_a and choice.dequantizes_b and [x.scale for x in types] == ["e8m0"] * 2
    held = torch.bfloat16 if of_values else None
    return Chosen.of(choice, problem, gpu, fake_quantizes=choice.dequantizes_a and alone, values=(held, held))


def _operand_type(use: Use | None, native: bool, by_offsets: bool) -> OperandType:
    if use is None:
        return OperandType(None, torch.bfloat16)
    fmt = use.format
    outer = "group" if by_offsets and fmt.outer == "tensor" and not use.static else fmt.outer or "none"
    return OperandType(fmt, fmt.data_dtype, scale_layout(fmt, native=native) == "swizzled", outer)
