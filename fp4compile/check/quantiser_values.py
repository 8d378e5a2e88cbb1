"""The checks of quantisers that `check-sm100` runs on a GPU and in the simulator, on the configurations of its table.

A kernel must return the reference's codes and scales bit for bit. After a norm or a gate, the order of a row's sum and
the last bit of `exp` depend on the kernel. So one launch stores the value that it quantises: it must equal float64
within the rounding to bfloat16, and the reference quantises it. A launch that stores nothing must return the
reference's codes, scales and outer scales of that value.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Machine
from fp4compile.check.quantiser_table import (
    CONFIGURATIONS,
    GROUPED_CONFIGURATIONS,
    PROLOGUE_CONFIGURATIONS,
    SIZE,
    Configuration,
)
from fp4compile.check.values import BF16, ENDS, GROUP_ROWS, SEED, finite, not_finite, rounded_alike, same_bits, up_to
from fp4compile.formats import reference
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import ROWS
from fp4compile.formats.steps import evaluate
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels

LONG_ROWS = 2**16  # elements, that do not fit a program's registers
# Each kernel that finds an amax: threads, lanes and words that it leaves out show where only one element is large.
FEW_ROWS = (("rows", "nvfp4"), ("both, transform, seed", "nvfp4_te"))
FEW_COLUMNS = 400
Check = Callable[[Machine], list[str]]  # returns what is wrong


def checks(*shapes: tuple[int, int], more: Sequence[Configuration] = ()) -> list[tuple[str, list[Check]]]:
    """(name, checks on tensors of these shapes) of each configuration of the table and of `more`."""
    found: list[tuple[str, list[Check]]] = []
    for one in (*CONFIGURATIONS, *GROUPED_CONFIGURATIONS, *PROLOGUE_CONFIGURATIONS, *more):
        check = quantized_after_steps if one.steps else quantized_groups if one.groups else quantized
        found.append((f"quantise {one.label}, {one.format}", [partial(check, one, shape) for shape in shapes]))
    return found + [(f"few rows, {one.label}, {one.format}", [partial(quantized_few_rows, one)])
                    for one in CONFIGURATIONS if (one.label, one.format) in FEW_ROWS]  # fmt: skip


def quantized(configuration: Configuration, shape: tuple[int, int], machine: Machine) -> list[str]:
    """Differences between the kernels and the reference, of finite values and of others."""
    if configuration.shape[1] >= LONG_ROWS:
        shape = (3, LONG_ROWS + (80 if shape[1] % 128 else 0))
    inputs = {"finite": finite(shape), "not finite": not_finite(shape)}
    if machine.device == "cuda":
        inputs["zeros"] = torch.zeros(shape)
    return _of_inputs(configuration, inputs, machine)


def quantized_few_rows(configuration: Configuration, machine: Machine) -> list[str]:
    """Like `quantized`, for 2 to 15 rows, each with one large element in another place; and extreme outer scales."""
    x = finite((130, FEW_COLUMNS))
    inputs = {"zeros": 0 * x, "tiny": x * 2.0**-90, "huge": x * 2.0**90}
    for rows in range(2, 16):
        x = finite((rows, FEW_COLUMNS)).clamp(-1, 1)
        row, column = rows // 2, (93 * rows + 7) % FEW_COLUMNS
        x[row, column] = 100
        inputs[f"{rows} rows"] = x
    return _of_inputs(configuration, inputs, machine)


def _of_inputs(configuration: Configuration, inputs: dict[str, torch.Tensor], machine: Machine) -> list[str]:
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
        wrong += [f"{name}: {what}" for what in compare(got, expected)]
    return wrong


def _rounding(configuration: Configuration, machine: Machine) -> tuple[Callable, Callable]:
    """(a context in which the reference takes as many random bits an element as the machine, the comparison)."""
    if not (configuration.seeded and machine.target.isa == 100):
        return contextlib.nullcontext, same_bits
    return reference.eight_random_bits, rounded_alike if machine.device == "cuda" else same_bits


def quantized_groups(configuration: Configuration, shape: tuple[int, int], machine: Machine) -> list[str]:
    """Differences between the kernels of groups and the reference; rows of no group are not compared."""
    layout, (_, columns) = configuration.layout_on(machine.target.sm), shape
    options: dict[str, Any] = {"layout": layout, "hadamard": configuration.hadamard}
    if configuration.seeded:
        options["seed"] = torch.tensor(SEED)
    x, end = finite((GROUP_ROWS, columns)).to(BF16), None
    if configuration.groups == "rows":
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
        end = ENDS[-1]
    else:
        x, options["each_matrix"] = finite((3, 128, columns)).to(BF16), True
    reference_rounds, compare = _rounding(configuration, machine)
    with reference_rounds():
        expected = QUANTIZE(x, configuration.format, list(configuration.dim), **options)
    with machine.running():
        got = quantize_kernels(
            x.to(machine.device), configuration.format, list(configuration.dim), **_moved(options, machine)
        )
    wrong = []
    for i, dim in zip(range(0, len(got), 3), configuration.dim, strict=True):
        parts = (up_to(each[i : i + 3], end if dim == ROWS else None) for each in (got, expected))
        wrong += [f"along {dim}: {what}" for what in compare(*parts)]
    return wrong


def _moved(options: dict[str, Any], machine: Machine) -> dict[str, Any]:
    return {name: x.to(machine.device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


# ---------------------------------------------------------------- quantisers with a prologue


def quantized_after_steps(configuration: Configuration, shape: tuple[int, int], machine: Machine) -> list[str]:
    """Differences of a quantiser with a prologue: in the value that it computes, and in its codes and scales."""
    options: dict[str, Any] = {"layout": configuration.layout_on(machine.target.sm)}
    if configuration.values:
        options = {"values": list(configuration.values)}
    if configuration.static:
        options["outer"] = torch.tensor(0.01)
    if configuration.shape[1] != SIZE:  # rows whose length decides how many tiles hold them
        shape = (3, configuration.shape[1] - (48 if shape[1] % 128 else 0))
    if configuration.groups:
        shape = (GROUP_ROWS, shape[1])
        options["offs"] = torch.tensor(ENDS, dtype=torch.int32)
    wrong = []
    for name, made in (("finite", finite), ("not finite", not_finite)):
        operands = _operands(configuration.steps, shape, made)
        wrong += [f"{name}: {what}" for what in _compared(configuration, operands, options, machine)]
    return wrong


def _compared(
    configuration: Configuration, operands: list[torch.Tensor], options: dict[str, Any], machine: Machine
) -> list[str]:
    """Differences in a quantiser's results, and in the value that a kernel computes of the operands, as texts."""
    here = [x.to(machine.device) for x in operands]
    if configuration.halves:
        here[:2] = torch.cat(here[:2], -1).chunk(2, -1)
    steps, name, dims = configuration.steps, configuration.format, configuration.dim
    with machine.running():
        got = _quantised(here, steps, name, dims, **_moved(options, machine))
        value = _written(here, steps, name, dims, "values" in options)
    expected = QUANTIZE(value, name, list(dims), **options)
    end = ENDS[-1] if configuration.groups else None
    return _far(value, steps, operands) + same_bits(up_to(got, end), up_to(expected, end))


def _quantised(
    operands: Sequence[torch.Tensor], steps: Sequence[str], name: str, dims: tuple[int, ...], **options: Any
) -> list[torch.Tensor]:
    first, *others = operands
    return quantize_kernels(first, name, dims, operands=others, prologue=steps, dtype=BF16, **options)


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


def _written(
    operands: list[torch.Tensor], steps: Sequence[str], name: str, dims: tuple[int, ...], values: bool
) -> torch.Tensor:
    """The value that is quantised, as stored by the kernel of rows or, after statistics, by this format's kernel."""
    if not Prologue.parse(steps, BF16).reductions:
        name, dims, values = "mxfp8", (ROWS,), False
    stored, options = [f"s{len(steps) - 1} bfloat16"], {"values": list(dims)} if values else {}
    *_, value = _quantised(operands, steps, name, dims, stored=stored, **options)
    return value.cpu()


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
