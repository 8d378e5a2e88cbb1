"""Asynchronous copies into shared memory and barriers, as PTX for one lane at a time."""

import triton
import triton.language as tl

COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
BARRIER = tl.constexpr("bar.sync 0; mov.b32 $0, 0;")
WARP_BARRIER = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")


@triton.constexpr_function
def wait_ptx(groups):
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.jit
def do_ptx(text: tl.constexpr, operands: tl.constexpr, values):
    """PTX for its effect, or what it leaves in $0; the last of the values is the token of what must come before."""
    return tl.inline_asm_elementwise(text, "=&r," + operands, values, dtype=tl.int32, is_pure=True, pack=1)
