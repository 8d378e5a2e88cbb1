"""A layer of experts for the models that benchmarks train: routed, sorted, and multiplied by `F.grouped_mm`."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4compile.cli.demo import ModelSizes


class ExpertsMLP(nn.Module):
    """Gated MLPs, of which a router picks two a token. x: [batch, tokens, hidden]; as `demo.MLP` with as much work.

    count: experts. The inner size of each is half of the shape's.
    """

    def __init__(self, shape: ModelSizes, count: int, picked: int = 2):
        super().__init__()
        inner = shape.inner // picked
        self.picked = picked
        self.router = nn.Linear(shape.hidden, count, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * inner, shape.hidden) * shape.hidden**-0.5)
        self.down_proj = nn.Parameter(torch.randn(count, shape.hidden, inner) * inner**-0.5)
        nn.init.normal_(self.router.weight, std=shape.hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        share, expert = self.router(tokens).float().softmax(-1).topk(self.picked, dim=-1)
        share = share / share.sum(-1, keepdim=True)
        order = expert.flatten().argsort(stable=True)
        offs = (expert.flatten()[:, None] == torch.arange(len(self.down_proj), device=x.device)).sum(0)
        offs = offs.cumsum(0).to(torch.int32)
        rows = tokens[order // self.picked].bfloat16()
        gate, up = F.grouped_mm(rows, self.gate_up_proj.bfloat16().mT, offs=offs).chunk(2, dim=-1)
        rows = F.grouped_mm(F.silu(gate) * up, self.down_proj.bfloat16().mT, offs=offs)
        rows = rows * share.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(tokens).index_add(0, order // self.picked, rows.to(tokens.dtype)).view_as(x)
