"""Memory that is not a kernel's own: operands embedded in NaN, outputs that hold garbage before they are written."""

from contextlib import contextmanager
from unittest import mock

import torch

MARGIN = 8  # elements beside a row, and rows above and below a tensor


def embedded(x: torch.Tensor, *, beside: bool = False) -> torch.Tensor:
    """A copy of x inside a buffer whose other elements are NaN (or, of integers, 0x7F in every byte).

    It has x's strides where these are dense. beside: rows lie further apart, with NaN between them, as those of a slice
    of the columns of a wider tensor do.
    """
    if x.numel() == 0 or any(stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1):
        return x
    if beside:
        x = x.contiguous()
        strides, step = [1], x.shape[-1] + 2 * MARGIN
        for size in reversed(x.shape[1:-1]):
            strides.insert(0, step)
            step *= size
        strides = [step, *strides] if x.dim() > 1 else [1]
    else:
        strides = list(x.stride())
    length = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True))
    lead = MARGIN * (x.shape[-1] if x.dim() else 1)
    lead += -lead % (64 // x.element_size())  # what is aligned stays so
    buffer = poison(torch.empty(length + 2 * lead, dtype=x.dtype))
    view = buffer.as_strided(x.shape, strides, lead)
    view.copy_(x)
    return view


def poison(x: torch.Tensor) -> torch.Tensor:
    """x, all of whose bytes are 0x7F: NaN in E4M3, and a huge or meaningless number elsewhere; NaN where x is float."""
    if x.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return x.fill_(torch.nan)
    if x.numel():
        x.view(torch.uint8).fill_(0x7F)
    return x


@contextmanager
def poisoned_outputs():
    """While this lasts, what `new_empty` and `torch.empty` return is poisoned: what a kernel does not write shows."""
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def poisoned_new_empty(self, *args, **options):
        return poison(new_empty(self, *args, **options))

    def poisoned_empty(*args, **options):
        return poison(empty(*args, **options))

    with mock.patch.object(torch.Tensor, "new_empty", poisoned_new_empty), mock.patch("torch.empty", poisoned_empty):
        yield


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits; NaNs are equal whatever their payload."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.dtype in (torch.float32, torch.bfloat16, torch.float16):
        nan = one.isnan()
        if not torch.equal(nan, other.isnan()):
            return False
        one, other = one.masked_fill(nan, 0.0), other.masked_fill(nan, 0.0)
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
