"""Models with experts as transformers has them: compiled or captured whole, against the same quantised by hand."""

import pytest
import torch

import fp4compile
from fp4compile.recipe import named
from tests.helpers.hand_models import by_hand, experts_by_hand, gradients, sqnr
from tests.helpers.rewritten import rewritten

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
         "num_key_value_heads": 2, "initializer_range": 0.2, "num_experts_per_tok": 2}  # fmt: skip
MODELS = {
    "Mixtral": {"intermediate_size": 96, "num_local_experts": 4},
    "GptOss": {"intermediate_size": 96, "num_local_experts": 4, "head_dim": 16},
    "Qwen3Moe": {"moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16},
    "DeepseekV3": {"num_key_value_heads": 4, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2,
                   "topk_group": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
                   "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 0},
}  # fmt: skip
SAME, QUANTISED = 30.0, 20.0  # dB: two computations of the same quantised model; more than quantising it keeps


def model_of(name, implementation="grouped_mm"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.set_experts_implementation(implementation)
    return model


def tokens(length=9):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(3))


def trained(call, model):
    result = call(input_ids=tokens(), labels=tokens(), use_cache=False)
    result.loss.backward()
    return result.logits, gradients(model)


def same_experts(name, recipe):
    """What the quantised model by hand computes, and that quantising shows."""
    plain, hand = model_of(name), by_hand(model_of(name), named(recipe))
    with experts_by_hand(named(recipe)):
        logits, expected = trained(hand, hand)
    assert sqnr(trained(plain, plain)[0], logits) < QUANTISED
    return logits, expected


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_by_hand(name):
    model = model_of(name)
    run, decisions = rewritten(lambda **inputs: model(**inputs), "mxfp8", skip_lm_head=True)
    logits, found = trained(run, model)
    expected_logits, expected = same_experts(name, "mxfp8")
    assert sqnr(expected_logits, logits) > SAME and found.keys() == expected.keys()
    assert min(sqnr(expected[each], found[each]) for each in expected) > SAME
    experts = [d for d in decisions if d.gemm.groups is not None]
    assert not any(d.reason for d in experts)
    products = {(d.gemm.module.rpartition(".")[2], d.gemm.product) for d in experts}
    assert products == {(w, p) for w in ("gate_up_proj", "down_proj") for p in ("fprop", "dgrad", "wgrad")}


def test_packed_models_compute_the_same():
    """Packed by `pack_`, every weight of linear layers and of experts is gone, and no bit of the logits changes.

    gpt-oss, which stores its weights the other way, is in `test_gpt_oss`.
    """
    recipe, found = named("nvfp4").replace(min_m=1), []
    for pack in (False, True):
        model = model_of("Qwen3Moe")
        if pack:
            rows = fp4compile.pack_(model, recipe).rows
            assert {row.reason for row in rows} <= {None, "output head", "router: its outputs choose among experts"}
        torch._dynamo.reset()
        run, decisions = rewritten(lambda model=model, **inputs: model(**inputs), recipe)
        with torch.no_grad():
            found.append(run(input_ids=tokens(), use_cache=False).logits)
        experts = [d for d in decisions if d.gemm.groups is not None]
        assert len(experts) == 2 and not any(d.reason for d in experts)
    assert torch.equal(*found)
    assert not [p for p in model.parameters() if p.dim() == 3]


def test_the_experts_of_llama_4_are_known():
    from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextExperts

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    model = torch.nn.ModuleList([Llama4TextExperts(Llama4TextConfig(**sizes))])
    rows = fp4compile.pack_(model, named("nvfp4")).rows
    assert [(row.module, row.n, row.k, row.reason) for row in rows] == [
        ("0.gate_up_proj", 192, 64, None), ("0.down_proj", 64, 96, None),
    ]  # fmt: skip
