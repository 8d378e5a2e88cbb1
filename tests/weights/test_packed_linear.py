"""A packed layer as a module: its weight, its input, casts and moves, state, hooks; torch's encoders that hold one."""

import copy
import pickle
import warnings

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import fp4compile
from fp4compile.recipe import named
from fp4compile.weights.buffers import BUFFERS, LayerFormat
from fp4compile.weights.linear import PackedLinear

BF16 = torch.bfloat16
FORMATS = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "nvfp4_train": "nvfp4_16x16", "float8_rowwise": "float8_rowwise"}


def packed(recipe="nvfp4", inner=48, outer=80, dtype=BF16, bias=True):
    model = nn.Sequential(nn.Linear(inner, outer, bias=bias, dtype=dtype)).eval().requires_grad_(False)
    fp4compile.pack_(model, recipe)
    return model


def contents(layer):
    """Codes and scales as bytes, with their types and strides."""
    found = {name: getattr(layer, name) for name in BUFFERS if getattr(layer, name) is not None}
    return {name: (t.dtype, t.stride(), t.reshape(-1).view(torch.uint8).tolist()) for name, t in found.items()}


# ---------------------------------------------------------------- weight


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", FORMATS)
def test_the_weight_is_the_dequantised_one(recipe, dtype):
    linear = nn.Linear(40, 70, dtype=dtype)
    model = nn.Sequential(linear)
    fp4compile.pack_(model, recipe)
    expected = fp4compile.quantize(linear.weight, FORMATS[recipe]).dequantize(dtype)
    weight = model[0].weight
    assert (weight.dtype, weight.device, weight.shape) == (dtype, linear.weight.device, (70, 40))
    assert weight.shape.numel() == weight.size().numel() == 2800
    assert torch.equal(weight, expected)
    assert not isinstance(weight, nn.Parameter)
    assert [name for name, _ in model.named_parameters()] == ["0.bias"]


def test_the_weight_is_not_to_be_assigned():
    model = packed()
    before = model[0].weight.clone()
    with pytest.raises(AttributeError, match="weight: a packed layer's cannot be assigned"):
        model[0].weight = nn.Parameter(torch.zeros(80, 48))
    with pytest.raises(AttributeError, match="cannot be assigned"):
        model[0].weight = before
    with pytest.raises(RuntimeError, match=r"nn.Parameter\(weight.clone\(\)\) is one"):
        nn.Parameter(model[0].weight)
    model[0].weight = model[0].weight  # its own
    with torch.no_grad():
        assert torch.equal(model[0].weight, before)
    copied = copy.deepcopy(model[0].weight), pickle.loads(pickle.dumps(model[0].weight))
    assert all(type(one) is torch.Tensor and torch.equal(one, before) for one in copied)


def test_code_that_reads_the_weight_compiles():
    model = packed(inner=64, outer=64)

    def read(x):
        return model(x.to(model[0].weight.dtype)) @ model[0].weight.to(x.dtype).to(BF16)

    x = torch.randn(3, 64)
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), read(x))
    compiled = torch.compile(lambda x: x @ model[0].weight.float(), backend="aot_eager", fullgraph=True)
    x.requires_grad_()
    compiled(x).sum().backward()  # eagerly, an inference tensor would have to be cloned for that
    torch.testing.assert_close(x.grad, model[0].weight.float().sum(1).expand(3, 64))


# ---------------------------------------------------------------- input


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float64, torch.complex64])
@pytest.mark.parametrize("autocast", [False, True])
def test_input_of_another_type(dtype, autocast):
    model = packed()
    with torch.autocast("cpu", enabled=autocast), pytest.raises(TypeError, match=f"input: dtype {dtype}"):
        model(torch.ones(2, 48).to(dtype))


