"""Square blocks: the same numbers along the rows and along the columns, so results of one direction give the other's.

The functions take linear block scales, and codes or scales as bytes too: collectives move bytes.
"""

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat


def transposed_codes(data: torch.Tensor, fmt: BlockFormat, cols: int) -> torch.Tensor:
    """The codes along the columns of a matrix of `cols` columns, made of the codes along its rows.

    The matrix has whole blocks of rows. 4-bit codes lie two a byte, along the rows and along the columns. The result is
    not contiguous.
    """
    if fmt.packed:
        return reference.pack(reference.unpack(data)[:, :cols].t())
    return data.view(torch.uint8)[:, :cols].t().view(data.dtype)


def transposed_scales(scales: torch.Tensor) -> torch.Tensor:
    """The block scales along the columns of a matrix, made of the block scales along its rows."""
    return scales.view(torch.uint8).t().contiguous().view(scales.dtype)


def scales_of_rows(scales: torch.Tensor, fmt: BlockFormat, rows: int) -> torch.Tensor:
    """The scales [..., rows, blocks] of each row, which matrix units read; scales: one row for the rows of a block."""
    step = 1 if fmt.block is None else fmt.block[0]
    return scales.view(torch.uint8).repeat_interleave(step, -2).narrow(-2, 0, rows).view(scales.dtype)
