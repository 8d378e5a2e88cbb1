"""Compiled outputs and gradients equal the same computation composed by hand from quantize and dequantize."""

import pytest
import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.recipe import named, recipes
from tests.helpers import without_codegen
from tests.helpers.by_hand import FP8_UNITS_ERROR, STATIC, assert_rounds_to, by_hand, drawn, values

pytestmark = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def recipe_of(name):
    chosen = named(name)
    return chosen.replace(static_scales=STATIC) if name == "nvfp4_static" else chosen


# Whatever the recipe: what lies around a product, and what is cast before it is quantised.
LINEAR = [(name, case) for name in recipes() for case in ("2d", "3d", "4d_bias", "bf16", "autocast", "no_bias_autocast")
          if case in ("3d", "bf16") or name in ("nvfp4_train", "mxfp8")]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "case"), LINEAR)
def test_linear_equals_hand_composition(name, case, device):
    recipe = recipe_of(name)
    shape = {"2d": (24,), "4d_bias": (2, 3, 4)}.get(case, (2, 12))
    dtype = torch.bfloat16 if case == "bf16" else torch.float32
    layer = torch.nn.Linear(80, 48, bias=case in ("4d_bias", "bf16", "autocast"), device=device, dtype=dtype)
    x = torch.randn(*shape, 80, device=device, dtype=dtype, requires_grad=True)
    autocast = "autocast" in case
    compute = torch.bfloat16 if autocast else dtype

    compiled = torch.compile(layer, backend=fp4compile.backend(recipe, strict=True), fullgraph=True)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
        y = compiled(x)
    dy = torch.randn_like(y)
    seed = drawn(5, 1, device)[0]
    torch.manual_seed(5)
    y.backward(dy)

    flat = x.detach().reshape(-1, 80)
    bias = None if layer.bias is None else layer.bias.detach()
    expected = by_hand(recipe, flat, layer.weight.detach(), bias, dy.reshape(-1, 48), compute, seed)
    slacks = [None] * 3
    if name == "float8_rowwise" and device == "cuda" and compute == torch.bfloat16:
        magnitudes = by_hand(recipe, flat.abs(), layer.weight.detach().abs(), None, dy.reshape(-1, 48).abs(), compute)
        slacks = [FP8_UNITS_ERROR * sums for sums in magnitudes]
    assert y.dtype == compute
    for got, exact, slack in zip((y.detach(), x.grad, layer.weight.grad), expected, slacks, strict=True):
        assert_rounds_to(got.reshape(exact.shape).cpu().double(), exact, compute, slack)


@pytest.mark.parametrize("name", recipes())
def test_inference_equals_training_forward(name, monkeypatch):
    without_codegen.install(monkeypatch)
    layer = torch.nn.Linear(64, 48)
    x = torch.randn(5, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend(recipe_of(name)))
    trained = compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), trained)


def test_quantisation_changes_the_result():
    """The recipes above do something: the quantised product differs from the plain one by the format's noise."""
    layer = torch.nn.Linear(256, 64)
    x = torch.randn(32, 256)
    plain = layer(x)
    for name, low, high in (("mxfp8", 0.01, 0.06), ("nvfp4", 0.05, 0.2)):
        error = torch.compile(layer, backend=fp4compile.backend(name))(x) - plain
        assert low < error.norm() / (plain - layer.bias).norm() < high


class Functional(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(48, 64))
        self.wt = torch.nn.Parameter(torch.randn(64, 48))
        self.b = torch.nn.Parameter(torch.randn(48))


