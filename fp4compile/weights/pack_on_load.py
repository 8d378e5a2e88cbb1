"""The quantiser that transformers gets for quant_method "fp4compile": it also packs checkpoints in high precision.

transformers reads one tensor after the other. Each weight is packed as soon as it has been read, so that beside the
packed model there is one weight in high precision at a time.
"""

import warnings
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from fp4compile.weights.buffers import buffer_shapes
from fp4compile.weights.linear import leave_fast_paths, obstacle
from fp4compile.weights.pack import decisions
from fp4compile.weights.replacements import Weight
from fp4compile.weights.transformers import METHOD, Fp4CompileConfig, Fp4CompileQuantizer, attach, config_of


class PackOnLoad(Fp4CompileQuantizer):
    """Loads packed models, and packs a model by its configuration's recipe while it is loaded.

    unread: the weights to pack as they are read, by the names of their parameters. late: the weights to pack when the
    model has been loaded.
    """

    def __init__(self, quantization_config: Fp4CompileConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.unread: dict[str, Weight] = {}
        self.late: list[Weight] = []

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Raises ValueError for a missing or superfluous recipe, and for weights on disk, which cannot be packed."""
        super().validate_environment(*args, **kwargs)
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map: weights that stay on disk cannot be packed; allowed are devices and 'cpu'")

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        model = super()._process_model_before_weight_loading(model, **kwargs)
        if self.quantization_config.recipe is None:
            return model
        if getattr(model.config, "distributed_config", None) is not None:
            raise ValueError(
                "distributed_config: weights that are sharded while they are loaded cannot be packed; pack the model "
                "without it, save it, and load the packed model"
            )
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
        for decision in decisions(model, self.quantization_config.recipe):
            weight = decision.weight
            if weight is None:
                continue
            # A tied weight is known when all have been read. A weight of another dtype than the model would be cast
            # to the model's before it could be packed.
            is_tied = bool({*tied, *tied.values()}.intersection(weight.parameters))
            if is_tied or weight.parameter(model).dtype != self.dtype:
                self.late.append(weight)
            else:
                self.unread.update(dict.fromkeys(weight.parameters, weight))
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return param_name in self.unread

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def param_element_size(self, model: nn.Module, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element, from which transformers computes device maps and how much memory it reserves."""
        if param_name not in self.unread:
            return param.element_size()
        parts = buffer_shapes(self.unread[param_name].empty(model)).values()
        return sum(prod(shape) * dtype.itemsize for shape, dtype in parts) / max(1, param.numel())

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if self.quantization_config.recipe is None:
            attach(model)
            return model
        # Those that the checkpoint lacks are still waiting. transformers has initialised them, and warned.
        for weight in [*self.late, *dict.fromkeys(self.unread.values())]:
            reason = None if weight.experts else obstacle(model.get_submodule(weight.names[0]))
            if reason is None:
                weight.pack(model)
            else:
                warnings.warn(f"{weight.names[0]!r} is not packed: {reason}", stacklevel=2)
        self.unread.clear()
        self.late.clear()
        leave_fast_paths(model)
        self.quantization_config.__dict__.update(vars(config_of(model)))  # which has no recipe: it is packed now
        attach(model)
        return model


class _Pack(ConversionOps):
    """What transformers does with a tensor that it has read: packs it into the model, and returns what it did not."""

    def __init__(self, quantizer: PackOnLoad):
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        model, missing_keys = kwargs["model"], kwargs["missing_keys"]
        left = {}
        for name in list(input_dict):
            value = input_dict.pop(name)  # so that nothing else holds it
            value = value[0] if isinstance(value, list) else value
            weight = self.quantizer.unread.get(name)
            if weight is None:
                left[name] = value
            elif value.shape != weight.parameter(model).shape:  # transformers says so, or initialises another
                self._forget(weight)
                self.quantizer.late.append(weight)
                left[name] = value
            else:
                self._forget(weight)
                module, child = weight.slot(model)
                module._parameters[child] = nn.Parameter(value, requires_grad=False)
                del value
                weight.pack(model)
                missing_keys.difference_update(weight.parameters)
                _mark_initialised(model, weight, missing_keys)
        return left

    def _forget(self, weight: Weight) -> None:
        for name in weight.parameters:
            self.quantizer.unread.pop(name)


def _mark_initialised(model: nn.Module, weight: Weight, missing: set[str]) -> None:
    """Tell transformers that a packed weight's module needs no initial values, if nothing else in it does.

    Otherwise transformers reads the weight for it, and that dequantises the weight.
    """
    module, _ = weight.slot(model)
    path = weight.names[0].rpartition(".")[0] if weight.experts else weight.names[0]
    if missing.isdisjoint(f"{path}.{name}" for name in module._parameters):
        module._is_hf_initialized = True


def register() -> None:
    """Make `from_pretrained` use this quantiser. Does nothing the second time."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Fp4CompileConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = PackOnLoad
