"""What the gate compiles: every way in which quantise kernels are launched, and products that every kernel serves.

One file, because it is one table, and the few functions that its entries call.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.epilogue import Epilogue
from fp4compile.formats.groups import padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.reference_scales import CANDIDATES
from fp4compile.hardware import Target
from fp4compile.templates import scale_sweep
from fp4compile.templates.gemm.choose import candidates, choose
from fp4compile.templates.gemm.dispatch import scaled_mm, scaled_mm_group
from fp4compile.templates.gemm.problem import problem_of
from fp4compile.templates.grouped import dispatch as experts
from fp4compile.templates.grouped.choose import choose as choose_grouped
from fp4compile.templates.grouped.problem import problem_of as grouped_problem_of
from fp4compile.templates.launch import Launched, dry_run
from fp4compile.templates.quantize import dispatch as kernels

SIZE = 8192
GROUPS = 64
SWEEP_STEPS = 12  # scales that the sweep tries for a block of normal numbers
BF16 = torch.bfloat16


# ---------------------------------------------------------------- quantising


def quantize_rows(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize(x, fmt, layout=layout)


def quantize_columns(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize(x.mT, fmt, layout=layout)


def quantize_both(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize_both(x, fmt, layout=layout)


def quantize_seeded(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize(x, fmt, layout=layout, seed=_seed(x))


def quantize_transformed(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize(x.mT, fmt, layout=layout, transform=True)


def quantize_trained(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return kernels.quantize_both(x, fmt, layout=layout, seed=_seed(x), transform=True)


def sweep_scales(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return scale_sweep.quantize(x, fmt, None, layout, "mse")


def sweep_weighted_scales(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return scale_sweep.best_weighted_scales(x, torch.ones((), device=x.device), hessians(x))


def hessians(x: torch.Tensor) -> torch.Tensor:
    """One for each column of blocks: 1 / (1 + the distance of two elements)."""
    place = torch.arange(16, device=x.device)
    return (1.0 / (1.0 + (place[:, None] - place).abs())).repeat(ceil_div(x.shape[-1], 16), 1, 1)


def dequantize(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    # Of a meta tensor only the launch of the dequantise kernel is of interest.
    with dry_run(Target(0)) if x.is_meta else nullcontext():
        data, scales, outer = kernels.quantize(x, fmt)
    return kernels.dequantize(data, scales, outer, fmt, x.shape[-1], x.dtype)


def grouped(x: torch.Tensor, fmt: formats.BlockFormat, layout: str, dim: int, transform: bool = False) -> Any:
    return experts.quantize_grouped(x, _offs(x), fmt, dim, None, layout, seed=None, transform=transform)


def grouped_both(x: torch.Tensor, fmt: formats.BlockFormat, layout: str, trained: bool = False) -> Any:
    seed = _seed(x) if trained else None
    return experts.quantize_grouped_both(x, _offs(x), fmt, None, layout, seed=seed, transform=trained)


def matrices(x: torch.Tensor, fmt: formats.BlockFormat, layout: str, dim: int) -> Any:
    return experts.quantize_grouped(
        x.unflatten(0, (GROUPS, -1)), None, fmt, dim, None, layout, seed=None, transform=False
    )  # fmt: skip


def matrices_both(x: torch.Tensor, fmt: formats.BlockFormat, layout: str) -> Any:
    return experts.quantize_grouped_both(
        x.unflatten(0, (GROUPS, -1)), None, fmt, None, layout, seed=None, transform=False
    )  # fmt: skip


def after_steps(
    x: torch.Tensor, fmt: formats.BlockFormat, layout: str, steps: tuple[str, ...], stored: tuple[str, ...] = ()
) -> Any:
    """Rows of what the steps of a prologue make of x and of other operands, which stand for any; stored: as the op."""
    prologue = Prologue.parse(steps, x.dtype, stored).as_walked()
    others = [x.new_ones(prologue.shape_of(i, x.shape), dtype=torch.float32 if kind == "col" else x.dtype)
              for i, kind in sorted(prologue.kinds.items()) if i]  # fmt: skip
    shapes = prologue.stored_shapes(x.shape)
    written = [x.new_empty(shape, dtype=dtype) for shape, (_, dtype) in zip(shapes, prologue.stored, strict=True)]
    reading = kernels.Reading(prologue, tuple(others), stored=tuple(written))
    return kernels.quantize(x, fmt, layout=layout, reading=reading)


def after_gradients(x: torch.Tensor, fmt: formats.BlockFormat, layout: str, trained: bool = False) -> Any:
    """Both gradients of the inputs of a gate, of which x is the gradient, in both directions."""
    prologue = Prologue.parse(GRADIENTS, x.dtype, (), GRADIENT_RESULTS)
    reading = kernels.Reading(prologue, (torch.ones_like(x), torch.ones_like(x)), first=x)
    seed = torch.zeros(2, dtype=torch.int64, device=x.device) if trained else None
    both = x.expand(2, *x.shape)
    return kernels.quantize_both(both, fmt, layout=layout, seed=seed, transform=trained, reading=reading)


def of_halves(x: torch.Tensor, fmt: formats.BlockFormat, layout: str, op: str, given: bool = False) -> Any:
    """A gate whose two tensors are the halves of the columns of one that is twice as wide.

    given: whether there is an outer scale.
    """
    gate, up = x.new_empty(x.shape[0], 2 * x.shape[1]).chunk(2, -1)
    reading = kernels.Reading(Prologue.parse(GATE, x.dtype), (up,))
    outer = x.new_ones((), dtype=torch.float32) if given else None
    return getattr(kernels, op)(gate, fmt, outer, layout=layout, reading=reading)


def of_experts(
    x: torch.Tensor, fmt: formats.BlockFormat, layout: str, steps: tuple[str, ...], both: bool = False, dim: int = -1
) -> Any:
    """The same, of the rows of experts."""
    gate, up = x.new_empty(x.shape[0], 2 * x.shape[1]).chunk(2, -1)
    options: dict[str, Any] = {"seed": None, "transform": False}
    options["reading"] = kernels.Reading(Prologue.parse(steps, x.dtype), (up,))
    if both:
        return experts.quantize_grouped_both(gate, _offs(x), fmt, None, layout, **options)
    return experts.quantize_grouped(gate, _offs(x), fmt, dim, None, layout, **options)


def _offs(x: torch.Tensor) -> torch.Tensor:
    """Offsets of any groups: of meta tensors nobody reads them."""
    return torch.empty(GROUPS, dtype=torch.int32, device=x.device)


def _seed(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=x.device)


@dataclass(frozen=True)
class Configuration:
    """One way to call the quantise kernels.

    call: takes a tensor, a format and the layout of the scales. shape, dtype: of the tensor. layout: of the block
    scales; None stands for the one that the products of the GPU read.
    """

    label: str
    format: str
    call: Callable[[torch.Tensor, formats.BlockFormat, str], Any]
    shape: tuple[int, int] = (SIZE, SIZE)
    dtype: torch.dtype = BF16
    layout: str | None = None

    def launches(self, sm: int) -> list[Launched]:
        with dry_run(Target(sm)) as launches:
            self.call(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.block_format, self.layout_on(sm))
        return launches

    @property
    def block_format(self) -> formats.BlockFormat:
        return formats.get(self.format)

    def layout_on(self, sm: int) -> str:
        if self.layout is not None:
            return self.layout
        read = Target(sm).block_scaled_matrix_units and self.block_format.block is not None
        return "swizzled" if read else "linear"

    def trips(self, launched: Launched) -> int:
        """Steps of each loop of a kernel.

        Only rows that do not fit the registers of a program are walked in steps. The scale sweep tries scales in steps.
        """
        if launched.kernel.__name__ == "sweep_weighted_scales":
            return CANDIDATES
        if "DOUBLE_WINS" in launched.constants:
            return SWEEP_STEPS
        if launched.constants.get("ON_CHIP", 1):
            return 1
        return ceil_div(self.shape[1], launched.constants["BLOCKS"] * self.block_format.block_cols)

    def idle_programs(self, launched: Launched) -> int:
        """Programs that have no row to quantise where all groups have the same number of rows.

        As many are launched as any groups can need: a tile more for each group than rows fill.
        """
        constants = launched.constants
        groups = constants.get("GROUPS", 0)
        if not groups:
            return 0
        tile = constants["ROWS"] if "ROWS" in constants else constants["ROW_TILES"] * constants["BLOCK"]
        tiles = self.shape[0] // tile + groups
        return launched.grid * (tiles - groups * ceil_div(ceil_div(self.shape[0], groups), tile)) // tiles


CONFIGURATIONS = (
    *(Configuration("rows", name, quantize_rows) for name in ("nvfp4_one_level", "nvfp4", "nvfp4_te")),
    *(Configuration("rows", name, quantize_rows) for name in ("mxfp8", "mxfp8_e5m2", "mxfp4")),
    Configuration("rows, float32", "nvfp4_one_level", quantize_rows, dtype=torch.float32),
    Configuration("rows, float16", "nvfp4_one_level", quantize_rows, dtype=torch.float16),
    *(Configuration("rows, swizzled", name, quantize_rows, layout="swizzled") for name in ("nvfp4_one_level", "mxfp8")),
    *(Configuration("rows, linear", name, quantize_rows, layout="linear") for name in ("nvfp4", "mxfp8")),
    Configuration("rows, linear", "nvfp4_one_level", quantize_rows, layout="linear"),
    *(Configuration("scaled rows", name, quantize_rows) for name in ("nvfp4_rowwise", "float8_rowwise")),
    Configuration("scaled rows, long", "nvfp4_rowwise", quantize_rows, shape=(SIZE, 2**16)),
    *(Configuration("columns", name, quantize_columns) for name in ("nvfp4_one_level", "nvfp4", "mxfp8", "mxfp4")),
    *(Configuration("scaled columns", name, quantize_columns) for name in ("nvfp4_rowwise", "float8_rowwise")),
    *(Configuration("stochastic rows", name, quantize_seeded) for name in ("nvfp4_te", "nvfp4_rowwise")),
    Configuration("transformed columns", "nvfp4_te", quantize_transformed),
    Configuration("both, transform, seed", "nvfp4_te", quantize_trained),
    *(Configuration("square", name, quantize_rows) for name in ("nvfp4_16x16", "mxfp8_32x32")),
    *(Configuration("both", name, quantize_both) for name in ("nvfp4_one_level", "nvfp4", "nvfp4_te", "nvfp4_16x16")),
    *(Configuration("both", name, quantize_both) for name in ("mxfp8", "mxfp8_32x32", "mxfp4", "float8_rowwise")),
    *(Configuration("dequantize", name, dequantize) for name in ("nvfp4", "mxfp8")),
    Configuration("scale sweep", "nvfp4", sweep_scales),
    Configuration("weighted scale sweep", "nvfp4", sweep_weighted_scales),
)  # fmt: skip

# Experts: those launches that differ from the above. Their values are checked in `check.run_experts`.
_rows, _columns = partial(grouped, dim=-1), partial(grouped, dim=-2)
GROUPED_CONFIGURATIONS = (
    *(Configuration("grouped rows", name, _rows) for name in ("nvfp4", "nvfp4_te", "nvfp4_rowwise", "mxfp8", "mxfp4")),
    Configuration("grouped rows, few", "nvfp4", _rows, shape=(512, SIZE), layout="linear"),
    *(Configuration("grouped columns", name, _columns) for name in ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4")),
    Configuration("grouped columns", "float8_rowwise", _columns),
    Configuration("grouped columns, transform", "nvfp4_te", partial(_columns, transform=True)),
    *(Configuration("grouped both", name, grouped_both) for name in ("nvfp4", "nvfp4_rowwise", "mxfp8", "mxfp4")),
    Configuration("grouped both", "float8_rowwise", grouped_both),
    Configuration("grouped both, transform, seed", "nvfp4_te", partial(grouped_both, trained=True)),
    *(Configuration("matrices", name, partial(matrices, dim=-1)) for name in ("nvfp4", "nvfp4_16x16")),
    Configuration("matrices, columns", "nvfp4", partial(matrices, dim=-2)),
    Configuration("matrices, both", "nvfp4_16x16", matrices_both),
)  # fmt: skip


# With a prologue: silu(x) * y, the end of a norm, whose statistics are there, and norms. Their values are checked in
# `check.run_prologues`.
GATE = ("neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1")
RELU = ("relu aux0", "mul s0 aux1")
NORM = ("mul aux0 col1", "mul s0 row2")
RMS_NORM = ("square aux0", "mean s0", "add s1 1e-05", "rsqrt s2", "mul aux0 s3", "mul row1 s4")
SUM_NORM = ("add aux0 aux1", "square s0", "mean s1", "add s2 1e-05", "rsqrt s3", "mul s0 s4", "mul row2 s5")
KEPT = ("s0 bfloat16", "s4 float32")
LAYER_NORM = ("mean aux0", "variance aux0 s0", "add s1 1e-05", "rsqrt s2", "sub aux0 s0", "mul s4 s3", "mul s5 row1",
               "add s6 row2")  # fmt: skip
# The gradients of y and of x in silu(x) * y, as AOTAutograd has them: of the product's gradient, x and y.
GRADIENTS = ("neg aux1", "exp s0", "add s1 1.0", "div aux1 s2", "mul aux0 s3", "mul aux0 aux2", "sigmoid aux1",
              "mul s5 s6", "sub 1.0 s6", "mul aux1 s8", "add s9 1.0", "mul s7 s10")  # fmt: skip
GRADIENT_RESULTS = (4, 11)
PROLOGUE_CONFIGURATIONS = (
    *(Configuration("gradients of a gate", name, after_gradients) for name in ("mxfp8", "nvfp4")),
    Configuration("gradients of a gate, transform, seed", "nvfp4_te", partial(after_gradients, trained=True)),
    Configuration("rows of a gate", "nvfp4_one_level", partial(after_steps, steps=GATE)),
    Configuration("rows of halves", "nvfp4_one_level", partial(of_halves, op="quantize")),
    Configuration("rows of halves", "mxfp8", partial(of_halves, op="quantize")),
    Configuration("both of halves", "mxfp8", partial(of_halves, op="quantize_both")),
    Configuration("both of halves, given", "nvfp4", partial(of_halves, op="quantize_both", given=True)),
    *(Configuration("rows of experts' halves", name, partial(of_experts, steps=GATE)) for name in ("nvfp4", "mxfp8")),
    Configuration("columns of experts' halves", "mxfp8", partial(of_experts, steps=GATE, dim=-2)),
    Configuration("both of experts' halves", "mxfp8", partial(of_experts, steps=RELU, both=True)),
    Configuration("both of experts' halves", "nvfp4", partial(of_experts, steps=RELU, both=True)),
    Configuration("rows of a norm", "nvfp4", partial(after_steps, steps=NORM)),
    # Statistics included: of a Llama block, without and with the residual stream; of rows that are walked.
    *(
        Configuration("a norm", name, partial(after_steps, steps=RMS_NORM), shape=(SIZE, 4096))
        for name in ("nvfp4_one_level", "nvfp4_rowwise", "nvfp4", "mxfp8", "float8_rowwise")
    ),
    *(
        Configuration("a norm of a sum", name, partial(after_steps, steps=SUM_NORM, stored=KEPT), shape=(SIZE, 4096))
        for name in ("nvfp4_one_level", "nvfp4_rowwise", "nvfp4", "mxfp8", "float8_rowwise")
    ),
    Configuration("a layer norm", "nvfp4_rowwise", partial(after_steps, steps=LAYER_NORM)),
    # In five tiles.
    Configuration("a norm of 5120", "nvfp4_one_level", partial(after_steps, steps=RMS_NORM), shape=(SIZE, 5120)),
    Configuration("a norm of long rows", "nvfp4_rowwise", partial(after_steps, steps=LAYER_NORM), shape=(SIZE, 2**16)),
)


# ---------------------------------------------------------------- products


@dataclass(frozen=True)
class Product:
    """A product of [batches, m, k] activations by n x k weights, with bf16 results.

    a: format of the activations; None keeps them in bf16. b: format of the weights. epilogue: "" for none, "bias", or
    "gated": silu(product) * another matrix. weights: how many are multiplied by the same activations, in one launch.
    """

    a: str | None
    b: str
    m: int = 512
    n: int = SIZE
    k: int = SIZE
    epilogue: str = ""
    weights: int = 1
    batches: int = 1

    @property
    def label(self) -> str:
        sizes = "x".join(str(size) for size in (self.batches, self.m, self.n, self.k)[self.batches == 1 :])
        return sizes + f", {self.epilogue}" * bool(self.epilogue) + f", {self.weights} weights" * (self.weights > 1)

    @property
    def formats(self) -> str:
        return f"{self.a or 'bf16'} x {self.b}"

    def launches(self, sm: int) -> tuple[str, list[Launched]]:
        """(tier, launches): by the kernel that is chosen or, where a library is, by the best one of this package.

        None are launched where nothing but a library computes the product, or nothing does with the epilogue.
        """
        target = Target(sm)
        a, b = (_operand(name, (self.batches, rows, self.k)) for name, rows in ((self.a, self.m), (self.b, self.n)))
        bias = torch.empty(self.n, dtype=BF16, device="meta") if self.epilogue == "bias" else None
        epilogue, gate = None, []
        if self.epilogue == "gated":
            epilogue = Epilogue.parse(GATED, BF16, BF16)
            gate = [torch.empty(self.batches, self.m, self.n, dtype=BF16, device="meta")]
        problem = problem_of(a, b, bias, BF16, target, epilogue is not None)
        for name in (None, *candidates(problem)):
            choice = choose(problem, name)
            if epilogue is not None and not choice.takes_epilogue:
                continue
            with dry_run(target) as launches:
                if self.weights > 1:
                    scaled_mm_group(a, [(b, bias)] * self.weights, BF16)
                else:
                    scaled_mm(a, b, bias, BF16, epilogue, gate, choice)
            if launches:
                return choice.tier, launches
        return "", []


@dataclass(frozen=True)
class GroupedProduct(Product):
    """A grouped product with bf16 results: m x k activations by n x k weights of each group.

    along_k: groups lie along the contraction: [m, k] x [n, k], of each group's part of k.
    """

    groups: int = 64
    along_k: bool = False

    @property
    def label(self) -> str:
        return f"{super().label}, {self.groups} groups" + " along K" * self.along_k

    def launches(self, sm: int) -> tuple[str, list[Launched]]:
        """(tier, launches) of the native kernel, none where another one serves; of the emulated one if A is plain."""
        a, b, offs = self.operands()
        rows = self.k if self.along_k else self.m
        tier = choose_grouped(grouped_problem_of(a, b, offs, rows, BF16, Target(sm))).tier
        if tier != "native" and self.a is not None:
            return "", []
        with dry_run(Target(sm)) as launches:
            experts.scaled_grouped_mm(a, b, offs, rows, BF16)
        return tier, launches

    def operands(self) -> tuple[Operand, Operand, torch.Tensor]:
        """(A, B, offsets) of meta tensors, with swizzled scales; see `reference_grouped` for their shapes."""
        each: tuple[int, ...] = (self.groups,)
        offs = torch.empty(each, dtype=torch.int32, device="meta")
        if self.along_k:
            a, b = (
                self._operand(name, (), rows, rows, (*each, rows, 1))
                for name, rows in ((self.a, self.m), (self.b, self.n))
            )
            return a, b, offs
        a = self._operand(self.a, (), self.m, padded_rows(self.m, self.groups), (self.m, 1))
        return a, self._operand(self.b, each, self.n, self.n, (*each, self.n, 1)), offs

    def _operand(
        self, name: str | None, batch: tuple[int, ...], rows: int, scale_rows: int, row_outer: tuple[int, ...]
    ) -> Operand:
        """batch: of matrices. scale_rows: rows of the scales. row_outer: shape of outer scales that belong to rows."""
        if name is None:
            return Operand(torch.empty((*batch, rows, self.k), dtype=BF16, device="meta"))
        fmt = formats.get(name)
        k = padded_rows(self.k, self.groups) if self.along_k else self.k
        blocks = ceil_div(k, fmt.block_cols)
        codes = blocks * fmt.block_cols // (2 if fmt.packed else 1)
        data = torch.empty((*batch, rows, codes), dtype=fmt.data_dtype, device="meta")
        scales = torch.empty((*batch, swizzled_numel(scale_rows, blocks)), dtype=fmt.scale_dtype, device="meta")
        shape = {"tensor": (self.groups,), "row": row_outer}.get(fmt.outer or "")
        outer = None if shape is None else torch.empty(shape, dtype=torch.float32, device="meta")
        return Operand(data, scales, outer, fmt)


def multiplies(launched: Launched) -> bool:
    """Whether a launch of a product is the product itself; others dequantise operands or add partial sums."""
    return launched.kernel.__name__.startswith("gem")


GATED = ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]


def _operand(name: str | None, shape: tuple[int, ...]) -> Operand:
    """An operand of meta tensors, with swizzled scales."""
    x = torch.empty(shape[1:] if shape[0] == 1 else shape, dtype=BF16, device="meta")
    if name is None:
        return Operand(x)
    with dry_run(Target(0)):  # only the product is of interest
        return Operand(*kernels.quantize(x, formats.get(name), layout="swizzled"), formats.get(name))


PRODUCTS = (
    *(Product(name, name) for name in ("nvfp4", "nvfp4_one_level", "mxfp8", "mxfp4")),
    Product("nvfp4_rowwise", "nvfp4_te"), Product("mxfp8", "mxfp8_32x32"), Product("mxfp8_e5m2", "mxfp8"),
    Product("mxfp8", "mxfp4"), Product("nvfp4", "nvfp4", batches=4), Product("nvfp4", "nvfp4", epilogue="bias"),
    *(Product(name, name, epilogue="gated") for name in ("nvfp4", "mxfp8", "mxfp4")),
    # Rows of results of 8 elements, of 2, of 1; rows of codes that are not whole 16 bytes.
    Product("nvfp4", "nvfp4", n=SIZE - 8), Product("mxfp8", "mxfp8", n=SIZE - 8), Product("mxfp4", "mxfp4", n=SIZE - 8),
    Product("mxfp8", "mxfp8", n=SIZE - 2), Product("nvfp4", "nvfp4", n=SIZE - 1),
    Product("nvfp4", "nvfp4", k=SIZE - 16),
    # Few tokens.
    *(Product("nvfp4", "nvfp4", m) for m in (1, 8, 16, 64)), Product("nvfp4", "nvfp4", 32, 4 * SIZE),
    *(Product(name, name, 16) for name in ("nvfp4_one_level", "mxfp8", "mxfp4")),
    Product("nvfp4_rowwise", "nvfp4_te", 16), Product("nvfp4", "nvfp4", 16, epilogue="gated"),
    *(Product(None, "nvfp4", m) for m in (1, 16, 64)),
    Product(None, "nvfp4", 1, 1024), Product(None, "nvfp4", 1, 4096), Product(None, "nvfp4", 1, k=28672),
    Product("nvfp4", "nvfp4", 1, 2560, weights=3), Product(None, "nvfp4", 1, 14336, 4096, weights=2),
    Product(None, "nvfp4", 1, weights=2), Product(None, "nvfp4", 2, 14336, 28672, weights=2),
    Product(None, "nvfp4", 4, 14336, 4096, weights=2), Product(None, "nvfp4", 8, weights=3),
    # Experts: forward and dgrad, with few tokens too, then wgrad; rows of results of 8 elements and of 1.
    GroupedProduct("nvfp4_rowwise", "nvfp4_te", SIZE, 2048, 4096), GroupedProduct("mxfp8", "mxfp4", SIZE, 2048, 4096),
    *(GroupedProduct(name, name, SIZE, 2048, 4096) for name in ("mxfp8", "mxfp4", "nvfp4")),
    GroupedProduct("nvfp4", "nvfp4", 128, 2040, 4096),
    GroupedProduct("nvfp4_rowwise", "nvfp4_rowwise", 2048, 4095, SIZE, along_k=True),
    *(GroupedProduct(name, name, 2048, 4096, SIZE, along_k=True) for name in ("nvfp4_te", "mxfp8", "mxfp4")),
    GroupedProduct("nvfp4", "nvfp4", 256, 512, SIZE, along_k=True),
    # The same, dequantised.
    GroupedProduct(None, "nvfp4", SIZE, 2048, 4096), GroupedProduct(None, "mxfp8", 2048, 4096, SIZE, along_k=True),
)  # fmt: skip
