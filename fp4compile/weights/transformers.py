"""Packed models in transformers' `save_pretrained` and `from_pretrained`: the quantiser for quant_method "fp4compile".

The quantization_config in config.json holds the state of every packed layer, so the skeleton on the meta device gets
its packed layers before any weight is read, and no weight in high precision is ever made.
"""

import copy
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4compile.analysis.module_names import packed_name
from fp4compile.weights.buffers import PackedWeight, buffer_shapes, is_extra_state, stored_dtype
from fp4compile.weights.experts import states_of
from fp4compile.weights.linear import leave_fast_paths
from fp4compile.weights.replacements import METHOD, Weight, check_states, weights_of
from fp4compile.weights.scale_checks import check_buffers
from fp4compile.weights.sharing import storable


class Fp4CompileConfig(QuantizationConfigMixin):
    """The quantization_config of a packed model, or the order to pack a model while it is loaded.

    layers, experts: the descriptions of the packed layers and experts, by name. recipe: as for `fp4compile.pack_`, for
    checkpoints that are not packed: `from_pretrained(..., quantization_config={"quant_method": "fp4compile",
    "recipe": "nvfp4"})`.
    """

    def __init__(
        self,
        layers: dict[str, dict] | None = None,
        experts: dict[str, dict] | None = None,
        quant_method: str = METHOD,
        recipe: str | dict | None = None,
    ):
        self.quant_method = quant_method  # type: ignore[assignment]  # which is no member of transformers' enum
        self.layers, self.experts = {} if layers is None else layers, {} if experts is None else experts
        self.recipe = recipe


class Fp4CompileQuantizer(HfQuantizer):
    """Loads and saves packed models."""

    quantization_config: Fp4CompileConfig

    def __init__(self, quantization_config: Fp4CompileConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.waiting: list[tuple[Weight, PackedWeight, _Shell]] = []
        self.dtype: torch.dtype | None = None  # which transformers loads weights in

    # ------------------------------------------------------------ loading

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError where the checkpoint is not packed and no recipe says how to pack it."""
        if not self.pre_quantized and self.quantization_config.recipe is None:
            raise ValueError(
                "quantization_config: the checkpoint is not packed; name a recipe to pack it by, as in "
                '{"quant_method": "fp4compile", "recipe": "nvfp4"}'
            )
        if self.pre_quantized and self.quantization_config.recipe is not None:
            raise ValueError("quantization_config: the checkpoint is packed already; expected no recipe")

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        config = self.quantization_config
        check_states(config.layers, config.experts)
        for weight in weights_of(model, config.layers, config.experts):
            packed = weight.empty(model)
            shell = _Shell(packed, weight.parameter(model), getattr(packed, "bias", None))
            self.waiting.append((weight, packed, shell))
            weight.put(model, shell)
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        for weight, _, shell in self.waiting:
            if shell.missing:
                name = f"{weight.packed_names[0]}.{min(shell.missing)}"
                raise ValueError(f"tensor {name!r} is missing in the checkpoint")
        for weight, packed, shell in self.waiting:
            buffers = {name: getattr(shell, name).view(dtype) for name, (_, dtype) in buffer_shapes(packed).items()}
            check_buffers({f"{weight.packed_names[0]}.{name}": tensor for name, tensor in buffers.items()})
            for name, tensor in buffers.items():
                setattr(packed, name, tensor)
            packed.weight_dtype = self._kept_dtype(model, weight) or packed.weight_dtype
            if weight.experts is None:
                packed.bias = shell.bias
                weight.put(model, packed)
            else:  # the shell gives way to the packed experts
                place, _ = weight.experts
                place.module._modules[packed_name(place.child)] = packed
            packed.lay_out_scales()
        self.waiting.clear()
        leave_fast_paths(model)
        return model

    def _kept_dtype(self, model: Any, weight: Weight) -> torch.dtype | None:
        """The dtype in which transformers keeps a weight, where that is not the model's; None where it is."""
        plan = model._get_dtype_plan(self.dtype) if hasattr(model, "_get_dtype_plan") else {}
        names = sorted(weight.parameters)
        return next((dtype for part, dtype in plan.items() if re.search(part.replace("*", ".*"), names[0])), None)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """Bytes stay bytes: they are codes and scales, also in modules that transformers keeps in float32."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else param.dtype
        return None if stored in ("U8", torch.uint8) else dtype

    # ------------------------------------------------------------ saving

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict]:
        """The tensors as files hold them. Also updates the configuration, which is saved afterwards.

        A model and one inside it may have the same configuration, and the names of their layers differ.
        """
        self.quantization_config.__dict__.update(vars(config_of(model)))
        model.config.quantization_config = self.quantization_config
        state = {name: tensor for name, tensor in model.state_dict().items() if not is_extra_state(name)}
        return {name: storable(tensor.detach()) for name, tensor in state.items()}, {}

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the packed weights can be trained; the weights themselves are frozen."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


class _Shell(nn.Module):
    """The stand-in for a packed layer while weights are loaded: its buffers, with scales and FP8 codes as bytes.

    weight: on the meta device, because code of transformers reads it; marked, so that it gets no initial values.
    missing: the buffers that were not loaded. transformers assigns uninitialised memory to them, and warns; it marks
    the tensors that it has loaded.
    """

    def __init__(self, packed: PackedWeight, weight: nn.Parameter, bias: nn.Parameter | None):
        super().__init__()
        self.bias = bias
        self.weight = weight.detach()  # so that it is no parameter
        self.weight._is_hf_initialized = True
        self.missing = set(buffer_shapes(packed))
        for name, (shape, dtype) in buffer_shapes(packed).items():
            self.register_buffer(name, torch.empty(shape, dtype=stored_dtype(dtype), device="meta"))

    def forward(self) -> torch.Tensor:
        """The weight on the meta device, for code of transformers that would initialise it."""
        return self.weight

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(value, "_is_hf_initialized", False):
            self.missing.discard(name)
        super().__setattr__(name, value)


# ---------------------------------------------------------------- configurations


def config_of(model: nn.Module) -> Fp4CompileConfig:
    """The quantization_config of a packed model."""
    named = model.named_modules(remove_duplicate=False)
    packed = {name: module for name, module in named if isinstance(module, PackedWeight)}
    return Fp4CompileConfig(*states_of(packed))


def attach(model: nn.Module) -> None:
    """Let `save_pretrained` of every transformers model in a module save its packed form.

    The outermost ones get configurations of their own: models that were made from one configuration share it, and the
    others may stay unpacked.
    """
    inside: set[nn.Module] = set()
    for one in model.modules():
        config = config_of(one) if isinstance(one, PreTrainedModel) else Fp4CompileConfig()
        if not (config.layers or config.experts):
            continue
        if one not in inside:
            if not isinstance(getattr(one, "hf_quantizer", None), Fp4CompileQuantizer):
                _own_config(model, one.config)
            one.config.quantization_config = config
            inside.update(one.modules())
        one.hf_quantizer = Fp4CompileQuantizer(config, pre_quantized=True)


def _own_config(model: nn.Module, config: PreTrainedConfig) -> None:
    """Put a copy of a configuration, and of those inside it, in its place in all modules of a model."""
    copies: dict[int, Any] = {}
    copy.deepcopy(config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copies.get(id(value), value)
