"""Checkpoints with packed weights that other tools wrote: one reader for each layout, see `READERS`.

Entry: `checkpoint_at(path)`, then `read`. A checkpoint is a safetensors file, or a folder with one
(`model.safetensors`) or with several and their index (`model.safetensors.index.json`).

To read another layout, write a `Reader` and add it to `READERS`. Its tensors get the names that files of `save_packed`
have; what such files say in their metadata, it gives as states.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile import formats
from fp4compile.passes.find import packed_name
from fp4compile.recipe import Recipe, named

METADATA = "fp4compile"  # the key, in a file's metadata, of what `save_packed` writes there
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_BLOCKS, _SCALES = "_blocks", "_scales"

# The format of the activation that a layer of that name multiplies, by its name; None leaves it as it comes.
Activation = Callable[[str], str | None]


@dataclass(frozen=True)
class Contents:
    """What a reader makes of a checkpoint.

    layers, experts: the states of packed linear layers by name, and of packed experts by the name of their parameter,
    as `get_extra_state` gives them. tensors: all tensors, under the names of a packed model's.
    """

    layers: dict[str, dict] = field(default_factory=dict)
    experts: dict[str, dict] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Reader:
    """A layout. serves: whether tensors of these names are in it. read: raises ValueError for tensors that are not."""

    name: str
    serves: Callable[[set[str]], bool]
    read: Callable[[dict[str, torch.Tensor], Activation], Contents]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a layout that is read. files: that of each tensor."""

    path: Path
    files: Mapping[str, Path]
    reader: Reader


def checkpoint_at(path: str | PathLike) -> Checkpoint | None:
    """The checkpoint at a path; None for a file of `save_packed`, and for one that is in no layout of `READERS`.

    Raises ValueError for a folder without a checkpoint in one of these layouts, OSError for what cannot be read.
    """
    place = Path(path)
    if not place.is_dir() and METADATA in _metadata(place):
        return None
    files = _files(place)
    reader = next((reader for reader in READERS if reader.serves(set(files))), None)
    if reader is None and place.is_dir():
        known = ", ".join(reader.name for reader in READERS)
        raise ValueError(f"{path}: no packed weights in a layout that is read; allowed in folders are: {known}")
    return None if reader is None else Checkpoint(place, files, reader)


def read(checkpoint: Checkpoint, model: nn.Module, recipe: Recipe | None) -> Contents:
    """The contents of a checkpoint, for a model. recipe: see `load_packed`.

    A tensor that the checkpoint lacks because it is another one of the model too is that one.

    Raises ValueError where the checkpoint is not whole, or the recipe's formats do not go with its own.
    """
    tensors = _tensors(checkpoint)
    try:
        contents = checkpoint.reader.read(tensors, _activation_of(recipe))
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {error}") from error
    for state in contents.experts.values():
        _check_formats(state["activation"], state["weight"])
    held = model.state_dict(keep_vars=True)
    names: dict[int, str] = {id(held[name]): name for name in contents.tensors if name in held}
    for name, tensor in held.items():
        if name not in contents.tensors and id(tensor) in names:
            contents.tensors[name] = contents.tensors[names[id(tensor)]]
    return contents


def _files(place: Path) -> dict[str, Path]:
    """The names of all tensors, and the file of each."""
    if not place.is_dir():
        return dict.fromkeys(_names_in(place), place)
    index = place / _INDEX
    if not index.exists():
        single = place / _SINGLE
        if not single.exists():
            raise ValueError(f"{place}: neither {_INDEX} nor {_SINGLE} is in the folder")
        return dict.fromkeys(_names_in(single), single)
    try:
        entries = json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()
        files = {str(name): place / file for name, file in entries}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{index}: is no index of a checkpoint") from None
    for file in {*files.values()}:
        if not file.exists():
            raise ValueError(f"{index}: names {file.name!r}, which is not there")
    return files


