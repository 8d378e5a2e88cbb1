"""`from_pretrained` packs a checkpoint in high precision while it reads it."""

import copy
import functools
import gc
import sys

import pytest
import torch

import fp4compile
from fp4compile.registration import register_with_transformers
from fp4compile.weights.buffers import PackedWeight
from fp4compile.weights.linear import PackedLinear

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
ORDER = {"quant_method": "fp4compile", "recipe": "nvfp4"}
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options)).eval()


def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).eval()


def same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(*(state[name].reshape(-1).view(torch.uint8) for state in states)), name


def live() -> int:
    """Bytes of the matrices in high precision that were made since `gc.freeze`, on the meta device excepted."""
    plain = (torch.Tensor, torch.nn.Parameter)  # compilers leave tensors of other classes, and functional ones, behind
    tensors = [t for t in gc.get_objects() if type(t) in plain and not t.is_meta and t.dim() > 1]
    tensors = [t for t in tensors if t.dtype in (torch.float32, torch.bfloat16) and not torch._is_functional_tensor(t)]
    return sum(dict((t.data_ptr(), t.nbytes) for t in tensors).values())


@pytest.mark.parametrize("make", (llama, mixtral))
def test_one_weight_at_a_time_is_in_high_precision(make, tmp_path, monkeypatch):
    make().save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = make()
    fp4compile.pack_(expected, "nvfp4")
    packed = [module for module in expected.modules() if isinstance(module, PackedWeight)]
    largest = max(4 * module.dequantised().numel() for module in packed)
    left = sum(parameter.nbytes for parameter in expected.parameters() if parameter.dim() > 1)
    peaks, store = [], PackedWeight.store

    def measured(self, weight, amax=None):
        peaks.append(live())
        store(self, weight, amax)

    monkeypatch.setattr(PackedWeight, "store", measured)
    gc.freeze()  # so that `live` does not look through all objects of the process
    try:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ORDER)
    finally:
        gc.unfreeze()
    assert len(peaks) == len(packed)
    assert max(peaks) <= left + largest
    same(loaded, expected)


def test_tied_cast_and_missing_weights(tmp_path):
    """The head is tied to the embedding, so it is packed when both are known; a missing bias and weight get values."""
    torch.manual_seed(0)
    options = {"tie_word_embeddings": True, "attention_bias": True}
    llama(**options).save_pretrained(tmp_path)
    recipe = {"recipe": "mxfp8", "skip_lm_head": False}
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    fp4compile.pack_(expected, recipe)
    order = {"quant_method": "fp4compile", "recipe": recipe}
    load = functools.partial(transformers.LlamaForCausalLM.from_pretrained, tmp_path, quantization_config=order)
    loaded = load(dtype=torch.bfloat16)
    assert type(loaded.lm_head) is PackedLinear and loaded.model.embed_tokens.weight.dtype == torch.bfloat16
    same(loaded, expected)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    lost = {f"model.layers.{name}" for name in ("0.self_attn.q_proj.bias", "1.self_attn.k_proj.weight")}
    safetensors.save_file({k: v for k, v in tensors.items() if k not in lost}, file, {"format": "pt"})
    loaded, found = load(output_loading_info=True)
    assert found["missing_keys"] == lost
    bias, key = loaded.get_parameter("model.layers.0.self_attn.q_proj.bias"), loaded.model.layers[1].self_attn.k_proj
    assert not bias.any() and type(key) is PackedLinear and 0 < key.weight.std() < 0.1
    assert sum(isinstance(module, PackedLinear) for module in loaded.modules()) == 22


def test_a_head_is_one_by_its_tie_to_the_embeddings(tmp_path):
    """Neither the name of XLNet's head nor its width says so, and ties are made after weights have been read."""
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=64, d_model=64, n_layer=1, n_head=2, d_inner=128)
    plain = transformers.XLNetLMHeadModel(config).eval()
    plain.save_pretrained(tmp_path)
    fp4compile.pack_(plain, "nvfp4")
    loaded = transformers.XLNetLMHeadModel.from_pretrained(tmp_path, quantization_config=ORDER)
    assert loaded.lm_loss.weight is loaded.get_input_embeddings().weight
    same(loaded, plain)


def test_a_model_that_initialises_layers_by_their_sizes(tmp_path):
    """Wav2Vec2 reads in_features of projections that a packed checkpoint is about to fill."""
    torch.manual_seed(0)
    convolutions = {"conv_dim": [32], "conv_kernel": [4], "conv_stride": [4], "num_feat_extract_layers": 1}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4}
    config = transformers.Wav2Vec2Config(**SIZES, **convolutions, **positions)
    packed = transformers.Wav2Vec2Model(config).eval()
    fp4compile.pack_(packed, "nvfp4")
    packed.save_pretrained(tmp_path)
    same(transformers.Wav2Vec2Model.from_pretrained(tmp_path), packed)


