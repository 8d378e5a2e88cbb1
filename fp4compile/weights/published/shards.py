"""Checkpoints: directories of configurations and one safetensors file, or shards that an index lists."""

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fp4compile.recipe.atomic_file import errors_naming, scratch_folder

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint. path: for messages. tensors, configs (JSON objects): by their names."""

    path: Path
    tensors: dict[str, torch.Tensor]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The directory of the configurations."""
        return self.path if self.path.is_dir() else self.path.parent


@dataclass(frozen=True)
class Contents:
    """A checkpoint in the form of a `save_packed` file: descriptions of layers and experts, and all tensors.

    dequantised: the names of layers whose weight in `tensors` is in high precision, and was not in the checkpoint.
    """

    layers: dict[str, dict] = field(default_factory=dict)
    experts: dict[str, dict] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    dequantised: list[str] = field(default_factory=list)


def read_checkpoint(path: Path, configs: tuple[str, ...], files: Iterable[str | Path] = ()) -> Checkpoint:
    """The checkpoint at a directory or a safetensors file. configs: names of its possible configuration files.

    files: its safetensors files, where others may lie beside them; by default those that the directory's index names.
    Raises OSError for a path that cannot be read, ValueError for broken files, and for missing shards and tensors.
    """
    folder = path if path.is_dir() else path.parent
    found = {name: read_json(folder / name) for name in configs if os.path.isfile(folder / name)}
    tensors: dict[str, torch.Tensor] = {}
    for file, names in [(Path(file), list[str]()) for file in files] or _files(path):
        read = read_tensors(file)
        absent = next((name for name in names if name not in read), None)
        if absent is not None:
            raise ValueError(f"{folder / INDEX}: tensor {absent!r} should be in {file.name!r}, which does not have it")
        twice = next((name for name in read if name in tensors), None)
        if twice is not None:
            raise ValueError(f"{path}: tensor {twice!r} is in several files")
        tensors |= read
    return Checkpoint(path, tensors, found)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises ValueError, naming the file, for a broken or truncated file."""
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file. Raises ValueError, naming the file, for a broken or truncated file."""
    with _opened(file) as opened:
        return opened.metadata() or {}


def read_dtypes(file: Path) -> dict[str, str]:
    """The dtypes of a safetensors file's tensors, as the file names them. Raises ValueError for a broken file."""
    with _opened(file) as opened:
        return {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (not a dict)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except OSError:
        raise
    except (SafetensorError, RuntimeError, TypeError, ValueError) as error:  # torch also raises, for bad sizes
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error


@contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """A context in which messages of ValueErrors begin with the path of a file or directory."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for text that is no JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"nested too deeply: {error}") from None


def _files(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """The files of a checkpoint, and the names of the tensors that each must have."""
    if not path.is_dir():
        yield path, []
    elif (path / INDEX).is_file():
        yield from _shards(path)
    else:
        files = [path / _SINGLE] if (path / _SINGLE).is_file() else sorted(path.glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(f"{path}: expected {INDEX}, {_SINGLE} or one other safetensors file, got {len(files)}")
        yield files[0], []


def _shards(path: Path) -> Iterator[tuple[Path, list[str]]]:
    index = read_json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise ValueError(f"{path / INDEX}: its weight_map does not give a file for each tensor")
    shards: dict[str, list[str]] = {}
    for name, shard in index.items():
        shards.setdefault(shard, []).append(name)
    for shard, names in shards.items():
        if Path(shard).name != shard:
            raise ValueError(f"{path / INDEX}: shard {shard!r} of tensor {names[0]!r} is not a file of the directory")
        if not os.path.isfile(path / shard):  # False also for names that no file can have
            raise ValueError(f"{path / INDEX}: shard {shard!r} of tensor {names[0]!r} is missing")
        yield path / shard, names


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError for another content."""
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


# ---------------------------------------------------------------- writing


def write_tensors(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises OSError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, file, metadata)
        _sort_metadata(file)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        code = errno.EIO if number is None else int(number[1])
        raise OSError(code, str(error) if number is None else os.strerror(code), str(file)) from error


def _sort_metadata(file: Path) -> None:
    """Sort a safetensors file's metadata, so that equal models have equal files: safetensors writes any order."""
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header = {"__metadata__": dict(sorted(header.pop("__metadata__").items())), **header}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:
            opened.seek(8)
            opened.write(text.ljust(size))


def write_checkpoint(folder: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    """Write the configs, and the tensors in files of at most `shard_bytes` bytes, or of one larger tensor.

    All files are written in a scratch folder and then moved; an aborted attempt's are removed. Raises ValueError if the
    directory has safetensors files already, OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with errors_naming(folder), scratch_folder(folder / "checkpoint", undo=_take_back) as scratch:
        _check_empty(folder)
        names = _write_all(scratch, checkpoint, shard_bytes)
        _check_empty(folder)
        _publish(scratch, names)


def _check_empty(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: has safetensors files already; expected a directory without any")


def _write_all(folder: Path, checkpoint: Checkpoint, shard_bytes: int) -> list[str]:
    """Write the files of a checkpoint; returns their names, in the order in which they may appear to readers."""
    shards = list(_cut(checkpoint.tensors, shard_bytes))
    names = [_SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        write_tensors(shard, folder / name, {"format": "pt"})
    texts = dict(checkpoint.configs)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return [*names, *texts]


# ---------------------------------------------------------------- publishing the written files, or removing them

_MOVED = "moved"  # the file in a scratch folder with names and times of the files that are moved out of it


def _publish(scratch: Path, names: list[str]) -> None:
    """Move files from a scratch folder to its parent: all of them, or none if that fails."""
    new = scratch / "new file"  # with the permissions of a new file, which files of safetensors lack
    new.touch()
    mode = new.stat().st_mode
    for name in names:
        (scratch / name).chmod(mode)
    written = {name: (scratch / name).stat().st_mtime_ns for name in names}
    (scratch / _MOVED).write_text(json.dumps(written), encoding="utf-8")
    try:
        for name in names:
            os.replace(scratch / name, scratch.parent / name)
    except BaseException:
        _take_back(scratch)
        raise
    (scratch / _MOVED).unlink()


def _take_back(scratch: Path) -> None:
    """Remove the files that were moved out of a scratch folder, unless they were changed since."""
    try:
        written = read_json(scratch / _MOVED)
    except (FileNotFoundError, ValueError):  # the writer ended before it had moved any
        return
    for name, time in written.items():
        file = scratch.parent / name
        mine = file.name == name and not (scratch / name).exists()
        if mine and file.is_file() and file.stat().st_mtime_ns == time:
            file.unlink()


def _cut(tensors: dict[str, torch.Tensor], limit: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
