"""FLOPs and category of every kind of product, compared with formulas written out for uneven sizes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import flop_registry

import fp4compile
from fp4compile.passes.manager import analyse, describe
from fp4compile.recipe import named


def parameter(*shape):
    return torch.nn.Parameter(torch.randn(*shape))


class Net(torch.nn.Module):
    """A linear layer (64 -> 64), then a function of its output and a parameter."""

    def __init__(self, function, *shape):
        super().__init__()
        self.lin = torch.nn.Linear(64, 64)
        self.weight = parameter(*shape)
        self.function = function

    def forward(self, x, *more):
        return self.function(self.lin(x), self.weight, *more)


def found(model, *args, grad=True):
    """(category, FLOPs) of all products but the linear layer's, in order."""
    with torch.set_grad_enabled(grad):
        report = fp4compile.explain(model, *args, recipe="mxfp8")
    dense = [row for row in report.rows if row.module == "lin"]
    assert [(row.category, row.flops) for row in dense] == len(dense) * [("dense", 2 * args[0].numel() * 64)]
    return [(row.category, row.flops) for row in report.rows if row.module != "lin"]


def test_grouped_products():
    def grouped(x, w, offsets):
        return F.grouped_mm(x.bfloat16(), w.bfloat16(), offs=offsets)

    offsets = torch.tensor([8, 8, 32], dtype=torch.int32)
    once = ("experts", 2 * 32 * 96 * 64)  # one expert for each token
    assert found(Net(grouped, 3, 64, 96), torch.randn(32, 64), offsets) == 3 * [once]
    assert found(Net(grouped, 3, 64, 96), torch.randn(32, 64), offsets, grad=False) == [once]


@torch.library.custom_op("tests::grouped_mm_fallback", mutates_args=())
def grouped_mm_fallback(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return x @ w[0]


@grouped_mm_fallback.register_fake
def _(x, w, offs):
    return x @ w[0]


@torch.library.custom_op("tests::other_mm", mutates_args=())
def other_mm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w[0]


@other_mm.register_fake
def _(x, w):
    return x @ w[0]


def test_operators_of_other_libraries():
    x, offsets = torch.randn(32, 64), torch.tensor([8, 8, 32], dtype=torch.int32)
    assert found(Net(grouped_mm_fallback, 3, 64, 96), x, offsets, grad=False) == [("experts", 2 * 32 * 96 * 64)]
    assert found(Net(other_mm, 3, 64, 96), x, grad=False) == [("experts", None)]


def test_batched_experts_and_their_gradients():
    once = ("experts", 2 * 3 * 7 * 96 * 64)
    assert found(Net(torch.bmm, 3, 64, 96), torch.randn(3, 7, 64)) == 3 * [once]

    def added(x, w):
        return torch.baddbmm(x.new_ones(3, 7, 96), x, w)

    assert found(Net(added, 3, 64, 96), torch.randn(3, 7, 64), grad=False) == [once]

    def summed(x, w):
        return torch.addbmm(x.new_ones(7, 96), x, w)

    assert found(Net(summed, 3, 64, 96), torch.randn(3, 7, 64), grad=False) == [once]


def test_experts_one_by_one():
    def one(x, w):
        return x @ w[1]

    assert found(Net(one, 3, 64, 96), torch.randn(7, 64), grad=False) == [("experts", 2 * 7 * 64 * 96)]
    experts = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(64, 48)])})
    report = fp4compile.explain(lambda x: experts["experts"][0](x), torch.randn(7, 64), recipe="mxfp8")
    assert {row.category for row in report.rows} == {"experts"}


def test_the_heads_of_one_projection_are_dense():
    def project(x, w):
        return torch.einsum("td,hed->the", x, w)

    assert set(found(Net(project, 3, 32, 64), torch.randn(7, 64))) == {("dense", 2 * 7 * 96 * 64)}


def test_batched_attention_and_its_gradients():
    def attend(x, w):
        return torch.softmax(x @ (w * x).transpose(1, 2), -1) @ torch.sin(x)

    once = ("attention", 2 * 3 * 7 * 7 * 64)
    assert found(Net(attend, 64), torch.randn(3, 7, 64)) == 6 * [once]


