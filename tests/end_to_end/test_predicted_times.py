"""Predicted times of a graph's products, as `explain` reports them, on the meta device."""

from html import escape

import pytest
import torch
from torch._inductor import config as inductor

import fp4compile
from fp4compile import config, hardware
from fp4compile.formats.grouping import Grouping
from fp4compile.hardware import GPUS, Target
from fp4compile.recipe import named
from fp4compile.roofline import compiled_graph, graph_steps, time_terms
from fp4compile.roofline.matmul_steps import Sizes, plain_step
from fp4compile.templates.launch import dry_run
from tests.helpers import without_codegen
from tests.helpers.expert_models import Around, Forms, packed, recipe_of, tokens
from tests.helpers.report_text import flat


class Pair(torch.nn.Module):
    """A layer that gains in NVFP4 on a B200, and one that loses."""

    def __init__(self, large=4096, small=128):
        super().__init__()
        self.up, self.down = torch.nn.Linear(large, large, bias=False), torch.nn.Linear(large, small, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def on_meta(m=8192, grad=False, **sizes):
    with torch.device("meta"):
        return Pair(**sizes).bfloat16(), torch.empty(m, 4096, dtype=torch.bfloat16, requires_grad=grad)


def explained(recipe="nvfp4", gpu="B200", grad=False, **sizes):
    model, x = on_meta(grad=grad, **sizes)
    with torch.set_grad_enabled(grad):
        return fp4compile.explain(model, x, recipe=recipe, gpu=gpu)


def alone(recipe, gpu, n, m=8192):
    """The row of a layer by itself."""
    with torch.device("meta"), torch.no_grad():
        model, x = torch.nn.Sequential(torch.nn.Linear(4096, n, bias=False)).bfloat16(), torch.empty(m, 4096).bfloat16()
        (row,) = fp4compile.explain(model, x, recipe={"recipe": recipe, "skip_lm_head": False}, gpu=gpu).rows
    return row


@pytest.mark.parametrize("grad", [False, True])
def test_times_keep_the_bounds_of_the_published_rates(grad):
    """Of both layers, by hand: FLOPs at the library's share, or each operand and the result once."""
    gpu, report = GPUS["H200"], explained("nvfp4_train", "H200", grad=grad)
    for module, n in (("up", 4096), ("down", 128)):
        rows = [row for row in report.rows if row.module == module]
        assert len(rows) == (3 if grad else 1) and {row.tier for row in rows} == {"emulated"}
        flops, moved = 2 * 8192 * n * 4096, 2 * (8192 * (n + 4096) + n * 4096)
        expected = gpu.product_launch + max(flops / (gpu.bf16 * gpu.bf16_share), moved / gpu.copy_rate)
        assert sum(row.plain_seconds for row in rows) == pytest.approx(len(rows) * expected)
        assert all(row.seconds > flops / gpu.bf16 for row in rows)


def test_weights_that_are_not_kept_count():
    seconds = {cache: explained(named("nvfp4").replace(weight_cache=cache)).rows[0].seconds for cache in ("on", "off")}
    assert seconds["on"] < 0.9 * seconds["off"]


def test_the_rules_of_a_layer_decide_what_is_predicted():
    recipe = named("nvfp4").replace(rules=[("up", "mxfp8"), ("down", "skip")])
    up, down = explained(recipe).rows
    assert up.seconds == pytest.approx(alone("mxfp8", "B200", 4096).seconds)
    assert down.reason == "rule 'down'" and down.seconds == down.plain_seconds


def test_a_size_that_varies_is_predicted_at_that_of_the_call():
    model, x = on_meta()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        rows = fp4compile.explain(model, x, recipe="nvfp4", gpu="B200").rows
    assert [row.reason for row in rows] == [None, None] and isinstance(rows[0].m, str)
    assert rows[1].seconds == pytest.approx(alone("nvfp4", "B200", 128).seconds, rel=0.05)


def test_tensors_on_meta_stand_for_those_of_a_gpu():
    assert [(row.tier, row.reason) for row in explained("nvfp4").rows] == [("native", None)] * 2
    without = explained("nvfp4", gpu=None)
    assert [(row.reason, row.seconds) for row in without.rows] == [("device meta", None)] * 2 and without.gpu is None


def test_packed_layers():
    model = torch.nn.Sequential(torch.nn.Linear(256, 512)).bfloat16()
    fp4compile.pack_(model, "nvfp4")
    with torch.no_grad():
        x = torch.ones(64, 256, dtype=torch.bfloat16)
        (row,) = fp4compile.explain(model, x, recipe={"recipe": "mxfp8", "weight_cache": "off"}, gpu="H200").rows
        plain = torch.nn.Sequential(torch.nn.Linear(256, 512)).bfloat16()
        (cached,) = fp4compile.explain(plain, x, recipe={"recipe": "nvfp4", "skip_lm_head": False}, gpu="H200").rows
    assert row.quantised and row.seconds == pytest.approx(cached.seconds)


def test_other_products():
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Parameter(torch.empty(4, 64, 64, device="meta", dtype=torch.bfloat16))

        def forward(self, x):
            return torch.bmm((x @ x.mT) @ x, self.experts)

    with torch.no_grad():
        x = torch.empty(4, 64, 64, device="meta", dtype=torch.bfloat16)
        report = fp4compile.explain(Attention(), x, recipe="nvfp4", gpu="B200")
    seconds = {row.product: row.seconds for row in report.rows}
    products = plain_step(Sizes(256, 64, 64, Grouping.BATCHED, 4), GPUS["B200"])
    assert seconds["attention"] == pytest.approx(products.seconds)
    assert "not predicted" not in str(report)


class Grouped(torch.nn.Module):
    """Experts by offsets, a router beside them, and what weight a test wants."""

    def __init__(self, experts=16, n=2048, k=1024):
        super().__init__()
        self.w = torch.nn.Parameter(torch.empty(experts, n, k, dtype=torch.bfloat16))

    def forward(self, x, offs):
        return torch.nn.functional.grouped_mm(x, self.w.mT, offs=offs)


def of_experts(recipe, gpu, grad=False, tokens=8192, **sizes):
    with torch.device("meta"):
        model, x = Grouped(**sizes), torch.empty(tokens, 1024, dtype=torch.bfloat16, requires_grad=grad)
        offs = torch.empty(model.w.shape[0], dtype=torch.int32)
    with torch.set_grad_enabled(grad):
        return fp4compile.explain(model, x, offs, recipe=recipe, gpu=gpu)


@pytest.mark.parametrize(
    "gpu, recipe, grad", [("H200", "nvfp4", False), ("B200", "mxfp8", True), ("H200", "mxfp8", True)]
)
def test_experts_are_predicted(gpu, recipe, grad):
    report = of_experts(recipe, gpu, grad)
    assert [row.category for row in report.rows] == ["experts"] * (3 if grad else 1)
    plain, found, rows = {row.product: row.plain_seconds for row in report.rows}, GPUS[gpu], (Grouping.RAGGED_ROWS, 16)
    assert plain["fprop"] == pytest.approx(plain_step(Sizes(8192, 2048, 1024, *rows), found).seconds)
    if grad:
        assert plain["dgrad"] == pytest.approx(plain_step(Sizes(8192, 1024, 2048, *rows), found).seconds)
        wgrad = Sizes(2048, 1024, 8192, Grouping.RAGGED_CONTRACTION, 16)
        assert plain["wgrad"] == pytest.approx(plain_step(wgrad, found).seconds)
    assert report.predicted().seconds == pytest.approx(sum(row.seconds for row in report.rows) + report.rest.seconds)
    assert all(row.seconds != row.plain_seconds for row in report.rows)


def test_packed_experts_are_predicted_as_those_that_the_cache_packs():
    """In all forms: groups, one expert, a batch, by index."""
    model, _ = packed(Around(Forms(False)), "nvfp4")
    with torch.no_grad():
        kept, cached = (
            fp4compile.explain(each, tokens(), recipe=recipe_of("nvfp4"), gpu="H200").rows
            for each in (model, Around(Forms(False)))
        )
    assert len(kept) == 9 and all(row.seconds != row.plain_seconds for row in kept)
    assert [row.seconds for row in kept] == [row.seconds for row in cached]


# ---------------------------------------------------------------- launches that several products need


class Block(torch.nn.Module):
    """A norm, Q, K and V of its result, and the sum of what is left."""

    def __init__(self, width=4096, narrow=1024):
        super().__init__()
        self.norm = torch.nn.RMSNorm(width)
        self.q, self.k, self.v = (torch.nn.Linear(width, n, bias=False) for n in (width, narrow, narrow))

    def forward(self, x):
        x = self.norm(x)
        return self.q(x), self.k(x), self.v(x)


def block_report(recipe="nvfp4", gpu="B200", grad=False, tokens=2048):
    with torch.device("meta"):
        model, x = Block().bfloat16(), torch.empty(tokens, 4096, dtype=torch.bfloat16, requires_grad=grad)
    with torch.set_grad_enabled(grad):
        return fp4compile.explain(model, x, recipe=recipe, gpu=gpu)


def test_q_k_and_v_share_a_quantiser_and_none_is_told_to_lose_for_it():
    report = block_report()
    apart = {n: alone("nvfp4", "B200", n, 2048) for n in (4096, 1024)}
    (quantiser,) = {round(1e9 * (apart[n].seconds - row.seconds + row.shared_seconds))
                    for row, n in zip(report.rows, (4096, 1024, 1024), strict=True)}  # fmt: skip
    assert quantiser > 0 and all(row.launches.startswith("quantise rows, fused / 3; ") for row in report.rows)
    assert apart[1024].seconds > apart[1024].plain_seconds, "K and V lose where each quantises the input for itself"
    assert report.losing() == {}


def test_a_fused_norm_is_counted_once():
    """In bf16 a kernel of its own reads and writes the tensor; in NVFP4 the quantiser's launches read its input."""
    report, nbytes = block_report(), 2 * 2048 * 4096
    gpu = GPUS["B200"]
    assert report.rest.plain_seconds == pytest.approx(gpu.launch + 2 * nbytes / gpu.copy_rate, rel=0.01)
    assert report.rest.seconds == 0.0
    assert {row.fused for row in report.rows} == {"pow, mean, add, rsqrt, mul"}
    unfused = 2 * nbytes + nbytes // 4 + nbytes // 32  # the norm's result, its amax; codes; scales
    shared = sum(row.shared_seconds for row in report.rows)
    assert shared < report.rest.plain_seconds + unfused / gpu.copy_rate + 3 * gpu.launch


def test_the_rows_and_the_rest_are_the_total():
    report = block_report("mxfp8", "H200", grad=True)
    plain, planned = (sum(getattr(row, name) for row in report.rows) for name in ("plain_seconds", "seconds"))
    assert report.predicted() == pytest.approx((plain + report.rest.plain_seconds, planned + report.rest.seconds))
    assert f"{1e6 * report.predicted().seconds:.1f} \u00b5s instead of" in flat(report)
    # The quantiser of the forward pass writes the codes of the weight gradients, too: six products in two graphs.
    by_product = {(row.module, row.product): row.launches for row in report.rows}
    assert all("quantise both / 6" in by_product[name, product] for name in "qkv" for product in ("fprop", "wgrad"))


def test_attention_on_meta_is_one_kernel_as_on_a_gpu():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    gpu, shape = GPUS["B200"], (1, 8, 4096, 128)
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]
    report = fp4compile.explain(Attention(), *inputs, gpu="B200")
    assert [row.reason.split(":")[0] for row in report.rows] == ["fused attention"] * 2
    forward = 4 * 8 * 4096**2 * 128 / 2  # two products, half of each under the causal mask
    for row, flops in zip(report.rows, (forward, 2.5 * forward), strict=True):
        expected = gpu.product_launch + flops / (gpu.bf16 * time_terms.ATTENTION)
        assert row.seconds == row.plain_seconds == pytest.approx(expected)


