"""Checkpoints of ModelOpt and compressed-tensors: read, refused where they are broken, written with the same bits."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fp4compile
from fp4compile.recipe import named
from fp4compile.weights.buffers import LayerFormat
from fp4compile.weights.linear import PackedLinear
from fp4compile.weights.published.conventions import inverted
from tests.helpers.checkpoints import DATA, E2M1, bits, decoded, tensors_of
from tests.helpers.programs import Program

MODELOPT = ("modelopt_nvfp4", "modelopt_nvfp4_weight_only", "modelopt_mxfp8")
TOKENS = torch.arange(16).view(2, 8)
DOWN = "model.layers.0.mlp.down_proj"


def fresh_model(folder=DATA / "modelopt_nvfp4", dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def loaded(folder):
    model = fresh_model()
    fp4compile.load_packed(model, folder)
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


# ---------------------------------------------------------------- reading


@pytest.mark.parametrize("name", MODELOPT)
def test_modelopt_weights_are_what_its_layout_means(name):
    tensors, model = tensors_of(DATA / name), loaded(DATA / name)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert set(packed) == {key.removesuffix(".weight_scale") for key in tensors if key.endswith(".weight_scale")}
    for layer, module in packed.items():
        assert torch.equal(module.weight, decoded(tensors, layer)), layer
        static = tensors.get(f"{layer}.input_scale")
        assert module.layer_format.activation_outer == (None if static is None else static.item())
    for key, tensor in model.state_dict().items():
        if key in tensors:
            assert torch.equal(tensor, tensors[key]), key


def by_hand(folder, weights, amax, shards=1):
    """Write linear weights as compressed-tensors does: NVFP4, divisors. Returns what the codes mean."""
    tensors, meant = {}, {}
    for name, tensor in fresh_model().state_dict().items():
        layer = name.removesuffix(".weight")
        if layer not in weights:
            tensors[name] = tensor
            continue
        codes = torch.randint(0, 256, (tensor.shape[0], tensor.shape[1] // 2), dtype=torch.uint8)
        scales = torch.rand(tensor.shape[0], tensor.shape[1] // 16).mul(448).to(torch.float8_e4m3fn)
        divisor = torch.full((1,), 2688.0) / amax
        tensors |= {f"{layer}.weight_packed": codes, f"{layer}.weight_scale": scales}
        tensors |= {f"{layer}.weight_global_scale": divisor, f"{layer}.input_global_scale": divisor / 4}
        elements = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(1)
        meant[layer] = elements * scales.float().repeat_interleave(16, 1) / divisor
    folder.mkdir()
    names, files = sorted(tensors), {}
    for i in range(shards):
        files[f"part-{i}.safetensors"] = {name: tensors[name] for name in names[i::shards]}
    for file, part in files.items():
        save_file(part, folder / file)
    if shards > 1:
        weight_map = {name: file for file, part in files.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    group = {
        "targets": ["re:.*proj"],
        "weights": {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True},
        "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"},
    }
    config = json.loads((DATA / "modelopt_nvfp4" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, meant


@pytest.mark.parametrize("shards", [1, 3])
def test_compressed_tensors_divide_by_their_global_scale(tmp_path, shards):
    tensors, meant = by_hand(tmp_path / "ct", {DOWN, "model.layers.0.self_attn.q_proj"}, 0.15625, shards)
    model = loaded(tmp_path / "ct")
    for layer, weight in meant.items():
        torch.testing.assert_close(model.get_submodule(layer).weight, weight, rtol=3e-7, atol=0)
    fp4compile.export_packed(model, tmp_path / "again", "compressed-tensors", max_shard_size=8000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)


def test_another_default_device_than_the_models(tmp_path):
    model = loaded(DATA / "modelopt_nvfp4")
    with torch.device("meta"):  # as after `torch.set_default_device("cuda")`
        fp4compile.export_packed(model, tmp_path / "again", "compressed-tensors")
    fp4compile.export_packed(model, tmp_path / "expected", "compressed-tensors")
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors_of(tmp_path / "expected"))


def test_names_of_wrapped_models(tmp_path):
    """torch.compile's wrapper is looked through; names that no checkpoint has are refused."""
    model = loaded(DATA / "modelopt_mxfp8")
    fp4compile.export_packed(torch.compile(model), tmp_path / "compiled")
    assert tensors_of(tmp_path / "compiled").keys() == tensors_of(DATA / "modelopt_mxfp8").keys()
    for wrapped in (torch.nn.DataParallel(model), get_peft_model(model, LoraConfig(target_modules=["down_proj"]))):
        with pytest.raises(ValueError, match=r"model: '.*' has a name that no checkpoint has: merge adapters"):
            fp4compile.export_packed(wrapped, tmp_path / "wrapped")
    assert not (tmp_path / "wrapped").exists()


