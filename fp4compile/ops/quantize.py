"""The ops that quantise and dequantise.

    fp4compile::quantize(x, format, dim, *, offs, outer, seed, layout, hadamard, scale_rule, each_matrix, values,
                         operands, prologue, dtype, stored, amax)
        -> (data, scales, outer) along each dimension of `dim` in turn, then each of `stored`
    fp4compile::lay_out_scales(scales, offs) -> scales
    fp4compile::dequantize(data, scales, outer, format, cols, dtype, activation, activation_outer, *, offs) -> values
    fp4compile::gathered_weight(rows, row_scales, row_outer, fprop, columns, column_scales, column_outer, dgrad, cols,
                                dtype, recompute) -> weight

`quantize`. `QuantizeSpec` explains the options. A result that a call does not have is an empty tensor [0]: block scales
of dequantised values or of a format without block scales; a global or row scale that is static, that the format lacks,
or that the columns share with the rows. offs: int32 [G], which cut the rows of a matrix x in groups
(`formats.grouping`). prologue: steps that are computed first, in float32 (`formats.prologue`); x is their first
operand, and `operands` are the others. dtype: the dtype to which the steps' result is rounded before it is quantised.
stored: results of steps that are also returned, each rounded to a dtype ("s3 bfloat16"). amax: float32, of the shape of
the global scale (of the tensor, each matrix, or each group of rows) or the row scales, which are made of it; for an x
that is a part of a larger tensor, or whose amax is known. For the global scale of a tensor it may be [P], P a power of
two: the largest of these magnitudes counts. None computes the amax of x.

`lay_out_scales` converts linear block scales of rows to the swizzled layout, for rows that were moved after they were
quantised. offs: as in `quantize`; the rows of each group are padded.

`dequantize` with `activation` puts packed experts (`weights.experts`) into a graph: matrices [E, N, K], with a global
scale for each, [E]. A matmul of its result can read the codes instead, and quantise its tokens to the format
`activation` ("plain": not at all) with the static global scale `activation_outer`, float32 [] (None: computed). Neither
argument changes the result of this op. offs: as in `quantize`, for rows whose groups have a global scale each, [G].

`gathered_weight` puts a weight [N, K] that FSDP2 gathered as codes (`distributed`) into a graph: it dequantises the
codes along the rows. A forward matmul can read these codes instead, in the format `fprop`, and the matmul for the
input gradient the codes along the columns, [K, N] in the format `dgrad`. recompute: whether the codes along the rows
also exist in the backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fp4compile.formats import formats, reference, reference_scales
from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.grouping import Groups, grouping_of, padded_rows
from fp4compile.formats.layouts import swizzled_numel
from fp4compile.formats.prologue import Prologue, apply
from fp4compile.formats.quantize_spec import COLUMNS, ROWS, QuantizeSpec
from fp4compile.formats.reference_grouped import lay_out_rows, quantize_along
from fp4compile.ops.define import define

Tensors = list[torch.Tensor]


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """A call of `quantize`: its spec and its tensors. x: with the quantised dimension last or last but one."""

    spec: QuantizeSpec
    x: torch.Tensor
    operands: Sequence[torch.Tensor]
    offs: torch.Tensor | None
    outer: torch.Tensor | None
    seed: torch.Tensor | None
    amax: torch.Tensor | None


def call_of(
    x, format, dim=(ROWS,), *, offs=None, outer=None, seed=None, layout="linear", hadamard=False, scale_rule="amax",
    each_matrix=False, values=None, operands=None, prologue=None, dtype=None, stored=None, amax=None,
) -> QuantizeCall:  # fmt: skip
    """The call of `quantize` with these arguments. Raises the errors of `QuantizeSpec`."""
    dims, rank = tuple(dim) if isinstance(dim, Sequence) else (dim,), x.dim()
    if any(not -rank <= d < rank for d in dims):
        raise ValueError(f"dim={list(dims)}: x has {rank} dimensions")
    dims = tuple(d - rank if d >= 0 else d for d in dims)
    if len(dims) == 1 and dims[0] not in (ROWS, COLUMNS) and offs is None and not each_matrix:
        x, dims = x.movedim(dims[0], -1).transpose(-2, -1), (COLUMNS,)
    spec = _made(
        format, dims, layout, hadamard, scale_rule, tuple(values or ()), grouping_of(offs, each_matrix),
        outer is not None, seed is not None, tuple(prologue or ()), dtype or x.dtype, tuple(stored or ()),
    )  # fmt: skip
    spec.check_tensors(x, offs, outer, seed)
    spec.check_operands((x, *(operands or ())))
    for argument, value in (("dtype", dtype), ("stored", stored)):
        if value and not prologue:
            raise ValueError(f"{argument}: goes with a prologue, which this call has not")
    if amax is not None:
        spec.check_amax(amax, x, 0 if offs is None else offs.shape[0])
    return QuantizeCall(spec, x, operands or (), offs, outer, seed, amax)


@cache
def _made(
    format, dims, layout, hadamard, scale_rule, values, grouping, static, seeded, prologue, dtype, stored
) -> QuantizeSpec:
    """The spec of a call's arguments; equal calls share one spec."""
    steps = Prologue.parse(prologue, dtype, stored) if prologue else None
    return QuantizeSpec(formats.get(format), dims, layout, hadamard, scale_rule, values, grouping, static,
                        seeded, steps)  # fmt: skip


