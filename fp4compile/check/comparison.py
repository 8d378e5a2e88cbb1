"""Inputs that reveal wrong kernels, bitwise comparisons of results, and the machines that run kernels."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from fp4compile import _compat
from fp4compile.hardware import Target
from fp4compile.templates.launch import target_of

if TYPE_CHECKING:
    from fp4compile.check.simulator import LaunchSimulator

BF16, F32 = torch.bfloat16, torch.float32
SEED = 20251122
ENDS = (0, 3, 140, 140, 141, 150)  # groups without rows, of one row, of more rows than a tile; then rows of no group
GROUP_ROWS = 160


def finite(shape: tuple[int, ...], seed: int = SEED) -> torch.Tensor:
    """Hard values for quantisers: rows of very different magnitudes, outliers, runs of zeros, negative zeros."""
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
    return [what for name, one, other in paired(got, expected) for what in bit_differences(name, one, other)]


def bit_differences(name: str, one: torch.Tensor, other: torch.Tensor) -> list[str]:
    """The differences between two tensors, as texts. All NaNs of float32 and 16-bit values are equal."""
    one, other = (x.reshape(-1) for x in (one.cpu(), other))
    if (one.numel(), one.dtype) != (other.numel(), other.dtype):
        return [f"{name}: {one.numel()} of {one.dtype}, and not {other.numel()} of {other.dtype}"]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    differ = one.view(bits) != other.view(bits)
    if one.element_size() > 1:
        differ &= ~(one.isnan() & other.isnan())
    return [f"{name}: {int(differ.sum())} of {differ.numel()} differ"] if differ.any() else []


def paired(got: Results, expected: Results) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, tensor, tensor) for the results of `quantize` along one dimension or both, or for dequantised values."""
    if isinstance(got, torch.Tensor) or isinstance(expected, torch.Tensor):
        return [("values", got, expected)]
    names = ("codes", "scales", "global or row scale")
    if len(expected) > 3:
        names = tuple(f"{which} {name}" for which in ("rows'", "columns'") for name in names)  # type: ignore[assignment]
    return list(zip(names, got, expected, strict=True))


# ---------------------------------------------------------------- machines


class Here:
    """The local GPU, or Triton's interpreter. device: of the tensors of its kernels."""

    def __init__(self) -> None:
        self.device = "cpu" if _compat.interpreting() else "cuda"

    @property
    def target(self) -> Target:
        return target_of(torch.device(self.device))

    def running(self) -> contextlib.AbstractContextManager[None]:
        """A context in which kernels run on this machine."""
        return contextlib.nullcontext()


Runner: TypeAlias = "Here | LaunchSimulator"  # the machines for kernels
