"""The report: rows, summary, table, JSON; what `explain` and the backend put into it."""

import copy
import csv
import dataclasses
import functools
import io
import json
import pickle
import sys

import pytest
import torch
from torch._guards import CompileId, TraceId

import fp4compile
from fp4compile.report.report import Report, Row, Seconds
from tests.helpers import without_codegen
from tests.helpers.report_text import row, selectors


def test_summary_counts_flops():
    report = Report("mxfp8", graphs=1)
    report.add([row(), row("b", "output head", flops=300), row("c", m="s0", flops=None)], {"find": 3, "rewrite": 2})
    assert report.flops_share() == 0.25
    assert report.reasons() == {"output head": 1}
    assert report.summary() == (
        "recipe mxfp8: 2 of 3 matmuls quantised, 25.0% of their FLOPs; "
        "the FLOPs of 1 of the matmuls are unknown and not counted"
    )
    report.graphs = None  # such as of pack_, whose rows never have FLOPs
    assert report.summary() == "recipe mxfp8: 2 of 3 matmuls quantised, 25.0% of their FLOPs"


def test_table():
    report = Report("mxfp8")
    report.add([row(), row("head", "output head", flops=300)], {})
    assert report.table(all=True).splitlines() == [
        "fp4compile, recipe mxfp8",
        "quantised      25.0% of the FLOPs: 1 of 2 matmuls",
        "not quantised  75.0% of the FLOPs: output head (75.0% of FLOPs, 1 matmul)",
        "",
        "layer  matmul  M  N  K  formats  how, or why not quantised",
        "-" * 58,
        "a      fprop   2  4  8  mxfp8    reference",
        "head   fprop   2  4  8  bf16     output head",
        "-" * 58,
    ]


def table_of(text):
    """The lines of a report's table."""
    _, _, table = text.partition("\n\n")
    return table.split("---\n")[1].splitlines()[:-1]


def layers(count=3, gain=2.0):
    """Rows of a deep model with predicted times: a small and a large layer in each block, and a head."""
    rows = [row("lm_head", "output head", flops=250)]
    for block in range(count):
        rows += [row(f"layers.{block}.small", flops=10), row(f"layers.{block}.large", flops=100)]
    plain = [(one, 1e-6 * one.flops) for one in rows]
    return [
        dataclasses.replace(one, plain_seconds=seconds, seconds=seconds / (gain if one.quantised else 1))
        for one, seconds in plain
    ]


def test_equal_layers_are_one_line():
    report = Report("mxfp8", [row("head", flops=250), *(row(f"layers.{block}.up") for block in range(3))])
    report.rows.append(row("layers.7.up", m=4, flops=400))  # of another size
    lines = [line.split("  ")[0] for line in table_of(str(report))]
    assert lines == ["layers.7.up", "layers.*.up x3", "head"]
    assert [line.split()[0] for line in table_of(report.table(all=True))] == [
        "head", "layers.0.up", "layers.1.up", "layers.2.up", "layers.7.up"
    ]  # fmt: skip
    dgrad = dataclasses.replace(row("layers.0.x"), product="dgrad")
    apart = Report("mxfp8", [dgrad, row("layers.0.x"), row("layers.1.x"), row("a.b3")])
    # layers.0 has a product that layers.1 does not have, and b3 is no number
    assert [line.split()[:2] for line in table_of(str(apart))] == [
        ["layers.0.x", "fprop"], ["layers.0.x", "dgrad"], ["layers.1.x", "fprop"], ["a.b3", "fprop"]
    ]  # fmt: skip


def test_the_slowest_layers_come_first_though_a_product_has_no_predicted_time():
    """Here the slower of two layers has fewer FLOPs. Nothing predicts the third, which therefore stands last."""
    seconds = {"slow": (10, 9e-6), "fast": (1000, 2e-6), "unknown": (500, None)}
    rows = [dataclasses.replace(row(name, flops=flops), plain_seconds=time) for name, (flops, time) in seconds.items()]
    for given in (rows, rows[::-1]):
        lines = str(Report("mxfp8", given, gpu="B200")).splitlines()
        assert [line.split()[0] for line in lines if line.startswith(tuple(seconds))] == ["slow", "fast", "unknown"]


