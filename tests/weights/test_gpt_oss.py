"""gpt-oss as it was published, its experts in MXFP4: loaded as they are, with the logits of the dequantised weights."""

import json

import pytest
import torch
from safetensors.torch import save_file

import fp4compile
from fp4compile.formats.grouping import Grouping
from fp4compile.weights.experts import PackedExperts
from tests.helpers.checkpoints import bits, tensors_of
from tests.helpers.rewritten import rewritten

transformers = pytest.importorskip("transformers")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")

pytestmark = pytest.mark.slow
CONFIG = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "num_local_experts": 4,
          "num_experts_per_tok": 2, "initializer_range": 0.2}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts."
WEIGHTS = {EXPERTS + "gate_up_proj": (192, 64), EXPERTS + "down_proj": (64, 96)}  # (out, in)
TOKENS = torch.arange(18).view(2, 9)
MX = {"fprop_x": "mxfp8", "fprop_w": "mxfp4", "min_m": 1}


def model_of(**config):
    torch.manual_seed(0)
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG, **config)).bfloat16().eval()


def published():
    """The tensors of a checkpoint: every code, and scales from 2^-9 to 2^-3 (and of one block, 0)."""
    generator = torch.Generator().manual_seed(1)
    tensors = {name: value for name, value in model_of().state_dict().items() if name not in WEIGHTS}
    tensors |= {name: torch.randn(value.shape, generator=generator).to(value) for name, value in tensors.items()
                if name.endswith("_bias")}  # fmt: skip
    for name, (outer, inner) in WEIGHTS.items():
        shape = (4, outer, inner // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 125, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"][0, 0, 0] = 0
    return tensors


def write(tensors, folder):
    """Two files and an index, as large models are published."""
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def dequantised(tensors):
    """The model with the weights that transformers makes of the blocks."""
    state = {name: value for name, value in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in WEIGHTS:
        state[name] = mxfp4.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
    model = model_of()
    model.load_state_dict(state)
    return model


def logits(model, recipe=None):
    torch._dynamo.reset()
    run, decisions = (model, []) if recipe is None else rewritten(lambda **inputs: model(**inputs), recipe)
    with torch.no_grad():
        found = run(input_ids=TOKENS, use_cache=False).logits
    return found, [d for d in decisions if d.gemm.groups is not Grouping.DENSE]


@pytest.mark.parametrize("activation", ["mxfp8", None])
def test_the_experts_are_those_of_the_checkpoint(activation, tmp_path):
    tensors, recipe = published(), MX | {"fprop_x": activation}
    expected, model = dequantised(tensors), model_of()
    fp4compile.load_packed(model, write(tensors, tmp_path), recipe=None if activation is None else recipe)
    for name in WEIGHTS:
        experts, weight = model.get_submodule(EXPERTS[:-1]), name.removeprefix(EXPERTS)
        assert torch.equal(getattr(experts, weight), expected.get_parameter(name))
        packed = experts.get_submodule(f"{weight}_packed")
        assert isinstance(packed, PackedExperts) and packed.layer_format.activation == activation
        assert torch.equal(packed.weight_data.flatten(), tensors[f"{name}_blocks"].flatten())
    assert torch.equal(logits(model)[0], logits(expected)[0])
    if activation is not None:
        found, decisions = logits(model, recipe)
        assert len(decisions) == 2 and not any(d.reason for d in decisions)
        assert torch.equal(found, logits(expected, recipe)[0])


def test_a_single_file_ties_and_files_of_our_own(tmp_path):
    """A file, a folder with one, a tensor that is another one of the model too; and what `save_packed` makes of it."""
    tensors = published()
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    models = []
    for path in (tmp_path / "model.safetensors", tmp_path):
        models.append(model_of(tie_word_embeddings=True))
        fp4compile.load_packed(models[-1], path)
        assert models[-1].lm_head.weight is models[-1].get_input_embeddings().weight
        assert torch.equal(models[-1].lm_head.weight, tensors["model.embed_tokens.weight"])
    fp4compile.save_packed(models[0], tmp_path / "ours.safetensors")
    models.append(model_of(tie_word_embeddings=True))
    fp4compile.load_packed(models[-1], tmp_path / "ours.safetensors")
    first, *others = (logits(model)[0] for model in models)
    assert all(torch.equal(first, other) for other in others)
    with pytest.raises(ValueError, match="recipe: a file of save_packed says itself"):
        fp4compile.load_packed(model_of(), tmp_path / "ours.safetensors", recipe="mxfp8")


def test_what_was_published_is_written_again_bit_for_bit(tmp_path):
    tensors, model = published(), model_of()
    (tmp_path / "published").mkdir()
    fp4compile.load_packed(model, write(tensors, tmp_path / "published"))
    fp4compile.export_packed(model, tmp_path / "again", "mxfp4")
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    layers = [f"model.layers.0.{name}" for name in ("mlp.router", *(f"self_attn.{x}_proj" for x in "koqv"))]
    assert config["quantization_config"] == {
        "quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.embed_tokens", *layers]
    }  # fmt: skip
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    for name, parameter in read.named_parameters():
        module, _, child = name.rpartition(".")
        assert torch.equal(parameter, getattr(model.get_submodule(module), child)), name


def test_models_that_the_layout_does_not_hold(tmp_path):
    experts = {"min_n": 1, "min_k": 1, "rules": [("*attn*", "skip")]}
    for recipe, width, wrong in (
        (experts | {"fprop_w": "mxfp4", "rules": []}, 96, "q_proj"),
        (experts | {"fprop_w": "mxfp8"}, 96, "gate_up_proj"),
        (experts | {"fprop_w": "mxfp4"}, 80, "down_proj"),
    ):
        config = transformers.GptOssConfig(**CONFIG | {"intermediate_size": width})
        model = transformers.GptOssForCausalLM(config)
        fp4compile.pack_(model, recipe)
        with pytest.raises(ValueError, match=f"layout 'mxfp4' holds experts .*; got 'model.layers.0.*{wrong}"):
            fp4compile.export_packed(model, tmp_path / "no", "mxfp4")


def test_recipes_and_folders_that_do_not_fit(tmp_path):
    write(published(), tmp_path)
    part = tmp_path / "model-2.safetensors"
    for recipe in ("nvfp4", MX | {"fprop_x": "mxfp8_32x32"}):
        with pytest.raises(ValueError, match="recipe: its activations in .* cannot be multiplied"):
            fp4compile.load_packed(model_of(), tmp_path, recipe=recipe)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="expected .* or one other .* file, got 2"):
        fp4compile.load_packed(model_of(), tmp_path)
    part.unlink()
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="was not written by fp4compile.save_packed"):
        fp4compile.load_packed(model_of(), tmp_path)