# ---------------------------------------------------------------- launches that the host issues

ADVICE = 'better compiled with torch.compile(..., mode="reduce-overhead")'


@pytest.mark.parametrize("tokens, advised", [(256, True), (8192, False)])
def test_cuda_graphs_are_advised_where_the_host_issues_launches_more_slowly_than_they_run(tokens, advised):
    model, x = on_meta(tokens, grad=True)
    report = fp4compile.explain(model, x, recipe="nvfp4_train", gpu="H100")
    (graph,) = report.launches  # of the forward and the backward graph together
    assert graph.count == 29, "six products; eight quantisers, 2 or 3 each; seeds"
    assert graph.seconds == pytest.approx(report.predicted().seconds)
    assert (15e-6 * graph.count > graph.seconds) == advised
    assert [text in page for text, page in ((ADVICE, flat(report)), (escape(ADVICE), report.to_html()))] == 2 * [
        advised
    ]
    assert [each["launches"] for each in report.to_dict()["host_bound"]] == advised * [graph.count]


def test_cuda_graphs_are_not_advised_where_they_are_used():
    model, x = on_meta(256, grad=True)
    for backend in (fp4compile.backend("nvfp4_train"), "inductor"):
        compiled = torch.compile(model, backend=backend, mode="reduce-overhead")
        assert fp4compile.explain(compiled, x, gpu="H100").launches == []
    with inductor.patch({"triton.cudagraphs": True}):
        assert ADVICE not in flat(fp4compile.explain(model, x, gpu="H100"))


