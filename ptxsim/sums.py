"""The sums of matrix instructions in the registers of a warp: see `warp_products`."""

import numpy as np

from ptxsim import numbers
from ptxsim.state import LANES


def sums_of(registers: np.ndarray) -> np.ndarray:
    """The matrices float32 [warps, 16, n] of registers uint32 [n / 2, warps, 32]."""
    parts = registers.view(np.float32).reshape(
        len(registers) // 4, 2, 2, -1, 8, 4
    )  # column block, row half, parity, warps, g, t
    return parts.transpose(3, 1, 4, 0, 5, 2).reshape(-1, 16, 2 * len(registers))


def undefined_sums(a: np.ndarray, b: np.ndarray, sums: np.ndarray | None) -> np.ndarray:
    """Which registers of a product are undefined, bool [n / 2, warps * 32].

    a: which rows of A are, bool [warps, 16]. b: which columns of B are, bool [warps, n]. sums: the registers of what is
    added, uint32 [n / 2, warps, 32], zero where they are defined; None for none.
    """
    found = a[:, :, None] | b[:, None, :]
    return in_registers(found if sums is None else found | (sums_of(sums).view(np.uint32) != 0))


def registers_of_sums(sums: np.ndarray) -> np.ndarray:
    """The registers float32 [n / 2, warps * 32] that hold matrices float64 [warps, 16, n]."""
    return in_registers(numbers.canonical(sums.astype(np.float32)))


def in_registers(values: np.ndarray) -> np.ndarray:
    """The registers [n / 2, warps * 32] that hold matrices [warps, 16, n] of 32-bit numbers."""
    warps, _, n = values.shape
    parts = values.reshape(warps, 2, 8, n // 8, 4, 2)  # row half, g, column block, t, parity
    return parts.transpose(3, 1, 5, 0, 2, 4).reshape(n // 2, warps * LANES)
