"""One layer of each of many model families, in its real widths and without contents: what `benchmarks.reach` compiles.

Tensors are fake ones of the CPU, so that a DeepSeek-V3 takes no memory. All but DiT are models of transformers; their
classes are in `benchmarks.architectures`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.architectures import ARCHITECTURES
from benchmarks.llama_decode import LLAMA_3_8B, QWEN3_30B_A3B
from fp4compile.recipe import Recipe, named

# How many tokens a step has. Decoding is without a cache: nothing that is quantised depends on it.
MODES = {"forward": 8192, "decode": 1, "decode of 4": 4, "decode of 32": 32, "train": 8192}
USUAL, ONCE = ("forward", "decode", "train"), ("forward", "train")
RECIPES = {
    "forward": ("nvfp4", "mxfp8", "float8_rowwise"),
    "decode": ("nvfp4", "mxfp8", "nvfp4_weight_only"),
    "decode of 4": ("nvfp4", "nvfp4_weight_only"),
    "decode of 32": ("nvfp4", "nvfp4_weight_only"),
    "train": ("nvfp4_train", "mxfp8", "float8_rowwise"),
}
# No named recipe quantises attention.
WITH_ATTENTION = named("mxfp8").replace(name="mxfp8, attention", attention_a="mxfp8", attention_b="mxfp8")
# What no mode has above.
OTHERS = tuple(map(named, ("nvfp4_one_level", "nvfp4_rowwise", "mxfp4", "mxfp8_32x32")))
ONE_LAYER = {"num_hidden_layers": 1, "vocab_size": 256, "use_cache": False}


@dataclass(frozen=True)
class Family:
    """make: the model, of one layer. inputs: the arguments of its forward, for so many tokens.

    recipes: in the place of the `RECIPES` of each mode. autocast: weights in float32, products in bf16.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, torch.Tensor]]
    modes: tuple[str, ...] = USUAL
    recipes: tuple[Recipe, ...] = ()
    autocast: bool = False

    def recipes_of(self, mode: str) -> tuple[Recipe, ...]:
        return self.recipes or tuple(map(named, RECIPES[mode]))