def test_a_class_that_computes_its_ties(tmp_path):
    """A property, as in Deimv2: packed layers that are in no tie leave it as it is."""

    class Computed(transformers.LlamaForCausalLM):
        _tied_weights_keys = property(lambda self: {"lm_head.weight": "model.embed_tokens.weight"})

    model = Computed(transformers.LlamaConfig(**SIZES)).eval()
    fp4compile.pack_(model, "nvfp4")
    assert isinstance(model.model.layers[0].mlp.up_proj, PackedLinear)
    model.save_pretrained(tmp_path)
    same(Computed.from_pretrained(tmp_path), model)


@pytest.mark.parametrize("head", ["llama", "t5"])
def test_a_packed_head_is_tied_no_more(head, tmp_path):
    torch.manual_seed(0)
    options = {"d_kv": 16, "d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "vocab_size": 100}
    t5 = transformers.T5ForConditionalGeneration
    model = llama(tie_word_embeddings=True) if head == "llama" else t5(transformers.T5Config(**options)).eval()
    fp4compile.pack_(model, {"recipe": "nvfp4", "skip_lm_head": False})
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert isinstance(loaded.lm_head, PackedLinear)
    same(model, loaded)
    for one in (model, loaded):
        one.tie_weights()
    same(model, loaded)
    if head == "t5":
        assert loaded.encoder.embed_tokens.weight is loaded.shared.weight


@pytest.mark.parametrize("make", (llama, mixtral))
def test_dequantize_makes_a_plain_model_of_the_same_weights(make, tmp_path):
    packed = make()
    fp4compile.pack_(packed, "nvfp4_weight_only")
    expected = {name: one.dequantised() for name, one in packed.named_modules() if isinstance(one, PackedWeight)}
    packed.save_pretrained(tmp_path / "packed")  # leaves a name as the configuration's dtype
    plain = copy.deepcopy(packed).dequantize()  # a copy has attributes of packed layers that a new one lacks
    assert not any(isinstance(module, PackedWeight) for module in plain.modules())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    for name, values in expected.items():
        of_experts = name.endswith("_packed")
        own = plain.get_parameter(name.removesuffix("_packed") if of_experts else f"{name}.weight")
        assert torch.equal(own, values), name
    plain.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    same(again, plain)
    for model in (plain, again):
        fp4compile.pack_(model, "mxfp8")
    same(again, plain)
    assert expected.keys() == {name for name, one in plain.named_modules() if isinstance(one, PackedWeight)}


def test_a_recipes_fields_beside_its_name_are_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="unknown key 'skip_last_blocks'; .* into the dict under the key 'recipe'"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ORDER | {"skip_last_blocks": 1})


def test_a_model_whose_modules_initialise_each_other_and_stay_in_float32(tmp_path):
    """T5's modules read weights of their layers while they are loaded, and `wo` has another dtype than the model."""
    sizes = {"d_model": 64, "d_ff": 128, "num_layers": 1, "num_heads": 4, "d_kv": 16, "vocab_size": 100}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "plain")
    load = functools.partial(transformers.T5ForConditionalGeneration.from_pretrained, dtype=torch.float16)
    expected = load(tmp_path / "plain")
    assert expected.encoder.block[0].layer[1].DenseReluDense.wo.weight.dtype == torch.float32
    fp4compile.pack_(expected, "nvfp4")
    loaded = load(tmp_path / "plain", quantization_config=ORDER)
    same(loaded, expected)
    loaded.save_pretrained(tmp_path / "packed")
    again = load(tmp_path / "packed")
    same(again, expected)
    tokens = {name: torch.arange(8)[None] for name in ("input_ids", "decoder_input_ids")}
    with torch.no_grad():
        results = [model.eval()(**tokens).logits for model in (expected, loaded, again)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2]), "`wo` reads float32"


class Mixed(transformers.LlamaForCausalLM):
    """A model that makes one of its layers in float32 itself."""

    def __init__(self, config):
        super().__init__(config)
        self.model.layers[1].mlp.up_proj = torch.nn.Linear(64, 128, bias=False, dtype=torch.float32)


def test_a_layer_of_another_dtype_than_the_models_is_packed_from_the_values_that_it_would_have(tmp_path):
    """transformers would cast what is packed as it is read to the model's bfloat16 first."""
    llama().save_pretrained(tmp_path)
    load = functools.partial(Mixed.from_pretrained, tmp_path, dtype=torch.bfloat16)
    expected, loaded = load(), load(quantization_config=ORDER)
    assert expected.model.layers[1].mlp.up_proj.weight.dtype == torch.float32
    fp4compile.pack_(expected, "nvfp4")
    same(loaded, expected)
    assert loaded.model.layers[1].mlp.up_proj.weight.dtype == torch.float32


