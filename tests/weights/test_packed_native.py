"""Packed weights on GPUs with block-scaled matrix units: multiplied there, stored for every device, and never stale.

Such a GPU is not here. The tiers are those of models that are compiled for one on fake tensors. Where values matter,
the CPU is taken for one, or the GPU that is there.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fp4compile
from fp4compile.formats.layouts import swizzled_numel
from fp4compile.hardware import Target
from fp4compile.weights import files
from fp4compile.weights import scale_layout as scales
from fp4compile.weights.buffers import BUFFERS, buffer_shapes
from fp4compile.weights.linear import PackedLinear
from tests.helpers.absent_gpu_model import DEVICE, compiled_for, pretended
from tests.helpers.packed_models import Twice, write_packed

BF16 = torch.bfloat16
ROWS, INNER, OUTER = 300, 1056, 496  # neither rows nor columns of the scales fill whole tiles
NATIVE = ["nvfp4", "nvfp4_one_level", "nvfp4_rowwise", "mxfp8", "mxfp4", "mxfp8_32x32", "nvfp4_train"]
LINEAR = ["nvfp4_weight_only", "float8_rowwise"]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def linear_model(inner=INNER, outer=OUTER, bias=True, device="cpu"):
    return nn.Sequential(nn.Linear(inner, outer, bias, device, BF16), nn.ReLU()).requires_grad_(False)


# ---------------------------------------------------------------- the tier


def from_cache(monkeypatch, recipe, path):
    model = linear_model(device="meta")

    def arrive():
        for name, parameter in model[0].named_parameters():
            model[0]._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=DEVICE), requires_grad=False)
        return model

    return arrive


def packed_on_the_cpu(monkeypatch, recipe, path):
    model = linear_model(bias=False)  # torch cannot put a fake parameter into the place of a real one
    fp4compile.pack_(model, recipe)
    return lambda: model.to(DEVICE)


def loaded_from_a_file(monkeypatch, recipe, path):
    model, fresh = linear_model(), linear_model(device="meta")
    write_packed(model, path, recipe)
    content = files._read(path)  # here, because a file is not read into fake tensors, whose scales have no values
    monkeypatch.setattr(files, "_read", lambda path: content)
    monkeypatch.setattr(files, "check_buffers", lambda buffers: None)

    def arrive():
        fp4compile.load_packed(fresh, path, DEVICE)
        return fresh

    return arrive


def compiled(monkeypatch, road, recipe, sm, path):
    """(the model on a GPU of that compute capability, what became of it)."""
    arrive = road(monkeypatch, recipe, path)
    with pretended(monkeypatch, sm) as launches:
        model = arrive()
        x = torch.empty(ROWS, INNER, device=DEVICE, dtype=BF16)
        return model, compiled_for(monkeypatch, model, x, recipe, launches)


@pytest.mark.parametrize("recipe, road", [
    *((recipe, packed_on_the_cpu) for recipe in NATIVE),
    *((recipe, road) for recipe in ("nvfp4", "mxfp8_32x32") for road in (from_cache, loaded_from_a_file)),
])  # fmt: skip
def test_products_are_native(recipe, road, monkeypatch, tmp_path):
    _, found = compiled(monkeypatch, road, recipe, 100, tmp_path / "packed.safetensors")
    for report in (found.report, found.explained):
        assert [(row.tier, row.reason) for row in report.rows] == [("native", None)]
    (graph,) = found.graphs
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    # No scales are laid out in the graph: those of the activation are quantised so, those of the weight lie so.
    assert not [name for name in names if "pad" in name or "copy" in name or "clone" in name]
    assert {one.constants["SWIZZLED"] for one in found.launches if "quantize" in one.kernel.__name__} == {True}
    inputs = graph.graph.find_nodes(op="placeholder")
    assert [node for node in inputs if node.meta["val"].dtype.itemsize == 1 and node.meta["val"].dim() == 1]


@pytest.mark.parametrize("recipe, sm, road", [
    ("nvfp4", 90, packed_on_the_cpu), ("mxfp8", 90, loaded_from_a_file), ("nvfp4_weight_only", 100, packed_on_the_cpu),
])  # fmt: skip
def test_scales_stay_linear_where_nothing_reads_them_swizzled(recipe, sm, road, monkeypatch, tmp_path):
    model, found = compiled(monkeypatch, road, recipe, sm, tmp_path / "packed.safetensors")
    assert [row.tier for row in found.report.rows] == ["emulated"]
    assert model[0].weight_scales.dim() == 2
    assert {one.constants["SWIZZLED"] for one in found.launches if "quantize" in one.kernel.__name__} <= {False}


# ---------------------------------------------------------------- the values


@pytest.fixture(params=["cpu", CUDA])
def sm100(request, monkeypatch):
    """(a device, a function that says whether from now on it counts as one of compute capability 10.0)."""

    def count(as_sm100):
        target = Target(100 if as_sm100 else 90)
        monkeypatch.setattr(scales, "target_on", lambda device: target if device.type == request.param else None)

    count(True)
    return torch.device(request.param), count


def packed_here(recipe, device, make=linear_model, seed=0):
    torch.manual_seed(seed)
    model = make(70, 200) if make is linear_model else make().bfloat16().requires_grad_(False)
    model.to(device)
    fp4compile.pack_(model, recipe)
    return model


def state_of(model):
    """Everything in a state dict: shapes, types and bits."""
    return {
        name: (value.dtype, value.shape, value.cpu().reshape(-1).view(torch.uint8).tolist())
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }


def inputs(device, rows=5, inner=70):
    return torch.randn(rows, inner, dtype=BF16).to(device)


def assert_swizzled(layer):
    (_, blocks), dtype = buffer_shapes(layer)["weight_scales"]
    found = layer.weight_scales
    assert found.shape == (swizzled_numel(layer.out_features, blocks),) and found.dtype == torch.uint8
    assert layer.parts()[1].dtype == dtype
    assert set(dict(layer.named_buffers())) <= set(BUFFERS)  # and there is no other copy


@pytest.mark.parametrize("recipe", NATIVE + LINEAR)
def test_moved_there_and_back(recipe, sm100):
    device, count = sm100
    count(False)
    model = packed_here(recipe, device)
    before, x = state_of(model), inputs(device)
    expected = model(x)
    count(True)
    model.to(device)
    if recipe in NATIVE:
        assert_swizzled(model[0])
    assert state_of(model) == before
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0 if device.type == "cpu" else 2e-2)
    model.half().float().bfloat16()
    assert state_of(model) == before
    count(False)
    model.to(device)
    assert recipe == "float8_rowwise" or model[0].weight_scales.dim() == 2
    assert state_of(model) == before and torch.equal(model(x), expected)


@pytest.mark.parametrize("make", [linear_model, Twice])
@pytest.mark.parametrize("recipe", NATIVE)
def test_files_are_the_same_everywhere(recipe, make, sm100, tmp_path):
    device, count = sm100
    there = packed_here(recipe, device, make)
    fp4compile.save_packed(there, tmp_path / "there")
    count(False)
    fp4compile.save_packed(packed_here(recipe, device, make), tmp_path / "here")
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    for as_sm100 in (True, False):
        count(as_sm100)
        for start in (device, torch.device("meta")):
            model = linear_model(70, 200) if make is linear_model else make().bfloat16()
            model.to(start)
            fp4compile.load_packed(model, tmp_path / "there", device)
            assert state_of(model) == state_of(there)
            packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
            assert all(layer.weight_scales.dim() == (1 if as_sm100 else 2) for layer in packed)
            assert make is linear_model or model.a is model.b


def test_shared_scales_are_shared_again(sm100, tmp_path):
    """Layers of one weight: in memory, in the file, and in memory again."""
    device, _ = sm100

    def two():
        return nn.ModuleDict({name: nn.Linear(70, 200, dtype=BF16) for name in ("one", "other")}).requires_grad_(False)

    model = two().to(device)
    fp4compile.pack_(model, "nvfp4")
    for name in BUFFERS:
        setattr(model["other"], name, getattr(model["one"], name))
    model["other"].weight_scales = model["one"].weight_scales.view(-1)  # the same memory, another object
    fp4compile.save_packed(model, tmp_path / "packed")
    stored, _ = files._read(tmp_path / "packed")[1:]
    assert stored["one.weight_scales"] is stored["other.weight_scales"]
    fresh = two().to(device)
    fp4compile.load_packed(fresh, tmp_path / "packed")
    assert_swizzled(fresh["one"])
    assert fresh["one"].weight_scales.data_ptr() == fresh["other"].weight_scales.data_ptr()
    assert state_of(fresh) == state_of(model)


class Slices(nn.Module):
    """Two layers whose scales are parts of one buffer."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Linear(70, 200, dtype=BF16) for _ in range(2))
        self.register_buffer("both", torch.zeros(400, 5).to(torch.float8_e4m3fn))

    def place(self):
        layers = self.one, self.other
        flat = torch.cat([layer.weight_scales.flatten().view(torch.uint8) for layer in layers])
        parts = flat.view(torch.float8_e4m3fn).chunk(2)
        for layer, part in zip(layers, parts, strict=True):
            layer.weight_scales = part.view(layer.weight_scales.shape)
        if parts[0].numel() == self.both.numel() // 2:  # linear
            self.both = flat.view(torch.float8_e4m3fn).view(400, 5)