def test_tied_weights_are_stored_once():
    model = fresh_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    fp4compile.pack_(model, "nvfp4_weight_only")
    with pytest.MonkeyPatch.context() as patch:
        written = {}
        patch.setattr("fp4compile.weights.export.write_checkpoint", lambda _, c, __: written.update(c.tensors))
        fp4compile.export_packed(model, "nowhere")
    assert "model.embed_tokens.weight" in written and "lm_head.weight" not in written


@pytest.mark.parametrize("layout, recipe", [("modelopt", "nvfp4_weight_only"), ("fp8", "float8_block")])
def test_a_packed_layer_with_two_names(layout, recipe, tmp_path):
    """As of attention whose values are its keys: a reader finds it under each of them."""
    model, x = shared_layer(), torch.randn(3, 64)
    fp4compile.pack_(model, named(recipe).replace(skip_lm_head=False))
    fp4compile.export_packed(model, tmp_path / "made", layout)
    assert {"k.weight", "v.weight"} <= tensors_of(tmp_path / "made").keys()
    fresh = shared_layer()
    fp4compile.load_packed(fresh, tmp_path / "made")
    assert all(torch.equal(fresh[name](x), model[name](x)) for name in model)


def shared_layer():
    layer = torch.nn.Linear(64, 64)
    return torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64), "k": layer, "v": layer})


