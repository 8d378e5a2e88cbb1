"""Broken checkpoints: an error that names the file, at once, and the model is what it was."""

import shutil
from dataclasses import replace

import pytest
import torch

import fp4compile
from tests.helpers.hostile_files import FILE, KINDS, variants
from tests.helpers.work import at_most

MOST_CALLS = 200_000  # of functions, until a file is refused
VARIANTS = variants()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a whole checkpoint of each kind."""
    folders = {}
    for kind, (write, _) in KINDS.items():
        torch.manual_seed(0)
        folders[kind] = tmp_path_factory.mktemp(kind)
        write(folders[kind])
    return folders


def path_in(folder, kind):
    return folder / FILE if kind.startswith("packed") else folder


def snapshot(model):
    """Everything in a model that loading changes: classes of modules, tensors by identity and by their bytes."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    bits = [(name, id(t), t.dtype, t.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors]
    return [(name, type(module)) for name, module in model.named_modules()], bits


def problems(variant, folder, model):
    """What is wrong with how a broken checkpoint is refused; empty where nothing is."""
    path, before = path_in(folder, variant.kind), snapshot(model)
    try:
        with at_most(MOST_CALLS):
            fp4compile.load_packed(model, path)
    except (ValueError, OSError) as error:
        message = str(error)
        found = [] if str(folder) in message and variant.named in message else [f"message {message[:200]!r}"]
    except BaseException as error:
        found = [f"raised {type(error).__name__}: {str(error)[:100]}"]
    else:
        found = ["is loaded"]
    return found + ["the model changed"] * (snapshot(model) != before)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_checkpoints_load(kind, whole):
    model = KINDS[kind][1]()
    fp4compile.load_packed(model, path_in(whole[kind], kind))
    assert any(type(module).__name__.startswith("Packed") for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_broken_checkpoints_are_refused_at_once(kind, whole, tmp_path):
    wrong, model = {}, KINDS[kind][1]()
    for i, variant in enumerate(one for one in VARIANTS if one.kind == kind):
        folder = tmp_path / str(i)
        shutil.copytree(whole[kind], folder)
        variant.spoil(folder)
        found = problems(variant, folder, model)
        if found:
            wrong[variant.what] = found
            model = KINDS[kind][1]()
        shutil.rmtree(folder)
    assert wrong == {}


def test_the_check_sees_what_is_wrong(whole, tmp_path):
    """A whole checkpoint in the place of a broken one; an error that does not name the tensor."""
    variant = next(one for one in VARIANTS if one.what == "outer -1.0")
    shutil.copytree(whole["packed"], tmp_path / "copy")
    assert problems(variant, tmp_path / "copy", KINDS["packed"][1]()) == ["is loaded", "the model changed"]
    variant.spoil(tmp_path / "copy")
    assert problems(variant, tmp_path / "copy", KINDS["packed"][1]()) == []
    (found,) = problems(replace(variant, named="another"), tmp_path / "copy", KINDS["packed"][1]())
    assert found.startswith("message")
