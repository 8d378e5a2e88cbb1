"""Experts of two ranks, which exchange tokens: by transformers, and by the operations that torchtitan issues.

`main` is what each rank runs, and tests/distributed/test_expert_parallel.py compares what it finds. The ranks meet at
the file FOLDER/store, and each writes what it finds to FOLDER/RANK.pt. Rank 0 computes the whole model, too.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fp4compile
from tests.helpers import process_groups, without_codegen
from tests.helpers.rank_worker import SIZES

RANKS, EXPERTS, TOP, WIDTH, INNER, TOKENS = 2, 4, 2, 64, 48, 32
BY_TRANSFORMERS = ("all_to_all", "all_reduce")
RECIPES = {"nvfp4_one_level": False, "nvfp4": True}  # whether gradients are taken
PLAN = {f"experts.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")} | {
    "experts": "ep_dispatch_experts"
}


def tokens(rank: int) -> torch.Tensor:
    """A batch of one rank. Ranks send each other different numbers of tokens."""
    return torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(rank)).bfloat16()


def with_values(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.bfloat16()


# ---------------------------------------------------------------- transformers


def has_transformers() -> bool:
    """Whether transformers is installed, in a version that has expert parallelism."""
    try:
        return importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
    except ModuleNotFoundError:
        return False


def of_transformers() -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP
    )
    config._experts_implementation = "grouped_mm"
    return with_values(Qwen3MoeSparseMoeBlock(config))


def run_of_transformers(mine: torch.Tensor, everyone: torch.Tensor) -> dict:
    """By kind of parallelism, what `run` returns of this rank's part of the experts."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    every = DeviceMesh("cpu", list(range(RANKS)))
    alone = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("data", "tensor"))["tensor"]
    found = {}
    for name, x, tensor in zip(BY_TRANSFORMERS, (mine, everyone), (alone, every), strict=True):
        model = apply_expert_parallelism(of_transformers(), every, tensor, PLAN, name)
        found[name] = run(model, x, "nvfp4_one_level")
    return found


# ---------------------------------------------------------------- torchtitan


class Experts(nn.Module):
    """SwiGLU of tokens that are sorted by expert."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3 = (nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x, tokens_per_expert):
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3))
        offs = torch.cumsum(tokens_per_expert, 0, dtype=torch.int32)
        gate, up = (F.grouped_mm(x, w.transpose(-2, -1), offs=offs) for w in (w1, w3))
        return F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=offs)


class ParallelExperts(Experts):
    """The experts of one rank, which exchanges tokens with the others as torchtitan's `ExpertParallel` does.

    Received rows are sorted by expert, each expert's rows are padded to a multiple of 8, and a row of zeros behind the
    received rows is what the padding is made of.
    """

    def __init__(self, whole: Experts, mesh: DeviceMesh):
        super().__init__()
        self.group, self.ranks = mesh.get_group(), mesh.size()
        for name, value in whole.named_parameters():
            shards = distribute_tensor(value.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(self, name, nn.Parameter(shards))

    def forward(self, x, tokens_per_expert):
        with torch.no_grad():
            received = all_to_all_single(tokens_per_expert, None, None, self.group).view(self.ranks, -1)
            sizes = torch.stack([tokens_per_expert.view(self.ranks, -1).sum(1), received.sum(1)])
            sent_sizes, received_sizes = sizes.tolist()
        x = all_to_all_single_autograd(x, received_sizes, sent_sizes, self.group)
        with torch.no_grad():
            order, padded = self.order(received, x.shape[0])
        with_zeros = torch.vstack((x, x.new_zeros(x.shape[-1])))
        found = super().forward(with_zeros[order, :], padded)
        back = torch.zeros_like(with_zeros).index_copy(0, order, found)[:-1]
        return all_to_all_single_autograd(back, sent_sizes, received_sizes, self.group)

    def order(self, received, rows):
        """The received row of each row of the experts' input, and the rows of each expert."""
        counts = received.sum(0)
        padded = (counts + 7) // 8 * 8
        local = received.shape[1]
        expert = torch.arange(local).repeat(self.ranks).repeat_interleave(received.reshape(-1), output_size=rows)
        by_expert = torch.argsort(expert, stable=True)
        begins, sorted_by = padded.cumsum(0) - padded, expert[by_expert]
        place = begins[sorted_by] + torch.arange(rows) - (counts.cumsum(0) - counts)[sorted_by]
        order = torch.full((rows + 8 * local,), rows).index_copy(0, place, by_expert)
        return order, padded


class Moe(nn.Module):
    """Tokens are sorted by their experts, as torchtitan sorts them, before `experts`."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()

    def forward(self, x):
        flat = x.view(-1, WIDTH)
        weights, chosen = F.softmax(self.gate(flat).float(), -1).topk(TOP)
        order = chosen.view(-1).argsort(stable=True)
        sorted_tokens = torch.gather(flat, 0, (order // TOP).reshape(-1, 1).expand(-1, WIDTH))
        counts = torch.zeros(EXPERTS, dtype=torch.long).scatter_add(0, chosen.view(-1), torch.ones_like(order))
        found = torch.zeros_like(sorted_tokens).index_copy(0, order, self.experts(sorted_tokens, counts))
        return (found.view(-1, TOP, WIDTH) * weights.unsqueeze(-1)).sum(1).to(x.dtype).view_as(x)


# ---------------------------------------------------------------- what is compared


def run(model: nn.Module, x: torch.Tensor, recipe: str, trained=False) -> dict:
    """The results of a compiled model, and what the report says.

    trained: whether to take a gradient, too.
    """
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe, **{**SIZES, "min_m": 0})
    called = torch.compile(model, backend=backend)
    with torch.no_grad():
        found = [called(x)]
    fused = {row.module: row.fused for row in backend.report.quantised}
    if trained:
        x = x.clone().requires_grad_()
        called(x).float().square().sum().backward()
        found.append(x.grad)
    products = {(row.module, row.product) for row in backend.report.quantised}
    return {"found": found, "fused": fused, "products": products}


def of_one_process(everyone: torch.Tensor) -> dict:
    """What `run` returns of the whole models, by kind."""
    found = (
        dict.fromkeys(BY_TRANSFORMERS, run(of_transformers(), everyone, "nvfp4_one_level"))
        if has_transformers()
        else {}
    )
    return found | {recipe: run(with_values(Moe()), everyone, recipe, trained) for recipe, trained in RECIPES.items()}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    process_groups.begin(folder / "store", rank)
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan sets it: sizes of exchanges stay in the graph
    every = DeviceMesh("cpu", list(range(RANKS)))
    mine, everyone = tokens(rank), torch.cat([tokens(each) for each in range(RANKS)])
    with pytest.MonkeyPatch.context() as patch:
        without_codegen.install(patch)
        found = run_of_transformers(mine, everyone) if has_transformers() else {}
        for recipe, trained in RECIPES.items():
            model = with_values(Moe())
            model.experts = ParallelExperts(model.experts, every)
            found[recipe] = run(model, mine, recipe, trained)
        if rank == 0:
            torch.save(of_one_process(everyone), folder / "alone.pt")
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
