"""Packed weights: out of the inference graph, packed once, never stale."""

import copy
import gc
import io
import operator
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile import weight_cache
from fp4compile.fingerprint import fingerprint_of
from fp4compile.passes.find import Input
from fp4compile.passes.hoist import Hoisted, Recipient, hoist
from fp4compile.weight_cache import form, packed_weight
from tests.helpers.graphs import compile_recorded
from tests.helpers.rewritten import rewritten

PLACES = [
    ("cpu", "default"),
    pytest.param("cuda", "default", marks=pytest.mark.gpu),
    pytest.param("cuda", "reduce-overhead", marks=pytest.mark.gpu),
]
# Activation and weight differ, and so do the layers.
RECIPE = fp4compile.Recipe(fprop_x="nvfp4", fprop_w="nvfp4_te", rules=[("2", "mxfp8")])
FORMATS = {0: ("nvfp4", "nvfp4_te"), 2: ("mxfp8", "mxfp8")}


@pytest.fixture
def packings(monkeypatch):
    """How often a weight was quantised outside a graph."""
    counted = []
    quantize = weight_cache._quantize

    def counting(weight, packed_as):
        counted.append((packed_as.format, packed_as.dim))
        return quantize(weight, packed_as)

    monkeypatch.setattr(weight_cache, "_quantize", counting)
    return counted


def uncached(layer, x, formats=("nvfp4", "nvfp4")):
    """The layer's quantised output, composed by hand from its present weight; by the reference, on the CPU."""
    x, w = (
        fp4compile.quantize(t.detach().cpu().contiguous(), fmt).dequantize()
        for t, fmt in zip((x, layer.weight), formats, strict=True)
    )
    return x @ w.t() + layer.bias.detach().cpu()


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))


def uncached_two(model, x):
    return uncached(model[2], torch.relu(uncached(model[0], x, FORMATS[0])), FORMATS[2])


def assert_current(compiled, model, x):
    """The compiled model's inference is that of its present weights."""
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), uncached_two(model, x), rtol=1e-5, atol=1e-5)


def test_weights_leave_the_inference_graph_and_are_packed_once(packings):
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled, recorder = compile_recorded(layer, fp4compile.backend("nvfp4"))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
        compiled(torch.randn(5, 64))  # another graph, of dynamic shape, shares the packed weight
    assert packings == [("nvfp4", -1)]
    assert [graph.count("fp4compile.quantize") for graph in recorder.graphs] == [1, 1]  # the activation


def test_dimension_and_layout_leave_the_graph_too():
    graph = torch.fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    for index, node in enumerate((x, weight)):
        node.meta["desc"] = SimpleNamespace(idx=index)
    packed = graph.call_function(torch.ops.fp4compile.quantize.default, (weight, "nvfp4", 0), {"layout": "swizzled"})
    packed.meta["val"] = tuple(packed_weight(torch.nn.Parameter(torch.randn(64, 48)), form("nvfp4", 0, "swizzled")))
    graph.output(graph.call_function(operator.getitem, (packed, 1)))
    module = torch.fx.GraphModule({}, graph)
    hoisted = Hoisted()
    assert hoist(graph, (Input(), Input("layer.weight")), hoisted) == 1
    module.recompile()
    assert hoisted.recipients == [Recipient(1, "layer.weight", form("nvfp4", 0, "swizzled"))]
    assert module(None, None, *hoisted.examples) is packed.meta["val"][1]


class Pieces(torch.nn.Module):
    """Weights that are pieces of one parameter, and one that is cast there and back."""

    def __init__(self):
        super().__init__()
        self.both, self.coarse = torch.nn.Parameter(torch.randn(96, 64)), torch.nn.Parameter(torch.randn(64, 48))

    def forward(self, x):
        first, second = self.both.split([64, 32])
        return F.linear(x, second), x @ first @ self.coarse.to(torch.float8_e5m2).to(x.dtype)


@pytest.mark.parametrize("autocast", [False, True])
def test_pieces_and_casts_leave_the_graph_too(packings, autocast):
    model, x = Pieces(), torch.randn(8, 64)
    compiled, recorder = compile_recorded(model, fp4compile.backend("mxfp8", skip_lm_head=False))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for _ in range(2):
            expected = rewritten(model, "mxfp8", skip_lm_head=False)[0](x)
            for _ in range(2):
                for got, right in zip(compiled(x), expected, strict=True):
                    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
            model.both.mul_(-1.5)
            model.coarse.add_(0.3)
    assert len(packings) == 6  # three, and again after the change
    assert recorder.graphs[0].count("fp4compile.quantize") == 2  # activations: x, and what the second product reads


