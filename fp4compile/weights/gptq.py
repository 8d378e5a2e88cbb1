"""Codes of weights that keep a layer's outputs on sample inputs: GPTQ.

Let H be the sum of x^T x over the inputs x of a layer. A weight w whose codes represent q changes the layer's outputs
by the squared error (w - q) H (w - q)^T, summed over the rows of w.

GPTQ (Frantar et al., arXiv:2210.17323) rounds one column of w after the other. The columns that follow make up for
the error of each: w_j -= (w_i - q_i) U_ij / U_ii, where U is upper triangular and U^T U is the inverse of H. The scales
of a block are made when its first column is reached, of the block as it is then. Global and row scales are those of the
original weight. Columns behind a strip of 16 are corrected once for all 16, and those behind 128 once for all 128, each
time by one matmul.

The mean of H's diagonal times (1 % + 0.3 * in features / tokens) is added to the diagonal. With few tokens H is mostly
noise: with 1 % alone, GPTQ on MiniLM had up to twice the error of rounding to nearest on other tokens where there were
fewer tokens than 1.3 times the in features; with this sum it had less error from 16 tokens on. A matrix with fewer
tokens than that gets the identity, which means rounding to nearest. A column whose inputs are all zero gets the mean:
it is rounded to nearest, and no other column corrects it.

Tensors have a leading dimension of matrices [E], many of which are computed at once: the experts of a layer, or one
matrix. All is float32, except for the factors of H, which are float64. Matmuls of float32 have the precision of
`torch.set_float32_matmul_precision`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from fp4compile.formats import reference, reference_scales
from fp4compile.formats.formats import BlockFormat, as_integers
from fp4compile.ops.quantize import QUANTIZE, best_scales

DAMPENING, SHRINKAGE = 0.01, 0.3
FEWEST_TOKENS = 16
COLUMNS = 128  # a multiple of every format's block length
STRIP = 16  # columns that are rounded in one launch; a divisor of every format's block length
AT_ONCE = 1 << 27  # elements of the H of matrices that are quantised at once: 1 GiB in float64

Quantised = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class Moments:
    """Sums over the inputs x of a weight's matrices: second, of x^T x, float32 [E, K, K]; tokens, their numbers.

    Weights of equal inputs, such as q, k and v, may share an object, whose matrices are then factored once.
    """

    second: torch.Tensor
    tokens: list[int]
    _made: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    @property
    def few(self) -> tuple[int, ...]:
        """The matrices that have too few tokens, and are rounded to nearest."""
        return tuple(i for i, count in enumerate(self.tokens) if count < FEWEST_TOKENS)

    def equals(self, other: "Moments") -> bool:
        """Whether another weight has the same sums."""
        return self.tokens == other.tokens and torch.equal(self.second, other.second)

    def part(self, start: int, end: int) -> "Moments":
        """The moments of some of the matrices."""
        return self if end - start >= len(self.tokens) else Moments(self.second[start:end], self.tokens[start:end])

    def corrections(self, multiple: int) -> torch.Tensor:
        """`_corrections`, computed at the first call."""
        if multiple not in self._made:
            self._made[multiple] = _corrections(self, multiple)
        return self._made[multiple]


def quantize(
    weight: torch.Tensor, moments: Moments, fmt: BlockFormat, rule: str, *,
    layout: str = "linear", amax: torch.Tensor | None = None,
) -> Quantised:  # fmt: skip
    """Quantise finite weights [E, N, K] along K, each matrix separately.

    moments: of the inputs of each matrix. rule: for block scales, one of `formats.SCALE_RULES`. layout: of the block
    scales. amax: float32 [], of which all global scales are made; None takes the amax of each matrix.

    Returns the codes, block scales and global or row scales as the op `quantize` does with `each_matrix`.
    """
    found = []
    at_once = max(1, AT_ONCE // weight.shape[-1] ** 2)
    with torch.autocast(weight.device.type, enabled=False):
        for i in range(0, weight.shape[0], at_once):
            some = weight[i : i + at_once].float()
            scaling = _Scaling.of(some, fmt, rule, amax)
            follow = moments.part(i, i + at_once).corrections(fmt.block_cols)
            found.append(_quantize(some, follow, scaling, layout))
        data, scales, outer = zip(*found, strict=True)
        return _joined(data, 0), *(None if parts[0] is None else _joined(parts, 0) for parts in (scales, outer))


def _quantize(weight: torch.Tensor, follow: torch.Tensor, scaling: "_Scaling", layout: str) -> Quantised:
    """`quantize` of float32 weights. follow: `_corrections`, [E, padded K, padded K]."""
    fmt, (rows, k) = scaling.fmt, weight.shape[1:]
    columns = F.pad(weight, (0, follow.shape[-1] - k)).mT.contiguous()  # [E, padded K, N]
    columns += 0.0  # -0.0 becomes 0.0: the signs of zeros are not defined in a strip
    scaled, scales = torch.empty_like(columns), []
    length = COLUMNS if fmt.scale is None else fmt.block_cols
    for start in range(0, columns.shape[1], COLUMNS):
        end = min(start + COLUMNS, columns.shape[1])
        errors = torch.empty_like(columns[:, start:end])
        for first in range(start, end, length):
            last = min(first + length, end)
            found = scaling.scales_of(columns[:, first:last].mT.contiguous())
            scales += [] if found is None else [found]
            steps = scaling.steps(found, rows)
            for i in range(first, last, STRIP):
                strip = slice(i, min(i + STRIP, last))
                made = errors[:, i - start : strip.stop - start]
                _compensate(columns[:, strip], follow[:, strip, strip], steps, fmt, scaled[:, strip], made)
                columns[:, strip.stop : end].baddbmm_(follow[:, strip, strip.stop : end].mT, made, alpha=-1)
        if end < columns.shape[1]:
            columns[:, end:].baddbmm_(follow[:, start:end, end:].mT, errors, alpha=-1)
    y = scaled.mT.contiguous()
    data = reference.pack(reference.e2m1_encode(_clamped(y, fmt), y < 0)) if fmt.packed else _cast(y, fmt)
    laid_out = reference._lay_out(_joined(scales, -1), fmt, rows, layout) if scales else None
    return data.contiguous(), laid_out, scaling.outer


def _compensate(
    strip: torch.Tensor, follow: torch.Tensor, steps: torch.Tensor, fmt: BlockFormat, scaled: torch.Tensor,
    errors: torch.Tensor,
) -> None:  # fmt: skip
    """`compensate_by_torch`, by the Triton kernel on a GPU."""
    if strip.is_cuda and strip.numel():
        from fp4compile.templates import compensate  # imports Triton

        compensate.compensate(strip, follow, steps, fmt, scaled, errors)
    else:
        compensate_by_torch(strip, follow, steps, fmt, scaled, errors)


def compensate_by_torch(
    strip: torch.Tensor, follow: torch.Tensor, steps: torch.Tensor, fmt: BlockFormat, scaled: torch.Tensor,
    errors: torch.Tensor,
) -> None:  # fmt: skip
    """Round the columns of a strip one after the other, and correct the columns of the strip that follow.

    strip: [E, columns, N]; overwritten. follow: `_corrections` of its columns. steps: [E, 1, N], of each row.
    scaled, errors: filled with the columns in units of their steps when they are rounded, and with their errors, both
    of the strip's shape. Each product and each sum is rounded to float32.
    """
    divisors = _divisors(steps)[:, 0]
    for i in range(strip.shape[1]):
        scaled[:, i] = y = strip[:, i] / divisors
        errors[:, i] = error = strip[:, i] - _rounded(y, fmt) * steps[:, 0]
        strip[:, i + 1 :] -= follow[:, i, i + 1 :, None] * error[:, None]


# ---------------------------------------------------------------- second moments


def _regular(moments: Moments, multiple: int) -> torch.Tensor:
    """H with the addition to its diagonal, float64, padded to a multiple; the padding has only a diagonal."""
    pad = -moments.second.shape[-1] % multiple
    matrix = F.pad(moments.second.double(), (0, pad, 0, pad))
    matrix[list(moments.few)] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)  # a view
    live = (diagonal > 0).sum(-1, keepdim=True)
    mean = torch.where(live > 0, diagonal.sum(-1, keepdim=True) / live.clamp(min=1), 1.0)
    share = [DAMPENING + SHRINKAGE * moments.second.shape[-1] / max(count, 1) for count in moments.tokens]
    added = mean * torch.tensor(share, dtype=matrix.dtype, device=matrix.device)[:, None]
    diagonal.copy_(torch.where(diagonal > 0, diagonal, mean) + added)
    return matrix


def _corrections(moments: Moments, multiple: int) -> torch.Tensor:
    """U_ij / U_ii of the factor U [E, K, K] of the inverse of H = `_regular`, float32.

    H = R R^T with R upper triangular is the Cholesky factor of H in reverse order. U is the inverse of R.
    """
    matrix = _regular(moments, multiple)
    factor = torch.linalg.cholesky(matrix.flip(-2, -1)).flip(-2, -1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    upper = torch.linalg.solve_triangular(factor, identity.expand_as(factor), upper=True)
    return (upper / upper.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).float()


# ---------------------------------------------------------------- scales and elements


@dataclass(frozen=True)
class _Scaling:
    """How blocks of weights [E, N, K] are scaled.

    outer: the global scales [E] or row scales [E, N, 1], of the original weights, and amax: of what they are made; None
    for a format without them.
    """

    fmt: BlockFormat
    rule: str
    amax: torch.Tensor | None
    outer: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor, fmt: BlockFormat, rule: str, amax: torch.Tensor | None) -> "_Scaling":
        """The scaling of float32 weights; arguments as in `quantize`."""
        if fmt.outer is None:
            return cls(fmt, rule, None, None)
        if fmt.outer == "row":
            amax = reference.largest(weight, per_row=True)
        elif amax is None:
            amax = weight.abs().amax((1, 2))
        else:
            amax = amax.to(weight.device).expand(weight.shape[0]).contiguous()
        if rule == "amax":
            return cls(fmt, rule, amax, reference.outer_of(amax, fmt))
        return cls(fmt, rule, amax, reference_scales.outer_of(amax))

    def scales_of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The scales [E, R, 1] of blocks x [E, N, block length]; None for formats without block scales."""
        if self.fmt.scale is None:
            return None
        if self.rule == "amax":
            return QUANTIZE(x, self.fmt.name, -1, each_matrix=True, amax=self.amax)[1]
        outer = x.new_ones(x.shape[0]) if self.outer is None else self.outer
        return best_scales(x, self.fmt, outer)

    def steps(self, scales: torch.Tensor | None, rows: int) -> torch.Tensor:
        """Block scales [E, R, 1] times global or row scales, for each of N rows: [E, 1, N]."""
        outer = None if self.outer is None else self.outer.view(self.outer.shape[0], -1, 1)
        if scales is None:
            return outer.expand(-1, rows, 1).mT  # type: ignore[union-attr]  # formats without block scales have one
        scales = reference.scales_of_rows(scales, self.fmt, rows) if self.fmt.square else scales
        steps = reference.decoded(scales, self.fmt)
        return (steps if outer is None else steps * outer).mT


def _divisors(steps: torch.Tensor) -> torch.Tensor:
    """Steps to divide by: infinity where a step has underflowed to 0, so that the quotient is 0."""
    return torch.where(steps == 0, torch.inf, steps)


def _rounded(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    """The elements nearest to y, in float32."""
    if not fmt.packed:
        return _cast(y, fmt).float()
    y = _clamped(y, fmt)
    magnitude = y.abs()
    unit = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (y / unit).round() * unit


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Tensors of one dtype, joined along a dimension as integers: torch cannot join all one-byte floats."""
    return torch.cat([as_integers(part) for part in parts], dim).view(parts[0].dtype)


def _clamped(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return y.clamp(-fmt.element_max, fmt.element_max)


def _cast(y: torch.Tensor, fmt: BlockFormat) -> torch.Tensor:
    return reference.saturate(y, fmt.data_dtype)
