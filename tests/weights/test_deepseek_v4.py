"""DeepSeek-V4's checkpoints: FP8 in blocks and experts in FP4, whose scales are named `.scale`, written by hand."""

import json
import re

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

import fp4compile
from fp4compile.cli.explain_command import _formats_of
from fp4compile.weights.buffers import packed_modules
from tests.helpers.old_transformers import from_pretrained_loads, installed

pytestmark = pytest.mark.skipif(installed < Version("5.8.0"), reason="transformers 5.7.0 has no DeepSeek-V4")
reads_experts = pytest.mark.skipif(
    installed <= Version("5.10.0"),
    reason="transformers 5.8.1, 5.9.0 and 5.10.0 were tried and do not read w1, w2 and w3 of DeepSeek-V4's experts",
)
SIZES = {"vocab_size": 32, "hidden_size": 128, "moe_intermediate_size": 128, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 128, "q_lora_rank": 128, "num_experts_per_tok": 2, "n_routed_experts": 3,
         "o_groups": 2, "o_lora_rank": 128, "index_n_heads": 2, "index_head_dim": 64, "index_topk": 4, "hc_mult": 2,
         "sliding_window": 8, "num_hidden_layers": 2, "compress_ratios": [0, 4], "num_hash_layers": 1}  # fmt: skip
# Names in the model, and in DeepSeek's files, which have no `model.` before them.
NAMES = [("model.", ""), ("embed_tokens.", "embed."), ("lm_head.", "head."), (".self_attn.", ".attn."),
         (".mlp.", ".ffn."), ("hc_head.hc_", "hc_head_"), (r"(attn|ffn)_hc\.", r"hc_\1_"), (".sinks", ".attn_sink"),
         (".compressor.indexer.scorer.weights_proj", ".indexer.weights_proj"),
         (".compressor.indexer.q_b_proj", ".indexer.wq_b"), (".compressor.indexer.", ".indexer.compressor."),
         ("position_bias", "ape"), ("(compressor.)kv_norm", r"\1norm"), ("q_a_norm", "q_norm"), ("q_a_proj", "wq_a"),
         ("q_b_proj", "wq_b"), ("o_a_proj", "wo_a"), ("o_b_proj", "wo_b"), ("kv_proj", "wkv"),
         ("(compressor.)gate_proj", r"\1wgate"), ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"),
         ("gate.e_score_correction_bias", "gate.bias"), ("input_layernorm", "attn_norm"),
         ("post_attention_layernorm", "ffn_norm")]  # fmt: skip
FP8 = r"self_attn\.(q_a|q_b|kv|o_a|o_b)_proj\.weight|indexer\.q_b_proj|shared_experts"
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
MXFP4 = "mxfp4", "mxfp8"
BY_BLOCK = {128: ("e4m3:128x128:float32:-:te_pow2", "e4m3:1x128:float32:-:te_pow2"), 32: ("mxfp8_32x32", "mxfp8")}


def fresh_model():
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**SIZES)
    return transformers.DeepseekV4ForCausalLM(config).eval()


def in_file(name):
    for pattern, own in NAMES:
        name = re.sub(pattern if "(" in pattern else re.escape(pattern), own, name)
    return name


