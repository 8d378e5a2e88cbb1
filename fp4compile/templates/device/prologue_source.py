"""Kernels that quantise the result of a prologue: the device functions of its steps, printed.

`with_prologue` makes a copy of a kernel in which the reading functions of `device.prologue` mean those that `source`
prints: they load the tile of each operand, compute the steps on pairs of elements, and return the results, rounded to
the tensor's dtype, as words. So all that a kernel does with words is the same. See `device.pointwise` for the way in
which this is done.

Outside of the tensor the words are 0, whatever the steps make of zeros. The arithmetic is that of Inductor, as in an
epilogue. What the prologue stores is written by a read whose STORES is set: a kernel that reads a tile twice sets it
once. The pointers of what is stored come after those of the operands.

Several results are the matrices of a batch, as a kernel sees them; the operands are one matrix. A program then branches
to the steps of its own result, so that no thread holds two. `tile_of` and `seed_of` mean printed functions as well:
programs that follow one another take the same tile of each result, and what they read again comes from the cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from fp4compile.formats.prologue import OPERANDS, Prologue
from fp4compile.templates.device.column_tile import load_column_tile, unpack_column_tile
from fp4compile.templates.device.elements import pack
from fp4compile.templates.device.memory import load_tile
from fp4compile.templates.device.pointwise import CALLED, device_functions, printed_step, with_functions
from fp4compile.templates.device.prefetch import prefetch
from fp4compile.templates.device.prologue import (
    aux_column_tile,
    aux_register_tile,
    aux_tile,
    col_column_tile,
    col_register_tile,
    col_tile,
    inside_column_tile,
    inside_register_tile,
    inside_tile,
    rounded,
    row_column_tile,
    row_register_tile,
    row_tile,
    tile_of_one,
    to_column_tile,
    to_register_tile,
    to_tile,
)
from fp4compile.templates.device.register_tile import load_register_tile

# What the reading functions of each form of tile take after the pointers.
_TILE = "batch, row, rows, col0, cols, cols_left, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN, WHOLE"
_COLUMNS = "batch, row0, rows, col0, cols, cols_left, x_row, dtype, BLOCK, ROW_TILES, WORDS, ALIGN, WHOLE"
_REGISTERS = "batch, row0, rows, col0, cols, cols_left, x_row, dtype, ROW_TILES, COL_TILES, WORDS, ALIGN, WHOLE"
Dtypes = tuple[torch.dtype, ...]
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


def source(prologue: Prologue, form: str, dtypes: Dtypes, row_strides: RowStrides = ()) -> str:
    """The source of the steps, and of the device function that reads a form of tile.

    dtypes: of the operands. If the first one is float32 and the result is not, kernels take the result for float32.
    row_strides: of other operands whose rows are not contiguous.
    """
    prologue = prologue.shortened()
    if not prologue.several:
        one = _Result("", prologue.result, tuple(prologue.computed), prologue.kinds,
                      tuple(enumerate(prologue.stored)))  # fmt: skip
        return _of_result(one, prologue, form, dtypes, row_strides)
    arguments, parameters = _arguments(form)
    texts, branches = [], []
    for i, number in enumerate(prologue.several):
        own = prologue.stored_with(number)
        stored = tuple((place, each) for place, each in enumerate(prologue.stored) if each in own)
        one = _Result(f"_{i}", (number, prologue.dtype), tuple(prologue.needed([number])), prologue.operands_of(number),
                      stored, turned=i % 2 == 1)  # fmt: skip
        texts.append(_of_result(one, prologue, form, dtypes, row_strides))
        condition = "if matrix == 0" if i == 0 else f"elif matrix == {i}" if i + 1 < len(prologue.several) else "else"
        branches += [f"    {condition}:"]
        branches += [f"        words = read_{form}_{i}(ptr, operands, {arguments}, ISA, STORES)"]
    lines = ["@triton.jit", f"def read_{form}(ptr, operands, {parameters}, ISA: tl.constexpr, STORES: tl.constexpr):",
             "    matrix = batch", "    batch = batch * 0"]  # fmt: skip
    return "\n\n".join([*texts, "\n".join([*lines, *branches, "    return words"]) + "\n"])


@dataclass(frozen=True)
class _Result:
    """What is printed of one result of a prologue.

    suffix: of the names of its functions. result: its step, and the dtype that it is rounded to. steps: the numbers of
    the steps that it needs. operands: how each operand that it needs is read, by number. stored: what is stored
    besides, by its place in `Prologue.stored`. turned: whether the operands are loaded in reverse.
    """

    suffix: str
    result: tuple[int, torch.dtype]
    steps: tuple[int, ...]
    operands: Mapping[int, str]
    stored: tuple[tuple[int, tuple[int, torch.dtype]], ...]
    turned: bool = False


def _arguments(form: str) -> tuple[str, str]:
    """What the functions of a form take: as arguments, and as parameters."""
    arguments = _ARGUMENTS[form]
    return arguments, ", ".join(
        f"{name}: tl.constexpr" if name.isupper() or name == "dtype" else name for name in arguments.split(", ")
    )


def _of_result(one: _Result, prologue: Prologue, form: str, dtypes: Dtypes, row_strides: RowStrides) -> str:
    """The source of the functions of one result; the others as in `source`."""
    suffix, wide = one.suffix, dtypes[0] != prologue.dtype
    narrow = {f"{kind}{i}" for i, kind in one.operands.items() if dtypes[i].itemsize == 2}
    kinds = sorted(one.operands.items())
    names = ", ".join(f"{kind}{i}" for i, kind in kinds)
    arguments, parameters = _arguments(form)
    wanted = [one.result, *(each for _, each in one.stored if wide or each != one.result)]
    results = [f"s{number}" for number, _ in wanted]
    words = ["words", *(f"words{i}" for i in range(1, len(wanted)))]
    lines = ["@triton.jit", f"def prologue{suffix}({names}, ISA: tl.constexpr):"]
    lines += [f"    s{i} = {printed_step(prologue.steps, i, narrow)}" for i in one.steps]
    lines += [f"    return {', '.join(results)}", "", ""]
    lines += ["@triton.jit"]
    lines += [f"def read_{form}{suffix}(ptr, operands, {parameters}, ISA: tl.constexpr, STORES: tl.constexpr):"]
    apart = {i: arguments.replace("col0, cols,", f"col0, {stride},") for i, stride in row_strides}
    # Loads of two results in one order would be moved out of their branches, and take the registers of both.
    for i, kind in reversed(kinds) if one.turned else kinds:
        load = f"unpack_column_tile({_LOADS[form]}, dtype)"
        if i:
            load = f"{kind}_{form}(operands[{i - 1}], {apart.get(i, arguments)})"
        lines += [f"    first{i}, second{i} = {load}"]
    lines += [f"    {each} = ()" for each in words]
    whole = min(i for i, kind in kinds if kind == "aux")
    lines += [f"    for i in tl.static_range(len(first{whole})):"]
    if form == "tile":
        for side in ("first", "second"):
            values = ", ".join(f"{side}{i}[i]" for i, _ in kinds)
            lines += [f"        {', '.join(f'{side}_{each}' for each in results)} = prologue{suffix}({values}, ISA)"]
    else:  # of these tiles a thread has one element of each column, and instructions that compute two at a time
        values = ", ".join(f"tl.join(first{i}[i], second{i}[i])" for i, _ in kinds)
        lines += [f"        {', '.join(f'both_{each}' for each in results)} = prologue{suffix}({values}, ISA)"]
        lines += [f"        first_{each}, second_{each} = tl.split(both_{each})" for each in results]
    for each, name, (_, dtype) in zip(words, results, wanted, strict=True):
        own = f"tl.{str(dtype).removeprefix('torch.')}"
        both = [f"{side}_{name}" for side in ("first", "second")]
        if wide and each == "words":
            both = [f"rounded({side}, {own}, ISA)" for side in both]
        packed = f"pack({', '.join(both)}, {'dtype' if each == 'words' else own}, ISA)"
        lines += [f"        {each} = {each} + ({packed},)"]
    lines += ["    if STORES:"] if one.stored else []
    for place, each in one.stored:
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


def prefetching(prologue: Prologue) -> str:
    """The source of `prefetch_operands`."""
    whole = sorted(i for i, kind in prologue.kinds.items() if kind == "aux")
    pointers = ("ptr" if i == 0 else f"operands[{i - 1}]" for i in whole)
    offsets = (f"prefetch({ptr}, number, width, spans)" for ptr in pointers)
    return f"""\
