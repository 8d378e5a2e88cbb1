"""Report rows beside Inductor's compile caches.

A graph that comes from a cache has been rewritten in another process: the passes do not run and make no rows. So the
rows are stored once, under a key of what Dynamo captured, in Inductor's cache directory, and read back on a hit.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from fp4compile.report import Row, rows_from_json, rows_to_json

log = logging.getLogger("fp4compile")


def key(gm: GraphModule, example_inputs: Sequence[Any], uuid: object) -> str:
    """Hash of a Dynamo graph, its inputs' metadata, the passes' uuid and the modes that change what is traced."""
    parts = [gm.code, *(_describe(value) for value in example_inputs), repr(uuid), torch.__version__]
    parts.append(repr((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    return f"{value.dtype} {tuple(value.shape)} {value.device} {value.requires_grad}"


def store(key: str, graphs: list[tuple[list[Row], dict[str, int]]]) -> None:
    """Write the rows of a compilation; a cache that cannot be written costs a report, not the run."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text("\n".join(rows_to_json(rows, counts) for rows, counts in graphs))
        scratch.replace(path)  # atomic: another process may read it
    except OSError as error:
        log.warning("report rows not stored: %s", error)


def load(key: str) -> list[tuple[list[Row], dict[str, int]]]:
    """The stored rows of a compilation; empty if there are none."""
    try:
        return [rows_from_json(line) for line in _path(key).read_text().splitlines()]
    except OSError:
        log.info("graph from the compile cache, its report rows are gone")
        return []


def _path(key: str) -> Path:
    return Path(cache_dir()) / "fp4compile" / f"{key}.json"