def test_input_that_does_not_fit():
    model = packed()
    with pytest.raises(TypeError, match="input: expected a torch.Tensor, got list"):
        model([1.0] * 48)
    for shape in ((96,), (2, 24), (48, 2), (), (2, 0)):  # of 96 elements, two rows of 48 could be made
        with pytest.raises(ValueError, match=r"input: expected shape \(..., 48\)"):
            model(torch.ones(shape, dtype=BF16))
    with pytest.raises(TypeError, match="nested"):
        model(torch.nested.nested_tensor([torch.ones(2, 48), torch.ones(3, 48)]))
    for layout, sparse in (("sparse_coo", torch.eye(48).to_sparse()), ("sparse_csr", torch.eye(48).to_sparse_csr())):
        with pytest.raises(TypeError, match=f"input: expected a dense tensor, got one of the layout {layout}"):
            model(sparse)
    assert model[0](input=torch.ones(0, 3, 48, dtype=BF16)).shape == (0, 3, 80)


@pytest.mark.parametrize("trained", [False, True])
def test_a_tangent_is_refused(trained):
    """Autograd differentiates what the ops do to the codes, or nothing."""
    model, x = packed(dtype=torch.float32).requires_grad_(trained), torch.randn(3, 48)
    for forward in (torch.func.jvp, lambda f, x, _: torch.func.jacfwd(f)(*x)):
        with pytest.raises(NotImplementedError, match="input: a packed layer has no derivatives in forward mode"):
            forward(model, (x,), (x,))
    given = dict(model.named_parameters())
    with pytest.raises(NotImplementedError, match="bias: a packed layer"):
        torch.func.jvp(lambda given: torch.func.functional_call(model, given, (x,)), (given,), (given,))


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
def test_transforms_of_torch_func(compiler):
    """Dynamo takes the tensors of `torch.func.grad` for ones without a gradient: a graph's gradients would be zeros."""
    model, x = packed("nvfp4_weight_only", dtype=torch.float32), torch.randn(3, 4, 48)
    bias = dict(model.named_parameters())

    def loss(x):
        return model(x).square().sum()

    def loss_of(bias, x):
        return torch.func.functional_call(model, bias, (x,)).square().sum()

    def run(function, *args):
        return function(*args) if compiler is None else torch.compile(function, backend=compiler)(*args)

    leaf, weight = x.clone().requires_grad_(), model.get_submodule("0").weight.detach()
    loss(leaf).backward()
    assert torch.equal(run(lambda x: torch.func.grad(loss)(x), x), leaf.grad)
    assert torch.equal(run(torch.func.vmap(torch.func.grad(loss)), x), leaf.grad)
    torch.testing.assert_close(run(lambda x: torch.func.jacrev(model)(x), x[0, 0]), weight)
    torch.testing.assert_close(run(torch.func.grad(loss_of), bias, x)["0.bias"], 2 * model(x).sum((0, 1)))
    for trained in (False, True):
        model.requires_grad_(trained)
        assert torch.equal(run(torch.func.vmap(model), x), model(x))


def test_the_gradient_of_an_input_that_was_written_through_a_view():
    """Dynamo goes on taking such an input for one without a gradient."""
    model, x = packed("nvfp4_weight_only", dtype=torch.float32), torch.randn(4, 48, requires_grad=True)

    def run(x):
        written = torch.zeros(4, 48)
        written[:2].copy_(x[:2])
        written.view(-1)[96:].copy_(x[2:].flatten())
        return model(written)

    (expected,) = torch.autograd.grad(run(x).square().sum(), x)
    (found,) = torch.autograd.grad(torch.compile(run, backend="aot_eager")(x).square().sum(), x)
    assert expected.count_nonzero() == x.numel() and torch.equal(found, expected)


