"""Which pointwise operations go into a product's kernel, and what they compute there."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode

import fp4compile
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import scaled_mm_of
from fp4compile.passes.fuse_epilogue import Region
from fp4compile.passes.lower import lower
from tests.helpers.absent_gpu import ANY, fused_graph

BF16, F32 = torch.bfloat16, torch.float32
X, W, SAME, ROW = (2, 128, 512), (1024, 512), (2, 128, 1024), (1024,)


def graph_of(function, *shapes, **options):
    result = fused_graph(function, *shapes, **options)
    return result.graph, result.fused


def epilogue_of(graph):
    """The steps of the epilogue of a graph with one, and the product of the node."""
    products = map(scaled_mm_of, graph.find_nodes(op="call_function", target=SCALED_MM))
    (product,) = (each for each in products if each.spec.epilogue is not None)
    return product.spec.epilogue.strings(), product


def pointwise_left(graph):
    """Operations on values of the product's size that are Inductor's to compute."""
    return [str(node.target) for node in graph.nodes
            if node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ())]  # fmt: skip


FUSED = {
    "relu": lambda x, w: F.relu(x @ w.t()),
    "silu": lambda x, w: F.silu(x @ w.t()),
    "sigmoid": lambda x, w: torch.sigmoid(x @ w.t()),
    "gelu": lambda x, w: F.gelu(F.linear(x, w)),
    "gelu by tanh": lambda x, w: F.gelu(F.linear(x, w), approximate="tanh"),
    "squared relu": lambda x, w: F.relu(x @ w.t()).square(),
    "constants": lambda x, w: (1 - (x @ w.t() + 0.5) * 3) / 7,
    "cast": lambda x, w: (x @ w.t()).half(),
    "residual": lambda x, w, same: F.linear(x, w) + same,
    "gate": lambda x, w, same: F.silu(F.linear(x, w)) * same,
    "layer scale": lambda x, w, same, row: F.gelu(F.linear(x, w)) * row + same,
    "difference": lambda x, w, same: same - F.linear(x, w),
    "ratio": lambda x, w, same: F.linear(x, w) / same,
    "bias": lambda x, w, same, row: F.relu(F.linear(x, w, row)) * same,
    "flat operand": lambda x, w, same: F.linear(x, w).view(-1, 1024) + same.view(-1, 1024),
    "wide row": lambda x, w, same, row: F.linear(x, w) * row.view(1, 1, -1),
}


@pytest.mark.parametrize(("name", "recipe"), [
    *((name, "nvfp4") for name in FUSED), ("layer scale", "nvfp4_rowwise"), ("layer scale", "mxfp8"),
])  # fmt: skip
def test_fused(name, recipe):
    """Nothing is left for Inductor to compute, the result has its shape and dtype, and the kernel can be launched."""
    function, found = FUSED[name], []
    shapes = (X, W, SAME, ROW)[: function.__code__.co_argcount]

    def then(graph):
        (result,) = torch.utils._pytree.tree_leaves(graph.output_node().args)
        found.append((result.meta["val"].shape, result.meta["val"].dtype, pointwise_left(graph)))
        lower(graph)

    fused = fused_graph(function, *shapes, recipe=recipe, then=then)
    with FakeTensorMode():
        expected = function(*(torch.empty(shape, dtype=BF16) for shape in shapes))
    assert fused.fused == 1 and found == [(expected.shape, expected.dtype, [])]
    launched = fused.launches[-1]
    assert launched.kernel.__name__ == "gemm_block_scaled_sm100" and launched.constants["EPILOGUE"]


def kept(x, w):
    y = x @ w.t()
    return F.relu(y), y


def transposed(x, w, other):
    other = other.transpose(1, 2)
    return x @ w.t() + other, other.sum()


def kept_between(x, w, same):
    y = F.relu(x @ w.t())
    return y * same, y


LEFT = {
    "used elsewhere": (kept, (X, W)),
    "no epilogue": (lambda x, w: (x @ w.t()).view(-1), (X, W)),
    "unknown operation": (lambda x, w: (x @ w.t()).sin(), (X, W)),
    "unknown overload": (lambda x, w, same: torch.add(x @ w.t(), same, alpha=2.0), (X, W, SAME)),
    "wider result": (lambda x, w: (x @ w.t()).float(), (X, W)),
    "wider chain": (lambda x, w, same: (x @ w.t()).float() + same, (X, W, SAME)),
    "column": (lambda x, w, column: x @ w.t() + column, (X, W, (2, 128, 1))),
    "scalar tensor": (lambda x, w, scale: x @ w.t() * scale, (X, W, ())),
    "broadcast up": (lambda x, w, more: x @ w.t() + more, (X, W, (3, 2, 128, 1024))),
    "other stride": (transposed, (X, W, (2, 1024, 128))),
    "integer operand": (lambda x, w, same: x @ w.t() * (same > 0), (X, W, SAME)),
    "double": (lambda x, w: (x @ w.t()).double().relu().to(BF16), (X, W)),
    "too large a constant": (lambda x, w: x @ w.t() * 1e300, (X, W)),
    "division by zero": (lambda x, w: (x @ w.t()) / 0.0, (X, W)),
    "operand computed for it": (lambda x, w, same: x @ w.t() * same.sin(), (X, W, SAME)),
    "heads apart": (lambda x, w, row: (x @ w.t()).view(2, 128, 8, 128) * row, (X, W, (128,))),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_left_to_inductor(name):
    function, shapes = LEFT[name]
    with config.patch(emulate_precision_casts=True):
        before, _ = graph_of(function, *shapes)
    graph, fused = graph_of(function, *shapes)
    assert fused == 0
    assert [node.target for node in graph.nodes] == [node.target for node in before.nodes]


def test_the_part_that_ends_in_one_value():
    """Up to a value that is needed itself; the rest is Inductor's."""
    graph, fused = graph_of(kept_between, X, W, SAME)
    steps, _ = epilogue_of(graph)
    assert fused == 1 and steps == ["relu product"]
    assert pointwise_left(graph) == ["aten.mul.Tensor"]
    graph, fused = graph_of(lambda x, w: F.relu(x @ w.t()).sin(), X, W)
    assert fused == 1 and pointwise_left(graph) == ["aten.sin.default"]
    graph, fused = graph_of(lambda x, w: (x @ w.t()).relu().float().sum(), X, W)  # the cast would double the bytes
    assert fused == 1 and pointwise_left(graph) == ["prims.convert_element_type.default"]
    graph, fused = graph_of(lambda x, w, a, b, c: (x @ w.t() + a + b) * c, X, W, SAME, SAME, SAME)  # an operand more
    assert fused == 1 and pointwise_left(graph) == ["aten.mul.Tensor"]