def _by_reference(*args: Any, **options: Any) -> Tensors:
    call = call_of(*args, **options)
    x, written = call.x, ()
    if call.spec.prologue is not None:
        x, written = apply(call.spec.prologue, (x, *call.operands))
    found = [quantize_along(call.spec, x, d, call.offs, call.outer, call.seed, call.amax) for d in call.spec.dims]
    return _results(call.spec, x, found, written)


def quantize_kernels(*args: Any, **options: Any) -> Tensors:
    """`quantize` by the Triton kernels: one read of x, and a second one where a global scale needs the amax first."""
    from fp4compile.templates.quantize import launches  # here and below: declaring the ops needs no Triton

    call = call_of(*args, **options)
    found, written = launches.quantize(call.spec, call.x, call.operands, call.offs, call.outer, call.seed, call.amax)
    return _results(call.spec, call.x, found, written)


def _results(spec: QuantizeSpec, x: torch.Tensor, found: Sequence[tuple], written: Sequence[torch.Tensor]) -> Tensors:
    """The op's list of results. Those that a call does not have, or that are its inputs, become empty tensors.

    found: data, scales and outer along each dimension. written: the tensors that the prologue stores.
    """
    returned: Tensors = []
    for dim, (data, scales, outer) in zip(spec.dims, found, strict=True):
        returned += [
            data,
            x.new_empty(0, dtype=spec.format.scale_dtype) if scales is None else scales,
            outer if spec.computes_outer(dim) else x.new_empty(0, dtype=torch.float32),
        ]
    return [*returned, *written]


def _shapes(*args: Any, **options: Any) -> Tensors:
    call = call_of(*args, **options)
    spec, x, fmt = call.spec, call.x, call.spec.format
    found: Tensors = []
    for d in spec.dims:
        data, scales, computed = spec.shapes(x, 0 if call.offs is None else call.offs.shape[0], d)
        found += [
            x.new_empty(data, dtype=fmt.values_dtype if d in spec.values else fmt.data_dtype),
            x.new_empty(scales, dtype=fmt.scale_dtype),
            x.new_empty(computed, dtype=torch.float32),
        ]
    return found + ([] if spec.prologue is None else list(spec.prologue.empty_stored(x)))


QUANTIZE = define(
    "quantize(Tensor x, str format, int[1] dim=-1, *, Tensor? offs=None, Tensor? outer=None, Tensor? seed=None,"
    " str layout='linear', bool hadamard=False, str scale_rule='amax', bool each_matrix=False, int[]? values=None,"
    " Tensor[]? operands=None, str[]? prologue=None, ScalarType? dtype=None, str[]? stored=None, Tensor? amax=None)"
    " -> Tensor[]",
    reference=_by_reference,
    shapes=_shapes,
    kernels=quantize_kernels,
)


