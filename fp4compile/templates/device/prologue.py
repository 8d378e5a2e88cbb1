"""What a quantiser reads: a tile of a tensor in memory or, with a prologue, of the result of pointwise operations.

The kernels read their tiles by `read_tile`, `read_column_tile` or `read_register_tile`, which load them.
`with_prologue` makes a copy of a kernel in which these names mean device functions that `source` prints: they load the
tile of each operand, compute the steps on pairs of elements, and return the results, rounded to the tensor's dtype, as
words. So all that a kernel does with words is the same. See `device.pointwise` for the way in which this is done.

Outside of the tensor the words are 0, whatever the steps make of zeros. The arithmetic is that of Inductor, as in an
epilogue. What the prologue stores is written by a read whose STORES is set: a kernel that reads a tile twice sets it
once. The pointers of what is stored come after those of the operands.

The forms of a tile have the arguments of `_ARGUMENTS` in common. batch, rows, cols: the matrix of the batch, and the
size of each. row (a vector) or row0, col0: where the tile lies in its matrix. cols_left: columns from there on. All
others are those of the form's load. ptr: where the load begins in the first operand. Other operands lie contiguous, or
their rows have a distance that is printed in the place of cols (slices of the columns of wider tensors).
"""

from functools import cache

import triton
import triton.language as tl

from fp4compile.prologue import OPERANDS, Prologue
from fp4compile.templates.device.column_tile import load_column_tile, store_column_tile, unpack_column_tile
from fp4compile.templates.device.elements import float_bits, pack
from fp4compile.templates.device.memory import FIRST_AXIS_FASTEST, load_tile, load_words, store_tile
from fp4compile.templates.device.pointwise import device_functions, erf, exp, printed_steps, rsqrt, tanh, with_functions
from fp4compile.templates.device.register_tile import (
    DEPTH,
    load_register_tile,
    split_words,
    store_register_tile,
    tile_index,
)

# ---------------------------------------------------------------- tiles of a tensor in memory


