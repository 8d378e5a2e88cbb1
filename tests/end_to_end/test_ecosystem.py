"""What `benchmarks.ecosystem` counts as a failure. The libraries themselves run by `make ecosystem`."""

import json

import pytest

from benchmarks import ecosystem

OUTPUTS = {"SQNR": 15.0, "bf16 SQNR": 45.0, "packed SQNR": None}
FALLING, PLAIN = [1.0, 0.8, 0.5], [1.0, 0.8, 0.45]


@pytest.mark.parametrize(("changed", "problem"), [
    ({}, None), ({"packed SQNR": 40.0}, None), ({"bf16 SQNR": None}, None),
    ({"SQNR": 3.0}, "expected at least 8"), ({"SQNR": None}, "nothing was quantised"),
    ({"SQNR": 44.0}, "nothing was quantised"), ({"packed SQNR": 12.0}, "beside the packed model"),
])  # fmt: skip
def test_outputs(changed, problem):
    problems = []
    ecosystem.check_outputs(problems, OUTPUTS | changed)
    assert [problem in each for each in problems] == ([] if problem is None else [True])


@pytest.mark.parametrize(("losses", "problem"), [
    (FALLING, None), ([1.0, float("nan"), 0.5], "is not finite"), ([1.0, 0.97, 0.985], "does not fall"),
    (PLAIN, "of unquantised steps"),
])  # fmt: skip
def test_losses(losses, problem):
    problems = []
    told = ecosystem.check_losses(problems, losses, PLAIN)
    assert problem is None if not problems else problem in " ".join(problems)
    assert told == {"losses": [losses[0], losses[-1]], "bf16 loss": 0.45}


def test_a_run(monkeypatch, tmp_path, capsys):
    """Rows of other subjects stay in the file; a problem is the exit status."""
    rows = {"Lightning": {"subject": "Lightning", "package": "lightning 1", "problems": []},
            "timm: ViT": {"subject": "timm: ViT", "package": "timm 1", "problems": ["it broke"]}}  # fmt: skip
    monkeypatch.setattr(ecosystem, "in_a_process", lambda name, inductor: rows[name])
    out = tmp_path / "ecosystem.json"
    assert ecosystem.main(["--only", "timm: ViT", "--out", str(out)]) == 1
    assert ecosystem.main(["--only", "Lightning", "--out", str(out)]) == 0
    assert "it broke" in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"] == [rows["Lightning"], rows["timm: ViT"]]
