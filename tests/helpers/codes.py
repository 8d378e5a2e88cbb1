"""Codes and scales of quantised tensors as numbers that tests compare."""

import torch

from fp4compile.ops.functional import BlockScaled

SHAPES = [
    (16,), (7,), (1, 1), (5, 33), (33, 64), (2, 3, 40), (2, 3, 4, 17), (0, 16), (3, 0), (0,), (2, 0, 32), (0, 3, 5),
]  # fmt: skip
SHAPES_AND_DIMS = [(shape, dim) for shape in SHAPES for dim in range(-len(shape), 1)]


def codes_of(data: torch.Tensor) -> torch.Tensor:
    """One code an element, as uint8."""
    if data.dtype != torch.uint8:
        return data.view(torch.uint8)
    return torch.stack((data % 16, data // 16), dim=-1).reshape(*data.shape[:-1], -1)


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def is_negative_zero(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) & x.signbit()


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same_bits(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same(a: BlockScaled, b: BlockScaled) -> bool:
    fields = same_bits(a.data, b.data) and same_bits(a.scales, b.scales) and same_bits(a.outer, b.outer)
    return fields and (a.format, a.shape, a.layout) == (b.format, b.shape, b.layout)


def static_outer(fmt, lead, value=0.01):
    """A global scale for a format that has one, so that parts of a tensor quantise like the whole."""
    if fmt.outer is None:
        return None
    return torch.full((*lead, 1) if fmt.outer == "row" else (), value)