def reader(
    name: str, *, modes: tuple[str, ...] = USUAL, length: int = 2048, block: bool = False,
    recipes: tuple[Recipe, ...] = (), autocast: bool = False, implementation: dict[str, str] | None = None,
    **sizes: Any,
) -> Family:  # fmt: skip
    """A model that reads texts of `length` tokens.

    name: of its architecture. block: whether the model is given embeddings, as a block is that is compiled by itself;
    otherwise it has the embedding, and no tensor between its layers is a graph's input. implementation: of "experts" or
    "attention", in the place of the architecture's.
    """
    architecture = replace(ARCHITECTURES[name], **(implementation or {}))

    def make() -> nn.Module:
        return architecture.made(architecture.body, **(ONE_LAYER | sizes))

    def inputs(tokens: int) -> dict[str, torch.Tensor]:
        texts = max(1, tokens // length) if tokens > 32 else tokens
        if block:
            return {"inputs_embeds": torch.zeros(texts, tokens // texts, sizes["hidden_size"], dtype=torch.bfloat16)}
        return {"input_ids": torch.zeros(texts, tokens // texts, dtype=torch.long)}

    return Family(make, inputs, modes, recipes, autocast)


class DiT(nn.Module):
    """A block of a diffusion transformer: norms without weights, scaled, shifted and gated by a condition."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Linear(hidden, 6 * hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        y = self._norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate * self.out(y)
        y = self._norm(x) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.down(F.gelu(self.up(y), approximate="tanh"))

    @staticmethod
    def _norm(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def vit() -> nn.Module:
    architecture = ARCHITECTURES["ViT"]
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 16}
    return architecture.made(architecture.body, **sizes)


def images(tokens: int) -> dict[str, torch.Tensor]:
    """Of 197 tokens each, as a ViT-L/16 has them."""
    return {"pixel_values": torch.zeros(tokens // 197, 3, 224, 224, dtype=torch.bfloat16)}


def latents(tokens: int) -> dict[str, torch.Tensor]:
    """Of 256 tokens each, as a DiT-XL/2 has them of 256 x 256 pixels."""
    x = torch.zeros(tokens // 256, 256, 1152, dtype=torch.bfloat16)
    return {"x": x, "condition": x[:, 0]}


LLAMA = LLAMA_3_8B | ONE_LAYER
QWEN = QWEN3_30B_A3B | ONE_LAYER
FAMILIES = {
    "Llama-3-8B": reader("Llama", modes=tuple(MODES), **LLAMA),
    "Llama-3-8B, a block": reader("Llama", modes=ONCE, block=True, **LLAMA),
    "Llama-3-8B, attention": reader("Llama", modes=ONCE, recipes=(WITH_ATTENTION,),
                                    implementation={"attention": "eager"}, **LLAMA),
    "Llama-3-8B, autocast": reader("Llama", modes=ONCE, autocast=True, **LLAMA),
    "Llama-3-8B, other recipes": reader("Llama", recipes=OTHERS, **LLAMA),
    "Llama-3-405B": reader("Llama", modes=("forward",), hidden_size=16384, intermediate_size=53248,
                           num_attention_heads=128, num_key_value_heads=8),
    "Phi-3-mini": reader("Phi-3", hidden_size=3072, intermediate_size=8192, num_attention_heads=32,
                         num_key_value_heads=32, pad_token_id=0, eos_token_id=0),
    "Gemma-3-12B": reader("Gemma 3", hidden_size=3840, intermediate_size=15360, num_attention_heads=16,
                          num_key_value_heads=8, head_dim=256, pad_token_id=0, eos_token_id=0, bos_token_id=0),
    "Qwen3-30B-A3B": reader("Qwen3-MoE", modes=tuple(MODES), **QWEN),
    "Qwen3-30B-A3B, a block": reader("Qwen3-MoE", modes=ONCE, block=True, **QWEN),
    "Qwen3-30B-A3B, by index": reader("Qwen3-MoE", modes=("decode",), implementation={"experts": "batched_mm"}, **QWEN),
    "Mixtral-8x7B": reader("Mixtral", hidden_size=4096, intermediate_size=14336,
                           num_attention_heads=32, num_key_value_heads=8),
    "DeepSeek-V3": reader("DeepSeek-V3", hidden_size=7168, moe_intermediate_size=2048,
                          n_routed_experts=256, num_attention_heads=128, num_key_value_heads=128,
                          first_k_dense_replace=0),
    "gpt-oss-20b": reader("gpt-oss", pad_token_id=0, eos_token_id=0,
                          hidden_size=2880, intermediate_size=2880, num_attention_heads=64, num_key_value_heads=8,
                          head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    "BERT-large": reader("BERT", modes=ONCE, length=512, hidden_size=1024, intermediate_size=4096,
                         num_attention_heads=16),
    "GPT-2-XL": reader("GPT-2", modes=ONCE, length=1024, n_layer=1, n_embd=1600, n_head=25, bos_token_id=0,
                       eos_token_id=0),
    "ViT-L/16": Family(vit, images, ONCE),
    "DiT-XL/2": Family(lambda: DiT(1152, 16), latents, ONCE),
}  # fmt: skip


def on_meta(family: Family, train: bool) -> nn.Module:
    """The family's model on the meta device: in bf16, or in float32 if autocast casts."""
    with torch.device("meta"):
        model = family.make().train(train)
        return model if family.autocast else model.bfloat16()


def to_fake(model: nn.Module) -> nn.Module:
    """A model on the meta device, with tensors of the CPU that a surrounding FakeTensorMode makes, and no dropout."""
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                module._parameters[name] = nn.Parameter(_like(tensor))
        for name, tensor in module._buffers.items():
            if tensor is not None:
                module._buffers[name] = _like(tensor)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
