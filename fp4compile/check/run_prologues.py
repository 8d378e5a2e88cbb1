"""Quantisers with a prologue in `check-sm100 --run`: norms and gates in their kernels, alone, in pairs, of experts.

The order of a row's sum and the last bit of `exp` are the kernel's own. So the value that is quantised is taken from a
kernel, which stores it: it is held to float64 within the rounding to bfloat16, and the reference quantises it. Codes,
scales and outer scales of a launch that stores nothing must be those, bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Case, device
from fp4compile.check.launches import GATE, GRADIENT_RESULTS, GRADIENTS, LAYER_NORM, NORM, RELU, RMS_NORM, SUM_NORM
from fp4compile.check.run_experts import ENDS, ROWS, up_to
from fp4compile.check.run_values import BF16, SEED, finite, layout_here, not_finite, same_bits
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.formats.steps import evaluate
from fp4compile.ops.grouped_prologue import quantize_grouped_prologue_cuda
from fp4compile.ops.prologue import quantize_prologue_cuda

CHAINS = {
    "a gate": GATE, "a norm": RMS_NORM, "a norm of a sum": SUM_NORM, "a layer norm": LAYER_NORM,
    "the end of a norm": NORM, "the gradients of a gate": GRADIENTS, "relu": RELU,
}  # fmt: skip
ROW_FORMATS = ("nvfp4_one_level", "nvfp4", "nvfp4_te", "nvfp4_rowwise", "mxfp8", "mxfp4", "float8_rowwise")
ROW_CHAINS = ("a gate", "a norm", "a norm of a sum", "a layer norm", "the end of a norm")
COLUMN_FORMATS = ("nvfp4", "nvfp4_te", "mxfp8", "mxfp4", "float8_rowwise")
# Whole tiles; then rows, columns and blocks that fill none; few rows in several tiles; rows that no program holds.
SHAPES = ((256, 1024), (130, 1000), (5, 4096))
LONG = (3, 20000)


def cases() -> list[Case]:
    found = [("quantize", chain, name, shape) for chain in ROW_CHAINS for name in ROW_FORMATS for shape in SHAPES]
    found += [("quantize", "a layer norm", name, LONG) for name in ROW_FORMATS]
    found += [("fake_quantize", chain, name, shape) for chain in ("a gate", "a norm")
              for name in ("nvfp4_one_level", "nvfp4", "mxfp8") for shape in SHAPES]  # fmt: skip
    found += [("quantize_both", chain, name, shape) for chain in ("a gate", "the end of a norm")
              for name in COLUMN_FORMATS for shape in SHAPES[:2]]  # fmt: skip
    found += [("quantize_both", "the gradients of a gate", name, SHAPES[0]) for name in COLUMN_FORMATS[:-1]]
    several = [Case(f"{op} after {chain}, {name}, {shape[0]}x{shape[1]}", partial(quantized, op, chain, name, shape))
               for op, chain, name, shape in found]  # fmt: skip
    grouped = [Case(f"experts, {op} after {chain}, {name}", partial(experts, op, chain, name))
               for op, chain in (("quantize_grouped", "a gate"), ("quantize_grouped_both", "relu"))
               for name in COLUMN_FORMATS]  # fmt: skip
    return several + grouped


def quantized(op: str, chain: str, name: str, shape: tuple[int, int]) -> dict[str, Any]:
    """What differs of a quantiser's results, and of the values that it computes. op: of `quantize_prologue`."""
    steps, options = CHAINS[chain], {} if op == "fake_quantize" else {"layout": layout_here(formats.get(name))}
    several = list(GRADIENT_RESULTS) if chain == "the gradients of a gate" else None
    wrong = []
    for what, made in (("finite", finite), ("not finite", not_finite)):
        operands = _operands(steps, shape, made)
        here = [x.to(device()) for x in operands]
        got = quantize_prologue_cuda(here, steps, BF16, op, name, results=several, **options)
        results = several or [len(steps) - 1]
        count = len(got) // len(results)
        for i, number in enumerate(results):
            value = _written(here, steps[: number + 1], op, name)
            wrong += [f"{what}: {one}" for one in _far(value, steps[: number + 1], operands)]
            expected = getattr(torch.ops.fp4compile, op)(value, name, **options)
            found = same_bits(_parts(got[i * count : (i + 1) * count]), _parts(expected))
            wrong += [f"{what}: {one}" for one in found]
    return {"wrong": wrong}


def experts(
    op: str, chain: str, name: str, shape: tuple[int, int] = (ROWS, 1040), ends: tuple[int, ...] = ENDS
) -> dict[str, Any]:
    """The same of a quantiser of groups of rows; rows of no group mean nothing."""
    steps, layout = CHAINS[chain], layout_here(formats.get(name))
    offs = torch.tensor(ends, dtype=torch.int32)
    operands = _operands(steps, shape, finite)
    here = [x.to(device()) for x in operands]
    value = _written(here, steps, "quantize", name)
    wrong = _far(value, steps, operands)
    got = quantize_grouped_prologue_cuda(here, steps, BF16, offs.to(device()), op, name, layout=layout)
    expected = getattr(torch.ops.fp4compile, op)(value, offs, name, layout=layout)
    for i in range(0, len(got), 3):
        end = None if i else ends[-1]
        wrong += same_bits(up_to(tuple(got[i : i + 3]), end), up_to(tuple(expected[i : i + 3]), end))
    return {"wrong": wrong}


def _operands(
    steps: Sequence[str], shape: tuple[int, int], made: Callable[[tuple[int, int]], torch.Tensor]
) -> list[torch.Tensor]:  # fmt: skip
    """On the CPU; the first one by `made`."""
    prologue, found = Prologue.parse(steps, BF16), [made(shape).to(BF16)]
    for i, kind in sorted(prologue.kinds.items())[1:]:
        if kind == "aux":
            found.append(finite(shape, SEED + i).to(BF16))
            continue
        x = torch.randn(prologue.shape_of(i, shape), generator=torch.Generator().manual_seed(SEED + i))
        found.append(x.abs() if kind == "col" else x.to(BF16))  # statistics are float32
    return found


def _written(operands: list[torch.Tensor], steps: Sequence[str], op: str, name: str) -> torch.Tensor:
    """The value that is quantised, as the kernel of rows stores it; after statistics, as that of this op and format."""
    prologue = Prologue.parse(steps, BF16)
    if not prologue.reductions:
        op, name = "quantize", "mxfp8"
    operands = operands[: len(prologue.kinds)]
    *_, value = quantize_prologue_cuda(operands, steps, BF16, op, name, stored=[f"s{len(steps) - 1} bfloat16"])
    return value.cpu()


def _far(value: torch.Tensor, steps: Sequence[str], operands: list[torch.Tensor]) -> list[str]:
    """Where a value is further from float64 than the rounding to bfloat16, and of float32 sums, allows."""
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


def _parts(found: Sequence[torch.Tensor]) -> tuple:
    """Results as `same_bits` names them: codes, scales and outer scale, of rows or of both directions."""
    if len(found) == 2:  # values, and the outer scale
        return found[0], None, found[1]
    return tuple(found) if len(found) == 3 else (tuple(found[:3]), tuple(found[3:]))
