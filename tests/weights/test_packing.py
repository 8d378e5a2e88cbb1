"""`pack_`: the results of the compiled model with less memory, and what stays as it is, with the reason."""

import weakref

import pytest
import torch

import fp4compile
from fp4compile.analysis.plan import NOT_CALIBRATED
from fp4compile.recipe import named, recipes
from fp4compile.weights.linear import PackedLinear
from fp4compile.weights.replacements import Weight
from tests.helpers import without_codegen
from tests.helpers.packed_models import TOKENS, Net, Twice, recipe_of
from tests.helpers.rewritten import rewritten


def test_weights_are_freed_as_it_goes(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(5)])
    weights = [weakref.ref(layer.weight) for layer in model]
    alive, pack = [], Weight.pack

    def counted(*args):
        alive.append(sum(weight() is not None for weight in weights))
        return pack(*args)

    monkeypatch.setattr(Weight, "pack", counted)
    fp4compile.pack_(model, "nvfp4")
    assert alive == [5, 4, 3, 2, 1]


def by_backend(model, recipe):
    """The model as the backend rewrites its graphs, which then run as they are."""
    return rewritten(model, recipe)[0]


@pytest.mark.parametrize(("name", "autocast"), [
    *((name, False) for name in recipes()),
    *((name, True) for name in ("nvfp4", "nvfp4_weight_only")),
])  # fmt: skip
def test_packed_model_computes_what_the_backend_does(name, autocast):
    model, recipe = Net(), recipe_of(name)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = by_backend(model, recipe)(TOKENS)
        report = fp4compile.pack_(model, recipe)
        assert torch.equal(model(TOKENS), expected)
        assert torch.equal(by_backend(model, recipe)(TOKENS), expected)
    assert [(row.left, row.right) for row in report.quantised] == [(recipe.fprop_x, recipe.fprop_w)] * 2


@pytest.mark.parametrize("autocast", [False, True])
def test_packed_model_computes_what_the_compiled_model_does(autocast):
    recipe = named("mxfp8").replace(rules=[("layers.0", "nvfp4_rowwise")])
    model = Net()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = torch.compile(model, backend=fp4compile.backend(recipe))(TOKENS)
        fp4compile.pack_(model, recipe)
        if not autocast:  # eager rounds to bf16 after every operation, compiled code after every fused loop
            torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
        backend = fp4compile.backend(recipe, strict=True)
        torch.testing.assert_close(torch.compile(model, backend=backend)(TOKENS), expected, rtol=1e-5, atol=1e-5)
    packed = [(row.left, row.right) for row in backend.report.quantised]
    assert packed == [("nvfp4_rowwise", "nvfp4_te"), ("mxfp8", "mxfp8")]


def test_report_and_memory():
    model = Net().bfloat16()
    before = sum(p.numel() * p.element_size() for p in model.layers.parameters())
    report = fp4compile.pack_(model, "nvfp4")
    reasons = {row.module: row.reason for row in report.rows}
    assert reasons == {"layers.0": None, "layers.1": None, "lm_head": "output head"}
    assert all(isinstance(layer, PackedLinear) for layer in model.layers)
    after = sum(t.numel() * t.element_size() for t in (*model.layers.buffers(), *model.layers.parameters()))
    assert after < 0.3 * before
    assert model.lm_head.weight is model.embed.weight


def test_a_bare_layer_cannot_be_replaced():
    with pytest.raises(ValueError, match="model: a single linear layer"):
        fp4compile.pack_(torch.nn.Linear(64, 64), "mxfp8")


@pytest.mark.parametrize("model", [None, torch.zeros(3), torch.nn.Linear, lambda x: x])
def test_what_is_no_module(model):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got"):
        fp4compile.pack_(model, "nvfp4")


# ---------------------------------------------------------------- layers with two names, weights with two layers


def test_a_layer_with_two_names_is_one():
    model, x = Twice(), torch.randn(3, 64)
    recipe = named("mxfp8").replace(rules=[("*2", "nvfp4_weight_only")])
    with torch.no_grad():
        expected = by_backend(model, recipe)(x)
    weights = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    report = fp4compile.pack_(model, recipe)
    assert isinstance(model.a, PackedLinear) and model.a is model.b and model.one is model.two
    assert [row.module for row in report.rows] == ["a", "one.0", "one.2"]
    assert not any(weight() is not None for weight in weights)
    with torch.no_grad():
        assert torch.equal(model(x), expected)


