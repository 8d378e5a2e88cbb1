"""`Kept`: codes of weights in a folder, from which an interrupted `pack_` with batches goes on."""

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4compile.recipe import Recipe
from fp4compile.recipe.atomic_file import write_atomically
from fp4compile.weights.buffers import BUFFERS, PackedWeight, autocast_dtype
from fp4compile.weights.replacements import Weight

_VERSION = 2  # of the files and of the algorithm whose codes they hold


class Kept:
    """The codes of weights in a folder, by a digest of what they depend on.

    That is the model, the recipe, the batches, the options, and the dtype of autocast.
    """

    def __init__(self, folder: str | Path, model: nn.Module, recipe: Recipe, batches: list[Any], shared_scales: bool):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        casts = sorted({f"{each.device.type} {autocast_dtype(each.device)}" for each in model.parameters()})
        self.digest = hashlib.sha256(f"{_VERSION} {recipe.digest} {shared_scales} {casts}".encode())
        for part in _contents((model.state_dict(), batches)):
            self.digest.update(part)

    def _file(self, weight: Weight) -> Path:
        own = self.digest.copy()
        in_first = None if weight.experts is None else weight.experts.in_first
        own.update(repr((weight.names, weight.layer_format, in_first)).encode())
        return self.folder / f"{own.hexdigest()}.pt"

    def has(self, weight: Weight) -> bool:
        """Whether the folder has the codes of a weight."""
        return self._file(weight).exists()

    def read(self, weight: Weight, packed: PackedWeight, device: torch.device) -> tuple[int, ...]:
        """Fill an empty packed weight; return its matrices that had too few tokens."""
        try:
            content = torch.load(self._file(weight), map_location=device, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch.load raises several kinds
            raise ValueError(f"resume: {self._file(weight)} is damaged; delete it: {error}") from error
        for name in BUFFERS:
            setattr(packed, name, content[name])
        packed.lay_out_scales()
        return tuple(content["few"])

    def write(self, weight: Weight, packed: PackedWeight, few: tuple[int, ...]) -> None:
        """Keep the codes of a weight. A killed process leaves an unfinished file, which is not read."""
        content = {name: getattr(packed, name) for name in BUFFERS} | {"few": list(few)}
        write_atomically(self._file(weight), lambda path: torch.save(content, path))


def _contents(value: Any) -> Iterator[bytes]:
    """The whole content of a batch or state: nested mappings, lists and tuples of tensors and of what pickle takes.

    Never a `repr`: those of large tensors and arrays leave out most elements. Raises TypeError for anything else.
    """
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping | list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for part in value.items() if isinstance(value, Mapping) else value:
            yield from _contents(part)
    else:
        try:
            yield pickle.dumps(value)
        except Exception as error:  # pickle raises several kinds
            raise TypeError(
                f"resume: cannot compare what batches or the model's state hold, a {type(value).__name__}: {error}"
            ) from error