@triton.jit
def read_tile(
    ptr, operands, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of a tile, as `load_tile`."""
    return load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)


@triton.jit
def read_column_tile(
    ptr, operands, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of a column tile, as `load_column_tile`."""
    return load_column_tile(ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def read_register_tile(
    ptr, operands, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
    ISA: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """The words of register tiles, as `load_register_tile`."""
    return load_register_tile(ptr, row0, rows, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)


# ---------------------------------------------------------------- operands: (even columns, odd columns), float32 tuples


@triton.constexpr_function
def vectors_of(vectors, dtype, own):
    """How many runs of 16 bytes of an operand hold the elements of `vectors` runs of the first: one thread's."""
    return max(1, vectors * own.primitive_bitwidth // dtype.primitive_bitwidth)


@triton.jit
def operand_ptr(ptr, batch, rows, col0, cols):
    """Where the columns from col0 on of a matrix of a batch begin, all of whose rows lie `cols` elements apart."""
    return ptr + (batch.to(tl.int64) * rows * cols + col0)


@triton.jit
def aux_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
    vectors: tl.constexpr = vectors_of(VECTORS, dtype, own)
    words = load_tile(row_ptr, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN, WHOLE)
    return unpack_column_tile((words,), own)


@triton.jit
def row_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = ptr + col0 + row * 0
    words = load_tile(row_ptr, cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE)
    return unpack_column_tile((words,), own)


@triton.jit
def col_tile(
    ptr, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    value = tl.load(ptr + batch.to(tl.int64) * rows + row, mask=row < rows, other=0.0).to(tl.float32)[:, None, None]
    return (value,), (value,)


@triton.jit
def aux_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    tile = load_column_tile(ptr, row0, rows, cols_left, cols, own, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)
    return unpack_column_tile(tile, own)


@triton.jit
def row_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    words = load_words(ptr + col0, tl.arange(0, WORDS)[None, :], cols_left, True, own, ALIGN)
    tile = ()
    for _ in tl.static_range(BLOCK):
        tile = tile + (words,)
    return unpack_column_tile(tile, own)


@triton.jit
def col_column_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    return column_operands(ptr + batch.to(tl.int64) * rows, row, rows, BLOCK, 1)


@triton.jit
def aux_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    tile = load_register_tile(ptr, row0, rows, cols_left, cols, own, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)
    return unpack_column_tile(tile, own)


@triton.jit
def row_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    word = tile_index(tl.arange(0, COL_TILES) * WORDS, 1) + tl.arange(0, WORDS)[None, None, :]
    words = load_words(ptr + col0, word, cols_left, True, own, ALIGN)
    words = split_words(tl.permute(words, (1, 0, 2)) if FIRST_AXIS_FASTEST else words)
    tile = ()
    for _ in tl.static_range(DEPTH):
        tile = tile + words
    return unpack_column_tile(tile, own)


@triton.jit
def col_register_tile(
    ptr, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * DEPTH
    return column_operands(ptr + batch.to(tl.int64) * rows, row, rows, DEPTH, WORDS)


@triton.jit
def column_operands(ptr, row, rows, COUNT: tl.constexpr, TIMES: tl.constexpr):
    """An element each of the COUNT rows from `row` on, TIMES times, for the even and for the odd columns."""
    values = ()
    for i in tl.static_range(COUNT):
        value = tl.load(ptr + row + i, mask=row < rows - i, other=0.0).to(tl.float32)
        for _ in tl.static_range(TIMES):
            values = values + (value,)
    return values, values


# ---------------------------------------------------------------- results


@triton.jit
def to_tile(
    ptr, words, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    row_ptr = operand_ptr(ptr, batch, rows, col0, cols) + row.to(tl.int64) * cols
    vectors: tl.constexpr = vectors_of(VECTORS, dtype, own)
    store_tile(row_ptr, words[0], cols_left, row < rows, own, ROWS, BLOCKS, BLOCK, vectors, ALIGN, WHOLE)


@triton.jit
def to_column_tile(
    ptr, words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    store_column_tile(ptr, words, row0, rows, cols_left, cols, own, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def to_register_tile(
    ptr, words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    own: tl.constexpr = ptr.dtype.element_ty
    ptr = operand_ptr(ptr, batch, rows, col0, cols)
    store_register_tile(ptr, words, row0, rows, cols_left, cols, own, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)


@triton.jit
def inside_tile(
    words, batch, row, rows, col0, cols, cols_left, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a tile, those outside of the tensor as 0."""
    half: tl.constexpr = BLOCK // 2
    word = tl.arange(0, BLOCKS)[None, :, None] * half + tl.arange(0, half)[None, None, :]
    return words_inside(words[0], word, cols_left, (row < rows)[:, None, None], ALIGN, WHOLE)


@triton.jit
def inside_column_tile(
    words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of a column tile, those outside of the tensor as 0."""
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * BLOCK
    word = tl.arange(0, WORDS)[None, :]
    tile = ()
    for i in tl.static_range(BLOCK):
        tile = tile + (words_inside(words[i], word, cols_left, row < rows - i, ALIGN, WHOLE),)
    return tile


@triton.jit
def inside_register_tile(
    words, batch, row0, rows, col0, cols, cols_left, x_row, dtype: tl.constexpr,
    ROW_TILES: tl.constexpr, COL_TILES: tl.constexpr, WORDS: tl.constexpr, ALIGN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The words of register tiles, those outside of the tensor as 0."""
    row = row0 + tl.arange(0, ROW_TILES)[:, None] * DEPTH
    word = tl.arange(0, COL_TILES)[None, :] * WORDS
    tile = ()
    for i in tl.static_range(DEPTH):
        for j in tl.static_range(WORDS):
            tile = tile + (words_inside(words[i * WORDS + j], word + j, cols_left, row < rows - i, ALIGN, WHOLE),)
    return tile


@triton.jit
def rounded(value, dtype: tl.constexpr, ISA: tl.constexpr):
    """float32 rounded to a `dtype` of 16 bits, in float32."""
    bits = float_bits(value, dtype, ISA)
    if dtype == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def words_inside(words, word, cols, row_mask, ALIGN: tl.constexpr, WHOLE: tl.constexpr):
    """Words of two elements, number `word` of their rows: 0 beyond `cols` elements and without row_mask."""
    if WHOLE:
        return words
    elif ALIGN > 0:
        return tl.where(row_mask & (word // ALIGN < cols // 2 // ALIGN), words, 0)
    else:
        half: tl.constexpr = words.dtype.primitive_bitwidth // 2
        last = tl.where(row_mask & (2 * word < cols), words & ((1 << half) - 1), 0)
        return tl.where(row_mask & (2 * word + 1 < cols), words, last)


# ---------------------------------------------------------------- with a prologue

_TILE = "batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE"
_COLUMNS = "batch, row0, rows, col0, cols, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE"
_REGISTERS = "batch, row0, rows, col0, cols, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE"
# (number of an operand, elements from one of its rows to the next)
RowStrides = tuple[tuple[int, int], ...]
_ARGUMENTS = {"tile": _TILE, "column_tile": _COLUMNS, "register_tile": _REGISTERS}
_LOADS = {
    "tile": "(load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE),)",
    "column_tile":
        "load_column_tile(ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)",
    "register_tile":
        "load_register_tile(ptr, row0, rows, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)",
}  # fmt: skip


def source(prologue: Prologue, form: str, wide: bool, row_strides: RowStrides = ()) -> str:
    """The source of the steps, and of the device function that reads a form of tile.

    wide: whether the first operand is float32 and the result is not. Kernels then take the result for float32, too.
    row_strides: of other operands whose rows are not contiguous.
    """
    kinds = [kind for _, kind in sorted(prologue.kinds.items())]
    names = ", ".join(f"{kind}{i}" for i, kind in enumerate(kinds))
    arguments = _ARGUMENTS[form]
    parameters = ", ".join(
        f"{name}: tl.constexpr" if name.isupper() or name == "dtype" else name for name in arguments.split(", ")
    )
    wanted = [prologue.result, *(each for each in prologue.stored if wide or each != prologue.result)]
    results = [f"s{number}" for number, _ in wanted]
    words = ["words", *(f"words{i}" for i in range(1, len(wanted)))]
    lines = ["@triton.jit", f"def prologue({names}):"]
    lines += ["    " + line for line in printed_steps(prologue.steps)]
    lines += [f"    return {', '.join(results)}", "", ""]
    lines += ["@triton.jit", f"def read_{form}(ptr, operands, {parameters}, ISA: tl.constexpr, STORES: tl.constexpr):"]
    lines += [f"    first0, second0 = unpack_column_tile({_LOADS[form]}, dtype)"]
    apart = {i: arguments.replace("col0, cols,", f"col0, {stride},") for i, stride in row_strides}
    lines += [f"    first{i}, second{i} = {kind}_{form}(operands[{i - 1}], {apart.get(i, arguments)})"
              for i, kind in enumerate(kinds) if i]  # fmt: skip
    lines += [f"    {each} = ()" for each in words]
    lines += ["    for i in tl.static_range(len(first0)):"]
    for side in ("first", "second"):
        operands = ", ".join(f"{side}{i}[i]" for i in range(len(kinds)))
        lines += [f"        {', '.join(f'{side}_{result}' for result in results)} = prologue({operands})"]
    for each, result, (_, dtype) in zip(words, results, wanted, strict=True):
        own = f"tl.{str(dtype).removeprefix('torch.')}"
        both = [f"{side}_{result}" for side in ("first", "second")]
        if wide and each == "words":
            both = [f"rounded({side}, {own}, ISA)" for side in both]
        packed = f"pack({', '.join(both)}, {'dtype' if each == 'words' else own}, ISA)"
        lines += [f"        {each} = {each} + ({packed},)"]
    lines += ["    if STORES:"] if prologue.stored else []
    for place, each in enumerate(prologue.stored, OPERANDS - 1):
        which = words[wanted.index(each, int(wide))]
        lines += [f"        to_{form}(operands[{place}], {which}, {arguments})"]
    return "\n".join([*lines, f"    return inside_{form}(words, {arguments})"]) + "\n"


# What a printed function may use.
_NAMES = {
    function.__name__: function
    for function in (
        erf, exp, rsqrt, tanh, pack, unpack_column_tile, load_tile, load_column_tile, load_register_tile,
        aux_tile, row_tile, col_tile, inside_tile, aux_column_tile, row_column_tile, col_column_tile,
        inside_column_tile, aux_register_tile, row_register_tile, col_register_tile, inside_register_tile,
        to_tile, to_column_tile, to_register_tile, rounded,
    )
} | {"triton": triton, "tl": tl}  # fmt: skip


@cache
def _reader(text: str, form: str):
    return device_functions(text, _NAMES)[f"read_{form}"]


@cache
def with_prologue(kernel, prologue: Prologue, wide: bool, row_strides: RowStrides = ()):
    """The kernel, which reads the result of these steps in the place of a tensor. wide, row_strides: see `source`."""
    forms = [form for form in _ARGUMENTS if f"read_{form}" in kernel.fn.__globals__]
    texts = {form: source(prologue, form, wide, row_strides) for form in forms}
    return with_functions(kernel, {f"read_{form}": _reader(text, form) for form, text in texts.items()})
