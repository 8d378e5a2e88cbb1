"""Inputs of kernels on which wrong ones show, and comparisons of what kernels return with the reference.

Quantised results are compared bit for bit, products with float64, within the error of a float32 sum. SM100 rounds
stochastically by an instruction with its own random bits: its codes are compared with the two neighbours of a value,
and their mean with the value.
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from fp4compile.formats import epilogue as epilogues
from fp4compile.formats.operand import Arguments, Operand

BF16, F32 = torch.bfloat16, torch.float32
SEED = 20251122
ENDS = (0, 3, 140, 140, 141, 150)  # groups without rows, of one row, of more rows than a tile; then rows of no group
GROUP_ROWS = 160


def finite(shape: tuple[int, ...], seed: int = SEED) -> torch.Tensor:
    """Values on which quantisers disagree: rows of very different sizes, outliers, runs of zeros, negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(-12 * torch.rand((*shape[:-1], 1), generator=generator))
    x = torch.where(torch.rand(shape, generator=generator) < 0.01, x * 1000, x)
    x = torch.where(torch.rand(shape, generator=generator) < 0.05, -0.0, x)
    x[..., shape[-1] // 2 : shape[-1] // 2 + 48] = 0
    return x


def not_finite(shape: tuple[int, ...]) -> torch.Tensor:
    """The values of `finite` with a NaN and both infinities."""
    x = finite(shape)
    for place, value in zip((0, 1, 2), (torch.nan, torch.inf, -torch.inf), strict=True):
        x[..., place % shape[-2], (7 + 40 * place) % shape[-1]] = value
    return x


# ---------------------------------------------------------------- comparisons

Results: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


def same_bits(got: Results, expected: Results) -> list[str]:
    """The differences between results of an op, as texts."""
    return [what for name, one, other in _paired(got, expected) for what in _bits(name, one, other)]


def rounded_alike(got: Results, expected: Results) -> list[str]:
    """The differences between stochastically rounded results, as texts.

    Codes with different random bits must be neighbours without bias; scales must be equal.
    """
    wrong = []
    for name, one, other in _paired(got, expected):
        if not name.endswith("codes"):
            wrong += _bits(name, one, other)
            continue
        steps = (_position(one.cpu()) - _position(other)).float()
        if steps.abs().max() > 1:
            wrong.append(f"{name}: a value is not rounded to a neighbour")
        # Both round up with a probability equal to the distance, so there is no mean shift within six standard errors.
        # The hardware rounds the probability down to a multiple of 1/256.
        if steps.mean().abs() > 6 * 0.7 / steps.numel() ** 0.5 + 2**-8:
            wrong.append(f"{name}: rounding is biased by {steps.mean():.4f} steps")
    return wrong


def _bits(name: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    """The differences between two tensors, as texts. All NaNs of float32 and 16-bit values are equal."""
    one, other = (x.reshape(-1) for x in (one.cpu(), other))
    if (one.numel(), one.dtype) != (other.numel(), other.dtype):
        return [f"{name}: {one.numel()} of {one.dtype}, and not {other.numel()} of {other.dtype}"]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.view(bits) != other.view(bits)
    if one.element_size() > 1:
        differ &= ~(one.isnan() & other.isnan())
    return [f"{name}: {int(differ.sum())} of {differ.numel()} differ"] if differ.any() else []


def _position(packed: torch.Tensor) -> torch.Tensor:
    """The positions of E2M1 codes in the order of their values."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int32)
    return torch.where(codes > 7, 8 - codes, codes)


def _paired(got: Results, expected: Results) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, tensor, tensor) for the results of `quantize` along one dimension or both, or for dequantised values."""
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        return [("values", got, expected)]
    names = ("codes", "scales", "outer scale")
    if len(expected) > 3:
        names = tuple(f"{which} {name}" for which in ("rows'", "columns'") for name in names)  # type: ignore[assignment]
    return list(zip(names, got, expected, strict=True))


def up_to(found: Sequence[torch.Tensor], end: int | None) -> Sequence[torch.Tensor]:
    """Codes, linear scales and row outer scales, cut to `end` rows; swizzled scales and groups' scales are not cut."""
    return found if end is None else [t if t.dim() < 2 else t[:end] for t in found]


def product_differences(got: torch.Tensor, x: Arguments) -> list[str]:
    """Differences of a product from float64 beyond the rounding of its sums and of its result, as texts.

    An epilogue is silu(product) times another matrix.
    """
    k = min(x.a.k, x.b.k)  # without the zeros that fill blocks
    left, right = (_values(one, k) for one in (x.a, x.b))
    outer = _outer_product(x.a, x.b)
    expected, sums = left @ right.mT * outer, left.abs() @ right.abs().mT * outer
    error = sums * (8 + k**0.5) * 2.0**-23 + 2.0**-140
    if x.bias is not None:
        expected = expected + x.bias.double()
    error = error + expected.abs() * 2.0**-23
    eps = torch.finfo(BF16).eps
    if x.spec.epilogue is not None:
        error = (error + expected.abs() * eps) * 1.1 * x.auxiliaries[0].double().abs()  # the slope of silu is below 1.1
        expected = epilogues.apply(expected.float(), x.spec.epilogue, x.auxiliaries).double()
    bound = error + expected.abs() * eps
    inside = expected.isfinite() & (expected.abs() < torch.finfo(BF16).max) & sums.isfinite()
    got = got.cpu().double()
    wrong = []
    beyond = inside & ~((got - expected).abs() <= bound)
    if beyond.any():
        worst = ((got - expected).abs() / bound)[beyond].nan_to_num(nan=torch.inf).max()
        wrong.append(f"{int(beyond.sum())} of {beyond.numel()} values, by up to {worst:.3g} times the bound")
    if got[~expected.isfinite()].isfinite().any():
        wrong.append("a finite value where a NaN or an infinity went in")
    return wrong


def _values(x: Operand, k: int) -> torch.Tensor:
    """An operand without its outer scale, in float64."""
    if x.format is None:
        return x.data.double()
    return torch.ops.fp4compile.dequantize(x.data, x.scales, None, x.format.name, k, F32).double()


def _outer_product(a: Operand, b: Operand) -> torch.Tensor:
    """The product of both outer scales, computed in float32 as in the kernels: [], [M, 1], [1, N] or [M, N]."""
    left, right = (torch.ones(()) if x.outer is None else x.outer for x in (a, b))
    return (left * (right.mT if right.dim() else right)).double()
