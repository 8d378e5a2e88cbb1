"""Programmatic dependent launch (from sm_90 on): a kernel starts before the kernel whose result it reads is done.

The first kernel calls `launch_dependents`. The second kernel may start as soon as every program of the first has done
so. Until it calls `wait`, the second kernel only loads data that was complete before the first kernel began, and writes
nothing. `wait` returns when the first kernel, and all kernels before it, are done. If the second kernel is launched
normally, both instructions do nothing.

The second kernel may also call `launch_dependents` for a third one. All programs of the second kernel wait, so the
third kernel's `wait` includes the first kernel.

Both functions are declared pure, because Inductor assumes that PTX with side effects writes all arguments of a kernel.
The PTX returns an offset of 0, which is added to the pointer that is used next: that fixes the order.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents(ptr):
    """Let the next kernel in the stream start. Returns ptr, whose next use follows this."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return ptr + tl.multiple_of(zero, 16)


@triton.jit
def wait(ptr):
    """Wait until the kernels before this one are done. Returns ptr, whose next use follows this."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True, pack=1
    )
    return ptr + tl.multiple_of(zero, 16)