def float8(shape, scales, block=128):
    """Random codes and scales of blocks, and what they mean."""
    codes = (torch.randn(shape) * 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(-11, -8, (shape[0] // block, shape[1] // block)).float().exp2()
    meaning = codes.float() * exponents.repeat_interleave(block, 0).repeat_interleave(block, 1)
    return {"weight": codes, "scale": exponents.to(scales)}, meaning


def float4(shape, scales, block=32):
    """Random pairs of codes, the first of them in the low bits, and scales of 32 elements of a row; their meaning."""
    codes = torch.randint(0, 16, shape)
    exponents = torch.randint(-7, -3, (shape[0], shape[1] // 32)).float().exp2()
    meaning = torch.tensor(FP4)[codes] * exponents.repeat_interleave(32, 1)
    pairs = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return {"weight": pairs, "scale": exponents.to(scales)}, meaning


def written(folder, expert_dtype="fp4", scales=torch.float8_e8m0fnu, block=128):
    """Write a checkpoint; returns the model with the weights that it means. block: of FP8 weights."""
    model, tensors = fresh_model(), {"mtp.0.ffn.experts.0.w1.scale": torch.ones(2, 2)}
    experts = {"fp4": float4, "fp8": float8}[expert_dtype]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if re.search(r"\.experts\.", name):
                leaves = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
                for expert, whole in enumerate(tensor):
                    for leaf, part in zip(leaves, whole.chunk(len(leaves)), strict=True):
                        found, meaning = experts(part.shape, scales, block)
                        part.copy_(meaning)
                        prefix = in_file(name.rpartition(".")[0])
                        tensors |= {f"{prefix}.{expert}.{leaf}.{child}": one for child, one in found.items()}
            elif re.search(FP8, name):
                found, meaning = float8(tensor.shape, scales, block)
                tensor.copy_(meaning)
                tensors |= {f"{in_file(name.removesuffix('.weight'))}.{child}": one for child, one in found.items()}
            else:
                tensors[in_file(name)] = tensor
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], **SIZES}
    config |= {"expert_dtype": expert_dtype, "dtype": "float32"}
    config |= {"quantization_config": CONFIG | {"weight_block_size": [block, block]}}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def by_load_packed(folder):
    model = fresh_model()
    fp4compile.load_packed(model, folder)
    return model


def by_from_pretrained(folder):
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config={"quant_method": "fp4compile"}, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    return model


def logits(model):
    with torch.no_grad():
        return model(torch.arange(16).view(2, 8)).logits


@reads_experts
@pytest.mark.parametrize("load", [by_load_packed, by_from_pretrained])
@pytest.mark.parametrize(
    ("expert_dtype", "scales", "block"),
    [("fp4", torch.float8_e8m0fnu, 128), ("fp8", torch.float32, 128), ("fp4", torch.float8_e8m0fnu, 32),
     ("fp8", torch.float8_e8m0fnu, 32)],
    ids=["Flash", "Flash-Base", "V4.1's blocks", "V4.1's blocks of experts"],
)  # fmt: skip
def test_layers_are_packed_with_the_weights_that_the_file_means(expert_dtype, scales, block, load, tmp_path):
    """But for the product by groups, o_a_proj, for which a packed layer has no forward."""
    expected = written(tmp_path / "made", expert_dtype, scales, block)
    with pytest.warns(UserWarning) as said:
        model = load(tmp_path / "made")
    texts = [str(one.message) for one in said]
    assert sum("DeepseekV4GroupedLinear, which computes in its own way" in text for text in texts) == 1
    assert sum("'mtp.0.ffn.experts.0.w1.scale', are not used" in text for text in texts) == 1
    packed = {name: one.layer_format for name, one in packed_modules(model).items()}
    assert len(packed) == 2 * (4 + 3 + 2) + 1
    for name, found in packed.items():
        experts = "_proj_packed" in name and expert_dtype == "fp4"
        assert (found.weight, found.activation) == (MXFP4 if experts else BY_BLOCK[block]), name
    assert logits(model).isfinite().all()
    plain = model.dequantize()
    found, wanted = plain.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name, one in wanted.items() if not torch.equal(found[name], one)] == []
    assert torch.equal(logits(plain), logits(expected))


@from_pretrained_loads
@pytest.mark.parametrize("block", [128, 32])
def test_transformers_dequantises_the_file_to_the_same_weights(block, tmp_path):
    written(tmp_path / "made", block=block)
    order = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made", quantization_config=order)
    with pytest.warns(UserWarning, match="in its own way"):
        ours = by_from_pretrained(tmp_path / "made").dequantize()
    found, wanted = ours.state_dict(), theirs.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name, one in wanted.items() if not torch.equal(found[name], one)] == []


@reads_experts
def test_what_was_read_is_saved_and_read_again(tmp_path):
    written(tmp_path / "made")
    with pytest.warns(UserWarning, match="in its own way"):
        model = by_from_pretrained(tmp_path / "made")
    model.save_pretrained(tmp_path / "saved")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), logits(model))


