"""Starting a kernel before the one whose result it reads is done: programmatic dependent launch, from sm_90 on.

The first kernel lets the second one start (`launch_dependents`) when all of its own programs have started. The second loads what
was complete before the first began, and waits for the first, and for all before it, to be done (`wait`), before it
reads what that wrote or writes anything. Where the second is launched as usual, both instructions do nothing. It may
be the first one of a third: all of its programs wait, so what waits for it waits for all that it has waited for.

Inductor would take PTX with side effects to write all of a kernel's arguments, so these pieces are pure; an offset of
0 that they return, added to the address that is used next, keeps their place.
"""

import triton
import triton.language as tl


@triton.jit
def launch_dependents(ptr):
    """ptr, and the next kernel in the stream may start."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip
    return ptr + tl.multiple_of(zero, 16)


@triton.jit
def wait(ptr):
    """ptr, once the kernels before this one are done."""
    zero = tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=True, pack=1
    )
    return ptr + tl.multiple_of(zero, 16)
