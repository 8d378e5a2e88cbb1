"""Packed weights of graphs that were compiled before torch.distributed began: its writes raise no version counter."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp4compile
from fp4compile import _inductor_patches
from fp4compile.passes import hoist
from fp4compile.weights import cache as weight_cache
from fp4compile.weights import writes
from fp4compile.weights.cache import form, packed_weight
from tests.helpers.cached_weights import uncached, write_unseen
from tests.helpers.graphs import compile_recorded
from tests.helpers.process_groups import alone

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


def is_current(weight, packed):
    expected = fp4compile.quantize(weight.detach().clone(), "nvfp4")
    return all(map(torch.equal, packed, (expected.data, expected.scales, expected.outer)))


@torch.no_grad()
def test_writes_of_a_group_that_began_after_compiling_are_seen(packings):
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled, recorder = compile_recorded(layer, fp4compile.backend("nvfp4"))
    compiled(x), compiled(x)
    assert len(packings) == 1 and recorder.graphs[0].count("fp4compile.quantize") == 1  # of the activation
    with alone():
        for _ in range(2):
            write_unseen(layer.weight, -1.5)
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
    assert len(recorder.graphs) == 1, "the graph that was compiled before"


def test_weights_are_packed_at_every_call_while_there_is_a_group(packings):
    weight = torch.nn.Parameter(torch.randn(48, 64))
    kept = packed_weight(weight, form("nvfp4"))
    addresses = [tensor.data_ptr() for tensor in kept]
    with alone():
        for _ in range(3):
            write_unseen(weight, -1.5)
            packed = packed_weight(weight, form("nvfp4"))
            assert is_current(weight, packed)
            assert [tensor.data_ptr() for tensor in packed] == addresses  # CUDA graphs hold them
        assert len(packings) == 4
        write_unseen(weight, -1.5)
    for _ in range(2):
        assert is_current(weight, packed_weight(weight, form("nvfp4")))  # packed in the group, which ended
    assert len(packings) == 5, "kept again"


def test_a_promise_keeps_weights_while_there_is_a_group(packings):
    """Until `refresh`, or a step of any optimiser: FSDP gathers weights from what it wrote to."""
    weight, other = (torch.nn.Parameter(torch.randn(48, 64)) for _ in range(2))
    promised = form("nvfp4", promised=True)
    optimizer = torch.optim.SGD([other], lr=1.0)
    other.grad = torch.ones_like(other)
    with alone():
        writes = (lambda: fp4compile.refresh(weight), lambda: fp4compile.refresh(torch.nn.Linear(2, 2)), optimizer.step,
                  lambda: weight.mul_(1))  # fmt: skip
        for count, write in enumerate(writes, 1):
            for _ in range(2):
                assert is_current(weight, packed_weight(weight, promised))
            assert len(packings) == count
            write_unseen(weight, -1.5)
            assert not is_current(weight, packed_weight(weight, promised)), "an unseen write"
            with torch.no_grad():
                write()
        packed_weight(weight, promised)
        count = len(packings)
        packed_weight(weight, form("nvfp4")), packed_weight(weight, form("nvfp4"))
        assert len(packings) == count + 2, "who promised nothing reads no kept weight"


@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_inference_in_a_group(parallel, packings, caplog):
    """Graphs that are compiled while there is a group. parallel: whether weights are DTensors.

    All numbers are eighths below 32, and MXFP8 rounds them to such: no sum of 64 products is rounded, in any order.
    """
    x = torch.randint(-7, 8, (8, 64)).float()
    hoist._tell_of_groups.cache_clear()
    with alone():
        for cache, quantised_once in (("on", False), ("always", True)):
            layer = torch.nn.Linear(64, 48)
            for parameter in layer.parameters():
                parameter.copy_(torch.randint(-56, 57, parameter.shape) / 8)
            model = torch.nn.Sequential(layer)
            if parallel:
                parallelize_module(model, DeviceMesh("cpu", [0]), {"0": ColwiseParallel(use_local_output=True)})
            compiled, recorder = compile_recorded(model, fp4compile.backend("mxfp8", weight_cache=cache))
            for write in (
                lambda weight: None,
                lambda weight: weight.mul_(2),
                lambda weight: write_unseen(local(weight), -1.5),
            ):
                write(layer.weight)
                if quantised_once:
                    fp4compile.refresh(model)
                for _ in range(2):
                    plain = torch.nn.Linear(64, 48)
                    plain.weight.copy_(local(layer.weight)), plain.bias.copy_(local(layer.bias))
                    assert torch.equal(compiled(x), uncached(plain, x, ("mxfp8", "mxfp8")))
            assert recorder.graphs[0].count("fp4compile.quantize") == (1 if quantised_once else 2)
            assert len(recorder.graphs) == 1 and len(packings) == 3 * quantised_once
            assert ("weight_cache='always'" in caplog.text) == (not quantised_once)
            caplog.clear()


def test_training_in_a_group_keeps_no_frozen_weight(packings):
    """Each step would refresh it."""
    quantisers = []
    for cache, group in (("off", nullcontext()), ("always", alone()), ("on", nullcontext())):
        model = torch.nn.Sequential(torch.nn.Linear(64, 48).requires_grad_(False), torch.nn.Linear(48, 32))
        with group:
            compiled, recorder = compile_recorded(model, fp4compile.backend("nvfp4", weight_cache=cache))
            compiled(torch.randn(8, 64)).sum().backward()
            quantisers.append((recorder.graphs[0].count("fp4compile.quantize"), len(packings)))
    all_of_them = quantisers[0][0]
    assert quantisers == [(all_of_them, 0), (all_of_them, 0), (all_of_them - 1, 1)]


def local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_graphs_read_what_a_group_wrote():
    layer, x = torch.nn.Linear(64, 48).cuda(), torch.randn(8, 64, device="cuda")
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4"), mode="reduce-overhead")

    def check(calls):
        for _ in range(calls):  # recorded by the second, replayed from the third on
            torch.testing.assert_close(compiled(x).cpu(), uncached(layer, x), rtol=1e-5, atol=1e-5)

    check(3)
    with alone():
        for _ in range(3):
            write_unseen(layer.weight, -1.5)
            check(2)
        write_unseen(layer.weight, -0.5)
    check(2)


def test_what_was_kept_before_a_group_is_out_of_date_after_it(packings):
    weight, other = (torch.nn.Parameter(torch.randn(48, 64)) for _ in range(2))
    for each in (weight, other):
        packed_weight(each, form("nvfp4"))
    with alone():
        write_unseen(weight, -1.5)  # and no call while the group is there
    for each in (weight, other):
        assert is_current(each, packed_weight(each, form("nvfp4")))
    assert len(packings) == 4


def test_a_group_that_begins_while_a_weight_is_packed_counts(monkeypatch):
    weight = torch.nn.Parameter(torch.randn(48, 64))
    quantize = weight_cache._quantize

    def overtaken(weight, packed_as):
        packed = quantize(weight, packed_as)
        with alone():
            write_unseen(weight, -1)
        return packed

    monkeypatch.setattr(weight_cache, "_quantize", overtaken)
    packed_weight(weight, form("nvfp4"))
    monkeypatch.setattr(weight_cache, "_quantize", quantize)
    assert is_current(weight, packed_weight(weight, form("nvfp4")))


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("tells", [True, False])
def test_nothing_is_kept_where_torch_does_not_tell_of_groups(tells, packings, monkeypatch):
    monkeypatch.setattr(writes, "watch", lambda: tells)
    compiled, recorder = compile_recorded(torch.nn.Linear(64, 48), fp4compile.backend("nvfp4"))
    with torch.no_grad():
        compiled(torch.randn(8, 64))
    assert recorder.graphs[0].count("fp4compile.quantize") == (1 if tells else 2)
    weight = torch.nn.Parameter(torch.randn(48, 64))
    before = len(packings)
    packed_weight(weight, form("nvfp4")), packed_weight(weight, form("nvfp4"))
    assert len(packings) == before + (1 if tells else 2)


def test_groups_are_watched_once_and_only_where_they_can_be(monkeypatch):
    world, calls = dist.distributed_c10d._World, []
    monkeypatch.setattr(world, "default_pg", world.default_pg)  # and put back

    def told():
        calls.append(dist.is_initialized())

    assert _inductor_patches.watch_process_groups(told) and _inductor_patches.watch_process_groups(told)
    with alone():
        pass
    assert calls == [True, False]
    monkeypatch.setattr(world, "default_pg", None)
    assert not _inductor_patches.watch_process_groups(lambda: None)
