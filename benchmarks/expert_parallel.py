"""A training step of one layer of experts of Qwen3-30B-A3B under expert parallelism: tokens are exchanged in bf16.

Each GPU of the host is a rank, which has a part of the experts and a batch of its own. A router picks eight experts a
token; each rank sends a token's row to the ranks of its experts (`all_to_all_single`), multiplies the rows that arrive
by `F.grouped_mm`, and sends the results back. The multiplication of rows that have arrived is compiled, as one graph
for one fixed batch: the exchange needs its sizes on the host. Forward and backward pass with all gradients; nothing is
reduced between ranks.

A case is a recipe. "ms": the median time of a step. "experts ms": the same without the exchange, for the rows that this
rank receives. "sent MB": what a rank sends in a step, as the profiler sees it.

    python -m benchmarks.expert_parallel [--cases bf16 float8_rowwise] [--tokens 8192] [--out FILE]
"""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd

import fp4compile
from benchmarks import common, ranks

CASES = ("bf16", "float8_rowwise", "float8_block", "mxfp8", "nvfp4_train")
TINY = {"experts": 8, "hidden": 128, "inner": 64, "tokens": 64, "picked": 2}


class LocalExperts(nn.Module):
    """Gated MLPs of one rank. rows: [rows, hidden], sorted by expert; offs: where the rows of each expert end."""

    def __init__(self, count: int, hidden: int, inner: int):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, 2 * inner, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(count, hidden, inner) * inner**-0.5)

    def forward(self, rows: Tensor, offs: Tensor) -> Tensor:
        gate, up = F.grouped_mm(rows, self.gate_up.mT, offs=offs).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down.mT, offs=offs)


class ExchangedExperts(nn.Module):
    """A router, and experts of all ranks. x: [tokens, hidden] of this rank."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.router = nn.Linear(args.hidden, args.experts, bias=False)
        self.local = LocalExperts(args.experts // args.ranks, args.hidden, args.inner)
        self.picked, self.ranks = args.picked, args.ranks

    def forward(self, x: Tensor) -> Tensor:
        share, expert = self.router(x).float().softmax(-1).topk(self.picked, dim=-1)
        order = expert.flatten().argsort(stable=True)
        counts = expert.flatten().bincount(minlength=self.router.out_features)
        group = dist.group.WORLD
        arriving = all_to_all_single(counts, None, None, group).view(self.ranks, -1)
        sent, received = counts.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        rows = all_to_all_single_autograd(x[order // self.picked], received, sent, group)
        local = torch.arange(arriving.shape[1], device=x.device).repeat(self.ranks)
        by_expert = local.repeat_interleave(arriving.flatten(), output_size=len(rows)).argsort(stable=True)
        rows = rows[by_expert]
        rows = self.local(rows, arriving.sum(0).cumsum(0).to(torch.int32))
        rows = torch.empty_like(rows).index_copy(0, by_expert, rows)
        rows = all_to_all_single_autograd(rows, sent, received, group)
        rows = rows * share.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(x).index_add(0, order // self.picked, rows)


def main() -> None:
    parser = common.parser(__doc__)
    ranks.add_options(parser)
    parser.add_argument("--cases", nargs="+", default=CASES)
    for name, size in (("experts", 128), ("hidden", 2048), ("inner", 768), ("tokens", 8192), ("picked", 8)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
    ranks.run(args, measure, tuple(TINY))


def measure(case: str, args: argparse.Namespace) -> dict:
    """The time of a step with the exchange and without, and what is sent."""
    torch.manual_seed(dist.get_rank())
    with torch.device(args.device):
        layer = ExchangedExperts(args).bfloat16()
        x = torch.randn(args.tokens, args.hidden, dtype=torch.bfloat16, requires_grad=True)
    backend = "inductor" if case == "bf16" else fp4compile.backend(case, strict=True)
    layer.local.compile(backend=backend, dynamic=False)
    given: list[Tensor] = []
    layer.local.register_forward_pre_hook(lambda _, inputs: given.__setitem__(slice(None), inputs))
    step = training_step_of(layer, [x])
    step()
    rows, offs = given[0].detach().requires_grad_(), given[1]
    calls = ranks.collectives_of(step, args.device)
    return {
        "ms": ranks.median_time(step, args),
        "experts ms": ranks.median_time(training_step_of(layer.local, [rows, offs]), args),
        "rows": len(rows), "sent MB": sum(sent for _, sent in calls.values()) / 1e6,
    }  # fmt: skip


def training_step_of(module: nn.Module, inputs: list[Tensor]) -> Callable[[], None]:
    """A function that runs a module's forward and backward pass."""
    gradient = torch.randn_like(inputs[0])

    def step() -> None:
        module(*inputs).backward(gradient)
        for tensor in (*module.parameters(), inputs[0]):
            tensor.grad = None

    return step


if __name__ == "__main__":
    main()
