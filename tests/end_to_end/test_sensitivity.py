"""What each layer's quantisation costs: measured as the backend quantises, and turned into rules."""

import json
import math
import sys
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from torch.nn.functional import grouped_mm
from torch.utils._python_dispatch import TorchDispatchMode

import fp4compile
from fp4compile.calibration.sensitivity import LayerSensitivity, Sensitivity
from fp4compile.formats import reference
from fp4compile.recipe import Rule, named
from tests.helpers import without_codegen
from tests.helpers.report_text import Page


@dataclass
class Output:
    values: torch.Tensor
    ids: torch.Tensor
    more: dict


class Net(torch.nn.Module):
    """Layers that cost differently; one is used twice, and one by nothing that is compared."""

    def __init__(self):
        super().__init__()
        self.twice, self.down, self.unused = (torch.nn.Linear(64, n) for n in (64, 48, 64))
        self.heads = torch.nn.ModuleDict({"a[0]*": torch.nn.Linear(64, 64), "a0x": torch.nn.Linear(64, 64)})

    def forward(self, x):
        hidden = self.twice(torch.relu(self.twice(x)))
        heads = [head(hidden) for head in self.heads.values()]
        output = torch.where(heads[1] > 0, heads[1], -torch.inf)  # as masked scores are
        return Output(self.down(hidden), self.unused(hidden) > 0, {"heads": [heads[0] * 3, output]})


def floats(output):
    return [output.values, *output.more["heads"]]


def decibels(expected, found):
    signal = sum(torch.where(one.isfinite(), one, 0).double().square().sum() for one in expected)
    noise = sum(
        (other - one)[one.isfinite()].double().square().sum() for one, other in zip(expected, found, strict=True)
    )
    return (10 * torch.log10(signal / noise)).item()


def test_a_layer_alone_changes_what_the_backend_changes(monkeypatch):
    without_codegen.install(monkeypatch)
    model, x = Net(), [torch.randn(n, 64) for n in (8, 5)]
    with mock.patch.object(reference, "scaled_mm", wraps=reference.scaled_mm) as multiplied:
        measured = fp4compile.sensitivity(torch.compile(model), x, "mxfp4")
    assert multiplied.call_count == len(x) * 6, "each quantised product runs once a batch"
    by_name = {one.layer: one for one in measured.layers}
    assert set(by_name) == {"twice", "down", "unused", "heads.a[0]*", "heads.a0x"}
    assert [one.model_db for one in measured.layers] == sorted(one.model_db for one in measured.layers)
    assert (by_name["twice"].weights, by_name["down"].weights) == (64 * 64, 64 * 48)
    assert by_name["unused"].model_db == math.inf and 10 < by_name["unused"].output_db < 30
    with torch.no_grad():
        plain = [tensor for batch in x for tensor in floats(model(batch))]
        for name in ("twice", "heads.a[0]*"):
            rules = [(name.replace("[", "[[]", 1), "quantize"), ("*", "skip")]
            alone = torch.compile(model, backend=fp4compile.backend("mxfp4", rules=rules))
            found = [tensor for batch in x for tensor in floats(alone(batch))]
            assert by_name[name].model_db == pytest.approx(decibels(plain, found), abs=0.01)
        # The only layer of one output that no other layer of the model reads: its own error is that output's.
        weights = fp4compile.quantize(model.down.weight, "mxfp4").dequantize()
        hidden = [model.twice(torch.relu(model.twice(batch))) for batch in x]
        exact = [model.down(one) for one in hidden]
        ours = [fp4compile.quantize(one, "mxfp4").dequantize() @ weights.t() + model.down.bias for one in hidden]
        assert by_name["down"].output_db == pytest.approx(decibels(exact, ours), abs=0.01)


