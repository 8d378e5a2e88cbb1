"""Shared memory that inline PTX of a kernel addresses: more than the 48 KB that inline PTX may declare.

`reserve` makes Triton allocate the memory. `MEMORY` is PTX for its first address that is a multiple of 1024. Such a
kernel must not use Triton operations that need shared memory: Triton would allocate that at the same address.
"""

import triton
import triton.language as tl

from fp4compile.hardware import Target

_RESERVED_TILE = tl.constexpr(4096)  # bytes that Triton's software pipeline allocates for one tile of `reserve`
MEMORY = tl.constexpr("{ .reg .b32 m; mov.u32 m, global_smem; add.u32 m, m, 1023; and.b32 $0, m, 0xFFFFFC00; }")


def reserved(size: int, programs: int, target: Target) -> int | None:
    """Bytes to reserve so that `programs` programs share a multiprocessor and each can align `size` bytes to 1024.

    The result is so large that no further program fits: otherwise a kernel that starts while another one still runs
    would spread unevenly over the multiprocessors. None if `programs` programs do not fit.
    """
    needed = -(-(size + 1023) // _RESERVED_TILE.value) * _RESERVED_TILE.value
    share = (target.shared_memory + 1024) // programs - 1024  # the GPU takes 1024 bytes more for each program
    return share // _RESERVED_TILE.value * _RESERVED_TILE.value if needed <= share else None


@triton.jit
def reserve(ptr, out_ptr, count, BYTES: tl.constexpr):
    """Make Triton allocate BYTES bytes of shared memory to the program.

    Triton allocates the buffers of a pipelined loop's loads. The loop here never runs.
    ptr: pointer to 16-bit floats. out_ptr: pointer to a type to which a float can be cast.
    count: an integer argument that is never negative, and not a constant: the compiler would drop the loop. (Triton
    passes an integer argument of value 1 as a constant.)
    """
    if count < 0:
        at = tl.arange(0, 16)[:, None] * 128 + tl.arange(0, 128)[None, :]
        acc = tl.zeros((16, 16), tl.float32)
        for i in tl.range(0, count, num_stages=BYTES // _RESERVED_TILE + 1):
            x = tl.load(ptr + i * 2048 + at)
            acc = tl.dot(x, tl.trans(x), acc)
        tl.store(out_ptr + tl.arange(0, 16), tl.sum(acc, 1).to(out_ptr.dtype.element_ty))


@triton.constexpr_function
def sum_of_warps_ptx(warps, size):
    """PTX that adds one float32 of each warp, `size` bytes apart. Input: the address of the first warp's."""
    adds = " ".join(f"ld.shared.f32 f, [$1 + {warp * size}]; add.f32 $0, $0, f;" for warp in range(1, warps))
    return f"{{ .reg .f32 f; ld.shared.f32 $0, [$1]; {adds} }}"
