"""The quantisers whose kernels read the result of a prologue: what each does, and the op that takes its place.

Those of groups of rows are those of experts. There are no kernels that read matrices, whose quantisers have no offsets,
after a prologue: these are weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from fp4compile.analysis.graph import (
    FAKE_QUANTIZE,
    FAKE_QUANTIZE_GROUPED,
    FAKE_QUANTIZE_GROUPED_BOTH,
    QUANTIZE,
    QUANTIZE_BOTH,
    QUANTIZE_GROUPED,
    QUANTIZE_GROUPED_BOTH,
    QUANTIZE_GROUPED_PROLOGUE,
    QUANTIZE_PROLOGUE,
    quantise_of,
)
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue
from fp4compile.templates.grouped import dispatch as grouped
from fp4compile.templates.quantize import dispatch as dense
from fp4compile.templates.quantize.prologue_cost import Work

_DENSE = {QUANTIZE: "quantize", QUANTIZE_BOTH: "quantize_both", FAKE_QUANTIZE: "fake_quantize"}
_GROUPED = {
    QUANTIZE_GROUPED: "quantize_grouped", QUANTIZE_GROUPED_BOTH: "quantize_grouped_both",
    FAKE_QUANTIZE_GROUPED: "fake_quantize_grouped", FAKE_QUANTIZE_GROUPED_BOTH: "fake_quantize_grouped_both",
}  # fmt: skip
# Options that the ops with a prologue take.
_OPTIONS = {"outer", "layout", "seed", "hadamard"}


def may_have_prologue(node: Node) -> bool:
    if node.target not in _DENSE and not (node.target in _GROUPED and node.args[1] is not None):
        return False
    return _OPTIONS.issuperset(node.kwargs)


def takes_prologue(quantise: Node, work: Work, prologue: Prologue, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether a kernel reads the result of the prologue. dtypes: of its operands."""
    if quantise.target in _GROUPED:
        return grouped.takes_prologue(work.fmt, prologue, dtypes, work.by_columns, work.directions == 2)
    return dense.takes_prologue(work.fmt, prologue, dtypes, work.by_columns)


def work_of(quantise: Node) -> Work:
    """What a quantiser does, for the cost model; a dense one may have a prologue."""
    given: dict[str, Any] = {"outer": None, "layout": "linear", "seed": None, "hadamard": False, **quantise.kwargs}
    common = given["outer"] is not None, given["hadamard"], given["seed"] is not None
    if quantise.target is QUANTIZE_PROLOGUE:
        (first, *_), _, _, op, name, *dim = quantise.args
        columns = op == "quantize" and bool(dim) and dim[0] not in (-1, first.meta["val"].dim() - 1)
        return _dense_work(op, name, columns, common, first)
    if quantise.target in _DENSE:
        op, columns = _DENSE[quantise.target], quantise.target is QUANTIZE and quantise_of(quantise).dim != -1
        return _dense_work(op, quantise.args[1], columns, common, quantise.args[0])
    cols = quantise.args[0].meta["val"].shape[-1]
    _, _, name, *rest = quantise.args
    op, fmt = _GROUPED[quantise.target], formats.get(name)
    if op.endswith("both"):
        values = {"": 0, "rows": 1, "columns": 1, "both": 2}[rest[0] if rest else ""]
        return Work("quantize_both", fmt, False, *common, cols, values, grouped=True)
    columns, values = dim_of(quantise) == -2, int(op.startswith("fake"))
    # Rows that do not depend on their groups are read by the dense kernels.
    apart = columns or given["layout"] != "linear" or (fmt.outer == "tensor" and given["outer"] is None)
    return Work("quantize", fmt, columns, *common, cols, values, grouped=apart)


def _dense_work(op: str, format: str, columns: bool, common: tuple[bool, bool, bool], like: Node) -> Work:
    """like: a node of the shape of what is quantised."""
    cols = like.meta["val"].shape[-1]
    return Work(op, formats.get(format), columns, *common, cols, values=int(op == "fake_quantize"))


def dim_of(quantise: Node) -> int:
    """The dimension along which a quantiser of groups quantises, if it is one."""
    return quantise.args[3] if len(quantise.args) > 3 else -1


def call_with_prologue(quantise: Node, operands: list[Node], prologue: Prologue) -> tuple[Any, tuple]:
    """(op, arguments) of the quantiser after a prologue; its options are those of the quantiser."""
    first = operands, prologue.strings(), prologue.dtype
    if quantise.target in _DENSE:
        _, *rest = quantise.args
        return QUANTIZE_PROLOGUE, (*first, _DENSE[quantise.target], *rest)
    _, offs, name, *rest = quantise.args
    if quantise.target is FAKE_QUANTIZE_GROUPED_BOTH:
        rest = [-1, *rest]
    return QUANTIZE_GROUPED_PROLOGUE, (*first, offs, _GROUPED[quantise.target], name, *rest)
