"""The op of quantisers of groups with a prologue: pointwise operations whose result is quantised, those of experts.

    fp4compile::quantize_grouped_prologue(operands, prologue, dtype, offs, op, format, dim, values, *,
                                          outer, layout, seed, hadamard)
        -> what the op named `op` returns of the result ("quantize_grouped", "quantize_grouped_both",
           "fake_quantize_grouped" or "fake_quantize_grouped_both")

operands, prologue, dtype: as of `quantize_prologue` (`ops.prologue`). The result has the rows that offs cuts in groups.
The other arguments are those of that op; those that it does not take are left at their defaults.
"""

import torch

from fp4compile.formats import formats
from fp4compile.formats.groups import check_offs
from fp4compile.formats.prologue import Prologue, apply
from fp4compile.ops import grouped as ops_grouped
from fp4compile.ops.dense import LIBRARY, TAGS
from fp4compile.ops.prologue import check_operands, readable

LIBRARY.define(
    "quantize_grouped_prologue(Tensor[] operands, str[] prologue, ScalarType dtype, Tensor offs, str op, str format,"
    " int dim=-1, str values='', *, Tensor? outer=None, str layout='linear', Tensor? seed=None, bool hadamard=False)"
    " -> Tensor[]",
    tags=TAGS,
)
_BOTH = ("quantize_grouped_both", "fake_quantize_grouped_both")
_FAKE = ("fake_quantize_grouped", "fake_quantize_grouped_both")
OPS = ("quantize_grouped", "quantize_grouped_both", "fake_quantize_grouped", "fake_quantize_grouped_both")


@torch.library.impl(LIBRARY, "quantize_grouped_prologue", "CompositeExplicitAutograd")
def _quantize_grouped_prologue(
    operands, prologue, dtype, offs, op, format, dim=-1, values="", *, outer=None, layout="linear", seed=None,
    hadamard=False,
):  # fmt: skip
    steps = _checked(operands, prologue, dtype, offs, op, dim, values, layout)
    (value,), _ = apply(steps, operands)
    return _of(op, "", value, offs, format, dim, values, outer, layout, seed, hadamard)


@torch.library.impl(LIBRARY, "quantize_grouped_prologue", "CUDA")
def quantize_grouped_prologue_cuda(
    operands, prologue, dtype, offs, op, format, dim=-1, values="", *, outer=None, layout="linear", seed=None,
    hadamard=False,
):  # fmt: skip
    """`quantize_grouped_prologue` by the Triton kernels; what a graph is lowered to.

    Where no kernel takes the prologue (`dispatch.takes_prologue`), PyTorch computes it first.
    """
    from fp4compile.templates.grouped.dispatch import takes_prologue
    from fp4compile.templates.quantize.dispatch import Reading

    steps = _checked(operands, prologue, dtype, offs, op, dim, values, layout)
    both, dtypes = op in _BOTH, [operand.dtype for operand in operands]
    if not takes_prologue(formats.get(format), steps, dtypes, both or dim == -2, both):
        (value,), _ = apply(steps, operands)
        return _of(op, "_cuda", value, offs, format, dim, values, outer, layout, seed, hadamard)
    first, *others = readable(steps, operands)
    reading = Reading(steps, tuple(others))
    return _of(op, "_cuda", first, offs, format, dim, values, outer, layout, seed, hadamard, reading=reading)


@torch.library.register_fake("fp4compile::quantize_grouped_prologue", lib=LIBRARY)
def _quantize_grouped_prologue_fake(
    operands, prologue, dtype, offs, op, format, dim=-1, values="", *, outer=None, layout="linear", seed=None,
    hadamard=False,
):  # fmt: skip
    _checked(operands, prologue, dtype, offs, op, dim, values, layout)
    like = operands[0].new_empty(operands[0].shape, dtype=dtype)
    return _of(op, "", like, offs, format, dim, values, outer, layout, seed, hadamard)


def _of(op, suffix, value, offs, format, dim, values, outer, layout, seed, hadamard, **reading) -> list[torch.Tensor]:
    """What the op returns of a value: by its kernels if the suffix is "_cuda"."""
    function = getattr(ops_grouped, op + suffix) if suffix else getattr(torch.ops.fp4compile, op)
    which = (values,) if op == "fake_quantize_grouped_both" else () if op in _BOTH else (dim,)
    layouts = {} if op in _FAKE else {"layout": layout}
    return list(function(value, offs, format, *which, outer=outer, seed=seed, hadamard=hadamard, **layouts, **reading))


def _checked(operands, prologue, dtype, offs, op, dim, values, layout) -> Prologue:
    """The prologue. Raises ValueError or TypeError for arguments that do not go together."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if op in _BOTH and dim != -1:
        raise ValueError(f"dim: {op} takes none, got {dim}")
    if op != "fake_quantize_grouped_both" and values:
        raise ValueError(f"values: {op} takes none, got {values!r}")
    if op in _FAKE and layout != "linear":
        raise ValueError(f"layout: {op} takes none, got {layout!r}")
    check_offs(offs)
    return check_operands(operands, Prologue.parse(prologue, dtype), dtype)
