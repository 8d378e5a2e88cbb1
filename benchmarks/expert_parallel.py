"""Experts on several GPUs: tokens go to their experts in bf16, or as codes.

Prefill of gate and up of a layer of experts with the sizes of Qwen3-30B-A3B. Each GPU of the host is a rank, and has a
part of the experts and of the tokens. A rank puts its tokens in the order of their experts, exchanges them with the
others (`all_to_all_single`), puts what arrives in the order of its experts, and multiplies (`F.grouped_mm`): one
compiled graph. The routing is drawn before. "packed" packs the experts (`pack_`); ", codes" switches on the pass
`quantize_before_move`.

"ms": the median time of a call. "sent MB": what a rank sends to others, where each sends as much to all, computed from
the inputs of the collectives as the profiler sees them. Equal sums show equal bits.

    python -m benchmarks.expert_parallel [--cases bf16 float8_rowwise "float8_rowwise, codes"] [--out FILE]
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn

import fp4compile
from benchmarks import common, ranks
from benchmarks.expert_dispatch import CODES, PACKED, PASS

CASES = ("bf16", "float8_rowwise", "float8_rowwise, codes", "packed nvfp4_one_level",
         "packed nvfp4_one_level, codes")  # fmt: skip


class Experts(nn.Module):
    """Gate and up of a rank's experts, in bf16.

    x: [tokens, K]. order: the token of each row that is sent. sent, received: rows to and from each rank. regrouped:
    the arrived row of each row that is multiplied. offs: the end of each expert's rows.
    """

    def __init__(self, count: int, n: int, k: int, sent: list[int], received: list[int]):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(count, n, k).mul_(k**-0.5).bfloat16())
        self.sent, self.received = sent, received

    def forward(
        self, x: torch.Tensor, order: torch.Tensor, regrouped: torch.Tensor, offs: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        arrived = collectives.all_to_all_single(x[order], self.received, self.sent, dist.group.WORLD)
        return F.grouped_mm(arrived[regrouped], self.gate_up.mT, offs=offs)


def main() -> None:
    parser = common.parser(__doc__)
    ranks.add_options(parser)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--picked", type=int, default=8, help="experts of a token")
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--hidden", type=int, default=2048)
    args = parser.parse_args()
    if args.tiny:
        args.tokens, args.experts, args.inner, args.hidden = 64, 16, 32, 64
    ranks.run(args, measure, ("tokens", "experts", "picked", "inner", "hidden"))


@torch.no_grad()
def measure(case: str, args: argparse.Namespace) -> dict:
    """The time of a call, and what its collectives send."""
    recipe = case.removeprefix(PACKED).removesuffix(CODES)
    rank = dist.get_rank()
    sent, received, *places = routing(args, rank)
    torch.manual_seed(rank)
    with torch.device(args.device):
        model = Experts(args.experts // args.ranks, 2 * args.inner, args.hidden, sent, received)
        x = torch.randn(args.tokens, args.hidden).bfloat16()
    inputs = x, *(place.to(args.device) for place in places)
    if case.startswith(PACKED):
        fp4compile.pack_(model, recipe, contracted={"gate_up": -1})
    fp4compile.config.enabled_passes = [PASS] * case.endswith(CODES)
    backend = "inductor" if recipe == "bf16" else fp4compile.backend(recipe, strict=True)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for _ in range(3):
        y = compiled(*inputs)
    found = ranks.collectives_of(lambda: compiled(*inputs), args.device)
    return {
        "ms": ranks.median_time(lambda: compiled(*inputs), args),
        "sent MB": sum(sent for _, sent in found.values()) / 1e6,
        "collectives": sum(count for count, _ in found.values()),
        "sum": y.double().sum().item(),
    }


def routing(
    args: argparse.Namespace, rank: int
) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows to each rank, rows from each rank, order, regrouped, offs), see `Experts`; all ranks draw all experts."""
    of_rank = args.experts // args.ranks
    drawn = []
    for each in range(args.ranks):
        chances = torch.rand(args.tokens, args.experts, generator=torch.Generator().manual_seed(each))
        drawn.append(chances.topk(args.picked).indices.flatten())
    order = drawn[rank].argsort(stable=True) // args.picked
    sent = (drawn[rank] // of_rank).bincount(minlength=args.ranks).tolist()
    arriving = [each.sort().values for each in drawn]
    arriving = [each[each // of_rank == rank] for each in arriving]
    experts = torch.cat(arriving) - rank * of_rank
    offs = experts.bincount(minlength=of_rank).cumsum(0).to(torch.int32)
    return sent, [len(each) for each in arriving], order, experts.argsort(stable=True), offs


if __name__ == "__main__":
    main()
