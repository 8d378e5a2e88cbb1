"""Ranks of a process group compare their settings through the group's store. Here they are of one process."""

import functools
import logging
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp4compile
from fp4compile.recipe import agreement, resolve


class Rank:
    """A rank's process group, as far as it is asked."""

    group_name = group_desc = "three ranks"

    def __init__(self, store, number):
        self.store, self.number = store, number

    def rank(self):
        return self.number

    def size(self):
        return 3

    def compare(self, recipe, **options):
        self.tell(recipe, **options).compare()

    def tell(self, recipe, **options):
        return agreement.publish_to([self], agreement.settings_of(resolve(recipe, **options), {"passes": []}))


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda rank: rank.store)
    monkeypatch.setattr(dist, "get_backend", lambda rank: "gloo")
    monkeypatch.setattr(fp4compile.config, "agreement_seconds", 0.05)


def group(store=None):
    store = store or dist.HashStore()
    return [Rank(store, number) for number in range(3)]


def test_lists_of_first_uses_are_compared(caplog):
    """However often one rank alone compiles again, and whatever the recipes are called."""
    once, again = ["mxfp8", "nvfp4"], ["mxfp8", "mxfp8", "nvfp4", "mxfp8"]
    with caplog.at_level(logging.WARNING, "fp4compile"):
        for rank, recipes in zip(group(), (once, once, again), strict=True):
            told = [rank.tell(recipe, name=f"of {rank.number}") for recipe in recipes]
        for each in told:
            each.compare()
    assert not caplog.text
    assert told[0].entries and not rank.tell("nvfp4").entries, "what is agreed is not told again"


@pytest.mark.parametrize("other", [
    {"recipe": "mxfp8", "min_m": 32}, {"recipe": "nvfp4"}, {"recipe": "mxfp8", "rules": [("up", "skip")]}
])  # fmt: skip
@pytest.mark.parametrize("odd", range(3))
def test_every_rank_raises_and_names_the_settings(odd, other):
    told = [rank.tell(other if rank.number == odd else "mxfp8") for rank in group()]
    for each in told:
        with pytest.raises(RuntimeError, match=f"ranks? .*{odd}: recipe '{other['recipe']}' with") as error:
            each.compare()
        assert "recipe 'mxfp8'" in str(error.value) and "weight_cache" not in str(error.value), "what is alike"


def test_long_settings_are_compared_to_their_ends():
    """Static scales of a model are many: here they differ in the last one, far behind what an error shows."""
    scales = {f"layers.{number:02}.up": 1.0 for number in range(30)}
    settings = {"recipe": "nvfp4", "activation_scale": "static"}
    first, second, _ = group()
    first.tell(settings, static_scales=scales)
    with pytest.raises(RuntimeError, match="rank 0: .* rank 1: recipe 'nvfp4' with static_scales=<sha256 ") as error:
        second.compare(settings, static_scales=scales | {"layers.29.up": 2.0})
    assert "layers.00" not in str(error.value), "a long setting is not shown"


def test_settings_beside_the_recipe_are_compared():
    first, second, _ = group()
    told = [
        agreement.publish_to([rank], agreement.settings_of(resolve("mxfp8"), {"passes": passes}))
        for rank, passes in ((first, []), (second, ["hoist"]))
    ]
    for each in told:
        with pytest.raises(RuntimeError, match=r"rank 1: recipe 'mxfp8' with passes=\['hoist'\]"):
            each.compare()


def test_another_order_is_another_list():
    first, second, _ = group()
    first.tell("mxfp8")
    with pytest.raises(RuntimeError, match="rank 0: recipe 'mxfp8'.* rank 1: recipe 'nvfp4'"):
        second.compare("nvfp4")
    with pytest.raises(RuntimeError, match="'three ranks' compile with different settings"):
        first.compare("mxfp8")


def test_silent_ranks_are_named_and_waited_for_once(caplog):
    """They may run uncompiled. A rank that tells other settings later raises, and so does the next compilation."""
    first, second, third = group()
    with caplog.at_level(logging.WARNING, "fp4compile"):
        first.compare("mxfp8")
    assert "ranks 1, 2 of process group 'three ranks' published no recipe in time" in caplog.text
    fp4compile.config.agreement_seconds = 100
    begin = time.monotonic()
    first.compare("mxfp8")
    assert time.monotonic() - begin < 10
    for rank, recipe in ((second, "nvfp4"), (third, "mxfp8"), (first, "mxfp8")):
        with pytest.raises(RuntimeError, match="different settings"):
            rank.compare(recipe)


def test_a_store_may_outlive_a_group():
    """A process begins another group by the same store, and all its ranks take another recipe."""
    store = dist.HashStore()
    for recipe in ("mxfp8", "nvfp4"):
        told = [rank.tell(recipe) for rank in group(store)]
        [each.compare() for each in told]


def test_groups_of_a_graph():
    """A graph's groups are found whether collectives name them, or DTensors, whose gradients may be reduced."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        weight, found = DTensor.from_local(torch.ones(2, 4), mesh["tensor"], [Shard(0)]), []

        def remember(gm, example_inputs):
            found.append([group.group_name for group in agreement._groups_of(gm, example_inputs)])
            return gm.forward

        compiled = functools.partial(torch.compile, backend=remember)
        compiled(lambda x: x * 2)(torch.ones(2))
        compiled(lambda x: collectives.all_reduce(x, "sum", mesh["data"].get_group()))(torch.ones(2))
        compiled(lambda x: x * 2)(weight)
        compiled(lambda x, among: DTensor.from_local(x, among, [Shard(0)]).to_local())(torch.ones(2), mesh["data"])
        names = [mesh[name].get_group().group_name for name in ("data", "tensor")]
        assert found == [[], names[:1], names[1:], names[:1]] and names[0] != names[1]
    finally:
        dist.destroy_process_group()
