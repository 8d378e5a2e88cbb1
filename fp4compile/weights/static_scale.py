"""Static global scales of activations as tensors, one object for all layers that have the same scale.

Such a tensor is an input of a graph, where Dynamo would guard a number by its value. So blocks whose scales differ
share a graph, and Q, K and V have one input, by which passes recognise that they quantise their input equally.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode

_KEPT: WeakValueDictionary[tuple[float, torch.device, Any], torch.Tensor] = WeakValueDictionary()


def static_scale(value: float, device: torch.device) -> torch.Tensor:
    """A number as a float32 tensor [] on a device: the same read-only tensor at each call."""
    mode = _get_current_dispatch_mode()
    if not (mode is None or isinstance(mode, FakeTensorMode)):
        return torch.full((), value, dtype=torch.float32, device=device)
    kept = _KEPT.get((value, device, mode))
    if kept is None:
        with torch.inference_mode(False):
            kept = torch.full((), value, dtype=torch.float32, device=device)
        torch._dynamo.mark_static_address(kept, guard=False)  # CUDA graphs need not copy it at each call
        _KEPT[value, device, mode] = kept
    return kept