def _names_in(file: Path) -> list[str]:
    with _opened(file) as opened:
        return list(opened.keys())


def _metadata(file: Path) -> dict[str, str]:
    with _opened(file) as opened:
        return opened.metadata() or {}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file. Raises ValueError for one that is not whole, or lacks a tensor that is asked for."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error


def _tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in dict.fromkeys(checkpoint.files.values()):
        names = [name for name, place in checkpoint.files.items() if place == file]
        with _opened(file) as opened:
            found |= {name: opened.get_tensor(name) for name in names}
    return found


def _activation_of(recipe: Recipe | None) -> Activation:
    """The recipe's format of activations (fprop_x) for a layer, by its rules; None without a recipe."""

    def of(name: str) -> str | None:
        rule = None if recipe is None else recipe.rule_for(name)
        if recipe is None or (rule is not None and rule.action == "skip"):
            return None
        return (recipe if rule is None or rule.action == "quantize" else named(rule.action)).fprop_x

    return of


def _check_formats(activation: str | None, weight: str) -> None:
    """Raises ValueError where the products of experts cannot have these formats."""
    if activation is not None:
        fmt = formats.get(activation)
        if fmt.square or not formats.compatible(fmt, formats.get(weight)):
            raise ValueError(f"recipe: its activations in {activation} cannot be multiplied with weights in {weight}")


# ---------------------------------------------------------------- experts in MXFP4, as gpt-oss was published


def _has_mxfp4_experts(names: set[str]) -> bool:
    return any(name.endswith(_BLOCKS) and name.removesuffix(_BLOCKS) + _SCALES in names for name in names)


def _read_mxfp4_experts(tensors: dict[str, torch.Tensor], activation: Activation) -> Contents:
    """Experts as `*_blocks`, uint8 [E, N, K / 32, 16], two codes a byte, and `*_scales`, the E8M0 bytes [E, N, K / 32].

    The model's parameter is [E, K, N]. All other tensors are as they are.
    """
    contents = Contents(tensors=dict(tensors))
    for name in tensors:
        if not name.endswith(_BLOCKS):
            continue
        weight = name.removesuffix(_BLOCKS)
        if weight + _SCALES not in tensors:
            raise ValueError(f"tensor {weight + _SCALES!r} is missing")
        blocks, scales = contents.tensors.pop(name), contents.tensors.pop(weight + _SCALES)
        _check_mxfp4(weight, blocks, scales)
        experts, outer, count, _ = blocks.shape
        packed = packed_name(weight)
        contents.tensors[f"{packed}.weight_data"] = blocks.reshape(experts, outer, -1)
        contents.tensors[f"{packed}.weight_scales"] = scales.view(torch.float8_e8m0fnu)
        contents.experts[weight] = {
            "weight": "mxfp4", "activation": activation(weight), "activation_outer": None,
            "in_features": 32 * count, "out_features": outer, "experts": experts, "in_first": True,
        }  # fmt: skip
    return contents


def _check_mxfp4(weight: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    fits = blocks.dtype == torch.uint8 and blocks.dim() == 4 and blocks.shape[-1] == 16
    if not fits:
        raise ValueError(f"tensor {weight + _BLOCKS!r}: expected uint8 of shape (experts, out, blocks, 16), got "
                         f"{blocks.dtype} of shape {tuple(blocks.shape)}")  # fmt: skip
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu) or scales.shape != blocks.shape[:-1]:
        raise ValueError(f"tensor {weight + _SCALES!r}: expected uint8 of shape {tuple(blocks.shape[:-1])}, got "
                         f"{scales.dtype} of shape {tuple(scales.shape)}")  # fmt: skip
    if (scales.view(torch.uint8) == 255).any():
        raise ValueError(f"tensor {weight + _SCALES!r}: has scales that are NaN")


READERS = (Reader("experts in MXFP4 (gpt-oss)", _has_mxfp4_experts, _read_mxfp4_experts),)
