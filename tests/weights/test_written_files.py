"""Packed files and exports that are not finished: killed, out of space, aborted. The next try is as if nothing was."""

import errno
import os
import resource
import shutil
import signal
import stat
import time
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch

import fp4compile
from tests.helpers.packed_models import STATIC, Net, run, write_packed

SHARDS = {"max_shard_size": 9000}


def packed(recipe="nvfp4_static"):
    model = Net()
    scales = {"static_scales": STATIC} if recipe == "nvfp4_static" else {}
    fp4compile.pack_(model, fp4compile.Recipe.from_dict({"recipe": recipe, **scales}))
    return model


def save(model, path):
    fp4compile.save_packed(model, path / "packed.safetensors")


def export(model, path):
    fp4compile.export_packed(model, path, **SHARDS)


def loads(path, write, model):
    fresh = Net()
    fp4compile.load_packed(fresh, path / "packed.safetensors" if write is save else path)
    return torch.equal(run(fresh), run(model))


def names(path):
    return sorted(os.listdir(path))


@pytest.fixture
def whole(tmp_path):
    """write -> the names of the files that it leaves when nothing goes wrong."""
    found = {}
    for write in (save, export):
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(packed(), folder)
        found[write] = names(folder)
        shutil.rmtree(folder)
    assert found[save] == ["packed.safetensors"] and len(found[export]) == 5
    return found


def killed(write, path, module, name, call):
    """Write in another process, and kill that where it has made the nth call of a function; for -n, is about to."""
    model = packed()
    child = os.fork()
    if child == 0:
        calls, original = [], getattr(module, name)

        def stops(*args, **kwargs):
            calls.append(None)
            if len(calls) != abs(call):
                return original(*args, **kwargs)
            if call > 0:
                original(*args, **kwargs)
            (path / "reached").touch()
            time.sleep(60)

        setattr(module, name, stops)
        write(model, path)
        os._exit(0)
    while not (path / "reached").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "the write ended before it was killed"
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (path / "reached").unlink()


@pytest.mark.parametrize("write, module, name, call", [
    (save, safetensors.torch, "save_file", -1), (save, safetensors.torch, "save_file", 1), (save, os, "replace", -1),
    (export, safetensors.torch, "save_file", 1), (export, safetensors.torch, "save_file", 2),
    (export, os, "replace", -1), (export, os, "replace", 1), (export, os, "replace", 3), (export, os, "replace", 5),
])  # fmt: skip
def test_what_a_killed_write_left_is_gone_after_the_next(write, module, name, call, tmp_path, whole):
    killed(write, tmp_path, module, name, call)
    assert any(name.endswith(".unfinished") for name in names(tmp_path))
    model = packed()
    write(model, tmp_path)
    assert names(tmp_path) == whole[write] and loads(tmp_path, write, model)


def test_an_aborted_export_is_refused_by_readers(tmp_path):
    killed(export, tmp_path, os, "replace", 1)
    with pytest.raises(ValueError, match=str(tmp_path)):
        fp4compile.load_packed(Net(), tmp_path)


def test_what_was_put_there_since_is_not_removed(tmp_path):
    """Under the name of a file that the aborted export had moved."""
    killed(export, tmp_path, os, "replace", 1)
    (first,) = tmp_path.glob("*.safetensors")
    first.unlink()
    first.write_bytes(b"of somebody else")
    with pytest.raises(ValueError, match="has safetensors files already"):
        export(packed(), tmp_path)
    assert names(tmp_path) == [first.name] and first.read_bytes() == b"of somebody else"


def test_a_finished_export_is_not_replaced(tmp_path, whole):
    export(packed(), tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with pytest.raises(ValueError, match="has safetensors files already"):
        export(packed(), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


@contextmanager
def full():
    """Files can have 5000 bytes, as if the disk were full then. No fixture: pytest may write to a file."""
    old, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)


@pytest.mark.parametrize("write", [save, export])
def test_a_file_that_becomes_too_large_is_an_os_error(write, tmp_path):
    with pytest.raises(OSError) as caught, full():
        write(packed(), tmp_path)
    assert caught.value.errno == errno.EFBIG and str(tmp_path) in str(caught.value)
    assert "unfinished" not in str(caught.value) and names(tmp_path) == []


@pytest.mark.parametrize("write", [save, export])
@pytest.mark.parametrize("text, code", [
    ("Error while serializing: I/O error: No space left on device (os error 28)", errno.ENOSPC),
    ("something else", errno.EIO),
])  # fmt: skip
def test_errors_of_safetensors_are_os_errors(write, text, code, tmp_path, monkeypatch):
    def fails(tensors, filename, metadata):
        raise safetensors.SafetensorError(text)

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError) as caught:
        write(packed(), tmp_path)
    assert caught.value.errno == code and str(tmp_path) in str(caught.value) and names(tmp_path) == []


def test_an_export_that_fails_late_takes_back_what_it_moved(tmp_path, monkeypatch):
    replace, calls = os.replace, []

    def fails(source, target):
        calls.append(target)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="No space left"):
        export(packed(), tmp_path)
    assert len(calls) == 3 and names(tmp_path) == []


def test_exported_files_are_as_readable_as_others(tmp_path):
    export(packed(), tmp_path)
    (tmp_path / "plain").touch()
    assert len({stat.S_IMODE((tmp_path / name).stat().st_mode) for name in names(tmp_path)}) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "write, recipe", [(save, "nvfp4"), (save, "mxfp8"), (export, "mxfp8"), (save, "float8_rowwise")]
)
def test_weights_that_were_not_finite_are_not_written(write, recipe, value, tmp_path):
    model = Net()
    model.layers[1].weight.data[3, 5] = value
    fp4compile.pack_(model, recipe)
    with pytest.raises(ValueError, match=r"model: tensor 'layers.1.weight_\w+': .*its weight was not finite"):
        write(model, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "mxfp4", "float8_rowwise", {"fprop_w": "nvfp4_rowwise"}])
@pytest.mark.parametrize("amax", [0.0, 1e-45, 1e-40, 1e-37, 3e38])
def test_weights_of_any_size_are_written_and_read(recipe, amax, tmp_path):
    """The global scale of a tiny weight is denormal, and a weight of zeros has 1."""
    model, fresh = Net(), Net()
    model.layers[1].weight.data.clamp_(-1 / 16, 1 / 16).mul_(16).mul_(amax)
    write_packed(model, tmp_path / "packed", recipe)
    fp4compile.load_packed(fresh, tmp_path / "packed")
    assert torch.equal(fresh.layers[1].weight, model.layers[1].weight)
