"""The ops that multiply quantised operands.

    fp4compile::scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype,
                          operands, epilogue, dtype, fast_accumulation, b_transposed) -> product
    fp4compile::scaled_mm_horizontal(..., list of b, ...) -> products of one a; see `passes.fuse_horizontal`
    fp4compile::scaled_grouped_mm(a, ..., b, ..., offs, rows, out_dtype, fast_accumulation) -> the products of groups
    fp4compile::scaled_mm_gathered(a, ..., b, ..., index, out_dtype) -> product
    fp4compile::scaled_mm_library, fp4compile::scaled_grouped_mm_library -> a product by one call of a library

`scaled_mm`. A [..., M, K] and B [..., N, K] are both stored with the contraction last; an operand without a format is
plain. epilogue: steps that follow the product, which is rounded to out_dtype (`formats.epilogue`); `operands` are the
tensors that the steps read, and dtype is the dtype of their result. fast_accumulation: FP8 matrix units may keep the
sums in fewer bits than float32 has; the reference never does. b_transposed: B is NVFP4 weights [K, N], with codes along
N, of which the rows are contracted: the gradient of the input of a layer with packed weights. A is then plain, in 16
bits.

`scaled_grouped_mm`. `formats.reference_grouped` explains the shapes of its operands, which `quantize` makes with offs
or each_matrix.

`scaled_mm_gathered` is `scaled_mm` of a [S, M, K] and b[index], where b is [E, N, K] and index an int [S]: few tokens
with an expert for each.

`passes.lower` puts the library ops into a graph. Inductor cannot lower `aten._scaled_mm_v2` with swizzled scales; torch
up to 2.13 has no fake implementation of the block-scaled grouped product; and Inductor cannot time products of views
(`_compat.times_products`). Inductor leaves ops without a lowering as they are.
"""

import torch

from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.checks import check_bias
from fp4compile.formats.epilogue import Epilogue, apply
from fp4compile.formats.groups import check_offs
from fp4compile.formats.operand import Operand
from fp4compile.ops.define import define
from fp4compile.templates import multiply
from fp4compile.templates.gemm import indexed
from fp4compile.templates.launch import target_of

_OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format"
)


def operand(data, scales, outer, format: str | None) -> Operand:
    """The operand of these schema arguments."""
    return Operand(data, scales, outer, None if format is None else formats.get(format))


def _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format) -> tuple[Operand, Operand]:
    return operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)


# ---------------------------------------------------------------- scaled_mm


def scaled_mm_reference(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands=None, epilogue=None,
    dtype=None, fast_accumulation=False, b_transposed=False,
):  # fmt: skip
    """`scaled_mm` by the reference."""
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    product = reference.scaled_mm(a, b, bias, out_dtype, b_transposed)
    if epilogue is None:
        return product
    return apply(product, Epilogue.parse(epilogue, out_dtype, dtype), operands or [])


def scaled_mm_kernels(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands=None, epilogue=None,
    dtype=None, fast_accumulation=False, b_transposed=False, choice=None,
):  # fmt: skip
    """`scaled_mm` by the kernel of a `Choice`; None chooses one."""
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    steps = None if epilogue is None else Epilogue.parse(epilogue, out_dtype, dtype)
    return multiply.scaled_mm(a, b, bias, out_dtype, steps, operands or [], choice, fast_accumulation, b_transposed)


def scaled_mm_shapes(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands=None, epilogue=None,
    dtype=None, fast_accumulation=False, b_transposed=False,
):  # fmt: skip
    """An empty tensor like the result of `scaled_mm`."""
    n = operand(b, b_scales, b_outer, b_format).k if b_transposed else b.shape[-2]
    check_bias(bias, n)
    return a.new_empty((*a.shape[:-1], n), dtype=out_dtype if epilogue is None else dtype)


SCALED_MM = define(
    f"scaled_mm({_OPERANDS}, Tensor? bias, ScalarType out_dtype, Tensor[]? operands=None, str[]? epilogue=None,"
    " ScalarType? dtype=None, bool fast_accumulation=False, bool b_transposed=False) -> Tensor",
    reference=scaled_mm_reference,
    shapes=scaled_mm_shapes,
    kernels=scaled_mm_kernels,
)


# ---------------------------------------------------------------- scaled_mm_horizontal


