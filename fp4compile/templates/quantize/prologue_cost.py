"""A cost model of fusing a prologue: a quantiser with it, against Inductor's kernel and a quantiser without it.

A kernel takes the longer of the time for its bytes and the time for its instructions. The unit of time is that of a
byte moved for each element of the tensor. The numbers below are assumptions with their sources. The fused kernels were
timed separately on an H200 (benchmarks/results/producers_h200.json), and on no other GPU.
"""

from collections.abc import Sequence

import torch

from fp4compile.formats.prologue import Prologue
from fp4compile.formats.quantize_spec import ROWS, QuantizeSpec
from fp4compile.templates.quantize.row_on_chip import MAX_ROW_ON_CHIP

# Instructions that a GPU issues in the time of a byte from memory: 132 multiprocessors * 128 * 1.75 GHz over 4.3 TB/s
# on an H200 (reached by copies), 148 * 128 * 1.85 GHz over 8 TB/s on a B200 (published), used for all other GPUs.
INSTRUCTIONS_PER_BYTE = {90: 6.9, 100: 4.4}
# Instructions of an operation on one element; 1 for operations that are missing here. Together with ROUNDING (masks,
# rounding and packing) they overestimate ptxas's instructions in `quantize_rows` for SM100 by about six, for a norm, a
# gate, and a norm with its statistics. So an untimed prologue is fused only if it clearly saves time.
INSTRUCTIONS = {
    "variance": 2, "rsqrt": 3, "div": 9, "silu": 9, "sigmoid": 9, "exp": 9, "erf": 20, "tanh": 18, "cube": 2,
}  # fmt: skip
ROUNDING = 4
# Instructions of the kernels without a prologue: for the amax of an element, and its quantisation in one direction.
AMAX, QUANTIZE = 1, 9
# The compute capability from which prologues are fused into kernels that quantise only rows, and into all others.
# On an H200 the others gain nothing measurable in training, where emulated matmuls take the time, and each takes up to
# 10 s to compile (benchmarks/results/producers_h200.json). Kernels for experts were not timed there.
SINCE = {"rows": 90, "others": 100}
# A fused kernel must cost less than this share of the unfused ones: a margin for errors of the model.
WORTH = 0.95


def reads_amax(spec: QuantizeSpec, cols) -> bool:
    """Whether the tensor is read twice, first for its amax. cols: elements of a row; may be symbolic."""
    if spec.static or spec.format.outer is None:
        return False
    on_chip = isinstance(cols, int) and cols <= MAX_ROW_ON_CHIP
    by_groups = spec.ragged and spec.swizzled
    return not (spec.format.outer == "row" and on_chip and spec.dims == (ROWS,) and not by_groups)


def gain(spec: QuantizeSpec, dtypes: Sequence[torch.dtype], cols, sm: int, shared: bool) -> float:
    """The expected saving of fusing `spec.prologue` into the quantiser, over a separate kernel before it.

    0 if the saving is within the model's error, and on GPUs below the compute capability in `SINCE`. dtypes: dtypes of
    the operands. cols: elements of a row. sm: the GPU's compute capability. shared: whether Inductor's kernel remains
    and reads the operands of the tensor's size, for statistics of rows or for other results: then fusing saves only its
    stores.
    """
    prologue = spec.prologue
    if sm < SINCE["others" if spec.both or (spec.ragged and spec.swizzled) else "rows"]:
        return 0.0
    width, directions = prologue.dtype.itemsize, len(spec.dims)
    read, steps, stored = _read(prologue, dtypes), _instructions(prologue), _stored(prologue)
    produced = stored if prologue.stores_result else stored + width
    separate = produced if shared else _time(sm, read + produced, steps)
    separate += _time(sm, width + _written(spec), QUANTIZE * directions)
    separate += reads_amax(spec, cols) * _time(sm, width, AMAX)
    fused = _fused_time(spec, dtypes, cols, sm)
    return separate - fused if fused < WORTH * separate else 0.0


def _fused_time(spec: QuantizeSpec, dtypes: Sequence[torch.dtype], cols, sm: int) -> float:
    """The expected cost of the quantiser's kernels with the prologue; see `gain`."""
    prologue, written, quantize = spec.prologue, _written(spec), QUANTIZE * len(spec.dims)
    read, steps, stored = _read(prologue, dtypes), _instructions(prologue), _stored(prologue)
    if not reads_amax(spec, cols):
        return _time(sm, read + stored + written, quantize + steps + ROUNDING)
    first = _time(sm, read + stored, steps + AMAX + ROUNDING)
    if prologue.stores_result:
        return first + _time(sm, prologue.dtype.itemsize + written, quantize)
    if prologue.reductions:
        rest, operands = prologue.after_statistics(stored=True)
        tensors = [*dtypes, *(dtype for _, dtype in prologue.stored)]
        read, steps = _read(rest, [tensors[i] for i in operands]), _instructions(rest)
    return first + _time(sm, read + written, quantize + steps + ROUNDING)


def _time(sm: int, moved: float, instructions: float) -> float:
    """The longer of the time for `moved` bytes and the time for instructions, in units of bytes."""
    return max(moved, instructions / INSTRUCTIONS_PER_BYTE.get(sm, INSTRUCTIONS_PER_BYTE[100]))


def _written(spec: QuantizeSpec) -> float:
    """Bytes of the results for each element."""
    values = len(spec.values)
    return 2 * values + (len(spec.dims) - values) * (0.5 if spec.format.packed else 1)


def _stored(prologue: Prologue) -> int:
    return sum(dtype.itemsize for i, dtype in prologue.stored if prologue.step_kinds[i] == "aux")


def _read(prologue: Prologue, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes for each element of the operands of the tensor's size. dtypes: dtypes of the operands, by number."""
    return sum(dtypes[i].itemsize for i, kind in prologue.kinds.items() if kind == "aux")


def _instructions(prologue: Prologue) -> int:
    """Instructions for each element: of pointwise steps and reductions. Steps with one result a row are not counted."""
    prologue = prologue.shortened()
    kinds = prologue.step_kinds
    steps = (prologue.steps[i] for i in prologue.computed if kinds[i] != "col" or i in prologue.reductions)
    return sum(INSTRUCTIONS.get(step.operation, 1) for step in steps)
