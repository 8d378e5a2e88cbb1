"""The cache of packed weights: memory, refresh, threads and streams."""

import copy
import io
import threading
import weakref

import pytest
import torch

import fp4compile
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.weights import cache as weight_cache
from fp4compile.weights import writes
from fp4compile.weights.cache import Piece, form, joined_parts, packed_pair, packed_weight
from tests.helpers.cached_weights import RECIPE, assert_current, two_layers, uncached, write_unseen
from tests.helpers.codes import as_bytes
from tests.helpers.graphs import compile_recorded


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


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_two_weights_are_joined(name, packings):
    """The packed tensors of each become parts of common memory, in which both are packed again after a change."""
    weights = [torch.nn.Parameter(torch.randn(128, 64)) for _ in range(2)]
    packed_as = form(name, -1, "swizzled")
    expected = [QUANTIZE(weight.detach(), name, -1, layout="swizzled") for weight in weights]
    joined = packed_pair(*weights, packed_as)
    results = 3 if name == "nvfp4" else 2
    each_weight = [packed_weight(weight, packed_as)[:results] for weight in weights]
    for whole, *each in zip(joined[:2], *(one[:2] for one in each_weight), strict=True):
        assert whole.shape == (2 * each[0].shape[0], *each[0].shape[1:])
        assert [part.data_ptr() - whole.data_ptr() for part in each] == [0, each[0].numel()]
    for whole, *each in zip(joined[:2], *(one[:2] for one in expected), strict=True):
        assert torch.equal(whole.view(torch.uint8), torch.cat([part.view(torch.uint8) for part in each]))
    for outers, *each in zip(joined[2:], *(one[2:] for one in each_weight), strict=True):  # each at a multiple of 16
        assert outers.stride() == (4,) and torch.equal(outers, torch.stack([one[2] for one in expected]))
        assert [part.data_ptr() - outers.data_ptr() for part in each] == [0, 16]
    count = len(packings)
    change_of_contents(weights[1])
    again = packed_pair(*weights, packed_as)
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in joined] and len(packings) == count + 1
    changed = QUANTIZE(weights[1].detach(), name, -1, layout="swizzled")
    assert torch.equal(again[0][128:].view(torch.uint8), changed[0].view(torch.uint8))


@pytest.mark.parametrize("inference", [False, True])
def test_two_packed_layers_are_joined(inference):
    """The layers hold the same tensors as before, which are parts of common memory then, and are moved once."""
    with torch.inference_mode(inference):
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 128, bias=False) for _ in range(2))
        fp4compile.pack_(layers, "nvfp4")
    parts = [[layer.weight_data, layer.weight_scales, layer.weight_outer] for layer in layers]
    contents = [[part.clone() for part in each] for each in parts]
    joined = joined_parts(*parts)
    assert [one.data_ptr() for one in joined_parts(*parts)] == [one.data_ptr() for one in joined]
    for layer, each, before in zip(layers, parts, contents, strict=True):
        assert layer.weight_data is each[0] and layer.weight_outer is each[2]
        assert all(torch.equal(as_bytes(one), as_bytes(other)) for one, other in zip(each[:2], before[:2], strict=True))
        assert torch.equal(each[2], before[2])
    for i, one in enumerate(joined[:2]):
        assert torch.equal(as_bytes(one), as_bytes(torch.cat([each[i].view(torch.uint8) for each in parts])))
    assert torch.equal(joined[2], torch.stack([each[2] for each in contents])) and joined[2].stride() == (4,)


def test_forms_of_one_weight_are_kept_apart(packings):
    weight = torch.nn.Parameter(torch.randn(64, 64))
    forms = [form("nvfp4"), form("nvfp4", 0), form("mxfp8"), form("nvfp4", -1, "swizzled")]
    first = [packed_weight(weight, each) for each in forms]
    again = [packed_weight(weight, each) for each in forms]
    assert len(packings) == 4
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert len({tensors[1].data_ptr() for tensors in first}) == 4


def test_pieces_of_a_weight_inside_of_longer_memory():
    """As where all parameters are parts of one flat tensor."""
    weight = torch.nn.Parameter(torch.randn(3, 32, 64)[1])
    piece = Piece((16, 64), (64, 1), 16 * 64, ())
    expected = QUANTIZE(weight.detach()[16:], "nvfp4", -1)
    got = packed_weight(weight, form("nvfp4", piece=piece))
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got[:2], expected[:2], strict=True))


def test_packed_weights_go_with_their_parameter():
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"))
    with torch.no_grad():
        compiled(x)
    data = weakref.ref(packed_weight(layer.weight, form("nvfp4"))[0])
    layer.weight = torch.nn.Parameter(torch.randn(48, 64))
    assert data() is None  # at once, with the graph alive


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
        write_unseen(first, -1.5), write_unseen(last, -0.5)
        fp4compile.refresh(given)
        assert_current(compiled, model, x)
    write_unseen(first, -1)
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
    writes.changes_are_seen()
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
        write_unseen(model[0].weight, -1.5)
    assert packings == []
    assert recorder.graphs[0].count("fp4compile.quantize") == 4


def test_weight_cache_of_a_recipe():
    recipes = [RECIPE.replace(weight_cache=value) for value in ("on", "off")]
    assert recipes[0] == RECIPE
    assert len({recipe.digest for recipe in recipes}) == 2
    assert fp4compile.Recipe.from_dict(recipes[1].to_dict()) == recipes[1]
    with pytest.raises(ValueError, match="weight_cache='never': allowed are 'on', 'off'"):
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
        write_unseen(weight, -1)  # by another thread
        fp4compile.refresh(weight)
        return packed

    monkeypatch.setattr(weight_cache, "_quantize", overtaken)
    packed_weight(weight, form("nvfp4"))
    monkeypatch.setattr(weight_cache, "_quantize", quantize)
    expected = fp4compile.quantize(weight.detach(), "nvfp4")
    assert torch.equal(packed_weight(weight, form("nvfp4"))[0], expected.data)


def test_nothing_is_kept_while_a_stream_is_captured(packings, monkeypatch):
    """What is quantised then runs at each replay, and never now."""

    class OnGPU(torch.nn.Parameter):
        is_cuda = True

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Stream(torch.device("cpu")))
    weight = OnGPU(torch.randn(48, 64))
    capturing[0] = True
    first, second = packed_weight(weight, form("nvfp4")), packed_weight(weight, form("nvfp4"))
    assert len(packings) == 2 and first[0].data_ptr() != second[0].data_ptr()
    capturing[0] = False
    kept = packed_weight(weight, form("nvfp4"))
    assert kept[0] is packed_weight(weight, form("nvfp4"))[0] and len(packings) == 3
    with torch.no_grad():
        weight.mul_(-1.5)
    contents, capturing[0] = kept[0].clone(), True
    assert packed_weight(weight, form("nvfp4"))[0] is not kept[0]
    assert torch.equal(kept[0], contents), "other graphs read it"


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
