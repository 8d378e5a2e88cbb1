"""Packed experts: the bits of unpacked ones, in a module whose code runs as before, and nothing else in memory."""

import copy
import io
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4compile
from fp4compile.formats.layouts import swizzled_numel
from fp4compile.hardware import Target
from fp4compile.weights import scale_layout as scales
from fp4compile.weights.decide import UNKNOWN_DIMENSION
from fp4compile.weights.experts import PackedExperts
from tests.helpers.absent_gpu_model import DEVICE, compiled_for, pretended
from tests.helpers.expert_models import EXPERTS, OFFS, SCALE, Around, Forms, K, N, packed, recipe_of, tokens, values
from tests.helpers.rewritten import rewritten

BF16 = torch.bfloat16


def captured(model, recipe, *args):
    """(results of the rewritten graph, decisions)."""
    torch._dynamo.reset()
    run, decisions = rewritten(model, recipe)
    with torch.no_grad():
        return run(*args), decisions


def dequantised(decisions):
    """The nodes of the graph that hold dequantised weights."""
    (graph,) = {d.gemm.node.graph for d in decisions}
    return graph.find_nodes(op="call_function", target=torch.ops.fp4compile.dequantize.default)


# ---------------------------------------------------------------- products


def of_number(treatment):
    """A treatment with the number that the recipe gives in the place of the graph's input for a static scale."""
    if treatment is None or treatment.outer is None:
        return treatment
    assert treatment.outer.op == "placeholder"
    return replace(treatment, outer=SCALE)


@pytest.mark.parametrize(("name", "is_transposed"), [
    ("nvfp4", False), ("nvfp4_static", True), ("nvfp4_rowwise", False), ("mxfp8_32x32", True),
    ("float8_rowwise", False), ("nvfp4_weight_only", True),
])  # fmt: skip
def test_products_have_the_bits_of_unpacked_experts(name, is_transposed):
    x, recipe = tokens(), recipe_of(name)
    expected, before = captured(Around(Forms(is_transposed)), recipe, x)
    model, report = packed(Around(Forms(is_transposed)), name)
    (row,) = report.rows
    assert (row.module, row.n, row.k, row.reason) == ("experts.up_proj", N, K, None)
    assert (row.left, row.right) == (recipe.fprop_x, recipe.fprop_w)
    found, after = captured(model, recipe, x)
    assert all(map(torch.equal, expected, found))
    assert [d.reason for d in after] == [None] * 9 and not dequantised(after)
    for ours, theirs in zip(after, before, strict=True):
        assert (ours.tier, ours.gemm.groups) == (theirs.tier, theirs.gemm.groups)
        assert [of_number(each) for each in (ours.a, ours.b)] == [theirs.a, theirs.b]
        assert (ours.gemm.module, ours.gemm.layer) == (theirs.gemm.module, theirs.gemm.layer)


OTHER_USES = [
    (lambda w, x: F.grouped_mm(x[:20, :N], w, offs=OFFS), "contracted along another dimension"),
    (lambda w, x: torch.bmm(x[:, :N].view(EXPERTS, -1, N), w), "contracted along another dimension"),
    (lambda w, x: x[:, :N] @ w[1], "contracted along another dimension"),
    (lambda w, x: x @ w[1, :16].t(), "a part of packed weights"),
    (lambda w, x: x @ w.view(-1, K)[16 : 16 + N].t(), "a part of packed weights"),
    (lambda w, x: torch.bmm(x.view(EXPERTS, -1, K), w[:, :16].transpose(1, 2)), "a part of packed weights"),
    (lambda w, x: torch.bmm(x.view(EXPERTS, -1, K), w.flip(0).transpose(1, 2)), "computed from parameters"),
    (lambda w, x: x @ w[1].to(torch.float8_e5m2).to(BF16).t(), "cast to another dtype than of floats"),
    (lambda w, x: F.grouped_mm(x[:20], (2 * w).transpose(1, 2), offs=OFFS), "computed from parameters"),
]  # fmt: skip


