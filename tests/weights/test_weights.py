"""Packed weights leave the inference graph, and a weight that changes is seen, however it changes."""

import gc
import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.analysis.find import Input
from fp4compile.passes.hoist import Hoisted, hoist
from fp4compile.weights.cache import form, packed_weight
from tests.helpers.cached_weights import RECIPE, assert_current, two_layers, uncached, write_unseen
from tests.helpers.graphs import compile_recorded
from tests.helpers.rewritten import rewritten

pytestmark = pytest.mark.slow
PLACES = [
    ("cpu", "default"),
    pytest.param("cuda", "default", marks=pytest.mark.gpu),
    pytest.param("cuda", "reduce-overhead", marks=pytest.mark.gpu),
]


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
        node.meta.update(desc=SimpleNamespace(idx=index), val=torch.empty(64, 48))
    packed = graph.call_function(torch.ops.fp4compile.quantize.default, (weight, "nvfp4", 0), {"layout": "swizzled"})
    packed.meta["val"] = tuple(packed_weight(torch.nn.Parameter(torch.randn(64, 48)), form("nvfp4", 0, "swizzled")))
    graph.output(graph.call_function(operator.getitem, (packed, 1)))
    module = torch.fx.GraphModule({}, graph)
    hoisted = Hoisted()
    assert hoist(graph, (Input(), Input("layer.weight")), hoisted) == 1
    module.recompile()
    assert hoisted.recipients == [(1, form("nvfp4", -2, "swizzled"))]
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


class Views(torch.nn.Module):
    """Weights that are views with strides of their own: of memory that begins elsewhere, and of one row, repeated."""

    def __init__(self):
        super().__init__()
        self.rows, self.row = torch.nn.Parameter(torch.randn(40, 64)[4:]), torch.nn.Parameter(torch.randn(1, 64))

    def weights(self):
        return self.rows.as_strided((32, 64), (64, 1)), self.row.expand(32, 64)

    def forward(self, x):
        return [x @ weight.t() for weight in self.weights()]


def test_views_with_strides_of_their_own():
    model, x = Views(), torch.randn(8, 64)
    with torch.no_grad():
        results = torch.compile(model, backend=fp4compile.backend("mxfp8"))(x)
    for result, weight in zip(results, model.weights(), strict=True):
        quantised, activations = (fp4compile.quantize(t.detach().contiguous(), "mxfp8") for t in (weight, x))
        expected = activations.dequantize() @ quantised.dequantize().t()
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


class Rows(torch.nn.Module):
    """Some rows of a parameter: how many, or which, only the inputs say."""

    def __init__(self, rows):
        super().__init__()
        self.weight, self.rows = torch.nn.Parameter(torch.randn(96, 64)), rows

    def forward(self, x, like):
        return F.linear(x, self.rows(self.weight, like.shape[0]))


@pytest.mark.parametrize("rows", [
    lambda w, n: w[:n], lambda w, n: w[n:], lambda w, n: w.split([n, 48, 48 - n])[1],
], ids=["first", "last", "48 from some on"])  # fmt: skip
@torch.no_grad()
def test_pieces_that_depend_on_an_input_stay_in_the_graph(packings, rows):
    model, x, formats = Rows(rows), torch.randn(8, 64), {"fprop_x": "mxfp8", "fprop_w": "mxfp8"}
    compiled, recorder = compile_recorded(model, fp4compile.backend(fp4compile.Recipe(**formats)))
    x8, w8 = (fp4compile.quantize(t.detach(), "mxfp8").dequantize() for t in (x, model.weight))
    for count in (32, 45, 17):
        like = torch.empty(count)
        torch._dynamo.mark_dynamic(like, 0)
        expected = x8 @ rows(w8, count).t()  # blocks lie along rows
        torch.testing.assert_close(compiled(x, like), expected, rtol=1e-5, atol=1e-5)
    assert packings == [] and [graph.count("fp4compile.quantize") for graph in recorder.graphs] == [2]


def test_training_graphs_keep_their_weights(packings):
    layer = torch.nn.Linear(64, 48)
    torch.compile(layer, backend=fp4compile.backend("nvfp4"))(torch.randn(8, 64)).sum().backward()
    assert packings == []


def change_in_place(layer):
    layer.weight.mul_(-1.5)


def change_by_fused_optimizer(layer):
    with torch.enable_grad():
        layer.weight.sum().backward()
    torch.optim.AdamW(layer.parameters(), lr=0.5, fused=True).step()


def change_storage_twice(layer):
    # The allocator may hand the first address out again.
    for _ in range(2):
        layer.weight.data = torch.randn_like(layer.weight)
        gc.collect()


def change_parameter(layer):
    layer.weight = torch.nn.Parameter(torch.randn_like(layer.weight))


CHANGES = [change_in_place, change_by_fused_optimizer, change_storage_twice, change_parameter]


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
        write_unseen(parameter, -0.5)


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
    write_unseen(model[0].weight, -1.5)
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


# By default Dynamo of torch 2.11 does not look at the parameters of a module whose dictionary is the same: it calls
# the graph of another shape or stride, with every backend, and Inductor's code raises.
looking_at_parameters = torch._dynamo.config.patch(skip_tensor_guards_with_matching_dict_tags=False)


@looking_at_parameters
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


@looking_at_parameters
def test_weight_of_another_shape_and_back():
    layer, x = torch.nn.Linear(64, 48), torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend("nvfp4", min_n=1), dynamic=False)
    with torch.no_grad():
        for rows in (48, 32, 48, 1):
            layer.weight.data, layer.bias.data = torch.randn(rows, 64), torch.randn(rows)
            torch.testing.assert_close(compiled(x), uncached(layer, x), rtol=1e-5, atol=1e-5)
