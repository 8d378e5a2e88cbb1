"""Small models with experts, which the tests pack: every form in which products of experts are written."""

import torch
import torch.nn.functional as F

import fp4compile
from fp4compile.recipe import named

EXPERTS, N, K = 3, 48, 80
OFFS = torch.tensor([3, 3, 20], dtype=torch.int32)
IDS = torch.tensor([2, 0, 2, 2, 1])
SCALE = 0.002


def values(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Forms(torch.nn.Module):
    """`up_proj` in every form; stored [experts, out, in], or [experts, in, out] where it is transposed."""

    def __init__(self, is_transposed, k=K):
        super().__init__()
        self.is_transposed, self.k = is_transposed, k
        shape = (k, N) if is_transposed else (N, k)
        self.up_proj = torch.nn.Parameter(values(EXPERTS, *shape, seed=2) * torch.tensor([1, 8, 64]).view(-1, 1, 1))

    def _first(self):
        """[experts, in, out]"""
        return self.up_proj if self.is_transposed else self.up_proj.transpose(-2, -1)

    def forward(self, x):
        w = self._first()
        rows = x.view(EXPERTS, -1, self.k)
        chosen = self.up_proj[IDS] if self.is_transposed else self.up_proj[IDS].transpose(1, 2)
        few = x[: len(IDS)]
        return (
            F.grouped_mm(x[:20], w, offs=OFFS),
            torch.bmm(rows, w),
            torch.bmm(rows, w[1].expand(EXPERTS, -1, -1)),
            torch.bmm(w.transpose(1, 2), rows.transpose(1, 2)),
            torch.bmm(few.unsqueeze(1), chosen),
            torch.bmm(chosen.transpose(1, 2), few.unsqueeze(-1)),
            *(x @ self._first()[expert] for expert in range(EXPERTS)),
        )


class Around(torch.nn.Module):
    """Experts inside a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        return self.experts(x)


def tokens(k=K):
    return values(21, k) * 2.0 ** torch.arange(21).fmod(5).view(-1, 1).bfloat16()


def recipe_of(name):
    """A recipe with no lower limits, and with the static scales that it wants."""
    chosen = named(name).replace(min_m=1, min_n=1, min_k=1)
    return chosen.replace(static_scales={"experts.up_proj": SCALE}) if name == "nvfp4_static" else chosen


def packed(model, name, **options):
    """(the model, packed; the report)."""
    report = fp4compile.pack_(model, recipe_of(name), **options)
    return model, report


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)
