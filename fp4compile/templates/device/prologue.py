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
others are those of the form's load. ptr: where the load begins in the first operand. Other operands lie contiguous.

Several results are the matrices of a batch, as a kernel sees them; the operands are one matrix. A program then branches
to the steps of its own result, so that no thread holds two. `tile_of` and `seed_of` mean printed functions as well:
programs that follow one another take the same tile of each result, and what they read again comes from the cache.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import torch
import triton
import triton.language as tl

from fp4compile.prologue import OPERANDS, Prologue
from fp4compile.templates.device.column_tile import load_column_tile, store_column_tile, unpack_column_tile
from fp4compile.templates.device.elements import float_bits, pack
from fp4compile.templates.device.memory import FIRST_AXIS_FASTEST, load_tile, load_words, store_tile
from fp4compile.templates.device.pointwise import CALLED, device_functions, printed_step, with_functions
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


@triton.jit
def seed_of(seed_ptr, batch):
    """(where the seed of a matrix is, the matrix by whose place in the tensor random words are drawn)."""
    return seed_ptr, batch


@triton.jit
def tile_of_one(program, col_tiles, FLAT: tl.constexpr):
    """(row tile, column tile) of a program of one matrix, as `tile_of`."""
    if FLAT:
        return program * 0, program
    else:
        col_tiles = tl.maximum(col_tiles, 1).to(tl.uint32)
        row_tile = program.to(tl.uint32) // col_tiles
        return row_tile.to(tl.int32), (program.to(tl.uint32) - row_tile * col_tiles).to(tl.int32)


# ---------------------------------------------------------------- operands: (even columns, odd columns), float32 tuples