def test_training_graphs_keep_their_weights(packings):
    layer = torch.nn.Linear(64, 48)
    torch.compile(layer, backend=fp4compile.backend("nvfp4"))(torch.randn(8, 64)).sum().backward()
    assert packings == []


def change_in_place(layer):
    layer.weight.mul_(-1.5)


def change_by_state_dict(layer):
    layer.load_state_dict({"weight": torch.randn(48, 64), "bias": torch.zeros(48)})


def change_by_optimizer(layer):
    with torch.enable_grad():
        layer.weight.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()


def change_by_fused_optimizer(layer):
    with torch.enable_grad():
        layer.weight.sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step()


def change_storage(layer):
    layer.weight.data = torch.randn_like(layer.weight)


def change_storage_twice(layer):
    # The allocator may hand the first address out again.
    for _ in range(2):
        layer.weight.data = torch.randn_like(layer.weight)
        gc.collect()


def change_parameter(layer):
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


CHANGES = [
    change_in_place, change_by_state_dict, change_by_optimizer, change_by_fused_optimizer, change_storage,
    change_storage_twice, change_parameter,
]  # fmt: skip


@pytest.mark.parametrize(("device", "mode"), PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_is_seen(change, device, mode):
    layer, x = torch.nn.Linear(64, 48).to(device), torch.randn(8, 64, device=device)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"), mode=mode)
    with torch.no_grad():
        for _ in range(3):
            before = compiled(x).clone()
        change(layer)
        for _ in range(2):
            after = compiled(x).clone()
        assert not torch.equal(before, after)
        torch.testing.assert_close(after.cpu(), uncached(layer, x), rtol=1e-5, atol=1e-5)


def custom_step(model):
    """An optimiser of the user's own, which nothing tells of."""
    for parameter in model.parameters():
        parameter.data.sub_(0.5 * parameter.grad.sign())


def test_evaluation_between_training_steps():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
        torch.optim.SGD(model.parameters(), lr=0.5, fused=True),
        torch.optim.Adam(model.parameters(), lr=0.1, foreach=True),
    ]
    steps = [optimizer.step for optimizer in optimizers]
    steps.append(torch.compile(optimizers[0].step, backend="eager"))
    assert_current(compiled, model, x)
    for step in steps:
        for trained in (model, compiled):
            trained(x).square().sum().backward()
            assert_current(compiled, model, x)
            before = model[0].weight.clone()
            step()
            assert not torch.equal(before, model[0].weight)
            assert_current(compiled, model, x)
            model.zero_grad()


def test_any_update_after_a_run_of_a_training_graph_is_seen():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    assert_current(compiled, model, x)
    loss = compiled(x).square().sum()
    loss.backward(retain_graph=True)
    custom_step(model)
    assert_current(compiled, model, x)
    loss = compiled(x).square().sum()
    assert_current(compiled, model, x)  # packed between forward and backward
    loss.backward()
    custom_step(model)
    assert_current(compiled, model, x)
    compiled(x)  # a search without gradients needs no backward
    model[0].weight.data.mul_(-1.5)
    assert_current(compiled, model, x)


def fewer_rows(weight):
    weight.data = weight.data[:32]


def bits_as_another_dtype(weight):
    weight.data = weight.data.view(torch.bfloat16)


def inference_tensor_on_the_storage(weight):
    with torch.inference_mode():
        weight.data = torch.empty(0, dtype=weight.dtype).set_(weight.untyped_storage(), 0, weight.shape)
        weight.mul_(2)  # counts no version


@pytest.mark.parametrize("change", [fewer_rows, bits_as_another_dtype, inference_tensor_on_the_storage])
def test_same_address_strides_and_version_are_not_enough(change):
    weight = torch.nn.Parameter(torch.randn(48, 64).half())
    packed_weight(weight, form("nvfp4"))
    before = weight.data_ptr(), weight.stride(), weight._version
    change(weight)
    assert before == (weight.data_ptr(), weight.stride(), weight._version)
    expected = fp4compile.quantize(weight.detach().clone(), "nvfp4")
    for got, right in zip(
        packed_weight(weight, form("nvfp4")), (expected.data, expected.scales, expected.outer), strict=True
    ):
        assert torch.equal(got, right)


