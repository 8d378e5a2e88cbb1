"""Quantise and multiply groups of CUDA rows: which kernels, on which view of the tensors.

`quantize_grouped`, `quantize_grouped_both` and `scaled_grouped_mm` allocate their outputs and launch kernels. They run
eagerly and under tracing, on concrete and on symbolic numbers of rows. The host never reads the offsets: grids are as
large as any offsets need, and the number of launches does not depend on the number of groups. All bits are those of
`reference_grouped`; products are, up to the order of the float32 sums.
"""

from collections.abc import Sequence

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import reference_grouped
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.groups import check_offs, padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.formats.operand import Operand
from fp4compile.formats.prologue import Prologue
from fp4compile.templates import scale_sweep
from fp4compile.templates.grouped.choose import GroupedChoice, choose, named
from fp4compile.templates.grouped.problem import call_of
from fp4compile.templates.grouped.quantize_columns import launch_grouped_columns
from fp4compile.templates.grouped.quantize_rows import launch_grouped_rows
from fp4compile.templates.launch import target_of
from fp4compile.templates.quantize import dispatch as dense
from fp4compile.templates.quantize.views import Matrices, empty_outputs, empty_values, typed_outputs

Outputs = tuple[torch.Tensor, torch.Tensor | None]  # codes and block scales


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
    values: bool = False,
    reading: dense.Reading | None = None,
) -> dense.Quantized:
    """Quantise groups of rows, or without offs each matrix of a batch, by itself.

    x: [M, K] whose rows offs cuts in groups, quantised along K (dim -1: `reference_grouped.quantize_rows`) or along the
    rows of each group (dim -2: `quantize_columns`); or, without offs, [G, R, C] (`quantize_matrices`).
    outer: float32 [], None computes one where the format has it. transform: the Hadamard transform, along the rows of
    groups or matrices. scale_rule: see `reference_scales`; without offs only. values: in the place of codes what these
    and block scales stand for, `reference.values_of`, and no block scales; of linear scales by the rule "amax".
    reading: with a prologue (`takes_prologue`), whose first operand x is; with offs only.
    On SM100, stochastic rounding is the hardware's: equal in distribution only.
    Raises ValueError or TypeError, naming the argument, where these do not go together.
    """
    if dim not in (-1, -2):
        raise ValueError(f"dim={dim}: a grouped tensor is quantised along dimension -1 or -2")
    layout = layout if fmt.scale is not None else "linear"
    if offs is None:
        return _quantize_matrices(x, fmt, dim, outer, layout, seed, transform, scale_rule, values)
    _check_rows(x, offs, fmt, outer)
    offs = offs.contiguous()
    if dim == -2:
        columns = _empty_columns(x, offs, fmt, layout, values)
        _, outer = launch_grouped_columns(
            _read(x, reading), offs, fmt, outer, layout, columns, seed=seed, transform=transform
        )  # fmt: skip
        return *_typed(columns, fmt), outer
    if transform:
        raise ValueError("transform: goes along the rows of groups, dim -2")
    if layout == "linear" and (outer is not None or fmt.outer != "tensor"):
        return dense.quantize(x, fmt, outer, layout, seed=seed, values=values, reading=reading)
    rows = _empty_rows(x, offs, fmt, layout, values)
    outer = launch_grouped_rows(_read(x, reading), offs, fmt, *rows, outer, layout, seed)
    return *_typed_rows(rows, x, fmt), outer


def quantize_grouped_both(
    x: torch.Tensor,
    offs: torch.Tensor | None,
    fmt: BlockFormat,
    outer: torch.Tensor | None,
    layout: str,
    *,
    seed: torch.Tensor | None,
    transform: bool,
    values: tuple[bool, bool] = (False, False),
    reading: dense.Reading | None = None,
) -> tuple[dense.Quantized, dense.Quantized]:
    """`quantize_grouped` along dim -1 and along dim -2, from one read; without offs, of matrices in square blocks.

    Same arguments. values: along each; with offs only, as reading. Raises ValueError or TypeError, naming the argument,
    where these do not go together.
    """
    layout = layout if fmt.scale is not None else "linear"
    if offs is None:
        return _quantize_matrices_both(x, fmt, outer, layout, seed)
    _check_rows(x, offs, fmt, outer)
    rows, columns = _empty_rows(x, offs, fmt, layout, values[0]), _empty_columns(x, offs, fmt, layout, values[1])
    along, down = launch_grouped_columns(
        _read(x, reading), offs.contiguous(), fmt, outer, layout, columns, rows, seed=seed, transform=transform
    )  # fmt: skip
    return (*_typed_rows(rows, x, fmt), along), (*_typed(columns, fmt), down)


def scaled_grouped_mm(
    a: Operand, b: Operand, offs: torch.Tensor, rows: int, out_dtype: torch.dtype, choice: GroupedChoice | None = None
) -> torch.Tensor:
    """`reference_grouped.scaled_grouped_mm` on the GPU; same arguments and results.

    choice: one of `choose.to_time(problem)`; without it the kernel is the one that `choose` names.
    Raises ValueError or TypeError, naming the argument, for operands, scales or offsets that do not fit.
    """
    call = call_of(a, b, offs, rows, out_dtype, target_of(a.data.device))
    if call.problem.empty:
        return call.empty()
    if choice is not None:
        return named(choice.kernel).run(call, choice.config)
    candidate = choose(call.problem)
    return candidate.run(call, candidate.configure(call.problem))