def scaled_mm_horizontal_reference(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """`scaled_mm_horizontal` by the reference."""
    a = operand(a, a_scales, a_outer, a_format)
    group = _horizontal(b, b_scales, b_outer, b_format, bias)
    return [reference.scaled_mm(a, each, each_bias, out_dtype) for each, each_bias in group]


def scaled_mm_horizontal_kernels(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """`scaled_mm_horizontal` by the Triton kernels."""
    group = _horizontal(b, b_scales, b_outer, b_format, bias)
    return multiply.scaled_mm_group(operand(a, a_scales, a_outer, a_format), group, out_dtype)


def scaled_mm_horizontal_shapes(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """Empty tensors like the results of `scaled_mm_horizontal`."""
    group = _horizontal(b, b_scales, b_outer, b_format, bias)
    return [a.new_empty((*a.shape[:-1], each.data.shape[-2]), dtype=out_dtype) for each, _ in group]


def _horizontal(b, b_scales, b_outer, b_format: str, bias) -> list[tuple[Operand, torch.Tensor | None]]:
    """(B, bias) of each product. Raises ValueError for a list that is neither empty nor of one element a product."""
    for name, given in (("b_scales", b_scales), ("b_outer", b_outer), ("bias", bias)):
        if given and len(given) != len(b):
            raise ValueError(f"{name}: expected none or one for each of {len(b)} products, got {len(given)}")
    each = zip(b, *(given or [None] * len(b) for given in (b_scales, b_outer, bias)), strict=True)
    return [(operand(data, scales, outer, b_format), own_bias) for data, scales, outer, own_bias in each]


SCALED_MM_HORIZONTAL = define(
    "scaled_mm_horizontal(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format, Tensor[] b, Tensor[] b_scales,"
    " Tensor[] b_outer, str b_format, Tensor[] bias, ScalarType out_dtype) -> Tensor[]",
    reference=scaled_mm_horizontal_reference,
    shapes=scaled_mm_horizontal_shapes,
    kernels=scaled_mm_horizontal_kernels,
)


# ---------------------------------------------------------------- scaled_grouped_mm


def scaled_grouped_mm_reference(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, fast_accumulation=False
):
    """`scaled_grouped_mm` by the reference."""
    _check_grouped(a, b, offs, rows)
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    return reference_grouped.scaled_grouped_mm(a, b, offs, rows, out_dtype)


def scaled_grouped_mm_kernels(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, fast_accumulation=False,
    choice=None,
):  # fmt: skip
    """`scaled_grouped_mm` by the kernel of a choice; None chooses one."""
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    return multiply.scaled_grouped_mm(a, b, offs, rows, out_dtype, choice, fast_accumulation)


def scaled_grouped_mm_shapes(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, fast_accumulation=False
):
    """An empty tensor like the result of `scaled_grouped_mm`."""
    _check_grouped(a, b, offs, rows)
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=out_dtype)


def _check_grouped(a, b, offs, rows) -> None:
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise ValueError(f"a, b: expected [M, K] and [G, N, K], or [P, W] and [Q, W]; got shapes {tuple(a.shape)} and "
                         f"{tuple(b.shape)}")  # fmt: skip
    check_offs(offs, b.shape[0] if b.dim() == 3 else None)
    if b.dim() == 3:
        torch._check_value(a.shape[0] == rows, lambda: f"rows: expected the {a.shape[0]} rows of a, got {rows}")


_GROUPED = f"({_OPERANDS}, Tensor offs, SymInt rows, ScalarType out_dtype, bool fast_accumulation=False) -> Tensor"
SCALED_GROUPED_MM = define(
    f"scaled_grouped_mm{_GROUPED}",
    reference=scaled_grouped_mm_reference,
    shapes=scaled_grouped_mm_shapes,
    kernels=scaled_grouped_mm_kernels,
)


# ---------------------------------------------------------------- scaled_mm_gathered


def scaled_mm_gathered_reference(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    """`scaled_mm_gathered` by `scaled_mm` of a copy of the selected matrices."""
    taken = (None if t is None else _taken(t, index) for t in (b, b_scales, b_outer))
    return SCALED_MM(a, a_scales, a_outer, a_format, *taken, b_format, None, out_dtype)


def scaled_mm_gathered_kernels(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    """`scaled_mm_gathered` by a kernel that reads the matrices through the index, or else by `scaled_mm` of a copy."""
    _check_gathered(a, b, index)
    left, right = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    if indexed.serves(left, right, index, out_dtype, target_of(a.device)):
        return indexed.scaled_mm_gathered(left, right, index, out_dtype)
    return scaled_mm_gathered_reference(
        a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype
    )


def scaled_mm_gathered_shapes(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    """An empty tensor like the result of `scaled_mm_gathered`."""
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
    """x[index] for any dtype; one-byte dtypes are indexed as uint8, because torch cannot index all of them."""
    if x.dim() == 0:
        return x
    return x.view(torch.uint8)[index].view(x.dtype) if x.element_size() == 1 else x[index]


SCALED_MM_GATHERED = define(
    f"scaled_mm_gathered({_OPERANDS}, Tensor index, ScalarType out_dtype) -> Tensor",
    reference=scaled_mm_gathered_reference,
    shapes=scaled_mm_gathered_shapes,
    kernels=scaled_mm_gathered_kernels,
)


# ---------------------------------------------------------------- products of libraries


def scaled_mm_library_kernels(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, fast_accumulation=False
):
    """Multiply [M, K] x [N, K] by a call of torch: two-level NVFP4 on SM100, or `float8_rowwise`."""
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    return multiply.scaled_mm_library(a, b, bias, out_dtype, fast_accumulation)


def scaled_mm_library_reference(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, fast_accumulation=False
):
    """`scaled_mm_library` by the reference of `scaled_mm`."""
    return scaled_mm_reference(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype)


def scaled_mm_library_shapes(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, fast_accumulation=False
):
    """An empty tensor like the result of `scaled_mm_library`."""
    return scaled_mm_shapes(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype)


SCALED_MM_LIBRARY = define(
    f"scaled_mm_library({_OPERANDS}, Tensor? bias, ScalarType out_dtype, bool fast_accumulation=False) -> Tensor",
    reference=scaled_mm_library_reference,
    shapes=scaled_mm_library_shapes,
    kernels=scaled_mm_library_kernels,
    lowered=False,
)


def scaled_grouped_mm_library_kernels(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, fast_accumulation=False
):
    """Multiply block-scaled operands by MSLK's kernels on SM100, `float8_rowwise` operands by CUTLASS on Hopper."""
    a, b = _pair(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format)
    return multiply.scaled_grouped_mm_library(a, b, offs, out_dtype, fast_accumulation)


SCALED_GROUPED_MM_LIBRARY = define(
    f"scaled_grouped_mm_library{_GROUPED}",
    reference=scaled_grouped_mm_reference,
    shapes=scaled_grouped_mm_shapes,
    kernels=scaled_grouped_mm_library_kernels,
    lowered=False,
)
