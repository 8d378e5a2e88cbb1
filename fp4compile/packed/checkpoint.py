"""Checkpoints as directories of safetensors files: one file, or shards that an index lists, beside configurations.

This is the form in which models are published. What the tensors mean, `published` knows.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint.

    path: of the directory or file, for messages. tensors: by name. configs: the JSON objects beside the tensors, by the
    name of their file.
    """

    path: Path
    tensors: dict[str, torch.Tensor]
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is, as a file of `save_packed` would have it.

    layers, experts: the states of packed linear layers by name, and of packed experts by the name of their parameter,
    as `get_extra_state` gives them. tensors: all tensors, under the names of a packed model's.
    """

    layers: dict[str, dict] = field(default_factory=dict)
    experts: dict[str, dict] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def read_checkpoint(path: Path, configs: tuple[str, ...]) -> Checkpoint:
    """The checkpoint in a directory, or the one whose tensors are a file. configs: names of files that it may have.

    Raises OSError for what cannot be read; ValueError for a directory without a checkpoint, for files that are
    truncated or no JSON objects, and for an index that names a shard or a tensor that is not there.
    """
    folder = path if path.is_dir() else path.parent
    found = {name: _json(folder / name) for name in configs if (folder / name).is_file()}
    tensors: dict[str, torch.Tensor] = {}
    for file, names in _files(path):
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
    """The tensors of a safetensors file. Raises ValueError, naming the file, for one that is no whole such file."""
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; raises as `read_tensors` does."""
    with _opened(file) as opened:
        return opened.metadata() or {}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error


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
    index = _json(path / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise ValueError(f"{path / INDEX}: its weight_map does not give a file for each tensor")
    shards: dict[str, list[str]] = {}
    for name, shard in index.items():
        shards.setdefault(shard, []).append(name)
    for shard, names in shards.items():
        if Path(shard).name != shard:
            raise ValueError(f"{path / INDEX}: shard {shard!r} of tensor {names[0]!r} is not a file of the directory")
        if not (path / shard).is_file():
            raise ValueError(f"{path / INDEX}: shard {shard!r} of tensor {names[0]!r} is missing")
        yield path / shard, names


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def write_checkpoint(folder: Path, checkpoint: Checkpoint, shard_bytes: int) -> None:
    """Write the tensors, in files of at most `shard_bytes` bytes each where one tensor is not larger, and the configs.

    Raises ValueError where the directory has safetensors files already, OSError where it cannot be written.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: has safetensors files already; expected a directory without any")
    shards = list(_cut(checkpoint.tensors, shard_bytes))
    names = [_SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, {"format": "pt"})
    texts = dict(checkpoint.configs)
    if len(shards) > 1:
        weight_map = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        size = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": weight_map}
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


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
