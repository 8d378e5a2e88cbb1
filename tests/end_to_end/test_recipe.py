"""The recipe: its fields and their checks, rules, named recipes, and what each part of a model gets."""

import json

import pytest
import torch

import fp4compile
from fp4compile.formats import formats
from fp4compile.recipe import PRODUCTS, Recipe, Rule, named, recipes, resolve
from fp4compile.recipe import rules as layer_rules

BACKWARD = ("dgrad", "wgrad")
FORWARD_ONLY = ("nvfp4_one_level", "nvfp4_static", "nvfp4_weight_only")


@pytest.fixture(autouse=True)
def no_recipe_in_the_environment(monkeypatch):
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)


def rich_recipe() -> Recipe:
    """One that uses every field which may differ from its default today."""
    return Recipe(
        name="mine", fprop_x="nvfp4", fprop_w="nvfp4_16x16",
        wgrad_dy=formats.BlockFormat("e2m1", (1, 32), "e8m0", None, "ceil"), attention_a="mxfp8",
        rules=[("*.mlp.*", "mxfp8"), {"pattern": "layers.1.*", "action": "skip"}, Rule("*", "quantize")], min_m=2,
        min_n=64, min_k=96, skip_first_blocks=1, skip_last_blocks=2, num_blocks=12, skip_lm_head=False,
        activation_scale="static", static_scales={"layers.0.q": 0.25, "embed": 1},
    )  # fmt: skip


# ---------------------------------------------------------------- named recipes


@pytest.mark.parametrize("name", recipes())
def test_named_recipe_is_complete(name):
    recipe = named(name)
    assert recipe.name == name
    assert recipe.quantizes("fprop")
    assert [recipe.quantizes(product) for product in BACKWARD] == [name not in FORWARD_ONLY] * 2
    assert not recipe.quantizes("attention")


def test_operands_of_named_recipes():
    assert {product: named("mxfp8_32x32").operands(product) for product in PRODUCTS} == {
        "fprop": ("mxfp8", "mxfp8_32x32"),
        "dgrad": ("mxfp8", "mxfp8_32x32"),
        "wgrad": ("mxfp8", "mxfp8"),
        "attention": (None, None),
    }
    assert named("nvfp4_rowwise").operands("fprop") == ("nvfp4_rowwise", "nvfp4_te")
    assert named("nvfp4_rowwise").operands("wgrad") == ("nvfp4_te", "nvfp4_te")
    assert named("nvfp4_weight_only").operands("fprop") == (None, "nvfp4")
    assert named("nvfp4_static").activation_scale == "static"


def test_training_recipe_and_its_switches():
    recipe = named("nvfp4_train")
    assert (recipe.fprop_x, recipe.fprop_w, recipe.dgrad_w) == ("nvfp4_te", "nvfp4_16x16", "nvfp4_16x16")
    assert recipe.hadamard == ("wgrad",) and recipe.stochastic_rounding == ("dgrad", "wgrad")
    plain = recipe.replace(hadamard=(), stochastic_rounding=["wgrad"], fprop_w="nvfp4_te", dgrad_w="nvfp4_te")
    assert plain.stochastic_rounding == ("wgrad",) and Recipe.from_dict(plain.to_dict()) == plain
    high_wgrad = recipe.replace(wgrad_dy=None, wgrad_x=None, hadamard=(), stochastic_rounding=("dgrad",))
    assert not high_wgrad.quantizes("wgrad")


@pytest.mark.parametrize(
    "name, nearest", [("NVFP4", "nvfp4"), ("MXFP8_Flor", "mxfp8_floor"), ("Float8-RowWise", "float8_rowwise")]
)
def test_an_unknown_recipe_suggests_the_nearest_in_any_case(name, nearest):
    with pytest.raises(ValueError, match=f"unknown recipe '{name}'. Did you mean '{nearest}'?"):
        fp4compile.backend(name)


@pytest.mark.parametrize(
    "value, said", [(None, "recipe 'nvfp4', the default"), ("mxfp8", "recipe 'mxfp8', from FP4COMPILE_RECIPE")]
)
def test_the_log_says_which_recipe_none_takes(value, said, monkeypatch, caplog):
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)
    if value is not None:
        monkeypatch.setenv("FP4COMPILE_RECIPE", value)
    with caplog.at_level("INFO", "fp4compile"):
        fp4compile.backend("mxfp4")
        assert caplog.messages == []
        fp4compile.backend()
    assert caplog.messages == [f"no recipe was named: {said}"]


