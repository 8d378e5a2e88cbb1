"""The report: rows, summary, table, JSON; `explain` and `calibrate`."""

import dataclasses
import json

import pytest
import torch

import fp4compile
from fp4compile.report import Report, Row, rows_from_json, rows_to_json


def row(module="a", reason=None, flops=100, m=2):
    formats = ("mxfp8", "mxfp8", "reference") if reason is None else ("bfloat16", "bfloat16", None)
    return Row(module, "fprop", m, 4, 8, *formats, reason, flops)


def test_summary_counts_flops():
    report = Report("mxfp8")
    report.add([row(), row("b", "output head", flops=300), row("c", m="s0", flops=None)], {"find": 3, "rewrite": 2})
    assert report.flops_share() == 0.25
    assert report.reasons() == {"output head": 1}
    assert report.summary() == (
        "recipe mxfp8: 2 of 3 matrix products quantised, 25.0% of their FLOPs"
        " (1 of symbolic or unknown size not counted)"
    )


def test_table():
    report = Report("mxfp8")
    report.add([row(), row("head", "output head", flops=300)], {})
    assert str(report).splitlines() == [
        "module  product  M  N  K  left      right     tier       left alone because",
        "-" * 75,
        "a       fprop    2  4  8  mxfp8     mxfp8     reference",
        "head    fprop    2  4  8  bfloat16  bfloat16             LM head",
        "-" * 75,
        "recipe mxfp8: 1 of 2 matrix products quantised, 25.0% of their FLOPs",
    ]


def test_table_with_what_training_saves():
    report = Report("mxfp8")
    kept = dataclasses.replace(row(), product="wgrad", saved=3 * 2**19, saved_plain=3 * 2**20)
    report.add([kept, row("b")], {})
    assert report.saved() == (3 * 2**19, 3 * 2**20)
    assert str(report).splitlines()[2] == "a       wgrad    2  4  8  mxfp8  mxfp8  reference  1.5 MiB of 3.0 MiB"
    assert report.summary().endswith("; saved for backward: 1.5 MiB packed, unquantised 3.0 MiB")


def test_recompilation_adds_only_what_is_new():
    report = Report("mxfp8")
    report.add([row()], {"find": 1})
    report.add([row(), row(m=3)], {"find": 2})
    assert [r.m for r in report.rows] == [2, 3] and report.counts == {"find": 3}


def test_json():
    rows = [row(), row("b", "output head"), row(m="s0", flops=None)]
    assert rows_from_json(rows_to_json(rows, {"find": 3})) == (rows, {"find": 3})
    report = Report("mxfp8", rows, {"find": 3})
    assert json.loads(json.dumps(report.to_dict()))["quantised"] == 2


def test_explain_says_what_the_backend_does(capsys):
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


def test_explain_shows_symbolic_sizes():
    backend = fp4compile.backend("nvfp4")
    with torch.no_grad():
        torch.compile(torch.nn.Linear(64, 48), backend=backend, dynamic=True)(torch.ones(8, 64))
    (only,) = backend.report.rows
    assert isinstance(only.m, str) and (only.n, only.k, only.flops) == (48, 64, None)
    assert backend.report.flops_share() is None


def test_calibrate_measures_the_largest_activation():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48))
    batches = [torch.randn(8, 64), (3 * torch.randn(5, 64),), {"input": torch.randn(2, 64)}]
    recipe = fp4compile.calibrate(model, batches)
    seen = [batches[0], batches[1][0], batches[2]["input"]]
    with torch.no_grad():
        first = max(x.abs().max() for x in seen) / 2688
        second = max(model[:2](x).max() for x in seen) / 2688
    assert dict(recipe.static_scales) == {"0": first.item(), "2": pytest.approx(second.item(), rel=1e-6)}

    x = torch.randn(8, 64)
    with torch.no_grad():
        y = torch.compile(model[0], backend=fp4compile.backend(recipe.replace(static_scales={"": first.item()})))(x)
        xq = fp4compile.quantize(x, "nvfp4", outer=first).dequantize()
        wq = fp4compile.quantize(model[0].weight, "nvfp4").dequantize()
    torch.testing.assert_close(y, xq @ wq.t() + model[0].bias.detach(), rtol=1e-5, atol=1e-5)


def test_calibrate_bad_input():
    layer = torch.nn.Linear(64, 48)
    with pytest.raises(ValueError, match="batches: got none"):
        fp4compile.calibrate(layer, [])
    with pytest.raises(ValueError, match="not finite"):
        fp4compile.calibrate(layer, [torch.full((2, 64), float("inf"))])
    with pytest.raises(ValueError, match="activation_scale='static'"):
        fp4compile.calibrate(layer, [torch.ones(2, 64)], "mxfp8")
    with pytest.raises(ValueError, match="no layer"):
        fp4compile.calibrate(torch.nn.ReLU(), [torch.ones(2, 64)])
