"""Names of modules and parameters without the segments of wrappers; names of packed submodules; numbers of blocks.

Most segments are recognised by their text. One that models use too, such as `module`, is removed only below a wrapper
class.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_GETATTR = re.compile(r",\s'([^']+)'\)")
_CELL = re.compile(r"\.__closure__\[\d+\]\.cell_contents")
# peft's X-LoRA sets a layer's `forward` to a method of an object that holds the layer.
REBOUND = re.compile(r"\.forward\.__self__\.target\b")

# Attributes in which wrappers hold the wrapped module. docs/adapters.md has the libraries and versions.
_SEGMENTS = {
    "_orig_mod",  # torch.compile
    "_checkpoint_wrapped_module",  # torch's checkpoint_wrapper and apply_activation_checkpointing
    "_fsdp_wrapped_module",  # FSDP1
    "_forward_module", "_original_module",  # Lightning Fabric
    "base_layer", "original_module", "token_adapter",  # peft
    "parametrizations",  # torch.nn.utils.parametrize
}  # fmt: skip
# The attributes of wrappers whose hooks remove the attribute from the names in state dicts.
_NOT_IN_STATE = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# Attributes that models use too: the wrapper class (module, name), and its attribute. By name, so that the library need
# not be installed.
_ATTRIBUTES = {
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.optim.swa_utils", "AveragedModel"): "module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
    ("peft.peft_model", "PeftModel"): "base_model",
    ("peft.mixed_model", "PeftMixedModel"): "base_model",
    ("peft.tuners.tuners_utils", "BaseTuner"): "model",
    ("peft.tuners.xlora.model", "XLoraModel"): "lora_model",
    ("peft.tuners.adaption_prompt.model", "AdaptionPromptModel"): "model",
    ("peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention"): "model",
}
# What peft adds beside a module that it wraps: the wrapper class, and the attribute.
_ADDED = {
    ("peft.peft_model", "PeftModel"): "prompt_encoder",
    ("peft.tuners.xlora.model", "XLoraModel"): "internal_xlora_classifier",
    ("peft.tuners.adaption_prompt.layer", "_BaseAdaptedAttention"): "adaption_prompt",
}
_TUNER_LAYER = ("peft.tuners.tuners_utils", "BaseTunerLayer")
_ORIGINAL = re.compile(r"original\d*")

# The roles of modules in peft, see `Named.part`.
ADAPTER, TRAINED_COPY = "adapter", "a copy that peft trains (modules_to_save)"


@dataclass(frozen=True)
class Named:
    """A module or parameter by its path.

    path: the full name. kept: for each segment of the path, whether it is in the own name. part: ADAPTER for a module
    that peft added to a layer or a model, TRAINED_COPY for a copy under `modules_to_save`; else None.
    """

    path: str = ""
    kept: tuple[bool, ...] = ()
    part: str | None = None

    @property
    def name(self) -> str:
        """The own name: the path without the segments of wrappers."""
        return self._own(0)

    def below(self, path: str) -> str:
        """The own name of `path`, the last part of this path."""
        return self._own(len(self.kept) - path.count(".") - 1) if path else ""

    def _own(self, first: int) -> str:
        parts = zip(self.path.split(".")[first:], self.kept[first:], strict=False)
        return ".".join(part for part, kept in parts if kept)

    def child(self, segment: str, holder: nn.Module | None = None) -> "Named":
        """The child under a segment of this module, `holder`; without a holder the text alone decides."""
        kept = segment not in _SEGMENTS and (holder is None or segment not in _wrapped_by(type(holder)))
        part = self.part
        above = self.path.rpartition(".")[2] if self.kept and not self.kept[-1] else None
        if segment == "modules_to_save" and (holder is None or "original_module" in holder._modules):
            kept, part = False, TRAINED_COPY
        elif above == "modules_to_save":  # the name of an adapter
            kept = False
        elif _ORIGINAL.fullmatch(segment) and ".parametrizations." in f".{self.path}":
            kept = self.path.split(".")[-2] != "parametrizations"
        elif holder is not None and "base_layer" in holder._modules and segment != "base_layer":
            part = part or (ADAPTER if _TUNER_LAYER in _ancestry(type(holder)) else None)
        elif holder is not None and segment in _added_by(type(holder)):
            part = part or ADAPTER
        return Named(f"{self.path}.{segment}" if self.kept else segment, (*self.kept, kept), part)


@functools.cache
def _ancestry(kind: type) -> frozenset[tuple[str, str]]:
    return frozenset((one.__module__, one.__qualname__) for one in kind.__mro__)


@functools.cache
def _wrapped_by(kind: type) -> frozenset[str]:
    """The attributes of a class that hold the module that it wraps."""
    return frozenset(child for wrapper, child in _ATTRIBUTES.items() if wrapper in _ancestry(kind))


@functools.cache
def _added_by(kind: type) -> frozenset[str]:
    """The attributes of a class of peft that hold what it adds beside the module that it wraps."""
    return frozenset(child for wrapper, child in _ADDED.items() if wrapper in _ancestry(kind))


def walk(module: nn.Module, named: Named | None = None) -> Iterator[tuple[Named, nn.Module]]:
    """Each module of a model with its names, as `named_modules(remove_duplicate=False)` orders them."""
    named = named or Named()
    yield named, module
    for segment, child in module._modules.items():
        if child is not None:
            yield from walk(child, named.child(segment, module))


def named_tensors(model: nn.Module, *, buffers: bool = False) -> Iterator[tuple[Named, torch.Tensor]]:
    """Each parameter of a model, and with `buffers` each buffer, by every name that it has."""
    for named, module in walk(model):
        held = {**module._parameters, **module._buffers} if buffers else module._parameters
        for child, tensor in held.items():
            if tensor is not None:
                yield named.child(child, module), tensor


def module_of(model: Callable) -> nn.Module | None:
    """The module that a callable is, or of which it is a method; None for another callable."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def check_module(module: object, argument: str = "model") -> None:
    """Raise TypeError if an argument is no module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{argument}: expected a torch.nn.Module, got {type(module).__name__}")


def name_in_state(path: str) -> str:
    """The name that state dicts have for the module at a path."""
    return ".".join(segment for segment in path.split(".") if segment not in _NOT_IN_STATE)


def packed_name(parameter: str) -> str:
    """Name of the submodule that holds a packed parameter of experts."""
    return f"{parameter}_packed"


def parameter_name(packed: str) -> str:
    """The inverse of `packed_name`."""
    return packed.removesuffix("_packed")


def module_name(parameter: str) -> str:
    """The layer that a parameter belongs to: its name without `.weight`."""
    return parameter.removesuffix(".weight") if parameter != "weight" else ""


def block_of(module: str) -> tuple[str, int] | None:
    """("model.layers", 3) of "model.layers.3.mlp.up_proj"; None outside a numbered list."""
    match = _BLOCK.search(module)
    return None if match is None else (module[: match.start()], int(match.group(1)))


def clean_name(path: str) -> str:
    """The own name in a text, without the root variable. `Named` is more precise where the module is available.

    Dynamo's text for a model that a function closes over is "getattr(G['model'].layers, '0').mlp", and
    "L['fn'].__closure__[0].cell_contents.mlp" where the function is passed to another one, such as `torch.func.grad`.
    """
    path = REBOUND.sub("", path)
    path = _CELL.sub("", _GETATTR.sub(r".\1", path.replace("getattr(", "")))
    _, bracket, rest = path.rpartition("']")
    path = rest.lstrip(".") if bracket else path
    return functools.reduce(Named.child, path.split("."), Named()).name if path else ""