def test_unknown_names_suggest_the_nearest():
    with pytest.raises(ValueError, match="unknown recipe 'mxpf8'.*'mxfp8'"):
        named("mxpf8")
    with pytest.raises(ValueError, match="unknown recipe field 'min_nn'.*'min_n'"):
        resolve("mxfp8", min_nn=3)
    with pytest.raises(ValueError, match="fprop_x: unknown format 'nvfp5'.*'nvfp4'"):
        Recipe(fprop_x="nvfp5")
    with pytest.raises(ValueError, match="unknown rule action 'skpi'.*'skip'"):
        Recipe(rules=[("*", "skpi")])


# ---------------------------------------------------------------- normal form, round trip, digest


def test_spellings_of_one_recipe_are_equal():
    mine = rich_recipe()
    assert mine.wgrad_dy == "e2m1:1x32:e8m0:-:ceil"
    assert mine.rules == (Rule("*.mlp.*", "mxfp8"), Rule("layers.1.*", "skip"), Rule("*", "quantize"))
    assert mine.static_scales == (("embed", 1.0), ("layers.0.q", 0.25))
    other = mine.replace(static_scales=[("layers.0.q", 0.25), ("embed", 1.0)], rules=list(mine.rules))
    assert other == mine and hash(other) == hash(mine) and other.digest == mine.digest
    assert Recipe(fprop_x=formats.NAMED["nvfp4"], fprop_w="none") == Recipe(fprop_x="nvfp4")
    assert named("nvfp4_train").replace(stochastic_rounding=["wgrad", "dgrad", "wgrad"]) == named("nvfp4_train")


@pytest.mark.parametrize("recipe", [rich_recipe(), *map(named, recipes())], ids=lambda recipe: recipe.name)
def test_round_trip_through_json(recipe):
    back = Recipe.from_dict(json.loads(json.dumps(recipe.to_dict())))
    assert back == recipe and back.digest == recipe.digest


def test_digest_tells_recipes_apart():
    variants = [rich_recipe(), rich_recipe().replace(min_m=3), rich_recipe().replace(rules=())]
    variants += map(named, recipes())
    assert len({recipe.digest for recipe in variants}) == len(variants)


# ---------------------------------------------------------------- rules and scales


@pytest.mark.parametrize("module, action", [
    ("layers.1.mlp", "skip"), ("layers.10.mlp", "mxfp8"), ("model.layers.1.mlp", "mxfp8"), ("layers.1.q.a", "skip"),
    ("LAYERS.1.q", None), ("lm_head", None),
])  # fmt: skip
def test_first_matching_rule_decides(module, action):
    recipe = Recipe(rules=[("layers.1.*", "skip"), ("layers.1*", "mxfp8"), ("*.mlp", "mxfp8")])
    rule = recipe.rule_for(module)
    assert (rule and rule.action) == action


RULES = [("*.q", "skip"), ("layers.9.*", "mxfp8"), ("layers.0.q", "mxfp8"), ("*.q", "quantize"), ("*", "quantize")]


@pytest.mark.parametrize(
    "names, unmatched",
    [
        # An earlier rule takes all that the third and the fourth match.
        (["layers.0.q", "layers.0.up", "layers.1.q"], [1, 2, 3]),
        (["layers.9.up"], [0, 2, 3, 4]),
        (["layers.9.q"], [1, 2, 3, 4]),
        (["layers.9.q", "layers.9.up"], [2, 3, 4]),
        ([], [0, 1, 2, 3, 4]),
    ],
)
def test_rules_that_decide_for_no_layer(names, unmatched):
    recipe = Recipe(rules=RULES)
    found = layer_rules.unmatched(recipe.rules, (name for name in names))
    assert found == tuple(recipe.rules[index] for index in unmatched)
    assert layer_rules.unmatched((), names) == ()


def test_static_scale_by_module_name():
    recipe = rich_recipe()
    assert recipe.static_scale("layers.0.q") == 0.25
    assert recipe.static_scale("layers.0") is None


# ---------------------------------------------------------------- contradictions and mistakes


