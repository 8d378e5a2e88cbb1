"""The end of a product's kernel: the sums in parts, outer scales, bias, the pointwise epilogue, the store.

`source` prints an `epilogue.Epilogue` as a Triton device function named `epilogue`. `with_epilogue(kernel, steps)` is a
copy of the kernel in which the global name `epilogue` means that function; in the kernel as it is written, it means the
function below, which changes nothing. See `device.pointwise` for the way in which this is done.

The arithmetic is Inductor's: the product is rounded to its own dtype, as if it had been stored. All that follows is
float32, in the operations that Inductor generates, until the result is stored; casts in between round nothing. So an
epilogue has the bits of the kernel that Inductor would generate for the same operations, if Inductor made one kernel
of them and read the other operands from memory. Two things can differ in a last bit: an operand that Inductor would
have kept in float32 in a register, and a float32 product, whose rescale ptxas may contract with a sum that follows.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fp4compile.formats.epilogue import Epilogue
from fp4compile.templates.device.elements import float_bits
from fp4compile.templates.device.pointwise import CALLED, device_functions, printed_steps, with_functions
from fp4compile.templates.device.register_tile import log2


@triton.jit
def rounded(value, dtype: tl.constexpr, ISA: tl.constexpr):
    """float32 values rounded to dtype, in float32."""
    if dtype == tl.bfloat16 and ISA == 0:
        return (float_bits(value, dtype, ISA) << 16).to(tl.float32, bitcast=True)
    else:
        return value.to(dtype).to(tl.float32)


@triton.jit
def epilogue(acc, at, col, inside, n, epilogue_0_ptr, epilogue_1_ptr, ISA: tl.constexpr):
    """float32 values acc at the offsets `at`, in the columns `col` of n, those `inside` of the result -> the same."""
    return acc


_DTYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_LOADS = {
    "aux": "aux{0} = tl.load(epilogue_{0}_ptr + at, mask=inside, other=0.0).to(tl.float32)",
    "row": "row{0} = tl.load(epilogue_{0}_ptr + col, mask=col < n, other=0.0).to(tl.float32)",
}


def source(epilogue: Epilogue) -> str:
    """The source of the device function `epilogue`."""
    dtype = epilogue.product_dtype
    lines = ["@triton.jit", "def epilogue(acc, at, col, inside, n, epilogue_0_ptr, epilogue_1_ptr, ISA: tl.constexpr):"]
    lines.append(f"    product = rounded(acc, {_DTYPES[dtype]}, ISA)" if dtype in _DTYPES else "    product = acc")
    lines += ["    " + _LOADS[kind].format(i) for i, kind in sorted(epilogue.kinds.items())]
    narrow = {"product"} if dtype in _DTYPES else ()
    lines += ["    " + line for line in printed_steps(epilogue.steps, narrow)]
    result = f"s{len(epilogue.steps) - 1}" if epilogue.steps else "product"
    return "\n".join([*lines, f"    return {result}"]) + "\n"


# What a printed function may use.
_NAMES = {"triton": triton, "tl": tl, "rounded": rounded, **CALLED}


@cache
def _device_function(text: str):
    """The device function of a text of `source`."""
    return device_functions(text, _NAMES)["epilogue"]


@cache
def with_epilogue(kernel, steps: Epilogue):
    """The kernel with these steps in the place of the epilogue that changes nothing."""
    return with_functions(kernel, {"epilogue": _device_function(source(steps))})


@triton.jit
def column_parts(acc, PARTS: tl.constexpr):
    """[M, N] -> a tuple of PARTS tensors [M, N / PARTS] of neighbouring columns; PARTS: a power of two."""
    parts = (acc,)
    for _ in tl.static_range(log2(PARTS)):
        halves = ()
        for i in tl.static_range(len(parts)):
            part = parts[i]
            sides = tl.permute(tl.reshape(part, (part.shape[0], 2, part.shape[1] // 2)), (0, 2, 1))
            halves = halves + tl.split(sides)
        parts = halves
    return parts


@triton.constexpr_function
def rescale_mode(OUTER):
    """What `rescale` calls outer scales whose pointer is that of the group's."""
    return "tensor" if OUTER == "group" else OUTER


@triton.jit
def rescale(
    acc, row, col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
):  # fmt: skip
    """The float32 sums at (row, col), once times the outer scales, plus the bias of the column."""
    if A_OUTER != "none":
        if A_OUTER == "tensor":
            factor = tl.load(a_outer_ptr)
        else:
            factor = tl.load(a_outer_ptr + tl.cast(batch, tl.int64) * m + row, mask=row < m, other=1.0)
    if B_OUTER != "none":
        if B_OUTER == "tensor":
            other = tl.load(b_outer_ptr)
        else:
            b_rows = tl.cast(batch, tl.int64) * n if B_BATCHED else 0
            other = tl.load(b_outer_ptr + b_rows + col, mask=col < n, other=1.0)
        factor = factor * other if A_OUTER != "none" else other
    if A_OUTER != "none" or B_OUTER != "none":
        acc = acc * factor
    if BIAS:
        acc = acc + tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)
    return acc


@triton.jit
def stored_ptr(ptr, ISA: tl.constexpr):
    """A pointer to floats, as the pointer to what `stored` makes of them."""
    if ptr.dtype.element_ty == tl.bfloat16 and ISA == 0:
        return ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return ptr


@triton.jit
def stored(value, ptr, ISA: tl.constexpr):
    """float32 values, rounded to the type at a pointer of `stored_ptr`; bfloat16 as its bits in the portable form."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype == tl.int16:
        return float_bits(value, tl.bfloat16, ISA).to(tl.int16)
    else:
        return value.to(dtype)


@triton.jit
def store_rounded(out_ptr, at, value, mask, ISA: tl.constexpr):
    """Store float32 values, rounded to the type of out."""
    out_ptr = stored_ptr(out_ptr, ISA)
    tl.store(out_ptr + at, stored(value, out_ptr, ISA), mask=mask)
