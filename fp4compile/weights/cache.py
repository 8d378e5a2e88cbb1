"""Packed weights beside the parameters of compiled graphs: quantised once, and again when the weight changes.

`passes/hoist.py` takes the quantising of weights out of inference graphs, and of frozen weights out of training graphs;
`packed_weight` below quantises them instead.

The packed tensors are an attribute of the parameter itself. So they are freed with the parameter, without a weak
reference to the parameter, which would forbid `torch.utils.swap_tensors`.

The packed tensors are used while the weight's storage, address, shape, strides, dtype and version counter are
unchanged. After a change the weight is quantised again, into the same memory if it fits, because CUDA graphs hold the
address of that memory.

Some writes do not raise the version counter. So three kinds of event mark the storages that they may have written to:
the steps of all optimisers, because fused ones raise no counter; every forward and backward run of a training graph of
this backend, for the parameters that it trains, because any code may update them after it; and the beginning and the
end of torch.distributed's default process group, because collectives raise no counter. While there is such a group,
weights are quantised at every call. The user calls `refresh` to mark storages after a write that cannot be detected.
"""

import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fp4compile import _inductor_patches
from fp4compile.ops.quantize import QUANTIZE

_ATTRIBUTE = "_fp4compile_packed"
_CHUNK = 1 << 22  # words of a tensor that are hashed at a time


@dataclass(frozen=True)
class Piece:
    """The part of a weight that is packed, where it differs from the whole weight: a slice, a reshape, a cast.

    Element (i, j, ...) of the piece is element number offset + i * stride[0] + j * stride[1] + ... of the weight in
    row-major order, cast to each dtype of `casts` in turn.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    casts: tuple[torch.dtype, ...]

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The piece of a weight."""
        flat = weight.reshape(-1)
        piece = flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)
        for dtype in self.casts:
            piece = piece.to(dtype)
        return piece


@dataclass(frozen=True, eq=False)
class Form:
    """The arguments of the quantise op by which a weight, or a piece of it, is packed.

    `form` makes one object for each combination. Forms are therefore compared by identity, which is cheap at every call
    of the compiled model.
    """

    format: str
    dim: int
    layout: str
    piece: Piece | None
    grouped: bool
    scale_rule: str


def form(
    format: str,
    dim: int = -1,
    layout: str = "linear",
    piece: Piece | None = None,
    grouped: bool = False,
    scale_rule: str = "amax",
) -> Form:
    """The form of a quantise's format, dimension, layout, piece and rule of the block scales.

    grouped: whether each matrix is quantised separately, see `groups`.
    """
    return _form(format, dim, layout, piece, grouped, scale_rule)


# Separate from `form`, because the cache distinguishes positional from keyword arguments; `form` passes all positional.
_form = functools.cache(Form)


class _Storage:
    """A storage from which a weight was packed, and the number of its last mark (0: never marked).

    While the weak reference exists, no other storage object gets the same address.
    """

    def __init__(self, storage: torch.UntypedStorage):
        self.reference = StorageWeakRef(storage)
        self.address: int = self.reference.cdata
        self.mark = 0


# By address of the storage object; an entry disappears with the last weight that was packed from the storage.
_storages: weakref.WeakValueDictionary[int, _Storage] = weakref.WeakValueDictionary()
_marks = itertools.count(1)
_NEVER = -1  # no storage has this mark
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packed tensors (data, scales, outer scale), and the weight's observable state when they were made.

    Storage and address imply the offset and the device. mark: the storage's mark; _NEVER where the tensors must not be
    used again. fingerprint: the fingerprint of the contents; None where it was not requested.
    """

    tensors: tuple[torch.Tensor, ...]
    storage: _Storage
    mark: int
    version: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    fingerprint: tuple[int, int] | None

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether the weight's observable state is unchanged."""
        return (
            self.mark == self.storage.mark
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and self.storage.address == weight.untyped_storage()._cdata
            and self.shape == weight.shape
            and self.strides == weight.stride()
            and self.dtype is weight.dtype
            and not weight.is_inference()  # `.data = ...` may have made it an inference tensor, without a counter
        )


@dataclass(slots=True)
class _Forms:
    """The attribute of a weight: its packed tensors, by form.

    owner: id of the weight. If it is another tensor's id, the attribute was copied or swapped, and is not used.
    """

    owner: int
    packed: dict[Form, _Packed] = field(default_factory=dict)

    def __reduce__(self) -> tuple:
        # A pickle or a copy of the parameter has an empty dictionary instead, which can be read without this package.
        return OrderedDict, ()


def packed_weight(weight: torch.Tensor, form: Form, check: str | None = None) -> tuple[torch.Tensor, ...]:
    """(data, scales, outer scale) of a weight, kept until the weight changes or its storage is marked.

    check: the parameter's name, to compare the contents as well: RuntimeError is raised if they changed and the
    observable state did not. None does not compare them.
    """
    forms = getattr(weight, _ATTRIBUTE, None)
    if type(forms) is _Forms and forms.owner == id(weight):
        kept = forms.packed.get(form)
        if kept is not None and kept.fits(weight) and (check is None or _unchanged(weight, kept, check)):
            return kept.tensors
    if weight.is_inference():  # it has no version counter, so a change could not be detected
        return _quantize(weight, form)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing runs during capture, so nothing can be kept. Each replay of the user's CUDA graph quantises anew.
        return _quantize(weight, form)
    # Tensors that inference mode makes could be neither refilled nor saved for a backward pass outside of it.
    with _lock, torch.inference_mode(False), torch.no_grad():
        return _pack(weight, form, check)


