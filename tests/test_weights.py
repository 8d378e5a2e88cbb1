"""Packed weights: out of the inference graph, packed once, never stale."""

import gc
import threading

import pytest
import torch
from graphs import compile_recorded

import fp4compile
from fp4compile import weights

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture
def packings(monkeypatch):
    """How often a weight was quantised outside a graph."""
    counted = []
    quantize = weights._quantize

    def counting(weight, format, dim, layout):
        counted.append((format, dim))
        return quantize(weight, format, dim, layout)

    monkeypatch.setattr(weights, "_quantize", counting)
    return counted


def uncached(layer, x, recipe="nvfp4"):
    """The layer's quantised output, composed by hand from its present weight; by the reference, on the CPU."""
    x, w = (fp4compile.quantize(t.detach().cpu(), recipe).dequantize() for t in (x, layer.weight))
    return x @ w.t() + layer.bias.detach().cpu()


def test_weights_leave_the_inference_graph_and_are_packed_once(packings):
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled, recorder = compile_recorded(layer, fp4compile.backend("nvfp4"))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
        compiled(torch.randn(5, 64))  # another graph, of dynamic shape, shares the packed weight
    assert packings == [("nvfp4", -1)]
    assert [graph.count("fp4compile.quantize") for graph in recorder.graphs] == [1, 1]  # the activation


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
    change_in_place, change_by_state_dict, change_by_optimizer, change_storage, change_storage_twice, change_parameter
]  # fmt: skip


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("device", DEVICES)
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


def test_packed_weights_go_with_their_parameter():
    layer = torch.nn.Linear(64, 48)
    with torch.no_grad():
        torch.compile(layer, backend=fp4compile.backend("nvfp4"))(torch.randn(8, 64))
    before = len(weights._packed)
    del layer
    torch._dynamo.reset()
    gc.collect()
    assert len(weights._packed) < before


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
