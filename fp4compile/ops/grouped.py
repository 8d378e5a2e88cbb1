"""The ops of grouped products: those of experts, see `groups`.

    fp4compile::quantize_grouped(x, offs, format, dim, *, outer, layout, seed, hadamard, scale_rule)
        -> (data, scales, outer)
    fp4compile::quantize_grouped_both(x, offs, format, *, outer, layout, seed, hadamard)
        -> (data, scales, outer, columns, column_scales, column_outer)
    fp4compile::fake_quantize_grouped(x, offs, format, dim, *, outer, seed, hadamard) -> (values, outer)
    fp4compile::fake_quantize_grouped_both(x, offs, format, values, *, outer, seed, hadamard)
        -> as quantize_grouped_both
    fp4compile::scaled_grouped_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype)
        -> product
    fp4compile::scaled_grouped_mm_library(as scaled_grouped_mm) -> product, by one call of a library
    fp4compile::scaled_mm_gathered(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype)
        -> product
    fp4compile::expert_weights(data, scales, outer, format, cols, dtype, activation, activation_outer) -> weights

The first five do what `quantize`, `quantize_both`, `fake_quantize` and `scaled_mm` would do group by group. What `ops`
says of ops holds for them.

`quantize_grouped` takes x [M, K] whose rows offs cuts in groups, and quantises it along K (dim -1) or along the rows of
each group (dim -2). Without offs it takes x [G, R, C] and quantises each matrix by itself. `reference_grouped` tells
the shapes of the results. `scaled_grouped_mm` takes operands of these three kinds.

`quantize_grouped_both` is `quantize_grouped` along -1 and -2. Without offs the format must have square blocks: other
matrices are quantised apart.

`fake_quantize_grouped` and `fake_quantize_grouped_both` are for products that would dequantise operands in memory. They
return what codes and block scales of `quantize_grouped` stand for, in 16 bits (`formats.BlockFormat.values_dtype`).
With these as a plain operand and its outer scale, `scaled_grouped_mm` gives what it gives of codes and scales. `values`
says along which dimension: "rows", "columns" or "both". There scales are empty; along the other one there are codes.

`scaled_grouped_mm_library` takes swizzled operands of groups of rows, and offsets that do not decrease and end within
the rows; rows of no group mean nothing. See `templates.grouped.library`.

`scaled_mm_gathered` is `scaled_mm` of a [S, M, K] and b[index], where b is [E, N, K] and index an int [S]: few tokens
that each have an expert of their own.

`expert_weights` is how packed experts (`weights.experts`) enter a graph: quantised matrices [E, N, K], dequantised. A
product that reads them can read the codes instead, and quantise its tokens by `activation`: the name of a format, None
for none, and `activation_outer`, the static outer scale, None to compute it. Neither changes the values of the op.
"""

import torch

