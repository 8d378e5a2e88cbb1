"""Block scales of weights by least error, in plain PyTorch: the CPU implementation, and the oracle of the kernel.

A weight is quantised once, so the choice of its NVFP4 block scales may take more time than a maximum does. The rule
"mse" takes the scale of least squared error among all 126 positive finite E4M3 numbers, ties to the smallest scale (the
FP8 scale sweep of ModelOpt 0.47).

The global scale is g / 2688, where g is the amax of the tensor; 1 if g is 0. An element is E2M1 of x / (scale * outer),
divided with one rounding. These are the bits that ModelOpt writes.

In MXFP4, "mse" takes the power of two of least squared error, ties to the smallest. It is the scale of contract rceil,
which clips nothing, or its half. Doubling the former lowers no error, by the argument below. A quarter of it clips the
largest element at 3/8 of its range, which costs more than 31 finer elements gain.

**The error** (NVFP4). Let u = min(|x| * (1 / outer), 2^20). The error of a scale e is the sum of (u - q e)^2 over the
block, where q is u * (1 / e) rounded to E2M1. All is float32 with one rounding an operation; q e is exact. Sums are
pairwise: neighbours first, along the row and then (square blocks) across the rows. With the bound of 2^20 no square
overflows. The bound changes no choice: every scale clips elements larger than 6 * 448.

**Which scales are tried.** Let a be the largest u of the block, and n the number of its elements (16 or 256).

- Where a <= 6 e, doubling e never lowers the error. Up to 6 e, the grid of 2 e (0, 1, 2, 3, 4, 6 times e; then 8 e) has
  no number that the grid of e lacks. This holds in float32 too: halving is exact, and every operation is monotone. So a
  scale whose half is a scale too, and at least a / 6, is no better than its half, which wins a tie. From a / 6 upwards
  one octave remains: 8 scales or, where halves are no E4M3 numbers, the scales up to 15 * 2^-9.
- Where n = 16 and a >= 8 e, doubling e lowers the error. The error of a falls by at least 4 e^2, from (a - 6 e)^2. The
  error of each of the 15 others rises by at most e^2 / 4, for elements e / 2 off the grid of 2 e. (n = 256: where
  a >= 15 e, by 72 e^2 against 63.75 e^2.) So such a scale cannot win while its double is a scale, up to 224.
- Where a > 6 e, a alone costs (a - 6 e)^2, which grows as e falls. Once that exceeds the best error so far, no smaller
  scale can win.

So the search starts at the top of the octave above a / 6, and goes down until one of the last two conditions holds. It
tries at most 12 of the 126 scales for a block of 16 in a tensor whose amax is g, up to 15 where they are subnormal, and
20 for a square block.
"""

import torch

from fp4compile.formats import reference
from fp4compile.formats.formats import BlockFormat

CANDIDATES = 126  # positive finite E4M3 numbers: the bytes 1 to 126
U_MAX = 2.0**20
# Number of elements of a block -> the ratio of largest element to scale from which the double scale has less error.
DOUBLE_WINS = {16: 8.0, 256: 15.0}
LAST_WITH_DOUBLE = 224.0
MOST_SCALES = 20  # tried for a block, at most
SUBNORMALS = 15  # bytes up to this one are all multiples of 2^-9, and the odd ones have no half
_CHUNK = 2**14  # blocks of one search, whose intermediate results stay in the CPU's cache


