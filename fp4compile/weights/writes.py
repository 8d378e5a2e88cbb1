"""Detect writes to weights that do not raise the weight's version counter.

Views and `detach()` share a tensor's counter. Four kinds of write do not raise it, and are recorded here, by storage:

- Writes through `.data`, which has its own counter. `watch` makes all tensors that `.data` returns for one storage
  share one counter, which the record keeps, as it keeps that of a tensor assigned to `.data`. If `.data` of a parameter
  is assigned memory that further tensors share, weights are quantised at every call.
- Steps of optimisers mark the storages of their parameters: the fused ones raise no counter.
- Each forward and backward run of a training graph marks those that it trains: any code may update them.
- Collectives and FSDP: the beginning and the end of the default process group mark all storages, as every mark does
  while there is one, and `changes_are_seen` is false meanwhile.

`refresh` marks storages by hand, after any other write.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp4compile import _inductor_patches

NEVER = -1  # no storage has this mark


class Storage:
    """The record of writes to one storage.

    mark: the number of its last mark. counters: empty tensors with the version counters of other tensors on it. shared:
    whether tensors with unknown counters may be on it. While the weak reference exists, no storage reuses the address.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self.reference = StorageWeakRef(storage)
        self.address: int = self.reference.cdata
        self.mark = 0
        self.counters: list[torch.Tensor] = []
        self.shared = False
        self._of_data: torch.Tensor | None = None  # the counter of tensors that `.data` returned

    @property
    def writes(self) -> int:
        """The sum of the version counters: it grows with each write, and may grow where a counter is added."""
        total = 0
        for counter in self.counters:  # runs at every call of a compiled model: `sum` takes three times as long
            total += counter._version
        return total

    def hand_out(self, data: torch.Tensor) -> torch.Tensor:
        """A tensor equal to `data`, the result of `.data`, whose version counter this record keeps."""
        if self._of_data is None:
            self._of_data = _counter_of(data)
            self.counters.append(self._of_data)
        shared = self._of_data.detach()
        _inductor_patches.set_data(shared, data)
        return shared

    def watch(self, tensor: torch.Tensor) -> None:
        """Keep the version counter of a tensor on this storage."""
        if not any(_same_counter(counter, tensor) for counter in self.counters):
            self.counters.append(_counter_of(tensor))


def _counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that has a tensor's version counter, and not its storage."""
    counter = tensor.detach()
    _inductor_patches.set_data(counter, counter.new_empty(0))
    return counter


def _same_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors share a version counter: raising the first one's raises the other's."""
    before = one._version, other._version
    torch._C._autograd._unsafe_set_version_counter((one,), (before[0] + 1,))
    same = other._version == before[1] + 1
    torch._C._autograd._unsafe_set_version_counter((one,), (before[0],))
    return same


# By address of the storage object. `tracked` removes the entries of freed storages when their number has doubled.
_storages: dict[int, Storage] = {}
_limit = 64
_lock = threading.Lock()
_marks = itertools.count(1)


def tracked(storage: torch.UntypedStorage) -> Storage:
    """The record of a storage, which is created at the first call."""
    global _limit
    known = _storages.get(storage._cdata)
    if known is None:
        with _lock:
            if len(_storages) >= _limit:
                for address in [one.address for one in _storages.values() if one.reference.expired()]:
                    del _storages[address]
                _limit = max(64, 2 * len(_storages))
            known = _storages.setdefault(storage._cdata, Storage(storage))
    return known


# ---------------------------------------------------------------- writes through `.data`


def _read(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """The result of `.data` of a tensor: `data`, or a tensor equal to it whose writes are detected."""
    if type(data) is not torch.Tensor or not torch._C._has_storage(data):
        return data
    known = _storages.get(data.untyped_storage()._cdata)
    if known is None:
        if not issubclass(type(tensor), torch.nn.Parameter) or data.is_meta:
            return data  # no parameter is on this storage, or none whose `.data` was read
        known = tracked(data.untyped_storage())
    # A trace records `data` itself, and transforms of torch.func forbid to assign it.
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        known.mark = next(_marks)
        return data
    with torch.inference_mode(False), torch._C._DisableTorchDispatch():
        return known.hand_out(data)


def _assigned(tensor: torch.Tensor, data: torch.Tensor, before: int) -> None:
    """Record that `tensor.data = data` was executed. before: the address of the tensor's previous storage object."""
    if is_traceable_wrapper_subclass(tensor) or is_traceable_wrapper_subclass(data) or tensor.is_meta:
        return
    storage = tensor.untyped_storage()
    if storage._cdata == before or not (issubclass(type(tensor), torch.nn.Parameter) or storage._cdata in _storages):
        return
    known = tracked(storage)
    # Three references are expected: the two tensors, and the Python object of the storage.
    if data.is_inference() or torch._C._storage_Use_Count(storage._cdata) > 3:
        known.shared, known.mark = True, next(_marks)
    else:
        with torch._C._DisableTorchDispatch():
            known.watch(data)


