"""Checks of the scales of packed weights and activations, for files of every origin.

A block scale is never negative, and NaN only in a weight that was not finite. No global scale is zero: zeros have the
scale 1. It may be denormal for a weight, not for an activation: kernels multiply by its inverse.
"""

import warnings
from collections.abc import Mapping
from reprlib import repr as short  # a value may be nested so deeply that `repr` fails
from typing import Any

import torch

from fp4compile.formats import formats
from fp4compile.formats.formats import BlockFormat
from fp4compile.ops.quantize import DEQUANTIZE
from fp4compile.report.decibels import decibels

TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
# NVFP4 weights of normal numbers have 20 dB.
_IN_RANGE = 15.0


def check_buffers(buffers: dict[str, torch.Tensor]) -> None:
    """Raise ValueError for scales that no finite weight can have.

    buffers: by full name. Those on the meta device, as of `from_pretrained(..., device_map="meta")`, have no values.
    """
    for name, tensor in buffers.items():
        buffer = name.rpartition(".")[2]
        if tensor.is_meta:
            continue
        if buffer == "weight_scales":
            check_block_scales(name, tensor)
        elif buffer == "weight_outer":
            check_outer(name, tensor)


def check_model(packed: Mapping[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if a packed layer has scales that are no scales, because its weight was not finite.

    packed: a model's packed modules by name. state: the model's state dict, which has their scales.
    """
    found = {}
    for name, module in sorted(packed.items()):
        for buffer in ("weight_scales", "weight_outer"):
            tensor = state.get(key := f"{name}.{buffer}".removeprefix("."))
            if tensor is not None:
                scales = buffer == "weight_scales"
                dtype = formats.get(module.layer_format.weight).scale_dtype if scales else tensor.dtype
                found[key] = tensor.detach().view(dtype)
    try:
        check_buffers(found)
    except ValueError as error:
        raise ValueError(f"model: {error}; its weight was not finite when it was packed") from error


def check_block_scales(name: str, scales: torch.Tensor) -> None:
    """Raise ValueError if block scales are NaN, negative or infinite. name: the tensor's, for the message."""
    e8m0 = scales.dtype == torch.float8_e8m0fnu  # which has no sign
    as_bytes = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else None
    # The largest valid byte. E8M0 has NaN at 255; E4M3 has NaN at 127 and negative numbers above.
    wrong = ~(scales >= 0) | scales.isinf() if as_bytes is None else as_bytes > (254 if e8m0 else 126)
    if wrong.any():
        kinds = "NaN" if e8m0 else "NaN or negative" if as_bytes is not None else "NaN, negative or infinite"
        raise ValueError(f"tensor {name!r}: has scales that are {kinds}")


def check_powers_of_two(name: str, scales: torch.Tensor) -> None:
    """Raise ValueError if float32 block scales, which `check_block_scales` has checked, have no E8M0 byte."""
    wrong = scales[(scales.frexp().mantissa != 0.5) | (scales < 2.0**-127)]
    if wrong.numel():
        raise ValueError(f"tensor {name!r}: expected powers of two, as the configuration says by scale_fmt 'ue8m0'; "
                         f"got {wrong[0].item():g}")  # fmt: skip


def check_outer(name: str, outer: torch.Tensor, smallest: float = 0.0) -> None:
    """Raise ValueError if float32 global or row scales are not finite, not positive or below `smallest`."""
    wrong = outer[~(torch.isfinite(outer) & (outer > 0) & (outer >= smallest))]
    if wrong.numel():
        kind = "positive normal" if smallest >= TINY else "positive finite"
        raise ValueError(f"tensor {name!r}: expected a {kind} number, got {wrong[0].item():g}")


def check_static(outer: Any) -> None:
    """Raise ValueError if `outer` is no valid static global scale of an activation."""
    if isinstance(outer, bool) or not isinstance(outer, int | float) or not TINY <= outer <= _LARGEST:
        raise ValueError(f"activation_outer: expected a positive normal float32 number, from {TINY:.6g} to "
                         f"{_LARGEST:.6g}, got {short(outer)}")  # fmt: skip


def warn_below_range(weight: torch.Tensor, data: torch.Tensor, scales: torch.Tensor | None, fmt: BlockFormat) -> None:
    """Warn where one-level NVFP4, whose smallest block scale is fixed, loses a weight of small numbers.

    weight: [..., N, K], of which data and scales are the codes and block scales.
    """
    if fmt.scale != "e4m3" or fmt.outer is not None or not weight.numel():
        return
    exact, values = weight.float(), DEQUANTIZE(data, scales, None, fmt.name, weight.shape[-1], torch.float32)
    found = decibels(float(exact.square().sum()), float((exact - values).square().sum()))
    if found < _IN_RANGE:
        # Whole decibels, because Python prints warnings of equal text once, and a model has hundreds of layers.
        warnings.warn(
            f"weight of shape {tuple(weight.shape)}: SQNR {found:.0f} dB in {fmt.name}, which has no global scale for "
            "small numbers; use a format that has one, such as nvfp4",
            stacklevel=3,
        )
