"""`Uncaptured`: the weights that a model multiplies outside of its captured graphs, where Dynamo captures nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fp4compile.analysis.module_names import module_name, named_tensors

aten = torch.ops.aten

_MULTIPLIES = {
    aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.mv.default, aten.addmv.default,
    aten.linear.default, aten.matmul.default, aten._grouped_mm.default,
    aten._to_copy.default,  # autocast's cast before a matmul
}  # fmt: skip


class Uncaptured(TorchDispatchMode):
    """Records the storages of multiplied tensors while it is active, except inside `ignored`."""

    # Otherwise operators such as flex_attention and nested regions raise. They run without the mode.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo also captures graphs under this mode."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()
        self.active = True

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """A context in which nothing is recorded: a captured graph runs."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before

    def layers(self, model: nn.Module) -> list[str]:
        """The own names of the model's layers whose weights were recorded, in the model's order."""
        found = (named.name for named, tensor in named_tensors(model) if tensor.dim() > 1 and self.recorded(tensor))
        return list(dict.fromkeys(map(module_name, found)))

    def recorded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage was recorded."""
        return torch._C._has_storage(tensor) and storage_of(tensor) in self.storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.active and func in _MULTIPLIES:
            self.storages |= {storage_of(value) for value in args if type(value) in (torch.Tensor, nn.Parameter)}
        return func(*args, **(kwargs or {}))


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's storage, of meta tensors too."""
    return tensor.untyped_storage()._cdata
