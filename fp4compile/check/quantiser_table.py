"""The table of launches of quantise kernels: `check-sm100` compiles them, or runs them on a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import COLUMNS, ROWS
from fp4compile.hardware import Target
from fp4compile.ops.functional import quantize
from fp4compile.ops.quantize import DEQUANTIZE, LAY_OUT_SCALES, QUANTIZE, dequantize_kernels, quantize_kernels
from fp4compile.templates.launch import Launch, dry_run
from fp4compile.templates.quantize.lay_out import lay_out

SIZE = 8192
GROUPS = 64
SWEEP_STEPS = 12  # number of scales that the sweep tries for a block of normal numbers
BF16 = torch.bfloat16
BOTH = (ROWS, COLUMNS)

# Steps of prologues: silu(x) * y, the end of a norm with stored statistics, and norms.
GATE = ("neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1")
NORM = ("mul aux0 col1", "mul s0 row2")
RMS_NORM = ("square aux0", "mean s0", "add s1 1e-05", "rsqrt s2", "mul aux0 s3", "mul row1 s4")
SUM_NORM = ("add aux0 aux1", "square s0", "mean s1", "add s2 1e-05", "rsqrt s3", "mul s0 s4", "mul row2 s5")
KEPT = ("s0 bfloat16", "s4 float32")
LAYER_NORM = ("mean aux0", "variance aux0 s0", "add s1 1e-05", "rsqrt s2", "sub aux0 s0", "mul s4 s3", "mul s5 row1",
               "add s6 row2")  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """One call of the op `quantize`, or of another op on its rowwise results: `dequantizes`, `lays_out`.

    format, dim, hadamard, scale_rule, values: arguments of the op. layout: layout of the block scales; None takes the
    layout that products on the GPU read. seeded, static: whether there is a seed, and a static outer scale.
    groups: "rows" where offsets cut the tensor, "matrices" for matrices with separate outer scales, or "".
    steps, stored: arguments of the prologue. halves: whether its first two operands are halves of one tensor's columns.
    shape, dtype: the tensor's shape and dtype.
    """

    label: str
    format: str
    dim: tuple[int, ...] = (ROWS,)
    shape: tuple[int, int] = (SIZE, SIZE)
    dtype: torch.dtype = BF16
    layout: str | None = None
    hadamard: bool = False
    seeded: bool = False
    static: bool = False
    scale_rule: str = "amax"
    values: tuple[int, ...] = ()
    groups: str = ""
    steps: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    halves: bool = False
    dequantizes: bool = False
    lays_out: bool = False

    def call(self, x: torch.Tensor, layout: str) -> Any:
        """What the op returns of a tensor: by the kernels on a GPU, by the reference on a CPU."""
        return self._computed(x, layout, QUANTIZE, DEQUANTIZE, LAY_OUT_SCALES)

    def call_kernels(self, x: torch.Tensor, layout: str) -> Any:
        """What the kernels return of a tensor, also of one on the CPU where Triton interprets."""
        return self._computed(x, layout, quantize_kernels, dequantize_kernels, lay_out)

    def launches(self, sm: int) -> list[Launch]:
        """The launches on a GPU of that compute capability, which need not be there."""
        with dry_run(Target(sm)) as launches:
            self.call_kernels(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.layout_on(sm))
        return launches

    def _computed(
        self, x: torch.Tensor, layout: str, quantises: Callable, dequantises: Callable, lays_out: Callable
    ) -> Any:
        """What one of three functions returns, which take the arguments of the ops that they are named after."""
        if self.dequantizes:
            found = quantize(x, self.format)
            return dequantises(found.data, found.scales, found.outer, self.format, x.shape[-1], x.dtype)
        x, options = self._arguments(x, layout)
        if self.lays_out:
            return lays_out(quantize(x, self.format).scales, options.get("offs"))
        return quantises(x, self.format, list(self.dim), **options)

    def _arguments(self, x: torch.Tensor, layout: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """(the tensor as the op reads it, the options of the call)."""
        options: dict[str, Any] = {"layout": layout, "hadamard": self.hadamard, "scale_rule": self.scale_rule}
        options["values"] = list(self.values)
        if self.seeded:
            options["seed"] = torch.zeros((), dtype=torch.int64, device=x.device)
        if self.static:
            options["outer"] = torch.ones((), dtype=torch.float32, device=x.device)
        if self.groups == "rows":
            ends = [(i + 1) * x.shape[0] // GROUPS for i in range(GROUPS)]
            options["offs"] = torch.tensor(ends, dtype=torch.int32, device=x.device)
        elif self.groups:
            x, options["each_matrix"] = x.unflatten(0, (GROUPS, -1)), True
        if self.steps:
            prologue = Prologue.parse(self.steps, x.dtype, self.stored).as_walked()
            options |= {"prologue": prologue.strings(), "stored": prologue.stored_strings(), "dtype": x.dtype}
            x, options["operands"] = self._operands(prologue, x)
        return x, options

    def _operands(self, prologue: Prologue, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The first operand of the prologue, and its other operands: halves of one tensor, or tensors of ones."""
        if self.halves:
            first, second = torch.cat((x, x), -1).chunk(2, -1)
            return first, [second]
        return x, [
            x.new_ones(prologue.shape_of(i, x.shape), dtype=torch.float32 if kind == "col" else x.dtype)
            for i, kind in sorted(prologue.kinds.items())
            if i
        ]

    @property
    def block_format(self) -> formats.BlockFormat:
        return formats.get(self.format)

    def layout_on(self, sm: int) -> str:
        """The layout of the block scales on a GPU of compute capability `sm`: linear where there are values."""
        if self.layout is not None:
            return self.layout
        if self.values:
            return "linear"
        read = Target(sm).block_scaled_matrix_units and self.block_format.block is not None
        return "swizzled" if read else "linear"

    def trips(self, launched: Launch) -> int:
        """The steps of each loop of a kernel. Only the scale sweep has one: it tries scales."""
        return SWEEP_STEPS if "DOUBLE_WINS" in launched.constants else 1

    def idle_programs(self, launched: Launch) -> int:
        """The number of programs without a row to quantise, where all groups have the same number of rows.

        The launch has enough programs for any group sizes: for each group, one tile more than its rows fill.
        """
        constants = launched.constants
        groups = constants.get("GROUPS", 0)
        if not groups:
            return 0
        tile = constants["ROWS"] if "ROWS" in constants else constants["ROW_TILES"] * constants["BLOCK"]
        tiles = self.shape[0] // tile + groups
        return launched.grid * (tiles - groups * ceil_div(ceil_div(self.shape[0], groups), tile)) // tiles


