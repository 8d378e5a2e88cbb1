"""Static activation scales, measured on batches."""

import sys
import warnings
from collections import UserDict
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import grouped_mm

import fp4compile
from fp4compile.analysis.find import find
from fp4compile.analysis.plan import NOT_CALIBRATED
from fp4compile.calibration.observers import Observation
from fp4compile.recipe import named
from tests.helpers import without_codegen
from tests.helpers.packed_models import write_packed


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
    with pytest.raises(ValueError, match="not finite"):
        fp4compile.calibrate(layer, [torch.full((2, 64), float("nan")), torch.ones(2, 64)])


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


@pytest.mark.parametrize("batches", [torch.ones(2, 64), UserDict(input_ids=1), {"input_ids": 1}, "text", None])
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


# ---------------------------------------------------------------- what is seen


class Counted(torch.nn.Module):
    """Counts its calls; an attribute that changes at each call makes Dynamo compile anew."""

    def __init__(self):
        super().__init__()
        self.layer, self.looped = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x, scale):
        self.calls += 1
        return self.layer(scale * x) * self.calls


class Looping(Counted):
    """Dynamo leaves a function to Python whose loop has a graph break: of `looped` it sees one call of three."""

    def forward(self, x, scale):
        x = self.inner(x)
        for _ in range(2):
            torch._dynamo.graph_break()
            x = self.looped(scale * x)
        return x

    def inner(self, x):
        return self.looped(self.layer(x))


class Generating(Counted):
    def generate(self, x, steps):
        self.traced = torch.compiler.is_compiling()
        for step in range(steps):
            self(x, float(step))


def test_every_call_is_seen():
    """Dynamo stops compiling anew after 8 times, and then runs the model where nothing is seen."""
    x = torch.randn(2, 64)
    for model, method, batches in [
        (counted := Counted(), counted, [(x, float(i)) for i in range(10)]),
        (generating := Generating(), generating.generate, [(x, 4)]),
    ]:
        recipe = fp4compile.calibrate(method, batches)
        largest = (model.calls - 1) * x.abs().max().item()
        assert dict(recipe.static_scales) == {"layer": pytest.approx(largest / 2688)}
        assert model._compiled_call_impl is None
    assert (counted.calls, generating.calls) == (10, 4)
    assert not generating.traced, "a loop around a model takes Dynamo long"


def test_a_forward_pass_that_is_captured_with_its_backward_is_seen():
    class Training(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x):
            with torch.enable_grad():
                torch._dynamo.graph_break()
                return self.layer(x)

    x = torch.randn(2, 64)
    recipe = fp4compile.calibrate(Training(), [x])
    assert dict(recipe.static_scales) == {"layer": pytest.approx(x.abs().max().item() / 2688)}


def test_batches_run_in_eval_mode():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 64))
    x = torch.randn(8, 64)
    recipe = fp4compile.calibrate(model, [x])
    assert recipe == fp4compile.calibrate(model.eval(), [x])
    assert not model[0].num_batches_tracked
    encoder = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True).eval()
    assert [name for name, _ in fp4compile.calibrate(encoder, [x[None]]).static_scales] == [
        "linear1", "linear2", "self_attn.in_proj_weight", "self_attn.out_proj"
    ]  # fmt: skip


def test_a_model_whose_weights_are_loaded_when_it_runs_is_not_refused():
    import accelerate  # only here: it imports transformers

    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model[0].weight.is_meta
    with pytest.warns(UserWarning, match="also run outside of the captured graphs"):  # its hook copies the weight there
        fp4compile.calibrate(model, [torch.randn(8, 64)])


def test_models_with_operators_of_higher_order():
    """As flex_attention is; torch refuses these under a dispatch mode that does not ask for them."""
    layer = torch.nn.Linear(64, 64)

    def chosen(x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (layer(x),))

    x = torch.randn(8, 64)
    ((name, scale),) = fp4compile.calibrate(chosen, [x]).static_scales
    assert (name, scale) == ("layer", pytest.approx(x.abs().max().item() / 2688))


def test_a_layer_of_which_calls_are_missed_is_dynamic():
    with pytest.warns(UserWarning, match="layers that also run outside of the captured graphs .*: looped$"):
        recipe = fp4compile.calibrate(Looping(), [(torch.randn(2, 64), 5.0)])
    assert [name for name, _ in recipe.static_scales] == ["layer"]


def test_a_part_that_is_captured_by_itself_has_both_names():
    """The backend looks for the name that rules see, which equal parts share, and `pack_` for the full one."""

    class Block(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.up, self.scale = torch.nn.Linear(64, 64), scale

        def forward(self, x):
            return self.up(x * self.scale)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(map(Block, (torch.tensor(1.0), torch.tensor(3.0))))

        def forward(self, x):
            for block in self.blocks:
                torch._dynamo.graph_break()
                block(x)

    model, x = Net(), torch.randn(2, 64)
    recipe = fp4compile.calibrate(model, [x])
    largest = x.abs().max().item() / 2688
    expected = {"up": 3 * largest, "blocks.0.up": largest, "blocks.1.up": 3 * largest}
    assert dict(recipe.static_scales) == pytest.approx(expected)
    fp4compile.pack_(model, recipe)
    assert model.blocks[0].up.layer_format.activation_outer == pytest.approx(largest)


def test_experts_have_one_scale_and_rows_of_no_expert_none():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(3, 64, 64, dtype=torch.bfloat16))

        def forward(self, x, offs):
            return grouped_mm(x, self.w.mT, offs=offs)

    x = torch.randn(24, 64, dtype=torch.bfloat16)
    x[20:] = torch.nan
    recipe = fp4compile.calibrate(Experts(), [(x, torch.tensor([8, 8, 20], dtype=torch.int32))])
    assert dict(recipe.static_scales) == {"w": pytest.approx(x[:20].abs().max().item() / 2688)}


