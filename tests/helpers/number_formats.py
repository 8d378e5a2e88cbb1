"""Number formats from their definitions, apart from the package: grids of values, rounding, and samples that matter."""

from bisect import bisect_left

import numpy as np
import torch

from fp4compile.formats.formats import NAMED, BlockFormat, get

F32 = np.float32
FLT_MAX = F32(np.finfo(F32).max)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
MODES = ("floor", "ceil", "even", "rceil")
MX_ELEMENTS = {"e4m3": (448.0, 8, 3), "e5m2": (57344.0, 15, 2), "e2m1": (6.0, 2, 1)}  # max, emax, mbits
UNNAMED = [
    BlockFormat("e2m1", (1, 16), "e4m3", None, "te"),
    BlockFormat("e2m1", (16, 16), "e4m3", None, "te"),
    *(BlockFormat(e, (1, 32), "e8m0", None, mode) for e in ("e5m2", "e2m1") for mode in ("floor", "ceil", "even")),
    *(BlockFormat(e, (32, 32), "e8m0", None, "floor") for e in MX_ELEMENTS),
]
# Formats of the contract "te", by what a global scale or a block covers.
TE_GRANULARITIES = {
    "none": BlockFormat("e2m1", (1, 16), "e4m3", None, "te"),
    "tensor": get("nvfp4_te"),
    "row": get("nvfp4_rowwise"),
    "16x16": get("nvfp4_16x16"),
    "16x16, none": BlockFormat("e2m1", (16, 16), "e4m3", None, "te"),
}
EVERY_FORMAT = [*NAMED.values(), *(fmt for fmt in UNNAMED if fmt.name == fmt.spec)]


def fp8_grid(exponent_bits: int, mantissa_bits: int) -> list[float]:
    """Finite non-negative values by byte, from the definition of the format."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for byte in range(128):
        e, m = byte >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
        if exponent_bits == 5 and e == 31 or exponent_bits == 4 and byte == 127:
            break  # infinities and NaN
        fraction = m / 2**mantissa_bits
        values.append(2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))
    return values


E4M3, E5M2 = fp8_grid(4, 3), fp8_grid(5, 2)


def nearest_even(value: float, grid) -> int:
    """Index of the nearest number of an ascending grid, ties to the even index, saturating. Exact in float64."""
    high = bisect_left(grid, value)
    if high == 0 or high == len(grid):
        return min(high, len(grid) - 1)
    below, above = value - grid[high - 1], grid[high] - value
    return high if above < below or (above == below and high % 2 == 0) else high - 1


def around(points, ulps: int = 40) -> torch.Tensor:
    """Every float32 within some ulps of positive points, both signs."""
    bits = torch.tensor(points, dtype=torch.float32).view(torch.int32)
    near = (bits[:, None] + torch.arange(-ulps, ulps + 1)).to(torch.int32).flatten().view(torch.float32)
    return torch.cat((near, -near))


def every_bf16() -> torch.Tensor:
    """Every finite bfloat16, as float32."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).float()
    return x[x.isfinite()]