def test_predicted_times_in_the_table():
    report = Report("mxfp8", layers(), gpu="B200", rest=Seconds(20e-6, 10e-6))
    text = str(report)
    assert "before, \u00b5s  after, \u00b5s  gain  how, or why not quantised" in text
    first = table_of(text)[0]
    assert first.startswith("layers.*.large x3") and first.split()[-4:] == ["300.0", "150.0", "2.00", "reference"]
    assert text.splitlines()[2:4] == [
        "not quantised  43.1% of the FLOPs: output head (43.1% of FLOPs, 60.2% of predicted time, 1 matmul)",
        "predicted      1.41 times as fast: 425.0 \u00b5s instead of 600.0 \u00b5s on B200, not measured; outside of "
        "matmuls 10.0 instead",
    ]
    assert report.predicted() == pytest.approx((600e-6, 425e-6))
    assert report.gains() == pytest.approx({"layers.*.small x3": 2.0, "layers.*.large x3": 2.0})
    assert report.reason_shares() == {"output head": pytest.approx((250 / 580, 250 / 415))}
    losing = "predicted to lose, better skipped by a rule: layers.*.small x3 (0.50), layers.*.large x3 (0.50)"
    assert losing in str(Report("mxfp8", layers(gain=0.5), gpu="B200"))
    shared = [dataclasses.replace(one, shared_seconds=0.6 * one.seconds) for one in layers(gain=0.5)]
    assert Report("mxfp8", shared, gpu="B200").losing() == {}, "what others need too is not saved by a rule"
    unknown = Report("mxfp8", [row()], gpu="B200")
    assert "no matmul of a kind and size that the model is for" in str(unknown)
    assert json.loads(json.dumps(report.to_dict()))["gains"] == report.gains()


def test_csv():
    report = Report("mxfp8", [*layers(1), row('a "b", c', reason="x\ny")])
    read = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [line["module"] for line in read] == [one.module for one in report.rows]
    assert (
        read[3]["reason"] == "x\ny" and read[3]["seconds"] == "" and float(read[1]["seconds"]) == report.rows[1].seconds
    )
    assert list(read[0]) == [field.name for field in dataclasses.fields(Row)]


def test_html_page():
    page = Report("mxfp8", [*layers(gain=0.5), row("<b>")], gpu="B200").to_html()
    assert "<b>" not in page and "&lt;b&gt;" in page and "layers.<wbr>*.<wbr>large x3" in page
    assert 'class="bar plain" style="width:50.0%" title="300.0 \u00b5s"' in page
    assert 'class="bar slower" style="width:100.0%" title="600.0 \u00b5s"' in page
    assert not any(word in page for word in ("http", "src=", "url(", "import"))  # nothing beside it
    assert "bar plain" not in Report("mxfp8", [row()]).to_html()


def test_a_notebook_shows_the_table_and_a_short_repr_says_what_it_is():
    report = Report("mxfp8", [*layers(gain=0.5), *(row(f"<b>{index}") for index in range(500))], gpu="B200")
    shown = report._repr_html_()
    assert shown in report.to_html() and "&lt;b&gt;499" in shown and 'class="bar slower"' in shown
    assert "<script" not in shown
    assert all(one.startswith(".fp4compile") for one in selectors(shown)), "of the notebook, nothing changes"
    assert (
        repr(report) == f"<Report: recipe mxfp8, 506 of {len(report.rows)} matmuls quantised; print it for the table>"
    )


def test_table_with_what_training_saves():
    report = Report("mxfp8")
    kept = dataclasses.replace(row(), product="wgrad", saved=3 * 2**19, saved_plain=3 * 2**20)
    report.add([kept, row("b")], {})
    assert report.saved() == (3 * 2**19, 3 * 2**20)
    assert "saved, MiB" in str(report)
    assert table_of(str(report))[0] == "a      wgrad   2  4  8  mxfp8    1.5 of 3.0  reference"
    assert "memory     1.5 MiB instead of 3.0 MiB: activations saved for backward" in str(report)
    assert report.summary().endswith("; saved for backward: 1.5 MiB packed, unquantised 3.0 MiB")


def test_share_of_each_category():
    report = Report("mxfp8")
    moe = dataclasses.replace(row("experts", "grouped product", flops=400), category="experts")
    report.add([row(), row("head", "output head", flops=300), moe], {})
    assert report.flops_shares() == {"dense": 0.25, "experts": 0.0}
    assert report.summary() == (
        "recipe mxfp8: 1 of 3 matmuls quantised, 12.5% of their FLOPs (dense 25.0%, experts 0.0%)"
    )


def compilation(frame, number, attempt=0):
    return TraceId(CompileId(frame_id=frame, frame_compile_id=number), attempt)


