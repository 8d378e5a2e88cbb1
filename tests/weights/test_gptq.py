"""GPTQ: codes against the algorithm in float64, and packing by batches end to end."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fp4compile
from fp4compile import Recipe
from fp4compile.calibration import hessians
from fp4compile.formats import float32_sums, formats, reference
from fp4compile.formats.layouts import to_swizzled
from fp4compile.weights import gptq
from fp4compile.weights.buffers import packed_in
from tests.helpers.expert_models import EXPERTS, IDS, OFFS, Forms, K, N, tokens
from tests.helpers.packed_models import same_codes

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
POWERS = 2.0 ** torch.arange(-40, 20, dtype=torch.float64)


# ---------------------------------------------------------------- the algorithm in float64, one row at a time


def nearest(y, fmt):
    """The values nearest to y that elements can hold, ties to the even code."""
    if fmt.element == "e2m1":
        distance = (y.abs().unsqueeze(-1) - E2M1).abs()
        even = torch.arange(8) % 2
        return y.sign() * E2M1[(distance + even * 1e-15).argmin(-1)]
    return y.clamp(-fmt.element_max, fmt.element_max).to(fmt.data_dtype).double()


def rest(block, step, fmt):
    return block - nearest(block / step, fmt) * step


def scale_of(block, outer, fmt, rule):
    """The block scale of a row's block, by the definition of each rule."""

    def squared(scale):
        return rest(block, scale * outer, fmt).square().sum()

    largest = block.abs().max()
    if fmt.scale == "e8m0":
        power = 2.0 ** torch.ceil(torch.log2(largest / fmt.element_max))
        if rule == "amax":
            return power
        return min(POWERS, key=lambda s: (squared(s), s))
    if rule == "amax":
        least = 2.0**-6 if fmt.contract == "torchao" else 0
        return (largest / 6 / outer).clamp(least, 448).to(torch.float8_e4m3fn).double()
    return min(E4M3, key=squared)


def by_the_algorithm(w, h, tokens, fmt, rule):
    """(values, scales) of rows w [N, K]: after each column, the remaining ones take the least-squares correction.

    That correction is read from the inverse of the part of H that remains, which is computed anew for each column.
    """
    rows, k = w.shape
    live = h.diagonal() > 0
    mean = h.diagonal()[live].mean() if live.any() else torch.ones((), dtype=torch.float64)
    h = h + torch.diag(torch.where(live, 0, mean)) + torch.eye(k) * mean * (0.01 + 0.3 * k / max(tokens, 1))
    inverses = [torch.linalg.inv(h[i:, i:]) for i in range(k)]
    values, scales = torch.zeros_like(w), []
    for n in range(rows):
        row, step = w[n].clone(), None
        top = (w[n] if fmt.outer == "row" else w).abs().max()
        outer = top / 2688 if fmt.outer else 1.0
        if fmt.scale is None:
            step = top / fmt.element_max
        for i in range(k):
            if fmt.scale is not None and i % fmt.block_cols == 0:
                scales.append(scale_of(row[i : i + fmt.block_cols], outer, fmt, rule))
                step = scales[-1] * outer
            values[n, i] = nearest(row[i] / step, fmt) * step
            row[i:] -= (row[i] - values[n, i]) * inverses[i][0] / inverses[i][0, 0]
    return values, torch.tensor(scales).view(rows, -1) if scales else None


def inputs_of(kind, count=400, k=150):
    """Correlated inputs [tokens, k], float32."""
    gen = torch.Generator().manual_seed(7)
    x = torch.randn(count, k, generator=gen) @ (torch.randn(k, k, generator=gen) / 6 + torch.eye(k))
    if kind == "zero":
        x = x * 0
    elif kind == "dead columns":
        x[:, [3, 17, k - 1]] = 0
    return x[:60] if kind == "fewer than columns" else x


def moments(*inputs):
    return gptq.Moments(torch.stack([x.T @ x for x in inputs]), [len(x) for x in inputs])


