"""The quantiser that transformers gets for quant_method "fp4compile": it also packs checkpoints in high precision."""

from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from fp4compile.weights.pack import pack_
from fp4compile.weights.transformers import METHOD, Fp4CompileConfig, Fp4CompileQuantizer, config_of


class PackOnLoad(Fp4CompileQuantizer):
    """Loads packed models, and packs a loaded model by its configuration's recipe."""

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        recipe = self.quantization_config.recipe
        if recipe is not None:
            pack_(model, recipe)
            self.quantization_config.__dict__.update(vars(config_of(model)))  # which has no recipe: it is packed now
        return model


def register() -> None:
    """Make `from_pretrained` use this quantiser. Does nothing the second time."""
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = Fp4CompileConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = PackOnLoad