def test_a_tied_head_needs_no_tensor_of_its_own(tmp_path):
    shutil.copytree(DATA / "modelopt_mxfp8", tmp_path / "tied")
    tensors = tensors_of(tmp_path / "tied")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "tied" / "model.safetensors")
    model = fresh_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    fp4compile.load_packed(model, tmp_path / "tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match=r"'lm_head.weight' is missing"):
        fp4compile.load_packed(fresh_model(), tmp_path / "tied")


# ---------------------------------------------------------------- what is broken


def configure(**changes):
    def corrupt(folder, tensors):
        file = folder / "hf_quant_config.json"
        content = json.loads(file.read_text())
        content["quantization"] |= changes
        file.write_text(json.dumps(content))

    return corrupt


def test_a_divisor_that_is_a_multiplier_is_refused(tmp_path):
    by_hand(tmp_path / "ct", {DOWN}, amax=2688.0 * 400)  # 2688 / amax is 0.0025, as a multiplier of small weights is
    with pytest.raises(ValueError, match=rf"'{DOWN}.weight_global_scale': .*looks like a multiplier"):
        loaded(tmp_path / "ct")


class Layer(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64, bias=False)
        self.layer.weight.data.copy_(weight)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_outer_scales_are_refused_from_the_first_that_cannot_be(tmp_path, layout):
    """1, of an amax of 2688. The largest below it loads; and 1 where it is the scale of a weight that is all zero."""
    model = Layer(torch.randn(64, 64))
    fp4compile.pack_(model, fp4compile.Recipe(fprop_w="nvfp4"))
    below = torch.ones(()).nextafter(torch.zeros(()))
    for outer, fits in ((below, True), (torch.ones(()), False)):
        model.layer.weight_outer = outer
        fp4compile.export_packed(model, tmp_path / str(fits), layout)
        fresh = Layer(torch.zeros(64, 64))
        if fits:
            fp4compile.load_packed(fresh, tmp_path / str(fits))
            torch.testing.assert_close(fresh.layer.weight_outer, below)
        else:
            with pytest.raises(ValueError, match=r"'layer.weight_\w+': 1, as .* amax of 2688; it looks like"):
                fp4compile.load_packed(fresh, tmp_path / str(fits))
    zeros, fresh = Layer(torch.zeros(64, 64)), Layer(torch.ones(64, 64))
    fp4compile.pack_(zeros, fp4compile.Recipe(fprop_w="nvfp4"))
    fp4compile.export_packed(zeros, tmp_path / "zeros", layout)
    fp4compile.load_packed(fresh, tmp_path / "zeros")
    assert fresh.layer.weight_outer == 1 and not fresh.layer.weight.any()


CACHE_SCALES = (
    "k_proj.k_scale", "v_proj.v_scale", "k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale",
    "attn.kv_cache_scale", "k_proj.output_scale", "k_bmm_quantizer._amax", "kv_cache.k_scale", "v_zero_point",
)  # fmt: skip


@pytest.mark.parametrize("declared", [{}, {"kv_cache_quant_algo": "FP8"}], ids=["undeclared", "declared"])
def test_scales_of_a_quantised_cache_are_left_with_one_warning(declared, tmp_path):
    shutil.copytree(DATA / "modelopt_mxfp8", tmp_path / "kv")
    expected = logits(loaded(tmp_path / "kv"))
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(()) for name in CACHE_SCALES}
    save_file(tensors_of(tmp_path / "kv") | scales, tmp_path / "kv" / "model.safetensors")
    configure(**declared)(tmp_path / "kv", {})
    with pytest.warns(UserWarning) as seen:
        model = loaded(tmp_path / "kv")
    (text,) = (str(one.message) for one in seen if "cache" in str(one.message))
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in CACHE_SCALES}))
    assert f"the KV cache is not quantised; {len(scales)} of its scales ({kinds}), such as " in text
    assert torch.equal(logits(model), expected)


def test_a_models_own_tensor_is_no_scale_of_the_cache(tmp_path):
    model = fresh_model()
    attention = model.model.layers[0].self_attn
    attention.register_parameter("k_scale", torch.nn.Parameter(torch.zeros(())))
    shutil.copytree(DATA / "modelopt_mxfp8", tmp_path / "own")
    scale = {"model.layers.0.self_attn.k_scale": torch.ones(())}
    save_file(tensors_of(tmp_path / "own") | scale, tmp_path / "own" / "model.safetensors")
    fp4compile.load_packed(model, tmp_path / "own")
    assert attention.k_scale == 1


def test_a_configuration_that_names_no_algorithm(tmp_path):
    shutil.copytree(DATA / "modelopt_mxfp8", tmp_path / "none")
    configure(quant_algo=None)(tmp_path / "none", {})
    with pytest.raises(
        ValueError, match=r"layer 'model\..*' is quantised, and the configuration has no quant_algo .* NVFP4"
    ):
        loaded(tmp_path / "none")


# ---------------------------------------------------------------- transformers

READ = """
import sys, torch, transformers
order = {"quantization_config": {"quant_method": "fp4compile"}} if sys.argv[2] == "order" else {}
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **order)
with torch.no_grad():
    assert torch.equal(model(torch.arange(16).view(2, 8)).logits, torch.load(sys.argv[3]))
"""


@pytest.mark.parametrize("layout, order", [("modelopt", ""), ("modelopt", "order"), ("compressed-tensors", "order")])
def test_from_pretrained_reads_published_checkpoints_before_any_other(layout, order, tmp_path):
    """In a new process, to which no packed model and no call has introduced this package's quantiser."""
    fp4compile.export_packed(loaded(DATA / "modelopt_nvfp4"), tmp_path / "made", layout)
    torch.save(logits(loaded(tmp_path / "made")), tmp_path / "logits.pt")
    ended = Program(["-c", READ, str(tmp_path / "made"), order, str(tmp_path / "logits.pt")], tmp_path).ended()
    assert ended.status == 0, ended.said


