"""The ops that multiply quantised operands.

    fp4compile::scaled_mm(a, a_scales, a_outer, b, b_scales, b_outer, spec, *, bias, operands, outer, offs, rows, index)
        -> result
    fp4compile::scaled_mm_results(a, a_scales, a_outer, [b], [b_scales], [b_outer], spec, *, [bias], ...) -> results
    fp4compile::scaled_mm_opaque(a, ..., spec, kernel, *, bias, ...) -> results

A [..., M, K] and B [..., N, K] are both stored with the contraction last; an operand without a format is plain. spec:
the computation as one string (`formats.product_spec`). operands: the tensors that the steps of an epilogue read.
outer: the static global scale of a result that the epilogue quantises. offs, rows: with ragged groups, the ends of the
groups and the number of rows (`formats.reference_grouped` has the shapes). index: with gathered matrices, int [S]:
A [S, M, K] is multiplied by b[index], where B is [E, N, K].

`scaled_mm` has one result, [..., M, N], or [G, M, N] of groups along the contraction.

`scaled_mm_results` has several. An epilogue that ends in "quantize" gives codes and swizzled block scales of the rows
of its result, as `quantize` does, with offs as well. One that ends in "amax" gives its result and float32 magnitudes
[P], the argument `amax` of `quantize`: the largest is the result's amax, at a position that depends on the device. With
offs the magnitudes are [G], the amax of each group, and rows of no group are zeros. B of two matmuls is [2 N, K], or
[G, 2 N, K], or [2 G, N, K]: all matrices of the first matmul, then all of the second. Several B give a result for
each; see `passes.fuse_horizontal`.

`passes.lower` puts `scaled_mm_opaque` into a graph for a kernel that Inductor cannot call: Inductor cannot lower
`aten._scaled_mm_v2` with swizzled scales; torch up to 2.13 has no fake implementation of the block-scaled grouped
matmul; Inductor cannot time matmuls of views (`_compat.times_products`); and it compiles kernels as Triton, not as
Gluon. It does not change ops without a lowering. kernel: "library", "2-CTA" or "FP8"; the results are
those of `scaled_mm` or `scaled_mm_results`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fp4compile.formats import reference, reference_grouped
from fp4compile.formats.checks import check, check_bias, check_devices, check_epilogue, check_groups, check_index
from fp4compile.formats.epilogue import PARTIAL_MAXIMA, apply
from fp4compile.formats.grouping import Grouping
from fp4compile.formats.operand import Arguments, taken
from fp4compile.formats.quantize_spec import ROWS
from fp4compile.formats.reference_grouped import quantize_along
from fp4compile.ops.define import define

if TYPE_CHECKING:
    from fp4compile.templates.choose import Choice

arguments = Arguments.of_call


def arguments_of_each(
    a, a_scales, a_outer, b, b_scales, b_outer, spec, *, bias=None, **options: Any
) -> list[Arguments]:
    """The matmul of each B of `scaled_mm_results`. b_scales, b_outer, bias: an empty list stands for None for all B.

    Raises ValueError for a list that is neither empty nor of one element per B.
    """
    for name, given in (("b_scales", b_scales), ("b_outer", b_outer), ("bias", bias)):
        if given and len(given) != len(b):
            raise ValueError(f"{name}: expected none or one for each of {len(b)} products, got {len(given)}")
    each = zip(b, *(given or [None] * len(b) for given in (b_scales, b_outer, bias)), strict=True)
    found = [arguments(a, a_scales, a_outer, *own, spec, bias=own_bias, **options) for *own, own_bias in each]
    if len(found) > 1 and found[0].spec.epilogue is not None:
        raise ValueError(f"b: products with an epilogue are computed one at a time, got {len(found)} of {spec!r}")
    return found


# ---------------------------------------------------------------- references


def _results(x: Arguments) -> list[torch.Tensor]:
    """Compute the results of a matmul with PyTorch operations."""
    check(x)
    result, spec = _stored(x), x.result_spec
    if spec is not None:
        data, scales, _ = quantize_along(spec, result, ROWS, x.offs, x.result_outer, None)
        return [data, scales]
    if not x.spec.amax:
        return [result]
    if x.offs is not None:
        return list(reference_grouped.with_maxima(result, x.offs))
    maxima = result.new_zeros(PARTIAL_MAXIMA, dtype=torch.float32)
    maxima[0] = reference.largest(result.float(), per_row=False)
    return [result, maxima]


def _stored(x: Arguments) -> torch.Tensor:
    """Compute a matmul and the pointwise steps of its epilogue."""
    spec, b = x.spec, x.b
    if x.offs is not None:
        rows = x.a.data.shape[0] if x.rows is None else x.rows
        weights = [b] if not x.two_weights else reference_grouped.halves(b)
        products = [reference_grouped.scaled_grouped_mm(x.a, one, x.offs, rows, spec.out_dtype) for one in weights]
        product = products[0] if len(products) == 1 else torch.cat(products, -1)
    else:
        b = b if x.index is None else taken(b, x.index)
        if b.outer is not None and b.outer.dim() == 1:  # two stacked matrices
            b = replace(b, outer=b.outer.repeat_interleave(b.data.shape[-2] // 2).unsqueeze(-1))
        product = reference.scaled_mm(x.a, b, x.bias, spec.out_dtype)
    return product if spec.epilogue is None else apply(product, spec.epilogue, x.auxiliaries)


def _only(x: Arguments) -> Arguments:
    """Return x; raises ValueError for a matmul that has several results."""
    if x.spec.results > 1:
        raise ValueError(f"spec: {str(x.spec)!r} has two results, which the op scaled_mm_results returns")
    return x


# ---------------------------------------------------------------- shapes


def _shapes(x: Arguments) -> list[torch.Tensor]:
    """Empty tensors like the results of a matmul. Sizes may be symbolic: few of them are checked."""
    a, b, spec = x.a.data, x.b.data, x.spec
    if x.offs is not None:
        check_groups(x, x.offs)
    elif x.index is not None:
        check_index(a, b, x.index)
    else:
        check_bias(x.bias, b.shape[-2])
    check_devices(x)
    check_epilogue(x)
    columns = b.shape[-2]
    if spec.pair and not x.two_weights:
        columns = columns // 2
    groups = () if spec.grouping is not Grouping.RAGGED_CONTRACTION else (x.offs.shape[0],)
    result, made = a.new_empty((*groups, *a.shape[:-1], columns), dtype=spec.stored_dtype), x.result_spec
    if made is not None:
        data, scales, _ = made.shapes(result, 0 if x.offs is None else x.offs.shape[0], ROWS)
        return [a.new_empty(data, dtype=made.format.data_dtype), a.new_empty(scales, dtype=made.format.scale_dtype)]
    if not spec.amax:
        return [result]
    count = PARTIAL_MAXIMA if x.offs is None else x.offs.shape[0]
    return [result, a.new_empty(count, dtype=torch.float32)]


# ---------------------------------------------------------------- ops


def _kernels() -> Any:
    """The module `templates.multiply`, imported at the first launch: declaring the ops needs no Triton."""
    from fp4compile.templates import multiply

    return multiply


_OPTIONS = "Tensor[]? operands=None, Tensor? outer=None, Tensor? offs=None, SymInt? rows=None, Tensor? index=None"
_ONE_B = "Tensor a, Tensor? a_scales, Tensor? a_outer, Tensor b, Tensor? b_scales, Tensor? b_outer, str spec"


def scaled_mm_kernels(
    *args: Any, choice: "Choice | None" = None, arranged_a: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """`scaled_mm` by the kernel of a `Choice`; None calls `choose`. arranged_a: see `templates.gemm.call.Call`."""
    return _kernels().multiply(_only(arguments(*args, **options)), choice, arranged_a)


SCALED_MM = define(
    f"scaled_mm({_ONE_B}, *, Tensor? bias=None, {_OPTIONS}) -> Tensor",
    reference=lambda *args, **options: _results(_only(arguments(*args, **options)))[0],
    shapes=lambda *args, **options: _shapes(_only(arguments(*args, **options)))[0],
    kernels=scaled_mm_kernels,
)


def scaled_mm_results_kernels(*args: Any, choice: "Choice | None" = None, **options: Any) -> list[torch.Tensor]:
    """`scaled_mm_results` by the kernel of a `Choice`; None calls `choose`."""
    members = arguments_of_each(*args, **options)
    return _kernels().results(members[0], choice) if len(members) == 1 else _kernels().multiply_together(members)


SCALED_MM_RESULTS = define(
    "scaled_mm_results(Tensor a, Tensor? a_scales, Tensor? a_outer, Tensor[] b, Tensor[] b_scales, Tensor[] b_outer,"
    f" str spec, *, Tensor[]? bias=None, {_OPTIONS}) -> Tensor[]",
    reference=lambda *args, **options: [one for x in arguments_of_each(*args, **options) for one in _results(x)],
    shapes=lambda *args, **options: [one for x in arguments_of_each(*args, **options) for one in _shapes(x)],
    kernels=scaled_mm_results_kernels,
)


def _opaque(compute):
    """A function of the arguments of `scaled_mm_opaque`, which calls `compute` without the argument `kernel`."""
    return lambda *args, **options: compute(arguments(*args[:-1], **options))


SCALED_MM_OPAQUE = define(
    f"scaled_mm_opaque({_ONE_B}, str kernel, *, Tensor? bias=None, {_OPTIONS}) -> Tensor[]",
    reference=_opaque(_results),
    shapes=_opaque(_shapes),
    kernels=lambda *args, **options: _kernels().opaque(arguments(*args[:-1], **options), args[-1]),
    lowered=False,
)
