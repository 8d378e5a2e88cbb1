"""Files of packed models: what was written comes back, ties too, or the model stays as it was."""

import copy
import json
import types
import warnings

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp4compile
import fp4compile_autoload
from fp4compile.formats import formats
from fp4compile.recipe import recipes
from fp4compile.weights.linear import PackedLinear
from tests.helpers.packed_models import Net, Twice, recipe_of, run, write_packed


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
    write_packed(model, path)
    assert_refused(Net(width=128), path, "layer 'layers.0': the file has in and out features")
    assert_refused(torch.nn.Sequential(torch.nn.Linear(64, 64)), path, "no layer 'layers.0'")
    assert_refused(Net().bfloat16(), path, "the model needs torch.bfloat16")
    save_file({"x": torch.ones(1)}, path)
    assert_refused(Net(), path, "not written by")


def test_paths_beside_the_file_are_refused_with_the_one_to_pass(tmp_path):
    write_packed(Net(), tmp_path / "packed.safetensors")
    assert_refused(Net(), tmp_path, "pass the file's path")
    assert_refused(Net(), tmp_path / "model.safetensors.index.json", "expected a checkpoint's directory")


class OfHub(nn.Sequential, PyTorchModelHubMixin):
    pass


def test_libraries_whose_from_pretrained_knows_no_packed_layers_warn(tmp_path):
    class ModelMixin(nn.Sequential):  # stands for diffusers'
        def save_pretrained(self, path):
            (path / "model.safetensors").touch()

    stand_in = types.ModuleType("diffusers.models.modeling_utils")
    stand_in.ModelMixin = ModelMixin
    fp4compile_autoload._warn_when_saved(stand_in)
    for kind in (OfHub, ModelMixin):
        model, written = kind(nn.Linear(64, 64)), tmp_path / "model.safetensors"
        with warnings.catch_warnings(action="error"):
            model.save_pretrained(tmp_path)
        written.unlink()
        fp4compile.pack_(model, "nvfp4_weight_only")
        with pytest.warns(UserWarning, match=f"from_pretrained of {kind.__name__} gives packed layers random weights"):
            model.save_pretrained(tmp_path)
        assert written.exists()


# ---------------------------------------------------------------- shared memory


class Views(nn.Module):
    """Tied in every way: one object twice, a transposed square, part of another, two parameters of one memory."""

    def __init__(self, tied=True):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.embed = nn.Embedding(40, 40)
        self.same = nn.Embedding(40, 40)
        self.swapped = nn.Linear(40, 40, bias=False)
        self.twin = nn.Embedding(40, 40)
        self.part = nn.Parameter(torch.randn(7, 40))
        self.strided = nn.Parameter(torch.randn(40, 3))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("repeated", torch.randn(1).expand(5))
        self.register_buffer("columns", torch.randn(4, 6).t())
        self.register_buffer("count", torch.tensor(3))
        self.float8 = nn.Parameter(torch.randn(4, 8).to(torch.float8_e4m3fn), requires_grad=False)
        if tied:
            self.same.weight = self.embed.weight
            self.swapped.weight.data = self.embed.weight.data.t()
            self.twin.weight.data = self.swapped.weight.data
            self.part.data = self.embed.weight.data[3:10]
            self.strided.data = self.embed.weight.data[:, 5:11:2]

    def tied(self):
        """Whether each is tied to the embedding, in the order of the constructor."""
        marked = torch.arange(1600.0).view(40, 40)
        with torch.no_grad():
            self.embed.weight.copy_(marked)
        return [
            self.same.weight is self.embed.weight,
            torch.equal(self.swapped.weight, marked.t()),
            torch.equal(self.twin.weight, marked.t()),
            torch.equal(self.part, marked[3:10]),
            torch.equal(self.strided, marked[:, 5:11:2]),
        ]


def views_file(path):
    model = Views()
    write_packed(model, path, fp4compile.Recipe(fprop_w="nvfp4", rules=[("swapped", "skip")]))
    return model