def test_from_pretrained_reads_what_modelopts_own_file_describes(tmp_path):
    shutil.copytree(DATA / "modelopt_mxfp8", tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    order = {"quant_method": "fp4compile"}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "own", quantization_config=order)
    assert torch.equal(logits(model), logits(loaded(DATA / "modelopt_mxfp8")))
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))
    (tmp_path / "own" / "hf_quant_config.json").unlink()
    with pytest.raises(ValueError, match="quantization_config: the checkpoint is not packed; name a recipe"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "own", quantization_config=order)


def test_from_pretrained_reads_the_variant_that_it_is_told(tmp_path):
    for name in ("modelopt_nvfp4_weight_only", "modelopt_mxfp8"):  # the first file stays as a variant beside the other
        shutil.copytree(DATA / name, tmp_path, dirs_exist_ok=True)
        (tmp_path / "model.safetensors").rename(tmp_path / f"model.{name}.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, variant="modelopt_mxfp8")
    assert torch.equal(logits(model), logits(loaded(DATA / "modelopt_mxfp8")))


def test_a_checkpoint_named_nvfp4_whose_groups_quantise_no_activations_has_weights_alone(tmp_path):
    expected = logits(loaded(DATA / "modelopt_nvfp4_weight_only"))
    for files in (("config.json", "hf_quant_config.json"), ("config.json",)):
        folder = tmp_path / str(len(files))
        shutil.copytree(DATA / "modelopt_nvfp4_weight_only", folder)
        (folder / "hf_quant_config.json").unlink(missing_ok="hf_quant_config.json" in files)
        for file in files:
            text = (DATA / "modelopt_nvfp4_weight_only" / file).read_text()
            (folder / file).write_text(text.replace('"W4A16_NVFP4"', '"NVFP4"'))
        assert torch.equal(logits(loaded(folder)), expected)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = {"num_bits": 4, "group_size": 16}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="^7 static scales of activations, such as '.*input_scale', are missing"):
        model = loaded(folder)
    assert model.get_submodule(DOWN).layer_format == LayerFormat("nvfp4", "nvfp4")


@pytest.mark.filterwarnings("error::UserWarning")
def test_modelopts_activations_may_be_dynamic(tmp_path):
    shutil.copytree(DATA / "modelopt_nvfp4", tmp_path / "made")
    configure(activation_scheme="dynamic")(tmp_path / "made", {})
    tensors = {name: one for name, one in tensors_of(tmp_path / "made").items() if not name.endswith("input_scale")}
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    assert loaded(tmp_path / "made").get_submodule(DOWN).layer_format == LayerFormat("nvfp4", "nvfp4")
    configure(activation_scheme="token")(tmp_path / "made", {})
    with pytest.raises(ValueError, match="activation_scheme: expected 'static' or 'dynamic', got 'token'"):
        loaded(tmp_path / "made")


def test_static_scales_of_activations_that_are_not_quantised_are_left_out(tmp_path):
    """NVIDIA's checkpoints have them in layers that the configuration calls W4A16_NVFP4."""
    shutil.copytree(DATA / "modelopt_nvfp4", tmp_path / "made")
    (tmp_path / "made" / "config.json").unlink()
    file = tmp_path / "made" / "hf_quant_config.json"
    file.write_text(file.read_text().replace('"NVFP4"', '"W4A16_NVFP4"'))
    count = sum(name.endswith("input_scale") for name in tensors_of(tmp_path / "made"))
    with pytest.warns(UserWarning, match=f"^{count} scales of activations, such as '.*input_scale', are not used"):
        model = loaded(tmp_path / "made")
    expected = loaded(DATA / "modelopt_nvfp4").get_submodule(DOWN)
    assert model.get_submodule(DOWN).layer_format.activation is None
    assert torch.equal(model.get_submodule(DOWN).weight, expected.weight)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("name", MODELOPT)
