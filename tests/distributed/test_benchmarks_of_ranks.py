"""What the benchmarks of several ranks, and of tokens with several experts, say of bytes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp4compile
from benchmarks import expert_dispatch, ranks
from tests.helpers import without_codegen


def test_bytes_on_the_wire_are_those_of_a_ring():
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:

        def step():
            x = torch.ones(8, 16, dtype=torch.bfloat16)
            gathered = collectives.all_gather_tensor(x, 0, dist.group.WORLD)
            collectives.all_reduce(x.float(), "sum", dist.group.WORLD)
            collectives.all_to_all_single(x.view(torch.uint8), None, None, dist.group.WORLD)
            return [collectives.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD) for _ in range(2)]

        assert ranks.collectives_of(step, "cpu") == {
            "all_gather_into_tensor": (1, 3 * 256),
            "all_reduce": (1, 2 * 3 * 512 / 4),
            "all_to_all_single": (1, 3 * 256 / 4),
            "reduce_scatter_tensor": (2, 2 * 3 * 1024 / 4),
        }
    finally:
        dist.destroy_process_group()


def test_tokens_are_quantised_once_and_their_codes_gathered(monkeypatch):
    """A case that compiles nothing new must not be measured as if it moved numbers."""
    without_codegen.install(monkeypatch)
    monkeypatch.setattr(fp4compile.config, "disabled_passes", ())
    args = SimpleNamespace(device="cpu", tokens=256, experts=4, picked=4, inner=32, hidden=64)
    for _ in range(2):
        apart, codes = (expert_dispatch.measure(f"float8_rowwise{end}", args)[0] for end in ("", ", codes"))
        weights = 4  # matrices, which a graph without Inductor quantises at each call
        assert (apart["quantised rows"], codes["quantised rows"]) == (1024 + weights, 256 + weights)
        assert apart["moved MB"] == pytest.approx(1024 * 64 * 2 / 1e6)
        assert codes["moved MB"] == pytest.approx(1024 * (64 + 4) / 1e6)
        assert codes["sum"] == apart["sum"]
