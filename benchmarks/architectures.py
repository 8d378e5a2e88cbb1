"""Model families: their classes, and a small model of each with random weights, which `benchmarks.zoo` runs.

`benchmarks.families` has the real widths of some of them, for what is compiled without being run. A family is an entry
of `ARCHITECTURES`; those of diffusers and timm are only there where that package is installed.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, TEXTS = 256, 32, 2
IMAGE = 32  # pixels a side
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """A family of models.

    model: the name of a class of the package. small: its arguments, or its configuration's. batch: makes the arguments
    of its forward. config: the name of the class of its configuration; "" where it has none. experts: how transformers
    multiplies by experts. attention: how transformers computes attention.
    """

    model: str
    batch: Callable[[], Batch]
    small: dict[str, Any]
    config: str = ""
    package: str = "transformers"
    experts: str = ""
    attention: str = "sdpa"

    def missing(self) -> str | None:
        """The package that is not installed, if one is not."""
        name = self.package.partition(".")[0]
        return None if find_spec(name) else name

    @property
    def generates(self) -> bool:
        return self.model.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))

    @property
    def body(self) -> str:
        """The class of the model without a head, of transformers."""
        return f"{self.config.removesuffix('Config')}Model"

    def made(self, model: str = "", **sizes: Any) -> nn.Module:
        """A model with random weights. model: the name of another class with the same configuration."""
        package = importlib.import_module(self.package)
        if not self.config:
            return getattr(package, self.model)(**sizes)
        options = {} if self.attention == "sdpa" else {"attn_implementation": self.attention}
        made = getattr(package, model or self.model)(getattr(package, self.config)(**sizes, **options))
        if self.experts:
            made.set_experts_implementation(self.experts)
        return made


# ---------------------------------------------------------------- what models are given


def tokens(length: int = LENGTH, lowest: int = 8) -> torch.Tensor:
    return torch.randint(lowest, VOCABULARY, (TEXTS, length))


def texts() -> Batch:
    return {"input_ids": tokens()}


def pairs_of_texts() -> Batch:
    return {"input_ids": tokens(), "decoder_input_ids": tokens()}


def pictures() -> Batch:
    return {"pixel_values": torch.randn(TEXTS, 3, IMAGE, IMAGE)}


def captions() -> Batch:
    return texts() | pictures()


def text_with_pictures() -> Batch:
    """Token 3 stands for each of the picture's 16 patches."""
    return {"input_ids": torch.cat((torch.full((TEXTS, 16), 3), tokens(16)), 1)} | pictures()


def speech() -> Batch:
    return {"input_features": torch.randn(TEXTS, 16, 48), "decoder_input_ids": tokens()}


def latents() -> Batch:
    return {"hidden_states": torch.randn(TEXTS, 4, 16, 16), "timestep": torch.tensor([3, 7])}


def latents_of_classes() -> Batch:
    return latents() | {"class_labels": torch.tensor([1, 2])}


def latents_of_texts() -> Batch:
    return latents() | {
        "encoder_hidden_states": torch.randn(TEXTS, 16, 64),
        "pooled_projections": torch.randn(TEXTS, 64),
    }


def patches_of_texts() -> Batch:
    return {
        "hidden_states": torch.randn(TEXTS, 64, 16), "timestep": torch.tensor([0.3, 0.7]),
        "encoder_hidden_states": torch.randn(TEXTS, 16, 64), "pooled_projections": torch.randn(TEXTS, 64),
        "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(16, 3),
    }  # fmt: skip


def noise_of_texts() -> Batch:
    return {"sample": torch.randn(TEXTS, 4, 16, 16), "timestep": torch.tensor([3, 7]),
            "encoder_hidden_states": torch.randn(TEXTS, 16, 64)}  # fmt: skip


def images() -> Batch:
    return {"x": torch.randn(TEXTS, 3, IMAGE, IMAGE)}


# ---------------------------------------------------------------- the families

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LAYERS = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
READER = {"vocab_size": VOCABULARY, **LAYERS, **IDS}
DECODER = READER | {"num_key_value_heads": 2}
VIEWER = LAYERS | {"image_size": IMAGE, "patch_size": 8}
BOTH_SIDES = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
              "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 160,
              "decoder_ffn_dim": 160, **IDS}  # fmt: skip
MANY_EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}


def reading(kind: str, small: dict[str, Any], head: str = "ForCausalLM", batch: Callable[[], Batch] = texts,
            **options: Any) -> Architecture:  # fmt: skip
    """A family of transformers, whose configuration is `kind`Config."""
    return Architecture(f"{kind}{head}", batch, small, f"{kind}Config", **options)


def drawing(model: str, batch: Callable[[], Batch], **small: Any) -> Architecture:
    return Architecture(model, batch, small, package="diffusers")


def classifying(model: str, **small: Any) -> Architecture:
    return Architecture(model, images, small, package="timm.models")


