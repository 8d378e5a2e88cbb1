"""Square blocks: codes and scales along the rows hold the same numbers as those along the columns.

The functions take linear block scales, and codes or scales as bytes too: collectives move bytes.
"""

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat, as_integers


def transposed_codes(data: torch.Tensor, fmt: BlockFormat, cols: int) -> torch.Tensor:
    """Rearrange the codes along the rows of a matrix of `cols` columns to its codes along the columns.

    The matrix has whole blocks of rows. 4-bit codes lie two a byte, along the rows and along the columns. The result is
    not contiguous.
    """
    if fmt.packed:
        return reference.pack(reference.unpack(data)[:, :cols].t())
    return as_integers(data)[:, :cols].t().view(data.dtype)


def transposed_scales(scales: torch.Tensor) -> torch.Tensor:
    """Rearrange the block scales along the rows of a matrix to its block scales along the columns."""
    return as_integers(scales).t().contiguous().view(scales.dtype)