def weights(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


CASES = [
    ("nvfp4", "amax", "all"), ("nvfp4", "mse", "all"), ("nvfp4_one_level", "amax", "all"),
    ("nvfp4_rowwise", "amax", "all"), ("mxfp4", "amax", "all"), ("mxfp4", "mse", "all"), ("mxfp8", "amax", "all"),
    ("float8_rowwise", "amax", "all"), ("float8_tensor", "amax", "all"), ("nvfp4", "amax", "zero"),
    ("nvfp4", "amax", "dead columns"), ("nvfp4", "amax", "fewer than columns"), ("mxfp4", "mse", "dead columns"),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "rule", "kind"), CASES, ids=str)
def test_codes_are_those_of_the_algorithm(name, rule, kind, device):
    fmt, x, w = formats.get(name), inputs_of(kind), weights(3, 150)
    known = gptq.Moments(moments(x).second.to(device), [len(x)])
    data, scales, outer = (
        None if part is None else part.cpu() for part in gptq.quantize(w[None].to(device), known, fmt, rule)
    )
    expected, of_blocks = by_the_algorithm(w.double(), x.double().T @ x.double(), len(x), fmt, rule)
    if of_blocks is not None:
        assert torch.equal(reference.decoded(scales[0], fmt).double(), of_blocks)
    outer = None if outer is None else outer.view(1, -1, 1)
    found = reference.dequantize(data, scales, outer, fmt, 150, torch.float32)[0]
    torch.testing.assert_close(found, expected.float(), rtol=2.0**-22, atol=0)  # four roundings to float32


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rule"), [
    ("nvfp4", "mse"), ("nvfp4_16x16", "mse"), ("mxfp4", "amax"), ("mxfp8", "amax"), ("float8_128x128", "amax"),
    ("float8_rowwise", "amax"),
])  # fmt: skip
def test_the_kernel_has_the_codes_of_the_loop_on_the_same_gpu(name, rule, monkeypatch):
    w, known = weights(2, 200, 390).cuda(), moments(*[inputs_of("all", 900, 390)] * 2)
    known, found = gptq.Moments(known.second.cuda(), known.tokens), []
    for inner in (gptq._compensate, gptq.compensate_by_torch):
        monkeypatch.setattr(gptq, "_compensate", inner)
        found.append(gptq.quantize(w, known, formats.get(name), rule))
    for one, other in zip(*found, strict=True):
        assert one is other is None or torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_without_correlations_nothing_is_corrected():
    w = weights(2, 20, 96)
    plain = gptq.Moments(torch.eye(96).expand(2, -1, -1) * torch.tensor([3.0, 1e-20]).view(2, 1, 1), [999, 999])
    few = gptq.Moments(torch.randn(2, 96, 96), [0, gptq.FEWEST_TOKENS - 1])
    assert few.few == (0, 1)
    for name, rule in (("nvfp4", "mse"), ("nvfp4_16x16", "mse"), ("mxfp4", "mse"), ("mxfp8", "amax"),
                       ("mxfp8_32x32", "amax"), ("nvfp4_one_level", "mse")):  # fmt: skip
        expected = fp4compile.quantize(w, name, scales=rule, per_matrix=True)
        for known in (plain, few):
            data, scales, outer = gptq.quantize(w, known, formats.get(name), rule)
            assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8)), (name, rule)
            assert torch.equal(scales.view(torch.uint8), expected.scales.view(torch.uint8))
            assert outer is expected.outer is None or torch.equal(outer, expected.outer)


def test_layouts_parts_and_autocast_change_no_bit():
    w, known, fmt = weights(2, 130, 96), moments(*[inputs_of("all", 300, 96)] * 2), formats.get("nvfp4")
    linear, swizzled = (gptq.quantize(w, known, fmt, "mse", layout=layout) for layout in ("linear", "swizzled"))
    assert torch.equal(swizzled[1].view(torch.uint8), to_swizzled(linear[1]).view(torch.uint8))
    assert torch.equal(swizzled[0], linear[0])
    with pytest.MonkeyPatch.context() as patch:  # one matrix at a time
        patch.setattr(gptq, "AT_ONCE", 96 * 96)
        apart = gptq.quantize(w, known, fmt, "mse")
    with torch.autocast("cpu"):
        under_autocast = gptq.quantize(w, known, fmt, "mse")
    for one in (apart, under_autocast):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, linear, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_second_moments_are_sums_in_float32(dtype, device):
    """Every product is exact or rounded to float32, and so is every sum.

    Matrix units cut the terms of a sum, 16 products and what was added before, to 2^-23 of the largest one: 17 times
    for 16 tokens. Other units round each product and each sum to 2^-24 of it, which is 2^-23 a token, and less.
    """
    x = inputs_of("all", 3000, 130).to(dtype)
    exact, magnitudes = x.double().T @ x.double(), x.double().abs().T @ x.double().abs()
    found = hessians.squares(x.to(device)).cpu()
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= len(x) * 17 / 16 * 2.0**-23 * magnitudes).all()


