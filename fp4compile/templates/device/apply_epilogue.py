"""The end of a GEMM kernel: the sums in parts, global or row scales, bias, the pointwise epilogue, the store.

A kernel takes an `epilogue.Epilogue` as a constexpr string, EPILOGUE (`text`), whose steps `device.pointwise`
interprets; "" is no epilogue.

The arithmetic is Inductor's: the result of the matmul is rounded to its dtype, as if it had been stored. All further
steps are float32, in the operations that Inductor generates, until the result is stored; casts in between round
nothing. So an epilogue has the bits of one kernel of Inductor for these operations that reads the other operands from
memory. Two cases can differ in a last bit: an operand that Inductor would have kept in float32 in a register, and a
float32 product, whose rescale ptxas may contract with a sum that follows.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from fp4compile.formats.epilogue import AMAX, PAIR, PRODUCT, Epilogue
from fp4compile.formats.steps import with_silu
from fp4compile.templates.device.async_copy import do_ptx
from fp4compile.templates.device.elements import float_bits
from fp4compile.templates.device.pointwise import compute, kind_of, needed, operate, part_of, tensor_count, written
from fp4compile.templates.device.register_tile import log2


@cache
def text(epilogue: Epilogue) -> str:
    """The constexpr EPILOGUE of kernels: "product aux0 row1 | mul 0 1; add 3 2 | bfloat16".

    The third part is the dtype to which the float32 product is rounded. A fourth part has the format of a quantised
    result (`device.quantized_epilogue`), "e4m3 e8m0 rceil 32 none bfloat16", or, to find its amax, "amax bfloat16".
    """
    steps, dtype = with_silu(epilogue.steps), epilogue.product_dtype
    products = [PRODUCT, PAIR] if epilogue.pair else [PRODUCT]
    names = [*products, *(f"{kind}{i}" for i, kind in sorted(epilogue.kinds.items()))]
    numbers = needed(steps, len(steps) - 1) if steps else []
    lines, _ = written(steps, numbers, names, products if dtype.itemsize == 2 else (), pairs=False)
    parts = [" ".join(names), lines, _name(dtype)]
    if epilogue.quantize is not None:
        fmt = epilogue.quantize.format
        fields = (fmt.element, fmt.scale, fmt.contract, fmt.block_cols, fmt.outer or "none", _name(epilogue.dtype))
        parts.append(" ".join(map(str, fields)))
    elif epilogue.amax:
        parts.append(f"{AMAX} {_name(epilogue.dtype)}")
    return " | ".join(parts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@triton.constexpr_function
def auxiliary_of(EPILOGUE, number):
    """The auxiliary tensor's number in name `number` of a text: 1 for "row1"."""
    return int(part_of(EPILOGUE, 0).split()[number][3:])


@triton.jit
def epilogue(
    acc, at, col, inside, n, epilogue_0_ptr, epilogue_1_ptr, EPILOGUE: tl.constexpr, ISA: tl.constexpr, pair=None,
    first=None,
):  # fmt: skip
    """The epilogue's result for float32 sums acc at offsets `at`, columns `col` of n. inside: mask of the loads.

    pair: the float32 results of the second matmul, for an epilogue of two. first: a number to add to all offsets, which
    may then be 32-bit numbers; None for 0.
    """
    if EPILOGUE == "":
        return acc
    else:
        values = (operate(part_of(EPILOGUE, 2), acc, acc, ISA),)
        ptrs = (epilogue_0_ptr, epilogue_1_ptr)
        for i in tl.static_range(1, tensor_count(EPILOGUE)):
            if kind_of(EPILOGUE, i) == "pai":
                values = values + (operate(part_of(EPILOGUE, 2), pair, pair, ISA),)
            elif kind_of(EPILOGUE, i) == "aux":
                ptr = ptrs[auxiliary_of(EPILOGUE, i)]
                ptr = ptr if first is None else ptr + first
                values = values + (tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32),)
            else:
                ptr = ptrs[auxiliary_of(EPILOGUE, i)]
                values = values + (tl.load(ptr + col, mask=col < n, other=0.0).to(tl.float32),)
        values = compute(values, EPILOGUE, ISA)
        return values[len(values) - 1]


# Inputs: an address, whether to fetch, a token. Fetches the line of 128 bytes with the address to the L2 cache.
_PREFETCH_LINE = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }")


