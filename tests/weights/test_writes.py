"""Writes to weights that leave their version counter as it is; `python -m tests.fuzz --writes` runs more sequences."""

import copy
import gc
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import fp4compile
from fp4compile.weights import writes
from fp4compile.weights.cache import form, packed_weight
from tests.fuzz.writes import WRITES, run
from tests.helpers.cached_weights import RECIPE, assert_current, two_layers

SEQUENCES = 40


@pytest.fixture(autouse=True)
def watched():
    writes.watch()


def test_no_sequence_of_writes_leaves_a_stale_weight():
    findings = [finding for seed in range(SEQUENCES) if (finding := run(seed)) is not None]
    assert findings == []
    assert len(WRITES) > 20


def test_reading_data_changes_nothing(packings):
    weight = torch.nn.Parameter(torch.randn(48, 64).t())
    packed_weight(weight, form("mxfp8"))
    data, again = weight.data, weight.data
    copy.deepcopy(weight), weight.data.clone(), [*weight.data]
    for each in (data, again):
        assert type(each) is torch.Tensor and each.is_leaf and not each.requires_grad and each.grad_fn is None
        assert each.data_ptr() == weight.data_ptr() and each.stride() == weight.stride() == (1, 64)
        assert each is not weight and each._version == 0
    packed_weight(weight, form("mxfp8"))
    assert len(packings) == 1


def test_a_write_through_data_is_none_of_the_weight_itself():
    """Autograd still takes such a write for none, as without this package."""
    weight, x = torch.nn.Parameter(torch.ones(32, 32)), torch.ones(4, 32, requires_grad=True)
    packed_weight(weight, form("mxfp8"))
    y = (x @ weight).sum()
    weight.data.mul_(2)
    y.backward()
    assert weight._version == 0 and torch.equal(x.grad, torch.full((4, 32), 64.0))


def test_other_tensors_have_the_data_that_torch_gives():
    weight = torch.nn.Parameter(torch.randn(32, 32))
    packed_weight(weight, form("mxfp8"))
    sparse, meta = torch.eye(3).to_sparse(), torch.nn.Parameter(torch.empty(3, device="meta"))
    assert sparse.data.is_sparse and meta.data.is_meta
    x = torch.randn(5, 32)
    assert torch.equal(torch.vmap(lambda row: row * weight.data[0])(x), x * weight[0])
    assert torch.equal(torch.func.grad(lambda w: (w * weight.data).sum())(torch.zeros(32, 32)), weight)
    assert torch.equal(torch.func.functionalize(lambda t: t.data.add(1))(x), x + 1)
    assert torch.equal(make_fx(lambda t: t @ weight.data)(x)(x), x @ weight)


class _Strict(torch.Tensor):
    """Supports `.data` alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function not in (torch.Tensor.data.__get__, torch.Tensor.data.__set__):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args)


class _Names(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_subclasses_and_modes_receive_the_calls_of_torch_alone():
    tensor, weight = torch.ones(3).as_subclass(_Strict), torch.nn.Parameter(torch.ones(3))
    tensor.data = torch.zeros(3)
    assert not tensor.data.as_subclass(torch.Tensor).any()
    value = torch.zeros(3)
    with _Names() as mode:
        weight.data = value
        weight.data  # noqa: B018
    assert mode.names == ["__set__", "__get__"]


def test_a_traced_function_reads_the_weight_of_its_module():
    layer = torch.nn.Linear(32, 32, bias=False)
    packed_weight(layer.weight, form("mxfp8"))

    class Reader(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return x @ self.layer.weight.data

    traced, x = torch.jit.trace(Reader(), torch.randn(4, 32)), torch.randn(4, 32)
    with torch.no_grad():
        layer.weight.mul_(-2)
    assert torch.equal(traced(x), x @ layer.weight)


def test_records_of_freed_storages_go():
    kept = [torch.nn.Parameter(torch.randn(2, 32)) for _ in range(20)]
    gc.collect()
    for weight in itertools.chain(kept, (torch.nn.Parameter(torch.randn(2, 32)) for _ in range(1000))):
        weight.data  # noqa: B018 (begins to track the storage)
    alive = sum(not one.reference.expired() for one in writes._storages.values())
    assert len(writes._storages) <= max(64, 2 * alive + 1)
    assert all(weight.untyped_storage()._cdata in writes._storages for weight in kept)


@pytest.mark.parametrize(("shape", "part"), [((2, 32, 32), lambda x: x[1]), ((32, 32), lambda x: x)])
def test_memory_that_further_tensors_share_is_quantised_at_every_call(shape, part, packings):
    """Nothing tells of a write to `flat`: `flat.data` had a counter of its own."""
    flat, weight = torch.randn(shape), torch.nn.Parameter(torch.randn(32, 32))
    packed_weight(weight, form("mxfp8"))
    weight.data = part(flat.data)
    for _ in range(2):
        flat.mul_(-1.5)
        expected = fp4compile.quantize(weight.detach(), "mxfp8")
        assert torch.equal(packed_weight(weight, form("mxfp8"))[0].view(torch.uint8), expected.data.view(torch.uint8))
    assert len(packings) == 3
    weight.data = weight.data.clone()  # memory of its own again
    packed_weight(weight, form("mxfp8")), packed_weight(weight, form("mxfp8"))
    assert len(packings) == 4


def test_a_tensor_that_becomes_a_weight_is_watched_once():
    first, second = (torch.nn.Parameter(torch.randn(32, 32)) for _ in range(2))
    first.data  # noqa: B018 (the storage has the counter of what `.data` returned)
    kept = first.detach()
    first.data = torch.randn(32, 32)
    for _ in range(3):
        second.data = kept  # whose counter is the one that the first weight had
        packed_weight(second, form("mxfp8"))
        kept.mul_(-1.5)
        expected = fp4compile.quantize(second.detach(), "mxfp8")
        assert torch.equal(packed_weight(second, form("mxfp8"))[0].view(torch.uint8), expected.data.view(torch.uint8))
        second.data = torch.randn(32, 32)
    assert len(writes.tracked(kept.untyped_storage()).counters) == 2


def test_a_write_through_data_reaches_a_compiled_graph():
    model, x = two_layers(), torch.randn(8, 64)
    compiled = torch.compile(model, backend=fp4compile.backend(RECIPE))
    assert_current(compiled, model, x)
    model[0].weight.data += torch.randn(48, 64)
    assert_current(compiled, model, x)


def assign(layer):
    torch.nn.utils.vector_to_parameters(torch.ones(65 * 64), layer.parameters())


def fill(layer):
    for parameter in layer.parameters():
        parameter.data.fill_(1.0)


# The Inductor of torch 2.11 cannot assign a part of another tensor, with this package or without.
@pytest.mark.parametrize(("backend", "write"), [("eager", assign), ("eager", fill), ("fp4compile_mxfp8", fill)])
def test_modules_are_cast_and_written_inside_of_a_compiled_function(backend, write):
    """After the graph break, torch's own code assigns `.data`, and Dynamo captures every function that it calls."""

    def run(x):
        layer = torch.nn.Linear(64, 64)
        torch._dynamo.graph_break()
        layer = layer.double().float()
        write(layer)
        return layer(x)

    assert torch.equal(torch.compile(run, backend=backend)(torch.ones(2, 64)), torch.full((2, 64), 65.0))