@pytest.mark.parametrize("in_float16", [False, True])
def test_second_moments_are_computed_by_matmuls_of_16_bit_numbers_on_a_gpu(in_float16):
    """Also while a user lets matmuls of float16 numbers add in float16, which PyTorch refuses for float32 results."""

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ops.append((str(func), settings.allow_fp16_accumulation))
            return func(*args, **(kwargs or {}))

    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_fp16_accumulation
    settings.allow_fp16_accumulation = in_float16
    try:
        for dtype, expected in (
            (torch.bfloat16, ("aten.mm.dtype", False)), (torch.float16, ("aten.mm.dtype", False)),
            (torch.float32, ("aten.mm.default", in_float16)),
        ):  # fmt: skip
            ops = []
            with FakeTensorMode(), Ops():
                found = hessians.squares(torch.empty(40, 24, dtype=dtype, device="cuda"))
            assert found.dtype == torch.float32 and found.shape == (24, 24)
            assert [op for op in ops if "mm" in op[0]] == [expected]
            assert settings.allow_fp16_accumulation == in_float16
    finally:
        settings.allow_fp16_accumulation = before


@pytest.mark.gpu
def test_float16_products_of_a_library_matmul_while_sums_in_float16_are_allowed():
    """PyTorch refuses a float32 result then."""
    settings, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_fp16_accumulation
    a = torch.full((32, 4096), 3.0, dtype=torch.float16, device="cuda")
    settings.allow_fp16_accumulation = True
    try:
        found = float32_sums.mm(a, a.t())
    finally:
        settings.allow_fp16_accumulation = before
    assert found.eq(9 * 4096).all()  # exact in float32


# ---------------------------------------------------------------- packing


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(96, 64, bias=i == 0) for i in range(3))
        self.o_proj, self.never = torch.nn.Linear(64, 40), torch.nn.Linear(64, 64)

    def forward(self, x):
        return self.o_proj(torch.relu(self.q_proj(x)) + self.k_proj(x) * self.v_proj(x))


def attention():
    torch.manual_seed(1)
    model, mix = Attention(), torch.randn(96, 96)
    return model, [torch.randn(4, 10, 96) @ mix for _ in range(12)], torch.randn(500, 96) @ mix


GPTQ = {"recipe": "nvfp4_weight_only", "weight_scales": "mse", "weight_method": "gptq"}


def packed(model, recipe, batches, **options):
    model = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batches: fewer than 16 tokens reached 1 weights, such as '(inner.)?never'")
        return model, fp4compile.pack_(model, recipe, batches=batches, progress=False, **options)


@torch.no_grad()
def test_packing_by_batches(monkeypatch):
    model, batches, test = attention()
    exact = model(test)

    def error(candidate):
        return (candidate(test) - exact).square().sum()

    plain = copy.deepcopy(model)
    fp4compile.pack_(plain, GPTQ | {"weight_method": "nearest"})
    with pytest.warns(UserWarning, match="fewer than 16 tokens reached 1 weights, such as 'never'; they are rounded"):
        report = fp4compile.pack_(found := copy.deepcopy(model), GPTQ, batches=iter(batches))
    assert error(found) < 0.85 * error(plain)
    assert {row.weight_scales for row in report.rows} == {"mse, gptq"}
    assert {row.module: row.note for row in report.rows} == dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"]) | {
        "never": "rounded to nearest, for lack of tokens: the layer"
    }
    assert torch.equal(found.never.weight_data, plain.never.weight_data)
    # By hand, for one layer.
    x = torch.cat(batches).flatten(0, 1)
    codes, scales, _ = gptq.quantize(model.k_proj.weight[None], moments(x), formats.get("nvfp4"), "mse")
    assert torch.equal(found.k_proj.weight_data, codes[0])
    # Again, in several passes over the batches: the same bits.
    monkeypatch.setattr(hessians, "AT_ONCE", 4 * 96 * 96 * 2)
    again, _ = packed(model, GPTQ, batches)
    assert same_codes(found, again)
    compiled = torch.compile(found, backend=fp4compile.backend(GPTQ))
    assert torch.equal(compiled(test), found(test))