def _table(label: str, names: str, **options: Any) -> tuple[Configuration, ...]:
    """One configuration for each format."""
    return tuple(Configuration(label, name, **options) for name in names.split())


CONFIGURATIONS = (
    *_table("rows", "nvfp4_one_level nvfp4 nvfp4_te mxfp8 mxfp8_e5m2 mxfp4"),
    *_table("rows, float32", "nvfp4_one_level", dtype=torch.float32),
    *_table("rows, float16", "nvfp4_one_level", dtype=torch.float16),
    *_table("rows, swizzled", "nvfp4_one_level mxfp8", layout="swizzled"),
    *_table("rows, linear", "nvfp4 mxfp8 nvfp4_one_level", layout="linear"),
    *_table("scaled rows", "nvfp4_rowwise float8_rowwise"),
    *_table("scaled rows, long", "nvfp4_rowwise", shape=(SIZE, 2**16)),
    *_table("columns", "nvfp4_one_level nvfp4 mxfp8 mxfp4", dim=(COLUMNS,)),
    *_table("scaled columns", "nvfp4_rowwise float8_rowwise", dim=(COLUMNS,)),
    *_table("stochastic rows", "nvfp4_te nvfp4_rowwise", seeded=True),
    *_table("transformed columns", "nvfp4_te", dim=(COLUMNS,), hadamard=True),
    *_table("both, transform, seed", "nvfp4_te", dim=BOTH, hadamard=True, seeded=True),
    *_table("square", "nvfp4_16x16 mxfp8_32x32"),
    *_table(
        "both", "nvfp4_one_level nvfp4 nvfp4_te nvfp4_16x16 mxfp8 mxfp8_32x32 mxfp4 float8_rowwise", dim=BOTH
    ),
    *_table("dequantize", "nvfp4 mxfp8", dequantizes=True),
    *_table("lay out", "mxfp8", lays_out=True),
    *_table("lay out, groups", "mxfp8", lays_out=True, groups="rows"),
    *_table("scale sweep", "nvfp4", scale_rule="mse"),
)  # fmt: skip

