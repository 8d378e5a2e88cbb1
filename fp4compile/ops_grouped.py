"""The ops of grouped products: those of experts, see `groups`.

    fp4compile::quantize_grouped(x, offs, format, dim, *, outer, layout, seed, hadamard, scale_rule)
        -> (data, scales, outer)
    fp4compile::scaled_grouped_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype)
        -> product
    fp4compile::scaled_mm_gathered(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype)
        -> product

The first two do what `quantize` and `scaled_mm` would do group by group. What `ops` says of ops holds for them.

`quantize_grouped` takes x [M, K] whose rows offs cuts in groups, and quantises it along K (dim -1) or along the rows of
each group (dim -2). Without offs it takes x [G, R, C] and quantises each matrix by itself. `reference_grouped` tells
the shapes of the results. `scaled_grouped_mm` takes operands of these three kinds.

`scaled_mm_gathered` is `scaled_mm` of a [S, M, K] and b[index], where b is [E, N, K] and index an int [S]: few tokens
that each have an expert of their own.
"""

import torch

from fp4compile import formats, reference_grouped
from fp4compile.formats import BlockFormat
from fp4compile.groups import Groups, check_offs, padded_rows
from fp4compile.layouts import ceil_div, swizzled_numel
from fp4compile.ops import (
    LIBRARY,
    TAGS,
    check_layout,
    check_scale_rule,
    check_training,
    computed_outer,
    operand,
    scales_shape,
)

LIBRARY.define(
    "quantize_grouped(Tensor x, Tensor? offs, str format, int dim=-1, *, Tensor? outer=None, str layout='linear',"
    " Tensor? seed=None, bool hadamard=False, str scale_rule='amax')"
    " -> (Tensor data, Tensor scales, Tensor outer_scale)",
    tags=TAGS,
)
LIBRARY.define(
    "scaled_grouped_mm(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor offs, SymInt rows, ScalarType out_dtype)"
    " -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "scaled_mm_gathered(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor index, ScalarType out_dtype) -> Tensor",
    tags=TAGS,
)


# ---------------------------------------------------------------- quantize_grouped


@torch.library.impl(LIBRARY, "quantize_grouped", "CompositeExplicitAutograd")
def _quantize_grouped(
    x, offs, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax"
):
    fmt = _checked(x, offs, format, dim, layout, seed, hadamard, scale_rule)
    if scale_rule != "amax":
        found = reference_grouped.sweep_matrices(x, fmt, dim, outer, layout, scale_rule)
    elif offs is None:
        found = reference_grouped.quantize_matrices(x, fmt, dim, outer, layout, seed, hadamard)
    else:
        groups = Groups.of(offs, x.shape[0])
        if dim == -1:
            found = reference_grouped.quantize_rows(x, groups, fmt, outer, layout, seed)
        else:
            found = reference_grouped.quantize_columns(x, groups, fmt, outer, layout, seed, hadamard)
    data, scales, computed = found
    return data, x.new_empty(0, dtype=fmt.scale_dtype) if scales is None else scales, computed_outer(x, outer, computed)


