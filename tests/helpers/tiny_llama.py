"""A Llama of transformers with one small layer, for tests of files, loaders and adapters."""

import pytest
import torch

transformers = pytest.importorskip("transformers")


def llama_config(**sizes):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaConfig(**small | {"vocab_size": 64} | sizes)


def llama(config=None, seed=0, dtype=torch.bfloat16):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config or llama_config(), dtype=dtype).eval()
