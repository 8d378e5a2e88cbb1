"""Check that all ranks of a process group compile with the same settings; otherwise all of them raise.

The collectives of a compiled graph depend on the recipe and the passes. Ranks with different ones would call different
collectives, and wait for each other until the group times out.

Entry: `publish(gm, example_inputs, settings)` before a graph is compiled, and `compare()` of its result afterwards.

**What is compared.** For each process group a rank has a list of the different settings with which it compiled graphs
that may call its collectives, in the order of first use. Ranks that agree have equal lists, whatever comes from caches
or is compiled again.

**Why it cannot hang.** Entries are in the key-value store of the group's rendezvous. A rank writes its entry, then
waits for one key, for `fp4compile.config.agreement_seconds` at most. The rank that completes the entries writes this
key, and so does a rank that finds an entry different from its own: the rank that writes the later of two entries reads
both. A rank that times out logs it and continues: another rank may run the model uncompiled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import GraphModule

from fp4compile import _compat, config
from fp4compile.recipe.recipe import Recipe

log = logging.getLogger("fp4compile")

_AGREED, _DIFFER = b"agreed", b"differ"
_LONGEST_PAUSE = 0.5  # seconds between two polls for the verdict
_SHOWN = 200  # characters of a setting; a longer one is shown by its hash


def settings_of(recipe: Recipe, others: Mapping[str, object]) -> dict[str, str]:
    """The settings in which ranks must agree, as texts, and the recipe's name, which is shown and not compared."""
    given = {**recipe.to_dict(), **others}
    return {"recipe": given.pop("name"), **{name: _text(value) for name, value in given.items()}}


