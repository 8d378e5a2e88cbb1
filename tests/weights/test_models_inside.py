"""Transformers models inside other modules, and models that share a configuration, save and load with equal bits."""

import json
import logging
import re
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp4compile
from fp4compile.weights.linear import PackedLinear
from tests.helpers.tiny_llama import llama, llama_config

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(16).view(1, 16)


def bert(vocabulary):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96
    )
    return transformers.BertModel(config).eval()


def out(model):
    with torch.no_grad():
        return model(TOKENS)[0]


def test_models_of_one_configuration(tmp_path):
    """Packing one leaves the other's configuration, and a packed model has one in all its modules."""
    config = llama_config()
    plain, packed = llama(config), llama(config)
    fp4compile.pack_(packed, "nvfp4_weight_only")
    assert plain.config is config and not hasattr(config, "quantization_config")
    assert packed.config is packed.model.config is packed.model.layers[0].self_attn.config is not config
    for model, count in ((plain, 0), (packed, 7)):
        model.save_pretrained(tmp_path / str(count))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(count))
        assert sum(isinstance(module, PackedLinear) for module in again.modules()) == count
        assert torch.equal(out(again), out(model))
    own = packed.config
    given = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "7", config=own)
    assert torch.equal(out(given), out(packed)) and given.config is not own
    fp4compile.pack_(packed, "nvfp4")  # nothing is left to pack
    assert packed.config is own
    second = llama(packed.config)
    fp4compile.pack_(second, "mxfp8")
    assert packed.config is own and second.config is not own
    assert {state["weight"] for state in own.quantization_config.layers.values()} == {"nvfp4"}


def t5():
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=64, d_ff=96, num_layers=1, num_heads=2, d_kv=32, vocab_size=64)
    return transformers.T5ForConditionalGeneration(config).eval()


def whisper():
    torch.manual_seed(0)
    sizes = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in SIZES.items()}
    config = transformers.WhisperConfig(vocab_size=64, d_model=64, pad_token_id=0, **sizes)
    return transformers.WhisperForConditionalGeneration(config).eval()


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 96}
# A model of another class than the one that was saved, and the saved model's part that equals it.
OTHER_CLASSES = {
    "the base of a model": (llama, transformers.LlamaModel, lambda model: model, lambda model: model.model),
    "a model of a base": (
        lambda: llama().model, transformers.LlamaForCausalLM, lambda model: model.model, lambda model: model,
    ),
    "another head": (
        llama, transformers.LlamaForSequenceClassification, lambda model: model.model, lambda model: model.model,
    ),
    "a head with a packed layer": (
        lambda: transformers.BertForMaskedLM(bert(64).config).eval(), transformers.BertModel, lambda model: model,
        lambda model: model.bert,
    ),
    "another head than one with a packed layer": (
        lambda: transformers.BertForMaskedLM(bert(64).config).eval(), transformers.BertForTokenClassification,
        lambda model: model.bert, lambda model: model.bert,
    ),
    "a decoder without its encoder": (
        whisper, transformers.WhisperForCausalLM, lambda model: model.model.decoder, lambda model: model.model.decoder,
    ),
    "a part that the class leaves out": (
        t5, transformers.T5EncoderModel, lambda model: model, lambda model: model.encoder,
    ),
}  # fmt: skip


@pytest.mark.parametrize("made, kind, part, saved_part", OTHER_CLASSES.values(), ids=OTHER_CLASSES)
def test_models_of_other_classes(made, kind, part, saved_part, tmp_path):
    """As unpacked checkpoints, packed ones are read by classes with another head, without one, and with one."""
    model = made()
    fp4compile.pack_(model, "nvfp4_weight_only")
    model.save_pretrained(tmp_path)
    again = kind.from_pretrained(tmp_path)
    assert torch.equal(out(part(again)), out(saved_part(model)))
    packed = [type(module) for module in part(again).modules() if isinstance(module, PackedLinear)]
    assert packed and len(packed) == sum(isinstance(module, PackedLinear) for module in saved_part(model).modules())