def test_every_view_of_one_storage_is_told_apart():
    layer, x = torch.nn.Linear(64, 64), torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
    flat = torch.randn(3, 64, 64)
    with torch.no_grad():
        for view in (flat[0], flat[1], flat[1].t(), flat[1], flat[0]):
            layer.weight.data = view
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
        # The base is what the optimiser knows, and its step counts no version.
        flat.grad = torch.ones_like(flat)
        torch.optim.SGD([flat], lr=0.5, fused=True).step()
        torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
        layer.weight = torch.nn.Parameter(flat[2])  # has the base's version counter
        compiled(x)
        flat.mul_(-2)
        torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)


def test_weight_of_another_shape_and_back():
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4", min_n=1), dynamic=False)
    with torch.no_grad():
        for rows in (48, 32, 48, 1):
            layer.weight.data, layer.bias.data = torch.randn(rows, 64), torch.randn(rows)
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)


def test_swapped_tensors():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    assert_current(compiled, model, x)
    other = two_layers()
    with torch.no_grad():
        compiled_other = torch.compile(other, backend=fp4compile.backend(RECIPE))
        compiled_other(x)
    for _ in range(2):
        for layer, others in ((model[0], other[0]), (model[2], other[2])):
            torch.utils.swap_tensors(layer.weight, others.weight)
        assert_current(compiled, model, x)
        assert_current(compiled_other, other, x)


@pytest.mark.parametrize("swap", [False, True])
def test_converted_and_loaded_parameters(swap):
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    assert_current(compiled, model, x)
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.bfloat16().float()  # rounds the weights
        assert_current(compiled, model, x)
        model.load_state_dict(two_layers().state_dict())
        assert_current(compiled, model, x)
        model.load_state_dict(two_layers().state_dict(), assign=True)
        assert_current(compiled, model, x)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def change_of_storage(weight):
    weight.data = torch.randn_like(weight)


@torch.no_grad()
def change_of_contents(weight):
    weight.mul_(-1.5)


@pytest.mark.parametrize("change", [change_of_contents, change_of_storage, fp4compile.refresh])
def test_weights_are_packed_again_into_the_same_memory(change):
    # CUDA graphs hold its address.
    weight = torch.nn.Parameter(torch.randn(48, 64))
    before = [tensor.data_ptr() for tensor in packed_weight(weight, form("nvfp4"))]
    contents = [tensor.clone() for tensor in packed_weight(weight, form("nvfp4"))]
    change(weight)
    after = packed_weight(weight, form("nvfp4"))
    assert [tensor.data_ptr() for tensor in after] == before
    assert torch.equal(contents[0], after[0]) == (change is fp4compile.refresh)


def test_forms_of_one_weight_are_kept_apart(packings):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    forms = [form("nvfp4"), form("nvfp4", 0), form("mxfp8"), form("nvfp4", -1, "swizzled")]
    first = [packed_weight(weight, each) for each in forms]
    again = [packed_weight(weight, each) for each in forms]
    assert len(packings) == 4
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert len({tensors[1].data_ptr() for tensors in first}) == 4


def test_packed_weights_go_with_their_parameter():
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    storages = len(weight_cache._storages)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
    with torch.no_grad():
        compiled(x)
    data = weakref.ref(packed_weight(layer.weight, form("nvfp4"))[0])
    assert len(weight_cache._storages) == storages + 1
    layer.weight = torch.nn.Parameter(torch.randn(48, 64))
    assert data() is None  # at once, with the graph alive
    with torch.no_grad():
        compiled(x)
    assert len(weight_cache._storages) == storages + 1


def test_attributes_that_are_copied_or_shared_are_another_tensors():
    weight = torch.nn.Parameter(torch.randn(48, 64))
    kept = [tensor.clone() for tensor in packed_weight(weight, form("nvfp4"))]
    copied, shared = (torch.nn.Parameter(weight.detach().clone().neg_()) for _ in range(2))
    copied.__dict__.update(weight.__dict__)
    shared.__dict__ = weight.__dict__
    for tensor in (copied, shared):
        expected = fp4compile.quantize(tensor.detach(), "nvfp4")
        assert torch.equal(packed_weight(tensor, form("nvfp4"))[0], expected.data)
    for got, right in zip(packed_weight(weight, form("nvfp4")), kept, strict=True):
        assert torch.equal(got, right)


