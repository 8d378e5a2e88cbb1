"""Models with experts as transformers has them: compiled or captured whole, against the same quantised by hand."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.analysis.find import find
from fp4compile.analysis.flops import count
from fp4compile.formats.grouping import Grouping
from fp4compile.hardware import Target
from fp4compile.ops.nodes import PRODUCTS, quantise_of
from fp4compile.ops.quantize import LAY_OUT_SCALES, QUANTIZE
from fp4compile.passes import quantize_before_index
from fp4compile.passes.lib.notes import fused, product_of
from fp4compile.recipe import named, resolve
from fp4compile.templates.launch import dry_run
from tests.fuzz.compare import captured
from tests.helpers.by_hand import assert_rounds_to
from tests.helpers.by_hand import by_hand as products_by_hand
from tests.helpers.hand_models import by_hand, experts_by_hand, gradients, sqnr
from tests.helpers.rewritten import UNEVEN, rewritten, roles

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")  # defines the operators

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


def model_of(name, dtype=torch.bfloat16):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **MODELS[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.set_experts_implementation("grouped_mm")
    return model


def tokens(length=9):
    return torch.randint(64, (2, length), generator=torch.Generator().manual_seed(3))


def trained(call, model, autocast):
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = call(input_ids=tokens(), labels=tokens(), use_cache=False)
    result.loss.backward()
    return result.logits, gradients(model)


def same_experts(name, recipe, dtype, autocast):
    """What the quantised model by hand computes, and that quantising shows."""
    plain, hand = model_of(name, dtype), by_hand(model_of(name, dtype), named(recipe))
    with experts_by_hand(named(recipe)):
        logits, expected = trained(hand, hand, autocast)
    assert sqnr(trained(plain, plain, autocast)[0], logits) < QUANTISED
    return logits, expected


def assert_trains_as_by_hand(name, dtype=torch.bfloat16, autocast=False):
    model = model_of(name, dtype)
    run, decisions = rewritten(lambda **inputs: model(**inputs), "mxfp8", skip_lm_head=True)
    logits, found = trained(run, model, autocast)
    expected_logits, expected = same_experts(name, "mxfp8", dtype, autocast)
    assert logits.dtype == expected_logits.dtype
    assert sqnr(expected_logits, logits) > SAME and found.keys() == expected.keys()
    assert min(sqnr(expected[each], found[each]) for each in expected) > SAME
    experts = [d for d in decisions if d.gemm.groups is not Grouping.DENSE]
    assert not any(d.reason for d in experts)
    products = {(d.gemm.module.rpartition(".")[2], d.gemm.product) for d in experts}
    assert products == {(w, p) for w in ("gate_up_proj", "down_proj") for p in ("fprop", "dgrad", "wgrad")}
    return decisions


@pytest.mark.parametrize("name", ["GptOss", "DeepseekV3"])  # Mixtral, whose experts Qwen3 has, is below
def test_models_train_as_by_hand(name):
    assert_trains_as_by_hand(name)


@pytest.mark.parametrize("autocast", [False, True])
def test_weights_in_float32_train_as_by_hand(autocast):
    """transformers' own operators multiply these, and read the sizes of the groups on the host."""
    decisions = assert_trains_as_by_hand("Mixtral", torch.float32, autocast)
    operators = {str(node.target) for graph in {d.gemm.node.graph for d in decisions} for node in graph.nodes}
    assert "fp4compile.scaled_mm.default" in operators
    assert not {name for name in operators if "fallback" in name}


def operands():
    """(x, w, offsets): 9 tokens and 3 experts, of which one has no token; 2 tokens of no expert."""
    w = torch.nn.Parameter(torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(1)))
    return torch.randn(9, 64).requires_grad_(), w, torch.tensor([2, 2, 7], dtype=torch.int32)


def fallback(x, w, offs):
    return torch.ops.transformers.grouped_mm_fallback(x, w.transpose(1, 2), offs)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_fallback_equals_hand_composition(frozen):
    """Results and gradients, and how these lie in memory."""
    x, w, offs = operands()
    w.requires_grad_(not frozen)
    run, decisions = rewritten(lambda x, offs: fallback(x, w, offs), UNEVEN, min_m=1)
    y = run(x, offs)
    dy = torch.randn(9, 32)
    dx, *dw = torch.autograd.grad(y, [x] if frozen else [x, w], dy)
    wgrad = [] if frozen else [("w", "wgrad", "mxfp8_e5m2 x mxfp8_ceil")]
    fprop, dgrad = ("w", "fprop", "mxfp8 x mxfp4"), ("w", "dgrad", "mxfp8_floor x mxfp8_e5m2")
    assert roles(decisions) == [fprop, dgrad, *wgrad]
    assert not y[7:].any() and not dx[7:].any() and not any(each[1].any() for each in dw)
    for expert, rows in ((0, slice(0, 2)), (2, slice(2, 7))):
        own = (x.detach()[rows], w.detach()[expert], None, dy[rows], torch.float32)
        exact = products_by_hand(resolve(UNEVEN), *own)
        found = (y.detach()[rows], dx[rows], *(each[expert] for each in dw))
        for ours, plain in zip(found, exact, strict=False):
            assert_rounds_to(ours.double(), plain, torch.float32)
    assert all(each.stride() == w.stride() for each in dw)  # so that nothing copies it