def _text(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"<sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}>"


def publish(gm: GraphModule, example_inputs: Sequence[Any], settings: Mapping[str, str]) -> Published:
    """Publish this rank's settings to the other ranks of a Dynamo graph's process groups."""
    return publish_to(_groups_of(gm, example_inputs), settings)


def publish_to(groups: Iterable[dist.ProcessGroup], settings: Mapping[str, str]) -> Published:
    """Publish this rank's settings to the other ranks of process groups that have other ranks and a store."""
    there = [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]
    stores = [(group, _compat.store_of(group)) for group in there]
    published = [_published(group, store, settings) for group, store in stores if store is not None]
    return Published([each for each in published if each is not None])


@dataclass(frozen=True)
class Published:
    """This rank's published entries, one for each process group whose ranks have not all been compared."""

    entries: list[_Entry]

    def compare(self) -> None:
        """Wait for the other ranks; RuntimeError with the settings of each rank where they differ."""
        for entry in self.entries:
            entry.compare()


# ---------------------------------------------------------------- entries in the store of a group


@dataclass(frozen=True)
class _Entry:
    """Settings that this rank published to a group, under keys with `prefix`. waits: whether it waits for others."""

    group: dist.ProcessGroup
    store: dist.Store
    prefix: str
    settings: Mapping[str, str]
    waits: bool = True

    def write(self) -> None:
        """Write the entry, and the verdict if this rank can decide it."""
        mine, rank = json.dumps(self.settings), self.group.rank()
        self.store.set(f"{self.prefix}/{rank}", mine)
        first = json.loads(self.store.compare_set(f"{self.prefix}/first", "", mine))
        if _compared(first) != _compared(self.settings):
            self.store.set(f"{self.prefix}/verdict", _DIFFER)
        elif self.store.add(f"{self.prefix}/count", 1) == self.group.size():
            self.store.set(f"{self.prefix}/verdict", _AGREED)

    def compare(self) -> None:
        """Wait for the verdict; RuntimeError where settings differ."""
        if not self._decided(config.agreement_seconds if self.waits else 0):
            if self.waits:
                silent = _ranks(sorted({*range(self.group.size())} - self._everyone().keys()))
                log.warning(
                    "%s of process group %r published no recipe in time, and is not compared", silent, _name(self.group)
                )
            return
        if self.store.get(f"{self.prefix}/verdict") == _DIFFER:
            raise RuntimeError(_difference(_name(self.group), self._everyone()))
        _lists[self.group].agreed.add(self.prefix)

    def _decided(self, seconds: float) -> bool:
        """Whether a verdict arrives within some seconds.

        The store is polled, because its own `wait` would block other threads, such as NCCL's.
        """
        end, pause = time.monotonic() + seconds, 0.005
        while not self.store.check([f"{self.prefix}/verdict"]):
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _everyone(self) -> dict[int, dict[str, str]]:
        """The settings of each rank that has published them, by its rank in the group."""
        ranks = [rank for rank in range(self.group.size()) if self.store.check([f"{self.prefix}/{rank}"])]
        return {rank: json.loads(self.store.get(f"{self.prefix}/{rank}")) for rank in ranks}


@dataclass(eq=False)
class _List:
    """The entries of one group: prefixes of their keys by what is compared, in the order of first use.

    joined: how many groups this rank has had in the store, which may outlive its group. agreed: by all ranks.
    """

    joined: int
    prefixes: dict[tuple, str] = field(default_factory=dict)
    agreed: set[str] = field(default_factory=set)


_lists: WeakKeyDictionary[dist.ProcessGroup, _List] = WeakKeyDictionary()
_lock = threading.Lock()


def _published(group: dist.ProcessGroup, store: dist.Store, settings: Mapping[str, str]) -> _Entry | None:
    """The entry of settings in a group's store, written at their first use; None if all ranks have already agreed."""
    key = _compared(settings)
    with _lock:
        if group not in _lists:
            _lists[group] = _List(store.add(f"fp4compile/joined/{group.rank()}", 1))
        known = _lists[group]
        if key in known.prefixes:
            prefix = known.prefixes[key]
            return None if prefix in known.agreed else _Entry(group, store, prefix, settings, waits=False)
        prefix = known.prefixes[key] = f"fp4compile/{known.joined}/{len(known.prefixes)}"
        entry = _Entry(group, store, prefix, settings)
        entry.write()
        return entry


def _compared(settings: Mapping[str, str]) -> tuple:
    return tuple(sorted((name, value) for name, value in settings.items() if name != "recipe"))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _difference(group: str, everyone: Mapping[int, Mapping[str, str]]) -> str:
    """The error's message. everyone: settings by rank."""
    alike: dict[tuple, list[int]] = {}
    for rank, settings in everyone.items():
        alike.setdefault((settings["recipe"], *_compared(settings)), []).append(rank)
    names = dict.fromkeys(name for settings in everyone.values() for name in settings if name != "recipe")
    differing = [name for name in names if len({settings.get(name) for settings in everyone.values()}) > 1]
    parts = []
    for ranks in alike.values():
        settings = everyone[ranks[0]]
        fields = ", ".join(f"{name}={settings.get(name)}" for name in differing)
        parts.append(f"{_ranks(ranks)}: recipe {settings['recipe']!r} with {fields}")
    return (
        f"the ranks of process group {group!r} compile with different settings, and would call different collectives; "
        "give all of them the same recipe and the same fp4compile.config. " + "; ".join(parts)
    )


# ---------------------------------------------------------------- the process groups of a graph


def _groups_of(gm: GraphModule, example_inputs: Sequence[Any]) -> list[dist.ProcessGroup]:
    """The process groups of this rank whose collectives a Dynamo graph or its backward may call.

    These are the groups that its collectives name, and the groups of the meshes of its DTensors, whose gradients may be
    reduced.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    names = {group.group_name for mesh in _meshes(gm, example_inputs) for group in mesh.get_all_groups()}
    # By its name, because DTensor's caches may hold an equal mesh of destroyed groups.
    groups = (_compat.process_group(name) for name in sorted(names.union(_named_groups(gm))))
    return [group for group in groups if group is not None and dist.get_rank(group) >= 0]


def _name(group: dist.ProcessGroup) -> str:
    return group.group_desc if group.group_desc not in ("", "undefined") else group.group_name


def _graphs(gm: GraphModule) -> Iterator[torch.fx.Graph]:
    return (part.graph for part in gm.modules() if isinstance(part, GraphModule))


def _meshes(gm: GraphModule, example_inputs: Sequence[Any]) -> Iterable[Any]:
    from torch.distributed.tensor import DTensor

    values = [*example_inputs]
    for graph in _graphs(gm):
        values += [node.meta.get("example_value") for node in graph.nodes]
    meshes = (value.device_mesh for value in values if isinstance(value, DTensor))
    return {getattr(mesh, "real_obj", mesh) for mesh in meshes}  # a mesh that is an input of the graph is wrapped


def _named_groups(gm: GraphModule) -> Iterator[str]:
    """The names of groups that operators of a graph, such as collectives, have as an argument."""
    for graph in _graphs(gm):
        for node in graph.nodes:
            target = node.target.default if isinstance(node.target, OpOverloadPacket) else node.target
            if isinstance(target, OpOverload):
                arguments = [argument.name for argument in target._schema.arguments]
                given = {**dict(zip(arguments, node.args, strict=False)), **node.kwargs}
                if isinstance(given.get("group_name"), str):
                    yield given["group_name"]
