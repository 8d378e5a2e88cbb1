"""The benchmarks of packing and of the scale sweep: whole runs on a CPU, and how they judge what they found."""

import json

import pytest
import torch

import fp4compile
from benchmarks import packing, scale_sweep
from fp4compile.formats import reference_scales


def modelopts_formulas(w, top):
    """The best amax of each block by ModelOpt's formulas, every operation one of PyTorch's."""
    blocks = w.float().reshape(-1, 16)
    least, best = torch.full((len(blocks),), torch.inf), torch.zeros(len(blocks))
    for byte in range(1, 127):
        candidate = reference_scales.value(torch.tensor(byte)) / 448.0
        step = candidate * top / 6.0
        y = blocks.abs() / step
        magnitude = torch.where(y < 2, (2 * y).round() / 2, torch.where(y < 4, y.round(), (y / 2).round() * 2)).clamp(
            max=6
        )
        loss = (blocks.abs() - magnitude * step).square().sum(-1)
        best = torch.where(loss < least, candidate * top, best)
        least = torch.minimum(loss, least)
    return best


def test_the_sweep_agrees_with_modelopts_formulas():
    rows = list(scale_sweep.compare((64, 128), "cpu", modelopts_formulas))
    assert len(rows) == 10 and rows[0]["weight"] == "normal, bfloat16"
    assert all(row["blocks"] == 512 and row["differ"] == row["ties"] <= 8 for row in rows)
    assert scale_sweep.problems([], rows) == []


def test_what_disagrees_is_told_from_ties():
    w = torch.cat((torch.randn(4, 16), torch.zeros(3, 16)))
    w[0, 0] = 7.0
    top = w.abs().amax()
    ours = fp4compile.scale_sweep(w, top).flatten()
    assert scale_sweep.disagreements(w, ours, ours) == {
        "differ": 0, "ties": 0, "adjacent": 0, "better": 0, "worse": 0, "apart, 1e-6": 0.0
    }  # fmt: skip
    chosen = (ours / top * 448).to(torch.float8_e4m3fn).view(torch.uint8)
    chosen[1] += 2  # has more error
    chosen[4] += 1  # of zeros: none has any
    chosen[5] += 7
    theirs = reference_scales.value(chosen) / 448 * top
    better, worse = (scale_sweep.disagreements(w, *pair) for pair in ((ours, theirs), (theirs, ours)))
    assert better.pop("apart, 1e-6") > 1e4
    assert better == {"differ": 3, "ties": 2, "adjacent": 1, "better": 1, "worse": 0}
    assert scale_sweep.problems([{"weight": "w", "faster": 20.1}], [{"weight": "v", **better}]) == []
    assert (worse["better"], worse["worse"]) == (0, 1)
    assert scale_sweep.problems([{"weight": "w", "faster": 19.9}], [{"weight": "v", **worse}]) == [
        "w: 19.9 times faster, expected 20", "v: 1 blocks are worse by more than a tie"
    ]  # fmt: skip


def test_a_model_is_packed_saved_and_loaded(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5")
    monkeypatch.setattr(packing, "load_alone", packing.load)
    out = tmp_path / "packing.json"
    monkeypatch.setattr("sys.argv", ["packing", "--device", "cpu", "--tiny", "--layers", "1", "--out", str(out)])
    packing.main()
    content = json.loads(out.read_text())
    assert [row["weight_scales"] for row in content["rows"]] == ["amax", "mse", "four_over_six"]
    assert all(row["packed GiB"] < 0.6 * row["bf16 GiB"] and row["pack s"] > 0 for row in content["rows"])
    (loaded,) = content["load"]
    assert (
        loaded["logits equal"] and loaded["shards"] > 1 and loaded["tensors GiB"] == content["rows"][-1]["packed GiB"]
    )


def test_what_packing_costs_too_much():
    rows = [{"weight_scales": "amax", "pack s": 1.0}, {"weight_scales": "mse", "pack s": 3.5}]
    good = {"peak GiB": 5.7, "logits equal": True}
    assert packing.problems([rows[0], rows[1] | {"pack s": 1.1}], good) == []
    assert packing.problems(rows, {"peak GiB": 7.5, "logits equal": False}) == [
        "mse adds 2.50 s to packing, expected less than 2.0", "loading peaks at 7.50 GiB, expected less than 7.0",
        "the loaded model has other logits than the saved one",
    ]  # fmt: skip