def test_formats_of_later_layers_compile_nothing_again():
    """Compiled layers read a table of the formats that layers have."""
    model, graphs = packed(inner=64, outer=64), []

    def counting(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    compiled, x = torch.compile(model, backend=counting), torch.randn(3, 64, dtype=BF16)
    for spec in ("e5m2:1x32:float32:-:torchao", "e5m2:1x64:float32:-:torchao"):
        with torch.no_grad():
            compiled(x)
        LayerFormat(spec, None)
    assert len(graphs) == 1


@pytest.mark.parametrize(("recipe", "buffer"), [("mxfp8", "weight_data"), ("nvfp4", "weight_outer")])
def test_a_compiled_layer_says_what_a_loader_has_cast(recipe, buffer):
    model = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    fp4compile.pack_(model, recipe)
    model[0]._buffers[buffer] = model[0]._buffers[buffer].half()
    for run in (model, torch.compile(model, backend="eager")):
        with pytest.raises(TypeError, match=f"{buffer}: expected .*a loader has cast it"):
            run(torch.randn(2, 64, dtype=BF16))


@pytest.mark.parametrize("grad", [True, False])
def test_dynamo_traces_one_node_for_a_layer(grad):
    """Each traced line of `forward` takes time in each layer of a model; a line that adds a node takes the most."""
    model, graphs = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16(), []
    fp4compile.pack_(model, "mxfp8")

    def backend(graph, inputs):
        graphs.append(graph.graph)
        return graph.forward

    with torch.set_grad_enabled(grad):
        torch.compile(model, backend=backend, fullgraph=True)(torch.randn(2, 64, dtype=torch.bfloat16))
    called = [node.target for node in graphs[0].nodes if node.op in ("call_function", "call_method")]
    assert [target for target in called if target is not getattr] == [torch.ops.fp4compile.packed_linear] * 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_checks_break_no_graph_and_warn_of_nothing(dynamic, monkeypatch):
    model = packed(dtype=torch.float32)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    monkeypatch.setattr(torch._dynamo.utils, "warn_once_cache", set())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo detected a call")  # of a function with a cache
        for rows in (2, 5):
            x = torch.randn(rows, 3, 48)
            assert torch.equal(compiled(x), model(x))


# ---------------------------------------------------------------- casts and moves


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("cast, dtype", [
    (nn.Module.half, torch.float16),
    (nn.Module.bfloat16, BF16),
    (nn.Module.float, torch.float32),
    (nn.Module.double, torch.float64),
    (lambda m: m.to(torch.float16), torch.float16),
    (lambda m: m.to("cpu", torch.float32), torch.float32),
    (lambda m: m.type(torch.float16), torch.float16),
    (lambda m: m.cpu(), BF16),
    (lambda m: m.share_memory(), BF16),
    (lambda m: copy.deepcopy(m), BF16),
    (lambda m: pickle.loads(pickle.dumps(m)), BF16),
])  # fmt: skip
def test_casts_change_bias_and_weight_dtype_alone(recipe, cast, dtype):
    model = packed(recipe)
    before, x = contents(model[0]), torch.randn(5, 48, dtype=BF16)
    expected = model(x)
    model = cast(model)
    assert contents(model[0]) == before
    assert model[0].bias.dtype == model[0].weight.dtype == dtype
    assert torch.equal(model[0].weight, packed_weight(before, model, dtype))
    assert torch.equal(model(x), expected)


def packed_weight(before, model, dtype):
    layer = copy.deepcopy(model[0])
    layer.weight_dtype = torch.float32
    assert contents(layer) == before
    return layer.weight.to(dtype)


@pytest.mark.parametrize("recipe", FORMATS)
def test_empty_and_meta(recipe):
    model = packed(recipe)
    before = {name: value[:2] for name, value in contents(model[0]).items()}
    meta = copy.deepcopy(model).to("meta")
    assert {getattr(meta[0], name).device.type for name in before} == {"meta"}
    assert (meta[0].weight.device.type, meta[0].weight.shape) == ("meta", (80, 48))
    empty = meta.to_empty(device="cpu")
    assert {name: value[:2] for name, value in contents(empty[0]).items()} == before
    with pytest.raises(NotImplementedError):
        copy.deepcopy(model).to("meta").to("cpu")
    with torch.device("meta"):
        packed_there = packed(recipe)
        assert packed_there(torch.ones(3, 48, dtype=BF16)).shape == (3, 80)
    loaded = packed_there.to_empty(device="cpu")
    loaded.load_state_dict(model.state_dict())
    assert contents(loaded[0]) == contents(model[0])


def test_no_codes_are_cast_on_the_way():
    """Not even for a moment: in float32 the codes of a model need four to eight times their memory."""
    model, seen = packed("mxfp8"), []
    model._apply(lambda tensor: seen.append(tensor.dtype) or tensor)
    assert sorted(map(str, seen)) == ["torch.bfloat16"] * 2 + ["torch.uint8"] * 2


def test_a_cast_that_fails_leaves_the_codes():
    model = packed()
    before = contents(model[0])

    def fails(tensor):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model._apply(fails)
    assert contents(model[0]) == before


def test_shared_memory_is_shared():
    model = packed().share_memory()
    assert all(getattr(model[0], name).is_shared() for name in BUFFERS)


# ---------------------------------------------------------------- state


def test_a_state_of_another_layer_is_not_taken():
    model = packed("nvfp4")
    before = contents(model[0])
    for state, match in (
        (packed("nvfp4_weight_only").state_dict(), "packed layer '0': the state is of"),
        ({**packed("nvfp4").state_dict(), "0.weight_scales": torch.ones(80, 3)}, "weight_scales is torch.float32"),
    ):
        with pytest.raises(RuntimeError, match=match):
            model.load_state_dict(state)
        assert contents(model[0]) == before
    with pytest.raises(RuntimeError, match="[Mm]issing.*weight_data"):
        model.load_state_dict({"0.bias": torch.zeros(80)})
    with pytest.raises(RuntimeError, match="the state has its weight unpacked"):
        model.load_state_dict(nn.Sequential(nn.Linear(48, 80)).state_dict())


# ---------------------------------------------------------------- hooks and attributes


def test_forward_hooks_are_kept():
    model, seen = nn.Sequential(nn.Linear(64, 32, dtype=BF16)), []
    linear = model[0]
    linear.register_forward_hook(lambda module, args, output: seen.append(type(module)) or output * 2)
    linear.register_forward_hook(lambda m, a, kwargs, output: seen.append(list(kwargs)), with_kwargs=True)
    linear.register_forward_hook(lambda m, a, output: seen.append("always"), always_call=True)
    handle = linear.register_forward_hook(lambda m, a, output: output + 1000)
    report = fp4compile.pack_(model, "nvfp4")
    assert report.rows[0].quantised
    x = torch.randn(3, 64, dtype=BF16)
    plain = copy.deepcopy(model[0])
    plain._forward_hooks.clear()
    with torch.no_grad():
        expected = plain(x)
        assert torch.equal(model[0](input=x), expected * 2 + 1000)
        assert seen == [PackedLinear, ["input"], "always"]
        handle.remove()
        assert torch.equal(model(x), expected * 2)
        seen.clear()
        with pytest.raises(TypeError):
            model(x.long())
    assert seen == ["always"]


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 3


@pytest.mark.parametrize("change, reason", [
    (weight_norm, "it holds more than weight and bias: weight_g, weight_v"),
    (spectral_norm, "it holds more than weight and bias: weight_orig, weight_u"),
    (lambda linear: prune.l1_unstructured(linear, "weight", 3), "weight_mask, weight_orig"),
    (parametrizations.weight_norm, "parametrised: weight"),
    (parametrizations.spectral_norm, "parametrised: weight"),
    (lambda linear: parametrizations.weight_norm(linear, "bias", dim=None), "parametrised: bias"),
    (lambda linear: linear.register_buffer("scale", torch.ones(3)), "it holds more than weight and bias: scale"),
    (lambda linear: setattr(linear, "weight", nn.Parameter(torch.ones(64, 32))), "its weight has shape (64, 32)"),
    (lambda linear: setattr(linear, "bias", nn.Parameter(torch.ones(1))), "its bias has shape (1,)"),
    (lambda linear: Scaled(64, 64), "class Scaled is a subclass of Linear"),
    (lambda linear: type("Linear", (Scaled,), {"__module__": "own"})(64, 64), "class own.Linear is a subclass"),
    (lambda linear: linear.double(), "dtype float64"),
    (lambda linear: linear.register_forward_pre_hook(print), "it has a forward pre-hook"),
    (lambda linear: linear.register_full_backward_hook(print), "it has a backward hook"),
    (lambda linear: linear.register_full_backward_pre_hook(print), "it has a backward hook"),
    (lambda linear: linear.register_state_dict_pre_hook(lambda *a: None), "it has a state-dict hook"),
    (lambda linear: linear.register_state_dict_post_hook(lambda *a: None), "it has a state-dict hook"),
    (lambda linear: linear.register_load_state_dict_pre_hook(lambda *a: None), "it has a state-dict hook"),
    (lambda linear: linear.register_load_state_dict_post_hook(lambda *a: None), "it has a state-dict hook"),
    (lambda linear: add_hook_to_module(linear, ModelHook()), "accelerate has replaced its forward"),
    (lambda linear: object.__setattr__(linear, "forward", print), "its attribute 'forward'"),
    (lambda linear: setattr(linear, "_compiled_call_impl", print), "its attribute '_compiled_call_impl'"),
    (lambda linear: setattr(linear, "layer_format", 1), "its attribute 'layer_format'"),
])  # fmt: skip
def test_layers_that_cannot_be_packed_stay_with_a_reason(change, reason):
    """change: returns another layer, or changes the one that it is given."""
    linear = nn.Linear(64, 64)
    changed = change(linear)
    layer = changed if isinstance(changed, nn.Module) else linear
    model = nn.Sequential(layer, nn.Linear(64, 64))
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    report = fp4compile.pack_(model, "mxfp8")
    assert model[0] is layer and isinstance(model[1], PackedLinear)
    assert [row.module for row in report.rows] == ["0", "1"]
    assert reason in report.rows[0].reason
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


def test_a_sparse_weight_stays_with_a_reason():
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight = sparse = nn.Parameter(torch.eye(64).to_sparse())
    (row,) = fp4compile.pack_(model, "mxfp8").rows
    assert row.reason == "its weight has the layout sparse_coo" and model[0].weight is sparse


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_stays():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(64, 64)))
    model = nn.Sequential(nn.Linear(64, 64), scripted)
    report = fp4compile.pack_(model, "mxfp8")
    assert [row.module for row in report.rows] == ["0"] and model[1] is scripted


