"""The quantisers that `check-sm100` compiles and runs: their table, and the checks of their results.

A kernel must return the reference's codes and scales bit for bit. SM100 rounds stochastically by an instruction with
its own random bits: on a GPU, its codes are compared with the two neighbours of a value, and their mean with the value.
After a norm or a gate, the order of a row's sum and the last bit of `exp` depend on the kernel. So one launch stores
the tensor that it quantises, which must equal float64 within the rounding to bfloat16, and the reference quantises it.
A launch that stores nothing must return the reference's codes and scales of that tensor.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp4compile.check.comparison import (
    BF16,
    ENDS,
    GROUP_ROWS,
    SEED,
    Results,
    Runner,
    bit_differences,
    finite,
    not_finite,
    paired,
    same_bits,
)
from fp4compile.formats import formats, reference
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import COLUMNS, ROWS
from fp4compile.formats.steps import evaluate
from fp4compile.hardware import Target
from fp4compile.ops.functional import quantize
from fp4compile.ops.quantize import DEQUANTIZE, LAY_OUT_SCALES, QUANTIZE, dequantize_kernels, quantize_kernels
from fp4compile.templates.launch import Launch, dry_run
from fp4compile.templates.quantize.lay_out import lay_out

SIZE = 8192
GROUPS = 64
SWEEP_STEPS = 12  # number of scales that the sweep tries for a block of normal numbers
BOTH = (ROWS, COLUMNS)

# Steps of prologues: silu(x) * y, the end of a norm with stored statistics, and norms.
GATE = ("neg aux0", "exp s0", "add s1 1.0", "div aux0 s2", "mul s3 aux1")
OF_THREE = ("mul aux0 aux1", "relu s0", "sub 1.0 aux2", "mul s1 s2")
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
    layout that matmuls on the GPU read. seeded, static: whether there is a seed, and a static global or row scale.
    groups: "rows" where offsets cut the tensor, "matrices" for matrices with separate global scales, or "". ends: the
    offsets, or the rows of the matrices stacked; () for GROUPS equal parts.
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
    ends: tuple[int, ...] = ()
    steps: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    halves: bool = False
    dequantizes: bool = False
    lays_out: bool = False

    def call(self, x: torch.Tensor, layout: str) -> Any:
        """The op's results for a tensor: by the kernels on a GPU, by the reference on a CPU."""
        return self._computed(x, layout, QUANTIZE, DEQUANTIZE, LAY_OUT_SCALES)

    def call_kernels(self, x: torch.Tensor, layout: str) -> Any:
        """The kernels' results for a tensor, also for one on the CPU where Triton interprets."""
        return self._computed(x, layout, quantize_kernels, dequantize_kernels, lay_out)

    def launches(self, sm: int) -> list[Launch]:
        """The launches on a GPU, local or not, of compute capability `sm`."""
        with dry_run(Target(sm)) as launches:
            self.call_kernels(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.layout_on(sm))
        return launches

    def _computed(
        self, x: torch.Tensor, layout: str, quantises: Callable, dequantises: Callable, lays_out: Callable
    ) -> Any:
        """The result of one of three functions, which take the arguments of the ops that they are named after."""
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
            ends = self.ends or [(i + 1) * x.shape[0] // GROUPS for i in range(GROUPS)]
            options["offs"] = torch.tensor(ends, dtype=torch.int32, device=x.device)
        elif self.groups:
            x, options["each_matrix"] = x.unflatten(0, (len(self.ends) or GROUPS, -1)), True
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
        """The layout of the block scales on a GPU of compute capability `sm`: linear for dequantised values."""
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
    # A row that fills five eighths of its tile.
    *_table("a norm of 5120", "nvfp4_one_level", steps=RMS_NORM, shape=(SIZE, 5120)),
)  # fmt: skip

# Further checks on a GPU: other formats, whose launches need not be in the table.
MORE_CONFIGURATIONS = (
    *_table("rows", "float8_1x128 float8_128x128 float8_tensor"),
    *_table("columns", "float8_1x128 float8_tensor", dim=(COLUMNS,)),
    *_table("both", "float8_1x128 float8_128x128 float8_tensor", dim=BOTH),
    *_table("both, float32", "float8_1x128", dim=BOTH, dtype=torch.float32),
    *_table("grouped columns", "float8_1x128", groups="rows", dim=(COLUMNS,)),
    *_table("grouped both", "nvfp4_one_level mxfp8_e5m2", groups="rows", dim=BOTH),
    *_table("rows of a gate", "nvfp4 nvfp4_te nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", steps=GATE),
    *_table("rows of a norm", "nvfp4_one_level nvfp4_te nvfp4_rowwise mxfp8 mxfp4 float8_rowwise", steps=NORM),
    *_table("a norm of the row", "nvfp4_te mxfp4", steps=RMS_NORM),
    *_table("a layer norm", "nvfp4_one_level nvfp4 mxfp8 float8_rowwise", steps=LAYER_NORM),
    *_table("both of a gate", "nvfp4_one_level mxfp8 mxfp4", dim=BOTH, steps=GATE),
    *_table("both of three", "mxfp8", dim=BOTH, steps=OF_THREE),
    *_table("both as values", "nvfp4_one_level mxfp8 mxfp4", dim=BOTH, values=BOTH),
    *_table("both, rows as values", "nvfp4_one_level mxfp8", dim=BOTH, values=(ROWS,)),
    *_table("values of a gate", "nvfp4_one_level nvfp4 mxfp8", steps=GATE, values=(ROWS,)),
    *_table("values of a norm", "nvfp4_one_level nvfp4 mxfp8", steps=RMS_NORM, values=(ROWS,)),
)  # fmt: skip

