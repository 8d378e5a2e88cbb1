"""The passes' order, switches, cache keys, counts, times and dumps."""

import pickle
import re

import pytest
import torch
from torch._dynamo.utils import counters

import fp4compile
from fp4compile.passes import manager
from fp4compile.passes.lib.base import run_passes
from fp4compile.report.report import PassRun, Report
from tests.helpers import without_codegen

SWITCHABLE = [
    "rewrite", "recompute", "hoist", "merge_quantize", "quantize_before_gather", "fake_quantize",
    "quantize_before_index",
    "fuse_quantize", "fuse_epilogue", "scale_results", "fuse_prologue", "rank_tokens", "fuse_horizontal", "inplace",
    "lower",
]  # fmt: skip
POST_GRAD = SWITCHABLE[3:]
VARIABLE = "FP4COMPILE_DISABLE_PASSES"


@pytest.fixture
def disable(monkeypatch):
    """Switches passes off by the setting; none switches all on."""
    return lambda *names: monkeypatch.setattr(fp4compile.config, "disabled_passes", names)


class SharedInput(torch.nn.Module):
    """Two layers with one input: in training the input is quantised along rows and along columns."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(64, 48, bias=False) for _ in range(2))

    def forward(self, x):
        return self.q(x) * self.k(x)


@pytest.fixture
def captured(monkeypatch):
    """The backend without Inductor's code generation: faster, and `hoist` does not run."""
    without_codegen.install(monkeypatch)


def infer(model, x):
    """(result, report) of an inference call with whatever is switched off now, compiled from nothing."""
    torch._dynamo.reset()
    backend = fp4compile.backend("mxfp8")
    with torch.no_grad():
        y = torch.compile(model, backend=backend)(x)
    return y, backend.report


# ---------------------------------------------------------------- the list


def test_order():
    assert [one.__name__ for one in manager.ALL] == SWITCHABLE
    assert [one.__name__ for one in manager.JOINT] == SWITCHABLE[:2]
    assert [one.__name__ for one in manager.POST_GRAD] == POST_GRAD
    for one in manager.ALL:
        assert one.__module__ == f"fp4compile.passes.{one.__name__}"


# ---------------------------------------------------------------- counts and times


def test_counts_and_times_of_inference_reach_the_report():
    _, report = infer(SharedInput(), torch.randn(4, 64))
    assert list(report.passes) == ["find", *SWITCHABLE]
    assert report.counts == {"find": 2, **dict.fromkeys(SWITCHABLE, 0), "rewrite": 2, "hoist": 2}
    assert all(run.seconds > 0 for run in report.passes.values())
    assert report.passes["hoist"] == PassRun(2, report.seconds["hoist"])
    told = report.to_dict()
    assert told["counts"] == report.counts and told["seconds"] == report.seconds


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("dynamic", [False, True])
def test_counts_of_a_backward_reach_the_report_whenever_it_is_compiled(dynamic):
    """A backward graph without symbolic sizes is compiled when it first runs, after the backend has returned."""
    model, backend = SharedInput(), fp4compile.backend("mxfp8")
    x = torch.randn(40, 64, requires_grad=True)
    y = torch.compile(model, backend=backend, dynamic=dynamic)(x)
    forward = dict(backend.report.passes)
    y.sum().backward()
    counts = backend.report.counts
    assert (counts["find"], counts["rewrite"]) == (6, 6) and "hoist" not in counts
    assert counts["merge_quantize"] == 3  # of the input and of both gradients
    assert forward["merge_quantize"].matches == (3 if dynamic else 1)
    assert (backend.report.passes["merge_quantize"].seconds > forward["merge_quantize"].seconds) == (not dynamic)


def test_times_are_summed_over_graphs():
    report = Report("mxfp8")
    report.add([], {"find": 2}, seconds={"find": 0.5})
    report.add([], {"find": 1, "rewrite": 1}, seconds={"find": 0.25, "rewrite": 1.0})
    report.add([], {"find": 1})  # from a cache
    assert report.passes == {"find": PassRun(4, 0.75), "rewrite": PassRun(1, 1.0)}


