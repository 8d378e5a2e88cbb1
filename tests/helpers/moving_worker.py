"""Linear layers of tokens that come from other processes: what tests/passes/test_quantize_before_move.py compares.

python -m tests.helpers.moving_worker RANK OUTPUT RECIPE...

The ranks meet at the file OUTPUT.store. Each writes OUTPUT.RANK.pt: for each recipe, the results, the number of moves
that the pass changed, and the dtypes of what the collectives of the compiled graph move.
"""

import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch._inductor import config

import fp4compile
from tests.helpers import process_groups

RANKS, K = 2, 64
SENT = [[2, 6], [7, 3]]  # rows from each rank to each rank
_CALLS = re.compile(r'"(\w+)\[.*_c10d_functional\.(all_gather_into_tensor|all_to_all_single|all_reduce)\.')


def tokens(rank: int) -> torch.Tensor:
    rows = sum(SENT[rank])
    found = torch.randn(rows, K, generator=torch.Generator().manual_seed(rank))
    return (found * 2.0 ** torch.arange(rows).view(-1, 1)).bfloat16()


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, 32).bfloat16()


class Collected(nn.Module):
    """A layer of the first six tokens of all ranks, of the same as two sequences of which each rank has three tokens,
    and of the tokens that are sent to this rank."""

    def __init__(self, rank: int):
        super().__init__()
        self.linear = layer()
        self.sent, self.received = SENT[rank], [each[rank] for each in SENT]

    def forward(self, first, own):
        gathered = collectives.all_gather_tensor(first, 0, dist.group.WORLD)
        sequences = collectives.all_gather_tensor(first.view(2, 3, K), 1, dist.group.WORLD)
        exchanged = collectives.all_to_all_single(own, self.received, self.sent, dist.group.WORLD)
        return self.linear(gathered), self.linear(sequences), self.linear(exchanged)


def run(rank: int, recipe: str):
    """(results, the number of moves that the pass changed, dtypes by collective)."""
    torch._dynamo.reset()
    fp4compile.config.enabled_passes = ("quantize_before_move",)
    backend = fp4compile.backend(recipe, min_m=1, min_n=1, min_k=1)
    model = torch.compile(Collected(rank), backend=backend)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", FP4COMPILE_DUMP=folder):
        with torch.no_grad():
            results = model(tokens(rank)[:6], tokens(rank))
        *_, last = sorted(Path(folder).glob("*_quantize_before_move_after.py"))
        text = last.read_text()
    moved: dict[str, list[str]] = {}
    for dtype, name in _CALLS.findall(text):
        moved.setdefault(name, []).append(dtype)
    return results, backend.report.counts["quantize_before_move"], moved


def main(rank: int, output: str, *recipes: str) -> None:
    torch.set_num_threads(1)
    config.force_disable_caches = True  # a graph from a cache is not dumped
    process_groups.begin(f"{output}.store", rank, RANKS)
    torch.save({recipe: run(rank, recipe) for recipe in recipes}, f"{output}.{rank}.pt")
    dist.barrier()
    process_groups.end()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