class Uses(nn.Module):
    is_transposed = False

    def __init__(self, uses):
        super().__init__()
        self.up_proj = nn.Parameter(values(EXPERTS, N, K))
        self.uses = uses

    def forward(self, x):
        return [use(self.up_proj, x) for use in self.uses]


def test_other_uses_read_dequantised_weights_and_say_so():
    model, _ = packed(Uses([use for use, _ in OTHER_USES]), "nvfp4")
    x = tokens()
    with torch.no_grad():
        expected = model(x)
    found, decisions = captured(model, recipe_of("nvfp4"), x)
    for (_, reason), decision, ours, exact in zip(OTHER_USES, decisions, found, expected, strict=True):
        assert reason in decision.reason
        assert decision.gemm.module == ("up_proj" if "packed weights" in decision.reason else "")
        assert torch.equal(ours, exact)
    assert dequantised(decisions)


def test_gradients_pass_through_dequantised_weights():
    """The product itself is of codes; its gradient is not packed along what it contracts."""
    model, x = packed(Around(Forms(False)), "nvfp4")[0], tokens().requires_grad_()
    torch._dynamo.reset()
    run, decisions = rewritten(lambda x: model(x)[0], recipe_of("nvfp4"))
    run(x).sum().backward()
    assert [d.reason for d in decisions] == [None, "gradient x packed weight: the weight is dequantised"]
    ones = torch.ones(20, N, dtype=BF16)
    assert torch.equal(x.grad[:20], F.grouped_mm(ones, model.experts.up_proj.clone(), offs=OFFS))


def test_under_autocast():
    """Weights in float32 are cast before they are quantised, as the graph casts them."""
    uses = [lambda w, x: torch.bmm(x.view(EXPERTS, -1, K), w.transpose(1, 2)), lambda w, x: x @ w[1].t()]
    x, results = tokens().float(), []
    for pack in (False, True):
        model = Uses(uses)
        model.up_proj = nn.Parameter(torch.randn(EXPERTS, N, K, generator=torch.Generator().manual_seed(5)))
        with torch.autocast("cpu", dtype=BF16):
            if pack:
                packed(model, "nvfp4")
            found, decisions = captured(model, recipe_of("nvfp4"), x)
        assert [d.reason for d in decisions] == [None, None]
        results.append(found)
    assert all(map(torch.equal, *results)) and model.up_proj.dtype == torch.float32


def test_the_report_is_that_of_unpacked_experts():
    """Sizes, FLOPs and categories, of a loop in modules of other names too. Packed weights have no bytes to save."""
    reports = []
    for pack in (False, True):
        model = Uses([lambda w, x: x @ w[1].t(), lambda w, x: F.grouped_mm(x[:20], w.transpose(1, 2), offs=OFFS)])
        if pack:
            packed(model, "nvfp4")
        torch._dynamo.reset()
        with torch.no_grad():
            reports.append(fp4compile.explain(model, tokens(), recipe=recipe_of("nvfp4")).rows)
    assert [row.weight is None for rows in reports for row in rows] == [False, False, True, True]
    before, after = ([replace(row, node=None, weight=None, weight_plain=None) for row in rows] for rows in reports)
    assert before == after and [row.category for row in after] == ["experts"] * 2


def test_a_rule_cannot_skip_packed_experts():
    model, _ = packed(Around(Forms(True)), "nvfp4")
    _, decisions = captured(model, replace(recipe_of("nvfp4"), rules=(("experts*", "skip"),)), tokens())
    assert {(d.reason, d.note) for d in decisions} == {
        (None, "rule 'experts*' has no effect: pack_ has fixed the formats")
    }


# ---------------------------------------------------------------- what is packed