def test_saved_parameters_hold_no_packed_weight():
    layer = torch.nn.Linear(64, 48)
    packed_weight(layer.weight, form("nvfp4"))
    saved, module = io.BytesIO(), io.BytesIO()
    torch.save(layer.state_dict(keep_vars=True), saved)
    torch.save(layer, module)
    assert b"fp4compile." not in saved.getvalue() + module.getvalue()  # no name of a module of the package
    assert b"weight_cache" not in saved.getvalue() + module.getvalue()
    saved.seek(0), module.seek(0)
    loaded = torch.load(saved, weights_only=True)["weight"]
    again = torch.load(module, weights_only=False).weight
    for weight in (loaded, again, copy.deepcopy(layer).weight, copy.copy(layer.weight)):
        assert not getattr(weight, weight_cache._ATTRIBUTE, None) or weight.data_ptr() == layer.weight.data_ptr()
        with torch.no_grad():
            weight.mul_(-1)
        expected = fp4compile.quantize(weight.detach(), "nvfp4")
        assert torch.equal(packed_weight(weight, form("nvfp4"))[0], expected.data)


def test_refresh_after_what_cannot_be_seen():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    first, last = model[0].weight, model[2].weight
    for given in (model, compiled, None, [first, last], (w.detach() for w in (first, last))):
        assert_current(compiled, model, x)
        first.data.mul_(-1.5), last.data.mul_(-0.5)
        fp4compile.refresh(given)
        assert_current(compiled, model, x)
    first.data.mul_(-1)
    fp4compile.refresh(first)
    assert_current(compiled, model, x)


def test_refresh_marks_nothing_else(packings):
    weights = [torch.nn.Parameter(torch.randn(48, 64)) for _ in range(2)]
    for _ in range(2):
        for weight in weights:
            packed_weight(weight, form("nvfp4"))
        fp4compile.refresh([weights[0]])
    assert len(packings) == 3


@pytest.mark.parametrize("wrong", [3, "model", [torch.nn.Linear(2, 2)], {"weight": torch.ones(2)}])
def test_refresh_takes_tensors(wrong):
    with pytest.raises(TypeError, match="model: expected a module, a tensor, tensors or None"):
        fp4compile.refresh(wrong)


def test_optimizers_of_tensors_without_storage_step():
    weight_cache.watch_optimizers()
    weight = torch.nn.Parameter(torch.randn(48, 64))
    packed_weight(weight, form("nvfp4"))
    sparse = torch.nn.Parameter(torch.eye(3).to_sparse())
    sparse.grad = torch.eye(3).to_sparse()
    torch.optim.SGD([sparse], lr=0.5).step()
    assert torch.equal(sparse.detach().to_dense(), torch.eye(3) / 2)


def test_cache_off_quantises_at_every_call(packings):
    model, x = two_layers(), torch.randn(8, 64)
    compiled, recorder = compile_recorded(model, fp4compile.backend(RECIPE, weight_cache="off"))
    for _ in range(2):
        assert_current(compiled, model, x)
        model[0].weight.data.mul_(-1.5)
    assert packings == []
    assert recorder.graphs[0].count("fp4compile.quantize") == 4


def test_check_raises_where_contents_changed_unseen():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE, weight_cache="check"))
    for _ in range(2):
        assert_current(compiled, model, x)
    with torch.no_grad():
        model[2].weight.mul_(-1.5)  # seen
    assert_current(compiled, model, x)
    model[2].weight.data[31, 47] += 1e-6
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'2\.weight' changed, .*fp4compile\.refresh"), torch.no_grad():
            compiled(x)
    fp4compile.refresh(model)
    assert_current(compiled, model, x)


def test_check_of_a_weight_that_was_packed_without():
    weight = torch.nn.Parameter(torch.randn(48, 64))
    packed_weight(weight, form("nvfp4"))
    packed_weight(weight, form("nvfp4"), "name")
    weight.data[47, 63] += 1
    with pytest.raises(RuntimeError, match="parameter 'name' changed"):
        packed_weight(weight, form("nvfp4"), "name")


