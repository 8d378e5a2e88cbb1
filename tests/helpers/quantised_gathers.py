"""FSDP2 gathers codes, or the whole weights: the same training on the ranks of a process group, once with each.

`distributed_worker` runs it; tests/end_to_end/test_distributed.py compares.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import fp4compile
from fp4compile.distributed import gather_quantized_
from fp4compile.distributed.whole import GatheredWeight
from tests.helpers import distributed_worker, without_codegen
from tests.helpers.graphs import Keeping

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class Counting(DefaultAllGather):
    """FSDP2's all-gather, which notes the bytes that a rank sends."""

    def __init__(self):
        self.sent: list[int] = []

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.sent.append(input_tensor.numel() * input_tensor.element_size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


def weights(device, frozen=()) -> distributed_worker.Net:
    """The last rank has the largest weights: no other rank would find the scale of the whole weight alone."""
    model = distributed_worker.build(device)
    with torch.no_grad():
        for layer in model.layers:
            layer.up.weight[-layer.up.out_features // distributed_worker.RANKS :] *= 5
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


class Training:
    """A sharded model, its optimiser, and what its first block's gathers sent."""

    def __init__(self, device, recipe: str, codes: bool, *, frozen=(), checkpointed=False):
        torch._dynamo.reset()
        self.backend = fp4compile.backend(recipe, strict=True)
        self.model, self.counted = weights(device, frozen), Counting()
        for i, layer in enumerate(self.model.layers):
            layer.compile(backend=self.backend)
            if checkpointed:
                self.model.layers[i] = checkpoint_wrapper(layer)
            fully_shard(self.model.layers[i], mp_policy=POLICY, reshard_after_forward=i == 0)
        fully_shard(self.model, mp_policy=POLICY)
        self.model.layers[0].set_custom_all_gather(self.counted)
        if codes:
            gather_quantized_(self.model, recipe, recompute=checkpointed, over_nvlink=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)

    def step(self, *parts: torch.Tensor) -> list[float]:
        """One step of the optimiser; gradients of the parts are accumulated on the rank, in unsharded weights."""
        losses = []
        for i, tokens in enumerate(parts):
            last = i == len(parts) - 1
            self.model.set_requires_gradient_sync(last)
            self.model.set_reshard_after_backward(last)
            loss = distributed_worker.loss_of(self.model, tokens)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses


def train(device, data, codes: bool) -> dict:
    """Steps with accumulated gradients and frozen weights; a resumed step; what is in a checkpoint."""
    training = Training(device, "nvfp4_train", codes, frozen=[f"layers.{i}.down.weight" for i in range(2)])
    with Keeping() as keeping:
        first = training.model(data[0][:, :-1])
    whole = [one for one in training.model.parameters() if isinstance(one, GatheredWeight)]  # of the second block
    codes_of = [part for one in whole for part in one.parts().values()]
    kept = keeping.size([*training.model.parameters(), *codes_of])
    first.sum().backward()
    training.optimizer.zero_grad()
    losses, sent = [training.step(data[0], data[1])], list(training.counted.sent)
    saved = copy.deepcopy(get_state_dict(training.model, training.optimizer))
    random = torch.get_rng_state(), torch.cuda.get_rng_state() if device.type == "cuda" else None
    losses.append(training.step(data[2]))
    state = get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for parameter in training.model.parameters():  # the checkpoint brings back what this destroys
        parameter.detach().fill_(0.1)
    set_state_dict(training.model, training.optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
    torch.set_rng_state(random[0])
    if random[1] is not None:
        torch.cuda.set_rng_state(random[1])
    resumed = training.step(data[2])
    return {
        "first": first.detach().cpu(), "kept": kept, "losses": losses, "resumed": resumed, "sent": sent, "state": state,
        "products": sorted((row.module, row.product, row.reason) for row in training.backend.report.rows),
    }  # fmt: skip


def checkpointed(device, data, codes: bool) -> dict:
    training = Training(device, "mxfp8", codes, checkpointed=True)
    return {"losses": [training.step(tokens) for tokens in data[:2]], "sent": training.counted.sent}


def alone(device, tokens) -> torch.Tensor:
    """The logits of one process that has the whole model."""
    torch._dynamo.reset()
    model = weights(device).to(torch.bfloat16)
    for layer in model.layers:
        layer.compile(backend=fp4compile.backend("nvfp4_train"))
    return model(tokens[:, :-1]).detach().cpu()


def decided(device) -> set[str | None]:
    """Why a rank gathers no codes, where the caller of `gather_quantized_` leaves that to the link."""
    model = weights(device)
    for layer in model.layers:
        fully_shard(layer, mp_policy=POLICY)
    return {row.reason for row in gather_quantized_(model, "nvfp4_train").rows}


def run(rank: int, device) -> list[dict]:
    """What every rank found. On a CPU no C++ is compiled: tests/distributed has Inductor's code for such weights."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            without_codegen.install(patch)
        return _run(rank, device)


def _run(rank: int, device) -> list[dict]:
    data = distributed_worker.batches(device).chunk(distributed_worker.RANKS, dim=1)[rank]
    mine = {"alone": alone(device, data[0]), "decided": decided(device)}
    for kind, of in (("train", train), ("checkpointed", checkpointed)):
        mine[kind] = {codes: of(device, data, codes) for codes in (False, True)}
    everyone: list = [None] * distributed_worker.RANKS
    dist.all_gather_object(everyone, mine)
    return everyone
