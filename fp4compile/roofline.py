"""Predicted times of linear layers: what a recipe should gain on a GPU that need not be there.

Entry: `predict(recipe, gpu, m, n, k)`. A layer multiplies activations [M, K] with a weight [N, K]. It is a list of
steps, each one or more kernels, and a step takes

    launches * seconds of a launch + max(FLOPs / rate of the matrix units, bytes / rate of the memory)

The recipe says which operands are quantised and how, `templates.gemm.choose` which kernel computes each product. What
follows from these is counted: how often an operand is read, the codes and scales that are written, the dequantised
copies of the emulated tier, the pass after a product whose rescale is not fused. Bytes are those that must move at
least once; what the L2 cache keeps between kernels is not modelled. Sizes may be sympy symbols. `gpus` has the rates.

Nothing here is a measurement. Compare with docs/roofline.md, which says how far predictions were off on an H200.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fp4compile import formats
from fp4compile.formats import BlockFormat
from fp4compile.gpus import GPUS, Gpu, named
from fp4compile.layouts import ceil_div, scale_layout, swizzled_numel
from fp4compile.recipe import Recipe, resolve
from fp4compile.recipe.named_recipes import OPERANDS
from fp4compile.templates.gemm.choose import Choice, choose
from fp4compile.templates.gemm.problem import OperandType, Problem

__all__ = ["GPUS", "Gpu", "Prediction", "Step", "Use", "layer", "predict", "product"]

PRODUCTS = ("fprop", "dgrad", "wgrad")
_BF16, _FLOAT32 = 2, 4  # bytes


@dataclass(frozen=True)
class _Kernel:
    """What a product's kernel reaches.

    memory: share of a copy's bytes/s. matrix: share of the peak FLOP/s; None takes the library's of the GPU.
    launch: its launch and its pipeline, as a multiple of a library product's.
    """

    memory: float = 1.0
    matrix: float | None = None
    launch: float = 1.0


# By the name that `choose` gives. The emulated ones are fitted to benchmarks/results/linear_h200.json, one entry for
# all shapes of a kernel (`dequant_tiles`: to the figures in templates/gemm/heuristics.py). For those of SM100 that are
# Triton's, the share of the matrix units is that of the model in templates/gemm/cost.py. Others are the library's.
_TRITON_SM100 = 0.4
_KERNELS = {
    "gemv": _Kernel(memory=0.95, launch=0.7),
    "skinny": _Kernel(memory=0.78, launch=0.75),
    "wgmma_sm90": _Kernel(memory=0.67, launch=1.3),
    "dequant_tiles": _Kernel(memory=0.5, matrix=0.32, launch=1.3),
    "block_scaled_sm100": _Kernel(matrix=_TRITON_SM100),
    "skinny_block_scaled_sm100": _Kernel(matrix=_TRITON_SM100),
}
_LIBRARY = _Kernel()
# Kernels by which torch multiplies the outer scales of the library's two-level product; see templates/gemm/cost.py.
_OUTER_SCALES = 2

# Shares of a copy's bytes/s that the quantise kernels reach, fitted to benchmarks/results/quantize_h200.json; those
# that hold for an operand are multiplied.
_COLUMNS, _BOTH, _SQUARE = 0.91, 0.84, 0.87
_HADAMARD, _STOCHASTIC = 0.78, 0.88
# A row's outer scale takes a pass over the row inside the kernel: so many launches more.
_ROW_AMAX = 0.5


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
    flops: floating-point operations of the matrix units; bytes: read and written. Numbers, or sympy expressions.
    rate: FLOP/s, and bandwidth: bytes/s, that these kernels are expected to reach. overhead: seconds of the launches.
    """

    name: str
    product: str
    flops: Any
    bytes: Any
    rate: float
    bandwidth: float
    overhead: float

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
        return self.overhead + _max(self.matrix, self.memory)


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
            spent[bound] += max(step.matrix, step.memory)
        return max(spent, key=lambda each: spent[each])

    def of_product(self, name: str) -> "Prediction":
        """The steps of one product alone. A kernel that writes two directions counts for the first that needs it."""
        plain, steps = (
            tuple(step for step in each if step.product == name) for each in (self.plain, self.steps)
        )  # fmt: skip
        return Prediction(plain, steps)


