"""`weight_scales`: the recipe's choice reaches every weight that is quantised once, and is told of elsewhere."""

import argparse
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile import Recipe
from fp4compile.ops.nodes import QUANTIZE
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.weights.buffers import packed_in
from fp4compile.weights.cache import form, packed_weight
from tests.helpers import without_codegen
from tests.helpers.graphs import compile_recorded

# Activations stay as they are, so that products differ by their weights alone. The last layer has another format.
RECIPE = Recipe(fprop_w="nvfp4", rules=[("2", "mxfp8"), ("4", "nvfp4_weight_only")])

# Results are below 1, so this is 16 units of their last place. Each is a float32 sum of 48 products of values that are
# such sums themselves; for 400 random inputs the differences were 1.5e-7 at most.
ROUNDING = {"rtol": 0, "atol": 1e-6}


def model_and_input():
    layers = [
        torch.nn.Linear(80, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 48),
        torch.nn.ReLU(),
        torch.nn.Linear(48, 40),
    ]
    return torch.nn.Sequential(*layers).eval(), torch.randn(8, 80)


def by_hand(model, x, rule):
    w = [fp4compile.quantize(model[i].weight.detach(), "nvfp4", scales=rule).dequantize() for i in (0, 4)]
    x = F.relu(F.linear(x, w[0], model[0].bias))
    a, b = (fp4compile.quantize(t.detach(), "mxfp8").dequantize() for t in (x, model[2].weight))
    return F.linear(F.relu(F.linear(a, b, model[2].bias)), w[1], model[4].bias)


@torch.no_grad()
def test_compiled_and_packed_weights_have_the_scales_asked_for():
    (model, x), recipe = model_and_input(), RECIPE.replace(weight_scales="mse")
    backend = fp4compile.backend(recipe)
    compiled, packed = torch.compile(model, backend=backend), copy.deepcopy(model)
    found = compiled(x)
    torch.testing.assert_close(found, by_hand(model, x, "mse"), **ROUNDING)
    assert not torch.allclose(found, by_hand(model, x, "amax"), rtol=1e-5, atol=1e-5)
    assert backend.report.counts["hoist"] == 3
    report = fp4compile.pack_(packed, recipe)
    torch.testing.assert_close(packed(x), found, rtol=1e-6, atol=1e-6)
    expected = {"0": "mse", "2": None, "4": "mse"}
    for rows in (backend.report.rows, report.rows, fp4compile.explain(model, x, recipe=recipe).rows):
        assert {row.module: row.weight_scales for row in rows} == expected
    assert "reference; weight scales mse" in str(backend.report) and "saved" not in str(backend.report)
    model[0].weight.mul_(2.0)  # the packed weight is made anew, by the same rule
    torch.testing.assert_close(compiled(x), by_hand(model, x, "mse"), **ROUNDING)


@torch.no_grad()
def test_weights_that_stay_in_the_graph_are_swept_there():
    (model, x), recipe = model_and_input(), RECIPE.replace(weight_scales="mse", weight_cache="off")
    compiled, recorder = compile_recorded(model, fp4compile.backend(recipe))
    torch.testing.assert_close(compiled(x), by_hand(model, x, "mse"), **ROUNDING)
    assert sum(graph.count("scale_rule=mse") for graph in recorder.graphs) == 2


def test_quantises_by_different_rules_are_neither_merged_nor_shared():
    """One op quantises both directions by the rule "amax" only."""
    quantize = torch.ops.fp4compile.quantize

    def function(x):
        return [quantize(x, "nvfp4", dim, scale_rule=rule)[0] for rule in ("mse", "mse", "amax") for dim in (-1, -2)]

    traced = make_fx(function)(torch.randn(32, 48))
    assert merge_quantize(traced.graph) == 1  # those by "amax"
    traced.recompile()
    # A pair by "mse", which the second pair was too; one op for both by "amax".
    assert len(traced.graph.find_nodes(op="call_function", target=QUANTIZE)) == 3
    x = torch.randn(32, 48)
    for got, expected in zip(traced(x), function(x), strict=True):
        assert torch.equal(got, expected)


