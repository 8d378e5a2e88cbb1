"""Predicted times of a graph's products, as `explain` reports them, on the meta device."""

import pytest
import torch

import fp4compile
from fp4compile.recipe import named
from fp4compile.roofline import model as roofline
from fp4compile.roofline.model import Experts
from tests.helpers.expert_models import Around, Forms, packed, recipe_of, tokens


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


def test_the_report_has_the_times_of_the_model():
    report = explained("nvfp4_train", "H200", grad=True)
    for module, n in (("up", 4096), ("down", 128)):
        rows = {row.product: row for row in report.rows if row.module == module}
        expected = roofline.predict("nvfp4_train", "H200", 8192, n, 4096, train=True)
        for product, row in rows.items():
            own = expected.of_product(product)
            assert (row.plain_seconds, row.seconds) == pytest.approx((own.plain_seconds, own.seconds)), product
        assert report.gains()[module] == pytest.approx(expected.gain)
        assert {row.tier for row in rows.values()} == {"emulated"}


def test_weights_that_are_not_kept_count():
    seconds = {}
    for cache in ("on", "off"):
        recipe = named("nvfp4").replace(weight_cache=cache)
        seconds[cache] = explained(recipe).rows[0].seconds
        assert seconds[cache] == pytest.approx(roofline.predict(recipe, "B200", 8192, 4096, 4096).seconds)
    assert seconds["on"] < 0.9 * seconds["off"]


def test_the_rules_of_a_layer_decide_what_is_predicted():
    recipe = named("nvfp4").replace(rules=[("up", "mxfp8"), ("down", "skip")])
    up, down = explained(recipe).rows
    assert up.seconds == pytest.approx(roofline.predict("mxfp8", "B200", 8192, 4096, 4096).seconds)
    assert down.reason == "rule 'down'" and down.seconds == down.plain_seconds


def test_a_size_that_varies_is_predicted_at_that_of_the_call():
    model, x = on_meta()
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        rows = fp4compile.explain(model, x, recipe="nvfp4", gpu="B200").rows
    assert [row.reason for row in rows] == [None, None] and isinstance(rows[0].m, str)
    expected = roofline.predict("nvfp4", "B200", 8192, 128, 4096)
    assert rows[1].seconds == pytest.approx(expected.seconds)


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
    assert row.seconds == pytest.approx(roofline.predict("nvfp4", "H200", 64, 512, 256).seconds)


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
    experts = roofline.predict("nvfp4", "B200", 256, 64, 64, experts=Experts(4, "batch"))
    assert seconds["fprop"] == pytest.approx(experts.seconds)
    flops = 2 * 4 * 64**3
    assert seconds["attention"] == pytest.approx(roofline.product("B200", flops).seconds)
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
    expected = roofline.predict(recipe, gpu, 8192, 2048, 1024, train=grad, experts=16)
    assert [row.category for row in report.rows] == ["experts"] * (3 if grad else 1)
    for row in report.rows:
        own = expected.of_product(row.product)
        assert (row.plain_seconds, row.seconds) == pytest.approx((own.plain_seconds, own.seconds)), row.product
    assert list(report.gains().values()) == pytest.approx([expected.gain])


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