def test_an_operand_with_other_users():
    """A residual that the next layer's norm reads as well: in memory anyhow."""

    def residual(x, w, a, b):
        a = a + b
        return a + x @ w.t(), a.sum()

    graph, fused = graph_of(residual, X, W, SAME, SAME)
    assert fused == 1 and pointwise_left(graph) == ["aten.add.Tensor"]


def test_gate_of_two_products():
    """The gate's product takes the other's as an operand, so that nothing is rounded on the way; once only."""
    graph, fused = graph_of(lambda x, w, v: F.silu(F.linear(x, w)) * F.linear(x, v), X, W, W)
    steps, product = epilogue_of(graph)
    assert fused == 1
    assert steps == ["neg product", "exp s0", "add s1 1.0", "div product s2", "mul s3 aux0"]
    assert str(product.auxiliaries[0]).startswith("view") and not pointwise_left(graph)


def test_residual_stream():
    """Each product of a chain of layers has its epilogue; the one before is the operand of the next."""

    def layers(x, w, v):
        x = x + F.linear(x, w)
        return x + F.relu(F.linear(x, v))

    graph, fused = graph_of(layers, (64, 512), (512, 512), (512, 512))
    assert fused == 2 and not pointwise_left(graph)


def test_a_residual_stream_is_followed_to_the_first_reader_outside():
    """Not through all layers, for each product of each: the time of that is cubic in their number."""

    def layers(x, w0, w1, w2, w3):
        for weight in (w0, w1, w2, w3):
            normed = x / x.sum(-1, keepdim=True)
            x = x + F.linear(normed, weight)
        return x

    graph, _ = graph_of(layers, (64, 512), *[(512, 512)] * 4, fuse=False)
    products = graph.find_nodes(op="call_function", target=SCALED_MM)
    assert [len(Region(product).operations) for product in products] == [1, 1, 1, 1]


def test_dtypes():
    """A float32 product is not rounded before its epilogue; its cast is in the epilogue."""
    graph, fused = graph_of(lambda x, w: F.relu(x @ w.t()).to(BF16), X, W, dtype=F32)
    steps, product = epilogue_of(graph)
    assert fused == 1 and steps == ["relu product"]
    assert (product.spec.out_dtype, product.spec.epilogue.dtype) == (F32, BF16)
    graph, fused = graph_of(lambda x, w, r: x @ w.t() + r, X, W, SAME, dtypes=(BF16, BF16, F32))
    assert fused == 0  # the sum is float32, twice the product's bytes
    graph, fused = graph_of(lambda x, w, r: (x @ w.t() + r).to(BF16), X, W, SAME, dtypes=(BF16, BF16, F32))
    assert fused == 1 and not pointwise_left(graph)