from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.formats import BlockFormat, unknown_name
from fp4compile.formats.groups import Groups, check_offs, padded_rows
from fp4compile.formats.layouts import ceil_div, swizzled_numel
from fp4compile.ops.dense import (
    LIBRARY,
    TAGS,
    check_layout,
    check_outer_of_both,
    check_scale_rule,
    check_training,
    columns_apart,
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
    "quantize_grouped_both(Tensor x, Tensor? offs, str format, *, Tensor? outer=None, str layout='linear',"
    " Tensor? seed=None, bool hadamard=False) -> (Tensor data, Tensor scales, Tensor outer_scale,"
    " Tensor columns, Tensor column_scales, Tensor column_outer_scale)",
    tags=TAGS,
)
LIBRARY.define(
    "fake_quantize_grouped(Tensor x, Tensor? offs, str format, int dim=-1, *, Tensor? outer=None, Tensor? seed=None,"
    " bool hadamard=False) -> (Tensor values, Tensor outer_scale)",
    tags=TAGS,
)
LIBRARY.define(
    "fake_quantize_grouped_both(Tensor x, Tensor offs, str format, str values, *, Tensor? outer=None,"
    " Tensor? seed=None, bool hadamard=False) -> (Tensor data, Tensor scales, Tensor outer_scale,"
    " Tensor columns, Tensor column_scales, Tensor column_outer_scale)",
    tags=TAGS,
)
_PRODUCT = (
    "Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor offs, SymInt rows, ScalarType out_dtype"
)
LIBRARY.define(f"scaled_grouped_mm({_PRODUCT}) -> Tensor", tags=TAGS)
LIBRARY.define(f"scaled_grouped_mm_library({_PRODUCT}) -> Tensor", tags=TAGS)
LIBRARY.define(
    "scaled_mm_gathered(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format, Tensor index, ScalarType out_dtype) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "expert_weights(Tensor data, Tensor? scales, Tensor? outer, str format, SymInt cols, ScalarType dtype,"
    " str? activation=None, float? activation_outer=None) -> Tensor",
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
    return _results(x, fmt, outer, *found)


@torch.library.impl(LIBRARY, "quantize_grouped", "CUDA")
def quantize_grouped_cuda(
    x, offs, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False, scale_rule="amax", reading=None
):
    """`quantize_grouped` by the Triton kernels; what a graph is lowered to. reading: see `ops.grouped_prologue`."""
    from fp4compile.templates.grouped import dispatch as kernels  # here, so that the CPU needs no Triton

    fmt = _checked(x, offs, format, dim, layout, seed, hadamard, scale_rule)
    found = kernels.quantize_grouped(
        x, offs, fmt, dim, outer, layout, seed=seed, transform=hadamard, scale_rule=scale_rule, reading=reading
    )  # fmt: skip
    return _results(x, fmt, outer, *found)


def _results(x, fmt: BlockFormat, given, data, scales, computed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the ops return: an empty tensor where a format has no scales, and where an outer scale was given."""
    return data, x.new_empty(0, dtype=fmt.scale_dtype) if scales is None else scales, computed_outer(x, given, computed)


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


# ---------------------------------------------------------------- quantize_grouped_both


@torch.library.impl(LIBRARY, "quantize_grouped_both", "CompositeExplicitAutograd")
def _quantize_grouped_both(x, offs, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_grouped_both(x, offs, format, outer, layout, seed, hadamard)
    rows = _quantize_grouped(x, offs, format, -1, outer=outer, layout=layout, seed=seed)
    data, scales, fresh = _quantize_grouped(
        x, offs, format, -2, outer=outer, layout=layout, seed=seed, hadamard=hadamard
    )
    return *rows, data, scales, fresh if columns_apart(format, hadamard) else x.new_empty(0, dtype=torch.float32)


@torch.library.impl(LIBRARY, "quantize_grouped_both", "CUDA")
def quantize_grouped_both_cuda(
    x, offs, format, *, outer=None, layout="linear", seed=None, hadamard=False, reading=None
):
    """`quantize_grouped_both` by the Triton kernels: one read of x, and one more for amaxes of dynamic outer scales."""
    return _both_cuda(x, offs, format, outer, layout, seed, hadamard, (False, False), reading)


def _both_cuda(x, offs, format, outer, layout, seed, hadamard, values: tuple[bool, bool], reading) -> tuple:
    """values: along the rows and along the columns, see `fake_quantize_grouped_both`."""
    from fp4compile.templates.grouped import dispatch as kernels

    fmt = _check_grouped_both(x, offs, format, outer, layout, seed, hadamard)
    rows, columns = kernels.quantize_grouped_both(
        x, offs, fmt, outer, layout, seed=seed, transform=hadamard, values=values, reading=reading
    )  # fmt: skip
    if not columns_apart(format, hadamard):  # an op may not return one outer scale twice
        columns = (*columns[:2], None)
    return *_results(x, fmt, outer, *rows), *_results(x, fmt, outer, *columns)


@torch.library.register_fake("fp4compile::quantize_grouped_both", lib=LIBRARY)
def _quantize_grouped_both_fake(x, offs, format, *, outer=None, layout="linear", seed=None, hadamard=False):
    _check_grouped_both(x, offs, format, outer, layout, seed, hadamard)
    rows = _quantize_grouped_fake(x, offs, format, -1, outer=outer, layout=layout, seed=seed)
    data, scales, fresh = _quantize_grouped_fake(
        x, offs, format, -2, outer=outer, layout=layout, seed=seed, hadamard=hadamard
    )
    return *rows, data, scales, fresh if columns_apart(format, hadamard) else x.new_empty(0, dtype=torch.float32)


def _check_grouped_both(x, offs, format: str, outer, layout: str, seed, hadamard: bool) -> BlockFormat:
    """The format. Raises as `_checked` does, and ValueError for what one op does not do in both directions."""
    fmt = _checked(x, offs, format, -2, layout, seed, hadamard, "amax")
    if offs is None and not fmt.square:
        raise ValueError(f"format: matrices are quantised in both directions in square blocks, {fmt.name} has others")
    check_outer_of_both(format, outer, hadamard)
    return fmt


# ---------------------------------------------------------------- fake_quantize_grouped

VALUES = ("rows", "columns", "both")


@torch.library.impl(LIBRARY, "fake_quantize_grouped", "CompositeExplicitAutograd")
def _fake_quantize_grouped(x, offs, format, dim=-1, *, outer=None, seed=None, hadamard=False):
    fmt = _fake_quantizable_format(x, format)
    data, scales, computed = _quantize_grouped(x, offs, format, dim, outer=outer, seed=seed, hadamard=hadamard)
    return reference.values_of(data, scales, fmt), computed


@torch.library.impl(LIBRARY, "fake_quantize_grouped", "CUDA")
def fake_quantize_grouped_cuda(x, offs, format, dim=-1, *, outer=None, seed=None, hadamard=False, reading=None):
    """`fake_quantize_grouped` by the Triton kernels that quantise; what a graph is lowered to."""
    from fp4compile.templates.grouped import dispatch as kernels

    fmt = _fake_quantizable_format(x, format)
    _checked(x, offs, format, dim, "linear", seed, hadamard, "amax")
    values, _, computed = kernels.quantize_grouped(
        x, offs, fmt, dim, outer, "linear", seed=seed, transform=hadamard, values=True, reading=reading
    )  # fmt: skip
    return values, computed_outer(x, outer, computed)


@torch.library.register_fake("fp4compile::fake_quantize_grouped", lib=LIBRARY)
def _fake_quantize_grouped_fake(x, offs, format, dim=-1, *, outer=None, seed=None, hadamard=False):
    fmt = _fake_quantizable_format(x, format)
    data, _, computed = _quantize_grouped_fake(x, offs, format, dim, outer=outer, seed=seed, hadamard=hadamard)
    return _values_like(data, fmt), computed


@torch.library.impl(LIBRARY, "fake_quantize_grouped_both", "CompositeExplicitAutograd")
def _fake_quantize_grouped_both(x, offs, format, values, *, outer=None, seed=None, hadamard=False):
    fmt, which = _fake_quantizable_format(x, format), _directions(values)
    found = _quantize_grouped_both(x, offs, format, outer=outer, seed=seed, hadamard=hadamard)
    return _with_values(found, which, lambda data, scales: reference.values_of(data, scales, fmt))


@torch.library.impl(LIBRARY, "fake_quantize_grouped_both", "CUDA")
def fake_quantize_grouped_both_cuda(x, offs, format, values, *, outer=None, seed=None, hadamard=False, reading=None):
    """`fake_quantize_grouped_both` by the Triton kernels of `quantize_grouped_both`."""
    _fake_quantizable_format(x, format)
    return _both_cuda(x, offs, format, outer, "linear", seed, hadamard, _directions(values), reading)


@torch.library.register_fake("fp4compile::fake_quantize_grouped_both", lib=LIBRARY)
def _fake_quantize_grouped_both_fake(x, offs, format, values, *, outer=None, seed=None, hadamard=False):
    fmt, which = _fake_quantizable_format(x, format), _directions(values)
    found = _quantize_grouped_both_fake(x, offs, format, outer=outer, seed=seed, hadamard=hadamard)
    return _with_values(found, which, lambda data, scales: _values_like(data, fmt))


def fake_quantizable(fmt: BlockFormat, dtype: torch.dtype) -> bool:
    """Whether 16 bits hold the values of the format, made of numbers of the dtype (`BlockFormat.values_dtype`)."""
    return fmt.scale == "e4m3" or (fmt.scale == "e8m0" and dtype.itemsize == 2)


def _fake_quantizable_format(x: torch.Tensor, format: str) -> BlockFormat:
    fmt = formats.get(format)
    if not fake_quantizable(fmt, x.dtype):
        raise ValueError(f"format: 16 bits hold the values of NVFP4, and of MX formats made of 16-bit numbers; "
                         f"got {fmt.name} of {x.dtype}")  # fmt: skip
    return fmt


def _directions(values: str) -> tuple[bool, bool]:
    """Whether there are values along the rows, and along the columns."""
    if values not in VALUES:
        raise ValueError(unknown_name("values", values, VALUES))
    return values != "columns", values != "rows"


def _with_values(found: tuple, which: tuple[bool, bool], values) -> tuple:
    """The results of `quantize_grouped_both` with `values` of data and scales where `which` says so."""
    results: list[torch.Tensor] = []
    for wanted, (data, scales, outer) in zip(which, (found[:3], found[3:]), strict=True):
        results += (values(data, scales), scales.new_empty(0), outer) if wanted else (data, scales, outer)
    return tuple(results)


def _values_like(data: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """An empty tensor for the values of codes."""
    per_byte = 2 if fmt.packed else 1
    return data.new_empty((*data.shape[:-1], data.shape[-1] * per_byte), dtype=fmt.values_dtype)


# ---------------------------------------------------------------- scaled_grouped_mm


@torch.library.impl(LIBRARY, "scaled_grouped_mm", "CompositeExplicitAutograd")
def _scaled_grouped_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype):
    _check_product(a, b, offs, rows)
    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return reference_grouped.scaled_grouped_mm(a, b, offs, rows, out_dtype)


@torch.library.impl(LIBRARY, "scaled_grouped_mm", "CUDA")
def scaled_grouped_mm_cuda(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, choice=None
):
    """`scaled_grouped_mm` by the kernel of a `GroupedChoice`; what a graph is lowered to."""
    from fp4compile.templates.grouped.dispatch import scaled_grouped_mm

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return scaled_grouped_mm(a, b, offs, rows, out_dtype, choice)


@torch.library.register_fake("fp4compile::scaled_grouped_mm", lib=LIBRARY)
def _scaled_grouped_mm_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype):
    _check_product(a, b, offs, rows)
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


# A graph holds this op only after it was lowered: torch up to 2.13 has no fake implementation of the block-scaled
# product of its library, and Inductor cannot time products of views (`_compat.times_products`).
torch.library.impl(LIBRARY, "scaled_grouped_mm_library", "CompositeExplicitAutograd")(_scaled_grouped_mm)
torch.library.register_fake("fp4compile::scaled_grouped_mm_library", lib=LIBRARY)(_scaled_grouped_mm_fake)


@torch.library.impl(LIBRARY, "scaled_grouped_mm_library", "CUDA")
def scaled_grouped_mm_library_cuda(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype
):  # fmt: skip
    """Block-scaled operands by MSLK's kernels on SM100; `float8_rowwise` operands by CUTLASS on Hopper."""
    from fp4compile.templates.grouped.library import product

    a, b = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return product(a, b, offs, out_dtype)


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


@torch.library.impl(LIBRARY, "scaled_mm_gathered", "CUDA")
def scaled_mm_gathered_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    """`scaled_mm_gathered` by a kernel that reads the matrices through the index, or else of a copy of them."""
    _check_gathered(a, b, index)
    from fp4compile.templates.grouped import indexed
    from fp4compile.templates.launch import target_of

    left, right = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    if indexed.serves(left, right, index, out_dtype, target_of(a.device)):
        return indexed.scaled_mm_gathered(left, right, index, out_dtype)
    return _scaled_mm_gathered(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype)


@torch.library.register_fake("fp4compile::scaled_mm_gathered", lib=LIBRARY)
def _scaled_mm_gathered_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    _check_gathered(a, b, index)
    return a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)


def _check_gathered(a, b, index) -> None:
    expected = (
        f"a, b, index: expected [S, M, K], [E, N, K] and [S]; got shapes {tuple(a.shape)}, {tuple(b.shape)} and "
        f"{tuple(index.shape)}"
    )
    if a.dim() != 3 or b.dim() != 3 or index.dim() != 1:
        raise ValueError(expected)
    torch._check_value(a.shape[0] == index.shape[0], lambda: expected)


def _taken(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """x[index] of any dtype: as bytes where torch takes no elements of it."""
    if x.dim() == 0:
        return x
    return x.view(torch.uint8)[index].view(x.dtype) if x.element_size() == 1 else x[index]


# ---------------------------------------------------------------- expert_weights


@torch.library.impl(LIBRARY, "expert_weights", "CompositeExplicitAutograd")
def _expert_weights(data, scales, outer, format, cols, dtype, activation=None, activation_outer=None):
    if outer is not None and outer.dim() == 1:  # one a matrix; `dequantize` takes one a row
        outer = outer.view(-1, 1, 1).expand(-1, data.shape[1], 1).contiguous()
    return torch.ops.fp4compile.dequantize(data, scales, outer, format, cols, dtype)


@torch.library.register_fake("fp4compile::expert_weights", lib=LIBRARY)
def _expert_weights_fake(data, scales, outer, format, cols, dtype, activation=None, activation_outer=None):
    return data.new_empty((*data.shape[:-1], cols), dtype=dtype)
