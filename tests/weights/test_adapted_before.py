"""`pack_` after `get_peft_model`, which packs what `pack_` before it packs; and what is trained stays trained."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fp4compile
from fp4compile.analysis.module_names import ADAPTER, TRAINED_COPY
from fp4compile.weights.buffers import LayerFormat, PackedWeight
from fp4compile.weights.decide import TRAINED
from fp4compile.weights.linear import PackedLinear

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
IDS = torch.arange(32).view(2, 16)


@pytest.fixture(scope="module")
def moe() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=128, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=64, n_layer=1, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def in_both_orders(base: nn.Module, recipe: str | dict = "mxfp8", **options) -> list[nn.Module]:
    """The packed model with adapters: packed before the adapters, and after."""
    found = []
    for packed_first in (True, False):
        model = copy.deepcopy(base)
        if packed_first:
            fp4compile.pack_(model, recipe)
        torch.manual_seed(1)
        config = {"r": 4, "lora_alpha": 8, "init_lora_weights": False} | options
        model = peft.get_peft_model(model, peft.LoraConfig(**config))
        trained = trainable(model)
        if not packed_first:
            fp4compile.pack_(model, recipe)
        assert trainable(model) == trained
        found.append(model.eval())
    return found


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def packed(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def step(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits, and the gradient of each trained parameter."""
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    return output.logits, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def assert_equal_steps(one: nn.Module, other: nn.Module) -> None:
    (logits, gradients), (others, other_gradients) = step(one), step(other)
    assert torch.equal(logits, others) and gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradient, other_gradients[name]) for name, gradient in gradients.items())


