"""Quantisers with a prologue in `check-sm100 --run`: norms and gates in their kernels, dense and for experts.

The order of a row's sum and the last bit of `exp` depend on the kernel. So one launch stores the value that it
quantises: it must equal float64 within the rounding to bfloat16, and the reference quantises it. A launch that stores
nothing must return the reference's codes, scales and outer scales bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Case, device
from fp4compile.check.quantiser_table import BOTH, GATE, LAYER_NORM, NORM, RMS_NORM, SUM_NORM
from fp4compile.check.run_experts import ENDS, ROWS, up_to
from fp4compile.check.run_values import BF16, SEED, finite, layout_here, not_finite, same_bits
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.steps import evaluate
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels

CHAINS = {
    "a gate": GATE, "a norm": RMS_NORM, "a norm of a sum": SUM_NORM, "a layer norm": LAYER_NORM,
    "the end of a norm": NORM,
}  # fmt: skip
ROW_FORMATS = ("nvfp4_one_level", "nvfp4", "nvfp4_te", "nvfp4_rowwise", "mxfp8", "mxfp4", "float8_rowwise")
# Formats without an outer scale, for quantising in both directions, and for experts.
ONE_LEVEL = ("nvfp4_one_level", "mxfp8", "mxfp4")
# Whole tiles; then partly filled tiles in rows, columns and blocks; then few rows in several tiles.
SHAPES = ((256, 1024), (130, 1000), (5, 4096))
ALONG_ROWS = (-1,)


def cases() -> list[Case]:
    found: list[tuple[str, str, tuple[int, int], tuple[int, ...], bool]] = [
        (chain, name, shape, ALONG_ROWS, False) for chain in CHAINS for name in ROW_FORMATS for shape in SHAPES
    ]
    found += [(chain, name, shape, ALONG_ROWS, True) for chain in ("a gate", "a norm")
              for name in ("nvfp4_one_level", "nvfp4", "mxfp8") for shape in SHAPES]  # fmt: skip
    found += [(chain, name, shape, BOTH, False) for chain in ("a gate", "the end of a norm")
              for name in ONE_LEVEL for shape in SHAPES[:2]]  # fmt: skip
    dense = [
        Case(
            f"{'values' if values else 'codes'} along {list(dims)} after {chain}, {name}, {shape[0]}x{shape[1]}",
            partial(quantized, chain, name, shape, dims, values),
        )
        for chain, name, shape, dims, values in found
    ]
    return dense + [Case(f"experts after a gate, {name}", partial(experts, name)) for name in ONE_LEVEL]


def quantized(
    chain: str, name: str, shape: tuple[int, int], dims: tuple[int, ...] = ALONG_ROWS, values: bool = False
) -> dict[str, Any]:
    """Differences in a quantiser's results, and in the values that it computes."""
    steps = CHAINS[chain]
    options: dict[str, Any] = {"values": list(dims)} if values else {"layout": layout_here(formats.get(name))}
    wrong = []
    for what, made in (("finite", finite), ("not finite", not_finite)):
        found = compared(operands_of(steps, shape, made), steps, name, dims, **options)
        wrong += [f"{what}: {one}" for one in found]
    return {"wrong": wrong}


def compared(
    operands: list[torch.Tensor], steps: Sequence[str], name: str, dims: tuple[int, ...], end: int | None = None,
    **options: Any,
) -> list[str]:  # fmt: skip
    """Differences in a quantiser's results, and in the value that a kernel computes of the operands, as texts.

    end: where rows of no group begin, which are not compared. options: arguments of the op.
    """
    here = [x.to(device()) for x in operands]
    there = {key: x.to(device()) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    got = _quantised(here, steps, name, dims, **there)
    value = _written(here, steps, name, dims, "values" in options)
    expected = QUANTIZE(value, name, list(dims), **options)
    return _far(value, steps, operands) + same_bits(up_to(got, end), up_to(expected, end))


def experts(
    name: str, shape: tuple[int, int] = (ROWS, 1040), ends: tuple[int, ...] = ENDS
) -> dict[str, Any]:  # fmt: skip
    """Differences in the results of the quantiser of groups of rows; rows of no group are not compared."""
    layout, offs = layout_here(formats.get(name)), torch.tensor(ends, dtype=torch.int32)
    operands = operands_of(GATE, shape, finite)
    return {"wrong": compared(operands, GATE, name, ALONG_ROWS, ends[-1], layout=layout, offs=offs)}


def _quantised(
    operands: Sequence[torch.Tensor], steps: Sequence[str], name: str, dims: tuple[int, ...], **options: Any
) -> list[torch.Tensor]:
    first, *others = operands
    return quantize_kernels(first, name, dims, operands=others, prologue=steps, dtype=BF16, **options)


def operands_of(
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
        name, dims, values = "mxfp8", ALONG_ROWS, False
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
