"""Gradients in high precision of the operands that the forward pass multiplied: `dgrad_w` and `wgrad_x` = "forward".

The oracle quantises and dequantises each operand as the forward matmul has it, and multiplies with torch, in the
model's dtype. Gradients equal it in every bit.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4compile
from fp4compile.formats import formats
from fp4compile.recipe import Recipe, named, recipes
from tests.helpers import without_codegen
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
        outer = None if static == {} else torch.tensor(static[names[module]])
        left, right = fp4compile.quantize(x, recipe.fprop_x, outer=outer), fp4compile.quantize(w, recipe.fprop_w)
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


# ---------------------------------------------------------------- compiled

COMPILED = ("nvfp4", "mxfp8", "mxfp4", "float8_rowwise", "float8_block", "nvfp4_rowwise", "mxfp8_32x32")


def compiled(model, recipe, **options):
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe, **options)
    return torch.compile(model, backend=backend), backend


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name):
    """The gradients' matmuls stay torch's own; the activations are saved as the codes that the forward pass reads."""
    model, recipe, x = Two(), recipe_of(name), tokens()
    function, backend = compiled(model, recipe, strict=True)
    assert_bits(gradients(function, model, x), by_hand(model, x, recipe, torch.bfloat16))
    rows = {(row.module, row.product): row for row in backend.report.rows}
    assert rows["first", "wgrad"].reason == DEQUANTISED.format(name, "wgrad")
    assert rows["first", "dgrad"].reason == DEQUANTISED.format(name, "dgrad")
    assert {(row.left, row.right) for row in rows.values() if row.product == "wgrad"} == {("bfloat16", recipe.fprop_x)}
    assert {(row.left, row.right) for row in rows.values() if row.product == "dgrad"} == {("bfloat16", recipe.fprop_w)}
    for layer, k in (("first", 80), ("last", 96)):
        assert rows[layer, "wgrad"].saved == formats.get(recipe.fprop_x).nbytes(40, k)
        assert rows[layer, "wgrad"].saved_plain == 2 * 40 * k
    assert "with the forward pass's operand dequantised" in str(backend.report).replace("\n", " ").replace("  ", "")


def saved_bytes(function, x):
    """Bytes of the tensors that a call saves for the backward pass, by dtype, without parameters and inputs."""
    found = {}

    def pack(t):
        if not isinstance(t, nn.Parameter) and t.data_ptr() != x.data_ptr():
            found[t.dtype] = found.get(t.dtype, 0) + t.numel() * t.element_size()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function(x)
    return found


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "float8_rowwise"])
def test_what_is_saved(name):
    """The codes of two activations and the mask of relu; no weight, neither as codes nor dequantised."""
    model, recipe = Two(), recipe_of(name)
    function, _ = compiled(model, recipe)
    found = saved_bytes(function, tokens().requires_grad_())
    codes = sum(formats.get(recipe.fprop_x).nbytes(40, k) for k in (80, 96))
    assert found.pop(torch.bool) == 40 * 96
    assert codes - 16 <= sum(found.values()) <= codes + 16, found


def test_checkpointing_and_autocast(monkeypatch):
    """Bits are those without; a block that is recomputed saves nothing but its input."""
    without_codegen.install(monkeypatch)
    model, recipe, x = Two(torch.float32), recipe_of("nvfp4"), tokens(dtype=torch.float32)
    found = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        function, _ = compiled(run, recipe)

        def cast(x, function=function):
            with torch.autocast("cpu", torch.bfloat16):
                return function(x)

        found.append(gradients(cast, model, x))
        saved = saved_bytes(cast, x.clone().requires_grad_())
    assert not saved
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert_bits(found[0], by_hand(model, x, recipe, torch.bfloat16))


# ---------------------------------------------------------------- how operands lie


@pytest.mark.parametrize("function", [
    lambda x, w: x @ w.t(), lambda x, w: (w @ x.t()).t(), lambda x, w: torch.einsum("...k,nk->...n", x, w),
    lambda x, w: torch.bmm(x.expand(3, -1, -1), w.t().expand(3, -1, -1)).sum(0),
    lambda x, w: F.linear(x.view(5, 8, 80), w).view(40, 96), lambda x, w: F.linear(x.float(), w.float()).bfloat16(),
])  # fmt: skip
def test_orientations(function):
    """Each gradient is that of the dequantised operands; of a batch with one weight, the input's alone is found."""
    w, x = nn.Parameter(tokens(96, 80) / 4), tokens()
    run, decisions = rewritten(lambda x: function(x, w), recipe_of("mxfp8"))
    x = x.requires_grad_()
    y = run(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    y.backward(dy)
    leaves = [forwards(t.detach(), "mxfp8", -1).requires_grad_() for t in (x, w)]
    function(*leaves).backward(dy)
    found = {d.gemm.product for d in decisions if d.dequantised}
    assert found == {"dgrad", "wgrad"} or {d.reason for d in decisions} > {"batched matmul of a gradient"}
    assert torch.equal(x.grad, leaves[0].grad)
    if "wgrad" in found:
        assert torch.equal(w.grad, leaves[1].grad)


def test_where_the_forward_pass_is_not_quantised():
    """Its gradients are those of what it multiplied, and have its reason."""
    x, model = tokens(2, 40, 80), Two()
    run, decisions = rewritten(model, recipe_of("mxfp8", rules=[("first", "skip")]))
    gradients(run, model, x)
    reasons = {d.reason for d in decisions if d.gemm.module == "first"}
    assert reasons == {"rule 'first'"} and sum(d.dequantised for d in decisions) == 2

    run, decisions = rewritten(lambda x, w: x @ w.mT, recipe_of("mxfp8_32x32", fprop_x="mxfp8_32x32"))
    w = nn.Parameter(tokens(2, 96, 80))
    run(x.requires_grad_(), w)
    assert not any(d.dequantised for d in decisions) and all(d.reason for d in decisions)


def test_gathered_matrices():
    """Of a few tokens, each with its own matrix: the gathered matrix is not the parameter's, and stays as it is."""
    w, x, index = nn.Parameter(tokens(3, 96, 80)), tokens(4, 1, 80), torch.tensor([0, 2, 2, 1])
    run, decisions = rewritten(lambda x, index: torch.bmm(x, w[index].mT), recipe_of("mxfp8"))
    run(x.requires_grad_(), index).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 1, 96).bfloat16() @ w.detach()[index])
    dgrad = [d.reason for d in decisions if d.gemm.product == "dgrad"]
    assert dgrad == ["gathered matrices are not dequantised for gradients"]