def test_a_model_with_fewer_layers(tmp_path):
    """As of an unpacked checkpoint, transformers leaves the others; a class that has none of the layers is refused."""
    model = llama(llama_config(num_hidden_layers=2))
    fp4compile.pack_(model, "nvfp4_weight_only")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, num_hidden_layers=1)
    assert sum(isinstance(module, PackedLinear) for module in again.modules()) == 7
    made = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    model.model.layers = model.model.layers[:1]
    assert torch.equal(out(again), out(model))
    (tmp_path / "config.json").write_text(json.dumps(bert(64).config.to_dict() | {"quantization_config": made}))
    with pytest.raises(ValueError, match="the model has no layer 'model.layers.0"):
        transformers.BertModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("layout, recipe", [("compressed-tensors", "mxfp8"), ("fp8", "float8_block")])
def test_published_checkpoints_of_other_classes(layout, recipe, tmp_path, caplog):
    """They are read like those that save_pretrained writes, and transformers reports no layer that was read."""
    model = llama(llama_config(num_hidden_layers=2))
    fp4compile.pack_(model, fp4compile.Recipe.from_dict({"recipe": recipe, "skip_lm_head": False}))
    fp4compile.export_packed(model, tmp_path / "whole", layout)
    fp4compile.export_packed(model.model, tmp_path / "base", layout)
    order = {"quant_method": "fp4compile"}
    with propagated("transformers"), caplog.at_level("WARNING"):
        base = transformers.LlamaModel.from_pretrained(tmp_path / "whole", quantization_config=order)
        whole = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=order)
        other = transformers.LlamaForSequenceClassification.from_pretrained(
            tmp_path / "whole", quantization_config=order
        )
    assert all(torch.equal(out(one), out(model.model)) for one in (base, whole.model, other.model))
    assert "lm_head.weight" in caplog.text and "layers" not in caplog.text
    small = type(model).from_pretrained(tmp_path / "whole", quantization_config=order, num_hidden_layers=1)
    model.model.layers = model.model.layers[:1]
    assert torch.equal(out(small), out(model))


def mixtral():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.parametrize("published", [False, True])
def test_packed_weights_under_another_name_are_not_left_out(published, tmp_path):
    """Some parameter of the block would be random then; where the class just lacks a part, none is."""
    model, order = mixtral(), {}
    fp4compile.pack_(model, "mxfp8")
    if published:
        order = {"quantization_config": {"quant_method": "fp4compile"}}
        fp4compile.export_packed(model, tmp_path, "compressed-tensors")
    else:
        model.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, text = load_file(file), config.read_text()

    def changed(change):
        """The model of the checkpoint with other names of the experts of layer 1, or with more experts there."""
        save_file({name: one.clone() for name, one in change(tensors).items()}, file, {"format": "pt"})
        made = json.loads(text)
        made["quantization_config"]["experts"] = change(made["quantization_config"].get("experts", {}))
        config.write_text(json.dumps(made))
        return type(model).from_pretrained(tmp_path, **order)

    def moved(holder):
        return {re.sub(r"layers\.1\.\w+\.experts", "layers.1.moe.others", name): one for name, one in holder.items()}

    assert torch.equal(out(changed(lambda holder: moved(holder) | holder)), out(model))
    match = r"has no 'model\.layers\.1\.moe\.others\S*', and the checkpoint no 'model\.layers\.1\.mlp\.experts\."
    with pytest.raises(ValueError, match=match):
        changed(moved)


@contextmanager
def propagated(name):
    """The records of a library's logger reach pytest's."""
    logger = logging.getLogger(name)
    before, logger.propagate = logger.propagate, True
    try:
        yield
    finally:
        logger.propagate = before


@pytest.mark.parametrize("part", ["model", "model.layers", "model.layers.0"])
def test_a_model_of_which_a_part_was_packed(part, tmp_path):
    model = llama()
    fp4compile.pack_(model.get_submodule(part), "nvfp4_weight_only")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert isinstance(again.model.layers[0].mlp.up_proj, PackedLinear) and torch.equal(out(again), out(model))


def test_a_class_with_none_in_the_place_of_a_packed_layer(tmp_path):
    model = bert(64)
    fp4compile.pack_(model, "nvfp4_weight_only")
    model.save_pretrained(tmp_path)
    again = transformers.BertForTokenClassification.from_pretrained(tmp_path)
    assert isinstance(model.pooler.dense, PackedLinear) and again.bert.pooler is None
    assert torch.equal(out(again.bert), out(model))


