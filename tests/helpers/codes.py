"""Codes and scales of quantised tensors as numbers that tests compare."""

import torch


def codes_of(data: torch.Tensor) -> torch.Tensor:
    """One code an element, as uint8."""
    if data.dtype != torch.uint8:
        return data.view(torch.uint8)
    return torch.stack((data % 16, data // 16), dim=-1).reshape(*data.shape[:-1], -1)


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def is_negative_zero(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) & x.signbit()