def test_attention_and_experts_on_the_same_activations():
    def attend(x, w):
        return torch.bmm(torch.softmax(x @ x.transpose(1, 2), -1) @ x, w)

    scores, experts = ("attention", 2 * 3 * 7 * 7 * 64), ("experts", 2 * 3 * 7 * 96 * 64)
    rows = found(Net(attend, 3, 64, 96), torch.randn(3, 7, 64))
    assert rows.count(scores) == 6 and rows.count(experts) == 3 and len(rows) == 9


def test_fused_attention():
    def attend(x, w):
        return F.scaled_dot_product_attention(x, w * x, x)

    rows = found(Net(attend, 64), torch.randn(3, 2, 7, 64))
    assert rows == [("attention", 4 * 3 * 2 * 7 * 7 * 64), ("attention", 10 * 3 * 2 * 7 * 7 * 64)]
    rows = found(Net(lambda x, w: flex_attention(x, w * x, x), 64), torch.randn(3, 2, 128, 64), grad=False)
    counted = torch.ops.higher_order.flex_attention in flop_registry  # by torch, from 2.13 on
    assert rows == [("attention", 4 * 3 * 2 * 128 * 128 * 64 if counted else None)]


def test_convolutions():
    def convolve(x, w):
        return F.conv2d(x, w, padding=1)

    once = 2 * 3 * 6 * 7 * 64 * 2 * 9
    rows = found(Net(convolve, 6, 2, 3, 3), torch.randn(3, 2, 7, 64))
    assert rows == [("convolution", once), ("convolution", 2 * once)]
    bias = torch.randn(6, requires_grad=True)  # its gradient is a sum and no convolution
    rows = found(Net(lambda x, w: F.conv2d(x, w, bias, padding=1), 6, 2, 3, 3), torch.randn(3, 2, 7, 64))
    assert rows == [("convolution", once), ("convolution", 2 * once)]


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_in_groups(transposed):
    """Each channel is convolved with its own four numbers, as in a Mamba, in the backward pass too."""

    def convolve(x, w):
        return (F.conv_transpose1d if transposed else F.conv1d)(x, w, groups=7, padding=3)

    positions = 64 if transposed else 64 + 2 * 3 - 4 + 1  # of the input, or of the output: four products each
    once = 2 * 3 * 7 * positions * 4
    rows = found(Net(convolve, 7, 1, 4), torch.randn(3, 7, 64))
    assert rows == [("convolution", once), ("convolution", 2 * once)]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_weight_only", "mxfp8", "float8_block", "float8_rowwise"])
def test_packed_and_integer_products(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(72, 96), torch.nn.Linear(96, 32))  # codes of 72 are padded
    fp4compile.pack_(model, recipe)
    with torch.no_grad():
        report = fp4compile.explain(model, torch.randn(5, 72), recipe=recipe)
        dense = [("dense", 2 * 5 * 72 * 96), ("dense", 2 * 5 * 96 * 32)]
        assert [(row.category, row.flops) for row in report.rows] == dense
        assert [(row.m, row.n, row.k) for row in report.rows] == [(5, 96, 72), (5, 32, 96)]
        codes = torch.ones(32, 64, dtype=torch.int8), torch.ones(64, 48, dtype=torch.int8)
        report = fp4compile.explain(lambda a, b: torch._int_mm(a, b), *codes, recipe=recipe)
    assert [(row.category, row.flops) for row in report.rows] == [("other", 2 * 32 * 64 * 48)]


def test_what_torch_counts_and_no_one_else_lists():
    """Every operator that torch has a FLOP formula for is listed as a product."""

    def attend(x):
        return torch.ops.aten._efficient_attention_forward(x, x, x, None, None, None, None, None, 0.0, 0)[0]

    with FakeTensorMode():
        graph = make_fx(attend)(torch.empty(3, 7, 7, 64)).graph
    (row,) = describe(graph, (), analyse(graph, named("mxfp8"), ()))
    assert (row.category, row.product, row.flops) == ("attention", "other", 4 * 3 * 7 * 7 * 7 * 64)
    assert row.reason == "operator aten._efficient_attention_forward.default"
