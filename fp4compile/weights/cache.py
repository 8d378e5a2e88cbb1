"""Packed weights beside the parameters of compiled graphs: quantised once, and again when the weight changes.

`passes/hoist.py` removes the quantising of constant weights from graphs; `packed_weight` quantises them instead. The
packed tensors are an attribute of the parameter, freed with it: a weak reference would forbid `swap_tensors`. They are
used while the weight's storage, address, shape, strides, dtype and version counter are unchanged, otherwise filled anew
in the same memory, because CUDA graphs hold its address. `weights.writes` detects writes that raise no version counter.
While torch.distributed has its default process group, weights are quantised at every call, unless `Form.promised`.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fp4compile.formats import formats
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights.scale_checks import warn_below_range
from fp4compile.weights.writes import NEVER, Storage, changes_are_seen, tracked

_ATTRIBUTE = "_fp4compile_packed"


@dataclass(frozen=True)
class Piece:
    """The part of a weight that is packed: a slice, a reshape, a cast.

    Element (i, j, ...) is element offset + i * stride[0] + j * stride[1] + ... of the weight in row-major order, cast
    to each dtype of `casts` in turn.
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

    grouped: whether each matrix is quantised separately. promised: whether the user promises to call `refresh` after a
    write of a collective or of FSDP (`weight_cache="always"`). Forms are compared by identity, which is cheap: `form`
    creates one object for each combination.
    """

    format: str
    dim: int
    layout: str
    piece: Piece | None
    grouped: bool
    scale_rule: str
    promised: bool


def form(
    format: str, dim: int = -1, layout: str = "linear", piece: Piece | None = None, grouped: bool = False,
    scale_rule: str = "amax", promised: bool = False,
) -> Form:  # fmt: skip
    """The only `Form` of these arguments."""
    return _form(format, dim, layout, piece, grouped, scale_rule, promised)


_form = functools.cache(Form)  # separate, because the cache distinguishes positional from keyword arguments
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Packed:
    """Packed tensors (data, scales, global scale), and the weight's observable state when they were written.

    Storage and address imply the offset and the device. mark: NEVER if the tensors must not be used again.
    """

    tensors: tuple[torch.Tensor, ...]
    storage: Storage
    mark: int
    writes: int
    version: int
    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    def fits(self, weight: torch.Tensor) -> bool:
        """Whether the weight's observable state is unchanged."""
        storage = self.storage
        return (
            self.mark == storage.mark
            and (not storage.counters or self.writes == storage.writes)  # none now: none before
            and self.version == weight._version
            and self.address == weight.data_ptr()
            and storage.address == weight.untyped_storage()._cdata
            and self.shape == weight.shape
            and self.strides == weight.stride()
            and self.dtype is weight.dtype
            and not weight.is_inference()  # `.data = ...` may have made it an inference tensor, without a counter
        )


@dataclass(slots=True)
class _Forms:
    """The attribute of a weight: its packed tensors, by form. owner: the weight's id; a copy's differs."""

    owner: int
    packed: dict[Form, _Packed] = field(default_factory=dict)

    def __reduce__(self) -> tuple:
        # A pickle or a copy of the parameter has an empty dictionary instead, which can be read without this package.
        return OrderedDict, ()