def test_what_modelopt_wrote_is_written_again_bit_for_bit(tmp_path, name):
    fp4compile.export_packed(loaded(DATA / name), tmp_path / "again")
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors_of(DATA / name))
    for file, part in (("hf_quant_config.json", "quantization"), ("config.json", "quantization_config")):
        ours, theirs = (json.loads((d / file).read_text())[part] for d in (tmp_path / "again", DATA / name))
        assert ours["quant_algo"] == theirs["quant_algo"]


def test_outer_scales_of_16_bit_weights_come_back_from_their_divisors():
    for dtype in (torch.bfloat16, torch.float16):
        amax = torch.linspace(2**-8, 4, 3000).to(dtype).float().unique()
        outer = amax / torch.tensor(2688.0)
        divisor = torch.stack([inverted(one, divisor=False) for one in outer])
        assert torch.equal(divisor, torch.tensor(2688.0) / amax)
        assert torch.equal(torch.stack([inverted(one, divisor=True) for one in divisor]), outer)


def refused(model, message, folder="nowhere", **arguments):
    with pytest.raises((ValueError, TypeError), match=message):
        fp4compile.export_packed(model, folder, **arguments)


def test_what_cannot_be_written_is_refused(tmp_path):
    model = fresh_model()
    refused(model, "has no packed layer")
    refused(model, "unknown layout 'gguf'", layout="gguf")
    refused("model", "expected a torch.nn.Module, got str")
    fp4compile.pack_(model, "nvfp4")
    refused(model, "calibrate")
    squares = fresh_model()
    fp4compile.pack_(squares, "mxfp8_32x32")
    refused(squares, "modelopt has no weights in mxfp8_32x32")
    refused(squares, "allowed are mxfp8 with activations mxfp8$", layout="mxfp8")
    each = "float8_tensor with activations float8_tensor"  # static and dynamic
    refused(model, f"allowed are (?!.*{each}.*{each}).*{each}", layout="fp8")
    good = loaded(DATA / "modelopt_mxfp8")
    refused(good, "max_shard_size: expected a positive", max_shard_size=0)
    (tmp_path / "old.safetensors").touch()
    refused(good, "has safetensors files already", tmp_path)


# ---------------------------------------------------------------- transformers


class Made(torch.utils._python_dispatch.TorchDispatchMode):
    """Records how large the floating-point tensors are that operators make off the meta device."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta" and out.dtype.itemsize > 1:
            self.largest = max(self.largest, out.numel())
        return out


def small_model(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    more = {"num_local_experts": 4} if kind == "mixtral" else {"attention_bias": True}
    config = AutoConfig.for_model(kind, **sizes | heads | more)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def plain(model):
    return {name: t for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_from_pretrained_makes_no_weight_in_high_precision(tmp_path, kind, monkeypatch):
    fp4compile.register_with_transformers()
    model = small_model(kind)
    fp4compile.pack_(model, {"recipe": "mxfp8", "rules": [("*down_proj", "nvfp4_weight_only")]})
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # other threads are not seen by a dispatch mode
    with Made() as made:
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert made.largest == 32 * 32  # the embedding; the weights of the MLP are twice as large
    assert bits(plain(again)) == bits(plain(model))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("what, match", [
    ("tensor", rf"'{DOWN}.weight_scales' is missing"),
    ("scale", rf"'{DOWN}.weight_scales': has scales that are NaN"),
    ("layers", "expected the states of layers by name, got list"),
    ("format", rf"layer '{DOWN}': format: expected a name"),
])  # fmt: skip
def test_from_pretrained_refuses_what_is_broken(what, match, tmp_path):
    fp4compile.register_with_transformers()
    model = small_model("llama")
    fp4compile.pack_(model, "mxfp8")
    model.save_pretrained(tmp_path)
    tensors, config = tensors_of(tmp_path), json.loads((tmp_path / "config.json").read_text())
    quantization = config["quantization_config"]
    if what == "tensor":
        del tensors[f"{DOWN}.weight_scales"]
    elif what == "scale":
        tensors[f"{DOWN}.weight_scales"][0, 0] = 255
    elif what == "layers":
        quantization["layers"] = []
    else:
        quantization["layers"][DOWN]["weight"] = 5
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=match):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_several_groups_of_compressed_tensors(tmp_path):
    """A name goes before a regular expression, and that before a class; of equals, those of the codes' width count."""
    by_hand(tmp_path / "ct", {DOWN}, 0.15625)
    file = tmp_path / "ct" / "config.json"
    config = json.loads(file.read_text())
    groups = config["quantization_config"]["config_groups"]
    right, eight = groups["group_0"], {"weights": {"num_bits": 8, "type": "float", "group_size": 32}}
    weights_alone = {"weights": right["weights"]}
    cases = [
        ((["Linear"], eight), ([r"re:.*\.down_proj$"], right), None), ((["re:.*down.*"], eight), ([DOWN], right), None),
        ((["Linear"], right), (["Linear"], right), None), (([DOWN], right), (["nothing"], {"weights": None}), None),
        ((["re:.*"], right), (["re:.*down.*"], eight), None), ((["re:.*"], eight), (["re:.*down.*"], right), None),
        ((["re:.*"], right), (["re:.*down.*"], weights_alone), "is a target of several groups"),
        ((["re:.*"], eight), (["re:.*down.*"], {"weights": eight["weights"] | {"group_size": 128}}), "several groups"),
    ]  # fmt: skip
    for *found, message in cases:
        new = {f"group_{i}": group | {"targets": targets} for i, (targets, group) in enumerate(found)}
        config["quantization_config"]["config_groups"] = new
        file.write_text(json.dumps(config))
        if message is None:
            assert isinstance(loaded(tmp_path / "ct").get_submodule(DOWN), PackedLinear)
        else:
            with pytest.raises(ValueError, match=message):
                loaded(tmp_path / "ct")