SOURCES = {
    "x @ w.t()": (lambda m, x: x @ m.w.t(), False),
    "matmul": (lambda m, x: torch.matmul(x, m.wt), True),
    "addmm": (lambda m, x: torch.addmm(m.b, x.reshape(-1, 64), m.wt), True),
    "F.linear": (lambda m, x: F.linear(x, m.w, m.b), False),
    "w @ x.t()": (lambda m, x: (m.w @ x.reshape(-1, 64).t()).t(), False),
    "strided input": (lambda m, x: F.linear(x.transpose(0, 1), m.w).transpose(0, 1), False),
    "half of w": (lambda m, x: x @ m.wt[:, :48], True),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_sources_of_products(source, grad, monkeypatch):
    without_codegen.install(monkeypatch)
    function, transposed = SOURCES[source]
    model = Functional().requires_grad_(grad)  # matmul folds a batch, or repeats the weight, by what needs gradients
    x = torch.randn(3, 8, 64, requires_grad=grad)
    backend = fp4compile.backend("mxfp8", strict=True)
    with torch.set_grad_enabled(grad):
        y = torch.compile(lambda x: function(model, x), backend=backend)(x)
    weight = model.wt.detach() if transposed else model.w.detach().t()
    expected = values(x.detach(), "mxfp8", -1) @ values(weight, "mxfp8", 0)
    if source in ("addmm", "F.linear"):
        expected = expected + model.b.detach()
    assert_rounds_to(y.detach().reshape(-1, 48).double(), expected.reshape(-1, 48), torch.float32)
    assert {row.product for row in backend.report.quantised} == ({"fprop", "dgrad", "wgrad"} if grad else {"fprop"})
    assert len(backend.report.rows) == (3 if grad else 1)


@pytest.mark.parametrize("alpha,beta,rows", [(2.0, 1.0, 1), (1.0, 0.5, 1), (1.0, 1.0, 8), (3.0, 0.0, 8)])
def test_addmm_with_factors_or_a_matrix_added(alpha, beta, rows, monkeypatch):
    without_codegen.install(monkeypatch)
    model = Functional()
    x, added = torch.randn(8, 64), torch.randn(rows, 48)
    backend = fp4compile.backend("mxfp8", strict=True)
    compiled = torch.compile(lambda x: torch.addmm(added, x, model.wt, alpha=alpha, beta=beta), backend=backend)
    product = values(x, "mxfp8", -1) @ values(model.wt.detach(), "mxfp8", 0)
    assert_rounds_to(compiled(x).detach().double(), beta * added + alpha * product, torch.float32)


@pytest.mark.parametrize(("frozen", "products"), [(True, ["fprop", "dgrad"]), (False, ["fprop", "wgrad"])])
def test_what_needs_no_gradient_has_no_product(frozen, products, monkeypatch):
    without_codegen.install(monkeypatch)
    layer, backend = torch.nn.Linear(64, 48), fp4compile.backend("mxfp8")
    layer.weight.requires_grad_(not frozen)
    torch.compile(layer, backend=backend)(torch.randn(8, 64, requires_grad=frozen)).sum().backward()
    assert [row.product for row in backend.report.rows] == products


@pytest.mark.parametrize("name", recipes())
def test_non_finite_activation_is_visible(name, monkeypatch):
    without_codegen.install(monkeypatch)
    layer = torch.nn.Linear(64, 48)
    x = torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend(recipe_of(name)))
    assert compiled(x).isfinite().all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 5] = bad
        assert not compiled(x)[3].isfinite().any()


def test_attention_products_only_if_asked():
    def attend(q, k, v):
        return torch.softmax(q @ k.transpose(-2, -1), -1) @ v

    q, k, v = torch.randn(3, 2, 4, 32, 64).unbind(0)
    with pytest.warns(UserWarning, match="leaves attention in high precision"):
        plain = torch.compile(attend, backend=fp4compile.backend("mxfp8"))(q, k, v)
    torch.testing.assert_close(plain, attend(q, k, v))

    asked = fp4compile.backend("mxfp8", attention_a="mxfp8", attention_b="mxfp8")
    out = torch.compile(attend, backend=asked)(q, k, v)
    p = torch.softmax(values(q, "mxfp8", -1) @ values(k, "mxfp8", -1).transpose(-2, -1), -1).float()
    expected = (values(p, "mxfp8", -1) @ values(v, "mxfp8", -2)).float()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert [row.product for row in asked.report.quantised] == ["attention", "attention"]
