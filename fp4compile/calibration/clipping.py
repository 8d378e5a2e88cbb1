"""The statistics of a layer's activations in calibration, and the amax that they give a static scale.

`see(x)` counts an activation, `amax()` returns the result, float32 []. Bins of histograms come from the bits of a
float32: each power of two has 2^n equal bins, so two histograms can be added without a common range.
"""

import math

import torch
import torch.nn.functional as F

from fp4compile.formats import formats, reference

_PERCENTILE_BINS = 6  # bits of the mantissa: a bin ends at most 1/64 above its start
_BLOCK_BINS = 5  # 32 bins for each power of two, in which an E4M3 scale has 8 values
_ROWS = 24 << _BLOCK_BINS  # blocks that are 2^24 times smaller than the largest add nothing to the error
_RATIOS = 45  # bins of elements / their block's largest, which has its own bin: 3 blocks of 16 hold all 46 values
_CANDIDATES = 64  # over four octaves below the largest magnitude
_AT_ONCE = 1 << 20  # elements, so that temporary memory is bounded


class Largest:
    """The largest magnitude."""

    def __init__(self) -> None:
        self.largest: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """Count an activation [..., K]."""
        found = x.abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        self.largest = found if self.largest is None else torch.maximum(self.largest, found.to(self.largest.device))

    def amax(self) -> torch.Tensor:
        """The largest magnitude to represent; not finite where an activation was not finite, 0 where all were 0."""
        return torch.zeros(()) if self.largest is None else self.largest


class Percentile:
    """The end of the bin below which a percentage of the non-zero elements lies: at most 1/64 too large."""

    def __init__(self, percentile: float) -> None:
        self.percentile = percentile
        self.largest = Largest()
        self.counts: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """See `Largest`."""
        self.largest.see(x)
        for part in x.flatten().split(_AT_ONCE):
            found = torch.bincount(_bins(part.float().abs(), _PERCENTILE_BINS), minlength=256 << _PERCENTILE_BINS)
            self.counts = found if self.counts is None else self.counts + found.to(self.counts.device)

    def amax(self) -> torch.Tensor:
        """See `Largest`."""
        largest = self.largest.amax()
        if self.counts is None or not largest.isfinite():
            return largest
        up_to = self.counts[1:].cumsum(0)  # the first bin counts zeros and magnitudes below 2^-132
        if up_to[-1] == 0:
            return largest
        # The smallest count that is at least the percentage, as an exact ceiling would be: 100 % is all elements.
        wanted = math.ceil(int(up_to[-1]) * (self.percentile / 100))
        index = torch.searchsorted(up_to, torch.full((1,), wanted, device=up_to.device))
        return torch.minimum(_ends(index + 1, _PERCENTILE_BINS).squeeze(0), largest)


class LeastSquares:
    """The magnitude whose global scale quantises the activations with the least squared error.

    Counts elements by their block's largest magnitude (a window of 24 octaves, which moves up) and by their ratio to
    it. Blocks of the bins' middles are quantised with 64 candidates, each 2^(1/16) below the one before.
    """

    def __init__(self, format: str) -> None:
        self.format = formats.get(format)
        self.largest = Largest()
        self.top = 0  # the bin of the largest block, which is the last of the window
        self.counts: torch.Tensor | None = None

    def see(self, x: torch.Tensor) -> None:
        """See `Largest`."""
        self.largest.see(x)
        if not self.largest.amax().isfinite() or not self.largest.amax() > 0:
            return
        counts = self._moved_to(int(_bins(self.largest.amax(), _BLOCK_BINS)))
        length = self.format.block_cols
        blocks = F.pad(x, (0, -x.shape[-1] % length)).reshape(-1, length)
        for part in blocks.split(max(1, _AT_ONCE // length)):
            counts += self._counted(part.float().abs().to(counts.device))

    def amax(self) -> torch.Tensor:
        """See `Largest`."""
        largest = self.largest.amax()
        if self.counts is None or not largest.isfinite():
            return largest
        values, counts = self._values(), self.counts.double()
        candidates = largest * torch.exp2(-torch.arange(_CANDIDATES, device=largest.device) / 16)
        errors = [self._error(values, counts, candidate) for candidate in candidates]
        return candidates[torch.stack(errors).argmin()]  # the largest of equal candidates, which comes first

    def _moved_to(self, top: int) -> torch.Tensor:
        """Move the window to end at bin `top`, drop counts outside it, and return the counts."""
        if self.counts is None:
            self.counts = torch.zeros(_ROWS, _RATIOS + 1, dtype=torch.int64, device=self.largest.amax().device)
        elif top > self.top:
            kept = self.counts[top - self.top :]
            self.counts = F.pad(kept, (0, 0, 0, _ROWS - kept.shape[0]))
        self.top = top
        return self.counts

    def _counted(self, blocks: torch.Tensor) -> torch.Tensor:
        """The counts of magnitudes [blocks, block]."""
        largest = blocks.amax(-1, keepdim=True)
        row = _bins(largest, _BLOCK_BINS) - self.top + _ROWS - 1
        column = (blocks / largest * _RATIOS).nan_to_num_().long()  # 0 / 0 where all are zero
        columns = _RATIOS + 1
        inside = (row >= 0).expand_as(blocks)
        found = torch.bincount((row * columns + column)[inside], minlength=_ROWS * columns)
        return found.view(_ROWS, columns)

    def _values(self) -> torch.Tensor:
        """The magnitudes of the bins of `counts`."""
        largest = self.largest.amax()
        bins = torch.arange(self.top - _ROWS, self.top + 1, device=largest.device)
        ends = _ends(bins.clamp(min=0), _BLOCK_BINS)
        of_block = torch.minimum((ends[:-1] + ends[1:]) / 2, largest).unsqueeze(-1)
        ratios = (torch.arange(_RATIOS, device=largest.device) + 0.5) / _RATIOS
        return of_block * torch.cat((ratios, ratios.new_ones(1)))

    def _error(self, values: torch.Tensor, counts: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """The squared error, float64 []."""
        # Each block includes its largest magnitude, the last column.
        blocks = torch.stack([values[:, [*range(i, i + 15), _RATIOS]] for i in range(0, _RATIOS, 15)], 1)
        outer = reference.outer_of(amax, self.format)
        found, _ = reference.fake_quantize(blocks, self.format, outer)
        errors = (found.float() * outer - blocks).double() ** 2
        return (torch.cat((errors[..., :15].flatten(1), errors[:, 0, 15:]), -1) * counts).sum()


Clipping = Largest | Percentile | LeastSquares


def _bins(magnitudes: torch.Tensor, bits: int) -> torch.Tensor:
    """The bin of each magnitude, int64: its exponent and the first bits of its mantissa."""
    return (magnitudes.view(torch.int32) >> (23 - bits)).long()


def _ends(bins: torch.Tensor, bits: int) -> torch.Tensor:
    """The float32 at which each bin ends and the next one starts."""
    return ((bins + 1) << (23 - bits)).to(torch.int32).view(torch.float32)
