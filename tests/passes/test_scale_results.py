"""Which multiplications by a number move behind the products that read them. The bits never change."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fp4compile
from fp4compile.passes.scale_results import scale_results
from tests.helpers import without_codegen

aten = torch.ops.aten
WIDE, THIN = (2, 12, 64), (4, 64)


def thin(x, b):
    """As an adapter's backward pass has it: a product of the gradient, and one of the gradient transposed."""
    scaled = (x * 2.0).view(-1, x.shape[-1])
    return scaled @ b.t(), scaled.t() @ (x.view(-1, x.shape[-1]) @ b.t())


def both_operands(x, b):
    rows = x.view(-1, x.shape[-1])
    return (rows.t() * 4.0).t().mm(rows.t() * 0.5)


def with_itself(x, b):
    scaled = x.view(-1, x.shape[-1]) * -2
    return scaled @ scaled.t()


def no_power(x, b):
    return (x * 3.0).view(-1, x.shape[-1]) @ b.t()


def wide_result(x, b):
    return (b * 2.0).t() @ b


def read_elsewhere(x, b):
    scaled = x * 2.0
    return scaled.view(-1, x.shape[-1]) @ b.t(), scaled.sum()


def returned(x, b):
    scaled = x * 2.0
    return scaled.view(-1, x.shape[-1]) @ b.t(), scaled


def by_a_tensor(x, b):
    return (x * b[0]).view(-1, x.shape[-1]) @ b.t()


def not_dense(x, b):
    return (x[:1, :1].expand_as(x) * 2.0).reshape(-1, x.shape[-1]) @ b.t()


@pytest.mark.parametrize(("function", "count"), [
    (thin, 1), (both_operands, 2), (with_itself, 1), (no_power, 0), (wide_result, 0), (read_elsewhere, 0),
    (returned, 0), (by_a_tensor, 0), (not_dense, 0),
])  # fmt: skip
def test_multiplications_that_move(function, count):
    torch.manual_seed(0)
    x, b = (torch.randn(shape).bfloat16() for shape in (WIDE, THIN))
    graph_module = make_fx(function, tracing_mode="fake")(x, b)
    expected = graph_module(x, b)
    assert scale_results(graph_module.graph) == count
    graph_module.graph.lint()
    graph_module.recompile()
    for mul in graph_module.graph.find_nodes(op="call_function", target=aten.mul.Tensor) if count else ():
        assert mul.args[0].target in (aten.mm.default, aten.mul.Tensor)
    for got, wanted in zip(*map(torch.utils._pytree.tree_leaves, (graph_module(x, b), expected)), strict=True):
        assert torch.equal(got, wanted)


def test_sizes_that_vary_get_no_guards():
    """Also where nothing but a guard could tell which tensor is larger: then the multiplication stays."""
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    x, b = (mode.from_tensor(torch.randn(shape).bfloat16(), symbolic_context=dynamic) for shape in ((24, 64), (4, 64)))
    graph_module = make_fx(lambda x, b: (x * 2.0) @ b.t(), tracing_mode="symbolic")(x, b)
    before = len(shapes.guards)
    scale_results(graph_module.graph)
    assert len(shapes.guards) == before


def test_half_precision_stays():
    """A float16 that is doubled may be infinite where the doubled result is not."""
    graph_module = make_fx(thin, tracing_mode="fake")(*(torch.ones(shape).half() for shape in (WIDE, THIN)))
    assert scale_results(graph_module.graph) == 0


class Adapted(nn.Module):
    """A linear layer that is frozen, and an adapter."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 4), (4, 128)))
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 2.0


def test_gradients_of_an_adapter(monkeypatch):
    """The backend runs the pass on the backward graph, and gradients have the bits that they have without it."""
    without_codegen.install(monkeypatch)
    torch.manual_seed(0)
    model, x = Adapted().bfloat16(), torch.randn(32, 64).bfloat16().requires_grad_()
    found = []
    for disabled in ((), ("scale_results",)):
        torch._dynamo.reset()
        fp4compile.config.disabled_passes = disabled
        try:
            backend = fp4compile.backend("mxfp8")
        finally:
            fp4compile.config.disabled_passes = ()
        torch.compile(model, backend=backend)(x).square().sum().backward()
        found.append([each.grad for each in (x, model.down.weight, model.up.weight)])
        runs = backend.report.passes
        assert "scale_results" not in runs if disabled else runs["scale_results"].matches == 1
        model.zero_grad()
        x.grad = None
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
