"""Rules that decide about nothing: the backend says so once it can know, and the report of all graphs does."""

import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

import fp4compile

pytestmark = pytest.mark.usefixtures("without_kernels")


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
    assert report.summary().endswith("rules that decided about no product: '*dwon', 'lm_head'")


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
    assert "rules that decided about no product: 'layers.0.up', 'unused'" in str(report)


def test_names_below_a_block_that_is_compiled_by_itself():
    """Rules see `up` there. A rule for the full name matches a layer of the model, and decides about nothing."""
    report, said = run([("up", "skip"), ("layers.1.down", "skip"), ("late", "skip")], blocks=True)
    assert said == []
    assert [rule.pattern for rule in report.unmatched_rules()] == ["layers.1.down", "late"]


def test_a_packed_model_has_the_names_of_its_layers():
    model = Broken()
    fp4compile.pack_(model, "mxfp8")
    report, said = run([("*up", "skip"), ("late", "skip")], model)
    assert said == [] and report.unmatched_rules() == ()


def test_layers_that_a_function_closes_over_are_not_judged_early():
    layer, backend = torch.nn.Linear(64, 64), fp4compile.backend("mxfp8", strict=True, rules=[("layer", "mxfp4")])
    torch.compile(lambda x: layer(x), backend=backend)(torch.ones(4, 64))
    assert [row.left for row in backend.report.rows if row.product == "fprop"] == ["mxfp4"]


def test_nothing_is_said_of_rules_while_rows_are_missing():
    report, _ = run([("typo", "skip")])
    report.lost = 1
    assert report.unmatched_rules() == () and "about no product" not in report.summary()


@pytest.mark.slow
def test_the_end_of_the_program_says_it():
    code = """
        import torch, fp4compile
        backend = fp4compile.backend("mxfp8", rules=[("0", "quantize"), ("0*", "skip")])
        torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64)), backend=backend)(torch.ones(4, 64))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert "rules that decided about no product: '0*'" in done.stderr