def best_scales(x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor) -> torch.Tensor:
    """The linear block scales of least error of x [..., R, K], without codes.

    outer: float32 [], or [B] for each matrix of x [B, R, K].
    """
    if fmt.scale == "e4m3" and x.is_cuda and x.numel():
        from fp4compile.templates import scale_sweep

        return scale_sweep.best_scales(x, fmt, outer)
    blocks = reference._blocks(x.float(), fmt)
    if fmt.scale == "e8m0":
        return reference_scales.best_powers(blocks)
    return reference_scales.best_scales(blocks, outer.view(-1, 1, 1) if outer.dim() else outer)


# ---------------------------------------------------------------- lay_out_scales


def _laid_out_shapes(scales, offs=None):
    *batch, rows, blocks = scales.shape
    rows = rows if offs is None else padded_rows(rows, offs.shape[0])
    return scales.new_empty((*batch, swizzled_numel(rows, blocks)))


def lay_out_kernels(scales, offs=None):
    """`lay_out_scales` by the Triton kernel."""
    from fp4compile.templates.quantize.lay_out import lay_out

    return lay_out(scales, offs)


LAY_OUT_SCALES = define(
    "lay_out_scales(Tensor scales, Tensor? offs=None) -> Tensor",
    reference=lambda scales, offs=None: lay_out_rows(scales, offs),
    shapes=_laid_out_shapes,
    kernels=lay_out_kernels,
)


# ---------------------------------------------------------------- dequantize


def dequantize_kernels(data, scales, outer, format, cols, dtype, *_, offs=None):
    """`dequantize` by the Triton kernel."""
    from fp4compile.templates.quantize import dequantize as kernels

    return kernels.dequantize(data, scales, _of_rows(outer, data, offs), formats.get(format), cols, dtype)


def _of_rows(outer, data, offs):
    """Global or row scales; those of each matrix, or each group of rows, are repeated for its rows."""
    if outer is None or outer.dim() != 1:
        return outer
    if offs is not None:  # a row of no group takes any scale
        groups = Groups.of(offs, data.shape[0])
        return outer[groups.of_rows.clamp(max=groups.count - 1)].unsqueeze(-1)
    if data.dim() != 3:
        return outer
    return outer.view(-1, 1, 1).expand(-1, data.shape[1], 1).contiguous()


DEQUANTIZE = define(
    "dequantize(Tensor data, Tensor? scales, Tensor? outer, str format, SymInt cols, ScalarType dtype,"
    " str? activation=None, Tensor? activation_outer=None, *, Tensor? offs=None) -> Tensor",
    reference=lambda data, scales, outer, format, cols, dtype, *_, offs=None: reference.dequantize(
        data, scales, _of_rows(outer, data, offs), formats.get(format), cols, dtype
    ),
    shapes=lambda data, scales, outer, format, cols, dtype, *_, offs=None: data.new_empty(
        (*data.shape[:-1], cols), dtype=dtype
    ),
    kernels=dequantize_kernels,
)


# ---------------------------------------------------------------- gathered_weight


def gathered_weight(rows, row_scales, row_outer, fprop, *others):
    """`gathered_weight` by `dequantize`."""
    *_, cols, dtype, _ = others  # after the codes along the columns
    return DEQUANTIZE(rows, row_scales, row_outer, fprop, cols, dtype)


def gathered_weight_shapes(rows, *others):
    """An empty tensor like the result of `gathered_weight`."""
    *_, cols, dtype, _ = others
    return rows.new_empty((rows.shape[0], cols), dtype=dtype)


GATHERED_WEIGHT = define(
    "gathered_weight(Tensor rows, Tensor? row_scales, Tensor? row_outer, str fprop, Tensor columns,"
    " Tensor? column_scales, Tensor? column_outer, str dgrad, SymInt cols, ScalarType dtype, bool recompute) -> Tensor",
    reference=gathered_weight,
    shapes=gathered_weight_shapes,
    kernels=gathered_weight,
    lowered=False,
)