@pytest.mark.parametrize("packed_as_sm100", [True, False])
def test_scales_that_are_parts_of_one_buffer_stay_apart(packed_as_sm100, sm100, tmp_path):
    device, count = sm100
    count(packed_as_sm100)
    model, fresh = (Slices().requires_grad_(False).to(device) for _ in range(2))
    fp4compile.pack_(model, "nvfp4_one_level")
    model.place()
    fp4compile.save_packed(model, tmp_path / "packed")
    count(True)
    fp4compile.load_packed(fresh, tmp_path / "packed")
    for layer in (fresh.one, fresh.other):
        assert_swizzled(layer)
    assert state_of(fresh) == state_of(model)
    scales_of = [state_of(model)[f"{name}.weight_scales"] for name in ("one", "other")]
    assert scales_of[0] != scales_of[1]


# ---------------------------------------------------------------- nothing is stale


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("recipe", NATIVE)
def test_a_state_is_loaded(recipe, assign, sm100):
    device, count = sm100
    count(False)
    source = packed_here(recipe, device, seed=1)
    state, x = source.state_dict(), inputs(device)
    expected = source(x)
    count(True)
    model = packed_here(recipe, device)
    address = model[0].weight_scales.data_ptr()
    model.load_state_dict(state, assign=assign)
    assert_swizzled(model[0])
    assert assign or model[0].weight_scales.data_ptr() == address  # as CUDA graphs need it
    assert state_of(model) == state_of(source)
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0 if device.type == "cpu" else 2e-2)
    given = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for swizzled in (given, given | dict(model.named_buffers())):  # a state may hold the buffers as they lie
        count(False)
        back = packed_here(recipe, device, seed=2)
        back.load_state_dict(swizzled, assign=assign, strict=False)
        assert back[0].weight_scales.dim() == 2
        assert state_of(back) == state_of(source) and torch.equal(back(x), expected)
        count(True)


