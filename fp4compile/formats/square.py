"""Square blocks: the same numbers along the rows and along the columns, so results of one direction give the other's.

The functions take linear block scales, and codes or scales as bytes too: collectives move bytes.
"""

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat, as_integers


def transposed_codes(data: torch.Tensor, fmt: BlockFormat, cols: int) -> torch.Tensor:
    """The codes along the columns of a matrix of `cols` columns, made of the codes along its rows.

    The matrix has whole blocks of rows. 4-bit codes lie two a byte, along the rows and along the columns. The result is
    not contiguous.
    """
    if fmt.packed:
        return reference.pack(reference.unpack(data)[:, :cols].t())
    return as_integers(data)[:, :cols].t().view(data.dtype)


def transposed_scales(scales: torch.Tensor) -> torch.Tensor:
    """The block scales along the columns of a matrix, made of the block scales along its rows."""
    return as_integers(scales).t().contiguous().view(scales.dtype)
