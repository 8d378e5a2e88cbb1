"""Quantise and multiply groups of CUDA rows: which kernels, on which view of the tensors.

`quantize_grouped` and `scaled_grouped_mm` allocate their outputs and launch kernels. They run eagerly and under
tracing, on concrete and on symbolic numbers of rows. The host never reads the offsets: grids are as large as any
offsets need, and the number of launches does not depend on the number of groups. All bits are those of
`reference_grouped`; products are, up to the order of the float32 sums.
"""

from typing import Any

import torch

from fp4compile import reference_grouped
from fp4compile._compat import statically_true
from fp4compile.formats import BlockFormat
from fp4compile.groups import check_offs, padded_rows
from fp4compile.layouts import ceil_div, swizzled_numel
from fp4compile.operand import Operand
from fp4compile.templates import scale_sweep
from fp4compile.templates.grouped.choose import choose
from fp4compile.templates.grouped.problem import call_of
from fp4compile.templates.grouped.quantize_columns import launch_grouped_columns
from fp4compile.templates.grouped.quantize_rows import launch_grouped_rows
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize import dispatch as dense
from fp4compile.templates.quantize.views import matrices


def quantize_grouped(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    fmt: BlockFormat,
    dim: int,
    outer: torch.Tensor | None,
    layout: str,
    *,
    seed: torch.Tensor | None,
    transform: bool,
    scale_rule: str = "amax",
) -> dense.Quantized:
    """Quantise groups of rows, or without offs each matrix of a batch, by itself.

    x: [M, K] whose rows offs cuts in groups, quantised along K (dim -1: `reference_grouped.quantize_rows`) or along the
    rows of each group (dim -2: `quantize_columns`); or, without offs, [G, R, C] (`quantize_matrices`).
    outer: float32 [], None computes one where the format has it. transform: the Hadamard transform, along the rows of
    groups or matrices. scale_rule: see `reference_scales`; without offs only.
    On SM100, stochastic rounding is the hardware's: equal in distribution only.
    Raises ValueError or TypeError, naming the argument, where these do not go together.
    """
    if dim not in (-1, -2):
        raise ValueError(f"dim={dim}: a grouped tensor is quantised along dimension -1 or -2")
    layout = layout if fmt.scale is not None else "linear"
    if offs is None:
        return _quantize_matrices(x, fmt, dim, outer, layout, seed, transform, scale_rule)
    check_offs(offs)
    if x.dim() != 2:
        raise ValueError(f"x: expected two dimensions, groups of rows, got shape {tuple(x.shape)}")
    if fmt.square:
        raise ValueError(f"format: {fmt.name} has square blocks, and groups may have any number of rows")
    if outer is not None and (outer.dim() or outer.dtype != torch.float32):
        raise ValueError(f"outer: expected float32 of shape (), got {outer.dtype} of shape {tuple(outer.shape)}")
    offs = offs.contiguous()
    if dim == -2:
        return _quantize_columns(x, offs, fmt, outer, layout, seed, transform)
    if transform:
        raise ValueError("transform: goes along the rows of groups, dim -2")
    if layout == "linear" and (outer is not None or fmt.outer != "tensor"):
        return dense.quantize(x, fmt, outer, layout, seed=seed)
    rows, cols = x.shape
    scale_rows = padded_rows(rows, offs.shape[0]) if layout == "swizzled" else rows
    data, scales = _empty_outputs(x, rows, ceil_div(cols, fmt.block_cols) * fmt.block_cols, scale_rows, fmt, layout)
    outer = launch_grouped_rows(matrices(x), offs, fmt, data, scales, outer, layout, seed)
    return data.view(fmt.data_dtype), scales.view(fmt.scale_dtype), outer


def scaled_grouped_mm(a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype) -> torch.Tensor:
    """`reference_grouped.scaled_grouped_mm` on the GPU; same arguments and results.

    Raises ValueError or TypeError, naming the argument, for operands, scales or offsets that do not fit, and where both
    operands are plain.
    """
    call = call_of(a, b, offs, rows, out_dtype, target_of(a.data.device))
    if call.problem.empty:
        return call.empty()
    candidate = choose(call.problem)
    return candidate.run(call, candidate.configure(call.problem))


def _quantize_matrices(
    x, fmt: BlockFormat, dim: int, outer, layout: str, seed, transform: bool, scale_rule: str
) -> dense.Quantized:
    if x.dim() != 3:
        raise ValueError(f"x: expected three dimensions where there are no offs, got shape {tuple(x.shape)}")
    if scale_rule != "amax":
        if statically_true(x.numel() == 0):
            return reference_grouped.sweep_matrices(x, fmt, dim, outer, layout, scale_rule)
        each = outer is None and fmt.outer == "tensor"
        return scale_sweep.quantize(x.movedim(dim, -1), fmt, outer, layout, scale_rule, each_matrix=each)
    if (fmt.square and seed is not None) or statically_true(x.numel() == 0):
        return reference_grouped.quantize_matrices(x, fmt, dim, outer, layout, seed, transform)
    x, stream = (x, 0) if dim == -1 else (x.transpose(-2, -1), 1)
    return dense.quantize(
        x, fmt, outer, layout, seed=seed, stream=stream, transform=transform, each_matrix=fmt.outer == "tensor"
    )


def _quantize_columns(x, offs, fmt: BlockFormat, outer, layout: str, seed, transform: bool) -> dense.Quantized:
    rows, cols = x.shape
    data, scales = _empty_outputs(x, cols, padded_rows(rows, offs.shape[0]), cols, fmt, layout)
    outer = launch_grouped_columns(matrices(x), offs, fmt, data, scales, outer, layout, seed, transform)
    return data.view(fmt.data_dtype), None if scales is None else scales.view(fmt.scale_dtype), outer


def _empty_outputs(
    x: torch.Tensor, rows: Any, width: Any, scale_rows: Any, fmt: BlockFormat, layout: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised uint8 tensors for codes of rows of `width` elements, and for scale_rows rows of block scales."""
    data = x.new_empty((rows, width // 2 if fmt.packed else width), dtype=torch.uint8)
    if fmt.scale is None:
        return data, None
    blocks = width // fmt.block_cols
    shape = (swizzled_numel(scale_rows, blocks),) if layout == "swizzled" else (scale_rows, blocks)
    return data, x.new_empty(shape, dtype=torch.uint8)
