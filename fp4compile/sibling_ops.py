"""The op of several products of the same A, part of the set of `ops`: what the pass `passes.siblings` makes of them.

It is for graphs. Eagerly it is several calls of `scaled_mm` in one, by as few launches as possible.
"""

import torch

from fp4compile import formats, reference

_lib = torch.library.Library("fp4compile", "FRAGMENT")
_lib.define(
    "scaled_mm_siblings(Tensor a, Tensor? a_scales, Tensor? a_outer, str? a_format, Tensor[] b, Tensor[] b_scales,"
    " Tensor[] b_outer, str b_format, Tensor[] bias, ScalarType out_dtype) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


@torch.library.impl(_lib, "scaled_mm_siblings", "CompositeExplicitAutograd")
def _scaled_mm_siblings(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    a_fmt = None if a_format is None else formats.get(a_format)
    b_fmt = formats.get(b_format)
    return [
        reference.scaled_mm(a, a_scales, a_outer, a_fmt, *member, b_fmt, bias, out_dtype)
        for *member, bias in _members(b, b_scales, b_outer, bias)
    ]


@torch.library.impl(_lib, "scaled_mm_siblings", "CUDA")
def scaled_mm_siblings_cuda(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    """`scaled_mm_siblings` by the Triton kernels; what a graph is lowered to."""
    from fp4compile.templates.gemm.horizontal import products  # here, so that the CPU needs no Triton

    a_fmt = None if a_format is None else formats.get(a_format)
    members = _members(b, b_scales, b_outer, bias)
    return products(a, a_scales, a_outer, a_fmt, members, formats.get(b_format), out_dtype)


@torch.library.register_fake("fp4compile::scaled_mm_siblings", lib=_lib)
def _scaled_mm_siblings_fake(a, a_scales, a_outer, a_format, b, b_scales, b_outer, b_format, bias, out_dtype):
    members = _members(b, b_scales, b_outer, bias)
    return [a.new_empty((*a.shape[:-1], member[0].shape[-2]), dtype=out_dtype) for member in members]


def _members(b, b_scales, b_outer, bias) -> list[tuple]:
    """(b, b_scales, b_outer, bias) of each product, None for what no product has.

    Raises ValueError where some have what others have not.
    """
    for name, given in (("b_scales", b_scales), ("b_outer", b_outer), ("bias", bias)):
        if given and len(given) != len(b):
            raise ValueError(f"{name}: expected none or one for each of {len(b)} products, got {len(given)}")
    return list(zip(b, *(given or [None] * len(b) for given in (b_scales, b_outer, bias)), strict=True))
