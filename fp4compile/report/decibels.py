"""Ratios of powers in decibels."""

import math


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two powers, such as an SQNR.

    Infinity without noise; minus infinity without signal, and where the noise is not finite.
    """
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf
