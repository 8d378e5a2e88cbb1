"""Experts that a checkpoint has in one tensor, as ModelOpt writes those of Llama 4; codes that no layout explains."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fp4compile
from tests.helpers.checkpoints import decoded

SIZES = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "intermediate_size_mlp": 32,
         "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 32,
         "num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 1, "moe_layers": [0]}  # fmt: skip
PLACES = {"llama4_text": "model.layers.0.feed_forward.experts", "qwen3_moe": "model.layers.0.mlp.experts",
          "gpt_oss": "model.layers.0.mlp.experts"}  # fmt: skip
IN_FIRST = ("llama4_text", "gpt_oss")


def fresh_model(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES), dtype=torch.bfloat16).eval()


def quantised(shape, algorithm, one_scale):
    """ModelOpt's tensors of experts [experts, out, in] by suffix, and what they mean."""
    count, rows, columns = shape
    outer = torch.rand(()) / 2688 if one_scale else torch.rand(count) / 2688
    each = outer.expand(count)
    if algorithm.startswith("FP8"):
        found = {"": torch.randn(shape).clamp(-448, 448).to(torch.float8_e4m3fn), "weight_scale": outer}
        return found, found[""].float() * each[:, None, None]
    codes = torch.randint(0, 256, (count, rows, columns // 2), dtype=torch.uint8)
    scales = torch.rand(count, rows, columns // 16).mul(448).to(torch.float8_e4m3fn)
    parts = zip(codes, scales, each, strict=True)
    meant = [decoded({"x.weight": c, "x.weight_scale": s, "x.weight_scale_2": o}, "x") for c, s, o in parts]
    return {"": codes, "weight_scale": scales, "weight_scale_2": outer}, torch.stack(meant)


def written(folder, kind, algorithm="NVFP4", one_scale=True, entry=None, **changes):
    """Write a model's experts as ModelOpt does; returns what they mean, by name. changes: by suffix, None: left out."""
    tensors, meant = dict(fresh_model(kind).state_dict()), {}
    for child in ("gate_up_proj", "down_proj"):
        name = f"{PLACES[kind]}.{child}"
        weight = tensors.pop(name)
        found, meaning = quantised((weight.mT if kind in IN_FIRST else weight).shape, algorithm, one_scale)
        found |= {"input_scale": torch.tensor(0.25) if one_scale else torch.tensor([0.125, 0.25, 0.0625])} | changes
        for suffix, tensor in found.items():
            if tensor is not None:
                turned = tensor.mT.contiguous() if kind in IN_FIRST and tensor.dim() == 3 else tensor.clone()
                tensors[f"{name}_{suffix}".removesuffix("_")] = turned
        meant[name] = meaning
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads(fresh_model(kind).config.to_json_string(use_diff=False))
    described = {"quant_algo": algorithm}
    if entry is not None:
        described = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {PLACES[kind] + entry: described}}
    config["quantization_config"] = described | {"quant_method": "modelopt"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def loaded(kind, folder):
    model = fresh_model(kind)
    fp4compile.load_packed(model, folder)
    return model


@pytest.mark.parametrize("one_scale", [True, False])
@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
@pytest.mark.parametrize("kind", PLACES)
def test_experts_in_one_tensor_are_read(tmp_path, kind, algorithm, one_scale, recwarn):
    meant = written(tmp_path / "made", kind, algorithm, one_scale)
    model = loaded(kind, tmp_path / "made")
    differ = "activation scales of the experts of a layer differ; the largest is used"
    assert any(differ in str(one.message) for one in recwarn) != one_scale
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    for name, meaning in meant.items():
        for one in (model, again):
            packed = one.get_submodule(f"{name}_packed")
            expected = meaning.mT if kind in IN_FIRST else meaning
            assert torch.equal(packed(), expected.bfloat16())
            assert packed.layer_format.activation_outer == 0.25
    tokens = torch.arange(16).view(2, 8)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, again(tokens).logits)


@pytest.mark.parametrize("entry", ["", ".gate_up_proj"])
def test_mixed_checkpoints_name_the_experts_module(tmp_path, entry):
    written(tmp_path / "made", "llama4_text", entry=entry)
    if entry:
        with pytest.raises(ValueError, match="experts.down_proj' is quantised, and quantized_layers does not tell"):
            loaded("llama4_text", tmp_path / "made")
    else:
        loaded("llama4_text", tmp_path / "made")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale_2": None}, "down_proj_weight_scale_2' is missing"),
        ({"weight_scale": torch.ones(3, 32)}, "expected experts of three dimensions and scales for each"),
        ({"": torch.zeros(0, 32, 16, dtype=torch.uint8)}, "expected experts of three dimensions"),
        ({"weight_scale_2": torch.full((2,), 1e-4)}, "down_proj.weight_scale_2': expected one float32"),
        ({"bias": torch.ones(3, 32, dtype=torch.uint8)}, "down_proj_bias' is torch.uint8: codes of a weight"),
    ],
)
def test_broken_experts_are_refused(tmp_path, changes, message):
    written(tmp_path / "made", "llama4_text", **changes)
    with pytest.raises(ValueError, match=message):
        loaded("llama4_text", tmp_path / "made")


def test_scales_of_activations_that_are_not_quantised_are_left(tmp_path):
    meant = written(tmp_path / "made", "qwen3_moe", "W4A16_NVFP4")
    with pytest.warns(UserWarning, match="^2 scales of activations, such as '.*down_proj_input_scale', are not used"):
        model = loaded("qwen3_moe", tmp_path / "made")
    for name, meaning in meant.items():
        assert torch.equal(model.get_submodule(f"{name}_packed")(), meaning.bfloat16())


@pytest.mark.parametrize("suffix", ["", "_packed"])
def test_codes_without_known_scales_are_refused(tmp_path, suffix):
    """transformers would cast them as they are, or leave them and make random weights."""
    meant = written(tmp_path / "made", "qwen3_moe", "FP8", weight_scale=None, input_scale=None)
    if suffix:
        tensors = dict(fresh_model("qwen3_moe").state_dict())
        codes = {f"{name}{suffix}": tensors.pop(name).to(torch.float8_e4m3fn) for name in meant}
        save_file(tensors | codes, tmp_path / "made" / "model.safetensors", {"format": "pt"})
    message = rf"down_proj{suffix}' is torch.float8_e4m3fn: codes of a weight in a layout that is not known"
    with pytest.raises(ValueError, match=message):
        loaded("qwen3_moe", tmp_path / "made")
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "made")
