"""Experts in `check-sm100 --run`: grouped quantise kernels and products against `reference_grouped`."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fp4compile.check.cases import Case, device
from fp4compile.check.run_values import BF16, F32, SEED, finite, layout_here, same_bits
from fp4compile.formats import formats, reference_grouped
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.groups import Groups
from fp4compile.formats.operand import Operand
from fp4compile.templates.grouped import dispatch
from fp4compile.templates.grouped.choose import to_time
from fp4compile.templates.grouped.problem import problem_of
from fp4compile.templates.launch import target_of

# Groups without rows, of one, of more than a tile; rows of no group behind them.
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
    """What differs of the four ways to quantise, and of the products of rows and along rows."""
    fmt = formats.get(name)
    layout = layout_here(fmt)
    offs = torch.tensor(ends, dtype=torch.int32)
    groups = Groups.of(offs, rows)
    x, dy = (finite((rows, size), SEED + size).to(BF16) for size in (k, n))
    w = finite((len(ends), n, k), SEED).to(BF16)

    by_rows = reference_grouped.quantize_rows(x, groups, fmt, None, layout, None)
    columns = [reference_grouped.quantize_columns(t, groups, fmt, None, layout, None, False) for t in (dy, x)]
    matrices = reference_grouped.quantize_matrices(w, fmt, -1, None, layout, None, False)
    wrong = []
    for what, expected, t, cut, dim in (
        ("rows", by_rows, x, offs, -1), ("columns", columns[0], dy, offs, -2), ("matrices", matrices, w, None, -1),
    ):  # fmt: skip
        here = None if cut is None else cut.to(device())
        found = dispatch.quantize_grouped(t.to(device()), here, fmt, dim, None, layout, seed=None, transform=False)
        end = ends[-1] if what == "rows" else None  # rows of no group mean nothing
        wrong += [f"{what}: {one}" for one in same_bits(up_to(found, end), up_to(expected, end))]
    both = dispatch.quantize_grouped_both(
        x.to(device()), offs.to(device()), fmt, None, layout, seed=None, transform=False
    )
    for found, expected, end in zip(both, (by_rows, columns[1]), (ends[-1], None), strict=True):
        wrong += [f"both: {one}" for one in same_bits(up_to(found, end), up_to(expected, end))]
    for what, a, b in (("product", by_rows, matrices), ("product along rows", columns[0], columns[1])):
        wrong += [f"{what}: {one}" for one in _product(_operand(a, fmt), _operand(b, fmt), offs, rows)]
    return {"layout": layout, "wrong": wrong}


def up_to(found: tuple, end: int | None) -> tuple:
    """Codes, linear scales and outer scales of the first `end` rows; swizzled ones and those of groups as they are."""
    if end is None:
        return found
    return tuple(t if t is None or t.dim() < 2 else t[:end] for t in found)


def _operand(found: tuple, fmt: BlockFormat) -> Operand:
    data, scales, outer = found
    return Operand(data, scales, outer, fmt)


def _here(x: Operand) -> Operand:
    data, scales, outer = (None if t is None else t.to(device()) for t in (x.data, x.scales, x.outer))
    return replace(x, data=data, scales=scales, outer=outer)


def _product(a: Operand, b: Operand, offs: torch.Tensor, rows: int) -> list[str]:
    """Where a product differs by more than float32 sums in another order may: 1e-5 of its largest value.

    With results in bfloat16 it is computed by each kernel that `max-autotune` would time: 2^-7 of the largest.
    """
    expected = reference_grouped.scaled_grouped_mm(a, b, offs, rows, F32)
    here = _here(a), _here(b), offs.to(device()), rows
    wrong = _differences(dispatch.scaled_grouped_mm(*here, F32), expected, 1e-5)
    for choice in to_time(problem_of(*here, BF16, target_of(torch.device(device())))):
        found = _differences(dispatch.scaled_grouped_mm(*here, BF16, choice), expected, 2.0**-7)
        wrong += [f"{choice.kernel}: {one}" for one in found]
    return wrong


def _differences(got: torch.Tensor, expected: torch.Tensor, share: float) -> list[str]:
    differ = ~((got.cpu().float() - expected).abs() <= share * expected.abs().max())
    return [f"{int(differ.sum())} of {differ.numel()} values"] if differ.any() else []
