"""FP8 operands of random codes and scales, and their numbers."""

import torch

from fp4compile.formats import formats
from fp4compile.formats.layouts import ceil_div
from fp4compile.formats.operand import Operand


def operand(rows, k, name, generator):
    """An operand of random codes, of whatever number, and scales from 2^-12 to 2^12; or of 16-bit numbers.

    Codes beyond k, up to whole blocks, are zeros.
    """
    if isinstance(name, torch.dtype):
        return Operand(torch.randn(rows, k, generator=generator).to(name))
    fmt = formats.get(name)
    codes = torch.randint(0, 256, (rows, k), generator=generator).to(torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN elsewhere
    codes = torch.nn.functional.pad(codes, (0, -k % fmt.block_cols)).view(fmt.data_dtype)
    shapes = {"row": (rows, 1), "tensor": ()}
    scales, outer = (
        None if shape is None else torch.exp2(torch.rand(shape, generator=generator) * 24 - 12)
        for shape in ((ceil_div(rows, fmt.block[0]), ceil_div(k, 128)) if fmt.scale else None, shapes.get(fmt.outer))
    )
    return Operand(codes, scales, outer, fmt)


def values(x):
    """The numbers of an operand, in float64."""
    if x.format is None:
        return x.data.double()
    found = x.data.double()
    if x.scales is not None:
        scales = x.scales.double().repeat_interleave(x.format.block[0], 0)[: len(found)]
        found = found * scales.repeat_interleave(128, 1)
    return found if x.outer is None else found * x.outer.double()