def test_fingerprints_differ_by_content_and_place():
    x = torch.randn(37, 5)  # 740 bytes: not a multiple of 8
    known = {fingerprint_of(x)}
    changed = [x.flip(0), x.t(), x.neg(), 2 * x, x[:, :4], x.double(), x.view(torch.int32) ^ 1]
    for row, bit in ((0, 1), (17, 1 << 22), (36, -(1 << 31))):
        other = x.clone()
        other.view(torch.int32)[row, 4] ^= bit
        changed.append(other)
    for other in changed:
        known.add(fingerprint_of(other))
    assert len(known) == 1 + len(changed)
    whole = x[:36].flatten().view(torch.int64)
    assert fingerprint_of(whole) != fingerprint_of(~whole)
    assert fingerprint_of(x.t().contiguous().t()) == fingerprint_of(x.clone()) == fingerprint_of(x)


def test_fingerprint_of_several_chunks(monkeypatch):
    x = torch.arange(100.0)
    whole = fingerprint_of(x)
    monkeypatch.setattr("fp4compile.fingerprint._CHUNK", 7)
    assert fingerprint_of(x) == whole
    assert fingerprint_of(x.roll(14)) != whole


def test_weight_cache_of_a_recipe():
    recipes = [RECIPE.replace(weight_cache=value) for value in ("on", "off", "check")]
    assert recipes[0] == RECIPE
    assert len({recipe.digest for recipe in recipes}) == 3
    assert fp4compile.Recipe.from_dict(recipes[1].to_dict()) == recipes[1]
    with pytest.raises(ValueError, match="weight_cache='never': allowed are 'on', 'off', 'check'"):
        fp4compile.backend("nvfp4", weight_cache="never")
    with pytest.raises(TypeError, match="weight_cache: expected a str, got bool"):
        fp4compile.backend("nvfp4", weight_cache=False)


def test_inference_tensors_are_packed_at_every_call(packings):
    with torch.inference_mode():
        layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
        compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
        compiled(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)


def test_two_threads_share_one_model():
    layer, x = torch.nn.Linear(256, 256), torch.randn(8, 256)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
    expected, wrong = uncached(layer, x), []
    with torch.no_grad():
        compiled(x)
        layer.weight.mul_(1)  # both threads find the packed weight out of date

    def work():
        with torch.no_grad():
            for _ in range(20):
                if not torch.allclose(compiled(x), expected, rtol=1e-5, atol=1e-5):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_mark_while_a_weight_is_packed_counts(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(48, 64))
    quantize = weight_cache._quantize

    def overtaken(weight, packed_as):
        packed = quantize(weight, packed_as)
        weight.data.mul_(-1)  # by another thread
        fp4compile.refresh(weight)
        return packed

    monkeypatch.setattr(weight_cache, "_quantize", overtaken)
    packed_weight(weight, form("nvfp4"))
    monkeypatch.setattr(weight_cache, "_quantize", quantize)
    expected = fp4compile.quantize(weight.detach(), "nvfp4")
    assert torch.equal(packed_weight(weight, form("nvfp4"))[0], expected.data)


@pytest.mark.gpu
def test_weight_changed_before_a_users_capture():
    layer, x = torch.nn.Linear(64, 48).cuda(), torch.randn(8, 64, device="cuda")
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        layer.weight.mul_(-1.5)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        for _ in range(2):  # the quantising is part of the graph
            graph.replay()
            torch.testing.assert_close(y.cpu(), uncached(layer, x), rtol=1e-5, atol=1e-5)
            layer.weight.mul_(-1.5)
        torch.testing.assert_close(compiled(x).cpu(), uncached(layer, x), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_packed_weight_is_complete_for_every_stream():
    weight = torch.nn.Parameter(torch.randn(8192, 8192, device="cuda"))
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        with torch.no_grad():
            weight.neg_()
        torch.cuda.synchronize()
        expected = fp4compile.quantize(weight.detach(), "nvfp4").data
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(100_000_000)
            packed_weight(weight, form("nvfp4"))
        with torch.cuda.stream(second):
            seen = packed_weight(weight, form("nvfp4"))[0].clone()
        torch.cuda.synchronize()
        assert torch.equal(seen, expected)