def test_attributes_go_over():
    model = nn.Sequential(nn.Linear(64, 64)).eval()
    model[0].gain = 3
    model[0].note = ["kept"]
    note = model[0].note
    fp4compile.pack_(model, "mxfp8")
    assert model[0].gain == 3 and model[0].note is note and not model[0].training


# ---------------------------------------------------------------- torch's encoders


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_encoder_layer_runs_its_packed_layers(recipe, compiled):
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True).eval()
    x = torch.randn(2, 5, 64)
    report = fp4compile.pack_(layer, recipe)
    assert {row.module: row.quantised for row in report.rows} == {
        "self_attn.out_proj": False, "self_attn.in_proj_weight": False, "linear1": True, "linear2": True,
    }  # fmt: skip
    run = torch.compile(layer, backend="eager") if compiled else layer
    with torch.no_grad():
        attended = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
        inner = torch.relu(layer.linear1(attended))
        expected = layer.norm2(attended + layer.linear2(inner))
        # The fast path would multiply the dequantised weights with activations as they are: that is 1e-2 off.
        torch.testing.assert_close(run(x), expected, rtol=0, atol=1e-6)


def test_an_encoder_makes_no_nested_tensors():
    layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, norm_first=False)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    recipe = named("mxfp8").replace(rules=[("layers.0.*", "skip")])
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 64)
    fp4compile.pack_(encoder, recipe)
    slow = copy.deepcopy(encoder)
    assert not isinstance(encoder.layers[0].linear1, PackedLinear)
    with torch.no_grad():
        got = encoder(x, src_key_padding_mask=padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            expected = slow(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=0, atol=1e-5)
