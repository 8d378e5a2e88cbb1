"""The commands `demo` and `recipes`: what they print, and what they say of bad arguments."""

import functools
import io
import json
import os
import re
import sys

import pytest
import torch

from fp4compile import __version__
from fp4compile.cli import demo
from fp4compile.cli import recipes as command_line
from fp4compile.cli.main import main
from fp4compile.recipe import Recipe, recipes, resolve
from fp4compile.report.decibels import decibels
from tests.helpers import without_codegen

train = demo.train


@functools.cache
def in_bf16(*args):
    """The same run whatever it is compared with, uncompiled."""
    with torch.compiler.set_stance("force_eager"):
        return train(*args)


@pytest.fixture
def one_layer(monkeypatch):
    monkeypatch.setattr(demo, "Llama", functools.partial(demo.Llama, demo.ModelSizes(layers=1)))
    monkeypatch.setattr(
        demo, "train", lambda backend, *args: (in_bf16 if backend == "inductor" else train)(backend, *args)
    )
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4_static"])
def test_demo_trains_and_compares(one_layer, capsys, recipe, monkeypatch):
    without_codegen.install(monkeypatch)  # what Inductor makes of a Llama, test_models.py shows
    main(["demo", "--recipe", recipe, "--device", "cpu", "--steps", "4"])
    out, err = capsys.readouterr()
    assert err == "", "no progress bar where stderr is no terminal"
    assert re.search(rf"recipe {recipe}\nquantised .*: (7|21) of \d+ matmuls", out)
    bf16, quantised = re.search(r"^step 4 +([\d.]+) +([\d.]+)$", out, re.MULTILINE).groups()
    first = re.search(r"^step 1 +([\d.]+)", out, re.MULTILINE).group(1)
    assert float(quantised) == pytest.approx(float(bf16), abs=0.1)
    assert float(bf16) < float(first), "it learns"
    assert float(re.search(r"SQNR ([\d.]+) dB", out).group(1)) > 15


def test_text_is_real_and_held_out_text_is_apart():
    training, held_out = demo.text()
    assert len(training) > 1_000_000 and len(held_out) > 100_000
    assert b"import " in bytes(training[:100_000].tolist())


def test_batches_repeat_with_the_seed_and_are_shifted_by_one():
    data = torch.arange(200, dtype=torch.uint8)
    (tokens, target), again = (next(demo.batches(data, torch.device("cpu"), seed)) for seed in (1, 1))
    assert torch.equal(tokens, again[0]) and torch.equal(target, tokens + 1)
    assert tokens.shape == (demo.BATCH, demo.LENGTH)


def test_sqnr():
    assert decibels(100.0, 1.0) == pytest.approx(20.0)
    assert decibels(1.0, 0.0) == float("inf")
    assert decibels(0.0, 1.0) == decibels(1.0, float("nan")) == -float("inf")


def test_recipes_command_lists_every_recipe(capsys):
    main(["recipes"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(recipes())
    assert "- x nvfp4" in lines[1 + recipes().index("nvfp4_weight_only")]


@pytest.mark.parametrize("name", recipes())
def test_recipes_command_prints_a_recipe_that_can_be_read_again(name, capsys, tmp_path):
    main(["recipes", name])
    file = tmp_path / "printed.toml"
    file.write_text(capsys.readouterr().out)
    assert Recipe.from_toml(file) == resolve(name)
    main(["recipes", str(file), "--json"])
    assert Recipe.from_dict(json.loads(capsys.readouterr().out)) == resolve(name)


def test_recipes_command_prints_every_recipe_as_json(capsys):
    main(["recipes", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert {name: Recipe.from_dict(fields) for name, fields in printed.items()} == {n: resolve(n) for n in recipes()}


@pytest.mark.parametrize("arguments", (["recipes"], ["recipes", "nvfp4", "--json"]))
def test_a_command_ends_quietly_where_nobody_reads_its_output(arguments, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        monkeypatch.setattr(sys, "stdout", unread)
        assert main(arguments) == 141


def test_a_command_runs_where_its_output_is_closed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)  # as Python sets it where file descriptor 1 is closed
    assert main(["recipes"]) == 0


def test_letters_that_an_output_does_not_have_are_escaped(monkeypatch):
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", ascii_only)
    monkeypatch.setattr(command_line, "recipe_table", lambda: "1 \N{MICRO SIGN}s")
    assert main(["recipes"]) == 0
    assert ascii_only.buffer.getvalue() == b"1 \\xb5s\n"


def test_a_script_that_nobody_reads_sees_the_error(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("raise BrokenPipeError('mine')")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(BrokenPipeError, match="mine"):
        main(["run", str(script)])


@pytest.mark.parametrize("arguments, message", [
    (["demo", "--recipe", "nvfp5"], "unknown recipe 'nvfp5'. Did you mean 'nvfp4'"),
    (["demo", "--recipe", "absent.toml"], "absent.toml"), (["demo", "--device", "mps"], "'mps' is not available here"),
    (["demo", "--steps", "0"], "expected a positive whole number"),
    (["run", "absent.py"], "there is no file 'absent.py'"), (["run"], "expected a script, or -m and a module"),
    (["run", "-m"], "expected a script, or -m and a module"),
    (["run", "-m", "absent.train", "--lr", "1"], "there is no module 'absent.train'"),
    (["recipes", "NVFP4"], "unknown recipe 'NVFP4'. Did you mean 'nvfp4'"),
    (["train"], "unknown command 'train'. Allowed: check-sm100, demo, "),
    (["recipies", "--json"], "unknown command 'recipies'. Did you mean 'recipes'? Allowed: "),
    (["check_sm100"], "Did you mean 'check-sm100'?"), ([], "commands:"),
])  # fmt: skip
def test_bad_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_bad_recipe_in_the_environment_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setenv("FP4COMPILE_RECIPE", "nvfp5")
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--steps", "1"])
    assert "FP4COMPILE_RECIPE=nvfp5: unknown recipe" in capsys.readouterr().err


def test_help_has_one_line_a_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    lines = capsys.readouterr().out.partition("commands:")[2].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("    ")] == [
        "demo", "run", "recipes", "explain", "check-sm100"
    ]  # fmt: skip
    assert all(len(line.split()) > 3 for line in lines if line.startswith("    "))


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"fp4compile {__version__}\n"
