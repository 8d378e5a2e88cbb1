"""An ordinary training script with fp4compile's options added: three lines, marked below.

    python examples/train_argparse.py --fp4compile-recipe mxfp8
    python examples/train_argparse.py --fp4compile-recipe nvfp4 --fp4compile-skip-last 1 --fp4compile-skip '*linear2'
    python examples/train_argparse.py --fp4compile-recipe examples/recipe.toml
    python examples/train_argparse.py                               # no recipe: plain torch.compile

It teaches a small transformer to continue its own source text.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fp4compile

LENGTH = 64


class Model(nn.Module):
    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        self.lm_head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.lm_head(x)


def main(argv: list[str] | None = None) -> list[float]:
    """Train; returns the loss of each step."""
    parser = argparse.ArgumentParser(description="Train a small transformer.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    fp4compile.add_arguments(parser)  # 1
    args = parser.parse_args(argv)
    recipe = fp4compile.Recipe.from_args(args)  # 2

    torch.manual_seed(0)
    model = Model(args.width, args.blocks).to(args.device)
    backend = fp4compile.backend(recipe) if recipe else "inductor"  # 3
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=args.device)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(args.steps):
        starts = torch.randint(len(text) - LENGTH, (8, 1), generator=generator)
        window = text[(starts + torch.arange(LENGTH + 1)).to(args.device)]
        with torch.autocast(args.device, dtype=torch.bfloat16):
            logits = compiled(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    if recipe:
        print(backend.report.summary())
    return losses


if __name__ == "__main__":
    main()
