"""The table of kernels of kinds that other projects have, written anew: each case launches one on small tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

ROUNDING = 2.0**-24  # of a float32 number, relative
Results = tuple[torch.Tensor, torch.Tensor]  # the kernel's result, and the expected one


@dataclass(frozen=True)
class Case:
    """A kernel. origin: the projects whose kernels are like it.

    tolerance: of a result, relative to its magnitude, or to `below` where that is larger; 0 for equal numbers. For
    float32 it counts roundings, those of approximate functions and of sums in another order among them; for a 16-bit
    result it is one unit in its last place.
    """

    name: str
    origin: str
    run: Callable[[], Results]
    tolerance: float
    below: float

    def check(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        """Raise AssertionError where a result differs from the expected one by more than the tolerance."""
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        allowed = self.tolerance * expected.abs().double().clamp(min=self.below)
        equal = (found == expected) | (found.isnan() & expected.isnan())
        close = expected.isfinite() & ((found.double() - expected.double()).abs() <= allowed)
        assert (equal | close).all(), "results differ"


CASES: dict[str, Case] = {}


def case(
    name: str, origin: str, tolerance: float = 0.0, below: float = 1.0
) -> Callable[[Callable[[], Results]], Callable[[], Results]]:  # fmt: skip
    """Add a function to the table: it launches a kernel, and returns its result and the expected one."""

    def add(run: Callable[[], Results]) -> Callable[[], Results]:
        assert name not in CASES
        CASES[name] = Case(name, origin, run, tolerance, below)
        return run

    return add


def small_integers(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Numbers from -2 to 2, whose products and sums every format holds exactly."""
    return torch.randint(-2, 3, shape).to(dtype)