@reads_experts
@pytest.mark.parametrize("method", ["fp8", "mxfp8"])
def test_experts_may_be_nvfp4(tmp_path, method):
    """As NVIDIA publishes them: ModelOpt's own file names the experts alone. "mxfp8" names its other layers so, too."""
    written(tmp_path / "made", block=32 if method == "fp8" else 128)
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    experts = [name.removesuffix(".scale") for name in tensors if re.search(r"^layers.*\.experts\..*\.scale$", name)]
    for layer in experts:
        tensors[f"{layer}.weight"] = tensors[f"{layer}.weight"].view(torch.uint8)
        scales = tensors.pop(f"{layer}.scale").float().repeat_interleave(2, 1).mul(64)  # exact in E4M3
        tensors[f"{layer}.weight_scale"] = scales.to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.weight_scale_2": torch.tensor(1 / 64), f"{layer}.input_scale": torch.ones(())}
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": method, "moe_quant_algo": "NVFP4", "group_size": 16}
    if method == "mxfp8":  # one scale for 32 elements
        config["quantization_config"]["weight_block_size"] = [1, 32]
        for name in [name for name in tensors if name.endswith(".scale") and name.startswith("layers")]:
            tensors[name] = tensors[name].view(torch.uint8).repeat_interleave(128, 0).repeat_interleave(4, 1)
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    own = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {layer: {"quant_algo": "NVFP4"} for layer in experts}}
    (tmp_path / "made" / "hf_quant_config.json").write_text(json.dumps({"quantization": own}))
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    assert "nvfp4 weights, nvfp4 activations with a static scale" in _formats_of(tmp_path / "made")
    with pytest.warns(UserWarning):
        model = by_load_packed(tmp_path / "made")
    written(tmp_path / "plain", block=32 if method == "fp8" else 128)
    with pytest.warns(UserWarning):
        expected = by_load_packed(tmp_path / "plain")
    packed, wanted = packed_modules(model), packed_modules(expected)
    found = {(one.layer_format.weight, one.layer_format.activation_outer) for one in packed.values()}
    assert found == {("nvfp4", 1.0), ("mxfp8_32x32" if method == "fp8" else "mxfp8", None)}
    assert all(torch.equal(one.read(), wanted[name].read()) for name, one in packed.items())


def smaller(tensors):
    tensors["layers.0.attn.wo_a.weight"] = torch.zeros(128, 128).to(torch.float8_e4m3fn)
    tensors["layers.0.attn.wo_a.scale"] = torch.ones(1, 1)


def unknown(layer):
    return lambda tensors: tensors.update({f"layers.0.attn.{layer}.pre_quant_scale": torch.ones(128)})


REFUSED = {
    "another shape": (smaller, r"o_a_proj': the file has a weight of shape \(128, 128\)"),
    "an unknown tensor": (unknown("wo_a"), "the model has no '.*wo_a.pre_quant_scale'"),
    "an unknown tensor of a packed layer": (unknown("wo_b"), "the model has no '.*wo_b.pre_quant_scale'"),
}


def old_versions(name, load):
    """Where the experts are not read, `load_packed` names their tensors before those that are unknown."""
    if load is by_from_pretrained:
        return from_pretrained_loads
    return reads_experts if "unknown" in name else ()


@pytest.mark.parametrize(("change", "message", "load"), [
    pytest.param(*refused, load, id=f"{name}-{load.__name__}", marks=old_versions(name, load))
    for name, refused in REFUSED.items() for load in (by_load_packed, by_from_pretrained)
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_that_do_not_fit_are_refused(change, message, load, tmp_path):
    written(tmp_path / "made")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "made")


def test_codes_of_fp4_need_a_configuration_that_names_them(tmp_path):
    written(tmp_path / "made")
    file = tmp_path / "made" / "config.json"
    assert _formats_of(tmp_path / "made") == [
        f"{weight} weights, {activation} activations" for weight, activation in (BY_BLOCK[128], MXFP4)
    ]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"expert_dtype": "fp8"}))
    with pytest.raises(ValueError, match=r"experts.0.w1.weight': expected torch.float8_e4m3fn .*, got torch.int8"):
        by_load_packed(tmp_path / "made")
