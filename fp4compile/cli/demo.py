"""The demo: train a small Llama-style model on real text, in bf16 and under a recipe, from the same seed and data.

    python -m fp4compile demo [--recipe R] [--device D] [--steps N]

It prints the report, the losses of both runs, and the SQNR of the quantised model's logits relative to bf16.
"""

import argparse
import itertools
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4compile.calibration.calibrate import calibrate
from fp4compile.cli import arguments
from fp4compile.dynamo_backend import Backend, backend
from fp4compile.recipe import Recipe
from fp4compile.report.decibels import decibels
from fp4compile.report.progress import with_bar

BATCH, LENGTH = 8, 64
LEARNING_RATE = 5e-3
WARMUP = 10


# ---------------------------------------------------------------- the model


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of the model. Every dimension that a matmul contracts is a multiple of 32, the longest block."""

    hidden: int = 128
    heads: int = 4
    inner: int = 384
    layers: int = 4
    length: int = LENGTH  # longest sequence
    vocabulary: int = 256  # bytes


class Attention(nn.Module):
    """Causal self-attention with rotary position embedding. x: [batch, tokens, hidden]."""

    def __init__(self, shape: ModelSizes):
        super().__init__()
        self.heads = shape.heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(shape.hidden, shape.hidden, bias=False))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """A gated MLP with SiLU. x: [batch, tokens, hidden]."""

    def __init__(self, shape: ModelSizes):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    """Attention and MLP, each behind a norm and with a residual connection."""

    def __init__(self, shape: ModelSizes):
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """The model: tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, shape: ModelSizes = ModelSizes()):  # noqa: B008 (frozen)
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        cos, sin = rotary(shape.hidden // shape.heads, shape.length)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)  # small, so that the first prediction is nearly uniform

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def rotary(width: int, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embedding, [length, width]."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., length, width] with rotary position embedding applied."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


# ---------------------------------------------------------------- the text


def text() -> tuple[Tensor, Tensor]:
    """(training, held-out) text: bytes of the standard library's sources, equal in every run."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:]


def batches(data: Tensor, device: torch.device, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless pairs (tokens, next tokens), [BATCH, LENGTH] each, from random positions of the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH, 1), generator=generator)
        window = data[starts + torch.arange(LENGTH + 1)].long().to(device)
        yield window[:, :-1], window[:, 1:]


# ---------------------------------------------------------------- training and measuring


@dataclass(frozen=True)
class Run:
    """A trained model, its loss at each step, its loss on held-out text, and the seconds that the training took."""

    model: nn.Module
    losses: list[float]
    held_out: float
    seconds: float


def train(compile_backend: str | Backend, name: str, steps: int, device: torch.device) -> Run:
    """Train the model from seed 0 under a backend of torch.compile, with fp32 parameters and bf16 autocast.

    name: for the progress bar.
    """
    start = time.monotonic()
    torch.manual_seed(0)
    model = Llama().to(device)
    compiled = torch.compile(model, backend=compile_backend)
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / WARMUP))
    training, held_out = text()
    losses = []
    for tokens, target in with_bar(list(itertools.islice(batches(training, device, seed=1), steps)), name):
        loss = loss_of(logits_of(compiled, tokens), target)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
        losses.append(loss.item())
    unseen = [loss_of(logits_of(compiled, tokens), target) for tokens, target in held_out_batches(held_out, device)]
    return Run(model, losses, torch.stack(unseen).mean().item(), time.monotonic() - start)


def logits_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    """The logits under bf16 autocast. Training and evaluation call this, so that one compiled graph serves both."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        return model(tokens)


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def held_out_batches(data: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    return itertools.islice(batches(data, device, seed=2), 4)


def logit_sqnr(model: nn.Module, compile_backend: Backend, device: torch.device) -> float:
    """The ratio of signal to quantisation noise of a model's logits, in dB.

    The signal is the uncompiled model's logits in bf16, the noise their difference from the compiled model's logits.
    """
    compiled = torch.compile(model, backend=compile_backend)
    signal = noise = 0.0
    for tokens, _ in held_out_batches(text()[1], device):
        exact = logits_of(model, tokens).double()
        signal += exact.square().sum().item()
        noise += (exact - logits_of(compiled, tokens).double()).square().sum().item()
    return decibels(signal, noise)


# ---------------------------------------------------------------- the command


def run(recipe: Recipe, device: torch.device, steps: int) -> None:
    """Train in bf16 and under the recipe, and print the comparison."""
    torch.set_num_threads(1)  # the tensors are so small that a second thread costs more than it saves
    baseline = train("inductor", "bf16", steps, device)
    if recipe.activation_scale == "static" and not recipe.static_scales:
        samples = [tokens for tokens, _ in itertools.islice(batches(text()[0], device, seed=3), 4)]
        recipe = calibrate(lambda tokens: logits_of(baseline.model, tokens), samples, recipe)
    compiling = backend(recipe)
    quantised = train(compiling, recipe.name, steps, device)
    print(compiling.report)
    print()
    print(f"{'loss':<24}{'bf16':>10}{recipe.name:>20}")
    for step in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
        print(f"{f'step {step + 1}':<24}{baseline.losses[step]:>10.3f}{quantised.losses[step]:>20.3f}")
    print(f"{'held-out text':<24}{baseline.held_out:>10.3f}{quantised.held_out:>20.3f}")
    print(f"{'seconds, with compiling':<24}{baseline.seconds:>10.0f}{quantised.seconds:>20.0f}")
    print()
    decibel = logit_sqnr(quantised.model, compiling, device)
    print(f"logits of the {recipe.name} model against the same weights in bf16, held-out text: SQNR {decibel:.1f} dB")


def add_command(commands: Any) -> None:
    """Add `demo` to the subcommands of `python -m fp4compile`."""
    parser = commands.add_parser("demo", help="compare training in bf16 and under a recipe")
    parser.add_argument(
        "--recipe", type=arguments.recipe, help="a named recipe, or a .toml or .json file (FP4COMPILE_RECIPE, or nvfp4)"
    )
    parser.add_argument("--device", type=_device, help="cpu or cuda (cuda where there is one)")
    parser.add_argument("--steps", type=arguments.positive, default=100, help="training steps (100)")
    parser.set_defaults(run=lambda args: run(args.recipe or arguments.recipe(None),
                                          args.device or _device(None), args.steps))  # fmt: skip


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise argparse.ArgumentTypeError(f"{name!r} is not available here; allowed are cpu and, with a GPU, cuda")
    return torch.device(name)
