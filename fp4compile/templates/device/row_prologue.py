"""Prologues with reductions: a program keeps whole rows on the chip and computes their statistics.

`read_row` loads a row of each operand once, computes all steps, stores the stored results, and returns the words of the
result. It takes the same PROLOGUE as `device.apply_prologue`, with reductions among its steps.

A value of the whole shape is a tuple of float32 tensors [ROWS, BLOCKS, BLOCK / 2]: for each tile of the row the even
columns, then the odd columns. A value of rows is a tuple of one tensor [ROWS, 1, 1]. The arithmetic follows Inductor's
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
    WHOLE: tl.constexpr, PIECES: tl.constexpr, PROLOGUE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The words of whole rows of the result, as a tuple of PIECES tiles in order.

    x_row: elements from one row of the first operand to the next. WHOLE: rows fill the tiles, so nothing needs a mask.
    """
    width: tl.constexpr = BLOCKS * BLOCK
    lefts = ()
    for i in tl.static_range(PIECES):
        left = width if WHOLE else tl.minimum(cols - i * width, width)
        lefts = lefts + (left,)
    # Past the last row a program reads the last row, so that whole rows need no masks.
    read = tl.minimum(row, rows - 1) if WHOLE else row
    values = load_rows(ptr, x_row, operands, batch, read, rows, cols, lefts, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN,
                       WHOLE, PROLOGUE)  # fmt: skip
    length = PIECES * width if WHOLE else cols
    for i in tl.static_range(step_count(PROLOGUE)):
        value = operate_on_rows(
            operation_of(PROLOGUE, i),
            values[place_of(PROLOGUE, i, 0)] if takes_value(PROLOGUE, i, 0) else (number_of(PROLOGUE, i, 0),),
            values[place_of(PROLOGUE, i, 1)] if takes_value(PROLOGUE, i, 1) else (number_of(PROLOGUE, i, 1),),
            lefts, length, ALIGN, WHOLE, ISA,
        )  # fmt: skip
        values = values + (value,)
    words = ()
    for i in tl.static_range(PIECES):
        for j in tl.static_range(stored_count(PROLOGUE)):
            ptr = operands[STORED_FROM + j]
            value = values[stored_of(PROLOGUE, j)]
            if len(value) > 1:
                tile = pack(value[2 * i], value[2 * i + 1], ptr.dtype.element_ty, ISA)
                to_tile(ptr, (tile,), batch, row, rows, i * width, cols, lefts[i], dtype, ROWS, BLOCKS, BLOCK, VECTORS,
                        ALIGN, False)  # fmt: skip
            elif i == 0:
                store_statistic(ptr, value[0], batch, row, rows, ROWS, ISA)
        result = values[result_of(PROLOGUE)]
        tile = pack(result[2 * i], result[2 * i + 1], dtype, ISA)
        if not WHOLE:
            tile = inside_tile((tile,), batch, row, rows, i * width, cols, lefts[i], dtype, ROWS, BLOCKS, BLOCK,
                               VECTORS, ALIGN, False)  # fmt: skip
        words = words + (tile,)
    return words


@triton.jit
def load_rows(
    ptr, x_row, operands, batch, row, rows, cols, lefts, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, PROLOGUE: tl.constexpr,
):  # fmt: skip
    """The values of the operands, tile by tile. lefts: number of columns from the beginning of each tile on."""
    count: tl.constexpr = tensor_count(PROLOGUE)
    columns = ()
    for i in tl.static_range(count):
        if kind_of(PROLOGUE, i) == "col":
            value, _ = operand_tile("col", operands[i - 1], batch, row, rows, 0, cols, cols, dtype, ROWS, BLOCKS, BLOCK,
                                    VECTORS, ALIGN, WHOLE)  # fmt: skip
            columns = columns + (value,)
        else:
            columns = columns + ((),)
    tiles = ()
    for piece in tl.static_range(len(lefts)):
        for i in tl.static_range(count):
            if i == 0:
                words = load_tile(ptr + (row.to(tl.int64) * x_row + piece * BLOCKS * BLOCK), lefts[piece], row < rows,
                                  dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)  # fmt: skip
                tiles = tiles + (unpack(words, dtype),)
            elif kind_of(PROLOGUE, i) == "col":
                tiles = tiles + ((),)
            else:
                even, odd = operand_tile(kind_of(PROLOGUE, i), operands[i - 1], batch, row, rows,
                                         piece * BLOCKS * BLOCK, cols, lefts[piece], dtype, ROWS, BLOCKS, BLOCK,
                                         VECTORS, ALIGN, WHOLE)  # fmt: skip
                tiles = tiles + (even + odd,)
    values = ()
    for i in tl.static_range(count):
        value = columns[i]
        for piece in tl.static_range(len(lefts)):
            value = value + tiles[piece * count + i]
        values = values + (value,)
    return values


@triton.constexpr_function
def reduces(OPERATION):
    return OPERATION.split(".")[0] in ("sum", "mean", "variance", "amax")


@triton.constexpr_function
def divides(OPERATION):
    """Whether a sum is divided by the number of columns at the end."""
    return OPERATION.split(".")[0] in ("mean", "variance")


@triton.constexpr_function
def longer(a, b):
    return max(a, b)


@triton.jit
def operate_on_rows(
    OPERATION: tl.constexpr, a, b, lefts, length, ALIGN: tl.constexpr, WHOLE: tl.constexpr, ISA: tl.constexpr
):
    """The value of a step on values a and b; b is unused if the operation takes one argument.

    lefts: as in `load_rows`. length: elements of a row.
    """
    if reduces(OPERATION):
        found = terms(OPERATION, a[0], a[1], b[0], lefts[0], ALIGN, WHOLE)
        for i in tl.static_range(1, len(lefts)):
            more = terms(OPERATION, a[2 * i], a[2 * i + 1], b[0], lefts[i], ALIGN, WHOLE)
            found = larger(found, more) if OPERATION == "amax" else found + more
        found = row_amax(found) if OPERATION == "amax" else row_sum(found)
        return (found / length if divides(OPERATION) else found,)
    elif (OPERATION == "bfloat16" or OPERATION == "float16") and len(a) > 1:
        # Two elements at a time, into the words that may also be stored.
        value = ()
        for i in tl.static_range(len(lefts)):
            if OPERATION == "bfloat16":
                value = value + unpack(pack(a[2 * i], a[2 * i + 1], tl.bfloat16, ISA), tl.bfloat16)
            else:
                value = value + unpack(pack(a[2 * i], a[2 * i + 1], tl.float16, ISA), tl.float16)
        return value
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
        inside: tl.constexpr = WHOLE or OPERATION == "sum.zeros" or OPERATION == "mean.zeros"
        return sum_terms(even, odd, cols, ALIGN, inside)


@triton.jit
def sum_terms(even, odd, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """even + odd, 0 beyond `cols` columns. INSIDE: the inputs are 0 there, or there are no such columns."""
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