@pytest.mark.parametrize("fields, message", [
    ({"fprop_x": "nvfp4", "fprop_w": "mxfp8"}, "fprop: formats nvfp4 and mxfp8 cannot be multiplied"),
    ({"attention_a": "nvfp4", "attention_b": "float8_rowwise"}, "attention: formats"),
    ({"fprop_x": "e2m1:16x16:e4m3:row:te"}, "fprop_x: outer='row' contradicts block"),
    ({"fprop_x": "e2m1:1x16:e8m0:-:rceil"}, "fprop_x: block"), ({"min_m": -1}, "min_m=-1"),
    ({"num_blocks": -2}, "num_blocks=-2"), ({"activation_scale": "frozen"}, "activation_scale='frozen'.*'static'"),
    ({"activation_scale": "static"}, "activation_scale='static' needs"),
    ({"activation_scale": "static", "fprop_x": "nvfp4_one_level"}, "activation_scale='static' needs"),
    ({"activation_scale": "static", "fprop_x": "nvfp4_rowwise"}, "activation_scale='static' needs"),
    ({"hadamard": ("fprop",)}, "hadamard: unknown product 'fprop'.*Allowed: wgrad"),
    ({"hadamard": ("wgrad", "dgrad")}, "hadamard: unknown product 'dgrad'"),
    ({"hadamard": ("wgard",)}, "hadamard: unknown product 'wgard'.*'wgrad'"),
    ({"hadamard": ("wgrad",)}, "wgrad_dy must be an NVFP4 format with blocks of 1x16, got None"),
    ({"recipe": "mxfp4", "hadamard": ("wgrad",)}, "wgrad_dy must be an NVFP4 format.*got mxfp4"),
    ({"recipe": "nvfp4_train", "wgrad_x": "nvfp4_16x16"}, "wgrad_x must be an NVFP4 format.*got nvfp4_16x16"),
    ({"stochastic_rounding": ["dgrad"]}, "stochastic_rounding of dgrad: dgrad_dy must be an FP4 format, got None"),
    ({"recipe": "mxfp8", "stochastic_rounding": ["wgrad"]}, "wgrad_dy must be an FP4 format, got mxfp8"),
    ({"stochastic_rounding": ["fprop"]}, "stochastic_rounding: unknown product 'fprop'"),
    ({"recipe": "mxfp8", "fast_accumulation": ["fprop"]}, "fast_accumulation of fprop: .*got mxfp8 and mxfp8"),
    ({"recipe": "float8_rowwise", "fast_accumulation": ["forward"]}, "fast_accumulation: unknown product 'forward'"),
    ({"recipe": "nvfp4", "static_scales": {"a": 0.5}}, "static_scales are given and never used"),
    ({"static_scales": {"a": 0.5}, "rules": [("a", "mxfp8")]}, "static_scales are given and never used"),
    ({"rules": [{"action": "skip"}]}, "a rule has a pattern and an action"),
    ({"rules": [("", "skip")]}, "pattern '' is empty"),
    ({"rules": [("*.q", "skip"), ("*.gate ", "skip")]}, r"pattern '\*.gate ' is empty or has spaces around it"),
    ({"rules": [("\n*.gate", "skip")]}, "has spaces around it"),
    ({"num_blocks": 0}, "num_blocks=0: must be at least 1"), ({"skip_first_blocks": -1}, "skip_first_blocks=-1"),
    ({"name": ""}, "name='': must not be empty"), ({"name": " "}, "name=' ': must not be empty"),
    ({"fprop_x": ""}, "fprop_x: unknown format ''"), ({"recipe": " mxfp8"}, "unknown recipe ' mxfp8'.*'mxfp8'"),
    ({"static_scale": {}}, "unknown recipe field 'static_scale'.*'static_scales'"),
    ({"recipe": "nvfp"}, "unknown recipe 'nvfp'"),
])  # fmt: skip
def test_contradictions_raise_when_built(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(fields)


@pytest.mark.parametrize("fields, message", [
    ({"fprop_x": 4}, "fprop_x: .*expected a name"), ({"name": None}, "name: expected a str"),
    ({"min_m": True}, "min_m: expected an int, got bool"), ({"min_k": 32.0}, "min_k: expected an int, got float"),
    ({"skip_lm_head": 1}, "skip_lm_head: expected a bool, got int"),
    ({"activation_scale": None}, "activation_scale: expected a str"), ({"rules": "skip"}, "rules: expected a list"),
    ({"rules": {"layers.*": "skip"}}, "rules: expected a list"), ({"rules": ["layers.*"]}, "rules: expected a Rule"),
    ({"rules": [(1, "skip")]}, "pattern must be a string"), ({"hadamard": "wgrad"}, "hadamard: expected a list"),
    ({"static_scales": {"a": "1"}}, "static_scales: expected pairs"),
    ({"static_scales": [1.0]}, "static_scales: expected pairs"),
    ({"static_scales": 1.0}, "static_scales: expected a list"),
    ({"static_scales": {"a": True}}, "static_scales: expected pairs"),
    ({"static_scales": "ab"}, "static_scales: expected a list"),
    ({"num_blocks": False}, "num_blocks: expected an int, got bool"),
    ({"min_n": float("nan")}, "min_n: expected an int, got float"),
    ({"stochastic_rounding": [["dgrad"]]}, "stochastic_rounding: expected names of products"),
    ({"hadamard": [1]}, "hadamard: expected names of products"), ({"recipe": 4}, "recipe: expected a name"),
    ([], "recipe: expected a dict"),
])  # fmt: skip
def test_wrong_types_name_the_field(fields, message):
    with pytest.raises(TypeError, match=message):
        Recipe.from_dict(fields)


SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "scale",
    [float("nan"), 0.0, -1.0, float("inf"), 1e300, pytest.param(10**400, id="10**400"), 1e-50,
     SMALLEST * (1 - 2.0**-30), 2.0**128],
)  # fmt: skip
def test_static_scales_that_float32_does_not_hold(scale):
    """Kernels take them in float32; below its normal numbers the inverse, by which they multiply, overflows."""
    with pytest.raises(ValueError, match="static_scales: 'b' has .* positive and finite, and a normal float32"):
        named("nvfp4_static").replace(static_scales={"a": 0.5, "b": scale})


