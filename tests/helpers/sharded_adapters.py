"""LoRA on a packed model under FSDP2: what each of two ranks runs, see tests/weights/test_sharded.py.

`main`: the first rank writes what it found to `output`. The ranks meet at the file `output`.store.
"""

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fp4compile
from tests.helpers import process_groups, without_codegen

RANKS, WIDTH, RECIPE = 2, 96, "nvfp4"
FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.recompute = recompute

    def forward(self, x):
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x))

    def mlp(self, x):
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(recompute) for recompute in (False, True))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def build():
    """A packed model with adapters, in bf16 beside the adapters' float32."""
    torch.manual_seed(0)
    model = Net().bfloat16()
    fp4compile.pack_(model, RECIPE)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False))
    return model.base_model.model


def shard(model, codes=True, mesh=None):
    if codes:
        fp4compile.make_shardable_(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, mesh=mesh)
    return fully_shard(model, mp_policy=policy, mesh=mesh)


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def steps(model, optimizer):
    """The losses of three steps on one batch, which every rank has: so means over ranks have the bits of one rank."""
    losses = []
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(3):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def codes(model):
    return {name: p for name, p in model.named_parameters() if p.dtype == torch.uint8}


def blank(mesh=None):
    """A sharded model of zeros, of another group of ranks perhaps: loading must replace what is there."""
    fresh = build()
    for tensor in (*fresh.parameters(), *fresh.buffers()):
        nn.init.zeros_(tensor)
    return shard(fresh, mesh=mesh)


def save(model, optimizer, folder, mesh):
    state, states = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": states}, checkpoint_id=folder, process_group=mesh.get_group())


def resumed(folder, mesh):
    """A model and its optimiser, from a checkpoint of another number of ranks."""
    model = blank(mesh)
    optimizer = adam(model)
    state, states = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": states}, checkpoint_id=folder, process_group=mesh.get_group())
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=states)
    return model, optimizer


def saved_and_resumed(model, optimizer, folder):
    """The losses after a checkpoint of two ranks: theirs, those of one rank, and those of two from its checkpoint."""
    both = DeviceMesh("cpu", list(range(RANKS)))
    alone = DeviceMesh.from_group([dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()], "cpu")
    save(model, optimizer, f"{folder}.two", both)
    found = {"two": steps(model, optimizer)}
    if dist.get_rank() == 0:
        one = resumed(f"{folder}.two", alone)
        save(*one, f"{folder}.one", alone)
        found["one"] = steps(*one)
    dist.barrier()
    return found | {"again": steps(*resumed(f"{folder}.one", both))}


@torch.no_grad()
def evaluate(model):
    return model(torch.ones(4, WIDTH).bfloat16())


def run(folder):
    """What a rank finds: losses with codes in shards and whole; its bytes of codes, and all; results of models.

    loaded: the result of a model that was given the gathered state. compiled, alone: the result of a model whose first
    block is compiled, sharded and whole. quantised: the products of that block, with the formats of their weights.
    saved: losses after a checkpoint.
    """
    model = shard(build())
    optimizer, other = adam(model), shard(build(), codes=False)
    losses = steps(model, optimizer), steps(other, adam(other))
    parts = [p for p in model.parameters() if p.dtype == torch.uint8]
    assert parts and all(isinstance(part, DTensor) for part in parts)
    state = get_model_state_dict(model, options=FULL)
    fresh = blank()
    whole = dict(state)  # which is cut in place
    set_model_state_dict(fresh, state, options=FULL)
    found = {"losses": losses, "result": evaluate(model), "loaded": evaluate(fresh)}
    found |= {"mine": sum(p._local_tensor.nbytes for p in parts), "whole": sum(p.nbytes for p in parts)}
    backend = fp4compile.backend(RECIPE)
    fresh.blocks[0].compile(backend=backend)
    found["compiled"] = evaluate(fresh)
    if dist.get_rank() == 0:
        alone = build()
        alone.load_state_dict(whole)
        alone.bfloat16()
        alone.blocks[0].compile(backend=fp4compile.backend(RECIPE))
        found["alone"] = evaluate(alone)
    found["saved"] = saved_and_resumed(model, optimizer, folder)
    found["quantised"] = sorted((row.module, row.right) for row in backend.report.quantised)
    return found


def main(rank: int, output: str) -> None:
    torch.set_num_threads(1)
    process_groups.begin(f"{output}.store", rank, RANKS)
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        found = run(output)
    if rank == 0:
        torch.save(found, output)
    dist.barrier()
    dist.destroy_process_group()
