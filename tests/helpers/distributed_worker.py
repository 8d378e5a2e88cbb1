"""Training on two processes, and the same training in one: what tests/end_to_end/test_distributed.py runs and compares.

`worker` is what each process runs. A case is wrapper/dtype/recipe, as in fsdp/bfloat16/mxfp8. The processes meet at the
file `output`.store.
"""

import copy
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fp4compile
from tests.helpers import process_groups, without_codegen
from tests.helpers.graphs import Keeping

RANKS, STEPS, BATCH, TOKENS, VOCABULARY = 2, 4, 4, 32, 64
LEARNING_RATE = 0.2
PACKED = ("nvfp4", "nvfp4_weight_only", "mxfp8", "float8_rowwise")


@dataclass(frozen=True)
class Case:
    """wrapper: "fsdp" or "ddp". dtype: of the parameters in forward and backward; FSDP keeps float32 ones beside."""

    wrapper: str
    dtype: str
    recipe: str

    @classmethod
    def parse(cls, text: str) -> "Case":
        return cls(*text.split("/"))


class Block(nn.Module):
    def __init__(self, width=64, hidden=128):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x) * 1  # no view: FSDP2 hangs its backward hook on what comes out


def build(device) -> Net:
    torch.manual_seed(0)
    return Net().to(device)


def batches(device) -> torch.Tensor:
    """Tokens of every step, [STEPS, BATCH, TOKENS + 1]; a sequence is a whole number of blocks."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (STEPS, BATCH, TOKENS + 1), generator=generator).to(device)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def evaluate(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model, tokens)


@dataclass
class Run:
    """Training loss of each step, the loss on the first batch after each step, (module, product) of what was quantised,
    and the bytes that one rank keeps between forward and backward.

    freed: whether FSDP2's whole parameters were gone after the forward, and after the backward, of each step. graphs:
    how many the backend compiled.
    """

    losses: list[float]
    evaluated: list[float]
    quantised: list[tuple[str, str]] = field(default_factory=list)
    kept: int = 0
    freed: list[bool] = field(default_factory=list)
    graphs: int = 0


# ---------------------------------------------------------------- two processes


def train(case: Case, rank: int, device) -> Run:
    """One rank's part of the training; the losses are means over the ranks."""
    backend = fp4compile.backend(case.recipe, strict=True)
    model = build(device)
    run = Run([], [])
    dtype = getattr(torch, case.dtype)
    if case.wrapper == "ddp":
        # Buckets that a block fills, so that Dynamo's DDP optimizer splits the graph. The first has no other setting.
        dist._DEFAULT_FIRST_BUCKET_BYTES = 75_000
        wrapped = DistributedDataParallel(model.to(dtype), bucket_cap_mb=0.075)
        called, whole = torch.compile(wrapped, backend=backend), []
    else:
        policy = MixedPrecisionPolicy(dtype, torch.float32) if case.dtype != "float32" else MixedPrecisionPolicy()
        for layer in model.layers:
            layer.compile(backend=backend)
            fully_shard(layer, mp_policy=policy)
        called = fully_shard(model, mp_policy=policy, reshard_after_forward=True)
        whole = [storage for part in (model, *model.layers) for storage in unsharded(part)]
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    mine = batches(device).chunk(RANKS, dim=1)[rank]
    for tokens in mine:
        with Keeping() as keeping:
            loss = loss_of(called, tokens)
        run.kept = keeping.size(model.parameters())
        run.freed.append(not any(storage.size() for storage in whole))
        loss.backward()
        run.freed.append(not any(storage.size() for storage in whole))
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(mean(loss))
        run.evaluated.append(mean(evaluate(called, mine[0])))
    run.quantised = sorted((row.module, row.product) for row in backend.report.quantised)
    run.graphs = backend.report.graphs
    return run