def test_equal_rows_of_one_graph_and_of_two_functions_are_kept():
    report = Report("mxfp8")
    report.add([row(), row()], {"find": 2}, compilation(0, 0))
    report.add([row()], {"find": 1}, compilation(1, 0))
    report.add([row()], {"find": 1}, compilation(1, 0))  # a second graph of one compilation: DDP splits
    report.add([row()], {"find": 1})
    assert len(report.rows) == 5 and report.counts == {"find": 5}


def test_recompilation_adds_only_what_is_new():
    report = Report("mxfp8")
    report.add([row(), row()], {"find": 2}, compilation(0, 0))
    report.add([row(), row(m=3)], {}, compilation(0, 1))
    assert [r.m for r in report.rows] == [2, 2, 3]
    report.add([row(), row(), row()], {}, compilation(0, 2))
    assert [r.m for r in report.rows] == [2, 2, 3, 2]
    report.add([row(), row(m=3)], {}, compilation(0, 2, attempt=1))  # Dynamo starts again within a compilation
    assert len(report.rows) == 4
    report.forget_compilations()
    report.add([row()], {}, compilation(0, 0))
    assert [r.m for r in report.rows] == [2, 2, 3, 2, 2]


def test_explain_says_what_the_backend_does(capsys, monkeypatch):
    without_codegen.install(monkeypatch)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)), torch.ones(8, 64)
    state = torch.get_rng_state()
    report = fp4compile.explain(model, x, recipe="nvfp4")
    assert str(report) in capsys.readouterr().out
    assert torch.equal(torch.get_rng_state(), state)
    backend = fp4compile.backend("nvfp4")
    torch.compile(model, backend=backend)(x)
    # `explain` does not partition the graph: what is saved it cannot know.
    rows = [dataclasses.replace(row, saved=None, saved_plain=None) for row in backend.report.rows]
    assert rows == report.rows and len(report.rows) == 5 and backend.report.saved()[0] > 0
    assert all(p.grad is None for p in model.parameters())


def test_sizes_that_only_the_data_knows_are_said_to_be_unknown():
    layer = torch.nn.Linear(64, 48)

    def chosen(x):
        return layer(x[torch.nonzero(x[:, 0] > 0).squeeze(-1)]), layer(x)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        report = fp4compile.explain(chosen, torch.randn(20, 64), recipe="mxfp8")
    assert [row.flops for row in report.rows] == [None, 2 * 20 * 48 * 64]
    assert report.summary().endswith("; the FLOPs of 1 of the matmuls are unknown and not counted")


class Twice(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x, y):
        return self.layer(self.layer(x).relu()).sum() + self.layer(y).sum()


def test_a_layer_applied_several_times_keeps_one_activation_each_time(monkeypatch):
    without_codegen.install(monkeypatch)
    backend = fp4compile.backend("mxfp8")
    torch.compile(Twice(), backend=backend)(torch.randn(32, 64), torch.randn(96, 64)).backward()
    kept = {row.k: [] for row in backend.report.rows if row.product == "wgrad"}
    for each in backend.report.rows:
        if each.product == "wgrad":
            kept[each.k].append((each.saved, each.saved_plain))
    # MXFP8 along the tokens: a byte an element, and a byte for 32.
    assert kept == {32: 2 * [(32 * 64 + 64, 4 * 32 * 64)], 96: [(96 * 64 + 3 * 64, 4 * 96 * 64)]}


def test_equal_backends_have_one_report_until_the_compiler_is_reset(monkeypatch):
    without_codegen.install(monkeypatch)
    model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
    first = fp4compile.backend("mxfp8", strict=True)
    torch.compile(model, backend=first)(x)
    second = fp4compile.backend("mxfp8", strict=True)
    torch.compile(model, backend=second)(x)  # Dynamo runs the graph of the first
    assert len(second.report.quantised) == 2 and second.report is first.report
    others = fp4compile.backend("mxfp8"), fp4compile.backend("mxfp4", strict=True)
    assert [other.report.graphs for other in others] == [0, 0]
    torch.compiler.reset()
    third = fp4compile.backend("mxfp8", strict=True)
    assert third.report.graphs == 0
    torch.compile(model, backend=first)(x)
    torch.compile(model, backend=third)(x)
    assert (third.report.graphs, first.report.graphs) == (1, 2)


@pytest.mark.parametrize("named", [False, True])
def test_every_reset_of_the_compiler_begins_a_report(named, monkeypatch):
    """A function that was compiled before a reset goes on with its backend, which Dynamo does not know any more."""
    without_codegen.install(monkeypatch)
    backend = "fp4compile_mxfp8" if named else fp4compile.backend("mxfp8")
    compiled, x = torch.compile(torch.nn.Linear(64, 64), backend=backend), torch.ones(8, 64)
    for _ in range(2):
        compiled(x)
        torch.compiler.reset()
        assert fp4compile.backend("mxfp8").report.graphs == 0


