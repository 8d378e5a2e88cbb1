"""Packed models: same results as the compiled model, less memory, files that load or leave the model as it was."""

import json
import weakref

import pytest
import torch

import fp4compile
from fp4compile.packing import PackedLinear
from fp4compile.recipe import named, recipes


class Net(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = torch.nn.Embedding(96, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=i == 0) for i in range(2))
        self.lm_head = torch.nn.Linear(width, 96, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.lm_head(x)


TOKENS = torch.arange(24).view(2, 12)
STATIC = {"layers.0": 0.002, "layers.1": 0.001}


def run(model):
    with torch.no_grad():
        return model(TOKENS)


def recipe_of(name):
    return named(name).replace(static_scales=STATIC) if name == "nvfp4_static" else named(name)


def test_weights_are_freed_as_it_goes(monkeypatch):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(5)])
    weights = [weakref.ref(layer.weight) for layer in model]
    alive, pack = [], PackedLinear.pack

    def counted(*args):
        alive.append(sum(weight() is not None for weight in weights))
        return pack(*args)

    monkeypatch.setattr(PackedLinear, "pack", counted)
    fp4compile.pack_(model, "nvfp4")
    assert alive == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", recipes())
def test_packed_model_computes_what_the_compiled_model_does(name, autocast):
    model, recipe = Net(), recipe_of(name)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        expected = torch.compile(model, backend=fp4compile.backend(recipe))(TOKENS)
        fp4compile.pack_(model, recipe)
        if not autocast:  # eager rounds to bf16 after every operation, compiled code after every fused loop
            torch.testing.assert_close(model(TOKENS), expected, rtol=1e-5, atol=1e-5)
        backend = fp4compile.backend(recipe, strict=True)
        torch.testing.assert_close(torch.compile(model, backend=backend)(TOKENS), expected, rtol=1e-5, atol=1e-5)
    packed = [(row.left, row.right) for row in backend.report.quantised]
    assert packed == [(recipe.fprop_x, recipe.fprop_w)] * 2


def test_report_and_memory():
    model = Net().bfloat16()
    before = sum(p.numel() * p.element_size() for p in model.layers.parameters())
    report = fp4compile.pack_(model, "nvfp4")
    assert {row.module: row.reason for row in report.rows} == {"layers.0": None, "layers.1": None, "lm_head": "LM head"}
    assert all(isinstance(layer, PackedLinear) for layer in model.layers)
    after = sum(t.numel() * t.element_size() for t in model.layers.state_dict().values() if isinstance(t, torch.Tensor))
    assert after < 0.3 * before
    assert model.lm_head.weight is model.embed.weight


def test_rules_apply():
    model = Net()
    recipe = named("mxfp8").replace(rules=[("layers.0", "nvfp4_weight_only")], skip_first_blocks=2)
    report = fp4compile.pack_(model, recipe)
    assert [(r.left, r.right) for r in report.quantised] == [(None, "nvfp4")]
    assert report.rows[1].reason == "block 1 is among the first 2"


def test_state_dict_round_trip():
    one, other = Net(), Net()
    for model in (one, other):
        fp4compile.pack_(model, "nvfp4")
    other.load_state_dict(one.state_dict())
    assert torch.equal(run(one), run(other))
    third = Net()
    fp4compile.pack_(third, "mxfp8")
    with pytest.raises(Exception, match="layer"):
        third.load_state_dict(one.state_dict())


def test_no_gradient_passes_silently():
    layer = torch.nn.Sequential(torch.nn.Linear(64, 64))
    fp4compile.pack_(layer, "mxfp8")
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(torch.randn(2, 64, requires_grad=True))


def test_a_bare_layer_cannot_be_replaced():
    with pytest.raises(ValueError, match="model: a single linear layer"):
        fp4compile.pack_(torch.nn.Linear(64, 64), "mxfp8")


@pytest.mark.parametrize("name", recipes())
def test_file_round_trip(name, tmp_path):
    model, fresh = Net(), Net()
    fp4compile.pack_(model, recipe_of(name))
    fp4compile.save_packed(model, tmp_path / "packed.safetensors")
    fp4compile.load_packed(fresh, tmp_path / "packed.safetensors")
    assert torch.equal(run(model), run(fresh))
    assert fresh.lm_head.weight is fresh.embed.weight


def assert_refused(model, path, match):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=match):
        fp4compile.load_packed(model, path)
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_bad_files_leave_the_model_as_it_was(tmp_path):
    model, path = Net(), tmp_path / "packed.safetensors"
    with pytest.raises(ValueError, match="no packed layer"):
        fp4compile.save_packed(model, path)
    fp4compile.pack_(model, "nvfp4")
    fp4compile.save_packed(model, path)
    assert_refused(Net(width=128), path, "layer 'layers.0': the file has in and out features")
    assert_refused(torch.nn.Sequential(torch.nn.Linear(64, 64)), path, "no layer 'layers.0'")
    assert_refused(Net().bfloat16(), path, "the model needs torch.bfloat16")
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert_refused(Net(), path, "not a whole safetensors file")
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, path)
    assert_refused(Net(), path, "not written by")


def without(state, *path):
    *parents, last = path
    for key in parents:
        state = state[key]
    del state[last]


def with_value(state, value, *path):
    *parents, last = path
    for key in parents:
        state = state[key]
    state[last] = value


@pytest.mark.parametrize("spoil, match", [
    (lambda meta: meta.clear(), "metadata"),
    (lambda meta: without(meta, "aliases"), "metadata"),
    (lambda meta: without(meta, "layers", "layers.0", "activation"), "metadata"),
    (lambda meta: with_value(meta, [], "layers", "layers.0"), "metadata"),
    (lambda meta: with_value(meta, "gone", "aliases", "lm_head.weight"), "'gone', which 'lm_head.weight' shares"),
    (lambda meta: with_value(meta, "nvfp5", "layers", "layers.0", "weight"), "unknown format 'nvfp5'"),
    (lambda meta: with_value(meta, "mxfp4", "layers", "layers.0", "weight"), "cannot be multiplied"),
    (lambda meta: with_value(meta, "mxfp8", "layers", "layers.0", "activation"), "cannot be multiplied"),
    (lambda meta: with_value(meta, "nvfp5", "layers", "layers.0", "activation"), "unknown format 'nvfp5'"),
    (lambda meta: with_value(meta, "nvfp4_rowwise", "layers", "layers.0", "weight"), "'layers.0.weight_outer' is"),
])  # fmt: skip
def test_files_of_another_format_leave_the_model_as_it_was(spoil, match, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model, path = Net(), tmp_path / "packed.safetensors"
    fp4compile.pack_(model, "nvfp4")
    fp4compile.save_packed(model, path)
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["fp4compile"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    spoil(metadata)
    save_file(tensors, path, {"fp4compile": json.dumps(metadata)})
    assert_refused(Net(), path, match)


def test_a_file_cut_anywhere_is_refused(tmp_path):
    model, path = Net(), tmp_path / "packed.safetensors"
    fp4compile.pack_(model, "mxfp8")
    fp4compile.save_packed(model, path)
    whole = path.read_bytes()
    for length in (0, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert_refused(Net(), path, "not a whole safetensors file")
