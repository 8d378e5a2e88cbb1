"""A hash of a tensor's contents, computed where the tensor is."""

import torch

_CHUNK = 1 << 22


def fingerprint_of(tensor: torch.Tensor) -> tuple[int, int]:
    """128 bits of hash over a tensor's elements, as bytes in row-major order, computed on its device.

    Every 8 bytes, with their place, go through a mixing function of 64 bits (splitmix64); the sum of the results, with
    two seeds, is the hash.
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
    """splitmix64's finaliser, on int64; sums and products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits with zeros from the left; int64's own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
