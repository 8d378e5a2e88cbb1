"""The prologues that quantise kernels can compute; PyTorch computes any other one before them."""

from collections.abc import Sequence

import torch

from fp4compile.formats.prologue import OPERANDS, STORED, Prologue
from fp4compile.formats.quantize_spec import ROWS, QuantizeSpec
from fp4compile.templates.quantize.row_on_chip import fits_on_chip


def takes_prologue(spec: QuantizeSpec, dtypes: Sequence[torch.dtype], cols) -> bool:
    """Whether a kernel quantises the result of `spec.prologue`.

    dtypes: dtypes of its operands. cols: elements of a row of the result; may be symbolic.

    Kernels of rows compute pairs of elements of any width. Kernels that find statistics take 16-bit elements, in rows
    that fit on the chip. The kernel of both directions takes formats with block scales only, and operands of the
    tensor's size. The kernels of groups take those formats along the rows, any format with a static global scale, and
    formats with row scales. Kernels for square blocks, and for columns only, take no prologue; the latter also quantise
    rows after a Hadamard transform.
    """
    prologue, fmt = spec.prologue, spec.format
    if spec.hadamard and not spec.both:
        return False
    if fmt.square or len(dtypes) > OPERANDS or dtypes[0] not in (prologue.dtype, torch.float32):
        return False  # kernels quantise values in the first operand's dtype, which must hold the result
    stored = [prologue.step_kinds[i] for i, _ in prologue.stored]
    if len(stored) > STORED or "row" in stored or ("col" in stored and not prologue.reductions):
        return False
    tensors = [dtypes[i] for i, kind in prologue.kinds.items() if kind == "aux"]
    if len(tensors) > 3:
        return False
    if prologue.reductions:
        found = not spec.both and not spec.ragged and fits_on_chip(cols)
        return found and spec.dims == (ROWS,) and _finds_statistics(prologue, dtypes)
    if spec.ragged:
        # Rows with row scales and linear block scales do not depend on their groups.
        needs_no_amax = fmt.outer is None or spec.static or (fmt.outer == "row" and not spec.swizzled)
        return spec.dims == (ROWS,) and needs_no_amax and dtypes[0] == prologue.dtype
    if not spec.both:
        return spec.dims == (ROWS,)
    # Operands that are rows or columns, as of a norm, would save 0.7 % of a step (Llama-3-8B, MXFP4, SM100, by bytes).
    whole = all(kind == "aux" for kind in prologue.kinds.values())
    plain = whole and fmt.outer is None and not spec.hadamard and not spec.seeded
    # Stored results would save 0.14 % of a step (benchmarks/results/reach.json). With erf, ptxas spills for SM100. (For
    # SM90, three tensors spill 8 to 40 bytes in kernels of 8-bit codes.)
    fits = not prologue.stored and all(step.operation != "erf" for step in prologue.steps)
    return plain and fits and all(dtype.itemsize == 2 for dtype in tensors)


def _finds_statistics(prologue: Prologue, dtypes: Sequence[torch.dtype]) -> bool:
    """Whether kernels can find the statistics of a prologue and compute the rest. dtypes: dtypes of the operands."""
    rest, read = prologue.after_statistics()
    found = {*prologue.stored, *((i, torch.float32) for i in prologue.statistics)}
    reads_first = prologue.step_kinds[-1] == "aux" and 0 in read
    whole = [dtypes[i] for i, kind in prologue.kinds.items() if kind == "aux"]
    whole += [dtype for i, dtype in prologue.stored if prologue.step_kinds[i] == "aux"]
    narrow = dtypes[0] == prologue.dtype and all(dtype.itemsize == 2 for dtype in whole)
    return narrow and reads_first and len(rest.kinds) <= OPERANDS and len(found) <= STORED