def predict(
    recipe: str | dict | Recipe, gpu: str | Gpu, m: Any, n: Any, k: Any, *, train: bool = False, like: tuple = ()
) -> Prediction:
    """Times of a linear layer: activations [m, k], a weight [n, k], bf16 without a bias.

    recipe: as for `fp4compile.backend`; its rules and limits are not asked. gpu: a name of `GPUS`, or a `Gpu`.
    m, n, k: positive whole numbers, or sympy symbols (assume positive integers). train: fprop, dgrad and wgrad, all
        operands quantised in each step; otherwise fprop alone, with a weight that is packed once (not with
        `weight_cache="off"`). like: (m, n, k) that choose the kernels instead; needed where a size is a symbol.

    Raises ValueError for an unknown GPU or recipe, and for sizes that are not positive whole numbers.
    """
    chosen = resolve(recipe)
    products = PRODUCTS if train else ("fprop",)
    packed = not train and chosen.weight_cache != "off"
    return layer(uses_of(chosen), gpu, m, n, k, products=products, packed=packed, like=like)


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
) -> Prediction:  # fmt: skip
    """The same for operands that are quantised as `uses` says, by role; a role that is missing is not quantised.

    products: those of the layer that run. packed: whether the weight of fprop is quantised beforehand.
    """
    sizes = tuple(_size(name, value) for name, value in (("m", m), ("n", n), ("k", k)))
    numbers = tuple(_size("like", value) for value in like) or sizes
    if len(numbers) != 3 or any(isinstance(size, sympy.Expr) for size in numbers):
        raise ValueError(f"like={like}: expected the (m, n, k) that choose the kernels; a symbol chooses none")
    frozen = tuple(sorted(((role, use) for role, use in uses.items() if use is not None), key=lambda pair: pair[0]))
    return _layer(frozen, named(gpu), sizes, numbers, tuple(products), packed)


def product(gpu: str | Gpu, flops: int, dims: tuple[int, int, int] | None = None) -> Step:
    """A product in 16 bits that is no linear layer's: its FLOPs, and (m, n, k) where they are known."""
    on, moved = named(gpu), 0
    if dims is not None and all(dims):
        m, n, k = dims
        moved = flops // (2 * m * n * k) * _BF16 * (m * k + n * k + m * n)
    return Step("product", "other", flops, moved, on.bf16 * on.bf16_share, on.copy_rate, on.product_launch)


@functools.lru_cache(maxsize=4096)
def _layer(
    uses: tuple[tuple[str, Use], ...], gpu: Gpu, sizes: tuple, like: tuple, products: tuple[str, ...], packed: bool
) -> Prediction:
    """`layer` with everything hashable: a deep model asks for the same layer many times."""
    plain, steps = [], []
    for name in products:
        maker = _Product(name, dict(uses), gpu, products, packed)
        plain.append(maker.plain(*sizes))
        steps.extend(maker.steps(sizes, like))
    return Prediction(tuple(plain), tuple(steps))


# The rows of A, the rows of B and the contraction of each product, of the layer's (M, N, K).
_DIMS: dict[str, Callable] = {
    "fprop": lambda m, n, k: (m, n, k),
    "dgrad": lambda m, n, k: (m, k, n),
    "wgrad": lambda m, n, k: (n, k, m),
}
# The operand of an earlier product that holds the same tensor in the other direction.
_OTHER_DIRECTION = {"wgrad_x": "fprop_x", "wgrad_dy": "dgrad_dy"}
_ROWS, _BOTH_WAYS, _COLUMN = "rows", "both", "columns"