def test_counts_come_back_from_the_cache_without_times():
    model, x = SharedInput(), torch.randn(40, 64, requires_grad=True)
    reports = []
    for _ in range(2):
        torch._dynamo.reset()
        backend = fp4compile.backend("mxfp8")
        torch.compile(model, backend=backend)(x).sum().backward()
        model.zero_grad()
        reports.append(backend.report)
    assert counters["aot_autograd"]["autograd_cache_hit"] >= 1
    first, second = reports
    assert first.counts == second.counts and first.counts["merge_quantize"] == 3
    assert first.seconds and not second.seconds


# ---------------------------------------------------------------- switches


def test_the_setting_switches_a_pass_off(disable, captured):
    model, x = SharedInput(), torch.randn(4, 64)
    expected, report = infer(model, x)
    assert list(report.counts) == ["find", "rewrite", "recompute", *POST_GRAD]
    for names in (*((name,) for name in POST_GRAD), POST_GRAD):
        disable(*names)
        y, without = infer(model, x)
        assert list(without.counts) == [name for name in report.counts if name not in names]
        assert torch.equal(y, expected) and len(without.quantised) == 2


def test_without_the_rewrite_nothing_is_quantised_and_every_row_says_why(disable, captured):
    model, x = SharedInput(), torch.randn(4, 64)
    disable("rewrite")
    with pytest.warns(UserWarning, match="quantised nothing: 2 x the pass rewrite is switched off"):
        y, report = infer(model, x)
    torch.testing.assert_close(y, model(x), rtol=1e-6, atol=1e-6)
    assert not report.quantised and "rewrite" not in report.counts
    assert {(row.left, row.right, row.tier) for row in report.rows} == {("float32", "float32", None)}


def test_without_the_rewrite_other_reasons_and_packed_weights_stay(disable, captured):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    fp4compile.pack_(model, fp4compile.Recipe(fprop_x="mxfp8", fprop_w="mxfp8", rules=[("[12]", "skip")]))
    disable("rewrite")
    torch._dynamo.reset()
    backend = fp4compile.backend("mxfp8", rules=[("1", "skip")])
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(4, 64))
    assert [row.reason for row in backend.report.rows] == [None, "rule '1'", manager.SWITCHED_OFF]


def test_the_environment_switches_passes_off_too(disable, captured, monkeypatch):
    monkeypatch.setenv(VARIABLE, " inplace, lower,")
    assert manager.switched_off_passes() == {"inplace", "lower"}
    disable("hoist")
    assert manager.switched_off_passes() == {"hoist", "inplace", "lower"}
    _, report = infer(SharedInput(), torch.randn(4, 64))
    assert list(report.counts) == ["find", "rewrite", "recompute", *POST_GRAD[:-2]]
    monkeypatch.setenv(VARIABLE, "")
    disable()
    assert manager.switched_off_passes() == frozenset()


def test_unknown_names_are_refused(disable, monkeypatch):
    allowed = re.escape(", ".join(SWITCHABLE))
    disable("inplace", "fuse")
    with pytest.raises(ValueError, match=f"config.disabled_passes: unknown pass 'fuse'; allowed are {allowed}"):
        fp4compile.backend("mxfp8")
    disable()
    monkeypatch.setenv(VARIABLE, "lower,find")
    with pytest.raises(ValueError, match=f"{VARIABLE}: unknown pass 'find'; allowed are {allowed}"):
        fp4compile.backend("mxfp8")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(fp4compile.config, "disabled_passes", "inplace")
    with pytest.raises(TypeError, match=r"expected a collection of names such as \('lower',\), got 'inplace'"):
        fp4compile.backend("mxfp8")


# ---------------------------------------------------------------- no graph of another setting