ARCHITECTURES = {
    # Decoders
    "Llama": reading("Llama", DECODER),
    "Mistral": reading("Mistral", DECODER | {"sliding_window": 16}),
    "Qwen2": reading("Qwen2", DECODER),
    "Qwen3": reading("Qwen3", DECODER | {"head_dim": 16}),
    "Gemma 2": reading("Gemma2", DECODER | {"head_dim": 16, "sliding_window": 16}),
    "Gemma 3": Architecture("Gemma3ForCausalLM", texts, DECODER | {"head_dim": 16, "sliding_window": 16},
                            "Gemma3TextConfig"),
    "Phi-3": reading("Phi3", DECODER),
    "GPT-2": reading("GPT2", {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, **IDS},
                     "LMHeadModel"),
    "GPT-NeoX": reading("GPTNeoX", READER),
    "OPT": reading("OPT", READER | {"ffn_dim": 160, "word_embed_proj_dim": 64, "max_position_embeddings": 128}),
    "Falcon": reading("Falcon", READER),
    # Experts
    "Qwen3-MoE": reading("Qwen3Moe", DECODER | MANY_EXPERTS | {"head_dim": 16, "num_experts": 8}, experts="grouped_mm"),
    "Mixtral": reading("Mixtral", DECODER | {"num_local_experts": 4}, experts="grouped_mm"),
    "DeepSeek-V3": reading("DeepseekV3", READER | MANY_EXPERTS | {
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1}, experts="grouped_mm"),
    "gpt-oss": reading("GptOss", DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
                       experts="grouped_mm", attention="eager"),
    # State spaces
    "Mamba": reading("Mamba", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16,
                               **IDS}),
    "Mamba 2": reading("Mamba2", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2,
                                  "state_size": 16, "head_dim": 16, "num_heads": 8, "n_groups": 1, "chunk_size": 16,
                                  **IDS}),
    "Jamba": reading("Jamba", DECODER | {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8}, experts="grouped_mm"),
    # Encoders, and encoders with decoders
    "BERT": reading("Bert", READER, "ForMaskedLM"),
    "RoBERTa": reading("Roberta", READER, "ForSequenceClassification"),
    "ModernBERT": reading("ModernBert", READER | {"local_attention": 16, "cls_token_id": 1, "sep_token_id": 2},
                          "ForMaskedLM"),
    "T5": reading("T5", {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 2,
                         "num_heads": 4, "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0},
                  "ForConditionalGeneration", pairs_of_texts),
    "BART": reading("Bart", BOTH_SIDES | {"max_position_embeddings": 128}, "ForConditionalGeneration", pairs_of_texts),
    "Whisper": reading("Whisper", BOTH_SIDES | {
        "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 64, "decoder_start_token_id": 3,
        "suppress_tokens": None, "begin_suppress_tokens": None}, "ForConditionalGeneration", speech),
    # Pictures
    "ViT": reading("ViT", VIEWER, "ForImageClassification", pictures),
    "DINOv2": reading("Dinov2", {name: size for name, size in VIEWER.items() if name != "intermediate_size"},
                      "ForImageClassification", pictures),
    "CLIP": reading("CLIP", {"text_config": READER | {"max_position_embeddings": LENGTH}, "vision_config": VIEWER,
                             "projection_dim": 64}, "Model", captions),
    "SigLIP": reading("Siglip", {"text_config": READER | {"max_position_embeddings": LENGTH, "projection_size": 64},
                                 "vision_config": VIEWER}, "Model", captions),
    "Llava": reading("Llava", {
        "text_config": DECODER | {"model_type": "llama"}, "image_token_id": 3, "vision_feature_layer": -1,
        "vision_config": VIEWER | {"model_type": "clip_vision_model", "projection_dim": 64}},
        "ForConditionalGeneration", text_with_pictures),
    "DiT": drawing("DiTTransformer2DModel", latents_of_classes, **HEADS, in_channels=4, out_channels=8, num_layers=2,
                   sample_size=16, patch_size=2, num_embeds_ada_norm=10),
    "Flux": drawing("FluxTransformer2DModel", patches_of_texts, **HEADS, in_channels=16, num_layers=1,
                    num_single_layers=1, joint_attention_dim=64, pooled_projection_dim=64, axes_dims_rope=(4, 4, 8)),
    "Stable Diffusion 3": drawing("SD3Transformer2DModel", latents_of_texts, **HEADS, sample_size=16, patch_size=2,
                                  in_channels=4, out_channels=4, num_layers=2, joint_attention_dim=64,
                                  caption_projection_dim=64, pooled_projection_dim=64, pos_embed_max_size=16),
    "Stable Diffusion UNet": drawing(
        "UNet2DConditionModel", noise_of_texts, sample_size=16, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=64, attention_head_dim=8, norm_num_groups=8),
    "Swin": classifying("SwinTransformer", img_size=IMAGE, embed_dim=32, depths=(2, 2), num_heads=(2, 4),
                        window_size=4, num_classes=16),
    "MLP-Mixer": classifying("MlpMixer", img_size=IMAGE, patch_size=8, num_blocks=2, embed_dim=64, num_classes=0),
}  # fmt: skip
