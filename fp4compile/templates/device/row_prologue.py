"""Prologues with reductions: a program keeps whole rows on the chip and computes their statistics.

`read_row` loads a row of each operand once, computes all steps, stores the stored results, and returns the words of the
result. It takes the same PROLOGUE as `device.apply_prologue`, with reductions among its steps.

A value of the whole shape is a tuple of two float32 tensors [ROWS, BLOCKS, BLOCK / 2]: the even columns and the odd
columns. A value of rows is a tuple of one tensor [ROWS, 1, 1]. The arithmetic follows Inductor's
persistent reductions: float32, a variance by its mean. A sum adds even and odd columns, then the elements of a block,
then blocks, so it may differ from Inductor's sum in its last bits. Given equal sums, all later steps have Inductor's
bits.
"""

import triton
import triton.language as tl

from fp4compile.templates.device.apply_epilogue import store_rounded
from fp4compile.templates.device.apply_prologue import (
    STORED_FROM,
    inside_tile,
    operand_tile,
    result_of,
    stored_count,
    stored_of,
    to_tile,
)
from fp4compile.templates.device.elements import pack, unpack
from fp4compile.templates.device.memory import load_tile
from fp4compile.templates.device.pointwise import (
    kind_of,
    number_of,
    operate,
    operation_of,
    place_of,
    step_count,
    takes_value,
    tensor_count,
)

# ---------------------------------------------------------------- rows