def test_device_maps_are_made_for_packed_weights(tmp_path, monkeypatch):
    """By the bytes of their codes and scales, row scales among them."""
    from fp4compile.weights.transformers import Fp4CompileQuantizer  # imports transformers

    llama().save_pretrained(tmp_path)
    sizes, size = {}, Fp4CompileQuantizer.param_element_size

    def noted(self, model, name, param):
        sizes[name] = size(self, model, name, param) * param.numel()
        return sizes[name] / param.numel()

    monkeypatch.setattr(Fp4CompileQuantizer, "param_element_size", noted)
    order = {"quant_method": "fp4compile", "recipe": "float8_rowwise"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=order, device_map="auto")
    packed = {f"{name}.weight": sum(buffer.nbytes for buffer in module.buffers())
              for name, module in model.named_modules() if isinstance(module, PackedLinear)}  # fmt: skip
    assert len(packed) == 21 and {name: sizes[name] for name in packed} == packed
    assert sizes["lm_head.weight"] == model.lm_head.weight.nbytes


def test_weights_that_stay_on_disk_are_refused(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "plain")
    fp4compile.pack_(model, "nvfp4_weight_only")
    fp4compile.export_packed(model, tmp_path / "published", layout="compressed-tensors")
    read = transformers.AutoModelForCausalLM.from_pretrained
    for name, order in (("plain", ORDER), ("published", {"quant_method": "fp4compile"})):
        with pytest.raises(ValueError, match="device_map: weights that stay on disk cannot be packed"):
            read(tmp_path / name, quantization_config=order, device_map={"model": "cpu", "lm_head": "disk"})


def test_packed_weights_on_disk(tmp_path):
    """transformers reads buffers into memory, unless it is told to leave them on disk."""
    model = llama()
    fp4compile.pack_(model, "nvfp4")
    model.save_pretrained(tmp_path / "packed")
    options = {"device_map": {"model": "disk", "lm_head": "cpu"}, "offload_folder": tmp_path / "disk"}
    read, tokens = transformers.AutoModelForCausalLM.from_pretrained, torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(read(tmp_path / "packed", **options)(tokens).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="offload_buffers: packed weights, such as 'model.*weight_data', cannot stay"):
        read(tmp_path / "packed", offload_buffers=True, **options)


@pytest.mark.parametrize("recipe", ("nvfp4", "mxfp8", "float8_rowwise", "float8_block"))
@pytest.mark.parametrize("make", (llama, mixtral))
def test_packed_weights_on_meta(make, recipe, tmp_path):
    """A model without values, as programs make it that plan memory or assign tensors later."""
    model = make()
    fp4compile.pack_(model, recipe)
    model.save_pretrained(tmp_path)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="meta")
    assert all(tensor.is_meta for tensor in (*read.parameters(), *read.buffers()))
    read.load_state_dict(model.state_dict(), assign=True)
    same(read, model)


def test_a_recipe_beside_a_folder_that_says_how_its_layers_multiply_is_refused(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "plain")
    order = {"quant_method": "fp4compile", "layers": {}, "experts": {}}
    with pytest.raises(ValueError, match="name a recipe to pack it by"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=order)
    fp4compile.pack_(model, "nvfp4")
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config.quantization_config["recipe"] = "nvfp4"
    with pytest.raises(ValueError, match="packed already; expected no recipe"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    with pytest.raises(ValueError, match="recipe: what save_pretrained wrote says itself how its layers multiply"):
        fp4compile.load_packed(llama(), tmp_path, recipe="mxfp8")


def test_codes_whose_configuration_is_lost_are_refused(tmp_path):
    """transformers would cast the codes to weights, and list their scales as unexpected."""
    llama().save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors |= {name: (64 * tensors[name]).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"tensor '{name}' has codes in F8_E4M3, and no configuration beside it"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=ORDER)


@pytest.mark.parametrize("version", ["4.57.6", "5.8.1"])
def test_a_transformers_that_is_too_old_says_so(version, tmp_path, monkeypatch):
    """A model is packed, and `save_packed` writes it; `save_pretrained` warns, `from_pretrained` raises."""
    model, again = llama(), llama()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)  # its first use exchanges the module
    fp4compile.pack_(model, "nvfp4")
    with pytest.warns(UserWarning, match="from_pretrained of LlamaForCausalLM gives packed layers random weights"):
        model.save_pretrained(tmp_path / "folder")
    fp4compile.save_packed(model, tmp_path / "file.safetensors")
    fp4compile.load_packed(again, tmp_path / "file.safetensors")
    same(model, again)
    with pytest.raises(ImportError, match=f"expected version 5.9 or later, got {version}"):
        register_with_transformers()  # as the first `from_pretrained` of a process does
