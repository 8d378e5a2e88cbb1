"""The ops that multiply quantised operands.

    fp4compile::scaled_mm(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype,
                          operands, epilogue, dtype, fast_accumulation) -> product
    fp4compile::scaled_mm_quantized(a, ..., b, ..., bias, out_dtype, operands, epilogue, dtype, outer, offs)
        -> (data, scales) of the product, or of the products of groups
    fp4compile::scaled_mm_amax(a, ..., b, ..., bias, out_dtype, operands, epilogue, dtype, offs)
        -> (product, maxima), or the products of groups and a maximum of each
    fp4compile::scaled_mm_horizontal(..., list of b, ...) -> products of one a; see `passes.fuse_horizontal`
    fp4compile::scaled_grouped_mm(a, ..., b, ..., offs, rows, out_dtype, fast_accumulation) -> the products of groups
    fp4compile::scaled_mm_gathered(a, ..., b, ..., index, out_dtype) -> product
    fp4compile::scaled_mm_library, fp4compile::scaled_grouped_mm_library -> a product by one call of a library
    fp4compile::scaled_mm_two_ctas(as scaled_mm_quantized) -> what the op of the epilogue's end returns, in a list

`scaled_mm`. A [..., M, K] and B [..., N, K] are both stored with the contraction last; an operand without a format is
plain. epilogue: steps that follow the product, which is rounded to out_dtype (`formats.epilogue`); `operands` are the
tensors that the steps read, and dtype is the dtype of their result. fast_accumulation: FP8 matrix units may keep the
sums in fewer bits than float32 has; the reference never does.

`scaled_mm_quantized` is `scaled_mm` whose epilogue ends in "quantize" and a format: the result is rounded to dtype and
quantised along its rows. It returns codes and swizzled block scales, as `quantize` does. outer: the static outer scale
of a format that has one. offs: where groups of rows end, each of which has a matrix of B, as in `scaled_grouped_mm`;
the results are what `quantize` returns for the same offs. B of two products is then [G, 2 N, K], or [2 G, N, K]: all
matrices of the first product, and behind them all matrices of the second.

`scaled_mm_amax` is `scaled_mm` whose epilogue ends in "amax". It returns the result, and float32 magnitudes [P], the
largest of which is the result's amax: `quantize` takes them. Which of them is the largest depends on the device. offs:
as in `scaled_mm_quantized`; the magnitudes are then [G], the amax of each group, and rows of no group are zeros.

`scaled_grouped_mm`. `formats.reference_grouped` explains the shapes of its operands, which `quantize` makes with offs
or each_matrix.

`scaled_mm_gathered` is `scaled_mm` of a [S, M, K] and b[index], where b is [E, N, K] and index an int [S]: few tokens
with an expert for each.

`passes.lower` puts the library ops into a graph. Inductor cannot lower `aten._scaled_mm_v2` with swizzled scales; torch
up to 2.13 has no fake implementation of the block-scaled grouped product; and Inductor cannot time products of views
(`_compat.times_products`). `scaled_mm_two_ctas` multiplies on pairs of CTAs, for `scaled_mm`, `scaled_mm_quantized`,
`scaled_mm_amax` or, with offs, `scaled_grouped_mm`. It is there because Inductor compiles kernels of a graph as Triton
and not as Gluon. Inductor leaves ops without a lowering as they are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fp4compile.formats import formats, reference, reference_grouped
from fp4compile.formats.checks import check_amax, check_bias, check_quantize
from fp4compile.formats.epilogue import PARTIAL_MAXIMA, Epilogue, apply
from fp4compile.formats.groups import check_offs
from fp4compile.formats.operand import Arguments, Operand
from fp4compile.formats.quantize_spec import ROWS
from fp4compile.formats.reference_grouped import quantize_along
from fp4compile.ops.define import define

if TYPE_CHECKING:
    from fp4compile.templates.choose import Choice

_OPERANDS = (
    "Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format,"
    " Tensor b, Tensor? b_scales, Tensor? b_outer, str? b_format"
)


def operand(data, scales, outer, format: str | None) -> Operand:
    """The operand of these schema arguments."""
    return Operand(data, scales, outer, None if format is None else formats.get(format))


def _kernels() -> Any:
    """The functions of `templates.multiply`, imported at the first launch: declaring the ops needs no Triton."""
    from fp4compile.templates import multiply

    return multiply


# ---------------------------------------------------------------- scaled_mm


def dense(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands=None, epilogue=None,
    dtype=None, fast_accumulation=False,
) -> Arguments:  # fmt: skip
    """The arguments of `scaled_mm`."""
    steps = None if epilogue is None else Epilogue.parse(epilogue, out_dtype, dtype)
    if steps is not None and (steps.quantize is not None or steps.amax):
        op = (
            "scaled_mm_amax, which returns maxima, too"
            if steps.amax
            else ("scaled_mm_quantized, which returns codes and scales")
        )
        raise ValueError(f"epilogue: {epilogue[-1]!r} is a step of {op}")
    left, right = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return Arguments(left, right, bias, out_dtype, steps, operands or [], fast_accumulation=fast_accumulation)


def scaled_mm_kernels(
    *args: Any, choice: "Choice | None" = None, arranged_a: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """`scaled_mm` by the kernel of a `Choice`; None chooses one. arranged_a: see `templates.gemm.call.Call`."""
    return _kernels().multiply(dense(*args, **options), choice, arranged_a)


def _by_reference(x: Arguments) -> torch.Tensor:
    b = x.b
    if x.offs is not None:
        weights = [b] if not x.two_weights else reference_grouped.halves(b)
        products = (reference_grouped.scaled_grouped_mm(x.a, one, x.offs, x.a.data.shape[0], x.out_dtype)
                    for one in weights)  # fmt: skip
        product = torch.cat(tuple(products), -1)
    else:
        if b.outer is not None and b.outer.dim() == 1:  # of two matrices, one below the other
            b = replace(b, outer=b.outer.repeat_interleave(b.data.shape[-2] // 2).unsqueeze(-1))
        product = reference.scaled_mm(x.a, b, x.bias, x.out_dtype)
    return product if x.epilogue is None else apply(product, x.epilogue, x.auxiliaries)


def _like_product(x: Arguments) -> torch.Tensor:
    """An empty tensor like the result."""
    columns = x.b.data.shape[-2]
    check_bias(x.bias, columns)
    dtype = x.out_dtype if x.epilogue is None else x.epilogue.dtype
    if x.epilogue is not None and x.epilogue.pair and not x.two_weights:
        columns = columns // 2
    return x.a.data.new_empty((*x.a.data.shape[:-1], columns), dtype=dtype)


SCALED_MM = define(
    f"scaled_mm({_OPERANDS}, Tensor? bias, ScalarType out_dtype, Tensor[]? operands=None, str[]? epilogue=None,"
    " ScalarType? dtype=None, bool fast_accumulation=False) -> Tensor",
    reference=lambda *args, **options: _by_reference(dense(*args, **options)),
    shapes=lambda *args, **options: _like_product(dense(*args, **options)),
    kernels=scaled_mm_kernels,
)


# ---------------------------------------------------------------- scaled_mm_quantized


def dense_quantized(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype, operands, epilogue, dtype,
    outer=None, offs=None,
) -> Arguments:  # fmt: skip
    """The arguments of `scaled_mm_quantized` and of `scaled_mm_two_ctas`."""
    steps = None if epilogue is None else Epilogue.parse(epilogue, out_dtype, dtype)
    left, right = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return Arguments(left, right, bias, out_dtype, steps, operands, outer, offs)


def scaled_mm_quantized_kernels(*args: Any, choice: "Choice | None" = None, **options: Any) -> list[torch.Tensor]:
    """`scaled_mm_quantized` by the kernel of a `Choice`; None chooses one."""
    return list(_kernels().multiply_quantized(dense_quantized(*args, **options), choice))


def _quantized_reference(x: Arguments) -> list[torch.Tensor]:
    check_quantize(x)
    if x.offs is not None:
        _check_grouped(x)
    data, scales, _ = quantize_along(x.result_spec, _by_reference(x), ROWS, x.offs, x.result_outer, None)
    return [data, scales]


def _quantized_shapes(x: Arguments) -> list[torch.Tensor]:
    check_quantize(x)
    if x.offs is not None:
        _check_grouped(x)
    spec, product = x.result_spec, _like_product(x)
    data, scales, _ = spec.shapes(product, 0 if x.offs is None else x.offs.shape[0], ROWS)
    return [product.new_empty(data, dtype=spec.format.data_dtype),
            product.new_empty(scales, dtype=spec.format.scale_dtype)]  # fmt: skip


SCALED_MM_QUANTIZED = define(
    f"scaled_mm_quantized({_OPERANDS}, Tensor? bias, ScalarType out_dtype, Tensor[] operands, str[] epilogue,"
    " ScalarType dtype, Tensor? outer=None, Tensor? offs=None) -> Tensor[]",
    reference=lambda *args, **options: _quantized_reference(dense_quantized(*args, **options)),
    shapes=lambda *args, **options: _quantized_shapes(dense_quantized(*args, **options)),
    kernels=scaled_mm_quantized_kernels,
)


# ---------------------------------------------------------------- scaled_mm_amax


def dense_amax(*args: Any, **options: Any) -> Arguments:
    """The arguments of `scaled_mm_amax`: `scaled_mm_quantized` has a static outer scale before the offsets."""
    return dense_quantized(*args[:13], None, *args[13:], **options)


def scaled_mm_amax_kernels(*args: Any, choice: "Choice | None" = None, **options: Any) -> list[torch.Tensor]:
    """`scaled_mm_amax` by the kernel of a `Choice`; None chooses one."""
    return list(_kernels().multiply_amax(dense_amax(*args, **options), choice))


def _amax_reference(x: Arguments) -> list[torch.Tensor]:
    check_amax(x)
    result = _by_reference(x)
    if x.offs is not None:
        _check_grouped(x)
        return list(reference_grouped.with_maxima(result, x.offs))
    maxima = result.new_zeros(PARTIAL_MAXIMA, dtype=torch.float32)
    maxima[0] = reference.largest(result.float(), per_row=False)
    return [result, maxima]


def _amax_shapes(x: Arguments) -> list[torch.Tensor]:
    check_amax(x)
    if x.offs is not None:
        _check_grouped(x)
    result, count = _like_product(x), PARTIAL_MAXIMA if x.offs is None else x.offs.shape[0]
    return [result, result.new_empty(count, dtype=torch.float32)]


SCALED_MM_AMAX = define(
    f"scaled_mm_amax({_OPERANDS}, Tensor? bias, ScalarType out_dtype, Tensor[] operands, str[] epilogue,"
    " ScalarType dtype, Tensor? offs=None) -> Tensor[]",
    reference=lambda *args, **options: _amax_reference(dense_amax(*args, **options)),
    shapes=lambda *args, **options: _amax_shapes(dense_amax(*args, **options)),
    kernels=scaled_mm_amax_kernels,
)


# ---------------------------------------------------------------- scaled_mm_two_ctas


def _of_result(product: Callable, quantized: Callable, amax: Callable) -> Callable[..., list[torch.Tensor]]:
    """A function of the arguments of `scaled_mm_two_ctas`: one of these three, by the end of the epilogue."""

    def found(*args: Any) -> list[torch.Tensor]:
        x = dense_quantized(*args)
        if x.offs is not None:
            _check_grouped(x)
        if x.epilogue is not None and x.epilogue.amax:
            return amax(x)
        return [product(x)] if x.result_spec is None else quantized(x)

    return found


def scaled_mm_two_ctas_kernels(*args: Any) -> list[torch.Tensor]:
    """The results of `scaled_mm`, `scaled_mm_quantized`, `scaled_mm_amax` or `scaled_grouped_mm`, on pairs of CTAs."""
    return _kernels().scaled_mm_two_ctas(dense_quantized(*args))


SCALED_MM_TWO_CTAS = define(
    f"scaled_mm_two_ctas({_OPERANDS}, Tensor? bias, ScalarType out_dtype, Tensor[] operands, str[]? epilogue,"
    " ScalarType dtype, Tensor? outer, Tensor? offs) -> Tensor[]",
    reference=_of_result(_by_reference, _quantized_reference, _amax_reference),
    shapes=_of_result(_like_product, _quantized_shapes, _amax_shapes),
    kernels=scaled_mm_two_ctas_kernels,
    lowered=False,
)


# ---------------------------------------------------------------- scaled_mm_horizontal


def _horizontal(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype) -> list[Arguments]:
    """The arguments of each product. Raises ValueError for a list that is neither empty nor of one element a product.

    b_scales, b_outer, bias: lists, where an empty one stands for None of each product.
    """
    for name, given in (("b_scales", b_scales), ("b_outer", b_outer), ("bias", bias)):
        if given and len(given) != len(b):
            raise ValueError(f"{name}: expected none or one for each of {len(b)} products, got {len(given)}")
    each = zip(b, *(given or [None] * len(b) for given in (b_scales, b_outer, bias)), strict=True)
    return [dense(a, a_scales, a_outer, a_format, data, scales, outer, b_format, own_bias, out_dtype)
            for data, scales, outer, own_bias in each]  # fmt: skip


def _horizontal_kernels(*args: Any) -> list[torch.Tensor]:
    members = [(x.b, x.bias) for x in _horizontal(*args)]
    return _kernels().scaled_mm_group(operand(*args[:4]), members, args[-1])


SCALED_MM_HORIZONTAL = define(
    "scaled_mm_horizontal(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format, Tensor[] b, Tensor[] b_scales,"
    " Tensor[] b_outer, str b_format, Tensor[] bias, ScalarType out_dtype) -> Tensor[]",
    reference=lambda *args: list(map(_by_reference, _horizontal(*args))),
    shapes=lambda *args: list(map(_like_product, _horizontal(*args))),
    kernels=_horizontal_kernels,
)


# ---------------------------------------------------------------- scaled_grouped_mm


def grouped(
    a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, offs, rows, out_dtype, fast_accumulation=False
) -> Arguments:  # fmt: skip
    """The arguments of `scaled_grouped_mm`."""
    left, right = operand(a, a_scales, a_outer, a_format), operand(b, b_scales, b_outer, b_format)
    return Arguments(left, right, None, out_dtype, offs=offs, rows=rows, fast_accumulation=fast_accumulation)


def scaled_grouped_mm_kernels(
    *args: Any, choice: "Choice | None" = None, arranged_a: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """`scaled_grouped_mm` by the kernel of a choice; None chooses one. arranged_a: see `templates.gemm.call.Call`."""
    return _kernels().multiply(grouped(*args, **options), choice, arranged_a)


def _grouped_reference(*args: Any, **options: Any) -> torch.Tensor:
    x = grouped(*args, **options)
    _check_grouped(x)
    return reference_grouped.scaled_grouped_mm(x.a, x.b, x.offs, x.rows, x.out_dtype)


def _grouped_shapes(*args: Any, **options: Any) -> torch.Tensor:
    x = grouped(*args, **options)
    _check_grouped(x)
    a, b = x.a.data, x.b.data
    shape = (a.shape[0], b.shape[1]) if b.dim() == 3 else (x.offs.shape[0], a.shape[0], b.shape[0])
    return a.new_empty(shape, dtype=x.out_dtype)


def _check_grouped(x: Arguments) -> None:
    a, b = x.a.data, x.b.data
    if a.dim() != 2 or b.dim() not in (2, 3):
        raise ValueError(f"a, b: expected [M, K] and [G, N, K], or [P, W] and [Q, W]; got shapes {tuple(a.shape)} and "
                         f"{tuple(b.shape)}")  # fmt: skip
    matrices = b.shape[0] // 2 if x.two_weights else b.shape[0]
    check_offs(x.offs, matrices if b.dim() == 3 else None)
    if b.dim() == 3 and x.rows is not None:
        torch._check_value(a.shape[0] == x.rows, lambda: f"rows: expected the {a.shape[0]} rows of a, got {x.rows}")


_GROUPED = f"({_OPERANDS}, Tensor offs, SymInt rows, ScalarType out_dtype, bool fast_accumulation=False) -> Tensor"
SCALED_GROUPED_MM = define(
    f"scaled_grouped_mm{_GROUPED}",
    reference=_grouped_reference,
    shapes=_grouped_shapes,
    kernels=scaled_grouped_mm_kernels,
)


# ---------------------------------------------------------------- scaled_mm_gathered


def _gathered_reference(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, index, out_dtype):
    """`scaled_mm_gathered` by `scaled_mm` of a copy of the selected matrices."""
    taken = (None if t is None else _taken(t, index) for t in (b, b_scales, b_outer))
    return SCALED_MM(a, a_scales, a_outer, a_format, *taken, b_format, None, out_dtype)


def _gathered_kernels(*args: Any) -> torch.Tensor:
    """`scaled_mm_gathered` by a kernel that reads the matrices through the index, or else by `scaled_mm` of a copy."""
    from fp4compile.templates.gemm import indexed
    from fp4compile.templates.launch import target_of

    left, right, (index, out_dtype) = operand(*args[:4]), operand(*args[4:8]), args[8:]
    _check_gathered(left.data, right.data, index)
    if indexed.serves(left, right, index, out_dtype, target_of(left.data.device)):
        return indexed.scaled_mm_gathered(left, right, index, out_dtype)
    return _gathered_reference(*args)


def _gathered_shapes(*args: Any) -> torch.Tensor:
    a, b, (index, out_dtype) = args[0], args[4], args[8:]
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
    reference=_gathered_reference,
    shapes=_gathered_shapes,
    kernels=_gathered_kernels,
)


# ---------------------------------------------------------------- products of libraries


def _for_library(*args: Any) -> Arguments:
    """The arguments of `scaled_mm_library`, which has no epilogue."""
    return dense(*args[:10], fast_accumulation=any(args[10:]))


def scaled_mm_library_kernels(*args: Any) -> torch.Tensor:
    """Multiply [M, K] x [N, K] by a call of torch: two-level NVFP4 on SM100, or `float8_rowwise`."""
    x = _for_library(*args)
    return _kernels().scaled_mm_library(x.a, x.b, x.bias, x.out_dtype, x.fast_accumulation)


SCALED_MM_LIBRARY = define(
    f"scaled_mm_library({_OPERANDS}, Tensor? bias, ScalarType out_dtype, bool fast_accumulation=False) -> Tensor",
    reference=lambda *args: _by_reference(_for_library(*args)),
    shapes=lambda *args: _like_product(_for_library(*args)),
    kernels=scaled_mm_library_kernels,
    lowered=False,
)


def scaled_grouped_mm_library_kernels(*args: Any) -> torch.Tensor:
    """Multiply block-scaled operands by MSLK's kernels on SM100, `float8_rowwise` operands by CUTLASS on Hopper."""
    x = grouped(*args)
    return _kernels().scaled_grouped_mm_library(x.a, x.b, x.offs, x.out_dtype, x.fast_accumulation)


SCALED_GROUPED_MM_LIBRARY = define(
    f"scaled_grouped_mm_library{_GROUPED}",
    reference=_grouped_reference,
    shapes=_grouped_shapes,
    kernels=scaled_grouped_mm_library_kernels,
    lowered=False,
)
