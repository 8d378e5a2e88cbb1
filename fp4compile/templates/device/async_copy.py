"""Inline PTX for kernels that are written one lane at a time: asynchronous copies to shared memory, and barriers.

The kernels that stream NVFP4 weights (`gemv`, `gemm_skinny`, `gemm_wgmma_sm90`) specify the work of each lane. Their
tensors have one axis with one element for each lane of the program. Triton has only one layout for such a tensor, so
the lane of each element is fixed, and inline PTX may rely on it.

Every piece of this PTX is declared pure: Inductor assumes that a kernel with side effects writes all of its arguments.
The compiler may reorder or drop pure code, so the order is made a data dependency. Every piece takes the token of the
previous piece, and returns a token itself. A token is an int32 in each lane; its value means nothing. If only the token
depends on a piece, `keep` ends the order.
"""

import triton
import triton.language as tl

# `COMMIT` ends a group of asynchronous copies, the unit that `wait_ptx` counts.
COMMIT = tl.constexpr("cp.async.commit_group; mov.b32 $0, 0;")
BARRIER = tl.constexpr("bar.sync 0; mov.b32 $0, 0;")
WARP_BARRIER = tl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, 0;")
# Inputs: destination, source, how many of its 16 bytes exist (the rest becomes zeros), whether to copy, a token.
COPY_PART = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; mov.b32 $0, 0; @p cp.async.ca.shared.global [$1], [$2], 16, $3; }"
)
# Input: a float32. Its value is computed before every piece that takes the token.
AWAIT_VALUE = tl.constexpr("mov.b32 $0, 0;")


@triton.constexpr_function
def wait_ptx(groups):
    """PTX that waits until at most the newest `groups` groups of the warp's copies are pending."""
    return f"cp.async.wait_group {groups}; bar.warp.sync 0xffffffff; mov.b32 $0, 0;"


@triton.constexpr_function
def select_ptx(texts, *key):
    """The PTX of variant `key`. texts: PTX by variant."""
    return texts[key]


@triton.jit
def do_ptx(text: tl.constexpr, operands: tl.constexpr, values):
    """Run PTX for its effect, and return $0, an int32: the next token, or a result.

    operands: constraints of the inputs $1, $2, ... values: the inputs; the last one is the token.
    """
    return tl.inline_asm_elementwise(text, "=&r," + operands, values, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def keep(token, out_ptr, count):
    """Keep the pieces up to this token. out_ptr: the memory that they write, for analyses of a kernel's writes.

    count: an integer argument that is never negative, and not a constant, so that nothing is stored here.
    """
    zeros = tl.zeros(token.shape, tl.int32)  # after `tl.zeros_like`, torch would count the token as written
    tl.store(out_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + zeros, token, mask=zeros + count < 0)