ALL_CONFIGURATIONS = (*CONFIGURATIONS, *GROUPED_CONFIGURATIONS, *PROLOGUE_CONFIGURATIONS)


# ---------------------------------------------------------------- values

LONG_ROWS = 2**16  # elements, that do not fit a program's registers
# Each kernel that finds an amax: one large element reveals threads, lanes and words that it omits.
FEW_ROWS = (("rows", "nvfp4"), ("both, transform, seed", "nvfp4_te"))
FEW_COLUMNS = 400
Check = Callable[[Runner], list[str]]  # returns what is wrong


def checks(*shapes: tuple[int, int], more: Sequence[Configuration] = ()) -> list[tuple[str, list[Check]]]:
    """(name, checks on tensors of these shapes) of each configuration of the table and of `more`."""
    found: list[tuple[str, list[Check]]] = []
    for one in (*CONFIGURATIONS, *GROUPED_CONFIGURATIONS, *PROLOGUE_CONFIGURATIONS, *more):
        check = quantized_after_steps if one.steps else quantized
        found.append((f"quantise {one.label}, {one.format}", [partial(check, one, shape) for shape in shapes]))
    return found + [(f"few rows, {one.label}, {one.format}", [partial(quantized_few_rows, one)])
                    for one in CONFIGURATIONS if (one.label, one.format) in FEW_ROWS]  # fmt: skip


def quantized(configuration: Configuration, shape: tuple[int, int], machine: Runner) -> list[str]:
    """Differences between the kernels and the reference, of finite values and of others."""
    if configuration.groups == "rows":
        configuration, shape = replace(configuration, ends=ENDS), (GROUP_ROWS, shape[1])
    elif configuration.groups:
        configuration, shape = replace(configuration, ends=(128, 256, 384)), (384, shape[1])
    elif configuration.shape[1] >= LONG_ROWS:
        shape = (3, LONG_ROWS + (80 if shape[1] % 128 else 0))
    inputs = {"finite": finite(shape)}
    if not configuration.groups:
        inputs["not finite"] = not_finite(shape)
    if machine.device == "cuda":
        inputs["zeros"] = torch.zeros(shape)
    return _of_inputs(configuration, inputs, machine)


def quantized_few_rows(configuration: Configuration, machine: Runner) -> list[str]:
    """Like `quantized`, for 2 to 15 rows, each with one large element in another place; and extreme scales."""
    x = finite((130, FEW_COLUMNS))
    inputs = {"zeros": 0 * x, "tiny": x * 2.0**-90, "huge": x * 2.0**90}
    for rows in range(2, 16):
        x = finite((rows, FEW_COLUMNS)).clamp(-1, 1)
        row, column = rows // 2, (93 * rows + 7) % FEW_COLUMNS
        x[row, column] = 100
        inputs[f"{rows} rows"] = x
    return _of_inputs(configuration, inputs, machine)


def _of_inputs(configuration: Configuration, inputs: dict[str, torch.Tensor], machine: Runner) -> list[str]:
    layout = configuration.layout_on(machine.target.sm)
    reference_rounds, compare = _rounding(configuration, machine)
    wrong = []
    for name, x in inputs.items():
        if compare is rounded_alike and not x.isfinite().all():
            continue
        x = x.to(configuration.dtype)
        with reference_rounds():
            expected = configuration.call(x, layout)
        with machine.running():
            got = configuration.call_kernels(x.to(machine.device), layout)
        parts = (_of_groups(each, configuration) for each in (got, expected))
        wrong += [f"{name}: {what}" for what in compare(*parts)]
    return wrong


def _of_groups(found: Results, configuration: Configuration) -> Results:
    """Results without the rows of no group, which are arbitrary."""
    if configuration.groups != "rows" or isinstance(found, torch.Tensor):
        return found
    ends = [ENDS[-1] if dim == ROWS else None for dim in configuration.dim]
    return [part for i, end in enumerate(ends) for part in up_to(found[3 * i : 3 * i + 3], end)]


def _rounding(configuration: Configuration, machine: Runner) -> tuple[Callable, Callable]:
    """(a context in which the reference uses the machine's number of random bits per element, the comparison)."""
    if not (configuration.seeded and machine.target.isa == 100):
        return contextlib.nullcontext, same_bits
    return reference.eight_random_bits, rounded_alike if machine.device == "cuda" else same_bits