def takes_prologue(
    fmt: BlockFormat, prologue: Prologue, dtypes: Sequence[torch.dtype], by_columns: bool, both: bool
) -> bool:
    """Whether the kernels of groups read the result of a prologue; as `quantize.dispatch.takes_prologue`.

    They find no statistics and store nothing, because they pass over rows of no group. both: whether rows and columns
    are quantised, from two reads of a tile. Then functions of many instructions spill registers for SM100, as three
    tensors do down the columns.
    """
    if prologue.reductions or prologue.stored or dtypes[0] != prologue.dtype:
        return False
    if both and not {step.operation for step in prologue.steps}.isdisjoint(_LONG):
        return False
    if by_columns and list(prologue.kinds.values()).count("aux") > 2:
        return False
    return dense.takes_prologue(fmt, prologue, dtypes, by_columns)


_LONG = ("exp", "div", "sigmoid", "erf", "tanh")


def _read(x: torch.Tensor, reading: dense.Reading | None) -> Matrices:
    return (reading or dense.Reading()).matrices(x)


def _check_rows(x: torch.Tensor, offs: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None) -> None:
    check_offs(offs)
    if x.dim() != 2:
        raise ValueError(f"x: expected two dimensions, groups of rows, got shape {tuple(x.shape)}")
    if fmt.square:
        raise ValueError(f"format: {fmt.name} has square blocks, and groups may have any number of rows")
    if outer is not None and (outer.dim() or outer.dtype != torch.float32):
        raise ValueError(f"outer: expected float32 of shape (), got {outer.dtype} of shape {tuple(outer.shape)}")


def _quantize_matrices(
    x, fmt: BlockFormat, dim: int, outer, layout: str, seed, transform: bool, scale_rule: str = "amax",
    values: bool = False,
) -> dense.Quantized:  # fmt: skip
    if x.dim() != 3:
        raise ValueError(f"x: expected three dimensions where there are no offs, got shape {tuple(x.shape)}")
    if scale_rule != "amax":
        if statically_true(x.numel() == 0):
            return reference_grouped.sweep_matrices(x, fmt, dim, outer, layout, scale_rule)
        each = outer is None and fmt.outer == "tensor"
        return scale_sweep.quantize(x.movedim(dim, -1), fmt, outer, layout, scale_rule, each_matrix=each)
    if (fmt.square and seed is not None) or statically_true(x.numel() == 0):
        found = reference_grouped.quantize_matrices(x, fmt, dim, outer, layout, seed, transform)
        return reference_grouped.values_of(found, fmt) if values else found
    x, stream = (x, 0) if dim == -1 else (x.transpose(-2, -1), 1)
    return dense.quantize(
        x, fmt, outer, layout, seed=seed, stream=stream, transform=transform, each_matrix=fmt.outer == "tensor",
        values=values,
    )  # fmt: skip


def _quantize_matrices_both(x, fmt: BlockFormat, outer, layout: str, seed) -> tuple[dense.Quantized, dense.Quantized]:
    if not fmt.square:
        raise ValueError(f"format: matrices are quantised in both directions in square blocks, {fmt.name} has others")
    if x.dim() != 3 or seed is not None or statically_true(x.numel() == 0):  # an error, or the reference
        along, down = (_quantize_matrices(x, fmt, dim, outer, layout, seed, False) for dim in (-1, -2))
        return along, down
    return dense.quantize_both(x, fmt, outer, layout, each_matrix=fmt.outer == "tensor")


def _empty_rows(x: torch.Tensor, offs: torch.Tensor, fmt: BlockFormat, layout: str, values: bool) -> Outputs:
    """Uninitialised uint8 tensors for codes and block scales of rows; swizzled scales are those of padded rows.

    values: one of 16-bit floats, and no scales.
    """
    if values:
        return empty_values(x, fmt), None
    data, scales = empty_outputs(x, fmt, "linear")
    if layout == "swizzled":
        rows, blocks = padded_rows(x.shape[0], offs.shape[0]), ceil_div(x.shape[1], fmt.block_cols)
        scales = x.new_empty((swizzled_numel(rows, blocks),), dtype=torch.uint8)
    return data, scales


def _empty_columns(x: torch.Tensor, offs: torch.Tensor, fmt: BlockFormat, layout: str, values: bool) -> Outputs:
    """The same along the padded rows of groups: [cols, bytes] and [cols, blocks], or flat where swizzled."""
    cols, rows = x.shape[1], padded_rows(x.shape[0], offs.shape[0])
    if values:
        return x.new_empty((cols, rows), dtype=fmt.values_dtype), None
    data = x.new_empty((cols, rows // 2 if fmt.packed else rows), dtype=torch.uint8)
    if fmt.scale is None:
        return data, None
    blocks = rows // fmt.block_cols
    shape = (swizzled_numel(cols, blocks),) if layout == "swizzled" else (cols, blocks)
    return data, x.new_empty(shape, dtype=torch.uint8)


def _typed_rows(rows: Outputs, x: torch.Tensor, fmt: BlockFormat) -> Outputs:
    """The tensors of `_empty_rows` as codes and scales, or as they are where they are values."""
    return rows if rows[0].is_floating_point() else typed_outputs(*rows, x.shape[1], fmt)


def _typed(columns: Outputs, fmt: BlockFormat) -> Outputs:
    """The same of `_empty_columns`."""
    data, scales = columns
    if data.is_floating_point():
        return columns
    return data.view(fmt.data_dtype), None if scales is None else scales.view(fmt.scale_dtype)
