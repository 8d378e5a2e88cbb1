"""Prologues with reductions: whole rows on the chip, and statistics of rows that are too long for it.

`with_row_prologue` makes a copy of a kernel in which `read_row` and `walk_row` mean device functions that `row_source`
and `walk_source` print from the steps, in the way of `device.prologue_source`. `read_row` loads a row of each operand
once, computes all steps, and returns the words of the result. `walk_row` goes through rows tile by tile, once for each
reduction of what another one gave, and finds the statistics alone. Both store what `Prologue.stored` names.

A step of the whole shape is a pair of tensors [ROWS, BLOCKS, BLOCK / 2] in float32, of the even columns and of the odd
ones. One of rows is a tensor [ROWS, 1, 1]. The arithmetic is that of Inductor's persistent reductions: float32, a
variance by its mean. The order of a sum is that of this kernel: even and odd columns, then inside of a block, then over
blocks. So a sum may differ from Inductor's in its last bits. All that follows has the bits that Inductor's would have,
were the sum the same.
"""

import re
from collections.abc import Iterable
from functools import cache

import triton
import triton.language as tl

from fp4compile.formats.prologue import OPERANDS, Prologue
from fp4compile.formats.steps import REDUCTIONS, ROUNDINGS, Step
from fp4compile.templates.device.column_tile import unpack_column_tile
from fp4compile.templates.device.elements import pack, unpack
from fp4compile.templates.device.epilogue import store_rounded
from fp4compile.templates.device.memory import load_tile
from fp4compile.templates.device.pointwise import CALLED, device_functions, printed_step, with_functions
from fp4compile.templates.device.prologue import aux_tile, col_tile, inside_tile, row_tile, to_tile
from fp4compile.templates.device.prologue_source import prefetch_functions

# ---------------------------------------------------------------- of a tensor in memory


@triton.jit
def read_row(
    ptr, x_row, operands, batch, row, rows, cols, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The words of whole rows, which begin x_row elements apart, as a tuple of tiles. WHOLE: rows fill these."""
    return (load_tile(ptr + row.to(tl.int64) * x_row, cols, row < rows, dtype, ROWS, BLOCKS, BLOCK, VECTORS, ALIGN),)


@triton.jit
def walk_row(
    ptr, x_row, operands, batch, row, rows, cols, dtype: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr,
    WHOLE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """The statistics of rows: of a tensor without steps there are none."""


@triton.jit
def halves(tile):
    """The even and the odd columns of a tile of one tensor each."""
    return tile[0][0], tile[1][0]


# ---------------------------------------------------------------- reductions: tiles to [ROWS, 1, 1]


@triton.jit
def replaced_outside(even, odd, cols, ALIGN: tl.constexpr, VALUE: tl.constexpr):
    """Columns beyond `cols` as VALUE."""
    half: tl.constexpr = even.shape[2]
    word = tl.arange(0, even.shape[1])[None, :, None] * half + tl.arange(0, half)[None, None, :]
    if ALIGN > 0:  # whole vectors are compared, as for loads
        inside = word // ALIGN < cols // 2 // ALIGN
        return tl.where(inside, even, VALUE), tl.where(inside, odd, VALUE)
    else:
        return tl.where(2 * word < cols, even, VALUE), tl.where(2 * word + 1 < cols, odd, VALUE)


@triton.jit
def sum_terms(even, odd, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """INSIDE: what is beyond `cols` columns is 0, or there is nothing."""
    if not INSIDE:
        even, odd = replaced_outside(even, odd, cols, ALIGN, 0.0)
    return even + odd


@triton.jit
def deviation_terms(even, odd, mean, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """The squares of differences from the mean. INSIDE: there is nothing beyond `cols` columns."""
    even = even - mean
    odd = odd - mean
    return sum_terms(even * even, odd * odd, cols, ALIGN, INSIDE)


@triton.jit
def amax_terms(even, odd, cols, ALIGN: tl.constexpr, INSIDE: tl.constexpr):
    """INSIDE: there is nothing beyond `cols` columns."""
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
    """Write one result a row, [ROWS, 1, 1], rounded to the type at ptr."""
    store_rounded(ptr, batch.to(tl.int64) * rows + row, tl.reshape(value, (ROWS,)), row < rows, ISA)


# ---------------------------------------------------------------- printed

_CONSTANTS = "ROWS, BLOCKS, BLOCK, VECTORS, ALIGN"
_PARAMETERS = ("ptr, x_row, operands, batch, row, rows, cols, dtype: tl.constexpr, ROWS: tl.constexpr, "
               "BLOCKS: tl.constexpr, BLOCK: tl.constexpr, VECTORS: tl.constexpr, ALIGN: tl.constexpr, "
               "WHOLE: tl.constexpr, ISA: tl.constexpr")  # fmt: skip
_REDUCE = {"sum": "row_sum", "mean": "row_sum", "variance": "row_sum", "amax": "row_amax"}
_TERMS = {"sum": "sum_terms", "mean": "sum_terms", "variance": "deviation_terms", "amax": "amax_terms"}
_MEANS = ("mean", "variance")  # sums that are divided by the number of columns at the end
assert set(_REDUCE) == set(REDUCTIONS)


def row_source(prologue: Prologue, pieces: int) -> str:
    """The source of `read_row`, of rows in so many tiles side by side."""
    prologue = prologue.shortened()
    last = f"s{len(prologue.steps) - 1}"
    starts = [f"{piece} * BLOCKS * BLOCK" for piece in range(pieces)]
    columns = [i for i, kind in prologue.kinds.items() if kind == "col"]
    # Beyond the last row a program reads that row: whole rows need no masks then.
    lines = ["read = tl.minimum(row, rows - 1) if WHOLE else row"]
    lines += [f"length = {pieces} * BLOCKS * BLOCK if WHOLE else cols"]
    lines += _loads(prologue, columns, "0", "read", "WHOLE")
    for piece, start in enumerate(starts):
        lines += [f"left_{piece} = BLOCKS * BLOCK if WHOLE else tl.minimum(cols - {start}, BLOCKS * BLOCK)"]
        lines += _of_piece(_loads(prologue, prologue.kinds.keys() - set(columns), start, "read", "WHOLE"), piece)
    for i in prologue.computed:
        step = prologue.steps[i]
        if step.operation in REDUCTIONS:
            terms = _terms(prologue, step)
            found, *others = (_of_piece([terms], piece)[0] for piece in range(pieces))
            for other in others:
                found = f"larger({found}, {other})" if step.operation == "amax" else f"{found} + {other}"
            lines += [f"s{i} = {_REDUCE[step.operation]}({found})", *_mean(i, step, "length")]
        elif prologue.step_kinds[i] == "col":
            lines += _step(prologue, i)
        else:
            lines += [line for piece in range(pieces) for line in _of_piece(_step(prologue, i), piece)]
    lines += ["words = ()"]
    for piece, start in enumerate(starts):
        stored = [what for what in enumerate(prologue.stored) if not piece or prologue.step_kinds[what[1][0]] != "col"]
        stored = _stores(prologue, stored, start)
        result = [
            f"tile = pack({last}_even, {last}_odd, dtype, ISA)",
            "if not WHOLE:",
            f"    tile = inside_tile((tile,), batch, row, rows, {start}, cols, left, dtype, {_CONSTANTS}, False)",
            "words = words + (tile,)",
        ]
        lines += _of_piece([*stored, *result], piece)
    return _function("read_row", [*lines, "return words"])


def _of_piece(lines: list[str], piece: int) -> list[str]:
    """Lines about one tile, whose names are those of one of several."""
    return [re.sub(r"\b((?:s|aux|row)\d+_(?:even|odd)|left)\b", rf"\1_{piece}", line) for line in lines]


def walk_source(prologue: Prologue) -> str:
    """The source of `walk_row`: one loop for the reductions of each level, which need the results of those below."""
    prologue = prologue.shortened()
    columns = [i for i, kind in prologue.kinds.items() if kind == "col"]
    lines = ["width: tl.constexpr = BLOCKS * BLOCK", *_loads(prologue, columns, "0", "row", "False")]
    for level in range(1, max(prologue.levels) + 1):
        found = [i for i in prologue.reductions if prologue.levels[i] == level]
        lines += [f"s{i} = tl.full((ROWS, 1, 1), {_start(prologue.steps[i])}, tl.float32)" for i in found]
        lines += ["for tile in range(tl.cdiv(cols, width)):"]
        lines += ["    " + line for line in _walked(prologue, found)]
        lines += [line for i in found for line in _mean(i, prologue.steps[i], "cols")]
        rows = (i for i, kind in enumerate(prologue.step_kinds) if kind == "col" and prologue.levels[i] == level)
        lines += [line for i in rows if i not in found for line in _step(prologue, i)]
    return _function("walk_row", lines + _stores(prologue, enumerate(prologue.stored), "0"))


def _walked(prologue: Prologue, reductions: list[int]) -> list[str]:
    """One step of a loop: the reductions of a tile, added to those of the tiles before."""
    roots = [int(x[1:]) for i in reductions for x in prologue.steps[i].arguments if isinstance(x, str) and x[0] == "s"]
    needed = prologue.needed(roots, ("aux", "row"))
    names = {x for i in (*needed, *reductions) for x in prologue.steps[i].arguments if isinstance(x, str)}
    read = [i for i, kind in prologue.kinds.items() if kind != "col" and f"{kind}{i}" in names]
    lines = [
        "col0 = tile * width",
        "left = tl.minimum(cols - col0, width)",
        *_loads(prologue, read, "col0", "row", "False"),
    ]
    lines += [line for i in needed for line in _step(prologue, i)]
    for i in reductions:
        step = prologue.steps[i]
        tile = f"{_REDUCE[step.operation]}({_terms(prologue, step)})"
        lines += [f"s{i} = larger(s{i}, {tile})" if step.operation == "amax" else f"s{i} = s{i} + {tile}"]
    return lines


def _loads(prologue: Prologue, operands: Iterable[int], col0: str, row: str, whole: str) -> list[str]:
    """col0: the first column. row: the rows. whole: whether nothing needs a mask."""
    lines = []
    for i in sorted(operands):
        kind = prologue.kinds[i]
        name, ptr = f"{kind}{i}", "ptr" if i == 0 else f"operands[{i - 1}]"
        where = f"batch, {row}, rows, {col0}, cols, left, dtype, {_CONSTANTS}, {whole}"
        if i == 0:
            ptr = f"ptr + ({row}.to(tl.int64) * x_row + {col0})"
            loaded = f"load_tile({ptr}, left, {row} < rows, dtype, {_CONSTANTS}, {whole})"
            loaded = f"unpack_column_tile(({loaded},), dtype)"
        else:
            loaded = f"{kind}_tile({ptr}, {where})"
        if kind == "col":  # a row has one
            loaded = loaded.replace(" left,", " cols,")
            lines += [f"{name}, _ = halves({loaded})"]
        else:
            lines += [f"{name}_even, {name}_odd = halves({loaded})"]
    return lines


def _step(prologue: Prologue, number: int) -> list[str]:
    """The lines of a step that reduces nothing."""
    step, name = prologue.steps[number], f"s{number}"
    if prologue.step_kinds[number] == "col":
        return [f"{name} = {printed_step(prologue.steps, number, ())}"]
    if step.operation in ROUNDINGS:  # two elements at a time, into the words that may be stored as well
        halves, dtype = (_half(prologue, step.arguments[0], side) for side in _SIDES), f"tl.{step.operation}"
        return [f"{name}_even, {name}_odd = unpack(pack({', '.join(halves)}, {dtype}, ISA), {dtype})"]
    narrow = {f"aux{i}" for i in prologue.kinds}  # what is reduced, and all of its size, has 16 bits
    return [
        f"{name}_{side} = {printed_step(prologue.steps, number, narrow, lambda x, side=side: _half(prologue, x, side))}"
        for side in _SIDES
    ]


_SIDES = ("even", "odd")


def _half(prologue: Prologue, name: str, side: str) -> str:
    """What a value is called among the even or the odd columns."""
    return name if prologue.kind_of(name, prologue.step_kinds) == "col" else f"{name}_{side}"


def _start(step: Step) -> str:
    return 'float("-inf")' if step.operation == "amax" else "0.0"


def _terms(prologue: Prologue, step: Step) -> str:
    """What a reduction adds or compares, of one tile."""
    name, *others = step.arguments
    halves = [_half(prologue, name, side) for side in _SIDES]
    inside = "True" if step.operation in ("sum", "mean") and _vanishes(prologue, name) else "WHOLE"
    return f"{_TERMS[step.operation]}({', '.join([*halves, *others])}, left, ALIGN, {inside})"


# Of zeros, and of these and numbers, they make 0.
_VANISHING = ("add", "sub", "neg", "relu", "square", "cube", "mul", "erf", "tanh")


def _vanishes(prologue: Prologue, name: str) -> bool:
    """Whether a value is 0 beyond the columns of its rows, where operands are. (Those of rows are not.)"""
    if name[0] != "s":
        return not name.startswith("col")
    step = prologue.steps[int(name[1:])]
    names = [x for x in step.arguments if isinstance(x, str)]
    numbers = len(names) < len(step.arguments)
    return step.operation in ("mul",) * numbers + _VANISHING * (not numbers) and all(
        _vanishes(prologue, x) for x in names
    )


def _mean(number: int, step: Step, length: str) -> list[str]:
    return [f"s{number} = s{number} / {length}"] if step.operation in _MEANS else []


def _stores(prologue: Prologue, stored: Iterable[tuple[int, tuple]], start: str) -> list[str]:
    """stored: of `Prologue.stored`, with their places. start: the first column of the tile."""
    lines = []
    for place, (i, _) in stored:
        if prologue.step_kinds[i] == "col":
            lines += [f"store_statistic(operands[{OPERANDS - 1 + place}], s{i}, batch, row, rows, ROWS, ISA)"]
        else:
            ptr = f"operands[{OPERANDS - 1 + place}]"
            lines += [f"to_tile({ptr}, (pack(s{i}_even, s{i}_odd, {ptr}.dtype.element_ty, ISA),), batch, row, rows, "
                      f"{start}, cols, left, dtype, {_CONSTANTS}, False)"]  # fmt: skip
    return lines


def _function(name: str, lines: list[str]) -> str:
    return "\n".join(["@triton.jit", f"def {name}({_PARAMETERS}):", *("    " + line for line in lines)]) + "\n"


# What a printed function may use.
_NAMES = {
    function.__name__: function
    for function in (
        pack, unpack, unpack_column_tile, load_tile, aux_tile, row_tile, col_tile, inside_tile,
        halves, sum_terms, deviation_terms, amax_terms, row_sum, row_amax, larger, to_tile, store_statistic,
    )
} | {"triton": triton, "tl": tl, **CALLED}  # fmt: skip


@cache
def _device_function(text: str, name: str):
    return device_functions(text, _NAMES)[name]


@cache
def with_row_prologue(kernel, prologue: Prologue, pieces: int = 1):
    """The kernel, which reads rows of the result of these steps in so many tiles, or walks them."""
    functions = {}
    if "read_row" in kernel.fn.__globals__:
        functions["read_row"] = _device_function(row_source(prologue, pieces), "read_row")
    if "walk_row" in kernel.fn.__globals__:
        functions["walk_row"] = _device_function(walk_source(prologue), "walk_row")
    return with_functions(kernel, functions | prefetch_functions(kernel, prologue))