class Net(nn.Module):
    """Experts beside a router that is one by its name alone, and a parameter of which nothing is known."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(K, 2 * EXPERTS, dtype=BF16)
        self.experts = Forms(False)
        self.experts.scale = nn.Parameter(values(EXPERTS, 1, N))  # that weights are not transposed says nothing of it
        self.other = nn.Parameter(values(EXPERTS, K, N))
        self.positions = nn.Parameter(values(1, K, N))

    def forward(self, x):
        return self.gate(x), self.experts(x), torch.bmm(x.view(EXPERTS, -1, K), self.other)


def test_what_nothing_is_known_of_stays_unless_it_is_named():
    model, report = packed(Net(), "nvfp4")
    assert {row.module: row.reason for row in report.rows} == {
        "gate": "router: its outputs choose among experts", "experts.up_proj": None, "other": UNKNOWN_DIMENSION,
        "experts.scale": UNKNOWN_DIMENSION,
    }  # fmt: skip
    x = tokens()
    _, decisions = captured(model, recipe_of("nvfp4"), x)
    assert [d.reason for d in decisions if d.gemm.module == "gate"] == ["router: its outputs choose among experts"]
    named, report = packed(Net(), "nvfp4", contracted={"o*r": -2, "*": -1})
    assert [row.reason for row in report.rows if row.module == "other"] == [None]
    again = fp4compile.pack_(named, recipe_of("nvfp4").replace(skip_lm_head=False))
    assert [row.reason for row in again.rows] == ["router: its outputs choose among experts"]
    expected, _ = captured(Net(), recipe_of("nvfp4"), x)
    named.gate.load_state_dict(model.gate.state_dict())
    found, _ = captured(named, recipe_of("nvfp4"), x)
    assert torch.equal(expected[2], found[2])
    for wrong, error in (({"other": 1}, ValueError), (["other"], TypeError)):
        with pytest.raises(error, match="contracted: expected"):
            fp4compile.pack_(Net(), "nvfp4", contracted=wrong)


def hooked(model):
    model.experts.register_state_dict_pre_hook(lambda *args: None)


def tied(model):
    model.second = Forms(False)
    model.second.up_proj = model.experts.up_proj


def parametrised(model):
    nn.utils.parametrize.register_parametrization(model.experts, "bias", nn.Identity())


def of_integers(model):
    model.experts.up_proj = nn.Parameter(torch.zeros(EXPERTS, N, K, dtype=torch.int8), requires_grad=False)


def in_the_way(model):
    model.experts.up_proj_packed = 1


@pytest.mark.parametrize(("change", "reason"), [
    (hooked, "its module has a state-dict hook"), (tied, "another module has the same parameter"),
    (parametrised, "its module is parametrised: bias"), (of_integers, "dtype int8"),
    (in_the_way, "its module has an attribute 'up_proj_packed'"),
])  # fmt: skip
def test_what_cannot_be_packed_stays_with_a_reason(change, reason):
    model = Around(Forms(False))
    model.experts.bias = nn.Parameter(torch.zeros(2))
    change(model)
    assert {row.reason for row in packed(model, "nvfp4")[1].rows} == {reason}
    assert isinstance(model.experts._parameters["up_proj"], nn.Parameter)


@pytest.mark.parametrize(("recipe", "reason"), [
    ({"rules": [("experts*", "skip")]}, "rule 'experts*'"), ({"min_k": 128}, "K=80 is below min_k=128"),
    ({"fprop_w": None}, "recipe nvfp4 leaves weights in high precision"),
    ({"fprop_x": "nvfp4_16x16"}, "format nvfp4_16x16 has square blocks, and groups may have any number of rows"),
])  # fmt: skip
def test_the_recipe_decides(recipe, reason):
    report = fp4compile.pack_(Around(Forms(False)), recipe_of("nvfp4").replace(**recipe))
    assert [row.reason for row in report.rows] == [reason]


def test_the_weights_are_freed_and_small():
    model = Around(Forms(False))
    gone = weakref.ref(model.experts.up_proj)
    packed(model, "nvfp4")
    assert gone() is None
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert held == EXPERTS * (N * K // 2 + N * K // 16 + 4)


# ---------------------------------------------------------------- the module


def state_of(model):
    """Everything in a state dict: shapes, types and bits."""
    return {
        name: (value.dtype, value.shape, value.reshape(-1).view(torch.uint8).tolist())
        if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }  # fmt: skip


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "float8_rowwise"])
def test_the_module_stays(name, is_transposed):
    """Its class, its name, its code; eagerly it multiplies with the dequantised weights."""
    plain = Forms(is_transposed)
    model, _ = packed(copy.deepcopy(plain), name)
    assert isinstance(model, Forms) and repr(model).startswith("Forms(") and "up_proj_packed" in repr(model)
    exact = fp4compile.quantize(plain.up_proj.detach(), recipe_of(name).fprop_w, dim=1 if is_transposed else 2,
                                per_matrix=True).dequantize(BF16)  # fmt: skip
    exact = exact.transpose(1, 2) if is_transposed else exact
    assert torch.equal(model.up_proj, exact) and model.up_proj.is_contiguous()
    plain.up_proj.data.copy_(exact)
    with torch.no_grad():
        assert all(map(torch.equal, model(tokens()), plain(tokens())))
    with pytest.warns(UserWarning, match="packed them again"):
        model.up_proj[1].zero_()
    assert not model.up_proj[1].any() and torch.equal(model.up_proj[0], exact[0])
    for value in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
        with pytest.raises(AttributeError, match="up_proj: packed weights cannot be assigned; assign up_proj.data"):
            model.up_proj = value
    with pytest.warns(UserWarning, match="packed them again"):
        model.up_proj.data = exact
    assert torch.equal(model.up_proj, exact)


def test_copies_pickles_and_casts():
    model, _ = packed(Around(Forms(True)), "nvfp4")
    before, values_before = state_of(model), model.experts.up_proj
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stored, weights_only=False))
    for one in copies:
        assert state_of(one) == before and type(one.experts) is type(model.experts)
        assert one.experts.up_proj_packed.weight_data.data_ptr() != model.experts.up_proj_packed.weight_data.data_ptr()
    fresh, _ = packed(Around(Forms(True)), "nvfp4")
    fresh.experts.up_proj_packed.weight_data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert state_of(fresh) == before
    other, _ = packed(Around(Forms(False)), "nvfp4")
    with pytest.raises(RuntimeError, match="packed layer 'experts.up_proj_packed': the state is of"):
        other.load_state_dict(model.state_dict())
    for cast, dtype in ((model.half, torch.float16), (model.double, torch.float64), (model.bfloat16, BF16)):
        cast()
        assert model.experts.up_proj.dtype == dtype and state_of(model) == before
    assert torch.equal(model.experts.up_proj, values_before)
    assert copy.deepcopy(model).to("meta").experts.up_proj.shape == (EXPERTS, K, N)


# ---------------------------------------------------------------- scales that lie swizzled


@pytest.mark.parametrize(("name", "k", "blocks"), [("nvfp4", 96, 6), ("mxfp8_32x32", K, 3)])
def test_scales_lie_as_the_device_multiplies_them(name, k, blocks, monkeypatch):
    """The CPU is taken for a GPU of compute capability 10.0. Values, states and files are the same there."""
    linear, _ = packed(Around(Forms(False, k)), name)
    expected, _ = captured(linear, recipe_of(name), tokens(k))
    before = state_of(linear)
    monkeypatch.setattr(scales, "target_on", lambda device: Target(100))
    model, _ = packed(Around(Forms(False, k)), name)
    moved = copy.deepcopy(linear).to("cpu")
    for one in (model, moved, pickle.loads(pickle.dumps(linear))):
        assert one.experts.up_proj_packed.weight_scales.shape == (EXPERTS, swizzled_numel(N, blocks))
        assert state_of(one) == before and torch.equal(one.experts.up_proj, linear.experts.up_proj)
    found, decisions = captured(model, recipe_of(name), tokens(k))
    assert all(map(torch.equal, expected, found))
    assert {d.a.layout for d in decisions} == {d.b.layout for d in decisions} == {"swizzled"}
    model.load_state_dict(linear.state_dict())
    assert state_of(model) == before and model.experts.up_proj_packed.scale_layout == "swizzled"
    monkeypatch.undo()
    model.to("cpu")
    assert model.experts.up_proj_packed.scale_layout == "linear" and state_of(model) == before


def test_scales_stay_linear_where_no_kernel_reads_them_swizzled(monkeypatch):
    """Rows of 40 bytes: the kernel of linear layers takes them, that of experts does not."""
    monkeypatch.setattr(scales, "target_on", lambda device: Target(100))
    model, _ = packed(Around(Forms(False)), "nvfp4")
    assert model.experts.up_proj_packed.scale_layout == "linear"


def test_products_are_native(monkeypatch):
    """On fake tensors of a GPU of compute capability 10.0."""
    model = Uses([lambda w, x: torch.bmm(x.view(EXPERTS, -1, 96), w.transpose(1, 2))])
    model.up_proj = nn.Parameter(values(EXPERTS, 64, 96))
    packed(model, "nvfp4")
    with pretended(monkeypatch, 100) as launches:
        model.to(DEVICE)
        found = compiled_for(monkeypatch, model, torch.empty(300, 96, device=DEVICE, dtype=BF16), "nvfp4", launches)
    for report in (found.report, found.explained):
        assert [(row.tier, row.reason) for row in report.rows] == [("native", None)]
    assert {one.constants["SWIZZLED"] for one in found.launches if "quantize" in one.kernel.__name__} == {True}


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_static", "float8_rowwise"])
def test_files(name, device, tmp_path):
    model, _ = packed(Net(), name)
    fp4compile.save_packed(model, tmp_path / "packed")
    fresh = Net().to(device)
    fp4compile.load_packed(fresh, tmp_path / "packed")
    assert state_of(fresh) == state_of(model)
    assert isinstance(fresh.experts.up_proj_packed, PackedExperts) and "up_proj" not in fresh.experts._parameters
    assert torch.equal(fresh.experts.up_proj, model.experts.up_proj)


class Shared(nn.Module):
    """Experts of two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = Forms(False)


