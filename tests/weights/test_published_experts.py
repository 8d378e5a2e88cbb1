"""Experts that a checkpoint holds one by one: read as packed experts, refused where they are broken, written again."""

import json
import re
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import fp4compile
from fp4compile.weights.experts import PackedExperts
from fp4compile.weights.integration import published_names
from fp4compile.weights.linear import PackedLinear
from fp4compile.weights.published.expert_names import Experts
from tests.helpers.by_hand import assert_rounds_to
from tests.helpers.checkpoints import DATA, bits, decoded, tensors_of
from tests.helpers.old_transformers import from_pretrained_loads
from tests.helpers.rewritten import rewritten

MIXTRAL = DATA / "modelopt_nvfp4_mixtral"
FILE = "model.layers.0.block_sparse_moe.experts"
MODEL = "model.layers.0.mlp.experts"
TOKENS = torch.arange(16).view(2, 8)
DEEPSEEK = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "n_routed_experts": 3, "n_group": 1,
            "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}  # fmt: skip


def fresh_model(folder=MIXTRAL, dtype=torch.float32):
    config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def loaded(folder=MIXTRAL):
    model = fresh_model(folder)
    fp4compile.load_packed(model, folder)
    return model


def dequantised(folder, tmp_path):
    """The model with the weights of a checkpoint, put together by transformers."""
    tensors, plain = tensors_of(folder), tmp_path / "dequantised"
    quantised = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    parts = ("weight_scale", "weight_scale_2", "input_scale")
    weights = {name: tensor for name, tensor in tensors.items() if not name.endswith(parts)}
    weights |= {f"{layer}.weight": decoded(tensors, layer) for layer in quantised}
    fresh_model(folder).save_pretrained(plain)
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain).eval()


def weights_of(model):
    """All weights of a model, packed or not, under the names that they have where they are not packed."""
    found = {name: t for name, t in model.state_dict().items() if "weight_" not in name and "_extra_state" not in name}
    packed = [(name, m) for name, m in model.named_modules() if isinstance(m, (PackedExperts, PackedLinear))]
    return found | {
        name.removesuffix("_packed") if isinstance(m, PackedExperts) else f"{name}.weight":
        m() if isinstance(m, PackedExperts) else m.weight for name, m in packed
    }  # fmt: skip


