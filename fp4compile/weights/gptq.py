"""Codes of weights that keep a layer's outputs on sample inputs: GPTQ, and block scales by the rule "hessian".

Let H be the sum of x^T x over the inputs x of a layer. A weight w whose codes represent q changes the layer's outputs
by the squared error (w - q) H (w - q)^T, summed over the rows of w.

**GPTQ** (Frantar et al., arXiv:2210.17323) rounds one column of w after the other. The columns that follow make up for
the error of each: w_j -= (w_i - q_i) U_ij / U_ii, where U is upper triangular and U^T U is the inverse of H. The scales
of a block are made when its first column is reached, of the block as it is then. Global and row scales are those of the
original weight. Columns behind the current 128 are corrected once for all 128, by one matmul.

**"hessian"** takes, for each block, the scale of least (w - q) H_b (w - q)^T, where H_b is the part of H of the block's
columns. It tries the E4M3 numbers from two octaves below to one octave above the scale of the block's largest element;
for MXFP4, four powers of two.

The mean of H's diagonal times (1 % + 0.3 * in features / tokens) is added to the diagonal. With few tokens H is mostly
noise: with 1 % alone, GPTQ on MiniLM had up to twice the error of rounding to nearest on other tokens where there were
fewer tokens than 1.3 times the in features; with this sum it had less error from 16 tokens on. A matrix with fewer
tokens than that gets the identity, which means rounding to nearest. A column whose inputs are all zero gets the mean:
it is rounded to nearest, and no other column corrects it.

Tensors have a leading dimension of matrices [E], which are computed at once: the experts of a layer, or one matrix. All
is float32, except for the factors of H, which are float64.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import HESSIAN, BlockFormat
from fp4compile.ops.quantize import QUANTIZE, best_scales

DAMPENING, SHRINKAGE = 0.01, 0.3
FEWEST_TOKENS = 16
COLUMNS = 128  # a multiple of every format's block length
# The scales that "hessian" tries, as distances of bytes from that of the block's largest element.
_TRIED = {"e4m3": range(-16, 9), "e8m0": range(-2, 2)}
_BYTES = {"e4m3": (1, reference_scales.CANDIDATES), "e8m0": (0, 254)}

Quantised = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Moments:
    """Sums over the inputs x of a weight's matrices: second, of x^T x, float32 [E, K, K]; tokens, their numbers."""

    second: torch.Tensor
    tokens: list[int]

    @property
    def few(self) -> tuple[int, ...]:
        """The matrices that have too few tokens, and are rounded to nearest."""
        return tuple(i for i, count in enumerate(self.tokens) if count < FEWEST_TOKENS)


def quantize(
    weight: torch.Tensor, moments: Moments, fmt: BlockFormat, rule: str, *, compensate: bool,
    layout: str = "linear", amax: torch.Tensor | None = None,
) -> Quantised:  # fmt: skip
    """Quantise finite weights [E, N, K] along K, each matrix separately.

    moments: of the inputs of each matrix. rule: for block scales, one of `formats.SCALE_RULES` or "hessian".
    compensate: whether GPTQ corrects columns; otherwise elements are rounded to nearest. layout: of the block scales.
    amax: float32 [], of which all global scales are made; None takes the amax of each matrix.

    Returns the codes, block scales and global or row scales as the op `quantize` does with `each_matrix`.
    """
    weight = weight.float()
    rows, k = weight.shape[1:]
    amax, outer = _outer(weight, fmt, rule, amax)
    columns = F.pad(weight, (0, -k % fmt.block_cols)).mT.contiguous()  # [E, K, N]
    matrix = _regular(moments, columns.shape[1])
    follow = _corrections(matrix) if compensate else None
    scaled, scales = torch.empty_like(columns), []
    length = COLUMNS if fmt.scale is None else fmt.block_cols
    for start in range(0, columns.shape[1], COLUMNS):
        end = min(start + COLUMNS, columns.shape[1])
        errors = torch.zeros_like(columns[:, start:end])
        for first in range(start, end, length):
            last = min(first + length, end)
            block = columns[:, first:last]
            found = _block_scales(block.mT.contiguous(), matrix[:, first:last, first:last], fmt, rule, amax, outer)
            steps = _steps(found, outer, fmt, rows)
            scales += [] if found is None else [found]
            if follow is None:
                scaled[:, first:last] = _divided(block, steps)
                continue
            for i in range(first, last):
                scaled[:, i] = y = _divided(columns[:, i], steps[:, 0])
                error = columns[:, i] - _rounded(y, fmt) * steps[:, 0]
                columns[:, i + 1 : end].baddbmm_(follow[:, i, i + 1 : end, None], error[:, None], alpha=-1)
                errors[:, i - start] = error
        if follow is not None and end < columns.shape[1]:
            columns[:, end:].baddbmm_(follow[:, start:end, end:].mT, errors, alpha=-1)
    y = scaled.mT.contiguous()
    data = reference.pack(reference.e2m1_encode(_clamped(y, fmt), y < 0)) if fmt.packed else _cast(y, fmt)
    laid_out = reference._lay_out(torch.cat(scales, -1), fmt, rows, layout) if scales else None
    return data.contiguous(), laid_out, outer