def test_a_backend_keeps_the_setting_it_was_made_under(disable, captured):
    disable("lower")
    backend = fp4compile.backend("mxfp8")
    disable()
    assert backend.disabled_passes == {"lower"}
    with torch.no_grad():
        torch.compile(SharedInput(), backend=backend)(torch.randn(4, 64))
    assert "lower" not in backend.report.counts


def test_backends_of_different_settings_are_different(disable):
    """Dynamo compares backends before it gives the graph of one to another."""
    plain = fp4compile.backend("mxfp8")
    disable("inplace")
    without = fp4compile.backend("mxfp8")
    assert without != plain and without.report is not plain.report
    assert without == fp4compile.backend("mxfp8") == pickle.loads(pickle.dumps(without))
    disable()
    assert plain == fp4compile.backend("mxfp8") and without == pickle.loads(pickle.dumps(without))


def test_dynamo_compiles_again_for_another_setting(disable, captured):
    model, x = SharedInput(), torch.randn(4, 64)
    reports = []
    for names in ((), ("lower",), ()):
        disable(*names)
        backend = fp4compile.backend("mxfp8")
        with torch.no_grad():
            torch.compile(model, backend=backend)(x)
        reports.append(backend.report)
    assert reports[0] is reports[2] and reports[0].graphs == 1, "the graph of an equal backend is reused"
    assert "lower" in reports[0].counts and "lower" not in reports[1].counts


def test_a_cached_graph_of_another_setting_is_not_reused(disable):
    model, x = SharedInput(), torch.randn(40, 64, requires_grad=True)
    for names in ((), ("merge_quantize",)):
        disable(*names)
        torch._dynamo.reset()
        counters.clear()
        backend = fp4compile.backend("mxfp8")
        torch.compile(model, backend=backend)(x).sum().backward()
        assert not counters["aot_autograd"]["autograd_cache_hit"]
        assert not counters["inductor"]["fxgraph_cache_hit"]
        assert ("merge_quantize" in backend.report.counts) == (not names)


def test_a_name_of_dynamos_registry_has_one_setting(disable, captured):
    compiled = torch.compile(SharedInput(), backend="fp4compile_mxfp8_floor")
    compiled(torch.ones(4, 64))
    disable("inplace")
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"switched off were \[\] when backend='fp4compile_mxfp8_floor' was"):
        compiled(torch.ones(4, 64))


# ---------------------------------------------------------------- dumps


def test_dumps_show_every_pass_before_and_after(disable, monkeypatch, tmp_path):
    directory = tmp_path / "made" / "dump"
    monkeypatch.setenv("FP4COMPILE_DUMP", str(directory))
    disable("inplace")
    infer(SharedInput(), torch.randn(4, 64))
    files = sorted(directory.iterdir(), key=lambda file: int(file.name.split("_")[1]))
    found = [re.fullmatch(r"\d+_\d{3,}_(\w+)_(before|after)\.py", file.name).groups() for file in files]
    ran = list(SWITCHABLE)
    ran.remove("inplace")
    assert sorted(found) == sorted((name, when) for name in ran for when in ("before", "after"))
    assert [name for name, _ in found[::2]] == [name for name, _ in found[1::2]] == ran
    before, after = (next(directory.glob(f"*_hoist_{when}.py")).read_text() for when in ("before", "after"))
    assert before.count("fp4compile.quantize.default(") == 3 and after.count("fp4compile.quantize.default(") == 1


def test_a_pass_that_fails_still_dumps_what_it_left(monkeypatch, tmp_path):
    monkeypatch.setenv("FP4COMPILE_DUMP", str(tmp_path))
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    module = torch.fx.GraphModule({}, graph)

    def broken(graph):
        raise RuntimeError("failed")

    with pytest.raises(RuntimeError, match="failed"):
        run_passes([broken], module.graph)
    assert module.graph.owning_module is module
    assert {file.name.split("_")[-1] for file in tmp_path.iterdir()} == {"before.py", "after.py"}