def test_activations_are_seen_with_the_contraction_last():
    """Blocks lie along it."""
    w, x, seen = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(64, 48), []
    models = (lambda x: w @ x, lambda x: w.t() @ x, lambda x: x.t() @ w, lambda x: x.t() @ w.t())
    for model in models:
        observed = Observation(model, find, lambda gemm, names, weight, x, groups: seen.append(x))
        with torch.no_grad():
            observed(x)
    assert len(seen) == 4 and all(torch.equal(activation, x.t()) for activation in seen)


# ---------------------------------------------------------------- what scales do


def test_static_outputs_are_the_dynamic_ones_of_the_batch(monkeypatch):
    without_codegen.install(monkeypatch)
    # The second layer's largest activation is 1, whether the first is quantised or not.
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Hardtanh(), torch.nn.Linear(96, 64)).bfloat16()
    x = 10 * torch.randn(16, 64, dtype=torch.bfloat16)
    recipe = fp4compile.calibrate(torch.compile(model), [x])
    assert len(recipe.static_scales) == 2
    with torch.no_grad():
        static = torch.compile(model, backend=fp4compile.backend(recipe))(x)
        dynamic = torch.compile(model, backend=fp4compile.backend("nvfp4"))(x)
    assert torch.equal(static, dynamic)


def test_a_layer_without_a_scale_is_dynamic_and_the_report_says_so(monkeypatch, tmp_path):
    without_codegen.install(monkeypatch)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)), torch.randn(4, 64)
    recipe = named("nvfp4_static").replace(static_scales={"0": 0.001})
    backend = fp4compile.backend(recipe, strict=True)
    with torch.no_grad():
        y = torch.compile(model, backend=backend)(x)
        mixed = fp4compile.backend("nvfp4", rules=[("0", "nvfp4_static")], static_scales={"0": 0.001})
        assert torch.equal(y, torch.compile(model, backend=mixed)(x))
    assert [row.note for row in backend.report.rows] == [None, NOT_CALIBRATED]
    assert f"\n{NOT_CALIBRATED}: 1" in str(backend.report) and NOT_CALIBRATED not in str(mixed.report)

    write_packed(model, tmp_path / "packed.safetensors", recipe)
    fresh = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    fp4compile.load_packed(fresh, tmp_path / "packed.safetensors")
    assert [layer.layer_format.activation_outer for layer in fresh] == [0.001, None]
    with torch.no_grad():
        assert torch.equal(fresh(x), y)


def test_experts_that_were_never_reached_are_dynamic(monkeypatch, tmp_path):
    """Not run, or without a token in any batch: dynamic, as the report says; packed, saved and loaded, too."""
    without_codegen.install(monkeypatch)

    class Experts(torch.nn.Module):
        is_transposed = False

        def __init__(self):
            super().__init__()
            self.up_proj = torch.nn.Parameter(torch.randn(3, 64, 64, dtype=torch.bfloat16) / 8)

        def forward(self, x, offs):
            return grouped_mm(x, self.up_proj.mT, offs=offs)

    class Routed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(Experts() for _ in range(3))

        def forward(self, x, offs, calibrating=False):
            none = torch.zeros_like(offs) if calibrating else offs
            x = self.layers[0](x, offs) + self.layers[1](x, none)
            return x if calibrating else self.layers[2](x, offs)

    model, fresh, x = Routed(), Routed(), torch.randn(12, 64).bfloat16()
    offs = torch.tensor([4, 4, 12], dtype=torch.int32)
    options = {"recipe": "nvfp4", "min_m": 1, "min_n": 1, "min_k": 1}
    recipe = fp4compile.calibrate(model, [(x, offs, True)], options)
    outer = x.abs().max().item() / 2688
    assert dict(recipe.static_scales) == {"layers.0.up_proj": pytest.approx(outer)}

    def run(model):
        torch._dynamo.reset()
        backend = fp4compile.backend(recipe, strict=True)
        with torch.no_grad():
            found = torch.compile(model, backend=backend)(x, offs)
        return found, {row.module: row.note for row in backend.report.rows}

    def by_hand(x, i):
        scale = {"outer": torch.tensor(recipe.static_scale("layers.0.up_proj"))} if i == 0 else {}
        a, b = fp4compile.quantize(x, "nvfp4", offs=offs, **scale), model.layers[i].up_proj.detach()
        return fp4compile.scaled_grouped_mm(a, fp4compile.quantize(b, "nvfp4", per_matrix=True), offs)

    expected = by_hand(by_hand(x, 0) + by_hand(x, 1), 2)
    found, notes = run(model)
    assert torch.equal(found, expected)
    assert notes == {f"layers.{i}.up_proj": NOT_CALIBRATED if i else None for i in range(3)}
    write_packed(model, tmp_path / "packed.safetensors", recipe)
    fp4compile.load_packed(fresh, tmp_path / "packed.safetensors")
    kept = [layer.up_proj_packed.layer_format.activation_outer for layer in fresh.layers]
    assert kept == [pytest.approx(outer), None, None] and torch.equal(run(fresh)[0], expected)


def test_progress_needs_no_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("fp4compile.report.progress.find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4compile.calibrate(torch.nn.Linear(64, 48), [torch.randn(4, 64)])
        fp4compile.pack_(torch.nn.Sequential(torch.nn.Linear(64, 48)))
    assert capsys.readouterr() == ("", "")


def test_a_terminal_shows_what_is_packed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for progress in (True, False):
        fp4compile.pack_(torch.nn.Sequential(torch.nn.Linear(64, 48)), progress=progress)
        assert ("pack: 100%" in capsys.readouterr().err) == progress
