"""The tensor that reading a packed weight returns: dequantised values, to which nobody writes without being told."""

from typing import Any, Protocol

import torch

from fp4compile.report.decibels import decibels

# Operators that write to their first argument and whose names do not end in one underscore.
_WRITES = {"__setitem__", *(f"__i{name}__" for name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"
))}  # fmt: skip


class Packed(Protocol):
    """A packed layer, as this file needs it."""

    def store_again(self, values: torch.Tensor) -> None:
        """Pack other values by the layer's own format and rule."""


class DequantizedWeight(torch.Tensor):
    """A packed weight's dequantised values, which are a copy.

    A write to the copy would be lost, and raises RuntimeError. `weight.data = values` packs the values, as libraries of
    adapters merge. Results of operations are plain tensors.
    """

    _layer: Packed
    _is_hf_initialized = True  # transformers gives no initial values to a tensor that has this mark

    @staticmethod
    def of(layer: Packed, values: torch.Tensor) -> "DequantizedWeight":
        weight = values.as_subclass(DequantizedWeight)
        weight._layer = layer
        return weight

    @property
    def data(self) -> torch.Tensor:
        """The values; `weight.data += x` and `weight.data = x` pack the sum, or x."""
        return self

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        self._layer.store_again(values)

    def __iadd__(self, other: Any) -> torch.Tensor:
        return self + other

    def __isub__(self, other: Any) -> torch.Tensor:
        return self - other

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        in_place = name in _WRITES or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
        written = args[:1] if in_place else ((kwargs or {}).get("out"),)
        if any(isinstance(tensor, cls) for tensor in written):
            raise RuntimeError(
                "weight: a packed layer's weight is dequantised at each access, and a write to it is lost; "
                "assign weight.data to pack other values"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def sqnr(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """The ratio of signal to quantisation noise in dB: sum wanted^2 over sum (wanted - got)^2."""
    wanted, got = wanted.detach().float(), got.detach().float()
    return decibels(float(wanted.square().sum()), float((wanted - got).square().sum()))
