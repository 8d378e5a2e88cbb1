"""What makes accelerate, transformers and peft know fp4compile in every process that imports torch.

`import torch` loads the entry points of the group "torch.backends" and calls them; pyproject.toml names `watch` there.
accelerate and transformers check names against enumerations of their own, before a script can import fp4compile:
accelerate's launcher checks the backend, `from_pretrained` the `quant_method` of a checkpoint. So this file waits for
the modules that hold the enumerations, and adds this package's names after they are imported. In the same way peft
learns of weights that are no parameters, because they are packed; diffusers and huggingface_hub warn of such weights.

It lies beside the package so that a process which does not use the package does not import it; it takes less than 2 ms.
TORCH_DEVICE_BACKEND_AUTOLOAD=0 switches it off.
"""

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

_METHOD = "fp4compile"  # the quant_method of packed models


def watch() -> None:
    """Add this package's names to the libraries' enumerations, now or when they have been imported. Never raises."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    _add_to_imported()


def backends() -> list[str]:
    """The names of this package's backends in Dynamo's registry."""
    return sorted(
        entry.name for entry in entry_points(group="torch_dynamo_backends") if entry.value.startswith("fp4compile.")
    )


def _accept_backends(module: ModuleType) -> None:
    """Make accelerate's enumeration `DynamoBackend` take the names; tried with accelerate 1.15.

    Python calls `_missing_` for a value that is no member. accelerate upper-cases a name before it looks it up, and
    lower-cases it before it passes it to `torch.compile`.
    """
    accepted = frozenset(backends())

    def missing(cls: Any, value: str) -> Any:
        if value.lower() not in accepted:
            return None
        member: Any = str.__new__(cls, value)
        member._name_ = member._value_ = value
        return cls._value2member_map_.setdefault(value, member)

    module.DynamoBackend._missing_ = classmethod(missing)


def _offer_backends(module: ModuleType) -> None:
    """Add the names to the choices of `accelerate launch --dynamo_backend`."""
    module.DYNAMO_BACKENDS.extend(name.upper() for name in backends() if name.upper() not in module.DYNAMO_BACKENDS)


def _read_packed(module: ModuleType) -> None:
    """Let `from_pretrained` load packed models and published checkpoints, and pack models while it loads them.

    ModelOpt's checkpoints have no other reader in transformers, which would load codes without their scales. Those of
    other methods are read if an argument `quantization_config` of this package's method is passed: transformers itself
    refuses two methods.
    """
    for method in (_METHOD, "modelopt"):
        module.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(method, _Configuration)
    merge = module.AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(merge)
    def merged(checkpoint: Any, argument: Any) -> Any:
        if _method_of(argument) != _METHOD or _method_of(checkpoint) == _METHOD:
            return merge(checkpoint, argument)
        from fp4compile.registration import register_with_transformers

        register_with_transformers()
        from fp4compile.weights.transformers import PublishedConfig

        return PublishedConfig(recipe=argument.get("recipe") if isinstance(argument, dict) else argument.recipe)

    module.AutoHfQuantizer.merge_quantization_configs = staticmethod(merged)


def _method_of(config: Any) -> Any:
    return config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)


class _Configuration:
    """Stands for the package's quantization_configs in transformers' registry until one is read."""

    @staticmethod
    def from_dict(values: dict, **options: object) -> object:
        from fp4compile.registration import register_with_transformers

        register_with_transformers()
        from fp4compile.weights.transformers import Fp4CompileConfig, PublishedConfig

        kind = Fp4CompileConfig if _method_of(values) == _METHOD else PublishedConfig
        return kind.from_dict(values, **options)


def _save_packed_parts(module: ModuleType) -> None:
    """Let `save_pretrained` describe the packed layers of a model of which a part alone was given to `pack_`."""
    save = module.PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "fp4compile" in sys.modules:
            from fp4compile.weights.integration import save_as_packed, warn_of_packed

            if not save_as_packed(self):
                warn_of_packed(self)
        return save(self, *args, **kwargs)

    module.PreTrainedModel.save_pretrained = save_pretrained


def _warn_when_saved(module: ModuleType) -> None:
    """Warn where a library writes packed layers that its own `from_pretrained` would replace by random weights.

    Tried with diffusers 0.42 and huggingface_hub 2.4. Their `from_pretrained` do not check the names of tensors.
    """
    owner, method = _UNAWARE[module.__name__]
    save = getattr(getattr(module, owner), method)

    @functools.wraps(save)
    def saved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "fp4compile" in sys.modules:
            from fp4compile.weights.integration import warn_of_packed

            warn_of_packed(self)
        return save(self, *args, **kwargs)

    setattr(getattr(module, owner), method, saved)


# The classes and methods that write models, by module.
_UNAWARE = {
    "diffusers.models.modeling_utils": ("ModelMixin", "save_pretrained"),
    "huggingface_hub.hub_mixin": ("PyTorchModelHubMixin", "_save_pretrained"),
}


def _inject_into_packed(module: ModuleType) -> None:
    """Let peft find packed experts by `target_parameters`, and models without parameters; tried with peft 0.21.

    peft lists a module's parameters for the first, and for the second reads the device of the model's first parameter,
    unless the model says `hf_device_map`.
    """
    tuner = module.BaseTuner
    inject, inject_parameters = tuner.inject_adapter, tuner._inject_parameters

    @functools.wraps(inject)
    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        device = _device_of_packed(model)
        if device is None:
            return inject(self, model, *args, **kwargs)
        model.hf_device_map = {"": device}
        try:
            return inject(self, model, *args, **kwargs)
        finally:
            del model.hf_device_map

    @functools.wraps(inject_parameters)
    def inject_listed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "fp4compile" not in sys.modules:
            return inject_parameters(self, *args, **kwargs)
        from fp4compile.weights.experts import listed

        with listed():
            return inject_parameters(self, *args, **kwargs)

    tuner.inject_adapter, tuner._inject_parameters = inject_adapter, inject_listed


def _device_of_packed(model: Any) -> Any:
    """The device of a model that has packed weights and no parameter; None for any other."""
    if hasattr(model, "hf_device_map") or next(model.parameters(), None) is not None:
        return None
    return next((buffer.device for name, buffer in model.named_buffers() if name.endswith("weight_data")), None)


def _prompt_packed(module: ModuleType) -> None:
    """Let adaption prompts wrap packed attention, of which peft reads a parameter's device; tried with peft 0.21."""
    wrapper = module._BaseAdaptedAttention
    init = wrapper.__init__

    @functools.wraps(init)
    def initialise(self: Any, model_type: Any, adapter_len: int, model: Any, *args: Any, **kwargs: Any) -> None:
        device = _device_of_packed(model)
        if device is None:
            init(self, model_type, adapter_len, model, *args, **kwargs)
            return
        import torch

        model.register_parameter("_of_device", torch.nn.Parameter(torch.empty(0, device=device)))
        try:
            init(self, model_type, adapter_len, model, *args, **kwargs)
        finally:
            del model._of_device

    wrapper.__init__ = initialise


