"""Rules that decide about nothing: the backend says so once it can know, and the report of all graphs does."""

import warnings

import pytest
import torch

import fp4compile
from tests.helpers.report_text import flat

pytestmark = pytest.mark.usefixtures("graphs_as_captured")


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, x):
        return self.down(self.up(x))


class Broken(torch.nn.Module):
    """A model in three graphs, of two blocks; `late` is in the last of the graphs, `unused` in none."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.late, self.unused = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x):
        x = self.layers[0](x)
        torch._dynamo.graph_break()
        x = self.layers[1](x)
        torch._dynamo.graph_break()
        return self.late(x)


def run(rules, model=None, *, strict=False, blocks=False):
    """(the report, the warnings) of a backend with rules that has compiled the model, or each block of it alone."""
    model, backend = model or Broken(), fp4compile.backend("mxfp8", strict=strict, rules=rules)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        for part in model.layers if blocks else [model]:
            part.compile(backend=backend)
        for _ in range(2):
            model(torch.ones(4, 64))
    return backend.report, [str(one.message) for one in caught if "rule" in str(one.message)]


def test_a_rule_that_matches_no_layer_is_told_at_the_first_graph_and_once():
    report, said = run([("*late", "skip"), ("*dwon", "skip"), ("lm_head", "quantize")])
    assert report.graphs == 3
    assert said == ["fp4compile recipe 'mxfp8': no layer of the model (Broken) matches the rule '*dwon', 'lm_head'"]
    assert [rule.pattern for rule in report.unmatched_rules()] == ["*dwon", "lm_head"]
    assert report.to_dict()["unmatched_rules"] == ["*dwon", "lm_head"]
    assert report.summary().endswith("rules that decided about no matmul: '*dwon', 'lm_head'")


def test_each_model_is_told_by_itself():
    model, backend = Block(), fp4compile.backend("mxfp8", rules=[("up", "skip"), ("late", "skip")])
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"\(Block\) matches the rule 'late'"):
            torch.compile(model, backend=backend)(torch.ones(4, 64))
        with pytest.warns(UserWarning, match=r"\(Linear\) matches the rule 'up', 'late'"):
            torch.compile(torch.nn.Linear(64, 64), backend=backend)(torch.ones(4, 64))
    assert [rule.pattern for rule in backend.report.unmatched_rules()] == ["late"]


def test_strict_raises_for_such_a_rule_alone():
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no layer of the model .* matches the rule 'typo'"):
            run([("late", "skip"), ("typo", "skip")], strict=True)
    report, said = run([("*up", "skip"), ("late", "mxfp4")], strict=True)
    assert said == [] and report.graphs == 3 and report.unmatched_rules() == ()


def test_only_all_graphs_show_that_earlier_rules_take_every_layer_or_that_none_runs():
    report, said = run([("*up", "skip"), ("layers.0.up", "mxfp4"), ("unused", "skip")], strict=True)
    assert said == []
    assert "rules that decided about no matmul: 'layers.0.up', 'unused'" in flat(report)


def test_names_below_a_block_that_is_compiled_by_itself():
    """Rules see `up` there. A rule for the full name matches a layer of the model, and decides about nothing."""
    rules = [("up", "skip"), ("layers.1.down", "skip"), ("late", "skip")]
    report, said = run(rules, blocks=True)
    assert len(said) == 1 and "'layers.0' is compiled by itself" in said[0] and "the rule 'layers.1.down' " in said[0]
    assert "fp4compile.block_recipe(recipe, model, block)" in said[0]
    assert [rule.pattern for rule in report.unmatched_rules()] == ["layers.1.down", "late"]
    with pytest.raises(RuntimeError, match="is compiled by itself"):
        run(rules, blocks=True, strict=True)


def test_explain_tells_the_rules_that_decide_for_no_layer():
    rules = [("up", "skip"), ("*.gate", "skip"), ("u*", "mxfp4")]
    with pytest.warns(UserWarning) as warned:
        fp4compile.explain(
            Block(), torch.randn(48, 64), recipe=fp4compile.Recipe.from_dict({"recipe": "mxfp8", "rules": rules})
        )
    texts = [str(warning.message) for warning in warned]
    assert [text for text in texts if "decides for no layer" in text] == [
        "rule '*.gate' of recipe 'mxfp8' decides for no layer",
        "rule 'u*' of recipe 'mxfp8' decides for no layer",
    ]


# ---------------------------------------------------------------- recipes of blocks


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Block() for _ in range(5)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def quantised(*reports):
    return {(row.module, row.right) for report in reports for row in report.quantised}


def test_blocks_compiled_by_themselves_follow_rules_with_their_numbers():
    """As the whole model does. Dynamo shares a graph among equal blocks, and the report names the first of them."""
    chosen = {"recipe": "mxfp8", "skip_last_blocks": 1}
    chosen["rules"] = [("layers.1.*", "skip"), ("*.2.up", "mxfp4"), ("layers.4.down", "quantize")]
    model, whole = Blocks(), fp4compile.backend(chosen, strict=True)
    backends = [fp4compile.backend(fp4compile.block_recipe(chosen, model, block)) for block in model.layers]
    assert backends[0] == backends[3] and len(set(backends)) == 4
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        torch.compile(model, backend=whole)(torch.ones(4, 64))
        for block, backend in zip(model.layers, backends, strict=True):
            block.compile(backend=backend)
        model(torch.ones(4, 64))
    assert [str(one.message) for one in caught if "rule" in str(one.message)] == []
    found = quantised(*(backend.report for backend in backends))
    assert found | {("layers.3.up", "mxfp8"), ("layers.3.down", "mxfp8")} == quantised(whole.report)
    assert len(found) == 5
    assert {backend.report.graphs for backend in backends} == {1}


def test_a_layer_may_be_a_block():
    model = Blocks()
    recipe = fp4compile.block_recipe(
        {"recipe": "mxfp8", "rules": [("layers.1.up", "mxfp4")]}, model, model.layers[1].up
    )
    backend = fp4compile.backend(recipe)
    torch.compile(model.layers[1].up, backend=backend)(torch.ones(4, 64))
    assert {row.right for row in backend.report.quantised if row.product == "fprop"} == {"mxfp4"}


def test_static_scales_reach_blocks_compiled_by_themselves():
    model = Blocks()
    scales = {f"layers.{number}.{name}": 2.0**-number for number in range(5) for name in ("up", "down")}
    chosen = fp4compile.Recipe.from_dict(
        {"recipe": "nvfp4", "activation_scale": "static", "static_scales": scales, "skip_first_blocks": 1}
    )
    recipe = fp4compile.block_recipe(chosen, model, model.layers[2])
    assert dict(recipe.static_scales) == {"up": 0.25, "down": 0.25} and recipe.rules == ()
    assert [rule.pattern for rule in fp4compile.block_recipe(chosen, model, model.layers[0]).rules] == ["up", "down"]
    with pytest.raises(ValueError, match="block: expected a module of the model, got a Block"):
        fp4compile.block_recipe(chosen, model, Block())


def test_static_scales_of_a_rules_recipe_reach_blocks_too():
    """Where the model's recipe is dynamic and a rule names a static one; a block without such a layer has none."""
    model, scales = Blocks(), {"layers.1.up": 0.5, "layers.2.up": 0.25}
    chosen = {"recipe": "mxfp8", "rules": [("layers.[12].up", "nvfp4_static")], "static_scales": scales}
    recipes = [fp4compile.block_recipe(chosen, model, block) for block in model.layers]
    assert [dict(recipe.static_scales) for recipe in recipes] == [{}, {"up": 0.5}, {"up": 0.25}, {}, {}]
    backend = fp4compile.backend(recipes[1], strict=True)
    with torch.no_grad():
        model.layers[1].compile(backend=backend)
        model.layers[1](torch.ones(4, 64))
    assert {row.module: row.note for row in backend.report.quantised} == {"up": None, "down": None}, "none is dynamic"