@dataclass(frozen=True)
class _Product:
    """One product of a layer. uses, products, packed: as in `layer`."""

    name: str
    uses: dict[str, Use]
    gpu: Gpu
    products: tuple[str, ...]
    packed: bool

    def plain(self, m: Any, n: Any, k: Any) -> Step:
        rows, columns, contraction = _DIMS[self.name](m, n, k)
        return self._multiply(_LIBRARY, rows, columns, contraction, _BF16 * (rows + columns) * contraction,
                              self.gpu.bf16 * self.gpu.bf16_share, "bf16 product")  # fmt: skip

    def steps(self, sizes: tuple, like: tuple) -> list[Step]:
        """Quantising, dequantising, the product, what follows it."""
        roles = OPERANDS[self.name]
        a, b = (self.uses.get(role) for role in roles)
        if a is None and b is None:
            return [self.plain(*sizes)]
        rows, columns, contraction = _DIMS[self.name](*sizes)
        choice, problem = _chosen(a, b, self.gpu, _DIMS[self.name](*like))
        native = choice.tier == "native"
        fake = self._fake_quantised(roles[0], a, b, choice)
        found, operands = [], 0
        for role, use, lines in ((roles[0], a, rows), (roles[1], b, columns)):
            stored = _BF16 * lines * contraction if use is None else _stored(use.format, lines, contraction, native)
            if use is not None:
                in_16_bits = fake and role == roles[0]
                found += self._quantise(role, use, lines, contraction, native, in_16_bits)
                if in_16_bits:
                    stored = _BF16 * lines * contraction
                elif choice.kernel == "dequant_operand":
                    found.append(self._pass(f"dequantise {role}", stored + _BF16 * lines * contraction))
                    stored = _BF16 * lines * contraction
            operands += stored
        kernel = _KERNELS.get(choice.kernel, _LIBRARY)
        found.append(self._multiply(kernel, rows, columns, contraction, operands,
                                    self._rate(a, b, choice, kernel), choice.kernel))  # fmt: skip
        if choice.kernel == "library_block_scaled" and "tensor" in (problem.a.outer, problem.b.outer):
            found.append(self._pass("multiply outer scales", 0, launches=_OUTER_SCALES))
        if _rescaled_apart(choice, problem):  # float32 sums are written, read and written in 16 bits
            found.append(self._pass("rescale", (2 * _FLOAT32 + _BF16) * rows * columns))
        return found

    def _fake_quantised(self, role: str, a: Use | None, b: Use | None, choice: Choice) -> bool:
        """Whether A is quantised and dequantised by one kernel; see `passes.fake_quantize`."""
        if a is None or b is None or not choice.dequantizes_a or role.startswith("wgrad"):
            return False
        plain = a.format.scale == "e4m3" and not (a.format.square or a.stochastic or a.hadamard)
        return plain and not self._merged(role, a)

    def _merged(self, role: str, use: Use) -> bool:
        """Whether the same kernel writes the other direction for a later product, or wrote this one for an earlier."""
        pairs = _OTHER_DIRECTION | {first: later for later, first in _OTHER_DIRECTION.items()}
        other = pairs.get(role)
        return other is not None and other.split("_")[0] in self.products and use.merges_with(self.uses.get(other))

    def _quantise(
        self, role: str, use: Use, lines: Any, contraction: Any, native: bool, in_16_bits: bool
    ) -> list[Step]:  # fmt: skip
        """The kernels that quantise an operand [lines, contraction] in this product; none where another one did."""
        if role == "fprop_w" and self.packed:
            return []
        merged = self._merged(role, use)
        if merged and role in _OTHER_DIRECTION:
            return []
        hadamard = use.hadamard
        written = _BF16 * lines * contraction if in_16_bits else _stored(use.format, lines, contraction, native)
        if merged:
            later = {first: later for later, first in _OTHER_DIRECTION.items()}[role]
            hadamard = self.uses[later].hadamard
            written += _stored(use.format, contraction, lines, native)
        along = _BOTH_WAYS if merged else _ROWS if role in ("fprop_x", "fprop_w", "dgrad_dy") else _COLUMN
        return [_quantise_step(role, self.name, use, hadamard, lines * contraction, written, along, self.gpu)]

    def _multiply(
        self, kernel: _Kernel, rows: Any, columns: Any, contraction: Any, operands: Any, rate: float, name: str
    ) -> Step:
        return Step(name, self.name, 2 * rows * columns * contraction, operands + _BF16 * rows * columns, rate,
                    self.gpu.copy_rate * kernel.memory, self.gpu.product_launch * kernel.launch)  # fmt: skip

    def _rate(self, a: Use | None, b: Use | None, choice: Choice, kernel: _Kernel) -> float:
        """FLOP/s: of the codes' matrix units in the native tier, of bf16 in the emulated one."""
        peak, share = self.gpu.bf16, self.gpu.bf16_share
        if choice.tier == "native" and a is not None and b is not None:
            fp4 = a.format.packed and b.format.packed
            native, reached = (self.gpu.fp4, self.gpu.fp4_share) if fp4 else (self.gpu.fp8, self.gpu.fp8_share)
            if native is None:
                raise ValueError(f"gpu: {self.gpu.name} has no rate of {'FP4' if fp4 else 'FP8'} products, and "
                                 f"{choice.kernel} multiplies such operands there")  # fmt: skip
            peak, share = native, reached
        return peak * (share if kernel.matrix is None else min(kernel.matrix, share))

    def _pass(self, name: str, moved: Any, launches: int = 1) -> Step:
        """Kernels that only move memory."""
        return Step(name, self.name, 0, moved, self.gpu.bf16, self.gpu.copy_rate, launches * self.gpu.launch)