def test_a_state_is_assigned_to_a_layer_on_meta(sm100):
    device, _ = sm100
    source = packed_here("mxfp8_32x32", device)
    meta = copy.deepcopy(source).to("meta")
    assert meta[0].weight_scales.dim() == 2
    meta.load_state_dict(source.state_dict(), assign=True)
    assert_swizzled(meta[0])
    assert state_of(meta) == state_of(source)


def test_a_state_of_wrong_shape_is_refused(sm100):
    device, _ = sm100
    model = packed_here("nvfp4", device)
    before = state_of(model)
    for wrong in (torch.zeros(200, 4), torch.zeros(512), torch.zeros(())):
        with pytest.raises(RuntimeError, match="size mismatch for 0.weight_scales"):
            model.load_state_dict({**model.state_dict(), "0.weight_scales": wrong.to(torch.float8_e4m3fn)})
        assert state_of(model)["0.weight_scales"] == before["0.weight_scales"]


def test_writes_are_seen_or_refused(sm100):
    device, _ = sm100
    model, x = packed_here("nvfp4", device), inputs(device)
    linear = model.state_dict()["0.weight_scales"]
    with pytest.raises(RuntimeError, match="[Ii]nference tensor"):  # it would not change the layer
        linear.zero_()
    with pytest.raises(RuntimeError, match="size|shape|dimensions"):
        model[0].weight_scales.copy_(linear)
    run = torch.compile(model, backend="eager", fullgraph=True)
    assert not torch.equal(run(x), torch.relu(model[0].bias).expand(5, 200))
    model[0].weight_scales.data.zero_()  # which raises no version counter
    for call in (model, run):
        assert torch.equal(call(x), torch.relu(model[0].bias).expand(5, 200))