def equal_weights(model, expected):
    found, expected = weights_of(model), weights_of(expected)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def experts_of(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


def configure(folder, **changes):
    file = folder / "hf_quant_config.json"
    content = json.loads(file.read_text())
    content["quantization"] |= changes
    file.write_text(json.dumps(content))


# ---------------------------------------------------------------- reading


def test_modelopt_weights_are_those_that_transformers_puts_together(tmp_path):
    """Names of Mixtral's checkpoints; layer 1 has its experts in high precision."""
    model, expected = loaded(), dequantised(MIXTRAL, tmp_path)
    assert set(experts_of(model)) == {f"{MODEL}.gate_up_proj_packed", f"{MODEL}.down_proj_packed"}
    equal_weights(model, expected)
    tensors = tensors_of(MIXTRAL)
    codes = [tensors[f"{FILE}.{expert}.{leaf}.weight"] for expert in range(3) for leaf in ("w1", "w3")]
    assert torch.equal(model.get_submodule(f"{MODEL}.gate_up_proj_packed").weight_data.flatten(0, 1), torch.cat(codes))


FORMATS = {False: "nvfp4", True: "nvfp4_rowwise"}  # by whether gate and up have different scales


def test_gate_and_up_with_different_scales_have_a_scale_for_each_row(tmp_path):
    folder = tmp_path / "uneven"
    shutil.copytree(MIXTRAL, folder)
    tensors = tensors_of(MIXTRAL)
    tensors[f"{FILE}.1.w3.weight_scale_2"] *= 3
    save_file(tensors, folder / "model.safetensors")
    model = loaded(folder)
    formats = {name.rpartition(".")[2]: module.layer_format.weight for name, module in experts_of(model).items()}
    assert formats == {"gate_up_proj_packed": "nvfp4_rowwise", "down_proj_packed": "nvfp4"}
    equal_weights(model, dequantised(folder, tmp_path))
    fp4compile.save_packed(model, tmp_path / "packed.safetensors")
    again = fresh_model()
    fp4compile.load_packed(again, tmp_path / "packed.safetensors")
    equal_weights(again, model)
    assert torch.equal(logits(again), logits(model))
    with pytest.raises(ValueError, match="gate_up_proj.*nvfp4_rowwise"):
        fp4compile.export_packed(model, tmp_path / "no")


class Product(torch.nn.Module):
    """One product of experts of a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, offs):
        return F.grouped_mm(x, self.experts.gate_up_proj.transpose(-2, -1), offs=offs)


@pytest.mark.parametrize("by_rows", [False, True])
def test_products_of_the_graph_multiply_codes_by_the_largest_activation_scale(tmp_path, by_rows):
    """By rows: gate and up of an expert have different global scales."""
    folder = tmp_path / "uneven"
    shutil.copytree(MIXTRAL, folder)
    tensors = tensors_of(MIXTRAL)
    for expert, factor in enumerate((0.5, 3.0, 1.0)):
        tensors[f"{FILE}.{expert}.w1.input_scale"] *= factor
        tensors[f"{FILE}.{expert}.w3.weight_scale_2"] *= 3 if by_rows and expert == 2 else 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="activation scales of the experts of a layer differ; the largest is used"):
        model = loaded(folder)
    largest = tensors[f"{FILE}.1.w1.input_scale"]
    experts, offs = model.get_submodule(MODEL).bfloat16(), torch.tensor([5, 5, 12], dtype=torch.int32)
    assert experts.get_submodule("gate_up_proj_packed").layer_format.activation_outer == largest.item()
    x = 4 * torch.randn(12, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    run, decisions = rewritten(Product(experts), "nvfp4_static", min_m=1, min_n=1, min_k=1)
    with torch.no_grad():
        found = run(x, offs)
    assert [(d.reason, d.a.format, d.b.format) for d in decisions] == [(None, "nvfp4", FORMATS[by_rows])]
    a = fp4compile.quantize(x, "nvfp4", outer=largest).dequantize()
    weight = gate_up(tensors)
    exact = torch.cat([a[:5].double() @ weight[0].T.double(), a[5:].double() @ weight[2].T.double()])
    assert_rounds_to(found.double(), exact, torch.bfloat16)


def gate_up(tensors):
    return [torch.cat([decoded(tensors, f"{FILE}.{e}.{leaf}") for leaf in ("w1", "w3")]) for e in range(3)]


def test_formats_that_the_configuration_gives_to_all_experts_of_a_layer(tmp_path):
    """As ModelOpt writes MIXED_PRECISION."""
    shutil.copytree(MIXTRAL, tmp_path / "mixed")
    attention = [f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in "qkvo"]
    configure(
        tmp_path / "mixed", quant_algo="MIXED_PRECISION",
        quantized_layers={name: {"quant_algo": "NVFP4", "group_size": 16} for name in [*attention, FILE]},
    )  # fmt: skip
    equal_weights(loaded(tmp_path / "mixed"), loaded())


def test_experts_without_activation_scales_take_the_largest_of_the_others(tmp_path):
    """As ModelOpt writes experts that no token of the calibration reached."""
    folder, tensors = tmp_path / "lacks", tensors_of(MIXTRAL)
    shutil.copytree(MIXTRAL, folder)
    scales = {expert: tensors[f"{FILE}.{expert}.w2.input_scale"].item() for expert in range(3)}
    for gone, expected in (("1", max(scales[0], scales[2])), ("02", None)):
        for expert in gone:
            del tensors[f"{FILE}.{expert}.w2.input_scale"]
        save_file(tensors, folder / "model.safetensors")
        with pytest.warns(UserWarning, match=rf"such as '{FILE}\..\.w2.input_scale', are missing"):
            down = loaded(folder).get_submodule(f"{MODEL}.down_proj_packed")
        assert down.layer_format.activation == "nvfp4" and down.layer_format.activation_outer == expected


def compressed_by_hand(folder):
    """DeepSeek-V3 as compressed-tensors would write it, with the names that transformers writes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("deepseek_v3", **DEEPSEEK)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = tensors_of(folder)
    for name in [name for name in tensors if ".mlp." in name and name.endswith("_proj.weight")]:
        layer, (rows, columns) = name.removesuffix(".weight"), tensors.pop(name).shape
        expert = re.search(r"experts\.(\d)", layer)
        divisor = torch.tensor([2688 / (1.0 if expert is None else 2.0 + int(expert[1]))])
        tensors[f"{layer}.weight_packed"] = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        tensors[f"{layer}.weight_scale"] = torch.rand(rows, columns // 16).mul(8).to(torch.float8_e4m3fn)
        tensors |= {f"{layer}.weight_global_scale": divisor, f"{layer}.input_global_scale": torch.tensor([64.0])}
    arguments = {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True}
    group = {"targets": ["re:.*mlp.*_proj"], "weights": arguments, "input_activations": arguments}
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_shared_experts_dense_layers_and_layers_that_the_model_leaves_out(tmp_path):
    tensors = compressed_by_hand(tmp_path / "ct")
    extra = {f"model.layers.61.{name[15:]}": t.clone() for name, t in tensors.items() if ".layers.1." in name}
    extra["model.layers.61.eh_proj.weight"] = torch.ones(32, 64).to(torch.float8_e4m3fn)
    extra["model.layers.61.eh_proj.weight_scale_inv"] = torch.ones(1, 1)  # a format that is not read
    save_file(tensors | extra, tmp_path / "ct" / "model.safetensors")
    model = fresh_model(tmp_path / "ct")
    model._keys_to_ignore_on_load_unexpected = {r"model\.layers\.[1-9]"}  # that it has a layer 1 counts for more
    with pytest.warns(UserWarning, match="such as 'model.layers.61"):
        fp4compile.load_packed(model, tmp_path / "ct")
    assert set(experts_of(model)) == {f"model.layers.1.mlp.experts.{n}_packed" for n in ("gate_up_proj", "down_proj")}
    linears = {name for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    parts = [f"{leaf}_proj" for leaf in ("gate", "up", "down")]
    assert linears == {f"model.layers.{of}.{p}" for of in ("0.mlp", "1.mlp.shared_experts") for p in parts}
    assert model.get_submodule("model.layers.1.mlp.gate").weight.dtype == torch.float32
    assert logits(model).isfinite().all()
    fp4compile.export_packed(model, tmp_path / "again", "compressed-tensors")
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)


GEMMA = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 3,
         "top_k_experts": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"], "enable_moe_block": True,
         "hidden_size_per_layer_input": 0}  # fmt: skip


def from_pretrained(folder):
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"]
    return model


@pytest.mark.parametrize("read", [loaded, pytest.param(from_pretrained, marks=from_pretrained_loads)])
@pytest.mark.parametrize("about", ["", "moe."])
def test_separate_experts_of_a_model_that_stores_them_in_one_tensor(about, read, tmp_path):
    """As Gemma 4's are quantised: transformers knows no conversion of them."""
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **GEMMA), dtype=torch.float32)
    expected.save_pretrained(tmp_path)
    tensors = tensors_of(tmp_path)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        leaves = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert, whole in enumerate(tensors.pop(name)):
            for leaf, part in zip(leaves, whole.chunk(len(leaves)), strict=True):
                layer = f"{name.rpartition('.')[0].replace('experts', about + 'experts')}.{expert}.{leaf}"
                tensors[f"{layer}.weight"] = torch.randint(0, 256, (len(part), part.shape[1] // 2), dtype=torch.uint8)
                tensors[f"{layer}.weight_scale"] = torch.rand(len(part), part.shape[1] // 16).to(torch.float8_e4m3fn)
                tensors[f"{layer}.weight_scale_2"] = torch.tensor(2.0**-10)
                part.data.copy_(decoded(tensors, layer))
            expected.get_parameter(name).data[expert] = whole
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = read(tmp_path)
    assert len(experts_of(model)) == 4
    equal_weights(model, expected)


NAMES = {
    "qwen3_moe": ("model.layers.1.mlp.experts.2.", ("gate_proj", "up_proj"), ("down_proj",)),
    "phimoe": ("model.layers.1.block_sparse_moe.experts.2.", ("w1", "w3"), ("w2",)),
    "minimax_m2": ("model.layers.1.block_sparse_moe.experts.2.", ("w1", "w3"), ("w2",)),
}


def test_names_of_experts_in_checkpoints():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 16}
    for kind, (prefix, gate_up, down) in NAMES.items():
        config = AutoConfig.for_model(kind, **sizes, num_attention_heads=2, bos_token_id=1, eos_token_id=2)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        names = published_names(model)
        for parameter, leaves in (("gate_up_proj", gate_up), ("down_proj", down)):
            source = names.source(f"model.layers.1.mlp.experts.{parameter}")
            assert isinstance(source, Experts) and source.layers(2) == [prefix + leaf for leaf in leaves], kind
        others = [name for name in model.state_dict() if ".experts." not in name]
        assert [names.target(names.source(name)).name for name in others] == others


@pytest.mark.parametrize("count", [2, 7])
def test_experts_in_odd_shards(count, tmp_path):
    """Every expert's tensors are in all shards, codes apart from their scales; one shard has no tensor."""
    tensors = tensors_of(MIXTRAL)
    shutil.copytree(MIXTRAL, tmp_path / "odd")
    order = {name: f"part-{i % count}" for i, name in enumerate(sorted(tensors, reverse=True))}
    sharded(tmp_path / "odd", tensors, order.get, none={})
    model = loaded(tmp_path / "odd")
    equal_weights(model, loaded())
    fp4compile.export_packed(model, tmp_path / "again", max_shard_size=2000)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors)


# ---------------------------------------------------------------- what is broken


def without(layer):
    return lambda t: [t.pop(name) for name in list(t) if name.startswith(f"{FILE}.{layer}.")]


def changed(name, change):
    return lambda t: t.update({f"{FILE}.{name}": change(t[f"{FILE}.{name}"]).contiguous()})


def unquantised(tensors):
    weight = decoded(tensors, f"{FILE}.1.w3")
    without("1.w3")(tensors)
    tensors[f"{FILE}.1.w3.weight"] = weight


def smaller(tensors):
    for part in ("weight", "weight_scale"):
        changed(f"2.w1.{part}", lambda t: t[:8])(tensors)


def one_more(tensors):
    tensors |= {name.replace(".2.w", ".3.w"): t.clone() for name, t in tensors.items() if f"{FILE}.2." in name}


def plain_twice(tensors):
    tensors[f"{MODEL}.down_proj"] = torch.zeros(3, 32, 16)


def router_twice(tensors):
    tensors["model.layers.0.mlp.gate.weight"] = torch.zeros(3, 32)


def with_nan(scales):
    scales.view(torch.uint8)[3, 0] = 0x7F
    return scales


PLAIN = "model.layers.1.block_sparse_moe.experts"
BROKEN = [
    (without("1"), rf"tensor '{FILE}.1.w1.weight' is missing"),
    (without("2"), rf"tensor '{FILE}.2.w1.weight' is missing"),
    (without("0.w3"), rf"tensor '{FILE}.0.w3.weight' is missing"),
    (lambda t: t.pop(f"{FILE}.1.w2.weight_scale"), rf"tensor '{FILE}.1.w2.weight_scale' is missing"),
    (lambda t: t.pop(f"{PLAIN}.1.w2.weight"), rf"tensor '{PLAIN}.1.w2.weight' is missing"),
    (lambda t: t.update({f"{PLAIN}.1.w2.weight": torch.zeros(16, 16)}), rf"layer '{PLAIN}.1.w2': the file has out and"),
    (lambda t: t.update({f"{PLAIN}.1.w2.weight": torch.ones(32, 16).half()}), rf"{PLAIN}.0.w2' and '{PLAIN}.1.w2' are"),
    (smaller, rf"layer '{FILE}.2.w1': the file has out and in features \(8, 32\), .* the model has \(16, 32\)"),
    (changed("2.w2.weight", lambda t: t.T), rf"'{FILE}.2.w2.weight_scale': expected shape .* of '{FILE}.2.w2.weight'"),
    (changed("0.w1.weight_scale", lambda t: t.T), rf"tensor '{FILE}.0.w1.weight_scale': expected shape \(16, 2\)"),
    (changed("1.w2.weight_scale", lambda t: t.float()), rf"'{FILE}.1.w2.weight_scale': expected torch.float8_e4m3fn"),
    (changed("1.w2.weight", lambda t: t.view(torch.int8)), rf"tensor '{FILE}.1.w2.weight': expected torch.uint8"),
    (changed("2.w3.weight_scale_2", lambda t: t.double()), rf"'{FILE}.2.w3.weight_scale_2': expected one float32"),
    (lambda t: t.update({f"{FILE}.1.w1.weight_shift": torch.ones(1)}), rf"the model has no '{FILE}.1.w1.weight_shift'"),
    (changed("1.w3.weight_scale", with_nan), rf"tensor '{FILE}.1.w3.weight_scale': has scales that are NaN"),
    (changed("1.w3.weight_scale_2", lambda t: 1 / t), rf"'{FILE}.1.w3.weight_scale_2': .*looks like a divisor"),
    (unquantised, rf"layers '{FILE}.0.w1' and '{FILE}.1.w3' are nvfp4 with activations in nvfp4 and torch.float32"),
    (one_more, rf"the model has no '{FILE}.3.w"),
    (plain_twice, rf"the experts '{FILE}' and another tensor are both '{MODEL}.down_proj' of the model"),
    (router_twice, r"are both 'model.layers.0.mlp.gate.weight' of the model"),
]  # fmt: skip


def sharded(folder, tensors, where, **more):
    """Tensors in the shards that `where` gives their names, beside what an index says; more: shards with tensors."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    shards = {name: where(name) for name in tensors}
    for shard in {*shards.values(), *more}:
        part = {name: tensors[name] for name in tensors if shards[name] == shard}
        save_file(part | more.get(shard, {}), folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return shards


def test_broken_experts_are_refused_and_change_nothing(tmp_path):
    model = fresh_model()
    before = {name: (id(t), t.clone()) for name, t in model.named_parameters()}
    for i, (corrupt, message) in enumerate(BROKEN):
        folder, tensors = tmp_path / str(i), tensors_of(MIXTRAL)
        shutil.copytree(MIXTRAL, folder)
        corrupt(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ValueError, match=message) as caught, warnings.catch_warnings(action="error"):
            fp4compile.load_packed(model, folder)
        assert str(folder) in str(caught.value)
        after = dict(model.named_parameters())
        assert before.keys() == after.keys()
        assert all(id(after[n]) == address and torch.equal(after[n], t) for n, (address, t) in before.items())


def test_models_without_such_experts_refuse_them():
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=32,
                                  num_attention_heads=2)  # fmt: skip
    with pytest.raises(ValueError, match=rf"no layer '{FILE}.0.w"):
        fp4compile.load_packed(AutoModelForCausalLM.from_config(config), MIXTRAL)


# ---------------------------------------------------------------- writing


def test_what_modelopt_wrote_is_written_again_bit_for_bit(tmp_path):
    fp4compile.export_packed(loaded(), tmp_path / "again")
    assert bits(tensors_of(tmp_path / "again")) == bits(tensors_of(MIXTRAL))
    excluded = json.loads((tmp_path / "again" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    experts = [f"{PLAIN}.{expert}.{leaf}" for expert in range(3) for leaf in ("w1", "w2", "w3")]
    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in (0, 1)]
    assert set(excluded) == {"lm_head", "model.embed_tokens", *routers, *experts}


def test_experts_whose_names_are_not_known_are_not_written(tmp_path):
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_oss", hidden_size=32, intermediate_size=32, num_hidden_layers=1, vocab_size=32,
                             num_local_experts=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    )  # fmt: skip
    fp4compile.pack_(model, {"recipe": "mxfp8", "min_n": 1, "min_k": 1})
    with pytest.raises(ValueError, match=r"experts.*_packed' has its weight as \[in, out\]"):
        fp4compile.export_packed(model, tmp_path / "no")

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj = torch.nn.Parameter(torch.randn(2, 32, 32))

    own = torch.nn.ModuleDict({"experts": Own()})
    fp4compile.pack_(own, {"recipe": "mxfp8", "min_n": 1, "min_k": 1}, contracted={"*": -1})
    with pytest.raises(ValueError, match="'experts.up_proj_packed' has packed experts, whose names .* not known"):
        fp4compile.export_packed(own, tmp_path / "no")


def moe_in_blocks(rows):
    """A model with packed experts whose gate and up have a number of rows, in FP8 blocks of 128x128."""
    config = AutoConfig.for_model("qwen3_moe", hidden_size=128, intermediate_size=128, moe_intermediate_size=rows,
                                  num_experts=2, num_experts_per_tok=1, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=2, vocab_size=32)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fp4compile.pack_(model, "float8_block")
    return model, fresh


@pytest.mark.parametrize("layout", ["fp8", "compressed-tensors"])
def test_blocks_that_span_gate_and_up_are_not_written(layout, tmp_path):
    """Each file of 96 rows would have one scale, as it should, and the one for the wrong rows."""
    model, _ = moe_in_blocks(96)
    with pytest.raises(ValueError, match=f"'{MODEL}.gate_up_proj' is packed in float8_128x128.*have 96 rows each"):
        fp4compile.export_packed(model, tmp_path / "no", layout=layout)
    assert not [*tmp_path.glob("no/*.safetensors")]


def test_blocks_within_gate_and_up_are_written(tmp_path):
    model, fresh = moe_in_blocks(128)
    fp4compile.export_packed(model, tmp_path / "blocks", layout="fp8")
    fp4compile.load_packed(fresh, tmp_path / "blocks")
    assert torch.equal(fresh.get_submodule(MODEL).gate_up_proj, model.get_submodule(MODEL).gate_up_proj)
