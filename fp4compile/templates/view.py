"""Bounds checks for kernel arguments: a kernel must not address memory beyond a tensor's storage.

A kernel computes addresses from sizes and strides that its launch passes to it. A `View` binds them to their tensor.
Making a view raises RuntimeError where an address would lie outside of the storage: a defect of this package, found
when the launch is made or traced, before anything is read. Symbolic sizes are not checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Size = int | torch.SymInt


@dataclass(frozen=True, eq=False)
class View:
    """Elements of a tensor: element (i, j, ...) is i * strides[0] + j * strides[1] + ... elements after the first.

    Raises RuntimeError if the last element lies outside of the tensor's storage.
    """

    tensor: torch.Tensor
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]

    def __post_init__(self) -> None:
        within(self.tensor, span(self.sizes, self.strides))

    @classmethod
    def flat(cls, tensor: torch.Tensor, elements: Size) -> "View":
        """The first `elements` elements of a contiguous tensor."""
        return cls(tensor, (elements,), (1,))


def span(sizes: Sequence[Size], strides: Sequence[Size]) -> Size:
    """The number of elements from the first to the last element of a view, both included.

    0 where the view is empty, or where a size or a stride is symbolic.
    """
    if not all(isinstance(number, int) for number in (*sizes, *strides)) or 0 in sizes:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def within(tensor: torch.Tensor, elements: Size) -> torch.Tensor:
    """The tensor itself, after the check that its storage holds `elements` elements from the first one on.

    Raises RuntimeError if the storage ends earlier.
    """
    # No arithmetic on symbolic numbers: a graph that is being traced would have to hold the result.
    nbytes, offset = tensor.untyped_storage().nbytes(), tensor.storage_offset()
    if not all(isinstance(number, int) for number in (elements, nbytes, offset)):
        return tensor
    there = nbytes // tensor.element_size() - offset
    if elements > there:
        raise RuntimeError(
            f"a launch would address {elements} elements of a tensor of shape {tuple(tensor.shape)}, strides"
            f" {tensor.stride()} and {tensor.dtype}, whose storage has {there} from its first element on"
        )
    return tensor
