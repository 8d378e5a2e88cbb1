"""Recipes from TOML files, the environment and command lines."""

import argparse
from importlib.metadata import EntryPoint

import pytest
import torch
from torch._dynamo.backends.registry import register_backend

import fp4compile
from fp4compile.recipe import Recipe, Rule, add_arguments, named, resolve


@pytest.fixture(autouse=True)
def no_recipe_in_the_environment(monkeypatch):
    monkeypatch.delenv("FP4COMPILE_RECIPE", raising=False)


def parse(*arguments: str) -> Recipe | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Recipe.from_args(parser.parse_args(arguments))


def test_resolve_takes_every_form(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('recipe = "mxfp8"\nmin_n = 64\n')
    expected = named("mxfp8").replace(min_n=64)
    for form in (expected, {"recipe": "mxfp8", "min_n": 64}, file, str(file)):
        assert resolve(form) == expected
    assert resolve("mxfp8", min_n=64) == expected
    assert resolve() == named("nvfp4")
    with pytest.raises(TypeError, match="recipe: expected a name.*got int"):
        resolve(4)


def test_toml_says_all_that_a_dict_says(tmp_path):
    file = tmp_path / "pyproject.toml"
    file.write_text(
        """
        [fp4compile]
        recipe = "nvfp4_static"
        name = "careful"
        dgrad_dy = "none"
        skip_lm_head = false
        rules = [["*.router", "skip"], {pattern = "*.down", action = "mxfp8"}]
        [fp4compile.static_scales]
        "layers.0" = 0.5
        [other]
        min_n = 7
        """
    )
    assert Recipe.from_toml(file) == named("nvfp4_static").replace(
        name="careful", dgrad_dy=None, skip_lm_head=False, rules=(Rule("*.router", "skip"), Rule("*.down", "mxfp8")),
        static_scales={"layers.0": 0.5},
    )  # fmt: skip


def test_bad_toml(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("recipe = mxfp8")
    with pytest.raises(ValueError, match="bad.toml is not TOML"):
        resolve(file)
    with pytest.raises(FileNotFoundError):
        resolve("absent.toml")
    file.write_bytes(b'name = "\xff"')
    with pytest.raises(ValueError, match="bad.toml is not TOML"):
        resolve(file)


@pytest.mark.parametrize("text", ["", "# recipe = 'mxfp8'", "[fp4compile]", "[fp4compile]\n[model]\nwidth = 64"])
def test_toml_that_says_nothing(tmp_path, text):
    file = tmp_path / "empty.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match="empty.toml has no recipe in it"):
        resolve(file)


@pytest.mark.parametrize("beside, named_in_message", [
    ("min_n = 64", "min_n"), ('recipe = "mxfp4"\nskip_first_blocks = 1', "recipe, skip_first_blocks"),
    ('rules = [["*", "skip"]]\nname = "run 7"', "rules"),
])  # fmt: skip
def test_toml_fields_beside_the_table(tmp_path, beside, named_in_message):
    file = tmp_path / "both.toml"
    file.write_text(f'{beside}\n[fp4compile]\nrecipe = "mxfp8"\n')
    with pytest.raises(ValueError, match=f"both.toml: {named_in_message} at top level, beside"):
        resolve(file)


def test_other_settings_beside_the_table(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('name = "run 7"\nsteps = 3\n[fp4compile]\nrecipe = "mxfp8"\n[model]\nmin_n = 64\n')
    assert resolve(file) == named("mxfp8")


@pytest.mark.parametrize("text, error, message", [
    ("min_m = 1.5", TypeError, "wrong.toml: min_m: expected an int"),
    ("fp4compile = 'mxfp8'", TypeError, "wrong.toml: recipe: expected a dict of fields, got str"),
    ("[tool.fp4compile]\nrecipe = 'mxfp8'", ValueError, "wrong.toml: unknown recipe field 'tool'"),
    ("recipe = 'mxpf8'", ValueError, "wrong.toml: unknown recipe 'mxpf8'"),
])  # fmt: skip
def test_errors_in_toml_name_the_file(tmp_path, text, error, message):
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(error, match=message):
        resolve(file)


def test_environment(monkeypatch, tmp_path):
    assert Recipe.from_env() is None
    monkeypatch.setenv("FP4COMPILE_RECIPE", "mxfp4")
    assert Recipe.from_env() == resolve() == parse() == named("mxfp4")
    assert resolve("mxfp8") == parse("--fp4compile-recipe", "mxfp8") == named("mxfp8")
    file = tmp_path / "r.toml"
    file.write_text("min_n = 64")
    monkeypatch.setenv("FP4COMPILE_RECIPE", str(file))
    assert resolve() == Recipe(min_n=64)
    monkeypatch.setenv("FP4COMPILE_RECIPE", "mxfp5")
    with pytest.raises(ValueError, match="FP4COMPILE_RECIPE=mxfp5: unknown recipe 'mxfp5'"):
        resolve()
    monkeypatch.setenv("FP4COMPILE_RECIPE", str(tmp_path / "absent.toml"))
    with pytest.raises(FileNotFoundError, match="FP4COMPILE_RECIPE=.*absent.toml"):
        resolve()
    monkeypatch.setenv("FP4COMPILE_RECIPE", "")
    assert Recipe.from_env() is None


def test_backend_by_name_has_one_recipe_a_process(monkeypatch):
    """Dynamo keeps what it has loaded for a name, and gives the graph of one layer to another of its class."""
    monkeypatch.setenv("FP4COMPILE_RECIPE", "mxfp8")
    entry = EntryPoint("fp4compile", "fp4compile.registration:default", "torch_dynamo_backends")
    register_backend(entry.load(), name="fp4compile_of_the_environment")
    layers = [torch.nn.Linear(64, 64) for _ in range(3)]
    first, second, third = (torch.compile(layer, backend="fp4compile_of_the_environment") for layer in layers)
    x = torch.randn(4, 64)
    with torch.no_grad():
        y = first(x)
        assert torch.equal(y, torch.compile(layers[0], backend=fp4compile.backend("mxfp8"))(x))
        assert not torch.equal(y, torch.compile(layers[0], backend=fp4compile.backend("mxfp4"))(x))
        for changed in ("mxfp4", None):
            if changed is None:
                monkeypatch.delenv("FP4COMPILE_RECIPE")
            else:
                monkeypatch.setenv("FP4COMPILE_RECIPE", changed)
            for compiled in (second, torch.compile(layers[1], backend="fp4compile_of_the_environment")):
                with pytest.raises(Exception, match=f"FP4COMPILE_RECIPE was 'mxfp8' .* and is {changed!r} now"):
                    compiled(x)
            assert torch.equal(first(x), y), "what was compiled before runs on"
        monkeypatch.setenv("FP4COMPILE_RECIPE", "mxfp8")
        assert third(x).shape == y.shape


def test_arguments():
    assert parse() is None
    chosen = parse(
        *("--fp4compile-recipe", "mxfp8", "--fp4compile-skip", "*.gate", "--fp4compile-skip", "*.router"),
        *("--fp4compile-skip-first", "1", "--fp4compile-skip-last", "0", "--fp4compile-lm-head"),
        *("--fp4compile-set", "min_n=64", "--fp4compile-set", 'name="x"', "--fp4compile-set", "wgrad_x = none"),
    )
    assert chosen == named("mxfp8").replace(
        rules=(Rule("*.gate", "skip"), Rule("*.router", "skip")),
        skip_first_blocks=1,
        skip_lm_head=False,
        min_n=64,
        name="x",
        wgrad_x=None,
    )


def test_skip_arguments_come_before_the_rules_of_the_recipe(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('recipe = "mxfp8"\nrules = [["*", "mxfp4"]]')
    chosen = parse("--fp4compile-recipe", str(file), "--fp4compile-skip", "*.gate")
    assert chosen.rules == (Rule("*.gate", "skip"), Rule("*", "mxfp4"))
    again = parse(
        *("--fp4compile-recipe", str(file), "--fp4compile-skip", "*.gate"),
        *("--fp4compile-set", 'rules = [["*.up", "mxfp8"]]'),
    )
    assert again.rules == (Rule("*.gate", "skip"), Rule("*.up", "mxfp8"))


@pytest.mark.parametrize(
    "setting, field, value",
    [
        ("dgrad_w=e2m1:1x16:e4m3:-:torchao", "dgrad_w", "nvfp4_one_level"),
        ("fprop_w = none", "fprop_w", None),
        ("rules=[['a', 'skip'],\n['b', 'skip']]", "rules", (Rule("a", "skip"), Rule("b", "skip"))),
        ("name='a=1, b=2'", "name", "a=1, b=2"),
        ("min_n=64 # wide enough", "min_n", 64),
    ],
)
def test_settings(setting, field, value):
    chosen = parse("--fp4compile-recipe", "mxfp8", "--fp4compile-set", "dgrad_dy=none", "--fp4compile-set", setting)
    assert getattr(chosen, field) == value


@pytest.mark.parametrize(
    "setting",
    ["min_n=1, min_k=64", "min_n=1\nmin_k=64", "min_n=1\n[fp4compile]", "name=a, min_n=64", "name=a min_n=64", "name=",
     "name=two words", "name=a\nmin_n=64"],
)  # fmt: skip
def test_one_setting_an_option(setting):
    with pytest.raises(ValueError, match="neither one TOML value nor one word"):
        parse("--fp4compile-recipe", "mxfp8", "--fp4compile-set", setting)


@pytest.mark.parametrize("options, field", [
    (("--fp4compile-set", "min_n=64", "--fp4compile-set", "min_n=32"), "min_n"),
    (("--fp4compile-lm-head", "--fp4compile-set", "skip_lm_head=true"), "skip_lm_head"),
    (("--fp4compile-set", "skip_first_blocks=1", "--fp4compile-skip-first", "2"), "skip_first_blocks"),
    (("--fp4compile-skip-last", "0", "--fp4compile-set", "skip_last_blocks=2"), "skip_last_blocks"),
])  # fmt: skip
def test_a_field_is_set_once(options, field):
    with pytest.raises(ValueError, match=f"{field} is set by another option already"):
        parse("--fp4compile-recipe", "mxfp8", *options)


def test_wrong_rules_beside_skips_name_the_field():
    with pytest.raises(TypeError, match="rules: expected a list or a tuple, got str"):
        parse("--fp4compile-recipe", "mxfp8", "--fp4compile-skip", "*.gate", "--fp4compile-set", "rules=skip")


@pytest.mark.parametrize("name, message", [
    ("nvfp5", "unknown recipe 'nvfp5'. Did you mean 'nvfp4'? Allowed: "), ("", "unknown recipe ''"),
    ("absent.toml", "unknown recipe 'absent.toml'. Allowed: "),
])  # fmt: skip
def test_an_unknown_recipe_is_a_usage_error(name, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse("--fp4compile-recipe", name)
    said = " ".join(capsys.readouterr().err.split())
    assert f"argument --fp4compile-recipe: {message}" in said and said.endswith(", and .toml and .json files")
    assert all(f" {each}," in said.split("Allowed:")[1] for each in fp4compile.recipes())


def test_arguments_of_another_parser():
    with pytest.raises(TypeError, match="args: expected what a parser with fp4compile.add_arguments has parsed"):
        Recipe.from_args(argparse.Namespace(steps=3))


@pytest.mark.parametrize("arguments, message", [
    (("--fp4compile-skip", "*.gate"), "options without --fp4compile-recipe"),
    (("--fp4compile-skip-first", "1"), "options without --fp4compile-recipe"),
    (("--fp4compile-recipe", "mxfp8", "--fp4compile-set", "min_n"), "expected FIELD=VALUE"),
    (("--fp4compile-recipe", "mxfp8", "--fp4compile-set", "min_q=1"), "unknown recipe field 'min_q'"),
    (("--fp4compile-recipe", "mxfp8", "--fp4compile-set", "recipe=mxfp4"), "unknown recipe field 'recipe'"),
    (("--fp4compile-recipe", "mxfp8", "--fp4compile-skip", ""), "pattern '' is empty"),
    (("--fp4compile-recipe", "mxfp8", "--fp4compile-skip-first", "-1"), "skip_first_blocks=-1"),
])  # fmt: skip
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(*arguments)
