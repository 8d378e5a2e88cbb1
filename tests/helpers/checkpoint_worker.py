"""Models of two ranks are saved by torch.distributed.checkpoint, resumed by one rank, and by two again.

`main` is what each rank runs, and tests/distributed/test_checkpoints.py compares what it finds. The ranks meet at the
file FOLDER/store; the rank that goes on alone is the first, as the only one of another process group.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import fp4compile
from fp4compile.distributed import gather_quantized_
from tests.helpers import process_groups, rank_worker, without_codegen

RANKS = 2
KINDS = ("fsdp", "simple", "tensor")


def made(kind: str, mesh: DeviceMesh) -> tuple[nn.Module, Callable]:
    """A model of zeros on the ranks of a mesh, and the model compiled."""
    model, _, _ = rank_worker.whole()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if kind == "simple":
        model = rank_worker.gathered(model, mesh)
    elif kind == "tensor":
        model = rank_worker.sharded(model, mesh, sequences=False)
    torch._dynamo.reset()
    # A rank of tensor parallelism would make a scale of its own for its part of a tensor.
    recipe = rank_worker.ONE_LEVEL if kind == "tensor" else {"recipe": "nvfp4_train"}
    backend = fp4compile.backend({**recipe, **rank_worker.SIZES}, strict=True)
    if kind == "fsdp":
        model.compile(backend=backend)
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        assert len(gather_quantized_(model, "nvfp4_train").quantised) == 4
        return model, model
    return model, torch.compile(model, backend=backend)


class Run:
    """A model on the ranks of a mesh, its optimiser, and what becomes of them."""

    def __init__(self, kind: str, mesh: DeviceMesh):
        self.mesh = mesh
        # FSDP2 takes the mean of the ranks' gradients, and `rank_worker.gathered` the sum.
        self.summed = mesh.size() if kind == "simple" else 1
        self.model, self.called = made(kind, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def begin(self) -> None:
        """The parameters that training begins with."""
        whole, _, _ = rank_worker.whole()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), whole.parameters(), strict=True):
                parameter.copy_(_like(value, parameter))

    def step(self, seed: int) -> float:
        """The loss before a step of the optimiser. All ranks have the same tokens, and round alike."""
        torch.manual_seed(seed)
        x, target = torch.randn(2, 64, rank_worker.WIDTH)
        loss = (self.called(x) - target).float().square().mean()
        (loss / self.summed).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=self.mesh.get_group())

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder, process_group=self.mesh.get_group())
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )  # fmt: skip

    def whole(self) -> dict[str, torch.Tensor]:
        """All parameters and states of the optimiser, from all ranks."""
        return dict(_whole(get_state_dict(self.model, self.optimizer), ""))


def _like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    return dist.tensor.distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _whole(state: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        yield name, (state.full_tensor() if isinstance(state, DTensor) else state).detach().clone()
    elif isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from _whole(value, f"{name}.{key}")


def run(kind: str, folder: Path, both: DeviceMesh, alone: DeviceMesh) -> dict:
    """What was saved, the losses of the steps after it, and what was there in the end: of two ranks, of the one that
    resumed, and of two that resumed what it saved."""
    rank, found = dist.get_rank(), {}

    def go_on(name: str, training: Run) -> None:
        saved = training.whole()
        found[name] = saved, [training.step(seed) for seed in (1, 2)], training.whole()

    first = Run(kind, both)
    first.begin()
    first.step(0)
    first.save(folder / "two")
    go_on("two", first)
    if rank == 0:
        one = Run(kind, alone)
        one.load(folder / "two")
        one.save(folder / "one")
        go_on("one", one)
    dist.barrier()
    again = Run(kind, both)
    again.load(folder / "one")
    go_on("again", again)
    return found


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    process_groups.begin(folder / "store", rank, RANKS)
    both = DeviceMesh("cpu", list(range(RANKS)))
    alone = DeviceMesh.from_group([dist.new_group([each]) for each in range(RANKS)][rank], "cpu")
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        found = {kind: run(kind, folder / kind, both, alone) for kind in KINDS}
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()