@torch.no_grad()
@pytest.mark.parametrize("device", DEVICES)
def test_packing_in_16_bits(device):
    """The codes equal codes by hand, of the float32 sums of the batches' own x^T x."""
    model, batches, _ = attention()
    model, batches = model.to(device, torch.bfloat16), [batch.to(device, torch.bfloat16) for batch in batches]
    found, _ = packed(model, GPTQ, batches)
    second = torch.zeros(1, 96, 96, device=device)
    for batch in batches:
        second += hessians.squares(batch.flatten(0, 1))
    known = gptq.Moments(second, [40 * len(batches)])
    for layer in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(model, layer).weight[None]
        codes, scales, _ = gptq.quantize(weight, known, formats.get("nvfp4"), "mse")
        assert torch.equal(getattr(found, layer).weight_data, codes[0])
        assert torch.equal(getattr(found, layer).weight_scales.view(torch.uint8), scales[0].view(torch.uint8))


@torch.no_grad()
def test_layers_of_equal_inputs_are_factored_once(monkeypatch):
    model, batches, _ = attention()
    factored, cholesky = [], torch.linalg.cholesky
    monkeypatch.setattr(torch.linalg, "cholesky", lambda h: factored.append(h.shape) or cholesky(h))
    packed(model, GPTQ, batches)
    assert factored == [(1, 96, 96), (1, 64, 64), (1, 64, 64)]  # q, k and v; o; never


@torch.no_grad()
def test_a_layer_whose_inputs_are_zero_is_rounded_to_nearest():
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.ReLU(), torch.nn.Linear(48, 40))
    model[0].bias.fill_(-1e9)
    plain, batches = copy.deepcopy(model), [torch.randn(50, 64)]
    report = fp4compile.pack_(model, GPTQ, batches=batches, progress=False)
    fp4compile.pack_(plain, {"recipe": "nvfp4_weight_only", "weight_scales": "mse"})
    assert {row.note for row in report.rows} == {None}
    assert torch.equal(model[2].weight_data, plain[2].weight_data)
    assert torch.equal(model[2].weight_scales, plain[2].weight_scales)
    assert not torch.equal(model[0].weight_data, plain[0].weight_data)


@pytest.mark.parametrize("rule", ["amax", "mse"])
@pytest.mark.parametrize("method", ["nearest", "gptq"])
def test_fused_layers_share_a_global_scale(rule, method):
    model, batches, _ = attention()
    recipe = GPTQ | {"weight_scales": rule, "weight_method": method}
    found, _ = packed(model, recipe, batches if method == "gptq" else None, shared_scales=True)
    largest = max(layer.weight.abs().max() for layer in (model.q_proj, model.k_proj, model.v_proj))
    for layer in (found.q_proj, found.k_proj, found.v_proj):
        assert layer.weight_outer == largest / 2688