def test_trained_weights_are_scaled_by_their_amax_and_the_report_says_so():
    model, x = model_and_input()
    backend = fp4compile.backend(RECIPE.replace(weight_scales="mse"))
    found = torch.compile(model, backend=backend)(x)
    torch.testing.assert_close(found, by_hand(model, x, "amax"), rtol=1e-5, atol=1e-5)
    assert {row.module: row.weight_scales for row in backend.report.rows if row.product == "fprop"} == {
        "0": "amax (training)", "2": None, "4": "amax (training)"
    }  # fmt: skip
    assert "amax (training)" in str(backend.report)


@pytest.mark.parametrize("nested_first", [False, True])
def test_a_graph_trains_though_no_product_is_a_gradient(nested_first, monkeypatch):
    """A bias alone is trained here. Before the layer there may be a region, whose body has no gradients."""
    without_codegen.install(monkeypatch)
    layer = torch.nn.Linear(64, 48)
    layer.weight.requires_grad_(False)
    other = torch.randn(64, 64)

    def model(x):
        if nested_first:
            x = torch.cond(x.sum() > 0, lambda x: x @ other, lambda x: x @ other.t(), (x,))
        return layer(x)

    for trained, expected in ((True, "amax (training)"), (False, "mse")):
        torch._dynamo.reset()
        backend = fp4compile.backend("nvfp4", weight_scales="mse")
        with torch.set_grad_enabled(trained):
            torch.compile(model, backend=backend)(torch.randn(8, 64))
        assert [row.weight_scales for row in backend.report.quantised] == [expected]


class Routed(torch.nn.Module):
    """A linear layer, and experts of one wide range, stored as [experts, out, in] or (in_first) [experts, in, out]."""

    class Experts(torch.nn.Module):
        def __init__(self, in_first):
            super().__init__()
            self.is_transposed = in_first
            w = (torch.randn(3, 48, 64) * torch.tensor([1, 8, 0.1]).view(3, 1, 1)).bfloat16()
            self.up_proj = torch.nn.Parameter(w.mT.contiguous() if in_first else w)

        def forward(self, x, offs):
            return F.grouped_mm(x, self.up_proj if self.is_transposed else self.up_proj.mT, offs=offs)

    def __init__(self, in_first):
        super().__init__()
        self.up = torch.nn.Linear(80, 64, bias=False).bfloat16()
        self.experts = self.Experts(in_first)

    def forward(self, x, offs):
        return self.experts(self.up(x), offs)


def routed_by_hand(model, x, offs, a_format, w_format, rule="mse"):
    """Eager calls alone."""
    up, experts = model.up.weight.detach(), model.experts.up_proj.detach()
    up = fp4compile.quantize(up, w_format, scales=rule)
    dim = -2 if model.experts.is_transposed else -1
    experts = fp4compile.quantize(experts, w_format, dim=dim, per_matrix=True, scales=rule)
    hidden = fp4compile.scaled_mm(fp4compile.quantize(x, a_format), up, out_dtype=torch.bfloat16)
    return fp4compile.scaled_grouped_mm(fp4compile.quantize(hidden, a_format, offs=offs), experts, offs)


@pytest.mark.parametrize(("formats", "in_first"), [
    (("nvfp4", "nvfp4"), True), (("nvfp4_te", "nvfp4_16x16"), False), (("nvfp4_te", "nvfp4_16x16"), True),
])  # fmt: skip
@torch.no_grad()
def test_linear_layers_and_experts_have_the_bits_of_eager_calls_on_every_way(formats, in_first, tmp_path, monkeypatch):
    """In the graph, after a change of the weights, packed, and packed and loaded; square blocks too."""
    without_codegen.install(monkeypatch)
    model, x, offs = Routed(in_first).eval(), torch.randn(12, 80).bfloat16(), torch.tensor([4, 4, 12]).int()
    a_format, w_format = formats
    recipe = Recipe(fprop_x=a_format, fprop_w=w_format, min_m=1, min_n=1, min_k=1, weight_scales="mse")

    def compiled(model):
        torch._dynamo.reset()
        return torch.compile(model, backend=fp4compile.backend(recipe, strict=True))

    quantising = compiled(model)
    quantising(x, offs)
    for weight in model.parameters():
        weight.mul_(1.3)
    expected = routed_by_hand(model, x, offs, *formats)
    assert torch.equal(quantising(x, offs), expected)
    assert not torch.equal(expected, routed_by_hand(model, x, offs, *formats, "amax"))
    packed, fresh = copy.deepcopy(model), Routed(in_first)
    report = fp4compile.pack_(packed, recipe)
    assert {row.module: (row.reason, row.weight_scales) for row in report.rows} == {
        "up": (None, "mse"), "experts.up_proj": (None, "mse")
    }  # fmt: skip
    fp4compile.save_packed(packed, tmp_path / "packed.safetensors")
    fp4compile.load_packed(fresh, tmp_path / "packed.safetensors")
    for one in (packed, fresh):
        assert torch.equal(compiled(one)(x, offs), expected)
        assert {layer.layer_format.scale_rule for layer in packed_in(one).values()} == {"mse"}, "what packs it again"