def test_symbolic_sizes():
    """Of any number of sequences, each long enough that one kernel serves them all. Of any number of rows only where
    one kernel serves all of these, which is so on SM100."""
    shapes = ((ANY, 128, 512), W, (ANY, 128, 1024), ROW)
    result = fused_graph(FUSED["layer scale"], *shapes, then=lower)
    assert result.fused == 1 and not pointwise_left(result.graph)
    assert result.launches[-1].kernel.__name__ == "gemm_block_scaled_sm100"
    assert not result.mode.shape_env.guards
    assert [graph_of(FUSED["relu"], (ANY, 512), W, sm=sm)[1] for sm in (90, 100)] == [0, 1]


SERVED = [
    (90, "nvfp4", 40, True), (90, "nvfp4", 8, False), (90, "nvfp4", 300, True), (90, "nvfp4_one_level", 300, True),
    (90, "mxfp8", 40, True), (90, "mxfp8", 300, False), (90, "float8_rowwise", 72, False),
    (90, "float8_rowwise", 40, True),
    (90, "nvfp4_weight_only", 40, True), (90, "nvfp4_weight_only", 4, False),
    (100, "nvfp4", 4, True), (100, "nvfp4_weight_only", 4, False), (120, "mxfp4", 300, True),
]  # fmt: skip


@pytest.mark.parametrize(("sm", "recipe", "rows", "expected"), SERVED)
def test_where_the_kernel_has_a_epilogue(sm, recipe, rows, expected):
    """Not where the products of whole matrices, FP8 or streamed weights are somebody else's."""
    _, fused = graph_of(lambda x, w: F.relu(x @ w.t()), (rows, 512), (1024, 512), sm=sm, recipe=recipe)
    assert fused == int(expected)


@pytest.mark.parametrize("switch", ["emulate_precision_casts", "use_fast_math", "eager_numerics.division_rounding"])
def test_other_arithmetic_is_left_to_inductor(switch):
    with config.patch({switch: True}):
        _, fused = graph_of(lambda x, w: F.relu(x @ w.t()), X, W)
    assert fused == 0


# ---------------------------------------------------------------- on a GPU


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(512, 1056, bias=False, dtype=BF16) for _ in range(2))
        self.down = torch.nn.Linear(1056, 512, dtype=BF16)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def compiled_code(function, backend, *args):
    torch._dynamo.reset()
    with torch.no_grad():
        got, (code,) = run_and_get_code(torch.compile(function, backend=backend), *args)
    return got, code


def epilogues_in(code):
    """The texts of the epilogues that generated kernels compute, without the word that stands in their signatures."""
    return set(re.findall(r"'EPILOGUE': '([^']+\|[^']+)'", code))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "nvfp4_weight_only"])
def test_mlp_fused_equals_unfused(recipe, monkeypatch):
    """Of the same operations the bits are the same: a gate with another product, a residual after a bias."""
    model = Mlp().cuda()
    x = torch.randn(40, 512, device="cuda", dtype=BF16)
    fused, code = compiled_code(model, fp4compile.backend(recipe, strict=True), x)
    assert len(epilogues_in(code)) == 2  # the gate's and the residual's
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("fuse_epilogue",))
    with config.patch(force_disable_caches=True):
        unfused, code = compiled_code(model, fp4compile.backend(recipe, strict=True), x)
    assert not epilogues_in(code)
    assert torch.equal(fused, unfused)


@pytest.mark.gpu
def test_training_saves_the_product():
    """silu's backward needs the product, relu's does not."""
    layer = torch.nn.Linear(512, 512, device="cuda", dtype=BF16)
    x = torch.randn(40, 512, device="cuda", dtype=BF16, requires_grad=True)
    for activation, epilogues in ((torch.nn.SiLU(), 0), (torch.nn.ReLU(), 1)):
        torch._dynamo.reset()
        model = torch.nn.Sequential(layer, activation)
        y, code = run_and_get_code(torch.compile(model, backend=fp4compile.backend("mxfp8", strict=True)), x)
        assert len(epilogues_in(code[0])) == epilogues
        x.grad = None
        y.sum().backward()
        assert x.grad.isfinite().all() and x.grad.any()


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_graph_runs_on_the_cpu(name):
    """By the reference of the steps, it computes what the graph before the pass computes, rounded fewer times."""
    function = FUSED[name]
    shapes = (X, W, SAME, ROW)[: function.__code__.co_argcount]
    values = [torch.randn(shape, dtype=BF16) for shape in shapes]
    values = [torch.where(value.abs() < 0.01, 0.01, value) for value in values]  # no quotient is infinite
    graphs = [graph_of(function, *shapes, sm=90, fuse=fuse)[0] for fuse in (False, True)]
    before, after = (torch.fx.GraphModule({}, graph)(*values) for graph in graphs)
    assert (before.shape, before.dtype) == (after.shape, after.dtype)
    before, after = before.float(), after.float()
    assert ((before - after).abs() <= 0.02 * before.abs() + 0.02 * before.abs().mean()).all()