def _pack(weight: torch.Tensor, form: Form, check: str | None) -> tuple[torch.Tensor, ...]:
    forms = getattr(weight, _ATTRIBUTE, None)
    if type(forms) is not _Forms or forms.owner != id(weight):
        forms = _Forms(id(weight))
        setattr(weight, _ATTRIBUTE, forms)
    kept = forms.packed.get(form)
    if kept is not None and kept.fits(weight) and (check is None or kept.fingerprint is not None):
        return kept.tensors  # another thread packed it meanwhile
    storage = _tracked(weight.untyped_storage())
    # The mark is read before the contents. So a write or a mark from now on makes the packed weight out of date.
    mark = storage.mark if changes_are_seen() else _NEVER
    seen = (storage, mark, weight._version, weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
    fingerprint = None if check is None else fingerprint_of(weight)
    fresh = _quantize(weight, form)
    if kept is not None and all(map(_alike, kept.tensors, fresh)):
        for old, new in zip(kept.tensors, fresh, strict=True):
            old.copy_(new)
        fresh = kept.tensors
    if weight.is_cuda:
        # As soon as another thread finds the packed tensors, it may read them on another stream.
        torch.cuda.current_stream(weight.device).synchronize()
    forms.packed[form] = _Packed(fresh, *seen, fingerprint)
    return fresh


def changes_are_seen() -> bool:
    """Whether packed weights may be kept now: not while torch.distributed has its default process group.

    Collectives and FSDP fill storages without raising a version counter. The first call installs the hooks of `_watch`.
    """
    return _watch() and not (torch.distributed.is_available() and torch.distributed.is_initialized())


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _quantize(weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    source = weight.detach() if form.piece is None else form.piece.of(weight.detach())
    return tuple(
        QUANTIZE(
            source, form.format, form.dim, layout=form.layout, scale_rule=form.scale_rule, each_matrix=form.grouped
        )
    )


def _tracked(storage: torch.UntypedStorage) -> _Storage:
    known = _storages.get(storage._cdata)
    if known is None:
        known = _storages[storage._cdata] = _Storage(storage)
    return known


def refresh(model: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
    """Make the next inference call quantise weights again, after a write that fp4compile cannot detect.

    Such a write goes through `parameter.data`, through numpy, or through another tensor on the parameter's memory that
    does not share its version counter; or a kernel outside PyTorch or the replay of a CUDA graph makes it.

    model: a module, a tensor, or an iterable of tensors, whose storages are marked as changed. Every weight in one of
        these storages is quantised again. None marks the storage of every packed weight.

    Raises TypeError for anything else.
    """
    if model is None:
        _mark_storages([storage.address for storage in _storages.values()])
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


def _mark(tensors: Iterable[Any]) -> None:
    if _storages:
        _mark_storages(_addresses(tensors))


def _mark_storages(addresses: Iterable[int]) -> None:
    for address in addresses:
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
def _watch() -> bool:
    """Make optimiser steps mark their parameters, and process groups mark all storages; see `changes_are_seen`.

    Returns False where process groups cannot be watched in this version of torch. A second call changes nothing.
    """
    register_optimizer_step_post_hook(_stepped)
    return _inductor_patches.watch_process_groups(refresh)


@torch.compiler.disable
def _stepped(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    _mark(tensor for group in optimizer.param_groups for tensor in group["params"])


def marking(compiled: Callable, parameters: Sequence[int]) -> Callable:
    """A compiled training graph whose every run, forward and backward, marks the storages of its parameters.

    parameters: the positions of the parameters among the arguments.
    """

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


def _unchanged(weight: torch.Tensor, kept: _Packed, name: str) -> bool:
    """Whether the contents still have the packed fingerprint; False where none was taken.

    Raises RuntimeError where the contents differ.
    """
    if kept.fingerprint is None:
        return False
    if kept.fingerprint != fingerprint_of(weight):
        raise RuntimeError(
            f"weight_cache='check': the contents of parameter {name!r} changed, and nothing told of it (a write through"
            " `.data` or numpy?), since it was quantised. Call fp4compile.refresh(model) after such a write."
        )
    return True


# ---------------------------------------------------------------- fingerprints


def fingerprint_of(tensor: torch.Tensor) -> tuple[int, int]:
    """A hash of 128 bits, as two int64 numbers, over the bytes of a tensor's elements in row-major order.

    Each word of 8 bytes is combined with its position and a seed, and goes through a mixing function of 64 bits
    (splitmix64). The results are added up. Two seeds give the two numbers.
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
    """The last steps of splitmix64, on int64, where sums and products wrap around."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits, filled with zeros; the shift of int64 itself repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
