"""A training script that writes checkpoints and can be killed and resumed: what tests/end_to_end/test_faults.py runs.

    python tests/helpers/resume_worker.py RECIPE DEVICE CHECKPOINT LOSSES [KILL]

It goes on from CHECKPOINT if that exists, and kills itself in step KILL, after the backward.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

import fp4compile

STEPS, EVERY = 6, 2  # steps in all; steps from checkpoint to checkpoint


@contextmanager
def repeatable() -> Iterator[None]:
    """While this lasts, all processes compile the same reductions: else Inductor chooses them by their times.

    docs/training.md tells users to do this.
    """
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@repeatable()
def train(recipe: str, device: str, checkpoint: Path, losses: Path, kill: int | None = None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    compiled = torch.compile(model, backend=fp4compile.backend(recipe, strict=True))
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        if device == "cuda":
            torch.cuda.set_rng_state(state["cuda_random"])
        first = state["step"]
    for step in range(first, STEPS):
        x = torch.randn(32, 64, device=device)
        loss = (compiled(x) - x.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        with losses.open("a") as file:
            print(step, loss.item().hex(), file=file)
        if (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            state["random"] = torch.get_rng_state()
            if device == "cuda":
                state["cuda_random"] = torch.cuda.get_rng_state()
            torch.save(state, checkpoint)


if __name__ == "__main__":
    name, place, path, out, *step = sys.argv[1:]
    train(name, place, Path(path), Path(out), *map(int, step))
