"""A hash of a tensor's contents, computed on the tensor's device."""

import torch

_CHUNK = 1 << 22


def fingerprint_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A hash of 128 bits, as two int64 numbers, over the bytes of a tensor's elements in row-major order.

    Each word of 8 bytes is combined with its position and a seed, and goes through a mixing function of 64 bits
    (splitmix64). The results are added up. Two seeds give the two numbers.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), _CHUNK):
        part = data[start : start + _CHUNK]
        place = torch.arange(start, start + part.numel(), device=data.device)
        for i, seed in enumerate((0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179)):
            sums[i] += _mixed(part ^ _mixed(place + seed)).sum()
    low, high = sums.tolist()
    return low, high


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The last steps of splitmix64, on int64, where sums and products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, filled with zeros; the shift of int64 itself repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