class Wrapper(nn.Module):
    def __init__(self, *inner):
        super().__init__()
        self.inner, self.head = nn.ModuleList(inner), nn.Linear(64, 64)

    def forward(self, x):
        return [one(x)[0] for one in self.inner]


def test_models_in_a_module_save_themselves(tmp_path):
    """Each of them, under its own names."""
    wrapper = Wrapper(llama(), llama(), bert(vocabulary=64))
    fp4compile.pack_(wrapper, "nvfp4")
    for i, model in enumerate(wrapper.inner):
        model.save_pretrained(tmp_path / str(i))
        again = type(model).from_pretrained(tmp_path / str(i))
        assert torch.equal(out(again), out(model))
        assert sum(isinstance(module, PackedLinear) for module in again.modules()) >= 6


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_in_a_model_saves_itself(loaded, tmp_path):
    """It has the outer model's configuration object, in which the names of layers are others."""
    model = llama()
    fp4compile.pack_(model, "nvfp4")
    if loaded:
        model.save_pretrained(tmp_path / "first")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    for part, kind in ((model.model, transformers.LlamaModel), (model, transformers.LlamaForCausalLM)):
        part.save_pretrained(tmp_path / kind.__name__)
        assert torch.equal(out(kind.from_pretrained(tmp_path / kind.__name__)), out(part))


def test_adapters_of_a_packed_model_are_saved_alone(tmp_path):
    peft = pytest.importorskip("peft")
    model = llama()
    fp4compile.pack_(model, "nvfp4")
    adapted = peft.get_peft_model(Wrapper(model), peft.LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(tmp_path)
    assert sorted(file.suffix for file in tmp_path.iterdir() if file.name != "README.md") == [".json", ".safetensors"]


def test_sentence_transformers(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    parts = pytest.importorskip("sentence_transformers.models")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdef"]))
    for one in (bert(vocabulary=11), transformers.BertTokenizer(str(tmp_path / "vocab.txt"))):
        one.save_pretrained(tmp_path / "bert")
    modules = [parts.Transformer(str(tmp_path / "bert")), parts.Pooling(64)]
    model, sentences = library.SentenceTransformer(modules=modules, device="cpu"), ["a b c", "d e"]
    fp4compile.pack_(model, "nvfp4")
    expected = model.encode(sentences)
    model.save_pretrained(str(tmp_path / "packed"))
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp4compile"
    again = library.SentenceTransformer(str(tmp_path / "packed"), device="cpu")
    assert (again.encode(sentences) == expected).all()


def gte():
    """A model whose checkpoint has q, k and v as one weight, which transformers splits into three layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.GteModel(transformers.GteConfig(**sizes, intermediate_size=96)).eval()


@pytest.mark.parametrize("rules", [[], [["*q_proj", "skip"]]])
@pytest.mark.parametrize("recipe", ["nvfp4_weight_only", "mxfp8"])  # codes with a global scale, and without
def test_packed_layers_whose_weights_are_one_in_checkpoints(rules, recipe, tmp_path):
    """They stay three, also where one is not packed; the second save is of a model that was loaded."""
    model, order = gte(), {"recipe": recipe, "rules": rules}
    model.save_pretrained(tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert any("qkv_proj.weight" in name for name in plain) and not any("q_proj" in name for name in plain)
    fp4compile.pack_(model, fp4compile.Recipe.from_dict(order))
    order = {"quant_method": "fp4compile", "recipe": order}
    read = transformers.GteModel.from_pretrained(tmp_path / "plain", quantization_config=order)
    for i, one in enumerate((model, read)):
        one.save_pretrained(tmp_path / str(i))
        again = transformers.GteModel.from_pretrained(tmp_path / str(i))
        assert sum(isinstance(module, PackedLinear) for module in again.modules()) == 7 - len(rules)
        assert torch.equal(out(again), out(model))
    half = gte()
    fp4compile.pack_(half.layers[0].self_attn, recipe)
    half.save_pretrained(tmp_path / "half")
    fp4compile.pack_(half, recipe)
    half.save_pretrained(tmp_path / "whole")
    again = transformers.GteModel.from_pretrained(tmp_path / "whole")
    assert torch.equal(out(again), out(half))