def test_a_module_with_two_names_is_one(tmp_path):
    model, report = packed(Shared(), "nvfp4")
    assert [row.module for row in report.rows] == ["one.up_proj"]
    fp4compile.save_packed(model, tmp_path / "packed")
    fresh = Shared()
    fp4compile.load_packed(fresh, tmp_path / "packed")
    assert fresh.one is fresh.other and state_of(fresh) == state_of(model)


def larger(model):
    model.experts.up_proj = nn.Parameter(values(EXPERTS, 2 * N, K))


def turned(model):
    model.experts.is_transposed = True


def without(model):
    del model.experts.up_proj


@pytest.mark.parametrize(("change", "match"), [
    (larger, r"'experts.up_proj': the file has shape \(3, 48, 80\), the model \(3, 96, 80\)"),
    (turned, r"in the file it is \[experts, out, in\], in the model \[experts, in, out\]"),
    (without, "the model has no parameter of experts 'experts.up_proj'"),
    (lambda model: packed(model, "nvfp4"), "the model has no parameter of experts 'experts.up_proj'"),
])  # fmt: skip
def test_files_that_do_not_fit_leave_the_model_as_it_was(change, match, tmp_path):
    fp4compile.save_packed(packed(Net(), "nvfp4")[0], tmp_path / "packed")
    model = Net()
    change(model)
    before = state_of(model)
    with pytest.raises(ValueError, match=match):
        fp4compile.load_packed(model, tmp_path / "packed")
    assert state_of(model) == before
