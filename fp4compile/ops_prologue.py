"""The op of quantisers with a prologue: pointwise operations whose result is quantised, and goes nowhere else.

    fp4compile::quantize_prologue(operands, prologue, dtype, op, format, dim, *, outer, layout, seed, hadamard)
        -> what the op named `op` returns of the result: "quantize", "quantize_both" or "fake_quantize"

operands: what the steps of `prologue` read (`prologue.Prologue`); the first has the shape of the result. dtype: what
the result is rounded to before it is quantised. The arguments after `op` are those of that op; those that it does not
take are left at their defaults.
"""

import math

import torch

from fp4compile import formats, ops
from fp4compile._compat import statically_true
from fp4compile.ops import LIBRARY, TAGS
from fp4compile.prologue import Prologue, apply

LIBRARY.define(
    "quantize_prologue(Tensor[] operands, str[] prologue, ScalarType dtype, str op, str format, int dim=-1, *,"
    " Tensor? outer=None, str layout='linear', Tensor? seed=None, bool hadamard=False) -> Tensor[]",
    tags=TAGS,
)
OPS = ("quantize", "quantize_both", "fake_quantize")


@torch.library.impl(LIBRARY, "quantize_prologue", "CompositeExplicitAutograd")
def _quantize_prologue(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False
):
    value = apply(_checked(operands, prologue, dtype, op, dim, layout, seed, hadamard), operands)
    return list(_of(op, "", value, format, dim, outer, layout, seed, hadamard))


@torch.library.impl(LIBRARY, "quantize_prologue", "CUDA")
def quantize_prologue_cuda(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False
):
    """`quantize_prologue` by the Triton kernels; what a graph is lowered to.

    Where no kernel takes the prologue (`dispatch.takes_prologue`), PyTorch computes it first.
    """
    from fp4compile.templates.quantize.dispatch import Reading, takes_prologue

    steps = _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard)
    down_columns = op == "quantize" and dim not in (-1, operands[0].dim() - 1)
    dtypes = [operand.dtype for operand in operands]
    if not takes_prologue(formats.get(format), steps, dtypes, down_columns or op == "quantize_both"):
        return list(_of(op, "_cuda", apply(steps, operands), format, dim, outer, layout, seed, hadamard))
    first, *others = (operand.contiguous() for operand in operands)
    reading = Reading(steps, tuple(others), down_columns)
    return list(_of(op, "_cuda", first, format, dim, outer, layout, seed, hadamard, reading=reading))


@torch.library.register_fake("fp4compile::quantize_prologue", lib=LIBRARY)
def _quantize_prologue_fake(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False
):
    _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard)
    return list(_of(op, "", operands[0], format, dim, outer, layout, seed, hadamard))


def _of(op, suffix, value, format, dim, outer, layout, seed, hadamard, **reading):
    """What the op returns of a value: by its kernels if the suffix is "_cuda"."""
    function = getattr(ops, op + suffix) if suffix else getattr(torch.ops.fp4compile, op)
    if op == "fake_quantize":
        return function(value, format, outer=outer, **reading)
    along = (dim,) if op == "quantize" else ()
    return function(value, format, *along, outer=outer, layout=layout, seed=seed, hadamard=hadamard, **reading)


def _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard) -> Prologue:
    """The prologue. Raises ValueError for arguments that do not go together."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if dtype not in ops.FLOAT_DTYPES:
        raise ValueError(f"dtype: expected one of {ops.FLOAT_DTYPES}, got {dtype}")
    if op == "fake_quantize" and (layout != "linear" or seed is not None or hadamard):
        raise ValueError("op: fake_quantize takes no layout, seed or hadamard")
    if op != "quantize" and dim != -1:
        raise ValueError(f"dim: {op} takes none, got {dim}")
    found = Prologue.parse(prologue, dtype)
    if len(operands) != len(found.kinds):
        raise ValueError(f"operands: expected {len(found.kinds)}, which the prologue reads, got {len(operands)}")
    if operands[0].dim() < 2:
        raise ValueError(f"operands: expected the first of two dimensions or more, got {tuple(operands[0].shape)}")
    for i, operand in enumerate(operands):
        if operand.dtype not in ops.FLOAT_DTYPES:
            raise ValueError(f"operands: expected floating-point tensors of {ops.FLOAT_DTYPES}, got {operand.dtype}")
        shape = found.shape_of(i, operands[0].shape)
        if statically_true(operand.numel() != math.prod(shape)):
            raise ValueError(f"operands: expected {found.kinds[i]}{i} of shape {shape}, got {tuple(operand.shape)}")
    return found