def assert_same_state(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (second[name].dtype, second[name].shape), name
            assert value.cpu().tolist() == second[name].tolist() if value.itemsize > 1 else True, name
            bits = [t.contiguous().view(-1).view(torch.uint8).tolist() for t in (value, second[name])]
            assert bits[0] == bits[1], name


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("tied", [True, False])
def test_ties_come_back(tied, device, tmp_path):
    """Equal tensors that share memory, also in a model that does not share it; other tensors where the model does."""
    path = tmp_path / "views.safetensors"
    saved = views_file(path)
    assert all(saved.tied()) and not all(Views(tied=False).tied())
    saved = views_file(path)
    with torch.device(device):
        fresh = Views(tied)
    fp4compile.load_packed(fresh, path)
    assert_same_state(saved, fresh)
    assert fresh.twin.weight.data_ptr() == fresh.swapped.weight.data_ptr()
    assert fresh.same.weight is fresh.embed.weight and fresh.twin.weight is not fresh.swapped.weight
    assert fresh.tied() == [True] + [tied and device == "cpu"] * 4
    with safe_open(path, "pt") as file:
        stored = set(file.keys())
    assert not {"same.weight", "twin.weight"} & stored and {"part", "strided", "none", "nothing"} <= stored


def test_tensors_that_overlap_come_apart_with_their_values(tmp_path):
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)
            flat = torch.randn(100)
            self.a, self.b = nn.Parameter(flat[:60]), nn.Parameter(flat[40:])
            self.register_buffer("bits", flat.view(torch.int32)[:50])
            self.register_buffer("every", flat[::2])
            self.register_buffer("columns", torch.randn(6, 4).t())
            self.register_buffer("column", self.columns[1])

    model, path = Overlapping(), tmp_path / "packed.safetensors"
    write_packed(model, path, "mxfp8")
    fresh = Overlapping()
    fp4compile.load_packed(fresh, path)
    assert_same_state(model, fresh)


def test_another_default_device_than_the_models(tmp_path):
    """As after `torch.set_default_device("cuda")` beside a model on the CPU."""
    model, fresh, path = Views(), Views(), tmp_path / "packed.safetensors"
    with torch.device("meta"):
        write_packed(model, path, "mxfp8")
        fp4compile.load_packed(fresh, path)
    assert_same_state(model, fresh)


def test_values_that_the_model_cannot_hold_are_refused(tmp_path):
    """Tied in the model, apart in the file: no loading would be right."""
    path = tmp_path / "packed.safetensors"
    model = Views(tied=False)
    write_packed(model, path, fp4compile.Recipe(fprop_w="nvfp4", rules=[("swapped", "skip")]))
    assert_refused(Views(), path, "shares memory with")
    net = Net()
    net.lm_head.weight = nn.Parameter(net.lm_head.weight + 1)
    write_packed(net, path)
    assert_refused(Net(), path, "'embed.weight' shares memory with 'lm_head.weight'")
    same = Net()
    same.lm_head.weight = nn.Parameter(same.embed.weight.detach().clone())
    write_packed(same, path)
    fresh = Net()
    fp4compile.load_packed(fresh, path)
    assert torch.equal(run(fresh), run(same))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_with_two_names(device, tmp_path):
    model, path, x = Twice(), tmp_path / "packed.safetensors", torch.randn(3, 64)
    write_packed(model, path)
    with torch.device(device):
        fresh = Twice()
    fp4compile.load_packed(fresh, path)
    assert fresh.a is fresh.b and isinstance(fresh.a, PackedLinear) and fresh.one is fresh.two
    with torch.no_grad():
        assert torch.equal(fresh(x), model(x))
        apart = Twice()
        apart.b, apart.two = copy.deepcopy(apart.a), copy.deepcopy(apart.one)
        fp4compile.load_packed(apart, path)
        assert apart.a is not apart.b and apart.a.weight_data is apart.b.weight_data
        assert torch.equal(apart(x), model(x))


def test_two_layers_do_not_load_into_one(tmp_path):
    model, path = Twice(), tmp_path / "packed.safetensors"
    model.two = copy.deepcopy(model.one)
    with torch.no_grad():
        model.two[0].weight.add_(1)  # and the same bias
    write_packed(model, path)
    assert_refused(Twice(), path, "'one.0' and 'two.0' are one layer of the model, the file has different weights")


@pytest.mark.parametrize("name", ["nvfp4", "float8_rowwise"])
def test_conv1d(name, tmp_path):
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    one, other = (nn.Sequential(conv1d(72, 40), nn.Linear(72, 33)) for _ in range(2))
    write_packed(one, tmp_path / "packed.safetensors", name)
    fp4compile.load_packed(other, tmp_path / "packed.safetensors")
    x = torch.randn(3, 40)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))
    assert isinstance(other[0], conv1d) and other[0].weight.shape == (40, 72)
    assert torch.equal(one[0].weight, other[0].weight)


def test_of_models_with_activation_checkpointing(tmp_path):
    """The names in state dicts lack the wrapper's segment, and so do those in files."""
    model, path = Net(), tmp_path / "packed.safetensors"
    fp4compile.pack_(model, "mxfp8")
    expected = run(model)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp4compile.save_packed(model, path)
    fresh = Net()
    fp4compile.load_packed(fresh, path)
    assert isinstance(fresh.layers[0], PackedLinear) and torch.equal(run(fresh), expected)