def _adapt_packed(module: ModuleType) -> None:
    """Let adapters of `target_parameters` add to packed experts, which peft would parametrise; tried with peft 0.21."""
    wrapper = module.ParamWrapper
    activate = wrapper._activate_lora

    @contextmanager
    def adapted(self: Any, active_adapters: list[str]) -> Iterator[None]:
        packed = getattr(self.get_base_layer(), "_modules", {}).get(f"{self.parameter_name}_packed")
        names = [name for name in active_adapters if name in self.lora_A]
        if packed is None or not names:
            with activate(self, active_adapters):
                yield
            return
        packed.adapted = packed() + sum(self.get_delta_weight(name) for name in names)
        try:
            yield
        finally:
            packed.adapted = None

    wrapper._activate_lora = adapted


def _save_trained(module: ModuleType) -> None:
    _train_copies(module.ModulesToSaveWrapper, "update", "modules_to_save")


def _tune_trained(module: ModuleType) -> None:
    _train_copies(module.LNTuningLayer, "update_layer", "ln_tuning_layers")


def _train_copies(wrapper: Any, method: str, copies: str) -> None:
    """Give the copies of layers that peft trains weights that can be trained; tried with peft 0.21.

    method: the method of the class `wrapper` that copies a layer into the `nn.ModuleDict` named `copies`.
    """
    update = getattr(wrapper, method)

    @functools.wraps(update)
    def updated(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = set(getattr(self, copies))
        result = update(self, *args, **kwargs)
        if "fp4compile" in sys.modules:
            from fp4compile.weights.replacements import unpacked

            found = getattr(self, copies)
            for name in found.keys() - before:
                found[name] = unpacked(found[name], name in self.active_adapters)
        return result

    setattr(wrapper, method, updated)


_WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "accelerate.utils.dataclasses": _accept_backends,
    "accelerate.commands.config.config_utils": _offer_backends,
    "transformers.quantizers.auto": _read_packed,
    "transformers.modeling_utils": _save_packed_parts,
    **dict.fromkeys(_UNAWARE, _warn_when_saved),
    "peft.tuners.tuners_utils": _inject_into_packed,
    "peft.tuners.adaption_prompt.layer": _prompt_packed,
    "peft.tuners.lora.layer": _adapt_packed,
    "peft.tuners.ln_tuning.layer": _tune_trained,
    "peft.utils.other": _save_trained,
}


# The watched modules to which nothing was added yet.
_waiting = dict(_WATCHED)


def _add_to_imported() -> None:
    """Add the names to every watched module that Python has executed to its end."""
    for name in list(_waiting):
        module = sys.modules.get(name)
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            _waiting.pop(name)(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python does, and adds the names after they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        _add_to_imported()  # a module that itself imported torch was under way when `watch` was called
        if fullname not in _waiting:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, fullname)
        return spec


class _Loader(importlib.abc.Loader):
    """A module's own loader, followed by what is added to the module."""

    def __init__(self, own: importlib.abc.Loader, name: str):
        self.own, self.name = own, name

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.own.exec_module(module)
        if self.name in _waiting:
            _waiting.pop(self.name)(module)