def test_a_compiled_model_is_advised_when_explain_is_called_and_not_before(monkeypatch):
    """Compiling predicts nothing, on a GPU that is known either; `explain` of the compiled model does."""
    monkeypatch.setattr(hardware, "present", lambda: GPUS["H100"])
    monkeypatch.setattr(config, "disabled_passes", ("inplace", "lower"))
    without_codegen.install(monkeypatch, deciding=lambda: dry_run(Target(90)))
    model, x = Pair(64, 64).bfloat16(), torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    backend = fp4compile.backend("mxfp8")
    compiled = torch.compile(model, backend=backend)
    with monkeypatch.context() as patch:
        patch.setattr(graph_steps, "steps_of", None)
        patch.setattr(compiled_graph, "steps_of", None)
        compiled(x).sum().backward()
    assert backend.report.quantised and backend.report.launches == [] and ADVICE not in flat(backend.report)
    assert ADVICE in flat(fp4compile.explain(compiled, x, recipe="mxfp8"))


# ---------------------------------------------------------------- dtypes


class Skipped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4096, 4096, bias=False)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("dtype, tf32, rate, name", [
    (torch.float32, False, "fp32", "float32 GEMM"), (torch.float32, True, "tf32", "float32 GEMM"),
    (torch.bfloat16, False, "bf16", "bf16 GEMM"), (torch.float16, False, "bf16", "fp16 GEMM"),
])  # fmt: skip
def test_a_matmul_that_is_not_quantised_has_the_rate_of_its_dtype(dtype, tf32, rate, name):
    gpu, before = GPUS["B200"], torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        with torch.device("meta"), torch.no_grad():
            model, x = Skipped().to(dtype), torch.empty(8192, 4096, dtype=dtype)
            (row,) = fp4compile.explain(model, x, recipe={"recipe": "nvfp4", "rules": [("*", "skip")]}, gpu="B200").rows
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    flops = {"fp32": gpu.fp32, "tf32": gpu.bf16 / 2, "bf16": gpu.bf16}[rate]
    expected = gpu.product_launch + 2 * 8192 * 4096**2 / (flops * gpu.bf16_share)
    assert row.seconds == row.plain_seconds == pytest.approx(expected, rel=1e-12) and row.launches == name


def test_a_float32_layer_gains_over_float32():
    with torch.device("meta"), torch.no_grad():
        model, x = Skipped(), torch.empty(8192, 4096)
        report = fp4compile.explain(model, x, recipe={"recipe": "nvfp4", "skip_lm_head": False}, gpu="B200")
    (row,) = report.rows
    gpu = GPUS["B200"]
    assert row.quantised and row.plain_seconds == pytest.approx(
        gpu.product_launch + 2 * 8192 * 4096**2 / (gpu.fp32 * gpu.bf16_share), rel=1e-12)  # fmt: skip