def test_of_compiled_models(tmp_path):
    """The names are the model's, without the wrapper's."""
    one, other = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 33)) for _ in range(2))
    fp4compile.pack_(one, "nvfp4")
    fp4compile.save_packed(torch.compile(one, backend="eager"), tmp_path / "packed.safetensors")
    fp4compile.load_packed(torch.compile(other, backend="eager"), tmp_path / "packed.safetensors")
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


def test_a_state_of_version_0_1():
    """Its description had no rule of scales."""
    one, other = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 33)) for _ in range(2))
    for model in (one, other):
        fp4compile.pack_(model, "nvfp4")
    old = {name: value for name, value in one[0].description.items() if name != "scale_rule"}
    other.load_state_dict(one.state_dict() | {"0._extra_state": old})
    x = torch.randn(3, 64)
    with torch.no_grad():
        assert torch.equal(one(x), other(x))


def test_rules_of_earlier_versions_for_block_scales(tmp_path, monkeypatch):
    """States, files and pickles that name one hold codes and scales like all others."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 33))
    fp4compile.pack_(earlier := copy.deepcopy(model), "nvfp4")
    in_pickle = copy.deepcopy(earlier)
    with monkeypatch.context() as patch:
        patch.setattr(formats, "check_scale_rule", lambda *given: None)
        for layer, pickled, rule in zip(earlier, in_pickle, ("four_over_six", "four_over_six_448"), strict=True):
            layer._scale_rule = pickled._scale_rule = rule
            # Pickles of that time have the object in the place of its fields.
            kept = {"layer_format": pickled.layer_format, "weight_dtype": pickled.weight_dtype}
            for name in ("_format", "_activation", "_activation_outer", "_scale_rule", "_weight_dtype"):
                del vars(pickled)[name]
            vars(pickled).update(kept)
        fp4compile.save_packed(earlier, tmp_path / "packed.safetensors")
        state = earlier.state_dict()
    torch.save(in_pickle, tmp_path / "packed.pt")
    from_file, from_state = copy.deepcopy(model), copy.deepcopy(model)
    fp4compile.load_packed(from_file, tmp_path / "packed.safetensors")
    fp4compile.pack_(from_state, {"recipe": "nvfp4", "weight_scales": "mse"})
    from_state.load_state_dict(state)
    pickled = torch.load(tmp_path / "packed.pt", weights_only=False)
    x = torch.randn(3, 64)
    for found in (from_file, from_state, pickled):
        with torch.no_grad():
            assert torch.equal(found(x), earlier(x))
        assert [layer.layer_format.scale_rule for layer in found] == ["mse", "mse"]
    from_state.load_state_dict(pickled.state_dict())


def test_a_state_dict_that_another_library_saved_is_refused_with_what_to_do(tmp_path):
    """diffusers writes such files."""
    model = nn.Sequential(nn.Linear(64, 64))
    fp4compile.pack_(model, "nvfp4")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ValueError, match="state dict of a packed model.*call pack_ with the same recipe"):
            fp4compile.load_packed(nn.Sequential(nn.Linear(64, 64)), path)


def test_a_directory_of_save_pretrained(tmp_path):
    from tests.helpers.tiny_llama import llama  # imports transformers

    one, other = (llama(seed=seed) for seed in range(2))
    fp4compile.pack_(one, "nvfp4")
    one.save_pretrained(tmp_path)
    fp4compile.load_packed(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(*(model(torch.arange(8)[None]).logits for model in (one, other)))


# ---------------------------------------------------------------- models on the meta device


@pytest.mark.parametrize("name", recipes())
def test_file_round_trip(name, tmp_path):
    """Into a model with other weights, and into one on meta, which is materialised."""
    model, path = Net(), tmp_path / "packed.safetensors"
    model.embed.weight.requires_grad_(False)
    write_packed(model, path, recipe_of(name))
    for place, device in (("cpu", None), ("meta", None), ("meta", "cpu"), ("meta", torch.device("cpu"))):
        with torch.device(place):
            fresh = Net().requires_grad_(False)
        fresh.layers[0].bias.requires_grad_(True)
        fresh.embed.weight.note = "kept"
        fp4compile.load_packed(fresh, path, device)
        assert not any(tensor.is_meta for tensor in (*fresh.parameters(), *fresh.buffers()))
        assert torch.equal(run(model), run(fresh))
        assert fresh.lm_head.weight is fresh.embed.weight and fresh.embed.weight.note == "kept"
        assert [name for name, one in fresh.named_parameters() if one.requires_grad] == ["layers.0.bias"]


def test_part_of_a_model_on_meta(tmp_path):
    model, path, fresh = Net(), tmp_path / "packed.safetensors", Net()
    write_packed(model, path)
    fresh.layers.to("meta")
    embed = fresh.embed.weight
    fp4compile.load_packed(fresh, path)
    assert torch.equal(run(model), run(fresh)) and fresh.embed.weight is embed


def test_what_the_file_cannot_restore(tmp_path):
    model, path = Net(), tmp_path / "packed.safetensors"
    write_packed(model, path)
    with torch.device("meta"):
        fresh = Net()
        fresh.layers[1].register_forward_hook(lambda *args: None)
        fresh.embed.register_buffer("frequencies", torch.ones(3), persistent=False)
    with pytest.raises(ValueError, match="'embed.frequencies' is on the meta device"):
        fp4compile.load_packed(fresh, path)
    assert type(fresh.layers[0]) is nn.Linear and all(tensor.is_meta for tensor in fresh.parameters())
    fresh.embed.frequencies = torch.ones(3)
    fp4compile.load_packed(fresh, path)
    assert torch.equal(run(fresh), run(model)) and len(fresh.layers[1]._forward_hooks) == 1


def test_nothing_is_saved_of_a_model_on_meta(tmp_path):
    model = Net()
    fp4compile.pack_(model, "nvfp4")
    for change in (lambda: model.embed.to("meta"), lambda: model.to("meta")):
        change()
        with pytest.raises(ValueError, match="model: 'embed.weight' is on the meta device"):
            fp4compile.save_packed(model, tmp_path / "packed.safetensors")
    assert not list(tmp_path.glob("*.safetensors*"))


# ---------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("device, error", [
    ("nowhere", ValueError), ("meta", ValueError), ("cuda:77", ValueError), (1.5, TypeError), ([], TypeError),
])  # fmt: skip
def test_bad_devices_leave_the_model_as_it_was(device, error, tmp_path):
    model, path = Net(), tmp_path / "packed.safetensors"
    write_packed(model, path)
    with torch.device("meta"):
        fresh = Net()
    with pytest.raises(error, match="device: "):
        fp4compile.load_packed(fresh, path, device)
    assert type(fresh.layers[0]) is nn.Linear and fresh.embed.weight.is_meta


def test_what_is_no_module(tmp_path):
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got NoneType"):
        fp4compile.save_packed(None, tmp_path / "x")
    with pytest.raises(TypeError, match="model: expected a torch.nn.Module, got dict"):
        fp4compile.load_packed({}, tmp_path / "x")


def test_layers_that_cannot_be_packed_are_refused(tmp_path):
    model, path = Net(), tmp_path / "packed.safetensors"
    write_packed(model, path)
    fresh = Net()
    fresh.layers[1].register_forward_pre_hook(lambda module, args: None)
    assert_refused(fresh, path, "layer 'layers.1': .* cannot be: it has a forward pre-hook")
    fresh = Net()
    nn.utils.parametrizations.weight_norm(fresh.layers[0])
    with pytest.raises(ValueError, match="layer 'layers.0': .* parametrised: weight"):
        fp4compile.load_packed(fresh, path)


def test_extra_state_is_not_dropped_without_a_word(tmp_path):
    class Counting(nn.Module):
        def get_extra_state(self):
            return {"count": 3}

        def set_extra_state(self, state):
            raise AssertionError

    def build():
        return nn.Sequential(nn.Linear(64, 64), Counting())

    model, path = build(), tmp_path / "packed.safetensors"
    fp4compile.pack_(model, "nvfp4")
    with pytest.warns(UserWarning, match="the extra state of '1' is not written"):
        fp4compile.save_packed(model, path)
    fresh = build()
    fp4compile.load_packed(fresh, path)
    assert_same_state(fresh, model)


# ---------------------------------------------------------------- files of version 0.1


def test_files_of_version_0_1_load(tmp_path):
    """Their metadata: the layers by their first name, and aliases."""
    model, path = Net(), tmp_path / "packed.safetensors"
    write_packed(model, path, "float8_rowwise")
    with safe_open(path, "pt") as file:
        content = json.loads(file.metadata()["fp4compile"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert content["aliases"] == {"lm_head.weight": "embed.weight"} and len(tensors) == 6
    old = {"layers": content["layers"], "aliases": content["aliases"]}
    save_file(tensors, path, {"fp4compile": json.dumps(old)})
    for device in ("cpu", "meta"):
        with torch.device(device):
            fresh = Net()
        fp4compile.load_packed(fresh, path)
        assert torch.equal(run(fresh), run(model)) and fresh.lm_head.weight is fresh.embed.weight
