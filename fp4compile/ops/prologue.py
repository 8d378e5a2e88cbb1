"""The op of quantisers with a prologue: pointwise operations whose result is quantised.

    fp4compile::quantize_prologue(
        operands, prologue, dtype, op, format, dim, *, outer, layout, seed, hadamard, stored, results)
        -> what the op named `op` returns of the result ("quantize", "quantize_both" or "fake_quantize"), then each of
           `stored`: the result of a step, rounded to a dtype ("s3 bfloat16")

operands: what the steps of `prologue` read (`prologue.Prologue`); the first has the shape of the result. dtype: what
the result is rounded to before it is quantised. The arguments after `op` are those of that op; those that it does not
take are left at their defaults. Stored results have the shape of the first operand. Kernels read operands of that shape
where they lie if they are slices of the columns of contiguous tensors; of any others they read contiguous copies.

results: the steps whose results are quantised, where these are several. Then the op returns what it does of each result
in turn, and `seed` has a seed for each, [results]. The bits are those of as many ops with a result each.
"""

import math

import torch

from fp4compile._compat import statically_true
from fp4compile.formats import formats
from fp4compile.formats.prologue import Prologue, apply
from fp4compile.ops import dense as ops
from fp4compile.ops.dense import LIBRARY, TAGS

LIBRARY.define(
    "quantize_prologue(Tensor[] operands, str[] prologue, ScalarType dtype, str op, str format, int dim=-1, *,"
    " Tensor? outer=None, str layout='linear', Tensor? seed=None, bool hadamard=False, str[]? stored=None,"
    " int[]? results=None) -> Tensor[]",
    tags=TAGS,
)
OPS = ("quantize", "quantize_both", "fake_quantize")


@torch.library.impl(LIBRARY, "quantize_prologue", "CompositeExplicitAutograd")
def _quantize_prologue(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None, results=None,
):  # fmt: skip
    found = _checked(operands, prologue, dtype, op, dim, outer, layout, seed, hadamard, stored, results)
    values, written = apply(found, operands)
    return [*_of_each(op, "", values, format, dim, outer, layout, seed, hadamard), *written]


@torch.library.impl(LIBRARY, "quantize_prologue", "CUDA")
def quantize_prologue_cuda(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None, results=None,
):  # fmt: skip
    """`quantize_prologue` by the Triton kernels; what a graph is lowered to.

    Where no kernel takes the prologue (`dispatch.takes_prologue`, `takes_several`), or there is nothing to read,
    PyTorch computes it first.
    """
    from fp4compile.templates.quantize.dispatch import Reading, takes_prologue, takes_several

    steps = _checked(operands, prologue, dtype, op, dim, outer, layout, seed, hadamard, stored, results)
    fmt = formats.get(format)
    down_columns = op == "quantize" and dim not in (-1, operands[0].dim() - 1)
    dtypes = [operand.dtype for operand in operands]
    taken = takes_prologue(fmt, steps, dtypes, down_columns or op == "quantize_both")
    taken = taken and not statically_true(operands[0].numel() == 0)
    if not taken or (steps.several and not takes_several(fmt, op, layout, operands[0].shape)):
        values, written = apply(steps, operands)
        return [*_of_each(op, "_cuda", values, format, dim, outer, layout, seed, hadamard), *written]
    first, *others = readable(steps, operands)
    written = _empty_stored(steps, first)
    reading = Reading(steps, tuple(others), down_columns, written, first)
    if not steps.several:
        return [*_of(op, "_cuda", first, format, dim, outer, layout, seed, hadamard, reading=reading), *written]
    # The kernels see the results as a batch: each output is one tensor, of which each result has its own part.
    batch, dim = first.expand(len(steps.several), *first.shape), -2 if down_columns else -1
    together = _of(op, "_cuda", batch, format, dim, outer, layout, seed, hadamard, reading=reading)
    return [*(_part(output, i) for i in range(len(steps.several)) for output in together), *written]


def _part(output: torch.Tensor, i: int) -> torch.Tensor:
    """What belongs to one of several results; what a format has not is [0] for all."""
    return output.new_empty(0) if output.dim() == 1 and statically_true(output.shape[0] == 0) else output.select(0, i)


@torch.library.register_fake("fp4compile::quantize_prologue", lib=LIBRARY)
def _quantize_prologue_fake(
    operands, prologue, dtype, op, format, dim=-1, *, outer=None, layout="linear", seed=None, hadamard=False,
    stored=None, results=None,
):  # fmt: skip
    found = _checked(operands, prologue, dtype, op, dim, outer, layout, seed, hadamard, stored, results)
    first = operands[0]
    values = [first] * len(found.results)
    return [*_of_each(op, "", values, format, dim, outer, layout, seed, hadamard), *_empty_stored(found, first)]


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


def _of_each(op, suffix, values, format, dim, outer, layout, seed, hadamard):
    """What the op returns of one value and, where there are several, of the others, each with its own seed."""
    seeds = [seed] if len(values) == 1 else [None if seed is None else seed.select(0, i) for i in range(len(values))]
    for value, own in zip(values, seeds, strict=True):
        yield from _of(op, suffix, value, format, dim, outer, layout, own, hadamard)


def _of(op, suffix, value, format, dim, outer, layout, seed, hadamard, **reading):
    """What the op returns of a value: by its kernels if the suffix is "_cuda"."""
    function = getattr(ops, op + suffix) if suffix else getattr(torch.ops.fp4compile, op)
    if op == "fake_quantize":
        return function(value, format, outer=outer, **reading)
    along = (dim,) if op == "quantize" else ()
    return function(value, format, *along, outer=outer, layout=layout, seed=seed, hadamard=hadamard, **reading)


def _checked(operands, prologue, dtype, op, dim, outer, layout, seed, hadamard, stored, results) -> Prologue:
    """The prologue. Raises ValueError for arguments that do not go together."""
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if op == "fake_quantize" and (layout != "linear" or seed is not None or hadamard):
        raise ValueError("op: fake_quantize takes no layout, seed or hadamard")
    if op != "quantize" and dim != -1:
        raise ValueError(f"dim: {op} takes none, got {dim}")
    found = Prologue.parse(prologue, dtype, stored or (), results or ())
    if found.several and outer is not None:
        raise ValueError("outer: several results have outer scales of their own, got one that is given")
    if found.several and seed is not None and tuple(seed.shape) != (len(found.several),):
        raise ValueError(f"seed: expected one for each of {len(found.several)} results, got {tuple(seed.shape)}")
    return check_operands(operands, found, dtype)


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