@torch.library.impl(LIBRARY, "quantize_grouped", "CUDA")
def quantize_grouped_cuda(
    x, offs, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax"
):
    """`quantize_grouped` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.grouped import dispatch as kernels  # here, so that the CPU needs no Triton

    fmt = _checked(x, offs, format, dim, layout, seed, hadamard, scale_rule)
    data, scales, computed = kernels.quantize_grouped(
        x, offs, fmt, dim, outer, layout, seed=seed, transform=hadamard, scale_rule=scale_rule
    )  # fmt: skip
    return data, x.new_empty(0, dtype=fmt.scale_dtype) if scales is None else scales, computed_outer(x, outer, computed)


@torch.library.register_fake("fp4compile::quantize_grouped", lib=LIBRARY)
def _quantize_grouped_fake(
    x, offs, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax"
):
    fmt = _checked(x, offs, format, dim, layout, seed, hadamard, scale_rule)
    lead = list(x.shape)
    k = lead.pop(dim)
    groups = x.shape[0] if offs is None else offs.shape[0]
    along_groups = offs is not None and dim == -2
    if along_groups:
        k = padded_rows(k, groups)
    blocks = ceil_div(k, fmt.block_cols)
    data = x.new_empty((*lead, blocks * (fmt.block_cols // 2 if fmt.packed else fmt.block_cols)), dtype=fmt.data_dtype)
    shape: tuple = scales_shape(lead, blocks, fmt, layout)
    if layout == "swizzled" and fmt.scale is not None and offs is not None and dim == -1:
        shape = (swizzled_numel(padded_rows(x.shape[0], groups), blocks),)
    scales = x.new_empty(shape, dtype=fmt.scale_dtype)
    outer_shape: tuple = (0,)
    if outer is None and fmt.outer == "tensor":
        outer_shape = (groups,)
    elif outer is None and fmt.outer == "row":
        outer_shape = (groups, *lead, 1) if along_groups else (*lead, 1)
    return data, scales, x.new_empty(outer_shape, dtype=torch.float32)


def _checked(x, offs, format: str, dim: int, layout: str, seed, hadamard: bool, scale_rule: str) -> BlockFormat:
    """The format. Raises ValueError or TypeError where the arguments do not go together."""
    fmt = formats.get(format)
    check_layout(layout)
    check_training(fmt, seed, hadamard)
    check_scale_rule(fmt, scale_rule, seed, hadamard)
    if dim not in (-1, -2):
        raise ValueError(f"dim={dim}: a grouped tensor is quantised along dimension -1 or -2")
    if offs is None:
        if x.dim() != 3:
            raise ValueError(f"x: expected three dimensions where there are no offs, got shape {tuple(x.shape)}")
        return fmt
    if scale_rule != "amax":
        raise ValueError(f"scale_rule={scale_rule!r}: is for weights, which have no groups of rows")
    check_offs(offs)
    if x.dim() != 2:
        raise ValueError(f"x: expected two dimensions, groups of rows, got shape {tuple(x.shape)}")
    if fmt.square:
        raise ValueError(f"format: {fmt.name} has square blocks, and groups may have any number of rows")
    if hadamard and dim == -1:
        raise ValueError("hadamard: the transform goes along the rows of groups, dim -2")
    return fmt


# ---------------------------------------------------------------- scaled_grouped_mm


@torch.library.impl(LIBRARY, "scaled_grouped_mm", "CompositeExplicitAutograd")
def _scaled_grouped_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype):
    _check_product(a, b, offs, rows)
    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return reference_grouped.scaled_grouped_mm(a, b, offs, rows, out_dtype)


@torch.library.impl(LIBRARY, "scaled_grouped_mm", "CUDA")
def scaled_grouped_mm_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype):
    """`scaled_grouped_mm` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.grouped.dispatch import scaled_grouped_mm

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return scaled_grouped_mm(a, b, offs, rows, out_dtype)


@torch.library.register_fake("fp4compile::scaled_grouped_mm", lib=LIBRARY)
def _scaled_grouped_mm_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype):
    _check_product(a, b, offs, rows)
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def _check_product(a, b, offs, rows) -> None:
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise ValueError(f"a, b: expected [M, K] and [G, N, K], or [P, W] and [Q, W]; got shapes {tuple(a.shape)} and "
                         f"{tuple(b.shape)}")  # fmt: skip
    check_offs(offs, b.shape[0] if b.dim() == 3 else None)
    if b.dim() == 3:
        torch._check_value(a.shape[0] == rows, lambda: f"rows: expected the {a.shape[0]} rows of a, got {rows}")


# ---------------------------------------------------------------- scaled_mm_gathered


@torch.library.impl(LIBRARY, "scaled_mm_gathered", "CompositeExplicitAutograd")
def _scaled_mm_gathered(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    taken = (None if t is None else _taken(t, index) for t in (b, b_scales, b_outer))
    return torch.ops.fp4compile.scaled_mm(a, a_scales, a_outer, a_format, *taken, b_format, None, out_dtype)


@torch.library.register_fake("fp4compile::scaled_mm_gathered", lib=LIBRARY)
def _scaled_mm_gathered_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    if a.dim() != 3 or b.dim() != 3 or index.dim() != 1:
        raise ValueError("a, b, index: expected [S, M, K], [E, N, K] and [S]; got shapes "
                         f"{tuple(a.shape)}, {tuple(b.shape)} and {tuple(index.shape)}")  # fmt: skip
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index] of any dtype: as bytes where torch takes no elements of it."""
    if x.dim() == 0:
        return x
    return x.view(torch.uint8)[index].view(x.dtype) if x.element_size() == 1 else x[index]