@triton.constexpr_function
def vectors_of(vectors, dtype, own):
    """How many runs of 16 bytes of an operand hold the elements of `vectors` runs of the first: one thread's."""
    return max(1, vectors * own.primitive_bitwidth // dtype.primitive_bitwidth)


@triton.jit
def operand_ptr(ptr, batch, rows, col0, cols):
    """Where the columns from col0 on of a matrix of a contiguous batch begin."""
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
_ARGUMENTS = {"tile": _TILE, "column_tile": _COLUMNS, "register_tile": _REGISTERS}
_LOADS = {
    "tile": "(load_tile(ptr, cols_left, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE),)",
    "column_tile":
        "load_column_tile(ptr, row0, rows, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE)",
    "register_tile":
        "load_register_tile(ptr, row0, rows, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE)",
}  # fmt: skip


def source(prologue: Prologue, form: str, wide: bool) -> str:
    """The source of the steps, and of the device function that reads a form of tile.

    wide: whether the first operand is float32 and the result is not. Kernels then take the result for float32, too.
    """
    if not prologue.several:
        numbers = range(len(prologue.steps))
        stored = list(enumerate(prologue.stored))
        return _of_result("", prologue, form, wide, numbers, prologue.kinds, prologue.result, stored)
    arguments, parameters = _arguments(form)
    texts, branches = [], []
    for i, number in enumerate(prologue.several):
        own = prologue.stored_with(number)
        stored = [(place, each) for place, each in enumerate(prologue.stored) if each in own]
        texts.append(_of_result(f"_{i}", prologue, form, wide, prologue.needed([number]), prologue.operands_of(number),
                                (number, prologue.dtype), stored, turned=i % 2 == 1))  # fmt: skip
        condition = "if matrix == 0" if i == 0 else f"elif matrix == {i}" if i + 1 < len(prologue.several) else "else"
        branches += [f"    {condition}:"]
        branches += [f"        words = read_{form}_{i}(ptr, operands, {arguments}, ISA, STORES)"]
    lines = ["@triton.jit", f"def read_{form}(ptr, operands, {parameters}, ISA: tl.constexpr, STORES: tl.constexpr):",
             "    matrix = batch", "    batch = batch * 0"]  # fmt: skip
    return "\n\n".join([*texts, "\n".join([*lines, *branches, "    return words"]) + "\n"])


def _arguments(form: str) -> tuple[str, str]:
    """What the functions of a form take: as arguments, and as parameters."""
    arguments = _ARGUMENTS[form]
    return arguments, ", ".join(
        f"{name}: tl.constexpr" if name.isupper() or name == "dtype" else name for name in arguments.split(", ")
    )


def _of_result(
    suffix: str, prologue: Prologue, form: str, wide: bool, numbers: Iterable[int], operands: Mapping[int, str],
    result: tuple[int, torch.dtype], stored: Sequence[tuple[int, tuple[int, torch.dtype]]], turned: bool = False,
) -> str:  # fmt: skip
    """The source of one result: suffix of its functions, its steps and operands, what is stored besides and where.

    turned: whether the operands are loaded in reverse.
    """
    kinds = sorted(operands.items())
    names = ", ".join(f"{kind}{i}" for i, kind in kinds)
    arguments, parameters = _arguments(form)
    wanted = [result, *(each for _, each in stored if wide or each != result)]
    results = [f"s{number}" for number, _ in wanted]
    words = ["words", *(f"words{i}" for i in range(1, len(wanted)))]
    lines = ["@triton.jit", f"def prologue{suffix}({names}, ISA: tl.constexpr):"]
    lines += [f"    s{i} = {printed_step(prologue.steps, i)}" for i in numbers]
    lines += [f"    return {', '.join(results)}", "", ""]
    lines += ["@triton.jit"]
    lines += [f"def read_{form}{suffix}(ptr, operands, {parameters}, ISA: tl.constexpr, STORES: tl.constexpr):"]
    # Loads of two results in one order would be moved out of their branches, and take the registers of both.
    for i, kind in reversed(kinds) if turned else kinds:
        load = f"{kind}_{form}(operands[{i - 1}], {arguments})" if i else f"unpack_column_tile({_LOADS[form]}, dtype)"
        lines += [f"    first{i}, second{i} = {load}"]
    lines += [f"    {each} = ()" for each in words]
    whole = min(i for i, kind in kinds if kind == "aux")
    lines += [f"    for i in tl.static_range(len(first{whole})):"]
    for side in ("first", "second"):
        values = ", ".join(f"{side}{i}[i]" for i, _ in kinds)
        lines += [f"        {', '.join(f'{side}_{each}' for each in results)} = prologue{suffix}({values}, ISA)"]
    for each, name, (_, dtype) in zip(words, results, wanted, strict=True):
        own = f"tl.{str(dtype).removeprefix('torch.')}"
        both = [f"{side}_{name}" for side in ("first", "second")]
        if wide and each == "words":
            both = [f"rounded({side}, {own}, ISA)" for side in both]
        packed = f"pack({', '.join(both)}, {'dtype' if each == 'words' else own}, ISA)"
        lines += [f"        {each} = {each} + ({packed},)"]
    lines += ["    if STORES:"] if stored else []
    for place, each in stored:
        which = words[wanted.index(each, int(wide))]
        lines += [f"        to_{form}(operands[{OPERANDS - 1 + place}], {which}, {arguments})"]
    return "\n".join([*lines, f"    return inside_{form}(words, {arguments})"]) + "\n"


def placing(results: int) -> str:
    """The source of `tile_of` and `seed_of` of so many results, the result fastest in the order of programs."""
    return f"""\
@triton.jit
def tile_of(program, rows, col_tiles, ROWS: tl.constexpr, FLAT: tl.constexpr, UNSIGNED: tl.constexpr):
    row_tile, col_tile = tile_of_one(program // {results}, col_tiles, FLAT)
    return program % {results}, row_tile, col_tile


@triton.jit
def seed_of(seed_ptr, batch):
    return seed_ptr + batch, batch * 0
"""


# What a printed function may use.
_NAMES = {
    function.__name__: function
    for function in (
        pack, unpack_column_tile, load_tile, load_column_tile, load_register_tile,
        aux_tile, row_tile, col_tile, inside_tile, aux_column_tile, row_column_tile, col_column_tile,
        inside_column_tile, aux_register_tile, row_register_tile, col_register_tile, inside_register_tile,
        to_tile, to_column_tile, to_register_tile, rounded, tile_of_one,
    )
} | {"triton": triton, "tl": tl, **CALLED}  # fmt: skip


@cache
def _printed(text: str) -> dict[str, object]:
    return device_functions(text, _NAMES)


@cache
def with_prologue(kernel, prologue: Prologue, wide: bool):
    """The kernel, which reads the result of these steps in the place of a tensor. wide: see `source`."""
    read = kernel.fn.__globals__
    functions = {f"read_{form}": _printed(source(prologue, form, wide))[f"read_{form}"]
                 for form in _ARGUMENTS if f"read_{form}" in read}  # fmt: skip
    if prologue.several:
        placed = _printed(placing(len(prologue.several)))
        functions |= {name: placed[name] for name in ("tile_of", "seed_of") if name in read}
    return with_functions(kernel, functions)