def packed_weight(weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    """Data, scales and global or row scale of a weight, cached until it changes or its storage is marked."""
    forms = getattr(weight, _ATTRIBUTE, None)
    if type(forms) is _Forms and forms.owner == id(weight):
        kept = forms.packed.get(form)
        if kept is not None and kept.fits(weight):
            return kept.tensors
    if weight.is_inference():  # it has no version counter, so a change could not be detected
        return _quantize(weight, form)
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing runs during capture, so nothing can be cached. Each replay of the user's CUDA graph quantises anew.
        return _quantize(weight, form)
    # Tensors created in inference mode could be neither refilled nor saved for a backward pass outside of it.
    with _lock, torch.inference_mode(False), torch.no_grad():
        return _pack(weight, form)


def packed_pair(first: torch.Tensor, second: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    """Data, scales and any global or row scales of two weights of one shape, stacked."""
    return joined_parts(*([one for one in packed_weight(weight, form) if one.numel()] for weight in (first, second)))


def joined_parts(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors of two packed weights, stacked: each of the second weight after that of the first.

    The tensors are moved to common memory, and stay the same objects, which layers or the cache hold. During the
    capture of a CUDA graph, whose memory is not theirs, they are copied instead.
    """
    if not all(map(_follows, first, second)):
        with _lock:
            if not all(map(_follows, first, second)):  # another thread may have moved them
                first = [_moved_together(*both)[0] for both in zip(first, second, strict=True)]
    return tuple(map(_above, first))


def _moved_together(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # Only an inference tensor can replace the data of an inference tensor.
    with torch.inference_mode(one.is_inference()), torch.no_grad():
        parts = _in_common_memory((one, other))
        if not (one.is_cuda and torch.cuda.is_current_stream_capturing()):
            one.data, other.data = parts
            if one.is_cuda:
                torch.cuda.current_stream(one.device).synchronize()
    return parts


def _follows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a tensor begins where another one ends, in one storage."""
    storages = (x.untyped_storage()._cdata for x in (one, other))
    return len(set(storages)) == 1 and other.data_ptr() == one.data_ptr() + _places(one) * one.element_size()


def _places(x: torch.Tensor) -> int:
    """The distance, in elements, from a tensor to the next one, which begins at a multiple of 16 bytes."""
    return max(x.numel(), 16 // x.element_size())


def _above(x: torch.Tensor) -> torch.Tensor:
    """A view of a tensor and the next one, of its shape, joined along the first dimension; [2] for two numbers."""
    if not x.dim():
        return x.as_strided((2,), (_places(x),))
    return x.as_strided((2 * x.shape[0], *x.shape[1:]), x.stride())


def _in_common_memory(both: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Copies of two tensors of one shape in one storage, the second after the first."""
    one, places = both[0], _places(both[0])
    common = one.new_zeros(2 * places, dtype=one.dtype)
    parts = tuple(common.narrow(0, i * places, one.numel()).view(one.shape) for i in range(2))
    for part, x in zip(parts, both, strict=True):
        part.copy_(x)
    return parts


def _pack(weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    forms = getattr(weight, _ATTRIBUTE, None)
    if type(forms) is not _Forms or forms.owner != id(weight):
        forms = _Forms(id(weight))
        setattr(weight, _ATTRIBUTE, forms)
    kept = forms.packed.get(form)
    if kept is not None and kept.fits(weight):
        return kept.tensors  # another thread packed it meanwhile
    storage = tracked(weight.untyped_storage())
    # The mark is read before the contents. So a write or a mark from now on makes the packed weight out of date.
    mark = NEVER if storage.shared or not (changes_are_seen() or form.promised) else storage.mark
    seen = (storage, mark, storage.writes, weight._version, weight.data_ptr(), weight.shape, weight.stride(),
            weight.dtype)  # fmt: skip
    fresh = _quantize(weight, form)
    if kept is not None and all(map(_alike, kept.tensors, fresh)):
        for old, new in zip(kept.tensors, fresh, strict=True):
            old.copy_(new)
        fresh = kept.tensors
    if weight.is_cuda:
        # Another thread may read the packed tensors on another stream as soon as they are in the attribute.
        torch.cuda.current_stream(weight.device).synchronize()
    forms.packed[form] = _Packed(fresh, *seen)
    return fresh


def _alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.shape == new.shape and old.dtype == new.dtype and old.device == new.device


def _quantize(weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...]:
    source = weight.detach() if form.piece is None else form.piece.of(weight.detach())
    data, scales, outer = QUANTIZE(
        source, form.format, form.dim, layout=form.layout, scale_rule=form.scale_rule, each_matrix=form.grouped
    )
    warn_below_range(source.movedim(form.dim, -1), data, scales, formats.get(form.format))
    return data, scales, outer
