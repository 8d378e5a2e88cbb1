"""Report rows, stored beside Inductor's compile caches.

For a graph from a cache, the passes do not run and create no rows. So the process that fills the cache also stores the
rows, in Inductor's cache directory, under a key of the graph that Dynamo captured. A process that hits the cache reads
them.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from fp4compile.recipe.atomic_file import write_atomically
from fp4compile.report.product_row import Row

log = logging.getLogger("fp4compile")


class Outcome(NamedTuple):
    """The results of the passes on one graph: its rows, and each pass's matches."""

    rows: list[Row]
    counts: dict[str, int]


def key(gm: GraphModule, example_inputs: Sequence[Any], uuid: object, config_patches: dict[str, Any]) -> str:
    """sha256 of all inputs on which the rows of a Dynamo graph depend.

    It covers the graph and the graphs inside it, the metadata of its inputs, the uuid of the passes, the configurations
    of Inductor and AOTAutograd, and the autocast and gradient modes. It leaves out the numbers of symbolic sizes, as
    torch's caches do.

    config_patches: the changes that this compilation makes to Inductor's configuration.
    """
    bodies = [f"{name}\n{part.code}" for name, part in gm.named_modules() if isinstance(part, GraphModule)]
    inputs = zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)
    described = (_describe(value, node.meta.get("example_value", value)) for node, value in inputs)
    parts = [*bodies, *described, repr(uuid), torch.__version__]
    with inductor_config.patch(config_patches):  # the portable configurations leave out the pass slots: see uuid
        parts += [_configuration(inductor_config), _configuration(functorch_config)]
    parts += [repr((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")]
    parts.append(repr((torch.is_grad_enabled(), torch.is_inference_mode_enabled())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _configuration(module: Any) -> str:
    return repr(sorted((name, _stable(value)) for name, value in module.save_config_portable().items()))


def _stable(value: Any) -> str:
    """The text of a value, equal in every process; a function is represented by its name."""
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def _describe(value: Any, captured: Any) -> str:
    """The metadata of an input. captured: the value that Dynamo's graph has in its place, of symbolic sizes."""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {captured}"
    subclass = getattr(value, "_stable_hash_for_caching", None)  # a subclass's key in torch's own caches
    own = "" if subclass is None else subclass()
    return f"{value.dtype} {tuple(captured.shape)} {captured.stride()} {value.device} {value.requires_grad} {own}"


def store(key: str, outcome: Outcome) -> None:
    """Write the rows of a compilation. Logs an unwritable cache, and does not raise."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"rows": [asdict(row) for row in outcome.rows], "counts": outcome.counts})
        write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
    except OSError as error:
        log.warning("report rows not stored: %s", error)


MISSING = "a graph came from Inductor's cache, and its report rows are gone: it is not in the report"


def load(key: str, missing: str | None = MISSING) -> Outcome | None:
    """The stored rows of a compilation; None, and a logged warning, where they no longer exist or cannot be read.

    missing: the warning where they do not exist; None for none. A file with other contents is removed; the graph runs
    without it.
    """
    path = _path(key)
    try:
        stored = path.read_bytes()
    except OSError:
        if missing is not None:
            log.warning(missing)
        return None
    try:
        return rows_from_json(stored.decode())
    except (ValueError, RecursionError) as error:
        log.warning("a graph came from Inductor's cache, and its report rows cannot be read (%s): it is not in the "
                    "report, and %s is removed", error, path)  # fmt: skip
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def _path(key: str) -> Path:
    return Path(cache_dir()) / "fp4compile" / f"{key}.json"


def rows_from_json(text: str) -> Outcome:
    """The rows and counts in JSON. Raises ValueError for a text without them, and for other fields."""
    match json.loads(text):
        case {"rows": list(rows), "counts": dict(counts), **others} if not others:
            try:
                return Outcome([Row(**row) for row in rows], counts)
            except TypeError as error:
                raise ValueError(f"a row has other fields: {error}") from error
        case stored:
            raise ValueError(f"expected rows and counts, got a {type(stored).__name__} {text[:40]!r}")
