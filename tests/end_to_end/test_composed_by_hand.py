"""Compiled outputs and gradients equal the same computation composed by hand from quantize and dequantize."""

import pytest
import torch

import fp4compile
from fp4compile.recipe import named, recipes
from tests.helpers import without_codegen
from tests.helpers.by_hand import FP8_UNITS_ERROR, STATIC, assert_rounds_to, by_hand, drawn

pytestmark = pytest.mark.slow
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def recipe_of(name):
    chosen = named(name)
    return chosen.replace(static_scales=STATIC) if name == "nvfp4_static" else chosen


# Whatever the recipe: what lies around a product, and what is cast before it is quantised. Inductor's code for that is
# the same under all recipes but those that draw seeds, and the graph around a product under all recipes.
GENERATED = ("nvfp4_train", "mxfp8")
LINEAR = [(name, case) for name in recipes() for case in ("2d", "3d", "4d_bias", "bf16", "autocast", "no_bias_autocast")
          if case in ("3d", "bf16") or name == "nvfp4_train"]  # fmt: skip


# How many of output, input gradient and weight gradient in float32 Hopper's FP8 matrix units compute for 24 tokens;
# the others are summed in float32 (rows of 24 codes are no whole 16 bytes; two tensor scales are the library's).
FLOAT32_ON_UNITS = {"float8_rowwise": 2, "float8_block": 3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "case"), LINEAR)
def test_linear_equals_hand_composition(name, case, device, monkeypatch):
    recipe = recipe_of(name)
    if device == "cpu" and (name not in GENERATED or (case == "bf16" and not recipe.stochastic_rounding)):
        without_codegen.install(monkeypatch)
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
    on_units = FLOAT32_ON_UNITS.get(name, 0)
    if compute == torch.bfloat16 and name.startswith("float8"):
        on_units = 3
    if on_units and device == "cuda":
        magnitudes = by_hand(recipe, flat.abs(), layer.weight.detach().abs(), None, dy.reshape(-1, 48).abs(), compute)
        slacks[:on_units] = [FP8_UNITS_ERROR * sums for sums in magnitudes[:on_units]]
    assert y.dtype == compute
    for got, exact, slack in zip((y.detach(), x.grad, layer.weight.grad), expected, slacks, strict=True):
        assert_rounds_to(got.reshape(exact.shape).cpu().double(), exact, compute, slack)


@pytest.mark.parametrize("name", recipes())
def test_inference_equals_training_forward_and_shows_what_is_not_finite(name, monkeypatch):
    without_codegen.install(monkeypatch)
    layer = torch.nn.Linear(64, 48)
    x = torch.randn(8, 64)
    compiled = torch.compile(layer, backend=fp4compile.backend(recipe_of(name)))
    trained = compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), trained) and trained.isfinite().all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        x[3, 5] = bad
        assert not compiled(x)[3].isfinite().any()