@triton.jit
def read_row(
    ptr, x_row, operands, batch, row, rows, cols, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The words of whole rows of the result.

    x_row: elements from one row of the first operand to the next. WHOLE: rows fill the tile, so nothing needs a mask.
    """
    length = BLOCKS * BLOCK if WHOLE else cols
    # Past the last row a program reads the last row, so that whole rows need no masks.
    read = tl.minimum(row, rows - 1) if WHOLE else row
    words = load_tile(ptr + read.to(tl.int64) * x_row, length, read < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN,
                      WHOLE)  # fmt: skip
    values = (unpack(words, dtype),)
    for i in tl.static_range(1, tensor_count(PROLOGUE)):
        even, odd = operand_tile(kind_of(PROLOGUE, i), operands[i - 1], batch, read, rows, 0, cols, length, dtype, ROWS,
                                 BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)  # fmt: skip
        values = values + ((even if kind_of(PROLOGUE, i) == "col" else even + odd),)
    for i in tl.static_range(step_count(PROLOGUE)):
        value = operate_on_rows(
            operation_of(PROLOGUE, i),
            values[place_of(PROLOGUE, i, 0)] if takes_value(PROLOGUE, i, 0) else (number_of(PROLOGUE, i, 0),),
            values[place_of(PROLOGUE, i, 1)] if takes_value(PROLOGUE, i, 1) else (number_of(PROLOGUE, i, 1),),
            length, ALIGN, WHOLE, ISA,
        )  # fmt: skip
        values = values + (value,)
    for j in tl.static_range(stored_count(PROLOGUE)):
        ptr = operands[STORED_FROM + j]
        value = values[stored_of(PROLOGUE, j)]
        if len(value) > 1:
            tile = pack(value[0], value[1], ptr.dtype.element_ty, ISA)
            to_tile(ptr, tile, batch, row, rows, 0, cols, length, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN)
        else:
            store_statistic(ptr, value[0], batch, row, rows, ROWS, ISA)
    result = values[result_of(PROLOGUE)]
    words = pack(result[0], result[1], dtype, ISA)
    return inside_tile(words, row < rows, length, ALIGN, WHOLE)


@triton.constexpr_function
def reduces(OPERATION):
    return OPERATION in ("sum", "mean", "variance", "amax")


@triton.constexpr_function
def has_reductions(PROLOGUE):
    return PROLOGUE != "" and any(reduces(operation_of(PROLOGUE, i)) for i in range(step_count(PROLOGUE)))


@triton.constexpr_function
def divides(OPERATION):
    """Whether a sum is divided by the number of columns at the end."""
    return OPERATION in ("mean", "variance")


@triton.constexpr_function
def longer(a, b):
    return max(a, b)


@triton.jit
def operate_on_rows(OPERATION: tl.constexpr, a, b, length, ALIGN: tl.constexpr, WHOLE: tl.constexpr, ISA: tl.constexpr):
    """The value of a step on values a and b; b is unused if the operation takes one argument.

    length: elements of a row.
    """
    if reduces(OPERATION):
        found = terms(OPERATION, a[0], a[1], b[0], length, ALIGN, WHOLE)
        found = row_amax(found) if OPERATION == "amax" else row_sum(found)
        return (found / length if divides(OPERATION) else found,)
    elif (OPERATION == "bfloat16" or OPERATION == "float16") and len(a) > 1:
        # Two elements at a time, into the words that may also be stored.
        if OPERATION == "bfloat16":
            return unpack(pack(a[0], a[1], tl.bfloat16, ISA), tl.bfloat16)
        else:
            return unpack(pack(a[0], a[1], tl.float16, ISA), tl.float16)
    else:
        value = ()
        for i in tl.static_range(longer(len(a), len(b))):
            value = value + (operate(OPERATION, a[i % len(a)], b[i % len(b)], ISA),)
        return value


# ---------------------------------------------------------------- reductions: tiles to [ROWS, 1, 1]


@triton.jit
def replaced_outside(even, odd, cols, ALIGN: tl.constexpr, VALUE: tl.constexpr):
    """(even, odd) with VALUE in the columns beyond `cols`."""
    half: tl.constexpr = even.shape[2]
    word = tl.arange(0, even.shape[1])[None, :, None] * half + tl.arange(0, half)[None, None, :]
    if ALIGN > 0:  # whole vectors are compared, as for loads
        inside = word // ALIGN < cols // 2 // ALIGN
        return tl.where(inside, even, VALUE), tl.where(inside, odd, VALUE)
    else:
        return tl.where(2 * word < cols, even, VALUE), tl.where(2 * word + 1 < cols, odd, VALUE)


@triton.jit
def terms(OPERATION: tl.constexpr, even, odd, mean, cols, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    """The terms that a reduction adds or compares, of one tile. mean: for a variance."""
    if OPERATION == "variance":
        return deviation_terms(even, odd, mean, cols, ALIGN, WHOLE)
    elif OPERATION == "amax":
        return amax_terms(even, odd, cols, ALIGN, WHOLE)
    else:
        return sum_terms(even, odd, cols, ALIGN, WHOLE)


@triton.jit
def sum_terms(even, odd, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """even + odd, 0 beyond `cols` columns. INSIDE: there are no such columns."""
    if not INSIDE:
        even, odd = replaced_outside(even, odd, cols, ALIGN, 0.0)
    return even + odd


@triton.jit
def deviation_terms(even, odd, mean, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """The squares of differences from the mean. INSIDE: there are no columns beyond `cols`."""
    even = even - mean
    odd = odd - mean
    return sum_terms(even * even, odd * odd, cols, ALIGN, INSIDE)


@triton.jit
def amax_terms(even, odd, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """The maximum of even and odd, -inf beyond `cols` columns. INSIDE: there are no such columns."""
    if not INSIDE:
        even, odd = replaced_outside(even, odd, cols, ALIGN, float("-inf"))
    return larger(even, odd)


@triton.jit
def larger(one, other):
    return tl.maximum(one, other, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def row_sum(terms):
    return tl.sum(tl.sum(terms, 2), 1)[:, None, None]


@triton.jit
def row_amax(terms):
    return tl.reduce(tl.reduce(terms, 2, larger), 1, larger)[:, None, None]


# ---------------------------------------------------------------- stores


@triton.jit
def store_statistic(ptr, value, batch, row, rows, ROWS: tl.constexpr, ISA: tl.constexpr):
    """Store one result per row, [ROWS, 1, 1], rounded to the type at ptr."""
    store_rounded(ptr, batch.to(tl.int64) * rows + row, tl.reshape(value, (ROWS,)), row < rows, ISA)