@torch.no_grad()
@pytest.mark.parametrize("in_first", [False, True])
def test_each_expert_has_the_moments_of_its_own_tokens(in_first):
    """In every form in which experts are multiplied; see `expert_models.Forms`."""
    model, x = Forms(in_first), tokens()
    recipe = Recipe(fprop_w="nvfp4", weight_method="gptq", min_m=1, min_n=1, min_k=1)
    seen = {}
    real = gptq.quantize

    def quantize(weight, known, *args, **options):
        seen["known"] = known
        return real(weight, known, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gptq, "quantize", quantize)
        fp4compile.pack_(model, recipe, batches=[x], progress=False)
    x, bounds = x.float(), [0, *OFFS.tolist()]
    rows, few = x.view(EXPERTS, -1, K), x[: len(IDS)]
    for expert in range(EXPERTS):
        own = [x[bounds[expert] : bounds[expert + 1]], rows[expert], rows[expert], x]  # grouped, two batched, a loop
        own += [rows.flatten(0, 1)] if expert == 1 else []  # one expert for a batch
        own += [few[expert == IDS]] * 2  # by index
        own = torch.cat(own)
        assert seen["known"].tokens[expert] == len(own)
        # Sums in float32, one rounding a token at most.
        wanted, bound = own.double().T @ own.double(), len(own) * 2.0**-24 * (own.abs().double().T @ own.abs().double())
        assert ((seen["known"].second[expert] - wanted).abs() <= bound).all()