def test_packed_weights_of_two_rules_are_kept_apart():
    weight = torch.nn.Parameter(torch.randn(48, 64))
    for dim in (-1, 0):
        each = {rule: packed_weight(weight, form("nvfp4", dim, scale_rule=rule))[0] for rule in ("amax", "mse")}
        for rule, data in each.items():
            assert torch.equal(data, fp4compile.quantize(weight, "nvfp4", dim=dim, scales=rule).data)
        assert len({data.data_ptr() for data in each.values()}) == 2


def test_the_choice_goes_with_the_recipe(tmp_path):
    recipe = fp4compile.backend("nvfp4", weight_scales="mse").recipe
    assert recipe.digest != fp4compile.backend("nvfp4").recipe.digest
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    (tmp_path / "recipe.toml").write_text('recipe = "nvfp4"\nweight_scales = "mse"\n')
    assert Recipe.from_toml(tmp_path / "recipe.toml") == recipe
    parser = argparse.ArgumentParser()
    fp4compile.add_arguments(parser)
    args = parser.parse_args(["--fp4compile-recipe", "nvfp4", "--fp4compile-set", "weight_scales=mse"])
    assert Recipe.from_args(args) == recipe
    assert [recipe.scale_rule(name) for name in ("nvfp4", "nvfp4_16x16", "nvfp4_rowwise", "mxfp8", None)] == [
        "mse", "mse", "amax", "amax", "amax"
    ]  # fmt: skip


def test_a_choice_that_no_weight_could_take_is_refused():
    for name in ("mxfp8", "nvfp4_rowwise"):
        with pytest.raises(ValueError, match=f"weight_scales='mse': needs an NVFP4 format .* got {name}"):
            Recipe(fprop_w=name, weight_scales="mse")
    with pytest.raises(ValueError, match="weight_scales='mse': .* got None"):
        Recipe(weight_scales="mse")
    with pytest.raises(ValueError, match="weight_scales: unknown rule 'msee'. Did you mean 'mse'"):
        fp4compile.backend("nvfp4", weight_scales="msee")
    with pytest.raises(ValueError, match="weight_scales: unknown rule 'msee'"):
        Recipe(fprop_w="mxfp8", rules=[("0", "nvfp4")], weight_scales="msee")
    with pytest.raises(TypeError, match="weight_scales: expected a str, got bool"):
        fp4compile.backend("nvfp4", weight_scales=True)
    Recipe(fprop_w="mxfp8", rules=[("0", "nvfp4")], weight_scales="mse")  # the layer of a rule can take it


@torch.no_grad()
def test_small_weights_in_one_level_nvfp4_are_warned_of():
    """The smallest block scale of torchao's one-level contract is 2^-6, whatever the weight's magnitude."""
    x = torch.randn(8, 128)
    for std, decibels in ((0.005, 7), (0.001, 0)):
        layer = torch.nn.Linear(128, 128)
        layer.weight.normal_(std=std, generator=torch.Generator().manual_seed(0))
        message = rf"weight of shape \(128, 128\): SQNR {decibels} dB in nvfp4_one_level, which has no global scale"
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match=message):
            torch.compile(layer, backend=fp4compile.backend("nvfp4_one_level"))(x)
        with pytest.warns(UserWarning, match=message):
            fp4compile.pack_(torch.nn.Sequential(layer), "nvfp4_one_level")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for recipe, std in (("nvfp4_one_level", 0.03), ("nvfp4", 0.001)):
            layer = torch.nn.Linear(128, 128)
            layer.weight.normal_(std=std)
            fp4compile.pack_(torch.nn.Sequential(layer), recipe)