def _outer(
    weight: torch.Tensor, fmt: BlockFormat, rule: str, amax: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amax of each matrix [E] or row [E, N, 1], and the global or row scales made of it; None without them."""
    if fmt.outer is None:
        return None, None
    if fmt.outer == "row":
        amax = reference.largest(weight, per_row=True)
    elif amax is None:
        amax = weight.abs().amax((1, 2))
    else:
        amax = amax.to(weight.device).expand(weight.shape[0]).contiguous()
    by_amax = rule == "amax" or fmt.scale is None
    by_error = "mse" if rule == HESSIAN else rule  # the rule of a quantiser with the same global scale
    return amax, reference.outer_of(amax, fmt) if by_amax else reference_scales.outer_of(amax, by_error)


# ---------------------------------------------------------------- second moments


def _regular(moments: Moments, k: int) -> torch.Tensor:
    """H with the addition to its diagonal, float64 [E, k, k]; columns that pad the weight have only a diagonal."""
    pad = k - moments.second.shape[-1]
    matrix = F.pad(moments.second.double(), (0, pad, 0, pad))
    matrix[list(moments.few)] = torch.eye(k, dtype=matrix.dtype, device=matrix.device)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)  # a view
    live = (diagonal > 0).sum(-1, keepdim=True)
    mean = torch.where(live > 0, diagonal.sum(-1, keepdim=True) / live.clamp(min=1), 1.0)
    share = [DAMPENING + SHRINKAGE * moments.second.shape[-1] / max(count, 1) for count in moments.tokens]
    added = mean * torch.tensor(share, dtype=matrix.dtype, device=matrix.device)[:, None]
    diagonal.copy_(torch.where(diagonal > 0, diagonal, mean) + added)
    return matrix


def _corrections(matrix: torch.Tensor) -> torch.Tensor:
    """U_ij / U_ii of the inverse's factor U [E, K, K], float32.

    H = R R^T with R upper triangular is the Cholesky factor of H in reverse order. U is the inverse of R.
    """
    factor = torch.linalg.cholesky(matrix.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    upper = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=True)
    return (upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).float()


# ---------------------------------------------------------------- scales and elements


def _block_scales(
    x: torch.Tensor, matrix: torch.Tensor, fmt: BlockFormat, rule: str, amax: torch.Tensor | None,
    outer: torch.Tensor | None,
) -> torch.Tensor | None:  # fmt: skip
    """The scales [E, R, 1] of blocks x [E, N, block length]; None for formats without block scales."""
    if fmt.scale is None:
        return None
    if rule == "amax":
        return QUANTIZE(x, fmt.name, -1, each_matrix=True, amax=amax)[1]
    factor = x.new_ones(x.shape[0]) if outer is None else outer
    return _weighted(x, matrix.float(), fmt, factor) if rule == HESSIAN else best_scales(x, fmt, factor, rule)


def _weighted(x: torch.Tensor, matrix: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor) -> torch.Tensor:
    """The scales by "hessian" of x [E, N, block length]. matrix: H_b, float32 [E, block length, block length]."""
    blocks = reference._blocks(x, fmt)[..., 0, :]  # [E, R, block rows, block length]
    largest, factor = blocks.abs().amax((-2, -1)), outer[:, None]
    if fmt.scale == "e8m0":
        start = reference.e8m0_scale(largest, fmt.element, "rceil")
    else:
        start = reference_scales.nearest(largest / 6.0 / factor)
    best, winner = torch.full_like(largest, torch.inf), start.to(torch.uint8)
    for distance in _TRIED[str(fmt.scale)]:
        byte = (start.to(torch.int32) + distance).clamp(*_BYTES[str(fmt.scale)]).to(torch.uint8)
        steps = (reference.decoded(byte.view(fmt.scale_dtype), fmt) * factor)[..., None, None]
        rest = blocks - _rounded(_divided(blocks, steps), fmt) * steps
        error = ((rest @ matrix[:, None]) * rest).sum((-2, -1))
        better = error < best
        best, winner = torch.where(better, error, best), torch.where(better, byte, winner)
    return winner[..., None].view(fmt.scale_dtype)


def _steps(scales: torch.Tensor | None, outer: torch.Tensor | None, fmt: BlockFormat, rows: int) -> torch.Tensor:
    """Block scales [E, R, 1] times global or row scales, for each row: [E, 1, N]."""
    factor = None if outer is None else outer.view(outer.shape[0], -1, 1)
    if scales is None:
        return factor.expand(-1, rows, 1).mT  # type: ignore[union-attr]  # formats without block scales have one
    scales = reference.scales_of_rows(scales, fmt, rows) if fmt.square else scales
    steps = reference.decoded(scales, fmt)
    return (steps if factor is None else steps * factor).mT


def _divided(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """x / steps; 0 where a step has underflowed to 0."""
    return torch.where(steps == 0, 0.0, x / steps)


def _rounded(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """The elements nearest to y, in float32."""
    if not fmt.packed:
        return _cast(y, fmt).float()
    y = _clamped(y, fmt)
    magnitude = y.abs()
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (y / unit).round() * unit


def _clamped(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return y.clamp(-fmt.element_max, fmt.element_max)


def _cast(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return reference.saturate(y, fmt.data_dtype)