@triton.jit
def _prefetch_tile(
    ptr, token, lane, row, col, m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    line: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # elements
    lines: tl.constexpr = (COLUMNS + line - 1) // line  # of a row
    for start in tl.static_range(0, ROWS * lines, LANES):
        at_row = row + (start + lane) // lines
        at_col = col + (start + lane) % lines * line
        wanted = (start + lane < ROWS * lines) & (at_row < m) & (at_col < n)
        place = ptr + at_row.to(tl.int64) * n + at_col
        token = do_ptx(_PREFETCH_LINE, "l,r,r", (place, wanted.to(tl.int32), token))
    return token


@triton.jit
def prefetch_operands(
    token, lane, row, col, m, n, epilogue_0_ptr, epilogue_1_ptr,
    EPILOGUE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Fetch a tile of the epilogue's operands of the result's size to the L2 cache. Returns a token.

    The tile: [ROWS, COLUMNS] from (row, col) of [m, n] on. lane: of the program, which has LANES lanes.
    """
    if EPILOGUE != "":
        ptrs = (epilogue_0_ptr, epilogue_1_ptr)
        for i in tl.static_range(1, tensor_count(EPILOGUE)):
            if kind_of(EPILOGUE, i) == "aux":
                token = _prefetch_tile(ptrs[auxiliary_of(EPILOGUE, i)], token, lane, row, col, m, n, ROWS, COLUMNS,
                                       LANES)  # fmt: skip
    return token


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
    """The OUTER that `rescale` takes: "group" becomes "tensor", with a pointer to the group's global scale."""
    return "tensor" if OUTER == "group" else OUTER


@triton.jit
def factor_of_rows(row, m, batch, a_outer_ptr, b_outer_ptr, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr):
    """The factor of `rescale_columns`: the product of the global or row scales that all columns share; 1.0 for none.

    With A_OUTER == "row" it is float32 of the shape of `row`, else a scalar.
    """
    factor = 1.0
    if A_OUTER == "tensor":
        factor = tl.load(a_outer_ptr)
    elif A_OUTER == "row":
        factor = tl.load(a_outer_ptr + tl.cast(batch, tl.int64) * m + row, mask=row < m, other=1.0)
    if B_OUTER == "tensor":
        other = tl.load(b_outer_ptr)
        factor = factor * other if A_OUTER != "none" else other
    return factor


@triton.jit
def rescale_columns(
    acc, factor, col, n, batch, b_outer_ptr, bias_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
):  # fmt: skip
    """The float32 sums at columns `col`, times (once) the product of the global or row scales, plus the column's bias.

    factor: from `factor_of_rows`.
    """
    other = factor
    bias = factor
    if B_OUTER == "row":
        b_rows = tl.cast(batch, tl.int64) * n if B_BATCHED else 0
        other = tl.load(b_outer_ptr + b_rows + col, mask=col < n, other=1.0)
    if BIAS:
        bias = tl.load(bias_ptr + col, mask=col < n, other=0.0).to(tl.float32)
    return rescale_values(acc, factor, other, bias, A_OUTER, B_OUTER, BIAS)


@triton.jit
def rescale_values(acc, factor, b_outer, bias, A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr):
    """The float32 sums, multiplied once by the product of the global or row scales, plus the bias.

    factor: from `factor_of_rows`. b_outer: row scales of B, for the sums' columns, if B_OUTER == "row". bias: theirs.
    """
    if B_OUTER == "row":
        factor = factor * b_outer if A_OUTER != "none" else b_outer
    if A_OUTER != "none" or B_OUTER != "none":
        acc = acc * factor
    if BIAS:
        acc = acc + bias
    return acc


@triton.jit
def rescale(
    acc, row, col, m, n, batch, a_outer_ptr, b_outer_ptr, bias_ptr,
    A_OUTER: tl.constexpr, B_OUTER: tl.constexpr, BIAS: tl.constexpr, B_BATCHED: tl.constexpr,
):  # fmt: skip
    """The float32 sums at (row, col), multiplied once by the product of the global or row scales, plus the bias."""
    factor = factor_of_rows(row, m, batch, a_outer_ptr, b_outer_ptr, A_OUTER, B_OUTER)
    return rescale_columns(acc, factor, col, n, batch, b_outer_ptr, bias_ptr, A_OUTER, B_OUTER, BIAS, B_BATCHED)


@triton.jit
def stored_ptr(ptr, ISA: tl.constexpr):
    """A pointer to floats, cast to a pointer to the type that `stored` returns."""
    if ptr.dtype.element_ty == tl.bfloat16 and ISA == 0:
        return ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return ptr


@triton.jit
def stored(value, ptr, ISA: tl.constexpr):
    """float32, rounded to the type at a pointer of `stored_ptr`; bfloat16 as its bits in the portable form."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if dtype == tl.int16:
        return float_bits(value, tl.bfloat16, ISA).to(tl.int16)
    else:
        return value.to(dtype)


@triton.jit
def store_rounded(out_ptr, at, value, mask, ISA: tl.constexpr):
    """Store float32 numbers, rounded to the type of out."""
    out_ptr = stored_ptr(out_ptr, ISA)
    tl.store(out_ptr + at, stored(value, out_ptr, ISA), mask=mask)
