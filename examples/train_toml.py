"""A training script whose settings are a TOML file; its table [fp4compile] is the recipe.

    python examples/train_toml.py examples/train.toml

It fits a small MLP to a random one.
"""

import sys
import tomllib
from pathlib import Path

import torch
from torch import nn

import fp4compile


def mlp(width: int, hidden: int, layers: int) -> nn.Sequential:
    sizes = [width, *[hidden] * (layers - 1), width]
    linears = [nn.Linear(one, other) for one, other in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*[module for linear in linears for module in (linear, nn.GELU())][:-1])


def main(path: str) -> list[float]:
    """Train as the file says; returns the loss of each step."""
    config = tomllib.loads(Path(path).read_text())
    settings = config["training"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    teacher, model = (mlp(**config["model"]).to(device) for _ in range(2))
    backend = fp4compile.backend(fp4compile.Recipe.from_toml(path)) if "fp4compile" in config else "inductor"
    compiled = torch.compile(model, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings["learning_rate"])
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(settings["steps"]):
        x = torch.randn(settings["batch"], config["model"]["width"], generator=generator).to(device)
        with torch.no_grad():
            target = teacher(x)
        loss = (compiled(x) - target).square().mean() / target.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1}: loss {losses[-1]:.4f}")
    if backend != "inductor":
        print(backend.report)
    return losses


if __name__ == "__main__":
    main(sys.argv[1])