def test_switched_off(monkeypatch):
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ("rewrite",))
    function, backend = compiled(model := Two(), recipe_of("mxfp8"))
    gradients(function, model, tokens())
    assert len(backend.report.reasons()) == 1 and {row.right for row in backend.report.rows} == {"bfloat16"}


# ---------------------------------------------------------------- recipes


def test_recipe(tmp_path):
    recipe = recipe_of("nvfp4_train")
    assert recipe.operands("dgrad") == recipe.operands("wgrad") == (None, None)
    assert not recipe.quantizes("dgrad") and recipe.reads_forward("dgrad") and recipe.reads_forward("wgrad")
    assert not recipe.reads_forward("fprop") and not named("nvfp4").reads_forward("dgrad")
    for suffix in ("toml", "json"):
        recipe.save(tmp_path / f"r.{suffix}")
        assert fp4compile.recipe.resolve(str(tmp_path / f"r.{suffix}")) == recipe
    (tmp_path / "own.toml").write_text(
        'recipe = "mxfp8"\ndgrad_dy = "none"\ndgrad_w = "forward"\nwgrad_dy = "none"\nwgrad_x = "forward"\n'
    )
    assert Recipe.from_toml(tmp_path / "own.toml") == named("mxfp8").replace(
        dgrad_dy=None, dgrad_w="forward", wgrad_dy=None, wgrad_x="forward"
    )


@pytest.mark.parametrize(("fields", "message"), [
    ({"fprop_x": "forward"}, "fprop_x: unknown format 'forward'"),
    ({"dgrad_dy": "forward"}, "dgrad_dy: unknown format 'forward'"),
    ({"dgrad_w": "forward"}, "dgrad_w='forward': fprop_w has no format"),
    ({"fprop_w": "nvfp4", "wgrad_x": "forward"}, "wgrad_x='forward': fprop_x has no format"),
    ({"fprop_w": "nvfp4", "dgrad_w": "forward", "dgrad_dy": "nvfp4"}, "dgrad_dy stays in high precision, got nvfp4"),
    ({"recipe": "nvfp4_train", "wgrad_x": "forward", "wgrad_dy": None, "stochastic_rounding": ()},
     "hadamard of wgrad: wgrad_dy must be an NVFP4 format"),
])  # fmt: skip
def test_contradictory_recipes(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(fields)


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