@pytest.mark.parametrize("recipe", NATIVE)
def test_scales_from_elsewhere_are_multiplied_as_they_lie(recipe, sm100):
    """`set_module_tensor_to_device` of accelerate, for example, writes to the dictionary of buffers."""
    device, _ = sm100
    model, x = packed_here(recipe, device), inputs(device)
    expected = model(x)
    model[0]._buffers["weight_scales"] = model.state_dict()["0.weight_scales"].clone()
    assert model[0].weight_scales.dim() == 2
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0 if device.type == "cpu" else 2e-2)
    model.to(device)
    assert_swizzled(model[0])
    assert torch.equal(model(x), expected)


# ---------------------------------------------------------------- the module


@pytest.mark.parametrize("recipe", NATIVE)
def test_copies_and_pickles(recipe, sm100):
    device, count = sm100
    model, x = packed_here(recipe, device), inputs(device)
    before, expected = state_of(model), model(x)
    pickled, saved = pickle.dumps(model), io.BytesIO()
    torch.save(model.state_dict(), saved)
    for one in (copy.deepcopy(model), pickle.loads(pickled)):
        assert_swizzled(one[0])
        assert state_of(one) == before and torch.equal(one(x), expected)
        assert one[0].weight_scales.data_ptr() != model[0].weight_scales.data_ptr()
    count(False)
    saved.seek(0)
    fresh = packed_here(recipe, device, seed=3)
    fresh.load_state_dict(torch.load(saved))
    for one in (pickle.loads(pickled), fresh):
        assert one[0].weight_scales.dim() == 2 and state_of(one) == before


def test_casts_keep_the_address(sm100):
    device, _ = sm100
    model = packed_here("nvfp4", device)
    address = model[0].weight_scales.data_ptr()
    model.half().to(device, torch.float32)
    assert model[0].weight_scales.data_ptr() == address and model[0].weight_dtype == torch.float32


def test_scales_are_linear_before_they_leave(sm100):
    """On the CPU they could not be read yet: a copy there may be under way."""
    device, _ = sm100
    model, seen = packed_here("nvfp4", device), []
    meta = copy.deepcopy(model)._apply(lambda t: seen.append(tuple(t.shape)) or t.to("meta"))
    assert (200, 5) in seen and model[0].weight_scales.shape not in seen
    assert meta[0].weight_scales.shape == (200, 5)
    empty = meta.to_empty(device=device)
    assert_swizzled(empty[0])
    empty.load_state_dict(model.state_dict())
    assert state_of(empty) == state_of(model)


@pytest.mark.gpu
def test_a_graph_of_cuda_reads_what_was_loaded(monkeypatch):
    """The buffer stays at its address; the GPU that is there multiplies it as it lies."""
    monkeypatch.setattr(scales, "target_on", lambda device: Target(100) if device.type == "cuda" else None)
    model, other = (packed_here("nvfp4", "cuda", seed=seed) for seed in (0, 1))
    x = inputs("cuda")
    run = torch.compile(model, backend=fp4compile.backend("nvfp4"), mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x).clone(), model(x), rtol=0, atol=2e-2)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(run(x).clone(), other(x), rtol=0, atol=2e-2)
