"""What `Recipe.save` writes: whole or not at all, and refused where it was cut."""

import json
import os
import stat

import pytest

from fp4compile.formats import formats
from fp4compile.recipe import Recipe, Rule, named, resolve

RECIPES = {
    "trained": named("nvfp4_train"),
    "calibrated": named("nvfp4_static").replace(
        rules=[("*.router", "skip"), ("*lm_head", "quantize"), ("layers.0.*", "mxfp8")],
        static_scales={"layers.0.q": 0.25, "layers.1.q": 1 / 3, "layers.10.up proj": 1e-30, "": 2.0},
    ),
    "odd": Recipe(
        'ein "N\u00e4me"\\ \n\x7f#[x]', fprop_w=formats.BlockFormat("e2m1", (1, 32), "e8m0", None, "ceil"),
        rules=[Rule("complete = true\n[a]", "skip")], num_blocks=3, skip_lm_head=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, ending", [(name, "toml") for name in RECIPES] + [("odd", "json")])
def test_a_file_that_was_cut_anywhere_is_refused(name, ending, tmp_path):
    path = tmp_path / f"saved.{ending}"
    RECIPES[name].save(path)
    written = path.read_bytes()
    assert resolve(path) == RECIPES[name]
    path.write_bytes(written[:-1])  # without its last line's end
    assert resolve(path) == RECIPES[name]
    for length in range(len(written) - 1):
        path.write_bytes(written[:length])
        with pytest.raises(ValueError, match=f"saved.{ending}"):
            resolve(path)


def test_a_saved_file_may_be_edited(tmp_path):
    path = tmp_path / "saved.toml"
    saved = RECIPES["calibrated"]
    saved.save(path)
    text = path.read_text()
    longer = text.replace("min_n = 32", "min_n = 64 # wider").replace("saved_by", "# mine\nsaved_by")
    path.write_text(longer + "# the end\n")
    assert resolve(path) == saved.replace(min_n=64)
    without = [line for line in text.splitlines() if "saved_by" not in line]
    for lines in (without, without[:-1]):  # as the message says
        path.write_text("\r\n".join(lines))
        assert resolve(path) == saved
    path.write_text(f"[other]\nsteps = 3\n[fp4compile]\n{text}")
    assert resolve(path) == saved
    path.write_text(f"[fp4compile]\n{text.replace('complete = true', '')}[other]\ncomplete = true")
    with pytest.raises(ValueError, match="lacks its last line"):
        resolve(path)


@pytest.mark.parametrize("text", ["recipe = 'mxfp8'\ncomplete = false", "recipe = 'mxfp8'\ncomplete = 1"])
def test_a_key_of_ones_own_is_no_end(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match="unknown recipe field 'complete'"):
        resolve(path)


def test_what_is_no_file_of_a_recipe(tmp_path):
    with pytest.raises(ValueError, match="path='recipe.yaml': expected a name that ends in .toml or .json"):
        RECIPES["trained"].save("recipe.yaml")
    (tmp_path / "bad.json").write_text(json.dumps({"min_k": "1"}))
    with pytest.raises(TypeError, match="bad.json: min_k: expected an int"):
        resolve(tmp_path / "bad.json")


@pytest.mark.parametrize("ending, deep", [("toml", "a = " + 100_000 * "["), ("json", 100_000 * "[")])
def test_deep_nesting_is_no_recipe(ending, deep, tmp_path):
    path = tmp_path / f"deep.{ending}"
    path.write_text(deep)
    with pytest.raises(ValueError, match=f"deep.{ending} is not {ending.upper()}"):
        resolve(path)


def test_what_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "saved.toml"
    RECIPES["trained"].save(path)
    path.chmod(0o640)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            RECIPES["calibrated"].save(path)
    assert resolve(path) == RECIPES["trained"] and os.listdir(tmp_path) == ["saved.toml"]
    RECIPES["calibrated"].save(path)
    assert resolve(path) == RECIPES["calibrated"] and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_files_of_earlier_versions_are_read(tmp_path):
    path = tmp_path / "earlier.toml"
    fields = {name: value for name, value in RECIPES["calibrated"].to_dict().items() if value not in (None, [])}
    scales, rules = fields.pop("static_scales"), fields.pop("rules")
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items()]
    lines += [f"rules = {[list(rule.values()) for rule in rules]}", "", "[static_scales]"]
    path.write_text("\n".join((*lines, *(f'"{name}" = {value}' for name, value in scales.items()))) + "\n")
    assert resolve(path) == RECIPES["calibrated"]
