"""Experts in `check-sm100 --run`: quantise kernels and products of groups against the ops on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Case, device
from fp4compile.check.run_values import BF16, F32, SEED, finite, here, layout_here, same_bits, schema
from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.ops.matmul import SCALED_GROUPED_MM
from fp4compile.ops.quantize import QUANTIZE, quantize_kernels
from fp4compile.templates.choose import to_time
from fp4compile.templates.launch import target_of
from fp4compile.templates.multiply import multiply
from fp4compile.templates.problem import problem_of

# Groups without rows, of one row, of more rows than a tile; then rows of no group.
ENDS = (0, 3, 200, 200, 201, 290)
ROWS = 300
SHAPES = ((512, 256), (520, 1040))  # N, K
FORMATS = tuple(name for name, fmt in formats.NAMED.items() if not fmt.square)


def cases() -> list[Case]:
    return [
        Case(f"experts, {name}, {len(ENDS)} groups of {ROWS} rows, {n}x{k}", partial(experts, name, n, k))
        for name in FORMATS for n, k in SHAPES
    ]  # fmt: skip


def experts(name: str, n: int, k: int, ends: tuple[int, ...] = ENDS, rows: int = ROWS) -> dict[str, Any]:
    """Differences in the results of four ways to quantise, and in the products of groups of rows and along rows."""
    fmt = formats.get(name)
    layout = layout_here(fmt)
    offs = torch.tensor(ends, dtype=torch.int32)
    x, dy = (finite((rows, size), SEED + size).to(BF16) for size in (k, n))
    w = finite((len(ends), n, k), SEED).to(BF16)

    wrong, found = [], {}
    for what, t, dim, options in (
        ("rows", x, [-1], {"offs": offs}), ("columns", dy, [-2], {"offs": offs}), ("both", x, [-1, -2], {"offs": offs}),
        ("matrices", w, [-1], {"each_matrix": True}),
    ):  # fmt: skip
        moved = {key: value.to(device()) if isinstance(value, torch.Tensor) else value
                 for key, value in options.items()}  # fmt: skip
        got = quantize_kernels(t.to(device()), name, dim, layout=layout, **moved)
        found[what] = QUANTIZE(t, name, dim, layout=layout, **options)
        for i, d in zip(range(0, len(got), 3), dim, strict=True):
            end = ends[-1] if "offs" in options and d == -1 else None  # rows of no group mean nothing
            parts = (up_to(each[i : i + 3], end) for each in (got, found[what]))
            wrong += [f"{what}: {one}" for one in same_bits(*parts)]
    *_, shared, data, scales, outer = found["both"]
    columns = data, scales, outer if outer.numel() else shared  # which the op returns once
    for what, a, b in (
        ("product", found["rows"], found["matrices"]), ("product along rows", found["columns"], columns),
    ):  # fmt: skip
        wrong += [f"{what}: {one}" for one in _product(_operand(a, fmt), _operand(b, fmt), offs, rows)]
    return {"layout": layout, "wrong": wrong}


def up_to(found: Sequence[torch.Tensor], end: int | None) -> Sequence[torch.Tensor]:
    """Codes, linear scales and row outer scales, cut to `end` rows; swizzled scales and groups' scales are not cut."""
    return found if end is None else [t if t.dim() < 2 else t[:end] for t in found]


def _operand(found: Sequence[torch.Tensor], fmt: BlockFormat) -> Operand:
    data, scales, outer = found
    return Operand(data, scales if fmt.scale else None, outer if fmt.outer else None, fmt)


def _product(a: Operand, b: Operand, offs: torch.Tensor, rows: int) -> list[str]:
    """Differences of a product above 1e-5 of its largest value, the error of reordered float32 sums.

    With results in bfloat16, each kernel that `max-autotune` would time computes it, within 2^-7 of the largest value.
    """
    expected = SCALED_GROUPED_MM(*schema(a), *schema(b), offs, rows, F32)
    in_float32 = Arguments(here(a), here(b), None, F32, offs=offs.to(device()), rows=rows)
    wrong = _differences(multiply(in_float32), expected, 1e-5)
    timed = replace(in_float32, out_dtype=BF16)
    for choice in to_time(problem_of(timed, target_of(torch.device(device())))):
        found = _differences(multiply(timed, choice), expected, 2.0**-7)
        wrong += [f"{choice.kernel}: {one}" for one in found]
    return wrong


def _differences(got: torch.Tensor, expected: torch.Tensor, share: float) -> list[str]:
    differ = ~((got.cpu().float() - expected).abs() <= share * expected.abs().max())
    return [f"{int(differ.sum())} of {differ.numel()} values"] if differ.any() else []
