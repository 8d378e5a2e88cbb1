"""A training run whose last part has its forward products in bf16, as the published NVFP4 recipe has: two lines.

    python examples/precision_schedule.py --steps 200 --last 0.2

One model and one optimiser have two compilations. So parameters and the state of the optimiser go on where the recipe
changes.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fp4compile

LENGTH = 16


class Model(nn.Module):
    """Predicts a character of this file from the characters before it."""

    def __init__(self, width: int):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.up = nn.Linear(LENGTH * width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.lm_head = nn.Linear(width, 256)

    def forward(self, tokens):
        return self.lm_head(self.down(F.gelu(self.up(self.embed(tokens).flatten(1)))))


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Train with a recipe that changes before the end.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--last", type=float, default=0.2, help="the share of steps with forward products in bf16")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    model = Model(args.width).to(args.device, torch.bfloat16)
    backends = [fp4compile.backend("nvfp4_train"), fp4compile.backend("nvfp4_train", fprop_x=None, fprop_w=None)]
    first, last = (torch.compile(model, backend=backend) for backend in backends)  # 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=args.device)
    windows = text.unfold(0, LENGTH + 1, 1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(args.steps):
        compiled = first if step < round(args.steps * (1 - args.last)) else last  # 2
        batch = windows[torch.randint(len(windows), (64,), generator=generator).to(args.device)]
        loss = F.cross_entropy(compiled(batch[:, :-1]).float(), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    for backend in backends:
        print(backend.report.summary())
    return losses


if __name__ == "__main__":
    main()