def test_equal_parts_that_are_captured_by_themselves_are_one_layer():
    """A rule decides about them together. Their weights count each."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(64, 64)

        def forward(self, x):
            return self.up(x)

    class Blocks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                torch._dynamo.graph_break()
                x = block(x)
            return x

    measured = fp4compile.sensitivity(Blocks(), [torch.randn(4, 64)], "nvfp4")
    assert [(one.layer, one.weights) for one in measured.layers] == [("up", 2 * 64 * 64)]


def test_random_numbers_are_the_same_in_every_run():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5)).train()
    measured = fp4compile.sensitivity(model, [torch.randn(64, 64)], "mxfp8")
    assert measured.layers[0].model_db == pytest.approx(measured.layers[0].output_db, abs=1)


def test_bad_input():
    layer, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    with pytest.raises(ValueError, match="batches: got none"):
        fp4compile.sensitivity(layer, [])
    with pytest.raises(TypeError, match=r"for one batch, pass \[batch\]"):
        fp4compile.sensitivity(layer, x)
    with pytest.raises(ValueError, match="model: recipe 'nvfp4' quantises nothing of it"):
        fp4compile.sensitivity(torch.nn.ReLU(), [x])
    with pytest.raises(ValueError, match="model: its output has no floating-point tensor"):
        fp4compile.sensitivity(lambda x: layer(x).argmax(-1), [x])
    for measure in (fp4compile.sensitivity, fp4compile.calibrate):
        with pytest.raises(TypeError, match="model: expected a module or another callable, got str"):
            measure("layer", [x])


def test_what_is_not_finite_is_not_called_exact():
    """Masked elements are left out. Where no element is left, nothing can be said."""
    layer, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    beyond = torch.full((4, 64), math.inf)
    masked = fp4compile.sensitivity(lambda x: layer(x).masked_fill(torch.eye(4, 64).bool(), -math.inf), [x])
    assert 5 < masked.layers[0].model_db < 40
    with pytest.raises(ValueError, match="batches: the model's output has no finite element"):
        fp4compile.sensitivity(lambda x: layer(x) * math.nan, [x])
    with pytest.raises(ValueError, match="batches: the output of layer 'layer' has no finite element"):
        fp4compile.sensitivity(lambda x: layer(x).tanh(), [beyond])


# ---------------------------------------------------------------- budgets

RANKED = Sensitivity("nvfp4", (
    LayerSensitivity("blocks.0.a[1]", 600, 9.0, 10.0), LayerSensitivity("up", 300, 20.0, 20.0),
    LayerSensitivity("down", 90, 20.0, 30.0), LayerSensitivity("unused", 10, 25.0, math.inf),
))  # fmt: skip


@pytest.mark.parametrize(
    "budget, names",
    [
        ({"sqnr_db": 9.5}, []),  # together they have 9.54 dB
        ({"sqnr_db": 9.6}, ["blocks.0.a[1]"]),
        ({"sqnr_db": 20.0}, ["blocks.0.a[1]", "up"]),  # the others together have less: 19.6 dB
        ({"sqnr_db": 99.0}, ["blocks.0.a[1]", "up", "down"]),
        ({"bf16_share": 0.9}, ["blocks.0.a[1]", "up"]),
        ({"bf16_share": 0.4}, ["up", "down", "unused"]),  # the first is too large
        ({"bf16_share": 0.0}, []),
        ({"bf16_share": 1.0}, ["blocks.0.a[1]", "up", "down", "unused"]),
    ],
    ids=str,
)
def test_budget(budget, names):
    recipe = named("nvfp4").replace(rules=[("up", "mxfp4")]).with_budget(RANKED, **budget)
    assert [rule.action for rule in recipe.rules] == ["skip"] * len(names) + ["mxfp4"]
    of_layer = {one.layer: recipe.rule_for(one.layer) for one in RANKED.layers}
    assert [name for name, rule in of_layer.items() if rule is not None and rule.action == "skip"] == names
    assert recipe.rule_for("blocks.0.a1") is None, "a name is no glob"
    exact = Sensitivity("mxfp8", tuple(replace(one, model_db=math.inf) for one in RANKED.layers))
    recipe = named("nvfp4").with_budget(RANKED, **budget, fallback=exact)
    assert [rule.action for rule in recipe.rules] == ["mxfp8"] * len(names)
    if "bf16_share" in budget:
        assert named("nvfp4").with_budget(RANKED, **budget, fallback="mxfp8") == recipe


FALLBACK = Sensitivity("mxfp8", (
    LayerSensitivity("up", 300, 30.0, 19.0), LayerSensitivity("blocks.0.a[1]", 600, 29.0, 15.0),
    LayerSensitivity("unused", 10, 25.0, math.inf), LayerSensitivity("down", 90, 20.0, 40.0),
))  # fmt: skip


@pytest.mark.parametrize("sqnr_db, names", [
    (13.0, ["blocks.0.a[1]"]),  # 15, 20, 30 dB together: 13.7 dB; of 20 and 30 dB alone 19.6
    (13.75, ["blocks.0.a[1]", "down"]),  # 15, 20 and 40 dB: 13.8 dB; "up" is worse under the fallback
])  # fmt: skip
def test_the_errors_of_a_fallback_count(sqnr_db, names):
    recipe = named("nvfp4").with_budget(RANKED, sqnr_db=sqnr_db, fallback=FALLBACK)
    assert [recipe.rule_for(one.layer) is not None for one in RANKED.layers] == [
        one.layer in names for one in RANKED.layers
    ]
    powers = {one.layer: one.power for one in RANKED.layers} | {
        one.layer: one.power for one in FALLBACK.layers if one.layer in names
    }
    assert -10 * math.log10(sum(powers.values())) >= sqnr_db
    with pytest.raises(ValueError, match=r"sqnr_db=14.0: with fallback 'mxfp8' .* at most about 13.8 dB; ask for less"):
        named("nvfp4").with_budget(RANKED, sqnr_db=14.0, fallback=FALLBACK)


def test_a_budget_with_a_fallback_is_kept():
    """Measured with the rules, the errors of both formats together."""
    torch.manual_seed(0)
    sizes = (64, 96, 64, 96, 64)
    layers = (torch.nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False))
    model, batches = torch.nn.Sequential(*layers).eval(), [torch.randn(64, 64) for _ in range(2)]
    own, fallback = (fp4compile.sensitivity(model, batches, name, progress=False) for name in ("mxfp4", "mxfp8"))
    recipe = named("mxfp4").replace(skip_lm_head=False).with_budget(own, sqnr_db=16.0, fallback=fallback)
    assert 0 < len(recipe.rules) < len(own.layers)
    with torch.no_grad():
        expected = [model(x) for x in batches]
        torch.compiler.reset()
        found = [torch.compile(model, backend=fp4compile.backend(recipe))(x) for x in batches]
    assert decibels(expected, found) > 16.0


def test_bad_budget():
    recipe = named("nvfp4")
    for budget in ({}, {"sqnr_db": 20.0, "bf16_share": 0.5}):
        with pytest.raises(ValueError, match="expected one of the two budgets"):
            recipe.with_budget(RANKED, **budget)
    with pytest.raises(ValueError, match="share=1.5: expected a number from 0 to 1"):
        recipe.with_budget(RANKED, bf16_share=1.5)
    with pytest.raises(ValueError, match="sqnr_db=nan"):
        recipe.with_budget(RANKED, sqnr_db=math.nan)
    with pytest.raises(TypeError, match="report: expected a fp4compile.Sensitivity, got dict"):
        recipe.with_budget(RANKED.to_dict(), bf16_share=0.5)
    with pytest.raises(ValueError, match="unknown fallback 'bf16'"):
        recipe.with_budget(RANKED, bf16_share=0.5, fallback="bf16")
    with pytest.raises(ValueError, match=r"fallback=fp4compile.sensitivity\(model, batches, 'mxfp8'\)"):
        recipe.with_budget(RANKED, sqnr_db=20.0, fallback="mxfp8")
    with pytest.raises(ValueError, match="'mxfp8' was not measured on layer 'unused'"):
        recipe.with_budget(RANKED, sqnr_db=20.0, fallback=Sensitivity("mxfp8", RANKED.layers[:3]))


def test_rules_of_a_budget_decide_about_one_layer_each():
    model = Net()
    names = [f"heads.{name}" for name in model.heads]
    layers = tuple(LayerSensitivity(name, 1, 0.0, float(i)) for i, name in enumerate(names))
    recipe = named("mxfp8").with_budget(Sensitivity("mxfp8", layers), bf16_share=0.5, fallback="mxfp4")
    assert recipe.rules == (Rule("heads.a[[]0][*]", "mxfp4"),)
    with torch.no_grad():
        report = fp4compile.explain(model, torch.randn(4, 64), recipe=recipe)
    assert [row.module for row in report.rows if row.left == "mxfp4"] == names[:1]


# ---------------------------------------------------------------- experts


class Experts(torch.nn.Module):
    """A product of experts; tokens are rows, or columns."""

    def __init__(self, n, k, columns=False):
        super().__init__()
        self.columns, self.w = columns, torch.nn.Parameter(torch.randn(3, n, k).bfloat16() / 8)

    def forward(self, x, offs):
        if self.columns:
            return grouped_mm(self.w, x.t(), offs=offs).t()
        return grouped_mm(x, self.w.mT, offs=offs)


class Routed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([Experts(96, 64), Experts(64, 96, columns=True)])
        self.last = torch.nn.Linear(64, 48, bias=False).bfloat16()

    def forward(self, x, offs):
        for layer in self.layers:
            x = layer(x, offs)
        return self.last(x)


class Uninitialised(TorchDispatchMode):
    """Grouped products leave something in the tokens of no expert, as they may."""

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._grouped_mm.default:
            (found if args[1].dim() == 3 else found.t())[10:] = 1e4
        return found


def test_budget_of_experts(monkeypatch):
    """Measured as eager calls multiply, tokens of no expert apart; rules leave experts alone or in MXFP8."""
    without_codegen.install(monkeypatch)
    model, x, offs = Routed(), torch.randn(12, 64).bfloat16(), torch.tensor([4, 4, 10]).int()
    recipe = fp4compile.Recipe(fprop_x="nvfp4", fprop_w="nvfp4", min_m=1, min_n=1, min_k=1)
    with Uninitialised():
        report = fp4compile.sensitivity(model, [(x, offs)], recipe)
    first, second = model.layers
    of_layer = {one.layer: (one.weights, one.output_db) for one in report.layers}
    for name, layer, tokens in (("layers.0.w", first, x), ("layers.1.w", second, first(x, offs))):
        a = fp4compile.quantize(tokens[:10], "nvfp4", offs=offs)
        w = fp4compile.quantize(layer.w.detach(), "nvfp4", per_matrix=True)
        expected = decibels([layer(tokens, offs)[:10]], [fp4compile.scaled_grouped_mm(a, w, offs)])
        assert of_layer[name] == (3 * 64 * 96, pytest.approx(expected, abs=0.01))
    assert all(10 < one.model_db < 40 for one in report.layers) and len(report.layers) == 3

    worst = [one.layer for one in report.layers]
    for budget, fallback, formats in (({"bf16_share": 1.0}, None, "bfloat16"), ({"bf16_share": 1.0}, "mxfp8", "mxfp8")):
        chosen = recipe.with_budget(report, **budget, fallback=fallback)
        with torch.no_grad():
            rows = fp4compile.explain(model, x, offs, recipe=chosen).rows
        assert {row.module: (row.left, row.right) for row in rows} == dict.fromkeys(worst, (formats, formats))
    alone = recipe.with_budget(report, bf16_share=0.54)  # each layer of experts has 46 % of the elements
    skipped = [rule.pattern for rule in alone.rules]
    assert set(skipped) == {next(name for name in worst if name != "last"), "last"}


# ---------------------------------------------------------------- what is shown


def test_table_and_json():
    lines = str(RANKED).splitlines()
    assert lines[4].split() == ["blocks.0.a[1]", "600", "9.0", "10.0"] and "inf" in lines[7]
    assert lines[-1] == "all together about 9.5 dB, if errors are independent"
    worse = Sensitivity("x", (LayerSensitivity("", 1, -math.inf, -math.inf), *RANKED.layers))
    for one in (RANKED, worse):
        text = json.dumps(one.to_dict(), allow_nan=False)
        assert Sensitivity.from_dict(json.loads(text)) == one
    assert worse.worst(sqnr_db=9.0) == ("",)
    with pytest.raises(ValueError, match="content: expected what Sensitivity.to_dict gives"):
        Sensitivity.from_dict({"recipe": "x", "layers": [{"layer": "a"}]})


def test_plot(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"plot: needs matplotlib: pip install fp4compile\[plot\]"):
            RANKED.plot(tmp_path / "bars.png")
    pytest.importorskip("matplotlib")
    RANKED.plot(tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000


def test_a_notebook_shows_the_table_and_a_short_repr_says_what_it_is():
    shown = Page(RANKED._repr_html_())
    assert [line[:2] for line in shown.rows[1:]] == [[one.layer, str(one.weights)] for one in RANKED.layers]
    assert shown.notes == str(RANKED).splitlines()[-1:]
    worst = RANKED.layers[0].layer
    assert repr(RANKED) == (
        f"<Sensitivity: recipe nvfp4, {len(RANKED.layers)} layers, the worst {worst!r}; print it for the table>"
    )