# Experts: the launches that differ from the launches above.
GROUPED_CONFIGURATIONS = (
    *_table("grouped rows", "nvfp4 nvfp4_te nvfp4_rowwise mxfp8 mxfp4", groups="rows"),
    *_table("grouped rows, few", "nvfp4", groups="rows", shape=(512, SIZE), layout="linear"),
    *_table("grouped columns", "nvfp4 nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", groups="rows", dim=(COLUMNS,)),
    *_table("grouped columns, transform", "nvfp4_te", groups="rows", dim=(COLUMNS,), hadamard=True),
    *_table("grouped both", "nvfp4 nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", groups="rows", dim=BOTH),
    *_table("grouped both, transform, seed", "nvfp4_te", groups="rows", dim=BOTH, hadamard=True, seeded=True),
    *_table("matrices", "nvfp4 nvfp4_16x16", groups="matrices"),
    *_table("matrices, columns", "nvfp4", groups="matrices", dim=(COLUMNS,)),
    *_table("matrices, both", "nvfp4_16x16", groups="matrices", dim=BOTH),
)  # fmt: skip

_LLAMA = {"shape": (SIZE, 4096)}  # a Llama block, without and with the residual stream
PROLOGUE_CONFIGURATIONS = (
    *_table("rows of a gate", "nvfp4_one_level", steps=GATE),
    *_table("rows of halves", "nvfp4_one_level mxfp8", steps=GATE, halves=True),
    *_table("both of halves", "mxfp8", dim=BOTH, steps=GATE, halves=True),
    *_table("rows of experts' halves", "nvfp4_one_level mxfp8", groups="rows", steps=GATE, halves=True),
    *_table("rows of experts' halves, given", "nvfp4", groups="rows", steps=GATE, halves=True, static=True),
    *_table("rows of a norm", "nvfp4", steps=NORM),
    *_table("a norm", "nvfp4_one_level nvfp4_rowwise nvfp4 mxfp8 float8_rowwise", steps=RMS_NORM, **_LLAMA),
    *_table(
        "a norm of a sum", "nvfp4_one_level nvfp4_rowwise nvfp4 mxfp8 float8_rowwise",
        steps=SUM_NORM, stored=KEPT, **_LLAMA,
    ),
    *_table("a layer norm", "nvfp4_rowwise", steps=LAYER_NORM),
    # In five tiles.
    *_table("a norm of 5120", "nvfp4_one_level", steps=RMS_NORM, shape=(SIZE, 5120)),
)  # fmt: skip

# What else runs on a GPU: other formats, whose launches need no place in the table.
MORE_CONFIGURATIONS = (
    *_table("grouped both", "nvfp4_one_level mxfp8_e5m2", groups="rows", dim=BOTH),
    *_table("rows of a gate", "nvfp4 nvfp4_te nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", steps=GATE),
    *_table("rows of a norm", "nvfp4_one_level nvfp4_te nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", steps=NORM),
    *_table("a norm of the row", "nvfp4_te mxfp4", steps=RMS_NORM),
    *_table("a layer norm", "nvfp4_one_level nvfp4 mxfp8 float8_rowwise", steps=LAYER_NORM),
    *_table("both of a gate", "nvfp4_one_level mxfp8 mxfp4", dim=BOTH, steps=GATE),
    *_table("both of a norm", "nvfp4_one_level mxfp8 mxfp4", dim=BOTH, steps=NORM),
    *_table("both as values", "nvfp4_one_level mxfp8 mxfp4", dim=BOTH, values=BOTH),
    *_table("both, rows as values", "nvfp4_one_level mxfp8", dim=BOTH, values=(ROWS,)),
    *_table("values of a gate", "nvfp4_one_level nvfp4 mxfp8", steps=GATE, values=(ROWS,)),
    *_table("values of a norm", "nvfp4_one_level nvfp4 mxfp8", steps=RMS_NORM, values=(ROWS,)),
)  # fmt: skip

ALL_CONFIGURATIONS = (*CONFIGURATIONS, *GROUPED_CONFIGURATIONS, *PROLOGUE_CONFIGURATIONS)
