"""Packed weights in inference: quantised once, not at every call.

An inference graph quantises its parameters anew at each call, although they rarely change. `hoisting` wraps
Inductor's `inner_compile`: every quantise that depends on nothing but one parameter leaves the graph, its results
become further static inputs, and the compiled function is called with packed weights that are kept beside the
parameter. They are packed again, into the same memory (CUDA graphs hold its address), when the parameter's storage or
version counter changes. A write through `parameter.data` changes neither and is not seen.

Not under torch.distributed: FSDP fills a parameter's storage anew and keeps its version counter.
"""

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from fp4compile.passes.find import Input, parameters_of

QUANTIZE = torch.ops.fp4compile.quantize.default


@dataclass(frozen=True)
class Recipient:
    """A quantise that left the graph: of which input, as which format, along which dimension, in which layout."""

    index: int
    format: str
    dim: int = -1
    layout: str = "linear"


@dataclass
class _Packed:
    """Packed tensors and the state of the weight that they were made from.

    The weak reference keeps the address of the storage object from being given to another one.
    """

    storage: StorageWeakRef
    version: int
    tensors: tuple[torch.Tensor, ...]

    def fits(self, weight: torch.Tensor) -> bool:
        return self.storage.cdata == weight.untyped_storage()._cdata and self.version == weight._version


# parameter -> what it was packed as; shared by all graphs that use the parameter, gone with it.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def hoisting(inner_compile: Callable, inputs: tuple[Input, ...]) -> Callable:
    """An `inner_compile` that takes the quantising of weights out of inference graphs."""

    def compile_hoisted(gm: GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable:
        if not kwargs.get("is_inference") or _distributed():
            return inner_compile(gm, example_inputs, **kwargs)
        recipients, examples = hoist(gm, inputs)
        if not recipients:
            return inner_compile(gm, example_inputs, **kwargs)
        count = len(example_inputs)
        # Packed weights stay where they are from call to call, as parameters do.
        static = [*(kwargs.get("static_input_idxs") or ()), *range(count, count + len(examples))]
        compiled = inner_compile(gm, [*example_inputs, *examples], **{**kwargs, "static_input_idxs": static})
        return _with_packed(compiled, recipients)

    return compile_hoisted


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def hoist(gm: GraphModule, inputs: tuple[Input, ...]) -> tuple[list[Recipient], list[torch.Tensor]]:
    """Replace every quantise of a whole parameter by new placeholders at the end of the inputs.

    Returns what was taken out, and example values of the three new inputs (data, scales, outer scale) of each.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    parameters = parameters_of(gm.graph, inputs)
    recipients, examples, last = [], [], placeholders[-1] if placeholders else None
    for node in gm.graph.find_nodes(op="call_function", target=QUANTIZE):
        source, fmt, *dim = node.args
        if source not in parameters or node.kwargs.keys() - {"layout"}:
            continue
        recipients.append(Recipient(placeholders.index(source), fmt, *dim, **node.kwargs))
        for index, value in enumerate(node.meta["val"]):
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"packed_{len(examples)}")
            last.meta["val"] = value
            examples.append(value)
            _redirect(node, index, last)
        gm.graph.erase_node(node)
    gm.recompile()
    return recipients, examples


def _redirect(quantize: Node, index: int, replacement: Node) -> None:
    for user in list(quantize.users):
        if user.target is operator.getitem and user.args[1] == index:
            user.replace_all_uses_with(replacement)
            user.graph.erase_node(user)


def _with_packed(compiled: Callable, recipients: list[Recipient]) -> Callable:
    def call(args: list) -> Any:
        packed = [tensor for r in recipients for tensor in packed_weight(args[r.index], r.format, r.dim, r.layout)]
        values = [*args, *packed]
        args.clear()
        return compiled(values)

    call._boxed_call = True
    return call


def packed_weight(weight: torch.Tensor, format: str, dim: int, layout: str = "linear") -> tuple[torch.Tensor, ...]:
    """(data, scales, outer scale) of a weight, kept until its storage or version changes."""
    if weight.is_inference():  # no version counter: nothing tells whether it changed
        return _quantize(weight, format, dim, layout)
    kept = _packed.get(weight, {}).get((format, dim, layout))
    if kept is not None and kept.fits(weight):
        return kept.tensors
    with _lock:
        return _pack(weight, format, dim, layout)


def _pack(weight: torch.Tensor, *form) -> tuple[torch.Tensor, ...]:
    forms = _packed.setdefault(weight, {})
    kept = forms.get(form)
    if kept is not None and kept.fits(weight):  # another thread was first
        return kept.tensors
    fresh = _quantize(weight, *form)
    if kept is not None and kept.tensors[0].device == weight.device:
        for old, new in zip(kept.tensors, fresh, strict=True):
            old.copy_(new)
        fresh = kept.tensors
    forms[form] = _Packed(StorageWeakRef(weight.untyped_storage()), weight._version, fresh)
    return fresh


def _quantize(weight: torch.Tensor, format: str, dim: int, layout: str) -> tuple[torch.Tensor, ...]:
    return QUANTIZE(weight.detach(), format, dim, layout=layout)
