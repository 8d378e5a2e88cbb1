"""Which quantises return values in the place of codes, and what is launched and computed then."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fp4compile
from fp4compile.analysis.gemm import Input
from fp4compile.check.comparison import same_bits
from fp4compile.check.machine_code import quantize_row
from fp4compile.check.quantisers import Configuration
from fp4compile.hardware import Target
from fp4compile.ops.matmul import SCALED_MM
from fp4compile.ops.nodes import quantise_of, scaled_mm_of
from fp4compile.ops.quantize import QUANTIZE
from fp4compile.passes.fake_quantize import fake_quantize
from fp4compile.passes.fuse_epilogue import fuse_epilogue
from fp4compile.passes.fuse_horizontal import fuse_horizontal
from fp4compile.passes.fuse_prologue import fuse_prologue
from fp4compile.passes.lower import lower
from fp4compile.passes.merge_quantize import merge_quantize
from fp4compile.recipe import named
from fp4compile.templates.launch import dry_run
from tests.helpers.absent_gpu import fused_graph, rewritten_by
from tests.helpers.by_hand import assert_product
from tests.helpers.products import (
    BF16,
    K,
    multiplied,
    on_the_cpu,
    operand,
    outer_kept,
    packed,
    product,
    quantised,
    quantised_each,
    replaced,
    traced,
)

quantize = torch.ops.fp4compile.quantize


def one_level(x, w):
    data, scales, _ = quantize(x, "nvfp4_one_level")
    return product(data, w, a=(scales, None, "nvfp4_one_level"))


def of_three_dimensions(x, w):
    data, a = operand(x.view(2, -1, K), "nvfp4_rowwise")
    return product(data, w, a=a)


def two_outputs(x, w):
    """Each output taken twice, as no common-subexpression elimination has seen it."""
    both = quantize(x, "nvfp4")
    return product(both[0], w, a=(*both[1:], "nvfp4"))


def codes_kept(x, w):
    data, a = operand(x)
    return product(data, w, a=a), data


def scales_kept(x, w):
    data, a = operand(x)
    return product(data, w, a=a), a[0]


def used_twice(x, w):
    data, a = operand(x)
    values = torch.ops.fp4compile.dequantize(data, *a, K, BF16)
    return product(data, w, a=a), values


def both_operands(x, w):
    data, a = operand(x)
    return product(data, (data, *a), a=a)


def right_operand(x, w):
    data, a = operand(x)
    return product(w[0], (data, *a), a=w[1:])


def others_scales(x, w):
    """Codes of one quantise, block scales of another."""
    (data, a), (_, b) = operand(x), operand(x + 1)
    return product(data, w, a=(b[0], *a[1:]))


def of_plain_weights(x, w):
    data, a = operand(x)
    return product(data, (x.new_ones(600, K), None, None, None), a=a)


def with_seed(x, w):
    return multiplied("nvfp4_te", seed=torch.ones((), dtype=torch.int64, device=x.device))(x, w)


def of_a_transposed_tensor(x, w):
    return multiplied()(x.t(), w)


REPLACED = {
    "dynamic": multiplied(), "te": multiplied("nvfp4_te"), "row-scaled": multiplied("nvfp4_rowwise"),
    "static": multiplied(given=True), "dim=1": multiplied(dim=1), "one level": one_level, "outer kept": outer_kept,
    "3 dimensions": of_three_dimensions, "two outputs": two_outputs,
}  # fmt: skip
LEFT = {
    "codes kept": codes_kept, "scales kept": scales_kept, "used twice": used_twice, "both operands": both_operands,
    "right operand": right_operand, "others' scales": others_scales, "plain weights": of_plain_weights,
    "seed": with_seed, "swizzled": multiplied(layout="swizzled"), "hadamard": multiplied("nvfp4_te", hadamard=True),
    "square": multiplied("nvfp4_16x16"), "transposed": of_a_transposed_tensor,
    "swept": multiplied(scale_rule="mse"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REPLACED, *LEFT])
def test_which_ones(name):
    """By the reference, the graph computes the bits that it did before.

    Every product but one of plain weights expands A first: it is never for want of such a product that a quantise is
    left.
    """
    function, weights = (REPLACED | LEFT)[name], [packed(600, "nvfp4_te" if name == "square" else "nvfp4")]
    rows = {"both operands": 512, "right operand": 512}.get(name, 128)  # as B, too, they are not few columns
    graph_module = traced(function, weights, rows=rows)
    x = torch.randn(rows, K).bfloat16()
    expected = on_the_cpu(graph_module, x, weights)
    products = graph_module.graph.find_nodes(op="call_function", target=SCALED_MM)
    with dry_run(Target(90)):
        product = scaled_mm_of(products[0])
        assert (product.b.format is not None) == (name != "plain weights") and product.choice.dequantizes_a
    count = replaced(graph_module)
    assert count == (name in REPLACED)
    quantisers = [quantise_of(node) for node in graph_module.graph.find_nodes(op="call_function", target=QUANTIZE)]
    assert quantisers and all(bool(each.values) == bool(count) for each in quantisers)
    got = on_the_cpu(graph_module, x, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("rows", "n", "sm", "count"), [
    (1, 24, 90, 1), (64, 24, 90, 1), (65, 512, 90, 1), (65, 500, 90, 1), (None, 500, 90, 1),
    (4, 24, 89, 1), (40, 512, 89, 0), (128, 512, 89, 1), (128, 500, 89, 0), (None, 512, 89, 0),
    (4, 512, 80, 0), (128, 512, 80, 1), (4, 512, 100, 0), (128, 512, 120, 0),
])  # fmt: skip
def test_where_codes_are_expanded_in_memory(rows, n, sm, count):
    """By the kernel that serves so many rows and columns on that GPU; of any number of rows, by all that may."""
    weights = [packed(n, layout="swizzled" if sm >= 100 else "linear")]
    function = multiplied(layout="swizzled") if sm >= 100 else multiplied()
    assert replaced(traced(function, weights, rows), sm) == count


def test_weights_in_other_blocks():
    assert replaced(traced(multiplied(), [packed(512, "nvfp4_16x16")], 128)) == 1
    odd = [packed(512, k=72)]
    for rows, count in ((4, 0), (128, 1)):
        graph_module = traced(lambda x, w: multiplied()(x.narrow(1, 0, 72), w), odd, rows)
        assert replaced(graph_module) == count


def mx_step(x, format, kept):
    """The products of a step of a linear layer with rows x, [1024, 512]; and the codes of the columns of x, if kept."""
    x = x.view(1024, 512)
    w = x * 3
    g = product(*of_operands(operand(x, format), operand(w, format))) * 2
    columns = operand(x, format, -2)
    dx = product(*of_operands(operand(g, format), operand(w, format, -2)))
    dw = product(*of_operands(operand(g, format, -2), columns))
    return (g, dx, dw, columns[0]) if kept else (g, dx, dw)


def of_operands(left, right):
    """The arguments of `product` for two operands without global scales."""
    (a, (a_scales, _, name)), (b, (b_scales, _, _)) = left, right
    return a, (b, b_scales, None, name), None, BF16, (a_scales, None, name)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("format", ["mxfp8", "mxfp4", "mxfp8_e5m2", "mxfp8_32x32"])
def test_library_products_of_mx_operands(format, kept):
    """All operands are values, but the codes of activations that are kept for the weight gradient: the same bits."""
    graph_module = traced(lambda x: mx_step(x, format, kept), [], 4096)
    x = torch.randn(4096, K).bfloat16()
    x[5, 3], x[6, :32], x[7, 40] = float("nan"), 2.0**-126, 3e38
    expected = on_the_cpu(graph_module, x, [])
    assert replaced(graph_module) == 3
    quantisers = [quantise_of(node) for node in graph_module.graph.find_nodes(op="call_function", target=QUANTIZE)]
    assert [one.values for one in quantisers] == [(-1,) if kept else (-1, -2), (-1, -2), (-1, -2)]
    got = on_the_cpu(graph_module, x, [])
    assert len(got) == len(expected) and all(not same_bits(*pair) for pair in zip(got, expected, strict=True))


def test_mx_products_that_the_library_does_not_compute():
    """Few columns, and a weight of another format family: the product reads codes."""
    few = traced(lambda x: product(*of_operands(operand(x, "mxfp8"), operand(x.narrow(0, 0, 64), "mxfp8"))), [], 4096)
    assert replaced(few) == 0


def test_the_cpu_is_left_alone():
    x, (*w, _) = torch.randn(4, K).bfloat16(), packed(16)
    graph = make_fx(lambda x, *w: multiplied()(x, (*w, "nvfp4")), tracing_mode="fake")(x, *w).graph
    (node,) = graph.find_nodes(op="call_function", target=QUANTIZE)
    assert fake_quantize(graph) == 0 and list(graph.find_nodes(op="call_function", target=QUANTIZE)) == [node]


@pytest.mark.parametrize("function", [quantised, quantised_each], ids=lambda function: function.__name__)
def test_horizontal_fusion_comes_after(function):
    """Of plain activations with a global scale, as of codes."""
    weights = [packed(64)] * 3
    graph_module = traced(function, weights)
    x = torch.randn(1, K).bfloat16()
    expected = on_the_cpu(graph_module, x, weights)
    assert replaced(graph_module) == 1
    with dry_run(Target(90)):
        assert fuse_horizontal(graph_module.graph) == 1
    got = on_the_cpu(graph_module, x, weights)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [40, 300])
def test_epilogues_come_after(rows):
    """The gated product has its epilogue, and reads what the other one reads."""
    counts = []

    def passes(graph):
        merge_quantize(graph)
        counts.extend(one(graph) for one in (fake_quantize, fuse_epilogue))
        lower(graph)

    def gated(x, w, v):
        return F.silu(F.linear(x, w)) * F.linear(x, v)

    found = fused_graph(gated, (rows, 512), (1056, 512), (1056, 512), sm=90, fuse=False, then=passes)
    assert counts == [1, 1]
    served = [one for one in found.launches if one.kernel.__name__ in ("gemm_wgmma_sm90", "split_k_reduction")]
    assert [one.constants["EPILOGUE"] == "" for one in served] == [True, False]
    assert [one.constants["A_OUTER"] for one in served] == ["tensor"] * 2


# ---------------------------------------------------------------- lowered, on paper


def launched(recipe, m, n, k, sm=90):
    """(kernel, what it stores in place of codes or None) of each launch that a linear layer is lowered to."""
    inputs = (Input(), Input("weight"))
    with FakeTensorMode(), dry_run(Target(sm)) as launches:
        x, w = (torch.empty(rows, k, device="cuda", dtype=BF16) for rows in (m, n))
        graph = make_fx(lambda x, w: x @ w.t())(x, w).graph
        rewritten_by(recipe, graph, inputs)
        merge_quantize(graph)
        fake_quantize(graph)
        lower(graph)
    return [(one.kernel.__name__, one.args["data_ptr"].dtype if "data_ptr" in one.args else None) for one in launches]


AMAX, CODES = ("tensor_amax", None), ("quantize_rows", torch.uint8)
VALUES, ROW_VALUES = ("quantize_rows", torch.float16), ("quantize_whole_rows", torch.float16)


@pytest.mark.parametrize(("recipe", "activations", "weights"), [
    ("nvfp4", [AMAX, VALUES], [AMAX, CODES]), ("nvfp4_one_level", [VALUES], [CODES]),
    ("nvfp4_rowwise", [ROW_VALUES], [AMAX, CODES])])  # fmt: skip
@pytest.mark.parametrize(("m", "n", "served"), [
    (1, 8192, ["gemv"]), (40, 1024, ["swizzle_a_sm90", "gemm_wgmma_sm90", "split_k_reduction"]),
    (256, 1024, ["swizzle_a_sm90", "gemm_wgmma_sm90"])])  # fmt: skip
def test_launches(m, n, served, recipe, activations, weights):
    """A is fake-quantised, then multiplied."""
    found = launched(recipe, m, n, 1024)
    assert [name for name, _ in found[-len(served) :]] == served
    quantised = found[: -len(served)]
    assert sorted(quantised, key=str) == sorted(weights + activations, key=str)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_launches_of_mx_operands(recipe):
    """The library multiplies values; what dequantises, and tests for values that bfloat16 cannot hold, is not there."""
    assert launched(recipe, 256, 1024, 1024) == [("quantize_rows", BF16)] * 2
    assert [name for name, _ in launched(recipe, 40, 1024, 1024)][:2] == ["quantize_rows"] * 2


def test_a_prologue_of_float32_is_fused_into_what_writes_values():
    """The elements that are quantised are bfloat16, whatever they are computed from."""

    def passes(graph):
        merge_quantize(graph)
        assert fake_quantize(graph) == 2 and fuse_prologue(graph) == 1
        lower(graph)

    def gated(x, y, w):
        return F.linear((F.silu(x) * y).to(BF16), w)

    shapes, dtypes = ((512, 1024), (512, 1024), (1024, 1024)), (torch.float32, torch.float32, BF16)
    found = fused_graph(gated, *shapes, recipe="mxfp8", dtypes=dtypes, sm=90, fuse=False, then=passes)
    assert [one.args["data_ptr"].dtype for one in found.launches] == [BF16, BF16]


@pytest.mark.parametrize(("name", "shape", "dtype"), [
    ("nvfp4", (8192, 8192), BF16), ("nvfp4_one_level", (8192, 8192), torch.float32), ("nvfp4_te", (1, 8192), BF16),
    ("nvfp4_rowwise", (8192, 8192), BF16), ("nvfp4_rowwise", (1, 8192), BF16), ("nvfp4_rowwise", (4, 2**16), BF16),
    ("nvfp4", (128, 1000), torch.float16),
])  # fmt: skip
def test_compiles_ahead(name, shape, dtype):
    """On Hopper. Nothing spills, and large tensors are read and written 16 bytes at a time."""
    one = Configuration("rows, fake", name, shape=shape, dtype=dtype, values=(-1,), layout="linear")
    found = quantize_row(one, one.launches(90)[-1], 90)
    assert found.resources.spills == 0
    assert shape[0] < 8192 or (found.loads, found.stores) == (16, 16)


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 40, 130, 600])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_one_level", "nvfp4_rowwise", "nvfp4_static"])
def test_compiled(recipe, rows, monkeypatch):
    """The bits of quantise, expand and multiply one after the other, by a launch less, if expanding was one."""
    recipe = named(recipe)
    recipe = recipe.replace(static_scales={"": 0.0021}) if recipe.name == "nvfp4_static" else recipe
    layer = torch.nn.Linear(1024, 1040, device="cuda", dtype=BF16)
    x = torch.randn(rows, 1024, dtype=BF16)

    def run():
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=fp4compile.backend(recipe, strict=True))
        with torch.no_grad():
            got, (code,) = run_and_get_code(compiled, x.cuda())
        return got, re.findall(r"(?<!\w)((?:quantize|dequant|gem|split)\w+?)_\d+\.run\(", code)

    got, names = run()
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("fake_quantize",))
    with config.patch(force_disable_caches=True):
        expected, before = run()
    assert torch.equal(got, expected)
    by_wgmma = rows > 8  # what swizzles A dequantises codes as well
    assert names.count("dequant_operand") == before.count("dequant_operand") - (not by_wgmma)
    if recipe.name != "nvfp4_static":
        assert_product(got, x, layer, recipe)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_a_training_step_of_mx_formats(recipe, monkeypatch):
    """The bits of codes, without a pass over memory but for the activations' codes that the forward pass saved."""

    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Linear(1024, 1024, bias=False, dtype=BF16) for _ in range(3))

        def forward(self, x):
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    model = Gated().cuda()
    x = torch.randn(1040, 1024, device="cuda", dtype=BF16)

    def run():
        torch._dynamo.reset()
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        compiled = torch.compile(model, backend=fp4compile.backend(recipe, strict=True))

        def step():
            y = compiled(leaf)
            y.backward(x)
            return y

        y, codes = run_and_get_code(step)
        names = re.findall(r"(?<!\w)(dequant_operand|gemm_dequant_tiles)_\d+\.run\(", "".join(codes))
        return [y.detach(), leaf.grad, *(p.grad for p in model.parameters())], names

    got, names = run()
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("fake_quantize",))
    with config.patch(force_disable_caches=True):
        expected, before = run()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert (names.count("dequant_operand"), before.count("dequant_operand")) == (3, 18)
    assert (names.count("gemm_dequant_tiles"), before.count("gemm_dequant_tiles")) == (3, 9)


@pytest.mark.gpu
def test_any_number_of_rows():
    """One graph, whose product stays an op, for few rows and for so many that the product is made in two parts."""
    layer = torch.nn.Linear(1024, 4112, device="cuda", dtype=BF16)
    backend = fp4compile.backend("nvfp4", strict=True)
    with torch.no_grad():
        compiled = torch.compile(layer, backend=backend, dynamic=True)
        for rows in (40, 4, 130, 9000):
            x = torch.randn(rows, 1024, device="cuda", dtype=BF16)
            assert_product(compiled(x), x, layer, named("nvfp4"))
    assert backend.report.graphs == 1 and backend.report.counts["fake_quantize"] == 1
