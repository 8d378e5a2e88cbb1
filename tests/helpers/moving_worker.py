"""Linear layers of tokens that come from other processes, which `rank_worker` runs on two ranks; and of one process."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn

import fp4compile
from fp4compile.recipe import resolve
from tests.helpers.arguments import times

K = 64
ROWS = 6  # of each rank
_CALLS = re.compile(r'"(\w+)\[.*_c10d_functional\.(all_gather_into_tensor)\.')


def tokens(rank: int) -> torch.Tensor:
    found = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(rank))
    return (found * 2.0 ** torch.arange(ROWS).view(-1, 1)).bfloat16()


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, 32).bfloat16()


class Collected(nn.Module):
    """A layer of the tokens of all ranks, and of the same as two sequences of which each rank has half."""

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self.linear, self.group = layer(), group

    def forward(self, own):
        gathered = collectives.all_gather_tensor(own, 0, self.group)
        # As DTensor gathers along the second dimension. torch 2.11 breaks the graph at its function's own gather there.
        sequences = collectives.all_gather_tensor(own.view(2, -1, K), 0, self.group)
        sequences = torch.cat(sequences.chunk(2), 1)
        return self.linear(gathered), self.linear(sequences)


def run(rank: int, recipe: str, group: dist.ProcessGroup, device: str):
    """(results, the number of gathers that the pass changed, the dtypes of what is gathered)."""
    torch._dynamo.reset()
    backend = fp4compile.backend(recipe, min_m=1, min_n=1, min_k=1)
    model, own = torch.compile(Collected(group).to(device), backend=backend), tokens(rank).to(device)
    with recorded() as moved, torch.no_grad():
        results = model(own)
    return results, backend.report.counts["quantize_before_gather"], moved


@contextmanager
def recorded() -> Iterator[dict[str, list[str]]]:
    """The dtypes of what each collective moves, by its name, of the graphs that are compiled in here."""
    moved: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict("os.environ", FP4COMPILE_DUMP=folder):
        yield moved
        graphs = [path.read_text() for path in sorted(Path(folder).glob("*_quantize_before_gather_after.py"))]
    for text in graphs:
        for dtype, name in _CALLS.findall(text):
            moved.setdefault(name, []).append(dtype)


def alone(rows: torch.Tensor, recipe: str, device: str) -> torch.Tensor:
    """What the ops compute of all rows in one process."""
    linear, chosen, operands, rows = layer().to(device), resolve(recipe), [], rows.to(device)
    for each, fmt in ((rows.reshape(-1, K), chosen.fprop_x), (linear.weight.detach(), chosen.fprop_w)):
        data, scales, outer = torch.ops.fp4compile.quantize(each, fmt)
        operands.append((data, scales, outer if outer.shape != (0,) else None, fmt))
    product = times(*operands, bias=linear.bias.detach())
    return product.view(*rows.shape[:-1], -1).cpu()
