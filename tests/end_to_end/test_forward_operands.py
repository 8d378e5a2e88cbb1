"""Gradients in high precision of the operands that the forward pass multiplied: `dgrad_w="forward"`, `wgrad_x="forward"`.

The oracle quantises and dequantises each operand as the forward matmul has it, and multiplies with torch, in the
model's dtype. Gradients equal it in every bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.recipe import Recipe, named, recipes
from tests.helpers.hand_models import experts_by_hand
from tests.helpers.rewritten import rewritten

DEQUANTISED = "recipe {} leaves {} in high precision, with the forward pass's operand dequantised"
FORWARD = {"dgrad_dy": None, "dgrad_w": "forward", "wgrad_dy": None, "wgrad_x": "forward", "hadamard": (),
           "stochastic_rounding": ()}  # fmt: skip
DENSE = [name for name in recipes() if named(name).fprop_x is not None]
STATIC = {"first": 0.004, "last": 0.003}


def recipe_of(name, **overrides):
    static = {"static_scales": STATIC} if name == "nvfp4_static" else {}
    return named(name).replace(**FORWARD | static | overrides, skip_lm_head=False, min_m=1)


def forwards(x, fmt, dim, outer=None):
    """x as the forward matmul has it, in x's dtype and orientation."""
    if fmt is None:
        return x
    outer = None if outer is None else torch.tensor(outer)
    return fp4compile.quantize(x, fmt, dim=dim, outer=outer).dequantize(x.dtype).movedim(-1, dim)


class Two(nn.Module):
    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.last = nn.Linear(80, 96, bias=False, dtype=dtype), nn.Linear(96, 48, dtype=dtype)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator).to(dtype) / 4

    def forward(self, x):
        return self.last(self.first(x).relu())


def tokens(*shape, dtype=torch.bfloat16):
    return torch.randn(shape or (40, 80), generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(run, model, x, seed=9):
    """The gradients of x and of all parameters, for one random gradient of the result."""
    model.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.dtype))
    return {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def by_hand(model, x, recipe, dtype, seed=9):
    """The gradients of `Two`. dtype: of the matmuls. The result of the first layer comes from the packed matmul."""
    static = dict(recipe.static_scales)

    def layer(module, x):
        w = module.weight.detach().to(dtype)
        left, right = (fp4compile.quantize(t, fmt, outer=outer) if fmt else t for t, fmt, outer in (
            (x, recipe.fprop_x, None if static == {} else torch.tensor(static[names[module]])), (w, recipe.fprop_w, None)
        ))  # fmt: skip
        y = fp4compile.scaled_mm(left, right, out_dtype=dtype)
        return y, forwards(x, recipe.fprop_x, -1, static.get(names[module])), forwards(w, recipe.fprop_w, -1)

    names = {model.first: "first", model.last: "last"}
    hidden, x1, w1 = layer(model.first, x.to(dtype))
    y, x2, w2 = layer(model.last, hidden.relu())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    inner = (dy @ w2) * (hidden > 0)
    return {"x": inner @ w1, "first.weight": inner.t() @ x1, "last.weight": dy.t() @ x2, "last.bias": dy.sum(0)}


def assert_bits(found, expected):
    for name, exact in expected.items():
        assert exact.count_nonzero() > 0
        assert torch.equal(found[name], exact.to(found[name].dtype)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", DENSE)
def test_gradients_of_what_was_multiplied(name, dtype):
    model, recipe = Two(dtype), recipe_of(name)
    run, decisions = rewritten(model, recipe)
    x = tokens(dtype=dtype)
    assert_bits(gradients(run, model, x), by_hand(model, x, recipe, dtype))
    reasons = {(d.gemm.product, d.reason) for d in decisions}
    assert reasons == {("fprop", None), *((each, DEQUANTISED.format(name, each)) for each in ("dgrad", "wgrad"))}


def test_one_of_both():
    """Only the named operand is the forward pass's."""
    for field, changed in (("dgrad_w", "x"), ("wgrad_x", "last.weight")):
        model, x = Two(), tokens()
        found = []
        for value in ("forward", None):
            recipe = recipe_of("mxfp8", **dict.fromkeys(("dgrad_w", "wgrad_x")) | {field: value})
            found.append(gradients(rewritten(model, recipe)[0], model, x))
        assert not torch.equal(found[0][changed], found[1][changed])
        kept = "last.weight" if changed == "x" else "last.bias"
        assert torch.equal(found[0][kept], found[1][kept])


def test_weights_alone_in_a_format():
    """A weight-only format, whose activation the forward matmul has as it is."""
    layer, x = nn.Linear(80, 48, bias=False, dtype=torch.bfloat16), tokens()
    recipe = named("nvfp4_weight_only").replace(dgrad_w="forward", skip_lm_head=False)
    run, decisions = rewritten(layer, recipe)
    dy = torch.randn(40, 48, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = {"x": dy @ forwards(layer.weight.detach(), "nvfp4", -1), "weight": dy.t() @ x}
    assert_bits(gradients(run, layer, x), expected)
    assert {d.reason for d in decisions if d.gemm.product == "wgrad"} == {
        "recipe nvfp4_weight_only leaves wgrad in high precision"
    }


# ---------------------------------------------------------------- experts

EXPERTS, K, N = 5, 80, 48


class Experts(nn.Module):
    """stored: whether weights are [E, N, K], or [E, K, N]."""

    def __init__(self, stored):
        super().__init__()
        shape = (EXPERTS, N, K) if stored == "enk" else (EXPERTS, K, N)
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16() / 4)
        self.stored = stored

    def forward(self, x, offs):
        return F.grouped_mm(x, self.w.transpose(1, 2) if self.stored == "enk" else self.w, offs=offs)


@pytest.mark.parametrize("stored", ["enk", "ekn"])
@pytest.mark.parametrize("name", DENSE)
def test_experts(name, stored):
    """Groups of 0 and 1 tokens among them, magnitudes that differ between groups, and tokens of no group."""
    model, recipe = Experts(stored), recipe_of(name)
    recipe = recipe.replace(static_scales={"w": 0.003}) if name == "nvfp4_static" else recipe
    ends = [0, 1, 9, 30, 41]
    x = tokens(48, K) * (2.0 ** torch.arange(48).fmod(7).view(-1, 1)).bfloat16()
    run, decisions = rewritten(model, recipe)
    found = gradients(lambda x: run(x, torch.tensor(ends, dtype=torch.int32)), model, x)
    assert sum(d.dequantised for d in decisions) == 2
    dy = torch.randn(48, N, generator=torch.Generator().manual_seed(9)).bfloat16()
    along = -1 if stored == "enk" else -2
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        own, w = x[start:end], model.w.detach()[group]
        w = forwards(w, recipe.fprop_w, along)
        dw = found["w"][group]
        if start == end:
            assert not dw.any()
            continue
        left = forwards(own, recipe.fprop_x, -1, dict(recipe.static_scales).get("w"))
        assert_close(found["x"][start:end], dy[start:end], w if stored == "enk" else w.t())
        turned = dy[start:end].t(), left
        assert_close(dw, *(turned if stored == "enk" else (left.t(), dy[start:end])))
    assert torch.isfinite(found["w"]).all()


def assert_close(found, a, b):
    """The matmul of a and b, with its float32 sums in any order, rounded once."""
    exact = a.double() @ b.double()
    slack = 1e-6 * (a.double().abs() @ b.double().abs())
    assert ((found >= (exact - slack).bfloat16()) & (found <= (exact + slack).bfloat16())).all()