# ---------------------------------------------------------------- marks


def refresh(model: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
    """Make the next inference call quantise weights again, after a write that fp4compile cannot detect.

    Such a write goes through numpy, DLPack or the storage, or is done by a fused update, a kernel outside PyTorch, the
    replay of a CUDA graph or a collective.

    model: a module, a tensor, or an iterable of tensors, whose storages are marked as changed. None marks the storage
        of every packed weight, as does every `model` while torch.distributed has its default process group.

    Raises TypeError for anything else.
    """
    if model is None:
        _mark(None)
        return
    if isinstance(model, torch.nn.Module):
        model = itertools.chain(model.parameters(), model.buffers())
    elif isinstance(model, torch.Tensor):
        model = [model]
    elif not isinstance(model, Iterable):
        raise TypeError(f"model: expected a module, a tensor, tensors or None, got {type(model).__name__}")
    tensors = list(model)
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"model: expected a module, a tensor, tensors or None, got a {type(tensor).__name__} in it")
    _mark(tensors)


def _mark(tensors: Iterable[Any] | None) -> None:
    """Mark the storages of tensors; of all packed weights for None, and while FSDP may gather weights from them."""
    if _storages:
        for address in list(_storages) if tensors is None or in_group() else _addresses(tensors):
            storage = _storages.get(address)
            if storage is not None:
                storage.mark = next(_marks)


def _addresses(tensors: Iterable[Any]) -> Iterator[int]:
    """The addresses of the storage objects of tensors, and of the tensors inside a wrapper subclass."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _addresses(getattr(tensor, name) for name in names)
        elif isinstance(tensor, torch.Tensor) and torch._C._has_storage(tensor):
            yield tensor.untyped_storage()._cdata


@functools.cache
def watch() -> bool:
    """Start to detect writes, once. Returns False if this torch does not allow to watch process groups."""
    _inductor_patches.watch_data(_read, _assigned)
    register_optimizer_step_post_hook(_stepped)
    return _inductor_patches.watch_process_groups(refresh)


def changes_are_seen() -> bool:
    """Whether packed weights may be cached now: collectives and FSDP of a default group raise no counter."""
    return watch() and not in_group()


def in_group() -> bool:
    """Whether torch.distributed has its default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@torch.compiler.disable
def _stepped(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    _mark(tensor for group in optimizer.param_groups for tensor in group["params"])


def marking(compiled: Callable, parameters: Sequence[int]) -> Callable:
    """Wrap a compiled training graph, so that each run marks the storages of the arguments at these positions."""

    @functools.wraps(compiled)
    def call(*args: Any) -> Any:
        weights = [args[i] for i in parameters]
        outputs = compiled(*args)
        _mark(weights)

        @torch.compiler.disable
        def mark(*gradients: Any) -> None:
            _mark(weights)

        # A weight that is packed between forward and backward is older than the update that follows the backward.
        for node in {tensor.grad_fn for tensor in outputs if isinstance(tensor, torch.Tensor)} - {None}:
            node.register_hook(mark)
        return outputs

    return call