def test_an_export_has_the_dtype_and_the_class_of_the_model(tmp_path):
    """Also where the model was cast, or made from a configuration alone, and its configuration says otherwise."""
    model = fresh_model().bfloat16()
    model.config.architectures = None
    fp4compile.pack_(model, "mxfp8")
    fp4compile.export_packed(model, tmp_path / "made")
    written = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (written["dtype"], written["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made").dtype == torch.bfloat16


# ---------------------------------------------------------------- rows that end in a part of a block


class Mlp(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, inner), torch.nn.Linear(inner, 32)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("inner", [80, 77])  # of which a row is no whole blocks, or in FP4 no whole bytes
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4_weight_only"])
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_codes_are_written_without_padding(layout, recipe, inner, tmp_path):
    recipe = named(recipe).replace(skip_lm_head=False)
    model, x = Mlp(inner).bfloat16(), torch.randn(3, 32).bfloat16()
    fp4compile.pack_(model, recipe)
    fp4compile.export_packed(model, tmp_path / "now", layout)
    tensors = tensors_of(tmp_path / "now")
    name = next(name for name in ("down.weight_packed", "down.weight") if name in tensors)
    packed, block = "4" in model.down.layer_format.weight, 16 if "nvfp4" in model.down.layer_format.weight else 32
    assert tensors[name].shape == (32, (inner + 1) // 2 if packed else inner)
    assert tensors["down.weight_scale"].shape == (32, -(-inner // block))

    # Earlier versions wrote whole blocks.
    shutil.copytree(tmp_path / "now", tmp_path / "before")
    whole = model.down.weight_data.view(tensors[name].dtype)
    assert (whole.shape == tensors[name].shape) == (inner == 80 and block == 16)
    save_file(tensors | {name: whole}, tmp_path / "before" / "model.safetensors")
    for folder in ("now", "before"):
        fresh = Mlp(inner).bfloat16()
        fp4compile.load_packed(fresh, tmp_path / folder)
        assert fresh.down.in_features == inner and torch.equal(fresh(x), model(x))
    with pytest.raises(ValueError, match="layer 'down': the file has in and out features"):
        fp4compile.load_packed(Mlp(inner - 2).bfloat16(), tmp_path / "before")  # where the file has numbers