def _quantise_step(
    role: str, product: str, use: Use, hadamard: bool, numel: Any, written: Any, along: str, gpu: Gpu
) -> Step:
    """Quantising numel elements. An outer scale that is computed takes an amax, which reads the operand once more; that
    of a row, along rows alone, stays inside the kernel."""
    outer = None if use.static else use.format.outer
    own_amax = outer == "tensor" or (outer == "row" and along != _ROWS)
    reads = 2 if own_amax else 1
    share = {_ROWS: 1.0, _COLUMN: _COLUMNS, _BOTH_WAYS: _BOTH}[along]
    if use.format.square:
        share = _SQUARE
    share *= (_HADAMARD if hadamard else 1.0) * (_STOCHASTIC if use.stochastic else 1.0)
    launches = reads + (_ROW_AMAX if outer == "row" and not own_amax else 0)
    return Step(f"quantise {role}, {along}", product, 0, reads * _BF16 * numel + written, gpu.bf16,
                gpu.copy_rate * share, launches * gpu.launch)  # fmt: skip


def quantise_seconds(
    use: Use, rows: Any, columns: Any, gpu: str | Gpu, *, along: str = _ROWS, native: bool = False
) -> Any:  # fmt: skip
    """Seconds of quantising a 16-bit matrix [rows, columns] along its "rows", its "columns", or "both" at once."""
    written = 0 if along == _COLUMN else _stored(use.format, rows, columns, native)
    if along != _ROWS:
        written += _stored(use.format, columns, rows, native)
    return _quantise_step("x", "fprop", use, use.hadamard, rows * columns, written, along, named(gpu)).seconds


@functools.lru_cache(maxsize=4096)
def _chosen(a: Use | None, b: Use | None, gpu: Gpu, dims: tuple[int, int, int]) -> tuple[Choice, Problem]:
    """The kernel for a product; with swizzled scales if that makes it a native one, as in `passes.plan`."""
    for native in (True, False):
        types = _operand_type(a, native), _operand_type(b, native)
        problem = Problem(*types, *dims, torch.bfloat16, gpu.target)
        choice = choose(problem)
        if choice.tier == "native":
            break
    return choice, problem


def _operand_type(use: Use | None, native: bool) -> OperandType:
    if use is None:
        return OperandType(None, torch.bfloat16)
    fmt = use.format
    return OperandType(fmt, fmt.data_dtype, scale_layout(fmt, native=native) == "swizzled", fmt.outer or "none")


def _rescaled_apart(choice: Choice, problem: Problem) -> bool:
    """Whether a pass over the product applies the outer scales: where a library product has no place for them."""
    outer = (problem.a.outer, problem.b.outer) != ("none", "none")
    return choice.kernel == "library_rescaled" or (choice.kernel == "dequant_operand" and outer)


def _stored(fmt: BlockFormat, lines: Any, length: Any, native: bool) -> Any:
    """Bytes of the codes and scales of `lines` lines of `length` elements; swizzled scales with their padding."""
    blocks = ceil_div(length, fmt.block_cols)
    codes = lines * blocks * fmt.block_cols / (2 if fmt.packed else 1)
    if fmt.scale is None:
        return codes + _FLOAT32 * lines
    if native:  # square blocks, too, have a scale a row there
        return codes + swizzled_numel(lines, blocks)
    return codes + ceil_div(lines, fmt.block[0] if fmt.block else 1) * blocks


def _size(name: str, value: Any) -> Any:
    """A size as an int or a sympy expression of symbols. Raises ValueError for anything else that no size is."""
    if isinstance(value, sympy.Expr) and value.free_symbols:
        return value
    whole = isinstance(value, int | sympy.Integer) and not isinstance(value, bool)
    if not whole or value <= 0:
        raise ValueError(f"{name}={value!r}: expected a positive whole number, or a sympy symbol")
    return int(value)


def _max(a: Any, b: Any) -> Any:
    if isinstance(a, sympy.Expr) or isinstance(b, sympy.Expr):
        return sympy.Max(a, b)
    return max(a, b)
