"""Prefetching into the L2 cache: what a later program of the same launch will read (from sm_90 on).

A program that holds whole rows loads, reduces and encodes in turns, and few of them fit a multiprocessor: often none of
them loads. So each program has the elements of a later one brought nearer.

The PTX is declared pure, and its order is kept by what it returns: see `dependent_launch`. Only loads may depend on
that: Inductor takes a kernel to write what the address of a store depends on.
"""

import triton
import triton.language as tl

_PREFETCH = tl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; setp.lt.and.s32 p, $3, $4, p;"
    " @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
)


@triton.jit
def prefetch(ptr, number, width, spans):
    """Prefetch span `number` of `spans` spans of `width` elements, if there is such a span. The first begins at ptr.

    A span is whole runs of 16 bytes, at an address that 16 divides. Returns an offset of 0. Loads at addresses that
    have it stay behind this.
    """
    address = (ptr + number.to(tl.int64) * width).to(tl.int64)
    size = tl.cast(width * (ptr.dtype.element_ty.primitive_bitwidth // 8), tl.int32)  # symbolic sizes have 64 bits
    zero = tl.inline_asm_elementwise(
        _PREFETCH, "=r,l,r,r,r", [address, size, number, tl.cast(spans, tl.int32)], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.multiple_of(zero, 16)