def test_a_packed_model_has_the_names_of_its_layers():
    model = Broken()
    fp4compile.pack_(model, "mxfp8")
    report, said = run([("*up", "skip"), ("late", "skip")], model)
    assert said == [] and report.unmatched_rules() == ()


def test_a_rule_cannot_change_a_packed_layer_and_the_report_has_a_note():
    """No note where the rule wants what the layer has, as the rules of the recipe that packed it."""
    model = Broken()
    rules = [("layers.0.up", "skip"), ("layers.0.down", "mxfp4"), ("layers.1.up", "mxfp8"), ("*", "quantize")]
    fp4compile.pack_(model, "mxfp8")
    report, _ = run(rules, model)
    texts = {f"layers.0.{name}": f"rule 'layers.0.{name}' has no effect: pack_ has fixed the formats"
             for name in ("up", "down")}  # fmt: skip
    assert {row.name or row.module: row.note for row in report.rows if row.note} == texts
    assert len(report.quantised) == 5 and f"{texts['layers.0.up']}: layers.0.up" in flat(report)


def test_layers_that_a_function_closes_over_are_not_judged_early():
    layer, backend = torch.nn.Linear(64, 64), fp4compile.backend("mxfp8", strict=True, rules=[("layer", "mxfp4")])
    torch.compile(lambda x: layer(x), backend=backend)(torch.ones(4, 64))
    assert [row.left for row in backend.report.rows if row.product == "fprop"] == ["mxfp4"]


def test_nothing_is_said_of_rules_while_rows_are_missing():
    report, _ = run([("typo", "skip")])
    report.lost = 1
    assert report.unmatched_rules() == () and "about no matmul" not in report.summary()