class Normed(torch.nn.Module):
    """A model whose layers read something else, and which changes, in training mode."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = torch.nn.BatchNorm1d(96), torch.nn.Dropout(0.5)
        self.layer = torch.nn.Linear(96, 96)

    def forward(self, x):
        return self.layer(self.dropout(self.norm(x.flatten(0, 1))))


def test_batches_run_in_eval_mode():
    _, batches, _ = attention()
    model = Normed()
    model.dropout.eval()
    state = copy.deepcopy(model.state_dict())
    found, _ = packed(model, GPTQ, batches)
    expected, _ = packed(copy.deepcopy(model).eval(), GPTQ, batches)
    assert same_codes(found, expected)
    assert all(torch.equal(found.state_dict()[name], state[name]) for name in state if name.startswith("norm"))
    assert found.training and found.norm.training and not found.dropout.training


def test_layers_of_torchs_encoder_see_their_tokens():
    """In eval mode, torch runs its encoder by an operator that calls no linear layer; a packed one calls its layers."""
    _, batches, _ = attention()
    layer = torch.nn.TransformerEncoderLayer(96, 4, 96, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        report = fp4compile.pack_(model, GPTQ, batches=batches, progress=False)
    assert {row.module: row.note for row in report.rows if row.weight_scales} == dict.fromkeys(
        ["layers.0.linear1", "layers.0.linear2"]
    )
    assert torch.backends.mha.get_fastpath_enabled()


class Hidden(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shown, self.hidden = torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)

    def forward(self, x):
        return self.shown(x) + self.calls(x)

    @torch.compiler.disable
    def calls(self, x):
        return self.hidden(x)


def test_layers_outside_of_the_captured_graphs_are_named():
    _, batches, _ = attention()
    with (
        pytest.warns(UserWarning, match="tokens do not count where layers run outside of the captured.*loop: hidden$"),
        pytest.warns(UserWarning, match="reached 1 weights, such as 'hidden'"),
    ):
        fp4compile.pack_(Hidden(), GPTQ, batches=batches, progress=False)


def test_packing_and_loading_in_inference_mode(tmp_path):
    """A tensor that was made in inference mode cannot be saved for a backward pass."""
    model, batches, _ = attention()
    expected, _ = packed(model, GPTQ, batches)
    loaded, on_meta = copy.deepcopy(model), copy.deepcopy(model).to("meta")
    with torch.inference_mode():
        found, _ = packed(model, GPTQ, batches)
        fp4compile.save_packed(found, tmp_path / "model.safetensors")
        fp4compile.load_packed(loaded, tmp_path / "model.safetensors")
        fp4compile.load_packed(on_meta, tmp_path / "model.safetensors")
        fp4compile.load_packed(made_there := copy.deepcopy(model), tmp_path / "model.safetensors")
    assert same_codes(made_there, expected) and made_there.o_proj.bias.is_inference()
    for one in (found, loaded, on_meta):
        assert same_codes(one, expected)
        x = batches[0].clone().requires_grad_()
        one(x).sum().backward()
        assert x.grad is not None


class Routed(torch.nn.Module):
    """Tokens in groups, of which one is small and one is empty."""

    def __init__(self):
        super().__init__()
        self.up_proj = torch.nn.Parameter(weights(4, N, K).bfloat16())
        self.is_transposed = False

    def forward(self, x, offs):
        return F.grouped_mm(x, self.up_proj.transpose(1, 2), offs=offs)


@torch.no_grad()
def test_experts_with_too_few_tokens_are_rounded_to_nearest():
    model = Routed()
    recipe = Recipe(fprop_w="nvfp4", weight_scales="mse", weight_method="gptq", min_m=1, min_n=1)
    x = (inputs_of("all", 200, K)).bfloat16()
    offs = torch.tensor([90, 90, 100, 190], dtype=torch.int32)  # the last 10 rows belong to no expert
    nearest_codes = fp4compile.quantize(model.up_proj, "nvfp4", per_matrix=True, scales="mse")
    known = moments(*(x.float()[a:b] for a, b in ((0, 90), (0, 0), (90, 100), (100, 190))))
    expected = gptq.quantize(model.up_proj, known, formats.get("nvfp4"), "mse")
    with pytest.warns(UserWarning, match=r"reached 2 weights, such as 'up_proj\[1\]'; they are rounded"):
        report = fp4compile.pack_(model, recipe, batches=[(x, offs)], progress=False)
    (row,) = report.rows
    assert row.note == "rounded to nearest, for lack of tokens: experts 1, 2" and row.weight_scales == "mse, gptq"
    (layer,) = packed_in(model).values()
    assert torch.equal(layer.weight_data, expected[0]) and torch.equal(layer.weight_outer, nearest_codes.outer)
    for expert in range(4):
        assert torch.equal(layer.weight_data[expert], nearest_codes.data[expert]) == (expert in (1, 2))


def test_bad_batches_and_recipes():
    model, batches, _ = attention()
    for recipe, given, error, message in (
        (GPTQ, None, ValueError, "batches: recipe 'nvfp4_weight_only' needs batches"),
        ("nvfp4", batches, ValueError, "batches: recipe 'nvfp4' uses no batches"),
        (GPTQ, [], ValueError, "batches: got none"),
        (GPTQ, batches[0], TypeError, "batches: expected an iterable of batches"),
        (GPTQ, [batches[0] / 0], ValueError, "batches: an input of 'q_proj' is not finite"),
    ):
        with pytest.raises(error, match=message):
            fp4compile.pack_(model, recipe, batches=given, progress=False)
    assert isinstance(model.q_proj, torch.nn.Linear) and not hasattr(model.q_proj, "weight_data")
    for measure in (fp4compile.calibrate, lambda *given: fp4compile.pack_(given[0], GPTQ, batches=given[1])):
        with pytest.raises(ValueError, match="model: 'q_proj.weight' is on the meta device, and has no values"):
            measure(copy.deepcopy(model).to("meta"), batches)
    with pytest.raises(ValueError, match="weight_method: unknown method 'gtpq'. Did you mean 'gptq'"):
        Recipe(fprop_w="nvfp4", weight_method="gtpq")
    with pytest.raises(ValueError, match="weight_method='gptq': needs an fprop_w"):
        Recipe(fprop_x="nvfp4", weight_method="gptq")


def test_from_pretrained_has_no_batches():
    pytest.importorskip("transformers")
    from fp4compile.weights.transformers import Fp4CompileConfig, Fp4CompileQuantizer

    quantizer = Fp4CompileQuantizer(Fp4CompileConfig(recipe=GPTQ), pre_quantized=False)
    with pytest.raises(ValueError, match="its recipe needs batches; load the model without it, and call"):
        quantizer.validate_environment()


@torch.no_grad()
def test_a_weight_that_is_not_finite_shows():
    model, batches, test = attention()
    model.o_proj.weight[3, 5] = torch.nan
    found, _ = packed(model, GPTQ | {"fprop_w": "nvfp4_one_level"}, batches)
    assert found(test)[:, 3].isnan().all() and found(test)[:, :3].isfinite().all()
    assert not found.o_proj.weight.isfinite().all()


@torch.no_grad()
def test_the_backend_says_that_it_has_no_batches():
    model, batches, test = attention()
    for scales in ("amax", "mse"):
        torch._dynamo.reset()
        report = fp4compile.explain(model, test, recipe=GPTQ | {"weight_scales": scales})
        assert {row.weight_scales for row in report.rows} == {f"{scales} (no batches)"}