@triton.jit
def prefetch_operands(ptr, operands, number, width, spans):
    return {" + ".join(offsets)}
"""


# What a printed function may use.
_NAMES = {
    function.__name__: function
    for function in (
        pack, unpack_column_tile, load_tile, load_column_tile, load_register_tile,
        aux_tile, row_tile, col_tile, inside_tile, aux_column_tile, row_column_tile, col_column_tile,
        inside_column_tile, aux_register_tile, row_register_tile, col_register_tile, inside_register_tile,
        to_tile, to_column_tile, to_register_tile, rounded, tile_of_one, prefetch,
    )
} | {"triton": triton, "tl": tl, **CALLED}  # fmt: skip


@cache
def _printed(text: str) -> dict[str, object]:
    return device_functions(text, _NAMES)


def prefetch_functions(kernel, prologue: Prologue) -> dict[str, object]:
    """What `prefetch_operands` means in a kernel, if that prefetches."""
    name = "prefetch_operands"
    return {name: _printed(prefetching(prologue))[name]} if name in kernel.fn.__globals__ else {}


@cache
def with_prologue(kernel, prologue: Prologue, dtypes: Dtypes, row_strides: RowStrides = ()):
    """The kernel, which reads the result of these steps in the place of a tensor. dtypes, row_strides: see `source`."""
    read = kernel.fn.__globals__
    functions = {f"read_{form}": _printed(source(prologue, form, dtypes, row_strides))[f"read_{form}"]
                 for form in _ARGUMENTS if f"read_{form}" in read}  # fmt: skip
    if prologue.several:
        placed = _printed(placing(len(prologue.several)))
        functions |= {name: placed[name] for name in ("tile_of", "seed_of") if name in read}
    return with_functions(kernel, functions | prefetch_functions(kernel, prologue))
