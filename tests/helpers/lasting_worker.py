"""Compiled models of two ranks whose weights are quantised once, or at every call, and follow every write.

`main` is what each rank runs, and tests/distributed/test_lasting_weights.py compares what it finds. The ranks meet at
the file FOLDER/store, and each writes what it finds to FOLDER/RANK.pt.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp4compile
from fp4compile.weights import cache
from tests.helpers import process_groups, without_codegen
from tests.helpers.rank_worker import SIZES, WIDTH, Mlp, sharded

RANKS = 2


class Shards(Mlp):
    """Multiplies its rank's shards, which no writer to the DTensors names."""

    def forward(self, x):
        hidden = nn.functional.linear(x, self.up.weight._local_tensor).relu()
        return nn.functional.linear(hidden, self.down.weight._local_tensor)


def backend(recipe: str, **options):
    return fp4compile.backend(recipe, **SIZES, **options)


def tokens() -> torch.Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def counted(patch: pytest.MonkeyPatch) -> list:
    """Grows by one entry for each weight that is quantised outside of a graph."""
    found: list = []
    quantize = cache._quantize
    patch.setattr(cache, "_quantize", lambda *given: found.append(given[1]) or quantize(*given))
    return found


def one_address(patch: pytest.MonkeyPatch) -> None:
    """Let it seem that freed memory is allocated at the same address again, as a GPU's allocator does it."""
    fits = cache._Packed.fits
    patch.setattr(cache._Packed, "fits", lambda self, x: fits(dataclasses.replace(self, address=x.data_ptr()), x))


# ---------------------------------------------------------------- writes


def step(model: nn.Module) -> None:
    """A step of an optimiser that raises no version counter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def copy(model: nn.Module) -> None:
    weight = model.get_parameter("up.weight")
    weight.copy_(weight * -1.5)


def multiply(model: nn.Module) -> None:
    with torch.inference_mode():
        model.get_parameter("down.weight").mul_(3)


def load(model: nn.Module, assign=False) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=assign)


def broadcast(model: nn.Module) -> None:
    """A collective raises no version counter."""
    weight = model.get_parameter("up.weight")
    dist.broadcast(weight.to_local().data if isinstance(weight, DTensor) else weight.data, 0)


# How many of the two weights each of them changes.
WRITES: dict[str, tuple[Callable[[nn.Module], None], int]] = {
    "step": (step, 2),
    "copy_": (copy, 1),
    "mul_ in inference mode": (multiply, 1),
    "load_state_dict": (load, 2),
    "load_state_dict(assign)": (functools.partial(load, assign=True), 2),
    "broadcast": (broadcast, 1),
}


# ---------------------------------------------------------------- what ranks have


@torch.no_grad()
def kept(model: nn.Module, recipe: str, packings: list, wrapped: Callable = lambda model: model) -> dict:
    """A model whose ranks keep their parameters. wrapped: makes of it what is called.

    packings: how many weights were quantised by three calls, by a call behind each write, and while a model of FSDP
    runs. stale: the writes that results do not follow.
    """
    torch._dynamo.reset()
    own, called, x = backend(recipe), wrapped(model), tokens()
    once = torch.compile(called, backend=own)
    at_every_call = torch.compile(called, backend=backend(recipe, weight_cache="off"))
    packings.clear()
    for _ in range(3):
        once(x)
    counts, stale = [len(packings)], []
    for name, (write, _) in WRITES.items():
        write(model)
        packings.clear()
        stale += [name] * (not torch.equal(once(x), at_every_call(x)))
        counts.append(len(packings))
    return {"packings": counts, "stale": stale, "fused": {row.fused for row in own.report.quantised}}


def frozen(model: nn.Module, packings: list) -> list[int]:
    """How many weights are quantised by each of three training steps that leave all weights as they are."""
    torch._dynamo.reset()
    model.requires_grad_(False)
    called, counts = torch.compile(model, backend=backend("nvfp4")), []
    for _ in range(3):
        packings.clear()
        called(tokens().requires_grad_()).sum().backward()
        counts.append(len(packings))
    return counts


@torch.no_grad()
def beside(model: nn.Module, other: nn.Module, packings: list) -> int:
    """How many weights of a model are quantised again while another one runs under FSDP2."""
    torch._dynamo.reset()
    called, x = torch.compile(model, backend=backend("mxfp8")), tokens()
    other.compile(backend=backend("mxfp8"))
    other = fully_shard(other)
    called(x), other(x)
    packings.clear()
    for _ in range(2):
        other(x), called(x)
    return len(packings)


@torch.no_grad()
def gathered(model: nn.Module, shard: Callable, called_before=False, call: Callable = nn.Module.__call__) -> dict:
    """A model that FSDP shards. called_before: whether it was compiled, and called, without FSDP. call: calls it.

    stale: the steps before which results are not those of one process.
    """
    torch._dynamo.reset()
    own, x = backend("mxfp8"), tokens()
    model.compile(backend=own)
    if called_before:
        model(x), model(x)
    model, stale = shard(model), []
    for number in range(3):
        found = [call(model, x) for _ in range(2)]
        expected = alone(model)(x)
        stale += [number] * (not all(torch.equal(each, expected) for each in found))
        step(model)
    return {"stale": stale, "report": str(own.report)}


def summoned(model: FullyShardedDataParallel, x: torch.Tensor) -> torch.Tensor:
    """What the model inside FSDP1 computes of its gathered parameters. Those of FSDP1's own calls are no parameters."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return model.module(x)


def alone(model: nn.Module) -> nn.Module:
    """The present whole model in one process, compiled so that it quantises its weights at every call."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            state = {name: value.clone() for name, value in model.module.state_dict().items()}
    else:
        state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    whole = Mlp()
    whole.load_state_dict(state)
    return torch.compile(whole, backend=backend("mxfp8", weight_cache="off"))


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    process_groups.begin(folder / "store", rank)
    flat = DeviceMesh("cpu", list(range(RANKS)))
    square = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("data", "tensor"))
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch, hoisting=True)
        one_address(patch)
        packings = counted(patch)
        found["tensor parallel"] = kept(sharded(Mlp(), flat, False), "nvfp4", packings)
        found["local tensors"] = kept(sharded(Shards(), flat, False), "mxfp8", packings)
        found["DDP"] = kept(Mlp(), "nvfp4", packings, DistributedDataParallel)
        found["frozen"] = frozen(sharded(Mlp(), flat, False), packings)
        found["beside FSDP2"] = beside(sharded(Mlp(), flat, False), Mlp(), packings)
        fp4compile.config.enabled_passes = ("group_amax",)
        found["one outer scale"] = kept(sharded(Mlp(), flat, False), "nvfp4", packings)
        fp4compile.config.enabled_passes = ()
        found["FSDP2 later"] = gathered(Mlp(), functools.partial(fully_shard, mesh=flat), called_before=True)
        found["FSDP2, tensor parallel"] = gathered(
            sharded(Mlp(), square["tensor"], False), functools.partial(fully_shard, mesh=square["data"])
        )
        fsdp1 = functools.partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True)
        found["FSDP1 later"] = gathered(Mlp(), fsdp1, called_before=True, call=summoned)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