def quantize(
    x: torch.Tensor, fmt: BlockFormat, outer: torch.Tensor | None, layout: str, amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`reference.quantize` with the block scales of least error.

    amax: float32 [] or [..., 1, 1], of which the global scale is made if `outer` is None; None computes it from x.
    """
    if x.dim() == 1:
        return reference.drop_row(quantize(x.unsqueeze(0), fmt, outer, layout, amax))
    x = x.float()
    if outer is None and fmt.outer is not None:
        outer = outer_of(reference.largest(x, per_row=False) if amax is None else amax)
    factor = x.new_ones(()) if outer is None else outer
    blocks = reference._blocks(x, fmt)
    scales = best_powers(blocks) if fmt.scale == "e8m0" else best_scales(blocks, factor)
    steps = reference.decoded(scales, fmt) * factor
    y = reference._matrix(blocks / steps[..., :, None, :, None], x.shape[-2])
    codes = reference.e2m1_encode(y.clamp(-6.0, 6.0), y < 0)
    return reference.pack(codes).contiguous(), reference._lay_out(scales, fmt, x.shape[-2], layout), outer


def outer_of(amax: torch.Tensor) -> torch.Tensor:
    """The global scale for an amax, float32 of the amax's shape."""
    return reference._torchao_outer(amax)


def best_scales(blocks: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """The E4M3 block scales [..., R, C] of float32 blocks [..., R, rows, C, 16]; NaN where a block is not finite.

    outer: float32 [] or [..., 1, 1].
    """
    rows, columns = blocks.shape[-3], blocks.shape[-1]
    shape = (*blocks.shape[:-3], blocks.shape[-2])
    flat = blocks.transpose(-3, -2).reshape(-1, rows, columns)
    outers = outer.expand(shape).reshape(-1)
    found = [_byte(part, own) for part, own in zip(flat.split(_CHUNK), outers.split(_CHUNK), strict=True)]
    byte = torch.cat(found) if found else flat.new_empty(0, dtype=torch.uint8)
    return byte.view(shape).view(torch.float8_e4m3fn)


def _byte(blocks: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """The scale bytes of blocks [B, rows, 16] of tensors with the global scales `outer` [B]."""
    magnitude, factor = blocks.abs(), reference._encode_scale(outer)
    largest = magnitude.amax((-2, -1))
    u = (magnitude * factor[:, None, None]).clamp(max=U_MAX)
    top = (largest * factor).clamp(max=U_MAX)
    return torch.where(largest.isfinite() & ~top.isnan(), _least_error(u, top), 0x7F).to(torch.uint8)


def best_powers(blocks: torch.Tensor) -> torch.Tensor:
    """The E8M0 block scales [..., R, C] of MXFP4 blocks [..., R, rows, C, 32] by least squared error, float32."""
    largest = blocks.abs().amax((-3, -1))
    byte = reference.e8m0_scale(largest, "e2m1", "rceil")
    half = torch.where((byte > 0) & (byte < 255), byte - 1, byte)
    errors = []
    for one in (byte, half):
        # In units of the larger scale, where every square is finite: the block times a power of two is exact.
        u = blocks.abs() * reference._exp2(127 - byte.to(torch.int32))[..., :, None, :, None]
        squares = rest(u, torch.where(one < byte, 0.5, 1.0)[..., :, None, :, None]).square()
        errors.append(_sum_neighbours(_sum_neighbours(squares, -1), -3)[..., 0, :, 0])
    return torch.where(errors[1] <= errors[0], half, byte).view(torch.float8_e8m0fnu)


def _least_error(u: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """The bytes of the scales, int32 [B], for blocks u [B, rows, 16] whose largest elements are `top` [B]."""
    double_wins = DOUBLE_WINS[u.shape[-2] * u.shape[-1]]
    byte = _first(top)
    best, winner = torch.full_like(top, torch.inf), byte
    active = torch.ones_like(byte, dtype=torch.bool)
    while active.any():
        error = block_error(u, value(byte))
        better = active & (error <= best)
        best, winner = torch.where(better, error, best), torch.where(better, byte, winner)
        byte = (byte - 1).clamp(min=0)
        scale = value(byte)
        excess = (top - 6.0 * scale).clamp(min=0.0)
        double_loses = (top < double_wins * scale) | (scale > LAST_WITH_DOUBLE)
        active &= (byte > 0) & (excess * excess <= best) & double_loses
    return winner


def _first(top: torch.Tensor) -> torch.Tensor:
    """The largest scale byte that can win: the seventh above the first scale that is larger than top / 6.

    The upper 12 bits of a float32 are an E4M3 byte plus 8 * (127 - 7), where both are normal numbers. The product with
    1/6 may be too small by less than one in its last digit; taking the next larger scale makes up for it.
    """
    above = ((top * reference._f32(1.0 / 6.0)).view(torch.int32) >> 20) - 8 * 120 + 1
    return (above + 7).clamp(SUBNORMALS, CANDIDATES)


def value(byte: torch.Tensor) -> torch.Tensor:
    """Positive E4M3 bytes (any integers) -> float32."""
    return byte.to(torch.uint8).view(torch.float8_e4m3fn).float()


def rest(u: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The rests u - q * scale of magnitudes u (float32); the scale broadcasts to u."""
    y = (u * (1.0 / scale)).clamp(max=6.0)
    q = torch.where(y < 2.0, (2.0 * y).round() * 0.5, torch.where(y < 4.0, y.round(), (0.5 * y).round() * 2.0))
    return u - q * scale


def block_error(u: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The squared error [B] of blocks u [B, rows, 16] with scales [B]."""
    return _sum_neighbours(_sum_neighbours(rest(u, scale[:, None, None]).square(), -1), -2)[:, 0, 0]


def _sum_neighbours(terms: torch.Tensor, dim: int) -> torch.Tensor:
    """Pairwise sums along a dimension (a negative number), which stays with size one."""
    while terms.shape[dim] > 1:
        first, second = terms.unflatten(dim, (-1, 2)).unbind(dim)
        terms = first + second
    return terms
