"""Static activation scales, measured on batches."""

from collections import UserDict
from types import SimpleNamespace

import pytest
import torch

import fp4compile
from tests.helpers import without_codegen


def test_calibrate_measures_the_largest_activation(monkeypatch):
    without_codegen.install(monkeypatch)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    batches = [torch.randn(8, 64), (3 * torch.randn(5, 64),), {"input": torch.randn(2, 64)}]
    recipe = fp4compile.calibrate(model, batches)
    seen = [batches[0], batches[1][0], batches[2]["input"]]
    with torch.no_grad():
        first = max(x.abs().max() for x in seen) / 2688
        second = max(model[:2](x).max() for x in seen) / 2688
    assert dict(recipe.static_scales) == {"0": first.item(), "2": pytest.approx(second.item(), rel=1e-6)}

    x = torch.randn(8, 64)
    with torch.no_grad():
        y = torch.compile(model[0], backend=fp4compile.backend(recipe.replace(static_scales={"": first.item()})))(x)
        xq = fp4compile.quantize(x, "nvfp4", outer=first).dequantize()
        wq = fp4compile.quantize(model[0].weight, "nvfp4").dequantize()
    torch.testing.assert_close(y, xq @ wq.t() + model[0].bias.detach(), rtol=1e-5, atol=1e-5)


def test_calibrate_bad_input():
    layer = torch.nn.Linear(64, 48)
    with pytest.raises(ValueError, match="batches: got none"):
        fp4compile.calibrate(layer, [])
    with pytest.raises(ValueError, match="not finite"):
        fp4compile.calibrate(layer, [torch.full((2, 64), float("inf"))])
    with pytest.raises(ValueError, match="activation_scale='static'"):
        fp4compile.calibrate(layer, [torch.ones(2, 64)], "mxfp8")
    with pytest.raises(ValueError, match="no layer"):
        fp4compile.calibrate(torch.nn.ReLU(), [torch.ones(2, 64)])


def test_layers_that_the_recipe_leaves_alone_are_not_measured():
    """Nor are they asked to be finite; a rule that names another recipe decides whether the layer reads a scale."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.mid, self.down, self.lm_head = (torch.nn.Linear(64, width) for width in (96, 64, 48, 80))

        def forward(self, x):
            return self.mid(x), self.down(x), self.lm_head(torch.inf * x), self.up(x - torch.inf)

    recipe = {"recipe": "nvfp4_static", "rules": [("up", "skip"), ("down", "mxfp8")]}
    calibrated = fp4compile.calibrate(Net(), [torch.randn(8, 64)], recipe)
    assert [name for name, _ in calibrated.static_scales] == ["mid"]
    report = fp4compile.explain(Net(), torch.randn(8, 64), recipe=calibrated)
    forward = {row.module: row.left for row in report.quantised if row.product == "fprop"}
    assert forward == {"mid": "nvfp4", "down": "mxfp8"}

    # A rule that names a recipe with static scales asks for one, in a model whose other layers have none.
    only = {"recipe": "nvfp4_static", "rules": [("mid", "nvfp4_static"), ("*", "mxfp8")]}
    assert [name for name, _ in fp4compile.calibrate(Net(), [torch.randn(8, 64)], only).static_scales] == ["mid"]


class Keywords(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 48)

    def forward(self, input_ids=None, scale=1):
        return self.layer(input_ids) * scale


def test_a_batch_may_be_any_mapping():
    """A tokenizer's output is one, and no dict."""
    batch = UserDict(input_ids=torch.full((2, 64), 3.0))
    recipe = fp4compile.calibrate(Keywords(), [batch])
    assert dict(recipe.static_scales) == {"layer": pytest.approx(3 / 2688)}


@pytest.mark.parametrize("batches", [torch.ones(2, 64), UserDict(input_ids=1), {"input_ids": 1}, "text"])
def test_one_batch_in_place_of_several_is_refused(batches):
    with pytest.raises(TypeError, match=rf"batches: .* got {type(batches).__name__}; for one batch, pass \[batch\]"):
        fp4compile.calibrate(Keywords(), batches)


def test_a_model_of_which_nothing_is_quantised_or_captured_is_refused():
    @torch.compiler.disable
    def hidden(x):
        return x @ x

    for model, recipe in [
        (lambda x: hidden(x), "nvfp4_static"),
        (Keywords(), {"recipe": "nvfp4_static", "rules": [("*", "mxfp8")]}),
        (Keywords(), {"recipe": "nvfp4_static", "rules": [("layer", "skip")]}),
    ]:
        with pytest.raises(ValueError, match="model: recipe .* quantises no layer of it with a static scale"):
            fp4compile.calibrate(model, [torch.ones(64, 64)], recipe)


def test_a_model_reached_through_an_attribute_has_the_names_of_the_model():
    """Scales that a lambda around the model measured are those that the compiled model looks for."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    batch = torch.ones(8, 64)
    trained = SimpleNamespace(model=model)
    recipe = fp4compile.calibrate(lambda x: trained.model(x) * 2, [batch])
    assert recipe == fp4compile.calibrate(model, [batch])
    assert [name for name, _ in recipe.static_scales] == ["0", "2"]