def test_strict_asks_each_model_though_equal_backends_share_a_report(monkeypatch):
    without_codegen.install(monkeypatch)
    torch.compile(torch.nn.Linear(64, 64), backend=fp4compile.backend("mxfp8", strict=True))(torch.ones(8, 64))
    with pytest.raises(RuntimeError, match="quantised nothing"):
        torch.compile(torch.nn.ReLU(), backend=fp4compile.backend("mxfp8", strict=True))(torch.ones(8, 64))
    with pytest.raises(RuntimeError, match="quantised nothing"):
        torch.compile(lambda x: x + 1, backend=fp4compile.backend("mxfp8", strict=True))(torch.ones(8, 64))


def test_a_transform_of_torch_func_is_a_cause_of_nothing_compiled(monkeypatch):
    """Dynamo captures no function that is called inside of one."""
    without_codegen.install(monkeypatch)
    backend, x = fp4compile.backend("mxfp8", min_m=7), torch.ones(8, 64)
    compiled = torch.compile(torch.nn.Linear(64, 64), backend=backend)
    torch.func.grad(lambda x: compiled(x).sum())(x)
    assert "compiled nothing. Likely causes" in backend.report.summary()
    assert "inside of a transform of torch.func" in backend.report.summary()
    torch.compiler.reset()  # until then Dynamo passes over the function
    compiled(x)
    assert len(backend.report.quantised) == 2


def test_backends_are_copied_and_pickled():
    backend = fp4compile.backend("mxfp8", strict=True, min_m=3)
    assert pickle.loads(pickle.dumps(backend)) == backend == copy.deepcopy(backend)


# ---------------------------------------------------------------- explain


class Parted(torch.nn.Module):
    """Three graphs, two of whose layers are alike."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(64, width) for width in (64, 64, 96))

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        x = self.b(x)
        torch._dynamo.graph_break()
        return self.c(x)


@pytest.mark.parametrize("grad", [True, False])
def test_explain_reports_every_graph_once_and_prints_once(grad, capsys):
    with torch.set_grad_enabled(grad):
        report = fp4compile.explain(Parted(), torch.randn(4, 64), recipe="mxfp8")
    forward = [(row.module, row.n) for row in report.rows if row.product == "fprop"]
    assert forward == [("a", 64), ("b", 64), ("c", 96)] and report.graphs == 3
    assert len(report.rows) == (8 if grad else 3)
    assert capsys.readouterr().out == f"{report}\n"


def parted(how):
    model = Parted()
    if how == "wrapped":
        return torch.compile(model, backend=fp4compile.backend("mxfp8", strict=True))
    if how == "in place":
        model.compile(backend=fp4compile.backend("mxfp8", strict=True))
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    if how == "parts in place":
        model.b.compile(backend="eager")
    if how == "parts wrapped":
        model.b = torch.compile(model.b, backend="eager")
    return model


@pytest.mark.parametrize("how", ["wrapped", "in place", "forward", "parts in place", "parts wrapped"])
def test_explain_and_calibrate_look_into_compiled_models(how):
    model, x = parted(how), torch.randn(4, 64)
    forward = vars(model).get("forward")
    with torch.no_grad():
        report = fp4compile.explain(model, x, recipe="mxfp8")
        assert [row.module for row in report.rows] == ["a", "b", "c"]
    assert [name for name, _ in fp4compile.calibrate(model, [x]).static_scales] == ["a", "b", "c"]
    inner = model.b if how.startswith("parts") else model
    assert (inner._compiled_call_impl is not None) == how.endswith("in place"), "left as it was"
    assert vars(model).get("forward") is forward
    if how == "parts wrapped":
        assert inner.forward != inner._orig_mod.__call__


def test_a_wrapper_around_a_compiled_forward_is_not_passed_over():
    """It has copies of the compiled function's attributes, as hooks of accelerate have, and computes something else."""
    model = Parted()

    @functools.wraps(compiled := torch.compile(model.forward, backend="eager"))
    def halved(x):
        return compiled(x / 2)

    model.forward = halved
    with pytest.raises(ValueError, match="quantises no layer"):  # not: scales of inputs that are not halved
        fp4compile.calibrate(model, [torch.randn(4, 64)])


# ---------------------------------------------------------------- nothing compiled