def test_names_that_the_recipe_treats_differently():
    model = Twice()
    layer = model.a
    report = fp4compile.pack_(model, named("mxfp8").replace(rules=[("b", "skip")]))
    assert model.a is model.b is layer
    assert report.rows[0].reason == "the recipe treats it differently under its names a, b"


def test_a_static_scale_under_either_name():
    model = Twice()
    report = fp4compile.pack_(model, named("nvfp4_static").replace(static_scales={"b": 0.5}))
    assert model.a.layer_format.activation_outer == 0.5 and model.a is model.b
    # The others have none, and compute it.
    assert [row.note for row in report.rows] == [None, NOT_CALIBRATED, NOT_CALIBRATED]


def test_a_rules_recipe_says_whether_scales_are_static():
    scales, found = {"a": 0.5}, []
    for recipe, rule in (("mxfp8", ("[ab]", "nvfp4_static")), ("nvfp4_static", ("*.?", "mxfp8"))):
        model = Twice()
        report = fp4compile.pack_(model, named(recipe).replace(rules=[rule], static_scales=scales))
        found.append([layer.layer_format.activation_outer for layer in (model.a, model.one[0], model.one[2])])
        assert [row.note for row in report.rows] == [None, None, None]
    assert found == [[0.5, None, None]] * 2
    assert model.one[0].layer_format.activation_outer is None and all(row.quantised for row in report.rows)


def test_a_weight_of_two_linear_layers_stays():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=i > 0) for i in range(3)))
    model[2].weight = model[0].weight
    report = fp4compile.pack_(model, "nvfp4")
    reasons = [row.reason for row in report.rows]
    assert reasons == ["its weight is that of '2' too", None, "its weight is that of '0' too"]
    assert type(model[0]) is type(model[2]) is torch.nn.Linear and model[2].weight is model[0].weight
    assert isinstance(model[1], PackedLinear)


def test_a_head_of_an_embedding_is_packed_where_the_recipe_says_so():
    model, recipe = Net(), named("nvfp4").replace(skip_lm_head=False)
    with torch.no_grad():
        expected = by_backend(model, recipe)(TOKENS)
        report = fp4compile.pack_(model, recipe)
        assert torch.equal(model(TOKENS), expected)
    assert all(row.quantised for row in report.rows) and isinstance(model.lm_head, PackedLinear)


def test_a_tied_head_is_one_whatever_its_name():
    model = Net()
    model.to_words = model.lm_head
    del model.lm_head
    report = fp4compile.pack_(model, "nvfp4")
    assert [(row.module, row.reason) for row in report.rows][2] == ("to_words", "output head")
    assert model.to_words.weight is model.embed.weight


# ---------------------------------------------------------------- names and rules


def test_rules_that_match_nothing():
    model = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(64, 2), "mlp": torch.nn.Linear(64, 64)})
    rules = [("mlp", "nvfp4"), ("attn.in_proj*", "skip"), ("*.mlp", "skip"), ("atn.*", "skip")]
    with pytest.warns(UserWarning) as caught:
        fp4compile.pack_(model, named("mxfp8").replace(rules=rules))
    said = [str(warning.message) for warning in caught if "rule" in str(warning.message)]
    assert len(said) == 2 and "rule '*.mlp' decides for no layer" in said[0] and "rule 'atn.*'" in said[1]
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="the model has no layer"):
        fp4compile.pack_(torch.nn.ReLU(), named("mxfp8").replace(rules=rules[:1]))


@pytest.mark.parametrize("sizes", ({}, {"kdim": 32, "vdim": 48}))
def test_attention_of_torch_keeps_its_projections_and_says_so(sizes):
    model = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(64, 2, batch_first=True, **sizes)})
    report = fp4compile.pack_(model, "mxfp8")
    inputs = [(192, 64, "in_proj")] if not sizes else [(64, 64, "q_proj"), (64, 32, "k_proj"), (64, 48, "v_proj")]
    assert [(row.n, row.k, row.module) for row in report.rows] == [
        (64, 64, "attn.out_proj"), *((n, k, f"attn.{name}_weight") for n, k, name in inputs)
    ]  # fmt: skip
    assert {row.reason for row in report.rows} == {"nn.MultiheadAttention multiplies it without calling a layer"}