def unsharded(module) -> list[torch.UntypedStorage]:
    """The storages that FSDP2 fills with the whole parameters of a module, and empties."""
    module.unshard()
    whole = [parameter for parameter in module.parameters() if not isinstance(parameter, DTensor)]
    storages = [parameter.untyped_storage() for parameter in whole]
    assert storages and all(storage.size() for storage in storages)
    module.reshard()
    return storages


def packed(recipe: str, device: torch.device) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """The buffers that DDP broadcasts for a model with a packed layer, and gradients with DDP and without.

    gloo cannot send float8 numbers.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 96), nn.Sequential(nn.Linear(96, 64)), nn.BatchNorm1d(64)).to(device)
    fp4compile.pack_(model[1], recipe)
    plain, x = copy.deepcopy(model), torch.randn(8, 96, device=device)
    wrapped = DistributedDataParallel(model)
    for each in (wrapped, plain):
        each(x).sum().backward()
    return list(wrapped.named_module_buffers), model[0].weight.grad, plain[0].weight.grad


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return (total / RANKS).item()


def worker(rank: int, device: str, output: str, cases: list[str]) -> None:
    from tests.helpers import quantised_gathers  # which imports this file

    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    communication = "nccl" if device == "cuda" else "gloo"
    process_groups.begin(f"{output}.store", rank, RANKS, communication)
    runs = {}
    for case in cases:
        torch._dynamo.reset()
        with pytest.MonkeyPatch.context() as patch:
            if device == "cpu" and Case.parse(case).dtype == "float32":  # the other one has Inductor's code
                without_codegen.install(patch)
            runs[case] = train(Case.parse(case), rank, torch.device(device)).__dict__
    runs["gathers"] = quantised_gathers.run(rank, torch.device(device))
    runs |= {recipe: packed(recipe, torch.device(device)) for recipe in PACKED}
    if rank == 0:
        torch.save(runs, output)
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------- one process


def train_alone(case: Case, device, parts: int) -> Run:
    """The same training in one process. parts: 1 quantises the global batch, 2 each rank's share by itself.

    Parameters of another dtype are copies of float32 ones where FSDP has them so, and one set of them under DDP.
    """
    torch._dynamo.reset()
    dtype = getattr(torch, case.dtype)
    master = build(device) if case.wrapper == "fsdp" else build(device).to(dtype)
    model = copy.deepcopy(master).to(dtype)
    backend = fp4compile.backend(case.recipe, strict=True)
    if case.wrapper == "fsdp":
        called = model
        for layer in model.layers:
            layer.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(master.parameters(), lr=LEARNING_RATE)
    run = Run([], [])
    everything = batches(device)
    for tokens in everything:
        loss, run.kept = step(called, model, master, tokens.chunk(parts), case.wrapper)
        run.losses.append(loss)
        optimizer.step()
        load(model, master)
        shares = [evaluate(called, share) for share in everything[0].chunk(parts)]
        run.evaluated.append(torch.stack(shares).mean().item())
    run.quantised = sorted((row.module, row.product) for row in backend.report.quantised)
    return run


def step(called, model, master, shares, wrapper: str) -> tuple[float, int]:
    """Gradients of the global batch into `master`; returns the loss and the bytes that a share keeps for its backward.

    Every share starts from the same random state, as on ranks of equal seed.
    """
    state, cuda_state = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    losses, gradients = [], []
    for share in shares:
        torch.set_rng_state(state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        model.zero_grad()
        with Keeping() as keeping:
            loss = loss_of(called, share)
        kept = keeping.size(model.parameters())
        loss.backward()
        losses.append(loss.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    reduced = torch.float32 if wrapper == "fsdp" else None  # DDP reduces in the gradients' own dtype
    for parameter, *parts in zip(master.parameters(), *gradients, strict=True):
        parameter.grad = sum(part.to(reduced or part.dtype) / len(parts) for part in parts).to(parameter.dtype)
    return torch.stack(losses).mean().item(), kept


@torch.no_grad()
def load(model, master) -> None:
    for parameter, source in zip(model.parameters(), master.parameters(), strict=True):
        parameter.copy_(source)