RULES = {"recipe": "mxfp8", "rules": [["*q_proj", "skip"], ["model.layers.0.self_attn.v_proj", "nvfp4"]]}
CASES = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "head saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "router": {"target_modules": ["q_proj"], "modules_to_save": ["gate"]},
    "bias": {"target_modules": ["q_proj"], "bias": "all"},
    "experts": {
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_order_does_not_matter(case, moe):
    before, after = in_both_orders(moe, RULES, **CASES[case])
    assert packed(before) == packed(after)
    assert {name for name in packed(after) if "lm_head" in name or "gate." in name or "q_proj" in name} == set()
    assert after.get_submodule(next(n for n in packed(after) if "v_proj" in n)).layer_format.weight == "nvfp4"
    assert_equal_steps(before, after)


def test_the_report_names_layers_as_rules_do(moe):
    model = peft.get_peft_model(
        copy.deepcopy(moe), peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    report = fp4compile.pack_(model, RULES)
    found = {row.module: (row.name, row.reason) for row in report.rows}
    layer = "model.layers.0"
    prefix = f"base_model.model.{layer}"
    assert found[f"{prefix}.self_attn.q_proj.base_layer"] == (f"{layer}.self_attn.q_proj", "rule '*q_proj'")
    assert found[f"{prefix}.self_attn.q_proj.lora_A.default"][1] == ADAPTER
    assert found["base_model.model.lm_head.original_module"] == ("lm_head", "output head")
    assert found["base_model.model.lm_head.modules_to_save.default"] == ("lm_head", TRAINED_COPY)


def test_adapters_of_experts_add_to_the_dequantised_weights(moe, tmp_path):
    """Adapters of an unpacked model are loaded onto the packed one, merged into it, and switched off."""
    names = {"target_modules": ["q_proj"], "target_parameters": CASES["experts"]["target_parameters"]}
    trained = peft.get_peft_model(copy.deepcopy(moe), peft.LoraConfig(r=4, init_lora_weights=False, **names))
    trained.save_pretrained(tmp_path)
    base = copy.deepcopy(moe)
    fp4compile.pack_(base, {"recipe": "nvfp4_weight_only", "skip_lm_head": True})
    plain = copy.deepcopy(moe)
    for name, module in base.named_modules():
        if isinstance(module, PackedWeight):
            plain.get_parameter(
                name.removesuffix("_packed") if "experts" in name else f"{name}.weight"
            ).data = module.dequantised()
    want = base(input_ids=IDS).logits
    loaded, expected = (peft.PeftModel.from_pretrained(one, tmp_path).eval() for one in (base, plain))
    logits = loaded(input_ids=IDS).logits
    torch.testing.assert_close(logits, expected(input_ids=IDS).logits)
    assert (logits - want).norm() > 0.01 * want.norm()
    assert torch.equal(torch.compile(loaded, backend="eager")(input_ids=IDS).logits, logits)
    with loaded.disable_adapter():
        assert torch.equal(loaded(input_ids=IDS).logits, want)
    with pytest.warns(UserWarning, match="packed them again"):
        merged = loaded.merge_and_unload()
    summed = expected.merge_and_unload()
    fp4compile.pack_(summed, "nvfp4_weight_only")
    for child in ("gate_up_proj_packed", "down_proj_packed"):
        one, other = (model.model.layers[0].mlp.experts.get_submodule(child) for model in (merged, summed))
        assert torch.equal(one.weight_data, other.weight_data)


# ---------------------------------------------------------------- Conv1D


@pytest.mark.parametrize("dora", (False, True), ids=("lora", "dora"))
@pytest.mark.parametrize("target", ("attn.c_proj", "c_attn"), ids=("square", "wide"))
def test_conv1d(target, dora, gpt2):
    """Both orders compute and merge as the model with dequantised weights does, up to the codes of the sum."""
    options = {"target_modules": [target], "use_dora": dora, "fan_in_fan_out": True}
    recipe = "nvfp4_weight_only"
    base, plain = copy.deepcopy(gpt2), copy.deepcopy(gpt2)
    fp4compile.pack_(base, recipe)
    for name, module in base.named_modules():
        if isinstance(module, PackedWeight):
            plain.get_submodule(name).weight.data = module.weight.clone()
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)
    expected = peft.get_peft_model(plain, config).eval()
    adapters = {name: value for name, value in expected.state_dict().items() if "lora_" in name}
    models = in_both_orders(gpt2, recipe, **options)
    for model in models:
        model.load_state_dict(adapters, strict=False)
        torch.testing.assert_close(model(input_ids=IDS).logits, expected(input_ids=IDS).logits)
    with pytest.warns(UserWarning, match="packed them again"):
        merged = [model.merge_and_unload().transformer.h[0].attn for model in models]
    summed = expected.merge_and_unload()
    fp4compile.pack_(summed, recipe)
    name = target.rpartition(".")[2]
    for attention in merged:
        layer, other = attention.get_submodule(name), summed.transformer.h[0].attn.get_submodule(name)
        assert isinstance(layer, transformers.pytorch_utils.Conv1D) and layer.weight.shape == (64, layer.nf)
        assert torch.equal(layer.weight_data, other.weight_data)


def test_a_packed_conv1d_is_copied_and_pickled(gpt2):
    model = copy.deepcopy(gpt2)
    fp4compile.pack_(model, "mxfp8")
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        layer = other.transformer.h[0].attn.c_attn
        assert type(layer) is type(model.transformer.h[0].attn.c_attn) and repr(layer).startswith(
            "PackedConv1D(64, 192"
        )
        assert torch.equal(other(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_an_older_pickle_of_a_packed_conv1d_loads():
    """It was a PackedLinear, whose weight is [out, in]; what is written to it has that shape."""
    old = PackedLinear(40, 72, LayerFormat("mxfp8", None), None)
    values = torch.randn(40, 72)
    old.in_first = True
    old.store(values)
    vars(old)["weight_dtype"] = torch.float32  # now it is its name
    del old._weight_dtype
    layer = pickle.loads(pickle.dumps(old))
    assert torch.equal(layer.weight, fp4compile.quantize(values, "mxfp8", dim=0).dequantize())
    with pytest.warns(UserWarning, match="packed them again"):
        layer.weight.data = 2 * layer.weight
    assert torch.equal(layer.weight, 2 * fp4compile.quantize(values, "mxfp8", dim=0).dequantize())


# ---------------------------------------------------------------- trained without peft


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))


def test_what_requires_a_gradient_among_frozen_weights_stays():
    model = layers()
    model[0].requires_grad_(False)
    recipe = {"recipe": "mxfp8", "skip_lm_head": False}
    with pytest.warns(UserWarning, match=r"2 weights require a gradient, such as that of '1', and others are frozen"):
        report = fp4compile.pack_(model, recipe)
    assert packed(model) == {"0"} and trainable(model) == {"1.weight", "2.weight"}
    assert [row.reason for row in report.rows] == [None, TRAINED, TRAINED]
    fp4compile.pack_(model.requires_grad_(False), recipe)
    assert packed(model) == {"0", "1", "2"}


@pytest.mark.parametrize("trained", (True, False))
def test_a_model_that_is_trained_or_frozen_as_a_whole_is_packed(trained, recwarn):
    model = layers().requires_grad_(trained)
    fp4compile.pack_(model, {"recipe": "mxfp8", "skip_lm_head": False})
    assert packed(model) == {"0", "1", "2"} and not [one for one in recwarn if "trained" in str(one.message)]


def test_a_frozen_embedding_and_its_head_are_no_sign():
    model = nn.ModuleDict({"embed": nn.Embedding(64, 64), "up": nn.Linear(64, 64), "head": nn.Linear(64, 64)})
    model["head"].weight = model["embed"].weight.requires_grad_(False)
    fp4compile.pack_(model, "mxfp8")
    assert packed(model) == {"up"}


def test_nothing_of_a_model_with_adapters_stops_being_trained():
    model = peft.get_peft_model(layers(), peft.LoraConfig(target_modules=["0"])).requires_grad_(True)
    before = trainable(model)
    with pytest.warns(UserWarning, match="3 weights require a gradient, .* and the model has adapters"):
        fp4compile.pack_(model, "mxfp8")
    assert trainable(model) == before


def test_adapters_in_inference_are_not_packed():
    model = peft.get_peft_model(layers(), peft.LoraConfig(r=64, target_modules=["0"], inference_mode=True))
    report = fp4compile.pack_(model, {"recipe": "mxfp8", "skip_lm_head": False, "rules": [["*", "quantize"]]})
    assert packed(model) == {f"base_model.model.{name}" for name in ("0.base_layer", "1", "2")}
    assert [row.reason for row in report.rows if "lora_" in row.module] == [ADAPTER, ADAPTER]


def test_a_packed_model_without_parameters_takes_adapters():
    model = layers()
    fp4compile.pack_(model, {"recipe": "mxfp8", "skip_lm_head": False})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
    assert len(trainable(adapted)) == 2 and not hasattr(model, "hf_device_map")


@pytest.mark.parametrize("kind", ({"peft_type": "P_TUNING"}, {"peft_type": "PREFIX_TUNING", "prefix_projection": True}),
                         ids=("p-tuning", "prefix tuning"))  # fmt: skip
def test_an_encoder_of_prompts_is_an_adapter(kind, moe):
    config = peft.get_peft_config(
        {"task_type": "CAUSAL_LM", "num_virtual_tokens": 32, "encoder_hidden_size": 64, "num_layers": 1} | kind
    )
    model = peft.get_peft_model(copy.deepcopy(moe), config).requires_grad_(False).train()
    for report in (fp4compile.explain(model, input_ids=IDS, recipe="mxfp8"), fp4compile.pack_(model, "mxfp8")):
        reasons = {row.reason for row in report.rows if "prompt_encoder" in row.module and row.product == "fprop"}
        assert reasons == {ADAPTER} and any(row.reason is None for row in report.rows)


def x_lora(base: nn.Module, folder) -> nn.Module:
    """A model with X-LoRA of one adapter."""
    adapted = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    adapted.save_pretrained(folder)
    model = copy.deepcopy(base)
    model.config.use_cache = False
    torch.manual_seed(1)
    config = {"hidden_size": 64, "xlora_depth": 2, "xlora_size": 32, "adapters": {"0": str(folder)}}
    return peft.get_peft_model(model, peft.XLoraConfig(task_type="CAUSAL_LM", **config)).eval()


def test_x_lora(moe, tmp_path):
    base = copy.deepcopy(moe)
    fp4compile.pack_(base, RULES)
    before, after = x_lora(base, tmp_path), x_lora(moe, tmp_path).requires_grad_(False)
    fp4compile.pack_(after, RULES)
    after.base_model.internal_xlora_classifier.requires_grad_(True)
    assert packed(before) == packed(after) and any("v_proj" in name for name in packed(after))
    assert not any("q_proj" in name or "classifier" in name for name in packed(after))
    assert_equal_steps(before, after)


def test_rules_match_layers_of_x_lora(moe, tmp_path):
    report = fp4compile.explain(x_lora(moe, tmp_path), input_ids=IDS, recipe=RULES)
    found = {row.module: row for row in report.rows if row.product == "fprop"}
    layer = "model.layers.0.self_attn"
    assert found[f"{layer}.q_proj"].reason == "rule '*q_proj'" and found[f"{layer}.v_proj"].right == "nvfp4"
    assert {row.reason for name, row in found.items() if "classifier" in name} == {ADAPTER}


def test_adaption_prompts(recwarn):
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128
    )
    torch.manual_seed(0)
    base, models = transformers.LlamaForCausalLM(config).eval(), []
    for packed_first in (True, False):
        model = copy.deepcopy(base)
        if packed_first:
            fp4compile.pack_(model, "mxfp8")
        options = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, options).eval()
        if not packed_first:
            fp4compile.pack_(model, "mxfp8")
        with torch.no_grad():
            model.get_submodule("base_model.model.model.layers.1.self_attn").adaption_gate.fill_(0.5)
        models.append(model)
    assert packed(models[0]) == packed(models[1]) and len(trainable(models[0])) == 2
    assert_equal_steps(*models)
    adapted = peft.get_peft_model(copy.deepcopy(base), options)
    fp4compile.pack_(adapted, {"recipe": "mxfp8", "rules": [["model.layers.*.self_attn.q_proj", "skip"]]})
    assert packed(adapted) == {name for name in packed(models[0]) if not name.endswith("q_proj")}
    assert not any("count as trained" in str(warning.message) for warning in recwarn)
