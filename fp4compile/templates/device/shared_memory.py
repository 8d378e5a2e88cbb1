"""Shared memory for kernels that address it by themselves, more than the 48 KB that inline PTX may declare.

`reserve` makes Triton set so much aside; `MEMORY` is PTX for where it begins, at whole 1024 bytes. Such a kernel uses
nothing that Triton would put into shared memory beside it.
"""

import triton
import triton.language as tl

from fp4compile.targets import Target

_TILE = tl.constexpr(4096)  # bytes that Triton's pipeline takes for one tile of `reserve`
MEMORY = tl.constexpr("{ .reg .b32 m; mov.u32 m, global_smem; add.u32 m, m, 1023; and.b32 $0, m, 0xFFFFFC00; }")


def reserved(size: int, programs: int, target: Target) -> int | None:
    """What to reserve for `size` bytes that begin at whole 1024 bytes, where so many programs share a multiprocessor.

    So much that no more of them fit: a kernel that starts while another one runs is not spread evenly over the
    multiprocessors otherwise. None if so many do not fit.
    """
    needed = -(-(size + 1023) // _TILE.value) * _TILE.value
    share = (target.shared_memory + 1024) // programs - 1024  # each program takes 1024 bytes more
    return share // _TILE.value * _TILE.value if needed <= share else None


@triton.jit
def reserve(ptr, out_ptr, count, BYTES: tl.constexpr):
    """Shared memory of the program, BYTES of it, by a loop that is never run: its loads would pass through it.

    ptr, out_ptr: any pointers, to 16-bit floats and to what floats can be cast to.
    count: never negative, which the compiler does not know (of one it would: Triton makes it a constant).
    """
    if count < 0:
        at = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
        acc = tl.zeros((16, 16), tl.float32)
        for i in tl.range(0, count, num_stages=BYTES // _TILE + 1):
            x = tl.load(ptr + i * 2048 + at)
            acc = tl.dot(x, tl.trans(x), acc)
        tl.store(out_ptr + tl.arange(0, 16), tl.sum(acc, 1).to(out_ptr.dtype.element_ty))