def quantized_after_steps(configuration: Configuration, shape: tuple[int, int], machine: Runner) -> list[str]:
    """Differences of a quantiser with a prologue: in the value that it computes, and in its codes and scales."""
    steps, name, dims = configuration.steps, configuration.format, configuration.dim
    values: dict[str, Any] = {"values": list(configuration.values)} if configuration.values else {}
    # The kernel of rows stores the value or, after statistics, the kernel of this format.
    reduces = Prologue.parse(steps, BF16).reductions
    storing = (name, dims, {"values": list(dims)} if values else {}) if reduces else ("mxfp8", (ROWS,), {})
    options = values or {"layout": configuration.layout_on(machine.target.sm)}
    if configuration.static:
        options["outer"] = torch.tensor(0.01)
    if configuration.shape[1] != SIZE:  # rows whose length decides how many tiles hold them
        shape = (3, configuration.shape[1] - (48 if shape[1] % 128 else 0))
    if configuration.groups:
        shape = (GROUP_ROWS, shape[1])
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
    moved = {key: x.to(machine.device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    wrong = []
    for kind, made in (("finite", finite), ("not finite", not_finite)):
        operands = _operands(steps, shape, made)
        first, *others = (x.to(machine.device) for x in operands)
        if configuration.halves:
            first, others[0] = torch.cat((first, others[0]), -1).chunk(2, -1)
        quantise = partial(quantize_kernels, first, operands=others, prologue=steps, dtype=BF16)
        with machine.running():
            got = quantise(name, dims, **moved)
            value = quantise(storing[0], storing[1], stored=[f"s{len(steps) - 1} bfloat16"], **storing[2])[-1].cpu()
        expected, end = QUANTIZE(value, name, list(dims), **options), ENDS[-1] if configuration.groups else None
        found = _far(value, steps, operands) + same_bits(up_to(got, end), up_to(expected, end))
        wrong += [f"{kind}: {what}" for what in found]
    return wrong


def _operands(
    steps: Sequence[str], shape: tuple[int, int], made: Callable[[tuple[int, int]], torch.Tensor]
) -> list[torch.Tensor]:  # fmt: skip
    """The operands of a prologue on the CPU; `made` makes the first one."""
    prologue, found = Prologue.parse(steps, BF16), [made(shape).to(BF16)]
    for i, kind in sorted(prologue.kinds.items())[1:]:
        if kind == "aux":
            found.append(finite(shape, SEED + i).to(BF16))
            continue
        x = torch.randn(prologue.shape_of(i, shape), generator=torch.Generator().manual_seed(SEED + i))
        found.append(x.abs() if kind == "col" else x.to(BF16))  # statistics are float32
    return found


def _far(value: torch.Tensor, steps: Sequence[str], operands: list[torch.Tensor]) -> list[str]:
    """Differences of a value from float64 beyond the rounding to bfloat16 and the rounding of float32 sums."""
    prologue = Prologue.parse(steps, BF16)
    tensors = {f"{kind}{i}": operands[i].double() for i, kind in prologue.kinds.items()}
    exact = evaluate(prologue.steps, tensors)[-1].broadcast_to(value.shape)
    largest = exact.abs().nan_to_num(nan=0.0, posinf=0.0).amax(-1, keepdim=True)
    bound = exact.abs() * (2.0**-8 + 2.0**-15) + largest * 2.0**-18 + 1e-30
    inside, value = exact.isfinite(), value.double()
    beyond = inside & ~((value - exact).abs() <= bound)
    wrong = [f"values: {int(beyond.sum())} of {beyond.numel()} beyond the bound"] if beyond.any() else []
    if value[~inside].isfinite().any():
        wrong.append("values: a finite one where a NaN or an infinity went in")
    return wrong


# ---------------------------------------------------------------- comparisons


def rounded_alike(got: Results, expected: Results) -> list[str]:
    """The differences between stochastically rounded results, as texts.

    Codes with different random bits must be neighbours without bias; scales must be equal.
    """
    wrong = []
    for name, one, other in paired(got, expected):
        if not name.endswith("codes"):
            wrong += bit_differences(name, one, other)
            continue
        steps = (_position(one.cpu()) - _position(other)).float()
        if steps.abs().max() > 1:
            wrong.append(f"{name}: a value is not rounded to a neighbour")
        # Both round up with a probability equal to the distance, so there is no mean shift within six standard errors.
        # The hardware rounds the probability down to a multiple of 1/256.
        if steps.mean().abs() > 6 * 0.7 / steps.numel() ** 0.5 + 2**-8:
            wrong.append(f"{name}: rounding is biased by {steps.mean():.4f} steps")
    return wrong


def _position(packed: torch.Tensor) -> torch.Tensor:
    """The positions of E2M1 codes in the order of their values."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return torch.where(codes > 7, 8 - codes, codes)


def up_to(found: Sequence[torch.Tensor], end: int | None) -> Sequence[torch.Tensor]:
    """Codes, linear scales and row scales, cut to `end` rows; swizzled scales and groups' scales are not cut."""
    return found if end is None else [t if t.dim() < 2 else t[:end] for t in found]