def test_compiled_attention_of_torch_is_quantised_instead(monkeypatch):
    """What docs/report.md advises. As long as the fast path may be taken, there is one operator for all of it."""
    without_codegen.install(monkeypatch)
    layer, x = torch.nn.TransformerEncoderLayer(64, 2, 96, batch_first=True).eval(), torch.randn(2, 5, 64)
    fp4compile.pack_(layer, "mxfp8")
    backend = fp4compile.backend("mxfp8")
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            torch.compile(layer, backend=backend)(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert {(row.module, row.right) for row in backend.report.quantised} == {
        (name, "mxfp8") for name in ("self_attn.in_proj_weight", "self_attn.out_proj", "linear1", "linear2")
    }


# ---------------------------------------------------------------- transformers' Conv1D


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_train", "mxfp8_32x32", "float8_rowwise", "nvfp4_weight_only"])
def test_conv1d(name, autocast):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    # 40 in features are no multiple of a block, and 72 out features would be padded otherwise.
    model, recipe = torch.nn.Sequential(conv1d(72, 40), torch.nn.Tanh(), torch.nn.Linear(72, 33)), named(name)
    weight, x = model[0].weight.detach().clone(), torch.randn(2, 3, 40)
    torch.nn.init.normal_(model[0].bias)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = by_backend(model, recipe)(x)
        report = fp4compile.pack_(model, recipe)
        assert torch.equal(model(x), expected)
    assert [(row.module, row.n, row.k, row.right) for row in report.rows] == [
        ("0", 72, 40, recipe.fprop_w), ("2", 33, 72, recipe.fprop_w),
    ]  # fmt: skip
    assert (model[0].nf, model[0].nx, model[0].weight.shape) == (72, 40, (40, 72))
    multiplied = weight.bfloat16() if autocast else weight
    expanded = fp4compile.quantize(multiplied, recipe.fprop_w, dim=0).dequantize()
    assert torch.equal(model[0].weight.t(), expanded)


def test_only_the_conv1d_of_transformers():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.nx, self.nf, self.weight = 64, 64, torch.nn.Parameter(torch.ones(64, 64))

    assert not fp4compile.pack_(torch.nn.Sequential(Conv1D()), "mxfp8").rows
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    changed = type("Conv1D", (conv1d,), {"forward": lambda self, x: x})
    assert not fp4compile.pack_(torch.nn.Sequential(changed(64, 64)), "mxfp8").quantised


def test_a_packed_model_says_that_it_is_packed():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)), torch.nn.Linear(64, 64))
    fp4compile.pack_(model, "mxfp8", contracted={})
    again = fp4compile.pack_(model, "mxfp8")
    assert again.packed_before == again.to_dict()["packed_before"] == 4
    assert again.summary() == "recipe mxfp8: 0 of 0 matmuls quantised; 4 packed already, and not counted"


def test_packing_after_training_keeps_the_bits_that_training_computed_with():
    """A recipe of the forward product alone; a teacher in the same function stays unquantised by a rule."""
    forward = named("nvfp4").replace(dgrad_dy=None, dgrad_w=None, wgrad_dy=None, wgrad_x=None)
    forward = forward.replace(rules=(("teacher*", "skip"),))
    layers = {name: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)) for name in ("a", "b")}
    model = torch.nn.ModuleDict({"student": layers["a"], "teacher": layers["b"]})
    backend, x = fp4compile.backend(forward), torch.randn(48, 64)
    run = torch.compile(lambda x: (model["student"](x), model["teacher"](x)), backend=backend)
    student, teacher = run(x)
    (student - teacher).square().mean().backward()
    torch.optim.SGD(model["student"].parameters(), 0.1).step()
    assert {row.product for row in backend.report.quantised} == {"fprop"}
    with torch.no_grad():
        trained, exact = run(x)
        torch.testing.assert_close(exact, model["teacher"](x))
        fp4compile.pack_(model["student"], forward)
        assert torch.equal(model["student"](x), trained)
