"""The op of quantisers with a prologue: pointwise operations whose result is quantised.

    fp4compile::quantize_prologue(operands, prologue, dtype, op, format, dim, *, outer, layout, seed, hadamard, stored)
        -> what the op named `op` returns of the result ("quantize", "quantize_both" or "fake_quantize"), then each of
           `stored`: the result of a step, rounded to a dtype ("s3 bfloat16")

operands: what the steps of `prologue` read (`prologue.Prologue`); the first has the shape of the result. dtype: what
the result is rounded to before it is quantised. The arguments after `op` are those of that op; those that it does not
take are left at their defaults. Stored results have the shape of the first operand. Kernels read operands of that shape
where they lie if they are slices of the columns of contiguous tensors; of any others they read contiguous copies.
"""

import math

import torch

from fp4compile import formats, ops
from fp4compile._compat import statically_true
from fp4compile.ops import LIBRARY, TAGS
from fp4compile.prologue import Prologue, apply

LIBRARY.define(
    "quantize_prologue(Tensor[] operands, str[] prologue, ScalarType dtype, str op, str format, int dim=-1, *,"
    " Tensor? outer=None, str layout='linear', Tensor? seed=None, bool hadamard=False, str[]? stored=None) -> Tensor[]",
    tags=TAGS,
)
OPS = ("quantize", "quantize_both", "fake_quantize")


@torch.library.impl(LIBRARY, "quantize_prologue", "CompositeExplicitAutograd")
def _quantize_prologue(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None,
):  # fmt: skip
    found = _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard, stored)
    value, written = apply(found, operands)
    return [*_of(op, "", value, format, dim, outer, layout, seed, hadamard), *written]


@torch.library.impl(LIBRARY, "quantize_prologue", "CUDA")
def quantize_prologue_cuda(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None,
):  # fmt: skip
    """`quantize_prologue` by the Triton kernels; what a graph is lowered to.

    Where no kernel takes the prologue (`dispatch.takes_prologue`), PyTorch computes it first.
    """
    from fp4compile.templates.quantize.dispatch import Reading, takes_prologue

    steps = _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard, stored)
    down_columns = op == "quantize" and dim not in (-1, operands[0].dim() - 1)
    dtypes = [operand.dtype for operand in operands]
    if not takes_prologue(formats.get(format), steps, dtypes, down_columns or op == "quantize_both"):
        value, written = apply(steps, operands)
        return [*_of(op, "_cuda", value, format, dim, outer, layout, seed, hadamard), *written]
    first, *others = readable(steps, operands)
    written = _empty_stored(steps, first)
    reading = Reading(steps, tuple(others), down_columns, written)
    return [*_of(op, "_cuda", first, format, dim, outer, layout, seed, hadamard, reading=reading), *written]


@torch.library.register_fake("fp4compile::quantize_prologue", lib=LIBRARY)
def _quantize_prologue_fake(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None,
):  # fmt: skip
    found = _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard, stored)
    first = operands[0]
    return [*_of(op, "", first, format, dim, outer, layout, seed, hadamard), *_empty_stored(found, first)]


def readable(prologue: Prologue, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """Operands as kernels read them: as they are, or contiguous."""
    from fp4compile.templates.quantize.views import row_stride

    cols, found = operands[0].shape[-1], []
    for i, kind in sorted(prologue.kinds.items()):
        # Kernels of norms know the stride of the first operand alone.
        strided = kind == "aux" and not (i and prologue.reductions)
        strided = strided and statically_true(operands[i].shape[-1] == cols)
        stride = row_stride(operands[i]) if strided else None
        found.append(operands[i] if isinstance(stride, int) else operands[i].contiguous())
    return found


def _empty_stored(prologue: Prologue, first: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Uninitialised tensors for what a prologue stores."""
    shapes = prologue.stored_shapes(first.shape)
    return tuple(first.new_empty(each, dtype=dtype) for each, (_, dtype) in zip(shapes, prologue.stored, strict=True))


def _of(op, suffix, value, format, dim, outer, layout, seed, hadamard, **reading):
    """What the op returns of a value: by its kernels if the suffix is "_cuda"."""
    function = getattr(ops, op + suffix) if suffix else getattr(torch.ops.fp4compile, op)
    if op == "fake_quantize":
        return function(value, format, outer=outer, **reading)
    along = (dim,) if op == "quantize" else ()
    return function(value, format, *along, outer=outer, layout=layout, seed=seed, hadamard=hadamard, **reading)


def _checked(operands, prologue, dtype, op, dim, layout, seed, hadamard, stored) -> Prologue:
    """The prologue. Raises ValueError for arguments that do not go together."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if op == "fake_quantize" and (layout != "linear" or seed is not None or hadamard):
        raise ValueError("op: fake_quantize takes no layout, seed or hadamard")
    if op != "quantize" and dim != -1:
        raise ValueError(f"dim: {op} takes none, got {dim}")
    return check_operands(operands, Prologue.parse(prologue, dtype, stored or ()), dtype)


def check_operands(operands: list[torch.Tensor], found: Prologue, dtype: torch.dtype) -> Prologue:
    """The prologue. Raises ValueError for operands that do not fit it."""
    if dtype not in ops.FLOAT_DTYPES:
        raise ValueError(f"dtype: expected one of {ops.FLOAT_DTYPES}, got {dtype}")
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