def test_static_scales_at_the_ends_of_float32():
    recipe = named("nvfp4_static").replace(static_scales={"a": SMALLEST, "b": LARGEST, "c": 1})
    assert recipe.static_scales == (("a", SMALLEST), ("b", LARGEST), ("c", 1.0))


def test_calibration_of_a_tiny_activation_gives_a_factor_that_a_recipe_takes():
    layers, x = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3)), torch.randn(4, 64)

    def model(x):
        return layers[0](x) + layers[1](1e-37 * x) + layers[2](0 * x)

    scales = dict(fp4compile.calibrate(model, [(x,)]).static_scales)
    # Nothing but zeros is no sample: that layer stays dynamic.
    assert sorted(scales.values()) == [SMALLEST, pytest.approx(x.abs().max().item() / 2688)]


def test_static_scales_are_given_once():
    with pytest.raises(ValueError, match="static_scales: 'a' is there twice"):
        named("nvfp4_static").replace(static_scales=[("a", 0.5), ("b", 0.5), ("a", 0.25)])


def test_static_scales_of_the_layers_whose_rule_is_static():
    recipe = Recipe(rules=[("a", "nvfp4_static")], static_scales={"a": 0.5})
    assert recipe.static_scale("a") == 0.5
    with pytest.raises(ValueError, match="static_scales are given and never used"):
        recipe.replace(rules=[("a", "nvfp4")])


def test_a_product_may_keep_one_operand_in_high_precision():
    assert Recipe(fprop_w="mxfp8").quantizes("fprop")
    assert Recipe(fprop_x="mxfp8", fprop_w="mxfp4").quantizes("fprop")


def test_reprs_have_what_differs_from_the_defaults():
    recipe = Recipe(name="<mine>", fprop_w="nvfp4", rules=[("lm_head", "quantize")])
    assert repr(recipe) == (
        "Recipe(name='<mine>', fprop_w='nvfp4', rules=(Rule(pattern='lm_head', action='quantize'),))"
    )
    assert eval(repr(recipe)) == recipe and repr(Recipe()) == "Recipe(name='custom')"
    shown = recipe._repr_html_()
    assert "<td>fprop_w</td><td><code>&#x27;nvfp4&#x27;</code></td>" in shown and "&lt;mine&gt;" in shown
    calibrated = named("nvfp4_static").replace(static_scales={f"layers.{i}": 1.0 for i in range(224)})
    assert "static_scales=<224 entries>" in repr(calibrated) and len(repr(fp4compile.backend(calibrated))) < 400
