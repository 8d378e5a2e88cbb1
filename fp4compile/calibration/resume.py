"""`Kept`: codes of weights in a folder, from which an interrupted `pack_` with batches goes on."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4compile.recipe import Recipe
from fp4compile.recipe.atomic_file import write_atomically
from fp4compile.weights.buffers import BUFFERS, PackedWeight
from fp4compile.weights.replacements import Weight

_VERSION = 2  # of the files and of the algorithm whose codes they hold


class Kept:
    """The codes of weights in a folder, by a digest of all that they depend on: model, recipe, batches and options."""

    def __init__(self, folder: str | Path, model: nn.Module, recipe: Recipe, batches: list[Any], shared_scales: bool):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.digest = hashlib.sha256(f"{_VERSION} {recipe.digest} {shared_scales}".encode())
        for leaf in tree_leaves((dict(model.state_dict()), batches)):
            self.digest.update(_bytes_of(leaf))

    def _file(self, weight: Weight) -> Path:
        own = self.digest.copy()
        own.update(repr((weight.names, weight.layer_format)).encode())
        return self.folder / f"{own.hexdigest()}.pt"

    def has(self, weight: Weight) -> bool:
        """Whether the folder has the codes of a weight."""
        return self._file(weight).exists()

    def read(self, weight: Weight, packed: PackedWeight, device: torch.device) -> tuple[int, ...]:
        """Fill an empty packed weight; return its matrices that had too few tokens."""
        content = torch.load(self._file(weight), map_location=device, weights_only=True)
        for name in BUFFERS:
            setattr(packed, name, content[name])
        packed.lay_out_scales()
        return tuple(content["few"])

    def write(self, weight: Weight, packed: PackedWeight, few: tuple[int, ...]) -> None:
        """Keep the codes of a weight. A killed process leaves an unfinished file, which is not read."""
        content = {name: getattr(packed, name) for name in BUFFERS} | {"few": list(few)}
        write_atomically(self._file(weight), lambda path: torch.save(content, path))


def _bytes_of(leaf: Any) -> bytes:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf).encode()
    kind = f"{leaf.dtype} {tuple(leaf.shape)}".encode()
    return kind + leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