class Residual(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        return x + self.layer(x)


class Looped(torch.nn.Module):
    """Dynamo leaves its `forward` out, for a graph break in a loop, and captures the blocks that the loop calls."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.blocks = torch.nn.ModuleList(Residual() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_explain_names_layers_outside_of_the_captured_graphs(device):
    with torch.device(device):
        model, x = Looped(), torch.ones(4, 64)
    report = fp4compile.explain(model, x, recipe="mxfp8", gpu="B200" if device == "meta" else None)
    assert {row.module.partition(".")[0] for row in report.rows} == {"blocks"}
    assert report.outside == report.to_dict()["outside"] == ["first", "last"]
    warning = "2 layers run outside of the captured graphs, and are not counted: first, last"
    assert warning in str(report) and warning in report.summary()
    assert fp4compile.explain(model.blocks[0], x, recipe="mxfp8", gpu="B200").outside == []


def test_explain_raises_where_nothing_is_captured():
    @torch.compiler.disable
    def hidden(x):
        return x @ x

    def bypassed(x):
        return hidden(x)

    with pytest.raises(ValueError, match="model: no graph of it was captured. Likely causes: .*wrapper"):
        fp4compile.explain(bypassed, torch.ones(64, 64), recipe="mxfp8")
    model = Parted()
    model.forward = torch.compiler.disable(model.forward)
    with pytest.raises(ValueError, match="model: no graph of it was captured"):
        fp4compile.explain(model, torch.ones(4, 64), recipe="mxfp8")


@pytest.mark.parametrize("by", ["mode", "options", "configuration"])
def test_lite_mode_says_that_it_quantises_nothing(by, monkeypatch):
    """It leaves out the passes of the joint graph, whatever quantised before."""
    model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
    if "lite" not in torch._inductor.list_mode_options():
        pytest.skip("this torch has no such mode")
    how = {"mode": {"mode": "lite"}, "options": {"options": {"use_joint_graph_passes": False}}, "configuration": {}}[by]
    backend = fp4compile.backend("mxfp8")
    with torch.no_grad(), torch._inductor.config.patch(use_joint_graph_passes=by != "configuration"):
        if by != "configuration":
            torch.compile(model, backend=backend)(x)
        with pytest.warns(UserWarning, match="mode='lite' switches off|use_joint_graph_passes=False switches off"):
            out = torch.compile(model, backend=backend, **how)(x)
        with pytest.raises(RuntimeError, match="quantised nothing: .* switches off"):
            torch.compile(model, backend=fp4compile.backend("mxfp8", strict=True), **how)(x)
    assert torch.equal(out, model(x)) and len(backend.report.rows) == (by != "configuration")


def test_freezing_says_that_it_quantises_nothing(monkeypatch):
    """Dynamo then makes parameters attributes of the graph. In training it does not."""
    monkeypatch.setattr(sys.modules["fp4compile.dynamo_backend"], "compile_fx", lambda gm, *args, **options: gm.forward)
    model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
    backend = fp4compile.backend("mxfp8")
    warning = pytest.warns(UserWarning, match="quantised nothing: torch._inductor.config.freezing makes")
    with torch._inductor.config.patch(freezing=True), torch.no_grad(), warning:
        out = torch.compile(model, backend=backend)(x)
    assert torch.equal(out, model(x)) and backend.report.rows == []
    without_codegen.install(monkeypatch)
    with torch._inductor.config.patch(freezing=True):
        torch.compile(model, backend=backend)(x)
    assert [row.product for row in backend.report.rows if row.quantised] == ["fprop", "wgrad"]


@pytest.mark.parametrize("strict", [True, False])
def test_lite_mode_takes_no_rows_of_another_run_from_the_cache(strict, monkeypatch):
    without_codegen.install(monkeypatch)
    model, x = torch.nn.Linear(64, 64), torch.ones(8, 64)
    torch.compile(model, backend=fp4compile.backend("mxfp8"))(x)
    torch.compiler.reset()
    backend = fp4compile.backend("mxfp8", strict=strict)
    with pytest.raises(RuntimeError) if strict else pytest.warns(UserWarning, match="quantised nothing"):
        torch.compile(model, backend=backend, options={"use_joint_graph_passes": False})(x)
    assert backend.report.rows == []


def test_passes_are_told():
    """Below the table: how often each pass matched, and its time where the passes ran."""
    report = Report("nvfp4", [])
    assert "passes:" not in str(report)
    report.add([], {"find": 3, "lower": 2}, seconds={"find": 0.0042})
    assert str(report).splitlines()[-1] == "passes: find 3 (4.2 ms), lower 2"
