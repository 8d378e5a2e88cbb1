"""Memory with a margin behind it, which shows whether a kernel has written there."""

import math

import torch

MARGIN = 64  # elements
_zeros = torch.zeros


class GuardedZeros:
    """`torch.zeros` of int32, as kernels raise maxima in it. In the margin each number is -1: any maximum shows."""

    def __init__(self, monkeypatch):
        self.margins: list[torch.Tensor] = []
        monkeypatch.setattr(torch, "zeros", self)

    def __call__(self, *shape, dtype=None, **options):
        if dtype != torch.int32:
            return _zeros(*shape, dtype=dtype, **options)
        shape = shape[0] if isinstance(shape[0], tuple | torch.Size) else shape
        count = math.prod(shape)
        memory = torch.full((count + MARGIN,), -1, dtype=dtype, **options)
        self.margins.append(memory[count:])
        return memory[:count].zero_().view(shape)

    def check(self):
        """Whether there were such tensors, and nothing was written behind them."""
        assert self.margins and all((margin == -1).all() for margin in self.margins)
