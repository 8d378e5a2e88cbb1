"""Where a prologue pays: a model of what a quantiser costs with it, and without it, after a kernel of Inductor's.

A kernel takes the longer of the time for its bytes and the time for its instructions; all is counted for an element of
the tensor, in bytes. The numbers below are assumptions with their sources. The fused kernels were timed by themselves
on an H200 (benchmarks/results/producers_h200.json), and on no other GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4compile.formats.formats import BlockFormat
from fp4compile.formats.prologue import Prologue
from fp4compile.templates.quantize.heuristics import MAX_ROW_ON_CHIP, fits_on_chip

# Instructions that a GPU issues in the time of a byte from memory: 132 multiprocessors * 128 * 1.75 GHz over 4.3 TB/s
# on an H200 (copies reach that), 148 * 128 * 1.85 GHz over 8 TB/s on a B200 (published), which stands for all others.
INSTRUCTIONS_PER_BYTE = {90: 6.9, 100: 4.4}
# Instructions of an operation on one element, where it is not one. With ROUNDING, for masks, rounding and packing, they
# give two instructions more than ptxas makes of a norm in `quantize_rows` for SM100, three more for a gate, and six for
# a norm with its statistics: what was not timed is fused where it pays all the same.
INSTRUCTIONS = {
    "variance": 2, "rsqrt": 3, "div": 9, "silu": 9, "sigmoid": 5, "exp": 9, "erf": 20, "tanh": 18, "cube": 2,
}  # fmt: skip
ROUNDING = 4
# Of the kernels without a prologue: the amax of an element, and its quantisation in one direction.
AMAX, QUANTIZE = 1, 9
# Since which compute capability prologues are fused: into kernels that quantise rows alone, and into all others. On an
# H200 the others gain nothing that shows in training, whose time is that of emulated products, and each takes up to
# 10 s to compile (benchmarks/results/producers_h200.json). Those of experts were not timed there.
SINCE = {"rows": 90, "others": 100}
# What is saved must be more than this model can be wrong by.
WORTH = 0.95


@dataclass(frozen=True)
class Work:
    """What a quantiser does. op: as in the op `quantize_prologue`, also of groups.

    columns: whether it quantises down the columns alone. given: whether the outer scale is given. transform, seeded: as
    the kernels have it. cols: elements of a row, which may be symbolic. values: in how many directions it writes values
    of 16 bits. grouped: whether kernels of groups do it.
    """

    op: str
    fmt: BlockFormat
    columns: bool
    given: bool
    transform: bool
    seeded: bool
    cols: int
    values: int = 0
    grouped: bool = False

    @property
    def amax_read(self) -> bool:
        """Whether the tensor is read once more, for its amax."""
        if self.given or self.fmt.outer is None:
            return False
        on_chip = isinstance(self.cols, int) and self.cols <= MAX_ROW_ON_CHIP
        return not (self.fmt.outer == "row" and on_chip and not self.by_columns and not self.grouped)

    @property
    def by_columns(self) -> bool:
        """Whether the kernel is one that quantises down the columns, too or alone."""
        return self.columns or self.op == "quantize_both"

    @property
    def directions(self) -> int:
        return 2 if self.op == "quantize_both" else 1

    @property
    def evaluations(self) -> int:
        """How often the last kernel computes the prologue: all but `quantize_both` do for each direction."""
        one_read = not self.grouped and self.fmt.outer != "row" and not self.transform and not self.seeded
        return 1 if one_read else self.directions


def gain(prologue: Prologue, dtypes: Sequence[torch.dtype], work: Work, sm: int, shared: bool) -> float:
    """What the prologue is expected to save in the quantiser's kernels, after a kernel of its own; 0 if not for sure.

    0 on GPUs before the compute capability that `SINCE` has.

    dtypes: of the operands. sm: the GPU's compute capability. shared: whether a kernel of Inductor's reads the operands
    of the tensor's size anyway, for statistics of rows or for other results: then it loses its stores alone.
    """
    if sm < SINCE["others" if work.by_columns or work.grouped else "rows"]:
        return 0.0
    width = prologue.dtype.itemsize
    read, steps = _read(prologue, dtypes), _instructions(prologue)
    stored = _stored(prologue)
    produced = stored if prologue.stores_result else stored + width
    apart = produced if shared else _time(sm, read + produced, steps)
    apart += _time(sm, width + _written(work), QUANTIZE * work.directions)
    apart += work.amax_read * _time(sm, width, AMAX)
    fused = fused_time(prologue, dtypes, work, sm)
    return apart - fused if fused < WORTH * apart else 0.0


def fused_time(prologue: Prologue, dtypes: Sequence[torch.dtype], work: Work, sm: int) -> float:
    """What the quantiser's kernels are expected to cost with a prologue; see `gain`.

    Of several results, those of all: their programs read one tile after the other, so that each operand comes from
    memory once.
    """
    results = len(prologue.results)
    read, steps, stored = _read(prologue, dtypes), _instructions(prologue), _stored(prologue)
    written, quantize = results * _written(work), results * QUANTIZE * work.directions
    fused, walked = 0.0, bool(prologue.reductions) and not fits_on_chip(work.cols)
    if walked:
        fused = max(prologue.levels) * _time(sm, read, steps)
    if prologue.reductions and (walked or work.amax_read):
        rest, operands = prologue.after_statistics(stored=not walked)
        tensors = [*dtypes, *(dtype for _, dtype in prologue.stored)]
        last_read, last_steps = _read(rest, [tensors[i] for i in operands]), _instructions(rest)
        if walked:
            read, steps = last_read, last_steps
    else:
        last_read, last_steps = read, steps
    if work.amax_read:
        fused += _time(sm, read + stored, steps + results * (AMAX + ROUNDING))
        if prologue.stores_result:
            return fused + _time(sm, prologue.dtype.itemsize + written, quantize)
        return fused + _time(
            sm, last_read + written, quantize + work.evaluations * (last_steps + results * ROUNDING)
        )  # fmt: skip
    return fused + _time(sm, read + stored + written, quantize + work.evaluations * (steps + results * ROUNDING))


def _time(sm: int, moved: float, instructions: float) -> float:
    """The longer of the time for bytes and the time for instructions, in bytes."""
    return max(moved, instructions / INSTRUCTIONS_PER_BYTE.get(sm, INSTRUCTIONS_PER_BYTE[100]))


def _written(work: Work) -> float:
    """Bytes of an element of a result."""
    return 2 * work.values + (work.directions - work.values) * (0.5 if work.fmt.packed else 1)


def _stored(prologue: Prologue) -> int:
    return sum(dtype.itemsize for i, dtype in prologue.stored if prologue.step_kinds[i] == "aux")


def _read(prologue: Prologue, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of the operands that have the tensor's size. dtypes: of these and of all others that come before them."""
    return sum(dtypes[i].itemsize for i, kind in prologue.kinds.items() if kind == "aux")


def _instructions(prologue: Prologue) -> int:
    """Of the steps, those of single elements and of reductions; what has one result a row counts for nothing.

    Each of several results has all that it needs.
    """
    prologue = prologue.shortened()
    kinds = prologue.step_kinds
    numbers = [i for number in prologue.several for i in prologue.needed([number])] or prologue.computed
    steps = (prologue.steps[i] for i in numbers if kinds[i] != "col" or i in prologue.reductions)
    return sum(INSTRUCTIONS.get(step.operation, 1) for step in steps)
