"""The models that several benchmarks measure: Llama-3-8B's sizes with random weights, and torchao's training beside."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

LLAMA_3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
              "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}  # fmt: skip
TINY = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def in_bf16(make: Callable[[], Any], device: str) -> Any:
    """A model with random weights in bf16, made on the device."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def random_llama(device: str, layers: int, tiny: bool, **config: Any) -> LlamaForCausalLM:
    """A Llama-3-8B of so many layers. tiny: narrow ones, to try a script."""
    sizes = (TINY if tiny else LLAMA_3_8B) | {"attn_implementation": "sdpa", "tie_word_embeddings": False} | config
    return in_bf16(lambda: LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers)), device)


def torchao_training(model: nn.Module, recipe: str, **config: Any) -> nn.Module | None:
    """The model with torchao's float8 layers, but for its head; None where torchao is not installed."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    chosen = Float8LinearConfig(**config) if config else Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=chosen, module_filter_fn=lambda _, name: "lm_head" not in name)