def test_what_of_the_fallback_is_left_alone():
    """A weight gradient in high precision is the operator's; so is all of a layer that a rule skips."""
    x, w, offs = operands()
    for options, quantised in (({"wgrad_dy": None, "wgrad_x": None}, 2), ({"rules": [("*", "skip")]}, 0)):
        run, decisions = rewritten(fallback, UNEVEN, min_m=1, **options)
        y, expected = run(x, w, offs), fallback(x, w, offs)
        (dx, dw), (plain_dx, plain_dw) = (torch.autograd.grad(z, (x, w), torch.ones(9, 32)) for z in (y, expected))
        assert torch.equal(y, expected) == torch.equal(dx, plain_dx) == (not quantised) and torch.equal(dw, plain_dw)
        assert [d.gemm.product for d in decisions] == ["fprop", "dgrad", "wgrad"]
        assert [d.reason is None for d in decisions].count(True) == quantised
    # Both gradients are results of one operator: each has half of its FLOPs.
    assert [count(d.gemm.node) for d in decisions] == 3 * [2 * 9 * 32 * 64]


def test_what_of_the_fallback_is_not_read():
    """Offsets and operands that it would not multiply as it is read."""
    x, w, offs = operands()

    def found(*arguments):
        with torch.no_grad():
            return find(make_fx(fallback, tracing_mode="fake")(*arguments).graph, ())

    for arguments, reason in (
        ((x, w, offs.long()), "grouped matmul with offsets of torch.int64"),
        ((x.bfloat16(), w, offs), "grouped matmul of operands of different dtypes"),
    ):
        assert [(one.product, one.unsupported) for one in found(*arguments)] == [("other", reason)]


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
        experts = [d for d in decisions if d.gemm.groups is not Grouping.DENSE]
        assert len(experts) == 2 and not any(d.reason for d in experts)
    assert torch.equal(*found)
    assert not [p for p in model.parameters() if p.dim() == 3]


def _graph_on(sm, model, recipe, without):
    """(logits, the graph after the passes for a GPU of that compute capability, whose launches cost nothing)."""
    torch._dynamo.reset()
    graphs = []

    def run(module):
        graphs.append(module.graph)
        return module.forward

    around, without = lambda: dry_run(Target(sm)), {"inplace", "lower", *without}
    backend = captured(SimpleNamespace(recipe=recipe), [], around, without, run)
    with torch.no_grad(), mock.patch.object(quantize_before_index, "LAUNCH_BYTES", 0):
        logits = torch.compile(model, backend=backend)(tokens(), use_cache=False).logits
    (graph,) = graphs
    return logits, graph


def _chain_to(node):
    """What the nodes from the quantiser of a grouped product's first operand to the product make."""
    chain, node = [], node.args[0]
    while node.target is not QUANTIZE:
        value = node.meta["val"]
        chain = [f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]} {node.target.__name__}", *chain]
        node = node.args[0]
    return [f"{[*quantise_of(node).x.meta['val'].shape]} quantize", *chain]


@pytest.mark.parametrize(("sm", "recipe", "before", "after"), [
    (100, "mxfp8", ["[144, 128] quantize", "float8_e4m3fn[144, 128] getitem"],
     ["[18, 128] quantize", "float8_e4m3fn[18, 128] getitem", "uint8[18, 128] view.dtype",
      "uint8[144, 128] index.Tensor", "float8_e4m3fn[144, 128] view.dtype"]),
    (90, "nvfp4_one_level", ["[144, 128] quantize", "float16[144, 128] getitem"],
     ["[18, 128] quantize", "float16[18, 128] getitem", "float16[144, 128] index.Tensor"]),
])  # fmt: skip
def test_tokens_are_quantised_once_for_all_their_experts(sm, recipe, before, after):
    """18 tokens with 8 experts each: codes and swizzled scales, or packed experts' 16-bit values. No bit changes."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 8}
    with mock.patch.dict(MODELS, {"Qwen3Moe": MODELS["Qwen3Moe"] | sizes}):
        model, recipe = model_of("Qwen3Moe"), named(recipe).replace(min_m=1)
    if sm == 90:
        fp4compile.pack_(model, recipe)
    found = [_graph_on(sm, model, recipe, without) for without in (("quantize_before_index",), ())]
    products = [next(node for node in graph.nodes if node.target in PRODUCTS and "offs" in node.kwargs)
                for _, graph in found]  # fmt: skip
    assert [*map(_chain_to, products)] == [before, after]
    laid_out = [graph.find_nodes(op="call_function", target=LAY_OUT_SCALES) for _, graph in found]
    assert [*map(len, laid_out)] == [0, sm == 100]
    assert torch.equal(*(logits for logits, _ in found))
    epilogue = "silu, mul, quantize; " if sm == 100 else ""
    assert fused(found[1][1])[product_of(products[1])] == f"{epilogue}quantised before index"


def test_the_experts_of_llama_4_are_known():
    from transformers.models.llama4.modeling_llama4 import Llama4TextConfig, Llama4TextExperts

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4}
    model = torch.nn.ModuleList([Llama4TextExperts(Llama4TextConfig(**sizes))])
    rows = fp4compile.pack_(model, named("nvfp4")).rows
    assert [(row.module, row.n, row.k, row.reason) for row in rows] == [
        ("0.gate_up_proj", 192, 64, None), ("0.down_proj", 64, 96, None),
    ]  # fmt: skip
